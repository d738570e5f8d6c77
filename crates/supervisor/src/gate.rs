//! A restart that waits, when all of it is there but runs, for whoever has started it: a job that
//! arrives from another host runs only once nothing of it runs there any more.

use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError};
use rustix::io::{FdFlags, fcntl_setfd};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

/// Said by the restart: all is there, and it waits.
pub const WAITS: u8 = b'w';
/// Said to it: go on.
pub const GO: u8 = b'g';
/// Said by its supervisor: it runs.
pub const RUNS: u8 = b'r';

/// The plugin of this process's restart.
pub(crate) static GATE: Gate = Gate(Mutex::new(None));

#[derive(Debug)]
pub(crate) struct Gate(Mutex<Option<UnixStream>>);

impl Gate {
    /// Has the restart wait at the socket that this process was started with.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn wait_at(&self, fd: RawFd) -> io::Result<()> {
        if fd < 3 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the descriptor was given to this process by who has started it, for this alone,
        // and is taken once: kedge's own arguments name it.
        let stream = unsafe { UnixStream::from_raw_fd(fd) };
        fcntl_setfd(&stream, FdFlags::CLOEXEC)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
        Ok(())
    }

    /// What the restart's init is to have, too.
    pub(crate) fn number(&self) -> Option<RawFd> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(AsRawFd::as_raw_fd)
    }

    fn take(&self) -> Option<UnixStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Says that the job runs, in the process that supervises it.
    pub(crate) fn passed(&self) {
        if let Some(mut stream) = self.take() {
            // The job runs also where nobody hears that.
            let _ = stream.write_all(&[RUNS]);
        }
    }
}

impl Plugin for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    /// In the job's init, whose copy of this it is.
    fn may_run(&self) -> Result<(), PluginError> {
        let Some(mut stream) = self.take() else { return Ok(()) };
        let mut word = [0];
        let heard = stream.write_all(&[WAITS]).and_then(|()| stream.read_exact(&mut word));
        match heard {
            Ok(()) if word == [GO] => Ok(()),
            _ => Err(PluginError::Refused("the move to this host was given up".to_owned())),
        }
    }
}
