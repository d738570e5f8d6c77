//! A standby: a restart that begins before the last image of a job is there. The processes are made
//! from an image that later ones build on, and given the private memory that they had in it. Each
//! later image brings what has changed; the last one brings all else, so that what is left to do
//! then does not grow with the memory that the job has.
//!
//! Until the last image is there the processes share the init's descriptors, and nothing of the
//! job but its processes and their private memory without files exists. No file of the user's is
//! looked at before.

use super::files::Inherited;
use super::forked::{Forked, Kept, are_alike};
use super::places::Places;
use super::process::Rebuilding;
use super::tree::{Made, Tree};
use super::{Plan, ids};
use crate::EngineError;
use crate::plugins::PluginError;
use crate::state::{Backing, ProcessState, Saved, Zombie};
use crate::track::Run;
use libc::pid_t;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Brings images to a standby.
pub trait Arrivals: Send + Sync + Debug {
    /// Says, in the job's init, that all images so far are made, and waits for the next one.
    ///
    /// # Errors
    /// There will be none: the restart is given up.
    fn next(&self) -> Result<Next, PluginError>;
}

/// An image that builds on the one before it, by its folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Others come after it.
    Another(PathBuf),
    Last(PathBuf),
}

/// The processes of a job, with the memory that they had in an image.
#[derive(Debug)]
pub(super) struct Standby {
    tree: Tree,
    made: Vec<Made>,
    /// What they and their children that have ended were in that image.
    states: Vec<ProcessState>,
    zombies: Vec<Zombie>,
    /// Where their memory comes from.
    places: Places,
}

/// The time namespace of the init's children that are still to come.
const CLOCKS: &str = "/proc/self/ns/time_for_children";

/// Makes the processes of `first` and keeps their memory up to date as images come, until the last
/// one is there: its plan.
pub(super) fn make(first: &Plan, arrivals: &dyn Arrivals) -> Result<(Plan, Standby), EngineError> {
    let mut standby = Standby::make(first)?;
    loop {
        match arrivals.next()? {
            Next::Another(folder) => {
                let next = first.next(folder, first.arrivals.clone())?;
                ids::keep_clear(&next);
                standby.update(&next)?;
            }
            Next::Last(folder) => {
                let last = first.next(folder, None)?;
                standby.check(&last)?;
                return Ok((last, standby));
            }
        }
    }
}

/// Whether this memory is made before the last image is there: private memory without a file.
pub(super) fn is_early(saved: &Saved) -> bool {
    let alone = saved.flags.iter().any(|flag| flag == "gd" || flag == "dp");
    saved.backing == Backing::Anonymous && !saved.shared && saved.huge == 0 && !alone
}

/// What an older state of a process has of one of its mappings: the largest part that is like it.
fn largest_part(old: &ProcessState, (own, new): (&Saved, &ProcessState)) -> Option<Run> {
    if !is_early(own) {
        return None;
    }
    let from = old.mappings.partition_point(|theirs| theirs.end <= own.start);
    let count = old.mappings[from..].partition_point(|theirs| theirs.start < own.end);
    let alike = old.mappings[from..from + count]
        .iter()
        .filter(|theirs| is_early(theirs) && are_alike((own, new), (theirs, old)));
    let parts = alike.map(|theirs| (theirs.start.max(own.start), theirs.end.min(own.end)));
    parts.max_by_key(|(start, end)| end - start)
}

impl Standby {
    fn make(plan: &Plan) -> Result<Standby, EngineError> {
        if !Path::new(CLOCKS).exists() {
            return Err(EngineError::NoStandby("this kernel has no time namespaces"));
        }
        shares_nothing(plan)?;
        let inherited = Inherited::nothing();
        let mut tree = Tree::make(plan, &inherited)?;
        let mut made = tree.take();
        for (state, made) in plan.processes.iter().zip(&mut made) {
            let rebuilding = Rebuilding::of(plan, state, tree.area, &inherited);
            rebuilding.fill(made, &tree.kept(state.ids.pid))?;
        }
        let places = Places::default().next(plan)?;
        let (states, zombies) = (plan.processes.clone(), plan.job.zombies.clone());
        plan.opened.clear();
        Ok(Standby { tree, made, states, zombies, places })
    }

