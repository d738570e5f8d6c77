//! Bringing a client back whose devices are of several places, from its image: each place of the
//! image goes, whole, to one place of those that there are now.

use super::gates::Gates;
use super::hub::Hub;
use super::image::{Newest, all};
use super::open::{choice_of, chosen, hosts, is_far};
use super::table::Table;
use super::{Place, Places};
use crate::backend::{self, BackendConfig};
use crate::client_memory::ClientMemory;
use crate::error::RestoreError;
use crate::executor::Executor;
use crate::filling::fill_arena;
use crate::given::GivenFile;
use crate::host::ProxyHost;
use crate::options::Options;
use crate::phases::Phases;
use crate::rebuild::Here;
use crate::remote::restore::{self as far, Gone};
use kedge_control::gpu::{self, GpuSpec};
use kedge_control::joblog::JobLog;
use kedge_cuda_types::arena::{MAX_DEVICES, Windows};
use kedge_gpu_image::{SavedPlaces, SavedProxy, SavedStep, place_file};
use kedge_image::{FileEntry, Layers};
use kedge_protocol::{Call, CtxId, DeviceChoice, Message, Post, StreamId};
use kedge_transport::Outbox;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A client that is to be brought back.
pub(crate) struct Back<'a> {
    /// Its file, beside which its places' are.
    pub(crate) own: &'a FileEntry,
    pub(crate) saved: &'a SavedPlaces,
    pub(crate) options: &'a Options,
    pub(crate) log: &'a Arc<JobLog>,
    /// The arena that it shares with this process.
    pub(crate) shared: &'a OwnedFd,
    /// Its socket, for descriptors.
    pub(crate) socket: BorrowedFd<'a>,
}

/// A place of the image.
struct Gathered {
    layers: Layers,
    saved: SavedProxy,
    /// Where it goes.
    home: gpu::Place,
}

