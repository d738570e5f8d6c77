//! What /proc says of a process, parsed.

use crate::{EngineError, several};
use libc::pid_t;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Room for what most files of /proc hold.
const USUAL: usize = 8 << 10;

/// Returns the bytes of a file in /proc.
///
/// Such a file tells no size, so `fs::read` would ask for it in many small pieces; while a job
/// stands still, each call counts.
pub(crate) fn bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(USUAL);
    // A file that is taken from is not asked for its size.
    File::open(path)?.take(u64::MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// `/proc/PID/FILE` as text.
pub(crate) fn text(pid: pid_t, file: &'static str) -> Result<String, EngineError> {
    let bytes = bytes(format!("/proc/{pid}/{file}")).map_err(|source| failed(pid, source))?;
    Ok(lossy(bytes))
}

/// The bytes as text; names in /proc may hold anything.
fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn failed(pid: pid_t, source: io::Error) -> EngineError {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => EngineError::Ended { pid },
        // A link of a process that is gone while the kernel looks: nobody may follow that.
        Some(libc::EACCES) if !lives(reach(pid)) => EngineError::Ended { pid },
        _ => EngineError::System { pid, what: "read its files in /proc", source },
    }
}

/// The name of a thread; empty if it has ended.
pub(crate) fn name(tid: pid_t) -> String {
    let name = bytes(format!("/proc/{tid}/comm")).map(lossy).unwrap_or_default();
    name.trim_end_matches('\n').to_owned()
}

/// KiB of all mappings of a process, as its status has them (`VmSize`).
pub(crate) fn mapped_kib(pid: pid_t) -> Option<u64> {
    let pages: u64 = text(pid, "statm").ok()?.split(' ').next()?.parse().ok()?;
    pages.checked_mul(kedge_image::PAGE / 1024)
}

/// Where the link `/proc/PID/FILE` leads.
pub(crate) fn link(pid: pid_t, file: &'static str) -> Result<PathBuf, EngineError> {
    fs::read_link(format!("/proc/{pid}/{file}")).map_err(|source| failed(pid, source))
}

/// The thread whose files in /proc tell of a process's memory and descriptors: its first, or, where
/// that has ended before the others, another one.
pub(crate) fn reach(pid: pid_t) -> pid_t {
    if !is_zombie(pid) {
        return pid;
    }
    own_threads(pid).into_iter().find(|tid| lives(*tid)).unwrap_or(pid)
}

/// Whether a thread has ended and was not collected. Others of its process may go on.
pub(crate) fn is_zombie(tid: pid_t) -> bool {
    Stat::of_thread(tid).is_ok_and(|stat| stat.has_ended())
}

/// Returns the bytes of memory that the process `pid` has; 0 of one that has ended.
pub(crate) fn resident(pid: pid_t) -> u64 {
    let pages = text(reach(pid), "statm").ok();
    let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0).saturating_mul(kedge_image::PAGE)
}

/// Whether a process has ended, with all of its threads, and was not collected.
///
/// exec() in a thread that is not the first ends the first one, and then gives that thread its id:
/// who looks at one after the other may find neither. What is found must be as many as there are.
pub(crate) fn has_ended(pid: pid_t) -> bool {
    /// More than one in a row takes a program that does nothing but exec().
    const LOOKS: usize = 100;
    for _ in 0..LOOKS {
        let Ok(first) = Stat::of(pid) else { return false };
        let count = first.get(Field::Threads);
        if !first.has_ended() || count <= 1 {
            return first.has_ended();
        }
        let threads = threads(pid);
        if threads.iter().copied().any(lives) {
            return false;
        }
        if threads.len() as i64 == count && threads.into_iter().all(is_zombie) {
            return true;
        }
    }
    true
}

/// Whether a thread is there and has not ended.
pub(crate) fn lives(tid: pid_t) -> bool {
    Stat::of_thread(tid).is_ok_and(|stat| !stat.has_ended())
}

/// Whether a thread is there and has not begun to end.
pub(crate) fn goes_on(tid: pid_t) -> bool {
    /// PF_EXITING (include/linux/sched.h).
    const EXITING: i64 = 1 << 2;
    Stat::of_thread(tid)
        .is_ok_and(|stat| !stat.has_ended() && stat.get(Field::Flags) & EXITING == 0)
}

/// The threads of `pid`; none if it has ended.
pub(crate) fn threads(pid: pid_t) -> Vec<pid_t> {
    numbers(&format!("/proc/{pid}/task"))
}

/// How many threads `pid` has, those included that have ended and were not collected; `None` if it
/// is not there. Links of a folder are counted where its entries would have to be listed.
pub(crate) fn count_threads(pid: pid_t) -> Option<usize> {
    let links = fs::metadata(format!("/proc/{pid}/task")).ok()?.nlink();
    usize::try_from(links).ok()?.checked_sub(2)
}

/// The threads of `pid` but for those that the kernel has made in it for its own work (io_uring):
/// they are listed and can be traced like the program's, and run none of its code.
pub(crate) fn own_threads(pid: pid_t) -> Vec<pid_t> {
    let mut threads = threads(pid);
    threads.retain(|tid| !works_for_the_kernel(pid, *tid));
    threads
}

/// Whether the kernel has made the thread. Its name is a first hint, which takes less to read.
pub(crate) fn works_for_the_kernel(pid: pid_t, tid: pid_t) -> bool {
    const NAME: &str = "iou-";
    /// PF_IO_WORKER (include/linux/sched.h), since Linux 5.12.
    const WORKER: i64 = 1 << 4;
    let worker = |stat: Stat| stat.get(Field::Flags) & WORKER != 0;
    tid != pid && name(tid).starts_with(NAME) && Stat::of_thread(tid).is_ok_and(worker)
}

