//! What the devices hold, at one moment.
//!
//! Private memory is not copied but frozen ([`Frozen`]). What handles and exported slabs hold is
//! shared memory, which cannot be, and is copied at once: that takes time and memory of its own
//! size.

use super::frozen::Frozen;
use super::held;
use super::notes::{Allocation, HeapNote, ModuleNote, Notes, Variable, list};
use super::touched::{Pagemap, SMALL_HOLE};
use super::written::Writes;
use crate::device::arena::Placed;
use crate::device::modules::PlacedAs;
use crate::device::tasks::lock;
use crate::device::{SoftBackend, tables::Tables};
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Held, Object, Piece, Ranges, Snapshot, SnapshotError};
use kedge_protocol::CtxId;
use kedge_wire::Text;
use std::io;

/// Pieces end at multiples of this: several threads have something to do, and memory that is added
/// to an end makes no others of those before it.
const PIECE: u64 = 8 << 20;

struct SoftSnapshot {
    /// In the order of objects and offsets.
    pieces: Vec<Piece>,
    /// Where the bytes of each piece are.
    sources: Vec<Source>,
    frozen: Frozen,
    notes: Vec<u8>,
    /// Of the look at what was written; 0 where nobody follows that.
    look: u64,
}

enum Source {
    /// From this address on, in the frozen memory; which look found each block written last, if any
    /// did.
    Frozen(u64, Option<Vec<u64>>),
    Copied(Vec<u8>),
}

/// Takes a snapshot of a backend that is at rest; from now on what is written is followed if it
/// `follows`.
///
/// # Errors
/// NOT_READY while work is unfinished; OPERATING_SYSTEM where this process may not be copied or its
/// copy not read; NOT_SUPPORTED for more objects than notes can hold.
pub(in crate::device) fn take(
    backend: &SoftBackend,
    follows: bool,
) -> Result<Box<dyn Snapshot>, SnapshotError> {
    let tables = backend.tables();
    if !backend.runtime.is_at_rest() {
        let what = "the device is at work: wait until it is at rest";
        return Err(SnapshotError::new(CuError::NOT_READY, what));
    }
    let notes = notes(backend, &tables)?.encode()?;
    let runs = memory(backend, &tables);
    let mut following = lock(&backend.writes);
    let mut writes = follows.then(|| following.start(backend.runtime.memory.windows)).flatten();
    let look = writes.as_mut().map_or(0, |writes| writes.look(&runs.private));
    let mut parts = private_parts(&tables, &runs, writes.as_deref()).map_err(|error| {
        system("/proc/self/pagemap cannot be read, mount /proc as usual", &error)
    })?;
    let frozen = Frozen::new().map_err(|error| {
        system(
            "this process's memory cannot be frozen, allow it to clone itself and to call \
             process_vm_readv on its child (kernel.yama.ptrace_scope at most 1, seccomp)",
            &error,
        )
    })?;
    parts.extend(handle_parts(backend)?);
    parts.extend(exported_parts(backend, &runs)?);
    parts.sort_unstable_by(|(a, _), (b, _)| (&a.object, a.start).cmp(&(&b.object, b.start)));
    let (pieces, sources) = parts.into_iter().unzip();
    Ok(Box::new(SoftSnapshot { pieces, sources, frozen, notes, look }))
}

fn system(what: &str, error: &io::Error) -> SnapshotError {
    SnapshotError::new(CuError::OPERATING_SYSTEM, format!("{what}: {error}"))
}

impl Snapshot for SoftSnapshot {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn read(&self, piece: &Piece, start: u64, out: &mut [u8]) -> Result<(), CuError> {
        let index = self.index(piece).ok_or(CuError::INVALID_VALUE)?;
        let len = out.len() as u64;
        let skip = start.checked_sub(piece.start).ok_or(CuError::INVALID_VALUE)?;
        if skip.checked_add(len).is_none_or(|end| end > self.pieces[index].bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        match &self.sources[index] {
            Source::Frozen(addr, _) => {
                self.frozen.read(addr + skip, out).map_err(|_| CuError::OPERATING_SYSTEM)
            }
            Source::Copied(bytes) => {
                out.copy_from_slice(&bytes[skip as usize..(skip + len) as usize]);
                Ok(())
            }
        }
    }

