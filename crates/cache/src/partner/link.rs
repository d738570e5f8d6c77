//! The way to a partner: its connection, and what it is to be told.

use super::account::Limits;
use super::turns::{Turn, Turns};
use super::wire::{Hello, PART, Said, VERSION};
use crate::CacheError;
use crate::journal::Record;
use crate::ranges::RangeMap;
use crate::spec::{PartnerAddress, Spec, memory_home};
use crate::tier::lock;
use kedge_keys::{Connection, Keys, Whose};
use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The file in the home in memory that says which cache it is.
const TOKEN: &str = "partner-token";
/// How long a connection may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How long the partner may take for what it is sent at once and for its answer, and an fsync
/// beside the time for its data: it drains then.
pub(super) const ANSWER: Duration = Duration::from_secs(20);
/// Lowest rate at which the partner has to take data, in bytes per second, for all who send at
/// once.
const MIN_RATE: u64 = 4 << 20;
/// A part of that length takes so long at most.
const MOMENT: Duration = Duration::from_millis(PART * 1000 / MIN_RATE);
/// Why a connection was given up.
pub(super) const SLOW: &str = "it has not taken what it was sent, or not answered, in time";
/// What a partner answers that is there, and has no room for this cache.
const REFUSED: io::ErrorKind = io::ErrorKind::PermissionDenied;
/// Notes that wait to be sent; with more, the connection is of no use.
const NOTES: usize = 1 << 20;

/// The way to the partner.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) address: PartnerAddress,
    pub(super) hello: Hello,
    /// Whoever begins a session has this, and before the wire.
    pub(super) connecting: Mutex<()>,
    /// Is locked before any file's state.
    pub(super) wire: Turns<Option<Wire>>,
    /// How long each answer may take.
    pub(super) answer: Duration,
    /// The connection, for who waits too long for another one's turn on it.
    line: Mutex<Option<TcpStream>>,
    /// Whether it was ended for that.
    late: AtomicBool,
    /// What it is to be told before anything else, in this order. Is locked after files' states.
    pub(super) notes: Mutex<Notes>,
    pub(super) connected: AtomicBool,
    /// When the last answer was heard.
    pub(super) heard: Mutex<Option<Instant>>,
    pub(super) sent: AtomicU64,
    pub(super) drained: AtomicU64,
    pub(super) why: Mutex<Option<String>>,
}

/// What a partner is to be told.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) waiting: Vec<Record>,
    /// How many there ever were, and how many of them an answer has come after.
    pub(super) noted: u64,
    pub(super) told: u64,
    /// The same, where a new session has not counted for an answer.
    answered: u64,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) connection: Connection,
    /// Messages that are sent before it is cut, where a test asks for that.
    left: Option<u64>,
    /// When the last answer was heard.
    pub(super) heard: Option<Instant>,
}

impl Wire {
    pub(super) fn say(&mut self, said: &Said) -> io::Result<()> {
        self.count()?;
        said.write(&mut self.connection)
    }

