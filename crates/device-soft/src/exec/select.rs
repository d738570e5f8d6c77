//! How lowering asks an instruction family for a handler.

use super::Handlers;
use crate::memory::Space;
use kedge_ptx::ast::{Instruction, Operand, Register, Type};

/// An instruction that lowering wants a handler for.
pub struct Query<'a> {
    /// The dotted name's parts: `["add", "rn", "f32"]`.
    pub name: &'a [String],
    pub instruction: &'a Instruction,
    pub registers: &'a [Register],
}

impl Query<'_> {
    /// Part `index` of the name, or "".
    pub fn part(&self, index: usize) -> &str {
        self.name.get(index).map_or("", String::as_str)
    }

    pub fn has(&self, part: &str) -> bool {
        self.name.iter().any(|p| p == part)
    }

    /// The last part as a type, then the one before it, …: `ty(0)` of `cvt.f32.s8` is s8.
    pub fn ty(&self, from_end: usize) -> Option<Type> {
        let index = self.name.len().checked_sub(from_end + 1)?;
        type_named(&self.name[index])
    }

    pub fn operand(&self, index: usize) -> Option<&Operand> {
        self.instruction.operands.get(index)
    }

    /// Number of elements of a `{…}` operand; 1 for another.
    pub fn lanes(&self, index: usize) -> usize {
        match self.operand(index) {
            Some(Operand::Vector(items)) => items.len(),
            Some(_) => 1,
            None => 0,
        }
    }

    /// The type of a register operand.
    pub fn register_type(&self, operand: &Operand) -> Option<Type> {
        match operand {
            Operand::Register(id) | Operand::NotRegister(id) | Operand::NegRegister(id) => {
                self.registers.get(id.0 as usize).map(|register| register.ty)
            }
            _ => None,
        }
    }
}

/// What one flattened operand is. `{…}`, `[…]`, `d|p` and `(…)` operands are flattened in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arg {
    /// A register that is written. Of a wider register than the type says, all bits are written
    /// (lowering adds the extension). `_` becomes a scratch slot.
    Dst(Type),
    /// A register that is read and written: its slot is where it stands, and it counts as read by a
    /// further operand at the end of the list.
    Update(Type),
    /// A constant that the selector has read; it takes no operand slot.
    Known,
    /// A value: a register (or the low bits of a wider one), a constant, a special register, an
    /// address of a symbol. `!p` and `-r` arrive as their values.
    Src(Type),
    /// `[base+offset]`: one slot in the 64-bit bank, with the offset added to it.
    Address,
    /// `[base+offset]` in this space: as `Address`, but the whole generic address.
    Pointer(Space),
    /// An integer constant, which goes to `Inst::imm` and takes no operand slot.
    Imm,
}

/// A handler and its operand list.
pub struct Selected {
    pub handlers: Handlers,
    /// One for each flattened operand of the instruction, in order.
    pub args: Vec<Arg>,
    pub imm: u64,
    pub aux: u32,
}

impl Selected {
    pub fn new<O: super::Op>(args: impl Into<Vec<Arg>>) -> Selected {
        Selected { handlers: Handlers::of::<O>(), args: args.into(), imm: 0, aux: 0 }
    }

    /// `W` is `O`'s form for AVX-512.
    pub fn with_wide<O: super::Op, W: super::Op>(args: impl Into<Vec<Arg>>) -> Selected {
        let handlers = Handlers::with_wide::<O, W>();
        Selected { handlers, args: args.into(), imm: 0, aux: 0 }
    }

    pub fn scalar<O: super::Op>(args: impl Into<Vec<Arg>>) -> Selected {
        Selected { handlers: Handlers::scalar::<O>(), args: args.into(), imm: 0, aux: 0 }
    }

    pub fn imm(mut self, imm: u64) -> Selected {
        self.imm = imm;
        self
    }

    pub fn aux(mut self, aux: u32) -> Selected {
        self.aux = aux;
        self
    }
}

/// A family's selector: None where the instruction is not of the family, or not supported by it.
pub type Selector = fn(&Query<'_>) -> Option<Selected>;

/// The type that a part of a name stands for.
pub fn type_named(part: &str) -> Option<Type> {
    Type::named(part)
}
