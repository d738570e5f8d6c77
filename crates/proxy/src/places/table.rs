//! Which place has what of a client's: filled by the messages that make things, as they pass.

use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{Windows, device_of};
use kedge_cuda_types::tensor_map::TensorMap;
use kedge_gpu_image::SavedStep;
use kedge_protocol::{
    ArrayId, Call, CtxId, EventId, GraphExecId, MemHandleId, Message, ModuleId, Place as Side,
    Post, StreamId, StreamOp,
};
use std::collections::{BTreeMap, HashMap};

/// A place, by its position among them.
pub(crate) type At = usize;

/// Where a message goes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Route {
    To(At),
    /// Each place has host memory; `undo` ends what a call has begun there.
    All {
        undo: Option<Box<Post>>,
    },
    /// A place that has something printed.
    Output,
    /// A stream's operation, which may be about what other places have.
    Stream(At),
    /// A call that has this answer.
    Answered(Result<(), CuError>),
    /// What is not done for devices of several places: its name.
    Refused(&'static str),
}

/// A context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Context {
    at: At,
    device: u32,
}

/// What there is of a client's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Table {
    places: Vec<Windows>,
    contexts: BTreeMap<CtxId, Context>,
    streams: HashMap<StreamId, CtxId>,
    events: HashMap<EventId, CtxId>,
    modules: HashMap<ModuleId, CtxId>,
    arrays: HashMap<ArrayId, CtxId>,
    graphs: HashMap<GraphExecId, CtxId>,
    handles: HashMap<MemHandleId, At>,
}

/// What is unknown goes to the first place, which says what is wrong with it.
const FIRST: At = 0;

/// Operations on what several places have, by name.
const GRAPH: &str = "a graph whose nodes are of two places";
const ACCESS: &str = "cuMemSetAccess for a device of another place than the memory's";
const MAPPED: &str = "cuMemMap of one place's memory among another's addresses";
const SHARED: &str = "sharing memory or events with other processes";

impl Table {
    /// Makes it, for places in these windows.
    pub(crate) fn new(places: Vec<Windows>) -> Table {
        Table {
            places,
            contexts: BTreeMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            arrays: HashMap::new(),
            graphs: HashMap::new(),
            handles: HashMap::new(),
        }
    }

    /// Returns where a message goes, and takes note of what it makes and ends.
    pub(crate) fn route(&mut self, message: &Message) -> Route {
        match message {
            Message::Post { post } => self.post(post),
            Message::Call { call } => self.call(call),
        }
    }

    fn post(&mut self, post: &Post) -> Route {
        let to = |at: Option<At>| Route::To(at.unwrap_or(FIRST));
        match post {
            Post::CtxDestroy { ctx } => {
                let at = self.of_context(*ctx);
                self.forget(*ctx);
                to(at)
            }
            Post::StreamCreate { stream, ctx, .. } => {
                self.streams.insert(*stream, *ctx);
                to(self.of_context(*ctx))
            }
            Post::StreamDestroy { stream } => {
                let ctx = self.streams.remove(stream);
                to(ctx.and_then(|ctx| self.of_context(ctx)))
            }
            Post::EventCreate { event, ctx, .. } => {
                self.events.insert(*event, *ctx);
                to(self.of_context(*ctx))
            }
            Post::EventDestroy { event } => {
                let ctx = self.events.remove(event);
                to(ctx.and_then(|ctx| self.of_context(ctx)))
            }
            Post::Enqueue { stream, .. } => Route::Stream(self.of_stream(*stream).unwrap_or(FIRST)),
            Post::MemAlloc { addr, .. }
            | Post::MemFree { addr, .. }
            | Post::HandleUnmap { addr, .. } => to(self.holding(*addr)),
            Post::ModuleUnload { module } => {
                let ctx = self.modules.remove(module);
                to(ctx.and_then(|ctx| self.of_context(ctx)))
            }
            Post::ArrayDestroy { array } => {
                let ctx = self.arrays.remove(array);
                to(ctx.and_then(|ctx| self.of_context(ctx)))
            }
            Post::TextureDestroy { ctx, .. } => to(self.of_context(*ctx)),
            Post::KernelAttribute { kernel, .. } => to(self.of_module(kernel.module)),
            Post::HandleDestroy { handle } => to(self.handles.remove(handle)),
            Post::Unshare { .. } | Post::Unalias { .. } => Route::All { undo: None },
            Post::Disown { .. } => Route::Refused(SHARED),
            Post::GraphExecBegin { exec, ctx } => {
                self.graphs.insert(*exec, *ctx);
                self.graph(*exec, None)
            }
            Post::GraphExecNode { exec, op } | Post::GraphExecUpdate { exec, op, .. } => {
                self.graph(*exec, Some(op))
            }
            Post::GraphExecEdges { exec, .. } | Post::GraphExecReady { exec, .. } => {
                self.graph(*exec, None)
            }
            Post::GraphExecDestroy { exec } => {
                let route = self.graph(*exec, None);
                self.graphs.remove(exec);
                route
            }
        }
    }

