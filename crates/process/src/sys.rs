//! ptrace and its companions, typed.

use crate::EngineError;
use crate::filters::program::{Filter, INSTRUCTION};
use crate::reap;
use crate::state::{Hex, ThreadState};
use libc::{c_long, c_void, pid_t};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

pub(crate) type Registers = libc::user_regs_struct;

/// Requests that the libc crate does not name on every target.
const PEEKSIGINFO: u32 = 0x4209;
const GETSIGMASK: u32 = 0x420a;
const SETSIGMASK: u32 = 0x420b;
const GET_RSEQ_CONFIGURATION: u32 = 0x420f;
const SECCOMP_GET_FILTER: u32 = 0x420c;
const SECCOMP_GET_METADATA: u32 = 0x420d;
/// The option that has a traced thread make its calls unfiltered.
pub(crate) const SUSPEND_FILTERS: i32 = 1 << 21;
/// Set in a filter's metadata where what it does is logged.
const FILTER_LOGS: u64 = 1 << 1;
/// The register set that XSAVE writes.
const NT_X86_XSTATE: usize = 0x202;
/// Longest such set that is read: AMX's is 11 KiB.
const MAX_XSTATE: usize = 64 << 10;
/// Bytes of a siginfo_t.
pub(crate) const SIGINFO: usize = 128;
/// Most pending signals of a thread or process that are read: the kernel's own limit is lower.
const MAX_PENDING: usize = 64 << 10;

/// What a traced thread has stopped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// At a system call's entry or exit.
    Syscall,
    /// An event such as a clone; or, with `PTRACE_EVENT_STOP`, nothing but being stopped.
    Event(i32),
    /// About to take this signal.
    Signal(i32),
}

fn checked(pid: pid_t, what: &'static str, result: c_long) -> Result<(), EngineError> {
    if result >= 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::ESRCH) => Err(EngineError::Ended { pid }),
        source => Err(EngineError::System { pid, what, source }),
    }
}

/// A request without memory of ours.
pub(crate) fn request(
    request: u32,
    pid: pid_t,
    data: usize,
    what: &'static str,
) -> Result<(), EngineError> {
    // SAFETY: callers pass requests whose address is unused and whose data is a number.
    checked(pid, what, unsafe { libc::ptrace(request, pid, 0usize, data) })
}

pub(crate) fn registers(pid: pid_t) -> Result<Registers, EngineError> {
    let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
    // SAFETY: the kernel fills the structure, which is plain data anyway.
    unsafe {
        let result = libc::ptrace(libc::PTRACE_GETREGS, pid, 0usize, registers.as_mut_ptr());
        checked(pid, "read its registers", result)?;
        Ok(registers.assume_init())
    }
}

pub(crate) fn set_registers(pid: pid_t, registers: &Registers) -> Result<(), EngineError> {
    // SAFETY: the kernel reads the structure.
    let result = unsafe { libc::ptrace(libc::PTRACE_SETREGS, pid, 0usize, &raw const *registers) };
    checked(pid, "set its registers", result)
}

pub(crate) fn signal_mask(pid: pid_t) -> Result<u64, EngineError> {
    let mut mask = 0u64;
    // SAFETY: the kernel stores 8 bytes, as the address argument says.
    let result = unsafe { libc::ptrace(GETSIGMASK, pid, 8usize, &raw mut mask) };
    checked(pid, "read its signal mask", result).map(|()| mask)
}

pub(crate) fn set_signal_mask(pid: pid_t, mask: u64) -> Result<(), EngineError> {
    // SAFETY: the kernel reads 8 bytes, as the address argument says.
    let result = unsafe { libc::ptrace(SETSIGMASK, pid, 8usize, &raw const mask) };
    checked(pid, "set its signal mask", result)
}

/// The number that belongs to the event that `pid` has stopped for.
pub(crate) fn event_message(pid: pid_t) -> Result<pid_t, EngineError> {
    let mut message = 0u64;
    // SAFETY: the kernel stores one word.
    let result = unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, pid, 0usize, &raw mut message) };
    checked(pid, "read its event", result).map(|()| message as pid_t)
}

