//! kedge itself: its parts, its folder, a kernel on its device; and the compiler for programs.

use super::{Check, Status};
use crate::child::{Place, probe};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_supervisor::Parts;
use kedge_supervisor::jobs::Jobs;
use rustix::fs::statvfs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const GROUP: &str = "kedge";
/// Below this a job's log may be cut short.
const ROOM: u64 = 64 << 20;

/// What there is, and whether programs can be started.
pub(super) fn checks(gpu: &GpuSpec) -> (Vec<Check>, bool) {
    let mut checks = Vec::new();
    let found = match Parts::find() {
        Ok(parts) => {
            checks.push(check("driver", Status::Ok, parts.shim.display().to_string()));
            checks.push(check("proxy", Status::Ok, parts.proxy.display().to_string()));
            true
        }
        Err(error) => {
            let mend = "make build, or scripts/install PREFIX";
            checks.push(check("parts", Status::Missing, error.to_string()).mend(mend));
            false
        }
    };
    let folder = folder();
    let writable = folder.status != Status::Missing;
    checks.push(folder);
    let works = found && writable && {
        let kernel = kernel(gpu);
        let works = kernel.status == Status::Ok;
        checks.push(kernel);
        works
    };
    checks.push(compiler());
    (checks, works)
}

fn check(name: &str, status: Status, value: impl Into<String>) -> Check {
    Check::new(GROUP, name, status, value.into())
}

/// Where jobs are kept.
fn folder() -> Check {
    let jobs = match Jobs::open() {
        Ok(jobs) => jobs,
        Err(error) => {
            let mend = "export XDG_STATE_HOME=$(mktemp -d)";
            return check("jobs", Status::Missing, error.to_string()).mend(mend);
        }
    };
    let dir = jobs.dir();
    let free = statvfs(dir).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    if free < ROOM {
        let value = format!("{}: {} left, so logs may be cut short", dir.display(), Size(free));
        return check("jobs", Status::Note, value).mend(format!("df -h {}", dir.display()));
    }
    check("jobs", Status::Ok, dir.display().to_string())
}

/// Runs a kernel and checks what it computed.
fn kernel(gpu: &GpuSpec) -> Check {
    let start = Instant::now();
    let result =
        probe(Place::job(gpu.clone()), &["kernel".into()], Duration::from_secs(30), |_| {});
    let name = format!("kernel on {gpu}");
    match result {
        Ok(()) => {
            let value = format!("right, in {} ms from start to end", start.elapsed().as_millis());
            check(&name, Status::Ok, value)
        }
        Err(said) => check(&name, Status::Missing, said)
            .mend_as_said("kedge run -- PROGRAM; kedge logs    (and report what it says)"),
    }
}

/// Programs are compiled elsewhere too, so a missing compiler is only worth a note.
fn compiler() -> Check {
    let Some(nvcc) = nvcc_places().into_iter().find(|path| path.is_file()) else {
        let mend = "python3 -m venv cuda && cuda/bin/pip install nvidia-cuda-nvcc nvidia-cuda-cccl";
        let value = "none found: only programs that are compiled already run here";
        return check("nvcc", Status::Note, value).mend(mend);
    };
    let said = Command::new(&nvcc).arg("--version").output();
    let text = said.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    match text.split("release ").nth(1).and_then(|rest| rest.split(',').next()) {
        Some(version) => check("nvcc", Status::Ok, format!("{version} ({})", nvcc.display())),
        None => check("nvcc", Status::Note, format!("{} does not run", nvcc.display()))
            .mend(format!("{} --version", nvcc.display())),
    }
}

fn nvcc_places() -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> =
        std::env::var_os("NVCC").map(PathBuf::from).into_iter().collect();
    if let Some(path) = std::env::var_os("PATH") {
        places.extend(std::env::split_paths(&path).map(|dir| dir.join("nvcc")));
    }
    if let Some(home) = std::env::var_os("CUDA_HOME") {
        places.push(Path::new(&home).join("bin/nvcc"));
    }
    places.push("/usr/local/cuda/bin/nvcc".into());
    places.extend(checkouts().iter().map(|tools| tools.join("cu13/bin/nvcc")));
    places
}

/// The `.tools` folders that `make setup` fills: of the current folder, and of the checkout that
/// this kedge was built in.
pub(super) fn checkouts() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let exe = std::env::current_exe().ok();
    let built_in = exe.as_deref().and_then(|exe| exe.ancestors().nth(3)).map(Path::to_path_buf);
    for dir in [std::env::current_dir().ok(), built_in].into_iter().flatten() {
        let tools = dir.join(".tools");
        if tools.is_dir() && !found.contains(&tools) {
            found.push(tools);
        }
    }
    found
}
