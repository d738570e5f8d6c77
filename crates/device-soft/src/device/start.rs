//! Devices before anybody uses them.

use super::arena::Memory;
use super::engine::Engines;
use super::events::Clock;
use super::ledger::Ledger;
use super::runtime::Runtime;
use super::vmm::Vmm;
use super::{SoftBackend, info};
use crate::check::Check;
use crate::pool::Pool;
use kedge_cuda_types::arena::{MAX_DEVICES, Windows};
use kedge_device::Host;
use kedge_protocol::DeviceInfo;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

/// How many devices of what size.
#[derive(Debug, Clone, Copy)]
pub struct SoftConfig {
    pub devices: u32,
    /// Bytes.
    pub memory_per_device: u64,
    /// Threads that execute kernels, shared by all devices; at least 1.
    pub workers: usize,
    /// What clients are told: see [`DeviceInfo::exact`]. Only tests do without.
    pub exact: bool,
    /// What clients are told: see [`DeviceInfo::apart`].
    pub apart: bool,
    /// What is looked for in the programs, if they are checked.
    pub check: Option<Check>,
}

impl SoftConfig {
    /// What programs are told of the devices.
    pub fn describe(&self) -> Vec<DeviceInfo> {
        let describe = |index| info::describe(index, self);
        (0..self.devices).map(describe).collect()
    }
}

/// Why the software devices do not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0} software devices were asked for; 1 to {MAX_DEVICES} are possible")]
    Devices(u32),
    #[error("cannot map the device address ranges: {0}")]
    Memory(io::Error),
    #[error("cannot start the worker threads: {0}")]
    Threads(io::Error),
    #[error("cannot share the devices' memory: {0}")]
    Ledger(io::Error),
}

/// Software devices that nobody uses yet.
pub struct Started {
    memory: Arc<Memory>,
    vmm: Vmm,
    engines: Engines,
    pool: Arc<Pool>,
    windows: Windows,
}

impl Started {
    /// Maps the memory of the devices in `windows` and starts their threads.
    ///
    /// # Errors
    /// [`StartError`] where an address range is taken or the system refuses memory or threads.
    pub fn new(config: SoftConfig, windows: Windows) -> Result<Started, StartError> {
        if windows.count() == 0 {
            return Err(StartError::Devices(0));
        }
        let memory = Memory::map(windows, config.memory_per_device, config.check);
        let memory = Arc::new(memory.map_err(StartError::Memory)?);
        memory.set_exact(config.exact);
        let vmm = Vmm::new(Arc::clone(&memory.spans), windows);
        let vmm = vmm.map_err(StartError::Memory)?;
        let pool = Pool::new(config.workers).map_err(StartError::Threads)?;
        let engines = Engines::start().map_err(StartError::Threads)?;
        Ok(Started { memory, vmm, engines, pool, windows })
    }

    /// Has all processes that name `folder` share the memory of their devices, as much as the file
    /// `bytes` there says: for tests.
    ///
    /// # Errors
    /// [`StartError::Ledger`] where the folder cannot be used.
    pub fn sharing(self, folder: Option<&Path>) -> Result<Started, StartError> {
        if let Some(folder) = folder {
            self.memory.share_with(Ledger::join(folder).map_err(StartError::Ledger)?);
        }
        Ok(self)
    }

    /// Returns where they are.
    pub fn windows(&self) -> Windows {
        self.windows
    }
}

impl SoftBackend {
    /// Starts the devices that `infos`, some of [`SoftConfig::describe`]'s in any order, describe.
    /// The shared arena is `host`'s to map, before any managed variable is loaded.
    ///
    /// # Errors
    /// As [`Started::new`].
    pub fn new(
        config: SoftConfig,
        infos: Vec<DeviceInfo>,
        host: Arc<dyn Host>,
    ) -> Result<Arc<Self>, StartError> {
        let count = u32::try_from(infos.len()).unwrap_or(u32::MAX);
        if count > MAX_DEVICES {
            return Err(StartError::Devices(count));
        }
        let started = Started::new(config, Windows::first(count))?;
        Ok(SoftBackend::on(started, infos, host))
    }

    /// As [`SoftBackend::new`], on devices that run already: as many as `infos` describe.
    pub fn on(started: Started, infos: Vec<DeviceInfo>, host: Arc<dyn Host>) -> Arc<Self> {
        let Started { memory, vmm, engines, pool, .. } = started;
        let tables = Arc::default();
        Arc::new(Self {
            infos: infos.into(),
            vmm,
            textures: Arc::default(),
            stage: Mutex::default(),
            writes: Mutex::default(),
            runtime: Arc::new(Runtime {
                tracer: host.tracer(),
                host,
                tables: Arc::downgrade(&tables),
                engines,
                memory,
                outstanding: AtomicUsize::new(0),
                unfinished: AtomicUsize::new(0),
                clock: Clock::start(),
                pool,
            }),
            tables,
        })
    }
}
