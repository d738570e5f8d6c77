//! Putting a snapshot's bytes back: through pinned buffers, by as many threads as call. A buffer is
//! filled while others travel; nobody waits for the device but for a buffer.

use crate::NvidiaBackend;
use crate::code::{self, CodeTable, Corrections};
use crate::context::{Context, Held};
use crate::copies::{self, RawCopy};
use crate::driver::{Driver, check};
use crate::notes::Moved;
use crate::pinned::{SLOT, Slot};
use crate::sources::Texels;
use crate::spare::Region;
use crate::steer::Known;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::handle::CUarray;
use kedge_cuda_types::memory::{CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY3D};
use kedge_device::{Object, SnapshotError};
use kedge_protocol::{ArrayId, MemHandleId, ModuleId};
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Bytes that the driver takes at once, without a buffer of ours.
const SMALL: usize = 64 << 10;

/// What a restore needs from its notes to its end.
#[derive(Default)]
pub(crate) struct Restoring {
    /// What no word of the devices' memory may point to.
    pub(crate) moved: Arc<[Moved]>,
    /// By module that is not loaded yet: variables whose addresses the program knows.
    pub(crate) known: HashMap<ModuleId, Vec<Known>>,
    /// Words of variables that the driver's placement decides.
    pub(crate) code: Arc<Corrections>,
    /// The words of which that was found out, and what of the code has moved.
    pub(crate) tables: Vec<CodeTable>,
    pub(crate) code_moved: Vec<Moved>,
    /// Bytes of arrays, which go there as a whole.
    arrays: HashMap<ArrayId, Staged>,
    /// The program's handles, mapped once more.
    pub(crate) handles: HashMap<MemHandleId, (Region, u64, Arc<Context>)>,
    /// By device: memory that another process's snapshot lies in.
    pub(crate) held: HashMap<u32, Region>,
    /// Contexts in which bytes travel.
    pub(crate) used: Vec<Arc<Context>>,
}

impl Restoring {
    /// Bytes travel in this context.
    pub(crate) fn uses(&mut self, ctx: &Arc<Context>) {
        if !self.used.iter().any(|known| Arc::ptr_eq(known, ctx)) {
            self.used.push(Arc::clone(ctx));
        }
    }

    /// Lets go of the bytes of arrays that are not to be kept.
    pub(crate) fn keep_arrays(&mut self, keep: impl Fn(ArrayId, CUarray) -> bool) {
        self.arrays.retain(|id, staged| keep(*id, staged.raw));
    }

    /// Arrays of which there are bytes, and how many.
    pub(crate) fn staged(&self) -> impl Iterator<Item = (ArrayId, u64)> {
        self.arrays.iter().map(|(id, staged)| (*id, staged.texels.bytes()))
    }
}

/// An array's bytes, without padding.
struct Staged {
    memory: Region,
    ctx: Arc<Context>,
    raw: CUarray,
    texels: Texels,
}

/// Where bytes go.
pub(crate) struct Target {
    pub(crate) ctx: Arc<Context>,
    pub(crate) addr: u64,
}