    /// Returns where a graph is, with `op` as a node of it, if there is one.
    fn graph(&self, exec: GraphExecId, op: Option<&StreamOp>) -> Route {
        let at = self.of_graph(exec).unwrap_or(FIRST);
        match op {
            Some(op) if !self.is_of(op, at) => Route::Refused(GRAPH),
            Some(_) | None => Route::To(at),
        }
    }

    /// Returns where a post about a graph belongs to, and its context.
    pub(crate) fn of_graph_post(&self, post: &Post) -> (At, Option<CtxId>) {
        let (Post::GraphExecNode { exec, .. } | Post::GraphExecUpdate { exec, .. }) = post else {
            return (FIRST, None);
        };
        (self.of_graph(*exec).unwrap_or(FIRST), self.graphs.get(exec).copied())
    }

    fn call(&mut self, call: &Call) -> Route {
        let to = |at: Option<At>| Route::To(at.unwrap_or(FIRST));
        match call {
            Call::Grant { device, .. } | Call::Return { device, .. } | Call::MemFree { device } => {
                to(self.having(*device))
            }
            Call::CtxCreate { ctx, device, legacy } => {
                let at = self.having(*device).unwrap_or(FIRST);
                self.contexts.insert(*ctx, Context { at, device: *device });
                self.streams.insert(*legacy, *ctx);
                Route::To(at)
            }
            Call::ModuleLoad { ctx, module, .. } | Call::ModuleLink { ctx, module, .. } => {
                self.modules.insert(*module, *ctx);
                to(self.of_context(*ctx))
            }
            Call::StreamSync { stream } | Call::StreamQuery { stream } => {
                to(self.of_stream(*stream))
            }
            Call::CtxSync { ctx }
            | Call::TextureCreate { ctx, .. }
            | Call::SetLimit { ctx, .. }
            | Call::Limit { ctx, .. }
            | Call::CheckPlaced { ctx, .. } => to(self.of_context(*ctx)),
            Call::EventSync { event } | Call::EventQuery { event } => to(self.of_event(*event)),
            Call::EventElapsed { start, end } => {
                match (self.of_event(*start), self.of_event(*end)) {
                    // As between devices of one driver.
                    (Some(start), Some(end)) if start != end => {
                        Route::Answered(Err(CuError::INVALID_HANDLE))
                    }
                    (at, _) => to(at),
                }
            }
            Call::ArrayCreate { ctx, array, .. } => {
                self.arrays.insert(*array, *ctx);
                to(self.of_context(*ctx))
            }
            Call::MipmapCreate { ctx, levels, .. } => {
                self.arrays.extend(levels.iter().map(|level| (*level, *ctx)));
                to(self.of_context(*ctx))
            }
            Call::TakeOutput {} => Route::Output,
            Call::Ping {} => Route::To(FIRST),
            Call::Alias { alias, size, .. } => {
                let undo = Post::Unalias { alias: *alias, size: *size };
                Route::All { undo: Some(Box::new(undo)) }
            }
            Call::Share { addr, size } => {
                let undo = Post::Unshare { addr: *addr, size: *size };
                Route::All { undo: Some(Box::new(undo)) }
            }
            Call::Kernel { module, .. }
            | Call::KernelNames { module, .. }
            | Call::Global { module, .. } => to(self.of_module(*module)),
            Call::Occupancy { kernel, .. } => to(self.of_module(kernel.module)),
            Call::TensorMap { map } => {
                to(TensorMap::decode(map).and_then(|map| self.holding(map.address)))
            }
            Call::TensorMapMove { address, .. } => to(self.holding(*address)),
            Call::HandleCreate { handle, device, .. } => {
                let at = self.having(*device).unwrap_or(FIRST);
                self.handles.insert(*handle, at);
                Route::To(at)
            }
            Call::HandleMap { handle, addr, .. } => {
                let at = self.handles.get(handle).copied().unwrap_or(FIRST);
                match self.holding(*addr) {
                    Some(other) if other != at => Route::Refused(MAPPED),
                    _ => Route::To(at),
                }
            }
            Call::HandleAccess { addr, device, access, .. } => {
                let at = self.holding(*addr).unwrap_or(FIRST);
                match self.having(*device) {
                    // It has none.
                    Some(other) if other != at && *access == 0 => Route::Answered(Ok(())),
                    Some(other) if other != at => Route::Refused(ACCESS),
                    _ => Route::To(at),
                }
            }
            Call::HandleExport { .. }
            | Call::HandleImport { .. }
            | Call::SlabShare { .. }
            | Call::PeerOpen { .. }
            | Call::EventShare { .. }
            | Call::EventOpen { .. }
            | Call::Adopt { .. } => Route::Refused(SHARED),
        }
    }

