//! What must be called in order, as values: a wrong order does not compile.
//!
//! A backend that was just built is a [`NewBackend`]. It is either used from now on, or becomes a
//! [`Restoring`], on which objects are made again, then a [`Filling`], into which bytes go, and
//! then a backend. Memory that is swapped out is a [`Swapped`], which alone leads to [`SwapIn`].
//!
//! What this keeps are the roles of a `dyn Backend`; who makes a [`NewBackend`] has to hand over a
//! backend that nobody has used.
//!
//! A restart, and memory that goes and comes:
//!
//! ```no_run
//! use kedge_device::{Backend, NewBackend, Object, SnapshotError, Swapped};
//! use std::sync::Arc;
//!
//! fn bring_back(new: NewBackend, notes: &[u8]) -> Result<Arc<dyn Backend>, SnapshotError> {
//!     let restoring = new.begin_restore(notes)?;
//!     restoring.objects().grant(0, 0x1000_0000, 2 << 20)?;
//!     let filling = restoring.made()?;
//!     filling.put(&Object::Memory, 0x1000_0000, &[1])?;
//!     filling.finish()
//! }
//!
//! fn out_and_in(backend: Arc<dyn Backend>) -> Result<(), SnapshotError> {
//!     let (swapped, gone) = Swapped::out(backend)?;
//!     gone?;
//!     let coming = swapped.take_memory()?;
//!     coming.put(&Object::Memory, 0x1000_0000, &[1])?;
//!     coming.finish()
//! }
//! ```
//!
//! Bytes before all objects are there:
//!
//! ```compile_fail,E0599
//! fn early(restoring: kedge_device::Restoring<'_>) {
//!     let _ = restoring.put(&kedge_device::Object::Memory, 0, &[1]);
//! }
//! ```
//!
//! Objects of a backend whose restart has begun, made by another hand:
//!
//! ```compile_fail,E0382
//! fn twice(new: kedge_device::NewBackend) {
//!     let _ = new.begin_restore(&[]);
//!     let _ = new.start();
//! }
//! ```
//!
//! A role that is asked for without this module:
//!
//! ```compile_fail,E0423
//! fn around(backend: &dyn kedge_device::Backend) {
//!     let _ = backend.restores(kedge_device::Ordered(()));
//! }
//! ```

use crate::{Backend, HeldPart, HeldPlace, Object, Piece, Restore, SnapshotError, Snapshots, Swap};
use kedge_cuda_types::CuError;
use kedge_protocol::DeviceInfo;
use std::sync::Arc;

/// Shows that this module, which keeps the order, asks for a role.
#[derive(Debug)]
pub struct Ordered(());

fn lacking(what: &str) -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, what)
}

/// Returns the backend's checkpoints.
///
/// # Errors
///
/// NOT_SUPPORTED if it has none.
pub fn snapshots(backend: &dyn Backend) -> Result<&dyn Snapshots, SnapshotError> {
    backend.snapshots().ok_or_else(|| lacking("this device cannot be checkpointed"))
}

/// A backend of which nothing has been asked.
pub struct NewBackend(Arc<dyn Backend>);

impl NewBackend {
    pub fn new(backend: Arc<dyn Backend>) -> NewBackend {
        NewBackend(backend)
    }

    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.0.devices()
    }

    pub fn driver_version(&self) -> u32 {
        self.0.driver_version()
    }

    /// Begins to bring back what a snapshot with these notes holds.
    ///
    /// # Errors
    ///
    /// NOT_SUPPORTED if the backend cannot be restored; else what it has against the notes.
    pub fn begin_restore(self, notes: &[u8]) -> Result<Restoring<'_>, SnapshotError> {
        let restoring = Restoring { backend: self.0, notes };
        restoring.role()?.restore_begin(notes)?;
        Ok(restoring)
    }

    /// Returns the backend, for use.
    pub fn start(self) -> Arc<dyn Backend> {
        self.0
    }
}

/// A backend on which the objects of a snapshot are being made again.
pub struct Restoring<'a> {
    backend: Arc<dyn Backend>,
    notes: &'a [u8],
}

