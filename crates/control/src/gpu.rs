//! The devices of a job, as `--gpu` names them.

mod several;

pub use several::{Place, Several};

use kedge_cuda_types::arena::MAX_DEVICES;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The devices that `--gpu` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSpec {
    /// `soft` or `soft:N`: software devices; with `:apart` behind that, managed memory is kept in
    /// theirs, and they see the host's pages no more than a GPU does.
    Soft { devices: u32, apart: bool },
    /// `local` or `local:I,J…`: this machine's GPUs, all or those that the driver counts so.
    Local { ordinals: Vec<u32> },
    /// `HOST[:PORT][/I,J…]`: devices of a server (`kedge serve`), all or those of these numbers.
    Remote { server: Server, devices: Vec<u32> },
    /// Devices of several of these, between commas.
    Several(Several),
}

/// Where `kedge serve` listens unless it is told otherwise.
pub const DEFAULT_PORT: u16 = 7531;

/// A server of devices: a name or an address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
}

/// Why a text names no devices.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadGpuSpec {
    #[error(
        "`{0}` names no devices: give soft, soft:N with N from 1 to {MAX_DEVICES}, soft:apart, \
         local, local:I,J… with the GPUs' numbers, or HOST[:PORT][/I,J…] of a machine that runs \
         `kedge serve`; or several of these, between commas"
    )]
    Unknown(String),
    #[error(
        "`{0}` is one of several places, and does not say which of its devices: give them by \
         number, as in gpu7/0,1 or local:0"
    )]
    Unnumbered(String),
    #[error("`{0}` is named twice in a list of devices: name each device once")]
    Twice(String),
    #[error("a list names {0} devices, and a job has {MAX_DEVICES} at most: leave some out")]
    TooMany(usize),
    #[error(
        "`{0}` is one of several places, where managed memory apart is not supported: give soft:N"
    )]
    Apart(String),
}

impl GpuSpec {
    /// Returns the GPUs that the driver is to show, as `CUDA_VISIBLE_DEVICES` lists them; `None`
    /// where that is all of them.
    pub fn shown(&self) -> Option<String> {
        let ordinals = match self {
            GpuSpec::Local { ordinals } => ordinals,
            GpuSpec::Several(several) => {
                return several.places().iter().find_map(|place| place.spec.shown());
            }
            _ => return None,
        };
        let list: Vec<String> = ordinals.iter().map(u32::to_string).collect();
        (!list.is_empty()).then(|| list.join(","))
    }

    /// Returns the places that it names: itself, where it is one.
    pub fn places(&self) -> Vec<GpuSpec> {
        match self {
            GpuSpec::Several(several) => several.places().into_iter().map(|p| p.spec).collect(),
            one => vec![one.clone()],
        }
    }

    /// Returns whether any of the devices are software devices of this machine.
    pub fn has_soft(&self) -> bool {
        self.places().iter().any(|place| matches!(place, GpuSpec::Soft { .. }))
    }

    /// Returns that devices of several places with a GPU of this machine among them cannot have
    /// `what`: a GPU's stream waits for no other place, so that they are never at rest together.
    pub fn refuse_gpu_among(&self, what: &str) -> Option<String> {
        let several = matches!(self, GpuSpec::Several(_));
        let gpu = self.places().into_iter().find(|one| matches!(one, GpuSpec::Local { .. }));
        gpu.filter(|_| several).map(|gpu| {
            format!(
                "{what} is not supported as yet for devices of several places with a GPU among \
                 them ({gpu} of --gpu {self}): give software devices, or devices of one place, or \
                 do without"
            )
        })
    }

    /// Returns what a list of several places cannot have: `what`, by name, and what mends it.
    pub fn refuse_several(&self, what: &str) -> Option<String> {
        matches!(self, GpuSpec::Several(_)).then(|| {
            format!(
                "{what} is not supported as yet for devices of several places (--gpu {self}): give \
                 devices of one place, or do without"
            )
        })
    }
}

impl FromStr for GpuSpec {
    type Err = BadGpuSpec;
    fn from_str(text: &str) -> Result<GpuSpec, BadGpuSpec> {
        let items = Several::items(text);
        match &items[..] {
            [one] => simple(one).ok_or_else(|| BadGpuSpec::Unknown(text.to_owned())),
            _ => Several::of(text, &items),
        }
    }
}

/// Reads devices of one place.
fn simple(text: &str) -> Option<GpuSpec> {
    match text.split_once(':') {
        None if text == "soft" => soft("1"),
        None if text == "local" => Some(GpuSpec::Local { ordinals: Vec::new() }),
        Some(("soft", count)) => soft(count),
        Some(("local", list)) => local(list),
        _ => remote(text),
    }
}

fn soft(count: &str) -> Option<GpuSpec> {
    let (count, apart) = match count.strip_suffix("apart") {
        Some("") => ("1", true),
        Some(count) => (count.strip_suffix(':')?, true),
        None => (count, false),
    };
    let devices = count.parse().ok().filter(|n| (1..=MAX_DEVICES).contains(n))?;
    Some(GpuSpec::Soft { devices, apart })
}

fn local(list: &str) -> Option<GpuSpec> {
    Some(GpuSpec::Local { ordinals: numbers(list)? })
}

fn remote(text: &str) -> Option<GpuSpec> {
    let (server, devices) = match text.split_once('/') {
        Some((server, list)) => (server, numbers(list)?),
        None => (text, Vec::new()),
    };
    Some(GpuSpec::Remote { server: server.parse().ok()?, devices })
}

/// Numbers between commas, each once.
fn numbers(list: &str) -> Option<Vec<u32>> {
    let numbers: Vec<u32> = list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
    let once = numbers.iter().enumerate().all(|(at, n)| !numbers[..at].contains(n));
    (once && numbers.len() <= MAX_DEVICES as usize).then_some(numbers)
}

