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

use crate::{context, log, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};
use kedge_cuda_types::handle::CUstream;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
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
    log::line(&format!("{name} panicked, a defect of kedge: {text}"));
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

/// 0: nothing is logged. 1: each call when it returns. 2: when it begins, too.
static TRACING: AtomicU8 = AtomicU8::new(0);

/// Whether each call is logged (KEDGE_TRACE when the session begins).
#[inline]
pub(crate) fn tracing() -> bool {
    TRACING.load(Ordering::Relaxed) != 0
}

/// KEDGE_TRACE's value: 1 to log each call when it returns, 2 when it begins as well, so that one
/// which does not return is seen.
pub(crate) fn set_tracing(level: &str) {
    TRACING.store(level.parse().unwrap_or(0), Ordering::Relaxed);
}

/// A call begins.
#[inline]
pub(crate) fn begin(name: &str) {
    if TRACING.load(Ordering::Relaxed) > 1 {
        log::line(&format!("trace: {} begins {name}", thread()));
    }
}

fn thread() -> libc::pid_t {
    // SAFETY: a plain call.
    unsafe { libc::gettid() }
}

#[cold]
pub(crate) fn trace(name: &str, args: &[(&str, &dyn fmt::Debug)], outcome: CUresult) {
    use fmt::Write;
    let mut line = format!("trace: {} {name}(", thread());
    for (index, (arg, value)) in args.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        let _ = write!(line, "{comma}{arg}={value:x?}");
    }
    let _ = match outcome {
        0 => write!(line, ") = 0"),
        code => write!(line, ") = {}", CuError(code)),
    };
    log::line(&line);
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
