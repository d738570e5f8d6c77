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
use crate::builtin::launch::{DeviceGrid, DeviceTask, DeviceWork, Planes};
use crate::builtin::query::Question;
use crate::builtin::runtime_error::{
    INVALID_VALUE, LAUNCH_MAX_DEPTH_EXCEEDED, LAUNCH_PENDING_COUNT_EXCEEDED,
};
use crate::builtin::stream::FIRST_NAMED;
use crate::exec::texture::TextureView;
use crate::fault::Fault;
use crate::launch::{GridSpec, Services};
use kedge_cuda_types::CuError;
use kedge_protocol::{Copy3d, OutputTarget};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Grids below the host's one that a launch may be deep.
const MAX_DEPTH: u32 = 24;
/// Launches of one grid that may be waiting (cudaLimitDevRuntimePendingLaunchCount is 2048; there
/// is no reason to be that strict).
const MAX_PENDING: usize = 1 << 16;

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
    /// Each event's last record.
    events: HashMap<u64, u64>,
    /// Records that are not over: the streams that wait for them.
    records: HashMap<u64, Vec<Lane>>,
    last_record: u64,
    /// Of the grid's threads.
    errors: HashMap<u64, u32>,
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
            DeviceTask::Copy(copy) => {
                self.start_move(lane, move |runtime| copy_memory(runtime, &copy))
            }
            DeviceTask::Fill(planes) => {
                self.start_move(lane, move |runtime| fill(runtime, &planes))
            }
            DeviceTask::Record(record) => {
                let waiting = lock(&self.state).records.remove(&record).unwrap_or_default();
                self.end_later(waiting.into_iter().chain([lane]));
            }
            DeviceTask::Wait(record) => {
                if let Some(waiting) = lock(&self.state).records.get_mut(&record) {
                    return waiting.push(lane);
                }
                self.end_later([lane]);
            }
        }
    }

    fn start_move(
        self: &Arc<Self>,
        lane: Lane,
        run: impl FnOnce(&Runtime) -> Result<(), CuError> + Send + 'static,
    ) {
        let node = Arc::clone(self);
        self.tree.runtime.pool.spawn(Box::new(move || {
            if let Err(error) = run(&node.tree.runtime) {
                node.ctx().fault(error, "a copy or fill by a kernel, on invalid memory");
            }
            Self::child_over(node, lane);
        }));
    }

    /// Ends what runs in these streams, by other workers: a long chain of records and waits would
    /// otherwise be a deep recursion.
    fn end_later(self: &Arc<Self>, lanes: impl IntoIterator<Item = Lane>) {
        for lane in lanes {
            self.start_move(lane, |_| Ok(()));
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
            self.ctx().fault_of_kernel(&fault);
        }
        self.ctx().tell_findings();
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
            // What was dropped may have been records, which others wait for.
            let waiting: Vec<Lane> = state.records.drain().flat_map(|(_, lanes)| lanes).collect();
            drop(state);
            self.end_later(waiting);
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

    /// # Errors
    /// A cudaError_t where the grid cannot take the work.
    fn admit(&self, state: &State, lane: Lane, task: &DeviceTask) -> Result<(), u32> {
        let event = matches!(task, DeviceTask::Record(_) | DeviceTask::Wait(_));
        // CUDA programming guide: neither stream can record events or wait for them.
        if event && matches!(lane, Lane::Tail | Lane::Free) {
            return Err(INVALID_VALUE);
        }
        if self.depth == MAX_DEPTH && matches!(task, DeviceTask::Grid(_)) && lane != Lane::Tail {
            return Err(LAUNCH_MAX_DEPTH_EXCEEDED);
        }
        if state.unfinished + state.tails.len() > MAX_PENDING {
            return Err(LAUNCH_PENDING_COUNT_EXCEEDED);
        }
        Ok(())
    }

    fn lane(work: &DeviceWork) -> Lane {
        match work.stream {
            TAIL_LAUNCH => Lane::Tail,
            FIRE_AND_FORGET => Lane::Free,
            stream if stream >= FIRST_NAMED => Lane::Stream(stream),
            _ => Lane::Block(work.launcher),
        }
    }
}

/// # Errors
/// ILLEGAL_ADDRESS where a byte is not valid.
fn copy_memory(runtime: &Runtime, copy: &Copy3d) -> Result<(), CuError> {
    let transfer = Transfer::new(copy, |_| Err(CuError::INVALID_HANDLE))?;
    transfer.run(&runtime.memory, &*runtime.host)
}

/// # Errors
/// ILLEGAL_ADDRESS where a byte is not valid.
fn fill(runtime: &Runtime, planes: &Planes) -> Result<(), CuError> {
    let Planes { to, byte, pitch, slice, width, height, depth } = *planes;
    // Planes that all lie in one place are filled once.
    let depth = if slice == 0 { depth.min(1) } else { depth };
    for plane in 0..depth {
        let dst = slice.checked_mul(plane).and_then(|offset| to.checked_add(offset));
        let dst = dst.ok_or(CuError::ILLEGAL_ADDRESS)?;
        let fill = Fill { dst, pitch, value: byte.into(), element: 1, width, height };
        if fill.bytes() == 0 {
            break;
        }
        fill.run(&runtime.memory)?;
    }
    Ok(())
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

    fn answer(&self, question: Question) -> Option<u64> {
        self.ctx().answer(question)
    }

    fn record(&self, event: u64) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.events.len() >= MAX_PENDING && !state.events.contains_key(&event) {
            return None;
        }
        state.last_record += 1;
        let record = state.last_record;
        state.events.insert(event, record);
        state.records.insert(record, Vec::new());
        Some(record)
    }

    fn recorded(&self, event: u64) -> Option<u64> {
        let state = lock(&self.state);
        state.events.get(&event).copied().filter(|record| state.records.contains_key(record))
    }

    fn last_error(&self, thread: u64, forget: bool) -> u32 {
        let errors = &mut lock(&self.state).errors;
        let error = if forget { errors.remove(&thread) } else { errors.get(&thread).copied() };
        error.unwrap_or(0)
    }

    fn set_last_error(&self, thread: u64, error: u32) {
        let errors = &mut lock(&self.state).errors;
        // A bound, not a rule of CUDA's: threads that fail by the thousand are told of some of it.
        if errors.len() < MAX_PENDING {
            errors.insert(thread, error);
        }
    }

    fn submit(&self, work: DeviceWork) -> Result<(), u32> {
        let lane = Nested::lane(&work);
        let mut state = lock(&self.state);
        if let Err(error) = self.admit(&state, lane, &work.task) {
            if let DeviceTask::Record(record) = work.task {
                state.records.remove(&record);
            }
            return Err(error);
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
