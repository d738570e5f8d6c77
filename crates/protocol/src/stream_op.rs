//! What a stream executes. The same value is posted to a stream or kept as a graph's node.

use crate::{ArrayId, Copy3d, EventId, GraphExecId, KernelRef, MAX_INLINE_COPY};
use kedge_wire::{Bytes, List, wire};

/// Kernel parameters in all: 32,764 bytes since CUDA 12.1, rounded up.
pub const MAX_PARAM_BYTES: usize = 32 << 10;

/// Bodies of one conditional node.
pub const MAX_BODIES: usize = 1024;

/// Conditions of one graph on a device that numbers them, its bodies' included, and one more: they
/// are numbered from 1. A device that does not has them in its memory, at addresses beyond.
pub const MAX_CONDITIONS: u64 = 4096;

/// Pieces of one scattered copy.
pub const MAX_PIECES: usize = 500;

/// Bytes of all pieces of one scattered copy, each rounded up to 16.
pub const MAX_SCATTERED: u64 = MAX_PIECES as u64 * 4096;

/// Hints of one launch: as many as there are kinds.
pub const MAX_HINTS: usize = 16;

wire! {
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Dim3 { pub x: u32, pub y: u32, pub z: u32 }

    /// A kernel launch. The client has checked it against the limits that it knows.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Launch {
        pub kernel: KernelRef,
        pub grid: Dim3,
        pub block: Dim3,
        /// Blocks of a cluster; 0 or 1 in each dimension: none.
        pub cluster: Dim3,
        /// Dynamic shared memory, bytes.
        pub shared_bytes: u32,
        /// All blocks are resident at once (`cuLaunchCooperativeKernel`).
        pub cooperative: bool,
        /// The parameter buffer, laid out as `KernelInfo::params` says.
        pub params: Bytes<MAX_PARAM_BYTES>,
        /// What else the program asks of the launch; each attribute once.
        pub hints: List<LaunchHint, MAX_HINTS>,
    }

    /// A launch attribute that steers a device and that no result depends on: a device may ignore
    /// it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct LaunchHint {
        /// CU_LAUNCH_ATTRIBUTE_*.
        pub id: u32,
        /// CUlaunchAttributeValue.
        pub value: [u8; 64],
    }

    /// A piece of the client's private memory, and where it goes in memory that the proxy maps.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Scattered { pub src: u64, pub dst: u64, pub bytes: u64 }

    #[derive(Debug, Clone, PartialEq)]
    pub enum StreamOp {
        /// Nothing: a graph's empty node, or a marker.
        Empty = 0 {},
        Launch = 1 { launch: Launch },
        Copy = 2 { copy: Copy3d },
        /// A small copy whose bytes travel with the message.
        CopyInline = 3 { dst: u64, bytes: Bytes<MAX_INLINE_COPY> },
        /// `width` elements × `height` rows of `element` (1, 2 or 4) bytes each; `value`'s low
        /// bytes.
        Memset = 4 { dst: u64, pitch: u64, value: u32, element: u32, width: u64, height: u64 },
        EventRecord = 5 { event: EventId },
        EventWait = 6 { event: EventId },
        /// Runs the client's host function `token`; the stream goes on once the client
        /// says, on its socket, that it has returned.
        HostFn = 7 { token: u64 },
        GraphLaunch = 8 { exec: GraphExecId },
        /// Stores `value` (4 or 8 bytes by `wide`) at `addr`.
        WriteValue = 9 { addr: u64, value: u64, wide: bool },
        /// Waits until the value at `addr` compares: `mode` is CUstreamWaitValue_flags & 3
        /// (0 geq, 1 eq, 2 and, 3 nor).
        WaitValue = 10 { addr: u64, value: u64, wide: bool, mode: u32 },
        /// Makes [addr, addr+size) valid, in stream order (`cuMemAllocAsync`).
        MemAlloc = 11 { addr: u64, size: u64 },
        /// Makes the range invalid, in stream order (`cuMemFreeAsync`).
        MemFree = 12 { addr: u64, size: u64 },
        /// A conditional node, of graphs alone: executes those of `bodies`, which are not made
        /// ready by themselves, that `condition` asks for: a 32-bit word's address, or a number
        /// below [`MAX_CONDITIONS`]. `kind` is CUgraphConditionalNodeType (0 if, 1 while, 2
        /// switch).
        Conditional = 13 { condition: u64, kind: u32, bodies: List<GraphExecId, MAX_BODIES> },
        /// Of graphs alone: what the numbered `condition` is when a launch begins.
        SetCondition = 14 { condition: u64, value: u32 },
        /// Copies that are too many to go one by one, ascending by where they go and apart from
        /// each other ([`scatters`]). The client waits for it.
        Scatter = 15 { pieces: List<Scattered, MAX_PIECES> },
    }

    /// What a texture or surface object reads.
    #[derive(Debug, Clone, PartialEq)]
    pub enum TextureSource {
        Array = 1 { array: ArrayId },
        /// `cudaResourceTypeLinear`.
        Linear = 2 { addr: u64, format: u32, channels: u32, bytes: u64 },
        Pitch2d = 3 { addr: u64, format: u32, channels: u32, width: u64, height: u64, pitch: u64 },
        /// Levels from finest to coarsest.
        Mipmap = 4 { levels: kedge_wire::List<ArrayId, 32> },
    }

    /// A texture or surface object. The device chooses its 64-bit handle, as kernels receive it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Texture {
        /// A surface object: only `source` counts.
        pub surface: bool,
        pub source: TextureSource,
        /// CUaddress_mode per dimension (0 wrap, 1 clamp, 2 mirror, 3 border).
        pub address: [u32; 3],
        /// CUfilter_mode: 0 point, 1 linear.
        pub filter: u32,
        /// CU_TRSF_*: 1 read as integer, 2 normalised coordinates, 16 sRGB, 32 no trilinear
        /// optimisation.
        pub flags: u32,
        pub border: [f32; 4],
        pub mipmap_filter: u32,
        pub mipmap_bias: f32,
        pub mipmap_clamp: [f32; 2],
        /// CUresourceViewFormat, 0 none.
        pub view_format: u32,
    }
}

/// Returns whether pieces ascend by where they go, are apart from each other and not empty, and are
/// not too many bytes.
pub fn scatters(pieces: &[Scattered]) -> bool {
    let (mut end, mut bytes) = (0u64, 0u64);
    pieces.iter().all(|piece| {
        let apart = piece.dst >= end && piece.bytes > 0;
        let after = piece.dst.checked_add(piece.bytes);
        end = after.unwrap_or(u64::MAX);
        // A sum of so few that are each no more than this does not overflow.
        bytes += piece.bytes.min(MAX_SCATTERED + 1).next_multiple_of(16);
        apart && after.is_some() && bytes <= MAX_SCATTERED
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_scatter_that_ascend_and_are_apart() {
        let piece = |dst, bytes| Scattered { src: 7, dst, bytes };
        assert!(scatters(&[]));
        assert!(scatters(&[piece(0, 4096), piece(4096, 1), piece(4097, MAX_SCATTERED - 8192)]));
        assert!(!scatters(&[piece(0, 4096), piece(4095, 1)]));
        assert!(!scatters(&[piece(8192, 4096), piece(0, 4096)]));
        assert!(!scatters(&[piece(0, MAX_SCATTERED), piece(MAX_SCATTERED, 1)]));
        assert!(!scatters(&[piece(u64::MAX, 1)]));
        assert!(!scatters(&[piece(0, 0)]));
        assert!(!scatters(&[piece(0, u64::MAX)]));
    }
}
