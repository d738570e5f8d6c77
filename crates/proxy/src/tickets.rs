//! Descriptors that the client has sent, until the call that names each arrives.

use kedge_cuda_types::CuError;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A call follows its descriptor, so each thread of the client has one here at most.
const MAX: usize = 256;
/// How long a descriptor is waited for. It is sent before its call: only the thread that hears it
/// may be late.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct Tickets {
    /// Ticket → descriptor; `None` where this process had no room for it.
    waiting: Mutex<HashMap<u64, Option<OwnedFd>>>,
    arrived: Condvar,
}

impl Tickets {
    /// Keeps a descriptor; false where the client has broken the rules: too many, or a ticket
    /// twice.
    pub(crate) fn put(&self, ticket: u64, fd: Option<OwnedFd>) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() >= MAX || waiting.contains_key(&ticket) {
            return false;
        }
        waiting.insert(ticket, fd);
        self.arrived.notify_all();
        true
    }

    /// Takes the descriptor that came as `ticket`. NOT_READY where none came: it may have gone to
    /// the proxy whose place this one took, and the client sends it again.
    pub(crate) fn take(&self, ticket: u64) -> Result<OwnedFd, CuError> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |waiting: &mut HashMap<_, _>| !waiting.contains_key(&ticket);
        let (mut waiting, _) = self
            .arrived
            .wait_timeout_while(waiting, ARRIVAL_TIMEOUT, missing)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.remove(&ticket).ok_or(CuError::NOT_READY)?.ok_or(CuError::OPERATING_SYSTEM)
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
            let taker = scope.spawn(|| tickets.take(3));
            assert!(tickets.put(2, fd()) && tickets.put(3, fd()));
            assert!(taker.join().unwrap().is_ok());
        });
        assert!(tickets.put(4, None));
        assert_eq!(tickets.take(4).err(), Some(CuError::OPERATING_SYSTEM));
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
