//! A process's own memory: which pages are its own, and writing them.

use super::names::Search;
use super::once::Storing;
use crate::EngineError;
use crate::freeze::FrozenClone;
use crate::huge;
use crate::maps::Mapping;
use crate::pagemap::{self, Run, Scanner, Wanted};
use kedge_image::{Choice, ImageWriter, PAGE, Packer, PageBuffer};
use libc::pid_t;
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Bytes that are read and stored together: enough to amortise a call, few enough to share out.
const CHUNK: u64 = 1 << 20;
/// Pages whose entries are read together.
const WINDOW: u64 = 64 << 10;
/// Threads that write one image: most of them wait for the disk while the others read memory and
/// sum it up.
const WRITERS: usize = 8;

/// Bits of an entry of /proc/PID/pagemap.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// Memory that is stored as one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    address: u64,
    length: u64,
    /// Without PROT_READ: it is read all the same.
    hidden: bool,
}

impl Chunk {
    #[cfg(test)]
    pub(super) fn of(address: u64, length: u64) -> Chunk {
        Chunk { address, length, hidden: false }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// From address to address.
    pub(super) fn run(&self) -> Run {
        (self.address, self.address + self.length)
    }

    pub(super) fn hidden(&self) -> bool {
        self.hidden
    }
}

fn failed(pid: pid_t) -> impl Fn(std::io::Error) -> EngineError {
    move |source| EngineError::System { pid, what: "read its memory", source }
}

/// The pages of private mappings that the program has written, but for mappings that begin at one
/// of `written`. What it has not written is zero or still in its file.
pub(super) fn chunks(
    clone: &FrozenClone,
    mappings: &[Mapping],
    written: &[u64],
) -> Result<Vec<Chunk>, EngineError> {
    let pid = clone.pid();
    let (mut pages, mut chunks) = (Scanner::of(pid).map_err(failed(pid))?, Vec::new());
    for mapping in mappings.iter().filter(|m| own(m) && !written.contains(&m.start)) {
        split(mapping, &runs(pid, &mut pages, mapping)?, &mut chunks);
    }
    Ok(chunks)
}

/// The pages of one of a process's own mappings that are to be saved.
pub(super) fn runs(
    pid: pid_t,
    pages: &mut Scanner,
    mapping: &Mapping,
) -> Result<Vec<Run>, EngineError> {
    // What no name leads to is saved whole: nobody could map it again.
    if mapping.deleted() && !mapping.comes_back && !huge::is_nameless(mapping) {
        return Ok(vec![(mapping.start, mapping.end)]);
    }
    touched(pid, pages, mapping)
}

/// Whether the mapping's pages are the process's own, once written.
pub(super) fn own(mapping: &Mapping) -> bool {
    !mapping.shared
        && !mapping.emptied
        && !crate::state::KERNEL_MAPPINGS.contains(&mapping.name.as_str())
}

pub(super) fn split(mapping: &Mapping, runs: &[(u64, u64)], chunks: &mut Vec<Chunk>) {
    split_runs(mapping.protection & libc::PROT_READ == 0, runs, chunks);
}

/// Makes chunks of runs of a mapping that has no PROT_READ, if `hidden`.
pub(super) fn split_runs(hidden: bool, runs: &[(u64, u64)], chunks: &mut Vec<Chunk>) {
    for (start, end) in runs {
        let parts = (*start..*end).step_by(CHUNK as usize);
        chunks.extend(parts.map(|address| {
            let length = CHUNK.min(end - address);
            Chunk { address, length, hidden }
        }));
    }
}

/// The runs of pages of `mapping` that differ from what is mapped there.
fn touched(pid: pid_t, pages: &mut Scanner, mapping: &Mapping) -> Result<Vec<Run>, EngineError> {
    match pages.runs((mapping.start, mapping.end), &Wanted::OWN) {
        Err(error) if pagemap::cannot_tell(&error) => {}
        told => return told.map_err(failed(pid)),
    }
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(failed(pid))?;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let mut entries = vec![0u8; (mapping.len() / PAGE).min(WINDOW) as usize * 8];
    let mut at = mapping.start;
    while at < mapping.end {
        let pages = ((mapping.end - at) / PAGE).min(WINDOW);
        let bytes = &mut entries[..pages as usize * 8];
        pagemap.read_exact_at(bytes, at / PAGE * 8).map_err(failed(pid))?;
        for (index, entry) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let entry = u64::from_le_bytes(*entry);
            if entry & (PRESENT | SWAPPED) == 0 || entry & OF_FILE != 0 {
                continue;
            }
            let page = at + index as u64 * PAGE;
            match runs.last_mut() {
                Some((_, end)) if *end == page => *end += PAGE,
                _ => runs.push((page, page + PAGE)),
            }
        }
        at += pages * PAGE;
    }
    Ok(runs)
}

