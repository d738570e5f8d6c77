//! What a device can launch. The limits are the device's attributes and the kernel's own.

use super::{Attributes, Shape};
use crate::function::{Function, required_cluster};
use crate::occupancy;
use crate::session::Device;
use crate::{entry, log};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use kedge_protocol::Dim3;

/// Blocks of a cluster that every device with clusters can run.
const PORTABLE_CLUSTER: u64 = 8;
/// Most blocks of a cluster where the function allows sizes that are not portable.
const MAX_CLUSTER: u64 = 16;

pub(crate) fn volume(d: Dim3) -> u64 {
    u64::from(d.x).saturating_mul(u64::from(d.y)).saturating_mul(u64::from(d.z))
}

/// Checks a launch and gives its cluster (zero for none).
#[inline]
pub(super) fn launch(
    function: &Function,
    shape: Shape,
    attributes: &Attributes,
) -> Result<Dim3, CuError> {
    let device = function.device();
    if !fits(device, shape) {
        return Err(CuError::INVALID_VALUE);
    }
    if !function.info().unsupported.is_empty() {
        return Err(cannot_run(function));
    }
    if volume(shape.block) > u64::from(function.max_threads()) {
        return Err(CuError::LAUNCH_OUT_OF_RESOURCES);
    }
    if shape.shared_bytes > function.max_dynamic_shared() {
        return Err(CuError::INVALID_VALUE);
    }
    let cluster = cluster(function, shape, attributes)?;
    if attributes.cooperative {
        cooperative(function, shape)?;
    }
    Ok(cluster)
}

#[cold]
fn cannot_run(function: &Function) -> CuError {
    let info = function.info();
    log::refused(&format!("kernel {} cannot run: {}", &*info.name, &*info.unsupported));
    CuError::NOT_SUPPORTED
}

/// Whether the device's limits hold: no dimension is zero or too long, no block too large.
fn fits(device: &Device, Shape { grid, block, .. }: Shape) -> bool {
    let within = |n: u32, attribute, default| n != 0 && n <= device.limit(attribute, default);
    within(grid.x, attr::MAX_GRID_DIM_X, i32::MAX as u32)
        && within(grid.y, attr::MAX_GRID_DIM_Y, 65535)
        && within(grid.z, attr::MAX_GRID_DIM_Z, 65535)
        && within(block.x, attr::MAX_BLOCK_DIM_X, 1024)
        && within(block.y, attr::MAX_BLOCK_DIM_Y, 1024)
        && within(block.z, attr::MAX_BLOCK_DIM_Z, 64)
        && volume(block) <= u64::from(device.limit(attr::MAX_THREADS_PER_BLOCK, 1024))
}

fn cluster(function: &Function, shape: Shape, attributes: &Attributes) -> Result<Dim3, CuError> {
    let required = required_cluster(function);
    let cluster = match (attributes.cluster, required) {
        (Some(asked), Some([x, y, z])) if asked != (Dim3 { x, y, z }) => {
            return Err(CuError::INVALID_CLUSTER_SIZE);
        }
        (Some(asked), _) => asked,
        (None, Some([x, y, z])) => Dim3 { x, y, z },
        (None, None) if function.info().cluster_must_be_set => {
            return Err(CuError::INVALID_CLUSTER_SIZE);
        }
        (None, None) => return Ok(Dim3::default()),
    };
    let most = match function.settings().allows_non_portable_clusters() {
        true => MAX_CLUSTER,
        false => PORTABLE_CLUSTER,
    };
    let blocks = volume(cluster);
    let divides = |whole: u32, part: u32| part != 0 && whole.is_multiple_of(part);
    let Shape { grid, .. } = shape;
    let even =
        divides(grid.x, cluster.x) && divides(grid.y, cluster.y) && divides(grid.z, cluster.z);
    if blocks > most || !even {
        return Err(CuError::INVALID_CLUSTER_SIZE);
    }
    if blocks > 1 && function.device().attribute(attr::CLUSTER_LAUNCH) != Some(1) {
        return Err(entry::not_supported("a launch in clusters on this device"));
    }
    Ok(cluster)
}

/// All blocks of a cooperative launch are resident at once.
fn cooperative(function: &Function, shape: Shape) -> Result<(), CuError> {
    let device = function.device();
    if device.attribute(attr::COOPERATIVE_LAUNCH) != Some(1) {
        return Err(entry::not_supported("a cooperative launch on this device"));
    }
    let threads = volume(shape.block) as u32;
    let each =
        occupancy::blocks_per_multiprocessor(function, threads, shape.shared_bytes as usize)?;
    let most = u64::from(each) * u64::from(device.limit(attr::MULTIPROCESSOR_COUNT, 1));
    if volume(shape.grid) > most {
        return Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(())
}
