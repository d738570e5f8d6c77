//! The coordinator's sockets: one thread, which lives as long as the process or until it is told to stop.

use crate::frame::{first, frame};
use crate::message::{MAX_MEMBERS, MAX_REQUEST, Request};
use crate::state::{Conn, State};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const LISTENER: Conn = 0;
const STOP: Conn = 1;
/// The first member's connection.
const FIRST: Conn = 2;
/// Connections at a time: members, and some that have not said who they are.
const MAX_CONNECTIONS: usize = MAX_MEMBERS + 64;
/// Read at a time.
const PIECE: usize = 16 << 10;

/// A running coordinator. It stops when this is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Coordinates the job `job` for whoever connects to `listener`: processes of this user.
    /// What `held` is stays there for as long as it does.
    pub fn start(
        listener: UnixListener,
        job: String,
        held: impl Send + 'static,
    ) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&poll, &stopped, EventData::new_u64(STOP), EventFlags::IN)?;
        let begin = Instant::now();
        // Later than any of a coordinator before this one.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let revision = u64::try_from(now.as_micros()).unwrap_or(u64::MAX / 2);
        let (state, links, next) = (State::new(job, revision), BTreeMap::new(), FIRST);
        let mut serving = Serving { poll, listener, state, links, next, begin, gone: Vec::new() };
        let serve = move || {
            let (_held, _stopped) = (held, stopped);
            while serving.turn() {}
        };
        let thread = thread::Builder::new().name("coordinator".into()).spawn(serve)?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
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
struct Link {
    stream: UnixStream,
    /// Of a request that is not all there.
    read: Vec<u8>,
    /// Of a reply that did not fit: one at most.
    unsent: Vec<u8>,
}

struct Serving {
    poll: OwnedFd,
    listener: UnixListener,
    state: State,
    links: BTreeMap<Conn, Link>,
    next: Conn,
    begin: Instant,
    /// To be dropped when all that is said has been.
    gone: Vec<Conn>,
}

impl Serving {
    /// Waits for something to do and does it; whether to go on.
    fn turn(&mut self) -> bool {
        let mut events: Vec<Event> = Vec::with_capacity(256);
        let now = self.now();
        let left =
            self.state.next_deadline().map(|at| Duration::from_millis(at.saturating_sub(now)));
        let left = left.and_then(|left| left.try_into().ok());
        match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
        for event in &events {
            match event.data.u64() {
                STOP => return false,
                LISTENER => self.accept(),
                conn => self.serve(conn, event.flags),
            }
        }
        self.state.expire(self.now());
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
        if !same || self.links.len() >= MAX_CONNECTIONS || stream.set_nonblocking(true).is_err() {
            return;
        }
        let conn = self.next;
        let events = EventFlags::IN | EventFlags::RDHUP;
        if epoll::add(&self.poll, &stream, EventData::new_u64(conn), events).is_ok() {
            self.next += 1;
            self.links.insert(conn, Link { stream, read: Vec::new(), unsent: Vec::new() });
        }
    }

    fn serve(&mut self, conn: Conn, flags: EventFlags) {
        let Some(link) = self.links.get_mut(&conn) else { return };
        let written = if flags.contains(EventFlags::OUT) { link.flush() } else { Ok(()) };
        if flags.contains(EventFlags::OUT) && link.unsent.is_empty() {
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
        let Some(link) = self.links.get_mut(&conn) else { return Ok(true) };
        let mut piece = [0; PIECE];
        let open = match (&link.stream).read(&mut piece) {
            Ok(0) => false,
            Ok(length) => {
                link.read.extend_from_slice(&piece[..length]);
                true
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        while let Some((request, length)) = first::<Request>(&link.read, MAX_REQUEST)? {
            link.read.drain(..length);
            self.state.ask(conn, request, now).map_err(io::Error::other)?;
        }
        Ok(open)
    }

    /// Sends every reply.
    fn say(&mut self) {
        loop {
            for (conn, reply) in self.state.replies() {
                let Some(link) = self.links.get_mut(&conn) else { continue };
                link.unsent.extend(frame(&reply));
                match link.flush() {
                    Err(_) => self.gone.push(conn),
                    Ok(()) if !link.unsent.is_empty() => self.watch(conn, EventFlags::OUT),
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
        if let Some(link) = self.links.get(&conn) {
            let events = EventFlags::IN | EventFlags::RDHUP | more;
            let _ = epoll::modify(&self.poll, &link.stream, EventData::new_u64(conn), events);
        }
    }

    fn hang_up(&mut self, conn: Conn) {
        if self.links.remove(&conn).is_some() {
            self.state.lost(conn);
        }
    }
}

impl Link {
    /// Writes what can be written now.
    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match (&self.stream).write(&self.unsent) {
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
