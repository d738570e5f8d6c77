//! Collecting children that have ended, in a process another of whose threads traces some of them.
//!
//! waitpid() for any child will not do: a child that is traced by a thread of its own parent is
//! shown to the whole parent, `__WNOTHREAD` or not, and its stops would be taken from the tracer
//! (wait_consider_task() in the kernel: "just pretend the caller is ptrace_do_wait()"). So only
//! children that are known to have ended are waited for, by id.

use crate::proc::{self, Stat, Status, is_zombie};
use crate::stop::is_left_alone;
use libc::pid_t;
use std::cell::RefCell;
use std::thread;
use std::time::{Duration, Instant};

/// What is left after a look at this process's children.
#[derive(Debug)]
pub struct Reaped {
    /// Those that had ended: ids and statuses as wait() tells them.
    pub ended: Vec<(pid_t, i32)>,
    /// Whether there are others.
    pub more: bool,
}

/// Collects the children of this process that have ended. One that a thread of it traces still is
/// left for later, so that its id stays its own; but not one of `wanted`.
pub fn reap(wanted: &[pid_t]) -> Reaped {
    let own = std::process::id() as pid_t;
    let mut reaped = Reaped { ended: Vec::new(), more: false };
    let children = proc::children(own);
    // /proc tells of none where this process has no descriptor left to look with.
    for pid in wanted.iter().filter(|pid| !children.contains(pid) && has_exited(**pid)) {
        reaped.ended.extend(wait_for(*pid));
    }
    for pid in children {
        let ready = is_zombie(pid) && (wanted.contains(&pid) || !is_traced(pid));
        // One whose first thread has ended before the others shows as ended, and cannot be
        // collected yet.
        match ready.then(|| collect(pid)).flatten() {
            Some(one) => reaped.ended.push(one),
            None if is_left_alone(pid) => {}
            None => reaped.more = true,
        }
    }
    reaped
}

/// Whether a child has ended and not been collected: asked without a look into /proc. Stops of one
/// that is traced are left to its tracer.
fn has_exited(pid: pid_t) -> bool {
    // SAFETY: zero is a value of this structure, which is plain data; the kernel fills it.
    unsafe {
        let mut found: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut found, flags) == 0
            && found.si_pid() == pid
    }
}

pub(crate) fn is_traced(pid: pid_t) -> bool {
    Status::of(pid).is_ok_and(|status| status.decimal("TracerPid") != 0)
}

/// Whether a tracer has stopped it: by exec() it has the id of one that has ended.
fn is_stopped(tid: pid_t) -> bool {
    Stat::of(tid).is_ok_and(|stat| stat.state == 't')
}

/// A process that has ended: its id and status. One of its threads may have ended while it was
/// traced here still, as those of a restarted program that ends at once: it goes first, or nothing
/// does.
fn collect(pid: pid_t) -> Option<(pid_t, i32)> {
    wait_for(pid).or_else(|| {
        let threads = proc::threads(pid).into_iter().filter(|tid| *tid != pid);
        let ended = threads.filter(|tid| !is_traced(pid) && is_traced(*tid) && is_zombie(*tid));
        ended.for_each(|tid| {
            wait_for(tid);
        });
        wait_for(pid)
    })
}

/// How long a thread that is ending may take for it.
pub(crate) const END_TIMEOUT: Duration = Duration::from_secs(60);

thread_local! {
    /// Threads that this one traced, and that were ending when it let go of them.
    static ENDING: RefCell<Vec<pid_t>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread traces `tid`, which ends: [`settle`] sees to it.
pub(crate) fn is_ending(tid: pid_t) {
    ENDING.with_borrow_mut(|ending| ending.push(tid));
}

/// Passes the ends of what [`is_ending`] was told of on, by `deadline`. Until then their parents
/// wait for them in vain, and who looks for the job's processes takes them for clones. What becomes
/// of `others` is [`reap`]'s to tell.
pub(crate) fn settle(deadline: Instant, others: impl Fn(pid_t) -> bool) {
    let process = |tid: pid_t| Status::of(tid).map_or(0, |status| status.decimal("Tgid") as pid_t);
    let ending = ENDING.take().into_iter().filter(|tid| is_traced(*tid) && !others(*tid));
    // A first thread can be collected only when it is the last.
    let (firsts, rest): (Vec<pid_t>, Vec<pid_t>) = ending.partition(|tid| process(*tid) == *tid);
    for tid in rest.into_iter().chain(firsts) {
        while !(is_zombie(tid) && wait_for(tid).is_some())
            && is_traced(tid)
            && !is_stopped(tid)
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A process that this one has made or been given, by its first thread.
pub(crate) fn is_own_child(tid: pid_t) -> bool {
    let own = i64::from(std::process::id());
    Status::of(tid).is_ok_and(|status| {
        status.decimal("PPid") == own && status.decimal("Tgid") == i64::from(tid)
    })
}

pub(crate) fn wait_for(pid: pid_t) -> Option<(pid_t, i32)> {
    let mut status = 0;
    // SAFETY: waitpid stores the status.
    let found = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG | libc::__WALL) };
    (found == pid).then_some((pid, status))
}
