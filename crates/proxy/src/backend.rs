//! Which devices a client gets.

use crate::visible::{self, Cut};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_device::{Backend, Host};
use kedge_device_nvidia::{CacheLimits, Gpus, NvidiaBackend, ReadyGpus};
use kedge_device_soft::device::{SoftBackend, SoftConfig, Started};
use kedge_protocol::{DeviceChoice, DeviceInfo};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use thiserror::Error;

/// The devices that `--gpu` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSpec {
    /// `soft` or `soft:N`: software devices.
    Soft { devices: u32 },
    /// `local` or `local:I,J…`: this machine's GPUs, all or those that the driver counts so.
    Local { ordinals: Vec<u32> },
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`{0}` names no devices: give soft, soft:N with N from 1 to {MAX_DEVICES}, local, or local:I,J… with the GPUs' numbers"
)]
pub struct BadGpuSpec(String);

impl FromStr for GpuSpec {
    type Err = BadGpuSpec;
    fn from_str(text: &str) -> Result<GpuSpec, BadGpuSpec> {
        let spec = match text.split_once(':') {
            None if text == "soft" => Some(GpuSpec::Soft { devices: 1 }),
            None if text == "local" => Some(GpuSpec::Local { ordinals: Vec::new() }),
            Some(("soft", count)) => soft(count),
            Some(("local", list)) => local(list),
            _ => None,
        };
        spec.ok_or_else(|| BadGpuSpec(text.to_owned()))
    }
}

fn soft(count: &str) -> Option<GpuSpec> {
    let devices = count.parse().ok().filter(|n| (1..=MAX_DEVICES).contains(n))?;
    Some(GpuSpec::Soft { devices })
}

/// Numbers between commas, each once.
fn local(list: &str) -> Option<GpuSpec> {
    let ordinals: Vec<u32> = list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
    let once = ordinals.iter().enumerate().all(|(at, n)| !ordinals[..at].contains(n));
    (once && ordinals.len() <= MAX_DEVICES as usize).then_some(GpuSpec::Local { ordinals })
}

impl fmt::Display for GpuSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuSpec::Soft { devices: 1 } => write!(f, "soft"),
            GpuSpec::Soft { devices } => write!(f, "soft:{devices}"),
            GpuSpec::Local { ordinals } => {
                write!(f, "local")?;
                for (at, ordinal) in ordinals.iter().enumerate() {
                    write!(f, "{}{ordinal}", if at == 0 { ':' } else { ',' })?;
                }
                Ok(())
            }
        }
    }
}

/// How a backend is set up.
#[derive(Debug, Clone)]
pub struct BackendConfig {
    pub gpu: GpuSpec,
    /// Bytes of each software device; `None`: half of what this machine lets us use, shared out.
    pub soft_memory: Option<u64>,
    /// Worker threads of the software devices; `None`: one a core.
    pub workers: Option<usize>,
    /// What snapshots of GPUs may take.
    pub cache: CacheLimits,
}

/// Why a client has no device.
#[derive(Debug, Error)]
pub enum BuildError {
    #[error(transparent)]
    Soft(#[from] kedge_device_soft::device::StartError),
    #[error(transparent)]
    Nvidia(#[from] kedge_device_nvidia::StartError),
    #[error(
        "CUDA_VISIBLE_DEVICES={list} hides all {count} of the job's devices{why}; name some of 0 to {}, or unset it",
        count - 1
    )]
    Hidden { list: String, count: usize, why: String, code: CuError },
}

