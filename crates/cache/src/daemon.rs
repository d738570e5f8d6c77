//! The daemon of a cache: takes over what a killed one left, mounts, serves, drains and ends.

use crate::CacheError;
use crate::adopt::{self, Recovered};
use crate::control::{self, Answer, Ask, SOCKET};
use crate::engine::{Engine, Unclaimed};
use crate::faults::Faults;
use crate::home;
use crate::lease;
use crate::mount::Mount;
use crate::moves::{self, Watched};
use crate::nodes::Nodes;
use crate::partner::{self, Link};
use crate::spec::{Fsync, Medium, Spec, TierSpec, home_in, memory_home};
use crate::tier::{lock, make_home};
use fuser::{Config, INodeNo, MountOption, Notifier, Session, SessionACL};
use nix::sys::signal::{SigSet, Signal};
use rustix::mount::UnmountFlags;
use rustix::process::{Resource, Rlimit};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// The mount's type, after `fuse.`.
const SUBTYPE: &str = "kedge";
/// Threads that answer the kernel's requests.
const FUSE_THREADS: usize = 8;
/// Descriptors that the daemon asks for; its limit may allow fewer.
const MAX_DESCRIPTORS: u64 = 1 << 20;
/// The interval at which threads look at the host's memory, leases, journals and the device.
const TICK: Duration = Duration::from_millis(100);
/// How long a stop waits for programs that have files open there. A program that is being started
/// has its parent's files open for a moment.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long after an unmount a stop may take to report itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Which data without a file below a recovery discards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discard {
    /// Data whose file surely is gone.
    Gone,
    /// Also data whose file cannot be found or opened, and damaged data: a person has looked at it.
    All,
}

/// What ends a daemon.
#[derive(Debug)]
enum Event {
    /// A person asked for it over the socket, and waits for the answer.
    Stop(UnixStream),
    /// The folder was unmounted.
    Unmounted,
    /// A signal: the daemon ends even if programs have files open.
    Signal,
}

/// Unmounts what a killed daemon has left mounted over the folder.
fn clear_dead_mount(under: &Path) -> Result<(), CacheError> {
    let dead = Some(rustix::io::Errno::NOTCONN.raw_os_error());
    // A stat of the folder may still succeed, but reading it does not.
    while fs::read_dir(under).is_err_and(|error| error.raw_os_error() == dead) {
        unmount(under, true).map_err(|error| CacheError::io("cannot unmount", under, error))?;
    }
    Ok(())
}

/// Unmounts the folder, by fusermount3 if this user may not; `lazily` also while it is in use.
fn unmount(under: &Path, lazily: bool) -> io::Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(under, flags) {
        Err(rustix::io::Errno::PERM) => {
            let lazy = if lazily { "-uz" } else { "-u" };
            let helper = Command::new("fusermount3").arg(lazy).arg(under).status()?;
            if helper.success() { Ok(()) } else { Err(rustix::io::Errno::BUSY.into()) }
        }
        other => Ok(other?),
    }
}

/// Unmounts once no process has files open there or its working folder there; waits for
/// [`UNMOUNT_TIMEOUT`].
fn unmount_unused(under: &Path) -> io::Result<()> {
    let begin = Instant::now();
    loop {
        match unmount(under, false) {
            Err(error)
                if error.kind() == io::ErrorKind::ResourceBusy
                    && begin.elapsed() < UNMOUNT_TIMEOUT =>
            {
                thread::sleep(UNMOUNT_TIMEOUT / 50);
            }
            done => return done,
        }
    }
}

/// Opens the log of a daemon that is about to start.
///
/// # Errors
/// The folder of the cache's memory cannot be made, or the log not be opened.
pub fn log_file(under: &Path) -> Result<File, CacheError> {
    let home = memory_home(under);
    make_home(&home)?;
    let path = home.join("log");
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    options.open(&path).map_err(|error| CacheError::io("cannot use", &path, error))
}

