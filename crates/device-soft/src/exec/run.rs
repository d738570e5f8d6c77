//! The run loop.

use super::fragment::State;
use super::warp::Warp;
use super::{Flow, Handlers, Isa, Op, Selected};
use crate::code::Inst;
use crate::fault::FaultKind;

/// Why a warp stopped running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    /// All of its lanes have exited.
    Done,
    /// Every fragment waits for another warp.
    Blocked,
    /// Its fuel is spent, or it asked to be set aside.
    Slice,
    Fault,
}

/// Instructions of loops that a warp runs before another one gets its turn.
pub(crate) const SLICE: i64 = 64 << 10;
/// What an access draws from the fuel that saw what it saw the last time: it polls.
const POLL_COST: i64 = 1024;
/// Times that a warp reads a clock in a row, and does nothing else, in one slice.
const TIME_READS: i64 = 8;

impl Warp {
    /// Runs the warp until it pauses.
    ///
    /// # Safety
    /// The warp belongs to a block that is set up for `grid`'s program, and nothing else touches
    /// the block meanwhile.
    pub(crate) unsafe fn run(&mut self) -> Pause {
        self.fuel = SLICE;
        let code = self.code;
        while self.schedule() {
            let mut pc = self.current.pc;
            loop {
                // SAFETY: every path through a function ends in a control instruction (lowering
                // appends `exit`), so `pc` stays inside the code.
                let inst = unsafe { &*code.add(pc as usize) };
                let mask = if inst.guard == Inst::NO_GUARD {
                    self.active
                } else {
                    // SAFETY: lowering gave the guard's slot.
                    self.active & unsafe { self.pred(inst.guard) ^ inst.guard_not }
                };
                pc += 1;
                if mask != 0 {
                    // SAFETY: the instruction was lowered for this frame.
                    let flow = unsafe { (inst.run)(self, inst, mask) };
                    if flow != Flow::Next {
                        if flow == Flow::Branch && mask == self.active {
                            let target = inst.imm as u32;
                            if target < pc {
                                self.fuel -= i64::from(pc - target);
                                if self.fuel < 0 {
                                    self.current.pc = target;
                                    return self.end_slice();
                                }
                            }
                            pc = target;
                        } else {
                            match self.control(flow, inst, mask, pc) {
                                Next::Go(to) => pc = to,
                                Next::Schedule => break,
                                Next::Pause(pause) => return pause,
                            }
                        }
                    }
                }
                if pc >= self.stop {
                    self.current.pc = pc;
                    break;
                }
            }
        }
        if self.live == 0 { Pause::Done } else { Pause::Blocked }
    }

    /// Tells apart work from waiting: `inst`, an access that other threads may answer (volatile,
    /// acquire, atomic), has read `value`.
    pub(crate) fn poll(&mut self, inst: &Inst, value: u64) {
        let seen = (std::ptr::from_ref(inst) as usize, value);
        if self.last_poll == seen {
            self.fuel -= POLL_COST;
            self.polls += 1;
        }
        self.last_poll = seen;
    }

    /// Tells that `inst` has read a clock: a warp that only looks at the time is soon set aside, so
    /// that the block's others wait meanwhile, too.
    pub(crate) fn watch_time(&mut self, inst: &Inst) {
        let seen = (std::ptr::from_ref(inst) as usize, 0);
        if self.last_poll == seen {
            self.fuel -= SLICE / TIME_READS;
        }
        self.last_poll = seen;
    }

    #[cold]
    fn end_slice(&mut self) -> Pause {
        self.rotate = true;
        // Mostly polling: what it waits for is perhaps done by another block.
        self.yielded |= std::mem::take(&mut self.polls) > (SLICE / POLL_COST / 2) as u32;
        Pause::Slice
    }

    /// Everything that does not go straight on. `pc` is the next instruction's.
    #[inline(never)]
    fn control(&mut self, flow: Flow, inst: &Inst, mask: u32, pc: u32) -> Next {
        match flow {
            Flow::Next => Next::Go(pc),
            Flow::Branch => {
                let target = inst.imm as u32;
                if target < pc {
                    self.fuel -= i64::from(pc - target);
                }
                self.diverge(mask, target, pc);
                if self.fuel < 0 {
                    return Next::Pause(self.end_slice());
                }
                Next::Go(self.current.pc)
            }
            Flow::Split => {
                // The lanes of the mask take the instruction alone; the others are past it.
                self.diverge(mask, pc - 1, pc);
                Next::Go(pc - 1)
            }
            Flow::Reschedule if self.fuel < 0 => Next::Pause(self.end_slice()),
            Flow::Reschedule => Next::Schedule,
            Flow::Wait => {
                self.current.pc = pc - 1;
                if matches!(self.current.state, State::Sync(_)) {
                    self.release_syncs();
                }
                Next::Schedule
            }
            Flow::Sleep => {
                self.fall_asleep(inst, mask, pc);
                self.yielded = true;
                Next::Pause(self.end_slice())
            }
            Flow::Turn => {
                self.current.pc = pc;
                Next::Pause(Pause::Slice)
            }
            Flow::Fault => Next::Pause(Pause::Fault),
        }
    }
}

enum Next {
    Go(u32),
    Schedule,
    Pause(Pause),
}

/// Lets the block's other warps come as far, the first time that the warp gets here.
pub(crate) struct Stagger;

impl Op for Stagger {
    unsafe fn run<I: Isa>(warp: &mut Warp, _: &Inst, _: u32) -> Flow {
        if std::mem::replace(&mut warp.staggered, true) { Flow::Next } else { Flow::Turn }
    }
}

/// Lets the block's other warps have their turn, each time.
pub(crate) struct Turn;

impl Op for Turn {
    unsafe fn run<I: Isa>(_: &mut Warp, _: &Inst, _: u32) -> Flow {
        Flow::Turn
    }
}

/// What an instruction becomes that this device lacks: a fault that names it. `imm` is its number
/// in the program's list of complaints.
pub(crate) struct Unsupported;

impl Op for Unsupported {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let detail = warp.grid().spec.program.complaints.get(inst.imm as usize);
        let detail = detail.cloned().unwrap_or_default();
        warp.fault(inst, mask.trailing_zeros() as usize, FaultKind::NotSupported, None, detail)
    }
}

impl Unsupported {
    pub(crate) fn selected(complaint: usize) -> Selected {
        Selected {
            handlers: Handlers::scalar::<Unsupported>(),
            args: Vec::new(),
            imm: complaint as u64,
            aux: 0,
        }
    }
}
