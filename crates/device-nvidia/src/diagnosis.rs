//! Why a driver that is there does not start, in one line with its remedy.

use crate::presence::gpu_nodes;
use kedge_cuda_types::CuError;
use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The device nodes that every CUDA program opens.
const CONTROL: &[&str] = &["/dev/nvidiactl", "/dev/nvidia-uvm"];

/// A device node that the driver needs, and whether this user may open it.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    path: PathBuf,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Opens,
    Missing,
    /// Mode bits and owning group.
    Forbidden {
        mode: u32,
        gid: u32,
    },
    /// The mode allows it and the system does not: a device cgroup, most likely.
    Barred,
    Fails(i32),
}

/// What there is of the driver outside its library.
#[derive(Debug, Clone, Default)]
pub(crate) struct Installation {
    /// /proc/driver/nvidia is there.
    module: bool,
    control: Vec<Node>,
    gpus: Vec<Node>,
}

impl Installation {
    /// Looks, and opens every node. For when the driver has tried to already.
    pub(crate) fn look() -> Installation {
        Installation::by(state)
    }

    /// Looks without opening anything: that can wake a GPU, which takes seconds.
    pub(crate) fn look_without_opening() -> Installation {
        Installation::by(permission)
    }

    fn by(state: impl Fn(&Path) -> State) -> Installation {
        let node = |path: PathBuf| Node { state: state(&path), path };
        let mut gpus = gpu_nodes();
        gpus.sort();
        Installation {
            module: Path::new("/proc/driver/nvidia").exists(),
            control: CONTROL.iter().map(PathBuf::from).map(node).collect(),
            gpus: gpus.into_iter().map(node).collect(),
        }
    }

    fn on_windows(&self) -> bool {
        self.gpus.iter().any(|node| node.path.ends_with("dxg"))
    }

    /// One line: what no driver can start without, and what mends it.
    pub(crate) fn obstacle(&self) -> Option<String> {
        if self.on_windows() {
            return None;
        }
        if !self.module {
            let line =
                "the NVIDIA kernel module is not loaded: `sudo modprobe nvidia`, or use --gpu soft";
            return Some(line.into());
        }
        if let Some(bad) = self.control.iter().chain(&self.gpus).find_map(Node::complaint) {
            return Some(bad);
        }
        let none = "no GPU has a device node (/dev/nvidia0): `sudo nvidia-smi` makes them; a container \
                    needs the GPU passed in (--gpus all)";
        self.gpus.is_empty().then(|| none.into())
    }

    /// One line: why cuInit failed with `error`, and what mends it.
    pub(crate) fn explain(&self, error: CuError) -> String {
        if self.on_windows() {
            return format!("the NVIDIA driver does not start: {error}; run nvidia-smi on Windows");
        }
        if let Some(obstacle) = self.obstacle() {
            return obstacle;
        }
        match error {
            CuError::NO_DEVICE => {
                "the NVIDIA driver finds no GPU: see `nvidia-smi`, or use --gpu soft".into()
            }
            CuError::SYSTEM_DRIVER_MISMATCH => "the NVIDIA kernel module and libcuda.so.1 are of \
                 different versions: restart the machine after a driver update"
                .into(),
            CuError::SYSTEM_NOT_READY => {
                "the NVIDIA fabric manager is not running: `sudo systemctl \
                 start nvidia-fabricmanager`"
                    .into()
            }
            error => format!(
                "the NVIDIA driver does not start: {error}; see `nvidia-smi` and the kernel's log"
            ),
        }
    }
}

