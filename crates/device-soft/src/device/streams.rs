//! Streams, and CUDA's rules of what runs after what (CUDA Runtime API reference, "Stream
//! synchronization behavior").
//!
//! A stream is its last task: the next one runs after it. An operation of a context's legacy stream
//! also runs after the last task of each blocking stream, and the next operation of each blocking
//! stream after it.

use super::context::Context;
use super::tasks::Task;
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, StreamId};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Default)]
pub(super) struct Streams {
    streams: HashMap<StreamId, Stream>,
    contexts: HashMap<CtxId, Group>,
}

struct Stream {
    ctx: Arc<Context>,
    kind: Kind,
    /// `None` where nothing is pending.
    last: Option<Arc<Task>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Legacy,
    /// Ordered with the legacy stream.
    Blocking,
    NonBlocking,
}

/// The streams of a context.
struct Group {
    ctx: Arc<Context>,
    legacy: StreamId,
    members: Vec<StreamId>,
    /// Last tasks of destroyed streams: (whether the legacy stream waits for it, task).
    orphans: Vec<(bool, Arc<Task>)>,
}

impl Stream {
    fn new(ctx: Arc<Context>, kind: Kind) -> Self {
        Self { ctx, kind, last: None }
    }

    fn pending(&self) -> Option<&Arc<Task>> {
        self.last.as_ref().filter(|task| !task.is_done())
    }
}

impl Streams {
    pub(super) fn add_context(
        &mut self,
        ctx: Arc<Context>,
        legacy: StreamId,
    ) -> Result<(), CuError> {
        if self.contexts.contains_key(&ctx.id) || self.streams.contains_key(&legacy) {
            return Err(CuError::INVALID_HANDLE);
        }
        self.streams.insert(legacy, Stream::new(Arc::clone(&ctx), Kind::Legacy));
        let group = Group { legacy, members: vec![legacy], orphans: Vec::new(), ctx };
        self.contexts.insert(group.ctx.id, group);
        Ok(())
    }

    pub(super) fn context(&self, ctx: CtxId) -> Result<&Arc<Context>, CuError> {
        self.contexts.get(&ctx).map(|group| &group.ctx).ok_or(CuError::INVALID_CONTEXT)
    }

    pub(super) fn contexts(&self) -> impl Iterator<Item = &Arc<Context>> {
        self.contexts.values().map(|group| &group.ctx)
    }

    /// Forgets a context and its streams; gives what is still pending there.
    pub(super) fn remove_context(
        &mut self,
        ctx: CtxId,
    ) -> Result<(Arc<Context>, Vec<Arc<Task>>), CuError> {
        let pending = self.pending_in_context(ctx)?;
        let group = self.contexts.remove(&ctx).ok_or(CuError::INVALID_CONTEXT)?;
        for stream in &group.members {
            self.streams.remove(stream);
        }
        Ok((group.ctx, pending))
    }

    pub(super) fn add(
        &mut self,
        stream: StreamId,
        ctx: CtxId,
        blocking: bool,
    ) -> Result<(), CuError> {
        let group = self.contexts.get_mut(&ctx).ok_or(CuError::INVALID_CONTEXT)?;
        if self.streams.contains_key(&stream) {
            return Err(CuError::INVALID_HANDLE);
        }
        let kind = if blocking { Kind::Blocking } else { Kind::NonBlocking };
        group.members.push(stream);
        self.streams.insert(stream, Stream::new(Arc::clone(&group.ctx), kind));
        Ok(())
    }

    /// Work already submitted goes on.
    pub(super) fn remove(&mut self, id: StreamId) -> Result<(), CuError> {
        let stream = self.streams.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        if stream.kind == Kind::Legacy {
            return Err(CuError::INVALID_HANDLE);
        }
        if let Some(group) = self.contexts.get_mut(&stream.ctx.id) {
            group.members.retain(|member| *member != id);
            if let Some(task) = stream.pending() {
                group.orphans.push((stream.kind == Kind::Blocking, Arc::clone(task)));
            }
        }
        self.streams.remove(&id);
        Ok(())
    }

    /// The context of a stream, and what an operation submitted to it now has to wait for.
    pub(super) fn order(
        &mut self,
        id: StreamId,
    ) -> Result<(Arc<Context>, Vec<Arc<Task>>), CuError> {
        let stream = self.streams.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        let ctx = Arc::clone(&stream.ctx);
        let mut after: Vec<Arc<Task>> = stream.pending().cloned().into_iter().collect();
        let kind = stream.kind;
        let Some(group) = self.contexts.get_mut(&ctx.id) else { return Ok((ctx, after)) };
        match kind {
            Kind::NonBlocking => {}
            Kind::Blocking => {
                let legacy = self.streams.get(&group.legacy);
                after.extend(legacy.and_then(Stream::pending).cloned());
            }
            Kind::Legacy => {
                group.orphans.retain(|(_, task)| !task.is_done());
                after.extend(
                    group
                        .orphans
                        .iter()
                        .filter(|(blocking, _)| *blocking)
                        .map(|(_, t)| Arc::clone(t)),
                );
                let members = group.members.iter().filter_map(|member| self.streams.get(member));
                let blocking = members.filter(|member| member.kind == Kind::Blocking);
                after.extend(blocking.filter_map(Stream::pending).cloned());
            }
        }
        Ok((ctx, after))
    }

    /// Makes `task` the one that the stream's next operation runs after.
    pub(super) fn set_last(&mut self, id: StreamId, task: &Arc<Task>) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.last = Some(Arc::clone(task));
        }
    }

    /// What cuStreamSynchronize waits for: the stream's own work, and for the legacy stream that of
    /// the blocking streams, which it would run after.
    pub(super) fn pending(
        &mut self,
        id: StreamId,
    ) -> Result<(Arc<Context>, Vec<Arc<Task>>), CuError> {
        let stream = self.streams.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        if stream.kind == Kind::Legacy {
            return self.order(id);
        }
        Ok((Arc::clone(&stream.ctx), stream.pending().cloned().into_iter().collect()))
    }

    pub(super) fn pending_in_context(&mut self, ctx: CtxId) -> Result<Vec<Arc<Task>>, CuError> {
        let group = self.contexts.get_mut(&ctx).ok_or(CuError::INVALID_CONTEXT)?;
        group.orphans.retain(|(_, task)| !task.is_done());
        let members = group.members.iter().filter_map(|member| self.streams.get(member));
        let mut pending: Vec<_> = members.filter_map(Stream::pending).cloned().collect();
        pending.extend(group.orphans.iter().map(|(_, task)| Arc::clone(task)));
        Ok(pending)
    }
}
