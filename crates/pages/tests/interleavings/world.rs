//! A host and nodes with memories of their own, kept equal by an engine's actions alone, beside one
//! plain memory. Work runs late, in any order of the streams, and on both at the same moment, so
//! even what a program does not order must come out equal.

mod carry;

use crate::choice::{Choice, WORDS, Word, bytes, interesting, pages, pick, words};
use kedge_pages::{
    Access, Action, Advice, Attach, Engine, Error, NodeConfig, NodeId, Pages, Place, Protection,
    StreamId,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

/// Kinds of steps.
pub(crate) const KINDS: u8 = 32;
const BASE: u64 = 0x3_0000_0000;
const SLOTS: u64 = 5;
/// Pages from one slot to the next: regions share cells of 512 pages.
const SLOT: u64 = 1300;
const SIZES: [u64; 6] = [1, 3, 40, 511, 700, 1300];
const STREAMS: u64 = 4;

#[derive(Debug)]
pub(crate) struct Setup {
    /// Whether each maps the host's memory, sees its peers', and has a quota.
    pub(crate) nodes: Vec<(bool, bool, Option<u64>)>,
    pub(crate) read_ahead: u64,
    /// Pages that are fetched at once for being touched again.
    pub(crate) again: u64,
}

#[derive(Debug, Clone)]
enum Task {
    /// Accesses (writes or not), and the regions that it may touch.
    Kernel { accesses: Vec<(Word, bool)>, may: Vec<Pages>, salt: u32 },
    /// Copies words within managed memory, in order.
    Copy { from: Vec<Word>, to: Vec<Word>, may: Vec<Pages> },
    /// Host accesses.
    Function { accesses: Vec<(Word, bool)> },
}

pub(crate) struct World {
    engine: Engine,
    configs: BTreeMap<NodeId, NodeConfig>,
    host: HashMap<u64, [u32; WORDS]>,
    view: HashMap<u64, Protection>,
    memories: HashMap<(NodeId, u64), [u32; WORDS]>,
    places: HashMap<u64, Place>,
    /// The plain memory.
    one: HashMap<u64, [u32; WORDS]>,
    regions: BTreeMap<u64, (Pages, Attach)>,
    pending: BTreeMap<StreamId, VecDeque<Task>>,
    /// Streams whose host function runs.
    inside: HashSet<StreamId>,
    /// Pages that the host alone has and that are not in the view.
    owned: HashSet<u64>,
    salt: u32,
    /// Every node has mapped the host's memory at all times.
    always_mapped: bool,
    /// The first pages of regions that stay on their nodes.
    fixed: BTreeSet<u64>,
}

impl World {
    pub(crate) fn new(setup: &Setup) -> World {
        let ids: BTreeSet<NodeId> = (0..setup.nodes.len() as u32).map(NodeId).collect();
        let config = |&(maps_host, peers, quota): &(bool, bool, Option<u64>)| NodeConfig {
            quota,
            maps_host,
            peers: if peers { ids.clone() } else { BTreeSet::new() },
        };
        let configs: BTreeMap<_, _> =
            ids.iter().copied().zip(setup.nodes.iter().map(config)).collect();
        World {
            engine: Engine::new(configs.clone(), setup.read_ahead).expecting(setup.again),
            configs,
            host: HashMap::new(),
            view: HashMap::new(),
            memories: HashMap::new(),
            places: HashMap::new(),
            one: HashMap::new(),
            regions: BTreeMap::new(),
            pending: BTreeMap::new(),
            inside: HashSet::new(),
            owned: HashSet::new(),
            salt: 0,
            always_mapped: setup.nodes.iter().all(|(maps_host, ..)| *maps_host),
            fixed: BTreeSet::new(),
        }
    }

    pub(super) fn node_of(&self, stream: StreamId) -> NodeId {
        NodeId((stream.0 % self.configs.len() as u64) as u32)
    }

    pub(super) fn sees(&self, node: NodeId, place: Place) -> bool {
        match place {
            Place::Host => self.configs[&node].maps_host,
            Place::Node(other) => other == node || self.configs[&node].peers.contains(&other),
        }
    }

    pub(crate) fn step(&mut self, (kind, a, b, c): (u8, u8, u8, u16)) {
        let stream = StreamId(u64::from(a) % STREAMS);
        let mut choice = Choice(u32::from(c) << 8 | u32::from(b));
        self.salt = self.salt.wrapping_add(1 + u32::from(c));
        match kind {
            0 | 1 => self.alloc(a, b, c),
            2 => self.free(u64::from(a)),
            3 => self.attach(u64::from(a), b),
            4..=7 => self.host_accesses(1, &mut choice, None),
            8 => self.walk(u64::from(a), b, c),
            9 => self.range(u64::from(a), b, c),
            10..=13 => self.launch(stream, &mut choice),
            14 | 15 => self.copy(stream, &mut choice),
            16 => self.function(stream, &mut choice),
            17 => self.progress(stream, 1 + usize::from(b % 3)),
            18 => self.sync(stream),
            19 => self.sync_late(stream, &mut choice),
            20 => self.sync_node(self.node_of(stream)),
            21 => self.prefetch(u64::from(a), b, c),
            22 => self.advise(u64::from(a), b, c),
            23 => self.fork(),
            24 => self.checkpoint(),
            25 => self.restart(),
            26 => self.lose(u64::from(a), c),
            27 => self.change_node(self.node_of(stream), b, c),
            28 | 29 => self.give_way(self.node_of(stream), c),
            30 => self.set_free(self.node_of(stream), c),
            _ => self.alloc_fixed(a, b, c),
        }
    }

    /// All that has been done comes out equal.
    pub(crate) fn end(&mut self) {
        self.checkpoint();
        let regions: Vec<Pages> = self.regions.values().map(|(pages, _)| pages.clone()).collect();
        for pages in regions {
            for page in interesting(&pages) {
                for word in 0..WORDS {
                    self.host_access((page, word), false, None);
                }
            }
            self.free((pages.start - BASE) / SLOT);
        }
        assert!(self.memories.is_empty(), "memory of nodes is left");
        assert!(self.view.values().all(|it| *it == Protection::None));
    }

    // What the program does.

    fn alloc(&mut self, a: u8, b: u8, c: u16) {
        self.alloc_as(a, b, c, false);
    }

    /// Memory that is a part of something larger on its node, where each sees the others' memory.
    fn alloc_fixed(&mut self, a: u8, b: u8, c: u16) {
        let sees_all = |config: &NodeConfig| config.peers.len() == self.configs.len();
        if self.configs.values().all(sees_all) {
            self.alloc_as(a, b, c, true);
        }
    }

    fn alloc_as(&mut self, a: u8, b: u8, c: u16, fixed: bool) {
        let start = BASE + u64::from(a) % SLOTS * SLOT;
        let pages = start..start + SIZES[usize::from(b) % SIZES.len()];
        let attach = if c.is_multiple_of(7) { Attach::Host } else { Attach::Global };
        let node = NodeId(u32::from(c) % self.configs.len() as u32);
        let outcome = match fixed {
            true => self.engine.alloc_fixed(pages.clone(), attach, node),
            false => self.engine.alloc(pages.clone(), attach, node),
        };
        if self.regions.contains_key(&start) {
            return assert_eq!(outcome, Err(Error::Overlap));
        }
        self.regions.insert(start, (pages.clone(), attach));
        if fixed {
            self.fixed.insert(start);
        }
        self.carry_out(outcome.unwrap());
        assert!(pages.clone().all(|page| self.places.contains_key(&page)));
    }

    fn slot(&self, slot: u64) -> Option<(Pages, Attach)> {
        self.regions.get(&(BASE + slot % SLOTS * SLOT)).cloned()
    }

    fn free(&mut self, slot: u64) {
        let Some((pages, _)) = self.slot(slot) else { return };
        self.until_done(|world| world.engine.free(pages.start));
        for page in pages.clone() {
            self.one.remove(&page);
            self.places.remove(&page);
            assert!(!self.host.contains_key(&page));
        }
        self.regions.remove(&pages.start);
        self.fixed.remove(&pages.start);
    }

    fn attach(&mut self, slot: u64, b: u8) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let attach = match b % 4 {
            0 => Attach::Global,
            1 => Attach::Host,
            _ => Attach::Stream(StreamId(u64::from(b / 4) % STREAMS)),
        };
        self.until_done(|world| world.engine.attach(pages.start, attach));
        self.regions.insert(pages.start, (pages, attach));
    }

    fn host_accesses(&mut self, count: u64, choice: &mut Choice, by: Option<StreamId>) {
        let all: Vec<Pages> = self.regions.values().map(|(pages, _)| pages.clone()).collect();
        for _ in 0..count {
            let Some(word) = pick(&all, choice) else { return };
            self.host_access(word, choice.next(2) == 0, by);
        }
    }

    /// Touches pages in a row.
    fn walk(&mut self, slot: u64, b: u8, c: u16) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let start = pages.start + u64::from(c) % (pages.end - pages.start);
        for page in start..pages.end.min(start + 24) {
            self.host_access((page, usize::from(b) % WORDS), b.is_multiple_of(2), None);
        }
    }

    /// A system call, or kedge itself, touches a range.
    fn range(&mut self, slot: u64, b: u8, c: u16) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let start = pages.start + u64::from(c) % (pages.end - pages.start);
        let range = start..pages.end.min(start + u64::from(b));
        let write = c.is_multiple_of(2);
        let access = if write { Access::Write } else { Access::Read };
        self.until_done(|world| world.engine.touch_range(range.clone(), access, None));
        for page in range {
            self.shown(page, if write { Protection::ReadWrite } else { Protection::Read });
            self.now((page, 1), write);
        }
    }

    fn launch(&mut self, stream: StreamId, choice: &mut Choice) {
        let node = self.node_of(stream);
        let own =
            |attach: &Attach| matches!(attach, Attach::Global) || *attach == Attach::Stream(stream);
        let may: Vec<Pages> = self
            .regions
            .values()
            .filter(|(_, attach)| own(attach))
            .map(|(pages, _)| pages.clone())
            .collect();
        let count = choice.next(6);
        let accesses: Vec<_> = (0..count)
            .filter_map(|_| pick(&may, choice).map(|word| (word, choice.next(2) == 0)))
            .collect();
        let likely: Vec<u64> = accesses.iter().take(2).map(|((page, _), _)| *page).collect();
        self.until_done(|world| world.engine.launch(node, stream, &likely));
        for pages in may.iter().flat_map(interesting) {
            assert!(self.engine.is_closed(pages) || self.places[&pages] == Place::Host);
        }
        let salt = self.salt;
        self.pending.entry(stream).or_default().push_back(Task::Kernel { accesses, may, salt });
    }

    fn copy(&mut self, stream: StreamId, choice: &mut Choice) {
        let all: Vec<Pages> = self.regions.values().map(|(pages, _)| pages.clone()).collect();
        let (Some(from), Some(to)) = (pick(&all, choice), pick(&all, choice)) else { return };
        let length = 1 + choice.next(9) as usize;
        let (mut from, mut to) = (words(&all, from, length), words(&all, to, length));
        let length = from.len().min(to.len());
        from.truncate(length);
        to.truncate(length);
        let node = self.node_of(stream);
        let (reads, writes) = (bytes(&from), bytes(&to));
        self.until_done(|world| {
            let (reads, writes) = (std::slice::from_ref(&reads), std::slice::from_ref(&writes));
            world.engine.device_access(node, stream, reads, writes)
        });
        let may = vec![pages(&reads), pages(&writes)];
        self.pending.entry(stream).or_default().push_back(Task::Copy { from, to, may });
    }

    fn function(&mut self, stream: StreamId, choice: &mut Choice) {
        let all: Vec<Pages> = self.regions.values().map(|(pages, _)| pages.clone()).collect();
        let count = choice.next(4);
        let accesses = (0..count)
            .filter_map(|_| pick(&all, choice).map(|word| (word, choice.next(2) == 0)))
            .collect();
        let node = self.node_of(stream);
        // It is work of the stream that touches no managed memory of the device's.
        self.until_done(|world| world.engine.device_access(node, stream, &[], &[]));
        self.pending.entry(stream).or_default().push_back(Task::Function { accesses });
    }

    fn sync(&mut self, stream: StreamId) {
        let ticket = self.engine.ticket();
        self.progress(stream, usize::MAX);
        let node = self.node_of(stream);
        let actions = self.engine.over(node, stream, ticket);
        self.carry_out(actions);
    }

    /// Somebody launches between the end of a wait and its report.
    fn sync_late(&mut self, stream: StreamId, choice: &mut Choice) {
        let ticket = self.engine.ticket();
        self.progress(stream, usize::MAX);
        self.launch(stream, choice);
        let node = self.node_of(stream);
        let actions = self.engine.over(node, stream, ticket);
        self.carry_out(actions);
    }

    fn sync_node(&mut self, node: NodeId) {
        let ticket = self.engine.ticket();
        for stream in (0..STREAMS).map(StreamId) {
            if self.node_of(stream) == node {
                self.progress(stream, usize::MAX);
            }
        }
        let actions = self.engine.node_over(node, ticket);
        self.carry_out(actions);
    }

    fn place(&self, b: u8) -> Place {
        match u32::from(b) % (1 + self.configs.len() as u32) {
            0 => Place::Host,
            node => Place::Node(NodeId(node - 1)),
        }
    }

    fn prefetch(&mut self, slot: u64, b: u8, c: u16) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let start = pages.start + u64::from(c) % (pages.end - pages.start);
        let to = self.place(b);
        let actions = self.engine.prefetch(start..pages.end.min(start + 400), to).unwrap();
        self.carry_out(actions);
    }

    fn advise(&mut self, slot: u64, b: u8, c: u16) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let start = pages.start + u64::from(c) % (pages.end - pages.start);
        let advice = match b % 5 {
            0 => Advice::NoPreference,
            _ => Advice::Prefer(self.place(b / 5)),
        };
        let actions = self.engine.advise(start..pages.end, advice).unwrap();
        self.carry_out(actions);
    }

    fn fork(&mut self) {
        let mut child = self.engine.clone();
        let mut view = self.view.clone();
        for action in child.forked() {
            let Action::Protect { pages, to } = action else { panic!("{action:?}") };
            pages.for_each(|page| _ = view.insert(page, to));
        }
        assert!(view.values().all(|it| *it == Protection::None));
        for (pages, _) in self.regions.values() {
            let outcome = child.touch(pages.start, Access::Read, None);
            assert_eq!(outcome, Err(Error::NotManaged(pages.start)));
        }
    }

    /// What is saved is what one memory would hold.
    fn checkpoint(&mut self) {
        (0..STREAMS).for_each(|stream| self.sync(StreamId(stream)));
        let mut saved = BTreeMap::new();
        for (pages, place) in self.engine.survey() {
            for page in pages {
                let bytes = match place {
                    Place::Host => self.host.get(&page),
                    Place::Node(node) => self.memories.get(&(node, page)),
                };
                assert!(saved.insert(page, bytes.copied().unwrap_or_default()).is_none());
            }
        }
        let all = self.regions.values().flat_map(|(pages, _)| pages.clone());
        for (page, (saved_page, bytes)) in all.zip(&saved) {
            assert_eq!(
                (page, bytes),
                (*saved_page, &self.one.get(&page).copied().unwrap_or_default())
            );
        }
        assert_eq!(
            saved.len() as u64,
            self.regions.values().map(|(it, _)| it.end - it.start).sum()
        );
    }

    /// The process goes on from an image: what both had was saved with the node.
    fn restart(&mut self) {
        self.checkpoint();
        for page in self.regions.values().flat_map(|(pages, _)| pages.clone()) {
            let own = self.view.get(&page) == Some(&Protection::ReadWrite);
            let own = own || self.places[&page] == Place::Host || self.owned.contains(&page);
            if !own {
                self.host.remove(&page);
            }
            self.view.insert(page, Protection::None);
        }
        self.owned.clear();
        let actions = self.engine.rebuilt();
        self.carry_out(actions);
    }

    /// The system takes a page out of the view, or the program advises so; its bytes stay.
    fn lose(&mut self, slot: u64, c: u16) {
        let Some((pages, _)) = self.slot(slot) else { return };
        let page = pages.start + u64::from(c) % (pages.end - pages.start);
        if self.view.insert(page, Protection::None) == Some(Protection::ReadWrite) {
            self.owned.insert(page);
        }
    }

    /// The job moves to another kind of device, by way of the host or of an image.
    fn change_node(&mut self, node: NodeId, b: u8, c: u16) {
        let ids: BTreeSet<NodeId> = self.configs.keys().copied().collect();
        let config = NodeConfig {
            quota: (b & 2 != 0).then_some(u64::from(c) % 2500),
            maps_host: b & 12 != 0 || self.always_mapped && b & 32 != 0,
            peers: if b & 16 != 0 || !self.fixed.is_empty() { ids } else { BTreeSet::new() },
        };
        (0..STREAMS).for_each(|stream| self.sync(StreamId(stream)));
        let actions = if b & 1 == 0 {
            self.until_done(|world| world.engine.evacuate(node));
            let lost = self.memories.iter_mut().filter(|((of, _), _)| *of == node);
            lost.for_each(|(_, bytes)| *bytes = [0xDEAD; WORDS]);
            self.engine.replace(node, config.clone()).unwrap()
        } else {
            self.engine.restored(node, config.clone()).unwrap()
        };
        self.always_mapped &= config.maps_host;
        self.configs.insert(node, config);
        self.carry_out(actions);
    }

    /// Something else wants memory of a node.
    fn give_way(&mut self, node: NodeId, c: u16) {
        let (mut before, wanted) = (0, u64::from(c) % 2500);
        self.until_done(|world| {
            before = world.used(node);
            world.engine.give_way(node, wanted)
        });
        if self.configs.values().all(|config| config.maps_host) {
            assert!(self.used(node) <= before.saturating_sub(wanted));
        }
    }

    /// Something else has taken memory of a node, or given some back.
    fn set_free(&mut self, node: NodeId, c: u16) {
        let free = u64::from(c) % 1500;
        self.engine.set_free(node, free).unwrap();
        let quota = Some(self.used(node) + free);
        self.configs.entry(node).and_modify(|config| config.quota = quota);
    }

    /// Pages of a node that count for its quota.
    pub(super) fn used(&self, node: NodeId) -> u64 {
        let counts = |page: u64| {
            let before = self.regions.range(..=page).next_back();
            before.is_some_and(|(start, _)| !self.fixed.contains(start))
        };
        let of_node = |it: &&(NodeId, u64)| it.0 == node && counts(it.1);
        self.memories.keys().filter(of_node).count() as u64
    }
}
