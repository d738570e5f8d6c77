//! The relay: a rank at one side, its step's daemon at the other.

use crate::frame::{Command, frame, take_frame};
use crate::line::{Line, Version, take_line};
use crate::session::{LONGEST_KEY, LONGEST_VALUE, Rank};
use crate::{LONGEST_FRAME, PmiError};
use serde::{Deserialize, Serialize};

/// So many requests that must be told again may a rank make.
pub const MOST_TOLD: usize = 4096;
/// The bytes of all of them.
pub const TOLD_BYTES: usize = 4 << 20;
/// So many bytes may wait for the rank before no more is read from it.
const UNREAD: usize = 1 << 20;
/// So many requests may be under way.
const ASKED: usize = 256;
/// PMI-1's name for an attribute of the step, which it asks for as for a key.
const MAPPING: &str = "PMI_process_mapping";
/// The longest name of a step, in bytes (PMI-1's own bound).
const LONGEST_NAME: usize = 256;

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
    /// How it was asked for, where that was by a line.
    line: Option<Asks>,
}

/// What PMI-1 asks the daemon for.
#[derive(Debug, Clone, Copy)]
enum Asks {
    Put,
    Get,
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
        if saved.told.len() > MOST_TOLD || bytes > TOLD_BYTES {
            return Err(PmiError::ToldMuch { most: TOLD_BYTES });
        }
        let Saved { step, version, full, ended, told, from_rank, to_rank, .. } = saved;
        let new = Relay::new(rank, step);
        Ok(Relay { version, full, ended, told, from_rank, to_rank, ..new })
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
        self.from_rank.len() <= LONGEST_FRAME && self.to_rank.len() < UNREAD
    }

    /// The first request that the daemon has not answered.
    pub fn waits_for(&self) -> Option<&str> {
        self.asked.first().map(|asked| asked.request.as_str())
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
    /// front of [`Saved::to_rank`].
    ///
    /// # Errors
    /// A request is under way, or the rank has told more than an image holds.
    pub fn saved(&self) -> Result<Saved, PmiError> {
        if let Some(request) = self.waits_for() {
            return Err(PmiError::Unasked(request.to_owned()));
        }
        if self.told_much {
            return Err(PmiError::ToldMuch { most: TOLD_BYTES });
        }
        Ok(Saved {
            rank: self.rank.rank,
            size: self.rank.size,
            step: self.step.clone(),
            version: self.version,
            full: self.full,
            ended: self.ended,
            told: self.told.clone(),
            from_rank: self.from_rank.clone(),
            to_rank: self.to_rank.clone(),
        })
    }

    /// Takes what the rank has asked as far as it may go on.
    fn advance(&mut self) -> Result<(), PmiError> {
        while !self.held && self.asked.len() < ASKED && self.to_rank.len() < UNREAD {
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
            "abort" => self.to_daemon.extend_from_slice(&frame(&body)?),
            name => self.ask(name, &body, None)?,
        }
        Ok(true)
    }

    fn one_line(&mut self) -> Result<bool, PmiError> {
        let Some(text) = take_line(&mut self.from_rank)? else { return Ok(false) };
        let line = Line::parse(&text)?;
        let of = |key: &str| line.get(key).unwrap_or_default().to_owned();
        let (request, asks) = match line.name() {
            "get_maxes" => {
                let maxes = Line::new("maxes").with("rc", 0).with("kvsname_max", LONGEST_NAME);
                self.say(maxes.with("keylen_max", LONGEST_KEY).with("vallen_max", LONGEST_VALUE));
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
                self.to_daemon.extend_from_slice(&abort.encode()?);
                return Ok(true);
            }
            "put" => {
                let put = Command::new("kvs-put").with("key", of("key"));
                (put.with("value", of("value")), Asks::Put)
            }
            "get" if line.get("key") == Some(MAPPING) => {
                (Command::new("info-getjobattr").with("key", MAPPING), Asks::Get)
            }
            "get" => {
                let get = Command::new("kvs-get").with("jobid", &self.step).with("srcid", -1);
                (get.with("key", of("key")), Asks::Get)
            }
            "get_universe_size" => {
                (Command::new("info-getjobattr").with("key", "universeSize"), Asks::Universe)
            }
            "barrier_in" => (Command::new("kvs-fence"), Asks::Barrier),
            "finalize" => (Command::new("finalize"), Asks::End),
            other => return Err(PmiError::Unsupported(short(other))),
        };
        let mut framed = request.encode()?;
        if let Some(body) = take_frame(&mut framed)? {
            self.ask(request.name(), &body, Some(asks))?;
        }
        Ok(true)
    }

    /// Passes a request on.
    fn ask(&mut self, name: &str, body: &[u8], line: Option<Asks>) -> Result<(), PmiError> {
        if matches!(name, "kvs-put" | "info-putnodeattr") {
            let bytes = self.told.iter().map(Vec::len).sum::<usize>() + body.len();
            self.told_much |= self.told.len() >= MOST_TOLD || bytes > TOLD_BYTES;
            if !self.told_much {
                self.told.push(body.to_vec());
            }
        }
        self.to_daemon.extend_from_slice(&frame(body)?);
        self.asked.push(Asked { request: short(name), line });
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
        (Asks::Get, Some(value)) => Line::new("get_result").with("rc", 0).with("value", value),
        (Asks::Get, None) => {
            let none = Line::new("get_result").with("rc", -1);
            none.with("msg", "key_not_found").with("value", "unknown")
        }
        (Asks::Universe, value) => {
            let size = Line::new("universe_size").with("rc", code);
            size.with("size", value.unwrap_or("-1"))
        }
    })
}

