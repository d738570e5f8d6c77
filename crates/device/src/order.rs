//! What must be called in order, as values: a wrong order does not compile.
//!
//! A backend that was just built is a [`NewBackend`]. It is either used from now on, or restored.
//! Then whoever is to use it, a [`Maker`], is made with it and shut in: in a [`Restoring`], which
//! alone has it make objects again, then in a [`Restored`], whose [`Filling`] takes bytes. At the
//! end it comes out, with a backend for use. Memory that is swapped out is a [`Swapped`], which
//! alone leads to [`SwapIn`].
//!
//! What this keeps are the roles of a `dyn Backend`; who makes a [`NewBackend`] has to hand over a
//! backend that nobody has used, and the closure that makes a [`Maker`] must give its backend to
//! nobody who has it work before that comes out.
//!
//! A restart, and memory that goes and comes:
//!
//! ```no_run
//! use kedge_device::{Backend, Maker, NewBackend, Object, SnapshotError, Swapped};
//! use std::sync::Arc;
//!
//! /// What uses the devices; here it grants slabs at these addresses.
//! struct Client(Arc<dyn Backend>);
//!
//! impl Maker for Client {
//!     type Step = u64;
//!     type Error = SnapshotError;
//!
//!     fn make(&mut self, address: u64) -> Result<(), SnapshotError> {
//!         Ok(self.0.grant(0, address, 2 << 20)?)
//!     }
//! }
//!
//! fn bring_back(new: NewBackend, notes: &[u8]) -> Result<Client, SnapshotError> {
//!     let new_client = |backend| Ok::<_, SnapshotError>(Client(backend));
//!     let mut restoring = new.begin_restore(notes, new_client)?;
//!     restoring.make(0x1000_0000)?;
//!     let restored = restoring.made()?;
//!     restored.filling().put(&Object::Memory, 0x1000_0000, &[1])?;
//!     restored.finish()
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
//! fn early<M: kedge_device::Maker>(restoring: kedge_device::Restoring<'_, M>) {
//!     let _ = restoring.filling();
//! }
//! ```
//!
//! Work, or objects made by another hand, on a backend whose restart has begun: who is to use it is
//! not to be had.
//!
//! ```compile_fail,E0616
//! fn at_work<M: kedge_device::Maker>(restoring: kedge_device::Restoring<'_, M>) {
//!     let _ = restoring.maker;
//! }
//! ```
//!
//! ```compile_fail,E0616
//! fn at_work<M: kedge_device::Maker>(restored: kedge_device::Restored<M>) {
//!     let _ = restored.maker;
//! }
//! ```
//!
//! Devices that are used although a later snapshot was begun, and its objects are not all there:
//!
//! ```compile_fail,E0382
//! fn half<M: kedge_device::Maker>(restored: kedge_device::Restored<M>) {
//!     let _ = restored.more(&[]);
//!     let _ = restored.finish();
//! }
//! ```
//!
//! Objects that come after others whose bytes are there already, of which the backend has not been
//! told:
//!
//! ```compile_fail,E0599
//! fn untold<M: kedge_device::Maker>(mut restored: kedge_device::Restored<M>, step: M::Step) {
//!     let _ = restored.make(step);
//! }
//! ```
//!
//! A backend that is restored and used as a new one:
//!
//! ```compile_fail,E0382
//! fn twice<M: kedge_device::Maker>(
//!     new: kedge_device::NewBackend,
//!     user: impl FnOnce(std::sync::Arc<dyn kedge_device::Backend>) -> M,
//! ) {
//!     let _ = new.begin_restore(&[], |backend| Ok::<_, kedge_device::SnapshotError>(user(backend)));
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

    /// Begins to bring back what a snapshot with these notes holds. `maker` makes what is to use
    /// the backend, and has it make nothing as yet.
    ///
    /// # Errors
    ///
    /// NOT_SUPPORTED if the backend cannot be restored; else what it has against the notes, or why
    /// `maker` fails.
    pub fn begin_restore<'a, M: Maker, E: From<SnapshotError>>(
        self,
        notes: &'a [u8],
        maker: impl FnOnce(Arc<dyn Backend>) -> Result<M, E>,
    ) -> Result<Restoring<'a, M>, E> {
        let backend = self.0;
        restores(&*backend)?.restore_begin(notes)?;
        let maker = maker(Arc::clone(&backend))?;
        Ok(Restoring { backend, maker, notes })
    }

    /// Returns the backend, for use.
    pub fn start(self) -> Arc<dyn Backend> {
        self.0
    }
}