/// Waits until `pid` stops; an error if it ends instead.
pub(crate) fn wait(pid: pid_t) -> Result<Stop, EngineError> {
    loop {
        if let Some(stop) = poll(pid, 0)? {
            return Ok(stop);
        }
    }
}

/// Waits until `pid` stops, but not past `deadline`.
pub(crate) fn wait_until(pid: pid_t, deadline: Instant) -> Result<Option<Stop>, EngineError> {
    // Most stops take microseconds; a thread inside the kernel may need longer.
    let patient = Instant::now() + Duration::from_micros(200);
    loop {
        if let Some(stop) = poll(pid, libc::WNOHANG)? {
            return Ok(Some(stop));
        }
        let now = Instant::now();
        if now > deadline {
            return Ok(None);
        }
        if now > patient {
            std::thread::sleep(Duration::from_micros(100));
        } else {
            std::thread::yield_now();
        }
    }
}

/// The stop that `pid` has to report, if waitid with `flags` finds one. Its end is left for its
/// parent to collect, which may be another thread of this process (see `reap.rs`).
fn poll(pid: pid_t, flags: i32) -> Result<Option<Stop>, EngineError> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WSTOPPED | libc::__WALL | flags;
    // SAFETY: waitid fills the structure, which is plain data anyway.
    let (result, info) = unsafe {
        let result = libc::waitid(libc::P_PID, pid as libc::id_t, info.as_mut_ptr(), flags);
        (result, info.assume_init())
    };
    if result < 0 {
        if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
            return Ok(None);
        }
        let_go_of_ended(pid);
        return Err(EngineError::Ended { pid });
    }
    // SAFETY: after a successful waitid these fields are the child's, or zero for none.
    let (found, status) = unsafe { (info.si_pid(), info.si_status()) };
    if found == 0 {
        return Ok(None);
    }
    Ok(Some(match (status & 0xff, status >> 8) {
        (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
        (signal, 0) => Stop::Signal(signal),
        (_, event) => Stop::Event(event),
    }))
}

/// Passes the end of a traced thread on to its real parent, unless that is this process.
fn let_go_of_ended(pid: pid_t) {
    if !reap::is_own_child(pid) && reap::wait_for(pid).is_none() {
        // Others of its process end later.
        reap::is_ending(pid);
    }
}

/// Reads the memory of `pid` at `address`; how many bytes there were.
pub(crate) fn read(pid: pid_t, address: u64, into: &mut [u8]) -> Result<usize, EngineError> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast::<c_void>(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: into.len() };
    // SAFETY: the local vector is `into`; the remote one is the kernel's to check.
    let count = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    checked(pid, "read its memory", count as c_long)?;
    Ok(count as usize)
}

/// Most ranges that are read in one call.
pub(crate) const MAX_RANGES: usize = 1024;

/// Reads those ranges of the memory of `pid`, each address and length, one after the other into
/// `into`; whether it could read all of them.
pub(crate) fn gather(pid: pid_t, ranges: &[(u64, u64)], into: &mut [u8]) -> bool {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast::<c_void>(), iov_len: into.len() };
    let remote = |(address, length): &(u64, u64)| libc::iovec {
        iov_base: *address as *mut c_void,
        iov_len: *length as usize,
    };
    let remote: Vec<libc::iovec> = ranges.iter().map(remote).collect();
    // SAFETY: the local vector is `into`; the remote ones are the kernel's to check.
    let count = unsafe {
        libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0)
    };
    usize::try_from(count) == Ok(into.len())
}

