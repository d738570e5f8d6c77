//! The client's side of a connection.

use crate::descriptors;
use crate::error::{ConnectError, Dead};
use crate::futex;
use crate::greeting::{GREETING_MAGIC, Greeting};
use crate::layout::{HOST_FNS, STICKY, slot_state};
use crate::memory::{self, Segment};
use crate::outbox;
use crate::ring::Producer;
use crate::slots::{self, LIVENESS_SLICE, SlotMap};
use kedge_cuda_types::CuError;
use kedge_protocol::{
    Call, CtxId, DeviceChoice, Hello, Message, PROTOCOL_VERSION, Post, Refusal, Welcome,
};
use kedge_socket::SocketError;
use kedge_socket::address;
use kedge_socket::frame::{self, Deadline};
use kedge_wire::{Text, Wire, Writer};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the proxy may take to start and to answer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);
/// Calls of one thread that wait for their replies at the same time: others have slots left.
const TOGETHER: usize = 64;

/// One process's connection to its proxy. No threads of its own; every method may be called from
/// any thread. After `fork()` the child must not use it.
#[derive(Debug)]
pub struct Client {
    segment: Arc<Segment>,
    shared: OwnedFd,
    socket: OwnedFd,
    producer: Mutex<Producer>,
    slots: SlotMap,
    /// Sequence number of the newest post.
    posted: AtomicU64,
    /// The same of the newest that may use memory: not one that only notes what is allocated.
    worked: AtomicU64,
    dead: AtomicBool,
    /// How long a caller spins for its reply, in microseconds.
    patience: AtomicU64,
    /// Held by who waits for a descriptor.
    taking: Mutex<()>,
}

impl Client {
    /// Connects to the supervisor's socket, maps the shared arena, reserves the device arenas'
    /// address range without access, and shakes hands with the proxy. `program` names this process
    /// in the job's log, `choice` the devices that it wants. Once a process: the mappings stay.
    pub fn connect(
        socket: &Path,
        program: &str,
        choice: DeviceChoice,
    ) -> Result<(Client, Welcome), ConnectError> {
        let stream = address::connect(socket)
            .map_err(|source| ConnectError::Socket { path: socket.to_owned(), source })?;
        Client::connect_over(stream.into(), program, choice)
    }

    /// Connects as [`Client::connect`] does, over a socket that leads to a proxy already.
    pub fn connect_over(
        socket: OwnedFd,
        program: &str,
        choice: DeviceChoice,
    ) -> Result<(Client, Welcome), ConnectError> {
        let shared = memory::create_shared_arena()
            .map_err(|source| ConnectError::System { what: "make the shared arena", source })?;
        memory::map_shared_arena(shared.as_fd())?;
        memory::reserve_device_arenas()?;
        Client::handshake(socket, shared, program, choice)
    }

    /// Shakes hands alone, over a connected socket and without arenas: for tests.
    #[doc(hidden)]
    pub fn connect_bare(socket: OwnedFd, program: &str) -> Result<(Client, Welcome), ConnectError> {
        let shared = memory::create_shared_arena()
            .map_err(|source| ConnectError::System { what: "make the shared arena", source })?;
        Client::handshake(socket, shared, program, DeviceChoice::default())
    }

    fn handshake(
        socket: OwnedFd,
        shared: OwnedFd,
        program: &str,
        choice: DeviceChoice,
    ) -> Result<(Client, Welcome), ConnectError> {
        let deadline = Deadline::after(HANDSHAKE_TIMEOUT);
        let (greeting, _) = frame::receive::<Greeting>(socket.as_fd(), deadline)?;
        if greeting.magic != GREETING_MAGIC {
            return Err(SocketError::NotKedge.into());
        }
        if greeting.version != PROTOCOL_VERSION {
            let (client, proxy) = (PROTOCOL_VERSION, greeting.version);
            return Err(ConnectError::Version { client, proxy });
        }
        allow_reading(greeting.pid);
        let segment = Segment::create()
            .map_err(|source| ConnectError::System { what: "make the ring", source })?;
        // The ring's own header is as good a word to probe as any, and stays where it is.
        let probe = &segment.header().magic;
        let hello = Hello {
            version: PROTOCOL_VERSION,
            pid: std::process::id(),
            probe_addr: probe.as_ptr() as u64,
            probe_value: probe.load(Ordering::Relaxed),
            program: Text::truncated(program.to_owned()),
            choice,
        };
        frame::send(socket.as_fd(), &hello, &[segment.fd(), shared.as_fd()], deadline)?;
        let (answer, _) = frame::receive::<Result<Welcome, Refusal>>(socket.as_fd(), deadline)?;
        let welcome = answer.map_err(|Refusal { code, reason }| ConnectError::Refused {
            code: CuError(code),
            reason: reason.into_inner(),
        })?;
        Ok((Client::new(socket, shared, Arc::new(segment)), welcome))
    }

    pub(crate) fn new(socket: OwnedFd, shared: OwnedFd, segment: Arc<Segment>) -> Client {
        Client {
            segment,
            shared,
            socket,
            producer: Mutex::new(Producer::new()),
            slots: SlotMap::default(),
            posted: AtomicU64::new(0),
            worked: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            patience: AtomicU64::new(slots::REPLY_SPIN.as_micros() as u64),
            taking: Mutex::new(()),
        }
    }

