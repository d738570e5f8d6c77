//! The relay: a rank at one side, its step's daemon at the other.

use crate::frame::{Command, frame, take_frame};
use crate::line::{Line, Version, take_line};
use crate::session::{MAX_KEY_LEN, MAX_VALUE_LEN, Rank};
use crate::{MAX_FRAME_LEN, PmiError};
use serde::{Deserialize, Serialize};

/// Most requests of a rank that must be told again.
pub const MAX_TOLD: usize = 4096;
/// Most bytes of all of them.
pub const MAX_TOLD_BYTES: usize = 4 << 20;
/// So many bytes may wait for the rank before no more is read from it.
const UNREAD: usize = 1 << 20;
/// So many requests may be under way.
const ASKED: usize = 256;
/// Waits for all ranks of the step.
const FENCE: &str = "kvs-fence";
/// PMI-1's name for an attribute of the step, which it asks for as for a key.
const MAPPING: &str = "PMI_process_mapping";
/// Longest name of a step, in bytes (PMI-1's own bound).
const MAX_NAME_LEN: usize = 256;

/// What an image holds of a rank's session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    pub rank: u32,
    pub size: u32,
    /// The step's name, as the rank knows it.
    step: String,
    /// What the rank speaks, once it has begun.
    version: Option<Version>,
    /// Whether the rank has been told who it is.
    full: bool,
    /// Whether the rank has ended its session.
    ended: bool,
    /// How many fences all ranks have come to.
    fences: u64,
    /// What it has told the step: frames' bodies.
    told: Vec<Vec<u8>>,
    /// What it has said and nobody has seen.
    from_rank: Vec<u8>,
    /// What has been said to it and it has not read.
    pub to_rank: Vec<u8>,
}

/// A request that the daemon has not answered.
#[derive(Debug)]
struct Asked {
    request: String,
    /// As the rank has sent it.
    sent: Vec<u8>,
    /// How it was asked for, where that was by a line.
    line: Option<Asks>,
}

/// What PMI-1 asks the daemon for.
#[derive(Debug, Clone, Copy)]
enum Asks {
    Put,
    Get,
    Mapping,
    Barrier,
    Universe,
    End,
}

/// Passes what a rank and its daemon say to each other, and knows what of it a restart must repeat.
///
/// The session with the daemon has begun ([`Session`](crate::Session)): what the rank asks at its
/// own beginning is answered here.
#[derive(Debug)]
pub struct Relay {
    rank: Rank,
    step: String,
    version: Option<Version>,
    full: bool,
    ended: bool,
    /// The rank has asked for the step's end: nothing that it says after that counts.
    aborted: bool,
    /// How many fences have been passed on.
    fences: u64,
    told: Vec<Vec<u8>>,
    told_much: bool,
    held: bool,
    asked: Vec<Asked>,
    from_rank: Vec<u8>,
    from_daemon: Vec<u8>,
    to_rank: Vec<u8>,
    to_daemon: Vec<u8>,
}

impl Relay {
    /// Returns one for `rank` of the step `step`, which has not begun.
    pub fn new(rank: Rank, step: String) -> Relay {
        Relay {
            rank,
            step,
            version: None,
            full: false,
            ended: false,
            aborted: false,
            fences: 0,
            told: Vec::new(),
            told_much: false,
            held: false,
            asked: Vec::new(),
            from_rank: Vec::new(),
            from_daemon: Vec::new(),
            to_rank: Vec::new(),
            to_daemon: Vec::new(),
        }
    }

    /// Returns one that goes on where another was, with `rank` of another step.
    ///
    /// # Errors
    /// The image holds more than a relay keeps.
    pub fn restored(rank: Rank, saved: Saved) -> Result<Relay, PmiError> {
        let bytes = saved.told.iter().map(Vec::len).sum::<usize>();
        if saved.told.len() > MAX_TOLD || bytes > MAX_TOLD_BYTES {
            return Err(PmiError::ToldMuch { most: MAX_TOLD_BYTES });
        }
        let Saved { step, version, full, ended, fences, told, from_rank, to_rank, .. } = saved;
        let new = Relay::new(rank, step);
        Ok(Relay { version, full, ended, fences, told, from_rank, to_rank, ..new })
    }

    /// Who it is.
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// Returns what a new step must be told again, before a fence: frames.
    ///
    /// # Errors
    /// A frame out of an image is too long.
    pub fn repeats(&self) -> Result<Vec<Vec<u8>>, PmiError> {
        self.told.iter().map(|body| frame(body)).collect()
    }

    /// Whether the rank has begun a session.
    pub fn has_begun(&self) -> bool {
        self.version.is_some()
    }

    /// Whether the rank has ended its session: the daemon reads nothing any more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether more may be read from the rank.
    pub fn wants_rank(&self) -> bool {
        self.from_rank.len() <= MAX_FRAME_LEN && self.to_rank.len() < UNREAD
    }

