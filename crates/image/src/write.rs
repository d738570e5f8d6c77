//! Writing a `.kimg` file.

use crate::cached::{self, Part};
use crate::codec::{Choice, Codec, Encoded, decode, encode};
use crate::direct::{FileSink, PageBuffer, Spare};
use crate::error::ImageError;
use crate::folder::NOT_REGULAR;
use crate::layout::{self, Extent, Footer, HEADER, Kind, PAGE};
use crate::manifest::FileEntry;
use crate::read::in_order;
use crate::sink::Sink;
use rustix::fs::{Mode, OFlags, openat};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts the memory that writers are to store, and what they have stored, in bytes as the program
/// has them. One for all files of an image, for whoever wants to see how far it is.
#[derive(Debug, Default)]
pub struct Meter {
    expected: AtomicU64,
    stored: AtomicU64,
}

impl Meter {
    /// Returns how much has been stored, and how much is to be, as far as that is known.
    pub fn read(&self) -> (u64, u64) {
        let stored = self.stored.load(Ordering::Relaxed);
        (stored, self.expected.load(Ordering::Relaxed).max(stored))
    }
}

/// Writes one file, from any number of threads at once.
#[derive(Debug)]
pub struct ImageWriter {
    path: PathBuf,
    /// Where its bytes go.
    sink: Box<dyn Sink>,
    meter: Arc<Meter>,
    state: Mutex<State>,
}

/// Returns what describes `encoded`, but for where it lies.
fn extent(kind: Kind, object: u64, address: u64, decoded: u64, encoded: &Encoded<'_>) -> Extent {
    let (bytes, codec) = (&encoded.bytes, encoded.codec);
    let (stored, checksum) = (bytes.len() as u32, crate::checksum(bytes));
    Extent { kind, codec, stored, decoded, address, offset: 0, checksum, object }
}

/// Returns whether it begins on a page, as raw pages do, so that they can be mapped.
fn on_page(extent: &Extent) -> bool {
    extent.codec == Codec::Raw && extent.kind == Kind::Memory
}

fn round_up(offset: u64) -> u64 {
    offset.next_multiple_of(PAGE)
}

#[derive(Debug)]
struct State {
    /// Where the next payload goes.
    next: u64,
    extents: Vec<Extent>,
}

