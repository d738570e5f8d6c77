//! A proxy in the place of one that is gone: it builds the devices and everything on them from an
//! image, then serves the client, which notices nothing.

use crate::backend::{self, BackendConfig, BuildError, Ready};
use crate::client_memory::ClientMemory;
use crate::compatibility;
use crate::control;
use crate::crossing::{Crossing, CrossingError, Part};
use crate::dispatch::Dispatcher;
use crate::executor::Executor;
use crate::hold;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::memory_first::memory_first;
use crate::options::Options;
use crate::phases::Phases;
use crate::places::hub::Hub;
use crate::places::restore::Back;
use crate::record::{Image, Step};
use crate::remedy;
use crate::remote::open::SessionError;
use crate::remote::restore::{self as far, Gone};
use crate::saved::DevicePiece;
use crate::work;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Backend, Code, Filling, Host, NewBackend, Object, SnapshotError};
use kedge_gpu_image::{SavedObject, SavedProxy, SavedStep, StateError};
use kedge_image::{ImageError, Layers, Source};
use kedge_protocol::{DeviceInfo, Message};
use kedge_remote::ImageLineError;
use kedge_transport::{ConnectError, SegmentError, Server};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum RestoreError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the image's GPU state is damaged: {0}")]
    Damaged(&'static str),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the ring or the shared arena of the image is none: {0}")]
    Segment(#[from] SegmentError),
    #[error("cannot use the client's socket: {0}")]
    Socket(std::io::Error),
    #[error(transparent)]
    Arena(#[from] ConnectError),
    #[error("no device: {0}")]
    NoDevice(#[from] BuildError),
    #[error(
        "the program cannot go on with {here} in the place of {was}: {why}; choose others by --gpu"
    )]
    OtherDevices { was: String, here: String, why: String },
    #[error("{what} cannot be made again: {source}{remedy}")]
    Step { what: &'static str, source: CuError, remedy: String },
    #[error("{0}")]
    Device(#[from] SnapshotError),
    #[error(transparent)]
    Crossing(#[from] CrossingError),
    #[error(transparent)]
    NoSession(#[from] SessionError),
    #[error("its devices, on another machine: {0}")]
    Line(#[from] ImageLineError),
    #[error("its devices, on another machine: {0}")]
    Far(String),
    #[error(
        "devices of another machine move to and from software devices alone as yet, and it is on {from}"
    )]
    GpusStay { from: String },
    #[error("the proxy that it comes from: {0}")]
    Moving(#[from] crate::moving::LineError),
    #[error(
        "what is held of it lies on devices of this machine: restart it here, or from its image"
    )]
    HeldHere,
    #[error("cannot begin with devices of several places: {0}")]
    Places(std::io::Error),
    #[error("its devices at {gpu}: {why}")]
    AtPlace { gpu: String, why: Box<RestoreError> },
    #[error(
        "a restart of devices of several places with a GPU among them, as {gpu}, is not supported \
         as yet: give --gpu software devices"
    )]
    GpuAmongPlaces { gpu: String },
    #[error(
        "its devices were of one place, and --gpu {gpu} names several: give --gpu devices of one"
    )]
    OfOnePlace { gpu: String },
}

const BEYOND: RestoreError = RestoreError::Damaged("an object beyond all memory");
/// What lies in the page cache is copied by as many threads as there are cores, up to here: a bus
/// takes 55 GB/s.
const READERS: usize = 16;

/// A client's devices, as they were.
pub(crate) struct Restored {
    pub(crate) server: Server,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) host: Arc<ProxyHost>,
    /// Where its devices are of several places.
    pub(crate) hub: Option<Arc<Hub>>,
    pub(crate) saved: SavedProxy,
    pub(crate) shared: OwnedFd,
}

impl Restored {
    /// The client is this process from now on.
    pub(crate) fn client_is(&self, pid: u32) {
        self.host.client_is(pid);
        self.hub.iter().for_each(|hub| hub.client_is(pid));
    }
}

