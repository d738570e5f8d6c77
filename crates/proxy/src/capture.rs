//! What a client's devices held at one moment: taken while nothing is dispatched and the client stands
//! still, written while both go on.

use crate::gate::Parked;
use crate::record::{Image, SavedStep, Step};
use crate::saved::{self, SavedObject, SavedProxy};
use crate::work;
use kedge_cuda_types::arena;
use kedge_device::{Piece, Snapshot, SnapshotError};
use kedge_image::{Choice, FileEntry, ImageError, ImageWriter, PAGE};
use kedge_wire::{Bytes, List, Text, TooLong};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Bytes that are read, encoded and stored together.
const CHUNK: u64 = 1 << 20;

#[derive(Debug, Error)]
pub(crate) enum CaptureError {
    #[error("{0}")]
    Snapshot(#[from] SnapshotError),
    #[error("there is more of it than an image holds: {0}")]
    TooMuch(#[from] TooLong),
    #[error("cannot look at pinned memory: {0}")]
    Arena(io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
}

pub(crate) struct Capture {
    saved: SavedProxy,
    /// Where the bytes of each of `saved.objects` are.
    sources: Vec<Source>,
    snapshot: Box<dyn Snapshot>,
}

enum Source {
    Piece(Piece),
    Image(Image),
    Arena(Vec<u8>),
}

/// What of the client does not change.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) gpu: String,
    pub(crate) hello: kedge_protocol::Hello,
    pub(crate) client_memory: bool,
}

impl Capture {
    /// Takes it. All is at rest.
    pub(crate) fn take(
        parked: &Parked<'_>,
        identity: &Identity,
        shared: BorrowedFd<'_>,
    ) -> Result<Capture, CaptureError> {
        let backend = parked.dispatcher.backend();
        let host = parked.dispatcher.host();
        parked.dispatcher.sharing.check_private()?;
        let snapshot = backend.snapshot()?;
        let mut sources: Vec<Source> =
            snapshot.pieces().iter().cloned().map(Source::Piece).collect();
        let mut objects: Vec<SavedObject> = snapshot.pieces().iter().map(SavedObject::of).collect();
        for range in data(shared).map_err(CaptureError::Arena)? {
            objects.push(SavedObject::Arena { start: range.start, bytes: range.end - range.start });
            sources.push(Source::Arena(copy_arena(range)));
        }
        let steps = parked.dispatcher.record.steps();
        let steps = save_steps(steps, &mut objects, &mut sources)?;
        let saved = SavedProxy {
            version: saved::VERSION,
            gpu: Text::truncated(identity.gpu.clone()),
            hello: identity.hello.clone(),
            driver_version: backend.driver_version(),
            client_memory: identity.client_memory,
            devices: List::new(backend.devices())?,
            position: parked.server.position(),
            faults: List::new(host.faults.all())?,
            output: List::new(host.copy_output())?,
            objects: List::new(objects)?,
            steps: List::new(steps)?,
            notes: Bytes::new(snapshot.notes())?,
        };
        Ok(Capture { saved, sources, snapshot })
    }

    /// Bytes of all objects.
    pub(crate) fn bytes(&self) -> u64 {
        self.saved.objects.iter().fold(0, |sum, object| sum.saturating_add(object.bytes()))
    }

    /// Writes it to the new file `path`.
    pub(crate) fn write(&self, path: &Path, codec: Choice) -> Result<FileEntry, CaptureError> {
        let writer = ImageWriter::create(path)?;
        let mut section = Vec::new();
        kedge_wire::encode(&self.saved, &mut section);
        writer.section(saved::SECTION, &section)?;
        let chunks = |(index, object): (usize, &SavedObject)| {
            let bytes = object.bytes();
            let starts = (0..bytes).step_by(CHUNK as usize);
            starts.map(move |start| (index, start..(start + CHUNK).min(bytes)))
        };
        let all = self.saved.objects.iter().enumerate().flat_map(chunks).collect::<Vec<_>>();
        work::each(&all, Vec::new, |(index, range), buffer| {
            self.fill(*index, range.clone(), buffer)?;
            let encoded = kedge_image::encode(buffer, codec);
            let (object, length) = (*index as u64 + 1, buffer.len() as u64);
            writer.memory(object, range.start, length, &encoded)?;
            Ok::<(), CaptureError>(())
        })?;
        Ok(writer.finish()?)
    }

    /// Reads a range of an object into `buffer`, filled up with zeros to whole pages.
    fn fill(
        &self,
        index: usize,
        range: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), CaptureError> {
        let length = (range.end - range.start) as usize;
        buffer.clear();
        buffer.resize(length.next_multiple_of(PAGE as usize), 0);
        let bytes = &mut buffer[..length];
        let part = range.start as usize..range.end as usize;
        match &self.sources[index] {
            Source::Piece(piece) => {
                let read = self.snapshot.read(piece, piece.start + range.start, bytes);
                read.map_err(SnapshotError::from)?;
            }
            Source::Image(image) => bytes.copy_from_slice(&image[part]),
            Source::Arena(copy) => bytes.copy_from_slice(&copy[part]),
        }
        Ok(())
    }
}

/// The steps as an image holds them; images become objects, each once.
fn save_steps(
    steps: Vec<Step>,
    objects: &mut Vec<SavedObject>,
    sources: &mut Vec<Source>,
) -> Result<Vec<SavedStep>, TooLong> {
    let mut known = BTreeMap::new();
    let mut number = |image: Image| {
        *known.entry(Arc::as_ptr(&image)).or_insert_with(|| {
            objects.push(SavedObject::Image { bytes: image.len() as u64 });
            sources.push(Source::Image(image));
            objects.len() as u64
        })
    };
    let mut save = |step| {
        Ok(match step {
            Step::Message { message, result } => SavedStep::Message { message, result },
            Step::Module { ctx, module, images } => {
                let images = List::new(images.into_iter().map(&mut number).collect())?;
                SavedStep::Module { ctx, module, images }
            }
        })
    };
    steps.into_iter().map(&mut save).collect()
}

/// The parts of the shared arena that hold anything, by offset.
fn data(shared: BorrowedFd<'_>) -> io::Result<Vec<Range<u64>>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while let Some(start) = seek(shared, at, libc::SEEK_DATA)? {
        let end = seek(shared, start, libc::SEEK_HOLE)?.unwrap_or(arena::SHARED_LEN);
        // Pieces that are copied by several threads.
        found
            .extend((start..end).step_by(4 << 20).map(|start| start..(start + (4 << 20)).min(end)));
        at = end;
    }
    Ok(found)
}

/// `None` where there is nothing behind `at`.
fn seek(file: BorrowedFd<'_>, at: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    use std::os::fd::AsRawFd;
    // SAFETY: a plain call. The offset that it moves is used by nobody: the arena is only mapped.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}

fn copy_arena(range: Range<u64>) -> Vec<u8> {
    let mut copy = vec![0; (range.end - range.start) as usize];
    // The range lies in the arena: it is the file's own.
    let _ = crate::client_memory::read_shared(arena::SHARED_BASE + range.start, &mut copy);
    copy
}
