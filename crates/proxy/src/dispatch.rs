//! From messages to the backend. A message without an arm here does not compile.

mod modules;

use crate::away::SwappedOut;
use crate::host::ProxyHost;
use crate::record::{Record, Step, asking};
use crate::room::{Vain, Wish};
use crate::shared::SharedMemory;
use crate::sharing::{Adopted, Sharing};
use crate::taken::{Arrays, Ends, taking_nothing, wants};
use kedge_control::sharing::What;
use kedge_control::{error, warn};
use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::TensorMap;
use kedge_device::{Backend, Done, Maker, Placing, SnapshotError};
use kedge_protocol::{
    Call, CtxId, Elapsed, GraphExecId, MemHandleId, Message, PeerName, Post, Status, StreamId,
};
use kedge_transport::{Incoming, ReplyTo};
use kedge_wire::Wire;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// CU_LIMIT_MALLOC_HEAP_SIZE: it and those before it, of stacks and printf, programs rely on.
const LAST_OF_MEMORY: u32 = 2;
/// What a GPU needs for a context, with some to spare.
const CONTEXT_BYTES: u64 = 512 << 20;

pub(crate) struct Dispatcher {
    backend: Arc<dyn Backend>,
    host: Arc<ProxyHost>,
    /// Whose error a failing post becomes.
    streams: HashMap<StreamId, CtxId>,
    graphs: HashMap<GraphExecId, CtxId>,
    pub(crate) contexts: Vec<CtxId>,
    /// On which device each context is.
    devices: HashMap<CtxId, u32>,
    /// Memory that caches were asked for and did not give.
    vain: Vain,
    shared: SharedMemory,
    pub(crate) sharing: Sharing,
    pub(crate) record: Record,
    /// The devices' memory is not there.
    pub(crate) away: Option<SwappedOut>,
    pub(crate) arrays: Arrays,
    /// Others' memory, and its bytes.
    pub(crate) opened: HashMap<MemHandleId, u64>,
}

fn plain(result: Result<(), CuError>) -> Result<u64, CuError> {
    result.map(|()| 0)
}

fn status(result: Result<(), CuError>) -> Status {
    result.map_err(|error| error.0)
}

