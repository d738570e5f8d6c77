//! The asking side. A coordinator that is lost is found again, or replaced, and asked once more.

use crate::frame::{receive, send};
use crate::link::Link;
use crate::message::{
    Broken, Hello, Key, MAX_REPLY, MAX_TOLD, Name, Notice, Passed, Reply, Request, Scope, Series,
    VERSION, Value, Who, Why,
};
use kedge_barrier::{Arrival, Page};
use kedge_wire::{List, TooLong};
use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a coordinator is looked for.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// What it may take to answer what needs no waiting.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest wait at a time.
const MAX_WAIT: Duration = Duration::from_secs(3600);

#[derive(Debug, Error)]
pub enum ClientError {
    #[error("the job has no coordinator, and none was found: {0}")]
    None(io::Error),
    #[error("{0}")]
    Denied(io::Error),
    #[error("{by}: {why}")]
    Broken { by: String, why: String },
    #[error("not all have come in time")]
    Late,
    #[error("{by} has it already")]
    Taken { by: String },
    /// In the coordinator's words.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    TooLong(#[from] TooLong),
    #[error("the coordinator answers another question")]
    Nonsense,
}

/// Who asks.
#[derive(Debug, Clone)]
pub struct Member {
    pub job: String,
    pub name: String,
    pub node: String,
    /// Whether barriers of all wait for it.
    pub part: bool,
}

/// A published value that is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub by: String,
    pub revision: u64,
    pub value: Vec<u8>,
}

/// How the coordinator is reached, and reached again.
pub type Find = Box<dyn FnMut() -> io::Result<Link> + Send>;

pub struct Client {
    find: Find,
    stream: Option<Link>,
    /// How long one that is lost is looked for.
    patience: Duration,
    /// How long that waits for an answer, if it was told.
    limit: Option<Duration>,
    hello: Hello,
    /// To be repeated to another coordinator.
    published: Vec<(Notice, Value, bool)>,
    revision: u64,
    /// Where series meet in memory, for as long as the coordinator is the one that has told of it.
    pages: Vec<(Series, Page)>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("member", &&*self.hello.member).finish_non_exhaustive()
    }
}

/// Drops the oldest where there is no room for one more.
fn add<T: Clone>(list: &mut List<T, MAX_TOLD>, value: T) {
    let mut all = std::mem::take(list).into_inner();
    all.push(value);
    let surplus = all.len().saturating_sub(MAX_TOLD);
    *list = List::new(all.split_off(surplus)).unwrap_or_default();
}

fn keep<T>(list: &mut List<T, MAX_TOLD>, stays: impl FnMut(&T) -> bool) {
    let mut all = std::mem::take(list).into_inner();
    all.retain(stays);
    *list = List::new(all).unwrap_or_default();
}

fn milliseconds(wait: Duration) -> u32 {
    u32::try_from(wait.min(MAX_WAIT).as_millis()).unwrap_or(u32::MAX)
}

impl Client {
    /// Joins the job; [`ClientError::Taken`] if it has a part of that name on another node.
    pub fn join(member: &Member, find: Find) -> Result<Client, ClientError> {
        let hello = Hello {
            version: VERSION,
            job: Name::new(member.job.clone())?,
            member: Name::new(member.name.clone())?,
            node: Name::new(member.node.clone())?,
            part: member.part,
            passed: List::default(),
            broken: List::default(),
        };
        let (stream, limit, published, pages) = (None, None, Vec::new(), Vec::new());
        let (patience, revision) = (CONNECT_TIMEOUT, 0);
        let mut client =
            Client { find, stream, patience, limit, hello, published, revision, pages };
        client.exchange(&Request::Members {}, Duration::ZERO)?;
        Ok(client)
    }

    /// Has a coordinator that is lost looked for once, from here on: what is to be said is of use
    /// to those alone who are still there.
    pub fn look_once(&mut self) {
        self.patience = Duration::ZERO;
    }

    /// Returns the revision of the board when the coordinator greeted: what is looked for after it
    /// is news.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Waits at the step `step` of a series for `who`. Steps of a series only grow.
    pub fn arrive(
        &mut self,
        series: &Series,
        step: u64,
        who: Who,
        wait: Duration,
    ) -> Result<(), ClientError> {
        let wait_ms = milliseconds(wait);
        let request = Request::Arrive { series: series.clone(), step, who, wait_ms };
        match self.exchange(&request, wait)? {
            Reply::Through {} => {
                self.has_passed(series, step);
                Ok(())
            }
            other => Err(self.refused(series, other)),
        }
    }

