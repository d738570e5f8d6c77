//! When a move begins: at once, at some time, when the job asks nothing of its devices, or when
//! those that it is to go to are free.

use crate::child::{self, Place};
use crate::time::Time;
use kedge_control::gpu::GpuSpec;
use kedge_control::usage::Usage;
use kedge_probe::Room;
use kedge_supervisor::Supervisor;
use kedge_supervisor::jobs::{JobName, Jobs};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// A job that asks nothing for so long is idle.
const IDLE: Duration = Duration::from_secs(1);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(100);
/// How long a proxy may take to say what it has been asked for.
const ANSWER: Duration = Duration::from_millis(250);
/// Longest reply of a proxy, in bytes.
const MAX_REPLY_LEN: usize = 256 << 10;
/// Between two tries whether devices are free: each starts a program on them.
const TRY: Duration = Duration::from_secs(5);
/// How long that program may take to say what it has found.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// A job that is about to begin has begun within this.
const BEGINNING: Duration = Duration::from_secs(60);
/// What may be taken of a free device: the driver's own, and that of who looks.
const TAKEN: u64 = 1 << 30;

/// When a move is to begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum When {
    #[default]
    Now,
    /// When the job has asked nothing of its devices for a while.
    Idle,
    /// When the devices that it is to go to are free.
    Free,
    /// After so long.
    In(Duration),
}

impl FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<When, String> {
        match text {
            "now" => Ok(When::Now),
            "idle" => Ok(When::Idle),
            "free" => Ok(When::Free),
            _ => {
                let time = text.strip_prefix('+').and_then(|time| time.parse::<Time>().ok());
                let bad = || format!("`{text}`: give now, idle, free, or a time such as +10m");
                time.map(|time| When::In(time.0)).ok_or_else(bad)
            }
        }
    }
}

/// What is waited for, for who reads events.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum Waiting {
    Waits {
        #[serde(rename = "for")]
        what: &'static str,
        /// Why it is not so as yet, if that is known.
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
}

/// The job that is to move, and none that gets its name later.
pub(crate) struct Mover<'a> {
    jobs: &'a Jobs,
    job: &'a JobName,
    /// `None` where no job of that name runs.
    by: Option<Supervisor>,
}

