//! Links whose connections are cut all the time: every byte arrives once, in order.

use super::*;
use crate::inlet::{Connections, Inlet, Receiver};
use kedge_keys::{Connection, Secrets, TrafficKey};
use std::io::Read;
use std::net::TcpListener;
use std::sync::mpsc::{self, Receiver as Queue, Sender as Feed};

/// The other end does not dial any more, or does not answer.
const GONE: Duration = Duration::from_secs(2);

/// Numbers that look random (xorshift).
struct Numbers(u64);
impl Numbers {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

/// Carries bytes one way until so many have passed, then cuts both connections.
fn carry(from: TcpStream, to: TcpStream, mut most: u64) {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while most > 0 {
            let want = (bytes.len() as u64).min(most) as usize;
            let Ok(count @ 1..) = (&from).read(&mut bytes[..want]) else { break };
            if (&to).write_all(&bytes[..count]).is_err() {
                break;
            }
            most -= count as u64;
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}

/// What the near end's dialling and the server's handing over are in a session.
struct Dials {
    to_far: Feed<(Connection, u64, Feed<u64>)>,
    numbers: Numbers,
    seal: Seal,
    /// Bytes after which a connection is cut, at most; cuts that are left.
    most: u64,
    cuts: u32,
}
struct Takes(Queue<(Connection, u64, Feed<u64>)>);

/// Whether connections are sealed, and how many records each of their keys still seals.
#[derive(Debug, Clone, Copy)]
enum Seal {
    Plain,
    For(u64),
}

/// A packet's records, and some.
const FEW_RECORDS: Seal = Seal::For(20);
const MANY_RECORDS: Seal = Seal::For(1 << 20);
/// Most records that AES-GCM may seal, less what is kept for the end (kedge-keys).
const MAX_RECORDS: u64 = (1 << 24) - 16;

impl Seal {
    fn seal(self, stream: TcpStream, [send, receive]: [u8; 2]) -> Connection {
        let Seal::For(records) = self else { return stream.into() };
        let sequence = MAX_RECORDS - records;
        let key = |key| TrafficKey { key: [key; 32], iv: [1; 12], sequence };
        let secrets = Secrets { suite: 0x1302, send: key(send), receive: key(receive) };
        Connection::new(stream, Some(secrets)).unwrap()
    }
}

impl Dials {
    /// Hands one end of a connection to the far end, and has the near end go on with the other.
    fn dial(&self, inlet: &Inlet, near: TcpStream, far: TcpStream) -> Result<(), String> {
        let (answer, answered) = mpsc::channel();
        let (near, far) = (self.seal.seal(near, [1, 2]), self.seal.seal(far, [2, 1]));
        self.to_far.send((far, inlet.received(), answer)).map_err(|e| e.to_string())?;
        let arrived = answered.recv_timeout(GONE).map_err(|e| e.to_string())?;
        inlet.go_on(near, |_, _| Ok(arrived)).map_err(|e| e.to_string())
    }
}

impl Connections for Dials {
    fn next(&mut self, inlet: &Inlet) -> Result<(), String> {
        let ((near, a), (b, far)) = (pair(), pair());
        let limit = match self.cuts.checked_sub(1) {
            Some(left) => (left, 1 + self.numbers.below(self.most)),
            None => (0, u64::MAX),
        };
        self.cuts = limit.0;
        carry(a.try_clone().unwrap(), b.try_clone().unwrap(), limit.1);
        carry(b, a, limit.1);
        self.dial(inlet, near, far)
    }
}

impl Connections for Takes {
    fn next(&mut self, inlet: &Inlet) -> Result<(), String> {
        let (stream, arrived, answer) = self.0.recv_timeout(GONE).map_err(|e| e.to_string())?;
        let tell = |_: &mut Connection, received| {
            answer.send(received).map_err(io::Error::other)?;
            Ok(arrived)
        };
        inlet.go_on(stream, tell).map_err(|e| e.to_string())
    }
}

fn connected(which: Which, seal: Seal, seed: u64, most: u64, cuts: u32) -> (Dials, Takes) {
    let (to_far, at_far) = mpsc::channel();
    let numbers = Numbers(seed * 2 + which as u64 + 1);
    (Dials { to_far, numbers, seal, most, cuts }, Takes(at_far))
}

/// Returns the byte at an offset of a stream.
fn byte(stream: u64, at: u64) -> u8 {
    ((at ^ stream << 5).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn feed(links: &Arc<Links>, which: Which, stream: u64, total: u64, seed: u64) {
    let (links, mut numbers) = (links.clone(), Numbers(seed));
    thread::spawn(move || {
        let mut at = 0;
        while at < total {
            let count = (1 + numbers.below(9000)).min(total - at);
            let bytes: Vec<u8> = (at..at + count).map(|at| byte(stream, at)).collect();
            links.wait_for_room(which).unwrap();
            links.send(which, &bytes).unwrap();
            at += count;
        }
    });
}

fn check<C: Connections>(receiver: &mut Receiver<C>, stream: u64, total: u64) {
    let (mut at, mut bytes) = (0, [0; 5000]);
    while at < total {
        let count = receiver.read(&mut bytes).unwrap();
        for (place, got) in bytes[..count].iter().enumerate() {
            assert_eq!(*got, byte(stream, at + place as u64), "stream {stream}, byte {at}+{place}");
        }
        at += count as u64;
    }
    assert_eq!(at, total, "stream {stream}");
}

fn run(seal: Seal, total: u64, seed: u64, most: u64, cuts: u32) {
    let (near, far) = (Links::start().unwrap(), Links::start().unwrap());
    let (dials, takes) = connected(Which::Line, seal, seed, most, cuts);
    let (aside_dials, aside_takes) = connected(Which::Aside, seal, seed, most, cuts);
    feed(&near, Which::Line, 1, total, seed + 7);
    feed(&far, Which::Line, 2, total, seed + 8);
    feed(&near, Which::Aside, 3, total, seed + 9);
    let near_line = Receiver::new(near.clone(), Which::Line, dials);
    let far_line = Receiver::new(far.clone(), Which::Line, takes);
    let near_aside = Receiver::new(near.clone(), Which::Aside, aside_dials);
    let far_aside = Receiver::new(far.clone(), Which::Aside, aside_takes);
    let (done, all) = mpsc::channel();
    let reads = |mut receiver: Receiver<Takes>, stream, done: Feed<()>| {
        thread::spawn(move || {
            check(&mut receiver, stream, total);
            let _ = done.send(());
            // Acknowledgements are still read, as long as there is a connection.
            let _ = receiver.read(&mut [0]);
        });
    };
    reads(far_line, 1, done.clone());
    reads(far_aside, 3, done.clone());
    thread::spawn(move || {
        let mut near_aside = near_aside;
        let _ = near_aside.read(&mut [0]);
    });
    let mut near_line = near_line;
    thread::spawn(move || {
        check(&mut near_line, 2, total);
        let _ = done.send(());
        let _ = near_line.read(&mut [0]);
    });
    for _ in 0..3 {
        all.recv_timeout(Duration::from_secs(60)).expect("all three streams arrive");
    }
    near.end();
    far.end();
}

#[test]
fn every_byte_arrives_once_however_often_the_line_is_cut() {
    for seed in 1..=8 {
        for seal in [Seal::Plain, MANY_RECORDS] {
            run(seal, 60_000, seed, 400, 60);
            run(seal, 300_000, seed, 20_000, 30);
        }
    }
}

#[test]
fn much_arrives_although_little_may_be_kept() {
    for seal in [Seal::Plain, MANY_RECORDS] {
        run(seal, 2 * LIMIT as u64, 3, 1 << 22, 10);
    }
}

/// Cut behind each of the first bytes in turn: within heads, and at their ends.
#[test]
fn a_cut_at_any_byte_loses_nothing() {
    thread::scope(|scope| {
        for most in 1..=2 * HEAD as u64 + 9 {
            scope.spawn(move || cut_behind(Seal::Plain, most));
            scope.spawn(move || cut_behind(MANY_RECORDS, most));
        }
    });
}

fn cut_behind(seal: Seal, most: u64) {
    let (near, far) = (Links::start().unwrap(), Links::start().unwrap());
    let (mut dials, takes) = connected(Which::Line, seal, 1, 1, 0);
    let mut near_line = Receiver::new(near.clone(), Which::Line, Cuts(&mut dials, Some(most)));
    let mut far_line = Receiver::new(far.clone(), Which::Line, takes);
    near.send(Which::Line, b"hello").unwrap();
    far.send(Which::Line, b"world").unwrap();
    let (mut got, mut word) = ([0; 5], [0; 5]);
    let (read, both) = mpsc::channel();
    thread::scope(|scope| {
        let (near_read, far_read) = (read.clone(), read);
        // Whoever reads on finds a cut.
        let (near_line, far_line) = (&mut near_line, &mut far_line);
        let (word, got) = (&mut word, &mut got);
        scope.spawn(move || {
            near_line.read_exact(word).unwrap();
            near_read.send(()).unwrap();
            let _ = near_line.read(&mut [0]);
        });
        scope.spawn(move || {
            far_line.read_exact(got).unwrap();
            far_read.send(()).unwrap();
            let _ = far_line.read(&mut [0]);
        });
        for _ in 0..2 {
            both.recv_timeout(Duration::from_secs(20)).expect("both words arrive");
        }
        near.end();
        far.end();
    });
    assert_eq!((&got, &word), (b"hello", b"world"), "cut behind {most}");
}

/// Dials, and has the first connection cut behind so many bytes.
struct Cuts<'a>(&'a mut Dials, Option<u64>);
impl Connections for Cuts<'_> {
    fn next(&mut self, inlet: &Inlet) -> Result<(), String> {
        let Some(most) = self.1.take() else { return self.0.next(inlet) };
        let ((near, a), (b, far)) = (pair(), pair());
        carry(a.try_clone().unwrap(), b.try_clone().unwrap(), most);
        carry(b, a, most);
        self.0.dial(inlet, near, far)
    }
}

/// A key that is used up is another connection's concern.
#[test]
fn much_arrives_by_keys_that_seal_little() {
    run(FEW_RECORDS, 20 << 20, 5, u64::MAX, 0);
}

/// What was changed on its way is a cut, and comes again.
#[test]
fn a_changed_byte_is_never_taken() {
    let links = Links::start().unwrap();
    let far = Links::start().unwrap();
    let (mut dials, takes) = connected(Which::Line, MANY_RECORDS, 1, u64::MAX, 0);
    let mut near_line = Receiver::new(links.clone(), Which::Line, Changes(&mut dials, 40));
    let mut far_line = Receiver::new(far.clone(), Which::Line, takes);
    far.send(Which::Line, &[7; 5000]).unwrap();
    let (ended, end) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = far_line.read(&mut [0]);
        });
        let near_line = &mut near_line;
        scope.spawn(move || {
            let mut got = [0; 5000];
            let read = near_line.read_exact(&mut got);
            ended.send(read.is_ok() && got == [7; 5000]).unwrap();
        });
        let is_all = end.recv_timeout(Duration::from_secs(20)).expect("it arrives");
        links.end();
        far.end();
        assert!(is_all);
    });
    assert_eq!(near_line.connections.1, 0, "each changed connection was given up");
}

