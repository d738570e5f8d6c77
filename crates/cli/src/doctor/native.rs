//! NVIDIA's own driver and GPUs, which programs find when they run without kedge.

use super::runtimes::cached;
use super::{Check, Status};
use std::fs;
use std::process::Command;

const GROUP: &str = "native";

pub(super) fn checks() -> Vec<Check> {
    vec![driver(), gpus()]
}

fn driver() -> Check {
    let list = |program| Command::new(program).arg("-p").output();
    let output = list("ldconfig").or_else(|_| list("/sbin/ldconfig"));
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let library = cached(&text, "libcuda.so.1").into_iter().next();
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = version.lines().next().and_then(kernel_module).map(str::to_owned);
    let value = match (version, library) {
        (Some(version), Some(library)) => format!("{version}, {}", library.display()),
        (Some(version), None) => format!("{version}, without a libcuda.so.1"),
        (None, Some(library)) => format!("no kernel module; {}", library.display()),
        (None, None) => "none: programs run on the software device".into(),
    };
    Check::new(GROUP, "NVIDIA's driver", Status::Ok, value)
}

/// The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon …`.
fn kernel_module(line: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    line.split_whitespace().find(is_version)
}

fn gpus() -> Check {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let count = entries.filter(|e| e.file_name().to_str().is_some_and(is_gpu)).count();
    let value = if count == 0 { "none".into() } else { format!("{count} in /dev") };
    Check::new(GROUP, "GPUs", Status::Ok, value)
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
