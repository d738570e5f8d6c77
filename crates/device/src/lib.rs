//! What a proxy asks of its devices ([`Backend`]), and what they ask of it ([`Host`]).
//!
//! A backend owns every device that one client sees. The proxy's dispatcher calls it from one
//! thread, in the order in which the client spoke; nothing here blocks but `load_module`, and
//! spins only where [`Host::may_spin`] allows it. Ids that the client chose have been decoded but
//! not checked: an unknown id is `INVALID_HANDLE`, and never a panic.
#![forbid(unsafe_code)]

mod code;
pub mod digest;
mod finding;
mod order;
pub mod portable;
mod ranges;
mod roles;
mod snapshot;
pub mod trace;

pub use code::Code;
pub use finding::{Finding, FindingKind, FindingPlace, Findings};
pub use order::{
    Changing, Filling, Maker, NewBackend, Ordered, Restored, Restoring, SwapIn, Swapped, snapshots,
};
pub use ranges::Ranges;
pub use roles::{EventShare, Interprocess, Placing, Restore, Snapshots, Swap};
pub use snapshot::{
    Digests, Drained, Held, HeldPart, HeldPlace, Known, Object, Piece, Snapshot, SnapshotError,
};

use kedge_cuda_types::CuError;
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, DeviceInfo, EventId, GlobalInfo, GraphExecId, KernelInfo, KernelRef,
    LoadError, MemHandleId, ModuleId, Occupancy, OutputTarget, StreamId, StreamOp, Texture,
};
use std::sync::Arc;

/// Called once, from any thread, when what it waits for is over.
pub type Done = Box<dyn FnOnce(Result<(), CuError>) + Send>;

/// The process that hosts a backend.
pub trait Host: Send + Sync {
    /// Reads the client's private memory at `addr`; fails where the client has none there.
    fn read_client(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError>;
    /// Reads several parts of the client's private memory, each at its address.
    fn read_client_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        parts.iter_mut().try_for_each(|(addr, out)| self.read_client(*addr, out))
    }
    /// Writes the client's private memory at `addr`.
    fn write_client(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError>;
    /// Runs host function `token` in the client, then calls `done`.
    fn host_function(&self, token: u64, done: Done);
    /// Keeps what a kernel printed for the client's next synchronisation.
    fn output(&self, target: OutputTarget, bytes: &[u8]);
    /// Makes `error` the context's, for good: the client is told before any later reply.
    fn fault(&self, ctx: CtxId, error: CuError);
    /// Does as [`Self::fault`], for a reason that is known.
    fn fault_by(&self, ctx: CtxId, error: CuError, what: &str) {
        self.log(&format!("context {}: {error}: {what}", ctx.0));
        self.fault(ctx, error);
    }
    /// Hints that no submitted operation is unfinished any more, so that idle synchronisations stay
    /// local. The host checks it with [`Backend::is_idle`], from inside this call. Called before
    /// the [`Done`]s of the last operation, so that a synchronised client finds itself idle.
    fn idle(&self);
    /// Returns whether the dispatcher's thread may spin for a moment: this process has processors
    /// to spare, the client has sent no more, and no checkpoint begins.
    fn may_spin(&self) -> bool {
        false
    }
    /// Writes one line to the job's log.
    fn log(&self, line: &str);
    /// Devices that check the program have found something: all that they have found so far.
    fn found(&self, findings: &Findings) {
        let _ = findings;
    }
    /// Returns who wants to hear what the devices do and when: nobody, unless the program is
    /// traced.
    fn tracer(&self) -> Option<Arc<dyn trace::Tracer>> {
        None
    }
    /// Gives back what is held of a device's memory for a restart, as an allocation fails for want
    /// of it, and says whether that was anything.
    fn release_held(&self) -> bool {
        false
    }
}

/// What an event's state is worth to a waiter.
pub type Query = Result<(), CuError>;

/// All devices of one client. What not every kind of device can do is a role of its own.
pub trait Backend: Send + Sync {
    fn devices(&self) -> Vec<DeviceInfo>;
    /// Returns what cuDriverGetVersion answers.
    fn driver_version(&self) -> u32;

    /// Tells what can only be said by now that the client has ended.
    fn conclude(&self) {}

