//! Counts what a client asks of its devices: an executor around the one that carries it out, there
//! only where the job's user wants the figures.

use crate::error::CaptureError;
use crate::executor::{Build, Captured, Executor, NearEnd, Room, Shares};
use crate::moving::{Follows, Shown};
use crate::record::{Image, Record, asking};
use kedge_control::sharing::{Bond, What};
use kedge_control::stats::{Regions, Stats};
use kedge_cuda_types::arena::{device_of, is_shared};
use kedge_device::{Code, SnapshotError};
use kedge_protocol::{
    Call, Copy3d, CtxId, DeviceInfo, Message, ModuleImage, PeerName, Place, Post, Scattered,
    StreamOp,
};
use kedge_transport::{Incoming, Meter};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// What this process counts, and where to.
static COUNTS: OnceLock<Told> = OnceLock::new();

/// How often, and how far apart, the end of the process tries to see the counts: a thread that
/// panicked while it counted never lets them go.
const TRIES: u32 = 100;
const BETWEEN: Duration = Duration::from_millis(1);

struct Told {
    counts: Arc<Mutex<Counts>>,
    meter: Meter,
    path: PathBuf,
}

/// Returns `executor` with what counts its messages; `folder` gets the figures.
pub(crate) fn counting(
    executor: Box<dyn Executor>,
    folder: &Path,
    meter: Meter,
    devices: &[DeviceInfo],
) -> Box<dyn Executor> {
    let exact = devices.iter().all(|device| device.exact);
    let counts = Arc::new(Mutex::new(Counts::new(exact)));
    let path = folder.join(format!("{}.json", std::process::id()));
    let _ = COUNTS.set(Told { counts: counts.clone(), meter, path });
    Box::new(Counting { executor, counts })
}

/// Writes down what was counted, if anything was. The process is about to end.
pub(crate) fn write() {
    let Some(told) = COUNTS.get() else { return };
    for _ in 0..TRIES {
        if let Ok(counts) = told.counts.try_lock() {
            // Who has no room for it gets no figures; the job's supervisor says so.
            let _ = counts.told(told.meter.bytes()).write(&told.path);
            return;
        }
        thread::sleep(BETWEEN);
    }
}

struct Counting {
    executor: Box<dyn Executor>,
    counts: Arc<Mutex<Counts>>,
}

impl Executor for Counting {
    #[inline]
    fn execute(&mut self, incoming: Incoming) {
        // Nobody else wants the lock before the process ends.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).count(&incoming.message);
        self.executor.execute(incoming);
    }

    fn flush(&mut self) -> Duration {
        self.executor.flush()
    }

    fn spin(&self, spin: Duration) -> Duration {
        self.executor.spin(spin)
    }

    fn rest(&mut self, limit: Duration) -> bool {
        self.executor.rest(limit)
    }

    fn room(&self) -> Arc<dyn Room> {
        self.executor.room()
    }

    fn capture(
        &mut self,
        near: &NearEnd<'_>,
        on: Build,
    ) -> Result<Box<dyn Captured>, CaptureError> {
        self.executor.capture(near, on)
    }

    fn show(
        &mut self,
        near: &NearEnd<'_>,
        follows: Follows,
    ) -> Result<Box<dyn Shown>, CaptureError> {
        self.executor.show(near, follows)
    }

    fn shares(&mut self) -> Result<Shares, SnapshotError> {
        self.executor.shares()
    }

    fn adopt(&mut self, what: What) -> Result<PeerName, SnapshotError> {
        self.executor.adopt(what)
    }

    fn bind(&mut self, borrows: Vec<Bond>) {
        self.executor.bind(borrows);
    }

    fn swap_out(&mut self) -> Result<u64, CaptureError> {
        self.executor.swap_out()
    }
}

/// What was counted so far.
struct Counts {
    stats: Stats,
    /// Few kinds are frequent, and a look at the first ones is quicker than a tree.
    kinds: Vec<(&'static str, u64)>,
    record: Record,
    /// Whether allocations are told one by one; else slabs are.
    exact: bool,
    memory: Memory,
    shared: BTreeMap<u64, u64>,
    shared_now: u64,
}

/// The client's regions of device memory.
#[derive(Default)]
struct Memory {
    /// By address: size and, where one ends with its context, that.
    live: BTreeMap<u64, (u64, Option<CtxId>)>,
    now: Regions,
    bytes: u64,
    /// Where they were the most.
    most: u64,
    then: Regions,
}

impl Memory {
    fn add(&mut self, addr: u64, bytes: u64, ctx: Option<CtxId>) {
        self.remove(addr);
        self.live.insert(addr, (bytes, ctx));
        self.now.add(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.most {
            self.most = self.bytes;
            self.then.clone_from(&self.now);
        }
    }

    fn remove(&mut self, addr: u64) {
        if let Some((bytes, _)) = self.live.remove(&addr) {
            self.now.remove(bytes);
            self.bytes -= bytes;
        }
    }

    fn context_ends(&mut self, ctx: CtxId) {
        let its = |(addr, of): (&u64, &(u64, Option<CtxId>))| (of.1 == Some(ctx)).then_some(*addr);
        let gone: Vec<u64> = self.live.iter().filter_map(its).collect();
        gone.into_iter().for_each(|addr| self.remove(addr));
    }
}

impl Counts {
    fn new(exact: bool) -> Counts {
        let (stats, kinds, record, memory, shared) = Default::default();
        Counts { stats, kinds, record, exact, memory, shared, shared_now: 0 }
    }

