//! Grids: what a launch asks for, what it needs of its device, and how far it is.

use crate::block::Block;
use crate::builtin::launch::DeviceWork;
use crate::builtin::query::Question;
use crate::code::{Kernel, Program};
use crate::fault::{Fault, FaultKind};
use crate::memory::Spans;
use crate::spec::{GLOBAL_UNIT, MAX_CLUSTER, SHARED_UNIT, WARP};
use kedge_cuda_types::CuError;
use kedge_protocol::OutputTarget;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What running kernels ask of their device.
pub trait Services: Send + Sync {
    /// Device `printf` (already formatted) to the program's stdout, `assert` messages to its
    /// stderr.
    fn print(&self, target: OutputTarget, bytes: &[u8]);
    /// Device `malloc`: 16-byte aligned, 0 when the heap is exhausted. The whole heap had better be
    /// one span: a change of the spans makes every worker look its addresses up anew.
    fn malloc(&self, bytes: u64) -> u64;
    /// Device `free`; false where nothing was allocated at `addr`.
    fn free(&self, addr: u64) -> bool;
    /// A texture or surface object.
    fn texture(&self, handle: u64) -> Option<Arc<crate::exec::texture::TextureView>>;
    /// A launch, copy or fill by a kernel, for programs that do that; a cudaError_t where it cannot
    /// be.
    fn submit(&self, work: DeviceWork) -> Result<(), u32> {
        let _ = work;
        Err(CuError::NOT_SUPPORTED.0)
    }
    /// Begins a new record of an event, for programs that `submit`; None where events cannot be.
    fn record(&self, event: u64) -> Option<u64> {
        let _ = event;
        None
    }
    /// The last record of an event, if it is not over.
    fn recorded(&self, event: u64) -> Option<u64> {
        let _ = event;
        None
    }
    /// The last error of a thread of the grid's; `forget` makes it none.
    fn last_error(&self, thread: u64, forget: bool) -> u32 {
        let _ = (thread, forget);
        0
    }
    fn set_last_error(&self, thread: u64, error: u32) {
        let _ = (thread, error);
    }
    /// What a kernel asks about its device; None where there is no such thing.
    fn answer(&self, question: Question) -> Option<u64> {
        let _ = question;
        None
    }
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

/// Blocks of a grid that are resident at once, unless it is cooperative. A block that waits for a
/// later one finds it running up to here; what a multiprocessor could hold is less.
const MAX_RESIDENT: usize = 4096;

/// A grid while it runs.
pub(crate) struct Grid {
    pub spec: GridSpec,
    pub params: Vec<u8>,
    /// Threads of a block.
    pub threads: u32,
    /// Static, dynamic and reserved shared memory in whole units, bytes.
    pub shared_len: u64,
    /// Where the reserved part starts, and the rest ends; here it is the last.
    pub reserved_base: u32,
    /// Where dynamic shared memory starts.
    pub dynamic_base: u32,
    /// Local memory a thread, bytes.
    pub local_len: u64,
    pub id: u64,
    /// Where a cooperative grid's blocks synchronise (`%envreg1`, `%envreg2`): device memory that
    /// is zero at first. 0 for other grids.
    pub workspace: u64,
    /// Blocks, or clusters of them.
    total: u64,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    next: u64,
    running: u32,
    /// Started, and set aside.
    parked: VecDeque<Box<Block>>,
    /// The block that was set aside last was waiting for something: for a later block, perhaps.
    waiting: bool,
    fault: Option<Fault>,
    done: Option<GridDone>,
}

/// A block to run.
pub(crate) enum Unit {
    New(u64),
    Parked(Box<Block>),
}

impl Grid {
    pub(crate) fn new(mut spec: GridSpec, done: GridDone) -> Arc<Grid> {
        spec.cluster = spec.cluster.map(|blocks| blocks.max(1));
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let kernel = &spec.program.kernels[spec.kernel as usize];
        let mut params = spec.params.clone();
        // As of memory, whole units can be read: compilers widen loads of parameters, too.
        let bytes = params.len().max(kernel.param_bytes as usize);
        params.resize(bytes.next_multiple_of(GLOBAL_UNIT as usize), 0);
        let threads = spec.block.iter().product::<u32>();
        let dynamic_base = kernel.shared_bytes.next_multiple_of(16);
        // Blocks get whole units, as on hardware: a wide load may reach into the last one's rest.
        let asked = u64::from(dynamic_base) + u64::from(spec.shared_bytes);
        let reserved_base = asked.next_multiple_of(SHARED_UNIT);
        let shared_len = match kernel.reserved_shared {
            // A program that is checked gets what it has asked for.
            0 if spec.program.checker.is_some() => asked,
            reserved => reserved_base + u64::from(reserved),
        };
        // A kernel that only calls what is known at load needs no more than its own frames.
        let local = if kernel.unbounded_stack {
            u64::from(kernel.local_bytes) + u64::from(spec.stack_limit.max(1024))
        } else {
            u64::from(kernel.local_bytes)
        };
        let shape = spec.grid.iter().zip(spec.cluster);
        let total = shape.map(|(&blocks, cluster)| u64::from(blocks / cluster)).product();
        let progress = Progress { done: Some(done), ..Progress::default() };
        let workspace = if spec.cooperative { new_workspace(&*spec.services) } else { 0 };
        Arc::new(Grid {
            params,
            threads,
            shared_len,
            reserved_base: u32::try_from(reserved_base).unwrap_or(u32::MAX),
            dynamic_base,
            local_len: local.next_multiple_of(16),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            workspace,
            total,
            progress: Mutex::new(progress),
            spec,
        })
    }

