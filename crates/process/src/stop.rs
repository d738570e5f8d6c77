//! Stopping a whole job: every thread of every process.

use crate::proc::{self, Field, Stat, Status};
use crate::thread::Interrupted;
use crate::{EngineError, Thread, filters, plugins, reap, sys};
use libc::pid_t;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Which processes a job has: these and all that descend from them.
#[derive(Debug, Clone)]
pub enum Roots {
    These(Vec<pid_t>),
    /// The children of a process, orphans that it has been given included, but not those.
    ChildrenOf {
        parent: pid_t,
        except: Vec<pid_t>,
    },
}

impl Roots {
    /// These, without some that are not the job's.
    #[must_use]
    pub fn without(&self, others: &[u32]) -> Roots {
        let others = others.iter().map(|pid| *pid as pid_t);
        match self.clone() {
            Roots::ChildrenOf { parent, mut except } => {
                except.extend(others);
                Roots::ChildrenOf { parent, except }
            }
            these @ Roots::These(_) => these,
        }
    }

    fn now(&self) -> Vec<pid_t> {
        match self {
            Roots::These(pids) => pids.clone(),
            Roots::ChildrenOf { parent, except } => {
                let mut children = proc::children_by_thread(*parent);
                children.iter_mut().for_each(|list| list.retain(|pid| !except.contains(pid)));
                // The program's first process is the oldest.
                by_age(children, started, largest_id)
            }
        }
    }
}

/// The signals that stop a process.
pub(crate) const STOPPING: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// A process all of whose threads are stopped.
#[derive(Debug)]
pub(crate) struct StoppedProcess {
    pub(crate) pid: pid_t,
    /// The signal that had stopped it before; 0 if none had.
    pub(crate) stop_signal: i32,
    /// The thread that answers for it: its first, or, where that has ended, another one.
    pub(crate) main: Thread,
    pub(crate) others: Vec<Thread>,
    /// The exit status of its first thread, if that has ended before the others.
    pub(crate) first_ended: Option<i32>,
}

/// A job that is stopped as a whole. It goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct StoppedJob {
    /// Parents before their children.
    pub(crate) processes: Vec<StoppedProcess>,
    /// Children that have ended and not been waited for.
    pub(crate) zombies: Vec<pid_t>,
}

impl Drop for StoppedJob {
    fn drop(&mut self) {
        // Children first: one that a signal had stopped has stopped again before its parent looks.
        while self.processes.pop().is_some() {}
        // Some may have been killed meanwhile. The others run.
        reap::settle(Instant::now() + reap::PATIENCE, reap::is_own_child);
    }
}

/// A captured job that stands still: no signal is involved, so none of its processes can tell.
///
/// It goes on when this is dropped, and when the thread that captured it ends.
#[derive(Debug)]
pub struct Standing(StoppedJob);

/// The processes of every [`Standing`]: this process traces them, yet they are no clones.
static STANDING: Mutex<BTreeSet<pid_t>> = Mutex::new(BTreeSet::new());

fn standing() -> MutexGuard<'static, BTreeSet<pid_t>> {
    STANDING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Standing {
    pub(crate) fn new(job: StoppedJob) -> Standing {
        standing().extend(job.processes.iter().map(|process| process.pid));
        Standing(job)
    }

    /// Kills every process of the job, whose TCP ports a restart can have at once.
    pub fn kill(self) {
        for process in &self.0.processes {
            plugins::release_ports(process.pid);
        }
        for process in &self.0.processes {
            // SAFETY: the process is traced and not yet waited for, so its id is its own.
            unsafe { libc::kill(process.pid, libc::SIGKILL) };
        }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let mut all = standing();
        for process in &self.0.processes {
            all.remove(&process.pid);
        }
    }
}

/// Stops every process of the job within `patience`, or none; calls can be made in all of their
/// threads.
pub(crate) fn stop(roots: &Roots, patience: Duration) -> Result<StoppedJob, EngineError> {
    // Whoever had stopped already goes on before a late one is waited for.
    let job = stop_all(roots, patience).inspect_err(|_| crate::thread::release_late())?;
    // Before anybody makes calls in them.
    filters::refuse(job.processes.iter().map(|process| process.pid))?;
    Ok(job)
}

