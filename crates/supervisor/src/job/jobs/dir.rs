//! The folder of a job that runs, and what is in it.

use super::lock::{is_locked, stays_locked};
use super::{CHECKPOINTS, JobError, Meta, NVML_SOCKET, State};
use super::{former, io_error, now, private_dir, read_meta, replace};
use crate::job::parts::Parts;
use rustix::io::FdFlags;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What the folder is called of what the job's programs find first on their PATH.
pub(super) const COMMANDS: &str = "bin";

/// A running job's folder, locked while this lives.
#[derive(Debug)]
pub(crate) struct JobDir {
    pub(super) dir: PathBuf,
    pub(super) lock: File,
}

impl JobDir {
    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    pub(crate) fn last_image(&self) -> PathBuf {
        self.dir.join("last.json")
    }

    /// Where checkpoints are counted.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.dir.join(CHECKPOINTS)
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Where the images are noted that the job can go back to.
    pub(crate) fn images(&self) -> PathBuf {
        self.dir.join("images.json")
    }

    /// Where the job's keeper answers.
    pub(crate) fn keeper(&self) -> PathBuf {
        self.dir.join("keeper")
    }

    /// Where questions to NVIDIA's management library are answered.
    pub(crate) fn nvml(&self) -> PathBuf {
        self.dir.join(NVML_SOCKET)
    }

    /// Where the job's own keeper of warm proxies answers.
    pub(crate) fn warm(&self) -> PathBuf {
        self.dir.join("warm")
    }

    /// What the keeper holds.
    pub(crate) fn held(&self) -> PathBuf {
        self.dir.join("held.json")
    }

    /// There when the job's devices are lost and it goes back.
    pub(crate) fn lost(&self) -> PathBuf {
        self.dir.join("lost")
    }

    /// Where proxies tell what they have counted.
    pub(crate) fn stats(&self) -> PathBuf {
        self.dir.join("stats")
    }

    /// Where proxies tell what is wrong with a program that is checked.
    pub(crate) fn findings(&self) -> PathBuf {
        self.dir.join("findings")
    }

    /// Where proxies tell what a traced program does.
    pub(crate) fn trace(&self) -> PathBuf {
        self.dir.join("trace")
    }

    /// Makes a folder for what proxies tell, as nobody but the user may see it.
    pub(crate) fn make(&self, path: PathBuf) -> Result<PathBuf, JobError> {
        DirBuilder::new().mode(0o700).create(&path).map_err(io_error(&path))?;
        Ok(path)
    }

    /// What says whose the folder is.
    pub(crate) fn lock(&self) -> RawFd {
        self.lock.as_raw_fd()
    }

    /// Whether a process that takes this one's place has the lock too.
    pub(crate) fn stays_open(&self, stays: bool) -> io::Result<()> {
        let flags = if stays { FdFlags::empty() } else { FdFlags::CLOEXEC };
        Ok(rustix::io::fcntl_setfd(&self.lock, flags)?)
    }

    /// Whether some process supervises the job: asked where the lock is not held.
    pub(crate) fn is_supervised(&self) -> bool {
        is_locked(&self.dir)
    }

    /// Removes what only a job that runs has.
    pub(super) fn clear(&self) {
        let sockets = [self.socket(), self.nvml(), self.control(), self.keeper()];
        for left in sockets.into_iter().chain([self.held(), self.lost(), self.next()]) {
            let _ = fs::remove_file(left);
        }
        crate::job::leaving::clear(&self.dir);
        former::clear_unfinished(&self.dir);
        kedge_control::session::clear(&self.dir);
        let told = [self.stats(), self.findings(), self.trace(), self.usage()];
        for folder in told.into_iter().chain([self.lib(), self.commands()]) {
            let _ = fs::remove_dir_all(folder);
        }
    }

    /// Notes that the job has ended as kedge itself has.
    pub(crate) fn note_failure(&self, code: u8) {
        self.note_end(State::Exited(code.into()));
    }

    /// Notes how the job ended, if nobody has.
    pub(crate) fn note_end(&self, state: State) {
        if let Some(mut meta) = read_meta(&self.dir).filter(|meta| meta.state == State::Running) {
            (meta.state, meta.ended) = (state, Some(now()));
            let _ = self.write_meta(&meta);
        }
    }

    pub(crate) fn lib(&self) -> PathBuf {
        self.dir.join("lib")
    }

