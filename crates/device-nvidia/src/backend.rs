//! [`Backend`]: the contract, function by function.

use crate::NvidiaBackend;
use crate::context::Context;
use crate::devices;
use crate::drafts::{self, Draft};
use crate::driver::check;
use crate::graphs::Graph;
use crate::modules::{Module, load_error};
use crate::stream::{Event, Stream};
use crate::{occupancy, symbols};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute::{COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR};
use kedge_cuda_types::handle::{CUevent, CUstream};
use kedge_device::{
    Backend, Code, Done, Interprocess, Ordered, Placing, Query, Restore, Snapshots, Swap,
};
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, DeviceInfo, EventId, GlobalInfo, GraphExecId, KernelInfo, KernelRef,
    LoadError, MemHandleId, ModuleId, Occupancy, StreamId, StreamOp, Texture,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: u32 = 1;
/// CU_EVENT_DISABLE_TIMING.
const UNTIMED: u32 = 2;
/// CU_EVENT_INTERPROCESS.
const INTERPROCESS: u32 = 4;

impl Backend for NvidiaBackend {
    fn devices(&self) -> Vec<DeviceInfo> {
        let exact = self.exact.load(Ordering::Relaxed);
        self.infos.iter().map(|info| DeviceInfo { exact, ..info.clone() }).collect()
    }

    fn driver_version(&self) -> u32 {
        self.version
    }

    fn create_context(&self, ctx: CtxId, device: u32, legacy: StreamId) -> Result<(), CuError> {
        let on = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
        let mut tables = self.tables();
        if tables.contexts.contains_key(&ctx) {
            return Err(CuError::INVALID_VALUE);
        }
        let context = match self.ready_context(ctx, device, on) {
            Some(ready) => Ok(ready),
            None => Context::create(&self.shared.driver, ctx, device, on),
        };
        let context = context.inspect_err(|error| {
            if let Some(why) = devices::unavailable(&self.shared.driver, on, *error) {
                self.shared.host.log(&why);
            }
        })?;
        if let Err(error) = self.shared.digester.made(&self.shared.driver, &context, on) {
            self.shared.host.log(&format!(
                "the GPU will not tell what has changed between checkpoints: its kernel cannot be loaded ({error})"
            ));
        }
        context.bells.made();
        let stream = Stream::new(CUstream::LEGACY, &context, &self.shared.busy);
        tables.streams.insert(legacy, stream);
        self.shared.live.add(&context);
        tables.contexts.insert(ctx, context);
        Ok(())
    }

    fn destroy_context(&self, ctx: CtxId) -> Result<(), CuError> {
        let mut tables = self.tables();
        let context = tables.contexts.remove(&ctx).ok_or(CuError::INVALID_CONTEXT)?;
        tables.forget_context(ctx);
        self.shared.digester.forget(ctx);
        self.allocations().forget(ctx);
        drop(tables);
        self.shared.live.remove(ctx);
        context.destroy()
    }

    fn set_limit(&self, ctx: CtxId, limit: u32, value: u64) -> Result<(), CuError> {
        self.tables().context(ctx)?.enter()?;
        // SAFETY: the current context's limit.
        check(unsafe { (self.shared.driver.cuCtxSetLimit)(limit, value as usize) })
    }

