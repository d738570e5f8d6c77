//! CUDA devices driven through the installed driver, as a [`Backend`].
//!
//! - [`driver`]: `libcuda.so.1`, opened at run time; [`presence`], [`diagnosis`]: whether it is
//!   there, why it does not start. [`devices`]: what the program is told.
//! - [`arena`], [`host_memory`]: memory at addresses of the client's choice. [`allocations`]: of
//!   it, what has been told. [`quota`]: how much there may be. [`seams`]: where operations on it are
//!   cut.
//! - [`tables`]: what the client has named. [`context`], [`stream`], [`modules`], [`managed`],
//!   [`textures`]. [`window`]: what of it must lie at the same addresses after a restart.
//! - [`submit`]: one operation: [`launch`], [`copies`], [`staging`], [`scatter`], [`host_call`];
//!   [`graphs`]: many; [`drafts`]: before they are ready.
//! - [`snapshot`]: a checkpoint's copy of what the devices hold ([`sources`], [`spare`],
//!   [`notes`]); [`restore`]: putting it back; [`later`]: in several rounds, while it changes;
//!   [`held`]: when its process is gone. [`digests`]:
//!   what has changed since the last; [`drain`], [`pace`]: how bytes leave a device. [`away`]:
//!   memory that goes off the devices for a while. [`heap`]: whether kernels have memory of their
//!   own. [`symbols`], [`timeline`], [`texture_handles`]:
//!   what the driver does not tell or keep. [`steer`], [`code`]: what it places anew.
//! - [`ready`]: GPUs that are ready before there is a client.
//! - [`nvml`]: NVIDIA's management library, for the job's questions to it.
//! - [`waiters`]: threads that wait for the device. [`output`]: what kernels print.

mod allocations;
mod arena;
mod away;
mod backend;
mod bells;
#[cfg(test)]
mod changes_tests;
mod code;
mod context;
mod copies;
mod devices;
mod diagnosis;
mod digests;
mod drafts;
mod drain;
mod driver;
#[cfg(test)]
mod fake;
mod graph_copies;
mod graphs;
mod heap;
mod held;
#[cfg(test)]
mod held_tests;
mod host_call;
mod host_memory;
mod later;
#[cfg(test)]
mod later_tests;
mod launch;
mod managed;
mod meter;
mod modules;
mod notes;
mod nvml;
mod occupancy;
mod output;
mod pace;
mod pinned;
mod portable;
mod presence;
mod quota;
mod ready;
mod restore;
mod roles;
mod scatter;
mod seams;
mod snapshot;
#[cfg(test)]
mod snapshot_tests;
mod sources;
mod spare;
mod staging;
mod steer;
mod stream;
mod submit;
mod symbols;
mod tables;
mod tensor_maps;
mod texture_handles;
mod textures;
mod timeline;
mod vacancy;
mod waiters;
mod waits;
mod window;

pub use arena::ArenaError;
pub use driver::DriverError;
pub use nvml::Nvml;
pub use pace::{DrainRate, DrainWays};
pub use portable::{make_notes, read_notes};
pub use presence::{driver_path, gpu_nodes, obstacle};
pub use ready::ReadyGpus;
pub use spare::CacheLimits;

use allocations::Allocations;
use arena::Arena;
use context::Live;
use devices::Devices;
use diagnosis::Installation;
use digests::Digester;
use driver::{Driver, check};
use heap::Heaps;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::Windows;
use kedge_cuda_types::handle::CUdevice;
use kedge_device::Host;
use kedge_protocol::DeviceInfo;
use managed::Managed;
use output::Capture;
use pinned::Slots;
use quota::Quota;
use ready::{Spare, SpareContext};
use restore::Restoring;
use spare::Cache;
use staging::Buffers;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use stream::{Busy, Event, Stream};
use tables::Tables;
use timeline::Timeline;
use waiters::Waiters;

/// Why the devices cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// The driver's own error, and what was found to be behind it.
    #[error("{1}")]
    Init(CuError, String),
    #[error("--gpu local:{0}: there is no such GPU; the driver shows {1}")]
    NoSuchDevice(u32, usize),
    #[error("{0}")]
    Arena(#[from] ArenaError),
    #[error("cannot capture what kernels print: {0}")]
    Output(io::Error),
}

impl StartError {
    fn init(error: CuError) -> StartError {
        StartError::Init(error, Installation::look().explain(error))
    }

    /// What cuInit answers.
    pub fn code(&self) -> CuError {
        match self {
            StartError::Init(error, _) => *error,
            _ => CuError::NO_DEVICE,
        }
    }
}