/// Runs the daemon of a cache until it is stopped or unmounted. `ready` is called when programs may
/// use the folder.
///
/// # Errors
/// The folder, a tier or the mount cannot be used, or data is left in the tiers at the end.
pub fn serve(spec: Spec, ready: impl FnOnce()) -> Result<(), CacheError> {
    spec.check()?;
    let _lock = home::take(&memory_home(&spec.under), &spec.under)?;
    clear_dead_mount(&spec.under)?;
    let spec = home::with_left_tiers(spec)?;
    let _locks = home::take_others(&spec)?;
    check_room(&spec)?;
    rustix::process::umask(rustix::fs::Mode::empty());
    let most = Faults::of_environment().descriptors.unwrap_or(MAX_DESCRIPTORS);
    let descriptors = raise_limits(most);
    // Other threads inherit the mask: only the one that waits for signals gets them.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().map_err(|error| CacheError::io("cannot wait at", &spec.under, error))?;
    let disks: Vec<_> = spec.tiers.iter().map(|tier| tier.folder.clone()).collect();
    let is_first = matches!(home::saved(&spec.under, &disks), Ok(None));
    home::save(&spec)?;
    let partner = spec.partner.as_ref().map(|address| Link::new(&spec, address)).transpose()?;
    let mut engine = adopt::open(spec)?;
    engine.partner = partner;
    let engine = Arc::new(engine);
    engine.begin_partner().inspect_err(|_| {
        end_new_holder(&engine);
        // A new cache has nothing to recover.
        if is_first {
            home::remove(&engine.spec);
        }
    })?;
    lock(&engine.broken).named.iter().for_each(moves::tell);
    let mounted = listen(&engine.spec.under)
        .and_then(|listener| Ok((listener, mount(&engine, descriptors)?)))
        .inspect_err(|_| end_new_holder(&engine));
    let (listener, (session, nodes)) = mounted?;
    let (sender, events) = mpsc::channel();
    start_forgetting(&engine, nodes, session.notifier(), descriptors)?;
    start_waiting(&engine, signals, sender.clone())?;
    let ended = sender.clone();
    start("session", move || {
        let _ = session.join();
        let _ = ended.send(Event::Unmounted);
    })?;
    let workers = start_workers(&engine)?;
    let answering = engine.clone();
    start("answers", move || answer_all(&answering, &listener, &sender))?;
    ready();
    let asked = match events.recv().ok() {
        // The thread that unmounted for a stop reports it a moment later.
        Some(Event::Unmounted) if engine.stopping.load(Ordering::Relaxed) => {
            events.recv_timeout(STOP_TIMEOUT).ok()
        }
        other => other,
    };
    if matches!(asked, Some(Event::Signal)) {
        unmount_for_good(&engine);
    }
    let result = end(&engine);
    for worker in workers {
        let _ = worker.join();
    }
    if let Some(Event::Stop(mut stream)) = asked {
        let answer = match &result {
            Ok(()) => Answer::Done,
            Err(CacheError::Left(what)) => Answer::Left(what.clone()),
            Err(error) => Answer::Failed(error.to_string()),
        };
        // The command may have ended.
        let _ = control::write_line(&mut stream, &answer);
    }
    result
}

/// Ends a holder of device memory that this daemon started: it holds nothing yet, and no later
/// daemon would look for it.
fn end_new_holder(engine: &Engine) {
    if engine.device().is_some_and(|(_, device)| device.is_new()) {
        engine.end_holder();
    }
}

/// Raises the limit of descriptors as far as allowed, to `most` at most, and returns it.
///
/// The limit of a file's size (RLIMIT_FSIZE) goes as well: exceeding one that the daemon inherited
/// would kill it.
fn raise_limits(most: u64) -> u64 {
    for (resource, wanted) in [(Resource::Fsize, None), (Resource::Nofile, Some(most))] {
        let limit = Rlimit { current: wanted, maximum: wanted };
        if rustix::process::setrlimit(resource, limit).is_err() {
            let maximum = rustix::process::getrlimit(resource).maximum;
            let current =
                maximum.map_or(wanted, |maximum| Some(wanted.unwrap_or(maximum).min(maximum)));
            // When few descriptors are used up, writes go through to the file system below.
            let _ = rustix::process::setrlimit(resource, Rlimit { current, maximum });
        }
    }
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(most)
}

