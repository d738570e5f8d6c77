//! Jobs of several parts, each stopped by its own supervisor.

use crate::plugins::Rendezvous;

/// The other parts of a job, captured at the same moment as this one. What one part does after it
/// is captured must not be seen by another before it is, so each waits for all.
pub trait Together: Send + Sync + std::fmt::Debug {
    /// This part has done all that takes long: returns when every part has, so that none stands
    /// still for another. It may be told so again.
    fn prepared(&self) -> Result<(), String>;

    /// This part stands still: returns when every part does, or says why they will not.
    fn stopped(&self) -> Result<(), String>;

    /// So many processes are captured: returns when every part is and they may run again, or says
    /// why one is not.
    fn captured(&self, processes: usize) -> Result<(), String>;

    /// What plugins say to those of the other parts while all stand still; `None`: they are alone.
    fn others(&self) -> Option<&dyn Rendezvous> {
        None
    }
}
