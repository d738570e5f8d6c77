//! What a client's devices held at one moment: taken while nothing is dispatched and the client
//! stands still, written while both go on.

use crate::changes::{Key, Tracked, Written, blocks};
use crate::client_memory;
use crate::dispatch::Dispatcher;
use crate::error::CaptureError;
use crate::executor::{NearEnd, Stored};
use crate::record::{Image, Step};
use crate::saved::DevicePiece;
use crate::work;
use kedge_cuda_types::arena;
use kedge_device::digest::{BLOCK, Digest};
use kedge_device::{Code, Digests, HeldPlace, Known, Piece, Snapshot, SnapshotError};
use kedge_gpu_image::{self as saved, SavedObject, SavedProxy, SavedStep};
use kedge_image::{Choice, Encoded, ImageWriter, PAGE};
use kedge_wire::{Bytes, List, Text, TooLong};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Bytes that are read, encoded and stored together: whole blocks, and many, because each copy from
/// a GPU holds up the program's calls for a moment.
const CHUNK: u64 = kedge_image::MAX_EXTENT;
/// Threads that read, encode and store: what lies in host memory leaves it as fast as the bus is
/// with twelve.
const WRITERS: usize = 12;
/// Parts of the shared arena, each an object of its own.
const ARENA_PART: u64 = 4 << 20;

const UNREADABLE: &str = "the copy of the devices' memory cannot be read: it was lost, with a process that held it or \
    with its device";

pub(crate) struct Capture {
    pub(crate) saved: SavedProxy,
    /// Where the bytes of each of `saved.objects` are; the snapshot's pieces come first.
    sources: Vec<Source>,
    pub(crate) snapshot: Box<dyn Snapshot>,
    /// What the image may refer to, if it may.
    tracked: Option<Tracked>,
    /// Whether nobody asks for digests where writes are followed.
    to_move: bool,
}

/// Stands for the digest of a block that is followed by its writes alone.
const FOLLOWED: Digest = [0; 4];

enum Source {
    Piece(Piece),
    Image(Image),
    Arena(Vec<u8>),
}

impl Capture {
    /// Takes it. All is at rest.
    pub(crate) fn take(
        dispatcher: &Dispatcher,
        near: &NearEnd<'_>,
        tracked: Option<Tracked>,
    ) -> Result<Capture, CaptureError> {
        let arena = copy_arena(near.shared).map_err(CaptureError::Arena)?;
        Capture::take_with(dispatcher, near, tracked, arena)
    }

    /// Takes it for a move: the shared arena stays where it is, and the client need not stand
    /// still.
    pub(crate) fn take_to_move(
        dispatcher: &Dispatcher,
        near: &NearEnd<'_>,
        tracked: Tracked,
    ) -> Result<Capture, CaptureError> {
        let capture = Capture::take_with(dispatcher, near, Some(tracked), Vec::new())?;
        Ok(Capture { to_move: true, ..capture })
    }

    fn take_with(
        dispatcher: &Dispatcher,
        near: &NearEnd<'_>,
        tracked: Option<Tracked>,
        arena: Vec<(Range<u64>, Vec<u8>)>,
    ) -> Result<Capture, CaptureError> {
        let (backend, host) = (dispatcher.backend(), dispatcher.host());
        let NearEnd { identity, position, .. } = *near;
        let sharing = dispatcher.sharing.save()?;
        let known = tracked.as_ref().map(|tracked| &**tracked.known());
        let snapshot = kedge_device::snapshots(backend)?.snapshot(known)?;
        let mut objects = Objects { tracked, objects: Vec::new(), sources: Vec::new() };
        for piece in snapshot.pieces() {
            let key = Key::Piece(piece.clone());
            objects.add(key, SavedObject::of(piece), Source::Piece(piece.clone()));
        }
        for (range, copy) in arena {
            let (start, bytes) = (range.start, range.end - range.start);
            let object = SavedObject::Arena { start, bytes };
            objects.add(Key::Arena(start, bytes), object, Source::Arena(copy));
        }
        let steps = save_steps(dispatcher.record.steps(), &mut objects)?;
        let Objects { tracked, objects, sources } = objects;
        let saved = SavedProxy {
            version: saved::VERSION,
            gpu: Text::truncated(identity.gpu.clone()),
            hello: identity.hello.clone(),
            driver_version: backend.driver_version(),
            client_memory: identity.client_memory,
            devices: List::new(identity.devices.clone())?,
            position,
            faults: List::new(host.faults.all())?,
            output: List::new(host.copy_output())?,
            objects: List::new(objects)?,
            steps: List::new(steps)?,
            notes: Bytes::new(snapshot.notes())?,
            sharing,
        };
        Ok(Capture { saved, sources, snapshot, tracked, to_move: false })
    }