/// Starts a thread.
fn start(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>, CacheError> {
    let thread = thread::Builder::new().name(name.into()).spawn(work);
    thread.map_err(|error| CacheError::io("cannot start a thread", Path::new(name), error))
}

/// Starts a thread that waits for signals: at the first the daemon drains and ends, at the second
/// it exits at once.
fn start_waiting(
    engine: &Arc<Engine>,
    signals: SigSet,
    events: Sender<Event>,
) -> Result<(), CacheError> {
    let under = engine.spec.under.clone();
    start("signals", move || {
        let mut asked = false;
        while let Ok(signal) = signals.wait() {
            // The daemon outlives the terminal it was started from.
            if signal == Signal::SIGHUP {
                continue;
            }
            if asked {
                let left = CacheError::Killed(under.clone());
                let _ = writeln!(io::stderr(), "kedge: ended at a second signal: {left}");
                std::process::exit(1);
            }
            asked = events.send(Event::Signal).is_ok();
        }
    })?;
    Ok(())
}

/// Starts a thread that has the kernel forget unused files once it knows so many that descriptors
/// become scarce.
fn start_forgetting(
    engine: &Arc<Engine>,
    nodes: Arc<Nodes>,
    kernel: Notifier,
    descriptors: u64,
) -> Result<(), CacheError> {
    let most = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
    let engine = engine.clone();
    start("forgetting", move || {
        while !engine.scheduler().stopped {
            thread::sleep(TICK);
            if nodes.len() > most {
                for (parent, name) in nodes.to_forget(most - most / 8) {
                    // An error is harmless: the file may have been renamed.
                    let _ = kernel.inval_entry(INodeNo(parent), &name);
                }
            }
        }
    })?;
    Ok(())
}

/// Unmounts even if programs have files open there: their next use of them fails.
///
/// From then on nothing goes into tiers: writes go through to the file system below.
fn unmount_for_good(engine: &Arc<Engine>) {
    engine.scheduler().order.set_urgent(true);
    // The folder stays mounted during the drain: programs go on.
    let _ = engine.drain_all();
    engine.stopping.store(true, Ordering::Relaxed);
    if unmount(&engine.spec.under, false).is_ok() {
        return;
    }
    engine.closing.store(true, Ordering::SeqCst);
    // Taking the lock waits for writes that are going into a tier.
    drop(engine.world.write());
    engine.end_leases(Duration::ZERO);
    if let Err(error) = unmount(&engine.spec.under, true) {
        let _ = writeln!(io::stderr(), "kedge: cannot unmount: {error}");
    }
}

/// Checks that each tier fits into its file system.
fn check_room(spec: &Spec) -> Result<(), CacheError> {
    for tier in spec.tiers.iter().filter(|tier| tier.medium != Medium::Gpu) {
        let stat = rustix::fs::statvfs(&tier.folder)
            .map_err(|error| CacheError::io("cannot use the tier's folder", &tier.folder, error))?;
        let all = stat.f_blocks.saturating_mul(stat.f_frsize);
        if tier.bytes > all {
            return Err(CacheError::Tier(format!(
                "a tier of {} MiB does not fit: {} has {} MiB",
                tier.bytes >> 20,
                tier.folder.display(),
                all >> 20
            )));
        }
    }
    Ok(())
}

/// Opens the socket at which `kedge cache` reaches the daemon.
fn listen(under: &Path) -> Result<UnixListener, CacheError> {
    let path = memory_home(under).join(SOCKET);
    let _ = fs::remove_file(&path);
    UnixListener::bind(&path).map_err(|error| CacheError::io("cannot listen at", &path, error))
}

/// Mounts the cache over its folder.
fn mount(
    engine: &Arc<Engine>,
    descriptors: u64,
) -> Result<(fuser::BackgroundSession, Arc<Nodes>), CacheError> {
    let under = &engine.spec.under;
    let failed = |error| CacheError::io("cannot mount over", under, error);
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("kedge-cache".into()),
        MountOption::Subtype(SUBTYPE.into()),
        MountOption::DefaultPermissions,
    ];
    let root = rustix::process::geteuid().is_root();
    config.acl = if root { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(FUSE_THREADS);
    config.clone_fd = true;
    let mount = Mount::new(engine.clone(), descriptors).map_err(failed)?;
    let nodes = mount.nodes.clone();
    let kernel = mount.kernel.clone();
    let session = Session::new(mount, under, &config).and_then(Session::spawn).map_err(failed)?;
    let _ = kernel.set(session.notifier());
    Ok((session, nodes))
}

/// Starts the threads that drain, move, watch and tell the partner.
fn start_workers(engine: &Arc<Engine>) -> Result<Vec<thread::JoinHandle<()>>, CacheError> {
    let mut workers = Vec::new();
    for _ in 0..engine.spec.drain_threads.max(1) {
        let engine = engine.clone();
        workers.push(start("drain", move || engine.drain_forever())?);
    }
    if engine.device().is_some() {
        for _ in 0..moves::movers() {
            let engine = engine.clone();
            workers.push(start("move", move || engine.move_forever())?);
        }
        let engine = engine.clone();
        workers.push(start("device", move || {
            let mut watched = Watched::default();
            while !engine.scheduler().stopped {
                thread::sleep(TICK);
                engine.watch_device(&mut watched);
            }
        })?);
    }
    if engine.partner.is_some() {
        let engine = engine.clone();
        workers.push(start("partner", move || engine.tell_partner_forever())?);
    }
    let engine = engine.clone();
    let watch = start("watch", move || {
        while !engine.scheduler().stopped {
            thread::sleep(TICK);
            engine.watch_memory();
            engine.end_leases(lease::LASTS);
            engine.serve_waiting();
            engine.shorten_journals();
        }
    })?;
    workers.push(watch);
    Ok(workers)
}

impl Engine {
    /// Sets the limit of the memory tier so that the host keeps `--host-free` bytes.
    fn watch_memory(&self) {
        let Some(index) = self.spec.tiers.iter().position(|tier| tier.medium == Medium::Ram) else {
            return;
        };
        let Some(available) = available_memory() else { return };
        let mut scheduler = self.scheduler();
        let used = scheduler.limits.rooms()[index].used;
        let more = available.saturating_sub(self.spec.host_free);
        // Drains free memory slowly, so the limit falls below what is used if memory is short.
        let lack = self.spec.host_free.saturating_sub(available);
        let limit = (used.saturating_sub(lack) + more).min(self.spec.tiers[index].bytes);
        scheduler.limits.set_limit(index, limit);
    }
}

/// Returns the host's available memory (MemAvailable), in bytes.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Answers everyone who connects to the socket, each in a thread.
fn answer_all(engine: &Arc<Engine>, listener: &UnixListener, events: &Sender<Event>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        let (engine, events) = (engine.clone(), events.clone());
        // A drain takes long, and others ask meanwhile. If no thread can be started, the connection
        // just ends.
        let _ = start("control", move || answer(&engine, stream, &events));
    }
}

