//! What holds a stream of one place until another place is ready.
//!
//! A gate is a host function with a token of the near end's own, in a stream: the stream goes on
//! once the place has *called* it and the near end *permits* it. That a gate is called may permit
//! others, so what several places do one after the other is a chain of gates. All of it is enqueued
//! at once; no thread waits for any of it.
//!
//! Work that a place does for another one's stream has a stream of its own while it lasts: behind
//! other such work it could wait for what waits for it.

use super::table::At;
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, StreamId};
use std::collections::{BTreeSet, HashMap, VecDeque};

/// Tokens from here on are the near end's own; a client counts its from 1.
pub(super) const OWN_TOKENS: u64 = 1 << 63;
/// Ids of streams from here on are the near end's own.
const OWN_STREAMS: u32 = 1 << 31;
/// Where bytes on their way between two places seem to lie: no program has memory there.
const OWN_MEMORY: u64 = 1 << 62;
/// From those of one copy to those of the next.
const APART: u64 = 1 << 32;
/// Bytes of one piece of a copy between two places.
pub(super) const PIECE: u64 = 8 << 20;
/// Copies between places whose bytes are here at a time: the others wait.
const COPIES: usize = 4;

/// Host functions that a place may go on behind.
pub(super) type Released = Vec<(At, u64)>;

/// A gate.
#[derive(Debug)]
pub(super) struct Gate {
    at: At,
    ctx: CtxId,
    called: bool,
    permitted: bool,
    /// Which gates may go on once it is called.
    permits: Vec<u64>,
    /// The near end's own stream that has no more work then.
    ends: Option<StreamId>,
    /// The copy that it is a part of.
    copy: Option<u64>,
    /// The copy's bytes are wanted from here on, if there is room for them.
    takes_room: bool,
}

impl Gate {
    /// Returns one that another permits.
    pub(super) fn closed(at: At, ctx: CtxId) -> Gate {
        let (called, permitted, permits) = Default::default();
        let (ends, copy, takes_room) = Default::default();
        Gate { at, ctx, called, permitted, permits, ends, copy, takes_room }
    }

    /// Returns one that is only to be called, behind the last work of a stream of the near end's.
    pub(super) fn signal(at: At, ctx: CtxId, permits: u64) -> Gate {
        Gate { permitted: true, ..Gate::closed(at, ctx).permits(permits) }
    }

    pub(super) fn permits(mut self, token: u64) -> Gate {
        self.permits.push(token);
        self
    }

    pub(super) fn ends(self, stream: StreamId) -> Gate {
        Gate { ends: Some(stream), ..self }
    }

    /// Makes it a part of a copy, whose bytes stay while a part is there.
    pub(super) fn of(self, copy: u64) -> Gate {
        Gate { copy: Some(copy), ..self }
    }

    pub(super) fn takes_room(self) -> Gate {
        Gate { takes_room: true, ..self }
    }
}

/// The bytes of a copy that are on their way.
#[derive(Debug)]
struct Bytes {
    /// The places that it is between; no other one sees them.
    between: [At; 2],
    /// Its gates that are not open yet, and one while more are being enqueued.
    parts: usize,
    len: usize,
    /// Made when the first of them come.
    bytes: Vec<u8>,
}

/// All gates that are not open yet.
#[derive(Debug, Default)]
pub(super) struct Gates {
    gates: HashMap<u64, Gate>,
    tokens: u64,
    /// Streams of the near end's own that have no work.
    idle: HashMap<(At, CtxId), Vec<StreamId>>,
    streams: u32,
    copies: HashMap<u64, Bytes>,
    last_copy: u64,
    /// Those whose bytes may come, and the gates of those that wait for room.
    with_room: BTreeSet<u64>,
    waiting: VecDeque<u64>,
}

impl Gates {
    /// Returns whether nothing is held.
    pub(super) fn is_empty(&self) -> bool {
        self.gates.is_empty()
    }

    /// Returns a token for a gate.
    pub(super) fn token(&mut self) -> u64 {
        self.tokens += 1;
        OWN_TOKENS + self.tokens
    }

    /// Takes a gate that is about to be enqueued.
    pub(super) fn add(&mut self, token: u64, gate: Gate) {
        if let Some(copy) = gate.copy.and_then(|copy| self.copies.get_mut(&copy)) {
            copy.parts += 1;
        }
        self.gates.insert(token, gate);
    }

