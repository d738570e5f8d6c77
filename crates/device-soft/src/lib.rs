//! A CUDA device in software: PTX, lowered to pre-decoded instructions and executed warp by warp.
//!
//! - [`code`]: instructions, functions and [`code::Program`], what a module becomes.
//! - [`lower`]: from a linked PTX module to a program.
//! - [`exec`]: warps, register banks and the instruction handlers, by family.
//! - [`memory`]: the spans of valid addresses, and the windows of shared, local and param space.
//! - [`launch`], [`pool`]: grids, and the OS threads that run their blocks.
//! - [`builtin`]: functions that programs call and nobody defines (`vprintf`, `malloc`, …).
//! - [`math`]: one lane's arithmetic, as pure functions.
//! - [`device`]: the [`kedge_device::Backend`].

mod block;
pub mod builtin;
pub mod code;
pub mod device;
pub mod exec;
pub mod fault;
pub mod launch;
pub mod lower;
pub mod math;
pub mod memory;
pub mod pool;
pub mod spec;
#[cfg(test)]
mod tests;

pub use fault::{Fault, FaultKind};
pub use launch::{GridSpec, Services};
pub use pool::Pool;
