//! Filters of system calls (seccomp), which threads have each for themselves: a call that is
//! injected into a thread is filtered like its own, and the answer may be the end of the whole
//! process. So may be the stop alone: a sleep that it has interrupted goes on by
//! restart_syscall(2).
//!
//! A container's filter is one that this process has as well. Nobody loses a filter, and everybody
//! gets those of his parent: a process of the job that has no more of them than this one has the
//! same. They need not be saved, for whoever restarts the job there has them too; what they do to
//! the calls is tried in a child.
//!
//! Where this process has none and is root, it can suspend the filters of the threads that it
//! traces, read them, and give them to those that it makes anew: docs/design/0056-filters.md.

pub(crate) mod program;

use crate::follow::Parent;
use crate::stop::StoppedProcess;
use crate::{EngineError, Thread, proc, several, sys, translate};
use libc::{c_long, pid_t};
use program::Filter;
use std::io::{self, Read};
use std::iter;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

/// Refuses the processes `pids` if a thread of theirs filters its system calls in a way that can be
/// neither saved nor borne.
///
/// # Errors
///
/// [`EngineError::Unsupported`], which names the first such thread.
pub(crate) fn refuse(pids: impl IntoIterator<Item = pid_t>) -> Result<(), EngineError> {
    let own = OWN.get_or_init(own_filters);
    let pids: Vec<pid_t> = pids.into_iter().collect();
    let threads = several::each(&pids, |pid| proc::threads(*pid));
    let threads = pids.iter().zip(threads);
    let all: Vec<(pid_t, pid_t)> =
        threads.flat_map(|(pid, tids)| tids.into_iter().map(|tid| (*pid, tid))).collect();
    several::try_each(&all, |(pid, tid)| own.refuse(*pid, *tid)).map(drop)
}

/// Refuses the stopped `processes` as [`refuse`] does, before calls are made in them.
///
/// The status of thousands of threads takes long to read. Where the kernel tells this process of
/// filters, it is read of those that have some, and of those that may be in strict mode for all
/// that the calls tell in which they have stopped: the kernel does not tell of that mode.
///
/// # Errors
///
/// [`EngineError::Unsupported`], which names the first such thread.
pub(crate) fn refuse_stopped(processes: &[StoppedProcess]) -> Result<(), EngineError> {
    let own = OWN.get_or_init(own_filters);
    let are_told =
        |thread: &&Thread| own.suspends && !thread.is_filtered() && !thread.is_in_strict_call();
    let of = |process: &StoppedProcess| {
        let threads = iter::once(&process.main).chain(&process.others);
        let untold = threads.filter(|thread| !are_told(thread));
        untold.map(|thread| (process.pid, thread.pid())).collect::<Vec<_>>()
    };
    let all = processes.iter().flat_map(of).collect::<Vec<_>>();
    several::try_each(&all, |(pid, tid)| own.refuse(*pid, *tid)).map(drop)
}

/// Most filters of a thread that are saved. Programs have a handful.
pub(crate) const MAX_FILTERS: usize = 256;

/// The filters of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Filters {
    None,
    /// So many; `None` where the kernel (before 5.9) does not count them.
    Some(Option<u64>),
    /// The thread may only read, write and end.
    Strict,
}

/// The filters of this process.
#[derive(Debug)]
struct Own {
    filters: Filters,
    /// Whether the calls that are injected harm no process that has these filters.
    spare: bool,
    /// Whether this process may suspend the filters of others.
    suspends: bool,
}

static OWN: OnceLock<Own> = OnceLock::new();

fn own_filters() -> Own {
    let own = std::process::id() as pid_t;
    let filters = filters_of(own);
    match filters {
        Filters::None => Own { filters, spare: true, suspends: may_suspend() },
        // Who is filtered may not, whatever his rights are.
        _ => Own { filters, spare: calls_are_spared(), suspends: false },
    }
}

/// Returns whether this process can suspend, read and bring back the filters of others.
pub(crate) fn are_saved() -> bool {
    OWN.get_or_init(own_filters).suspends
}

