//! The backend against a host that is this process.

mod builtins;
mod fixture;
mod kernels;
mod memory;
mod ordering;
mod snapshot;
mod snapshot_hostile;
mod world;
