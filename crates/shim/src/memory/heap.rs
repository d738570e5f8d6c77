//! One device's memory as the client sees it: addresses, and the slabs that it has of the device.
//!
//! The client chooses where a slab lies, and the proxy grants it. Slabs are kept when memory is
//! freed, so most allocations need no round trip, and OUT_OF_MEMORY is found by the call itself.

use super::ranges::{GRANULE, LARGE, Ranges, round_up};
use super::slabs::{OWN, SHARED, Slabs};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base};
use std::sync::{Mutex, MutexGuard};

/// Where slabs come from and go to: the proxy.
pub(crate) trait Source {
    /// OUT_OF_MEMORY where the device has not got so much.
    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
    fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
}

/// A device's heap.
#[derive(Debug)]
pub(crate) struct Heap {
    device: u32,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    addresses: Addresses,
    slabs: Slabs,
}

/// The client's part of a device's arena: where slabs and reservations lie.
#[derive(Debug)]
struct Addresses(Ranges);

impl Addresses {
    /// After each slab, so that no two touch.
    const GAP: u64 = LARGE;

    fn new(device: u32) -> Self {
        Self(Ranges::new(device_base(device), DEVICE_CLIENT_LEN))
    }

    /// A place for a slab of `bytes`.
    fn take_slab(&mut self, bytes: u64) -> Option<u64> {
        self.0.take(bytes.checked_add(Self::GAP)?, LARGE)
    }

    fn put_slab(&mut self, base: u64, bytes: u64) {
        self.0.put(base, bytes + Self::GAP);
    }

    /// `size` bytes for the program's own use, at `hint` if that is free.
    fn reserve(&mut self, size: u64, align: u64, hint: u64) -> Option<u64> {
        if hint.is_multiple_of(align) && self.0.take_at(hint, size) {
            return Some(hint);
        }
        self.0.take(size, align)
    }
}

