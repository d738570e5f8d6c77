//! A block: its shared memory, barriers and warps, run by one worker at a time.

use crate::exec::Warp;
use crate::exec::access::SpanCache;
use crate::exec::fragment::{Fragment, State};
use crate::exec::run::Pause;
use crate::exec::warp::{Banks, FaultRecord, Row32};
use crate::fault::Fault;
use crate::launch::Grid;
use crate::spec::{BARRIERS, WARP};
use std::sync::Arc;

/// One of a block's barriers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    /// Counts completions: who waits remembers the one of its arrival.
    pub generation: u32,
    /// Threads that have arrived.
    arrived: u32,
    /// Threads that it waits for; 0: all that have not exited.
    expected: u32,
    /// Arrivals with a true predicate (`bar.red`).
    trues: u32,
    /// `trues` and `arrived` of the last completion.
    pub result: (u32, u32),
}

/// What the warps of a block share.
pub(crate) struct BlockState {
    pub id: [u32; 3],
    /// The last one is the cluster's.
    pub barriers: [Barrier; BARRIERS + 1],
    /// Threads that have not exited.
    pub live: u32,
    shared: Bytes,
    local: Bytes,
}

impl BlockState {
    /// `threads` threads arrive at barrier `id`, `trues` of them with a true predicate. Returns the
    /// generation that they wait to see pass.
    pub(crate) fn arrive(&mut self, id: usize, threads: u32, trues: u32, expected: u32) -> u32 {
        let barrier = &mut self.barriers[id];
        let generation = barrier.generation;
        barrier.arrived += threads;
        barrier.trues += trues;
        barrier.expected = expected;
        self.complete(id);
        generation
    }

    /// Ends the barrier's phase if everyone is there.
    fn complete(&mut self, id: usize) {
        let live = self.live;
        let barrier = &mut self.barriers[id];
        let expected = if barrier.expected == 0 { live } else { barrier.expected };
        if barrier.arrived > 0 && barrier.arrived >= expected {
            barrier.result = (barrier.trues, barrier.arrived);
            barrier.generation = barrier.generation.wrapping_add(1);
            barrier.arrived = 0;
            barrier.trues = 0;
            barrier.expected = 0;
        }
    }

    /// `threads` threads have exited: barriers do not wait for them.
    pub(crate) fn exit(&mut self, threads: u32) {
        self.live = self.live.saturating_sub(threads);
        for id in 0..self.barriers.len() {
            self.complete(id);
        }
    }

    /// Shared memory of the cluster's block `rank`.
    pub(crate) fn shared_of_rank(&mut self, rank: u64) -> Option<*mut u8> {
        (rank == 0).then(|| self.shared.pointer())
    }
}

/// Memory at a multiple of 128 bytes, so that no access is split by chance.
#[derive(Default)]
struct Bytes {
    lines: Vec<Line>,
}

#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct Line([u8; 128]);

impl Bytes {
    fn reserve(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(size_of::<Line>());
        if self.lines.len() < lines {
            // A fresh vector of zeros takes untouched pages from the system.
            self.lines = Vec::new();
            self.lines = vec![Line([0; 128]); lines];
        }
    }

    fn pointer(&mut self) -> *mut u8 {
        self.lines.as_mut_ptr().cast()
    }
}

/// Why a block stopped running.
pub(crate) enum BlockPause {
    Done,
    /// It has had its share; `spinning`: it waits for something outside of itself.
    Share {
        spinning: bool,
    },
    Fault(Fault),
}

/// A resident block.
pub(crate) struct Block {
    /// None: nobody's, memory to be used again.
    grid: Option<Arc<Grid>>,
    state: Box<BlockState>,
    warps: Vec<Warp>,
}

// SAFETY: the raw pointers of the warps lead to the block's own memory, to the grid that it keeps
// alive, and to a worker's span cache that `run` sets anew; one worker at a time has the block.
unsafe impl Send for Block {}

