//! What the threads of a session's near end have together: they hear the far end, and reach the
//! client for it as far as messages name what is the client's.

use super::mirror::{Mirror, Scope};
use super::named::Named;
use super::near_lanes::NearLanes;
use super::ticker::Ticker;
use super::{Lent, stand_in};
use crate::host::ProxyHost;
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_device::Host;
use kedge_protocol::{Call, PeerName, Status};
use kedge_remote::{
    Answer, Aside, CHUNK, Dialer, Frames, Links, Receiver, Sender, Sending, ToNear, Which,
    put_patches,
};
use kedge_transport::{ReplyTo, SLOTS, offer_descriptor};
use kedge_wire::Bytes;
use std::fmt::Display;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Contexts that a far end may say are broken.
const MAX_BROKEN: u32 = 1 << 16;
/// What a session cannot do as yet.
pub(super) const NOT_FAR: &str = "its devices are on another machine, where this is not supported as yet: \
    give --gpu devices of this machine, or do without";

/// What the threads of the near end have together.
pub(crate) struct Near {
    /// As the user named it.
    pub(super) server: String,
    pub(super) host: Arc<ProxyHost>,
    pub(super) links: Arc<Links>,
    pub(super) aside: Mutex<Sending<Sender>>,
    pub(super) mirror: Mutex<Mirrored>,
    /// Whether there is any memory that the client and devices see.
    pub(super) shared: AtomicBool,
    pub(super) ticker: Arc<Ticker>,
    /// The newest message that was sent, and that is complete.
    pub(super) sent: AtomicU64,
    pub(super) completed: AtomicU64,
    /// The newest that may have devices look at any memory while it is carried out, and the newest
    /// that may have them change memory that the client sees.
    pub(super) works: AtomicU64,
    pub(super) writes: AtomicU64,
    /// Slots whose calls have been sent and not answered.
    pub(super) asked: [AtomicBool; SLOTS],
    /// Orders that have not been answered.
    pub(super) ordered: AtomicU32,
    /// What of the client the far end may reach.
    pub(super) named: Mutex<Named>,
    /// What of the client devices see at addresses of theirs.
    pub(super) lent: Lent,
    /// Contexts that are broken.
    pub(super) broken: AtomicU32,
    /// Those of them that wait for a descriptor.
    pub(super) exports: [AtomicBool; SLOTS],
    /// The client's.
    pub(super) socket: OwnedFd,
    pub(super) lanes: NearLanes,
}

