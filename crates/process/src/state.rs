//! What an image holds of a process besides its memory, and the checks on reading it back.

use crate::EngineError;
use crate::aio::Context;
use crate::attributes::Attributes;
use crate::filters::{self, program::Filter};
use crate::huge;
use crate::maps::{MAX_MAPPINGS, TOP};
use crate::numa::Policy;
use crate::plugins::is_resolved;
use crate::stop::STOPPING;
use crate::timers::{MAX_TIMERS, Timer};
use kedge_image::PAGE;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The section of a process's file that holds its [`ProcessState`], as JSON.
pub(crate) const PROCESS_SECTION: u64 = 1;
/// The section of the job's file that holds its [`JobState`].
pub(crate) const JOB_SECTION: u64 = 1;
/// The section of the job's file that holds its descriptors.
pub(crate) const DESCRIPTORS_SECTION: u64 = 2;
/// Signals are 1 to 64.
pub(crate) const SIGNALS: i32 = 64;
/// Bytes of what glibc has a message queue keep for its thread (NOTIFY_COOKIE_LEN, linux/mqueue.h).
pub(crate) const COOKIE: usize = 32;
const MAX_THREADS: usize = 1 << 22;
const MAX_PID: i32 = 1 << 22;

/// What the processes share.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct JobState {
    pub(crate) machine: crate::machine::Machine,
    /// When it was captured.
    pub(crate) clocks: crate::clocks::Clocks,
    pub(crate) objects: Vec<SharedObject>,
    /// The code of the vDSOs that the processes have, each once.
    #[serde(default)]
    pub(crate) vdsos: Vec<Hex>,
    /// Parents before their children.
    pub(crate) processes: Vec<i32>,
    pub(crate) zombies: Vec<Zombie>,
}

/// Memory that several mappings share and that no file's name leads to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SharedObject {
    /// Not 0, which is a process's own memory in the image.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Bytes of its huge pages; 0 for ordinary ones, and in older images.
    #[serde(default)]
    pub(crate) huge: u64,
}

/// A child that has ended and that its parent has not waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Zombie {
    pub(crate) ids: Ids,
    /// As wait() tells it.
    pub(crate) status: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ids {
    pub(crate) pid: i32,
    /// 0 if its parent is no process of the job; likewise the others.
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ProcessState {
    pub(crate) ids: Ids,
    /// The signal that its parent gets when it ends.
    pub(crate) exit_signal: i32,
    /// A signal had stopped it.
    pub(crate) stopped: bool,
    /// Which one; 0 in older images.
    #[serde(default)]
    pub(crate) stop_signal: i32,
    pub(crate) exe: Option<MappedFile>,
    pub(crate) cwd: PathBuf,
    /// Its working folder was removed while it was in there.
    #[serde(default)]
    pub(crate) cwd_removed: Option<RemovedFolder>,
    pub(crate) umask: u32,
    pub(crate) personality: u32,
    pub(crate) dumpable: i64,
    #[serde(default)]
    pub(crate) attributes: Attributes,
    pub(crate) no_new_privs: bool,
    pub(crate) credentials: Credentials,
    pub(crate) limits: Vec<(u64, u64)>,
    pub(crate) actions: Vec<Action>,
    pub(crate) pending: Vec<Hex>,
    /// ITIMER_REAL, ITIMER_VIRTUAL and ITIMER_PROF: interval and rest, in microseconds.
    pub(crate) timers: Vec<(u64, u64)>,
    pub(crate) posix_timers: Vec<Timer>,
    pub(crate) undo: Vec<Undo>,
    pub(crate) parent_death_signal: i32,
    pub(crate) subreaper: bool,
    pub(crate) mm: MemoryMap,
    pub(crate) files: Vec<MappedFile>,
    pub(crate) mappings: Vec<Saved>,
    /// Its contexts of kernel AIO, in the order of their rings; none in older images.
    #[serde(default)]
    pub(crate) aio: Vec<Context>,
    /// The message queues of whose next message it is to be told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notices: Vec<Notice>,
    /// Ranges of its memory that fault (MADV_GUARD_INSTALL).
    pub(crate) guards: Vec<(u64, u64)>,
    /// The filters of system calls that its threads have; none in older images.
    #[serde(default)]
    pub(crate) filters: Vec<Filter>,
    /// The leader first.
    pub(crate) threads: Vec<ThreadState>,
}

/// A folder that no name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemovedFolder {
    /// Permissions.
    pub(crate) mode: u32,
    /// An open file description of it, if the job has one.
    pub(crate) description: Option<u32>,
}

/// What the end of a process does to a System V semaphore, for its operations with SEM_UNDO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Undo {
    pub(crate) set: i32,
    pub(crate) number: u16,
    /// Added to its value.
    pub(crate) by: i16,
}