impl Restoring<'_> {
    /// Returns the backend that makes them.
    pub fn objects(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Goes on to the bytes, as all objects have been made.
    pub fn made(self) -> Result<Filling, SnapshotError> {
        self.role()?.restore_notes(self.notes)?;
        Ok(Filling { backend: self.backend })
    }

    fn role(&self) -> Result<&dyn Restore, SnapshotError> {
        restores(&*self.backend)
    }
}

fn restores(backend: &dyn Backend) -> Result<&dyn Restore, SnapshotError> {
    let lacks = || lacking("this device cannot be restored");
    backend.restores(Ordered(())).ok_or_else(lacks)
}

/// A backend that has the objects of a snapshot, and takes their bytes from several threads.
pub struct Filling {
    backend: Arc<dyn Backend>,
}

impl Filling {
    /// Takes memory that a snapshot of another process has exported, until the end.
    pub fn take_held(&self, parts: Vec<HeldPart>) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore_from(parts)
    }

    /// Returns whether bytes may come so, of which none is looked at on its way.
    pub fn takes_held(&self) -> Result<bool, SnapshotError> {
        Ok(restores(&*self.backend)?.takes_held())
    }

    /// Puts back bytes that lie in that memory.
    pub fn put_held(&self, piece: &Piece, from: HeldPlace) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore_held(piece, from)
    }

    /// Puts bytes back where they were.
    pub fn put(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore(object, start, bytes)
    }

    /// Puts back as many bytes as `fill` writes; none if it answers no.
    pub fn put_filled(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore_filled(object, start, bytes, fill)
    }

    /// Waits for all bytes that travel, and lets go of memory from [`Filling::take_held`].
    pub fn rest(&self) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore_rest()
    }

    /// Takes the notes of a later snapshot of the same devices before what has been made and ended
    /// there since is made and ended here.
    pub fn more(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        restores(&*self.backend)?.restore_more(notes)
    }

    /// Takes the notes and all pieces of a later snapshot of the same devices, whose bytes come
    /// next as far as they have changed: `false` where this backend has not become what those are.
    ///
    /// What is in none of the pieces reads as zero from now on.
    pub fn later(&self, notes: &[u8], pieces: &[Piece]) -> Result<bool, SnapshotError> {
        restores(&*self.backend)?.restore_later(notes, pieces)
    }

    /// Waits for all bytes, and returns the backend, for use.
    pub fn finish(self) -> Result<Arc<dyn Backend>, SnapshotError> {
        restores(&*self.backend)?.restore_end()?;
        Ok(self.backend)
    }
}

/// Devices whose memory is swapped out, or partly so.
pub struct Swapped {
    backend: Arc<dyn Backend>,
}

impl Swapped {
    /// Gives memory back, at rest. What a snapshot tells of it is the caller's to keep.
    ///
    /// Returns with it how many bytes have gone, or why they have not: then some may have.
    ///
    /// # Errors
    ///
    /// NOT_SUPPORTED if the devices cannot do so.
    pub fn out(
        backend: Arc<dyn Backend>,
    ) -> Result<(Swapped, Result<u64, SnapshotError>), SnapshotError> {
        let swapped = Swapped { backend };
        let gone = swapped.role()?.vacate();
        Ok((swapped, gone))
    }

    /// Takes memory again for what has gone. All its bytes are then to be put back.
    ///
    /// # Errors
    ///
    /// OUT_OF_MEMORY, and nothing is taken, where there is not so much.
    pub fn take_memory(&self) -> Result<SwapIn<'_>, SnapshotError> {
        let role = self.role()?;
        role.occupy()?;
        Ok(SwapIn { role })
    }

    fn role(&self) -> Result<&dyn Swap, SnapshotError> {
        let lacks = || lacking("this device's memory cannot be swapped out");
        self.backend.swaps(Ordered(())).ok_or_else(lacks)
    }
}

/// Devices that have memory again, and take its bytes from several threads.
pub struct SwapIn<'a> {
    role: &'a dyn Swap,
}

impl SwapIn<'_> {
    pub fn put(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.role.refill(object, start, bytes)
    }

    /// Waits for all bytes.
    pub fn finish(self) -> Result<(), SnapshotError> {
        self.role.refilled()
    }
}
