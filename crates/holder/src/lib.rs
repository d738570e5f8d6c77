//! What a write-back cache says to the process that holds a device's memory for it: its holder.
//!
//! The memory is cut into places of [`PART`] bytes. Bytes cross by a file in memory of [`SLOTS`]
//! slots of that size, whose descriptor comes with [`Answer::Holder`]. On each connection there is
//! one order at a time, and one answer to each; several connections are several orders at once.
#![forbid(unsafe_code)]

use kedge_wire::{Text, wire};

/// Bytes of a place, and of a slot.
pub const PART: u64 = 4 << 20;
/// Slots of the file by which bytes cross.
pub const SLOTS: u32 = 8;
/// The version of these messages.
pub const VERSION: u32 = 2;
/// The longest word on a failure, in bytes.
pub const WHY: usize = 300;

wire! {
    /// What a cache asks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Order {
        /// Who the holder is. The first of each connection. `daemon` is one number for all
        /// connections of a cache's daemon, and no other daemon's: it is answered when those of
        /// the daemons before have ended, as their orders may still use slots.
        Hello = 1 { version: u32, daemon: u64 },
        /// That a place has the bytes of a slot.
        Put = 2 { slot: u32, place: u32 },
        /// That a slot has, from its start, so many bytes of a place from `offset` on.
        Get = 3 { place: u32, slot: u32, offset: u32, length: u32 },
        /// That a place has nothing that is needed: its memory may go back to the device.
        Free = 4 { place: u32 },
        /// That the holder ends, whatever it has.
        End = 5 {},
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
    }
}

impl Order {
    /// Returns whether the order names only what a holder of so many places has.
    pub fn fits(&self, places: u32) -> bool {
        match *self {
            Order::Hello { .. } | Order::End {} => true,
            Order::Put { slot, place } => slot < SLOTS && place < places,
            Order::Get { place, slot, offset, length } => {
                let end = u64::from(offset) + u64::from(length);
                slot < SLOTS && place < places && end <= PART
            }
            Order::Free { place } => place < places,
        }
    }
}
