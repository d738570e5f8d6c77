//! The relay's own session with a step's daemon: builds the requests, and reads the answers.

use crate::frame::Command;
use crate::line::{Line, Version, take_line};
use crate::{PmiError, take_frame};
use serde::{Deserialize, Serialize};

/// Longest key, in bytes (PMI-2's own bound).
pub const MAX_KEY_LEN: usize = 64;
/// Longest value, in bytes (PMI-2's own bound).
pub const MAX_VALUE_LEN: usize = 1024;

/// A rank of a step, as the daemon describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    pub rank: u32,
    /// The number of ranks in the step.
    pub size: u32,
    /// The number of the program in the step (`appnum`); negative if the step runs one program.
    pub application: i64,
    /// The body of the daemon's answer, to be given to the rank itself when it asks.
    pub answer: Vec<u8>,
}

/// A key and its value, which all ranks of the step can read after a fence.
pub type Key<'a> = (&'a str, &'a str);

/// The requests of one session, each of which is answered before the next is sent.
#[derive(Debug, Clone)]
pub struct Session {
    /// The step's name, as the environment has it (`PMI_JOBID`).
    pub step: String,
}

impl Session {
    /// Returns the line that begins a session, in PMI-1's format: it asks for PMI-2.
    pub fn init() -> Vec<u8> {
        Line::init(Version::Two).to_string().into_bytes()
    }

    /// Takes the answer to [`Session::init`] out of `buffer`; returns false if it is not there yet.
    ///
    /// # Errors
    /// The daemon refuses, or answers something else.
    pub fn inited(buffer: &mut Vec<u8>) -> Result<bool, PmiError> {
        let request = "init";
        let Some(text) = take_line(buffer)? else { return Ok(false) };
        let line = Line::parse(&text)?;
        if line.name() != "response_to_init" {
            return Err(PmiError::Answer { request, answer: line.name().to_owned() });
        }
        match (line.get("rc"), line.get("pmi_version")) {
            (Some("0") | None, Some("2")) => Ok(true),
            _ => Err(PmiError::Refused { request, why: text }),
        }
    }

    /// Returns the request that registers `rank` (`fullinit`).
    ///
    /// # Errors
    /// The step's name does not fit into a frame.
    pub fn begin(&self, rank: u32) -> Result<Vec<u8>, PmiError> {
        let begin = Command::new("fullinit").with("pmijobid", &self.step);
        begin.with("pmirank", rank).with("threaded", "FALSE").encode()
    }

    /// Reads the answer to [`Session::begin`].
    ///
    /// # Errors
    /// The daemon refuses, or the answer lacks a key.
    pub fn begun(body: Vec<u8>) -> Result<Rank, PmiError> {
        let request = "fullinit";
        let answer = answered(&body, request)?;
        let number = |key: &'static str| {
            let found = answer.get(key).and_then(|text| text.parse::<i64>().ok());
            found.ok_or(PmiError::Lacks { request, key })
        };
        let small = |key| {
            number(key).and_then(|n| u32::try_from(n).map_err(|_| PmiError::Lacks { request, key }))
        };
        let (rank, size) = (small("rank")?, small("size")?);
        let application = number("appnum").unwrap_or(-1);
        Ok(Rank { rank, size, application, answer: body })
    }

    /// Returns the request that publishes a key, which others can read after the next fence.
    ///
    /// # Errors
    /// Key and value do not fit into a frame.
    pub fn put((key, value): Key<'_>) -> Result<Vec<u8>, PmiError> {
        Command::new("kvs-put").with("key", key).with("value", value).encode()
    }

    /// Returns the request that waits for all ranks.
    ///
    /// # Errors
    /// Never, as the frame is short.
    pub fn fence() -> Result<Vec<u8>, PmiError> {
        Command::new("kvs-fence").encode()
    }

    /// Returns the request for a key's value.
    ///
    /// # Errors
    /// The key does not fit into a frame.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, PmiError> {
        let get = Command::new("kvs-get").with("jobid", &self.step);
        get.with("srcid", -1).with("key", key).encode()
    }

    /// Reads the answer to [`Session::get`]; `None` if no rank has published the key.
    ///
    /// # Errors
    /// The answer is to another request.
    pub fn got(body: &[u8]) -> Result<Option<String>, PmiError> {
        let answer = named(body, "kvs-get")?;
        let found = answer.failure().is_none() && answer.get("found") != Some("FALSE");
        Ok(answer.get("value").filter(|_| found).map(str::to_owned))
    }

    /// Returns the request that ends the session.
    ///
    /// # Errors
    /// Never, as the frame is short.
    pub fn end() -> Result<Vec<u8>, PmiError> {
        Command::new("finalize").encode()
    }

    /// Takes the body of the next answer out of `buffer`; `None` if it is not complete yet.
    ///
    /// # Errors
    /// The bytes are no frame.
    pub fn next(buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, PmiError> {
        take_frame(buffer)
    }

    /// Checks the answer to a request that returns no value.
    ///
    /// # Errors
    /// The request has failed, or the answer is to another one.
    pub fn done(body: &[u8], request: &'static str) -> Result<(), PmiError> {
        answered(body, request).map(drop)
    }
}

