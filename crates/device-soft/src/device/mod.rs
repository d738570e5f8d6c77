//! The software device as a [`Backend`].
//!
//! - [`tables`]: what the client has named; operations become tasks there.
//! - [`streams`], [`events`], [`graphs`]: what runs after what.
//! - [`tasks`], [`work`], [`engine`]: tasks in execution.
//! - [`arena`], [`outside`], [`vmm`], [`shareable`]: device memory. [`shared_event`]: events of
//!   several processes. [`copies`], [`arrays`], [`textures`]: what is done with it.
//! - [`modules`]: from an image to a program. [`nested`]: grids that kernels launch. [`context`]:
//!   sticky errors, limits, kernels' services.
//! - [`start`]: how many devices of what size, before anybody uses them.
//! - [`info`], [`occupancy`]: what the program is told of the device.
//! - [`snapshot`]: what a checkpoint takes and a restart gives back. [`roles`]: what not every
//!   backend can do.

mod arena;
mod arrays;
mod conditional;
mod context;
mod copies;
mod engine;
mod events;
mod graphs;
mod info;
mod ledger;
mod modules;
mod nested;
mod occupancy;
mod outside;
mod placer;
mod roles;
mod runtime;
mod shareable;
mod shared_event;
mod snapshot;
mod start;
mod streams;
mod tables;
mod tasks;
#[cfg(test)]
mod tests;
mod textures;
mod traced;
mod vmm;
mod work;

pub use info::DRIVER_VERSION;
pub(crate) use occupancy::active_blocks;

use arrays::Array;
use context::Context;
use events::Event;
use graphs::Graph;
use kedge_cuda_types::CuError;
use kedge_device::{
    Backend, Code, Done, Interprocess, Ordered, Placing, Query, Restore, Snapshots, Swap,
};
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, DeviceInfo, EventId, GlobalInfo, GraphExecId, KernelInfo, KernelRef,
    LoadError, MemHandleId, ModuleId, Occupancy, StreamId, StreamOp, Texture,
};
use kedge_wire::Text;
use modules::Module;
use runtime::Runtime;
use shared_event::SharedEvent;
use snapshot::{Following, Stage};
pub use snapshot::{make_notes, read_notes};
pub use start::{SoftConfig, StartError, Started};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tables::Tables;
use tasks::{Task, lock};
use textures::TextureTable;
use vmm::Vmm;
use work::Work;

/// The software devices of one client.
pub struct SoftBackend {
    infos: Arc<[DeviceInfo]>,
    runtime: Arc<Runtime>,
    vmm: Vmm,
    textures: Arc<TextureTable>,
    tables: Arc<Mutex<Tables>>,
    /// How far a restart is.
    stage: Mutex<Stage>,
    /// Whether what is written is followed.
    writes: Mutex<Following>,
}

impl SoftBackend {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }

    /// What names a device to other processes.
    fn number(&self, device: u32) -> u32 {
        let at = self.runtime.memory.windows.position(device);
        at.and_then(|at| self.infos.get(at)).map_or(u32::MAX, info::number)
    }

    fn add_event(&self, id: EventId, ctx: CtxId, event: Event) -> Result<(), CuError> {
        let mut tables = self.tables();
        tables.streams.context(ctx)?;
        if tables.events.contains_key(&id) {
            return Err(CuError::INVALID_HANDLE);
        }
        tables.events.insert(id, (ctx, event));
        Ok(())
    }

    /// Calls `done` with the context's status once `pending` is over.
    fn notify(&self, ctx: &Arc<Context>, pending: &[Arc<Task>], done: Done) {
        if pending.is_empty() {
            return done(ctx.status());
        }
        self.runtime.start(&Task::new(Arc::clone(ctx), Work::Notify(done), pending));
    }
}

impl Backend for SoftBackend {
    fn devices(&self) -> Vec<DeviceInfo> {
        let exact = self.runtime.memory.is_exact();
        self.infos.iter().map(|info| DeviceInfo { exact, ..info.clone() }).collect()
    }

    fn driver_version(&self) -> u32 {
        DRIVER_VERSION
    }

    fn conclude(&self) {
        let Some(checker) = &self.runtime.memory.checker else { return };
        checker.conclude();
        checker.tell(&*self.runtime.host);
    }

