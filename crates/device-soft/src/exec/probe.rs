//! What checked programs execute beside their own instructions ([`crate::check`]): an access is
//! looked at before it is made; what orders accesses is followed before and after.

use super::access::Place;
use super::load_store::{Access, operand_list};
use super::{Flow, Isa, Op, Warp};
use crate::block::BlockState;
use crate::check::{Follow, Touch, Watch};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::memory::{
    LOCAL_WINDOW, LOCAL_WINDOW_LEN, PARAM_WINDOW, PARAM_WINDOW_LEN, SHARED_STRIDE, SHARED_WINDOW,
    SHARED_WINDOWS,
};
use crate::spec::{BARRIERS, WARP};
use kedge_device::FindingKind;

/// `Inst::aux` of a [`Probe`], above what [`Access::encode`] takes.
pub(crate) const READS: u32 = 1 << 16;
pub(crate) const WRITES: u32 = 1 << 17;
pub(crate) const ACQUIRES: u32 = 1 << 18;
pub(crate) const RELEASES: u32 = 1 << 19;
/// The values that a store writes are operands.
pub(crate) const VALUES: u32 = 1 << 20;

/// What an address means to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// An offset in the block's own shared memory.
    Shared(u64),
    /// One in that of another block of the cluster, by rank.
    OfPeer(usize, u64),
    Global(u64),
    /// Memory of the thread alone, or that nobody writes.
    Own,
}

impl Target {
    fn of(block: &BlockState, place: Place, addr: u64) -> Target {
        match place {
            Place::Shared32 | Place::Shared64 => return Target::Shared(addr),
            Place::Global => return Target::Global(addr),
            Place::Local | Place::Frame | Place::Param => return Target::Own,
            Place::Generic => {}
        }
        let shared = addr.wrapping_sub(SHARED_WINDOW);
        if shared < SHARED_STRIDE * SHARED_WINDOWS {
            let offset = shared % SHARED_STRIDE;
            return match (shared / SHARED_STRIDE).checked_sub(1) {
                Some(rank) if rank != u64::from(block.rank) => {
                    Target::OfPeer(rank as usize, offset)
                }
                _ => Target::Shared(offset),
            };
        }
        let within = |window: u64, len: u64| addr.wrapping_sub(window) < len;
        match within(LOCAL_WINDOW, LOCAL_WINDOW_LEN) || within(PARAM_WINDOW, PARAM_WINDOW_LEN) {
            true => Target::Own,
            false => Target::Global(addr),
        }
    }

    /// What names the word there, if threads of the block may order by it what they do.
    fn word(self) -> Option<u64> {
        match self {
            Target::Shared(offset) => Some(offset / 4),
            Target::Global(addr) => Some((1 << 63) | (addr / 4)),
            Target::OfPeer(..) | Target::Own => None,
        }
    }
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..WARP).filter(move |lane| mask >> lane & 1 != 0)
}

impl Warp {
    /// The warp's block, and what that remembers.
    ///
    /// # Safety
    /// Nothing else refers to the block as long as what is returned is used.
    unsafe fn watched<'w>(&self) -> Option<(&'w BlockState, &'w mut Watch)> {
        // SAFETY: the block outlives the warp's run, only this warp runs, and what it remembers
        // lies apart.
        unsafe {
            let watch = (*self.block).watch.as_deref_mut()?;
            Some((&*self.block, &mut *std::ptr::from_mut(watch)))
        }
    }

    /// Tells what the block remembers of an access by an instruction that is not probed.
    #[cold]
    #[inline(never)]
    pub(super) fn unprobed(&self, inst: &Inst, place: Place, addr: u64, bytes: u64) {
        // SAFETY: the caller, a handler, refers to nothing of it.
        let Some((block, watch)) = (unsafe { self.watched() }) else { return };
        if !watch.is_probed(inst.line) {
            forget(block, watch, Target::of(block, place, addr), bytes);
        }
    }
}

/// Forgets who has written what, of memory that something has written which is not followed.
fn forget(block: &BlockState, watch: &mut Watch, target: Target, bytes: u64) {
    match target {
        Target::Shared(offset) => watch.forget(offset, bytes),
        Target::OfPeer(rank, offset) => {
            // SAFETY: the cluster and its blocks live as long as each of them, and one worker runs
            // all.
            unsafe {
                let cluster = &*block.cluster;
                let peer = cluster.blocks.get(rank).copied();
                if let Some(peer) = peer.filter(|peer| !std::ptr::eq(*peer, block))
                    && let Some(watch) = (*peer).watch.as_deref_mut()
                {
                    watch.forget(offset, bytes);
                }
            }
        }
        Target::Global(addr) => watch.checker.memory.write(addr, bytes),
        Target::Own => {}
    }
}

/// An access, of which `aux` tells: op = [base, [values…]].
pub(crate) struct Probe;

