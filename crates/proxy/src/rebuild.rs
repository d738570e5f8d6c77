//! A client's devices, built again from an image on devices of this process.

use crate::backend::BackendConfig;
use crate::compatibility;
use crate::crossing::Crossing;
use crate::dispatch::Dispatcher;
use crate::error::RestoreError;
use crate::filling::{Target, fill};
use crate::hold;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::memory_first::memory_first;
use crate::phases::Phases;
use crate::record::{Image, Step};
use crate::remedy;
use kedge_control::gpu::GpuSpec;
use kedge_control::note;
use kedge_cuda_types::CuError;
use kedge_device::{Code, Host, NewBackend};
use kedge_gpu_image::{SavedObject, SavedProxy, SavedStep};
use kedge_image::{Layers, Source};
use kedge_protocol::{DeviceInfo, Message};
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

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
        let driver = built.driver_version();
        let new = |backend| {
            host.set_backend(&backend);
            let mut dispatcher = Dispatcher::new(backend, host.clone(), socket);
            let resumed = dispatcher.sharing.resume(&saved.sharing);
            resumed.map_err(|source| not_made("what it shares", source, saved, driver))?;
            Ok::<_, RestoreError>(dispatcher)
        };
        let mut restoring = built.begin_restore(notes, new)?;
        repeat(layers, saved, driver, |step| restoring.make(step))?;
        let restored = restoring.made()?;
        phases.over("objects");
        let filling = restored.filling();
        let mut placed = HashSet::new();
        if let Some(parts) = parts {
            placed = hold::fill(layers.file(0), saved, parts, filling)?;
        }
        fill(layers, saved, &placed, &Target { filling, crossing: crossing.as_ref() })?;
        let dispatcher = restored.finish()?;
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

/// Has everything made again, in order, on devices of the driver of that version.
fn repeat(
    layers: &Layers,
    saved: &SavedProxy,
    driver: u32,
    make: impl FnMut(Step) -> Result<(), CuError>,
) -> Result<(), RestoreError> {
    let lengths = saved.objects.iter().filter_map(|(number, object)| match object {
        SavedObject::Image { bytes } => Some((*number, *bytes)),
        _ => None,
    });
    let mut images = Images { layers, lengths: lengths.collect(), known: HashMap::new() };
    repeat_steps(memory_first(&saved.steps), saved, driver, make, |number| images.get(number))
}

/// Has `make` do these steps again, whose modules have the images that `image` gives.
pub(crate) fn repeat_steps<'a>(
    steps: impl Iterator<Item = &'a SavedStep>,
    saved: &SavedProxy,
    driver: u32,
    mut make: impl FnMut(Step) -> Result<(), CuError>,
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
        make(step).map_err(|source| not_made(what, source, saved, driver))?;
    }
    Ok(())
}

fn not_made(what: &'static str, source: CuError, saved: &SavedProxy, driver: u32) -> RestoreError {
    let remedy = remedy::of(what, source, saved, driver);
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

fn name(message: &Message) -> &'static str {
    match message {
        Message::Post { post } => post.name(),
        Message::Call { call } => call.name(),
    }
}
