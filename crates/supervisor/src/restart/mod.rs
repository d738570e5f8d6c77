//! Bringing a job back from its images, and going back to them.

pub(crate) mod gate;
pub(crate) mod owner;
pub(crate) mod recover;
pub mod resume;
pub(crate) mod run;
