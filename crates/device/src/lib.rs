//! What a proxy asks of its devices ([`Backend`]), and what they ask of it ([`Host`]).
//!
//! A backend owns every device that one client sees. The proxy's dispatcher calls it from one
//! thread, in the order in which the client spoke; nothing here blocks but `load_module`. Ids that
//! the client chose have been decoded but not checked: an unknown id is `INVALID_HANDLE`, and never
//! a panic.
#![forbid(unsafe_code)]

mod code;
pub mod digest;
pub mod portable;
mod ranges;
mod snapshot;

pub use code::Code;
pub use ranges::Ranges;
pub use snapshot::{
    Digests, Drained, Held, HeldPart, HeldPlace, Known, Object, Piece, Snapshot, SnapshotError,
};

use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::{TENSOR_MAP_BYTES, TensorMap};
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, DeviceInfo, EventId, GlobalInfo, GraphExecId, Imported, KernelInfo,
    KernelRef, LoadError, MemHandleId, ModuleId, Occupancy, OutputTarget, StreamId, StreamOp,
    Texture,
};
use std::os::fd::OwnedFd;

/// Called once, from any thread, when what it waits for is over.
pub type Done = Box<dyn FnOnce(Result<(), CuError>) + Send>;

/// The process that hosts a backend.
pub trait Host: Send + Sync {
    /// Reads the client's private memory at `addr`; fails where the client has none there.
    fn read_client(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError>;
    /// Writes the client's private memory at `addr`.
    fn write_client(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError>;
    /// Runs host function `token` in the client, then calls `done`.
    fn host_function(&self, token: u64, done: Done);
    /// Keeps what a kernel printed for the client's next synchronisation.
    fn output(&self, target: OutputTarget, bytes: &[u8]);
    /// The context's error is now `error`, for good: the client is told before any later reply.
    fn fault(&self, ctx: CtxId, error: CuError);
    /// No submitted operation is unfinished any more: a hint that lets idle synchronisations stay
    /// local. The host checks it with [`Backend::is_idle`], from inside this call. Called before the
    /// [`Done`]s of the last operation, so that a synchronised client finds itself idle.
    fn idle(&self);
    /// One line for the job's log.
    fn log(&self, line: &str);
    /// An allocation fails for want of a device's memory: gives back what is held there for a restart, and
    /// says whether that was anything.
    fn release_held(&self) -> bool {
        false
    }
}

/// An event as another process can open it.
#[derive(Debug)]
pub enum EventShare {
    /// Memory in which its state is kept.
    Memory(OwnedFd),
    /// The driver's own handle (`CUipcEventHandle`).
    Driver([u8; 64]),
}

/// What an event's state is worth to a waiter.
pub type Query = Result<(), CuError>;

/// All devices of one client.
pub trait Backend: Send + Sync {
    fn devices(&self) -> Vec<DeviceInfo>;
    /// What cuDriverGetVersion answers.
    fn driver_version(&self) -> u32;

    fn create_context(&self, ctx: CtxId, device: u32, legacy: StreamId) -> Result<(), CuError>;
    fn destroy_context(&self, ctx: CtxId) -> Result<(), CuError>;
    /// CUlimit; UNSUPPORTED_LIMIT where the device has no such limit.
    fn set_limit(&self, ctx: CtxId, limit: u32, value: u64) -> Result<(), CuError>;
    fn limit(&self, ctx: CtxId, limit: u32) -> Result<u64, CuError>;

    /// A slab of the device's free memory at an address of the client's choice (2 MiB granules);
    /// OUT_OF_MEMORY where there is not so much.
    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
    /// Ends a slab, which no work uses.
    fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError>;
    fn free_memory(&self, device: u32) -> Result<u64, CuError>;
    /// Makes a part of a slab valid for access; asked of exact devices only, as is `unmap`.
    fn map(&self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError>;
    fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError>;
    /// Makes a range of the shared arena, or of an alias of it, valid for device access. The host has
    /// mapped it, and shares no byte twice; it ends exactly what it began.
    fn share(&self, addr: u64, size: u64) -> Result<(), CuError>;
    /// Ends what `share` made valid, which no work uses.
    fn unshare(&self, addr: u64, size: u64) -> Result<(), CuError>;

    /// Zeroed physical memory that can be mapped at several addresses (`cuMemCreate`);
    /// OUT_OF_MEMORY where there is not so much. `shareable`: it can be exported.
    fn create_handle(
        &self,
        handle: MemHandleId,
        device: u32,
        size: u64,
        shareable: bool,
    ) -> Result<(), CuError>;
    /// A descriptor of a shareable handle's memory, which a backend of the same kind can import.
    fn export_handle(&self, _handle: MemHandleId) -> Result<OwnedFd, CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// Memory that another process has exported; INVALID_VALUE for any other descriptor.
    fn import_handle(&self, _handle: MemHandleId, _fd: OwnedFd) -> Result<Imported, CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// Imported memory becomes this client's own, because who has made it is gone: snapshots hold `size`
    /// bytes of it from now on, as of what [`Backend::create_handle`] makes on `device`. Snapshots leave out
    /// all other imported memory, which is its owner's to save.
    fn adopt_handle(&self, _handle: MemHandleId, _device: u32, _size: u64) -> Result<(), CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// A descriptor of the slab that holds an address, and where that lies: (address, bytes). NOT_READY
    /// where work must be over first.
    fn export_slab(&self, _addr: u64) -> Result<(OwnedFd, u64, u64), CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
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
    /// What `device` may do with mapped memory: CUmemAccess_flags.
    fn set_access(&self, addr: u64, size: u64, device: u32, access: u32) -> Result<(), CuError>;

    fn create_array(&self, ctx: CtxId, array: ArrayId, desc: &ArrayDesc) -> Result<(), CuError>;
    /// A mipmapped array, whose levels are arrays; `desc` is the first's shape.
    fn create_mipmap(
        &self,
        ctx: CtxId,
        levels: &[ArrayId],
        desc: &ArrayDesc,
    ) -> Result<(), CuError>;
    /// A mipmapped array goes with the last of its levels.
    fn destroy_array(&self, array: ArrayId) -> Result<(), CuError>;
    /// The handle that kernels receive.
    fn create_texture(&self, ctx: CtxId, texture: &Texture) -> Result<u64, CuError>;
    fn destroy_texture(&self, ctx: CtxId, handle: u64) -> Result<(), CuError>;

    /// Whether a range outside of the arenas is device memory that the driver has placed, such as a
    /// module's variables; asked of inexact devices.
    fn check_placed(&self, _ctx: CtxId, _addr: u64, _size: u64) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    /// A tensor map as the device reads it; asked of inexact devices, for the others read kedge's.
    fn tensor_map(&self, _map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// The device's own map with another address.
    fn move_tensor_map(
        &self,
        _map: &[u8; TENSOR_MAP_BYTES],
        _address: u64,
    ) -> Result<[u8; TENSOR_MAP_BYTES], CuError> {
        Err(CuError::NOT_SUPPORTED)
    }

    fn load_module(
        &self,
        ctx: CtxId,
        module: ModuleId,
        code: Code<Vec<u8>>,
    ) -> Result<(), LoadError>;
    /// A kernel by name, which launches name by `index` from now on; NOT_FOUND where there is none.
    /// The index is the module's next, or one that this kernel has already.
    fn kernel(&self, module: ModuleId, index: u32, name: &str) -> Result<KernelInfo, CuError>;
    /// The names of all kernels.
    fn kernel_names(&self, module: ModuleId) -> Result<Vec<String>, CuError>;
    /// A variable by name; NOT_FOUND where there is none.
    fn global(&self, module: ModuleId, name: &str) -> Result<GlobalInfo, CuError>;
    /// CUfunction_attribute: what a program sets for a kernel's launches. Ignored where it means
    /// nothing.
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
    /// `interprocess`: it can be exported.
    fn create_event(
        &self,
        event: EventId,
        ctx: CtxId,
        timing: bool,
        interprocess: bool,
    ) -> Result<(), CuError>;
    /// An interprocess event, for a backend of the same kind in another process.
    fn export_event(&self, _event: EventId) -> Result<EventShare, CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// An event that another process has exported; INVALID_VALUE for anything else.
    fn import_event(
        &self,
        _event: EventId,
        _ctx: CtxId,
        _share: EventShare,
    ) -> Result<(), CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn destroy_event(&self, event: EventId) -> Result<(), CuError>;
    /// Appends `op` to `stream`. An error is a fault of the stream's context.
    fn submit(&self, stream: StreamId, op: StreamOp) -> Result<(), CuError>;

    /// `done` runs when everything submitted to the stream so far is over, with the context's sticky
    /// error if there is one.
    fn when_stream_idle(&self, stream: StreamId, done: Done);
    fn when_context_idle(&self, ctx: CtxId, done: Done);
    fn when_event_done(&self, event: EventId, done: Done);
    /// NOT_READY while work is pending.
    fn query_stream(&self, stream: StreamId) -> Query;
    fn query_event(&self, event: EventId) -> Query;
    /// Whether no submitted operation is unfinished. Takes no lock (one atomic count, raised before
    /// `submit` returns), because [`Host::idle`] asks it.
    fn is_idle(&self) -> bool;
    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32, CuError>;

    fn graph_begin(&self, exec: GraphExecId, ctx: CtxId) -> Result<(), CuError>;
    fn graph_node(&self, exec: GraphExecId, op: StreamOp) -> Result<(), CuError>;
    fn graph_edges(&self, exec: GraphExecId, edges: &[(u32, u32)]) -> Result<(), CuError>;
    /// `priorities`: a hint, by the nodes' own.
    fn graph_ready(&self, exec: GraphExecId, priorities: bool) -> Result<(), CuError>;
    fn graph_update(&self, exec: GraphExecId, node: u32, op: StreamOp) -> Result<(), CuError>;
    fn graph_destroy(&self, exec: GraphExecId) -> Result<(), CuError>;

    /// Whether everything that was submitted is over, on threads of the backend's own as well. Asked
    /// while nothing is dispatched; the client still runs host functions.
    fn at_rest(&self) -> bool {
        self.is_idle()
    }
    /// Makes room for the next snapshot while the client runs, so that [`Backend::snapshot`] need not:
    /// it may block for seconds. Not needed, and of no effect but that.
    fn prepare_snapshot(&self) -> Result<(), SnapshotError> {
        Ok(())
    }
    /// Takes what the devices hold, at rest, while the client stands still: as fast as can be. The
    /// devices may be used again when this returns.
    fn snapshot(&self) -> Result<Box<dyn Snapshot>, SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device cannot be checkpointed"))
    }
    /// As [`Backend::prepare_snapshot`], for [`Backend::snapshot_changes`].
    fn prepare_changes(&self, _known: &Known) -> Result<(), SnapshotError> {
        self.prepare_snapshot()
    }
    /// As [`Backend::snapshot`], with digests by the same keys if the device can compute them fast; then
    /// nothing is copied that is known to be what it was.
    fn snapshot_changes(&self, _known: &Known) -> Result<Box<dyn Snapshot>, SnapshotError> {
        self.snapshot()
    }
    /// The first call of all to a new backend that is to hold what a snapshot holds: its notes say where
    /// the objects that are now made again, in their old order and without those that have ended, must
    /// lie and what they are called.
    fn restore_begin(&self, _notes: &[u8]) -> Result<(), SnapshotError> {
        Ok(())
    }
    /// Takes the same notes, of the same kind of backend, once all objects have been made again and
    /// before [`Backend::restore`].
    fn restore_notes(&self, _notes: &[u8]) -> Result<(), SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device cannot be restored"))
    }
    /// Puts bytes of a snapshot back where they were; from several threads. They may still travel when
    /// this returns, and have arrived when [`Backend::restore_end`] does.
    fn restore(&self, _object: &Object, _start: u64, _bytes: &[u8]) -> Result<(), SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device cannot be restored"))
    }
    /// As [`Backend::restore`], with bytes that `fill` writes to where they can travel from at once. If it answers no,
    /// none do.
    fn restore_filled(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), SnapshotError> {
        let mut all = vec![0; bytes];
        if fill(&mut all) { self.restore(object, start, &all) } else { Ok(()) }
    }
    /// Memory that a snapshot of another process has exported; it is let go of by
    /// [`Backend::restore_end`]. Asked, if at all, after [`Backend::restore_notes`].
    fn restore_from(&self, _parts: Vec<HeldPart>) -> Result<(), SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device holds no snapshots"))
    }
    /// As [`Backend::restore`], with the bytes at a place in that memory.
    fn restore_held(&self, _piece: &Piece, _from: HeldPlace) -> Result<(), SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device holds no snapshots"))
    }
    fn restore_end(&self) -> Result<(), SnapshotError> {
        Ok(())
    }

    /// At rest: gives the memory back in which [`Object::Memory`] and [`Object::Handle`] lie, as far as it can
    /// be; addresses stay. Returns how many bytes. All bytes that a snapshot tells of there are then to be put back by
    /// [`Backend::refill`], after [`Backend::occupy`] and before anything is submitted.
    fn vacate(&self) -> Result<u64, SnapshotError> {
        Err(SnapshotError::new(
            CuError::NOT_SUPPORTED,
            "this device's memory cannot be swapped out",
        ))
    }
    /// Takes memory again for what was given back; OUT_OF_MEMORY, and nothing taken, where there is not so
    /// much.
    fn occupy(&self) -> Result<(), SnapshotError> {
        Ok(())
    }
    /// Puts bytes of memory back; from several threads. They have arrived when [`Backend::refilled`] returns.
    fn refill(&self, _object: &Object, _start: u64, _bytes: &[u8]) -> Result<(), SnapshotError> {
        Err(SnapshotError::new(CuError::NOT_SUPPORTED, "this device's memory cannot be swapped in"))
    }
    fn refilled(&self) -> Result<(), SnapshotError> {
        Ok(())
    }
}
