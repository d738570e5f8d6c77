//! kedge's libcuda.so.1: the CUDA driver API of an unmodified program.
//!
//! A call enters through [`entry`] at an export that is generated from `api/functions.txt`, runs in
//! the module of its subject, and reaches the proxy, if it must, through [`session`]. All semantics
//! that need no device live here: handles, contexts, capture, graphs, address allocation, queries.
#![allow(
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "implementations carry their C symbol's name, arguments and safety contract"
)]

/// Tells this library from NVIDIA's: a proxy that finds it in the driver's place looks further.
#[unsafe(no_mangle)]
pub static kedge_shim: u8 = 1;

mod callback;
mod capture;
mod context;
mod device;
mod entry;
mod error;
mod event;
mod ffi;
mod function;
pub mod generated;
mod graph;
mod green;
mod handle;
mod init;
mod launch;
mod library;
mod log;
mod memory;
mod module;
mod occupancy;
mod per_thread;
#[cfg(feature = "private-tables")]
mod private_tables;
#[cfg(not(feature = "private-tables"))]
#[path = "private_tables_absent.rs"]
mod private_tables;
mod procaddress;
mod profiler;
mod session;
mod stream;
