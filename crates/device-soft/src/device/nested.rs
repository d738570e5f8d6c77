//! Dynamic parallelism: grids, copies and fills that kernels launch (CUDA programming guide, "CUDA
//! Dynamic Parallelism").
//!
//! A grid is over when its own blocks and all grids that it launched are over; then its tail
//! launches run, one after the other. Launches into one stream of a grid run one after the other; a
//! block has a NULL stream of its own; fire-and-forget launches wait for nothing.

use super::context::Context;
use super::copies::{Fill, Transfer};
use super::runtime::Runtime;
use super::tasks::{Task, lock};
use crate::builtin::launch::{DeviceGrid, DeviceTask, DeviceWork, FIRST_NAMED_STREAM};
use crate::exec::texture::TextureView;
use crate::fault::Fault;
use crate::launch::{GridSpec, Services};
use kedge_cuda_types::CuError;
use kedge_protocol::{Copy3d, OutputTarget, Place};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Grids below the host's one that a launch may be deep.
const MAX_DEPTH: u32 = 24;
/// Launches of one grid that may be waiting (cudaLimitDevRuntimePendingLaunchCount is 2048; there is
/// no reason to be that strict).
const MAX_PENDING: usize = 1 << 16;

/// cudaError_t values (CUDA Runtime API reference).
const LAUNCH_MAX_DEPTH_EXCEEDED: u32 = 65;
const LAUNCH_PENDING_COUNT_EXCEEDED: u32 = 69;

/// cudaStreamTailLaunch and cudaStreamFireAndForget.
const TAIL_LAUNCH: u64 = 3;
const FIRE_AND_FORGET: u64 = 4;

/// A running grid of a program that launches from the device.
pub(super) struct Nested {
    tree: Arc<Tree>,
    parent: Option<(Arc<Nested>, Lane)>,
    depth: u32,
    state: Mutex<State>,
}

/// What all grids of one host launch share.
struct Tree {
    runtime: Arc<Runtime>,
    task: Arc<Task>,
}

/// What a launch runs after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    /// A block's NULL stream, by the block's linear index.
    Block(u64),
    Stream(u64),
    Tail,
    Free,
}

#[derive(Default)]
struct State {
    /// The grid itself while it runs, and its launches that are not over, tails excepted.
    unfinished: usize,
    tails: VecDeque<DeviceWork>,
    /// Streams with a running launch: what waits behind it.
    lanes: HashMap<Lane, VecDeque<DeviceWork>>,
}

impl Nested {
    /// Runs the host's launch `spec`, and ends `task` when all that it launches is over.
    pub(super) fn run(runtime: &Arc<Runtime>, task: &Arc<Task>, spec: GridSpec) {
        let tree = Tree { runtime: Arc::clone(runtime), task: Arc::clone(task) };
        Self::start(Arc::new(tree), None, 0, spec);
    }

    fn start(tree: Arc<Tree>, parent: Option<(Arc<Self>, Lane)>, depth: u32, mut spec: GridSpec) {
        let state = State { unfinished: 1, ..State::default() };
        let node = Arc::new(Self { tree, parent, depth, state: Mutex::new(state) });
        spec.services = Arc::new(Arc::clone(&node));
        let runtime = Arc::clone(&node.tree.runtime);
        runtime.pool.launch(spec, Box::new(move |result| node.blocks_over(result)));
    }

    fn ctx(&self) -> &Arc<Context> {
        &self.tree.task.ctx
    }

    fn start_child(self: &Arc<Self>, lane: Lane, work: DeviceWork) {
        match work.task {
            DeviceTask::Grid(grid) => self.start_grid(lane, grid),
            task => {
                let (node, runtime) = (Arc::clone(self), Arc::clone(&self.tree.runtime));
                runtime.pool.spawn(Box::new(move || {
                    if let Err(error) = move_memory(&node.tree.runtime, &task) {
                        node.ctx().fault(error, "a copy or fill by a kernel, on invalid memory");
                    }
                    Self::child_over(node, lane);
                }));
            }
        }
    }

    fn start_grid(self: &Arc<Self>, lane: Lane, launch: DeviceGrid) {
        let spec = GridSpec {
            program: launch.program,
            kernel: launch.kernel,
            grid: launch.grid,
            block: launch.block,
            cluster: [1; 3],
            shared_bytes: launch.shared_bytes,
            cooperative: false,
            params: launch.params,
            stack_limit: self.ctx().stack_limit(),
            spans: self.ctx().spans(),
            services: Arc::clone(self.ctx()) as _,
        };
        let parent = Some((Arc::clone(self), lane));
        Self::start(Arc::clone(&self.tree), parent, self.depth + 1, spec);
    }