    /// Returns a stream without work, and whether it has still to be made.
    pub(super) fn stream(&mut self, at: At, ctx: CtxId) -> (StreamId, bool) {
        if let Some(stream) = self.idle.get_mut(&(at, ctx)).and_then(Vec::pop) {
            return (stream, false);
        }
        self.streams = self.streams.wrapping_add(1) % OWN_STREAMS;
        (StreamId(OWN_STREAMS + self.streams), true)
    }

    /// Returns whether a stream's id is one of the near end's own.
    pub(super) fn is_own(stream: StreamId) -> bool {
        stream.0 >= OWN_STREAMS
    }

    /// Takes note of a stream of the near end's own that a place has from an image, where it has no
    /// work.
    pub(super) fn remember(&mut self, at: At, ctx: CtxId, stream: StreamId) {
        self.streams = self.streams.max(stream.0 % OWN_STREAMS);
        self.idle.entry((at, ctx)).or_default().push(stream);
    }

    /// Begins a copy whose pieces have at most `len` bytes: its name, and where they seem to lie.
    /// Its bytes stay until it is [enqueued](Gates::enqueued) and its last gate is gone.
    pub(super) fn copy(&mut self, between: [At; 2], len: u64) -> (u64, u64) {
        self.last_copy = (self.last_copy + 1) % (OWN_MEMORY / APART);
        let len = usize::try_from(len.min(PIECE)).unwrap_or(0);
        self.copies.insert(self.last_copy, Bytes { between, parts: 1, len, bytes: Vec::new() });
        (self.last_copy, OWN_MEMORY + self.last_copy * APART)
    }

    /// All gates of a copy are enqueued: what may go on if they are all gone by now.
    pub(super) fn enqueued(&mut self, copy: u64) -> Released {
        let mut released = Released::new();
        self.part_goes(copy, &mut released);
        released
    }

    /// A place has called a gate: what may go on.
    pub(super) fn call(&mut self, at: At, token: u64) -> Released {
        let mut released = Released::new();
        match self.gates.get_mut(&token).filter(|gate| gate.at == at) {
            Some(gate) => {
                gate.called = true;
                let (key, permits) = ((gate.at, gate.ctx), std::mem::take(&mut gate.permits));
                if let Some(stream) = gate.ends.take() {
                    self.idle.entry(key).or_default().push(stream);
                }
                permits.into_iter().for_each(|permits| self.permit(permits, &mut released));
                self.settle(token, &mut released);
            }
            // Of a context that has broken: nobody waits for it.
            None => released.push((at, token)),
        }
        released
    }

    /// A context calls nothing any more: nobody waits for it longer.
    pub(super) fn context_ends(&mut self, at: At, ctx: CtxId) -> Released {
        self.idle.remove(&(at, ctx));
        let of_it = |gate: &Gate| gate.at == at && gate.ctx == ctx;
        let gone: Vec<u64> =
            self.gates.iter().filter(|(_, gate)| of_it(gate)).map(|(token, _)| *token).collect();
        let mut released = Released::new();
        for token in gone {
            let Some(gate) = self.gates.remove(&token) else { continue };
            if gate.called {
                released.push((at, token));
            }
            gate.permits.into_iter().for_each(|permits| self.permit(permits, &mut released));
            gate.copy.into_iter().for_each(|copy| self.part_goes(copy, &mut released));
        }
        released
    }

    fn permit(&mut self, token: u64, released: &mut Released) {
        let Some(gate) = self.gates.get_mut(&token) else { return };
        if let Some(copy) = gate.copy.filter(|_| gate.takes_room) {
            if self.with_room.len() >= COPIES && !self.with_room.contains(&copy) {
                return self.waiting.push_back(token);
            }
            self.with_room.insert(copy);
        }
        gate.permitted = true;
        self.settle(token, released);
    }

    fn settle(&mut self, token: u64, released: &mut Released) {
        let Some(gate) = self.gates.get(&token).filter(|gate| gate.called && gate.permitted) else {
            return;
        };
        released.push((gate.at, token));
        if let Some(copy) = self.gates.remove(&token).and_then(|gate| gate.copy) {
            self.part_goes(copy, released);
        }
    }

    /// A part of a copy is gone; with the last one its bytes go, and make room.
    fn part_goes(&mut self, copy: u64, released: &mut Released) {
        let Some(bytes) = self.copies.get_mut(&copy) else { return };
        bytes.parts = bytes.parts.saturating_sub(1);
        if bytes.parts > 0 {
            return;
        }
        self.copies.remove(&copy);
        self.with_room.remove(&copy);
        while self.with_room.len() < COPIES {
            let Some(token) = self.waiting.pop_front() else { return };
            self.permit(token, released);
        }
    }

