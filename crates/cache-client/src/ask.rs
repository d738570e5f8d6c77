//! How a lease is got: asked of the daemon, and its files opened.

use crate::held::Held;
use crate::mounts::{Device, Id};
use crate::shadows::Shadows;
use crate::sys;
use crate::try_lock::TryLock;
use kedge_cache_lease::{
    Ask, BYTES, Begun, LeaseRef, Name, Page, REQUEST, SLOTS, Slot, encode_ask,
};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::ioctl::Updater;
use std::ffi::CStr;
use std::os::fd::{IntoRawFd, RawFd};

/// Pages that are known at once: one for each tier in memory, and each time that it was made.
const PAGES: usize = 8;
/// Longer names the kernel does not take (PATH_MAX).
const PATH: usize = 4096;

/// What a question takes: no stack of a signal handler has room for it.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) answer: [u8; BYTES],
    path: [u8; PATH],
}

impl Buffers {
    pub(crate) const fn new() -> Buffers {
        Buffers { answer: [0; BYTES], path: [0; PATH] }
    }
}

/// Why there is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Now,
    ForGood,
}

/// A page, by its file.
type Mapped = (Id, &'static [Slot; SLOTS]);

/// The pages that this process has mapped.
#[derive(Debug)]
pub(crate) struct Pages(TryLock<Known>);

#[derive(Debug)]
struct Known {
    pages: [Option<Mapped>; PAGES],
    next: usize,
}

/// A shadow's descriptor, as it was opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shadow {
    pub(crate) fd: RawFd,
    id: Id,
}

fn id(stat: &Stat) -> Id {
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Id { device: Device { major, minor }, number: stat.st_ino }
}

/// Returns which file has this name, if it is one of this user's, and no link to one.
fn named(path: &CStr) -> Option<Id> {
    let stat = rustix::fs::lstat(path).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode).is_file();
    let own = stat.st_uid == rustix::process::geteuid().as_raw();
    (is_file && own).then(|| id(&stat))
}

/// Opens a file of a tier.
fn open(path: &CStr, access: OFlags) -> Option<std::os::fd::OwnedFd> {
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Asks the daemon for what comes from `start` on.
///
/// # Errors
/// If it gives none; whether it may later.
pub(crate) fn ask(
    fd: RawFd,
    (start, length): (u64, usize),
    answer: &mut [u8; BYTES],
) -> Result<(), Refused> {
    *answer = encode_ask(&Ask { start, length: length as u64 });
    let fd = sys::borrow(fd).ok_or(Refused::ForGood)?;
    // SAFETY: the kernel reads and writes as many bytes as the number says, which are the
    // buffer's; the descriptor is a regular file's on a mount of FUSE.
    let asked = unsafe { rustix::ioctl::ioctl(fd, Updater::<REQUEST, _>::new(answer)) };
    asked.map_err(|why| match why {
        Errno::AGAIN | Errno::INTR => Refused::Now,
        _ => Refused::ForGood,
    })
}

impl Pages {
    pub(crate) const fn new() -> Pages {
        Pages(TryLock::new(Known { pages: [None; PAGES], next: 0 }))
    }

    /// Returns the slot of a lease. `None` if its page cannot be had.
    fn slot(&self, lease: &LeaseRef<'_>, path: &mut [u8]) -> Option<&'static Slot> {
        let path = lease.path_of(Name::Page, path)?;
        let wanted = named(path)?;
        let mut known = self.0.try_lock()?;
        let Known { pages, next } = &mut *known;
        // A process that kedge has restarted has empty memory there: it is mapped anew.
        let is_page = |slots: &[Slot; SLOTS]| {
            slots.get(lease.slot as usize).is_some_and(|slot| !slot.is_blank())
        };
        let mut known = pages.iter().flatten();
        if let Some((_, slots)) = known.find(|(id, slots)| *id == wanted && is_page(slots)) {
            return slots.get(lease.slot as usize);
        }
        let file = open(path, OFlags::RDWR)?;
        // Of the file that was opened: another one may have its name by now.
        let opened = id(&rustix::fs::fstat(&file).ok()?);
        let slots = Page::of(&file).ok()?.keep();
        if let Some(place) = pages.get_mut(*next) {
            *place = Some((opened, slots));
        }
        *next = (*next + 1) % PAGES;
        slots.get(lease.slot as usize)
    }
}

impl Shadow {
    /// Returns whether the descriptor is still what it was opened for: the program may have closed
    /// it, by a way that this library does not see, and have something else there.
    fn is_there(&self) -> bool {
        let stat = sys::borrow(self.fd).and_then(|fd| rustix::fs::fstat(fd).ok());
        stat.is_some_and(|stat| id(&stat) == self.id)
    }

    /// Closes it, if it is still there.
    pub(crate) fn close(self, shadows: &Shadows) {
        if shadows.forget(self.fd) && self.is_there() {
            sys::close(self.fd);
        }
    }

    fn open(lease: &LeaseRef<'_>, path: &mut [u8], shadows: &Shadows) -> Option<Shadow> {
        let path = lease.path_of(Name::Shadow, path)?;
        let wanted = named(path)?;
        let fd = shadows.adopt(open(path, OFlags::WRONLY)?.into_raw_fd())?;
        let shadow = Shadow { fd, id: wanted };
        if shadow.is_there() {
            return Some(shadow);
        }
        shadows.forget(fd);
        sys::close(fd);
        None
    }
}

/// Makes ready what an answer names. The shadow that was there before stays if it is the same.
///
/// `None` if it cannot be used. The daemon ends the lease by itself then.
pub(crate) fn take(
    Buffers { answer, path }: &mut Buffers,
    start: u64,
    shadow: &mut Option<Shadow>,
    pages: &Pages,
    shadows: &Shadows,
) -> Option<Held> {
    let lease = LeaseRef::decode(answer).filter(|lease| lease.start == start)?;
    let length = u32::try_from(lease.length).ok()?;
    let slot = pages.slot(&lease, path)?;
    let same = lease.path_of(Name::Shadow, path).and_then(named);
    if !shadow.is_some_and(|shadow| Some(shadow.id) == same && shadow.is_there()) {
        if let Some(old) = shadow.take() {
            old.close(shadows);
        }
        *shadow = Some(Shadow::open(&lease, path, shadows)?);
    }
    let begun = Begun { epoch: lease.epoch };
    Some(Held { start, length, used: 0, begun, slot })
}
