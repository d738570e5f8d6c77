//! The C boundary: every exported function passes through [`call`].
//!
//! A function's implementation is `unsafe fn NAME(…) -> Result<(), CuError>` in the module that the
//! table names, called NAME as the exported symbol without `_ptds`/`_ptsz`. Pointers to structures
//! arrive cast to whatever pointer type it declares.
//!
//! **Default streams.** `_ptds` and `_ptsz` symbols share their plain symbol's implementation. A
//! stream argument that is NULL arrives there as [`CUstream::PER_THREAD`]; a function without one
//! asks [`default_stream`].

mod macros;

pub(crate) use macros::{data, export, unsupported};

use crate::{callback, context, log, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};
use kedge_cuda_types::handle::CUstream;
use kedge_transport::{Calls, monotonic};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What must hold before an implementation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// Nothing.
    None,
    /// cuInit has succeeded, in this very process: a forked child's CUDA is not initialised.
    Init,
    /// As `Init`, and no sticky error stands in the current context.
    Healthy,
}

/// Runs an implementation behind its gate. A panic becomes CUDA_ERROR_UNKNOWN and a log line.
#[inline]
pub(crate) fn call(
    name: &'static str,
    gate: Gate,
    implementation: impl FnOnce() -> Result<(), CuError>,
) -> CUresult {
    let open = match gate {
        Gate::None => Ok(()),
        Gate::Init => session::ready(),
        Gate::Healthy => session::alive().and_then(|()| context::check_sticky()),
    };
    let open = open.and_then(|()| match gate {
        Gate::None => Ok(()),
        Gate::Init | Gate::Healthy => callback::check_called(name),
    });
    if let Err(error) = open {
        return error.0;
    }
    match catch_unwind(AssertUnwindSafe(implementation)) {
        Ok(result) => status(result),
        Err(panic) => panicked(name, &*panic),
    }
}

#[cold]
fn panicked(name: &str, panic: &(dyn std::any::Any + Send)) -> CUresult {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    log::defect(&format!("{name} panicked, a defect of kedge: {text}"));
    CuError::UNKNOWN.0
}

/// What an unsupported function returns. Its name is logged once.
#[cold]
pub(crate) fn unsupported(name: &'static str) -> CUresult {
    refused_once(name, || {
        format!("{name} is not supported; the program got CUDA_ERROR_NOT_SUPPORTED")
    });
    CuError::NOT_SUPPORTED.0
}

/// NOT_SUPPORTED for part of a function that is implemented; `what` is logged once.
#[cold]
pub(crate) fn not_supported(what: &'static str) -> CuError {
    refused_once(what, || {
        format!("{what} is not supported; the program got CUDA_ERROR_NOT_SUPPORTED")
    });
    CuError::NOT_SUPPORTED
}

/// Logs `line` when `key` comes for the first time.
pub(crate) fn log_once(key: &'static str, line: impl FnOnce() -> String) {
    if comes_first(key) {
        log::line(&line());
    }
}

/// As [`log_once`], for what the program was refused.
fn refused_once(key: &'static str, line: impl FnOnce() -> String) {
    if comes_first(key) {
        log::refused(&line());
    }
}

fn comes_first(key: &'static str) -> bool {
    static SEEN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(key)
}

thread_local! {
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
    /// This thread's id; 0 until somebody asks for it.
    static THREAD: Cell<libc::pid_t> = const { Cell::new(0) };
}

/// A stream argument of a `_ptsz` symbol: NULL is the thread's default stream.
pub(crate) fn per_thread(stream: CUstream) -> CUstream {
    if stream.is_null() { CUstream::PER_THREAD } else { stream }
}

/// What a NULL stream means in the call that this thread is in.
pub(crate) fn default_stream() -> CUstream {
    if PER_THREAD.get() { CUstream::PER_THREAD } else { CUstream::LEGACY }
}

/// Runs `f` while [`default_stream`] is the thread's own.
pub(crate) fn with_per_thread_stream<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            PER_THREAD.set(self.0);
        }
    }
    let _restore = Restore(PER_THREAD.replace(true));
    f()
}

