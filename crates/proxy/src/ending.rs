//! How this process ends before its client does.

use crate::warm;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::EXIT_BUG;
use kedge_transport::Outbox;
use std::sync::{Arc, OnceLock};

/// The client's way to hear of it.
static OUTBOX: OnceLock<Outbox> = OnceLock::new();

/// Says who is to hear that the process has ended; once.
pub(crate) fn tells(outbox: Outbox) {
    let _ = OUTBOX.set(outbox);
}

/// What the process ends with: what whoever ended it first said. Where devices are gone, the client
/// may hear of it and end, or its ring be found closed, before this process has ended.
static STATUS: OnceLock<u8> = OnceLock::new();

/// Tells the client that there are no devices any more, and ends the process.
pub(crate) fn end_now(status: u8) -> ! {
    let status = *STATUS.get_or_init(|| status);
    if let Some(outbox) = OUTBOX.get() {
        outbox.close();
    }
    end(status)
}

/// Ends the process, whose client has ended.
pub(crate) fn end_with_client() -> ! {
    end(*STATUS.get_or_init(|| 0))
}

/// Ends the process in good order, whose client is served no longer.
pub fn end_orderly(status: u8) -> ! {
    let status = *STATUS.get_or_init(|| status);
    warm::farewell(status);
    std::process::exit(status.into())
}

fn end(status: u8) -> ! {
    warm::farewell(status);
    // SAFETY: _exit takes no pointer. Nothing is worth an orderly end: other threads may run
    // kernels, or be busy with the client's memory.
    unsafe { libc::_exit(status.into()) }
}

/// A panic on any thread ends the process: with a line in the log, and an error for the client.
pub(crate) fn end_on_panic(log: Arc<JobLog>) {
    std::panic::set_hook(Box::new(move |panic| {
        log.fault(&format!("this is a bug in kedge: {panic}"));
        end_now(EXIT_BUG as u8);
    }));
}
