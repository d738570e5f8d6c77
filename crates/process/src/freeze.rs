//! A clone of a stopped process that holds its memory and never runs.

use crate::home::{Row, Ways};
use crate::sys::{self, Stop};
use crate::thread::Reached;
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
        let mut one = [Cloning::new(leader, ways, subreaper)];
        side_by_side(&mut one);
        let [one] = one;
        one.result()
    }

    /// With a stop for each call, where calls in a row cannot be made, or failed: this tells why.
    fn call_by_call(
        ways: &Ways,
        leader: &mut Thread,
        subreaper: bool,
    ) -> Result<FrozenClone, EngineError> {
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
        match ends || proc::has_ended(self.0) {
            true => EngineError::CopyKilled { pid, most: proc::resident(pid).div_ceil(1 << 20) },
            false => error,
        }
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

/// A process that is to be cloned, all of whose threads are stopped, and how far that has come.
#[derive(Debug)]
pub(crate) struct Cloning<'a> {
    leader: &'a mut Thread,
    ways: &'a Ways,
    subreaper: bool,
    /// The calls that the leader makes in a row, from when it has set out until it is home.
    row: Option<Row>,
    /// The leader stands still where it has made the one between.
    has_split: bool,
    /// Who makes the clone, until it has ended.
    between: Option<Thread>,
    /// `None` if there is none as yet.
    made: Result<Option<FrozenClone>, EngineError>,
}

