//! The streams that the job was started with, and its terminal: bound to those of the restart.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Holder, Job, state};
use crate::plugins::procfs::{Seen, Stat, descriptor};
use crate::plugins::recreate::again;
use crate::plugins::survey::SurveyOptions;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, own, pipes, pty, sys};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::termios::isatty;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cmp::Ordering;

/// What a description is bound to at a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    /// 0, 1 or 2.
    Standard(u8),
    /// /dev/tty.
    Terminal,
}

#[derive(Debug)]
pub(crate) struct Streams;

impl Plugin for Streams {
    fn name(&self) -> &'static str {
        "streams"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        Claim::when(file.stream.is_some())
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let stream = |index: &usize| Some((*index as u32, capture.file(*index).stream?));
        state(mine.iter().filter_map(stream).map(Ok))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for (description, stream) in world.parse::<Vec<(u32, Stream)>>(state)? {
            let flags = world.flags(description)?;
            let fd = match stream {
                Stream::Standard(number) => standard(world, number, flags)?,
                Stream::Terminal => terminal(world, flags)?,
            };
            world.made(description, fd)?;
        }
        Ok(())
    }
}

fn standard(world: &World, number: u8, flags: u32) -> Result<OwnedFd, PluginError> {
    let stream = world.options.streams.get(usize::from(number));
    match stream.ok_or_else(|| damaged(format!("no standard stream {number}")))? {
        Some(fd) => again(fd),
        None => open_like("/dev/null", flags),
    }
}

/// The terminal of the restart: a stream of its own that is one, or /dev/tty.
fn terminal(world: &mut World, flags: u32) -> Result<OwnedFd, PluginError> {
    if let Some(fd) = world.options.streams.iter().flatten().find(|fd| isatty(fd)) {
        return again(fd);
    }
    open_like("/dev/tty", flags).or_else(|_| {
        world.note("there is no terminal here: the job finds /dev/null instead".to_owned());
        open_like("/dev/null", flags)
    })
}

fn open_like(path: &str, flags: u32) -> Result<OwnedFd, PluginError> {
    let access = OFlags::from_bits_retain(flags & libc::O_ACCMODE as u32);
    open(path, access | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
        .to(|| format!("open {path}"))
}

/// Marks what is one of the streams. A description that stands for several of them (a terminal is
/// usually opened once for all three) falls apart: each may be bound to something else later.
pub(crate) fn recognise(job: &mut Job, options: &SurveyOptions) {
    let own: Vec<Own> =
        (0..3).filter_map(|number| Own::of(number, options.streams[number as usize]?)).collect();
    let mut files = Vec::new();
    for file in job.files.clone() {
        let candidates: Vec<u8> = own
            .iter()
            .filter(|own| own.is(&file, job.place(&file)))
            .map(|own| own.number)
            .collect();
        let parts = if candidates.is_empty() { vec![file] } else { split(file, &candidates) };
        files.extend(parts);
    }
    job.set_files(files);
    let outside = |file: &Found| match file.stream {
        None => leading_outside(file, job),
        Some(_) => None,
    };
    let parts = job.files.iter().map(|file| match outside(file) {
        Some(numbers) => split(file.clone(), &numbers),
        None => vec![file.clone()],
    });
    let parts = parts.flatten().collect();
    job.set_files(parts);
}

/// One of this process's streams.
struct Own {
    number: u8,
    fd: i32,
    stat: Stat,
    access: u32,
}

impl Own {
    fn of(number: u8, fd: BorrowedFd) -> Option<Own> {
        let (pid, fd) = (std::process::id() as i32, fd.as_raw_fd());
        let Seen { stat, info, .. } = descriptor(pid, fd).ok()??;
        Some(Own { number, fd, stat, access: info.flags & libc::O_ACCMODE as u32 })
    }

    /// The same description; or, where no content could tell them apart, another one of the same
    /// thing.
    fn is(&self, file: &Found, place: (i32, i32)) -> bool {
        if !self.stat.is(&file.stat) {
            return false;
        }
        let terminal = file.stat.kind() == libc::S_IFCHR && is_terminal(file.stat.special);
        let pipe = file.stat.kind() == libc::S_IFIFO && file.access() == self.access;
        if terminal || pipe {
            return true;
        }
        let me = std::process::id() as i32;
        matches!(sys::compare_files((me, self.fd), place), Ok(Ordering::Equal))
    }
}

/// Consoles, serial lines and pseudo-terminals (devices.txt), but not where these are made.
fn is_terminal(device: u64) -> bool {
    let (major, minor) = (libc::major(device), libc::minor(device));
    matches!(major, 4 | 5 | 136..=143) && (major, minor) != (5, 2)
}

/// One file for each stream that its holders use. What has a terminal under another number means
/// the terminal; what has something else means the first stream that this is.
fn split(file: Found, candidates: &[u8]) -> Vec<Found> {
    let terminal = file.stat.kind() == libc::S_IFCHR && is_terminal(file.stat.special);
    let other = match candidates.first() {
        _ if terminal => Stream::Terminal,
        Some(first) => Stream::Standard(*first),
        None => return vec![file],
    };
    // One that is under way has no number.
    if file.is_under_way() {
        return vec![Found { stream: Some(other), ..file }];
    }
    let stream = |holder: &Holder| {
        let same = candidates.iter().find(|number| i32::from(**number) == holder.fd);
        same.map_or(other, |number| Stream::Standard(*number))
    };
    let part = |wanted: Stream| {
        let mine = |holder: &&Holder| stream(holder) == wanted;
        let holders: Vec<_> = file.holders.iter().filter(mine).copied().collect();
        (!holders.is_empty()).then(|| Found { holders, stream: Some(wanted), ..file.clone() })
    };
    let standard = candidates.iter().map(|number| Stream::Standard(*number));
    standard.chain(terminal.then_some(other)).filter_map(part).collect()
}

/// The streams' numbers under which something is held that leads outside: a terminal, under any
/// number or name, or a pipe under one of these.
fn leading_outside(file: &Found, job: &Job) -> Option<Vec<u8>> {
    let numbers =
        (0..3u8).filter(|number| file.holders.iter().any(|holder| holder.fd == i32::from(*number)));
    let numbers: Vec<u8> = numbers.collect();
    if file.stat.kind() == libc::S_IFCHR && !file.is_path_only() {
        // Not serial lines: only a pty, and the terminal by its name (devices.txt).
        let device = (libc::major(file.stat.special), libc::minor(file.stat.special));
        let outside = matches!(device, (136..=143, _) | (5, 0));
        let inside = pty::inside(file, job) || own::terminal(file, job);
        return (outside && !inside).then_some(numbers);
    }
    (!numbers.is_empty() && pipes::leads_outside(file, job)).then_some(numbers)
}
