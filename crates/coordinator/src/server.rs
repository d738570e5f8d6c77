//! The coordinator's sockets: one thread, which lives as long as the process or until it is told to
//! stop.

use crate::frame::{first, frame};
use crate::link::Link;
use crate::message::{MAX_MEMBERS, MAX_REQUEST, Reply, Request};
use crate::remote::{ANSWER, COME_AGAIN, Entrance, JobKey, origin};
use crate::state::{Conn, State};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const LISTENER: Conn = 0;
const STOP: Conn = 1;
const REMOTE: Conn = 2;
/// The first member's connection.
const FIRST: Conn = 3;
/// Connections at a time: members, and some that have not said who they are.
const MAX_CONNECTIONS: usize = MAX_MEMBERS + MAX_ENTERING;
/// Connections from other hosts that have not shown the key. One more, and the oldest of the
/// address that has most of them goes: no address keeps others out.
const MAX_ENTERING: usize = 512;
/// Members that may connect before the thread comes to accept them.
const BACKLOG: i32 = 4096;
/// Read at a time.
const PIECE: usize = 16 << 10;

/// A running coordinator. It stops when this is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    messages: Arc<AtomicU64>,
}

impl Server {
    /// Returns how many requests it has read, and replies it has written or begun to write.
    pub fn messages(&self) -> u64 {
        self.messages.load(Relaxed)
    }

