//! `kedge cache`.

use crate::Failure;
use crate::output::{self, BAD, DIM, PLAIN, Table};
use crate::readiness;
use crate::size::Size;
use clap::{Args, Subcommand, ValueEnum};
use kedge_cache::control::{self, Answer, Ask, DeviceStatus, Status};
use kedge_cache::daemon::{self, Discard};
use kedge_cache::partner::{self, Partner, PartnerSpec, PartnerStatus};
use kedge_cache::spec::{self, DeviceSpec, Fsync, Medium, PartnerAddress, Spec, TierSpec};
use kedge_control::gpu::GpuSpec;
use kedge_keys::Keys;
use kedge_supervisor::Parts;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

const AFTER_HELP: &str = "\
What programs write below the folder goes into spare memory, or to a local disk, and from there \
to the file system below while they compute. The folder's path stays the same, and so do the \
programs:
the cache is mounted over it. Other nodes see a file's new bytes once they are drained.

Examples:
  kedge cache start --tier ram:8G --under /scratch
  kedge cache start --tier ram:8G --tier nvme:/local:200G --fsync nvme --under /scratch
  kedge cache start --tier gpu:20G --under /scratch
  kedge cache status                       of each of yours
  kedge cache drain --under /scratch       wait until other nodes have everything
  kedge cache stop --under /scratch        drain, unmount and end
  kedge cache recover --under /scratch     after the daemon was killed

With another node that has what fsync acknowledges, so that it survives the loss of this one:
  node2$ kedge cache partner --listen 0.0.0.0:7541 --dir /local/partner:200G
  node1$ kedge cache start --partner node2 --fsync partner --under /scratch
  node2$ kedge cache recover --partner /local/partner/KEY/node1 --under /scratch";

const START_HELP: &str = "\
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

/// Absorb the writes of programs in spare memory
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Start to cache a folder, and go on with what a killed daemon left
    #[command(after_help = START_HELP)]
    Start(StartArgs),
    /// Tell what the cache of a folder holds, or each of yours
    Status(StatusArgs),
    /// Write below all that the cache holds, and wait for it
    Drain(FolderArgs),
    /// Drain, unmount and end
    Stop(StopArgs),
    /// Keep what the caches of other nodes send, for `kedge cache recover` here
    Partner(PartnerArgs),
    /// Write below what a killed daemon held, without starting another
    Recover(RecoverArgs),
}

#[derive(Debug, Args)]
struct StartArgs {
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

#[derive(Debug, Args)]
struct StatusArgs {
    /// The folder that is cached [default: each of yours]
    #[arg(long, value_name = "DIR")]
    under: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder that is cached
    #[arg(long, value_name = "DIR")]
    under: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct StopArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// End also if not all can be drained: that stays in its tier for `kedge cache recover`
    #[arg(long)]
    leave: bool,
}

#[derive(Debug, Args)]
struct PartnerArgs {
    /// Where to listen; other machines need a key that is pinned here. With port 0, on a free port,
    /// which is told
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = partner_address())]
    listen: SocketAddr,
    /// The folder for what is sent, and how much each key may have of it
    #[arg(long, value_name = "DIR[:SIZE]")]
    dir: Kept,
}

fn partner_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, spec::PARTNER_PORT).into()
}

/// A partner's folder as it is written on the command line.
#[derive(Debug, Clone, PartialEq)]
struct Kept {
    folder: PathBuf,
    quota: Option<u64>,
}

impl FromStr for Kept {
    type Err = String;
    fn from_str(text: &str) -> Result<Kept, String> {
        let sized = text.rsplit_once(':').and_then(|(folder, size)| {
            let size: Size = size.parse().ok()?;
            Some((folder, size.0))
        });
        let (folder, quota) = match sized {
            Some((folder, size)) => (folder, Some(size)),
            None => (text, None),
        };
        let folder = std::path::absolute(folder).map_err(|error| error.to_string())?;
        Ok(Kept { folder, quota })
    }
}

