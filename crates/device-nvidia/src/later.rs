//! A move: devices that have the objects of one snapshot, and its bytes, become what a later
//! snapshot of the same client tells of. What has been made and ended since is made and ended by
//! the same messages; here is what those do not tell.

use crate::NvidiaBackend;
use crate::driver::check;
use crate::notes::{Moved, Notes};
use crate::restore::{Restoring, settle};
use crate::texture_handles::Expected;
use kedge_cuda_types::CuError;
use kedge_device::{Object, Piece, Ranges, SnapshotError};
use std::collections::HashMap;

/// A range of an object: its first byte, and what is behind the last.
type Extent = (Object, u64, u64);

impl NvidiaBackend {
    /// See [`kedge_device::Restore::restore_more`].
    pub(crate) fn expect_more(&self, notes: &[u8]) -> Result<(), SnapshotError> {
        let notes = Notes::decode(notes)?;
        let mut tables = self.tables();
        // What is here goes on or ends, in its order; the others come behind.
        let mut here = tables.textures.objects().into_iter();
        let goes_on = |wanted: &(_, u64)| here.by_ref().any(|one| one == *wanted);
        let new = notes.textures.iter().copied().skip_while(goes_on);
        tables.textures.expected = Expected::new(new);
        Ok(())
    }

    /// See [`kedge_device::Restore::restore_rest`].
    pub(crate) fn settle_round(&self) -> Result<(), SnapshotError> {
        let mut restoring = self.restoring();
        settle(&self.shared.driver, &restoring.used)?;
        restoring.held.clear();
        Ok(())
    }

    /// See [`kedge_device::Restore::restore_later`].
    pub(crate) fn become_later(
        &self,
        notes: &[u8],
        pieces: &[Piece],
    ) -> Result<bool, SnapshotError> {
        let notes = Notes::decode(notes)?;
        let mut restoring = self.restoring();
        settle(&self.shared.driver, &restoring.used)?;
        // What these words are here was to be seen before bytes of the program's came.
        if restoring.tables != notes.code.to_vec() {
            return Ok(false);
        }
        let moved = match self.note_again(&notes) {
            Ok(moved) => moved,
            Err(error) => {
                self.shared.host.log(&format!("a move begins anew: {error}"));
                return Ok(false);
            }
        };
        restoring.moved = moved.into_iter().chain(restoring.code_moved.iter().cloned()).collect();
        self.forget_ended(&mut restoring);
        self.clear_between(&mut restoring, pieces)?;
        Ok(true)
    }

    /// Takes all of the notes that may have changed; what the driver has placed elsewhere.
    fn note_again(&self, notes: &Notes) -> Result<Vec<Moved>, SnapshotError> {
        let mut tables = self.tables();
        let moved = notes.variables_elsewhere(&mut tables)?;
        Notes::end_textures(&mut tables, &self.shared.driver)?;
        if tables.textures.objects() != notes.textures.to_vec() {
            return Err(SnapshotError::new(CuError::INVALID_HANDLE, "its textures are others"));
        }
        notes.tell_events(&tables)?;
        drop(tables);
        let mut allocations = self.allocations();
        *allocations = Default::default();
        for at in notes.allocations.iter() {
            allocations.add(at.ctx, at.addr, at.size)?;
        }
        Ok(moved)
    }

    /// Lets go of what bytes are put into, of what has ended: nothing travels.
    fn forget_ended(&self, restoring: &mut Restoring) {
        let tables = self.tables();
        restoring.keep_arrays(|id, raw| {
            tables.textures.arrays().any(|array| array.0 == id && array.2 == raw)
        });
        restoring.handles.retain(|id, _| tables.arena.handles().any(|handle| handle.0 == *id));
    }

    /// Has all memory that is in none of the pieces read as zero.
    fn clear_between(
        &self,
        restoring: &mut Restoring,
        pieces: &[Piece],
    ) -> Result<(), SnapshotError> {
        let mut kept: HashMap<&Object, Ranges> = HashMap::new();
        for Piece { object, start, bytes } in pieces {
            start.checked_add(*bytes).ok_or(CuError::INVALID_VALUE)?;
            kept.entry(object).or_default().add(*start, *bytes);
        }
        let mut gaps = Vec::new();
        for (object, start, end) in self.extents(restoring) {
            match kept.get(&object) {
                Some(kept) => {
                    gaps.extend(kept.between(start, end).map(|gap| (object.clone(), gap)))
                }
                None => gaps.push((object, (start, end))),
            }
        }
        for (object, (from, to)) in gaps {
            self.clear(restoring, &object, (from, to - from))?;
        }
        // Bytes may come by another stream.
        Ok(settle(&self.shared.driver, &restoring.used)?)
    }

    /// All that bytes may have been put into, but for variables, which are there as long as their
    /// modules are.
    fn extents(&self, restoring: &Restoring) -> Vec<Extent> {
        let tables = self.tables();
        let slabs = tables.arena.slabs().map(|(at, bytes)| (Object::Memory, at, at + bytes));
        let handles = tables.arena.handles();
        let handles = handles.map(|(id, _, bytes, _)| (Object::Handle(id), 0, bytes));
        let arrays = restoring.staged().map(|(id, bytes)| (Object::Array(id), 0, bytes));
        slabs.chain(handles).chain(arrays).collect()
    }

    fn clear(
        &self,
        restoring: &mut Restoring,
        object: &Object,
        (start, bytes): (u64, u64),
    ) -> Result<(), CuError> {
        let target = self.target(restoring, object, start, bytes)?;
        restoring.uses(&target.ctx);
        let held = target.ctx.hold()?;
        let stream = held.streams().bus;
        // SAFETY: `target` has found so many bytes there.
        check(unsafe {
            (self.shared.driver.cuMemsetD8Async)(target.addr, 0, bytes as usize, stream)
        })
    }
}
