//! From messages to the backend. A message without an arm here does not compile.

use crate::host::ProxyHost;
use crate::shared::SharedMemory;
use crate::sharing::Sharing;
use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::TensorMap;
use kedge_device::{Backend, Done};
use kedge_protocol::{
    Call, CtxId, Elapsed, GraphExecId, KernelNames, LoadError, Message, ModuleId, ModuleImage,
    Post, Status, StreamId,
};
use kedge_transport::{Incoming, ReplyTo};
use kedge_wire::{List, Text, Wire};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Longest module image, bytes: the largest fatbins of the large libraries are some hundred MiB.
const MAX_IMAGE: u64 = 2 << 30;
/// Kernel names in one reply, in number and in bytes.
const MAX_NAMES: usize = 4096;
const MAX_NAME_BYTES: usize = 1 << 20;

pub(crate) struct Dispatcher {
    backend: Arc<dyn Backend>,
    host: Arc<ProxyHost>,
    /// Whose error a failing post becomes.
    streams: HashMap<StreamId, CtxId>,
    graphs: HashMap<GraphExecId, CtxId>,
    contexts: Vec<CtxId>,
    shared: SharedMemory,
    sharing: Sharing,
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
            shared: SharedMemory::default(),
        }
    }

    pub(crate) fn dispatch(&mut self, incoming: Incoming) {
        match (incoming.message, incoming.reply_to) {
            (Message::Post { post }, _) => self.post(post),
            (Message::Call { call }, Some(to)) => self.call(call, to),
            // The ring lets no call through without a slot.
            (Message::Call { .. }, None) => {}
        }
        self.host.set_dispatched(incoming.seq);
    }

    fn post(&mut self, post: Post) {
        let name = post.name();
        let ctx = self.context_of(&post);
        if let Err(error) = self.run_post(post) {
            self.post_failed(name, ctx, error);
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
            Post::GraphExecReady { exec } => backend.graph_ready(exec),
            Post::GraphExecUpdate { exec, node, op } => backend.graph_update(exec, node, op),
            Post::GraphExecDestroy { exec } => {
                self.graphs.remove(&exec);
                backend.graph_destroy(exec)
            }
            Post::Unshare { addr, size } => self.shared.unshare(&**backend, addr, size),
            Post::Unalias { alias, size } => self.shared.unalias(alias, size),
            Post::HandleDestroy { handle } => backend.destroy_handle(handle),
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
            | Post::GraphExecReady { exec }
            | Post::GraphExecUpdate { exec, .. }
            | Post::GraphExecDestroy { exec } => self.graphs.get(exec).copied(),
            Post::EventDestroy { .. }
            | Post::MemFree { .. }
            | Post::ModuleUnload { .. }
            | Post::ArrayDestroy { .. }
            | Post::Unshare { .. }
            | Post::Unalias { .. }
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
            self.host.log(&format!("{name} failed: {error}"));
        }
        match ctx {
            Some(ctx) => self.host.fault(ctx, error),
            None => self.contexts.iter().for_each(|ctx| self.host.fault(*ctx, error)),
        }
    }

    fn forget_context(&mut self, ctx: CtxId) {
        self.contexts.retain(|other| *other != ctx);
        self.streams.retain(|_, owner| *owner != ctx);
        self.graphs.retain(|_, owner| *owner != ctx);
        self.host.faults.clear(&self.host.outbox, ctx);
    }

    fn call(&mut self, call: Call, to: ReplyTo) {
        let backend = &self.backend;
        let code = |error: CuError| error.0;
        match call {
            Call::CtxCreate { ctx, device, legacy } => {
                let made = backend.create_context(ctx, device, legacy);
                if made.is_ok() {
                    self.contexts.push(ctx);
                    self.streams.insert(legacy, ctx);
                }
                self.answer(to, &status(made));
            }
            Call::Grant { device, addr, bytes } => {
                self.answer(to, &status(backend.grant(device, addr, bytes)));
            }
            Call::Return { device, addr, bytes } => {
                self.sharing.slab_ends(addr);
                self.answer(to, &status(backend.give_back(device, addr, bytes)));
            }
            Call::MemFree { device } => {
                self.answer(to, &backend.free_memory(device).map_err(code));
            }
            Call::ModuleLoad { ctx, module, image } => {
                let loaded = self
                    .read_image(&image)
                    .and_then(|image| self.backend.load_module(ctx, module, vec![image]));
                self.loaded(to, loaded);
            }
            Call::ModuleLink { ctx, module, images } => {
                let loaded = self
                    .read_images(&images)
                    .and_then(|images| self.backend.load_module(ctx, module, images));
                self.loaded(to, loaded);
            }
            Call::Kernel { module, index, name } => {
                self.answer(to, &backend.kernel(module, index, &name).map_err(code));
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
            Call::ArrayCreate { ctx, array, desc } => {
                self.answer(to, &status(backend.create_array(ctx, array, &desc)));
            }
            Call::MipmapCreate { ctx, levels, desc } => {
                self.answer(to, &status(backend.create_mipmap(ctx, &levels, &desc)));
            }
            Call::TextureCreate { ctx, texture } => {
                self.answer(to, &backend.create_texture(ctx, &texture).map_err(code));
            }
            Call::HandleCreate { handle, device, size, shareable } => {
                let made = backend.create_handle(handle, device, size, shareable);
                self.answer(to, &status(made));
            }
            Call::HandleMap { handle, addr, size, offset } => {
                self.answer(to, &status(backend.map_handle(handle, addr, size, offset)));
            }
            Call::HandleAccess { addr, size, device, access } => {
                self.answer(to, &status(backend.set_access(addr, size, device, access)));
            }
            Call::HandleExport { handle } => {
                self.answer(to, &status(self.sharing.export_handle(handle)));
            }
            Call::HandleImport { handle, ticket } => {
                self.answer(to, &self.sharing.import_handle(handle, ticket).map_err(code));
            }
            Call::SlabShare { addr } => {
                let shared = self.sharing.share_slab(addr);
                self.answer(to, &shared.map_err(code));
            }
            Call::PeerOpen { handle, name } => {
                self.answer(to, &self.sharing.open_slab(handle, &name).map_err(code));
            }
            Call::EventShare { event } => {
                let shared = self.sharing.share_event(event);
                self.answer(to, &shared.map_err(code));
            }
            Call::EventOpen { event, ctx, name } => {
                self.answer(to, &status(self.sharing.open_event(event, ctx, &name)));
            }
            Call::Share { addr, size } => {
                let shared = self.shared.share(&**backend, addr, size);
                self.answer(to, &status(shared));
            }
            Call::TakeOutput {} => self.answer(to, &self.host.take_output()),
            Call::Alias { alias, addr, size } => {
                let aliased = self.shared.alias(alias, addr, size);
                self.answer(to, &status(aliased));
            }
            Call::Occupancy { kernel, query } => {
                self.answer(to, &backend.occupancy(kernel, &query).map_err(code));
            }
            Call::SetLimit { ctx, limit, value } => {
                self.answer(to, &status(backend.set_limit(ctx, limit, value)));
            }
            Call::Limit { ctx, limit } => {
                self.answer(to, &backend.limit(ctx, limit).map_err(code));
            }
            Call::TensorMap { map } => {
                let map = TensorMap::decode(&map).ok_or(CuError::INVALID_VALUE);
                self.answer(to, &map.and_then(|map| backend.tensor_map(&map)).map_err(code));
            }
            Call::TensorMapMove { map, address } => {
                self.answer(to, &backend.move_tensor_map(&map, address).map_err(code));
            }
            Call::CheckPlaced { ctx, addr, size } => {
                self.answer(to, &status(backend.check_placed(ctx, addr, size)));
            }
            Call::Ping {} => self.answer::<Status>(to, &Ok(())),
        }
    }

    fn answer<T: Wire>(&self, to: ReplyTo, value: &T) {
        answer(&self.host, to, value);
    }

    /// Answers once the device says so. A context that broke meanwhile answers with its error.
    fn answer_later(&self, to: ReplyTo, ctx: Option<CtxId>) -> Done {
        let host = self.host.clone();
        Box::new(move |result| {
            answer(&host, to, &status(host.faults.check(ctx).and(result)));
        })
    }

    fn loaded(&self, to: ReplyTo, result: Result<(), LoadError>) {
        if let Err(error) = &result {
            let code = CuError(error.code);
            self.host.log.line(&format!("a module did not load: {code}: {}", &*error.message));
        }
        self.answer(to, &result);
    }

    /// As many of the module's kernel names as fit into a reply, from the `first` on.
    fn kernel_names(&self, module: ModuleId, first: u32) -> Result<KernelNames, CuError> {
        // What no message can hold cannot be asked for either.
        let all = self.backend.kernel_names(module)?.into_iter();
        let mut names = all.filter_map(|name| Text::new(name).ok()).skip(first as usize).peekable();
        let (mut page, mut bytes) = (Vec::new(), 0);
        while page.len() < MAX_NAMES && bytes < MAX_NAME_BYTES {
            let Some(name) = names.next() else { break };
            bytes += name.len();
            page.push(name);
        }
        let more = names.peek().is_some();
        Ok(KernelNames { names: List::new(page).unwrap_or_default(), more })
    }

    fn read_image(&self, image: &ModuleImage) -> Result<Vec<u8>, LoadError> {
        if image.len > MAX_IMAGE {
            return Err(load_error(
                CuError::INVALID_IMAGE,
                format!("an image of {} bytes exceeds the maximum {MAX_IMAGE}", image.len),
            ));
        }
        self.host.read_bytes(image.addr, image.len as usize).map_err(|error| {
            load_error(
                CuError::INVALID_IMAGE,
                format!("cannot read {} bytes at {:#x}: {error}", image.len, image.addr),
            )
        })
    }

    fn read_images(&self, images: &[ModuleImage]) -> Result<Vec<Vec<u8>>, LoadError> {
        let total = images.iter().fold(0u64, |sum, image| sum.saturating_add(image.len));
        if total > MAX_IMAGE {
            return Err(load_error(
                CuError::INVALID_IMAGE,
                format!("images of {total} bytes in all exceed the maximum {MAX_IMAGE}"),
            ));
        }
        images.iter().map(|image| self.read_image(image)).collect()
    }
}

fn load_error(code: CuError, message: String) -> LoadError {
    LoadError { code: code.0, message: Text::truncated(message) }
}

fn answer<T: Wire>(host: &ProxyHost, to: ReplyTo, value: &T) {
    let mut bytes = Vec::with_capacity(64);
    kedge_wire::encode(value, &mut bytes);
    if let Err(error) = host.outbox.reply(to, &bytes) {
        // The caller would wait for ever: better no proxy than a silent one.
        host.log.line(&format!("cannot answer a call: {error}"));
        host.outbox.close();
    }
}
