//! Looking at one stopped process: all that is to be known of it but what its memory holds.

use super::aio as contexts;
use super::changes::{self, Changes};
use super::flags::Flags;
pub(super) use super::lookup::Lookup;
use super::memory::Unmapped;
use super::objects::Objects;
use super::queries::{self, Scratch, ThreadAnswers};
use super::told::{Told, ToldThread};
use super::{Ahead, Options, guards, notices, refuse, undo};
use crate::filters::program::Filter;
use crate::freeze::beside;
use crate::home::{self, Row, Ways};
use crate::maps::Mapping;
use crate::plugins;
use crate::plugins::mqueue::Wanted;
use crate::proc::{self, Status};
use crate::rseq::{self, Places, Registration};
use crate::state::*;
use crate::stop::StoppedProcess;
use crate::sys;
use crate::thread::begun_anew;
use crate::track::{Session, Shared, Tracker};
use crate::{EngineError, Thread};
use libc::pid_t;
use std::collections::HashMap;
use std::iter;
use std::rc::Rc;

/// What the capture of all processes has in common.
pub(super) struct Common<'a> {
    pub(super) options: &'a Options,
    pub(super) descriptors: &'a plugins::Saved,
    /// Who is to be told of messages.
    pub(super) notices: &'a [Wanted],
    pub(super) lookup: Lookup,
    /// Of all processes.
    pub(super) ids: &'a [Ids],
    pub(super) exit_signals: &'a [i32],
}

impl Common<'_> {
    pub(super) fn is_parent(&self, pid: pid_t) -> bool {
        self.ids.iter().any(|ids| ids.parent == pid)
    }
}

/// A stopped process of which all is known but what its memory holds.
pub(super) struct Looked {
    pub(super) state: ProcessState,
    pub(super) status: Status,
    pub(super) mappings: Vec<Mapping>,
    pub(super) ways: Rc<Ways>,
    pub(super) memory: Holding,
    pub(super) ahead: Option<Ahead>,
}

/// What is to hold a process's memory.
pub(super) enum Holding {
    /// A clone, and what of it has changed, if that is known.
    Clone(Option<Changes>),
    /// A copy of what has changed is there.
    Copied { changes: Changes, flags: Flags },
}

/// So many first threads tell side by side what they know of their processes.
const SIDE_BY_SIDE: usize = 64;

/// Adds what only its tracer sees of each of the stopped `processes` to what was `told` of it.
pub(super) fn look(
    processes: &mut [StoppedProcess],
    told: Vec<(Told, Vec<Mapping>)>,
    common: &Common<'_>,
    objects: &mut Objects,
    session: &mut Session,
) -> Result<Vec<Looked>, EngineError> {
    refuse::one_memory(processes.iter().map(|process| process.main.pid()))?;
    let (mut all, mut told) = (Vec::with_capacity(processes.len()), told.into_iter());
    for some in processes.chunks_mut(SIDE_BY_SIDE) {
        let each = some.iter_mut().zip(told.by_ref());
        let asked: Vec<Result<Asking, EngineError>> = each
            .map(|(process, (told, mappings))| {
                Asking::begin(process, mappings, told, objects, session)
            })
            .collect();
        // Whatever has failed of one, those that have set out are waited for.
        let mut result = Ok(());
        for (process, asking) in some.iter_mut().zip(asked) {
            match (asking, &result) {
                (Ok(asking), Ok(())) => match asking.look(process, common, objects, session) {
                    Ok(looked) => all.push(looked),
                    Err(error) => result = Err(error),
                },
                (Ok(asking), Err(_)) => asking.give_up(process),
                (Err(error), _) => result = result.and(Err(error)),
            }
        }
        result?;
    }
    Ok(all)
}

/// A stopped process whose first thread tells what it knows.
struct Asking {
    state: ProcessState,
    status: Status,
    mappings: Vec<Mapping>,
    threads: Vec<ToldThread>,
    ways: Rc<Ways>,
    scratch: Scratch,
    /// What the first thread has set out on, if it can make calls in a row.
    row: Option<Row>,
}

impl Asking {
    fn begin(
        process: &mut StoppedProcess,
        mappings: Vec<Mapping>,
        mut told: Told,
        objects: &mut Objects,
        session: &mut Session,
    ) -> Result<Asking, EngineError> {
        let pid = process.main.pid();
        let mut mappings = told.mappings(mappings);
        let Told { status, mapped, vdso, mut state, threads, .. } = told;
        add_signals(process, &mut state)?;
        (state.files, state.mappings) =
            mapped.numbered(process.pid, &mappings, objects, &mut session.shared);
        for (mapping, saved) in mappings.iter_mut().zip(&state.mappings) {
            mapping.comes_back = matches!(saved.backing, Backing::Description(_));
        }
        let nameless = state.mappings.iter().filter(|m| matches!(m.backing, Backing::Object(_)));
        guards::refuse_in(pid, &nameless.map(|m| (m.start, m.end)).collect::<Vec<_>>())?;
        let ways = Rc::new(Ways::within(&vdso, pid)?.with_quiet(quiet(process, &status)));
        let scratch = Scratch::of(pid, &mappings, ways.clone())?;
        match ask_leader(&mut process.main, &mappings, &scratch, &mut session.shared) {
            Ok(row) => Ok(Asking { state, status, mappings, threads, ways, scratch, row }),
            Err(error) => {
                // What has failed first counts.
                let _ = ways.close(threads_of(process));
                Err(error)
            }
        }
    }