impl Block {
    /// An empty block, to be set up for a grid.
    pub(crate) fn new() -> Box<Block> {
        Box::new(Block {
            grid: None,
            state: Box::new(BlockState {
                id: [0; 3],
                barriers: [Barrier::default(); BARRIERS + 1],
                live: 0,
                shared: Bytes::default(),
                local: Bytes::default(),
            }),
            warps: Vec::new(),
        })
    }

    /// Makes this the block with linear index `index` of `grid`, keeping its memory.
    pub(crate) fn set_up(&mut self, grid: &Arc<Grid>, index: u64) {
        self.grid = Some(grid.clone());
        let spec = &grid.spec;
        let [x, y, _] = spec.grid.map(u64::from);
        let state = &mut *self.state;
        state.id = [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32];
        state.barriers = [Barrier::default(); BARRIERS + 1];
        state.live = grid.threads;
        state.shared.reserve(grid.shared_len as usize + 64);
        let warps = (grid.threads as usize).div_ceil(WARP);
        let local_of_warp = grid.local_len as usize * WARP;
        state.local.reserve(warps * local_of_warp);
        self.warps.truncate(warps);
        while self.warps.len() < warps {
            self.warps.push(Warp::idle());
        }
        for (index, warp) in self.warps.iter_mut().enumerate() {
            warp.set_up(grid, index as u32);
            warp.shared = state.shared.pointer();
            warp.local = state.local.pointer().wrapping_add(index * local_of_warp);
            warp.block = state;
        }
    }

    /// Lets go of the grid, and keeps the memory.
    pub(crate) fn release(&mut self) {
        self.grid = None;
    }

    /// Runs the block for about `slices` warp slices.
    pub(crate) fn run(&mut self, cache: &mut SpanCache, mut slices: u32) -> BlockPause {
        let Some(grid) = self.grid.clone() else { return BlockPause::Done };
        cache.refresh(&grid.spec.spans);
        for warp in &mut self.warps {
            warp.cache = cache;
        }
        loop {
            let mut done = true;
            let mut progress = false;
            let mut spinning = false;
            for warp in &mut self.warps {
                if warp.live == 0 {
                    continue;
                }
                done = false;
                if !warp.wake(&self.state.barriers) {
                    continue;
                }
                progress = true;
                // SAFETY: `set_up` prepared the warp for this grid's program, and this worker alone
                // has the block.
                match unsafe { warp.run() } {
                    Pause::Done | Pause::Blocked => {}
                    Pause::Slice => {
                        spinning |= std::mem::take(&mut warp.yielded);
                        slices = slices.saturating_sub(1);
                    }
                    Pause::Fault => return BlockPause::Fault(self.fault(&grid)),
                }
            }
            if done {
                return BlockPause::Done;
            }
            if !progress {
                return BlockPause::Fault(self.deadlock(&grid));
            }
            if slices == 0 || spinning {
                return BlockPause::Share { spinning };
            }
        }
    }

    /// The fault that a warp recorded.
    fn fault(&mut self, grid: &Grid) -> Fault {
        let found = self.warps.iter_mut().find_map(|warp| {
            let record = warp.fault.take()?;
            Some((warp.index, record))
        });
        let Some((warp, record)) = found else { return self.deadlock(grid) };
        let FaultRecord { kind, lane, address, line, detail } = *record;
        let thread = grid.thread_of(warp as usize * WARP + lane);
        let kernel = grid.kernel().name.clone();
        Fault { kind, kernel, block: self.state.id, thread, address, line, detail }
    }

    /// All warps wait, and none can go on: a barrier that some thread never reaches.
    fn deadlock(&self, grid: &Grid) -> Fault {
        let waiting = self.warps.iter().find(|warp| warp.live != 0);
        let thread = waiting
            .map_or(0, |warp| warp.index as usize * WARP + warp.live.trailing_zeros() as usize);
        let line = waiting.map_or(0, |warp| {
            // SAFETY: a waiting fragment stands at an instruction of the code.
            unsafe { (*warp.code.add(warp.current.pc as usize)).line }
        });
        Fault {
            kind: crate::FaultKind::IllegalInstruction,
            kernel: grid.kernel().name.clone(),
            block: self.state.id,
            thread: grid.thread_of(thread),
            address: None,
            line,
            detail: "deadlock: every thread of the block waits at a barrier or a .sync instruction"
                .into(),
        }
    }
}

