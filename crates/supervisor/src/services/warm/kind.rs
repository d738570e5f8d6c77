//! What a proxy is made ready for.

use crate::job::parts::Parts;
use kedge_control::gpu::GpuSpec;
use kedge_image::DeviceLimits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The client's devices, among the proxy's.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
const ORDER: &str = "CUDA_DEVICE_ORDER";
/// What the driver or the loader heeds in a proxy: variables that begin so, and variables.
const HEEDED: [&str; 2] = ["CUDA_", "NVIDIA_"];
const ALSO_HEEDED: [&str; 5] =
    ["KEDGE_DRIVER", "LD_LIBRARY_PATH", "LD_PRELOAD", "SLURM_JOB_ID", "SLURM_STEP_ID"];
/// In others of these it would see other files, processes or users, or be seen as another.
const NAMESPACES: [&str; 4] = ["mnt", "net", "pid", "user"];

/// What a proxy was started with and in. One serves a job only where all of this is what the job
/// would have started it with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    pub gpu: String,
    pub soft_memory: Option<u64>,
    #[serde(default)]
    pub gpu_memory: Option<u64>,
    visible: Option<String>,
    pci_order: bool,
    /// Its file, and what tells it from another version.
    pub(super) executable: PathBuf,
    version: [u64; 3],
    environment: BTreeMap<String, String>,
    namespaces: Vec<String>,
    /// Processors that it may run on.
    processors: String,
}

impl Kind {
    /// What this process would start for a job on these devices.
    pub fn here(parts: &Parts, gpu: &GpuSpec, limits: &DeviceLimits) -> Kind {
        let variable =
            |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
        Kind {
            gpu: gpu.to_string(),
            soft_memory: limits.soft_memory,
            gpu_memory: limits.gpu_memory,
            visible: variable(VISIBLE),
            pci_order: variable(ORDER).is_some_and(|order| order == "PCI_BUS_ID"),
            executable: parts.proxy.clone(),
            version: version(&parts.proxy),
            environment: environment(),
            namespaces: NAMESPACES.map(namespace).to_vec(),
            processors: processors(),
        }
    }

    /// What such a proxy is started with, beyond where it is to answer.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut list = vec!["--gpu".to_owned(), self.gpu.clone()];
        let mut add = |option: &str, value: Option<String>| {
            list.extend(value.into_iter().flat_map(|value| [option.to_owned(), value]));
        };
        add("--soft-memory", self.soft_memory.map(|bytes| bytes.to_string()));
        add("--gpu-memory", self.gpu_memory.map(|bytes| bytes.to_string()));
        add("--visible", self.visible.clone());
        list.extend(self.pci_order.then(|| "--pci-order".to_owned()));
        list
    }

    /// Which GPUs the driver is to show it.
    pub(super) fn shown(&self) -> Option<String> {
        self.gpu.parse::<GpuSpec>().ok()?.shown()
    }

    /// Whether the driver is to place things as in any other such proxy.
    pub(super) fn has_fixed_places(&self) -> bool {
        matches!(self.gpu.parse(), Ok(GpuSpec::Local { .. }))
    }

    /// Why a proxy of this kind does not do for a job that wants another, if it does not.
    pub(super) fn unfit_for(&self, wanted: &Kind) -> Option<String> {
        let differs = |what: &str, mine: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| {
            Some(format!("they were made ready with {what} {mine}, and the job has {theirs}"))
        };
        let or_none = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".into());
        let size = |bytes: Option<u64>| bytes.map_or("as usual".into(), |b| b.to_string());
        match () {
            () if self.version != wanted.version || self.executable != wanted.executable => {
                differs("the proxy", &self.executable.display(), &"another version of it")
            }
            () if self.gpu != wanted.gpu => differs("--gpu", &self.gpu, &wanted.gpu),
            () if self.soft_memory != wanted.soft_memory => {
                differs("--soft-memory", &size(self.soft_memory), &size(wanted.soft_memory))
            }
            () if self.gpu_memory != wanted.gpu_memory => {
                differs("--gpu-memory", &size(self.gpu_memory), &size(wanted.gpu_memory))
            }
            () if self.visible != wanted.visible => {
                differs(VISIBLE, &or_none(&self.visible), &or_none(&wanted.visible))
            }
            () if self.pci_order != wanted.pci_order => {
                differs(ORDER, &self.pci_order, &wanted.pci_order)
            }
            () if self.namespaces != wanted.namespaces => differs(
                "other namespaces:",
                &self.namespaces.join(" "),
                &wanted.namespaces.join(" "),
            ),
            () if self.processors != wanted.processors => {
                differs("processors", &self.processors, &wanted.processors)
            }
            () => self.other_variable(wanted).map(|name| {
                format!("the variable {name} is another one where they were made ready")
            }),
        }
    }

    fn other_variable(&self, wanted: &Kind) -> Option<String> {
        let (mine, theirs) = (&self.environment, &wanted.environment);
        let mut names = mine.keys().chain(theirs.keys());
        names.find(|name| mine.get(*name) != theirs.get(*name)).cloned()
    }
}

