//! How many blocks of a kernel fit on a multiprocessor, as the CUDA occupancy calculator has it:
//! registers are handed out to warps in units of 256, shared memory to blocks in units of 128
//! bytes.

use crate::code::Kernel;
use crate::spec::{self, SHARED_UNIT};
use kedge_cuda_types::CuError;
use kedge_protocol::{Dim3, KernelInfo, Occupancy};

/// Registers are allocated to a warp in this unit.
const REGISTER_UNIT: u32 = 256;
const WARP: u32 = spec::WARP as u32;

/// What a multiprocessor has.
#[derive(Debug, Clone, Copy)]
struct Multiprocessor {
    threads: u32,
    blocks: u32,
    registers: u32,
    /// Bytes.
    shared: u64,
    /// Bytes of each block's shared memory that the system keeps.
    reserved: u64,
}

const OURS: Multiprocessor = Multiprocessor {
    threads: spec::THREADS_PER_SM,
    blocks: spec::BLOCKS_PER_SM,
    registers: spec::REGISTERS_PER_BLOCK,
    shared: spec::SHARED_PER_SM as u64,
    reserved: spec::SHARED_RESERVED as u64,
};

impl Multiprocessor {
    /// Blocks of `threads` threads, `registers` registers a thread and `shared` bytes.
    fn resident(&self, threads: u32, registers: u32, shared: u64) -> u32 {
        if threads == 0 || threads > spec::MAX_THREADS_PER_BLOCK {
            return 0;
        }
        let warps = threads.div_ceil(WARP);
        let by_warps = self.threads / WARP / warps;
        let per_warp = registers.clamp(1, spec::REGISTERS_PER_BLOCK) * WARP;
        let by_registers = self.registers / per_warp.next_multiple_of(REGISTER_UNIT) / warps;
        let per_block = shared.saturating_add(self.reserved).div_ceil(SHARED_UNIT) * SHARED_UNIT;
        let by_shared = u32::try_from(self.shared / per_block.max(1)).unwrap_or(u32::MAX);
        self.blocks.min(by_warps).min(by_registers).min(by_shared)
    }

    /// Dynamic shared memory that each of `blocks` blocks may have besides `fixed` bytes.
    fn dynamic_shared(&self, blocks: u32, fixed: u64) -> u64 {
        let each = self.shared / u64::from(blocks.max(1)) / SHARED_UNIT * SHARED_UNIT;
        each.saturating_sub(self.reserved + fixed)
    }
}

fn volume(d: Dim3) -> u32 {
    d.x.saturating_mul(d.y).saturating_mul(d.z)
}

/// Blocks of a kernel that a multiprocessor holds.
pub(crate) fn active_blocks(kernel: &Kernel, threads: u32, shared: u64) -> u32 {
    let shared = u64::from(kernel.shared_bytes).saturating_add(shared);
    OURS.resident(threads, kernel.registers, shared)
}

/// # Errors
/// INVALID_VALUE where a multiprocessor does not hold so many blocks at all.
pub(super) fn answer(
    kernel: &KernelInfo,
    query: &Occupancy,
    multiprocessors: u32,
) -> Result<u64, CuError> {
    let fixed = u64::from(kernel.shared_bytes);
    let resident = |threads, shared: u64| {
        OURS.resident(threads, kernel.registers, fixed.saturating_add(shared))
    };
    Ok(match *query {
        Occupancy::ActiveBlocks { threads, shared } => resident(threads, shared).into(),
        Occupancy::DynamicShared { blocks, threads } => {
            if blocks > resident(threads, 0) {
                return Err(CuError::INVALID_VALUE);
            }
            let most = u64::from(spec::SHARED_PER_BLOCK_OPTIN).saturating_sub(fixed);
            OURS.dynamic_shared(blocks, fixed).min(most)
        }
        Occupancy::ActiveClusters { block, shared, cluster, .. } => {
            let in_cluster = volume(cluster).max(1);
            let all = resident(volume(block), shared.into()).saturating_mul(multiprocessors);
            if in_cluster > spec::MAX_CLUSTER { 0 } else { (all / in_cluster).into() }
        }
        Occupancy::ClusterSize { .. } => spec::MAX_CLUSTER.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compute capability 8.0.
    const A100: Multiprocessor = Multiprocessor {
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
        assert_eq!(A100.resident(u32::MAX, u32::MAX, u64::MAX), 0);
    }

    #[test]
    fn what_is_left_is_what_fits() {
        let each = A100.dynamic_shared(4, 1000);
        assert_eq!(A100.resident(32, 16, each + 1000), 4);
        assert!(A100.resident(32, 16, each + 1000 + SHARED_UNIT) < 4);
    }
}
