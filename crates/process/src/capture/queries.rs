//! What only the process itself can ask the kernel. Of a live thread as little as possible: each
//! question costs it two stops. The rest is asked of the clone, which has inherited the answers.

use crate::freeze::FrozenClone;
use crate::home::Ways;
use crate::inject::{self, Parasite, checked};
use crate::maps::{self, Mapping};
use crate::state::{Action, ProcessState, SIGNALS};
use crate::sys;
use crate::{EngineError, Thread};
use libc::pid_t;

const PR_GET_TID_ADDRESS: u64 = 40;
/// Bytes of a process's memory that answers are put into for a moment.
const ROOM: usize = 64;

/// A place in a stopped process where answers are put, and what lay there before.
#[derive(Debug)]
pub(super) struct Scratch {
    pid: pid_t,
    entry: u64,
    address: u64,
    before: [u8; ROOM],
}

impl Scratch {
    /// At the end of the stack lie the program's name and zeros; all threads are stopped, so nobody
    /// sees them change.
    pub(super) fn of(
        pid: pid_t,
        mappings: &[Mapping],
        ways: &Ways,
    ) -> Result<Scratch, EngineError> {
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let fits = |m: &&Mapping| m.protection & writable == writable && !m.shared;
        let stack = mappings.iter().filter(fits).find(|m| m.name == "[stack]");
        let place = stack.or_else(|| mappings.iter().filter(fits).find(|m| m.inode == 0));
        let place = place
            .ok_or_else(|| EngineError::unsupported(pid, "it has no writable memory of its own"))?;
        let address = place.end - ROOM as u64;
        let mut before = [0; ROOM];
        inject::read_exact(pid, address, &mut before)?;
        Ok(Scratch { pid, entry: ways.home(), address, before })
    }

    /// Makes a call that answers at the address that `arguments` is given: the answer's bytes.
    fn ask<const N: usize, const M: usize>(
        &self,
        thread: &mut Thread,
        what: &'static str,
        number: i64,
        arguments: impl Fn(u64) -> [u64; M],
    ) -> Result<[u8; N], EngineError> {
        sys::write(self.pid, self.address, &[0; ROOM])?;
        let result = thread.call(self.entry, number, &arguments(self.address))?;
        checked(self.pid, what, result)?;
        let mut answer = [0; N];
        inject::read_exact(self.pid, self.address, &mut answer)?;
        Ok(answer)
    }

    fn prctl(
        &self,
        thread: &mut Thread,
        what: &'static str,
        option: u64,
    ) -> Result<u64, EngineError> {
        let answer = self.ask::<8, _>(thread, what, libc::SYS_prctl, |at| [option, at, 0])?;
        Ok(u64::from_le_bytes(answer))
    }

    /// Address, flags and length of the alternate stack.
    pub(super) fn alternate_stack(
        &self,
        thread: &mut Thread,
    ) -> Result<(u64, i32, u64), EngineError> {
        let what = "read its alternate stack";
        let answer = self.ask::<24, _>(thread, what, libc::SYS_sigaltstack, |at| [0, at, 0])?;
        Ok((word(&answer, 0), word(&answer, 8) as i32, word(&answer, 16)))
    }

    pub(super) fn clear_tid(&self, thread: &mut Thread) -> Result<u64, EngineError> {
        self.prctl(thread, "read its tid address", PR_GET_TID_ADDRESS)
    }

    pub(super) fn parent_death_signal(&self, leader: &mut Thread) -> Result<i32, EngineError> {
        let option = libc::PR_GET_PDEATHSIG as u64;
        Ok(self.prctl(leader, "read its parent death signal", option)? as i32)
    }

    pub(super) fn subreaper(&self, leader: &mut Thread) -> Result<bool, EngineError> {
        let option = libc::PR_GET_CHILD_SUBREAPER as u64;
        Ok(self.prctl(leader, "read whether it is a subreaper", option)? as i32 != 0)
    }

