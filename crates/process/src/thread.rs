//! A traced thread that is stopped, and the system calls that it is made to do.

use crate::filters::program::Filter;
use crate::home::Row;
use crate::rseq::{self, Registration};
use crate::stop::Patience;
use crate::sys::{self, Registers, Stop};
use crate::{EngineError, filters, reap};
use libc::pid_t;
use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

/// While a thread is being stopped, what it makes itself is not traced: it would stay stopped.
const STOPPING: i32 = libc::PTRACE_O_TRACESYSGOOD;
/// What it is made to make is.
const CALLING: i32 =
    STOPPING | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK;

/// Calls that the kernel ends with EINTR after any stop (signal(7)), by number: some always, those
/// that can be made on sockets where a time-out is set (SO_RCVTIMEO, SO_SNDTIMEO).
const NEVER_RESTARTED: [i64; 23] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
];

/// Calls in which a thread in seccomp's strict mode can be found: those that the mode allows, and
/// those by which it begins. By number, of programs of 64 bits and, after them, of 32 bits: all
/// others would have ended it.
const STRICT: [i64; 12] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    3,
    4,
    119,
    1,
    172,
    354,
];

/// So many threads come home side by side.
const SIDE_BY_SIDE: usize = 64;

/// How long a thread may take to stop where the caller names no time.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long one that did not stop in time is waited for, so that it can be let go.
const LATE: Duration = Duration::from_secs(60);

/// A thread that was asked to stop. If this is dropped, [`release_late`] lets it go.
#[derive(Debug)]
pub(crate) struct Interrupted {
    pid: pid_t,
    arrived: bool,
}

impl Interrupted {
    pub(crate) fn ask(pid: pid_t) -> Result<Interrupted, EngineError> {
        sys::request(libc::PTRACE_SEIZE, pid, STOPPING as usize, "trace it")?;
        let asked = Interrupted { pid, arrived: false };
        sys::request(libc::PTRACE_INTERRUPT, pid, 0, "stop it")?;
        Ok(asked)
    }

    /// The same of one that this thread traces already.
    pub(crate) fn again(pid: pid_t) -> Result<Interrupted, EngineError> {
        let asked = Interrupted { pid, arrived: false };
        sys::request(libc::PTRACE_INTERRUPT, pid, 0, "stop it")?;
        Ok(asked)
    }

    pub(crate) fn pid(&self) -> pid_t {
        self.pid
    }

    /// Waits until it has stopped.
    pub(crate) fn stopped(self, deadline: Instant) -> Result<Thread, EngineError> {
        let time = deadline.saturating_duration_since(Instant::now());
        self.stopped_with(&mut Patience::new(time))
    }

    pub(crate) fn stopped_with(
        mut self,
        patience: &mut Patience<'_>,
    ) -> Result<Thread, EngineError> {
        let thread = loop {
            match Thread::arrive(self.pid, patience.until) {
                Err(EngineError::WouldNotStop { .. }) if patience.goes_on() => {}
                other => break other?,
            }
        };
        self.arrived = true;
        Ok(thread)
    }
}

impl Drop for Interrupted {
    fn drop(&mut self) {
        if !self.arrived {
            LATE_ONES.with_borrow_mut(|late| late.push(self.pid));
        }
    }
}

thread_local! {
    /// Threads that this one traces and that have not stopped in time.
    static LATE_ONES: RefCell<Vec<pid_t>> = const { RefCell::new(Vec::new()) };
}

/// Lets go of threads that did not stop in time, each as soon as it has: one may wait for another.
/// Only a stopped one can be let go, so they are waited for; one that is stuck in the kernel for
/// longer is let go when the tracing thread ends.
pub(crate) fn release_late() {
    const LOOK: Duration = Duration::from_millis(1);
    let deadline = Instant::now() + LATE;
    let mut late = LATE_ONES.take();
    while !late.is_empty() && Instant::now() < deadline {
        // It goes on as it is dropped, with the signal that has stopped it, if one has.
        let waits = |pid: &pid_t| {
            let arrived = Thread::arrive(*pid, Instant::now() + LOOK);
            matches!(arrived, Err(EngineError::WouldNotStop { .. }))
        };
        late.retain(waits);
    }
}

