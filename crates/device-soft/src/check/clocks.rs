//! What has happened before what, in a block.
//!
//! Each warp has a clock that counts what it has released, and what it knows of the other warps'
//! clocks (a vector clock). Within a warp, each lane has one. Where a lane does something for its
//! whole warp, as a release of what other lanes have done, more is taken to be ordered than is: a
//! race may be missed so, and none is made up.

use crate::spec::{BARRIERS, WARP, WARPGROUPS};
use std::collections::HashMap;

/// Warps of a block at most.
const WARPS: usize = 32;
/// Most words through which threads may order what they do that have a clock of their own. All
/// further ones have one together.
const MAX_WORDS: usize = 1 << 12;

/// By warp: what is known of it.
type Clock = [u32; WARPS];

/// When an access was made, and by whom.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct When {
    /// The thread's number in its block.
    pub thread: u16,
    /// Its warp's clock, and its own.
    epoch: u32,
    lane_clock: u32,
}

impl When {
    fn warp(self) -> usize {
        self.thread as usize / WARP % WARPS
    }

    fn lane(self) -> usize {
        self.thread as usize % WARP
    }
}

/// What orders accesses, as a warp does it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Follow<'a> {
    /// Comes to barrier `id`, which is in phase `generation`.
    Arrive {
        warp: usize,
        mask: u32,
        id: usize,
        generation: u32,
    },
    /// Goes on behind the barrier to which it came; the phases of all barriers.
    Depart {
        warp: usize,
        mask: u32,
        generations: &'a [u32],
    },
    ArriveAtCluster {
        warp: usize,
    },
    DepartFromCluster {
        warp: usize,
        mask: u32,
    },
    /// Comes to a `.sync` instruction; the member masks of its lanes.
    Assemble {
        warp: usize,
        mask: u32,
        members: &'a [u32; WARP],
    },
    /// Goes on behind it.
    Assembled {
        warp: usize,
        mask: u32,
    },
    Fence {
        warp: usize,
        mask: u32,
    },
    /// Writes a word that others may read to order what they do.
    Publish {
        warp: usize,
        word: u64,
        releases: bool,
    },
    /// Reads such a word.
    Observe {
        warp: usize,
        lane: usize,
        word: u64,
        acquires: bool,
    },
}

/// A warp's lanes.
struct Lanes {
    /// What each lane knows of each; its own clock is on the diagonal.
    known: [[u32; WARP]; WARP],
    /// Each lane's clock when it came to the `.sync` instruction where it is, or was last.
    arrived: [u32; WARP],
    /// With which lanes it came there.
    members: [u32; WARP],
    /// The block's barrier to which each lane came last.
    barrier: [usize; WARP],
    /// What each lane has acquired of its own warp's releases.
    own: [u32; WARP],
}

impl Lanes {
    fn new() -> Lanes {
        let mut known = [[0; WARP]; WARP];
        (0..WARP).for_each(|lane| known[lane][lane] = 1);
        let [members, arrived, own] = [[0; WARP]; 3];
        Lanes { known, arrived, members, barrier: [0; WARP], own }
    }
}

/// What was released to a barrier, for its current phase and the one before.
#[derive(Clone, Copy, Default)]
struct Phases {
    generation: [u32; 2],
    clock: [Clock; 2],
}

/// The clocks of a block.
pub(super) struct Clocks {
    warps: Vec<Clock>,
    lanes: Vec<Lanes>,
    /// What each warp had released when it passed its last fence.
    fenced: Vec<Clock>,
    /// What each warp has read of others' releases and will know after its next fence.
    pending: Vec<Clock>,
    barriers: [Phases; BARRIERS + WARPGROUPS],
    cluster: Clock,
    words: HashMap<u64, Box<Clock>>,
    other_words: Clock,
}

fn join(to: &mut Clock, from: &Clock) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = (*to).max(*from));
}

/// The lanes of a mask.
pub(super) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..WARP).filter(move |lane| mask >> lane & 1 != 0)
}

impl Clocks {
    /// For a block of so many warps, which is 1024 threads at most.
    pub(super) fn new(warps: usize) -> Clocks {
        let warps = warps.min(WARPS);
        let clock = |warp: usize| {
            let mut clock = [0; WARPS];
            clock[warp] = 1;
            clock
        };
        Clocks {
            warps: (0..warps).map(clock).collect(),
            lanes: (0..warps).map(|_| Lanes::new()).collect(),
            fenced: vec![[0; WARPS]; warps],
            pending: vec![[0; WARPS]; warps],
            barriers: [Phases::default(); BARRIERS + WARPGROUPS],
            cluster: [0; WARPS],
            words: HashMap::new(),
            other_words: [0; WARPS],
        }
    }

