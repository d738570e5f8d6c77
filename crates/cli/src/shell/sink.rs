//! Where a relay writes what the other end sends, and how: so that nobody waits for whoever reads
//! it.

use super::bytes::Bytes;
use super::frame::Stream;
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// A pipe that poll() calls writable takes so much at once (PIPE_BUF): whoever shares it is spared
/// O_NONBLOCK.
const PIECE: usize = 4096;
/// Written at once where the kernel can be told not to wait.
const LARGE: usize = 128 << 10;

/// Where something is written that the other end sends.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) stream: Stream,
    pub(super) fd: OwnedFd,
    pub(super) way: Way,
    pub(super) waits: Bytes,
    /// How many were written that the other end has not been told of.
    pub(super) untold: usize,
    /// Nothing more comes.
    pub(super) ends: bool,
    /// Until when it is not tried: there was no room in its file system.
    pub(super) full: Option<Instant>,
}

/// How a file takes bytes so that nobody waits for whoever reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// All at once: nobody reads an ordinary file.
    Whole,
    /// The kernel can be told not to wait.
    NoWait,
    /// By so little that poll() vouches for it.
    Piece,
}

impl Way {
    fn of(fd: &OwnedFd) -> Way {
        match fstat(fd).map(|file| FileType::from_raw_mode(file.st_mode)) {
            Ok(FileType::RegularFile) => Way::Whole,
            Ok(FileType::Fifo | FileType::Socket) => Way::NoWait,
            _ => Way::Piece,
        }
    }
}

impl Sink {
    pub(super) fn new(stream: Stream, fd: OwnedFd) -> Sink {
        let (way, waits) = (Way::of(&fd), Bytes::default());
        Sink { stream, fd, way, waits, untold: 0, ends: false, full: None }
    }

    /// Whether it is written to when it can be.
    pub(super) fn is_due(&self) -> bool {
        !self.waits.is_empty() && self.full.is_none_or(|until| Instant::now() >= until)
    }

    /// Writes what it takes without waiting.
    pub(super) fn write(&mut self) -> Result<usize, Errno> {
        let waits = self.waits.waiting();
        let large = &waits[..waits.len().min(LARGE)];
        let written = match self.way {
            Way::Whole => rustix::io::write(&self.fd, large),
            Way::Piece => rustix::io::write(&self.fd, &waits[..waits.len().min(PIECE)]),
            Way::NoWait => {
                let large = [IoSlice::new(large)];
                pwritev2(&self.fd, &large, u64::MAX, ReadWriteFlags::NOWAIT)
            }
        };
        if self.way == Way::NoWait && written == Err(Errno::OPNOTSUPP) {
            self.way = Way::Piece;
            return self.write();
        }
        written
    }
}