/// Waits until a traced thread stops, but not past `deadline`.
fn next_stop(pid: pid_t, deadline: Instant) -> Result<Stop, EngineError> {
    const MOMENT: Duration = Duration::from_millis(20);
    loop {
        if let Some(stop) = sys::wait_until(pid, deadline.min(Instant::now() + MOMENT))? {
            return Ok(stop);
        }
        // A first thread that an exec() has ended leaves its id to another one, which nobody
        // traces; where that is this process's child, it is waited for in vain.
        if !reap::is_traced(pid) {
            return Err(EngineError::Ended { pid });
        }
        if Instant::now() >= deadline {
            return Err(EngineError::WouldNotStop { pid, tid: pid, state: state(pid) });
        }
    }
}

fn state(pid: pid_t) -> char {
    crate::proc::Stat::of(pid).map_or('?', |stat| stat.state)
}

/// What makes a process a subreaper again: a row of calls, or the call at an address.
#[derive(Debug)]
enum Owed {
    Row(Row),
    Call(u64),
}

/// How far a thread has come that makes a row of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It has made this process, which is traced and has not run.
    Made(pid_t),
    /// It has made all calls: what the code has left in r9.
    End(i64),
}

/// A stopped thread. It goes on from where it was when this is dropped.
#[derive(Debug)]
pub struct Thread {
    pid: pid_t,
    home: Registers,
    mask: u64,
    /// Between [`Thread::call`] and [`Thread::go_home`] the registers are not its own.
    away: bool,
    /// A SIGSTOP that arrived while it was away, which cannot be blocked.
    stopped: bool,
    /// It filters its system calls, which is suspended while it is made to make some.
    filtered: bool,
    /// It may be in seccomp's strict mode, for all that the call tells in which it has stopped.
    may_be_strict: bool,
    /// Where the kernel told its rseq area to be when it stopped; `None` where it did not tell.
    rseq: Option<Registration>,
    /// What has its process be a subreaper again, which it is to make before it is home.
    owed: Option<Owed>,
    /// What the last call has made.
    made: Option<pid_t>,
    ended: bool,
}

impl Thread {
    /// Stops the thread `pid`, wherever it is. No signal is involved.
    pub fn stop(pid: pid_t) -> Result<Thread, EngineError> {
        Interrupted::ask(pid)?.stopped(Instant::now() + STOP_TIMEOUT)
    }

    /// Takes over a thread that a traced one has made, and that has not run yet.
    pub(crate) fn adopt(pid: pid_t) -> Result<Thread, EngineError> {
        Thread::arrive(pid, Instant::now() + STOP_TIMEOUT)
    }

    fn arrive(pid: pid_t, deadline: Instant) -> Result<Thread, EngineError> {
        loop {
            match next_stop(pid, deadline)? {
                Stop::Event(libc::PTRACE_EVENT_STOP) => break,
                // A signal goes to the program first; the stop follows. One that does
                // nothing is here only because the thread is traced, and must end no call.
                Stop::Signal(signal) => {
                    let mut registers = sys::registers(pid)?;
                    if Signals::of(pid).acting & (1 << (signal - 1)) == 0 {
                        begin_again(pid, &mut registers);
                        sys::set_registers(pid, &registers)?;
                    }
                    sys::request(libc::PTRACE_CONT, pid, signal as usize, "let it go on")?;
                    continue;
                }
                Stop::Syscall | Stop::Event(_) => {}
            }
            sys::request(libc::PTRACE_CONT, pid, 0, "let it go on")?;
        }
        let mut home = sys::registers(pid)?;
        let (found, may_be_strict) = (sys::words(&home), is_strict_call(&home));
        let (registration, abort) = rseq::look(pid, &home);
        begin_again(pid, &mut home);
        if let Some(abort) = abort {
            home.rip = abort;
        }
        let mask = sys::signal_mask(pid)?;
        if sys::words(&home) != found {
            sys::set_registers(pid, &home)?;
        }
        let mut thread = Thread::at_home(pid, home, mask);
        // In this order: what is asked first of all whether they are saved stops a child, which has
        // none.
        thread.filtered = sys::is_filtered(pid) && filters::are_saved();
        (thread.rseq, thread.may_be_strict) = (registration, may_be_strict);
        Ok(thread)
    }

