//! cuOccupancy*: how many blocks fit on a multiprocessor. The device knows; its answers are kept.

use crate::function::{self, Function, required_cluster};
use crate::launch::Attributes;
use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUoccupancyB2DSize;
use kedge_cuda_types::attribute as attr;
use kedge_cuda_types::graph::CUlaunchConfig;
use kedge_cuda_types::handle::CUfunction;
use kedge_protocol::{Call, Dim3, Occupancy};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE: has no meaning without a shared L1.
const FLAGS: u32 = 1;

/// Most answers of one function that are kept.
const MAX_KEPT: usize = 4096;

/// What the device has answered of a function, by what was set for it then.
#[derive(Debug, Default)]
pub(crate) struct Answers(Mutex<HashMap<(u32, Occupancy), u64>>);

fn ask(function: &Function, query: Occupancy) -> Result<u64, CuError> {
    let key = (function.settings().changes(), query);
    let kept = || function.occupancy().0.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(answer) = kept().get(&key) {
        return Ok(*answer);
    }
    let call = Call::Occupancy { kernel: function.kernel(), query };
    let answer = session::get()?.call::<Result<u64, u32>>(&call)?.map_err(CuError)?;
    let mut kept = kept();
    if kept.len() >= MAX_KEPT {
        kept.clear();
    }
    kept.insert(key, answer);
    Ok(answer)
}

fn int(answer: u64) -> c_int {
    c_int::try_from(answer).unwrap_or(c_int::MAX)
}

/// Blocks of a kernel that are resident on one multiprocessor; 0 for a launch that cannot be.
pub(crate) fn blocks_per_multiprocessor(
    function: &Function,
    threads: u32,
    dynamic_shared: usize,
) -> Result<u32, CuError> {
    if threads > function.max_threads() || dynamic_shared > function.max_dynamic_shared() as usize {
        return Ok(0);
    }
    let answer = ask(function, Occupancy::ActiveBlocks { threads, shared: dynamic_shared as u64 })?;
    Ok(u32::try_from(answer).unwrap_or(u32::MAX))
}

fn positive(value: c_int) -> Result<u32, CuError> {
    u32::try_from(value).ok().filter(|n| *n != 0).ok_or(CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: CUfunction,
    block_size: c_int,
    dynamic_shared: usize,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    let answer = blocks_per_multiprocessor(&function, positive(block_size)?, dynamic_shared)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(blocks, int(answer.into())) }
}

pub(crate) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    function: CUfunction,
    block_size: c_int,
    dynamic_shared: usize,
    flags: u32,
) -> Result<(), CuError> {
    if flags & !FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `cuOccupancyMaxActiveBlocksPerMultiprocessor` asks the same of these arguments as
    // this call does.
    unsafe {
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, dynamic_shared)
    }
}

/// The block size with the most resident threads, the largest of equals, and how many such blocks
/// fill the device.
fn best_block(
    function: &Function,
    dynamic_shared: impl Fn(u32) -> usize,
    limit: u32,
) -> Result<(u32, u32), CuError> {
    let warp = function.device().limit(attr::WARP_SIZE, 32).max(1);
    let most = function.max_threads();
    let most = if limit == 0 { most } else { most.min(limit) };
    let (mut best_size, mut best_blocks) = (0, 0);
    // From the largest down, in whole warps; the first may be a part of one.
    let mut size = most;
    while size > 0 {
        let blocks = blocks_per_multiprocessor(function, size, dynamic_shared(size))?;
        if blocks * size > best_blocks * best_size {
            (best_size, best_blocks) = (size, blocks);
        }
        size = (size - 1) / warp * warp;
    }
    Ok((best_size, best_blocks * function.device().limit(attr::MULTIPROCESSOR_COUNT, 1)))
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSize(
    min_grid: *mut c_int,
    block_size: *mut c_int,
    function: CUfunction,
    shared_of: Option<CUoccupancyB2DSize>,
    dynamic_shared: usize,
    limit: c_int,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    let limit = u32::try_from(limit).map_err(|_| CuError::INVALID_VALUE)?;
    let shared = |size: u32| match shared_of {
        // SAFETY: the caller's function, which CUDA calls with block sizes.
        Some(shared_of) => unsafe { shared_of(size as c_int) },
        None => dynamic_shared,
    };
    let (size, blocks) = best_block(&function, shared, limit)?;
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write(min_grid, blocks as c_int)?;
        ffi::write(block_size, size as c_int)
    }
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    min_grid: *mut c_int,
    block_size: *mut c_int,
    function: CUfunction,
    shared_of: Option<CUoccupancyB2DSize>,
    dynamic_shared: usize,
    limit: c_int,
    flags: u32,
) -> Result<(), CuError> {
    if flags & !FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `cuOccupancyMaxPotentialBlockSize` asks the same of these arguments as this call
    // does.
    unsafe {
        cuOccupancyMaxPotentialBlockSize(
            min_grid,
            block_size,
            function,
            shared_of,
            dynamic_shared,
            limit,
        )
    }
}

pub(crate) unsafe fn cuOccupancyAvailableDynamicSMemPerBlock(
    bytes: *mut usize,
    function: CUfunction,
    blocks: c_int,
    block_size: c_int,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    let (blocks, threads) = (positive(blocks)?, positive(block_size)?);
    let available = ask(&function, Occupancy::DynamicShared { blocks, threads })?;
    let available = available.min(function.most_dynamic_shared().into());
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(bytes, available as usize) }
}

/// A launch as cluster queries describe it.
struct Shape {
    grid: Dim3,
    block: Dim3,
    shared: u32,
    cluster: Dim3,
}

/// # Safety
/// `config` is NULL or a valid configuration.
unsafe fn shape(function: &Function, config: *const CUlaunchConfig) -> Result<Shape, CuError> {
    // SAFETY: `config` is NULL or valid for a read, and its list has as many attributes as it says,
    // by this function's contract.
    let (config, attributes) = unsafe {
        let config = ffi::read(config)?;
        (config, Attributes::read(config.attrs, config.numAttrs)?)
    };
    let required = || required_cluster(function).map(|[x, y, z]| Dim3 { x, y, z });
    Ok(Shape {
        grid: Dim3 { x: config.gridDimX, y: config.gridDimY, z: config.gridDimZ },
        block: Dim3 { x: config.blockDimX, y: config.blockDimY, z: config.blockDimZ },
        shared: config.sharedMemBytes,
        cluster: attributes.cluster.or_else(required).unwrap_or(Dim3 { x: 1, y: 1, z: 1 }),
    })
}

/// Blocks of a cluster that every device with clusters can run.
const PORTABLE_CLUSTER: u64 = 8;

pub(crate) unsafe fn cuOccupancyMaxPotentialClusterSize(
    size: *mut c_int,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    // SAFETY: the caller's configuration.
    let Shape { grid, block, shared, .. } = unsafe { shape(&function, config)? };
    let most = ask(&function, Occupancy::ClusterSize { grid, block, shared })?;
    let any_size = function.settings().allows_non_portable_clusters();
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(size, int(if any_size { most } else { most.min(PORTABLE_CLUSTER) })) }
}

pub(crate) unsafe fn cuOccupancyMaxActiveClusters(
    clusters: *mut c_int,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    // SAFETY: the caller's configuration.
    let Shape { grid, block, shared, cluster } = unsafe { shape(&function, config)? };
    let answer = ask(&function, Occupancy::ActiveClusters { grid, block, shared, cluster })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(clusters, int(answer)) }
}
