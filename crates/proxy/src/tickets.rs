//! Descriptors that the client has sent, until the call that names each arrives.

use kedge_cuda_types::CuError;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A call follows its descriptor, so each thread of the client has one here at most.
const MAX: usize = 256;
/// Most tickets that are remembered as missed: more than are while the client sends one again.
const MAX_MISSED: usize = 1024;
/// How long a descriptor is waited for. It is sent before its call: only the thread that hears it
/// may be late. Meanwhile no other call is carried out, so that this is short: the client sends it
/// again.
const ARRIVAL_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Tickets {
    known: Mutex<Known>,
    arrived: Condvar,
}

#[derive(Default)]
struct Known {
    /// Ticket → descriptor; `None` where this process had no room for it.
    waiting: HashMap<u64, Option<OwnedFd>>,
    /// Tickets that were waited for in vain: what comes for them is late, or never comes.
    missed: VecDeque<u64>,
}

impl Tickets {
    /// Keeps a descriptor; false where the client has broken the rules: too many, or a ticket
    /// twice.
    pub(crate) fn put(&self, ticket: u64, fd: Option<OwnedFd>) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = known.missed.iter().position(|missed| *missed == ticket) {
            known.missed.remove(at);
            return true;
        }
        if known.waiting.len() >= MAX || known.waiting.contains_key(&ticket) {
            return false;
        }
        known.waiting.insert(ticket, fd);
        self.arrived.notify_all();
        true
    }

    /// Takes the descriptor that came as `ticket`. NOT_READY where none came: it may have gone to
    /// the proxy whose place this one took, and the client sends it again.
    pub(crate) fn take(&self, ticket: u64) -> Result<OwnedFd, CuError> {
        self.take_within(ticket, ARRIVAL_TIMEOUT)
    }

    fn take_within(&self, ticket: u64, limit: Duration) -> Result<OwnedFd, CuError> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |known: &mut Known| !known.waiting.contains_key(&ticket);
        let (mut known, _) = self
            .arrived
            .wait_timeout_while(known, limit, missing)
            .unwrap_or_else(PoisonError::into_inner);
        let Some(arrived) = known.waiting.remove(&ticket) else {
            if known.missed.len() == MAX_MISSED {
                known.missed.pop_front();
            }
            known.missed.push_back(ticket);
            return Err(CuError::NOT_READY);
        };
        arrived.ok_or(CuError::OPERATING_SYSTEM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> Option<OwnedFd> {
        Some(std::io::pipe().unwrap().0.into())
    }

    #[test]
    fn a_call_may_be_faster_than_its_descriptor() {
        let tickets = Tickets::default();
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| tickets.take_within(3, Duration::from_secs(10)));
            assert!(tickets.put(2, fd()) && tickets.put(3, fd()));
            assert!(taker.join().unwrap().is_ok());
        });
        assert!(tickets.put(4, None));
        assert_eq!(tickets.take(4).err(), Some(CuError::OPERATING_SYSTEM));
    }

    #[test]
    fn what_comes_after_it_was_waited_for_takes_no_room() {
        let tickets = Tickets::default();
        assert_eq!(tickets.take(9).err(), Some(CuError::NOT_READY));
        assert!(tickets.put(9, fd()), "it is late, and breaks no rule");
        assert!((10..10 + MAX as u64).all(|ticket| tickets.put(ticket, None)));
        assert!(!tickets.put(9, None));
    }

    #[test]
    fn descriptors_that_nobody_asks_for_are_bounded() {
        let tickets = Tickets::default();
        assert!((0..MAX as u64).all(|ticket| tickets.put(ticket, None)));
        assert!(!tickets.put(MAX as u64, None));
        let fresh = Tickets::default();
        assert!(fresh.put(0, None) && !fresh.put(0, None), "a ticket twice");
    }
}