impl Op for Probe {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it.
        let Some((block, watch)) = (unsafe { warp.watched() }) else { return Flow::Next };
        let access = Access::decode(inst.aux & 0xFFFF);
        let values = if inst.aux & VALUES != 0 { access.count as usize } else { 0 };
        // SAFETY: lowering gave the base and the values.
        let (ops, addr) = unsafe {
            let ops = operand_list(warp, inst, 1 + values);
            (ops, warp.addresses(inst, access.place, ops[0]))
        };
        let bytes = u64::from(access.count) << access.log2;
        let (reads, writes) = (inst.aux & READS != 0, inst.aux & WRITES != 0);
        watch.begin_step(inst.line);
        let orders = access.strong && watch.checker.check.races;
        let number = warp.index as usize;
        for lane in lanes(mask) {
            let target = Target::of(block, access.place, addr[lane]);
            let word = target.word().filter(|_| orders);
            if let Some(word) = word.filter(|_| reads) {
                let acquires = inst.aux & ACQUIRES != 0;
                watch.follow(Follow::Observe { warp: number, lane, word, acquires });
            }
            match target {
                Target::Shared(offset) if fits(warp.shared_len, offset, bytes) => {
                    let (pc, strong) = (warp.pc_of(inst), access.strong);
                    let warp_index = warp.index;
                    let touch =
                        Touch { pc, warp: warp_index, lane, offset, bytes, reads, writes, strong };
                    let same = |other: Option<usize>| {
                        // SAFETY: lowering gave the values; the offset was checked.
                        values > 0 && unsafe { writes_same(warp, access, &ops, &addr, lane, other) }
                    };
                    watch.touch(touch, same);
                }
                Target::OfPeer(..) if writes => forget(block, watch, target, bytes),
                Target::Global(addr) => {
                    let memory = &watch.checker.memory;
                    if memory.is_past(addr, bytes, access.count > 1) {
                        return past(warp, inst, lane, addr, bytes);
                    }
                    if reads && memory.is_unwritten(addr, bytes) && watch.checker.check.init {
                        watch.unwritten(warp.pc_of(inst), warp.index, lane, addr, bytes);
                    }
                    if writes {
                        watch.checker.memory.write(addr, bytes);
                    }
                }
                _ => {}
            }
            if let Some(word) = word.filter(|_| writes) {
                let releases = inst.aux & RELEASES != 0;
                watch.follow(Follow::Publish { warp: number, word, releases });
            }
        }
        Flow::Next
    }
}

/// An access behind the end of an allocation.
#[cold]
fn past(warp: &mut Warp, inst: &Inst, lane: usize, addr: u64, bytes: u64) -> Flow {
    let flow = warp.fault(inst, lane, FaultKind::IllegalAddress, Some(addr), "");
    if let Some(record) = &mut warp.fault {
        record.bytes = Some(bytes);
    }
    flow
}

/// Whether an access is one that the instruction will make.
fn fits(len: u64, offset: u64, bytes: u64) -> bool {
    offset.is_multiple_of(bytes.max(1)) && offset <= len && bytes <= len - offset
}

/// Whether a lane's store writes what lane `other` writes there, or what is there.
///
/// # Safety
/// `ops` has the store's values behind the base; the lane's address is one of its shared memory.
unsafe fn writes_same(
    warp: &Warp,
    access: Access,
    ops: &[i32; 20],
    addr: &[u64; WARP],
    lane: usize,
    other: Option<usize>,
) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let own = values(warp, access, ops, lane);
        if let Some(other) = other {
            return addr[other] == addr[lane] && values(warp, access, ops, other) == own;
        }
        let offset = match access.place {
            Place::Generic => addr[lane].wrapping_sub(SHARED_WINDOW) % SHARED_STRIDE,
            _ => addr[lane],
        };
        let there = std::slice::from_raw_parts(
            warp.shared.add(offset as usize),
            (access.count as usize) << access.log2,
        );
        own.get(..there.len()) == Some(there)
    }
}

/// The bytes that a lane's store writes.
///
/// # Safety
/// `ops` has the store's values behind the base.
unsafe fn values(warp: &Warp, access: Access, ops: &[i32; 20], lane: usize) -> [u8; 128] {
    let mut bytes = [0; 128];
    let size = 1usize << access.log2;
    for (item, out) in bytes.chunks_mut(size).take(access.count as usize).enumerate() {
        let slot = ops[1 + item];
        // SAFETY: the caller's contract: of 16 bytes a value has two slots.
        let words = unsafe {
            match access.log2 {
                4 => [warp.row64(slot)[lane], warp.row64(slot + 1)[lane]],
                3 => [warp.row64(slot)[lane], 0],
                _ if access.wide_registers => [warp.row64(slot)[lane], 0],
                _ => [u64::from(warp.row32(slot)[lane]), 0],
            }
        };
        let words = words.map(u64::to_le_bytes);
        out.copy_from_slice(&words.as_flattened()[..size]);
    }
    bytes
}

