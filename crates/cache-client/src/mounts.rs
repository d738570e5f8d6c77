//! Which files are a cache's: looked up without a question to a file system, by their device.

use crate::sys;
use crate::try_lock::TryLock;
use rustix::fs::{Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, RawFd};

/// What the kernel says of a mount of a cache that `fusermount3` has made.
const KIND: &[u8] = b"fuse.kedge";
/// Of one that root has made: its kind and what is mounted.
const ROOTS: [&[u8]; 2] = [b"fuse", b"kedge-cache"];
/// Says whose daemon answers there; the kernel vouches for it.
const USER: &[u8] = b"user_id=";
/// Devices that are known at once.
const KNOWN: usize = 16;
/// What is known of a device is looked up anew after so many milliseconds: numbers are given away
/// again.
const RARELY: u64 = 1000;
/// The longest word of a line that matters.
const WORD: usize = 24;

/// A file system's device: the kernel's number of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// A file, as the kernel tells it without a question to the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    pub(crate) device: Device,
    pub(crate) number: u64,
}

/// Returns which file a descriptor is of. `None` unless that is a regular file.
pub(crate) fn id_of(fd: RawFd) -> Option<Id> {
    let flags = rustix::fs::AtFlags::EMPTY_PATH | rustix::fs::AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    let stat = rustix::fs::statx(sys::borrow(fd)?, c"", flags, wanted).ok()?;
    let is_file = rustix::fs::FileType::from_raw_mode(stat.stx_mode.into()).is_file();
    let device = Device { major: stat.stx_dev_major, minor: stat.stx_dev_minor };
    is_file.then_some(Id { device, number: stat.stx_ino })
}

/// Mounts that were looked up.
#[derive(Debug)]
struct Known {
    devices: [Option<Seen>; KNOWN],
    next: usize,
}

/// A device that was looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    device: Device,
    is_cache: bool,
    when: u64,
}

/// The devices that this process has met.
#[derive(Debug)]
pub(crate) struct Mounts(TryLock<Known>);

impl Mounts {
    pub(crate) const fn new() -> Mounts {
        Mounts(TryLock::new(Known { devices: [None; KNOWN], next: 0 }))
    }

    /// Returns whether a device is a cache of this user's. `None` if that cannot be told now.
    pub(crate) fn is_cache(&self, device: Device, now: u64) -> Option<bool> {
        // FUSE has no device of its own.
        if device.major != 0 {
            return Some(false);
        }
        let mut known = self.0.try_lock()?;
        let fresh = known.get(device).filter(|seen| now.saturating_sub(seen.when) < RARELY);
        if let Some(seen) = fresh {
            return Some(seen.is_cache);
        }
        let is_cache = look_for(device, rustix::process::geteuid().as_raw())?;
        known.set(Seen { device, is_cache, when: now });
        Some(is_cache)
    }
}

impl Known {
    fn get(&self, device: Device) -> Option<&Seen> {
        self.devices.iter().flatten().find(|seen| seen.device == device)
    }

    fn set(&mut self, seen: Seen) {
        let same = |place: &Option<Seen>| place.is_some_and(|other| other.device == seen.device);
        let place = self.devices.iter().position(same).unwrap_or(self.next);
        if let Some(place) = self.devices.get_mut(place) {
            *place = Some(seen);
        }
        self.next = (self.next + 1) % KNOWN;
    }
}

/// Reads all mounts, and returns whether a device is a cache of `user`'s. `None` if they cannot be
/// read.
fn look_for(device: Device, user: u32) -> Option<bool> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mounts = rustix::fs::open(c"/proc/self/mountinfo", flags, Mode::empty()).ok()?;
    let mounts = std::os::fd::IntoRawFd::into_raw_fd(mounts);
    let found = sys::borrow(mounts).and_then(|mounts| look_through(mounts, device, user));
    sys::close(mounts);
    found
}

