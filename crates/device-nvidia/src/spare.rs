//! Memory that snapshots are kept in: spare memory of the devices, and pinned host memory where
//! that does not suffice. Limited, made ready before a pause, returned after it.

use crate::arena::{self, GRANULE, POSIX_FD};
use crate::driver::{Driver, check};
use crate::pace::{DrainRate, DrainWays};
use crate::pinned::Pinned;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;
use kedge_cuda_types::memory::*;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much memory snapshots may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Bytes of each device's memory, at most; some is always left to the program.
    pub gpu: u64,
    /// Bytes of pinned host memory, at most; the largest number: half of what is free.
    pub host: u64,
    /// How fast they leave a device while the program runs.
    pub drain: DrainRate,
    pub ways: DrainWays,
}

impl Default for CacheLimits {
    /// As much as there is, and as fast as the program does not notice.
    fn default() -> CacheLimits {
        let (drain, ways) = Default::default();
        CacheLimits { gpu: u64::MAX, host: u64::MAX, drain, ways }
    }
}

/// Left to the program and the driver on a device whose memory a snapshot takes.
pub(crate) const LEFT: u64 = 256 << 20;
/// Host memory is registered in parts of this size, which also bounds what one piece spans.
const HOST_PART: u64 = 1 << 30;
/// Device memory is created in parts of at most this size; where there is none, in smaller ones.
const DEVICE_PART: u64 = 4 << 30;
/// Threads that make host memory.
const THREADS: usize = 8;

/// Host memory that this machine could give now, bytes.
fn host_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10)
}

/// Device memory of our own, at addresses that the driver picks. Contiguous: created memory and the
/// program's handles, one after the other.
pub(crate) struct Region {
    driver: Arc<Driver>,
    device: CUdevice,
    base: u64,
    reserved: u64,
    filled: u64,
    parts: Vec<Part>,
}

struct Part {
    at: u64,
    bytes: u64,
    /// The driver's handle of memory that was created here, by which it can be exported.
    raw: Option<u64>,
}