    fn create_context(&self, ctx: CtxId, device: u32, legacy: StreamId) -> Result<(), CuError>;
    fn destroy_context(&self, ctx: CtxId) -> Result<(), CuError>;
    /// Sets a CUlimit; UNSUPPORTED_LIMIT where the device has no such limit.
    fn set_limit(&self, ctx: CtxId, limit: u32, value: u64) -> Result<(), CuError>;
    fn limit(&self, ctx: CtxId, limit: u32) -> Result<u64, CuError>;

    /// Maps a slab of the device's free memory at an address of the client's choice (2 MiB
    /// granules); OUT_OF_MEMORY where there is not so much.
    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
    /// Ends a slab, which no work uses.
    fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
    fn free_memory(&self, device: u32) -> Result<u64, CuError>;
    /// Returns how many bytes of the device the client has. Asked on any thread, whatever is going
    /// on: `None` where that cannot be told at once.
    fn used_memory(&self, device: u32) -> Option<u64> {
        let _ = device;
        None
    }
    /// Returns the name that all processes of this machine have for a device whose memory they
    /// share; `None` where it is this process's alone.
    fn shared_as(&self, device: u32) -> Option<[u8; 16]> {
        let _ = device;
        None
    }
    /// Makes a part of a slab valid for access; asked of exact devices only, as is `unmap`.
    fn map(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError>;
    fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError>;
    /// Makes a range of the shared arena, or of an alias of it, valid for device access. The host
    /// has mapped it, and shares no byte twice; it ends exactly what it began.
    fn share(&self, addr: u64, size: u64) -> Result<(), CuError>;
    /// Ends what `share` made valid, which no work uses.
    fn unshare(&self, addr: u64, size: u64) -> Result<(), CuError>;

    /// Gives the host addresses of a device's arena, where no memory of the device lies: it shows
    /// memory of the client's there. MAP_FAILED where the device cannot use that.
    fn lend_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let _ = (addr, size);
        Err(CuError::MAP_FAILED)
    }
    /// Takes back what `lend_addresses` gave, or a part of it, and ends what the host shows there.
    fn take_addresses(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let _ = (addr, size);
        Err(CuError::INVALID_VALUE)
    }

    /// Makes zeroed physical memory that can be mapped at several addresses (`cuMemCreate`);
    /// OUT_OF_MEMORY where there is not so much. `shareable`: it can be exported.
    fn create_handle(
        &self,
        handle: MemHandleId,
        device: u32,
        size: u64,
        shareable: bool,
    ) -> Result<(), CuError>;
    /// Ends a handle, which is mapped nowhere.
    fn destroy_handle(&self, handle: MemHandleId) -> Result<(), CuError>;
    /// Makes [addr, addr+size) show the handle's bytes from `offset` on, without access as yet.
    fn map_handle(
        &self,
        handle: MemHandleId,
        addr: u64,
        size: u64,
        offset: u64,
    ) -> Result<(), CuError>;
    /// Ends mappings, each as a whole.
    fn unmap_handle(&self, addr: u64, size: u64) -> Result<(), CuError>;
    /// Sets what `device` may do with mapped memory: CUmemAccess_flags.
    fn set_access(&self, addr: u64, size: u64, device: u32, access: u32) -> Result<(), CuError>;

    fn create_array(&self, ctx: CtxId, array: ArrayId, desc: &ArrayDesc) -> Result<(), CuError>;
    /// Makes a mipmapped array, whose levels are arrays; `desc` is the first's shape.
    fn create_mipmap(
        &self,
        ctx: CtxId,
        levels: &[ArrayId],
        desc: &ArrayDesc,
    ) -> Result<(), CuError>;
    /// Destroys an array; a mipmapped array goes with the last of its levels.
    fn destroy_array(&self, array: ArrayId) -> Result<(), CuError>;
    /// Returns the handle that kernels receive.
    fn create_texture(&self, ctx: CtxId, texture: &Texture) -> Result<u64, CuError>;
    fn destroy_texture(&self, ctx: CtxId, handle: u64) -> Result<(), CuError>;

