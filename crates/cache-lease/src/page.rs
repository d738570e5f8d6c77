//! Memory that the daemon and programs have mapped: the slots of a tier.

use crate::slot::Slot;
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// The page's name in its folder.
pub const PAGE: &str = "leases";
/// Leases of a tier at once.
pub const SLOTS: usize = 1024;

const LENGTH: usize = SLOTS * size_of::<Slot>();

/// The slots of a tier.
#[derive(Debug)]
pub struct Page {
    slots: NonNull<[Slot; SLOTS]>,
}

// SAFETY: the mapping is this value's own until it is dropped, and only atomics are in it.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Opens the page in a folder, and makes it if there is none: the daemon's part.
    ///
    /// # Errors
    /// If there is something else of that name, or no memory for it.
    pub fn make(folder: &Path) -> io::Result<Page> {
        let file = open(folder, OFlags::CREATE)?;
        // All of its memory at once: none is missing when it is used.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, LENGTH as u64)?;
        Page::of(&file).map_err(told)
    }

    /// Opens the page of a lease: a program's part.
    ///
    /// # Errors
    /// If it is not there, or not this user's, or too short.
    pub fn open(folder: &Path) -> io::Result<Page> {
        Page::of(&open(folder, OFlags::empty())?).map_err(told)
    }

    /// Maps the page that `file` is, and allocates nothing beside.
    ///
    /// # Errors
    /// `INVAL` if it is none, not this user's, or too short; else why it cannot be mapped.
    pub fn of(file: &OwnedFd) -> Result<Page, Errno> {
        let stat = rustix::fs::fstat(file)?;
        let is_file = FileType::from_raw_mode(stat.st_mode).is_file();
        let own = stat.st_uid == rustix::process::geteuid().as_raw();
        if !is_file || !own || stat.st_size < LENGTH as i64 {
            return Err(Errno::INVAL);
        }
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel picks changes no other memory.
        let map = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), LENGTH, access, kind, file.as_fd(), 0)?
        };
        let slots = NonNull::new(map.cast()).ok_or(Errno::NOMEM)?;
        Ok(Page { slots })
    }

    /// Keeps the page mapped as long as this process runs.
    pub fn keep(self) -> &'static [Slot; SLOTS] {
        let slots = std::mem::ManuallyDrop::new(self).slots;
        // SAFETY: as in `slots`; nothing unmaps it, as this was the value that would have.
        unsafe { slots.as_ref() }
    }

    /// Returns all slots, by number.
    pub fn slots(&self) -> &[Slot; SLOTS] {
        // SAFETY: the mapping is as long, page-aligned, and there until `self` is dropped; any
        // bytes are valid atomics. Its file is made longer and never shorter by kedge; whoever
        // else could cut it is of this user, and could end this process as well.
        unsafe { self.slots.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping, and what `slots` gave out has ended with `self`.
        let _ = unsafe { rustix::mm::munmap(self.slots.as_ptr().cast(), LENGTH) };
    }
}

fn told(why: Errno) -> io::Error {
    match why {
        Errno::INVAL => io::Error::new(io::ErrorKind::InvalidData, "it is no page of leases"),
        why => why.into(),
    }
}

fn open(folder: &Path, more: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | more;
    Ok(rustix::fs::open(folder.join(PAGE), flags, Mode::RUSR | Mode::WUSR)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let folder = std::env::temp_dir().join(format!("lease-{name}-{}", std::process::id()));
            fs::create_dir(&folder).expect("a folder");
            Scratch(folder)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn both_sides_see_one_word() {
        let scratch = Scratch::new("both");
        assert!(Page::open(&scratch.0).is_err(), "there is none");
        let daemon = Page::make(&scratch.0).expect("a page");
        let program = Page::open(&scratch.0).expect("the same");
        let lease = daemon.slots()[3].begin(9);
        assert!(program.slots()[3].advance(lease, 0, 5));
        drop(program);
        assert_eq!(daemon.slots()[3].end(8), 5);
        let next = Page::make(&scratch.0).expect("it is found again");
        assert_eq!((next.slots()[3].record(), next.slots()[4].record()), (Some(9), None));
    }

    #[test]
    fn what_is_no_page_is_refused() {
        let scratch = Scratch::new("none");
        let path = scratch.0.join(PAGE);
        fs::write(&path, "short").expect("a file");
        assert!(Page::open(&scratch.0).is_err(), "it is too short");
        fs::remove_file(&path).expect("it is there");
        std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
        assert!(Page::open(&scratch.0).is_err() && Page::make(&scratch.0).is_err());
        fs::remove_file(&path).expect("it is there");
        fs::create_dir(&path).expect("a folder");
        assert!(Page::make(&scratch.0).is_err());
    }
}
