//! Memory for tests, whose pages are touched and watched one by one.
//!
//! A crate of its own and no feature of kedge-pagemap: with one, `cargo test` builds all that uses
//! kedge-pagemap once more.

use kedge_pagemap::{Run, Scanner, Wanted};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub const PAGE: u64 = 4096;
/// More than the kernel's own buffer of 512 regions has room for, several times over.
pub const PAGES: u64 = 4096;

/// Anonymous memory of its own.
#[derive(Debug)]
pub struct Room(u64);

impl Default for Room {
    fn default() -> Room {
        Room::new()
    }
}

impl Room {
    pub fn new() -> Room {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let bytes = (PAGES * PAGE) as usize;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let at = unsafe {
            let flags = flags | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: advice about that mapping.
        unsafe { libc::madvise(at, bytes, libc::MADV_NOHUGEPAGE) };
        Room(at as u64)
    }

    pub fn range(&self) -> Run {
        (self.0, self.0 + PAGES * PAGE)
    }

    pub fn touch(&self, page: u64) {
        assert!(page < PAGES);
        // SAFETY: it lies in the mapping, which nobody else knows.
        unsafe { ((self.0 + page * PAGE) as *mut u8).write_volatile(1) };
    }

    /// Puts another mapping in the place of a page.
    pub fn map_anew(&self, page: u64) {
        assert!(page < PAGES);
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: it lies in the mapping, which nobody else knows.
        let at = unsafe {
            let at = (self.0 + page * PAGE) as *mut libc::c_void;
            libc::mmap(at, PAGE as usize, access, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        self.touch(page);
    }

    /// Watches it for writes until this is closed.
    pub fn watch(&self) -> OwnedFd {
        // SAFETY: the flags ask for faults of user mode alone.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: the call has returned a descriptor that is nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let mut api = [0xaa_u64, 1 << 13 | 1 << 15, 0];
        let mut register = [self.0, PAGES * PAGE, 2, 0];
        // SAFETY: the kernel reads and writes three and four words.
        unsafe {
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc020_aa00, register.as_mut_ptr()), 0);
        }
        fd
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and used no more.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, (PAGES * PAGE) as usize) };
    }
}

/// Whether the kernel has PAGEMAP_SCAN; says what is not tested if not.
pub fn scans() -> bool {
    let mut scanner = Scanner::of(std::process::id() as libc::pid_t);
    let there = scanner.as_mut().is_ok_and(|s| s.runs((0, PAGE), &Wanted::OWN).is_ok());
    if !there {
        kedge_left_out::left_out("PAGEMAP_SCAN", "this kernel has none (Linux 6.7)");
    }
    there
}
