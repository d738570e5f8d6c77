//! The engine's state, and how regions come and go.

use crate::again::Again;
use crate::ahead::ReadAhead;
use crate::busy::Busy;
use crate::out::Out;
use crate::region::{Block, Class, Key, Region, offsets, runs};
use crate::types::{
    Action, Advice, Attach, Error, NodeConfig, NodeId, Pages, Place, Protection, Step, StreamId,
    Ticket,
};
use std::collections::{BTreeMap, BTreeSet};

/// Which copy of managed memory is current, for one client.
#[derive(Debug, Clone)]
pub struct Engine {
    pub(crate) nodes: BTreeMap<NodeId, Node>,
    pub(crate) regions: BTreeMap<u64, Region>,
    pub(crate) classes: BTreeMap<Attach, Class>,
    pub(crate) busy: Busy,
    pub(crate) ahead: ReadAhead,
    pub(crate) again: Again,
    /// Counts what has an order: launches, births.
    pub(crate) clock: u64,
    /// What is to be done as soon as nothing runs that may touch it.
    pub(crate) wishes: Vec<Wish>,
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) config: NodeConfig,
    /// Pages that lie on it.
    pub(crate) used: u64,
    /// Regions that have blocks on it, the least recently used first.
    pub(crate) recent: BTreeSet<(u64, u64)>,
}

/// A prefetch or an advice that moves pages.
#[derive(Debug, Clone)]
pub(crate) enum Wish {
    Prefetch { pages: Pages, to: Place },
    Advise { pages: Pages, advice: Advice },
}

impl Engine {
    /// Creates an engine without memory. A walk through memory opens up to `read_ahead` pages at
    /// once.
    pub fn new(nodes: impl IntoIterator<Item = (NodeId, NodeConfig)>, read_ahead: u64) -> Engine {
        let node = |config| Node { config, used: 0, recent: BTreeSet::new() };
        Engine {
            nodes: nodes.into_iter().map(|(id, config)| (id, node(config))).collect(),
            regions: BTreeMap::new(),
            classes: BTreeMap::new(),
            busy: Busy::default(),
            ahead: ReadAhead::new(read_ahead),
            again: Again::default(),
            clock: 0,
            wishes: Vec::new(),
        }
    }

    /// Adds a region, best placed on `node`. The host's view of it is closed, and all is zero. If a
    /// `Reserve` of these actions fails, [`Self::free`] undoes them.
    ///
    /// # Errors
    /// Something of it is managed already, or there is no such node.
    pub fn alloc(
        &mut self,
        pages: Pages,
        attach: Attach,
        node: NodeId,
    ) -> Result<Vec<Action>, Error> {
        self.alloc_as(pages, attach, node, false)
    }

