//! Holding the memory of stopped processes, by clones that are made side by side.

use super::process::{Common, Holding, Looked, threads_of};
use super::refuse::Here;
use super::told::By;
use super::{Held, Memory};
use crate::EngineError;
use crate::freeze::{self, Cloning, FrozenClone};
use crate::home::Ways;
use crate::proc::Status;
use crate::several;
use crate::stop::StoppedProcess;
use libc::pid_t;
use std::rc::Rc;

/// Holds the memory of all `processes`, of which what was `looked` at is known, in the same order.
/// Those that are to be no subreapers until [`reinstate`] are added to `resigned`.
pub(super) fn hold(
    processes: &mut [StoppedProcess],
    looked: Vec<Looked>,
    common: &Common<'_>,
    resigned: &mut Vec<(pid_t, Rc<Ways>)>,
) -> Result<Vec<Held>, EngineError> {
    let mut clones: Vec<Option<FrozenClone>> = Vec::new();
    clones.resize_with(looked.len(), || None);
    // Before the others: it would get the clones of its descendants for children.
    for ((process, one), clone) in processes.iter_mut().zip(&looked).zip(&mut clones) {
        let state = &one.state;
        if state.subreaper && common.is_parent(state.ids.pid) {
            if one.memory.is_cloned() {
                let made = FrozenClone::on(&one.ways, &mut process.main, true);
                one.ways.close(threads_of(process))?;
                *clone = Some(made?);
            }
            resign(process, one.ways.clone(), resigned)?;
        }
    }
    let together = processes.iter_mut().zip(&looked).zip(&mut clones);
    let mut wanted: Vec<_> = together
        .filter(|((_, one), clone)| one.memory.is_cloned() && clone.is_none())
        .map(|((process, one), clone)| (process, one, clone))
        .collect();
    for some in wanted.chunks_mut(side_by_side()) {
        clone_together(some)?;
    }
    let answering = processes.iter().map(|process| process.main.pid());
    let held = answering.zip(looked).zip(clones).map(|((at, one), clone)| {
        let Looked { state, status, mappings, memory, ahead, .. } = one;
        let memory = match (memory, clone) {
            (Holding::Copied { changes, flags }, _) => Memory::Copied { changes, flags },
            (Holding::Clone(changes), Some(clone)) => Memory::Clone(clone, changes),
            (Holding::Clone(_), None) => return Err(EngineError::Nonsense("a clone is missing")),
        };
        let held = Held { state, memory, mappings, ahead, writer: None, written: Vec::new() };
        Ok((held, at, status))
    });
    let mut held = held.collect::<Result<Vec<(Held, pid_t, Status)>, EngineError>>()?;
    let (lookup, descriptors) = (&common.lookup, common.descriptors);
    let (here, options) = (Here::now()?, common.options);
    let by = By { lookup, descriptors, here: &here };
    several::try_each_mut(&mut held, |(held, at, status)| match held.memory {
        Memory::Clone(..) => held.store_not_inherited(*at, status, options),
        // Nobody else will tell it.
        Memory::Copied { .. } => by.describe(*at, &mut held.state),
    })?;
    let held: Vec<Held> = held.into_iter().map(|(held, ..)| held).collect();
    held.iter().try_for_each(Held::let_go_of_huge)?;
    Ok(held)
}

/// How many processes are cloned side by side: each has one more while its clone is made. With few
/// the processors wait for each other at each step.
fn side_by_side() -> usize {
    const EACH: usize = 4;
    const FEWEST: usize = 32;
    std::thread::available_parallelism().map_or(FEWEST, |cores| FEWEST.max(cores.get() * EACH))
}

type Wants<'a> = (&'a mut StoppedProcess, &'a Looked, &'a mut Option<FrozenClone>);

/// Clones `some`, or none of them.
fn clone_together(some: &mut [Wants<'_>]) -> Result<(), EngineError> {
    let mut cloning = Vec::with_capacity(some.len());
    for (process, one, _) in some.iter_mut() {
        cloning.push(Cloning::new(&mut process.main, &one.ways, one.state.subreaper));
    }
    freeze::side_by_side(&mut cloning);
    let made: Vec<_> = cloning.into_iter().map(Cloning::result).collect();
    let mut result = Ok(());
    for ((process, one, clone), made) in some.iter_mut().zip(made) {
        let closed = one.ways.close(threads_of(process));
        let made = made.map(|made| **clone = Some(made));
        result = result.and(made).and(closed);
    }
    result
}

impl Holding {
    fn is_cloned(&self) -> bool {
        matches!(self, Holding::Clone(_))
    }
}

/// Has the process be no subreaper until [`reinstate`]: it would get the clones of its descendants
/// for children.
fn resign(
    process: &mut StoppedProcess,
    ways: Rc<Ways>,
    resigned: &mut Vec<(pid_t, Rc<Ways>)>,
) -> Result<(), EngineError> {
    let main = &mut process.main;
    match ways.lead_resigning(main)? {
        Some(rows) => main.resign_in_a_row(rows)?,
        None => {
            ways.lead(main)?;
            main.resign(ways.home())?;
        }
    }
    resigned.push((process.pid, ways));
    Ok(())
}

/// Makes those subreapers again that were before. Whoever is let go of is one again as well.
pub(super) fn reinstate(
    processes: &mut [StoppedProcess],
    resigned: Vec<(pid_t, Rc<Ways>)>,
) -> Result<(), EngineError> {
    for (pid, ways) in resigned {
        let found = processes.iter_mut().find(|process| process.pid == pid);
        found.map_or(Ok(()), |process| ways.close(threads_of(process)))?;
    }
    Ok(())
}
