//! The job's program: started, signalled, collected.

use crate::base::signals::Signals;
use crate::job::jobs::{JobDir, JobName};
use crate::job::outcome::Outcome;
use crate::job::policy::JobGpu;
use crate::job::rank::End;
use crate::job::spec::{JobSpec, RunError};
use crate::job::trace;
use kedge_control::gpu::GpuSpec;
use kedge_process::kernel::{self, Stops};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The program's first process.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) pid: u32,
    /// Means that process even when its id means another.
    descriptor: OwnedFd,
}

impl Program {
    /// Starts the program in this process's group, with its descriptors, and with the signal
    /// blocked that is withheld from it.
    pub(crate) fn start(
        spec: &JobSpec,
        name: &JobName,
        dir: &JobDir,
        (signals, withheld): (&Signals, Option<libc::c_int>),
        rank: Option<End>,
    ) -> Result<Program, RunError> {
        let mask = signals.original_with(withheld);
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.arguments)
            .env_remove(crate::job::joint::KEY)
            .env("KEDGE_LOG", dir.log())
            .env("KEDGE_CONTROL", dir.control())
            .env("KEDGE_JOB", name.to_string());
        if matches!(spec.gpu, JobGpu::Devices(_)) {
            command.env("LD_LIBRARY_PATH", library_path(dir)).env("KEDGE_SOCKET", dir.socket());
        } else {
            command.env_remove("KEDGE_SOCKET");
        }
        if let Some(library) = &spec.preload {
            command.env(PRELOADED, before(library.clone(), PRELOADED));
        }
        if spec.shells {
            command.env("PATH", dir.search_path());
        }
        match spec.trace {
            Some(_) => command.env(trace::TRACED, "1"),
            None => command.env_remove(trace::TRACED),
        };
        if let Some(visible) = visible(&spec.gpu) {
            command.env(VISIBLE, visible);
        }
        // libuv may use io_uring, which nobody can save; without it, it does the same by epoll and
        // threads.
        for told in NO_URING {
            if std::env::var_os(told).is_none() {
                command.env(told, "0");
            }
        }
        let relay = rank.as_ref().map(|end| (end.socket.as_raw_fd(), end.number));
        // SAFETY: the closure runs in the child between fork and exec and makes two system calls;
        // the relay's end is open until the child has been started.
        unsafe {
            command.pre_exec(move || {
                libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
                match relay {
                    Some((end, number)) if libc::dup2(end, number) < 0 => {
                        Err(io::Error::last_os_error())
                    }
                    _ => Ok(()),
                }
            });
        }
        kernel::require(Stops::Jobs)?;
        let child = command.spawn().map_err(|source| RunError::Start {
            program: spec.program.to_string_lossy().into_owned(),
            source,
        })?;
        drop(rank);
        let pid = child.id();
        // SAFETY: a plain call on a child that has not been waited for; what it returns is a new
        // descriptor.
        let descriptor = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0) as RawFd;
            if fd < 0 {
                let source = io::Error::last_os_error();
                return Err(RunError::System { what: "open the program's descriptor", source });
            }
            OwnedFd::from_raw_fd(fd)
        };
        // Not waited for through `Child`: reap() below collects every child of this process.
        Ok(Program { pid, descriptor })
    }

    /// Sends it a signal, if it has not ended.
    pub(crate) fn signal(&self, signal: libc::c_int) {
        let none = std::ptr::null::<libc::siginfo_t>();
        let fd = self.descriptor.as_raw_fd();
        // SAFETY: the descriptor is open; no siginfo is given.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) };
    }

    /// Collects every child that has ended: the program's outcome if it is among them. `other`
    /// hears of each of the others, by its id.
    pub(crate) fn reap(&self, mut other: impl FnMut(u32, Outcome)) -> Option<Outcome> {
        let mut outcome = None;
        for (pid, status) in kedge_process::reap(&[self.pid as libc::pid_t]).ended {
            let ended = Outcome::of(status);
            match pid as u32 == self.pid {
                true => outcome = Some(ended),
                false => other(pid as u32, ended),
            }
        }
        outcome
    }
}

/// Where libuv (Node.js) is told whether it may use io_uring, and PyTorch's stores whether they may
/// use their own libuv, which is not told by the first.
const NO_URING: [&str; 2] = ["UV_USE_IO_URING", "USE_LIBUV"];
/// Libraries that the loader takes first (ld.so(8)).
const PRELOADED: &str = "LD_PRELOAD";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// All of the job's GPUs, by number, where these are some of the machine's: NVIDIA's management
/// library shows all of the machine's, and PyTorch takes their number from there unless this
/// variable tells another.
fn visible(gpu: &JobGpu) -> Option<String> {
    let JobGpu::Devices(GpuSpec::Local { ordinals }) = gpu else { return None };
    if ordinals.is_empty() || std::env::var_os(VISIBLE).is_some() {
        return None;
    }
    let all: Vec<String> = (0..ordinals.len()).map(|number| number.to_string()).collect();
    Some(all.join(","))
}

/// The job's driver first, then whatever the user had.
fn library_path(dir: &JobDir) -> OsString {
    before(dir.lib(), "LD_LIBRARY_PATH")
}

/// Returns a list of `path` and what a variable has.
fn before(path: PathBuf, variable: &str) -> OsString {
    let mut list = path.into_os_string();
    if let Some(old) = std::env::var_os(variable).filter(|old| !old.is_empty()) {
        list.push(":");
        list.push(old);
    }
    list
}