    fn number(&self) -> u64 {
        self.look
    }

    fn written_since(&self, piece: &Piece, number: u64) -> Option<Vec<bool>> {
        match &self.sources[self.index(piece)?] {
            Source::Frozen(_, Some(last)) => Some(last.iter().map(|look| *look > number).collect()),
            Source::Frozen(_, None) | Source::Copied(_) => None,
        }
    }

    fn notes(&self) -> Vec<u8> {
        self.notes.clone()
    }

    fn export(&self) -> Result<Held, CuError> {
        held::export(self)
    }
}

impl SoftSnapshot {
    fn index(&self, piece: &Piece) -> Option<usize> {
        let order = |other: &Piece| (&other.object, other.start).cmp(&(&piece.object, piece.start));
        self.pieces.binary_search_by(order).ok()
    }
}

/// What memory and arrays hold.
fn private_parts(
    tables: &Tables,
    runs: &Runs,
    writes: Option<&Writes>,
) -> io::Result<Vec<(Piece, Source)>> {
    let pagemap = Pagemap::open()?;
    let mut parts = Vec::new();
    let mut add = |object: Object, base: u64, addr: u64, size: u64| -> io::Result<()> {
        let writes = writes.filter(|_| object == Object::Memory);
        for (addr, bytes) in pagemap.touched(addr, size)? {
            parts.extend(cut(addr, bytes).map(|(addr, bytes)| {
                let piece = Piece { object: object.clone(), start: addr - base, bytes };
                (piece, Source::Frozen(addr, writes.map(|writes| writes.last(addr, bytes))))
            }));
        }
        Ok(())
    };
    for &(addr, size) in &runs.private {
        add(Object::Memory, 0, addr, size)?;
    }
    for (id, (_, array)) in &tables.arrays {
        add(Object::Array(*id), array.address(), array.address(), array.bytes())?;
    }
    Ok(parts)
}

/// What is written in handles, copied.
fn handle_parts(backend: &SoftBackend) -> Result<Vec<(Piece, Source)>, SnapshotError> {
    let vmm = &backend.vmm;
    let written = vmm
        .written(SMALL_HOLE)
        .map_err(|error| system("physical memory cannot be read", &error))?;
    let mut parts = Vec::new();
    for (id, start, bytes) in written {
        for (start, bytes) in cut(start, bytes) {
            let mut copy = vec![0; bytes as usize];
            vmm.read(id, start, &mut copy)?;
            parts.push((Piece { object: Object::Handle(id), start, bytes }, Source::Copied(copy)));
        }
    }
    Ok(parts)
}

/// What is valid in exported slabs, copied.
fn exported_parts(
    backend: &SoftBackend,
    runs: &Runs,
) -> Result<Vec<(Piece, Source)>, SnapshotError> {
    let slabs = backend.runtime.memory.exported();
    let mut parts = Vec::new();
    for &(start, bytes) in &runs.exported {
        for (start, bytes) in cut(start, bytes) {
            let mut copy = vec![0; bytes as usize];
            let read = slabs.read(start, &mut copy);
            read.map_err(|error| system("an exported slab cannot be read", &error))?;
            let piece = Piece { object: Object::Memory, start, bytes };
            parts.push((piece, Source::Copied(copy)));
        }
    }
    Ok(parts)
}

/// [start, start+bytes) in pieces.
fn cut(start: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = start + bytes;
    let first = (start / PIECE + 1) * PIECE;
    let starts = std::iter::once(start).chain((first..end).step_by(PIECE as usize));
    starts
        .map(move |from| (from, ((from / PIECE + 1) * PIECE).min(end) - from))
        .filter(|at| at.1 > 0)
}

/// Runs of valid memory of the devices' own, in order and none twice; what touches is one run.
pub(super) struct Runs {
    pub(super) private: Vec<(u64, u64)>,
    exported: Vec<(u64, u64)>,
}

pub(super) fn memory(backend: &SoftBackend, tables: &Tables) -> Runs {
    let mut all = Ranges::default();
    if backend.runtime.memory.is_exact() {
        allocations(backend, tables).for_each(|(_, (addr, size))| all.add(addr, size));
    } else {
        backend.runtime.memory.slabs().into_iter().for_each(|(addr, size)| all.add(addr, size));
    }
    let placed =
        tables.modules.values().flat_map(|module| module.variables().map(|variable| variable.at));
    let heaps = tables.streams.contexts().filter_map(|ctx| Some(ctx.heap_state()?.0));
    // A managed variable lies in the shared arena, which is the host's to save.
    let own = |at: &Placed| !arena::is_shared(at.addr);
    placed.chain(heaps).filter(own).for_each(|at| all.add(at.addr, at.size));
    let mut exported = Vec::new();
    let slabs = backend.runtime.memory.exported().ranges();
    for (base, size) in slabs {
        // An allocation lies in one slab.
        exported.extend(all.iter().filter(|(addr, _)| (base..base + size).contains(addr)));
        all.cut(base, size);
    }
    Runs { private: joined(all.iter()), exported: joined(exported.into_iter()) }
}

fn joined(all: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (addr, size) in all {
        match runs.last_mut() {
            Some((start, len)) if *start + *len == addr => *len += size,
            _ => runs.push((addr, size)),
        }
    }
    runs
}

/// What contexts have allocated in slabs.
fn allocations<'a>(
    backend: &'a SoftBackend,
    tables: &'a Tables,
) -> impl Iterator<Item = (CtxId, (u64, u64))> + 'a {
    let all = tables.allocations.iter().flat_map(|(ctx, all)| all.iter().map(|at| (*ctx, at)));
    let memory = &backend.runtime.memory;
    // An allocation that failed is listed until it is freed.
    all.filter(move |(_, (addr, size))| memory.is_valid_on_device(*addr, *size))
}