    fn limit(&self, ctx: CtxId, limit: u32) -> Result<u64, CuError> {
        self.tables().context(ctx)?.enter()?;
        let mut value = 0;
        // SAFETY: a live out pointer; the current context's limit.
        check(unsafe { (self.shared.driver.cuCtxGetLimit)(&mut value, limit) })?;
        Ok(value as u64)
    }

    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        self.within_quota(device, bytes)?;
        self.allocate_releasing_cache(|| self.tables().arena.grant(device, addr, bytes))
    }

    fn give_back(&self, _device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        self.tables().arena.give_back(addr, bytes)
    }

    fn free_memory(&self, device: u32) -> Result<u64, CuError> {
        let tables = self.tables();
        let context = tables.contexts.values().find(|context| context.device == device);
        context.ok_or(CuError::INVALID_CONTEXT)?.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: live out pointers.
        check(unsafe { (self.shared.driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free as u64).min(self.quota.left(&tables, device)))
    }

    /// The tables are held while the driver is called: whoever only looks does not wait for that.
    fn used_memory(&self, device: u32) -> Option<u64> {
        self.tables.try_lock().ok().map(|tables| tables.arena.used(device))
    }

    fn shared_as(&self, device: u32) -> Option<[u8; 16]> {
        let at = self.devices.iter().position(|(index, _)| index == device)?;
        self.infos.get(at).map(|info| info.uuid)
    }

    /// Memory is valid a slab at a time.
    fn map(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
        self.allocations().add(ctx, addr, size)
    }

    fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.allocations().cut(addr, size)
    }

    fn share(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let mut tables = self.tables();
        // Registering needs a context, any.
        tables.contexts.values().next().ok_or(CuError::INVALID_CONTEXT)?.enter()?;
        tables.host_memory.share(addr, size)
    }

    fn unshare(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let mut tables = self.tables();
        if let Some(context) = tables.contexts.values().next() {
            context.enter()?;
        }
        tables.host_memory.unshare(addr, size)
    }

    fn lend_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.tables().arena.lend(addr, size)
    }

    fn take_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.tables().arena.take_lent(addr, size)
    }

    fn create_handle(
        &self,
        handle: MemHandleId,
        device: u32,
        size: u64,
        shareable: bool,
    ) -> Result<(), CuError> {
        self.within_quota(device, size)?;
        self.allocate_releasing_cache(|| {
            self.tables().arena.create_handle(handle, device, size, shareable)
        })
    }

    fn destroy_handle(&self, handle: MemHandleId) -> Result<(), CuError> {
        self.tables().arena.destroy_handle(handle)
    }

    fn map_handle(
        &self,
        handle: MemHandleId,
        addr: u64,
        size: u64,
        offset: u64,
    ) -> Result<(), CuError> {
        self.tables().arena.map_handle(handle, addr, size, offset)
    }

    fn unmap_handle(&self, addr: u64, size: u64) -> Result<(), CuError> {
        self.tables().arena.unmap_handle(addr, size)
    }

    fn set_access(&self, addr: u64, size: u64, device: u32, access: u32) -> Result<(), CuError> {
        self.tables().arena.set_access(addr, size, device, access)
    }

    fn create_array(&self, ctx: CtxId, array: ArrayId, desc: &ArrayDesc) -> Result<(), CuError> {
        self.allocate_releasing_cache(|| {
            let mut tables = self.tables();
            let context = Arc::clone(tables.context(ctx)?);
            tables.textures.create_array(&self.shared.driver, &context, array, desc)
        })
    }

    fn create_mipmap(
        &self,
        ctx: CtxId,
        levels: &[ArrayId],
        desc: &ArrayDesc,
    ) -> Result<(), CuError> {
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        tables.textures.create_mipmap(&self.shared.driver, &context, levels, desc)
    }

    fn destroy_array(&self, array: ArrayId) -> Result<(), CuError> {
        self.tables().textures.destroy_array(&self.shared.driver, array)
    }

    fn create_texture(&self, ctx: CtxId, texture: &Texture) -> Result<u64, CuError> {
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        tables.textures.create_as_before(&self.shared.driver, &context, texture)
    }

    fn destroy_texture(&self, ctx: CtxId, handle: u64) -> Result<(), CuError> {
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        tables.textures.destroy_object(&self.shared.driver, &context, handle)
    }

    fn load_module(
        &self,
        ctx: CtxId,
        module: ModuleId,
        mut code: Code<Vec<u8>>,
    ) -> Result<(), LoadError> {
        let plain = |error| load_error(error, String::new());
        let context = Arc::clone(self.tables().context(ctx).map_err(plain)?);
        // The driver reads text up to its NUL.
        code.images_mut().iter_mut().for_each(|image| image.push(0));
        self.shared.capture.module_comes();
        let loaded = self.place_module(&context, module, &code);
        let loaded = loaded.inspect_err(|_| self.shared.capture.module_is_silent())?;
        self.read_symbols(&loaded, code);
        let mut tables = self.tables();
        if tables.modules.contains_key(&module) {
            return Err(plain(CuError::INVALID_VALUE));
        }
        tables.modules.insert(module, loaded);
        Ok(())
    }

    fn kernel(&self, module: ModuleId, index: u32, name: &str) -> Result<KernelInfo, CuError> {
        let mut tables = self.tables();
        let module = tables.modules.get_mut(&module).ok_or(CuError::INVALID_HANDLE)?;
        module.find(index, name)
    }

    fn kernel_names(&self, module: ModuleId) -> Result<Vec<String>, CuError> {
        self.tables().module(module)?.names()
    }

    fn global(&self, module: ModuleId, name: &str) -> Result<GlobalInfo, CuError> {
        let mut tables = self.tables();
        tables.modules.get_mut(&module).ok_or(CuError::INVALID_HANDLE)?.global(name)
    }

    /// A program may set what its driver lacks; the launch will tell.
    fn set_kernel_attribute(
        &self,
        kernel: KernelRef,
        attribute: u32,
        value: i32,
    ) -> Result<(), CuError> {
        let tables = self.tables();
        let module = tables.module(kernel.module)?;
        module.ctx.enter()?;
        let set = module.kernel(kernel.index)?.set_attribute(&self.shared.driver, attribute, value);
        if let Err(error) = set {
            let what = format!("function attribute {attribute} was not set to {value}: {error}");
            self.shared.host.log(&what);
        }
        Ok(())
    }

    fn occupancy(&self, kernel: KernelRef, query: &Occupancy) -> Result<u64, CuError> {
        let tables = self.tables();
        let module = tables.module(kernel.module)?;
        module.ctx.enter()?;
        occupancy::answer(&self.shared.driver, module.kernel(kernel.index)?, query)
    }

    fn unload_module(&self, module: ModuleId) -> Result<(), CuError> {
        self.tables().modules.remove(&module).ok_or(CuError::INVALID_HANDLE)?.unload()
    }

    fn create_stream(
        &self,
        stream: StreamId,
        ctx: CtxId,
        blocking: bool,
        priority: i32,
    ) -> Result<(), CuError> {
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        context.enter()?;
        let mut raw = CUstream::NULL;
        let flags = if blocking { 0 } else { NON_BLOCKING };
        // SAFETY: a live out pointer.
        check(unsafe {
            (self.shared.driver.cuStreamCreateWithPriority)(&mut raw, flags, priority)
        })?;
        tables.streams.insert(stream, Stream::new(raw, &context, &self.shared.busy));
        Ok(())
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), CuError> {
        let stream = self.tables().streams.remove(&stream).ok_or(CuError::INVALID_HANDLE)?;
        if stream.raw == CUstream::LEGACY {
            return Ok(());
        }
        stream.goes();
        let driver = Arc::clone(&self.shared.driver);
        let raw = stream.raw;
        let ctx = Arc::clone(&stream.ctx);
        let end = move || {
            // SAFETY: nobody finds the stream any longer.
            ctx.enter().and_then(|()| check(unsafe { (driver.cuStreamDestroy_v2)(raw) }))
        };
        match stream.pending() {
            None => end(),
            // What was submitted still runs, and counts until it is over.
            Some(number) => {
                let done: Done = Box::new(move |_| {
                    let _ = end();
                });
                self.wait_for(stream, number, done);
                Ok(())
            }
        }
    }

    fn create_event(
        &self,
        event: EventId,
        ctx: CtxId,
        timing: bool,
        interprocess: bool,
    ) -> Result<(), CuError> {
        let mut tables = self.tables();
        let context = Arc::clone(tables.context(ctx)?);
        context.enter()?;
        let mut raw = CUevent::NULL;
        let flags = if timing { 0 } else { UNTIMED } | if interprocess { INTERPROCESS } else { 0 };
        // SAFETY: a live out pointer.
        check(unsafe { (self.shared.driver.cuEventCreate)(&mut raw, flags) })?;
        tables.events.insert(event, Event::new(raw, &context, timing, interprocess));
        Ok(())
    }

    fn destroy_event(&self, event: EventId) -> Result<(), CuError> {
        let event = self.tables().events.remove(&event).ok_or(CuError::INVALID_HANDLE)?;
        event.ctx.enter()?;
        // SAFETY: the driver keeps an event that is still to be recorded until it is.
        check(unsafe { (self.shared.driver.cuEventDestroy_v2)(event.raw) })
    }

    fn submit(&self, stream: StreamId, op: StreamOp) -> Result<(), CuError> {
        let tables = self.tables();
        let stream = tables.stream(stream)?;
        stream.ctx.enter()?;
        self.run(&tables, stream, op)?;
        stream.submitted();
        Ok(())
    }

    fn when_stream_idle(&self, stream: StreamId, done: Done) {
        self.wait_for_stream(stream, done);
    }

    fn when_context_idle(&self, ctx: CtxId, done: Done) {
        self.wait_for_context(ctx, done);
    }

    fn when_event_done(&self, event: EventId, done: Done) {
        self.wait_for_event(event, done);
    }

    fn query_stream(&self, stream: StreamId) -> Query {
        let stream = Arc::clone(self.tables().stream(stream)?);
        let number = stream.pending();
        stream.ctx.enter()?;
        // SAFETY: a stream of the driver's.
        check(unsafe { (self.shared.driver.cuStreamQuery)(stream.raw) })?;
        if let Some(number) = number {
            self.shared.over(&stream, number);
        }
        Ok(())
    }

    fn query_event(&self, event: EventId) -> Query {
        let event = Arc::clone(self.tables().event(event)?);
        event.ctx.enter()?;
        // SAFETY: an event of the driver's.
        check(unsafe { (self.shared.driver.cuEventQuery)(event.raw) })?;
        if let Some((stream, number)) = event.recorded().filter(|_| !event.interprocess) {
            self.shared.over(&stream, number);
        }
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.shared.busy.none()
    }

    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32, CuError> {
        let tables = self.tables();
        let (start, end) = (tables.event(start)?, tables.event(end)?);
        self.shared.timeline.between(&self.shared.driver, start, end)
    }

    fn graph_begin(&self, exec: GraphExecId, ctx: CtxId) -> Result<(), CuError> {
        let mut tables = self.tables();
        let draft = Draft::new(tables.context(ctx)?);
        tables.drafts.insert(exec, draft);
        Ok(())
    }

    fn graph_node(&self, exec: GraphExecId, op: StreamOp) -> Result<(), CuError> {
        let mut tables = self.tables();
        let draft = tables.drafts.get_mut(&exec).ok_or(CuError::INVALID_HANDLE)?;
        // Whenever it runs: what is valid for too long does no harm.
        self.note_allocation(draft.ctx.id, &op)?;
        draft.push(op)
    }

    fn graph_edges(&self, exec: GraphExecId, edges: &[(u32, u32)]) -> Result<(), CuError> {
        self.tables().drafts.get_mut(&exec).ok_or(CuError::INVALID_HANDLE)?.connect(edges)
    }

    fn graph_ready(&self, exec: GraphExecId, priorities: bool) -> Result<(), CuError> {
        let mut tables = self.tables();
        let mut drafts = std::mem::take(&mut tables.drafts);
        let world = (&*tables, &self.shared.host);
        let made = drafts::build(&self.shared.driver, world, &mut drafts, exec, priorities);
        tables.drafts = drafts;
        tables.graphs.extend(made?);
        Ok(())
    }

    fn graph_update(&self, exec: GraphExecId, node: u32, op: StreamOp) -> Result<(), CuError> {
        self.change_graph(exec, |graph, tables| match graph.stays(node, &op) {
            Some(stays) => stays,
            None => graph.update(node, tables.node(&op, &self.shared.host)?),
        })
    }

    fn graph_destroy(&self, exec: GraphExecId) -> Result<(), CuError> {
        let mut tables = self.tables();
        let draft = tables.drafts.remove(&exec).is_some();
        let graph = tables.graphs.remove(&exec).is_some();
        if draft || graph { Ok(()) } else { Err(CuError::INVALID_HANDLE) }
    }

    fn at_rest(&self) -> bool {
        self.rests()
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

impl NvidiaBackend {
    /// Reads what a module's images name, on a thread of its own.
    fn read_symbols(&self, module: &Module, code: Code<Vec<u8>>) {
        let device = self.devices.get(module.ctx.device);
        let sm = |id| devices::attribute(&self.shared.driver, device?, id);
        let (major, minor) = (sm(COMPUTE_CAPABILITY_MAJOR), sm(COMPUTE_CAPABILITY_MINOR));
        let sm = major.unwrap_or(0) * 10 + minor.unwrap_or(0);
        let found = module.symbols();
        let shared = Arc::clone(&self.shared);
        self.waiters.run(Box::new(move || {
            let symbols = symbols::of_images(code.images(), u32::try_from(sm).unwrap_or(0));
            if symbols.as_ref().is_ok_and(|symbols| !symbols.prints) {
                shared.capture.module_is_silent();
            }
            let _ = found.set(symbols);
        }));
    }

    /// Changes a graph while the rest of the tables can be looked at.
    fn change_graph(
        &self,
        exec: GraphExecId,
        change: impl FnOnce(&mut Graph, &crate::tables::Tables) -> Result<(), CuError>,
    ) -> Result<(), CuError> {
        let mut tables = self.tables();
        let mut graph = tables.graphs.remove(&exec).ok_or(CuError::INVALID_HANDLE)?;
        let entered = graph.ctx.enter();
        let result = entered.and_then(|()| change(&mut graph, &tables));
        tables.graphs.insert(exec, graph);
        result
    }
}
