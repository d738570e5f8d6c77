//! The supervisor of one job, and the folders of all.
//!
//! [`run`] makes the job's folder, listens on its socket, starts the program, gives each process of
//! the job that connects a proxy of its own, and ends when the program does.
//!
//! Each folder stands on those before it: `base`, `job`, `services`, `devices`, `checkpoint`,
//! `restart`; and `run` on all.

mod base;
mod checkpoint;
mod devices;
mod job;
mod restart;
mod run;
mod services;

pub use base::again::{CONFIG, kedge_again};
pub use base::phases::moved as hold_move;
pub use base::signals::{die_of, on_interrupt, signal_group_of};
pub use devices::gpu::is_of_devices;
pub use job::departed::Departure;
pub use job::held::HeldImage;
pub use job::joint::{KEY, far};
pub use job::left::boot;
pub use job::mover::{MoveTo, Supervisor};
pub use job::outcome::Outcome;
pub use job::parts::{Parts, PartsError};
pub use job::postscript::Ended;
pub use job::rank::{RankError, is_one_of_ranks};
pub use job::relayed::{Passed, Sent};
pub use job::shown::Showing;
pub use job::spec::{EXIT_KEDGE_FAILED, JobSpec, RunError};
pub use job::tally::{Checkpoints, LastFailure};
pub use job::{jobs, policy};
pub use kedge_coordinator::{Far, FarError};
pub use restart::back::{End, GoBack};
pub use restart::gate::{GO, MADE, RUNS, WAITS, bring_image};
pub use restart::joining::Joining;
pub use restart::owner::{other_owner, start_as};
pub use restart::resume;
pub use restart::run::{restart, settle_restarts};
pub use restart::spec::{Back, RestartSpec};
pub use run::run;
pub use services::keeper::release;
pub use services::warden::{Return, Together, ward};
pub use services::{control, warm};
