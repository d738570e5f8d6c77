//! What the far end of a session tells the near one.

use super::far_lanes::FarLanes;
use super::mirror::{Look, Mirror, Scope};
use super::ticker::Ticker;
use super::{Lent, Part, Touches};
use crate::outlet::Outlet;
use kedge_cuda_types::CuError;
use kedge_device::Backend;
use kedge_protocol::CtxId;
use kedge_remote::{Answer, CHUNK, LANE_BYTES, Links, Sender, Sending, ToNear, Which, put_patches};
use kedge_transport::ReplyTo;
use kedge_wire::{Bytes, Text};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Chunks of the client's memory that a copy asks for before the first has come.
const AHEAD: usize = 16;
/// Fewest bytes that a part of it counts for.
const MIN_COST: u64 = 4096;

/// The line to the near end. What is sent on it is in the order in which it came about: memory that
/// devices have changed is told before whatever says that they are done.
pub(crate) struct Line {
    links: Arc<Links>,
    sending: Mutex<Sending<Sender>>,
    mirror: Mutex<Mirror>,
    work: Work,
    /// What of the client devices see at addresses of theirs.
    pub(super) lent: Lent,
    ticker: Arc<Ticker>,
    progress: Progress,
    reads: Reads,
    patches: Patches,
    pub(super) lanes: FarLanes,
}

/// While messages wait to be carried out, progress is told so often at most: to tell it takes
/// longer than many messages do.
const PACE: Duration = Duration::from_millis(1);

/// Up to which message all is complete.
struct Progress {
    /// In fact, and as the near end was told.
    newest: AtomicU64,
    told: AtomicU64,
    /// Whether messages wait to be carried out.
    more: AtomicBool,
    /// When it was last told by itself, microseconds from `begin`.
    last: AtomicU64,
    begin: Instant,
}

impl Progress {
    fn new() -> Progress {
        let (newest, told, more, last) = Default::default();
        Progress { newest, told, more, last, begin: Instant::now() }
    }

    /// Returns whether it is to be told by itself, and not with what is told next.
    fn is_due(&self) -> bool {
        if !self.more.load(Ordering::Relaxed) {
            return true;
        }
        let (now, last) = (self.begin.elapsed().as_micros() as u64, &self.last);
        let due = now.saturating_sub(last.load(Ordering::Relaxed)) > PACE.as_micros() as u64;
        if due {
            last.store(now, Ordering::Relaxed);
        }
        due
    }
}

/// What the client has changed, as it arrives.
#[derive(Default)]
struct Patches {
    /// How often it has, and whether no more will come.
    state: Mutex<(u64, bool)>,
    arrived: Condvar,
}

/// Parts of memory that devices may have changed are kept one by one up to this many.
const PARTS: usize = 64;

/// Whether devices may have changed anything.
#[derive(Default)]
struct Work {
    /// Messages that may make them do so: begun, and handed over to the devices.
    begun: AtomicU64,
    ended: AtomicU64,
    /// Those whose changes have all been told.
    told: AtomicU64,
    /// The newest that may change anything.
    whole: AtomicU64,
    /// What the others may change, with the number of each.
    parts: Mutex<Vec<(u64, Part)>>,
    /// Whether there is any memory that the client and devices see.
    shared: AtomicBool,
    backend: OnceLock<Weak<dyn Backend>>,
}

/// What the near end is asked for of the client's private memory.
#[derive(Default)]
struct Reads {
    state: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    /// By number: `None` until it has come.
    answers: HashMap<u64, Option<Result<Vec<u8>, CuError>>>,
    /// Memory of answers, for the next.
    spare: Vec<Vec<u8>>,
    /// No answer will come any more.
    over: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work {
    /// Takes note of what a message may change.
    fn add(&self, number: u64, part: Part) {
        let mut parts = locked(&self.parts);
        // What was there before may be over, and the client may change the rest of such a page.
        let older = parts.iter_mut().map(|(_, older)| older);
        older.filter(|older| older.shares_page(&part)).for_each(|older| older.whole = false);
        if parts.len() < PARTS {
            parts.push((number, part));
        } else {
            parts.clear();
            self.whole.store(number, Ordering::SeqCst);
        }
    }

    /// Returns whether there is work that may change anything, and what it has changed has not all
    /// been told.
    fn is_whole(&self) -> bool {
        self.whole.load(Ordering::SeqCst) > self.told.load(Ordering::SeqCst)
    }

    /// Returns where changes are to be looked for, all up to `told` having been told.
    fn scope<'a>(&self, told: u64, parts: &'a mut Vec<Part>) -> Scope<'a> {
        parts.extend(locked(&self.parts).iter().map(|(_, part)| part.clone()));
        if self.whole.load(Ordering::SeqCst) > told { Scope::All } else { Scope::Parts(parts) }
    }

    /// All changes of messages up to this one have been told.
    fn are_told(&self, number: u64) {
        locked(&self.parts).retain(|(of, _)| *of > number);
        self.told.fetch_max(number, Ordering::SeqCst);
    }
}