    pub(super) fn count(&mut self) -> io::Result<()> {
        match &mut self.left {
            Some(0) => Err(io::ErrorKind::ConnectionReset.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Ends all that is said and heard at a moment, however slowly it is taken or comes.
    fn limit(&mut self, until: Instant) {
        self.connection.write_until(until);
        self.connection.read_until(until);
    }

    fn hear(&mut self) -> io::Result<Said> {
        self.count()?;
        let said = Said::read(&mut self.connection)?;
        self.heard = Some(Instant::now());
        Ok(said)
    }

    /// Asks, and returns why it was not done, if it was not.
    pub(super) fn ask(&mut self, said: &Said) -> io::Result<Result<(), String>> {
        self.say(said)?;
        match self.hear()? {
            Said::Done => Ok(Ok(())),
            Said::Failed(why) => Ok(Err(why)),
            _ => Err(io::Error::other("the partner gives no answer")),
        }
    }
}

impl Link {
    /// Makes the way to the partner of a cache; nothing is connected yet.
    pub(crate) fn new(spec: &Spec, address: &PartnerAddress) -> Result<Link, CacheError> {
        let at = memory_home(&spec.under).join(TOKEN);
        let failed = |error| CacheError::io("cannot use", &at, error);
        let token = match fs::read_to_string(&at) {
            Ok(token) => token,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let random = || RandomState::new().build_hasher().finish();
                let token = format!("{:016x}{:016x}", random(), random());
                // In memory: it is gone when that is.
                let new = at.with_extension("new");
                fs::write(&new, &token).and_then(|()| fs::rename(&new, &at)).map_err(failed)?;
                token
            }
            Err(error) => return Err(failed(error)),
        };
        let node = fs::read_to_string("/proc/sys/kernel/hostname").map_err(failed)?;
        let under = spec.under.clone();
        Ok(Link {
            address: address.clone(),
            hello: Hello { version: VERSION, under, node: node.trim().to_owned(), token },
            connecting: Mutex::default(),
            wire: Turns::default(),
            answer: ANSWER,
            line: Mutex::default(),
            late: AtomicBool::new(false),
            notes: Mutex::default(),
            connected: AtomicBool::new(false),
            heard: Mutex::default(),
            sent: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            why: Mutex::default(),
        })
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::SeqCst)
    }

    /// Has the partner be told of something later, before anything else is sent.
    pub(super) fn note(&self, record: Record) {
        if !self.is_connected() {
            // What it is to keep is settled when it is there again.
            return;
        }
        let mut notes = lock(&self.notes);
        if notes.waiting.len() >= NOTES {
            self.connected.store(false, Ordering::SeqCst);
            notes.waiting.clear();
            return;
        }
        notes.waiting.push(record);
        notes.noted += 1;
    }

    /// Returns what is to be told now, and how many notes that makes.
    pub(super) fn take_notes(&self) -> (Vec<Record>, u64) {
        let mut notes = lock(&self.notes);
        (std::mem::take(&mut notes.waiting), notes.noted)
    }

    /// Whether the partner may have what is older than what is below, and was not told that.
    pub(crate) fn is_behind(&self) -> bool {
        let notes = lock(&self.notes);
        !self.is_connected() || notes.told != notes.noted
    }

    /// Connects, and shakes hands unless the partner is on this machine.
    fn connect(&self) -> io::Result<Connection> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in self.address.socket().to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, LIMIT) {
                Ok(stream) => return self.secure(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn secure(&self, mut stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        if stream.peer_addr()?.ip().to_canonical().is_loopback() {
            // Another user of this machine could listen there.
            let begin = Instant::now();
            loop {
                match kedge_keys::whose(&stream)? {
                    Whose::Own => return Ok(stream.into()),
                    Whose::Another => return Err(io::Error::other("another user listens there")),
                    // It is not taken up as yet.
                    Whose::Nobodys if begin.elapsed() < LIMIT => {
                        thread::sleep(Duration::from_millis(5));
                    }
                    Whose::Nobodys => return Err(io::ErrorKind::TimedOut.into()),
                }
            }
        }
        let keys = Keys::of_user().map_err(io::Error::other)?;
        let own = keys.identity().map_err(io::Error::other)?;
        let pins = Arc::new(keys.pins().map_err(io::Error::other)?);
        let name = pins.name_of(&self.address.socket()).map_err(io::Error::other)?;
        let shaken = kedge_keys::connect(&mut stream, &own, &pins, &name, LIMIT);
        Ok(Connection::new(stream, Some(shaken.map_err(io::Error::other)?))?)
    }

    /// Begins a session, and returns what the partner has of each file.
    pub(super) fn begin(
        &self,
        left: Option<u64>,
    ) -> io::Result<(Wire, HashMap<u64, RangeMap<()>>)> {
        let until = Instant::now() + LIMIT + self.answer;
        let mut wire = Wire { connection: self.connect()?, left, heard: None };
        wire.limit(until);
        wire.say(&Said::Hello(self.hello.clone()))?;
        let mut held: HashMap<u64, RangeMap<()>> = HashMap::new();
        let mut parts = 0;
        loop {
            match wire.hear()? {
                Said::Note(Record::Write(file, offset, length)) => {
                    let range = offset..offset.saturating_add(length);
                    parts += 1;
                    if parts > Limits::new().most_parts() {
                        return Err(io::Error::other("the partner has more than it can have"));
                    }
                    held.entry(file).or_default().insert(range, ());
                }
                Said::Done => return Ok((wire, held)),
                Said::Failed(why) => return Err(io::Error::new(REFUSED, why)),
                _ => return Err(io::Error::other("the partner says what it should not")),
            }
        }
    }

    /// Takes the connection of a new session for one that can be ended.
    pub(super) fn keep_line(&self, line: TcpStream) {
        self.late.store(false, Ordering::SeqCst);
        *lock(&self.line) = Some(line);
    }

    /// Returns when an fsync that has so many bytes to send is to drain them instead.
    pub(super) fn patience(&self, bytes: u64) -> Instant {
        Instant::now() + self.answer + Duration::from_secs(bytes / MIN_RATE)
    }

    /// Waits for a turn on the wire, with a moment left of the time until `until`.
    ///
    /// A wire on which there was no turn for so long, and no answer a moment ago, is of no use: it
    /// is ended, with whoever waits for the partner there. Where there are answers, too many wait.
    pub(super) fn turn(&self, until: Instant) -> Option<Turn<'_, Option<Wire>>> {
        let turn = self.wire.wait_until(until.checked_sub(self.moment()).unwrap_or(until));
        if let Some(turn) = turn.filter(|_| Instant::now() < until) {
            return Some(turn);
        }
        self.end_silent();
        None
    }

    fn moment(&self) -> Duration {
        MOMENT.min(self.answer / 4)
    }

    /// Has all that was noted count as answered.
    #[cfg(test)]
    pub(super) fn answer_notes(&self) {
        let mut notes = lock(&self.notes);
        notes.answered = notes.noted;
    }

    /// Ends the wire if there was no answer a moment ago.
    fn end_silent(&self) {
        let answers = lock(&self.heard).is_some_and(|heard| heard.elapsed() < self.moment());
        let line = if answers { None } else { lock(&self.line).take() };
        if let Some(line) = line {
            self.late.store(true, Ordering::SeqCst);
            let _ = line.shutdown(Shutdown::Both);
        }
    }

    /// Has the partner have answered after it was told all that was noted by now. `None` if it did
    /// not in time.
    ///
    /// Whoever has a turn tells it, too: where many wait for theirs, nobody waits for one more.
    pub(super) fn tell_noted(&self) -> Option<Result<(), String>> {
        let noted = lock(&self.notes).noted;
        let until = Instant::now() + self.answer;
        while Instant::now() < until && self.is_connected() {
            if lock(&self.notes).answered >= noted {
                return Some(Ok(()));
            }
            if let Some(mut wire) = self.wire.wait_until(Instant::now() + self.moment()) {
                let until = Instant::now() + self.answer;
                return self.with(&mut wire, until, |wire| wire.ask(&Said::Beat));
            }
        }
        self.end_silent();
        None
    }

    /// Gives the connection up.
    pub(super) fn lose(&self, wire: &mut Option<Wire>, error: &io::Error) {
        *wire = None;
        lock(&self.line).take();
        self.connected.store(false, Ordering::SeqCst);
        lock(&self.notes).waiting.clear();
        let is_late = matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
            | self.late.swap(false, Ordering::SeqCst);
        let text = if is_late { SLOW.to_owned() } else { error.to_string() };
        let text: String = text.chars().filter(|it| !it.is_control()).collect();
        let said = lock(&self.why).replace(text.clone());
        if said.as_ref() != Some(&text) {
            let at = self.address.socket();
            let _ = writeln!(io::stderr(), "kedge: the partner {at}: {text}; fsync drains");
        }
    }

    /// Sends what waits to be told, and what `more` says, until a moment at most.
    pub(super) fn with<R>(
        &self,
        wire: &mut Option<Wire>,
        until: Instant,
        more: impl FnOnce(&mut Wire) -> io::Result<R>,
    ) -> Option<R> {
        let notes = self.take_notes();
        self.with_notes(wire, until, notes, more)
    }

    /// The same, with what waited a moment ago.
    pub(super) fn with_notes<R>(
        &self,
        wire: &mut Option<Wire>,
        until: Instant,
        (notes, noted): (Vec<Record>, u64),
        more: impl FnOnce(&mut Wire) -> io::Result<R>,
    ) -> Option<R> {
        let open = wire.as_mut().filter(|_| self.is_connected())?;
        // Others wait for their turn.
        open.limit(until.min(Instant::now() + self.answer));
        let before = open.heard;
        let told = notes.into_iter().try_for_each(|note| open.say(&Said::Note(note)));
        match told.and_then(|()| more(open)) {
            Ok(result) => {
                if let Some(heard) = open.heard.filter(|_| open.heard != before) {
                    lock(&self.heard).replace(heard);
                    let mut notes = lock(&self.notes);
                    (notes.told, notes.answered) = (noted, noted);
                }
                Some(result)
            }
            Err(error) => {
                self.lose(wire, &error);
                None
            }
        }
    }

    /// Has the partner answer that it has been told all; `None` if it cannot.
    pub(super) fn beat(&self) -> Option<Result<(), String>> {
        let until = Instant::now() + self.answer;
        self.turn(until).and_then(|mut wire| {
            let until = Instant::now() + self.answer;
            self.with(&mut wire, until, |wire| wire.ask(&Said::Beat))
        })
    }

    /// Has the partner give up all that it keeps: it is below.
    pub(crate) fn end(&self) -> Result<(), String> {
        let _connecting = lock(&self.connecting);
        let mut wire = self.wire.wait();
        let at = self.address.socket();
        let until = Instant::now() + self.answer;
        let done = match self.with(&mut wire, until, |wire| wire.ask(&Said::End)) {
            Some(done) => done,
            None => match self.begin(None) {
                Ok((mut fresh, _)) => {
                    fresh.limit(Instant::now() + self.answer);
                    fresh.ask(&Said::End).unwrap_or_else(|error| Err(error.to_string()))
                }
                // It says what is to be done there.
                Err(error) if error.kind() == REFUSED => {
                    return Err(format!("the partner {at}: {error}"));
                }
                Err(error) => Err(error.to_string()),
            },
        };
        *wire = None;
        lock(&self.line).take();
        self.connected.store(false, Ordering::SeqCst);
        done.map_err(|why| {
            format!(
                "the partner {at} may keep what is below now: {why}; recover nothing there before \
                 `kedge cache recover` has told it, or a cache with that partner has run here"
            )
        })
    }
}