    /// Takes note of what the record of a place makes that goes on from an image.
    pub(crate) fn remember(&mut self, step: &SavedStep) {
        match step {
            SavedStep::Message { message, .. } => _ = self.route(message),
            SavedStep::Module { ctx, module, .. } | SavedStep::Linked { ctx, module, .. } => {
                self.modules.insert(*module, *ctx);
            }
        }
    }

    /// What is a context's goes with it.
    fn forget(&mut self, ctx: CtxId) {
        self.contexts.remove(&ctx);
        self.streams.retain(|_, of| *of != ctx);
        self.events.retain(|_, of| *of != ctx);
        self.modules.retain(|_, of| *of != ctx);
        self.arrays.retain(|_, of| *of != ctx);
        self.graphs.retain(|_, of| *of != ctx);
    }

    /// Returns the place that has a device.
    fn having(&self, device: u32) -> Option<At> {
        self.places.iter().position(|windows| windows.position(device).is_some())
    }

    /// Returns the place whose device has memory at an address, where its address tells.
    pub(crate) fn holding(&self, addr: u64) -> Option<At> {
        self.having(device_of(addr)?)
    }

    fn of_context(&self, ctx: CtxId) -> Option<At> {
        self.contexts.get(&ctx).map(|context| context.at)
    }

    fn of_stream(&self, stream: StreamId) -> Option<At> {
        self.of_context(*self.streams.get(&stream)?)
    }

    /// Returns the context of a stream.
    pub(crate) fn context_of(&self, stream: StreamId) -> Option<CtxId> {
        self.streams.get(&stream).copied()
    }

    fn of_event(&self, event: EventId) -> Option<At> {
        self.of_context(*self.events.get(&event)?)
    }

    fn of_module(&self, module: ModuleId) -> Option<At> {
        self.of_context(*self.modules.get(&module)?)
    }