    /// Appends a one-way message. Returns once it is in the ring; waits while the ring is full.
    pub fn post(&self, post: &Post) -> Result<(), Dead> {
        let mut producer = self.producer()?;
        producer.buffer.clear();
        Message::put_post(post, &mut Writer::new(&mut producer.buffer));
        let seq = producer.push(&self.segment, None, || self.alive()).ok_or(Dead)?;
        // Under the lock: neither goes back. Who sees what is posted sees which of it is work.
        if !matches!(post, Post::MemAlloc { .. } | Post::MemFree { .. }) {
            self.worked.store(seq, Ordering::Release);
        }
        self.posted.store(seq, Ordering::Release);
        Ok(())
    }

    /// Appends `call` and waits for its reply, whose type the call's documentation names. Other
    /// threads post and call meanwhile.
    pub fn call<T: Wire>(&self, call: &Call) -> Result<T, Dead> {
        let slot = self.take_slot()?;
        self.ask(call, slot)?;
        self.reply(slot)
    }

    /// Appends calls of which none depends on another's reply, as many at a time as there is room
    /// for, and returns their replies in order. The proxy carries them out one after the other.
    pub fn call_each<T: Wire>(&self, calls: &[Call]) -> Result<Vec<T>, Dead> {
        let mut replies = Vec::with_capacity(calls.len());
        let mut rest = calls;
        while !rest.is_empty() {
            let mut slots = vec![self.take_slot()?];
            let most = rest.len().min(TOGETHER);
            slots.extend(std::iter::from_fn(|| self.slots.take()).take(most - 1));
            let (now, later) = rest.split_at(slots.len());
            now.iter().zip(&slots).try_for_each(|(call, slot)| self.ask(call, *slot))?;
            for slot in slots {
                replies.push(self.reply(slot)?);
            }
            rest = later;
        }
        Ok(replies)
    }

    /// Appends a call whose reply is to be in a slot.
    fn ask(&self, call: &Call, slot: u32) -> Result<(), Dead> {
        self.segment.header().slots[slot as usize]
            .state
            .store(slot_state::PENDING, Ordering::Relaxed);
        let mut producer = self.producer()?;
        producer.buffer.clear();
        Message::put_call(call, &mut Writer::new(&mut producer.buffer));
        producer.push(&self.segment, Some(slot), || self.alive()).ok_or(Dead).map(drop)
    }

    /// Waits for the reply in a slot, and gives that back.
    fn reply<T: Wire>(&self, slot: u32) -> Result<T, Dead> {
        // A slot whose proxy died stays taken: nothing will be called again.
        let ready = &self.segment.header().slots[slot as usize];
        let patience = Duration::from_micros(self.patience.load(Ordering::Relaxed));
        if !slots::wait_ready(ready, patience, || self.alive()) {
            return Err(Dead);
        }
        let mut reply = Vec::new();
        let copied = slots::copy_reply(&self.segment, slot, &mut reply);
        self.slots.give_back(slot);
        match copied.and_then(|()| kedge_wire::decode(&reply).ok()) {
            Some(value) => Ok(value),
            None => {
                // A proxy that answers nonsense is as good as none.
                self.dead.store(true, Ordering::Relaxed);
                Err(Dead)
            }
        }
    }

    /// Has callers spin for `patience` before they sleep, from now on. It pays where waking costs
    /// much of what is waited for.
    pub fn set_patience(&self, patience: Duration) {
        let patience = u64::try_from(patience.as_micros()).unwrap_or(u64::MAX);
        self.patience.store(patience, Ordering::Relaxed);
    }

    fn take_slot(&self) -> Result<u32, Dead> {
        loop {
            if self.dead.load(Ordering::Relaxed) {
                return Err(Dead);
            }
            if let Some(slot) = self.slots.take() {
                return Ok(slot);
            }
            std::thread::sleep(Duration::from_micros(200));
            if !self.alive() {
                return Err(Dead);
            }
        }
    }

