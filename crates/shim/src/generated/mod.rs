//! What `cargo xtask codegen` writes from `api/functions.txt`.
#![allow(
    non_snake_case,
    non_upper_case_globals,
    clippy::too_many_arguments,
    unused_imports,
    reason = "the C API's names and shapes; glob imports serve whatever the table needs"
)]

#[rustfmt::skip]
pub mod exports;
#[rustfmt::skip]
pub(crate) mod procs;

/// The Rust types that `api/types.txt` names, and the modules that the table names.
mod types {
    pub(super) use crate::*;
    pub(super) use kedge_cuda_types::abi::*;
    pub(super) use kedge_cuda_types::error::CUresult;
    pub(super) use kedge_cuda_types::handle::*;
    pub(super) use kedge_cuda_types::memory::CUmemLocation;
    pub(super) use std::ffi::{c_char, c_int, c_void};
    pub(super) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

    /// A path that the debugger's interface reserves room for.
    pub(super) type Path4096 = [AtomicU8; 4096];
}
