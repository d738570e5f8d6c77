//! What a device's work is called, and when it began, where the program is traced.

use super::runtime::Runtime;
use super::tables::Tables;
use super::tasks::Task;
use super::work::Work;
use crate::fault::demangled;
use kedge_cuda_types::arena::{device_of, is_shared};
use kedge_device::trace::{Done, Ran};
use kedge_protocol::{Copy3d, Place, Scattered, StreamId, StreamOp};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is told of a task.
pub(super) struct Label {
    stream: StreamId,
    what: Done,
    name: String,
    bytes: u64,
    /// By the tracer's clock; 0 until then, and of what never ran.
    begun: Arc<AtomicU64>,
}

impl Label {
    fn new(stream: StreamId, what: Done, name: impl Into<String>, bytes: u64) -> Label {
        Label { stream, what, name: name.into(), bytes, begun: Arc::default() }
    }

    /// The label of a graph's end, and the work that begins it.
    pub(super) fn of_graph(stream: StreamId) -> (Label, Work) {
        let label = Label::new(stream, Done::Graph, "graph", 0);
        let begins = Work::Begin(label.begun.clone());
        (label, begins)
    }
}

impl Tables {
    /// Returns what is told of an operation; `None` of what takes no time.
    pub(super) fn label(&self, stream: StreamId, op: &StreamOp) -> Option<Label> {
        let label = |what, name: &str, bytes| Some(Label::new(stream, what, name, bytes));
        match op {
            StreamOp::Launch { launch } => {
                let module = self.modules.get(&launch.kernel.module)?;
                let index = module.launched_by(launch.kernel.index)?;
                let kernel = module.program.kernels.get(index as usize)?;
                label(Done::Kernel, &demangled(&kernel.name), 0)
            }
            StreamOp::Copy { copy } => {
                label(Done::Copy, direction(copy), copy.shape().bytes().unwrap_or(0))
            }
            StreamOp::CopyInline { bytes, .. } => {
                label(Done::Copy, "copy to device", bytes.len() as u64)
            }
            StreamOp::Scatter { pieces } => {
                let sum = |sum: u64, piece: &Scattered| sum.saturating_add(piece.bytes);
                label(Done::Copy, "copy to device", pieces.iter().fold(0, sum))
            }
            StreamOp::Memset { element, width, height, .. } => {
                let bytes = u64::from(*element).saturating_mul(*width).saturating_mul(*height);
                label(Done::Copy, "memset", bytes)
            }
            StreamOp::HostFn { .. } => label(Done::Host, "host function", 0),
            _ => None,
        }
    }
}

/// What a copy is called, by where it comes from and goes.
fn direction(copy: &Copy3d) -> &'static str {
    let on_device = |place| match place {
        Place::Mapped { addr, .. } => device_of(addr).is_some() || !is_shared(addr),
        Place::Array { .. } => true,
        Place::Client { .. } => false,
    };
    match (on_device(copy.src), on_device(copy.dst)) {
        (false, true) => "copy to device",
        (true, false) => "copy from device",
        (true, true) => "copy on device",
        (false, false) => "copy on host",
    }
}

impl Runtime {
    /// Notes when a task begins.
    pub(super) fn begins(&self, task: &Task) {
        let (Some(tracer), Some(label)) = (&self.tracer, task.label()) else { return };
        if label.what != Done::Graph {
            label.begun.store(tracer.now(), Ordering::Relaxed);
        }
    }

    /// Notes when a graph begins.
    pub(super) fn graph_begins(&self, begun: &AtomicU64) {
        if let Some(tracer) = &self.tracer {
            begun.store(tracer.now(), Ordering::Relaxed);
        }
    }

    /// Tells of a task that is over, if it ever began. What runs after it has not begun.
    pub(super) fn ends(&self, task: &Task) {
        let (Some(tracer), Some(label)) = (&self.tracer, task.label()) else { return };
        let begin = label.begun.load(Ordering::Relaxed);
        if begin == 0 {
            return;
        }
        tracer.ran(&Ran {
            what: label.what,
            name: &label.name,
            device: task.ctx.device,
            stream: label.stream,
            bytes: label.bytes,
            begin,
            end: tracer.now(),
        });
    }
}