    fn create_context(&self, ctx: CtxId, device: u32, legacy: StreamId) -> Result<(), CuError> {
        if self.runtime.memory.windows.position(device).is_none() {
            return Err(CuError::INVALID_DEVICE);
        }
        let (host, memory) = (Arc::clone(&self.runtime.host), Arc::clone(&self.runtime.memory));
        let (textures, infos) = (Arc::clone(&self.textures), Arc::clone(&self.infos));
        let context = Context::new(ctx, device, host, memory, textures, infos);
        self.tables().streams.add_context(Arc::new(context), legacy)
    }

    fn destroy_context(&self, ctx: CtxId) -> Result<(), CuError> {
        self.tables().destroy_context(&self.runtime, ctx)
    }

    fn set_limit(&self, ctx: CtxId, limit: u32, value: u64) -> Result<(), CuError> {
        self.tables().streams.context(ctx)?.set_limit(limit, value)
    }

    fn limit(&self, ctx: CtxId, limit: u32) -> Result<u64, CuError> {
        self.tables().streams.context(ctx)?.limit(limit)
    }

    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        self.runtime.memory.grant(device, addr, bytes)
    }

    fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        self.runtime.memory.give_back(device, addr, bytes)?;
        self.tables().forget_allocation(addr, bytes)
    }

    fn free_memory(&self, device: u32) -> Result<u64, CuError> {
        self.runtime.memory.free_memory(device)
    }

    fn used_memory(&self, device: u32) -> Option<u64> {
        self.runtime.memory.used_memory(device)
    }

    fn shared_as(&self, _device: u32) -> Option<[u8; 16]> {
        self.runtime.memory.shared_as()
    }

    fn map(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
        let mut tables = self.tables();
        tables.streams.context(ctx)?;
        self.runtime.memory.open(addr, size)?;
        tables.allocations.entry(ctx).or_default().add(addr, size);
        Ok(())
    }

    fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.runtime.memory.close(addr, size)?;
        self.tables().forget_allocation(addr, size)
    }

    fn share(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.runtime.memory.spans.insert(addr, size);
        Ok(())
    }

    fn unshare(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.runtime.memory.spans.remove(addr, size);
        Ok(())
    }

    fn lend_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        if self.vmm.overlaps(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        self.runtime.memory.lend(addr, size)
    }

    fn take_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.runtime.memory.take_lent(addr, size)
    }

    fn create_handle(
        &self,
        handle: MemHandleId,
        device: u32,
        size: u64,
        shareable: bool,
    ) -> Result<(), CuError> {
        let memory = &self.runtime.memory;
        memory.charge(device, size)?;
        let number = shareable.then(|| self.number(device));
        self.vmm.create(handle, device, size, number).or_else(|error| {
            memory.refund(device, size)?;
            Err(error)
        })
    }

    fn destroy_handle(&self, handle: MemHandleId) -> Result<(), CuError> {
        match self.vmm.destroy(handle)? {
            Some((device, size)) => self.runtime.memory.refund(device, size),
            None => Ok(()),
        }
    }

    fn map_handle(
        &self,
        handle: MemHandleId,
        addr: u64,
        size: u64,
        offset: u64,
    ) -> Result<(), CuError> {
        self.runtime.memory.reuse(addr, size)?;
        if self.runtime.memory.is_lent(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        self.vmm.map(handle, addr, size, offset)
    }

    fn unmap_handle(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.vmm.unmap(addr, size)
    }

    fn set_access(&self, addr: u64, size: u64, device: u32, access: u32) -> Result<(), CuError> {
        if self.runtime.memory.windows.position(device).is_none() {
            return Err(CuError::INVALID_DEVICE);
        }
        self.vmm.set_access(addr, size, access)
    }

    fn create_array(&self, ctx: CtxId, array: ArrayId, desc: &ArrayDesc) -> Result<(), CuError> {
        self.create_mipmap(ctx, &[array], desc)
    }

    fn create_mipmap(
        &self,
        ctx: CtxId,
        levels: &[ArrayId],
        desc: &ArrayDesc,
    ) -> Result<(), CuError> {
        let mut tables = self.tables();
        tables.streams.context(ctx)?;
        if levels.is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        let mut made = HashMap::new();
        for (&id, number) in levels.iter().zip(0..) {
            let array = Array::new(&self.runtime.memory, &desc.level(number))?;
            let twice = made.insert(id, (ctx, Arc::new(array))).is_some();
            if twice || tables.arrays.contains_key(&id) {
                return Err(CuError::INVALID_HANDLE);
            }
        }
        tables.arrays.extend(made);
        Ok(())
    }

    fn destroy_array(&self, array: ArrayId) -> Result<(), CuError> {
        let mut tables = self.tables();
        let (ctx, array) = tables.arrays.remove(&array).ok_or(CuError::INVALID_HANDLE)?;
        tables.after_context(&self.runtime, ctx, move || drop(array));
        Ok(())
    }

    fn create_texture(&self, ctx: CtxId, texture: &Texture) -> Result<u64, CuError> {
        let tables = self.tables();
        tables.streams.context(ctx)?;
        if let Some(handle) = lock(&self.stage).next_texture(ctx)? {
            let array = |id| tables.array(id);
            self.textures.restore((ctx, handle), texture, &self.runtime.memory, array);
            return Ok(handle);
        }
        self.textures.create(ctx, texture, &self.runtime.memory.spans, |id| tables.array(id))
    }

    fn destroy_texture(&self, ctx: CtxId, handle: u64) -> Result<(), CuError> {
        self.textures.destroy(ctx, handle)
    }

    /// Text is linked as it is loaded.
    fn load_module(
        &self,
        ctx: CtxId,
        module: ModuleId,
        code: Code<Vec<u8>>,
    ) -> Result<(), LoadError> {
        let refuse = |error: CuError, what: &str| LoadError {
            code: error.0,
            message: Text::truncated(what.to_owned()),
        };
        let mut tables = self.tables();
        let device = match tables.streams.context(ctx) {
            Ok(ctx) => ctx.device,
            Err(error) => return Err(refuse(error, "the context does not exist")),
        };
        if tables.modules.contains_key(&module) {
            return Err(refuse(CuError::INVALID_HANDLE, "the module's id is in use"));
        }
        let former = lock(&self.stage).variables_of(module);
        let former = former.map_err(|error| refuse(error.code, &error.message))?;
        let log = |line: &str| self.runtime.host.log(line);
        let loaded = Module::load(ctx, device, &self.runtime.memory, code.images(), former, log)?;
        tables.modules.insert(module, loaded);
        Ok(())
    }

    fn kernel(&self, module: ModuleId, index: u32, name: &str) -> Result<KernelInfo, CuError> {
        self.tables().module(module)?.number(index, name)
    }

    fn kernel_names(&self, module: ModuleId) -> Result<Vec<String>, CuError> {
        Ok(self.tables().module(module)?.kernel_names())
    }

    fn global(&self, module: ModuleId, name: &str) -> Result<GlobalInfo, CuError> {
        self.tables().module(module)?.global(name)
    }

    /// All are hints here, or limits that the client keeps.
    fn set_kernel_attribute(
        &self,
        kernel: KernelRef,
        _attribute: u32,
        _value: i32,
    ) -> Result<(), CuError> {
        self.tables().module(kernel.module).map(drop)
    }

    fn occupancy(&self, kernel: KernelRef, query: &Occupancy) -> Result<u64, CuError> {
        let mut tables = self.tables();
        let info = tables.module(kernel.module)?.info(kernel.index)?;
        let workers = u32::try_from(self.runtime.pool.workers()).unwrap_or(u32::MAX);
        occupancy::answer(&info, query, workers)
    }

    fn unload_module(&self, module: ModuleId) -> Result<(), CuError> {
        let mut tables = self.tables();
        let module = tables.modules.remove(&module).ok_or(CuError::INVALID_HANDLE)?;
        tables.after_context(&self.runtime, module.ctx, move || drop(module));
        Ok(())
    }

    fn create_stream(
        &self,
        stream: StreamId,
        ctx: CtxId,
        blocking: bool,
        _priority: i32,
    ) -> Result<(), CuError> {
        self.tables().streams.add(stream, ctx, blocking)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), CuError> {
        self.tables().streams.remove(stream)
    }

    fn create_event(
        &self,
        event: EventId,
        ctx: CtxId,
        timing: bool,
        interprocess: bool,
    ) -> Result<(), CuError> {
        let shared = interprocess.then(SharedEvent::create).transpose()?;
        self.add_event(event, ctx, Event::new(timing, shared))
    }

    fn destroy_event(&self, event: EventId) -> Result<(), CuError> {
        self.tables().events.remove(&event).map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    fn submit(&self, stream: StreamId, op: StreamOp) -> Result<(), CuError> {
        self.tables().enqueue(&self.runtime, stream, op)
    }

    fn when_stream_idle(&self, stream: StreamId, done: Done) {
        let pending = self.tables().streams.pending(stream);
        match pending {
            Ok((ctx, pending)) => self.notify(&ctx, &pending, done),
            Err(error) => done(Err(error)),
        }
    }

    fn when_context_idle(&self, ctx: CtxId, done: Done) {
        let mut tables = self.tables();
        let found = tables.streams.context(ctx).cloned();
        let pending = tables.streams.pending_in_context(ctx);
        drop(tables);
        match (found, pending) {
            (Ok(ctx), Ok(pending)) => self.notify(&ctx, &pending, done),
            _ => done(Err(CuError::INVALID_CONTEXT)),
        }
    }

    fn when_event_done(&self, event: EventId, done: Done) {
        let tables = self.tables();
        let Some((_, event)) = tables.events.get(&event) else {
            drop(tables);
            return done(Err(CuError::INVALID_HANDLE));
        };
        let (status, pending) = (event.status(), event.pending().cloned());
        let elsewhere = event.elsewhere();
        drop(tables);
        if let (None, Some((event, record))) = (&pending, elsewhere) {
            return event.when_reached(&self.runtime, record, done);
        }
        match pending {
            Some(task) => self.notify(&task.ctx, std::slice::from_ref(&task), done),
            None => done(status),
        }
    }

    fn query_stream(&self, stream: StreamId) -> Query {
        let (ctx, pending) = self.tables().streams.pending(stream)?;
        ctx.status()?;
        if pending.is_empty() { Ok(()) } else { Err(CuError::NOT_READY) }
    }

    fn query_event(&self, event: EventId) -> Query {
        let tables = self.tables();
        let (_, event) = tables.events.get(&event).ok_or(CuError::INVALID_HANDLE)?;
        event.status()?;
        match (event.pending(), event.elsewhere()) {
            (Some(_), _) => Err(CuError::NOT_READY),
            (None, Some((event, record))) => event.query(record),
            (None, None) => Ok(()),
        }
    }

    fn is_idle(&self) -> bool {
        self.runtime.is_idle()
    }

    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32, CuError> {
        let tables = self.tables();
        let (_, start) = tables.events.get(&start).ok_or(CuError::INVALID_HANDLE)?;
        let (_, end) = tables.events.get(&end).ok_or(CuError::INVALID_HANDLE)?;
        start.elapsed_ms(end)
    }

    fn graph_begin(&self, exec: GraphExecId, ctx: CtxId) -> Result<(), CuError> {
        let mut tables = self.tables();
        tables.streams.context(ctx)?;
        if tables.graphs.contains_key(&exec) {
            return Err(CuError::INVALID_HANDLE);
        }
        tables.graphs.insert(exec, Arc::new(Mutex::new(Graph::new(ctx))));
        Ok(())
    }

    fn graph_node(&self, exec: GraphExecId, op: StreamOp) -> Result<(), CuError> {
        self.tables().add_graph_node(exec, op)
    }

    fn graph_edges(&self, exec: GraphExecId, edges: &[(u32, u32)]) -> Result<(), CuError> {
        let graph = self.tables().graph(exec)?;
        lock(&graph).add_edges(edges)
    }

    fn graph_ready(&self, exec: GraphExecId, _priorities: bool) -> Result<(), CuError> {
        let graph = self.tables().graph(exec)?;
        lock(&graph).ready()
    }

    fn graph_update(&self, exec: GraphExecId, node: u32, op: StreamOp) -> Result<(), CuError> {
        let graph = self.tables().graph(exec)?;
        lock(&graph).update(node, op)
    }

    fn graph_destroy(&self, exec: GraphExecId) -> Result<(), CuError> {
        self.tables().graphs.remove(&exec).map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    fn at_rest(&self) -> bool {
        self.runtime.is_at_rest()
    }

    fn hold(&self, held: bool) -> Option<bool> {
        Some(self.runtime.pool.hold(held))
    }

    fn interprocess(&self) -> Option<&dyn Interprocess> {
        Some(self)
    }

    fn placing(&self) -> Option<&dyn Placing> {
        Some(self)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn restores(&self, _: Ordered) -> Option<&dyn Restore> {
        Some(self)
    }

    fn swaps(&self, _: Ordered) -> Option<&dyn Swap> {
        Some(self)
    }
}
