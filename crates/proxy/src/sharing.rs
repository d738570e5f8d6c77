//! Memory and events that this client exports and imports: the dispatcher's part of it.

use crate::host::ProxyHost;
use crate::peers::{Peers, pack, unpack};
use kedge_control::peer::Shared;
use kedge_control::sharing::{Bond, Identity, Share, What};
use kedge_cuda_types::CuError;
use kedge_device::{Backend, Host, Interprocess, SnapshotError};
use kedge_gpu_image::SavedSharing;
use kedge_protocol::{CtxId, EventId, Imported, MemHandleId, PeerName, SharedSlab};
use kedge_transport::offer_descriptor;
use kedge_wire::{List, TooLong};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Memory that was exported and has ended here, of which this is still known.
const MAX_RELEASED: usize = 4096;

pub(crate) struct Sharing {
    backend: Arc<dyn Backend>,
    host: Arc<ProxyHost>,
    /// The client's.
    socket: OwnedFd,
    peers: Peers,
    /// Handles that other processes may know, or that are another's.
    handles: HashMap<MemHandleId, Known>,
    /// Other processes' events, with their contexts here and the names that they were opened by.
    events: HashMap<EventId, (CtxId, Known)>,
    /// Files that this process has exported and has no more.
    released: HashSet<(u64, u64)>,
    /// Where a restart finds what is another's.
    borrows: HashMap<What, PeerName>,
    /// Whether devices use files that the program maps shared, in place.
    pub(crate) files: bool,
    /// Whether the client is on another machine: descriptors do not reach it, nor do the job's
    /// files reach this process.
    pub(crate) far: bool,
}

/// What is known of something that another process may have, too.
struct Known {
    own: bool,
    by: Vec<Identity>,
    /// By which the driver's memory is known.
    descriptors: Vec<OwnedFd>,
    imported: Option<Imported>,
}

impl Known {
    fn new(own: bool) -> Known {
        Known { own, by: Vec::new(), descriptors: Vec::new(), imported: None }
    }

    fn opened(name: &PeerName) -> Known {
        Known { by: vec![Identity::Name { name: *name }], ..Known::new(false) }
    }

    /// It is the memory of this descriptor. A file tells itself; of the driver's, all descriptions
    /// look alike, so that one is kept.
    fn add(&mut self, fd: OwnedFd) -> Result<(), CuError> {
        let file = File::from(fd);
        let found = file.metadata().map_err(|_| CuError::OPERATING_SYSTEM)?;
        if !found.file_type().is_file() {
            self.by.push(Identity::Descriptor { number: file.as_raw_fd() });
            self.descriptors.push(file.into());
            return Ok(());
        }
        let identity = Identity::File { device: found.dev(), inode: found.ino() };
        if !self.by.contains(&identity) {
            self.by.push(identity);
        }
        Ok(())
    }

    fn files(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by.iter().filter_map(|identity| match identity {
            Identity::File { device, inode } => Some((*device, *inode)),
            _ => None,
        })
    }
}

impl Sharing {
    pub(crate) fn new(backend: Arc<dyn Backend>, host: Arc<ProxyHost>, socket: OwnedFd) -> Sharing {
        let peers = Peers::new(host.log.clone(), host.folder());
        let (handles, events, released, borrows) = Default::default();
        let (files, far) = (false, false);
        Sharing { backend, host, socket, peers, handles, events, released, borrows, files, far }
    }

    fn role(&self) -> Result<&dyn Interprocess, CuError> {
        self.backend.interprocess().ok_or(CuError::NOT_SUPPORTED)
    }

    /// Sends a descriptor of a handle's memory, ahead of the reply.
    pub(crate) fn export_handle(&mut self, handle: MemHandleId) -> Result<(), CuError> {
        let fd = self.role()?.export_handle(handle)?;
        self.know(handle, true, &fd)?;
        offer_descriptor(self.socket.as_fd(), 0, fd.as_fd()).map_err(|error| {
            self.host.log(&format!("cannot send the client a descriptor: {error}"));
            CuError::OPERATING_SYSTEM
        })
    }

    /// Lets other clients open a handle's memory by name.
    pub(crate) fn name_handle(
        &mut self,
        handle: MemHandleId,
        bytes: Option<u64>,
    ) -> Result<PeerName, CuError> {
        let fd = self.role()?.export_handle(handle)?;
        self.know(handle, true, &fd)?;
        self.peers.share(What::Handle { handle }, || Ok(memory(fd, bytes)))
    }

    fn know(&mut self, handle: MemHandleId, own: bool, fd: &OwnedFd) -> Result<(), CuError> {
        let fd = fd.try_clone().map_err(|_| CuError::OPERATING_SYSTEM)?;
        self.handles.entry(handle).or_insert_with(|| Known::new(own)).add(fd)
    }

