//! Who asked to be told of a queue's next message (mq_notify(3)): one process for each queue.
//!
//! The kernel shows who it is and by which means, and nothing else: neither what a signal brings
//! along nor what glibc's thread is to call. [`crate::capture`] asks the process itself for that.

use super::{Queue, sys};
use crate::plugins::error::{PluginError, damaged};
use crate::plugins::job::{Found, Job};
use crate::plugins::{Claim, Saved};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Between two looks at whether messages wait.
const TICK: Duration = Duration::from_millis(10);

/// A process that is to be told once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Registered {
    /// As it knows itself.
    process: i32,
    /// `SIGEV_SIGNAL`, `SIGEV_NONE` or `SIGEV_THREAD`.
    means: i32,
    /// 0 if it is no signal.
    signal: i32,
}

/// What a process of a job has asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// As it knows itself.
    pub(crate) process: i32,
    /// Its descriptor of the queue.
    pub(crate) queue: i32,
    pub(crate) means: i32,
    pub(crate) signal: i32,
    /// Its netlink sockets, by one of which glibc's thread is told.
    pub(crate) sockets: Vec<i32>,
}

/// What a queue reads as.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// Of all messages that wait.
    pub(super) bytes: usize,
    /// The process, as this one knows it; 0: none.
    process: i32,
    means: i32,
    signal: i32,
}

impl Told {
    pub(super) fn of(queue: &OwnedFd) -> io::Result<Told> {
        let mut text = [0; 256];
        let length = rustix::io::pread(queue, &mut text, 0)?;
        let told = std::str::from_utf8(&text[..length]).ok().and_then(Told::parse);
        told.ok_or_else(unknown)
    }

    fn parse(text: &str) -> Option<Told> {
        let number = |name: &str| -> Option<i64> {
            let word = text.split_whitespace().find_map(|word| word.strip_prefix(name))?;
            word.parse().ok()
        };
        let small = |name| number(name).and_then(|value| i32::try_from(value).ok());
        Some(Told {
            bytes: number("QSIZE:").and_then(|bytes| usize::try_from(bytes).ok())?,
            process: small("NOTIFY_PID:")?,
            means: small("NOTIFY:")?,
            signal: small("SIGNO:")?,
        })
    }
}

/// Takes a queue, unless somebody is to be told of its next message who cannot be told any more
/// after a restart.
pub(super) fn claim(file: &Found, job: &Job) -> Claim {
    let begin = Instant::now();
    loop {
        let (told, waiting) = match look(file, job) {
            Ok(found) => found,
            Err(error) => return Claim::Refused(format!("it cannot be read: {error}")),
        };
        match registered(&told, waiting, file, job) {
            Ok(_) => return Claim::Yes,
            Err(why) if !waiting || begin.elapsed() >= job.patience => return Claim::Refused(why),
            // Who is told takes its messages soon.
            Err(_) => sleep(TICK),
        }
    }
}

/// What the queue reads as, and whether messages wait, which may have no bytes.
fn look(file: &Found, job: &Job) -> io::Result<(Told, bool)> {
    let (pid, fd) = job.place(file);
    let text = fs::read_to_string(format!("/proc/{pid}/fd/{fd}"))?;
    let told = Told::parse(&text).ok_or_else(unknown)?;
    let own = job.duplicate(file).map_err(|error| io::Error::other(error.to_string()))?;
    Ok((told, sys::waiting(&own)? > 0))
}

fn unknown() -> io::Error {
    io::Error::other("a queue of unknown form")
}

/// Who is to be told, or why that cannot be saved.
pub(super) fn registered(
    told: &Told,
    waiting: bool,
    file: &Found,
    job: &Job,
) -> Result<Option<Registered>, String> {
    let Told { process: pid, means, signal, .. } = *told;
    if pid == 0 {
        return Ok(None);
    }
    let asked = format!("process {pid} asked to be told of its next message (mq_notify)");
    let holds =
        |file: &Found, index: usize| file.holders.iter().any(|holder| holder.process == index);
    let place = job.processes.iter().position(|process| process.pid == pid);
    let place = place.filter(|index| job.same(file).any(|file| holds(file, *index)));
    let Some(index) = place else {
        return Err(format!("{asked}, and is not of this job, or has no descriptor of it"));
    };
    if waiting {
        // Nobody can look at them without its being told: they are taken out and put back.
        return Err(format!("{asked}, while messages wait in it: try again when they are read"));
    }
    let netlink = |file: &Found| file.socket.is_some_and(|kind| kind.domain == libc::AF_NETLINK);
    match means {
        libc::SIGEV_SIGNAL | libc::SIGEV_NONE => {}
        libc::SIGEV_THREAD if job.files.iter().any(|file| netlink(file) && holds(file, index)) => {}
        libc::SIGEV_THREAD => {
            return Err(format!("{asked} through a netlink socket that it has closed since"));
        }
        other => return Err(format!("{asked} by means {other}, which kedge does not know")),
    }
    Ok(Some(Registered { process: job.processes[index].inner, means, signal }))
}

/// What the processes of a job have asked for.
pub(crate) fn wanted(saved: &Saved) -> Result<Vec<Wanted>, PluginError> {
    let states = saved.states.iter().filter(|state| state.plugin == super::NAME);
    let queues = states.map(|state| serde_json::from_value::<Vec<Queue>>(state.state.clone()));
    let queues: Result<Vec<Vec<Queue>>, _> = queues.collect();
    let queues = queues.map_err(|error| damaged(error.to_string()))?;
    queues.iter().flatten().filter_map(|queue| wanted_of(queue, saved).transpose()).collect()
}

fn wanted_of(queue: &Queue, saved: &Saved) -> Result<Option<Wanted>, PluginError> {
    let Some(Registered { process, means, signal }) = queue.registered else { return Ok(None) };
    let own = || saved.slots.iter().filter(|slot| slot.pid == process);
    let mine = own().find(|slot| queue.descriptions.contains(&slot.description));
    let mine = mine.ok_or_else(|| damaged("a queue that tells one who does not hold it"))?;
    let sockets = if means == libc::SIGEV_THREAD {
        let all = crate::plugins::netlink::descriptions(saved)?;
        own().filter(|slot| all.contains(&slot.description)).map(|slot| slot.fd).collect()
    } else {
        Vec::new()
    };
    Ok(Some(Wanted { process, queue: mine.fd, means, signal, sockets }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_queue_reads_as_is_understood() {
        let text = "QSIZE:129        NOTIFY:2     SIGNO:0     NOTIFY_PID:8260  \n";
        let told = Told { bytes: 129, process: 8260, means: 2, signal: 0 };
        assert_eq!(Told::parse(text), Some(told));
        let text = "QSIZE:0          NOTIFY:0     SIGNO:10    NOTIFY_PID:77    \n";
        assert_eq!(Told::parse(text), Some(Told { bytes: 0, process: 77, means: 0, signal: 10 }));
        assert_eq!(Told::parse("QSIZE:0 NOTIFY:0"), None);
        assert_eq!(Told::parse(""), None);
    }
}