impl Warp {
    /// A warp without a grid.
    fn idle() -> Warp {
        let null = std::ptr::null_mut();
        Warp {
            r32: null as *mut Row32,
            r64: std::ptr::null_mut(),
            preds: std::ptr::null_mut(),
            pool32: std::ptr::null(),
            pool64: std::ptr::null(),
            active: 0,
            carry: 0,
            stop: 0,
            fuel: 0,
            shared: std::ptr::null_mut(),
            shared_len: 0,
            local: std::ptr::null_mut(),
            local_len: 0,
            cache: std::ptr::null_mut(),
            grid: std::ptr::null(),
            block: std::ptr::null_mut(),
            operands: std::ptr::null(),
            code: std::ptr::null(),
            current: Fragment {
                mask: 0,
                pc: 0,
                state: State::Ready,
                resumed: false,
                frames: Vec::new(),
                base32: 0,
                base64: 0,
                base_pred: 0,
                local: 0,
                function: 0,
                last_run: 0,
            },
            others: Vec::new(),
            live: 0,
            slices: 0,
            cluster_generation: 0,
            rotate: false,
            yielded: false,
            shape: 0,
            index: 0,
            tid: [Row32([0; WARP]); 3],
            banks: Banks::default(),
            fault: None,
        }
    }

    /// Makes this warp `index` of a new block of `grid`.
    fn set_up(&mut self, grid: &Arc<Grid>, index: u32) {
        let program = &grid.spec.program;
        let function = &program.functions[grid.kernel().function as usize];
        let first = index * WARP as u32;
        let lanes = (grid.threads - first).min(WARP as u32);
        let mask = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        self.pool32 = program.pool32.as_ptr_range().end;
        self.pool64 = program.pool64.as_ptr_range().end;
        self.operands = program.operands.as_ptr();
        self.code = program.code.as_ptr();
        self.shared_len = grid.shared_len;
        self.local_len = grid.local_len;
        let same_shape = self.shape == grid.id && self.index == index;
        self.shape = grid.id;
        self.grid = Arc::as_ptr(grid);
        self.index = index;
        self.carry = 0;
        self.live = mask;
        self.slices = 0;
        self.rotate = false;
        self.yielded = false;
        self.fault = None;
        self.others.clear();
        self.current.frames.clear();
        self.current.mask = mask;
        self.current.pc = function.entry;
        self.current.state = State::Ready;
        self.current.resumed = false;
        self.current.base32 = 0;
        self.current.base64 = 0;
        self.current.base_pred = 0;
        self.current.local = 0;
        self.current.function = grid.kernel().function;
        self.banks.reserve(
            function.frame32 as usize,
            function.frame64 as usize,
            function.frame_pred as usize,
        );
        if !same_shape {
            for lane in 0..WARP {
                let thread = grid.thread_of(first as usize + lane);
                for dimension in 0..3 {
                    self.tid[dimension].0[lane] = thread[dimension];
                }
            }
        }
    }

    /// Lets fragments go on whose barrier has completed. Whether any fragment is ready.
    fn wake(&mut self, barriers: &[Barrier; BARRIERS + 1]) -> bool {
        let mut ready = false;
        for fragment in self.others.iter_mut().chain([&mut self.current]) {
            if let State::Barrier { id, generation } = fragment.state
                && barriers[id as usize].generation != generation
            {
                fragment.state = State::Ready;
                fragment.resumed = true;
            }
            ready |= fragment.state == State::Ready && fragment.mask != 0;
        }
        ready
    }
}
