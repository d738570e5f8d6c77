//! What kedge itself, as a rank of a step, says to the step's server: few requests, one at a time.

use super::message::{Hello, Message};
use super::pack::{Pack, Unpack, Value};
use super::{ALL, BUFFER, PmixError, command, scope, status};
use std::collections::BTreeMap;

/// Which rank of which step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub namespace: String,
    pub rank: u32,
}

/// A session with a step's server.
#[derive(Debug)]
pub struct Client {
    step: Step,
    /// By which number the server calls this end.
    index: u32,
    /// The next request's.
    tag: u32,
}

/// A value that is true.
const BOOL: u16 = 1;

impl Client {
    /// Returns what is said first, by a process of this user and group.
    pub fn hello(step: &Step, user: u32, group: u32) -> Vec<u8> {
        Hello::of(&step.namespace, step.rank, user, group).encode()
    }

    /// Takes the server's answer to that out of `buffer`: this end's number. `None`: it is not
    /// there as a whole.
    ///
    /// # Errors
    /// The server refuses.
    pub fn welcomed(buffer: &mut Vec<u8>) -> Result<Option<u32>, PmixError> {
        let Some(answer) = buffer.first_chunk::<8>() else { return Ok(None) };
        let mut answer = Unpack(answer);
        let (status, index) = (answer.word()?.cast_signed(), answer.word()?);
        if status != status::SUCCESS {
            return Err(PmixError::Refused { request: "the greeting", status });
        }
        buffer.drain(..8);
        Ok(Some(index))
    }

    /// Returns the session of who is welcome.
    pub fn new(step: Step, index: u32) -> Client {
        Client { step, index, tag: 100 }
    }

    fn request(&mut self, body: Pack) -> Vec<u8> {
        self.tag = self.tag.wrapping_add(1).max(101);
        Message { tag: self.tag, body: body.0 }.encode(self.index)
    }

    fn command(command: u8) -> Pack {
        Pack::default().count(1).byte(command)
    }

    /// Qualifies a request by a value that is true.
    fn qualified(pack: Pack, key: &str) -> Pack {
        pack.count(1).size(1).count(1).text(key).word(0).half(BOOL).byte(1)
    }

    /// Returns the request that tells all ranks of keys, which they have after the next fence.
    pub fn commit(&mut self, keys: &[(&str, &str)]) -> Vec<u8> {
        let values = keys
            .iter()
            .fold(Pack::default(), |values, (key, value)| values.pair(key, &Value::Text(value)));
        let for_whom =
            |pack: Pack, whom: u8| pack.count(1).byte(whom).count(1).byte(BUFFER).bytes(&values.0);
        let commit = for_whom(Client::command(command::COMMIT), scope::LOCAL);
        self.request(for_whom(commit, scope::REMOTE))
    }

    /// Returns the request that waits for all ranks.
    pub fn fence(&mut self) -> Vec<u8> {
        let fence = Client::command(command::FENCE).count(1).size(1);
        let fence = fence.count(1).rank_of(&self.step.namespace, ALL);
        self.request(Client::qualified(fence, "pmix.collect"))
    }

    /// Returns the request for what a rank has told up to the last fence.
    pub fn get(&mut self, rank: u32) -> Vec<u8> {
        let get = Client::command(command::GET).count(1).text(&self.step.namespace);
        self.request(Client::qualified(get.count(1).word(rank), "pmix.immediate"))
    }

    /// Returns the request that ends the session.
    pub fn finalize(&mut self) -> Vec<u8> {
        self.request(Client::command(command::FINALIZE))
    }

    /// Returns the request that ends the step.
    pub fn abort(&mut self, status: i32, why: &str) -> Vec<u8> {
        let abort = Client::command(command::ABORT).status(status).count(1).text(why);
        self.request(abort.count(1).size(0))
    }