/// The client's side of memory that both see.
pub(super) struct Mirrored {
    pub(super) mirror: Mirror,
    /// How often its changes have been told.
    pub(super) told: u64,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Near {
    /// Returns the server, as the user named it.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Makes a call one that the far end can carry out, where descriptors are in it.
    pub(super) fn crosses(&self, call: &mut Call) -> Result<(), CuError> {
        match call {
            Call::HandleImport { handle, ticket } => {
                let fd = self.host.tickets.take(*ticket)?;
                // What is no stand-in is no memory of another machine's.
                let name = stand_in::read(fd).ok_or(CuError::INVALID_VALUE)?;
                *call = Call::PeerOpen { handle: *handle, name };
            }
            Call::Adopt { .. } => {
                warn!(self.host.log, "{} failed: {NOT_FAR}", call.name());
                return Err(CuError::NOT_SUPPORTED);
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends the client a stand-in for memory that the far end has named: the reply that follows.
    fn exported(&self, reply: &[u8]) -> Vec<u8> {
        let sent = self.send_stand_in(reply);
        let mut bytes = Vec::new();
        kedge_wire::encode::<Status>(&sent.map_err(|error| error.0), &mut bytes);
        bytes
    }

    fn send_stand_in(&self, reply: &[u8]) -> Result<(), CuError> {
        let failed = |why: &dyn Display| {
            warn!(self.host.log, "cannot send the client a descriptor: {why}");
            CuError::OPERATING_SYSTEM
        };
        let named = kedge_wire::decode::<Result<PeerName, u32>>(reply);
        let name = named.map_err(|error| failed(&error))?.map_err(CuError)?;
        let fd = stand_in::make(&name).map_err(|error| failed(&error))?;
        offer_descriptor(self.socket.as_fd(), 0, fd.as_fd()).map_err(|error| failed(&error))
    }

    /// Hears the far end until the line ends: why it did.
    pub(super) fn hear(
        self: &Arc<Near>,
        mut frames: Frames<Receiver<Dialer>>,
        answer: &mpsc::Sender<Answer>,
    ) -> String {
        loop {
            let heard = match frames.receive::<ToNear>() {
                Ok(said) => self.heard(said, answer),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = heard {
                return format!("the devices of {} are gone: {why}", self.server);
            }
        }
    }

    fn heard(self: &Arc<Near>, said: ToNear, answer: &mpsc::Sender<Answer>) -> Result<(), String> {
        let host = &self.host;
        match said {
            ToNear::Reply { to, bytes } => {
                let asked = self.asked.get(to as usize);
                let slot = ReplyTo::of_number(to)
                    .filter(|_| asked.is_some_and(|asked| asked.swap(false, Ordering::SeqCst)))
                    .ok_or("it answers what was not asked")?;
                if self.exports[to as usize].load(Ordering::SeqCst) {
                    host.outlet.reply(slot, &self.exported(&bytes))?;
                } else {
                    host.outlet.reply(slot, &bytes)?;
                }
            }
            ToNear::Sticky { ctx, error: 0 } => host.faults.clear(&*host.outlet, ctx),
            ToNear::Sticky { ctx, error } => {
                let newly = host.faults.set(&*host.outlet, ctx, CuError(error));
                if newly && self.broken.fetch_add(1, Ordering::SeqCst) >= MAX_BROKEN {
                    return Err("it has broken more contexts than there are".into());
                }
            }
            ToNear::Completed { seq } => {
                if seq > self.sent.load(Ordering::SeqCst) {
                    return Err("it has completed what was not sent".into());
                }
                self.lanes.between(|| {
                    self.completed.fetch_max(seq, Ordering::SeqCst);
                    locked(&self.named).completed(seq);
                });
                host.outlet.set_completed(seq);
            }
            ToNear::Output { pending } => host.outlet.set_output_pending(pending),
            ToNear::HostFn { token } => {
                if !locked(&self.named).take_host_fn(token) {
                    return Err("it calls a host function that no message names".into());
                }
                self.host_function(token);
            }
            ToNear::Read { number, addr, len } => self.read(number, addr, len)?,
            ToNear::Write { addr, bytes } => {
                self.write(addr, &bytes)?;
                self.lanes.wrote(self, bytes.len());
            }
            ToNear::Bulk { lane, count } => self.lanes.wait_for(lane, count)?,
            ToNear::Patches { packed } => {
                if !locked(&self.mirror).mirror.apply(&packed) {
                    return Err("it has changed memory that is none".into());
                }
            }
            ToNear::Line { text } => host.log.on(&self.server).relay(&text),
            ToNear::Answer { answer: told } => {
                let one_less = |ordered: u32| ordered.checked_sub(1);
                self.ordered
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less)
                    .map_err(|_| "it answers what was not asked")?;
                answer.send(told).map_err(|_| "nobody waits for its answer")?;
            }
            ToNear::Closed { why } => return Err(why.into_inner()),
        }
        Ok(())
    }

    /// Keeps the aside connected until that is of no more use: why.
    pub(super) fn watch_aside(&self, mut aside: Receiver<Dialer>) -> String {
        // Nothing comes on it but acknowledgements.
        let why = match aside.read(&mut [0]) {
            Ok(_) => "bytes where none belong".to_owned(),
            Err(error) => error.to_string(),
        };
        format!("the devices of {} are gone: {why}", self.server)
    }

    /// Returns whether devices may be looking at what the client changes.
    pub(super) fn is_busy(&self) -> bool {
        self.completed.load(Ordering::SeqCst) < self.works.load(Ordering::SeqCst)
    }

    /// Tells what the client has changed: how often that has been done. `alone`: devices change
    /// nothing that it sees. Whoever reads a link must not call it, since it waits for room.
    pub(super) fn tell_changes(&self, scope: Scope<'_>, alone: bool) -> io::Result<u64> {
        let mut look = locked(&self.mirror).mirror.look(scope, alone)?;
        loop {
            // The mirror is not kept from whoever reads a link while this waits.
            self.links.wait_for_room(Which::Aside)?;
            let mut frame = locked(&self.aside).large();
            let Mirrored { mirror, told } = &mut *locked(&self.mirror);
            if !put_patches(false, &mut frame, |out| mirror.next(&mut look, out)) {
                locked(&self.aside).give_back(frame);
                return Ok(*told);
            }
            // Before anybody looks again, so that the newest bytes are the last to arrive.
            *told += 1;
            locked(&self.aside).give(frame)?;
        }
    }

    /// Has the client run a host function, and tells the far end once it has.
    fn host_function(self: &Arc<Near>, token: u64) {
        let near = self.clone();
        let done = move |_| {
            // What it has changed arrives before what was enqueued behind it may begin.
            if near.shared.load(Ordering::SeqCst) {
                let _ = near.tell_changes(Scope::All, false);
            }
            near.say(&Aside::HostFnDone { token });
        };
        self.host.host_function(token, Box::new(done));
    }

    /// Returns what has the client's memory.
    pub(super) fn client(&self) -> &ProxyHost {
        &self.host
    }

    /// Says something in the job's log.
    pub(super) fn log(&self, text: &str) {
        warn!(self.host.log, "{text}");
    }

    /// Returns whether a message names this memory, which devices may read.
    pub(super) fn may_read(&self, addr: u64, len: u64) -> bool {
        locked(&self.named).is_read(addr, len, self.completed.load(Ordering::SeqCst))
    }

    /// Writes the client's memory.
    pub(super) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), String> {
        let completed = self.completed.load(Ordering::SeqCst);
        if !locked(&self.named).is_written(addr, bytes.len() as u64, completed) {
            return Err(format!("it writes memory that no message names, at {addr:#x}"));
        }
        if let Err(error) = self.host.write_client(addr, bytes) {
            warn!(
                self.host.log,
                "a copy to {} bytes at {addr:#x} of the program's memory failed: {error}",
                bytes.len()
            );
        }
        Ok(())
    }

    fn read(self: &Arc<Near>, number: u64, addr: u64, len: u32) -> Result<(), String> {
        if len as usize > CHUNK {
            return Err("it asks for more than a frame holds".into());
        }
        if !self.may_read(addr, len.into()) {
            return Err(format!("it reads memory that no message names, at {addr:#x}"));
        }
        if self.lanes.read(self, number, addr, len) {
            return Ok(());
        }
        // The far end's reader of the aside waits for nobody, so that room is made whatever waits
        // for this thread.
        self.links.wait_for_room(Which::Aside).map_err(|error| error.to_string())?;
        let mut bytes = vec![0; len as usize];
        let read = self.host.read_client(addr, &mut bytes).map_err(|error| error.0);
        let bytes = read.map(|()| Bytes::new(bytes).unwrap_or_default());
        self.say(&Aside::Bytes { number, bytes });
        Ok(())
    }

    /// A connection that is broken ends the other as well.
    pub(crate) fn say(&self, message: &Aside) {
        let mut aside = locked(&self.aside);
        let _ = aside.add(message).and_then(|()| aside.flush());
    }
}

#[cfg(test)]
#[path = "near_tests.rs"]
mod tests;
