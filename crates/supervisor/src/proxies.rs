//! The job's socket, and a proxy for each client that connects to it.

use crate::jobs::JobDir;
use crate::parts::Parts;
use kedge_image::DeviceLimits;
use kedge_proxy::backend::GpuSpec;
use kedge_proxy::control::Control;
use kedge_proxy::joblog::JobLog;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Clients of one job at a time.
const MAX_PROXIES: usize = 512;
/// The descriptor under which a proxy finds its client's socket; the next is the supervisor's.
const PROXY_FD: RawFd = 3;

/// The proxies that run; none, by default.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies {
    running: Running,
}

/// By their process ids.
type Running = Arc<Mutex<BTreeMap<u32, Arc<Control>>>>;

/// What a proxy is started with.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    executable: PathBuf,
    arguments: Vec<OsString>,
    log_path: PathBuf,
    /// Its mappings are not placed at random: the driver puts variables and tables of modules into them,
    /// and the program has pointers to those, which a restart must find where they were.
    fixed_places: bool,
}

/// What gives each client that connects a proxy.
struct Starter {
    launch: Launch,
    log: Arc<JobLog>,
    /// A note for the log when the first client comes.
    first: Mutex<Option<String>>,
    running: Running,
}

impl Proxies {
    /// Gives each client that connects to the job's socket a proxy, on a thread of its own. `first` is a
    /// note for the log when the first client comes.
    pub(crate) fn serve(
        &self,
        listener: UnixListener,
        launch: Launch,
        log: Arc<JobLog>,
        first: Option<String>,
    ) -> io::Result<()> {
        let (first, running) = (Mutex::new(first), self.running.clone());
        let starter = Starter { launch, log, first, running };
        let thread = std::thread::Builder::new().name("accept".into());
        thread.spawn(move || starter.accept_all(&listener)).map(drop)
    }

    /// Whether no proxy runs.
    pub(crate) fn none(&self) -> bool {
        self.locked().is_empty()
    }

    /// Whether `pid`, which has ended, was a proxy.
    pub(crate) fn ended(&self, pid: u32) -> bool {
        self.locked().remove(&pid).is_some()
    }

    /// One that has taken the place of another.
    pub(crate) fn add(&self, pid: u32, control: Arc<Control>) {
        self.locked().insert(pid, control);
    }

    /// All of them; none can be started while this is held.
    pub(crate) fn locked(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Control>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Listens on the job's socket.
pub(crate) fn listen(socket: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(socket)?;
    // The folder is private already.
    std::fs::set_permissions(socket, PermissionsExt::from_mode(0o600))?;
    Ok(listener)
}

impl Launch {
    pub(crate) fn new(parts: &Parts, gpu: &GpuSpec, limits: &DeviceLimits, dir: &JobDir) -> Launch {
        let arguments = arguments(gpu, limits, dir);
        let fixed_places = matches!(gpu, GpuSpec::Local { .. });
        let executable = parts.proxy.clone();
        Launch { executable, arguments, log_path: dir.log(), fixed_places }
    }

    /// Starts a proxy that owns `client`, with `more` arguments: its process id, and what gives it orders.
    pub(crate) fn start(
        &self,
        client: BorrowedFd<'_>,
        more: &[&str],
    ) -> io::Result<(u32, Arc<Control>)> {
        let (control, orders) = Control::pair()?;
        let mut command = Command::new(&self.executable);
        command
            .args(&self.arguments)
            .args(more)
            // It chooses among the job's devices, for each client by the client's own environment.
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::null())
            .stdout(self.log_file()?)
            .stderr(self.log_file()?)
            // Out of the terminal's reach: a key that ends the program must not end its proxy first.
            .process_group(0);
        let fds = [client.as_raw_fd(), orders.as_raw_fd()];
        let fixed_places = self.fixed_places;
        // SAFETY: the closure runs in the child between fork and exec and only makes system calls;
        // `client` and `orders` outlive the spawn.
        unsafe {
            command.pre_exec(move || {
                if fixed_places {
                    fix_places();
                }
                hand_over(fds)
            });
        }
        Ok((command.spawn()?.id(), Arc::new(control)))
    }

    /// Where the proxy's last words go, should it abort.
    fn log_file(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).open(&self.log_path)
    }
}

fn arguments(gpu: &GpuSpec, limits: &DeviceLimits, dir: &JobDir) -> Vec<OsString> {
    let mut list: Vec<OsString> =
        vec!["--fd".into(), PROXY_FD.to_string().into(), "--gpu".into(), gpu.to_string().into()];
    let sizes = [
        ("--soft-memory", limits.soft_memory),
        ("--cache-gpu", limits.cache_gpu),
        ("--cache-host", limits.cache_host),
        ("--drain-rate", limits.drain_rate),
    ];
    for (option, size) in sizes {
        list.extend(size.into_iter().flat_map(|size| [option.into(), size.to_string().into()]));
    }
    list.extend(limits.digests.then(|| "--digests".into()));
    list.extend(["--control".into(), "--log".into(), dir.log().into_os_string()]);
    list.extend(["--keeper".into(), dir.keeper().into_os_string()]);
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
        let (pid, control) = self.launch.start(client.as_fd(), &[])?;
        running.insert(pid, control);
        Ok(())
    }
}

/// In the child: no random places from exec on. Where that is not allowed, a restart is what finds out.
fn fix_places() {
    const ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: plain calls.
    unsafe {
        let now = libc::personality(ASK);
        if now >= 0 {
            libc::personality(now as libc::c_ulong | libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
        }
    }
}

/// In the child: gives both sockets their agreed numbers, open across exec.
fn hand_over(fds: [RawFd; 2]) -> io::Result<()> {
    // SAFETY: plain system calls on descriptors of the child. Both are moved out of the way first: one
    // may have the other's number.
    let failed = unsafe {
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        let away = fds.map(|fd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, PROXY_FD + 2));
        let placed = |(number, fd)| fd >= 0 && libc::dup2(fd, number) >= 0;
        !(PROXY_FD..).zip(away).all(placed)
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