/// Reads `chunks` of the clone and stores them, by several threads; `search` looks at them.
pub(super) fn write(
    clone: &FrozenClone,
    chunks: &[Chunk],
    writer: &ImageWriter,
    storing: &Storing<'_>,
    search: &Search,
) -> Result<(), EngineError> {
    let reader = Reader::of(clone.pid())?;
    share_out(chunks, writer, |chunk, packer| {
        BUFFER.with_borrow_mut(|buffer| {
            let bytes = buffer.bytes(chunk.length as usize);
            reader.read(chunk, bytes)?;
            storing.store(chunk, bytes, packer)?;
            search.look(chunk.address, bytes);
            Ok(())
        })
    })
}

/// Reads `chunks` of a process that runs and stores what is still there; what is not is added to
/// `gone`.
pub(super) fn write_what_is_there(
    reader: &Reader,
    chunks: &[Chunk],
    writer: &ImageWriter,
    storing: &Storing<'_>,
    gone: &Mutex<Vec<(u64, u64)>>,
) -> Result<(), EngineError> {
    share_out(chunks, writer, |chunk, packer| {
        BUFFER.with_borrow_mut(|buffer| {
            let buffer = buffer.bytes(chunk.length as usize);
            if reader.read(chunk, buffer).is_err() {
                let mut gone = gone.lock().unwrap_or_else(|poison| poison.into_inner());
                gone.push((chunk.address, chunk.address + chunk.length));
                return Ok(());
            }
            storing.store(chunk, buffer, packer)
        })
    })
}

thread_local! {
    /// What a writing thread reads into.
    static BUFFER: RefCell<PageBuffer> = RefCell::default();
}

/// Has several threads store the `items`, each through a packer of its own.
pub(super) fn share_out<T: Sync>(
    items: &[T],
    writer: &ImageWriter,
    store: impl Fn(&T, &mut Packer<'_>) -> Result<(), EngineError> + Sync,
) -> Result<(), EngineError> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let mut packer = Packer::new(writer);
        let mut all = || {
            while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                store(item, &mut packer)?;
            }
            Ok(packer.flush()?)
        };
        if let Err(error) = all() {
            // The first failure ends the work of all.
            next.store(items.len(), Ordering::Relaxed);
            failure.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
        }
    };
    thread::scope(|scope| {
        for _ in 1..WRITERS.min(items.len()) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(|poison| poison.into_inner()).map_or(Ok(()), Err)
}

/// Reads the memory of a process. By its file in /proc: process_vm_readv would pin each page, and a
/// page that a clone shares with the program is copied for it first.
#[derive(Debug)]
pub(super) struct Reader {
    pid: pid_t,
    file: File,
    unmapped: Unmapped,
}

/// What is read where nothing can be: the kernel tells no more about it than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unmapped {
    /// The memory stands still, so it is past the end of a mapped file, or a guard. Or it is
    /// private, and what was unmapped since is not watched any more if it comes back.
    Zeros,
    /// An error: it was unmapped a moment ago, and others go on mapping it.
    Fails,
}

impl Reader {
    pub(super) fn of(pid: pid_t) -> Result<Reader, EngineError> {
        Reader::that(Unmapped::Zeros, pid)
    }

    pub(super) fn that(unmapped: Unmapped, pid: pid_t) -> Result<Reader, EngineError> {
        let file = File::open(format!("/proc/{pid}/mem")).map_err(failed(pid))?;
        Ok(Reader { pid, file, unmapped })
    }

    pub(super) fn read(&self, chunk: &Chunk, into: &mut [u8]) -> Result<(), EngineError> {
        let mut done = 0;
        while done < into.len() {
            let at = chunk.address + done as u64;
            match self.file.read_at(&mut into[done..], at) {
                Ok(0) => return Err(EngineError::Ended { pid: self.pid }),
                Ok(count) => done += count,
                Err(e) if e.raw_os_error() == Some(libc::EIO) && self.zeros(chunk) => {
                    let page = (PAGE - at % PAGE) as usize;
                    let end = into.len().min(done + page);
                    into[done..end].fill(0);
                    done = end;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(other) => return Err(failed(self.pid)(other)),
            }
        }
        Ok(())
    }

    fn zeros(&self, chunk: &Chunk) -> bool {
        self.unmapped == Unmapped::Zeros && !chunk.hidden
    }
}

/// Stores one chunk as memory of `object` at `place`.
pub(super) fn store(
    reader: &Reader,
    object: u64,
    chunk: &Chunk,
    place: u64,
    packer: &mut Packer<'_>,
    codec: Choice,
    buffer: &mut PageBuffer,
) -> Result<(), EngineError> {
    let buffer = buffer.bytes(chunk.length as usize);
    reader.read(chunk, buffer)?;
    let encoded = kedge_image::encode(buffer, codec);
    Ok(packer.memory(object, place, chunk.length, &encoded)?)
}
