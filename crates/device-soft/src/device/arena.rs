//! Device memory: address ranges of this process, the slabs and the bytes that each device has
//! granted, and the table of what programs may touch.

use super::ledger::Ledger;
use super::outside::Outside;
use super::placer::Placer;
use super::shareable::{ExportedSlabs, replace_pages};
use super::tasks::lock;
use crate::check::{Check, Checker};
use crate::memory::Spans;
use crate::spec::GLOBAL_UNIT;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{
    self, DEVICE_CLIENT_LEN, DEVICE_STRIDE, SHARED_BASE, SHARED_CLIENT_LEN, SHARED_LEN, Windows,
};
use kedge_device::Ranges;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Slabs start and end at multiples of this.
const SLAB_UNIT: u64 = 2 << 20;
/// Freed memory that may stay resident so that the next allocation need not fault it in.
const RETAIN_LIMIT: u64 = 256 << 20;
pub(super) const PAGE: u64 = 4096;
/// From where the managed variables of one window's devices begin to where those of the next may.
const MANAGED: u64 = 4 << 30;

pub(super) struct Memory {
    /// What programs may touch, on all devices and in the shared arena.
    pub(super) spans: Arc<Spans>,
    /// Where the devices are, and they, in that order.
    pub(super) windows: Windows,
    /// What takes the findings, where programs are checked.
    pub(super) checker: Option<Arc<Checker>>,
    devices: Vec<Device>,
    /// Addresses at which the host shows memory of the client's.
    lent: Mutex<Ranges>,
    /// Freed ranges whose pages are still resident.
    retained: Mutex<Ranges>,
    /// The shared arena's upper part: managed variables.
    managed: Mutex<Placer>,
    /// Slabs that other processes may have mapped.
    exported: Mutex<ExportedSlabs>,
    /// What [`kedge_protocol::DeviceInfo::exact`] has told the client.
    exact: AtomicBool,
    /// Where variables lie if it has not.
    outside: Mutex<Outside>,
    /// Who else has memory of these devices: nobody, outside of tests.
    ledger: OnceLock<Ledger>,
}

struct Device {
    total: u64,
    used: Mutex<u64>,
    /// What the client was granted.
    slabs: Mutex<Ranges>,
    /// The arena's upper part: module variables, device heaps.
    own: Mutex<Placer>,
}

impl Memory {
    /// Maps the arenas of the devices in `windows`. The shared arena is its host's to map.
    pub(super) fn map(
        windows: Windows,
        bytes_per_device: u64,
        check: Option<Check>,
    ) -> io::Result<Self> {
        let mut mapped = Vec::new();
        for index in windows.iter() {
            map_arena(arena::device_base(index))?;
            mapped.push(Device {
                total: bytes_per_device,
                used: Mutex::new(0),
                slabs: Mutex::default(),
                own: Mutex::new(Placer::new(
                    arena::device_base(index) + DEVICE_CLIENT_LEN,
                    DEVICE_STRIDE - DEVICE_CLIENT_LEN,
                )),
            });
        }
        let last = windows.iter().last().map_or(0, |last| last + 1);
        let checker = check.map(|check| Checker::new(check, last)).transpose()?;
        // Devices of one job that are elsewhere place theirs from another address on.
        let before = SHARED_CLIENT_LEN + u64::from(windows.iter().next().unwrap_or(0)) * MANAGED;
        let managed = Placer::new(SHARED_BASE + before, SHARED_LEN - before);
        Ok(Self {
            spans: Arc::default(),
            windows,
            checker: checker.map(Arc::new),
            devices: mapped,
            lent: Mutex::default(),
            retained: Mutex::default(),
            managed: Mutex::new(managed),
            exported: Mutex::default(),
            exact: AtomicBool::new(true),
            outside: Mutex::default(),
            ledger: OnceLock::new(),
        })
    }

