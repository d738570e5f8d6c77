//! How a world carries out what the engine says, and how its host and its devices then access
//! memory.

use super::{Task, World};
use crate::choice::{WORDS, Word};
use kedge_pages::{Access, Action, Attach, Error, Pages, Place, Protection, Step, StreamId};
use std::collections::VecDeque;

impl World {
    /// Asks again until nothing has to be waited for.
    pub(super) fn until_done(&mut self, mut ask: impl FnMut(&mut World) -> Result<Step, Error>) {
        loop {
            match ask(self).unwrap() {
                Step::Do(actions) => return self.carry_out(actions),
                Step::Wait { streams, ticket } => {
                    assert!(!streams.is_empty());
                    for (node, stream) in streams {
                        assert_eq!(node, self.node_of(stream));
                        self.progress(stream, usize::MAX);
                        let actions = self.engine.over(node, stream, ticket);
                        self.carry_out(actions);
                    }
                }
            }
        }
    }

    pub(super) fn carry_out(&mut self, actions: Vec<Action>) {
        let mut refused: Vec<Pages> = Vec::new();
        let mut left: VecDeque<Action> = actions.iter().cloned().collect();
        while let Some(action) = left.pop_front() {
            self.check_rest(&action);
            match action {
                Action::Reserve { pages, .. } if self.refuses(&pages, &actions) => {
                    // All of each block is.
                    let blocks = pages.start / 512 * 512..pages.end.next_multiple_of(512);
                    let holding = self.regions.range(..=pages.start).next_back();
                    let region = holding.map_or(pages.clone(), |(_, (pages, _))| pages.clone());
                    let blocks = blocks.start.max(region.start)..blocks.end.min(region.end);
                    left = left
                        .into_iter()
                        .flat_map(|it| it.without(std::slice::from_ref(&blocks)))
                        .collect();
                    refused.push(blocks);
                }
                Action::Protect { pages, to } => pages.for_each(|page| {
                    self.view.insert(page, to);
                    self.owned.remove(&page);
                }),
                Action::Reserve { node, pages } => pages.for_each(|page| {
                    assert!(self.memories.insert((node, page), [0; WORDS]).is_none());
                }),
                Action::Release { node, pages } => {
                    pages.for_each(|page| assert!(self.memories.remove(&(node, page)).is_some()));
                }
                Action::Map { pages, at } => {
                    pages.for_each(|page| _ = self.places.insert(page, at))
                }
                Action::Forget { pages } => pages.for_each(|page| _ = self.host.remove(&page)),
                Action::Fetch { node, pages } => pages.for_each(|page| {
                    assert_ne!(self.view.get(&page), Some(&Protection::ReadWrite), "{page:#x}");
                    self.host.insert(page, self.memories[&(node, page)]);
                }),
                Action::Send { node, pages } => pages.for_each(|page| {
                    assert_ne!(self.view.get(&page), Some(&Protection::ReadWrite), "{page:#x}");
                    let bytes = self.host.get(&page).copied().unwrap_or_default();
                    *self.memories.get_mut(&(node, page)).expect("reserved") = bytes;
                }),
                Action::Copy { from, to, pages } => pages.for_each(|page| {
                    let bytes = self.memories[&(from, page)];
                    *self.memories.get_mut(&(to, page)).expect("reserved") = bytes;
                }),
                Action::Tell(_) => {}
            }
        }
        for pages in refused {
            let actions = self.engine.refused(&pages);
            self.carry_out(actions);
        }
        self.check_quotas();
    }

    /// Whether a node has less memory just now than was thought. Where blocks cannot lie in host
    /// memory, and for what is on its way from another node, it has not.
    fn refuses(&mut self, pages: &Pages, actions: &[Action]) -> bool {
        let meets = |it: &Pages| it.start < pages.end && pages.start < it.end;
        let moves = |it: &Action| matches!(it, Action::Release { pages, .. } if meets(pages));
        let fixed = self.regions.range(..=pages.start).next_back();
        let fixed = fixed.is_some_and(|(start, _)| self.fixed.contains(start));
        let seen = self.configs.values().all(|config| config.maps_host);
        seen && !fixed && self.salt.is_multiple_of(5) && !actions.iter().any(moves)
    }

    /// Bytes and mappings change only while no work that may touch them runs; that of a stream
    /// whose host function runs has not begun.
    fn check_rest(&self, action: &Action) {
        let (Action::Map { pages, .. }
        | Action::Fetch { pages, .. }
        | Action::Send { pages, .. }
        | Action::Copy { pages, .. }
        | Action::Release { pages, .. }) = action
        else {
            return;
        };
        for (stream, tasks) in self.pending.iter().filter(|(it, _)| !self.inside.contains(it)) {
            for task in tasks {
                let (Task::Kernel { may, .. } | Task::Copy { may, .. }) = task else { continue };
                let meets = |it: &Pages| it.start < pages.end && pages.start < it.end;
                assert!(!may.iter().any(meets), "{action:?} while {stream:?} runs");
            }
        }
    }