    /// Makes `lib/` with the names under which programs look for the driver, and for NVML where
    /// there is kedge's.
    pub(crate) fn link_driver(&self, parts: &Parts) -> Result<(), JobError> {
        let lib = self.lib();
        // There already where an older image is tried next.
        fs::DirBuilder::new().recursive(true).create(&lib).map_err(io_error(&lib))?;
        let driver = ["libcuda.so.1", "libcuda.so"].map(|name| (name, &parts.shim));
        let nvml = parts.nvml.as_ref().map(|nvml| ("libnvidia-ml.so.1", nvml));
        for (name, library) in driver.into_iter().chain(nvml) {
            let link = lib.join(name);
            match std::os::unix::fs::symlink(library, &link) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => other.map_err(io_error(&link))?,
            }
        }
        Ok(())
    }

    /// Has what is in this folder found in `former` too, the folder that the job's processes know;
    /// what is for devices if it has any. `None` where that is another job's by now, or cannot be
    /// made.
    pub(crate) fn stand_in_for(&self, former: &Path, devices: bool) -> Option<StandIn> {
        if former == self.dir {
            return Some(StandIn::default());
        }
        let mut made = StandIn::default();
        private_job(former).ok()?;
        let another_s = stays_locked(former);
        let for_all = [(self.control(), "control"), (self.commands(), COMMANDS)];
        let for_devices =
            [(self.lib(), "lib"), (self.socket(), "socket"), (self.nvml(), NVML_SOCKET)];
        let for_devices = for_devices.into_iter().filter(|_| devices);
        for (own, name) in for_all.into_iter().chain(for_devices) {
            let link = former.join(name);
            let taken = link.is_symlink() && link.exists();
            if !taken && !another_s && is_left_over(&link) {
                // What a job that was killed has left leads nowhere. A folder of libraries leads
                // where its own kedge is, which is as good.
                let _ = fs::remove_file(&link);
            }
            match std::os::unix::fs::symlink(own, &link) {
                Ok(()) => made.links.push(link),
                Err(_) if link.is_dir() && !taken => {}
                Err(_) => return None,
            }
        }
        Some(made)
    }

    /// Returns the devices that the job is on, as `meta.json` says.
    pub(crate) fn gpu(&self) -> Option<String> {
        Some(read_meta(&self.dir)?.gpu)
    }

    /// Replaces `meta.json` as a whole.
    pub(crate) fn write_meta(&self, meta: &Meta) -> Result<(), JobError> {
        replace(&self.dir.join("meta.json"), meta)
    }

    /// The job has not come to be.
    pub(crate) fn remove_meta(&self) {
        let _ = fs::remove_file(self.dir.join("meta.json"));
    }

    /// Removes what only a running job needs; everything, of a job that never came to be: what an
    /// older one of its name had left is there again.
    pub(crate) fn retire(&self) {
        if !self.dir.join("meta.json").exists() {
            former::clear(&self.dir);
            if !former::put_back(&self.dir) {
                let _ = fs::remove_dir_all(&self.dir);
                return;
            }
        }
        former::forget(&self.dir);
        self.clear();
        let _ = fs::remove_file(self.warm());
        let _ = fs::remove_file(self.images());
    }
}

/// Links in a former job's folder, removed when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct StandIn {
    links: Vec<PathBuf>,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        for link in &self.links {
            let _ = fs::remove_file(link);
        }
    }
}

/// Makes the folder of a job of this user's that kedge has made before, and those that it lies in;
/// refuses what others can enter or have made.
fn private_job(path: &Path) -> Result<(), JobError> {
    let uid = rustix::process::geteuid().as_raw();
    let above = |path: &Path| path.parent().map(Path::to_owned).unwrap_or_default();
    let jobs = above(path);
    let base = above(&jobs);
    let outside = above(&base);
    if uid == 0 && !outside.ancestors().all(only_root_changes) {
        return Err(JobError::NotPrivate { path: outside });
    }
    DirBuilder::new().recursive(true).mode(0o700).create(&outside).map_err(io_error(&outside))?;
    [&base, &jobs, path].into_iter().try_for_each(|folder| private_dir(folder, uid))
}

/// Whether nobody but root can put another folder into the place of `path`; where there is none,
/// root makes it.
pub(super) fn only_root_changes(path: &Path) -> bool {
    const STICKY: u32 = 0o1000;
    let Ok(found) = fs::symlink_metadata(path) else { return true };
    let mode = found.permissions().mode();
    let shared = mode & 0o022 != 0 && mode & STICKY == 0;
    found.uid() == 0 && (found.is_symlink() || found.is_dir() && !shared)
}

/// Whether it is what a job's folder has at such a place: a link, or a socket.
fn is_left_over(path: &Path) -> bool {
    let kind = fs::symlink_metadata(path).map(|found| found.file_type());
    kind.is_ok_and(|kind| kind.is_symlink() || kind.is_socket())
}
