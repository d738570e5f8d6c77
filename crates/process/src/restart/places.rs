//! Where the memory of processes comes from: equal places of an image are equal bytes.

use super::{Plan, memory};
use crate::EngineError;
use crate::state::ProcessState;
use crate::track::Run;
use kedge_image::{Codec, Layers, Source};
use libc::pid_t;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A place of an image: a file by its number, and an offset in it.
pub(super) type Place = (usize, u64);

pub(super) const ZEROS: Place = (usize::MAX, 0);

/// Memory and where it comes from, in order.
pub(super) type Parts = Vec<(Run, Place)>;

/// Where the memory of processes comes from.
#[derive(Debug, Default)]
pub(super) struct Places {
    files: BTreeMap<PathBuf, usize>,
    /// By processes.
    pub(super) parts: BTreeMap<pid_t, Parts>,
}

impl Places {
    /// Reads where all of a process's memory comes from that is not as its mappings have it anyway.
    pub(super) fn read(&mut self, plan: &Plan, state: &ProcessState) -> Result<(), EngineError> {
        let (layers, sources) = plan.memory(state)?;
        self.add(state, &layers, sources);
        Ok(())
    }

    /// Where the memory of processes comes from in `plan`, as far as it is made before the last
    /// image is there. A place has one number there and here.
    pub(super) fn next(&self, plan: &Plan) -> Result<Places, EngineError> {
        let mut next = Places { files: self.files.clone(), parts: BTreeMap::new() };
        for state in &plan.processes {
            let layers = plan.layers(state)?;
            next.add(state, &layers, memory::early_sources(state, &layers));
        }
        Ok(next)
    }

    fn add(&mut self, state: &ProcessState, layers: &Layers, sources: Vec<Source>) {
        let mut all = Parts::new();
        for source in sources {
            let next = self.files.len();
            let path = layers.file(source.layer).path();
            let place = match source.extent.codec {
                Codec::Zero => ZEROS,
                _ => (*self.files.entry(path.to_owned()).or_insert(next), source.extent.offset),
            };
            all.extend(source.parts.iter().map(|part| (*part, place)));
        }
        all.sort_unstable();
        self.parts.insert(state.ids.pid, all);
    }
}

/// What `parts` have in `runs`.
pub(super) fn clip(parts: &Parts, runs: &[Run]) -> Parts {
    let clipped = parts.iter().flat_map(|(run, place)| {
        let from = runs.partition_point(|(_, last)| *last <= run.0);
        let inside = runs[from..].iter().take_while(|(first, _)| *first < run.1);
        inside.map(|(first, last)| ((run.0.max(*first), run.1.min(*last)), *place))
    });
    clipped.collect()
}

/// Adds memory behind what `parts` have.
pub(super) fn push(parts: &mut Parts, run: Run, place: Place) {
    match parts.last_mut() {
        Some(((_, end), last)) if *end == run.0 && *last == place => *end = run.1,
        _ => parts.push((run, place)),
    }
}

/// What comes from the same place in both.
pub(super) fn equal(own: &Parts, theirs: &Parts) -> Vec<Run> {
    let mut theirs = theirs.iter().peekable();
    let mut same: Vec<Run> = Vec::new();
    for ((start, end), place) in own {
        while theirs.next_if(|((_, last), _)| last <= start).is_some() {}
        let here = theirs.clone().take_while(|((first, _), _)| first < end);
        for ((first, last), _) in here.filter(|(_, other)| other == place) {
            let (first, last) = (*first.max(start), *last.min(end));
            match same.last_mut() {
                Some((_, before)) if *before == first => *before = last,
                _ => same.push((first, last)),
            }
        }
    }
    same
}
