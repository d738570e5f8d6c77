//! `kedge keys`.

use crate::Failure;
use crate::output::{self, BAD, DIM, GOOD, PLAIN, Table};
use clap::builder::RangedI64ValueParser;
use clap::{Args, Subcommand};
use kedge_control::size::Size;
use kedge_keys::{Certificate, Keys, Limits, MAX_DEVICES, MIN_BANDWIDTH, Name, Standing, date};
use serde::Serialize;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest file that is looked at, bytes: a certificate has some 500.
const MAX_FILE: u64 = 64 << 10;

const AFTER_HELP: &str = "\
Each user has one key pair of his own on each machine, and pins the certificates of those whom he \
lends devices to, or whose devices he uses. A connection is made only if each end shows a \
certificate that the other has pinned. Nobody signs for anybody else: a certificate is taken over \
by a way that both sides trust, such as ssh, or its fingerprint is compared.

Whoever is pinned may use what `kedge serve` of this user lends. A server is pinned under the \
name that `kedge run --gpu` calls it by.

Keys are kept in $XDG_CONFIG_HOME/kedge/keys, else ~/.config/kedge/keys, a folder that must be \
this user's alone.

Examples:
  gpuhost$ kedge keys new                                 once on each machine
  here$    kedge keys new
  here$    kedge keys show | ssh gpuhost kedge keys add alice -
  here$    ssh gpuhost kedge keys show | kedge keys add gpuhost -
  gpuhost$ kedge keys list                                who may connect, and until when
  gpuhost$ kedge keys limit alice --gpus 2 --memory 8G    what she may have of it
  gpuhost$ kedge keys revoke alice                        from the next connection on she may not";

/// Make, pin and revoke keys of connections between machines
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    New(NewArgs),
    /// Print this user's own certificate, to hand over
    ///
    /// It has nothing that is secret. The private key stays where it is.
    Show,
    /// List this user's own key, those that are pinned, and those that were revoked
    List {
        /// Print a JSON list of objects: name (null for one's own), state (own, pinned or revoked),
        /// subject (what the certificate says, unchecked), fingerprint (SHA-256), valid_from and
        /// valid_until (seconds since 1970), expired, limits (null where there are none)
        #[arg(long)]
        json: bool,
    },
    Add(AddArgs),
    Limit(LimitArgs),
    /// Refuse a pinned certificate from now on
    ///
    /// A server that runs ends its sessions within a second. The certificate can never be pinned
    /// again; its owner makes another (`kedge keys new --replace`). The name is free for that.
    Revoke {
        /// The name under which it is pinned
        #[arg(value_name = "NAME")]
        name: Name,
    },
}

/// Make a key pair for this user on this machine
///
/// An Ed25519 key and a certificate that it signs itself, in one file that nobody else can read.
#[derive(Debug, Args)]
struct NewArgs {
    /// What the certificate says of its owner; for people alone [default: USER@HOST]
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// How long it is valid
    #[arg(long, value_name = "N", default_value = "730", value_parser = days())]
    days: u32,
    /// Replace the key that there is: everybody who has pinned its certificate must pin the new one
    #[arg(long)]
    replace: bool,
}

/// A day to a hundred years.
fn days() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}

