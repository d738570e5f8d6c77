//! How a server's sessions hear whose turn it is: by their slots of their tenants' accounts.

use crate::sessions::{Kind, Open, Session, Sessions};
use crate::tenants::Place;
use crate::turns::{self, Seen, Told, Turns};
use kedge_control::account;
use kedge_keys::Secrets;
use kedge_remote::{HandedOver, SessionKey};
use kedge_socket::Channel;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For which a turn holds without another word: a server that has ended holds nobody.
const HOLDS: Duration = Duration::from_millis(100);
/// For a proxy to take a message: there is room unless it is stuck, and others wait meanwhile.
const NOTICE: Duration = Duration::from_millis(1);
/// After which a proxy that took none is sent another.
const AGAIN: Duration = Duration::from_secs(1);

/// Whose turn it is, and whether a thread sees to it.
#[derive(Debug, Default)]
pub(crate) struct Taking {
    turns: Turns,
    by_thread: bool,
}

impl Open {
    /// Returns the sessions, as they are seen now.
    fn seen(&self) -> Vec<Seen<'_>> {
        let all = self.by_key.iter().filter(|(_, it)| it.kind == Kind::Devices && it.has_begun);
        let seen = all.filter_map(|(key, session)| {
            let Place { account, slot, tenant } = session.place.as_ref()?;
            let (tenant, job, devices) = (*tenant, session.job, &*session.devices);
            Some(Seen { key: *key, tenant, job, devices, work: account.work(*slot) })
        });
        seen.collect()
    }
}

impl Sessions {
    /// Notes that the proxy at the other end of `channel` has its terms, and may be told more.
    /// Returns whether sessions of different tenants are on one device and nobody sees to their
    /// turns.
    pub(crate) fn has_begun(&self, key: &SessionKey, channel: &Arc<Channel>) -> bool {
        let mut open = self.locked();
        // A later attempt may have taken its place, and have no terms as yet.
        let own = open.by_key.get_mut(key).filter(|it| Arc::ptr_eq(&it.channel, channel));
        own.into_iter().for_each(|session| session.has_begun = true);
        let seen = open.seen();
        let begins = !open.taking.by_thread && turns::any_shared(&seen);
        open.taking.by_thread |= begins;
        begins
    }

    /// Notes that nobody sees to the turns after all.
    pub(crate) fn give_turns_up(&self) {
        self.locked().taking.by_thread = false;
    }

    /// Tells each session whose turn it is. Returns whether that is to go on.
    pub(crate) fn take_turns(&self) -> bool {
        let mut locked = self.locked();
        let open = &mut *locked;
        let mut turns = std::mem::take(&mut open.taking.turns);
        let seen = open.seen();
        let told = turns.look(&seen, Instant::now());
        let told: Vec<(SessionKey, Told)> = seen.iter().map(|it| it.key).zip(told).collect();
        let until = account::now() + HOLDS.as_nanos() as u64;
        let mut goes_on = false;
        for (key, Told { shared, turn }) in told {
            goes_on |= shared;
            if let Some(session) = open.by_key.get_mut(&key) {
                session.takes_turns(shared);
                session.place.iter().for_each(|it| it.account.set_turn(it.slot, turn, until));
            }
        }
        open.taking = Taking { turns, by_thread: goes_on };
        goes_on
    }
}

impl Session {
    /// Tells its proxy whether to heed turns. One that takes no message is told at a later look.
    pub(crate) fn takes_turns(&mut self, on: bool) {
        let later = self.told_in_vain.is_some_and(|at| at.elapsed() < AGAIN);
        if self.takes_turns != on && !later {
            let what = (HandedOver::Turns { on }, None::<Secrets>);
            match self.channel.send(&what, &[], NOTICE) {
                Ok(()) => (self.takes_turns, self.told_in_vain) = (on, None),
                Err(_) => self.told_in_vain = Some(Instant::now()),
            }
        }
    }
}
