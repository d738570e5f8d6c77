//! Memory's structs and constants, laid out as cuda.h lays them out (CUDA 13, 64-bit).
//!
//! Enumerations are plain integers, because a program may pass any value. Host pointers inside
//! structs are integers too: nothing here is dereferenced.
#![allow(non_camel_case_types, non_snake_case, reason = "names as in cuda.h")]

use crate::handle::{CUarray, CUcontext, CUdeviceptr};

/// Where memory lives (`CUmemLocation`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemLocation {
    /// `CU_MEM_LOCATION_TYPE_*`.
    pub type_: u32,
    /// A device ordinal, or a NUMA node.
    pub id: i32,
}

pub const CU_MEM_LOCATION_TYPE_INVALID: u32 = 0;
pub const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
pub const CU_MEM_LOCATION_TYPE_HOST: u32 = 2;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: u32 = 3;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: u32 = 4;

/// The host, where a device ordinal is asked for.
pub const CU_DEVICE_CPU: i32 = -1;
/// No device, or several, as an answer.
pub const CU_DEVICE_INVALID: i32 = -2;

pub const CU_MEMORYTYPE_HOST: u32 = 1;
pub const CU_MEMORYTYPE_DEVICE: u32 = 2;
pub const CU_MEMORYTYPE_ARRAY: u32 = 3;
pub const CU_MEMORYTYPE_UNIFIED: u32 = 4;

/// `CUDA_MEMCPY2D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_MEMCPY2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: u32,
    pub srcHost: u64,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: u32,
    pub dstHost: u64,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

/// `CUDA_MEMCPY3D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_MEMCPY3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: u32,
    pub srcHost: u64,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    /// The source's context in `CUDA_MEMCPY3D_PEER`, else reserved.
    pub srcContext: CUcontext,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: u32,
    pub dstHost: u64,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    /// The destination's context in `CUDA_MEMCPY3D_PEER`, else reserved.
    pub dstContext: CUcontext,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

/// `CUDA_MEMCPY3D_PEER_v1`: the same layout, with contexts where `CUDA_MEMCPY3D` reserves words.
pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D;

/// `CUmemcpyAttributes_v1`: how one run of a batch's copies behaves.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemcpyAttributes {
    /// `CU_MEMCPY_SRC_ACCESS_ORDER_*`.
    pub srcAccessOrder: u32,
    pub srcLocHint: CUmemLocation,
    pub dstLocHint: CUmemLocation,
    pub flags: u32,
}

pub const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: u32 = 1;
pub const CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: u32 = 2;
pub const CU_MEMCPY_SRC_ACCESS_ORDER_ANY: u32 = 3;

/// `CUextent3D_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUextent3D {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// `CUmemcpy3DOperand_v1`. The union's four words are a pointer operand {address, row length, layer
/// height, location} or an array operand {array, x, y, z}.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemcpy3DOperand {
    /// `CU_MEMCPY_OPERAND_TYPE_*`.
    pub type_: u32,
    pub op: [u64; 4],
}

pub const CU_MEMCPY_OPERAND_TYPE_POINTER: u32 = 1;
pub const CU_MEMCPY_OPERAND_TYPE_ARRAY: u32 = 2;

/// `CUDA_MEMCPY3D_BATCH_OP_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_MEMCPY3D_BATCH_OP {
    pub src: CUmemcpy3DOperand,
    pub dst: CUmemcpy3DOperand,
    pub extent: CUextent3D,
    pub srcAccessOrder: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_ARRAY_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Format: u32,
    pub NumChannels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_ARRAY3D_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Depth: usize,
    pub Format: u32,
    pub NumChannels: u32,
    pub Flags: u32,
}

pub const CUDA_ARRAY3D_LAYERED: u32 = 1;
pub const CUDA_ARRAY3D_SURFACE_LDST: u32 = 2;
pub const CUDA_ARRAY3D_CUBEMAP: u32 = 4;
pub const CUDA_ARRAY3D_TEXTURE_GATHER: u32 = 8;
pub const CUDA_ARRAY3D_DEPTH_TEXTURE: u32 = 0x10;
pub const CUDA_ARRAY3D_COLOR_ATTACHMENT: u32 = 0x20;
pub const CUDA_ARRAY3D_SPARSE: u32 = 0x40;
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: u32 = 0x80;

pub const CU_AD_FORMAT_UNSIGNED_INT8: u32 = 0x01;
pub const CU_AD_FORMAT_UNSIGNED_INT16: u32 = 0x02;
pub const CU_AD_FORMAT_UNSIGNED_INT32: u32 = 0x03;
pub const CU_AD_FORMAT_SIGNED_INT8: u32 = 0x08;
pub const CU_AD_FORMAT_SIGNED_INT16: u32 = 0x09;
pub const CU_AD_FORMAT_SIGNED_INT32: u32 = 0x0a;
pub const CU_AD_FORMAT_HALF: u32 = 0x10;
pub const CU_AD_FORMAT_FLOAT: u32 = 0x20;
pub const CU_AD_FORMAT_UNORM_INT8X1: u32 = 0xc0;
pub const CU_AD_FORMAT_SNORM_INT16X4: u32 = 0xcb;

