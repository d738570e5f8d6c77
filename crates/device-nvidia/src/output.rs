//! What kernels print. The driver writes it to this process's standard output and error when the
//! program synchronises; both lead to files in memory, from which it goes to the client.
//!
//! To look costs two system calls, much of a microsecond in the wait for a kernel that does
//! nothing, so nobody looks as long as all modules are known not to print.

use kedge_device::Host;
use kedge_protocol::OutputTarget;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Taken from a file at a time, bytes.
const CHUNK: usize = 64 << 10;

pub(crate) struct Capture {
    streams: Mutex<Vec<Stream>>,
    /// Modules that print, or of which nobody knows yet.
    printers: AtomicUsize,
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
        Ok(Capture { streams: Mutex::new(vec![stdout, stderr]), printers: AtomicUsize::new(0) })
    }

    /// Nothing is captured: a test's output is its own.
    #[cfg(test)]
    pub(crate) fn nothing() -> Capture {
        Capture { streams: Mutex::default(), printers: AtomicUsize::new(0) }
    }

    /// A module is about to be loaded: it may print.
    pub(crate) fn module_comes(&self) {
        self.printers.fetch_add(1, Ordering::SeqCst);
    }

    /// A module that came cannot print, or has not come after all.
    pub(crate) fn module_is_silent(&self) {
        self.printers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a kernel may print.
    pub(crate) fn may_print(&self) -> bool {
        self.printers.load(Ordering::SeqCst) > 0
    }

    /// Hands on what has been printed since; `anyway`: even if no module can have.
    pub(crate) fn drain(&self, host: &dyn Host, anyway: bool) {
        if !anyway && !self.may_print() {
            return;
        }
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
        // SAFETY: the calls take descriptors of this process that are open, and no pointers.
        // Appending keeps writers from each other's bytes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::CuError;
    use kedge_device::Done;
    use kedge_protocol::CtxId;
    use std::io::Write;

    #[derive(Default)]
    struct Printed(Mutex<Vec<u8>>);

    impl Host for Printed {
        fn read_client(&self, _: u64, _: &mut [u8]) -> Result<(), CuError> {
            Err(CuError::NOT_SUPPORTED)
        }
        fn write_client(&self, _: u64, _: &[u8]) -> Result<(), CuError> {
            Err(CuError::NOT_SUPPORTED)
        }
        fn host_function(&self, _: u64, _: Done) {}
        fn output(&self, _: OutputTarget, bytes: &[u8]) {
            self.0.lock().unwrap().extend(bytes);
        }
        fn fault(&self, _: CtxId, _: CuError) {}
        fn idle(&self) {}
        fn log(&self, _: &str) {}
    }

    #[test]
    fn nobody_looks_for_what_no_module_prints() {
        let target = OutputTarget::Stdout {};
        // SAFETY: a C string; the descriptor is owned by the file at once.
        let mut file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), 0)) };
        let stream = Stream { target, file: file.try_clone().unwrap(), taken: 0 };
        let capture = Capture { streams: Mutex::new(vec![stream]), ..Capture::nothing() };
        let host = Printed::default();
        file.write_all(b"a").unwrap();
        capture.drain(&host, false);
        assert_eq!(*host.0.lock().unwrap(), b"");
        capture.module_comes();
        capture.drain(&host, false);
        assert_eq!(*host.0.lock().unwrap(), b"a");
        file.write_all(b"b").unwrap();
        capture.module_is_silent();
        capture.drain(&host, false);
        assert_eq!(*host.0.lock().unwrap(), b"a");
        capture.drain(&host, true);
        assert_eq!(*host.0.lock().unwrap(), b"ab");
    }
}
