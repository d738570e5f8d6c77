//! PTX text and fatbin containers: parsed, decompressed and linked. Bounded everywhere: what comes
//! in is whatever a program handed to the driver. No unsafe code.
#![forbid(unsafe_code)]

pub mod ast;
pub mod check;
mod error;
pub mod fatbin;
mod lexer;
pub mod link;
mod parse;

/// Compute capability × 10 that software devices stand for. They take PTX for a newer one only
/// where there is no other.
pub const SOFTWARE_DEVICE_SM: u32 = 90;

pub use error::ParseError;
pub use link::{LinkError, Linked, link};
pub use parse::parse;
