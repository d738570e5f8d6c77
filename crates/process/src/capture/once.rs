//! Memory that processes have in common since a fork is stored once.
//!
//! Pages are compared by sums of 128 bits, as they are stored: at the addresses that several
//! processes map. What the file of one process stores, the file of another refers to. So it does
//! not matter who forked whom, whether frames can be seen (only root sees them), or whether the
//! processes run while they are read.

use super::memory::Chunk;
use crate::EngineError;
use crate::maps::Mapping;
use crate::proc::{Status, reach};
use crate::track::Run;
use kedge_image::{Choice, ImageWriter, PAGE, Packer, encode, page_sum};
use libc::{pid_t, uid_t};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most pages that are remembered: 64 GiB of memory. Each takes 50 bytes.
const MAX_PAGES: usize = 16 << 20;

/// What the files of an image store, of the memory that several processes may have.
#[derive(Debug, Default)]
pub(crate) struct Once {
    /// The addresses that several processes map privately, in order.
    common: Vec<Run>,
    /// Part of every sum, and told to nobody.
    secret: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Who stores a page, and as whom that process runs, by its sum.
    pages: HashMap<u128, (pid_t, Users), BuildHasherDefault<Sum>>,
    /// Whose files others refer to, and where.
    referred: BTreeMap<pid_t, Vec<Run>>,
}

/// A hash that is one already.
#[derive(Debug, Default)]
struct Sum(u64);

impl Hasher for Sum {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.0 ^= u64::from_le_bytes(word);
        }
    }
}

/// Memory of one process as it is stored.
#[derive(Debug)]
pub(super) struct Storing<'a> {
    once: &'a Once,
    pid: pid_t,
    /// None of a process that has ended, which has nothing in common with others.
    users: Option<Users>,
    writer: &'a ImageWriter,
    codec: Choice,
    /// Pages that its own file stores, by their sums.
    own: Mutex<Vec<(u64, u128)>>,
}

/// From where to where, and which other process stores it.
type Part = (u64, u64, Option<pid_t>);

/// A process's real and effective user.
type Users = (uid_t, uid_t);

fn users_of(pid: pid_t) -> Option<Users> {
    let users = Status::of(reach(pid)).ok()?.numbers("Uid");
    Some((*users.first()? as uid_t, *users.get(1)? as uid_t))
}

impl Once {
    /// Of processes that map those.
    pub(crate) fn of<'a>(processes: impl Iterator<Item = &'a [Mapping]>) -> Once {
        let private = |mapping: &&Mapping| super::is_own(mapping);
        let mappings = processes.flat_map(|mappings| mappings.iter().filter(private));
        let common = several(mappings.map(|m| (m.start, m.end)));
        let secret = RandomState::new().build_hasher().finish();
        Once { common, secret, state: Mutex::default() }
    }

    /// Stores memory of the process `pid` by `writer`, which writes its file.
    pub(super) fn storing<'a>(
        &'a self,
        pid: pid_t,
        writer: &'a ImageWriter,
        codec: Choice,
    ) -> Storing<'a> {
        self.storing_for(users_of(pid), pid, writer, codec)
    }

    fn storing_for<'a>(
        &'a self,
        users: Option<Users>,
        pid: pid_t,
        writer: &'a ImageWriter,
        codec: Choice,
    ) -> Storing<'a> {
        Storing { once: self, pid, users, writer, codec, own: Mutex::default() }
    }

    /// Whether the file of another process refers to that of `pid`.
    pub(crate) fn is_referred(&self, pid: pid_t) -> bool {
        self.state().referred.contains_key(&pid)
    }

    /// Where the files of others refer to that of `pid`, in order.
    pub(super) fn referred(&self, pid: pid_t) -> Vec<Run> {
        let mut runs = self.state().referred.get(&pid).cloned().unwrap_or_default();
        runs.sort_unstable();
        // Several may refer to one page.
        runs.dedup_by(|next, last| {
            let meets = next.0 <= last.1;
            last.1 = if meets { last.1.max(next.1) } else { last.1 };
            meets
        });
        runs
    }

    /// Whether any file refers to another.
    pub(crate) fn is_of_use(&self) -> bool {
        !self.state().referred.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storing<'_> {
    /// Stores the bytes of a chunk, or who stores them.
    pub(super) fn store(
        &self,
        chunk: &Chunk,
        bytes: &[u8],
        packer: &mut Packer<'_>,
    ) -> Result<(), EngineError> {
        let (start, end) = chunk.run();
        let shared = within(&self.once.common, (start, end));
        let (parts, own) = self.divide(start, bytes, &shared);
        for (from, to, owner) in parts {
            match owner {
                Some(owner) => self.writer.of_process(from, to - from, owner),
                None => {
                    let bytes = &bytes[(from - start) as usize..(to - start) as usize];
                    packer.memory(0, from, to - from, &encode(bytes, self.codec))?;
                }
            }
        }
        let mut all = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MAX_PAGES.saturating_sub(all.len());
        all.extend(own.into_iter().take(room));
        Ok(())
    }

    /// Divides the chunk at `start` by who stores it; and the sums of what nobody does so far.
    fn divide(&self, start: u64, bytes: &[u8], shared: &[Run]) -> (Vec<Part>, Vec<(u64, u128)>) {
        let end = start + bytes.len() as u64;
        let pages = shared.iter().flat_map(|(from, to)| (*from..*to).step_by(PAGE as usize));
        let sum = |at: u64| {
            let offset = (at - start) as usize;
            let page = &bytes[offset..offset + PAGE as usize];
            // Zeros are stored by nobody.
            let some = page.iter().any(|byte| *byte != 0);
            some.then(|| (at, page_sum(at ^ self.once.secret, page)))
        };
        let sums: Vec<(u64, u128)> = pages.filter_map(sum).collect();
        let (mut parts, mut own, mut at) = (Vec::new(), Vec::new(), start);
        let mut state = self.once.state();
        for (page, sum) in sums {
            // A page of another user's is never taken for this one's, whatever its sum.
            let owner = state.pages.get(&sum).filter(|(_, users)| self.users == Some(*users));
            let Some((owner, _)) = owner.copied() else {
                own.push((page, sum));
                continue;
            };
            refer(state.referred.entry(owner).or_default(), page);
            if at < page {
                parts.push((at, page, None));
            }
            at = page + PAGE;
            match parts.last_mut() {
                Some((_, last, Some(same))) if *last == page && *same == owner => *last = at,
                _ => parts.push((page, at, Some(owner))),
            }
        }
        if at < end {
            parts.push((at, end, None));
        }
        (parts, own)
    }

    /// Lets the files of processes that are stored from here on refer to this one, which is to be
    /// in the image, but for what lies in `except`.
    pub(super) fn done(self, except: &[Run]) {
        let own = self.own.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(users) = self.users else { return };
        let mut state = self.once.state();
        for (at, sum) in own {
            if state.pages.len() < MAX_PAGES && !super::changes::lies_in(at, except) {
                state.pages.entry(sum).or_insert((self.pid, users));
            }
        }
    }
}

