//! inotify: its watches, under their numbers. Events that wait are lost, as the kernel shows them
//! to nobody but their reader; the checkpoint warns.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::ResolvedPath;
use crate::plugins::world::{Late, World};
use crate::plugins::{Claim, Plugin, reach, sys};
use rustix::fd::OwnedFd;
use rustix::fs::inotify;
use rustix::io::ioctl_fionread;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Most names that are looked at to find what is watched.
const MAX_NAMES: usize = 50_000;

#[derive(Debug)]
pub(crate) struct Inotify;

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    watches: Vec<Watch>,
}

/// A watch, with the path of what it watches.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Watch {
    number: i32,
    mask: u32,
    path: ResolvedPath,
}

/// A watch as the kernel tells it: number, mask, device and inode.
type Told = (i32, u32, (u64, u64));

impl Plugin for Inotify {
    fn name(&self) -> &'static str {
        "inotify"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        if file.anonymous() != Some("inotify") {
            return Claim::No;
        }
        let Some(told) = told(file) else {
            return Claim::Refused("the kernel does not tell its watches".to_owned());
        };
        match find(&told, job).iter().position(Option::is_none) {
            None => Claim::Yes,
            Some(at) => Claim::Refused(format!(
                "the path of what watch {} watches (inode {}) is not found below the directories \
                 that the job uses",
                told[at].0, told[at].2.1
            )),
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
        state(mine.iter().map(|index| save(capture, *index)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for saved in world.parse::<Vec<Saved>>(state)? {
            let fd = new()?;
            let mapped = |watch: Watch| {
                let path = ResolvedPath(world.path(&watch.path.0));
                Watch { path, ..watch }
            };
            let watches: Vec<Watch> = saved.watches.into_iter().map(mapped).collect();
            let own = fd.try_clone().to(|| "duplicate an inotify")?;
            world.made(saved.description, fd)?;
            // It is not to see how files are put back. What would fail then, is to fail before.
            world.after(move |world| {
                let there = |watch: &&Watch| world.changes.home(&watch.path.0).is_none();
                let there: Vec<Watch> = watches.iter().filter(there).cloned().collect();
                add(&new()?, &there)?;
                world.late.push(Late::Watch(own, watches));
                Ok(())
            });
        }
        Ok(())
    }
}

fn new() -> Result<OwnedFd, PluginError> {
    inotify::init(inotify::CreateFlags::CLOEXEC).to(|| "make an inotify")
}

/// `wd:1 ino:2 sdev:3 mask:4 …`, all but the first hexadecimal.
fn told(file: &Found) -> Option<Vec<Told>> {
    let watch = |line: &str| {
        let value = |name: &str| {
            line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))
        };
        let hex = |name| u64::from_str_radix(value(name)?, 16).ok();
        let device = hex("sdev")?;
        // The kernel's own form: 12 bits, 20 bits.
        let device = libc::makedev((device >> 20) as u32, (device & 0xf_ffff) as u32);
        Some((value("wd")?.parse().ok()?, hex("mask")? as u32, (device, hex("ino")?)))
    };
    file.info.lines("inotify wd").map(watch).collect()
}

fn save(capture: &mut Capture, index: usize) -> Result<Saved, PluginError> {
    let file = capture.file(index);
    let what = capture.job.describe(file);
    let waiting = ioctl_fionread(capture.duplicate(index)?).to(|| format!("look at {what}"))?;
    let told = told(file).unwrap_or_default();
    let paths = find(&told, capture.job);
    if waiting > 0 {
        capture.warnings.push(format!("{what} has events that wait: a restart loses them"));
    }
    let watch = |((number, mask, _), path): (Told, Option<PathBuf>)| {
        let path = path.ok_or_else(|| PluginError::Refused(format!("{what}: a watch is lost")))?;
        Ok(Watch { number, mask, path: ResolvedPath(path) })
    };
    let watches =
        told.into_iter().zip(paths).map(watch).collect::<Result<Vec<_>, PluginError>>()?;
    Ok(Saved { description: index as u32, watches })
}

/// The paths of what is watched: looked for at, beside and below what the job has open and works
/// in, nearest first.
fn find(told: &[Told], job: &Job) -> Vec<Option<PathBuf>> {
    let mut found = vec![None; told.len()];
    let mut left: BTreeSet<(u64, u64)> = told.iter().map(|watch| watch.2).collect();
    let mut seen = BTreeSet::new();
    let mut queue = roots(job);
    let mut names = 0;
    while let Some(path) = queue.pop_front() {
        names += 1;
        if left.is_empty() || names > MAX_NAMES {
            break;
        }
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let id = (metadata.dev(), metadata.ino());
        if !seen.insert(id) {
            continue;
        }
        if left.remove(&id) {
            for (found, _) in found.iter_mut().zip(told).filter(|(_, watch)| watch.2 == id) {
                *found = Some(path.clone());
            }
        }
        if metadata.is_dir() && left.iter().any(|watched| watched.0 == id.0) {
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            queue.extend(entries.take(MAX_NAMES.saturating_sub(queue.len())).map(|e| e.path()));
        }
    }
    found
}

fn roots(job: &Job) -> VecDeque<PathBuf> {
    let open = job.files.iter().map(|file| PathBuf::from(&file.link)).filter(|p| p.is_absolute());
    let working =
        job.processes.iter().filter_map(|p| fs::read_link(format!("/proc/{}/cwd", p.at)).ok());
    let near: Vec<PathBuf> = open.chain(working).collect();
    let mut queue: VecDeque<PathBuf> = near.iter().cloned().collect();
    // Their ancestors' own inodes and, at last, all below these.
    let ancestors: BTreeSet<PathBuf> =
        near.iter().flat_map(|path| path.ancestors().skip(1).map(PathBuf::from)).collect();
    queue.extend(ancestors.into_iter().rev());
    queue
}

/// Adds the watches, under their numbers.
pub(crate) fn add(fd: &OwnedFd, watches: &[Watch]) -> Result<(), PluginError> {
    watches.iter().try_for_each(|watch| add_one(fd, watch))
}

fn add_one(fd: &OwnedFd, watch: &Watch) -> Result<(), PluginError> {
    /// What a program asks for; the rest is added by the kernel.
    const ASKED: u32 = libc::IN_ALL_EVENTS | libc::IN_EXCL_UNLINK | libc::IN_ONESHOT;
    if watch.number < 1 {
        return Err(damaged(format!("watch {}", watch.number)));
    }
    let path = &watch.path.0;
    let what = || format!("watch {} again", path.display());
    sys::set_next_watch(fd, watch.number).to(what)?;
    // The path was resolved: its last name is what is watched, be it a link.
    let found = reach::find(path, false).to(what)?;
    let flags = inotify::WatchFlags::from_bits_retain(watch.mask & ASKED);
    let number = inotify::add_watch(fd, reach::through(&found), flags).to(what)?;
    match number == watch.number {
        true => Ok(()),
        false => Err(damaged(format!("{} is watched twice", path.display()))),
    }
}