impl Node {
    fn complaint(&self) -> Option<String> {
        let path = self.path.display();
        Some(match self.state {
            State::Opens => return None,
            State::Missing => format!("{path} is missing: `sudo nvidia-modprobe -u -c 0` makes it"),
            State::Forbidden { mode, gid: 0 } => format!(
                "this user may not open {path} (mode {mode:04o}): `sudo chmod 0666 {path}`, or use --gpu soft"
            ),
            State::Forbidden { mode, gid } => format!(
                "this user may not open {path} (mode {mode:04o}): join its group (`sudo usermod -aG \
                 {} $USER`, then log in again), or use --gpu soft",
                group(gid)
            ),
            State::Barred => format!(
                "{path} is closed to this process by its cgroup: ask the batch system for a GPU, pass \
                 it into the container (--gpus all), or use --gpu soft"
            ),
            State::Fails(errno) => {
                let error = io::Error::from_raw_os_error(errno);
                format!("{path} cannot be opened: {error}; see the kernel's log")
            }
        })
    }
}

fn state(path: &Path) -> State {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => State::Opens,
        Err(error) => refused(path, &error),
    }
}

/// As [`state`], by what the mode says.
fn permission(path: &Path) -> State {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return State::Missing };
    // SAFETY: a C string.
    match unsafe { libc::access(name.as_ptr(), libc::R_OK | libc::W_OK) } {
        0 => State::Opens,
        _ => refused(path, &io::Error::last_os_error()),
    }
}

fn refused(path: &Path, error: &io::Error) -> State {
    let errno = error.raw_os_error().unwrap_or(0);
    match (errno, fs::metadata(path)) {
        (libc::ENOENT | libc::ENXIO | libc::ENODEV, _) => State::Missing,
        (libc::EACCES, Ok(found)) => {
            let mode = found.permissions().mode() & 0o7777;
            State::Forbidden { mode, gid: found.gid() }
        }
        (libc::EPERM, _) => State::Barred,
        _ => State::Fails(errno),
    }
}

/// A group's name, or its number.
fn group(gid: u32) -> String {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let found = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
    });
    found.unwrap_or_else(|| gid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, state: State) -> Node {
        Node { path: path.into(), state }
    }

    fn with_gpu(state: State) -> Installation {
        let control = vec![node("/dev/nvidiactl", State::Opens)];
        Installation { module: true, control, gpus: vec![node("/dev/nvidia0", state)] }
    }

    #[test]
    fn each_obstacle_is_one_line_with_its_remedy() {
        let no = CuError::NO_DEVICE;
        let without_gpu = Installation { gpus: vec![], ..with_gpu(State::Opens) };
        let barred = node("/dev/nvidiactl", State::Barred);
        let barred = Installation { control: vec![barred], ..with_gpu(State::Opens) };
        for (found, error, wanted) in [
            (Installation::default(), no, "modprobe nvidia"),
            (without_gpu, no, "--gpus all"),
            (barred, no, "/dev/nvidiactl is closed"),
            (with_gpu(State::Missing), no, "nvidia-modprobe"),
            (with_gpu(State::Forbidden { mode: 0o660, gid: 0 }), no, "(mode 0660): `sudo chmod"),
            (with_gpu(State::Forbidden { mode: 0o660, gid: 1 }), no, "usermod -aG"),
            (with_gpu(State::Barred), no, "batch system"),
            (with_gpu(State::Fails(libc::EIO)), no, "kernel's log"),
            (with_gpu(State::Opens), no, "--gpu soft"),
            (with_gpu(State::Opens), CuError::SYSTEM_DRIVER_MISMATCH, "restart"),
            (with_gpu(State::Opens), CuError::SYSTEM_NOT_READY, "fabricmanager"),
            (with_gpu(State::Opens), CuError::UNKNOWN, "nvidia-smi"),
        ] {
            let said = found.explain(error);
            assert!(found.obstacle().is_none_or(|obstacle| obstacle == said));
            assert!(said.contains(wanted) && !said.contains('\n'), "{wanted}: {said}");
        }
    }

    #[test]
    fn a_node_is_what_opening_it_says() {
        for look in [state, permission] {
            assert_eq!(look(Path::new("/dev/null")), State::Opens);
            assert_eq!(look(Path::new("/dev/nvidia-no-such")), State::Missing);
        }
        assert_eq!(group(0), "root");
    }
}
