//! The devices of a job, as `--gpu` names them.

use kedge_cuda_types::arena::MAX_DEVICES;
use std::fmt;
use std::str::FromStr;
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
pub fn read_number(path: &str, key: &str) -> Option<u64> {
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
