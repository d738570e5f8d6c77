//! Memory that a part of a job shares with processes that are none of it. Each part brings back its
//! own memory: what two of them had together would be two, and processes that wait for a word in it
//! would wait for ever.

use crate::maps::{self, Mapping};
use crate::stop::{self, Roots};
use crate::{EngineError, proc};
use libc::pid_t;
use std::collections::{BTreeSet, HashMap};

/// What kedge's own processes are called, with which clients of devices share memory.
const OWN: &str = "kedge";

/// Shared memory to which no name leads: the number of its device, and of its file.
type Key = (String, u64);

fn key(mapping: &Mapping) -> Option<Key> {
    (mapping.shared && mapping.deleted()).then(|| (mapping.device.clone(), mapping.inode))
}

/// Refuses memory without a name that processes of `roots` share with others.
///
/// # Errors
///
/// [`EngineError::Unsupported`], with the name that it had and the other process.
pub(super) fn refuse(roots: &Roots) -> Result<(), EngineError> {
    let inside: BTreeSet<pid_t> = stop::alive(roots).into_iter().collect();
    let mut shared = HashMap::new();
    for pid in &inside {
        // What has ended meanwhile shares nothing.
        for mapping in maps::of(proc::reach(*pid)).unwrap_or_default() {
            if let Some(key) = key(&mapping) {
                shared.entry(key).or_insert((*pid, mapping.name));
            }
        }
    }
    if shared.is_empty() {
        return Ok(());
    }
    for other in others(&inside) {
        // Those of other users cannot be looked at, and can share nothing that they were not given.
        for mapping in maps::of(other).unwrap_or_default() {
            let Some((pid, name)) = key(&mapping).and_then(|key| shared.get(&key)) else {
                continue;
            };
            let what = format!(
                "it shares memory ({name}) with process {other}, which is none of this part of the job, and \
                 kedge cannot bring that back as one: have MPI use TCP between ranks (MPICH: \
                 MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self; Open MPI: --mca btl tcp,self), or run them under \
                 one `kedge run`"
            );
            return Err(EngineError::unsupported(*pid, what));
        }
    }
    Ok(())
}

/// All other processes but kedge's own.
fn others(inside: &BTreeSet<pid_t>) -> Vec<pid_t> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| !inside.contains(pid) && !proc::name(*pid).starts_with(OWN)).collect()
}