impl<'a> Mover<'a> {
    /// Of the job that runs now.
    pub(crate) fn of(jobs: &'a Jobs, job: &'a JobName) -> Mover<'a> {
        Mover { jobs, job, by: Supervisor::of(jobs, job) }
    }

    /// Of one that is about to begin: returns when it has, or will not.
    pub(crate) fn of_new(jobs: &'a Jobs, job: &'a JobName, by: Supervisor) -> Mover<'a> {
        let (begin, mover) = (Instant::now(), Mover { jobs, job, by: Some(by) });
        while !mover.runs() && by.lives() && begin.elapsed() < BEGINNING {
            std::thread::sleep(LOOK);
        }
        mover
    }

    /// What supervises it; `None` where no job of that name ran.
    pub(crate) fn by(&self) -> Option<Supervisor> {
        self.by
    }

    /// Whether it is still that job.
    pub(crate) fn runs(&self) -> bool {
        self.by.is_some() && Supervisor::of(self.jobs, self.job) == self.by
    }

    /// Whether that job was there, and is no more.
    pub(crate) fn is_over(&self) -> bool {
        self.by.is_some() && !self.runs()
    }

    /// Returns after `time`, or once that job is over.
    pub(crate) fn sleep(&self, time: Duration) {
        let begin = Instant::now();
        while !self.is_over() {
            let left = time.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

/// Returns when a move of that job to `to` is to begin, or the job runs no more. `tell` hears what
/// is waited for, once for each reason.
pub(crate) fn wait(when: When, mover: &Mover<'_>, to: &str, mut tell: impl FnMut(&Waiting)) {
    let end = match when {
        When::Now => return,
        When::In(time) => Some(Instant::now() + time),
        When::Idle | When::Free => None,
    };
    let what = match when {
        When::Idle => "idle",
        When::Free => "free",
        When::Now | When::In(_) => "time",
    };
    let (mut idle, mut told, mut next) = (Idle::new(Instant::now()), None, Instant::now());
    while mover.runs() {
        let (begins, why) = match when {
            When::Now => (true, None),
            When::In(_) => (end.is_none_or(|end| Instant::now() >= end), None),
            When::Idle => (idle.looks(asked(mover.jobs, mover.job), Instant::now()), None),
            When::Free if Instant::now() < next => (false, told.clone().flatten()),
            When::Free => {
                let tried = is_free(to).map(drop);
                next = Instant::now() + TRY;
                (tried.is_ok(), tried.err())
            }
        };
        if begins {
            return;
        }
        if told.as_ref() != Some(&why) {
            tell(&Waiting::Waits { what, why: why.clone() });
            told = Some(why);
        }
        std::thread::sleep(LOOK);
    }
}

/// Finds out whether all of these devices are free: a program of kedge's own gets them, and nearly
/// all of their memory is. Returns how many bytes are.
///
/// # Errors
/// Why they are not.
pub(crate) fn is_free(to: &str) -> Result<u64, String> {
    let gpu: GpuSpec = to.parse().map_err(|bad| format!("{bad}"))?;
    let mut rooms: Vec<Room> = Vec::new();
    child::probe(Place::job(gpu), &["room".into()], PROBE_TIMEOUT, |line| {
        rooms.extend(serde_json::from_str::<Room>(line));
    })?;
    match rooms.iter().position(|room| !has_room(room)) {
        None if rooms.is_empty() => Err("there is no device".to_owned()),
        None => Ok(rooms.iter().fold(0, |sum, room| room.free.saturating_add(sum))),
        Some(index) => Err(format!(
            "device {index} is in use: {} MiB of its {} are taken",
            (rooms[index].total - rooms[index].free) >> 20,
            rooms[index].total >> 20
        )),
    }
}

/// Whether nobody has memory of a device to speak of.
fn has_room(room: &Room) -> bool {
    room.total.saturating_sub(room.free) <= TAKEN.max(room.total / 20)
}

/// Launches and copies that a job's proxies have been asked for so far; `None` of one that does not
/// say.
type Asked = BTreeMap<PathBuf, Option<(u64, u64)>>;

fn asked(jobs: &Jobs, job: &JobName) -> Asked {
    let told = |path: PathBuf| match kedge_socket::address::connect(&path) {
        Ok(stream) => Some((path, read(&stream).ok())),
        // One that has ended has left that.
        Err(_) => None,
    };
    jobs.usage(job).into_iter().filter_map(told).collect()
}

/// What a proxy says on a connection: a length in four bytes, little-endian, and so much.
fn read(mut stream: &UnixStream) -> io::Result<(u64, u64)> {
    stream.set_read_timeout(Some(ANSWER))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut bytes = vec![0; (u32::from_le_bytes(length) as usize).min(MAX_REPLY_LEN)];
    stream.read_exact(&mut bytes)?;
    let usage = Usage::read(&bytes).ok_or(io::ErrorKind::InvalidData)?;
    Ok((usage.launches, usage.copies))
}

/// Since when a job has asked nothing.
struct Idle {
    last: Asked,
    since: Instant,
}

impl Idle {
    fn new(now: Instant) -> Idle {
        Idle { last: Asked::new(), since: now }
    }

    /// Whether it has asked nothing for long enough, by what it has asked for so far.
    fn looks(&mut self, asked: Asked, now: Instant) -> bool {
        if asked != self.last || asked.values().any(Option::is_none) {
            (self.last, self.since) = (asked, now);
        }
        now.duration_since(self.since) >= IDLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_move_are_read() {
        for (text, when) in [
            ("now", When::Now),
            ("idle", When::Idle),
            ("free", When::Free),
            ("+10m", When::In(Duration::from_secs(600))),
            ("+0", When::In(Duration::ZERO)),
        ] {
            assert_eq!(text.parse(), Ok(when));
        }
        for text in ["", "+", "10m", "later", "+10", "-1s"] {
            assert!(text.parse::<When>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_job_is_idle_once_it_has_asked_nothing_for_a_while() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let asked = |launches| Asked::from([("a".into(), Some((launches, 0)))]);
        let mut idle = Idle::new(begin);
        assert!(!idle.looks(asked(5), at(0)));
        assert!(!idle.looks(asked(5), at(900)));
        assert!(!idle.looks(asked(6), at(1100)), "it has asked");
        assert!(!idle.looks(asked(6), at(2000)));
        assert!(idle.looks(asked(6), at(2100)));
        // One of whom nothing is known may be busy.
        let mut idle = Idle::new(begin);
        let silent = || Asked::from([("a".into(), None)]);
        assert!(!idle.looks(silent(), at(0)));
        assert!(!idle.looks(silent(), at(5000)));
    }

    #[test]
    fn a_device_is_free_where_next_to_nothing_of_it_is_taken() {
        let room = |total: u64, taken: u64| Room { total, free: total - taken };
        let gib = 1 << 30;
        assert!(has_room(&room(80 * gib, gib)) && has_room(&room(80 * gib, 4 * gib)));
        assert!(!has_room(&room(80 * gib, 5 * gib)));
        assert!(has_room(&room(8 * gib, gib)) && !has_room(&room(8 * gib, gib + 1)));
    }
}
