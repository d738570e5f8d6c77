//! Posts and calls.

use crate::{
    ArrayDesc, ArrayId, CtxId, EventId, GraphExecId, KernelRef, MemHandleId, ModuleId, ModuleImage,
    Occupancy, PeerName, StreamId, StreamOp, Texture,
};
use kedge_wire::{Bytes, List, Text, Wire, Writer, wire};

/// A call's plain outcome: unit, or a CUresult.
pub type Status = Result<(), u32>;

wire! {
    /// One way. A failure of a post is an execution fault of its context and sticks.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Post {
        /// Its streams, events, modules and allocations go with it.
        CtxDestroy = 2 { ctx: CtxId },
        /// `blocking`: ordered with the legacy stream.
        StreamCreate = 3 { stream: StreamId, ctx: CtxId, blocking: bool, priority: i32 },
        /// Work already enqueued still runs.
        StreamDestroy = 4 { stream: StreamId },
        /// `interprocess`: it can be shared (`Call::EventShare`).
        EventCreate = 5 { event: EventId, ctx: CtxId, timing: bool, interprocess: bool },
        EventDestroy = 6 { event: EventId },
        Enqueue = 7 { stream: StreamId, op: StreamOp },
        /// Makes [addr, addr+size), a part of a slab, valid for access. Sent to an exact device
        /// only (`DeviceInfo::exact`).
        MemAlloc = 8 { ctx: CtxId, addr: u64, size: u64 },
        /// The client has made sure that no earlier work uses the range. To an exact device only.
        MemFree = 9 { addr: u64, size: u64 },
        ModuleUnload = 10 { module: ModuleId },
        ArrayDestroy = 11 { array: ArrayId },
        /// A handle that `Call::TextureCreate` gave, in its context.
        TextureDestroy = 13 { ctx: CtxId, handle: u64 },
        /// A graph executable, built from these and used once `GraphExecReady` arrived. Nodes are
        /// numbered in order of arrival; child graphs and conditional bodies have been flattened.
        GraphExecBegin = 14 { exec: GraphExecId, ctx: CtxId },
        GraphExecNode = 15 { exec: GraphExecId, op: StreamOp },
        /// (from, to): `to` runs after `from`.
        GraphExecEdges = 16 { exec: GraphExecId, edges: List<(u32, u32), 4096> },
        /// `priorities`: nodes run with their own priorities instead of the stream's.
        GraphExecReady = 17 { exec: GraphExecId, priorities: bool },
        /// Replaces one node's operation in later launches: by one of its kind, or by an empty one
        /// until the next.
        GraphExecUpdate = 18 { exec: GraphExecId, node: u32, op: StreamOp },
        GraphExecDestroy = 19 { exec: GraphExecId },
        /// Ends what `Call::Share` began for exactly this range.
        Unshare = 22 { addr: u64, size: u64 },
        /// It is mapped nowhere.
        HandleDestroy = 24 { handle: MemHandleId },
        /// The client has made sure that no earlier work uses the range, which is mapped whole.
        HandleUnmap = 26 { addr: u64, size: u64 },
        /// Ends what `Call::Alias` made of [alias, alias+size).
        Unalias = 28 { alias: u64, size: u64 },
        /// CUfunction_attribute. The client has checked the value; a device to which it means
        /// nothing ignores it.
        KernelAttribute = 29 { kernel: KernelRef, attribute: u32, value: i32 },
        /// Puts the shared arena's own pages back where `Call::Adopt` showed a file. No device may
        /// use them any longer.
        Disown = 30 { addr: u64, size: u64 },
    }

    /// Answered by one reply; the comment gives its type.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Call {
        /// A slab: device memory at [addr, addr+bytes), an address of the client's choice, both
        /// multiples of 2 MiB → `Status`: OUT_OF_MEMORY where the device has not got so much.
        Grant = 1 { device: u32, addr: u64, bytes: u64 },
        /// Gives a slab back, whole; no work uses it → `Status`.
        Return = 2 { device: u32, addr: u64, bytes: u64 },
        /// `legacy` names the context's legacy default stream → `Status`: DEVICE_UNAVAILABLE where
        /// another process has the device for itself, OUT_OF_MEMORY.
        CtxCreate = 29 { ctx: CtxId, device: u32, legacy: StreamId },
        /// Free bytes that the device could still grant → `Result<u64, u32>`.
        MemFree = 3 { device: u32 },
        /// → `Result<(), LoadError>`.
        ModuleLoad = 4 { ctx: CtxId, module: ModuleId, image: ModuleImage },
        /// Several relocatable images linked into one module (prelinked fatbins, cuLink)
        /// → `Result<(), LoadError>`.
        ModuleLink = 5 { ctx: CtxId, module: ModuleId, images: List<ModuleImage, 4096> },
        /// Answers when everything enqueued before is done → `Status`; the sticky error if one
        /// stands.
        StreamSync = 6 { stream: StreamId },
        CtxSync = 7 { ctx: CtxId },
        EventSync = 8 { event: EventId },
        /// → `Status`: NOT_READY (600) while work is pending.
        StreamQuery = 9 { stream: StreamId },
        EventQuery = 10 { event: EventId },
        /// → `Result<Elapsed, u32>`.
        EventElapsed = 11 { start: EventId, end: EventId },
        /// → `Status`: OUT_OF_MEMORY where it does not fit.
        ArrayCreate = 12 { ctx: CtxId, array: ArrayId, desc: ArrayDesc },
        /// What device printf and assert have written since → `Output`.
        TakeOutput = 13 {},
        /// A round trip → `Status`.
        Ping = 14 {},
        /// Shared-arena pages [addr, addr+size) are wanted at `alias` as well, where the client has
        /// them (registered host memory) → `Status`: MAP_FAILED where the proxy has something else.
        Alias = 15 { alias: u64, addr: u64, size: u64 },
        /// A kernel by its name → `Result<KernelInfo, u32>`; NOT_FOUND where there is none.
        /// Launches name it by `index` from now on, a number of the client's choice: the next one
        /// of this module, or one that it has given this kernel already.
        Kernel = 16 { module: ModuleId, index: u32, name: Text<65536> },
        /// The names of all kernels, from the `first` on → `Result<KernelNames, u32>`.
        KernelNames = 17 { module: ModuleId, first: u32 },
        /// A variable by its name → `Result<GlobalInfo, u32>`; NOT_FOUND where there is none.
        Global = 18 { module: ModuleId, name: Text<65536> },
        /// A texture or surface object → `Result<u64, u32>`: the handle that kernels receive.
        TextureCreate = 19 { ctx: CtxId, texture: Box<Texture> },
        /// Physical memory of a device (`cuMemCreate`), zeroed → `Status`: OUT_OF_MEMORY where the
        /// device has not got so much. `shareable`: `HandleExport` is possible.
        HandleCreate = 20 { handle: MemHandleId, device: u32, size: u64, shareable: bool },
        /// Makes shared-arena bytes [addr, addr+size), or bytes of an alias of it, valid for device
        /// access (pinned, registered and managed host memory) → `Status`.
        Share = 21 { addr: u64, size: u64 },
        /// A mipmapped array: `levels` names its levels from the finest on, each an array as any
        /// other; `desc` is the finest's shape → `Status`. It goes with the last of its levels.
        MipmapCreate = 22 { ctx: CtxId, levels: List<ArrayId, 32>, desc: ArrayDesc },
        /// → `Result<u64, u32>`.
        Occupancy = 23 { kernel: KernelRef, query: Occupancy },
        /// CUlimit → `Status`: UNSUPPORTED_LIMIT where the device has no such limit.
        SetLimit = 24 { ctx: CtxId, limit: u32, value: u64 },
        /// CUlimit → `Result<u64, u32>`.
        Limit = 25 { ctx: CtxId, limit: u32 },
        /// A tensor map as kedge writes it (`kedge_cuda_types::tensor_map`), to an inexact device
        /// only → `Result<[u8; 128], u32>`: the map as the device reads it.
        TensorMap = 26 { map: Box<[u8; 128]> },
        /// A tensor map as the device reads it → the same with another address.
        TensorMapMove = 27 { map: Box<[u8; 128]>, address: u64 },
        /// Whether [addr, addr+size), outside of the arenas, is memory that the driver has placed
        /// on the context's device → `Status`: INVALID_VALUE if not. To an inexact device only.
        CheckPlaced = 28 { ctx: CtxId, addr: u64, size: u64 },
        /// [addr, addr+size) shows the handle's bytes from `offset` on. Nobody may touch them
        /// before `HandleAccess` → `Status`.
        HandleMap = 40 { handle: MemHandleId, addr: u64, size: u64, offset: u64 },
        /// What `device` may do with mapped memory: CUmemAccess_flags (0 none, 1 read, 3 all)
        /// → `Status`.
        HandleAccess = 41 { addr: u64, size: u64, device: u32, access: u32 },
        /// A descriptor of a shareable handle's memory, for any process → `Status`; the descriptor
        /// has been sent on the socket when it says that it was made.
        HandleExport = 42 { handle: MemHandleId },
        /// The memory of a descriptor, which the client has sent on the socket as `ticket`, becomes
        /// a handle of this client → `Result<Imported, u32>`: INVALID_VALUE where it is no such
        /// memory.
        HandleImport = 43 { handle: MemHandleId, ticket: u64 },
        /// Lets other clients open the slab that holds `addr` → `Result<SharedSlab, u32>`:
        /// NOT_READY from an exact device that works, which the client then waits for.
        SlabShare = 44 { addr: u64 },
        /// A slab that another client shares becomes a handle of this one → `Result<Imported,
        /// u32>`: INVALID_VALUE where nobody shares it, INVALID_CONTEXT where it is this client's
        /// own.
        PeerOpen = 45 { handle: MemHandleId, name: PeerName },
        /// Lets other clients open an interprocess event → `Result<PeerName, u32>`.
        EventShare = 46 { event: EventId },
        /// An event that another client shares → `Status`, as for `PeerOpen`.
        EventOpen = 47 { event: EventId, ctx: CtxId, name: PeerName },
        /// The shared arena's pages [addr, addr+size) are to show bytes from `offset` on of the
        /// file that the client has sent as `ticket` → `Status`: INVALID_VALUE where it is no such
        /// file.
        Adopt = 48 { addr: u64, size: u64, offset: u64, ticket: u64 },
    }

    /// What travels in the ring.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Message {
        Post = 1 { post: Post },
        Call = 2 { call: Call },
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Elapsed { pub milliseconds: f32 }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum OutputTarget { Stdout = 1 {}, Stderr = 2 {} }

    /// Device output in the order in which it was written; `more` says to ask again.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Output {
        pub parts: List<(OutputTarget, Bytes<1048576>), 1024>,
        pub more: bool,
    }
}

impl Message {
    /// Encodes `Message::Post { post }` without taking the post.
    #[inline]
    pub fn put_post(post: &Post, w: &mut Writer<'_>) {
        1u32.put(w);
        post.put(w);
    }

    /// Encodes `Message::Call { call }` without taking the call.
    #[inline]
    pub fn put_call(call: &Call, w: &mut Writer<'_>) {
        2u32.put(w);
        call.put(w);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_encodings_are_the_message_s() {
        let (post, call) = (Post::Unshare { addr: 7, size: 8 }, Call::Ping {});
        let (mut owned, mut borrowed) = (Vec::new(), Vec::new());
        kedge_wire::encode(&Message::Post { post: post.clone() }, &mut owned);
        kedge_wire::encode(&Message::Call { call: call.clone() }, &mut owned);
        Message::put_post(&post, &mut Writer::new(&mut borrowed));
        Message::put_call(&call, &mut Writer::new(&mut borrowed));
        assert_eq!(owned, borrowed);
    }
}
