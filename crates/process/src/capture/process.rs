//! Holding one process: its state is read, its memory cloned.

use super::changes::{self, Changes};
use super::memory;
use super::objects::Objects;
use super::queries::{self, Scratch};
use super::{Held, Memory, Options, guards, process_file, undo, write};
use crate::freeze::{FrozenClone, beside};
use crate::home::Ways;
use crate::inject::read_exact;
use crate::maps::{self, Mapping};
use crate::plugins;
use crate::proc::{self, Field, Stat, Status};
use crate::state::*;
use crate::stop::StoppedProcess;
use crate::sys;
use crate::thread::begun_anew;
use crate::timers;
use crate::track::{Session, Shared};
use crate::{EngineError, Thread, vdso};
use kedge_image::{ImageWriter, Packer, PageBuffer};
use libc::pid_t;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Flags of smaps that a clone does not have: its pages are to be copied while all is stopped.
const NOT_INHERITED: &str = "dc";

/// The flag of those whose pages a clone has as zeros.
const WIPED: &str = "wf";

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

/// Reads what is to be known of a stopped process and clones its memory.
pub(super) fn hold(
    process: &mut StoppedProcess,
    ids: Ids,
    options: &Options,
    descriptors: &plugins::Saved,
    objects: &mut Objects,
    session: &mut Session,
) -> Result<Held, EngineError> {
    let pid = process.main.pid();
    let status = Status::of(pid)?;
    refuse(pid)?;
    // Locked pages are not inherited as locked.
    let locked = status.get("VmLck").split_whitespace().next().is_some_and(|kib| kib != "0");
    let mappings = if locked { maps::with_flags(pid)? } else { maps::of(pid)? };
    let mut mappings: Vec<Mapping> = mappings.into_iter().filter(|m| m.start < maps::TOP).collect();
    maps::find_names(&mut mappings);
    let mut state = describe(process, ids, &status)?;
    (state.files, state.mappings) =
        describe_mappings(pid, &mappings, descriptors, objects, &mut session.shared)?;
    let nameless = state.mappings.iter().filter(|m| matches!(m.backing, Backing::Object(_)));
    guards::refuse_in(pid, &nameless.map(|m| (m.start, m.end)).collect::<Vec<_>>())?;
    let ways = Ways::of(pid)?;
    let asked = ask_live(process, &mappings, &ways, &mut state, &mut session.shared);
    let undo = asked.and_then(|()| undo::ask(&mut process.main, &ways, &objects.ipc.sets));
    let undo = undo.map(|undo| state.undo = undo);
    let memory = undo.and_then(|()| hold_memory(process, &mappings, &ways, session, &mut state));
    let closed = ways.close(std::iter::once(&mut process.main).chain(&mut process.others));
    let memory = memory?;
    closed?;
    let ahead = session.ahead(process.pid);
    let mut held = Held { state, memory, mappings, ahead, writer: None, written: Vec::new() };
    held.store_not_inherited(options)?;
    Ok(held)
}

/// Copies what has changed since the last image, if that is known and little; else clones it.
fn hold_memory(
    process: &mut StoppedProcess,
    mappings: &[Mapping],
    ways: &Ways,
    session: &mut Session,
    state: &mut ProcessState,
) -> Result<Memory, EngineError> {
    let main = &mut process.main;
    if !session.is_known(process.pid) {
        return Ok(Memory::Clone(FrozenClone::on(ways, main)?, None));
    }
    let pid = main.pid();
    let mut changes = Changes::find(pid, mappings, session.early(process.pid))?;
    if !changes.fit() {
        let clone = FrozenClone::on(ways, main)?;
        return Ok(Memory::Clone(clone, Some(changes.of_clone())));
    }
    ways.lead(main)?;
    let asked = beside(main, ways, |beside| queries::ask_beside(beside, mappings, state));
    main.go_home()?;
    asked?;
    state.guards = changes.guards(pid)?;
    changes.copy_by(|chunks, room| changes::copy(pid, chunks, room))?;
    // The kernel walks all of its memory to tell them: most of that is done when it goes on already.
    let flags = write::flags_of(process.pid);
    Ok(Memory::Copied { changes, flags })
}

/// What kedge cannot bring back yet.
fn refuse(pid: pid_t) -> Result<(), EngineError> {
    let unsupported = |what: &str| {
        Err(EngineError::unsupported(pid, format!("{what}, which kedge cannot save yet")))
    };
    for name in ["ns/mnt", "ns/user", "ns/pid", "ns/net", "ns/ipc"] {
        if proc::link(pid, name)? != proc::link(std::process::id() as pid_t, name)? {
            return unsupported("it has namespaces of its own");
        }
    }
    if proc::link(pid, "root")? != Path::new("/") {
        return unsupported("it has changed its root folder");
    }
    Ok(())
}

