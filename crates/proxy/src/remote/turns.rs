//! A session's turns on devices where other tenants of the server have work, too, as its server
//! tells them by the tenant's account.
//!
//! Until the server says that there are others, nothing is asked and nobody waits: one flag is read
//! before each launch. Devices that can hold kernels up are told to. Others are given no launch
//! meanwhile, and few at a time while the session has its turn, so that it can end.

use crate::account::Account;
use kedge_control::account::Work;
use kedge_device::{Backend, Done};
use kedge_protocol::{Message, Post, StreamId, StreamOp};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

/// From one look at the account to the next, and while a launch waits for its turn.
const TICK: Duration = Duration::from_millis(5);
const SOON: Duration = Duration::from_millis(1);
/// Launches after which is looked whether those before them are over: no more than twice as many
/// are outstanding.
const TOGETHER: usize = 8;
/// How long those before are waited for: they may themselves wait for what comes behind.
const WAIT_TIMEOUT: Duration = Duration::from_millis(100);

pub(super) struct Turns {
    account: Arc<Account>,
    backend: OnceLock<Weak<dyn Backend>>,
    /// Others are there.
    on: AtomicBool,
    looks: OnceLock<Thread>,
    /// The devices hold nothing up, so that launches are.
    by_launches: AtomicBool,
    /// One waits for its turn.
    waits: AtomicBool,
    /// Something is dispatched.
    dispatching: Mutex<()>,
    pace: Mutex<Pace>,
    marks: Arc<Marks>,
}

/// Launches since it was last looked.
#[derive(Debug, Default)]
struct Pace {
    launches: usize,
    /// On these.
    streams: Vec<StreamId>,
    /// Those before were waited for in vain: marks that were there then.
    vain: Option<usize>,
}

/// Ends of launches that are waited for.
#[derive(Debug, Default)]
struct Marks {
    left: Mutex<usize>,
    fewer: Condvar,
    /// How many have ever come.
    over: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turns {
    pub(super) fn new(account: Arc<Account>) -> Arc<Turns> {
        Arc::new(Turns {
            account,
            backend: OnceLock::new(),
            on: AtomicBool::new(false),
            looks: OnceLock::new(),
            by_launches: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            dispatching: Mutex::default(),
            pace: Mutex::default(),
            marks: Arc::default(),
        })
    }

    /// Tells it whose turns they are; once.
    pub(super) fn set_backend(&self, backend: &Arc<dyn Backend>) {
        let _ = self.backend.set(Arc::downgrade(backend));
    }

    /// Heeds turns from here on, or not any more.
    ///
    /// # Errors
    /// There is no thread for it: the session has more than its turns.
    pub(super) fn heed(self: &Arc<Turns>, on: bool) -> io::Result<()> {
        self.on.store(on, Ordering::SeqCst);
        if let Some(looks) = self.looks.get() {
            looks.unpark();
        } else if on {
            let turns = self.clone();
            let thread = thread::Builder::new().name("turns".into()).stack_size(128 << 10);
            let started = thread.spawn(move || turns.look_again_and_again())?;
            let _ = self.looks.set(started.thread().clone());
        }
        Ok(())
    }

    fn look_again_and_again(&self) -> ! {
        loop {
            while self.on.load(Ordering::SeqCst) {
                self.look();
                thread::sleep(TICK);
            }
            if let Some(backend) = self.backend() {
                backend.hold(false);
            }
            self.account.set_work(Work::default());
            while !self.on.load(Ordering::SeqCst) {
                thread::park();
            }
        }
    }

    fn backend(&self) -> Option<Arc<dyn Backend>> {
        self.backend.get().and_then(Weak::upgrade)
    }

    /// Has the devices do as the account says, and tells it what they have to do.
    fn look(&self) {
        let Some(backend) = self.backend() else { return };
        // A backend may have to ask its driver whether it rests, and may be asked only while
        // nothing is dispatched.
        let busy = match self.dispatching.try_lock() {
            Err(TryLockError::WouldBlock) => !backend.is_idle(),
            Ok(_) | Err(TryLockError::Poisoned(_)) => !backend.at_rest(),
        };
        let work = match backend.hold(self.account.is_held()) {
            Some(runs) => Work { wants: busy, runs },
            None => {
                self.by_launches.store(true, Ordering::Relaxed);
                Work { wants: busy || self.waits.load(Ordering::Relaxed), runs: busy }
            }
        };
        self.account.set_work(work);
    }

    /// Something is dispatched for as long as what this returns is kept.
    #[inline]
    pub(super) fn dispatches(&self) -> MutexGuard<'_, ()> {
        locked(&self.dispatching)
    }

    /// Waits before a message that launches something until it is the session's turn.
    #[inline]
    pub(super) fn before(&self, message: &Message) {
        if self.on.load(Ordering::Relaxed)
            && let Message::Post { post: Post::Enqueue { stream, op } } = message
            && matches!(op, StreamOp::Launch { .. } | StreamOp::GraphLaunch { .. })
            && self.by_launches.load(Ordering::Relaxed)
        {
            self.wait(*stream);
        }
    }

    #[cold]
    fn wait(&self, stream: StreamId) {
        self.waits.store(true, Ordering::Relaxed);
        while self.on.load(Ordering::SeqCst) && self.account.is_held() {
            thread::sleep(SOON);
        }
        self.waits.store(false, Ordering::Relaxed);
        if self.account.is_paced()
            && let Some(backend) = self.backend()
        {
            let when_over = |stream, done| backend.when_stream_idle(stream, done);
            locked(&self.pace).launch(stream, when_over, &self.marks);
        }
    }
}

