//! Graphs', launches' and stream operations' structs and constants, laid out as cuda.h lays them
//! out (CUDA 13, 64-bit). Enumerations are plain integers, because a program may pass any value.
#![allow(non_camel_case_types, non_snake_case, reason = "names as in cuda.h")]

use crate::handle::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphNode, CUhostFn, CUkernel, CUstream,
};
use crate::memory::{CUDA_MEMCPY3D, CUmemPoolProps};
use std::ffi::c_void;
use std::mem::{offset_of, size_of};

pub const CU_STREAM_DEFAULT: u32 = 0;
pub const CU_STREAM_NON_BLOCKING: u32 = 1;

pub const CU_EVENT_BLOCKING_SYNC: u32 = 1;
pub const CU_EVENT_DISABLE_TIMING: u32 = 2;
pub const CU_EVENT_INTERPROCESS: u32 = 4;
/// Of `cuEventRecordWithFlags`: a node of its own when captured.
pub const CU_EVENT_RECORD_EXTERNAL: u32 = 1;
/// Of `cuStreamWaitEvent`: a node of its own when captured.
pub const CU_EVENT_WAIT_EXTERNAL: u32 = 1;

pub const CU_STREAM_CAPTURE_STATUS_NONE: u32 = 0;
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: u32 = 1;
pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: u32 = 2;

pub const CU_STREAM_CAPTURE_MODE_GLOBAL: u32 = 0;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
pub const CU_STREAM_CAPTURE_MODE_RELAXED: u32 = 2;

pub const CU_STREAM_ADD_CAPTURE_DEPENDENCIES: u32 = 0;
pub const CU_STREAM_SET_CAPTURE_DEPENDENCIES: u32 = 1;

pub const CU_STREAM_WAIT_VALUE_FLUSH: u32 = 1 << 30;

pub const CU_STREAM_MEM_OP_WAIT_VALUE_32: u32 = 1;
pub const CU_STREAM_MEM_OP_WRITE_VALUE_32: u32 = 2;
pub const CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: u32 = 3;
pub const CU_STREAM_MEM_OP_WAIT_VALUE_64: u32 = 4;
pub const CU_STREAM_MEM_OP_WRITE_VALUE_64: u32 = 5;
pub const CU_STREAM_MEM_OP_BARRIER: u32 = 6;
pub const CU_STREAM_MEM_OP_ATOMIC_REDUCTION: u32 = 8;

pub const CU_GRAPH_NODE_TYPE_KERNEL: u32 = 0;
pub const CU_GRAPH_NODE_TYPE_MEMCPY: u32 = 1;
pub const CU_GRAPH_NODE_TYPE_MEMSET: u32 = 2;
pub const CU_GRAPH_NODE_TYPE_HOST: u32 = 3;
pub const CU_GRAPH_NODE_TYPE_GRAPH: u32 = 4;
pub const CU_GRAPH_NODE_TYPE_EMPTY: u32 = 5;
pub const CU_GRAPH_NODE_TYPE_WAIT_EVENT: u32 = 6;
pub const CU_GRAPH_NODE_TYPE_EVENT_RECORD: u32 = 7;
pub const CU_GRAPH_NODE_TYPE_MEM_ALLOC: u32 = 10;
pub const CU_GRAPH_NODE_TYPE_MEM_FREE: u32 = 11;
pub const CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: u32 = 12;

pub const CU_GRAPH_NODE_TYPE_CONDITIONAL: u32 = 13;

pub const CU_GRAPH_COND_TYPE_IF: u32 = 0;
pub const CU_GRAPH_COND_TYPE_WHILE: u32 = 1;
pub const CU_GRAPH_COND_TYPE_SWITCH: u32 = 2;
pub const CU_GRAPH_COND_ASSIGN_DEFAULT: u32 = 1;

pub const CU_GRAPH_DEPENDENCY_TYPE_DEFAULT: u8 = 0;
pub const CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC: u8 = 1;

pub const CUDA_GRAPH_INSTANTIATE_SUCCESS: u32 = 0;
pub const CUDA_GRAPH_INSTANTIATE_ERROR: u32 = 1;
pub const CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE: u32 = 2;
pub const CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED: u32 = 3;

pub const CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH: u64 = 1;
pub const CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD: u64 = 2;
pub const CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH: u64 = 4;
pub const CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: u64 = 8;

pub const CU_GRAPH_EXEC_UPDATE_SUCCESS: u32 = 0;
pub const CU_GRAPH_EXEC_UPDATE_ERROR: u32 = 1;
pub const CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED: u32 = 2;
pub const CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED: u32 = 3;
pub const CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED: u32 = 4;
pub const CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED: u32 = 5;
pub const CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED: u32 = 6;

pub const CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: u32 = 1;
pub const CU_GRAPH_USER_OBJECT_MOVE: u32 = 1;

pub const CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: u32 = 0;
pub const CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: u32 = 1;
pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: u32 = 2;
pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: u32 = 3;

