//! A job's proxies, and its devices in checkpoints and restarts.

pub(crate) mod gpu;
pub(crate) mod proxies;
pub(crate) mod quiesce;
pub(crate) mod sharing;
