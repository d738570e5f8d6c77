//! Read-ahead: what a touch fetches beyond the page that it wants.

use crate::types::Access;

/// Walks that are known at once, of several threads or through several arrays.
const WALKS: usize = 8;

/// Finds touches that follow each other, and doubles what is opened for each.
#[derive(Debug, Clone)]
pub struct ReadAhead {
    walks: [Walk; WALKS],
    most: u64,
    clock: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Walk {
    /// The page behind the last that was opened; the next touch of a walk is there.
    next: u64,
    /// How many were opened last.
    length: u64,
    used: u64,
}

impl ReadAhead {
    /// Creates one that opens `most` pages at once, at least one.
    pub fn new(most: u64) -> ReadAhead {
        ReadAhead { walks: [Walk::default(); WALKS], most: most.max(1), clock: 0 }
    }

    /// Returns how many pages to open for a touch, from the touched one on; there are `room` of
    /// them.
    pub fn window(&mut self, page: u64, access: Access, room: u64) -> u64 {
        self.clock += 1;
        // Writes and reads of one walk are told apart: a page that is opened for writing is sent.
        let next = page * 2 + u64::from(access == Access::Write);
        let known = self.walks.iter_mut().find(|walk| walk.used > 0 && walk.next == next);
        let walk = match known {
            Some(walk) => {
                walk.length = (walk.length * 2).min(self.most);
                walk
            }
            None => {
                let oldest = self.walks.iter_mut().min_by_key(|walk| walk.used);
                let Some(oldest) = oldest else { return 1 };
                oldest.length = 1;
                oldest
            }
        };
        walk.length = walk.length.min(room).max(1);
        walk.next = next + 2 * walk.length;
        walk.used = self.clock;
        walk.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_double_and_strangers_do_not_end_them() {
        let mut ahead = ReadAhead::new(64);
        let (mut a, mut b) = (100, 5000);
        let mut lengths = Vec::new();
        for step in 0..9 {
            let length = ahead.window(a, Access::Read, u64::MAX);
            lengths.push(length);
            a += length;
            b += ahead.window(b, Access::Write, u64::MAX);
            assert_eq!(ahead.window(90_000 + 17 * step, Access::Read, 9), 1);
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(a - 100, b - 5000);
    }

    #[test]
    fn a_write_is_no_step_of_a_read_s_walk() {
        let mut ahead = ReadAhead::new(64);
        assert_eq!(ahead.window(10, Access::Read, 9), 1);
        assert_eq!(ahead.window(11, Access::Write, 9), 1);
        assert_eq!(ahead.window(11, Access::Read, 9), 2);
        assert_eq!(ahead.window(13, Access::Read, 3), 3);
    }
}