    /// Takes the answer to the last request out of `buffer`. `None`: it is not there as a whole.
    ///
    /// # Errors
    /// It is too long.
    pub fn answer(&self, buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, PmixError> {
        while let Some(message) = Message::take(buffer)? {
            // Of events nobody wants to hear.
            if message.tag == self.tag {
                return Ok(Some(message.body));
            }
        }
        Ok(None)
    }

    /// Checks an answer that has no more than how it went.
    ///
    /// # Errors
    /// It went wrong.
    pub fn done(body: &[u8], request: &'static str) -> Result<(), PmixError> {
        status_of(body, request).map(drop)
    }

    /// Reads the answer to [`Client::get`]: the texts that the rank has told.
    ///
    /// # Errors
    /// It is none.
    pub fn got(body: &[u8]) -> Result<BTreeMap<String, String>, PmixError> {
        values(body)
    }
}

/// Checks how it went; returns what follows.
pub(super) fn status_of<'a>(
    body: &'a [u8],
    request: &'static str,
) -> Result<Unpack<'a>, PmixError> {
    let mut body = Unpack(body);
    match body.status()? {
        status::SUCCESS => Ok(body),
        status => Err(PmixError::Refused { request, status }),
    }
}

pub(super) fn values(body: &[u8]) -> Result<BTreeMap<String, String>, PmixError> {
    let mut found = BTreeMap::new();
    let mut body = match status_of(body, "get") {
        Err(PmixError::Refused { status: status::NOT_FOUND, .. }) => return Ok(found),
        other => other?,
    };
    while !body.is_empty() {
        body.one()?;
        let mut of_rank = Unpack(body.bytes()?);
        of_rank.one()?;
        of_rank.text()?;
        of_rank.word()?;
        while !of_rank.is_empty() {
            let (key, value) = of_rank.pair()?;
            found.extend(value.map(|value| (key.to_owned(), value.to_owned())));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::{Member, Server};
    use super::*;

    fn step() -> Step {
        Step { namespace: "n".to_owned(), rank: 0 }
    }

    fn answer(client: &Client, server: &mut Server) -> Option<Vec<u8>> {
        let mut said = std::mem::take(server.to_rank());
        let answer = client.answer(&mut said).unwrap();
        assert!(said.is_empty());
        answer
    }

    /// A client and a server of this crate understand each other.
    #[test]
    fn what_is_told_is_got_after_a_fence() {
        let member = Member { namespace: "n".to_owned(), rank: 0, size: 2, host: "h".to_owned() };
        let mut server = Server::new(member);
        server.from_rank(&Client::hello(&step(), 7, 8)).unwrap();
        let index = Client::welcomed(server.to_rank()).unwrap().expect("an answer");
        let mut client = Client::new(step(), index);
        server.gathered(0, vec![b"h".to_vec(), b"i".to_vec()]).unwrap();
        server.from_rank(&client.commit(&[("kedge.at", "h:1"), ("kedge.job", "sim")])).unwrap();
        Client::done(&answer(&client, &mut server).unwrap(), "commit").unwrap();
        server.from_rank(&client.fence()).unwrap();
        assert_eq!(answer(&client, &mut server), None);
        let (number, own) = server.gathers().unwrap();
        let all = vec![own.to_vec(), own.to_vec()];
        server.gathered(number, all).unwrap();
        Client::done(&answer(&client, &mut server).unwrap(), "fence").unwrap();
        for rank in 0..2 {
            server.from_rank(&client.get(rank)).unwrap();
            let got = Client::got(&answer(&client, &mut server).unwrap()).unwrap();
            assert_eq!(got.get("kedge.at").map(String::as_str), Some("h:1"));
            assert_eq!(got.get("kedge.job").map(String::as_str), Some("sim"));
        }
        server.from_rank(&client.get(2)).unwrap();
        assert_eq!(Client::got(&answer(&client, &mut server).unwrap()), Ok(BTreeMap::new()));
        server.from_rank(&client.abort(3, "why")).unwrap();
        assert_eq!((answer(&client, &mut server).is_some(), server.aborted()), (true, Some(3)));
        server.from_rank(&client.finalize()).unwrap();
        Client::done(&answer(&client, &mut server).unwrap(), "finalize").unwrap();
        assert!(!server.is_in_session());
    }

    #[test]
    fn a_server_that_refuses_is_heard() {
        let mut refusal = [(-12_i32).to_be_bytes(), [0; 4]].concat();
        let refused = PmixError::Refused { request: "the greeting", status: -12 };
        assert_eq!(Client::welcomed(&mut refusal), Err(refused));
        assert_eq!(Client::welcomed(&mut vec![0; 7]), Ok(None));
    }
}
