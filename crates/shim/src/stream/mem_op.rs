//! Stream memory operations: wait for and write values in memory, in stream order.

use super::{Stream, submit};
use crate::graph::Payload;
use crate::{entry, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_STREAM_MEM_OP_BARRIER, CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES, CU_STREAM_MEM_OP_WAIT_VALUE_32,
    CU_STREAM_MEM_OP_WAIT_VALUE_64, CU_STREAM_MEM_OP_WRITE_VALUE_32,
    CU_STREAM_MEM_OP_WRITE_VALUE_64, CU_STREAM_WAIT_VALUE_FLUSH, CUstreamBatchMemOpParams,
};
use kedge_cuda_types::handle::{CUdeviceptr, CUstream};
use kedge_protocol::StreamOp;

/// The most operations of one batch.
const MAX_BATCH: u32 = 256;

/// Converts one operation of a batch; `None` if nothing needs doing.
///
/// # Errors
/// INVALID_VALUE for a misaligned address or wrong flags, NOT_SUPPORTED for another operation.
pub(crate) fn mem_op(params: &CUstreamBatchMemOpParams) -> Result<Option<StreamOp>, CuError> {
    let &CUstreamBatchMemOpParams { operation, address: addr, value, value_flags, .. } = params;
    let (wide, wait) = match operation {
        CU_STREAM_MEM_OP_WAIT_VALUE_32 => (false, true),
        CU_STREAM_MEM_OP_WAIT_VALUE_64 => (true, true),
        CU_STREAM_MEM_OP_WRITE_VALUE_32 => (false, false),
        CU_STREAM_MEM_OP_WRITE_VALUE_64 => (true, false),
        // A stream's operations see what earlier ones wrote, so a barrier is implied.
        CU_STREAM_MEM_OP_BARRIER | CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES => return Ok(None),
        _ => {
            return Err(entry::not_supported("a stream memory operation other than wait or write"));
        }
    };
    let size = if wide { 8 } else { 4 };
    if addr == 0 || addr % size != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let value = if wide { value } else { value & u64::from(u32::MAX) };
    let flags = value_flags as u32;
    if !wait {
        return if flags & !1 == 0 {
            Ok(Some(StreamOp::WriteValue { addr, value, wide }))
        } else {
            Err(CuError::INVALID_VALUE)
        };
    }
    let mode = flags & !CU_STREAM_WAIT_VALUE_FLUSH;
    if mode > 3 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(Some(StreamOp::WaitValue { addr, value, wide, mode }))
}

/// Converts a whole batch, in order.
///
/// # Errors
/// Those of [`mem_op`] for the first wrong operation.
pub(crate) fn mem_ops(batch: &[CUstreamBatchMemOpParams]) -> Result<Vec<StreamOp>, CuError> {
    batch.iter().filter_map(|params| mem_op(params).transpose()).collect()
}

/// Posts a batch to a stream, or captures it into a graph.
fn run(stream: CUstream, batch: &[CUstreamBatchMemOpParams]) -> Result<(), CuError> {
    let ops = mem_ops(batch)?;
    submit(
        stream,
        |stream: &Stream| ops.into_iter().try_for_each(|op| stream.post(op)),
        || Ok(Payload::MemOps(batch.to_vec())),
    )
}

/// Runs a batch of one operation.
fn one(
    stream: CUstream,
    operation: u32,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> Result<(), CuError> {
    let value_flags = u64::from(flags);
    let params =
        CUstreamBatchMemOpParams { operation, address, value, value_flags, ..Default::default() };
    run(stream, &[params])
}

/// Copies a program's array of operations.
///
/// # Errors
/// INVALID_VALUE for NULL, or more than [`MAX_BATCH`] operations.
///
/// # Safety
/// `batch` is NULL or points to `count` operations.
pub(crate) unsafe fn read_batch(
    batch: *const CUstreamBatchMemOpParams,
    count: u32,
) -> Result<Vec<CUstreamBatchMemOpParams>, CuError> {
    if count > MAX_BATCH {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller promises `count` operations.
    unsafe { ffi::read_array(batch, count as usize) }
}

macro_rules! value_functions {
    ($($(#[$doc:meta])* $name:ident($value:ty) = $operation:ident;)*) => { $(
        $(#[$doc])*
        pub(crate) unsafe fn $name(
            stream: CUstream,
            addr: CUdeviceptr,
            value: $value,
            flags: u32,
        ) -> Result<(), CuError> {
            one(stream, $operation, addr, u64::from(value), flags)
        }
    )* };
}

value_functions! {
    cuStreamWaitValue32(u32) = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    cuStreamWaitValue32_v2(u32) = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    cuStreamWaitValue64(u64) = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    cuStreamWaitValue64_v2(u64) = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    cuStreamWriteValue32(u32) = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    cuStreamWriteValue32_v2(u32) = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    cuStreamWriteValue64(u64) = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    cuStreamWriteValue64_v2(u64) = CU_STREAM_MEM_OP_WRITE_VALUE_64;
}

pub(crate) unsafe fn cuStreamBatchMemOp(
    stream: CUstream,
    count: u32,
    batch: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> Result<(), CuError> {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: CUDA's contract is that `batch` is NULL or points to `count` operations.
    run(stream, &unsafe { read_batch(batch, count) }?)
}

pub(crate) unsafe fn cuStreamBatchMemOp_v2(
    stream: CUstream,
    count: u32,
    batch: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> Result<(), CuError> {
    // SAFETY: the contract of cuStreamBatchMemOp is the same.
    unsafe { cuStreamBatchMemOp(stream, count, batch, flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(operation: u32, address: u64, value: u64, flags: u64) -> CUstreamBatchMemOpParams {
        let value_flags = flags;
        CUstreamBatchMemOpParams { operation, address, value, value_flags, ..Default::default() }
    }

    #[test]
    fn values_are_cut_to_their_width() {
        let write = mem_op(&params(CU_STREAM_MEM_OP_WRITE_VALUE_32, 4, u64::MAX, 0));
        let expected = StreamOp::WriteValue { addr: 4, value: 0xffff_ffff, wide: false };
        assert_eq!(write, Ok(Some(expected)));
    }

    #[test]
    fn flags_choose_the_comparison() {
        let flush = u64::from(CU_STREAM_WAIT_VALUE_FLUSH);
        let wait = mem_op(&params(CU_STREAM_MEM_OP_WAIT_VALUE_64, 8, 5, flush | 3));
        let expected = StreamOp::WaitValue { addr: 8, value: 5, wide: true, mode: 3 };
        assert_eq!(wait, Ok(Some(expected)));
        let wrong = mem_op(&params(CU_STREAM_MEM_OP_WAIT_VALUE_64, 8, 5, 4));
        assert_eq!(wrong, Err(CuError::INVALID_VALUE));
    }

    #[test]
    fn addresses_are_aligned_to_the_value() {
        for (operation, address) in
            [(CU_STREAM_MEM_OP_WAIT_VALUE_64, 4), (CU_STREAM_MEM_OP_WRITE_VALUE_32, 2), (1, 0)]
        {
            assert_eq!(mem_op(&params(operation, address, 0, 0)), Err(CuError::INVALID_VALUE));
        }
    }
}