    /// The first request that the daemon has not answered, other than a fence.
    pub fn waits_for(&self) -> Option<&str> {
        let mut all = self.asked.iter().map(|asked| asked.request.as_str());
        all.find(|request| *request != FENCE)
    }

    /// Whether it waits for all ranks.
    pub fn is_in_fence(&self) -> bool {
        self.asked.iter().any(|asked| asked.request == FENCE)
    }

    /// How many fences have been passed on: if as many at every rank, all of them end.
    pub fn fences(&self) -> u64 {
        self.fences
    }

    /// Holds back what the rank asks from here on, or lets it go on.
    ///
    /// # Errors
    /// Of what was held back.
    pub fn hold(&mut self, held: bool) -> Result<(), PmiError> {
        self.held = held;
        self.advance()
    }

    /// What waits to be written to the rank.
    pub fn to_rank(&mut self) -> &mut Vec<u8> {
        &mut self.to_rank
    }

    /// What waits to be written to the daemon.
    pub fn to_daemon(&mut self) -> &mut Vec<u8> {
        &mut self.to_daemon
    }

    /// The rank has said that.
    ///
    /// # Errors
    /// It is no PMI, or cannot be done: the session is over.
    pub fn from_rank(&mut self, bytes: &[u8]) -> Result<(), PmiError> {
        self.from_rank.extend_from_slice(bytes);
        self.advance()
    }

    /// The daemon has said that.
    ///
    /// # Errors
    /// It is no answer: the session is over.
    pub fn from_daemon(&mut self, bytes: &[u8]) -> Result<(), PmiError> {
        self.from_daemon.extend_from_slice(bytes);
        while let Some(body) = take_frame(&mut self.from_daemon)? {
            self.answer(body)?;
        }
        self.advance()
    }

    /// Returns what an image holds; what the rank has not read yet is for the caller to add in
    /// front of [`Saved::to_rank`]. A fence that is under way is sent again after a restart.
    ///
    /// # Errors
    /// Another request is under way, or the rank has told more than an image holds.
    pub fn saved(&self) -> Result<Saved, PmiError> {
        if let Some(request) = self.waits_for() {
            return Err(PmiError::UnderWay(request.to_owned()));
        }
        if self.told_much {
            return Err(PmiError::ToldMuch { most: MAX_TOLD_BYTES });
        }
        let again = self.asked.iter().flat_map(|asked| asked.sent.iter().copied());
        Ok(Saved {
            rank: self.rank.rank,
            size: self.rank.size,
            step: self.step.clone(),
            version: self.version,
            full: self.full,
            ended: self.ended,
            fences: self.fences - self.asked.len() as u64,
            told: self.told.clone(),
            from_rank: again.chain(self.from_rank.iter().copied()).collect(),
            to_rank: self.to_rank.clone(),
        })
    }

