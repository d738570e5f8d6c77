//! What is behind a large allocation's addresses, for the device: memory of its own, or the host's,
//! block by block.

use super::{Behind, State};
use crate::log;
use crate::memory::MEMORY;
use crate::memory::host::drop_pages;
use crate::memory::link::{Current, Proxy, call, call_each, post, post_alloc, post_free};
use kedge_cuda_types::CuError;
use kedge_pages::{BLOCK, PAGE, Pages};
use kedge_protocol::{Call, CtxId, Post};
use std::ops::Range;

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

    /// Returns the page behind the last.
    fn end_page(&self) -> u64 {
        (self.base + self.size).div_ceil(PAGE)
    }

    /// Returns where a block's host memory is in the shared arena.
    fn arena(&self, index: usize) -> u64 {
        self.arena.0 + index as u64 * BLOCK_BYTES
    }

    /// Puts memory of the device behind the addresses of some blocks. What cannot be is as it was:
    /// returns these blocks, with OUT_OF_MEMORY where the device has none.
    fn put_device(&mut self, indices: Range<usize>) -> Vec<(usize, CuError)> {
        let wanted: Vec<usize> = self.not(Backing::Device, indices);
        let before: Vec<Backing> = wanted.iter().map(|index| self.backings[*index]).collect();
        let taken = self.take_host(&wanted).and_then(|()| self.grant(&wanted));
        let outcomes = match taken {
            Ok(outcomes) => outcomes,
            Err(error) => return wanted.into_iter().map(|index| (index, error)).collect(),
        };
        let mut refused = Vec::new();
        for (index, granted) in wanted.iter().copied().zip(outcomes) {
            let (start, end) = self.span(index);
            let granted = granted.and_then(|()| {
                self.backings[index] = Backing::Device;
                post_alloc(self.ctx, start, end - start)
            });
            refused.extend(granted.err().map(|error| (index, error)));
        }
        let hosts = wanted.into_iter().zip(before).filter(|(_, was)| *was == Backing::Host);
        let back = hosts.filter(|(index, _)| refused.iter().any(|(other, _)| other == index));
        for (index, _) in back.collect::<Vec<_>>() {
            refused.extend(self.put_host(index..index + 1));
        }
        refused
    }

    /// Asks for the device's memory: what it says of each block.
    fn grant(&self, indices: &[usize]) -> Result<Vec<Result<(), CuError>>, CuError> {
        let (device, bytes) = (self.device, BLOCK_BYTES);
        let ask = |indices: &[usize]| {
            let call = |index: &usize| Call::Grant { device, addr: self.span(*index).0, bytes };
            call_each(&indices.iter().map(call).collect::<Vec<_>>())
        };
        let mut granted = ask(indices)?;
        let is_short = |outcome: &Result<(), CuError>| *outcome == Err(CuError::OUT_OF_MEMORY);
        let heap = MEMORY.heap(device)?;
        // What is kept for later allocations may be what is missing.
        if granted.iter().any(is_short) && heap.spare() > 0 {
            heap.surrender(&Proxy)?;
            let short: Vec<usize> =
                (0..granted.len()).filter(|at| is_short(&granted[*at])).collect();
            let again: Vec<usize> = short.iter().map(|at| indices[*at]).collect();
            for (at, outcome) in short.into_iter().zip(ask(&again)?) {
                granted[at] = outcome;
            }
        }
        Ok(granted)
    }

    /// Puts host memory behind the addresses of some blocks. Returns those of which that, or the
    /// devices' access, has failed.
    fn put_host(&mut self, indices: Range<usize>) -> Vec<(usize, CuError)> {
        let wanted = self.not(Backing::Host, indices);
        let each = |error| wanted.iter().map(|index| (*index, error)).collect();
        if let Err(error) = self.take_device(&wanted) {
            return each(error);
        }
        let calls = wanted.iter().flat_map(|index| {
            let (alias, end) = self.span(*index);
            let (addr, size) = (self.arena(*index), (end - alias).next_multiple_of(PAGE));
            let share = Call::Share { addr: alias, size: shared(alias, end) };
            // Where that is not shown, this is refused.
            [Call::Alias { alias, addr, size }, share]
        });
        let outcomes = match call_each(&calls.collect::<Vec<_>>()) {
            Ok(outcomes) => outcomes,
            Err(error) => return each(error),
        };
        let mut failed = Vec::new();
        for (index, both) in wanted.iter().zip(outcomes.chunks_exact(2)) {
            match (both[0], both[1]) {
                (Ok(()), Ok(())) => self.backings[*index] = Backing::Host,
                (Err(error), _) => failed.push((*index, error)),
                (Ok(()), Err(error)) => {
                    let (alias, end) = self.span(*index);
                    let size = (end - alias).next_multiple_of(PAGE);
                    let ended = post(&Post::Unalias { alias, size });
                    failed.push((*index, ended.err().unwrap_or(error)));
                }
            }
        }
        failed
    }

    /// Returns the blocks of some that do not have this behind them.
    fn not(&self, backing: Backing, indices: Range<usize>) -> Vec<usize> {
        indices.filter(|index| self.backings[*index] != backing).collect()
    }

    /// Has those of some blocks that lie in device memory lie nowhere.
    fn take_device(&mut self, indices: &[usize]) -> Result<(), CuError> {
        let (device, bytes) = (self.device, BLOCK_BYTES);
        let mut calls = Vec::new();
        for index in indices.iter().copied() {
            if self.backings[index] == Backing::Device {
                let (start, end) = self.span(index);
                self.backings[index] = Backing::Nothing;
                post_free(start, end - start)?;
                calls.push(Call::Return { device, addr: start, bytes });
            }
        }
        call_each(&calls)?.into_iter().collect()
    }

    /// Has those of some blocks that lie in host memory lie nowhere.
    fn take_host(&mut self, indices: &[usize]) -> Result<(), CuError> {
        for index in indices.iter().copied() {
            if self.backings[index] == Backing::Host {
                let (alias, end) = self.span(index);
                self.backings[index] = Backing::Nothing;
                post(&Post::Unshare { addr: alias, size: shared(alias, end) })?;
                post(&Post::Unalias { alias, size: (end - alias).next_multiple_of(PAGE) })?;
            }
        }
        Ok(())
    }

    /// Leaves nothing behind the addresses.
    pub(super) fn end(&mut self) -> Result<(), CuError> {
        let all: Vec<usize> = (0..self.backings.len()).collect();
        self.take_device(&all)?;
        self.take_host(&all)
    }
}

