//! Managed memory: in the shared arena, at one address for host and device. Every side sees every
//! write at once, so advice and prefetches are checked, remembered where they can be asked for, and
//! otherwise change nothing. On devices that see none of the host's pages it is [`paged`].

use super::advice::{Advice, Advised};
use super::link::current;
use super::paged::pages_of;
use super::table::{Allocation, Kind};
use super::{MEMORY, give, host, paged, pool, read};
use crate::{session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdevice, CUdeviceptr, CUstream};
use kedge_cuda_types::memory::*;
use kedge_pages::Attach;
use kedge_protocol::StreamOp;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) unsafe fn cuMemAllocManaged(
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    flags: u32,
) -> Result<(), CuError> {
    if dptr.is_null() || !matches!(flags, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST) {
        return Err(CuError::INVALID_VALUE);
    }
    let kind = Kind::Managed { flags };
    let addr = match paged::is_wanted()? {
        true => paged::alloc(kind, bytesize as u64)?,
        false => host::alloc(kind, bytesize as u64)?,
    };
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, addr) }
}

/// What a program has advised for parts of each allocation, by its id.
static ADVICE: Mutex<BTreeMap<u64, Advised>> = Mutex::new(BTreeMap::new());

/// Changes what holds for some pages of an allocation.
fn advise(found: &Allocation, pages: &Range<u64>, change: impl Fn(&mut Advice)) {
    let mut all = ADVICE.lock().unwrap_or_else(PoisonError::into_inner);
    all.entry(found.id).or_default().change(pages, change);
}

/// Notes where the allocation that begins at `addr` is best.
pub(super) fn prefer(addr: u64, at: CUmemLocation) {
    let found = MEMORY.table().find(addr).cloned();
    if let Some(found) = found.filter(|_| at.type_ != CU_MEM_LOCATION_TYPE_INVALID) {
        advise(&found, &pages_of(found.base, found.size), |a| a.preferred = Some(at));
    }
}

/// The allocation is gone.
pub(super) fn forget(found: &Allocation) {
    pool::managed_freed(found);
    ADVICE.lock().unwrap_or_else(PoisonError::into_inner).remove(&found.id);
}

/// Returns what holds for all of some pages.
fn advice(found: &Allocation, pages: &Range<u64>) -> Advice {
    let all = ADVICE.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(&found.id).map(|advised| advised.of(pages)).unwrap_or_default()
}

/// The managed allocation that holds the whole range.
fn managed(addr: u64, count: usize) -> Result<Arc<Allocation>, CuError> {
    let table = MEMORY.table();
    let found = table.find(addr).ok_or(CuError::INVALID_VALUE)?;
    if count == 0 || !found.managed() || !table.covers(addr, count as u64) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(found.clone())
}

/// A location as the older interfaces name it: a device ordinal, or `CU_DEVICE_CPU`.
fn location(device: CUdevice) -> CUmemLocation {
    match device {
        CU_DEVICE_CPU => CUmemLocation { type_: CU_MEM_LOCATION_TYPE_HOST, id: 0 },
        id => CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id },
    }
}

/// The ordinal that the older interfaces give for a location.
fn ordinal(location: Option<CUmemLocation>) -> i32 {
    match location {
        Some(CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id }) => id,
        Some(_) => CU_DEVICE_CPU,
        None => CU_DEVICE_INVALID,
    }
}

pub(super) fn check_location(location: CUmemLocation) -> Result<(), CuError> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => session::get()?.device(location.id).map(|_| ()),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub(crate) unsafe fn cuMemAdvise(
    dptr: CUdeviceptr,
    count: usize,
    what: u32,
    device: CUdevice,
) -> Result<(), CuError> {
    // SAFETY: nothing is dereferenced.
    unsafe { cuMemAdvise_v2(dptr, count, what, location(device)) }
}

