//! A client whose devices' memory is swapped out: it lies in a file in memory, packed, and comes back before
//! the next message is dispatched.

use crate::capture::CaptureError;
use crate::hold::has_room;
use crate::restore::RestoreError;
use crate::work;
use kedge_device::{Backend, Object, Piece, SnapshotError};
use kedge_device_nvidia::CacheLimits;
use kedge_image::{Choice, Extent, ImageFile, ImageWriter, PAGE};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// Bytes that are packed together.
const CHUNK: u64 = 1 << 20;

/// What was on the devices.
pub(crate) struct Away {
    /// An object of it is a piece, by its number and one.
    file: File,
    pieces: Vec<Piece>,
    /// What the devices have more for it.
    pub(crate) bytes: u64,
}

/// Why memory did not go; what has gone comes back.
pub(crate) struct Stayed {
    pub(crate) why: CaptureError,
    pub(crate) gone: Option<Away>,
}

impl Away {
    /// Packs what the devices' memory holds, and gives that memory back. All is at rest.
    pub(crate) fn leave(backend: &dyn Backend, limits: CacheLimits) -> Result<Away, Stayed> {
        let packed = Away::pack(backend, limits).map_err(|why| Stayed { why, gone: None })?;
        match backend.vacate() {
            Ok(bytes) => Ok(Away { bytes, ..packed }),
            Err(why) => Err(Stayed { why: why.into(), gone: Some(packed) }),
        }
    }

    fn pack(backend: &dyn Backend, limits: CacheLimits) -> Result<Away, CaptureError> {
        let snapshot = backend.snapshot()?;
        let in_memory = |piece: &&Piece| piece.object == Object::Memory;
        let pieces: Vec<Piece> = snapshot.pieces().iter().filter(in_memory).cloned().collect();
        has_room(pieces.iter().map(|piece| piece.bytes).sum(), limits)?;
        let writer = ImageWriter::in_memory("kedge-away")?;
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
            Ok::<(), CaptureError>(writer.memory(
                *number,
                range.start,
                buffer.len() as u64,
                &encoded,
            )?)
        })?;
        let (file, _) = writer.finish_open()?;
        Ok(Away { file, pieces, bytes: 0 })
    }

    /// Puts everything back; nothing has changed where there is not enough memory.
    pub(crate) fn come_back(&self, backend: &dyn Backend) -> Result<(), RestoreError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let file = ImageFile::open(&path, None)?;
        backend.occupy()?;
        let extents: Vec<Extent> = file.memory().copied().collect();
        work::each(
            &extents,
            || (Vec::new(), Vec::new()),
            |extent, (scratch, bytes)| {
                let number = extent.object.checked_sub(1).and_then(|at| usize::try_from(at).ok());
                let piece = number.and_then(|at| self.pieces.get(at));
                let piece = piece.ok_or(RestoreError::Damaged("bytes of no object"))?;
                let length = piece.bytes.saturating_sub(extent.address).min(extent.decoded);
                bytes.resize(extent.decoded as usize, 0);
                file.read(extent, scratch, bytes)?;
                Ok::<(), RestoreError>(
                    backend.refill(piece.start + extent.address, &bytes[..length as usize])?,
                )
            },
        )?;
        Ok(backend.refilled()?)
    }
}
