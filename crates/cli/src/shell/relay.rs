//! Streams on the one side, and on the other the connection to the other end of a remote shell.
//! One thread, which waits for all of them at once, so that no stream waits for another: of each,
//! no more is sent than the other end has room for ([`WINDOW`]), and so the connection is always
//! read, whoever does not read his stream. Between the two ends all is sealed by a secret that only
//! they have: ssh has carried it.

use super::bytes::Bytes;
use super::frame::{Decoder, Frame, MOST, Stream, WINDOW, put_data};
use kedge_keys::{PSK_BYTES, PskChannel, PskEnd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use rustix::net::sockopt;
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// What may wait to be sent, in bytes, before a stream is not read any more.
const WAITING: usize = 256 << 10;
/// A pipe that poll() calls writable takes so much at once (PIPE_BUF): whoever shares it is spared
/// O_NONBLOCK.
const PIECE: usize = 4096;
/// Written at once where the kernel can be told not to wait.
const LARGE: usize = 128 << 10;
/// The other end hears of so much that was written, or of less when nothing waits.
const TOLD: usize = WINDOW / 4;
/// How long the other host may say nothing before it is asked, how soon again, and how often.
const SILENCE: Duration = Duration::from_secs(60);
const ASK: Duration = Duration::from_secs(15);
const ASKED: u32 = 4;

/// Where something is read and sent to the other end.
#[derive(Debug)]
struct Source {
    stream: Stream,
    fd: OwnedFd,
    /// How many bytes the other end has room for.
    room: usize,
}

/// Where something is written that the other end sends.
#[derive(Debug)]
struct Sink {
    stream: Stream,
    fd: OwnedFd,
    way: Way,
    waits: Bytes,
    /// How many were written that the other end has not been told of.
    untold: usize,
    /// Nothing more comes.
    ends: bool,
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

/// How a file takes bytes so that nobody waits for whoever reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// All at once: nobody reads an ordinary file.
    Whole,
    /// The kernel can be told not to wait.
    NoWait,
    /// By so little that poll() vouches for it.
    Piece,
}

impl Way {
    fn of(fd: &OwnedFd) -> Way {
        match fstat(fd).map(|file| FileType::from_raw_mode(file.st_mode)) {
            Ok(FileType::RegularFile) => Way::Whole,
            Ok(FileType::Fifo | FileType::Socket) => Way::NoWait,
            _ => Way::Piece,
        }
    }
}

impl Sink {
    /// Writes what it takes without waiting.
    fn write(&mut self) -> Result<usize, Errno> {
        let waits = self.waits.waiting();
        let large = &waits[..waits.len().min(LARGE)];
        let written = match self.way {
            Way::Whole => rustix::io::write(&self.fd, large),
            Way::Piece => rustix::io::write(&self.fd, &waits[..waits.len().min(PIECE)]),
            Way::NoWait => {
                let large = [IoSlice::new(large)];
                pwritev2(&self.fd, &large, u64::MAX, ReadWriteFlags::NOWAIT)
            }
        };
        if self.way == Way::NoWait && written == Err(Errno::OPNOTSUPP) {
            self.way = Way::Piece;
            return self.write();
        }
        written
    }
}

/// One end of a remote shell.
#[derive(Debug)]
pub(crate) struct Relay {
    link: TcpStream,
    channel: PskChannel,
    life: (String, u64),
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
    /// Makes one end of the two that have this secret.
    ///
    /// # Errors
    /// The connection is lost, or the system gives no random numbers.
    pub(crate) fn new(link: TcpStream, secret: [u8; PSK_BYTES], end: PskEnd) -> io::Result<Relay> {
        link.set_nonblocking(true)?;
        link.set_nodelay(true)?;
        // A host that is lost says nothing.
        sockopt::set_socket_keepalive(&link, true)?;
        sockopt::set_tcp_keepidle(&link, SILENCE)?;
        sockopt::set_tcp_keepintvl(&link, ASK)?;
        sockopt::set_tcp_keepcnt(&link, ASKED)?;
        Ok(Relay {
            life: life(&link)?,
            channel: PskChannel::new(secret, end).map_err(io::Error::other)?,
            link,
            plain: Vec::new(),
            out: Bytes::default(),
            decoder: Decoder::default(),
            sources: Vec::new(),
            sinks: Vec::new(),
            told: Vec::new(),
            written: 0,
            buffer: vec![0; 2 * MOST],
            closed: None,
        })
    }

    pub(crate) fn read_from(&mut self, stream: Stream, fd: OwnedFd) {
        self.sources.push(Source { stream, fd, room: WINDOW });
    }

    pub(crate) fn write_to(&mut self, stream: Stream, fd: OwnedFd) {
        let (way, waits) = (Way::of(&fd), Bytes::default());
        self.sinks.push(Sink { stream, fd, way, waits, untold: 0, ends: false });
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
        self.plain.is_empty() && self.out.is_empty()
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
        let has_room = self.plain.len() + self.out.len() < WAITING;
        // Whoever is not to be waited for is not asked about: what has ended is always ready.
        let link = (!self.is_closed()).then(|| {
            let flags = PollFlags::IN | when(!self.out.is_empty(), PollFlags::OUT);
            PollFd::from_borrowed_fd(self.link.as_fd(), flags)
        });
        let sinks = self.sinks.iter().map(|sink| {
            let flags = when(!sink.waits.is_empty(), PollFlags::OUT);
            Some(PollFd::from_borrowed_fd(sink.fd.as_fd(), flags))
        });
        let sources = self.sources.iter().map(|source| {
            let is_read = has_room && source.room > 0;
            is_read.then(|| PollFd::from_borrowed_fd(source.fd.as_fd(), PollFlags::IN))
        });
        let also = also.map(|fd| Some(PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let all: Vec<Option<PollFd<'_>>> =
            std::iter::once(link).chain(sinks).chain(sources).chain(also).collect();
        let mut asked: Vec<PollFd<'_>> = all.iter().flatten().cloned().collect();
        let limit = wait.map(|wait| Timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let is_told = match poll(&mut asked, limit.as_ref()) {
            Ok(_) => true,
            Err(Errno::INTR) => false,
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
            !sink.waits.is_empty() && ready.contains(PollFlags::OUT) && !ready.intersects(gone)
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
                    sink.waits.take(written);
                    sink.untold += written;
                    let is_due = sink.untold >= TOLD || sink.waits.is_empty();
                    if sink.untold > 0 && is_due && !sink.ends {
                        said.push(Frame::Taken(sink.stream, sink.untold as u32));
                        sink.untold = 0;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
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
            let most = source.room.min(MOST);
            match rustix::io::read(&source.fd, &mut self.buffer[..most]) {
                Ok(0) => ended.push(source.stream),
                Ok(read) => {
                    source.room -= read;
                    put_data(source.stream, &self.buffer[..read], &mut self.plain);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => ended.push(source.stream),
            }
        }
        ended.iter().for_each(|stream| self.say(&Frame::End(*stream)));
        self.sources.retain(|source| !ended.contains(&source.stream));
    }

    /// Seals what was said, as soon as the other end has shown itself.
    fn seal(&mut self) {
        if let Err(error) = self.try_to_seal() {
            self.close(error);
        }
    }

    fn try_to_seal(&mut self) -> io::Result<()> {
        if !self.plain.is_empty() && !self.is_closed() {
            // What is to be sealed has been read: whatever life begins from here on would seal the
            // same by the same key.
            let life = life(&self.link)?;
            if life != self.life {
                self.life = life;
                self.channel.renew().map_err(io::Error::other)?;
            }
            if self.channel.seal(&self.plain, self.out.end()).map_err(io::Error::other)? {
                self.plain.clear();
            }
        }
        self.channel.greet(self.out.end());
        Ok(())
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
                Ok(Some(frame)) => self.heed(frame),
                Ok(None) => return,
                Err(_) => false,
            };
            if !heeded {
                self.close("the other end says what means nothing, or more than there is room for");
                return;
            }
        }
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
            told @ (Frame::Signal(_) | Frame::Exit(_)) => self.told.push(told),
        }
        true
    }
}

fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, PipeWriter, pipe};
    use std::net::TcpListener;
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(20);

    /// Two ends that have these secrets; what is written here comes out there.
    fn pair(secrets: [u8; 2]) -> (Relay, Relay, PipeWriter, PipeReader) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (two, _) = listener.accept().unwrap();
        let relay = |link, secret, end| Relay::new(link, [secret; PSK_BYTES], end).unwrap();
        let mut near = relay(one, secrets[0], PskEnd::First);
        let mut far = relay(two, secrets[1], PskEnd::Second);
        let ((from, writer), (reader, to)) = (pipe().unwrap(), pipe().unwrap());
        near.read_from(Stream::In, from.into());
        far.write_to(Stream::In, to.into());
        (near, far, writer, reader)
    }

    /// Turns both until it is so.
    fn until(near: &mut Relay, far: &mut Relay, so: impl Fn(&Relay, &Relay) -> bool) {
        let (begin, wait) = (Instant::now(), Some(Duration::from_millis(1)));
        while !so(near, far) {
            assert!(begin.elapsed() < SOON, "{near:?} {far:?}");
            near.turn(None, wait).unwrap();
            far.turn(None, wait).unwrap();
        }
    }

    /// Until so much has come, of which as much as fits waits in the pipe.
    fn comes(near: &mut Relay, far: &mut Relay, reader: &mut PipeReader, text: &[u8]) {
        until(near, far, |_, far| {
            rustix::io::ioctl_fionread(&reader).unwrap() == text.len() as u64 && far.has_written()
        });
        let mut found = vec![0; text.len()];
        reader.read_exact(&mut found).unwrap();
        assert_eq!(found, text);
    }

    fn greeted(relay: &Relay, times: usize) -> bool {
        format!("{:?}", relay.channel).contains(&format!("greeted: {times},"))
    }

    #[test]
    fn streams_go_on_in_another_life() {
        let (mut near, mut far, mut writer, mut reader) = pair([7, 7]);
        writer.write_all(b"before").unwrap();
        comes(&mut near, &mut far, &mut reader, b"before");
        assert!(greeted(&near, 1), "{near:?}");
        // Another boot counts its sockets anew: this one may have had the same number there.
        near.life.0 = "another boot".to_owned();
        writer.write_all(b"elsewhere").unwrap();
        comes(&mut near, &mut far, &mut reader, b"elsewhere");
        assert!(greeted(&near, 2), "{near:?}");
        // As it is after a restart: the connections are other sockets.
        (near.life.1, far.life.1) = (0, 0);
        writer.write_all(b"after").unwrap();
        comes(&mut near, &mut far, &mut reader, b"after");
        assert_ne!(near.life.1, 0);
        far.say(&Frame::Exit(3));
        until(&mut near, &mut far, |near, _| !near.told.is_empty());
        assert_eq!(near.told(), [Frame::Exit(3)]);
    }

    #[test]
    fn who_has_another_secret_hears_nothing() {
        let (mut near, mut far, mut writer, reader) = pair([7, 8]);
        writer.write_all(b"secret").unwrap();
        until(&mut near, &mut far, |_, far| far.is_closed());
        // The first reason, and not that the other one has gone.
        let why = far.why_closed().to_owned();
        assert!(!why.is_empty() && !why.contains("closed"), "{why}");
        far.close("another");
        assert_eq!(far.why_closed(), why);
        assert_eq!(rustix::io::ioctl_fionread(&reader).unwrap(), 0);
    }

    /// No more is sent than there is room for, and signals pass all the same.
    #[test]
    fn a_stream_that_nobody_reads_holds_up_nothing_else() {
        let (mut near, mut far, mut writer, reader) = pair([7, 7]);
        let fills = std::thread::spawn(move || while writer.write_all(&[5; 4096]).is_ok() {});
        until(&mut near, &mut far, |near, _| near.sources[0].room == 0);
        near.say(&Frame::Signal(15));
        until(&mut near, &mut far, |_, far| !far.told.is_empty());
        assert_eq!(far.told(), [Frame::Signal(15)]);
        assert!(far.sinks[0].waits.len() <= WINDOW);
        drop((near, reader));
        fills.join().unwrap();
    }
}
