//! Moves from and to devices on another machine, at the near end: what the two proxies say to each
//! other passes through here.

use super::image_way::ImageStream;
use super::open::{Client, open_session};
use super::session::Session;
use super::shared_in;
use crate::error::LineError;
use crate::error::RestoreError;
use crate::host::ProxyHost;
use crate::moving::{Message, Reply, Way, pass, receive, receive_saved, send, send_saved};
use kedge_control::gpu::Server;
use kedge_gpu_image::SavedProxy;
use kedge_remote::{Answer, ImageAsk};
use std::io::{self, Read};
use std::iter::empty;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, Scope};
use std::time::Duration;

/// For the far end to say that all is there, once it has told the other proxy so.
const LIMIT: Duration = Duration::from_secs(60);

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
