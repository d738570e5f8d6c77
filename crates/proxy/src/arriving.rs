//! The proxy that will have the client: makes its devices while it runs on those of another.

use crate::backend::{self, BackendConfig, Ready};
use crate::crossing::Crossing;
use crate::dispatch::Dispatcher;
use crate::error::LineError;
use crate::error::RestoreError;
use crate::filling::Target;
use crate::host::ProxyHost;
use crate::moving::{Message, Reply, receive, receive_bytes, receive_saved, send, steps_between};
use crate::rebuild::{alike, repeat_steps};
use crate::record::{Image, Step};
use crate::saved::DevicePiece;
use crate::taking::{Objects, Taking};
use kedge_control::gpu::GpuSpec;
use kedge_control::note;
use kedge_cuda_types::CuError;
use kedge_device::{NewBackend, Piece, Restored};
use kedge_gpu_image::{SavedObject, SavedProxy, SavedStep, VERSION};
use kedge_wire::Text;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Longest image of a module, as the dispatcher takes it.
const MAX_IMAGE: u64 = 2 << 30;

/// The devices of one that is to arrive.
pub(crate) enum Devices {
    /// They are made once it is known of what kind; by what was made ready, if anything.
    Wanted(Option<Ready>),
    /// Nothing has been made on them; the client is on another machine.
    New(NewBackend),
}

/// All of a client's, on its new devices.
pub(crate) struct Arrived {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) saved: SavedProxy,
}

/// A client's devices, as far as they are there.
pub(crate) struct Arriving<'a> {
    config: &'a BackendConfig,
    host: Arc<ProxyHost>,
    /// The client's, for descriptors.
    socket: OwnedFd,
    /// Of modules, by their numbers.
    images: HashMap<u64, Image>,
    built: Option<Built>,
    devices: Option<Devices>,
    /// Whether the client is on another machine.
    far: bool,
    /// The way to the other proxy, where descriptors come by it as well.
    pub(crate) line: Option<UnixStream>,
    buffer: Vec<u8>,
}

struct Built {
    restored: Restored<Dispatcher>,
    /// The version of their driver.
    driver: u32,
    /// If they are of another kind.
    crossing: Option<Crossing>,
    /// What has made them.
    steps: Vec<SavedStep>,
}

