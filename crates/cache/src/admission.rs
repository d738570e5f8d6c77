//! Who may write into which tier, and whose turn it is when all are full.

use crate::extents::TierIndex;
use std::collections::{HashMap, VecDeque};

/// Memory of a tier: how much it may hold, and holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that it may hold.
    pub limit: u64,
    /// Bytes that it holds, or has promised to a write.
    pub used: u64,
    /// Whether no write takes from it: what others hold moves there.
    pub behind: bool,
}

/// The limits of all tiers and users.
#[derive(Debug, Default)]
pub struct Limits {
    rooms: Vec<Room>,
    /// What one user may hold in all tiers together.
    per_user: Option<u64>,
    users: HashMap<u32, u64>,
    /// Of how many parts that is.
    parts: HashMap<u32, usize>,
    /// Whether something has moved to a tier behind others of late.
    moves: bool,
}

/// Most parts that one user's files may have. Each takes memory of the daemon and of journals,
/// which a block of a tier does not stand for.
const MAX_PARTS: usize = 1 << 20;

impl Limits {
    /// Limits of tiers in the order in which they are filled.
    pub fn new(limits: &[u64], per_user: Option<u64>) -> Limits {
        let rooms = limits.iter().map(|&limit| Room { limit, ..Room::default() }).collect();
        Limits { rooms, per_user, ..Limits::default() }
    }

    /// Has no write take from a tier: it lies behind the others.
    pub fn put_behind(&mut self, tier: TierIndex) {
        self.rooms[tier].behind = true;
    }

    /// Notes whether something has moved to a tier behind others since the last look.
    pub fn note_moves(&mut self, moves: bool) {
        self.moves = moves;
    }

    /// Returns the tiers' rooms.
    pub fn rooms(&self) -> &[Room] {
        &self.rooms
    }

    /// Returns what each user holds.
    pub fn users(&self) -> &HashMap<u32, u64> {
        &self.users
    }

    /// Changes what a tier may hold. What it holds already stays until it is drained.
    pub fn set_limit(&mut self, tier: TierIndex, limit: u64) {
        self.rooms[tier].limit = limit;
    }

    /// Takes `bytes` of the first tier that has them, for `user`.
    pub fn take(&mut self, user: u32, bytes: u64) -> Option<TierIndex> {
        let held = self.users.get(&user).copied().unwrap_or(0);
        if self.per_user.is_some_and(|most| held + bytes > most) {
            return None;
        }
        let fits = |room: &Room| !room.behind && room.used + bytes <= room.limit;
        let tier = self.rooms.iter().position(fits)?;
        self.hold(tier, user, bytes);
        Some(tier)
    }

    /// Returns whether files of `user` are of as many parts as they may.
    pub fn is_in_pieces(&self, user: u32) -> bool {
        self.parts.get(&user).is_some_and(|parts| *parts >= MAX_PARTS)
    }

    /// Notes that a file of `user` is of `now` parts and no more of `before`.
    pub fn note_parts(&mut self, user: u32, before: usize, now: usize) {
        let parts = self.parts.entry(user).or_default();
        *parts = (*parts + now).saturating_sub(before);
        if *parts == 0 {
            self.parts.remove(&user);
        }
    }

    /// Notes bytes that `tier` holds for `user`, whatever the limits say.
    pub fn hold(&mut self, tier: TierIndex, user: u32, bytes: u64) {
        self.rooms[tier].used += bytes;
        *self.users.entry(user).or_default() += bytes;
    }

    /// Gives bytes back.
    pub fn give_back(&mut self, tier: TierIndex, user: u32, bytes: u64) {
        let room = &mut self.rooms[tier];
        debug_assert!(room.used >= bytes, "more is given back than was taken");
        room.used = room.used.saturating_sub(bytes);
        if let Some(held) = self.users.get_mut(&user) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                self.users.remove(&user);
            }
        }
    }

    /// Returns how full the tiers are together, in percent. One behind others counts only if
    /// something moves there: one that is empty helps nobody whose parts are too small to move.
    pub fn percent(&self) -> u64 {
        let counts = |room: &&Room| !room.behind || self.moves;
        let limit: u64 = self.rooms.iter().filter(counts).map(|room| room.limit).sum();
        let used: u64 = self.rooms.iter().filter(counts).map(|room| room.used).sum();
        if limit == 0 { 100 } else { (used * 100).div_ceil(limit) }
    }
}

/// The writes of one user that wait: one queue a writer.
type Writers<T> = VecDeque<(u64, VecDeque<T>)>;

/// Writes that wait for room: served by turns of users, and of each user's writers.
#[derive(Debug)]
pub struct Waiting<T> {
    /// In the order of their turns.
    users: VecDeque<(u32, Writers<T>)>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Waiting<T> {
        Waiting { users: VecDeque::new() }
    }
}

impl<T> Waiting<T> {
    /// Returns whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// Returns how many writes wait.
    pub fn len(&self) -> usize {
        self.users.iter().flat_map(|(_, writers)| writers).map(|(_, queue)| queue.len()).sum()
    }

