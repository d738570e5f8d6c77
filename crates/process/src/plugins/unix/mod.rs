//! Unix sockets: listening, connected, with what is queued in them and descriptors under way.

mod make;
mod name;
mod save;
mod scratch;
mod waiting;

use crate::plugins::error::PluginError;
use crate::plugins::job::{Capture, Found, Job};
use crate::plugins::path::SavedPath;
use crate::plugins::sockets::filter;
use crate::plugins::sockets::options::SocketOption;
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin};
use name::Name;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct Unix;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Socket {
    description: u32,
    /// `SOCK_STREAM` and so on.
    kind: i32,
    options: Vec<SocketOption>,
    name: Option<Name>,
    /// The permissions of the file that its name made, if that is there.
    file: Option<u32>,
    /// Its owner and group.
    #[serde(default)]
    owner: Option<(u32, u32)>,
    /// Where names without a slash in front are from.
    folder: SavedPath,
    role: Role,
    /// 1: nothing can be received any more; 2: nothing sent.
    shutdown: u8,
    /// The instructions of its filter.
    #[serde(default)]
    filter: Option<Vec<u8>>,
    queue: Vec<Message>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Role {
    Idle,
    Listening {
        backlog: u32,
    },
    /// Waits to be accepted.
    Waiting {
        listener: u32,
    },
    /// `None`: the other end is outside of the job, or gone.
    Connected {
        peer: Option<u32>,
    },
    /// A datagram socket that sends to this name.
    Toward(Name),
    /// A datagram socket that sends to this one, whose name leads to it no more.
    TowardPeer {
        peer: u32,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Message {
    data: Blob,
    from: Option<Name>,
    /// Descriptions of the descriptors that go with it.
    passed: Vec<u32>,
}

impl Plugin for Unix {
    fn name(&self) -> &'static str {
        "unix"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match file.socket.is_some_and(|kind| kind.domain == libc::AF_UNIX) {
            true => {
                filter::refusal(file, job).map_or_else(|| waiting::claim(file, job), Claim::Refused)
            }
            false => Claim::No,
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        save::save(capture, mine)
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        make::make(world.parse(state)?, world)
    }
}
