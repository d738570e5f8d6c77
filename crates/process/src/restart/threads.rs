//! Rebuilding the threads of a process, and what they have each for itself.

use super::kernel::Detour;
use super::tree::{Made, clone_arguments};
use super::{filters, namespaces};
use crate::inject::{Batch, Parasite, UnderWay};
use crate::state::{Hex, ProcessState, ThreadState};
use crate::sys::{self, REGISTERS, SIGINFO};
use crate::timers;
use crate::{EngineError, Thread};
use libc::pid_t;

const CAPABILITY_VERSION: u64 = 0x2008_0522;
const LAST_CAPABILITY: u64 = 63;

const SET_ACTIONS: &str = "set its signal actions";
const SET_DUMPABLE: &str = "set whether it is dumpable";
/// What rt_sigaction reads for the default.
const DEFAULT: [u8; 32] = [0; 32];

/// A process that has its threads, of which the first is about to get its state.
#[derive(Debug)]
pub(super) struct Begun {
    leader: Thread,
    others: Vec<Thread>,
    parasite: Parasite,
    under_way: UnderWay,
    /// What is done with that: the trap's action, and whether it is dumpable.
    has_action: bool,
    is_dumpable: bool,
}

/// Makes the other threads and gives each its state, and begins to give the first its own.
pub(super) fn begin(state: &ProcessState, made: Made) -> Result<Begun, EngineError> {
    let Made { thread: mut leader, parasite } = made;
    const FLAGS: i32 = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM;
    let mut others = Vec::new();
    for thread in &state.threads[1..] {
        let arguments = clone_arguments(FLAGS as u64, 0, thread.tid, parasite.data());
        others.push(parasite.clone_into(&mut leader, &arguments)?);
    }
    filters::give(state, &mut leader, &mut others, parasite)?;
    for (thread, saved) in others.iter_mut().zip(&state.threads[1..]) {
        let mut batch = parasite.batch(thread);
        set_thread(&mut batch, saved)?;
        queue(&mut batch, state.ids.pid, Some(saved.tid), &saved.pending)?;
        set_credentials(&mut batch, state)?;
        batch.run()?;
    }
    let mut batch = parasite.batch(&mut leader);
    set_thread(&mut batch, &state.threads[0])?;
    set_process(&mut batch, state)?;
    // In the same batch, where that can still end and be read then.
    let has_action = action(state, libc::SIGTRAP) == DEFAULT;
    if has_action {
        let at = batch.put(&DEFAULT)?;
        batch.call(SET_ACTIONS, libc::SYS_rt_sigaction, &[libc::SIGTRAP as u64, at, 0, 8])?;
    }
    let is_dumpable = state.dumpable == 1;
    if is_dumpable {
        batch.call(SET_DUMPABLE, libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u64, 1])?;
    }
    let under_way = batch.begin()?;
    Ok(Begun { leader, others, parasite, under_way, has_action, is_dumpable })
}

/// Gives the first thread what is missing. The parasite is gone afterwards.
pub(super) fn end(
    state: &ProcessState,
    begun: Begun,
    detour: Option<&Detour>,
) -> Result<Vec<Thread>, EngineError> {
    let Begun { mut leader, mut others, parasite, under_way, has_action, is_dumpable } = begun;
    under_way.end(&mut leader)?;
    timers::make(&state.posix_timers, &mut leader, parasite)?;
    if !has_action {
        set_trap(&mut leader, parasite, state)?;
    }
    let all = std::iter::once(&mut leader).chain(&mut others).zip(&state.threads);
    queue_traps(all, parasite, state)?;
    if !is_dumpable {
        set_undumpable(&mut leader, parasite)?;
    }
    parasite.remove(&mut leader)?;
    let mut threads = vec![leader];
    threads.extend(others);
    for (thread, saved) in threads.iter_mut().zip(&state.threads) {
        set_outside(thread, saved, detour)?;
    }
    Ok(threads)
}

