//! The server of one rank: all of what it knows is in an image.

use super::member::Member;
use super::message::{Hello, MAX_MESSAGE_LEN, Message};
use super::pack::{Pack, Unpack};
use super::{ALL, PmixError, command, job, scope, status};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Most ranks of a job.
pub const MAX_RANKS: u32 = 4096;
/// Most bytes that a rank may have told the others.
pub const MAX_COMMITTED: usize = 4 << 20;
/// So many bytes may wait for the rank before no more is read from it.
const UNREAD: usize = 4 << 20;
/// So many requests may be under way.
const MAX_ASKED: usize = 1024;
/// Longest name of a host, in bytes.
const MAX_HOST_LEN: usize = 256;
/// Tags below this one are of messages that nobody answers.
const FIRST_TAG: u32 = 100;
/// What keys of the server's own begin with.
const RESERVED: &str = "pmix";

/// How far a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// It has not said who it is.
    New,
    Greeted,
    Ended,
}

/// A request that is not answered yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Asked {
    tag: u32,
    what: What,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum What {
    Job,
    /// The number of its gathering.
    Fence(u64),
    /// What that rank has told.
    Get(u32),
}

/// Answers what a rank asks, alone where it can.
///
/// What needs the other ranks is a *gathering*: each rank contributes some bytes and gets those of
/// all. They have numbers, and all ranks do them in one order: the first brings where each rank is,
/// and each fence brings what the ranks have told. A contribution to a gathering is the same
/// however often it is asked for, also after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    member: Member,
    phase: Phase,
    /// How many gatherings have ended.
    done: u64,
    /// The rank's contributions to those that have begun since.
    gathers: VecDeque<Vec<u8>>,
    /// By rank.
    hosts: Vec<String>,
    /// What each rank has told up to the last fence, by rank: keys and values, packed.
    told: Vec<Vec<u8>>,
    /// What this rank has told.
    committed: BTreeMap<String, Vec<u8>>,
    /// It has told something since the last fence.
    news: bool,
    /// What the last gathering has brought, where this rank tells the others.
    last: Option<(u64, Vec<Vec<u8>>)>,
    asked: Vec<Asked>,
    aborted: Option<i32>,
    from_rank: Vec<u8>,
    to_rank: Vec<u8>,
    #[serde(skip)]
    held: bool,
}

impl Server {
    /// Returns one for a rank that has not begun.
    pub fn new(member: Member) -> Server {
        let host = member.host.as_bytes();
        let host = host[..host.len().min(MAX_HOST_LEN)].to_vec();
        Server {
            told: vec![Vec::new(); member.size as usize],
            member,
            phase: Phase::New,
            done: 0,
            gathers: VecDeque::from([host]),
            hosts: Vec::new(),
            committed: BTreeMap::new(),
            news: false,
            last: None,
            asked: Vec::new(),
            aborted: None,
            from_rank: Vec::new(),
            to_rank: Vec::new(),
            held: false,
        }
    }

    /// Goes on with what an image holds.
    ///
    /// # Errors
    /// No server leaves that.
    pub fn restored(self) -> Result<Server, PmixError> {
        let Member { rank, size, .. } = self.member;
        let all = |length: usize| length == size as usize;
        let bytes = |all: &[Vec<u8>]| all.iter().map(Vec::len).sum::<usize>();
        let checks = [
            ("its rank", rank < size && size <= MAX_RANKS),
            ("what the ranks have told", all(self.told.len()) && bytes(&self.told) <= most_told()),
            ("where the ranks are", self.hosts.is_empty() == (self.done == 0)),
            ("where the ranks are", self.hosts.is_empty() || all(self.hosts.len())),
            ("what it waits for", self.asked.len() <= MAX_ASKED),
            ("what it tells", self.gathers.len() <= MAX_ASKED + 1),
            ("what it tells", self.done > 0 || !self.gathers.is_empty()),
            ("what it has heard", self.last.as_ref().is_none_or(|(_, last)| all(last.len()))),
        ];
        match checks.iter().find(|(_, well)| !well) {
            Some((what, _)) => Err(PmixError::Image(what)),
            None => Ok(self),
        }
    }

