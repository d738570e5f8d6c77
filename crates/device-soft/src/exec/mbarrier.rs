//! `mbarrier`: barriers in shared memory that count arrivals and bytes.
//!
//! The object is 64 bits, opaque to programs. Here, from bit 0: arrivals still to come (20 bits),
//! arrivals that a phase expects (20 bits), bytes still to come (23 bits, offset by [`TX_ZERO`],
//! for completions may come before they are announced), and the parity of the current phase.

use super::access::Place;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::memory::Space;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// PTX's limit for counts of arrivals and of bytes.
const MAX_COUNT: u64 = (1 << 20) - 1;
const TX_ZERO: u64 = 1 << 22;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    pending: u64,
    expected: u64,
    /// Bytes to come, plus `TX_ZERO`.
    bytes: u64,
    parity: u64,
}

impl State {
    fn new(count: u64) -> State {
        State { pending: count, expected: count, bytes: TX_ZERO, parity: 0 }
    }

    fn decode(word: u64) -> State {
        State {
            pending: word & MAX_COUNT,
            expected: word >> 20 & MAX_COUNT,
            bytes: word >> 40 & (2 * TX_ZERO - 1),
            parity: word >> 63,
        }
    }

    fn encode(self) -> u64 {
        self.pending | self.expected << 20 | self.bytes << 40 | self.parity << 63
    }

    /// After arrivals and completed bytes: ends the phase if nothing is left.
    fn settle(&mut self) {
        if self.pending == 0 && self.bytes == TX_ZERO {
            self.pending = self.expected;
            self.parity ^= 1;
        }
    }

    fn announce(&mut self, bytes: u64) {
        self.bytes = (self.bytes + bytes.min(MAX_COUNT)) & (2 * TX_ZERO - 1);
    }

    fn complete(&mut self, bytes: u64) {
        self.bytes = self.bytes.wrapping_sub(bytes.min(MAX_COUNT)) & (2 * TX_ZERO - 1);
        self.settle();
    }

    /// False: more arrivals than the phase expects.
    fn arrive(&mut self, count: u64) -> bool {
        let fits = count <= self.pending;
        self.pending = self.pending.saturating_sub(count);
        self.settle();
        fits
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Action {
    Init,
    Invalidate,
    ExpectTx,
    CompleteTx,
    Arrive,
    ArriveExpectTx,
    Drop,
    DropExpectTx,
    Test,
    TestParity,
    Copied,
    CopiedNoIncrement,
}

const ACTIONS: [Action; 12] = [
    Action::Init,
    Action::Invalidate,
    Action::ExpectTx,
    Action::CompleteTx,
    Action::Arrive,
    Action::ArriveExpectTx,
    Action::Drop,
    Action::DropExpectTx,
    Action::Test,
    Action::TestParity,
    Action::Copied,
    Action::CopiedNoIncrement,
];

/// `Inst::aux` bits besides the action: a result is wanted, a count is given.
const RESULT: u32 = 1 << 8;
const COUNT: u32 = 1 << 9;

/// The selector of `mbarrier.*`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let operands = query.instruction.operands.as_slice();
    let shared = query.name.iter().any(|part| part.starts_with("shared"));
    let object = Arg::Pointer(if shared { Space::Shared } else { Space::Generic });
    let transfers = query.has("expect_tx");
    let selected = |action: Action, args: Vec<Arg>, aux: u32| {
        Some(Selected::scalar::<Barrier>(args).aux(action as u32 | aux))
    };
    let arrive = |plain: Action, with_bytes: Action| {
        let action = if transfers { with_bytes } else { plain };
        let result = !matches!(operands.first()?, Operand::Address(..));
        let mut args = if result { vec![Arg::Dst(Type::B64)] } else { Vec::new() };
        args.push(object);
        let count = operands.len() > args.len();
        if count {
            args.push(Arg::Src(Type::U32));
        }
        let flags = if result { RESULT } else { 0 } | if count { COUNT } else { 0 };
        selected(action, args, flags)
    };
    match query.part(1) {
        "init" => selected(Action::Init, vec![object, Arg::Src(Type::U32)], 0),
        "inval" => selected(Action::Invalidate, vec![object], 0),
        "expect_tx" => selected(Action::ExpectTx, vec![object, Arg::Src(Type::U32)], COUNT),
        "complete_tx" => selected(Action::CompleteTx, vec![object, Arg::Src(Type::U32)], COUNT),
        "arrive" => arrive(Action::Arrive, Action::ArriveExpectTx),
        "arrive_drop" => arrive(Action::Drop, Action::DropExpectTx),
        "test_wait" | "try_wait" => {
            let parity = query.has("parity");
            let mut args = vec![Arg::Dst(Type::Pred), object];
            args.push(Arg::Src(if parity { Type::U32 } else { Type::B64 }));
            if operands.len() == 4 {
                // How long to wait at most: not at all is allowed.
                args.push(Arg::Src(Type::U32));
            }
            selected(if parity { Action::TestParity } else { Action::Test }, args, RESULT)
        }
        "pending_count" => {
            Some(Selected::scalar::<PendingCount>([Arg::Dst(Type::U32), Arg::Src(Type::B64)]))
        }
        _ => None,
    }
}

/// The selector of `cp.async.mbarrier.arrive`.
pub(super) fn select_copied(query: &Query<'_>) -> Option<Selected> {
    let shared = query.name.iter().any(|part| part.starts_with("shared"));
    let object = Arg::Pointer(if shared { Space::Shared } else { Space::Generic });
    let action = if query.has("noinc") { Action::CopiedNoIncrement } else { Action::Copied };
    Some(Selected::scalar::<Barrier>([object]).aux(action as u32))
}

/// op = [result], object, [count, state or parity].
struct Barrier;

impl Op for Barrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let action = ACTIONS[(inst.aux & 255) as usize % ACTIONS.len()];
        let at = usize::from(inst.aux & RESULT != 0);
        let testing = matches!(action, Action::Test | Action::TestParity);
        let mut out = [0u64; WARP];
        // SAFETY: the selector gave the operands in this order; `pointer` checks the address.
        unsafe {
            let object = *warp.row64(inst.op[at]);
            let operand: [u64; WARP] = match action {
                Action::Test => *warp.row64(inst.op[at + 1]),
                Action::TestParity | Action::Init => warp.row32(inst.op[at + 1]).map(u64::from),
                _ if inst.aux & COUNT != 0 => warp.row32(inst.op[at + 1]).map(u64::from),
                _ => [1; WARP],
            };
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let cell = match warp.pointer(inst, lane, Place::Generic, object[lane], 8, 8) {
                    Ok(cell) => cell.cast::<u64>(),
                    Err(flow) => return flow,
                };
                match act(action, cell.read(), operand[lane]) {
                    Ok((word, result)) => {
                        cell.write(word);
                        out[lane] = result;
                    }
                    Err(what) => {
                        let kind = FaultKind::IllegalInstruction;
                        return warp.fault(inst, lane, kind, Some(object[lane]), what);
                    }
                }
            }
            if testing {
                let bits = (0..WARP).fold(0, |bits, lane| bits | (out[lane] as u32 & 1) << lane);
                warp.set_pred(inst.op[0], bits, mask);
                warp.poll(inst, u64::from(bits));
            } else if at == 1 {
                warp.set64(inst.op[0], &out, mask);
            }
        }
        Flow::Next
    }
}