/// Writes `bytes` into the memory of `pid` at `address`, all of them.
pub(crate) fn write(pid: pid_t, address: u64, bytes: &[u8]) -> Result<(), EngineError> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let local = libc::iovec {
            iov_base: rest.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: rest.len(),
        };
        let remote = libc::iovec {
            iov_base: address.wrapping_add(done as u64) as *mut c_void,
            iov_len: rest.len(),
        };
        // SAFETY: the local vector is `rest`, which is only read; the remote one is the kernel's
        // to check.
        let count = unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) };
        checked(pid, "write its memory", count as c_long)?;
        done += count as usize;
    }
    Ok(())
}

/// Opens the memory of the traced `pid`, to be written even where it may not write itself; `None`
/// where the kernel forbids that (proc_mem.restrict_write=).
pub(crate) fn memory(pid: pid_t) -> Option<File> {
    File::options().write(true).open(format!("/proc/{pid}/mem")).ok()
}

/// Writes whole words into the memory of the stopped `pid`, even where it may not write itself: by
/// `memory` in one call, if the kernel lets it.
pub(crate) fn poke(
    pid: pid_t,
    memory: Option<&File>,
    address: u64,
    bytes: &[u8],
) -> Result<(), EngineError> {
    match memory.map(|memory| memory.write_all_at(bytes, address)) {
        Some(Ok(())) => Ok(()),
        _ => poke_words(pid, address, bytes),
    }
}

/// Does the same a word at a time.
fn poke_words(pid: pid_t, address: u64, bytes: &[u8]) -> Result<(), EngineError> {
    for (word, at) in bytes.as_chunks::<8>().0.iter().zip((address..).step_by(8)) {
        let word = u64::from_le_bytes(*word);
        // SAFETY: the word is passed by value, and the address is the kernel's to check.
        let result = unsafe { libc::ptrace(libc::PTRACE_POKEDATA, pid, at, word) };
        checked(pid, "write its memory", result)?;
    }
    Ok(())
}

/// The extended registers (x87, SSE, AVX and on), as XSAVE lays them out.
pub(crate) fn extended(pid: pid_t) -> Result<Vec<u8>, EngineError> {
    thread_local! {
        /// Made once: a job may have thousands of threads.
        static ROOM: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_XSTATE]);
    }
    ROOM.with_borrow_mut(|room| {
        let mut vector =
            libc::iovec { iov_base: room.as_mut_ptr().cast::<c_void>(), iov_len: room.len() };
        // SAFETY: the kernel stores at most iov_len bytes and sets it to how many there are.
        let result =
            unsafe { libc::ptrace(libc::PTRACE_GETREGSET, pid, NT_X86_XSTATE, &raw mut vector) };
        checked(pid, "read its extended registers", result)?;
        Ok(room[..vector.iov_len].to_vec())
    })
}

pub(crate) fn set_extended(pid: pid_t, bytes: &[u8]) -> Result<(), EngineError> {
    let vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(), iov_len: bytes.len() };
    // SAFETY: the kernel reads iov_len bytes and checks them.
    let result =
        unsafe { libc::ptrace(libc::PTRACE_SETREGSET, pid, NT_X86_XSTATE, &raw const vector) };
    checked(pid, "set its extended registers", result)
}

/// A siginfo_t, which is copied and never looked into.
pub(crate) type SigInfo = [u8; SIGINFO];

/// The signal that a stopped thread reports: of one that stands still with its whole process, the
/// signal that has stopped that.
pub(crate) fn reported(pid: pid_t) -> Result<i32, EngineError> {
    let mut info = [0u64; SIGINFO / 8];
    // SAFETY: the kernel stores a siginfo_t, which is 128 bytes long.
    let result = unsafe { libc::ptrace(libc::PTRACE_GETSIGINFO, pid, 0usize, info.as_mut_ptr()) };
    checked(pid, "read what has stopped it", result).map(|()| info[0] as u32 as i32)
}

