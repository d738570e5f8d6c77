//! Streams on the one side, and on the other the connection to the other end of a remote shell.
//! One thread, which waits for all of them at once, so that no stream waits for another: of each,
//! no more is sent than the other end has room for ([`WINDOW`]), and so the connection is always
//! read, whoever does not read his stream. Between the two ends all is sealed by a secret that only
//! they have: ssh has carried it.

use super::bytes::Bytes;
use super::frame::{Decoder, Frame, MAX_DATA_LEN, Stream, WINDOW, put_data};
use super::kept::Kept;
use super::sink::Sink;
use kedge_keys::{PSK_BYTES, PskChannel, PskEnd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Pid, getpgrp};
use rustix::termios::{isatty, tcgetpgrp};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// What may wait to be sent, in bytes, before a stream is not read any more.
const WAITING: usize = 256 << 10;
/// The other end hears of so much that was written, or of less when nothing waits.
const TOLD: usize = WINDOW / 4;
/// How long the other host may say nothing before it is asked, how soon again, and how often.
const SILENCE: Duration = Duration::from_secs(60);
const ASK: Duration = Duration::from_secs(15);
const ASKED: u32 = 4;
/// How soon is tried again what the system has no room for, or no memory.
const FULL: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_millis(100);
/// How soon is looked again whether this process is in its terminal's foreground.
const FOREGROUND: Duration = Duration::from_millis(250);

/// Where something is read and sent to the other end.
#[derive(Debug)]
struct Source {
    stream: Stream,
    fd: OwnedFd,
    /// How many bytes the other end has room for.
    room: usize,
    /// How many more are read, where not all are.
    left: Option<usize>,
    is_terminal: bool,
}

impl Source {
    /// Whether it may be read. A terminal is its foreground's: it stops others that read it.
    fn is_ours(&self) -> bool {
        let is_other = |group: Pid| group != getpgrp();
        // It may be none of this process's session, of which it would not know.
        !(self.is_terminal && tcgetpgrp(&self.fd).is_ok_and(is_other))
    }
}

/// Which life of an image this is: what a restart makes of a connection is another socket, and no
/// boot of a machine gives a socket's number twice. Looked up each time: what is kept in memory is
/// of the life before.
fn life(link: &TcpStream) -> io::Result<(String, u64)> {
    let boot = kedge_supervisor::boot();
    if boot.is_empty() {
        return Err(io::Error::other("the kernel does not tell which boot of the machine this is"));
    }
    Ok((boot, sockopt::socket_cookie(link)?))
}

/// One end of a remote shell.
#[derive(Debug)]
pub(crate) struct Relay {
    link: TcpStream,
    channel: PskChannel,
    /// Of one whose memory images may hold.
    life: Option<(String, u64)>,
    /// Which life this is could not be found out: nothing is sealed meanwhile.
    life_is_unknown: bool,
    /// Of one that outlives its connections; and what is to be said first on this one.
    kept: Option<Kept>,
    first: Vec<u8>,
    /// What is to be sealed, and what is to be sent.
    plain: Vec<u8>,
    out: Bytes,
    decoder: Decoder,
    sources: Vec<Source>,
    sinks: Vec<Sink>,
    /// Signals and the command's end, as they have come.
    told: Vec<Frame>,
    /// How often sinks were written to: they take turns.
    written: usize,
    /// For what is read.
    buffer: Vec<u8>,
    /// Why nothing comes or goes any more.
    closed: Option<String>,
}

impl Relay {
    /// Makes one end of the two that have this secret, which an image may hold.
    ///
    /// # Errors
    /// The connection is lost, or the system gives no random numbers.
    pub(crate) fn new(link: TcpStream, secret: [u8; PSK_BYTES], end: PskEnd) -> io::Result<Relay> {
        let life = life(&link)?;
        Ok(Relay { life: Some(life), ..Relay::of(link, secret, end)? })
    }

    /// Makes one end of the two that have this secret, both of which outlive the connection and are
    /// in no image: see [`Relay::resume`].
    ///
    /// # Errors
    /// As for [`Relay::new`].
    pub(crate) fn outliving(
        link: TcpStream,
        secret: [u8; PSK_BYTES],
        end: PskEnd,
    ) -> io::Result<Relay> {
        let mut kept = Kept::default();
        let first = kept.begin();
        Ok(Relay { kept: Some(kept), first, ..Relay::of(link, secret, end)? })
    }

