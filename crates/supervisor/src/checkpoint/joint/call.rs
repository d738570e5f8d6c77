//! The call to a checkpoint, which whoever conducts it publishes and every part answers.

use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::meeting::{Builds, Meeting, Role, Step};
use crate::job::joint::{Joint, SPACE};
use crate::services::control::Order;
use kedge_control::joblog::COORDINATOR;
use kedge_control::warn;
use kedge_coordinator::{Client, ClientError, Notice};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// How long a call is waited for at a time; then the wait begins again.
const WAIT_TIMEOUT: Duration = Duration::from_secs(600);
/// Before a coordinator is looked for once more.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Call {
    /// No other has it.
    pub(super) id: String,
    /// Where the images of the parts go.
    pub(super) folder: PathBuf,
    /// How many there are.
    pub(super) parts: u32,
    pub(super) order: Order,
    #[serde(default)]
    pub(super) builds: Builds,
}

impl Call {
    /// Where it is published.
    pub(super) fn place() -> Result<Notice, ClientError> {
        Notice::of_job(SPACE, b"checkpoint")
    }
}

/// Answers one call after the other.
pub(super) fn answer_calls(joint: &Joint, checkpointer: &Arc<Checkpointer>) {
    let mut last = String::new();
    loop {
        let end = joint
            .join_as_part()
            .and_then(|client| answer_with(joint, checkpointer, client, &mut last));
        if let Err(error) = end {
            warn!(target: COORDINATOR, checkpointer.log, "{}: {error}", joint.job);
        }
        thread::sleep(PAUSE);
    }
}

fn answer_with(
    joint: &Joint,
    checkpointer: &Arc<Checkpointer>,
    mut client: Client,
    last: &mut String,
) -> Result<(), ClientError> {
    let place = Call::place()?;
    let mut after = client.revision();
    loop {
        let Some(found) = client.look(&place, after, WAIT_TIMEOUT)? else { continue };
        after = found.revision;
        let Ok(call) = serde_json::from_slice::<Call>(&found.value) else { continue };
        // Said again, to a coordinator that has not heard it.
        if call.id == *last {
            continue;
        }
        last.clone_from(&call.id);
        client = answer(joint, checkpointer, client, call);
    }
}

/// Why a part on another host cannot take part.
fn unseen(joint: &Joint, order: &Order) -> String {
    let folder = order.dir.as_deref().and_then(Path::parent).unwrap_or(Path::new("/"));
    format!(
        "{} does not find the image's folder on its host: let --dir or --ckpt-dir, now {}, be a folder that all hosts share",
        joint.part,
        folder.display()
    )
}

fn answer(joint: &Joint, checkpointer: &Arc<Checkpointer>, client: Client, call: Call) -> Client {
    let role = Role::Part(call.builds);
    let meeting = Arc::new(Meeting::new(joint, client, &call.id, call.parts, role));
    let order = Order { dir: Some(call.folder), ..call.order };
    let there = order.dir.as_deref().is_some_and(Path::is_dir);
    let seen = if there { Ok(()) } else { Err(unseen(joint, &order)) };
    let taken = seen
        .and_then(|()| meeting.arrive(Step::Ready))
        .and_then(|()| checkpointer.checkpoint_part(&order, &meeting).map_err(|e| e.to_string()));
    if let Err(why) = taken {
        meeting.fail(&why);
    }
    // Nobody else has it by now.
    let mut meeting = meeting;
    loop {
        match Arc::try_unwrap(meeting) {
            Ok(meeting) => return meeting.leave(),
            Err(shared) => meeting = shared,
        }
        thread::sleep(Duration::from_millis(1));
    }
}
