//! Memory and events that this client exports and imports: the dispatcher's part of it.

use crate::host::ProxyHost;
use crate::peers::{Peers, What, pack, unpack};
use kedge_cuda_types::CuError;
use kedge_device::{Backend, Host, SnapshotError};
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId, PeerName, SharedSlab};
use kedge_transport::{Shared, offer_descriptor};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub(crate) struct Sharing {
    backend: Arc<dyn Backend>,
    host: Arc<ProxyHost>,
    /// The client's.
    socket: OwnedFd,
    peers: Peers,
    /// Handles that other processes may know, or that are another's.
    handles: HashSet<MemHandleId>,
    /// Other processes' events, and their contexts here.
    events: HashMap<EventId, CtxId>,
    /// Whether devices use files that the program maps shared, in place.
    pub(crate) files: bool,
}

impl Sharing {
    pub(crate) fn new(backend: Arc<dyn Backend>, host: Arc<ProxyHost>, socket: OwnedFd) -> Sharing {
        let peers = Peers::new(host.log.clone());
        let (handles, events) = Default::default();
        Sharing { backend, host, socket, peers, handles, events, files: false }
    }

    /// Sends a descriptor of a handle's memory, ahead of the reply.
    pub(crate) fn export_handle(&mut self, handle: MemHandleId) -> Result<(), CuError> {
        let fd = self.backend.export_handle(handle)?;
        self.handles.insert(handle);
        offer_descriptor(self.socket.as_fd(), 0, fd.as_fd()).map_err(|error| {
            self.host.log(&format!("cannot send the client a descriptor: {error}"));
            CuError::OPERATING_SYSTEM
        })
    }

    pub(crate) fn import_handle(
        &mut self,
        handle: MemHandleId,
        ticket: u64,
    ) -> Result<Imported, CuError> {
        let imported = self.backend.import_handle(handle, self.host.tickets.take(ticket)?)?;
        self.handles.insert(handle);
        Ok(imported)
    }

    pub(crate) fn handle_ends(&mut self, handle: MemHandleId) {
        self.handles.remove(&handle);
    }

    /// Lets other clients open the slab that holds `addr`.
    pub(crate) fn share_slab(&mut self, addr: u64) -> Result<SharedSlab, CuError> {
        let (fd, base, size) = self.backend.export_slab(addr)?;
        let shared = || Ok(Shared { fd: Some(fd), note: Vec::new() });
        let name = self.peers.share(What::Slab(base), shared)?;
        Ok(SharedSlab { name, base, size })
    }

    pub(crate) fn open_slab(
        &mut self,
        handle: MemHandleId,
        name: &PeerName,
    ) -> Result<Imported, CuError> {
        let fd = self.peers.open(name)?.fd.ok_or(CuError::INVALID_VALUE)?;
        let imported = self.backend.import_handle(handle, fd)?;
        self.handles.insert(handle);
        Ok(imported)
    }

    /// The slab at `addr` is about to go back.
    pub(crate) fn slab_ends(&mut self, addr: u64) {
        self.peers.end(What::Slab(addr));
    }

    pub(crate) fn share_event(&mut self, event: EventId) -> Result<PeerName, CuError> {
        self.peers.share(What::Event(event), || self.backend.export_event(event).map(pack))
    }

    pub(crate) fn open_event(
        &mut self,
        event: EventId,
        ctx: CtxId,
        name: &PeerName,
    ) -> Result<(), CuError> {
        self.backend.import_event(event, ctx, unpack(self.peers.open(name)?)?)?;
        self.events.insert(event, ctx);
        Ok(())
    }

    pub(crate) fn event_ends(&mut self, event: EventId) {
        self.events.remove(&event);
        self.peers.end(What::Event(event));
    }

    pub(crate) fn context_ends(&mut self, ctx: CtxId) {
        self.events.retain(|_, owner| *owner != ctx);
    }

    /// Refuses a capture of what other processes share: a restart could not bring them together again.
    pub(crate) fn check_private(&self) -> Result<(), SnapshotError> {
        if self.files {
            let why = "the program has registered a shared mapping of a file (cuMemHostRegister), which no \
                       checkpoint keeps: take one before it does, or after it has unregistered it";
            return Err(SnapshotError::new(CuError::NOT_SUPPORTED, why));
        }
        if self.handles.is_empty() && self.events.is_empty() && self.peers.is_empty() {
            return Ok(());
        }
        let why = "the program shares device memory or events with another process \
                   (cuMemExportToShareableHandle, cuIpcGetMemHandle or their like), which no checkpoint \
                   keeps: take one before it does, or after it has freed them";
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, why))
    }
}
