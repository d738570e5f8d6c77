//! The control socket of a job: `control` in its folder, private to the user, on which the process
//! that can trace the job answers. That is the supervisor, or a restarted job's init.

mod client;
mod server;

pub use client::{AskError, Until, checkpoint, hail, kill, migrate, swap};
pub(crate) use client::{TakeError, settle, take};
pub use kedge_control::job::{CodecName, Content, Kill, Migrate, Moving, Order, Progress, Settles};
pub(crate) use server::serve;