/// Returns the filters of a stopped thread that is traced by this one, the oldest first.
///
/// # Errors
/// [`EngineError::Unsupported`] for one that cannot be brought back.
pub(crate) fn of(tid: pid_t) -> Result<Vec<Filter>, EngineError> {
    let mut filters = Vec::new();
    while let Some(filter) = sys::filter(tid, filters.len())? {
        filters.push(filter);
        if filters.len() > MAX_FILTERS {
            return Err(EngineError::unsupported(tid, "has too many filters of its system calls"));
        }
    }
    // It is given anew to those who need it, before they get their own.
    if filters.first().is_some_and(translate::is_filter) {
        filters.remove(0);
    }
    if filters.iter().any(Filter::may_notify) {
        let what = "hands its system calls to another process (SECCOMP_RET_USER_NOTIF), which \
                    kedge cannot save yet";
        return Err(EngineError::unsupported(tid, what));
    }
    Ok(filters)
}

/// Whether this process has a filter, as those in a container do.
pub(crate) fn are_inherited() -> bool {
    OWN.get_or_init(own_filters).filters != Filters::None
}

impl Own {
    fn refuse(&self, pid: pid_t, tid: pid_t) -> Result<(), EngineError> {
        match self.objection(&filters_of(tid)) {
            Some(what) => Err(EngineError::unsupported(pid, format!("its thread {tid} {what}"))),
            None => Ok(()),
        }
    }

    /// Why a thread with `filters` cannot be saved; None where it can.
    fn objection(&self, filters: &Filters) -> Option<&'static str> {
        // The one that translates addresses lets every other call be.
        let translating = u64::from(translate::is_on());
        let inherited = match (self.filters, filters) {
            (_, Filters::None) => return None,
            (Filters::None, Filters::Some(count)) if self.suspends => {
                return (count.unwrap_or(0) > MAX_FILTERS as u64).then_some(
                    "has more than 256 filters of \
                    its system calls (seccomp), which kedge does not save",
                );
            }
            (Filters::None, Filters::Some(Some(count))) => *count <= translating,
            (Filters::Some(Some(own)), Filters::Some(Some(count))) => *count <= own + translating,
            _ => false,
        };
        match (inherited, self.spare) {
            (true, true) => None,
            (true, false) => Some(
                "has this container's filter of system calls (seccomp), which ends a process for \
                 calls that a checkpoint makes in it; run the container with one that fails them, \
                 or with none (--security-opt seccomp=unconfined): docs/containers.md",
            ),
            (false, _) if *filters == Filters::Strict => {
                Some("is in seccomp's strict mode, which kedge cannot save yet")
            }
            (false, _) => Some(
                "filters its system calls (seccomp), which kedge can save as root alone, and where \
                 no filter is upon kedge itself",
            ),
        }
    }
}

/// Returns the filters of a thread. One that has ended has none.
fn filters_of(tid: pid_t) -> Filters {
    let Ok(status) = proc::bytes(format!("/proc/{tid}/status")) else {
        return Filters::None;
    };
    match field(&status, b"Seccomp:") {
        None | Some(b"0") => Filters::None,
        Some(b"2") => Filters::Some(
            field(&status, b"Seccomp_filters:")
                .and_then(|count| str::from_utf8(count).ok()?.parse().ok()),
        ),
        Some(_) => Filters::Strict,
    }
}

/// Returns what the text of a status file says of `name`: of seccomp, `0` is no filter. A kernel
/// without seccomp says nothing.
fn field<'a>(status: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    // The process's name, which comes first, may hold anything but a line's end.
    let mut lines = status.split(|byte| *byte == b'\n');
    Some(lines.find_map(|line| line.strip_prefix(name))?.trim_ascii())
}