/// A message queue of whose next message a process is to be told (mq_notify(3)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    /// Its descriptor of the queue.
    pub(crate) queue: i32,
    pub(crate) by: Means,
}

/// How a process is told of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Means {
    /// It only keeps others from being told (`SIGEV_NONE`).
    Nothing,
    /// A signal, without a value that the process could read; 0: none.
    Signal(i32),
    /// A message at its netlink socket, which glibc's thread reads (`SIGEV_THREAD`).
    Thread { socket: i32, cookie: Hex },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credentials {
    /// Real, effective, saved, file system.
    pub(crate) uids: [u32; 4],
    pub(crate) gids: [u32; 4],
    pub(crate) groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub(crate) capabilities: [u64; 5],
    /// As PR_GET_SECUREBITS tells; 0 in older images.
    #[serde(default)]
    pub(crate) securebits: u32,
}

/// What rt_sigaction tells of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Action {
    pub(crate) signal: i32,
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

/// The bounds that the kernel keeps of an address space, as PR_SET_MM_MAP takes them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct MemoryMap {
    pub(crate) code: (u64, u64),
    pub(crate) data: (u64, u64),
    pub(crate) brk: (u64, u64),
    pub(crate) stack: u64,
    pub(crate) arguments: (u64, u64),
    pub(crate) environment: (u64, u64),
    pub(crate) auxiliary: Vec<u64>,
}

/// A file that is mapped, and how to know it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MappedFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// When it was last written: seconds and nanoseconds. `None` for devices.
    pub(crate) written: Option<(i64, i64)>,
    /// Some process maps it shared and writable.
    pub(crate) writable: bool,
}

/// A mapping.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) protection: i32,
    pub(crate) shared: bool,
    pub(crate) offset: u64,
    pub(crate) backing: Backing,
    /// Those of smaps' flags that are brought back.
    pub(crate) flags: Vec<String>,
    /// What the program has called it (PR_SET_VMA_ANON_NAME).
    pub(crate) name: Option<String>,
    /// Bytes of its huge pages; 0 for ordinary ones, and in older images.
    #[serde(default)]
    pub(crate) huge: u64,
    /// On which nodes its pages are to lie, where the program has said so.
    #[serde(default)]
    pub(crate) policy: Option<Policy>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backing {
    Anonymous,
    /// An index into the process's files.
    File(usize),
    /// The number of a shared object.
    Object(u64),
    /// A System V shared memory segment, by its id.
    Segment(i32),
    /// An open file description, whose plugin brings back what it holds.
    Description(u32),
    /// The ring of a kernel AIO context.
    Aio,
    /// The kernel's: [vdso] or one of its data pages. Of the vDSO: the checksum of its code.
    Kernel {
        name: String,
        checksum: u64,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ThreadState {
    pub(crate) tid: i32,
    pub(crate) name: String,
    /// user_regs_struct.
    pub(crate) registers: Vec<u64>,
    /// What XSAVE writes.
    pub(crate) extended: Hex,
    pub(crate) mask: u64,
    pub(crate) pending: Vec<Hex>,
    /// Address, flags, length.
    pub(crate) alternate_stack: (u64, i32, u64),
    pub(crate) robust_list: (u64, u64),
    pub(crate) clear_tid: u64,
    /// Address, length, signature.
    pub(crate) rseq: (u64, u32, u32),
    pub(crate) nice: i32,
    /// Scheduling policy and priority.
    pub(crate) policy: (i32, i32),
    /// As ioprio_get(2) tells it; 0 for none of its own.
    #[serde(default)]
    pub(crate) io_priority: i32,
    /// The processors that it may run on, a bit each.
    pub(crate) affinity: Vec<u64>,
    /// Its filters of system calls, the oldest first: indices into its process's.
    #[serde(default)]
    pub(crate) filters: Vec<usize>,
}

/// Bytes, written as hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Hex(pub(crate) Vec<u8>);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = self.0.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        serializer.serialize_str(
            &digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect::<String>(),
        )
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> =
            pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
        bytes
            .filter(|_| rest.is_empty())
            .map(Hex)
            .ok_or_else(|| serde::de::Error::custom("not hexadecimal"))
    }
}

/// A state out of a section's bytes. They are bounded: a section is.
pub(crate) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, EngineError> {
    serde_json::from_slice(bytes).map_err(|_| EngineError::Nonsense("a state that is none"))
}

/// The bytes of a section.
pub(crate) fn format<T: Serialize>(state: &T) -> Result<Vec<u8>, EngineError> {
    // Paths that are no text are refused before this.
    serde_json::to_vec(state).map_err(|_| EngineError::Nonsense("a path that is not UTF-8"))
}

