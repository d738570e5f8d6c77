//! Connections between two parts of a job, each with a supervisor of its own, on one host or on
//! two.
//!
//! docs/design/0039-wires.md has the decisions.

mod book;
mod flight;
mod greet;
mod place;
mod tell;
mod tie;

pub(super) use book::{read as read_hosts, write as tell_host};
pub(super) use place::{Here, Host, elsewhere, for_family, publish};
pub(super) use tell::{Told, settle};
pub(super) use tie::tie;

use crate::plugins::error::{Context, PluginError};
use crate::plugins::{Rendezvous, Stage};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// How long one waits for the other parts before it asks whether they still go on.
const LOOK: Duration = Duration::from_millis(500);

/// What a part keeps of a connection whose other end is another part's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Wire {
    /// The connection's, the same at both ends; no other of the image has it.
    name: String,
    /// Whether this end listens at a restart, and the other one connects.
    accepts: bool,
}

fn refused(why: String) -> PluginError {
    PluginError::Refused(why)
}

/// Waits until all parts have reached `stage`.
pub(crate) fn meet(others: &dyn Rendezvous, stage: Stage) -> Result<(), PluginError> {
    while !others.meet(stage, LOOK).map_err(refused)? {
        others.still().map_err(refused)?;
    }
    Ok(())
}

fn say(others: &dyn Rendezvous, name: &str, value: &impl Serialize) -> Result<(), PluginError> {
    let bytes = serde_json::to_vec(value).to(|| "tell the other parts of a socket")?;
    match others.publish(name, &bytes).map_err(refused)? {
        true => Ok(()),
        false => Err(refused(format!(
            "two parts of the job have a connection with the same addresses ({name}): let each host \
             have addresses of its own"
        ))),
    }
}

fn heard<T: DeserializeOwned>(
    others: &dyn Rendezvous,
    name: &str,
) -> Result<Option<T>, PluginError> {
    let Some(bytes) = others.look(name).map_err(refused)? else { return Ok(None) };
    let value = serde_json::from_slice(&bytes);
    value.map(Some).map_err(|e| refused(format!("another part tells nonsense of {name}: {e}")))
}

/// The name under which the end at `local` is told of, on the host `here` if only that reaches it.
fn end(local: SocketAddr, remote: SocketAddr, here: &str) -> String {
    format!("end {local}>{remote}{here}")
}

/// The name of a connection, whichever of its ends is asked.
fn wire(local: SocketAddr, remote: SocketAddr, here: &str) -> String {
    let (one, other) = if local < remote { (local, remote) } else { (remote, local) };
    format!("wire {one}-{other}{here}")
}
