//! The near end of a session: an executor whose devices are on another machine.

use super::capture::{FarCapture, FarRoom, ImageWay};
use super::mirror::Mirror;
use super::outlet::refusal;
use super::ticker::Ticker;
use super::{shares, touches_memory};
use crate::capture::CaptureError;
use crate::executor::{Build, Captured, Executor, Identity, NearEnd, Room, Shares};
use crate::host::ProxyHost;
use kedge_control::joblog::JobLog;
use kedge_control::sharing::{Bond, What};
use kedge_cuda_types::CuError;
use kedge_device::{Host, SnapshotError};
use kedge_protocol::{Call, Message, ModuleImage, PeerName};
use kedge_remote::{
    Answer, Aside, Ask, CHUNK, Capture, Connected, Dialer, Frames, ImageLineError, Links, Receiver,
    Sender, Sending, ToFar, ToNear, Which, put_message,
};
use kedge_transport::{Incoming, ReplyTo, SLOTS};
use kedge_wire::{Bytes, List};
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How much longer an answer may take than what it is about.
const LATE: Duration = Duration::from_secs(10);
/// How long a client's end waits for room on the line.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// For the far end to copy its devices' memory: less than the control thread waits for it.
const CAPTURE_LIMIT: Duration = Duration::from_secs(45);
/// Swapping out packs it as well.
const SWAP_LIMIT: Duration = Duration::from_secs(1000);
/// What a session cannot do as yet.
const NOT_FAR: &str = "its devices are on another machine, where this is not supported as yet: \
    give --gpu devices of this machine, or do without";

/// The session of this process.
static LINKS: OnceLock<Arc<Links>> = OnceLock::new();

/// Whether that has ended.
static OVER: AtomicBool = AtomicBool::new(false);

/// Takes note that this process's session has ended: nobody is there to hear a goodbye, and whoever
/// watches this process end waits for it.
pub(super) fn is_over() {
    OVER.store(true, Ordering::SeqCst);
}

/// Tells the far end that the client has ended, if there is one. This process is about to end.
pub(crate) fn say_bye() {
    if let Some(links) = LINKS.get().filter(|_| !OVER.load(Ordering::SeqCst)) {
        let mut aside = Sending::new(Sender::new(links.clone(), Which::Aside));
        // Without a line, the far end gives the client up after some time.
        if aside.add(&Aside::Bye {}).and_then(|()| aside.flush()).is_ok() {
            links.wait_until_sent(Which::Aside, LAST_WORDS);
        }
    }
}

/// What a session begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resumes {
    /// How long it tries to go on after a cut.
    pub(crate) reconnect: Duration,
    /// Up to this one the client's messages are complete.
    pub(crate) done: u64,
}

pub(crate) struct Session {
    line: Sending<Sender>,
    near: Arc<Near>,
    answers: mpsc::Receiver<Answer>,
    /// Answers that did not come in time, and are still to come.
    late: u32,
    way: ImageWay,
    /// Of the client's changes, those that what was sent counts on.
    patched: u64,
}

/// What the threads of the near end have together.
pub(crate) struct Near {
    /// As the user named it.
    server: String,
    host: Arc<ProxyHost>,
    links: Arc<Links>,
    aside: Mutex<Sending<Sender>>,
    mirror: Mutex<Mirrored>,
    /// Whether there is any memory that the client and devices see.
    shared: AtomicBool,
    ticker: Arc<Ticker>,
    /// The newest message that was sent, and that is complete.
    sent: AtomicU64,
    completed: AtomicU64,
    /// Slots whose calls have been sent and not answered.
    asked: [AtomicBool; SLOTS],
}

