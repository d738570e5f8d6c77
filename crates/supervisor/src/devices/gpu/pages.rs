//! The host's pages of managed memory that lies on devices page by page: what the client alone has
//! of it is saved with the client, and its userfaultfd is made anew at a restart.
//!
//! Nothing of this runs in the client but system calls: its file says of itself what is current
//! ([`kedge_transport::managed`]).

use super::ring::seek;
use super::{Client, Part, failed};
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
    /// Parts of the file, as [`pack`] makes them.
    pieces: Vec<Blob>,
    /// What is watched: first addresses and ends.
    views: Vec<(u64, u64)>,
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
    let mine = || client.holds(file, job, None);
    match is_file(file) {
        true => !has_length(file) && mine(),
        false => file.anonymous() == Some("userfaultfd") && mine() && unready(),
    }
}

/// Whether a file is as long as it is to be: at first it is empty.
pub(super) fn has_length(file: &Found) -> bool {
    managed::devices(file.stat.size).is_some()
}

/// Returns the client's file: its index, and a descriptor.
fn file_of(job: &Job, client: &Client) -> Option<(usize, File)> {
    let mine = |file: &Found| is_file(file) && has_length(file) && client.holds(file, job, None);
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
    let length = file.metadata().map_err(failed("look at the pages of managed memory"))?.len();
    let views = views(client, capture, index, length);
    let mut saving = Saving { file: &file, runs: Vec::new(), bytes: Vec::new() };
    let mut pieces = Vec::new();
    each_current(&file, &mut |run| {
        for start in run.clone().step_by(CHUNK as usize) {
            saving.add(start..run.end.min(start + CHUNK))?;
            if saving.bytes.len() >= PIECE {
                pieces.push(capture.blob(&saving.take())?);
            }
        }
        Ok(())
    })?;
    pieces.push(capture.blob(&saving.take())?);
    Ok(Some(SavedPages { files, watchers, length, pieces, views }))
}

/// Parts of a file that are in no piece yet: where each begins and ends, and the bytes of all.
struct Saving<'a> {
    file: &'a File,
    runs: Vec<(u64, u64)>,
    bytes: Vec<u8>,
}

impl Saving<'_> {
    fn add(&mut self, run: Range<u64>) -> Result<(), PluginError> {
        let before = self.bytes.len();
        self.bytes.resize(before + (run.end - run.start) as usize, 0);
        let part = &mut self.bytes[before..];
        self.file.read_exact_at(part, run.start).map_err(failed("read managed memory"))?;
        match part.iter().all(|byte| *byte == 0) {
            true => self.bytes.truncate(before),
            false => self.runs.push((run.start, run.end)),
        }
        Ok(())
    }

    fn take(&mut self) -> Vec<u8> {
        pack(&std::mem::take(&mut self.runs), &std::mem::take(&mut self.bytes))
    }
}

/// Makes a piece: how many runs there are, where each begins and ends, and the bytes of all, one
/// after the other.
fn pack(runs: &[(u64, u64)], bytes: &[u8]) -> Vec<u8> {
    let ends = runs.iter().flat_map(|(start, end)| [*start, *end]);
    let words = std::iter::once(runs.len() as u64).chain(ends);
    words.flat_map(u64::to_le_bytes).chain(bytes.iter().copied()).collect()
}

/// Returns the runs of a piece: where each begins, and its bytes. `None` if it is none, or reaches
/// beyond `length`.
fn unpack(piece: &[u8], length: u64) -> Option<Vec<(u64, &[u8])>> {
    let (count, rest) = piece.split_first_chunk::<8>()?;
    let ends = usize::try_from(u64::from_le_bytes(*count)).ok()?.checked_mul(16)?;
    let (ends, mut bytes) = rest.split_at_checked(ends)?;
    let word = |half: &[u8]| half.try_into().map(u64::from_le_bytes).ok();
    let mut runs = Vec::with_capacity(ends.len() / 16);
    for run in ends.chunks_exact(16) {
        let (start, end) = (word(&run[..8])?, word(&run[8..])?);
        let size = end.checked_sub(start).filter(|_| end <= length)?;
        let (part, rest) = bytes.split_at_checked(usize::try_from(size).ok()?)?;
        runs.push((start, part));
        bytes = rest;
    }
    bytes.is_empty().then_some(runs)
}

