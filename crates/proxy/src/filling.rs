//! Bytes that come back to devices and to the shared arena.

use crate::client_memory::write_shared;
use crate::crossing::{Crossing, Part};
use crate::error::RestoreError;
use crate::saved::DevicePiece;
use crate::work;
use kedge_cuda_types::arena;
use kedge_device::{Filling, Object, SnapshotError};
use kedge_gpu_image::{SavedObject, SavedProxy};
use kedge_image::{Layers, Source};
use std::collections::HashSet;

const BEYOND: RestoreError = RestoreError::Damaged("an object beyond all memory");
/// What lies in the page cache is copied by as many threads as there are cores, up to here: a bus
/// takes 55 GB/s.
const READERS: usize = 16;

/// Puts all bytes back where they were, but those of objects that are `placed` already.
pub(crate) fn fill(
    layers: &Layers,
    saved: &SavedProxy,
    placed: &HashSet<u64>,
    target: &Target<'_>,
) -> Result<(), RestoreError> {
    let mut all = Vec::new();
    for (number, object) in saved.objects.iter() {
        if !matches!(object, SavedObject::Image { .. }) && !placed.contains(number) {
            let sources = layers.sources(*number);
            complete(object, &sources)?;
            all.extend(sources.into_iter().map(|source| (object, source)));
        }
    }
    work::by(
        READERS,
        &all,
        || (Vec::new(), Vec::new()),
        |(object, Source { layer, extent, parts }), (scratch, bytes)| {
            if let (Some(piece), [(from, to)]) = (object.piece(), &parts[..])
                && target.crossing.is_none()
                && (*from, *to) == (extent.address, extent.address + extent.decoded)
                && *to <= object.bytes()
            {
                let start = piece.start.checked_add(*from).ok_or(BEYOND)?;
                let mut read = Ok(());
                let mut fill = |room: &mut [u8]| {
                    read = layers.file(*layer).read(extent, scratch, room);
                    read.is_ok()
                };
                let bytes = extent.decoded as usize;
                target.filling.put_filled(&piece.object, start, bytes, &mut fill)?;
                return Ok(read?);
            }
            bytes.resize(extent.decoded as usize, 0);
            layers.file(*layer).read(extent, scratch, bytes)?;
            for &(from, to) in parts {
                // The last page of an object may be longer than it.
                let to = to.min(object.bytes());
                let inside = (from - extent.address) as usize..(to - extent.address) as usize;
                put(object, from, &bytes[inside], target)?;
            }
            Ok(())
        },
    )
}

/// All of an object is there, and no more.
fn complete(object: &SavedObject, sources: &[Source]) -> Result<(), RestoreError> {
    let mut bytes = 0_u64;
    for Source { extent, parts, .. } in sources {
        if extent.decoded > kedge_image::MAX_EXTENT {
            return Err(RestoreError::Damaged("an extent is too long"));
        }
        for (from, to) in parts {
            if *from >= object.bytes() {
                return Err(RestoreError::Damaged("bytes past their object's end"));
            }
            bytes = bytes.saturating_add(to.min(&object.bytes()) - from);
        }
    }
    if bytes == object.bytes() { Ok(()) } else { Err(RestoreError::Damaged("bytes are missing")) }
}

/// The new devices.
pub(crate) struct Target<'a> {
    pub(crate) filling: &'a Filling,
    /// If they are of another kind.
    pub(crate) crossing: Option<&'a Crossing>,
}

impl Target<'_> {
    fn restore(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        let Some(crossing) = self.crossing else {
            return self.filling.put(object, start, bytes);
        };
        let mut parts = crossing.places(object, start, bytes.len())?.into_iter();
        parts.try_for_each(|Part { object, start, bytes: range }| {
            self.filling.put(&object, start, &bytes[range])
        })
    }
}

pub(crate) fn put(
    object: &SavedObject,
    at: u64,
    bytes: &[u8],
    target: &Target<'_>,
) -> Result<(), RestoreError> {
    if let Some(piece) = object.piece() {
        let start = piece.start.checked_add(at).ok_or(BEYOND)?;
        return Ok(target.restore(&piece.object, start, bytes)?);
    }
    let SavedObject::Arena { start, .. } = object else {
        return Err(RestoreError::Damaged("bytes of no object"));
    };
    put_shared(*start, at, bytes)
}

/// Puts bytes into the shared arena: from `at` on of what begins at `start`.
fn put_shared(start: u64, at: u64, bytes: &[u8]) -> Result<(), RestoreError> {
    let offset = start.checked_add(at).filter(|offset| *offset < arena::SHARED_LEN);
    let addr = arena::SHARED_BASE + offset.ok_or(BEYOND)?;
    write_shared(addr, bytes).map_err(|_| BEYOND)
}

/// Puts back what the shared arena held, and nothing else.
pub(crate) fn fill_arena(layers: &Layers, saved: &SavedProxy) -> Result<(), RestoreError> {
    let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
    for (number, object) in saved.objects.iter() {
        let SavedObject::Arena { start, .. } = object else { continue };
        let sources = layers.sources(*number);
        complete(object, &sources)?;
        for Source { layer, extent, parts } in sources {
            bytes.resize(extent.decoded as usize, 0);
            layers.file(layer).read(&extent, &mut scratch, &mut bytes)?;
            for (from, to) in parts {
                let to = to.min(object.bytes());
                let inside = (from - extent.address) as usize..(to - extent.address) as usize;
                put_shared(*start, from, &bytes[inside])?;
            }
        }
    }
    Ok(())
}
