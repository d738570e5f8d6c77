//! Every CUDA runtime on this machine, and whether it starts under kedge.

use super::installation::checkouts;
use super::{Check, Status};
use crate::child::{Place, probe};
use crate::loader;
use kedge_control::gpu::GpuSpec;
use kedge_probe::RuntimeReport;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(super) const GROUP: &str = "runtimes";
/// How long the probe may take: a runtime starts within some tens of milliseconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) fn none() -> Check {
    let value = "none found: programs that nvcc links by default carry their own";
    Check::new(GROUP, "libcudart", Status::Note, value.into())
}

/// Starts the runtime at `path` in a job, unless kedge itself does not work.
pub(super) fn start(path: &Path, gpu: &GpuSpec, works: bool) -> Check {
    let shown = path.display().to_string();
    if !works {
        return Check::new(GROUP, "libcudart", Status::Note, format!("not started: {shown}"));
    }
    let mut report = None;
    let arguments = ["runtime".into(), path.as_os_str().to_owned()];
    let result = probe(Place::job(gpu.clone()), &arguments, PROBE_TIMEOUT, |line| {
        report = serde_json::from_str::<RuntimeReport>(line).ok();
    });
    match (result, report) {
        (Ok(()), Some(report)) => {
            let version = report.runtime_version;
            let name = format!("cudart {}.{}", version / 1000, version % 1000 / 10);
            let devices = if report.devices == 1 { "device" } else { "devices" };
            let value = format!("starts, {} {devices}: {shown}", report.devices);
            Check::new(GROUP, name, Status::Ok, value)
        }
        (Ok(()), None) => failed(&shown, "it said nothing"),
        (Err(said), _) => failed(&shown, &said),
    }
}

fn failed(path: &str, said: &str) -> Check {
    Check::new(GROUP, "libcudart", Status::Missing, format!("does not start: {path}: {said}"))
        .mend_as_said(format!(
            "kedge run -- kedge probe runtime {path}; kedge logs    (and report it)"
        ))
}

/// All of them, each once however many names it has, in the order of their paths.
pub(super) fn find() -> Vec<PathBuf> {
    // The real file → the shortest name of it.
    let mut found = BTreeMap::<PathBuf, PathBuf>::new();
    let mut add = |path: PathBuf| {
        if let Ok(real) = path.canonicalize() {
            found.entry(real).or_insert(path);
        }
    };
    loader_cache().into_iter().for_each(&mut add);
    for dir in folders() {
        runtimes_in(&dir).into_iter().for_each(&mut add);
    }
    found.into_values().collect()
}

fn is_runtime(name: &str) -> bool {
    name.starts_with("libcudart.so") || (name.starts_with("libcudart-") && name.contains(".so"))
}

fn runtimes_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_runtime))
        .collect();
    paths.sort();
    paths
}

/// What the loader knows without being told.
fn loader_cache() -> Vec<PathBuf> {
    let known = loader::libraries().into_iter();
    known.filter(|(name, _)| name.starts_with("libcudart.so")).map(|(_, path)| path).collect()
}

/// Where runtimes are installed by hand, by packages and by pip.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Some(path) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.extend(std::env::split_paths(&path));
    }
    let toolkits = subfolders(Path::new("/usr/local"), |name| name.starts_with("cuda"));
    let toolkits = toolkits.into_iter().chain(std::env::var_os("CUDA_HOME").map(PathBuf::from));
    folders.extend(toolkits.map(|toolkit| toolkit.join("lib64")));
    folders.push("/usr/lib/x86_64-linux-gnu".into());
    for tools in checkouts() {
        folders.extend(subfolders(&tools.join("cudart"), |_| true));
        for python in subfolders(&tools.join("cuda/lib"), |name| name.starts_with("python")) {
            folders.extend(wheels(&python.join("site-packages")));
        }
    }
    for site in site_packages() {
        folders.extend(wheels(&site));
    }
    folders
}

/// The folders of one site-packages in which wheels bring a runtime.
fn wheels(site: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = subfolders(&site.join("nvidia"), |_| true)
        .into_iter()
        .map(|package| package.join("lib"))
        .collect();
    folders.push(site.join("torch/lib"));
    folders
}

fn subfolders(dir: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

/// What python3 searches; nothing where there is no python3.
fn site_packages() -> Vec<PathBuf> {
    let script = "import sys; print('\\n'.join(sys.path))";
    let output = Command::new("python3").args(["-c", script]).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().filter(|line| line.ends_with("-packages")).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_known_by_name() {
        for name in ["libcudart.so", "libcudart.so.13", "libcudart-d0da41ae.so.11.0"] {
            assert!(is_runtime(name), "{name}");
        }
        for name in ["libcudart_static.a", "libcublas.so.12", "libcudart-notes.txt"] {
            assert!(!is_runtime(name), "{name}");
        }
    }
}