/// Answers one request.
fn answer(engine: &Arc<Engine>, mut stream: UnixStream, events: &Sender<Event>) {
    let answer = match control::read_line::<Ask>(&stream) {
        Ok(Ask::Status) => Answer::Status(Box::new(engine.status())),
        Ok(Ask::Drain) => drained(engine),
        Ok(ask @ (Ask::Stop | Ask::Leave)) => match stop(engine, ask == Ask::Leave) {
            Answer::Done => {
                let _ = events.send(Event::Stop(stream));
                return;
            }
            failed => failed,
        },
        Err(error) => Answer::Failed(format!("it was asked what it does not know: {error}")),
    };
    // The command may have ended.
    let _ = control::write_line(&mut stream, &answer);
}

/// Drains everything at full speed.
fn drained(engine: &Arc<Engine>) -> Answer {
    engine.scheduler().order.set_urgent(true);
    let result = engine.drain_all();
    engine.scheduler().order.set_urgent(false);
    // The partner's copies are older now.
    engine.tell_partner();
    match result {
        Ok(()) => Answer::Done,
        Err(failed) => Answer::Failed(failures(&failed)),
    }
}

/// Describes the files that could not be drained.
fn failures(failed: &[(String, io::Error)]) -> String {
    let named = failed.iter().take(control::NAMED);
    let mut said: Vec<String> = named.map(|(path, error)| format!("{path}: {error}")).collect();
    if failed.len() > said.len() {
        said.push(format!("and {} more", failed.len() - said.len()));
    }
    format!("not all is below; what is not lost stays in its tier: {}", said.join("; "))
}