/// Parses an answer, and checks that it is to `request`; it may say that the request failed.
fn named(body: &[u8], request: &'static str) -> Result<Command, PmiError> {
    let answer = Command::parse(body)?;
    match answer.name().strip_suffix("-response") {
        Some(name) if name == request => Ok(answer),
        _ => Err(PmiError::Answer { request, answer: answer.name().chars().take(40).collect() }),
    }
}

/// Parses an answer, and checks that it is to `request` and that the request succeeded.
fn answered(body: &[u8], request: &'static str) -> Result<Command, PmiError> {
    let answer = named(body, request)?;
    match answer.failure() {
        Some(why) => Err(PmiError::Refused { request, why }),
        None => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_begins() {
        assert_eq!(Session::init(), b"cmd=init pmi_version=2 pmi_subversion=0\n");
        let mut answer = b"cmd=response_to_init rc=0 pmi_version=2 pmi_sub".to_vec();
        assert_eq!(Session::inited(&mut answer), Ok(false));
        answer.extend_from_slice(b"version=0\n");
        assert_eq!(Session::inited(&mut answer), Ok(true));
        assert!(answer.is_empty());
        let mut refusal = b"cmd=response_to_init rc=-1 pmi_version=1 pmi_subversion=1\n".to_vec();
        assert!(matches!(Session::inited(&mut refusal), Err(PmiError::Refused { .. })));

        let session = Session { step: "7.0".to_owned() };
        let begin = session.begin(3).unwrap();
        assert_eq!(&begin[6..], b"cmd=fullinit;pmijobid=7.0;pmirank=3;threaded=FALSE;");
        let answer = b"cmd=fullinit-response;rc=0;pmi-version=2;rank=3;size=4;appnum=-1;".to_vec();
        let rank = Session::begun(answer.clone()).unwrap();
        assert_eq!(rank, Rank { rank: 3, size: 4, application: -1, answer });
        let other = Session::begun(b"cmd=kvs-put-response;rc=0;".to_vec());
        assert!(matches!(other, Err(PmiError::Answer { .. })));
        let none = Session::begun(b"cmd=fullinit-response;rc=0;rank=-1;size=2;".to_vec());
        assert!(matches!(none, Err(PmiError::Lacks { key: "rank", .. })));
    }

    #[test]
    fn keys_are_got_or_are_not_there() {
        let got = Session::got(b"cmd=kvs-get-response;rc=0;found=TRUE;value=a;;b;");
        assert_eq!(got, Ok(Some("a;b".to_owned())));
        assert_eq!(Session::got(b"cmd=kvs-get-response;rc=0;found=FALSE;"), Ok(None));
        assert!(Session::got(b"cmd=kvs-put-response;rc=0;").is_err());
        assert!(Session::done(b"cmd=kvs-put-response;rc=1;errmsg=x;", "kvs-put").is_err());
    }
}