    /// Takes what the first thread has told, and asks for the rest. Everybody is at home
    /// afterwards.
    fn look(
        self,
        process: &mut StoppedProcess,
        common: &Common<'_>,
        objects: &Objects,
        session: &mut Session,
    ) -> Result<Looked, EngineError> {
        let Asking { mut state, status, mappings, threads, ways, scratch, row } = self;
        let asked = ask_live(process, &mappings, &ways, (&mut state, threads), (scratch, row));
        let undo = asked.and_then(|()| undo::ask(&mut process.main, &ways, &objects.ipc.sets));
        let undo = undo.map(|undo| state.undo = undo);
        let aio = undo.and_then(|()| contexts::save(&mut process.main, &ways, &state));
        let aio = aio.map(|aio| state.aio = aio);
        let notices = aio.and_then(|()| notices::ask(process, &ways, common.notices));
        let asked = notices.map(|notices| state.notices = notices);
        let tracker = common.options.tracker.as_ref();
        let memory = asked
            .and_then(|()| copy_changes(process, &mappings, &ways, (session, tracker), &mut state));
        ways.close(threads_of(process))?;
        let ahead = session.ahead(process.pid);
        Ok(Looked { state, status, mappings, ways, memory: memory?, ahead })
    }

    /// Brings the first thread home. Nobody wants to know what it has told, or that it has ended.
    fn give_up(self, process: &mut StoppedProcess) {
        if let Some(row) = self.row {
            let _ = process.main.end_row(row, |_| Ok(()));
        }
        let _ = self.ways.close(threads_of(process));
    }
}

/// Has the first thread set out to tell what it knows.
fn ask_leader(
    main: &mut Thread,
    mappings: &[Mapping],
    scratch: &Scratch,
    shared: &mut Shared,
) -> Result<Option<Row>, EngineError> {
    if shared.asks_of(mappings) && scratch.forgets_children(main)? {
        shared.distrust();
    }
    scratch.ask_leader(main)
}

pub(super) fn threads_of(process: &mut StoppedProcess) -> impl Iterator<Item = &mut Thread> {
    std::iter::once(&mut process.main).chain(&mut process.others)
}

/// A signal that nobody in the process would notice.
fn quiet(process: &StoppedProcess, status: &Status) -> Option<i32> {
    let StoppedProcess { main, others, .. } = process;
    let blocked = others.iter().fold(main.mask(), |all, thread| all | thread.mask());
    home::quiet(status.hex("SigCgt"), blocked)
}

/// Copies what has changed since the last image, if that is known and little; else it is to be
/// cloned.
fn copy_changes(
    process: &mut StoppedProcess,
    mappings: &[Mapping],
    ways: &Ways,
    (session, tracker): (&mut Session, Option<&Tracker>),
    state: &mut ProcessState,
) -> Result<Holding, EngineError> {
    let main = &mut process.main;
    if !session.is_known(process.pid) {
        return Ok(Holding::Clone(None));
    }
    let pid = main.pid();
    let mut early = session.early(process.pid);
    let before = early.take_mappings();
    let watch = |mapping: &Mapping| tracker.is_some_and(|of| of.watch(process.pid, mapping));
    let mut changes = Changes::find(pid, mappings, early, watch)?;
    if !changes.fit() {
        return Ok(Holding::Clone(Some(changes.of_clone())));
    }
    ways.lead(main)?;
    let asked = beside(main, ways, |beside| queries::ask_beside(beside, mappings, state));
    main.go_home()?;
    asked?;
    state.guards = changes.guards(pid)?;
    changes.copy_by(|chunks, room| changes::copy(pid, chunks, room, Unmapped::Zeros))?;
    let flags = Flags::of_stopped(process.pid, mappings, before)?;
    Ok(Holding::Copied { changes, flags })
}

/// Adds the signals that wait for the whole process, and the one that has stopped it.
fn add_signals(process: &StoppedProcess, state: &mut ProcessState) -> Result<(), EngineError> {
    let pending = sys::pending(process.main.pid(), true)?;
    // One that was sent SIGCONT since it stopped is to go on.
    let continued = pending.iter().any(|signal| signal[..4] == libc::SIGCONT.to_ne_bytes());
    let stop_signal = if continued { 0 } else { process.stop_signal };
    (state.stopped, state.stop_signal) = (stop_signal != 0, stop_signal);
    state.pending = hex(pending);
    Ok(())
}

