//! Where blocks lie: moves, quotas, and nodes that are replaced.

use crate::engine::Engine;
use crate::out::Out;
use crate::region::{Block, Key, offsets, runs};
use crate::set::PageSet;
use crate::types::{Action, Attach, Error, NodeConfig, NodeId, Note, Place, Protection, Step};

impl Engine {
    /// Whether a node's devices can map what lies there.
    pub(crate) fn can_map(&self, node: NodeId, place: Place) -> bool {
        let Some(config) = self.nodes.get(&node).map(|node| &node.config) else { return false };
        match place {
            Place::Host => config.maps_host,
            Place::Node(other) => other == node || config.peers.contains(&other),
        }
    }

    /// Whether blocks may lie in host memory: all devices can map that.
    pub(crate) fn all_map_host(&self) -> bool {
        self.nodes.values().all(|node| node.config.maps_host)
    }

    pub(crate) fn has_room(&self, node: NodeId, pages: u64) -> bool {
        let Some(node) = self.nodes.get(&node) else { return false };
        node.config.quota.is_none_or(|quota| node.used + pages <= quota) || !self.all_map_host()
    }

    /// Makes room on a node by moving blocks of regions to host memory that were used before
    /// `since`. Returns whether there is enough now.
    pub(crate) fn make_room(
        &mut self,
        node: NodeId,
        pages: u64,
        since: u64,
        out: &mut Out,
    ) -> bool {
        while !self.has_room(node, pages) {
            let Some(key) = self.least_used(node, since) else { return false };
            self.relocate(key, Place::Host, false, out);
        }
        true
    }

    /// Returns a block of the node's least recently used region that may move.
    pub(crate) fn least_used(&self, node: NodeId, since: u64) -> Option<Key> {
        let recent = &self.nodes.get(&node)?.recent;
        let before = recent.range(..(since, 0));
        let may_move = |start: &u64| {
            let region = self.regions.get(start)?;
            let index = region.blocks.iter().rposition(|block| block.place == Place::Node(node))?;
            self.busy.is_idle_for(region.attach).then_some((*start, index as u32))
        };
        before.map(|(_, start)| start).find_map(may_move)
    }

    /// Moves a block, which no work touches, and what is current of it. `stays`: in host memory,
    /// launches do not bring it back.
    pub(crate) fn relocate(&mut self, key: Key, to: Place, stays: bool, out: &mut Out) {
        let Some(region) = self.regions.get(&key.0) else { return };
        let fresh = self.is_fresh(region);
        let pages = region.block_pages(key.1);
        let all = offsets(&pages);
        let Some(from) = self.leave(key) else { return };
        let Some(block) = self.block_mut(key) else { return };
        let (readable, writable) = (block.readable, block.writable);
        (block.stays, block.contended) = (stays && to == Place::Host, false);
        match (from, to) {
            _ if from == to => {}
            (Place::Node(node), Place::Host) => {
                (block.readable, block.writable) = (PageSet::EMPTY, PageSet::EMPTY);
                let missing = if fresh { PageSet::EMPTY } else { all - readable };
                runs(pages.start, missing)
                    .for_each(|pages| out.push(Action::Fetch { node, pages }));
                out.push(Action::Map { pages: pages.clone(), at: to });
                out.push(Action::Protect { pages: pages.clone(), to: Protection::ReadWrite });
                out.push(Action::Release { node, pages });
            }
            // The host's memory is given back: it is what there is too little of next.
            (Place::Host, Place::Node(node)) => {
                (block.readable, block.writable) = (PageSet::EMPTY, PageSet::EMPTY);
                out.push(Action::Protect { pages: pages.clone(), to: Protection::None });
                out.push(Action::Reserve { node, pages: pages.clone() });
                out.push(Action::Send { node, pages: pages.clone() });
                out.push(Action::Map { pages: pages.clone(), at: to });
                out.push(Action::Forget { pages });
            }
            (Place::Node(from), Place::Node(node)) => {
                let moved = if fresh { PageSet::EMPTY } else { all - writable };
                out.push(Action::Reserve { node, pages: pages.clone() });
                for pages in runs(pages.start, moved) {
                    out.push(Action::Copy { from, to: node, pages });
                }
                out.push(Action::Map { pages: pages.clone(), at: to });
                out.push(Action::Release { node: from, pages });
            }
            (Place::Host, Place::Host) => {}
        }
        if let Some(region) = self.regions.get_mut(&key.0).filter(|_| from == Place::Host) {
            region.born = 0;
        }
        self.enter(key, to);
        self.list(key);
    }

    /// Lists a block for the next launch if the host has some of it open.
    pub(crate) fn list(&mut self, key: Key) {
        let Some(region) = self.regions.get_mut(&key.0) else { return };
        let Some(block) = region.blocks.get_mut(key.1 as usize) else { return };
        if !block.listed && !block.readable.is_empty() {
            block.listed = true;
            self.classes.entry(region.attach).or_default().open.insert(key);
        }
    }

    /// Notes a block of which some pages are expected to be touched again.
    pub(crate) fn list_again(&mut self, key: Key) {
        let Some(region) = self.regions.get(&key.0) else { return };
        if region.blocks.get(key.1 as usize).is_some_and(|block| !block.again.is_empty()) {
            self.classes.entry(region.attach).or_default().again.insert(key);
        }
    }

    pub(crate) fn block_mut(&mut self, key: Key) -> Option<&mut Block> {
        self.regions.get_mut(&key.0)?.blocks.get_mut(key.1 as usize)
    }

