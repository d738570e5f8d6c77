//! Bytes that move between this process's pages and the device's, through the alias.

use super::State;
use super::view::View;
use crate::memory::link::{ask, post};
use crate::{context, log, session, stream};
use kedge_cuda_types::CuError;
use kedge_pages::{PAGE, Pages};
use kedge_protocol::{
    Call, Copy3d, CtxId, MAX_INLINE_COPY, MAX_PIECES, MAX_SCATTERED, Place, Post, Scattered, Shape,
    Status, StreamId, StreamOp,
};
use kedge_wire::{Bytes, List};

/// Most pieces that are posted with their bytes: so few are not worth a thread of the proxy's.
const MAX_INLINE_PIECES: usize = 8;
/// Messages of many pieces that are under way at once: each takes a thread of the proxy's and
/// 2 MiB of pinned memory.
const AT_ONCE: usize = 32;

/// Whereto bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// From the device's pages to the host's.
    Here,
    /// From the host's to the device's.
    There,
}

/// Operations that have been posted and not waited for. Each may be done again: nobody else uses
/// the pages meanwhile. Those that went with their bytes are kept without them.
#[derive(Debug, Default)]
pub(super) struct Moves {
    posted: Vec<StreamOp>,
    /// Pieces that go by one message, as soon as there are enough or nothing more comes.
    pieces: Vec<Scattered>,
    /// Their bytes, as [`MAX_SCATTERED`] counts them.
    bytes: u64,
    /// Messages of such pieces that nobody has waited for.
    scattered: usize,
}

impl Moves {
    pub(super) fn copy(&mut self, view: &View, state: &mut State, pages: &Pages, way: Way) {
        let far = is_far();
        for (addr, bytes, here) in state.bytes_of(pages).into_iter().flat_map(|it| view.parts(it)) {
            if way == Way::There && far {
                self.take_along(view, state, Scattered { src: here, dst: addr, bytes });
            } else if way == Way::There && bytes <= MAX_INLINE_COPY as u64 {
                self.scatter(view, state, Scattered { src: here, dst: addr, bytes });
            } else {
                self.send_pieces(view, state);
                let op = copy(addr, here, bytes, way);
                self.post(state, op.clone(), op);
            }
        }
    }

    fn scatter(&mut self, view: &View, state: &mut State, piece: Scattered) {
        let counted = piece.bytes.next_multiple_of(16);
        let ascends = self.pieces.last().is_none_or(|last| last.dst + last.bytes <= piece.dst);
        let full = self.pieces.len() == MAX_PIECES || self.bytes + counted > MAX_SCATTERED;
        if full || !ascends {
            self.send_pieces(view, state);
        }
        self.pieces.push(piece);
        self.bytes += counted;
    }

    /// Posts what has been gathered. A few go with their bytes: the device has nothing to wait for.
    fn send_pieces(&mut self, view: &View, state: &mut State) {
        self.bytes = 0;
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.len() <= MAX_INLINE_PIECES {
            for piece in pieces {
                let again = copy(piece.dst, piece.src, piece.bytes, Way::There);
                let sent = inline(piece, view).unwrap_or_else(|| again.clone());
                self.post(state, sent, again);
            }
        } else if let Ok(pieces) = List::new(pieces) {
            let op = StreamOp::Scatter { pieces };
            self.post(state, op.clone(), op);
            self.scattered += 1;
            if self.scattered == AT_ONCE {
                self.finish(view, state);
            }
        }
    }

    /// Posts bytes with themselves: to have a device on another machine ask for them would take
    /// round trips.
    fn take_along(&mut self, view: &View, state: &mut State, all: Scattered) {
        for at in (0..all.bytes).step_by(MAX_INLINE_COPY) {
            let bytes = (all.bytes - at).min(MAX_INLINE_COPY as u64);
            let piece = Scattered { src: all.src + at, dst: all.dst + at, bytes };
            let again = copy(piece.dst, piece.src, bytes, Way::There);
            let sent = inline(piece, view).unwrap_or_else(|| again.clone());
            self.post(state, sent, again);
        }
    }