impl Pace {
    /// Counts a launch that is about to be handed over, and waits where too many are outstanding.
    /// `when_over` has somebody called once all that a stream has is over.
    fn launch(&mut self, stream: StreamId, when_over: impl Fn(StreamId, Done), marks: &Arc<Marks>) {
        if self.launches == TOGETHER {
            let newest = self.streams.len();
            *locked(&marks.left) += newest;
            for stream in std::mem::take(&mut self.streams) {
                let marks = marks.clone();
                when_over(stream, Box::new(move |_| marks.one_is_over()));
            }
            self.launches = 0;
            let over = || marks.over.load(Ordering::Relaxed);
            if self.vain != Some(over()) {
                let in_time = marks.wait_until_left(newest, WAIT_TIMEOUT);
                self.vain = (!in_time).then(over);
            }
        }
        self.launches += 1;
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }
}

impl Marks {
    fn one_is_over(&self) {
        self.over.fetch_add(1, Ordering::Relaxed);
        *locked(&self.left) -= 1;
        self.fewer.notify_all();
    }

    /// Waits until no more than so many are left; returns whether that was within the limit.
    fn wait_until_left(&self, count: usize, limit: Duration) -> bool {
        let left = locked(&self.left);
        let waited = self.fewer.wait_timeout_while(left, limit, |left| *left > count);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use kedge_control::account::{Turn, now};
    use kedge_protocol::GraphExecId;
    use kedge_remote::Terms;
    use std::sync::mpsc::channel;

    fn launch() -> Message {
        let op = StreamOp::GraphLaunch { exec: GraphExecId(1) };
        Message::Post { post: Post::Enqueue { stream: StreamId(1), op } }
    }

    fn until(so: impl Fn() -> bool) {
        while !so() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_launch_waits_for_its_turn_and_nothing_else_does() {
        let server = kedge_control::account::Account::new().unwrap();
        let terms = Terms { slot: 0, memory: None, bandwidth: None };
        let account = Arc::new(Account::map(&server.open().unwrap(), &terms).unwrap());
        let turns = Turns::new(account);
        let backend: Arc<dyn Backend> = Fake::idle();
        turns.set_backend(&backend);
        let later = || now() + 500_000_000;
        server.set_turn(0, Turn::Held, later());
        // Nobody has said that there are others.
        turns.before(&launch());
        turns.heed(true).unwrap();
        until(|| turns.by_launches.load(Ordering::Relaxed));
        let other = StreamOp::HostFn { token: 1 };
        turns.before(&Message::Post { post: Post::Enqueue { stream: StreamId(1), op: other } });
        let (sends, passed) = channel();
        let waits = turns.clone();
        let launches = thread::spawn(move || {
            waits.before(&launch());
            sends.send(()).unwrap();
        });
        until(|| {
            server.set_turn(0, Turn::Held, later());
            server.work(0) == Work { wants: true, runs: false }
        });
        assert!(passed.try_recv().is_err());
        server.set_turn(0, Turn::Paced, later());
        assert!(passed.recv_timeout(Duration::from_secs(20)).is_ok());
        launches.join().unwrap();
        turns.heed(false).unwrap();
        until(|| server.work(0) == Work::default());
        server.set_turn(0, Turn::Held, later());
        turns.before(&launch());
    }

    #[test]
    fn whether_devices_rest_is_asked_while_nothing_is_dispatched() {
        let server = kedge_control::account::Account::new().unwrap();
        let terms = Terms { slot: 0, memory: None, bandwidth: None };
        let account = Arc::new(Account::map(&server.open().unwrap(), &terms).unwrap());
        let turns = Turns::new(account);
        let fake = Fake::idle();
        let backend: Arc<dyn Backend> = fake.clone();
        turns.set_backend(&backend);
        let asked = || fake.asked_at_rest.load(Ordering::SeqCst);
        let dispatches = turns.dispatches();
        turns.look();
        assert_eq!(asked(), 0);
        drop(dispatches);
        turns.look();
        assert_eq!(asked(), 1);
    }

    /// Those before are waited for, but not for ever, and not again before any of them is over.
    #[test]
    fn few_launches_are_outstanding() {
        let marks = Arc::<Marks>::default();
        let mut pace = Pace::default();
        let ends = Mutex::new(Vec::<Done>::new());
        let when_over = |_, done| locked(&ends).push(done);
        let launch = |pace: &mut Pace, count, stream| {
            (0..count).for_each(|_| pace.launch(StreamId(stream), when_over, &marks));
        };
        launch(&mut pace, 2 * TOGETHER, 1);
        assert_eq!((*locked(&marks.left), pace.vain), (1, None));
        launch(&mut pace, 1, 1);
        assert_eq!((*locked(&marks.left), pace.vain), (2, Some(0)));
        launch(&mut pace, TOGETHER, 2);
        assert_eq!((*locked(&marks.left), pace.vain), (4, Some(0)), "of two streams");
        let one = locked(&ends).remove(0);
        one(Ok(()));
        launch(&mut pace, TOGETHER, 1);
        assert_eq!((*locked(&marks.left), pace.vain), (5, Some(1)));
        locked(&ends).drain(..).for_each(|done| done(Ok(())));
        launch(&mut pace, TOGETHER, 1);
        assert_eq!((*locked(&marks.left), pace.vain), (1, None));
    }
}
