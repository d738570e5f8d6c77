//! Stopping a whole job: every thread of every process.

mod patience;
mod side;

use crate::proc::{self, Field, Stat, Status};
use crate::{EngineError, Thread, filters, plugins, reap, several};
use libc::pid_t;
pub use patience::Patience;
use side::{Listed, stop_processes};
use std::collections::BTreeSet;
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
                let none_of_them = |pid: &pid_t| !except.contains(pid) && !is_left_alone(*pid);
                children.iter_mut().for_each(|list| list.retain(none_of_them));
                // The program's first process is the oldest.
                by_age(children, started, largest_id)
            }
        }
    }
}

/// Processes that this one may be given, and that belong to none of its jobs.
static LEFT_ALONE: Mutex<BTreeSet<pid_t>> = Mutex::new(BTreeSet::new());

/// Has a process be no child of this one's, as far as jobs go: neither found among the children of
/// a job's supervisor nor waited for. It ends by itself.
pub fn leave_alone(pid: pid_t) {
    LEFT_ALONE.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
}

pub(crate) fn is_left_alone(pid: pid_t) -> bool {
    LEFT_ALONE.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
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
    /// When the first thread was asked to stop.
    pub(crate) since: Instant,
}

impl Drop for StoppedJob {
    fn drop(&mut self) {
        // Children first: one that a signal had stopped has stopped again before its parent looks.
        while self.processes.pop().is_some() {}
        // Some may have been killed meanwhile. The others run.
        reap::settle(Instant::now() + reap::END_TIMEOUT, reap::is_own_child);
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

    /// Has none of its processes run for a moment where the thread that captured it is killed, and
    /// they are with it: let go, they would run until then.
    pub fn ends_with_this_thread(&self) {
        for process in &self.0.processes {
            for thread in std::iter::once(&process.main).chain(&process.others) {
                // One that has been killed meanwhile runs no more.
                let _ = thread.ends_with_its_tracer();
            }
        }
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
pub(crate) fn stop(roots: &Roots, mut patience: Patience<'_>) -> Result<StoppedJob, EngineError> {
    patience.begin();
    // Whoever had stopped already goes on before a late one is waited for, which may need it.
    let job = stop_all(roots, &mut patience).inspect_err(|_| {
        patience.goes_on();
        crate::thread::release_late();
    })?;
    // Before anybody makes calls in them.
    filters::refuse_stopped(&job.processes)?;
    Ok(job)
}

fn stop_all(roots: &Roots, patience: &mut Patience<'_>) -> Result<StoppedJob, EngineError> {
    let (mut seen, mut again) = (BTreeSet::new(), BTreeSet::new());
    let mut generations = found(roots, &seen);
    let listed = Listed::of(&generations.concat());
    let (processes, zombies, since) = (Vec::new(), Vec::new(), Instant::now());
    let mut job = StoppedJob { processes, zombies, since };
    // A stopped process makes no others, so a pass that finds none is the last.
    loop {
        let mut is_new = |pid: &pid_t| !seen.contains(pid) || again.remove(pid);
        generations.iter_mut().for_each(|pids| pids.retain(&mut is_new));
        generations.retain(|pids| !pids.is_empty());
        if generations.is_empty() {
            break;
        }
        // Children when their parents stand still: who waits for a child of vfork() does not stop
        // before that has become another program.
        for pids in generations {
            seen.extend(&pids);
            again.extend(stop_some(pids, patience, &listed, &mut job)?);
            if !again.is_empty() {
                break;
            }
        }
        generations = found(roots, &seen);
    }
    if job.processes.is_empty() { Err(EngineError::NoProcess) } else { Ok(job) }
}

/// Adds these processes to the job; those that are to be stopped once more are returned.
fn stop_some(
    pids: Vec<pid_t>,
    patience: &mut Patience<'_>,
    listed: &Listed,
    job: &mut StoppedJob,
) -> Result<Vec<pid_t>, EngineError> {
    let (mut failed, mut again) = (Ok(()), Vec::new());
    for (pid, stopped) in stop_processes(pids, patience, listed) {
        match stopped {
            Ok(process) => job.processes.push(process),
            Err(EngineError::Ended { .. }) => {
                // Its parent, which may stand still by now, is still to collect it.
                reap::settle(patience.until, reap::is_own_child);
                let ended = loop {
                    match end_of(pid, patience.until) {
                        Err(EngineError::WouldNotStop { .. }) if patience.goes_on() => {}
                        other => break other,
                    }
                };
                match ended {
                    Ok(End::Zombie) => job.zombies.push(pid),
                    Ok(End::Gone) => {}
                    Ok(End::Lives) => again.push(pid),
                    Err(error) => failed = failed.and(Err(error)),
                }
            }
            // The others go on with the job.
            Err(other) => failed = failed.and(Err(other)),
        }
    }
    failed.map(|()| again)
}

/// What has become of a process some thread of which has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is its parent's to collect.
    Zombie,
    /// It has been collected.
    Gone,
    /// It goes on: it was another thread, or it has become another program.
    Lives,
}

/// Waits until a process that is ending has ended. Some of its threads may need a while; an error
/// if they need longer: in an image it would be neither a process nor a zombie, and its parent
/// would wait for it for ever.
fn end_of(pid: pid_t, deadline: Instant) -> Result<End, EngineError> {
    while let Ok(Stat { state, .. }) = Stat::of(pid) {
        if proc::has_ended(pid) {
            return Ok(End::Zombie);
        }
        if Instant::now() >= deadline {
            return Err(EngineError::WouldNotStop { pid, tid: pid, state });
        }
        if proc::threads(pid).into_iter().any(proc::goes_on) {
            return Ok(End::Lives);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(End::Gone)
}

/// The processes that there are now, zombies included.
pub(crate) fn all(roots: &Roots) -> Vec<pid_t> {
    found(roots, &BTreeSet::new()).concat()
}

/// The processes that run now: zombies hold nothing.
pub(crate) fn alive(roots: &Roots) -> Vec<pid_t> {
    all(roots).into_iter().filter(|pid| !proc::has_ended(*pid)).collect()
}

/// The processes that there are now: the first ones, their children, and so on. Those that this
/// process traces are clones that hold memory, but for the ones in `stopped` and those of a
/// [`Standing`] job, whose children are the job's.
fn found(roots: &Roots, stopped: &BTreeSet<pid_t>) -> Vec<Vec<pid_t>> {
    let standing = standing().clone();
    let own = |pid: &pid_t| stopped.contains(pid) || standing.contains(pid) || !is_ours(*pid);
    let mut found = Vec::new();
    let mut known = BTreeSet::new();
    let mut next = roots.now();
    while !next.is_empty() {
        next.retain(|pid| known.insert(*pid));
        let are_own = several::each(&next, own);
        let mut are_own = are_own.into_iter();
        next.retain(|_| are_own.next() == Some(true));
        let children = several::each(&next, |pid| proc::children(*pid)).concat();
        found.push(std::mem::replace(&mut next, children));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;
    use std::io::{Read, Write};
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

    fn patience(seconds: u64) -> Patience<'static> {
        Patience::new(Duration::from_secs(seconds))
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
            let job = stop(&Roots::These(vec![self.pid()]), patience(10)).unwrap();
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

    /// A child that lives no longer than this.
    struct Forked(pid_t);

    impl Drop for Forked {
        fn drop(&mut self) {
            // SAFETY: it is this test's child and not collected.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }

    /// A child that does this work, and has done what comes before it is `ready`.
    fn forked(work: impl FnOnce(&mut dyn FnMut())) -> Forked {
        let (mut ready, mut tells) = std::io::pipe().unwrap();
        // SAFETY: the child makes system calls alone, whatever other threads hold.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work(&mut || drop(tells.write(&[0])));
            // SAFETY: no destructor runs.
            unsafe { libc::_exit(0) }
        }
        assert!(pid > 0);
        let child = Forked(pid);
        assert_eq!(ready.read(&mut [0]).unwrap(), 1);
        child
    }

    /// One whose end takes a while: it maps the same 64 MiB many times.
    fn large() -> Forked {
        const BYTES: usize = 64 << 20;
        forked(|ready| {
            let (access, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: the mappings are new ones and nobody's.
            unsafe {
                let file = libc::memfd_create(c"large".as_ptr(), 0);
                libc::ftruncate(file, BYTES as i64);
                for _ in 0..64 {
                    libc::mmap(std::ptr::null_mut(), BYTES, access, flags, file, 0);
                }
            }
            ready();
            loop {
                // SAFETY: a plain call.
                unsafe { libc::pause() };
            }
        })
    }

    /// One that waits for a child of its own as after vfork() until it is told to go on.
    fn waiting(go_on: &mut std::io::PipeReader) -> Forked {
        const LIKE_VFORK: i32 = libc::CLONE_VFORK | libc::SIGCHLD;
        forked(|ready| {
            ready();
            // SAFETY: without CLONE_VM this is a fork whose parent waits; no pointer is passed.
            let child = unsafe { libc::syscall(libc::SYS_clone, LIKE_VFORK, 0, 0, 0, 0) };
            if child == 0 {
                let _ = go_on.read(&mut [0]);
                return;
            }
            loop {
                // SAFETY: a plain call.
                unsafe { libc::pause() };
            }
        })
    }

    #[test]
    fn one_that_is_just_ending_is_a_zombie_in_the_end() {
        let (mut told, mut tell) = std::io::pipe().unwrap();
        let (its_end, waits) = (large(), waiting(&mut told));
        let (large, late) = (its_end.0, waits.0);
        wait_for(late, 'D');
        let job = std::thread::scope(|scope| {
            // It stands still while the other one is waited for.
            scope.spawn(|| {
                wait_for(large, 't');
                // SAFETY: the child is this test's own and not collected.
                unsafe { libc::kill(large, libc::SIGKILL) };
                tell.write_all(&[0]).unwrap();
            });
            stop(&Roots::These(vec![large, late]), patience(20)).unwrap()
        });
        let processes: Vec<pid_t> = job.processes.iter().map(|process| process.pid).collect();
        assert_eq!((processes.first(), job.zombies.first()), (Some(&late), Some(&large)));
        drop(job);
    }

    #[test]
    fn one_that_takes_too_long_to_end_is_named() {
        for _ in 0..20 {
            let child = large();
            let large = child.0;
            // SAFETY: the child is this test's own and not collected.
            unsafe { libc::kill(large, libc::SIGKILL) };
            while proc::goes_on(large) {
                std::thread::yield_now();
            }
            let told = end_of(large, Instant::now());
            let patient = end_of(large, Instant::now() + Duration::from_secs(20));
            assert!(matches!(patient, Ok(End::Zombie)), "{patient:?}");
            match told {
                Err(EngineError::WouldNotStop { pid, .. }) => return assert_eq!(pid, large),
                // It was fast.
                other => assert!(matches!(other, Ok(End::Zombie)), "{other:?}"),
            }
        }
        panic!("each has ended at once");
    }

    #[test]
    fn a_process_that_is_left_alone_is_none_of_the_job_s() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, parent) = (child.id() as pid_t, std::process::id() as pid_t);
        let children = Roots::ChildrenOf { parent, except: Vec::new() };
        let before = children.now().contains(&pid);
        leave_alone(pid);
        let after = children.now().contains(&pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(before && !after);
    }
}
