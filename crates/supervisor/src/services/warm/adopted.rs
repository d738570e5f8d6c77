//! A proxy that was ready, in the hands of a job: no child of the process that has it.

use crate::job::outcome::Outcome;
use kedge_control::proxy::{Answer, Control, ControlError, Order};
use kedge_wire::{List, Text};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a proxy that is ready may need to take its client: it does so at once.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// One that waits for its client. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct WarmProxy {
    pub(crate) pid: u32,
    control: Control,
    process: OwnedFd,
}

/// How such a proxy is seen to end.
#[derive(Debug)]
pub(crate) struct Leaving {
    process: OwnedFd,
    /// It says with which status, if it ends by itself.
    word: UnixStream,
}

impl WarmProxy {
    pub(super) fn new(pid: u32, control: OwnedFd, process: OwnedFd) -> WarmProxy {
        WarmProxy { pid, control: Control::to(control), process }
    }

    /// Its descriptors, for a process that is to have it too.
    pub(crate) fn numbers(&self) -> [RawFd; 2] {
        [self.control.socket().as_raw_fd(), self.process.as_raw_fd()]
    }

    /// Has it serve `client` from now on, as one that was started with these arguments would. One
    /// that does not is ended.
    pub(crate) fn serve(
        self,
        client: BorrowedFd<'_>,
        arguments: &[OsString],
    ) -> Result<(Control, Leaving), ControlError> {
        let served = self.hand_over(client, arguments);
        if served.is_err() {
            // It must not find the client's socket later.
            kill(&self.process);
        }
        let word = served?;
        Ok((self.control, Leaving { process: self.process, word }))
    }

    fn hand_over(
        &self,
        client: BorrowedFd<'_>,
        arguments: &[OsString],
    ) -> Result<UnixStream, ControlError> {
        let text = |argument: &OsString| Text::new(argument.to_str()?.to_owned()).ok();
        let arguments = arguments.iter().map(text).collect::<Option<Vec<_>>>();
        let arguments = arguments.and_then(|all| List::new(all).ok());
        let too_long = || ControlError::Failed("its arguments are no text, or too long".into());
        let order = Order::Serve { arguments: arguments.ok_or_else(too_long)? };
        let (near, far) = UnixStream::pair().map_err(|e| ControlError::Channel(e.into()))?;
        match self.control.ask(&order, &[client, far.as_fd()], HANDOVER_TIMEOUT)? {
            Answer::Yes {} => Ok(near),
            _ => Err(ControlError::Nonsense),
        }
    }
}

impl Leaving {
    /// Returns what means the process.
    pub(crate) fn process(&self) -> io::Result<OwnedFd> {
        self.process.try_clone()
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        poll(&self.process, 0)
    }

    /// Waits for its end: how that was.
    pub(crate) fn wait(&self) -> Outcome {
        while !poll(&self.process, -1) {}
        let mut status = [0];
        let said = self.word.set_nonblocking(true).and_then(|()| (&self.word).read(&mut status));
        match said {
            Ok(1) => Outcome::Exited(status[0]),
            _ => Outcome::Killed(libc::SIGKILL),
        }
    }
}

/// Whether the process has ended, or does within `limit` milliseconds.
fn poll(process: &OwnedFd, limit: libc::c_int) -> bool {
    let mut fd = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, alive for the call.
    unsafe { libc::poll(&raw mut fd, 1, limit) > 0 }
}

fn kill(process: &OwnedFd) {
    // One that has ended needs no signal.
    let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
}

/// Has the proxy counted with this process, in its control group: false where that is not allowed.
pub(super) fn bring_to_own_group(pid: u32) -> io::Result<bool> {
    let of = |who: &str| fs::read_to_string(format!("/proc/{who}/cgroup"));
    let own = of("self")?;
    if of(&pid.to_string())? == own {
        return Ok(true);
    }
    let path = own.lines().find_map(|line| line.strip_prefix("0::"));
    let Some(path) = path.filter(|path| path.starts_with('/')) else { return Ok(false) };
    let members = format!("/sys/fs/cgroup{path}/cgroup.procs");
    Ok(fs::write(members, pid.to_string()).is_ok())
}