fn stop_all(roots: &Roots, patience: Duration) -> Result<StoppedJob, EngineError> {
    let deadline = Instant::now() + patience;
    let mut job = StoppedJob { processes: Vec::new(), zombies: Vec::new() };
    let mut seen = BTreeSet::new();
    // A stopped process makes no others, so a pass that finds none is the last.
    loop {
        let mut new = found(roots, &seen);
        new.retain(|pid| !seen.contains(pid));
        if new.is_empty() {
            break;
        }
        seen.extend(&new);
        let mut failed = Ok(());
        for (pid, stopped) in stop_processes(new, deadline) {
            match stopped {
                Ok(process) => job.processes.push(process),
                Err(EngineError::Ended { .. }) => {
                    // Its parent, which may stand still by now, is still to collect it.
                    reap::settle(deadline, reap::is_own_child);
                    if is_to_be_collected(pid, deadline) {
                        job.zombies.push(pid);
                    }
                }
                // The others go on with the job.
                Err(other) => failed = failed.and(Err(other)),
            }
        }
        failed?;
    }
    if job.processes.is_empty() { Err(EngineError::NoProcess) } else { Ok(job) }
}

/// Whether a process that is ending is its parent's to collect, once it has ended. Some of its
/// threads may need a while.
fn is_to_be_collected(pid: pid_t, deadline: Instant) -> bool {
    while Stat::of(pid).is_ok() && Instant::now() < deadline {
        if proc::has_ended(pid) {
            return true;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    proc::has_ended(pid)
}

/// The processes that there are now, zombies included.
pub(crate) fn all(roots: &Roots) -> Vec<pid_t> {
    found(roots, &BTreeSet::new())
}

/// The processes that run now: zombies hold nothing.
pub(crate) fn alive(roots: &Roots) -> Vec<pid_t> {
    found(roots, &BTreeSet::new()).into_iter().filter(|pid| !proc::has_ended(*pid)).collect()
}

/// The processes that there are now, parents before their children. Those that this process traces
/// are clones that hold memory, but for the ones in `stopped` and those of a [`Standing`] job,
/// whose children are the job's.
fn found(roots: &Roots, stopped: &BTreeSet<pid_t>) -> Vec<pid_t> {
    let standing = standing().clone();
    let own = |pid: &pid_t| stopped.contains(pid) || standing.contains(pid) || !is_ours(*pid);
    let mut found = Vec::new();
    let mut known = BTreeSet::new();
    let mut next = roots.now();
    while !next.is_empty() {
        next.retain(|pid| known.insert(*pid) && own(pid));
        found.extend(&next);
        next = next.iter().flat_map(|pid| proc::children(*pid)).collect();
    }
    found
}

fn is_ours(pid: pid_t) -> bool {
    tracer(pid)
        .is_some_and(|tracer| std::fs::exists(format!("/proc/self/task/{tracer}")).unwrap_or(false))
}

fn tracer(pid: pid_t) -> Option<pid_t> {
    let tracer = Status::of(pid).ok()?.decimal("TracerPid") as pid_t;
    (tracer != 0).then_some(tracer)
}

fn started(pid: pid_t) -> i64 {
    Stat::of(pid).map_or(i64::MAX, |stat| stat.get(Field::StartTime))
}

/// Returns the children of a process, given by its threads: the oldest first. A thread's own are in
/// order. Between threads the kernel tells the time in ticks of 10 ms, and in one tick the ids grow
/// and may begin anew behind the `largest`.
fn by_age(
    children: Vec<Vec<pid_t>>,
    started: impl Fn(pid_t) -> i64,
    largest: impl Fn() -> pid_t,
) -> Vec<pid_t> {
    let in_order = children.iter().filter(|list| !list.is_empty()).count() < 2;
    let children = children.into_iter().flatten();
    let mut aged: Vec<(i64, pid_t)> = children.map(|pid| (started(pid), pid)).collect();
    if in_order {
        aged.sort_by_key(|(tick, _)| *tick);
    } else {
        aged.sort_unstable();
        for same in aged.chunk_by_mut(|a, b| a.0 == b.0).filter(|same| same.len() > 1) {
            let (smallest, half) = (same[0].1, largest() / 2);
            let begun_anew = same.partition_point(|(_, pid)| pid - smallest <= half);
            same.rotate_left(begun_anew);
        }
    }
    aged.into_iter().map(|(_, pid)| pid).collect()
}

fn largest_id() -> pid_t {
    let told = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok();
    told.and_then(|text| text.trim().parse().ok()).unwrap_or(pid_t::MAX)
}

/// Stops these processes side by side: each step is asked of all before the first is waited for.
fn stop_processes(
    pids: Vec<pid_t>,
    deadline: Instant,
) -> Vec<(pid_t, Result<StoppedProcess, EngineError>)> {
    let mut all: Vec<(Stopping, Result<(), EngineError>)> =
        pids.into_iter().map(|pid| (Stopping::new(pid), Ok(()))).collect();
    let mut each = |step: &mut dyn FnMut(&mut Stopping) -> Result<(), EngineError>| {
        for (one, result) in all.iter_mut().filter(|(_, result)| result.is_ok()) {
            *result = step(one);
        }
    };
    // The leader last: from when it is traced, signals that the program ignores (SIGCHLD) are
    // queued all the same, and would end other threads' calls.
    each(&mut Stopping::ask_others);
    each(&mut |one| one.others_arrive(deadline));
    each(&mut Stopping::ask_leader);
    each(&mut |one| one.leader_arrives(deadline));
    all.into_iter().map(|(one, result)| (one.pid, result.and_then(|()| one.stopped()))).collect()
}

/// A process some of whose threads are stopped.
struct Stopping {
    pid: pid_t,
    others: BTreeMap<pid_t, Thread>,
    asked: Vec<(pid_t, Interrupted)>,
    /// Threads that have ended.
    gone: BTreeSet<pid_t>,
    asked_leader: Option<Interrupted>,
    leader: Option<Thread>,
}

impl Stopping {
    fn new(pid: pid_t) -> Stopping {
        let (others, asked, gone) = Default::default();
        Stopping { pid, others, asked, gone, asked_leader: None, leader: None }
    }

    /// Asks the threads that it has now.
    fn ask_others(&mut self) -> Result<(), EngineError> {
        for tid in proc::own_threads(self.pid) {
            if tid == self.pid || self.others.contains_key(&tid) || self.gone.contains(&tid) {
                continue;
            }
            match ask(self.pid, tid) {
                Ok(one) => self.asked.push((tid, one)),
                Err(EngineError::Ended { .. }) => drop(self.gone.insert(tid)),
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Until those that were asked have stopped, and those that they had made meanwhile.
    fn others_arrive(&mut self, deadline: Instant) -> Result<(), EngineError> {
        while !self.asked.is_empty() {
            for (tid, one) in std::mem::take(&mut self.asked) {
                match arrive(self.pid, one, deadline) {
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
            Err(EngineError::Ended { .. }) if !self.others.is_empty() => {}
            Err(other) => return Err(other),
        }
        Ok(())
    }

    fn leader_arrives(&mut self, deadline: Instant) -> Result<(), EngineError> {
        let asked = self.asked_leader.take();
        match asked.map(|asked| arrive(self.pid, asked, deadline)).transpose() {
            Ok(leader) => self.leader = leader,
            Err(EngineError::Ended { .. }) if !self.others.is_empty() => {}
            Err(other) => return Err(other),
        }
        // What the leader had made meanwhile, under whatever id.
        self.gone.clear();
        self.ask_others()?;
        self.others_arrive(deadline)
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

fn ask(pid: pid_t, tid: pid_t) -> Result<Interrupted, EngineError> {
    Interrupted::ask(tid).map_err(|error| match error {
        // The kernel says so of one that is ending as of one that is traced.
        EngineError::System { source, .. } if source.raw_os_error() == Some(libc::EPERM) => {
            match tracer(tid) {
                Some(tracer) => EngineError::Traced { pid, tracer },
                // It may have been collected since.
                None if proc::is_zombie(tid) || Stat::of(tid).is_err() => {
                    EngineError::Ended { pid: tid }
                }
                None => EngineError::System { pid, what: "trace it", source },
            }
        }
        other => other,
    })
}

fn arrive(pid: pid_t, asked: Interrupted, deadline: Instant) -> Result<Thread, EngineError> {
    asked.stopped(deadline).map_err(|error| match error {
        EngineError::WouldNotStop { tid, state, .. } => {
            EngineError::WouldNotStop { pid, tid, state }
        }
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn the_oldest_comes_first_also_where_ids_begin_anew() {
        let tick = |pid: pid_t| match pid {
            500 => 6,
            _ => 7,
        };
        let order = |lists: &[&[pid_t]]| {
            by_age(lists.iter().map(|list| list.to_vec()).collect(), tick, || 32768)
        };
        // Orphans, given to the first thread; the program, made by another.
        assert_eq!(order(&[&[310, 320], &[300]]), [300, 310, 320]);
        assert_eq!(order(&[&[301, 305], &[32760]]), [32760, 301, 305]);
        assert_eq!(order(&[&[32767, 305], &[32760]]), [32760, 32767, 305]);
        assert_eq!(order(&[&[301], &[500]]), [500, 301]);
        // A restarted job has the ids that it had, and its first process first.
        assert_eq!(order(&[&[32760, 301, 305]]), [32760, 301, 305]);
        assert_eq!(order(&[&[400, 32000]]), [400, 32000]);
        assert_eq!(order(&[&[], &[32760, 301], &[]]), [32760, 301]);
        assert!(order(&[]).is_empty() && largest_id() >= 301);
    }

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Sleeper {
            // In a process group that is orphaned none but SIGSTOP stops anybody: this one is not.
            Sleeper(Command::new("sleep").arg("60").process_group(0).spawn().unwrap())
        }

        fn pid(&self) -> pid_t {
            self.0.id() as pid_t
        }

        fn send(&self, signal: i32) {
            // SAFETY: the child is this test's own and not collected.
            unsafe { libc::kill(self.pid(), signal) };
        }

        /// Stops it, and tells by which signal it had been stopped, and which signals wait.
        fn stopped_by(&self) -> (i32, Vec<i32>) {
            let job = stop(&Roots::These(vec![self.pid()]), Duration::from_secs(10)).unwrap();
            let number = |info: sys::SigInfo| i32::from_ne_bytes(*info.first_chunk().unwrap());
            let pending = sys::pending(self.pid(), true).unwrap().into_iter().map(number);
            (job.processes[0].stop_signal, pending.collect())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn wait_for(pid: pid_t, state: char) {
        let begin = Instant::now();
        while Stat::of(pid).unwrap().state != state {
            assert!(begin.elapsed() < Duration::from_secs(20), "it does not get to {state}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_signal_that_had_stopped_a_process_is_known() {
        let sleeper = Sleeper::new();
        assert_eq!(sleeper.stopped_by().0, 0);
        for signal in STOPPING {
            sleeper.send(signal);
            wait_for(sleeper.pid(), 'T');
            assert_eq!(sleeper.stopped_by().0, signal);
            // It stands still as before.
            wait_for(sleeper.pid(), 'T');
            sleeper.send(libc::SIGCONT);
            wait_for(sleeper.pid(), 'S');
        }
    }

    #[test]
    fn what_was_sent_before_the_stop_is_seen_or_waits() {
        let sleeper = Sleeper::new();
        for _ in 0..200 {
            sleeper.send(libc::SIGSTOP);
            let (by, pending) = sleeper.stopped_by();
            assert!(by == libc::SIGSTOP || pending.contains(&libc::SIGSTOP), "{by}, {pending:?}");
            wait_for(sleeper.pid(), 'T');
            sleeper.send(libc::SIGCONT);
            assert_eq!(sleeper.stopped_by().0, 0);
        }
    }

    #[test]
    fn a_process_that_is_stopped_and_continued_meanwhile_is_one_or_the_other() {
        let (sleeper, done) = (Sleeper::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    sleeper.send(libc::SIGSTOP);
                    sleeper.send(libc::SIGCONT);
                }
            });
            let seen: BTreeSet<i32> = (0..2000).map(|_| sleeper.stopped_by().0).collect();
            done.store(true, Ordering::Relaxed);
            assert!(seen.iter().all(|by| [0, libc::SIGSTOP].contains(by)), "{seen:?}");
        });
    }
}
