//! Keeps so many proxies of one kind ready.

use super::kind::Kind;
use crate::base::ends::FAREWELL;
use crate::base::sockets::hand_over;
use crate::services::starting::{fix_places, show_only};
use kedge_control::proxy::{Answer, Control, ControlError};
use kedge_control::warm::PoolStatus;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A driver may take its time for the first start of a machine.
const READY: Duration = Duration::from_secs(120);
/// After one was given away: its job's start comes first.
const REST: Duration = Duration::from_secs(1);
/// After one has failed; twice as long after each further one, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after one has failed.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Those of one kind.
pub(super) struct Pool {
    pub(super) kind: Kind,
    count: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// For what should not be kept silent.
    say: Say,
}

/// Takes a line for whoever looks after this.
pub(super) type Say = Arc<dyn Fn(&str) + Send + Sync>;

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<Waiting>,
    starting: usize,
    /// Processes that have not been collected.
    alive: usize,
    /// None is wanted any more.
    over: bool,
    given: u64,
    /// One after the other.
    failures: u32,
    failure: Option<String>,
    /// None is started before.
    not_before: Option<Instant>,
}

impl State {
    /// Whether fewer are kept than wanted.
    fn lacks_one(&self, count: usize) -> bool {
        !self.over && self.ready.len() + self.starting < count
    }

    /// How long none may be started yet.
    fn pause(&self) -> Option<Duration> {
        let left = self.not_before?.checked_duration_since(Instant::now());
        left.filter(|left| !left.is_zero())
    }

    /// Whether one is started next, at once.
    fn is_due(&self, count: usize) -> bool {
        self.lacks_one(count) && self.pause().is_none()
    }
}

/// One that is ready, as a job gets it.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) pid: u32,
    pub(super) control: Control,
    pub(super) process: OwnedFd,
}

impl Pool {
    /// Starts to keep `count` ready, on threads of its own.
    pub(super) fn keep(kind: Kind, count: usize, say: Say) -> io::Result<Arc<Pool>> {
        let pool = Pool { kind, count, state: Mutex::default(), changed: Condvar::new(), say };
        let pool = Arc::new(pool);
        let filling = pool.clone();
        thread::Builder::new().name("fill".into()).spawn(move || filling.fill())?;
        Ok(pool)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that is ready, for the caller alone; one that is being made so is waited for, up to
    /// `limit`.
    pub(super) fn take(&self, limit: Duration) -> Option<Waiting> {
        let begin = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(waiting) = state.ready.pop_front() {
                state.given += 1;
                state.not_before = Some(Instant::now() + REST);
                self.changed.notify_all();
                return Some(waiting);
            }
            let coming = state.starting > 0 || state.is_due(self.count);
            let left = limit.checked_sub(begin.elapsed()).filter(|_| coming)?;
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets go of all, and waits a moment for those that end: no zombie is left to an init that may
    /// not care.
    pub(super) fn end(&self) {
        let begin = Instant::now();
        let mut state = self.lock();
        state.over = true;
        state.ready.clear();
        while let Some(left) = FAREWELL.checked_sub(begin.elapsed()).filter(|_| state.alive > 0) {
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn status(&self) -> PoolStatus {
        let state = self.lock();
        PoolStatus {
            gpu: self.kind.gpu.clone(),
            ready: state.ready.iter().map(|waiting| waiting.pid).collect(),
            starting: state.starting,
            count: self.count,
            given: state.given,
            failure: state.failure.clone(),
        }
    }

    fn fill(self: &Arc<Pool>) {
        let mut state = self.lock();
        loop {
            if state.is_due(self.count) {
                state.starting += 1;
                drop(state);
                self.start();
                state = self.lock();
                continue;
            }
            let wait = state.pause().filter(|_| state.lacks_one(self.count));
            let wait = wait.unwrap_or(MAX_PAUSE);
            state =
                self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has a thread start one and look after it.
    fn start(self: &Arc<Pool>) {
        let pool = self.clone();
        let looking = thread::Builder::new().name("look".into());
        if let Err(error) = looking.spawn(move || pool.look_after_one()) {
            self.failed(&format!("cannot start a thread: {error}"), 1);
        }
    }

    fn look_after_one(&self) {
        let (mut child, waiting) = match start(&self.kind) {
            Ok(started) => started,
            Err(error) => return self.failed(&format!("kedge-proxy: {error}"), 1),
        };
        let pid = waiting.pid;
        self.lock().alive += 1;
        match waiting.control.answer(READY) {
            Ok(Answer::Yes {}) => {
                let mut state = self.lock();
                state.starting -= 1;
                state.ready.push_back(waiting);
                self.changed.notify_all();
            }
            other => {
                // It may be stuck in its driver: it is not asked twice.
                let _ = child.kill();
                self.failed(&why_not(other), 1);
            }
        }
        let ended = child.wait();
        let mut state = self.lock();
        state.alive -= 1;
        self.changed.notify_all();
        let before = state.ready.len();
        state.ready.retain(|waiting| waiting.pid != pid);
        if state.ready.len() < before {
            drop(state);
            let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            self.failed(&format!("the warm proxy {pid} ended: {how}"), 0);
        }
    }

    /// One that was `starting`, or was ready, is none.
    fn failed(&self, why: &str, starting: usize) {
        (self.say)(why);
        let mut state = self.lock();
        state.starting -= starting;
        let pause = FIRST_PAUSE.saturating_mul(1 << state.failures.min(6)).min(MAX_PAUSE);
        // One that has been ready for a while and was killed is replaced at once.
        let pause = if starting == 0 { REST } else { pause };
        state.failures = if starting == 0 { 0 } else { state.failures.saturating_add(1) };
        state.failure = Some(why.to_owned());
        state.not_before = Some(Instant::now() + pause);
        self.changed.notify_all();
    }
}

impl Waiting {
    /// Whether it has not ended.
    pub(super) fn lives(&self) -> bool {
        let mut fd =
            libc::pollfd { fd: self.process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, alive for the call.
        unsafe { libc::poll(&raw mut fd, 1, 0) == 0 }
    }
}

fn why_not(answer: Result<Answer, ControlError>) -> String {
    match answer {
        Ok(_) => "the new proxy answers nonsense".to_owned(),
        Err(ControlError::Failed(why)) => why,
        Err(error) => format!("a proxy does not become ready: {error}"),
    }
}

/// Starts one; it says when it is ready.
fn start(kind: &Kind) -> io::Result<(Child, Waiting)> {
    let (control, orders) = Control::pair()?;
    let mut command = Command::new(&kind.executable);
    command
        .args(["--warm", "--fd", "3"])
        .args(kind.arguments())
        .stdin(Stdio::null())
        .process_group(0);
    show_only(&mut command, kind.shown().as_deref());
    let (fixed_places, fds) = (kind.has_fixed_places(), [orders.as_raw_fd()]);
    // SAFETY: the closure runs in the child between fork and exec and only makes system calls;
    // `orders` outlives the spawn.
    unsafe {
        command.pre_exec(move || {
            if fixed_places {
                fix_places();
            }
            hand_over(fds)
        });
    }
    let child = command.spawn()?;
    let process = rustix::process::Pid::from_child(&child);
    let process = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty())?;
    let pid = child.id();
    Ok((child, Waiting { pid, control, process }))
}
