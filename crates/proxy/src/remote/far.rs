//! The far end of a session: a proxy whose client is on another machine. It ends with its session.

use super::far_lane;
use super::handed::{self, Handed, NewLink, Received};
use super::images::{FilesLine, Images, Offered};
use super::mirror::Mirror;
use super::outlet::{self, Line, LineOutlet};
use super::restore::arenas;
use super::staged::{FarMemory, Staged};
use super::turns::Turns;
use super::{Touches, shared_in, shares, touches};
use crate::account::Account;
use crate::arriving::{Arrived, Arriving, Devices};
use crate::backend;
use crate::dispatch::Dispatcher;
use crate::error::RestoreError;
use crate::executor::Executor;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::management::Management;
use crate::options::Options;
use crate::phases::Phases;
use crate::rebuild::{Here, tell_host};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::EXIT_BUG;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::Windows;
use kedge_device::NewBackend;
use kedge_device_nvidia::CacheLimits;
use kedge_image::Layers;
use kedge_keys::{Connection, RecordError, Secrets};
use kedge_protocol::{DeviceInfo, Message, Refusal, Welcome};
use kedge_remote::{
    Answer, Aside, Ask, FIRST_IMAGE, FrameError, Frames, Links, MAX_MANAGEMENT, Receiver, Sender,
    Start, Terms, ToFar, ToNear, read_one, write_one,
};
use kedge_socket::{Channel, SocketError};
use kedge_transport::{ATTRIBUTE_FAR, ConnectError, Incoming, ReplyTo};
use kedge_wire::{List, Text};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;
use thiserror::Error;

/// For the near end to say what it wants.
const LIMIT: Duration = Duration::from_secs(30);
/// From the session's end to that of the process, at most.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Longest first message.
const MAX_START: usize = 64 << 10;
/// What the near end may not do.
const TOO_MUCH: &str = "more than a message needs";

