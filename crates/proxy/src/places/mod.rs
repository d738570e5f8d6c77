//! Devices of several places for one client: an executor over executors
//! (docs/design/0033-places.md). A place is a session with a server, or devices of this machine.
//!
//! [`table`] knows which place has what; [`hub`] is what the places' threads have together;
//! [`gates`] holds a stream until another place is ready, which [`crossing`] makes use of; [`open`]
//! begins, or [`restore`] from what [`image`] has written.

mod crossing;
mod gates;
pub(crate) mod hub;
mod image;
pub(crate) mod open;
pub(crate) mod restore;
mod table;

use crate::error::CaptureError;
use crate::executor::{Build, Captured, Executor, NearEnd, Room, Shares};
use crate::moving::{Follows, Shown};
use hub::Hub;
use image::{Newest, Rooms};
use kedge_control::sharing::{Bond, What};
use kedge_cuda_types::CuError;
use kedge_device::{Host, SnapshotError};
use kedge_protocol::{Call, CtxId, Message, PeerName, Post, StreamId, StreamOp};
use kedge_transport::{Incoming, ReplyTo};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::{At, Route, Table};

/// What devices of several places cannot do as yet, and what mends it.
const NOT_SEVERAL: &str = "is not supported as yet for devices of several places: give --gpu \
    devices of one place, or do without";

/// For what is held between places to go on, once all places rest.
const SETTLING: Duration = Duration::from_millis(1);

/// A place.
pub(crate) struct Place {
    pub(crate) executor: Box<dyn Executor>,
    /// Whether a stream there can be held until another place is ready. A GPU's driver has one
    /// thread for host functions: one that waits would keep the others from being called.
    pub(crate) holds: bool,
    /// As `--gpu` gave it, and as which of the client's devices it sees those that it chose.
    pub(crate) gpu: String,
    pub(crate) windows: Vec<u32>,
    /// Whether its devices are on another machine.
    pub(crate) far: bool,
}

impl Place {
    /// Returns whether its devices are on another machine.
    fn is_far(&self) -> bool {
        self.far
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gpu)
    }
}

pub(crate) struct Places {
    places: Vec<Place>,
    table: Table,
    hub: Arc<Hub>,
    /// What the client was told of the driver.
    driver_version: u32,
    /// What its next image may build on.
    newest: Arc<Newest>,
}

impl Places {
    /// Sends a place what a client's message `seq` wants there.
    fn send(&mut self, at: At, seq: u64, message: Message, reply_to: Option<ReplyTo>) {
        let Some(place) = self.places.get_mut(at) else { return };
        let seq = self.hub.sent(at, seq);
        // It may be carried out long after the client has posted it.
        place.executor.execute(Incoming { seq, message, reply_to, place: None });
    }

    /// Has a place's stream do something.
    fn enqueue(&mut self, at: At, seq: u64, stream: StreamId, op: StreamOp) {
        self.send(at, seq, Message::Post { post: Post::Enqueue { stream, op } }, None);
    }

    /// Breaks a context by a post that is not supported: it has no other answer.
    fn refuse_post(&self, at: At, ctx: Option<CtxId>, what: &str) {
        self.hub.log(&format!("{what} {NOT_SEVERAL}"));
        if let (Some(ctx), Some(host)) = (ctx, self.hub.host(at)) {
            host.fault(ctx, CuError::NOT_SUPPORTED);
        }
    }

    fn refuse_call(&self, what: &str, call: &Call, to: ReplyTo) {
        self.hub.log(&format!("{}: {what} {NOT_SEVERAL}", call.name()));
        if let Call::HandleImport { ticket, .. } | Call::Adopt { ticket, .. } = call {
            // Nobody else takes it.
            drop(self.hub.tickets().take(*ticket));
        }
        self.hub.answer(to, Err(CuError::NOT_SUPPORTED));
    }

    /// Ends what places have done that others could not.
    fn undo(&mut self, seq: u64) {
        for (at, message) in self.hub.to_undo() {
            self.send(at, seq, message, None);
        }
    }

    /// Sends a message to all places. A call has one answer, once all have given theirs; what ends
    /// what it has begun is sent where others could not.
    fn send_all(
        &mut self,
        seq: u64,
        (message, undo): (&Message, Option<Box<Post>>),
        to: Option<&ReplyTo>,
    ) {
        if let (Some(to), Message::Call { .. }) = (to, message) {
            let undo = undo.map(|post| Message::Post { post: *post });
            self.hub.asks_all(to, self.places.len(), undo);
        }
        for at in 0..self.places.len() {
            self.send(at, seq, message.clone(), to.cloned());
        }
    }