    fn of(link: TcpStream, secret: [u8; PSK_BYTES], end: PskEnd) -> io::Result<Relay> {
        prepare(&link)?;
        Ok(Relay {
            life: None,
            life_is_unknown: false,
            kept: None,
            first: Vec::new(),
            channel: PskChannel::new(secret, end).map_err(io::Error::other)?,
            link,
            plain: Vec::new(),
            out: Bytes::default(),
            decoder: Decoder::default(),
            sources: Vec::new(),
            sinks: Vec::new(),
            told: Vec::new(),
            written: 0,
            buffer: vec![0; 2 * MAX_DATA_LEN],
            closed: None,
        })
    }

    /// Goes on by another connection: nothing that was said is lost, or said twice.
    ///
    /// # Errors
    /// The connection is lost, or the system gives no random numbers.
    pub(crate) fn resume(&mut self, link: TcpStream) -> io::Result<()> {
        let kept = self.kept.as_mut().ok_or(ErrorKind::Unsupported)?;
        prepare(&link)?;
        self.channel = self.channel.anew().map_err(io::Error::other)?;
        self.first = kept.begin();
        (self.link, self.out, self.decoder) = (link, Bytes::default(), Decoder::default());
        self.closed = None;
        Ok(())
    }

    /// Whether the other end has said on this connection where it goes on.
    pub(crate) fn goes_on(&self) -> bool {
        !self.is_closed() && self.kept.as_ref().is_some_and(Kept::goes_on)
    }

    /// Whether another has come in the place of the other end, which has ended.
    pub(crate) fn is_another(&self) -> bool {
        self.kept.as_ref().is_some_and(Kept::is_another)
    }

    /// Whether the other end has heard all that was said.
    pub(crate) fn is_heard(&self) -> bool {
        self.plain.is_empty() && self.kept.as_ref().is_some_and(|kept| kept.unheard().is_empty())
    }

    /// Tells the other end that all was heard that has come.
    pub(crate) fn tell_heard(&mut self) {
        let told = self.kept.as_mut().map(Kept::tells);
        told.iter().for_each(|frame| self.say(frame));
    }