    /// Bytes of all objects.
    pub(crate) fn bytes(&self) -> u64 {
        self.saved.objects.iter().fold(0, |sum, (_, object)| sum.saturating_add(object.bytes()))
    }

    /// Writes it by `writer`: what the next can refer to comes with it.
    pub(crate) fn write(
        mut self,
        writer: ImageWriter,
        codec: Choice,
    ) -> Result<(Stored, Option<Tracked>), CaptureError> {
        self.write_section(&writer)?;
        let file = IntoFile { writer, codec, builds: AtomicBool::new(false) };
        let written = self.give(&file, Give::All)?;
        let IntoFile { writer, builds, .. } = file;
        let builds = builds.into_inner();
        let entry = writer.finish()?;
        let mut tracked = self.tracked.take();
        if let Some(tracked) = &mut tracked {
            tracked.succeed(entry.checksum, written);
        }
        let (beside, drained) = (Vec::new(), self.snapshot.drained());
        Ok((Stored { entry, beside, builds, drained }, tracked))
    }

    /// Gives all bytes to `sink` that it has not got, and says what it has then.
    pub(crate) fn give(&self, sink: &dyn Sink, give: Give) -> Result<Written, CaptureError> {
        let writing = Writing { capture: self, sink };
        let digests: Vec<Mutex<Vec<Option<Digest>>>> =
            self.saved.objects.iter().map(|_| Mutex::default()).collect();
        let mut chunks = Vec::new();
        for (index, (number, object)) in self.saved.objects.iter().enumerate() {
            let image = matches!(object, SavedObject::Image { .. });
            if give == Give::All || image == (give == Give::Images) {
                chunks.extend(writing.chunks(index, *number, object, &digests[index])?);
            }
        }
        work::by(WRITERS, &chunks, Vec::new, |chunk, buffer| {
            writing.store(chunk, buffer, &digests)
        })?;
        Ok(self.written(digests))
    }

    /// What follows changes comes back when all has been given.
    pub(crate) fn into_tracked(self) -> Option<Tracked> {
        self.tracked
    }

    /// What the file has now; the digests that were computed as it was written.
    fn written(&self, digests: Vec<Mutex<Vec<Option<Digest>>>>) -> Written {
        let mut written = Written { snapshot: self.snapshot.number(), ..Written::default() };
        for (((number, object), source), computed) in
            self.saved.objects.iter().zip(&self.sources).zip(digests)
        {
            let computed = computed.into_inner().unwrap_or_else(PoisonError::into_inner);
            match (source, object) {
                (Source::Piece(piece), _) => {
                    let digests =
                        self.snapshot.digests(piece).unwrap_or_else(|| Arc::from(computed));
                    written.pieces.insert(piece.clone(), digests);
                }
                (Source::Arena(_), SavedObject::Arena { start, bytes }) => {
                    written.arena.insert((*start, *bytes), Arc::from(computed));
                }
                (Source::Image(image), _) => written.images.push((*number, Arc::clone(image))),
                _ => {}
            }
        }
        written
    }

    /// Whether all of it is there, and none left out because another file has it.
    pub(crate) fn is_whole(&self) -> bool {
        let Some(tracked) = &self.tracked else { return true };
        self.snapshot.pieces().iter().all(|piece| {
            let digests = self.snapshot.digests(piece);
            let runs = digests.map(|digests| tracked.known().compare(piece, &digests));
            runs.is_none_or(|runs| runs.iter().all(|(_, _, known)| !known))
        })
    }