impl<'a> Arriving<'a> {
    pub(crate) fn new(
        config: &'a BackendConfig,
        host: Arc<ProxyHost>,
        socket: OwnedFd,
        devices: Devices,
    ) -> Arriving<'a> {
        let (images, built, line, buffer) = Default::default();
        let far = matches!(devices, Devices::New(_));
        Arriving { config, host, socket, images, built, devices: Some(devices), far, line, buffer }
    }

    /// Takes all rounds from `stream`, and has `finish` take what there is before the other hears
    /// of it.
    pub(crate) fn all<T>(
        mut self,
        stream: &mut (impl Read + Write),
        finish: impl FnOnce(Arrived) -> Result<T, RestoreError>,
    ) -> Result<T, RestoreError> {
        loop {
            let Message::Round { last } = receive(stream)? else {
                return Err(LineError::Order.into());
            };
            let saved = receive_saved(stream)?;
            let round = self.round(stream, &saved);
            let reply = match &round {
                Ok(true) => Reply::Done {},
                Ok(false) => Reply::Unfit { why: Text::default() },
                Err(error) => Reply::Failed { why: Text::truncated(error.to_string()) },
            };
            if !matches!(round, Ok(true)) {
                send(stream, &reply)?;
                round?;
                return Err(RestoreError::Damaged("another proxy takes its place"));
            }
            if last {
                // The other stands still from here on: what it hears must be true.
                let done = finish(self.finish(saved)?)?;
                send(stream, &reply)?;
                return Ok(done);
            }
            send(stream, &reply)?;
        }
    }

    /// Takes a round: whether what was made before could become what there is now.
    fn round(
        &mut self,
        stream: &mut (impl Read + Write),
        saved: &SavedProxy,
    ) -> Result<bool, RestoreError> {
        if saved.version != VERSION {
            return Err(RestoreError::Damaged("it is of another version"));
        }
        let soft = is_soft(&saved.gpu) && matches!(self.config.gpu, GpuSpec::Soft { .. });
        if self.far && !soft {
            return Err(RestoreError::GpusStay { from: saved.gpu.to_string() });
        }
        let objects: Objects<'_> =
            saved.objects.iter().map(|(number, object)| (*number, object)).collect();
        self.take_images(stream, &objects)?;
        let fits = match self.built.take() {
            None => self.build(saved).map(Some)?,
            Some(built) => self.become_later(built, saved)?,
        };
        let Some(built) = fits else { return Ok(false) };
        let filling = built.restored.filling();
        let target = Target { filling, crossing: built.crossing.as_ref() };
        let near = self.line.as_ref().filter(|_| built.crossing.is_none());
        let near = near.filter(|_| filling.takes_held().unwrap_or(false));
        send(stream, &if near.is_some() { Reply::Near {} } else { Reply::Done {} })?;
        let mut taking = Taking { objects, target, near: near.map(AsFd::as_fd) };
        while taking.one(stream, &mut self.buffer)? {}
        built.restored.filling().rest()?;
        self.built = Some(built);
        Ok(true)
    }

    /// Takes modules' images, up to the word that there are no more.
    fn take_images(
        &mut self,
        stream: &mut impl Read,
        objects: &Objects<'_>,
    ) -> Result<(), RestoreError> {
        let mut arrived: HashMap<u64, Vec<u8>> = HashMap::new();
        loop {
            let (number, from, len) = match receive(stream)? {
                Message::Bytes { number, from, len } => (number, from, len),
                Message::Make {} => break,
                _ => return Err(LineError::Order.into()),
            };
            receive_bytes(stream, len, &mut self.buffer)?;
            let Some(SavedObject::Image { bytes }) = objects.get(&number) else {
                return Err(RestoreError::Damaged("an image of no module"));
            };
            if *bytes > MAX_IMAGE || from >= *bytes {
                return Err(RestoreError::Damaged("a module's image is too long"));
            }
            let image = arrived.entry(number).or_insert_with(|| vec![0; *bytes as usize]);
            let to = from.saturating_add(len).min(*bytes);
            image[from as usize..to as usize].copy_from_slice(&self.buffer[..(to - from) as usize]);
        }
        self.images.retain(|number, _| objects.contains_key(number));
        self.images.extend(arrived.into_iter().map(|(number, image)| (number, Arc::new(image))));
        Ok(())
    }

    /// Makes everything, on new devices.
    fn build(&mut self, saved: &SavedProxy) -> Result<Built, RestoreError> {
        let (config, choice) = (self.config, &saved.hello.choice);
        let built = match self.devices.take() {
            Some(Devices::New(built)) => built,
            Some(Devices::Wanted(ready)) => {
                backend::build(config, choice, self.host.clone(), ready)?
            }
            None => return Err(LineError::Order.into()),
        };
        let software = matches!(config.gpu, GpuSpec::Soft { .. });
        alike(&saved.devices, &built.devices(), software)?;
        let crossing = Crossing::between(saved, &config.gpu)?;
        let notes = crossing.as_ref().map_or(&saved.notes[..], |crossing| &crossing.notes);
        let driver = built.driver_version();
        let new = |backend| {
            // It lasts as long as this process, which ends by itself where the move fails: what a
            // backend clears as it ends may lie in the shared arena, which is the client's and in
            // use.
            std::mem::forget(Arc::clone(&backend));
            self.host.set_backend(&backend);
            let own = self.socket.try_clone().map_err(RestoreError::Socket)?;
            Ok::<_, RestoreError>(Dispatcher::new(backend, self.host.clone(), own))
        };
        let mut restoring = built.begin_restore(notes, new)?;
        self.repeat(&saved.steps, saved, driver, |step| restoring.make(step))?;
        let restored = restoring.made()?;
        Ok(Built { restored, driver, crossing, steps: saved.steps.to_vec() })
    }

    /// Makes and ends what has been made and ended since; `None` where that does not lead to what
    /// there is now.
    fn become_later(
        &mut self,
        mut built: Built,
        saved: &SavedProxy,
    ) -> Result<Option<Built>, RestoreError> {
        let Some(steps) = steps_between(&built.steps, &saved.steps) else { return Ok(None) };
        if built.crossing.is_some() {
            built.crossing = Crossing::between(saved, &self.config.gpu)?;
        }
        let crossing = built.crossing.as_ref();
        let notes = crossing.map_or(&saved.notes[..], |crossing| &crossing.notes);
        let Built { restored, driver, .. } = built;
        let mut changing = restored.more(notes)?;
        if let Err(error) = self.repeat(&steps, saved, driver, |step| changing.make(step)) {
            note!(self.host.log, "a move takes another proxy: {error}");
            return Ok(None);
        }
        let mut pieces: Vec<Piece> =
            saved.objects.iter().filter_map(|(_, object)| object.piece()).collect();
        if let Some(crossing) = crossing {
            pieces = crossing.pieces(&pieces)?;
        }
        let restored = changing.made(&pieces)?;
        let (crossing, steps) = (built.crossing, saved.steps.to_vec());
        Ok(restored.map(|restored| Built { restored, driver, crossing, steps }))
    }

    fn repeat(
        &self,
        steps: &[SavedStep],
        saved: &SavedProxy,
        driver: u32,
        make: impl FnMut(Step) -> Result<(), CuError>,
    ) -> Result<(), RestoreError> {
        let missing = || RestoreError::Damaged("a module without an image");
        repeat_steps(steps.iter(), saved, driver, make, |number| {
            self.images.get(&number).cloned().ok_or_else(missing)
        })
    }

    /// All is there: the devices are the client's as soon as its ring is.
    fn finish(self, saved: SavedProxy) -> Result<Arrived, RestoreError> {
        let Some(Built { restored, .. }) = self.built else {
            return Err(LineError::Order.into());
        };
        Ok(Arrived { dispatcher: restored.finish()?, saved })
    }
}

/// Whether devices are software's, as a proxy has called its own.
fn is_soft(gpu: &str) -> bool {
    matches!(gpu.parse(), Ok(GpuSpec::Soft { .. }))
}