    #[inline]
    fn count(&mut self, message: &Message) {
        match message {
            Message::Post { post: Post::Enqueue { op, .. } } => {
                self.stats.posts += 1;
                self.kind(op.name());
                self.operation(op);
            }
            Message::Post { post } => {
                self.stats.posts += 1;
                self.kind(post.name());
                self.post(post);
            }
            Message::Call { call } => {
                self.stats.calls += 1;
                self.kind(call.name());
                self.call(call);
            }
        }
    }

    fn kind(&mut self, name: &'static str) {
        match self.kinds.iter_mut().find(|(known, _)| std::ptr::eq(*known, name)) {
            Some((_, count)) => *count += 1,
            None => self.kinds.push((name, 1)),
        }
    }

    #[inline]
    fn operation(&mut self, op: &StreamOp) {
        match op {
            StreamOp::Copy { copy } => self.copy(copy),
            StreamOp::CopyInline { bytes, .. } => self.stats.copies.inline.add(bytes.len() as u64),
            StreamOp::Scatter { pieces } => {
                let sum = |sum: u64, piece: &Scattered| sum.saturating_add(piece.bytes);
                self.stats.copies.inline.add(pieces.iter().fold(0, sum));
            }
            StreamOp::MemAlloc { addr, size } => self.allocated(*addr, *size, None),
            StreamOp::MemFree { addr, .. } if self.exact => self.memory.remove(*addr),
            _ => {}
        }
    }

    fn copy(&mut self, copy: &Copy3d) {
        let on_device = |place: Place| match place {
            Place::Mapped { addr, .. } => device_of(addr).is_some(),
            Place::Array { .. } => true,
            Place::Client { .. } => false,
        };
        let shared = |place: Place| matches!(place, Place::Mapped { addr, .. } if is_shared(addr));
        let client = |place: Place| matches!(place, Place::Client { .. });
        let copies = &mut self.stats.copies;
        let amount = match (copy.src, copy.dst) {
            (src, dst) if client(src) && on_device(dst) => &mut copies.to_device,
            (src, dst) if on_device(src) && client(dst) => &mut copies.from_device,
            (src, dst) if shared(src) && on_device(dst) => &mut copies.shared_to_device,
            (src, dst) if on_device(src) && shared(dst) => &mut copies.device_to_shared,
            _ => &mut copies.others,
        };
        amount.add(copy.shape().bytes().unwrap_or(0));
    }

    fn allocated(&mut self, addr: u64, bytes: u64, ctx: Option<CtxId>) {
        if self.exact {
            self.memory.add(addr, bytes, ctx);
        }
    }

    fn post(&mut self, post: &Post) {
        match post {
            Post::MemAlloc { ctx, addr, size } => self.allocated(*addr, *size, Some(*ctx)),
            Post::MemFree { addr, .. } if self.exact => self.memory.remove(*addr),
            Post::CtxDestroy { ctx } => self.memory.context_ends(*ctx),
            Post::Unshare { addr, .. } => self.unshared(*addr),
            _ => {}
        }
        if Record::wants(post) {
            self.record.post(post.clone());
            self.recorded();
        }
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::ModuleLoad { ctx, module, image } => {
                self.stats.modules.add(image.len);
                self.record.module(*ctx, *module, Code::Whole(Image::default()));
            }
            Call::ModuleLink { ctx, module, images } => {
                let bytes = |sum: u64, image: &ModuleImage| sum.saturating_add(image.len);
                self.stats.modules.add(images.iter().fold(0, bytes));
                self.record.module(*ctx, *module, Code::Whole(Image::default()));
            }
            Call::Grant { addr, bytes, .. } if !self.exact => self.memory.add(*addr, *bytes, None),
            Call::Return { addr, .. } if !self.exact => self.memory.remove(*addr),
            Call::Share { addr, size } => self.shared(*addr, *size),
            _ => {}
        }
        // A handle of a texture is not known here: its record stays until its context ends.
        if !matches!(call, asking!()) {
            self.record.call(call.clone(), 0);
        }
        self.recorded();
    }

    fn recorded(&mut self) {
        self.stats.records = self.stats.records.max(self.record.len() as u64);
    }

