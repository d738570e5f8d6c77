//! `kedge serve`.

mod figures;
mod log;

use crate::Failure;
use crate::gpu;
use crate::readiness;
use crate::time::Time;
use clap::{Args, ValueEnum};
use kedge_control::gpu::{DEFAULT_PORT, GpuSpec};
use kedge_control::joblog::JobLog;
use kedge_control::size::Size;
use kedge_keys::Keys;
use kedge_server::{Ender, Event, Said, ServeSpec, Server, Users};
use kedge_supervisor::Parts;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, process, thread};

const AFTER_HELP: &str = "\
It listens on this machine alone unless it is told otherwise, and there serves the user who \
started it. Whoever comes from another machine must have a key that is pinned here, and the \
connection is encrypted; `kedge keys --help` tells how. Once each side has pinned the other's \
certificate:

  gpuhost$ kedge serve --listen 0.0.0.0:7531
  here$    kedge run --gpu gpuhost/0 -- ./train

Examples:
  kedge serve                               this machine's GPUs, or a software device
  kedge serve --gpu local:0,1               two of them
  kedge serve --gpu soft:4 --listen 127.0.0.1:9000
  kedge serve --metrics 127.0.0.1:9718      answer http://127.0.0.1:9718/metrics and /healthz
  kedge serve --take-jobs --listen 0.0.0.0:7531   jobs may move here, as this user's
  kedge serve --grace 10m                   sessions may go on for so long when it is told to end";

/// Lend this machine's devices to programs on others
///
/// Programs are started elsewhere by `kedge run --gpu HOST[:PORT][/I,J…]`. Each gets a proxy of its
/// own here, which ends with it.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ServeArgs {
    /// Devices that are lent: local, local:I,J…, soft or soft:N [default: local where there are a
    /// driver and a GPU, else soft]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
    /// Memory of each software device, such as 4G, for each program [default: half of this
    /// machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// Where to listen; with port 0, on a free port, which is told
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = default_address())]
    listen: SocketAddr,
    /// Users, by number, that are set aside for keys: each key's proxies run as one of them, which
    /// the key keeps; takes root
    #[arg(long, value_name = "FIRST-LAST", value_parser = range)]
    users: Option<RangeInclusive<u32>>,
    /// Where each of these users has a folder for what his proxies keep
    #[arg(long, value_name = "DIR", requires = "users", default_value = "/var/lib/kedge/homes")]
    homes: PathBuf,
    /// Where all servers of this machine note whose each of these users is, so that no two keys get
    /// one
    #[arg(long, value_name = "DIR", requires = "users", default_value = "/var/lib/kedge/users")]
    claims: PathBuf,
    /// Tell who has what at this address: /metrics for Prometheus, and /healthz. Whoever reaches it
    /// may ask; with port 0, on a free port, which is told
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// How it says on standard error what happens: for people, or an object of JSON a line
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    log_format: LogFormat,
    /// Take jobs that move here as a whole (kedge migrate --host): their programs run here, as the
    /// user who has started the server, for whoever has a key that is pinned here. Not as root,
    /// but for jobs of this machine
    #[arg(long)]
    take_jobs: bool,
    /// How long sessions may go on when the server is told to end (SIGTERM, Ctrl-C): they are told
    /// in their jobs' logs, and no new one begins. Told again, it ends at once
    #[arg(long, value_name = "TIME", default_value = "30s")]
    grace: Time,
}

fn default_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, DEFAULT_PORT).into()
}

/// How the server says what happens.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

impl LogFormat {
    fn log(self) -> JobLog {
        let who = format!("kedge[{}]", process::id());
        match self {
            LogFormat::Text => JobLog::told(who, log::text),
            LogFormat::Json => JobLog::told(who, log::json),
        }
    }
}

pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let soft_memory = args.soft_memory.map(|size| size.0);
    let gpu = gpu::resolve(args.gpu.as_ref(), soft_memory.map(|_| "--soft-memory"))?.spec;
    let devices = count(&gpu);
    let (listen, proxy) = (args.listen, Parts::find()?.proxy);
    let keys = if listen.ip().is_loopback() { None } else { Some(Keys::of_user()?) };
    let (homes, claims) = (args.homes.clone(), args.claims.clone());
    let users = args.users.clone().map(|range| Users { range, homes, claims });
    let takes_jobs = args.take_jobs.then(std::env::current_exe).transpose()?;
    let gpu_spec = gpu.clone();
    let spec =
        ServeSpec { listen, gpu: gpu_spec, devices, soft_memory, users, keys, proxy, takes_jobs };
    let log = args.log_format.log();
    let server =
        Server::bind(spec, log.clone()).map_err(|error| Failure::new(error.to_string()))?;
    let address = server.address().map_err(|error| Failure::new(error.to_string()))?;
    if let Some(address) = args.metrics {
        figures::tell(address, server.watch(), &log)?;
    }
    end_when_told(server.ender(), args.grace.0)?;
    let lent = Said::new(Event::Serves, format!("{gpu} is lent at {address}"));
    readiness::ready(&lent.text);
    Said { gpu: Some(gpu.to_string()), ..lent }.log(&log);
    server.serve()
}

fn range(text: &str) -> Result<RangeInclusive<u32>, String> {
    let ends = text
        .split_once('-')
        .and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?));
    ends.ok_or_else(|| "give two numbers of users, such as 70000-70999".to_owned())
}

/// Returns how many devices are lent, as far as can be told.
fn count(gpu: &GpuSpec) -> usize {
    match gpu {
        GpuSpec::Soft { devices, .. } => *devices as usize,
        GpuSpec::Local { ordinals } if ordinals.is_empty() => {
            gpu::look().map_or(0, |machine| machine.gpus)
        }
        GpuSpec::Local { ordinals } => ordinals.len(),
        GpuSpec::Remote { .. } | GpuSpec::Several(_) => 0,
    }
}

/// Has this process end when it is told to, once its sessions have. Signals that it was started to
/// ignore stay ignored.
fn end_when_told(ender: Ender, grace: Duration) -> Result<(), Failure> {
    let ignored = ignored_signals();
    let heard = [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| !ignored(*signal));
    let mut signals = Signals::new(heard)?;
    let told = Arc::new(AtomicU32::new(0));
    let counts = told.clone();
    let wait = move || {
        while counts.load(Ordering::SeqCst) == 0 {
            thread::park();
        }
        readiness::stopping();
        ender.end(grace, &|| counts.load(Ordering::SeqCst) > 1);
        process::exit(0)
    };
    let waits = thread::Builder::new().name("end".into()).spawn(wait)?;
    let hear = move || {
        for _ in signals.forever() {
            told.fetch_add(1, Ordering::SeqCst);
            waits.thread().unpark();
        }
    };
    thread::Builder::new().name("signals".into()).spawn(hear)?;
    Ok(())
}

/// Tells which signals this process ignores; none where the kernel does not say.
pub(crate) fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    move |signal| mask & (1 << (signal - 1)) != 0
}