fn look_through(mounts: BorrowedFd<'_>, device: Device, user: u32) -> Option<bool> {
    let mut buffer = [0; 2048];
    let mut line = Line::default();
    loop {
        match rustix::io::read(mounts, &mut buffer[..]) {
            Ok(0) => return Some(false),
            Ok(length) => {
                for byte in buffer.iter().take(length) {
                    if line.take(*byte) == Some((device, user)) {
                        return Some(true);
                    }
                }
            }
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), byte by byte.
#[derive(Debug, Default)]
struct Line {
    /// Words before this one.
    words: usize,
    /// Words since the `-` that is behind the optional ones.
    behind: Option<usize>,
    word: [u8; WORD],
    length: usize,
    device: Option<Device>,
    is_cache: bool,
    /// Whether it may be one, by its kind.
    may_be: bool,
    user: Option<u32>,
}

impl Line {
    /// Takes a byte. At the end of a cache's line, returns its device and user.
    fn take(&mut self, byte: u8) -> Option<(Device, u32)> {
        // The last word has a list between commas.
        let in_list = self.behind == Some(2);
        match byte {
            b'\n' => {
                self.word_ends();
                let whole = std::mem::take(self);
                whole.device.zip(whole.user).filter(|_| whole.is_cache)
            }
            b' ' => {
                let is_separator = self.word_ends();
                self.words += 1;
                self.behind = match self.behind {
                    None => is_separator.then_some(0),
                    Some(words) => Some(words + 1),
                };
                None
            }
            b',' if in_list => {
                self.word_ends();
                None
            }
            byte => {
                if let Some(place) = self.word.get_mut(self.length) {
                    *place = byte;
                }
                // A word that is longer is none that matters.
                self.length = (self.length + 1).min(WORD + 1);
                None
            }
        }
    }

    /// Takes the word that has ended, and returns whether it is the `-` behind the optional ones.
    fn word_ends(&mut self) -> bool {
        let length = std::mem::take(&mut self.length);
        let Some(word) = self.word.get(..length) else { return false };
        match self.behind {
            None if self.words == 2 => self.device = device_of(word),
            None => return self.words >= 6 && word == b"-",
            Some(0) => (self.is_cache, self.may_be) = (word == KIND, word == ROOTS[0]),
            Some(1) => self.is_cache |= self.may_be && word == ROOTS[1],
            Some(2) => {
                let user = word.strip_prefix(USER).and_then(number_of);
                self.user = self.user.or(user);
            }
            Some(_) => {}
        }
        false
    }
}

fn number_of(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn device_of(word: &[u8]) -> Option<Device> {
    let (major, minor) = std::str::from_utf8(word).ok()?.split_once(':')?;
    Some(Device { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(text: &[u8]) -> Vec<(u32, u32, u32)> {
        let mut line = Line::default();
        let found = text.iter().filter_map(|byte| line.take(*byte));
        found.map(|(device, user)| (device.major, device.minor, user)).collect()
    }

    #[test]
    fn a_cache_and_its_user_are_found_among_other_mounts() {
        let text = b"22 1 0:20 / /proc rw,nosuid shared:5 - proc proc rw\n\
            36 22 0:41 / /a\\040b rw,nosuid - fuse.kedge kedge-cache rw,user_id=7,group_id=0,x\n\
            37 22 0:42 / /c rw shared:1 master:2 - fuse.kedge a rw,default_permissions,user_id=0\n\
            38 22 0:43 / /fuse.kedge rw - fuse fuse.kedge rw,user_id=0\n\
            39 22 0:44 / /- rw - fuse.kedge-not x rw,user_id=0\n\
            40 22 0:45 / /d rw - fuse.kedge x rw,user_id=99999999999\n\
            41 22 none / /d rw - fuse.kedge x rw,user_id=1\n\
            43 22 0:47 / /r rw - fuse kedge-cache rw,user_id=0\n\
            42 22 0:46 / /e rw - fuse.kedge x rw,auser_id=3,user_id=4";
        assert_eq!(
            lines(text),
            [(0, 41, 7), (0, 42, 0), (0, 47, 0)],
            "the last line has not ended"
        );
        assert_eq!(lines(b"\n\n - fuse.kedge x user_id=1\n"), []);
    }

    #[test]
    fn long_words_hide_nothing() {
        let long = "x".repeat(10_000);
        let text = format!("1 2 0:9 / /{long} rw {long} - fuse.kedge {long} {long},user_id=5\n");
        assert_eq!(lines(text.as_bytes()), [(0, 9, 5)]);
    }

    #[test]
    fn this_process_has_mounts_and_files_that_are_no_cache() {
        let mounts = Mounts::new();
        let file = std::fs::File::open("/proc/self/mountinfo").into_iter().next();
        let id = file.as_ref().map(|file| id_of(std::os::fd::AsRawFd::as_raw_fd(file)));
        let device = id.flatten().map(|id| id.device);
        assert_eq!(device.and_then(|device| mounts.is_cache(device, 5)), Some(false));
        assert_eq!(mounts.is_cache(Device { major: 8, minor: 1 }, 5), Some(false));
        assert_eq!(id_of(-1), None);
        let zero = std::fs::File::open("/dev/zero").into_iter().next();
        assert_eq!(zero.and_then(|zero| id_of(std::os::fd::AsRawFd::as_raw_fd(&zero))), None);
    }

    #[test]
    fn devices_beyond_those_known_take_the_place_of_others() {
        let mut known = Known { devices: [None; KNOWN], next: 0 };
        let seen = |minor, is_cache| Seen { device: Device { major: 0, minor }, is_cache, when: 7 };
        for minor in 0..KNOWN as u32 + 1 {
            known.set(seen(minor, minor % 2 == 0));
        }
        known.set(seen(5, true));
        let get = |minor| known.get(Device { major: 0, minor }).map(|seen| seen.is_cache);
        assert_eq!((get(0), get(1), get(16), get(5)), (None, Some(false), Some(true), Some(true)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = lines(&bytes);
        }
    }
}
