//! What messages take of the devices' memory, as it is counted in the account of a server's tenant.

use crate::account::Account;
use crate::dispatch::Dispatcher;
use crate::taken::{Ends, taking_nothing, wants};
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_protocol::{Call, Imported, MemHandleId, PeerName, Post};
use std::sync::Arc;
use std::thread;

/// How often a backend is asked that cannot tell just now.
const TRIES: u32 = 1000;

impl Dispatcher {
    fn account(&self) -> Option<Arc<Account>> {
        self.host().account.clone()
    }

    /// Counts what a call is about to take.
    ///
    /// # Errors
    /// OUT_OF_MEMORY: the tenant may not have so much.
    pub(crate) fn charge(&self, call: &Call) -> Result<(), CuError> {
        self.reserve(wants(call))
    }

    fn reserve(&self, bytes: u64) -> Result<(), CuError> {
        let Some(account) = self.account() else { return Ok(()) };
        if bytes == 0 || account.reserve(bytes) {
            return Ok(());
        }
        if let Some(words) = account.refusal(bytes) {
            warn!(self.host().log, "{words}");
        }
        Err(CuError::OUT_OF_MEMORY)
    }

    /// Says what the client has, after a call that may have changed that.
    pub(crate) fn called(&mut self, call: &Call, made: bool) {
        match call {
            Call::ArrayCreate { ctx, array, desc } if made => {
                self.arrays.add(*ctx, &[*array], desc)
            }
            Call::MipmapCreate { ctx, levels, desc } if made => self.arrays.add(*ctx, levels, desc),
            Call::ArrayCreate { .. }
            | Call::MipmapCreate { .. }
            | Call::Grant { .. }
            | Call::HandleCreate { .. }
            | Call::CtxCreate { .. }
            | taking_nothing!() => {}
        }
        self.settle();
    }

    /// The same after a post that has been carried out; what it ends is named before.
    pub(crate) fn posted(&mut self, ends: Ends) {
        match ends {
            Ends::Nothing => return,
            Ends::Memory => {}
            Ends::Handle(handle) => drop(self.opened.remove(&handle)),
            Ends::Array(array) => self.arrays.remove(array),
            Ends::Context(ctx) => self.arrays.forget(ctx),
        }
        self.settle();
    }

    /// Opens what another client shares. That counts for each who has it, because its maker may end
    /// first.
    ///
    /// # Errors
    /// Nobody has it; OUT_OF_MEMORY: the tenant may not have so much.
    pub(crate) fn open_peer(
        &mut self,
        handle: MemHandleId,
        name: &PeerName,
    ) -> Result<Imported, CuError> {
        let found = self.sharing.find(name)?;
        let told = found.bytes.or_else(|| self.bytes_of(found.own?));
        if self.account().is_some() && told.is_none() {
            warn!(
                self.host().log,
                "memory of another process is not opened: its size is not known"
            );
            return Err(CuError::INVALID_VALUE);
        }
        let told = told.unwrap_or(0);
        self.reserve(told)?;
        let opened = self.sharing.open(handle, found.fd, name);
        if let Ok(opened) = &opened {
            self.opened.insert(handle, opened.size.unwrap_or(told));
        }
        if self.settle() || opened.is_err() {
            return opened;
        }
        // It is larger than its maker has said.
        self.post(Post::HandleDestroy { handle });
        Err(CuError::OUT_OF_MEMORY)
    }

    /// Bytes of a handle's memory, whoever has made it.
    pub(crate) fn bytes_of(&self, handle: MemHandleId) -> Option<u64> {
        self.opened.get(&handle).copied().or_else(|| self.record.created_bytes(handle))
    }

