//! Events: what they recorded last, and when that was reached.

use super::context::Context;
use super::runtime::Runtime;
use super::shared_event::{Record, SharedEvent};
use super::tasks::Task;
use kedge_cuda_types::CuError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What time stamps are taken from. After a restart it goes on where the checkpoint was taken:
/// between an old event and a new one lies the time that the program has seen.
pub(super) struct Clock {
    epoch: Instant,
    /// Nanoseconds that it is ahead of the time since `epoch`, modulo 2^64.
    ahead: AtomicU64,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { epoch: Instant::now(), ahead: AtomicU64::new(0) }
    }

    pub(super) fn nanos(&self) -> u64 {
        self.elapsed().wrapping_add(self.ahead.load(Ordering::Relaxed))
    }

    /// Makes it now be `nanos`.
    pub(super) fn set(&self, nanos: u64) {
        self.ahead.store(nanos.wrapping_sub(self.elapsed()), Ordering::Relaxed);
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
    /// Where other processes see it.
    pub(super) shared: Option<Arc<SharedEvent>>,
}

/// When a record was reached: nanoseconds of the runtime's clock, 0 until then.
#[derive(Default)]
pub(super) struct Stamp {
    nanos: AtomicU64,
    /// Other processes count this record so.
    shared: Option<(Arc<SharedEvent>, Record)>,
}

impl Stamp {
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

    /// The stamp of a record that is about to be submitted.
    pub(super) fn next_stamp(&self) -> Arc<Stamp> {
        let shared = self.shared.as_ref().map(|event| (Arc::clone(event), event.submit()));
        Arc::new(Stamp { nanos: AtomicU64::new(0), shared })
    }

    /// The latest record of any process, where it is not reached.
    pub(super) fn elsewhere(&self) -> Option<(Arc<SharedEvent>, Record)> {
        let event = self.shared.as_ref()?;
        Some((Arc::clone(event), event.pending()?))
    }

    /// `task` is now what the event stands for.
    pub(super) fn record(&mut self, task: Arc<Task>, stamp: Arc<Stamp>) {
        self.latest = Some((task, stamp));
    }

    /// When the latest record was reached, on the runtime's clock; `None` while there is no such
    /// moment.
    pub(super) fn stamp(&self) -> Option<u64> {
        self.latest.as_ref().and_then(|(_, stamp)| stamp.get())
    }

    /// Stands for a record in `ctx` that was reached at `nanos`.
    pub(super) fn restore(&mut self, ctx: &Arc<Context>, nanos: u64) {
        let stamp = Arc::new(Stamp { nanos: AtomicU64::new(nanos.max(1)), shared: None });
        self.latest = Some((Task::over(Arc::clone(ctx)), stamp));
    }

    /// The task that a waiter has to wait for; none where nothing is pending.
    pub(super) fn pending(&self) -> Option<&Arc<Task>> {
        self.latest.as_ref().map(|(task, _)| task).filter(|task| !task.is_done())
    }

    /// The context's sticky error, if the latest record's context has one.
    pub(super) fn status(&self) -> Result<(), CuError> {
        self.latest.as_ref().map_or(Ok(()), |(task, _)| task.ctx.status())
    }

    /// Milliseconds from `self`'s record to `end`'s.
    ///
    /// # Errors
    /// INVALID_HANDLE where one keeps no time or was never recorded; NOT_READY while one is
    /// pending.
    pub(super) fn elapsed_ms(&self, end: &Event) -> Result<f32, CuError> {
        let (from, to) = (self.reached()?, end.reached()?);
        Ok((to as f64 - from as f64) as f32 / 1e6)
    }

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