impl ImageWriter {
    /// Makes the file `path`, which must not exist; only its owner can read it, because it holds
    /// everything that the program had in memory.
    pub fn create(path: &Path) -> Result<ImageWriter, ImageError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path).map_err(ImageError::io(path))?;
        cached::keep(&file, Part::Data);
        ImageWriter::begin(path.to_owned(), Box::new(FileSink::direct(file)))
    }

    /// Writes a new file that somebody else has made, as [`crate::Claim::create`] does. Nothing is
    /// opened: `name` is what errors call it, and its last part what the manifest does. Whoever
    /// reads it soon finds it in memory.
    ///
    /// # Errors
    /// It is no regular file, or has bytes already.
    pub fn to_file(file: File, name: impl Into<PathBuf>) -> Result<ImageWriter, ImageError> {
        let path = name.into();
        check_new(&file, &path)?;
        ImageWriter::begin(path, Box::new(FileSink::cached(file)))
    }

    /// Makes a file that lies elsewhere, by the `name` that it has there.
    ///
    /// # Errors
    /// The sink takes nothing.
    pub fn elsewhere(name: &str, sink: Box<dyn Sink>) -> Result<ImageWriter, ImageError> {
        ImageWriter::begin(PathBuf::from(name), sink)
    }

    fn begin(path: PathBuf, sink: Box<dyn Sink>) -> Result<ImageWriter, ImageError> {
        sink.write_all_at(&layout::header(), 0).map_err(ImageError::io(&path))?;
        let state = Mutex::new(State { next: HEADER, extents: Vec::new() });
        Ok(ImageWriter { path, sink, meter: Arc::default(), state })
    }

    /// Makes a file that lies in memory, without a place among files, and returns it with its
    /// writer: it lasts as long as anybody has a descriptor of it.
    pub fn in_memory(name: &str) -> Result<(ImageWriter, File), ImageError> {
        let path = PathBuf::from(name);
        let made = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(made.map_err(|error| ImageError::io(&path)(error.into()))?);
        let again = file.try_clone().map_err(ImageError::io(&path))?;
        Ok((ImageWriter::begin(path, Box::new(FileSink::cached(file)))?, again))
    }

    /// Has what is written counted by `meter`.
    pub fn metered(self, meter: &Arc<Meter>) -> ImageWriter {
        ImageWriter { meter: meter.clone(), ..self }
    }

    /// Says that about so many bytes are to come.
    pub fn expect(&self, bytes: u64) {
        self.meter.expected.fetch_add(bytes, Ordering::Relaxed);
        self.sink.expect(bytes);
    }

    /// Stores `decoded` bytes of memory at `address` of `object`, as `encoded`.
    pub fn memory(
        &self,
        object: u64,
        address: u64,
        decoded: u64,
        encoded: &Encoded<'_>,
    ) -> Result<(), ImageError> {
        self.store(Kind::Memory, object, address, decoded, encoded)
    }

    /// Notes memory of object 0 that the file of another process of the same image stores at the
    /// same addresses, with the same bytes.
    pub fn of_process(&self, address: u64, decoded: u64, process: i32) {
        let extent = Extent {
            kind: Kind::Memory,
            codec: Codec::Process,
            stored: 0,
            decoded,
            address,
            offset: 0,
            checksum: process as u64,
            object: 0,
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.extents.push(extent);
    }

    /// Takes back memory of object 0 that was stored in this range of addresses: its place is zero
    /// again. What was stored together with it stays.
    pub fn forget(&self, range: Range<u64>) -> Result<(), ImageError> {
        let goes = |extent: &Extent| {
            let meets = extent.address < range.end && range.start < extent.end();
            extent.kind == Kind::Memory && extent.object == 0 && meets
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<Extent> = state.extents.extract_if(.., |extent| goes(extent)).collect();
        drop(state);
        gone.iter().try_for_each(|extent| self.forget_in(extent, &range))
    }

    /// Wipes an extent that meets `range`, and stores what of it lies elsewhere once more.
    fn forget_in(&self, extent: &Extent, range: &Range<u64>) -> Result<(), ImageError> {
        let parts = [(extent.address, range.start), (range.end, extent.end())];
        let parts: Vec<(u64, u64)> = parts.into_iter().filter(|(from, to)| from < to).collect();
        if extent.stored == 0 {
            let part = |(from, to)| Extent { address: from, decoded: to - from, ..*extent };
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.extents.extend(parts.into_iter().map(part));
            return Ok(());
        }
        let mut bytes = vec![0; if parts.is_empty() { 0 } else { extent.decoded as usize }];
        let mut stored = vec![0; extent.stored as usize];
        if !parts.is_empty() {
            let read = self.sink.read_exact_at(&mut stored, extent.offset);
            read.map_err(ImageError::io(&self.path))?;
            decode(extent.codec, &stored, &mut bytes).map_err(|what| {
                let (path, address) = (self.path.clone(), extent.address);
                ImageError::Unwritable { path, address, what }
            })?;
            stored.fill(0);
        }
        self.write_at(&stored, extent.offset)?;
        for (from, to) in parts {
            let inside = (from - extent.address) as usize..(to - extent.address) as usize;
            let choice = if extent.codec == Codec::Raw { Choice::Raw } else { Choice::Lz4 };
            self.memory(0, from, to - from, &encode(&bytes[inside], choice))?;
        }
        Ok(())
    }

    /// Fails if memory of `object` was stored that lies outside of `mappings`, which are in order.
    pub fn check_within(&self, object: u64, mappings: &[(u64, u64)]) -> Result<(), ImageError> {
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, end) in mappings {
            match joined.last_mut() {
                Some((_, last)) if *last == *start => *last = *end,
                _ => joined.push((*start, *end)),
            }
        }
        let inside = |extent: &Extent| {
            let after = joined.partition_point(|(start, _)| *start <= extent.address);
            let end = extent.address.checked_add(extent.decoded);
            after.checked_sub(1).is_some_and(|at| end.is_some_and(|end| end <= joined[at].1))
        };
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory =
            state.extents.iter().filter(|e| e.kind == Kind::Memory && e.object == object);
        match memory.find(|extent| !inside(extent)) {
            None => Ok(()),
            Some(extent) => {
                let (path, address) = (self.path.clone(), extent.address);
                let what = "it lies outside of what is mapped";
                Err(ImageError::Unwritable { path, address, what })
            }
        }
    }

    /// Stores the section `number`.
    pub fn section(&self, number: u64, bytes: &[u8]) -> Result<(), ImageError> {
        let encoded = crate::codec::encode(bytes, crate::codec::Choice::Lz4);
        self.store(Kind::Section, 0, number, bytes.len() as u64, &encoded)
    }

    fn store(
        &self,
        kind: Kind,
        object: u64,
        address: u64,
        decoded: u64,
        encoded: &Encoded<'_>,
    ) -> Result<(), ImageError> {
        let bytes = &encoded.bytes;
        let mut extent = extent(kind, object, address, decoded, encoded);
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            extent.offset = if on_page(&extent) { round_up(state.next) } else { state.next };
            state.next = extent.offset + bytes.len() as u64;
            state.extents.push(extent);
        }
        self.write_at(bytes, extent.offset)?;
        if kind == Kind::Memory {
            self.meter.stored.fetch_add(decoded, Ordering::Relaxed);
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), ImageError> {
        self.sink.write_all_at(bytes, offset).map_err(ImageError::io(&self.path))
    }

    /// Writes the table and the footer, and waits until all of it is on the disk.
    pub fn finish(self) -> Result<FileEntry, ImageError> {
        let State { next, mut extents } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        extents.sort_by_key(|extent| (extent.kind, extent.object, extent.address));
        join_references(&mut extents);
        check_table(&extents, next, &self.path)?;
        let table: Vec<u8> = extents.iter().flat_map(Extent::encode).collect();
        let footer =
            Footer { table: next, count: extents.len() as u64, checksum: crate::checksum(&table) };
        let footer = footer.encode();
        let end = next + table.len() as u64;
        let written = self
            .sink
            .write_all_at(&table, next)
            .and_then(|()| self.sink.write_all_at(&footer, end))
            .and_then(|()| self.sink.finish(end + footer.len() as u64));
        written.map_err(ImageError::io(&self.path))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (bytes, checksum) = (end + footer.len() as u64, crate::checksum(&footer));
        Ok(FileEntry { name, bytes, checksum })
    }
}