pub(crate) unsafe fn cuMemAdvise_v2(
    dptr: CUdeviceptr,
    count: usize,
    what: u32,
    at: CUmemLocation,
) -> Result<(), CuError> {
    let found = managed(dptr, count)?;
    let takes_location = matches!(
        what,
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION
            | CU_MEM_ADVISE_SET_ACCESSED_BY
            | CU_MEM_ADVISE_UNSET_ACCESSED_BY
    );
    if takes_location {
        check_location(at)?;
    }
    let device = ordinal(Some(at));
    let pages = pages_of(dptr, count as u64);
    let note = |change: &dyn Fn(&mut Advice)| advise(&found, &pages, change);
    match what {
        CU_MEM_ADVISE_SET_READ_MOSTLY => note(&|a| a.read_mostly = true),
        CU_MEM_ADVISE_UNSET_READ_MOSTLY => note(&|a| a.read_mostly = false),
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => note(&|a| a.preferred = Some(at)),
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION => note(&|a| a.preferred = None),
        CU_MEM_ADVISE_SET_ACCESSED_BY => note(&|a| {
            a.accessed_by.retain(|&d| d != device);
            a.accessed_by.push(device);
        }),
        CU_MEM_ADVISE_UNSET_ACCESSED_BY => note(&|a| a.accessed_by.retain(|&d| d != device)),
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

pub(crate) unsafe fn cuMemPrefetchAsync(
    dptr: CUdeviceptr,
    count: usize,
    device: CUdevice,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: nothing is dereferenced.
    unsafe { cuMemPrefetchAsync_v2(dptr, count, location(device), 0, stream) }
}

pub(crate) unsafe fn cuMemPrefetchAsync_v2(
    dptr: CUdeviceptr,
    count: usize,
    at: CUmemLocation,
    flags: u32,
    stream: CUstream,
) -> Result<(), CuError> {
    let found = managed(dptr, count)?;
    check_location(at)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    stream::enqueue(stream, StreamOp::Empty {})?;
    paged::prefetch(dptr, count as u64, at.type_ == CU_MEM_LOCATION_TYPE_DEVICE);
    advise(&found, &pages_of(dptr, count as u64), |a| a.prefetched = Some(at));
    Ok(())
}

pub(crate) unsafe fn cuMemPrefetchBatchAsync(
    dptrs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    locations: *mut CUmemLocation,
    location_indices: *mut usize,
    location_count: usize,
    flags: u64,
    stream: CUstream,
) -> Result<(), CuError> {
    if count == 0 || location_count == 0 || location_count > count || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut next = 0;
    for index in 0..count {
        // SAFETY: the arrays have `count` and `location_count` elements, the caller promises.
        unsafe {
            if next < location_count && read(location_indices.wrapping_add(next))? == index {
                next += 1;
            }
            let at =
                read(locations.wrapping_add(next.checked_sub(1).ok_or(CuError::INVALID_VALUE)?))?;
            let (dptr, size) = (read(dptrs.wrapping_add(index))?, read(sizes.wrapping_add(index))?);
            cuMemPrefetchAsync_v2(dptr, size, at, 0, stream)?;
        }
    }
    Ok(())
}

/// Accepted: managed memory is coherent for every stream, attached or not.
pub(crate) unsafe fn cuStreamAttachMemAsync(
    stream: CUstream,
    dptr: CUdeviceptr,
    length: usize,
    flags: u32,
) -> Result<(), CuError> {
    let known = matches!(flags, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST | CU_MEM_ATTACH_SINGLE);
    let found = managed(dptr, length.max(1))?;
    let whole = length == 0 || (dptr == found.base && length as u64 == found.size);
    if !known || !whole {
        return Err(CuError::INVALID_VALUE);
    }
    stream::enqueue(stream, StreamOp::Empty {})?;
    let stream = stream::find(stream)?;
    let whose = match flags {
        CU_MEM_ATTACH_HOST => Attach::Host,
        // The legacy stream waits for all others, and so it is all of them.
        CU_MEM_ATTACH_SINGLE if !stream.is_legacy() => paged::stream_only(stream.id()),
        _ => Attach::Global,
    };
    paged::attach(found.base, whose)
}

pub(crate) unsafe fn cuMemRangeGetAttribute(
    data: *mut c_void,
    data_size: usize,
    attribute: u32,
    dptr: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    let current = current();
    let found = managed(dptr, count)?;
    current?;
    let advice = advice(&found, &pages_of(dptr, count as u64));
    if data.is_null() || data_size == 0 || !data_size.is_multiple_of(4) {
        return Err(CuError::INVALID_VALUE);
    }
    let kind = |at: Option<CUmemLocation>| at.map_or(CU_MEM_LOCATION_TYPE_INVALID, |at| at.type_);
    let id = |at: Option<CUmemLocation>| at.map_or(0, |at| at.id);
    let word = match attribute {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY => advice.read_mostly.into(),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION => ordinal(advice.preferred),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION => ordinal(advice.prefetched),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE => kind(advice.preferred) as i32,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID => id(advice.preferred),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE => kind(advice.prefetched) as i32,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID => id(advice.prefetched),
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY => {
            let mut accessed_by = advice.accessed_by.clone();
            // As drivers list them: the devices by number, the host (-1) last.
            accessed_by.sort_unstable_by_key(|&device| device as u32);
            for index in 0..data_size / 4 {
                let device = accessed_by.get(index).copied().unwrap_or(CU_DEVICE_INVALID);
                // SAFETY: inside the `data_size` bytes that the caller promised.
                unsafe { give(data.cast::<i32>().wrapping_add(index), device)? };
            }
            return Ok(());
        }
        _ => return Err(CuError::INVALID_VALUE),
    };
    if data_size != 4 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `data` is NULL or valid for a write of four bytes: the API asks that of the program.
    unsafe { give(data.cast::<i32>(), word) }
}

pub(crate) unsafe fn cuMemRangeGetAttributes(
    data: *mut *mut c_void,
    data_sizes: *mut usize,
    attributes: *mut u32,
    count_attributes: usize,
    dptr: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    if count_attributes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for index in 0..count_attributes {
        // SAFETY: each array has that many elements, the caller promises, and each datum its size.
        unsafe {
            let (to, size) =
                (read(data.wrapping_add(index))?, read(data_sizes.wrapping_add(index))?);
            let attribute = read(attributes.wrapping_add(index))?;
            cuMemRangeGetAttribute(to, size, attribute, dptr, count)?;
        }
    }
    Ok(())
}
