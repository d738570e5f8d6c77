//! Signals of a process whose job runs elsewhere: they are passed on as a supervisor's are.

use crate::base::signals::{self, Signal, Signals};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;

/// A signal to be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub signal: u8,
    /// A terminal has sent it: it is for the program's process group.
    pub to_group: bool,
}

/// Of a byte that is a signal otherwise.
const GROUP: u8 = 1 << 7;
/// What a terminal stops a job by.
const STOP: libc::c_int = libc::SIGTSTP;

impl Sent {
    /// Whether it stops who gets it, and all of a terminal's job.
    #[must_use]
    pub fn stops(&self) -> bool {
        libc::c_int::from(self.signal) == STOP
    }
}

/// Signals to this process, one byte each, as they come.
#[derive(Debug)]
pub struct Passed {
    stream: UnixStream,
}

impl Passed {
    /// Takes this process's signals over, also that which stops it; it should have one thread only.
    ///
    /// # Errors
    /// There is no thread or descriptor left.
    pub fn begin() -> io::Result<Passed> {
        let signals = Signals::block_with(STOP);
        let (stream, said) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        let hear = move || {
            loop {
                let (signal, group) = match signals.next_of_all() {
                    Signal::Child => continue,
                    Signal::Forward(signal) => (signal, 0),
                    Signal::Group(signal) => (signal, GROUP),
                };
                if let Ok(signal) = u8::try_from(signal)
                    && io::Write::write_all(&mut &said, &[signal | group]).is_err()
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

    /// Stops this process, as a terminal would have; returns when it goes on. In a process group
    /// that nobody would have go on again, it does at once (setpgid(2), orphaned).
    pub fn stop(&self) {
        signals::stop_by(STOP);
    }

    /// Returns those that have come since this was asked.
    #[must_use]
    pub fn taken(&self) -> Vec<Sent> {
        let mut signals = [0; 64];
        let count = (&self.stream).read(&mut signals).unwrap_or(0);
        let sent = |byte: &u8| Sent { signal: byte & !GROUP, to_group: byte & GROUP != 0 };
        signals[..count].iter().map(sent).collect()
    }
}
