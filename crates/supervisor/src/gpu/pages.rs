//! The host's pages of managed memory that lies on devices page by page: what the client alone has
//! of it is saved with the client, and its userfaultfd is made anew at a restart.
//!
//! Nothing of this runs in the client but system calls: its file says of itself what is current
//! ([`kedge_transport::managed`]).

use super::ring::{data, seek};
use super::{Client, failed};
use kedge_cuda_types::arena::DEVICE_BASE;
use kedge_process::plugins::{
    Argument, Blob, Capture, Found, InjectedCall, Job, PluginError, World,
};
use kedge_transport::managed::{self, PAGE};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Bytes that are read at once, and of a blob.
const CHUNK: u64 = 1 << 20;
const PIECE: usize = 8 << 20;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)` and `_IOWR(0xaa, 0, struct uffdio_register)`.
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const API: u64 = 0xaa;
/// Faults of the kernel's own are not told: an ordinary user may have no others.
const USER_MODE_ONLY: u64 = 1;

/// What is saved of one client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedPages {
    /// Descriptions of the file, and of the userfaultfd.
    files: Vec<u32>,
    watchers: Vec<u32>,
    /// The file's length.
    length: u64,
    pieces: Vec<Piece>,
    /// What is watched: first addresses and ends.
    views: Vec<(u64, u64)>,
}

/// Parts of the file: where each begins and ends, and the bytes of all, one after the other.
#[derive(Debug, Serialize, Deserialize)]
struct Piece {
    runs: Vec<(u64, u64)>,
    bytes: Blob,
}

/// Whether it is a file of managed memory's pages.
pub(super) fn is_file(file: &Found) -> bool {
    file.link.to_string_lossy().starts_with(&format!("/memfd:{}", managed::NAME))
}

/// Whether it is a client's userfaultfd for its managed memory.
pub(super) fn is_watcher(file: &Found, job: &Job, client: &Client) -> bool {
    let number = |head: File| word(&head, managed::DESCRIPTOR).ok();
    let known = || file_of(job, client).and_then(|(_, file)| number(ready(file)?));
    let of_client = |number| client.holds(file, job, Some(number));
    file.anonymous() == Some("userfaultfd") && known().is_some_and(|it| of_client(it as i32))
}

/// Whether a client is just beginning to have such memory: half of it is nobody's.
pub(super) fn is_starting(file: &Found, job: &Job, client: &Client) -> bool {
    let unready = || file_of(job, client).is_some_and(|(_, file)| ready(file).is_none());
    file.anonymous() == Some("userfaultfd") && client.holds(file, job, None) && unready()
}

/// Returns the client's file: its index, and a descriptor.
fn file_of(job: &Job, client: &Client) -> Option<(usize, File)> {
    let mine = |file: &Found| is_file(file) && client.holds(file, job, None);
    let index = job.files.iter().position(mine)?;
    Some((index, job.duplicate(&job.files[index]).ok()?.into()))
}

/// Returns the file if its head is right.
fn ready(file: File) -> Option<File> {
    (word(&file, managed::READY).ok()? == managed::MAGIC).then_some(file)
}

/// Reads a word of the head.
fn word(file: &File, place: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, head(file)? + place * 8)?;
    Ok(u64::from_le_bytes(bytes))
}

fn head(file: &File) -> io::Result<u64> {
    let devices = managed::devices(file.metadata()?.len());
    devices.map(managed::head).ok_or_else(|| io::Error::other("it has another length"))
}

/// Saves what only the client has, in the pause.
pub(super) fn save(
    client: &Client,
    capture: &mut Capture,
    (files, watchers): (Vec<u32>, Vec<u32>),
) -> Result<Option<SavedPages>, PluginError> {
    let Some((index, file)) = file_of(capture.job, client) else { return Ok(None) };
    let what = || failed("look at the pages of managed memory");
    let length = file.metadata().map_err(what())?.len();
    let runs = current(&file).map_err(what())?;
    let views = views(client, capture, index);
    let mut saved = SavedPages { files, watchers, length, pieces: Vec::new(), views };
    let (mut runs_of, mut bytes) = (Vec::new(), Vec::new());
    for run in runs {
        let mut at = run.start;
        // Bits of what is not there are the program's own invention.
        while let Some(start) = seek(&file, at, libc::SEEK_DATA).map_err(what())? {
            if start >= run.end {
                break;
            }
            at = run.end.min(start + CHUNK);
            let before = bytes.len();
            bytes.resize(before + (at - start) as usize, 0);
            let part = &mut bytes[before..];
            file.read_exact_at(part, start).map_err(what())?;
            match part.iter().all(|byte| *byte == 0) {
                true => bytes.truncate(before),
                false => runs_of.push((start, at)),
            }
            if bytes.len() >= PIECE {
                let bytes = capture.blob(&std::mem::take(&mut bytes))?;
                saved.pieces.push(Piece { runs: std::mem::take(&mut runs_of), bytes });
            }
        }
    }
    saved.pieces.push(Piece { runs: runs_of, bytes: capture.blob(&bytes)? });
    Ok(Some(saved))
}

/// Returns where the client maps its file at the addresses that devices have.
fn views(client: &Client, capture: &Capture, index: usize) -> Vec<(u64, u64)> {
    let found = capture.file(index);
    let holder = found.holders.iter().map(|holder| holder.process);
    let holder = holder.filter(|process| client.is(&capture.job.processes[*process])).min();
    let all = holder.map_or(Vec::new(), |process| capture.mapped(process, found));
    let views = all.into_iter().filter(|(start, _, offset)| *start == DEVICE_BASE + offset);
    views.map(|(start, end, _)| (start, end)).collect()
}

/// Returns which bytes of the file are to be saved: what it says of itself, and the pages that are
/// current there; all that there are while it is being changed, or says nothing yet.
fn current(file: &File) -> io::Result<Vec<Range<u64>>> {
    let head = head(file)?;
    let devices = managed::devices(head + PAGE).unwrap_or(0);
    let bits = managed::bits(devices);
    let told = word(file, managed::READY)? == managed::MAGIC && word(file, managed::BUSY)? == 0;
    let tail = data(file, bits)?;
    let mut runs = match told {
        true => Vec::new(),
        false => data(file, 0)?.into_iter().filter(|run| run.0 < bits).collect(),
    };
    for (start, end) in tail.iter().filter(|_| told) {
        let mut words = vec![0; (*end.min(&head)).saturating_sub(*start) as usize];
        file.read_exact_at(&mut words, *start)?;
        add_pages(&words, (start - bits) * 8, &mut runs);
    }
    let runs = runs.into_iter().map(|(start, end)| start..end.min(bits));
    Ok(runs.chain(tail.into_iter().map(|(start, end)| start..end)).collect())
}

/// Adds the bytes of the pages whose bits are set; the first bit is that of page `first`.
fn add_pages(bits: &[u8], first: u64, runs: &mut Vec<(u64, u64)>) {
    for (at, byte) in (0..).zip(bits).filter(|(_, byte)| **byte != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 != 0) {
            let start = (first + at * 8 + bit) * PAGE;
            match runs.last_mut() {
                Some((_, end)) if *end == start => *end += PAGE,
                _ => runs.push((start, start + PAGE)),
            }
        }
    }
}

/// Makes the file again, and has the client, `pid` as it knows itself, make its userfaultfd.
pub(super) fn restore(saved: &SavedPages, pid: i32, world: &mut World) -> Result<(), PluginError> {
    let file = fill(saved, world)?;
    let again = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().map_err(failed("duplicate it"));
    for description in &saved.files {
        world.made(*description, again(&file)?)?;
    }
    let what = "make a userfaultfd for managed memory";
    for description in &saved.watchers {
        // Only the process itself can make it: this keeps its place.
        world.made(*description, OwnedFd::from(File::open("/dev/null").map_err(failed(what))?))?;
        let flags = vec![Argument::Number(flags() | libc::O_CLOEXEC as u64)];
        world.reopen(*description, (libc::SYS_userfaultfd, flags), 0, what);
    }
    let slots = saved.watchers.iter().flat_map(|description| world.holders(*description));
    let Some(fd) = slots.filter(|slot| slot.pid == pid).map(|slot| slot.fd).min() else {
        return Ok(());
    };
    let told = |place| word(&file, place).map_err(failed("read the pages of managed memory"));
    let (features, modes) = (told(managed::FEATURES)?, told(managed::MODES)?);
    let mut ask = |request: u64, words: &[u64]| {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let arguments =
            vec![Argument::Number(fd as u64), Argument::Number(request), Argument::Bytes(bytes)];
        world.inject(InjectedCall {
            pid,
            number: libc::SYS_ioctl,
            arguments,
            what: "watch managed memory (userfaultfd)".to_owned(),
        });
    };
    ask(UFFDIO_API, &[API, features, 0]);
    for (start, end) in &saved.views {
        ask(UFFDIO_REGISTER, &[*start, end - start, modes, 0]);
    }
    Ok(())
}

/// Makes the file with its bytes; it says that it is another than it was.
fn fill(saved: &SavedPages, world: &World) -> Result<File, PluginError> {
    let damaged = |what: &str| PluginError::Damaged(format!("managed memory: {what}"));
    let devices = managed::devices(saved.length).ok_or_else(|| damaged("no such length"))?;
    let end = DEVICE_BASE + managed::bits(devices);
    let is_view = |(start, stop): &(u64, u64)| {
        DEVICE_BASE <= *start && start < stop && *stop <= end && (start | stop) % PAGE == 0
    };
    if !saved.views.iter().all(is_view) {
        return Err(damaged("a mapping outside of the devices' arenas"));
    }
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create(managed::NAME, flags).map_err(io::Error::from);
    let file = File::from(file.map_err(failed("make a file for managed memory"))?);
    let what = || failed("fill the pages of managed memory");
    file.set_len(saved.length).map_err(what())?;
    for Piece { runs, bytes } in &saved.pieces {
        let bytes = world.blob(bytes)?;
        let mut left = &bytes[..];
        for (start, end) in runs {
            let length = end.checked_sub(*start).filter(|_| *end <= saved.length);
            let length = length.and_then(|length| usize::try_from(length).ok());
            let part = length.and_then(|length| left.split_at_checked(length));
            let (part, rest) = part.ok_or_else(|| damaged("other bytes than it says"))?;
            file.write_all_at(part, *start).map_err(what())?;
            left = rest;
        }
    }
    let generation = word(&file, managed::GENERATION).map_err(what())?.wrapping_add(1);
    let place = managed::head(devices) + managed::GENERATION * 8;
    file.write_all_at(&generation.to_le_bytes(), place).map_err(what())?;
    Ok(file)
}

/// Asks for faults of the kernel's own as well where that is allowed, as the client did.
fn flags() -> u64 {
    // SAFETY: the call touches no memory; what it makes is closed at once.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd < 0 {
        return USER_MODE_ONLY;
    }
    // SAFETY: it was just made, and is nobody else's.
    unsafe { libc::close(fd as i32) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create(managed::NAME, flags).unwrap());
        file.set_len(managed::length(1)).unwrap();
        file
    }

    fn tell(file: &File, place: u64, value: u64) {
        file.write_all_at(&value.to_le_bytes(), managed::head(1) + place * 8).unwrap();
    }

    #[test]
    fn only_pages_that_are_current_are_saved() {
        let file = file();
        for page in [3, 4, 9, 700] {
            file.write_all_at(&[1; PAGE as usize], page * PAGE).unwrap();
        }
        // Of pages 3, 4 and 700 the host has the current bytes.
        file.write_all_at(&[0b1_1000], managed::bits(1)).unwrap();
        file.write_all_at(&[1 << 4], managed::bits(1) + 700 / 8).unwrap();
        tell(&file, managed::READY, managed::MAGIC);
        let tail =
            [managed::bits(1)..managed::bits(1) + PAGE, managed::head(1)..managed::length(1)];
        let own = [3 * PAGE..5 * PAGE, 700 * PAGE..701 * PAGE];
        assert_eq!(current(&file).unwrap(), [&own[..], &tail].concat());
        // While it is being changed, nobody knows.
        tell(&file, managed::BUSY, 1);
        let all = [3 * PAGE..5 * PAGE, 9 * PAGE..10 * PAGE, 700 * PAGE..701 * PAGE];
        assert_eq!(current(&file).unwrap(), [&all[..], &tail].concat());
    }

    #[test]
    fn a_file_of_another_length_is_none() {
        let file = file();
        assert!(ready(file.try_clone().unwrap()).is_none());
        file.set_len(PAGE).unwrap();
        assert!(current(&file).is_err() && ready(file).is_none());
    }
}