/// Device, inode and time of change.
fn version(executable: &Path) -> [u64; 3] {
    let found = fs::metadata(executable);
    found.map_or([0; 3], |file| [file.dev(), file.ino(), file.mtime().cast_unsigned()])
}

fn environment() -> BTreeMap<String, String> {
    let heeded = |name: &str| {
        let begins = HEEDED.iter().any(|first| name.starts_with(first));
        (begins || ALSO_HEEDED.contains(&name)) && name != VISIBLE
    };
    let all = std::env::vars_os().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    });
    all.filter(|(name, _)| heeded(name)).collect()
}

fn namespace(name: &str) -> String {
    let link = fs::read_link(format!("/proc/self/ns/{name}"));
    link.map(|link| link.to_string_lossy().into_owned()).unwrap_or_default()
}

fn processors() -> String {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind() -> Kind {
        let proxy = PathBuf::from("/proc/self/exe");
        let parts = Parts { shim: PathBuf::new(), proxy, nvml: None };
        Kind::here(&parts, &GpuSpec::Soft { devices: 1, apart: false }, &DeviceLimits::default())
    }

    #[test]
    fn a_proxy_does_for_a_job_that_would_have_started_it_so() {
        assert_eq!(kind().unfit_for(&kind()), None);
        let text = serde_json::to_string(&kind()).unwrap();
        assert_eq!(serde_json::from_str::<Kind>(&text).unwrap(), kind());
    }

    #[test]
    fn what_differs_is_named() {
        let mut others = vec![];
        let mut differing = |word: &'static str, change: &dyn Fn(&mut Kind)| {
            let mut other = kind();
            change(&mut other);
            others.push((word, other));
        };
        differing("--gpu", &|k| k.gpu = "soft:2".into());
        differing("--soft-memory", &|k| k.soft_memory = Some(5));
        differing("--gpu-memory", &|k| k.gpu_memory = Some(5));
        differing(VISIBLE, &|k| k.visible = Some("7".into()));
        differing(ORDER, &|k| k.pci_order = !k.pci_order);
        differing("version", &|k| k.version[1] += 1);
        differing("namespaces", &|k| k.namespaces.push("x".into()));
        differing("processors", &|k| k.processors.push_str(",9"));
        differing("CUDA_MPS_PIPE_DIRECTORY", &|k| {
            k.environment.insert("CUDA_MPS_PIPE_DIRECTORY".into(), "/x".into());
        });
        for (word, other) in others {
            let said = kind().unfit_for(&other).unwrap_or_default();
            assert!(said.contains(word), "{word}: {said}");
            assert!(other.unfit_for(&kind()).is_some(), "{word}");
        }
    }
}
