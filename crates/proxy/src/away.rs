//! A client whose devices' memory is swapped out: it lies in files in memory, packed, and comes
//! back before the next message is dispatched.

use crate::error::CaptureError;
use crate::error::RestoreError;
use crate::limits::has_room;
use crate::work;
use kedge_device::{Backend, Object, Piece, SnapshotError, Swapped};
use kedge_device_nvidia::CacheLimits;
use kedge_image::{Choice, Extent, ImageFile, ImageWriter, PAGE};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are packed together.
const CHUNK: u64 = 1 << 20;
/// A file in memory is written by one thread at a time, so there are as many as threads.
const FILES: usize = work::MAX_THREADS;

/// What was on the devices.
pub(crate) struct SwappedOut {
    /// An object of it is a piece, by its number and one.
    files: Vec<File>,
    pieces: Vec<Piece>,
    /// What the devices have more for it.
    pub(crate) bytes: u64,
    devices: Swapped,
}

/// Why memory did not go; what has gone comes back.
pub(crate) struct SwapOutFailure {
    pub(crate) why: CaptureError,
    pub(crate) gone: Option<Box<SwappedOut>>,
}

impl SwappedOut {
    /// Packs what the devices' memory holds, and gives that memory back. All is at rest.
    pub(crate) fn leave(
        backend: Arc<dyn Backend>,
        limits: CacheLimits,
    ) -> Result<SwappedOut, SwapOutFailure> {
        let nothing_gone = |why| SwapOutFailure { why, gone: None };
        let (files, pieces) = pack(&*backend, limits).map_err(nothing_gone)?;
        let swapped = Swapped::out(backend).map_err(|why| nothing_gone(why.into()))?;
        let away = |devices, bytes| SwappedOut { files, pieces, bytes, devices };
        match swapped {
            (devices, Ok(bytes)) => Ok(away(devices, bytes)),
            (devices, Err(why)) => {
                Err(SwapOutFailure { why: why.into(), gone: Some(Box::new(away(devices, 0))) })
            }
        }
    }

    /// Puts everything back; nothing has changed where there is not enough memory.
    pub(crate) fn come_back(&self) -> Result<(), RestoreError> {
        let open = |file: &File| {
            let again = file.try_clone().map_err(RestoreError::Memory)?;
            Ok::<_, RestoreError>(ImageFile::of_descriptor(again, Path::new("kedge-away"), None)?)
        };
        let files = self.files.iter().map(open).collect::<Result<Vec<ImageFile>, _>>()?;
        let coming = self.devices.take_memory()?;
        let all = files.iter().flat_map(|file| file.memory().map(move |extent| (file, *extent)));
        let all: Vec<(&ImageFile, Extent)> = all.collect();
        work::each(
            &all,
            || (Vec::new(), Vec::new()),
            |(file, extent), (scratch, bytes)| {
                let number = extent.object.checked_sub(1).and_then(|at| usize::try_from(at).ok());
                let piece = number.and_then(|at| self.pieces.get(at));
                let piece = piece.ok_or(RestoreError::Damaged("bytes of no object"))?;
                let length = piece.bytes.saturating_sub(extent.address).min(extent.decoded);
                bytes.resize(extent.decoded as usize, 0);
                file.read(extent, scratch, bytes)?;
                Ok::<(), RestoreError>(coming.put(
                    &piece.object,
                    piece.start + extent.address,
                    &bytes[..length as usize],
                )?)
            },
        )?;
        Ok(coming.finish()?)
    }
}

/// What the devices' memory holds, packed: files, and the pieces that are their objects.
fn pack(
    backend: &dyn Backend,
    limits: CacheLimits,
) -> Result<(Vec<File>, Vec<Piece>), CaptureError> {
    let snapshot = kedge_device::snapshots(backend)?.snapshot(None)?;
    let goes = |piece: &&Piece| matches!(piece.object, Object::Memory | Object::Handle(_));
    let pieces: Vec<Piece> = snapshot.pieces().iter().filter(goes).cloned().collect();
    has_room(pieces.iter().map(|piece| piece.bytes).sum(), limits)?;
    let writers = (0..FILES).map(|_| ImageWriter::in_memory("kedge-away"));
    let made = writers.collect::<Result<Vec<(ImageWriter, File)>, _>>()?;
    let (writers, files): (Vec<ImageWriter>, Vec<File>) = made.into_iter().unzip();
    let chunks = |(number, piece): (u64, &Piece)| {
        let (piece, bytes) = (piece.clone(), piece.bytes);
        let starts = (0..bytes).step_by(CHUNK as usize);
        starts.map(move |at| (number, piece.clone(), at..(at + CHUNK).min(bytes)))
    };
    let all: Vec<_> = (1..).zip(&pieces).flat_map(chunks).collect();
    work::each(&all, Vec::new, |(number, piece, range), buffer: &mut Vec<u8>| {
        let length = (range.end - range.start) as usize;
        buffer.clear();
        buffer.resize(length.next_multiple_of(PAGE as usize), 0);
        let read = snapshot.read(piece, piece.start + range.start, &mut buffer[..length]);
        read.map_err(SnapshotError::from)?;
        let encoded = kedge_image::encode(buffer, Choice::Auto);
        let writer = &writers[(range.start / CHUNK) as usize % FILES];
        Ok::<(), CaptureError>(writer.memory(
            *number,
            range.start,
            buffer.len() as u64,
            &encoded,
        )?)
    })?;
    for writer in writers {
        writer.finish()?;
    }
    Ok((files, pieces))
}
