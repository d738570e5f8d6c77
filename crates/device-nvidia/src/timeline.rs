//! When events were recorded, in the process that a restart took over from and in this one.
//!
//! The driver's events live in one process. A snapshot notes how long before it each was recorded;
//! a restored event has that time until it is recorded again. The time between checkpoint and
//! restart does not count.

use crate::context::Context;
use crate::driver::{Driver, check};
use crate::stream::Event;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUevent, CUstream};
use kedge_protocol::{CtxId, EventId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(crate) struct Timeline {
    /// Recorded in each context when the restore ended: the moment of the checkpoint.
    origins: Mutex<HashMap<CtxId, CUevent>>,
}

impl Timeline {
    fn origins(&self) -> MutexGuard<'_, HashMap<CtxId, CUevent>> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds from one event to another.
    pub(crate) fn between(
        &self,
        driver: &Driver,
        start: &Event,
        end: &Event,
    ) -> Result<f32, CuError> {
        start.ctx.enter()?;
        match elapsed(driver, start.raw, end.raw) {
            // One was never recorded here.
            Err(CuError::INVALID_HANDLE) if start.before().or(end.before()).is_some() => {
                Ok((self.at(driver, end)? - self.at(driver, start)?) as f32)
            }
            outcome => outcome,
        }
    }

    /// Milliseconds from the checkpoint to an event.
    fn at(&self, driver: &Driver, event: &Event) -> Result<f64, CuError> {
        let origin = self.origins().get(&event.ctx.id).copied();
        let here = origin.map(|origin| elapsed(driver, origin, event.raw));
        match (here, event.before()) {
            (Some(Ok(after)), _) => Ok(f64::from(after)),
            (_, Some(before)) => Ok(before),
            (here, None) => here.unwrap_or(Err(CuError::INVALID_HANDLE)).map(f64::from),
        }
    }

    /// How long before now the events of a context were recorded, which are all over.
    pub(crate) fn moments(
        &self,
        driver: &Driver,
        context: &Context,
        events: &[(EventId, Arc<Event>)],
    ) -> Result<Vec<(EventId, f64)>, CuError> {
        let held = context.hold()?;
        let now = Mark::new(driver, held.streams().inside)?;
        let origin = self.origins().get(&context.id).copied();
        let since_origin = origin.map_or(Ok(0.0), |origin| elapsed(driver, origin, now.event))?;
        let mut found = Vec::new();
        for (id, event) in events {
            match (elapsed(driver, event.raw, now.event), event.before()) {
                (Ok(ago), _) => found.push((*id, -f64::from(ago), Some(event.raw))),
                (Err(_), Some(before)) => found.push((*id, before - f64::from(since_origin), None)),
                // Never recorded.
                (Err(_), None) => {}
            }
        }
        Ok(refined(driver, found))
    }

    /// The restore has ended: times of restored events count from now.
    pub(crate) fn begin(&self, driver: &Driver, context: &Context) -> Result<(), CuError> {
        let held = context.hold()?;
        let mark = Mark::new(driver, held.streams().inside)?;
        self.origins().insert(context.id, mark.keep());
        Ok(())
    }
}

/// A single-precision number of milliseconds says little after a day: neighbours are measured from
/// each other, from the newest backwards.
fn refined(
    driver: &Driver,
    mut found: Vec<(EventId, f64, Option<CUevent>)>,
) -> Vec<(EventId, f64)> {
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    for index in 1..found.len() {
        let ((_, later, Some(after)), (_, _, Some(raw))) = (found[index - 1], found[index]) else {
            continue;
        };
        if let Ok(gap) = elapsed(driver, raw, after) {
            found[index].1 = later - f64::from(gap);
        }
    }
    found.into_iter().map(|(id, at, _)| (id, at)).collect()
}

fn elapsed(driver: &Driver, start: CUevent, end: CUevent) -> Result<f32, CuError> {
    let mut milliseconds = 0.0;
    // SAFETY: a live out pointer and two events of the driver's.
    check(unsafe { (driver.cuEventElapsedTime)(&mut milliseconds, start, end) })?;
    Ok(milliseconds)
}

/// A moment: an event that has been recorded and reached.
struct Mark<'a> {
    driver: &'a Driver,
    event: CUevent,
}

impl Mark<'_> {
    fn new(driver: &Driver, stream: CUstream) -> Result<Mark<'_>, CuError> {
        let mut event = CUevent::NULL;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuEventCreate)(&mut event, 0) })?;
        let mark = Mark { driver, event };
        // SAFETY: an event and a stream of the current context.
        check(unsafe { (driver.cuEventRecord)(event, stream) })?;
        // SAFETY: the event was just recorded.
        check(unsafe { (driver.cuEventSynchronize)(event) })?;
        Ok(mark)
    }

    /// The event, for good.
    fn keep(self) -> CUevent {
        let event = self.event;
        std::mem::forget(self);
        event
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, known to nobody else.
        unsafe { (self.driver.cuEventDestroy_v2)(self.event) };
    }
}
