//! What is remembered of device memory that programs allocate: where each allocation ends to the
//! byte, and which bytes nobody has written.

use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base, device_of};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Bytes of address space for the marks of one device: a bit a byte.
const MARKS: u64 = DEVICE_CLIENT_LEN / 8;
/// Allocations end at multiples of this, as far as accesses are checked everywhere.
const UNIT: u64 = crate::spec::GLOBAL_UNIT;
/// Bytes whose marks are a word of memory.
const WORD: u64 = 64;
/// Bits of the filter for units in which an allocation ends.
const FILTER: u64 = 1 << 16;

/// What is remembered of the allocations of all devices.
#[derive(Debug)]
pub(crate) struct Shadow {
    /// By address: bytes.
    allocations: RwLock<BTreeMap<u64, u64>>,
    /// Which units some allocation ends in, by a hash; others may have the same.
    tails: Box<[AtomicU64]>,
    marks: Option<Marks>,
}

/// A bit for each byte of the devices' memory: set where nobody has written it since it was
/// allocated.
#[derive(Debug)]
struct Marks {
    /// Addresses of mappings of [`MARKS`] bytes.
    devices: Vec<usize>,
}

impl Shadow {
    /// For so many devices; `written`: which bytes are written is remembered, too.
    ///
    /// # Errors
    /// As of mmap.
    pub(crate) fn new(devices: u32, written: bool) -> io::Result<Shadow> {
        let tails = (0..FILTER / 64).map(|_| AtomicU64::new(0)).collect();
        let marks = if written { Some(Marks::new(devices)?) } else { None };
        Ok(Shadow { allocations: RwLock::default(), tails, marks })
    }

    fn allocations(&self) -> RwLockReadGuard<'_, BTreeMap<u64, u64>> {
        self.allocations.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn tail(&self, addr: u64) -> (&AtomicU64, u64) {
        let hash = (addr / UNIT).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
        (&self.tails[(hash / 64 % (FILTER / 64)) as usize], 1 << (hash % 64))
    }

    /// `bytes` bytes are allocated at `addr`.
    pub(crate) fn allocate(&self, addr: u64, bytes: u64) {
        let mut all = self.allocations.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(addr, bytes);
        if !bytes.is_multiple_of(UNIT) {
            let (word, bit) = self.tail(addr + bytes);
            word.fetch_or(bit, Ordering::Relaxed);
        }
        if let Some(marks) = &self.marks {
            marks.set(addr, bytes, true);
        }
    }

    /// The allocation at `addr` ends. Returns its size where nobody has written any of it.
    pub(crate) fn free(&self, addr: u64) -> Option<u64> {
        let mut all = self.allocations.write().unwrap_or_else(PoisonError::into_inner);
        let bytes = all.remove(&addr)?;
        let marks = self.marks.as_ref()?;
        let unused = marks.all(addr, bytes);
        marks.set(addr, bytes, false);
        unused.then_some(bytes)
    }

    /// Returns the allocations of which nobody has written any byte: address and size.
    pub(crate) fn unused(&self) -> Vec<(u64, u64)> {
        let Some(marks) = &self.marks else { return Vec::new() };
        let all = self.allocations();
        let unused = all.iter().filter(|(addr, bytes)| marks.all(**addr, **bytes));
        unused.map(|(addr, bytes)| (*addr, *bytes)).collect()
    }

    /// Returns the allocation that holds `addr`, or ends in the unit that does: where it starts and
    /// ends.
    pub(crate) fn allocation(&self, addr: u64) -> Option<(u64, u64)> {
        let all = self.allocations();
        let (start, bytes) = all.range(..=addr).next_back()?;
        (addr < (start + bytes).next_multiple_of(UNIT)).then(|| (*start, start + bytes))
    }

    /// Whether an access of `bytes` bytes lies behind the end of an allocation, in its last unit.
    /// Of several elements at once, which compilers make of fewer, the first has to.
    pub(crate) fn is_past(&self, addr: u64, bytes: u64, several: bool) -> bool {
        let (word, bit) = self.tail(addr);
        if word.load(Ordering::Relaxed) & bit == 0 {
            return false;
        }
        let last = if several { addr } else { addr.saturating_add(bytes.max(1) - 1) };
        self.allocation(addr).is_some_and(|(_, end)| last >= end)
    }

