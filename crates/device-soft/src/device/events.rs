//! CUDA events: the latest record of each, and when the device reached it.

use super::context::Context;
use super::runtime::Runtime;
use super::shared_event::{Record, SharedEvent};
use super::tasks::Task;
use kedge_cuda_types::CuError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The clock of time stamps. After a restart it continues at the checkpoint's time, so that the
/// time between events of before and after does not count what passed in between.
pub(super) struct Clock {
    epoch: Instant,
    /// Nanoseconds to add to the time since `epoch`, modulo 2^64.
    offset: AtomicU64,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { epoch: Instant::now(), offset: AtomicU64::new(0) }
    }

    /// Returns the clock's time, in nanoseconds.
    pub(super) fn nanos(&self) -> u64 {
        self.elapsed().wrapping_add(self.offset.load(Ordering::Relaxed))
    }

    /// Sets the clock's time to `nanos`.
    pub(super) fn set(&self, nanos: u64) {
        self.offset.store(nanos.wrapping_sub(self.elapsed()), Ordering::Relaxed);
    }

    fn elapsed(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }
}

/// An event as the dispatcher keeps it.
pub(super) struct Event {
    pub(super) timing: bool,
    /// The latest record submitted; `None` until there is one.
    latest: Option<(Arc<Task>, Arc<Stamp>)>,
    /// The event's counters in shared memory, if other processes may see it.
    pub(super) shared: Option<Arc<SharedEvent>>,
}

/// When a record was reached: nanoseconds of the runtime's clock, 0 until then.
#[derive(Default)]
pub(super) struct Stamp {
    nanos: AtomicU64,
    /// The event that other processes see, and this record's number there.
    shared: Option<(Arc<SharedEvent>, Record)>,
}

impl Stamp {
    /// Notes that the record is reached now, and tells other processes.
    pub(super) fn set_now(&self, runtime: &Runtime) {
        self.nanos.store(runtime.clock.nanos().max(1), Ordering::Release);
        if let Some((event, record)) = &self.shared {
            event.reach(*record);
        }
    }

    fn get(&self) -> Option<u64> {
        match self.nanos.load(Ordering::Acquire) {
            0 => None,
            nanos => Some(nanos),
        }
    }
}

impl Event {
    pub(super) fn new(timing: bool, shared: Option<Arc<SharedEvent>>) -> Self {
        Self { timing, latest: None, shared }
    }

    /// Creates the stamp of a record that is about to be submitted.
    pub(super) fn next_stamp(&self) -> Arc<Stamp> {
        let shared = self.shared.as_ref().map(|event| (Arc::clone(event), event.submit()));
        Arc::new(Stamp { nanos: AtomicU64::new(0), shared })
    }

    /// Returns the latest record of any process, if the event is shared and the record is not
    /// reached.
    pub(super) fn elsewhere(&self) -> Option<(Arc<SharedEvent>, Record)> {
        let event = self.shared.as_ref()?;
        Some((Arc::clone(event), event.pending()?))
    }

    /// Makes `task` the event's latest record.
    pub(super) fn record(&mut self, task: Arc<Task>, stamp: Arc<Stamp>) {
        self.latest = Some((task, stamp));
    }

    /// Returns when the latest record was reached, in nanoseconds of the runtime's clock; `None` if
    /// it has not been.
    pub(super) fn stamp(&self) -> Option<u64> {
        self.latest.as_ref().and_then(|(_, stamp)| stamp.get())
    }

    /// Makes a record in `ctx` that was reached at `nanos` the event's latest.
    pub(super) fn restore(&mut self, ctx: &Arc<Context>, nanos: u64) {
        let stamp = Arc::new(Stamp { nanos: AtomicU64::new(nanos.max(1)), shared: None });
        self.latest = Some((Task::over(Arc::clone(ctx)), stamp));
    }

    /// Returns the task that a waiter must wait for, if it is not done.
    pub(super) fn pending(&self) -> Option<&Arc<Task>> {
        self.latest.as_ref().map(|(task, _)| task).filter(|task| !task.is_done())
    }

    /// Checks the context of the latest record.
    ///
    /// # Errors
    /// The context's sticky error.
    pub(super) fn status(&self) -> Result<(), CuError> {
        self.latest.as_ref().map_or(Ok(()), |(task, _)| task.ctx.status())
    }

    /// Returns the milliseconds from `self`'s record to `end`'s.
    ///
    /// # Errors
    /// INVALID_HANDLE if one has no timing or was never recorded; NOT_READY if one is pending; the
    /// sticky error of one's context.
    pub(super) fn elapsed_ms(&self, end: &Event) -> Result<f32, CuError> {
        let (from, to) = (self.reached()?, end.reached()?);
        Ok((to as f64 - from as f64) as f32 / 1e6)
    }

    /// Returns when the record was reached, in nanoseconds.
    fn reached(&self) -> Result<u64, CuError> {
        let (task, stamp) = self.latest.as_ref().ok_or(CuError::INVALID_HANDLE)?;
        if !self.timing {
            return Err(CuError::INVALID_HANDLE);
        }
        task.ctx.status()?;
        if !task.is_done() {
            return Err(CuError::NOT_READY);
        }
        stamp.get().ok_or(CuError::NOT_READY)
    }
}
