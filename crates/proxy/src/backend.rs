//! Which devices a client gets.

use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_device::{Backend, Host};
use kedge_device_soft::device::{SoftBackend, SoftConfig};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use thiserror::Error;

/// The devices that `--gpu` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuSpec {
    /// `soft` or `soft:N`: software devices.
    Soft { devices: u32 },
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` names no devices: give soft, or soft:N with N from 1 to {MAX_DEVICES}")]
pub struct BadGpuSpec(String);

impl FromStr for GpuSpec {
    type Err = BadGpuSpec;
    fn from_str(text: &str) -> Result<GpuSpec, BadGpuSpec> {
        let devices = match text.split_once(':') {
            None if text == "soft" => Some(1),
            Some(("soft", count)) => count.parse().ok(),
            _ => None,
        };
        match devices {
            Some(devices @ 1..=MAX_DEVICES) => Ok(GpuSpec::Soft { devices }),
            _ => Err(BadGpuSpec(text.to_owned())),
        }
    }
}

impl fmt::Display for GpuSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuSpec::Soft { devices: 1 } => write!(f, "soft"),
            GpuSpec::Soft { devices } => write!(f, "soft:{devices}"),
        }
    }
}

/// How a backend is set up.
#[derive(Debug, Clone, Copy)]
pub struct BackendConfig {
    pub gpu: GpuSpec,
    /// Bytes of each software device; `None`: half of what this machine lets us use, shared out.
    pub soft_memory: Option<u64>,
    /// Worker threads of the software devices; `None`: one a core.
    pub workers: Option<usize>,
}

/// Builds the backend that `config` asks for.
pub fn build(config: &BackendConfig, host: Arc<dyn Host>) -> Result<Arc<dyn Backend>, String> {
    let GpuSpec::Soft { devices } = config.gpu;
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    let soft = SoftConfig {
        devices,
        memory_per_device: config.soft_memory.unwrap_or_else(|| default_memory(devices)),
        workers: config.workers.unwrap_or_else(cores),
    };
    let backend = SoftBackend::new(soft, host).map_err(|error| error.to_string())?;
    Ok(backend)
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
fn read_number(path: &str, key: &str) -> Option<u64> {
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
        for bad in ["", "soft:", "soft:0", "soft:17", "soft:x", "local", "soft:1:2", "soft:-1"] {
            assert!(bad.parse::<GpuSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn default_memory_is_shared_out() {
        assert!(default_memory(1) >= 2 * default_memory(4));
        assert_eq!(default_memory(1) % (256 << 20), 0);
    }
}