    /// Whether nobody has written some byte of an access.
    pub(crate) fn is_unwritten(&self, addr: u64, bytes: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.any(addr, bytes))
    }

    /// Something writes `bytes` bytes at `addr`.
    pub(crate) fn write(&self, addr: u64, bytes: u64) {
        if let Some(marks) = &self.marks
            && marks.any(addr, bytes)
        {
            marks.set(addr, bytes, false);
        }
    }

    /// Bytes are copied, with what is known of them.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64) {
        let Some(marks) = &self.marks else { return };
        if !marks.any(from, bytes) {
            return self.write(to, bytes);
        }
        for at in 0..bytes {
            let unwritten = marks.any(from + at, 1);
            // Where nothing was allocated, nothing is remembered.
            if marks.any(to + at, 1) != unwritten
                && (!unwritten || self.allocation(to + at).is_some())
            {
                marks.set(to + at, 1, unwritten);
            }
        }
    }
}

impl Marks {
    fn new(devices: u32) -> io::Result<Marks> {
        let mut marks = Marks { devices: Vec::new() };
        for _ in 0..devices {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new anonymous mapping, where the system wants it.
            let at =
                unsafe { libc::mmap(std::ptr::null_mut(), MARKS as usize, access, flags, -1, 0) };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            marks.devices.push(at as usize);
        }
        Ok(marks)
    }

    /// The marks of the eight bytes at each multiple of 8 in [addr, addr+bytes), each with a mask
    /// of those bytes in the range; nothing where that is not all memory that clients may allocate.
    fn each(&self, addr: u64, bytes: u64) -> impl Iterator<Item = (&AtomicU8, u8)> {
        let device = device_of(addr);
        let mapping = device.and_then(|device| self.devices.get(device as usize)).copied();
        let offset = addr.wrapping_sub(device_base(device.unwrap_or(0)));
        let fits = mapping.is_some() && offset < DEVICE_CLIENT_LEN;
        let bytes = if fits { bytes.min(DEVICE_CLIENT_LEN - offset) } else { 0 };
        let end = offset.wrapping_add(bytes);
        let cells = if bytes == 0 { 0..0 } else { offset / 8..end.div_ceil(8) };
        cells.map(move |cell| {
            let from = offset.saturating_sub(cell * 8).min(8) as u32;
            let to = (end - cell * 8).min(8) as u32;
            let mask = ((1u32 << to) - (1u32 << from)) as u8;
            let at = mapping.unwrap_or(0) as *const AtomicU8;
            // SAFETY: the mapping has a byte for each eight bytes of the client's part of a
            // device's arena, in which the cell lies, and lives as long as `self`.
            (unsafe { &*at.add(cell as usize) }, mask)
        })
    }

    fn any(&self, addr: u64, bytes: u64) -> bool {
        self.each(addr, bytes).any(|(marks, mask)| marks.load(Ordering::Relaxed) & mask != 0)
    }

    fn all(&self, addr: u64, bytes: u64) -> bool {
        self.each(addr, bytes).all(|(marks, mask)| marks.load(Ordering::Relaxed) & mask == mask)
    }

    fn set(&self, addr: u64, bytes: u64, unwritten: bool) {
        let bytes = bytes.min(DEVICE_CLIENT_LEN);
        let (from, to) = (addr.next_multiple_of(WORD), (addr + bytes) / WORD * WORD);
        if bytes <= 4 * WORD || from >= to {
            return self.set_some(addr, bytes, unwritten);
        }
        self.set_some(addr, from - addr, unwritten);
        self.set_some(to, addr + bytes - to, unwritten);
        let whole = if unwritten { u64::MAX } else { 0 };
        self.words(from, to - from).for_each(|word| word.store(whole, Ordering::Relaxed));
    }

    /// The marks of [addr, addr+bytes), both multiples of [`WORD`]; nothing where that is not all
    /// memory that clients may allocate.
    fn words(&self, addr: u64, bytes: u64) -> impl Iterator<Item = &AtomicU64> {
        let device = device_of(addr);
        let mapping = device.and_then(|device| self.devices.get(device as usize)).copied();
        let offset = addr.wrapping_sub(device_base(device.unwrap_or(0)));
        let fits = mapping.is_some() && offset < DEVICE_CLIENT_LEN;
        let bytes = if fits { bytes.min(DEVICE_CLIENT_LEN - offset) } else { 0 };
        let at = mapping.unwrap_or(0) as *const AtomicU64;
        // SAFETY: the mapping has a byte for each eight bytes of the client's part of a device's
        // arena, in which the range lies, and lives as long as `self`; offsets are multiples of the
        // bytes that a word of marks is for, so that each word is aligned.
        (0..bytes / WORD).map(move |word| unsafe { &*at.add((offset / WORD + word) as usize) })
    }

