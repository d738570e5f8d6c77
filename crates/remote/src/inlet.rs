//! Where the bytes of a link arrive, over one connection after another.

use crate::link::{HEAD, Links, PACKET, ROOM, SILENCE, Which, locked, over};
use kedge_keys::{Connection, Opener};
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What is read of a sealed connection at once.
const SEALED: usize = 128 << 10;
/// Fewest bytes of a plain connection that are read directly into the memory of whoever takes them.
const DIRECT_THRESHOLD: usize = 32 << 10;

/// Where new connections come from.
pub trait Connections: Send {
    /// Has a link go on with another connection, by [`Inlet::go_on`], and returns then.
    ///
    /// # Errors
    /// There will be none: the session is over, and why.
    fn next(&mut self, inlet: &Inlet) -> Result<(), String>;
}

/// Where a link's bytes arrive.
#[derive(Debug)]
pub struct Inlet {
    links: Arc<Links>,
    which: Which,
    /// Held by a reader while it waits for its connection, and by nobody else for long.
    arriving: Mutex<Arriving>,
}

/// What of a connection has been read and not been taken.
#[derive(Debug, Default)]
struct Arriving {
    stream: Option<Arc<TcpStream>>,
    /// Of a connection that is sealed; what is read of it.
    opener: Option<Opener>,
    sealed: Vec<u8>,
    /// What was read; of a sealed connection, what was opened of that.
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// Bytes of the present packet that have not been taken.
    left: usize,
    /// How long a connection may bring nothing but word that the other end is there.
    patience: Option<Duration>,
}

impl Inlet {
    /// Returns which link it is.
    pub fn which(&self) -> Which {
        self.which
    }

    /// Returns how many bytes of the link have been taken.
    pub fn received(&self) -> u64 {
        self.links.link(self.which).received.load(Ordering::Acquire)
    }

    /// Goes on with another connection, on any thread: what the one before brought and was not
    /// taken comes again. `tell` says to the other end how much has arrived here, and returns how
    /// much has there.
    ///
    /// # Errors
    /// `tell` fails, or the other end claims what was not sent.
    pub fn go_on(
        &self,
        connection: impl Into<Connection>,
        tell: impl FnOnce(&mut Connection, u64) -> io::Result<u64>,
    ) -> io::Result<()> {
        let mut connection = connection.into();
        // A reader that waits for the older connection lets go.
        self.links.cut(self.which);
        let mut arriving = locked(&self.arriving);
        arriving.clear();
        let arrived = tell(&mut connection, self.received())?;
        let (stream, ends) = connection.into_ends()?;
        let (sealer, opener) = ends.unzip();
        // The other end says every `BEAT` that it is there.
        stream.set_read_timeout(Some(SILENCE))?;
        let nonsense = || io::Error::other("the other end has bytes that were not sent");
        let joined = self.links.join(self.which, stream, sealer, arrived).ok_or_else(nonsense)?;
        arriving.stream = Some(joined);
        arriving.opener = opener;
        Ok(())
    }

    /// Takes bytes; 0 where the connection is cut.
    fn take(&self, into: &mut [u8]) -> io::Result<usize> {
        let begin = Instant::now();
        let mut arriving = locked(&self.arriving);
        loop {
            let count = arriving.take(into);
            if count > 0 {
                self.links.count(self.which, count);
                return Ok(count);
            }
            let head = if arriving.left > 0 { None } else { arriving.head()? };
            match head {
                Some(arrived) if !self.links.acknowledged(arrived) => return Err(nonsense()),
                Some(_) if arriving.left > 0 => {}
                Some(_) if arriving.patience.is_some_and(|limit| begin.elapsed() > limit) => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Some(_) => {}
                None if arriving.can_read_directly(into.len()) => {
                    let count = arriving.take_directly(into);
                    self.links.brought(count);
                    match count {
                        0 => arriving.clear(),
                        _ => self.links.count(self.which, count),
                    }
                    return Ok(count);
                }
                None if arriving.fill(&self.links) => {}
                None => {
                    arriving.clear();
                    return Ok(0);
                }
            }
        }
    }
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a packet is nonsense")
}