fn hex(signals: Vec<sys::SigInfo>) -> Vec<Hex> {
    signals.into_iter().map(|signal| Hex(signal.to_vec())).collect()
}

/// What is asked of the live threads, of which the first one has been asked.
fn ask_live(
    process: &mut StoppedProcess,
    mappings: &[Mapping],
    ways: &Ways,
    (state, threads): (&mut ProcessState, Vec<ToldThread>),
    (scratch, row): (Scratch, Option<Row>),
) -> Result<(), EngineError> {
    let StoppedProcess { main, others, .. } = process;
    let mut threads = threads.into_iter();
    let mut told = || threads.next().ok_or(EngineError::Nonsense("a thread was not looked at"));
    let (answers, of_process) = scratch.leader_told(main, row)?;
    (state.parent_death_signal, state.subreaper) =
        (of_process.parent_death_signal, of_process.subreaper);
    state.timers = of_process.timers;
    state.posix_timers.sort_by_key(|timer| timer.id);
    let ids: Vec<i32> = state.posix_timers.iter().map(|timer| timer.id).collect();
    let times = scratch.ask_timers(main, &ids)?;
    state.posix_timers.iter_mut().zip(times).for_each(|(timer, time)| timer.time = time);
    let mut places = Places::among(process.pid, mappings);
    let rseq = rseq::of(main, ways, &mut places)?;
    let mut described = vec![describe_thread(main, told()?, answers, rseq)?];
    let answers = scratch.ask_threads(others)?;
    for (thread, answers) in others.iter_mut().zip(answers) {
        let rseq = rseq::of(thread, ways, &mut places)?;
        described.push(describe_thread(thread, told()?, answers, rseq)?);
    }
    state.filters = note_filters(&mut described, iter::once(&*main).chain(&*others))?;
    state.threads = described;
    if let Some(status) = process.first_ended {
        let mut first = ended(process.pid, status, ways.outside(), &state.threads[0])?;
        let may_end = |index: &usize| state.filters[*index].allows(libc::SYS_exit, [0; 6], 0);
        // As the others do, which share them then; but none that would not let it end.
        if !first.filters.iter().all(may_end) {
            first.filters.clear();
        }
        state.threads.insert(0, first);
    }
    Ok(())
}

/// Gives each of `described` its thread's filters: as indices into those of the process, which are
/// returned, each once.
fn note_filters<'a>(
    described: &mut [ThreadState],
    threads: impl Iterator<Item = &'a Thread>,
) -> Result<Vec<Filter>, EngineError> {
    let mut all = HashMap::new();
    for (saved, thread) in described.iter_mut().zip(threads) {
        for filter in thread.filters()? {
            let next = all.len();
            saved.filters.push(*all.entry(filter).or_insert(next));
        }
    }
    let mut all: Vec<(Filter, usize)> = all.into_iter().collect();
    all.sort_by_key(|(_, index)| *index);
    Ok(all.into_iter().map(|(filter, _)| filter).collect())
}

/// A first thread that has ended before the others, as one that is about to make the call at
/// `entry` that ends it: so it is there, which a process cannot do without, when the others are
/// made anew, and ends when they go on. What it had for itself is gone; `other` has what every
/// thread needs.
fn ended(
    pid: pid_t,
    status: i32,
    entry: u64,
    other: &ThreadState,
) -> Result<ThreadState, EngineError> {
    const BLOCKED: u64 = u64::MAX;
    let words = other.registers[..].try_into();
    let words = words.map_err(|_| EngineError::Nonsense("another number of registers"))?;
    let mut registers = sys::from_words(words);
    registers.rip = entry;
    registers.rax = libc::SYS_exit as u64;
    registers.rdi = (status >> 8 & 0xff) as u64;
    Ok(ThreadState {
        tid: pid,
        name: proc::name(pid),
        registers: sys::words(&registers).to_vec(),
        mask: BLOCKED,
        pending: Vec::new(),
        alternate_stack: (0, libc::SS_DISABLE, 0),
        robust_list: (0, 0),
        clear_tid: 0,
        rseq: (0, 0, 0),
        ..other.clone()
    })
}

fn describe_thread(
    thread: &Thread,
    told: ToldThread,
    answers: ThreadAnswers,
    rseq: Registration,
) -> Result<ThreadState, EngineError> {
    let tid = thread.pid();
    let ToldThread { robust_list, nice, policy, io_priority, affinity } = told;
    Ok(ThreadState {
        tid,
        name: answers.name,
        registers: sys::words(&begun_anew(thread)).to_vec(),
        // Calls leave them alone.
        extended: Hex(sys::extended(tid)?),
        mask: thread.mask(),
        pending: hex(sys::pending(tid, false)?),
        alternate_stack: answers.alternate_stack,
        robust_list,
        clear_tid: answers.clear_tid,
        rseq: (rseq.address, rseq.length, rseq.signature),
        nice,
        policy,
        io_priority,
        affinity,
        filters: Vec::new(),
    })
}
