//! Huge pages (hugetlbfs): which memory has them, and having them again where a machine has some
//! set aside.
//!
//! Nothing but a mapping writes what lies in them: write(2) fails. A page that there is none for
//! ends whoever touches it by SIGBUS, so that here they are read and written by /proc/self/mem,
//! which returns an error in its place.

use crate::EngineError;
use crate::maps::{self, Mapping};
use crate::track::{device_name, kernel_memory};
use kedge_image::PAGE;
use libc::pid_t;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::OnceLock;

/// linux/magic.h
const HUGETLBFS: u64 = 0x9584_58f6;
/// The sizes of huge pages that x86-64 has.
const SIZES: [u64; 2] = [2 << 20, 1 << 30];
/// The flag of smaps that all mappings of huge pages have, and no others.
const HUGE: &str = "ht";
/// Where MAP_, MFD_ and SHM_ flags have the logarithm of a page's size.
const SHIFT: u32 = 26;
/// Bound of a page's size, in bytes: the largest pages that any processor has are smaller.
const MAX_PAGE_SIZE: u64 = 1 << 40;
/// What is read and written at once.
const PIECE: u64 = 1 << 20;

/// Returns the bytes of the huge pages that the mapping has; `None` of ordinary ones, and of those
/// that [`unknown`] finds.
pub(crate) fn pages_of(mapping: &Mapping) -> Option<u64> {
    pages_on(&mapping.device)
}

/// Returns the bytes of the huge pages of a device that has nothing else, as maps names it: the
/// kernel has one for each size.
pub(crate) fn pages_on(device: &str) -> Option<u64> {
    static DEVICES: OnceLock<BTreeMap<String, u64>> = OnceLock::new();
    learn(&DEVICES, |bytes| file("kedge", bytes, 0))?.get(device).copied()
}

/// Returns the first mapping of `pid` that has huge pages which [`pages_of`] does not know: those
/// of a file in an administrator's hugetlbfs, and any where their devices cannot be told now.
///
/// Nearly always the places and the file systems of the mappings rule that out. Only where they do
/// not, the kernel is asked by smaps, for which it walks all page tables.
///
/// # Errors
/// The kernel does not tell what the process maps.
pub(crate) fn unknown(pid: pid_t, mappings: &[Mapping]) -> Result<Option<Mapping>, EngineError> {
    let ordinary = |mapping: &Mapping| Some(&mapping.device) == kernel_memory().as_ref();
    let open = |mapping: &&Mapping| {
        may_be_huge(mapping) && pages_of(mapping).is_none() && !ordinary(mapping)
    };
    let open: Vec<&Mapping> = mappings.iter().filter(open).collect();
    if open.is_empty() {
        return Ok(None);
    }
    let what = "see what file systems are mounted";
    let mounted = mounted().map_err(|source| EngineError::System { pid, what, source })?;
    if let Some(found) = open.iter().find(|m| mounted.get(&m.device) == Some(&true)) {
        return Ok(Some((*found).clone()));
    }
    if open.iter().all(|mapping| mounted.contains_key(&mapping.device)) {
        return Ok(None);
    }
    let is_unknown = |m: &Mapping| m.flags.iter().any(|flag| flag == HUGE) && pages_of(m).is_none();
    Ok(maps::with_flags(pid)?.into_iter().find(is_unknown))
}

/// Whether the mapping is of a file, and made of whole pages of the smallest size.
fn may_be_huge(mapping: &Mapping) -> bool {
    let whole = |bytes: u64| bytes.is_multiple_of(SIZES[0]);
    mapping.inode != 0 && whole(mapping.start) && whole(mapping.end) && whole(mapping.offset)
}

/// Whether each device that has a mounted file system has a hugetlbfs.
fn mounted() -> io::Result<BTreeMap<String, bool>> {
    Ok(fs::read_to_string("/proc/self/mountinfo")?.lines().filter_map(mount).collect())
}

