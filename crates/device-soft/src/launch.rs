//! Grids: what a launch asks for, and what it needs of its device.

use crate::code::Program;
use crate::fault::Fault;
use crate::memory::Spans;
use kedge_protocol::OutputTarget;
use std::sync::Arc;

/// What running kernels ask of their device.
pub trait Services: Send + Sync {
    /// Device `printf` (already formatted) to the program's stdout, `assert` messages to its stderr.
    fn print(&self, target: OutputTarget, bytes: &[u8]);
    /// Device `malloc`: 16-byte aligned, 0 when the heap is exhausted. The range is in the spans.
    fn malloc(&self, bytes: u64) -> u64;
    /// Device `free`; false where nothing was allocated at `addr`.
    fn free(&self, addr: u64) -> bool;
    /// A texture or surface object.
    fn texture(&self, handle: u64) -> Option<Arc<crate::exec::texture::TextureView>>;
}

/// A kernel launch.
pub struct GridSpec {
    pub program: Arc<Program>,
    /// Index in `Program::kernels`.
    pub kernel: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Blocks of a cluster; 1s for none.
    pub cluster: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    /// All blocks are resident at once.
    pub cooperative: bool,
    /// The parameter buffer; shorter than the kernel's is padded with zeros.
    pub params: Vec<u8>,
    /// CU_LIMIT_STACK_SIZE, bytes a thread.
    pub stack_limit: u32,
    pub spans: Arc<Spans>,
    pub services: Arc<dyn Services>,
}

/// Called once, on a worker, when a grid is over.
pub type GridDone = Box<dyn FnOnce(Result<(), Fault>) + Send>;
