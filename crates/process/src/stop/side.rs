//! Stopping processes side by side, whatever they are about to do.

use super::{Patience, STOPPING, StoppedProcess, standing, tracer};
use crate::proc::{self, Field, Stat};
use crate::thread::Interrupted;
use crate::{EngineError, Thread, reap, several, sys};
use libc::pid_t;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How often a thread is asked whose id has come to another one by exec().
const TRIES: usize = 100;

/// Stops these processes: each step is asked of all before the first is waited for. None is the
/// child of another: one that waits for its child of vfork() stops only when that has gone on.
pub(super) fn stop_processes(
    pids: Vec<pid_t>,
    patience: &mut Patience<'_>,
    listed: &Listed,
) -> Vec<(pid_t, Result<StoppedProcess, EngineError>)> {
    let watch = Watch::default();
    thread::scope(|scope| {
        // Its end, whatever happens here.
        let _ended = Ended(&watch);
        // Without it all goes well but for programs that exec() meanwhile.
        let _ = thread::Builder::new().spawn_scoped(scope, || watch.keep());
        stop_watched(pids, patience, listed, &watch)
    })
}

fn stop_watched(
    pids: Vec<pid_t>,
    patience: &mut Patience<'_>,
    listed: &Listed,
    watch: &Watch,
) -> Vec<(pid_t, Result<StoppedProcess, EngineError>)> {
    let last = patience.servants;
    let mut all: Vec<(Stopping<'_>, Result<(), EngineError>)> =
        pids.into_iter().map(|pid| (Stopping::new(pid, last, listed, watch), Ok(()))).collect();
    let mut each = |step: &mut dyn FnMut(&mut Stopping<'_>) -> Result<(), EngineError>| {
        for (one, result) in all.iter_mut().filter(|(_, result)| result.is_ok()) {
            watch.turn_to(one);
            *result = step(one);
        }
    };
    // The leader last: from when it is traced, signals that the program ignores (SIGCHLD) are
    // queued all the same, and would end other threads' calls.
    each(&mut |one| one.ask_others());
    each(&mut |one| one.others_arrive(patience));
    each(&mut |one| one.ask_leader());
    each(&mut |one| one.leader_arrives(patience));
    // Nobody waits for a page any more.
    each(&mut |one| one.servants_arrive(patience));
    all.into_iter().map(|(one, result)| (one.pid, result.and_then(|()| one.stopped()))).collect()
}

/// Threads that were known to be the programs' own just before the first of them was asked to stop,
/// so that nobody stands still while the names of thousands are read. None of their ids is another
/// thread's soon: the kernel gives all other ids first.
pub(super) struct Listed(BTreeSet<pid_t>);

impl Listed {
    /// Those of the processes `pids`.
    pub(super) fn of(pids: &[pid_t]) -> Listed {
        let threads = several::each(pids, |pid| proc::threads(*pid));
        let threads = pids.iter().zip(threads);
        let others = |(pid, tids): (&pid_t, Vec<pid_t>)| {
            let pid = *pid;
            tids.into_iter().filter(move |tid| *tid != pid).map(move |tid| (pid, tid))
        };
        let all: Vec<(pid_t, pid_t)> = threads.flat_map(others).collect();
        let is_own = several::each(&all, |(pid, tid)| !proc::works_for_the_kernel(*pid, *tid));
        let own = all.iter().zip(is_own).filter(|(_, is_own)| *is_own);
        Listed(own.map(|((_, tid), _)| *tid).collect())
    }

    fn works_for_the_kernel(&self, pid: pid_t, tid: pid_t) -> bool {
        !self.0.contains(&tid) && proc::works_for_the_kernel(pid, tid)
    }
}

/// A process some of whose threads are stopped.
struct Stopping<'a> {
    pid: pid_t,
    others: BTreeMap<pid_t, Thread>,
    asked: Vec<(pid_t, Interrupted)>,
    /// Threads that have ended.
    gone: BTreeSet<pid_t>,
    asked_leader: Option<Interrupted>,
    leader: Option<Thread>,
    /// Threads of this name are not asked yet.
    last: Option<&'static str>,
    listed: &'a Listed,
    watch: &'a Watch,
}