impl Line {
    /// Makes it, with a thread that tells what devices change while they work.
    pub(crate) fn start(links: Arc<Links>, mirror: Mirror) -> io::Result<Arc<Line>> {
        let sender = Sender::new(links.clone(), Which::Line);
        let (sending, mirror) = (Mutex::new(Sending::new(sender)), Mutex::new(mirror));
        let (work, lent, ticker, reads, patches, lanes) = Default::default();
        let progress = Progress::new();
        let line =
            Line { links, sending, mirror, work, lent, ticker, progress, reads, patches, lanes };
        let line = Arc::new(line);
        let looks = line.clone();
        line.ticker
            .start("mirror", move || looks.work.is_whole() && looks.tell_changes(None).is_ok())?;
        Ok(line)
    }

    /// From now on there is memory that the client and devices see.
    pub(crate) fn something_is_shared(&self) {
        self.work.shared.store(true, Ordering::SeqCst);
    }

    /// Takes parts of the arena, by offset, for what the near end has as well. What else is there
    /// is told as what devices have changed.
    pub(crate) fn agree(&self, parts: impl Iterator<Item = Range<u64>>) {
        let mut mirror = locked(&self.mirror);
        parts.for_each(|part| mirror.agree(part));
    }

    /// Tells it whose work it is; once.
    pub(crate) fn set_backend(&self, backend: &Arc<dyn Backend>) {
        let _ = self.work.backend.set(Arc::downgrade(backend));
    }

    /// A message is about to be carried out; returns whether it may have devices change memory that
    /// the client sees.
    pub(crate) fn work_begins(&self, touches: Touches) -> bool {
        let work = &self.work;
        if !work.shared.load(Ordering::SeqCst) {
            return false;
        }
        // Only the thread that carries messages out counts.
        let number = work.begun.load(Ordering::SeqCst) + 1;
        match touches {
            Touches::Nothing | Touches::Parts { writes: None, .. } => return false,
            Touches::Parts { writes: Some(part), .. } => work.add(number, part),
            Touches::Anything => {
                work.whole.store(number, Ordering::SeqCst);
                self.ticker.wake();
            }
        }
        work.begun.store(number, Ordering::SeqCst);
        true
    }