    /// Whether the client has read all that was sent on its socket, be it its welcome or
    /// descriptors: what is on its way does not outlive this process.
    pub(crate) fn delivered(&self) -> bool {
        let mut unread: libc::c_int = 0;
        // SAFETY: the call fills an int.
        let rc = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
        rc != 0 || unread == 0
    }

    pub(crate) fn import_handle(
        &mut self,
        handle: MemHandleId,
        ticket: u64,
    ) -> Result<Imported, CuError> {
        let fd = self.host.tickets.take(ticket)?;
        let mut known = Known::new(false);
        known.add(fd.try_clone().map_err(|_| CuError::OPERATING_SYSTEM)?)?;
        self.import(handle, fd, known)
    }

    fn import(
        &mut self,
        handle: MemHandleId,
        fd: OwnedFd,
        mut known: Known,
    ) -> Result<Imported, CuError> {
        let imported = self.role()?.import_handle(handle, fd)?;
        known.imported = Some(imported);
        self.handles.insert(handle, known);
        Ok(imported)
    }

    pub(crate) fn handle_ends(&mut self, handle: MemHandleId) {
        self.peers.end(What::Handle { handle });
        let Some(known) = self.handles.remove(&handle).filter(|known| known.own) else { return };
        if self.released.len() < MAX_RELEASED {
            self.released.extend(known.files());
        }
    }

    /// Lets other clients open the slab that holds `addr`.
    pub(crate) fn share_slab(&mut self, addr: u64) -> Result<SharedSlab, CuError> {
        let (fd, base, size) = self.role()?.export_slab(addr)?;
        let shared = || Ok(memory(fd, Some(size)));
        let name = self.peers.share(What::Slab { addr: base }, shared)?;
        Ok(SharedSlab { name, base, size })
    }

    /// Finds what some client shares.
    pub(crate) fn find(&self, name: &PeerName) -> Result<Found, CuError> {
        if let Some(What::Handle { handle }) = self.peers.own(name) {
            // By a descriptor, a process opens its own memory, too.
            let fd = self.role()?.export_handle(handle)?;
            return Ok(Found { fd, bytes: None, own: Some(handle) });
        }
        let Shared { fd, note } = self.peers.open(name)?;
        let bytes = note.try_into().ok().map(u64::from_le_bytes);
        Ok(Found { fd: fd.ok_or(CuError::INVALID_VALUE)?, bytes, own: None })
    }

    /// Opens what has been found by a name.
    pub(crate) fn open(
        &mut self,
        handle: MemHandleId,
        fd: OwnedFd,
        name: &PeerName,
    ) -> Result<Imported, CuError> {
        self.import(handle, fd, Known::opened(name))
    }

    /// The slab at `addr` is about to go back.
    pub(crate) fn slab_ends(&mut self, addr: u64) {
        self.peers.end(What::Slab { addr });
    }

    pub(crate) fn share_event(&mut self, event: EventId) -> Result<PeerName, CuError> {
        let role = self.backend.interprocess().ok_or(CuError::NOT_SUPPORTED)?;
        self.peers.share(What::Event { event }, || role.export_event(event).map(pack))
    }

    pub(crate) fn open_event(
        &mut self,
        event: EventId,
        ctx: CtxId,
        name: &PeerName,
    ) -> Result<(), CuError> {
        self.role()?.import_event(event, ctx, unpack(self.peers.open(name)?)?)?;
        self.events.insert(event, (ctx, Known::opened(name)));
        Ok(())
    }

    pub(crate) fn event_ends(&mut self, event: EventId) {
        self.events.remove(&event);
        self.peers.end(What::Event { event });
    }

    pub(crate) fn context_ends(&mut self, ctx: CtxId) {
        self.events.retain(|_, (owner, _)| *owner != ctx);
    }
}

/// Memory that some client shares.
pub(crate) struct Found {
    pub(crate) fd: OwnedFd,
    /// As its maker tells.
    pub(crate) bytes: Option<u64>,
    /// The handle, where it is this client's.
    pub(crate) own: Option<MemHandleId>,
}

/// Memory as it is shared: with its bytes, which a driver does not tell who opens it.
fn memory(fd: OwnedFd, bytes: Option<u64>) -> Shared {
    let note = bytes.map(|bytes| bytes.to_le_bytes().to_vec());
    Shared { fd: Some(fd), note: note.unwrap_or_default() }
}

/// What a checkpoint asks.
impl Sharing {
    /// Whether nothing is shared.
    fn is_empty(&self) -> bool {
        self.handles.is_empty() && self.events.is_empty() && self.peers.is_empty()
    }