impl Dispatcher {
    /// `socket`: the client's.
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        host: Arc<ProxyHost>,
        socket: OwnedFd,
    ) -> Dispatcher {
        Dispatcher {
            sharing: Sharing::new(backend.clone(), host.clone(), socket),
            backend,
            host,
            streams: HashMap::new(),
            graphs: HashMap::new(),
            contexts: Vec::new(),
            devices: HashMap::new(),
            vain: Vain::default(),
            shared: SharedMemory::default(),
            record: Record::default(),
            away: None,
            arrays: Arrays::default(),
            opened: HashMap::new(),
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// For other threads.
    pub(crate) fn shared_backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend)
    }

    fn placing(&self) -> Result<&dyn Placing, CuError> {
        self.backend.placing().ok_or(CuError::NOT_SUPPORTED)
    }

    pub(crate) fn host(&self) -> &ProxyHost {
        &self.host
    }

    /// Whether everything that was dispatched is over, and everybody who waited for it knows.
    pub(crate) fn at_rest(&self) -> bool {
        self.host.waiting.load(Ordering::SeqCst) == 0
            && self.host.host_fns.none()
            && self.sharing.delivered()
            && self.backend.at_rest()
    }

    pub(crate) fn dispatch(&mut self, incoming: Incoming) {
        if self.away.is_some() {
            self.come_back();
        }
        match (incoming.message, incoming.reply_to) {
            (Message::Post { post }, _) => self.post(post),
            (Message::Call { call }, Some(to)) => self.call(call, to),
            // The ring lets no call through without a slot.
            (Message::Call { .. }, None) => {}
        }
        self.host.set_dispatched(incoming.seq);
    }

    pub(crate) fn post(&mut self, post: Post) {
        // By far the most frequent post: nothing is looked up or kept for it unless it fails.
        if let Post::Enqueue { stream, op } = post {
            if let Err(error) = self.backend.submit(stream, op) {
                self.post_failed("Enqueue", self.streams.get(&stream).copied(), error);
            }
            return;
        }
        let name = post.name();
        let ctx = self.context_of(&post);
        let kept = Record::wants(&post).then(|| post.clone());
        let ends = Ends::of(&post);
        let done = self.run_post(post);
        // What has not ended is had.
        self.posted(if done.is_ok() { ends } else { Ends::Memory });
        match (done, kept) {
            (Err(error), _) => self.post_failed(name, ctx, error),
            (Ok(()), Some(post)) => self.record.post(post),
            (Ok(()), None) => {}
        }
    }

    fn run_post(&mut self, post: Post) -> Result<(), CuError> {
        let backend = &self.backend;
        match post {
            Post::CtxDestroy { ctx } => {
                let result = backend.destroy_context(ctx);
                self.forget_context(ctx);
                result
            }
            Post::StreamCreate { stream, ctx, blocking, priority } => {
                self.streams.insert(stream, ctx);
                backend.create_stream(stream, ctx, blocking, priority)
            }
            Post::StreamDestroy { stream } => {
                self.streams.remove(&stream);
                backend.destroy_stream(stream)
            }
            Post::EventCreate { event, ctx, timing, interprocess } => {
                backend.create_event(event, ctx, timing, interprocess)
            }
            Post::EventDestroy { event } => {
                self.sharing.event_ends(event);
                backend.destroy_event(event)
            }
            Post::Enqueue { stream, op } => backend.submit(stream, op),
            Post::MemAlloc { ctx, addr, size } => backend.map(ctx, addr, size),
            Post::MemFree { addr, size } => backend.unmap(addr, size),
            Post::ModuleUnload { module } => backend.unload_module(module),
            Post::ArrayDestroy { array } => backend.destroy_array(array),
            Post::TextureDestroy { ctx, handle } => backend.destroy_texture(ctx, handle),
            Post::GraphExecBegin { exec, ctx } => {
                self.graphs.insert(exec, ctx);
                backend.graph_begin(exec, ctx)
            }
            Post::GraphExecNode { exec, op } => backend.graph_node(exec, op),
            Post::GraphExecEdges { exec, edges } => backend.graph_edges(exec, &edges),
            Post::GraphExecReady { exec, priorities } => backend.graph_ready(exec, priorities),
            Post::GraphExecUpdate { exec, node, op } => backend.graph_update(exec, node, op),
            Post::GraphExecDestroy { exec } => {
                self.graphs.remove(&exec);
                backend.graph_destroy(exec)
            }
            Post::Unshare { addr, size } => self.shared.unshare(&**backend, addr, size),
            Post::Unalias { alias, size } => self.shared.unalias(&**backend, alias, size),
            Post::Disown { addr, size } => {
                let ended = self.shared.disown(addr, size);
                self.sharing.files = self.shared.adopts();
                ended
            }
            Post::HandleDestroy { handle } => {
                self.sharing.handle_ends(handle);
                backend.destroy_handle(handle)
            }
            Post::HandleUnmap { addr, size } => backend.unmap_handle(addr, size),
            Post::KernelAttribute { kernel, attribute, value } => {
                backend.set_kernel_attribute(kernel, attribute, value)
            }
        }
    }

    /// The context that a post belongs to, where it says so.
    fn context_of(&self, post: &Post) -> Option<CtxId> {
        match post {
            Post::CtxDestroy { ctx }
            | Post::StreamCreate { ctx, .. }
            | Post::EventCreate { ctx, .. }
            | Post::MemAlloc { ctx, .. }
            | Post::TextureDestroy { ctx, .. }
            | Post::GraphExecBegin { ctx, .. } => Some(*ctx),
            Post::StreamDestroy { stream } | Post::Enqueue { stream, .. } => {
                self.streams.get(stream).copied()
            }
            Post::GraphExecNode { exec, .. }
            | Post::GraphExecEdges { exec, .. }
            | Post::GraphExecReady { exec, .. }
            | Post::GraphExecUpdate { exec, .. }
            | Post::GraphExecDestroy { exec } => self.graphs.get(exec).copied(),
            Post::EventDestroy { .. }
            | Post::MemFree { .. }
            | Post::ModuleUnload { .. }
            | Post::ArrayDestroy { .. }
            | Post::Unshare { .. }
            | Post::Unalias { .. }
            | Post::Disown { .. }
            | Post::HandleDestroy { .. }
            | Post::HandleUnmap { .. }
            | Post::KernelAttribute { .. } => None,
        }
    }

    /// A post has no reply, so its failure breaks its context; every context, where it names none.
    fn post_failed(&self, name: &str, ctx: Option<CtxId>, error: CuError) {
        use kedge_device::Host;
        // Work that follows a fault fails with it, which is not worth a line.
        if self.host.faults.check(ctx) != Err(error) {
            warn!(self.host.log, "{name} failed: {error}");
        }
        match ctx {
            Some(ctx) => self.host.fault(ctx, error),
            None => self.contexts.iter().for_each(|ctx| self.host.fault(*ctx, error)),
        }
    }

    fn forget_context(&mut self, ctx: CtxId) {
        self.contexts.retain(|other| *other != ctx);
        self.devices.remove(&ctx);
        self.streams.retain(|_, owner| *owner != ctx);
        self.graphs.retain(|_, owner| *owner != ctx);
        self.sharing.context_ends(ctx);
        self.host.faults.clear(&*self.host.outlet, ctx);
    }

    fn call(&mut self, call: Call, to: ReplyTo) {
        let backend = &self.backend;
        let code = |error: CuError| error.0;
        match call {
            Call::CtxCreate { .. }
            | Call::SetLimit { .. }
            | Call::Grant { .. }
            | Call::Return { .. }
            | Call::ArrayCreate { .. }
            | Call::MipmapCreate { .. }
            | Call::HandleCreate { .. }
            | Call::HandleMap { .. }
            | Call::HandleAccess { .. }
            | Call::Share { .. }
            | Call::Alias { .. } => {
                let made = self.make(call);
                self.answer(to, &status(made.map(drop)));
            }
            Call::TextureCreate { .. } => {
                let made = self.make(call);
                self.answer(to, &made.map_err(code));
            }
            Call::MemFree { device } => {
                self.answer(to, &self.free_memory(device).map_err(code));
            }
            Call::ModuleLoad { ctx, module, image } => {
                let loaded = self.load(ctx, module, image);
                self.loaded(to, loaded);
            }
            Call::ModuleLink { ctx, module, images } => {
                let loaded = self.link(ctx, module, &images);
                self.loaded(to, loaded);
            }
            Call::Kernel { module, index, ref name } => {
                let found = backend.kernel(module, index, name);
                if found.is_ok() {
                    self.record.call(call, 0);
                }
                self.answer(to, &found.map_err(code));
            }
            Call::KernelNames { module, first } => {
                self.answer(to, &self.kernel_names(module, first).map_err(code));
            }
            Call::Global { module, name } => {
                self.answer(to, &backend.global(module, &name).map_err(code));
            }
            Call::StreamSync { stream } => {
                let ctx = self.streams.get(&stream).copied();
                backend.when_stream_idle(stream, self.answer_later(to, ctx));
            }
            Call::CtxSync { ctx } => {
                backend.when_context_idle(ctx, self.answer_later(to, Some(ctx)));
            }
            Call::EventSync { event } => {
                backend.when_event_done(event, self.answer_later(to, None));
            }
            Call::StreamQuery { stream } => {
                let result = backend.query_stream(stream);
                let fault = self.host.faults.check(self.streams.get(&stream).copied());
                self.answer(to, &status(fault.and(result)));
            }
            Call::EventQuery { event } => self.answer(to, &status(backend.query_event(event))),
            Call::EventElapsed { start, end } => {
                let elapsed = backend.elapsed_ms(start, end);
                let elapsed = elapsed.map(|milliseconds| Elapsed { milliseconds });
                self.answer(to, &elapsed.map_err(code));
            }
            Call::HandleExport { handle } if self.sharing.far => {
                let named = self.sharing.name_handle(handle, self.bytes_of(handle));
                self.answer(to, &named.map_err(code));
            }
            Call::HandleExport { handle } => {
                let exported = self.sharing.export_handle(handle);
                self.answer(to, &status(exported));
            }
            Call::HandleImport { handle, ticket } => {
                let imported = self.sharing.import_handle(handle, ticket);
                if imported.is_ok() {
                    self.record.call(call, 0);
                }
                self.answer(to, &imported.map_err(code));
            }
            Call::Adopt { addr, size, offset, ticket } => {
                let file = self.host.tickets.take(ticket);
                let shown = file.and_then(|file| self.shared.adopt(file, offset, addr, size));
                self.sharing.files = self.shared.adopts();
                self.answer(to, &status(shown));
            }
            Call::SlabShare { addr } => {
                let shared = self.sharing.share_slab(addr);
                self.answer(to, &shared.map_err(code));
            }
            Call::PeerOpen { handle, name } => {
                let opened = self.open_peer(handle, &name);
                if opened.is_ok() {
                    self.record.call(call, 0);
                }
                self.answer(to, &opened.map_err(code));
            }
            Call::EventShare { event } => {
                let shared = self.sharing.share_event(event);
                self.answer(to, &shared.map_err(code));
            }
            Call::EventOpen { event, ctx, name } => {
                let opened = self.sharing.open_event(event, ctx, &name);
                if opened.is_ok() {
                    self.record.call(call, 0);
                }
                self.answer(to, &status(opened));
            }
            Call::TakeOutput {} => self.answer(to, &self.host.take_output()),
            Call::Occupancy { kernel, query } => {
                self.answer(to, &backend.occupancy(kernel, &query).map_err(code));
            }
            Call::Limit { ctx, limit } => {
                self.answer(to, &backend.limit(ctx, limit).map_err(code));
            }
            Call::TensorMap { map } => {
                let map = TensorMap::decode(&map).ok_or(CuError::INVALID_VALUE);
                let made = map.and_then(|map| self.placing()?.tensor_map(&map));
                self.answer(to, &made.map_err(code));
            }
            Call::TensorMapMove { map, address } => {
                let moved = self.placing().and_then(|role| role.move_tensor_map(&map, address));
                self.answer(to, &moved.map_err(code));
            }
            Call::CheckPlaced { ctx, addr, size } => {
                // Without a driver that places anything, nothing lies outside of the arenas.
                let role = self.backend.placing().ok_or(CuError::INVALID_VALUE);
                self.answer(to, &status(role.and_then(|role| role.check_placed(ctx, addr, size))));
            }
            Call::Ping {} => self.answer::<Status>(to, &Ok(())),
        }
    }

    /// Carries out a call that makes or ends something and answers with its outcome alone, or with
    /// the handle of a texture.
    fn make(&mut self, call: Call) -> Result<u64, CuError> {
        self.charge(&call)?;
        let mut made = self.make_it(&call);
        if made == Err(CuError::OUT_OF_MEMORY)
            && let Some(mut wish) = self.wish(&call)
        {
            while made == Err(CuError::OUT_OF_MEMORY) && wish.make() {
                made = self.make_it(&call);
            }
            if made == Err(CuError::OUT_OF_MEMORY) {
                self.vain.note(&wish);
            }
        }
        self.called(&call, made.is_ok());
        if let Ok(made) = made {
            self.record.call(call, made);
        }
        made
    }

    /// Returns the room that a call needs, where caches may have memory of its device.
    fn wish(&self, call: &Call) -> Option<Wish> {
        let of = |ctx: &CtxId| self.devices.get(ctx).copied();
        let (device, bytes) = match call {
            Call::CtxCreate { device, .. } => (Some(*device), CONTEXT_BYTES),
            Call::Grant { device, bytes, .. } => (Some(*device), *bytes),
            Call::HandleCreate { device, size, .. } => (Some(*device), *size),
            Call::ArrayCreate { ctx, .. } | Call::MipmapCreate { ctx, .. } => {
                (of(ctx), wants(call))
            }
            taking_nothing!() => return None,
        };
        let device = self.backend.shared_as(device?)?;
        (!self.vain.has(&device, bytes)).then(|| Wish::new(device, bytes))
    }

    fn make_it(&mut self, call: &Call) -> Result<u64, CuError> {
        let backend = &self.backend;
        let made = match call {
            Call::CtxCreate { ctx, device, legacy } => {
                backend.create_context(*ctx, *device, *legacy)?;
                self.contexts.push(*ctx);
                self.devices.insert(*ctx, *device);
                self.streams.insert(*legacy, *ctx);
                0
            }
            Call::SetLimit { ctx, limit, value } => plain(backend.set_limit(*ctx, *limit, *value))?,
            Call::Grant { device, addr, bytes } => plain(backend.grant(*device, *addr, *bytes))?,
            Call::Return { device, addr, bytes } => {
                self.sharing.slab_ends(*addr);
                plain(backend.give_back(*device, *addr, *bytes))?
            }
            Call::ArrayCreate { ctx, array, desc } => {
                plain(backend.create_array(*ctx, *array, desc))?
            }
            Call::MipmapCreate { ctx, levels, desc } => {
                plain(backend.create_mipmap(*ctx, levels, desc))?
            }
            Call::TextureCreate { ctx, texture } => backend.create_texture(*ctx, texture)?,
            Call::HandleCreate { handle, device, size, shareable } => {
                plain(backend.create_handle(*handle, *device, *size, *shareable))?
            }
            Call::HandleMap { handle, addr, size, offset } => {
                plain(backend.map_handle(*handle, *addr, *size, *offset))?
            }
            Call::HandleAccess { addr, size, device, access } => {
                plain(backend.set_access(*addr, *size, *device, *access))?
            }
            Call::Share { addr, size } => plain(self.shared.share(&**backend, *addr, *size))?,
            Call::Alias { alias, addr, size } => {
                plain(self.shared.alias(&**backend, *alias, *addr, *size))?
            }
            Call::Kernel { .. }
            | Call::HandleImport { .. }
            | Call::PeerOpen { .. }
            | Call::EventOpen { .. }
            | asking!() => return Err(CuError::NOT_SUPPORTED),
        };
        Ok(made)
    }

    /// Makes what gave `result` once.
    fn make_again(&mut self, call: Call, result: u64) -> Result<(), CuError> {
        // A texture's handle lies in the client's memory.
        let same = self.make(call)? == result;
        if same { Ok(()) } else { Err(CuError::INVALID_HANDLE) }
    }

    /// Makes this client the owner of memory or of an event that it had opened from another
    /// process, which has given it up, and returns its name.
    pub(crate) fn adopt(&mut self, what: What) -> Result<PeerName, SnapshotError> {
        let mapped = match what {
            What::Handle { handle } => self.record.mapped_bytes(handle),
            What::Slab { .. } | What::Event { .. } => 0,
        };
        let (name, adopted) = self.sharing.adopt(what, mapped)?;
        match adopted {
            Adopted::Memory { handle, device, size } => {
                self.opened.remove(&handle);
                self.record.adopt_handle(handle, device, size);
            }
            Adopted::Event { event, ctx } => self.record.adopt_event(event, ctx),
        }
        Ok(name)
    }

    /// Does a step of a restart: what a client once asked for.
    fn repeat(&mut self, step: Step) -> Result<(), CuError> {
        match step {
            Step::Module { ctx, module, code } => {
                let loaded = self.load_code(ctx, module, code);
                loaded.map_err(|error| {
                    // Names what differs from how it was.
                    warn!(self.host.log, "a module cannot be loaded again: {}", &*error.message);
                    CuError(error.code)
                })
            }
            Step::Message { message: Message::Post { post }, .. } => {
                // Work, and what no record holds.
                if !Record::wants(&post) {
                    return Err(CuError::NOT_SUPPORTED);
                }
                let kept = post.clone();
                self.run_post(post)?;
                if let Post::EventCreate { event, .. } = kept {
                    self.sharing.made(What::Event { event })?;
                }
                self.record.post(kept);
                Ok(())
            }
            Step::Message { message: Message::Call { call }, result } => {
                let mut made = None;
                match &call {
                    Call::Kernel { module, index, name } => {
                        self.backend.kernel(*module, *index, name)?;
                    }
                    Call::HandleImport { handle, .. } | Call::PeerOpen { handle, .. } => {
                        self.sharing.borrow_handle(*handle)?;
                    }
                    Call::EventOpen { event, ctx, .. } => {
                        self.sharing.borrow_event(*event, *ctx)?;
                    }
                    Call::Grant { addr, .. } => made = Some(What::Slab { addr: *addr }),
                    Call::HandleCreate { handle, .. } => {
                        made = Some(What::Handle { handle: *handle });
                    }
                    Call::SetLimit { limit, .. } => {
                        let limit = *limit;
                        return match self.make_again(call.clone(), result) {
                            // Other devices once took it, and it says nothing to these.
                            Err(CuError::UNSUPPORTED_LIMIT) if limit > LAST_OF_MEMORY => {
                                self.record.call(call, result);
                                Ok(())
                            }
                            other => other,
                        };
                    }
                    Call::CtxCreate { .. }
                    | Call::Return { .. }
                    | Call::ArrayCreate { .. }
                    | Call::MipmapCreate { .. }
                    | Call::TextureCreate { .. }
                    | Call::HandleMap { .. }
                    | Call::HandleAccess { .. }
                    | Call::Share { .. }
                    | Call::Alias { .. } => return self.make_again(call, result),
                    asking!() => return Err(CuError::NOT_SUPPORTED),
                }
                match made {
                    None => self.record.call(call, 0),
                    Some(what) => {
                        self.make_again(call, result)?;
                        self.sharing.made(what)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn answer<T: Wire>(&self, to: ReplyTo, value: &T) {
        answer(&self.host, to, value);
    }

    /// Answers once the device says so. A context that broke meanwhile answers with its error.
    fn answer_later(&self, to: ReplyTo, ctx: Option<CtxId>) -> Done {
        let host = self.host.clone();
        host.waiting.fetch_add(1, Ordering::SeqCst);
        Box::new(move |result| {
            answer(&host, to, &status(host.faults.check(ctx).and(result)));
            host.waiting.fetch_sub(1, Ordering::SeqCst);
        })
    }
}

/// Until a restart is over, a dispatcher does the steps of the record alone.
impl Maker for Dispatcher {
    type Step = Step;
    type Error = CuError;

    fn make(&mut self, step: Step) -> Result<(), CuError> {
        self.repeat(step)
    }
}

fn answer<T: Wire>(host: &ProxyHost, to: ReplyTo, value: &T) {
    let mut bytes = Vec::with_capacity(64);
    kedge_wire::encode(value, &mut bytes);
    if let Err(error) = host.outlet.reply(to, &bytes) {
        // The caller would wait for ever: better no proxy than a silent one.
        error!(host.log, "cannot answer a call: {error}");
        host.outlet.close();
    }
}