    /// Counts a block where it lies from now on.
    pub(crate) fn enter(&mut self, key: Key, at: Place) {
        let Some(region) = self.regions.get_mut(&key.0) else { return };
        let pages = region.block_pages(key.1);
        let Some(block) = region.blocks.get_mut(key.1 as usize) else { return };
        block.place = at;
        region.displaced += u32::from(at == Place::Host && !block.stays);
        self.classes.entry(region.attach).or_default().settle(key, at);
        let Place::Node(id) = at else { return };
        if region.fixed {
            return;
        }
        let count = region.on.entry(id).or_insert(0);
        *count += 1;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.used += pages.end - pages.start;
        node.recent.insert((region.used, key.0));
    }

    /// Counts a block no more where it lies, and returns where that is.
    pub(crate) fn leave(&mut self, key: Key) -> Option<Place> {
        let region = self.regions.get_mut(&key.0)?;
        let pages = region.block_pages(key.1);
        let block = region.blocks.get(key.1 as usize)?;
        let at = block.place;
        region.displaced -= u32::from(at == Place::Host && !block.stays);
        self.classes.entry(region.attach).or_default().leave(key, at);
        let Place::Node(id) = at else { return Some(at) };
        if region.fixed {
            return Some(at);
        }
        let left = region.on.entry(id).or_insert(1);
        *left -= 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.used -= pages.end - pages.start;
            if *left == 0 {
                node.recent.remove(&(region.used, key.0));
            }
        }
        Some(at)
    }

    /// Returns the places of blocks of a class that a node does not see.
    pub(crate) fn unmappable(&self, attach: Attach, node: NodeId) -> Vec<Place> {
        let Some(class) = self.classes.get(&attach) else { return Vec::new() };
        let unseen = |place: &&Place| !self.can_map(node, **place);
        class.homes.keys().filter(unseen).copied().collect()
    }

    /// Moves all blocks of a class, which no work touches, to where a node sees them.
    pub(crate) fn settle(&mut self, attach: Attach, node: NodeId, out: &mut Out) {
        for place in self.unmappable(attach, node) {
            let homes = self.classes.get(&attach).and_then(|class| class.homes.get(&place));
            for key in homes.cloned().unwrap_or_default() {
                self.make_mappable(key, node, out);
            }
        }
    }

    /// Moves a block, which no work touches, to where a node sees it.
    pub(crate) fn make_mappable(&mut self, key: Key, node: NodeId, out: &mut Out) {
        if !self.all_map_host() {
            return self.relocate(key, Place::Node(node), false, out);
        }
        self.relocate(key, Place::Host, true, out);
        if let Some(region) = self.regions.get(&key.0) {
            out.push(Action::Tell(Note::UsedByNodes { pages: region.block_pages(key.1) }));
        }
    }

    /// Brings all that is current on a node to the host, as the node is about to be lost.
    ///
    /// # Errors
    /// There is no such node.
    pub fn evacuate(&mut self, node: NodeId) -> Result<Step, Error> {
        self.known(node)?;
        let mut out = Out::default();
        let attaches: Vec<Attach> = self.classes.keys().copied().collect();
        if let Some(wait) = attaches.iter().find_map(|attach| self.must_wait(*attach, None)) {
            return Ok(wait);
        }
        for attach in attaches {
            let class = self.classes.get(&attach);
            let homes = class.and_then(|class| class.homes.get(&Place::Node(node)));
            for key in homes.cloned().unwrap_or_default() {
                self.open_all(key, node, &mut out);
            }
        }
        Ok(Step::Do(out.done()))
    }

    /// Makes the host's copy of a block the current one.
    fn open_all(&mut self, key: Key, node: NodeId, out: &mut Out) {
        let Some(region) = self.regions.get(&key.0) else { return };
        let (fresh, pages) = (self.is_fresh(region), region.block_pages(key.1));
        let Some(block) = self.block_mut(key) else { return };
        let all = offsets(&pages);
        let missing = if fresh { PageSet::EMPTY } else { all - block.readable };
        (block.readable, block.writable) = (all, all);
        runs(pages.start, missing).for_each(|pages| out.push(Action::Fetch { node, pages }));
        out.push(Action::Protect { pages, to: Protection::ReadWrite });
        self.list(key);
    }

    /// Puts another node in the place of one that has been evacuated: it has this configuration,
    /// and nothing in its memory. What these actions release is gone already.
    ///
    /// # Errors
    /// There is no such node.
    pub fn replace(&mut self, id: NodeId, config: NodeConfig) -> Result<Vec<Action>, Error> {
        let mut out = Out::default();
        self.reconfigure(id, config, &mut out)?;
        for region in self.regions.values() {
            let on_it = |(_, block): &(u32, &Block)| block.place == Place::Node(id);
            for (index, _) in (0..).zip(&region.blocks).filter(on_it) {
                let pages = region.block_pages(index);
                out.push(Action::Release { node: id, pages: pages.clone() });
                out.push(Action::Reserve { node: id, pages: pages.clone() });
                out.push(Action::Map { pages, at: Place::Node(id) });
            }
        }
        Ok(out.done())
    }

    /// Another node with the same bytes, restored from an image, is in the place of one.
    ///
    /// # Errors
    /// There is no such node.
    pub fn restored(&mut self, id: NodeId, config: NodeConfig) -> Result<Vec<Action>, Error> {
        let mut out = Out::default();
        self.reconfigure(id, config, &mut out)?;
        Ok(out.done())
    }

    /// Gives a node, on which nothing runs, another configuration, and moves what is beyond its
    /// quota.
    fn reconfigure(&mut self, id: NodeId, config: NodeConfig, out: &mut Out) -> Result<(), Error> {
        let node = self.nodes.get_mut(&id).ok_or(Error::UnknownNode(id.0))?;
        node.config = config;
        self.busy.end_node(id);
        let now = self.tick();
        self.make_room(id, 0, now, out);
        Ok(())
    }
}
