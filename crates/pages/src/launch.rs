//! Launches, and ends of host functions: what the host has open is closed and sent.

use crate::engine::Engine;
use crate::out::Out;
use crate::region::{offsets, runs};
use crate::set::PageSet;
use crate::types::{Action, Attach, Error, NodeId, Place, Protection, Step, StreamId};
use std::collections::BTreeSet;

impl Engine {
    /// A kernel is about to be posted, which may touch all that its stream may. `likely`: pages of
    /// what it probably uses, as its arguments tell; they are kept on the node, or brought there
    /// while nothing runs.
    ///
    /// # Errors
    /// There is no such node.
    pub fn launch(
        &mut self,
        node: NodeId,
        stream: StreamId,
        likely: &[u64],
    ) -> Result<Step, Error> {
        self.known(node)?;
        let classes = [Attach::Global, Attach::Stream(stream)];
        let moving = |attach: &Attach| !self.unmappable(*attach, node).is_empty();
        let wait = |attach| self.must_wait(attach, None);
        if let Some(wait) = classes.into_iter().filter(moving).find_map(wait) {
            return Ok(wait);
        }
        let mut out = Out::default();
        for attach in classes {
            self.settle(attach, node, &mut out);
        }
        let now = self.tick();
        likely.iter().for_each(|page| self.note_use(*page, now));
        likely.iter().for_each(|page| self.bring_in(*page, node, now, &mut out));
        self.close(&classes, &mut out);
        let now = self.tick();
        for attach in classes {
            if let Some(class) = self.classes.get_mut(&attach) {
                class.launched = now;
            }
        }
        self.busy.begin(node, stream, true, false, now);
        Ok(Step::Do(out.done()))
    }

    /// A host function of a stream is about to end: what it has written is sent before the work
    /// behind it begins.
    pub fn host_function_over(&mut self, stream: StreamId) -> Vec<Action> {
        let mut out = Out::default();
        let classes: Vec<Attach> = match self.busy.any_foreign() {
            true => self.classes.keys().copied().collect(),
            false => vec![Attach::Global, Attach::Stream(stream)],
        };
        self.close(&classes, &mut out);
        out.done()
    }

    /// Closes all that the host has open in some classes, and sends what only it has.
    fn close(&mut self, classes: &[Attach], out: &mut Out) {
        self.again.begin();
        let mut keys = BTreeSet::new();
        for attach in classes {
            if let Some(class) = self.classes.get_mut(attach) {
                keys.append(&mut class.open);
            }
        }
        let mut sends = Vec::new();
        for key in keys {
            let Some(region) = self.regions.get_mut(&key.0) else { continue };
            let pages = region.block_pages(key.1);
            let start = pages.start;
            let Some(block) = region.blocks.get_mut(key.1 as usize) else { continue };
            block.listed = false;
            let Place::Node(home) = block.place else { continue };
            let open = std::mem::take(&mut block.readable);
            let written = std::mem::take(&mut block.writable);
            block.closed(open);
            if !block.again.is_empty() {
                self.classes.entry(region.attach).or_default().again.insert(key);
            }
            if !written.is_empty() {
                region.born = 0;
            }
            sends.push((home, start, written));
            // What is not open is closed: one call a block costs less than one for each of several
            // runs, and blocks that follow each other are closed by one.
            let mut parts = runs(start, open);
            let closed = match (parts.next(), parts.next()) {
                (Some(_), Some(_)) => Some(pages),
                (one, _) => one,
            };
            if let Some(pages) = closed {
                out.push(Action::Protect { pages, to: Protection::None });
            }
        }
        for (node, start, written) in sends {
            runs(start, written).for_each(|pages| out.push(Action::Send { node, pages }));
        }
    }

    /// A launch uses the region of a page.
    pub(crate) fn note_use(&mut self, page: u64, now: u64) {
        let Some(start) = self.region(page).map(|region| region.pages.start) else { return };
        let Some(region) = self.regions.get_mut(&start) else { return };
        let before = std::mem::replace(&mut region.used, now);
        for id in region.on.iter().filter(|(_, count)| **count > 0).map(|(id, _)| *id) {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.recent.remove(&(before, start));
                node.recent.insert((now, start));
            }
        }
    }

    /// Brings the blocks of a page's region to a node that lie in host memory for want of room, as
    /// far as there is some, or others have it that have not been used as lately.
    fn bring_in(&mut self, page: u64, node: NodeId, now: u64, out: &mut Out) {
        let Some(region) = self.region(page) else { return };
        let start = region.pages.start;
        if region.displaced == 0 || !self.busy.is_idle_for(Attach::Global) {
            return;
        }
        // Where the program has it, if that serves this node as well.
        let home = Some(region.home).filter(|home| self.can_map(node, Place::Node(*home)));
        let node = home.unwrap_or(node);
        for index in 0..region.blocks.len() as u32 {
            let Some(region) = self.regions.get(&start) else { return };
            let block = &region.blocks[index as usize];
            if region.displaced == 0 || block.stays || block.place != Place::Host {
                continue;
            }
            let pages = region.block_pages(index);
            if !self.make_room(node, pages.end - pages.start, now, out) {
                return;
            }
            self.relocate((start, index), Place::Node(node), false, out);
        }
    }

    /// Whether the host has none of these pages open, and so sees every fault on them.
    pub fn is_closed(&self, page: u64) -> bool {
        let Some(region) = self.region(page) else { return true };
        let block = &region.blocks[region.index(page) as usize];
        let page = offsets(&(page..page + 1));
        block.place != Place::Host && block.readable & page == PageSet::EMPTY
    }
}
