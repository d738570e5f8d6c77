//! Devices before anybody uses them.

use super::arena::Memory;
use super::engine::Engines;
use super::info;
use super::vmm::Vmm;
use crate::pool::Pool;
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_protocol::DeviceInfo;
use std::io;
use std::sync::Arc;

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
}

impl SoftConfig {
    /// What programs are told of the devices.
    pub fn describe(&self) -> Vec<DeviceInfo> {
        let describe = |index| info::describe(index, self.memory_per_device, self.workers);
        let exact = self.exact;
        (0..self.devices).map(|index| DeviceInfo { exact, ..describe(index) }).collect()
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
}

/// Software devices that nobody uses yet.
pub struct Started {
    pub(super) memory: Arc<Memory>,
    pub(super) vmm: Vmm,
    pub(super) engines: Engines,
    pub(super) pool: Arc<Pool>,
    devices: u32,
}

impl Started {
    /// Maps the memory of so many devices and starts their threads.
    ///
    /// # Errors
    /// [`StartError`] where an address range is taken or the system refuses memory or threads.
    pub fn new(config: SoftConfig, devices: u32) -> Result<Started, StartError> {
        if devices == 0 || devices > MAX_DEVICES {
            return Err(StartError::Devices(devices));
        }
        let memory = Memory::map(devices, config.memory_per_device);
        let memory = Arc::new(memory.map_err(StartError::Memory)?);
        memory.set_exact(config.exact);
        let vmm = Vmm::new(Arc::clone(&memory.spans), devices as usize);
        let vmm = vmm.map_err(StartError::Memory)?;
        let pool = Pool::new(config.workers).map_err(StartError::Threads)?;
        let engines = Engines::start().map_err(StartError::Threads)?;
        Ok(Started { memory, vmm, engines, pool, devices })
    }

    /// How many.
    pub fn devices(&self) -> u32 {
        self.devices
    }
}