/// Notes that somebody refers to a page.
fn refer(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some((_, last)) if *last == page => *last += PAGE,
        _ => runs.push((page, page + PAGE)),
    }
}

/// What of `runs`, which are in order, lies between `start` and `end`.
fn within(runs: &[Run], (start, end): Run) -> Vec<Run> {
    let from = runs.partition_point(|(_, last)| *last <= start);
    let inside = runs[from..].iter().take_while(|(first, _)| *first < end);
    inside.map(|(first, last)| (start.max(*first), end.min(*last))).collect()
}

/// What lies in more than one of the ranges, in order.
fn several(ranges: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut ends: Vec<(u64, i32)> = ranges.flat_map(|(s, e)| [(s, 1), (e, -1)]).collect();
    ends.sort_unstable();
    let (mut depth, mut runs) = (0, Vec::<Run>::new());
    for pair in ends.windows(2) {
        depth += pair[0].1;
        let (start, end) = (pair[0].0, pair[1].0);
        if depth < 2 || start == end {
            continue;
        }
        match runs.last_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => runs.push((start, end)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_map_is_found() {
        let found = |ranges: &[Run]| several(ranges.iter().copied());
        assert_eq!(found(&[(1, 5), (2, 3), (4, 9)]), [(2, 3), (4, 5)]);
        assert_eq!(found(&[(1, 5), (5, 9)]), []);
        assert_eq!(found(&[(1, 9), (1, 9), (1, 4), (3, 9)]), [(1, 9)]);
        assert_eq!(within(&[(1, 3), (5, 8), (9, 12)], (2, 10)), [(2, 3), (5, 8), (9, 10)]);
        assert_eq!(within(&[(1, 3), (5, 8)], (3, 5)), []);
    }

    #[test]
    fn pages_that_are_equal_at_one_address_have_one_owner() {
        let folder = std::env::temp_dir().join(format!("konce-{}", std::process::id()));
        let _ = std::fs::remove_file(&folder);
        let writer = ImageWriter::create(&folder).unwrap();
        let once = Once { common: vec![(0x1000, 0x5000)], ..Once::default() };
        let bytes: Vec<u8> = (0..6 * PAGE).map(|at| (at / PAGE) as u8 + 1).collect();
        let range = &[(0x1000, 0x5000)];
        let first = once.storing_for(Some((1, 1)), 7, &writer, Choice::Auto);
        let (parts, own) = first.divide(0, &bytes, range);
        assert_eq!((parts, own.len()), (vec![(0, 0x6000, None)], 4));
        first.own.lock().unwrap().extend(own);
        first.done(&[(0x2000, 0x3000)]);
        let second = once.storing_for(Some((1, 1)), 8, &writer, Choice::Auto);
        let mut other = bytes.clone();
        other[0x3fff] = 0;
        let (parts, own) = second.divide(0, &other, range);
        // Page 2 is not in the first one's file after all, page 3 differs, 0 and 5 nobody compares.
        let expected = [
            (0, 0x1000, None),
            (0x1000, 0x2000, Some(7)),
            (0x2000, 0x4000, None),
            (0x4000, 0x5000, Some(7)),
            (0x5000, 0x6000, None),
        ];
        assert_eq!((parts, own.len()), (expected.to_vec(), 2));
        assert!(once.is_referred(7) && !once.is_referred(8) && once.is_of_use());
        let third = once.storing_for(Some((1, 1)), 9, &writer, Choice::Auto);
        third.divide(0, &bytes, range);
        assert_eq!(once.referred(7), [(0x1000, 0x2000), (0x3000, 0x5000)]);
        for stranger in [Some((1, 2)), None] {
            let other = once.storing_for(stranger, 9, &writer, Choice::Auto);
            assert_eq!(other.divide(0, &bytes, range).0, [(0, 0x6000, None)], "{stranger:?}");
        }
        std::fs::remove_file(&folder).unwrap();
    }
}