    /// Returns what an image holds; what the rank has not read yet is for the caller to add by
    /// [`Server::unread`].
    pub fn saved(&self) -> Server {
        Server { held: false, ..self.clone() }
    }

    /// Adds what the rank has not read of what it was sent.
    pub fn unread(&mut self, bytes: Vec<u8>) {
        self.to_rank.splice(0..0, bytes);
    }

    /// Who the rank is.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// Whether the rank has begun and not ended its session.
    pub fn is_in_session(&self) -> bool {
        self.phase == Phase::Greeted
    }

    /// Whether the rank may begin a session now.
    pub fn is_free(&self) -> bool {
        self.phase != Phase::Greeted
    }

    /// With which status the rank has asked for the end of all.
    pub fn aborted(&self) -> Option<i32> {
        self.aborted
    }

    /// Whether more may be read from the rank.
    pub fn wants_rank(&self) -> bool {
        self.from_rank.len() <= MAX_MESSAGE_LEN && self.to_rank.len() < UNREAD
    }

    /// What waits to be written to the rank.
    pub fn to_rank(&mut self) -> &mut Vec<u8> {
        &mut self.to_rank
    }

    /// Holds back what the rank asks from here on, or lets it go on.
    ///
    /// # Errors
    /// Of what was held back.
    pub fn hold(&mut self, held: bool) -> Result<(), PmixError> {
        self.held = held;
        self.advance()
    }

    /// Whether it is held: no gathering may end.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// A process of the rank has connected.
    pub fn connected(&mut self) {
        self.disconnected();
        self.phase = Phase::New;
    }

    /// The rank's connection is gone, and what was asked on it.
    pub fn disconnected(&mut self) {
        self.phase = Phase::Ended;
        self.from_rank.clear();
        self.to_rank.clear();
        self.asked.clear();
    }

    /// The rank has said that.
    ///
    /// # Errors
    /// It is no PMIx that is known here: the session is over.
    pub fn from_rank(&mut self, bytes: &[u8]) -> Result<(), PmixError> {
        self.from_rank.extend_from_slice(bytes);
        self.advance()
    }

    /// The number of the next gathering that has begun, and the rank's contribution to it.
    pub fn gathers(&self) -> Option<(u64, &[u8])> {
        self.gathers.front().map(|own| (self.done, own.as_slice()))
    }

    /// What the first rank tells the others again after a restart: the last gathering's number and
    /// contributions.
    pub fn last(&self) -> Option<(u64, &[Vec<u8>])> {
        self.last.as_ref().map(|(number, all)| (*number, all.as_slice()))
    }

