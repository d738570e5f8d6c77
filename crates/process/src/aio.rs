//! Kernel AIO contexts (io_setup(2)): what of them an image holds, and how their rings are laid
//! out.
//!
//! A context is known by the address at which the kernel has mapped its ring of completions.
//! Nothing else of it can be seen from outside: not how many requests are under way.

use crate::EngineError;
use crate::inject;
use crate::maps::Mapping;
use crate::state::Hex;
use kedge_image::PAGE;
use libc::pid_t;
use serde::{Deserialize, Serialize};

/// How /proc names the mapping of a ring.
pub(crate) const MAPPING: &str = "/[aio]";
/// Bytes of `struct aio_ring` and of `struct io_event` (include/uapi/linux/aio_abi.h, fs/aio.c).
pub(crate) const HEADER: u64 = 32;
pub(crate) const EVENT: u64 = 32;
/// Offset of `aio_ring.head`, which programs may write.
pub(crate) const HEAD: u64 = 8;
const MAGIC: u32 = 0xa10a_10a1;
/// Longest ring that is believed: the kernel makes none with more events (io_setup, EINVAL).
const MAX_BYTES: u64 = 0x1000_0000;

/// A context: its ring, and the completions that wait in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Context {
    /// Where the ring is mapped, which is the context's id.
    pub(crate) ring: u64,
    pub(crate) ring_bytes: u64,
    /// Where the program reads next, and where the kernel writes next: indices of events.
    pub(crate) ring_head: u32,
    pub(crate) ring_tail: u32,
    /// The events between both.
    pub(crate) completions: Hex,
}

/// The part of a ring's header that matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Events that fit into the ring.
    pub(crate) events: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
}

/// Whether it is the ring of a context.
pub(crate) fn is_ring(mapping: &Mapping) -> bool {
    mapping.shared && mapping.deleted() && mapping.name.starts_with(MAPPING)
}

/// How many events fit into a ring of so many bytes.
pub(crate) fn events_in(bytes: u64) -> u64 {
    bytes.saturating_sub(HEADER) / EVENT
}

/// How many events lie between `head` and `tail` in a ring of `events`; both are less than that.
pub(crate) fn pending(head: u32, tail: u32, events: u32) -> u32 {
    if tail >= head { tail - head } else { events - head + tail }
}

impl Header {
    /// Reads the header of the ring at `address` in the process `pid`, which is `bytes` long;
    /// `None` if it is none.
    pub(crate) fn read(
        pid: pid_t,
        address: u64,
        bytes: u64,
    ) -> Result<Option<Header>, EngineError> {
        let mut header = [0; HEADER as usize];
        inject::read_exact(pid, address, &mut header)?;
        Ok(Header::parse(&header, bytes))
    }

    fn parse(header: &[u8; HEADER as usize], bytes: u64) -> Option<Header> {
        let words = header.as_chunks::<4>().0;
        let word = |index: usize| u32::from_le_bytes(words[index]);
        let (events, head, tail) = (word(1), word(2), word(3));
        let known = word(4) == MAGIC && word(6) == 0 && u64::from(word(7)) == HEADER;
        let fits = u64::from(events) == events_in(bytes) && head < events && tail < events;
        (known && fits).then_some(Header { events, head, tail })
    }
}

impl Context {
    /// Whether it can be made again as it is.
    pub(crate) fn is_possible(&self) -> bool {
        let pages = self.ring_bytes.is_multiple_of(PAGE) && self.ring_bytes <= MAX_BYTES;
        let events = events_in(self.ring_bytes) as u32;
        let inside = self.ring_head < events && self.ring_tail < events;
        let waiting = || u64::from(pending(self.ring_head, self.ring_tail, events)) * EVENT;
        pages && inside && self.completions.0.len() as u64 == waiting()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(words: [u32; 8]) -> [u8; 32] {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.try_into().unwrap()
    }

    #[test]
    fn headers_are_checked() {
        let good = [0, 127, 5, 7, MAGIC, 1, 0, 32];
        let told = Header { events: 127, head: 5, tail: 7 };
        assert_eq!(Header::parse(&header(good), 4096), Some(told));
        for (at, value) in [(1, 128), (2, 127), (3, 127), (4, 0), (6, 1), (7, 64)] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(Header::parse(&header(bad), 4096), None, "word {at}");
        }
    }

    #[test]
    fn contexts_are_checked() {
        let of = |ring_bytes, ring_head, ring_tail, waiting: usize| Context {
            ring: 0x1000,
            ring_bytes,
            ring_head,
            ring_tail,
            completions: Hex(vec![0; waiting * 32]),
        };
        assert!(of(4096, 0, 0, 0).is_possible());
        assert!(of(4096, 5, 7, 2).is_possible());
        assert!(of(4096, 126, 1, 2).is_possible());
        for bad in [of(4096, 5, 7, 1), of(4096, 127, 0, 1), of(4096, 0, 127, 127), of(0, 0, 0, 0)] {
            assert!(!bad.is_possible(), "{bad:?}");
        }
        assert!(!of(4097, 0, 0, 0).is_possible() && !of(1 << 40, 0, 0, 0).is_possible());
    }
}