/// Pin a certificate: on a server a client's, on a client a server's
///
/// The fingerprint that it prints is to be compared with that of `kedge keys list` on the other
/// machine, unless the certificate came by a way that can be trusted.
#[derive(Debug, Args)]
struct AddArgs {
    /// What to call it here; a server as `kedge run --gpu` does
    #[arg(value_name = "NAME")]
    name: Name,
    /// What `kedge keys show` has printed on the other machine; - reads it from stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Say how much of what is lent here a key may have
///
/// What is not named stays as it is, and without options it is told. Limits are the name's: another
/// key that is pinned under it has them, too. They count for sessions that begin from now on; those
/// that are open go on. Whoever asks for more is refused, and hears why; for more device memory, he
/// gets CUDA_ERROR_OUT_OF_MEMORY.
#[derive(Debug, Args)]
struct LimitArgs {
    /// The name under which it is pinned
    #[arg(value_name = "NAME")]
    name: Name,
    /// Different devices at a time, of all its sessions together
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,
    /// Which of the server's devices, as it counts them
    #[arg(long, value_name = "I,J…", value_delimiter = ',')]
    devices: Option<Vec<u32>>,
    /// Device memory of all its sessions together, such as 8G
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Sessions at a time: a job has one for each of its processes that uses devices
    #[arg(long, value_name = "N")]
    sessions: Option<u32>,
    /// Jobs at a time, as near ends tell them apart
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Bytes a second of all its sessions together, both ways, such as 10M
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<Size>,
    /// Take all limits away, but for those that are given
    #[arg(long)]
    none: bool,
}

pub(crate) fn run(args: &KeysArgs) -> Result<(), Failure> {
    let keys = Keys::of_user()?;
    match &args.what {
        What::New(args) => new(&keys, args),
        What::Show => Ok(output::print(&keys.identity()?.certificate().to_pem()?)?),
        What::List { json } => list(&keys, *json),
        What::Add(AddArgs { name, file }) => {
            let certificate = keys.add(name, &text(file)?)?;
            told(&format!("{name} is pinned"), &certificate)
        }
        What::Limit(args) => limit(&keys, args),
        What::Revoke { name } => {
            let certificate = keys.revoke(name)?;
            told(&format!("{name} is refused from the next connection on"), &certificate)
        }
    }
}

fn new(keys: &Keys, args: &NewArgs) -> Result<(), Failure> {
    let label = args.name.as_ref().map_or_else(user_and_host, Name::to_string);
    let lasts = Duration::from_secs(u64::from(args.days) * 24 * 3600);
    told("a new key", &keys.make(&label, lasts, args.replace)?)
}

fn limit(keys: &Keys, args: &LimitArgs) -> Result<(), Failure> {
    let LimitArgs { name, gpus, devices, memory, sessions, jobs, bandwidth, none } = args;
    if devices.as_ref().is_some_and(|devices| devices.len() > MAX_DEVICES) {
        return Err(Failure::of_usage(format!("--devices: {MAX_DEVICES} at most")));
    }
    if bandwidth.is_some_and(|rate| rate.0 < MIN_BANDWIDTH) {
        let least = Size(MIN_BANDWIDTH);
        return Err(Failure::of_usage(format!("--bandwidth: {least} a second at least")));
    }
    // One that cannot be read is written anew as a whole.
    let before = if *none { Limits::default() } else { keys.limits(name)? };
    let limits = Limits {
        gpus: gpus.or(before.gpus),
        devices: devices.clone().or_else(|| before.devices.clone()),
        memory: memory.map(|size| size.0).or(before.memory),
        sessions: sessions.or(before.sessions),
        jobs: jobs.or(before.jobs),
        bandwidth: bandwidth.map(|size| size.0).or(before.bandwidth),
    };
    if *none || limits != before {
        keys.limit(name, &limits)?;
    }
    Ok(output::print(&format!("{name} may have {}\n", words(&limits)))?)
}

/// Returns limits in words.
fn words(limits: &Limits) -> String {
    let Limits { gpus, devices, memory, sessions, jobs, bandwidth } = limits;
    let list =
        |devices: &Vec<u32>| devices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let all = [
        gpus.map(|it| format!("gpus {it}")),
        devices.as_ref().map(|it| format!("devices {}", list(it))),
        memory.map(|it| format!("memory {}", Size(it))),
        sessions.map(|it| format!("sessions {it}")),
        jobs.map(|it| format!("jobs {it}")),
        bandwidth.map(|it| format!("bandwidth {}/s", Size(it))),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    if all.is_empty() { "whatever there is".to_owned() } else { all.join(", ") }
}

fn told(what: &str, certificate: &Certificate) -> Result<(), Failure> {
    let until = date(certificate.valid_until());
    let fingerprint = certificate.fingerprint();
    Ok(output::print(&format!("{what}, valid until {until}\n{fingerprint}\n"))?)
}

/// Returns who runs this where, as far as the environment tells, for people.
fn user_and_host() -> String {
    let user = ["LOGNAME", "USER"].into_iter().find_map(|name| std::env::var(name).ok());
    let user = user.unwrap_or_else(|| rustix::process::geteuid().as_raw().to_string());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let label: String = format!("{user}@{host}").chars().take(MAX_LABEL).collect();
    label.parse().map_or_else(|_| "kedge".to_owned(), |name: Name| name.to_string())
}

/// Longest common name of a certificate, in characters (RFC 5280, appendix A).
const MAX_LABEL: usize = 64;

/// Returns what is in a file, or comes by stdin.
fn text(file: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |why: &dyn Display| Failure::new(format!("{}: {why}", file.display()));
    let from: Box<dyn Read> = match file.to_str() {
        Some("-") => Box::new(io::stdin().lock()),
        _ => Box::new(File::open(file).map_err(|error| failed(&error))?),
    };
    let mut text = Vec::new();
    from.take(MAX_FILE + 1).read_to_end(&mut text).map_err(|error| failed(&error))?;
    if text.len() as u64 > MAX_FILE {
        return Err(failed(&format_args!("longer than {MAX_FILE} bytes: it is no certificate")));
    }
    Ok(text)
}

/// A key, flat, as scripts like it.
#[derive(Debug, Serialize)]
struct Row {
    name: Option<String>,
    state: &'static str,
    subject: String,
    fingerprint: String,
    valid_from: u64,
    valid_until: u64,
    expired: bool,
    limits: Option<String>,
}

impl Row {
    fn new((standing, certificate): (Standing, Certificate), now: u64) -> Row {
        let (state, name) = match standing {
            Standing::Own => ("own", None),
            Standing::Pinned(name) => ("pinned", Some(name.to_string())),
            Standing::Revoked(name) => ("revoked", Some(name.to_string())),
        };
        Row {
            name,
            state,
            subject: certificate.subject().to_owned(),
            fingerprint: certificate.fingerprint().to_string(),
            valid_from: certificate.valid_from(),
            valid_until: certificate.valid_until(),
            expired: certificate.has_expired(now),
            limits: None,
        }
    }
}

fn list(keys: &Keys, json: bool) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let with_limits = |key: (Standing, Certificate)| {
        let limits = match &key.0 {
            Standing::Pinned(name) => Some(keys.limits(name)?).filter(|it| !it.is_empty()),
            Standing::Own | Standing::Revoked(_) => None,
        };
        Ok(Row { limits: limits.as_ref().map(words), ..Row::new(key, now) })
    };
    let rows = keys.list()?.into_iter().map(with_limits).collect::<Result<Vec<Row>, Failure>>()?;
    if json {
        return Ok(output::json(&rows)?);
    }
    let mut table =
        Table::new(&["NAME", "STATE", "VALID UNTIL", "MAY HAVE", "SUBJECT", "FINGERPRINT"], &[]);
    for row in rows {
        let (state, style) = match (row.state, row.expired) {
            ("revoked", _) => (row.state.to_owned(), DIM),
            (state, true) => (format!("{state}, expired"), BAD),
            (state, false) => (state.to_owned(), GOOD),
        };
        table.row([
            (PLAIN, row.name.unwrap_or_else(|| "-".to_owned())),
            (style, state),
            (PLAIN, date(row.valid_until)),
            (PLAIN, row.limits.unwrap_or_else(|| "-".to_owned())),
            (PLAIN, output::harmless(&row.subject)),
            (PLAIN, row.fingerprint),
        ]);
    }
    Ok(output::print(&table.render())?)
}