/// The GPUs of one client.
pub struct NvidiaBackend {
    shared: Arc<Shared>,
    waiters: Waiters,
    infos: Vec<DeviceInfo>,
    /// What the client was told: see [`DeviceInfo::exact`].
    exact: AtomicBool,
    allocations: Mutex<Allocations>,
    quota: Quota,
    devices: Devices,
    version: u32,
    tables: Mutex<Tables>,
    /// Held while a module is loaded.
    managed: Mutex<Managed>,
    restoring: Mutex<Restoring>,
    /// A context that waits for its client.
    spare: Mutex<Option<SpareContext>>,
}

/// What waiting threads need.
struct Shared {
    driver: Arc<Driver>,
    host: Arc<dyn Host>,
    busy: Arc<Busy>,
    buffers: Buffers,
    capture: Capture,
    live: Live,
    cache: Cache,
    slots: Slots,
    digester: Digester,
    heaps: Heaps,
    timeline: Timeline,
}

impl Shared {
    /// A wait for a stream's operation `number` is over.
    fn over(&self, stream: &Stream, number: u64) {
        if stream.completed(number) {
            self.host.idle();
        }
    }

    /// An event that was recorded so has come, unless it was recorded anew meanwhile: here, or by
    /// another process.
    fn event_over(&self, event: &Event, recorded: Option<(Arc<Stream>, u64)>) {
        if let Some((stream, number)) = recorded
            && !event.interprocess
            && event.is_of(&stream, number)
        {
            self.over(&stream, number);
        }
    }

    /// A wait is over: tells of output and of a fault, and passes the result on.
    fn waited(
        &self,
        ctx: kedge_protocol::CtxId,
        result: Result<(), CuError>,
    ) -> Result<(), CuError> {
        self.capture.drain(&*self.host, result.is_err());
        result.inspect_err(|error| self.host.fault(ctx, *error))
    }
}

/// This machine's GPUs, found and described, of which a client gets some.
pub struct Gpus {
    driver: Arc<Driver>,
    devices: Vec<CUdevice>,
    infos: Vec<DeviceInfo>,
    version: u32,
    /// So many windows' addresses are reserved.
    reserved: u32,
    /// Bytes of each that a client may have.
    quota: u64,
    /// Where those are to be that a client gets; `None`: from the first window on.
    windows: Option<Windows>,
}

impl Gpus {
    /// Starts the driver. `ordinals` picks GPUs as the driver counts them; empty: all.
    ///
    /// # Errors
    /// [`StartError`], which says what is missing and what mends it.
    pub fn open(ordinals: &[u32]) -> Result<Gpus, StartError> {
        let driver = Arc::new(Driver::open()?);
        let shows_only = shows_only(ordinals);
        let none = |error| match ordinals.first() {
            Some(&first) if shows_only && error == CuError::NO_DEVICE => missing(first),
            _ => None,
        };
        // SAFETY: the first call, as the reference demands.
        check(unsafe { (driver.cuInit)(0) })
            .map_err(|error| none(error).unwrap_or_else(|| StartError::init(error)))?;
        let all = devices::all(&driver).map_err(StartError::init)?;
        let devices = pick(&all, ordinals, shows_only)?;
        let infos = devices.iter().map(|&device| devices::describe(&driver, device));
        let infos = infos.collect::<Result<Vec<_>, _>>().map_err(StartError::init)?;
        let mut version = 0;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuDriverGetVersion)(&mut version) }).map_err(StartError::init)?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok(Gpus { driver, devices, infos, version, reserved: 0, quota: u64::MAX, windows: None })
    }

    /// Lets a client have so many bytes of each at most, and tells it that there are no more.
    #[must_use]
    pub fn with_quota(mut self, bytes: u64) -> Gpus {
        for info in &mut self.infos {
            info.total_memory = info.total_memory.min(bytes);
        }
        Gpus { quota: bytes, ..self }
    }

    /// Those that `chosen` names by their positions.
    fn some(self, chosen: &[usize]) -> Gpus {
        let devices = chosen.iter().filter_map(|&at| self.devices.get(at).copied()).collect();
        let infos = chosen.iter().filter_map(|&at| self.infos.get(at).cloned()).collect();
        Gpus { devices, infos, ..self }
    }

    /// Places those that a client gets in these windows, as many as they are.
    #[must_use]
    pub fn in_windows(self, windows: Windows) -> Gpus {
        Gpus { windows: Some(windows), ..self }
    }

    /// Returns the client's, once there are no others.
    fn placed(&self) -> Devices {
        Devices::new(self.devices.clone(), self.windows)
    }

    /// What programs are told of them.
    pub fn infos(&self) -> &[DeviceInfo] {
        &self.infos
    }
}

