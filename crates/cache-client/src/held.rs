//! A lease in use.

use crate::parts::Parts;
use crate::sys;
use kedge_cache_lease::{Begun, Slot};
use libc::c_int;
use std::os::fd::RawFd;

/// A lease, and how much of it was used.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) start: u64,
    pub(crate) length: u32,
    pub(crate) used: u32,
    pub(crate) begun: Begun,
    pub(crate) slot: &'static Slot,
}

/// Why bytes were stored, or no more of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// All, as far as the lease goes.
    Well,
    /// The lease is at its end: what was not told is not there.
    Ended,
    /// The kernel took no more.
    Short,
    /// A call failed.
    Failed(c_int),
}

impl Held {
    /// Returns whether more can be stored.
    pub(crate) fn goes_on(&self) -> bool {
        self.used < self.length && self.slot.stands_at(self.begun, self.used)
    }

    /// Returns where in the file the next byte goes.
    pub(crate) fn next(&self) -> u64 {
        self.start.saturating_add(self.used.into())
    }

    /// Stores what comes after the first `skip` bytes of `parts`, as far as the lease goes, and
    /// says so to the daemon. Returns how many bytes count from now on.
    pub(crate) fn store(&mut self, shadow: RawFd, parts: &Parts, skip: usize) -> (usize, Stored) {
        let left = self.length.saturating_sub(self.used) as usize;
        let most = parts.length().saturating_sub(skip).min(left);
        let (stored, how) = self.write(shadow, parts, skip, most);
        if stored == 0 {
            return (0, how);
        }
        // `left` is of 32 bits, and `stored` no more.
        let by = stored as u32;
        if !self.slot.advance(self.begun, self.used, by) {
            return (0, Stored::Ended);
        }
        self.used = self.used.saturating_add(by);
        (stored, how)
    }

    /// Writes to the shadow, which says nothing yet.
    fn write(&self, shadow: RawFd, parts: &Parts, skip: usize, most: usize) -> (usize, Stored) {
        let mut stored = 0;
        while stored < most {
            // A shadow is another lease's, or nobody's, once this one has ended.
            if !self.slot.stands_at(self.begun, self.used) {
                return (stored, Stored::Ended);
            }
            let at = self.next().saturating_add(stored as u64);
            // A call that begins at the limit has the kernel send SIGXFSZ. The program makes one
            // call here, and the kernel cuts that instead.
            if skip + stored > 0 && at >= sys::file_limit() {
                return (stored, Stored::Short);
            }
            match sys::put(shadow, parts, skip + stored, most - stored, at) {
                Ok(put) => {
                    stored += put.done;
                    if put.done < put.asked || put.asked == 0 {
                        return (stored, Stored::Short);
                    }
                }
                Err(libc::EINTR) => {}
                Err(why) => return (stored, Stored::Failed(why)),
            }
        }
        (stored, Stored::Well)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cache_lease::Page;
    use std::fs::{self, File};
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    struct Tier {
        folder: PathBuf,
        page: Page,
        shadow: File,
    }

    impl Tier {
        fn new(name: &str) -> io::Result<Tier> {
            let folder = std::env::temp_dir().join(format!("held-{name}-{}", std::process::id()));
            fs::create_dir(&folder)?;
            let page = Page::make(&folder)?;
            let shadow = File::create_new(folder.join("shadow"))?;
            Ok(Tier { folder, page, shadow })
        }

        fn lease(&self, start: u64, length: u32) -> io::Result<Held> {
            let slot = self.page.slots().first().ok_or(io::ErrorKind::NotFound)?;
            let begun = slot.begin(1);
            let program = Page::open(&self.folder)?.keep();
            let slot = program.first().ok_or(io::ErrorKind::NotFound)?;
            Ok(Held { start, length, used: 0, begun, slot })
        }

        fn told(&self) -> Option<u64> {
            self.page.slots().first().map(|slot| slot.end(u64::MAX))
        }

        fn stored(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; length];
            self.shadow.read_exact_at(&mut bytes, start)?;
            Ok(bytes)
        }
    }

    impl Drop for Tier {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    fn parts(bytes: &[&[u8]]) -> Vec<libc::iovec> {
        let part = |bytes: &&[u8]| crate::c::one(bytes.as_ptr().cast(), bytes.len());
        bytes.iter().flat_map(part).collect()
    }

    #[test]
    fn as_much_is_stored_as_the_lease_has() -> io::Result<()> {
        let tier = Tier::new("much")?;
        let mut held = tier.lease(1000, 8)?;
        let list = parts(&[b"abc", b"", b"defgh", b"ijk"]);
        let all = Parts::new(&list).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!(held.store(tier.shadow.as_raw_fd(), &all, 0), (8, Stored::Well));
        assert!(!held.goes_on() && held.next() == 1008);
        let list = parts(&[b"xyz"]);
        let more = Parts::new(&list).ok_or(io::ErrorKind::InvalidInput)?;
        let mut held = tier.lease(1008, 100)?;
        for skip in [0, 2, 3] {
            let stored = held.store(tier.shadow.as_raw_fd(), &more, skip);
            assert_eq!(stored, (3 - skip, Stored::Well));
        }
        assert_eq!(tier.told(), Some(4));
        assert_eq!(tier.stored(1000, 12)?, b"abcdefghxyzz");
        Ok(())
    }

    #[test]
    fn nothing_is_stored_after_the_end() -> io::Result<()> {
        let tier = Tier::new("end")?;
        let mut held = tier.lease(0, 100)?;
        let list = parts(&[b"abc"]);
        let all = Parts::new(&list).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!(held.store(tier.shadow.as_raw_fd(), &all, 0), (3, Stored::Well));
        assert_eq!(tier.told(), Some(3));
        assert_eq!(held.store(tier.shadow.as_raw_fd(), &all, 0), (0, Stored::Ended));
        assert_eq!((held.used, tier.shadow.metadata()?.len()), (3, 3));
        // Nor by the next lease of the slot, which begins elsewhere.
        tier.lease(50, 100)?;
        assert!(!held.goes_on());
        Ok(())
    }

    #[test]
    fn what_fails_is_not_told_as_stored() -> io::Result<()> {
        let tier = Tier::new("fail")?;
        let mut held = tier.lease(0, 100)?;
        let hole = libc::iovec { iov_base: std::ptr::without_provenance_mut(8), iov_len: 5 };
        let list = [parts(&[b"abc"]), vec![hole]].concat();
        let all = Parts::new(&list).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!(held.store(tier.shadow.as_raw_fd(), &all, 0), (3, Stored::Short));
        let bad = held.store(tier.shadow.as_raw_fd(), &all, 3);
        assert_eq!(bad, (0, Stored::Failed(libc::EFAULT)));
        assert_eq!(held.store(-1, &all, 0), (0, Stored::Failed(libc::EBADF)));
        assert_eq!(tier.told(), Some(3));
        Ok(())
    }
}
