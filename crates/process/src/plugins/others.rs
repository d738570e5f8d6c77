//! The other parts of a joint job, as this part's plugins see them.

use std::fmt::Debug;
use std::time::Duration;

/// A point in a checkpoint or a restart that all parts reach before one goes on; in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Checkpoint: every part has published the ends of its connections.
    Told,
    /// Checkpoint: the data in flight between parts has arrived.
    Arrived,
    /// Restart: every part has published the addresses at which it can be reached.
    Offered,
    /// Restart: every part's sockets are bound, and the connections between parts are made.
    Bound,
}

/// Publish, subscribe and barriers between the parts of a joint job, for one checkpoint or restart.
///
/// # Errors
/// Every method that returns a `Result` fails once the parts cannot go on together; the text says
/// why, for people.
pub trait Rendezvous: Send + Sync + Debug {
    /// Returns this part's name.
    fn name(&self) -> String;

    /// Returns the names of all parts.
    fn parts(&self) -> Result<Vec<String>, String>;

    /// Publishes `value` under `name` for all parts; returns false if another part has published
    /// that name.
    fn publish(&self, name: &str, value: &[u8]) -> Result<bool, String>;

    /// Returns the value that a part has published under `name`.
    fn look(&self, name: &str) -> Result<Option<Vec<u8>>, String>;

    /// Waits until every part has reached `stage`; returns false if `wait` ends first.
    fn meet(&self, stage: Stage, wait: Duration) -> Result<bool, String>;

    /// Checks that no other part has failed.
    fn still(&self) -> Result<(), String>;

    /// Tells the other parts why this one cannot go on, so that they stop as well.
    fn fail(&self, why: &str);
}
