//! What a snapshot held, put into a new backend.

use super::held::Parts;
use super::notes::{Allocation, HeapNote, ModuleNote, Notes, Variable};
use super::take::memory;
use crate::builtin::heap::Heap;
use crate::device::arena::{Placed, discard};
use crate::device::modules::Former;
use crate::device::tasks::lock;
use crate::device::{SoftBackend, tables::Tables};
use kedge_cuda_types::CuError;
use kedge_device::{Object, Piece, Ranges, SnapshotError};
use kedge_protocol::{CtxId, ModuleId};
use std::collections::{HashMap, HashSet, VecDeque};

/// How far a restart is. A backend whose restart has failed is good for nothing but to be dropped.
#[derive(Default)]
pub(in crate::device) enum Stage {
    /// No restart, or its end was reached.
    #[default]
    Running,
    /// The client's objects are made again.
    Making(Expected),
    /// They are there; the bytes come, and then the clock goes on from here.
    Filling { clock: u64, held: Parts },
}

/// What the objects that are made again must be like. Their memory is taken already.
pub(in crate::device) struct Expected {
    modules: HashMap<ModuleId, Former>,
    heaps: Vec<(CtxId, Placed, Heap)>,
    textures: VecDeque<(CtxId, u64)>,
    /// What is made again was made on another kind of device, which tells of no module of which
    /// nothing was used.
    foreign: bool,
}

impl Stage {
    /// The handle of the texture that is made next in `ctx`; `None` where that is for the device to
    /// say.
    ///
    /// # Errors
    /// INVALID_HANDLE where the checkpoint had no such texture.
    pub(in crate::device) fn next_texture(&mut self, ctx: CtxId) -> Result<Option<u64>, CuError> {
        let Self::Making(expected) = self else { return Ok(None) };
        match expected.textures.pop_front() {
            Some((owner, handle)) if owner == ctx => Ok(Some(handle)),
            _ => Err(CuError::INVALID_HANDLE),
        }
    }

    /// Where a module's variables must lie; `None` where that is for the device to say.
    ///
    /// # Errors
    /// INVALID_HANDLE where the checkpoint had no such module.
    pub(in crate::device) fn variables_of(
        &mut self,
        module: ModuleId,
    ) -> Result<Option<Former>, SnapshotError> {
        let Self::Making(expected) = self else { return Ok(None) };
        let former = expected.modules.remove(&module);
        let former = former.or_else(|| expected.foreign.then(Former::of_another_kind));
        let unknown = || refuse(CuError::INVALID_HANDLE, "is not in the checkpoint");
        former.map(Some).ok_or_else(|| unknown().of(format!("module {}", module.0)))
    }
}