impl FromStr for Server {
    type Err = BadGpuSpec;
    /// Reads `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`.
    fn from_str(text: &str) -> Result<Server, BadGpuSpec> {
        let bad = || BadGpuSpec::Unknown(text.to_owned());
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, "")) => (address, None),
            Some((address, port)) => (address, Some(port.strip_prefix(':').ok_or_else(bad)?)),
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = port.map_or(Ok(DEFAULT_PORT), str::parse).map_err(|_| bad())?;
        let valid = match text.starts_with('[') {
            true => host.parse::<std::net::Ipv6Addr>().is_ok(),
            false => {
                host.starts_with(|c: char| c.is_ascii_alphanumeric())
                    && host.bytes().all(|c| c.is_ascii_alphanumeric() || b"-._".contains(&c))
            }
        };
        if port == 0 || !valid {
            return Err(bad());
        }
        Ok(Server { host: host.to_owned(), port })
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for GpuSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuSpec::Soft { devices: 1, apart: false } => write!(f, "soft"),
            GpuSpec::Soft { devices: 1, apart: true } => write!(f, "soft:apart"),
            GpuSpec::Soft { devices, apart: false } => write!(f, "soft:{devices}"),
            GpuSpec::Soft { devices, apart: true } => write!(f, "soft:{devices}:apart"),
            GpuSpec::Local { ordinals } => {
                write!(f, "local")?;
                list(f, ':', ordinals)
            }
            GpuSpec::Remote { server, devices } => {
                write!(f, "{server}")?;
                list(f, '/', devices)
            }
            GpuSpec::Several(several) => several.fmt(f),
        }
    }
}

/// Numbers between commas, behind `begin`; nothing if there are none.
fn list(f: &mut fmt::Formatter<'_>, begin: char, numbers: &[u32]) -> fmt::Result {
    let mut numbers = numbers.iter().enumerate();
    numbers.try_for_each(|(at, number)| write!(f, "{}{number}", if at == 0 { begin } else { ',' }))
}

/// Returns half of the machine's memory, or of our cgroup's limit, shared among `devices`; whole
/// 256 MiB, and at least one of them.
pub fn default_memory(devices: u32) -> u64 {
    const STEP: u64 = 256 << 20;
    let machine = read_number("/proc/meminfo", "MemTotal:").map(|kib| kib << 10);
    let cgroup = read_number("/sys/fs/cgroup/memory.max", "");
    let available = machine.into_iter().chain(cgroup).min().unwrap_or(8 << 30);
    (available / 2 / u64::from(devices.max(1)) / STEP * STEP).max(STEP)
}

/// Returns the number that follows `key` at the start of a line of `path`.
pub fn read_number(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_this_machine_are_refused_among_several_places_alone() {
        let refused = |text: &str| text.parse::<GpuSpec>().unwrap().refuse_gpu_among("--recover");
        for text in ["local:0", "soft", "a/0,b/0", "a/0,soft:2"] {
            assert_eq!(refused(text), None, "{text}");
        }
        let said = refused("a/0,local:1").unwrap();
        assert!(said.contains("local:1 of --gpu a:7531/0,local:1"), "{said}");
    }

    #[test]
    fn specs_read_as_people_write_them() {
        assert_eq!("soft".parse(), Ok(GpuSpec::Soft { devices: 1, apart: false }));
        assert_eq!("soft:4".parse(), Ok(GpuSpec::Soft { devices: 4, apart: false }));
        assert_eq!("soft:1:apart".parse(), Ok(GpuSpec::Soft { devices: 1, apart: true }));
        assert_eq!("local".parse(), Ok(GpuSpec::Local { ordinals: vec![] }));
        assert_eq!("local:2,0".parse(), Ok(GpuSpec::Local { ordinals: vec![2, 0] }));
        for text in
            ["soft", "soft:2", "soft:apart", "soft:3:apart", "local", "local:1", "local:3,1"]
        {
            assert_eq!(text.parse::<GpuSpec>().unwrap().to_string(), text);
        }
        for text in ["gpu7:7531", "10.0.0.1:80/0", "a.b-c:1/3,1", "[::1]:7531/2"] {
            assert_eq!(text.parse::<GpuSpec>().unwrap().to_string(), text);
        }
        for (short, text) in
            [("gpu7", "gpu7:7531"), ("gpu7/1", "gpu7:7531/1"), ("[::1]", "[::1]:7531")]
        {
            assert_eq!(short.parse::<GpuSpec>().unwrap().to_string(), text);
        }
        let bad = [
            "",
            "soft:",
            "soft:2apart",
            "soft::apart",
            "soft:0",
            "soft:17",
            "soft:x",
            "soft:1:2",
            "soft:-1",
        ];
        let bad = bad.into_iter().chain(["local:", "local:1,", "local:1,1", "local:x"]);
        let remote =
            ["a:", "a:0", "a:65536", "a/", "a/x", "a/1,1", "a b", "-a", "::1", "[a]:1", "[::1]1"];
        for bad in bad.chain(remote) {
            assert!(bad.parse::<GpuSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_driver_shows_those_that_are_named() {
        let shown = |text: &str| text.parse::<GpuSpec>().unwrap().shown();
        assert_eq!(shown("local:3,1").as_deref(), Some("3,1"));
        assert_eq!((shown("local"), shown("soft:2")), (None, None));
    }

    #[test]
    fn default_memory_is_shared_out() {
        assert!(default_memory(1) >= 2 * default_memory(4));
        assert_eq!(default_memory(1) % (256 << 20), 0);
    }
}
