//! Instantiated graphs, as the record keeps them.

use kedge_protocol::{CtxId, GraphExecId, Post, StreamOp};
use std::collections::BTreeSet;

/// The messages of a graph that has been made ready to run, or is about to be.
#[derive(Debug)]
pub(super) struct Graph {
    exec: GraphExecId,
    pub(super) nodes: Vec<StreamOp>,
    pub(super) edges: Vec<Post>,
    /// The message that made it ready.
    pub(super) ready: Option<Post>,
    /// Nodes that do nothing for now. They must be made as what they are, to be that again.
    disabled: BTreeSet<u32>,
}

impl Graph {
    pub(super) fn new(exec: GraphExecId) -> Graph {
        let (nodes, edges, disabled) = Default::default();
        Graph { exec, nodes, edges, ready: None, disabled }
    }

    /// Replaces a node, or has it do nothing for now.
    pub(super) fn update(&mut self, node: u32, op: StreamOp) {
        let Some(place) = self.nodes.get_mut(node as usize) else { return };
        if op == (StreamOp::Empty {}) {
            self.disabled.insert(node);
        } else {
            self.disabled.remove(&node);
            *place = op;
        }
    }

    /// What makes it as it is now.
    pub(super) fn posts(&self, ctx: CtxId) -> impl Iterator<Item = Post> {
        let exec = self.exec;
        let begin = std::iter::once(Post::GraphExecBegin { exec, ctx });
        let nodes = self.nodes.iter().map(move |op| Post::GraphExecNode { exec, op: op.clone() });
        let ready = self.ready.iter().cloned();
        let disable = |&node| Post::GraphExecUpdate { exec, node, op: StreamOp::Empty {} };
        let disabled: Vec<_> = self.disabled.iter().map(disable).collect();
        begin.chain(nodes).chain(self.edges.iter().cloned()).chain(ready).chain(disabled)
    }
}