/// Bytes of one channel of a `CUarray_format`, for the formats whose elements are whole channels.
pub const fn channel_bytes(format: u32) -> Option<u64> {
    match format {
        CU_AD_FORMAT_UNSIGNED_INT8 | CU_AD_FORMAT_SIGNED_INT8 => Some(1),
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => Some(2),
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => Some(4),
        _ => None,
    }
}

/// `CUDA_RESOURCE_DESC_v1`. The union's 16 words begin, by `resType`, with {array}, {mipmapped
/// array}, {address, format and channels, bytes} or {address, format and channels, width, height,
/// pitch}.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_RESOURCE_DESC {
    /// `CU_RESOURCE_TYPE_*`.
    pub resType: u32,
    pub res: [u64; 16],
    pub flags: u32,
}

impl CUDA_RESOURCE_DESC {
    /// A linear or pitched resource's `CUarray_format`.
    pub const fn format(&self) -> u32 {
        self.res[1] as u32
    }

    /// A linear or pitched resource's channels an element.
    pub const fn channels(&self) -> u32 {
        (self.res[1] >> 32) as u32
    }
}

pub const CU_RESOURCE_TYPE_ARRAY: u32 = 0;
pub const CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: u32 = 1;
pub const CU_RESOURCE_TYPE_LINEAR: u32 = 2;
pub const CU_RESOURCE_TYPE_PITCH2D: u32 = 3;

/// `CUDA_TEXTURE_DESC_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CUDA_TEXTURE_DESC {
    pub addressMode: [u32; 3],
    pub filterMode: u32,
    pub flags: u32,
    pub maxAnisotropy: u32,
    pub mipmapFilterMode: u32,
    pub mipmapLevelBias: f32,
    pub minMipmapLevelClamp: f32,
    pub maxMipmapLevelClamp: f32,
    pub borderColor: [f32; 4],
    pub reserved: [i32; 12],
}

pub const CU_TRSF_READ_AS_INTEGER: u32 = 1;
pub const CU_TRSF_NORMALIZED_COORDINATES: u32 = 2;

/// `CUDA_RESOURCE_VIEW_DESC_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_RESOURCE_VIEW_DESC {
    pub format: u32,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub firstMipmapLevel: u32,
    pub lastMipmapLevel: u32,
    pub firstLayer: u32,
    pub lastLayer: u32,
    pub reserved: [u32; 16],
}

/// `CUmemAllocationProp_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemAllocationProp {
    /// `CU_MEM_ALLOCATION_TYPE_*`.
    pub type_: u32,
    pub requestedHandleTypes: u32,
    pub location: CUmemLocation,
    pub win32HandleMetaData: u64,
    pub compressionType: u8,
    pub gpuDirectRDMACapable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

pub const CU_MEM_ALLOCATION_TYPE_PINNED: u32 = 1;
pub const CU_MEM_ALLOCATION_TYPE_MANAGED: u32 = 2;
pub const CU_MEM_HANDLE_TYPE_NONE: u32 = 0;
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u32 = 1;

/// `CUmemAccessDesc_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemAccessDesc {
    pub location: CUmemLocation,
    /// `CU_MEM_ACCESS_FLAGS_PROT_*`.
    pub flags: u32,
}

pub const CU_MEM_ACCESS_FLAGS_PROT_NONE: u32 = 0;
pub const CU_MEM_ACCESS_FLAGS_PROT_READ: u32 = 1;
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: u32 = 3;

/// `CUmemPoolProps_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUmemPoolProps {
    pub allocType: u32,
    pub handleTypes: u32,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: u64,
    /// Bytes; 0: as large as the device allows.
    pub maxSize: usize,
    pub usage: u16,
    pub gpuDirectRDMACapable: u8,
    pub reserved: [u8; 53],
}

pub const CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: u32 = 1;
pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: u32 = 2;
pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: u32 = 3;
pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: u32 = 4;
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: u32 = 5;
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: u32 = 6;
pub const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: u32 = 7;
pub const CU_MEMPOOL_ATTR_USED_MEM_HIGH: u32 = 8;
pub const CU_MEMPOOL_ATTR_ALLOCATION_TYPE: u32 = 9;
pub const CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES: u32 = 10;
pub const CU_MEMPOOL_ATTR_LOCATION_ID: u32 = 11;
pub const CU_MEMPOOL_ATTR_LOCATION_TYPE: u32 = 12;
pub const CU_MEMPOOL_ATTR_MAX_POOL_SIZE: u32 = 13;
pub const CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED: u32 = 14;

pub const CU_MEMHOSTALLOC_PORTABLE: u32 = 1;
pub const CU_MEMHOSTALLOC_DEVICEMAP: u32 = 2;
pub const CU_MEMHOSTALLOC_WRITECOMBINED: u32 = 4;
pub const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;
pub const CU_MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
pub const CU_MEMHOSTREGISTER_IOMEMORY: u32 = 4;
pub const CU_MEMHOSTREGISTER_READ_ONLY: u32 = 8;