/// Whether a device takes host memory at its own addresses: a page is put there, and taken away.
pub(super) fn takes_host_memory(device: u32) -> Result<bool, CuError> {
    let heap = MEMORY.heap(device)?;
    let (addr, taken) = MEMORY.shared.take(PAGE)?;
    let Some(alias) = heap.reserve(BLOCK_BYTES, BLOCK_BYTES, 0) else {
        MEMORY.shared.put(addr, taken);
        return Ok(false);
    };
    let size = PAGE;
    let taken_there = call(&Call::Alias { alias, addr, size }).and_then(|()| {
        let shared = call(&Call::Share { addr: alias, size });
        if shared.is_ok() {
            post(&Post::Unshare { addr: alias, size })?;
        }
        post(&Post::Unalias { alias, size }).and(shared)
    });
    drop_pages(addr, taken)?;
    MEMORY.shared.put(addr, taken);
    heap.unreserve(alias, BLOCK_BYTES);
    match taken_there {
        Err(CuError::DEVICE_UNAVAILABLE) => Err(CuError::DEVICE_UNAVAILABLE),
        taken_there => Ok(taken_there.is_ok()),
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
        self.each_run(pages, |blocks, run| {
            for (index, error) in blocks.put_device(run) {
                if error != CuError::OUT_OF_MEMORY {
                    log::line(&format!("managed memory: a block cannot be moved: {error}"));
                }
                refused.push(blocks.pages(index));
            }
        });
        refused.sort_by_key(|pages| pages.start);
        refused.dedup();
        refused
    }

    /// Has devices find host memory at the addresses of some pages.
    pub(super) fn make_host_memory(&mut self, pages: &Pages) {
        self.each_run(pages, |blocks, run| {
            for (_, error) in blocks.put_host(run) {
                log::line(&format!("managed memory is nowhere: {error}"));
            }
        });
    }

    /// Goes through the allocations that have blocks among some pages: which of each.
    fn each_run(&mut self, pages: &Pages, mut each: impl FnMut(&mut Blocks, Range<usize>)) {
        let mut at = pages.start;
        while at < pages.end {
            let Some(blocks) = self.blocks_mut(at) else {
                at = (at / BLOCK + 1) * BLOCK;
                continue;
            };
            let end = pages.end.min(blocks.end_page());
            let run = blocks.index(at)..blocks.index(end - 1) + 1;
            each(blocks, run);
            at = end;
        }
    }
}