    /// Follows what a warp does.
    pub(super) fn follow(&mut self, what: Follow<'_>) {
        match what {
            Follow::Arrive { warp, mask, id, generation } => {
                lanes_of(mask).for_each(|lane| self.lanes[warp].barrier[lane] = id);
                self.arrive(warp, id, generation);
            }
            Follow::Depart { warp, mask, generations } => {
                let lane = mask.trailing_zeros() as usize % WARP;
                let id = self.lanes[warp].barrier[lane];
                self.depart(warp, mask, id, generations[id]);
            }
            Follow::ArriveAtCluster { warp } => {
                let released = self.release(warp);
                self.fenced[warp] = released;
                join(&mut self.cluster, &released);
            }
            Follow::DepartFromCluster { warp, mask } => {
                let released = self.cluster;
                self.acquire(warp, mask, &released);
            }
            Follow::Assemble { warp, mask, members } => self.assemble(warp, mask, members),
            Follow::Assembled { warp, mask } => self.assembled(warp, mask),
            Follow::Fence { warp, mask } => self.fence(warp, mask),
            Follow::Publish { warp, word, releases } => self.publish(warp, word, releases),
            Follow::Observe { warp, lane, word, acquires } => {
                self.observe(warp, 1 << lane, word, acquires);
            }
        }
    }

    /// Returns what an access of a lane is marked with.
    pub(super) fn now(&self, warp: usize, lane: usize) -> When {
        When {
            thread: (warp * WARP + lane) as u16,
            epoch: self.warps[warp][warp],
            lane_clock: self.lanes[warp].known[lane][lane],
        }
    }

    /// Whether something orders `before` before what the lane does now.
    pub(super) fn is_ordered(&self, before: When, warp: usize, lane: usize) -> bool {
        if before.warp() != warp {
            return self.warps[warp][before.warp()] >= before.epoch;
        }
        let lanes = &self.lanes[warp];
        before.lane() == lane
            || lanes.known[lane][before.lane()] >= before.lane_clock
            || lanes.own[lane] >= before.epoch
    }

    /// Takes what the warp has done as released, and returns it.
    fn release(&mut self, warp: usize) -> Clock {
        let clock = self.warps[warp];
        self.warps[warp][warp] += 1;
        clock
    }

    /// Lets the lanes of a warp know what was released.
    fn acquire(&mut self, warp: usize, mask: u32, released: &Clock) {
        let own = self.warps[warp][warp];
        join(&mut self.warps[warp], released);
        self.warps[warp][warp] = own;
        for lane in lanes_of(mask) {
            let known = &mut self.lanes[warp].own[lane];
            *known = (*known).max(released[warp]);
        }
    }

    /// Lanes of a warp come to barrier `id`, which is in phase `generation`.
    fn arrive(&mut self, warp: usize, id: usize, generation: u32) {
        let released = self.release(warp);
        self.fenced[warp] = released;
        let phases = &mut self.barriers[id];
        let at = generation as usize & 1;
        if phases.generation[at] != generation {
            // Whoever has passed the phase before has passed what led to it.
            phases.generation[at] = generation;
            phases.clock[at] = phases.clock[1 - at];
        }
        join(&mut phases.clock[at], &released);
    }

    /// Lanes of a warp go on behind barrier `id`, which is in phase `generation` by now.
    fn depart(&mut self, warp: usize, mask: u32, id: usize, generation: u32) {
        let passed = generation.wrapping_sub(1);
        let phases = &self.barriers[id];
        let at = passed as usize & 1;
        // A barrier may have gone on with nobody to arrive at it.
        let at = if phases.generation[at] == passed { at } else { 1 - at };
        let released = phases.clock[at];
        self.acquire(warp, mask, &released);
    }

    /// Lanes of a warp come to a `.sync` instruction.
    fn assemble(&mut self, warp: usize, mask: u32, members: &[u32; WARP]) {
        let lanes = &mut self.lanes[warp];
        for lane in lanes_of(mask) {
            lanes.members[lane] = members[lane];
            lanes.arrived[lane] = lanes.known[lane][lane];
            lanes.known[lane][lane] += 1;
        }
    }