/// What is handed over to it.
pub(crate) struct Connection {
    /// Its other end is the client's.
    pub(crate) socket: OwnedFd,
    pub(crate) ring: OwnedFd,
    pub(crate) shared: OwnedFd,
}

/// Where it comes from.
pub(crate) struct Origin {
    /// The image's file.
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) checksum: u64,
    /// Instead of that file, whose place it has: what is held in memory.
    pub(crate) held: Option<Held>,
}

pub(crate) struct Held {
    /// A file like the image's, but for what lies on devices.
    pub(crate) memory: OwnedFd,
    pub(crate) parts: Vec<OwnedFd>,
}

impl Origin {
    fn open(&self) -> Result<Layers, ImageError> {
        let entry = control::entry(&self.path, self.bytes, self.checksum);
        let Some(held) = &self.held else {
            let layers = Layers::of_file(&self.path, &entry)?;
            layers.read_ahead();
            return Ok(layers);
        };
        Layers::of_descriptor(held.memory.as_fd(), &entry)
    }
}

pub(crate) fn restore(
    from: Origin,
    connection: Connection,
    options: &Options,
    log: &Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Restored, RestoreError> {
    let mut phases = Phases::begin();
    let layers = from.open()?;
    let file = layers.file(0);
    let places = kedge_gpu_image::read_places(file)?;
    let saved = match &places {
        Some(places) => places.client(),
        None => kedge_gpu_image::read(file)?,
    };
    phases.over("its notes");
    let Connection { socket, ring, shared } = connection;
    kedge_transport::check_shared_arena(shared.as_fd())?;
    kedge_transport::map_shared_arena(shared.as_fd())?;
    let server = Server::resume(socket, ring, saved.position)?;
    if let Some(saved) = &places {
        // What was made ready is of one place, and has the addresses.
        drop(ready);
        let outbox = server.outbox().clone();
        let host = ProxyHost::new(outbox.clone(), ClientMemory::new(0), log.clone(), None);
        let (path, shared_with, socket) = (&*from.path, &shared, server.socket());
        let back = Back { path, saved, options, log, shared: shared_with, socket };
        let (places, hub) = back.restore(outbox, &mut phases)?;
        note!(log, "brought back in {}", phases.told());
        let (executor, host, hub) = (Box::new(places), Arc::new(host), Some(hub));
        let saved = saved.client();
        return Ok(Restored { server, executor, host, hub, saved, shared });
    }
    let memory = ClientMemory::new(0);
    let (outbox, keeper) = (server.outbox().clone(), options.keeper.clone());
    let host = Arc::new(ProxyHost::new(outbox, memory, log.clone(), keeper));
    let executor: Box<dyn Executor> = match &options.backend.gpu {
        GpuSpec::Remote { server: lender, devices } => {
            if from.held.is_some_and(|held| !held.parts.is_empty()) {
                return Err(RestoreError::HeldHere);
            }
            let (layers, saved, host, shared) = (&layers, &saved, &host, &shared);
            let (socket, reconnect) = (server.socket(), options.reconnect);
            let (choice, windows) = (&saved.hello.choice, &[][..]);
            let gone = Gone { layers, saved, choice, windows, host, shared, socket, reconnect };
            fill_arena(layers, saved)?;
            let (session, _) = far::restore(lender, devices, &gone)?;
            phases.over("its devices, far");
            note!(log, "brought back in {}", phases.told());
            Box::new(session)
        }
        GpuSpec::Several(several) => {
            return Err(RestoreError::OfOnePlace { gpu: several.to_string() });
        }
        _ => {
            let (choice, config) = (&saved.hello.choice, &options.backend);
            let built = backend::build(config, choice, host.clone(), ready)?;
            phases.over("devices");
            let own = server.socket().try_clone_to_owned().map_err(RestoreError::Socket)?;
            let parts = from.held.map(|held| held.parts);
            let (layers, saved, host) = (&layers, &saved, &host);
            let gone = Here { layers, saved, parts, config, host };
            Box::new(gone.rebuild(built, own, phases)?)
        }
    };
    Ok(Restored { server, executor, host, hub: None, saved, shared })
}

/// A client that is to be brought back on devices of this process.
pub(crate) struct Here<'a> {
    pub(crate) layers: &'a Layers,
    pub(crate) saved: &'a SavedProxy,
    /// What is held of it on the devices, if it is brought back from that.
    pub(crate) parts: Option<Vec<OwnedFd>>,
    pub(crate) config: &'a BackendConfig,
    pub(crate) host: &'a Arc<ProxyHost>,
}

