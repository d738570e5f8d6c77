//! The devices of a job: what `--gpu` says, or what this machine has.

use kedge_control::gpu::GpuSpec;
use kedge_control::machine::Machine;
use kedge_cuda_types::granted;
use kedge_supervisor::Parts;
use kedge_supervisor::policy::JobGpu;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// For one address of a server to answer.
const REACH: Duration = Duration::from_secs(5);

/// The devices, and why they are the default where nobody named any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) spec: GpuSpec,
    pub(crate) default: Option<String>,
}

/// What this machine has, asked of the proxy's program.
///
/// # Errors
/// The program is not there, or does not tell.
pub(crate) fn look() -> Result<Machine, String> {
    let parts = Parts::find().map_err(|error| error.to_string())?;
    Machine::ask(&parts.proxy).map_err(|error| error.to_string())
}

/// What `--gpu` says; without it, software devices where an option is about them (`soft_only`, in
/// words), and else the default of this machine.
///
/// # Errors
/// Such an option beside other devices; nobody knows what this machine has; devices of several
/// places, which are for jobs.
pub(crate) fn resolve(asked: Option<&GpuSpec>, soft_only: Option<&str>) -> Result<Gpu, String> {
    match asked.and_then(|spec| spec.refuse_several("this command")) {
        Some(refused) => Err(refused),
        None => resolve_on(asked, soft_only, granted(), look),
    }
}

/// As [`resolve`], for a job, which may have no devices.
///
/// # Errors
/// As [`resolve`]; GPUs that were asked for and cannot be used.
pub(crate) fn of_job(
    asked: Option<&JobGpu>,
    soft_only: Option<&str>,
) -> Result<(JobGpu, Option<String>), String> {
    let asked = match asked {
        Some(JobGpu::None) => {
            return match soft_only {
                Some(what) => Err(not_soft(what, "none")),
                None => Ok((JobGpu::None, None)),
            };
        }
        Some(JobGpu::Devices(spec)) => Some(spec),
        None => None,
    };
    // Each is tried to be reached before anything is started.
    asked.map(GpuSpec::places).unwrap_or_default().iter().try_for_each(is_there)?;
    let Gpu { spec, default } = resolve_on(asked, soft_only, granted(), look)?;
    Ok((JobGpu::Devices(spec), default))
}

/// Whoever names devices wants them: better no job than one without.
fn is_there(place: &GpuSpec) -> Result<(), String> {
    match place {
        GpuSpec::Local { .. } => match look()?.obstacle {
            Some(obstacle) => Err(format!("--gpu local: {obstacle}")),
            None => Ok(()),
        },
        GpuSpec::Remote { server, .. } => reach(&server.to_string()),
        GpuSpec::Soft { .. } | GpuSpec::Several(_) => Ok(()),
    }
}

/// Connects to a server of devices once, for whoever has mistyped its name.
fn reach(server: &str) -> Result<(), String> {
    let addresses = server.to_socket_addrs().map_err(|error| {
        format!("--gpu {server}: no such devices (soft, local, none), and no such host: {error}")
    })?;
    let mut last = "it has no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, REACH) {
            Ok(_) => return Ok(()),
            Err(error) => last = error.to_string(),
        }
    }
    Err(format!("--gpu {server}: cannot be reached: {last}; is `kedge serve` running there?"))
}

fn not_soft(what: &str, gpu: &str) -> String {
    format!(
        "{what} is about software devices, and --gpu {gpu} has none: leave it out, or give --gpu soft"
    )
}

/// The software devices that this container was given.
fn granted() -> u32 {
    granted::count(std::env::vars_os())
}

fn resolve_on(
    asked: Option<&GpuSpec>,
    soft_only: Option<&str>,
    granted: u32,
    machine: impl FnOnce() -> Result<Machine, String>,
) -> Result<Gpu, String> {
    Ok(match (asked, soft_only) {
        (Some(spec), Some(what)) if !spec.has_soft() => {
            return Err(not_soft(what, &spec.to_string()));
        }
        (Some(spec), _) => Gpu { spec: spec.clone(), default: None },
        (None, _) if granted > 0 => {
            let spec = GpuSpec::Soft { devices: granted, apart: false };
            let why = format!("this container was given {granted} ({}…)", granted::PREFIX);
            Gpu { spec, default: Some(why) }
        }
        (None, Some(what)) => {
            let spec = GpuSpec::Soft { devices: 1, apart: false };
            Gpu { spec, default: Some(format!("{what} is about software devices")) }
        }
        (None, None) => {
            let (spec, why) = machine()?.default_gpu();
            Gpu { spec, default: Some(why) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_counts_most() {
        let gpus = || {
            let driver = Some("/lib/libcuda.so.1".into());
            Ok(Machine { driver, gpus: 2, obstacle: None })
        };
        let local: GpuSpec = "local".parse().unwrap();
        let two: GpuSpec = "soft:2".parse().unwrap();
        let found = |asked, what| resolve_on(asked, what, 0, gpus).ok();
        let asked = resolve_on(Some(&two), Some("--soft-memory"), 0, gpus).ok();
        assert_eq!(asked, Some(Gpu { spec: two, default: None }));
        assert_eq!(found(None, None).map(|gpu| gpu.spec), Some(local.clone()));
        let soft = found(None, Some("--soft-memory"));
        assert_eq!(soft.map(|gpu| gpu.spec.to_string()).as_deref(), Some("soft"));
        let plain = resolve_on(None, None, 0, || Ok(Machine::default())).unwrap();
        assert_eq!(plain.spec.to_string(), "soft");
        assert!(plain.default.unwrap().contains("no GPU"));
        // Devices that are named need nobody who knows the machine.
        let nobody = || Err("nobody knows".to_owned());
        assert!(resolve_on(None, None, 0, nobody).is_err());
        assert!(resolve_on(Some(&local), None, 3, nobody).is_ok());
        // A container's own devices come before its machine's.
        let given = resolve_on(None, None, 3, gpus).unwrap();
        assert_eq!(given.spec.to_string(), "soft:3");
        // What would mean nothing is refused.
        assert!(found(Some(&local), Some("--soft-memory")).is_none());
        assert!(of_job(Some(&JobGpu::None), Some("--soft-memory")).is_err());
        assert!(of_job(Some(&JobGpu::None), None).is_ok());
    }
}