/// The signals pending for the thread, or, if `shared`, for its whole process.
pub(crate) fn pending(pid: pid_t, shared: bool) -> Result<Vec<SigInfo>, EngineError> {
    #[repr(C)]
    struct Arguments {
        offset: u64,
        flags: u32,
        count: i32,
    }
    let mut all = Vec::new();
    while all.len() < MAX_PENDING {
        let mut chunk = [[0u8; SIGINFO]; 32];
        let arguments = Arguments {
            offset: all.len() as u64,
            flags: u32::from(shared),
            count: chunk.len() as i32,
        };
        // SAFETY: the kernel stores at most `count` siginfo_t of 128 bytes each.
        let count =
            unsafe { libc::ptrace(PEEKSIGINFO, pid, &raw const arguments, chunk.as_mut_ptr()) };
        checked(pid, "read its pending signals", count)?;
        if count == 0 {
            break;
        }
        all.extend(&chunk[..(count as usize).min(chunk.len())]);
    }
    Ok(all)
}

/// Returns where a thread told the kernel to keep its rseq area: address, length, signature; the
/// address is 0 if nowhere. Kernels before 5.13 know no such request (EIO).
pub(crate) fn rseq_configuration(pid: pid_t) -> Result<(u64, u32, u32), EngineError> {
    /// struct ptrace_rseq_configuration.
    #[repr(C)]
    #[derive(Default)]
    struct Rseq {
        address: u64,
        length: u32,
        signature: u32,
        flags: u32,
        zero: u32,
    }
    let mut rseq = Rseq::default();
    // SAFETY: the kernel stores at most as many bytes as the address argument says.
    let result =
        unsafe { libc::ptrace(GET_RSEQ_CONFIGURATION, pid, size_of::<Rseq>(), &raw mut rseq) };
    checked(pid, "read its rseq registration", result)?;
    Ok((rseq.address, rseq.length, rseq.signature))
}