    /// Takes what the rank has asked as far as it may go on.
    fn advance(&mut self) -> Result<(), PmiError> {
        while !self.held && self.asked.len() < ASKED && self.to_rank.len() < UNREAD {
            if self.aborted {
                self.from_rank.clear();
                break;
            }
            let more = match self.version {
                None => self.begin()?,
                // Whoever speaks lines waits for each answer.
                Some(Version::One) if self.asked.is_empty() => self.one_line()?,
                Some(Version::One) => false,
                Some(Version::Two) => self.one_frame()?,
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<bool, PmiError> {
        let Some(text) = take_line(&mut self.from_rank)? else { return Ok(false) };
        let version = Line::parse(&text)?.version()?;
        self.version = Some(version);
        self.full = version == Version::One;
        self.say(Line::inited(version));
        Ok(true)
    }

    fn one_frame(&mut self) -> Result<bool, PmiError> {
        let Some(body) = take_frame(&mut self.from_rank)? else { return Ok(false) };
        let command = Command::parse(&body)?;
        match command.name() {
            "fullinit" => {
                self.full = true;
                let answer = frame(&self.rank.answer)?;
                self.to_rank.extend_from_slice(&answer);
            }
            name if !self.full => return Err(PmiError::Early(short(name))),
            "abort" => self.abort(&frame(&body)?),
            name => self.ask(name, &body, frame(&body)?, None)?,
        }
        Ok(true)
    }

    fn one_line(&mut self) -> Result<bool, PmiError> {
        let Some(text) = take_line(&mut self.from_rank)? else { return Ok(false) };
        let line = Line::parse(&text)?;
        let of = |key: &str| line.get(key).unwrap_or_default().to_owned();
        let (request, asks) = match line.name() {
            "get_maxes" => {
                let maxes = Line::new("maxes").with("rc", 0).with("kvsname_max", MAX_NAME_LEN);
                self.say(maxes.with("keylen_max", MAX_KEY_LEN).with("vallen_max", MAX_VALUE_LEN));
                return Ok(true);
            }
            "get_appnum" => {
                let number = self.rank.application;
                self.say(Line::new("appnum").with("rc", 0).with("appnum", number));
                return Ok(true);
            }
            "get_my_kvsname" => {
                let name = self.step.clone();
                self.say(Line::new("my_kvsname").with("rc", 0).with("kvsname", name));
                return Ok(true);
            }
            "abort" => {
                let message = format!("exit code {}", of("exitcode"));
                let abort = Command::new("abort").with("isworld", "TRUE").with("msg", message);
                self.abort(&abort.encode()?);
                return Ok(true);
            }
            "put" => {
                let put = Command::new("kvs-put").with("key", of("key"));
                (put.with("value", escaped(&of("value"))), Asks::Put)
            }
            "get" if line.get("key") == Some(MAPPING) => {
                (Command::new("info-getjobattr").with("key", MAPPING), Asks::Mapping)
            }
            "get" => {
                let get = Command::new("kvs-get").with("jobid", &self.step).with("srcid", -1);
                (get.with("key", of("key")), Asks::Get)
            }
            "get_universe_size" => {
                (Command::new("info-getjobattr").with("key", "universeSize"), Asks::Universe)
            }
            "barrier_in" => (Command::new(FENCE), Asks::Barrier),
            "finalize" => (Command::new("finalize"), Asks::End),
            other => return Err(PmiError::Unsupported(short(other))),
        };
        let mut framed = request.encode()?;
        if let Some(body) = take_frame(&mut framed)? {
            self.ask(request.name(), &body, format!("{text}\n").into_bytes(), Some(asks))?;
        }
        Ok(true)
    }

    /// Passes on that the step is to end, with which the rank's session ends.
    fn abort(&mut self, framed: &[u8]) {
        self.to_daemon.extend_from_slice(framed);
        (self.aborted, self.ended) = (true, true);
    }

    /// Passes a request on.
    fn ask(
        &mut self,
        name: &str,
        body: &[u8],
        sent: Vec<u8>,
        line: Option<Asks>,
    ) -> Result<(), PmiError> {
        self.fences += u64::from(name == FENCE);
        if matches!(name, "kvs-put" | "info-putnodeattr") {
            let bytes = self.told.iter().map(Vec::len).sum::<usize>() + body.len();
            self.told_much |= self.told.len() >= MAX_TOLD || bytes > MAX_TOLD_BYTES;
            if !self.told_much {
                self.told.push(body.to_vec());
            }
        }
        self.to_daemon.extend_from_slice(&frame(body)?);
        self.asked.push(Asked { request: short(name), sent, line });
        Ok(())
    }

    /// Passes an answer on.
    fn answer(&mut self, body: Vec<u8>) -> Result<(), PmiError> {
        let answer = Command::parse(&body)?;
        let request = answer.name().strip_suffix("-response").unwrap_or_default();
        let found = self.asked.iter().position(|asked| asked.request == request);
        let Some(found) = found else { return Err(PmiError::Unasked(short(answer.name()))) };
        let asked = self.asked.remove(found);
        self.ended |= asked.request == "finalize";
        match asked.line {
            None => self.to_rank.extend_from_slice(&frame(&body)?),
            Some(asks) => self.say(as_line(&answer, asks)?),
        }
        Ok(())
    }

    fn say(&mut self, line: Line) {
        self.to_rank.extend_from_slice(line.to_string().as_bytes());
    }
}

/// The same answer for PMI-1.
fn as_line(answer: &Command, asks: Asks) -> Result<Line, PmiError> {
    let code = if answer.failure().is_some() { "-1" } else { "0" };
    let found = answer.failure().is_none() && answer.get("found") != Some("FALSE");
    let value = answer.get("value").filter(|_| found);
    // It would end the line.
    if value.is_some_and(|value| value.contains(['\n', '\r'])) {
        return Err(PmiError::Text);
    }
    Ok(match (asks, value) {
        (Asks::Put, _) => Line::new("put_result").with("rc", code),
        (Asks::Barrier, _) => Line::new("barrier_out").with("rc", code),
        (Asks::End, _) => Line::new("finalize_ack").with("rc", code),
        (Asks::Get, Some(value)) => {
            Line::new("get_result").with("rc", 0).with("value", unescaped(value))
        }
        (Asks::Mapping, Some(value)) => Line::new("get_result").with("rc", 0).with("value", value),
        (Asks::Get | Asks::Mapping, None) => {
            let none = Line::new("get_result").with("rc", -1);
            none.with("msg", "key_not_found").with("value", "unknown")
        }
        (Asks::Universe, value) => {
            let size = Line::new("universe_size").with("rc", code);
            size.with("size", value.unwrap_or("-1"))
        }
    })
}

/// A value without semicolons, which Slurm's PMI-2 (22.05) cuts short although they are doubled;
/// in PMI-1, where this rank is, they are nothing special.
fn escaped(value: &str) -> String {
    value.replace('%', "%25").replace(';', "%3B")
}

/// As another rank's relay has [`escaped`] it.
fn unescaped(value: &str) -> String {
    value.replace("%3B", ";").replace("%25", "%")
}

/// A name that errors tell.
fn short(name: &str) -> String {
    name.chars().take(40).collect()
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
