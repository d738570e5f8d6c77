//! What only some backends can do, a trait each: one that lacks a role does not implement it.

use crate::{HeldPart, HeldPlace, Known, Object, Piece, Snapshot, SnapshotError};
use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::{TENSOR_MAP_BYTES, TensorMap};
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId};
use std::os::fd::OwnedFd;

/// An event as another process can open it.
#[derive(Debug)]
pub enum EventShare {
    /// Memory in which its state is kept.
    Memory(OwnedFd),
    /// The driver's own handle (`CUipcEventHandle`).
    Driver([u8; 64]),
}

/// Memory and events that several processes on one host use.
pub trait Interprocess {
    /// Returns a descriptor of a shareable handle's memory, which a backend of the same kind can
    /// import.
    fn export_handle(&self, handle: MemHandleId) -> Result<OwnedFd, CuError>;
    /// Opens memory that another process has exported; INVALID_VALUE for any other descriptor.
    fn import_handle(&self, handle: MemHandleId, fd: OwnedFd) -> Result<Imported, CuError>;
    /// Makes imported memory this client's own, because who has made it is gone: snapshots hold
    /// `size` bytes of it from now on, as of what [`crate::Backend::create_handle`] makes on
    /// `device`. Snapshots leave out all other imported memory, which is its owner's to save.
    fn adopt_handle(&self, handle: MemHandleId, device: u32, size: u64) -> Result<(), CuError>;
    /// Returns a descriptor of the slab that holds an address, and where that lies: (address,
    /// bytes). NOT_READY where work must be over first.
    fn export_slab(&self, addr: u64) -> Result<(OwnedFd, u64, u64), CuError>;
    /// Shares an interprocess event with a backend of the same kind in another process.
    fn export_event(&self, event: EventId) -> Result<EventShare, CuError>;
    /// Opens an event that another process has exported; INVALID_VALUE for anything else.
    fn import_event(&self, event: EventId, ctx: CtxId, share: EventShare) -> Result<(), CuError>;
}

/// Inexact devices: the driver places what the client would place itself on an exact one.
pub trait Placing {
    /// Checks that a range outside of the arenas is device memory that the driver has placed, such
    /// as a module's variables; INVALID_VALUE if not.
    fn check_placed(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError>;
    /// Returns a tensor map as the device reads it.
    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], CuError>;
    /// Returns the device's own map with another address.
    fn move_tensor_map(
        &self,
        map: &[u8; TENSOR_MAP_BYTES],
        address: u64,
    ) -> Result<[u8; TENSOR_MAP_BYTES], CuError>;
}

/// Checkpoints. With something [`Known`], digests are computed by the same keys if the device can
/// do so fast, and nothing is copied then that is known to be what it was.
pub trait Snapshots {
    /// Makes room for the next snapshot while the client runs, so that it need not be made in the
    /// pause. May block for seconds; has no other effect.
    fn prepare_snapshot(&self, known: Option<&Known>) -> Result<(), SnapshotError>;
    /// Takes what the devices hold, at rest, while the client stands still: as fast as can be. The
    /// devices may be used again when this returns.
    fn snapshot(&self, known: Option<&Known>) -> Result<Box<dyn Snapshot>, SnapshotError>;
}

/// Restarts: what a new backend is told, in the order of these functions.
pub trait Restore {
    /// Takes a snapshot's notes before anything is made: they say where the objects that are then
    /// made again, in their old order and without those that have ended, must lie and what they are
    /// called.
    fn restore_begin(&self, notes: &[u8]) -> Result<(), SnapshotError>;
    /// Takes the same notes once all objects have been made again.
    fn restore_notes(&self, notes: &[u8]) -> Result<(), SnapshotError>;
    /// Takes memory that a snapshot of another process has exported, until the end.
    fn restore_from(&self, parts: Vec<HeldPart>) -> Result<(), SnapshotError>;
    /// Returns whether bytes may come so: none of them has to be looked at on its way. By default
    /// they may not.
    fn takes_held(&self) -> bool {
        false
    }
    /// Puts back bytes that lie in that memory; from several threads, as are the next two.
    fn restore_held(&self, piece: &Piece, from: HeldPlace) -> Result<(), SnapshotError>;
    /// Puts bytes of a snapshot back where they were. They may still travel when this returns, and
    /// have arrived at the end.
    fn restore(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError>;
    /// Puts back bytes that `fill` writes to where they can travel from at once. If it answers no,
    /// none are.
    fn restore_filled(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), SnapshotError> {
        let mut all = vec![0; bytes];
        if fill(&mut all) { self.restore(object, start, &all) } else { Ok(()) }
    }
    /// Waits for all bytes that travel, and lets go of memory from [`Restore::restore_from`]; by
    /// default none do.
    fn restore_rest(&self) -> Result<(), SnapshotError> {
        Ok(())
    }
    /// Takes the notes of a later snapshot before what has been made there since is made and ended
    /// here: they say what that must be called. By default it is called what it was.
    fn restore_more(&self, _notes: &[u8]) -> Result<(), SnapshotError> {
        Ok(())
    }
    /// Takes the notes of a later snapshot of the same devices, whose objects have been made and
    /// ended here as there since, and its pieces ([`Snapshot::pieces`]): what is in none of them
    /// reads as zero from now on, whatever was put there. Returns `false` where that cannot be, or
    /// something lies elsewhere than there. Then this backend is good for nothing but to be
    /// dropped. By default it cannot be.
    fn restore_later(&self, _notes: &[u8], _pieces: &[Piece]) -> Result<bool, SnapshotError> {
        Ok(false)
    }
    fn restore_end(&self) -> Result<(), SnapshotError>;
}

/// Swapping: memory goes back while its client rests, and comes again before the client goes on.
pub trait Swap: Sync {
    /// Gives the memory back in which [`Object::Memory`] and [`Object::Handle`] lie, as far as it
    /// can be; addresses stay. Returns how many bytes.
    fn vacate(&self) -> Result<u64, SnapshotError>;
    /// Takes memory again for what was given back; OUT_OF_MEMORY, and nothing taken, where there is
    /// not so much.
    fn occupy(&self) -> Result<(), SnapshotError>;
    /// Puts bytes of memory back; from several threads. They may still travel when this returns.
    fn refill(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError>;
    /// Waits until they have arrived.
    fn refilled(&self) -> Result<(), SnapshotError>;
}