/// Drains and unmounts; if either fails, the cache goes on as before. With `leave`, a failed drain
/// does not count.
fn stop(engine: &Arc<Engine>, leave: bool) -> Answer {
    match drained(engine) {
        Answer::Failed(why) if !leave => return Answer::Failed(why),
        _ => {}
    }
    engine.stopping.store(true, Ordering::Relaxed);
    match unmount_unused(&engine.spec.under) {
        Ok(()) => Answer::Done,
        Err(error) => {
            engine.stopping.store(false, Ordering::Relaxed);
            Answer::Failed(format!(
                "cannot unmount: {error}; end the programs that have files open there, or are there"
            ))
        }
    }
}

/// Drains what was written before the unmount, and removes the cache's own files if nothing is
/// left.
///
/// # Errors
/// Data is left in the tiers, or the partner could not be told.
fn end(engine: &Arc<Engine>) -> Result<(), CacheError> {
    // First with the drain threads; then once more, for writes that went into a tier meanwhile.
    let first = engine.drain_all();
    engine.closing.store(true, Ordering::SeqCst);
    drop(engine.world.write());
    engine.end_leases(Duration::ZERO);
    engine.scheduler().stopped = true;
    engine.work.notify_all();
    if let Err(failed) = first.and_then(|()| engine.drain_all()) {
        return Err(CacheError::Left(failures(&failed)));
    }
    let left = engine.dirty_files();
    if left > 0 {
        return Err(CacheError::Left(format!("{left} files were written anew meanwhile")));
    }
    check_unclaimed(engine)?;
    // On an error the cache's files stay, with its identity: a later daemon can tell the partner.
    engine.end_partner().map_err(CacheError::Left)?;
    engine.end_holder();
    home::remove(&engine.spec);
    Ok(())
}

/// Fails where something is left of files that cannot be had.
///
/// # Errors
/// Data, or word of bytes that were lost.
pub(crate) fn check_unclaimed(engine: &Engine) -> Result<(), CacheError> {
    if engine.unclaimed.iter().any(Unclaimed::holds_bytes) {
        return Err(CacheError::Left("data of files that are gone stays in its tier".into()));
    }
    if engine.unclaimed.is_empty() {
        return Ok(());
    }
    let word = "word of lost bytes stays, as their files cannot be had now";
    Err(CacheError::Left(format!("{word}: `kedge cache recover` names them, and ends the cache")))
}

