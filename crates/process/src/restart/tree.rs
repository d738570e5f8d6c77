//! Making the processes: each by its own parent, with its own id, in its session and group. What they
//! are so far is copies of the init.

use super::Plan;
use crate::inject::{self, Parasite, checked};
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
}

impl Area {
    const KERNEL_ROOM: u64 = 1 << 20;
    pub(super) const LENGTH: u64 = Parasite::LENGTH + Area::KERNEL_ROOM;

    fn find(plan: &Plan) -> Result<Area, EngineError> {
        let own = maps::of(std::process::id() as pid_t)?;
        let own = own.into_iter().map(|mapping| (mapping.start, mapping.end));
        let theirs = plan.processes.iter().flat_map(|process| &process.mappings);
        let taken = own.chain(theirs.map(|saved| (saved.start, saved.end)));
        let start = maps::hole(taken, Area::LENGTH)
            .ok_or(EngineError::Nonsense("an address space that is full"))?;
        Ok(Area { start })
    }

    pub(super) fn end(self) -> u64 {
        self.start + Area::LENGTH
    }

    /// Where the kernel's mappings lie meanwhile.
    pub(super) fn kernel(self) -> u64 {
        self.start + Parasite::LENGTH
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
}

impl Tree {
    /// Makes the processes of the plan, in its order.
    pub(super) fn make(plan: &Plan) -> Result<Tree, EngineError> {
        let area = Area::find(plan)?;
        let mut maker = Maker { plan, area, made: BTreeMap::new() };
        let members = plan.processes.iter().map(|process| process.ids);
        let members: Vec<Ids> = members.chain(plan.job.zombies.iter().map(|z| z.ids)).collect();
        maker.make_descendants(0, &members)?;
        if maker.made.len() != members.len() {
            return Err(EngineError::Nonsense("processes that descend from none"));
        }
        maker.set_groups(&members)?;
        for zombie in &plan.job.zombies {
            maker.end(zombie)?;
        }
        let made = plan.processes.iter().map(|process| maker.made.remove(&process.ids.pid));
        let made: Option<Vec<Made>> = made.collect();
        Ok(Tree { area, made: made.ok_or(EngineError::Nonsense("a process twice"))? })
    }

    pub(super) fn take(&mut self) -> Vec<Made> {
        std::mem::take(&mut self.made)
    }
}

struct Maker<'a> {
    plan: &'a Plan,
    area: Area,
    made: BTreeMap<pid_t, Made>,
}

impl Maker<'_> {
    fn make_descendants(&mut self, parent: pid_t, members: &[Ids]) -> Result<(), EngineError> {
        // Level by level, so that no tree is too deep for a stack.
        let mut next: Vec<pid_t> = vec![parent];
        while let Some(parent) = next.pop() {
            let children: Vec<Ids> =
                members.iter().filter(|ids| ids.parent == parent).copied().collect();
            let session = members.iter().find(|ids| ids.pid == parent).map_or(0, |p| p.session);
            // Those that stayed in the session that their parent has left were made before it left.
            let early = |child: &&Ids| child.session != session && child.session != child.pid;
            for child in children.iter().filter(early) {
                self.make_child(parent, child)?;
            }
            if session == parent && parent != 0 {
                self.call(parent, "make it lead a session", libc::SYS_setsid, &[])?;
            }
            for child in children.iter().filter(|child| !early(child)) {
                self.make_child(parent, child)?;
            }
            next.extend(children.iter().map(|child| child.pid));
        }
        Ok(())
    }

    fn make_child(&mut self, parent: pid_t, child: &Ids) -> Result<(), EngineError> {
        let process = self.plan.processes.iter().find(|process| process.ids.pid == child.pid);
        let signal = process.map_or(libc::SIGCHLD, |process| process.exit_signal);
        let made = match self.made.get_mut(&parent) {
            None => first(child.pid, signal, self.area)?,
            Some(parent) => {
                let arguments = clone_arguments(0, signal, child.pid, parent.parasite.data());
                let thread = parent.parasite.clone_into(&mut parent.thread, &arguments)?;
                Made { thread, parasite: parent.parasite }
            }
        };
        self.made.insert(child.pid, made);
        Ok(())
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

    /// Leaders first: a group must exist before anybody can join it.
    fn set_groups(&mut self, members: &[Ids]) -> Result<(), EngineError> {
        let what = "put it into its process group";
        for ids in members.iter().filter(|ids| ids.group == ids.pid && ids.session != ids.pid) {
            self.call(ids.pid, what, libc::SYS_setpgid, &[0, 0])?;
        }
        for ids in members.iter().filter(|ids| ids.group != 0 && ids.group != ids.pid) {
            self.call(ids.pid, what, libc::SYS_setpgid, &[0, ids.group as u64])?;
        }
        Ok(())
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
        sys::write(thread.pid(), self.data(), &bytes)?;
        self.call(thread, "clone it", libc::SYS_clone3, &[self.data(), 88])?;
        let made = thread.made().ok_or(EngineError::Ended { pid: thread.pid() })?;
        Thread::adopt(made)
    }
}

/// Makes a child of this process with the id `pid`.
fn first(pid: pid_t, signal: i32, area: Area) -> Result<Made, EngineError> {
    let mut arguments = Box::new([0; 12]);
    *arguments = clone_arguments(0, signal, pid, arguments.as_ptr() as u64);
    // SAFETY: the arguments and the id after them live through the call. The child has a copy of
    // everything, and does nothing but wait to be traced.
    let result = unsafe {
        let result = libc::syscall(libc::SYS_clone3, arguments.as_ptr(), 88usize);
        if result == 0 {
            loop {
                libc::syscall(libc::SYS_pause);
            }
        }
        result
    };
    if result < 0 {
        return Err(EngineError::last(pid, "make it under its old id"));
    }
    let mut thread = Thread::stop(pid)?;
    // The area that it has inherited is about to be unmapped.
    let rseq = sys::rseq(pid)?;
    if rseq.address != 0 {
        const UNREGISTER: u64 = 1;
        let arguments =
            [rseq.address, u64::from(rseq.length), UNREGISTER, u64::from(rseq.signature)];
        let result = thread.call(inject::entry(pid)?, libc::SYS_rseq, &arguments)?;
        checked(pid, "end its rseq registration", result)?;
    }
    let parasite = Parasite::install(&mut thread, area.start)?;
    Ok(Made { thread, parasite })
}

/// The last steps on processes that are complete but for going on.
pub(super) fn finish(plan: &Plan) -> Result<(), EngineError> {
    for process in &plan.processes {
        super::threads::set_limits(process)?;
    }
    Ok(())
}
