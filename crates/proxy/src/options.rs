//! The proxy's command line, which the supervisor writes.

use crate::backend::BackendConfig;
use kedge_control::check::Check;
use kedge_control::gpu::GpuSpec;
use kedge_device_nvidia::{CacheLimits, DrainRate};
use kedge_protocol::DeviceChoice;
use kedge_wire::Text;
use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// Where a client's trace is written.
#[derive(Debug, Clone, Default)]
pub struct Traced {
    pub folder: PathBuf,
    /// Most bytes of the trace.
    pub limit: u64,
}

/// The options of a proxy that holds device memory for a cache.
#[derive(Debug, Clone, Default)]
pub struct Hold {
    /// The socket at which the cache connects, in a private folder.
    pub socket: PathBuf,
    /// Most bytes of device memory that it may allocate.
    pub bytes: u64,
}

/// A proxy's options.
#[derive(Debug, Clone)]
pub struct Options {
    /// The accepted socket of the client; -1 if there is none.
    pub fd: RawFd,
    /// Whether the descriptor after `fd` is a socket to the supervisor.
    pub control: bool,
    /// Whether the proxy replaces one that has ended; the supervisor tells it which.
    pub restore: bool,
    /// Whether the proxy starts before there is a client: `fd` is the supervisor's socket, which
    /// passes the client's.
    pub warm: bool,
    /// Whether it answers the job's NVML requests: `fd` is the supervisor's socket, and the
    /// descriptor after it listens. With `far`, requests come over the line instead.
    pub management: bool,
    /// Whether the client is on another machine: a line takes the place of `fd`.
    pub far: bool,
    /// Whether a program started it for itself, without a supervisor: standard input is the
    /// client's socket instead of `fd`, and the proxy detaches from the program.
    pub detach: bool,
    /// How long to try to resume a session whose line was cut.
    pub reconnect: Duration,
    /// The devices that the client of a warm proxy will choose.
    pub choice: DeviceChoice,
    pub backend: BackendConfig,
    pub log: Option<PathBuf>,
    /// The folder for statistics of the client's calls, written when it ends.
    pub stats: Option<PathBuf>,
    /// The folder for the findings of `kedge check`.
    pub findings: Option<PathBuf>,
    /// Where the client's trace is written, if it is traced.
    pub trace: Option<Traced>,
    /// The socket of the job's keeper.
    pub keeper: Option<PathBuf>,
    /// Set if the proxy holds device memory for a cache; it has no client and no `fd` then.
    pub hold: Option<Hold>,
    /// How long the dispatcher spins for a message before it sleeps.
    pub spin: Duration,
}

/// What is wrong with a command line.
#[derive(Debug, Error)]
pub enum OptionsError {
    #[error("unknown option {0:?}; kedge-proxy is started by `kedge run`")]
    Unknown(OsString),
    #[error("option {0} needs a value")]
    NoValue(String),
    #[error("option {option}: {value:?} is no proper value")]
    BadValue { option: String, value: OsString },
    #[error("--fd is missing; kedge-proxy is started by `kedge run`")]
    NoFd,
}