/// Returns where the client maps its file at the addresses that devices have; and there its shared
/// arena, which has the pages of blocks that are host memory, or have been.
fn views(client: &Client, capture: &Capture, index: usize, length: u64) -> Vec<(u64, u64)> {
    let found = capture.file(index);
    let holder = found.holders.iter().map(|holder| holder.process);
    let holder = holder.filter(|process| client.is(&capture.job.processes[*process])).min();
    let Some(process) = holder else { return Vec::new() };
    let own = capture.mapped(process, found).into_iter();
    let own = own.filter(|(start, _, offset)| *start == DEVICE_BASE + offset);
    let is_arena = |file: &&Found| client.part(file, capture.job) == Some(Part::Arena);
    let arena = capture.job.files.iter().find(is_arena);
    let shared = arena.map_or(Vec::new(), |arena| capture.mapped(process, arena));
    let end = DEVICE_BASE + managed::devices(length).map_or(0, managed::bits);
    let shared =
        shared.into_iter().filter(|(start, stop, _)| DEVICE_BASE <= *start && *stop <= end);
    own.chain(shared).map(|(start, end, _)| (start, end)).collect()
}

/// Calls `each` with the bytes of the file that are to be saved, rising: the pages that are there
/// and current, and what it says of itself; all that there are while it is being changed, or says
/// nothing yet. What the program says of pages that are not there is not even looked at.
fn each_current(
    file: &File,
    each: &mut dyn FnMut(Range<u64>) -> Result<(), PluginError>,
) -> Result<(), PluginError> {
    let what = || failed("look at the pages of managed memory");
    let head = head(file).map_err(what())?;
    let bits = managed::bits(managed::devices(head + PAGE).unwrap_or(0));
    let told = |place| word(file, place).map_err(what());
    let told = told(managed::READY)? == managed::MAGIC && told(managed::BUSY)? == 0;
    let mut at = 0;
    while let Some(start) = seek(file, at, libc::SEEK_DATA).map_err(what())? {
        let end = seek(file, start, libc::SEEK_HOLE).map_err(what())?.unwrap_or(start);
        if start < bits && told {
            for from in (start..end.min(bits)).step_by(CHUNK as usize) {
                let part = from..(from + CHUNK).min(end).min(bits);
                set_pages(file, bits, &part)
                    .map_err(what())?
                    .into_iter()
                    .try_for_each(&mut *each)?;
            }
        } else if start < bits {
            each(start..end.min(bits))?;
        }
        if end > bits {
            each(start.max(bits)..end)?;
        }
        if end <= start {
            break;
        }
        at = end;
    }
    Ok(())
}

/// Returns which pages of a part of the file have their bits set.
fn set_pages(file: &File, bits: u64, part: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let (first, last) = (part.start / PAGE, part.end.div_ceil(PAGE));
    let mut bytes = vec![0; (last.div_ceil(8) - first / 8) as usize];
    file.read_exact_at(&mut bytes, bits + first / 8)?;
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in first..last {
        if bytes[(page / 8 - first / 8) as usize] >> (page % 8) & 1 == 0 {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == page * PAGE => run.end += PAGE,
            _ => runs.push(page * PAGE..(page + 1) * PAGE),
        }
    }
    Ok(runs)
}

