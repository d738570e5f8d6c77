//! Snapshots that outlive their process: the device memory that they lie in goes to somebody else
//! as descriptors, and a later process copies from there inside of the device.

use crate::NvidiaBackend;
use crate::driver::check;
use crate::snapshot::{Place, free_memory};
use crate::sources::Sources;
use crate::spare::{LEFT, Region, Room};
use kedge_cuda_types::CuError;
use kedge_device::{Held, HeldPart, HeldPlace, Piece, SnapshotError};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// A region whose parts are exported, and what of the device's parts lies before them.
struct Exported<'a> {
    device: u32,
    region: &'a Region,
    before: u64,
}

impl Exported<'_> {
    fn offset(&self, place: Place) -> Option<u64> {
        let Place::Device { device, addr } = place else { return None };
        let offset = addr.checked_sub(self.region.base())?;
        (device == self.device && offset < self.region.filled()).then_some(offset)
    }
}

/// Where a snapshot's pieces lie in `room`, and descriptors of that. `kept`: what was copied, by
/// object and start; a piece that lies in several places is not told of.
pub(crate) fn export(
    room: &Room,
    pieces: &[Piece],
    kept: &[(Piece, Place)],
) -> Result<Held, CuError> {
    let (mut parts, mut exported) = (Vec::new(), Vec::new());
    for (&device, regions) in &room.devices {
        let mut before = 0;
        for region in regions {
            let here = Exported { device, region, before };
            let ends = kept.iter().filter_map(|(piece, place)| {
                here.offset(*place).map(|offset| offset + piece.bytes)
            });
            // What lies behind the last piece stays out.
            let needed = ends.max().unwrap_or(0);
            for (fd, bytes) in region.export(needed)? {
                before += bytes;
                parts.push(HeldPart { device, bytes, fd });
            }
            exported.push(here);
        }
    }
    let find = |piece: &Piece| {
        let order = |(other, _): &(Piece, Place)| {
            (&other.object, other.start).cmp(&(&piece.object, piece.start))
        };
        let at = kept.binary_search_by(order).ok()?;
        let (_, place) = kept.get(at).filter(|(whole, _)| whole == piece)?;
        exported.iter().find_map(|one| {
            let offset = one.before + one.offset(*place)?;
            Some(HeldPlace { device: one.device, offset })
        })
    };
    Ok(Held { places: pieces.iter().map(find).collect(), parts })
}

/// Descriptors of all of a snapshot's room on the devices.
pub(crate) fn lend(room: &Room) -> Result<Vec<HeldPart>, CuError> {
    let mut parts = Vec::new();
    for (&device, regions) in &room.devices {
        for region in regions {
            let exported = region.export(region.filled())?.into_iter();
            parts.extend(exported.map(|(fd, bytes)| HeldPart { device, bytes, fd }));
        }
    }
    Ok(parts)
}

/// Where a place lies in what [`lend`] gives.
pub(crate) fn lent(room: &Room, place: Place) -> Option<HeldPlace> {
    let Place::Device { device, .. } = place else { return None };
    let mut before = 0;
    for region in room.devices.get(&device)? {
        if let Some(offset) = (Exported { device, region, before }).offset(place) {
            return Some(HeldPlace { device, offset: before + offset });
        }
        before += region.filled();
    }
    None
}

impl NvidiaBackend {
    /// Allocates. What is kept ready for a snapshot, and then what is held of one, is the program's
    /// first of all.
    pub(crate) fn allocate_releasing_cache(
        &self,
        allocate: impl Fn() -> Result<(), CuError>,
    ) -> Result<(), CuError> {
        let mut outcome = allocate();
        if outcome == Err(CuError::OUT_OF_MEMORY) && self.shared.cache.surrender() {
            outcome = allocate();
        }
        if outcome == Err(CuError::OUT_OF_MEMORY) && self.shared.host.release_held() {
            outcome = allocate();
        }
        outcome
    }

    /// Whether a snapshot of `sources` has not enough room on the devices beside one that is held.
    pub(crate) fn needs_what_is_held(&self, sources: &Sources) -> bool {
        // Under a limit, two of them are too many.
        let limited = self.shared.cache.limits.gpu < u64::MAX;
        limited || self.devices.iter().any(|(index, _)| self.is_short(index, sources))
    }

    fn is_short(&self, index: u32, sources: &Sources) -> bool {
        let bytes = sources.bytes_on(index);
        let free = || {
            let context = self.context_on(index)?;
            let _held = context.hold()?;
            free_memory(&self.shared.driver)
        };
        bytes > 0 && free().is_ok_and(|free| free.saturating_sub(LEFT) < bytes)
    }

    /// See [`kedge_device::Restore::restore_from`].
    pub(crate) fn import_held(&self, parts: Vec<HeldPart>) -> Result<(), SnapshotError> {
        let mut by_device: BTreeMap<u32, Vec<(OwnedFd, u64)>> = BTreeMap::new();
        for HeldPart { device, bytes, fd } in parts {
            by_device.entry(device).or_default().push((fd, bytes));
        }
        for (device, parts) in by_device {
            let raw = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
            let region = Region::import(&self.shared.driver, raw, &parts).map_err(|error| {
                SnapshotError::new(error, "the memory that a snapshot was held in cannot be had")
            })?;
            self.restoring().held.insert(device, region);
        }
        Ok(())
    }

    /// See [`kedge_device::Restore::restore_held`].
    pub(crate) fn copy_held(&self, piece: &Piece, from: HeldPlace) -> Result<(), SnapshotError> {
        let mut restoring = self.restoring();
        if let Some(moved) = restoring.moved.first() {
            // Whether anything points to it is found out where the bytes pass by, which they do not
            // here.
            return Err(moved.refuse("what is held of the devices' memory is not looked through"));
        }
        let region = restoring.held.get(&from.device).ok_or(CuError::INVALID_VALUE)?;
        let end = from.offset.checked_add(piece.bytes);
        if end.is_none_or(|end| end > region.filled()) {
            return Err(CuError::INVALID_VALUE.into());
        }
        let source = region.base() + from.offset;
        let target = self.target(&mut restoring, &piece.object, piece.start, piece.bytes)?;
        restoring.uses(&target.ctx);
        let held = target.ctx.hold()?;
        let (driver, stream) = (&self.shared.driver, held.streams().inside);
        // SAFETY: memory of so many bytes, as was just checked; `target` has found room for them.
        // What is held stays mapped until finish_restore() has waited for this stream.
        let started = check(unsafe {
            (driver.cuMemcpyDtoDAsync_v2)(target.addr, source, piece.bytes as usize, stream)
        });
        Ok(started?)
    }
}
