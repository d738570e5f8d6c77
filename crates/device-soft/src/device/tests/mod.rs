//! The backend against a host that is this process.

mod fixture;
mod memory;
mod ordering;