fn require(good: bool, what: &'static str) -> Result<(), EngineError> {
    if good { Ok(()) } else { Err(EngineError::Nonsense(what)) }
}

fn is_id(id: i32) -> bool {
    // 1 is the init's own.
    (2..MAX_PID).contains(&id)
}

fn is_page(address: u64) -> bool {
    address.is_multiple_of(PAGE)
}

impl Ids {
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let outer = |id| id == 0 || is_id(id);
        require(is_id(self.pid), "an impossible process id")?;
        require(outer(self.parent) && self.parent != self.pid, "an impossible parent")?;
        require(outer(self.group) && outer(self.session), "an impossible process group")
    }
}

impl Notice {
    fn is_possible(&self) -> bool {
        self.queue >= 0
            && match &self.by {
                Means::Nothing => true,
                Means::Signal(signal) => (0..=SIGNALS).contains(signal),
                Means::Thread { socket, cookie } => *socket >= 0 && cookie.0.len() == COOKIE,
            }
    }
}

impl ProcessState {
    /// Takes `signal` from what is pending for the process and its threads.
    pub(crate) fn forget(&mut self, signal: libc::c_int) {
        let others = |info: &Hex| !info.0.starts_with(&signal.to_ne_bytes());
        self.pending.retain(others);
        self.threads.iter_mut().for_each(|thread| thread.pending.retain(others));
    }

    /// Whether all of it can be used as it is: bounds, order, indices.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        self.ids.check()?;
        require((0..=SIGNALS).contains(&self.exit_signal), "an impossible exit signal")?;
        require(self.umask <= 0o777, "an impossible umask")?;
        require(self.actions.iter().all(|a| (1..=SIGNALS).contains(&a.signal)), "no such signal")?;
        require(self.attributes.are_possible(), "impossible attributes")?;
        require(self.limits.len() <= 32 && self.timers.len() <= 3, "too many limits or timers")?;
        let ids = self.posix_timers.windows(2).all(|pair| pair[0].id < pair[1].id);
        require(ids && self.posix_timers.len() <= MAX_TIMERS, "timers out of order")?;
        require(self.mm.auxiliary.len() <= 64, "an auxiliary vector that is too long")?;
        let mut paths = self.files.iter().chain(&self.exe).map(|file| &file.path);
        let resolved = paths.all(|path| is_resolved(path)) && is_resolved(&self.cwd);
        require(resolved, "a path that leads elsewhere")?;
        require((1..=MAX_THREADS).contains(&self.threads.len()), "no thread, or too many")?;
        require(self.threads[0].tid == self.ids.pid, "a leader with another id")?;
        self.threads.iter().try_for_each(ThreadState::check)?;
        require(self.mappings.len() <= MAX_MAPPINGS, "too many mappings")?;
        self.mappings.iter().try_for_each(|mapping| mapping.check(self.files.len()))?;
        let apart = self.mappings.windows(2).all(|pair| pair[0].end <= pair[1].start);
        require(apart, "mappings that overlap or are out of order")?;
        let stops = self.stop_signal == 0 || STOPPING.contains(&self.stop_signal);
        require(stops, "a signal that stops nobody")?;
        self.check_contexts()?;
        require(self.notices.iter().all(Notice::is_possible), "an impossible notice")?;
        let chains: Vec<&[usize]> = self.threads.iter().map(|it| &it.filters[..]).collect();
        check_filters(&self.filters, &chains)?;
        self.guards.iter().try_for_each(|guard| self.check_guard(*guard))
    }

    /// The signal that had stopped it, if one had.
    pub(crate) fn stopped_by(&self) -> Option<i32> {
        let signal = if self.stop_signal == 0 { libc::SIGSTOP } else { self.stop_signal };
        self.stopped.then_some(signal)
    }

    /// Each context has its mapping, and the other way round.
    fn check_contexts(&self) -> Result<(), EngineError> {
        let rings = self.mappings.iter().filter(|saved| saved.backing == Backing::Aio);
        let theirs = self.aio.iter().map(|context| (context.ring, context.ring_bytes));
        require(rings.map(|saved| (saved.start, saved.len())).eq(theirs), "AIO without its ring")?;
        require(self.aio.iter().all(Context::is_possible), "an impossible ring of AIO")
    }

    fn check_guard(&self, (start, end): (u64, u64)) -> Result<(), EngineError> {
        let pages = is_page(start) && is_page(end) && start < end;
        let after = self.mappings.partition_point(|saved| saved.start <= start);
        let saved = after.checked_sub(1).map(|index| &self.mappings[index]);
        let inside = saved.is_some_and(|saved| end <= saved.end);
        require(pages && inside, "a guard outside of the mappings")
    }
}