    fn producer(&self) -> Result<MutexGuard<'_, Producer>, Dead> {
        if self.dead.load(Ordering::Relaxed) {
            return Err(Dead);
        }
        Ok(self.producer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the context's sticky error, if an execution fault has set one. One shared-memory
    /// load.
    #[inline]
    pub fn sticky(&self, ctx: CtxId) -> Option<CuError> {
        let header = self.segment.header();
        if header.faults.load(Ordering::Acquire) == 0 {
            return None;
        }
        let value = header.sticky[ctx.0 as usize % STICKY].load(Ordering::Acquire);
        let (owner, code) = ((value >> 32) as u32, value as u32);
        (owner == ctx.0 && code != 0).then_some(CuError(code))
    }

    /// Returns the sequence number of this process's newest post.
    pub fn posted(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    /// Returns the sequence number up to which all posts are complete, work on the device included.
    pub fn completed(&self) -> u64 {
        self.segment.header().completed.0.load(Ordering::Acquire)
    }

    /// Returns whether everything that this process posted is complete. `false` may be stale,
    /// `true` holds until the next post.
    pub fn is_idle(&self) -> bool {
        self.completed() >= self.posted()
    }

    /// Returns whether all work that this process posted is complete, so that no memory is in use:
    /// messages that only note what is allocated, and what is free, may still be under way.
    pub fn is_at_rest(&self) -> bool {
        self.completed() >= self.worked.load(Ordering::Acquire)
    }

    /// Returns whether device printf or assert output waits to be taken with `Call::TakeOutput`.
    pub fn output_pending(&self) -> bool {
        self.segment.header().output.load(Ordering::Acquire) != 0
    }

    /// Blocks until the proxy wants a host function run and returns its token. For one thread.
    pub fn next_host_fn(&self) -> Result<u64, Dead> {
        let queue = &self.segment.header().host_fns;
        let head = queue.head.0.load(Ordering::Relaxed);
        loop {
            let tail = queue.tail.0.load(Ordering::Acquire);
            if tail != head {
                let token = queue.tokens[head as usize % HOST_FNS].load(Ordering::Relaxed);
                queue.head.0.store(head.wrapping_add(1), Ordering::Release);
                return Ok(token);
            }
            futex::wait(&queue.tail.0, tail, Some(4 * LIVENESS_SLICE));
            if queue.tail.0.load(Ordering::Acquire) == tail && !self.alive() {
                return Err(Dead);
            }
        }
    }

    /// Tells the proxy that host function `token` has returned. For the thread that got the token.
    /// By the socket and not the ring: the driver may hold up the ring's reader until it is told.
    pub fn host_fn_done(&self, token: u64) -> Result<(), Dead> {
        frame::send_all(self.socket.as_fd(), &token.to_le_bytes()).map_err(|_| Dead)
    }

    /// Sends a descriptor ahead of the call that names its `ticket` ([`TICKET`](crate::TICKET) is
    /// set).
    pub fn send_descriptor(&self, ticket: u64, fd: BorrowedFd<'_>) -> Result<(), Dead> {
        descriptors::send(self.socket.as_fd(), ticket, fd).map_err(|_| Dead)
    }

    /// Makes a call whose reply is a `Status`, and whose success brings a descriptor.
    /// OPERATING_SYSTEM where this process has no room for another.
    pub fn call_for_descriptor(&self, call: &Call) -> Result<Result<OwnedFd, CuError>, Dead> {
        // Replies come in any order, descriptors in that of their calls.
        let _one_at_a_time = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(code) = self.call::<Result<(), u32>>(call)? {
            return Ok(Err(CuError(code)));
        }
        match descriptors::take(self.socket.as_fd()) {
            Ok(fd) => Ok(fd.ok_or(CuError::OPERATING_SYSTEM)),
            Err(_) => {
                self.dead.store(true, Ordering::Relaxed);
                Err(Dead)
            }
        }
    }

    /// Returns the shared arena's memfd: offset 0 is mapped at `arena::SHARED_BASE`.
    pub fn shared_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    /// Ends the connection in good order: the proxy hears of it by the socket, as when a client
    /// exits, and is gone or does not care any more when this returns.
    pub fn end(self) {
        // SAFETY: `self.socket` is open, and shutdown takes no pointer.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_WR) };
        let deadline = Deadline::after(Duration::from_secs(1));
        // A proxy that does not answer in time is left to find out.
        let _ = deadline.poll(self.socket.as_fd(), libc::POLLRDHUP);
    }

    /// Returns whether the proxy is known to be gone.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Returns whether the proxy is still there. A system call, unless it is already known to be
    /// gone.
    pub fn alive(&self) -> bool {
        if self.dead.load(Ordering::Relaxed) {
            return false;
        }
        let closed = self.segment.header().closed.0.load(Ordering::Relaxed) != 0;
        if closed || frame::hung_up(self.socket.as_fd()) {
            self.dead.store(true, Ordering::Relaxed);
            return false;
        }
        true
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        outbox::close(&self.segment);
    }
}

/// Lets the proxy read this process's memory where Yama restricts ptrace to ancestors. Without Yama
/// the call fails, and is not needed.
fn allow_reading(proxy: u32) {
    // SAFETY: PR_SET_PTRACER takes a number; its only effect is the permission that its name says.
    unsafe {
        libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(proxy), 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::StreamId;

    #[test]
    fn notes_of_what_is_free_are_no_work() {
        let (client, server) = crate::pair().unwrap();
        assert!(client.is_at_rest());
        client.post(&Post::MemAlloc { ctx: CtxId(1), addr: 0x1000, size: 8 }).unwrap();
        assert!(client.is_at_rest() && !client.is_idle());
        let work = Post::StreamDestroy { stream: StreamId(1) };
        client.post(&work).unwrap();
        client.post(&Post::MemFree { addr: 0x1000, size: 8 }).unwrap();
        assert!(!client.is_at_rest());
        server.outbox().set_completed(client.posted() - 1);
        assert!(client.is_at_rest() && !client.is_idle());
        client.post(&work).unwrap();
        assert!(!client.is_at_rest());
    }
}
