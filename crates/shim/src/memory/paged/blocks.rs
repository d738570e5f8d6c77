//! What is behind a large allocation's addresses, for the device: memory of its own, or the host's,
//! block by block.

use super::{Behind, State};
use crate::log;
use crate::memory::MEMORY;
use crate::memory::link::{Current, Proxy, call, post, post_alloc, post_free};
use kedge_cuda_types::CuError;
use kedge_pages::{BLOCK, PAGE, Pages};
use kedge_protocol::{Call, CtxId, Post};

/// Bytes of a block: what devices grant and map.
pub(super) const BLOCK_BYTES: u64 = BLOCK * PAGE;
/// Devices let loads that compilers widen reach so far behind the last byte of their memory.
const WIDENED: u64 = 32;

/// What a device finds at a block's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Nothing,
    Device,
    Host,
}

/// The blocks of one allocation.
#[derive(Debug)]
pub(super) struct Blocks {
    ctx: CtxId,
    device: u32,
    base: u64,
    size: u64,
    /// Where its host memory is in the shared arena, and how many bytes were taken there.
    pub(super) arena: (u64, u64),
    backings: Vec<Backing>,
}

impl Blocks {
    pub(super) fn new(current: &Current, base: u64, size: u64, arena: (u64, u64)) -> Blocks {
        let backings = vec![Backing::Nothing; size.div_ceil(BLOCK_BYTES) as usize];
        Blocks { ctx: current.ctx, device: current.device, base, size, arena, backings }
    }

    /// Returns the pages of a block.
    fn pages(&self, index: usize) -> Pages {
        let (start, end) = self.span(index);
        start / PAGE..end.div_ceil(PAGE)
    }

    /// Returns the first and the last address of a block's bytes.
    fn span(&self, index: usize) -> (u64, u64) {
        let start = self.base + index as u64 * BLOCK_BYTES;
        (start, (start + BLOCK_BYTES).min(self.base + self.size))
    }

    fn index(&self, page: u64) -> usize {
        ((page * PAGE - self.base) / BLOCK_BYTES) as usize
    }

    /// Returns where a block's host memory is in the shared arena.
    fn arena(&self, index: usize) -> u64 {
        self.arena.0 + index as u64 * BLOCK_BYTES
    }

    /// Puts memory of the device behind a block's addresses.
    ///
    /// # Errors
    /// OUT_OF_MEMORY: the device has none. What was there is there.
    fn put_device(&mut self, index: usize) -> Result<(), CuError> {
        let (start, end) = self.span(index);
        let before = self.backings[index];
        if before == Backing::Device {
            return Ok(());
        }
        self.take_host(index)?;
        let (device, addr, bytes) = (self.device, start, BLOCK_BYTES);
        let granted = match call(&Call::Grant { device, addr, bytes }) {
            // What is kept for later allocations may be what is missing.
            Err(CuError::OUT_OF_MEMORY) => MEMORY
                .heap(device)
                .and_then(|heap| heap.surrender(&Proxy))
                .and_then(|()| call(&Call::Grant { device, addr, bytes })),
            outcome => outcome,
        };
        if let Err(error) = granted {
            if before == Backing::Host {
                self.put_host(index)?;
            }
            return Err(error);
        }
        self.backings[index] = Backing::Device;
        post_alloc(self.ctx, start, end - start)
    }

    /// Puts host memory behind a block's addresses.
    fn put_host(&mut self, index: usize) -> Result<(), CuError> {
        if self.backings[index] == Backing::Host {
            return Ok(());
        }
        self.take_device(index)?;
        let (alias, end) = self.span(index);
        let size = (end - alias).next_multiple_of(PAGE);
        call(&Call::Alias { alias, addr: self.arena(index), size })?;
        self.backings[index] = Backing::Host;
        call(&Call::Share { addr: alias, size: shared(alias, end) })
    }