    /// Coordinates the job `job` for whoever connects to `listener`: processes of this user.
    /// What `held` is stays there for as long as it does. Members on other hosts come to `far`,
    /// with its key.
    pub fn start(
        listener: UnixListener,
        far: Option<(TcpListener, JobKey)>,
        job: String,
        held: impl Send + 'static,
    ) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&poll, &stopped, EventData::new_u64(STOP), EventFlags::IN)?;
        if let Some((listener, _)) = &far {
            listener.set_nonblocking(true)?;
            rustix::net::listen(listener, BACKLOG)?;
            epoll::add(&poll, listener, EventData::new_u64(REMOTE), EventFlags::IN)?;
        }
        let begin = Instant::now();
        // Later than any of a coordinator before this one.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let revision = u64::try_from(now.as_micros()).unwrap_or(u64::MAX / 2);
        let (state, peers, next) = (State::new(job, revision), BTreeMap::new(), FIRST);
        let gone = Vec::new();
        let messages = Arc::<AtomicU64>::default();
        let counted = messages.clone();
        let mut serving =
            Serving { poll, listener, far, state, peers, next, begin, gone, messages: counted };
        let serve = move || {
            let (_held, _stopped) = (held, stopped);
            while serving.turn() {}
        };
        let thread = thread::Builder::new().name("coordinator".into()).spawn(serve)?;
        Ok(Server { stop: Some(stop), thread: Some(thread), messages })
    }

    /// Goes on until the process ends.
    pub fn forever(mut self) {
        std::mem::forget(self.stop.take());
        self.thread = None;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A connection.
#[derive(Debug)]
struct Peer {
    link: Link,
    /// Of a request that is not all there.
    read: Vec<u8>,
    /// Of a reply that did not fit: one at most.
    unsent: Vec<u8>,
    /// Until it has shown the key.
    entrance: Option<Entrance>,
}

struct Serving {
    poll: OwnedFd,
    listener: UnixListener,
    far: Option<(TcpListener, JobKey)>,
    state: State,
    peers: BTreeMap<Conn, Peer>,
    next: Conn,
    begin: Instant,
    /// To be dropped when all that is said has been.
    gone: Vec<Conn>,
    /// Read and written.
    messages: Arc<AtomicU64>,
}

impl Serving {
    /// Waits for something to do and does it; whether to go on.
    fn turn(&mut self) -> bool {
        let mut events: Vec<Event> = Vec::with_capacity(256);
        let now = self.now();
        let entering = self.entering().map(|(until, _)| until).min();
        let until = self.state.next_deadline().into_iter().chain(entering).min();
        let left = until.map(|at| Duration::from_millis(at.saturating_sub(now)));
        let left = left.and_then(|left| left.try_into().ok());
        match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
        for event in &events {
            match event.data.u64() {
                STOP => return false,
                LISTENER => self.accept(),
                REMOTE => self.accept_remote(),
                conn => self.serve(conn, event.flags),
            }
        }
        self.state.expire(self.now());
        self.turn_away();
        self.say();
        true
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else {
            // Out of descriptors, most likely: does not get better by asking faster.
            return thread::sleep(Duration::from_millis(1));
        };
        let own = rustix::process::geteuid();
        let same = socket_peercred(&stream).is_ok_and(|peer| peer.uid == own);
        if same && stream.set_nonblocking(true).is_ok() {
            self.take_in(stream.into(), None);
        }
    }

    fn accept_remote(&mut self) {
        let now = self.now();
        let Some((listener, _)) = &self.far else { return };
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            // One of those that have not shown the key has the descriptor that it takes.
            Err(error) if is_out_of_descriptors(&error) && self.make_room() => return,
            Err(_) => return thread::sleep(Duration::from_millis(1)),
        };
        if self.entering().count() >= MAX_ENTERING {
            self.make_room();
        }
        if let Ok(entrance) = Entrance::greet(&stream, origin(from.ip()), now) {
            self.take_in(Link::Remote(stream), Some(entrance));
        }
    }

    /// Has the oldest of the address go that has most connections which have not shown the key, and
    /// tells it to come again. Returns whether there was one.
    fn make_room(&mut self) -> bool {
        let mut origins = BTreeMap::<IpAddr, (usize, Conn)>::new();
        // Connections are numbered as they come.
        for (conn, peer) in &self.peers {
            if let Some(entrance) = &peer.entrance {
                origins.entry(entrance.origin).or_insert((0, *conn)).0 += 1;
            }
        }
        let most = origins.values().max_by_key(|(count, _)| *count);
        let Some((_, oldest)) = most.copied() else { return false };
        if let Some(peer) = self.peers.get(&oldest) {
            // One that has closed it is not told.
            let _ = (&peer.link).write(&COME_AGAIN);
        }
        self.hang_up(oldest);
        true
    }

    fn take_in(&mut self, link: Link, entrance: Option<Entrance>) {
        if self.peers.len() >= MAX_CONNECTIONS {
            return;
        }
        let conn = self.next;
        let events = EventFlags::IN | EventFlags::RDHUP;
        if epoll::add(&self.poll, &link, EventData::new_u64(conn), events).is_ok() {
            self.next += 1;
            let (read, unsent) = (Vec::new(), Vec::new());
            self.peers.insert(conn, Peer { link, read, unsent, entrance });
        }
    }

    /// Returns those that have not shown the key, and until when they may.
    fn entering(&self) -> impl Iterator<Item = (u64, Conn)> {
        let until = |peer: &Peer| peer.entrance.as_ref().map(|entrance| entrance.until);
        self.peers.iter().filter_map(move |(conn, peer)| Some((until(peer)?, *conn)))
    }

    /// Hangs up on those that have not shown the key in time.
    fn turn_away(&mut self) {
        let now = self.now();
        let late: Vec<Conn> =
            self.entering().filter(|(until, _)| *until <= now).map(|e| e.1).collect();
        late.into_iter().for_each(|conn| self.hang_up(conn));
    }

    fn serve(&mut self, conn: Conn, flags: EventFlags) {
        let Some(peer) = self.peers.get_mut(&conn) else { return };
        let written = if flags.contains(EventFlags::OUT) { peer.flush() } else { Ok(()) };
        if flags.contains(EventFlags::OUT) && peer.unsent.is_empty() {
            self.watch(conn, EventFlags::empty());
        }
        match written.and_then(|()| self.hear(conn)) {
            Ok(true) => {}
            Ok(false) | Err(_) => self.hang_up(conn),
        }
    }

    /// Takes in what `conn` says; whether there may be more.
    fn hear(&mut self, conn: Conn) -> io::Result<bool> {
        let now = self.now();
        let Some(peer) = self.peers.get_mut(&conn) else { return Ok(true) };
        let mut piece = [0; PIECE];
        let open = match (&peer.link).read(&mut piece) {
            Ok(0) => false,
            Ok(length) => {
                peer.read.extend_from_slice(&piece[..length]);
                true
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        let key = self.far.as_ref().map(|(_, key)| key);
        if !peer.has_entered(key)? {
            return Ok(open);
        }
        while let Some((request, length)) = first::<Request>(&peer.read, MAX_REQUEST)? {
            peer.read.drain(..length);
            self.messages.fetch_add(1, Relaxed);
            match (&peer.link, &request) {
                (Link::Remote(_), Request::Meet { .. }) => {
                    self.state.refuse(conn, "who is on another host cannot meet others in memory");
                }
                _ => self.state.ask(conn, request, now).map_err(io::Error::other)?,
            }
        }
        Ok(open)
    }

    /// Sends every reply.
    fn say(&mut self) {
        loop {
            for (conn, reply) in self.state.replies() {
                let Some(peer) = self.peers.get_mut(&conn) else { continue };
                self.messages.fetch_add(1, Relaxed);
                let page = matches!(reply, Reply::Page {}).then(|| self.state.page_for(conn));
                let said = match page.flatten() {
                    // Who asks before it has read the last answer is no client of ours.
                    _ if !peer.unsent.is_empty() => Err(ErrorKind::InvalidData.into()),
                    Some(page) => peer.link.hand(&frame(&reply), page.file()),
                    None => {
                        peer.unsent.extend(frame(&reply));
                        peer.flush()
                    }
                };
                match said {
                    Err(_) => self.gone.push(conn),
                    Ok(()) if !peer.unsent.is_empty() => self.watch(conn, EventFlags::OUT),
                    Ok(()) => {}
                }
            }
            if self.gone.is_empty() {
                return;
            }
            // Who is lost may be what others are to be told.
            std::mem::take(&mut self.gone).into_iter().for_each(|conn| self.hang_up(conn));
        }
    }

    fn watch(&self, conn: Conn, more: EventFlags) {
        if let Some(peer) = self.peers.get(&conn) {
            let events = EventFlags::IN | EventFlags::RDHUP | more;
            let _ = epoll::modify(&self.poll, &peer.link, EventData::new_u64(conn), events);
        }
    }

    fn hang_up(&mut self, conn: Conn) {
        if self.peers.remove(&conn).is_some() {
            self.state.lost(conn);
        }
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

impl Peer {
    /// Returns whether what it says counts; an error where it does not have the key.
    fn has_entered(&mut self, key: Option<&JobKey>) -> io::Result<bool> {
        let Some(entrance) = &self.entrance else { return Ok(true) };
        let Some(answer) = self.read.first_chunk::<ANSWER>() else { return Ok(false) };
        let key = key.ok_or(ErrorKind::PermissionDenied)?;
        let proof = entrance.admit(key, answer)?;
        self.read.drain(..ANSWER);
        self.entrance = None;
        self.unsent.extend(proof);
        self.flush()?;
        Ok(true)
    }

    /// Writes what can be written now.
    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match (&self.link).write(&self.unsent) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(length) => drop(self.unsent.drain(..length)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