/// A refusal that still lacks the name of what is refused.
struct Refusal(CuError, &'static str);

fn refuse(code: CuError, why: &'static str) -> Refusal {
    Refusal(code, why)
}

impl Refusal {
    fn of(self, what: String) -> SnapshotError {
        SnapshotError::new(self.0, format!("{what} {}", self.1))
    }
}

pub(super) fn wrong_stage(what: &str) -> SnapshotError {
    SnapshotError::new(CuError::ILLEGAL_STATE, format!("a restart does not {what} now"))
}

/// Takes the memory that the objects of a checkpoint had, before they are made again.
pub(in crate::device) fn begin(backend: &SoftBackend, notes: &[u8]) -> Result<(), SnapshotError> {
    let notes = Notes::decode(notes)?;
    let mut tables = backend.tables();
    let mut stage = lock(&backend.stage);
    let new = tables.streams.contexts().next().is_none();
    if !new || !matches!(*stage, Stage::Running) {
        return Err(wrong_stage("begin"));
    }
    backend.runtime.memory.set_exact(notes.exact);
    open_allocations(backend, &mut tables, &notes)?;
    let mut modules = HashMap::new();
    for note in &*notes.modules {
        let mut former = Former { variables: VecDeque::new(), foreign: notes.foreign };
        for variable in &*note.variables {
            let what = || format!("variable {} of module {}", &*variable.name, note.module.0);
            let at = replace(backend, variable.addr, variable.size, variable.managed, what)?;
            let name = variable.name.clone();
            former.variables.push_back((name, at, variable.asked));
        }
        if modules.insert(note.module, former).is_some() {
            let twice = refuse(CuError::INVALID_VALUE, "is in the notes twice");
            return Err(twice.of(format!("module {}", note.module.0)));
        }
    }
    let heaps = notes.heaps.iter().map(|note| heap(backend, note)).collect::<Result<_, _>>()?;
    let textures = notes.textures.into_inner().into();
    backend.textures.number_from(notes.last_texture);
    *stage = Stage::Making(Expected { modules, heaps, textures, foreign: notes.foreign });
    Ok(())
}

/// Makes the client's memory valid before its slabs are granted, since textures may show it.
fn open_allocations(
    backend: &SoftBackend,
    tables: &mut Tables,
    notes: &Notes,
) -> Result<(), SnapshotError> {
    for at in &*notes.allocations {
        backend.runtime.memory.open_early(at.addr, at.size).map_err(|code| {
            refuse(code, "is no device's").of(format!("memory at {:#x}", at.addr))
        })?;
        tables.allocations.entry(at.ctx).or_default().add(at.addr, at.size);
    }
    Ok(())
}

fn replace(
    backend: &SoftBackend,
    addr: u64,
    size: u64,
    managed: bool,
    what: impl Fn() -> String,
) -> Result<Placed, SnapshotError> {
    backend.runtime.memory.replace(addr, size, managed).map_err(|code| {
        let why = match code {
            CuError::OUT_OF_MEMORY => "has no room: the device has less memory than before",
            CuError::INVALID_DEVICE => "is on a device that is missing: restart with as many",
            _ => "cannot lie where it lay",
        };
        refuse(code, why).of(what())
    })
}

fn heap(backend: &SoftBackend, note: &HeapNote) -> Result<(CtxId, Placed, Heap), SnapshotError> {
    let what = || format!("the device heap of context {}", note.ctx.0);
    let placed = replace(backend, note.addr, note.size, false, what)?;
    let heap = Heap::with(note.addr, note.size, &note.used);
    let heap = heap.ok_or_else(|| refuse(CuError::INVALID_VALUE, "is damaged").of(what()))?;
    Ok((note.ctx, placed, heap))
}

/// Gives the objects, which are all there, what their making does not tell.
pub(in crate::device) fn apply(backend: &SoftBackend, notes: &[u8]) -> Result<(), SnapshotError> {
    let notes = Notes::decode(notes)?;
    let mut tables = backend.tables();
    let mut stage = lock(&backend.stage);
    let Stage::Making(expected) = &mut *stage else { return Err(wrong_stage("take notes")) };
    check_all_made(expected)?;
    for at in &*notes.allocations {
        let what = || format!("memory at {:#x}", at.addr);
        context(&tables, at.ctx, what)?;
        if !backend.runtime.memory.is_open(at.addr, at.size) {
            return Err(refuse(CuError::INVALID_VALUE, "lies in no slab").of(what()));
        }
    }
    for (ctx, placed, heap) in expected.heaps.drain(..) {
        let what = || format!("the device heap of context {}", ctx.0);
        let owner = context(&tables, ctx, what)?;
        if placed.device != Some(owner.device) || owner.restore_heap(placed, heap).is_err() {
            return Err(refuse(CuError::INVALID_VALUE, "is another context's").of(what()));
        }
    }
    restore_events(&mut tables, &notes)?;
    tables.tensor_maps |= notes.tensor_maps;
    for (ctx, error) in &*notes.faults {
        let owner = context(&tables, *ctx, || format!("the fault of context {}", ctx.0))?;
        owner.restore_fault(CuError(*error));
    }
    *stage = Stage::Filling { clock: notes.clock, held: Parts::new() };
    Ok(())
}

/// Becomes what a later snapshot tells of, if all that devices place lies here where it lay there:
/// memory that was allocated and freed meanwhile is all that may differ, and what becomes of it.
/// What is in none of `pieces` reads as zero then.
pub(in crate::device) fn apply_later(
    backend: &SoftBackend,
    notes: &[u8],
    pieces: &[Piece],
) -> Result<bool, SnapshotError> {
    let notes = Notes::decode(notes)?;
    let mut tables = backend.tables();
    let mut stage = lock(&backend.stage);
    let Stage::Filling { clock, .. } = &mut *stage else { return Err(wrong_stage("take notes")) };
    let here = super::take::notes(backend, &tables)?;
    if !same_places(&here, &notes) || !notes.faults.starts_with(&here.faults) {
        return Ok(false);
    }
    for at in here.allocations.iter().filter(|at| !notes.allocations.contains_at(at)) {
        if let Some(all) = tables.allocations.get_mut(&at.ctx) {
            all.cut(at.addr, at.size);
        }
        // Its bytes may be known to be those of what is there next.
        backend.runtime.memory.shut(at.addr, at.size)?;
    }
    for at in notes.allocations.iter().filter(|at| !here.allocations.contains_at(at)) {
        if context(&tables, at.ctx, String::new).is_err()
            || backend.runtime.memory.open(at.addr, at.size).is_err()
        {
            return Ok(false);
        }
        tables.allocations.entry(at.ctx).or_default().add(at.addr, at.size);
    }
    restore_events(&mut tables, &notes)?;
    for (ctx, error) in notes.faults.iter().skip(here.faults.len()) {
        let owner = context(&tables, *ctx, || format!("the fault of context {}", ctx.0))?;
        owner.restore_fault(CuError(*error));
    }
    tables.tensor_maps |= notes.tensor_maps;
    *clock = notes.clock;
    let kept = if notes.foreign { unlisted(&tables, &notes) } else { Ranges::default() };
    clear_between(backend, &tables, pieces, kept)?;
    Ok(true)
}

/// The memory of variables that another kind of device does not list, since nothing can have
/// changed them there: they are what their modules' images say.
fn unlisted(tables: &Tables, notes: &Notes) -> Ranges {
    let of_module = |note: &ModuleNote| {
        let names = note.variables.iter().map(|variable| variable.name.to_string());
        names.map(|name| (note.module, name)).collect::<Vec<_>>()
    };
    let listed: HashSet<(ModuleId, String)> = notes.modules.iter().flat_map(of_module).collect();
    let mut all = Ranges::default();
    for (id, module) in &tables.modules {
        let kept = module.variables().filter(|one| !listed.contains(&(*id, one.name.to_owned())));
        kept.for_each(|one| all.add(one.at.addr, one.at.size));
    }
    all
}

/// Has all memory of the devices' own that is in none of `pieces`, and not `kept`, read as zero:
/// there, it was given back to the system, or never touched.
fn clear_between(
    backend: &SoftBackend,
    tables: &Tables,
    pieces: &[Piece],
    kept: Ranges,
) -> Result<(), SnapshotError> {
    let mut kept: HashMap<&Object, Ranges> = HashMap::from([(&Object::Memory, kept)]);
    for Piece { object, start, bytes } in pieces {
        start.checked_add(*bytes).ok_or_else(|| {
            refuse(CuError::INVALID_VALUE, "has no end").of(format!("{object:?} at {start:#x}"))
        })?;
        kept.entry(object).or_default().add(*start, *bytes);
    }
    let none = Ranges::default();
    let kept_of = |object: &Object| kept.get(object).unwrap_or(&none);
    for (addr, size) in memory(backend, tables).private {
        let between = kept_of(&Object::Memory).between(addr, addr + size);
        between.for_each(|(from, to)| discard(from, to - from));
    }
    for (id, (_, array)) in &tables.arrays {
        let between = kept_of(&Object::Array(*id)).between(0, array.bytes());
        between.for_each(|(from, to)| array.clear(from, to));
    }
    Ok(backend.vmm.empty_but(|id| kept.get(&Object::Handle(id)))?)
}

/// Whether what devices place and number by themselves is the same.
fn same_places(here: &Notes, there: &Notes) -> bool {
    if there.foreign {
        return same_as_foreign(here, there);
    }
    let of_modules = |notes: &Notes| {
        let mut modules = notes.modules.to_vec();
        modules.sort_unstable_by_key(|note| note.module);
        modules
    };
    let of_heaps = |notes: &Notes| {
        let mut heaps = notes.heaps.to_vec();
        heaps.sort_unstable_by_key(|note| note.ctx);
        heaps
    };
    let numbers = |notes: &Notes| (notes.last_texture, notes.exact, notes.foreign);
    here.textures == there.textures
        && numbers(here) == numbers(there)
        && of_modules(here) == of_modules(there)
        && of_heaps(here) == of_heaps(there)
}

/// The same where another kind of device is there, which tells of nothing but what is used.
fn same_as_foreign(here: &Notes, there: &Notes) -> bool {
    let mut known = HashMap::new();
    for note in &*here.modules {
        let all = note.variables.iter();
        known.extend(all.map(|variable| ((note.module, &*variable.name), variable)));
    }
    let lies_here = |module: &ModuleNote, there: &Variable| {
        known.get(&(module.module, &*there.name)).is_some_and(|here| {
            (here.addr, here.managed, here.asked) == (there.addr, there.managed, there.asked)
        })
    };
    let mut modules = there.modules.iter();
    here.textures == there.textures
        && here.exact == there.exact
        && modules.all(|module| module.variables.iter().all(|one| lies_here(module, one)))
}

/// Allocations in the order of their addresses.
trait Allocations {
    /// Whether this very one is among them.
    fn contains_at(&self, at: &Allocation) -> bool;
}

impl Allocations for [Allocation] {
    fn contains_at(&self, at: &Allocation) -> bool {
        let found = self.binary_search_by_key(&at.addr, |other| other.addr);
        found.is_ok_and(|index| self[index] == *at)
    }
}

fn check_all_made(expected: &Expected) -> Result<(), SnapshotError> {
    let missing = || refuse(CuError::INVALID_HANDLE, "of the checkpoint was not made again");
    if let Some(module) = expected.modules.keys().min() {
        return Err(missing().of(format!("module {}", module.0)));
    }
    match expected.textures.front() {
        Some((_, handle)) => Err(missing().of(format!("texture or surface {handle}"))),
        None => Ok(()),
    }
}

fn restore_events(tables: &mut Tables, notes: &Notes) -> Result<(), SnapshotError> {
    let Tables { events, streams, .. } = tables;
    for (id, nanos) in &*notes.events {
        let missing = refuse(CuError::INVALID_HANDLE, "was not made again");
        let Some((ctx, event)) = events.get_mut(id) else {
            return Err(missing.of(format!("event {}", id.0)));
        };
        event.restore(streams.context(*ctx)?, *nanos);
    }
    Ok(())
}

fn context(
    tables: &Tables,
    ctx: CtxId,
    what: impl Fn() -> String,
) -> Result<&std::sync::Arc<crate::device::context::Context>, SnapshotError> {
    let found = tables.streams.context(ctx);
    found.map_err(|code| refuse(code, "belongs to a context that was not made again").of(what()))
}

/// Writes bytes of a piece.
pub(in crate::device) fn put(
    backend: &SoftBackend,
    object: &Object,
    start: u64,
    bytes: &[u8],
) -> Result<(), SnapshotError> {
    if !matches!(*lock(&backend.stage), Stage::Filling { .. }) {
        return Err(wrong_stage("take bytes"));
    }
    let written = match object {
        Object::Memory => write_memory(backend, start, bytes),
        Object::Handle(id) => backend.vmm.write(*id, start, bytes),
        Object::Array(id) => {
            let array = backend.tables().array(*id);
            array.and_then(|array| array.restore(start, bytes))
        }
        // Its variables are memory.
        Object::Variable { .. } => Err(CuError::NOT_SUPPORTED),
    };
    written.map_err(|code| {
        let what = format!("{} bytes from {start:#x} on of {object:?}", bytes.len());
        refuse(code, "have no place on this device").of(what)
    })
}

pub(in crate::device) fn write_memory(
    backend: &SoftBackend,
    addr: u64,
    bytes: &[u8],
) -> Result<(), CuError> {
    if !backend.runtime.memory.is_valid_on_device(addr, bytes.len() as u64) {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the range is valid device memory, which is mapped memory of this process that no Rust
    // reference names; no work runs yet.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
    Ok(())
}

/// The devices run on from where they were.
pub(in crate::device) fn end(backend: &SoftBackend) -> Result<(), SnapshotError> {
    let mut stage = lock(&backend.stage);
    let Stage::Filling { clock, .. } = *stage else { return Err(wrong_stage("end")) };
    backend.runtime.clock.set(clock);
    *stage = Stage::Running;
    Ok(())
}