/// What a thread has told the kernel about itself.
fn set_thread(batch: &mut Batch<'_>, saved: &ThreadState) -> Result<(), EngineError> {
    let mut name = saved.name.clone().into_bytes();
    name.push(0);
    let name = batch.put(&name)?;
    batch.call("set its name", libc::SYS_prctl, &[libc::PR_SET_NAME as u64, name])?;
    batch.call("set its tid address", libc::SYS_set_tid_address, &[saved.clear_tid])?;
    let (head, length) = saved.robust_list;
    if head != 0 {
        batch.call("set its robust list", libc::SYS_set_robust_list, &[head, length])?;
    }
    let (address, length, signature) = saved.rseq;
    if address != 0 {
        let arguments = [address, u64::from(length), 0, u64::from(signature)];
        batch.call("register its rseq area", libc::SYS_rseq, &arguments)?;
    }
    let (address, flags, length) = saved.alternate_stack;
    // Being on it is no property that can be set: it follows from the stack pointer.
    let flags = flags & !libc::SS_ONSTACK;
    let words = [address, flags as u64 & 0xffff_ffff, length];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let at = batch.put(&bytes)?;
    batch.call("set its alternate stack", libc::SYS_sigaltstack, &[at, 0])
}

/// What belongs to the process and not to one of its threads.
fn set_process(batch: &mut Batch<'_>, state: &ProcessState) -> Result<(), EngineError> {
    forget_children(batch)?;
    queue(batch, state.ids.pid, None, &state.pending)?;
    queue(batch, state.ids.pid, Some(state.ids.pid), &state.threads[0].pending)?;
    if state.subreaper {
        let arguments = [libc::PR_SET_CHILD_SUBREAPER as u64, 1];
        batch.call("make it a subreaper", libc::SYS_prctl, &arguments)?;
    }
    set_limits(batch, state)?;
    set_credentials(batch, state)?;
    if state.parent_death_signal != 0 {
        let arguments = [libc::PR_SET_PDEATHSIG as u64, state.parent_death_signal as u64];
        batch.call("set its parent death signal", libc::SYS_prctl, &arguments)?;
    }
    for (which, (interval, rest)) in state.timers.iter().enumerate() {
        if *rest != 0 {
            let parts = [interval, rest].map(|time| [time / 1_000_000, time % 1_000_000]);
            let bytes: Vec<u8> = parts.iter().flatten().flat_map(|w| w.to_le_bytes()).collect();
            let at = batch.put(&bytes)?;
            batch.call("set its timers", libc::SYS_setitimer, &[which as u64, at, 0])?;
        }
    }
    Ok(())
}

/// Takes the signals away that came of making its children anew.
fn forget_children(batch: &mut Batch<'_>) -> Result<(), EngineError> {
    let set = batch.put(&(1u64 << (libc::SIGCHLD - 1)).to_le_bytes())?;
    let now = batch.put(&[0; 16])?;
    batch.attempt("take a signal", libc::SYS_rt_sigtimedwait, &[set, 0, now, 8])
}

/// Makes signals pending again: for the process, or for one thread of it.
fn queue(
    batch: &mut Batch<'_>,
    pid: pid_t,
    tid: Option<pid_t>,
    signals: &[Hex],
) -> Result<(), EngineError> {
    for Hex(bytes) in signals {
        let signal = number(bytes)?;
        if signal != libc::SIGTRAP {
            let at = batch.put(bytes)?;
            let (call, arguments) = queueing(pid, tid, signal, at);
            batch.call(QUEUE, call, &arguments)?;
        }
    }
    Ok(())
}

const QUEUE: &str = "queue its pending signals";

/// The signal of a siginfo_t.
fn number(info: &[u8]) -> Result<i32, EngineError> {
    match info.first_chunk() {
        Some(first) if info.len() == SIGINFO => Ok(i32::from_le_bytes(*first)),
        _ => Err(EngineError::Nonsense("a pending signal that is none")),
    }
}

/// The call that queues a signal whose siginfo_t lies at `at`, and its arguments.
fn queueing(pid: pid_t, tid: Option<pid_t>, signal: i32, at: u64) -> (i64, [u64; 4]) {
    let (pid, signal) = (pid as u64, signal as u64);
    match tid {
        None => (libc::SYS_rt_sigqueueinfo, [pid, signal, at, 0]),
        Some(tid) => (libc::SYS_rt_tgsigqueueinfo, [pid, tid as u64, signal, at]),
    }
}

