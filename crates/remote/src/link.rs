//! Links: streams of bytes, one each way, that outlive their connections.
//!
//! Each direction counts its bytes. The sender keeps what the other end has not acknowledged; after
//! a cut both ends say how many bytes have arrived, and each sends on from there. A session has two
//! links, the line and the aside; a packet of either acknowledges bytes of both, so that whoever
//! waits for room on one need not be who reads it. Bulk bytes and those of an image cross by links
//! of their own, which have only a line.
//!
//! Whoever sends writes to the socket himself while the socket takes it; a thread sends the rest.

use crate::kept::{Kept, Pool, Slices};
use kedge_keys::{RecordError, Sealer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Unacknowledged bytes beyond which [`Links::wait_for_room`] waits.
const LIMIT: usize = 32 << 20;
/// Bytes of a packet's payload.
pub(crate) const PACKET: usize = 256 << 10;
/// Bytes of a packet's head: the payload's length, and how much of each link has arrived.
pub(crate) const HEAD: usize = 4 + 8 + 8;
/// Bytes that arrive before they are acknowledged without being asked.
const UNTOLD: u64 = 1 << 20;
/// What is read from a socket at once.
pub(crate) const ROOM: usize = 64 << 10;
/// Between two packets at most, also empty ones; and a silence that means that a connection is cut:
/// behind a tunnel the kernel sees but its own end.
const BEAT: Duration = Duration::from_secs(5);
pub(crate) const SILENCE: Duration = Duration::from_secs(20);
/// Slices of a packet that are sealed or sent together; one is its head.
const SLICES: usize = 16;
/// A look at a connection that takes nothing, so that its end is noticed.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The number of the first lane, and the most that a session has.
pub const FIRST_LANE: u32 = 2;
pub const MAX_LANES: usize = 4;
/// The number of the first link that an image's bytes cross by; each has the next, and none comes
/// again.
pub const FIRST_IMAGE: u32 = FIRST_LANE + MAX_LANES as u32;

/// The links of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// For what is in order.
    Line,
    /// For the near end's answers.
    Aside,
}

impl Which {
    const BOTH: [Which; 2] = [Which::Line, Which::Aside];

    /// Returns the link of that number, as messages name it.
    pub fn of_number(number: u32) -> Option<Which> {
        Which::BOTH.into_iter().find(|which| which.number() == number)
    }

    /// Returns its number.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// Is told what crosses links.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Counts bytes that were received. Nothing more is read of the connection before it returns:
    /// within a second or so.
    fn received(&self, bytes: usize);
    fn sent(&self, bytes: usize);
}

/// Both links of a session, for all who send.
#[derive(Debug)]
pub struct Links {
    links: [Link; 2],
    pools: [Arc<Pool>; 2],
    meter: Option<Arc<dyn Meter>>,
}

#[derive(Debug, Default)]
pub(crate) struct Link {
    out: Mutex<Out>,
    /// Something was acknowledged, or the session is over.
    room: Condvar,
    /// The socket takes no more, or the session is over.
    blocked: Condvar,
    /// Bytes that have arrived here, and those of them that the other end was told of.
    pub(crate) received: AtomicU64,
    told: AtomicU64,
}

/// One direction of a link, at its sender.
#[derive(Debug, Default)]
struct Out {
    /// Bytes that are not acknowledged, from offset `acked` on.
    kept: Kept,
    acked: u64,
    /// The offset behind the last byte that was put into a packet of this connection.
    packed: u64,
    /// The largest that has been: no more can have arrived.
    sent: u64,
    stream: Option<Arc<TcpStream>>,
    /// Of a connection that is sealed.
    sealer: Option<Sealer>,
    packet: Packet,
    /// An empty packet is wanted if there is no other.
    tell: bool,
    waits_for_socket: bool,
    /// What was acknowledged when the link was last asked for room that it does not need.
    idle_at: u64,
    over: bool,
}

/// What is being sent.
#[derive(Debug, Default)]
struct Packet {
    /// A packet's head, or all of one that is sealed.
    bytes: Vec<u8>,
    /// Bytes that follow it of what is kept, up to the offset `packed`.
    payload: usize,
    /// How much the kernel has of both.
    written: usize,
}

impl Packet {
    /// Returns whether the kernel has all of it.
    fn is_written(&self) -> bool {
        self.written == self.bytes.len() + self.payload
    }

    /// Returns how much of the payload the kernel has not got.
    fn unwritten(&self) -> usize {
        self.payload - self.written.saturating_sub(self.bytes.len())
    }