    /// Says what the client has; whether the tenant may have so much. What is swapped out is had.
    pub(crate) fn settle(&self) -> bool {
        let Some(account) = self.account().filter(|_| self.away.is_none()) else { return true };
        let devices = self.backend().devices();
        let exact = devices.iter().all(|device| device.exact);
        let mut used = (0..).zip(&devices).map(|(device, _)| self.used(device));
        let used = used.try_fold(0_u64, |sum, used| sum.checked_add(used?));
        let arrays = if exact { 0 } else { self.arrays.bytes() };
        // Where it cannot be told, what was reserved goes on to count.
        let opened = self.opened.values().fold(arrays, |sum, bytes| sum.saturating_add(*bytes));
        used.is_none_or(|used| account.has(used.saturating_add(opened)))
    }

    /// Bytes of a device that are had: other threads change that for moments.
    fn used(&self, device: u32) -> Option<u64> {
        (0..TRIES).find_map(|_| {
            self.backend().used_memory(device).or_else(|| {
                thread::yield_now();
                None
            })
        })
    }

    /// Bytes of a device that the client may still take.
    pub(crate) fn free_memory(&self, device: u32) -> Result<u64, CuError> {
        let free = self.backend().free_memory(device)?;
        Ok(self.account().and_then(|it| it.left()).map_or(free, |left| left.min(free)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_memory::ClientMemory;
    use crate::fake::Fake;
    use crate::host::ProxyHost;
    use crate::peers::Peers;
    use kedge_control::account;
    use kedge_control::joblog::JobLog;
    use kedge_control::peer::Shared;
    use kedge_control::sharing::What;
    use kedge_remote::Terms;

    /// A client with 100 bytes in all, and its tenant's account.
    fn limited() -> (Dispatcher, account::Account) {
        let (client, server) = kedge_transport::pair().unwrap();
        let memory = ClientMemory::new(std::process::id());
        let (log, account) = (Arc::new(JobLog::none()), account::Account::new().unwrap());
        let terms = Terms { slot: 0, memory: Some(100), bandwidth: None };
        let own = Arc::new(Account::map(&account.open().unwrap(), &terms).unwrap());
        let host = ProxyHost::new(server.outbox().clone(), memory, log, None).with_account(own);
        let socket = server.socket().try_clone_to_owned().unwrap();
        drop(client);
        (Dispatcher::new(Fake::idle(), Arc::new(host), socket), account)
    }

    /// What another client shares: so many bytes, of which it tells.
    fn shared(peers: &mut Peers, addr: u64, bytes: u64, told: u64) -> PeerName {
        let file = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let note = if told > 0 { told.to_le_bytes().to_vec() } else { Vec::new() };
        let made = || Ok(Shared { fd: Some(file), note });
        peers.share(What::Slab { addr }, made).unwrap()
    }

    #[test]
    fn what_another_has_made_counts_whether_or_not_that_lives() {
        let (mut dispatcher, account) = limited();
        let mut peers = Peers::new(Arc::new(JobLog::none()), None);
        let had = || account.counts(0).memory;
        let [first, second, third] = [1, 2, 3].map(MemHandleId);
        let name = shared(&mut peers, 1, 60, 60);
        let opened = dispatcher.open_peer(first, &name).unwrap();
        assert_eq!((opened.size, had()), (Some(60), 60));
        peers.end(What::Slab { addr: 1 });
        let more = shared(&mut peers, 2, 50, 50);
        assert_eq!(dispatcher.open_peer(second, &more), Err(CuError::OUT_OF_MEMORY));
        // It is more than is told, and nothing is told.
        let liar = shared(&mut peers, 3, 50, 1);
        assert_eq!(dispatcher.open_peer(second, &liar), Err(CuError::OUT_OF_MEMORY));
        let silent = shared(&mut peers, 4, 10, 0);
        assert_eq!(dispatcher.open_peer(second, &silent), Err(CuError::INVALID_VALUE));
        assert_eq!(had(), 60);
        let fits = shared(&mut peers, 5, 40, 40);
        dispatcher.open_peer(third, &fits).unwrap();
        assert_eq!(had(), 100);
        dispatcher.posted(Ends::of(&Post::HandleDestroy { handle: first }));
        assert_eq!(had(), 40);
    }
}