pub const CU_MEM_ATTACH_GLOBAL: u32 = 1;
pub const CU_MEM_ATTACH_HOST: u32 = 2;
pub const CU_MEM_ATTACH_SINGLE: u32 = 4;

pub const CU_MEM_ADVISE_SET_READ_MOSTLY: u32 = 1;
pub const CU_MEM_ADVISE_UNSET_READ_MOSTLY: u32 = 2;
pub const CU_MEM_ADVISE_SET_PREFERRED_LOCATION: u32 = 3;
pub const CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: u32 = 4;
pub const CU_MEM_ADVISE_SET_ACCESSED_BY: u32 = 5;
pub const CU_MEM_ADVISE_UNSET_ACCESSED_BY: u32 = 6;

pub const CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: u32 = 1;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: u32 = 2;
pub const CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: u32 = 3;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: u32 = 4;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: u32 = 5;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: u32 = 6;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: u32 = 7;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: u32 = 8;

pub const CU_POINTER_ATTRIBUTE_CONTEXT: u32 = 1;
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: u32 = 2;
pub const CU_POINTER_ATTRIBUTE_DEVICE_POINTER: u32 = 3;
pub const CU_POINTER_ATTRIBUTE_HOST_POINTER: u32 = 4;
pub const CU_POINTER_ATTRIBUTE_P2P_TOKENS: u32 = 5;
pub const CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: u32 = 6;
pub const CU_POINTER_ATTRIBUTE_BUFFER_ID: u32 = 7;
pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: u32 = 8;
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;
pub const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: u32 = 11;
pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: u32 = 12;
pub const CU_POINTER_ATTRIBUTE_MAPPED: u32 = 13;
pub const CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: u32 = 14;
pub const CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: u32 = 15;
pub const CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: u32 = 16;
pub const CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: u32 = 17;
pub const CU_POINTER_ATTRIBUTE_MAPPING_SIZE: u32 = 18;
pub const CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: u32 = 19;
pub const CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: u32 = 20;
pub const CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE: u32 = 21;

/// Fails to compile where a struct's size or a field's offset differs from cuda.h's.
macro_rules! layout {
    ($($t:ident $size:literal { $($field:ident @ $offset:literal),* $(,)? })*) => {
        const _: () = {
            $(
                assert!(size_of::<$t>() == $size);
                $(assert!(std::mem::offset_of!($t, $field) == $offset);)*
            )*
        };
    };
}

// As gcc 12 lays out cuda.h of CUDA 13.5.
layout! {
    CUmemLocation 8 { type_ @ 0, id @ 4 }
    CUDA_MEMCPY2D 128 {
        srcMemoryType @ 16, srcHost @ 24, srcPitch @ 48, dstXInBytes @ 56, dstMemoryType @ 72,
        dstHost @ 80, dstPitch @ 104, WidthInBytes @ 112, Height @ 120,
    }
    CUDA_MEMCPY3D 200 {
        srcLOD @ 24, srcMemoryType @ 32, srcHost @ 40, srcContext @ 64, srcHeight @ 80,
        dstXInBytes @ 88, dstMemoryType @ 120, dstContext @ 152, dstHeight @ 168,
        WidthInBytes @ 176, Depth @ 192,
    }
    CUmemcpyAttributes 24 { srcLocHint @ 4, dstLocHint @ 12, flags @ 20 }
    CUextent3D 24 { depth @ 16 }
    CUmemcpy3DOperand 40 { type_ @ 0, op @ 8 }
    CUDA_MEMCPY3D_BATCH_OP 112 { dst @ 40, extent @ 80, srcAccessOrder @ 104, flags @ 108 }
    CUDA_ARRAY_DESCRIPTOR 24 { Height @ 8, Format @ 16, NumChannels @ 20 }
    CUDA_ARRAY3D_DESCRIPTOR 40 { Depth @ 16, Format @ 24, NumChannels @ 28, Flags @ 32 }
    CUDA_RESOURCE_DESC 144 { resType @ 0, res @ 8, flags @ 136 }
    CUDA_TEXTURE_DESC 104 {
        filterMode @ 12, flags @ 16, mipmapLevelBias @ 28, borderColor @ 40, reserved @ 56,
    }
    CUDA_RESOURCE_VIEW_DESC 112 { width @ 8, firstMipmapLevel @ 32, lastLayer @ 44, reserved @ 48 }
    CUmemAllocationProp 32 {
        requestedHandleTypes @ 4, location @ 8, win32HandleMetaData @ 16, compressionType @ 24,
        usage @ 26,
    }
    CUmemAccessDesc 12 { flags @ 8 }
    CUmemPoolProps 88 {
        handleTypes @ 4, location @ 8, win32SecurityAttributes @ 16, maxSize @ 24, usage @ 32,
        gpuDirectRDMACapable @ 34,
    }
}
