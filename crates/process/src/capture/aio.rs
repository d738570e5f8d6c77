//! Kernel AIO: what is under way is waited for, and what has ended is read out of the rings. Both
//! while the job stands still, and nothing is written: its contexts are as they were when it goes
//! on.

use crate::aio::{self, Context, EVENT, HEADER, Header};
use crate::home::Ways;
use crate::inject;
use crate::maps::Mapping;
use crate::state::{Backing, Hex, ProcessState};
use crate::stop::StoppedJob;
use crate::{EngineError, Thread};
use libc::pid_t;
use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// So long no request may end before none is believed to be under way, if no disk is at work.
const QUIET: Duration = Duration::from_millis(10);
/// The same where a disk is: others may keep it busy.
const DISK_QUIET: Duration = Duration::from_secs(1);
/// How long requests may take to end.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(1);

/// Waits until requests that are under way have ended: those to files end by themselves. The kernel
/// does not tell how many there are; so none is believed to be left when none has ended for a while
/// and each disk had nothing to do for a moment.
pub(super) fn settle(job: &StoppedJob, mappings: &[Vec<Mapping>]) -> Result<(), EngineError> {
    let mut rings = Vec::new();
    for (process, mappings) in job.processes.iter().zip(mappings) {
        let of_process = mappings.iter().filter(|mapping| aio::is_ring(mapping));
        rings.extend(of_process.map(|mapping| (process.main.pid(), mapping)));
    }
    if rings.is_empty() {
        return Ok(());
    }
    let begin = Instant::now();
    let (mut changed, mut tails, mut busy) = (begin, tails(&rings)?, busy(None));
    loop {
        thread::sleep(STEP);
        let now = self::tails(&rings)?;
        if now != tails {
            (changed, tails) = (Instant::now(), now);
        }
        busy = self::busy(Some(busy));
        let quiet = changed.elapsed();
        if quiet >= if busy.is_empty() { QUIET } else { DISK_QUIET } {
            return Ok(());
        }
        if begin.elapsed() > SETTLE_TIMEOUT {
            let what = "its requests by io_submit do not come to an end: try again";
            return Err(EngineError::unsupported(rings[0].0, what));
        }
    }
}

fn tails(rings: &[(pid_t, &Mapping)]) -> Result<Vec<u32>, EngineError> {
    rings
        .iter()
        .map(|(pid, mapping)| Ok(header(*pid, mapping.start, mapping.len())?.tail))
        .collect()
}

/// Those of `before`, or of all disks, that have something under way.
fn busy(before: Option<BTreeSet<String>>) -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/diskstats").unwrap_or_default();
    let now: BTreeSet<String> = text.lines().filter_map(at_work).collect();
    before.map_or_else(|| now.clone(), |before| &before & &now)
}

/// The name of a disk that has requests under way, of its line in /proc/diskstats.
fn at_work(line: &str) -> Option<String> {
    /// Major, minor, name and eight numbers come before it (Documentation/admin-guide/iostats.rst).
    const UNDER_WAY: usize = 11;
    let words: Vec<&str> = line.split_whitespace().collect();
    let idle = *words.get(UNDER_WAY)? == "0";
    (!idle).then(|| words[2].to_owned())
}

fn header(pid: pid_t, ring: u64, bytes: u64) -> Result<Header, EngineError> {
    Header::read(pid, ring, bytes)?.ok_or_else(|| {
        let what = "it maps /[aio], a ring of io_setup that is not whole, or not as kedge knows it";
        EngineError::unsupported(pid, what)
    })
}

/// The contexts of the process whose first thread is `leader`.
pub(super) fn save(
    leader: &mut Thread,
    ways: &Ways,
    state: &ProcessState,
) -> Result<Vec<Context>, EngineError> {
    let rings = state.mappings.iter().filter(|saved| saved.backing == Backing::Aio);
    let rings: Vec<(u64, u64, i32)> =
        rings.map(|saved| (saved.start, saved.len(), saved.protection)).collect();
    if rings.is_empty() {
        return Ok(Vec::new());
    }
    let pid = leader.pid();
    ways.lead(leader)?;
    let asked = rings.iter().map(|(ring, ..)| {
        // Of a context that is its own, it takes no events and waits for none.
        leader.call(ways.home(), libc::SYS_io_getevents, &[*ring, 0, 0, 0, 0])
    });
    let asked: Result<Vec<i64>, EngineError> = asked.collect();
    leader.go_home()?;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    if asked?.iter().any(|result| *result != 0) || rings.iter().any(|ring| ring.2 != both) {
        let what = "it maps /[aio], a ring of io_setup that it cannot use: its own is another \
                    process's (fork), or it has protected it";
        return Err(EngineError::unsupported(pid, what));
    }
    rings.iter().map(|(ring, bytes, _)| context(pid, *ring, *bytes)).collect()
}

fn context(pid: pid_t, ring: u64, ring_bytes: u64) -> Result<Context, EngineError> {
    let Header { events, head, tail } = header(pid, ring, ring_bytes)?;
    let read = |from: u32, to: u32| {
        let mut bytes = vec![0; (u64::from(to - from) * EVENT) as usize];
        let at = ring + HEADER + u64::from(from) * EVENT;
        inject::read_exact(pid, at, &mut bytes).map(|()| bytes)
    };
    let completions = match head <= tail {
        true => read(head, tail)?,
        false => [read(head, events)?, read(0, tail)?].concat(),
    };
    let (ring_head, ring_tail, completions) = (head, tail, Hex(completions));
    Ok(Context { ring, ring_bytes, ring_head, ring_tail, completions })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_at_work_is_known() {
        let line = "   8       0 sda 10 0 80 1 20 5 200 7 3 9 8 0 0 0 0 2 1";
        assert_eq!(at_work(line), Some("sda".to_owned()));
        assert_eq!(at_work(&line.replace(" 7 3 ", " 7 0 ")), None);
        assert_eq!(at_work("8 0 sda"), None);
        assert!(busy(Some(BTreeSet::new())).is_empty());
    }
}
