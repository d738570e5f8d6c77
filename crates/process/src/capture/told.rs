//! What /proc tells of one stopped process. None of it is asked as its tracer, so that it is read
//! of several processes at once.

use super::lookup::Lookup;
use super::mapped::{self, Mapped};
use super::objects::Objects;
use super::process::Common;
use super::refuse::{self, Here};
use crate::attributes::Attributes;
use crate::maps::{self, Mapping};
use crate::proc::{self, Field, Stat, Status};
use crate::state::{Credentials, Ids, MemoryMap, ProcessState, RemovedFolder};
use crate::stop::{StoppedJob, StoppedProcess};
use crate::vdso::Vdso;
use crate::{EngineError, Thread, huge, plugins, several, sys, timers};
use libc::pid_t;
use std::fs;
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Resource limits by number, as /proc/PID/limits names them.
const LIMITS: [&str; 16] = [
    "Max cpu time",
    "Max file size",
    "Max data size",
    "Max stack size",
    "Max core file size",
    "Max resident set",
    "Max processes",
    "Max open files",
    "Max locked memory",
    "Max address space",
    "Max file locks",
    "Max pending signals",
    "Max msgqueue size",
    "Max nice priority",
    "Max realtime priority",
    "Max realtime timeout",
];

/// A stopped process as /proc tells it.
pub(super) struct Told {
    pub(super) status: Status,
    /// Its mappings with their flags, where those are needed.
    flagged: Option<Vec<Mapping>>,
    /// The same as they are saved.
    pub(super) mapped: Mapped,
    pub(super) vdso: Vdso,
    /// Without what only its tracer sees.
    pub(super) state: ProcessState,
    /// Its threads, the one that answers for it first: [`ToldThread::add`] adds them.
    pub(super) threads: Vec<ToldThread>,
}

/// What everybody may ask of a stopped thread.
pub(super) struct ToldThread {
    pub(super) robust_list: (u64, u64),
    pub(super) nice: i32,
    pub(super) policy: (i32, i32),
    pub(super) io_priority: i32,
    pub(super) affinity: Vec<u64>,
}

impl ToldThread {
    /// Adds the threads of `stopped` to what is `told` of each of its processes. A process may have
    /// thousands of them, so that they are divided, and not the processes.
    pub(super) fn add(stopped: &StoppedJob, told: &mut [Told]) -> Result<(), EngineError> {
        let of = |process: &StoppedProcess| {
            let others = process.others.iter().map(Thread::pid);
            iter::once(process.main.pid()).chain(others).collect::<Vec<_>>()
        };
        let tids: Vec<Vec<pid_t>> = stopped.processes.iter().map(of).collect();
        let mut all = several::try_each(&tids.concat(), |tid| ToldThread::of(*tid))?.into_iter();
        for (told, tids) in told.iter_mut().zip(tids) {
            told.threads.extend(all.by_ref().take(tids.len()));
        }
        Ok(())
    }

    fn of(tid: pid_t) -> Result<ToldThread, EngineError> {
        Ok(ToldThread {
            robust_list: sys::robust_list(tid)?,
            nice: sys::nice(tid)?,
            policy: sys::policy(tid)?,
            io_priority: sys::io_priority(tid),
            affinity: sys::affinity(tid)?,
        })
    }
}

impl Told {
    /// Reads what is told of the process of `ids`, which maps `mappings` and which its thread `pid`
    /// answers for, and no clone of it would have: [`By::describe`] tells the rest.
    ///
    /// # Errors
    ///
    /// [`EngineError::Unsupported`] of what is to be refused by name, and where /proc does not
    /// tell.
    pub(super) fn of(
        pid: pid_t,
        (ids, exit_signal): (Ids, i32),
        mappings: &[Mapping],
        (common, objects): (&Common<'_>, &Objects),
    ) -> Result<Told, EngineError> {
        let status = Status::of(pid)?;
        let flagged = flagged(pid, &status, mappings)?;
        let vdso = Vdso::among(pid, mappings)?;
        let own = flagged.as_deref().unwrap_or(mappings).iter().filter(|m| is_own(m));
        let (lookup, descriptors) = (&common.lookup, common.descriptors);
        let mapped = Mapped::of(pid, own, &vdso, mapped::By { lookup, descriptors, objects })?;
        let state = describe(pid, (ids, exit_signal), &status)?;
        Ok(Told { status, flagged, mapped, vdso, state, threads: Vec::new() })
    }

    /// The mappings that are the program's, of all `mappings`.
    pub(super) fn mappings(&mut self, mappings: Vec<Mapping>) -> Vec<Mapping> {
        let mut mappings = self.flagged.take().unwrap_or(mappings);
        mappings.retain(is_own);
        mappings
    }
}

/// Whether a mapping is the program's, and not the kernel's (vsyscall).
fn is_own(mapping: &Mapping) -> bool {
    mapping.start < maps::TOP
}

/// Locked pages are not inherited as locked, and huge ones not at all, so that flags are read, too,
/// where there are any.
fn flagged(
    pid: pid_t,
    status: &Status,
    mappings: &[Mapping],
) -> Result<Option<Vec<Mapping>>, EngineError> {
    if status.kib("VmLck") == 0 && !mappings.iter().any(huge::is_private) {
        return Ok(None);
    }
    let mut mappings = maps::with_flags(pid)?;
    maps::find_names(&mut mappings);
    Ok(Some(mappings))
}

/// Describes the process of `ids`, by the thread `pid`: without what is not in /proc, and what a
/// clone has inherited.
fn describe(
    pid: pid_t,
    (ids, exit_signal): (Ids, i32),
    status: &Status,
) -> Result<ProcessState, EngineError> {
    Ok(ProcessState {
        ids,
        exit_signal,
        stopped: false,
        stop_signal: 0,
        exe: None,
        cwd_removed: None,
        cwd: PathBuf::new(),
        umask: status.octal("Umask"),
        personality: 0,
        dumpable: 1,
        attributes: Attributes::of_process(pid),
        no_new_privs: status.decimal("NoNewPrivs") != 0,
        credentials: credentials(pid, status)?,
        limits: Vec::new(),
        actions: Vec::new(),
        pending: Vec::new(),
        timers: Vec::new(),
        undo: Vec::new(),
        posix_timers: timers::of(pid)?,
        parent_death_signal: 0,
        subreaper: false,
        mm: MemoryMap::default(),
        files: Vec::new(),
        mappings: Vec::new(),
        aio: Vec::new(),
        notices: Vec::new(),
        guards: Vec::new(),
        filters: Vec::new(),
        threads: Vec::new(),
    })
}

/// What processes are described by that may go on already.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub(super) lookup: &'a Lookup,
    pub(super) descriptors: &'a plugins::Saved,
    pub(super) here: &'a Here,
}