impl Arriving {
    fn clear(&mut self) {
        (self.stream, self.opener) = (None, None);
        (self.from, self.to, self.left) = (0, 0, 0);
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let count = self.left.min(self.to - self.from).min(into.len());
        into[..count].copy_from_slice(&self.buffer[self.from..self.from + count]);
        self.from += count;
        self.left -= count;
        count
    }

    /// Takes a packet's head, if it is here: how much of each link it says has arrived.
    fn head(&mut self) -> io::Result<Option<[u64; 2]>> {
        let here = &self.buffer[self.from..self.to];
        let Some(head) = here.first_chunk::<HEAD>() else { return Ok(None) };
        let (len, counts) = head.split_at(4);
        let len = len.iter().rev().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
        let mut arrived = [0; 2];
        for (count, bytes) in arrived.iter_mut().zip(counts.as_chunks::<8>().0) {
            *count = u64::from_le_bytes(*bytes);
        }
        if len > PACKET {
            return Err(nonsense());
        }
        self.from += HEAD;
        self.left = len;
        Ok(Some(arrived))
    }

    /// Returns whether so many bytes of the present packet are still the system's.
    fn can_read_directly(&self, most: usize) -> bool {
        self.opener.is_none() && self.from == self.to && self.left.min(most) >= DIRECT_THRESHOLD
    }

    /// Reads bytes of the present packet; 0 where the connection is cut.
    fn take_directly(&mut self, into: &mut [u8]) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        let most = self.left.min(into.len());
        let count = read(stream, &mut into[..most]);
        self.left -= count;
        count
    }

    /// Reads what has come of the connection; `false` where it is cut.
    fn fill(&mut self, links: &Links) -> bool {
        let Some(stream) = &self.stream else { return false };
        let Some(opener) = &mut self.opener else {
            self.buffer.resize(ROOM, 0);
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            let count = read(stream, &mut self.buffer[self.to..]);
            links.brought(count);
            self.to += count;
            return count > 0;
        };
        self.buffer.truncate(self.to);
        self.buffer.drain(..self.from);
        (self.from, self.to) = (0, self.buffer.len());
        self.sealed.resize(SEALED, 0);
        while self.buffer.len() == self.to {
            let count = read(stream, &mut self.sealed);
            links.brought(count);
            let opened = opener.open_in_place(&mut self.sealed[..count], &mut self.buffer);
            if count == 0 || opened != Ok(true) && self.buffer.len() == self.to {
                // What was changed on its way comes again, by another connection.
                let _ = stream.shutdown(Shutdown::Both);
                return false;
            }
        }
        self.to = self.buffer.len();
        true
    }
}

/// Reads what has come of a connection; nothing where it is cut.
fn read(mut stream: &TcpStream, into: &mut [u8]) -> usize {
    loop {
        match stream.read(into) {
            Ok(count) => return count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return 0,
        }
    }
}

/// A link's receiving end: reads on over cuts.
#[derive(Debug)]
pub struct Receiver<C> {
    inlet: Arc<Inlet>,
    pub(crate) connections: C,
}

impl<C: Connections> Receiver<C> {
    pub fn new(links: Arc<Links>, which: Which, connections: C) -> Receiver<C> {
        let arriving = Mutex::default();
        Receiver { inlet: Arc::new(Inlet { links, which, arriving }), connections }
    }

    /// Says how long the other end may be there and send nothing, from now on.
    pub fn set_patience(&self, limit: Option<Duration>) {
        locked(&self.inlet.arriving).patience = limit;
    }

    /// Waits for the link's first connection, or another one.
    ///
    /// # Errors
    /// There will be none, and why.
    pub fn connect(&mut self) -> Result<(), String> {
        self.connections.next(&self.inlet)
    }

    /// Returns where its bytes arrive.
    pub fn inlet(&self) -> &Arc<Inlet> {
        &self.inlet
    }
}

impl<C: Connections> Read for Receiver<C> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.inlet.take(into)?;
            if count > 0 || into.is_empty() {
                return Ok(count);
            }
            if self.inlet.links.is_over() {
                return Err(over());
            }
            self.connections.next(&self.inlet).map_err(io::Error::other)?;
        }
    }
}