pub(super) fn notes(backend: &SoftBackend, tables: &Tables) -> Result<Notes, SnapshotError> {
    let allocation = |(ctx, (addr, size))| Allocation { ctx, addr, size };
    let mut allocations: Vec<_> = allocations(backend, tables).map(allocation).collect();
    allocations.sort_unstable_by_key(|at| at.addr);
    let events = tables.events.iter();
    let events = events.filter_map(|(id, (_, event))| Some((*id, event.stamp()?)));
    let contexts = || tables.streams.contexts();
    let faults = contexts().filter_map(|ctx| Some((ctx.id, ctx.status().err()?.0)));
    let (last_texture, mut textures) = backend.textures.handles();
    // Of a context that has gone, nobody will ask for them.
    textures.retain(|(ctx, _)| tables.streams.context(*ctx).is_ok());
    let mut heaps = Vec::new();
    for ctx in contexts() {
        if let Some((at, used)) = ctx.heap_state() {
            let used = list(used, "allocations by kernels (device malloc)")?;
            heaps.push(HeapNote { ctx: ctx.id, addr: at.addr, size: at.size, used });
        }
    }
    Ok(Notes {
        clock: backend.runtime.clock.nanos(),
        allocations: list(allocations, "allocations")?,
        modules: list(modules(tables)?, "modules")?,
        heaps: list(heaps, "contexts")?,
        events: list(events.collect(), "events")?,
        faults: list(faults.collect(), "contexts")?,
        textures: list(textures, "textures")?,
        last_texture,
        exact: backend.runtime.memory.is_exact(),
        foreign: false,
        tensor_maps: tables.tensor_maps,
    })
}

fn modules(tables: &Tables) -> Result<Vec<ModuleNote>, SnapshotError> {
    let mut modules = Vec::new();
    for (id, module) in &tables.modules {
        let mut variables = Vec::new();
        for PlacedAs { name, at, asked } in module.variables() {
            let text = Text::new(name.to_owned()).map_err(|error| {
                let what = format!("the name of a variable of module {}: {error}", id.0);
                SnapshotError::new(CuError::NOT_SUPPORTED, what)
            })?;
            let (addr, size, managed) = (at.addr, at.size, arena::is_shared(at.addr));
            variables.push(Variable { name: text, addr, size, managed, asked });
        }
        let variables = list(variables, "module variables")?;
        let bound = Text::truncated(module.bound.unwrap_or_default().to_owned());
        modules.push(ModuleNote { module: *id, variables, bound });
    }
    Ok(modules)
}