    /// Arrives as [`Client::arrive`] does, for a series of node scope that has `members` members,
    /// whose steps are 1, 2, 3 and so on. They meet in memory, so that all go on by one call of the
    /// last one; the coordinator only watches that they live.
    pub fn meet(
        &mut self,
        series: &Series,
        step: u32,
        members: u32,
        wait: Duration,
    ) -> Result<(), ClientError> {
        let until = Instant::now() + wait.min(MAX_WAIT);
        loop {
            let known = self.pages.iter().position(|(of, _)| of == series);
            let index = known.map_or_else(|| self.open_page(series, members), Ok)?;
            let stream = &self.stream;
            let stay = || stream.as_ref().is_some_and(|stream| !stream.is_lost());
            match self.pages[index].1.arrive(step, members, until, stay) {
                Arrival::Through => {
                    self.has_passed(series, step.into());
                    return Ok(());
                }
                Arrival::Left if Instant::now() < until => drop(self.pages.swap_remove(index)),
                Arrival::Left | Arrival::Late => return Err(ClientError::Late),
                Arrival::Early => {
                    let why = format!("step {step} comes before the one that is next");
                    return Err(ClientError::Refused(why));
                }
            }
        }
    }

    /// Asks where the series meets: its place in `pages`.
    fn open_page(&mut self, series: &Series, members: u32) -> Result<usize, ClientError> {
        let request = Request::Meet { series: series.clone(), members };
        match self.exchange_for(&request, Duration::ZERO)? {
            (Reply::Page {}, Some(file)) => {
                let page = Page::open(file).map_err(|_| ClientError::Nonsense)?;
                self.pages.push((series.clone(), page));
                Ok(self.pages.len() - 1)
            }
            (other, _) => Err(self.refused(series, other)),
        }
    }

    fn has_passed(&mut self, series: &Series, step: u64) {
        let mut all = std::mem::take(&mut self.hello.passed).into_inner();
        let known = all.iter_mut().find(|passed| passed.series == *series);
        let new = known.is_none();
        known.into_iter().for_each(|passed| passed.step = step);
        self.hello.passed = List::new(all).unwrap_or_default();
        if new {
            add(&mut self.hello.passed, Passed { series: series.clone(), step });
        }
    }

    /// Tells why a barrier of the series was not passed.
    fn refused(&mut self, series: &Series, reply: Reply) -> ClientError {
        if let Reply::Broken { by, why } = &reply {
            keep(&mut self.hello.broken, |broken| broken.series != *series);
            let (series, by, why) = (series.clone(), by.clone(), why.clone());
            add(&mut self.hello.broken, Broken { series, by, why });
        }
        refusal(reply)
    }

    /// Makes the series fail for everybody, now and later.
    pub fn break_series(&mut self, series: &Series, why: &str) -> Result<(), ClientError> {
        let (by, why) = (self.hello.member.clone(), Why::truncated(why.to_owned()));
        add(&mut self.hello.broken, Broken { series: series.clone(), by, why: why.clone() });
        self.done(&Request::Break { series: series.clone(), why })
    }

    /// Has no further part in the series.
    pub fn end(&mut self, series: &Series) -> Result<(), ClientError> {
        keep(&mut self.hello.passed, |passed| passed.series != *series);
        keep(&mut self.hello.broken, |broken| broken.series != *series);
        self.pages.retain(|(of, _)| of != series);
        self.done(&Request::End { series: series.clone() })
    }

    /// Publishes a value for as long as this member is there; `alone`, only if nobody else has.
    pub fn publish(&mut self, at: &Notice, value: &[u8], alone: bool) -> Result<(), ClientError> {
        let value = Value::new(value.to_vec())?;
        let request = Request::Publish { at: at.clone(), value: value.clone(), alone };
        match self.exchange(&request, Duration::ZERO)? {
            Reply::Published { .. } => {
                self.published.retain(|(known, ..)| known != at);
                self.published.push((at.clone(), value, alone));
                Ok(())
            }
            other => Err(refusal(other)),
        }
    }

    pub fn withdraw(&mut self, at: &Notice) -> Result<(), ClientError> {
        self.published.retain(|(known, ..)| known != at);
        self.done(&Request::Withdraw { at: at.clone() })
    }

    /// Returns what is published there after the revision `after`, if it comes within `wait`.
    pub fn look(
        &mut self,
        at: &Notice,
        after: u64,
        wait: Duration,
    ) -> Result<Option<Found>, ClientError> {
        let request = Request::Look { at: at.clone(), after, wait_ms: milliseconds(wait) };
        match self.exchange(&request, wait)? {
            Reply::Found { by, revision, value } => {
                let (by, value) = (by.into_inner(), value.into_inner());
                Ok(Some(Found { by, revision, value }))
            }
            Reply::Late {} => Ok(None),
            other => Err(refusal(other)),
        }
    }