/// Makes the file `name`, which must not exist, in the open `folder`; only its owner can read it.
/// What errors call it is below `shown`, where nothing is looked for.
///
/// # Errors
/// It exists, the folder takes no new file, or `name` leads out of it.
pub(crate) fn create_in(
    folder: BorrowedFd<'_>,
    name: &str,
    shown: &Path,
) -> Result<File, ImageError> {
    let path = shown.join(name);
    if !is_file_name(name) {
        return Err(ImageError::io(&path)(io::ErrorKind::InvalidFilename.into()));
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(folder, name, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(made.map_err(|error| ImageError::io(&path)(error.into()))?);
    cached::keep(&file, Part::Data);
    Ok(file)
}

/// Returns whether `name` names a file of a folder, and cannot lead out of it.
pub fn is_file_name(name: &str) -> bool {
    !name.is_empty() && ![".", ".."].contains(&name) && !name.contains(['/', '\0'])
}

/// Fails unless it is a regular file without bytes, which errors call `path`.
pub fn check_new(file: &File, path: &Path) -> Result<(), ImageError> {
    let found = file.metadata().map_err(ImageError::io(path))?;
    let refused = |why| Err(ImageError::io(path)(io::Error::new(io::ErrorKind::InvalidInput, why)));
    match (found.is_file(), found.len()) {
        (false, _) => refused(NOT_REGULAR),
        (true, 0) => Ok(()),
        (true, _) => refused("it is not empty"),
    }
}

/// Fails if a reader would refuse the table of these extents, whose payloads end at `limit`.
fn check_table(extents: &[Extent], limit: u64, path: &Path) -> Result<(), ImageError> {
    let wrong =
        |address, what| Err(ImageError::Unwritable { path: path.to_owned(), address, what });
    for extent in extents {
        extent.check(limit).or_else(|what| wrong(extent.address, what))?;
    }
    match extents.windows(2).find(|pair| !in_order(&pair[0], &pair[1])) {
        None => Ok(()),
        Some(pair) => wrong(pair[1].address, "it was stored twice"),
    }
}

/// Makes one of neighbours that are all in the same other file: they are noted by several threads,
/// bit by bit.
fn join_references(extents: &mut Vec<Extent>) {
    extents.dedup_by(|next, last| {
        let same = last.codec == next.codec && last.process() == next.process();
        let both = same && matches!(last.codec, Codec::Parent | Codec::Process);
        let joined =
            both && last.object == next.object && last.address + last.decoded == next.address;
        if joined {
            last.decoded += next.decoded;
        }
        joined
    });
}

/// Bytes that are written together.
const TOGETHER: usize = 1 << 20;

/// Buffers of packers that are done.
static SPARE: Spare = Spare::new();
/// Most bytes that spare buffers may take.
const MAX_SPARE: usize = 8 * (TOGETHER + 2 * PAGE as usize);

/// Gathers small pieces of memory, so that a page here and a page there are not a write each. One
/// for each thread that writes.
#[derive(Debug)]
pub struct Packer<'a> {
    writer: &'a ImageWriter,
    buffer: PageBuffer,
    /// Bytes of the buffer that are taken.
    taken: usize,
    /// What lies in it, by its place there.
    extents: Vec<Extent>,
}

impl<'a> Packer<'a> {
    pub fn new(writer: &'a ImageWriter) -> Packer<'a> {
        let buffer = PageBuffer::out_of(&SPARE, TOGETHER);
        Packer { writer, buffer, taken: 0, extents: Vec::new() }
    }

    /// Stores memory as [`ImageWriter::memory`] does; it is written at the latest by
    /// [`Packer::flush`].
    pub fn memory(
        &mut self,
        object: u64,
        address: u64,
        decoded: u64,
        encoded: &Encoded<'_>,
    ) -> Result<(), ImageError> {
        let bytes = &encoded.bytes;
        if bytes.len() >= TOGETHER / 2 {
            return self.writer.memory(object, address, decoded, encoded);
        }
        let mut extent = extent(Kind::Memory, object, address, decoded, encoded);
        if self.place(&extent) + bytes.len() > TOGETHER {
            self.flush()?;
        }
        let place = self.place(&extent);
        if !bytes.is_empty() {
            let buffer = self.buffer.bytes(TOGETHER);
            // What lies between payloads is zero.
            buffer[self.taken..place].fill(0);
            buffer[place..place + bytes.len()].copy_from_slice(bytes);
        }
        extent.offset = place as u64;
        self.taken = place + bytes.len();
        self.extents.push(extent);
        Ok(())
    }

    fn place(&self, extent: &Extent) -> usize {
        if on_page(extent) { round_up(self.taken as u64) as usize } else { self.taken }
    }

    pub fn flush(&mut self) -> Result<(), ImageError> {
        let whole = round_up(self.taken as u64) as usize;
        let decoded = self.extents.iter().map(|extent| extent.decoded).sum();
        let base = {
            let mut state = self.writer.state.lock().unwrap_or_else(PoisonError::into_inner);
            let base = if whole == 0 { state.next } else { round_up(state.next) };
            state.next = base + whole as u64;
            let moved = |extent: Extent| Extent { offset: base + extent.offset, ..extent };
            state.extents.extend(self.extents.drain(..).map(moved));
            base
        };
        let taken = std::mem::take(&mut self.taken);
        if whole > 0 {
            let buffer = self.buffer.bytes(TOGETHER);
            buffer[taken..whole].fill(0);
            self.writer.write_at(&buffer[..whole], base)?;
        }
        self.writer.meter.stored.fetch_add(decoded, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Packer<'_> {
    fn drop(&mut self) {
        SPARE.keep(std::mem::take(&mut self.buffer), MAX_SPARE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, ImageFile, encode};

    /// Returns one of a file that goes with this.
    fn scratch(name: &str) -> (PathBuf, ImageWriter) {
        let path = std::env::temp_dir().join(format!("kwrite-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let writer = ImageWriter::create(&path).unwrap();
        (path, writer)
    }

    #[test]
    fn what_no_reader_would_take_is_not_finished() {
        let page = [7; PAGE as usize];
        let store = |writer: &ImageWriter, object, at: u64, pages: u64| {
            let bytes = vec![7; (pages * PAGE) as usize];
            writer.memory(object, at * PAGE, pages * PAGE, &encode(&bytes, Choice::Auto)).unwrap();
        };
        // Twice the same page, one that reaches into another, one that is no page; the last two are
        // fine.
        for (name, second) in [("same", 8), ("inside", 9), ("before", 6)] {
            let (path, writer) = scratch(name);
            store(&writer, 0, 8, 3);
            store(&writer, 0, second, 3);
            let error = writer.finish().unwrap_err();
            assert!(matches!(error, ImageError::Unwritable { .. }), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        let (path, writer) = scratch("odd");
        writer.memory(0, 5, PAGE, &encode(&page, Choice::Auto)).unwrap();
        assert!(matches!(writer.finish().unwrap_err(), ImageError::Unwritable { address: 5, .. }));
        std::fs::remove_file(&path).unwrap();
        let (path, writer) = scratch("fine");
        store(&writer, 0, 8, 3);
        store(&writer, 1, 8, 3);
        store(&writer, 0, 11, 3);
        writer.finish().unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn memory_outside_of_the_mappings_is_found() {
        let (path, writer) = scratch("outside");
        let page = encode(&[7; PAGE as usize], Choice::Auto);
        writer.memory(0, 4 * PAGE, PAGE, &page).unwrap();
        writer.memory(0, 5 * PAGE, 2 * PAGE, &Encoded::parent()).unwrap();
        writer.memory(3, 90 * PAGE, PAGE, &page).unwrap();
        let check = |mappings: &[(u64, u64)]| {
            let mappings: Vec<_> = mappings.iter().map(|(s, e)| (s * PAGE, e * PAGE)).collect();
            writer.check_within(0, &mappings).is_ok()
        };
        assert!(check(&[(4, 7)]) && check(&[(1, 2), (4, 6), (6, 9)]));
        assert!(!check(&[]) && !check(&[(4, 6)]) && !check(&[(5, 9)]) && !check(&[(4, 6), (7, 9)]));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn small_pieces_come_back_whichever_way_they_were_written() {
        let path = std::env::temp_dir().join(format!("kpack-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let writer = ImageWriter::create(&path).unwrap();
        let noise = |seed: u64, pages: u64| -> Vec<u8> {
            let next =
                |n: u64| (n.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
            (0..pages * PAGE).map(next).collect()
        };
        let mut packer = Packer::new(&writer);
        let mut expected = Vec::new();
        for piece in 0..700_u64 {
            let (address, pages) = (piece << 24, 1 + piece % 3 + if piece == 99 { 300 } else { 0 });
            let bytes = match piece % 4 {
                0 => vec![piece as u8; (pages * PAGE) as usize],
                _ => noise(piece, pages),
            };
            packer.memory(0, address, pages * PAGE, &encode(&bytes, Choice::Auto)).unwrap();
            expected.push(bytes);
        }
        packer.memory(0, 700 << 24, 1 << 40, &Encoded::parent()).unwrap();
        packer.memory(0, 5 << 40, PAGE, &encode(&[7; PAGE as usize], Choice::Auto)).unwrap();
        packer.flush().unwrap();
        packer.flush().unwrap();
        drop(packer);
        writer.forget(5 << 40..6 << 40).unwrap();
        // The middle of one, and of what is elsewhere.
        let middle = (99 << 24) + PAGE..(99 << 24) + 3 * PAGE;
        writer.forget(middle).unwrap();
        writer.forget((700 << 24) + PAGE..(700 << 24) + 2 * PAGE).unwrap();
        let whole = expected.remove(99);
        let (first, rest) = (&whole[..PAGE as usize], &whole[3 * PAGE as usize..]);
        expected.splice(99..99, [first.to_vec(), rest.to_vec()]);
        let entry = writer.finish().unwrap();
        let file = ImageFile::open(&path, Some(&entry)).unwrap();
        for (extent, expected) in file.memory().zip(&expected) {
            let mut bytes = vec![1; extent.decoded as usize];
            file.read(extent, &mut Vec::new(), &mut bytes).unwrap();
            assert!(bytes == *expected, "{extent:?}");
        }
        file.check_padding().unwrap();
        let last: Vec<&Extent> = file.memory().skip(expected.len()).collect();
        let places: Vec<(Codec, u64)> = last.iter().map(|e| (e.codec, e.decoded)).collect();
        assert_eq!(places, [(Codec::Parent, PAGE), (Codec::Parent, (1 << 40) - 2 * PAGE)]);
        std::fs::remove_file(&path).unwrap();
    }
}