    fn load_module(
        &self,
        ctx: CtxId,
        module: ModuleId,
        code: Code<Vec<u8>>,
    ) -> Result<(), LoadError>;
    /// Finds a kernel by name, which launches name by `index` from now on; NOT_FOUND where there is
    /// none. The index is the module's next, or one that this kernel has already.
    fn kernel(&self, module: ModuleId, index: u32, name: &str) -> Result<KernelInfo, CuError>;
    /// Returns the names of all kernels.
    fn kernel_names(&self, module: ModuleId) -> Result<Vec<String>, CuError>;
    /// Finds a variable by name; NOT_FOUND where there is none.
    fn global(&self, module: ModuleId, name: &str) -> Result<GlobalInfo, CuError>;
    /// Sets a CUfunction_attribute for a kernel's launches. Ignored where it means nothing.
    fn set_kernel_attribute(
        &self,
        kernel: KernelRef,
        attribute: u32,
        value: i32,
    ) -> Result<(), CuError>;
    fn occupancy(&self, kernel: KernelRef, query: &Occupancy) -> Result<u64, CuError>;
    fn unload_module(&self, module: ModuleId) -> Result<(), CuError>;

    fn create_stream(
        &self,
        stream: StreamId,
        ctx: CtxId,
        blocking: bool,
        priority: i32,
    ) -> Result<(), CuError>;
    fn destroy_stream(&self, stream: StreamId) -> Result<(), CuError>;
    /// Makes an event; `interprocess`: it can be exported.
    fn create_event(
        &self,
        event: EventId,
        ctx: CtxId,
        timing: bool,
        interprocess: bool,
    ) -> Result<(), CuError>;
    fn destroy_event(&self, event: EventId) -> Result<(), CuError>;
    /// Appends `op` to `stream`. An error is a fault of the stream's context.
    fn submit(&self, stream: StreamId, op: StreamOp) -> Result<(), CuError>;

    /// Runs `done` when everything submitted to the stream so far is over, with the context's
    /// sticky error if there is one.
    fn when_stream_idle(&self, stream: StreamId, done: Done);
    fn when_context_idle(&self, ctx: CtxId, done: Done);
    fn when_event_done(&self, event: EventId, done: Done);
    /// Returns NOT_READY while work is pending.
    fn query_stream(&self, stream: StreamId) -> Query;
    fn query_event(&self, event: EventId) -> Query;
    /// Returns whether no submitted operation is unfinished. Takes no lock (one atomic count,
    /// raised before `submit` returns), because [`Host::idle`] asks it.
    fn is_idle(&self) -> bool;
    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32, CuError>;

    fn graph_begin(&self, exec: GraphExecId, ctx: CtxId) -> Result<(), CuError>;
    fn graph_node(&self, exec: GraphExecId, op: StreamOp) -> Result<(), CuError>;
    fn graph_edges(&self, exec: GraphExecId, edges: &[(u32, u32)]) -> Result<(), CuError>;
    /// Makes a graph ready to be launched; `priorities`: a hint, by the nodes' own.
    fn graph_ready(&self, exec: GraphExecId, priorities: bool) -> Result<(), CuError>;
    fn graph_update(&self, exec: GraphExecId, node: u32, op: StreamOp) -> Result<(), CuError>;
    fn graph_destroy(&self, exec: GraphExecId) -> Result<(), CuError>;

    /// Returns whether everything that was submitted is over, on threads of the backend's own as
    /// well. Asked while nothing is dispatched; the client still runs host functions.
    fn at_rest(&self) -> bool {
        self.is_idle()
    }

    /// Holds kernels up, or lets them go on: no block of theirs begins or goes on while they are
    /// held, and those that run stop within moments. Returns whether any runs; `None`: this cannot
    /// be done here. Called on any thread.
    fn hold(&self, held: bool) -> Option<bool> {
        let _ = held;
        None
    }

    /// Returns what other processes' backends may open; `None`: nothing.
    fn interprocess(&self) -> Option<&dyn Interprocess> {
        None
    }
    /// Returns what the driver places; `None` where the client places everything.
    fn placing(&self) -> Option<&dyn Placing> {
        None
    }
    /// Checkpoints; `None` where there are none, which [`snapshots`] says in words.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }
    /// Restarts, in the order that [`NewBackend::begin_restore`] keeps.
    fn restores(&self, _: Ordered) -> Option<&dyn Restore> {
        None
    }
    /// Returns the role of swapping memory out and in, in the order that [`Swapped`] keeps.
    fn swaps(&self, _: Ordered) -> Option<&dyn Swap> {
        None
    }
}