impl Back<'_> {
    /// Makes everything again.
    pub(crate) fn restore(
        &self,
        files: Vec<GivenFile>,
        outbox: Outbox,
        phases: &mut Phases,
    ) -> Result<(Places, Arc<Hub>), RestoreError> {
        let Back { saved, options, log, .. } = *self;
        let homes = homes(&options.backend.gpu, saved)?;
        // Before anything is made, where that can be seen by then.
        if let Some(gpu) = homes.iter().find(|home| matches!(home.spec, GpuSpec::Local { .. })) {
            return Err(RestoreError::GpuAmongPlaces { gpu: gpu.spec.to_string() });
        }
        if files.len() != homes.len() {
            return Err(RestoreError::Damaged("it has not one file for each of its places"));
        }
        let of_places = homes.into_iter().zip(files).enumerate();
        let gathered = of_places.map(|(at, (home, file))| self.gather(at, home, file));
        let mut gathered = gathered.collect::<Result<Vec<Gathered>, RestoreError>>()?;
        let memory = ClientMemory::new(0);
        let hub = Hub::start(outbox, memory, log.clone(), gathered.len(), saved.position);
        let hub = hub.map_err(RestoreError::Places)?;
        let hosts = hosts(&hub, gathered.len(), options, log);
        hub.set_hosts(hosts.clone());
        let windows = |place: &Gathered| Windows::of(&place.home.windows);
        let windows: Option<Vec<Windows>> = gathered.iter().map(windows).collect();
        let mut table = Table::new(windows.ok_or(BAD_WINDOWS)?);
        for (at, place) in gathered.iter().enumerate() {
            remember(&mut table, &hub, at, &place.saved.steps);
        }
        // All of them have what the client shared with its devices.
        if let Some(first) = gathered.first() {
            fill_arena(&first.layers, &first.saved)?;
        }
        phases.over("its places' notes");
        // Those of this machine come first: what others have changed would be covered.
        let (here, far): (Vec<_>, Vec<_>) =
            gathered.iter_mut().enumerate().partition(|(_, place)| !is_far(&place.home.spec));
        let mut rebuilt = Vec::new();
        for (mut some, elsewhere) in [(here, false), (far, true)] {
            let built = all(
                &mut some,
                |_| elsewhere,
                |_, (at, place)| self.rebuild(place, &hosts[*at]).map(|place| (*at, place)),
            );
            rebuilt.extend(built.into_iter().collect::<Result<Vec<_>, _>>()?);
        }
        rebuilt.sort_by_key(|(at, _)| *at);
        phases.over("its devices");
        let (driver_version, newest) = (saved.driver_version, Arc::<Newest>::default());
        let places = rebuilt.into_iter().map(|(_, place)| place).collect();
        Ok((Places { places, table, hub: hub.clone(), driver_version, newest }, hub))
    }

    /// Reads what is noted of a place.
    fn gather(
        &self,
        at: usize,
        home: gpu::Place,
        GivenFile { entry, layers }: GivenFile,
    ) -> Result<Gathered, RestoreError> {
        let place = self.saved.places.get(at).ok_or(BAD_WINDOWS)?;
        if *place.file != place_file(&self.own.name, at) {
            return Err(RestoreError::Damaged("a place's file has another's name"));
        }
        if entry != place.entry() {
            return Err(RestoreError::Damaged(
                "a place's file is not the one that its client names",
            ));
        }
        let saved = kedge_gpu_image::read(layers.file(0))?;
        if saved.position != self.saved.position || saved.devices.len() != place.windows.len() {
            return Err(RestoreError::Damaged("a place's file is of another moment"));
        }
        Ok(Gathered { layers, saved, home })
    }

    /// Makes everything of a place again.
    fn rebuild(&self, place: &Gathered, host: &Arc<ProxyHost>) -> Result<Place, RestoreError> {
        let (gpu, windows) = (place.home.spec.to_string(), place.home.windows.clone());
        let (executor, holds) = self.executor(place, host).map_err(|why| {
            let (gpu, why) = (gpu.clone(), Box::new(why));
            RestoreError::AtPlace { gpu, why }
        })?;
        if !holds {
            return Err(RestoreError::GpuAmongPlaces { gpu });
        }
        Ok(Place { executor, holds, gpu, windows, far: is_far(&place.home.spec) })
    }

    /// Makes a place's executor, with everything; and tells whether its streams can be held.
    fn executor(
        &self,
        place: &Gathered,
        host: &Arc<ProxyHost>,
    ) -> Result<(Box<dyn Executor>, bool), RestoreError> {
        let Back { options, shared, socket, .. } = *self;
        let Gathered { layers, saved, home } = place;
        let choice = &choice_of(home);
        if let GpuSpec::Remote { server, devices } = &home.spec {
            let (windows, reconnect) = (&home.windows[..], options.reconnect);
            let gone = Gone { layers, saved, choice, windows, host, shared, socket, reconnect };
            let (session, welcome) = far::restore(server, devices, &gone)?;
            let holds = welcome.devices.iter().all(|device| device.exact);
            return Ok((Box::new(session), holds));
        }
        let (gpu, windows) = (home.spec.clone(), Windows::of(&home.windows));
        let config = &BackendConfig { gpu, windows, ..options.backend.clone() };
        let built = backend::build(config, choice, host.clone(), None)?;
        let holds = built.devices().iter().all(|device| device.exact);
        let socket = socket.try_clone_to_owned().map_err(RestoreError::Socket)?;
        let gone = Here { layers, saved, parts: None, config, host };
        Ok((Box::new(gone.rebuild(built, socket, Phases::begin())?), holds))
    }
}

const BAD_WINDOWS: RestoreError = RestoreError::Damaged("its places have not all of its devices");

