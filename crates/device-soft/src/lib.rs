//! A CUDA device in software: PTX, lowered to pre-decoded instructions and executed warp by warp.
//!
//! - [`code`]: instructions, functions and [`code::Program`], what a module becomes.
//! - [`lower`]: from a linked PTX module to a program.
//! - [`exec`]: warps, register banks and the instruction handlers, by family.
//! - [`memory`]: the spans of valid addresses, and the windows of shared, local and param space.
//! - [`launch`], [`pool`]: grids, and the OS threads that run their blocks.
//! - [`builtin`]: functions that programs call and nobody defines (`vprintf`, `malloc`, …).
//! - [`check`]: what is found in programs that are checked.
//! - [`math`]: one lane's arithmetic, as pure functions.
//! - [`device`]: the [`kedge_device::Backend`].

mod block;
pub mod builtin;
pub mod check;
pub mod code;
pub mod device;
pub mod exec;
pub mod fault;
pub mod launch;
pub mod lower;
pub mod math;
pub mod memory;
mod origin;
pub mod pool;
pub mod spec;
#[cfg(test)]
mod tests;

pub use check::Check;
pub use fault::{Accessed, Fault, FaultKind, Near, Site};
pub use launch::{GridSpec, Services};
pub use origin::{Access, Source};
pub use pool::Pool;
