//! Measuring a line by itself, over a connection like a session's: the same server, handshake and
//! encryption.

use crate::connect::{ConnectError, open};
use crate::frame::{FrameError, read_one, write_one};
use crate::messages::{ECHO, Measure, Measured, Purpose, Refused};
use kedge_keys::Connection;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use thiserror::Error;

/// For the server to answer, and for each part of what is measured.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest frame.
const MAX_FRAME: usize = 4 << 10;
/// Messages, and bytes, of one measurement at most.
const MAX_COUNT: u32 = 100_000;
const MAX_BYTES: u64 = 16 << 30;
/// What is read or written at once.
const PIECE: usize = 256 << 10;

/// Why a line cannot be measured.
#[derive(Debug, Error)]
pub enum MeasureError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the connection that measures the line: {0}")]
    Line(#[from] FrameError),
    #[error("the connection that measures the line: {0}")]
    Broken(#[from] io::Error),
    #[error("the other end asks for more than one measurement may have")]
    TooMuch,
}

/// A connection of its own to a server, by which the line is measured.
#[derive(Debug)]
pub struct Measuring {
    connection: Connection,
}

impl Measuring {
    /// Opens one.
    ///
    /// # Errors
    /// The server is not there or refuses.
    pub fn open(server: &str) -> Result<Measuring, MeasureError> {
        let mut connection = open(server, Purpose::Measure {}, LIMIT)?;
        let admitted = read_one::<Result<Measured, Refused>>(&mut connection, MAX_FRAME)?;
        admitted.map_err(|refused| refused.by(server))?;
        Ok(Measuring { connection })
    }

    /// Sends [`ECHO`] bytes there and back `count` times: the seconds of each.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn round_trips(&mut self, count: u32) -> Result<Vec<f64>, MeasureError> {
        write_one(&mut self.connection, &Measure::Echo { count })?;
        let mut bytes = [7; ECHO];
        let mut seconds = Vec::new();
        for _ in 0..count {
            let begin = Instant::now();
            self.connection.write_all(&bytes)?;
            self.connection.read_exact(&mut bytes)?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }

    /// Sends so many bytes as they are, without encryption: the seconds until the other end has
    /// them all.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send(&mut self, bytes: u64) -> Result<f64, MeasureError> {
        let begin = Instant::now();
        write_one(&mut self.connection, &Measure::Take { bytes })?;
        write_raw(self.connection.stream(), bytes)?;
        read_one::<Measured>(&mut self.connection, MAX_FRAME)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Has the other end send so many bytes as they are: the seconds until all are here.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn receive(&mut self, bytes: u64) -> Result<f64, MeasureError> {
        let begin = Instant::now();
        write_one(&mut self.connection, &Measure::Give { bytes })?;
        read_raw(self.connection.stream(), bytes)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Returns how long the proxies of this user's sessions have used a processor there.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn processor_time(&mut self) -> Result<Duration, MeasureError> {
        write_one(&mut self.connection, &Measure::Processors {})?;
        let Measured { number } = read_one(&mut self.connection, MAX_FRAME)?;
        Ok(Duration::from_nanos(number))
    }
}

/// Answers a connection that measures the line, to its end. `processors` tells the nanoseconds of
/// [`Measuring::processor_time`].
///
/// # Errors
/// The connection is broken, or asks for too much.
pub fn be_measured(
    connection: &mut Connection,
    processors: impl Fn() -> u64,
) -> Result<(), MeasureError> {
    connection.stream().set_write_timeout(Some(LIMIT))?;
    let told = |number| Measured { number };
    write_one(connection, &Ok::<_, Refused>(told(0)))?;
    loop {
        connection.read_until(Instant::now() + LIMIT);
        let ask: Measure = match read_one(connection, MAX_FRAME) {
            Err(FrameError::Closed) => return Ok(()),
            asked => asked?,
        };
        match ask {
            Measure::Echo { count } if count <= MAX_COUNT => {
                let mut bytes = [0; ECHO];
                for _ in 0..count {
                    connection.read_exact(&mut bytes)?;
                    connection.write_all(&bytes)?;
                }
            }
            Measure::Take { bytes } if bytes <= MAX_BYTES => {
                read_raw(connection.stream(), bytes)?;
                write_one(connection, &told(bytes))?;
            }
            Measure::Give { bytes } if bytes <= MAX_BYTES => {
                write_raw(connection.stream(), bytes)?;
            }
            Measure::Processors {} => write_one(connection, &told(processors()))?,
            _ => return Err(MeasureError::TooMuch),
        }
    }
}

fn write_raw(mut stream: &TcpStream, bytes: u64) -> io::Result<()> {
    let (piece, until) = (vec![0; PIECE], Instant::now() + LIMIT);
    let mut left = bytes;
    while left > 0 {
        in_time(until)?;
        let count = left.min(PIECE as u64);
        stream.write_all(&piece[..count as usize])?;
        left -= count;
    }
    Ok(())
}

/// Fails once a measurement takes too long, however slowly bytes come.
fn in_time(until: Instant) -> io::Result<()> {
    if Instant::now() < until { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

fn read_raw(mut stream: &TcpStream, bytes: u64) -> io::Result<()> {
    let (mut piece, until) = (vec![0; PIECE], Instant::now() + LIMIT);
    let mut left = bytes;
    while left > 0 {
        in_time(until)?;
        let most = left.min(PIECE as u64) as usize;
        match stream.read(&mut piece[..most])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => left -= count as u64,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    fn answered(ask: impl FnOnce(&mut Measuring)) -> Result<(), MeasureError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = Connection::from(listener.accept().unwrap().0);
        let answers = thread::spawn(move || be_measured(&mut far, || 42));
        let mut connection = Connection::from(near);
        read_one::<Result<Measured, Refused>>(&mut connection, MAX_FRAME).unwrap().unwrap();
        ask(&mut Measuring { connection });
        answers.join().unwrap()
    }

    #[test]
    fn each_measurement_leaves_the_line_for_the_next() {
        answered(|line| {
            for _ in 0..2 {
                assert_eq!(line.round_trips(3).unwrap().len(), 3);
                assert!(line.send(3 * PIECE as u64 + 1).unwrap() > 0.0);
                assert_eq!(line.processor_time().unwrap(), Duration::from_nanos(42));
                assert!(line.receive(PIECE as u64 + 7).unwrap() > 0.0);
            }
        })
        .unwrap();
    }

    #[test]
    fn too_much_is_refused() {
        let refused = answered(|line| {
            write_one(&mut line.connection, &Measure::Give { bytes: MAX_BYTES + 1 }).unwrap();
            assert!(line.processor_time().is_err());
        });
        assert!(matches!(refused, Err(MeasureError::TooMuch)));
    }
}
