//! What the warps of a block, and the blocks of a cluster, share.

use crate::check::Watch;
use crate::spec::{BARRIERS, WARPGROUPS};

/// A barrier of a block, or a cluster's.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    /// Counts completions: who waits remembers the one of its arrival.
    pub generation: u32,
    /// Threads that have arrived.
    arrived: u32,
    /// Threads that it waits for; 0: all that have not exited.
    expected: u32,
    /// Arrivals with a true predicate (`bar.red`).
    trues: u32,
    /// `trues` and `arrived` of the last completion.
    pub result: (u32, u32),
}

impl Barrier {
    /// `threads` threads arrive, `trues` of them with a true predicate; `live` have not exited.
    /// Returns the generation that they wait to see pass.
    fn arrive(&mut self, threads: u32, trues: u32, expected: u32, live: u32) -> u32 {
        let generation = self.generation;
        self.arrived += threads;
        self.trues += trues;
        self.expected = expected;
        self.complete(live);
        generation
    }

    /// Ends the phase if everyone is there.
    fn complete(&mut self, live: u32) {
        let expected = if self.expected == 0 { live } else { self.expected };
        if self.arrived > 0 && self.arrived >= expected {
            *self = Barrier {
                generation: self.generation.wrapping_add(1),
                result: (self.trues, self.arrived),
                ..Barrier::default()
            };
        }
    }
}

/// A cluster; a block without one is a cluster of its own.
#[derive(Default)]
pub(crate) struct Cluster {
    pub barrier: Barrier,
    /// Threads that have not exited.
    pub live: u32,
    /// Shared memory of each block, by rank, and the blocks.
    pub shared: Vec<*mut u8>,
    pub blocks: Vec<*mut BlockState>,
}

impl Cluster {
    /// For a new cluster of `live` threads, whose blocks add their shared memory.
    pub(super) fn restart(&mut self, live: u32) {
        self.barrier = Barrier::default();
        self.live = live;
        self.shared.clear();
        self.blocks.clear();
    }

    /// `threads` threads arrive at the cluster's barrier. Returns the generation to wait for.
    pub(crate) fn arrive(&mut self, threads: u32) -> u32 {
        self.barrier.arrive(threads, 0, 0, self.live)
    }
}

/// What the warps of a block share.
pub(crate) struct BlockState {
    pub id: [u32; 3],
    /// Rank of the block in its cluster.
    pub rank: u32,
    /// Those that programs name, then one for each warpgroup.
    pub barriers: [Barrier; BARRIERS + WARPGROUPS],
    /// Threads that have not exited.
    pub live: u32,
    pub shared: Bytes,
    pub local: Bytes,
    /// The cluster, which lives as long as its blocks.
    pub cluster: *mut Cluster,
    /// What is remembered of a block whose program is checked.
    pub watch: Option<Box<Watch>>,
}

impl BlockState {
    pub(super) fn new() -> Box<BlockState> {
        Box::new(BlockState {
            id: [0; 3],
            rank: 0,
            barriers: [Barrier::default(); BARRIERS + WARPGROUPS],
            live: 0,
            shared: Bytes::default(),
            local: Bytes::default(),
            cluster: std::ptr::null_mut(),
            watch: None,
        })
    }

    /// `threads` threads arrive at barrier `id`, `trues` of them with a true predicate. Returns the
    /// generation that they wait to see pass.
    pub(crate) fn arrive(&mut self, id: usize, threads: u32, trues: u32, expected: u32) -> u32 {
        self.barriers[id].arrive(threads, trues, expected, self.live)
    }

    /// `threads` threads have exited: barriers do not wait for them.
    pub(crate) fn exit(&mut self, threads: u32) {
        self.live = self.live.saturating_sub(threads);
        for barrier in &mut self.barriers {
            barrier.complete(self.live);
        }
        // SAFETY: the cluster lives as long as the block, and one worker runs all of it.
        let cluster = unsafe { &mut *self.cluster };
        cluster.live = cluster.live.saturating_sub(threads);
        cluster.barrier.complete(cluster.live);
    }

    /// The shared memory behind window `window` of the generic addresses: 0 is the block's own, and
    /// the cluster's blocks follow by rank.
    pub(crate) fn shared_of_window(&mut self, window: u64) -> Option<*mut u8> {
        let Some(rank) = window.checked_sub(1) else { return Some(self.shared.pointer()) };
        // SAFETY: the cluster lives as long as the block, and one worker runs all of it.
        let cluster = unsafe { &*self.cluster };
        cluster.shared.get(rank as usize).copied()
    }
}

/// Memory at a multiple of 128 bytes, so that no access is split by chance.
#[derive(Default)]
pub(crate) struct Bytes {
    lines: Vec<Line>,
    /// What there is more of is a mapping of its own.
    mapping: Option<Mapping>,
}

#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct Line([u8; 128]);

/// From so many bytes on, memory is mapped: threads' stacks have room for the deepest calls, and of
/// most of it nothing is touched.
const MAPPED: usize = 1 << 20;

impl Bytes {
    pub(super) fn reserve(&mut self, bytes: usize) {
        if bytes <= self.len() {
            return;
        }
        *self = Bytes::default();
        if bytes >= MAPPED {
            self.mapping = Mapping::new(bytes);
        }
        if self.mapping.is_none() {
            self.lines = vec![Line([0; 128]); bytes.div_ceil(size_of::<Line>())];
        }
    }

    fn len(&self) -> usize {
        let lines = self.lines.len() * size_of::<Line>();
        self.mapping.as_ref().map_or(lines, |mapping| mapping.bytes)
    }

    pub(super) fn pointer(&mut self) -> *mut u8 {
        let lines = self.lines.as_mut_ptr().cast();
        self.mapping.as_ref().map_or(lines, |mapping| mapping.addr)
    }
}

/// Zeroed memory whose pages appear as they are touched.
struct Mapping {
    addr: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is this value's alone, as a vector's memory is the vector's.
unsafe impl Send for Mapping {}

impl Mapping {
    /// `None` where the system gives none.
    fn new(bytes: usize) -> Option<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel picks, changes no other memory.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        (addr != libc::MAP_FAILED).then(|| Mapping { addr: addr.cast(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `addr` and `bytes` are a mapping that `new` has made, and nothing else uses it:
        // who has its pointer is set up anew before it runs (`Bytes::reserve`), or gone.
        unsafe { libc::munmap(self.addr.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zero_and_grows() {
        let mut bytes = Bytes::default();
        for size in [1, 100, 4096, MAPPED, 3 * MAPPED + 5, 200] {
            let before = bytes.len();
            bytes.reserve(size);
            let grown = bytes.len() > before;
            assert!(bytes.len() >= size && bytes.pointer().addr().is_multiple_of(128), "{size}");
            // SAFETY: `reserve` gave that many bytes, and nothing else has them.
            let all = unsafe { std::slice::from_raw_parts_mut(bytes.pointer(), size) };
            assert!(!grown || all.iter().all(|byte| *byte == 0), "{size}");
            all.fill(7);
        }
        assert!(bytes.len() > 3 * MAPPED, "less is what there is");
    }
}
