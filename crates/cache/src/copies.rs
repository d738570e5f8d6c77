//! Copies of what programs write, as long as that waits: bounded for each user, and for all.

use crate::tier::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Smallest limit on what one user's copies may take, in bytes.
const MIN_LIMIT: u64 = 256 << 20;
/// Or that part of the machine's memory, if it is more.
const PART: u64 = 32;
/// All users together, as many times.
const ALL: u64 = 4;

#[derive(Debug, Default)]
struct Taken {
    all: u64,
    users: HashMap<u32, u64>,
}

/// All copies.
#[derive(Debug)]
pub(crate) struct Copies {
    most: u64,
    taken: Mutex<Taken>,
}

/// A copy, which counts for its user.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) data: Vec<u8>,
    user: u32,
    of: Arc<Copies>,
}

impl Copies {
    pub(crate) fn new() -> Copies {
        let info = rustix::system::sysinfo();
        let memory = (info.totalram as u64).saturating_mul(info.mem_unit.into());
        Copies { most: MIN_LIMIT.max(memory / PART), taken: Mutex::default() }
    }

    /// Copies data of a user. `None` if their copies take too much already.
    pub(crate) fn copy(self: &Arc<Copies>, user: u32, data: &[u8]) -> Option<Copied> {
        let length = data.len() as u64;
        let mut taken = lock(&self.taken);
        let own = taken.users.get(&user).copied().unwrap_or(0);
        if own + length > self.most || taken.all + length > self.most * ALL {
            return None;
        }
        taken.all += length;
        taken.users.insert(user, own + length);
        drop(taken);
        Some(Copied { data: data.to_vec(), user, of: self.clone() })
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let length = self.data.len() as u64;
        let mut taken = lock(&self.of.taken);
        taken.all -= length;
        if let Some(own) = taken.users.get_mut(&self.user) {
            *own -= length;
            if *own == 0 {
                taken.users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_users_copies_leave_room_to_others() {
        let copies = Arc::new(Copies { most: 10, taken: Mutex::default() });
        let first = copies.copy(1, &[0; 8]).expect("room");
        assert!(copies.copy(1, &[0; 3]).is_none());
        let others: Vec<_> = (2..6).map(|user| copies.copy(user, &[0; 8])).collect();
        assert!(others.iter().all(Option::is_some));
        assert!(copies.copy(9, &[0; 8]).is_none(), "all of it is taken");
        drop((first, others));
        assert!(lock(&copies.taken).users.is_empty() && lock(&copies.taken).all == 0);
    }
}
