//! What a client asks its devices for, counted.

use kedge_protocol::{Message, Post, StreamOp};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the client has asked for so far. One thread alone counts: the one that carries messages
/// out.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) launches: AtomicU64,
    pub(crate) copies: AtomicU64,
    /// Whether the devices' memory is swapped out.
    pub(crate) swapped_out: AtomicBool,
}

impl Counts {
    /// Counts a message that is about to be carried out.
    #[inline]
    pub(crate) fn count(&self, message: &Message) {
        let Message::Post { post: Post::Enqueue { op, .. } } = message else { return };
        match op {
            StreamOp::Launch { .. } | StreamOp::GraphLaunch { .. } => add_one(&self.launches),
            StreamOp::Copy { .. } | StreamOp::CopyInline { .. } | StreamOp::Scatter { .. } => {
                add_one(&self.copies);
            }
            _ => {}
        }
    }
}

/// Nobody else adds, so that no instruction needs to lock the bus.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{CtxId, StreamId};

    fn enqueue(op: StreamOp) -> Message {
        Message::Post { post: Post::Enqueue { stream: StreamId(1), op } }
    }

    #[test]
    fn launches_and_copies_are_counted_and_nothing_else() {
        let counts = Counts::default();
        let graph = StreamOp::GraphLaunch { exec: kedge_protocol::GraphExecId(1) };
        let inline = StreamOp::CopyInline { dst: 0, bytes: Default::default() };
        for op in [graph.clone(), graph, inline, StreamOp::Empty {}] {
            counts.count(&enqueue(op));
        }
        counts.count(&Message::Post { post: Post::CtxDestroy { ctx: CtxId(1) } });
        let told = [&counts.launches, &counts.copies].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(told, [2, 1]);
    }
}
