//! A block, or a cluster of blocks: shared memory, barriers and warps, run by one worker at a time.

mod state;

use crate::check::Watch;
use crate::exec::Warp;
use crate::exec::access::SpanCache;
use crate::exec::fragment::{Fragment, State};
use crate::exec::run::Pause;
use crate::exec::warp::{Banks, FaultRecord, Row32};
use crate::fault::{Accessed, Fault, Site};
use crate::launch::Grid;
use crate::spec::WARP;
pub(crate) use state::BlockState;
use state::Cluster;
use std::sync::Arc;
use std::time::Instant;

/// Why a block stopped running.
pub(crate) enum BlockPause {
    Done,
    /// It has had its share; `spinning`: it waits for something outside of itself.
    Share {
        spinning: bool,
    },
    Fault(Fault),
}

/// A resident block, with the other blocks of its cluster.
pub(crate) struct Block {
    /// None: nobody's, memory to be used again.
    grid: Option<Arc<Grid>>,
    /// By rank.
    members: Vec<Member>,
    cluster: Box<Cluster>,
}

/// One block of a cluster.
struct Member {
    state: Box<BlockState>,
    warps: Vec<Warp>,
}

// SAFETY: the raw pointers of the warps lead to the block's own memory, to the grid that it keeps
// alive, and to a worker's span cache that `run` sets anew; one worker at a time has the block.
unsafe impl Send for Block {}

impl Block {
    /// An empty block, to be set up for a grid.
    pub(crate) fn new() -> Box<Block> {
        Box::new(Block { grid: None, members: Vec::new(), cluster: Box::default() })
    }

    /// Makes this the block, or the cluster, with linear index `index` of `grid`, keeping its
    /// memory.
    pub(crate) fn set_up(&mut self, grid: &Arc<Grid>, index: u64) {
        self.grid = Some(grid.clone());
        let spec = &grid.spec;
        let shape = spec.cluster;
        let blocks = shape.iter().product::<u32>() as usize;
        let [x, y] = [0, 1].map(|d: usize| u64::from(spec.grid[d] / shape[d]));
        let cluster = [index % x, index / x % y, index / x / y];
        self.members.truncate(blocks);
        while self.members.len() < blocks {
            self.members.push(Member { state: BlockState::new(), warps: Vec::new() });
        }
        self.cluster.restart(grid.threads * blocks as u32);
        for (rank, member) in self.members.iter_mut().enumerate() {
            let rank = rank as u32;
            let place = [rank % shape[0], rank / shape[0] % shape[1], rank / shape[0] / shape[1]];
            let id = std::array::from_fn(|d| cluster[d] as u32 * shape[d] + place[d]);
            member.set_up(grid, id, rank, &mut self.cluster);
        }
    }

    /// Lets go of the grid, and keeps the memory.
    pub(crate) fn release(&mut self) {
        self.grid = None;
    }

    /// Runs the block for about `slices` warp slices.
    pub(crate) fn run(&mut self, cache: &mut SpanCache, slices: u32) -> BlockPause {
        let Some(grid) = self.grid.clone() else { return BlockPause::Done };
        let pause = self.run_for(&grid, cache, slices);
        for member in &mut self.members {
            if let Some(watch) = &mut member.state.watch {
                watch.tell(&grid, member.state.id);
            }
        }
        pause
    }

    fn run_for(&mut self, grid: &Arc<Grid>, cache: &mut SpanCache, mut slices: u32) -> BlockPause {
        cache.refresh(&grid.spec.spans);
        for warp in self.members.iter_mut().flat_map(|member| &mut member.warps) {
            warp.cache = cache;
        }
        loop {
            let mut round = Round { done: true, ..Round::default() };
            for member in &mut self.members {
                if let Err(fault) = member.run(grid, &self.cluster, &mut round) {
                    return BlockPause::Fault(fault);
                }
            }
            if round.done {
                return BlockPause::Done;
            }
            if !round.progress && round.asleep {
                return BlockPause::Share { spinning: true };
            }
            if !round.progress {
                let waiting = self.members.iter().find(|member| member.state.live > 0);
                let fault = waiting.or(self.members.first()).map(|member| member.deadlock(grid));
                return fault.map_or(BlockPause::Done, BlockPause::Fault);
            }
            slices = slices.saturating_sub(round.slices);
            if slices == 0 || round.spinning {
                return BlockPause::Share { spinning: round.spinning };
            }
        }
    }
}

/// What became of one turn of every warp.
#[derive(Default)]
struct Round {
    /// No warp is left.
    done: bool,
    /// Some warp ran.
    progress: bool,
    /// Some warp waits for the time to pass.
    asleep: bool,
    spinning: bool,
    slices: u32,
}