    fn blocks_over(self: Arc<Self>, result: Result<(), Fault>) {
        if let Err(fault) = result {
            self.ctx().fault(fault.kind.error(), &fault.to_string());
        }
        if !self.release() {
            return;
        }
        match self.parent.clone() {
            Some((parent, lane)) => Self::child_over(parent, lane),
            None => self.tree.runtime.complete(&self.tree.task),
        }
    }

    /// What ran in `lane` of this grid is over, and so, perhaps, is the grid.
    fn child_over(mut self: Arc<Self>, mut lane: Lane) {
        // A loop, not recursion: the ends of a long chain of tail launches come all at once.
        loop {
            self.next_in(lane);
            if !self.release() {
                return;
            }
            let Some((parent, next)) = self.parent.clone() else {
                return self.tree.runtime.complete(&self.tree.task);
            };
            (self, lane) = (parent, next);
        }
    }

    /// One of the grid's parts is over. Whether all of it is, tails included.
    fn release(self: &Arc<Self>) -> bool {
        let mut state = lock(&self.state);
        state.unfinished -= 1;
        if state.unfinished > 0 {
            return false;
        }
        let tail = if self.ctx().is_faulted() { None } else { state.tails.pop_front() };
        let Some(tail) = tail else { return true };
        state.unfinished = 1;
        drop(state);
        self.start_child(Lane::Tail, tail);
        false
    }

    /// The running launch of a stream is over: the next one's turn.
    fn next_in(self: &Arc<Self>, lane: Lane) {
        let mut state = lock(&self.state);
        let Some(waiting) = state.lanes.get_mut(&lane) else { return };
        if self.ctx().is_faulted() {
            let dropped = waiting.len();
            state.lanes.remove(&lane);
            // The caller's own release comes after this, so the count stays above 0.
            state.unfinished -= dropped;
            return;
        }
        match waiting.pop_front() {
            Some(next) => {
                drop(state);
                self.start_child(lane, next);
            }
            None => {
                state.lanes.remove(&lane);
            }
        }
    }

    fn lane(work: &DeviceWork) -> Lane {
        match work.stream {
            TAIL_LAUNCH => Lane::Tail,
            FIRE_AND_FORGET => Lane::Free,
            stream if stream >= FIRST_NAMED_STREAM => Lane::Stream(stream),
            _ => Lane::Block(work.launcher),
        }
    }
}

/// A kernel's copy or fill.
///
/// # Errors
/// ILLEGAL_ADDRESS where a byte is not valid.
fn move_memory(runtime: &Runtime, task: &DeviceTask) -> Result<(), CuError> {
    match *task {
        DeviceTask::Copy { to, from, bytes } => {
            let place = |addr| Place::Mapped { addr, pitch: bytes, slice: bytes };
            let (src, dst) = (place(from), place(to));
            let copy = Copy3d { src, dst, width: bytes, height: 1, depth: 1 };
            let transfer = Transfer::new(&copy, |_| Err(CuError::INVALID_HANDLE))?;
            transfer.run(&runtime.memory, &*runtime.host)
        }
        DeviceTask::Fill { to, byte, bytes } => {
            let value = u32::from(byte);
            let fill = Fill { dst: to, pitch: bytes, value, element: 1, width: bytes, height: 1 };
            fill.run(&runtime.memory)
        }
        DeviceTask::Grid(_) => Err(CuError::NOT_SUPPORTED),
    }
}

impl Services for Arc<Nested> {
    fn print(&self, target: OutputTarget, bytes: &[u8]) {
        self.ctx().print(target, bytes);
    }

    fn malloc(&self, bytes: u64) -> u64 {
        self.ctx().malloc(bytes)
    }

    fn free(&self, addr: u64) -> bool {
        self.ctx().free(addr)
    }

    fn texture(&self, handle: u64) -> Option<Arc<TextureView>> {
        self.ctx().texture(handle)
    }

    fn submit(&self, work: DeviceWork) -> Result<(), u32> {
        let lane = Nested::lane(&work);
        if self.depth == MAX_DEPTH && lane != Lane::Tail {
            return Err(LAUNCH_MAX_DEPTH_EXCEEDED);
        }
        let mut state = lock(&self.state);
        if state.unfinished + state.tails.len() > MAX_PENDING {
            return Err(LAUNCH_PENDING_COUNT_EXCEEDED);
        }
        if lane == Lane::Tail {
            state.tails.push_back(work);
            return Ok(());
        }
        state.unfinished += 1;
        if lane != Lane::Free {
            if let Some(waiting) = state.lanes.get_mut(&lane) {
                waiting.push_back(work);
                return Ok(());
            }
            state.lanes.insert(lane, VecDeque::new());
        }
        drop(state);
        self.start_child(lane, work);
        Ok(())
    }
}
