//! Allocations: what is behind them, how they come and go, and what gives way to others.

use super::blocks::{BLOCK_BYTES, Blocks};
use super::{PAGED, Paged, State, paged, refused};
use crate::memory::alloc::take_device_memory;
use crate::memory::host::drop_pages;
use crate::memory::link::{Current, Proxy, ask, current, post_alloc, post_free};
use crate::memory::table::{Allocation, Kind};
use crate::memory::{MEMORY, pool, ranges};
use crate::{capture, log};
use kedge_cuda_types::CuError;
use kedge_pages::{Attach, BLOCK, NodeId, PAGE};
use kedge_protocol::Call;

/// Each block that is in host memory is a mapping of the proxy's, of which a client has 16,384 for
/// all that it shares, and some of the program's own.
const MAX_BLOCKS: u64 = 8192;

/// What lies where an allocation is.
#[derive(Debug)]
pub(super) struct Region {
    /// Bytes that the program asked for; devices check that no others are touched.
    pub(super) size: u64,
    pub(super) behind: Behind,
}

#[derive(Debug)]
pub(super) enum Behind {
    /// A part of what the device's heap has: where that begins, and its bytes.
    Heap { raw: u64, taken: u64 },
    /// Memory that goes to the host, block by block, where the device is short of it.
    Blocks(Blocks),
}