    /// Ends the gathering `number`, to which the ranks have contributed `all`.
    ///
    /// # Errors
    /// That is none which has begun, or the contributions are none.
    pub fn gathered(&mut self, number: u64, all: Vec<Vec<u8>>) -> Result<(), PmixError> {
        if number != self.done || self.gathers.is_empty() {
            return Err(PmixError::Gathered("of another fence"));
        }
        if all.len() != self.member.size as usize {
            return Err(PmixError::Gathered("of another number of ranks"));
        }
        if number == 0 {
            let host = |bytes: &Vec<u8>| {
                String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_HOST_LEN)]).into_owned()
            };
            self.hosts = all.iter().map(host).collect();
        } else {
            let told = all.iter().zip(&mut self.told);
            for (contribution, told) in told {
                match contribution.split_first() {
                    Some((&SAME, [])) => {}
                    Some((&NEWS, news)) => *told = news.to_vec(),
                    _ => return Err(PmixError::Gathered("of an unknown kind")),
                }
            }
            if self.told.iter().map(Vec::len).sum::<usize>() > most_told() {
                return Err(PmixError::Told { most: most_told() });
            }
        }
        self.gathers.pop_front();
        self.done += 1;
        self.last = (self.member.rank == 0).then_some((number, all));
        self.settle();
        Ok(())
    }

    /// Takes what the rank has asked as far as it may go on.
    fn advance(&mut self) -> Result<(), PmixError> {
        while !self.held && self.asked.len() < MAX_ASKED && self.to_rank.len() < UNREAD {
            let more = match self.phase {
                Phase::New => self.greet()?,
                Phase::Greeted => match Message::take(&mut self.from_rank)? {
                    Some(message) => {
                        self.ask(&message)?;
                        true
                    }
                    None => false,
                },
                Phase::Ended => {
                    self.from_rank.clear();
                    false
                }
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn greet(&mut self) -> Result<bool, PmixError> {
        let Some(hello) = Hello::take(&mut self.from_rank)? else { return Ok(false) };
        let Member { namespace, rank, .. } = &self.member;
        if (&hello.namespace, hello.rank) != (namespace, *rank) {
            let found = format!("{}.{}", hello.namespace, hello.rank);
            let found = found.chars().filter(|c| !c.is_control()).take(60).collect();
            return Err(PmixError::Who { found, expected: format!("{namespace}.{rank}") });
        }
        hello.check()?;
        // That it is welcome, and by which number it calls itself.
        self.to_rank.extend_from_slice(&[0; 8]);
        self.phase = Phase::Greeted;
        Ok(true)
    }

    fn ask(&mut self, message: &Message) -> Result<(), PmixError> {
        let tag = message.tag;
        if tag < FIRST_TAG {
            return Ok(());
        }
        let mut body = Unpack(&message.body);
        body.one()?;
        let status = match body.byte()? {
            command::JOB => return self.wait(tag, What::Job),
            command::FENCE if self.is_of_all(&mut body)? => {
                let number = self.done + self.gathers.len() as u64;
                self.contribute();
                return self.wait(tag, What::Fence(number));
            }
            command::GET => return self.get(tag, body),
            command::COMMIT => match self.commit(body) {
                Ok(()) => status::SUCCESS,
                Err(PmixError::Type(_)) => status::NOT_SUPPORTED,
                Err(error) => return Err(error),
            },
            command::ABORT => {
                self.aborted = Some(body.status()?);
                status::SUCCESS
            }
            command::FINALIZE => {
                self.phase = Phase::Ended;
                status::SUCCESS
            }
            // Nobody has anything to tell of. What the job's processes tell each other so they get
            // by themselves.
            command::REGISTER_EVENTS | command::NOTIFY => status::SUCCESS,
            command::DEREGISTER_EVENTS => return Ok(()),
            // A fence of some ranks, and what follows the library's other functions.
            _ => status::NOT_SUPPORTED,
        };
        self.answer(tag, Pack::default().status(status));
        Ok(())
    }

    fn answer(&mut self, tag: u32, body: Pack) {
        let message = Message { tag, body: body.0 };
        self.to_rank.extend_from_slice(&message.encode(0));
    }

    fn wait(&mut self, tag: u32, what: What) -> Result<(), PmixError> {
        self.asked.push(Asked { tag, what });
        self.settle();
        Ok(())
    }

    /// Answers what can be answered by now.
    fn settle(&mut self) {
        for Asked { tag, what } in std::mem::take(&mut self.asked) {
            match &what {
                What::Job if self.done > 0 => {
                    let job = job::answer(&self.member, &self.hosts);
                    self.answer(tag, Pack(job));
                }
                What::Fence(number) if self.done > *number => {
                    self.answer(tag, Pack::default().status(status::SUCCESS));
                }
                // Of a rank that has told nothing it may come with the next fence.
                What::Get(rank) if !self.told[*rank as usize].is_empty() => {
                    let values = self.values(*rank);
                    self.answer(tag, values);
                }
                What::Get(_) if self.done > 1 => {
                    self.answer(tag, Pack::default().status(status::NOT_FOUND));
                }
                _ => self.asked.push(Asked { tag, what }),
            }
        }
    }

    /// Whether the ranks that a fence names are all ranks of the job.
    fn is_of_all(&self, body: &mut Unpack<'_>) -> Result<bool, PmixError> {
        body.one()?;
        let ranks = body.values()?;
        if body.word()? as usize != ranks {
            return Err(PmixError::Short);
        }
        let mut named = vec![false; self.member.size as usize];
        for _ in 0..ranks {
            let (namespace, rank) = (body.text()?, body.word()?);
            if namespace != self.member.namespace {
                return Ok(false);
            }
            match named.get_mut(rank as usize) {
                Some(named) => *named = true,
                None if rank == ALL => named.fill(true),
                None => return Ok(false),
            }
        }
        Ok(named.iter().all(|named| *named))
    }

    /// Begins a gathering of what the ranks have told.
    fn contribute(&mut self) {
        let mut own = vec![if self.news { NEWS } else { SAME }];
        if self.news {
            own.extend(self.committed.values().flatten());
        }
        self.news = false;
        self.gathers.push_back(own);
    }

    /// Takes what the rank tells the others.
    fn commit(&mut self, mut body: Unpack<'_>) -> Result<(), PmixError> {
        while !body.is_empty() {
            body.one()?;
            let whom = body.byte()?;
            body.one()?;
            body.byte()?;
            let mut values = Unpack(body.bytes()?);
            // To ranks on the same node, of which there are none.
            if !matches!(whom, scope::REMOTE | scope::GLOBAL) {
                continue;
            }
            while !values.is_empty() {
                let before = values.0;
                let (key, _) = values.pair()?;
                let packed = before[..before.len() - values.0.len()].to_vec();
                self.committed.insert(key.to_owned(), packed);
                self.news = true;
            }
        }
        if self.committed.values().map(Vec::len).sum::<usize>() > MAX_COMMITTED {
            return Err(PmixError::Told { most: MAX_COMMITTED });
        }
        Ok(())
    }

    fn get(&mut self, tag: u32, mut body: Unpack<'_>) -> Result<(), PmixError> {
        body.one()?;
        let namespace = body.text()?;
        body.one()?;
        let rank = body.word()?;
        let immediate = body.qualifiers().map(|all| all.contains(&"pmix.immediate"));
        let key = if body.is_empty() { None } else { body.one().and_then(|()| body.text()).ok() };
        let known = namespace == self.member.namespace && rank < self.member.size;
        let is_own = rank == self.member.rank;
        // What the server tells of the job has been told.
        let reserved = key.is_some_and(|key| key.starts_with(RESERVED));
        let answer = match immediate {
            Err(PmixError::Type(_)) => Pack::default().status(status::NOT_SUPPORTED),
            Err(_) => Pack::default().status(status::BAD_PARAM),
            Ok(_) if known && is_own && !self.committed.is_empty() => self.values(rank),
            Ok(false) if known && !is_own && !reserved => {
                return self.wait(tag, What::Get(rank));
            }
            Ok(true) if known && !reserved && !self.told[rank as usize].is_empty() => {
                self.values(rank)
            }
            Ok(_) => Pack::default().status(status::NOT_FOUND),
        };
        self.answer(tag, answer);
        Ok(())
    }

    /// What a rank has told, as the answer to who asks for it.
    fn values(&self, rank: u32) -> Pack {
        let inner = Pack::default().count(1).rank_of(&self.member.namespace, rank);
        let inner = match rank == self.member.rank {
            true => self.committed.values().fold(inner, |inner, value| inner.raw(value)),
            false => inner.raw(&self.told[rank as usize]),
        };
        Pack::default().status(status::SUCCESS).count(1).bytes(&inner.0)
    }
}

/// A contribution begins with it where the rank has told nothing new …
const SAME: u8 = 0;
/// … and where what it has told follows.
const NEWS: u8 = 1;

/// Most bytes of what all ranks have told.
const fn most_told() -> usize {
    MAX_MESSAGE_LEN
}

impl Server {
    /// Returns contributions as one text of bytes.
    pub fn join(all: &[Vec<u8>]) -> Vec<u8> {
        let mut joined = Vec::new();
        for one in all {
            joined.extend_from_slice(&u32::try_from(one.len()).unwrap_or(u32::MAX).to_be_bytes());
            joined.extend_from_slice(one);
        }
        joined
    }

    /// Returns the contributions of which [`Server::join`] has made one text.
    ///
    /// # Errors
    /// It has not.
    pub fn split(joined: &[u8]) -> Result<Vec<Vec<u8>>, PmixError> {
        let (mut all, mut rest) = (Vec::new(), Unpack(joined));
        while !rest.is_empty() {
            let length = rest.word()? as usize;
            all.push(rest.take(length)?.to_vec());
        }
        Ok(all)
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
