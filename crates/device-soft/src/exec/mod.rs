//! Warps and the instruction handlers.
//!
//! A handler is a type that implements [`Op`]: one generic body, compiled for every [`Isa`] level
//! by
//! [`Handlers::of`]. A *selector* maps an instruction's name to its handler and operand list
//! ([`Selected`]); lowering asks each family's selector in turn.

pub(crate) mod access;
pub(crate) mod adapt;
pub(crate) mod alu_float;
pub(crate) mod alu_int;
pub(crate) mod async_copy;
pub(crate) mod async_reduce;
pub(crate) mod atomic;
pub(crate) mod barrier;
pub(crate) mod bitwise;
pub(crate) mod carry;
pub(crate) mod compare;
pub(crate) mod control;
pub(crate) mod cvt;
pub(crate) mod dot;
pub mod families;
pub(crate) mod fragment;
pub(crate) mod half;
pub(crate) mod hints;
pub mod isa;
pub mod lane;
pub(crate) mod lanewise;
pub(crate) mod load_store;
pub(crate) mod locate;
pub(crate) mod matrix;
pub(crate) mod mbarrier;
pub(crate) mod mov;
pub(crate) mod probe;
pub(crate) mod run;
pub mod select;
pub(crate) mod special;
pub(crate) mod stack;
pub(crate) mod strip;
mod strong;
pub(crate) mod sync;
pub(crate) mod tensor;
pub mod texture;
pub(crate) mod video;
pub mod warp;
#[cfg(target_arch = "x86_64")]
pub(crate) mod wide;

pub use isa::{Handlers, Isa, Level, Op};
pub use lane::{Lane, map1, map2, map3};
pub use select::{Arg, Query, Selected};
pub use warp::{Row32, Row64, Warp};

/// Selectors of the instructions that are not arithmetic.
pub(crate) const CORE: &[select::Selector] = &[
    sync::select,
    barrier::select,
    tensor::select,
    async_copy::select,
    async_reduce::select,
    hints::select,
    stack::select,
];

/// What the run loop does after a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Flow {
    /// Go on with the next instruction.
    Next,
    /// The active lanes of the mask jump to `imm`.
    Branch,
    /// The current fragment's `pc` or frame changed, or others did: the loop picks one anew.
    Reschedule,
    /// The instruction wants all lanes of its fragment, but its guard leaves only some: the others
    /// become a fragment of their own, and it runs again.
    Split,
    /// The fragment waits at this instruction until another fragment or warp lets it go on.
    Wait,
    /// The lanes of the mask sleep before they go on with the next instruction; other fragments,
    /// warps and blocks run meanwhile.
    Sleep,
    /// Go on with the next instruction, after the block's other warps have had a turn.
    Turn,
    /// `Warp::fault` says what went wrong.
    Fault,
}
