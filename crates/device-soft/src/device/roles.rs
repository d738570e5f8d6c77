//! What not every backend can do: the roles of a software device.

use super::events::Event;
use super::shared_event::SharedEvent;
use super::{SoftBackend, snapshot};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::tensor_map::{TENSOR_MAP_BYTES, TensorMap};
use kedge_device::{
    EventShare, HeldPart, HeldPlace, Interprocess, Known, Object, Piece, Placing, Restore,
    Snapshot, SnapshotError, Snapshots, Swap,
};
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId};
use std::os::fd::OwnedFd;

impl Interprocess for SoftBackend {
    fn export_handle(&self, handle: MemHandleId) -> Result<OwnedFd, CuError> {
        self.vmm.export(handle)
    }

    fn import_handle(&self, handle: MemHandleId, fd: OwnedFd) -> Result<Imported, CuError> {
        let (size, number) = self.vmm.import(handle, fd)?;
        let mut own = self.runtime.memory.windows.iter();
        let own = own.find(|device| Some(self.number(*device)) == number);
        Ok(Imported { device: own, size: Some(size) })
    }

    fn adopt_handle(&self, handle: MemHandleId, device: u32, size: u64) -> Result<(), CuError> {
        let memory = &self.runtime.memory;
        memory.charge(device, size)?;
        self.vmm.adopt(handle, device, size).or_else(|error| {
            memory.refund(device, size)?;
            Err(error)
        })
    }

    fn export_slab(&self, addr: u64) -> Result<(OwnedFd, u64, u64), CuError> {
        if !self.runtime.is_idle() {
            return Err(CuError::NOT_READY);
        }
        let device = device_of(addr).ok_or(CuError::INVALID_VALUE)?;
        self.runtime.memory.export_slab(addr, self.number(device))
    }

    fn export_event(&self, event: EventId) -> Result<EventShare, CuError> {
        let tables = self.tables();
        let (_, event) = tables.events.get(&event).ok_or(CuError::INVALID_HANDLE)?;
        let shared = event.shared.as_ref().ok_or(CuError::INVALID_HANDLE)?;
        Ok(EventShare::Memory(shared.export()?))
    }

    fn import_event(&self, event: EventId, ctx: CtxId, share: EventShare) -> Result<(), CuError> {
        let EventShare::Memory(fd) = share else { return Err(CuError::INVALID_VALUE) };
        self.add_event(event, ctx, Event::new(false, Some(SharedEvent::open(fd)?)))
    }
}

impl Placing for SoftBackend {
    fn check_placed(&self, _ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
        let memory = &self.runtime.memory;
        if memory.is_valid_on_device(addr, size) { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }

    /// Kedge's own form is what kernels read here, whatever the client was told of its devices.
    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        self.tables().tensor_maps = true;
        Ok(map.encode())
    }

    fn move_tensor_map(
        &self,
        map: &[u8; TENSOR_MAP_BYTES],
        address: u64,
    ) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        let held = TensorMap::decode(map).ok_or(CuError::INVALID_VALUE)?;
        // An image of a version that did not note them may have brought it.
        self.tables().tensor_maps = true;
        let moved = TensorMap { address, ..held };
        moved.check()?;
        Ok(moved.encode())
    }
}

impl Snapshots for SoftBackend {
    /// Software devices copy on writing: there is no room to make, and nothing is known faster.
    fn prepare_snapshot(&self, _known: Option<&Known>) -> Result<(), SnapshotError> {
        Ok(())
    }

    fn snapshot(&self, known: Option<&Known>) -> Result<Box<dyn Snapshot>, SnapshotError> {
        snapshot::take(self, known.is_some())
    }
}

impl Restore for SoftBackend {
    fn restore_begin(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        snapshot::begin(self, notes)
    }

    fn restore_notes(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        snapshot::apply(self, notes)
    }

    fn restore_from(&self, parts: Vec<HeldPart>) -> Result<(), SnapshotError> {
        snapshot::import(self, parts)
    }

    fn restore_held(&self, piece: &Piece, from: HeldPlace) -> Result<(), SnapshotError> {
        snapshot::copy(self, piece, from)
    }

    fn restore(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        snapshot::put(self, object, start, bytes)
    }

    fn restore_later(&self, notes: &[u8], pieces: &[Piece]) -> Result<bool, SnapshotError> {
        snapshot::apply_later(self, notes, pieces)
    }

    fn restore_end(&self) -> Result<(), SnapshotError> {
        snapshot::end(self)
    }
}

impl Swap for SoftBackend {
    fn vacate(&self) -> Result<u64, SnapshotError> {
        snapshot::vacate(self)
    }

    /// Pages come when they are touched.
    fn occupy(&self) -> Result<(), SnapshotError> {
        Ok(())
    }

    fn refill(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        Ok(match object {
            Object::Memory => snapshot::write_memory(self, start, bytes),
            Object::Handle(id) => self.vmm.write(*id, start, bytes),
            _ => Err(CuError::INVALID_VALUE),
        }?)
    }

    fn refilled(&self) -> Result<(), SnapshotError> {
        Ok(())
    }
}