    pub(crate) fn write_section(&self, writer: &ImageWriter) -> Result<(), CaptureError> {
        let mut section = Vec::new();
        kedge_wire::encode(&self.saved, &mut section);
        Ok(writer.section(saved::SECTION, &section)?)
    }

    /// Reads a range of an object into `buffer`, filled up with zeros to whole pages.
    pub(crate) fn fill(
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
                read.map_err(|code| SnapshotError::new(code, UNREADABLE))?;
            }
            Source::Image(image) => bytes.copy_from_slice(&image[part]),
            Source::Arena(copy) => bytes.copy_from_slice(&copy[part]),
        }
        Ok(())
    }
}

/// A part of an object that is read together.
struct Chunk {
    /// Of the object, in order, and by its number.
    index: usize,
    number: u64,
    range: Range<u64>,
    /// Whether only this processor can tell what of it has changed.
    digests: bool,
}

/// What is to be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Give {
    All,
    /// Of modules alone.
    Images,
    /// All else.
    Bytes,
}

/// What a capture's bytes go to, from several threads.
pub(crate) trait Sink: Sync {
    /// Takes whole pages of an object, from `from` on.
    fn put(&self, number: u64, from: u64, bytes: &[u8]) -> Result<(), CaptureError>;
    /// Hears that bytes are as they were when they were given last.
    fn known(&self, number: u64, from: u64, bytes: u64) -> Result<(), CaptureError>;
    /// Whether bytes may stay where they lie; by default they may not.
    fn takes_lent(&self) -> bool {
        false
    }
    /// Hears where bytes of an object lie; only if it takes them so.
    fn lent(
        &self,
        _number: u64,
        _from: u64,
        _bytes: u64,
        _place: HeldPlace,
    ) -> Result<(), CaptureError> {
        Ok(())
    }
}

/// A file that is being written.
struct IntoFile {
    writer: ImageWriter,
    codec: Choice,
    builds: AtomicBool,
}

impl Sink for IntoFile {
    fn put(&self, number: u64, from: u64, bytes: &[u8]) -> Result<(), CaptureError> {
        let encoded = kedge_image::encode(bytes, self.codec);
        Ok(self.writer.memory(number, from, bytes.len() as u64, &encoded)?)
    }

    fn known(&self, number: u64, from: u64, bytes: u64) -> Result<(), CaptureError> {
        self.builds.store(true, Ordering::Relaxed);
        Ok(self.writer.memory(number, from, bytes.next_multiple_of(PAGE), &Encoded::parent())?)
    }
}

/// A capture whose bytes are being given away.
struct Writing<'a> {
    capture: &'a Capture,
    sink: &'a dyn Sink,
}