/// Returns how many instructions a thread's filter has, counted from the oldest one; `None` if it
/// has no such filter.
fn filter_length(tid: pid_t, index: usize) -> Result<Option<usize>, EngineError> {
    // SAFETY: without a place to store to, the kernel only counts.
    let length = unsafe { libc::ptrace(SECCOMP_GET_FILTER, tid, index, 0usize) };
    match checked(tid, "read its filters of system calls", length) {
        Ok(()) => Ok(Some(length as usize)),
        // It has fewer, or none.
        Err(EngineError::System { source, .. })
            if matches!(source.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether a stopped thread filters its system calls. Of whom this process may not ask,
/// it does not tell.
pub(crate) fn is_filtered(tid: pid_t) -> bool {
    filter_length(tid, 0).is_ok_and(|length| length.is_some())
}

/// Returns whether this process may read the filters of a stopped thread that has none.
pub(crate) fn may_read_filters(tid: pid_t) -> bool {
    matches!(filter_length(tid, 0), Ok(None))
}

/// Returns a filter of a stopped thread, counted from the oldest one; `None` behind its last one.
pub(crate) fn filter(tid: pid_t, index: usize) -> Result<Option<Filter>, EngineError> {
    /// struct seccomp_metadata.
    #[repr(C)]
    struct Metadata {
        index: u64,
        flags: u64,
    }
    let what = "read its filters of system calls";
    let Some(length) = filter_length(tid, index)? else { return Ok(None) };
    let mut program = vec![0u8; length * INSTRUCTION];
    // SAFETY: a filter does not change, so the kernel stores as many instructions as it counted;
    // nobody else can remove it, as the thread is stopped.
    let stored = unsafe { libc::ptrace(SECCOMP_GET_FILTER, tid, index, program.as_mut_ptr()) };
    checked(tid, what, stored)?;
    let mut metadata = Metadata { index: index as u64, flags: 0 };
    // SAFETY: the kernel reads and stores at most as many bytes as the address argument says.
    let read = unsafe {
        libc::ptrace(SECCOMP_GET_METADATA, tid, size_of::<Metadata>(), &raw mut metadata)
    };
    checked(tid, what, read)?;
    Ok(Some(Filter { program: Hex(program), log: metadata.flags & FILTER_LOGS != 0 }))
}

/// The robust list that a thread has registered: head and length.
pub(crate) fn robust_list(tid: pid_t) -> Result<(u64, u64), EngineError> {
    let (mut head, mut length) = (0u64, 0u64);
    // SAFETY: the kernel stores two words.
    let result =
        unsafe { libc::syscall(libc::SYS_get_robust_list, tid, &raw mut head, &raw mut length) };
    checked(tid, "read its robust list", result)?;
    Ok((head, length))
}

/// The registers as the kernel lays them out.
pub(crate) fn words(registers: &Registers) -> [u64; REGISTERS] {
    // SAFETY: the structure is 27 words and nothing else, as its size shows; any bits are a word.
    unsafe { std::mem::transmute(*registers) }
}

pub(crate) fn from_words(words: [u64; REGISTERS]) -> Registers {
    // SAFETY: the structure is 27 words and nothing else, as its size shows; any words are
    // registers.
    unsafe { std::mem::transmute(words) }
}

pub(crate) const REGISTERS: usize = size_of::<Registers>() / 8;

pub(crate) fn nice(tid: pid_t) -> Result<i32, EngineError> {
    // The kernel's own answer, which is 20 - nice, so that no valid one is negative.
    // SAFETY: getpriority takes two numbers and stores nothing.
    let result = unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, tid) };
    checked(tid, "read its priority", result).map(|()| 20 - result as i32)
}

/// Scheduling policy, with its reset-on-fork bit, and priority.
pub(crate) fn policy(tid: pid_t) -> Result<(i32, i32), EngineError> {
    let mut param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel stores the structure.
    let (policy, result) =
        unsafe { (libc::sched_getscheduler(tid), libc::sched_getparam(tid, &raw mut param)) };
    checked(tid, "read its scheduling policy", c_long::from(policy.min(result)))?;
    Ok((policy, param.sched_priority))
}

const IOPRIO_WHO_PROCESS: i32 = 1;

/// A thread's I/O priority; 0 where it has none or the kernel does not tell.
pub(crate) fn io_priority(tid: pid_t) -> i32 {
    // SAFETY: the call takes numbers only.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, tid) };
    result.max(0) as i32
}

/// The processors that it may run on, a bit each.
pub(crate) fn affinity(tid: pid_t) -> Result<Vec<u64>, EngineError> {
    let mut mask = [0u64; 1024];
    let bytes = size_of_val(&mask);
    // SAFETY: the kernel stores at most `bytes` and returns how many.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, tid, bytes, mask.as_mut_ptr()) };
    checked(tid, "read its processors", result)?;
    Ok(mask[..result as usize / 8].to_vec())
}

/// Schedules a thread as it was. What this machine or user does not allow is left as it is: it
/// changes how fast the program runs, and not what it does.
pub(crate) fn schedule(tid: pid_t, saved: &ThreadState) {
    let (policy, processors) = (saved.policy, &saved.affinity[..]);
    let param = libc::sched_param { sched_priority: policy.1 };
    // SAFETY: the kernel reads the structure and as many bytes of the mask as it is told.
    unsafe {
        if processors.iter().any(|word| *word != 0) {
            let (bytes, mask) = (std::mem::size_of_val(processors), processors.as_ptr());
            libc::syscall(libc::SYS_sched_setaffinity, tid, bytes, mask);
        }
        if policy != (libc::SCHED_OTHER, 0) {
            libc::sched_setscheduler(tid, policy.0, &raw const param);
        }
        libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, tid, saved.nice);
        if saved.io_priority != io_priority(tid) {
            libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, tid, saved.io_priority);
        }
    }
}

/// A hard limit of this process.
pub(crate) fn own_limit(resource: u32) -> Result<u64, EngineError> {
    let mut now = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel stores the structure.
    let result = unsafe { libc::getrlimit64(resource, &raw mut now) };
    checked(0, "read its limits", c_long::from(result)).map(|_| now.rlim_max)
}
