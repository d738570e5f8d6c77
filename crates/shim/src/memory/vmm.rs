//! Virtual memory management: reserved addresses, physical handles, and mappings of one to the
//! other.

use super::alloc::call_for_memory;
use super::heap::Heap;
use super::link::{call, current, post, quiesce};
use super::ranges::LARGE;
use super::table::{Allocation, Kind};
use super::{MEMORY, give, read, share};
use crate::handle::{Kind as Handles, Table};
use crate::{entry, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::handle::CUdeviceptr;
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, Imported, MemHandleId, Post};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What sizes, addresses and offsets are multiples of, as on NVIDIA's devices.
const GRANULARITY: u64 = LARGE;

/// Physical memory. It lives while the program holds references or mappings.
#[derive(Debug)]
pub(super) struct Physical {
    handle: usize,
    pub(super) id: MemHandleId,
    pub(super) props: CUmemAllocationProp,
    /// `None`: the driver alone knows, and checks.
    size: Option<u64>,
    uses: Mutex<Uses>,
}

#[derive(Debug, Default)]
struct Uses {
    references: u64,
    mappings: u64,
}

static HANDLES: Table<Physical> = Table::new(Handles::MemHandle);

impl Physical {
    /// Adds physical memory with one reference of the program's; its handle.
    fn add(id: MemHandleId, props: CUmemAllocationProp, size: Option<u64>) -> Result<u64, CuError> {
        let uses = Mutex::new(Uses { references: 1, mappings: 0 });
        let made = HANDLES.insert_with(|handle| Physical { handle, id, props, size, uses });
        let Some(made) = made else {
            post(&Post::HandleDestroy { handle: id })?;
            return Err(CuError::OUT_OF_MEMORY);
        };
        Ok(made.handle as u64)
    }

    /// Adds another process's memory; its handle.
    pub(super) fn imported(id: MemHandleId, imported: &Imported) -> Result<u64, CuError> {
        let device = imported.device.map_or(CU_DEVICE_INVALID, |device| device as i32);
        let props = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device },
            ..Default::default()
        };
        Physical::add(id, props, imported.size)
    }

    /// Its device; the arena's where that is none of ours.
    fn device(&self, addr: u64) -> u32 {
        let own = u32::try_from(self.props.location.id).ok();
        own.or_else(|| device_of(addr)).unwrap_or(0)
    }

    /// Changes the counts; when both are 0 the memory goes back.
    fn change(&self, change: impl FnOnce(&mut Uses) -> Result<(), CuError>) -> Result<(), CuError> {
        let unused = {
            let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut uses)?;
            uses.references == 0 && uses.mappings == 0
        };
        if unused && HANDLES.remove(self.handle).is_some() {
            post(&Post::HandleDestroy { handle: self.id })?;
        }
        Ok(())
    }
}

pub(super) fn by_handle(handle: u64) -> Result<Arc<Physical>, CuError> {
    HANDLES.get(handle as usize).ok_or(CuError::INVALID_VALUE)
}

fn by_id(id: MemHandleId) -> Result<Arc<Physical>, CuError> {
    HANDLES.all().into_iter().find(|physical| physical.id == id).ok_or(CuError::INVALID_VALUE)
}

/// Reserved addresses, and what devices may do with what is mapped there.
#[derive(Debug, Default)]
struct Space {
    /// Start → size.
    reserved: BTreeMap<u64, u64>,
    /// (mapping's start, device) → `CU_MEM_ACCESS_FLAGS_*`.
    access: BTreeMap<(u64, i32), u32>,
}

impl Space {
    /// The reservation that holds all of a range.
    fn holds(&self, addr: u64, size: u64) -> bool {
        self.reserved.range(..=addr).next_back().is_some_and(|(&start, &len)| {
            addr.checked_add(size).is_some_and(|end| end <= start + len)
        })
    }
}

fn space() -> MutexGuard<'static, Space> {
    static SPACE: Mutex<Space> =
        Mutex::new(Space { reserved: BTreeMap::new(), access: BTreeMap::new() });
    SPACE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The heap whose device's arena holds an address.
fn heap_at(addr: u64) -> Result<&'static Heap, CuError> {
    MEMORY.heap(device_of(addr).ok_or(CuError::INVALID_VALUE)?)
}

fn check_multiple(values: u64) -> Result<(), CuError> {
    if values.is_multiple_of(GRANULARITY) { Ok(()) } else { Err(CuError::INVALID_VALUE) }
}

