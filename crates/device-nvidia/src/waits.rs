//! Waits for streams, contexts and events: short ones by the thread that is asked, others each on a
//! thread of its own.

use crate::context::Context;
use crate::driver::check;
use crate::stream::{Event, Stream};
use crate::{NvidiaBackend, bells};
use kedge_cuda_types::handle::CUstream;
use kedge_device::Done;
use kedge_protocol::{CtxId, EventId, StreamId};
use std::sync::Arc;

impl NvidiaBackend {
    /// See [`kedge_device::Backend::when_stream_idle`].
    pub(crate) fn wait_for_stream(&self, stream: StreamId, done: Done) {
        let stream = match self.tables().stream(stream) {
            Ok(stream) => Arc::clone(stream),
            Err(error) => return done(Err(error)),
        };
        // The legacy stream's waits cover the streams that order with it.
        match stream.pending() {
            None if stream.raw != CUstream::LEGACY || self.shared.busy.none() => done(Ok(())),
            number => {
                let number = number.unwrap_or(0);
                match self.hears(&stream, number) {
                    true => done(Ok(())),
                    false => self.wait_for(stream, number, done),
                }
            }
        }
    }

    /// Whether `stream` is soon over with all that it was given, which ends with operation
    /// `number`. To look for longer than a moment would hold up what else the client wants.
    ///
    /// Only where no other stream has work: the device's write orders with the work of those that
    /// order with this one, and would be behind what nobody waits for.
    fn hears(&self, stream: &Stream, number: u64) -> bool {
        let shared = &self.shared;
        let alone = shared.busy.one() && stream.pending().is_some();
        if !alone || stream.copies_under_way() || !self.may_look(&stream.ctx) {
            return false;
        }
        let may_spin = || shared.host.may_spin();
        let heard = stream.bell().is_some_and(|bell| bell.hears(stream.raw, may_spin));
        if heard {
            shared.over(stream, number);
        }
        heard
    }

    /// Whether the dispatcher's thread may look for the end of work by itself; `ctx` is current
    /// then.
    fn may_look(&self, ctx: &Context) -> bool {
        // The driver hands on what kernels print when it is asked to wait.
        !self.shared.capture.may_print() && ctx.enter().is_ok()
    }

    /// Waits until operation `number` of `stream` is over.
    pub(crate) fn wait_for(&self, stream: Arc<Stream>, number: u64, done: Done) {
        let shared = Arc::clone(&self.shared);
        let finish = move || {
            stream.wait_for_copies();
            let result = stream.ctx.enter().and_then(|()| {
                // SAFETY: a stream that lives as long as its object does.
                check(unsafe { (shared.driver.cuStreamSynchronize)(stream.raw) })
            });
            let result = shared.waited(stream.ctx.id, result);
            shared.over(&stream, number);
            done(result);
        };
        self.waiters.run(Box::new(finish));
    }

    /// See [`kedge_device::Backend::when_context_idle`].
    pub(crate) fn wait_for_context(&self, ctx: CtxId, done: Done) {
        let context = match self.tables().context(ctx) {
            Ok(context) => Arc::clone(context),
            Err(error) => return done(Err(error)),
        };
        let waited_for: Vec<_> = context
            .streams()
            .into_iter()
            .filter_map(|stream| stream.pending().map(|number| (stream, number)))
            .collect();
        match &waited_for[..] {
            [] => return done(Ok(())),
            [(stream, number)] if self.hears(stream, *number) => return done(Ok(())),
            _ => {}
        }
        let shared = Arc::clone(&self.shared);
        let finish = move || {
            waited_for.iter().for_each(|(stream, _)| stream.wait_for_copies());
            let result = context.enter().and_then(|()| {
                // SAFETY: waits for the current context.
                check(unsafe { (shared.driver.cuCtxSynchronize)() })
            });
            let result = shared.waited(context.id, result);
            for (stream, number) in &waited_for {
                shared.over(stream, *number);
            }
            done(result);
        };
        self.waiters.run(Box::new(finish));
    }

    /// See [`kedge_device::Backend::when_event_done`].
    pub(crate) fn wait_for_event(&self, event: EventId, done: Done) {
        let event = match self.tables().event(event) {
            Ok(event) => Arc::clone(event),
            Err(error) => return done(Err(error)),
        };
        let recorded = event.recorded();
        if recorded.is_none() && !event.interprocess {
            return done(Ok(()));
        }
        let shared = Arc::clone(&self.shared);
        if self.is_soon_over(&event) {
            shared.event_over(&event, recorded);
            return done(Ok(()));
        }
        let finish = move || {
            let result = event.ctx.enter().and_then(|()| {
                // SAFETY: an event that lives as long as its object does.
                check(unsafe { (shared.driver.cuEventSynchronize)(event.raw) })
            });
            let result = shared.waited(event.ctx.id, result);
            shared.event_over(&event, recorded);
            done(result);
        };
        self.waiters.run(Box::new(finish));
    }

    /// As `hears`, of an event: the driver says it.
    fn is_soon_over(&self, event: &Event) -> bool {
        // SAFETY: an event that lives as long as its object does.
        let over = || check(unsafe { (self.shared.driver.cuEventQuery)(event.raw) }).is_ok();
        let may_spin = || self.shared.host.may_spin();
        may_spin() && self.may_look(&event.ctx) && bells::look(over, may_spin)
    }
}
