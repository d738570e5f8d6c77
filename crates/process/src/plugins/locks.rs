//! File locks: flock, open file description locks, and the POSIX locks of each process.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::saved::Slot;
use crate::plugins::world::{Argument, InjectedCall, World};
use crate::plugins::{Claim, Plugin, sys};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

#[derive(Debug)]
pub(crate) struct Locks;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Kind {
    Flock,
    Description,
    /// Of the process with this id.
    Posix(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Lock {
    kind: Kind,
    write: bool,
    start: i64,
    /// 0: to the end, however far that is.
    length: i64,
    /// The process that is named as its owner, of a lock by flock; 0 if nobody is left.
    #[serde(default)]
    owner: i32,
}

impl Plugin for Locks {
    fn name(&self) -> &'static str {
        "locks"
    }

    fn requires(&self) -> &'static [&'static str] {
        &["files", "memfd", "devices", "pipes"]
    }

    /// It takes nothing, but it knows what cannot be had again.
    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.locks.iter().find(|(_, line)| parse(line, 0).is_none()) {
            Some((_, line)) if file.stream.is_none() => {
                let kind = line.split_whitespace().nth(1).unwrap_or("lock");
                Claim::Refused(format!("it holds a {kind}; release that first"))
            }
            _ => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        _mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let job = capture.job;
        // The kernel tells a process's locks with each descriptor that it has of the file.
        let mut known = BTreeSet::new();
        let mut saved = Vec::new();
        for (index, file) in job.files.iter().enumerate().filter(|(_, f)| f.stream.is_none()) {
            for (process, line) in &file.locks {
                let inner = job.processes[*process].inner;
                let Some(mut lock) = parse(line, inner) else { continue };
                // The kernel tells a process's locks to itself alone.
                if file.is_under_way() && matches!(lock.kind, Kind::Posix(_)) {
                    continue;
                }
                if lock.kind == Kind::Flock {
                    lock.owner = named(line).and_then(|pid| job.inner(pid)).unwrap_or(0);
                }
                let which = match lock.kind {
                    Kind::Posix(_) => (file.stat.device, file.stat.inode),
                    _ => (0, index as u64),
                };
                if known.insert((which, lock)) {
                    saved.push(Ok((index as u32, lock)));
                }
            }
        }
        state(saved)
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for (description, lock) in world.parse::<Vec<(u32, Lock)>>(state)? {
            lock_again(description, &lock, world)?;
        }
        Ok(())
    }
}

/// `1: POSIX  ADVISORY  WRITE 12345 fe:00:131 0 EOF`, held by the process `pid`.
fn parse(line: &str, pid: i32) -> Option<Lock> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, kind, "ADVISORY", access, _, _, start, end] = words[..] else { return None };
    let kind = match kind {
        "FLOCK" => Kind::Flock,
        "OFDLCK" => Kind::Description,
        "POSIX" => Kind::Posix(pid),
        _ => return None,
    };
    let start: i64 = start.parse().ok()?;
    let length = match end {
        "EOF" => 0,
        end => end.parse::<i64>().ok()?.checked_sub(start)?.checked_add(1)?,
    };
    Some(Lock { kind, write: access == "WRITE", start, length, owner: 0 })
}

/// The process that the line names.
fn named(line: &str) -> Option<i32> {
    line.split_whitespace().nth(4)?.parse().ok()
}

fn lock_again(description: u32, lock: &Lock, world: &mut World) -> Result<(), PluginError> {
    let held = || "lock a file again that somebody else has locked".to_owned();
    match lock.kind {
        Kind::Flock => {
            // The kernel names whoever makes the call.
            let owner = world.holders(description).find(|slot| slot.pid == lock.owner);
            let slot = owner.or_else(|| world.holders(description).next());
            let Some(Slot { pid, fd, .. }) = slot.cloned() else {
                let operation = match lock.write {
                    true => FlockOperation::NonBlockingLockExclusive,
                    false => FlockOperation::NonBlockingLockShared,
                };
                return flock(world.get(description)?, operation).to(held);
            };
            let operation = if lock.write { libc::LOCK_EX } else { libc::LOCK_SH } | libc::LOCK_NB;
            let arguments = vec![Argument::Number(fd as u64), Argument::Number(operation as u64)];
            let what =
                format!("lock the file of descriptor {fd} again, which somebody else has locked");
            world.inject(InjectedCall { pid, number: libc::SYS_flock, arguments, what });
            Ok(())
        }
        Kind::Description => sys::lock_description(world.get(description)?, &lock.bytes()).to(held),
        Kind::Posix(pid) => {
            let slot = world.holders(description).find(|slot| slot.pid == pid);
            let fd = slot.ok_or_else(|| damaged("a lock of a process without the file"))?.fd;
            let arguments = vec![
                Argument::Number(fd as u64),
                Argument::Number(libc::F_SETLK as u64),
                Argument::Bytes(lock.bytes().to_vec()),
            ];
            let what = format!("lock the file of descriptor {fd} again");
            world.inject(InjectedCall { pid, number: libc::SYS_fcntl, arguments, what });
            Ok(())
        }
    }
}

impl Lock {
    /// struct flock of x86-64: type, whence, start, length, pid.
    fn bytes(&self) -> [u8; sys::FLOCK] {
        let mut bytes = [0; sys::FLOCK];
        let kind = if self.write { libc::F_WRLCK } else { libc::F_RDLCK };
        bytes[..2].copy_from_slice(&(kind as i16).to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.start.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_ne_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_prints() {
        let posix = parse("1: POSIX  ADVISORY  READ  77 fe:00:131 10 19", 5).unwrap();
        assert_eq!(
            posix,
            Lock { kind: Kind::Posix(5), write: false, start: 10, length: 10, owner: 0 }
        );
        let flock = parse("2: FLOCK  ADVISORY  WRITE 77 fe:00:131 0 EOF", 5).unwrap();
        assert_eq!(flock, Lock { kind: Kind::Flock, write: true, start: 0, length: 0, owner: 0 });
        assert_eq!(parse("1: LEASE  ACTIVE    WRITE 77 fe:00:131 0 EOF", 5), None);
        assert_eq!(parse("1: POSIX  ADVISORY  READ  77 fe:00:131 19 10 1", 5), None);
        assert_eq!(
            parse("1: POSIX ADVISORY READ 77 x -9223372036854775808 9223372036854775807", 5),
            None
        );
    }
}
