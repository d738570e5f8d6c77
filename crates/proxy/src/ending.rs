//! How this process ends before its client does.

use crate::owner::Owner;
use crate::wait::until;
use crate::{findings, stats, trace, usage, warm};
use kedge_control::fault;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::EXIT_BUG;
use kedge_transport::Outbox;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The client's way to hear of it.
static OUTBOX: OnceLock<Outbox> = OnceLock::new();

/// Says who is to hear that the process has ended; once.
pub(crate) fn tells(outbox: Outbox) {
    let _ = OUTBOX.set(outbox);
}

/// What the process ends with: what whoever ended it first said. Where devices are gone, the client
/// may hear of it and end, or its ring be found closed, before this process has ended.
static STATUS: OnceLock<u8> = OnceLock::new();

/// Whose the client is.
enum Client {
    /// This process's.
    Own,
    /// A move's last bytes have crossed: the supervisor has still to decide, or has. The thread
    /// that hears it.
    Undecided(Owner, ThreadId),
    /// It hears that its devices are gone.
    Lost,
}

static CLIENT: Mutex<Client> = Mutex::new(Client::Own);

/// How long the supervisor may take for its decision.
const DECISION: Duration = Duration::from_secs(180);

fn client() -> MutexGuard<'static, Client> {
    CLIENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says that the client may be another proxy's from now on, or that it is this one's. Returns false
/// where neither can be: the process is about to end, and has told it.
pub(crate) fn may_have_moved(owner: Option<Owner>) -> bool {
    let mut client = client();
    match (&*client, owner) {
        (Client::Lost, owner) => return owner.is_none(),
        (_, Some(owner)) => *client = Client::Undecided(owner, thread::current().id()),
        (_, None) => *client = Client::Own,
    }
    true
}

/// Tells the client that there are no devices any more, and ends the process. A client that another
/// proxy has by now, or may get, is told nothing: its devices are there.
pub(crate) fn end_now(status: u8) -> ! {
    let mut decided = || match &mut *client() {
        Client::Undecided(owner, hears) => {
            // Who would hear the decision waits for none.
            owner.has_moved() || *hears == thread::current().id()
        }
        own => {
            *own = Client::Lost;
            true
        }
    };
    until(DECISION, &mut decided);
    if let Client::Undecided(owner, _) = &*client() {
        if owner.has_moved() {
            end_moved();
        }
        // If nobody takes it after all, the client finds its connection closed, and the supervisor
        // a proxy that is lost.
        end(*STATUS.get_or_init(|| status));
    }
    let status = *STATUS.get_or_init(|| status);
    if let Some(outbox) = OUTBOX.get() {
        outbox.close();
    }
    end(status)
}

/// Whether what was captured is still to be written, or its writing to be told.
static CAPTURED: AtomicBool = AtomicBool::new(false);

/// How long a client's end waits for that, at most.
const WRITING: Duration = Duration::from_secs(3600);

/// Says whether there is something captured whose image the process must outlive its client for.
pub(crate) fn is_captured(captured: bool) {
    CAPTURED.store(captured, Ordering::SeqCst);
}

/// Ends the process, whose client has ended, once what was captured of it has been written: a job
/// that is asked to end as soon as it is captured has its last image so.
pub(crate) fn end_with_client() -> ! {
    until(WRITING, || !CAPTURED.load(Ordering::SeqCst));
    end(*STATUS.get_or_init(|| 0))
}

/// Ends the process, whose client another one serves by now, and hears nothing of it.
pub(crate) fn end_moved() -> ! {
    end(*STATUS.get_or_init(|| 0))
}

/// Says goodbye to other machines, if any have been spoken to.
static BYE: OnceLock<fn()> = OnceLock::new();

/// Says who says goodbye to other machines; once.
pub(crate) fn says_bye(bye: fn()) {
    let _ = BYE.set(bye);
}

/// Ends the process in good order, whose client is served no longer.
pub fn end_orderly(status: u8) -> ! {
    let status = *STATUS.get_or_init(|| status);
    conclude(status);
    std::process::exit(status.into())
}

/// Writes and says what is left to be.
fn conclude(status: u8) {
    stats::write();
    findings::conclude();
    trace::conclude();
    usage::conclude();
    if let Some(bye) = BYE.get() {
        bye();
    }
    warm::farewell(status);
}

fn end(status: u8) -> ! {
    conclude(status);
    // SAFETY: _exit takes no pointer. Nothing is worth an orderly end: other threads may run
    // kernels, or be busy with the client's memory.
    unsafe { libc::_exit(status.into()) }
}

/// A panic on any thread ends the process: with a line in the log, and an error for the client.
pub(crate) fn end_on_panic(log: Arc<JobLog>) {
    std::panic::set_hook(Box::new(move |panic| {
        fault!(log, "this is a bug in kedge: {panic}");
        end_now(EXIT_BUG as u8);
    }));
}
