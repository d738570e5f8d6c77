//! The file that holds the host's pages of a client's managed memory, where devices see none of
//! them: what a checkpoint has to know of it, which looks at it from outside.
//!
//! The file has the bytes of the devices' arenas, then a bit for each page of these, then one page
//! of words, the head. The bytes of a page whose bit is set count; of all others the device has the
//! current ones, and what the file still has of them is of no use. While the client decides what to
//! move, [`BUSY`] is not 0, and all of the file counts.

use kedge_cuda_types::arena::{DEVICE_STRIDE, MAX_DEVICES};

/// What the file is called.
pub const NAME: &str = "kedge-managed";
/// Of the threads in clients that serve faults on managed memory.
pub const SERVANT: &str = "cuda-managed";
/// Bytes of a page, and of the head.
pub const PAGE: u64 = 4096;
/// Bytes of the bits of one device's pages.
pub const BITS: u64 = DEVICE_STRIDE / PAGE / 8;
/// What the head's first word is as soon as the others are right.
pub const MAGIC: u64 = u64::from_le_bytes(*b"kedgepg1");

/// Words of the head, by their places.
pub const READY: u64 = 0;
/// For how many devices' arenas the file has room.
pub const DEVICES: u64 = 1;
/// Not 0 while the client decides what to move.
pub const BUSY: u64 = 2;
/// The client's userfaultfd, by its number.
pub const DESCRIPTOR: u64 = 3;
/// What it was asked for (UFFDIO_API).
pub const FEATURES: u64 = 4;
/// How it watches each mapping (UFFDIO_REGISTER).
pub const MODES: u64 = 5;
/// Goes up with each restart: then nothing is mapped that was, and only what was current here is.
pub const GENERATION: u64 = 6;
/// Not 0 where the userfaultfd tells of the kernel's own faults as well, so that system calls work.
pub const ALL_FAULTS: u64 = 7;

/// Returns where the bits begin in the file of so many devices.
pub const fn bits(devices: u32) -> u64 {
    devices as u64 * DEVICE_STRIDE
}

/// Returns where the head begins.
pub const fn head(devices: u32) -> u64 {
    bits(devices) + devices as u64 * BITS
}

/// Returns the length of the file.
pub const fn length(devices: u32) -> u64 {
    head(devices) + PAGE
}

/// Returns for how many devices a file of this length is; `None` if it is of no such length.
pub fn devices(bytes: u64) -> Option<u32> {
    (1..=MAX_DEVICES).find(|devices| length(*devices) == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_tell_how_many_devices_there_are() {
        for count in 1..=MAX_DEVICES {
            assert_eq!(devices(length(count)), Some(count));
            assert!(head(count) + PAGE == length(count) && bits(count) < head(count));
        }
        assert_eq!(devices(length(1) - PAGE), None);
        assert_eq!(devices(0), None);
    }
}
