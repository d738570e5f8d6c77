//! PTX text and fatbin containers: parsed, decompressed and linked. Bounded everywhere: what comes
//! in is whatever a program handed to the driver. No unsafe code.
#![forbid(unsafe_code)]

pub mod ast;
