//! Signals: the program's are its own; the supervisor only passes on what was sent to it.

use crate::base::sending::{Sending, Stage};
use std::cell::RefCell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// Whether SIGXFSZ was blocked before [`block_file_limit`].
static FILE_LIMIT_WAS_BLOCKED: OnceLock<bool> = OnceLock::new();

/// What the supervisor passes on. Stop and continue signals are left alone: the terminal sends
/// them to the whole foreground group, and a stopped program should have a stopped supervisor.
const FORWARDED: [libc::c_int; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGIO,
];

/// Blocked signals, taken one by one with [`Signals::next`].
pub(crate) struct Signals {
    taken: libc::sigset_t,
    /// The mask that this process was started with, for the program.
    original: libc::sigset_t,
    /// Those that were for the program, the last of each.
    came: RefCell<Vec<Came>>,
}

/// A signal that was for the program.
struct Came {
    signal: libc::c_int,
    to_group: bool,
    /// `None`: it has not been passed on.
    at: Option<SystemTime>,
}

/// A signal that arrived.
pub(crate) enum Signal {
    /// Some child has changed its state.
    Child,
    /// To be passed on to the program.
    Forward(libc::c_int),
    /// To be passed on to all of the program's process group: a terminal has sent it elsewhere.
    Group(libc::c_int),
}

impl Signals {
    pub(crate) fn block() -> Signals {
        Signals::block_all(&[])
    }

    /// The same, with one more.
    pub(crate) fn block_with(one: libc::c_int) -> Signals {
        Signals::block_all(&[one])
    }

    fn block_all(more: &[libc::c_int]) -> Signals {
        let mut taken = MaybeUninit::uninit();
        let mut original = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises `taken`, sigaddset gets valid signal numbers, and
        // pthread_sigmask fills `original`.
        unsafe {
            libc::sigemptyset(taken.as_mut_ptr());
            libc::sigaddset(taken.as_mut_ptr(), libc::SIGCHLD);
            // A limit on files must end a checkpoint (EFBIG), not its supervisor.
            libc::sigaddset(taken.as_mut_ptr(), libc::SIGXFSZ);
            for signal in FORWARDED.iter().chain(more) {
                libc::sigaddset(taken.as_mut_ptr(), *signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, taken.as_ptr(), original.as_mut_ptr());
            if FILE_LIMIT_WAS_BLOCKED.get() == Some(&false) {
                libc::sigdelset(original.as_mut_ptr(), libc::SIGXFSZ);
            }
            let (taken, original) = (taken.assume_init(), original.assume_init());
            Signals { taken, original, came: RefCell::default() }
        }
    }

    /// Waits for the next signal.
    pub(crate) fn next(&self) -> Signal {
        loop {
            let (signal, from) = self.one();
            match signal {
                // Its own, to the group: see to_group().
                Signal::Forward(_) if from.is_own() => {}
                // What the terminal sends (code above 0, from the kernel) has reached the program
                // too: it is in the same group.
                Signal::Forward(signal) if from.code > 0 => {
                    self.note(signal, true, Some(SystemTime::now()));
                }
                Signal::Forward(number) => {
                    self.note(number, false, Some(SystemTime::now()));
                    return signal;
                }
                Signal::Group(number) => {
                    self.note(number, true, Some(SystemTime::now()));
                    return signal;
                }
                Signal::Child => return signal,
            }
        }
    }

    /// Is told that a signal that has come is not passed on as yet.
    pub(crate) fn withhold(&self, signal: libc::c_int) {
        self.note(signal, false, None);
    }

    fn note(&self, signal: libc::c_int, to_group: bool, at: Option<SystemTime>) {
        let mut all = self.came.borrow_mut();
        let same = |came: &&mut Came| (came.signal, came.to_group) == (signal, to_group);
        match all.iter_mut().find(same) {
            // Both are one signal where it is sent again.
            Some(came) => came.at = came.at.and(at),
            None => all.push(Came { signal, to_group, at }),
        }
    }

    /// Has those that have come since then, or were not passed on, come to this process again: what
    /// follows it by exec has them wait.
    pub(crate) fn send_again(&self, since: SystemTime) {
        let own = std::process::id();
        let due = |came: &Came| came.at.is_none_or(|at| at >= since);
        for came in self.came.borrow_mut().drain(..).filter(due) {
            let value = if came.to_group { TO_GROUP } else { 0 };
            let _ = queue(own, came.signal, value);
        }
    }

    /// The same where the program is not of this terminal: what that sends is for a group.
    pub(crate) fn next_of_all(&self) -> Signal {
        match self.one() {
            (Signal::Forward(signal), from) if from.code > 0 => Signal::Group(signal),
            (signal, _) => signal,
        }
    }

    /// The next signal, and who has sent it.
    fn one(&self) -> (Signal, From) {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: the set is initialised; sigwaitinfo fills `info`, which is plain data anyway.
            let (signal, info) = unsafe {
                let signal = libc::sigwaitinfo(&self.taken, info.as_mut_ptr());
                (signal, info.assume_init())
            };
            if signal < 0 {
                continue;
            }
            let from = From::of(&info);
            let signal = match signal {
                libc::SIGCHLD => Signal::Child,
                _ if from.is_for_group(&info) => Signal::Group(signal),
                _ => Signal::Forward(signal),
            };
            return (signal, from);
        }
    }