impl BuildError {
    /// What cuInit answers.
    pub fn code(&self) -> CuError {
        match self {
            BuildError::Nvidia(error) => error.code(),
            BuildError::Soft(_) => CuError::NO_DEVICE,
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
        GpuSpec::Soft { devices } => {
            let soft = soft_config(config, *devices);
            let (chosen, _) = choose(&soft.describe(), choice)?;
            Ok(Ready::Soft(Started::new(soft, chosen.len() as u32)?))
        }
        GpuSpec::Local { ordinals } => {
            let gpus = Gpus::open(ordinals)?;
            let (chosen, _) = choose(gpus.infos(), choice)?;
            let ready = ReadyGpus::new(gpus, &chosen)?;
            Ok(Ready::Nvidia(Box::new(ready)))
        }
    }
}

/// Builds the backend that `config` asks for, with those of its devices that the client chooses: on those
/// that are `ready` where they are the ones.
pub fn build(
    config: &BackendConfig,
    choice: &DeviceChoice,
    host: Arc<dyn Host>,
    ready: Option<Ready>,
) -> Result<Arc<dyn Backend>, BuildError> {
    match &config.gpu {
        GpuSpec::Soft { devices } => {
            let soft = soft_config(config, *devices);
            let infos = soft.describe();
            let chosen = choose_aloud(&infos, choice, &*host)?;
            let infos: Vec<_> = chosen.iter().map(|&at| infos[at].clone()).collect();
            match ready {
                Some(Ready::Soft(started)) if started.devices() as usize == infos.len() => {
                    Ok(SoftBackend::on(started, infos, host))
                }
                other => {
                    say_unfit(&*host, other.is_some(), choice);
                    // Its addresses are wanted.
                    drop(other);
                    Ok(SoftBackend::new(soft, infos, host)?)
                }
            }
        }
        GpuSpec::Local { ordinals } => {
            let gpus = match ready {
                Some(Ready::Nvidia(ready)) => {
                    let chosen = choose_aloud(ready.infos(), choice, &*host)?;
                    if chosen == ready.chosen() {
                        return Ok(NvidiaBackend::on(*ready, host, config.cache)?);
                    }
                    say_unfit(&*host, true, choice);
                    ready.back()
                }
                _ => Gpus::open(ordinals)?,
            };
            let chosen = choose_aloud(gpus.infos(), choice, &*host)?;
            Ok(NvidiaBackend::with_cache(gpus, &chosen, host, config.cache)?)
        }
    }
}

fn say_unfit(host: &dyn Host, was_ready: bool, choice: &DeviceChoice) {
    if was_ready {
        let visible = choice.visible.as_deref().unwrap_or("not set");
        host.log(&format!(
            "this proxy was ready for other devices (CUDA_VISIBLE_DEVICES is {visible} here): it starts anew"
        ));
    }
}

/// The positions of the devices that the client sees, at least one; and why it names less than it seems to.
fn choose(
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
fn choose_aloud(
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

/// A variable for tests: where it is set, clients are told of software devices what they are told of GPUs, and
/// do as they do there.
const LIKE_GPU: &str = "KEDGE_SOFT_LIKE_GPU";

pub(crate) fn soft_config(config: &BackendConfig, devices: u32) -> SoftConfig {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    SoftConfig {
        devices,
        memory_per_device: config.soft_memory.unwrap_or_else(|| default_memory(devices)),
        workers: config.workers.unwrap_or_else(cores).max(1),
        exact: std::env::var_os(LIKE_GPU).is_none(),
    }
}

/// Half of the machine's memory, or of our cgroup's limit, shared among `devices`; whole 256 MiB,
/// and at least one of them.
pub fn default_memory(devices: u32) -> u64 {
    const STEP: u64 = 256 << 20;
    let machine = read_number("/proc/meminfo", "MemTotal:").map(|kib| kib << 10);
    let cgroup = read_number("/sys/fs/cgroup/memory.max", "");
    let available = machine.into_iter().chain(cgroup).min().unwrap_or(8 << 30);
    (available / 2 / u64::from(devices.max(1)) / STEP * STEP).max(STEP)
}

/// The number that follows `key` at the start of a line of `path`.
pub(crate) fn read_number(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_read_as_people_write_them() {
        assert_eq!("soft".parse(), Ok(GpuSpec::Soft { devices: 1 }));
        assert_eq!("soft:4".parse(), Ok(GpuSpec::Soft { devices: 4 }));
        assert_eq!("local".parse(), Ok(GpuSpec::Local { ordinals: vec![] }));
        assert_eq!("local:2,0".parse(), Ok(GpuSpec::Local { ordinals: vec![2, 0] }));
        for text in ["soft", "soft:2", "local", "local:1", "local:3,1"] {
            assert_eq!(text.parse::<GpuSpec>().unwrap().to_string(), text);
        }
        let bad = ["", "soft:", "soft:0", "soft:17", "soft:x", "soft:1:2", "soft:-1"];
        for bad in bad.into_iter().chain(["local:", "local:1,", "local:1,1", "locals", "local:x"]) {
            assert!(bad.parse::<GpuSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn default_memory_is_shared_out() {
        assert!(default_memory(1) >= 2 * default_memory(4));
        assert_eq!(default_memory(1) % (256 << 20), 0);
    }
}