/// Those of the trap's signal, after the last batch, which would take one for its end. Each thread
/// queues its own: the kernel lets no other do that.
fn queue_traps<'a>(
    threads: impl Iterator<Item = (&'a mut Thread, &'a ThreadState)>,
    parasite: Parasite,
    state: &ProcessState,
) -> Result<(), EngineError> {
    let pid = state.ids.pid;
    for (thread, saved) in threads {
        let shared = state.pending.iter().filter(|_| saved.tid == pid).map(|signal| (None, signal));
        let own = saved.pending.iter().map(|signal| (Some(saved.tid), signal));
        for (tid, Hex(bytes)) in shared.chain(own) {
            if number(bytes)? == libc::SIGTRAP {
                // Batches let it through.
                thread.leave_home()?;
                sys::set_signal_mask(saved.tid, u64::MAX)?;
                sys::write(pid, parasite.data(), bytes)?;
                let (call, arguments) = queueing(pid, tid, libc::SIGTRAP, parasite.data());
                parasite.call(thread, QUEUE, call, &arguments)?;
            }
        }
    }
    Ok(())
}

/// Each thread has its own. The last step of those that need privileges.
fn set_credentials(batch: &mut Batch<'_>, state: &ProcessState) -> Result<(), EngineError> {
    let credentials = &state.credentials;
    // An ordinary user has one id, which the namespace shows as the old one, and no groups to set.
    if namespaces::may_set_ids() {
        set_ids(batch, state)?;
    }
    let [inheritable, permitted, effective, _, ambient] = credentials.capabilities;
    // capabilities(7): to set securebits takes one that it may not have for good, and they may
    // forbid to raise ambient ones.
    const SETPCAP: u64 = 1 << 8;
    let needed = if credentials.securebits == 0 { 0 } else { SETPCAP };
    set_capabilities(batch, [effective | needed, permitted | needed, inheritable])?;
    for capability in (0..=LAST_CAPABILITY).filter(|bit| ambient >> bit & 1 != 0) {
        let raise = libc::PR_CAP_AMBIENT_RAISE as u64;
        let arguments = [libc::PR_CAP_AMBIENT as u64, raise, capability, 0, 0];
        batch.attempt("raise its ambient capabilities", libc::SYS_prctl, &arguments)?;
    }
    if credentials.securebits != 0 {
        let arguments = [libc::PR_SET_SECUREBITS as u64, u64::from(credentials.securebits)];
        batch.call("set its securebits", libc::SYS_prctl, &arguments)?;
        set_capabilities(batch, [effective, permitted, inheritable])?;
    }
    if state.no_new_privs {
        let arguments = [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0];
        batch.call("forbid it new privileges", libc::SYS_prctl, &arguments)?;
    }
    Ok(())
}

/// Sets the effective, permitted and inheritable capabilities.
fn set_capabilities(batch: &mut Batch<'_>, sets: [u64; 3]) -> Result<(), EngineError> {
    let header = batch.put(&CAPABILITY_VERSION.to_le_bytes())?;
    let halves = [0, 32].map(|shift| sets.map(|set| (set >> shift) as u32));
    let bytes: Vec<u8> = halves.iter().flatten().flat_map(|half| half.to_le_bytes()).collect();
    let data = batch.put(&bytes)?;
    batch.call("set its capabilities", libc::SYS_capset, &[header, data])
}

