//! POSIX message queues: name, limits and the messages that wait, with their priorities; and who
//! asked to be told of the next one.

mod notice;
mod sys;

pub(crate) use notice::{Wanted, wanted};

use crate::plugins::apart::survive;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::files::open;
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::SavedPath;
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin};
use notice::{Registered, Told};
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
/// The plugin's.
const NAME: &str = "mqueue";
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
    /// Who is to be told of the next message, which finds it empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    registered: Option<Registered>,
}

impl Plugin for Queues {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match is_one(file, job) {
            true => notice::claim(file, job),
            false => Claim::No,
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

fn save(capture: &mut Capture, opened: &[usize]) -> Result<Queue, PluginError> {
    let job = capture.job;
    let file = &job.files[opened[0]];
    let (pid, fd) = job.place(file);
    let what = || format!("read {}", job.describe(file));
    let path = format!("/proc/{pid}/fd/{fd}");
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let own = rustix::fs::open(path, flags, Mode::empty()).to(what)?;
    let limits = sys::limits(&own).to(what)?;
    let told = Told::of(&own).to(what)?;
    let waiting = sys::waiting(&own).to(what)? > 0;
    let registered = notice::registered(&told, waiting, file, job)
        .map_err(|why| PluginError::Refused(format!("{}: {why}", job.describe(file))))?;
    let messages = look(&own, told.bytes, limits).to(what)?;
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
        registered,
    })
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
