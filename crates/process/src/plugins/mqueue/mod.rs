//! POSIX message queues: name, limits and the messages that wait, with their priorities.

mod sys;

use crate::plugins::apart::survive;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::files::open;
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::SavedPath;
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, fchmod, statfs};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;

/// linux/magic.h
pub(crate) const MAGIC: u64 = 0x1980_0202;
/// Most messages of a queue that the kernel allows (HARD_MSGMAX).
const MAX_MESSAGES: i64 = 65536;
/// Longest message that the kernel allows, in bytes (HARD_MSGSIZEMAX).
const MAX_MESSAGE_LEN: i64 = 16 << 20;
const SUFFIX: &[u8] = b" (deleted)";

#[derive(Debug)]
pub(crate) struct Queues;

#[derive(Debug, Serialize, Deserialize)]
struct Queue {
    /// With its slash.
    name: SavedPath,
    unlinked: bool,
    mode: u32,
    /// Messages, and bytes of a message.
    limits: (i64, i64),
    /// Priority and bytes, the next one first.
    messages: Vec<(u32, Blob)>,
    descriptions: Vec<u32>,
}

impl Plugin for Queues {
    fn name(&self) -> &'static str {
        "mqueue"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        let (pid, fd) = job.place(file);
        if !is_one(file, job) {
            return Claim::No;
        }
        match fs::read_to_string(format!("/proc/{pid}/fd/{fd}")).map(|text| notified(&text)) {
            Ok(None) => Claim::Yes,
            Ok(Some(pid)) => Claim::Refused(format!(
                "process {pid} asked to be told of its next message (mq_notify), and the kernel does not tell how: \
                 use poll"
            )),
            Err(e) => Claim::Refused(format!("it cannot be read: {e}")),
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let inodes = capture.by_inode(mine);
        state(inodes.iter().map(|opened| save(capture, opened)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let mut queues: Vec<Queue> = world.parse(state)?;
        // The name of one that has none any more may be another's by now.
        queues.sort_by_key(|queue| !queue.unlinked);
        queues.iter().try_for_each(|queue| make(queue, world))
    }
}

/// Their names have one slash, so that most files need not be asked for their file system.
fn is_one(file: &Found, job: &Job) -> bool {
    let link = file.link.as_bytes();
    let named = link.first() == Some(&b'/') && !link[1..].contains(&b'/');
    let (pid, fd) = job.place(file);
    let kind = || statfs(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|fs| fs.f_type as u64 == MAGIC);
    named && file.stat.kind() == libc::S_IFREG && kind()
}

/// Who is to be told of the next message, from what the queue reads as.
fn notified(text: &str) -> Option<i32> {
    let mut words = text.split_whitespace();
    let pid = words.find_map(|word| word.strip_prefix("NOTIFY_PID:"))?;
    pid.parse().ok().filter(|pid| *pid != 0)
}

fn save(capture: &mut Capture, opened: &[usize]) -> Result<Queue, PluginError> {
    let job = capture.job;
    let file = &job.files[opened[0]];
    let (pid, fd) = job.place(file);
    let what = || format!("read {}", job.describe(file));
    let path = format!("/proc/{pid}/fd/{fd}");
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let own = rustix::fs::open(path, flags, Mode::empty()).to(what)?;
    let limits = sys::limits(&own).to(what)?;
    let messages = look(&own, bytes_in(&own).to(what)?, limits).to(what)?;
    let link = file.link.as_bytes();
    let unlinked = file.stat.links == 0;
    let name = if unlinked { link.strip_suffix(SUFFIX).unwrap_or(link) } else { link };
    let messages = messages
        .into_iter()
        .map(|(priority, bytes)| Ok((priority, capture.blob(&bytes)?)))
        .collect::<Result<_, PluginError>>()?;
    Ok(Queue {
        name: SavedPath(OsStr::from_bytes(name).into()),
        unlinked,
        mode: file.stat.mode & 0o7777,
        limits,
        messages,
        descriptions: opened.iter().map(|index| *index as u32).collect(),
    })
}

/// Bytes of all messages in the queue, as it reads.
fn bytes_in(queue: &OwnedFd) -> io::Result<usize> {
    let mut text = [0; 256];
    let length = rustix::io::pread(queue, &mut text, 0)?;
    let words = std::str::from_utf8(&text[..length]).unwrap_or("").split_whitespace();
    let size = words.filter_map(|word| word.strip_prefix("QSIZE:")).next();
    size.and_then(|size| size.parse().ok())
        .ok_or_else(|| io::Error::other("a queue of unknown form"))
}

/// The messages by priority, in their order. Nobody can look at one but by taking it, so all are
/// taken out and put back, in one go that is finished even if this process is killed.
fn look(
    queue: &OwnedFd,
    bytes: usize,
    (most, longest): (i64, i64),
) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let (most, longest) =
        (most.clamp(0, MAX_MESSAGES) as usize, longest.clamp(0, MAX_MESSAGE_LEN) as usize);
    let mut data = vec![0; bytes.min(most.saturating_mul(longest)) + longest];
    let mut taken: Vec<(u32, usize)> = Vec::with_capacity(most);
    survive(|| take_and_put(queue, longest, &mut data, &mut taken))??;
    let mut rest = &data[..];
    let message = |(priority, length): (u32, usize)| {
        let (bytes, behind) = rest.split_at(length);
        rest = behind;
        (priority, bytes.to_vec())
    };
    Ok(taken.into_iter().map(message).collect())
}

/// Allocates nothing: `data` and `taken` have room for all.
fn take_and_put(
    queue: &OwnedFd,
    longest: usize,
    data: &mut [u8],
    taken: &mut Vec<(u32, usize)>,
) -> io::Result<()> {
    let mut at = 0;
    let all = loop {
        if taken.len() == taken.capacity() || data.len() - at < longest {
            break Ok(());
        }
        match sys::take(queue, &mut data[at..at + longest]) {
            Ok(Some((length, priority))) => {
                taken.push((priority, length));
                at += length;
            }
            Ok(None) => break Ok(()),
            Err(e) => break Err(e),
        }
    };
    let (mut at, mut put) = (0, Ok(()));
    for (priority, length) in taken.iter() {
        // Whatever happens, all are put back in their order.
        put = put.and(sys::put(queue, &data[at..at + length], *priority));
        at += length;
    }
    put.and(all)
}

fn make(queue: &Queue, world: &mut World) -> Result<(), PluginError> {
    let shown = queue.name.0.display();
    let (most, longest) = queue.limits;
    if !(1..=MAX_MESSAGES).contains(&most) || !(1..=MAX_MESSAGE_LEN).contains(&longest) {
        return Err(damaged(format!("the limits of the message queue {shown}")));
    }
    let name = queue.name.0.as_os_str().as_bytes();
    let name = CString::new(name.strip_prefix(b"/").unwrap_or(name));
    let name = name.map_err(|_| damaged("the name of a message queue"))?;
    raise("msg_max", most);
    raise("msgsize_max", longest);
    let own = sys::make(&name, most, longest)
        .to(|| format!("make the message queue {shown} (fs.mqueue, ulimit -q)"))?;
    if queue.unlinked {
        sys::unlink(&name).to(|| format!("unlink the message queue {shown}"))?;
    }
    for (priority, blob) in &queue.messages {
        let bytes = world.blob(blob)?;
        sys::put(&own, &bytes, *priority).to(|| format!("fill the message queue {shown}"))?;
    }
    let file = File::from(own);
    for description in &queue.descriptions {
        let fd = open::through(&file, world.flags(*description)?)?;
        world.made(*description, fd)?;
    }
    fchmod(&file, Mode::from_raw_mode(queue.mode & 0o7777))
        .to(|| format!("set the mode of {shown}"))
}

/// Raises a limit of the new IPC namespace if it is below `least`. Where that is forbidden, what
/// needs more says so.
fn raise(name: &str, least: i64) {
    let path = format!("/proc/sys/fs/mqueue/{name}");
    let now = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
    if now.is_some_and(|now: i64| now < least) {
        let _ = fs::write(&path, least.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_is_seen() {
        let text = |pid| format!("QSIZE:129        NOTIFY:2     SIGNO:0     NOTIFY_PID:{pid}\n");
        assert_eq!(notified(&text("8260  ")), Some(8260));
        assert_eq!(notified(&text("0     ")), None);
        assert_eq!(notified(""), None);
    }
}
