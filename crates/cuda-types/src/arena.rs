//! The address map. A device address never changes in a job's life, so every range that a pointer
//! may name lies at a fixed place that client and proxy both keep free of anything else.

/// Host memory that both processes map at this address (one sparse memfd): pinned allocations and
/// managed memory.
pub const SHARED_BASE: u64 = 0x2000_0000_0000;
/// Length of the shared arena's address range and of its sparse memfd.
pub const SHARED_LEN: u64 = 512 << 30;
/// The client places allocations below this offset of the shared arena; the proxy places above it
/// (managed variables of modules).
pub const SHARED_CLIENT_LEN: u64 = 448 << 30;

/// Bytes of the ring in which the calls of a client that is traced come to its proxy. It is the end
/// of the client's part of the shared arena, where nothing else is placed.
pub const CALLS_LEN: u64 = 4 << 20;
/// First address of that ring.
pub const CALLS_BASE: u64 = SHARED_BASE + SHARED_CLIENT_LEN - CALLS_LEN;

/// First device address. Device `i` owns `DEVICE_STRIDE` bytes from `device_base(i)`. The client
/// reserves the whole range without access.
pub const DEVICE_BASE: u64 = 0x3000_0000_0000;
/// Address range of one device.
pub const DEVICE_STRIDE: u64 = 1 << 40;
/// Devices that the address map has room for.
pub const MAX_DEVICES: u32 = 16;
/// The client places allocations below this offset of a device's range; the device itself places
/// above it (module globals, device heap, print buffers).
pub const DEVICE_CLIENT_LEN: u64 = 768 << 30;

/// The first address of device `index`.
pub const fn device_base(index: u32) -> u64 {
    DEVICE_BASE + index as u64 * DEVICE_STRIDE
}

/// The device whose range holds `addr`.
pub const fn device_of(addr: u64) -> Option<u32> {
    let end = DEVICE_BASE + MAX_DEVICES as u64 * DEVICE_STRIDE;
    if addr >= DEVICE_BASE && addr < end {
        Some(((addr - DEVICE_BASE) / DEVICE_STRIDE) as u32)
    } else {
        None
    }
}

/// Which windows of the address map a process's devices have: as which of a job's devices programs
/// count them. Its devices lie in rising windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows(u16);

const _: () = assert!(MAX_DEVICES == u16::BITS);

impl Windows {
    /// Returns those of so many devices that are all of a job's.
    pub const fn first(count: u32) -> Windows {
        if count >= MAX_DEVICES { Windows(u16::MAX) } else { Windows((1 << count) - 1) }
    }

    /// Returns those of these numbers; `None` where they do not rise, or are no windows.
    pub fn of(numbers: &[u32]) -> Option<Windows> {
        let rise = numbers.is_sorted_by(|a, b| a < b);
        let fit = numbers.iter().all(|number| *number < MAX_DEVICES);
        let bits = || numbers.iter().fold(0, |bits, number| bits | 1 << number);
        (rise && fit).then(|| Windows(bits()))
    }

    /// Returns how many there are.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the position among a process's devices of the one in a window.
    pub fn position(self, window: u32) -> Option<usize> {
        let bit = 1u16.checked_shl(window).filter(|bit| self.0 & bit != 0)?;
        Some((self.0 & (bit - 1)).count_ones() as usize)
    }

    /// Returns the window that holds an address, if it is one of these.
    pub fn holding(self, addr: u64) -> Option<u32> {
        device_of(addr).filter(|window| self.position(*window).is_some())
    }

    /// Returns them, rising.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..MAX_DEVICES).filter(move |window| self.0 & 1 << window != 0)
    }
}

/// Whether `addr` lies in the shared arena.
pub const fn is_shared(addr: u64) -> bool {
    addr >= SHARED_BASE && addr < SHARED_BASE + SHARED_LEN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_positions_among_a_jobs_devices() {
        let some = Windows::of(&[1, 4, 15]).unwrap();
        assert_eq!((some.count(), some.iter().collect::<Vec<_>>()), (3, vec![1, 4, 15]));
        assert_eq!([0, 1, 4, 15].map(|w| some.position(w)), [None, Some(0), Some(1), Some(2)]);
        assert_eq!((some.position(16), some.position(u32::MAX)), (None, None));
        assert_eq!(some.holding(device_base(4) + 5), Some(4));
        assert_eq!([device_base(0), device_base(5), 0x1000].map(|at| some.holding(at)), [None; 3]);
        assert_eq!(Windows::of(&[0, 1, 2]), Some(Windows::first(3)));
        assert_eq!(Windows::first(16).count(), 16);
        for bad in [&[1, 1][..], &[2, 1], &[16]] {
            assert_eq!(Windows::of(bad), None, "{bad:?}");
        }
    }
}
