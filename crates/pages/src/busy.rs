//! Streams whose work is not known to be over.

use crate::types::{Attach, NodeId, StreamId, Ticket};
use std::collections::BTreeMap;

/// Streams with work, and what kind of work that is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Busy(BTreeMap<(NodeId, StreamId), Work>);

#[derive(Debug, Clone, Copy, Default)]
struct Work {
    /// A kernel is among it, which may touch anything that its stream may.
    kernel: bool,
    /// It touches regions that are not attached to its stream.
    foreign: bool,
    /// When the last of it was posted.
    posted: u64,
}

/// A stream that has to be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocking {
    pub(crate) node: NodeId,
    pub(crate) stream: StreamId,
    pub(crate) kernel: bool,
}

impl Busy {
    pub(crate) fn begin(
        &mut self,
        node: NodeId,
        stream: StreamId,
        kernel: bool,
        foreign: bool,
        now: u64,
    ) {
        let work = self.0.entry((node, stream)).or_default();
        work.posted = now;
        work.kernel |= kernel;
        work.foreign |= foreign;
    }

    /// Ends a stream's work if none was posted after `ticket`.
    pub(crate) fn end(&mut self, node: NodeId, stream: StreamId, ticket: Ticket) {
        if self.0.get(&(node, stream)).is_some_and(|work| work.posted <= ticket.0) {
            self.0.remove(&(node, stream));
        }
    }

    /// Ends a node's work of which none was posted after `ticket`.
    pub(crate) fn end_until(&mut self, node: NodeId, ticket: Ticket) {
        self.0.retain(|(of, _), work| *of != node || work.posted > ticket.0);
    }

    /// Ends all of a node's, which is gone.
    pub(crate) fn end_node(&mut self, node: NodeId) {
        self.0.retain(|(of, _), _| *of != node);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the streams whose work may touch a region, other than the one whose host function
    /// asks: the work behind that has not begun.
    pub(crate) fn blocking(&self, attach: Attach, by: Option<StreamId>) -> Vec<Blocking> {
        let may = |stream: StreamId, work: &Work| {
            let own = match attach {
                Attach::Global => true,
                Attach::Host => false,
                Attach::Stream(of) => of == stream,
            };
            Some(stream) != by && (own || work.foreign)
        };
        let touching = self.0.iter().filter(|((_, stream), work)| may(*stream, work));
        touching
            .map(|(&(node, stream), work)| Blocking { node, stream, kernel: work.kernel })
            .collect()
    }

    /// Whether some work touches regions that are not attached to its stream.
    pub(crate) fn any_foreign(&self) -> bool {
        self.0.values().any(|work| work.foreign)
    }

    /// Whether no work may touch a region.
    pub(crate) fn is_idle_for(&self, attach: Attach) -> bool {
        self.0.is_empty() || self.blocking(attach, None).is_empty()
    }
}