impl Options {
    /// Parses `--name value` pairs, and the options without a value: `--control`, `--restore`,
    /// `--warm`, `--management`, `--far`, `--detach` and `--pci-order`.
    ///
    /// # Errors
    /// An option is unknown or has a wrong value, or `--fd` is missing.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Options, OptionsError> {
        let mut args = args.into_iter();
        let mut fd = None;
        let gpu = GpuSpec::Soft { devices: 1, apart: false };
        let mut options = Options {
            fd: -1,
            control: false,
            restore: false,
            warm: false,
            management: false,
            far: false,
            detach: false,
            reconnect: Duration::from_secs(60),
            choice: DeviceChoice::default(),
            backend: BackendConfig {
                gpu,
                windows: None,
                soft_memory: None,
                gpu_memory: None,
                workers: None,
                cache: CacheLimits::default(),
                check: None,
            },
            log: None,
            stats: None,
            findings: None,
            trace: None,
            keeper: None,
            hold: None,
            spin: Duration::from_micros(50),
        };
        while let Some(arg) = args.next() {
            let name = arg.to_string_lossy().into_owned();
            match &*name {
                "--control" => {
                    options.control = true;
                    continue;
                }
                "--restore" => {
                    options.restore = true;
                    continue;
                }
                "--warm" => {
                    options.warm = true;
                    continue;
                }
                "--management" => {
                    options.management = true;
                    continue;
                }
                "--far" => {
                    options.far = true;
                    continue;
                }
                "--detach" => {
                    options.detach = true;
                    continue;
                }
                "--pci-order" => {
                    options.choice.pci_order = true;
                    continue;
                }
                _ => {}
            }
            if !matches!(
                &*name,
                "--fd"
                    | "--gpu"
                    | "--soft-memory"
                    | "--gpu-memory"
                    | "--cache-gpu"
                    | "--cache-host"
                    | "--drain-rate"
                    | "--workers"
                    | "--visible"
                    | "--spin-us"
                    | "--reconnect-ms"
                    | "--log"
                    | "--stats"
                    | "--check"
                    | "--findings"
                    | "--trace"
                    | "--trace-limit"
                    | "--keeper"
                    | "--hold"
                    | "--hold-bytes"
            ) {
                return Err(OptionsError::Unknown(arg));
            }
            let value = args.next().ok_or_else(|| OptionsError::NoValue(name.clone()))?;
            match &*name {
                "--fd" => fd = Some(parsed(&name, &value)?),
                "--gpu" => options.backend.gpu = parsed(&name, &value)?,
                "--soft-memory" => options.backend.soft_memory = Some(parsed(&name, &value)?),
                "--gpu-memory" => options.backend.gpu_memory = Some(parsed(&name, &value)?),
                "--cache-gpu" => options.backend.cache.gpu = parsed(&name, &value)?,
                "--cache-host" => options.backend.cache.host = parsed(&name, &value)?,
                "--drain-rate" => {
                    options.backend.cache.drain = DrainRate::Limit(parsed(&name, &value)?);
                }
                "--workers" => options.backend.workers = Some(parsed(&name, &value)?),
                "--visible" => {
                    let list = value.to_string_lossy().into_owned();
                    options.choice.visible = Some(Text::truncated(list));
                }
                "--spin-us" => options.spin = Duration::from_micros(parsed(&name, &value)?),
                "--reconnect-ms" => {
                    options.reconnect = Duration::from_millis(parsed(&name, &value)?);
                }
                "--keeper" => options.keeper = Some(value.into()),
                "--hold" => options.hold.get_or_insert_default().socket = value.into(),
                "--hold-bytes" => {
                    options.hold.get_or_insert_default().bytes = parsed(&name, &value)?;
                }
                "--stats" => options.stats = Some(value.into()),
                "--check" => {
                    let check = value.to_str().and_then(Check::of_words);
                    let bad = OptionsError::BadValue { option: name.clone(), value: value.clone() };
                    options.backend.check = Some(check.ok_or(bad)?);
                }
                "--trace" => {
                    options.trace.get_or_insert_default().folder = value.into();
                }
                "--trace-limit" => {
                    options.trace.get_or_insert_default().limit = parsed(&name, &value)?;
                }
                "--findings" => options.findings = Some(value.into()),
                _ => options.log = Some(value.into()),
            }
        }
        options.fd = match fd {
            None if options.far || options.detach || options.hold.is_some() => -1,
            fd => fd.ok_or(OptionsError::NoFd)?,
        };
        Ok(options)
    }
}

/// Parses a value.
fn parsed<T: FromStr>(option: &str, value: &OsStr) -> Result<T, OptionsError> {
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| OptionsError::BadValue {
        option: option.to_owned(),
        value: value.to_owned(),
    })
}
