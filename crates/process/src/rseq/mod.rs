//! Restartable sequences (rseq(2)): where a thread has told the kernel to keep its area, and where
//! one goes on that was stopped inside of a sequence.
//!
//! Linux 5.13 and later tell a tracer. Before, the thread itself finds out ([`Places::ask`]): while
//! an area is registered, rseq(2) answers every attempt to register another one, and answers the
//! area's own address differently.

mod places;
mod sequence;

pub(crate) use places::Places;
pub(crate) use sequence::look;

use crate::home::{self, Ways};
use crate::proc::{self, Status};
use crate::thread::Interrupted;
use crate::{EngineError, Thread, filters, maps, sys, thread};
use libc::pid_t;
use std::io;
use std::time::{Duration, Instant};

/// The only length that kernels before 6.3 know, in bytes, and so the areas' alignment.
const AREA: u64 = 32;

/// The signature that C libraries register on x86-64 (RSEQ_SIG).
const SIGNATURE: u32 = 0x5305_3053;

/// Where a thread told the kernel to keep its area: address, length, signature; the address is 0 if
/// nowhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) signature: u32,
}

/// What the kernel tells of the stopped thread `tid`; `None` where it does not tell.
pub(crate) fn told(tid: pid_t) -> Result<Option<Registration>, EngineError> {
    match sys::rseq_configuration(tid) {
        Ok((address, length, signature)) => Ok(Some(Registration { address, length, signature })),
        Err(EngineError::System { source, .. }) if unknown(&source) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Whether a kernel says so of a ptrace request that it does not know.
fn unknown(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// The registration of a stopped thread, which is at home afterwards.
///
/// # Errors
///
/// Where the kernel does not tell and one is registered that is not found: by name.
pub(crate) fn of(
    thread: &mut Thread,
    ways: &Ways,
    places: &mut Places,
) -> Result<Registration, EngineError> {
    // It cannot have registered another one since it stopped.
    let told = thread.rseq().map_or_else(|| told(thread.pid()), |told| Ok(Some(told)));
    match told? {
        Some(registration) => Ok(registration),
        None => places.ask(thread, ways),
    }
}

/// How long a thread that is looked at before the job is stopped may take to stop.
const MOMENT: Duration = Duration::from_millis(100);

/// Refuses the running process `pid` if one of its threads has an area that could not be brought
/// back.
///
/// Each thread stands still for some microseconds, one after the other, on kernels that do not
/// tell; on others none does. What does not stop at once, or ends, is left for when the job is
/// stopped.
pub(crate) fn refuse_untold(pid: pid_t) -> Result<(), EngineError> {
    if tells() { Ok(()) } else { have_sought(pid) }
}

/// Whether this kernel's version is one that tells. One that tells although it is older is found
/// out by asking.
fn tells() -> bool {
    crate::kernel::release() >= (5, 13)
}

/// Has each thread of `pid` seek its area.
fn have_sought(pid: pid_t) -> Result<(), EngineError> {
    // Calls are made in it only where that harms nobody.
    filters::refuse([pid])?;
    let mut room = None;
    for tid in proc::own_threads(pid) {
        let stopped =
            Interrupted::ask(tid).and_then(|asked| asked.stopped(Instant::now() + MOMENT));
        // The stop of the job tells what is wrong with it.
        let Ok(mut thread) = stopped else {
            thread::release_late();
            continue;
        };
        let (ways, mut places) = match room.take() {
            Some(room) => room,
            None => (Ways::of(tid)?, Places::among(pid, &maps::of(tid)?)),
        };
        let quiet = home::quiet(Status::of(tid)?.hex("SigCgt"), thread.mask());
        let ways = ways.with_quiet(quiet);
        let asked = places.ask(&mut thread, &ways);
        ways.close(std::iter::once(&mut thread))?;
        room = Some((ways, places));
        match asked {
            Err(EngineError::Ended { .. }) | Ok(_) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
