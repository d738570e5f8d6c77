//! Managed memory that lies in a device's memory, on devices that see none of the host's pages.
//!
//! The program's pages lie at the same addresses, in a file in memory that is mapped twice: the
//! program's view, whose faults a thread of kedge's serves ([`faults`]), and an alias through which
//! bytes move ([`bytes`]). Which copy is current is the page engine's to decide (`kedge-pages`);
//! docs/design/0038-page-engine.md says why it is done this way.
//!
//! The engine is locked while its actions are carried out and until the work is posted that they
//! are for. Nobody waits for a stream with the engine locked: a host function may need it.

mod blocks;
mod bytes;
mod claim;
mod faults;
mod locked;
mod lodged;
mod marks;
mod region;
mod spans;
mod touched;
mod view;
mod waits;
mod wanted;

use super::link::{current, quiesce};
use crate::log;
use crate::session::{self, Session};
use bytes::{Moves, Way};
pub(crate) use claim::Claim;
pub(super) use claim::claim;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_pages::{
    Access, Action, Attach, BLOCK, Engine, NodeConfig, NodeId, PAGE, Pages, Place, Protection,
    Step, StreamId as Stream,
};
use kedge_protocol::{Call, CtxId, Post, StreamId, StreamOp};
use locked::Locked;
use region::{Behind, Region};
pub(super) use region::{alloc, give_way, release};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use touched::Touched;
use view::View;
pub(crate) use wanted::{Wanted, wanted};

/// The node whose work all work is taken for: each device of a proxy sees the others' memory.
const NODE: NodeId = NodeId(0);
/// Pages that one touch of a walk opens at most: 16 MiB.
const READ_AHEAD: u64 = 4096;

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

