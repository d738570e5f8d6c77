//! The job's socket, and a proxy for each client that connects to it.

use crate::base::signals::look_at_children;
use crate::base::sockets::{FIRST_FD, hand_over};
use crate::job::jobs::JobDir;
use crate::job::outcome::Outcome;
use crate::job::parts::Parts;
use crate::services::starting::{fix_places, show_only};
use crate::services::warm::{Leaving, Sources, WarmProxy};
use kedge_control::check::Check;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::Control;
use kedge_control::{error, note};
use kedge_image::DeviceLimits;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Clients of one job at a time.
const MAX_PROXIES: usize = 512;

/// The proxies that run; none, by default.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies {
    running: Running,
    /// Those that have ended and are no children, and how.
    left: Arc<Mutex<Vec<(ProxyId, Outcome)>>>,
    /// What new ones are started with.
    launch: Arc<Mutex<Option<Launch>>>,
}

pub(crate) type Known = BTreeMap<ProxyId, Arc<Proxy>>;
type Running = Arc<Mutex<Known>>;

/// What a proxy is known by: a process id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProxyId {
    /// Of a child.
    Child(u32),
    /// Of one that was ready before, which is no child and may have another id in this namespace,
    /// or none.
    Warm(u32),
}

impl fmt::Display for ProxyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ProxyId::Child(pid) | ProxyId::Warm(pid)) = self;
        write!(f, "{pid}")
    }
}

/// One that runs.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) id: ProxyId,
    /// What gives it orders.
    pub(crate) control: Control,
    /// Where its devices are.
    pub(crate) place: PlaceId,
    /// How one that is no child is seen to end.
    leaving: Option<Leaving>,
}

/// Tells the places apart that the devices of a job have come to, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaceId(u64);