/// The client's side of memory that both see.
struct Mirrored {
    mirror: Mirror,
    /// How often its changes have been told.
    told: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// Goes on with a session that has been opened. `arena` is the client's, mapped here; `over` is
    /// called when the session has ended, with why.
    pub(crate) fn new(
        connected: Connected,
        server: String,
        host: Arc<ProxyHost>,
        arena: OwnedFd,
        resumes: Resumes,
        over: impl Fn(&str) + Send + Sync + 'static,
    ) -> io::Result<Session> {
        let Connected { key, line, .. } = connected;
        let Resumes { reconnect, done } = resumes;
        let way = ImageWay { server: server.clone(), key };
        let links = Links::start()?;
        let dialer = |say: Option<Arc<JobLog>>| {
            let say = move |text: &str| say.iter().for_each(|log| log.line(text));
            Dialer::new(&server, key, reconnect, say)
        };
        let receiver = Receiver::new(links.clone(), Which::Line, dialer(Some(host.log.clone())));
        receiver.inlet().go_on(line, |_, _| Ok(0))?;
        let aside = Receiver::new(links.clone(), Which::Aside, dialer(None));
        let sender = |which| Sending::new(Sender::new(links.clone(), which));
        let near = Arc::new(Near {
            server,
            host,
            links: links.clone(),
            aside: Mutex::new(sender(Which::Aside)),
            mirror: Mutex::new(Mirrored { mirror: Mirror::new(arena), told: 0 }),
            shared: AtomicBool::new(false),
            ticker: Arc::default(),
            sent: AtomicU64::new(done),
            completed: AtomicU64::new(done),
            asked: [const { AtomicBool::new(false) }; SLOTS],
        });
        let (answer, answers) = channel();
        let over = Arc::new(over);
        let (hears, ends) = (near.clone(), over.clone());
        let hear = move || ends(&hears.hear(Frames::new(receiver), &answer));
        std::thread::Builder::new().name("line".into()).spawn(hear)?;
        let watches = near.clone();
        let watch = move || over(&watches.watch_aside(aside));
        std::thread::Builder::new().name("aside".into()).stack_size(256 << 10).spawn(watch)?;
        let _ = LINKS.set(links.clone());
        let looks = near.clone();
        near.ticker.start("mirror", move || {
            let room = || looks.links.wait_for_room(Which::Aside).is_ok();
            looks.is_busy() && room() && looks.tell_changes().is_ok()
        })?;
        Ok(Session { line: sender(Which::Line), near, answers, late: 0, way, patched: 0 })
    }

    pub(crate) fn way(&self) -> &ImageWay {
        &self.way
    }

    /// Takes parts of the arena, by offset, for what the far end has as well; `shared`: whether
    /// there is any memory that devices see, too.
    pub(crate) fn agree(&self, parts: impl Iterator<Item = Range<u64>>, shared: bool) {
        self.near.shared.store(shared, Ordering::SeqCst);
        let mut mirrored = locked(&self.near.mirror);
        parts.for_each(|part| mirrored.mirror.agree(part));
    }

    /// Waits for an answer.
    pub(crate) fn answer(&self, limit: Duration) -> Option<Answer> {
        self.answers.recv_timeout(limit).ok()
    }

    /// Has the far end get what the client has changed, before what is sent next.
    fn bring_over(&mut self) -> io::Result<()> {
        self.near.links.wait_for_room(Which::Aside)?;
        let count = self.near.tell_changes()?;
        if count > self.patched {
            self.patched = count;
            self.line.add(&ToFar::Patched { count })?;
        }
        Ok(())
    }

    /// Sends a message, and before it what it will read.
    fn send(&mut self, seq: u64, to: Option<u32>, message: &Message) -> io::Result<()> {
        self.near.links.wait_for_room(Which::Line)?;
        if shares(message) {
            self.near.shared.store(true, Ordering::SeqCst);
        }
        let looks = touches_memory(message) && self.near.shared.load(Ordering::SeqCst);
        if looks {
            self.bring_over()?;
        }
        match message {
            Message::Call { call: Call::ModuleLoad { image, .. } } => self.stage(image)?,
            Message::Call { call: Call::ModuleLink { images, .. } } => {
                images.iter().try_for_each(|image| self.stage(image))?;
            }
            _ => {}
        }
        self.near.sent.store(seq, Ordering::SeqCst);
        self.line.put(|w| put_message(seq, to, message, w))?;
        if looks {
            self.near.ticker.wake();
        }
        if to.is_some() { self.line.flush() } else { Ok(()) }
    }

    /// Sends a module's image. What cannot be read is not sent, and found missing there.
    fn stage(&mut self, image: &ModuleImage) -> io::Result<()> {
        let mut at = 0;
        while at < image.len {
            let count = (image.len - at).min(CHUNK as u64);
            let Some(addr) = image.addr.checked_add(at) else { return Ok(()) };
            let Ok(bytes) = self.near.host.read_bytes(addr, count as usize) else { return Ok(()) };
            let bytes = Bytes::new(bytes).unwrap_or_default();
            self.near.links.wait_for_room(Which::Line)?;
            self.line.add(&ToFar::Staged { addr, bytes })?;
            at += count;
        }
        Ok(())
    }