    /// Zeroes the device's pages.
    pub(super) fn clear(&mut self, view: &View, state: &mut State, pages: &Pages) {
        self.send_pieces(view, state);
        for (dst, width) in state.bytes_of(pages) {
            let (pitch, value, element, height) = (width, 0, 1, 1);
            let fill = StreamOp::Memset { dst, pitch, value, element, width, height };
            self.post(state, fill.clone(), fill);
        }
    }

    /// `again` does the same as `op` if that fails.
    fn post(&mut self, state: &mut State, op: StreamOp, again: StreamOp) {
        state.post_move(op);
        self.posted.push(again);
    }

    /// Waits until all of it is over. What a context has failed under is done by another one's
    /// stream: memory is no context's.
    pub(super) fn finish(&mut self, view: &View, state: &mut State) {
        self.send_pieces(view, state);
        self.scattered = 0;
        let posted = std::mem::take(&mut self.posted);
        if posted.is_empty() {
            return;
        }
        // Each time, one context more has failed.
        for _ in 0..=context::active().len() {
            let Err(error) = state.wait_for_mover() else { return };
            if !state.replace_mover() {
                return log::line(&format!("managed memory is not current: {error}"));
            }
            posted.iter().for_each(|op| state.post_move(op.clone()));
        }
    }
}

/// Returns what takes a piece's bytes along; `None` where they are too many.
fn inline(piece: Scattered, view: &View) -> Option<StreamOp> {
    let few = usize::try_from(piece.bytes).ok().filter(|bytes| *bytes <= MAX_INLINE_COPY)?;
    let bytes = Bytes::new(view.read(piece.src, few)).ok()?;
    Some(StreamOp::CopyInline { dst: piece.dst, bytes })
}

fn copy(there: u64, here: u64, bytes: u64, way: Way) -> StreamOp {
    let (pitch, slice) = (0, 0);
    let here = Place::Client { addr: here, pitch, slice };
    let there = Place::Mapped { addr: there, pitch, slice };
    let (src, dst) = if way == Way::There { (here, there) } else { (there, here) };
    StreamOp::Copy { copy: Copy3d::new(src, dst, Shape::line(bytes)) }
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

    fn post_move(&mut self, op: StreamOp) {
        let posted = self.mover().and_then(|stream| post(&Post::Enqueue { stream, op }));
        // The proxy is gone, or no context is left: the program is told at its next call.
        if let Err(error) = posted {
            log::line(&format!("managed memory is not current: {error}"));
        }
    }

    fn wait_for_mover(&mut self) -> Result<(), CuError> {
        let stream = self.mover()?;
        ask::<Status>(&Call::StreamSync { stream })?.map_err(CuError)
    }

    /// Has bytes move on the stream of another context if the one that they move on has failed.
    /// Returns whether there is such a one.
    fn replace_mover(&mut self) -> bool {
        let failed = self.mover.is_some_and(|(ctx, _)| has_failed(ctx));
        let other = context::active().into_iter().any(|ctx| !has_failed(ctx));
        if failed && other {
            self.mover = None;
        }
        failed && other
    }

    /// Returns the stream on which bytes move; it waits for no other.
    fn mover(&mut self) -> Result<StreamId, CuError> {
        if let Some((_, stream)) = self.mover {
            return Ok(stream);
        }
        let active = context::active();
        let sound = active.iter().find(|ctx| !has_failed(**ctx));
        let ctx: CtxId = *sound.or(active.first()).ok_or(CuError::INVALID_CONTEXT)?;
        let stream = stream::new_stream_id();
        post(&Post::StreamCreate { stream, ctx, blocking: false, priority: 0 })?;
        self.mover = Some((ctx, stream));
        Ok(stream)
    }
}

/// Whether the devices are on another machine.
fn is_far() -> bool {
    session::get().is_ok_and(|session| session.devices.iter().any(|device| device.far))
}

/// Whether an error sticks to a context, so that nothing runs in it any more.
fn has_failed(ctx: CtxId) -> bool {
    session::get().is_ok_and(|session| session.client.sticky(ctx).is_some())
}
