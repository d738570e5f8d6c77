//! What a write-back cache says to the process that holds a device's memory for it: its holder.
//!
//! The memory is cut into places of [`PART`] bytes. Bytes cross by a file in memory of [`SLOTS`]
//! slots of that size, whose descriptor comes with [`Answer::Holder`]. On each connection there is
//! one order at a time, and one answer to each; several connections are several orders at once.
//!
//! At a socket of its own, for programs of other users as well, a holder is asked for room
//! ([`Plea`]) by whoever needs memory of that device.
#![forbid(unsafe_code)]

use kedge_wire::{Text, decode_canonical, wire};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a place, and of a slot.
pub const PART: u64 = 4 << 20;
/// Slots of the file by which bytes cross.
pub const SLOTS: u32 = 8;
/// The version of these messages.
pub const VERSION: u32 = 3;
/// How long a holder makes room for one that asks for it.
pub const ROOM_LIMIT: Duration = Duration::from_secs(10);
/// The longest word on a failure, in bytes.
pub const WHY: usize = 300;

wire! {
    /// What a cache asks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Order {
        /// Who the holder is. The first of each connection. `daemon` is one number for all
        /// connections of a cache's daemon, and no other daemon's: it is answered when those of
        /// the daemons before have ended, as their orders may still use slots. So many bytes of the
        /// device are to stay free for other programs, from then on.
        Hello = 1 { version: u32, daemon: u64, keep: u64 },
        /// That a place has the bytes of a slot.
        Put = 2 { slot: u32, place: u32 },
        /// That a slot has, from its start, so many bytes of a place from `offset` on.
        Get = 3 { place: u32, slot: u32, offset: u32, length: u32 },
        /// That a place has nothing that is needed: its memory may go back to the device.
        Free = 4 { place: u32 },
        /// That the holder ends, whatever it has.
        End = 5 {},
        /// How the device stands.
        Look = 6 {},
    }

    /// What a program's proxy asks the holders of its device, after an allocation has failed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Plea {
        /// That so many bytes of the device are free. It is answered by [`Answer::Done`] when they
        /// are, and by [`Answer::Full`] if they cannot be, or not within [`ROOM_LIMIT`].
        Room = 1 { version: u32, bytes: u64 },
    }

    /// What its holder answers.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Answer {
        /// It is this one, of so many places; with the descriptor of the slots. No other one, now
        /// or later, has its number.
        Holder = 1 { number: u64, places: u32 },
        /// It is done.
        Done = 2 {},
        /// The device has no memory for it just now.
        Full = 3 {},
        /// It cannot be done.
        Failed = 4 { why: Text<WHY> },
        /// So many bytes of the device are free, where its memory is shared with others; and of
        /// the device, `wanted` bytes are to be, for programs that wait for them.
        Stands = 5 { free: u64, wanted: u64 },
    }
}

/// Decodes `bytes` as every message of a holder: what the fuzz target and its test hold these to.
/// Decoding must not panic, and what it accepts must have exactly one encoding: these bytes.
///
/// # Panics
/// Where a decoded value encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    if let Some(order) = decode_canonical::<Order>(bytes) {
        // Whatever is named is there or not.
        let _ = order.fits(1);
    }
    decode_canonical::<Plea>(bytes);
    decode_canonical::<Answer>(bytes);
}

/// Free bytes of a device whose memory no other process has.
pub const UNSHARED: u64 = u64::MAX;

/// Returns the folder in memory where the holders of a user's caches are asked for room, each at a
/// socket whose name begins with [`room_name`].
pub fn rooms_of(user: u32) -> PathBuf {
    Path::new("/dev/shm").join(format!("kedge-room-{user}"))
}

/// Returns how the names of sockets begin where holders of a device's memory are asked for room.
/// `device` is the same in all processes, and no other device's.
pub fn room_name(device: &[u8; 16]) -> String {
    let mut name: String = device.iter().map(|byte| format!("{byte:02x}")).collect();
    name.push('-');
    name
}

impl Order {
    /// Returns whether the order names only what a holder of so many places has.
    pub fn fits(&self, places: u32) -> bool {
        match *self {
            Order::Hello { .. } | Order::End {} | Order::Look {} => true,
            Order::Put { slot, place } => slot < SLOTS && place < places,
            Order::Get { place, slot, offset, length } => {
                let end = u64::from(offset) + u64::from(length);
                slot < SLOTS && place < places && end <= PART
            }
            Order::Free { place } => place < places,
        }
    }
}