    fn at_home(pid: pid_t, home: Registers, mask: u64) -> Thread {
        let (away, stopped, filtered, ended) = (false, false, false, false);
        let (may_be_strict, rseq, owed, made) = (true, None, None, None);
        Thread { pid, home, mask, away, stopped, filtered, may_be_strict, rseq, owed, made, ended }
    }

    pub fn pid(&self) -> pid_t {
        self.pid
    }

    /// Makes the thread do one system call, with the instruction at `entry`: what the kernel
    /// returned.
    pub(crate) fn call(
        &mut self,
        entry: u64,
        number: i64,
        args: &[u64],
    ) -> Result<i64, EngineError> {
        let arg = |index: usize| args.get(index).copied().unwrap_or(0);
        let mut registers = self.home;
        (registers.rip, registers.rax, registers.orig_rax) = (entry, number as u64, u64::MAX);
        (registers.rdi, registers.rsi, registers.rdx) = (arg(0), arg(1), arg(2));
        (registers.r10, registers.r8, registers.r9) = (arg(3), arg(4), arg(5));
        // The mask last: the way home brings it back, but home itself does not.
        sys::set_registers(self.pid, &registers)?;
        self.leave_home()?;
        self.made = None;
        // Its entry, then its exit.
        self.next_syscall_stop()?;
        self.next_syscall_stop()?;
        Ok(sys::registers(self.pid)?.rax as i64)
    }

    /// Has it make the calls of `row`, and brings it home: what the code has left in r9. Whoever it
    /// makes meanwhile is handed to `made`, stopped, while it stands still itself.
    ///
    /// A real signal of the quiet one's number that comes meanwhile is lost as it would be without
    /// a tracer: it does nothing.
    pub(crate) fn run(
        &mut self,
        row: Row,
        made: impl FnMut(pid_t) -> Result<(), EngineError>,
    ) -> Result<i64, EngineError> {
        self.set_out(row)?;
        self.end_row(row, made)
    }

    /// The second half of [`Thread::run`], of one that has set out.
    pub(crate) fn end_row(
        &mut self,
        row: Row,
        made: impl FnMut(pid_t) -> Result<(), EngineError>,
    ) -> Result<i64, EngineError> {
        let result = self.reached_end(row, made)?;
        // This is where the kernel delivers signals, and where interrupted calls begin again.
        self.arrive_home()?;
        Ok(result)
    }

    /// Has its process be no subreaper until it is home: by the call at `entry`.
    pub(crate) fn resign(&mut self, entry: u64) -> Result<(), EngineError> {
        self.owed = Some(Owed::Call(entry));
        self.call(entry, libc::SYS_prctl, &[libc::PR_SET_CHILD_SUBREAPER as u64, 0]).map(drop)
    }

    /// The same by the first of two rows; untraced, it makes the second by itself.
    pub(crate) fn resign_in_a_row(&mut self, rows: (Row, Row)) -> Result<(), EngineError> {
        self.owed = Some(Owed::Row(rows.1));
        self.set_out(rows.0)?;
        self.reached_end(rows.0, |_| Ok(())).map(drop)
    }

    /// Makes what it owes.
    fn pay(&mut self) -> Result<(), EngineError> {
        match self.owed.take() {
            None => Ok(()),
            Some(Owed::Row(row)) => self.run(row, |_| Ok(())).map(drop),
            Some(Owed::Call(entry)) => {
                let arguments = [libc::PR_SET_CHILD_SUBREAPER as u64, 1];
                self.call(entry, libc::SYS_prctl, &arguments).map(drop)
            }
        }
    }