    pub(crate) fn work_is_handed_over(&self) {
        self.work.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// Sends `message` at once, after what devices have changed.
    pub(crate) fn say(&self, message: &ToNear) -> io::Result<()> {
        self.tell_changes(Some(message))
    }

    /// Sends `message` with whatever is sent next.
    fn say_soon(&self, message: &ToNear) -> io::Result<()> {
        locked(&self.sending).add(message)
    }

    /// Sends `message` at once, which says nothing of what devices have done.
    pub(crate) fn say_now(&self, message: &ToNear) -> io::Result<()> {
        let mut sending = locked(&self.sending);
        sending.add(message)?;
        sending.flush()
    }

    /// Sends what devices have changed, then `message`. It waits for room between frames, so
    /// whoever reads the aside must not call it.
    fn tell_changes(&self, message: Option<&ToNear>) -> io::Result<()> {
        let work = &self.work;
        // What had been completed by now has been looked for when that is told.
        let completed = self.progress.newest.load(Ordering::SeqCst);
        let (begun, told) = (work.begun.load(Ordering::SeqCst), work.told.load(Ordering::SeqCst));
        if begun != told {
            // In this order: all that had begun is with the devices, which have finished it, before
            // what it has changed is looked for.
            let all_there = work.ended.load(Ordering::SeqCst) == begun;
            let idle = || work.backend.get().and_then(Weak::upgrade).is_some_and(|b| b.is_idle());
            let all = all_there && idle();
            let mut look = locked(&self.mirror).look(work.scope(told, &mut Vec::new()), false)?;
            while self.tell_some(&mut look)? {
                self.links.wait_for_room(Which::Line)?;
            }
            if all {
                work.are_told(begun);
            }
        }
        let mut sending = locked(&self.sending);
        self.lanes.tell(&mut sending)?;
        if self.progress.told.fetch_max(completed, Ordering::SeqCst) < completed {
            sending.add(&ToNear::Completed { seq: completed })?;
        }
        message.map_or(Ok(()), |message| sending.add(message))?;
        sending.flush()
    }

    /// Tells whether messages wait to be carried out.
    pub(crate) fn more_follows(&self, more: bool) {
        self.progress.more.store(more, Ordering::Relaxed);
    }

    /// All messages up to this one are complete, which is told now or with something else.
    fn completed(&self, seq: u64) {
        self.progress.newest.fetch_max(seq, Ordering::SeqCst);
        if self.progress.told.load(Ordering::SeqCst) < seq && self.progress.is_due() {
            let _ = self.tell_changes(None);
        }
    }

    /// Adds a frame of what devices have changed; `false` at the look's end.
    fn tell_some(&self, look: &mut Look) -> io::Result<bool> {
        let mut sending = locked(&self.sending);
        let mut frame = sending.large();
        let found = put_patches(true, &mut frame, |out| locked(&self.mirror).next(look, out));
        match found {
            true => sending.give(frame)?,
            false => sending.give_back(frame),
        }
        Ok(found)
    }

    /// Takes over what the client has changed; `false` where that is nonsense.
    pub(crate) fn patch(&self, packed: &[u8]) -> bool {
        let proper = locked(&self.mirror).apply(packed);
        locked(&self.patches.state).0 += 1;
        self.patches.arrived.notify_all();
        proper
    }

    /// Waits until the client's changes have come so often; `false` where they will not.
    pub(crate) fn wait_for_patches(&self, count: u64) -> bool {
        let state = locked(&self.patches.state);
        let waited = self.patches.arrived.wait_while(state, |(come, over)| *come < count && !*over);
        waited.unwrap_or_else(PoisonError::into_inner).0 >= count
    }

    /// Bytes that were asked for have come.
    pub(crate) fn arrived(&self, number: u64, bytes: Result<Vec<u8>, CuError>) {
        let mut waiting = locked(&self.reads.state);
        // What nobody waits for is no answer.
        if let Some(place) = waiting.answers.get_mut(&number) {
            *place = Some(bytes);
        }
        drop(waiting);
        self.reads.arrived.notify_all();
    }

    /// The near end is gone: whoever waits for its answers waits no longer.
    pub(crate) fn over(&self) {
        self.links.end();
        locked(&self.reads.state).over = true;
        self.reads.arrived.notify_all();
        locked(&self.patches.state).1 = true;
        self.patches.arrived.notify_all();
    }

    /// Stores bytes in the client's memory, before whatever is told later.
    pub(super) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        addr.checked_add(bytes.len() as u64).ok_or(CuError::INVALID_VALUE)?;
        let (mut at, mut rest) = (addr, bytes);
        while !rest.is_empty() {
            let room = CHUNK - (at % CHUNK as u64) as usize;
            let (part, later) = rest.split_at(room.min(rest.len()));
            let written = match self.lanes.carry(part.len()) {
                true => self.write_by_lane(at, part),
                false => self.write_by_line(at, part),
            };
            written.map_err(|_| CuError::OPERATING_SYSTEM)?;
            at += part.len() as u64;
            rest = later;
        }
        Ok(())
    }

    fn write_by_lane(&self, addr: u64, part: &[u8]) -> io::Result<()> {
        let after = self.lanes.writes();
        if self.lanes.line_waits(after) {
            locked(&self.sending).flush()?;
        }
        self.lanes.write(addr, part, after)
    }

    fn write_by_line(&self, addr: u64, part: &[u8]) -> io::Result<()> {
        let bytes = Bytes::new(part.to_vec()).unwrap_or_default();
        let _ = self.links.wait_for_room(Which::Line);
        let mut sending = locked(&self.sending);
        self.lanes.tell(&mut sending)?;
        sending.add(&ToNear::Write { addr, bytes })?;
        self.lanes.line_writes();
        Ok(())
    }

