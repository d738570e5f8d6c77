//! Moves from and to devices on another machine, at the near end: what the two proxies say to each
//! other passes through here.

use super::image_way::{ImageStream, ImageWay};
use super::open::{Client, open_session};
use super::session::{Near, Session};
use super::shared_in;
use crate::error::CaptureError;
use crate::error::LineError;
use crate::error::RestoreError;
use crate::host::ProxyHost;
use crate::moving::{
    Crossed, Follows, Message, Passed, Reply, Shown, Way, pass, receive, receive_saved, send,
    send_saved,
};
use kedge_control::gpu::Server;
use kedge_gpu_image::SavedProxy;
use kedge_remote::{Answer, Aside, Drained, ImageAsk, ImageLineError, read_one};
use std::io::{self, Read};
use std::iter::empty;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, Scope};
use std::time::Duration;

/// Longest last word.
const MAX_LAST: usize = 8 << 10;
/// For the far end to say that all is there, once it has told the other proxy so.
const LIMIT: Duration = Duration::from_secs(60);

/// What devices on another machine held when a round began: it lies there.
pub(super) struct ShownThere {
    pub(super) way: ImageWay,
    pub(super) near: Arc<Near>,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

impl Shown for ShownThere {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn cross(&mut self, last: bool, way: &mut Way<'_>) -> Result<Option<Crossed>, CaptureError> {
        let ask = ImageAsk::Cross { number: self.number, last };
        let ImageStream { mut reading, mut writing, end: _end } = self.way.open(&ask)?;
        let Message::Round { last } = receive(&mut reading)? else {
            return Err(LineError::Order.into());
        };
        let saved = receive_saved(&mut reading)?;
        send(&mut way.to, &Message::Round { last })?;
        send_saved(&mut way.to, &saved)?;
        let Passed { bytes, ended } = pass(&mut reading, way, &mut writing)?;
        // It follows on from what the other has once it knows that.
        match read_one(&mut reading, MAX_LAST).map_err(ImageLineError::from)? {
            Drained::Done { .. } => {}
            Drained::Failed { why } => return Err(ImageLineError::Far(why.into_inner()).into()),
            Drained::Piece { .. } => return Err(LineError::Order.into()),
        }
        let crossed = Crossed { bytes, follows: Follows::There };
        Ok((ended == (Reply::Done {})).then_some(crossed))
    }
}

impl Drop for ShownThere {
    fn drop(&mut self) {
        self.near.say(&Aside::Forget { number: self.number });
    }
}

/// Hears a target's replies on a thread of its own: whoever sends waits for room, which comes by
/// what is read.
pub(super) fn replies<'scope, R: Read + Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    mut reading: R,
) -> impl FnMut() -> Result<Reply, LineError> + Send + use<R> {
    let (heard, replies) = channel();
    scope.spawn(move || {
        while let Ok(reply) = receive::<Reply>(&mut reading) {
            let _ = heard.send(reply);
        }
    });
    move || replies.recv().map_err(|_| LineError::Broken(io::ErrorKind::BrokenPipe.into()))
}

/// Where a client goes.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) server: &'a Server,
    pub(crate) devices: &'a [u32],
    /// How long to try to go on after a cut.
    pub(crate) reconnect: Duration,
}

/// Takes all rounds of a move from `stream` to devices on another machine: the session whose far
/// end has them.
pub(crate) fn arrive(
    stream: &UnixStream,
    to: Place<'_>,
    host: &Arc<ProxyHost>,
    shared: &OwnedFd,
    socket: BorrowedFd<'_>,
) -> Result<(Session, SavedProxy), RestoreError> {
    let Place { server, devices, reconnect } = to;
    let (mut stream, mut back) = (stream, stream);
    let Message::Round { mut last } = receive(&mut stream)? else {
        return Err(LineError::Order.into());
    };
    let mut saved = receive_saved(&mut stream)?;
    let restore = Some(saved.position);
    let (hello, choice, windows) = (&saved.hello, &saved.hello.choice, &[][..]);
    let client = Client { hello, choice, windows, host, shared, socket, reconnect, restore };
    let (mut session, _) = open_session(server, devices, &client)?;
    let ImageStream { reading, end, .. } = session.way().open(&ImageAsk::Arrive {})?;
    // It may make objects and fill memory for as long as it needs.
    reading.set_patience(None);
    let mut to = end.sender();
    let passed = thread::scope(|scope| {
        let mut reply = replies(scope, reading);
        let mut way = Way { to: &mut to, reply: &mut reply, socket: None };
        let passed = loop {
            // The far end says at its last that all up to there are complete.
            session.goes_on_from(saved.position);
            send(&mut way.to, &Message::Round { last })?;
            send_saved(&mut way.to, &saved)?;
            let passed = pass(&mut stream, &mut way, &mut back)?;
            if last || passed.ended != (Reply::Done {}) {
                break passed;
            }
            // What the client and devices both see is there before the client waits for it.
            session.bring_all_over().map_err(LineError::from)?;
            let Message::Round { last: next } = receive(&mut stream)? else {
                return Err(LineError::Order.into());
            };
            last = next;
            saved = receive_saved(&mut stream)?;
        };
        drop(end);
        Ok::<_, RestoreError>(passed)
    });
    match passed?.ended {
        Reply::Done {} | Reply::Near {} => {}
        Reply::Unfit { .. } => return Err(RestoreError::Damaged("another proxy takes its place")),
        Reply::Failed { why } => return Err(RestoreError::Far(why.into_inner())),
    }
    match session.answer(LIMIT) {
        Some(Answer::Yes {}) => {}
        Some(Answer::Failed { why }) => return Err(RestoreError::Far(why.into_inner())),
        _ => return Err(RestoreError::Far("it does not answer".into())),
    }
    session.agree(empty(), shared_in(&saved));
    session.remember(&saved.steps);
    Ok((session, saved))
}