    /// Takes note of contexts that begin and end.
    fn note(&self, message: &Message, at: At) {
        match message {
            Message::Call { call: Call::CtxCreate { ctx, .. } } => {
                self.hub.context_begins(*ctx, at);
            }
            Message::Post { post: Post::CtxDestroy { ctx } } => self.hub.context_ends(*ctx),
            _ => {}
        }
    }

    fn carry_out(&mut self, seq: u64, message: Message, reply_to: Option<ReplyTo>) {
        match (self.table.route(&message), message, reply_to) {
            (Route::To(at), message, reply_to) => {
                self.note(&message, at);
                self.send(at, seq, message, reply_to);
            }
            (Route::Stream(at), Message::Post { post: Post::Enqueue { stream, op } }, _) => {
                self.stream_op(at, seq, stream, op);
            }
            (Route::Output, message, Some(to)) => {
                let at = self.hub.asks_output(&to);
                self.send(at, seq, message, Some(to));
            }
            (Route::All { undo }, message, to) => self.send_all(seq, (&message, undo), to.as_ref()),
            (Route::Answered(answer), _, Some(to)) => self.hub.answer(to, answer),
            (Route::Refused(what), Message::Call { call }, Some(to)) => {
                self.refuse_call(what, &call, to);
            }
            (Route::Refused(what), Message::Post { post }, _) => {
                let (at, ctx) = self.table.of_graph_post(&post);
                self.refuse_post(at, ctx, what);
            }
            // The ring lets no call through without a slot.
            (Route::Stream(_) | Route::Output | Route::Answered(_) | Route::Refused(_), ..) => {}
        }
    }
}

fn not_several(what: &str) -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, format!("{what} {NOT_SEVERAL}"))
}

impl Executor for Places {
    fn execute(&mut self, incoming: Incoming) {
        let Incoming { seq, message, reply_to, .. } = incoming;
        self.undo(seq);
        self.carry_out(seq, message, reply_to);
        self.hub.handed_on(seq);
    }

    fn flush(&mut self) -> Duration {
        let pauses = self.places.iter_mut().map(|place| place.executor.flush());
        let pause = pauses.filter(|pause| !pause.is_zero()).min();
        self.hub.publish();
        pause.unwrap_or_default()
    }

    fn spin(&self, spin: Duration) -> Duration {
        self.places.iter().map(|place| place.executor.spin(spin)).max().unwrap_or(spin)
    }

    /// One place may wait for another: all are asked until all rest and nothing is held.
    fn rest(&mut self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            self.undo(self.hub.newest());
            // Each is asked, also behind one that works: what waits in its line is sent by that.
            let rests = |all, place: &mut Place| place.executor.rest(left) && all;
            let all = self.places.iter_mut().fold(true, rests);
            if all && self.hub.gates().is_empty() && !self.hub.is_to_undo() {
                self.hub.publish();
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(SETTLING.min(left));
        }
    }

    fn room(&self) -> Arc<dyn Room> {
        Arc::new(Rooms(self.places.iter().map(|place| place.executor.room()).collect()))
    }

    fn capture(
        &mut self,
        near: &NearEnd<'_>,
        on: Build,
    ) -> Result<Box<dyn Captured>, CaptureError> {
        self.take(near, on)
    }

    fn show(&mut self, _: &NearEnd<'_>, _: Follows) -> Result<Box<dyn Shown>, CaptureError> {
        Err(not_several("a move").into())
    }

    fn shares(&mut self) -> Result<Shares, SnapshotError> {
        Ok(Shares { shares: Vec::new(), released: Vec::new() })
    }

    fn adopt(&mut self, _: What) -> Result<PeerName, SnapshotError> {
        Err(not_several("memory of another process"))
    }

    fn bind(&mut self, _: Vec<Bond>) {}

    /// Each place comes back with its next message, or when all are to rest.
    fn swap_out(&mut self) -> Result<u64, CaptureError> {
        let mut gone = self.places.iter_mut().map(|place| place.executor.swap_out());
        gone.try_fold(0, |sum: u64, bytes| Ok(sum.saturating_add(bytes?)))
    }
}
