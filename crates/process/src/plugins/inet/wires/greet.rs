//! What the two ends of a connection say to each other on it at a restart, before the programs have
//! it again.
//!
//! ```text
//! who connects → who accepts   MAGIC, length of the name, name, first half of the token, bytes that waited here
//! who accepts → who connects   second half of the token, bytes that waited here
//! each → the other             what waited here; READY when it has read what waited there and has room for its own
//! each → the other             what waited there: it stays in the connection, for the program
//! ```

use crate::plugins::inet::fill;
use crate::plugins::inet::room::Room;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 8] = b"kedge-w1";
/// Of each half of a token.
pub(super) const HALF: usize = 16;
/// Longest name of a connection.
const NAME: usize = 240;
const READY: u8 = b'+';
/// Of what precedes the name, and of what follows it.
const HEAD: usize = MAGIC.len() + 2;
const TAIL: usize = HALF + 8;
/// How long nothing may come or go.
const STILL: Duration = Duration::from_secs(10);
/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;

/// What proves to each end that the other one is its own.
pub(super) type Token = [[u8; HALF]; 2];

fn nonsense(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Waits until `fd` can be read from or written to, as `flags` say.
fn ready(fd: &OwnedFd, flags: PollFlags, wait: Duration) -> io::Result<PollFlags> {
    let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, flags)];
    match retry_on_intr(|| poll(&mut fds, Some(&wait)))? {
        0 => Err(ErrorKind::TimedOut.into()),
        _ => Ok(fds[0].revents()),
    }
}

