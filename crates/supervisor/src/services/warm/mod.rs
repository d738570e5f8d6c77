//! Proxies that are ready before anybody needs them: their devices are started, and their first
//! context is there. They are kept by a process of their own, for one job (`kedge run --warm`) or
//! for all jobs of a user on this node (`kedge warm start`): no job's child, so that no job's
//! checkpoint or end has to do with them.
//!
//! - [`kind`]: what a proxy was made ready for; it serves nobody else.
//! - [`pool`]: keeps so many of one kind. [`server`]: gives them away. [`own`]: the process of one
//!   job.
//! - [`source`]: what a job asks; [`message`]: what is said. [`adopted`]: a proxy that was given.

mod adopted;
mod kind;
mod own;
mod pool;
mod server;
mod source;

pub(crate) use adopted::{Leaving, WarmProxy};
pub use kedge_control::warm::PoolStatus;
pub use kind::Kind;
pub(crate) use own::Own;
pub use server::{Keeping, WarmError, keep, node_socket, status, stop};
pub(crate) use source::Sources;