pub(crate) unsafe fn cuMemAddressReserve(
    ptr: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    addr: CUdeviceptr,
    flags: u64,
) -> Result<(), CuError> {
    let size = size as u64;
    let aligned = alignment == 0 || alignment.is_power_of_two();
    if ptr.is_null() || size == 0 || flags != 0 || !aligned {
        return Err(CuError::INVALID_VALUE);
    }
    check_multiple(size)?;
    // Any device's memory can be mapped anywhere; the address only has to be somewhere.
    let near = current().map_or(0, |current| current.device);
    let device = device_of(addr).filter(|&d| session_has(d)).unwrap_or(near);
    let align = (alignment as u64).max(GRANULARITY);
    let reserved = MEMORY.heap(device)?.reserve(size, align, addr);
    let reserved = reserved.ok_or(CuError::OUT_OF_MEMORY)?;
    space().reserved.insert(reserved, size);
    // SAFETY: `ptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(ptr, reserved) }
}

fn session_has(device: u32) -> bool {
    session::get().is_ok_and(|session| session.device(device as i32).is_ok())
}

pub(crate) unsafe fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) -> Result<(), CuError> {
    let size = size as u64;
    let mut space = space();
    let mapped = MEMORY.table().within(ptr, size).next().is_some();
    if space.reserved.get(&ptr) != Some(&size) || mapped {
        return Err(CuError::INVALID_VALUE);
    }
    space.reserved.remove(&ptr);
    heap_at(ptr)?.unreserve(ptr, size);
    Ok(())
}

/// Refuses properties that no memory here has.
fn check_props(props: &CUmemAllocationProp) -> Result<(), CuError> {
    if props.type_ != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CuError::INVALID_VALUE);
    }
    share::check_requested(props.requestedHandleTypes)?;
    match props.location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => session::get()?.device(props.location.id).map(|_| ()),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Refuses properties that could be, and that nobody has built. NCCL asks for the granularity of
/// such host memory first and gives up where that fails, but does without where only its making
/// does.
fn check_supported(props: &CUmemAllocationProp) -> Result<(), CuError> {
    match props.location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => Ok(()),
        _ => Err(entry::not_supported("cuMemCreate of host memory")),
    }
}

pub(super) fn new_id() -> MemHandleId {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    MemHandleId(NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) unsafe fn cuMemCreate(
    handle: *mut u64,
    size: usize,
    props: *const CUmemAllocationProp,
    flags: u64,
) -> Result<(), CuError> {
    // SAFETY: `props` is NULL or valid for a read: the API asks that of the program.
    let props = unsafe { read(props)? };
    let size = size as u64;
    if handle.is_null() || size == 0 || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    check_props(&props)?;
    check_supported(&props)?;
    check_multiple(size)?;
    let device = props.location.id as u32;
    let id = new_id();
    let shareable = props.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    call_for_memory(device, &Call::HandleCreate { handle: id, device, size, shareable })?;
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, Physical::add(id, props, Some(size))?) }
}

pub(crate) unsafe fn cuMemRelease(handle: u64) -> Result<(), CuError> {
    by_handle(handle)?.change(|uses| {
        uses.references = uses.references.checked_sub(1).ok_or(CuError::INVALID_VALUE)?;
        Ok(())
    })
}

pub(crate) unsafe fn cuMemRetainAllocationHandle(
    handle: *mut u64,
    addr: *mut c_void,
) -> Result<(), CuError> {
    let found = MEMORY.table().find(addr as u64).map(|found| found.kind);
    let Some(Kind::Mapping(id)) = found else { return Err(CuError::INVALID_VALUE) };
    let physical = by_id(id)?;
    if handle.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    physical.change(|uses| {
        uses.references += 1;
        Ok(())
    })?;
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, physical.handle as u64) }
}

