//! The job's socket, and a proxy for each client that connects to it.

use crate::RunError;
use crate::jobs::JobDir;
use crate::parts::Parts;
use kedge_proxy::backend::GpuSpec;
use kedge_proxy::joblog::JobLog;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Clients of one job at a time.
const MAX_PROXIES: usize = 512;
/// The descriptor under which a proxy finds its client's socket.
const PROXY_FD: RawFd = 3;

/// The proxies that run; none, by default.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies {
    running: Arc<Mutex<HashSet<u32>>>,
}

/// What starting a proxy needs.
struct Starter {
    executable: PathBuf,
    arguments: Vec<OsString>,
    log_path: PathBuf,
    log: Arc<JobLog>,
    /// A note for the log when the first client comes.
    first: Mutex<Option<String>>,
    running: Arc<Mutex<HashSet<u32>>>,
}

impl Proxies {
    /// Listens on the job's socket, on a thread of its own. `first` is a note for the log when the first
    /// client comes.
    pub(crate) fn listen(
        dir: &JobDir,
        parts: &Parts,
        gpu: &GpuSpec,
        soft_memory: Option<u64>,
        log: Arc<JobLog>,
        first: Option<String>,
    ) -> Result<Proxies, RunError> {
        let path = dir.socket();
        let bad = |source| RunError::Listen { path: path.clone(), source };
        let listener = UnixListener::bind(&path).map_err(bad)?;
        // The folder is private already.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).map_err(bad)?;
        let running = Arc::<Mutex<HashSet<u32>>>::default();
        let starter = Starter {
            executable: parts.proxy.clone(),
            arguments: arguments(gpu, soft_memory, dir),
            log_path: dir.log(),
            log,
            first: Mutex::new(first),
            running: running.clone(),
        };
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || starter.accept_all(&listener))
            .map_err(|source| RunError::System { what: "start a thread", source })?;
        Ok(Proxies { running })
    }

    /// Whether no proxy runs.
    pub(crate) fn none(&self) -> bool {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether `pid`, which has ended, was a proxy.
    pub(crate) fn ended(&self, pid: u32) -> bool {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid)
    }
}

fn arguments(gpu: &GpuSpec, soft_memory: Option<u64>, dir: &JobDir) -> Vec<OsString> {
    let mut list: Vec<OsString> =
        vec!["--fd".into(), PROXY_FD.to_string().into(), "--gpu".into(), gpu.to_string().into()];
    if let Some(size) = soft_memory {
        list.extend(["--soft-memory".into(), size.to_string().into()]);
    }
    list.extend(["--log".into(), dir.log().into_os_string()]);
    list
}

impl Starter {
    fn accept_all(&self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((client, _)) => {
                    if let Err(error) = self.serve(client) {
                        self.log.line(&format!("cannot serve a client: {error}"));
                    }
                }
                Err(error) => {
                    self.log.line(&format!("cannot accept a client: {error}"));
                    // Out of descriptors, most likely: does not get better by asking faster.
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    /// Starts a proxy that owns `client`; this process's copy of the socket closes on return.
    fn serve(&self, client: UnixStream) -> io::Result<()> {
        // SAFETY: a plain call.
        let uid = unsafe { libc::geteuid() };
        if kedge_transport::peer_uid(client.as_fd())? != uid {
            return Err(io::Error::other("it belongs to another user"));
        }
        // Held while starting, so that a proxy that ends at once is known when it is reaped.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.len() >= MAX_PROXIES {
            return Err(io::Error::other(format!("the job has {MAX_PROXIES} clients already")));
        }
        if let Some(note) = self.first.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.log.note(&note);
        }
        let mut command = Command::new(&self.executable);
        command
            .args(&self.arguments)
            // It chooses among the job's devices, for each client by the client's own environment.
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::null())
            .stdout(self.log_file()?)
            .stderr(self.log_file()?)
            // Out of the terminal's reach: a key that ends the program must not end its proxy first.
            .process_group(0);
        let fd = client.as_raw_fd();
        // SAFETY: the closure runs in the child between fork and exec and only makes system calls;
        // `client` outlives the spawn.
        unsafe {
            command.pre_exec(move || hand_over(fd));
        }
        running.insert(command.spawn()?.id());
        Ok(())
    }

    /// Where the proxy's last words go, should it abort.
    fn log_file(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).open(&self.log_path)
    }
}

/// In the child: gives the socket its agreed number, open across exec.
fn hand_over(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain system calls on descriptors of the child.
    let failed = unsafe {
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        match fd {
            PROXY_FD => libc::fcntl(fd, libc::F_SETFD, 0) < 0,
            _ => libc::dup2(fd, PROXY_FD) < 0,
        }
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
