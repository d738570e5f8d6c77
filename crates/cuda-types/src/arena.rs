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

/// Whether `addr` lies in the shared arena.
pub const fn is_shared(addr: u64) -> bool {
    addr >= SHARED_BASE && addr < SHARED_BASE + SHARED_LEN
}