    fn of_graph(&self, exec: GraphExecId) -> Option<At> {
        self.of_context(*self.graphs.get(&exec)?)
    }

    /// Returns the place that has a side of a copy, if that is any device's.
    pub(crate) fn of_side(&self, side: &Side) -> Option<At> {
        match side {
            Side::Mapped { addr, .. } => self.holding(*addr),
            Side::Client { .. } => None,
            Side::Array { array, .. } => self.of_context(*self.arrays.get(array)?),
        }
    }

    /// Returns the places whose devices an operation is about, as far as it says so.
    pub(crate) fn about(&self, op: &StreamOp) -> [Option<At>; 2] {
        let one = match op {
            StreamOp::Copy { copy } => return [self.of_side(&copy.src), self.of_side(&copy.dst)],
            StreamOp::Launch { launch } => self.of_module(launch.kernel.module),
            StreamOp::EventRecord { event } | StreamOp::EventWait { event } => {
                self.of_event(*event)
            }
            StreamOp::GraphLaunch { exec } => self.of_graph(*exec),
            StreamOp::CopyInline { dst: addr, .. }
            | StreamOp::Memset { dst: addr, .. }
            | StreamOp::WriteValue { addr, .. }
            | StreamOp::WaitValue { addr, .. }
            | StreamOp::MemAlloc { addr, .. }
            | StreamOp::MemFree { addr, .. } => self.holding(*addr),
            // Managed memory, of which one place has all.
            StreamOp::Scatter { pieces } => {
                pieces.first().and_then(|piece| self.holding(piece.dst))
            }
            StreamOp::Conditional { condition, bodies, .. } => {
                let at = self.holding(*condition);
                let body = bodies.iter().map(|body| self.of_graph(*body)).find(|of| *of != at);
                return [at, body.flatten()];
            }
            StreamOp::Empty {} | StreamOp::HostFn { .. } | StreamOp::SetCondition { .. } => None,
        };
        [one, None]
    }

    /// Returns whether an operation is about one place alone.
    pub(crate) fn is_of(&self, op: &StreamOp, at: At) -> bool {
        self.about(op).into_iter().flatten().all(|of| of == at)
    }

    /// Returns a context of a place in which an operation can be carried out there: one of the
    /// device that has the memory at `addr`, where that is known.
    pub(crate) fn any_context(&self, at: At, addr: Option<u64>) -> Option<CtxId> {
        let device = addr.and_then(device_of);
        let here = || self.contexts.iter().filter(|(_, context)| context.at == at);
        let on = here().find(|(_, context)| Some(context.device) == device);
        on.or_else(|| here().next()).map(|(ctx, _)| *ctx)
    }

    /// Returns the context of what an operation names, at a place.
    pub(crate) fn context_for(&self, op: &StreamOp, at: At) -> Option<CtxId> {
        let of_side = |side: &Side| match side {
            Side::Array { array, .. } => self.arrays.get(array).copied(),
            Side::Mapped { addr, .. } if self.holding(*addr) == Some(at) => {
                self.any_context(at, Some(*addr))
            }
            _ => None,
        };
        let named = match op {
            StreamOp::EventRecord { event } | StreamOp::EventWait { event } => {
                self.events.get(event).copied()
            }
            StreamOp::GraphLaunch { exec } => self.graphs.get(exec).copied(),
            StreamOp::Copy { copy } => {
                let sides = [&copy.src, &copy.dst];
                sides.into_iter().filter(|side| self.of_side(side) == Some(at)).find_map(of_side)
            }
            StreamOp::CopyInline { dst: addr, .. }
            | StreamOp::Memset { dst: addr, .. }
            | StreamOp::WriteValue { addr, .. }
            | StreamOp::WaitValue { addr, .. }
            | StreamOp::MemAlloc { addr, .. }
            | StreamOp::MemFree { addr, .. } => self.any_context(at, Some(*addr)),
            _ => None,
        };
        named.or_else(|| self.any_context(at, None))
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