    /// Waits until one that has set out has made all calls of `row`.
    fn reached_end(
        &mut self,
        row: Row,
        mut made: impl FnMut(pid_t) -> Result<(), EngineError>,
    ) -> Result<i64, EngineError> {
        loop {
            match self.reached(row)? {
                Reached::Made(pid) => {
                    made(pid)?;
                    self.go_on()?;
                }
                Reached::End(result) => return Ok(result),
            }
        }
    }

    /// Lets it begin the calls of `row`, without waiting for them: what it reaches is told by
    /// [`Thread::reached`].
    pub(crate) fn set_out(&mut self, row: Row) -> Result<(), EngineError> {
        let mut registers = self.home;
        (registers.rip, registers.orig_rax) = (row.entry, u64::MAX);
        // From here on it is brought home, whatever fails.
        self.away = true;
        sys::set_registers(self.pid, &registers)?;
        // The mask last: the way home brings it back, but home itself does not.
        sys::set_signal_mask(self.pid, !(1 << (row.quiet - 1)))?;
        if self.filtered {
            self.suspend_filters()?;
        }
        self.go_on()
    }

    /// Waits until one that has set out has made somebody, or all calls of `row`. It stands still
    /// then.
    pub(crate) fn reached(&mut self, row: Row) -> Result<Reached, EngineError> {
        loop {
            match sys::wait(self.pid)? {
                Stop::Signal(signal) if signal == row.quiet => {
                    let registers = sys::registers(self.pid)?;
                    if registers.rip == row.end {
                        return Ok(Reached::End(registers.r9 as i64));
                    }
                }
                Stop::Event(libc::PTRACE_EVENT_CLONE) => {
                    return Ok(Reached::Made(sys::event_message(self.pid)?));
                }
                Stop::Signal(libc::SIGSTOP) => self.stopped = true,
                Stop::Signal(signal @ (libc::SIGSEGV | libc::SIGILL | libc::SIGBUS)) => {
                    let source = io::Error::other(format!("signal {signal}"));
                    return Err(EngineError::System { pid: self.pid, what: "call in it", source });
                }
                Stop::Signal(_) | Stop::Syscall | Stop::Event(_) => {}
            }
            self.go_on()?;
        }
    }

    /// Lets it make the calls that follow.
    pub(crate) fn go_on(&self) -> Result<(), EngineError> {
        sys::request(libc::PTRACE_CONT, self.pid, 0, "let it call")
    }

    /// Has whoever it makes from here on traced.
    pub(crate) fn trace_clones(&self) -> Result<(), EngineError> {
        // One that is never to go on by itself ends with its tracer.
        let frozen = if self.ended { libc::PTRACE_O_EXITKILL } else { 0 };
        let suspended = if self.filtered { sys::SUSPEND_FILTERS } else { 0 };
        let options = (CALLING | frozen | suspended) as usize;
        sys::request(libc::PTRACE_SETOPTIONS, self.pid, options, "trace its clones")
    }

    /// From here on it is killed where its tracer ends, until it is let go.
    pub(crate) fn ends_with_its_tracer(&self) -> Result<(), EngineError> {
        let suspended = if self.filtered { sys::SUSPEND_FILTERS } else { 0 };
        let options = (libc::PTRACE_O_EXITKILL | suspended) as usize;
        sys::request(libc::PTRACE_SETOPTIONS, self.pid, options, "have it end with kedge")
    }

    /// From here on its calls are not filtered while it is traced.
    pub(crate) fn suspend_filters(&mut self) -> Result<(), EngineError> {
        self.filtered = true;
        self.trace_clones()
    }

    /// Whether it has filters of system calls that this process can suspend.
    pub(crate) fn is_filtered(&self) -> bool {
        self.filtered
    }

    /// Whether the call in which it has stopped is one that it can make in seccomp's strict mode,
    /// or is not known.
    pub(crate) fn is_in_strict_call(&self) -> bool {
        self.may_be_strict
    }

    /// Where the kernel told its rseq area to be when it stopped; `None` where it did not tell.
    pub(crate) fn rseq(&self) -> Option<Registration> {
        self.rseq
    }