impl Writing<'_> {
    /// What of an object is to be read; refers to the file before for what is known to be as there.
    fn chunks(
        &self,
        index: usize,
        number: u64,
        object: &SavedObject,
        computed: &Mutex<Vec<Option<Digest>>>,
    ) -> Result<Vec<Chunk>, CaptureError> {
        let (tracked, bytes) = (self.capture.tracked.as_ref(), object.bytes());
        let mut digests = false;
        let runs = match (&self.capture.sources[index], tracked) {
            (Source::Image(_), Some(tracked)) => vec![(0, bytes, tracked.has_image(number))],
            (Source::Piece(piece), Some(tracked)) => match self.capture.snapshot.digests(piece) {
                Some(digests) => tracked.known().compare(piece, &digests),
                None => {
                    let (runs, followed) = self.unwritten(piece, tracked.known(), computed);
                    digests = !followed;
                    runs
                }
            },
            (Source::Arena(_), tracked) => {
                digests = tracked.is_some();
                Vec::new()
            }
            (_, None) => Vec::new(),
        };
        let runs = if runs.is_empty() { vec![(0, bytes, false)] } else { runs };
        let mut chunks = Vec::new();
        for (from, to, known) in runs {
            if known && to > from {
                self.sink.known(number, from, to - from)?;
                continue;
            }
            let parts = (from..to).step_by(CHUNK as usize);
            let part = |at: u64| Chunk { index, number, range: at..(at + CHUNK).min(to), digests };
            chunks.extend(parts.map(part));
        }
        Ok(chunks)
    }

    /// The runs of blocks of a piece, as [`Known::compare`] tells them, by what has been written
    /// since: their digests are those that they had. And whether nothing else is to be known of the
    /// others.
    fn unwritten(
        &self,
        piece: &Piece,
        known: &Known,
        computed: &Mutex<Vec<Option<Digest>>>,
    ) -> (Vec<(u64, u64, bool)>, bool) {
        let since = self.capture.snapshot.written_since(piece, known.snapshot);
        let Some(since) = since else { return (Vec::new(), false) };
        let followed = self.capture.to_move;
        let before = known.pieces.get(piece).filter(|_| known.snapshot > 0);
        let before = before.map_or_else(Vec::new, |before| before.to_vec());
        let same = before.iter().zip(&since);
        let same: Vec<_> = same.map(|(digest, written)| digest.filter(|_| !written)).collect();
        let runs = known.compare(piece, &same);
        let digests = if followed { vec![Some(FOLLOWED); since.len()] } else { same };
        *computed.lock().unwrap_or_else(PoisonError::into_inner) = digests;
        (runs, followed)
    }

    /// Stores a chunk, but for what is as it was.
    fn store(
        &self,
        chunk: &Chunk,
        buffer: &mut Vec<u8>,
        all: &[Mutex<Vec<Option<Digest>>>],
    ) -> Result<(), CaptureError> {
        let Chunk { index, number, range, digests } = chunk;
        if !digests && (self.store_where_it_lies(chunk)? || self.store_in_place(chunk)?) {
            return Ok(());
        }
        self.capture.fill(*index, range.clone(), buffer)?;
        let mut same = vec![false; blocks(range.end - range.start)];
        if *digests {
            same = self.compare(chunk, buffer, &all[*index]);
        }
        let mut block = 0;
        while let Some(known) = same.get(block) {
            let run = same[block..].iter().take_while(|other| *other == known).count();
            let from = block * BLOCK as usize;
            let to = ((block + run) * BLOCK as usize).min(buffer.len());
            let (address, length) = (range.start + from as u64, (to - from) as u64);
            if *known {
                self.sink.known(*number, address, length)?;
            } else {
                self.sink.put(*number, address, &buffer[from..to])?;
            }
            block += run;
        }
        Ok(())
    }

    /// Tells where a chunk lies, if it may stay there.
    fn store_where_it_lies(
        &self,
        Chunk { index, number, range, .. }: &Chunk,
    ) -> Result<bool, CaptureError> {
        let Source::Piece(piece) = &self.capture.sources[*index] else { return Ok(false) };
        let bytes = range.end - range.start;
        let lent = |()| self.capture.snapshot.lent(piece, piece.start + range.start, bytes);
        let Some(place) = self.sink.takes_lent().then_some(()).and_then(lent) else {
            return Ok(false);
        };
        self.sink.lent(*number, range.start, bytes, place)?;
        Ok(true)
    }

    /// Stores a chunk of whole pages from where the device's bytes arrive, if it can be seen there.
    fn store_in_place(
        &self,
        Chunk { index, number, range, .. }: &Chunk,
    ) -> Result<bool, CaptureError> {
        let Source::Piece(piece) = &self.capture.sources[*index] else { return Ok(false) };
        let bytes = range.end - range.start;
        if !bytes.is_multiple_of(PAGE) {
            return Ok(false);
        }
        let mut stored = Ok(());
        let mut store = |there: &[u8]| {
            stored = self.sink.put(*number, range.start, there);
        };
        let snapshot = &self.capture.snapshot;
        let seen = snapshot.look(piece, piece.start + range.start, bytes as usize, &mut store);
        let seen = seen.map_err(|code| SnapshotError::new(code, UNREADABLE))?;
        stored?;
        Ok(seen)
    }

    /// Which of a chunk's blocks are as in the file before; their digests go to the object's.
    fn compare(
        &self,
        Chunk { index, range, .. }: &Chunk,
        buffer: &[u8],
        all: &Mutex<Vec<Option<Digest>>>,
    ) -> Vec<bool> {
        let Some(tracked) = &self.capture.tracked else { return Vec::new() };
        let (_, object) = &self.capture.saved.objects[*index];
        let before: Option<Digests> = tracked.before(object);
        let keys = &tracked.known().keys;
        // Filled up with zeros, which the digest of a shorter block has as well.
        let now: Vec<Digest> =
            buffer.chunks(BLOCK as usize).map(|block| keys.digest(block)).collect();
        let first = (range.start / BLOCK) as usize;
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.resize(blocks(object.bytes()), None);
        let same = |(number, digest): (usize, &Digest)| {
            if let Some(place) = all.get_mut(first + number) {
                *place = Some(*digest);
            }
            let before = before.as_ref().and_then(|before| *before.get(first + number)?);
            before == Some(*digest)
        };
        now.iter().enumerate().map(same).collect()
    }
}