/// A line of mountinfo: its device, as maps names it, and whether it is a hugetlbfs. None of an
/// overlay, which shows files of other devices.
fn mount(line: &str) -> Option<(String, bool)> {
    let (place, kind) = line.split_once(" - ")?;
    let (major, minor) = place.split(' ').nth(2)?.split_once(':')?;
    let device = libc::makedev(major.parse().ok()?, minor.parse().ok()?);
    let kind = kind.split(' ').next().filter(|kind| *kind != "overlay")?;
    Some((device_name(device), kind == "hugetlbfs"))
}

/// Whether the mapping is one of huge pages without a name (MAP_HUGETLB).
pub(crate) fn is_nameless(mapping: &Mapping) -> bool {
    mapping.name.starts_with("/anon_hugepage") && pages_of(mapping).is_some()
}

/// Whether a process has huge pages of its own. A clone must not have them: a write of the program
/// would need a page more, for which there may be none, and take the clone's or end the program.
pub(crate) fn is_private(mapping: &Mapping) -> bool {
    !mapping.shared && pages_of(mapping).is_some()
}

/// What is known of the devices, asked for with files that `make` makes. A failure is not kept: it
/// may be one of the moment.
fn learn(
    known: &OnceLock<BTreeMap<String, u64>>,
    make: impl Fn(u64) -> io::Result<File>,
) -> Option<&BTreeMap<String, u64>> {
    match known.get() {
        None => devices(make).ok().map(|all| known.get_or_init(|| all)),
        known => known,
    }
}

