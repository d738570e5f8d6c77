//! Bringing a job back from its images, and going back to them.

pub(crate) mod back;
pub(crate) mod candidates;
pub(crate) mod end;
pub(crate) mod first;
pub(crate) mod gate;
pub(crate) mod init;
pub(crate) mod join;
pub(crate) mod joining;
pub(crate) mod owner;
pub(crate) mod part;
pub(crate) mod parts;
pub(crate) mod plugins;
pub(crate) mod ranks;
pub mod resume;
pub(crate) mod run;
pub(crate) mod spec;