    /// Has `item` of a user's writer wait.
    pub fn push(&mut self, user: u32, writer: u64, item: T) {
        if !self.users.iter().any(|(other, _)| *other == user) {
            self.users.push_back((user, Writers::new()));
        }
        let own = self.users.iter_mut().find(|(other, _)| *other == user);
        let Some((_, writers)) = own else { return };
        match writers.iter_mut().find(|(other, _)| *other == writer) {
            Some((_, queue)) => queue.push_back(item),
            None => writers.push_back((writer, VecDeque::from([item]))),
        }
    }

    /// Returns the next item for which `admit` has something, and that; its user and its writer are
    /// last then.
    pub fn next<V>(&mut self, mut admit: impl FnMut(&T) -> Option<V>) -> Option<(T, V)> {
        for turn in 0..self.users.len() {
            let Some(found) = next_of(&mut self.users[turn].1, &mut admit) else { continue };
            let (user, writers) = self.users.remove(turn)?;
            if !writers.is_empty() {
                self.users.push_back((user, writers));
            }
            return Some(found);
        }
        None
    }
}

fn next_of<T, V>(
    writers: &mut Writers<T>,
    admit: &mut impl FnMut(&T) -> Option<V>,
) -> Option<(T, V)> {
    for turn in 0..writers.len() {
        let Some(verdict) = writers[turn].1.front().and_then(&mut *admit) else { continue };
        let (writer, mut queue) = writers.remove(turn)?;
        let item = queue.pop_front()?;
        if !queue.is_empty() {
            writers.push_back((writer, queue));
        }
        return Some((item, verdict));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_filled_in_their_order() {
        let mut limits = Limits::new(&[10, 20], None);
        assert_eq!(limits.take(1, 8), Some(0));
        assert_eq!(limits.take(1, 8), Some(1));
        assert_eq!(limits.take(1, 2), Some(0));
        assert_eq!(limits.take(1, 13), None);
        limits.give_back(0, 1, 10);
        assert_eq!(limits.take(1, 10), Some(0));
        assert_eq!(limits.percent(), 60);
    }

    #[test]
    fn no_write_takes_of_a_tier_behind_others() {
        let mut limits = Limits::new(&[100, 10], None);
        limits.put_behind(0);
        assert_eq!(limits.take(1, 8), Some(1));
        assert_eq!((limits.take(1, 8), limits.percent()), (None, 80));
        limits.note_moves(true);
        assert_eq!(limits.percent(), 8, "there is room to move to");
        limits.hold(0, 1, 100);
        assert_eq!(limits.percent(), 99);
    }

    #[test]
    fn a_user_at_the_limit_leaves_room_to_others() {
        let mut limits = Limits::new(&[100], Some(30));
        assert_eq!(limits.take(1, 30), Some(0));
        assert_eq!(limits.take(1, 1), None);
        assert_eq!(limits.take(2, 30), Some(0));
        limits.give_back(0, 1, 30);
        assert_eq!(limits.take(1, 1), Some(0));
        assert_eq!(limits.users().len(), 2);
    }

    #[test]
    fn one_users_parts_are_bounded() {
        let mut limits = Limits::new(&[100], None);
        limits.note_parts(1, 0, MAX_PARTS);
        limits.note_parts(2, 0, 5);
        assert!(limits.is_in_pieces(1) && !limits.is_in_pieces(2));
        limits.note_parts(1, MAX_PARTS, 1);
        limits.note_parts(2, 5, 0);
        assert!(!limits.is_in_pieces(1) && limits.parts.len() == 1);
    }

    #[test]
    fn writers_take_turns() {
        let mut waiting = Waiting::default();
        for item in ["a1", "a2", "a3"] {
            waiting.push(7, 1, item);
        }
        waiting.push(7, 2, "b1");
        let order: Vec<&str> =
            std::iter::from_fn(|| waiting.next(|_| Some(()))).map(|(item, ())| item).collect();
        assert_eq!(order, ["a1", "b1", "a2", "a3"]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn a_user_of_many_writers_has_no_more_turns_than_one_of_few() {
        let mut waiting = Waiting::default();
        for writer in 0..4 {
            waiting.push(1, writer, "many");
        }
        waiting.push(2, 9, "few");
        waiting.push(2, 9, "few");
        let order: Vec<&str> =
            std::iter::from_fn(|| waiting.next(|_| Some(()))).map(|(item, ())| item).collect();
        assert_eq!(order, ["many", "few", "many", "few", "many", "many"]);
    }

    #[test]
    fn one_that_does_not_fit_holds_up_nobody_else() {
        let mut waiting = Waiting::default();
        waiting.push(7, 1, 100);
        waiting.push(7, 2, 1);
        let fits = |size: &i32| (*size < 10).then_some(());
        assert_eq!(waiting.next(fits), Some((1, ())));
        assert_eq!(waiting.next(fits), None);
        assert_eq!(waiting.len(), 1);
    }
}
