//! The machine: processor, memory, kernel, limits.

use super::{Check, Status};
use kedge_control::gpu::default_memory;
use kedge_control::size::Size;
use kedge_process::kernel::{self, Feature, Stops};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::path::Path;

const GROUP: &str = "machine";
/// Descriptors of a job with many processes: each has a proxy, whose pipes the supervisor opens.
const DESCRIPTORS: u64 = 1024;

pub(super) fn checks() -> Vec<Check> {
    let mut checks = vec![processor(), vectors()];
    checks.extend(kernel(&kernel::lacks()));
    checks.push(memory());
    checks.extend(overcommit());
    checks.push(shared_memory());
    checks.push(client_memory());
    checks.extend(limits());
    checks
}

fn check(name: &str, status: Status, value: impl Into<String>) -> Check {
    Check::new(GROUP, name, status, value.into())
}

/// A file of /proc or /sys, trimmed.
fn read(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// What follows `key` in the first line of `text` that begins with it.
fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(rest.trim_start_matches([' ', '\t', ':']).trim())
}

fn processor() -> Check {
    let text = read("/proc/cpuinfo").unwrap_or_default();
    let model = field(&text, "model name").unwrap_or("unknown model").to_owned();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    match cores {
        1 => check(
            "processor",
            Status::Note,
            format!("1 core, {model}: program and device share it"),
        ),
        _ => check("processor", Status::Ok, format!("{cores} cores, {model}")),
    }
}

/// What the software device's inner loops use.
fn vectors() -> Check {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if avx512 {
            return check("vectors", Status::Ok, "AVX-512 and AVX2");
        } else if avx2 {
            return check("vectors", Status::Ok, "AVX2 and FMA");
        }
    }
    check("vectors", Status::Note, "neither AVX2 nor AVX-512: the software device works, slowly")
}

/// The running kernel, and what it lacks.
fn kernel(lacks: &[Feature]) -> Vec<Check> {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let whole = match lacks.len() {
        0 => check("kernel", Status::Ok, release),
        lacking => check("kernel", Status::Note, format!("{release}, which lacks {lacking}:")),
    };
    let lack = |feature: &Feature| match feature.stops {
        Stops::Nothing => check("kernel", Status::Note, feature.to_string()),
        _ => check("kernel", Status::Missing, feature.to_string()).mend(kernel::remedy()),
    };
    std::iter::once(whole).chain(lacks.iter().map(lack)).collect()
}

fn memory() -> Check {
    let text = read("/proc/meminfo").unwrap_or_default();
    let bytes = |key| {
        let kib: u64 = field(&text, key)?.split(' ').next()?.parse().ok()?;
        Some(Size(kib << 10))
    };
    let (Some(total), Some(free)) = (bytes("MemTotal"), bytes("MemAvailable")) else {
        return check("memory", Status::Note, "/proc/meminfo does not tell");
    };
    let device = Size(default_memory(1));
    let value = format!("{total}, {free} available; one software device gets {device}");
    if device.0 > free.0 {
        let mend = format!("kedge run --soft-memory {}M -- …", (free.0 >> 21).max(64));
        return check("memory", Status::Note, value).mend(mend);
    }
    check("memory", Status::Ok, value)
}

/// Devices reserve address space that they may never touch.
fn overcommit() -> Option<Check> {
    let mode = read("/proc/sys/vm/overcommit_memory")?;
    (mode == "2").then(|| {
        let value = "vm.overcommit_memory is 2: reserved address space counts as used";
        check("overcommit", Status::Missing, value).mend("sudo sysctl vm.overcommit_memory=0")
    })
}

/// The ring and the shared arena are one sparse file in memory.
fn shared_memory() -> Check {
    const TRIED: u64 = 64 << 30;
    let made = memfd_create("kedge-doctor", MemfdFlags::CLOEXEC);
    match made.and_then(|file| ftruncate(&file, TRIED)) {
        Ok(()) => {
            let hugepages = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .and_then(|text| Some(text.split('[').nth(1)?.split(']').next()?.to_owned()));
            let pages = hugepages.map(|mode| format!("; huge pages: {mode}")).unwrap_or_default();
            check("shared memory", Status::Ok, format!("memfd of {} (sparse){pages}", Size(TRIED)))
        }
        Err(error) => {
            let value = format!("memfd of {} (sparse): {error}", Size(TRIED));
            check("shared memory", Status::Missing, value).mend("ulimit -f unlimited")
        }
    }
}

/// Large copies read the program's memory where it lies, if the system lets the proxy do so.
fn client_memory() -> Check {
    let name = "program's memory";
    let status = read("/proc/self/status").unwrap_or_default();
    let filtered = field(&status, "Seccomp").is_some_and(|mode| mode != "0");
    match read("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        Some(scope @ ("2" | "3")) => {
            let value = format!("kernel.yama.ptrace_scope is {scope}: large copies are made twice");
            check(name, Status::Note, value).mend("sudo sysctl kernel.yama.ptrace_scope=1")
        }
        _ if filtered => {
            let value = "process_vm_readv, unless the seccomp filter of this container forbids it";
            check(name, Status::Ok, value)
        }
        None => check(name, Status::Ok, "process_vm_readv (no Yama)"),
        Some(scope) => check(name, Status::Ok, format!("process_vm_readv (ptrace_scope {scope})")),
    }
}

/// Limits of this shell that are in the way.
fn limits() -> Vec<Check> {
    let mut checks = Vec::new();
    let space = getrlimit(Resource::As).current;
    if let Some(bytes) = space {
        let value = format!("address space is limited to {}: devices reserve more", Size(bytes));
        checks.push(check("limits", Status::Missing, value).mend("ulimit -v unlimited"));
    }
    let files = getrlimit(Resource::Nofile).current;
    if let Some(count) = files.filter(|count| *count < DESCRIPTORS) {
        let value = format!("{count} open files: jobs of many processes need more");
        checks.push(check("limits", Status::Note, value).mend("ulimit -n 4096"));
    }
    if checks.is_empty() {
        let files = files.map_or("unlimited".to_owned(), |count| count.to_string());
        checks.push(check(
            "limits",
            Status::Ok,
            format!("address space unlimited, {files} open files"),
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_key() {
        let text = "model name\t: A 5\nSeccomp:\t2\nMemTotal:  10 kB";
        assert_eq!(field(text, "model name"), Some("A 5"));
        assert_eq!(field(text, "Seccomp"), Some("2"));
        assert_eq!(field(text, "MemTotal"), Some("10 kB"));
        assert_eq!(field(text, "nothing"), None);
    }

    #[test]
    fn what_a_kernel_lacks_is_told() {
        let all = kernel(kernel::FEATURES);
        assert!(all[0].value.contains("which lacks"));
        assert_eq!(all.len(), kernel::FEATURES.len() + 1);
        for (feature, told) in kernel::FEATURES.iter().zip(&all[1..]) {
            assert!(told.value.contains(feature.name) && told.value.contains(feature.without));
            assert_eq!(told.status == Status::Note, feature.stops == Stops::Nothing);
        }
        assert_eq!(kernel(&[])[0].status, Status::Ok);
    }

    #[test]
    fn everything_is_looked_at() {
        let checks = checks();
        for name in ["processor", "vectors", "kernel", "memory", "shared memory", "limits"] {
            assert!(checks.iter().any(|check| check.name == name), "{name}");
        }
        assert!(checks.iter().all(|c| c.status != Status::Missing || c.mend.is_some()));
    }
}
