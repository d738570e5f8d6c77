//! A connection whose messages are read one at a time, sealed or plain.

use crate::records::{Opener, RecordError, Sealer};
use crate::secrets::Secrets;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection that is sealed, or, on this machine, plain.
///
/// It blocks, and takes nothing off the stream beyond the record that it needs, so that another
/// process can go on with it.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    seal: Option<(Sealing, Opening)>,
    /// When reading ends, however slowly bytes come.
    until: Option<Instant>,
    /// When writing ends, however slowly bytes are taken.
    write_until: Option<Instant>,
}

/// The sealed way out.
#[derive(Debug)]
struct Sealing {
    sealer: Sealer,
    /// Room for what is sealed.
    sealed: Vec<u8>,
}

/// The sealed way in.
#[derive(Debug)]
struct Opening {
    opener: Opener,
    /// What was opened, and how much of it was taken.
    opened: Vec<u8>,
    taken: usize,
}

impl Connection {
    /// Makes one of a stream, sealed if there are secrets.
    ///
    /// # Errors
    /// The secrets are none of this version of kedge.
    pub fn new(stream: TcpStream, secrets: Option<Secrets>) -> Result<Connection, RecordError> {
        let seal = |(sealer, opener)| {
            let (opened, sealed) = Default::default();
            (Sealing { sealer, sealed }, Opening { opener, opened, taken: 0 })
        };
        let records = secrets.map(Secrets::records).transpose()?;
        Ok(Connection { stream, seal: records.map(seal), until: None, write_until: None })
    }

    /// Returns its stream, for its addresses and time limits.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Ends all reading at a moment, however slowly bytes come. The stream's time limit is another
    /// after each read.
    pub fn read_until(&mut self, moment: Instant) {
        self.until = Some(moment);
    }

    /// Ends all writing at a moment, however slowly bytes are taken. The stream's time limit is
    /// another after each write, and nothing sound can follow a write that was ended.
    pub fn write_until(&mut self, moment: Instant) {
        self.write_until = Some(moment);
    }

    /// Returns its parts, for whoever goes on with it in this process.
    ///
    /// # Errors
    /// The other end has said more than was read.
    pub fn into_ends(self) -> io::Result<(TcpStream, Option<(Sealer, Opener)>)> {
        let Some((sealing, opening)) = self.seal else { return Ok((self.stream, None)) };
        if opening.taken < opening.opened.len() || opening.opener.is_within_record() {
            let why = "the other end says more than it was asked";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok((self.stream, Some((sealing.sealer, opening.opener))))
    }

    /// Returns its stream and secrets, for another process to go on with.
    ///
    /// # Errors
    /// As [`Connection::into_ends`].
    pub fn into_secrets(self) -> io::Result<(TcpStream, Option<Secrets>)> {
        let (stream, ends) = self.into_ends()?;
        Ok((stream, ends.map(|(sealer, opener)| Secrets::of(sealer, opener))))
    }
}

/// A plain one.
impl From<TcpStream> for Connection {
    fn from(stream: TcpStream) -> Connection {
        Connection { stream, seal: None, until: None, write_until: None }
    }
}

impl Opening {
    /// Reads into `into` what has been opened, or what comes next.
    fn read(
        &mut self,
        stream: &TcpStream,
        until: Option<Instant>,
        into: &mut [u8],
    ) -> io::Result<usize> {
        if into.is_empty() || !self.fill(stream, until)? {
            return Ok(0);
        }
        let here = &self.opened[self.taken..];
        let count = here.len().min(into.len());
        into[..count].copy_from_slice(&here[..count]);
        self.taken += count;
        Ok(count)
    }

