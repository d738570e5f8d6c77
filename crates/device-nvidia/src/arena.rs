//! Device memory at addresses of the client's choice: one reserved range a device, slabs and
//! program's own handles mapped into it.

use crate::devices::Devices;
use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, DEVICE_STRIDE, device_base, device_of};
use kedge_cuda_types::handle::CUdevice;
use kedge_cuda_types::memory::*;
use kedge_device::Ranges;
use kedge_protocol::{Imported, MemHandleId};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// The granularity of mappings on every device that kedge drives.
pub(crate) const GRANULE: u64 = 2 << 20;
/// The host shows whole pages.
const PAGE: u64 = 4096;
pub(crate) const POSIX_FD: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Why the arenas cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("the driver reserves no device addresses: {0}")]
    Refused(CuError),
    #[error("the driver placed the device addresses at {got:#x} instead of {want:#x}")]
    Moved { want: u64, got: u64 },
}

pub(crate) struct Arena {
    driver: Arc<Driver>,
    devices: Devices,
    /// Devices that may access another's memory: (owner, other).
    peers: Vec<(u32, u32)>,
    pub(crate) slabs: BTreeMap<u64, Mapping>,
    pub(crate) handles: HashMap<MemHandleId, Handle>,
    /// The program's own mappings.
    mapped: BTreeMap<u64, Shown>,
    /// Addresses at which the host shows memory of the client's.
    lent: Ranges,
}

/// Bytes of a handle that are mapped.
#[derive(Debug, Clone)]
struct Shown {
    size: u64,
    of: MemHandleId,
    offset: u64,
    /// CUmemAccess_flags by devices.
    access: BTreeMap<u32, u32>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) size: u64,
    /// The driver's handle; its memory lives as long as it or a mapping does. Or [`AWAY`].
    pub(crate) raw: u64,
}

/// Of what has no memory for now; the driver's handles are not zero.
pub(crate) const AWAY: u64 = 0;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    /// Or [`AWAY`].
    pub(crate) raw: u64,
    /// Unknown of another process's: the driver does not tell, and checks.
    pub(crate) size: Option<u64>,
    pub(crate) device: u32,
    pub(crate) shareable: bool,
    pub(crate) mappings: u32,
}

/// Reserves the address ranges of these windows, for as long as the process lives.
pub(crate) fn reserve(
    driver: &Driver,
    windows: impl Iterator<Item = u32>,
) -> Result<(), ArenaError> {
    for window in windows {
        let (want, mut got) = (device_base(window), 0);
        // SAFETY: a live out pointer.
        let reserved = check(unsafe {
            (driver.cuMemAddressReserve)(&mut got, DEVICE_CLIENT_LEN as usize, 0, want, 0)
        });
        reserved.map_err(ArenaError::Refused)?;
        if got != want {
            // SAFETY: the range that was just reserved; nothing is mapped there.
            unsafe { (driver.cuMemAddressFree)(got, DEVICE_CLIENT_LEN as usize) };
            return Err(ArenaError::Moved { want, got });
        }
    }
    Ok(())
}

impl Arena {
    /// Reserves the address range of each device, but in the first `before` windows, of which that
    /// is done.
    pub(crate) fn reserve(
        driver: &Arc<Driver>,
        devices: &Devices,
        before: u32,
    ) -> Result<Arena, ArenaError> {
        reserve(driver, devices.windows().iter().filter(|window| *window >= before))?;
        let (driver, devices) = (Arc::clone(driver), devices.clone());
        let peers = peers(&driver, &devices);
        let (slabs, handles, mapped, lent) = Default::default();
        Ok(Arena { driver, devices, peers, slabs, handles, mapped, lent })
    }

