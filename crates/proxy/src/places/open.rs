//! Beginning with devices of several places.

use super::hub::{Hub, PlaceMemory, PlaceOutlet};
use super::table::{At, Table};
use super::{Place, Places};
use crate::backend::{self, BackendConfig, BuildError};
use crate::client_memory::ClientMemory;
use crate::dispatch::Dispatcher;
use crate::error::SessionError;
use crate::executor::Executor;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::options::Options;
use crate::remote::open::{Client, open_session};
use crate::visible::Cut;
use kedge_control::gpu::{self, GpuSpec, Several};
use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::Windows;
use kedge_cuda_types::attribute as attr;
use kedge_protocol::{DeviceChoice, DeviceInfo, Hello, Welcome};
use kedge_transport::{ATTRIBUTE_PLACE, Outbox};
use kedge_wire::{List, Text};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

/// Why a client has no devices of several places.
#[derive(Debug, Error)]
pub enum PlacesError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("{spec} shows {count} devices, and {wanted} of it were named")]
    Count { spec: String, count: usize, wanted: usize },
    #[error("cannot begin with devices of several places: {0}")]
    System(#[from] io::Error),
}

impl PlacesError {
    /// What cuInit answers.
    pub(crate) fn code(&self) -> CuError {
        match self {
            PlacesError::Session(error) => error.code(),
            PlacesError::Build(error) => error.code(),
            PlacesError::Count { .. } | PlacesError::System(_) => CuError::NO_DEVICE,
        }
    }
}

/// A client that is to have devices of several places.
pub(crate) struct Wants<'a> {
    pub(crate) several: &'a Several,
    pub(crate) hello: &'a Hello,
    pub(crate) options: &'a Options,
    pub(crate) log: &'a Arc<JobLog>,
    /// The arena that it shares with this process.
    pub(crate) shared: &'a OwnedFd,
    /// Its socket, for descriptors.
    pub(crate) socket: BorrowedFd<'a>,
}

/// Begins with each place in turn.
///
/// # Errors
/// A place that cannot be had: the others are let go of as the process ends.
pub(crate) fn open(
    wants: &Wants<'_>,
    outbox: Outbox,
    memory: ClientMemory,
) -> Result<(Places, Arc<Hub>, Welcome), PlacesError> {
    let seen = seen(wants)?;
    let hub = Hub::start(outbox, memory, wants.log.clone(), seen.len(), 0)?;
    let hosts = hosts(&hub, seen.len(), wants.options, wants.log);
    hub.set_hosts(hosts.clone());
    let (mut places, mut windows) = (Vec::new(), Vec::new());
    let mut told = Told::default();
    for (at, (place, host)) in seen.iter().zip(&hosts).enumerate() {
        let (executor, welcome) = begin(wants, place, host)?;
        let (count, wanted) = (welcome.devices.len(), place.windows.len());
        let Some(here) = Windows::of(&place.windows).filter(|_| count == wanted) else {
            let spec = place.spec.to_string();
            return Err(PlacesError::Count { spec, count, wanted });
        };
        let holds = welcome.devices.iter().all(|device| device.exact);
        told.add(at, place, welcome);
        let (gpu, all) = (place.spec.to_string(), place.windows.clone());
        let far = is_far(&place.spec);
        places.push(Place { executor, holds, gpu, windows: all, far });
        windows.push(here);
    }
    let welcome = told.welcome();
    let (driver_version, newest) = (welcome.driver_version, Arc::default());
    let places =
        Places { places, table: Table::new(windows), hub: hub.clone(), driver_version, newest };
    Ok((places, hub, welcome))
}

/// Makes who hosts each place.
pub(super) fn hosts(
    hub: &Arc<Hub>,
    count: usize,
    options: &Options,
    log: &Arc<JobLog>,
) -> Vec<Arc<ProxyHost>> {
    let host = |at| {
        let outlet = PlaceOutlet { hub: hub.clone(), at };
        let memory = PlaceMemory { hub: hub.clone(), at };
        Arc::new(ProxyHost::new(outlet, memory, log.clone(), options.keeper.clone()))
    };
    (0..count).map(host).collect()
}

/// Returns the places of the devices that the client chooses.
fn seen(wants: &Wants<'_>) -> Result<Vec<gpu::Place>, BuildError> {
    let Wants { several, hello, log, .. } = wants;
    let (devices, cut) = chosen(several.len(), &hello.choice)?;
    if let Some(cut) = cut {
        let list = hello.choice.visible.as_deref().unwrap_or_default();
        warn!(log, "CUDA_VISIBLE_DEVICES={list}: {cut}");
    }
    Ok(several.seen(&devices))
}

/// Returns which of so many devices a client chooses, by their positions, and why it names less
/// than it seems to. Numbers are all that is known of devices before there is a session; their
/// order is the list's, whatever CUDA_DEVICE_ORDER says.
pub(super) fn chosen(
    count: usize,
    choice: &DeviceChoice,
) -> Result<(Vec<usize>, Option<Cut>), BuildError> {
    let unknown = DeviceInfo {
        name: Text::default(),
        uuid: [0; 16],
        pci: [0; 3],
        total_memory: 0,
        exact: true,
        apart: false,
        attributes: List::default(),
    };
    let choice = DeviceChoice { visible: choice.visible.clone(), pci_order: false };
    backend::choose(&vec![unknown; count], &choice)
}

/// Returns whether devices are on another machine.
pub(super) fn is_far(spec: &GpuSpec) -> bool {
    matches!(spec, GpuSpec::Remote { .. })
}

/// Returns what has a place show these of its devices.
pub(super) fn choice_of(place: &gpu::Place) -> DeviceChoice {
    let positions: Vec<String> = place.positions.iter().map(u32::to_string).collect();
    let visible = Some(Text::truncated(positions.join(",")));
    DeviceChoice { visible, pci_order: false }
}

