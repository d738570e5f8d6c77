//! Operations in a stream of one place on objects or memory of another.
//!
//! A gate holds the stream until the other place has done the operation, in a helper stream that
//! the near end made there. A copy between places goes through the near end's memory, in pieces.

use super::Places;
use super::gates::{Gate, PIECE};
use super::table::At;
use kedge_protocol::{Copy3d, CtxId, Message, Place as Side, Post, StreamId, StreamOp};

/// Most pieces of one copy between places: 512 GiB of bytes without gaps.
const MAX_PIECES: u64 = 1 << 16;

/// Operations that are refused, as the job's log names them.
const RECORD: &str = "recording an event of one place in a stream of another";
const LAUNCH: &str = "a kernel of one place in a stream of another";
const NO_CONTEXT: &str = "memory of a place where the program has no context";
const PIECES: &str = "a copy between places of so many planes or rows";
const HELD: &str = "a GPU's stream that waits for another place";

/// A stream of the near end's own at a place, which does something for another place's stream.
#[derive(Debug, Clone, Copy)]
struct Helper {
    at: At,
    ctx: CtxId,
    stream: StreamId,
}

/// A stream of the client's that a gate holds.
#[derive(Debug, Clone, Copy)]
struct HeldStream {
    at: At,
    ctx: CtxId,
    stream: StreamId,
    /// The number of the client's message.
    seq: u64,
}

impl Places {
    /// Carries out operation `op` of a stream of the place `at`.
    pub(super) fn stream_op(&mut self, at: At, seq: u64, stream: StreamId, op: StreamOp) {
        if self.table.is_of(&op, at) {
            return self.enqueue(at, seq, stream, op);
        }
        let ctx = self.table.context_of(stream);
        let Some(held) = ctx.map(|ctx| HeldStream { at, ctx, stream, seq }) else {
            // The place itself reports what is wrong with the stream.
            return self.enqueue(at, seq, stream, op);
        };
        if let Err(what) = self.cross(held, op) {
            self.refuse_post(at, ctx, what);
        }
    }

