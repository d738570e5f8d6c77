//! The process engine: stops the processes of a job from outside, captures them into an image while
//! they go on, and brings them back from it.

mod aio;
mod attributes;
mod capture;
mod clocks;
mod error;
mod filters;
mod follow;
mod freeze;
mod home;
mod huge;
mod inject;
pub mod kernel;
mod lineage;
mod machine;
mod maps;
mod numa;
mod oom;
mod pagemap;
pub mod plugins;
mod proc;
mod reap;
mod restart;
mod rseq;
mod several;
mod signal;
mod state;
mod stop;
mod sys;
mod thread;
mod timers;
mod track;
mod translate;
mod vdso;

pub use capture::{Begun, Captured, Options, Stopped, Together, checkpoint};
pub use error::EngineError;
pub use freeze::FrozenClone;
pub use proc::running_since;
pub use reap::{Reaped, reap};
pub use restart::{
    Arrivals, Identity, Next, Owner, Rebuilt, RestartOptions, Restarted, check, holds, lacking,
    restart,
};
pub use signal::{running, runs, signal, waiting};
pub use stop::{Patience, Roots, Standing, leave_alone};
pub use thread::Thread;
pub use track::Tracker;
