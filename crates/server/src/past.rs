//! Sessions that are over. What begins one may arrive after what ended it: its near end was killed
//! in that moment, or had opened it by another connection. Nobody would have that session, and its
//! devices' memory would be held until the server gives its near end up.

use crate::sessions::Client;
use kedge_remote::SessionKey;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How long a connection may be under way whose maker is gone: its kernel sends on for so long what
/// has not been acknowledged (Documentation/networking/ip-sysctl.rst, tcp_retries2), and a server
/// that stands still takes it later.
const KEPT: Duration = Duration::from_secs(1000);
/// Most sessions of one client that are remembered: the oldest go, so that one with many makes
/// nobody else's forgotten.
const MAX_PER_CLIENT: usize = 4096;

/// Those of all clients.
#[derive(Debug, Default)]
pub(crate) struct Past(HashMap<Option<Client>, VecDeque<Over>>);

#[derive(Debug)]
struct Over {
    at: Instant,
    key: SessionKey,
    /// This attempt to begin it, and those before, come late.
    attempt: u32,
}

impl Past {
    /// Notes that a client's session is over, as far as it was begun by `attempt` or before.
    pub(crate) fn add(
        &mut self,
        who: Option<&Client>,
        key: SessionKey,
        attempt: u32,
        now: Instant,
    ) {
        // Who was here and does not come again takes no room.
        self.0.retain(|_, own| {
            while own.front().is_some_and(|over| now.duration_since(over.at) > KEPT) {
                own.pop_front();
            }
            !own.is_empty()
        });
        let own = self.0.entry(who.cloned()).or_default();
        if own.len() >= MAX_PER_CLIENT {
            own.pop_front();
        }
        own.push_back(Over { at: now, key, attempt });
    }

    /// Returns whether a client's session is over for whoever begins it by `attempt`.
    pub(crate) fn has(&self, who: Option<&Client>, key: &SessionKey, attempt: u32) -> bool {
        let own = self.0.get(&who.cloned());
        own.is_some_and(|own| own.iter().any(|it| it.key == *key && it.attempt >= attempt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> SessionKey {
        let mut key = SessionKey::default();
        key[..8].copy_from_slice(&number.to_le_bytes());
        key
    }

    #[test]
    fn what_is_kept_is_bounded_in_number_and_time() {
        let (mut past, begin) = (Past::default(), Instant::now());
        for number in 0..=MAX_PER_CLIENT {
            past.add(None, key(number), 1, begin);
        }
        assert!(!past.has(None, &key(0), 1));
        assert!(past.has(None, &key(1), 1) && past.has(None, &key(MAX_PER_CLIENT), 1));
        past.add(None, key(1), 1, begin + KEPT + Duration::from_secs(1));
        assert!(past.has(None, &key(1), 1) && !past.has(None, &key(2), 1));
        assert_eq!(past.0[&None].len(), 1);
    }

    #[test]
    fn a_later_attempt_is_not_late() {
        let (mut past, now) = (Past::default(), Instant::now());
        past.add(None, key(7), 2, now);
        assert!(past.has(None, &key(7), 1) && past.has(None, &key(7), 2));
        assert!(!past.has(None, &key(7), 3) && !past.has(None, &key(8), 1));
    }
}