/// A name that errors tell.
fn short(name: &str) -> String {
    name.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Session;
    use std::mem;

    const ANSWER: &[u8] = b"cmd=fullinit-response;rc=0;rank=1;size=2;appnum=-1;";

    fn relay() -> Relay {
        Relay::new(Session::begun(ANSWER.to_vec()).unwrap(), "7.0".to_owned())
    }

    fn taken(bytes: &mut Vec<u8>) -> String {
        String::from_utf8(mem::take(bytes)).unwrap()
    }

    fn framed(body: &str) -> Vec<u8> {
        frame(body.as_bytes()).unwrap()
    }

    /// A rank that has been told who it is.
    fn begun() -> Relay {
        let mut relay = relay();
        relay.from_rank(b"cmd=init pmi_version=2 pmi_subversion=0\n").unwrap();
        relay.from_rank(&framed("cmd=fullinit;pmijobid=7.0;pmirank=1;")).unwrap();
        relay.to_rank().clear();
        relay
    }

    #[test]
    fn frames_pass_unchanged() {
        let mut relay = relay();
        assert!(!relay.has_begun());
        relay.from_rank(b"cmd=init pmi_version=2 pmi_subv").unwrap();
        assert!(relay.to_rank().is_empty());
        relay.from_rank(b"ersion=0\n").unwrap();
        let said = taken(relay.to_rank());
        assert_eq!(said, "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n");
        relay.from_rank(&framed("cmd=fullinit;pmijobid=7.0;pmirank=1;threaded=FALSE;")).unwrap();
        assert_eq!(relay.to_rank().split_off(6), ANSWER);
        relay.to_rank().clear();
        // Nothing of that was for the daemon.
        assert!(relay.to_daemon().is_empty());

        let put = framed("cmd=kvs-put;key=a;value=b;;c;unknown=d;");
        relay.from_rank(&put).unwrap();
        assert_eq!(taken(relay.to_daemon()).as_bytes(), put);
        assert_eq!(relay.waits_for(), Some("kvs-put"));
        assert!(relay.saved().is_err());
        let answer = framed("cmd=kvs-put-response;rc=0;unknown=e;");
        relay.from_daemon(&answer[..9]).unwrap();
        relay.from_daemon(&answer[9..]).unwrap();
        assert_eq!(taken(relay.to_rank()).as_bytes(), answer);
        assert_eq!(relay.waits_for(), None);
        assert_eq!(relay.repeats().unwrap(), [put]);

        relay.from_rank(&framed("cmd=abort;isworld=TRUE;")).unwrap();
        assert_eq!(relay.waits_for(), None);
        relay.to_daemon().clear();
        relay.from_rank(&framed("cmd=finalize;")).unwrap();
        assert!(!relay.has_ended());
        relay.from_daemon(&framed("cmd=finalize-response;rc=0;")).unwrap();
        assert!(relay.has_ended());
    }

    #[test]
    fn lines_become_frames() {
        let mut relay = relay();
        relay.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
        let said = taken(relay.to_rank());
        assert_eq!(said, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n");
        let own = [
            ("get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"),
            ("get_appnum", "cmd=appnum rc=0 appnum=-1\n"),
            ("get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=7.0\n"),
        ];
        for (asked, answer) in own {
            relay.from_rank(format!("cmd={asked}\n").as_bytes()).unwrap();
            assert_eq!(taken(relay.to_rank()), answer);
        }
        assert!(relay.to_daemon().is_empty());
        let passed = [
            (
                "get kvsname=7.0 key=PMI_process_mapping",
                "cmd=info-getjobattr;key=PMI_process_mapping;",
                "cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,2,1));",
                "cmd=get_result rc=0 value=(vector,(0,2,1))\n",
            ),
            (
                "put kvsname=7.0 key=a value=b;c=d",
                "cmd=kvs-put;key=a;value=b;;c=d;",
                "cmd=kvs-put-response;rc=0;",
                "cmd=put_result rc=0\n",
            ),
            (
                "barrier_in",
                "cmd=kvs-fence;",
                "cmd=kvs-fence-response;rc=0;",
                "cmd=barrier_out rc=0\n",
            ),
            (
                "get kvsname=7.0 key=a",
                "cmd=kvs-get;jobid=7.0;srcid=-1;key=a;",
                "cmd=kvs-get-response;rc=0;found=TRUE;value=b;;c=d;",
                "cmd=get_result rc=0 value=b;c=d\n",
            ),
            (
                "get kvsname=7.0 key=z",
                "cmd=kvs-get;jobid=7.0;srcid=-1;key=z;",
                "cmd=kvs-get-response;rc=0;found=FALSE;",
                "cmd=get_result rc=-1 msg=key_not_found value=unknown\n",
            ),
            (
                "get_universe_size",
                "cmd=info-getjobattr;key=universeSize;",
                "cmd=info-getjobattr-response;rc=0;found=TRUE;value=2;",
                "cmd=universe_size rc=0 size=2\n",
            ),
            ("finalize", "cmd=finalize;", "cmd=finalize-response;rc=0;", "cmd=finalize_ack rc=0\n"),
        ];
        for (line, request, answer, back) in passed {
            relay.from_rank(format!("cmd={line}\n").as_bytes()).unwrap();
            assert_eq!(taken(relay.to_daemon()).split_off(6), request);
            relay.from_daemon(&framed(answer)).unwrap();
            assert_eq!(taken(relay.to_rank()), back);
        }
        assert!(relay.has_ended());
        assert_eq!(relay.repeats().unwrap(), [framed("cmd=kvs-put;key=a;value=b;;c=d;")]);
    }

    #[test]
    fn a_request_is_held_back_and_goes_on_elsewhere() {
        let mut relay = begun();
        let put = framed("cmd=kvs-put;key=a;value=b;");
        relay.from_rank(&put).unwrap();
        relay.hold(true).unwrap();
        let fence = framed("cmd=kvs-fence;");
        relay.from_rank(&fence).unwrap();
        assert_eq!(taken(relay.to_daemon()).as_bytes(), put);
        let answer = framed("cmd=kvs-put-response;rc=0;");
        relay.from_daemon(&answer).unwrap();
        assert!(relay.to_daemon().is_empty());
        let saved = relay.saved().unwrap();

        let rank = Rank { rank: 1, size: 2, application: -1, answer: b"cmd=other;".to_vec() };
        let mut after = Relay::restored(rank, saved).unwrap();
        assert_eq!(after.repeats().unwrap(), [put]);
        assert_eq!(taken(after.to_rank()).as_bytes(), answer);
        after.hold(false).unwrap();
        assert_eq!(taken(after.to_daemon()).as_bytes(), fence);

        // And here, where nothing has happened to the job.
        relay.hold(false).unwrap();
        assert_eq!(taken(relay.to_daemon()).as_bytes(), fence);
    }

    #[test]
    fn what_is_no_session_ends_it() {
        let bad = relay().from_rank(b"GET / HTTP/1.1\n");
        assert!(matches!(bad, Err(PmiError::Pair(_))), "{bad:?}");
        let bad = relay().from_rank(b"cmd=init pmi_version=3 pmi_subversion=0\n");
        assert_eq!(bad, Err(PmiError::Version(3, 0)));
        let mut early = relay();
        early.from_rank(b"cmd=init pmi_version=2 pmi_subversion=0\n").unwrap();
        let bad = early.from_rank(&framed("cmd=kvs-fence;"));
        assert_eq!(bad, Err(PmiError::Early("kvs-fence".to_owned())));
        let bad = begun().from_daemon(&framed("cmd=kvs-fence-response;rc=0;"));
        assert_eq!(bad, Err(PmiError::Unasked("kvs-fence-response".to_owned())));
        let mut one = relay();
        one.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
        let bad = one.from_rank(b"mcmd=spawn\n");
        assert_eq!(bad, Err(PmiError::Unsupported("spawn".to_owned())));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut relay = begun();
        for number in 0..=MOST_TOLD {
            relay.from_rank(&framed(&format!("cmd=kvs-put;key=k{number};value=v;"))).unwrap();
            relay.from_daemon(&framed("cmd=kvs-put-response;rc=0;")).unwrap();
            relay.to_rank().clear();
            relay.to_daemon().clear();
        }
        assert_eq!(relay.saved(), Err(PmiError::ToldMuch { most: TOLD_BYTES }));

        let mut relay = begun();
        let fence = framed("cmd=kvs-fence;");
        relay.from_rank(&fence.repeat(ASKED + 1)).unwrap();
        assert_eq!(relay.to_daemon().len(), fence.len() * ASKED);
        relay.hold(true).unwrap();
        while relay.wants_rank() {
            relay.from_rank(&[b' '; 4096]).unwrap();
        }
        assert!(relay.from_rank.len() < 2 * LONGEST_FRAME);
    }
}
