//! The OS threads that run blocks and other jobs of the device.

use crate::launch::{GridDone, GridSpec};
use std::sync::Arc;

/// A set of worker threads, shared by everything that the device runs.
pub struct Pool {}

/// Work that is not a grid: a copy, a fill.
pub type Job = Box<dyn FnOnce() + Send>;

impl Pool {
    /// Starts `workers` threads; 0: one for each core.
    pub fn new(workers: usize) -> std::io::Result<Arc<Pool>> {
        let _ = workers;
        Ok(Arc::new(Pool {}))
    }

    pub fn workers(&self) -> usize {
        1
    }

    /// Runs a grid; `done` is called on a worker when its last block is over, or at the first fault.
    pub fn launch(&self, spec: GridSpec, done: GridDone) {
        let _ = (spec, done);
    }

    /// Runs `job` on a worker. It must not block for long.
    pub fn spawn(&self, job: Job) {
        let _ = job;
    }
}