/// Writes below what a killed daemon held, or one on a node that was rebooted.
///
/// `disks` are the folders of tiers on local disks; they need not be named if the node was not
/// rebooted. The data that `discard` names is given up, unless other data is left. The result says
/// what could not be written below.
///
/// # Errors
/// A daemon runs there, or the folder or a tier cannot be used.
pub fn recover(
    under: &Path,
    disks: &[PathBuf],
    discard: Option<Discard>,
) -> Result<Recovered, CacheError> {
    let memory = memory_home(under);
    let _lock = home::take(&memory, under)?;
    clear_dead_mount(under)?;
    let Some(spec) = home::saved(under, disks)? else {
        // No cache was there: remove what taking the lock has made.
        home::remove_one(&memory);
        return Ok(Recovered::default());
    };
    // A holder that has ended is not started again: a new one would hold nothing.
    let spec = home::with_disks(Spec { under: under.to_owned(), device: None, ..spec }, disks)?;
    let _locks = home::take_others(&spec)?;
    raise_limits(MAX_DESCRIPTORS);
    let engine = Arc::new(adopt::open_to_recover(spec)?);
    let mut recovered = adopt::drain(&engine);
    give_up(&engine, &mut recovered, discard);
    if recovered.stuck.is_empty() {
        recovered.at_partner = partner::forget(&engine.spec).err();
        // The cache's identity is kept until the partner has been told, or is given up.
        if recovered.at_partner.is_none() || discard == Some(Discard::All) {
            engine.end_holder();
            home::remove(&engine.spec);
        }
    }
    Ok(recovered)
}

/// Writes below what the partner on this node has of a lost node's cache. `folder` is that of the
/// lost node's key and name. The result says what could not be written below.
///
/// # Errors
/// That cache is still connected, nothing of it is found, or the folder cannot be used.
pub fn recover_partner(
    under: &Path,
    folder: &Path,
    discard: Option<Discard>,
) -> Result<Recovered, CacheError> {
    recover_partner_with(under, folder, discard, Faults::of_environment())
}

/// Does what [`recover_partner`] does, with injected faults.
pub(crate) fn recover_partner_with(
    under: &Path,
    folder: &Path,
    discard: Option<Discard>,
    faults: Faults,
) -> Result<Recovered, CacheError> {
    let at = home_in(folder, under);
    if !partner::has_home(folder, under) {
        return Err(CacheError::Tier(format!(
            "{} has nothing of a cache of {}: name the folder of its key and node, \
             DIR/KEY/NODE, and its own path of the folder that was cached",
            folder.display(),
            under.display()
        )));
    }
    let _lock = home::take(&at, under).map_err(|error| match error {
        CacheError::Busy(_) => CacheError::Tier(format!(
            "the cache of {} is connected to its partner, or is being recovered: stop it, or wait \
             half a minute after its node is gone",
            under.display()
        )),
        other => other,
    })?;
    clear_dead_mount(under)?;
    let spec = Spec {
        under: under.to_owned(),
        tiers: vec![TierSpec::nvme(folder.to_owned(), 0)],
        fsync: Fsync::Drain,
        close_drains: true,
        drain_threads: 1,
        per_user: None,
        host_free: 0,
        kernel_gathers: false,
        device: None,
        partner: None,
    };
    raise_limits(MAX_DESCRIPTORS);
    let mut engine = adopt::open_to_recover(spec)?;
    engine.faults = faults;
    let engine = Arc::new(engine);
    let mut recovered = adopt::drain(&engine);
    give_up(&engine, &mut recovered, discard);
    if recovered.stuck.is_empty() {
        home::remove_one(&at);
        let up_to = folder.parent().and_then(Path::parent).unwrap_or(folder);
        partner::home::remove_empty(&at, up_to);
    }
    Ok(recovered)
}

/// Discards what `discard` says: all, or data whose file surely is gone, if no other data is left.
fn give_up(engine: &Engine, recovered: &mut Recovered, discard: Option<Discard>) {
    let gone = engine.unclaimed.iter().filter(|lost| lost.lost.gone).count();
    let given_up = match discard {
        None => false,
        Some(Discard::Gone) => recovered.stuck.len() == gone,
        Some(Discard::All) => true,
    };
    if given_up {
        recovered.discarded = std::mem::take(&mut recovered.stuck);
    }
}