    /// As [`Self::alloc`], but the region stays on the node for good, and counts for nothing of its
    /// quota: the memory is a part of something larger. All nodes see that one's memory.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn alloc_fixed(
        &mut self,
        pages: Pages,
        attach: Attach,
        node: NodeId,
    ) -> Result<Vec<Action>, Error> {
        self.alloc_as(pages, attach, node, true)
    }

    fn alloc_as(
        &mut self,
        pages: Pages,
        attach: Attach,
        node: NodeId,
        fixed: bool,
    ) -> Result<Vec<Action>, Error> {
        self.known(node)?;
        let before = self.regions.range(..pages.end).next_back();
        if pages.is_empty() || before.is_some_and(|(_, region)| region.pages.end > pages.start) {
            return Err(Error::Overlap);
        }
        let (start, born) = (pages.start, self.tick());
        let mut region = Region::new(pages, attach, node, born);
        region.fixed = fixed;
        region.blocks =
            vec![Block::new(Place::Host); region.index(region.pages.end - 1) as usize + 1];
        let count = region.blocks.len() as u32;
        self.regions.insert(start, region);
        let places: Vec<(Pages, Place)> =
            (0..count).filter_map(|index| self.put_new((start, index), node)).collect();
        // By kinds, so that what is alike is one action however many blocks there are.
        let mut out = Out::default();
        for (pages, at) in &places {
            if let Place::Node(node) = *at {
                out.push(Action::Reserve { node, pages: pages.clone() });
            }
        }
        for (pages, at) in &places {
            out.push(Action::Map { pages: pages.clone(), at: *at });
        }
        for (pages, _) in places.into_iter().filter(|(_, at)| *at == Place::Host) {
            out.push(Action::Protect { pages, to: Protection::ReadWrite });
        }
        Ok(out.done())
    }

    /// Decides where a block of a new region lies. Returns its pages, and where.
    fn put_new(&mut self, key: Key, node: NodeId) -> Option<(Pages, Place)> {
        let region = self.regions.get(&key.0)?;
        let pages = region.block_pages(key.1);
        let at = match region.fixed || self.has_room(node, pages.end - pages.start) {
            true => Place::Node(node),
            false => Place::Host,
        };
        self.enter(key, at);
        Some((pages, at))
    }

    /// Removes the region that begins at a page, when all work that may touch it is over.
    ///
    /// # Errors
    /// None begins there.
    pub fn free(&mut self, start: u64) -> Result<Step, Error> {
        let region = self.regions.get(&start).ok_or(Error::NotManaged(start))?;
        let (pages, attach) = (region.pages.clone(), region.attach);
        let open: Vec<Key> = region.listed().collect();
        if let Some(wait) = self.must_wait(attach, None) {
            return Ok(wait);
        }
        let mut out = Out::default();
        out.push(Action::Protect { pages: pages.clone(), to: Protection::None });
        for index in 0..self.regions[&start].blocks.len() as u32 {
            let Some(from) = self.leave((start, index)) else { continue };
            if let Place::Node(node) = from {
                out.push(Action::Release { node, pages: self.regions[&start].block_pages(index) });
            }
        }
        out.push(Action::Forget { pages });
        if let Some(class) = self.classes.get_mut(&attach) {
            open.iter().for_each(|key| _ = class.open.remove(key));
        }
        self.regions.remove(&start);
        Ok(Step::Do(out.done()))
    }

    /// Has other work touch a region from now on; all that might have touched it so far is over
    /// first.
    ///
    /// # Errors
    /// No region begins there.
    pub fn attach(&mut self, start: u64, attach: Attach) -> Result<Step, Error> {
        let region = self.regions.get(&start).ok_or(Error::NotManaged(start))?;
        let (old, fresh) = (region.attach, self.is_fresh(region) && !region.read);
        if attach == old {
            return Ok(Step::Do(Vec::new()));
        }
        // What runs was launched before a fresh one was there.
        if let Some(wait) = self.must_wait(old, None).filter(|_| !fresh) {
            return Ok(wait);
        }
        let born = if fresh { self.tick() } else { 0 };
        let (Some(region), class) =
            (self.regions.get_mut(&start), self.classes.entry(old).or_default())
        else {
            return Err(Error::NotManaged(start));
        };
        (region.attach, region.born, region.read) = (attach, born, false);
        let open: Vec<Key> = region.listed().collect();
        open.iter().for_each(|key| _ = class.open.remove(key));
        let places = (0..).zip(&region.blocks).map(|(index, block)| ((start, index), block.place));
        let places: Vec<_> = places.collect();
        places.iter().for_each(|(key, place)| class.leave(*key, *place));
        let class = self.classes.entry(attach).or_default();
        class.open.extend(open);
        places.iter().for_each(|(key, place)| class.settle(*key, *place));
        Ok(Step::Do(Vec::new()))
    }

    /// Returns the moment before which everything was posted so far.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.clock)
    }

    /// Everything that was posted to a stream before a moment is over.
    pub fn over(&mut self, node: NodeId, stream: StreamId, ticket: Ticket) -> Vec<Action> {
        self.busy.end(node, stream, ticket);
        let mut out = Out::default();
        self.run_deferred(&mut out);
        out.done()
    }

    /// Everything that was posted to a node before a moment is over.
    pub fn node_over(&mut self, node: NodeId, ticket: Ticket) -> Vec<Action> {
        self.busy.end_until(node, ticket);
        let mut out = Out::default();
        self.run_deferred(&mut out);
        out.done()
    }

    /// This is the child of a fork, where CUDA has ended: nothing is managed any more, and the view
    /// is closed, so that a touch is a fault of the program's own.
    pub fn forked(&mut self) -> Vec<Action> {
        let mut out = Out::default();
        for (_, region) in std::mem::take(&mut self.regions) {
            out.push(Action::Protect { pages: region.pages, to: Protection::None });
        }
        self.classes.clear();
        self.busy.clear();
        self.wishes.clear();
        self.nodes.values_mut().for_each(|node| (node.used, node.recent) = (0, BTreeSet::new()));
        out.done()
    }

    /// Iterates over all managed pages by where they are to be saved: where the current copy is.
    pub fn survey(&self) -> impl Iterator<Item = (Pages, Place)> + '_ {
        self.regions.values().flat_map(|region| {
            (0..).zip(&region.blocks).flat_map(|(index, block)| {
                let pages = region.block_pages(index);
                let (all, start) = (offsets(&pages), pages.start);
                let host = match block.place {
                    Place::Host => all,
                    Place::Node(_) => block.readable,
                };
                let here = runs(start, host).map(|run| (run, Place::Host));
                here.chain(runs(start, all - host).map(|run| (run, block.place)))
            })
        })
    }

    pub(crate) fn known(&self, node: NodeId) -> Result<(), Error> {
        self.nodes.contains_key(&node).then_some(()).ok_or(Error::UnknownNode(node.0))
    }

    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether a page is managed memory.
    pub fn is_managed(&self, page: u64) -> bool {
        self.region(page).is_some()
    }

    /// Returns the region that holds a page.
    pub(crate) fn region(&self, page: u64) -> Option<&Region> {
        let (_, region) = self.regions.range(..=page).next_back()?;
        (page < region.pages.end).then_some(region)
    }

    /// Whether no work can have touched a region: both copies of what the host has not opened are
    /// zero.
    pub(crate) fn is_fresh(&self, region: &Region) -> bool {
        region.born > self.classes.get(&region.attach).map_or(0, |class| class.launched)
    }

    /// Returns what has to be waited for before a region of a class is touched.
    pub(crate) fn must_wait(&self, attach: Attach, by: Option<StreamId>) -> Option<Step> {
        let blocking = self.busy.blocking(attach, by);
        let streams: Vec<_> = blocking.iter().map(|each| (each.node, each.stream)).collect();
        (!streams.is_empty()).then(|| Step::Wait { streams, ticket: self.ticket() })
    }
}
