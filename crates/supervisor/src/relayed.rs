//! Signals of a process whose job runs elsewhere: they are passed on as a supervisor's are.

use crate::signals::{Signal, Signals};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;

/// Signals to this process, one byte each, as they come.
#[derive(Debug)]
pub struct Passed {
    stream: UnixStream,
}

impl Passed {
    /// Takes this process's signals over; it should have one thread only.
    ///
    /// # Errors
    /// There is no thread or descriptor left.
    pub fn begin() -> io::Result<Passed> {
        let signals = Signals::block();
        let (stream, said) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        let hear = move || {
            loop {
                if let Signal::Forward(signal) = signals.next_of_all()
                    && let Ok(signal) = u8::try_from(signal)
                    && io::Write::write_all(&mut &said, &[signal]).is_err()
                {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(hear)?;
        Ok(Passed { stream })
    }

    /// What is readable once a signal has come.
    #[must_use]
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns those that have come since this was asked.
    #[must_use]
    pub fn taken(&self) -> Vec<u8> {
        let mut signals = [0; 64];
        let count = (&self.stream).read(&mut signals).unwrap_or(0);
        signals[..count].to_vec()
    }
}