    /// Whether the client tells of each allocation, and knows that variables lie in the arenas.
    /// Else slabs are valid as a whole, and variables lie outside.
    pub(super) fn is_exact(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    /// Before anything is granted or placed.
    pub(super) fn set_exact(&self, exact: bool) {
        self.exact.store(exact, Ordering::Relaxed);
    }

    fn device(&self, index: u32) -> Result<&Device, CuError> {
        let at = self.windows.position(index).and_then(|at| self.devices.get(at));
        at.ok_or(CuError::INVALID_DEVICE)
    }

    /// Takes `bytes` of the device's free memory.
    pub(super) fn charge(&self, device: u32, bytes: u64) -> Result<(), CuError> {
        let device = self.device(device)?;
        let mut used = lock(&device.used);
        if bytes > device.total - *used {
            return Err(CuError::OUT_OF_MEMORY);
        }
        if let Some(ledger) = self.ledger.get()
            && !ledger.take(bytes).map_err(|_| CuError::OPERATING_SYSTEM)?
        {
            return Err(CuError::OUT_OF_MEMORY);
        }
        *used += bytes;
        Ok(())
    }

    /// Takes back what `charge` took.
    pub(super) fn refund(&self, device: u32, bytes: u64) -> Result<(), CuError> {
        let mut used = lock(&self.device(device)?.used);
        *used = used.checked_sub(bytes).ok_or(CuError::INVALID_VALUE)?;
        let told = self.ledger.get().map_or(Ok(()), |ledger| ledger.give_back(bytes));
        told.map_err(|_| CuError::OPERATING_SYSTEM)
    }

    /// Has the devices' memory be shared with other processes; before any is taken.
    pub(super) fn share_with(&self, ledger: Ledger) {
        let _ = self.ledger.set(ledger);
    }

    /// Returns the name of the devices' memory, if other processes have some of it.
    pub(super) fn shared_as(&self) -> Option<[u8; 16]> {
        self.ledger.get()?.name().ok()
    }

    /// Makes [addr, addr+bytes) a slab of the device, where allocations may lie from now on.
    pub(super) fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        let mut slabs = lock(&self.device(device)?.slabs);
        check_client_range(addr, bytes, self.windows)?;
        let whole = bytes > 0 && (addr | bytes).is_multiple_of(SLAB_UNIT);
        let whole = whole && !self.is_lent(addr, bytes);
        if !whole || arena::device_of(addr) != Some(device) || slabs.overlap(addr, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        self.charge(device, bytes)?;
        slabs.add(addr, bytes);
        if !self.is_exact() {
            self.spans.insert(addr, bytes);
        }
        Ok(())
    }

    /// Leaves addresses without memory to the host.
    pub(super) fn lend(&self, addr: u64, bytes: u64) -> Result<(), CuError> {
        check_client_range(addr, bytes, self.windows)?;
        let index = arena::device_of(addr).ok_or(CuError::INVALID_VALUE)?;
        let slabs = lock(&self.device(index)?.slabs);
        let mut lent = lock(&self.lent);
        let whole = bytes > 0 && (addr | bytes).is_multiple_of(PAGE);
        if !whole || slabs.overlap(addr, bytes) || lent.overlap(addr, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        lent.add(addr, bytes);
        Ok(())
    }

    /// Whether some of a range is lent.
    pub(super) fn is_lent(&self, addr: u64, bytes: u64) -> bool {
        lock(&self.lent).overlap(addr, bytes)
    }

    /// Takes lent addresses back, which no work uses: nothing lies there.
    pub(super) fn take_lent(&self, addr: u64, bytes: u64) -> Result<(), CuError> {
        let mut lent = lock(&self.lent);
        if !(addr | bytes).is_multiple_of(PAGE) || !lent.cover(addr, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        replace_pages(addr, bytes, None)?;
        lent.cut(addr, bytes);
        let at = addr as usize as *mut libc::c_void;
        // SAFETY: advice about the mapping that was just made. A refusal costs only speed, and one
        // mapping more.
        unsafe { libc::madvise(at, bytes as usize, libc::MADV_HUGEPAGE) };
        Ok(())
    }

    /// All slabs of all devices, as (address, length).
    pub(super) fn slabs(&self) -> Vec<(u64, u64)> {
        let of = |device: &Device| lock(&device.slabs).iter().collect::<Vec<_>>();
        self.devices.iter().flat_map(of).collect()
    }

    /// Ends a slab: nothing in it is valid any longer, and its pages go back to the system.
    pub(super) fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        let mut slabs = lock(&self.device(device)?.slabs);
        if !slabs.remove(addr, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        self.spans.remove(addr, bytes);
        lock(&self.retained).cut(addr, bytes);
        if !lock(&self.exported).end(addr)? {
            discard(addr, bytes);
        }
        self.refund(device, bytes)
    }

    /// A descriptor of the slab that holds `addr`, and where that lies. Nothing may run. `number`
    /// names the device to other processes.
    pub(super) fn export_slab(
        &self,
        addr: u64,
        number: u32,
    ) -> Result<(OwnedFd, u64, u64), CuError> {
        let device = arena::device_of(addr).ok_or(CuError::INVALID_VALUE)?;
        let slab = lock(&self.device(device)?.slabs).holding(addr);
        let (base, size) = slab.ok_or(CuError::INVALID_VALUE)?;
        lock(&self.retained).cut(base, size);
        // Other processes write there unseen.
        self.wrote(base, size);
        let fd = lock(&self.exported).export(base, size, number)?;
        Ok((fd, base, size))
    }

    /// Tells what remembers it that something has written device memory.
    pub(super) fn wrote(&self, addr: u64, bytes: u64) {
        if let Some(checker) = &self.checker {
            checker.memory.write(addr, bytes);
        }
    }

    /// The slabs that are shared memory by now.
    pub(super) fn exported(&self) -> MutexGuard<'_, ExportedSlabs> {
        lock(&self.exported)
    }

    pub(super) fn free_memory(&self, device: u32) -> Result<u64, CuError> {
        let device = self.device(device)?;
        let own = device.total - *lock(&device.used);
        let Some(ledger) = self.ledger.get() else { return Ok(own) };
        ledger.free().map(|free| free.min(own)).map_err(|_| CuError::OPERATING_SYSTEM)
    }

    /// Bytes of the device that are not free, unless that changes just now.
    pub(super) fn used_memory(&self, device: u32) -> Option<u64> {
        self.device(device).ok()?.used.try_lock().ok().map(|used| *used)
    }

    /// Keeps a range's pages from being given back: something uses them again.
    pub(super) fn reuse(&self, addr: u64, size: u64) -> Result<(), CuError> {
        check_client_range(addr, size, self.windows)?;
        lock(&self.retained).cut(addr, size);
        Ok(())
    }

    /// Makes a part of a slab valid.
    pub(super) fn open(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.reuse(addr, size)?;
        let device = arena::device_of(addr).ok_or(CuError::INVALID_VALUE)?;
        if !lock(&self.device(device)?.slabs).contain(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        self.spans.insert(addr, accessible(addr, size));
        if let Some(checker) = &self.checker {
            checker.memory.allocate(addr, size);
        }
        Ok(())
    }

    /// Whether a range is valid and lies in a slab.
    pub(super) fn is_open(&self, addr: u64, size: u64) -> bool {
        let device = arena::device_of(addr).and_then(|index| self.device(index).ok());
        let in_slab = device.is_some_and(|device| lock(&device.slabs).contain(addr, size));
        in_slab && self.spans.covers(addr, size)
    }

    /// Makes a range valid whose slab is yet to be granted.
    pub(super) fn open_early(&self, addr: u64, size: u64) -> Result<(), CuError> {
        check_client_range(addr, size, self.windows)?;
        self.spans.insert(addr, accessible(addr, size));
        Ok(())
    }

    /// Whether all of a range is valid device memory of this process, and not of the shared arena.
    pub(super) fn is_valid_on_device(&self, addr: u64, size: u64) -> bool {
        self.in_arenas(addr, size) && self.spans.covers(addr, size)
    }

    /// Whether all of a range lies in one device's arena, or is a device's outside of it: every
    /// address can be touched.
    pub(super) fn in_arenas(&self, addr: u64, size: u64) -> bool {
        in_device_arena(addr, size, self.windows) || lock(&self.outside).holds(addr, size)
    }

    pub(super) fn close(&self, addr: u64, size: u64) -> Result<(), CuError> {
        check_client_range(addr, size, self.windows)?;
        self.spans.remove(addr, accessible(addr, size));
        if let Some(checker) = &self.checker {
            checker.freed(addr);
        }
        // The pages of an exported slab stay until it ends.
        if lock(&self.exported).hold(addr) {
            return Ok(());
        }
        let mut retained = lock(&self.retained);
        retained.add(addr, size);
        if retained.bytes() > RETAIN_LIMIT {
            for (addr, size) in std::mem::take(&mut *retained).iter() {
                discard(addr, size);
            }
        }
        Ok(())
    }

    /// As [`Memory::close`]; whatever the bytes are, they stay.
    pub(super) fn shut(&self, addr: u64, size: u64) -> Result<(), CuError> {
        check_client_range(addr, size, self.windows)?;
        self.spans.remove(addr, accessible(addr, size));
        if !lock(&self.exported).hold(addr) {
            lock(&self.retained).add(addr, size);
        }
        Ok(())
    }

    /// `size` zeroed bytes in the device's own part of its arena, or outside, valid for access.
    pub(super) fn place(&self, device: u32, size: u64, align: u64) -> Result<Placed, CuError> {
        let owner = self.device(device)?;
        let bytes = size.max(1);
        let mut used = lock(&owner.used);
        if bytes > owner.total - *used {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let addr = if self.is_exact() {
            lock(&owner.own).take(bytes, align).ok_or(CuError::OUT_OF_MEMORY)?
        } else {
            lock(&self.outside).take(bytes, align)?
        };
        *used += bytes;
        self.spans.insert(addr, self.reach(addr, bytes));
        Ok(Placed { addr, size: bytes, device: Some(device) })
    }

    /// `size` zeroed bytes in the proxy's part of the shared arena, valid for access.
    pub(super) fn place_managed(&self, size: u64, align: u64) -> Result<Placed, CuError> {
        let bytes = size.max(1);
        let addr = lock(&self.managed).take(bytes, align).ok_or(CuError::OUT_OF_MEMORY)?;
        self.spans.insert(addr, self.reach(addr, bytes));
        Ok(Placed { addr, size: bytes, device: None })
    }

    /// What `place` or `place_managed` gave before a checkpoint, at the same address; or another
    /// kind of device.
    ///
    /// # Errors
    /// INVALID_VALUE for an address that they would not give, or that is taken.
    pub(super) fn replace(&self, addr: u64, size: u64, managed: bool) -> Result<Placed, CuError> {
        let device = if managed { None } else { arena::device_of(addr) };
        if !managed && is_outside(addr) {
            if self.devices.iter().all(|device| size > device.total) {
                return Err(CuError::OUT_OF_MEMORY);
            }
            lock(&self.outside).take_at(addr, size)?;
            self.spans.insert(addr, size);
            return Ok(Placed { addr, size, device });
        }
        match device {
            Some(index) => {
                self.charge(index, size)?;
                let taken = lock(&self.device(index)?.own).take_at(addr, size);
                taken.ok_or(CuError::INVALID_VALUE).or_else(|error| {
                    self.refund(index, size)?;
                    Err(error)
                })?;
            }
            None if managed => {
                lock(&self.managed).take_at(addr, size).ok_or(CuError::INVALID_VALUE)?;
            }
            None => return Err(CuError::INVALID_VALUE),
        }
        self.spans.insert(addr, self.reach(addr, size));
        Ok(Placed { addr, size, device })
    }

    /// Bytes that kernels can access of what the device has placed: to its end where the program is
    /// checked, else in whole units, for libraries read strings by words. What lies where another
    /// kind of device had it may have a neighbour there.
    fn reach(&self, addr: u64, size: u64) -> u64 {
        let exact = self.checker.is_some() || is_outside(addr);
        if exact { size } else { accessible(addr, size) }
    }

    /// Gives all pages of the devices' private memory back to the system: all of it reads as zero.
    /// What is shared with other processes, or lies in handles, stays.
    pub(super) fn vacate(&self) {
        *lock(&self.retained) = Ranges::default();
        for index in self.windows.iter() {
            let base = arena::device_base(index) as usize as *mut libc::c_void;
            // SAFETY: the range that `map_arena` has mapped, or what was mapped over parts of it;
            // nothing runs. Of shared mappings, this drops no byte.
            unsafe { libc::madvise(base, DEVICE_STRIDE as usize, libc::MADV_DONTNEED) };
        }
    }

    /// Takes back what `place` or `place_managed` gave.
    pub(super) fn unplace(&self, placed: Placed) {
        self.spans.remove(placed.addr, self.reach(placed.addr, placed.size));
        if is_outside(placed.addr) {
            clear(placed.addr, placed.addr + placed.size);
            lock(&self.outside).give_back(placed.addr, placed.size);
            if let Some(device) = placed.device {
                let _ = self.refund(device, placed.size);
            }
            return;
        }
        match placed.device.and_then(|index| self.device(index).ok()) {
            Some(device) => {
                discard(placed.addr, placed.size);
                lock(&device.own).give_back(placed.addr, placed.size);
                let mut used = lock(&device.used);
                *used = used.saturating_sub(placed.size);
            }
            None => {
                clear(placed.addr, placed.addr + placed.size);
                lock(&self.managed).give_back(placed.addr, placed.size);
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for index in self.windows.iter() {
            let base = arena::device_base(index) as usize as *mut libc::c_void;
            // SAFETY: the range was mapped by `map_arena` for this object alone, and whoever used
            // it held this object.
            unsafe { libc::munmap(base, DEVICE_STRIDE as usize) };
        }
    }
}

/// A range that the device placed itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) addr: u64,
    pub(super) size: u64,
    /// `None`: in the shared arena, or where another kind of device had it.
    pub(super) device: Option<u32>,
}

impl Placed {
    /// Whether it lies in no arena.
    pub(super) fn is_outside(&self) -> bool {
        is_outside(self.addr)
    }
}

/// Whether an address is in no arena.
fn is_outside(addr: u64) -> bool {
    arena::device_of(addr).is_none() && !arena::is_shared(addr)
}

/// Whether all of a range lies in one device's arena.
pub(super) fn in_device_arena(addr: u64, size: u64, windows: Windows) -> bool {
    let end = windows.holding(addr).map(|index| arena::device_base(index) + DEVICE_STRIDE);
    end.zip(addr.checked_add(size)).is_some_and(|(end, last)| last <= end)
}

/// Bytes that kernels can access of an allocation of `size` bytes at `addr`: whole units. No other
/// allocation begins in its last one, for the client gives out larger units.
fn accessible(addr: u64, size: u64) -> u64 {
    let end = addr.saturating_add(size).checked_next_multiple_of(GLOBAL_UNIT);
    end.map_or(size, |end| end - addr)
}

/// # Errors
/// INVALID_VALUE for a range outside of the client's part of every device's arena.
pub(super) fn check_client_range(addr: u64, size: u64, windows: Windows) -> Result<(), CuError> {
    let base = arena::device_base(windows.holding(addr).ok_or(CuError::INVALID_VALUE)?);
    let end = addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
    if end <= base + DEVICE_CLIENT_LEN { Ok(()) } else { Err(CuError::INVALID_VALUE) }
}

/// Reserves and opens one device's range: pages appear as they are touched.
fn map_arena(base: u64) -> io::Result<()> {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let want = base as usize as *mut libc::c_void;
    // SAFETY: a new anonymous mapping, which NOREPLACE keeps from touching what is already there.
    let got = unsafe {
        libc::mmap(want, DEVICE_STRIDE as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if got != want {
        // A kernel older than 4.17 ignores the flag.
        // SAFETY: the mapping was made just now and nobody knows of it.
        unsafe { libc::munmap(got, DEVICE_STRIDE as usize) };
        return Err(io::Error::other(format!("address {base:#x} is taken")));
    }
    // SAFETY: advice about our own mapping. A refusal costs only speed.
    unsafe { libc::madvise(want, DEVICE_STRIDE as usize, libc::MADV_HUGEPAGE) };
    Ok(())
}

/// Empties a range of private memory of this process that nobody uses meanwhile: its whole pages go
/// back to the system, and all of it reads as zero.
pub(super) fn discard(addr: u64, size: u64) {
    let end = addr + size;
    let (first, last) = (addr.next_multiple_of(PAGE), end / PAGE * PAGE);
    if first >= last {
        return clear(addr, end);
    }
    // The edges share their pages with neighbours.
    clear(addr, first);
    clear(last, end);
    let pages = first as usize as *mut libc::c_void;
    // SAFETY: whole pages of private anonymous mappings of our own, which nobody uses meanwhile.
    let given = unsafe { libc::madvise(pages, (last - first) as usize, libc::MADV_DONTNEED) };
    if given != 0 {
        clear(first, last);
    }
}

fn clear(from: u64, to: u64) {
    // SAFETY: part of a range of mapped memory of our own, which nobody uses meanwhile.
    unsafe { std::ptr::write_bytes(from as usize as *mut u8, 0, (to - from) as usize) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_ranges_stay_in_the_clients_part() {
        let (base, at) = (arena::device_base(2), Windows::of(&[2]).unwrap());
        assert!(check_client_range(base, 4096, at).is_ok());
        assert!(check_client_range(base + DEVICE_CLIENT_LEN - 1, 2, at).is_err());
        assert!(check_client_range(arena::device_base(0), 1, at).is_err());
        assert!(check_client_range(arena::device_base(1), 1, Windows::first(1)).is_err());
        assert!(check_client_range(base, u64::MAX, at).is_err());
        assert!(check_client_range(0x1000, 1, at).is_err());
    }
}