fn read(fd: &OwnedFd, mut bytes: &mut [u8], wait: Duration) -> io::Result<()> {
    let begin = Instant::now();
    while !bytes.is_empty() {
        ready(fd, PollFlags::IN, wait.saturating_sub(begin.elapsed()))?;
        match retry_on_intr(|| recv(fd, &mut *bytes, RecvFlags::DONTWAIT)) {
            Ok((0, _)) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => bytes = &mut bytes[count..],
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn length(bytes: &[u8]) -> io::Result<usize> {
    let bytes: [u8; 8] =
        bytes.try_into().map_err(|_| nonsense("a length of other than 8 bytes"))?;
    let length = usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
    if length > fill::MAX_WAITING {
        return Err(nonsense("more waited there than any connection holds"));
    }
    Ok(length)
}

/// Whether both are the same, in a time that does not tell where they differ.
fn equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Says who connects.
pub(super) fn call(fd: &OwnedFd, name: &str, token: &Token, waited: usize) -> io::Result<()> {
    let size = u16::try_from(name.len()).map_err(|_| nonsense("a name that is too long"))?;
    let mut hello = MAGIC.to_vec();
    hello.extend(size.to_le_bytes());
    hello.extend(name.as_bytes());
    hello.extend(token[0]);
    hello.extend((waited as u64).to_le_bytes());
    fill::put(fd, &hello)
}

/// Reads who connects: the name, what it knows of the token, and how much waited there.
pub(super) fn called(fd: &OwnedFd, wait: Duration) -> io::Result<(String, [u8; HALF], usize)> {
    let mut head = [0; HEAD];
    read(fd, &mut head, wait)?;
    let size = usize::from(u16::from_le_bytes([head[8], head[9]]));
    if head[..8] != MAGIC[..] || size > NAME {
        return Err(nonsense("it is no end of a connection of this version of kedge"));
    }
    let mut rest = vec![0; size + TAIL];
    read(fd, &mut rest, wait)?;
    let (name, tail) = rest.split_at(size);
    let name = String::from_utf8(name.to_vec()).map_err(|_| nonsense("a name that is no text"))?;
    let mut half = [0; HALF];
    half.copy_from_slice(&tail[..HALF]);
    Ok((name, half, length(&tail[HALF..])?))
}

/// Whether who connects knows the token.
pub(super) fn is_right(half: &[u8; HALF], token: &Token) -> bool {
    equal(half, &token[0])
}

/// Answers who connects.
pub(super) fn answer(fd: &OwnedFd, token: &Token, waited: usize) -> io::Result<()> {
    fill::put(fd, &[&token[1][..], &(waited as u64).to_le_bytes()].concat())
}

/// Reads the answer of who accepts: how much waited there.
pub(super) fn answered(fd: &OwnedFd, token: &Token, wait: Duration) -> io::Result<usize> {
    let mut tail = [0; TAIL];
    read(fd, &mut tail, wait)?;
    if !equal(&tail[..HALF], &token[1]) {
        return Err(nonsense("another one listens there"));
    }
    length(&tail[HALF..])
}

/// Gives `own`, which waited here, to the other end and takes the `count` bytes that waited there;
/// both at once, so that neither waits for the other.
fn swap(fd: &OwnedFd, mut own: &[u8], count: usize) -> io::Result<Vec<u8>> {
    let mut theirs = Vec::new();
    let mut piece = vec![0; PIECE.min(count)];
    while !own.is_empty() || theirs.len() < count {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, theirs.len() < count);
        flags.set(PollFlags::OUT, !own.is_empty());
        let now = ready(fd, flags, STILL)?;
        if theirs.len() < count && now.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            let most = (count - theirs.len()).min(piece.len());
            match retry_on_intr(|| recv(fd, &mut piece[..most], RecvFlags::DONTWAIT)) {
                Ok((0, _)) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok((got, _)) => theirs.extend_from_slice(&piece[..got]),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !own.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match retry_on_intr(|| send(fd, own, flags)) {
                Ok(sent) => own = &own[sent.min(own.len())..],
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(theirs)
}

/// Has what waited at both ends wait there again: `own` here, `count` bytes at the other end.
pub(super) fn carry(fd: &OwnedFd, own: &[u8], count: usize) -> io::Result<()> {
    let theirs = swap(fd, own, count)?;
    let room = (own.len() > fill::SMALL).then(|| Room::for_all(fd.as_fd(), own.len()));
    fill::put(fd, &[READY])?;
    let mut said = [0];
    read(fd, &mut said, STILL)?;
    if said != [READY] {
        return Err(nonsense("it does not say that it is ready"));
    }
    fill::send_all(fd, &theirs)?;
    arrived(fd, own.len(), room.as_ref())?;
    room.into_iter().for_each(Room::leave);
    Ok(())
}

/// Returns when so many bytes wait.
fn arrived(fd: &OwnedFd, count: usize, room: Option<&Room>) -> io::Result<()> {
    let (mut last, mut most) = (Instant::now(), 0);
    loop {
        let waits = ioctl_fionread(fd)?;
        if waits >= count as u64 {
            return Ok(());
        }
        if waits > most {
            (most, last) = (waits, Instant::now());
        }
        if last.elapsed() > STILL {
            return Err(ErrorKind::TimedOut.into());
        }
        room.into_iter().for_each(Room::announce);
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{RecvFlags, recv};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    fn pair() -> (OwnedFd, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0.into(), client.into())
    }

    #[test]
    fn what_waited_at_both_ends_waits_there_again() {
        for (here, there) in [(0, 0), (1, 0), (70_000, 300_000), (2 << 20, 2 << 20)] {
            let (one, other) = pair();
            let bytes = |count: usize, first: u8| -> Vec<u8> {
                (0..count).map(|at| first.wrapping_add((at % 251) as u8)).collect()
            };
            let (own, theirs) = (bytes(here, 1), bytes(there, 7));
            let (kept, expected) = (theirs.clone(), own.clone());
            let far = thread::spawn(move || carry(&other, &kept, here).map(|()| other));
            carry(&one, &own, there).unwrap();
            let other = far.join().unwrap().unwrap();
            for (fd, expected) in [(&one, expected), (&other, theirs)] {
                let mut found = vec![0; expected.len()];
                read(fd, &mut found, STILL).unwrap();
                assert!(found == expected);
                let more = recv(fd, &mut [0u8; 1][..], RecvFlags::DONTWAIT);
                assert_eq!(more.unwrap_err(), Errno::AGAIN);
            }
        }
    }

    #[test]
    fn strangers_are_told_apart() {
        let token = [[1; HALF], [2; HALF]];
        let (one, other) = pair();
        call(&other, "wire a-b", &token, 5).unwrap();
        let (name, half, waited) = called(&one, STILL).unwrap();
        assert_eq!((&*name, waited), ("wire a-b", 5));
        assert!(is_right(&half, &token) && !is_right(&[3; HALF], &token));
        answer(&one, &[token[0], [3; HALF]], 7).unwrap();
        assert!(answered(&other, &token, STILL).is_err());
        let (one, other) = pair();
        fill::put(&other, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(called(&one, STILL).is_err());
        let (one, _other) = pair();
        assert!(called(&one, Duration::from_millis(20)).is_err());
        let (one, other) = pair();
        answer(&other, &token, usize::MAX).unwrap();
        assert!(answered(&one, &token, STILL).is_err());
    }
}
