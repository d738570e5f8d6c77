//! The near end of a session: an executor whose devices are on another machine.

use super::capture::{FarCapture, FarRoom};
use super::image_way::ImageWay;
use super::mirror::{Mirror, Scope};
use super::near::{Mirrored, NOT_FAR, Near, locked};
use super::near_lanes::{Dialling, NearLanes};
use super::outlet::refusal;
use super::shown_there::ShownThere;
use super::{Lent, Part, Touches, shares, touches};
use crate::ending;
use crate::error::CaptureError;
use crate::executor::{Build, Captured, Executor, Identity, NearEnd, Room, Shares};
use crate::host::ProxyHost;
use crate::moving::{Follows, Shown};
use kedge_control::joblog::JobLog;
use kedge_control::sharing::{Bond, What};
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_gpu_image::SavedStep;
use kedge_kernel_cache::{Digest, MAX_MODULE};
use kedge_protocol::{Call, Message, ModuleImage, PeerName};
use kedge_remote::{
    Answer, Aside, Ask, CHUNK, Capture, Connected, Dialer, Frames, ImageLineError, Links, Receiver,
    Sender, Sending, SessionKey, ToFar, Which, put_message,
};
use kedge_transport::{Incoming, ReplyTo, RingPlace, SLOTS};
use kedge_wire::{Bytes, List};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much longer an answer may take than what it is about.
const LATE: Duration = Duration::from_secs(10);
/// How long a client's end waits for room on the line.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// For the far end to copy its devices' memory: less than the control thread waits for it.
const CAPTURE_LIMIT: Duration = Duration::from_secs(45);
/// Swapping out packs it as well.
const SWAP_LIMIT: Duration = Duration::from_secs(1000);
/// Between two packets of posts at least: a post that follows others may wait so long for more.
const PACE: Duration = Duration::from_micros(20);
/// Images of modules from this length on are sent only where the far end has not got them.
const NAMED: u64 = 64 << 10;
/// The sessions of this process.
struct Sessions {
    /// Those that have not ended.
    open: Vec<(SessionKey, Arc<Links>)>,
    /// How many are being opened.
    opening: usize,
}

static SESSIONS: Mutex<Sessions> = Mutex::new(Sessions { open: Vec::new(), opening: 0 });
/// One less is being opened.
static OPENED: Condvar = Condvar::new();

/// A session is being opened: a process that ends meanwhile waits for that for a moment, since the
/// far end may have it already, and would wait for a line that nobody dials.
pub(super) struct Opening(());

impl Opening {
    pub(super) fn begin() -> Opening {
        ending::says_bye(say_bye);
        locked(&SESSIONS).opening += 1;
        Opening(())
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        locked(&SESSIONS).opening -= 1;
        OPENED.notify_all();
    }
}

/// Whether they are being told goodbye: that a line ends is no news then.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Takes note that a session of this process has ended: nobody is there to hear a goodbye, and
/// whoever watches this process end waits for it.
pub(super) fn is_over(key: &SessionKey) {
    locked(&SESSIONS).open.retain(|(of, _)| of != key);
}

/// Tells the far ends that the client has ended, if there are any. This process is about to end.
fn say_bye() {
    ENDING.store(true, Ordering::SeqCst);
    let opening = |sessions: &mut Sessions| sessions.opening > 0;
    let waited = OPENED.wait_timeout_while(locked(&SESSIONS), LAST_WORDS, opening);
    let mut all = waited.unwrap_or_else(PoisonError::into_inner).0;
    let sessions = std::mem::take(&mut all.open);
    drop(all);
    let told = sessions.into_iter().filter(|(_, links)| {
        let mut aside = Sending::new(Sender::new(links.clone(), Which::Aside));
        // Without a line, the far end gives the client up after some time.
        aside.add(&Aside::Bye {}).and_then(|()| aside.flush()).is_ok()
    });
    let until = Instant::now() + LAST_WORDS;
    for (_, links) in told.collect::<Vec<_>>() {
        links.wait_until_sent(Which::Aside, until.saturating_duration_since(Instant::now()));
    }
}

/// What a session begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resumes {
    /// How long it tries to go on after a cut.
    pub(crate) reconnect: Duration,
    /// Up to this one the client's messages are complete.
    pub(crate) done: u64,
    /// Whether the far end answers first how that went.
    pub(crate) restores: bool,
}

/// What the near end has of its client.
pub(crate) struct OfClient {
    /// Mapped in this process.
    pub(crate) arena: OwnedFd,
    /// Its socket, for descriptors.
    pub(crate) socket: OwnedFd,
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
    /// All that the client had changed has been looked for since it posted messages up to there in
    /// its ring.
    looked: u64,
    /// When posts last left because there were no more.
    flushed: Instant,
}