    /// Returns the bytes from an address on, if that is where bytes on their way to or from this
    /// place seem to lie.
    fn find(&mut self, at: At, addr: u64, len: usize) -> Option<Result<&mut [u8], CuError>> {
        let from = addr.checked_sub(OWN_MEMORY)?;
        let (copy, start) = (from / APART, (from % APART) as usize);
        let its_own = |copy: &&mut Bytes| addr < OWN_TOKENS && copy.between.contains(&at);
        let Some(found) = self.copies.get_mut(&copy).filter(its_own) else {
            return Some(Err(CuError::INVALID_VALUE));
        };
        let Some(end) = start.checked_add(len).filter(|end| *end <= found.len) else {
            return Some(Err(CuError::INVALID_VALUE));
        };
        if found.bytes.is_empty() {
            if found.bytes.try_reserve_exact(found.len).is_err() {
                return Some(Err(CuError::OUT_OF_MEMORY));
            }
            found.bytes.resize(found.len, 0);
        }
        Some(Ok(&mut found.bytes[start..end]))
    }

    /// Reads bytes on their way; `None` where the address is none of theirs.
    pub(super) fn read(
        &mut self,
        at: At,
        addr: u64,
        out: &mut [u8],
    ) -> Option<Result<(), CuError>> {
        Some(self.find(at, addr, out.len())?.map(|bytes| out.copy_from_slice(bytes)))
    }

