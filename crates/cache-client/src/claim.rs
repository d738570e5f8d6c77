//! A write's place in its file.

use crate::parts::Parts;
use crate::sys;
use libc::c_int;
use std::os::fd::RawFd;

/// The bytes of a file that a write is for. Of `write`, the descriptor's position is behind them
/// already: one `lseek` has moved it, and so each byte is one write's alone, whoever shares the
/// position.
#[derive(Debug)]
pub(crate) struct Claim {
    fd: RawFd,
    start: u64,
    length: usize,
    moved: bool,
}

impl Claim {
    /// Takes the place of a `pwrite` at `offset`, or else of a `write`. `None` if there is none,
    /// which the kernel explains.
    pub(crate) fn new(fd: RawFd, length: usize, offset: Option<i64>) -> Option<Claim> {
        let by = i64::try_from(length).ok()?;
        let start = match offset {
            Some(offset) => {
                offset.checked_add(by)?;
                u64::try_from(offset).ok()?
            }
            None => sys::move_by(fd, by).ok()?.checked_sub(by.cast_unsigned())?,
        };
        Some(Claim { fd, start, length, moved: offset.is_none() })
    }

    /// Returns where the byte after the first `done` ones goes.
    pub(crate) fn at(&self, done: usize) -> u64 {
        self.start.saturating_add(done as u64)
    }

    /// Returns what a write returns that has written the first `done` bytes, and no more.
    pub(crate) fn short(&self, done: usize) -> usize {
        self.give_back(self.length - done);
        done
    }

    /// Returns what a write returns that fails after the first `done` bytes.
    pub(crate) fn failed(&self, done: usize, why: c_int) -> Result<usize, c_int> {
        let done = self.short(done);
        if done == 0 { Err(why) } else { Ok(done) }
    }

    fn give_back(&self, bytes: usize) {
        if self.moved && bytes > 0 {
            let _ = sys::move_by(self.fd, -(bytes as i64));
        }
    }

    /// Has the kernel write what comes after the first `done` bytes. `None` if the caller is to
    /// have it write all.
    pub(crate) fn rest(self, parts: &Parts, mut done: usize) -> Option<Result<usize, c_int>> {
        if self.appends() {
            // Since the lease was given. Its place is the file's end, wherever that is now, and the
            // kernel is to know of it.
            sys::ask_for_length(self.fd);
            let done = self.short(done);
            return (done > 0).then_some(Ok(done));
        }
        match self.through(parts, &mut done, self.length) {
            Ok(_) => Some(Ok(self.short(done))),
            Err(why) => Some(self.failed(done, why)),
        }
    }

    /// Has the kernel write what comes after the first `done` bytes, up to the one before `end`.
    /// Returns whether it did.
    ///
    /// # Errors
    /// As of `pwrite`.
    pub(crate) fn through(
        &self,
        parts: &Parts,
        done: &mut usize,
        end: usize,
    ) -> Result<bool, c_int> {
        while *done < end {
            // A call that begins at the limit has the kernel send SIGXFSZ. The program makes one
            // call here, and the kernel cuts that instead.
            if *done > 0 && self.at(*done) >= sys::file_limit() {
                return Ok(false);
            }
            let put = sys::put(self.fd, parts, *done, end - *done, self.at(*done))?;
            *done += put.done;
            if put.done < put.asked || put.asked == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns whether the descriptor's writes go to the end of the file, wherever that is.
    pub(crate) fn appends(&self) -> bool {
        self.moved && sys::appends(self.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::OFlags;
    use std::fs::File;
    use std::io::{self, Seek, Write};
    use std::os::fd::AsRawFd;

    fn file() -> io::Result<File> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        Ok(rustix::fs::memfd_create(c"claim", flags)?.into())
    }

    fn text(file: &mut File) -> io::Result<String> {
        file.rewind()?;
        io::read_to_string(file)
    }

    #[test]
    fn a_position_is_behind_what_was_written() -> io::Result<()> {
        let mut file = file()?;
        file.write_all(b"ab")?;
        let claim = Claim::new(file.as_raw_fd(), 10, None).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!((claim.at(0), claim.at(3), file.stream_position()?), (2, 5, 12));
        assert_eq!((claim.short(4), file.stream_position()?), (4, 6));
        let claim = Claim::new(file.as_raw_fd(), 10, None).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!((claim.failed(0, libc::EIO), file.stream_position()?), (Err(libc::EIO), 6));
        // A place that is told moves nothing.
        let claim = Claim::new(file.as_raw_fd(), 10, Some(7)).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!((claim.at(1), claim.short(2), file.stream_position()?), (8, 2, 6));
        Ok(())
    }

    #[test]
    fn what_is_no_place_is_the_kernel_s() -> io::Result<()> {
        let mut file = file()?;
        assert!(Claim::new(file.as_raw_fd(), 1, Some(-1)).is_none());
        assert!(Claim::new(file.as_raw_fd(), 1, Some(i64::MAX)).is_none());
        assert!(Claim::new(-1, 1, None).is_none());
        file.seek(io::SeekFrom::Start(i64::MAX as u64))?;
        assert!(Claim::new(file.as_raw_fd(), 1, None).is_none());
        assert_eq!(file.stream_position()?, i64::MAX as u64);
        let (_reader, writer) = io::pipe()?;
        assert!(Claim::new(writer.as_raw_fd(), 1, None).is_none());
        Ok(())
    }

    #[test]
    fn the_kernel_writes_the_rest() -> io::Result<()> {
        let mut file = file()?;
        let bytes = b"abcdef";
        let list =
            [&bytes[..2], &bytes[2..]].map(|part| crate::c::one(part.as_ptr().cast(), part.len()));
        let list = list.concat();
        let parts = Parts::new(&list).ok_or(io::ErrorKind::InvalidInput)?;
        let claim = Claim::new(file.as_raw_fd(), 6, None).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!((claim.rest(&parts, 1), file.stream_position()?), (Some(Ok(6)), 6));
        assert_eq!(text(&mut file)?, "\0bcdef");
        // At the end of the file, where the program asks for that by now.
        file.rewind()?;
        let claim = Claim::new(file.as_raw_fd(), 6, None).ok_or(io::ErrorKind::InvalidInput)?;
        rustix::fs::fcntl_setfl(&file, OFlags::APPEND)?;
        assert_eq!((claim.rest(&parts, 0), file.stream_position()?), (None, 0));
        let claim = Claim::new(file.as_raw_fd(), 6, None).ok_or(io::ErrorKind::InvalidInput)?;
        assert_eq!((claim.rest(&parts, 2), file.stream_position()?), (Some(Ok(2)), 2));
        assert_eq!(text(&mut file)?, "\0bcdef");
        Ok(())
    }
}