/// Whether these can be a process's filters, and those of its threads by their indices.
fn check_filters(all: &[Filter], threads: &[&[usize]]) -> Result<(), EngineError> {
    require(all.iter().all(Filter::is_possible), "no filter of system calls")?;
    let known = |chain: &&[usize]| {
        chain.len() <= filters::MAX_FILTERS && chain.iter().all(|index| *index < all.len())
    };
    require(threads.iter().all(known), "a thread with filters that are none")
}

impl ThreadState {
    fn check(&self) -> Result<(), EngineError> {
        require(is_id(self.tid), "an impossible thread id")?;
        require(self.registers.len() == 27, "another number of registers")?;
        require(self.name.len() < 64 && self.affinity.len() <= 1024, "an impossible thread")
    }
}

impl Saved {
    fn check(&self, files: usize) -> Result<(), EngineError> {
        let bounds = self.start < self.end && self.end <= TOP && self.start > 0;
        require(bounds, "a mapping outside of the address space")?;
        let pages = is_page(self.start) && is_page(self.end) && is_page(self.offset);
        require(pages && self.offset < 1 << 62, "a mapping that is not made of pages")?;
        require((0..8).contains(&self.protection), "an impossible protection")?;
        let huge = self.huge == 0 || huge::is_possible(self.huge, self.start, self.len());
        require(huge, "huge pages of an impossible size or place")?;
        require(self.policy.as_ref().is_none_or(Policy::is_possible), "an impossible policy")?;
        require(self.name.as_ref().is_none_or(|name| name.len() < 80), "an impossible name")?;
        match &self.backing {
            Backing::File(index) => require(*index < files, "a mapping of no file"),
            Backing::Object(number) => require(*number != 0, "a mapping of no object"),
            Backing::Description(_) => Ok(()),
            Backing::Aio => require(self.shared, "a ring of AIO that is not shared"),
            Backing::Segment(id) => require(self.shared && *id >= 0, "an impossible segment"),
            Backing::Anonymous => require(!self.shared, "shared memory without its object"),
            Backing::Kernel { name, .. } => {
                require(KERNEL_MAPPINGS.contains(&name.as_str()), "no mapping of the kernel's")
            }
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// What the kernel maps into each process itself.
pub(crate) const KERNEL_MAPPINGS: [&str; 3] = ["[vvar]", "[vvar_vclock]", "[vdso]"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_digits() {
        let hex = Hex(vec![0, 0x9a, 0xff]);
        let text = serde_json::to_string(&hex).unwrap();
        assert_eq!(text, "\"009aff\"");
        assert_eq!(serde_json::from_str::<Hex>(&text).unwrap(), hex);
        for bad in ["\"0\"", "\"0g\"", "\"é\"", "7"] {
            assert!(serde_json::from_str::<Hex>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn mappings_are_checked() {
        let good = Saved {
            start: 0x1000,
            end: 0x3000,
            protection: 3,
            shared: false,
            offset: 0,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            name: None,
            huge: 0,
            policy: None,
        };
        good.check(0).unwrap();
        Saved { start: 2 << 20, end: 4 << 20, huge: 2 << 20, ..good.clone() }.check(0).unwrap();
        let bad = [
            Saved { start: 0, ..good.clone() },
            Saved { start: 0x3000, ..good.clone() },
            Saved { end: !0xfff, ..good.clone() },
            Saved { end: 0x2fff, ..good.clone() },
            Saved { offset: 8, ..good.clone() },
            Saved { protection: 8, ..good.clone() },
            Saved { huge: 8192, ..good.clone() },
            Saved { shared: true, ..good.clone() },
            Saved { backing: Backing::File(0), ..good.clone() },
            Saved { backing: Backing::Object(0), ..good.clone() },
            Saved { backing: Backing::Kernel { name: "[x]".into(), checksum: 0 }, ..good },
        ];
        assert!(bad.iter().all(|saved| saved.check(0).is_err()));
    }

    #[test]
    fn filters_are_checked() {
        let allow = Filter { program: Hex(vec![6, 0, 0, 0, 0, 0, 0xff, 0x7f]), log: false };
        let torn = Filter { program: Hex(vec![6, 0, 0]), log: false };
        let check = |filter: &Filter, chain: &[usize]| {
            check_filters(std::slice::from_ref(filter), &[&[], chain]).is_ok()
        };
        assert!(check(&allow, &[0, 0]) && check(&allow, &[]) && check_filters(&[], &[&[]]).is_ok());
        assert!(!check(&allow, &[1]), "no such filter");
        assert!(!check(&allow, &[0; filters::MAX_FILTERS + 1]), "too many");
        assert!(!check(&torn, &[0]), "no program");
    }
}
