//! The file behind a shared mapping of the program's own (MAP_SHARED of a file, a memfd or
//! shm_open's), so that the proxy can map the same pages.

use crate::entry;
use kedge_cuda_types::CuError;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

const EXECUTABLE: &str = "cuMemHostRegister of executable memory";
const READ_ONLY: &str = "cuMemHostRegister of memory without write access";
const MIXED: &str = "cuMemHostRegister across mappings of different kinds or files";
const HIDDEN: &str = "cuMemHostRegister of shared memory without a descriptor or a name (keep the \
                      memfd's or shm_open's descriptor open; MAP_SHARED of no file has none)";

/// A line of /proc/self/maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping<'a> {
    pub(super) range: Range<u64>,
    /// What may be done with it (`rw-p`).
    pub(super) access: &'a str,
    /// Of its first byte in the file.
    offset: u64,
    /// Major, minor and inode.
    file: (u32, u32, u64),
    path: &'a str,
}

impl<'a> Mapping<'a> {
    pub(super) fn parse(line: &'a str) -> Option<Mapping<'a>> {
        let (range, rest) = word(line)?;
        let (access, rest) = word(rest)?;
        let (offset, rest) = word(rest)?;
        let (device, rest) = word(rest)?;
        let (inode, rest) = word(rest)?;
        let (start, end) = range.split_once('-')?;
        let (major, minor) = device.split_once(':')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let small = |text| u32::from_str_radix(text, 16).ok();
        Some(Mapping {
            range: hex(start)?..hex(end)?,
            access,
            offset: hex(offset)?,
            file: (small(major)?, small(minor)?, inode.parse().ok()?),
            path: rest.trim_start(),
        })
    }

    /// Offset in the file of what lies at `addr`.
    fn offset_of(&self, addr: u64) -> u64 {
        self.offset + (addr - self.range.start)
    }
}

/// The first word and what follows its space.
fn word(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    (!line.is_empty()).then(|| line.split_once(' ').unwrap_or((line, "")))
}

/// What lies in a range of the program's pages.
#[derive(Debug)]
pub(super) enum Backing {
    /// Private memory of its own.
    Private,
    /// One file from this offset on.
    File { fd: OwnedFd, offset: u64 },
}

/// How often a file is looked for that became another meanwhile.
const TRIES: u32 = 8;

/// Finds out about `pages`, whole and not empty; refuses what cannot be registered.
pub(super) fn of(pages: &Range<u64>) -> Result<Backing, CuError> {
    of_read(pages, || fs::read_to_string("/proc/self/maps"))
}

/// What `read`, the list of mappings, tells about `pages`. A restart between reading it and looking
/// at descriptors makes the file again, with another inode: what was found holds if the list says
/// the same afterwards.
fn of_read(
    pages: &Range<u64>,
    mut read: impl FnMut() -> io::Result<String>,
) -> Result<Backing, CuError> {
    let mut maps = read().map_err(|_| CuError::OPERATING_SYSTEM)?;
    for _ in 1..TRIES {
        let found = of_maps(pages, &maps);
        if matches!(found, Ok(Backing::Private)) {
            return Ok(Backing::Private);
        }
        let after = read().map_err(|_| CuError::OPERATING_SYSTEM)?;
        if covering(&maps, pages) == covering(&after, pages) {
            return found.map_err(Refusal::tell);
        }
        maps = after;
    }
    of_maps(pages, &maps).map_err(Refusal::tell)
}

/// Why pages cannot be registered.
enum Refusal {
    /// What is not supported.
    Kind(&'static str),
    Error(CuError),
}

impl Refusal {
    /// The program's error, told to its user where one is due.
    fn tell(self) -> CuError {
        match self {
            Refusal::Kind(what) => entry::not_supported(what),
            Refusal::Error(error) => error,
        }
    }
}

/// What lies in `pages` if `maps` is up to date.
fn of_maps(pages: &Range<u64>, maps: &str) -> Result<Backing, Refusal> {
    let found = covering(maps, pages).map_err(Refusal::Error)?;
    let Some(first) = found.first() else { return Ok(Backing::Private) };
    for mapping in &found {
        match mapping.access.as_bytes() {
            [b'r', b'w', b'-', _] => {}
            [b'r', b'w', ..] => return Err(Refusal::Kind(EXECUTABLE)),
            _ => return Err(Refusal::Kind(READ_ONLY)),
        }
    }
    if found.iter().all(|mapping| mapping.access.ends_with('p')) {
        return Ok(Backing::Private);
    }
    let offset = first.offset_of(pages.start);
    let in_line = |mapping: &Mapping<'_>| {
        let at = mapping.range.start.max(pages.start);
        mapping.access.ends_with('s')
            && mapping.file == first.file
            && mapping.offset_of(at) == offset + (at - pages.start)
    };
    if !found.iter().all(in_line) {
        return Err(Refusal::Kind(MIXED));
    }
    let fd = open(first).ok_or(Refusal::Kind(HIDDEN))?;
    Ok(Backing::File { fd, offset })
}

/// The mappings that make up `pages`; INVALID_VALUE where some have none.
pub(super) fn covering<'a>(maps: &'a str, pages: &Range<u64>) -> Result<Vec<Mapping<'a>>, CuError> {
    let mut at = pages.start;
    let mut found = Vec::new();
    for mapping in maps.lines().filter_map(Mapping::parse) {
        if at < pages.end && mapping.range.contains(&at) {
            at = mapping.range.end;
            found.push(mapping);
        }
    }
    if at < pages.end { Err(CuError::INVALID_VALUE) } else { Ok(found) }
}

