//! Making the processes: each by its own parent, with its own id, in its session and group. What
//! they are so far is copies of the init.

use super::files::Inherited;
use super::forked::{Forked, Kept};
use super::process::{Filled, Rebuilding};
use super::{Plan, ids, kernel};
use crate::home::Ways;
use crate::inject::{self, Parasite, checked};
use crate::lineage::{self, Misplaced, Step};
use crate::rseq::{self, Places, Registration};
use crate::state::{Ids, Zombie};
use crate::sys;
use crate::{EngineError, Thread, maps};
use libc::pid_t;
use std::collections::BTreeMap;

/// Where the injected code and, after it, the kernel's own mappings lie meanwhile; free in all
/// processes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) start: u64,
    /// The kernel's own mappings stay where they are.
    pub(super) sealed: bool,
}

impl Area {
    const KERNEL_ROOM: u64 = 1 << 20;
    pub(super) const DETOUR_ROOM: u64 = 1 << 20;
    pub(super) const LENGTH: u64 = Parasite::LENGTH + Area::KERNEL_ROOM + Area::DETOUR_ROOM;

    fn find(plan: &Plan) -> Result<Area, EngineError> {
        let own = maps::with_flags(std::process::id() as pid_t)?;
        let sealed = kernel::are_sealed(&own);
        let own = own.into_iter().map(|mapping| (mapping.start, mapping.end));
        let theirs = plan.processes.iter().flat_map(|process| &process.mappings);
        let taken = own.chain(theirs.map(|saved| (saved.start, saved.end)));
        let start = maps::hole(taken, Area::LENGTH)
            .ok_or(EngineError::Nonsense("an address space that is full"))?;
        Ok(Area { start, sealed })
    }

    pub(super) fn end(self) -> u64 {
        self.start + Area::LENGTH
    }

    /// Where the kernel's mappings lie meanwhile.
    pub(super) fn kernel(self) -> u64 {
        self.start + Parasite::LENGTH
    }

    /// Where another kernel's can be once more.
    pub(super) fn detour(self) -> u64 {
        self.kernel() + Area::KERNEL_ROOM
    }
}

/// A process that has been made: its one thread, and the code in it.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) thread: Thread,
    pub(super) parasite: Parasite,
}

#[derive(Debug)]
pub(super) struct Tree {
    pub(super) area: Area,
    made: Vec<Made>,
    /// Those that have their memory already, because others have some of it as well.
    pub(super) filled: BTreeMap<pid_t, Filled>,
    forked: Forked,
}

impl Tree {
    /// Makes the processes of the plan, in its order.
    pub(super) fn make(plan: &Plan, inherited: &Inherited) -> Result<Tree, EngineError> {
        let area = Area::find(plan)?;
        let living = plan.processes.iter().map(|process| process.ids);
        let members: Vec<Ids> = living.chain(plan.job.zombies.iter().map(|z| z.ids)).collect();
        let threads = plan.processes.iter().flat_map(|process| &process.threads);
        let steps = lineage::steps(&members, threads.map(|thread| thread.tid));
        let steps = steps.map_err(|Misplaced(pid)| {
            EngineError::unsupported(pid, "no tree of processes has one in its place")
        })?;
        let forked = Forked::of(plan, &steps)?;
        let (made, filled) = (BTreeMap::new(), BTreeMap::new());
        let mut maker = Maker { plan, area, inherited, forked, made, filled };
        steps.into_iter().try_for_each(|step| maker.take(step))?;
        for zombie in &plan.job.zombies {
            maker.end(zombie)?;
        }
        let made = plan.processes.iter().map(|process| maker.made.remove(&process.ids.pid));
        let made: Option<Vec<Made>> = made.collect();
        let made = made.ok_or(EngineError::Nonsense("a process twice"))?;
        Ok(Tree { area, made, filled: maker.filled, forked: maker.forked })
    }

    /// With processes that are made already, and what each of them has of its memory.
    pub(super) fn with(self, made: Vec<Made>, forked: Forked) -> Tree {
        Tree { made, forked, ..self }
    }

