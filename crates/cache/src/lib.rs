//! The write-back cache: a folder's writes are absorbed by spare memory, and drained.
//!
//! [`ranges`], [`extents`], [`admission`], [`order`] and [`journal`] decide, without any input or
//! output: what is held where, who may write, what is drained next, and what a new daemon finds.
//! The engine around them does it, with tiers that are folders and the folder below; the mount has
//! programs use it without a change; the daemon answers the command.
#![forbid(unsafe_code)]

pub mod admission;
mod adopt;
mod backing;
mod caller;
pub mod control;
mod copies;
pub mod daemon;
mod device;
mod drain;
mod engine;
mod error;
pub mod extents;
mod faults;
mod file;
mod home;
pub mod journal;
mod keep;
mod lease;
mod mount;
mod moves;
mod names;
mod nodes;
mod open;
pub mod order;
pub mod partner;
pub mod places;
mod pool;
pub mod ranges;
mod shadow;
mod size;
pub mod spec;
mod tier;
mod write;

pub use adopt::Recovered;
pub use error::CacheError;
