//! A clone of a stopped process that holds its memory and never runs.

use crate::home::Ways;
use crate::sys::{self, Stop};
use crate::{EngineError, Thread, oom, proc};
use libc::pid_t;
use std::io;

/// The frozen clone. It ends when this is dropped, and with the process that traces it.
#[derive(Debug)]
pub struct FrozenClone(pid_t);

impl FrozenClone {
    /// Clones the process whose leader `leader` is, all of whose threads are stopped. Its wait()
    /// never sees the clone, unless it is a subreaper, and the clone holds none of its descriptors.
    pub fn of(leader: &mut Thread) -> Result<FrozenClone, EngineError> {
        let ways = Ways::of(leader.pid())?;
        let made = FrozenClone::on(&ways, leader, false);
        let closed = ways.close(std::iter::once(leader));
        let made = made?;
        closed.map(|()| made)
    }

    /// The same on these ways, which are nobody else's meanwhile. A process that is a `subreaper`
    /// is none until the clone is an orphan of others.
    pub(crate) fn on(
        ways: &Ways,
        leader: &mut Thread,
        subreaper: bool,
    ) -> Result<FrozenClone, EngineError> {
        if let Some(clone) = in_a_row(leader, ways, subreaper)? {
            return Ok(clone);
        }
        ways.lead(leader)?;
        if subreaper {
            leader.resign(ways.home())?;
        }
        let made = between(leader, ways);
        leader.go_home()?;
        made
    }

    /// Reads the memory at `address` as it was at the clone's making.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<usize, EngineError> {
        sys::read(self.0, address, into)
    }

    pub fn pid(&self) -> pid_t {
        self.0
    }

    /// Returns why its memory cannot be read, which is that of the program `pid`: `error`, unless
    /// somebody has killed it.
    pub(crate) fn why(&self, pid: pid_t, error: EngineError) -> EngineError {
        // Its end may take a while, in which its memory cannot be read.
        let ends = matches!(&error, EngineError::Ended { pid } if *pid == self.0);
        if ends || proc::has_ended(self.0) { EngineError::CopyKilled { pid } } else { error }
    }

    /// Its only thread, to make calls that answer for the process that it was cloned from.
    pub(crate) fn thread(&self) -> Result<Thread, EngineError> {
        Thread::frozen(self.0)
    }
}

impl Drop for FrozenClone {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: the clone is traced by this process and not yet waited for, so the id is its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, &mut status, libc::__WALL);
        }
    }
}

/// The same with few stops: all that has to be called is called in a row. `None` if that cannot be,
/// or failed: the longer way tells why.
fn in_a_row(
    leader: &mut Thread,
    ways: &Ways,
    subreaper: bool,
) -> Result<Option<FrozenClone>, EngineError> {
    let Some(row) = ways.lead_splitting(leader, subreaper)? else { return Ok(None) };
    leader.trace_clones()?;
    let mut clone = Ok(None);
    // Whatever becomes of the one between, the leader is to come to where it collects it.
    leader.run(row, |between| {
        clone = match Thread::adopt(between) {
            Ok(between) => of_between(between.never_alone()),
            Err(error) => {
                end_traced(between);
                Err(error)
            }
        };
        Ok(())
    })?;
    clone
}

/// Kills a process that this thread traces, and sees its end, which its parent can collect then.
fn end_traced(pid: pid_t) {
    // SAFETY: it is traced by this thread and not waited for, so the id is its own.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    while sys::wait(pid).is_ok() {}
}

/// Takes the clone of a process that makes it and then ends; `None` if it made none.
fn of_between(between: Thread) -> Result<Option<FrozenClone>, EngineError> {
    let pid = between.pid();
    let made = between.trace_clones().and_then(|()| next_made(pid)).and_then(held);
    let ended = match made {
        Ok(clone) => (next_made(pid).map(drop), Some(clone)),
        Err(error) => (Err(error), None),
    };
    match ended {
        (Err(EngineError::Ended { .. }), clone) => Ok(clone),
        (other, _) => {
            end_traced(pid);
            other.map(|()| None)
        }
    }
}

/// Has it run until it makes somebody, who is stopped; an error if it ends first.
fn next_made(pid: pid_t) -> Result<pid_t, EngineError> {
    loop {
        sys::request(libc::PTRACE_CONT, pid, 0, "let it call")?;
        if sys::wait(pid)? == Stop::Event(libc::PTRACE_EVENT_CLONE) {
            return sys::event_message(pid);
        }
    }
}

/// Holds a clone that has been made and has not run.
fn held(clone: pid_t) -> Result<FrozenClone, EngineError> {
    let clone = FrozenClone(clone);
    sys::wait(clone.0)?;
    oom::goes_first(clone.0);
    sys::request(libc::PTRACE_SETOPTIONS, clone.0, libc::PTRACE_O_EXITKILL as usize, "hold it")?;
    Ok(clone)
}

/// By a process in between, which makes the clone: so the page tables are copied once, and the clone
/// is an orphan.
fn between(leader: &mut Thread, ways: &Ways) -> Result<FrozenClone, EngineError> {
    beside(leader, ways, |between| clone(between, ways.out()))
}

/// Has `work` done in a process that shares the memory of `leader`'s for a moment, has inherited what
/// a clone inherits, but no descriptors, and that nobody in the program sees. It ends by itself if
/// nobody traces it any more.
pub(crate) fn beside<T>(
    leader: &mut Thread,
    ways: &Ways,
    work: impl FnOnce(&mut Thread) -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    let shares = leader.call(ways.split(), libc::SYS_clone, &[libc::CLONE_VM as u64])?;
    let beside = made(leader, shares, "clone it")?;
    let done = match Thread::adopt(beside) {
        Ok(beside) => {
            let mut beside = beside.never_alone();
            let done = detach(&mut beside, ways.out()).and_then(|()| work(&mut beside));
            beside.end(ways.out(), 0);
            done
        }
        Err(error) => {
            end_traced(beside);
            Err(error)
        }
    };
    // Its remains are the leader's to collect; nobody else there can see them.
    leader.call(ways.home(), libc::SYS_wait4, &[shares as u64, 0, libc::__WALL as u64, 0])?;
    done
}

fn detach(beside: &mut Thread, entry: u64) -> Result<(), EngineError> {
    beside.call(entry, libc::SYS_close_range, &[0, u64::from(u32::MAX), 0])?;
    // Out of reach of signals to the program's process group.
    beside.call(entry, libc::SYS_setpgid, &[0, 0]).map(drop)
}

fn clone(between: &mut Thread, entry: u64) -> Result<FrozenClone, EngineError> {
    let result = between.call(entry, libc::SYS_clone, &[0])?;
    held(made(between, result, "clone its memory")?)
}

fn made(parent: &mut Thread, result: i64, what: &'static str) -> Result<pid_t, EngineError> {
    parent.made().ok_or_else(|| EngineError::System {
        pid: parent.pid(),
        what,
        source: io::Error::from_raw_os_error(-result as i32),
    })
}
