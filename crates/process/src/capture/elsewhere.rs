//! Memory that a part of a job shares with processes that are none of it. Each part brings back its
//! own memory: what two of them had together would be two, and processes that wait for a word in it
//! would wait for ever.

use crate::maps::{self, Mapping};
use crate::stop::{self, Roots};
use crate::{EngineError, proc};
use libc::pid_t;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

/// What kedge's own processes are called, with which clients of devices share memory.
const OWN: &str = "kedge";

/// The name of System V shared memory in /proc.
const SEGMENT: &str = "/SYSV";

/// Shared memory to which no name leads.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    device: String,
    inode: u64,
    /// The IPC namespace of System V shared memory. Its inode is its id there: every namespace has
    /// such a number, and so may files in memory, which lie on the same device.
    namespace: Option<PathBuf>,
}

impl Key {
    /// Returns what `pid` has mapped there, if it is memory without a name that others may share.
    fn of(pid: pid_t, mapping: &Mapping) -> Option<Key> {
        if !mapping.shared || !mapping.deleted() {
            return None;
        }
        let namespace = match mapping.name.starts_with(SEGMENT) {
            // Where it cannot be read, the process has ended.
            true => Some(proc::link(pid, "ns/ipc").ok()?),
            false => None,
        };
        Some(Key { device: mapping.device.clone(), inode: mapping.inode, namespace })
    }
}

/// Shared memory of a part of the job.
#[derive(Debug)]
struct Held {
    /// A process that has it.
    pid: pid_t,
    name: String,
    /// Whether some process of the part may write to it. What nobody writes to may be two, such as
    /// a file that a newer one has replaced.
    is_written: bool,
}

/// Refuses memory without a name that processes of `roots` share with others, where either of them
/// writes to it.
///
/// # Errors
///
/// [`EngineError::Unsupported`], with the name that it had and the other process.
pub(super) fn refuse(roots: &Roots) -> Result<(), EngineError> {
    let inside: BTreeSet<pid_t> = stop::alive(roots).into_iter().collect();
    let shared = held_by(&inside);
    if shared.is_empty() {
        return Ok(());
    }
    for other in others(&inside) {
        let Some(held) = shared_with(other, &shared) else { continue };
        // It may have been made, or have ended, since the part's processes were listed. One that
        // ends now is not listed any more, so that its end is asked for last.
        if stop::alive(roots).contains(&other) || proc::running_since(other).is_none() {
            continue;
        }
        let Held { pid, name, .. } = held;
        let what = format!(
            "it shares memory ({name}) with process {other}, which is none of this part of the job, and \
             kedge cannot bring that back as one: have MPI use TCP between ranks (MPICH: \
             MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self; Open MPI: --mca btl tcp,self), or run them under \
             one `kedge run`"
        );
        return Err(EngineError::unsupported(*pid, what));
    }
    Ok(())
}

/// Returns the shared memory without a name that these processes have mapped.
fn held_by(inside: &BTreeSet<pid_t>) -> HashMap<Key, Held> {
    let mut shared = HashMap::new();
    for pid in inside {
        let reached = proc::reach(*pid);
        // What has ended meanwhile shares nothing.
        for mapping in maps::of(reached).unwrap_or_default() {
            let Some(key) = Key::of(reached, &mapping) else { continue };
            let is_written = may_write(&mapping);
            let held = shared.entry(key);
            held.or_insert(Held { pid: *pid, name: mapping.name, is_written: false }).is_written |=
                is_written;
        }
    }
    shared
}

/// Returns which of the memory in `shared` the process `other` has mapped as well, if it or the
/// part writes to that.
fn shared_with(other: pid_t, shared: &HashMap<Key, Held>) -> Option<&Held> {
    let reached = proc::reach(other);
    // Those of other users cannot be looked at, and can share nothing that they were not given.
    let mappings = maps::of(reached).unwrap_or_default();
    mappings.iter().find_map(|mapping| {
        let held = shared.get(&Key::of(reached, mapping)?)?;
        (held.is_written || may_write(mapping)).then_some(held)
    })
}

fn may_write(mapping: &Mapping) -> bool {
    mapping.protection & libc::PROT_WRITE != 0
}

/// All other processes but kedge's own.
fn others(inside: &BTreeSet<pid_t>) -> Vec<pid_t> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| !inside.contains(pid) && !proc::name(*pid).starts_with(OWN)).collect()
}
