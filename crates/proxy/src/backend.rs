//! Which devices a client gets.

use crate::visible::{self, Cut};
use kedge_control::check::Check;
use kedge_control::gpu::{GpuSpec, default_memory};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::Windows;
use kedge_device::{Backend, Host, NewBackend};
use kedge_device_nvidia::{CacheLimits, Gpus, NvidiaBackend, ReadyGpus};
use kedge_device_soft::device::{SoftBackend, SoftConfig, Started};
use kedge_protocol::{DeviceChoice, DeviceInfo};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// How a backend is set up.
#[derive(Debug, Clone)]
pub struct BackendConfig {
    pub gpu: GpuSpec,
    /// As which of the job's devices the client counts those that it gets; `None`: as all of them.
    pub windows: Option<Windows>,
    /// Bytes of each software device; `None`: half of what this machine lets us use, shared out.
    pub soft_memory: Option<u64>,
    /// Bytes of each GPU that the client may have; `None`: all.
    pub gpu_memory: Option<u64>,
    /// Worker threads of the software devices; `None`: one a core.
    pub workers: Option<usize>,
    /// What snapshots of GPUs may take.
    pub cache: CacheLimits,
    /// What software devices look for in the programs that they run.
    pub check: Option<Check>,
}

/// Why a client has no device.
#[derive(Debug, Error)]
pub enum BuildError {
    #[error(transparent)]
    Soft(#[from] kedge_device_soft::device::StartError),
    #[error(transparent)]
    Nvidia(#[from] kedge_device_nvidia::StartError),
    #[error("the devices of {0} are not on this machine")]
    Elsewhere(String),
    #[error(
        "CUDA_VISIBLE_DEVICES={list} hides all {count} of the job's devices{why}; name some of 0 to {}, or unset it",
        count - 1
    )]
    Hidden { list: String, count: usize, why: String, code: CuError },
    #[error(
        "the job counts {wanted} of its devices as {spec}'s, which gives {count}: give --gpu the \
         numbers of devices that are there"
    )]
    Windows { spec: String, wanted: u32, count: usize },
}

impl BuildError {
    /// What cuInit answers.
    pub fn code(&self) -> CuError {
        match self {
            BuildError::Nvidia(error) => error.code(),
            BuildError::Soft(_) | BuildError::Elsewhere(_) | BuildError::Windows { .. } => {
                CuError::NO_DEVICE
            }
            BuildError::Hidden { code, .. } => *code,
        }
    }
}

/// Devices that are ready before there is a client.
pub enum Ready {
    Soft(Started),
    Nvidia(Box<ReadyGpus>),
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ready::Soft(_) => "Soft",
            Ready::Nvidia(_) => "Nvidia",
        })
    }
}

/// Makes those of the devices ready that a client with this `choice` will get.
pub fn make_ready(config: &BackendConfig, choice: &DeviceChoice) -> Result<Ready, BuildError> {
    match &config.gpu {
        GpuSpec::Soft { devices, .. } => {
            let soft = soft_config(config, *devices);
            let (chosen, _) = choose(&soft.describe(), choice)?;
            let started = Started::new(soft, windows_of(config, chosen.len())?)?;
            Ok(Ready::Soft(started.sharing(ledger().as_deref())?))
        }
        GpuSpec::Local { ordinals } => {
            let gpus = open(ordinals, config)?;
            let (chosen, _) = choose(gpus.infos(), choice)?;
            let ready = ReadyGpus::new(gpus, &chosen)?;
            Ok(Ready::Nvidia(Box::new(ready)))
        }
        elsewhere @ (GpuSpec::Remote { .. } | GpuSpec::Several(_)) => {
            Err(BuildError::Elsewhere(elsewhere.to_string()))
        }
    }
}