    /// Returns when a child has changed its state; other signals are nothing here.
    pub(crate) fn child(&self) {
        while !matches!(self.next(), Signal::Child) {}
    }

    /// Returns when a child has changed its state, or after `limit`.
    pub(crate) fn child_within(&self, limit: Duration) {
        let limit = libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos() as libc::c_long,
        };
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set; no siginfo is asked for.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
            libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &limit);
        }
    }

    /// The mask for the program, to be set between fork and exec, with one more signal blocked.
    pub(crate) fn original_with(&self, one: Option<libc::c_int>) -> libc::sigset_t {
        let mut mask = self.original;
        if let Some(one) = one {
            // SAFETY: the set is initialised; a number that is no signal's changes nothing.
            unsafe { libc::sigaddset(&mut mask, one) };
        }
        mask
    }
}

/// Who has sent a signal: `si_code`, and the process if it was one.
struct From {
    code: libc::c_int,
    pid: Option<libc::pid_t>,
}

impl From {
    fn of(info: &libc::siginfo_t) -> From {
        let code = info.si_code;
        // SAFETY: of these codes the kernel fills the sender's id.
        let pid = || unsafe { info.si_pid() };
        From { code, pid: [libc::SI_USER, libc::SI_QUEUE].contains(&code).then(pid) }
    }

    fn is_own(&self) -> bool {
        self.code == libc::SI_USER && self.pid == Some(std::process::id() as libc::pid_t)
    }

    /// By [`signal_group_of`], or [`Signals::send_again`].
    fn is_for_group(&self, info: &libc::siginfo_t) -> bool {
        // SAFETY: it cannot fail, and has no memory to do with.
        let parent = unsafe { libc::getppid() };
        // SAFETY: of this code the kernel fills the value, of which any bits are one.
        let value = || unsafe { info.si_value() }.sival_ptr as usize;
        let is_known = |pid: libc::pid_t| pid == parent || pid == std::process::id() as libc::pid_t;
        self.code == libc::SI_QUEUE && self.pid.is_some_and(is_known) && value() == TO_GROUP
    }
}

/// What says that a signal which a process of kedge's is sent is for its whole group: "kedge".
const TO_GROUP: usize = 0x6b65_6467;

/// Has the supervisor `pid`, a child of this process that leads a process group, send `signal` to
/// all of its group, as a terminal would.
///
/// # Errors
/// It has ended.
pub fn signal_group_of(pid: u32, signal: u8) -> io::Result<()> {
    queue(pid, signal.into(), TO_GROUP)
}