fn describe(
    process: &StoppedProcess,
    ids: Ids,
    status: &Status,
) -> Result<ProcessState, EngineError> {
    let pid = process.main.pid();
    let stat = Stat::of(pid)?;
    let at = |field| stat.get(field) as u64;
    Ok(ProcessState {
        ids,
        // Another thread than the first has none.
        exit_signal: Stat::of(process.pid)?.get(Field::ExitSignal) as i32,
        stopped: process.state == 'T',
        exe: known_file(&proc::link(pid, "exe")?),
        cwd: proc::link(pid, "cwd")?,
        umask: status.octal("Umask"),
        personality: u32::from_str_radix(proc::text(pid, "personality")?.trim(), 16).unwrap_or(0),
        dumpable: 1,
        no_new_privs: status.decimal("NoNewPrivs") != 0,
        credentials: credentials(pid, status)?,
        limits: limits(pid)?,
        actions: Vec::new(),
        pending: hex(sys::pending(pid, true)?),
        timers: Vec::new(),
        undo: Vec::new(),
        posix_timers: timers::of(pid)?,
        parent_death_signal: 0,
        subreaper: false,
        mm: MemoryMap {
            code: (at(Field::StartCode), at(Field::EndCode)),
            data: (at(Field::StartData), at(Field::EndData)),
            brk: (at(Field::StartBrk), at(Field::StartBrk)),
            stack: at(Field::StartStack),
            arguments: (at(Field::ArgStart), at(Field::ArgEnd)),
            environment: (at(Field::EnvStart), at(Field::EnvEnd)),
            auxiliary: auxiliary(pid)?,
        },
        files: Vec::new(),
        mappings: Vec::new(),
        guards: Vec::new(),
        threads: Vec::new(),
    })
}

