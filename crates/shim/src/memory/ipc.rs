//! Memory that other processes open by an IPC handle (`cuIpcGetMemHandle`).
//!
//! A handle names the slab in which an allocation lies, as the exporting proxy tells it to others,
//! and the allocation's place in it. Who opens it maps the whole slab, once for each of its
//! devices, at an address of its own arena.

use super::link::{ask, call, current, on_device, post, quiesce};
use super::ranges::LARGE;
use super::table::{Allocation, Kind};
use super::{MEMORY, give, vmm};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUipcMemHandle;
use kedge_cuda_types::handle::CUdeviceptr;
use kedge_cuda_types::memory::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
use kedge_protocol::{Call, Imported, MemHandleId, PeerName, Post, SharedSlab};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
const LAZY_PEERS: u32 = 1;
/// Ends a handle of memory.
const MAGIC: u64 = u64::from_le_bytes(*b"kedgemem");
/// No slab is larger.
const MAX_SLAB: u64 = 1 << 40;
/// How long an exact device may be at work before its memory can be shared.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a handle says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    name: PeerName,
    /// The allocation in the slab.
    offset: u64,
    size: u64,
    slab: u64,
}

impl Place {
    fn pack(&self) -> CUipcMemHandle {
        let mut bytes = [0; 64];
        bytes[..16].copy_from_slice(&self.name.proxy);
        bytes[16..32].copy_from_slice(&self.name.key);
        let words = [self.offset, self.size, self.slab, MAGIC];
        for (to, word) in bytes[32..].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        CUipcMemHandle(bytes)
    }

    /// INVALID_VALUE for bytes that `pack` has not made.
    fn unpack(handle: &CUipcMemHandle) -> Result<Place, CuError> {
        let (names, numbers) = handle.0.split_at(32);
        let (mut proxy, mut key, mut words) = ([0; 16], [0; 16], [0; 4]);
        proxy.copy_from_slice(&names[..16]);
        key.copy_from_slice(&names[16..]);
        for (word, from) in words.iter_mut().zip(numbers.chunks_exact(8)) {
            *word = from.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        let [offset, size, slab, magic] = words;
        let sound = magic == MAGIC && slab <= MAX_SLAB && slab.is_multiple_of(LARGE);
        let inside = size > 0 && offset.checked_add(size).is_some_and(|end| end <= slab);
        if !sound || !inside {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(Place { name: PeerName { proxy, key }, offset, size, slab })
    }
}

/// A slab of another process that is mapped here.
#[derive(Debug)]
struct Opened {
    name: PeerName,
    handle: MemHandleId,
    base: u64,
    slab: u64,
    device: u32,
    /// Offset → size, and how often it is open.
    uses: BTreeMap<u64, (u64, u32)>,
}

impl Opened {
    /// Whether an allocation can be opened here beside those that are. Others were there before it,
    /// where the exporter has freed them since.
    fn has_room(&self, place: &Place) -> bool {
        let before = self.uses.range(..place.offset + place.size).next_back();
        before.is_none_or(|(&offset, &(size, _))| {
            offset + size <= place.offset || (offset, size) == (place.offset, place.size)
        })
    }
}

fn opened() -> MutexGuard<'static, Vec<Opened>> {
    static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) unsafe fn cuIpcGetMemHandle(
    handle: *mut CUipcMemHandle,
    dptr: CUdeviceptr,
) -> Result<(), CuError> {
    let found = MEMORY.table().find(dptr).cloned().ok_or(CuError::INVALID_VALUE)?;
    if handle.is_null() || found.kind != Kind::Device {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, handle_of(&found)?) }
}

/// The handle by which others open an allocation.
pub(super) fn handle_of(found: &Allocation) -> Result<CUipcMemHandle, CuError> {
    let SharedSlab { name, base, size } = share(found.base)?;
    Ok(Place { name, offset: found.base - base, size: found.size, slab: size }.pack())
}

/// A handle for those alone who open it by the pool that `tag` names: the tag stands in the place
/// of what ends every other handle.
pub(super) fn for_pool(handle: CUipcMemHandle, tag: u64) -> CUipcMemHandle {
    let mut bytes = handle.0;
    bytes[56..].copy_from_slice(&tag.to_le_bytes());
    CUipcMemHandle(bytes)
}

/// What [`for_pool`] was given; INVALID_VALUE where that was for another pool.
pub(super) fn of_pool(handle: &CUipcMemHandle, tag: u64) -> Result<CUipcMemHandle, CuError> {
    let own = handle.0[56..] == tag.to_le_bytes();
    if own { Ok(for_pool(*handle, MAGIC)) } else { Err(CuError::INVALID_VALUE) }
}

/// Lets others open the slab that holds `addr`; waits for an exact device to be at rest.
fn share(addr: u64) -> Result<SharedSlab, CuError> {
    let begin = Instant::now();
    loop {
        match ask::<Result<SharedSlab, u32>>(&Call::SlabShare { addr })?.map_err(CuError) {
            Err(CuError::NOT_READY) if begin.elapsed() < QUIESCE_TIMEOUT => quiesce()?,
            outcome => return outcome,
        }
        std::thread::yield_now();
    }
}

pub(crate) unsafe fn cuIpcOpenMemHandle_v2(
    dptr: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: u32,
) -> Result<(), CuError> {
    let current = current()?;
    if dptr.is_null() || flags & !LAZY_PEERS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let addr = open_handle(&handle, current.device, false)?;
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, addr) }
}