/// What the engine has the processes of a job do, and a call that no kernel knows: a filter that
/// lists what is allowed treats all others as that one.
const INJECTED: [c_long; 53] = [
    0xffff,
    libc::SYS_brk,
    libc::SYS_capset,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_dup3,
    libc::SYS_epoll_ctl,
    libc::SYS_fchdir,
    libc::SYS_fcntl,
    libc::SYS_get_mempolicy,
    libc::SYS_get_robust_list,
    libc::SYS_getitimer,
    libc::SYS_getpeername,
    libc::SYS_getpriority,
    libc::SYS_getsockname,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
    libc::SYS_ioctl,
    libc::SYS_ioprio_get,
    libc::SYS_kcmp,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_openat,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_read,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sendmsg,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setpgid,
    libc::SYS_shmat,
    libc::SYS_sigaltstack,
    libc::SYS_timer_gettime,
    libc::SYS_userfaultfd,
    libc::SYS_wait4,
    libc::SYS_write,
];

/// Whether the kernel lets this process suspend and read the filters of a child. It takes
/// CAP_SYS_ADMIN, and not just in a user namespace of one's own.
fn may_suspend() -> bool {
    let Ok(parent) = Parent::this() else { return false };
    // SAFETY: the child makes system calls alone, whatever other threads hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let follows = parent.follow().is_ok();
        // SAFETY: between fork and _exit the child makes system calls alone, and no destructor
        // runs.
        unsafe {
            if !follows {
                libc::_exit(1);
            }
            loop {
                libc::pause();
            }
        }
    }
    if child < 0 {
        return false;
    }
    let may = Thread::stop(child).is_ok_and(|mut stopped| {
        // Some kernels let anybody have it from the start, and refuse it later alone.
        stopped.suspend_filters().is_ok() && sys::may_read_filters(child)
    });
    // SAFETY: it is this process's child and not yet waited for.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: the kernel stores a number. Somebody else may have collected it (ECHILD).
    while unsafe { libc::waitpid(child, &mut status, libc::__WALL) } != child
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    may
}

/// Whether a child that makes those calls, with arguments of which none does anything, lives.
fn calls_are_spared() -> bool {
    let Ok((mut lives, tells)) = io::pipe() else { return false };
    // SAFETY: the child makes system calls alone, whatever other threads hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        for number in INJECTED {
            // SAFETY: no address, descriptor, process or flag is -1: the kernel refuses the call,
            // or (set_tid_address) stores a number that this process alone is harmed by.
            unsafe { libc::syscall(number, -1, 0, 0, 0, 0, 0) };
        }
        // SAFETY: one byte is read, of a constant; no destructor runs.
        unsafe {
            libc::write(tells.as_raw_fd(), b"!".as_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    drop(tells);
    let spared = child > 0 && lives.read(&mut [0]).is_ok_and(|count| count == 1);
    if child > 0 {
        // SAFETY: it is this process's child; somebody else may have collected it.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) };
    }
    spared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_found() {
        let status = b"Name:\tSeccomp: 9\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(field(status, b"Seccomp:"), Some(&b"2"[..]));
        assert_eq!(field(b"Name:\ta\nSeccomp_filters:\t1\n", b"Seccomp:"), None);
    }

    #[test]
    fn a_thread_without_a_filter_has_none() {
        let pid = std::process::id() as pid_t;
        assert_eq!(filters_of(pid), Filters::None);
        refuse([pid]).unwrap();
    }

    #[test]
    fn only_filters_that_this_process_has_not_are_refused() {
        let own = |filters, spare| Own { filters, spare, suspends: false };
        let [none, one, two] = [Filters::None, Filters::Some(Some(1)), Filters::Some(Some(2))];
        let unknown = Filters::Some(None);
        let root = || Own { suspends: true, ..own(none, true) };
        for (own, theirs, refused) in [
            (root(), none, false),
            (root(), two, false),
            (root(), unknown, false),
            (root(), Filters::Strict, true),
            (root(), Filters::Some(Some(257)), true),
            (own(Filters::Strict, true), Filters::Strict, true),
            (own(none, true), none, false),
            (own(none, true), one, true),
            (own(none, true), unknown, true),
            (own(one, true), one, false),
            (own(one, true), two, true),
            (own(unknown, true), unknown, true),
            (own(one, false), one, true),
        ] {
            assert_eq!(own.objection(&theirs).is_some(), refused, "{own:?} {theirs:?}");
        }
    }

    #[test]
    fn the_calls_do_nothing() {
        assert!(calls_are_spared());
    }
}