    /// The slabs: address and bytes.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.slabs.iter().map(|(at, slab)| (*at, slab.size))
    }

    /// Whether each device can access the memory of each other.
    pub(crate) fn all_are_peers(&self) -> bool {
        let count = self.devices.iter().count();
        self.peers.len() == count * count.saturating_sub(1)
    }

    /// Bytes of a device's memory in slabs and handles, but for what is away; the driver's own, for
    /// code and stacks, is not known here.
    pub(crate) fn used(&self, device: u32) -> u64 {
        let slabs = self
            .slabs
            .iter()
            .filter(|(at, slab)| device_of(**at) == Some(device) && slab.raw != AWAY);
        let handles = self.handles.values();
        let handles = handles.filter(|handle| handle.device == device && handle.raw != AWAY);
        let slabs: u64 = slabs.map(|(_, slab)| slab.size).sum();
        slabs + handles.filter_map(|handle| handle.size).sum::<u64>()
    }

    /// Whether all of a range lies in slabs.
    pub(crate) fn granted(&self, addr: u64, bytes: u64) -> bool {
        let Some(end) = addr.checked_add(bytes) else { return false };
        let mut at = addr;
        while at < end {
            match self.slabs.range(..=at).next_back() {
                Some((base, slab)) if at - base < slab.size => at = base + slab.size,
                _ => return false,
            }
        }
        true
    }

    /// Where a handle's bytes are mapped.
    pub(crate) fn shown(&self, id: MemHandleId) -> Vec<(u64, u64)> {
        let shown = self.mapped.iter().filter(|(_, shown)| shown.of == id);
        shown.map(|(addr, shown)| (*addr, shown.size)).collect()
    }

    /// Maps what was mapped at an address, of new memory of its handle.
    pub(crate) fn show(&self, addr: u64, raw: u64) -> Result<(), CuError> {
        let shown = self.mapped.get(&addr).ok_or(CuError::INVALID_VALUE)?;
        self.map(addr, shown.size, shown.offset, raw)
    }

    /// Lets the same devices use it as before.
    pub(crate) fn allow_again(&self, addr: u64) -> Result<(), CuError> {
        let shown = self.mapped.get(&addr).ok_or(CuError::INVALID_VALUE)?;
        shown
            .access
            .iter()
            .try_for_each(|(index, access)| self.allow(addr, shown.size, *index, *access))
    }

    /// The program's own handles that have memory: id, the driver's handle, bytes and device.
    pub(crate) fn handles(&self) -> impl Iterator<Item = (MemHandleId, u64, u64, u32)> {
        let own = |(id, handle): (&MemHandleId, &Handle)| {
            Some((*id, handle.raw, handle.size?, handle.device)).filter(|_| handle.raw != AWAY)
        };
        self.handles.iter().filter_map(own)
    }

    pub(crate) fn device(&self, index: u32) -> Result<CUdevice, CuError> {
        self.devices.get(index).ok_or(CuError::INVALID_DEVICE)
    }

    pub(crate) fn create(&self, index: u32, size: u64, shareable: bool) -> Result<u64, CuError> {
        let props = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: if shareable { POSIX_FD } else { CU_MEM_HANDLE_TYPE_NONE },
            location: self.location(index)?,
            ..Default::default()
        };
        let mut raw = 0;
        // SAFETY: live pointers.
        check(unsafe { (self.driver.cuMemCreate)(&mut raw, size as usize, &props, 0) })?;
        Ok(raw)
    }

    fn location(&self, index: u32) -> Result<CUmemLocation, CuError> {
        Ok(CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: self.device(index)? })
    }

    pub(crate) fn release(&self, raw: u64) -> Result<(), CuError> {
        // SAFETY: a handle that `create` made and that nothing here names any longer.
        check(unsafe { (self.driver.cuMemRelease)(raw) })
    }

    fn map(&self, addr: u64, size: u64, offset: u64, raw: u64) -> Result<(), CuError> {
        // SAFETY: an address inside our reservation (checked by the callers), or a driver's error.
        check(unsafe { (self.driver.cuMemMap)(addr, size as usize, offset as usize, raw, 0) })
    }

    pub(crate) fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError> {
        // SAFETY: one of our mappings; the client has made sure that no work uses it.
        check(unsafe { (self.driver.cuMemUnmap)(addr, size as usize) })
    }

    fn allow(&self, addr: u64, size: u64, index: u32, access: u32) -> Result<(), CuError> {
        let desc = CUmemAccessDesc { location: self.location(index)?, flags: access };
        // SAFETY: a live descriptor.
        check(unsafe { (self.driver.cuMemSetAccess)(addr, size as usize, &desc, 1) })
    }

    /// A slab: see [`kedge_device::Backend::grant`].
    pub(crate) fn grant(&mut self, index: u32, addr: u64, size: u64) -> Result<(), CuError> {
        check_range(addr, size)?;
        if device_of(addr) != Some(index) || self.overlaps(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        let raw = self.map_new(index, addr, size)?;
        self.slabs.insert(addr, Mapping { size, raw });
        Ok(())
    }

    /// New memory at a slab's address, accessible: the driver's handle.
    pub(crate) fn map_new(&self, index: u32, addr: u64, size: u64) -> Result<u64, CuError> {
        // Any of it may be shared with other processes (`cuIpcGetMemHandle`).
        let raw = self.create(index, size, true)?;
        let made = self.map(addr, size, 0, raw).and_then(|()| {
            self.open(index, addr, size).inspect_err(|_| {
                let _ = self.unmap(addr, size);
            })
        });
        if let Err(error) = made {
            let _ = self.release(raw);
            return Err(error);
        }
        Ok(raw)
    }

    /// Makes a slab accessible to its device, and to those that may access its device's memory.
    fn open(&self, index: u32, addr: u64, size: u64) -> Result<(), CuError> {
        self.allow(addr, size, index, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)?;
        let peers = self.peers.iter().filter(|(owner, _)| *owner == index);
        peers.into_iter().try_for_each(|&(_, peer)| {
            self.allow(addr, size, peer, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        })
    }

    fn overlaps(&self, addr: u64, size: u64) -> bool {
        let slab = self.slabs.range(..addr + size).next_back().map(|(at, slab)| at + slab.size);
        let shown = self.mapped.range(..addr + size).next_back().map(|(at, shown)| at + shown.size);
        slab.max(shown).is_some_and(|end| end > addr) || self.lent.overlap(addr, size)
    }

    /// Leaves addresses to the host, at which there is nothing: see
    /// [`kedge_device::Backend::lend_addresses`].
    pub(crate) fn lend(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        check_part(addr, size, PAGE)?;
        if self.overlaps(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        self.lent.add(addr, size);
        Ok(())
    }

    /// Takes lent addresses back, which no work uses.
    pub(crate) fn take_lent(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        if !(addr | size).is_multiple_of(PAGE) || !self.lent.cover(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        reserve_again(addr, size)?;
        self.lent.cut(addr, size);
        Ok(())
    }

    pub(crate) fn give_back(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let slab = self.slabs.get(&addr).filter(|slab| slab.size == size).copied();
        let slab = slab.ok_or(CuError::INVALID_VALUE)?;
        self.unmap(addr, size)?;
        self.slabs.remove(&addr);
        self.release(slab.raw)
    }

    pub(crate) fn create_handle(
        &mut self,
        id: MemHandleId,
        index: u32,
        size: u64,
        shareable: bool,
    ) -> Result<(), CuError> {
        if size == 0 || !size.is_multiple_of(GRANULE) || self.handles.contains_key(&id) {
            return Err(CuError::INVALID_VALUE);
        }
        let raw = self.create(index, size, shareable)?;
        let (size, device) = (Some(size), index);
        self.handles.insert(id, Handle { raw, size, device, shareable, mappings: 0 });
        Ok(())
    }

    pub(crate) fn export_handle(&self, id: MemHandleId) -> Result<OwnedFd, CuError> {
        export(&self.driver, self.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?.raw)
    }

    /// A descriptor of the slab that holds an address, and where that lies.
    pub(crate) fn export_slab(&self, addr: u64) -> Result<(OwnedFd, u64, u64), CuError> {
        let before = self.slabs.range(..=addr).next_back();
        let slab = before.filter(|(base, slab)| addr - **base < slab.size);
        let (&base, slab) = slab.ok_or(CuError::INVALID_VALUE)?;
        Ok((export(&self.driver, slab.raw)?, base, slab.size))
    }

    /// Another process's memory; the driver refuses a descriptor that is none.
    pub(crate) fn import_handle(
        &mut self,
        id: MemHandleId,
        fd: OwnedFd,
    ) -> Result<Imported, CuError> {
        if self.handles.contains_key(&id) {
            return Err(CuError::INVALID_VALUE);
        }
        let (raw, mut props) = (import(&self.driver, &fd)?, CUmemAllocationProp::default());
        // SAFETY: a live out pointer and the handle that was just made.
        let told =
            check(unsafe { (self.driver.cuMemGetAllocationPropertiesFromHandle)(&mut props, raw) });
        let on_device = told.is_ok() && props.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        let device = self.devices.iter().find(|(_, device)| *device == props.location.id);
        let device = device.filter(|_| on_device).map(|(window, _)| window);
        let first = self.devices.iter().next().map_or(0, |(window, _)| window);
        let (size, shareable, mappings) = (None, true, 0);
        let handle = Handle { raw, size, device: device.unwrap_or(first), shareable, mappings };
        self.handles.insert(id, handle);
        Ok(Imported { device, size: None })
    }

    /// Another process's memory is now this one's. The driver finds out whether it is as large.
    pub(crate) fn adopt_handle(
        &mut self,
        id: MemHandleId,
        index: u32,
        size: u64,
    ) -> Result<(), CuError> {
        self.device(index)?;
        let handle = self.handles.get_mut(&id).ok_or(CuError::INVALID_HANDLE)?;
        let sound = size > 0 && size.is_multiple_of(GRANULE) && handle.device == index;
        if handle.size.is_some() || !sound {
            return Err(CuError::INVALID_VALUE);
        }
        handle.size = Some(size);
        Ok(())
    }

    /// A handle that is mapped stays: the driver would keep its memory for the mapping's sake.
    pub(crate) fn destroy_handle(&mut self, id: MemHandleId) -> Result<(), CuError> {
        if self.handles.get(&id).is_some_and(|handle| handle.mappings > 0) {
            return Err(CuError::INVALID_VALUE);
        }
        let handle = self.handles.remove(&id).ok_or(CuError::INVALID_HANDLE)?;
        self.release(handle.raw)
    }

    pub(crate) fn map_handle(
        &mut self,
        id: MemHandleId,
        addr: u64,
        size: u64,
        offset: u64,
    ) -> Result<(), CuError> {
        check_range(addr, size)?;
        let handle = *self.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        let mappings = handle.mappings.checked_add(1).ok_or(CuError::INVALID_VALUE)?;
        let end = offset.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        let inside = handle.size.is_none_or(|size| end <= size);
        if !inside || self.overlaps(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        self.map(addr, size, offset, handle.raw)?;
        self.mapped.insert(addr, Shown { size, of: id, offset, access: BTreeMap::new() });
        self.handles.insert(id, Handle { mappings, ..handle });
        Ok(())
    }

    /// The program's mappings that make up a range, each whole.
    fn within(&self, addr: u64, size: u64) -> Result<Vec<(u64, u64)>, CuError> {
        let end = addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        let parts: Vec<_> = self.mapped.range(addr..end).map(|(at, m)| (*at, m.size)).collect();
        let total: u64 = parts.iter().map(|(_, size)| size).sum();
        let whole = parts.first().is_some_and(|(at, _)| *at == addr) && total == size;
        if whole { Ok(parts) } else { Err(CuError::INVALID_VALUE) }
    }

    pub(crate) fn unmap_handle(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        for (addr, size) in self.within(addr, size)? {
            self.unmap(addr, size)?;
            let shown = self.mapped.remove(&addr);
            if let Some(handle) = shown.and_then(|shown| self.handles.get_mut(&shown.of)) {
                handle.mappings = handle.mappings.saturating_sub(1);
            }
        }
        Ok(())
    }

    pub(crate) fn set_access(
        &mut self,
        addr: u64,
        size: u64,
        index: u32,
        access: u32,
    ) -> Result<(), CuError> {
        for (addr, size) in self.within(addr, size)? {
            self.allow(addr, size, index, access)?;
            if let Some(shown) = self.mapped.get_mut(&addr) {
                shown.access.insert(index, access);
            }
        }
        Ok(())
    }
}

/// A descriptor of memory that was created to be shared; the memory lives as long as that does.
pub(crate) fn export(driver: &Driver, raw: u64) -> Result<OwnedFd, CuError> {
    let mut fd: c_int = -1;
    let out = (&raw mut fd).cast();
    // SAFETY: the driver writes a descriptor, an int, for this kind of handle.
    check(unsafe { (driver.cuMemExportToShareableHandle)(out, raw, POSIX_FD, 0) })?;
    if fd < 0 {
        return Err(CuError::UNKNOWN);
    }
    // SAFETY: the driver has just made the descriptor, for its caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The driver's handle of memory that another process has exported: to be released.
pub(crate) fn import(driver: &Driver, fd: &OwnedFd) -> Result<u64, CuError> {
    let mut raw = 0;
    let number = fd.as_raw_fd() as usize as *mut c_void;
    // SAFETY: a live out pointer and a live descriptor, which the driver does not keep.
    check(unsafe { (driver.cuMemImportFromShareableHandle)(&mut raw, number, POSIX_FD) })?;
    Ok(raw)
}

/// Pairs of devices of which the second can access the first's memory.
fn peers(driver: &Driver, devices: &Devices) -> Vec<(u32, u32)> {
    let can = |from: CUdevice, to: CUdevice| {
        let mut yes = 0;
        // SAFETY: a live out pointer.
        let asked = check(unsafe { (driver.cuDeviceCanAccessPeer)(&mut yes, from, to) });
        asked.is_ok() && yes != 0
    };
    let mut pairs = Vec::new();
    for (owner, to) in devices.iter() {
        for (other, from) in devices.iter() {
            if owner != other && can(from, to) {
                pairs.push((owner, other));
            }
        }
    }
    pairs
}

/// Puts back what the driver maps at reserved addresses: nothing that can be accessed. The driver
/// does not look at it where it maps its own memory (seen with 580).
fn reserve_again(addr: u64, size: u64) -> Result<(), CuError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces what the host has shown at addresses of our own reservation, which were left
    // to it and which nothing uses any longer.
    let at = unsafe { libc::mmap(addr as *mut _, size as usize, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(CuError::UNMAP_FAILED) } else { Ok(()) }
}

/// A range of granules in the client's part of one device's arena.
fn check_range(addr: u64, size: u64) -> Result<(), CuError> {
    check_part(addr, size, GRANULE)
}

/// A range of whole units in the client's part of one device's arena.
fn check_part(addr: u64, size: u64, unit: u64) -> Result<(), CuError> {
    let index = device_of(addr).ok_or(CuError::INVALID_VALUE)?;
    let end = device_base(index) + DEVICE_CLIENT_LEN;
    let fits = size > 0 && addr.checked_add(size).is_some_and(|last| last <= end);
    if fits && (addr | size).is_multiple_of(unit) { Ok(()) } else { Err(CuError::INVALID_VALUE) }
}

const _: () = assert!(DEVICE_CLIENT_LEN <= DEVICE_STRIDE);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Turn;
    use std::io::pipe;

    const BAD: Result<(), CuError> = Err(CuError::INVALID_VALUE);

    /// Whether the system can read the byte there.
    fn is_readable(addr: u64) -> bool {
        let (_reader, writer) = pipe().unwrap();
        // SAFETY: the kernel reads one byte, or says that it cannot.
        unsafe { libc::write(writer.as_raw_fd(), addr as *const _, 1) == 1 }
    }

    #[test]
    fn addresses_are_the_device_s_or_lent() {
        let (_turn, driver) = Turn::begin(64 << 20);
        let devices = Devices::new(vec![0], None);
        let mut arena = Arena::reserve(&driver, &devices, 0).unwrap();
        let base = device_base(0);
        let (lent, end) = (base + GRANULE, base + DEVICE_CLIENT_LEN);
        arena.grant(0, base, GRANULE).unwrap();
        for (addr, size) in [
            (base, PAGE),
            (lent - PAGE, 2 * PAGE),
            (lent, 0),
            (lent + 1, PAGE),
            (lent, PAGE + 1),
            (end - PAGE, 2 * PAGE),
            (end, PAGE),
            (0x1000_0000, PAGE),
            (lent, u64::MAX - PAGE + 1),
        ] {
            assert_eq!(arena.lend(addr, size), BAD, "{addr:#x} {size:#x}");
        }
        arena.lend(lent, 3 * PAGE).unwrap();
        assert_eq!(arena.lend(lent + 2 * PAGE, PAGE), BAD);
        assert_eq!(arena.grant(0, lent, GRANULE), BAD);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: lent to this test.
        let shown =
            unsafe { libc::mmap(lent as *mut _, 3 * PAGE as usize, libc::PROT_READ, flags, -1, 0) };
        assert_eq!(shown as u64, lent);
        assert_eq!(arena.take_lent(lent, 4 * PAGE), BAD);
        assert_eq!(arena.take_lent(lent, PAGE - 1), BAD);
        arena.take_lent(lent + PAGE, PAGE).unwrap();
        assert_eq!(arena.take_lent(lent, 2 * PAGE), BAD);
        let readable = [0, 1, 2].map(|page| is_readable(lent + page * PAGE));
        assert_eq!(readable, [true, false, true]);
        arena.take_lent(lent + 2 * PAGE, PAGE).unwrap();
        arena.take_lent(lent, PAGE).unwrap();
        assert!(!is_readable(lent));
        arena.grant(0, lent, GRANULE).unwrap();
        assert!(is_readable(lent));
    }

    #[test]
    fn ranges_are_granules_of_one_arena() {
        let base = device_base(1);
        assert_eq!(check_range(base, GRANULE), Ok(()));
        for (addr, size) in [
            (base, 0),
            (base + 4096, GRANULE),
            (base, GRANULE + 4096),
            (base + DEVICE_CLIENT_LEN, GRANULE),
            (base + DEVICE_CLIENT_LEN - GRANULE, 2 * GRANULE),
            (0x1000_0000, GRANULE),
            (base, u64::MAX - GRANULE + 1),
        ] {
            assert_eq!(check_range(addr, size), Err(CuError::INVALID_VALUE), "{addr:#x} {size:#x}");
        }
    }
}