impl Stopping<'_> {
    fn new<'a>(
        pid: pid_t,
        last: Option<&'static str>,
        listed: &'a Listed,
        watch: &'a Watch,
    ) -> Stopping<'a> {
        let (others, asked, gone) = Default::default();
        let (asked_leader, leader) = (None, None);
        Stopping { pid, others, asked, gone, asked_leader, leader, last, listed, watch }
    }

    /// Whether the process has no threads but its first and those that are stopped or asked. The
    /// kernel counts them, which takes less than to list thousands; those that have ended are
    /// counted until somebody has collected them.
    fn has_no_more(&self) -> bool {
        let known = self.others.len() + self.asked.len();
        proc::count_threads(self.pid) == Some(known + 1) && !self.watch.has_collected()
    }

    /// Asks the threads that it has now. Those that an exec() has ended are no more.
    fn ask_others(&mut self) -> Result<(), EngineError> {
        if self.has_no_more() {
            return Ok(());
        }
        let now = proc::threads(self.pid);
        self.others.retain(|tid, _| now.binary_search(tid).is_ok());
        for tid in now {
            let known = tid == self.pid || self.others.contains_key(&tid);
            // Which of them are the kernel's is asked of new ones only: each look costs.
            let later = || self.last.is_some_and(|last| proc::name(tid) == last);
            if known
                || self.gone.contains(&tid)
                || self.listed.works_for_the_kernel(self.pid, tid)
                || later()
            {
                continue;
            }
            match self.watch.asking(tid, || ask(self.pid, tid)) {
                Ok(one) => self.asked.push((tid, one)),
                Err(EngineError::Ended { .. }) => drop(self.gone.insert(tid)),
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Until those that were asked have stopped, and those that they had made meanwhile.
    fn others_arrive(&mut self, patience: &mut Patience<'_>) -> Result<(), EngineError> {
        while !self.asked.is_empty() {
            for (tid, one) in std::mem::take(&mut self.asked) {
                self.watch.step();
                match arrive(self.pid, one, patience) {
                    Ok(thread) => drop(self.others.insert(tid, thread)),
                    Err(EngineError::Ended { .. }) => drop(self.gone.insert(tid)),
                    Err(other) => return Err(other),
                }
            }
            self.ask_others()?;
        }
        Ok(())
    }

    fn ask_leader(&mut self) -> Result<(), EngineError> {
        match ask(self.pid, self.pid) {
            Ok(asked) => self.asked_leader = Some(asked),
            Err(EngineError::Ended { .. }) if self.has_others() => {}
            Err(other) => return Err(other),
        }
        Ok(())
    }

    fn leader_arrives(&mut self, patience: &mut Patience<'_>) -> Result<(), EngineError> {
        let asked = self.asked_leader.take();
        match asked.map(|asked| arrive(self.pid, asked, patience)).transpose() {
            Ok(leader) => self.leader = leader,
            Err(EngineError::Ended { .. }) if self.has_others() => {}
            Err(other) => return Err(other),
        }
        // What the leader had made meanwhile, under whatever id.
        self.gone.clear();
        self.ask_others()?;
        self.others_arrive(patience)
    }

    /// Those that served the others' faults.
    fn servants_arrive(&mut self, patience: &mut Patience<'_>) -> Result<(), EngineError> {
        if self.last.take().is_none() {
            return Ok(());
        }
        self.ask_others()?;
        self.others_arrive(patience)
    }

    /// Whether the process may have threads besides its first one.
    fn has_others(&self) -> bool {
        !self.others.is_empty() || self.last.is_some()
    }

    /// All threads are stopped.
    fn stopped(self) -> Result<StoppedProcess, EngineError> {
        let Stopping { pid, mut others, leader, .. } = self;
        let first_ended = match leader {
            Some(_) => None,
            None => Some(Stat::of(pid)?.get(Field::ExitCode) as i32),
        };
        let main = leader.or_else(|| others.pop_first().map(|(_, thread)| thread));
        let main = main.ok_or(EngineError::Ended { pid })?;
        // Of the moment at which this thread stopped. What comes later is pending.
        let stop_signal =
            Some(sys::reported(main.pid())?).filter(|signal| STOPPING.contains(signal));
        let stop_signal = stop_signal.unwrap_or(0);
        let others = others.into_values().collect();
        Ok(StoppedProcess { pid, stop_signal, main, others, first_ended })
    }
}

/// Asks a thread to stop. This takes as long as an exec() in its process.
fn ask(pid: pid_t, tid: pid_t) -> Result<Interrupted, EngineError> {
    let mut tries = TRIES;
    loop {
        let source = match Interrupted::ask(tid) {
            // The kernel says so of one that is ending as of one that is traced.
            Err(EngineError::System { source, .. }) if is_forbidden(&source) => source,
            other => return other,
        };
        match tracer(tid) {
            // A thread that was asked before has got the first one's id by exec().
            Some(tracer) if tid == pid && tracer == this_thread() && !is_standing(pid) => {
                return Interrupted::again(pid);
            }
            Some(tracer) => return Err(EngineError::Traced { pid, tracer }),
            // It may have been collected since.
            None if proc::is_zombie(tid) || Stat::of(tid).is_err() => {
                return Err(EngineError::Ended { pid: tid });
            }
            None if tries == 0 => {
                return Err(EngineError::Untraceable { pid, source });
            }
            // One that nobody has asked has got the id.
            None => tries -= 1,
        }
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

fn is_standing(pid: pid_t) -> bool {
    standing().contains(&pid)
}

fn this_thread() -> pid_t {
    rustix::thread::gettid().as_raw_nonzero().get()
}

fn arrive(
    pid: pid_t,
    asked: Interrupted,
    patience: &mut Patience<'_>,
) -> Result<Thread, EngineError> {
    let tid = asked.pid();
    asked.stopped_with(patience).map_err(|error| match error {
        EngineError::Ended { .. } => {
            // If it had stopped before, its end is still to be passed on.
            reap::is_ending(tid);
            error
        }
        EngineError::WouldNotStop { tid, state, .. } => {
            EngineError::WouldNotStop { pid, tid, state }
        }
        other => other,
    })
}

/// Sees to it that no exec() waits for whoever stops its process.
///
/// exec() in one thread ends the others, and waits until they are collected, which of traced ones
/// is their tracer's to do; meanwhile nobody can begin to trace any thread of the process, and the
/// call for that waits (cred_guard_mutex in the kernel).
#[derive(Default)]
struct Watch {
    watched: Mutex<Watched>,
    ended: Condvar,
}

#[derive(Default)]
struct Watched {
    /// Counts what has been done.
    steps: u64,
    /// The threads but for the first that are traced of the process whose turn it is.
    traced: Vec<pid_t>,
    /// Whether one of those that were traced has been collected.
    has_collected: bool,
    has_ended: bool,
}

/// Ends a watch when it is dropped.
struct Ended<'a>(&'a Watch);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.now().has_ended = true;
        self.0.ended.notify_one();
    }
}

impl Watch {
    fn now(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) {
        self.now().steps += 1;
    }

    /// Whether a thread that was traced has been collected, so that it is counted no more.
    fn has_collected(&self) -> bool {
        self.now().has_collected
    }

    fn turn_to(&self, one: &Stopping<'_>) {
        let mut now = self.now();
        now.steps += 1;
        now.traced.clear();
        let asked = one.asked.iter().map(|(tid, _)| tid);
        // What has ended when it had just stopped nobody has collected.
        now.traced.extend(one.others.keys().chain(asked).chain(&one.gone));
    }

    /// Does what has this thread trace `tid`.
    fn asking<T>(
        &self,
        tid: pid_t,
        ask: impl FnOnce() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.step();
        let asked = ask();
        if asked.is_ok() {
            self.now().traced.push(tid);
        }
        asked
    }

    /// Collects what has ended, whenever nothing has been done for a moment.
    fn keep(&self) {
        const MOMENT: Duration = Duration::from_millis(5);
        let (mut now, mut before) = (self.now(), 0);
        while !now.has_ended {
            if now.steps == before {
                let ended = now.traced.iter().filter(|tid| proc::is_zombie(**tid));
                let collected = ended.filter(|tid| reap::wait_for(**tid).is_some()).count();
                now.has_collected |= collected > 0;
            }
            before = now.steps;
            let waited = self.ended.wait_timeout(now, MOMENT);
            now = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