    /// Lanes go on behind it, each with those that its member mask names.
    fn assembled(&mut self, warp: usize, mask: u32) {
        let lanes = &mut self.lanes[warp];
        let members = lanes.members;
        let mut left = mask;
        while left != 0 {
            let own = members[left.trailing_zeros() as usize % WARP];
            let group = lanes_of(left).filter(|lane| members[*lane] == own);
            let group = group.fold(0, |group, lane| group | 1u32 << lane);
            let (mut known, mut released) = ([0u32; WARP], 0);
            for member in lanes_of(own) {
                let row = lanes.known[member].iter().enumerate();
                for (lane, clock) in row {
                    let clock = if lane == member { lanes.arrived[member] } else { *clock };
                    known[lane] = known[lane].max(clock);
                }
                released = released.max(lanes.own[member]);
            }
            for lane in lanes_of(group) {
                let row = lanes.known[lane].iter_mut();
                row.zip(known).for_each(|(to, from)| *to = (*to).max(from));
                lanes.own[lane] = lanes.own[lane].max(released);
            }
            left &= !group;
        }
    }

    /// Lanes of a warp pass a fence.
    fn fence(&mut self, warp: usize, mask: u32) {
        let pending = self.pending[warp];
        self.acquire(warp, mask, &pending);
        self.fenced[warp] = self.release(warp);
    }

    /// A warp writes a word that others may read to order what they do.
    fn publish(&mut self, warp: usize, word: u64, releases: bool) {
        let released = if releases { self.release(warp) } else { self.fenced[warp] };
        if released[warp] == 0 {
            return;
        }
        let full = self.words.len() >= MAX_WORDS && !self.words.contains_key(&word);
        match full {
            true => join(&mut self.other_words, &released),
            false => join(self.words.entry(word).or_default(), &released),
        }
    }

    /// A warp reads such a word.
    fn observe(&mut self, warp: usize, mask: u32, word: u64, acquires: bool) {
        if self.words.is_empty() {
            return;
        }
        let mut seen = self.words.get(&word).map_or([0; WARPS], |clock| **clock);
        join(&mut seen, &self.other_words);
        match acquires {
            true => self.acquire(warp, mask, &seen),
            false => join(&mut self.pending[warp], &seen),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_orders_what_comes_before_it() {
        let mut clocks = Clocks::new(2);
        let early = clocks.now(0, 3);
        assert!(!clocks.is_ordered(early, 1, 0) && !clocks.is_ordered(early, 0, 4));
        clocks.arrive(0, 0, 0);
        let between = clocks.now(0, 3);
        clocks.arrive(1, 0, 0);
        clocks.depart(1, u32::MAX, 0, 1);
        assert!(clocks.is_ordered(early, 1, 0), "the other warp");
        assert!(!clocks.is_ordered(between, 1, 0), "done after it has arrived");
        clocks.depart(0, u32::MAX, 0, 1);
        assert!(clocks.is_ordered(early, 0, 4), "the own warp");
    }

    #[test]
    fn who_runs_ahead_to_the_next_phase_hides_nothing() {
        let mut clocks = Clocks::new(2);
        clocks.arrive(0, 0, 0);
        clocks.arrive(1, 0, 0);
        clocks.depart(0, u32::MAX, 0, 1);
        let ahead = clocks.now(0, 0);
        clocks.arrive(0, 0, 1);
        clocks.depart(1, u32::MAX, 0, 1);
        assert!(!clocks.is_ordered(ahead, 1, 0));
        clocks.arrive(1, 0, 1);
        clocks.depart(1, u32::MAX, 0, 2);
        assert!(clocks.is_ordered(ahead, 1, 0));
    }

    #[test]
    fn lanes_that_meet_know_each_other() {
        let mut clocks = Clocks::new(1);
        let (in_group, outside) = (clocks.now(0, 1), clocks.now(0, 9));
        let members = [0xFF; WARP];
        clocks.assemble(0, 0xFF, &members);
        clocks.assembled(0, 0xFF);
        assert!(clocks.is_ordered(in_group, 0, 2) && !clocks.is_ordered(outside, 0, 2));
        let later = clocks.now(0, 1);
        assert!(!clocks.is_ordered(later, 0, 2));
    }

    #[test]
    fn a_word_orders_between_fences() {
        let mut clocks = Clocks::new(2);
        let early = clocks.now(0, 0);
        clocks.publish(0, 8, false);
        clocks.observe(1, 1, 8, true);
        assert!(!clocks.is_ordered(early, 1, 0), "no fence");
        clocks.fence(0, 1);
        clocks.publish(0, 8, false);
        clocks.observe(1, 1, 16, true);
        assert!(!clocks.is_ordered(early, 1, 0), "another word");
        clocks.observe(1, 1, 8, false);
        assert!(!clocks.is_ordered(early, 1, 0), "not before the fence");
        clocks.fence(1, 1);
        assert!(clocks.is_ordered(early, 1, 0));
    }
}