/// Returns where each place of an image goes.
fn homes(gpu: &GpuSpec, saved: &SavedPlaces) -> Result<Vec<gpu::Place>, RestoreError> {
    let count = saved.devices.len();
    let mut windows: Vec<u32> =
        saved.places.iter().flat_map(|p| p.windows.iter()).copied().collect();
    windows.sort_unstable();
    if !windows.iter().copied().eq(0..count as u32) || count == 0 {
        return Err(BAD_WINDOWS);
    }
    let choice = &saved.hello.choice;
    let there = match gpu {
        GpuSpec::Several(several) => several.seen(&chosen(several.len(), choice)?.0),
        one => vec![all_of(one, count, choice)?],
    };
    let here: usize = there.iter().map(|place| place.windows.len()).sum();
    let other = |why: String| {
        let (was, here) = (saved.gpu.to_string(), gpu.to_string());
        RestoreError::OtherDevices { was, here, why }
    };
    if here != count {
        return Err(other(format!("it has seen {count} devices, here are {here}")));
    }
    let home = |windows: &[u32]| {
        let has = |place: &&gpu::Place| windows.iter().all(|w| place.windows.contains(w));
        let place = there.iter().find(has)?;
        let position = |window| place.windows.iter().position(|of| of == window);
        let positions = windows.iter().filter_map(position).map(|at| place.positions[at]).collect();
        Some(gpu::Place { spec: place.spec.clone(), positions, windows: windows.to_vec() })
    };
    let homes = saved.places.iter().map(|place| {
        home(&place.windows).ok_or_else(|| {
            let numbers: Vec<String> = place.windows.iter().map(u32::to_string).collect();
            other(format!(
                "its devices {} were of one place, and here are of several",
                numbers.join(", ")
            ))
        })
    });
    homes.collect()
}

/// Returns all devices of one place that a client sees which has seen so many.
fn all_of(spec: &GpuSpec, count: usize, choice: &DeviceChoice) -> Result<gpu::Place, RestoreError> {
    let there = match spec {
        GpuSpec::Soft { devices, .. } => Some(*devices as usize),
        GpuSpec::Local { ordinals: list } | GpuSpec::Remote { devices: list, .. } => {
            (!list.is_empty()).then_some(list.len())
        }
        GpuSpec::Several(_) => None,
    };
    // Of a place that has not said how many it has, as many as are wanted: whoever has fewer, or
    // not that one, says so.
    let (mut positions, _) = chosen(there.unwrap_or(MAX_DEVICES as usize), choice)?;
    if there.is_none() {
        positions.truncate(count);
    }
    Ok(gpu::Place {
        spec: spec.clone(),
        windows: (0..).take(positions.len()).collect(),
        positions: positions.into_iter().map(|at| at as u32).collect(),
    })
}

/// Takes note of what a place has from its record.
fn remember(table: &mut Table, hub: &Hub, at: usize, steps: &[SavedStep]) {
    for step in steps {
        match own_stream(step) {
            Some((ctx, stream)) => hub.gates().remember(at, ctx, stream),
            None => table.remember(step),
        }
        if let SavedStep::Message { message: Message::Call { call }, .. } = step
            && let Call::CtxCreate { ctx, .. } = call
        {
            hub.context_begins(*ctx, at);
        }
    }
}

