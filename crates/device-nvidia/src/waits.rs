//! Waits for streams, contexts and events, each on a thread of its own.

use crate::NvidiaBackend;
use crate::driver::check;
use crate::stream::Stream;
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
            number => self.wait_for(stream, number.unwrap_or(0), done),
        }
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
        if waited_for.is_empty() {
            return done(Ok(()));
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
        let finish = move || {
            let result = event.ctx.enter().and_then(|()| {
                // SAFETY: an event that lives as long as its object does.
                check(unsafe { (shared.driver.cuEventSynchronize)(event.raw) })
            });
            let result = shared.waited(event.ctx.id, result);
            // Another process may have recorded it since.
            if let Some((stream, number)) = recorded.filter(|_| !event.interprocess) {
                shared.over(&stream, number);
            }
            done(result);
        };
        self.waiters.run(Box::new(finish));
    }
}
