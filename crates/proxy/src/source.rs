//! The proxy that has the client: gives what its devices hold to the one that will have it.

use crate::capture::{Capture, Give, Sink};
use crate::changes::{Tracked, Written};
use crate::error::CaptureError;
use crate::error::LineError;
use crate::moving::{
    Crossed, Follows, MAX_PARTS, Message, Reply, Shown, Way, receive, send, send_saved,
};
use crate::owner::Owner;
use kedge_device::{HeldPart, HeldPlace, Known};
use kedge_socket::frame::{self, Deadline};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The other may make objects and fill memory for so long without a word.
const SILENCE: Duration = Duration::from_secs(120);

/// A move, at its beginning.
pub(crate) struct Source {
    stream: UnixStream,
    pub(crate) owner: Owner,
    follows: Follows,
    taken: Option<Taken>,
}

struct Taken {
    shown: Box<dyn Shown>,
    last: bool,
    /// It has crossed, and is kept: to let go of it takes time that the client would wait for.
    crossed: bool,
}

impl Source {
    pub(crate) fn new(stream: OwnedFd, owner: Owner) -> std::io::Result<Source> {
        let stream = UnixStream::from(stream);
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Source { stream, owner, follows: Follows::Nothing, taken: None })
    }

    /// What the next round is told of what has crossed; `None` where another process knows.
    pub(crate) fn known(&self) -> Result<Option<Arc<Known>>, CaptureError> {
        Ok(match &self.follows {
            Follows::Nothing => {
                let tracked = Tracked::to_move().map_err(CaptureError::Keys)?;
                Some(Arc::clone(tracked.known()))
            }
            Follows::Here(tracked) => Some(Arc::clone(tracked.known())),
            Follows::There => None,
        })
    }

    /// Returns what the next round builds on.
    pub(crate) fn follows(&mut self) -> Follows {
        std::mem::take(&mut self.follows)
    }

    /// Takes what the devices hold; how many bytes.
    pub(crate) fn take(&mut self, shown: Box<dyn Shown>, last: bool) -> u64 {
        let bytes = shown.bytes();
        self.taken = Some(Taken { shown, last, crossed: false });
        bytes
    }

    /// Whether the client may have moved already.
    pub(crate) fn may_be_over(&self) -> bool {
        self.taken.as_ref().is_some_and(|taken| taken.last && taken.crossed)
    }

    /// Sends what the other has not got, at most so many bytes a second if `rate` is not 0: how
    /// many bytes, and whether it can take them.
    pub(crate) fn cross(&mut self, rate: u64) -> Result<(u64, bool), CaptureError> {
        let Some(mut taken) = self.taken.take() else {
            return Err(LineError::Order.into());
        };
        let (to, mut from) = (&self.stream, &self.stream);
        let mut to = Paced { to, rate, begin: Instant::now(), bytes: 0 };
        let socket = Some(self.stream.as_fd());
        let mut way = Way { to: &mut to, reply: &mut || receive(&mut from), socket };
        let Some(Crossed { bytes, follows }) = taken.shown.cross(taken.last, &mut way)? else {
            return Ok((0, false));
        };
        self.follows = follows;
        if taken.last {
            taken.crossed = true;
            self.taken = Some(taken);
        }
        Ok((bytes, true))
    }
}

/// What is not written faster than at a rate, in bytes a second; 0: as fast as it goes.
struct Paced<W> {
    to: W,
    rate: u64,
    begin: Instant,
    bytes: u64,
}

impl<W: Write> Write for Paced<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.bytes += written as u64;
        if self.rate > 0 {
            let due = Duration::from_secs_f64(self.bytes as f64 / self.rate as f64);
            std::thread::sleep(due.saturating_sub(self.begin.elapsed()));
        }
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// A capture of devices in this process.
pub(crate) struct ShownHere(Option<Capture>);

impl ShownHere {
    pub(crate) fn new(capture: Capture) -> ShownHere {
        ShownHere(Some(capture))
    }
}