impl PlaceId {
    /// Another one than all before.
    fn new() -> PlaceId {
        static LAST: AtomicU64 = AtomicU64::new(0);
        PlaceId(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

impl Proxy {
    pub(crate) fn pid(&self) -> u32 {
        let (ProxyId::Child(pid) | ProxyId::Warm(pid)) = self.id;
        pid
    }

    /// Returns what means this process even when its id means another.
    pub(crate) fn process(&self) -> io::Result<OwnedFd> {
        if let Some(leaving) = &self.leaving {
            return leaving.process();
        }
        let pid = Pid::from_raw(self.pid() as i32).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_open(pid, PidfdFlags::empty())?)
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        match (&self.leaving, self.id) {
            (Some(leaving), _) => leaving.is_over(),
            (None, ProxyId::Child(pid)) => has_ended(pid),
            (None, ProxyId::Warm(_)) => false,
        }
    }

    /// Whether it ends within `limit`.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let begin = Instant::now();
        while !self.is_over() {
            if begin.elapsed() > limit {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// A proxy's option for its devices.
const GPU: &str = "--gpu";

/// What a proxy is started with.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    executable: PathBuf,
    arguments: Vec<OsString>,
    pub(crate) place: PlaceId,
    log_path: PathBuf,
    /// Where there may be some that are ready.
    warm: Option<Arc<Sources>>,
    /// Which GPUs the driver shows it: see [`show_only`].
    shown: Option<String>,
    /// Its mappings are not placed at random: the driver puts variables and tables of modules into
    /// them, and the program has pointers to those, which a restart must find where they were.
    fixed_places: bool,
}

/// What gives each client that connects a proxy.
struct Starter {
    log: Arc<JobLog>,
    /// A note for the log when the first client comes.
    first: Mutex<Option<String>>,
    proxies: Proxies,
}

impl Proxies {
    /// Gives each client that connects to the job's socket a proxy, on a thread of its own. `first`
    /// is a note for the log when the first client comes.
    pub(crate) fn serve(
        &self,
        listener: UnixListener,
        launch: Launch,
        log: Arc<JobLog>,
        first: Option<String>,
    ) -> io::Result<()> {
        let (first, proxies) = (Mutex::new(first), self.clone());
        self.launch_by(launch);
        let starter = Starter { log, first, proxies };
        let thread = thread::Builder::new().name("accept".into());
        thread.spawn(move || starter.accept_all(&listener)).map(drop)
    }

    /// What new ones are started with, once the job has a socket to ask for them.
    pub(crate) fn launch(&self) -> Option<Launch> {
        self.launch.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on new ones are started so.
    pub(crate) fn launch_by(&self, launch: Launch) {
        *self.launch.lock().unwrap_or_else(PoisonError::into_inner) = Some(launch);
    }

    /// Whether no proxy runs.
    pub(crate) fn none(&self) -> bool {
        self.locked().is_empty()
    }

    /// Whether the child `pid`, which has ended, was a proxy.
    pub(crate) fn ended(&self, pid: u32) -> Option<ProxyId> {
        let id = ProxyId::Child(pid);
        self.locked().remove(&id).map(|_| id)
    }

    /// Those that have ended and were no children, and how: told once.
    pub(crate) fn take_left(&self) -> Vec<(ProxyId, Outcome)> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = std::mem::take(&mut *left);
        let mut running = self.locked();
        // One whose client has moved is none of the job's.
        left.retain(|(id, _)| running.remove(id).is_some());
        left
    }

    /// One that has taken the place of another.
    pub(crate) fn add(&self, proxy: Arc<Proxy>) -> io::Result<()> {
        self.locked().insert(proxy.id, proxy.clone());
        self.watch(proxy)
    }

    /// Has a thread see the end of one that is no child.
    fn watch(&self, proxy: Arc<Proxy>) -> io::Result<()> {
        if proxy.leaving.is_none() {
            return Ok(());
        }
        let left = self.left.clone();
        let watch = move || {
            let Some(outcome) = proxy.leaving.as_ref().map(Leaving::wait) else { return };
            left.lock().unwrap_or_else(PoisonError::into_inner).push((proxy.id, outcome));
            look_at_children();
        };
        thread::Builder::new().name("proxy".into()).stack_size(64 << 10).spawn(watch).map(drop)
    }

    /// All of them; none can be started while this is held.
    pub(crate) fn locked(&self) -> MutexGuard<'_, Known> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process ids of those that are children.
    pub(crate) fn children(known: &Known) -> Vec<u32> {
        let child = |id: &ProxyId| match id {
            ProxyId::Child(pid) => Some(*pid),
            ProxyId::Warm(_) => None,
        };
        known.keys().filter_map(child).collect()
    }
}

/// Whether a child of this process has ended.
pub(crate) fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

impl Launch {
    pub(crate) fn new(parts: &Parts, gpu: &GpuSpec, limits: &DeviceLimits, dir: &JobDir) -> Launch {
        let arguments = arguments(gpu, limits, dir);
        let fixed_places = matches!(gpu, GpuSpec::Local { .. });
        let executable = parts.proxy.clone();
        let (log_path, shown) = (dir.log(), gpu.shown());
        let (place, warm) = (PlaceId::new(), None);
        Launch { executable, arguments, place, log_path, warm, shown, fixed_places }
    }

    /// The same, at another place that is like this one.
    pub(crate) fn elsewhere(self) -> Launch {
        Launch { place: PlaceId::new(), ..self }
    }

    /// The same, where some may be ready.
    pub(crate) fn with_warm(self, warm: Sources) -> Launch {
        Launch { warm: Some(Arc::new(warm)), ..self }
    }

    /// The same, with what proxies count told in a folder.
    pub(crate) fn with_stats(mut self, folder: &Path) -> Launch {
        self.arguments.extend(["--stats".into(), folder.into()]);
        self
    }

    /// The same, with the program checked, and what is found told in a folder. None are ready for
    /// that.
    pub(crate) fn with_check(mut self, check: Check, folder: &Path) -> Launch {
        self.arguments.extend(["--check".into(), check.words().into()]);
        self.arguments.extend(["--findings".into(), folder.into()]);
        self.cold()
    }

    /// The same, with what clients do told in a folder, in so many bytes each at most.
    pub(crate) fn with_trace(mut self, folder: &Path, limit: u64) -> Launch {
        self.arguments.extend(["--trace".into(), folder.into()]);
        self.arguments.extend(["--trace-limit".into(), limit.to_string().into()]);
        self
    }

    /// The same, on other devices, of which none are ready.
    pub(crate) fn on(self, gpu: &GpuSpec) -> Launch {
        let mut arguments = self.arguments;
        if let Some(place) = arguments.iter().position(|argument| argument == GPU)
            && let Some(value) = arguments.get_mut(place + 1)
        {
            *value = gpu.to_string().into();
        }
        let fixed_places = matches!(gpu, GpuSpec::Local { .. });
        Launch { arguments, warm: None, shown: gpu.shown(), fixed_places, ..self }
    }

    /// The same, where none is: another process is the one that can ask.
    pub(crate) fn cold(self) -> Launch {
        Launch { warm: None, ..self }
    }

    /// Tells the job's log, where nobody else has it open.
    pub(crate) fn note(&self, text: &str) {
        if let Ok(log) = JobLog::open(&self.log_path, "init".to_owned()) {
            note!(log, "{text}");
        }
    }

    /// Proxies that are ready, so many or as many as there are.
    pub(crate) fn warm(&self, count: usize) -> Vec<WarmProxy> {
        self.warm.as_ref().map_or_else(Vec::new, |warm| warm.take_some(count))
    }

    /// Has a proxy own `client`, with `more` arguments: one that is ready, or a new one.
    pub(crate) fn provide(
        &self,
        ready: Option<WarmProxy>,
        client: BorrowedFd<'_>,
        more: &[&str],
    ) -> io::Result<Arc<Proxy>> {
        let served = ready.and_then(|ready| {
            let pid = ready.pid;
            let arguments: Vec<OsString> =
                self.arguments.iter().cloned().chain(more.iter().map(Into::into)).collect();
            // The log of the job has why it was made in vain.
            let (control, leaving) = ready.serve(client, &arguments).ok()?;
            let (id, leaving) = (ProxyId::Warm(pid), Some(leaving));
            Some(Proxy { id, control, place: self.place, leaving })
        });
        served.map_or_else(|| self.start(client, more), Ok).map(Arc::new)
    }

    /// Starts a proxy that owns `client`, with `more` arguments.
    fn start(&self, client: BorrowedFd<'_>, more: &[&str]) -> io::Result<Proxy> {
        let (control, orders) = Control::pair()?;
        let mut command = Command::new(&self.executable);
        command
            .args(&self.arguments)
            .args(more)
            .stdin(Stdio::null())
            .stdout(self.log_file()?)
            .stderr(self.log_file()?)
            // Out of the terminal's reach: a key that ends the program must not end its proxy
            // first.
            .process_group(0);
        show_only(&mut command, self.shown.as_deref());
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
        let id = ProxyId::Child(command.spawn()?.id());
        Ok(Proxy { id, control, place: self.place, leaving: None })
    }

    /// Where the proxy's last words go, should it abort.
    fn log_file(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).open(&self.log_path)
    }
}

fn arguments(gpu: &GpuSpec, limits: &DeviceLimits, dir: &JobDir) -> Vec<OsString> {
    let mut list: Vec<OsString> =
        vec!["--fd".into(), FIRST_FD.to_string().into(), GPU.into(), gpu.to_string().into()];
    let sizes = [
        ("--soft-memory", limits.soft_memory),
        ("--gpu-memory", limits.gpu_memory),
        ("--cache-gpu", limits.cache_gpu),
        ("--cache-host", limits.cache_host),
        ("--drain-rate", limits.drain_rate),
        ("--reconnect-ms", limits.reconnect_ms),
    ];
    for (option, size) in sizes {
        list.extend(size.into_iter().flat_map(|size| [option.into(), size.to_string().into()]));
    }
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
                        error!(self.log, "cannot serve a client: {error}");
                    }
                }
                Err(error) => {
                    error!(self.log, "cannot accept a client: {error}");
                    // Out of descriptors, most likely: does not get better by asking faster.
                    thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    /// Starts a proxy that owns `client`; this process's copy of the socket closes on return.
    fn serve(&self, client: UnixStream) -> io::Result<()> {
        if !kedge_socket::is_own_user(client.as_fd())? {
            return Err(io::Error::other("it belongs to another user"));
        }
        let launch = || self.proxies.launch().ok_or(io::ErrorKind::NotConnected);
        let before = launch()?;
        let ready = before.warm(1).pop();
        // Held while starting, so that a proxy that ends at once is known when it is reaped; and
        // one that is not where the job is by now, to whoever moves it there.
        let mut running = self.proxies.locked();
        let launch = launch()?;
        let ready = ready.filter(|_| launch.place == before.place);
        if running.len() >= MAX_PROXIES {
            return Err(io::Error::other(format!("the job has {MAX_PROXIES} clients already")));
        }
        if let Some(note) = self.first.lock().unwrap_or_else(PoisonError::into_inner).take() {
            note!(self.log, "{note}");
        }
        let proxy = launch.provide(ready, client.as_fd(), &[])?;
        running.insert(proxy.id, proxy.clone());
        drop(running);
        self.proxies.watch(proxy)
    }
}