/// Dials connections of which a byte is changed, so many times.
struct Changes<'a>(&'a mut Dials, u64);
impl Connections for Changes<'_> {
    fn next(&mut self, inlet: &Inlet) -> Result<(), String> {
        let ((near, a), (b, far)) = (pair(), pair());
        let changed = self.1.checked_sub(1);
        self.1 = changed.unwrap_or(0);
        carry(a.try_clone().unwrap(), b.try_clone().unwrap(), u64::MAX);
        thread::spawn(move || {
            let (mut bytes, mut at) = ([0; 4096], 0);
            while let Ok(count @ 1..) = (&b).read(&mut bytes) {
                let place = changed
                    .map(|which| which * 97)
                    .filter(|it| (at..at + count as u64).contains(it));
                place.into_iter().for_each(|place| bytes[(place - at) as usize] ^= 1);
                at += count as u64;
                if (&a).write_all(&bytes[..count]).is_err() {
                    return;
                }
            }
            let _ = a.shutdown(Shutdown::Both);
        });
        self.0.dial(inlet, near, far)
    }
}

/// Room is waited for without a connection, and the session's end ends the wait.
#[test]
fn a_full_link_waits_and_its_end_is_heard() {
    let links = Links::start().unwrap();
    links.send(Which::Line, &vec![0; LIMIT + 1]).unwrap();
    let waits = links.clone();
    let begin = Instant::now();
    let waiting = thread::spawn(move || waits.wait_for_room(Which::Line));
    thread::sleep(Duration::from_millis(50));
    links.end();
    assert!(waiting.join().unwrap().is_err());
    assert!(begin.elapsed() >= Duration::from_millis(50));
    assert!(links.send(Which::Line, b"more").is_err());
}