/// The object after the action, and the action's result.
fn act(action: Action, word: u64, operand: u64) -> Result<(u64, u64), &'static str> {
    let mut state = State::decode(word);
    let mut fits = true;
    match action {
        Action::Init if operand == 0 || operand > MAX_COUNT => {
            return Err("mbarrier.init: the count is 1 to 2^20 - 1");
        }
        Action::Init => state = State::new(operand),
        Action::Invalidate => return Ok((0, 0)),
        Action::ExpectTx => state.announce(operand),
        Action::CompleteTx => state.complete(operand),
        Action::Arrive => fits = state.arrive(operand),
        Action::ArriveExpectTx => {
            state.announce(operand);
            fits = state.arrive(1);
        }
        Action::Drop => {
            state.expected = state.expected.saturating_sub(operand);
            fits = state.arrive(operand);
        }
        Action::DropExpectTx => {
            state.announce(operand);
            state.expected = state.expected.saturating_sub(1);
            fits = state.arrive(1);
        }
        Action::Test => return Ok((word, u64::from(word >> 63 != operand >> 63))),
        Action::TestParity => return Ok((word, u64::from(word >> 63 != operand & 1))),
        // The copies are complete, so the arrival that they stand for happens at once.
        Action::Copied => {}
        Action::CopiedNoIncrement => fits = state.arrive(1),
    }
    if fits { Ok((state.encode(), word)) } else { Err("more arrivals than the mbarrier expects") }
}

/// `mbarrier.pending_count`: op = [count, state].
struct PendingCount;

impl Op for PendingCount {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands' types.
        unsafe { super::map1(warp, inst, mask, |state: u64| (state & MAX_COUNT) as u32) }
    }
}

/// Tells the mbarrier at generic address `addr` that `bytes` bytes have arrived.
///
/// # Errors
/// The fault is recorded.
pub(super) fn complete(
    warp: &mut Warp,
    inst: &Inst,
    lane: usize,
    addr: u64,
    bytes: u64,
) -> Result<(), Flow> {
    let cell = warp.pointer(inst, lane, Place::Generic, addr, 8, 8)?.cast::<u64>();
    // SAFETY: `pointer` checked the address; this worker alone runs the block.
    unsafe {
        let mut state = State::decode(cell.read());
        let mut left = bytes;
        // A phase may be told of more bytes than one announcement holds.
        while left > MAX_COUNT {
            state.complete(MAX_COUNT);
            left -= MAX_COUNT;
        }
        state.complete(left);
        cell.write(state.encode());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(word: &mut u64, action: Action, operand: u64) -> u64 {
        let (next, result) = act(action, *word, operand).unwrap();
        *word = next;
        result
    }

    #[test]
    fn phases_end_when_everyone_and_everything_is_there() {
        let mut word = 0;
        step(&mut word, Action::Init, 2);
        let state = step(&mut word, Action::Arrive, 1);
        assert_eq!(step(&mut word, Action::Test, state), 0);
        assert_eq!(step(&mut word, Action::TestParity, 1), 1, "the phase before the first");
        step(&mut word, Action::ArriveExpectTx, 64);
        assert_eq!(step(&mut word, Action::Test, state), 0, "bytes are missing");
        step(&mut word, Action::CompleteTx, 64);
        assert_eq!(step(&mut word, Action::Test, state), 1);
        assert_eq!(step(&mut word, Action::TestParity, 0), 1);
        assert_eq!(step(&mut word, Action::TestParity, 1), 0);
    }

    #[test]
    fn bytes_may_come_before_they_are_announced() {
        let mut word = 0;
        step(&mut word, Action::Init, 1);
        step(&mut word, Action::CompleteTx, 32);
        step(&mut word, Action::ArriveExpectTx, 32);
        assert_eq!(step(&mut word, Action::TestParity, 0), 1);
        step(&mut word, Action::Drop, 1);
        assert!(act(Action::Arrive, word, 2).is_err(), "nobody is expected any more");
        assert!(act(Action::Init, 0, 0).is_err());
    }
}
