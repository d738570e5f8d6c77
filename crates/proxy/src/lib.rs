//! The process that owns a client's devices: one per client, ended with it.
//!
//! [`serve`] shakes hands, builds the backend and dispatches: the ring's messages become calls of
//! [`kedge_device::Backend`], in order, on one thread that never waits for a device. What takes
//! time answers later, through a [`kedge_device::Done`].

mod account;
mod arrive;
mod arriving;
mod away;
pub mod backend;
mod capture;
mod changes;
mod charge;
mod client_memory;
mod compatibility;
mod control;
mod counts;
mod crossing;
#[cfg(test)]
mod crossing_tests;
mod dispatch;
#[cfg(test)]
mod dispatch_tests;
mod ending;
mod error;
mod executor;
#[cfg(test)]
mod fake;
mod faults;
mod filling;
mod findings;
mod gate;
mod given;
mod hold;
pub mod holder;
mod host;
mod host_fns;
mod limits;
mod local;
pub mod management;
mod memory_first;
mod moving;
pub mod options;
mod outlet;
mod output;
mod owner;
mod peers;
mod phases;
mod places;
mod rebuild;
mod record;
mod remedy;
pub mod remote;
mod restore;
mod room;
mod saved;
mod serve;
mod shared;
mod sharing;
mod source;
mod stats;
mod swap;
mod taken;
mod taking;
mod tickets;
mod trace;
mod usage;
mod visible;
mod wait;
pub mod warm;
mod watch;
mod work;

pub use ending::end_orderly;
pub use serve::{ServeError, serve};