impl Heap {
    pub(crate) fn new(device: u32) -> Self {
        let (addresses, slabs) = (Addresses::new(device), Slabs::default());
        Self { device, inner: Mutex::new(Inner { addresses, slabs }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes memory for `size` bytes: its address and the bytes really taken.
    pub(crate) fn take(&self, size: u64, source: &dyn Source) -> Result<(u64, u64), CuError> {
        let size = round_up(size, GRANULE).ok_or(CuError::OUT_OF_MEMORY)?;
        let mut inner = self.lock();
        if let Some(found) = inner.slabs.take(size) {
            return Ok(found);
        }
        inner.grow(self.device, size, source)?;
        inner.slabs.take(size).ok_or(CuError::OUT_OF_MEMORY)
    }

    /// Takes back what `take` gave, which no work uses any longer.
    pub(crate) fn put(&self, addr: u64, taken: u64, source: &dyn Source) -> Result<(), CuError> {
        let mut inner = self.lock();
        inner.slabs.put(addr, taken);
        while let Some(slab) = inner.slabs.remove_excess() {
            inner.give_back(self.device, slab, source)?;
        }
        Ok(())
    }

    /// Takes addresses without memory, at `hint` if it is free.
    pub(crate) fn reserve(&self, size: u64, align: u64, hint: u64) -> Option<u64> {
        self.lock().addresses.reserve(size, align, hint)
    }

    /// Takes back what `reserve` gave.
    pub(crate) fn unreserve(&self, addr: u64, size: u64) {
        self.lock().addresses.0.put(addr, size);
    }

    /// Granted bytes that nothing uses.
    pub(crate) fn spare(&self) -> u64 {
        self.lock().slabs.spare()
    }

    /// Gives the slabs back that nothing uses, for memory that the device itself places (CUDA
    /// arrays, modules, physical handles).
    pub(crate) fn surrender(&self, source: &dyn Source) -> Result<(), CuError> {
        self.lock().surrender(self.device, source).map(drop)
    }
}

impl Inner {
    /// Gets a slab in which an allocation of `size` bytes fits: of the usual size, or as large as
    /// the device can give it, at the price of all that is kept here unused.
    fn grow(&mut self, device: u32, size: u64, source: &dyn Source) -> Result<(), CuError> {
        let need = round_up(size, LARGE).ok_or(CuError::OUT_OF_MEMORY)?;
        let mut bytes = if size >= OWN { need } else { SHARED };
        loop {
            match self.grant(device, bytes, size, source) {
                Err(CuError::OUT_OF_MEMORY) if bytes > need => bytes = (bytes / 2).max(need),
                Err(CuError::OUT_OF_MEMORY) if self.surrender(device, source)? => {}
                outcome => return outcome,
            }
        }
    }

    fn grant(
        &mut self,
        device: u32,
        bytes: u64,
        size: u64,
        source: &dyn Source,
    ) -> Result<(), CuError> {
        let base = self.addresses.take_slab(bytes).ok_or(CuError::OUT_OF_MEMORY)?;
        let granted = source.grant(device, base, bytes);
        match granted {
            Ok(()) => self.slabs.add(base, bytes, size),
            Err(_) => self.addresses.put_slab(base, bytes),
        }
        granted
    }

    /// Gives a slab back that is no longer among the slabs.
    fn give_back(
        &mut self,
        device: u32,
        (base, bytes): (u64, u64),
        source: &dyn Source,
    ) -> Result<(), CuError> {
        source.give_back(device, base, bytes)?;
        self.addresses.put_slab(base, bytes);
        Ok(())
    }

    /// Gives all idle slabs back. Whether there were any.
    fn surrender(&mut self, device: u32, source: &dyn Source) -> Result<bool, CuError> {
        let mut any = false;
        while let Some(slab) = self.slabs.remove_idle() {
            self.give_back(device, slab, source)?;
            any = true;
        }
        Ok(any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;

    /// A device with this many free bytes, which checks what it is told.
    struct Device {
        free: Cell<u64>,
        slabs: RefCell<BTreeMap<u64, u64>>,
        /// Calls so far.
        calls: Cell<u32>,
    }

    impl Device {
        fn new(free: u64) -> Self {
            Self { free: Cell::new(free), slabs: RefCell::default(), calls: Cell::new(0) }
        }

        fn called(&self) -> u32 {
            self.calls.replace(0)
        }

        fn slabs(&self) -> Vec<u64> {
            self.slabs.borrow().values().copied().collect()
        }
    }

    impl Source for Device {
        fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
            self.calls.set(self.calls.get() + 1);
            assert!((addr | bytes).is_multiple_of(LARGE) && bytes > 0);
            assert!(addr >= device_base(device));
            assert!(addr + bytes <= device_base(device) + DEVICE_CLIENT_LEN);
            let mut slabs = self.slabs.borrow_mut();
            let near = slabs.range(..addr + bytes + LARGE).next_back();
            assert!(near.is_none_or(|(base, len)| base + len + LARGE <= addr), "slabs touch");
            let left = self.free.get().checked_sub(bytes).ok_or(CuError::OUT_OF_MEMORY)?;
            self.free.set(left);
            slabs.insert(addr, bytes);
            Ok(())
        }

        fn give_back(&self, _: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
            self.calls.set(self.calls.get() + 1);
            assert_eq!(self.slabs.borrow_mut().remove(&addr), Some(bytes));
            self.free.set(self.free.get() + bytes);
            Ok(())
        }
    }

    #[test]
    fn a_warm_allocation_needs_no_round_trip() {
        let (heap, device) = (Heap::new(0), Device::new(4096 * MIB));
        for size in [1, 1000, MIB, 15 * MIB, 16 * MIB, 17 * MIB + 1, 1024 * MIB] {
            let first = heap.take(size, &device).unwrap();
            heap.put(first.0, first.1, &device).unwrap();
            device.called();
            for _ in 0..3 {
                let again = heap.take(size, &device).unwrap();
                assert_eq!(again, first);
                heap.put(again.0, again.1, &device).unwrap();
            }
            assert_eq!(device.called(), 0, "{size}");
        }
    }

    #[test]
    fn slabs_are_of_the_usual_size_or_of_the_allocation_s() {
        let (heap, device) = (Heap::new(0), Device::new(4096 * MIB));
        assert_eq!(heap.take(1000, &device), Ok((device_base(0), 1024)));
        assert_eq!(heap.spare(), SHARED - 1024);
        let (large, taken) = heap.take(OWN + 1, &device).unwrap();
        assert_eq!((large % LARGE, taken), (0, OWN + LARGE));
        assert_eq!(device.slabs(), [SHARED, OWN + LARGE]);
        assert_eq!(heap.spare(), SHARED - 1024);
        heap.put(large, taken, &device).unwrap();
        assert_eq!(heap.spare(), SHARED - 1024 + taken);
        heap.surrender(&device).unwrap();
        assert_eq!((device.slabs(), heap.spare()), (vec![SHARED], SHARED - 1024));
    }

    #[test]
    fn a_slab_shrinks_to_what_the_device_has() {
        let (heap, device) = (Heap::new(0), Device::new(13 * MIB));
        heap.take(1, &device).unwrap();
        assert_eq!(device.slabs(), [8 * MIB]);
        heap.take(8 * MIB, &device).unwrap_err();
        heap.take(4 * MIB, &device).unwrap();
        assert_eq!(device.slabs(), [8 * MIB], "it fitted into the first");
        heap.take(4 * MIB, &device).unwrap();
        assert_eq!(device.slabs(), [8 * MIB, 4 * MIB]);
    }

    #[test]
    fn out_of_memory_passes() {
        let (heap, device) = (Heap::new(0), Device::new(32 * MIB));
        assert_eq!(heap.take(33 * MIB, &device), Err(CuError::OUT_OF_MEMORY));
        assert_eq!(heap.take(u64::MAX, &device), Err(CuError::OUT_OF_MEMORY));
        assert_eq!(heap.take(u64::MAX - 1023, &device), Err(CuError::OUT_OF_MEMORY));
        assert_eq!(heap.take(DEVICE_CLIENT_LEN, &device), Err(CuError::OUT_OF_MEMORY));
        let (addr, taken) = heap.take(32 * MIB, &device).unwrap();
        assert_eq!(heap.take(1, &device), Err(CuError::OUT_OF_MEMORY));
        heap.put(addr, taken, &device).unwrap();
        assert!(heap.take(1, &device).is_ok(), "idle memory is given back for it");
        assert_eq!(device.slabs(), [LARGE], "exactly what is needed then");
    }

    #[test]
    fn idle_memory_goes_back_beyond_its_limit() {
        let (heap, device) = (Heap::new(0), Device::new(8192 * MIB));
        let taken: Vec<_> = (0..5).map(|_| heap.take(300 * MIB, &device).unwrap()).collect();
        for (addr, bytes) in taken {
            heap.put(addr, bytes, &device).unwrap();
        }
        assert_eq!((device.slabs().len(), heap.spare()), (3, 900 * MIB));
        let (addr, bytes) = heap.take(2048 * MIB, &device).unwrap();
        heap.put(addr, bytes, &device).unwrap();
        assert_eq!((device.slabs().len(), heap.spare()), (3, 900 * MIB));
    }

    #[test]
    fn reservations_share_the_addresses() {
        let (heap, device) = (Heap::new(0), Device::new(64 * MIB));
        let hint = device_base(0) + 8 * LARGE;
        assert_eq!(heap.reserve(LARGE, LARGE, hint), Some(hint));
        assert_ne!(heap.reserve(LARGE, LARGE, hint), Some(hint));
        let (addr, _) = heap.take(1, &device).unwrap();
        let slab = addr..addr + SHARED;
        assert!(!slab.contains(&hint));
        assert_ne!(heap.reserve(LARGE, LARGE, addr + LARGE), Some(addr + LARGE));
        heap.unreserve(hint, LARGE);
        assert_eq!(heap.reserve(LARGE, LARGE, hint), Some(hint));
    }

    /// Whatever the order, what is given back once is all there again.
    #[test]
    fn everything_comes_back() {
        let (heap, device) = (Heap::new(0), Device::new(512 * MIB));
        let (mut live, mut state) = (Vec::new(), 0x9e37_79b9_7f4a_7c15_u64);
        for _ in 0..20_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if state % 100 < 48 && !live.is_empty() {
                let (addr, taken) = live.swap_remove(state as usize % live.len());
                heap.put(addr, taken, &device).unwrap();
            } else if let Ok(found) =
                heap.take(1 + (state >> 20) % (1 << (10 + state % 16)), &device)
            {
                let overlap = |&(addr, taken): &(u64, u64)| {
                    addr < found.0 + found.1 && found.0 < addr + taken
                };
                assert!(!live.iter().any(overlap), "handed out twice");
                live.push(found);
            }
        }
        for (addr, taken) in live {
            heap.put(addr, taken, &device).unwrap();
        }
        heap.surrender(&device).unwrap();
        assert_eq!((device.free.get(), heap.spare()), (512 * MIB, 0));
        assert_eq!(heap.reserve(DEVICE_CLIENT_LEN, LARGE, 0), Some(device_base(0)));
    }
}