/// What is done with each call: nothing, by default.
static TRACING: AtomicU8 = AtomicU8::new(0);
/// It is logged when it returns.
const LOGGED: u8 = 1;
/// It is logged when it begins, too.
const BEGUN: u8 = 2;
/// The proxy is told when it began and ended (`kedge trace`).
const TIMED: u8 = 4;

/// When calls began to be timed: the one that began before has no other begin.
static SINCE: AtomicU64 = AtomicU64::new(0);

/// Whether anything is done with each call.
#[inline]
pub(crate) fn tracing() -> bool {
    TRACING.load(Ordering::Relaxed) != 0
}

/// Whether each call is logged.
#[cfg(feature = "private-tables")]
pub(crate) fn logging() -> bool {
    TRACING.load(Ordering::Relaxed) & LOGGED != 0
}

/// KEDGE_TRACE's value: 1 to log each call when it returns, 2 when it begins as well, so that one
/// which does not return is seen.
pub(crate) fn set_tracing(level: &str) {
    let bits = match level.parse::<u8>() {
        Ok(0) | Err(_) => 0,
        Ok(1) => LOGGED,
        Ok(_) => LOGGED | BEGUN,
    };
    TRACING.fetch_or(bits, Ordering::Relaxed);
}

/// Has the proxy told of all calls that return from now on. The session is there; the call that
/// made it began at `since`.
pub(crate) fn time_calls(since: u64) {
    SINCE.store(since, Ordering::Relaxed);
    TRACING.fetch_or(TIMED, Ordering::Relaxed);
}

/// Ends that in a child of fork(), whose calls are not its parent's proxy's. Allowed there.
pub(crate) fn time_no_calls() {
    TRACING.fetch_and(!TIMED, Ordering::Relaxed);
    THREAD.set(0);
}

/// A call begins: returns when, where calls are timed, and else 0.
#[inline]
pub(crate) fn begin(name: &str) -> u64 {
    if tracing() { note_begin(name) } else { 0 }
}

#[cold]
fn note_begin(name: &str) -> u64 {
    let tracing = TRACING.load(Ordering::Relaxed);
    if tracing & BEGUN != 0 {
        log::trace(&format!("{} begins {name}", thread()));
    }
    if tracing & TIMED != 0 { monotonic() } else { 0 }
}

fn thread() -> libc::pid_t {
    if THREAD.get() == 0 {
        // SAFETY: gettid takes no arguments and only returns a number.
        THREAD.set(unsafe { libc::gettid() });
    }
    THREAD.get()
}

/// A call that began at `begun` has returned.
#[cold]
pub(crate) fn trace(name: &str, begun: u64, args: &[(&str, &dyn fmt::Debug)], outcome: CUresult) {
    use fmt::Write;
    let tracing = TRACING.load(Ordering::Relaxed);
    if tracing & TIMED != 0
        && let Some(calls) = Calls::in_arena()
    {
        let begin = if begun == 0 { SINCE.load(Ordering::Relaxed) } else { begun };
        calls.push(name, (begin, monotonic()), thread() as u32, outcome);
    }
    if tracing & LOGGED == 0 {
        return;
    }
    let mut line = format!("{} {name}(", thread());
    for (index, (arg, value)) in args.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        let _ = write!(line, "{comma}{arg}={value:x?}");
    }
    let _ = match outcome {
        0 => write!(line, ") = 0"),
        code => write!(line, ") = {}", CuError(code)),
    };
    log::trace(&line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_code() {
        let code = call("cuTest", Gate::None, || panic!("on purpose"));
        assert_eq!(code, CuError::UNKNOWN.0);
    }

    #[test]
    fn nothing_works_before_init() {
        let code = call("cuTest", Gate::Init, || Ok(()));
        assert_eq!(code, CuError::NOT_INITIALIZED.0);
    }

    #[test]
    fn null_is_the_threads_stream_only_during_the_call() {
        assert_eq!(default_stream(), CUstream::LEGACY);
        assert_eq!(with_per_thread_stream(default_stream), CUstream::PER_THREAD);
        assert_eq!(default_stream(), CUstream::LEGACY);
        assert_eq!(per_thread(CUstream::NULL), CUstream::PER_THREAD);
        assert_eq!(per_thread(CUstream(7)), CUstream(7));
    }
}
