//! A file of an image as it is read: through the page cache, or from the device, past what the
//! cache still has of it.

use crate::PAGE;
use crate::direct::PageBuffer;
use crate::elsewhere::ReadAt;
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

/// What statfs(2) says of tmpfs.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
/// Bytes that are read from the device at a time.
const PIECE: u64 = 1 << 20;

/// Where bytes were read from. The later ones say less about the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReadFrom {
    /// The device itself (O_DIRECT).
    #[default]
    Device,
    /// The file system has no direct reads: the page cache was told to let go of the file, which it
    /// may not have done.
    DroppedCache,
    /// Memory: the page cache, or a file system that has nothing else (tmpfs).
    Memory,
}

/// An open file.
#[derive(Debug)]
pub(crate) enum Bytes {
    Here(Here),
    /// It is none of this machine's.
    Elsewhere(Box<dyn ReadAt>),
}

/// A file of this machine.
#[derive(Debug)]
pub(crate) struct Here {
    file: File,
    /// The same, past the page cache.
    direct: Option<File>,
    /// Direct reads are refused after all.
    refused: AtomicBool,
    /// Without direct reads.
    otherwise: ReadFrom,
}

thread_local! {
    /// Whole pages of what is read directly.
    static WINDOW: RefCell<PageBuffer> = RefCell::default();
}

impl Bytes {
    /// Reads `file` through the page cache.
    pub(crate) fn cached(file: File) -> Bytes {
        Bytes::Here(Here::cached(file))
    }

    /// Reads `file` from the device, as far as its file system can do that.
    pub(crate) fn on_device(file: File) -> io::Result<Bytes> {
        Here::on_device(file).map(Bytes::Here)
    }

    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Bytes::Here(here) => Some(here.file.as_fd()),
            Bytes::Elsewhere(_) => None,
        }
    }

    pub(crate) fn length(&self) -> io::Result<u64> {
        match self {
            Bytes::Here(here) => Ok(here.file.metadata()?.len()),
            Bytes::Elsewhere(file) => file.length(),
        }
    }

    /// Has the kernel read all of it ahead, where it is this machine's.
    pub(crate) fn read_ahead(&self) {
        if let Bytes::Here(here) = self {
            // Only slower without.
            let _ = rustix::fs::fadvise(&here.file, 0, None, rustix::fs::Advice::WillNeed);
        }
    }

    pub(crate) fn read_from(&self) -> ReadFrom {
        match self {
            Bytes::Here(here) => here.read_from(),
            Bytes::Elsewhere(_) => ReadFrom::Memory,
        }
    }

    pub(crate) fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Bytes::Here(here) => here.read_exact_at(into, offset),
            Bytes::Elsewhere(file) => file.read_exact_at(into, offset),
        }
    }
}

impl Here {
    fn cached(file: File) -> Here {
        let refused = AtomicBool::new(false);
        Here { file, direct: None, refused, otherwise: ReadFrom::Memory }
    }

    fn on_device(file: File) -> io::Result<Here> {
        let mut bytes = Here::cached(file);
        // tmpfs takes the flag and reads memory.
        if is_tmpfs(&bytes.file) {
            return Ok(bytes);
        }
        // What is still to be written cannot be dropped, nor read from the device.
        bytes.file.sync_all()?;
        bytes.otherwise = ReadFrom::DroppedCache;
        // The very file once more, whatever has its name by now.
        let again = format!("/proc/self/fd/{}", bytes.file.as_raw_fd());
        bytes.direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(again).ok();
        if bytes.direct.is_none() {
            bytes.drop_cache();
        }
        Ok(bytes)
    }

    fn read_from(&self) -> ReadFrom {
        let direct = self.direct.is_some() && !self.refused.load(Ordering::Relaxed);
        if direct { ReadFrom::Device } else { self.otherwise }
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let direct = self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed));
        let Some(direct) = direct else { return self.file.read_exact_at(into, offset) };
        match read_directly(direct, into, offset) {
            // A disk that wants larger blocks than pages.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    self.drop_cache();
                }
                self.file.read_exact_at(into, offset)
            }
            other => other,
        }
    }

    fn drop_cache(&self) {
        // It stays where the kernel says no; what is read is called dropped, not read from the
        // device.
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

/// Returns whether the file lies in memory.
pub(crate) fn is_tmpfs(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC)
}

/// Fills `into` from `offset` on, by whole pages of `file`.
fn read_directly(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    let (mut into, mut at) = (into, offset);
    WINDOW.with_borrow_mut(|window| {
        while !into.is_empty() {
            let skip = (at % PAGE) as usize;
            let some = into.len().min(PIECE as usize);
            let window = window.bytes((skip + some).next_multiple_of(PAGE as usize));
            if read_up_to(file, window, at - skip as u64)? < skip + some {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let (part, rest) = std::mem::take(&mut into).split_at_mut(some);
            part.copy_from_slice(&window[skip..skip + some]);
            (into, at) = (rest, at + some as u64);
        }
        Ok(())
    })
}

/// Reads until `window` is full or the file ends: how many bytes.
fn read_up_to(file: &File, window: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < window.len() {
        match file.read_at(&mut window[done..], offset + done as u64) {
            Ok(0) => break,
            // The end of the file: nothing else ends within a page.
            Ok(count) if !count.is_multiple_of(PAGE as usize) => return Ok(done + count),
            Ok(count) => done += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(other) => return Err(other),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn bytes_are_the_same_wherever_they_are_read_from() {
        let path = std::env::temp_dir().join(format!("kbytes-{}", std::process::id()));
        let length = 3 * PIECE as usize + 4096 + 77;
        let content: Vec<u8> = (0..length).map(|at| (at * 7 / 5) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let open = || File::open(&path).unwrap();
        let (cached, device) = (Bytes::cached(open()), Bytes::on_device(open()).unwrap());
        assert_eq!(cached.read_from(), ReadFrom::Memory);
        for offset in [0, 1, 4095, 4096, 5000, PIECE as usize - 1, length - 48, length] {
            for len in [0, 1, 48, 4096, 10_000, PIECE as usize, 2 * PIECE as usize + 5] {
                let (mut one, mut other) = (vec![1; len], vec![2; len]);
                let told = [
                    cached.read_exact_at(&mut one, offset as u64).is_ok(),
                    device.read_exact_at(&mut other, offset as u64).is_ok(),
                ];
                assert_eq!(told, [offset + len <= length; 2], "{len} at {offset}");
                assert!(!told[0] || one == other && one == content[offset..offset + len]);
            }
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_has_no_device_says_so() {
        // A file system in memory, on every Linux machine.
        let path = Path::new("/dev/shm").join(format!("kbytes-{}", std::process::id()));
        std::fs::write(&path, b"in memory").unwrap();
        let bytes = Bytes::on_device(File::open(&path).unwrap()).unwrap();
        let mut found = [0; 9];
        bytes.read_exact_at(&mut found, 0).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((bytes.read_from(), &found), (ReadFrom::Memory, b"in memory"));
    }
}