static PAGED: OnceLock<Paged> = OnceLock::new();
/// Whether there has been an allocation: looked at before every operation.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Whether managed memory is kept this way for the current context's device.
pub(super) fn is_wanted() -> Result<bool, CuError> {
    let number = current()?.device;
    let device = session::get()?.device(number as i32)?;
    if device.takes_pages && !device.pages {
        wanted::tell_why_not(device.far);
    }
    Ok(device.pages && wanted::works(number)?)
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

/// Posts an operation, once what it may touch is where it touches it.
#[cold]
pub(crate) fn post(stream: StreamId, op: StreamOp) -> Result<(), CuError> {
    let paged = PAGED.get().ok_or(CuError::INVALID_VALUE)?;
    let of = Stream(stream.0.into());
    let state = match Touched::of(&op) {
        Touched::Nothing => None,
        Touched::Anything => {
            claim::let_claims_pass();
            let likely = paged.likely(&op)?;
            let mut state = paged.done(|state| {
                let likely = if claim::is_claimed() { &[] } else { &*likely };
                state.engine.launch(NODE, of, likely)
            })?;
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
    // At its address there is one device's memory.
    let home = device_of(addr).map_or(NODE, NodeId);
    let to = if on_device { Place::Node(home) } else { Place::Host };
    if on_device {
        claim::let_claims_pass();
    }
    let mut state = paged.lock();
    if on_device {
        // What it knows may be of before an allocation or its end. Without it the pages stay.
        let _ = region::look_for_room(&mut state, home.0, bytes);
    }
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
        let nodes: Vec<NodeId> = (0..session.devices.len() as u32).map(NodeId).collect();
        let peers: BTreeSet<NodeId> = nodes.iter().copied().collect();
        // How much there is, is found out when it matters.
        let config = NodeConfig { quota: Some(0), maps_host: true, peers };
        let nodes = nodes.into_iter().map(|id| (id, config.clone()));
        // A fetch from another machine takes a round trip, however much it brings.
        let far = session.devices.iter().any(|device| device.far);
        let again = if far { READ_AHEAD } else { 0 };
        let state = State {
            engine: Engine::new(nodes, READ_AHEAD).expecting(again),
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
        self.note_over(page, access, thread)?;
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
        !idle && matches!(state.engine.touch_waits(page, access, by), Ok(Some(_)))
    }

    /// Does what the engine has said. Meanwhile a checkpoint saves the pages that are moved as if
    /// the host alone had them, whatever of that is done.
    fn carry_out(&self, state: &mut State, actions: Vec<Action>) {
        let marks = &self.view.marks;
        for action in &actions {
            match action {
                Action::Protect { to: Protection::None, .. } => {}
                Action::Protect { pages, .. }
                | Action::Map { pages, at: Place::Host }
                | Action::Fetch { pages, .. }
                | Action::Send { pages, .. } => marks.own(pages, true),
                _ => {}
            }
        }
        marks.busy(false);
        let refused = self.do_all(state, &actions);
        // What was fetched and is not shown as yet is saved as the host's until it is shown or
        // closed, which is too much and not wrong.
        for action in &actions {
            if let Action::Protect { pages, to } = action {
                marks.own(pages, *to == Protection::ReadWrite);
            }
        }
        marks.busy(true);
        for pages in refused {
            let actions = state.engine.refused(&pages);
            self.carry_out(state, actions);
        }
    }

    /// Does these actions, but for those on blocks for which the device has no memory: returns the
    /// pages of these.
    fn do_all(&self, state: &mut State, actions: &[Action]) -> Vec<Pages> {
        let mut refused = Vec::new();
        // What is to be host memory has its pages where they will be before bytes move.
        for action in actions {
            if let Action::Map { pages, at: Place::Host } = action {
                self.lodge(state, pages);
            }
        }
        let mut moved = Moves::default();
        for (index, action) in actions.iter().enumerate() {
            let rest = &actions[index + 1..];
            for action in action.clone().without(&refused) {
                if let Err(pages) = self.do_one(state, &mut moved, action, rest) {
                    refused.push(pages);
                }
            }
        }
        moved.finish(&self.view, state);
        refused
    }

    /// Does one action, of which `rest` come after it.
    ///
    /// # Errors
    /// The pages of blocks for which the device has no memory.
    fn do_one(
        &self,
        state: &mut State,
        moved: &mut Moves,
        action: Action,
        rest: &[Action],
    ) -> Result<(), Pages> {
        match action {
            Action::Protect { pages, to } => {
                moved.finish(&self.view, state);
                self.protect(state, &pages, to)?;
            }
            Action::Fetch { pages, .. } => moved.copy(&self.view, state, &pages, Way::Here),
            Action::Send { pages, .. } => moved.copy(&self.view, state, &pages, Way::There),
            Action::Forget { pages } => {
                moved.finish(&self.view, state);
                self.view.forget(&pages);
            }
            Action::Tell(note) => log::line(&format!("managed memory: {note:?}")),
            Action::Reserve { pages, .. } => {
                moved.finish(&self.view, state);
                let refused = state.reserve(&pages);
                // It may have been somebody's before.
                let sent = |it: &Action| match it {
                    Action::Send { pages: all, .. } => all.contains(&pages.start),
                    _ => false,
                };
                if !rest.iter().any(sent) {
                    let reserve = Action::Reserve { node: NODE, pages };
                    for cleared in reserve.without(&refused).iter().filter_map(Action::pages) {
                        moved.clear(&self.view, state, cleared);
                    }
                }
                // One block of several that follow each other.
                if let Some((first, last)) = refused.first().zip(refused.last()) {
                    return Err(first.start..last.end);
                }
            }
            Action::Map { pages, at: Place::Host } => {
                moved.finish(&self.view, state);
                state.make_host_memory(&pages);
            }
            // That is done where it is mapped in host memory, or where its region ends.
            Action::Release { .. } | Action::Map { .. } | Action::Copy { .. } => {}
        }
        Ok(())
    }

    /// Changes what the view allows.
    ///
    /// # Errors
    /// The pages of host memory that cannot be closed, which therefore stays where it is.
    fn protect(&self, state: &State, pages: &Pages, to: Protection) -> Result<(), Pages> {
        let parts = self.view.lodged().parts(pages);
        for (part, lodged) in parts {
            if lodged.is_none() || !state.is_host_memory(part.start) {
                self.view.protect(&part, to);
                continue;
            }
            let whole = state.block_of(&part);
            let shown = match to {
                Protection::None => self.view.watch_lodged(&whole),
                _ => self.view.show_lodged(&whole),
            };
            if let Err(error) = shown {
                log::line(&format!("managed memory: cannot map host memory: {error}"));
                if to == Protection::None {
                    return Err(whole);
                }
            }
        }
        Ok(())
    }

    /// Has the host's pages of some blocks be where devices can map them.
    fn lodge(&self, state: &State, pages: &Pages) {
        for start in (pages.start / BLOCK..pages.end.div_ceil(BLOCK)).map(|block| block * BLOCK) {
            let lodged = self.view.lodged().of(start / BLOCK).is_some();
            let arena = state.arena_of(start).filter(|_| !lodged);
            if let Some(arena) = arena {
                self.view.lodge(&state.block_of(&(start..start + BLOCK)), arena);
            }
        }
    }

    /// Has the engine know if no work runs: posts are made with it locked, so what is idle now has
    /// nothing in flight. Returns whether that is so.
    fn note_rest(&self, state: &mut State) -> Result<bool, CuError> {
        let idle = session::get()?.client.is_idle();
        if idle {
            let ticket = state.engine.ticket();
            let actions = state.engine.node_over(NODE, ticket);
            self.carry_out(state, actions);
        }
        Ok(idle)
    }

    /// Has the engine know which of the work is over that a touch would wait for: a kernel that is
    /// over does not touch the page as well. The devices are asked, for the client may learn that
    /// all is idle only after a wait of the program's has returned.
    fn note_over(&self, page: u64, access: Access, thread: i32) -> Result<(), CuError> {
        let mut state = self.lock();
        if self.note_rest(&mut state)? {
            return Ok(());
        }
        let by = state.inside.filter(|it| it.0 == thread).map(|it| it.1);
        let waits = state.engine.touch_waits(page, access, by).map_err(refused)?;
        drop(state);
        let Some(Step::Wait { streams, ticket }) = waits else { return Ok(()) };
        for (node, stream) in streams {
            let query = Call::StreamQuery { stream: StreamId(stream.0 as u32) };
            if session::get()?.call_status(&query).is_ok() {
                let mut state = self.lock();
                let actions = state.engine.over(node, stream, ticket);
                self.carry_out(&mut state, actions);
            }
        }
        Ok(())
    }

    /// Returns the pages to which a kernel's arguments point, and has the engine know how much
    /// memory there is if some of theirs is to be brought in.
    fn likely(&self, op: &StreamOp) -> Result<Vec<u64>, CuError> {
        let StreamOp::Launch { launch } = op else { return Ok(Vec::new()) };
        let words = launch.params.chunks_exact(8).filter_map(|it| it.try_into().ok());
        let pages = words.map(u64::from_ne_bytes).filter(|it| is_paged(*it)).map(|it| it / PAGE);
        let mut state = self.lock();
        let likely: Vec<u64> = pages.filter(|page| state.engine.is_managed(*page)).collect();
        let away = likely.iter().filter(|page| state.engine.is_away(**page));
        let devices: BTreeSet<u32> = away.filter_map(|page| device_of(page * PAGE)).collect();
        // Blocks move only while nothing runs.
        if devices.is_empty() || !self.note_rest(&mut state)? {
            return Ok(likely);
        }
        for device in devices {
            region::look_for_room(&mut state, device, u64::MAX)?;
        }
        Ok(likely)
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
