//! The job's program: started, waited for.

use crate::jobs::{JobDir, JobName};
use crate::policy::JobGpu;
use crate::proxies::Proxies;
use crate::signals::{Signal, Signals};
use crate::{JobSpec, RunError};
use kedge_proxy::joblog::JobLog;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// A proxy needs some milliseconds to notice that its client has ended and to free its memory.
const FAREWELL: Duration = Duration::from_millis(500);

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Exited(u8),
    Killed(libc::c_int),
}

/// Starts the program in this process's group, with its descriptors, and returns its process id.
pub(crate) fn start(
    spec: &JobSpec,
    name: &JobName,
    dir: &JobDir,
    signals: &Signals,
) -> Result<u32, RunError> {
    let mask = signals.original();
    let mut command = Command::new(&spec.program);
    command.args(&spec.arguments).env("KEDGE_LOG", dir.log()).env("KEDGE_JOB", name.to_string());
    if matches!(spec.gpu, JobGpu::Devices(_)) {
        command.env("LD_LIBRARY_PATH", library_path(dir)).env("KEDGE_SOCKET", dir.socket());
    }
    // SAFETY: the closure runs in the child between fork and exec and makes one system call.
    unsafe {
        command.pre_exec(move || {
            libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
            Ok(())
        });
    }
    let child = command.spawn().map_err(|source| RunError::Start {
        program: spec.program.to_string_lossy().into_owned(),
        source,
    })?;
    // Not waited for through `Child`: the loop below reaps every child of this process.
    Ok(child.id())
}

/// The job's driver first, then whatever the user had.
fn library_path(dir: &JobDir) -> OsString {
    let mut path = dir.lib().into_os_string();
    if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|old| !old.is_empty()) {
        path.push(":");
        path.push(old);
    }
    path
}

/// Waits until the program ends; passes signals on to it and reaps what else ends meanwhile.
pub(crate) fn wait(program: u32, signals: &Signals, proxies: &Proxies, log: &JobLog) -> Outcome {
    loop {
        match signals.next() {
            Signal::Forward(signal) => {
                // SAFETY: the program has not been reaped, so the id is still its own.
                unsafe { libc::kill(program as libc::pid_t, signal) };
            }
            Signal::Child => {
                if let Some(outcome) = reap(program, proxies, log) {
                    see_proxies_off(program, signals, proxies, log);
                    return outcome;
                }
            }
        }
    }
}

/// Waits a moment for the proxies of clients that ended with the program: their last lines are then
/// in the log, and no zombie is left to an init that may not care.
fn see_proxies_off(program: u32, signals: &Signals, proxies: &Proxies, log: &JobLog) {
    let start = Instant::now();
    while let Some(left) = FAREWELL.checked_sub(start.elapsed()) {
        reap(program, proxies, log);
        if proxies.none() {
            return;
        }
        signals.child_within(left);
    }
}

/// Reaps every child that has ended; the program's outcome if it is among them.
fn reap(program: u32, proxies: &Proxies, log: &JobLog) -> Option<Outcome> {
    let mut outcome = None;
    loop {
        let mut status = 0;
        // SAFETY: waitpid stores into `status`.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
        if pid <= 0 {
            return outcome;
        }
        let ended = if libc::WIFSIGNALED(status) {
            Outcome::Killed(libc::WTERMSIG(status))
        } else {
            Outcome::Exited(libc::WEXITSTATUS(status) as u8)
        };
        if pid as u32 == program {
            outcome = Some(ended);
        } else if proxies.ended(pid as u32) && ended != Outcome::Exited(0) {
            log.line(&format!("proxy {pid} ended badly: {ended:?}"));
        }
    }
}
