//! Writes down what a traced client does: its calls, which come by a ring in the shared arena, what
//! its devices do for it, and when they stand still.

use crate::options::Traced;
use kedge_control::joblog::JobLog;
use kedge_control::trace::{Kind, Span, Writer};
use kedge_control::warn;
use kedge_cuda_types::arena::CALLS_LEN;
use kedge_device::trace::{Done, Ran, Tracer};
use kedge_transport::{Calls, CallsReader, TracedCall, monotonic};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

/// How often calls are taken out of their ring, and what was told goes to the file.
const EVERY: Duration = Duration::from_millis(10);
/// Most calls that are taken at once: meanwhile devices that have something to tell wait.
const MAX_CALLS: usize = 4096;
/// How often a call is found incomplete before it is left out: its thread may have been killed
/// within it.
const MAX_ATTEMPTS: u32 = 100;
/// Bytes that wait to be written; more go to the file at once.
const WAITING: usize = 1 << 20;
/// How often, and how far apart, the end of the process tries to see what was told.
const TRIES: u32 = 100;
const BETWEEN: Duration = Duration::from_millis(1);

/// What this process tells, if its client is traced.
static TRACE: OnceLock<Mutex<State>> = OnceLock::new();

struct State {
    writer: Writer,
    /// The client's.
    calls: Option<CallsReader<'static>>,
    held_up: u32,
    /// The end was told.
    closed: bool,
}

/// Traces the client `pid` from now on; once. The shared arena is mapped.
pub(crate) fn begin(wanted: &Traced, pid: u32, program: &str, log: &JobLog) {
    if let Err(error) = start(wanted, pid, program) {
        warn!(log, "client {pid} is not traced: {}: {error}", wanted.folder.display());
    }
}

fn start(wanted: &Traced, pid: u32, program: &str) -> io::Result<()> {
    let writer = Writer::create(&wanted.folder, wanted.limit, pid, program)?;
    let calls = Calls::in_arena().map(CallsReader::new);
    let state = Mutex::new(State { writer, calls, held_up: 0, closed: false });
    if TRACE.set(state).is_err() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let take = || {
        while let Some(mut state) = lock().filter(|state| !state.closed) {
            let more = state.take_calls(false);
            state.writer.flush();
            drop(state);
            if !more {
                thread::sleep(EVERY);
            }
        }
    };
    thread::Builder::new().name("trace".into()).spawn(take).map(drop)
}

fn lock() -> Option<MutexGuard<'static, State>> {
    Some(TRACE.get()?.lock().unwrap_or_else(PoisonError::into_inner))
}

/// What devices tell of their work, if the client is traced.
pub(crate) fn tracer() -> Option<Arc<dyn Tracer>> {
    TRACE.get().map(|_| Arc::new(Devices) as _)
}

/// Returns when a pause begins, if anybody wants to know.
pub(crate) fn pause_begins() -> Option<u64> {
    TRACE.get().map(|_| monotonic())
}

/// Tells of a pause that is over.
pub(crate) fn pause_ends(begin: Option<u64>) {
    let (Some(begin), Some(mut state)) = (begin, lock()) else { return };
    let end = monotonic();
    let (name, lane, device) = ("pause".to_owned(), 0, None);
    state.tell(Span { kind: Kind::Pause, name, begin, end, lane, device, bytes: 0, outcome: 0 });
}

/// Writes down what there still is. The process is about to end, and its client has ended or has
/// nothing more to tell.
pub(crate) fn conclude() {
    let Some(trace) = TRACE.get() else { return };
    for _ in 0..TRIES {
        // A thread that panicked while it wrote never lets it go.
        let mut state = match trace.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                thread::sleep(BETWEEN);
                continue;
            }
        };
        state.conclude();
        return;
    }
}

impl State {
    fn tell(&mut self, span: Span) {
        if self.closed {
            return;
        }
        self.writer.span(span);
        if self.writer.waiting() > WAITING {
            self.writer.flush();
        }
    }

    /// Takes calls out of their ring; the `last` ones are waited for no longer. Returns whether
    /// there may be more.
    fn take_calls(&mut self, last: bool) -> bool {
        let Some(calls) = &mut self.calls else { return false };
        for _ in 0..MAX_CALLS {
            if let Some(call) = calls.take() {
                self.held_up = 0;
                self.writer.span(span(call));
            } else if !calls.is_held_up() {
                self.held_up = 0;
                return false;
            } else if last || self.held_up >= MAX_ATTEMPTS {
                self.held_up = 0;
                calls.pass();
                self.writer.lose(1);
            } else {
                self.held_up += 1;
                return false;
            }
        }
        true
    }

    fn conclude(&mut self) {
        if self.closed {
            return;
        }
        // It cannot have more, whatever the client has written into it.
        for _ in 0..CALLS_LEN as usize / MAX_CALLS {
            if !self.take_calls(true) {
                break;
            }
        }
        let lost = self.calls.as_ref().map_or(0, CallsReader::lost);
        self.writer.lose(lost);
        self.writer.close();
        self.closed = true;
    }
}

fn span(call: TracedCall) -> Span {
    let TracedCall { name, begin, end, thread, outcome } = call;
    let (lane, outcome) = (thread.into(), outcome.into());
    Span { kind: Kind::Call, name, begin, end, lane, device: None, bytes: 0, outcome }
}

/// This process's devices.
struct Devices;

impl Tracer for Devices {
    fn now(&self) -> u64 {
        monotonic().max(1)
    }

    fn ran(&self, ran: &Ran<'_>) {
        let Some(mut state) = lock() else { return };
        let kind = match ran.what {
            Done::Kernel => Kind::Kernel,
            Done::Copy => Kind::Copy,
            Done::Graph => Kind::Graph,
            Done::Host => Kind::Host,
        };
        state.tell(Span {
            kind,
            name: ran.name.to_owned(),
            begin: ran.begin,
            end: ran.end,
            lane: ran.stream.0.into(),
            device: Some(ran.device),
            bytes: ran.bytes,
            outcome: 0,
        });
    }
}