    /// Gives an order, and waits for its answer.
    fn ask(&mut self, ask: Ask, limit: Duration) -> Option<Answer> {
        self.line.add(&ToFar::Ask { ask }).and_then(|()| self.line.flush()).ok()?;
        let until = Instant::now() + limit + LATE;
        self.late += 1;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left).ok()?;
            self.late -= 1;
            // Those before it are of orders that were given up.
            if self.late == 0 {
                return Some(answer);
            }
        }
    }

    /// Asks for what is captured: its number, and how many bytes it has.
    fn captured(&mut self, ask: Ask, limit: Duration) -> Result<(u64, u64), ImageLineError> {
        match self.ask(ask, limit) {
            Some(Answer::Captured { number, bytes }) => Ok((number, bytes)),
            Some(Answer::Failed { why }) => Err(ImageLineError::Far(why.into_inner())),
            _ => Err(ImageLineError::Far("it does not answer in time".into())),
        }
    }
}

impl Executor for Session {
    fn execute(&mut self, incoming: Incoming) {
        let Incoming { seq, message, reply_to } = incoming;
        if let (Some(to), Message::Call { call }) = (&reply_to, &message) {
            if let Some(error) = stays(call) {
                self.near.host.log(&format!("{} failed: {NOT_FAR}", call.name()));
                let _ = self.near.host.outlet.reply(to.clone(), &refusal(error));
                return;
            }
            self.near.asked[to.number() as usize].store(true, Ordering::SeqCst);
        }
        let to = reply_to.as_ref().map(ReplyTo::number);
        // That it is broken is found out by the thread that hears it.
        let _ = self.send(seq, to, &message);
    }

    fn flush(&mut self) {
        let _ = self.line.flush();
    }

    fn spin(&self, spin: Duration) -> Duration {
        spin
    }

    fn rest(&mut self, limit: Duration) -> bool {
        let within_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let rests = self.ask(Ask::Rest { within_ms }, limit) == Some(Answer::Yes {});
        rests && self.near.host.host_fns.none()
    }

    fn room(&self) -> Arc<dyn Room> {
        Arc::new(FarRoom(self.way.clone()))
    }

    fn capture(
        &mut self,
        near: &NearEnd<'_>,
        on: Build,
    ) -> Result<Box<dyn Captured>, CaptureError> {
        self.bring_over().map_err(|error| ImageLineError::Line(error.into()))?;
        let Identity { hello, client_memory, devices, .. } = near.identity.clone();
        let (devices, position) = (List::new(devices)?, near.position);
        let Build { track, parent } = on;
        let capture = Capture { hello, client_memory, devices, position, track, parent };
        let (number, bytes) = self.captured(Ask::Capture { capture }, CAPTURE_LIMIT)?;
        let (way, near) = (self.way.clone(), self.near.clone());
        Ok(Box::new(FarCapture { way, near, number, bytes }))
    }

    fn shares(&mut self) -> Result<Shares, SnapshotError> {
        Ok(Shares { shares: Vec::new(), released: Vec::new() })
    }

    fn adopt(&mut self, _: What) -> Result<PeerName, SnapshotError> {
        Err(not_far())
    }

    fn bind(&mut self, _: Vec<Bond>) {}

    fn swap_out(&mut self) -> Result<u64, CaptureError> {
        let (_, bytes) = self.captured(Ask::SwapOut {}, SWAP_LIMIT)?;
        Ok(bytes)
    }
}

fn not_far() -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, NOT_FAR)
}

/// How the near end answers calls about descriptors, which mean nothing elsewhere.
fn stays(call: &Call) -> Option<CuError> {
    let stays = matches!(
        call,
        Call::HandleExport { .. }
            | Call::HandleImport { .. }
            | Call::SlabShare { .. }
            | Call::PeerOpen { .. }
            | Call::EventShare { .. }
            | Call::EventOpen { .. }
            | Call::Adopt { .. }
    );
    stays.then_some(CuError::NOT_SUPPORTED)
}

