//! Instructions on virtual registers: what a function is between its syntax tree and its code.

use crate::code::Handler;
use crate::exec::strip::Loaded;
use kedge_ptx::ast::{LabelId, Type};

/// A register bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bank {
    /// 32 bits or fewer.
    B32,
    B64,
    /// Two neighbouring 64-bit slots.
    B128,
    Pred,
}

impl Bank {
    pub(super) fn of(ty: Type) -> Bank {
        match ty {
            Type::Pred => Bank::Pred,
            _ if ty.size() == 16 => Bank::B128,
            _ if ty.size() == 8 => Bank::B64,
            _ => Bank::B32,
        }
    }
}

/// A virtual register: an index into the function's list of banks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct VReg(pub u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opnd {
    Def(VReg),
    Use(VReg),
    /// A pool constant's slot, or a constant predicate.
    Fixed(i32),
}

/// An instruction.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub run: Handler,
    pub imm: u64,
    pub operands: Vec<Opnd>,
    /// Register, and whether it is negated.
    pub guard: Option<(VReg, bool)>,
    pub line: u32,
    pub aux: u32,
    /// It accesses memory, and gets an inline cache.
    pub cached: bool,
    /// Its results are the same in every block ([`super::prologue`]).
    pub steady: bool,
    /// It reads nothing but its operands, and writes nothing but its results.
    pub pure: bool,
    /// What it may be part of with others.
    pub role: Role,
    pub flow: NodeFlow,
}

/// What an instruction is to those that may be done with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    None,
    /// A load that may be joined with others ([`super::strips`]).
    Load(Loaded),
    /// Loads that were joined.
    Strip(Loaded),
    /// A fused multiply-add, rounded to nearest, of elements of so many bytes ([`super::dots`]).
    MultiplyAdd(u32),
    /// Integer arithmetic that may be done with the next step's ([`super::pairs`]).
    Step(Step),
}

/// An integer operation of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Add32,
    Add64,
    And32,
    /// By the second operand.
    Shl32,
    MulWideS32,
    MulWideU32,
}

impl Node {
    /// The load that it is.
    pub(super) fn load(&self) -> Option<Loaded> {
        match self.role {
            Role::Load(load) => Some(load),
            _ => None,
        }
    }

    /// Every register that it writes.
    pub(super) fn written(&self) -> impl Iterator<Item = VReg> + '_ {
        self.operands.iter().filter_map(|operand| match operand {
            Opnd::Def(register) => Some(*register),
            _ => None,
        })
    }

    /// Every register that it reads, its guard included.
    pub(super) fn read(&self) -> impl Iterator<Item = VReg> + '_ {
        let guard = self.guard.map(|(register, _)| register);
        let operands = self.operands.iter().filter_map(|operand| match operand {
            Opnd::Use(register) => Some(*register),
            _ => None,
        });
        guard.into_iter().chain(operands)
    }
}

/// How control leaves an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeFlow {
    Next,
    /// To the label (which becomes `imm`), and on to the next instruction if guarded.
    Branch(LabelId),
    /// To every label of the program's target list with this number.
    Table(u32),
    /// Nowhere in this function, unless guarded.
    End,
}
