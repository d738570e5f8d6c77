//! What outlives a capture's proxy: the memory of the devices that it lies in, and a file in memory
//! with all the rest. A client's devices come back from it as from the image, only sooner.

use crate::capture::Capture;
use crate::error::CaptureError;
use crate::error::RestoreError;
use crate::executor::Holding;
use crate::limits::has_room;
use crate::saved::DevicePiece;
use crate::work;
use kedge_control::keeper::MAX_PARTS;
use kedge_device::{Filling, Held, HeldPart, HeldPlace};
use kedge_device_nvidia::CacheLimits;
use kedge_gpu_image::{HELD_SECTION, SavedObject, SavedProxy};
use kedge_image::{Choice, ImageFile, ImageWriter};
use kedge_wire::{List, wire};
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

/// Bytes that are copied together.
const CHUNK: u64 = 1 << 20;

wire! {
    /// Where the devices' memory is that is held.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedHeld {
        /// Device and bytes of each part, in the order of their descriptors.
        pub parts: List<(u32, u64), 256>,
        pub places: List<SavedPlace, 4194304>,
    }

    /// The object `number` lies at `offset` of what is held on a device.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct SavedPlace { pub number: u64, pub device: u32, pub offset: u64 }
}

impl Capture {
    /// Makes what outlives this process, within the limits.
    pub(crate) fn hold(&self, limits: CacheLimits) -> Result<Holding, CaptureError> {
        if !self.is_whole() {
            return Err(CaptureError::Part);
        }
        let held = self.on_devices(limits)?;
        // Pieces are a capture's first objects.
        let place = |index: usize| held.places.get(index).copied().flatten();
        let objects = || self.saved.objects.iter().enumerate();
        let places = objects().filter_map(|(index, (number, _))| {
            let HeldPlace { device, offset } = place(index)?;
            Some(SavedPlace { number: *number, device, offset })
        });
        let places: Vec<SavedPlace> = places.collect();
        let rest: Vec<Rest> = objects()
            .filter(|(index, _)| place(*index).is_none())
            .map(|(index, (number, object))| Rest { index, number: *number, bytes: object.bytes() })
            .collect();
        has_room(rest.iter().map(|rest| rest.bytes).sum(), limits)?;
        let (writer, file) = ImageWriter::in_memory("kedge-held")?;
        self.write_section(&writer)?;
        let parts = held.parts.iter().map(|part| (part.device, part.bytes)).collect();
        let saved = SavedHeld { parts: List::new(parts)?, places: List::new(places)? };
        let mut section = Vec::new();
        kedge_wire::encode(&saved, &mut section);
        writer.section(HELD_SECTION, &section)?;
        self.write_rest(&writer, &rest)?;
        let entry = writer.finish()?;
        let on_devices = held.parts.iter().map(|part| part.bytes).sum();
        Ok(Holding { file, entry, parts: held.parts, on_devices })
    }

    /// What lies on devices and can stay there; nothing where that is too much.
    fn on_devices(&self, limits: CacheLimits) -> Result<Held, CaptureError> {
        let held = self.snapshot.export().map_err(kedge_device::SnapshotError::from)?;
        let bytes: u64 = held.parts.iter().map(|part| part.bytes).sum();
        let fits = held.parts.len() <= MAX_PARTS && bytes <= limits.gpu;
        Ok(if fits { held } else { Held::default() })
    }

    fn write_rest(&self, writer: &ImageWriter, rest: &[Rest]) -> Result<(), CaptureError> {
        let chunks = |rest: &Rest| {
            let Rest { index, number, bytes } = *rest;
            let starts = (0..bytes).step_by(CHUNK as usize);
            starts.map(move |start| (index, number, start..(start + CHUNK).min(bytes)))
        };
        let all: Vec<_> = rest.iter().flat_map(chunks).collect();
        work::each(&all, Vec::new, |(index, number, range), buffer| {
            self.fill(*index, range.clone(), buffer)?;
            let encoded = kedge_image::encode(buffer, Choice::Raw);
            Ok(writer.memory(*number, range.start, buffer.len() as u64, &encoded)?)
        })
    }
}

/// An object that does not lie on a device: which of the capture's, and its number.
struct Rest {
    index: usize,
    number: u64,
    bytes: u64,
}

/// Has the devices take what is held in their own memory: the numbers of those objects.
pub(crate) fn fill(
    file: &ImageFile,
    saved: &SavedProxy,
    fds: Vec<OwnedFd>,
    filling: &Filling,
) -> Result<HashSet<u64>, RestoreError> {
    let nonsense = |_| RestoreError::Damaged("a section is nonsense");
    let held: SavedHeld = kedge_wire::decode(&file.section(HELD_SECTION)?).map_err(nonsense)?;
    if held.parts.len() != fds.len() {
        return Err(RestoreError::Damaged("a part of what is held is missing"));
    }
    let parts = held.parts.iter().zip(fds);
    let parts = parts.map(|(&(device, bytes), fd)| HeldPart { device, bytes, fd });
    filling.take_held(parts.collect())?;
    let objects: HashMap<u64, &SavedObject> =
        saved.objects.iter().map(|(number, object)| (*number, object)).collect();
    work::each(
        &held.places,
        || (),
        |place, ()| {
            let piece = objects.get(&place.number).and_then(|object| object.piece());
            let piece = piece.ok_or(RestoreError::Damaged("a place of no object"))?;
            let from = HeldPlace { device: place.device, offset: place.offset };
            Ok::<(), RestoreError>(filling.put_held(&piece, from)?)
        },
    )?;
    Ok(held.places.iter().map(|place| place.number).collect())
}