fn queue(pid: u32, signal: libc::c_int, value: usize) -> io::Result<()> {
    let value = libc::sigval { sival_ptr: value as *mut libc::c_void };
    // SAFETY: no memory is handed over: the value is a number.
    match unsafe { libc::sigqueue(pid as libc::pid_t, signal, value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal to all of this process's group, if it leads one. Returns whether it has.
pub(crate) fn to_group(signal: libc::c_int) -> bool {
    // SAFETY: no memory is handed over.
    unsafe { libc::getpgrp() == libc::getpid() && libc::kill(0, signal) == 0 }
}

/// Has a limit on files (`ulimit -f`) make what this process writes fail, and not end it. The
/// program is started with the mask that there was before; no other thread runs yet.
pub(crate) fn block_file_limit() {
    let (mut limit, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: sigemptyset initialises the set, and pthread_sigmask fills the other.
    let blocked = unsafe {
        libc::sigemptyset(limit.as_mut_ptr());
        libc::sigaddset(limit.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, limit.as_ptr(), before.as_mut_ptr());
        libc::sigismember(before.as_ptr(), libc::SIGXFSZ) == 1
    };
    let _ = FILE_LIMIT_WAS_BLOCKED.set(blocked);
}

/// Which of the signals that are to end this process has been sent to it while they are blocked;
/// none that it was started to ignore.
pub(crate) fn sent_to_end() -> Option<libc::c_int> {
    let all = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    let mut pending = MaybeUninit::zeroed();
    // SAFETY: sigpending fills the set; sigaction only tells, into a zeroed structure, which is
    // plain data.
    unsafe {
        libc::sigpending(pending.as_mut_ptr());
        let pending = pending.assume_init();
        let ends = |signal: &libc::c_int| {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed();
            libc::sigaction(*signal, std::ptr::null(), action.as_mut_ptr());
            let ignored = action.assume_init().sa_sigaction == libc::SIG_IGN;
            libc::sigismember(&pending, *signal) == 1 && !ignored
        };
        all.into_iter().find(ends)
    }
}

/// Has Ctrl-C (SIGINT) call `say` before it ends this process, as it does, with the stage at which
/// the order of `sending` is and stays. To be called while there is one thread. Where the signal is
/// ignored, as in the background of a script, it stays so.
pub fn on_interrupt(sending: &Sending, say: impl FnOnce(Stage) + Send + 'static) {
    let (mut set, mut action) = (MaybeUninit::uninit(), MaybeUninit::<libc::sigaction>::zeroed());
    // SAFETY: sigemptyset initialises the set; sigaction only tells, into a zeroed structure, which
    // is plain data.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        libc::sigaction(libc::SIGINT, std::ptr::null(), action.as_mut_ptr());
        if action.assume_init().sa_sigaction == libc::SIG_IGN {
            return;
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        set.assume_init()
    };
    let sending = sending.clone();
    let wait = move || {
        let mut signal = 0;
        // SAFETY: the set is initialised, and blocked in all threads; `signal` is valid for a
        // write.
        if unsafe { libc::sigwait(&set, &mut signal) } == 0 {
            // Held until the end of the process.
            let stage = sending.hold();
            say(*stage);
            die_of(signal);
        }
    };
    if std::thread::Builder::new().name("interrupt".into()).spawn(wait).is_err() {
        // SAFETY: the set is initialised.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()) };
    }
}

/// Makes the waiting of this process look at its children again.
pub(crate) fn look_at_children() {
    // SAFETY: a plain call to this process itself, which has SIGCHLD blocked and takes it from
    // there.
    unsafe { libc::kill(libc::getpid(), libc::SIGCHLD) };
}

/// Orphans of the job become this process's children: they stay part of the job.
pub(crate) fn become_subreaper() {
    // SAFETY: a plain call.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Has `signal`, which is blocked, stop this process as it does by default; returns when it goes
/// on.
pub(crate) fn stop_by(signal: libc::c_int) {
    let (mut set, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: sigemptyset initialises the set, and pthread_sigmask fills the other; raise() sends
    // the signal to this thread, of which nothing but its default action comes.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), before.as_mut_ptr());
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}

/// Ends this process by `signal`, as the program was ended; without a second core dump.
pub fn die_of(signal: libc::c_int) -> ! {
    // SAFETY: plain calls on locals; the default action of a signal that kills ends the process.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::signal(signal, libc::SIG_DFL);
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::raise(signal);
    }
    // A signal whose default is not to kill cannot have killed the program; as shells count it.
    std::process::exit(128 + signal)
}