    /// Returns its filters of system calls, the oldest first.
    pub(crate) fn filters(&self) -> Result<Vec<Filter>, EngineError> {
        if self.filtered { filters::of(self.pid) } else { Ok(Vec::new()) }
    }

    /// From here on it runs what it is told, undisturbed.
    pub(crate) fn leave_home(&mut self) -> Result<(), EngineError> {
        if !self.away {
            self.trace_clones()?;
            sys::set_signal_mask(self.pid, u64::MAX)?;
            self.away = true;
        }
        Ok(())
    }

    /// Its own registers; calls that were interrupted begin again there, or go on.
    pub(crate) fn home(&self) -> Registers {
        self.home
    }

    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }

    /// Makes these its own, so that it goes on with them.
    pub(crate) fn set_home(&mut self, home: Registers, mask: u64) {
        (self.home, self.mask, self.away) = (home, mask, true);
    }

    /// The same, which is never to go on by itself: it ends with its tracer.
    pub(crate) fn never_alone(mut self) -> Thread {
        self.ended = true;
        self
    }

    /// A thread that is stopped already, and that is never to go on by itself.
    pub(crate) fn frozen(pid: pid_t) -> Result<Thread, EngineError> {
        let (home, mask) = (sys::registers(pid)?, sys::signal_mask(pid)?);
        let mut thread = Thread::at_home(pid, home, mask).never_alone();
        thread.filtered = sys::is_filtered(pid) && filters::are_saved();
        Ok(thread)
    }

    /// Notes whom it has made, at which it has stopped.
    pub(crate) fn note_made(&mut self) -> Result<(), EngineError> {
        self.made = Some(sys::event_message(self.pid)?);
        Ok(())
    }

    /// What the last call or batch has made: a process or thread, traced and not yet run.
    pub(crate) fn made(&mut self) -> Option<pid_t> {
        self.made.take()
    }

    fn next_syscall_stop(&mut self) -> Result<(), EngineError> {
        loop {
            sys::request(libc::PTRACE_SYSCALL, self.pid, 0, "let it call")?;
            match sys::wait(self.pid)? {
                Stop::Syscall => return Ok(()),
                Stop::Signal(libc::SIGSTOP) => self.stopped = true,
                Stop::Event(
                    libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK,
                ) => self.note_made()?,
                Stop::Signal(_) | Stop::Event(_) => {}
            }
        }
    }

    /// Gives the thread its own registers back, inside the kernel's signal delivery, where an
    /// interrupted call is restarted with what is left of its time.
    pub(crate) fn go_home(&mut self) -> Result<(), EngineError> {
        if self.set_out_for_home()? { self.come_home() } else { Ok(()) }
    }

    /// Begins that; whether it is to be waited for.
    fn set_out_for_home(&mut self) -> Result<bool, EngineError> {
        self.pay()?;
        if self.away {
            sys::request(libc::PTRACE_INTERRUPT, self.pid, 0, "stop it")?;
            sys::request(libc::PTRACE_CONT, self.pid, 0, "let it go on")?;
        }
        Ok(self.away)
    }

    /// Waits until it is there.
    fn come_home(&mut self) -> Result<(), EngineError> {
        while sys::wait(self.pid)? != Stop::Event(libc::PTRACE_EVENT_STOP) {
            sys::request(libc::PTRACE_CONT, self.pid, 0, "let it go on")?;
        }
        self.arrive_home()
    }

    /// Gives one that has made all calls of its row its own registers back.
    pub(crate) fn arrive_home(&mut self) -> Result<(), EngineError> {
        // The mask first: a thread at home that takes no signal would be worse than one that is
        // lost.
        sys::set_signal_mask(self.pid, self.mask)?;
        sys::set_registers(self.pid, &self.home)?;
        self.away = false;
        Ok(())
    }

    /// Makes the process end with that status, by the call at `entry`.
    pub(crate) fn end(mut self, entry: u64, status: i32) {
        // Ending is the one call that has no exit; a failure means that it has ended already.
        let _ = self.call(entry, libc::SYS_exit_group, &[status as u64]);
        self.ended = true;
    }

    /// Makes the process end by a signal, whose action must be the default.
    pub(crate) fn end_by(mut self, entry: u64, signal: i32) -> Result<(), EngineError> {
        let arguments = [self.pid as u64, signal as u64];
        // SIGKILL comes at once, the others when nothing blocks them any more.
        if self.call(entry, libc::SYS_kill, &arguments).is_ok() {
            sys::set_signal_mask(self.pid, 0)?;
            let mut deliver = 0;
            loop {
                sys::request(libc::PTRACE_CONT, self.pid, deliver, "end it")?;
                match sys::wait(self.pid) {
                    Ok(Stop::Signal(stopped)) if stopped == signal => deliver = signal as usize,
                    Ok(_) => deliver = 0,
                    Err(_) => break,
                }
            }
        }
        self.ended = true;
        Ok(())
    }
}