impl Near {
    /// Hears the far end until the line ends: why it did.
    fn hear(
        self: &Arc<Near>,
        mut frames: Frames<Receiver<Dialer>>,
        answer: &mpsc::Sender<Answer>,
    ) -> String {
        loop {
            let heard = match frames.receive::<ToNear>() {
                Ok(said) => self.heard(said, answer),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = heard {
                return format!("the devices of {} are gone: {why}", self.server);
            }
        }
    }

    fn heard(self: &Arc<Near>, said: ToNear, answer: &mpsc::Sender<Answer>) -> Result<(), String> {
        let host = &self.host;
        match said {
            ToNear::Reply { to, bytes } => {
                let asked = self.asked.get(to as usize);
                let slot = ReplyTo::of_number(to)
                    .filter(|_| asked.is_some_and(|asked| asked.swap(false, Ordering::SeqCst)))
                    .ok_or("it answers what was not asked")?;
                host.outlet.reply(slot, &bytes)?;
            }
            ToNear::Sticky { ctx, error: 0 } => host.faults.clear(&*host.outlet, ctx),
            ToNear::Sticky { ctx, error } => {
                host.faults.set(&*host.outlet, ctx, CuError(error));
            }
            ToNear::Completed { seq } => {
                if seq > self.sent.load(Ordering::SeqCst) {
                    return Err("it has completed what was not sent".into());
                }
                self.completed.fetch_max(seq, Ordering::SeqCst);
                host.outlet.set_completed(seq);
            }
            ToNear::Output { pending } => host.outlet.set_output_pending(pending),
            ToNear::HostFn { token } => self.host_function(token),
            ToNear::Read { number, addr, len } => self.read(number, addr, len as usize)?,
            ToNear::Write { addr, bytes } => {
                if let Err(error) = host.write_client(addr, &bytes) {
                    host.log(&format!(
                        "a copy to {} bytes at {addr:#x} of the program's memory failed: {error}",
                        bytes.len()
                    ));
                }
            }
            ToNear::Patches { pages } => {
                if !locked(&self.mirror).mirror.apply(&pages) {
                    return Err("it has changed memory that is none".into());
                }
            }
            ToNear::Line { text } => host.log(&text),
            ToNear::Answer { answer: told } => {
                answer.send(told).map_err(|_| "nobody waits for its answer")?;
            }
            ToNear::Closed { why } => return Err(why.into_inner()),
        }
        Ok(())
    }

    /// Keeps the aside connected until that is of no more use: why.
    fn watch_aside(&self, mut aside: Receiver<Dialer>) -> String {
        // Nothing comes on it but acknowledgements.
        let why = match aside.read(&mut [0]) {
            Ok(_) => "bytes where none belong".to_owned(),
            Err(error) => error.to_string(),
        };
        format!("the devices of {} are gone: {why}", self.server)
    }

    /// Returns whether devices may be at work.
    fn is_busy(&self) -> bool {
        self.completed.load(Ordering::SeqCst) < self.sent.load(Ordering::SeqCst)
    }

    /// Tells what the client has changed: how often that has been done.
    fn tell_changes(&self) -> io::Result<u64> {
        let Mirrored { mirror, told } = &mut *locked(&self.mirror);
        let before = *told;
        let mut aside = locked(&self.aside);
        mirror.changes(|pages| {
            *told += 1;
            aside.add(&Aside::Patches { pages })
        })?;
        if *told > before {
            aside.flush()?;
        }
        Ok(*told)
    }

    /// Has the client run a host function, and tells the far end once it has.
    fn host_function(self: &Arc<Near>, token: u64) {
        let near = self.clone();
        let done = move |_| {
            // What it has changed arrives before what was enqueued behind it may begin.
            if near.shared.load(Ordering::SeqCst) {
                let _ = near.tell_changes();
            }
            near.say(&Aside::HostFnDone { token });
        };
        self.host.host_function(token, Box::new(done));
    }

    fn read(&self, number: u64, addr: u64, len: usize) -> Result<(), String> {
        if len > CHUNK {
            return Err("it asks for more than a frame holds".into());
        }
        let mut bytes = vec![0; len];
        let read = self.host.read_client(addr, &mut bytes).map_err(|error| error.0);
        let bytes = read.map(|()| Bytes::new(bytes).unwrap_or_default());
        self.say(&Aside::Bytes { number, bytes });
        Ok(())
    }

    /// A connection that is broken ends the other as well.
    pub(crate) fn say(&self, message: &Aside) {
        let mut aside = locked(&self.aside);
        let _ = aside.add(message).and_then(|()| aside.flush());
    }
}
