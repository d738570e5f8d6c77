//! Who has what of a server: a tenant is a key's name, or this machine.

use kedge_control::account::{Account, Counts, SLOTS};
use kedge_keys::Name;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// All that have had something, or were refused it. They are as many as pins, and one.
#[derive(Debug, Default)]
pub(crate) struct Tenants(BTreeMap<Option<Name>, Tenant>);

#[derive(Debug, Default)]
struct Tenant {
    number: usize,
    /// There is one once there is a session.
    account: Option<Arc<Account>>,
    taken: BTreeSet<u32>,
    /// Of sessions that have ended.
    past: Counts,
    begun: u64,
    refused: u64,
    /// Bytes a second that its newest session may have with the others.
    bandwidth: Option<u64>,
}

/// A session's slot in its tenant's account.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) account: Arc<Account>,
    pub(crate) slot: u32,
    /// The tenant's number, which no other has.
    pub(crate) tenant: usize,
}

impl Place {
    /// Returns the account's memory, to be sent.
    ///
    /// # Errors
    /// It cannot be opened anew.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.account.open()
    }
}

/// What a tenant has had and has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) counts: Counts,
    pub(crate) begun: u64,
    pub(crate) refused: u64,
    pub(crate) bandwidth: Option<u64>,
}

impl Tenants {
    fn tenant(&mut self, name: Option<&Name>) -> &mut Tenant {
        let number = self.0.len();
        self.0.entry(name.cloned()).or_insert_with(|| Tenant { number, ..Tenant::default() })
    }

    /// Gives a session that begins its slot.
    ///
    /// # Errors
    /// There is no memory, or the tenant has as many sessions as there are slots.
    pub(crate) fn enter(
        &mut self,
        name: Option<&Name>,
        bandwidth: Option<u64>,
    ) -> io::Result<Place> {
        let tenant = self.tenant(name);
        let account = match &tenant.account {
            Some(account) => account.clone(),
            None => tenant.account.insert(Arc::new(Account::new()?)).clone(),
        };
        let slot = (0..SLOTS).find(|slot| !tenant.taken.contains(slot));
        let slot = slot.ok_or_else(|| io::Error::other("it has too many sessions"))?;
        tenant.taken.insert(slot);
        tenant.begun += 1;
        tenant.bandwidth = bandwidth;
        Ok(Place { account, slot, tenant: tenant.number })
    }

    /// Takes the slot back of a session whose proxy has ended.
    pub(crate) fn leave(&mut self, name: Option<&Name>, place: &Place) {
        let Some(tenant) = self.0.get_mut(&name.cloned()) else { return };
        let counts = place.account.clear(place.slot);
        tenant.past = tenant.past.and(Counts { memory: 0, ..counts });
        tenant.taken.remove(&place.slot);
    }

    /// Counts something that a tenant was refused.
    pub(crate) fn refused(&mut self, name: Option<&Name>) {
        self.tenant(name).refused += 1;
    }

    /// Returns what each has had and has.
    pub(crate) fn used(&self) -> impl Iterator<Item = (Option<&Name>, Used)> {
        self.0.iter().map(|(name, tenant)| {
            let slots = tenant
                .account
                .iter()
                .flat_map(|account| tenant.taken.iter().map(|slot| account.counts(*slot)));
            let counts = slots.fold(tenant.past, Counts::and);
            let Tenant { begun, refused, bandwidth, .. } = *tenant;
            (name.as_ref(), Used { counts, begun, refused, bandwidth })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::pwrite;

    #[test]
    fn what_sessions_have_ends_with_them_and_what_crossed_stays() {
        let alice: Name = "alice".parse().unwrap();
        let mut tenants = Tenants::default();
        let [first, second] = [(), ()].map(|()| tenants.enter(Some(&alice), Some(9)).unwrap());
        let here = tenants.enter(None, None).unwrap();
        assert_eq!((first.slot, second.slot, here.slot), (0, 1, 0));
        for (place, memory, received) in [(&first, 5_u64, 7_u64), (&second, 50, 70)] {
            let at = u64::from(place.slot) * 64;
            let words = [memory.to_ne_bytes(), received.to_ne_bytes()].concat();
            pwrite(place.account.file(), &words, at).unwrap();
        }
        tenants.refused(Some(&alice));
        let used = |tenants: &Tenants, name: Option<&Name>| {
            tenants.used().find(|(found, _)| *found == name).map(|(_, used)| used).unwrap()
        };
        let all = used(&tenants, Some(&alice));
        assert_eq!((all.counts.memory, all.counts.received), (55, 77));
        assert_eq!((all.begun, all.refused, all.bandwidth), (2, 1, Some(9)));
        tenants.leave(Some(&alice), &first);
        let all = used(&tenants, Some(&alice));
        assert_eq!((all.counts.memory, all.counts.received), (50, 77));
        // Its slot is the next one's, who has nothing of it.
        let third = tenants.enter(Some(&alice), None).unwrap();
        assert_eq!((third.slot, used(&tenants, Some(&alice)).counts.memory), (0, 50));
        assert_eq!(used(&tenants, None), Used { begun: 1, ..Used::default() });
    }

    #[test]
    fn slots_are_bounded() {
        let mut tenants = Tenants::default();
        let all: Vec<Place> = (0..SLOTS).map(|_| tenants.enter(None, None).unwrap()).collect();
        assert!(tenants.enter(None, None).is_err());
        tenants.leave(None, &all[7]);
        assert_eq!(tenants.enter(None, None).unwrap().slot, 7);
    }
}