/// # Errors
/// A size cannot be asked for; one that the kernel does not have is no error.
fn devices(make: impl Fn(u64) -> io::Result<File>) -> io::Result<BTreeMap<String, u64>> {
    const NONE: [i32; 4] = [libc::ENODEV, libc::ENOENT, libc::ENOSYS, libc::EINVAL];
    let mut found = BTreeMap::new();
    for bytes in SIZES {
        match make(bytes) {
            Ok(file) => drop(found.insert(device_name(file.metadata()?.dev()), bytes)),
            Err(error) if error.raw_os_error().is_some_and(|code| NONE.contains(&code)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Returns the bytes of a file's pages, if they are huge ones.
pub(crate) fn pages_of_file(path: &Path) -> io::Result<Option<u64>> {
    let found = rustix::fs::statfs(path)?;
    Ok((found.f_type as u64 == HUGETLBFS).then_some(found.f_bsize as u64))
}

/// Whether `bytes` can be the size of huge pages, and memory of `length` at `start` be made of
/// them.
pub(crate) fn is_possible(bytes: u64, start: u64, length: u64) -> bool {
    let size = bytes.is_power_of_two() && bytes > PAGE && bytes <= MAX_PAGE_SIZE;
    size && start.is_multiple_of(bytes) && length.is_multiple_of(bytes)
}

/// The flag of mmap(2), memfd_create(2) and shmget(2) that asks for pages of that size.
pub(crate) fn flag(bytes: u64) -> i32 {
    (bytes.trailing_zeros() << SHIFT) as i32
}

/// What is told where ordinary pages take the place of huge ones.
pub(crate) fn lacking(what: &str, bytes: u64, why: &io::Error) -> String {
    format!(
        "{what} has ordinary pages in the place of huge ones of {} KiB: {why} (vm.nr_hugepages sets \
         some aside)",
        bytes >> 10
    )
}

/// Makes an empty memfd of huge pages; `flags` are more of memfd_create(2).
pub(crate) fn file(name: impl AsRef<OsStr>, pages: u64, flags: u32) -> io::Result<File> {
    let name = CString::new(name.as_ref().as_bytes())?;
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_HUGETLB | flag(pages) as u32;
    // SAFETY: `name` is a string that lives through the call, which returns a new descriptor.
    unsafe {
        let fd = libc::memfd_create(name.as_ptr(), flags);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd).into()) }
    }
}

/// A file of huge pages, mapped: there is a page for each place of it, and stays when this is gone.
#[derive(Debug)]
pub(crate) struct Window {
    start: *mut libc::c_void,
    length: u64,
    memory: File,
}

// SAFETY: the mapping is nobody else's, and is read and written by system calls alone.
unsafe impl Sync for Window {}

impl Window {
    /// Maps all of `file`, whose length is one of whole pages.
    ///
    /// # Errors
    /// The machine has not so many pages set aside.
    pub(crate) fn of(file: &File) -> io::Result<Window> {
        let length = file.metadata()?.len();
        let memory = File::options().read(true).write(true).open("/proc/self/mem")?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping, wherever the kernel puts it.
        let start = unsafe {
            let none = std::ptr::null_mut();
            libc::mmap(none, length as usize, access, libc::MAP_SHARED, fd, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Window { start, length, memory })
    }

    pub(crate) fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.memory.write_all_at(bytes, self.start.addr() as u64 + at)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: it is mapped there, and nobody has its address.
        unsafe { libc::munmap(self.start, self.length as usize) };
    }
}

/// Copies `from`, of huge pages, into `to`, an empty file: what is zero becomes a hole. `read`
/// reads at an offset; what no page is there for is zero as well.
pub(crate) fn copy_out(
    length: u64,
    to: &File,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    to.set_len(length)?;
    let mut buffer = vec![0; PIECE.min(length) as usize];
    for at in (0..length).step_by(PIECE as usize) {
        let piece = &mut buffer[..PIECE.min(length - at) as usize];
        read(piece, at)?;
        for (page, bytes) in piece.chunks(PAGE as usize).enumerate() {
            if bytes.iter().any(|byte| *byte != 0) {
                to.write_all_at(bytes, at + page as u64 * PAGE)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_and_memory_is_made_of_them() {
        assert!(is_possible(2 << 20, 4 << 20, 2 << 20));
        let not = [(0, 0, 0), (4096, 0, 4096), (3 << 20, 0, 3 << 20), (1 << 63, 0, 1 << 63)];
        assert!(not.iter().all(|(bytes, start, length)| !is_possible(*bytes, *start, *length)));
        assert!(!is_possible(2 << 20, 1 << 20, 2 << 20) && !is_possible(2 << 20, 0, 1 << 20));
        assert_eq!(flag(2 << 20), 21 << 26);
    }

    #[test]
    fn ordinary_memory_has_none() {
        let own = crate::maps::of(std::process::id() as i32).unwrap();
        assert!(own.iter().all(|mapping| pages_of(mapping).is_none()));
        assert_eq!(pages_of_file(Path::new("/proc")).unwrap(), None);
        // A file of them needs none set aside as long as it is empty.
        for bytes in devices(|bytes| file("kedge", bytes, 0)).unwrap().into_values() {
            let made = file("kedge", bytes, 0).unwrap();
            let path = format!("/proc/self/fd/{}", made.as_raw_fd());
            assert_eq!(pages_of_file(Path::new(&path)).unwrap(), Some(bytes));
        }
        assert_eq!(unknown(std::process::id() as i32, &own).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_told_now_is_asked_again() {
        let known = OnceLock::new();
        let fails = |code| move |_| Err(io::Error::from_raw_os_error(code));
        assert_eq!(learn(&known, fails(libc::EMFILE)), None);
        // A kernel that has none is believed.
        assert_eq!(learn(&known, fails(libc::ENODEV)), Some(&BTreeMap::new()));
        let known = OnceLock::new();
        let ordinary = |_| File::open("/proc/self/exe");
        assert_eq!(learn(&known, fails(libc::EMFILE)), None);
        assert_eq!(learn(&known, ordinary).map(BTreeMap::len), Some(1));
        assert_eq!(learn(&known, fails(libc::EMFILE)).map(BTreeMap::len), Some(1));
    }

    #[test]
    fn mounts_tell_what_file_systems_devices_have() {
        let pages = "36 22 0:39 / /dev/huge pages rw shared:9 - hugetlbfs none rw,pagesize=2M";
        assert_eq!(mount(pages), Some(("00:27".to_owned(), true)));
        let disk = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw";
        assert_eq!(mount(disk), Some(("fe:00".to_owned(), false)));
        assert_eq!(mount("27 1 0:51 / / rw - overlay overlay rw,lowerdir=/a"), None);
        assert_eq!(mount("27 1 254:0"), None);
    }
}
