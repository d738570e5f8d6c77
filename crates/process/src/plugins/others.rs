//! The other parts of a job, as this one's plugins see them.

use std::fmt::Debug;
use std::time::Duration;

/// A moment that all parts reach together, in the order in which they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Of a checkpoint: every part has published the ends of its connections.
    Told,
    /// Of a checkpoint: what was on its way between parts has arrived.
    Arrived,
    /// Of a restart: every part has published where it can be reached.
    Offered,
    /// Of a restart: every part's sockets are bound, and connections between parts are there.
    Bound,
}

/// Publish, subscribe and barriers between the parts of one job, for one checkpoint or one restart.
///
/// Each error says why the parts do not go on together, for people.
pub trait Others: Send + Sync + Debug {
    /// Returns this part's name.
    fn name(&self) -> String;

    /// Returns the names of all parts.
    fn parts(&self) -> Result<Vec<String>, String>;

    /// Publishes `value` under `name` for all parts; false if another part has that name.
    fn publish(&self, name: &str, value: &[u8]) -> Result<bool, String>;

    /// Returns what is published under `name`, by whichever part.
    fn look(&self, name: &str) -> Result<Option<Vec<u8>>, String>;

    /// Waits until every part has reached `stage`; false if they have not within `wait`.
    fn meet(&self, stage: Stage, wait: Duration) -> Result<bool, String>;

    /// Tells whether the others still go on: an error once one of them has failed.
    fn still(&self) -> Result<(), String>;

    /// Tells the others why this part cannot go on; so they do not either.
    fn fail(&self, why: &str);
}
