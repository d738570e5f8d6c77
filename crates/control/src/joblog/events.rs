//! What `tracing` hands its events to, in all processes of kedge: each goes to the log that it was
//! made for.
//!
//! A process has several logs, and a restarted job's init is forked off one that has threads. So
//! there is one subscriber for all logs, which has no lock, and the thread knows which log it
//! speaks to. (With one dispatcher that is global, `tracing` takes no lock either.) Events of
//! libraries go nowhere: nobody has said which job they are about.

use super::Sink;
use super::entry::{Entry, Said};
use std::cell::RefCell;
use std::sync::{Arc, Once};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Metadata, Subscriber};

/// How targets of kedge's own crates begin, which is not written down.
const OWN: &str = "kedge_";

thread_local! {
    static CURRENT: RefCell<Option<Arc<Sink>>> = const { RefCell::new(None) };
}

/// Has events of this process go to their logs, once.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    // Nobody else sets one in processes of kedge's.
    ONCE.call_once(|| drop(set_global_default(Events)));
}

/// Calls `emit`, whose events `sink` takes.
pub(super) fn within(sink: &Arc<Sink>, emit: impl FnOnce()) {
    let set = |to: Option<Arc<Sink>>| {
        // None while the thread ends: then there is nobody to take it.
        CURRENT.try_with(|current| {
            current.try_borrow_mut().ok().and_then(|mut was| std::mem::replace(&mut *was, to))
        })
    };
    let before = set(Some(sink.clone()));
    emit();
    drop(before.map(set));
}

fn current() -> Option<Arc<Sink>> {
    CURRENT.try_with(|current| current.try_borrow().ok()?.clone()).ok().flatten()
}

struct Events;

impl Subscriber for Events {
    /// Says that it depends on the thread whether an event is wanted.
    fn register_callsite(&self, about: &'static Metadata<'static>) -> Interest {
        if about.is_event() { Interest::sometimes() } else { Interest::never() }
    }

    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.is_event() && current().is_some()
    }

    fn event(&self, event: &Event<'_>) {
        let Some(sink) = current() else { return };
        let mut said = Said::new();
        event.record(&mut said);
        let about = event.metadata();
        sink.keep(&Entry {
            level: (*about.level()).into(),
            target: about.target().strip_prefix(OWN).unwrap_or(about.target()),
            job: &sink.job,
            host: &sink.host,
            process: &sink.process,
            kind: said.kind,
            text: &said.text,
            fields: &said.fields,
        });
    }

    // There are no spans: what they would tell, a log knows.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