impl Region {
    /// Reserves addresses for `bytes`.
    pub(crate) fn reserve(
        driver: &Arc<Driver>,
        device: CUdevice,
        bytes: u64,
    ) -> Result<Region, CuError> {
        let reserved = bytes.max(1).checked_next_multiple_of(GRANULE);
        let reserved = reserved.ok_or(CuError::INVALID_VALUE)?;
        let mut base = 0;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuMemAddressReserve)(&mut base, reserved as usize, 0, 0, 0) })?;
        let driver = Arc::clone(driver);
        Ok(Region { driver, device, base, reserved, filled: 0, parts: Vec::new() })
    }

    /// A region of `bytes`, or nothing.
    pub(crate) fn whole(
        driver: &Arc<Driver>,
        device: CUdevice,
        bytes: u64,
    ) -> Result<Region, CuError> {
        let mut region = Region::reserve(driver, device, bytes)?;
        match region.grow(bytes) {
            got if got >= bytes => region.open().map(|()| region),
            _ => Err(CuError::OUT_OF_MEMORY),
        }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn filled(&self) -> u64 {
        self.filled
    }

    /// Adds created memory, `bytes` or as much as there is; returns how much. To be opened.
    pub(crate) fn grow(&mut self, bytes: u64) -> u64 {
        let before = self.filled;
        let mut part = DEVICE_PART;
        while self.filled - before < bytes && part >= GRANULE {
            let want = (bytes - (self.filled - before)).min(part);
            let want = want.next_multiple_of(GRANULE).min(self.reserved - self.filled);
            if want == 0 {
                break;
            }
            if self.create(want).is_err() {
                part = (want / 2).next_multiple_of(GRANULE).min(part / 2);
            }
        }
        self.filled - before
    }

    fn create(&mut self, bytes: u64) -> Result<(), CuError> {
        let props = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: self.device },
            // What a snapshot is kept in may outlive this process.
            requestedHandleTypes: POSIX_FD,
            ..Default::default()
        };
        let mut raw = 0;
        // SAFETY: live pointers.
        check(unsafe { (self.driver.cuMemCreate)(&mut raw, bytes as usize, &props, 0) })?;
        let mapped = self.map(raw, bytes);
        match (&mapped, self.parts.last_mut()) {
            (Ok(_), Some(part)) => part.raw = Some(raw),
            // SAFETY: made above, and mapped nowhere.
            _ => unsafe {
                (self.driver.cuMemRelease)(raw);
            },
        }
        mapped.map(drop)
    }

    /// Memory that another process has exported, in parts of so many bytes.
    pub(crate) fn import(
        driver: &Arc<Driver>,
        device: CUdevice,
        parts: &[(OwnedFd, u64)],
    ) -> Result<Region, CuError> {
        let total = parts.iter().try_fold(0u64, |sum, (_, bytes)| sum.checked_add(*bytes));
        let mut region = Region::reserve(driver, device, total.ok_or(CuError::INVALID_VALUE)?)?;
        for (fd, bytes) in parts {
            let raw = arena::import(driver, fd)?;
            let mapped = region.map(raw, *bytes);
            // SAFETY: imported above. The memory lives as long as it is mapped.
            unsafe { (driver.cuMemRelease)(raw) };
            mapped?;
        }
        region.open()?;
        Ok(region)
    }

    /// Descriptors of its first parts, at least `bytes` together, and the length of each.
    pub(crate) fn export(&self, bytes: u64) -> Result<Vec<(OwnedFd, u64)>, CuError> {
        let needed = self.parts.iter().filter(|part| part.at < self.base + bytes);
        let export = |part: &Part| {
            let raw = part.raw.ok_or(CuError::NOT_SUPPORTED)?;
            Ok((arena::export(&self.driver, raw)?, part.bytes))
        };
        needed.map(export).collect()
    }

    /// Maps the whole of a handle behind what is there; returns where. To be opened.
    pub(crate) fn map(&mut self, raw: u64, bytes: u64) -> Result<u64, CuError> {
        if bytes > self.reserved - self.filled {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let at = self.base + self.filled;
        // SAFETY: a free part of our own reservation.
        check(unsafe { (self.driver.cuMemMap)(at, bytes as usize, 0, raw, 0) })?;
        self.parts.push(Part { at, bytes, raw: None });
        self.filled += bytes;
        Ok(at)
    }

    /// Lets the device use all of it.
    pub(crate) fn open(&self) -> Result<(), CuError> {
        if self.filled == 0 {
            return Ok(());
        }
        let desc = CUmemAccessDesc {
            location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: self.device },
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a live descriptor; our own mappings.
        check(unsafe { (self.driver.cuMemSetAccess)(self.base, self.filled as usize, &desc, 1) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: our own mappings and reservation; whoever copied to or from it has waited.
        unsafe {
            for Part { at, bytes, raw } in &self.parts {
                (self.driver.cuMemUnmap)(*at, *bytes as usize);
                raw.map(|raw| (self.driver.cuMemRelease)(raw));
            }
            (self.driver.cuMemAddressFree)(self.base, self.reserved as usize);
        }
    }
}

/// What a device is asked to keep, for one snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// As the client counts.
    pub(crate) index: u32,
    pub(crate) raw: CUdevice,
    pub(crate) bytes: u64,
    /// Free memory of the device.
    pub(crate) free: u64,
}

/// Memory for one snapshot.
#[derive(Default)]
pub(crate) struct Room {
    pub(crate) devices: HashMap<u32, Vec<Region>>,
    pub(crate) host: Vec<Pinned>,
}

impl Room {
    fn on(&self, device: u32) -> u64 {
        self.devices.get(&device).into_iter().flatten().map(Region::filled).sum()
    }

    fn host_bytes(&self) -> u64 {
        self.host.iter().map(Pinned::bytes).sum()
    }
}

/// The memory that is ready, and the limits.
pub(crate) struct Cache {
    driver: Arc<Driver>,
    pub(crate) limits: CacheLimits,
    ready: Mutex<Ready>,
}

#[derive(Default)]
struct Ready {
    room: Room,
    /// Taken by snapshots that exist: of each device, and of the host.
    lent: HashMap<u32, u64>,
    lent_host: u64,
}

impl Cache {
    pub(crate) fn new(driver: &Arc<Driver>, limits: CacheLimits) -> Cache {
        Cache { driver: Arc::clone(driver), limits, ready: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a snapshot that needs so much, as far as there is any. Some context is
    /// current.
    pub(crate) fn prepare(&self, needs: &[Need]) -> Result<(), CuError> {
        let mut ready = self.lock();
        let mut rest = 0;
        for need in needs {
            let have = ready.room.on(need.index);
            let lent = ready.lent.get(&need.index).copied().unwrap_or(0);
            let limit = self.limits.gpu.saturating_sub(lent + have);
            // Parts of runs begin at whole 512 bytes: a little is lost where memory ends.
            let more = (need.bytes + GRANULE).saturating_sub(have);
            let more = more.next_multiple_of(GRANULE).min(limit);
            let more = more.min(need.free.saturating_sub(LEFT));
            let got = self.grow(&mut ready.room, need, more)?;
            rest += need.bytes.saturating_sub(have + got);
        }
        let have = ready.room.host_bytes();
        let limit = match self.limits.host {
            u64::MAX => host_memory() / 2,
            limit => limit.saturating_sub(ready.lent_host + have),
        };
        let more = rest.saturating_sub(have).next_multiple_of(GRANULE).min(limit);
        ready.room.host.extend(self.pin(more)?);
        Ok(())
    }

    /// Adds up to `bytes` of a device's memory; returns how much.
    fn grow(&self, room: &mut Room, need: &Need, bytes: u64) -> Result<u64, CuError> {
        if bytes < GRANULE {
            return Ok(0);
        }
        let mut region = Region::reserve(&self.driver, need.raw, bytes)?;
        let got = region.grow(bytes / GRANULE * GRANULE);
        region.open()?;
        if got > 0 {
            room.devices.entry(need.index).or_default().push(region);
        }
        Ok(got)
    }

    /// Pinned memory in parts, each made by its own thread.
    fn pin(&self, bytes: u64) -> Result<Vec<Pinned>, CuError> {
        let mut parts = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let part = left.min(HOST_PART);
            parts.push(Pinned::new(&self.driver, part as usize, THREADS)?);
            left -= part;
        }
        Ok(parts)
    }

    /// Takes all that is ready, for a snapshot.
    pub(crate) fn take(&self) -> Room {
        let mut ready = self.lock();
        let room = std::mem::take(&mut ready.room);
        for device in room.devices.keys() {
            *ready.lent.entry(*device).or_default() += room.on(*device);
        }
        ready.lent_host += room.host_bytes();
        room
    }

    /// Ends what `take` gave: device memory is the program's again, host memory is kept for the
    /// next.
    pub(crate) fn give_back(&self, room: Room) {
        let mut ready = self.lock();
        for device in room.devices.keys() {
            let lent = ready.lent.entry(*device).or_default();
            *lent = lent.saturating_sub(room.on(*device));
        }
        ready.lent_host = ready.lent_host.saturating_sub(room.host_bytes());
        ready.room.host.extend(room.host);
    }

    /// Gives up the device memory that no snapshot uses as yet; whether there was any.
    pub(crate) fn surrender(&self) -> bool {
        let devices = std::mem::take(&mut self.lock().room.devices);
        !devices.is_empty()
    }
}
