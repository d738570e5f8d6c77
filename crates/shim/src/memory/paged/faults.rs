//! The thread that serves the program's faults on managed memory.

use super::Paged;
use super::waits::Waiting;
use crate::log;
use kedge_cuda_types::CuError;
use kedge_pages::{Access, PAGE};
use kedge_transport::managed;
use std::thread::Builder;

/// Starts the thread.
///
/// # Errors
/// OPERATING_SYSTEM where there can be no more threads.
pub(super) fn start(paged: &'static Paged) -> Result<(), CuError> {
    spawn(move || serve(paged))
}

/// Starts a thread in which every signal is blocked, so that the program's handlers run on the
/// program's own threads.
pub(super) fn spawn(run: impl FnOnce() + Send + 'static) -> Result<(), CuError> {
    // SAFETY: a zeroed sigset_t is a valid argument of sigfillset, which initialises it.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a zeroed sigset_t is a valid place for pthread_sigmask to store the old mask in.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: both sets live across the calls; the mask is put back below.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
    }
    let spawned = Builder::new().name(managed::SERVANT.to_owned()).spawn(run);
    // SAFETY: `before` was filled in by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    spawned.map(drop).map_err(|error| {
        log::line(&format!("cannot start a thread for managed memory: {error}"));
        CuError::OPERATING_SYSTEM
    })
}

fn serve(paged: &'static Paged) {
    while let Some(fault) = paged.view.next_fault() {
        let page = fault.address / PAGE;
        let access = if fault.write { Access::Write } else { Access::Read };
        let answer = move || {
            if paged.touch(page, access, fault.thread).is_err() {
                paged.refuse(page);
            }
            paged.view.wake(page);
        };
        // What this one waits for may be a host function, whose faults are served here as well.
        if paged.would_wait(page, access, fault.thread) {
            let waits = move || {
                let _waiting = Waiting::begin();
                answer();
            };
            if spawn(waits).is_err() {
                waits();
            }
        } else {
            answer();
        }
    }
}