impl Session {
    /// Goes on with a session that has been opened. `over` is called when the session has ended,
    /// with why.
    pub(crate) fn new(
        (connected, key): (Connected, SessionKey),
        server: String,
        host: Arc<ProxyHost>,
        of_client: OfClient,
        resumes: Resumes,
        over: impl Fn(&str) + Send + Sync + 'static,
    ) -> io::Result<Session> {
        let Connected { line, .. } = connected;
        super::keep_freed_memory();
        let Resumes { reconnect, done, restores } = resumes;
        let OfClient { arena, socket } = of_client;
        let links = Links::start()?;
        let dialer = |which: Which, say: Option<Arc<JobLog>>| {
            let say = move |text: &str| {
                let news = say.iter().filter(|_| !ENDING.load(Ordering::SeqCst));
                news.for_each(|log| warn!(log, "{text}"));
            };
            Dialer::new(&server, key, which.number(), reconnect, say)
        };
        let log = Some(host.log.clone());
        let receiver = Receiver::new(links.clone(), Which::Line, dialer(Which::Line, log));
        receiver.inlet().go_on(line, |_, _| Ok(0))?;
        let aside = Receiver::new(links.clone(), Which::Aside, dialer(Which::Aside, None));
        let sender = |which| Sending::new(Sender::new(links.clone(), which));
        let over = Arc::new(over);
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
            works: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            asked: [const { AtomicBool::new(false) }; SLOTS],
            ordered: AtomicU32::new(restores.into()),
            named: Mutex::default(),
            lent: Lent::default(),
            broken: AtomicU32::new(0),
            exports: [const { AtomicBool::new(false) }; SLOTS],
            socket,
            lanes: NearLanes::new(Dialling { key, reconnect, over: over.clone() }),
        });
        let way = ImageWay::new(near.clone(), key, reconnect);
        let (answer, answers) = channel();
        let (hears, ends) = (near.clone(), over.clone());
        let hear = move || ends(&hears.hear(Frames::new(receiver), &answer));
        std::thread::Builder::new().name("line".into()).spawn(hear)?;
        let watches = near.clone();
        let watch = move || over(&watches.watch_aside(aside));
        std::thread::Builder::new().name("aside".into()).stack_size(256 << 10).spawn(watch)?;
        locked(&SESSIONS).open.push((key, links.clone()));
        let looks = near.clone();
        near.ticker.start("mirror", move || {
            looks.is_busy() && looks.tell_changes(Scope::All, false).is_ok()
        })?;
        Ok(Session {
            line: sender(Which::Line),
            near,
            answers,
            late: 0,
            way,
            patched: 0,
            looked: 0,
            flushed: Instant::now(),
        })
    }

    pub(crate) fn way(&self) -> &ImageWay {
        &self.way
    }

    /// Takes parts of the arena, by offset, for what the far end has as well; `shared`: whether
    /// there is any memory that devices see, too.
    pub(crate) fn agree(&self, parts: impl Iterator<Item = Range<u64>>, shared: bool) {
        self.near.shared.store(shared, Ordering::SeqCst);
        // What the devices have changed as they were made again is told with the next message's
        // end.
        self.near.writes.store(self.near.sent.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
        let mut mirrored = locked(&self.near.mirror);
        parts.for_each(|part| mirrored.mirror.agree(part));
    }

    /// Takes note of what the record of a client names that goes on from an image.
    pub(crate) fn remember(&self, steps: &[SavedStep]) {
        locked(&self.near.named).remember(steps);
        self.near.lent.remember(steps);
    }

    /// Waits for an answer.
    pub(crate) fn answer(&self, limit: Duration) -> Option<Answer> {
        self.answers.recv_timeout(limit).ok()
    }

    /// Goes on behind a message: all up to it are complete.
    pub(crate) fn goes_on_from(&self, position: u64) {
        self.near.sent.store(position, Ordering::SeqCst);
        self.near.completed.store(position, Ordering::SeqCst);
    }

    /// Has the far end get all that the client has in memory that both see.
    pub(crate) fn bring_all_over(&mut self) -> io::Result<()> {
        self.bring_over(Scope::All)
    }

    /// Has the far end get what the client has changed, before what is sent next.
    fn bring_over(&mut self, scope: Scope<'_>) -> io::Result<()> {
        let alone =
            self.near.completed.load(Ordering::SeqCst) >= self.near.writes.load(Ordering::SeqCst);
        let count = self.near.tell_changes(scope, alone)?;
        if count > self.patched {
            self.patched = count;
            self.line.add(&ToFar::Patched { count })?;
        }
        Ok(())
    }

    /// Has the far end get what the client has changed of what a message touches, as far as that
    /// has not been looked for since the client posted the message.
    fn bring_over_for(&mut self, touches: &Touches, place: Option<RingPlace>) -> io::Result<()> {
        if place.is_some_and(|place| place.end <= self.looked) {
            return Ok(());
        }
        match touches {
            Touches::Nothing => Ok(()),
            Touches::Parts { reads, writes } => {
                // What it reads may have been changed in part, and what it writes not at all.
                let some = |part: &Part| Part { range: part.range.clone(), whole: false };
                let parts: Vec<Part> = reads.iter().chain(writes).map(some).collect();
                self.bring_over(Scope::Parts(&parts))
            }
            Touches::Anything => {
                self.bring_over(Scope::All)?;
                self.looked = place.map_or(self.looked, |place| place.posted);
                Ok(())
            }
        }
    }

    /// Sends a message, and before it what it will read.
    fn send(
        &mut self,
        (seq, place): (u64, Option<RingPlace>),
        to: Option<u32>,
        message: &Message,
    ) -> io::Result<()> {
        self.near.links.wait_for_room(Which::Line)?;
        if shares(message) {
            self.near.shared.store(true, Ordering::SeqCst);
        }
        self.near.lent.note(message);
        let touches = match self.near.shared.load(Ordering::SeqCst) {
            true => touches(message, &self.near.lent),
            false => Touches::Nothing,
        };
        let works = touches == Touches::Anything;
        let writes = works || matches!(touches, Touches::Parts { writes: Some(_), .. });
        self.bring_over_for(&touches, place)?;
        match message {
            Message::Call { call: Call::ModuleLoad { image, .. } } => self.stage(image)?,
            Message::Call { call: Call::ModuleLink { images, .. } } => {
                images.iter().try_for_each(|image| self.stage(image))?;
            }
            _ => {}
        }
        locked(&self.near.named).add(seq, message);
        self.near.sent.store(seq, Ordering::SeqCst);
        self.line.put(|w| put_message(seq, to, message, w))?;
        if writes {
            self.near.writes.store(seq, Ordering::SeqCst);
        }
        if works {
            self.near.works.store(seq, Ordering::SeqCst);
            self.near.ticker.wake();
        }
        if to.is_some() { self.line.flush() } else { Ok(()) }
    }

    /// Sends a module's image, or what it is called. What cannot be read is not sent, and found
    /// missing there.
    fn stage(&mut self, image: &ModuleImage) -> io::Result<()> {
        if (NAMED..=MAX_MODULE).contains(&image.len)
            && let Ok(digest) = self.digest(image)
        {
            let (addr, len, digest) = (image.addr, image.len, digest.bytes());
            return self.line.add(&ToFar::Named { addr, len, digest });
        }
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

    fn digest(&self, image: &ModuleImage) -> Result<Digest, CuError> {
        let part = |at: u64| {
            let count = (image.len - at).min(CHUNK as u64);
            let addr = image.addr.checked_add(at).ok_or(CuError::INVALID_VALUE)?;
            self.near.host.read_bytes(addr, count as usize)
        };
        Digest::of_parts((0..image.len).step_by(CHUNK).map(part))
    }

    /// Gives an order, and waits for its answer.
    fn ask(&mut self, ask: Ask, limit: Duration) -> Option<Answer> {
        self.near.ordered.fetch_add(1, Ordering::SeqCst);
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
        let Incoming { seq, mut message, reply_to, place } = incoming;
        if let (Some(to), Message::Call { call }) = (&reply_to, &mut message) {
            if let Err(error) = self.near.crosses(call) {
                let _ = self.near.host.outlet.reply(to.clone(), &refusal(error));
                return;
            }
            let slot = to.number() as usize;
            let exports = matches!(call, Call::HandleExport { .. });
            self.near.exports[slot].store(exports, Ordering::SeqCst);
            self.near.asked[slot].store(true, Ordering::SeqCst);
        }
        let to = reply_to.as_ref().map(ReplyTo::number);
        // That it is broken is found out by the thread that hears it.
        let _ = self.send((seq, place), to, &message);
    }

    fn flush(&mut self) -> Duration {
        if self.line.is_empty() {
            return Duration::ZERO;
        }
        let left = PACE.saturating_sub(self.flushed.elapsed());
        if left.is_zero() {
            let _ = self.line.flush();
            self.flushed = Instant::now();
        }
        left
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
        self.bring_over(Scope::All).map_err(|error| ImageLineError::Line(error.into()))?;
        let Build { track, parent } = on;
        let capture = Capture { track, parent, ..capture_of(near)? };
        let (number, bytes) = self.captured(Ask::Capture { capture }, CAPTURE_LIMIT)?;
        let (way, near) = (self.way.clone(), self.near.clone());
        Ok(Box::new(FarCapture { way, near, number, bytes }))
    }

    fn show(
        &mut self,
        near: &NearEnd<'_>,
        follows: Follows,
    ) -> Result<Box<dyn Shown>, CaptureError> {
        let first = matches!(follows, Follows::Nothing);
        let capture = capture_of(near)?;
        let (number, bytes) = self.captured(Ask::Show { capture, first }, CAPTURE_LIMIT)?;
        let (way, near) = (self.way.clone(), self.near.clone());
        Ok(Box::new(ShownThere { way, near, number, bytes }))
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

/// What a far end needs of this one for a capture that holds all.
fn capture_of(near: &NearEnd<'_>) -> Result<Capture, CaptureError> {
    let Identity { hello, client_memory, devices, .. } = near.identity.clone();
    let (devices, position) = (List::new(devices)?, near.position);
    Ok(Capture { hello, client_memory, devices, position, track: false, parent: None })
}

fn not_far() -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, NOT_FAR)
}