impl<'a> Cloning<'a> {
    /// As for [`FrozenClone::on`].
    pub(crate) fn new(leader: &'a mut Thread, ways: &'a Ways, subreaper: bool) -> Cloning<'a> {
        let (row, has_split, between) = (None, false, None);
        Cloning { leader, ways, subreaper, row, has_split, between, made: Ok(None) }
    }

    /// Does the next step, if none has failed.
    fn step(&mut self, step: impl FnOnce(&mut Self) -> Result<(), EngineError>) {
        if self.made.is_ok()
            && let Err(error) = step(self)
        {
            self.made = Err(error);
        }
    }

    /// All that is to be called is called in a row, where that can be.
    fn set_out(&mut self) -> Result<(), EngineError> {
        let row = self.ways.lead_splitting(self.leader, self.subreaper)?;
        if let Some(row) = row {
            self.leader.trace_clones()?;
            self.leader.set_out(row)?;
            self.row = Some(row);
        }
        Ok(())
    }

    /// The leader stands still when it has made the one between, which sets out to make the clone.
    fn split(&mut self) -> Result<(), EngineError> {
        let Some(row) = self.row.take() else { return Ok(()) };
        let Reached::Made(between) = self.leader.reached(row)? else {
            // There is none: the longer way tells why.
            return self.leader.arrive_home();
        };
        (self.row, self.has_split) = (Some(row), true);
        let adopted = Thread::adopt(between).inspect_err(|_| end_traced(between))?;
        let between = self.between.insert(adopted.never_alone());
        between.trace_clones()?;
        between.go_on()
    }

    /// The clone is held, and the one between is about to end.
    fn hold(&mut self) -> Result<(), EngineError> {
        let Some(between) = &self.between else { return Ok(()) };
        let clone = match made_by(between.pid()) {
            Ok(clone) => held(clone)?,
            // It has ended without a clone.
            Err(EngineError::Ended { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.made = Ok(Some(clone));
        between.go_on()
    }

    /// Whatever becomes of the one between, the leader is to come to where it collects it.
    fn end_between(&mut self) {
        if let Some(between) = self.between.take() {
            let ended = match &self.made {
                Ok(_) => made_by(between.pid()).map(drop),
                Err(_) => Ok(()),
            };
            if !matches!(ended, Err(EngineError::Ended { .. })) {
                end_traced(between.pid());
                self.step(|_| ended);
            }
        }
        if std::mem::take(&mut self.has_split)
            && let Err(error) = self.leader.go_on()
        {
            self.step(|_| Err(error));
        }
    }

    fn come_home(&mut self) {
        let Some(row) = self.row.take() else { return };
        let home = loop {
            match self.leader.reached(row) {
                // Nobody else is made there.
                Ok(Reached::Made(other)) => end_traced(other),
                Ok(Reached::End(_)) => break self.leader.arrive_home(),
                Err(error) => break Err(error),
            }
            if let Err(error) = self.leader.go_on() {
                break Err(error);
            }
        };
        if let Err(error) = home {
            self.made = Err(error);
        }
    }

    /// The clone; where there is none as yet, it is made call by call.
    pub(crate) fn result(self) -> Result<FrozenClone, EngineError> {
        match self.made? {
            Some(clone) => Ok(clone),
            None => FrozenClone::call_by_call(self.ways, self.leader, self.subreaper),
        }
    }
}

/// Clones these processes with few stops. Each step is begun for all before it is waited for, so
/// that they copy their page tables side by side; nobody is away when this returns.
pub(crate) fn side_by_side(these: &mut [Cloning<'_>]) {
    these.iter_mut().for_each(|one| one.step(Cloning::set_out));
    these.iter_mut().for_each(|one| one.step(Cloning::split));
    these.iter_mut().for_each(|one| one.step(Cloning::hold));
    these.iter_mut().for_each(Cloning::end_between);
    these.iter_mut().for_each(Cloning::come_home);
}

/// Kills a process that this thread traces, and sees its end, which its parent can collect then.
fn end_traced(pid: pid_t) {
    // SAFETY: it is traced by this thread and not waited for, so the id is its own.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    while sys::wait(pid).is_ok() {}
}

/// Waits until one that runs makes somebody, who is stopped; an error if it ends first.
fn made_by(pid: pid_t) -> Result<pid_t, EngineError> {
    loop {
        if sys::wait(pid)? == Stop::Event(libc::PTRACE_EVENT_CLONE) {
            return sys::event_message(pid);
        }
        sys::request(libc::PTRACE_CONT, pid, 0, "let it call")?;
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

/// By a process in between, which makes the clone: so the page tables are copied once, and the
/// clone is an orphan.
fn between(leader: &mut Thread, ways: &Ways) -> Result<FrozenClone, EngineError> {
    beside(leader, ways, |between| clone(between, ways.out()))
}

/// Has `work` done in a process that shares the memory of `leader`'s for a moment, has inherited
/// what a clone inherits, but no descriptors, and that nobody in the program sees. It ends by
/// itself if nobody traces it any more.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::{self, Stat};
    use crate::stop::{self, Roots};
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    const CHILDREN: usize = 20;
    const KILLED: usize = 7;

    fn state(child: &Child) -> char {
        Stat::of(child.id() as pid_t).map_or('-', |stat| stat.state)
    }

    /// On which calls in a row can be made: it neither catches nor blocks any signal.
    fn ways_of(pid: pid_t) -> Ways {
        Ways::of(pid).unwrap().with_quiet(Some(libc::SIGURG))
    }

    #[test]
    fn many_are_cloned_side_by_side_whatever_becomes_of_one() {
        let sleeper = || Command::new("sleep").arg("60").spawn().unwrap();
        let mut children: Vec<Child> = (0..CHILDREN).map(|_| sleeper()).collect();
        let pids = children.iter().map(|child| child.id() as pid_t).collect();
        let mut job =
            stop::stop(&Roots::These(pids), stop::Patience::new(Duration::from_secs(10))).unwrap();
        let ways: Vec<Ways> = job.processes.iter().map(|p| ways_of(p.pid)).collect();
        let together = job.processes.iter_mut().zip(&ways);
        let mut cloning: Vec<Cloning<'_>> =
            together.map(|(process, ways)| Cloning::new(&mut process.main, ways, false)).collect();
        children[KILLED].kill().unwrap();
        side_by_side(&mut cloning);
        let made: Vec<_> = cloning.into_iter().map(Cloning::result).collect();
        for (index, made) in made.iter().enumerate() {
            let child = &children[index];
            let others = proc::children(child.id() as pid_t);
            match made {
                Ok(clone) => {
                    assert_eq!((Stat::of(clone.pid()).unwrap().state, others), ('t', vec![]))
                }
                Err(error) => assert_eq!(index, KILLED, "{error}"),
            }
        }
        assert!(made[KILLED].is_err());
        for (process, ways) in job.processes.iter_mut().zip(&ways) {
            // One that has ended has nothing to close.
            let _ = ways.close(std::iter::once(&mut process.main));
        }
        drop(job);
        for (index, child) in children.iter_mut().enumerate() {
            let begin = Instant::now();
            while index != KILLED && state(child) != 'S' {
                assert!(begin.elapsed() < Duration::from_secs(20), "{index}: {}", state(child));
                std::thread::sleep(Duration::from_millis(1));
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