pub const CU_LAUNCH_ATTRIBUTE_IGNORE: u32 = 0;
pub const CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: u32 = 1;
pub const CU_LAUNCH_ATTRIBUTE_COOPERATIVE: u32 = 2;
pub const CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY: u32 = 3;
pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: u32 = 4;
pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: u32 = 5;
pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;
pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT: u32 = 7;
pub const CU_LAUNCH_ATTRIBUTE_PRIORITY: u32 = 8;
pub const CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP: u32 = 9;
pub const CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN: u32 = 10;
pub const CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION: u32 = 11;
pub const CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: u32 = 12;
pub const CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE: u32 = 13;
pub const CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: u32 = 14;
pub const CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING: u32 = 16;
pub const CU_LAUNCH_ATTRIBUTE_PORTABLE_CLUSTER_SIZE_MODE: u32 = 17;
pub const CU_LAUNCH_ATTRIBUTE_SHARED_MEMORY_MODE: u32 = 18;

pub const CU_SYNC_POLICY_AUTO: u32 = 1;

/// `CUlaunchAttributeValue`: a union of 64 bytes, read by the attribute's id.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUlaunchAttributeValue {
    pub bytes: [u8; 64],
}

impl CUlaunchAttributeValue {
    pub const ZERO: Self = Self { bytes: [0; 64] };

    /// The `index`th 32-bit word: an int member, or a dimension.
    pub fn word(&self, index: usize) -> u32 {
        let at = index * 4;
        match self.bytes.get(at..at + 4) {
            Some(bytes) => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            None => 0,
        }
    }

    /// A value whose first words are `words`.
    pub fn from_words(words: &[u32]) -> Self {
        let mut value = Self::ZERO;
        for (slot, word) in value.bytes.chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        value
    }