/// A descriptor of the mapping's file, to read and to write: by its name, from among the program's
/// own, or from the kernel's list of mappings, which only the privileged may open.
fn open(mapping: &Mapping<'_>) -> Option<OwnedFd> {
    let Range { start, end } = mapping.range;
    by_path(mapping, mapping.path)
        .or_else(|| own(mapping))
        .or_else(|| by_path(mapping, &format!("/proc/self/map_files/{start:x}-{end:x}")))
}

fn by_path(mapping: &Mapping<'_>, path: &str) -> Option<OwnedFd> {
    // Looked at before it is opened: opening a device or a pipe can have effects.
    is_of(mapping, &fs::metadata(path).ok()?).then_some(())?;
    let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    is_of(mapping, &file.metadata().ok()?).then(|| file.into())
}

fn own(mapping: &Mapping<'_>) -> Option<OwnedFd> {
    let names = fs::read_dir("/proc/self/fd").ok()?;
    let numbers = names.filter_map(|name| name.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    numbers.filter_map(duplicate).find_map(|file| {
        // SAFETY: `file` is open, and F_GETFL takes no pointer.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let writable = flags >= 0 && flags & libc::O_ACCMODE == libc::O_RDWR;
        (writable && is_of(mapping, &file.metadata().ok()?)).then(|| file.into())
    })
}

/// A descriptor of ours for one of the program's, which it may close meanwhile.
fn duplicate(number: RawFd) -> Option<File> {
    // SAFETY: F_GETFD only tells whether the number is a descriptor.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: open a moment ago, and used for the duplication alone, which fails where it is not.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    Some(File::from(fd.try_clone_to_owned().ok()?))
}

fn is_of(mapping: &Mapping<'_>, found: &Metadata) -> bool {
    let device = found.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    found.file_type().is_file() && mapping.file == (major, minor, found.ino())
}

/// Whether the pages of `pages` are all shared mappings: what was moved into the arena still is
/// there.
pub(super) fn all_shared(pages: &Range<u64>) -> bool {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return false };
    let shared = |found: Vec<Mapping<'_>>| found.iter().all(|m| m.access.ends_with('s'));
    covering(&maps, pages).is_ok_and(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::shared::PAGE;
    use std::os::fd::FromRawFd;
    use std::ptr;

    /// A memfd of four pages, mapped from its second on.
    fn mapped() -> (File, Range<u64>) {
        // SAFETY: a C string; a new descriptor and a new mapping, which only this test uses.
        unsafe {
            let file =
                File::from_raw_fd(libc::memfd_create(c"backing".as_ptr(), libc::MFD_CLOEXEC));
            file.set_len(4 * PAGE).unwrap();
            let (len, access) = (3 * PAGE as usize, libc::PROT_READ | libc::PROT_WRITE);
            let (fd, offset) = (file.as_raw_fd(), PAGE as libc::off_t);
            let at = libc::mmap(ptr::null_mut(), len, access, libc::MAP_SHARED, fd, offset);
            assert_ne!(at, libc::MAP_FAILED);
            (file, at as u64..at as u64 + 3 * PAGE)
        }
    }

    #[test]
    fn reads_mappings() {
        let line = "7f0c1000-7f0c3000 rw-s 00002000 00:1a 77   /dev/shm/a b (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.range, 0x7f0c_1000..0x7f0c_3000);
        assert_eq!((mapping.access, mapping.file), ("rw-s", (0, 0x1a, 77)));
        assert_eq!(
            (mapping.offset_of(0x7f0c_2000), mapping.path),
            (0x3000, "/dev/shm/a b (deleted)")
        );
        let heap = Mapping::parse("7f0c1000-7f0c3000 rw-p 00000000 00:00 0").unwrap();
        assert_eq!((heap.access, heap.path), ("rw-p", ""));
        assert!(Mapping::parse("nonsense").is_none() && Mapping::parse("").is_none());
    }

    #[test]
    fn a_file_is_found_while_its_descriptor_is_open() {
        let (file, range) = mapped();
        let pages = range.start + PAGE..range.end;
        let Ok(Backing::File { fd, offset }) = of(&pages) else { panic!("not found") };
        assert_eq!(offset, 2 * PAGE);
        let (one, other) = (File::from(fd).metadata().unwrap(), file.metadata().unwrap());
        assert_eq!((one.dev(), one.ino()), (other.dev(), other.ino()));
        assert!(all_shared(&pages));
    }

    #[test]
    fn a_file_made_again_meanwhile_is_found() {
        let (file, range) = mapped();
        let inode = file.metadata().unwrap().ino().to_string();
        // As a restart leaves what was read before it.
        let mut reads = 0;
        let read = || {
            reads += 1;
            let maps = fs::read_to_string("/proc/self/maps")?;
            Ok(if reads == 1 { maps.replace(&format!(" {inode} "), " 1 ") } else { maps })
        };
        let found = of_read(&range, read);
        assert!(matches!(found, Ok(Backing::File { offset: PAGE, .. })), "{found:?}");
        assert_eq!(reads, 3);
    }

    #[test]
    fn only_writable_memory_of_one_kind_can_be_registered() {
        let heap = vec![0u8; 4 * PAGE as usize];
        let start = (heap.as_ptr() as u64).next_multiple_of(PAGE);
        assert!(matches!(of(&(start..start + 2 * PAGE)), Ok(Backing::Private)));
        let code = all_shared as *const () as u64 / PAGE * PAGE;
        assert_eq!(of(&(code..code + PAGE)).err(), Some(CuError::NOT_SUPPORTED));
        assert_eq!(of(&(PAGE..2 * PAGE)).err(), Some(CuError::INVALID_VALUE));
        let (_file, range) = mapped();
        // A private page in the middle.
        // SAFETY: replaces a page of this test's own mapping.
        unsafe {
            let at = (range.start + PAGE) as usize as *mut libc::c_void;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(at, PAGE as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        }
        assert_eq!(of(&range).err(), Some(CuError::NOT_SUPPORTED));
    }
}