/// Whoever sends much waits or fails, as he has said.
#[test]
fn senders_are_bounded_where_nothing_is_taken() {
    let links = Links::start().unwrap();
    let mut limited = Sender::limited(links.clone(), Which::Line, 1000);
    limited.write_all(&[0; 600]).unwrap();
    limited.write_all(&[0; 600]).unwrap();
    let error = limited.write_all(&[0; 1]).unwrap_err();
    assert!(error.to_string().contains("takes no answers"), "{error}");
    let mut waiting = Sender::waiting(links.clone(), Which::Line);
    waiting.write_all(&vec![0; LIMIT]).unwrap();
    let waits = thread::spawn(move || waiting.write_all(&[0; 1]));
    thread::sleep(Duration::from_millis(50));
    assert!(!waits.is_finished());
    links.end();
    assert!(waits.join().unwrap().is_err());
}

/// An end that is there and says nothing is given up.
#[test]
fn silence_behind_beats_has_an_end() {
    let links = Links::start().unwrap();
    let (near, mut far) = pair();
    let (dials, _takes) = connected(Which::Line, Seal::Plain, 1, 1, 0);
    let mut receiver = Receiver::new(links.clone(), Which::Line, dials);
    receiver.inlet().go_on(near, |_, _| Ok(0)).unwrap();
    receiver.set_patience(Some(Duration::from_millis(100)));
    let beats = thread::spawn(move || {
        while far.write_all(&[0; HEAD]).is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let error = receiver.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    links.end();
    drop(receiver);
    beats.join().unwrap();
}

#[test]
fn what_was_never_sent_is_not_acknowledged() {
    let links = Links::start().unwrap();
    links.send(Which::Line, b"four").unwrap();
    // Nothing has left before there is a connection.
    assert!(links.join(Which::Line, pair().0, None, 4).is_none());
    assert!(links.join(Which::Line, pair().0, None, 0).is_some());
    assert!(links.join(Which::Line, pair().0, None, 5).is_none());
    assert!(!links.acknowledged([5, 0]));
    assert!(links.acknowledged([4, 0]) && links.acknowledged([2, 0]));
    assert!(links.join(Which::Line, pair().0, None, 3).is_none());
    links.end();
}

#[test]
fn a_packet_that_is_nonsense_ends_the_link() {
    for bytes in [[0xff; HEAD], [0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        let links = Links::start().unwrap();
        let (near, mut far) = pair();
        let (dials, _takes) = connected(Which::Line, Seal::Plain, 1, 1, 0);
        let mut receiver = Receiver::new(links.clone(), Which::Line, dials);
        receiver.inlet().go_on(near, |_, _| Ok(0)).unwrap();
        far.write_all(&bytes).unwrap();
        let error = receiver.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        links.end();
    }
}
