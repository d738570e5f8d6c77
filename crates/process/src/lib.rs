//! The process engine: stops processes from outside and, so far, holds their memory in a frozen clone.

mod error;
mod freeze;
pub mod plugins;
mod sys;
mod thread;

pub use error::EngineError;
pub use freeze::FrozenClone;
pub use thread::Thread;
