//! GPUs that are ready before there is a client: the driver is started, addresses are reserved, and
//! the first GPU has a context, with what goes with each. A client that comes finds what it would
//! have waited for.
//!
//! The driver sees the same calls in the same order as without: where it places what comes later
//! depends on that, and a program's pointers to it must be good wherever the job is restarted.

use crate::arena::{self, Arena};
use crate::context::{Context, Unnamed};
use crate::digests::Kernels;
use crate::driver::Driver;
use crate::output::Capture;
use crate::pinned::Slots;
use crate::{CacheLimits, Gpus, NvidiaBackend, StartError};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_cuda_types::handle::CUdevice;
use kedge_device::Host;
use kedge_protocol::CtxId;
use std::sync::{Arc, PoisonError};

/// Some of this machine's GPUs, ready for a client.
pub struct ReadyGpus {
    gpus: Gpus,
    chosen: Vec<usize>,
    spare: Spare,
}

/// A context that waits for its client.
pub(crate) struct Spare {
    pub(crate) unnamed: Option<SpareContext>,
    /// Made ready in that context: pinning takes some of a restart's time.
    pub(crate) slots: Slots,
}

pub(crate) struct SpareContext {
    on: CUdevice,
    context: Unnamed,
    /// Of digests; without, a checkpoint takes what there is whole.
    kernels: Option<Kernels>,
}

impl ReadyGpus {
    /// Makes those of the GPUs ready that `chosen` names by their positions.
    ///
    /// # Errors
    /// [`StartError`], which says what is missing and what mends it.
    pub fn new(mut gpus: Gpus, chosen: &[usize]) -> Result<ReadyGpus, StartError> {
        let driver = Arc::clone(&gpus.driver);
        let count = u32::try_from(chosen.len()).unwrap_or(u32::MAX).min(MAX_DEVICES);
        arena::reserve(&driver, gpus.reserved..count)?;
        gpus.reserved = gpus.reserved.max(count);
        let first = chosen.first().and_then(|&at| gpus.devices.get(at).copied());
        let on = first.ok_or_else(|| StartError::init(CuError::NO_DEVICE))?;
        let context = SpareContext::make(&driver, on).map_err(StartError::init)?;
        let slots = Slots::new(&driver);
        // The context is current. Without them a restart makes them itself.
        let _ = slots.ready();
        let spare = Spare { unnamed: Some(context), slots };
        Ok(ReadyGpus { gpus, chosen: chosen.to_vec(), spare })
    }

    /// What programs are told of all of the machine's.
    pub fn infos(&self) -> &[kedge_protocol::DeviceInfo] {
        self.gpus.infos()
    }

    /// Those that are ready.
    pub fn chosen(&self) -> &[usize] {
        &self.chosen
    }

    /// All of them, where others are wanted: what was made is undone, but for the driver's start.
    pub fn back(self) -> Gpus {
        let ReadyGpus { gpus, spare: Spare { unnamed, slots }, .. } = self;
        drop(slots);
        if let Some(spare) = unnamed {
            spare.context.destroy(&gpus.driver);
        }
        gpus
    }
}

impl SpareContext {
    fn make(driver: &Arc<Driver>, on: CUdevice) -> Result<SpareContext, CuError> {
        let context = Unnamed::create(driver, on)?;
        // As where they are loaded with a client's context: without them nobody is worse off.
        let kernels = Kernels::make(driver, on).ok();
        Ok(SpareContext { on, context, kernels })
    }
}

impl NvidiaBackend {
    /// As [`NvidiaBackend::with_cache`], on GPUs that are ready.
    ///
    /// # Errors
    /// As there.
    pub fn on(
        ready: ReadyGpus,
        host: Arc<dyn Host>,
        limits: CacheLimits,
    ) -> Result<Arc<NvidiaBackend>, StartError> {
        let ReadyGpus { gpus, chosen, spare } = ready;
        let gpus = gpus.some(&chosen);
        let arena = Arena::reserve(&gpus.driver, &gpus.placed(), gpus.reserved)?;
        let capture = Capture::begin().map_err(StartError::Output)?;
        Ok(NvidiaBackend::assemble(gpus, arena, capture, spare, (host, limits)))
    }

    /// The context that waits, if it is one on this device and as it would be made now: with its
    /// name. What goes with it is in place.
    pub(crate) fn ready_context(
        &self,
        id: CtxId,
        device: u32,
        on: CUdevice,
    ) -> Option<Arc<Context>> {
        let digester = &self.shared.digester;
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let SpareContext { context, kernels, .. } = spare.take_if(|spare| spare.on == on)?;
        let named = context.named(&self.shared.driver, id, device);
        if let Some(kernels) = kernels {
            digester.adopt(id, kernels);
        }
        named.enter().ok()?;
        Some(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Turn;
    use crate::snapshot_tests::{Quiet, bare, gpus};
    use kedge_device::Backend;
    use kedge_protocol::StreamId;

    const CTX: CtxId = CtxId(7);

    /// As [`NvidiaBackend::on`], but that a test's output stays its own.
    fn on(ready: ReadyGpus) -> Arc<NvidiaBackend> {
        let ReadyGpus { gpus, chosen, spare } = ready;
        let gpus = gpus.some(&chosen);
        let arena = Arena::reserve(&gpus.driver, &gpus.placed(), gpus.reserved).unwrap();
        let host = Arc::new(Quiet);
        NvidiaBackend::assemble(
            gpus,
            arena,
            Capture::nothing(),
            spare,
            (host, CacheLimits::default()),
        )
    }

    fn made(turn: &Turn) -> Vec<&'static str> {
        turn.set(|fake| std::mem::take(&mut fake.made))
    }

    #[test]
    fn a_client_gets_what_was_made_before_it_came() {
        let (turn, driver) = Turn::begin(64 << 20);
        let cold = bare(&driver, CacheLimits::default(), Arc::new(Quiet));
        cold.create_context(CTX, 0, StreamId(1)).unwrap();
        let usual = made(&turn);
        drop(cold);
        turn.new_process();

        let ready = ReadyGpus::new(gpus(&driver), &[0]).unwrap();
        assert_eq!(made(&turn), usual, "the driver places by the order of calls");
        let backend = on(ready);
        backend.create_context(CTX, 0, StreamId(1)).unwrap();
        assert_eq!(made(&turn), [""; 0]);
        backend.create_stream(StreamId(2), CTX, false, 0).unwrap();
        // The next has to be made.
        backend.create_context(CtxId(8), 0, StreamId(3)).unwrap();
        assert_eq!(made(&turn).iter().filter(|what| **what == "context").count(), 1);
        backend.destroy_context(CTX).unwrap();
    }

    #[test]
    fn others_than_were_ready_can_be_had() {
        let (turn, driver) = Turn::begin(64 << 20);
        let gpus = ReadyGpus::new(gpus(&driver), &[0]).unwrap().back();
        assert_eq!(gpus.reserved, 1, "its addresses are not reserved twice");
        made(&turn);
        let backend = on(ReadyGpus::new(gpus, &[0]).unwrap());
        backend.create_context(CTX, 0, StreamId(1)).unwrap();
        assert_eq!(made(&turn).iter().filter(|what| **what == "context").count(), 1);
    }
}