    fn clear(&mut self) {
        self.bytes.clear();
        (self.payload, self.written) = (0, 0);
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn over() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the session is over")
}

impl Out {
    /// Drops what the other end has; `false` where it claims what this connection has not sent.
    fn acknowledge(&mut self, arrived: u64) -> bool {
        let sent = self.packed - self.packet.unwritten() as u64;
        let proper = arrived <= sent;
        if proper {
            self.drop_first(arrived);
        }
        proper
    }

    fn drop_first(&mut self, arrived: u64) {
        if let Some(count) = arrived.checked_sub(self.acked) {
            self.kept.drop_first(count as usize);
            self.acked = arrived;
        }
    }

    /// Makes the next packet; `false` where there is nothing to send.
    ///
    /// # Errors
    /// The connection's key is used up.
    fn pack(&mut self, arrived: [u64; 2]) -> Result<bool, RecordError> {
        let from = (self.packed - self.acked) as usize;
        let mut len = (self.kept.len() - from).min(PACKET);
        if len == 0 && !self.tell {
            return Ok(false);
        }
        self.packet.clear();
        let mut head = [0; HEAD];
        match &mut self.sealer {
            None => {
                put_head(len, arrived, &mut head);
                self.packet.bytes.extend_from_slice(&head);
                self.packet.payload = len;
            }
            Some(sealer) => {
                let mut payload = Slices::<{ SLICES - 1 }>::new();
                self.kept.slices(from, len, &mut payload);
                len = payload.len();
                put_head(len, arrived, &mut head);
                let mut parts = Slices::<SLICES>::new();
                parts.add(&head);
                payload.get().iter().for_each(|part| parts.add(part));
                sealer.seal(parts.get(), &mut self.packet.bytes)?;
            }
        }
        self.tell = false;
        self.packed += len as u64;
        self.sent = self.sent.max(self.packed);
        Ok(true)
    }

    /// Sends as much of the packet as the socket takes.
    fn send(&self, stream: &TcpStream) -> Result<usize, Errno> {
        let mut parts = Slices::<SLICES>::new();
        let Packet { bytes, written, .. } = &self.packet;
        parts.add(bytes.get(*written..).unwrap_or_default());
        let left = self.packet.unwritten();
        let from = (self.packed - self.acked) as usize - left;
        self.kept.slices(from, left, &mut parts);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let parts = &parts.for_system()[..parts.get().len()];
        sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), flags)
    }
}

/// Writes a packet's head: its payload's length, and how much of each link has arrived.
fn put_head(len: usize, arrived: [u64; 2], head: &mut [u8; HEAD]) {
    let (length, counts) = head.split_at_mut(4);
    length.copy_from_slice(&(len as u32).to_le_bytes());
    for (count, bytes) in arrived.iter().zip(counts.as_chunks_mut::<8>().0) {
        *bytes = count.to_le_bytes();
    }
}

