//! The proxy's command line, written by the supervisor and read here.

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

/// Where what a traced client does is told, and how much of it.
#[derive(Debug, Clone, Default)]
pub struct Traced {
    pub folder: PathBuf,
    /// Bytes that are written at most.
    pub limit: u64,
}

/// What a holder of device memory for a cache has.
#[derive(Debug, Clone, Default)]
pub struct Hold {
    /// Where its cache finds it: a socket in a private folder.
    pub socket: PathBuf,
    /// Bytes of the device that it may take.
    pub bytes: u64,
}

#[derive(Debug, Clone)]
pub struct Options {
    /// The accepted socket.
    pub fd: RawFd,
    /// The socket to the supervisor: the descriptor after `fd`.
    pub control: bool,
    /// It takes the place of a proxy that is gone, and is told of it there.
    pub restore: bool,
    /// It is made ready before there is a client: `fd` is the supervisor's socket, by which the
    /// client's comes.
    pub warm: bool,
    /// It answers the job's questions to NVML: `fd` is the supervisor's socket, the descriptor
    /// after it one that listens; of a `far` one's job, on its line.
    pub management: bool,
    /// Its client is on another machine: it has a line instead of `fd`.
    pub far: bool,
    /// A program started it for itself, without a supervisor: standard input is the client's
    /// socket, in the place of `fd`, and it leaves the program's family.
    pub detach: bool,
    /// How long to try to go on with a session whose line was cut.
    pub reconnect: Duration,
    /// The devices that such a client will choose.
    pub choice: DeviceChoice,
    pub backend: BackendConfig,
    pub log: Option<PathBuf>,
    /// The folder where what the client asks of its devices is told when it has ended.
    pub stats: Option<PathBuf>,
    /// The folder where what a checked program has done wrong is told.
    pub findings: Option<PathBuf>,
    /// Where what the client does is told, if it is traced.
    pub trace: Option<Traced>,
    /// Where the job's keeper answers: a socket.
    pub keeper: Option<PathBuf>,
    /// It holds device memory for a cache, and has no client and no `fd`.
    pub hold: Option<Hold>,
    /// How long the dispatcher spins for messages before it sleeps.
    pub spin: Duration,
}

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
    /// Reads `--name value` pairs, and those that have no value: `--control`, `--restore`,
    /// `--warm`, `--management`, `--far`, `--detach` and `--pci-order`.
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
                "--fd" => fd = Some(number(&name, &value)?),
                "--gpu" => options.backend.gpu = number(&name, &value)?,
                "--soft-memory" => options.backend.soft_memory = Some(number(&name, &value)?),
                "--gpu-memory" => options.backend.gpu_memory = Some(number(&name, &value)?),
                "--cache-gpu" => options.backend.cache.gpu = number(&name, &value)?,
                "--cache-host" => options.backend.cache.host = number(&name, &value)?,
                "--drain-rate" => {
                    options.backend.cache.drain = DrainRate::Limit(number(&name, &value)?);
                }
                "--workers" => options.backend.workers = Some(number(&name, &value)?),
                "--visible" => {
                    let list = value.to_string_lossy().into_owned();
                    options.choice.visible = Some(Text::truncated(list));
                }
                "--spin-us" => options.spin = Duration::from_micros(number(&name, &value)?),
                "--reconnect-ms" => {
                    options.reconnect = Duration::from_millis(number(&name, &value)?);
                }
                "--keeper" => options.keeper = Some(value.into()),
                "--hold" => options.hold.get_or_insert_default().socket = value.into(),
                "--hold-bytes" => {
                    options.hold.get_or_insert_default().bytes = number(&name, &value)?;
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
                    options.trace.get_or_insert_default().limit = number(&name, &value)?;
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

fn number<T: FromStr>(option: &str, value: &OsStr) -> Result<T, OptionsError> {
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| OptionsError::BadValue {
        option: option.to_owned(),
        value: value.to_owned(),
    })
}
