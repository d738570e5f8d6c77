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

/// Tells the client that there are no devices any more, and ends the process.
pub(crate) fn end_now(status: u8) {
    if let Some(outbox) = OUTBOX.get() {
        outbox.close();
    }
    warm::farewell(status);
    // SAFETY: ends the process at once: other threads may be busy with the client's memory.
    unsafe { libc::_exit(status.into()) }
}

/// A panic on any thread ends the process: with a line in the log, and an error for the client.
pub(crate) fn end_on_panic(log: Arc<JobLog>) {
    std::panic::set_hook(Box::new(move |panic| {
        log.fault(&format!("this is a bug in kedge: {panic}"));
        end_now(EXIT_BUG as u8);
    }));
}
