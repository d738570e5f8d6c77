//! Semaphore sets. What a process has said SEM_UNDO of is the process's own and captured with it.

use super::sys::{self, Access, Operation};
use super::table::Row;
use super::{Common, common, is_same, next_id};
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::Capture;
use crate::plugins::world::{Argument, InjectedCall, World};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;

/// Highest value of a semaphore (SEMVMX).
pub(crate) const MAX_VALUE: i32 = 32767;
/// Most semaphores of a set that an administrator can allow.
const MAX_COUNT: usize = 65536;
/// Semaphores that one call touches, two operations each: SEMOPM was 32 on older kernels.
const TOGETHER: usize = 16;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Set {
    pub(super) common: Common,
    pub(super) values: Vec<u16>,
    /// There was an operation: programs take that for the sign that a set is initialised
    /// (sem_otime).
    used: bool,
    /// Who of the job operated last on a semaphore (GETPID).
    last: BTreeMap<u16, i32>,
}

pub(super) fn save(row: &Row, capture: &Capture) -> Result<Set, PluginError> {
    let what = || format!("read the System V semaphore set {}", row.id);
    let count = row.get("nsems").clamp(0, MAX_COUNT as i64) as usize;
    let values = sys::values(row.id, count).to(what)?;
    let mut last = BTreeMap::new();
    for number in 0..count {
        let pid = sys::last(row.id, number).to(what)?;
        if let Some(inner) = capture.job.inner(pid).filter(|_| pid != 0) {
            last.insert(number as u16, inner);
        }
    }
    Ok(Set { common: common(row), values, used: row.get("otime") != 0, last })
}

pub(super) fn make(set: &Set, world: &mut World) -> Result<(), PluginError> {
    let Common { id, key, mode, uid, gid } = set.common;
    let good = (1..=MAX_COUNT).contains(&set.values.len())
        && set.values.iter().all(|value| i32::from(*value) <= MAX_VALUE)
        && set.last.keys().all(|number| usize::from(*number) < set.values.len());
    if !good {
        return Err(damaged(format!("the System V semaphore set {id}")));
    }
    let what = || format!("make the System V semaphore set {id}");
    next_id("sem", id)?;
    let made = sys::make_set(key, set.values.len(), 0o600).to(what)?;
    is_same(made, &set.common, "semaphore sets")?;
    sys::set_values(id, &set.values).to(what)?;
    if set.used {
        sys::operate(id, &touch(0, set.values[0])).to(what)?;
    }
    sys::own_set(id, &Access { mode, uid, gid }).to(what)?;
    keep_last(set, world);
    Ok(())
}

/// Two operations that change nothing.
fn touch(number: u16, value: u16) -> [Operation; 2] {
    let by = if i32::from(value) < MAX_VALUE { 1 } else { -1 };
    [by, -by].map(|by| Operation { number, by, flags: libc::IPC_NOWAIT })
}

/// Has each process operate on what it was the last to operate on.
fn keep_last(set: &Set, world: &mut World) {
    let mut by_process: BTreeMap<i32, Vec<Operation>> = BTreeMap::new();
    for (number, pid) in &set.last {
        let touched = touch(*number, set.values[usize::from(*number)]);
        by_process.entry(*pid).or_default().extend(touched);
    }
    for (pid, operations) in by_process {
        for some in operations.chunks(2 * TOGETHER) {
            let (id, count) = (set.common.id as u64, some.len() as u64);
            let bytes = Argument::Bytes(sys::bytes_of(some));
            let arguments = vec![Argument::Number(id), bytes, Argument::Number(count)];
            let what = format!("operate on the System V semaphore set {id}");
            world.inject(InjectedCall { pid, number: libc::SYS_semop, arguments, what });
        }
    }
}

/// The value of a semaphore now.
pub(crate) fn value(id: i32, number: u16) -> io::Result<i32> {
    sys::value(id, number)
}