impl Here<'_> {
    /// Makes everything on new devices; `socket` is the client's.
    pub(crate) fn rebuild(
        self,
        built: NewBackend,
        socket: OwnedFd,
        mut phases: Phases,
    ) -> Result<Local, RestoreError> {
        let Here { layers, saved, parts, config, host } = self;
        let software = matches!(config.gpu, GpuSpec::Soft { .. });
        alike(&saved.devices, &built.devices(), software)?;
        let crossing = Crossing::between(saved, &config.gpu)?;
        let notes = crossing.as_ref().map_or(&saved.notes[..], |crossing| &crossing.notes);
        let restoring = built.begin_restore(notes)?;
        let backend = Arc::clone(restoring.objects());
        host.set_backend(&backend);
        let mut dispatcher = Dispatcher::new(backend.clone(), host.clone(), socket);
        let resumed = dispatcher.sharing.resume(&saved.sharing);
        resumed.map_err(|source| not_made("what it shares", source, saved, &*backend))?;
        repeat(layers, saved, &mut dispatcher)?;
        let filling = restoring.made()?;
        phases.over("objects");
        let mut placed = HashSet::new();
        if let Some(parts) = parts {
            placed = hold::fill(layers.file(0), saved, parts, &filling)?;
        }
        fill(layers, saved, &placed, &Target { filling: &filling, crossing: crossing.as_ref() })?;
        filling.finish()?;
        phases.over("bytes");
        note!(host.log, "brought back in {}", phases.told());
        tell_host(saved, host);
        Ok(Local::new(dispatcher, host.clone(), config.cache))
    }
}

/// Gives the host what it knew of the client.
pub(crate) fn tell_host(saved: &SavedProxy, host: &ProxyHost) {
    for (ctx, error) in saved.faults.iter() {
        host.faults.set(&*host.outlet, *ctx, CuError(*error));
    }
    for (target, bytes) in saved.output.iter().flat_map(|output| output.parts.iter()) {
        host.output(*target, bytes);
    }
    host.set_dispatched(saved.position);
}

/// What the program has been told of its devices must stay true.
pub(crate) fn alike(
    was: &[DeviceInfo],
    here: &[DeviceInfo],
    software: bool,
) -> Result<(), RestoreError> {
    let refused = |why: String| {
        let first = |all: &[DeviceInfo]| all.first().map_or("none".into(), |d| d.name.to_string());
        let (was, here) = (first(was), first(here));
        Err(RestoreError::OtherDevices { was, here, why })
    };
    if was.len() != here.len() {
        return refused(format!("it has seen {}, here are {}", was.len(), here.len()));
    }
    let mut pairs = was.iter().zip(here);
    let difference = pairs.find_map(|(was, here)| compatibility::difference(was, here, software));
    difference.map_or(Ok(()), refused)
}

/// Makes everything again, in order.
fn repeat(
    layers: &Layers,
    saved: &SavedProxy,
    dispatcher: &mut Dispatcher,
) -> Result<(), RestoreError> {
    let lengths = saved.objects.iter().filter_map(|(number, object)| match object {
        SavedObject::Image { bytes } => Some((*number, *bytes)),
        _ => None,
    });
    let mut images = Images { layers, lengths: lengths.collect(), known: HashMap::new() };
    repeat_steps(memory_first(&saved.steps), saved, dispatcher, |number| images.get(number))
}