#[derive(Debug, Args)]
struct RecoverArgs {
    /// The folder that was cached
    #[arg(long, value_name = "DIR")]
    under: PathBuf,
    /// The folder of a tier on a local disk; needed after a reboot
    #[arg(long, value_name = "DIR")]
    disk: Vec<PathBuf>,
    /// Recover what this node, as a partner, has of another one's cache: the folder of its key and
    /// node, DIR/KEY/NODE
    #[arg(long, value_name = "DIR", conflicts_with = "disk")]
    partner: Option<PathBuf>,
    /// Give up data whose file is not below any more, once all the rest is written; with `=all`
    /// also that of files which cannot be found, opened or written, or whose tier lacks a part
    #[arg(long, value_enum, value_name = "WHAT", num_args = 0..=1, require_equals = true,
        default_missing_value = "gone")]
    discard: Option<GiveUp>,
    /// Print JSON
    #[arg(long)]
    json: bool,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GiveUp {
    Gone,
    All,
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

pub(crate) fn run(args: &CacheArgs) -> Result<(), Failure> {
    match &args.what {
        What::Start(args) => start(args),
        What::Status(args) => status(args),
        What::Drain(args) => order(args, Ask::Drain, "drained"),
        What::Stop(args) => {
            order(&args.folder, if args.leave { Ask::Leave } else { Ask::Stop }, "stopped")
        }
        What::Partner(args) => keep_for_others(args),
        What::Recover(args) => recover(args),
    }
}

fn start(args: &StartArgs) -> Result<(), Failure> {
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

/// Keeps what other nodes' caches send, until the process ends.
fn keep_for_others(args: &PartnerArgs) -> Result<(), Failure> {
    let (listen, Kept { folder, quota }) = (args.listen, args.dir.clone());
    let keys = if listen.ip().is_loopback() { None } else { Some(Keys::of_user()?) };
    let partner = Partner::bind(PartnerSpec { listen, folder, quota, keys })?;
    let text = format!("what caches send to {} is kept", partner.address()?);
    readiness::ready(&text);
    partner::say(&text);
    partner.serve(partner::say);
    Ok(())
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

fn ask(under: &Path, what: Ask) -> Result<Answer, Failure> {
    Ok(control::ask(&spec::full_path(under)?, what)?)
}

fn order(args: &FolderArgs, what: Ask, done: &str) -> Result<(), Failure> {
    let left = match ask(&args.under, what)? {
        Answer::Left(left) if what == Ask::Leave => Some(left),
        Answer::Left(left) => return Err(Failure::new(left)),
        _ => None,
    };
    match args.json {
        true => output::json(&serde_json::json!({ done: true, "left": left }))?,
        false => {
            output::tell(done);
            if let Some(left) = left {
                output::tell(&output::harmless(&left));
            }
        }
    }
    Ok(())
}

fn status(args: &StatusArgs) -> Result<(), Failure> {
    let Some(under) = &args.under else { return status_of_all(args.json) };
    let Answer::Status(status) = ask(under, Ask::Status)? else {
        return Err(Failure::new("the daemon did not answer the question"));
    };
    if args.json {
        output::json(&status)?;
    } else {
        output::print(&told(&status))?;
    }
    Ok(())
}

/// Tells how each of the user's caches stands. One that cannot be asked fails the command, once the
/// others are told.
fn status_of_all(json: bool) -> Result<(), Failure> {
    let (mut told_of, mut failed) = (Vec::new(), Vec::new());
    for one in control::all() {
        match one {
            Ok(status) => told_of.push(status),
            Err(error) => failed.push(error.to_string()),
        }
    }
    if json {
        output::json(&told_of)?;
    } else {
        for status in &told_of {
            let under = output::harmless(&status.under.display().to_string());
            output::print(&format!("{under}\n{}\n", told(status)))?;
        }
        if told_of.is_empty() && failed.is_empty() {
            output::tell("you have no cache on this machine: `kedge cache start` starts one");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("; "))) }
}

/// How a cache stands, for people.
fn told(status: &Status) -> String {
    let mut table = Table::new(&["TIER", "HOLDS", "OF", "WHERE"], &[1, 2]);
    for tier in &status.tiers {
        table.row([
            (PLAIN, tier.medium.name().to_owned()),
            (PLAIN, Size(tier.used).to_string()),
            (PLAIN, Size(tier.limit).to_string()),
            (DIM, tier.folder.display().to_string()),
        ]);
    }
    let mut text = table.render();
    text += &format!(
        "to drain    {} of {} files\nabsorbed    {}\ndrained     {}\nwritten through  {}\n",
        Size(status.dirty),
        status.files,
        Size(status.absorbed),
        Size(status.drained),
        Size(status.through)
    );
    if status.moved > 0 {
        text += &format!("to devices  {}, {} back\n", Size(status.moved), Size(status.back));
    }
    if let Some(device) = &status.device {
        text += &told_of_device(device);
    }
    if let Some(partner) = &status.partner {
        text += &told_of_partner(partner);
    }
    if status.waited > 0 {
        text += &format!("waits       {} writes, {} now\n", status.waited, status.waiting);
    }
    if status.below > 0 {
        text += &format!("wait below  {} requests\n", status.below);
    }
    for stuck in &status.stuck {
        let line = format!("{} ({}): {}", stuck.path, Size(stuck.bytes), stuck.why);
        text += &format!("{}\n", output::styled(BAD, &output::harmless(&line)));
    }
    let more = status.stuck_files.saturating_sub(status.stuck.len() as u64);
    if more > 0 {
        text += &format!("and {more} more files\n");
    }
    text
}

fn told_of_partner(partner: &PartnerStatus) -> String {
    let address = output::harmless(&partner.address);
    let mut text = match partner.connected {
        true => format!("partner     {address} holds {}\n", Size(partner.holds)),
        false => {
            let line = format!("partner     {address} is not there: fsync drains");
            format!("{}\n", output::styled(BAD, &line))
        }
    };
    if partner.drained > 0 {
        text += &format!("            {} fsyncs drained instead\n", partner.drained);
    }
    if let Some(why) = &partner.why {
        text += &format!("            {}\n", output::harmless(why));
    }
    text
}

fn told_of_device(device: &DeviceStatus) -> String {
    let mut text = String::new();
    if device.gone {
        text += "device      its holder has ended\n";
    } else if let Some(free) = device.free {
        text += &format!("device      {} free, {} to stay so\n", Size(free), Size(device.keep));
    }
    if device.wanted > 0 {
        text += &format!("programs    wait for {} of the device\n", Size(device.wanted));
    }
    if device.late > 0 {
        text += &format!("unanswered  {} orders to the device's holder\n", device.late);
    }
    text
}

fn recover(args: &RecoverArgs) -> Result<(), Failure> {
    let disks: Result<Vec<_>, _> = args.disk.iter().map(std::path::absolute).collect();
    let discard = args.discard.map(|what| match what {
        GiveUp::Gone => Discard::Gone,
        GiveUp::All => Discard::All,
    });
    let under = spec::full_path(&args.under)?;
    let recovered = match &args.partner {
        Some(folder) => daemon::recover_partner(&under, &std::path::absolute(folder)?, discard)?,
        None => daemon::recover(&under, &disks?, discard)?,
    };
    if let Some(why) = &recovered.at_partner {
        output::complain(&output::harmless(why));
    }
    if args.json {
        output::json(&recovered)?;
    } else {
        let (bytes, files) = (Size(recovered.bytes), recovered.files);
        output::print(&format!("{bytes} of {files} files were written below\n"))?;
        for gone in &recovered.discarded {
            let (path, bytes) = (output::harmless(&gone.path), Size(gone.bytes));
            output::print(&format!("{bytes} of {path} were given up\n"))?;
        }
    }
    if let Some(first) = recovered.lost.first() {
        return Err(Failure::new(format!(
            "a device has lost data of {} files: {}: {} {}",
            recovered.lost.len(),
            output::harmless(&first.path),
            Size(first.bytes),
            first.why
        )));
    }
    if let Some(first) = recovered.stuck.first() {
        return Err(Failure::new(format!(
            "{} files could not be written below: {}: {}",
            recovered.stuck.len(),
            output::harmless(&first.path),
            first.why
        )));
    }
    // What was to be given up is.
    if recovered.at_partner.is_some() && discard != Some(Discard::All) {
        return Err(Failure::new(
            "all is below, and its partner does not know it (`--discard=all` gives that up)",
        ));
    }
    Ok(())
}

/// A folder that is cached while a program runs.
#[derive(Debug)]
pub(crate) struct ForProgram {
    under: PathBuf,
    /// Whether its cache was started for the program, and ends with it.
    own: bool,
}

impl ForProgram {
    /// Starts a cache of `folder`, if none runs there; close does not wait for the drain then, as
    /// the end of the program does.
    pub(crate) fn begin(folder: &Path) -> Result<ForProgram, Failure> {
        let under = spec::full_path(folder)?;
        let own = control::ask(&under, Ask::Status).is_err();
        if own {
            let mut start = Command::new(std::env::current_exe()?);
            start.args(["cache", "start", "--close", "memory", "--under"]).arg(&under);
            // What it says is none of the program's output.
            let output = start.stdin(Stdio::null()).output()?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.trim().trim_start_matches("kedge: ").to_owned();
                return Err(Failure::new(said));
            }
        }
        Ok(ForProgram { under, own })
    }

    /// Has all that was written be below, and ends a cache that was started for the program. What
    /// fails is told: the program has ended as it has.
    pub(crate) fn end(self) {
        let what = if self.own { Ask::Stop } else { Ask::Drain };
        let why = match control::ask(&self.under, what) {
            Ok(Answer::Left(why)) => why,
            Ok(_) => return,
            Err(error) => error.to_string(),
        };
        output::complain(&output::harmless(&why));
    }
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