#[derive(Debug, Error)]
pub enum FarError {
    #[error("the session's line: {0}")]
    Line(#[from] FrameError),
    #[error("{0}")]
    System(#[from] io::Error),
    #[error("the session's line: {0}")]
    Record(#[from] RecordError),
    #[error("the server: {0}")]
    Server(#[from] SocketError),
    #[error("{0}")]
    Arena(#[from] ConnectError),
    /// The near end has been told.
    #[error("no device: {0}")]
    NoDevice(String),
    #[error("the near end broke the rules: {0}")]
    Nonsense(&'static str),
}

/// Serves the session on `line` to its end; the server hands further connections over on
/// `control`.
///
/// # Errors
/// The session cannot begin, or its near end is gone.
pub fn serve(line: TcpStream, control: Channel, options: &Options) -> Result<(), FarError> {
    end_on_panic();
    super::keep_freed_memory();
    // Of a connection from another machine, where the server has shaken hands.
    let ((terms, secrets), fds) = control.receive::<(Option<Terms>, Option<Secrets>)>(LIMIT)?;
    let mut first = Connection::new(line, secrets)?;
    if options.management {
        return answer_management(first, options);
    }
    let (terms, file) = terms.zip(fds.first()).ok_or(FarError::Nonsense("no account"))?;
    let account = Arc::new(Account::map(file, &terms)?);
    first.stream().set_read_timeout(Some(LIMIT))?;
    let start: Start = read_one(&mut first, MAX_START)?;
    first.stream().set_read_timeout(None)?;
    let mut options = options.clone();
    let options = &mut options;
    options.backend.cache = snapshots_of(&terms, options.backend.cache);
    if !start.windows.is_empty() {
        let windows = Windows::of(&start.windows).ok_or(FarError::Nonsense("no such windows"))?;
        options.backend.windows = Some(windows);
    }
    let options = &*options;
    let arena = kedge_transport::create_shared_arena()?;
    kedge_transport::map_shared_arena(arena.as_fd())?;
    let links = Links::metered(Some(account.clone()))?;
    let own_arena = arena.try_clone()?;
    // The server has set a limit for the first words.
    first.stream().set_write_timeout(None)?;
    let line = Line::start(links.clone(), Mirror::new(arena))?;
    let staged = Arc::<Mutex<Staged>>::default();
    let told = line.clone();
    let who = format!("proxy[{}]", std::process::id());
    let log = Arc::new(JobLog::told(who, move |entry| outlet::log(&told, entry.line())));
    let memory = FarMemory::new(line.clone(), staged.clone());
    let host = ProxyHost::new(LineOutlet(line.clone()), memory, log, None);
    let host = Arc::new(host.with_account(account.clone()));
    let built = match backend::build(&options.backend, &start.choice, host.clone(), None) {
        Ok(built) => built,
        Err(error) => {
            let reason = Text::truncated(error.to_string());
            let refusal = Refusal { code: error.code().0, reason };
            write_one(&mut first, &Err::<Welcome, _>(refusal))?;
            return Err(FarError::NoDevice(error.to_string()));
        }
    };
    let soft = matches!(options.backend.gpu, GpuSpec::Soft { .. });
    let say = |device| as_told(device, soft);
    let devices = account.devices(built.devices()).into_iter().map(say).collect::<Vec<_>>();
    let devices = List::new(devices).unwrap_or_default();
    let driver_version = built.driver_version();
    let welcome = Welcome { driver_version, client_memory: true, devices };
    write_one(&mut first, &Ok::<_, Refusal>(welcome))?;
    let images = Arc::<Images>::default();
    let (serves, log, of_lanes) = (images.clone(), host.log.clone(), line.clone());
    let begun = move |link: NewLink| match link.number < FIRST_IMAGE {
        true => far_lane::begun(&of_lanes, link),
        false => serves.begun(link, log.clone()),
    };
    let begin = |received: Received| {
        received.line.inlet().go_on(first, |_, _| Ok(0))?;
        hear_aside(received.aside, line.clone(), host.clone(), images.clone())?;
        Ok(received.line)
    };
    let tells = line.clone();
    // A line that is broken is found out by who reads it.
    let tell = move |message: &ToNear| drop(tells.say_now(message));
    let turns = Turns::new(account.clone());
    let heeds = turns.clone();
    let receiver = handed::hear(control, &links, start.reconnect_ms, begin, heeds, begun, tell)?;
    let mut frames = Frames::new(receiver);
    // No descriptors go to a client that is not here.
    let (own, _nobody) = UnixStream::pair()?;
    let executor = if start.restore {
        let gone = Gone { images: &images, options, host: &host, line: &line };
        match gone.go_on(built, own.into()) {
            Ok(executor) => executor,
            Err(error) => {
                outlet::answer(&line, Answer::Failed { why: Text::truncated(error.to_string()) })?;
                // It says goodbye once it has heard that, on the aside.
                while frames.receive::<ToFar>().is_ok() {}
                return Ok(());
            }
        }
    } else {
        let backend = built.start();
        host.set_backend(&backend);
        let dispatcher = Dispatcher::new(backend, host.clone(), own.into());
        Local::new(dispatcher, host, options.backend.cache)
    };
    let executor = executor.of_far_client();
    line.set_backend(&executor.backend());
    turns.set_backend(&executor.backend());
    images.set_room(executor.room());
    if start.restore {
        outlet::answer(&line, Answer::Yes {})?;
    }
    let gpu = options.backend.gpu.to_string();
    FarEnd { executor, turns, line, staged, frames, images, gpu, arena: own_arena }.run()
}

/// Returns what a client on another machine is told of a device. Software devices have managed
/// memory in their own, and the client moves pages: what both ends see has to be compared. GPUs
/// have it in what both see, as the host memory behind their addresses would be a mirror.
fn as_told(device: DeviceInfo, soft: bool) -> DeviceInfo {
    let mut attributes = device.attributes.into_inner();
    attributes.push((ATTRIBUTE_FAR, 1));
    let attributes = List::new(attributes).unwrap_or_default();
    DeviceInfo { apart: soft, attributes, ..device }
}

/// Answers a job's questions to NVML until its end of `line` is closed.
fn answer_management(mut line: Connection, options: &Options) -> Result<(), FarError> {
    line.stream().set_read_timeout(None)?;
    let config = options.backend.clone();
    if let GpuSpec::Local { ordinals } = &config.gpu
        && !ordinals.is_empty()
    {
        // NVML tells of all of the machine's, and a program that counts them there would find more
        // than it has.
        let reason = "NVML would tell of other GPUs than those that are lent".to_owned();
        let refusal = Refusal { code: CuError::NO_DEVICE.0, reason: Text::truncated(reason) };
        return Ok(write_one(&mut line, &Err::<Welcome, _>(refusal))?);
    }
    // The server has set a limit for the first words.
    line.stream().set_write_timeout(Some(LIMIT))?;
    let (driver_version, devices) = Default::default();
    let none = Welcome { driver_version, client_memory: true, devices };
    write_one(&mut line, &Ok::<_, Refusal>(none))?;
    let management = Management::new(config, Arc::new(JobLog::none()));
    loop {
        let question = match read_one(&mut line, MAX_MANAGEMENT) {
            Ok(question) => question,
            // The job has ended.
            Err(FrameError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        write_one(&mut line, &management.ask(&question))?;
    }
}

/// A client that is to go on here.
#[derive(Clone, Copy)]
struct Gone<'a> {
    images: &'a Images,
    options: &'a Options,
    host: &'a Arc<ProxyHost>,
    line: &'a Line,
}

impl Gone<'_> {
    /// Brings its devices back from what the near end offers.
    fn go_on(self, built: NewBackend, socket: OwnedFd) -> Result<Local, RestoreError> {
        let phases = Phases::begin();
        let offered = self.images.offered(LIMIT);
        match offered.ok_or_else(|| RestoreError::Far("nothing has been offered".into()))?? {
            Offered::Files(layers) => self.restore(&layers, built, socket, phases),
            Offered::Proxy(from, to) => self.arrive(Both { from, to }, built, socket),
        }
    }

    /// From files that lie at the near end.
    fn restore(
        self,
        layers: &Layers,
        built: NewBackend,
        socket: OwnedFd,
        mut phases: Phases,
    ) -> Result<Local, RestoreError> {
        let Gone { options, host, line, .. } = self;
        let saved = &kedge_gpu_image::read(layers.file(0))?;
        phases.over("its notes");
        let config = &options.backend;
        let gone = Here { layers, saved, parts: None, config, host };
        let executor = gone.rebuild(built, socket, phases)?;
        line.agree(arenas(saved));
        line.lent.remember(&saved.steps);
        if shared_in(saved) {
            line.something_is_shared();
            // What the objects' making has changed is looked for with what the next message
            // changes.
            line.work_begins(Touches::Anything);
            line.work_is_handed_over();
        }
        Ok(executor)
    }

    /// From another proxy, which has it still. What client and devices both see comes as the
    /// client's changes.
    fn arrive(
        self,
        mut stream: Both,
        built: NewBackend,
        socket: OwnedFd,
    ) -> Result<Local, RestoreError> {
        let Gone { options, host, line, .. } = self;
        let config = &options.backend;
        let arriving = Arriving::new(config, host.clone(), socket, Devices::New(built));
        arriving.all(&mut stream, |Arrived { dispatcher, saved }| {
            if shared_in(&saved) {
                line.something_is_shared();
            }
            line.lent.remember(&saved.steps);
            tell_host(&saved, host);
            Ok(Local::new(dispatcher, host.clone(), config.cache))
        })
    }
}

/// Where snapshots may lie: a key's that has a limit take no device memory beside what its program
/// has. What they took would be more than the limit, or fail the program within it.
fn snapshots_of(terms: &Terms, cache: CacheLimits) -> CacheLimits {
    let gpu = if terms.memory.is_some() { 0 } else { cache.gpu };
    CacheLimits { gpu, ..cache }
}

/// Both directions of a link.
struct Both {
    from: FilesLine,
    to: Sender,
}

impl Read for Both {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.from.read(into)
    }
}

impl Write for Both {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Hears the aside on a thread of its own.
fn hear_aside(
    receiver: Receiver<Handed>,
    line: Arc<Line>,
    host: Arc<ProxyHost>,
    images: Arc<Images>,
) -> io::Result<()> {
    // What goes on behind a host function may itself ask for the client's memory, whose answer
    // this thread alone hears.
    let (returned, tokens) = mpsc::channel();
    let ends = line.clone();
    let go_on = move || {
        let asked = |token| host.host_function_done(token);
        if !tokens.into_iter().all(asked) {
            ends.over();
        }
    };
    thread::Builder::new().name("host-fns".into()).spawn(go_on)?;
    let hear = move || {
        let mut frames = Frames::new(receiver);
        while let Ok(said) = frames.receive::<Aside>() {
            let proper = match said {
                Aside::Bytes { number, bytes } => {
                    line.arrived(number, bytes.map(|b| b.into_inner()).map_err(CuError));
                    true
                }
                Aside::HostFnDone { token } => returned.send(token).is_ok(),
                Aside::Bye {} => end_now(0),
                Aside::Patches { packed } => line.patch(&packed),
                Aside::Forget { number } => {
                    images.forget(number);
                    true
                }
                Aside::ImageOver { link } => {
                    images.over(link);
                    true
                }
            };
            if !proper {
                break;
            }
        }
        line.over();
        // The line's reader may be where nothing wakes it: with devices that do not come back.
        thread::sleep(LAST_WORDS);
        end_now(1)
    };
    thread::Builder::new().name("aside".into()).spawn(hear).map(drop)
}

/// A panic on any thread ends the process: its near end finds its line cut for good, and says so.
fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        // The server's log. Nothing else is safe to touch: the thread may hold any lock.
        let _ = writeln!(io::stderr(), "kedge-proxy: this is a bug in kedge: {panic}");
        end_now(EXIT_BUG)
    }));
}

/// Ends the process: others of its threads may be busy with devices.
fn end_now(status: i32) -> ! {
    // SAFETY: _exit ends the process at once, and takes no pointer.
    unsafe { libc::_exit(status) }
}

struct FarEnd {
    executor: Local,
    turns: Arc<Turns>,
    line: Arc<Line>,
    staged: Arc<Mutex<Staged>>,
    frames: Frames<Receiver<Handed>>,
    images: Arc<Images>,
    /// As the server's `--gpu` gave it.
    gpu: String,
    /// This end's.
    arena: OwnedFd,
}

impl FarEnd {
    /// Carries out what comes until the line ends.
    fn run(mut self) -> Result<(), FarError> {
        loop {
            let more = self.frames.has_next();
            self.line.more_follows(more);
            if !more {
                self.executor.flush();
            }
            match self.frames.receive::<ToFar>()? {
                ToFar::Message { seq, to, message } => self.message(seq, to, message)?,
                ToFar::Staged { addr, bytes } => {
                    let fits = self.staged().add(addr, bytes.into_inner());
                    fits.then_some(()).ok_or(FarError::Nonsense(TOO_MUCH))?;
                }
                ToFar::Named { addr, len, digest } => {
                    let fits = self.staged().name(addr, len, digest);
                    fits.then_some(()).ok_or(FarError::Nonsense(TOO_MUCH))?;
                }
                ToFar::Patched { count } => {
                    if !self.line.wait_for_patches(count) {
                        return Err(FarError::Nonsense("changes that do not come"));
                    }
                }
                ToFar::Ask { ask } => {
                    let done = self.ask(ask);
                    outlet::answer(&self.line, done)?;
                }
            }
        }
    }

    fn message(&mut self, seq: u64, to: Option<u32>, message: Message) -> Result<(), FarError> {
        let reply_to = match to {
            None => None,
            Some(to) => Some(ReplyTo::of_number(to).ok_or(FarError::Nonsense("no such slot"))?),
        };
        if reply_to.is_some() != matches!(message, Message::Call { .. }) {
            return Err(FarError::Nonsense("a call without a slot, or a post with one"));
        }
        if shares(&message) {
            self.line.something_is_shared();
        }
        self.turns.before(&message);
        let _dispatches = self.turns.dispatches();
        self.line.lent.note(&message);
        let works = self.line.work_begins(touches(&message, &self.line.lent));
        self.executor.execute(Incoming { seq, message, reply_to, place: None });
        if works {
            self.line.work_is_handed_over();
        }
        self.staged().clear();
        Ok(())
    }

    fn staged(&self) -> MutexGuard<'_, Staged> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&mut self, ask: Ask) -> Answer {
        let turns = self.turns.clone();
        let _dispatches = turns.dispatches();
        match ask {
            Ask::Rest { within_ms } => {
                let limit = Duration::from_millis(u64::from(within_ms));
                if self.executor.rest(limit) { Answer::Yes {} } else { Answer::No {} }
            }
            // Whoever is not at rest has not been asked to: what there is is no one moment's.
            Ask::Capture { .. } | Ask::Show { .. } | Ask::SwapOut {}
                if !self.executor.rest(Duration::ZERO) =>
            {
                Answer::Failed { why: Text::truncated("its devices do not rest".into()) }
            }
            Ask::Capture { capture } => {
                let arena = self.arena.as_fd();
                self.images.capture(&mut self.executor, capture, &self.gpu, arena)
            }
            Ask::Show { capture, first } => {
                let arena = self.arena.as_fd();
                self.images.show(&mut self.executor, capture, first, &self.gpu, arena)
            }
            Ask::SwapOut {} => match self.executor.swap_out() {
                Ok(bytes) => Answer::Captured { number: 0, bytes },
                Err(error) => Answer::Failed { why: Text::truncated(error.to_string()) },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_of_a_limited_key_take_no_device_memory() {
        let terms = |memory| Terms { slot: 0, memory, bandwidth: None };
        let of = |memory| snapshots_of(&terms(memory), CacheLimits::default());
        assert_eq!(of(None), CacheLimits::default());
        assert_eq!(of(Some(1 << 30)), CacheLimits { gpu: 0, ..CacheLimits::default() });
    }
}
