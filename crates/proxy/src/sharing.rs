//! Memory and events that this client exports and imports: the dispatcher's part of it.

use crate::host::ProxyHost;
use crate::peers::{Peers, What, pack, unpack};
use kedge_cuda_types::CuError;
use kedge_device::{Backend, Host};
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId, PeerName, SharedSlab};
use kedge_transport::{Shared, offer_descriptor};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub(crate) struct Sharing {
    backend: Arc<dyn Backend>,
    host: Arc<ProxyHost>,
    /// The client's.
    socket: OwnedFd,
    peers: Peers,
}

impl Sharing {
    pub(crate) fn new(backend: Arc<dyn Backend>, host: Arc<ProxyHost>, socket: OwnedFd) -> Sharing {
        let peers = Peers::new(host.log.clone());
        Sharing { backend, host, socket, peers }
    }

    /// Sends a descriptor of a handle's memory, ahead of the reply.
    pub(crate) fn export_handle(&self, handle: MemHandleId) -> Result<(), CuError> {
        let fd = self.backend.export_handle(handle)?;
        offer_descriptor(self.socket.as_fd(), 0, fd.as_fd()).map_err(|error| {
            self.host.log(&format!("cannot send the client a descriptor: {error}"));
            CuError::OPERATING_SYSTEM
        })
    }

    pub(crate) fn import_handle(
        &self,
        handle: MemHandleId,
        ticket: u64,
    ) -> Result<Imported, CuError> {
        self.backend.import_handle(handle, self.host.parked.take(ticket)?)
    }

    /// Lets other clients open the slab that holds `addr`.
    pub(crate) fn share_slab(&mut self, addr: u64) -> Result<SharedSlab, CuError> {
        let (fd, base, size) = self.backend.export_slab(addr)?;
        let shared = || Ok(Shared { fd: Some(fd), note: Vec::new() });
        let name = self.peers.share(What::Slab(base), shared)?;
        Ok(SharedSlab { name, base, size })
    }

    pub(crate) fn open_slab(
        &self,
        handle: MemHandleId,
        name: &PeerName,
    ) -> Result<Imported, CuError> {
        let fd = self.peers.open(name)?.fd.ok_or(CuError::INVALID_VALUE)?;
        self.backend.import_handle(handle, fd)
    }

    /// The slab at `addr` is about to go back.
    pub(crate) fn slab_ends(&mut self, addr: u64) {
        self.peers.end(What::Slab(addr));
    }

    pub(crate) fn share_event(&mut self, event: EventId) -> Result<PeerName, CuError> {
        self.peers.share(What::Event(event), || self.backend.export_event(event).map(pack))
    }

    pub(crate) fn open_event(
        &self,
        event: EventId,
        ctx: CtxId,
        name: &PeerName,
    ) -> Result<(), CuError> {
        self.backend.import_event(event, ctx, unpack(self.peers.open(name)?)?)
    }

    pub(crate) fn event_ends(&mut self, event: EventId) {
        self.peers.end(What::Event(event));
    }
}
