//! Taking checkpoints of a job, and what stands still for more than that: moves, the end.

pub(crate) mod amount;
pub(crate) mod ask;
pub(crate) mod checkpointer;
pub(crate) mod departing;
pub(crate) mod ending;
pub(crate) mod error;
pub(crate) mod joint;
pub(crate) mod launcher;
pub(crate) mod launches;
pub(crate) mod measure;
pub(crate) mod meeting;
pub(crate) mod moving;
pub(crate) mod recovery;
pub(crate) mod rest;
pub(crate) mod server;
pub(crate) mod standing;
pub(crate) mod swap;
pub(crate) mod together;
pub(crate) mod verify;
pub(crate) mod watch;
