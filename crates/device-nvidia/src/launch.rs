//! Kernel launches.

use crate::driver::{Driver, check};
use crate::modules::Kernel;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::*;
use kedge_cuda_types::handle::{CUcontext, CUkernel, CUstream};
use kedge_protocol::{Dim3, Launch, LaunchHint};
use std::ffi::c_void;
use std::ptr;

/// CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE.
const BUFFER_POINTER: *mut c_void = ptr::without_provenance_mut(1);
const BUFFER_SIZE: *mut c_void = ptr::without_provenance_mut(2);

/// `extra`: the parameters as one buffer.
struct Params {
    size: usize,
    buffer: *mut c_void,
}

impl Params {
    fn new(launch: &Launch) -> Params {
        Params { size: launch.params.len(), buffer: launch.params.as_ptr().cast_mut().cast() }
    }

    /// Valid while this and the launch are.
    fn extra(&mut self) -> [*mut c_void; 5] {
        let size = ptr::from_mut(&mut self.size).cast();
        [BUFFER_POINTER, self.buffer, BUFFER_SIZE, size, ptr::null_mut()]
    }
}

/// Blocks of a cluster; 0 for a launch without clusters.
fn cluster_blocks(cluster: Dim3) -> u32 {
    let blocks = u64::from(cluster.x) * u64::from(cluster.y) * u64::from(cluster.z);
    if blocks > 1 { u32::try_from(blocks).unwrap_or(u32::MAX) } else { 0 }
}

/// The attributes that a launch needs to be right.
fn attributes(launch: &Launch) -> Vec<CUlaunchAttribute> {
    let mut all = Vec::new();
    let mut add = |id, words: &[u32]| {
        let value = CUlaunchAttributeValue::from_words(words);
        all.push(CUlaunchAttribute { id, pad: 0, value });
    };
    if launch.cooperative {
        add(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &[1]);
    }
    if cluster_blocks(launch.cluster) > 0 {
        let Dim3 { x, y, z } = launch.cluster;
        add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &[x, y, z]);
    }
    all
}

/// The attributes that only steer.
fn hints(launch: &Launch) -> impl Iterator<Item = CUlaunchAttribute> {
    let value = |hint: &LaunchHint| CUlaunchAttributeValue { bytes: hint.value };
    launch.hints.iter().map(move |hint| CUlaunchAttribute {
        id: hint.id,
        pad: 0,
        value: value(hint),
    })
}

/// Launches in `stream`, whose context is current.
pub(crate) fn run(
    driver: &Driver,
    kernel: &Kernel,
    launch: &Launch,
    stream: CUstream,
) -> Result<(), CuError> {
    let (grid, block) = (launch.grid, launch.block);
    let mut needed = attributes(launch);
    if !launch.hints.is_empty() {
        let mut all = needed.clone();
        all.extend(hints(launch));
        match extended(driver, kernel, launch, stream, &mut all) {
            // Refused, and so not launched: perhaps for a hint that this driver or GPU cannot take.
            Err(CuError::INVALID_VALUE | CuError::NOT_SUPPORTED) => {}
            outcome => return outcome,
        }
    }
    let mut params = Params::new(launch);
    let mut extra = params.extra();
    if needed.is_empty() {
        // SAFETY: a function of a loaded module; the parameter buffer has the size that is given,
        // and the driver copies it.
        return check(unsafe {
            (driver.cuLaunchKernel)(
                kernel.raw,
                grid.x,
                grid.y,
                grid.z,
                block.x,
                block.y,
                block.z,
                launch.shared_bytes,
                stream,
                ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        });
    }
    extended(driver, kernel, launch, stream, &mut needed)
}

/// Launches with attributes.
fn extended(
    driver: &Driver,
    kernel: &Kernel,
    launch: &Launch,
    stream: CUstream,
    attrs: &mut [CUlaunchAttribute],
) -> Result<(), CuError> {
    let (grid, block) = (launch.grid, launch.block);
    let mut params = Params::new(launch);
    let mut extra = params.extra();
    let config = CUlaunchConfig {
        gridDimX: grid.x,
        gridDimY: grid.y,
        gridDimZ: grid.z,
        blockDimX: block.x,
        blockDimY: block.y,
        blockDimZ: block.z,
        sharedMemBytes: launch.shared_bytes,
        hStream: stream,
        attrs: attrs.as_mut_ptr(),
        numAttrs: attrs.len() as u32,
    };
    // SAFETY: a function of a loaded module; the parameter buffer has the size that is given, and
    // it, the configuration and the attributes outlive the call.
    check(unsafe {
        (driver.cuLaunchKernelEx)(&config, kernel.raw, ptr::null_mut(), extra.as_mut_ptr())
    })
}

/// Calls `with` with a launch as a graph node's parameters.
pub(crate) fn with_node_params<T>(
    kernel: &Kernel,
    launch: &Launch,
    with: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS_v2) -> Result<T, CuError>,
) -> Result<T, CuError> {
    let mut params = Params::new(launch);
    let mut extra = params.extra();
    with(&CUDA_KERNEL_NODE_PARAMS_v2 {
        v1: CUDA_KERNEL_NODE_PARAMS_v1 {
            func: kernel.raw,
            gridDimX: launch.grid.x,
            gridDimY: launch.grid.y,
            gridDimZ: launch.grid.z,
            blockDimX: launch.block.x,
            blockDimY: launch.block.y,
            blockDimZ: launch.block.z,
            sharedMemBytes: launch.shared_bytes,
            kernelParams: ptr::null_mut(),
            extra: extra.as_mut_ptr(),
        },
        kern: CUkernel::NULL,
        ctx: CUcontext::NULL,
    })
}

/// The attributes of a kernel node: those that it needs, and those that only steer.
pub(crate) fn node_attributes(
    launch: &Launch,
) -> (Vec<CUlaunchAttribute>, impl Iterator<Item = CUlaunchAttribute>) {
    /// In a graph, edges say what may begin early.
    const NOT_OF_NODES: u32 = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    (attributes(launch), hints(launch).filter(|hint| hint.id != NOT_OF_NODES))
}
