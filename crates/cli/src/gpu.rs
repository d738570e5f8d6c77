//! The devices of a job: what `--gpu` says, or what this machine has.

use kedge_proxy::backend::GpuSpec;
use kedge_proxy::machine::Machine;
use kedge_supervisor::policy::JobGpu;

/// The devices, and why they are the default where nobody named any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) spec: GpuSpec,
    pub(crate) default: Option<String>,
}

/// What `--gpu` says; without it, software devices where an option is about them (`soft_only`, in
/// words), and else the default of this machine.
pub(crate) fn resolve(asked: Option<&GpuSpec>, soft_only: Option<&str>) -> Gpu {
    resolve_on(asked, soft_only, Machine::look)
}

/// As [`resolve`], for a job, which may have no devices.
pub(crate) fn of_job(asked: Option<&JobGpu>, soft_only: Option<&str>) -> (JobGpu, Option<String>) {
    let asked = match asked {
        Some(JobGpu::None) => return (JobGpu::None, None),
        Some(JobGpu::Devices(spec)) => Some(spec),
        None => None,
    };
    let Gpu { spec, default } = resolve(asked, soft_only);
    (JobGpu::Devices(spec), default)
}

fn resolve_on(
    asked: Option<&GpuSpec>,
    soft_only: Option<&str>,
    machine: impl FnOnce() -> Machine,
) -> Gpu {
    match (asked, soft_only) {
        (Some(spec), _) => Gpu { spec: spec.clone(), default: None },
        (None, Some(what)) => {
            let spec = GpuSpec::Soft { devices: 1 };
            Gpu { spec, default: Some(format!("{what} is about software devices")) }
        }
        (None, None) => {
            let (spec, why) = machine().default_gpu();
            Gpu { spec, default: Some(why) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_counts_most() {
        let gpus = || Machine { driver: Some("/lib/libcuda.so.1".into()), gpus: 2 };
        let local: GpuSpec = "local".parse().unwrap();
        let two: GpuSpec = "soft:2".parse().unwrap();
        let asked = resolve_on(Some(&two), None, gpus);
        assert_eq!(asked, Gpu { spec: two, default: None });
        assert_eq!(resolve_on(None, None, gpus).spec, local);
        assert_eq!(resolve_on(None, Some("--soft-memory"), gpus).spec.to_string(), "soft");
        let plain = resolve_on(None, None, Machine::default);
        assert_eq!(plain.spec.to_string(), "soft");
        assert!(plain.default.unwrap().contains("no GPU"));
    }
}
