//! POSIX timers (timer_create(2)): read from /proc and by timer_gettime, made again under their
//! ids.

use crate::EngineError;
use crate::inject::Parasite;
use crate::proc;
use crate::{Thread, sys};
use libc::pid_t;
use serde::{Deserialize, Serialize};

/// Since Linux 6.16: timer_create takes the id that it is to give.
const PR_TIMER_CREATE_RESTORE_IDS: u64 = 77;
/// Most timers of a process, and the highest id that older kernels are made to count to.
pub(crate) const MAX_TIMERS: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Timer {
    pub(crate) id: i32,
    pub(crate) clock: i32,
    signal: i32,
    value: u64,
    /// SIGEV_SIGNAL, SIGEV_NONE or SIGEV_THREAD_ID.
    notify: i32,
    /// Of SIGEV_THREAD_ID.
    thread: pid_t,
    /// Interval, then what is left: seconds and nanoseconds.
    pub(crate) time: [i64; 4],
}

/// The timers of `pid`, without their times.
pub(crate) fn of(pid: pid_t) -> Result<Vec<Timer>, EngineError> {
    let text = proc::text(pid, "timers")?;
    let strange = EngineError::Proc { pid, file: "timers", what: "a timer" };
    parse(&text).filter(|timers| timers.len() <= MAX_TIMERS).ok_or(strange)
}

/// Four lines a timer: `ID: 0`, `signal: 60/00000000deadbeef`, `notify: signal/pid.2634`, `ClockID:
/// 0`.
fn parse(text: &str) -> Option<Vec<Timer>> {
    let mut timers = Vec::<Timer>::new();
    for line in text.lines() {
        let (key, value) = line.split_once(": ")?;
        if key == "ID" {
            let id = value.trim().parse().ok()?;
            let (clock, signal, thread) = (0, 0, 0);
            timers.push(Timer { id, clock, signal, value: 0, notify: 0, thread, time: [0; 4] });
            continue;
        }
        let timer = timers.last_mut()?;
        match key {
            "signal" => {
                let (signal, value) = value.split_once('/')?;
                timer.signal = signal.parse().ok()?;
                timer.value = u64::from_str_radix(value.trim_start_matches("0x"), 16).ok()?;
            }
            "notify" => {
                let (how, target) = value.split_once('/')?;
                let (kind, id) = target.split_once('.')?;
                timer.notify = match (how, kind) {
                    ("none", _) => libc::SIGEV_NONE,
                    (_, "tid") => libc::SIGEV_THREAD_ID,
                    _ => libc::SIGEV_SIGNAL,
                };
                timer.thread = id.trim().parse().ok()?;
            }
            "ClockID" => timer.clock = value.trim().parse().ok()?,
            _ => {}
        }
    }
    Some(timers)
}

impl Timer {
    /// A sigevent, 64 bytes.
    fn event(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&self.value.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.signal.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.notify.to_le_bytes());
        if self.notify == libc::SIGEV_THREAD_ID {
            bytes[16..20].copy_from_slice(&self.thread.to_le_bytes());
        }
        bytes
    }

    /// Makes it in the process of `leader`, which has all its threads.
    fn make(&self, leader: &mut Thread, parasite: Parasite) -> Result<(), EngineError> {
        // The event, then the id, which newer kernels read and all write.
        let mut data = self.event().to_vec();
        data.extend(self.id.to_le_bytes());
        let (event, id) = (parasite.data(), parasite.data() + 64);
        for _ in 0..MAX_TIMERS {
            sys::write(leader.pid(), event, &data)?;
            let arguments = [self.clock as u64, event, id];
            parasite.call(leader, "make its timers", libc::SYS_timer_create, &arguments)?;
            let mut given = [0; 4];
            crate::inject::read_exact(leader.pid(), id, &mut given)?;
            let given = i32::from_le_bytes(given);
            if given == self.id {
                return self.start(leader, parasite);
            }
            // Older kernels count.
            let arguments = [given as u64];
            parasite.call(leader, "make its timers", libc::SYS_timer_delete, &arguments)?;
        }
        let what = format!("its timer {} cannot be given its id by this kernel", self.id);
        Err(EngineError::unsupported(leader.pid(), what))
    }

    fn start(&self, leader: &mut Thread, parasite: Parasite) -> Result<(), EngineError> {
        let bytes: Vec<u8> = self.time.iter().flat_map(|word| word.to_le_bytes()).collect();
        sys::write(leader.pid(), parasite.data(), &bytes)?;
        let arguments = [self.id as u64, 0, parasite.data(), 0];
        parasite.call(leader, "start its timers", libc::SYS_timer_settime, &arguments).map(drop)
    }
}

/// Makes the timers in the process of `leader`.
pub(crate) fn make(
    timers: &[Timer],
    leader: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    if timers.is_empty() {
        return Ok(());
    }
    let set = |leader: &mut Thread, on: u64| {
        let arguments = [PR_TIMER_CREATE_RESTORE_IDS, on, 0, 0, 0];
        // Without it ids are counted up to.
        let _ = parasite.call(leader, "choose ids", libc::SYS_prctl, &arguments);
    };
    set(leader, 1);
    timers.iter().try_for_each(|timer| timer.make(leader, parasite))?;
    set(leader, 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_read() {
        let text = "ID: 3\nsignal: 60/00000000deadbeef\nnotify: signal/tid.2634\nClockID: -6\n\
                    ID: 4\nsignal: 0/0\nnotify: none/pid.1\nClockID: 1\n";
        let timers = parse(text).unwrap();
        assert_eq!((timers[0].id, timers[0].signal, timers[0].value), (3, 60, 0xdead_beef));
        assert_eq!((timers[0].notify, timers[0].thread), (libc::SIGEV_THREAD_ID, 2634));
        assert_eq!((timers[0].clock, timers[1].clock), (-6, 1));
        assert_eq!(timers[1].notify, libc::SIGEV_NONE);
        for bad in ["signal: 1/2", "ID: x", "ID: 1\nnotify: y", "what"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