impl Links {
    /// Makes both links, without connections. Each has a thread that sends what a socket did not
    /// take at once.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start() -> io::Result<Arc<Links>> {
        Links::metered(None)
    }

    /// Makes the same, with a meter of what their sockets take and bring.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn metered(meter: Option<Arc<dyn Meter>>) -> io::Result<Arc<Links>> {
        Links::of(&Which::BOTH, meter)
    }

    /// Makes the same, of a link that has only a line.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn single(meter: Option<Arc<dyn Meter>>) -> io::Result<Arc<Links>> {
        Links::of(&[Which::Line], meter)
    }

    fn of(used: &[Which], meter: Option<Arc<dyn Meter>>) -> io::Result<Arc<Links>> {
        let links: [Link; 2] = Default::default();
        let pools = links.each_ref().map(|link| locked(&link.out).kept.pool().clone());
        let links = Arc::new(Links { links, pools, meter });
        for which in used.iter().copied() {
            let links = links.clone();
            let send = move || links.send_rest(which);
            thread::Builder::new().name("sender".into()).stack_size(128 << 10).spawn(send)?;
        }
        let beats = Arc::downgrade(&links);
        let beat = move || {
            while let Some(links) = beats.upgrade().filter(|links| !links.is_over()) {
                links.tell();
                links.give_back();
                drop(links);
                thread::sleep(BEAT);
            }
        };
        thread::Builder::new().name("beat".into()).stack_size(128 << 10).spawn(beat)?;
        Ok(links)
    }

    /// Returns the meter that they have.
    pub fn meter(&self) -> Option<Arc<dyn Meter>> {
        self.meter.clone()
    }

    /// Gives the room of links back through which nothing has gone since the last time.
    fn give_back(&self) {
        for (link, pool) in self.links.iter().zip(&self.pools) {
            let mut out = locked(&link.out);
            if out.acked == out.idle_at && out.kept.is_empty() {
                pool.give_back();
            }
            out.idle_at = out.acked;
        }
    }

    pub(crate) fn link(&self, which: Which) -> &Link {
        &self.links[which as usize]
    }

    fn arrived(&self) -> [u64; 2] {
        Which::BOTH.map(|which| {
            let link = self.link(which);
            let received = link.received.load(Ordering::Acquire);
            link.told.fetch_max(received, Ordering::Relaxed);
            received
        })
    }

    /// Sends bytes on a link, or keeps them for when it can.
    ///
    /// # Errors
    /// The session is over.
    pub fn send(&self, which: Which, bytes: &[u8]) -> io::Result<()> {
        self.keep(which, |kept| kept.add(bytes))
    }

    /// Sends a piece that [`Links::piece`] has given, or keeps it for when it can: its bytes are
    /// not copied.
    ///
    /// # Errors
    /// The session is over.
    pub fn give(&self, which: Which, piece: Vec<u8>) -> io::Result<()> {
        self.keep(which, |kept| kept.give(piece))
    }

    /// Returns memory of so many bytes, of any value, for [`Links::give`].
    pub fn piece(&self, which: Which, len: usize) -> Vec<u8> {
        self.pools[which as usize].piece(len)
    }

    fn keep(&self, which: Which, add: impl FnOnce(&mut Kept)) -> io::Result<()> {
        let mut out = locked(&self.link(which).out);
        if out.over {
            return Err(over());
        }
        add(&mut out.kept);
        self.push(which, &mut out);
        Ok(())
    }

    /// Waits while a link keeps as much as it may. Who answers must not call it: an answer that
    /// waits could be what the other end needs to make room.
    ///
    /// # Errors
    /// The session is over.
    pub fn wait_for_room(&self, which: Which) -> io::Result<()> {
        let link = self.link(which);
        let out = locked(&link.out);
        let full = |out: &mut Out| out.kept.len() > LIMIT && !out.over;
        let out = link.room.wait_while(out, full).unwrap_or_else(PoisonError::into_inner);
        if out.over { Err(over()) } else { Ok(()) }
    }

    /// Waits until all that was to be sent is the kernel's, for `limit` at most.
    pub fn wait_until_sent(&self, which: Which, limit: Duration) {
        let begin = Instant::now();
        let sent = || {
            let out = locked(&self.link(which).out);
            out.over || out.packed == out.acked + out.kept.len() as u64 && out.packet.is_written()
        };
        while !sent() && begin.elapsed() < limit {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends both links: nobody waits on them any longer, and nothing is sent.
    pub fn end(&self) {
        for link in &self.links {
            let mut out = locked(&link.out);
            out.over = true;
            if let Some(stream) = out.stream.take() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            drop(out);
            link.room.notify_all();
            link.blocked.notify_all();
        }
    }

    /// Returns whether they have been ended.
    pub fn is_over(&self) -> bool {
        locked(&self.link(Which::Line).out).over
    }

    /// Cuts a link's connection, for a newer one to take its place.
    pub fn cut(&self, which: Which) {
        if let Some(stream) = locked(&self.link(which).out).stream.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends what the socket takes without waiting.
    fn push(&self, which: Which, out: &mut Out) {
        while !out.waits_for_socket {
            let Some(stream) = out.stream.clone() else { return };
            if out.packet.is_written() {
                match out.pack(self.arrived()) {
                    Ok(true) => {}
                    Ok(false) => return,
                    // Its reader asks for a connection with another key.
                    Err(_) => {
                        let _ = stream.shutdown(Shutdown::Both);
                        out.stream = None;
                        return;
                    }
                }
            }
            match out.send(&stream) {
                Ok(count) => {
                    out.packet.written += count;
                    self.meter.iter().for_each(|meter| meter.sent(count));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    out.waits_for_socket = true;
                    self.link(which).blocked.notify_one();
                }
                // Its reader finds out and asks for another.
                Err(_) => {
                    let _ = stream.shutdown(Shutdown::Both);
                    out.stream = None;
                }
            }
        }
    }

    /// Sends what sockets did not take at once, until the session is over.
    fn send_rest(&self, which: Which) {
        let link = self.link(which);
        let mut out = locked(&link.out);
        loop {
            let idle = |out: &mut Out| !out.waits_for_socket && !out.over;
            out = link.blocked.wait_while(out, idle).unwrap_or_else(PoisonError::into_inner);
            if out.over {
                return;
            }
            let stream = out.stream.clone();
            drop(out);
            let ready = stream.is_none_or(|stream| {
                let mut fds = [PollFd::new(&*stream, PollFlags::OUT)];
                !matches!(poll(&mut fds, Some(&LOOK)), Ok(0))
            });
            out = locked(&link.out);
            if ready {
                out.waits_for_socket = false;
                self.push(which, &mut out);
            }
        }
    }

    /// Sends on from `arrived`, by another connection; `None` where that was not sent.
    pub(crate) fn join(
        &self,
        which: Which,
        stream: TcpStream,
        sealer: Option<Sealer>,
        arrived: u64,
    ) -> Option<Arc<TcpStream>> {
        let link = self.link(which);
        let mut out = locked(&link.out);
        // By a connection before it no more can have arrived than was sent by one.
        if out.over || arrived < out.acked || arrived > out.sent {
            return None;
        }
        out.drop_first(arrived);
        link.room.notify_all();
        let stream = Arc::new(stream);
        out.packed = arrived;
        out.packet.clear();
        (out.waits_for_socket, out.tell) = (false, true);
        out.stream = Some(stream.clone());
        out.sealer = sealer;
        self.push(which, &mut out);
        Some(stream)
    }

    /// Takes what a packet says has arrived; `false` where that was not sent.
    pub(crate) fn acknowledged(&self, arrived: [u64; 2]) -> bool {
        Which::BOTH.into_iter().zip(arrived).all(|(which, count)| {
            let link = self.link(which);
            let mut out = locked(&link.out);
            let was_full = out.kept.len() > LIMIT;
            let proper = out.acknowledge(count);
            if was_full && out.kept.len() <= LIMIT {
                link.room.notify_all();
            }
            proper
        })
    }

    /// Counts what a socket has brought.
    pub(crate) fn brought(&self, bytes: usize) {
        self.meter.iter().for_each(|meter| meter.received(bytes));
    }

    /// Counts bytes that have arrived, and tells the other end now and then.
    pub(crate) fn count(&self, which: Which, bytes: usize) {
        let link = self.link(which);
        let received = link.received.fetch_add(bytes as u64, Ordering::AcqRel) + bytes as u64;
        if received - link.told.load(Ordering::Relaxed) >= UNTOLD {
            self.tell();
        }
    }

    /// Tells the other end how much has arrived, and that this one is there: by both links, since
    /// one of them may not be read.
    fn tell(&self) {
        for by in Which::BOTH {
            let mut out = locked(&self.link(by).out);
            out.tell = true;
            self.push(by, &mut out);
        }
    }
}

/// A link's sending end, for [`crate::Sending`].
#[derive(Debug, Clone)]
pub struct Sender {
    links: Arc<Links>,
    which: Which,
    room: Room,
}

/// What a sender does while its link keeps much.
#[derive(Debug, Clone, Copy)]
enum Room {
    Makes,
    Waits,
    /// It fails from so many bytes on.
    Fails(usize),
}

impl Sender {
    /// Makes one that sends whatever the link keeps.
    pub fn new(links: Arc<Links>, which: Which) -> Sender {
        Sender { links, which, room: Room::Makes }
    }

    /// Makes one that waits for room ([`Links::wait_for_room`]).
    pub fn waiting(links: Arc<Links>, which: Which) -> Sender {
        Sender { links, which, room: Room::Waits }
    }

    /// Makes one that fails once the other end has not taken `most` bytes: for who answers, and may
    /// not wait.
    pub fn limited(links: Arc<Links>, which: Which, most: usize) -> Sender {
        Sender { links, which, room: Room::Fails(most) }
    }
}

impl Sender {
    /// Returns memory for many bytes, with nothing in it.
    pub(crate) fn piece(&self) -> Vec<u8> {
        self.links.piece(self.which, 0)
    }

    /// Gives memory back that was not needed.
    pub(crate) fn give_back(&self, piece: Vec<u8>) {
        self.links.pools[self.which as usize].give(piece);
    }

    /// Sends a piece, which is not copied.
    pub(crate) fn give(&mut self, piece: Vec<u8>) -> io::Result<()> {
        self.make_room()?;
        self.links.give(self.which, piece)
    }

    fn make_room(&self) -> io::Result<()> {
        match self.room {
            Room::Makes => {}
            Room::Waits => self.links.wait_for_room(self.which)?,
            Room::Fails(most) if locked(&self.links.link(self.which).out).kept.len() >= most => {
                return Err(io::Error::other("the other end asks on, and takes no answers"));
            }
            Room::Fails(_) => {}
        }
        Ok(())
    }
}

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.make_room()?;
        self.links.send(self.which, bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
