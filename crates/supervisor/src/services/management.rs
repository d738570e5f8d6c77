//! NVIDIA's management library (NVML), which programs ask beside the devices: the process that
//! answers them, and what of it a checkpoint finds in the job's processes.

use crate::base::sockets::{hand_over, leads_to, listen};
use crate::job::jobs::JobDir;
use crate::job::parts::Parts;
use kedge_control::gpu::GpuSpec;
use kedge_image::DeviceLimits;
use kedge_process::plugins::{Capture, Found, Job, PluginError, World};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the process may take to end.
const FAREWELL: Duration = Duration::from_secs(1);

/// The process that answers: a child that is none of the job's, and ends when this is dropped or
/// this process ends.
#[derive(Debug)]
pub(crate) struct Management {
    /// While it is open.
    connection: Option<UnixStream>,
    pid: u32,
}

impl Management {
    /// Starts it, for a job on these devices.
    pub(crate) fn start(
        dir: &JobDir,
        parts: &Parts,
        gpu: &GpuSpec,
        limits: &DeviceLimits,
    ) -> io::Result<Management> {
        let socket = dir.nvml();
        let _ = fs::remove_file(&socket);
        let listener = listen(&socket)?;
        let (connection, far) = UnixStream::pair()?;
        let log = || File::options().append(true).create(true).open(dir.log());
        let mut command = Command::new(&parts.proxy);
        command
            .args(["--management", "--fd", "3", "--gpu", &gpu.to_string()])
            .args(limits.soft_memory.iter().flat_map(|b| ["--soft-memory".into(), b.to_string()]))
            .arg("--log")
            .arg(dir.log())
            .stdin(Stdio::null())
            .stdout(log()?)
            .stderr(log()?);
        // Out of the terminal's reach, as a proxy.
        command.process_group(0);
        let fds = [far.as_raw_fd(), listener.as_raw_fd()];
        // SAFETY: the closure runs in the child between fork and exec and only makes system calls;
        // both descriptors outlive the spawn.
        unsafe { command.pre_exec(move || hand_over(fds)) };
        let pid = command.spawn()?.id();
        // Where memory runs out, it goes before the program.
        let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), "1000");
        Ok(Management { connection: Some(connection), pid })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for Management {
    /// Sees it off, so that no zombie is left to an init that may not care.
    fn drop(&mut self) {
        self.connection = None;
        let (begin, none) = (Instant::now(), std::ptr::null_mut());
        // SAFETY: a plain call on a child, which may have been collected with the job's.
        while unsafe { libc::waitpid(self.pid as i32, none, libc::WNOHANG) } == 0 {
            if begin.elapsed() > FAREWELL {
                return;
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// What a description of a job's is, as an image notes it: a connection to the process that
/// answers, or a path.
const CONNECTION: &str = "connection";

/// What of NVML's a descriptor leads to: the process that answers at `socket`; or a file of the
/// driver's, which NVIDIA's own library has open where a program has found that by its path.
pub(crate) fn opened(file: &Found, job: &Job, socket: &Path) -> Option<String> {
    if file.socket.is_some_and(|kind| kind.domain == libc::AF_UNIX) {
        let end = UnixStream::from(job.duplicate(file).ok()?);
        return leads_to(&end, socket).then(|| CONNECTION.to_owned());
    }
    let path = file.link.to_str().filter(|path| path.starts_with("/dev/nvidia"))?;
    (file.stat.mode & libc::S_IFMT == libc::S_IFCHR).then(|| path.to_owned())
}

/// What of it processes have open: descriptions, and what each is.
pub(crate) fn save(capture: &mut Capture, mine: &[usize], socket: &Path) -> Vec<(u32, String)> {
    let open =
        |index: &usize| Some((*index as u32, opened(capture.file(*index), capture.job, socket)?));
    let found: Vec<(u32, String)> = mine.iter().filter_map(open).collect();
    if let Some((index, _)) = found.iter().find(|(_, what)| what != CONNECTION) {
        let (pid, _) = capture.job.holder(capture.file(*index as usize));
        capture.warnings.push(format!(
            "process {pid} uses NVIDIA's management library (NVML) by a path of its own: after a restart its calls \
             fail until it starts the library again"
        ));
    }
    found
}

/// A connection comes back as one that is over, and kedge's library makes another for its next
/// question. A file is opened anew, which knows nothing of what was asked through the old one;
/// where it is not there, something that answers nothing.
pub(crate) fn reopen(description: u32, what: &str, world: &mut World) -> Result<(), PluginError> {
    let made: io::Result<OwnedFd> = match what {
        CONNECTION => UnixStream::pair().map(|(end, _)| end.into()),
        path => {
            let open = |path: &str| File::options().read(true).write(true).open(path);
            let named = Some(path).filter(|p| p.starts_with("/dev/nvidia") && !p.contains(".."));
            let file = named.and_then(|path| open(path).ok());
            file.map_or_else(|| open("/dev/null"), Ok).map(OwnedFd::from)
        }
    };
    let made = made.map_err(|source| PluginError::System {
        what: "make what stands for NVML".to_owned(),
        source,
    })?;
    world.made(description, made)
}
