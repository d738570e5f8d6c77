//! Room on nodes: how much there is, what gives way when others want it, and what is done where
//! there was less than was thought.

use crate::engine::Engine;
use crate::out::Out;
use crate::region::Key;
use crate::set::PageSet;
use crate::types::{Action, Attach, Error, NodeId, Pages, Place, Protection, Step};

impl Engine {
    /// So many pages may still be taken on a node, beyond those that lie on it.
    ///
    /// # Errors
    /// There is no such node.
    pub fn set_free(&mut self, node: NodeId, pages: u64) -> Result<(), Error> {
        let node = self.nodes.get_mut(&node).ok_or(Error::UnknownNode(node.0))?;
        node.config.quota = Some(node.used.saturating_add(pages));
        Ok(())
    }

    /// Returns how many pages of a node's quota are taken.
    pub fn used(&self, node: NodeId) -> u64 {
        self.nodes.get(&node).map_or(0, |node| node.used)
    }

    /// Whether the region of a page has blocks in host memory for want of room, so that a launch
    /// which uses it would bring them in.
    pub fn is_away(&self, page: u64) -> bool {
        self.region(page).is_some_and(|region| region.displaced > 0 && !region.fixed)
    }

    /// Something that is no managed memory wants so many pages of a node: the blocks that were used
    /// least recently go to host memory, as far as there are some that may.
    ///
    /// # Errors
    /// There is no such node.
    pub fn give_way(&mut self, node: NodeId, pages: u64) -> Result<Step, Error> {
        let used = self.nodes.get(&node).ok_or(Error::UnknownNode(node.0))?.used;
        if used == 0 || !self.all_map_host() {
            return Ok(Step::Do(Vec::new()));
        }
        let on_it = |attach: &&Attach| {
            let class = self.classes.get(attach);
            class.is_some_and(|class| class.homes.contains_key(&Place::Node(node)))
        };
        let mut attaches = self.classes.keys().filter(on_it);
        if let Some(wait) = attaches.find_map(|attach| self.must_wait(*attach, None)) {
            return Ok(wait);
        }
        let (mut out, now) = (Out::default(), self.tick());
        let target = used.saturating_sub(pages);
        while self.nodes.get(&node).is_some_and(|node| node.used > target) {
            let Some(key) = self.least_used(node, now) else { break };
            self.relocate(key, Place::Host, false, &mut out);
        }
        Ok(Step::Do(out.done()))
    }

    /// A `Reserve` of these pages has failed, and nothing that came after it was done for them:
    /// their blocks are in host memory, where they were, or where those of a new region begin.
    /// Not for what was on its way from another node.
    pub fn refused(&mut self, pages: &Pages) -> Vec<Action> {
        let mut out = Out::default();
        for start in self.regions_within(pages) {
            let Some(region) = self.regions.get(&start) else { continue };
            let parts: Vec<_> = region.parts(pages).map(|(index, _)| (start, index)).collect();
            parts.into_iter().for_each(|key| self.stay(key, &mut out));
        }
        out.done()
    }

    fn stay(&mut self, key: Key, out: &mut Out) {
        if self.leave(key).is_none() {
            return;
        }
        if let Some(block) = self.block_mut(key) {
            (block.readable, block.writable) = (PageSet::EMPTY, PageSet::EMPTY);
        }
        self.enter(key, Place::Host);
        let Some(region) = self.regions.get(&key.0) else { return };
        let pages = region.block_pages(key.1);
        out.push(Action::Map { pages: pages.clone(), at: Place::Host });
        out.push(Action::Protect { pages, to: Protection::ReadWrite });
    }
}
