//! What a checkpoint takes from the devices and what a restart gives back.
//!
//! - [`notes`]: what neither ids nor bytes tell, as a checkpoint keeps it.
//! - [`frozen`]: a copy of this process's private memory, which costs no copying.
//! - [`touched`]: which pages hold anything.
//! - [`written`]: which were written since an earlier snapshot.
//! - [`take`], [`restore`]: the two ways.
//! - [`portable`]: the same for other kinds of devices, and from them.
//! - [`away`]: memory that goes off the devices for a while.
//! - [`held`]: the way of a snapshot whose process is gone.

mod away;
mod frozen;
mod held;
pub(super) mod notes;
mod portable;
mod restore;
mod take;
mod touched;
mod written;

pub(super) use away::vacate;
pub(super) use held::{copy, import};
pub use portable::{make_notes, read_notes};
pub(super) use restore::{Stage, apply, apply_later, begin, end, put, write_memory};
pub(super) use take::take;
pub(super) use written::Following;
