//! Bytes that move between this process's pages and the device's, through the alias.

use super::State;
use super::view::View;
use crate::memory::link::{ask, post};
use crate::{context, log, stream};
use kedge_cuda_types::CuError;
use kedge_pages::{PAGE, Pages};
use kedge_protocol::{Call, Copy3d, CtxId, Place, Post, Shape, Status, StreamId, StreamOp};

/// Whereto bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// From the device's pages to the host's.
    Here,
    /// From the host's to the device's.
    There,
}

/// Operations that have been posted and not waited for.
#[derive(Debug, Default)]
pub(super) struct Moves {
    posted: bool,
}

impl Moves {
    pub(super) fn copy(&mut self, view: &View, state: &mut State, pages: &Pages, way: Way) {
        for (addr, bytes, here) in state.bytes_of(pages).into_iter().flat_map(|it| view.parts(it)) {
            let (pitch, slice) = (0, 0);
            let here = Place::Client { addr: here, pitch, slice };
            let there = Place::Mapped { addr, pitch, slice };
            let (src, dst) = if way == Way::There { (here, there) } else { (there, here) };
            let copy = Copy3d::new(src, dst, Shape::line(bytes));
            self.post(state, StreamOp::Copy { copy });
        }
    }

    /// Zeroes the device's pages.
    pub(super) fn clear(&mut self, state: &mut State, pages: &Pages) {
        for (dst, width) in state.bytes_of(pages) {
            let (pitch, value, element, height) = (width, 0, 1, 1);
            self.post(state, StreamOp::Memset { dst, pitch, value, element, width, height });
        }
    }

    fn post(&mut self, state: &mut State, op: StreamOp) {
        match state.mover().and_then(|stream| post(&Post::Enqueue { stream, op })) {
            Ok(()) => self.posted = true,
            // The proxy is gone, or no context is left: the program is told at its next call.
            Err(error) => log::line(&format!("managed memory is not current: {error}")),
        }
    }

    /// Waits until all of it is over.
    pub(super) fn finish(&mut self, state: &mut State) {
        if !std::mem::take(&mut self.posted) {
            return;
        }
        let stream = state.mover();
        let waited = stream.and_then(|stream| ask::<Status>(&Call::StreamSync { stream }));
        if let Err(error) = waited.and_then(|status| status.map_err(CuError)) {
            log::line(&format!("managed memory is not current: {error}"));
        }
    }
}

impl State {
    /// Returns which bytes of some pages are allocated: address and length.
    fn bytes_of(&self, pages: &Pages) -> Vec<(u64, u64)> {
        let before = self.regions.range(..=pages.start).next_back().map(|(start, _)| *start);
        let regions = self.regions.range(before.unwrap_or(pages.start)..pages.end);
        let part = |(start, region): (&u64, &super::Region)| {
            let base = start * PAGE;
            let from = base.max(pages.start * PAGE);
            let to = (base + region.size).min(pages.end * PAGE);
            (from < to).then(|| (from, to - from))
        };
        regions.filter_map(part).collect()
    }

    /// Returns the stream on which bytes move; it waits for no other.
    fn mover(&mut self) -> Result<StreamId, CuError> {
        if let Some((_, stream)) = self.mover {
            return Ok(stream);
        }
        let ctx: CtxId = *context::active().first().ok_or(CuError::INVALID_CONTEXT)?;
        let stream = stream::new_stream_id();
        post(&Post::StreamCreate { stream, ctx, blocking: false, priority: 0 })?;
        self.mover = Some((ctx, stream));
        Ok(stream)
    }
}