fn hex(signals: Vec<sys::SigInfo>) -> Vec<Hex> {
    signals.into_iter().map(|signal| Hex(signal.to_vec())).collect()
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
    let bytes = fs::read(format!("/proc/{pid}/auxv")).map_err(|source| EngineError::System {
        pid,
        what: "read its auxiliary vector",
        source,
    })?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// How to know the file again; `None` if no name leads to it.
fn known_file(path: &Path) -> Option<MappedFile> {
    let metadata = fs::metadata(path).ok()?;
    let written = metadata.is_file().then(|| (metadata.mtime(), metadata.mtime_nsec()));
    Some(MappedFile { path: path.to_owned(), bytes: metadata.len(), written, writable: false })
}

fn describe_mappings(
    pid: pid_t,
    mappings: &[Mapping],
    descriptors: &plugins::Saved,
    objects: &mut Objects,
    shared: &mut Shared,
) -> Result<(Vec<MappedFile>, Vec<Saved>), EngineError> {
    let mut files = Files::default();
    let mut saved = Vec::with_capacity(mappings.len());
    for mapping in mappings {
        saved.push(Saved {
            start: mapping.start,
            end: mapping.end,
            protection: mapping.protection,
            shared: mapping.shared,
            offset: mapping.offset,
            // Segments first: a memfd may have a segment's id for its inode.
            backing: match (objects.segment(mapping), held(mapping, descriptors)) {
                (Some(id), _) => Backing::Segment(id),
                (None, Some(description)) => Backing::Description(description),
                (None, None) => backing(pid, mapping, &mut files, objects, shared)?,
            },
            flags: mapping.flags.clone(),
            name: mapping.given_name().map(str::to_owned),
        });
    }
    Ok((files.list, saved))
}

/// The files that a process maps, each once.
#[derive(Debug, Default)]
struct Files {
    list: Vec<MappedFile>,
    by_path: BTreeMap<String, usize>,
}

impl Files {
    /// The index of the mapping's file; `None` if its name leads elsewhere now.
    fn index(&mut self, mapping: &Mapping) -> Option<usize> {
        let path = mapping.path()?;
        let writable = mapping.shared && mapping.protection & libc::PROT_WRITE != 0;
        let index = match self.by_path.get(path) {
            Some(index) => *index,
            None => {
                // File systems may report another device than maps has; the inode is the same.
                if fs::metadata(path).ok()?.ino() != mapping.inode {
                    return None;
                }
                self.list.push(known_file(Path::new(path))?);
                self.by_path.insert(path.to_owned(), self.list.len() - 1);
                self.list.len() - 1
            }
        };
        self.list[index].writable |= writable;
        Some(index)
    }
}

/// The open file description that a shared mapping is a mapping of. One that the process has closed
/// is another matter.
fn held(mapping: &Mapping, descriptors: &plugins::Saved) -> Option<u32> {
    let (major, minor) = mapping.device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = libc::makedev(number(major)?, number(minor)?);
    let kind = mapping.shared && mapping.inode != 0 && mapping.path() != Some("/dev/zero");
    kind.then(|| descriptors.description_of(device, mapping.inode))?
}

fn backing(
    pid: pid_t,
    mapping: &Mapping,
    files: &mut Files,
    objects: &mut Objects,
    shared: &mut Shared,
) -> Result<Backing, EngineError> {
    let unsupported = |what: &str| {
        let name = &mapping.name;
        Err(EngineError::unsupported(pid, format!("it maps {name}, {what}")))
    };
    let name = mapping.name.as_str();
    if KERNEL_MAPPINGS.contains(&name) {
        let vdso = name == "[vdso]";
        let checksum = if vdso { objects.note_vdso(vdso_code(pid, mapping)?) } else { 0 };
        return Ok(Backing::Kernel { name: name.into(), checksum });
    }
    if mapping.inode == 0 {
        let plain =
            name.is_empty() || ["[heap]", "[stack]"].contains(&name) || name.starts_with("[anon:");
        return match (plain, mapping.shared) {
            (true, false) => Ok(Backing::Anonymous),
            _ => unsupported("which kedge cannot save yet"),
        };
    }
    if name.starts_with("anon_inode:") || name.starts_with("/SYSV") {
        return unsupported("which kedge cannot save yet");
    }
    // The kernel writes what has ended into the ring that it maps, whatever memory lies there.
    if name.starts_with("/[aio]") {
        return unsupported("what is under way by io_submit, which kedge cannot save yet");
    }
    if name.starts_with("/anon_hugepage") {
        return unsupported("huge pages, which kedge cannot save yet");
    }
    let device = |path| fs::metadata(path).is_ok_and(|m| m.file_type().is_char_device());
    if mapping.path().is_some_and(|path| path != "/dev/zero" && device(path)) {
        return unsupported("a device, whose memory cannot be saved");
    }
    match (files.index(mapping), mapping.shared, mapping.deleted()) {
        (Some(index), _, _) => Ok(Backing::File(index)),
        (None, false, true) => Ok(Backing::Anonymous),
        (None, true, true) => Ok(Backing::Object(objects.note(pid, mapping, shared))),
        (None, _, false) => unsupported("but another file has that name now: put the old one back"),
    }
}

/// The vDSO's code: another kernel's differs.
pub(crate) fn vdso_code(pid: pid_t, mapping: &Mapping) -> Result<Vec<u8>, EngineError> {
    let mut code = vec![0; (mapping.len() as usize).min(vdso::LONGEST)];
    read_exact(pid, mapping.start, &mut code)?;
    // What a tracer that was killed has left there is no difference between kernels.
    crate::home::clear_leftovers(&mut code);
    Ok(code)
}

/// What is asked of the live threads.
fn ask_live(
    process: &mut StoppedProcess,
    mappings: &[Mapping],
    ways: &Ways,
    state: &mut ProcessState,
    shared: &mut Shared,
) -> Result<(), EngineError> {
    let main = &mut process.main;
    let scratch = Scratch::of(main.pid(), mappings, ways)?;
    ways.lead(main)?;
    if shared.asks_of(mappings) && scratch.forgets_children(main)? {
        shared.distrust();
    }
    state.timers = scratch.timers(main)?;
    for timer in &mut state.posix_timers {
        timer.time = scratch.posix_timer(main, timer.id)?;
    }
    state.posix_timers.sort_by_key(|timer| timer.id);
    state.parent_death_signal = scratch.parent_death_signal(main)?;
    state.subreaper = scratch.subreaper(main)?;
    let pid = process.pid;
    for thread in std::iter::once(&mut process.main).chain(&mut process.others) {
        ways.lead(thread)?;
        state.threads.push(describe_thread(pid, thread, &scratch)?);
        // If whoever traces it is killed, a thread that is at home just goes on.
        thread.go_home()?;
    }
    if let Some(status) = process.first_ended {
        let first = ended(pid, status, ways.outside(), &state.threads[0])?;
        state.threads.insert(0, first);
    }
    Ok(())
}

/// A first thread that has ended before the others, as one that is about to make the call at `entry` that ends it: so
/// it is there, which a process cannot do without, when the others are made anew, and ends when they go on. What it
/// had for itself is gone; `other` has what every thread needs.
fn ended(
    pid: pid_t,
    status: i32,
    entry: u64,
    other: &ThreadState,
) -> Result<ThreadState, EngineError> {
    const BLOCKED: u64 = u64::MAX;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let words = other.registers[..].try_into();
    let words = words.map_err(|_| EngineError::Nonsense("another number of registers"))?;
    let mut registers = sys::from_words(words);
    registers.rip = entry;
    registers.rax = libc::SYS_exit as u64;
    registers.rdi = (status >> 8 & 0xff) as u64;
    Ok(ThreadState {
        tid: pid,
        name: name.trim_end_matches('\n').to_owned(),
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
    pid: pid_t,
    thread: &mut Thread,
    scratch: &Scratch,
) -> Result<ThreadState, EngineError> {
    let tid = thread.pid();
    // Before any call, which would change them.
    let extended = Hex(sys::extended(tid)?);
    let rseq = sys::rseq(tid)?;
    let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap_or_default();
    let pending = hex(sys::pending(tid, false)?);
    Ok(ThreadState {
        tid,
        name: name.trim_end_matches('\n').to_owned(),
        registers: sys::words(&begun_anew(thread)).to_vec(),
        extended,
        mask: thread.mask(),
        pending,
        alternate_stack: scratch.alternate_stack(thread)?,
        robust_list: sys::robust_list(tid)?,
        clear_tid: scratch.clear_tid(thread)?,
        rseq: (rseq.address, rseq.length, rseq.signature),
        nice: sys::nice(tid)?,
        policy: sys::policy(tid)?,
        affinity: sys::affinity(tid)?,
    })
}

impl Held {
    /// Stores what the clone has not inherited, and notes those mappings.
    fn store_not_inherited(&mut self, options: &Options) -> Result<(), EngineError> {
        let Memory::Clone(clone, _) = &self.memory else { return Ok(()) };
        let pid = self.state.ids.pid;
        let inherited: BTreeMap<u64, u64> =
            maps::of(clone.pid())?.into_iter().map(|m| (m.start, m.end)).collect();
        let mut chunks = Vec::new();
        for (mapping, saved) in self.mappings.iter().zip(&mut self.state.mappings) {
            if inherited.get(&mapping.start) == Some(&mapping.end) || !memory::own(mapping) {
                continue;
            }
            self.written.push(mapping.start);
            saved.flags.push(NOT_INHERITED.to_owned());
            memory::split(mapping, &[(mapping.start, mapping.end)], &mut chunks);
        }
        if chunks.is_empty() {
            return Ok(());
        }
        // Otherwise the file is made when the job goes on again: a disk may be slow.
        let writer = ImageWriter::create(&options.folder.join(process_file(pid)))?;
        let (mut buffer, mut packer) = (PageBuffer::default(), Packer::new(&writer));
        let reader = memory::Reader::of(proc::reach(pid))?;
        for chunk in &chunks {
            let (place, codec) = (chunk.address(), options.codec);
            memory::store(&reader, 0, chunk, place, &mut packer, codec, &mut buffer)?;
        }
        packer.flush()?;
        drop(packer);
        self.writer = Some(writer);
        Ok(())
    }
}

/// The mappings of which nothing is to be stored: those that are stored already, and those that come
/// back wiped.
pub(super) fn except(state: &ProcessState, written: &[u64]) -> Vec<(u64, u64)> {
    let wiped = |saved: &&Saved| saved.flags.iter().any(|flag| flag == WIPED);
    let all = state.mappings.iter().filter(|saved| wiped(saved) || written.contains(&saved.start));
    all.map(|saved| (saved.start, saved.end)).collect()
}

/// Adds the flags of the mappings: of the clone's, which has inherited them, or the process's own.
pub(super) fn add_flags(mappings: Vec<Mapping>, state: &mut ProcessState) {
    let mut flags: BTreeMap<(u64, u64), Vec<String>> =
        mappings.into_iter().map(|m| ((m.start, m.end), m.flags)).collect();
    for saved in &mut state.mappings {
        if let Some(found) = flags.remove(&(saved.start, saved.end)) {
            // Some mappings' flags were asked for before.
            saved.flags.retain(|flag| !found.contains(flag));
            saved.flags.extend(found);
        }
    }
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
