//! Memory that a pool keeps between a free and the next allocation, and who may have it when.

use kedge_protocol::StreamId;

/// A freed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) addr: u64,
    /// Bytes that it occupies.
    pub(super) size: u64,
    /// The stream in whose order it was freed; `None`: all work that used it is over.
    pub(super) stream: Option<StreamId>,
    /// Sequence number of the free: the block is anybody's when everything up to it is complete.
    pub(super) freed_at: u64,
}

/// A block may serve an allocation of down to 1/`SLACK` of its size.
const SLACK: u64 = 2;

/// A pool's freed blocks. They are neither split nor merged: what programs allocate in stream order
/// comes in the same sizes again and again.
#[derive(Debug, Default)]
pub(super) struct Cache {
    blocks: Vec<Block>,
    bytes: u64,
}

impl Cache {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn put(&mut self, block: Block) {
        self.bytes += block.size;
        self.blocks.push(block);
    }

    /// The smallest block for `size` bytes that `stream` may use now, if everything up to
    /// `completed` is: one that was freed in its own order, or whose free is complete.
    pub(super) fn take(&mut self, size: u64, stream: StreamId, completed: u64) -> Option<Block> {
        let usable = |block: &Block| {
            let fits = block.size >= size && block.size / SLACK <= size;
            fits && (block.stream == Some(stream) || block.is_free(completed))
        };
        let candidates = self.blocks.iter().enumerate().filter(|(_, block)| usable(block));
        let (index, _) = candidates.min_by_key(|(_, block)| block.size)?;
        self.bytes -= self.blocks[index].size;
        Some(self.blocks.swap_remove(index))
    }

    /// Takes out blocks whose free is complete until no more than `keep` bytes remain.
    pub(super) fn trim(&mut self, keep: u64, completed: u64) -> Vec<Block> {
        let mut trimmed = Vec::new();
        let mut index = 0;
        while self.bytes > keep && index < self.blocks.len() {
            if self.blocks[index].is_free(completed) {
                self.bytes -= self.blocks[index].size;
                trimmed.push(self.blocks.swap_remove(index));
            } else {
                index += 1;
            }
        }
        trimmed
    }
}

impl Block {
    fn is_free(&self, completed: u64) -> bool {
        self.stream.is_none() || self.freed_at <= completed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(addr: u64, size: u64, stream: u32, freed_at: u64) -> Block {
        Block { addr, size, stream: Some(StreamId(stream)), freed_at }
    }

    #[test]
    fn a_block_is_its_own_stream_s_at_once_and_others_later() {
        let mut cache = Cache::default();
        cache.put(block(0, 1024, 1, 10));
        assert_eq!(cache.take(1024, StreamId(2), 9), None);
        assert_eq!(cache.take(1024, StreamId(1), 0).map(|b| b.addr), Some(0));
        cache.put(block(0, 1024, 1, 10));
        assert_eq!(cache.take(1024, StreamId(2), 10).map(|b| b.addr), Some(0));
        assert_eq!(cache.bytes(), 0);
    }

    #[test]
    fn the_smallest_that_fits_without_waste() {
        let mut cache = Cache::default();
        for (addr, size) in [(0, 4096), (1, 2048), (2, 512)] {
            cache.put(block(addr, size, 1, 0));
        }
        assert_eq!(cache.take(1536, StreamId(1), 0).map(|b| b.addr), Some(1));
        assert_eq!(cache.take(1536, StreamId(1), 0), None, "4096 bytes are too many");
        assert_eq!(cache.take(512, StreamId(1), 0).map(|b| b.addr), Some(2));
    }

    #[test]
    fn only_what_nobody_uses_is_trimmed() {
        let mut cache = Cache::default();
        cache.put(block(0, 1000, 1, 5));
        cache.put(block(1, 1000, 1, 15));
        cache.put(Block { stream: None, ..block(2, 1000, 1, 0) });
        assert_eq!(cache.trim(2500, 10).len(), 1);
        assert_eq!(cache.trim(0, 10).len(), 1);
        assert_eq!(cache.bytes(), 1000);
        assert_eq!(cache.trim(0, 15).len(), 1);
    }
}
