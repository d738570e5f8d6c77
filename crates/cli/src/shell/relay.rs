//! Streams on the one side, and on the other the connection to the other end of a remote shell.
//! One thread, which waits for all of them at once, so that no stream waits for another.

use super::frame::{Decoder, Frame, MOST, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// What may wait, in bytes, before a stream is not read any more.
const WAITING: usize = 256 << 10;
/// A pipe that poll() calls writable takes so much at once (PIPE_BUF): whoever shares it is spared
/// O_NONBLOCK.
const PIECE: usize = 4096;
/// How long the other host may say nothing before it is asked, how soon again, and how often.
const SILENCE: Duration = Duration::from_secs(60);
const ASK: Duration = Duration::from_secs(15);
const ASKED: u32 = 4;

/// Where something is read and sent to the other end.
#[derive(Debug)]
struct Source {
    stream: Stream,
    fd: OwnedFd,
}

/// Where something is written that the other end sends.
#[derive(Debug)]
struct Sink {
    stream: Stream,
    fd: OwnedFd,
    waits: Vec<u8>,
    /// Nothing more comes.
    ends: bool,
}

/// One end of a remote shell.
#[derive(Debug)]
pub(super) struct Relay {
    link: TcpStream,
    out: Vec<u8>,
    decoder: Decoder,
    sources: Vec<Source>,
    sinks: Vec<Sink>,
    /// Signals and the command's end, as they have come.
    told: Vec<Frame>,
    /// How often sinks were written to: they take turns.
    written: usize,
    /// Whether the other end's going is noticed also while nothing can be taken from it.
    watches: bool,
    closed: bool,
}

impl Relay {
    pub(super) fn new(link: TcpStream, watches: bool) -> io::Result<Relay> {
        link.set_nonblocking(true)?;
        link.set_nodelay(true)?;
        // A host that is lost says nothing.
        sockopt::set_socket_keepalive(&link, true)?;
        sockopt::set_tcp_keepidle(&link, SILENCE)?;
        sockopt::set_tcp_keepintvl(&link, ASK)?;
        sockopt::set_tcp_keepcnt(&link, ASKED)?;
        Ok(Relay {
            link,
            out: Vec::new(),
            decoder: Decoder::default(),
            sources: Vec::new(),
            sinks: Vec::new(),
            told: Vec::new(),
            written: 0,
            watches,
            closed: false,
        })
    }

    pub(super) fn read_from(&mut self, stream: Stream, fd: OwnedFd) {
        self.sources.push(Source { stream, fd });
    }

    pub(super) fn write_to(&mut self, stream: Stream, fd: OwnedFd) {
        self.sinks.push(Sink { stream, fd, waits: Vec::new(), ends: false });
    }

    pub(super) fn say(&mut self, frame: &Frame) {
        frame.put(&mut self.out);
    }

    /// Signals and the command's end that have come since this was asked.
    pub(super) fn told(&mut self) -> Vec<Frame> {
        std::mem::take(&mut self.told)
    }

    /// Whether the other end has closed the connection, or it is lost.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Whether all that has come has been written.
    pub(super) fn has_written(&self) -> bool {
        self.sinks.iter().all(|sink| sink.waits.is_empty())
    }

    /// Whether all that was said has been sent.
    pub(super) fn has_sent(&self) -> bool {
        self.out.is_empty()
    }

    /// Closes all streams.
    pub(super) fn drop_streams(&mut self) {
        self.sources.clear();
        self.sinks.clear();
    }

    /// Says that nothing more is said.
    pub(super) fn shut(&self) {
        let _ = self.link.shutdown(std::net::Shutdown::Write);
    }

    /// Waits, for `wait` at most, until one of the streams, the connection or `also` is ready, and
    /// moves what can be moved. Returns whether `also` is.
    ///
    /// # Errors
    /// The kernel has no memory to wait with.
    pub(super) fn turn(
        &mut self,
        also: Option<BorrowedFd<'_>>,
        wait: Option<Duration>,
    ) -> io::Result<bool> {
        let ready = self.wait(also, wait)?;
        let Some((link, rest)) = ready.split_first() else { return Ok(false) };
        let (sinks, rest) = rest.split_at(self.sinks.len());
        let (sources, rest) = rest.split_at(if self.has_room() { self.sources.len() } else { 0 });
        self.write(sinks);
        self.read(sources);
        if !self.closed && !link.is_empty() {
            self.exchange(*link);
        }
        self.sinks.retain(|sink| !(sink.ends && sink.waits.is_empty()));
        Ok(rest.first().is_some_and(|ready| !ready.is_empty()))
    }

    fn has_room(&self) -> bool {
        self.out.len() < WAITING
    }

    /// What is ready: the connection, each sink, each source if there is room, and `also`.
    fn wait(
        &self,
        also: Option<BorrowedFd<'_>>,
        wait: Option<Duration>,
    ) -> io::Result<Vec<PollFlags>> {
        let when = |is: bool, flags: PollFlags| if is { flags } else { PollFlags::empty() };
        let takes = self.sinks.iter().all(|sink| sink.waits.len() < WAITING);
        let link = when(takes, PollFlags::IN)
            | when(!self.out.is_empty(), PollFlags::OUT)
            | when(self.watches, PollFlags::RDHUP);
        let mut all = Vec::new();
        // A connection that has ended is always ready.
        let link_fd = if self.closed { None } else { Some(self.link.as_fd()) };
        all.extend(link_fd.map(|fd| PollFd::from_borrowed_fd(fd, link)));
        all.extend(self.sinks.iter().map(|sink| {
            let flags = when(!sink.waits.is_empty(), PollFlags::OUT);
            PollFd::from_borrowed_fd(sink.fd.as_fd(), flags)
        }));
        if self.has_room() {
            let sources = self.sources.iter().map(|source| source.fd.as_fd());
            all.extend(sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        }
        all.extend(also.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let limit = wait.map(|wait| Timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let mut ready: Vec<PollFlags> = match poll(&mut all, limit.as_ref()) {
            Ok(_) => all.iter().map(PollFd::revents).collect(),
            Err(Errno::INTR) => vec![PollFlags::empty(); all.len()],
            Err(error) => return Err(error.into()),
        };
        if self.closed {
            ready.insert(0, PollFlags::empty());
        }
        Ok(ready)
    }

    /// Writes to one of the sinks that are ready: two may be one pipe, which has room for one
    /// piece.
    fn write(&mut self, ready: &[PollFlags]) {
        let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        let takes = |(sink, ready): &(&Sink, &PollFlags)| {
            !sink.waits.is_empty() && ready.contains(PollFlags::OUT) && !ready.intersects(gone)
        };
        let each = self.sinks.iter().zip(ready).enumerate();
        let can: Vec<usize> = each.filter(|(_, one)| takes(one)).map(|(index, _)| index).collect();
        let chosen = can.get(self.written.checked_rem(can.len()).unwrap_or(0)).copied();
        self.written = self.written.wrapping_add(1);
        let mut ended = Vec::new();
        for (index, (sink, ready)) in self.sinks.iter_mut().zip(ready).enumerate() {
            let piece = sink.waits.len().min(PIECE);
            let written = match ready {
                ready if ready.intersects(gone) => Err(Errno::PIPE),
                _ if chosen == Some(index) => rustix::io::write(&sink.fd, &sink.waits[..piece]),
                _ => Ok(0),
            };
            match written {
                Ok(written) => drop(sink.waits.drain(..written)),
                Err(Errno::AGAIN | Errno::INTR) => {}
                // Nobody reads it.
                Err(_) => ended.push(sink.stream),
            }
        }
        for stream in ended {
            self.sinks.retain(|sink| sink.stream != stream);
            self.say(&Frame::End(stream));
        }
    }

    fn read(&mut self, ready: &[PollFlags]) {
        let mut ended = Vec::new();
        let mut buffer = [0; MOST];
        let mut frames = Vec::new();
        for (source, _) in self.sources.iter().zip(ready).filter(|(_, ready)| !ready.is_empty()) {
            match rustix::io::read(&source.fd, &mut buffer) {
                Ok(0) => ended.push(source.stream),
                Ok(read) => frames.push(Frame::Data(source.stream, buffer[..read].to_vec())),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => ended.push(source.stream),
            }
        }
        frames.extend(ended.iter().map(|stream| Frame::End(*stream)));
        frames.iter().for_each(|frame| self.say(frame));
        self.sources.retain(|source| !ended.contains(&source.stream));
    }

    fn exchange(&mut self, ready: PollFlags) {
        if ready.contains(PollFlags::OUT) {
            match (&self.link).write(&self.out) {
                Ok(sent) => drop(self.out.drain(..sent)),
                Err(error) if passes(&error) => {}
                Err(_) => self.closed = true,
            }
        }
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            let mut buffer = [0; 2 * MOST];
            match (&self.link).read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(read) => self.take(&buffer[..read]),
                Err(error) if passes(&error) => {}
                Err(_) => self.closed = true,
            }
        } else if ready.contains(PollFlags::RDHUP) {
            self.closed = true;
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
        loop {
            match self.decoder.next() {
                Ok(Some(frame)) => self.heed(frame),
                Ok(None) => return,
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    fn heed(&mut self, frame: Frame) {
        match frame {
            Frame::Data(stream, data) => {
                let mut sinks = self.sinks.iter_mut();
                if let Some(sink) = sinks.find(|sink| sink.stream == stream && !sink.ends) {
                    sink.waits.extend(data);
                }
            }
            Frame::End(stream) => {
                self.sources.retain(|source| source.stream != stream);
                let sinks = self.sinks.iter_mut().filter(|sink| sink.stream == stream);
                sinks.for_each(|sink| sink.ends = true);
            }
            told @ (Frame::Signal(_) | Frame::Exit(_)) => self.told.push(told),
        }
    }
}

fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