pub(crate) unsafe fn cuMemMap(
    ptr: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Result<(), CuError> {
    let (size, offset) = (size as u64, offset as u64);
    let physical = by_handle(handle)?;
    let end = offset.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
    let inside = physical.size.is_none_or(|size| end <= size);
    if size == 0 || flags != 0 || !inside {
        return Err(CuError::INVALID_VALUE);
    }
    check_multiple(ptr | size | offset)?;
    let space = space();
    let mapped = MEMORY.table().within(ptr, size).next().is_some();
    if !space.holds(ptr, size) || mapped {
        return Err(CuError::INVALID_VALUE);
    }
    physical.change(|uses| {
        uses.mappings += 1;
        Ok(())
    })?;
    call(&Call::HandleMap { handle: physical.id, addr: ptr, size, offset }).or_else(|error| {
        physical.change(|uses| {
            uses.mappings -= 1;
            Ok(())
        })?;
        Err(error)
    })?;
    let current = super::link::on_device(physical.device(ptr));
    MEMORY.record(&current, Kind::Mapping(physical.id), ptr, size, size);
    Ok(())
}

/// The mappings that make up [ptr, ptr+size): each lies in it whole, and together they fill it.
fn mappings(ptr: u64, size: u64) -> Result<Vec<Arc<Allocation>>, CuError> {
    let table = MEMORY.table();
    let end = ptr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
    let found: Vec<_> = table.within(ptr, size).cloned().collect();
    let mut at = ptr;
    for mapping in &found {
        if mapping.base != at || !matches!(mapping.kind, Kind::Mapping(_)) {
            return Err(CuError::INVALID_VALUE);
        }
        at += mapping.size;
    }
    if at == end && size > 0 { Ok(found) } else { Err(CuError::INVALID_VALUE) }
}

pub(crate) unsafe fn cuMemUnmap(ptr: CUdeviceptr, size: usize) -> Result<(), CuError> {
    let found = mappings(ptr, size as u64)?;
    quiesce()?;
    post(&Post::HandleUnmap { addr: ptr, size: size as u64 })?;
    for mapping in found {
        let same = |other: &Allocation| other.id == mapping.id;
        let Some(removed) = MEMORY.table_mut().remove(mapping.base, same) else { continue };
        space().access.retain(|&(start, _), _| start != removed.base);
        if let Kind::Mapping(id) = removed.kind {
            by_id(id)?.change(|uses| {
                uses.mappings -= 1;
                Ok(())
            })?;
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuMemSetAccess(
    ptr: CUdeviceptr,
    size: usize,
    desc: *const CUmemAccessDesc,
    count: usize,
) -> Result<(), CuError> {
    let found = mappings(ptr, size as u64)?;
    if count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for index in 0..count {
        // SAFETY: the array has `count` elements, the caller promises.
        let desc = unsafe { read(desc.wrapping_add(index))? };
        let known = matches!(
            desc.flags,
            CU_MEM_ACCESS_FLAGS_PROT_NONE
                | CU_MEM_ACCESS_FLAGS_PROT_READ
                | CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        );
        if !known {
            return Err(CuError::INVALID_VALUE);
        }
        if desc.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(entry::not_supported("cuMemSetAccess for the host"));
        }
        session::get()?.device(desc.location.id)?;
        let (device, access) = (desc.location.id as u32, desc.flags);
        call(&Call::HandleAccess { addr: ptr, size: size as u64, device, access })?;
        let mut space = space();
        for mapping in &found {
            space.access.insert((mapping.base, desc.location.id), access);
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuMemGetAccess(
    flags: *mut u64,
    location: *const CUmemLocation,
    ptr: CUdeviceptr,
) -> Result<(), CuError> {
    // SAFETY: `location` is NULL or valid for a read: the API asks that of the program.
    let at = unsafe { read(location)? };
    let found = MEMORY.table().find(ptr).cloned().ok_or(CuError::INVALID_VALUE)?;
    let access = match found.kind {
        Kind::Mapping(_) => space()
            .access
            .get(&(found.base, at.id))
            .copied()
            .unwrap_or(CU_MEM_ACCESS_FLAGS_PROT_NONE),
        _ => CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: `flags` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(flags, access.into()) }
}

pub(crate) unsafe fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    props: *const CUmemAllocationProp,
    option: u32,
) -> Result<(), CuError> {
    // SAFETY: `props` is NULL or valid for a read: the API asks that of the program.
    let props = unsafe { read(props)? };
    check_props(&props)?;
    if option > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `granularity` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(granularity, GRANULARITY as usize) }
}

pub(crate) unsafe fn cuMemGetAllocationPropertiesFromHandle(
    props: *mut CUmemAllocationProp,
    handle: u64,
) -> Result<(), CuError> {
    // SAFETY: `props` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(props, by_handle(handle)?.props) }
}

/// What the memory of a mapping can be exported as.
pub(super) fn exportable_as(id: MemHandleId) -> u32 {
    by_id(id).map_or(CU_MEM_HANDLE_TYPE_NONE, |physical| physical.props.requestedHandleTypes)
}

/// The reservation that holds an address: its start and size.
pub(super) fn reservation(addr: u64) -> Option<(u64, u64)> {
    let space = space();
    let (&start, &size) = space.reserved.range(..=addr).next_back()?;
    (addr - start < size).then_some((start, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_lies_in_one_reservation() {
        let reserved = BTreeMap::from([(100, 50), (150, 50)]);
        let space = Space { reserved, access: BTreeMap::new() };
        assert!(space.holds(100, 50) && space.holds(150, 50) && space.holds(160, 40));
        assert!(!space.holds(100, 51), "two reservations are not one");
        assert!(!space.holds(90, 20) && !space.holds(190, 20) && !space.holds(u64::MAX, 2));
    }
}