    /// All that is shared; what is this client's has a name from now on.
    pub(crate) fn shares(&mut self) -> Result<Vec<Share>, SnapshotError> {
        let too_many = |_: TooLong| many();
        let own: Vec<MemHandleId> =
            self.handles.iter().filter(|(_, known)| known.own).map(|(handle, _)| *handle).collect();
        for handle in own {
            self.peers.name(What::Handle { handle })?;
        }
        let mut shares = Vec::new();
        let (proxy, keys) = self.peers.names();
        for (what, key) in keys {
            let name = proxy.map(|proxy| PeerName { proxy, key: *key });
            let mut known: Vec<Identity> =
                name.iter().map(|name| Identity::Name { name: *name }).collect();
            known.extend(self.known(what).into_iter().flat_map(|known| known.by.iter().copied()));
            shares.push(Share { what: *what, name, known: List::new(known).map_err(too_many)? });
        }
        let others = self.others();
        for (what, known) in others {
            let known = List::new(known.by.clone()).map_err(too_many)?;
            shares.push(Share { what, name: None, known });
        }
        Ok(shares)
    }

    fn known(&self, what: &What) -> Option<&Known> {
        match what {
            What::Slab { .. } => None,
            What::Handle { handle } => self.handles.get(handle),
            What::Event { event } => self.events.get(event).map(|(_, known)| known),
        }
    }

    /// What is another's.
    fn others(&self) -> impl Iterator<Item = (What, &Known)> {
        let handles =
            self.handles.iter().map(|(handle, known)| (What::Handle { handle: *handle }, known));
        let events =
            self.events.iter().map(|(event, (_, known))| (What::Event { event: *event }, known));
        handles.chain(events).filter(|(_, known)| !known.own)
    }

    pub(crate) fn released(&self) -> Vec<(u64, u64)> {
        self.released.iter().copied().collect()
    }

    /// Makes this client the owner of memory or of an event that it had opened from another
    /// process, which has given it up. Returns its name, and an event's context, or the device and
    /// bytes of memory.
    pub(crate) fn adopt(
        &mut self,
        what: What,
        mapped: u64,
    ) -> Result<(PeerName, Adopted), SnapshotError> {
        let known = self.known(&what).filter(|known| !known.own).ok_or(CuError::INVALID_HANDLE)?;
        let alive = |identity: &Identity| match identity {
            Identity::Name { name } => self.peers.lives(name),
            _ => false,
        };
        if known.by.iter().any(alive) {
            return Err(foreign());
        }
        let adopted = match what {
            What::Slab { .. } => return Err(CuError::INVALID_VALUE.into()),
            What::Handle { handle } => {
                let imported = known.imported.unwrap_or(Imported { device: None, size: None });
                let (device, size) = (imported.device, imported.size.unwrap_or(mapped));
                let device = device.filter(|_| size > 0).ok_or_else(nowhere)?;
                self.role()?
                    .adopt_handle(handle, device, size)
                    .map_err(|error| no_room(size, error))?;
                Adopted::Memory { handle, device, size }
            }
            What::Event { event } => {
                let (ctx, _) = self.events.get(&event).ok_or(CuError::INVALID_HANDLE)?;
                Adopted::Event { event, ctx: *ctx }
            }
        };
        match what {
            What::Handle { handle } => self.handles.get_mut(&handle),
            What::Event { event } => self.events.get_mut(&event).map(|(_, known)| known),
            What::Slab { .. } => None,
        }
        .into_iter()
        .for_each(|known| known.own = true);
        Ok((self.peers.name(what)?, adopted))
    }

    /// Where a restart will find what is another's: for the capture that follows.
    pub(crate) fn bind(&mut self, borrows: Vec<Bond>) {
        self.borrows = borrows.into_iter().map(|bond| (bond.what, bond.name)).collect();
    }

    /// Refuses what no checkpoint keeps.
    fn check_files(&self) -> Result<(), SnapshotError> {
        if !self.files {
            return Ok(());
        }
        let why = "the program has registered a shared mapping of a file (cuMemHostRegister), which no \
                   checkpoint keeps: take one before it does, or after it has unregistered it";
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, why))
    }

    /// Refuses to let the devices' memory go while other processes have some of it.
    pub(crate) fn check_private(&self) -> Result<(), SnapshotError> {
        self.check_files()?;
        if self.is_empty() {
            return Ok(());
        }
        let why = "the program shares device memory or events with another process \
                   (cuMemExportToShareableHandle, cuIpcGetMemHandle or their like), which cannot be \
                   swapped out: do that before it shares them, or after it has freed them";
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, why))
    }

    /// Whether the client can move to another proxy, alone.
    pub(crate) fn check_movable(&self) -> Result<(), SnapshotError> {
        self.check_files()?;
        if self.is_empty() {
            return Ok(());
        }
        let why = "the program shares device memory or events with another process \
                   (cuMemExportToShareableHandle, cuIpcGetMemHandle or their like), which cannot move as yet";
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, why))
    }

    /// What an image has to know.
    pub(crate) fn save(&self) -> Result<SavedSharing, SnapshotError> {
        self.check_files()?;
        if self.far && !self.is_empty() {
            return Err(far());
        }
        let find = |(what, _): (What, &Known)| {
            let name = *self.borrows.get(&what).ok_or_else(foreign)?;
            Ok(Bond { what, name })
        };
        let borrows = self.others().map(find).collect::<Result<Vec<Bond>, SnapshotError>>()?;
        let (proxy, keys) = self.peers.names();
        let lends = keys.iter().map(|(what, key)| (*what, *key)).collect();
        let too_many = |_| many();
        Ok(SavedSharing {
            proxy: proxy.filter(|_| !keys.is_empty()),
            lends: List::new(lends).map_err(too_many)?,
            borrows: List::new(borrows).map_err(too_many)?,
        })
    }
}