/// Builds the backend that `config` asks for, with those of its devices that the client chooses: on
/// those that are `ready` where they are the ones.
pub fn build(
    config: &BackendConfig,
    choice: &DeviceChoice,
    host: Arc<dyn Host>,
    ready: Option<Ready>,
) -> Result<NewBackend, BuildError> {
    let backend: Arc<dyn Backend> = match &config.gpu {
        GpuSpec::Soft { devices, .. } => {
            let soft = soft_config(config, *devices);
            let infos = soft.describe();
            let chosen = choose_and_log(&infos, choice, &*host)?;
            let infos: Vec<_> = chosen.iter().map(|&at| infos[at].clone()).collect();
            let windows = windows_of(config, infos.len())?;
            match ready {
                Some(Ready::Soft(started)) if started.windows() == windows => {
                    SoftBackend::on(started, infos, host)
                }
                other => {
                    log_unfit(&*host, other.is_some(), choice);
                    // Its addresses are wanted.
                    drop(other);
                    let started = Started::new(soft, windows)?.sharing(ledger().as_deref())?;
                    SoftBackend::on(started, infos, host)
                }
            }
        }
        GpuSpec::Local { ordinals } => {
            let gpus = match ready {
                Some(Ready::Nvidia(ready)) => {
                    let chosen = choose_and_log(ready.infos(), choice, &*host)?;
                    if chosen == ready.chosen() && config.windows.is_none() {
                        let backend = NvidiaBackend::on(*ready, host, config.cache)?;
                        return Ok(NewBackend::new(backend));
                    }
                    log_unfit(&*host, true, choice);
                    ready.back()
                }
                _ => open(ordinals, config)?,
            };
            let chosen = choose_and_log(gpus.infos(), choice, &*host)?;
            let windows = windows_of(config, chosen.len())?;
            NvidiaBackend::with_cache(gpus.in_windows(windows), &chosen, host, config.cache)?
        }
        elsewhere @ (GpuSpec::Remote { .. } | GpuSpec::Several(_)) => {
            return Err(BuildError::Elsewhere(elsewhere.to_string()));
        }
    };
    Ok(NewBackend::new(backend))
}

fn open(ordinals: &[u32], config: &BackendConfig) -> Result<Gpus, BuildError> {
    Ok(Gpus::open(ordinals)?.with_quota(config.gpu_memory.unwrap_or(u64::MAX)))
}

/// Returns where so many devices are for their client.
fn windows_of(config: &BackendConfig, count: usize) -> Result<Windows, BuildError> {
    let all = Windows::first(u32::try_from(count).unwrap_or(u32::MAX));
    let windows = config.windows.unwrap_or(all);
    if windows.count() as usize != count {
        let (spec, wanted) = (config.gpu.to_string(), windows.count());
        return Err(BuildError::Windows { spec, wanted, count });
    }
    Ok(windows)
}

fn log_unfit(host: &dyn Host, was_ready: bool, choice: &DeviceChoice) {
    if was_ready {
        let visible = choice.visible.as_deref().unwrap_or("not set");
        host.log(&format!(
            "this proxy was ready for other devices (CUDA_VISIBLE_DEVICES is {visible} here): it starts anew"
        ));
    }
}

/// The positions of the devices that the client sees, at least one; and why it names less than it
/// seems to.
pub(crate) fn choose(
    infos: &[DeviceInfo],
    choice: &DeviceChoice,
) -> Result<(Vec<usize>, Option<Cut>), BuildError> {
    let found = visible::choose(infos, choice);
    if found.devices.is_empty() {
        let code = found.cut.as_ref().map_or(CuError::NO_DEVICE, Cut::code);
        let why = found.cut.map(|cut| format!(": {cut}")).unwrap_or_default();
        let list = choice.visible.as_deref().unwrap_or_default().to_owned();
        return Err(BuildError::Hidden { list, count: infos.len(), why, code });
    }
    Ok((found.devices, found.cut))
}

/// The same, with a line in the log where the list has an entry that ends it.
fn choose_and_log(
    infos: &[DeviceInfo],
    choice: &DeviceChoice,
    host: &dyn Host,
) -> Result<Vec<usize>, BuildError> {
    let (devices, cut) = choose(infos, choice)?;
    if let Some(cut) = cut {
        let list = choice.visible.as_deref().unwrap_or_default();
        host.log(&format!("CUDA_VISIBLE_DEVICES={list}: {cut}"));
    }
    Ok(devices)
}

/// A variable for tests: where it is set, clients are told of software devices what they are told
/// of GPUs, and do as they do there.
const LIKE_GPU: &str = "KEDGE_SOFT_LIKE_GPU";

/// A variable for tests: where it names a folder, software devices share the memory of which that
/// folder tells with those of all other processes for which it is set.
const LEDGER: &str = "KEDGE_SOFT_LEDGER";

fn ledger() -> Option<PathBuf> {
    std::env::var_os(LEDGER).map(PathBuf::from)
}

pub(crate) fn soft_config(config: &BackendConfig, devices: u32) -> SoftConfig {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    SoftConfig {
        devices,
        memory_per_device: config.soft_memory.unwrap_or_else(|| default_memory(devices)),
        workers: config.workers.unwrap_or_else(cores).max(1),
        exact: std::env::var_os(LIKE_GPU).is_none(),
        apart: matches!(config.gpu, GpuSpec::Soft { apart: true, .. }),
        check: config.check.map(|check| kedge_device_soft::Check {
            races: check.races,
            init: check.init,
            unused: check.unused,
        }),
    }
}