    /// Reads until something was opened; `false` where the stream has ended.
    fn fill(&mut self, stream: &TcpStream, until: Option<Instant>) -> io::Result<bool> {
        let mut some = [0; 4096];
        while self.taken == self.opened.len() {
            self.opened.clear();
            self.taken = 0;
            let most = self.opener.wanted().min(some.len());
            let count = read(stream, until, &mut some[..most])?;
            if count == 0 && self.opener.is_within_record() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if count == 0 || !self.opener.open(&some[..count], &mut self.opened)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Sealing {
    fn write(
        &mut self,
        stream: &TcpStream,
        until: Option<Instant>,
        from: &[u8],
    ) -> io::Result<usize> {
        self.sealed.clear();
        self.sealer.seal(&[from], &mut self.sealed)?;
        let mut left = &self.sealed[..];
        while !left.is_empty() {
            match write(stream, until, left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(from.len())
    }
}

/// Reads a stream until a moment, if there is one.
fn read(mut stream: &TcpStream, until: Option<Instant>, into: &mut [u8]) -> io::Result<usize> {
    if let Some(until) = until {
        stream.set_read_timeout(Some(left(until)?))?;
    }
    stream.read(into)
}

/// Writes to a stream until a moment, if there is one. The system counts all waits of one write.
fn write(mut stream: &TcpStream, until: Option<Instant>, from: &[u8]) -> io::Result<usize> {
    if let Some(until) = until {
        stream.set_write_timeout(Some(left(until)?))?;
    }
    stream.write(from)
}

/// Returns the time that is left until a moment.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.seal {
            Some((_, opening)) => opening.read(&self.stream, self.until, into),
            None => read(&self.stream, self.until, into),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.seal {
            Some((sealing, _)) => sealing.write(&self.stream, self.write_until, from),
            None => write(&self.stream, self.write_until, from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl From<RecordError> for io::Error {
    fn from(error: RecordError) -> io::Error {
        let kind = match error {
            RecordError::Refused(_) => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Pair, connection};
    use std::net::Shutdown;
    use std::thread;

    /// Makes two ends of a connection, sealed or plain.
    fn pair(is_sealed: bool) -> (Connection, Connection) {
        let (near, near_secrets, far, far_secrets) = match is_sealed {
            true => {
                let (near, near_secrets, far, far_secrets) = Pair::new().shake();
                (near, Some(near_secrets), far, Some(far_secrets))
            }
            false => {
                let (near, far) = connection();
                (near, None, far, None)
            }
        };
        let make = |stream, secrets| Connection::new(stream, secrets).unwrap();
        (make(near, near_secrets), make(far, far_secrets))
    }

    #[test]
    fn messages_cross_and_another_process_goes_on() {
        for is_sealed in [true, false] {
            let (mut near, mut far) = pair(is_sealed);
            near.write_all(b"first").unwrap();
            let mut first = [0; 5];
            // In pieces, as a head and its message are read.
            far.read_exact(&mut first[..2]).unwrap();
            far.read_exact(&mut first[2..]).unwrap();
            assert_eq!(&first, b"first");
            far.write_all(b"answer").unwrap();
            // This has been sent before the connection changes hands, and is not lost.
            near.write_all(b"second").unwrap();
            let (stream, secrets) = far.into_secrets().unwrap();
            assert_eq!(secrets.is_some(), is_sealed);
            let mut bytes = Vec::new();
            kedge_wire::encode(&secrets, &mut bytes);
            let secrets: Option<Secrets> = kedge_wire::decode(&bytes).unwrap();
            let mut far = Connection::new(stream, secrets).unwrap();
            far.write_all(b" and more").unwrap();
            far.stream().shutdown(Shutdown::Write).unwrap();
            let mut heard = Vec::new();
            near.read_to_end(&mut heard).unwrap();
            assert_eq!(heard, b"answer and more");
            let mut second = [0; 6];
            far.read_exact(&mut second).unwrap();
            assert_eq!(&second, b"second");
        }
    }

    #[test]
    fn what_was_said_too_early_is_not_lost_in_silence() {
        let (mut near, mut far) = pair(true);
        near.write_all(b"first and second").unwrap();
        let mut first = [0; 5];
        far.read_exact(&mut first).unwrap();
        assert!(far.into_secrets().unwrap_err().to_string().contains("more than it was asked"));
    }

    #[test]
    fn bytes_that_come_slowly_buy_no_time() {
        for is_sealed in [true, false] {
            let (near, mut far) = pair(is_sealed);
            let begin = Instant::now();
            far.read_until(begin + Duration::from_millis(200));
            thread::scope(|scope| {
                let mut stream = near.stream.try_clone().unwrap();
                scope.spawn(move || {
                    // The head of a record of 5,000 bytes, and a few of those.
                    let bytes = [&[23, 3, 3, 0x13, 0x88][..], &[0; 400]].concat();
                    bytes.iter().try_for_each(|byte| {
                        thread::sleep(Duration::from_millis(20));
                        stream.write_all(&[*byte])
                    })
                });
                let late = far.read_exact(&mut [0; 5000]).unwrap_err();
                let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
                assert!(kinds.contains(&late.kind()), "{late}");
                drop(far);
            });
            assert!(begin.elapsed() >= Duration::from_millis(200));
        }
    }

    #[test]
    fn bytes_that_are_taken_slowly_buy_no_time() {
        for (is_sealed, takes_some) in [(true, true), (true, false), (false, true), (false, false)]
        {
            let (mut near, far) = pair(is_sealed);
            let begin = Instant::now();
            near.write_until(begin + Duration::from_millis(300));
            thread::scope(|scope| {
                let mut stream = far.stream.try_clone().unwrap();
                scope.spawn(move || {
                    let mut some = vec![0; 64 << 10];
                    while takes_some && stream.read(&mut some).is_ok_and(|count| count > 0) {
                        thread::sleep(Duration::from_millis(20));
                    }
                });
                // More than the systems of both ends keep for a stream.
                let late = near.write_all(&vec![7; 64 << 20]).unwrap_err();
                let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
                assert!(kinds.contains(&late.kind()), "{late}");
                far.stream.shutdown(Shutdown::Both).unwrap();
            });
            assert!(begin.elapsed() >= Duration::from_millis(300));
        }
    }

    #[test]
    fn a_cut_is_no_end() {
        let (mut near, mut far) = pair(true);
        near.write_all(b"some").unwrap();
        // Of the next record the first byte alone.
        near.stream.write_all(&[23]).unwrap();
        drop(near);
        let mut some = [0; 4];
        far.read_exact(&mut some).unwrap();
        let cut = far.read(&mut some).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
        // Something else than records on the stream is an error.
        let (mut near, mut far) = pair(true);
        near.stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let nonsense = far.read(&mut some).unwrap_err();
        let inner = nonsense.get_ref().and_then(|inner| inner.downcast_ref::<RecordError>());
        assert_eq!(inner, Some(&RecordError::NoRecord));
    }
}