    /// Takes bytes that are on their way; `None` where the address is none of theirs.
    pub(super) fn write(&mut self, at: At, addr: u64, from: &[u8]) -> Option<Result<(), CuError>> {
        Some(self.find(at, addr, from.len())?.map(|bytes| bytes.copy_from_slice(from)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CTX: CtxId = CtxId(1);

    /// A stream of place 0 waits for what place 1 does for it.
    fn chain(gates: &mut Gates) -> [u64; 3] {
        let [held, begins, over] = [(); 3].map(|()| gates.token());
        gates.add(held, Gate::closed(0, CTX).permits(begins));
        gates.add(begins, Gate::closed(1, CTX));
        gates.add(over, Gate::signal(1, CTX, held).ends(StreamId(7)));
        [held, begins, over]
    }

    #[test]
    fn what_is_held_goes_on_in_turn() {
        let mut gates = Gates::default();
        let [held, begins, over] = chain(&mut gates);
        assert_eq!(gates.call(1, begins), []);
        assert_eq!(gates.call(0, held), [(1, begins)]);
        assert!(!gates.is_empty());
        assert_eq!(gates.call(1, over), [(0, held), (1, over)]);
        assert!(gates.is_empty());
        assert_eq!(gates.stream(1, CTX), (StreamId(7), false));
        let (new, made) = gates.stream(1, CTX);
        assert!(made && new.0 > OWN_STREAMS);
        // Late, or of nobody's: whoever called it goes on.
        assert_eq!(gates.call(1, over), [(1, over)]);
    }

    #[test]
    fn streams_that_an_image_has_are_idle() {
        let mut gates = Gates::default();
        let known = StreamId(OWN_STREAMS + 5);
        gates.remember(1, CTX, known);
        assert!(Gates::is_own(known) && !Gates::is_own(StreamId(5)));
        assert_eq!(gates.stream(0, CTX), (StreamId(OWN_STREAMS + 6), true));
        assert_eq!(gates.stream(1, CTX), (known, false));
        assert_eq!(gates.stream(1, CTX), (StreamId(OWN_STREAMS + 7), true));
    }

    #[test]
    fn a_gate_is_called_by_its_own_place() {
        let mut gates = Gates::default();
        let [held, begins, over] = chain(&mut gates);
        assert_eq!(gates.call(1, held), [(1, held)]);
        assert_eq!((gates.call(0, held), gates.call(1, over).len()), (vec![], 2));
        assert_eq!(gates.call(1, begins), [(1, begins)]);
    }

    #[test]
    fn nobody_waits_for_a_context_that_has_ended() {
        let mut gates = Gates::default();
        let [held, begins, over] = chain(&mut gates);
        gates.call(0, held);
        assert_eq!(gates.context_ends(0, CtxId(2)), []);
        assert_eq!(gates.context_ends(1, CTX), [(0, held)]);
        assert!(gates.is_empty());
        for late in [begins, over] {
            assert_eq!(gates.call(1, late), [(1, late)]);
        }
    }

    #[test]
    fn copies_wait_for_room_and_their_bytes_go() {
        let mut gates = Gates::default();
        let mut begun = Vec::new();
        for _ in 0..COPIES + 1 {
            let (copy, addr) = gates.copy([1, 2], PIECE + 5);
            let [held, begins, over] = [(); 3].map(|()| gates.token());
            gates.add(held, Gate::closed(0, CTX).permits(begins).of(copy));
            gates.add(begins, Gate::closed(1, CTX).of(copy).takes_room());
            gates.add(over, Gate::signal(1, CTX, held).of(copy));
            gates.call(1, begins);
            assert_eq!(gates.enqueued(copy), []);
            begun.push((held, begins, over, addr));
        }
        let called: Vec<_> = begun.iter().map(|(held, ..)| gates.call(0, *held)).collect();
        for (at, (released, (_, begins, ..))) in called.iter().zip(&begun).enumerate() {
            let expected = if at < COPIES { vec![(1, *begins)] } else { vec![] };
            assert_eq!(*released, expected);
        }
        let (addr, mut two) = (begun[0].3, [0; 2]);
        assert_eq!(gates.write(1, addr + PIECE - 2, b"ab"), Some(Ok(())));
        assert_eq!(gates.read(2, addr + PIECE - 2, &mut two), Some(Ok(())));
        assert_eq!(&two, b"ab");
        let bad = Some(Err(CuError::INVALID_VALUE));
        assert_eq!(gates.read(0, addr, &mut two), bad, "a place that has no part in it");
        assert_eq!(gates.write(1, addr + PIECE - 1, b"ab"), bad);
        assert_eq!(gates.read(2, addr + (1 << 40), &mut two), bad);
        assert_eq!(gates.read(1, u64::MAX, &mut two), bad);
        assert_eq!(gates.read(1, 0x7000_0000_0000, &mut two), None);
        // The first is over: the last has room.
        let released = gates.call(1, begun[0].2);
        assert!(released.contains(&(1, begun[COPIES].1)), "{released:?}");
        assert_eq!(gates.read(2, addr, &mut two), bad);
    }
    /// The place whose stream is held faults: the other two end the copy, and only then its room is
    /// free. It is taken no second time.
    #[test]
    fn a_copy_keeps_its_bytes_until_its_last_gate_is_gone() {
        let mut gates = Gates::default();
        for _ in 0..COPIES + 1 {
            let (copy, addr) = gates.copy([1, 2], PIECE);
            let [held, begins, lands, next, over] = [(); 5].map(|()| gates.token());
            gates.add(held, Gate::closed(0, CTX).permits(begins).of(copy));
            gates.add(begins, Gate::closed(1, CTX).permits(lands).of(copy).takes_room());
            gates.add(lands, Gate::closed(2, CTX).permits(next).of(copy));
            gates.add(next, Gate::closed(1, CTX).permits(over).of(copy).takes_room());
            gates.add(over, Gate::closed(2, CTX).permits(held).of(copy));
            assert_eq!(gates.enqueued(copy), []);
            assert_eq!(gates.context_ends(0, CTX), []);
            for (at, token) in [(1, begins), (2, lands), (1, next)] {
                assert_eq!(gates.call(at, token), [(at, token)]);
                assert_eq!(gates.write(at, addr, b"ab"), Some(Ok(())));
            }
            assert_eq!(gates.call(2, over), [(2, over)]);
            assert_eq!(gates.read(2, addr, &mut [0]), Some(Err(CuError::INVALID_VALUE)));
        }
        assert!(gates.is_empty());
    }

    /// Its places end before it is enqueued whole.
    #[test]
    fn a_copy_that_nobody_does_leaves_no_bytes() {
        let mut gates = Gates::default();
        let (copy, addr) = gates.copy([1, 2], PIECE);
        let begins = gates.token();
        gates.add(begins, Gate::closed(1, CTX).of(copy).takes_room());
        assert_eq!(gates.context_ends(1, CTX), []);
        assert_eq!(gates.write(2, addr, b"ab"), Some(Ok(())));
        assert_eq!(gates.enqueued(copy), []);
        assert_eq!(gates.write(2, addr, b"ab"), Some(Err(CuError::INVALID_VALUE)));
    }
}