    /// The event of `PROGRAMMATIC_EVENT` and `LAUNCH_COMPLETION_EVENT`.
    pub fn event(&self) -> CUevent {
        CUevent(u64::from(self.word(0)) as usize | (self.word(1) as usize) << 32)
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUlaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_*`.
    pub id: u32,
    pub pad: u32,
    pub value: CUlaunchAttributeValue,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUlaunchConfig {
    pub gridDimX: u32,
    pub gridDimY: u32,
    pub gridDimZ: u32,
    pub blockDimX: u32,
    pub blockDimY: u32,
    pub blockDimZ: u32,
    pub sharedMemBytes: u32,
    pub hStream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub numAttrs: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS_v1`: the first 56 bytes of `v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v1 {
    pub func: CUfunction,
    pub gridDimX: u32,
    pub gridDimY: u32,
    pub gridDimZ: u32,
    pub blockDimX: u32,
    pub blockDimY: u32,
    pub blockDimZ: u32,
    pub sharedMemBytes: u32,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`, and `v3`, which differs from it in name only.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v2 {
    pub v1: CUDA_KERNEL_NODE_PARAMS_v1,
    /// Used where `v1.func` is NULL.
    pub kern: CUkernel,
    /// NULL: the current context.
    pub ctx: CUcontext,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_MEMSET_NODE_PARAMS_v1 {
    pub dst: CUdeviceptr,
    /// Bytes between rows; not used for one row.
    pub pitch: usize,
    pub value: u32,
    /// Bytes: 1, 2 or 4.
    pub elementSize: u32,
    /// Elements a row.
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUDA_MEMSET_NODE_PARAMS_v2 {
    pub v1: CUDA_MEMSET_NODE_PARAMS_v1,
    pub ctx: CUcontext,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_HOST_NODE_PARAMS_v1 {
    pub r#fn: Option<CUhostFn>,
    pub userData: *mut c_void,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_HOST_NODE_PARAMS_v2 {
    pub v1: CUDA_HOST_NODE_PARAMS_v1,
    /// CUhostTaskSyncMode.
    pub syncMode: u32,
    pub ctx: CUcontext,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_MEMCPY_NODE_PARAMS {
    pub flags: i32,
    pub reserved: i32,
    pub copyCtx: CUcontext,
    pub copyParams: CUDA_MEMCPY3D,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS_v1`, and `v2`, which differs from it in name only.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS {
    pub poolProps: CUmemPoolProps,
    /// `CUmemAccessDesc` array.
    pub accessDescs: u64,
    pub accessDescCount: usize,
    pub bytesize: usize,
    /// Out: the address that every launch allocates.
    pub dptr: CUdeviceptr,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_CHILD_GRAPH_NODE_PARAMS {
    pub graph: CUgraph,
    /// CUgraphChildGraphNodeOwnership.
    pub ownership: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_EVENT_RECORD_NODE_PARAMS {
    pub event: CUevent,
    pub ctx: CUcontext,
}

/// One operation of `cuStreamBatchMemOp`: a union of 48 bytes, read by `operation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUstreamBatchMemOpParams {
    /// `CU_STREAM_MEM_OP_*`.
    pub operation: u32,
    /// Flags of the flush, barrier and atomic operations.
    pub flags: u32,
    /// Of waits and writes. Of an atomic: its operation and its data type, as two words.
    pub address: CUdeviceptr,
    /// The value, 64 bits wide or with its low word. Of an atomic: its address.
    pub value: u64,
    /// Flags in the low word. Of an atomic: its value.
    pub value_flags: u64,
    pub alias: u64,
    pub pad: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS {
    pub ctx: CUcontext,
    pub count: u32,
    pub paramArray: *mut CUstreamBatchMemOpParams,
    pub flags: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_CONDITIONAL_NODE_PARAMS {
    /// CUgraphConditionalHandle.
    pub handle: u64,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub type_: u32,
    /// Bodies.
    pub size: u32,
    /// Out: the bodies, in an array that is CUDA's.
    pub phGraph_out: *mut CUgraph,
    pub ctx: CUcontext,
}

/// `CUgraphNodeParams`'s union.
#[repr(C)]
#[derive(Clone, Copy)]
pub union CUgraphNodeParamsValue {
    pub bytes: [u64; 29],
    pub kernel: CUDA_KERNEL_NODE_PARAMS_v2,
    pub memcpy: CUDA_MEMCPY_NODE_PARAMS,
    pub memset: CUDA_MEMSET_NODE_PARAMS_v2,
    pub host: CUDA_HOST_NODE_PARAMS_v2,
    pub graph: CUDA_CHILD_GRAPH_NODE_PARAMS,
    pub eventWait: CUevent,
    pub eventRecord: CUDA_EVENT_RECORD_NODE_PARAMS,
    pub alloc: CUDA_MEM_ALLOC_NODE_PARAMS,
    pub free: CUdeviceptr,
    pub memOp: CUDA_BATCH_MEM_OP_NODE_PARAMS,
    pub conditional: CUDA_CONDITIONAL_NODE_PARAMS,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUgraphNodeParams {
    /// `CU_GRAPH_NODE_TYPE_*`.
    pub type_: u32,
    pub reserved0: [i32; 3],
    pub value: CUgraphNodeParamsValue,
    pub reserved2: i64,
}

/// How one node depends on another.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUgraphEdgeData {
    pub from_port: u8,
    pub to_port: u8,
    /// `CU_GRAPH_DEPENDENCY_TYPE_*`.
    pub type_: u8,
    pub reserved: [u8; 5],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    pub flags: u64,
    pub hUploadStream: CUstream,
    pub hErrNode_out: CUgraphNode,
    /// Out: `CUDA_GRAPH_INSTANTIATE_*`.
    pub result_out: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUgraphExecUpdateResultInfo {
    /// `CU_GRAPH_EXEC_UPDATE_*`.
    pub result: u32,
    pub errorNode: CUgraphNode,
    pub errorFromNode: CUgraphNode,
}

// Sizes and offsets as a C compiler gives them for cuda.h of CUDA 13.
const _: () = {
    assert!(size_of::<CUlaunchAttributeValue>() == 64 && size_of::<CUlaunchAttribute>() == 72);
    assert!(size_of::<CUlaunchConfig>() == 56 && offset_of!(CUlaunchConfig, hStream) == 32);
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS_v1>() == 56);
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS_v2>() == 72);
    assert!(size_of::<CUDA_MEMSET_NODE_PARAMS_v1>() == 40);
    assert!(size_of::<CUDA_MEMSET_NODE_PARAMS_v2>() == 48);
    assert!(size_of::<CUDA_HOST_NODE_PARAMS_v1>() == 16);
    assert!(size_of::<CUDA_HOST_NODE_PARAMS_v2>() == 32);
    assert!(size_of::<CUDA_MEMCPY_NODE_PARAMS>() == 216);
    assert!(offset_of!(CUDA_MEMCPY_NODE_PARAMS, copyParams) == 16);
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == 120);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS, bytesize) == 104);
    assert!(size_of::<CUDA_CHILD_GRAPH_NODE_PARAMS>() == 16);
    assert!(size_of::<CUDA_EVENT_RECORD_NODE_PARAMS>() == 16);
    assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
    assert!(offset_of!(CUstreamBatchMemOpParams, value) == 16);
    assert!(size_of::<CUDA_BATCH_MEM_OP_NODE_PARAMS>() == 32);
    assert!(size_of::<CUDA_CONDITIONAL_NODE_PARAMS>() == 32);
    assert!(size_of::<CUgraphNodeParams>() == 256);
    assert!(offset_of!(CUgraphNodeParams, value) == 16);
    assert!(offset_of!(CUgraphNodeParams, reserved2) == 248);
    assert!(size_of::<CUgraphEdgeData>() == 8);
    assert!(size_of::<CUDA_GRAPH_INSTANTIATE_PARAMS>() == 32);
    assert!(offset_of!(CUDA_GRAPH_INSTANTIATE_PARAMS, result_out) == 24);
    assert!(size_of::<CUgraphExecUpdateResultInfo>() == 24);
};