    fn set_some(&self, addr: u64, bytes: u64, unwritten: bool) {
        for (marks, mask) in self.each(addr, bytes) {
            match (unwritten, mask) {
                // Another worker's marks are beside these only where these are not all.
                (_, u8::MAX) => marks.store(if unwritten { mask } else { 0 }, Ordering::Relaxed),
                (true, mask) => drop(marks.fetch_or(mask, Ordering::Relaxed)),
                (false, mask) => drop(marks.fetch_and(!mask, Ordering::Relaxed)),
            }
        }
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        for at in &self.devices {
            // SAFETY: `new` has mapped it, and whoever used it held this object.
            unsafe { libc::munmap(*at as *mut libc::c_void, MARKS as usize) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shadow() -> (Shadow, u64) {
        (Shadow::new(1, true).unwrap(), device_base(0) + 4096)
    }

    #[test]
    fn allocations_end_to_the_byte() {
        let (shadow, base) = shadow();
        shadow.allocate(base, 100);
        assert!(!shadow.is_past(base + 96, 4, false) && shadow.is_past(base + 100, 4, false));
        assert!(shadow.is_past(base + 98, 4, false) && !shadow.is_past(base + 96, 16, true));
        assert!(shadow.is_past(base + 112, 16, true) && !shadow.is_past(base + 128, 4, false));
        assert_eq!(shadow.allocation(base + 127), Some((base, base + 100)));
        assert_eq!(shadow.allocation(base + 128), None);
        shadow.free(base);
        assert!(!shadow.is_past(base + 100, 4, false));
    }

    #[test]
    fn bytes_are_unwritten_until_something_writes_them() {
        let (shadow, base) = shadow();
        assert!(!shadow.is_unwritten(base, 8), "not allocated");
        shadow.allocate(base, 1000);
        shadow.write(base + 3, 6);
        let unwritten = |from: u64, bytes| shadow.is_unwritten(base + from, bytes);
        assert!(!unwritten(3, 6) && unwritten(2, 1) && unwritten(9, 1) && unwritten(0, 1000));
        shadow.write(base + 70, 860);
        assert!(!unwritten(70, 860) && unwritten(69, 1) && unwritten(930, 1));
        shadow.write(base, 1000);
        assert!(!unwritten(0, 1000));
        assert_eq!(shadow.free(base), None);
    }

    #[test]
    fn copies_take_along_what_is_unwritten() {
        let (shadow, base) = shadow();
        shadow.allocate(base, 64);
        shadow.allocate(base + 256, 64);
        shadow.write(base + 4, 4);
        shadow.copy(base + 256, base, 8);
        assert!(shadow.is_unwritten(base + 256, 4) && !shadow.is_unwritten(base + 260, 4));
        shadow.copy(base + 512, base, 8);
        assert!(!shadow.is_unwritten(base + 512, 8), "nothing is allocated there");
        shadow.copy(base + 256, base + 4, 4);
        assert!(!shadow.is_unwritten(base + 256, 8));
    }

    #[test]
    fn what_nobody_writes_is_unused() {
        let (shadow, base) = shadow();
        shadow.allocate(base, 64);
        shadow.allocate(base + 256, 64);
        shadow.write(base + 256, 1);
        assert_eq!(shadow.unused(), [(base, 64)]);
        assert_eq!((shadow.free(base), shadow.free(base + 256)), (Some(64), None));
    }

    #[test]
    fn strange_addresses_are_nothing() {
        let (shadow, _) = shadow();
        for addr in [0, 1 << 40, u64::MAX - 3, device_base(1), device_base(0) + DEVICE_CLIENT_LEN] {
            shadow.write(addr, u64::MAX);
            assert!(!shadow.is_unwritten(addr, u64::MAX) && !shadow.is_past(addr, 8, false));
        }
    }
}
