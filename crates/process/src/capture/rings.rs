//! Rings of io_uring while the job stands still: what works on files ends, and what only the
//! threads themselves know of is asked of them.

use crate::home::Ways;
use crate::maps::Mapping;
use crate::plugins::rings;
use crate::stop::{StoppedJob, StoppedProcess};
use crate::vdso::Vdso;
use crate::{EngineError, Thread};
use std::thread;
use std::time::{Duration, Instant};

/// How /proc names what a process maps of a ring.
const MAPPING: &str = "anon_inode:[io_uring]";
/// How long requests that are under way may take to end.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(1);
/// Of io_uring_enter: its descriptor is a number in the thread's own list
/// (IORING_ENTER_REGISTERED_RING).
const REGISTERED: u64 = 1 << 4;
/// Most rings in such a list (IO_RINGFD_REG_MAX).
const LISTED: u64 = 16;

/// Waits until requests have ended that end by themselves, and refuses rings that threads have
/// registered. What has ended is posted by the threads that have submitted it: each makes a call,
/// at whose end the kernel has it do that.
pub(super) fn settle(job: &mut StoppedJob, mappings: &[Vec<Mapping>]) -> Result<(), EngineError> {
    let begin = Instant::now();
    for (process, mappings) in job.processes.iter_mut().zip(mappings) {
        if !mappings.iter().any(|mapping| mapping.name == MAPPING) {
            continue;
        }
        let pid = process.main.pid();
        let ways = Ways::within(&Vdso::among(pid, mappings)?, pid)?;
        let settled = settle_one(process, &ways, begin);
        ways.close(std::iter::once(&mut process.main).chain(&mut process.others))?;
        settled?;
    }
    Ok(())
}

fn settle_one(
    process: &mut StoppedProcess,
    ways: &Ways,
    begin: Instant,
) -> Result<(), EngineError> {
    loop {
        for thread in std::iter::once(&mut process.main).chain(&mut process.others) {
            if has_registered(thread, ways)? {
                let what = "a thread of its has registered rings of io_uring for itself \
                            (IORING_REGISTER_RING_FDS), which kedge cannot save yet";
                return Err(EngineError::unsupported(process.pid, what));
            }
        }
        if !rings::are_at_work(process.pid) || begin.elapsed() > SETTLE_TIMEOUT {
            return Ok(());
        }
        thread::sleep(STEP);
    }
}

/// Whether the thread has a ring in a list of its own. It is at home afterwards.
fn has_registered(thread: &mut Thread, ways: &Ways) -> Result<bool, EngineError> {
    ways.lead(thread)?;
    let mut found = false;
    for index in 0..LISTED {
        let arguments = [index, 0, 0, REGISTERED, 0, 0];
        let result = thread.call(ways.home(), libc::SYS_io_uring_enter, &arguments)?;
        match -result as i32 {
            // It has no list, or the kernel knows none.
            libc::EINVAL => break,
            libc::EBADF => {}
            _ => found = true,
        }
    }
    thread.go_home()?;
    Ok(found)
}
