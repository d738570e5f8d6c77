//! System V IPC: shared memory, semaphore sets and message queues (sysvipc(7)), under their ids and
//! keys. They belong to no descriptor; a restarted job has an IPC namespace of its own, where their
//! ids are free.

mod queues;
mod segments;
mod semaphores;
mod sys;
mod table;

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job};
use crate::plugins::saved::Saved;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

pub(crate) use segments::doom;
pub(crate) use semaphores::{MAX_VALUE, value};
pub(crate) use sys::{Operation, bytes_of, segment_bytes};

const NAME: &str = "sysv";

#[derive(Debug)]
pub(crate) struct Sysv;

#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    segments: Vec<segments::Segment>,
    sets: Vec<semaphores::Set>,
    queues: Vec<queues::Queue>,
}

/// What all three kinds have.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Common {
    id: i32,
    /// 0 is private.
    key: i32,
    /// Permissions.
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Plugin for Sysv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        _mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let mut state = State::default();
        let users = Users::of(capture.job)?;
        for row in table::read("shm")? {
            if segments::belongs(&row, &users, capture) {
                state.segments.push(segments::save(&row, capture)?);
            }
        }
        for row in table::read("sem")?.iter().filter(|row| users.used(row)) {
            state.sets.push(semaphores::save(row, capture)?);
        }
        for row in table::read("msg")?.iter().filter(|row| users.used(row)) {
            state.queues.push(queues::save(row, capture)?);
        }
        let none = state.segments.is_empty() && state.sets.is_empty() && state.queues.is_empty();
        if none {
            return Ok(None);
        }
        serde_json::to_value(state).map(Some).to(|| "write what System V IPC has")
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let state: State = world.parse(state)?;
        state.segments.iter().try_for_each(|segment| segments::make(segment, world))?;
        state.sets.iter().try_for_each(|set| semaphores::make(set, world))?;
        state.queues.iter().try_for_each(|queue| queues::make(queue, world))
    }
}

/// Who the job is, to whom an object may belong that none of its processes holds: sets and queues
/// are held by nobody.
#[derive(Debug)]
struct Users {
    uids: Vec<u32>,
    /// When its first process began, in seconds since 1970.
    begin: i64,
    /// The namespace is a restarted job's own, with all that is in it.
    own: bool,
}

impl Users {
    fn of(job: &Job) -> Result<Users, PluginError> {
        let own = std::process::id() == 1;
        let mut users = Users { uids: Vec::new(), begin: i64::MAX, own };
        for process in &job.processes {
            let Ok((uid, begin)) = table::process(process.pid) else { continue };
            users.uids.push(uid);
            users.begin = users.begin.min(begin);
        }
        Ok(users)
    }

    /// Whether it is a user's of the job and was made or used since the job began.
    fn used(&self, row: &table::Row) -> bool {
        let last = ["otime", "stime", "rtime", "atime", "ctime"].map(|name| row.get(name));
        let theirs = [row.get("uid"), row.get("cuid")].iter().any(|uid| self.is_one(*uid));
        self.own || theirs && last.iter().any(|time| *time >= self.begin)
    }

    fn is_one(&self, uid: i64) -> bool {
        self.uids.iter().any(|own| i64::from(*own) == uid)
    }
}

fn common(row: &table::Row) -> Common {
    Common {
        id: row.id,
        key: row.key,
        mode: row.permissions & 0o777,
        uid: row.get("uid") as u32,
        gid: row.get("gid") as u32,
    }
}

/// Says which id the next object of this kind (`shm`, `sem` or `msg`) gets.
fn next_id(kind: &str, id: i32) -> Result<(), PluginError> {
    if id < 0 {
        return Err(damaged(format!("the System V id {id}")));
    }
    let path = format!("/proc/sys/kernel/{kind}_next_id");
    std::fs::write(&path, id.to_string())
        .to(|| format!("say which id comes next ({path}, of a kernel with CHECKPOINT_RESTORE)"))
}

/// Whether what was just made has the id that it had.
fn is_same(made: i32, common: &Common, what: &str) -> Result<(), PluginError> {
    match made == common.id {
        true => Ok(()),
        false => Err(damaged(format!("two {what} with the id {}", common.id))),
    }
}

/// What the engine must know of a job's System V IPC while it is captured.
#[derive(Debug, Default)]
pub(crate) struct Ipc {
    /// The ids of its segments.
    pub(crate) segments: BTreeSet<i32>,
    /// Semaphore sets, each with its values.
    pub(crate) sets: Vec<(i32, Vec<u16>)>,
}

impl Ipc {
    pub(crate) fn of(saved: &Saved) -> Result<Ipc, PluginError> {
        let state = saved.states.iter().find(|state| state.plugin == NAME);
        let Some(state) = state else { return Ok(Ipc::default()) };
        let state: State = serde_json::from_value(state.state.clone())
            .map_err(|error| damaged(error.to_string()))?;
        let segments = state.segments.iter().map(|segment| segment.common.id);
        let sets = state.sets.iter().map(|set| (set.common.id, set.values.clone()));
        Ok(Ipc { segments: segments.collect(), sets: sets.collect() })
    }
}
