//! What a checkpoint takes from the devices and what a restart gives back.
//!
//! - [`notes`]: what neither ids nor bytes tell, as a checkpoint keeps it.
//! - [`frozen`]: a copy of this process's private memory, which costs no copying.
//! - [`touched`]: which pages hold anything.
//! - [`take`], [`restore`]: the two ways.

mod frozen;
pub(super) mod notes;
mod restore;
mod take;
mod touched;

pub(super) use restore::{Stage, apply, begin, end, put};
pub(super) use take::take;
