//! cuOccupancy*: how many blocks fit on a multiprocessor.
//!
//! Registers and shared memory are handed out in units, as the CUDA occupancy calculator documents:
//! registers to warps in units of 256, shared memory to blocks in units of 128 bytes.

use crate::ffi;
use crate::function::{self, Function, required_cluster};
use crate::launch::Attributes;
use crate::session::Device;
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUoccupancyB2DSize;
use kedge_cuda_types::attribute as attr;
use kedge_cuda_types::graph::CUlaunchConfig;
use kedge_cuda_types::handle::CUfunction;
use std::ffi::c_int;

/// Registers are allocated to a warp in this unit.
const REGISTER_UNIT: u32 = 256;
/// Shared memory is allocated to a block in this unit, bytes.
const SHARED_UNIT: u64 = 128;
/// CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE: has no meaning without a shared L1.
const FLAGS: u32 = 1;

/// What a multiprocessor has.
#[derive(Debug, Clone, Copy)]
struct Multiprocessor {
    warp: u32,
    threads: u32,
    blocks: u32,
    registers: u32,
    /// Bytes.
    shared: u64,
    /// Bytes of each block's shared memory that the system keeps.
    reserved: u64,
}

impl Multiprocessor {
    fn of(device: &Device) -> Self {
        Self {
            warp: device.limit(attr::WARP_SIZE, 32).max(1),
            threads: device.limit(attr::MAX_THREADS_PER_MULTIPROCESSOR, 2048),
            blocks: device.limit(attr::MAX_BLOCKS_PER_MULTIPROCESSOR, 32),
            registers: device.limit(attr::MAX_REGISTERS_PER_MULTIPROCESSOR, 65536),
            shared: device.limit(attr::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 64 << 10).into(),
            reserved: device.limit(attr::RESERVED_SHARED_MEMORY_PER_BLOCK, 0).into(),
        }
    }

    /// Blocks of `threads` threads, `registers` registers a thread and `shared` bytes.
    fn resident(&self, threads: u32, registers: u32, shared: u64) -> u32 {
        if threads == 0 {
            return 0;
        }
        let warps = threads.div_ceil(self.warp);
        let by_warps = self.threads / self.warp / warps;
        let per_warp = (registers.max(1) * self.warp).next_multiple_of(REGISTER_UNIT);
        let by_registers = self.registers / per_warp / warps;
        let per_block = (shared + self.reserved).next_multiple_of(SHARED_UNIT);
        let by_shared = self.shared.checked_div(per_block).map_or(u32::MAX, |n| n as u32);
        self.blocks.min(by_warps).min(by_registers).min(by_shared)
    }

    /// Dynamic shared memory that each of `blocks` blocks may have besides `fixed` bytes.
    fn dynamic_shared(&self, blocks: u32, fixed: u64) -> u64 {
        let each = self.shared / u64::from(blocks.max(1)) / SHARED_UNIT * SHARED_UNIT;
        each.saturating_sub(self.reserved + fixed)
    }
}

/// Blocks of a kernel that are resident on one multiprocessor; 0 for a launch that cannot be.
pub(crate) fn blocks_per_multiprocessor(
    function: &Function,
    threads: u32,
    dynamic_shared: usize,
) -> u32 {
    if threads > function.max_threads() || dynamic_shared > function.max_dynamic_shared() as usize {
        return 0;
    }
    let info = function.info();
    let shared = u64::from(info.shared_bytes) + dynamic_shared as u64;
    Multiprocessor::of(function.device()).resident(threads, info.registers, shared)
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
    let answer = blocks_per_multiprocessor(&function, positive(block_size)?, dynamic_shared);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(blocks, answer as c_int) }
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
    // SAFETY: as the caller promises.
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
) -> (u32, u32) {
    let warp = function.device().limit(attr::WARP_SIZE, 32).max(1);
    let most = function.max_threads();
    let most = if limit == 0 { most } else { most.min(limit) };
    let (mut best_size, mut best_blocks) = (0, 0);
    // From the largest down, in whole warps; the first may be a part of one.
    let mut size = most;
    while size > 0 {
        let blocks = blocks_per_multiprocessor(function, size, dynamic_shared(size));
        if blocks * size > best_blocks * best_size {
            (best_size, best_blocks) = (size, blocks);
        }
        size = (size - 1) / warp * warp;
    }
    (best_size, best_blocks * function.device().limit(attr::MULTIPROCESSOR_COUNT, 1))
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
    let (size, blocks) = best_block(&function, shared, limit);
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
    // SAFETY: as the caller promises.
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
    let multiprocessor = Multiprocessor::of(function.device());
    let fixed = u64::from(function.info().shared_bytes);
    if blocks > multiprocessor.resident(threads, function.info().registers, fixed) {
        return Err(CuError::INVALID_VALUE);
    }
    let opt_in = function.device().limit(attr::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 48 << 10);
    let most = u64::from(opt_in).saturating_sub(fixed);
    let available = multiprocessor.dynamic_shared(blocks, fixed).min(most);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(bytes, available as usize) }
}

