//! What not every backend can do: the roles of a real GPU.

use crate::driver::check;
use crate::stream::Event;
use crate::{NvidiaBackend, tensor_maps};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUipcEventHandle;
use kedge_cuda_types::handle::CUevent;
use kedge_cuda_types::tensor_map::{TENSOR_MAP_BYTES, TensorMap};
use kedge_device::{
    EventShare, HeldPart, HeldPlace, Interprocess, Known, Object, Piece, Placing, Restore,
    Snapshot, SnapshotError, Snapshots, Swap,
};
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Interprocess for NvidiaBackend {
    fn export_handle(&self, handle: MemHandleId) -> Result<OwnedFd, CuError> {
        self.tables().arena.export_handle(handle)
    }

    fn import_handle(&self, handle: MemHandleId, fd: OwnedFd) -> Result<Imported, CuError> {
        self.tables().arena.import_handle(handle, fd)
    }

    fn adopt_handle(&self, handle: MemHandleId, device: u32, size: u64) -> Result<(), CuError> {
        self.tables().arena.adopt_handle(handle, device, size)
    }

    fn export_slab(&self, addr: u64) -> Result<(OwnedFd, u64, u64), CuError> {
        self.tables().arena.export_slab(addr)
    }

    fn export_event(&self, event: EventId) -> Result<EventShare, CuError> {
        let tables = self.tables();
        let event = tables.event(event)?;
        event.ctx.enter()?;
        let mut handle = CUipcEventHandle([0; 64]);
        // SAFETY: a live out pointer, and an event of the driver's.
        check(unsafe { (self.shared.driver.cuIpcGetEventHandle)(&mut handle, event.raw) })?;
        Ok(EventShare::Driver(handle.0))
    }

    fn import_event(&self, event: EventId, ctx: CtxId, share: EventShare) -> Result<(), CuError> {
        let EventShare::Driver(handle) = share else { return Err(CuError::INVALID_VALUE) };
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        context.enter()?;
        let (mut raw, handle) = (CUevent::NULL, CUipcEventHandle(handle));
        // SAFETY: a live out pointer; the driver checks the handle.
        check(unsafe { (self.shared.driver.cuIpcOpenEventHandle)(&mut raw, handle) })?;
        tables.events.insert(event, Event::new(raw, &context, false, true));
        Ok(())
    }
}

impl Placing for NvidiaBackend {
    fn check_placed(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
        self.tables().context(ctx)?.enter()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: live out pointers; the driver only looks the address up.
        let found =
            unsafe { (self.shared.driver.cuMemGetAddressRange_v2)(&mut base, &mut bytes, addr) };
        let reach = (addr - base.min(addr)).checked_add(size);
        let inside = found == 0 && reach.is_some_and(|reach| reach <= bytes as u64);
        if inside { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        tensor_maps::encode(&self.shared.driver, map)
    }

    fn move_tensor_map(
        &self,
        map: &[u8; TENSOR_MAP_BYTES],
        address: u64,
    ) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        tensor_maps::relocate(&self.shared.driver, map, address)
    }
}

impl Snapshots for NvidiaBackend {
    fn prepare_snapshot(&self, known: Option<&Known>) -> Result<(), SnapshotError> {
        self.prepare(known)
    }

    fn snapshot(&self, known: Option<&Known>) -> Result<Box<dyn Snapshot>, SnapshotError> {
        self.take_snapshot(known)
    }
}

impl Restore for NvidiaBackend {
    fn restore_begin(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        self.quota.set_lifted(true);
        self.expect(notes)
    }

    fn restore_notes(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        self.take_notes(notes)
    }

    fn restore_from(&self, parts: Vec<HeldPart>) -> Result<(), SnapshotError> {
        self.import_held(parts)
    }

    fn takes_held(&self) -> bool {
        self.restoring().moved.is_empty()
    }

    fn restore_held(&self, piece: &Piece, from: HeldPlace) -> Result<(), SnapshotError> {
        self.copy_held(piece, from)
    }

    fn restore_filled(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), SnapshotError> {
        self.put_filled(object, start, bytes, fill)
    }

    fn restore(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.put_back(object, start, bytes)
    }

    fn restore_rest(&self) -> Result<(), SnapshotError> {
        self.settle_round()
    }

    fn restore_more(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        self.expect_more(notes)
    }

    fn restore_later(&self, notes: &[u8], pieces: &[Piece]) -> Result<bool, SnapshotError> {
        self.become_later(notes, pieces)
    }

    fn restore_end(&self) -> Result<(), SnapshotError> {
        self.quota.set_lifted(false);
        self.finish_restore()
    }
}

impl Swap for NvidiaBackend {
    fn vacate(&self) -> Result<u64, SnapshotError> {
        self.vacate_slabs()
    }

    fn occupy(&self) -> Result<(), SnapshotError> {
        self.occupy_slabs()
    }

    fn refill(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.refill_memory(object, start, bytes)
    }

    fn refilled(&self) -> Result<(), SnapshotError> {
        self.all_refilled()
    }
}