/// Begins with one place.
fn begin(
    wants: &Wants<'_>,
    place: &gpu::Place,
    host: &Arc<ProxyHost>,
) -> Result<(Box<dyn Executor>, Welcome), PlacesError> {
    let Wants { hello, options, shared, socket, .. } = *wants;
    let choice = &choice_of(place);
    let windows = &place.windows[..];
    if let GpuSpec::Remote { server, devices } = &place.spec {
        let reconnect = options.reconnect;
        let client =
            Client { hello, choice, windows, host, shared, socket, reconnect, restore: None };
        let (session, welcome) = open_session(server, devices, &client)?;
        return Ok((Box::new(session), welcome));
    }
    let (gpu, windows) = (place.spec.clone(), Windows::of(windows));
    let config = BackendConfig { gpu, windows, ..options.backend.clone() };
    let backend = backend::build(&config, choice, host.clone(), None)?.start();
    host.set_backend(&backend);
    let devices = List::new(backend.devices()).unwrap_or_default();
    let driver_version = backend.driver_version();
    let welcome = Welcome { driver_version, client_memory: true, devices };
    let dispatcher = Dispatcher::new(backend, host.clone(), socket.try_clone_to_owned()?);
    Ok((Box::new(Local::new(dispatcher, host.clone(), config.cache)), welcome))
}

/// What the client is told of all its devices.
#[derive(Default)]
struct Told {
    driver_version: Option<u32>,
    devices: Vec<(u32, DeviceInfo)>,
}

impl Told {
    fn add(&mut self, at: At, place: &gpu::Place, welcome: Welcome) {
        let version = welcome.driver_version;
        // What all of them can.
        self.driver_version = Some(self.driver_version.map_or(version, |v| v.min(version)));
        for (&window, device) in place.windows.iter().zip(welcome.devices.into_inner()) {
            let device = self.apart_from_others(device, at, window);
            self.devices.push((window, device));
        }
    }

    /// Returns a device as it is told: with its place, and as no other one. Two machines' devices
    /// may have one PCI address, and their software devices one UUID.
    fn apart_from_others(&self, mut device: DeviceInfo, at: At, window: u32) -> DeviceInfo {
        let others = || self.devices.iter().map(|(_, other)| other);
        if others().any(|other| other.uuid == device.uuid) {
            device.uuid[11] = 1 + window as u8;
        }
        while others().any(|other| other.pci == device.pci) {
            device.pci[0] = device.pci[0].wrapping_add(1 << 16);
        }
        let domain = device.pci[0];
        let mut attributes = device.attributes.into_inner();
        for (id, value) in &mut attributes {
            match *id {
                attr::PCI_DOMAIN_ID => *value = domain,
                // Memory that both see is kept by messages.
                attr::CONCURRENT_MANAGED_ACCESS | attr::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST => {
                    *value = 0;
                }
                _ => {}
            }
        }
        // As is all managed memory.
        device.apart = false;
        attributes.push((ATTRIBUTE_PLACE, at as i32));
        device.attributes = List::new(attributes).unwrap_or_default();
        device
    }

    fn welcome(mut self) -> Welcome {
        self.devices.sort_by_key(|(window, _)| *window);
        let devices = self.devices.into_iter().map(|(_, device)| device).collect();
        let devices = List::new(devices).unwrap_or_default();
        let driver_version = self.driver_version.unwrap_or_default();
        Welcome { driver_version, client_memory: true, devices }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soft(windows: &[u32]) -> (gpu::Place, Welcome) {
        let config = BackendConfig {
            gpu: format!("soft:{}", windows.len()).parse().unwrap(),
            windows: None,
            soft_memory: Some(1 << 30),
            gpu_memory: None,
            workers: Some(1),
            cache: kedge_device_nvidia::CacheLimits::default(),
            check: None,
        };
        let devices = backend::soft_config(&config, windows.len() as u32).describe();
        let devices = List::new(devices).unwrap();
        let welcome =
            Welcome { driver_version: 13_000 + windows.len() as u32, client_memory: true, devices };
        let positions = (0..windows.len() as u32).collect();
        (gpu::Place { spec: config.gpu, positions, windows: windows.to_vec() }, welcome)
    }

    #[test]
    fn no_two_devices_are_told_alike() {
        let mut told = Told::default();
        for (at, windows) in [&[1, 3][..], &[0], &[2]].into_iter().enumerate() {
            let (place, mut welcome) = soft(windows);
            // As GPUs say.
            let say = |device: DeviceInfo| DeviceInfo { apart: true, ..device };
            let devices = welcome.devices.into_inner().into_iter().map(say).collect();
            welcome.devices = List::new(devices).unwrap();
            told.add(at, &place, welcome);
        }
        let welcome = told.welcome();
        assert_eq!((welcome.devices.len(), welcome.driver_version), (4, 13_001));
        let value = |device: &DeviceInfo, id: u32| {
            device.attributes.iter().find(|(of, _)| *of == id).map(|(_, value)| *value)
        };
        let places: Vec<_> = welcome.devices.iter().map(|d| value(d, ATTRIBUTE_PLACE)).collect();
        assert_eq!(places, [Some(1), Some(0), Some(2), Some(0)]);
        for (at, one) in welcome.devices.iter().enumerate() {
            assert_eq!(value(one, attr::PCI_DOMAIN_ID), Some(one.pci[0]));
            assert_eq!(value(one, attr::CONCURRENT_MANAGED_ACCESS), Some(0));
            assert!(!one.apart, "managed memory is in the shared arena");
            for other in &welcome.devices[at + 1..] {
                assert!(one.uuid != other.uuid && one.pci != other.pci);
            }
        }
    }
}
