//! Work that may take long, on threads of its own: by turns of users, so that none holds up others.

use crate::tier::lock;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Threads at most, and those of one user.
const THREADS: usize = 64;
const OF_ONE: usize = 16;
/// A thread that has had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

/// Something to do.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// What waits, by user, in the order of their turns.
    users: VecDeque<(u32, VecDeque<Job>)>,
    queued: usize,
    running: HashMap<u32, usize>,
    threads: usize,
    idle: usize,
}

impl State {
    /// Takes the next job of a user who has not enough at work.
    fn next(&mut self) -> Option<(u32, Job)> {
        let running = &self.running;
        let free = |user: &u32| running.get(user).is_none_or(|running| *running < OF_ONE);
        let turn = self.users.iter().position(|(user, _)| free(user))?;
        let (user, mut jobs) = self.users.remove(turn)?;
        let job = jobs.pop_front()?;
        self.queued -= 1;
        if !jobs.is_empty() {
            self.users.push_back((user, jobs));
        }
        *self.running.entry(user).or_default() += 1;
        Some((user, job))
    }

    fn ended(&mut self, user: u32) {
        if let Some(running) = self.running.get_mut(&user) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(&user);
            }
        }
    }
}

/// Threads, and what waits for them.
#[derive(Default)]
pub(crate) struct Pool {
    state: Mutex<State>,
    ready: Condvar,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &lock(&self.state).threads).finish()
    }
}

impl Pool {
    /// Has `job` of `user` done, soon or when it is their turn.
    pub(crate) fn run(self: &Arc<Pool>, user: u32, job: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        match state.users.iter_mut().find(|(other, _)| *other == user) {
            Some((_, jobs)) => jobs.push_back(Box::new(job)),
            None => state.users.push_back((user, VecDeque::from([Box::new(job) as Job]))),
        }
        state.queued += 1;
        // An idle thread takes one job, and that may be long.
        if state.queued <= state.idle || state.threads == THREADS {
            drop(state);
            self.ready.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let pool = self.clone();
        if thread::Builder::new().spawn(move || pool.work(true)).is_err() {
            // The system has no more threads: the one that asks does it, or another of these.
            let mut state = lock(&self.state);
            state.threads -= 1;
            let none = state.threads == 0;
            drop(state);
            if none {
                self.work(false);
            }
        }
    }

    /// Returns how many jobs wait or are at work.
    pub(crate) fn len(&self) -> usize {
        let state = lock(&self.state);
        state.queued + state.running.values().sum::<usize>()
    }

    /// Does jobs: as long as there are some soon, or (not `stays`) those that are there.
    fn work(&self, stays: bool) {
        let mut state = lock(&self.state);
        loop {
            if let Some((user, job)) = state.next() {
                drop(state);
                // A panic ends the job alone: the thread and its turn are for others, and the state
                // that it may have left half changed is behind locks that allow for that.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = lock(&self.state);
                state.ended(user);
                continue;
            }
            if !stays {
                return;
            }
            state.idle += 1;
            let (woken, wait) =
                self.ready.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if wait.timed_out() && state.users.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn no_job_waits_behind_a_long_one_where_threads_are_free() {
        for _ in 0..20 {
            let pool = Arc::new(Pool::default());
            pool.run(1, || {});
            while lock(&pool.state).idle == 0 {
                thread::yield_now();
            }
            // The idle thread takes the first, and has not woken when the second comes.
            let (sender, done) = mpsc::channel();
            let (release, blocked) = mpsc::channel::<()>();
            pool.run(1, move || {
                let _ = blocked.recv();
            });
            pool.run(2, move || sender.send(()).expect("a test"));
            done.recv_timeout(Duration::from_secs(20)).expect("it is done meanwhile");
            drop(release);
        }
    }

    #[test]
    fn one_user_who_blocks_holds_up_nobody_else() {
        let pool = Arc::new(Pool::default());
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let (sender, done) = mpsc::channel();
        for _ in 0..500 {
            let (blocked, sender) = (blocked.clone(), sender.clone());
            pool.run(1, move || {
                let _ = lock(&blocked).recv();
                sender.send(1).expect("a test");
            });
        }
        let (other, theirs) = mpsc::channel();
        for _ in 0..100 {
            let other = other.clone();
            pool.run(2, move || other.send(()).expect("a test"));
        }
        for _ in 0..100 {
            theirs.recv_timeout(Duration::from_secs(60)).expect("user 2 is served");
        }
        assert!(done.try_recv().is_err(), "user 1 is blocked");
        assert!(lock(&pool.state).threads <= THREADS);
        drop(release);
        for _ in 0..500 {
            done.recv_timeout(Duration::from_secs(60)).expect("user 1 is served, too");
        }
    }

    #[test]
    fn a_job_that_panics_leaves_its_turn_to_others() {
        let pool = Arc::new(Pool::default());
        for _ in 0..2 * THREADS {
            pool.run(1, || panic!("a test"));
        }
        let (sender, done) = mpsc::channel();
        pool.run(1, move || sender.send(()).expect("a test"));
        done.recv_timeout(Duration::from_secs(20)).expect("it has its turn");
        while pool.len() > 0 {
            thread::yield_now();
        }
    }
}