fn set_ids(batch: &mut Batch<'_>, state: &ProcessState) -> Result<(), EngineError> {
    let credentials = &state.credentials;
    let bounding = credentials.capabilities[3];
    for capability in (0..=LAST_CAPABILITY).filter(|bit| bounding >> bit & 1 == 0) {
        let arguments = [libc::PR_CAPBSET_DROP as u64, capability, 0, 0, 0];
        batch.attempt("drop a capability for good", libc::SYS_prctl, &arguments)?;
    }
    let groups: Vec<u8> = credentials.groups.iter().flat_map(|id| id.to_le_bytes()).collect();
    let at = batch.put(&groups)?;
    let count = credentials.groups.len() as u64;
    batch.call("set its groups", libc::SYS_setgroups, &[count, at])?;
    let [real, effective, saved, files] = credentials.gids.map(u64::from);
    batch.call("set its group", libc::SYS_setresgid, &[real, effective, saved])?;
    batch.call("set its group", libc::SYS_setfsgid, &[files])?;
    let keep = libc::PR_SET_KEEPCAPS as u64;
    batch.call("keep its capabilities", libc::SYS_prctl, &[keep, 1])?;
    let [real, effective, saved, files] = credentials.uids.map(u64::from);
    batch.call("set its user", libc::SYS_setresuid, &[real, effective, saved])?;
    batch.call("set its user", libc::SYS_setfsuid, &[files])?;
    batch.call("keep its capabilities", libc::SYS_prctl, &[keep, 0])
}

/// The trap's action, after the last batch, which a trap has ended.
fn set_trap(
    leader: &mut Thread,
    parasite: Parasite,
    state: &ProcessState,
) -> Result<(), EngineError> {
    sys::write(leader.pid(), parasite.data(), &action(state, libc::SIGTRAP))?;
    let arguments = [libc::SIGTRAP as u64, parasite.data(), 0, 8];
    parasite.call(leader, SET_ACTIONS, libc::SYS_rt_sigaction, &arguments).map(drop)
}

/// Its new ids may have changed it. From here on an ordinary user cannot reach its memory.
fn set_undumpable(leader: &mut Thread, parasite: Parasite) -> Result<(), EngineError> {
    // Only the kernel gives 2, of which 0 forbids as much.
    let arguments = [libc::PR_SET_DUMPABLE as u64, 0];
    parasite.call(leader, SET_DUMPABLE, libc::SYS_prctl, &arguments).map(drop)
}

/// What rt_sigaction reads for `signal`.
pub(super) fn action(state: &ProcessState, signal: i32) -> [u8; 32] {
    let mut bytes = [0; 32];
    if let Some(action) = state.actions.iter().find(|action| action.signal == signal) {
        let words = [action.handler, action.flags, action.restorer, action.mask];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
    }
    bytes
}

/// What is set from outside: registers, and how it is scheduled.
fn set_outside(
    thread: &mut Thread,
    saved: &ThreadState,
    detour: Option<&Detour>,
) -> Result<(), EngineError> {
    let tid = saved.tid;
    let words: [u64; REGISTERS] = saved.registers[..]
        .try_into()
        .map_err(|_| EngineError::Nonsense("another number of registers"))?;
    let mut extended = saved.extended.0.clone();
    // The kernel takes all that it has; what it has more than the old one is in its first state.
    extended.resize(sys::extended(tid)?.len(), 0);
    sys::set_extended(tid, &extended)?;
    sys::schedule(tid, saved);
    let mut home = sys::from_words(words);
    home.rip = detour.map_or(home.rip, |detour| detour.instead_of(home.rip));
    thread.set_home(home, saved.mask);
    Ok(())
}

/// Resource limits, when what they would have bound is done: by itself, because nobody else may set
/// those of a process of another user.
fn set_limits(batch: &mut Batch<'_>, state: &ProcessState) -> Result<(), EngineError> {
    for (resource, (soft, hard)) in state.limits.iter().enumerate() {
        let own = sys::own_limit(resource as u32)?;
        // A hard limit that is lower here stays, unless this user may raise it.
        let possible = [*soft.min(&own), *hard.min(&own)];
        let mut set = |limit: [u64; 2], must: bool| {
            let bytes: Vec<u8> = limit.iter().flat_map(|word| word.to_le_bytes()).collect();
            let arguments = [0, resource as u64, batch.put(&bytes)?, 0];
            let what = "set its limits";
            if must {
                batch.call(what, libc::SYS_prlimit64, &arguments)
            } else {
                batch.attempt(what, libc::SYS_prlimit64, &arguments)
            }
        };
        set(possible, true)?;
        if possible != [*soft, *hard] {
            set([*soft, *hard], false)?;
        }
    }
    Ok(())
}