/// Before a copy of `imm` bytes that is not followed: op = [to], a generic address.
pub(crate) struct ProbeCopy;

impl Op for ProbeCopy {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it; lowering gave a 64-bit operand.
        unsafe {
            let Some((block, watch)) = warp.watched() else { return Flow::Next };
            let to = *warp.row64(inst.op[0]);
            for lane in lanes(mask) {
                forget(block, watch, Target::of(block, Place::Generic, to[lane]), inst.imm);
            }
        }
        Flow::Next
    }
}

/// Before a `.sync` instruction: op = [members].
pub(crate) struct ProbeSync;

impl Op for ProbeSync {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it; lowering gave a 32-bit operand.
        unsafe {
            let Some((_, watch)) = warp.watched() else { return Flow::Next };
            let members = *warp.row32(inst.op[0]);
            if let Some(lane) = lanes(mask).find(|lane| members[*lane] >> lane & 1 == 0) {
                let members = members[lane];
                let message = format!("a mask, {members:#010x}, that does not name its thread");
                let (pc, index) = (warp.pc_of(inst), warp.index);
                watch.note(FindingKind::Barrier, pc, index, lane, message);
            }
            watch.follow(Follow::Assemble { warp: warp.index as usize, mask, members: &members });
        }
        Flow::Next
    }
}

/// Behind a `.sync` instruction.
pub(crate) struct ProbeSynced;

impl Op for ProbeSynced {
    unsafe fn run<I: Isa>(warp: &mut Warp, _: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it.
        if let Some((_, watch)) = unsafe { warp.watched() } {
            watch.follow(Follow::Assembled { warp: warp.index as usize, mask });
        }
        Flow::Next
    }
}

/// `Inst::aux` of a [`ProbeBarrier`]: the barrier is for some threads, and not for the whole block.
pub(crate) const COUNTED: u32 = 1;

/// Before a block's barrier: op = [barrier].
pub(crate) struct ProbeBarrier;

impl Op for ProbeBarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let lane = mask.trailing_zeros() as usize % WARP;
        // SAFETY: this handler alone refers to it; lowering gave a 32-bit operand.
        unsafe {
            let Some((block, watch)) = warp.watched() else { return Flow::Next };
            let id = warp.row32(inst.op[0])[lane];
            let Some(barrier) = block.barriers[..BARRIERS].get(id as usize) else {
                return Flow::Next;
            };
            let generation = barrier.generation;
            if inst.aux & COUNTED == 0 {
                watch.wait(warp.pc_of(inst), warp.index, lane, id, generation);
            }
            let warp = warp.index as usize;
            watch.follow(Follow::Arrive { warp, mask, id: id as usize, generation });
        }
        Flow::Next
    }
}

/// Behind a block's barrier.
pub(crate) struct ProbePassed;

impl Op for ProbePassed {
    unsafe fn run<I: Isa>(warp: &mut Warp, _: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it.
        if let Some((block, watch)) = unsafe { warp.watched() } {
            let generations = block.barriers.map(|barrier| barrier.generation);
            let warp = warp.index as usize;
            watch.follow(Follow::Depart { warp, mask, generations: &generations });
        }
        Flow::Next
    }
}

/// Before a cluster's barrier is arrived at (aux 0), and behind the wait for it (aux 1).
pub(crate) struct ProbeCluster;

impl Op for ProbeCluster {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it.
        if let Some((_, watch)) = unsafe { warp.watched() } {
            let warp = warp.index as usize;
            watch.follow(match inst.aux {
                0 => Follow::ArriveAtCluster { warp },
                _ => Follow::DepartFromCluster { warp, mask },
            });
        }
        Flow::Next
    }
}

/// A fence.
pub(crate) struct ProbeFence;

impl Op for ProbeFence {
    unsafe fn run<I: Isa>(warp: &mut Warp, _: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it.
        if let Some((_, watch)) = unsafe { warp.watched() } {
            watch.follow(Follow::Fence { warp: warp.index as usize, mask });
        }
        Flow::Next
    }
}

/// Before an mbarrier is arrived at ([`RELEASES`]), and behind a wait for it ([`ACQUIRES`]):
/// op = [object], a generic address.
pub(crate) struct ProbeMbarrier;

impl Op for ProbeMbarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: this handler alone refers to it; lowering gave a 64-bit operand.
        unsafe {
            let Some((block, watch)) = warp.watched() else { return Flow::Next };
            let object = *warp.row64(inst.op[0]);
            let warp = warp.index as usize;
            for lane in lanes(mask) {
                let target = Target::of(block, Place::Generic, object[lane]);
                let Some(word) = target.word() else { continue };
                watch.follow(match inst.aux & RELEASES != 0 {
                    true => Follow::Publish { warp, word, releases: true },
                    false => Follow::Observe { warp, lane, word, acquires: true },
                });
            }
        }
        Flow::Next
    }
}
