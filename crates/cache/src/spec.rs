//! What a cache is asked to be.

use crate::CacheError;
use crate::extents::TIERS;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Smallest tier, in bytes.
const MIN_TIER_SIZE: u64 = 8 << 20;
/// Where the memory of tiers lies, and every daemon's socket: a file system in memory.
const MEMORY: &str = "/dev/shm";

/// What a tier is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// Host memory: survives the program and the daemon.
    Ram,
    /// A local disk: survives a reboot, too.
    Nvme,
    /// A device's memory, behind host memory: survives the program and the daemon, and not the
    /// process that holds it.
    Gpu,
}

impl Medium {
    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Medium::Ram => "ram",
            Medium::Nvme => "nvme",
            Medium::Gpu => "gpu",
        }
    }
}

/// A tier: what of, where and how much.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierSpec {
    /// What it is made of.
    pub medium: Medium,
    /// The folder that it may use.
    pub folder: PathBuf,
    /// Bytes that it may hold.
    pub bytes: u64,
}

impl TierSpec {
    /// Makes a tier of host memory.
    pub fn ram(bytes: u64) -> TierSpec {
        TierSpec { medium: Medium::Ram, folder: MEMORY.into(), bytes }
    }

    /// Makes a tier of a folder on a local disk.
    pub fn nvme(folder: PathBuf, bytes: u64) -> TierSpec {
        TierSpec { medium: Medium::Nvme, folder, bytes }
    }

    /// Makes a tier of a device's memory.
    pub fn gpu(bytes: u64) -> TierSpec {
        TierSpec { medium: Medium::Gpu, folder: MEMORY.into(), bytes }
    }

    /// Returns whether another one is the same tier, of whatever size.
    pub(crate) fn is_same(&self, other: &TierSpec) -> bool {
        let device = |tier: &TierSpec| tier.medium == Medium::Gpu;
        device(self) == device(other) && (device(self) || self.folder == other.folder)
    }
}

/// The device whose memory is a tier, and what holds that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// Which: `local:0`, or `soft` for a software device.
    pub gpu: String,
    /// The program that holds its memory: kedge's proxy.
    pub program: PathBuf,
    /// Bytes of the device that stay free for other programs.
    #[serde(default)]
    pub keep: u64,
}

/// What has the data when fsync returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fsync {
    /// The file system below.
    Drain,
    /// A local disk: survives a reboot of this node.
    Nvme,
    /// Another node: survives the loss of this one.
    Partner,
    /// The cache: survives the program and the daemon.
    Memory,
}

/// The port of a partner where none is named.
pub const PARTNER_PORT: u16 = 7541;

/// Where a partner listens: a host, and a port if it is not the usual one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartnerAddress(pub String);

impl PartnerAddress {
    /// Returns it as it is connected to.
    pub(crate) fn socket(&self) -> String {
        let text = &self.0;
        let has_port = match text.rsplit_once(':') {
            // Colons within brackets, and several of them without, are those of an IPv6 address.
            Some((host, port)) => {
                port.parse::<u16>().is_ok() && (host.ends_with(']') || !host.contains(':'))
            }
            None => false,
        };
        match has_port {
            true => text.clone(),
            false if text.contains(':') && !text.starts_with('[') => {
                format!("[{text}]:{PARTNER_PORT}")
            }
            false => format!("{text}:{PARTNER_PORT}"),
        }
    }
}

/// What a cache is asked to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The folder whose writes are absorbed, as a full path.
    pub under: PathBuf,
    /// In the order in which they are filled.
    pub tiers: Vec<TierSpec>,
    /// What has the data when fsync returns.
    pub fsync: Fsync,
    /// Whether close returns when the file system below has the data.
    pub close_drains: bool,
    /// Threads that write below.
    pub drain_threads: usize,
    /// What the files of one user may take of all tiers.
    pub per_user: Option<u64>,
    /// Memory of the host that stays free.
    pub host_free: u64,
    /// Whether small writes are gathered by the kernel before the cache has them.
    pub kernel_gathers: bool,
    /// The device of a tier of its memory.
    #[serde(default)]
    pub device: Option<DeviceSpec>,
    /// The node that has what an fsync acknowledges.
    #[serde(default)]
    pub partner: Option<PartnerAddress>,
}