/// Opens another process's allocation for a device: its address. `pooled`: it is a pool's.
pub(super) fn open_handle(
    handle: &CUipcMemHandle,
    device: u32,
    pooled: bool,
) -> Result<u64, CuError> {
    let place = Place::unpack(handle)?;
    let mut opened = opened();
    let fits =
        |slab: &Opened| (slab.name, slab.device) == (place.name, device) && slab.has_room(&place);
    let index = match opened.iter().position(fits) {
        Some(index) => index,
        None => {
            opened.push(open(device, &place)?);
            opened.len() - 1
        }
    };
    let slab = &mut opened[index];
    let (addr, size) = (slab.base + place.offset, place.size);
    let uses = slab.uses.entry(place.offset).or_insert((size, 0));
    uses.1 += 1;
    if uses.1 == 1 {
        MEMORY.record(&on_device(device), Kind::Peer { pooled }, addr, size, size);
    }
    Ok(addr)
}

/// The first version, with the same arguments.
pub(crate) unsafe fn cuIpcOpenMemHandle(
    dptr: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: u32,
) -> Result<(), CuError> {
    // SAFETY: `cuIpcOpenMemHandle_v2` asks the same of these arguments as this call does.
    unsafe { cuIpcOpenMemHandle_v2(dptr, handle, flags) }
}

/// Maps a slab of another process for a device.
fn open(device: u32, place: &Place) -> Result<Opened, CuError> {
    let handle = vmm::new_id();
    let imported = ask::<Result<Imported, u32>>(&Call::PeerOpen { handle, name: place.name })?;
    let imported = imported.map_err(CuError)?;
    let mapped = match imported.size {
        Some(size) if size != place.slab => Err(CuError::INVALID_VALUE),
        _ => map(handle, device, place.slab),
    };
    let base = match mapped {
        Ok(base) => base,
        Err(error) => {
            post(&Post::HandleDestroy { handle })?;
            return Err(error);
        }
    };
    let (name, slab) = (place.name, place.slab);
    Ok(Opened { name, handle, base, slab, device, uses: BTreeMap::new() })
}

/// Maps all `size` bytes of a handle where there is room, for `device` to read and write.
fn map(handle: MemHandleId, device: u32, size: u64) -> Result<u64, CuError> {
    let heap = MEMORY.heap(device)?;
    let addr = heap.reserve(size, LARGE, 0).ok_or(CuError::OUT_OF_MEMORY)?;
    let mapped = call(&Call::HandleMap { handle, addr, size, offset: 0 }).and_then(|()| {
        let access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let opened = call(&Call::HandleAccess { addr, size, device, access });
        opened.or_else(|error| post(&Post::HandleUnmap { addr, size }).and(Err(error)))
    });
    if mapped.is_err() {
        heap.unreserve(addr, size);
    }
    mapped.map(|()| addr)
}

pub(crate) unsafe fn cuIpcCloseMemHandle(dptr: CUdeviceptr) -> Result<(), CuError> {
    close(dptr)
}

/// Ends one opening of another process's allocation.
pub(super) fn close(dptr: u64) -> Result<(), CuError> {
    let mut opened = opened();
    let at = |slab: &Opened| dptr.checked_sub(slab.base).filter(|o| slab.uses.contains_key(o));
    let found = opened.iter().enumerate().find_map(|(index, slab)| Some((index, at(slab)?)));
    let (index, offset) = found.ok_or(CuError::INVALID_VALUE)?;
    let uses = opened[index].uses.get_mut(&offset).ok_or(CuError::INVALID_VALUE)?;
    uses.1 -= 1;
    if uses.1 > 0 {
        return Ok(());
    }
    opened[index].uses.remove(&offset);
    MEMORY.table_mut().remove(dptr, |found| matches!(found.kind, Kind::Peer { .. }));
    if !opened[index].uses.is_empty() {
        return Ok(());
    }
    let slab = opened.swap_remove(index);
    // Nothing that was submitted may still use it.
    quiesce()?;
    post(&Post::HandleUnmap { addr: slab.base, size: slab.slab })?;
    post(&Post::HandleDestroy { handle: slab.handle })?;
    MEMORY.heap(slab.device)?.unreserve(slab.base, slab.slab);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        let name = PeerName { proxy: [3; 16], key: [4; 16] };
        Place { name, offset: 512, size: 1000, slab: 16 * LARGE }
    }

    #[test]
    fn a_handle_says_what_was_packed() {
        assert_eq!(Place::unpack(&place().pack()), Ok(place()));
    }

    #[test]
    fn nonsense_is_no_handle() {
        let bad = [
            Place { offset: u64::MAX, ..place() },
            Place { size: 0, ..place() },
            Place { size: 16 * LARGE, ..place() },
            Place { slab: LARGE + 1, ..place() },
            Place { slab: 2 * MAX_SLAB, ..place() },
        ];
        for bad in bad {
            assert_eq!(Place::unpack(&bad.pack()), Err(CuError::INVALID_VALUE), "{bad:?}");
        }
        assert_eq!(Place::unpack(&CUipcMemHandle([0; 64])), Err(CuError::INVALID_VALUE));
    }

    #[test]
    fn allocations_that_follow_each_other_in_time_are_kept_apart() {
        let uses = BTreeMap::from([(512, (1000, 1)), (4096, (512, 1))]);
        let (name, handle) = (place().name, MemHandleId(1));
        let slab = Opened { name, handle, base: LARGE, slab: LARGE, device: 0, uses };
        let room = |offset, size| slab.has_room(&Place { offset, size, ..place() });
        assert!(room(512, 1000) && room(2048, 2048) && room(0, 512) && room(8192, 512));
        assert!(!room(512, 2000) && !room(1024, 512) && !room(4096, 1024) && !room(0, 8192));
    }
}