/// Does these steps again, whose modules have the images that `image` gives.
pub(crate) fn repeat_steps<'a>(
    steps: impl Iterator<Item = &'a SavedStep>,
    saved: &SavedProxy,
    dispatcher: &mut Dispatcher,
    mut image: impl FnMut(u64) -> Result<Image, RestoreError>,
) -> Result<(), RestoreError> {
    for step in steps {
        let (what, step) = match step.clone() {
            SavedStep::Message { message, result } => {
                (name(&message), Step::Message { message, result })
            }
            SavedStep::Module { ctx, module, image: number } => {
                ("a module", Step::Module { ctx, module, code: Code::Whole(image(number)?) })
            }
            SavedStep::Linked { ctx, module, images: numbers } => {
                let found = numbers.iter().map(|number| image(*number));
                let code = Code::Parts(found.collect::<Result<Vec<Image>, _>>()?);
                ("a linked module", Step::Module { ctx, module, code })
            }
        };
        let made = dispatcher.repeat(step);
        made.map_err(|source| not_made(what, source, saved, &*dispatcher.shared_backend()))?;
    }
    Ok(())
}

pub(crate) fn not_made(
    what: &'static str,
    source: CuError,
    saved: &SavedProxy,
    backend: &dyn Backend,
) -> RestoreError {
    let remedy = remedy::of(what, source, saved, backend.driver_version());
    RestoreError::Step { what, source, remedy }
}

/// Modules' images, read as they are wanted; several modules may have one.
struct Images<'a> {
    layers: &'a Layers,
    lengths: HashMap<u64, u64>,
    known: HashMap<u64, Image>,
}

impl Images<'_> {
    fn get(&mut self, number: u64) -> Result<Image, RestoreError> {
        if let Some(image) = self.known.get(&number) {
            return Ok(image.clone());
        }
        let bytes = self.lengths.get(&number);
        let bytes = *bytes.ok_or(RestoreError::Damaged("a module without an image"))?;
        let mut sources = self.layers.sources(number);
        sources.sort_unstable_by_key(|source| source.extent.address);
        // Each extent is there once; together they are as long as the files at most.
        let mut image = Vec::new();
        let (mut scratch, mut part) = (Vec::new(), Vec::new());
        for Source { layer, extent, .. } in &sources {
            if extent.address != image.len() as u64 || extent.address >= bytes {
                return Err(RestoreError::Damaged("a module's image has holes"));
            }
            part.resize(extent.decoded.min(kedge_image::MAX_EXTENT) as usize, 0);
            self.layers.file(*layer).read(extent, &mut scratch, &mut part)?;
            image.extend_from_slice(&part);
        }
        if (image.len() as u64) < bytes {
            return Err(RestoreError::Damaged("a module's image is cut short"));
        }
        image.truncate(bytes as usize);
        let image = Arc::new(image);
        self.known.insert(number, image.clone());
        Ok(image)
    }
}

/// Puts all bytes back where they were, but those of objects that are `placed` already.
fn fill(
    layers: &Layers,
    saved: &SavedProxy,
    placed: &HashSet<u64>,
    target: &Target<'_>,
) -> Result<(), RestoreError> {
    let mut all = Vec::new();
    for (number, object) in saved.objects.iter() {
        if !matches!(object, SavedObject::Image { .. }) && !placed.contains(number) {
            let sources = layers.sources(*number);
            complete(object, &sources)?;
            all.extend(sources.into_iter().map(|source| (object, source)));
        }
    }
    work::by(
        READERS,
        &all,
        || (Vec::new(), Vec::new()),
        |(object, Source { layer, extent, parts }), (scratch, bytes)| {
            if let (Some(piece), [(from, to)]) = (object.piece(), &parts[..])
                && target.crossing.is_none()
                && (*from, *to) == (extent.address, extent.address + extent.decoded)
                && *to <= object.bytes()
            {
                let start = piece.start.checked_add(*from).ok_or(BEYOND)?;
                let mut read = Ok(());
                let mut fill = |room: &mut [u8]| {
                    read = layers.file(*layer).read(extent, scratch, room);
                    read.is_ok()
                };
                let bytes = extent.decoded as usize;
                target.filling.put_filled(&piece.object, start, bytes, &mut fill)?;
                return Ok(read?);
            }
            bytes.resize(extent.decoded as usize, 0);
            layers.file(*layer).read(extent, scratch, bytes)?;
            for &(from, to) in parts {
                // The last page of an object may be longer than it.
                let to = to.min(object.bytes());
                let inside = (from - extent.address) as usize..(to - extent.address) as usize;
                put(object, from, &bytes[inside], target)?;
            }
            Ok(())
        },
    )
}