/// Allocates `size` bytes.
pub(in crate::memory) fn alloc(kind: Kind, size: u64) -> Result<u64, CuError> {
    let current = current()?;
    if size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let paged = paged()?;
    let bytes = ranges::round_up(size, PAGE).ok_or(CuError::OUT_OF_MEMORY)?;
    // What is smaller than a block shares one with others, as long as the device has room.
    let small = bytes < BLOCK_BYTES;
    let heap = || from_heap(&current, size, bytes);
    let blocks = || match paged.lock().has_blocks_for(bytes) {
        true => from_blocks(&current, size, bytes),
        false => Err(CuError::OUT_OF_MEMORY),
    };
    let made = if small { heap() } else { blocks() };
    let (base, behind) = match made {
        Err(CuError::OUT_OF_MEMORY) if small => blocks()?,
        Err(CuError::OUT_OF_MEMORY) => heap()?,
        made => made?,
    };
    let node = NodeId(current.device);
    let pages = base / PAGE..(base + bytes) / PAGE;
    // A touch of a page that is nobody's is refused with the engine locked.
    let mut state = paged.lock();
    if let Err(error) = paged.view.open(&pages) {
        drop(state);
        log::line(&format!("cuMemAllocManaged: cannot map pages: {error}"));
        end(current.device, base, Region { size, behind })?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    let fixed = matches!(behind, Behind::Heap { .. });
    state.regions.insert(pages.start, Region { size, behind });
    let actions = match fixed {
        true => state.engine.alloc_fixed(pages, Attach::Global, node),
        false => {
            look_for_room(&mut state, current.device, bytes)?;
            state.engine.alloc(pages, Attach::Global, node)
        }
    };
    paged.carry_out(&mut state, actions.map_err(refused)?);
    drop(state);
    MEMORY.record(&current, kind, base, size, bytes);
    Ok(base)
}

impl State {
    /// Whether so many bytes more may lie in blocks.
    fn has_blocks_for(&self, bytes: u64) -> bool {
        let in_blocks = |region: &&Region| matches!(region.behind, Behind::Blocks(_));
        let sizes = self.regions.values().filter(in_blocks).map(|region| region.size);
        let blocks = sizes.chain([bytes]).map(|size| size.div_ceil(BLOCK_BYTES));
        blocks.fold(0, u64::saturating_add) <= MAX_BLOCKS
    }
}

/// Takes a part of the device's memory, in whole pages.
fn from_heap(current: &Current, size: u64, bytes: u64) -> Result<(u64, Behind), CuError> {
    let (raw, taken) = take_pages(current.device, bytes)?;
    let base = raw.next_multiple_of(PAGE);
    post_alloc(current.ctx, base, size)?;
    Ok((base, Behind::Heap { raw, taken }))
}

/// Takes device memory in which so many bytes lie in whole pages. What the heap gives begins
/// anywhere if it is small, but at a page where there are only such allocations.
fn take_pages(device: u32, bytes: u64) -> Result<(u64, u64), CuError> {
    let (raw, raw_size) = take_device_memory(device, bytes)?;
    if raw.is_multiple_of(PAGE) {
        return Ok((raw, raw_size));
    }
    MEMORY.heap(device)?.put(raw, raw_size, &Proxy)?;
    take_device_memory(device, bytes.checked_add(PAGE).ok_or(CuError::OUT_OF_MEMORY)?)
}

/// Takes addresses of the device's, and as much host memory as all of it may need: so no block is
/// ever without a place, and what is more than both have is refused here.
fn from_blocks(current: &Current, size: u64, bytes: u64) -> Result<(u64, Behind), CuError> {
    let heap = MEMORY.heap(current.device)?;
    let reserved = ranges::round_up(bytes, BLOCK_BYTES).ok_or(CuError::OUT_OF_MEMORY)?;
    // Devices reach it at the blocks' addresses alone: while it is registered with them its pages
    // cannot be given back.
    let (arena, taken) = MEMORY.shared.take(bytes)?;
    let Some(base) = heap.reserve(reserved, BLOCK_BYTES, 0) else {
        MEMORY.shared.put(arena, taken);
        return Err(CuError::OUT_OF_MEMORY);
    };
    // Memory that the device can have for the asking is not to be missing.
    pool::trim_idle(current.device);
    Ok((base, Behind::Blocks(Blocks::new(current, base, size, (arena, taken)))))
}

/// Has the engine know how much memory the device has left, of which so many bytes are wanted.
pub(super) fn look_for_room(state: &mut State, device: u32, wanted: u64) -> Result<(), CuError> {
    let ask = || ask::<Result<u64, u32>>(&Call::MemFree { device })?.map_err(CuError);
    let mut free = ask()?;
    if free < wanted && MEMORY.heap(device)?.spare() > 0 {
        MEMORY.heap(device)?.surrender(&Proxy)?;
        free = ask()?;
    }
    state.engine.set_free(NodeId(device), free / BLOCK_BYTES * BLOCK).map_err(refused)
}

/// Gives memory back that no work uses any longer.
pub(in crate::memory) fn release(found: &Allocation) -> Result<(), CuError> {
    let paged = PAGED.get().ok_or(CuError::INVALID_VALUE)?;
    let start = found.base / PAGE;
    let mut state = paged.done(|state| state.engine.free(start))?;
    let region = state.regions.remove(&start).ok_or(CuError::INVALID_VALUE)?;
    state.attached.remove(&start);
    paged.view.close(&(start..start + found.size.div_ceil(PAGE)));
    drop(state);
    end(found.device, found.base, region)
}

/// Gives back what is behind a region that is managed no more.
fn end(device: u32, base: u64, region: Region) -> Result<(), CuError> {
    match region.behind {
        Behind::Heap { raw, taken } => {
            post_free(base, region.size)?;
            MEMORY.heap(device)?.put(raw, taken, &Proxy)
        }
        Behind::Blocks(mut blocks) => {
            blocks.end()?;
            let (arena, taken) = blocks.arena;
            let bytes = region.size.next_multiple_of(PAGE);
            drop_pages(arena, taken)?;
            MEMORY.shared.put(arena, taken);
            MEMORY.heap(device)?.unreserve(base, bytes.next_multiple_of(BLOCK_BYTES));
            Ok(())
        }
    }
}

/// Something else wants device memory of which there is too little: managed memory goes to the
/// host, what was used least recently first. Returns whether any has.
///
/// # Errors
/// The proxy is gone.
pub(in crate::memory) fn give_way(device: u32, bytes: u64) -> Result<bool, CuError> {
    let Some(paged) = PAGED.get().filter(|_| super::in_use()) else { return Ok(false) };
    let (node, pages) = (NodeId(device), bytes.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK));
    let used = |paged: &Paged| paged.lock().engine.used(node);
    let before = used(paged);
    if before == 0 {
        return Ok(false);
    }
    drop(paged.done(|state| state.engine.give_way(node, pages))?);
    Ok(used(paged) < before)
}
