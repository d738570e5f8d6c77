//! Rebuilding one process: it is emptied, then given its mappings, memory and state by lists of
//! calls.

use super::Plan;
use super::aio;
use super::files::Inherited;
use super::forked::{self, Kept};
use super::kernel::{Detour, KernelMappings};
use super::lazy::{self, Awaited, Pager};
use super::memory;
use super::rings;
use super::segments;
use super::standby;
use super::threads;
use super::tree::{Area, Made};
use crate::huge;
use crate::inject::{Batch, Parasite, UnderWay};
use crate::maps;
use crate::numa::NODES;
use crate::plugins::Argument;
use crate::state::{Backing, ProcessState, SIGNALS, Saved};
use crate::track::{Run, common};
use crate::{EngineError, Thread};
use kedge_image::{Layers, Source};
use libc::pid_t;
use std::collections::BTreeSet;
use std::sync::OnceLock;

pub(super) struct Rebuilding<'a> {
    plan: &'a Plan,
    state: &'a ProcessState,
    area: Area,
    inherited: &'a Inherited,
}

/// Since Linux 6.11.
const MAP_DROPPABLE: i32 = 8;
/// What a call is for whose failure is told with its mapping.
const MAP: &str = "map its memory";
const PR_SET_VMA: u64 = 0x5356_4d41;
const PR_SET_VMA_ANON_NAME: u64 = 0;
/// Since Linux 5.14.
const MADV_POPULATE_WRITE: u64 = 23;
/// Since Linux 6.13.
const MADV_GUARD_INSTALL: u64 = 102;

/// Flags of smaps, and the advice that brings them back (madvise(2)).
const ADVICE: [(&str, i32); 8] = [
    ("dd", libc::MADV_DONTDUMP),
    ("dc", libc::MADV_DONTFORK),
    ("wf", libc::MADV_WIPEONFORK),
    ("hg", libc::MADV_HUGEPAGE),
    ("nh", libc::MADV_NOHUGEPAGE),
    ("mg", libc::MADV_MERGEABLE),
    ("sr", libc::MADV_SEQUENTIAL),
    ("rr", libc::MADV_RANDOM),
];

/// A process that has its memory, but for what comes later, and nothing else so far.
#[derive(Debug)]
pub(super) struct Filled {
    kernel: KernelMappings,
    /// The mappings that something was written into, by their first addresses.
    filled: BTreeSet<u64>,
    /// What it has of others, who are made from it, and what it is to get in its place.
    late: Vec<Run>,
    own: Option<(Layers, Vec<Source>)>,
    later: Option<(Layers, Vec<Source>)>,
}

/// A process that maps its memory.
#[derive(Debug)]
pub(super) struct Filling {
    under_way: UnderWay,
    layers: Layers,
    sources: Vec<Source>,
    /// What it has of others for a while.
    lent: Vec<(Layers, Vec<Source>)>,
    later: Vec<Source>,
    /// Nothing of its memory is there, and none comes later.
    all: bool,
    /// As it is then.
    then: Filled,
}

/// What is to be written into a process that has its mappings. That needs no tracer.
#[derive(Debug)]
pub(super) struct Writing<'a> {
    state: &'a ProcessState,
    layers: Layers,
    sources: Vec<Source>,
    lent: Vec<(Layers, Vec<Source>)>,
    later: Vec<Source>,
    all: bool,
    then: Filled,
}

impl Writing<'_> {
    pub(super) fn write(self) -> Result<Filled, EngineError> {
        let Writing { state, layers, sources, lent, later, all, then } = self;
        memory::fill(state, &layers, &sources, all)?;
        for (layers, sources) in lent {
            memory::fill(state, &layers, &sources, false)?;
        }
        let later = (!later.is_empty()).then_some((layers, later));
        Ok(Filled { later, ..then })
    }
}

