//! Kernel nodes.

use kedge_protocol::{Launch, StreamOp};

/// A kernel launch in a graph.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    launch: Launch,
}

impl Kernel {
    pub(crate) fn from_launch(launch: Launch) -> Self {
        Self { launch }
    }

    pub(crate) fn op(&self) -> StreamOp {
        StreamOp::Launch { launch: self.launch.clone() }
    }
}