/// Brings those home who are away, side by side. What fails of one is found again when it is let
/// go.
pub(crate) fn come_home(threads: &mut [Thread]) {
    for some in threads.chunks_mut(SIDE_BY_SIDE) {
        let set_out = some.iter_mut().map(Thread::set_out_for_home);
        let away: Vec<bool> = set_out.map(|away| away.unwrap_or(false)).collect();
        for (thread, _) in some.iter_mut().zip(away).filter(|(_, away)| *away) {
            let _ = thread.come_home();
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let _ = self.go_home();
        if self.filtered
            && let Some(registers) = not_resumed(self)
        {
            let _ = sys::set_registers(self.pid, &registers);
        }
        if sys::request(libc::PTRACE_DETACH, self.pid, 0, "let it go").is_err() {
            // What is not stopped any more was killed.
            reap::is_ending(self.pid);
        }
        if self.stopped {
            // SAFETY: a plain call.
            unsafe { libc::kill(self.pid, libc::SIGSTOP) };
        }
    }
}

/// Whether a thread with these registers may be in seccomp's strict mode: it is in no call, or in
/// one of [`STRICT`].
fn is_strict_call(registers: &Registers) -> bool {
    let number = registers.orig_rax as i64;
    number < 0 || STRICT.contains(&number)
}

/// Sets a call back that the kernel ended with EINTR for the stop alone.
fn begin_again(pid: pid_t, registers: &mut Registers) {
    let number = registers.orig_rax as i64;
    let ended = registers.rax as i64 == -i64::from(libc::EINTR);
    if ended && NEVER_RESTARTED.contains(&number) && !signal_waits(pid) {
        registers.rax = registers.orig_rax;
        registers.rip -= 2;
        registers.orig_rax = u64::MAX;
    }
}

/// Returns the registers with which a thread that is let go makes no restart_syscall(2), if it
/// would and its filters do not let that be: the program never makes it itself. A sleep begins from
/// its start.
fn not_resumed(thread: &Thread) -> Option<Registers> {
    let home = thread.home;
    // Where a handler is about to run, the kernel ends the call with EINTR.
    if (home.orig_rax as i64) < 0 || home.rax as i64 != RESUMED || handler_waits(thread.pid) {
        return None;
    }
    let arguments = [home.rdi, home.rsi, home.rdx, home.r10, home.r8, home.r9];
    let mut instruction = [0; 2];
    let is_native = sys::read(thread.pid, home.rip - 2, &mut instruction)
        .is_ok_and(|count| count == 2 && instruction == SYSCALL);
    let allows =
        |filter: Filter| is_native && filter.allows(libc::SYS_restart_syscall, arguments, home.rip);
    // Those that cannot be saved as well: the thread goes on, whatever becomes of the checkpoint.
    let mut filters =
        (0..=filters::MAX_FILTERS).map_while(|at| sys::filter(thread.pid, at).ok().flatten());
    if filters.all(allows) { None } else { Some(begun_anew(thread)) }
}

/// The instruction by which programs of 64 bits call the kernel.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// -ERESTART_RESTARTBLOCK: how the kernel notes a call that it resumes by restart_syscall(2).
const RESUMED: i64 = -516;

/// The registers with which a stopped thread can go on elsewhere: there the kernel knows nothing of
/// a call that was interrupted here, so it begins anew.
pub(crate) fn begun_anew(thread: &Thread) -> Registers {
    /// -ERESTARTSYS, -ERESTARTNOINTR, -ERESTARTNOHAND, -ERESTART_RESTARTBLOCK.
    const RESTART: [i64; 4] = [-512, -513, -514, RESUMED];
    let mut registers = thread.home;
    let number = registers.orig_rax as i64;
    if number >= 0 && RESTART.contains(&(registers.rax as i64)) {
        if number == libc::SYS_restart_syscall {
            match resumed(thread.pid, registers.rip) {
                Some(original) => {
                    registers.rax = original;
                    registers.rip -= 2;
                }
                None => registers.rax = -i64::from(libc::EINTR) as u64,
            }
        } else {
            registers.rax = registers.orig_rax;
            registers.rip -= 2;
        }
    }
    registers.orig_rax = u64::MAX;
    registers
}

/// Which call a thread resumes by restart_syscall: one that was stopped before, whose number the
/// kernel has forgotten. The instruction that loads it lies just before the call, as compilers
/// and libraries write it; `None` if it is not found, and then the call ends with EINTR, as it
/// may.
fn resumed(pid: pid_t, rip: u64) -> Option<u64> {
    /// Those that the kernel resumes so.
    const CALLS: [i64; 4] =
        [libc::SYS_poll, libc::SYS_nanosleep, libc::SYS_futex, libc::SYS_clock_nanosleep];
    const LOAD_EAX: u8 = 0xb8;
    let mut code = [0; 64];
    let count = sys::read(pid, rip.checked_sub(code.len() as u64)?, &mut code).ok()?;
    code[..count].windows(5).rev().find_map(|bytes| {
        let number = i64::from(u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]));
        (bytes[0] == LOAD_EAX && CALLS.contains(&number)).then_some(number as u64)
    })
}

