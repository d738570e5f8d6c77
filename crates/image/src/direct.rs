//! Writing to files of this machine, past the page cache: pages that are written once, and read
//! after a restart if ever, would only drive the program's own pages out of it, and pass through it
//! slower than the disk takes them.

use crate::PAGE;
use crate::bytes::is_tmpfs;
use crate::sink::Sink;
use rustix::fs::FallocateFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Files from which on room is set aside.
const LARGE: u64 = 8 << 20;

/// Bytes that begin on a page, as direct writes need them.
#[derive(Debug, Default)]
pub struct PageBuffer(Vec<u8>);

impl PageBuffer {
    /// Makes a buffer that has `room` bytes and has them in memory.
    pub fn touched(room: usize) -> PageBuffer {
        // Other than zero: fresh zeros are not in memory before they are used.
        PageBuffer(vec![1; room.saturating_add(PAGE as usize)])
    }

    /// Makes a buffer of at least `room` bytes, out of `spare` if there is such a one.
    pub fn out_of(spare: &Spare, room: usize) -> PageBuffer {
        let mut spare = spare.0.lock().unwrap_or_else(PoisonError::into_inner);
        // In order, the smallest first.
        let first = spare.partition_point(|buffer| buffer.room() < room);
        if first < spare.len() { spare.remove(first) } else { PageBuffer::default() }
    }

    /// Returns how many bytes it gives without growing.
    pub fn room(&self) -> usize {
        self.0.len().saturating_sub(PAGE as usize)
    }

    /// Lends `len` bytes, whose contents are what was there before.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        let room = len.saturating_add(PAGE as usize);
        if self.0.len() < room {
            self.0.resize(room, 0);
        }
        let skip = self.0.as_ptr().align_offset(PAGE as usize).min(PAGE as usize);
        &mut self.0[skip..skip + len]
    }
}

/// Buffers that are used again: memory that is fresh from the kernel costs more than what is copied
/// into it.
#[derive(Debug, Default)]
pub struct Spare(Mutex<Vec<PageBuffer>>);

impl Spare {
    pub const fn new() -> Spare {
        Spare(Mutex::new(Vec::new()))
    }

    /// Keeps `buffer`, and lets go of the smallest where all would have more than `most` bytes.
    pub fn keep(&self, buffer: PageBuffer, most: usize) {
        if buffer.room() == 0 || buffer.room() > most {
            return;
        }
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = spare.partition_point(|other| other.room() < buffer.room());
        spare.insert(place, buffer);
        while spare.iter().map(PageBuffer::room).sum::<usize>() > most {
            spare.remove(0);
        }
    }
}

/// A second descriptor of an image's file, for whole pages.
#[derive(Debug)]
struct Direct {
    file: Option<File>,
    refused: AtomicBool,
}

impl Direct {
    /// Opens the very file once more, whatever has its name by now, for direct writing; file
    /// systems that cannot write directly get their pages through the cache, and so does a file
    /// that this process may not open.
    fn again(file: &File) -> Direct {
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(again).ok();
        Direct { file, refused: AtomicBool::new(false) }
    }

    /// Returns what writes nothing directly, for a file that is no disk's.
    fn none() -> Direct {
        Direct { file: None, refused: AtomicBool::new(false) }
    }

    /// Writes `bytes`, and returns whether it did; `false` where they cannot be written directly.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<bool> {
        let whole = |n: u64| n.is_multiple_of(PAGE);
        let fits = whole(offset) && whole(bytes.len() as u64) && whole(bytes.as_ptr() as u64);
        let file = self.file.as_ref().filter(|_| fits && !self.refused.load(Ordering::Relaxed));
        let Some(file) = file else { return Ok(false) };
        match file.write_all_at(bytes, offset) {
            // A disk that wants larger blocks than pages.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }
}

/// A file of this machine.
#[derive(Debug)]
pub(crate) struct FileSink {
    file: File,
    direct: Direct,
}

impl FileSink {
    /// Writes whole pages past the page cache, where the file system can do that.
    pub(crate) fn direct(file: File) -> FileSink {
        FileSink { direct: Direct::again(&file), file }
    }

    /// Writes through the page cache alone: whoever reads the file soon finds it in memory.
    pub(crate) fn cached(file: File) -> FileSink {
        FileSink { file, direct: Direct::none() }
    }
}

impl Sink for FileSink {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match self.direct.write(bytes, offset) {
            Ok(false) => self.file.write_all_at(bytes, offset),
            other => other.map(drop),
        }
    }

    /// Ends the file, and waits until all of it is on the disk.
    fn finish(&self, length: u64) -> io::Result<()> {
        // More may have been expected.
        self.file.set_len(length).and_then(|()| self.file.sync_all())
    }

    /// Has the disk set room aside, so that several threads can write at once: a file that grows is
    /// written by one at a time.
    fn expect(&self, bytes: u64) {
        // In memory they would be written twice.
        if bytes >= LARGE && !is_tmpfs(&self.file) {
            // Only slower without, and a disk that is full may still have room for less.
            let _ = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes);
        }
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_on_pages() {
        let mut buffer = PageBuffer::default();
        for len in [1, 4096, 100_000, 7] {
            let bytes = buffer.bytes(len);
            assert_eq!((bytes.len(), bytes.as_ptr() as u64 % PAGE), (len, 0));
            bytes.fill(7);
        }
    }

    #[test]
    fn buffers_are_used_again_and_few_are_kept() {
        let spare = Spare::new();
        let place = |buffer: &mut PageBuffer| buffer.bytes(1).as_ptr();
        let mut first = PageBuffer::touched(10_000);
        let at = place(&mut first);
        spare.keep(first, 19_000);
        spare.keep(PageBuffer::touched(9_500), 19_000);
        spare.keep(PageBuffer::touched(20_000), 19_000);
        assert_eq!(PageBuffer::out_of(&spare, 10_001).room(), 0);
        assert_eq!(place(&mut PageBuffer::out_of(&spare, 9_000)), at);
        assert_eq!(PageBuffer::out_of(&spare, 1).room(), 0);
    }

    #[test]
    fn pages_arrive_whichever_way_they_go() {
        let path = std::env::temp_dir().join(format!("kdirect-{}", std::process::id()));
        let file = File::create_new(&path).unwrap();
        let direct = Direct::again(&file);
        let mut buffer = PageBuffer::default();
        let page = buffer.bytes(PAGE as usize);
        page.fill(9);
        if !direct.write(page, PAGE).unwrap() {
            file.write_all_at(page, PAGE).unwrap();
        }
        assert!(!direct.write(&page[1..], 0).unwrap(), "not whole pages");
        assert!(!direct.write(page, 5).unwrap(), "not on a page");
        let back = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(back.len(), 2 * PAGE as usize);
        assert!(back[..PAGE as usize].iter().all(|b| *b == 0));
        assert!(back[PAGE as usize..].iter().all(|b| *b == 9));
    }
}