/// What uses a backend, and makes objects on it again at a restart, a step at a time.
pub trait Maker {
    type Step;
    type Error;

    /// Makes or ends what the step tells.
    ///
    /// # Errors
    ///
    /// The backend does not do so.
    fn make(&mut self, step: Self::Step) -> Result<(), Self::Error>;
}

/// A backend on which the objects of a snapshot are being made again.
pub struct Restoring<'a, M> {
    backend: Arc<dyn Backend>,
    maker: M,
    notes: &'a [u8],
}

impl<M: Maker> Restoring<'_, M> {
    /// Has an object made.
    ///
    /// # Errors
    ///
    /// Those of [`Maker::make`].
    pub fn make(&mut self, step: M::Step) -> Result<(), M::Error> {
        self.maker.make(step)
    }

    /// Goes on to the bytes, as all objects have been made.
    ///
    /// # Errors
    ///
    /// The objects are not those that the notes tell of.
    pub fn made(self) -> Result<Restored<M>, SnapshotError> {
        restores(&*self.backend)?.restore_notes(self.notes)?;
        Ok(Restored { filling: Filling { backend: self.backend }, maker: self.maker })
    }
}

/// A backend that has the objects of a snapshot, and not all of their bytes as yet.
pub struct Restored<M> {
    filling: Filling,
    maker: M,
}

impl<M: Maker> Restored<M> {
    /// Returns what takes the bytes.
    pub fn filling(&self) -> &Filling {
        &self.filling
    }

    /// Takes the notes of a later snapshot of the same devices: what has been made and ended there
    /// since is to be made and ended here.
    ///
    /// # Errors
    ///
    /// What the backend has against the notes.
    pub fn more(self, notes: &[u8]) -> Result<Changing<'_, M>, SnapshotError> {
        restores(&*self.filling.backend)?.restore_more(notes)?;
        Ok(Changing { restored: self, notes })
    }

    /// Waits for all bytes, and returns what uses the backend from now on.
    ///
    /// # Errors
    ///
    /// They have not arrived.
    pub fn finish(self) -> Result<M, SnapshotError> {
        restores(&*self.filling.backend)?.restore_end()?;
        Ok(self.maker)
    }
}

/// A backend that becomes what is in a later snapshot.
pub struct Changing<'a, M> {
    restored: Restored<M>,
    notes: &'a [u8],
}

impl<M: Maker> Changing<'_, M> {
    /// Has an object made or ended.
    ///
    /// # Errors
    ///
    /// Those of [`Maker::make`].
    pub fn make(&mut self, step: M::Step) -> Result<(), M::Error> {
        self.restored.maker.make(step)
    }

    /// Takes all pieces of that snapshot, whose bytes come next as far as they have changed: `None`
    /// where the backend has not become what those are, and is good for nothing any more.
    ///
    /// What is in none of the pieces reads as zero from now on.
    ///
    /// # Errors
    ///
    /// What the backend has against the notes.
    pub fn made(self, pieces: &[Piece]) -> Result<Option<Restored<M>>, SnapshotError> {
        let backend = &*self.restored.filling.backend;
        let is_made = restores(backend)?.restore_later(self.notes, pieces)?;
        Ok(is_made.then_some(self.restored))
    }
}

fn restores(backend: &dyn Backend) -> Result<&dyn Restore, SnapshotError> {
    let lacks = || lacking("this device cannot be restored");
    backend.restores(Ordered(())).ok_or_else(lacks)
}

/// What takes the bytes of a [`Restored`] backend's objects, from several threads.
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