/// Whether a signal waits that the thread would take: then EINTR is the program's due.
fn signal_waits(pid: pid_t) -> bool {
    let signals = Signals::of(pid);
    signals.waiting & signals.acting != 0
}

/// Whether a signal waits for which the thread would run a handler.
fn handler_waits(pid: pid_t) -> bool {
    let signals = Signals::of(pid);
    signals.waiting & signals.caught != 0
}

/// A thread's signals, a bit each.
struct Signals {
    /// Pending and not blocked.
    waiting: u64,
    /// Those that would do something.
    acting: u64,
    /// Those that have a handler.
    caught: u64,
}

impl Signals {
    /// All of them where they cannot be read: a call is then left as the kernel ended it.
    fn of(pid: pid_t) -> Signals {
        /// Ignored unless caught (signal(7)).
        const IDLE: [i32; 4] = [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH];
        let idle = IDLE.iter().fold(0u64, |all, signal| all | 1 << (signal - 1));
        let Ok(status) = crate::proc::text(pid, "status") else {
            return Signals { waiting: u64::MAX, acting: u64::MAX, caught: u64::MAX };
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("");
            u64::from_str_radix(line.trim(), 16).unwrap_or(0)
        };
        Signals {
            waiting: (field("SigPnd:") | field("ShdPnd:")) & !field("SigBlk:"),
            acting: field("SigCgt:") | !(field("SigIgn:") | idle),
            caught: field("SigCgt:"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_another_thread_is_in_no_strict_mode() {
        let strict = |number: i64| {
            let mut registers = sys::from_words([0; sys::REGISTERS]);
            registers.orig_rax = number as u64;
            is_strict_call(&registers)
        };
        // In no call; in one that it may make, or by which the mode has begun.
        for number in [-1, libc::SYS_read, libc::SYS_exit, libc::SYS_prctl, libc::SYS_seccomp] {
            assert!(strict(number), "{number}");
        }
        for number in [libc::SYS_futex, libc::SYS_poll, libc::SYS_clock_nanosleep] {
            assert!(!strict(number), "{number}");
        }
    }
}