    /// Fails if what is there could not become the job of `next`.
    fn check(&self, next: &Plan) -> Result<(), EngineError> {
        shares_nothing(next)?;
        let alike = |(one, other): (&ProcessState, &ProcessState)| {
            one.ids == other.ids
                && one.exit_signal == other.exit_signal
                && one.credentials == other.credentials
        };
        let same = self.states.len() == next.processes.len()
            && self.states.iter().zip(&next.processes).all(alike)
            && self.zombies == next.job.zombies;
        let (start, end) = (self.tree.area.start, self.tree.area.end());
        let mut mappings = next.processes.iter().flat_map(|process| &process.mappings);
        if !same {
            return Err(EngineError::NoStandby("its processes are others by now"));
        }
        if mappings.any(|saved| saved.start < end && start < saved.end) {
            return Err(EngineError::NoStandby("it has mapped memory where kedge's code lies"));
        }
        Ok(())
    }

    /// Gives the processes the memory that they have in `next`.
    fn update(&mut self, next: &Plan) -> Result<(), EngineError> {
        self.check(next)?;
        let inherited = Inherited::nothing();
        let places = self.places.next(next)?;
        let forked = self.kept(next, &places);
        for (state, made) in next.processes.iter().zip(&mut self.made) {
            let rebuilding = Rebuilding::of(next, state, self.tree.area, &inherited);
            rebuilding.fill(made, &forked.kept(state.ids.pid))?;
        }
        (self.states, self.places) = (next.processes.clone(), places);
        next.opened.clear();
        Ok(())
    }

    /// What the processes keep of what they have, where `places` tells where the memory comes from
    /// that they have in `next`.
    fn kept(&self, next: &Plan, places: &Places) -> Forked {
        let kept = self.states.iter().zip(&next.processes).filter_map(|(old, new)| {
            let pid = new.ids.pid;
            let places = (self.places.parts.get(&pid)?, places.parts.get(&pid)?);
            let part = |own| Some((own, largest_part(old, (own, new))?));
            let there: Vec<(&Saved, Run)> = new.mappings.iter().filter_map(part).collect();
            Some((pid, Kept::of_itself(&there, places)))
        });
        Forked::of_kept(kept.collect::<BTreeMap<pid_t, Kept>>())
    }

    /// Makes of the processes those of `plan` as [`Tree::make`] leaves them: with descriptors of
    /// their own, which are what the init has now, and with the job's clocks.
    pub(super) fn finish(mut self, plan: &Plan) -> Result<Tree, EngineError> {
        plan.job.clocks.set_for_children()?;
        let clocks = File::open(CLOCKS).map_err(|source| EngineError::File {
            path: CLOCKS.into(),
            what: "open it",
            source,
        })?;
        // Images that are made later have the init's clocks; and kernels before 6.2 start no thread
        // of a process whose children are to have others.
        // SAFETY: the descriptor is open, and setns() touches no memory.
        if unsafe { libc::setns(clocks.as_raw_fd(), libc::CLONE_NEWTIME) } < 0 {
            return Err(EngineError::last(0, "have the job's clocks"));
        }
        let (clocks, time) = (clocks.as_raw_fd() as u64, libc::CLONE_NEWTIME as u64);
        for Made { thread, parasite } in &mut self.made {
            let mut batch = parasite.batch(thread);
            let own = [libc::CLONE_FILES as u64];
            batch.call("have descriptors of its own", libc::SYS_unshare, &own)?;
            batch.call("have the job's clocks", libc::SYS_setns, &[clocks, time])?;
            batch.run()?;
        }
        let places = self.places.next(plan)?;
        let forked = self.kept(plan, &places);
        Ok(self.tree.with(self.made, forked))
    }
}

/// Fails if processes of the job share memory since a fork: only a restart from one image gives
/// them that again.
fn shares_nothing(plan: &Plan) -> Result<(), EngineError> {
    match plan.chain.iter().any(|(_, manifest)| manifest.forked) {
        true => Err(EngineError::NoStandby("its processes share memory since a fork")),
        false => Ok(()),
    }
}