    fn take_device(&mut self, index: usize) -> Result<(), CuError> {
        if self.backings[index] != Backing::Device {
            return Ok(());
        }
        let (start, end) = self.span(index);
        self.backings[index] = Backing::Nothing;
        post_free(start, end - start)?;
        call(&Call::Return { device: self.device, addr: start, bytes: BLOCK_BYTES })
    }

    fn take_host(&mut self, index: usize) -> Result<(), CuError> {
        if self.backings[index] != Backing::Host {
            return Ok(());
        }
        let (alias, end) = self.span(index);
        self.backings[index] = Backing::Nothing;
        post(&Post::Unshare { addr: alias, size: shared(alias, end) })?;
        post(&Post::Unalias { alias, size: (end - alias).next_multiple_of(PAGE) })
    }

    /// Leaves nothing behind the addresses.
    pub(super) fn end(&mut self) -> Result<(), CuError> {
        for index in 0..self.backings.len() {
            self.take_device(index)?;
            self.take_host(index)?;
        }
        Ok(())
    }
}

/// Returns how many bytes of host memory a device may use for those of a block.
fn shared(start: u64, end: u64) -> u64 {
    (end - start).next_multiple_of(WIDENED)
}

impl State {
    /// Returns the blocks that hold a page, if it is of such an allocation.
    fn blocks(&self, page: u64) -> Option<&Blocks> {
        let (start, region) = self.regions.range(..=page).next_back()?;
        match &region.behind {
            Behind::Blocks(blocks) if (page - start) * PAGE < region.size => Some(blocks),
            _ => None,
        }
    }

    fn blocks_mut(&mut self, page: u64) -> Option<&mut Blocks> {
        let (start, region) = self.regions.range_mut(..=page).next_back()?;
        match &mut region.behind {
            Behind::Blocks(blocks) if (page - start) * PAGE < region.size => Some(blocks),
            _ => None,
        }
    }

    /// Returns the pages of the block that some of its pages are of; these, if there is none.
    pub(super) fn block_of(&self, pages: &Pages) -> Pages {
        let blocks = self.blocks(pages.start);
        blocks.map_or(pages.clone(), |blocks| blocks.pages(blocks.index(pages.start)))
    }

    /// Returns where the host memory of the block that begins at a page is in the shared arena.
    pub(super) fn arena_of(&self, page: u64) -> Option<u64> {
        self.blocks(page).map(|blocks| blocks.arena(blocks.index(page)))
    }

    /// Whether devices find host memory at a page's addresses.
    pub(super) fn is_host_memory(&self, page: u64) -> bool {
        let found = self.blocks(page).map(|blocks| blocks.backings[blocks.index(page)]);
        found == Some(Backing::Host)
    }

    /// Takes device memory for some pages. Returns the blocks for which there is none.
    pub(super) fn reserve(&mut self, pages: &Pages) -> Vec<Pages> {
        let mut refused = Vec::new();
        self.each_block(pages, |blocks, index| match blocks.put_device(index) {
            Ok(()) => {}
            Err(error) => {
                if error != CuError::OUT_OF_MEMORY {
                    log::line(&format!("managed memory: a block cannot be moved: {error}"));
                }
                refused.push(blocks.pages(index));
            }
        });
        refused
    }

    /// Has devices find host memory at the addresses of some pages.
    pub(super) fn make_host_memory(&mut self, pages: &Pages) {
        self.each_block(pages, |blocks, index| {
            if let Err(error) = blocks.put_host(index) {
                log::line(&format!("managed memory is nowhere: {error}"));
            }
        });
    }

    fn each_block(&mut self, pages: &Pages, mut each: impl FnMut(&mut Blocks, usize)) {
        let mut at = pages.start;
        while at < pages.end {
            if let Some(blocks) = self.blocks_mut(at) {
                let index = blocks.index(at);
                each(blocks, index);
            }
            at = (at / BLOCK + 1) * BLOCK;
        }
    }
}