    pub(super) fn take(&mut self) -> Vec<Made> {
        std::mem::take(&mut self.made)
    }

    /// What a process keeps of the one that has made it.
    pub(super) fn kept(&self, pid: pid_t) -> Kept {
        self.forked.kept(pid)
    }
}

struct Maker<'a> {
    plan: &'a Plan,
    area: Area,
    inherited: &'a Inherited,
    forked: Forked,
    made: BTreeMap<pid_t, Made>,
    filled: BTreeMap<pid_t, Filled>,
}

impl Maker<'_> {
    fn take(&mut self, step: Step) -> Result<(), EngineError> {
        let prctl = libc::PR_SET_CHILD_SUBREAPER as u64;
        match step {
            Step::Make { parent, pid } => return self.make(parent, pid),
            Step::End { pid, parent } => return self.end_helper(pid, parent),
            Step::Lead { pid } => {
                self.call(pid, "make it lead a session", libc::SYS_setsid, &[])?;
            }
            Step::Adopt { pid, on } => {
                let arguments = [prctl, u64::from(on)];
                self.call(pid, "give it its orphans", libc::SYS_prctl, &arguments)?;
            }
            Step::Join { pid, group } => {
                let what = "put it into its process group";
                self.call(pid, what, libc::SYS_setpgid, &[0, group as u64])?;
            }
        }
        Ok(())
    }

    /// Ends a process that only helped, and has its maker collect it.
    fn end_helper(&mut self, pid: pid_t, maker: pid_t) -> Result<(), EngineError> {
        let Made { thread, parasite } = self.made.remove(&pid).ok_or(EngineError::Ended { pid })?;
        thread.end(parasite.entry(), 0);
        if maker != 0 {
            let arguments = [pid as u64, 0, libc::__WALL as u64, 0];
            return self.call(maker, "collect it", libc::SYS_wait4, &arguments).map(drop);
        }
        let mut status = 0;
        // SAFETY: waitpid stores the status; a process that is collected already is none.
        unsafe { libc::waitpid(pid, &mut status, libc::__WALL) };
        Ok(())
    }

    /// Has `parent`, or for 0 this process, make a child.
    fn make(&mut self, parent: pid_t, pid: pid_t) -> Result<(), EngineError> {
        let signal = self.signal_of(pid);
        let sibling = self.forked.sibling(pid);
        let (maker, flags, signal) = match sibling {
            Some(sibling) => (sibling, libc::CLONE_PARENT as u64, 0),
            None => (parent, 0, signal),
        };
        // What is opened later is to be theirs, too.
        let shares = if self.plan.is_early() { libc::CLONE_FILES as u64 } else { 0 };
        let flags = flags | shares;
        let made = match self.made.get_mut(&maker) {
            None if maker != 0 => return Err(EngineError::Ended { pid: maker }),
            None => first(pid, flags, signal, self.area)?,
            Some(maker) => {
                let arguments = clone_arguments(flags, signal, pid, maker.parasite.data());
                let thread = maker.parasite.clone_into(&mut maker.thread, &arguments)?;
                Made { thread, parasite: maker.parasite }
            }
        };
        self.made.insert(pid, made);
        if self.forked.is_early(pid) { self.fill(pid) } else { Ok(()) }
    }

    /// Gives a process its memory: those whom it makes from here on have it, too.
    fn fill(&mut self, pid: pid_t) -> Result<(), EngineError> {
        let state = self.plan.processes.iter().find(|process| process.ids.pid == pid);
        let (Some(state), Some(made)) = (state, self.made.get_mut(&pid)) else { return Ok(()) };
        let rebuilding = Rebuilding::of(self.plan, state, self.area, self.inherited);
        let filled = rebuilding.fill(made, &self.forked.kept(pid))?;
        self.filled.insert(pid, filled);
        Ok(())
    }

    /// The signal that its parent gets at its end; none from a helper.
    fn signal_of(&self, pid: pid_t) -> i32 {
        let process = self.plan.processes.iter().find(|process| process.ids.pid == pid);
        let ended = self.plan.job.zombies.iter().any(|zombie| zombie.ids.pid == pid);
        process.map_or(if ended { libc::SIGCHLD } else { 0 }, |process| process.exit_signal)
    }

    fn call(
        &mut self,
        pid: pid_t,
        what: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<i64, EngineError> {
        let made = self.made.get_mut(&pid).ok_or(EngineError::Ended { pid })?;
        made.parasite.call(&mut made.thread, what, number, arguments)
    }

    /// Ends a process as the old one ended; its parent is still to wait for it.
    fn end(&mut self, zombie: &Zombie) -> Result<(), EngineError> {
        let pid = zombie.ids.pid;
        let Made { thread, parasite } = self.made.remove(&pid).ok_or(EngineError::Ended { pid })?;
        let signal = zombie.status & 0x7f;
        if signal == 0 {
            thread.end(parasite.entry(), zombie.status >> 8 & 0xff);
        } else {
            let default = parasite.data();
            let mut thread = thread;
            sys::write(pid, default, &[0; 32])?;
            let arguments = [signal as u64, default, 0, 8];
            // Some signals have no other action.
            let _ = parasite.call(&mut thread, "end it", libc::SYS_rt_sigaction, &arguments);
            thread.end_by(parasite.entry(), signal)?;
        }
        Ok(())
    }
}