    /// What was read of `stream`, and the other end is not known to have heard.
    pub(crate) fn unheard(&self, stream: Stream) -> Vec<u8> {
        let mut frames = Decoder::default();
        let said = self.kept.as_ref().map_or(&[][..], Kept::unheard);
        frames.end().extend(said.iter().chain(&self.plain));
        let mut all = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            match frame {
                Frame::Data(of, data) if of == stream => all.extend(data),
                _ => {}
            }
        }
        all
    }

    pub(crate) fn read_from(&mut self, stream: Stream, fd: OwnedFd) {
        let is_terminal = isatty(&fd);
        self.sources.push(Source { stream, fd, room: WINDOW, left: None, is_terminal });
    }

    /// Reads no more of all streams than is there.
    ///
    /// # Errors
    /// A stream is none of which that can be told.
    pub(crate) fn read_what_is_there(&mut self) -> io::Result<()> {
        for source in self.sources.iter_mut().filter(|source| source.left.is_none()) {
            source.left = Some(rustix::io::ioctl_fionread(&source.fd)? as usize);
        }
        self.sources.retain(|source| source.left != Some(0));
        Ok(())
    }

    /// Whether a stream is read.
    pub(crate) fn reads(&self, stream: Stream) -> bool {
        self.sources.iter().any(|source| source.stream == stream)
    }

    /// Whether more may come to be written.
    pub(crate) fn has_sinks(&self) -> bool {
        !self.sinks.is_empty()
    }

    /// Whether something waits for room in a file system.
    pub(crate) fn is_full(&self) -> bool {
        self.sinks.iter().any(|sink| sink.full.is_some())
    }

    pub(crate) fn write_to(&mut self, stream: Stream, fd: OwnedFd) {
        self.sinks.push(Sink::new(stream, fd));
    }

    pub(crate) fn say(&mut self, frame: &Frame) {
        frame.put(&mut self.plain);
    }

    /// Signals and the command's end that have come since this was asked.
    pub(crate) fn told(&mut self) -> Vec<Frame> {
        std::mem::take(&mut self.told)
    }

    /// Whether the other end has closed the connection, or it is lost.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Why, if so.
    pub(crate) fn why_closed(&self) -> &str {
        self.closed.as_deref().unwrap_or_default()
    }

    /// The first reason is the one that others follow from.
    fn close(&mut self, why: impl fmt::Display) {
        if self.closed.is_none() && self.kept.is_some() {
            // Else the other end would wait for this one, which waits for another connection.
            let _ = self.link.shutdown(std::net::Shutdown::Both);
        }
        self.closed.get_or_insert_with(|| why.to_string());
    }

    pub(crate) fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Whether all that has come has been written.
    pub(crate) fn has_written(&self) -> bool {
        self.sinks.iter().all(|sink| sink.waits.is_empty())
    }

    /// Whether all that was said has been sent.
    pub(crate) fn has_sent(&self) -> bool {
        self.first.is_empty() && self.plain.is_empty() && self.out.is_empty()
    }

    /// Closes all streams.
    pub(crate) fn drop_streams(&mut self) {
        self.sources.clear();
        self.sinks.clear();
    }

    /// Says that nothing more is said.
    pub(crate) fn shut(&self) {
        let _ = self.link.shutdown(std::net::Shutdown::Write);
    }

    /// Waits, for `wait` at most, until one of the streams, the connection or `also` is ready, and
    /// moves what can be moved. Returns whether `also` is.
    ///
    /// # Errors
    /// The kernel has no memory to wait with.
    pub(crate) fn turn(
        &mut self,
        also: Option<BorrowedFd<'_>>,
        wait: Option<Duration>,
    ) -> io::Result<bool> {
        self.seal();
        let ready = self.wait(also, wait)?;
        let Some((link, rest)) = ready.split_first() else { return Ok(false) };
        let (sinks, rest) = rest.split_at(self.sinks.len());
        let (sources, rest) = rest.split_at(self.sources.len());
        self.write(sinks);
        self.read(sources);
        if !self.is_closed() {
            self.exchange(*link);
        }
        self.sinks.retain(|sink| !(sink.ends && sink.waits.is_empty()));
        Ok(rest.first().is_some_and(|ready| !ready.is_empty()))
    }

    /// What is ready: the connection, each sink, each source, and `also`.
    fn wait(
        &self,
        also: Option<BorrowedFd<'_>>,
        wait: Option<Duration>,
    ) -> io::Result<Vec<PollFlags>> {
        let when = |is: bool, flags: PollFlags| if is { flags } else { PollFlags::empty() };
        let has_room = self.plain.len() + self.out.len() < WAITING
            && self.kept.as_ref().is_none_or(Kept::has_room);
        // Whoever is not to be waited for is not asked about: what has ended is always ready.
        let link = (!self.is_closed()).then(|| {
            let flags = PollFlags::IN | when(!self.out.is_empty(), PollFlags::OUT);
            PollFd::from_borrowed_fd(self.link.as_fd(), flags)
        });
        let sinks = self.sinks.iter().map(|sink| {
            let flags = when(sink.is_due(), PollFlags::OUT);
            Some(PollFd::from_borrowed_fd(sink.fd.as_fd(), flags))
        });
        let sources = self.sources.iter().map(|source| {
            let is_read = has_room && source.room > 0 && source.is_ours();
            is_read.then(|| PollFd::from_borrowed_fd(source.fd.as_fd(), PollFlags::IN))
        });
        let also = also.map(|fd| Some(PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let all: Vec<Option<PollFd<'_>>> =
            std::iter::once(link).chain(sinks).chain(sources).chain(also).collect();
        let mut asked: Vec<PollFd<'_>> = all.iter().flatten().cloned().collect();
        let is_behind = self.sources.iter().any(|source| !source.is_ours());
        let again = [(self.is_full(), FULL), (self.life_is_unknown, SOON), (is_behind, FOREGROUND)];
        let again = again.into_iter().filter(|(is, _)| *is).map(|(_, soon)| soon);
        let limit = again.chain(wait).min().map(|wait| Timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let is_told = match poll(&mut asked, limit.as_ref()) {
            Ok(_) => true,
            Err(Errno::INTR) => false,
            // There is no memory now.
            Err(Errno::NOMEM | Errno::AGAIN) => {
                std::thread::sleep(SOON);
                false
            }
            Err(error) => return Err(error.into()),
        };
        let mut ready = asked.iter().map(|fd| when(is_told, fd.revents()));
        let none = PollFlags::empty();
        let each = all.iter().map(|one| match one {
            Some(_) => ready.next().unwrap_or(none),
            None => none,
        });
        Ok(each.collect())
    }

    /// Writes to one of the sinks that are ready: two may be one pipe, which has room for one
    /// piece.
    fn write(&mut self, ready: &[PollFlags]) {
        let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        let takes = |(sink, ready): &(&Sink, &PollFlags)| {
            sink.is_due() && ready.contains(PollFlags::OUT) && !ready.intersects(gone)
        };
        let each = self.sinks.iter().zip(ready).enumerate();
        let can: Vec<usize> = each.filter(|(_, one)| takes(one)).map(|(index, _)| index).collect();
        let chosen = can.get(self.written.checked_rem(can.len()).unwrap_or(0)).copied();
        self.written = self.written.wrapping_add(1);
        let (mut ended, mut said) = (Vec::new(), Vec::new());
        for (index, (sink, ready)) in self.sinks.iter_mut().zip(ready).enumerate() {
            let written = match ready {
                ready if ready.intersects(gone) => Err(Errno::PIPE),
                _ if chosen == Some(index) => sink.write(),
                _ => Ok(0),
            };
            match written {
                Ok(written) => {
                    if written > 0 {
                        sink.full = None;
                    }
                    sink.waits.take(written);
                    sink.untold += written;
                    let is_due = sink.untold >= TOLD || sink.waits.is_empty();
                    if sink.untold > 0 && is_due && !sink.ends {
                        said.push(Frame::Taken(sink.stream, sink.untold as u32));
                        sink.untold = 0;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                // It waits until there is room: what comes is kept, and its sender waits.
                Err(Errno::NOSPC | Errno::DQUOT | Errno::NOMEM | Errno::NOBUFS) => {
                    sink.full = Some(Instant::now() + FULL);
                }
                // Nobody reads it.
                Err(_) => ended.push(sink.stream),
            }
        }
        said.iter().for_each(|frame| self.say(frame));
        for stream in ended {
            self.sinks.retain(|sink| sink.stream != stream);
            self.say(&Frame::End(stream));
        }
    }

    fn read(&mut self, ready: &[PollFlags]) {
        let mut ended = Vec::new();
        let each = self.sources.iter_mut().zip(ready);
        for (source, _) in each.filter(|(_, ready)| !ready.is_empty()) {
            let most = source.room.min(MAX_DATA_LEN).min(source.left.unwrap_or(MAX_DATA_LEN));
            match rustix::io::read(&source.fd, &mut self.buffer[..most]) {
                Ok(0) => ended.push(source.stream),
                Ok(read) => {
                    source.room -= read;
                    source.left.iter_mut().for_each(|left| *left -= read);
                    put_data(source.stream, &self.buffer[..read], &mut self.plain);
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM) => {}
                Err(_) => ended.push(source.stream),
            }
        }
        ended.iter().for_each(|stream| self.say(&Frame::End(*stream)));
        let goes_on = |source: &Source| !ended.contains(&source.stream) && source.left != Some(0);
        self.sources.retain(goes_on);
    }

    /// Seals what was said, as soon as the other end has shown itself.
    fn seal(&mut self) {
        if let Err(error) = self.try_to_seal() {
            self.close(error);
        }
    }

    fn try_to_seal(&mut self) -> io::Result<()> {
        if !self.first.is_empty() && !self.is_closed() && self.seals(&self.first.clone())? {
            self.first.clear();
        }
        let goes_on = self.kept.as_ref().is_none_or(Kept::goes_on);
        if !self.plain.is_empty() && !self.is_closed() && goes_on && self.begins_life()? {
            let plain = std::mem::take(&mut self.plain);
            if !self.seals(&plain)? {
                self.plain = plain;
            } else if self.kept.as_mut().is_some_and(|kept| !kept.seal(&plain)) {
                return Err(io::Error::other("the other end does not say what it has heard"));
            }
        }
        self.channel.greet(self.out.end());
        Ok(())
    }

    fn seals(&mut self, plain: &[u8]) -> io::Result<bool> {
        self.channel.seal(plain, self.out.end()).map_err(io::Error::other)
    }

    /// Finds out whether this is another life of an image: what is to be sealed has been read, and
    /// whatever life begins from here on would seal the same by the same key. Returns whether that
    /// is known: there may be no descriptor to look with.
    fn begins_life(&mut self) -> io::Result<bool> {
        let Some(known) = &mut self.life else { return Ok(true) };
        let found = life(&self.link);
        self.life_is_unknown = found.is_err();
        let Ok(found) = found else { return Ok(false) };
        if found != *known {
            *known = found;
            self.channel.renew().map_err(io::Error::other)?;
        }
        Ok(true)
    }

    fn exchange(&mut self, ready: PollFlags) {
        self.seal();
        // What was just said is sent at once where it can be.
        if !self.out.is_empty() {
            match (&self.link).write(self.out.waiting()) {
                Ok(sent) => self.out.take(sent),
                Err(error) if passes(&error) => {}
                Err(error) => self.close(error),
            }
        }
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            match (&self.link).read(&mut self.buffer) {
                Ok(0) => self.close("the other end has closed the connection"),
                Ok(read) => {
                    let opened = self.channel.open(&self.buffer[..read], self.decoder.end());
                    self.take();
                    if let Err(error) = opened {
                        self.close(error);
                    }
                }
                Err(error) if passes(&error) => {}
                Err(error) => self.close(error),
            }
        }
    }

    /// Heeds what has come.
    fn take(&mut self) {
        loop {
            let heeded = match self.decoder.next() {
                Ok(Some(frame)) => self.count(&frame) && self.heed(frame),
                Ok(None) => return,
                Err(_) => false,
            };
            if !heeded {
                self.close("the other end says what means nothing, or more than there is room for");
                return;
            }
        }
    }

    /// Counts a frame, where frames are kept; returns whether it may come now.
    fn count(&mut self, frame: &Frame) -> bool {
        let Some(kept) = &mut self.kept else { return true };
        if matches!(frame, Frame::Resume(_) | Frame::Begin) {
            return true;
        }
        let goes_on = kept.goes_on();
        let told = kept.count(self.decoder.last() as u64);
        told.iter().for_each(|frame| self.say(frame));
        goes_on
    }

    /// Returns whether the frame may be.
    fn heed(&mut self, frame: Frame) -> bool {
        match frame {
            Frame::Data(stream, data) => {
                let mut sinks = self.sinks.iter_mut();
                if let Some(sink) = sinks.find(|sink| sink.stream == stream && !sink.ends) {
                    sink.waits.end().extend_from_slice(&data);
                    return sink.waits.len() + sink.untold <= WINDOW;
                }
            }
            Frame::End(stream) => {
                self.sources.retain(|source| source.stream != stream);
                let sinks = self.sinks.iter_mut().filter(|sink| sink.stream == stream);
                sinks.for_each(|sink| sink.ends = true);
            }
            Frame::Taken(stream, count) => {
                let mut sources = self.sources.iter_mut();
                if let Some(source) = sources.find(|source| source.stream == stream) {
                    source.room += count as usize;
                    return source.room <= WINDOW;
                }
            }
            told @ (Frame::Signal(_) | Frame::GroupSignal(_) | Frame::Exit(_)) => {
                self.told.push(told);
            }
            Frame::Heard(count) => return self.kept.as_mut().is_some_and(|kept| kept.hears(count)),
            Frame::Begin => return self.kept.as_mut().is_some_and(Kept::begins),
            Frame::Resume(count) => {
                let Some(mut again) = self.kept.as_mut().and_then(|kept| kept.resume(count)) else {
                    return false;
                };
                again.append(&mut self.plain);
                self.plain = again;
            }
        }
        true
    }
}

/// A host that is lost says nothing.
fn prepare(link: &TcpStream) -> io::Result<()> {
    link.set_nonblocking(true)?;
    link.set_nodelay(true)?;
    sockopt::set_socket_keepalive(link, true)?;
    sockopt::set_tcp_keepidle(link, SILENCE)?;
    sockopt::set_tcp_keepintvl(link, ASK)?;
    sockopt::set_tcp_keepcnt(link, ASKED)?;
    Ok(())
}

fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