    /// Quotas are kept, but for what was placed while some node did not map the host.
    fn check_quotas(&self) {
        for (node, config) in self.configs.iter().filter(|_| self.always_mapped) {
            assert!(config.quota.is_none_or(|quota| self.used(*node) <= quota));
        }
    }

    pub(super) fn host_access(&mut self, word: Word, write: bool, by: Option<StreamId>) {
        let (needed, access) = match write {
            true => (Protection::ReadWrite, Access::Write),
            false => (Protection::Read, Access::Read),
        };
        let view = self.view.get(&word.0).copied().unwrap_or(Protection::None);
        if view < needed {
            self.until_done(|world| world.engine.touch(word.0, access, by));
        }
        self.shown(word.0, needed);
        self.now(word, write);
    }

    /// Has a page shown again that is open and not in the view.
    pub(super) fn shown(&mut self, page: u64, needed: Protection) {
        if self.view.get(&page).is_none_or(|view| *view < needed) {
            let actions = self.engine.reopen(page).unwrap();
            self.carry_out(actions);
        }
    }

    /// Accesses a word that the view lets the host access.
    pub(super) fn now(&mut self, (page, word): Word, write: bool) {
        let view = self.view.get(&page).copied().unwrap_or(Protection::None);
        let needed = if write { Protection::ReadWrite } else { Protection::Read };
        assert!(view >= needed, "page {page:#x} is {view:?}");
        let (here, plain) = (self.host.entry(page).or_default(), self.one.entry(page).or_default());
        assert_eq!(here[word], plain[word], "the host reads page {page:#x}");
        if write {
            self.salt = self.salt.wrapping_mul(31).wrapping_add(7);
            (here[word], plain[word]) = (self.salt, self.salt);
        }
    }

    /// Runs the next tasks of a stream.
    pub(super) fn progress(&mut self, stream: StreamId, count: usize) {
        for _ in 0..count {
            // What is behind a host function begins after its end.
            if self.inside.contains(&stream) {
                return;
            }
            let Some(task) = self.pending.entry(stream).or_default().pop_front() else { return };
            match task {
                Task::Kernel { accesses, salt, .. } => self.run(stream, &accesses, salt),
                Task::Copy { from, to, .. } => {
                    for (from, to) in from.into_iter().zip(to) {
                        let value = *self.device_word(stream, from);
                        assert_eq!(value, self.plain(from), "a copy reads");
                        *self.device_word(stream, to) = value;
                        self.one.entry(to.0).or_default()[to.1] = value;
                    }
                }
                Task::Function { accesses } => self.run_function(stream, accesses),
            }
        }
    }

    fn run(&mut self, stream: StreamId, accesses: &[(Word, bool)], salt: u32) {
        let mut seen = salt;
        for (word, write) in accesses {
            let value = *self.device_word(stream, *word);
            assert_eq!(value, self.plain(*word), "a kernel reads page {:#x}", word.0);
            seen = seen.wrapping_mul(17).wrapping_add(value);
            if *write {
                *self.device_word(stream, *word) = seen;
                self.one.entry(word.0).or_default()[word.1] = seen;
            }
        }
    }

    /// A host function may touch what is its stream's, and anything while no other stream works.
    fn run_function(&mut self, stream: StreamId, accesses: Vec<(Word, bool)>) {
        self.inside.insert(stream);
        for (word, write) in accesses {
            let alone = self.pending.iter().all(|(it, tasks)| *it == stream || tasks.is_empty());
            let holding = self.regions.values().find(|(pages, _)| pages.contains(&word.0));
            let Some((_, attach)) = holding else { continue };
            if alone || *attach == Attach::Stream(stream) {
                self.host_access(word, write, Some(stream));
            }
        }
        let actions = self.engine.host_function_over(stream);
        self.carry_out(actions);
        self.inside.remove(&stream);
    }

    fn plain(&self, (page, word): Word) -> u32 {
        self.one.get(&page).map_or(0, |bytes| bytes[word])
    }

    /// Returns the word that work of a stream finds.
    fn device_word(&mut self, stream: StreamId, (page, word): Word) -> &mut u32 {
        let (node, place) = (self.node_of(stream), self.places[&page]);
        assert!(self.sees(node, place), "{node:?} does not see {place:?}");
        match place {
            Place::Host => &mut self.host.entry(page).or_default()[word],
            Place::Node(home) => &mut self.memories.get_mut(&(home, page)).expect("mapped")[word],
        }
    }
}