    /// What is left of a POSIX timer: interval, then rest, in seconds and nanoseconds.
    pub(super) fn posix_timer(
        &self,
        leader: &mut Thread,
        id: i32,
    ) -> Result<[i64; 4], EngineError> {
        let (what, id) = ("read its timers", id as u64);
        let answer = self.ask::<32, _>(leader, what, libc::SYS_timer_gettime, |at| [id, at, 0])?;
        Ok([0, 8, 16, 24].map(|at| word(&answer, at) as i64))
    }

    /// Whether its children end without its waiting for them (SIG_IGN or SA_NOCLDWAIT for SIGCHLD).
    pub(super) fn forgets_children(&self, leader: &mut Thread) -> Result<bool, EngineError> {
        let (what, signal) = ("read its signal actions", libc::SIGCHLD as u64);
        let action =
            self.ask::<32, 4>(leader, what, libc::SYS_rt_sigaction, |at| [signal, 0, at, 8])?;
        let no_wait = word(&action, 8) & libc::SA_NOCLDWAIT as u64 != 0;
        Ok(no_wait || word(&action, 0) == libc::SIG_IGN as u64)
    }

    /// The interval timers: interval and rest, in microseconds.
    pub(super) fn timers(&self, leader: &mut Thread) -> Result<Vec<(u64, u64)>, EngineError> {
        let timer = |which: u64| {
            let what = "read its interval timers";
            let answer =
                self.ask::<32, _>(leader, what, libc::SYS_getitimer, |at| [which, at, 0])?;
            let time = |at| word(&answer, at).wrapping_mul(1_000_000) + word(&answer, at + 8);
            Ok((time(0), time(16)))
        };
        (0..3).map(timer).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A process that has ended needs nothing back.
        let _ = sys::write(self.pid, self.address, &self.before);
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Asks the clone for what it has inherited: signal actions, the heap's end, dumpability.
pub(super) fn ask_clone(
    clone: &FrozenClone,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<(), EngineError> {
    ask_inherited(&mut clone.thread()?, mappings, state).map(drop)
}

/// The same of a process that shares the program's memory, where nothing may be left behind.
pub(super) fn ask_beside(
    beside: &mut Thread,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<(), EngineError> {
    ask_inherited(beside, mappings, state)?.remove(beside)
}

fn ask_inherited(
    thread: &mut Thread,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<Parasite, EngineError> {
    let taken = mappings.iter().map(|mapping| (mapping.start, mapping.end));
    let base = maps::hole(taken, Parasite::LENGTH)
        .ok_or_else(|| EngineError::unsupported(state.ids.pid, "its address space is full"))?;
    let pid = thread.pid();
    let parasite = Parasite::install(thread, base)?;
    let mut batch = parasite.batch(thread);
    let mut places = Vec::new();
    for signal in 1..=SIGNALS {
        let at = batch.put(&[0; 32])?;
        places.push((signal, at));
        let arguments = [signal as u64, 0, at, 8];
        batch.call("read its signal actions", libc::SYS_rt_sigaction, &arguments)?;
    }
    batch.call("read its heap's end", libc::SYS_brk, &[0])?;
    let dumpable = libc::PR_GET_DUMPABLE as u64;
    batch.call("read whether it is dumpable", libc::SYS_prctl, &[dumpable])?;
    let results = batch.run()?;
    if let [.., brk, dumpable] = results[..] {
        state.mm.brk.1 = brk as u64;
        state.dumpable = dumpable;
    }
    for (signal, at) in places {
        let mut bytes = [0; 32];
        inject::read_exact(pid, at, &mut bytes)?;
        let [handler, flags, restorer, mask] = [0, 8, 16, 24].map(|at| word(&bytes, at));
        // The default ones come by themselves.
        if handler != 0 || flags != 0 {
            state.actions.push(Action { signal, handler, flags, restorer, mask });
        }
    }
    Ok(parasite)
}