    /// Carries out an operation that concerns another place.
    fn cross(&mut self, held: HeldStream, op: StreamOp) -> Result<(), &'static str> {
        match (&op, self.table.about(&op)) {
            (StreamOp::Launch { .. }, _) => Err(LAUNCH),
            (StreamOp::EventRecord { .. }, _) => Err(RECORD),
            (StreamOp::EventWait { .. }, [Some(from), _]) => self.wait_for(held, from, op),
            (StreamOp::Copy { copy }, [Some(from), Some(to)]) if from != to => {
                self.copy_between(held, [from, to], *copy)
            }
            (_, [Some(other), _] | [None, Some(other)]) => self.delegate(held, other, op),
            (_, [None, None]) => Ok(()),
        }
    }

    /// Returns a helper stream at a place, in the context of the object or memory that `op` names
    /// there; makes it if none is free.
    fn helper(&mut self, at: At, seq: u64, op: &StreamOp) -> Result<Helper, &'static str> {
        let ctx = self.table.context_for(op, at).ok_or(NO_CONTEXT)?;
        let (stream, new) = self.hub.gates().stream(at, ctx);
        if new {
            let post = Post::StreamCreate { stream, ctx, blocking: false, priority: 0 };
            self.send(at, seq, Message::Post { post }, None);
        }
        Ok(Helper { at, ctx, stream })
    }

    /// Checks that streams of all these places can be held.
    fn can_hold(&self, places: &[At]) -> Result<(), &'static str> {
        let holds = |at: &At| self.places.get(*at).is_some_and(|place| place.holds);
        if places.iter().all(holds) { Ok(()) } else { Err(HELD) }
    }

    /// Returns a new token for a gate.
    fn token(&self) -> u64 {
        self.hub.gates().token()
    }

    /// Registers gates. All of them must be, before the first is enqueued and so can be called.
    fn add<const N: usize>(&self, gates: [(u64, Gate); N]) {
        let mut all = self.hub.gates();
        gates.into_iter().for_each(|(token, gate)| all.add(token, gate));
    }

    /// Enqueues a helper's operation between two gates.
    fn help(&mut self, helper: Helper, seq: u64, between: [u64; 2], op: StreamOp) {
        let Helper { at, stream, .. } = helper;
        let [before, behind] = between;
        self.enqueue(at, seq, stream, StreamOp::HostFn { token: before });
        self.enqueue(at, seq, stream, op);
        self.enqueue(at, seq, stream, StreamOp::HostFn { token: behind });
    }

    /// Holds a stream until the latest record of another place's event is reached.
    fn wait_for(&mut self, held: HeldStream, from: At, op: StreamOp) -> Result<(), &'static str> {
        self.can_hold(&[held.at])?;
        let helper = self.helper(from, held.seq, &op)?;
        let (holds, over) = (self.token(), self.token());
        let signal = Gate::signal(helper.at, helper.ctx, holds).ends(helper.stream);
        self.add([(holds, Gate::closed(held.at, held.ctx)), (over, signal)]);
        self.enqueue(held.at, held.seq, held.stream, StreamOp::HostFn { token: holds });
        self.enqueue(helper.at, held.seq, helper.stream, op);
        self.enqueue(helper.at, held.seq, helper.stream, StreamOp::HostFn { token: over });
        self.hub.gates_are_of(&[held.ctx, helper.ctx]);
        Ok(())
    }

    /// Delegates an operation to another place, and holds the stream until it is over.
    fn delegate(&mut self, held: HeldStream, other: At, op: StreamOp) -> Result<(), &'static str> {
        self.can_hold(&[held.at, other])?;
        let helper = self.helper(other, held.seq, &op)?;
        let Helper { at, ctx, stream } = helper;
        let [holds, begins, over] = [(); 3].map(|()| self.token());
        self.add([
            (holds, Gate::closed(held.at, held.ctx).permits(begins)),
            (begins, Gate::closed(at, ctx)),
            (over, Gate::signal(at, ctx, holds).ends(stream)),
        ]);
        self.enqueue(held.at, held.seq, held.stream, StreamOp::HostFn { token: holds });
        self.help(helper, held.seq, [begins, over], op);
        self.hub.gates_are_of(&[held.ctx, ctx]);
        Ok(())
    }

    /// Copies from one place to another in pieces, and holds the stream meanwhile.
    fn copy_between(
        &mut self,
        held: HeldStream,
        [from, to]: [At; 2],
        copy: Copy3d,
    ) -> Result<(), &'static str> {
        self.can_hold(&[held.at, from, to])?;
        let pieces = copy.pieces(PIECE);
        let Some(last) = pieces.count().checked_sub(1) else { return Ok(()) };
        if last >= MAX_PIECES {
            return Err(PIECES);
        }
        let (seq, op) = (held.seq, StreamOp::Copy { copy });
        let (source, target) = (self.helper(from, seq, &op)?, self.helper(to, seq, &op)?);
        let longest = pieces.iter().filter_map(|piece| piece.shape().bytes()).max().unwrap_or(0);
        let (name, addr) = self.hub.gates().copy([from, to], longest);
        let (holds, mut begins) = (self.token(), self.token());
        let begin = || Gate::closed(source.at, source.ctx).of(name).takes_room();
        self.add([
            (holds, Gate::closed(held.at, held.ctx).permits(begins).of(name)),
            (begins, begin()),
        ]);
        self.enqueue(held.at, seq, held.stream, StreamOp::HostFn { token: holds });
        for (index, piece) in (0..).zip(pieces.iter()) {
            let [there, lands, over] = [(); 3].map(|()| self.token());
            let mut gone = Gate::signal(source.at, source.ctx, lands).of(name);
            let mut next = holds;
            if index < last {
                next = self.token();
                self.add([(next, begin())]);
            } else {
                gone = gone.ends(source.stream);
            }
            let landed = Gate::signal(target.at, target.ctx, next).of(name);
            let landed = if index < last { landed } else { landed.ends(target.stream) };
            let waits = Gate::closed(target.at, target.ctx).of(name);
            self.add([(lands, waits), (there, gone), (over, landed)]);
            let [out, home] = through_near_end(&piece, addr);
            self.help(source, seq, [begins, there], out);
            self.help(target, seq, [lands, over], home);
            begins = next;
        }
        self.hub.copy_is_enqueued(name, &[held.ctx, source.ctx, target.ctx]);
        Ok(())
    }
}

/// Splits a copy into one to `addr` at the near end, where its bytes lie without gaps, and one from
/// there.
fn through_near_end(copy: &Copy3d, addr: u64) -> [StreamOp; 2] {
    let shape = copy.shape();
    let near = Side::Client { addr, pitch: 0, slice: 0 }.packed(shape);
    [(copy.src, near), (near, copy.dst)]
        .map(|(src, dst)| StreamOp::Copy { copy: Copy3d::new(src, dst, shape) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::Shape;

    #[test]
    fn bytes_lie_together_on_their_way() {
        let shape = Shape { width: 3, height: 5, depth: 2 };
        let side = |addr| Side::Mapped { addr, pitch: 16, slice: 256 };
        let copy = Copy3d::new(side(4096), side(8192), shape);
        let [StreamOp::Copy { copy: out }, StreamOp::Copy { copy: home }] =
            through_near_end(&copy, 1 << 62)
        else {
            panic!("copies");
        };
        assert_eq!((out.src, home.dst), (copy.src, copy.dst));
        assert_eq!(out.dst, home.src);
        assert_eq!(out.dst, Side::Client { addr: 1 << 62, pitch: 3, slice: 15 });
        assert!(out.dst.is_packed(shape));
    }
}