/// # Safety
/// `config` is NULL or a valid configuration.
unsafe fn cluster_blocks(
    function: &Function,
    config: *const CUlaunchConfig,
) -> Result<u32, CuError> {
    // SAFETY: as the caller promises.
    let attributes = unsafe {
        let config = ffi::read(config)?;
        Attributes::read(config.attrs, config.numAttrs)?
    };
    let asked = attributes.cluster.map(|c| [c.x, c.y, c.z]);
    let cluster = asked.or_else(|| required_cluster(function)).unwrap_or([1; 3]);
    let blocks = cluster.iter().fold(1u32, |all, n| all.saturating_mul(*n));
    Ok(blocks.max(1))
}

/// Blocks of a cluster that every device with clusters can run.
const PORTABLE_CLUSTER: c_int = 8;
const LARGEST_CLUSTER: c_int = 16;

pub(crate) unsafe fn cuOccupancyMaxPotentialClusterSize(
    size: *mut c_int,
    function: CUfunction,
    _config: *const CUlaunchConfig,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    let most = match function.settings().allows_non_portable_clusters() {
        true => LARGEST_CLUSTER,
        false => PORTABLE_CLUSTER,
    };
    let clusters = function.device().attribute(attr::CLUSTER_LAUNCH) == Some(1);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(size, if clusters { most } else { 1 }) }
}

pub(crate) unsafe fn cuOccupancyMaxActiveClusters(
    clusters: *mut c_int,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> Result<(), CuError> {
    let function = function::resolve(function)?;
    // SAFETY: the caller's configuration.
    let (config, in_cluster) = unsafe { (ffi::read(config)?, cluster_blocks(&function, config)?) };
    let threads = [config.blockDimX, config.blockDimY, config.blockDimZ];
    let threads = threads.iter().fold(1u32, |all, n| all.saturating_mul(*n));
    let each = blocks_per_multiprocessor(&function, threads, config.sharedMemBytes as usize);
    let all = each.saturating_mul(function.device().limit(attr::MULTIPROCESSOR_COUNT, 1));
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(clusters, (all / in_cluster) as c_int) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compute capability 8.0.
    const A100: Multiprocessor = Multiprocessor {
        warp: 32,
        threads: 2048,
        blocks: 32,
        registers: 65536,
        shared: 164 << 10,
        reserved: 1 << 10,
    };

    /// Values of NVIDIA's occupancy calculator.
    #[test]
    fn known_occupancies() {
        assert_eq!(A100.resident(256, 32, 0), 8);
        assert_eq!(A100.resident(256, 64, 0), 4);
        assert_eq!(A100.resident(1024, 32, 0), 2);
        assert_eq!(A100.resident(1024, 65, 0), 0);
        assert_eq!(A100.resident(32, 16, 0), 32);
        assert_eq!(A100.resident(128, 32, 48 << 10), 3);
        assert_eq!(A100.resident(128, 32, 163 << 10), 1);
        assert_eq!(A100.resident(0, 32, 0), 0);
    }

    #[test]
    fn what_is_left_is_what_fits() {
        let each = A100.dynamic_shared(4, 1000);
        assert_eq!(A100.resident(32, 16, each + 1000), 4);
        assert!(A100.resident(32, 16, each + 1000 + SHARED_UNIT) < 4);
    }
}