/// What clone3 reads: flags, exit signal, and one id to be given.
pub(super) fn clone_arguments(flags: u64, signal: i32, pid: pid_t, data: u64) -> [u64; 12] {
    // The id lies after the eleven words of the structure.
    let set_tid = data + 88;
    [flags, 0, 0, 0, signal as u64, 0, 0, 0, set_tid, 1, 0, pid as u64]
}

impl Parasite {
    /// Makes the process of `thread` clone itself by clone3 with those arguments: the new thread,
    /// stopped.
    pub(super) fn clone_into(
        self,
        thread: &mut Thread,
        arguments: &[u64; 12],
    ) -> Result<Thread, EngineError> {
        let bytes: Vec<u8> = arguments.iter().flat_map(|word| word.to_le_bytes()).collect();
        let [.., id] = *arguments;
        ids::wait_for(id as pid_t, || {
            // A batch has one stop less than a call.
            let mut batch = self.batch(thread);
            let at = batch.put(&bytes)?;
            batch.call("clone it", libc::SYS_clone3, &[at, 88])?;
            batch.run()
        })?;
        let made = thread.made().ok_or(EngineError::Ended { pid: thread.pid() })?;
        Thread::adopt(made)
    }
}

/// Makes a child of this process with the id `pid`.
fn first(pid: pid_t, flags: u64, signal: i32, area: Area) -> Result<Made, EngineError> {
    let mut arguments = Box::new([0; 12]);
    *arguments = clone_arguments(flags, signal, pid, arguments.as_ptr() as u64);
    ids::wait_for(pid, || {
        // SAFETY: the arguments and the id after them live through the call. The child has a copy
        // of everything, and does nothing but wait to be traced.
        let result = unsafe {
            let result = libc::syscall(libc::SYS_clone3, arguments.as_ptr(), 88usize);
            if result == 0 {
                loop {
                    libc::syscall(libc::SYS_pause);
                }
            }
            result
        };
        match result {
            0.. => Ok(()),
            _ => Err(EngineError::last(pid, "make it under its old id")),
        }
    })?;
    let mut thread = Thread::stop(pid)?;
    // The area that it has inherited is about to be unmapped.
    let ways = Ways::of(pid)?;
    let registration = rseq::of(&mut thread, &ways, &mut Places::among(pid, &maps::of(pid)?));
    ways.close(std::iter::once(&mut thread))?;
    let Registration { address, length, signature } = registration?;
    if address != 0 {
        const UNREGISTER: u64 = 1;
        let arguments = [address, u64::from(length), UNREGISTER, u64::from(signature)];
        let result = thread.call(inject::entry(pid)?, libc::SYS_rseq, &arguments)?;
        checked(pid, "end its rseq registration", result)?;
    }
    let parasite = Parasite::install(&mut thread, area.start)?;
    Ok(Made { thread, parasite })
}