    /// Why the grid cannot run at all.
    pub(crate) fn refusal(&self) -> Option<Fault> {
        let kernel = self.kernel();
        let detail = match &kernel.unsupported {
            Some(what) => what.clone(),
            None if self.threads == 0 || self.threads > crate::spec::MAX_THREADS_PER_BLOCK => {
                "a block has 1 to 1024 threads".into()
            }
            None if !self.clusters_fit() => {
                format!("a cluster has 1 to {MAX_CLUSTER} blocks, and divides the grid")
            }
            None => return None,
        };
        Some(Fault {
            kind: FaultKind::NotSupported,
            kernel: kernel.name.clone(),
            block: [0; 3],
            thread: [0; 3],
            address: None,
            site: None,
            line: 0,
            detail,
        })
    }

    fn clusters_fit(&self) -> bool {
        let GridSpec { grid, cluster, .. } = &self.spec;
        let blocks = cluster.iter().map(|&n| u64::from(n)).product::<u64>();
        blocks <= u64::from(MAX_CLUSTER) && grid.iter().zip(cluster).all(|(g, c)| g % c == 0)
    }

    pub(crate) fn kernel(&self) -> &Kernel {
        &self.spec.program.kernels[self.spec.kernel as usize]
    }

    /// `%tid` of the block's thread `index`.
    pub(crate) fn thread_of(&self, index: usize) -> [u32; 3] {
        let [x, y, _] = self.spec.block;
        let index = index as u32;
        [index % x, index / x % y, index / x / y]
    }

    /// Warps of a block.
    pub(crate) fn warps(&self) -> u32 {
        self.threads.div_ceil(WARP as u32)
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The next block to run, if one is not running yet.
    pub(crate) fn take(&self) -> Option<Unit> {
        let mut progress = self.lock();
        if progress.fault.is_some() {
            return None;
        }
        let resident = progress.running as usize + progress.parked.len();
        let room = self.spec.cooperative || resident < MAX_RESIDENT;
        let fresh = progress.parked.is_empty() || progress.waiting || self.spec.cooperative;
        let unit = if progress.next < self.total && room && fresh {
            progress.next += 1;
            Unit::New(progress.next - 1)
        } else {
            Unit::Parked(progress.parked.pop_front()?)
        };
        progress.running += 1;
        Some(unit)
    }

    /// Whether one worker is enough.
    pub(crate) fn is_single(&self) -> bool {
        self.total <= 1
    }

    /// Whether `take` would give something.
    pub(crate) fn has_work(&self) -> bool {
        let progress = self.lock();
        progress.fault.is_none() && (progress.next < self.total || !progress.parked.is_empty())
    }

    /// A block that is to run on later.
    pub(crate) fn park(&self, block: Box<Block>, waiting: bool) {
        let mut progress = self.lock();
        progress.running -= 1;
        progress.waiting = waiting;
        if progress.fault.is_none() {
            progress.parked.push_back(block);
        }
        self.end_if_over(progress);
    }

    /// A block is over.
    pub(crate) fn finish(&self, fault: Option<Fault>) {
        let mut progress = self.lock();
        progress.running -= 1;
        if let Some(fault) = fault
            && progress.fault.is_none()
        {
            progress.fault = Some(fault);
        }
        self.end_if_over(progress);
    }

    /// Ends the grid without running it.
    pub(crate) fn refuse(&self, fault: Option<Fault>) {
        let mut progress = self.lock();
        progress.next = self.total;
        progress.fault = fault;
        self.end_if_over(progress);
    }

    fn end_if_over(&self, mut progress: MutexGuard<'_, Progress>) {
        let parked = if progress.fault.is_some() {
            std::mem::take(&mut progress.parked)
        } else {
            VecDeque::new()
        };
        let all = progress.next >= self.total && progress.parked.is_empty();
        if progress.running > 0 || !(all || progress.fault.is_some()) {
            return;
        }
        let Some(done) = progress.done.take() else { return };
        let result = progress.fault.clone().map_or(Ok(()), Err);
        drop(progress);
        drop(parked);
        if self.workspace != 0 {
            self.spec.services.free(self.workspace);
        }
        done(result);
    }
}

/// What a cooperative grid's barrier needs; 8 bytes are used.
const WORKSPACE_BYTES: usize = 64;

/// Zeroed device memory; 0 where there is none, which the grid's first barrier finds.
fn new_workspace(services: &dyn Services) -> u64 {
    let workspace = services.malloc(WORKSPACE_BYTES as u64);
    if workspace != 0 {
        // SAFETY: the heap has just given this memory of this process to the grid alone.
        unsafe { std::ptr::write_bytes(workspace as *mut u8, 0, WORKSPACE_BYTES) };
    }
    workspace
}