    /// Returns the job's parts.
    pub fn members(&mut self) -> Result<Vec<String>, ClientError> {
        match self.exchange(&Request::Members {}, Duration::ZERO)? {
            Reply::Members { names } => {
                Ok(names.into_inner().into_iter().map(Name::into_inner).collect())
            }
            other => Err(refusal(other)),
        }
    }

    fn done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.exchange(request, Duration::ZERO)? {
            Reply::Done {} => Ok(()),
            other => Err(refusal(other)),
        }
    }

    fn exchange(&mut self, request: &Request, wait: Duration) -> Result<Reply, ClientError> {
        self.exchange_for(request, wait).map(|(reply, _)| reply)
    }

    /// Asks, and asks again where the coordinator is lost before it has answered.
    fn exchange_for(&mut self, request: &Request, wait: Duration) -> Result<Answer, ClientError> {
        let mut begin = Instant::now();
        loop {
            match self.try_exchange(request, wait) {
                Ok(reply) => return Ok(reply),
                Err(Attempt::Refused(error)) => return Err(error),
                Err(Attempt::Lost { error, .. })
                    if error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    return Err(ClientError::Denied(error));
                }
                Err(Attempt::Lost { error, was_there }) => {
                    self.stream = None;
                    // It may have been there for long.
                    if was_there {
                        begin = Instant::now();
                    } else if begin.elapsed() > self.patience {
                        return Err(ClientError::None(error));
                    }
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    fn try_exchange(&mut self, request: &Request, wait: Duration) -> Result<Answer, Attempt> {
        let was_there = self.stream.is_some();
        let lost = |error| Attempt::Lost { error, was_there };
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                self.limit = None;
                self.greet()?
            }
        };
        let limit = wait + ANSWER;
        if self.limit != Some(limit) {
            stream.set_read_timeout(limit).map_err(lost)?;
            self.limit = Some(limit);
        }
        let answer = talk(&stream, request).map_err(lost)?;
        self.stream = Some(stream);
        Ok(answer)
    }

    /// Tells a coordinator who this is, and what it knew.
    fn greet(&mut self) -> Result<Link, Attempt> {
        let lost = |error| Attempt::Lost { error, was_there: false };
        // Nobody watches over who meets there any more.
        self.pages.drain(..).for_each(|(_, page)| page.leave());
        let stream = (self.find)().map_err(lost)?;
        stream.set_read_timeout(ANSWER).map_err(lost)?;
        stream.set_write_timeout(ANSWER).map_err(lost)?;
        match talk(&stream, &Request::Hello { hello: self.hello.clone() }).map_err(lost)?.0 {
            Reply::Welcome { revision } => self.revision = revision,
            answer @ (Reply::Refused { .. } | Reply::Taken { .. }) => {
                return Err(Attempt::Refused(refusal(answer)));
            }
            _ => return Err(lost(io::ErrorKind::InvalidData.into())),
        }
        for (at, value, alone) in &self.published {
            let (at, value, alone) = (at.clone(), value.clone(), *alone);
            // One that was alone may find another there by now: it is told when it asks again.
            talk(&stream, &Request::Publish { at, value, alone }).map_err(lost)?;
        }
        Ok(stream)
    }
}

enum Attempt {
    Refused(ClientError),
    Lost { error: io::Error, was_there: bool },
}

/// With the descriptor that came along.
type Answer = (Reply, Option<OwnedFd>);

fn talk(stream: &Link, request: &Request) -> io::Result<Answer> {
    send(stream, request)?;
    let mut file = None;
    let reply = receive(|piece| stream.take(piece, &mut file), MAX_REPLY)?;
    Ok((reply, file))
}

fn refusal(reply: Reply) -> ClientError {
    match reply {
        Reply::Refused { why } => ClientError::Refused(why.into_inner()),
        Reply::Late {} => ClientError::Late,
        Reply::Taken { by } => ClientError::Taken { by: by.into_inner() },
        Reply::Broken { by, why } => {
            ClientError::Broken { by: by.into_inner(), why: why.into_inner() }
        }
        _ => ClientError::Nonsense,
    }
}

impl Series {
    /// Names a series of the members on one node; a name that is too long is cut.
    pub fn of_node(name: &str) -> Series {
        Series { scope: Scope::Node {}, name: Name::truncated(name.to_owned()) }
    }

    /// Names a series of the whole job; a name that is too long is cut.
    pub fn of_job(name: &str) -> Series {
        Series { scope: Scope::Job {}, name: Name::truncated(name.to_owned()) }
    }
}

impl Notice {
    /// Makes a notice of the whole job.
    pub fn of_job(space: &str, key: &[u8]) -> Result<Notice, ClientError> {
        let (space, key) = (Name::new(space.to_owned())?, Key::new(key.to_vec())?);
        Ok(Notice { scope: Scope::Job {}, space, key })
    }
}