    fn shared(&mut self, addr: u64, size: u64) {
        self.unshared(addr);
        self.shared.insert(addr, size);
        self.shared_now = self.shared_now.saturating_add(size);
        self.stats.shared_bytes = self.stats.shared_bytes.max(self.shared_now);
    }

    fn unshared(&mut self, addr: u64) {
        let size = self.shared.remove(&addr).unwrap_or(0);
        self.shared_now = self.shared_now.saturating_sub(size);
    }

    /// Returns what was counted.
    fn told(&self, message_bytes: u64) -> Stats {
        let mut stats = self.stats.clone();
        stats.clients = 1;
        stats.message_bytes = message_bytes;
        for (kind, count) in &self.kinds {
            *stats.kinds.entry((*kind).to_owned()).or_default() += count;
        }
        stats.regions = self.memory.then.clone();
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::stats::Amount;
    use kedge_cuda_types::arena::{SHARED_BASE, device_base};
    use kedge_protocol::{EventId, Shape, StreamId};

    const CTX: CtxId = CtxId(1);

    fn enqueue(op: StreamOp) -> Message {
        Message::Post { post: Post::Enqueue { stream: StreamId(1), op } }
    }

    fn copy(src: Place, dst: Place, bytes: u64) -> Message {
        enqueue(StreamOp::Copy { copy: Copy3d::new(src, dst, Shape::line(bytes)) })
    }

    fn counted(exact: bool, messages: &[Message]) -> Stats {
        let mut counts = Counts::new(exact);
        messages.iter().for_each(|message| counts.count(message));
        counts.told(7)
    }

    #[test]
    fn copies_are_told_by_where_they_go() {
        let at = |addr| Place::Mapped { addr, pitch: 0, slice: 0 };
        let client = Place::Client { addr: 64, pitch: 0, slice: 0 };
        let (device, pinned) = (at(device_base(0)), at(SHARED_BASE));
        let stats = counted(
            true,
            &[
                copy(client, device, 1),
                copy(device, client, 2),
                copy(pinned, device, 4),
                copy(device, pinned, 8),
                copy(device, at(device_base(1)), 16),
                copy(client, device, 32),
            ],
        );
        let one = |bytes| Amount { count: 1, bytes };
        let copies = stats.copies;
        assert_eq!(copies.to_device, Amount { count: 2, bytes: 33 });
        assert_eq!((copies.from_device, copies.shared_to_device), (one(2), one(4)));
        assert_eq!((copies.device_to_shared, copies.others), (one(8), one(16)));
        assert_eq!((stats.posts, stats.calls, stats.message_bytes), (6, 0, 7));
        assert_eq!(stats.kinds["Copy"], 6);
    }

    #[test]
    fn memory_is_told_where_it_was_the_most() {
        let alloc = |addr, size| Message::Post { post: Post::MemAlloc { ctx: CTX, addr, size } };
        let free = |addr, size| Message::Post { post: Post::MemFree { addr, size } };
        let ctx = Message::Post { post: Post::CtxDestroy { ctx: CTX } };
        let base = device_base(0);
        let all = [
            alloc(base, 4096),
            alloc(base + 4096, 100),
            free(base, 4096),
            enqueue(StreamOp::MemAlloc { addr: base, size: 256 }),
            ctx,
            alloc(base + 8192, 512),
        ];
        let total = |exact, messages: &[Message]| counted(exact, messages).regions.total();
        assert_eq!(total(true, &all), Amount { count: 2, bytes: 4196 });
        assert_eq!(total(true, &all[2..]), Amount { count: 2, bytes: 768 });
        assert_eq!(total(false, &all), Amount::default());
        let grant = Call::Grant { device: 0, addr: base, bytes: 2 << 20 };
        let slab = Amount { count: 1, bytes: 2 << 20 };
        assert_eq!(total(false, &[Message::Call { call: grant }]), slab);
    }

    #[test]
    fn what_a_restart_repeats_is_counted_while_it_is_there() {
        let event = |number| Post::EventCreate {
            event: EventId(number),
            ctx: CTX,
            timing: true,
            interprocess: false,
        };
        let mut messages: Vec<Message> = vec![Message::Call {
            call: Call::CtxCreate { ctx: CTX, device: 0, legacy: StreamId(1) },
        }];
        for number in 0..100 {
            messages.push(Message::Post { post: event(number) });
            let ends = Post::EventDestroy { event: EventId(number) };
            messages.push(Message::Post { post: ends });
            messages.push(Message::Call { call: Call::Ping {} });
        }
        let stats = counted(true, &messages);
        assert_eq!((stats.records, stats.posts, stats.calls), (2, 200, 101));
        let image = ModuleImage { addr: 0, len: 9 };
        let module = kedge_protocol::ModuleId(1);
        let load = Message::Call { call: Call::ModuleLoad { ctx: CTX, module, image } };
        let stats = counted(true, &[load]);
        assert_eq!((stats.modules, stats.records), (Amount { count: 1, bytes: 9 }, 1));
    }
}
