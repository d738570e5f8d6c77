//! What kernels print. The driver writes it to this process's standard output and error when the
//! program synchronises; both lead to files in memory, from which it goes to the client.

use kedge_device::Host;
use kedge_protocol::OutputTarget;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// Taken from a file at a time, bytes.
const CHUNK: usize = 64 << 10;

pub(crate) struct Capture {
    streams: Mutex<Vec<Stream>>,
}

struct Stream {
    target: OutputTarget,
    file: File,
    taken: u64,
}

impl Capture {
    /// Redirects standard output and error.
    pub(crate) fn begin() -> io::Result<Capture> {
        let stdout = Stream::redirect(libc::STDOUT_FILENO, OutputTarget::Stdout {})?;
        let stderr = Stream::redirect(libc::STDERR_FILENO, OutputTarget::Stderr {})?;
        Ok(Capture { streams: Mutex::new(vec![stdout, stderr]) })
    }

    /// Nothing is captured: a test's output is its own.
    #[cfg(test)]
    pub(crate) fn nothing() -> Capture {
        Capture { streams: Mutex::default() }
    }

    /// Hands on what has been printed since.
    pub(crate) fn drain(&self, host: &dyn Host) {
        // SAFETY: flushes the C library's buffers, where the driver's output may be.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.iter_mut().for_each(|stream| stream.drain(host));
    }
}

impl Stream {
    fn redirect(fd: libc::c_int, target: OutputTarget) -> io::Result<Stream> {
        // SAFETY: a C string; the descriptor is owned by the file at once.
        let file = unsafe {
            let made = libc::memfd_create(c"kedge-output".as_ptr(), libc::MFD_CLOEXEC);
            if made < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(made)
        };
        // SAFETY: plain calls on descriptors of this process. Appending keeps writers from each
        // other's bytes.
        let failed = unsafe {
            libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) < 0
                || libc::dup2(file.as_raw_fd(), fd) < 0
        };
        if failed {
            return Err(io::Error::last_os_error());
        }
        Ok(Stream { target, file, taken: 0 })
    }

    fn drain(&mut self, host: &dyn Host) {
        let Ok(end) = self.file.metadata().map(|m| m.len()) else { return };
        if end == self.taken {
            return;
        }
        let from = self.taken;
        let mut chunk = vec![0; CHUNK];
        while self.taken < end {
            let want = CHUNK.min((end - self.taken) as usize);
            let Ok(got @ 1..) = self.file.read_at(&mut chunk[..want], self.taken) else { break };
            host.output(self.target, &chunk[..got]);
            self.taken += got as u64;
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (start, len) = (from as libc::off_t, (self.taken - from) as libc::off_t);
        // SAFETY: frees memory of bytes that were read. A refusal only keeps it.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, start, len) };
    }
}