impl NvidiaBackend {
    pub(crate) fn restoring(&self) -> MutexGuard<'_, Restoring> {
        self.restoring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`kedge_device::Restore::restore`].
    pub(crate) fn put_back(
        &self,
        object: &Object,
        start: u64,
        bytes: &[u8],
    ) -> Result<(), SnapshotError> {
        let (target, moved) = self.expecting(object, start, bytes.len())?;
        let code = Arc::clone(&self.restoring().code);
        let with = |value: fn(u64) -> u64| code::corrected(&code, object, start, bytes, value);
        // Where one function was, another may be now.
        check_words(object, start, &with(|_| 0), &moved)?;
        Ok(self.upload(&target, &with(|function| function))?)
    }

    /// See [`kedge_device::Restore::restore_filled`]: the bytes are written into a pinned buffer.
    pub(crate) fn put_filled(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), SnapshotError> {
        let variable = matches!(object, Object::Variable { .. });
        if bytes <= SMALL || bytes > SLOT || variable {
            let mut all = vec![0; bytes];
            return if fill(&mut all) { self.put_back(object, start, &all) } else { Ok(()) };
        }
        let (target, moved) = self.expecting(object, start, bytes)?;
        let held = target.ctx.hold()?;
        let mut slot = self.shared.slots.take(&target.ctx)?;
        let room = &mut slot.bytes()[..bytes];
        let sent = if fill(room) {
            let sound = check_words(object, start, room, &moved);
            sound.and_then(|()| Ok(self.send(&target, target.addr, &mut slot, bytes, &held)?))
        } else {
            Ok(())
        };
        self.shared.slots.put(slot);
        sent
    }

    /// Where bytes will go, and what no word of them may point to.
    fn expecting(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
    ) -> Result<(Target, Arc<[Moved]>), SnapshotError> {
        let mut restoring = self.restoring();
        let target = self.target(&mut restoring, object, start, bytes as u64)?;
        restoring.uses(&target.ctx);
        Ok((target, Arc::clone(&restoring.moved)))
    }

    /// Finds where bytes of an object go; INVALID_VALUE where it has no such bytes.
    pub(crate) fn target(
        &self,
        restoring: &mut Restoring,
        object: &Object,
        start: u64,
        bytes: u64,
    ) -> Result<Target, CuError> {
        let end = start.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
        let inside = |size: u64| if end <= size { Ok(()) } else { Err(CuError::INVALID_VALUE) };
        match object {
            Object::Memory => {
                let device = device_of(start).ok_or(CuError::INVALID_VALUE)?;
                if !self.tables().arena.granted(start, bytes) {
                    return Err(CuError::INVALID_VALUE);
                }
                Ok(Target { ctx: self.context_on(device)?, addr: start })
            }
            Object::Variable { module, name } => {
                let mut tables = self.tables();
                let module = tables.modules.get_mut(module).ok_or(CuError::INVALID_HANDLE)?;
                let (addr, size) = module.locate(name)?;
                inside(size)?;
                Ok(Target { ctx: Arc::clone(&module.ctx), addr: addr + start })
            }
            Object::Handle(id) => {
                if !restoring.handles.contains_key(id) {
                    restoring.handles.insert(*id, self.map_handle_again(*id)?);
                }
                let (region, size, ctx) = &restoring.handles[id];
                inside(*size)?;
                Ok(Target { ctx: Arc::clone(ctx), addr: region.base() + start })
            }
            Object::Array(id) => {
                if !restoring.arrays.contains_key(id) {
                    restoring.arrays.insert(*id, self.stage_array(*id)?);
                }
                let staged = &restoring.arrays[id];
                inside(staged.texels.bytes())?;
                Ok(Target { ctx: Arc::clone(&staged.ctx), addr: staged.memory.base() + start })
            }
        }
    }

    fn map_handle_again(&self, id: MemHandleId) -> Result<(Region, u64, Arc<Context>), CuError> {
        let found = self.tables().arena.handles().find(|handle| handle.0 == id);
        let (_, raw, bytes, device) = found.ok_or(CuError::INVALID_HANDLE)?;
        let on = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
        let mut region = Region::reserve(&self.shared.driver, on, bytes)?;
        region.map(raw, bytes)?;
        region.open()?;
        Ok((region, bytes, self.context_on(device)?))
    }

    fn stage_array(&self, id: ArrayId) -> Result<Staged, CuError> {
        let (ctx, raw, texels) = {
            let tables = self.tables();
            let found = tables.textures.arrays().find(|array| array.0 == id);
            let (_, ctx, raw, desc) = found.ok_or(CuError::INVALID_HANDLE)?;
            (Arc::clone(ctx), raw, Texels::of(desc).ok_or(CuError::NOT_SUPPORTED)?)
        };
        let on = self.devices.get(ctx.device).ok_or(CuError::INVALID_DEVICE)?;
        let memory = Region::whole(&self.shared.driver, on, texels.bytes())?;
        Ok(Staged { memory, ctx, raw, texels })
    }

    pub(crate) fn upload(&self, target: &Target, bytes: &[u8]) -> Result<(), CuError> {
        let driver = &*self.shared.driver;
        let held = target.ctx.hold()?;
        let stream = held.streams().bus;
        if bytes.len() <= SMALL {
            // SAFETY: the driver copies pageable bytes of this length before it returns; `target`
            // has found room for them.
            return check(unsafe {
                (driver.cuMemcpyHtoDAsync_v2)(
                    target.addr,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    stream,
                )
            });
        }
        for (chunk, to) in bytes.chunks(SLOT).zip((target.addr..).step_by(SLOT)) {
            let mut slot = self.shared.slots.take(&target.ctx)?;
            slot.bytes()[..chunk.len()].copy_from_slice(chunk);
            let sent = self.send(target, to, &mut slot, chunk.len(), &held);
            self.shared.slots.put(slot);
            sent?;
        }
        Ok(())
    }

    /// Sends a buffer's first bytes.
    fn send(
        &self,
        target: &Target,
        to: u64,
        slot: &mut Slot,
        bytes: usize,
        held: &Held<'_>,
    ) -> Result<(), CuError> {
        let driver = &*self.shared.driver;
        let stream = held.streams().bus;
        let from = slot.bytes()[..bytes].as_ptr();
        // SAFETY: `target` has found room for them; the buffer stays as it is until the event
        // behind the copy has passed.
        check(unsafe { (driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream) })?;
        slot.sent(driver, &target.ctx, stream)
    }

    /// See [`kedge_device::Restore::restore_end`].
    pub(crate) fn finish_restore(&self) -> Result<(), SnapshotError> {
        let restoring = std::mem::take(&mut *self.restoring());
        self.managed().expect_none();
        let driver = &*self.shared.driver;
        let mut outcome = settle(driver, &restoring.used);
        for staged in restoring.arrays.values() {
            outcome = outcome.and_then(|()| fill_array(driver, staged));
        }
        outcome = outcome.and(settle(driver, &restoring.used)).and(self.shared.slots.settle());
        outcome.map_err(|error| {
            SnapshotError::new(error, "bytes of the snapshot did not reach the devices")
        })?;
        for context in self.shared.live.all() {
            self.shared.timeline.begin(driver, &context)?;
        }
        Ok(())
    }
}

