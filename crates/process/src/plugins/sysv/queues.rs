//! Message queues, with the messages that wait in them.

use super::sys::{self, Access};
use super::table::Row;
use super::{Common, common, is_same, next_id};
use crate::plugins::Blob;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::Capture;
use crate::plugins::world::World;
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Queue {
    common: Common,
    /// The most bytes that it takes.
    limit: u64,
    /// Type and bytes, the first one first.
    messages: Vec<(i64, Blob)>,
}

pub(super) fn save(row: &Row, capture: &mut Capture) -> Result<Queue, PluginError> {
    let what = || format!("read the System V message queue {}", row.id);
    let limit = sys::queue_limit(row.id).to(what)?;
    // No message is longer than all together.
    let longest = row.get("cbytes").max(0) as usize;
    let mut messages = Vec::new();
    while let Some((kind, bytes)) = sys::copy_message(row.id, messages.len(), longest).to(what)? {
        messages.push((kind, capture.blob(&bytes)?));
    }
    Ok(Queue { common: common(row), limit, messages })
}

pub(super) fn make(queue: &Queue, world: &mut World) -> Result<(), PluginError> {
    let Common { id, key, mode, uid, gid } = queue.common;
    let what = || format!("make the System V message queue {id}");
    next_id("msg", id)?;
    let made = sys::make_queue(key, 0o600).to(what)?;
    is_same(made, &queue.common, "message queues")?;
    if sys::queue_limit(id).to(what)? < queue.limit {
        raise("msgmnb", queue.limit);
    }
    sys::own_queue(id, &Access { mode: 0o600, uid, gid }, queue.limit)
        .to(|| format!("give the System V message queue {id} its size (kernel.msgmnb)"))?;
    raise("msgmax", queue.messages.iter().map(|(_, blob)| blob.length).max().unwrap_or(0));
    for (kind, blob) in &queue.messages {
        if *kind <= 0 {
            return Err(damaged(format!("a message of type {kind}")));
        }
        let bytes = world.blob(blob)?;
        sys::send(id, *kind, &bytes).to(|| {
            format!("put a message back into the System V message queue {id} (kernel.msgmax)")
        })?;
    }
    sys::own_queue(id, &Access { mode, uid, gid }, queue.limit).to(what)
}

/// Raises a limit of the new IPC namespace if it is below `least`. Where that is forbidden, what
/// needs more says so.
fn raise(name: &str, least: u64) {
    let path = format!("/proc/sys/kernel/{name}");
    let now = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
    if now.is_some_and(|now: u64| now < least) {
        let _ = std::fs::write(&path, least.to_string());
    }
}
