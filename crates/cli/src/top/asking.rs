//! Questions to processes that may not answer: all are asked at once, answers are taken for a
//! moment, and one that has not come is taken at a later look.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest reply, in bytes.
const MAX_REPLY_LEN: usize = 256 << 10;
/// Most connections at a time: half of the descriptors that a process usually may have.
const MAX_CONNECTIONS: usize = 500;

/// A question that is under way: the answer is a length in four bytes, little-endian, and that
/// much.
#[derive(Debug)]
struct Pending {
    stream: UnixStream,
    since: Instant,
    got: Vec<u8>,
}

/// What has come of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// All of it, without its length.
    Bytes(Vec<u8>),
    /// The other end has closed the connection, or says what is no answer.
    None,
    /// Nothing as yet, for so long.
    Silent(Duration),
}

/// Questions by what they are about.
#[derive(Debug)]
pub(crate) struct Asking<K>(BTreeMap<K, Pending>);

impl<K: Ord + Clone> Asking<K> {
    pub(crate) fn new() -> Asking<K> {
        Asking(BTreeMap::new())
    }

    /// Has `ask` ask about `about`, unless that is asked already.
    pub(crate) fn ask(&mut self, about: K, ask: impl FnOnce() -> std::io::Result<UnixStream>) {
        if self.0.contains_key(&about) || self.0.len() >= MAX_CONNECTIONS {
            return;
        }
        let asked = ask().and_then(|stream| stream.set_nonblocking(true).map(|()| stream));
        // Nobody is there to be asked.
        let Ok(stream) = asked else { return };
        self.0.insert(about, Pending { stream, since: Instant::now(), got: Vec::new() });
    }

    /// Forgets the questions that `wanted` does not want.
    pub(crate) fn retain(&mut self, wanted: impl Fn(&K) -> bool) {
        self.0.retain(|about, _| wanted(about));
    }

    /// Takes the answers that come within `limit`. Those that do not stay asked.
    pub(crate) fn take(&mut self, limit: Duration) -> BTreeMap<K, Answer> {
        let end = Instant::now() + limit;
        let mut answers = BTreeMap::new();
        loop {
            self.0.retain(|about, pending| match pending.read() {
                Some(answer) => {
                    answers.insert(about.clone(), answer);
                    false
                }
                None => true,
            });
            let left = end.saturating_duration_since(Instant::now());
            if self.0.is_empty() || left.is_zero() || !self.wait(left) {
                break;
            }
        }
        let silent = |(about, pending): (&K, &Pending)| {
            (about.clone(), Answer::Silent(pending.since.elapsed()))
        };
        answers.extend(self.0.iter().map(silent));
        answers
    }

    /// Waits until something can be read, for `limit` at most: whether it can.
    fn wait(&self, limit: Duration) -> bool {
        let mut polled: Vec<PollFd<'_>> =
            self.0.values().map(|pending| PollFd::new(&pending.stream, PollFlags::IN)).collect();
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut polled, Some(&limit)) {
            Ok(ready) => ready > 0,
            Err(error) => error == rustix::io::Errno::INTR,
        }
    }
}

impl Pending {
    /// Reads what is there: the answer, if that is all of it or there will be none.
    fn read(&mut self) -> Option<Answer> {
        loop {
            let wanted = match self.got.first_chunk() {
                None => 4,
                Some(length) => 4_usize.saturating_add(u32::from_le_bytes(*length) as usize),
            };
            if wanted > MAX_REPLY_LEN {
                return Some(Answer::None);
            }
            if self.got.len() >= wanted && wanted > 4 {
                return Some(Answer::Bytes(self.got.split_off(4)));
            }
            let mut some = [0; 4096];
            let room = (wanted - self.got.len()).min(some.len());
            match self.stream.read(&mut some[..room]) {
                Ok(0) => return Some(Answer::None),
                Ok(count) => self.got.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(_) => return Some(Answer::None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn framed(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat()
    }

    #[test]
    fn answers_are_taken_and_silence_is_told() {
        let mut asking = Asking::new();
        let (answers, mut answering) = UnixStream::pair().unwrap();
        let (closes, closing) = UnixStream::pair().unwrap();
        let (waits, mut waiting) = UnixStream::pair().unwrap();
        asking.ask("answers", || Ok(answers));
        asking.ask("closes", || Ok(closes));
        asking.ask("waits", || Ok(waits));
        asking.ask("nobody", || Err(ErrorKind::ConnectionRefused.into()));
        answering.write_all(&framed(b"yes")).unwrap();
        drop(closing);
        // A part of an answer is none.
        waiting.write_all(&framed(b"late")[..6]).unwrap();
        let taken = asking.take(Duration::from_millis(20));
        assert_eq!(taken["answers"], Answer::Bytes(b"yes".to_vec()));
        assert_eq!(taken["closes"], Answer::None);
        assert!(
            matches!(taken["waits"], Answer::Silent(time) if time >= Duration::from_millis(20))
        );
        assert_eq!(taken.len(), 3);

        asking.ask("waits", || panic!("it is asked already"));
        waiting.write_all(b"te").unwrap();
        assert_eq!(asking.take(TIMEOUT)["waits"], Answer::Bytes(b"late".to_vec()));
        assert!(asking.take(TIMEOUT).is_empty());
    }

    #[test]
    fn what_is_no_answer_is_none() {
        for bytes in [&u32::MAX.to_le_bytes()[..], &[0, 0, 0, 0]] {
            let mut asking = Asking::new();
            let (asks, mut answers) = UnixStream::pair().unwrap();
            asking.ask(1, || Ok(asks));
            answers.write_all(bytes).unwrap();
            drop(answers);
            assert_eq!(asking.take(TIMEOUT)[&1], Answer::None);
        }
    }

    #[test]
    fn who_is_gone_is_asked_no_more() {
        let mut asking = Asking::new();
        let (asks, _answers) = UnixStream::pair().unwrap();
        asking.ask(1, || Ok(asks));
        asking.retain(|about| *about != 1);
        assert!(asking.take(TIMEOUT).is_empty());
    }
}