/// Returns a stream of the near end's own that a step makes, and its context.
fn own_stream(step: &SavedStep) -> Option<(CtxId, StreamId)> {
    let SavedStep::Message { message: Message::Post { post }, .. } = step else { return None };
    let Post::StreamCreate { stream, ctx, .. } = post else { return None };
    Gates::is_own(*stream).then_some((*ctx, *stream))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_gpu_image::{PLACES_VERSION, SavedPlace};
    use kedge_protocol::{DeviceInfo, Hello};
    use kedge_wire::{List, Text};

    /// A client that has seen devices of these places, of so many in all.
    fn seen(places: &[&[u32]], count: usize, visible: Option<&str>) -> SavedPlaces {
        let visible = visible.map(|list| Text::new(list.into()).unwrap());
        let choice = DeviceChoice { visible, pci_order: false };
        let program = Text::new("a program".into()).unwrap();
        let hello =
            Hello { version: 8, pid: 77, probe_addr: 4096, probe_value: 5, program, choice };
        let device = DeviceInfo {
            name: Text::default(),
            uuid: [0; 16],
            pci: [0; 3],
            total_memory: 0,
            exact: true,
            apart: false,
            attributes: List::default(),
        };
        let place = |(at, windows): (usize, &&[u32])| SavedPlace {
            windows: List::new(windows.to_vec()).unwrap(),
            file: Text::new(place_file("gpu-77.kimg", at)).unwrap(),
            bytes: 0,
            checksum: 0,
        };
        SavedPlaces {
            version: PLACES_VERSION,
            gpu: Text::default(),
            hello,
            driver_version: 13_000,
            client_memory: true,
            devices: List::new(vec![device; count]).unwrap(),
            position: 12,
            places: List::new(places.iter().enumerate().map(place).collect()).unwrap(),
        }
    }

    fn told(gpu: &str, saved: &SavedPlaces) -> Result<Vec<String>, String> {
        let homes = homes(&gpu.parse().unwrap(), saved).map_err(|error| error.to_string())?;
        let one = |place: &gpu::Place| {
            format!("{} {:?} {:?}", place.spec, place.positions, place.windows)
        };
        Ok(homes.iter().map(one).collect())
    }

    #[test]
    fn each_place_goes_whole_to_one() {
        let saved = seen(&[&[0, 2], &[1]], 3, None);
        let goes = |gpu, homes: [&str; 2]| {
            assert_eq!(told(gpu, &saved), Ok(homes.map(str::to_owned).to_vec()), "{gpu}");
        };
        goes("a/0,b/0,a/1", ["a:7531/0,1 [0, 1] [0, 2]", "b:7531/0 [0] [1]"]);
        goes("a/5,4,6", ["a:7531/5,4,6 [0, 2] [0, 2]", "a:7531/5,4,6 [1] [1]"]);
        goes("soft:3", ["soft:3 [0, 2] [0, 2]", "soft:3 [1] [1]"]);
        goes("a", ["a:7531 [0, 2] [0, 2]", "a:7531 [1] [1]"]);
        for (gpu, why) in [
            ("a/0,b/0,1", "its devices 0, 2 were of one place, and here are of several"),
            ("a/0,b/0", "it has seen 3 devices, here are 2"),
            ("soft:4", "it has seen 3 devices, here are 4"),
        ] {
            let error = told(gpu, &saved).unwrap_err();
            assert!(error.contains(why), "{gpu}: {error}");
        }
    }

    #[test]
    fn what_the_program_has_chosen_is_chosen_again() {
        let saved = seen(&[&[0], &[1]], 2, Some("2,0"));
        let homes = told("a/4,soft,b/7", &saved).unwrap();
        assert_eq!(homes, ["b:7531/7 [0] [0]", "a:7531/4 [0] [1]"]);
        assert_eq!(told("soft:3", &saved).unwrap(), ["soft:3 [2] [0]", "soft:3 [0] [1]"]);
        // All of a server, which has not said how many they are.
        assert_eq!(told("a", &saved).unwrap(), ["a:7531 [2] [0]", "a:7531 [0] [1]"]);
        let cut = seen(&[&[0], &[1]], 2, Some("1,0,7"));
        assert_eq!(told("a", &cut).unwrap(), ["a:7531 [1] [0]", "a:7531 [0] [1]"]);
    }

    #[test]
    fn places_that_have_not_all_devices_are_damaged() {
        for (places, count) in
            [(&[&[0][..], &[2]][..], 2), (&[&[0], &[0, 1]], 2), (&[&[0]], 2), (&[], 0)]
        {
            let error = told("soft:2", &seen(places, count, None)).unwrap_err();
            assert!(error.contains("its places have not all of its devices"), "{error}");
        }
    }
}