    /// Has the near end read the client's memory.
    pub(super) fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        addr.checked_add(out.len() as u64).ok_or(CuError::INVALID_VALUE)?;
        let chunks = out.chunks_mut(CHUNK).enumerate();
        self.read_all(chunks.map(|(index, part)| (addr + (index * CHUNK) as u64, part)).collect())
    }

    /// Has the near end read parts of the client's memory.
    pub(super) fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        if parts.iter().any(|(_, part)| part.len() > CHUNK) {
            return parts.iter_mut().try_for_each(|(addr, part)| self.read(*addr, part));
        }
        self.read_all(parts.iter_mut().map(|(addr, part)| (*addr, &mut **part)).collect())
    }

    /// Has the near end read parts, of [`CHUNK`] bytes at most, and [`AHEAD`] of them before the
    /// first has come: a line is long, and asking anew for each would wait for it each time.
    fn read_all(&self, parts: Vec<(u64, &mut [u8])>) -> Result<(), CuError> {
        let all: Vec<(u64, u32)> =
            parts.iter().map(|(addr, part)| (*addr, part.len() as u32)).collect();
        let (mut asked, mut result, mut to_ask) = (VecDeque::new(), Ok(()), all.iter());
        let (mut ahead, chunk) = (0, CHUNK as u64);
        for (_, part) in parts {
            while result.is_ok()
                && ahead < AHEAD as u64 * chunk
                && let Some((addr, len)) = to_ask.next()
            {
                match self.ask(*addr, *len) {
                    Ok(number) => asked.push_back(number),
                    Err(error) => result = Err(error),
                }
                // What is short is not free.
                ahead += u64::from(*len).max(MIN_COST);
            }
            // What was asked for is taken also where something else has failed.
            let Some(number) = asked.pop_front() else { break };
            let taken = self.take(number, part);
            ahead = ahead.saturating_sub((part.len() as u64).max(MIN_COST));
            result = result.and(taken);
        }
        for number in asked {
            let _ = self.take(number, &mut []);
        }
        result
    }

    /// Asks the near end for bytes of the client's memory.
    fn ask(&self, addr: u64, len: u32) -> Result<u64, CuError> {
        let number = {
            let mut waiting = locked(&self.reads.state);
            waiting.last += 1;
            let number = waiting.last;
            waiting.answers.insert(number, None);
            number
        };
        let mut sending = locked(&self.sending);
        // It may be what was written just now.
        let asked = self.lanes.tell(&mut sending);
        let asked = asked.and_then(|()| sending.add(&ToNear::Read { number, addr, len }));
        let asked = asked.and_then(|()| sending.flush());
        asked.map(|()| number).map_err(|_| {
            locked(&self.reads.state).answers.remove(&number);
            CuError::OPERATING_SYSTEM
        })
    }

    /// Waits for bytes that were asked for.
    fn take(&self, number: u64, out: &mut [u8]) -> Result<(), CuError> {
        let none_yet = |waiting: &mut Waiting| {
            !waiting.over && matches!(waiting.answers.get(&number), Some(None))
        };
        let waiting = locked(&self.reads.state);
        let waited = self.reads.arrived.wait_while(waiting, none_yet);
        let mut waiting = waited.unwrap_or_else(PoisonError::into_inner);
        let answer = waiting.answers.remove(&number).flatten();
        let bytes = answer.unwrap_or(Err(CuError::OPERATING_SYSTEM))?;
        if bytes.len() != out.len() {
            return Err(CuError::INVALID_VALUE);
        }
        // Others need not wait for it.
        drop(waiting);
        out.copy_from_slice(&bytes);
        self.give_room(bytes);
        Ok(())
    }

    /// Returns memory for an answer.
    pub(super) fn room(&self) -> Vec<u8> {
        locked(&self.reads.state).spare.pop().unwrap_or_default()
    }

    fn give_room(&self, room: Vec<u8>) {
        let spare = &mut locked(&self.reads.state).spare;
        if room.len() >= LANE_BYTES && spare.len() < AHEAD {
            spare.push(room);
        }
    }
}

/// A [`Line`] as what hosts the devices knows it.
pub(crate) struct LineOutlet(pub(crate) Arc<Line>);

impl LineOutlet {
    /// A line that is broken is found out by who reads it.
    fn say(&self, message: &ToNear) {
        let _ = self.0.say(message);
    }
}

impl Outlet for LineOutlet {
    fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        let bytes = Bytes::new(bytes.to_vec()).map_err(|error| error.to_string())?;
        let reply = ToNear::Reply { to: to.number(), bytes };
        self.0.say(&reply).map_err(|error| error.to_string())
    }

    fn set_sticky(&self, ctx: CtxId, error: CuError) {
        self.say(&ToNear::Sticky { ctx, error: error.0 });
    }

    fn clear_sticky(&self, ctx: CtxId) {
        self.say(&ToNear::Sticky { ctx, error: 0 });
    }

    fn wants_reader(&self) -> bool {
        true
    }

    fn set_completed(&self, seq: u64) {
        self.0.completed(seq);
    }

    fn set_output_pending(&self, pending: bool) {
        let _ = self.0.say_soon(&ToNear::Output { pending });
    }

    fn try_host_fn(&self, token: u64) -> bool {
        self.say(&ToNear::HostFn { token });
        true
    }

    fn close(&self) {
        let why = Text::truncated("the proxy beside the devices has ended".into());
        self.say(&ToNear::Closed { why });
    }
}

/// An answer to an order.
pub(crate) fn answer(line: &Line, answer: Answer) -> io::Result<()> {
    line.say(&ToNear::Answer { answer })
}

/// A line of the log, for the job's own.
pub(crate) fn log(line: &Line, text: String) {
    let _ = line.say_soon(&ToNear::Line { text: Text::truncated(text) });
}

/// Encodes a refusal of a call, which is the same for all types of replies.
pub(crate) fn refusal(error: CuError) -> Vec<u8> {
    let mut bytes = Vec::new();
    let status: kedge_protocol::Status = Err(error.0);
    kedge_wire::encode(&status, &mut bytes);
    bytes
}
