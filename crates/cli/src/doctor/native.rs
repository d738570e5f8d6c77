//! NVIDIA's own driver and GPUs, which programs find when they run without kedge.

use super::{Check, Status};
use kedge_control::gpu::GpuSpec;
use kedge_control::machine::Machine;
use std::fs;

const GROUP: &str = "native";

/// `machine`: what this one has, or why nobody knows.
pub(super) fn checks(machine: &Result<Machine, String>) -> Vec<Check> {
    match machine {
        Ok(machine) => vec![driver(machine), gpus(machine), default(machine)],
        Err(error) => {
            let check = Check::new(GROUP, "devices", Status::Missing, error.clone());
            vec![check.mend("make build, or scripts/install PREFIX")]
        }
    }
}

fn driver(machine: &Machine) -> Check {
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = version.lines().next().and_then(kernel_module).map(str::to_owned);
    let value = match (version, &machine.driver) {
        (Some(version), Some(library)) => format!("{version}, {}", library.display()),
        (Some(version), None) => format!("{version}, without a libcuda.so.1"),
        (None, Some(library)) => format!("no kernel module; {}", library.display()),
        (None, None) => "none".into(),
    };
    Check::new(GROUP, "NVIDIA's driver", Status::Ok, value)
}

/// The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon
/// …`.
fn kernel_module(line: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    line.split_whitespace().find(is_version)
}

fn gpus(machine: &Machine) -> Check {
    let value = match machine.gpus {
        0 => "none".into(),
        count => format!("{count} in /dev"),
    };
    Check::new(GROUP, "GPUs", Status::Ok, value)
}

/// What a job gets that names no devices.
fn default(machine: &Machine) -> Check {
    let (gpu, why) = machine.default_gpu();
    let status = if matches!(gpu, GpuSpec::Soft { .. }) && (machine.gpus > 0) {
        Status::Note
    } else {
        Status::Ok
    };
    let check = Check::new(GROUP, "default devices", status, format!("--gpu {gpu}: {why}"));
    if status == Status::Note { check.mend("install NVIDIA's driver") } else { check }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_s_version_is_found() {
        let line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Sep  1 2025";
        assert_eq!(kernel_module(line), Some("580.159.04"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release";
        assert_eq!(kernel_module(open), Some("570.86.15"));
    }
}
