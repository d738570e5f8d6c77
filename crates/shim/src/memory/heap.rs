//! One device's memory as the client accounts for it: addresses, and the quota that pays for them.
//!
//! An allocation needs both. The quota comes from the proxy in chunks and is kept when memory is
//! freed, so most allocations need no round trip, and OUT_OF_MEMORY is found by the call itself.

use super::ranges::{GRANULE, LARGE, Ranges, round_up};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base};
use std::sync::{Mutex, MutexGuard};

/// Quota is asked for in chunks of this many bytes, or of what an allocation needs beyond it.
const CHUNK: u64 = 64 << 20;

/// Where quota comes from and goes to: the proxy.
pub(crate) trait Quota {
    /// At least `bytes`; OUT_OF_MEMORY where the device has not got them.
    fn grant(&self, device: u32, bytes: u64) -> Result<u64, CuError>;
    fn give_back(&self, device: u32, bytes: u64) -> Result<(), CuError>;
}

/// A device's heap.
#[derive(Debug)]
pub(crate) struct Heap {
    device: u32,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    ranges: Ranges,
    /// Bytes that the proxy has granted, and how many of them are in use.
    granted: u64,
    used: u64,
}

impl Heap {
    pub(crate) fn new(device: u32) -> Self {
        let ranges = Ranges::new(device_base(device), DEVICE_CLIENT_LEN);
        Self { device, inner: Mutex::new(Inner { ranges, granted: 0, used: 0 }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes memory for `size` bytes: its address and the bytes really taken.
    pub(crate) fn take(&self, size: u64, quota: &dyn Quota) -> Result<(u64, u64), CuError> {
        let size = round_up(size, GRANULE).ok_or(CuError::OUT_OF_MEMORY)?;
        let align = if size >= LARGE { LARGE } else { GRANULE };
        let mut inner = self.lock();
        inner.charge(self.device, size, quota)?;
        match inner.ranges.take(size, align) {
            Some(addr) => Ok((addr, size)),
            None => {
                inner.used -= size;
                Err(CuError::OUT_OF_MEMORY)
            }
        }
    }

    /// Takes back what `take` gave.
    pub(crate) fn put(&self, addr: u64, size: u64) {
        let mut inner = self.lock();
        inner.used -= size;
        inner.ranges.put(addr, size);
    }

    /// Takes addresses without memory, at `hint` if it is free.
    pub(crate) fn reserve(&self, size: u64, align: u64, hint: u64) -> Option<u64> {
        let mut inner = self.lock();
        if hint.is_multiple_of(align) && inner.ranges.take_at(hint, size) {
            return Some(hint);
        }
        inner.ranges.take(size, align)
    }

    /// Takes back what `reserve` gave.
    pub(crate) fn unreserve(&self, addr: u64, size: u64) {
        self.lock().ranges.put(addr, size);
    }

    /// Takes memory without addresses.
    pub(crate) fn charge(&self, size: u64, quota: &dyn Quota) -> Result<(), CuError> {
        self.lock().charge(self.device, size, quota)
    }

    /// Takes back what `charge` gave.
    pub(crate) fn refund(&self, size: u64) {
        self.lock().used -= size;
    }

    /// Granted bytes that nothing uses.
    pub(crate) fn spare(&self) -> u64 {
        let inner = self.lock();
        inner.granted - inner.used
    }

    /// Gives unused quota back, for memory that the device itself places (CUDA arrays, modules).
    pub(crate) fn surrender(&self, quota: &dyn Quota) -> Result<(), CuError> {
        let mut inner = self.lock();
        let spare = inner.granted - inner.used;
        if spare > 0 {
            quota.give_back(self.device, spare)?;
            inner.granted = inner.used;
        }
        Ok(())
    }
}

impl Inner {
    fn charge(&mut self, device: u32, size: u64, quota: &dyn Quota) -> Result<(), CuError> {
        let used = self.used.checked_add(size).ok_or(CuError::OUT_OF_MEMORY)?;
        if used > self.granted {
            let need = used - self.granted;
            let granted = quota.grant(device, need.max(CHUNK)).or_else(|error| match error {
                CuError::OUT_OF_MEMORY if need < CHUNK => quota.grant(device, need),
                error => Err(error),
            })?;
            self.granted += granted;
        }
        self.used = used;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A device with this many free bytes.
    struct Device(Cell<u64>);
    impl Quota for Device {
        fn grant(&self, _: u32, bytes: u64) -> Result<u64, CuError> {
            let left = self.0.get().checked_sub(bytes).ok_or(CuError::OUT_OF_MEMORY)?;
            self.0.set(left);
            Ok(bytes)
        }
        fn give_back(&self, _: u32, bytes: u64) -> Result<(), CuError> {
            self.0.set(self.0.get() + bytes);
            Ok(())
        }
    }

    #[test]
    fn quota_comes_in_chunks_and_is_kept() {
        let (heap, device) = (Heap::new(0), Device(Cell::new(4 * CHUNK)));
        let (addr, size) = heap.take(1000, &device).unwrap();
        assert_eq!((addr, size), (device_base(0), 1024));
        assert_eq!((device.0.get(), heap.spare()), (3 * CHUNK, CHUNK - 1024));
        heap.put(addr, size);
        assert_eq!(heap.take(512, &device).unwrap().0, addr, "freed memory is used again");
        assert_eq!(device.0.get(), 3 * CHUNK);
        heap.surrender(&device).unwrap();
        assert_eq!((device.0.get(), heap.spare()), (4 * CHUNK - 512, 0));
    }

    #[test]
    fn out_of_memory_passes() {
        let (heap, device) = (Heap::new(0), Device(Cell::new(CHUNK / 2)));
        assert_eq!(heap.take(CHUNK, &device), Err(CuError::OUT_OF_MEMORY));
        assert_eq!(heap.take(u64::MAX, &device), Err(CuError::OUT_OF_MEMORY));
        let (addr, size) = heap.take(CHUNK / 2, &device).unwrap();
        assert_eq!(heap.take(1, &device), Err(CuError::OUT_OF_MEMORY));
        heap.put(addr, size);
        assert!(heap.take(1, &device).is_ok(), "a retry after a free succeeds");
    }

    #[test]
    fn large_blocks_are_aligned() {
        let (heap, device) = (Heap::new(1), Device(Cell::new(4 * CHUNK)));
        heap.take(1, &device).unwrap();
        assert_eq!(heap.take(LARGE + 1, &device).unwrap(), (device_base(1) + LARGE, LARGE + 512));
        assert_eq!(heap.take(1, &device).unwrap().0, device_base(1) + 512, "the gap is filled");
    }

    #[test]
    fn addresses_and_memory_can_be_taken_apart() {
        let (heap, device) = (Heap::new(0), Device(Cell::new(CHUNK)));
        let hint = device_base(0) + 8 * LARGE;
        assert_eq!(heap.reserve(LARGE, LARGE, hint), Some(hint));
        assert_ne!(heap.reserve(LARGE, LARGE, hint), Some(hint));
        heap.charge(CHUNK, &device).unwrap();
        assert_eq!(heap.take(1, &device), Err(CuError::OUT_OF_MEMORY));
        heap.refund(CHUNK);
        heap.unreserve(hint, LARGE);
        assert!(heap.take(1, &device).is_ok());
    }
}