/// What a capture has, as it is gathered.
struct Objects {
    tracked: Option<Tracked>,
    objects: Vec<(u64, SavedObject)>,
    sources: Vec<Source>,
}

impl Objects {
    /// Adds one; its number.
    fn add(&mut self, key: Key, object: SavedObject, source: Source) -> u64 {
        let next = self.objects.len() as u64 + 1;
        let number = self.tracked.as_mut().map_or(next, |tracked| tracked.number(key));
        self.objects.push((number, object));
        self.sources.push(source);
        number
    }
}

/// The steps as an image holds them; images become objects, each once.
fn save_steps(steps: Vec<Step>, objects: &mut Objects) -> Result<Vec<SavedStep>, TooLong> {
    let mut known = BTreeMap::new();
    let mut number = |image: Image| {
        *known.entry(Arc::as_ptr(&image)).or_insert_with(|| {
            let object = SavedObject::Image { bytes: image.len() as u64 };
            objects.add(Key::of_image(&image), object, Source::Image(image))
        })
    };
    let mut save = |step| {
        Ok(match step {
            Step::Message { message, result } => SavedStep::Message { message, result },
            Step::Module { ctx, module, code: Code::Whole(image) } => {
                SavedStep::Module { ctx, module, image: number(image) }
            }
            Step::Module { ctx, module, code: Code::Parts(images) } => {
                let images = List::new(images.into_iter().map(&mut number).collect())?;
                SavedStep::Linked { ctx, module, images }
            }
        })
    };
    steps.into_iter().map(&mut save).collect()
}

/// The parts of the shared arena that hold anything, by offset.
fn data(shared: BorrowedFd<'_>) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    for Range { start, end } in client_memory::extents(shared)? {
        // Cut where the next checkpoint would cut it, too.
        let mut from = start;
        while from < end {
            let to = ((from / ARENA_PART + 1) * ARENA_PART).min(end);
            found.push(from..to);
            from = to;
        }
    }
    Ok(found)
}

/// What the shared arena holds, copied by several threads: the client stands still for it.
fn copy_arena(shared: BorrowedFd<'_>) -> io::Result<Vec<(Range<u64>, Vec<u8>)>> {
    let parts: Vec<(Range<u64>, OnceLock<Vec<u8>>)> =
        data(shared)?.into_iter().map(|range| (range, OnceLock::new())).collect();
    let copied = work::each(
        &parts,
        || (),
        |(range, place), ()| {
            let mut copy = vec![0; (range.end - range.start) as usize];
            // The range lies in the arena: it is the file's own.
            let _ = client_memory::read_shared(arena::SHARED_BASE + range.start, &mut copy);
            place.set(copy).map_err(|_| ())
        },
    );
    debug_assert!(copied.is_ok(), "each part is copied once");
    Ok(parts
        .into_iter()
        .map(|(range, copy)| (range, copy.into_inner().unwrap_or_default()))
        .collect())
}
