//! Managed memory that lies in a device's memory, on devices that see none of the host's pages.
//!
//! The program's pages lie at the same addresses, in a file in memory that is mapped twice: the
//! program's view, whose faults a thread of kedge's serves ([`faults`]), and an alias through which
//! bytes move ([`bytes`]). Which copy is current is the page engine's to decide (`kedge-pages`);
//! docs/design/0038-page-engine.md says why it is done this way.
//!
//! The engine is locked while its actions are carried out and until the work is posted that they
//! are for. Nobody waits for a stream with the engine locked: a host function may need it.

mod bytes;
mod faults;
mod locked;
mod marks;
mod spans;
mod touched;
mod view;

use super::alloc::take_device_memory;
use super::link::{Proxy, current, post_alloc, post_free, quiesce};
use super::table::{Allocation, Kind};
use super::{MEMORY, ranges};
use crate::session::{self, Session};
use crate::{capture, log};
use bytes::{Moves, Way};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_pages::{
    Access, Action, Attach, Engine, NodeConfig, NodeId, PAGE, Pages, Place, Protection, Step,
    StreamId as Stream,
};
use kedge_protocol::{Call, CtxId, Post, StreamId, StreamOp};
use locked::Locked;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use touched::Touched;
use view::View;

/// All devices of one proxy, which share their memory.
const NODE: NodeId = NodeId(0);
/// Pages that one touch of a walk opens at most: 2 MiB.
const READ_AHEAD: u64 = 512;

/// What is managed by pages in this process.
struct Paged {
    view: View,
    state: Mutex<State>,
}

struct State {
    engine: Engine,
    /// By first page.
    regions: BTreeMap<u64, Region>,
    /// A stream that waits for no other, and its context.
    mover: Option<(CtxId, StreamId)>,
    /// The streams of host functions by their tokens, and the last that launched a graph.
    functions: BTreeMap<u64, Stream>,
    graphs: Option<Stream>,
    /// The streams to which regions are attached, by first pages.
    attached: BTreeMap<u64, Stream>,
    /// The host function that runs: its thread, and its stream.
    inside: Option<(i32, Stream)>,
    /// Of the view that the engine knows.
    generation: u64,
}

/// What lies where an allocation is.
#[derive(Debug, Clone, Copy)]
struct Region {
    /// Bytes that the program asked for; devices check that no others are touched.
    size: u64,
    /// What the device's heap gave.
    raw: u64,
    raw_size: u64,
}

static PAGED: OnceLock<Paged> = OnceLock::new();
/// Whether there has been an allocation: looked at before every operation.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Whether managed memory is kept this way for the current context's device.
pub(super) fn is_wanted() -> Result<bool, CuError> {
    let device = current()?.device;
    Ok(session::get()?.device(device as i32)?.apart)
}

/// Whether managed memory at an address is kept this way.
pub(super) fn is_paged(addr: u64) -> bool {
    device_of(addr).is_some()
}

#[inline]
pub(crate) fn in_use() -> bool {
    IN_USE.load(Ordering::Acquire)
}

/// Returns what is managed, and makes it ready the first time.
fn paged() -> Result<&'static Paged, CuError> {
    static STARTING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let paged = match PAGED.get() {
        Some(paged) if in_use() => return Ok(paged),
        Some(paged) => paged,
        None => {
            let made = Paged::new(session::get()?)?;
            PAGED.get_or_init(|| made)
        }
    };
    faults::start(paged)?;
    IN_USE.store(true, Ordering::Release);
    Ok(paged)
}

