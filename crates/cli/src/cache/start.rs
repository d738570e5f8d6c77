//! `kedge cache start`.

use crate::Failure;
use crate::output;
use crate::readiness;
use clap::{Args, ValueEnum};
use kedge_cache::daemon;
use kedge_cache::spec::{self, DeviceSpec, Fsync, Medium, PartnerAddress, Spec, TierSpec};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_supervisor::Parts;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;

pub(super) const START_HELP: &str = "\
close returns when:
  drain    the file system below has the data: programs of other nodes that open the file after it
           see all of it
  memory   the cache has it: other nodes see it later, as `kedge cache drain` says

fsync returns when:
  drain    the file system below has the data, on its disks
  nvme     a local disk has it: it survives a reboot of this node
  partner  another node has it, on its disk: it survives the loss of this node
  memory   the cache has it: it survives the program, and the daemon

While the partner cannot be reached, is full or too slow, fsync drains.

A write is acknowledged when it is in a tier, and when the file system below has free space for \
it. Where no tier can take it, it waits its turn; where space below is short, or draining fails, \
it goes below at once. A file that cannot be drained stays in its tier: the next write of each \
descriptor, fsync and close tell why.";

/// The tier in host memory before a device's, where none is named.
const STAGING: u64 = 64 << 20;

#[derive(Debug, Args)]
pub(super) struct StartArgs {
    /// What holds the writes: ram:SIZE, nvme:DIR:SIZE for a folder on a local disk; several are
    /// filled in this order. gpu:SIZE is memory of a device behind that in ram (64M where none is
    /// named) [default: ram, a quarter of this machine's memory]
    #[arg(long, value_name = "TIER")]
    tier: Vec<Tier>,
    /// The device of the tier gpu:SIZE: local:N, or soft for a software device, for tests
    #[arg(long, value_name = "GPU", default_value = "local:0")]
    gpu: GpuSpec,
    /// The folder whose writes are absorbed
    #[arg(long, value_name = "DIR")]
    under: PathBuf,
    /// What has the data when fsync returns
    #[arg(long, value_enum, default_value_t = Policy::Drain)]
    fsync: Policy,
    /// The node that has what fsync acknowledges, where `kedge cache partner` runs; with `--fsync
    /// partner`
    #[arg(long, value_name = "HOST[:PORT]")]
    partner: Option<String>,
    /// What has the data when close returns
    #[arg(long, value_enum, default_value_t = Close::Drain)]
    close: Close,
    /// Threads that write below
    #[arg(long, value_name = "N", default_value_t = 2)]
    drain_threads: usize,
    /// What the files of one user may take of all tiers [default: all]
    #[arg(long, value_name = "SIZE")]
    per_user: Option<Size>,
    /// Memory of this machine that stays free: the tier in memory shrinks for it
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    host_free: Size,
    /// Memory of the device that stays free for other programs
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    gpu_free: Size,
    /// Have the kernel gather small writes before the cache has them: as fast as its page cache,
    /// but lost with a killed daemon until fsync, close or some seconds
    #[arg(long)]
    gather: bool,
    /// Stay in the foreground
    #[arg(long)]
    foreground: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Policy {
    Drain,
    Nvme,
    Partner,
    Memory,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Close {
    Drain,
    Memory,
}

/// A tier as it is written on the command line.
#[derive(Debug, Clone, PartialEq)]
struct Tier(TierSpec);

impl FromStr for Tier {
    type Err = String;
    fn from_str(text: &str) -> Result<Tier, String> {
        let bad = || format!("`{text}` is no tier: write ram:8G, nvme:/local:200G or gpu:20G");
        let (medium, rest) = text.split_once(':').ok_or_else(bad)?;
        let size = |text: &str| text.parse::<Size>().map_err(|error| error.to_string());
        match medium {
            "ram" => Ok(Tier(TierSpec::ram(size(rest)?.0))),
            "gpu" => Ok(Tier(TierSpec::gpu(size(rest)?.0))),
            "nvme" => {
                let (folder, bytes) = rest.rsplit_once(':').ok_or_else(bad)?;
                let folder = std::path::absolute(folder).map_err(|error| error.to_string())?;
                Ok(Tier(TierSpec::nvme(folder, size(bytes)?.0)))
            }
            _ => Err(bad()),
        }
    }
}

pub(super) fn start(args: &StartArgs) -> Result<(), Failure> {
    let spec = spec_of(args)?;
    spec.check()?;
    if !args.foreground && spec.device.is_some() && args.gpu.has_soft() {
        output::complain(
            "a software device's memory is this machine's own: a tier for tests alone",
        );
    }
    if args.foreground {
        // From here on all paths are full ones, and the daemon keeps no folder busy.
        std::env::set_current_dir("/")?;
        let under = spec.under.clone();
        daemon::serve(spec, || {
            // Whoever started it may read that, or not.
            let _ = writeln!(std::io::stdout(), "ready");
            readiness::ready(&format!("{} is cached", under.display()));
        })?;
        return Ok(());
    }
    let (mut log, under) = (daemon::log_file(&spec.under)?, spec.under.clone());
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--foreground");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone()?);
    readiness::is_no_service(&mut command);
    // A terminal that is closed, or Ctrl-C there, is none of the daemon's business.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn()?;
    let mut line = String::new();
    if let Some(said) = child.stdout.take() {
        BufReader::new(said).read_line(&mut line)?;
    }
    if line.trim() == "ready" {
        output::tell(&format!("{} is cached", under.display()));
        return Ok(());
    }
    child.wait()?;
    // Its file may be gone: a cache that never was leaves nothing.
    let mut said = String::new();
    log.rewind()?;
    log.read_to_string(&mut said)?;
    let said = said.trim().strip_prefix("kedge: ").unwrap_or(said.trim()).to_owned();
    Err(Failure::new(if said.is_empty() {
        "the cache's daemon ended at once".into()
    } else {
        said
    }))
}

fn spec_of(args: &StartArgs) -> Result<Spec, Failure> {
    let mut tiers: Vec<TierSpec> = args.tier.iter().map(|tier| tier.0.clone()).collect();
    if tiers.is_empty() {
        let info = rustix::system::sysinfo();
        let all = info.totalram * u64::from(info.mem_unit);
        tiers.push(TierSpec::ram(all / 4));
    }
    let has = |medium| tiers.iter().any(|tier| tier.medium == medium);
    let device = if has(Medium::Gpu) { Some(device_of(&args.gpu, args.gpu_free)?) } else { None };
    if device.is_some() && !has(Medium::Ram) {
        tiers.insert(0, TierSpec::ram(STAGING));
    }
    Ok(Spec {
        under: spec::full_path(&args.under)?,
        tiers,
        fsync: match args.fsync {
            Policy::Drain => Fsync::Drain,
            Policy::Nvme => Fsync::Nvme,
            Policy::Partner => Fsync::Partner,
            Policy::Memory => Fsync::Memory,
        },
        close_drains: args.close == Close::Drain,
        drain_threads: args.drain_threads,
        per_user: args.per_user.map(|size| size.0),
        host_free: args.host_free.0,
        kernel_gathers: args.gather,
        device,
        partner: args.partner.clone().map(PartnerAddress),
    })
}

/// Returns the device of a tier of its memory.
fn device_of(gpu: &GpuSpec, keep: Size) -> Result<DeviceSpec, Failure> {
    let one = match gpu {
        GpuSpec::Soft { devices: 1, apart: false } => true,
        GpuSpec::Local { ordinals } => ordinals.len() == 1,
        _ => false,
    };
    if !one {
        return Err(Failure::new(format!(
            "a tier is memory of one device of this machine, and --gpu says {gpu}: give local:N"
        )));
    }
    let program = Parts::find().map_err(|error| Failure::new(error.to_string()))?.proxy;
    Ok(DeviceSpec { gpu: gpu.to_string(), program, keep: keep.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_read_as_people_write_them() {
        assert_eq!("ram:8G".parse(), Ok(Tier(TierSpec::ram(8 << 30))));
        let disk = TierSpec::nvme("/a:b".into(), 200 << 30);
        assert_eq!("nvme:/a:b:200G".parse(), Ok(Tier(disk)));
        assert_eq!("gpu:20G".parse(), Ok(Tier(TierSpec::gpu(20 << 30))));
        for bad in ["", "ram", "ram:", "ram:x", "nvme:8G", "gpu", "gpu:0:20G"] {
            assert!(bad.parse::<Tier>().is_err(), "{bad}");
        }
    }
}
