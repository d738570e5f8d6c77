//! Leases of the write-back cache: a program writes the end of a file into the cache's memory by
//! itself, and the daemon is not asked for each write.
//!
//! A program asks for a lease by an ioctl on its own descriptor, which shows that it may write the
//! file ([`Ask`]). The daemon answers with a range beyond the file's end and with where those bytes
//! go: a *shadow* in the cache's memory, at the offsets that they have in the file ([`Lease`]). The
//! program writes there, in order, and then says how far it has come, in a [`Slot`] of memory that
//! both have mapped ([`Page`]). What is said there is acknowledged: it is in the cache, whoever
//! ends.
//!
//! The daemon ends a lease at any time, by one bit in the slot, and then knows what was written. A
//! program that comes too late learns it from the same word, and writes through the mount instead.
//! So nobody waits for anybody, and a program that is stopped or killed holds nothing up.

mod ask;
mod page;
mod place;
mod slot;

pub use ask::{
    Ask, BYTES, GRAIN, LENGTH, Lease, LeaseRef, Name, REQUEST, check_bytes, decode_ask, encode_ask,
    shadow_name,
};
pub use page::{PAGE, Page, SLOTS};
pub use place::{is_page, is_shadow};
pub use slot::{Begun, Slot};
