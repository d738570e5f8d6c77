//! Warps and the instruction handlers.
//!
//! A handler is a type that implements [`Op`]: one generic body, compiled for every [`Isa`] level by
//! [`Handlers::of`]. A *selector* maps an instruction's name to its handler and operand list
//! ([`Selected`]); lowering asks each family's selector in turn.

pub(crate) mod alu_float;
pub(crate) mod alu_int;
pub mod families;
pub mod isa;
pub mod lane;
pub(crate) mod load_store;
pub(crate) mod run;
pub(crate) mod lanewise;
pub mod select;
pub mod texture;
pub mod warp;

pub use isa::{Handlers, Isa, Level, Op};
pub use lane::{Lane, map1, map2, map3};
pub use select::{Arg, Query, Selected};
pub use warp::{Row32, Row64, Warp};

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
    /// Go on with the next instruction, but let other blocks run soon (`nanosleep`).
    Yield,
    /// `Warp::fault` says what went wrong.
    Fault,
}