impl<'a> Rebuilding<'a> {
    pub(super) fn of(
        plan: &'a Plan,
        state: &'a ProcessState,
        area: Area,
        inherited: &'a Inherited,
    ) -> Rebuilding<'a> {
        Rebuilding { plan, state, area, inherited }
    }

    /// Gives the process its memory; it has that of its maker, of which it keeps some.
    pub(super) fn fill(&self, made: &mut Made, kept: &Kept) -> Result<Filled, EngineError> {
        let filling = self.begin_filling(made, kept)?;
        self.end_mapping(made, filling)?.write()
    }

    /// The same in three steps: others can be given theirs meanwhile.
    pub(super) fn begin_filling(
        &self,
        made: &mut Made,
        kept: &Kept,
    ) -> Result<Filling, EngineError> {
        let (layers, mut sources) = self.plan.memory(self.state)?;
        let Made { thread, parasite } = made;
        let pid = self.state.ids.pid;
        let kernel = KernelMappings::plan(self.state, &self.plan.job.vdsos, pid, self.area)?;
        let later = if self.plan.lazy { lazy::later(self.state, &mut sources) } else { Vec::new() };
        kept.early(&mut sources);
        let lent = kept.lent().map(|(pid, runs)| self.lent(pid, &runs));
        let lent = lent.collect::<Result<Vec<(Layers, Vec<Source>)>, EngineError>>()?;
        let mut filled = memory::filled(self.state, &sources)?;
        for (_, sources) in &lent {
            filled.extend(memory::filled(self.state, sources)?);
        }
        // What it gets later is written there, too, also where all that it has until then is its
        // maker's.
        let late = kept.late();
        let own = (!late.is_empty()).then(|| self.lent(pid, &late)).transpose()?;
        if let Some((_, own)) = &own {
            filled.extend(memory::filled(self.state, own)?);
        }
        memory::add_between(&self.state.mappings, &mut filled);
        let keeps = self.state.mappings.iter().filter(|saved| kept.has(saved));
        let keeps = keeps.map(|saved| (saved.start, saved.end)).collect();
        // All in one batch: each is a stop, which takes longer than its calls.
        let mut batch = parasite.batch(thread);
        kernel.empty(&mut batch, self.area, keeps)?;
        let mapped = self.map(&mut batch, &mut filled, kept).and_then(|()| batch.begin());
        let under_way = mapped.map_err(|error| self.of_mapping(error))?;
        let then = Filled { kernel, filled, late, own, later: None };
        let all = !self.plan.lazy && (!self.plan.is_early() || kept.is_nothing());
        Ok(Filling { under_way, layers, sources, lent, later, all, then })
    }

    pub(super) fn end_mapping(
        &self,
        made: &mut Made,
        filling: Filling,
    ) -> Result<Writing<'a>, EngineError> {
        let Made { thread, parasite } = made;
        let Filling { under_way, layers, sources, lent, later, all, then } = filling;
        under_way.end(thread).map_err(|error| self.of_mapping(error))?;
        let written = lent.iter().chain(&then.own).flat_map(|(_, sources)| sources).chain(&sources);
        let mut written: Vec<Run> = written.flat_map(|source| &source.parts).copied().collect();
        written.sort_unstable();
        self.map_huge(thread, *parasite, &then.filled, &written)?;
        Ok(Writing { state: self.state, layers, sources, lent, later, all, then })
    }

    /// What the process `pid` has in `runs`.
    fn lent(&self, pid: pid_t, runs: &[Run]) -> Result<(Layers, Vec<Source>), EngineError> {
        let state = self.plan.processes.iter().find(|state| state.ids.pid == pid);
        let state = state.ok_or(EngineError::Nonsense("memory of no process"))?;
        let (layers, mut sources) = self.plan.memory(state)?;
        forked::limit(&mut sources, |parts| common(parts, forked::around(runs, parts)));
        Ok((layers, sources))
    }

    /// Gives the process what is its own in the place of what others have, who have been made.
    fn fill_late(
        &self,
        made: &mut Made,
        late: &[Run],
        (layers, sources): (Layers, Vec<Source>),
    ) -> Result<(), EngineError> {
        let mut batch = made.parasite.batch(&mut made.thread);
        for (start, end) in late {
            let arguments = [*start, end - start, libc::MADV_DONTNEED as u64];
            batch.call("let go of the memory of others", libc::SYS_madvise, &arguments)?;
        }
        batch.run()?;
        memory::fill(self.state, &layers, &sources, false)
    }

    /// Begins to give the process everything else but its threads.
    pub(super) fn begin_finishing(
        &self,
        made: &mut Made,
        filled: Filled,
    ) -> Result<(UnderWay, KernelMappings), EngineError> {
        let Filled { kernel, filled, late, own, later } = filled;
        own.map_or(Ok(()), |own| self.fill_late(made, &late, own))?;
        let Made { thread, parasite } = made;
        let parasite = *parasite;
        kernel.replace(self.state, thread, parasite)?;
        segments::attach(self.state, thread, parasite)?;
        aio::make(self.state, thread, parasite)?;
        rings::map(self.state, self.inherited, thread, parasite)?;
        if let Some((layers, later)) = later {
            Pager::start(Awaited::begin(self.state, thread, parasite, layers, later)?)?;
        }
        let mut batch = parasite.batch(thread);
        self.protect(&mut batch, &filled)?;
        kernel.place(&mut batch)?;
        self.set_bounds(&mut batch)?;
        self.set_context(&mut batch)?;
        set_actions(&mut batch, self.state)?;
        self.state.attributes.set(&mut batch)?;
        Ok((batch.begin()?, kernel))
    }

    /// Ends that; where threads are to go on that were inside of an old vDSO.
    pub(super) fn end_finishing(
        &self,
        made: &mut Made,
        (under_way, kernel): (UnderWay, KernelMappings),
    ) -> Result<Option<Detour>, EngineError> {
        under_way.end(&mut made.thread)?;
        self.state.attributes.write(&mut made.thread, made.parasite)?;
        Ok(kernel.detour())
    }

    /// Adds calls to `batch` that map its memory, all but huge pages, and let go of what it does
    /// not keep of its maker's; those mappings are added to `filled` that have to be protected
    /// again.
    fn map(
        &self,
        batch: &mut Batch<'_>,
        filled: &mut BTreeSet<u64>,
        kept: &Kept,
    ) -> Result<(), EngineError> {
        let is_early = self.plan.is_early();
        let mappings = self.state.mappings.iter();
        for saved in mappings.filter(|saved| !is_early || standby::is_early(saved)) {
            let protection = (saved.protection | for_filling(saved, filled)) as u64;
            if kept.has(saved) {
                for part in kept.missing(saved) {
                    self.grow(batch, saved, part)?;
                }
                let arguments = [saved.start, saved.len(), protection];
                batch.call("protect its memory", libc::SYS_mprotect, &arguments)?;
                bind(batch, saved)?;
                continue;
            }
            let has = |flag: &str| saved.flags.iter().any(|own| own == flag);
            let mut flags =
                libc::MAP_FIXED | if saved.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
            let fd = match &saved.backing {
                Backing::Kernel { .. } | Backing::Segment(_) => continue,
                Backing::Anonymous if saved.huge != 0 => continue,
                // Its place is kept until it is there.
                Backing::Aio => {
                    rings::keep_place(saved, batch)?;
                    continue;
                }
                Backing::Anonymous => {
                    flags |= libc::MAP_ANONYMOUS;
                    u64::MAX
                }
                Backing::File(index) => self.inherited.file(&self.state.files[*index])? as u64,
                Backing::Description(_) if rings::of(saved, self.inherited)?.is_some() => {
                    rings::keep_place(saved, batch)?;
                    continue;
                }
                Backing::Description(index) => self.inherited.description(*index)? as u64,
                Backing::Object(number) => self.inherited.object(*number)? as u64,
            };
            if has("dp") && is_droppable_known() {
                flags = libc::MAP_FIXED | libc::MAP_ANONYMOUS | MAP_DROPPABLE;
            }
            for (flag, bit) in [("gd", libc::MAP_GROWSDOWN), ("nr", libc::MAP_NORESERVE)] {
                if has(flag) {
                    flags |= bit;
                }
            }
            let offset = if fd == u64::MAX { 0 } else { saved.offset };
            let arguments = [saved.start, saved.len(), protection, flags as u64, fd, offset];
            batch.call(MAP, libc::SYS_mmap, &arguments)?;
            // Before there are pages.
            bind(batch, saved)?;
        }
        for run in kept.joined() {
            filled.extend(self.join(batch, run)?);
        }
        for (start, end) in kept.gone() {
            let arguments = [*start, end - start, libc::MADV_DONTNEED as u64];
            batch.call("let go of its maker's memory", libc::SYS_madvise, &arguments)?;
        }
        Ok(())
    }

    /// Maps a part of memory without a file that it has the rest of.
    fn grow(&self, batch: &mut Batch<'_>, saved: &Saved, part: Run) -> Result<(), EngineError> {
        let unreserved = saved.flags.iter().any(|flag| flag == "nr");
        let more = if unreserved { libc::MAP_NORESERVE } else { 0 };
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
        // As the rest is made; what it may be is said for all of it.
        let protection = (saved.protection | libc::PROT_READ | libc::PROT_WRITE) as u64;
        let arguments = [part.0, part.1 - part.0, protection, flags as u64, u64::MAX, 0];
        batch.call(MAP, libc::SYS_mmap, &arguments)
    }

    /// Maps huge pages where there are so many, else ordinary ones, which is noted.
    fn map_huge(
        &self,
        thread: &mut Thread,
        parasite: Parasite,
        filled: &BTreeSet<u64>,
        written: &[Run],
    ) -> Result<(), EngineError> {
        let is_early = self.plan.is_early();
        let private =
            |saved: &&Saved| !is_early && saved.huge != 0 && saved.backing == Backing::Anonymous;
        for saved in self.state.mappings.iter().filter(private) {
            let protection = (saved.protection | for_filling(saved, filled)) as u64;
            let unreserved = saved.flags.iter().any(|flag| flag == "nr");
            let more = if unreserved { libc::MAP_NORESERVE } else { 0 };
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
            let map = |thread: &mut Thread, flags: i32| {
                let arguments = [saved.start, saved.len(), protection, flags as u64, u64::MAX, 0];
                parasite.call(thread, MAP, libc::SYS_mmap, &arguments)
            };
            let mapped = map(thread, flags | libc::MAP_HUGETLB | huge::flag(saved.huge));
            // Where something is to be written, there must be pages for it.
            let runs = if unreserved { huge_runs(saved, written) } else { Vec::new() };
            let there = mapped.and_then(|_| {
                runs.into_iter().try_for_each(|(start, end)| {
                    let arguments = [start, end - start, MADV_POPULATE_WRITE];
                    let what = "have huge pages for it";
                    parasite.call(thread, what, libc::SYS_madvise, &arguments).map(drop)
                })
            });
            match there {
                Err(EngineError::System { source, .. }) => {
                    self.inherited.lacks(saved.huge, &source);
                    map(thread, flags)?;
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Makes one mapping of several that differ in nothing but what they allow; those have to be
    /// protected again.
    fn join(&self, batch: &mut Batch<'_>, (start, end): Run) -> Result<Vec<u64>, EngineError> {
        let inside = |saved: &&Saved| saved.start < end && start < saved.end;
        let parts: Vec<&Saved> = self.state.mappings.iter().filter(inside).collect();
        let code = parts.first().map_or(0, |part| part.protection & libc::PROT_EXEC);
        let protection = (code | libc::PROT_READ | libc::PROT_WRITE) as u64;
        batch.call("join its memory", libc::SYS_mprotect, &[start, end - start, protection])?;
        Ok(parts.iter().map(|part| part.start).collect())
    }

    /// An error of [`Rebuilding::map`], with the mapping that is not there: they are made in their
    /// order.
    fn of_mapping(&self, error: EngineError) -> EngineError {
        let EngineError::System { pid, source, what: what @ MAP } = error else { return error };
        let Ok(there) = maps::of(pid) else { return EngineError::System { pid, source, what } };
        let made = |saved: &&Saved| there.iter().any(|m| (m.start..m.end).contains(&saved.start));
        let others =
            |saved: &&Saved| !matches!(saved.backing, Backing::Kernel { .. } | Backing::Segment(_));
        let missing = self.state.mappings.iter().filter(others).find(|saved| !made(saved));
        let Some(Saved { start, end, offset, shared, flags, backing, .. }) = missing else {
            return EngineError::System { pid, source, what };
        };
        let of = match backing {
            Backing::File(index) => match self.state.files.get(*index) {
                Some(file) => format!("of {}", file.path.display()),
                None => "of a file".to_owned(),
            },
            Backing::Description(index) => format!("of open file {index}"),
            Backing::Object(number) => format!("of shared object {number}"),
            _ => "without a file".to_owned(),
        };
        let shared = if *shared { "shared" } else { "private" };
        let flags = flags.join(" ");
        let mapping = format!("{start:x}-{end:x} {of} at {offset:#x} ({shared}; {flags})");
        EngineError::Mapping { pid, mapping, source }
    }

    /// Takes back what only filling needed, and says again what the program said of its memory.
    fn protect(&self, batch: &mut Batch<'_>, filled: &BTreeSet<u64>) -> Result<(), EngineError> {
        for saved in &self.state.mappings {
            let range = [saved.start, saved.len()];
            if for_filling(saved, filled) & !saved.protection != 0 {
                let arguments = [range[0], range[1], saved.protection as u64];
                batch.call("protect its memory", libc::SYS_mprotect, &arguments)?;
            }
            // What was made apart.
            if saved.huge != 0 || matches!(saved.backing, Backing::Segment(_)) {
                bind(batch, saved)?;
            }
            for (flag, advice) in ADVICE {
                if saved.flags.iter().any(|own| own == flag) {
                    let arguments = [range[0], range[1], advice as u64];
                    batch.attempt("advise on its memory", libc::SYS_madvise, &arguments)?;
                }
            }
            if let Some(name) = &saved.name {
                let name = batch.put(&[name.as_bytes(), b"\0"].concat())?;
                let arguments = [PR_SET_VMA, PR_SET_VMA_ANON_NAME, range[0], range[1], name];
                batch.attempt("name its memory", libc::SYS_prctl, &arguments)?;
            }
            if saved.flags.iter().any(|own| own == "lo") {
                // Where somebody serves faults, a page that is not shown is to stay so.
                let served = saved.flags.iter().any(|own| own == "um" || own == "ui");
                let on_fault = if served { libc::MLOCK_ONFAULT } else { 0 };
                let arguments = [range[0], range[1], on_fault.into()];
                batch.attempt("lock its memory", libc::SYS_mlock2, &arguments)?;
            }
        }
        for (start, end) in &self.state.guards {
            let arguments = [*start, end - start, MADV_GUARD_INSTALL];
            batch.call("guard its memory", libc::SYS_madvise, &arguments)?;
        }
        Ok(())
    }

    /// The bounds that the kernel keeps of the address space, and the program's file.
    fn set_bounds(&self, batch: &mut Batch<'_>) -> Result<(), EngineError> {
        let mm = &self.state.mm;
        let auxiliary: Vec<u8> = mm.auxiliary.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = batch.put(&auxiliary)?;
        let exe = match &self.state.exe {
            Some(exe) => self.inherited.file(exe)? as u32,
            None => u32::MAX,
        };
        let pairs = [mm.code, mm.data, mm.brk];
        let mut words: Vec<u64> = pairs.iter().flat_map(|(from, to)| [*from, *to]).collect();
        words.push(mm.stack);
        let pairs = [mm.arguments, mm.environment];
        words.extend(pairs.iter().flat_map(|(from, to)| [*from, *to]));
        words.extend([at, auxiliary.len() as u64 | u64::from(exe) << 32]);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let map = batch.put(&bytes)?;
        let (set, option) = (libc::PR_SET_MM as u64, libc::PR_SET_MM_MAP as u64);
        let arguments = [set, option, map, bytes.len() as u64, 0];
        batch.call("set the bounds of its address space", libc::SYS_prctl, &arguments)
    }

    /// Working folder, umask, personality; then its descriptors, in the place of what it has
    /// inherited.
    fn set_context(&self, batch: &mut Batch<'_>) -> Result<(), EngineError> {
        let folder = self.inherited.folder(&self.state.cwd)? as u64;
        batch.call("enter its working folder", libc::SYS_fchdir, &[folder])?;
        batch.call("set its umask", libc::SYS_umask, &[u64::from(self.state.umask)])?;
        let personality = u64::from(self.state.personality);
        batch.call("set its personality", libc::SYS_personality, &[personality])?;
        let descriptors = &self.inherited.descriptors;
        let arguments = [0, descriptors.above as u64 - 1, 0];
        batch.call("close what it inherited", libc::SYS_close_range, &arguments)?;
        for call in descriptors.place(self.state.ids.pid) {
            let mut arguments = [0; 6];
            for (place, argument) in arguments.iter_mut().zip(&call.arguments) {
                let Argument::Number(number) = argument else {
                    return Err(EngineError::Nonsense("a descriptor that needs memory"));
                };
                *place = *number;
            }
            batch.call("put its descriptors in place", call.number, &arguments)?;
        }
        Ok(())
    }
}

/// Whether this kernel has memory that it may drop. Where it has none, such a mapping is wiped by a
/// fork, and otherwise as any other.
fn is_droppable_known() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let flags = libc::MAP_ANONYMOUS | MAP_DROPPABLE;
        // SAFETY: a new page, which nobody uses, is mapped and unmapped again.
        unsafe {
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0);
            page != libc::MAP_FAILED && libc::munmap(page, 4096) == 0
        }
    })
}