/// Allocates `size` bytes.
pub(super) fn alloc(kind: Kind, size: u64) -> Result<u64, CuError> {
    let current = current()?;
    if size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let paged = paged()?;
    let bytes = ranges::round_up(size, PAGE).ok_or(CuError::OUT_OF_MEMORY)?;
    let (raw, raw_size) = take_pages(current.device, bytes)?;
    let base = raw.next_multiple_of(PAGE);
    let pages = base / PAGE..(base + bytes) / PAGE;
    post_alloc(current.ctx, base, size)?;
    // A touch of a page that is nobody's is refused with the engine locked.
    let mut state = paged.lock();
    if let Err(error) = paged.view.open(&pages) {
        drop(state);
        log::line(&format!("cuMemAllocManaged: cannot map pages: {error}"));
        post_free(base, size)?;
        MEMORY.heap(current.device)?.put(raw, raw_size, &Proxy)?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    state.regions.insert(pages.start, Region { size, raw, raw_size });
    let actions = state.engine.alloc(pages, Attach::Global, NODE);
    paged.carry_out(&mut state, actions.map_err(refused)?);
    drop(state);
    MEMORY.record(&current, kind, base, size, bytes);
    Ok(base)
}

/// Takes device memory in which so many bytes lie in whole pages. What the heap gives begins
/// anywhere if it is small, but at a page where there are only such allocations.
fn take_pages(device: u32, bytes: u64) -> Result<(u64, u64), CuError> {
    let (raw, raw_size) = take_device_memory(device, bytes)?;
    if raw.is_multiple_of(PAGE) {
        return Ok((raw, raw_size));
    }
    MEMORY.heap(device)?.put(raw, raw_size, &Proxy)?;
    take_device_memory(device, bytes.checked_add(PAGE).ok_or(CuError::OUT_OF_MEMORY)?)
}

/// Gives memory back that no work uses any longer.
pub(super) fn release(found: &Allocation) -> Result<(), CuError> {
    let paged = PAGED.get().ok_or(CuError::INVALID_VALUE)?;
    let start = found.base / PAGE;
    let mut state = paged.done(|state| state.engine.free(start))?;
    let region = state.regions.remove(&start).ok_or(CuError::INVALID_VALUE)?;
    state.attached.remove(&start);
    paged.view.close(&(start..start + found.size.div_ceil(PAGE)));
    drop(state);
    post_free(found.base, found.size)?;
    MEMORY.heap(found.device)?.put(region.raw, region.raw_size, &Proxy)
}

/// Posts an operation, once what it may touch is where it touches it.
#[cold]
pub(crate) fn post(stream: StreamId, op: StreamOp) -> Result<(), CuError> {
    let paged = PAGED.get().ok_or(CuError::INVALID_VALUE)?;
    let of = Stream(stream.0.into());
    let state = match Touched::of(&op) {
        Touched::Nothing => None,
        Touched::Anything => {
            let mut state = paged.done(|state| state.engine.launch(NODE, of, &[]))?;
            if matches!(op, StreamOp::GraphLaunch { .. }) {
                state.graphs = Some(of);
            }
            Some(state)
        }
        Touched::Bytes { reads, writes } => {
            let (reads, writes) = (reads.as_slice(), writes.as_slice());
            Some(paged.done(|state| state.engine.device_access(NODE, of, reads, writes))?)
        }
    };
    let state = state.map(|mut state| {
        if let StreamOp::HostFn { token } = op {
            state.functions.insert(token, of);
        }
        state
    });
    state.iter().for_each(Locked::settled);
    let posted = session::get()?.post(&Post::Enqueue { stream, op });
    // A touch must not come between: it would find the stream idle.
    drop(state);
    posted
}

/// A program wants a range to be on the device, or on the host, soon.
pub(super) fn prefetch(addr: u64, bytes: u64, on_device: bool) {
    let Some(paged) = PAGED.get().filter(|_| is_paged(addr)) else { return };
    let to = if on_device { Place::Node(NODE) } else { Place::Host };
    let mut state = paged.lock();
    if let Ok(actions) = state.engine.prefetch(pages_of(addr, bytes), to) {
        paged.carry_out(&mut state, actions);
    }
}

/// Returns what attaches memory to a stream.
pub(super) fn stream_only(stream: StreamId) -> Attach {
    Attach::Stream(Stream(stream.0.into()))
}

/// Has other work touch the allocation at an address from now on: a touch of the host's waits for
/// no other. All that might have touched it so far is waited for.
pub(super) fn attach(addr: u64, to: Attach) -> Result<(), CuError> {
    let Some(paged) = PAGED.get().filter(|_| is_paged(addr)) else { return Ok(()) };
    let start = addr / PAGE;
    let mut state = paged.done(|state| state.engine.attach(start, to))?;
    match to {
        Attach::Stream(stream) => state.attached.insert(start, stream),
        Attach::Global | Attach::Host => state.attached.remove(&start),
    };
    Ok(())
}

/// A stream is about to be destroyed: what is attached to it is everybody's again.
pub(crate) fn stream_destroyed(stream: StreamId) {
    let Some(paged) = PAGED.get() else { return };
    let of = Stream(stream.0.into());
    let state = paged.lock();
    let own = state.attached.iter().filter(|(_, stream)| **stream == of);
    let own: Vec<u64> = own.map(|(start, _)| *start * PAGE).collect();
    drop(state);
    for addr in own {
        if let Err(error) = attach(addr, Attach::Global) {
            log::line(&format!("managed memory of a stream that has ended: {error}"));
        }
    }
}

/// The thread of host functions is about to run one.
pub(crate) fn host_function_begins(token: u64) {
    let Some(paged) = PAGED.get() else { return };
    let mut state = paged.lock();
    // A graph's has the same token in each launch.
    let stream = state.functions.remove(&token).or(state.graphs);
    // SAFETY: the call has no arguments.
    let thread = unsafe { libc::gettid() };
    state.inside = stream.map(|stream| (thread, stream));
}

/// The host function has returned, and the device has not been told yet.
pub(crate) fn host_function_ends() {
    let Some(paged) = PAGED.get() else { return };
    let mut state = paged.lock();
    if let Some((_, stream)) = state.inside.take() {
        let actions = state.engine.host_function_over(stream);
        paged.carry_out(&mut state, actions);
    }
}

pub(super) fn context_destroyed(ctx: CtxId) {
    if let Some(paged) = PAGED.get() {
        let mut state = paged.lock();
        state.mover = state.mover.filter(|(of, _)| *of != ctx);
    }
}

impl Paged {
    fn new(session: &Session) -> Result<Paged, CuError> {
        if !session.client_memory {
            log::refused("cuMemAllocManaged: the proxy cannot reach this process's memory here");
            return Err(CuError::NOT_SUPPORTED);
        }
        let view = View::new(session.devices.len() as u32).map_err(|error| {
            log::refused(&format!("cuMemAllocManaged: the system tells of no faults: {error}"));
            CuError::NOT_SUPPORTED
        })?;
        let state = State {
            engine: Engine::new([(NODE, NodeConfig::default())], READ_AHEAD),
            regions: BTreeMap::new(),
            mover: None,
            functions: BTreeMap::new(),
            graphs: None,
            attached: BTreeMap::new(),
            inside: None,
            generation: view.marks.generation(),
        };
        Ok(Paged { view, state: Mutex::new(state) })
    }

    fn lock(&self) -> Locked<'_> {
        Locked::of(self)
    }

    /// Asks the engine until nothing has to be waited for, and carries out what it says. The engine
    /// is still locked when this returns.
    fn done(
        &self,
        ask: impl Fn(&mut State) -> Result<Step, kedge_pages::Error>,
    ) -> Result<Locked<'_>, CuError> {
        loop {
            let mut state = self.lock();
            let (streams, ticket) = match ask(&mut state).map_err(refused)? {
                Step::Do(actions) => {
                    self.carry_out(&mut state, actions);
                    return Ok(state);
                }
                Step::Wait { streams, ticket } => (streams, ticket),
            };
            // Posts are made with the engine locked, so what is idle now has nothing in flight.
            if !session::get()?.client.is_idle() {
                drop(state);
                streams.iter().for_each(|(_, stream)| wait_for(*stream));
                state = self.lock();
            }
            for (node, stream) in streams {
                let actions = state.engine.over(node, stream, ticket);
                self.carry_out(&mut state, actions);
            }
        }
    }

    /// Serves a touch of a thread of the program's.
    fn touch(&self, page: u64, access: Access, thread: i32) -> Result<(), CuError> {
        let by = |state: &State| state.inside.filter(|it| it.0 == thread).map(|it| it.1);
        let open = Cell::new(false);
        let mut state = self.done(|state| {
            let step = state.engine.touch(page, access, by(state));
            open.set(matches!(&step, Ok(Step::Do(actions)) if actions.is_empty()));
            step
        })?;
        // Another thread was faster; or the page has gone out of the view, because the system was
        // short of memory or the program has advised so.
        if open.get() && self.view.lacks(page, access) {
            let actions = state.engine.reopen(page).map_err(refused)?;
            self.carry_out(&mut state, actions);
        }
        Ok(())
    }

    /// Has a page be none of the program's if it is not managed.
    fn refuse(&self, page: u64) {
        let state = self.lock();
        if !state.engine.is_managed(page) {
            self.view.refuse(page);
        }
    }

    /// Whether a touch would have to wait for work now.
    fn would_wait(&self, page: u64, access: Access, thread: i32) -> bool {
        let state = self.lock();
        let by = state.inside.filter(|it| it.0 == thread).map(|it| it.1);
        let idle = session::get().is_ok_and(|session| session.client.is_idle());
        !idle && matches!(state.engine.touch_waits(page, access, by), Ok(true))
    }

    /// Does what the engine has said. Meanwhile a checkpoint saves the pages that are moved as if
    /// the host alone had them, whatever of that is done.
    fn carry_out(&self, state: &mut State, actions: Vec<Action>) {
        let marks = &self.view.marks;
        for action in &actions {
            match action {
                Action::Protect { to: Protection::None, .. } => {}
                Action::Protect { pages, .. }
                | Action::Fetch { pages, .. }
                | Action::Send { pages, .. } => marks.own(pages, true),
                _ => {}
            }
        }
        marks.busy(false);
        self.do_all(state, &actions);
        for action in &actions {
            if let Action::Protect { pages, to } = action {
                marks.own(pages, *to == Protection::ReadWrite);
            }
        }
        marks.busy(true);
    }

    fn do_all(&self, state: &mut State, actions: &[Action]) {
        let mut moved = Moves::default();
        for action in actions {
            match action {
                Action::Protect { pages, to } => {
                    moved.finish(state);
                    self.view.protect(pages, *to);
                }
                Action::Fetch { pages, .. } => moved.copy(&self.view, state, pages, Way::Here),
                Action::Send { pages, .. } => moved.copy(&self.view, state, pages, Way::There),
                Action::Forget { pages } => self.view.forget(pages),
                Action::Tell(note) => log::line(&format!("managed memory: {note:?}")),
                // It was taken when the region was made, and may have been somebody's before.
                Action::Reserve { pages, .. } => moved.clear(state, pages),
                // It is given back with the region, and there is one node.
                Action::Release { .. } | Action::Map { .. } | Action::Copy { .. } => {}
            }
        }
        moved.finish(state);
    }
}

/// Waits until all that was posted to a stream is over. Errors have been told, or will be.
fn wait_for(stream: Stream) {
    let stream = StreamId(stream.0 as u32);
    let waited = session::get().and_then(|it| it.call_status(&Call::StreamSync { stream }));
    // One that has been destroyed may still work.
    if waited == Err(CuError::INVALID_HANDLE) {
        let _ = quiesce();
    }
}

/// The engine knows all regions, and the one node there is.
fn refused(error: kedge_pages::Error) -> CuError {
    log::line(&format!("managed memory: {error}"));
    CuError::INVALID_VALUE
}

/// Returns the pages that hold some of a range: what is advised holds for whole pages, too.
pub(super) fn pages_of(addr: u64, bytes: u64) -> Pages {
    addr / PAGE..addr.saturating_add(bytes).div_ceil(PAGE)
}
