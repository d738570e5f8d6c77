//! What this client shares with other clients, and what it opens of theirs.

use kedge_control::aliases;
use kedge_control::joblog::JobLog;
use kedge_control::peer::{PeerKey, PeerListener, Shared, ask_peer, random};
use kedge_control::sharing::What;
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_device::EventShare;
use kedge_protocol::PeerName;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Slabs and events that one client shares.
const MAX: usize = 65_536;

/// What this client shares. Whoever asks is answered by a thread of its own.
pub(crate) struct Peers {
    log: Arc<JobLog>,
    /// The job's, where those have noted their addresses that are in others' place.
    folder: Option<PathBuf>,
    /// What others call this proxy, once it shares anything.
    name: Option<PeerKey>,
    keys: HashMap<What, PeerKey>,
    table: Arc<Mutex<HashMap<PeerKey, Shared>>>,
}

impl Peers {
    pub(crate) fn new(log: Arc<JobLog>, folder: Option<PathBuf>) -> Peers {
        Peers { log, folder, name: None, keys: HashMap::new(), table: Arc::default() }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<PeerKey, Shared>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name under which others find `what`, which `share` makes where it is shared for the
    /// first time.
    pub(crate) fn share(
        &mut self,
        what: What,
        share: impl FnOnce() -> Result<Shared, CuError>,
    ) -> Result<PeerName, CuError> {
        let proxy = self.listen()?;
        if let Some(&key) = self.keys.get(&what) {
            return Ok(PeerName { proxy, key });
        }
        let shared = share()?;
        let name = self.name(what)?;
        self.table().insert(name.key, shared);
        Ok(name)
    }

    /// The name of `what`, which nobody finds under it until it is published.
    pub(crate) fn name(&mut self, what: What) -> Result<PeerName, CuError> {
        let proxy = self.listen()?;
        if let Some(&key) = self.keys.get(&what) {
            return Ok(PeerName { proxy, key });
        }
        if self.keys.len() >= MAX {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let key = random().map_err(|_| CuError::OPERATING_SYSTEM)?;
        self.keys.insert(what, key);
        Ok(PeerName { proxy, key })
    }

    /// What others call this proxy, and all that has a name.
    pub(crate) fn names(&self) -> (Option<PeerKey>, &HashMap<What, PeerKey>) {
        (self.name, &self.keys)
    }

    /// `what` is found from now on, if it has a name.
    pub(crate) fn publish(
        &self,
        what: What,
        share: impl FnOnce() -> Result<Shared, CuError>,
    ) -> Result<(), CuError> {
        let Some(key) = self.keys.get(&what) else { return Ok(()) };
        let shared = share()?;
        self.table().insert(*key, shared);
        Ok(())
    }

    /// What this client itself shares under a name.
    pub(crate) fn own(&self, name: &PeerName) -> Option<What> {
        let keys = self.keys.iter().filter(|_| self.name == Some(name.proxy));
        keys.into_iter().find_map(|(what, key)| (*key == name.key).then_some(*what))
    }

    /// Whether nothing is shared.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// `what` has ended: nobody can open it any more.
    pub(crate) fn end(&mut self, what: What) {
        if let Some(key) = self.keys.remove(&what) {
            self.table().remove(&key);
        }
    }

    /// What another client shares.
    pub(crate) fn open(&self, name: &PeerName) -> Result<Shared, CuError> {
        if self.name == Some(name.proxy) {
            return Err(CuError::INVALID_CONTEXT);
        }
        match ask_peer(&self.address(&name.proxy), &name.key) {
            Ok(shared) => shared.ok_or(CuError::INVALID_VALUE),
            Err(error) => {
                warn!(self.log, "cannot open what another process shares: {error}");
                Err(CuError::INVALID_VALUE)
            }
        }
    }

    /// Whether some process has something under this name.
    pub(crate) fn lives(&self, name: &PeerName) -> bool {
        matches!(ask_peer(&self.address(&name.proxy), &name.key), Ok(Some(_)))
    }

    fn address(&self, proxy: &PeerKey) -> PeerKey {
        let noted = self.folder.as_ref().and_then(|folder| aliases::find(folder, proxy));
        noted.unwrap_or(*proxy)
    }

    /// At a restart: what a client has published, once it has.
    pub(crate) fn wait_for(&self, name: &PeerName) -> Result<Shared, CuError> {
        let folder = self.folder.as_ref().ok_or(CuError::OPERATING_SYSTEM)?;
        aliases::wait_for(folder, name, aliases::WAIT_TIMEOUT).map_err(|error| {
            warn!(self.log, "what another process shares cannot be opened again: {error}");
            CuError::OPERATING_SYSTEM
        })
    }

    /// At a restart, first of all: the proxy in whose place this one is was called so, and its
    /// client shared this.
    pub(crate) fn resume(
        &mut self,
        name: PeerKey,
        keys: impl Iterator<Item = (What, PeerKey)>,
    ) -> Result<(), CuError> {
        self.keys = keys.collect();
        let address = self.listen()?;
        let folder = self.folder.as_ref().ok_or(CuError::OPERATING_SYSTEM)?;
        aliases::note(folder, &name, &address).map_err(|error| {
            warn!(self.log, "cannot tell other processes where to ask: {error}");
            CuError::OPERATING_SYSTEM
        })?;
        self.name = Some(name);
        Ok(())
    }

    /// Starts to listen, if that is not done; as what.
    fn listen(&mut self) -> Result<PeerKey, CuError> {
        if let Some(name) = self.name {
            return Ok(name);
        }
        let listener = PeerListener::bind();
        let started = listener.and_then(|listener| {
            let name = listener.name();
            let (table, log) = (Arc::clone(&self.table), Arc::clone(&self.log));
            let answer = move || answer_all(&listener, &table, &log);
            std::thread::Builder::new().name("peers".into()).stack_size(128 << 10).spawn(answer)?;
            Ok(name)
        });
        self.name = started.as_ref().ok().copied();
        started.map_err(|error| {
            warn!(self.log, "cannot share memory with other processes: {error}");
            CuError::OPERATING_SYSTEM
        })
    }
}

fn answer_all(listener: &PeerListener, table: &Mutex<HashMap<PeerKey, Shared>>, log: &JobLog) {
    loop {
        let find = |key: &PeerKey| {
            let table = table.lock().unwrap_or_else(PoisonError::into_inner);
            table.get(key).map(copy).transpose()
        };
        if let Err(error) = listener.answer(find) {
            warn!(log, "cannot answer a process that opens shared memory: {error}");
            // Out of descriptors, most likely: does not get better by asking faster.
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

fn copy(shared: &Shared) -> io::Result<Shared> {
    let fd = shared.fd.as_ref().map(OwnedFd::try_clone).transpose()?;
    Ok(Shared { fd, note: shared.note.clone() })
}

/// An event as it travels.
pub(crate) fn pack(share: EventShare) -> Shared {
    match share {
        EventShare::Memory(fd) => Shared { fd: Some(fd), note: Vec::new() },
        EventShare::Driver(handle) => Shared { fd: None, note: handle.to_vec() },
    }
}

pub(crate) fn unpack(shared: Shared) -> Result<EventShare, CuError> {
    match (shared.fd, <[u8; 64]>::try_from(shared.note)) {
        (Some(fd), Err(_)) => Ok(EventShare::Memory(fd)),
        (None, Ok(handle)) => Ok(EventShare::Driver(handle)),
        _ => Err(CuError::INVALID_VALUE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::EventId;

    const SLAB: What = What::Slab { addr: 1 };

    fn peers() -> Peers {
        Peers::new(Arc::new(JobLog::none()), None)
    }

    fn share(peers: &mut Peers, what: What) -> PeerName {
        let made = || Ok(Shared { fd: None, note: vec![1; 64] });
        peers.share(what, made).unwrap()
    }

    #[test]
    fn a_share_is_found_under_one_name_until_it_ends() {
        let (mut here, there) = (peers(), peers());
        let name = share(&mut here, SLAB);
        assert_eq!(share(&mut here, SLAB), name);
        assert_ne!(share(&mut here, What::Event { event: EventId(1) }).key, name.key);
        assert!(matches!(unpack(there.open(&name).unwrap()), Ok(EventShare::Driver(_))));
        assert_eq!(here.open(&name).err(), Some(CuError::INVALID_CONTEXT));
        here.end(SLAB);
        assert_eq!(there.open(&name).err(), Some(CuError::INVALID_VALUE));
        assert_ne!(share(&mut here, SLAB).key, name.key, "a new slab has a new key");
    }

    #[test]
    fn nonsense_is_refused() {
        let name = PeerName { proxy: [0; 16], key: [0; 16] };
        assert_eq!(peers().open(&name).err(), Some(CuError::INVALID_VALUE));
        let both = Shared { fd: Some(io::pipe().unwrap().0.into()), note: vec![0; 64] };
        assert!(unpack(both).is_err());
        assert!(unpack(Shared { fd: None, note: vec![0; 63] }).is_err());
    }
}