impl NvidiaBackend {
    /// Reserves the address map for those of the GPUs that `chosen` names by their positions. From
    /// now on, what is written to standard output and error goes to the client.
    ///
    /// # Errors
    /// [`StartError`], which says what is missing and what mends it.
    pub fn new(
        gpus: Gpus,
        chosen: &[usize],
        host: Arc<dyn Host>,
    ) -> Result<Arc<NvidiaBackend>, StartError> {
        NvidiaBackend::with_cache(gpus, chosen, host, CacheLimits::default())
    }

    /// As [`NvidiaBackend::new`], with limits for what snapshots take.
    ///
    /// # Errors
    /// As [`NvidiaBackend::new`].
    pub fn with_cache(
        gpus: Gpus,
        chosen: &[usize],
        host: Arc<dyn Host>,
        limits: CacheLimits,
    ) -> Result<Arc<NvidiaBackend>, StartError> {
        let gpus = gpus.some(chosen);
        let arena = Arena::reserve(&gpus.driver, &gpus.placed(), gpus.reserved)?;
        let capture = Capture::begin().map_err(StartError::Output)?;
        let spare = Spare { unnamed: None, slots: Slots::new(&gpus.driver) };
        Ok(NvidiaBackend::assemble(gpus, arena, capture, spare, (host, limits)))
    }

    fn assemble(
        gpus: Gpus,
        arena: Arena,
        capture: Capture,
        Spare { unnamed, slots }: Spare,
        (host, limits): (Arc<dyn Host>, CacheLimits),
    ) -> Arc<NvidiaBackend> {
        let devices = gpus.placed();
        let Gpus { driver, mut infos, version, quota, .. } = gpus;
        if !arena.all_are_peers() {
            // A block of managed memory is one device's, and the others' kernels may use it.
            infos.iter_mut().for_each(|info| info.apart = false);
        }
        Arc::new(NvidiaBackend {
            tables: Mutex::new(Tables::new(&driver, arena)),
            managed: Mutex::default(),
            restoring: Mutex::default(),
            spare: Mutex::new(unnamed),
            shared: Arc::new(Shared {
                buffers: Buffers::new(&driver),
                busy: Arc::default(),
                host,
                capture,
                live: Live::default(),
                cache: Cache::new(&driver, limits),
                slots,
                digester: Digester::default(),
                heaps: Heaps::default(),
                timeline: Timeline::default(),
                driver,
            }),
            waiters: Waiters::default(),
            infos,
            exact: AtomicBool::new(false),
            allocations: Mutex::default(),
            quota: Quota::new(quota),
            devices,
            version,
        })
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocations(&self) -> MutexGuard<'_, Allocations> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn managed(&self) -> MutexGuard<'_, Managed> {
        self.managed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the driver was told to show the GPUs that are asked for and no others.
fn shows_only(ordinals: &[u32]) -> bool {
    let Ok(shown) = std::env::var("CUDA_VISIBLE_DEVICES") else { return false };
    let list: Vec<String> = ordinals.iter().map(u32::to_string).collect();
    !list.is_empty() && shown == list.join(",")
}

/// Why a GPU is not shown, if the machine has not so many.
fn missing(index: u32) -> Option<StartError> {
    let all = presence::gpu_nodes().len();
    (all > 0 && index as usize >= all).then_some(StartError::NoSuchDevice(index, all))
}

/// The GPUs that were asked for. `shows_only`: they are all that the driver shows, in this order.
fn pick(all: &[CUdevice], ordinals: &[u32], shows_only: bool) -> Result<Vec<CUdevice>, StartError> {
    if all.is_empty() {
        return Err(StartError::init(CuError::NO_DEVICE));
    }
    if ordinals.is_empty() {
        return Ok(all.to_vec());
    }
    let place = |at: usize, index: u32| if shows_only { at } else { index as usize };
    let picked = ordinals.iter().enumerate().map(|(at, &index)| {
        let found = all.get(place(at, index)).copied();
        found.ok_or(StartError::NoSuchDevice(index, all.len()))
    });
    picked.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_picked_by_their_numbers_or_are_all_that_the_driver_shows() {
        let picked = |all: &[CUdevice], ordinals: &[u32], shows_only| {
            pick(all, ordinals, shows_only).map_err(|error| error.to_string())
        };
        let all = [10, 11, 12];
        assert_eq!(picked(&all, &[], false), Ok(vec![10, 11, 12]));
        assert_eq!(picked(&all, &[2, 0], false), Ok(vec![12, 10]));
        assert_eq!(picked(&[12, 10], &[2, 0], true), Ok(vec![12, 10]));
        for (all, shows_only) in [(&all[..], false), (&[10], true)] {
            let said = picked(all, &[0, 3], shows_only).unwrap_err();
            assert!(said.contains("local:3: there is no such GPU"), "{said}");
        }
    }
}