/// Waits for all that travels.
pub(crate) fn settle(driver: &Driver, contexts: &[Arc<Context>]) -> Result<(), CuError> {
    contexts.iter().try_for_each(|context| {
        let held = context.hold()?;
        let streams = held.streams();
        // SAFETY: streams of a context that is held.
        unsafe {
            check((driver.cuStreamSynchronize)(streams.bus))?;
            check((driver.cuStreamSynchronize)(streams.inside))
        }
    })
}

fn fill_array(driver: &Driver, staged: &Staged) -> Result<(), CuError> {
    let held = staged.ctx.hold()?;
    let Texels { row, rows, slices } = staged.texels;
    let copy = CUDA_MEMCPY3D {
        srcMemoryType: CU_MEMORYTYPE_UNIFIED,
        srcDevice: staged.memory.base(),
        srcPitch: row as usize,
        srcHeight: rows as usize,
        dstMemoryType: CU_MEMORYTYPE_ARRAY,
        dstArray: staged.raw,
        WidthInBytes: row as usize,
        Height: rows as usize,
        Depth: slices as usize,
        ..Default::default()
    };
    copies::run(driver, &RawCopy::Shaped(copy), held.streams().inside)
}

/// No word of an object's bytes from `start` on may point to what has moved.
fn check_words(
    object: &Object,
    start: u64,
    bytes: &[u8],
    moved: &[Moved],
) -> Result<(), SnapshotError> {
    points_into(bytes, moved).map_or(Ok(()), |(moved, at)| {
        let at = start.saturating_add(at as u64);
        let whose = match object {
            Object::Memory => format!("at {at:#x}"),
            Object::Handle(id) => format!("at {at:#x} of memory handle {}", id.0),
            Object::Array(id) => format!("at {at:#x} of array {}", id.0),
            Object::Variable { module, name } => {
                format!("at {at:#x} of variable {name} of module {}", module.0)
            }
        };
        Err(moved.refuse(&format!("a word of the devices' memory points to it, {whose}")))
    })
}

/// What has moved and an aligned word of `bytes` is the address of a part of, and where the word
/// is.
fn points_into<'a>(bytes: &[u8], moved: &'a [Moved]) -> Option<(&'a Moved, usize)> {
    let low = moved.iter().map(|one| one.range.start).min()?;
    let high = moved.iter().map(|one| one.range.end).max()?;
    let words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    let near = (0..).step_by(8).zip(words).filter(|(_, word)| (low..high).contains(word));
    let find = |word: u64| moved.iter().find(|one| one.range.contains(&word));
    near.filter_map(|(at, word)| Some((find(word)?, at))).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_to_moved_variables_are_found() {
        let moved = [(0x1000..0x1010, "a"), (0x2000..0x2004, "b")];
        let moved = moved.map(|(range, name)| Moved { range, name: name.to_owned(), to: 0 });
        let found = |words: &[u64]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            points_into(&bytes, &moved).map(|(one, at)| (one.name.clone(), at))
        };
        assert_eq!(found(&[0, 0x1010, 0x1fff, 0x2004, u64::MAX]), None);
        assert_eq!(found(&[5, 0x2003]), Some(("b".to_owned(), 8)));
        assert_eq!(found(&[0x100f]), Some(("a".to_owned(), 0)));
        assert!(points_into(&[0; 64], &[]).is_none());
    }
}