/// What has become this client's own: how a restart makes it.
pub(crate) enum Adopted {
    Memory { handle: MemHandleId, device: u32, size: u64 },
    Event { event: EventId, ctx: CtxId },
}

fn many() -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, "it shares more than a checkpoint can tell of")
}

fn far() -> SnapshotError {
    let why = "the program shares device memory or events of another machine with other processes \
               (cuMemExportToShareableHandle, cuIpcGetMemHandle or their like), which no checkpoint \
               keeps as yet: take one before it shares them, or after it has freed them";
    SnapshotError::new(CuError::NOT_SUPPORTED, why)
}

fn foreign() -> SnapshotError {
    let why = "the program has opened device memory or events of a process that is not of this job (or not \
               of this part of it), which no checkpoint keeps: start both in one `kedge run`, or take the \
               checkpoint after it has closed them";
    SnapshotError::new(CuError::NOT_SUPPORTED, why)
}

fn nowhere() -> SnapshotError {
    let why = "the program has opened device memory whose process is gone, on a device that is none of its own or \
               without having mapped it: take the checkpoint after it has closed it";
    SnapshotError::new(CuError::NOT_SUPPORTED, why)
}

fn no_room(size: u64, code: CuError) -> SnapshotError {
    let what = format!(
        "{} MiB of device memory that it has opened are its own now, for their process is gone, and do not fit",
        size >> 20
    );
    SnapshotError::new(code, what)
}

/// What a restart does.
impl Sharing {
    /// First of all: what there was.
    pub(crate) fn resume(&mut self, saved: &SavedSharing) -> Result<(), CuError> {
        self.bind(saved.borrows.to_vec());
        match saved.proxy {
            Some(name) => self.peers.resume(name, saved.lends.iter().copied()),
            None => Ok(()),
        }
    }

    /// Something has been made again: if others had it, they find it from now on.
    pub(crate) fn made(&mut self, what: What) -> Result<(), CuError> {
        let backend = Arc::clone(&self.backend);
        let role = backend.interprocess().ok_or(CuError::NOT_SUPPORTED)?;
        let memory = |fd, bytes| Ok(memory(fd, bytes));
        let (_, keys) = self.peers.names();
        if !keys.contains_key(&what) {
            return Ok(());
        }
        if let What::Handle { handle } = what {
            let fd = role.export_handle(handle)?;
            self.know(handle, true, &fd)?;
            return self.peers.publish(what, || memory(fd, None));
        }
        self.peers.publish(what, || match what {
            What::Slab { addr } => {
                let (fd, _, size) = role.export_slab(addr)?;
                memory(fd, Some(size))
            }
            What::Event { event } => Ok(pack(role.export_event(event)?)),
            What::Handle { handle } => memory(role.export_handle(handle)?, None),
        })
    }

    fn borrow(&self, what: What) -> Result<(PeerName, Shared), CuError> {
        let name = *self.borrows.get(&what).ok_or(CuError::INVALID_HANDLE)?;
        Ok((name, self.peers.wait_for(&name)?))
    }

    /// Opens another's memory again.
    pub(crate) fn borrow_handle(&mut self, handle: MemHandleId) -> Result<(), CuError> {
        let (name, shared) = self.borrow(What::Handle { handle })?;
        let fd = shared.fd.ok_or(CuError::INVALID_VALUE)?;
        self.import(handle, fd, Known::opened(&name)).map(drop)
    }

    /// Opens another's event again.
    pub(crate) fn borrow_event(&mut self, event: EventId, ctx: CtxId) -> Result<(), CuError> {
        let (name, shared) = self.borrow(What::Event { event })?;
        self.role()?.import_event(event, ctx, unpack(shared)?)?;
        self.events.insert(event, (ctx, Known::opened(&name)));
        Ok(())
    }
}
