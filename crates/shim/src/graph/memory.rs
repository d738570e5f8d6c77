//! Graph nodes that move and allocate memory.

use crate::callback;
use crate::memory;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_MEM_ALLOC_NODE_PARAMS;
use kedge_cuda_types::handle::{CUarray, CUdeviceptr};
use kedge_cuda_types::memory::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEMORYTYPE_ARRAY,
    CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CUDA_MEMCPY3D, CUmemLocation, CUmemPoolProps,
};
use kedge_protocol::{Copy3d, Place, StreamOp};

/// A copy: what the device does, and how the program described it (a captured copy: not at all).
#[derive(Debug, Clone)]
pub(crate) struct Copied {
    pub(crate) op: StreamOp,
    params: Option<CUDA_MEMCPY3D>,
}

impl Copied {
    /// A copy node's operation. Private memory is read and written when the graph runs.
    pub(crate) fn new(params: CUDA_MEMCPY3D) -> Result<Self, CuError> {
        Ok(Self { op: memory::copy_op(&params)?, params: Some(params) })
    }

    pub(crate) fn captured(op: StreamOp) -> Self {
        Self { op, params: None }
    }

    /// What `cuGraphMemcpyNodeGetParams` tells.
    pub(crate) fn params(&self) -> CUDA_MEMCPY3D {
        match (&self.params, &self.op) {
            (Some(params), _) => *params,
            (None, StreamOp::Copy { copy }) => describe(copy),
            (None, _) => CUDA_MEMCPY3D::default(),
        }
    }
}

/// One side of a copy in CUDA's terms.
#[derive(Default)]
struct Operand {
    kind: u32,
    host: u64,
    device: CUdeviceptr,
    array: CUarray,
    at: [u64; 3],
    pitch: u64,
    rows: u64,
}

fn operand(place: Place) -> Operand {
    let rows = |pitch: u64, slice: u64| slice.checked_div(pitch).unwrap_or(0);
    match place {
        Place::Mapped { addr, pitch, slice } => Operand {
            kind: CU_MEMORYTYPE_DEVICE,
            device: addr,
            pitch,
            rows: rows(pitch, slice),
            ..Operand::default()
        },
        Place::Client { addr, pitch, slice } => Operand {
            kind: CU_MEMORYTYPE_HOST,
            host: addr,
            pitch,
            rows: rows(pitch, slice),
            ..Operand::default()
        },
        Place::Array { array, x_bytes, y, z } => Operand {
            kind: CU_MEMORYTYPE_ARRAY,
            array: memory::array_handle(array),
            at: [x_bytes, y, z],
            ..Operand::default()
        },
    }
}

fn describe(copy: &Copy3d) -> CUDA_MEMCPY3D {
    let (src, dst) = (operand(copy.src), operand(copy.dst));
    CUDA_MEMCPY3D {
        srcMemoryType: src.kind,
        srcHost: src.host,
        srcDevice: src.device,
        srcArray: src.array,
        srcXInBytes: src.at[0] as usize,
        srcY: src.at[1] as usize,
        srcZ: src.at[2] as usize,
        srcPitch: src.pitch as usize,
        srcHeight: src.rows as usize,
        dstMemoryType: dst.kind,
        dstHost: dst.host,
        dstDevice: dst.device,
        dstArray: dst.array,
        dstXInBytes: dst.at[0] as usize,
        dstY: dst.at[1] as usize,
        dstZ: dst.at[2] as usize,
        dstPitch: dst.pitch as usize,
        dstHeight: dst.rows as usize,
        WidthInBytes: copy.width as usize,
        Height: copy.height as usize,
        Depth: copy.depth as usize,
        ..CUDA_MEMCPY3D::default()
    }
}

/// A graph's own memory. The address is the node's for as long as a graph has the node, or an
/// executable of one; launches make it valid.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) params: CUDA_MEM_ALLOC_NODE_PARAMS,
}

impl Allocation {
    /// What `params` ask for, at the address that `alloc` reserves for so many bytes on the current
    /// context's device.
    pub(crate) fn new(
        mut params: CUDA_MEM_ALLOC_NODE_PARAMS,
        alloc: impl FnOnce(u64) -> Result<u64, CuError>,
    ) -> Result<Self, CuError> {
        let props = params.poolProps;
        let usable = props.allocType == CU_MEM_ALLOCATION_TYPE_PINNED
            && props.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        if !usable || params.bytesize == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        params.dptr = alloc(params.bytesize as u64)?;
        // The caller's array is not kept; every device of the job may use the memory.
        (params.accessDescs, params.accessDescCount) = (0, 0);
        Ok(Self { params })
    }

    /// Of an allocation that capture met, at an address that is reserved already.
    pub(crate) fn captured(addr: u64, size: u64) -> Self {
        let device = kedge_cuda_types::arena::device_of(addr).unwrap_or(0) as i32;
        let poolProps = CUmemPoolProps {
            allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: 0,
            location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device },
            win32SecurityAttributes: 0,
            maxSize: 0,
            usage: 0,
            gpuDirectRDMACapable: 0,
            reserved: [0; 53],
        };
        let params = CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps,
            accessDescs: 0,
            accessDescCount: 0,
            bytesize: size as usize,
            dptr: addr,
        };
        Self { params }
    }

    pub(crate) fn op(&self) -> StreamOp {
        StreamOp::MemAlloc { addr: self.params.dptr, size: self.params.bytesize as u64 }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let addr = self.params.dptr;
        callback::after_device(move || {
            // Fails only where the proxy is gone, and the memory with it.
            let _ = memory::graph_release(addr);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_captured_copy_is_described_in_cudas_terms() {
        let copy = Copy3d {
            src: Place::Client { addr: 0x1000, pitch: 64, slice: 640 },
            dst: Place::Mapped { addr: 0x2000, pitch: 128, slice: 1280 },
            width: 40,
            height: 10,
            depth: 2,
        };
        let params = Copied::captured(StreamOp::Copy { copy }).params();
        assert_eq!((params.srcMemoryType, params.srcHost), (CU_MEMORYTYPE_HOST, 0x1000));
        assert_eq!((params.dstMemoryType, params.dstDevice), (CU_MEMORYTYPE_DEVICE, 0x2000));
        assert_eq!((params.srcPitch, params.srcHeight, params.dstHeight), (64, 10, 10));
        assert_eq!((params.WidthInBytes, params.Height, params.Depth), (40, 10, 2));
    }
}