/// All of an object is there, and no more.
fn complete(object: &SavedObject, sources: &[Source]) -> Result<(), RestoreError> {
    let mut bytes = 0_u64;
    for Source { extent, parts, .. } in sources {
        if extent.decoded > kedge_image::MAX_EXTENT {
            return Err(RestoreError::Damaged("an extent is too long"));
        }
        for (from, to) in parts {
            if *from >= object.bytes() {
                return Err(RestoreError::Damaged("bytes past their object's end"));
            }
            bytes = bytes.saturating_add(to.min(&object.bytes()) - from);
        }
    }
    if bytes == object.bytes() { Ok(()) } else { Err(RestoreError::Damaged("bytes are missing")) }
}

/// The new devices.
pub(crate) struct Target<'a> {
    pub(crate) filling: &'a Filling,
    /// If they are of another kind.
    pub(crate) crossing: Option<&'a Crossing>,
}

impl Target<'_> {
    fn restore(&self, object: &Object, start: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        let Some(crossing) = self.crossing else {
            return self.filling.put(object, start, bytes);
        };
        let mut parts = crossing.places(object, start, bytes.len())?.into_iter();
        parts.try_for_each(|Part { object, start, bytes: range }| {
            self.filling.put(&object, start, &bytes[range])
        })
    }
}

pub(crate) fn put(
    object: &SavedObject,
    at: u64,
    bytes: &[u8],
    target: &Target<'_>,
) -> Result<(), RestoreError> {
    if let Some(piece) = object.piece() {
        let start = piece.start.checked_add(at).ok_or(BEYOND)?;
        return Ok(target.restore(&piece.object, start, bytes)?);
    }
    let SavedObject::Arena { start, .. } = object else {
        return Err(RestoreError::Damaged("bytes of no object"));
    };
    put_shared(*start, at, bytes)
}

/// Puts bytes into the shared arena: from `at` on of what begins at `start`.
fn put_shared(start: u64, at: u64, bytes: &[u8]) -> Result<(), RestoreError> {
    let offset = start.checked_add(at).filter(|offset| *offset < arena::SHARED_LEN);
    let addr = arena::SHARED_BASE + offset.ok_or(BEYOND)?;
    crate::client_memory::write_shared(addr, bytes).map_err(|_| BEYOND)
}

/// Puts back what the shared arena held, and nothing else.
pub(crate) fn fill_arena(layers: &Layers, saved: &SavedProxy) -> Result<(), RestoreError> {
    let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
    for (number, object) in saved.objects.iter() {
        let SavedObject::Arena { start, .. } = object else { continue };
        let sources = layers.sources(*number);
        complete(object, &sources)?;
        for Source { layer, extent, parts } in sources {
            bytes.resize(extent.decoded as usize, 0);
            layers.file(layer).read(&extent, &mut scratch, &mut bytes)?;
            for (from, to) in parts {
                let to = to.min(object.bytes());
                let inside = (from - extent.address) as usize..(to - extent.address) as usize;
                put_shared(*start, from, &bytes[inside])?;
            }
        }
    }
    Ok(())
}

fn name(message: &Message) -> &'static str {
    match message {
        Message::Post { post } => post.name(),
        Message::Call { call } => call.name(),
    }
}
