//! A job: what is kept of it on disk, what it is run with, its program, and what is said of it.

pub(crate) mod check;
pub(crate) mod departed;
pub mod jobs;
pub(crate) mod left;
pub(crate) mod missed;
pub(crate) mod mover;
pub(crate) mod pace;
pub(crate) mod parts;
pub mod policy;
pub(crate) mod postscript;
pub(crate) mod program;
pub(crate) mod rank;
pub(crate) mod relayed;
pub(crate) mod shown;
pub(crate) mod stats;
pub(crate) mod tally;
pub(crate) mod trace;
pub(crate) mod turn;
