//! A restart that waits, when all of it is there but runs, for whoever has started it: a job that
//! arrives from another host runs only once nothing of it runs there any more. It may begin before
//! the job's last image is there, and hears here of those that come.

use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError};
use kedge_process::{Arrivals, Next};
use rustix::io::{FdFlags, fcntl_setfd};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Said by the restart: all is there, and it waits.
pub const WAITS: u8 = b'w';
/// Said to it: go on.
pub const GO: u8 = b'g';
/// Said by its supervisor: it runs.
pub const RUNS: u8 = b'r';
/// Said by a standby: the images so far are made.
pub const MADE: u8 = b'm';
/// What says that an image has come, and whether it is the last one: its path follows.
const ANOTHER: u8 = b'a';
const LAST: u8 = b'l';
/// Longest path of an image, in bytes (PATH_MAX).
const MAX_PATH_LEN: usize = 4096;

/// Tells a standby that an image has come, and whether it is the last one.
///
/// # Errors
/// The restart has ended, or the path has more than 4,096 bytes.
pub fn bring_image(mut gate: &UnixStream, image: &Path, is_last: bool) -> io::Result<()> {
    let path = image.as_os_str().as_bytes();
    if path.len() > MAX_PATH_LEN {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    let length = path.len() as u16;
    let kind = if is_last { LAST } else { ANOTHER };
    gate.write_all(&[&[kind], &length.to_le_bytes()[..], path].concat())
}

/// Reads what [`bring_image`] tells.
fn brought(mut gate: &UnixStream) -> io::Result<Next> {
    let (mut kind, mut length) = ([0], [0; 2]);
    gate.read_exact(&mut kind)?;
    gate.read_exact(&mut length)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > MAX_PATH_LEN {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut path = vec![0; length];
    gate.read_exact(&mut path)?;
    let path = PathBuf::from(OsString::from_vec(path));
    match kind {
        [ANOTHER] => Ok(Next::Another(path)),
        [LAST] => Ok(Next::Last(path)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The plugin of a restart that waits: until it goes on, in its init and in the process that
/// supervises it.
#[derive(Debug)]
pub(crate) struct Gate(Mutex<Option<UnixStream>>);

impl Gate {
    /// Returns the one at the socket that this process was started with.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn at(fd: RawFd) -> io::Result<Gate> {
        if fd < 3 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the descriptor was given to this process by who has started it, for this alone,
        // and is taken once: kedge's own arguments name it.
        let stream = unsafe { UnixStream::from_raw_fd(fd) };
        fcntl_setfd(&stream, FdFlags::CLOEXEC)?;
        Ok(Gate(Mutex::new(Some(stream))))
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

impl Arrivals for Gate {
    /// In the job's init, as [`Gate::may_run`].
    fn next(&self) -> Result<Next, PluginError> {
        let gate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = gate.as_ref().map(|mut gate| {
            gate.write_all(&[MADE])?;
            brought(gate)
        });
        next.and_then(Result::ok).ok_or_else(given_up)
    }
}

fn given_up() -> PluginError {
    PluginError::Refused("the move to this host was given up".to_owned())
}

impl Plugin for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    /// In the job's init, whose copy of the socket ends here.
    fn may_run(&self) -> Result<(), PluginError> {
        let Some(mut stream) = self.take() else { return Ok(()) };
        let mut word = [0];
        let heard = stream.write_all(&[WAITS]).and_then(|()| stream.read_exact(&mut word));
        match heard {
            Ok(()) if word == [GO] => Ok(()),
            _ => Err(given_up()),
        }
    }
}