impl Shown for ShownHere {
    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, Capture::bytes)
    }

    fn cross(&mut self, last: bool, way: &mut Way<'_>) -> Result<Option<Crossed>, CaptureError> {
        let capture = self.0.as_ref().ok_or(LineError::Order)?;
        let Some((bytes, written)) = give(capture, last, way)? else { return Ok(None) };
        let mut follows = Follows::Nothing;
        if !last && let Some(mut tracked) = self.0.take().and_then(Capture::into_tracked) {
            // Nothing asks which file has it.
            tracked.succeed(0, written);
            follows = Follows::Here(tracked);
        }
        Ok(Some(Crossed { bytes, follows }))
    }
}

/// Sends a capture's notes, images and bytes: how many, and what the other has then.
fn give(
    capture: &Capture,
    last: bool,
    way: &mut Way<'_>,
) -> Result<Option<(u64, Written)>, CaptureError> {
    send(&mut way.to, &Message::Round { last })?;
    send_saved(&mut way.to, &capture.saved)?;
    let socket = way.socket;
    let mut line = Line { to: Mutex::new(&mut *way.to), bytes: AtomicU64::new(0), lends: false };
    capture.give(&line, Give::Images)?;
    line.say(&Message::Make {})?;
    let reply = (way.reply)()?;
    let is_near = reply == (Reply::Near {});
    if !is_done(reply)? {
        return Ok(None);
    }
    if let (true, Some(socket)) = (is_near, socket) {
        line.lends = lend(capture, &line, way.reply, socket)?;
    }
    let written = capture.give(&line, Give::Bytes)?;
    line.say(&Message::End {})?;
    if !is_done((way.reply)()?)? {
        return Ok(None);
    }
    Ok(Some((line.bytes.into_inner(), written)))
}

/// Whether the other has done what it was told.
fn is_done(reply: Reply) -> Result<bool, LineError> {
    match reply {
        Reply::Done {} | Reply::Near {} => Ok(true),
        Reply::Unfit { .. } => Ok(false),
        Reply::Failed { why } => Err(LineError::Refused(why.into_inner())),
    }
}

/// Gives the other the devices' memory that the capture lies in, if it lies in any and the other
/// can take it: whether it has it.
fn lend(
    capture: &Capture,
    line: &Line<'_>,
    reply: &mut (dyn FnMut() -> Result<Reply, LineError> + Send),
    socket: BorrowedFd<'_>,
) -> Result<bool, CaptureError> {
    // Without descriptors the bytes go themselves.
    let parts = capture.snapshot.lend().unwrap_or_default();
    if parts.is_empty() || parts.len() > MAX_PARTS {
        return Ok(false);
    }
    line.say(&Message::Lend { parts: parts.len() as u32 })?;
    for HeldPart { device, bytes, fd } in &parts {
        let part = Message::Part { device: *device, bytes: *bytes };
        let sent = frame::send(socket, &part, &[fd.as_fd()], Deadline::after(SILENCE));
        sent.map_err(LineError::from)?;
    }
    Ok(is_done(reply()?)?)
}

/// The way to the other, for several threads.
struct Line<'a> {
    to: Mutex<&'a mut (dyn Write + Send)>,
    bytes: AtomicU64,
    /// Whether the other has the memory that the bytes lie in.
    lends: bool,
}

impl Line<'_> {
    fn say(&self, message: &Message) -> Result<(), LineError> {
        send(&mut *self.to.lock().unwrap_or_else(PoisonError::into_inner), message)
    }
}

impl Sink for Line<'_> {
    fn put(&self, number: u64, from: u64, bytes: &[u8]) -> Result<(), CaptureError> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let len = bytes.len() as u64;
        send(&mut *to, &Message::Bytes { number, from, len })?;
        to.write_all(bytes).map_err(LineError::from)?;
        self.bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    fn known(&self, _number: u64, _from: u64, _bytes: u64) -> Result<(), CaptureError> {
        Ok(())
    }

    fn takes_lent(&self) -> bool {
        self.lends
    }

    fn lent(
        &self,
        number: u64,
        from: u64,
        len: u64,
        HeldPlace { device, offset }: HeldPlace,
    ) -> Result<(), CaptureError> {
        self.say(&Message::There { number, from, len, device, offset })?;
        self.bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }
}
