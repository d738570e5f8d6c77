//! What kernels ask of their device and its kernels.

use super::Call;
use super::launch::kernel_at;
use super::runtime_error::{
    INVALID_DEVICE, INVALID_DEVICE_FUNCTION, INVALID_VALUE, SUCCESS, UNSUPPORTED_LIMIT,
};
use crate::code::Kernel;
use crate::device::{DRIVER_VERSION, active_blocks};
use crate::exec::Flow;
use crate::spec;
use std::sync::Arc;

/// A question to the device that a kernel runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Its ordinal.
    Device,
    Devices,
    /// A CUdevice_attribute of a device.
    Attribute {
        device: u32,
        attribute: u32,
    },
    /// A CUlimit of the context.
    Limit(u32),
}

/// Answers every lane: `answer` gives what is stored where argument 0 points, or a cudaError_t.
fn store<const N: usize>(
    call: &mut Call<'_>,
    answer: impl Fn(&Call<'_>, usize) -> Result<[u8; N], u32>,
) -> Result<(), Flow> {
    for lane in call.lanes() {
        let status = match answer(call, lane) {
            Ok(value) => {
                call.write(lane, call.u64(lane, 0), &value)?;
                SUCCESS
            }
            Err(error) => error,
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// `cudaError_t cudaGetDevice(int *device)`.
pub(super) fn device(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, _| small(call, Question::Device, INVALID_DEVICE))
}

/// `cudaError_t cudaGetDeviceCount(int *count)`.
pub(super) fn device_count(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, _| small(call, Question::Devices, INVALID_DEVICE))
}

/// `cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)`.
pub(super) fn attribute(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, lane| {
        let (attribute, device) = (call.u32(lane, 1), call.u32(lane, 2));
        let known = small(call, Question::Devices, INVALID_DEVICE)?;
        if device >= u32::from_le_bytes(known) {
            return Err(INVALID_DEVICE);
        }
        small(call, Question::Attribute { device, attribute }, INVALID_VALUE)
    })
}

fn small(call: &Call<'_>, question: Question, error: u32) -> Result<[u8; 4], u32> {
    call.services().answer(question).map(|value| (value as u32).to_le_bytes()).ok_or(error)
}

/// `cudaError_t cudaDeviceGetLimit(size_t *value, cudaLimit limit)`.
pub(super) fn limit(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, lane| {
        let value = call.services().answer(Question::Limit(call.u32(lane, 1)));
        value.map(u64::to_le_bytes).ok_or(UNSUPPORTED_LIMIT)
    })
}

/// `cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache *)`: no preference.
pub(super) fn cache_config(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |_, _| Ok(0u32.to_le_bytes()))
}

/// `cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig *)`: banks of four bytes.
pub(super) fn bank_size(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |_, _| Ok(1u32.to_le_bytes()))
}

/// `cudaError_t cudaRuntimeGetVersion(int *version)`.
pub(super) fn version(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |_, _| Ok(DRIVER_VERSION.to_le_bytes()))
}

/// `cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int
/// threads, size_t shared)`, and the same with flags.
pub(super) fn occupancy(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, lane| {
        let program = Arc::clone(&call.grid().spec.program);
        let kernel = kernel_at(&program, call.u64(lane, 1)).ok_or(INVALID_DEVICE_FUNCTION)?;
        let threads = call.u32(lane, 2);
        if threads == 0 || threads > spec::MAX_THREADS_PER_BLOCK {
            return Err(INVALID_VALUE);
        }
        Ok(active_blocks(&program.kernels[kernel], threads, call.u64(lane, 3)).to_le_bytes())
    })
}

/// Bytes of cudaFuncAttributes that mean something: three sizes and fourteen words.
const ATTRIBUTE_BYTES: usize = 3 * 8 + 14 * 4;

/// `cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *kernel)`.
pub(super) fn function_attributes(call: &mut Call<'_>) -> Result<(), Flow> {
    store(call, |call, lane| {
        let program = &call.grid().spec.program;
        let kernel = kernel_at(program, call.u64(lane, 1)).ok_or(INVALID_DEVICE_FUNCTION)?;
        Ok(attributes(&program.kernels[kernel]))
    })
}

fn attributes(kernel: &Kernel) -> [u8; ATTRIBUTE_BYTES] {
    let sizes = [kernel.shared_bytes, kernel.const_bytes, kernel.local_bytes].map(u64::from);
    let [x, y, z] = kernel.required_cluster;
    let dynamic = spec::SHARED_PER_BLOCK.saturating_sub(kernel.shared_bytes);
    let carveout = u32::MAX;
    let must = u32::from(kernel.explicit_cluster);
    let words = [
        kernel.max_threads,
        kernel.registers,
        kernel.ptx_version,
        spec::SM,
        0,
        dynamic,
        carveout,
        must,
        x,
        y,
        z,
    ];
    let mut out = [0; ATTRIBUTE_BYTES];
    let (head, tail) = out.split_at_mut(24);
    for (to, size) in head.chunks_exact_mut(8).zip(sizes) {
        to.copy_from_slice(&size.to_le_bytes());
    }
    for (to, word) in tail.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    out
}
