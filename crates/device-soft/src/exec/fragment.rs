//! Divergence: a warp is a set of fragments, each with its lanes, its place and its call stack.
//!
//! The fragment with the deepest call stack runs first, and among those the one with the lowest
//! program counter. PTX is laid out so that control flow joins at higher counters than it splits
//! at, so the fragment that is behind catches up and the two merge where their paths join. A
//! fragment that keeps the others waiting for too long (a spin loop) is set aside for a while:
//! every lane makes progress, as on Volta and later.

use super::warp::Warp;
use std::time::Instant;

/// A call's caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Where the caller goes on; the instruction before it is the call.
    pub return_pc: u32,
    /// The caller's frame bases, in slots, and its local memory's, in bytes.
    pub base32: u32,
    pub base64: u32,
    pub base_pred: u32,
    pub local: u32,
    /// The caller's function.
    pub function: u32,
    /// What the caller has taken by `alloca`, bytes.
    pub taken: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a `.sync` instruction, until the lanes of the mask are there too.
    Sync(u32),
    /// At a block barrier, until the barrier's generation passes.
    Barrier {
        id: u32,
        generation: u32,
    },
    /// At the cluster's barrier.
    Cluster {
        generation: u32,
    },
    /// After a `nanosleep`, until that moment.
    Asleep {
        until: Instant,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Fragment {
    pub mask: u32,
    pub pc: u32,
    pub state: State,
    /// What it waited for has happened: the instruction that waited finishes.
    pub resumed: bool,
    /// The callers, outermost first.
    pub frames: Vec<Frame>,
    pub base32: u32,
    pub base64: u32,
    pub base_pred: u32,
    /// Base of this frame's local memory, bytes.
    pub local: u32,
    pub function: u32,
    /// Bytes above this frame that `alloca` has taken ([`super::stack`]).
    pub taken: u32,
    /// When it last ran, in the warp's own count of slices.
    pub last_run: u64,
}

impl Fragment {
    /// Whether the two can be one once their places are the same.
    fn same_frame(&self, other: &Fragment) -> bool {
        self.base32 == other.base32
            && self.function == other.function
            && self.frames.len() == other.frames.len()
            && self.frames.iter().rev().eq(other.frames.iter().rev())
    }

    /// A copy with other lanes at another place.
    pub(crate) fn branch_off(&self, mask: u32, pc: u32) -> Fragment {
        Fragment {
            mask,
            pc,
            state: State::Ready,
            resumed: false,
            frames: self.frames.clone(),
            ..*self
        }
    }
}

impl Warp {
    /// Makes the next fragment current and loads its frame. False when none is ready.
    pub(crate) fn schedule(&mut self) -> bool {
        if self.others.is_empty() && self.current.mask != 0 {
            self.stop = u32::MAX;
            self.rotate = false;
            self.enter_frame();
            return self.current.state == State::Ready;
        }
        self.merge_all();
        let rotate = std::mem::take(&mut self.rotate);
        let best = if rotate { self.oldest_ready() } else { self.deepest_ready() };
        if let Some(index) = best {
            std::mem::swap(&mut self.current, &mut self.others[index]);
        } else if self.current.mask == 0 || self.current.state != State::Ready {
            return false;
        }
        self.others.retain(|fragment| fragment.mask != 0);
        self.slices += 1;
        self.current.last_run = self.slices;
        self.set_stop();
        self.enter_frame();
        true
    }

    /// The index in `others` of a fragment that should run before the current one.
    fn deepest_ready(&self) -> Option<usize> {
        let rank = |f: &Fragment| (usize::MAX - f.frames.len(), f.pc);
        let current = (self.current.mask != 0 && self.current.state == State::Ready)
            .then(|| rank(&self.current));
        let ready = self.others.iter().enumerate().filter(|(_, f)| f.state == State::Ready);
        let (index, other) = ready.min_by_key(|(_, f)| rank(f))?;
        match current {
            Some(current) if current <= rank(other) => None,
            _ => Some(index),
        }
    }

    /// The index in `others` of the ready fragment that has waited longest.
    fn oldest_ready(&self) -> Option<usize> {
        let ready = self.others.iter().enumerate().filter(|(_, f)| f.state == State::Ready);
        ready.min_by_key(|(_, f)| f.last_run).map(|(index, _)| index)
    }

    /// Where the current fragment meets another one.
    fn set_stop(&mut self) {
        self.stop = self
            .others
            .iter()
            .filter(|f| f.state == State::Ready && f.pc > self.current.pc)
            .filter(|f| f.same_frame(&self.current))
            .map(|f| f.pc)
            .min()
            .unwrap_or(u32::MAX);
    }

    /// Joins fragments that stand at the same place in the same frame in the same state.
    fn merge_all(&mut self) {
        if self.current.mask == 0 {
            match self.others.pop() {
                Some(fragment) => self.current = fragment,
                None => return,
            }
        }
        let mut index = 0;
        while index < self.others.len() {
            let (head, tail) = self.others.split_at_mut(index);
            let fragment = &mut tail[0];
            let twin = std::iter::once(&mut self.current).chain(head).find(|other| {
                other.pc == fragment.pc
                    && other.state == fragment.state
                    && other.resumed == fragment.resumed
                    && other.same_frame(fragment)
            });
            match twin {
                Some(twin) => {
                    twin.mask |= fragment.mask;
                    twin.taken = twin.taken.max(fragment.taken);
                    self.others.swap_remove(index);
                }
                None => index += 1,
            }
        }
    }

    /// Loads the current fragment's frame into the hot fields.
    pub(crate) fn enter_frame(&mut self) {
        self.active = self.current.mask;
        self.r32 = self.banks.rows32.as_mut_ptr().wrapping_add(self.current.base32 as usize);
        self.r64 = self.banks.rows64.as_mut_ptr().wrapping_add(self.current.base64 as usize);
        self.preds = self.banks.preds.as_mut_ptr().wrapping_add(self.current.base_pred as usize);
    }

    /// Sends the lanes of `mask` (some, not all, of the current ones) to `target`, the others to
    /// `next`.
    pub(crate) fn diverge(&mut self, mask: u32, target: u32, next: u32) {
        let rest = self.current.mask & !mask;
        let (low, high) = if target < next {
            ((mask, target), (rest, next))
        } else {
            ((rest, next), (mask, target))
        };
        let other = self.current.branch_off(high.0, high.1);
        self.current.mask = low.0;
        self.current.pc = low.1;
        self.active = low.0;
        self.others.push(other);
        self.stop = self.stop.min(high.1);
    }

    /// Takes the lanes of `mask` out of the warp for good.
    pub(crate) fn exit(&mut self, mask: u32) {
        self.current.mask &= !mask;
        self.active = self.current.mask;
        self.live &= !mask;
        self.release_syncs();
    }

    /// Lets fragments go on whose `.sync` mask has arrived in full. Those at one place become one.
    pub(crate) fn release_syncs(&mut self) {
        if self.others.is_empty() {
            if let State::Sync(_) = self.current.state {
                self.current.state = State::Ready;
                self.current.resumed = true;
            }
            return;
        }
        self.merge_all();
        let mut waiting = 0;
        for fragment in self.others.iter().chain([&self.current]) {
            if matches!(fragment.state, State::Sync(_)) {
                waiting |= fragment.mask;
            }
        }
        let live = self.live;
        for fragment in self.others.iter_mut().chain([&mut self.current]) {
            if let State::Sync(members) = fragment.state
                && members & live & !waiting == 0
            {
                fragment.state = State::Ready;
                fragment.resumed = true;
            }
        }
    }
}