impl By<'_> {
    /// Adds to `state` what its process has from its making on or leaves to a clone: by `at`, which
    /// is the process, stopped, or its clone, for which nobody stands still.
    ///
    /// # Errors
    ///
    /// [`EngineError::Unsupported`] of what is to be refused by name, and where /proc does not
    /// tell.
    pub(super) fn describe(self, at: pid_t, state: &mut ProcessState) -> Result<(), EngineError> {
        let By { lookup, descriptors, here } = self;
        refuse::process(state.ids.pid, at, here)?;
        let cwd = proc::link(at, "cwd")?;
        state.exe = lookup.target(&proc::link(at, "exe")?).map(|target| target.file.clone());
        state.cwd_removed = removed_folder(at, &cwd, descriptors);
        state.cwd = cwd;
        let personality = proc::text(at, "personality")?;
        state.personality = u32::from_str_radix(personality.trim(), 16).unwrap_or(0);
        state.attributes.add_inherited(at);
        state.limits = limits(at)?;
        let stat = Stat::of(at)?;
        let field = |field| stat.get(field) as u64;
        state.mm = MemoryMap {
            code: (field(Field::StartCode), field(Field::EndCode)),
            data: (field(Field::StartData), field(Field::EndData)),
            // The end is asked of the process, or was.
            brk: (field(Field::StartBrk), state.mm.brk.1),
            stack: field(Field::StartStack),
            arguments: (field(Field::ArgStart), field(Field::ArgEnd)),
            environment: (field(Field::EnvStart), field(Field::EnvEnd)),
            auxiliary: auxiliary(at)?,
        };
        Ok(())
    }
}

/// The working folder of `pid`, to which `link` leads, if no name does.
fn removed_folder(pid: pid_t, link: &Path, descriptors: &plugins::Saved) -> Option<RemovedFolder> {
    const REMOVED: &[u8] = b" (deleted)";
    if !link.as_os_str().as_bytes().ends_with(REMOVED) || link.symlink_metadata().is_ok() {
        return None;
    }
    // One of /proc cannot even be looked at when its process has ended.
    let folder = fs::metadata(format!("/proc/{pid}/cwd"));
    let description =
        folder.as_ref().ok().and_then(|f| descriptors.description_of(f.dev(), f.ino()));
    let mode = folder.map_or(0o555, |folder| folder.mode() & 0o7777);
    Some(RemovedFolder { mode, description })
}

fn credentials(pid: pid_t, status: &Status) -> Result<Credentials, EngineError> {
    let four = |field: &str| {
        let what = "user or group ids";
        let ids = status.numbers(field).try_into();
        ids.map_err(|_| EngineError::Proc { pid, file: "status", what })
    };
    let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
    Ok(Credentials {
        uids: four("Uid")?,
        gids: four("Gid")?,
        groups: status.numbers("Groups"),
        capabilities: sets.map(|set| status.hex(set)),
        securebits: 0,
    })
}

/// From /proc, which tells them also of a process that has changed its user.
fn limits(pid: pid_t) -> Result<Vec<(u64, u64)>, EngineError> {
    let text = proc::text(pid, "limits")?;
    let limits: Option<Vec<(u64, u64)>> = LIMITS.iter().map(|name| limit(&text, name)).collect();
    limits.ok_or(EngineError::Proc { pid, file: "limits", what: "a limit" })
}

/// Soft and hard.
fn limit(text: &str, name: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_whitespace().map(|word| match word {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    });
    Some((words.next()??, words.next()??))
}

fn auxiliary(pid: pid_t) -> Result<Vec<u64>, EngineError> {
    let bytes = proc::bytes(format!("/proc/{pid}/auxv")).map_err(|source| EngineError::System {
        pid,
        what: "read its auxiliary vector",
        source,
    })?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_that_the_process_has() {
        // SAFETY: the kernel stores the structure.
        let told = |resource: u32| unsafe {
            let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
            assert_eq!(libc::getrlimit64(resource, &raw mut limit), 0);
            (limit.rlim_cur, limit.rlim_max)
        };
        let own = limits(std::process::id() as pid_t).unwrap();
        assert_eq!(own, (0..16).map(told).collect::<Vec<_>>());
    }
}