impl Member {
    fn set_up(&mut self, grid: &Arc<Grid>, id: [u32; 3], rank: u32, cluster: &mut Cluster) {
        let state = &mut *self.state;
        state.id = id;
        state.rank = rank;
        state.barriers = Default::default();
        state.live = grid.threads;
        // Vector loads may begin at the last byte that is checked.
        state.shared.reserve(grid.shared_len as usize + 64);
        cluster.shared.push(state.shared.pointer());
        cluster.blocks.push(&raw mut *state);
        state.watch = grid.spec.program.checker.as_ref().map(|checker| Watch::begin(grid, checker));
        state.cluster = cluster;
        let warps = grid.warps() as usize;
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

    /// Gives every warp that can go on a turn.
    fn run(&mut self, grid: &Grid, cluster: &Cluster, round: &mut Round) -> Result<(), Fault> {
        for warp in &mut self.warps {
            if warp.live == 0 {
                continue;
            }
            round.done = false;
            if !warp.wake(&self.state, cluster) {
                round.asleep |= warp.is_asleep();
                continue;
            }
            round.progress = true;
            // SAFETY: `set_up` prepared the warp for this grid's program, and this worker alone has
            // the block.
            match unsafe { warp.run() } {
                Pause::Done | Pause::Blocked => {}
                Pause::Slice => {
                    round.spinning |= std::mem::take(&mut warp.yielded);
                    round.slices += 1;
                }
                Pause::Fault => return Err(self.fault(grid)),
            }
        }
        Ok(())
    }

    /// The fault that a warp recorded.
    fn fault(&mut self, grid: &Grid) -> Fault {
        let found = self.warps.iter_mut().find_map(|warp| {
            let record = warp.fault.take()?;
            Some((&*warp, record))
        });
        let Some((warp, record)) = found else { return self.deadlock(grid) };
        let FaultRecord { kind, lane, address, bytes, pc, line, detail } = *record;
        let origins = pc.and_then(|pc| grid.spec.program.origins(pc));
        let accessed = bytes.zip(address).map(|(bytes, address)| Accessed {
            access: origins.and_then(|origins| origins.access(line)),
            bytes,
            near: warp.near(address),
        });
        let source = origins.and_then(|origins| origins.source(line));
        let site = Some(Box::new(Site { accessed, source }));
        let thread = grid.thread_of(warp.index as usize * WARP + lane);
        let kernel = grid.kernel().name.clone();
        Fault { kind, kernel, block: self.state.id, thread, address, site, line, detail }
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
        let origins = waiting.and_then(|w| grid.spec.program.origins(w.current.pc as usize));
        let source = origins.and_then(|origins| origins.source(line));
        Fault {
            kind: crate::FaultKind::Deadlock,
            kernel: grid.kernel().name.clone(),
            block: self.state.id,
            thread: grid.thread_of(thread),
            address: None,
            site: Some(Box::new(Site { accessed: None, source })),
            line,
            detail: "deadlock: every thread of the block waits at a barrier or a .sync instruction"
                .into(),
        }
    }
}

impl Warp {
    /// A warp without a grid.
    fn idle() -> Warp {
        Warp {
            r32: std::ptr::null_mut(),
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
                taken: 0,
                last_run: 0,
            },
            others: Vec::new(),
            live: 0,
            slices: 0,
            cluster_generation: 0,
            rotate: false,
            polls: 0,
            last_poll: (0, 0),
            yielded: false,
            staggered: false,
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
        // It has run a block of this grid, to the end: its prologue's results are still there.
        let primed = same_shape && self.live == 0;
        self.shape = grid.id;
        self.grid = Arc::as_ptr(grid);
        self.index = index;
        self.carry = 0;
        self.live = mask;
        self.slices = 0;
        self.rotate = false;
        self.yielded = false;
        self.staggered = false;
        self.polls = 0;
        self.fault = None;
        self.others.clear();
        self.current.frames.clear();
        self.current.mask = mask;
        self.current.pc = function.entry + if primed { function.prologue } else { 0 };
        self.current.state = State::Ready;
        self.current.resumed = false;
        self.current.base32 = 0;
        self.current.base64 = 0;
        self.current.base_pred = 0;
        self.current.local = 0;
        self.current.function = grid.kernel().function;
        self.current.taken = 0;
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

    /// Whether any fragment waits for the time to pass.
    fn is_asleep(&self) -> bool {
        let asleep = |fragment: &Fragment| matches!(fragment.state, State::Asleep { .. });
        asleep(&self.current) || self.others.iter().any(asleep)
    }

    /// Lets fragments go on whose barrier has completed, or whose sleep is over. Whether any
    /// fragment is ready.
    fn wake(&mut self, block: &BlockState, cluster: &Cluster) -> bool {
        let mut ready = false;
        for fragment in self.others.iter_mut().chain([&mut self.current]) {
            let passed = match fragment.state {
                State::Barrier { id, generation } => {
                    block.barriers[id as usize].generation != generation
                }
                State::Cluster { generation } => cluster.barrier.generation != generation,
                State::Asleep { until } => {
                    if until <= Instant::now() {
                        fragment.state = State::Ready;
                    }
                    false
                }
                State::Ready | State::Sync(_) => false,
            };
            if passed {
                fragment.state = State::Ready;
                fragment.resumed = true;
            }
            ready |= fragment.state == State::Ready && fragment.mask != 0;
        }
        ready
    }
}
