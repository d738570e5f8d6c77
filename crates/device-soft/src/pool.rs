//! The OS threads that run blocks and other jobs of the device.

use crate::block::{Block, BlockPause};
use crate::exec::access::SpanCache;
use crate::launch::{Grid, GridDone, GridSpec, Unit};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Warp slices that a block runs before another block or grid gets its turn: a few hundred
/// milliseconds.
const BLOCK_SLICES: u32 = 512;
/// The same where blocks are known to wait for each other.
const COOPERATIVE_SLICES: u32 = 64;

/// Work that is not a grid: a copy, a fill.
pub type Job = Box<dyn FnOnce() + Send>;

/// A set of worker threads, shared by everything that the device runs. They end with the pool.
pub struct Pool {
    shared: Arc<Shared>,
    workers: usize,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Jobs and grids in the queue, and one more while grids are held: lets a worker stay with its
    /// grid without asking.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Grids with blocks to run, in turn.
    grids: VecDeque<Arc<Grid>>,
    /// No block of theirs is begun or gone on with.
    held: bool,
    /// Workers that are at one.
    running: usize,
    closed: bool,
}

enum Work {
    Job(Job),
    Block(Arc<Grid>, Unit),
}

impl Pool {
    /// Starts `workers` threads; 0: one for each core.
    pub fn new(workers: usize) -> std::io::Result<Arc<Pool>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = if workers == 0 { cores } else { workers };
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
        });
        for index in 0..workers {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("kedge-sm{index}"))
                .spawn(move || Worker::new(shared).work())?;
        }
        Ok(Arc::new(Pool { shared, workers }))
    }

    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Runs a grid; `done` is called on a worker when its last block is over, or at the first
    /// fault.
    pub fn launch(&self, spec: GridSpec, done: GridDone) {
        let grid = Grid::new(spec, done);
        let refusal = grid.refusal();
        if refusal.is_some() || !grid.has_work() {
            self.spawn(Box::new(move || grid.refuse(refusal)));
            return;
        }
        let one = grid.is_single();
        self.shared.lock().grids.push_back(grid);
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        match one {
            true => self.shared.wake.notify_one(),
            false => self.shared.wake.notify_all(),
        }
    }

    /// Runs `job` on a worker. It must not block for long.
    pub fn spawn(&self, job: Job) {
        self.shared.lock().jobs.push_back(job);
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        self.shared.wake.notify_one();
    }

    /// Has grids wait, or go on; jobs go on. Returns whether a block is being run.
    pub fn hold(&self, held: bool) -> bool {
        let mut queue = self.shared.lock();
        match (queue.held, held) {
            (false, true) => _ = self.shared.waiting.fetch_add(1, Ordering::Relaxed),
            (true, false) => {
                self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
                self.shared.wake.notify_all();
            }
            _ => {}
        }
        queue.held = held;
        queue.running > 0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for work. None: the pool is closed. `ran`: what it gave before was a block.
    fn next(&self, mut ran: bool) -> Option<Work> {
        loop {
            // Let go of without the lock: a grid may hold the last reference to this very pool,
            // whose end takes the lock.
            let mut finished = Vec::new();
            let mut queue = self.lock();
            queue.running -= usize::from(std::mem::take(&mut ran));
            if let Some(job) = queue.jobs.pop_front() {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                return Some(Work::Job(job));
            }
            while !queue.held
                && let Some(grid) = queue.grids.pop_front()
            {
                if let Some(unit) = grid.take() {
                    queue.grids.push_back(grid.clone());
                    queue.running += 1;
                    return Some(Work::Block(grid, unit));
                }
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                finished.push(grid);
            }
            if queue.closed {
                return None;
            }
            if finished.is_empty() {
                drop(self.wake.wait(queue).unwrap_or_else(|e| e.into_inner()));
            }
        }
    }

    /// Puts a grid whose block was parked back into the queue.
    fn offer(&self, grid: &Arc<Grid>) {
        let mut queue = self.lock();
        if !queue.grids.iter().any(|other| Arc::ptr_eq(other, grid)) {
            queue.grids.push_back(grid.clone());
            self.waiting.fetch_add(1, Ordering::Relaxed);
            self.wake.notify_one();
        }
    }
}

struct Worker {
    shared: Arc<Shared>,
    cache: SpanCache,
    /// A block's memory, kept for the next block.
    spare: Option<Box<Block>>,
}

impl Worker {
    fn new(shared: Arc<Shared>) -> Worker {
        Worker { shared, cache: SpanCache::new(), spare: None }
    }

    fn work(mut self) {
        let mut ran = false;
        while let Some(work) = self.shared.clone().next(ran) {
            ran = matches!(work, Work::Block(..));
            match work {
                Work::Job(job) => job(),
                Work::Block(grid, unit) => self.run_grid(&grid, unit),
            }
        }
    }

    /// Runs a block, and further ones of the same grid while nothing else waits.
    fn run_grid(&mut self, grid: &Arc<Grid>, unit: Unit) {
        let mut unit = Some(unit);
        while let Some(next) = unit {
            self.run_unit(grid, next);
            let alone = self.shared.waiting.load(Ordering::Relaxed) <= 1;
            unit = if alone { grid.take() } else { None };
        }
        if let Some(spare) = &mut self.spare {
            spare.release();
        }
    }

    fn run_unit(&mut self, grid: &Arc<Grid>, unit: Unit) {
        let mut block = match unit {
            Unit::Parked(block) => block,
            Unit::New(index) => {
                let mut block = self.spare.take().unwrap_or_else(Block::new);
                block.set_up(grid, index);
                block
            }
        };
        let slices = if grid.spec.cooperative { COOPERATIVE_SLICES } else { BLOCK_SLICES };
        match block.run(&mut self.cache, slices) {
            BlockPause::Done => {
                self.spare = Some(block);
                grid.finish(None);
            }
            BlockPause::Share { spinning } => {
                if spinning {
                    // What it waits for may be on another thread of this machine.
                    std::thread::yield_now();
                }
                grid.park(block, spinning);
                self.shared.offer(grid);
            }
            BlockPause::Fault(fault) => {
                self.spare = Some(block);
                grid.finish(Some(fault));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn jobs_go_on_while_grids_are_held() {
        let pool = Pool::new(1).unwrap();
        assert!(!pool.hold(true) && !pool.hold(true));
        let (sends, ran) = channel();
        let again = sends.clone();
        pool.spawn(Box::new(move || sends.send(1).unwrap()));
        assert_eq!(ran.recv_timeout(Duration::from_secs(20)), Ok(1));
        assert!(!pool.hold(false));
        assert_eq!(pool.shared.waiting.load(Ordering::Relaxed), 0);
        pool.spawn(Box::new(move || again.send(2).unwrap()));
        assert_eq!(ran.recv_timeout(Duration::from_secs(20)), Ok(2));
    }
}