/// The huge pages of a mapping that something is written into.
fn huge_runs(saved: &Saved, written: &[Run]) -> Vec<Run> {
    let pages = common(written, &[(saved.start, saved.end)]).into_iter();
    let whole = |(start, end): Run| (start - start % saved.huge, end.next_multiple_of(saved.huge));
    pages.map(whole).collect()
}

/// What a mapping must allow while it is being filled.
fn for_filling(saved: &Saved, filled: &BTreeSet<u64>) -> i32 {
    if filled.contains(&saved.start) { libc::PROT_READ | libc::PROT_WRITE } else { 0 }
}

/// Gives the mapping its policy. What this machine or user does not allow stays as it is.
fn bind(batch: &mut Batch<'_>, saved: &Saved) -> Result<(), EngineError> {
    let Some(policy) = &saved.policy else { return Ok(()) };
    let mask = batch.put(&policy.mask())?;
    let arguments = [saved.start, saved.len(), policy.0 as u64, mask, NODES as u64, 0];
    batch.attempt("bind its memory to nodes", libc::SYS_mbind, &arguments)
}

/// Sets the signal actions, all but the trap's, which ends batches.
fn set_actions(batch: &mut Batch<'_>, state: &ProcessState) -> Result<(), EngineError> {
    for signal in 1..=SIGNALS {
        if ![libc::SIGKILL, libc::SIGSTOP, libc::SIGTRAP].contains(&signal) {
            let at = batch.put(&threads::action(state, signal))?;
            let arguments = [signal as u64, at, 0, 8];
            batch.call("set its signal actions", libc::SYS_rt_sigaction, &arguments)?;
        }
    }
    Ok(())
}
