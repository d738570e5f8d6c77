//! The messages that a client and its proxy exchange.
//!
//! The client names every object: ids are chosen by it, and it keeps how each was made. A [`Post`]
//! has no reply; a [`Call`] has exactly one, of the type that its comment names. Both travel in one
//! ring, so that if one message was accepted before another began, on whatever thread, the proxy
//! sees them in that order. A message never carries a pointer that the receiver dereferences
//! unchecked: client addresses are read with `process_vm_readv`, device addresses are checked
//! against what is allocated.
#![forbid(unsafe_code)]

mod array;
pub mod check;
mod copy;
mod device_info;
pub mod management;
mod messages;
mod module;
mod peer;
mod stream_op;

pub use array::ArrayDesc;
pub use copy::{Copy3d, MAX_INLINE_COPY, Pieces, Place, Shape};
pub use device_info::{DeviceChoice, DeviceInfo, Hello, PROTOCOL_VERSION, Refusal, Welcome};
pub use messages::{Call, Elapsed, Message, Output, OutputTarget, Post, Status};
pub use module::{
    GlobalInfo, KernelInfo, KernelNames, KernelRef, LoadError, ModuleImage, Occupancy, ParamInfo,
};
pub use peer::{Imported, PeerName, SharedSlab};
pub use stream_op::{
    Dim3, Launch, LaunchHint, MAX_BODIES, MAX_CONDITIONS, MAX_HINTS, MAX_PARAM_BYTES, MAX_PIECES,
    MAX_SCATTERED, Scattered, StreamOp, Texture, TextureSource, scatters,
};

kedge_wire::wire! {
    /// A CUDA context.
    pub id CtxId;
    /// A stream. Each context's legacy stream and each thread's default stream have ids as well.
    pub id StreamId;
    /// An event.
    pub id EventId;
    /// A loaded module or library.
    pub id ModuleId;
    /// A CUDA array (`CUarray`), or a mipmapped array's level.
    pub id ArrayId;
    /// Physical memory that can be mapped at several addresses (`cuMemCreate`).
    pub id MemHandleId;
    /// An instantiated graph.
    pub id GraphExecId;
}