/// Makes the file again, and has the client, `pid` as it knows itself, make its userfaultfd.
pub(super) fn restore(saved: &SavedPages, pid: i32, world: &mut World) -> Result<(), PluginError> {
    let all_faults = flags() == 0;
    let file = fill(saved, all_faults, world)?;
    let again = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().map_err(failed("duplicate it"));
    for description in &saved.files {
        world.made(*description, again(&file)?)?;
    }
    let what = "make a userfaultfd for managed memory";
    for description in &saved.watchers {
        // Only the process itself can make it: this keeps its place.
        world.made(*description, OwnedFd::from(File::open("/dev/null").map_err(failed(what))?))?;
        let scope = if all_faults { 0 } else { USER_MODE_ONLY };
        let flags = vec![Argument::Number(scope | libc::O_CLOEXEC as u64)];
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

/// Makes the file with its bytes; it says that it is another than it was, and which faults are told
/// from now on.
fn fill(saved: &SavedPages, all_faults: bool, world: &mut World) -> Result<File, PluginError> {
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
    for piece in &saved.pieces {
        let piece = world.blob(piece)?;
        let runs = unpack(&piece, saved.length);
        for (start, part) in runs.ok_or_else(|| damaged("other bytes than it says"))? {
            file.write_all_at(part, start).map_err(what())?;
        }
    }
    if let Some(note) =
        note_on_faults(word(&file, managed::ALL_FAULTS).map_err(what())?, all_faults)
    {
        world.note(note.to_owned());
    }
    let generation = word(&file, managed::GENERATION).map_err(what())?.wrapping_add(1);
    let tell = |place, value: u64| {
        file.write_all_at(&value.to_le_bytes(), managed::head(devices) + place * 8).map_err(what())
    };
    tell(managed::GENERATION, generation)?;
    tell(managed::ALL_FAULTS, all_faults.into())?;
    Ok(file)
}

/// Returns what the user has to know where a program that was served all faults no longer is.
fn note_on_faults(before: u64, all_faults: bool) -> Option<&'static str> {
    (before != 0 && !all_faults).then_some(
        "managed memory: system calls on pages that are on the device fail with EFAULT from now \
         on, which they did not where the job ran before; they work with CAP_SYS_PTRACE or \
         vm.unprivileged_userfaultfd",
    )
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

    fn current(file: &File) -> Result<Vec<Range<u64>>, PluginError> {
        let mut runs = Vec::new();
        each_current(file, &mut |run| {
            runs.push(run);
            Ok(())
        })?;
        Ok(runs)
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

    /// A program can claim every other page of a terabyte: 2^27 runs.
    #[test]
    fn pages_that_are_not_there_cost_nothing() {
        let file = file();
        file.write_all_at(&[1; PAGE as usize], 5 * PAGE).unwrap();
        let claims = [0x55; 1 << 20];
        let places = (managed::bits(1)..managed::head(1)).step_by(claims.len());
        places.for_each(|at| file.write_all_at(&claims, at).unwrap());
        tell(&file, managed::READY, managed::MAGIC);
        assert_eq!(current(&file).unwrap().len(), 1);
        file.write_all_at(&[1; PAGE as usize], 4 * PAGE).unwrap();
        let runs = current(&file).unwrap();
        assert_eq!((runs.len(), &runs[0]), (2, &(4 * PAGE..5 * PAGE)));
    }

    #[test]
    fn pieces_come_back_as_they_were() {
        let piece = pack(&[(10, 13), (20, 21)], &[1, 2, 3, 4]);
        let runs = [(10, &[1, 2, 3][..]), (20, &[4])];
        assert_eq!(unpack(&piece, 21).as_deref(), Some(&runs[..]));
        assert_eq!(unpack(&pack(&[], &[]), 0).as_deref(), Some(&[][..]));
        let damaged = [
            pack(&[(10, 13)], &[1, 2]),
            pack(&[(10, 13)], &[1, 2, 3, 4]),
            pack(&[(13, 10)], &[]),
            pack(&[(20, 22)], &[1, 2]),
            u64::MAX.to_le_bytes().to_vec(),
            (1_u64 << 60).to_le_bytes().to_vec(),
            vec![1, 0, 0],
        ];
        assert!(damaged.iter().all(|piece| unpack(piece, 21).is_none()));
    }

    #[test]
    fn who_is_served_less_than_before_is_told() {
        let told = [(1, false), (1, true), (0, false), (0, true)];
        let told = told.map(|(before, now)| note_on_faults(before, now).is_some());
        assert_eq!(told, [true, false, false, false]);
    }

    #[test]
    fn a_file_of_another_length_is_none() {
        let file = file();
        assert!(ready(file.try_clone().unwrap()).is_none());
        file.set_len(PAGE).unwrap();
        assert!(current(&file).is_err() && ready(file).is_none());
    }
}