fn numbers(folder: &str) -> Vec<i32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut numbers: Vec<i32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// The children of all threads of `pid`.
pub(crate) fn children(pid: pid_t) -> Vec<pid_t> {
    children_by_thread(pid).into_iter().flatten().collect()
}

/// The children of each thread of `pid`, in the order in which it got them.
pub(crate) fn children_by_thread(pid: pid_t) -> Vec<Vec<pid_t>> {
    let of = |tid| bytes(format!("/proc/{pid}/task/{tid}/children")).map(lossy).ok();
    let numbers = |list: String| list.split_whitespace().flat_map(str::parse).collect();
    let lists = several::each(&threads(pid), |tid| of(*tid));
    lists.into_iter().flatten().map(numbers).collect()
}

/// `/proc/PID/stat`, what the engine needs of it.
#[derive(Debug, Clone)]
pub(crate) struct Stat {
    pub(crate) state: char,
    fields: Vec<i64>,
}

/// Fields of stat by the numbers in proc(5).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Field {
    Ppid = 4,
    Pgrp = 5,
    Session = 6,
    Flags = 9,
    /// Page faults of children that were waited for.
    ChildrenMinorFaults = 11,
    ChildrenMajorFaults = 13,
    Threads = 20,
    StartTime = 22,
    StartCode = 26,
    EndCode = 27,
    StartStack = 28,
    ExitSignal = 38,
    StartData = 45,
    EndData = 46,
    StartBrk = 47,
    ArgStart = 48,
    ArgEnd = 49,
    EnvStart = 50,
    EnvEnd = 51,
    ExitCode = 52,
}

impl Stat {
    pub(crate) fn of(pid: pid_t) -> Result<Stat, EngineError> {
        Stat::parse(pid, &text(pid, "stat")?)
    }

    /// The same, in a time that does not grow with the threads of its process: for the process's
    /// own file the kernel adds up what all of them have used.
    pub(crate) fn of_thread(tid: pid_t) -> Result<Stat, EngineError> {
        let path = format!("/proc/{tid}/task/{tid}/stat");
        Stat::parse(tid, &lossy(bytes(path).map_err(|source| failed(tid, source))?))
    }

    fn parse(pid: pid_t, text: &str) -> Result<Stat, EngineError> {
        let strange = |what| EngineError::Proc { pid, file: "stat", what };
        // The name may hold anything, parentheses included.
        let (_, rest) = text.rsplit_once(')').ok_or_else(|| strange("it names no command"))?;
        let mut words = rest.split_whitespace();
        let state = words.next().and_then(|word| word.chars().next());
        let state = state.ok_or_else(|| strange("it has no state"))?;
        // Addresses above i64 do not occur; limits do, and are not needed.
        let fields: Vec<i64> = words.map(|word| word.parse().unwrap_or(i64::MAX)).collect();
        if fields.len() < Field::ExitCode as usize - 3 {
            return Err(strange("it is too short"));
        }
        Ok(Stat { state, fields })
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    pub(crate) fn get(&self, field: Field) -> i64 {
        // Fields 1 to 3 are the id, the name and the state.
        self.fields[field as usize - 4]
    }
}

/// `/proc/PID/status`, by field.
#[derive(Debug, Clone)]
pub(crate) struct Status(BTreeMap<String, String>);

impl Status {
    pub(crate) fn of(pid: pid_t) -> Result<Status, EngineError> {
        let text = text(pid, "status")?;
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        Ok(Status(fields.map(|(key, value)| (key.into(), value.trim().into())).collect()))
    }

    /// A field's text; empty where the kernel does not tell.
    pub(crate) fn get(&self, field: &str) -> &str {
        self.0.get(field).map_or("", String::as_str)
    }

    pub(crate) fn decimal(&self, field: &str) -> i64 {
        self.get(field).parse().unwrap_or(0)
    }

    /// A size: `Some: 12 kB`.
    pub(crate) fn kib(&self, field: &str) -> u64 {
        self.get(field).split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0)
    }

    pub(crate) fn hex(&self, field: &str) -> u64 {
        u64::from_str_radix(self.get(field), 16).unwrap_or(0)
    }

    pub(crate) fn octal(&self, field: &str) -> u32 {
        u32::from_str_radix(self.get(field), 8).unwrap_or(0)
    }

    /// The words of a field as numbers: ids, groups.
    pub(crate) fn numbers(&self, field: &str) -> Vec<u32> {
        self.get(field).split_whitespace().filter_map(|word| word.parse().ok()).collect()
    }
}

/// Returns when a process was started, in ticks since the machine's boot; `None` if it has ended.
pub fn running_since(pid: pid_t) -> Option<u64> {
    let stat = Stat::of(pid).ok()?;
    (!has_ended(pid)).then(|| stat.get(Field::StartTime) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_reads_itself() {
        let pid = std::process::id() as pid_t;
        let stat = Stat::of(pid).unwrap();
        assert!(matches!(stat.state, 'R' | 'S'));
        // SAFETY: getppid and getsid only return numbers.
        let (ppid, session) = unsafe { (libc::getppid(), libc::getsid(0)) };
        assert_eq!(stat.get(Field::Ppid), i64::from(ppid));
        assert_eq!(stat.get(Field::Session), i64::from(session));
        assert!(stat.get(Field::StartCode) < stat.get(Field::EndCode));
        let status = Status::of(pid).unwrap();
        assert_eq!(status.decimal("Pid"), i64::from(pid));
        assert!(threads(pid).contains(&pid));
        // Other tests make some, and end them.
        while count_threads(pid) != Some(threads(pid).len()) {}
        assert_eq!(count_threads(pid_t::MAX), None);
        assert!(matches!(Stat::of(pid_t::MAX), Err(EngineError::Ended { .. })));
    }
}