impl Spec {
    /// Checks that the tiers make sense together.
    ///
    /// # Errors
    /// One that says which tier is wrong, and why.
    pub fn check(&self) -> Result<(), CacheError> {
        let wrong = |why: String| Err(CacheError::Tier(why));
        if self.tiers.is_empty() {
            return wrong(format!("a cache has 1 to {TIERS} tiers: --tier ram:8G"));
        }
        self.check_count()?;
        for (index, tier) in self.tiers.iter().enumerate() {
            let name = tier.medium.name();
            if tier.bytes < MIN_TIER_SIZE {
                return wrong(format!(
                    "a tier of {} bytes is too small: {name}:8M at least",
                    tier.bytes
                ));
            }
            if self.tiers[..index].iter().any(|other| other.is_same(tier)) {
                if tier.medium == Medium::Gpu {
                    return wrong("a cache has one tier of device memory".into());
                }
                return wrong(format!("two tiers use {}", tier.folder.display()));
            }
            if tier.folder.starts_with(&self.under) {
                return wrong(format!(
                    "{} lies in the folder that is cached",
                    tier.folder.display()
                ));
            }
        }
        let has = |medium| self.tiers.iter().any(|tier| tier.medium == medium);
        if has(Medium::Gpu) && !has(Medium::Ram) {
            return wrong("device memory lies behind host memory: --tier ram:64M as well".into());
        }
        if has(Medium::Gpu) && self.device.is_none() {
            return wrong("the tier of device memory names no device".into());
        }
        if (self.fsync == Fsync::Partner) != self.partner.is_some() {
            return wrong("--fsync partner and --partner HOST belong together".into());
        }
        if has(Medium::Gpu) && self.partner.is_some() {
            return wrong("a partner and a tier of device memory do not go together".into());
        }
        if self.fsync == Fsync::Nvme && !has(Medium::Nvme) {
            return wrong(
                "--fsync nvme needs a tier on a local disk: --tier nvme:/local:200G".into(),
            );
        }
        Ok(())
    }

    /// Checks that the cache has no more tiers than it can.
    pub(crate) fn check_count(&self) -> Result<(), CacheError> {
        if self.tiers.len() <= TIERS {
            return Ok(());
        }
        Err(CacheError::Tier(format!(
            "a cache has {TIERS} tiers at most, with those that a killed one left (`kedge cache \
             recover` empties these)"
        )))
    }
}

/// Returns the folder in which a cache of `under` keeps its things, inside of `folder`.
pub fn home_in(folder: &Path, under: &Path) -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let text = under.as_os_str().as_encoded_bytes();
    let last = under.file_name().map(|name| name.to_string_lossy().into_owned());
    let last: String =
        last.unwrap_or_default().chars().filter(char::is_ascii_alphanumeric).collect();
    let short = &last[..last.len().min(16)];
    folder.join(format!("kedge-cache-{user}")).join(format!("{short}-{:016x}", xxh3_64(text)))
}

/// Returns the folder of the socket and of the memory of a cache of `under`.
pub fn memory_home(under: &Path) -> PathBuf {
    home_in(Path::new(MEMORY), under)
}

/// Returns `under` as the full path by which its cache is known.
///
/// # Errors
/// If there is no such folder. That a killed daemon's mount is over it does not matter.
pub fn full_path(under: &Path) -> Result<PathBuf, CacheError> {
    let failed = |source| CacheError::io("cannot find", under, source);
    let absolute = std::path::absolute(under).map_err(failed)?;
    let Some(name) = absolute.file_name() else {
        return Err(CacheError::Tier("the root folder cannot be cached".into()));
    };
    let parent = absolute.parent().unwrap_or(Path::new("/")).canonicalize().map_err(failed)?;
    let full = parent.join(name);
    match full.canonicalize() {
        Ok(full) => Ok(full),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(failed(error)),
        Err(_) => Ok(full),
    }
}
