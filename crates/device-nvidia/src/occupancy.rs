//! How much of a kernel fits on the device, from the driver, which alone knows how the device's
//! multiprocessors are grouped.

use crate::driver::{Driver, check};
use crate::modules::Kernel;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CUlaunchAttribute, CUlaunchAttributeValue,
    CUlaunchConfig,
};
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::{Dim3, Occupancy};
use std::ffi::c_int;
use std::ptr;

/// What the driver takes as an int.
fn int(value: u32) -> Result<c_int, CuError> {
    c_int::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}

pub(crate) fn answer(driver: &Driver, kernel: &Kernel, query: &Occupancy) -> Result<u64, CuError> {
    let too_old = CuError::CALL_REQUIRES_NEWER_DRIVER;
    let (mut count, mut bytes) = (0, 0);
    // SAFETY: live out pointers; a function of a loaded module; a configuration whose attributes
    // outlive the call.
    unsafe {
        match *query {
            Occupancy::ActiveBlocks { threads, shared } => {
                check((driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                    &mut count,
                    kernel.raw,
                    int(threads)?,
                    shared as usize,
                ))?;
            }
            Occupancy::DynamicShared { blocks, threads } => {
                let ask = driver.cuOccupancyAvailableDynamicSMemPerBlock.ok_or(too_old)?;
                check(ask(&mut bytes, kernel.raw, int(blocks)?, int(threads)?))?;
                return Ok(bytes as u64);
            }
            Occupancy::ActiveClusters { grid, block, shared, cluster } => {
                let ask = driver.cuOccupancyMaxActiveClusters.ok_or(too_old)?;
                let mut attribute = CUlaunchAttribute {
                    id: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                    pad: 0,
                    value: CUlaunchAttributeValue::from_words(&[cluster.x, cluster.y, cluster.z]),
                };
                let config = config(grid, block, shared, &mut attribute, 1);
                check(ask(&mut count, kernel.raw, &config))?;
            }
            Occupancy::ClusterSize { grid, block, shared } => {
                let ask = driver.cuOccupancyMaxPotentialClusterSize.ok_or(too_old)?;
                let config = config(grid, block, shared, ptr::null_mut(), 0);
                check(ask(&mut count, kernel.raw, &config))?;
            }
        }
    }
    u64::try_from(count).map_err(|_| CuError::UNKNOWN)
}

fn config(
    grid: Dim3,
    block: Dim3,
    shared: u32,
    attrs: *mut CUlaunchAttribute,
    count: u32,
) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: grid.x,
        gridDimY: grid.y,
        gridDimZ: grid.z,
        blockDimX: block.x,
        blockDimY: block.y,
        blockDimZ: block.z,
        sharedMemBytes: shared,
        hStream: CUstream::NULL,
        attrs,
        numAttrs: count,
    }
}
