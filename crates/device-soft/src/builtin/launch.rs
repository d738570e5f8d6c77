//! Launches by kernels: what nvcc's device runtime library, libcudadevrt, does on a real device.
//!
//! `kernel<<<grid, block, shared, stream>>>(…)` in device code becomes `cudaGetParameterBufferV2`,
//! stores of the parameters, and `cudaLaunchDeviceV2`. For compute capability 9.0 and later, and
//! since CUDA 12 for all, the names carry the prefix `__cudaCDP2`.

use super::Call;
use super::runtime_error::{INVALID_CONFIGURATION, INVALID_DEVICE_FUNCTION, INVALID_VALUE};
use super::runtime_error::{MEMORY_ALLOCATION, SUCCESS};
use crate::code::Program;
use crate::exec::Flow;
use crate::exec::control::function_address;
use crate::spec;
use kedge_protocol::Copy3d;
use std::sync::Arc;

/// What a kernel asks its device to do, in the order of one of its streams.
pub struct DeviceWork {
    pub task: DeviceTask,
    /// The stream as the kernel names it.
    pub stream: u64,
    /// Linear index of the asking block.
    pub launcher: u64,
}

pub enum DeviceTask {
    Grid(DeviceGrid),
    Copy(Copy3d),
    Fill(Planes),
    /// Completes this record of an event.
    Record(u64),
    /// Waits for a record of an event.
    Wait(u64),
}

/// Bytes to fill: rows of `width` bytes `pitch` apart, planes of `height` rows `slice` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planes {
    pub to: u64,
    pub byte: u8,
    pub pitch: u64,
    pub slice: u64,
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

/// A launch by a kernel.
pub struct DeviceGrid {
    pub program: Arc<Program>,
    /// Index in `Program::kernels`.
    pub kernel: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    pub params: Vec<u8>,
}

/// What stands before a parameter buffer, in the device heap. The program can damage it, so it is
/// checked like anything that comes from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    kernel: u32,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
}

const HEADER_BYTES: u64 = 64;
const MAGIC: u32 = 0x6b64_6c62;

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES as usize] {
        let ([gx, gy, gz], [bx, by, bz]) = (self.grid, self.block);
        let words = [MAGIC, self.kernel, gx, gy, gz, bx, by, bz, self.shared_bytes];
        let mut out = [0; HEADER_BYTES as usize];
        for (to, word) in out.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn decode(bytes: &[u8; HEADER_BYTES as usize]) -> Option<Self> {
        let word = |index: usize| {
            let at = 4 * index;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        (word(0) == MAGIC).then(|| Self {
            kernel: word(1),
            grid: [word(2), word(3), word(4)],
            block: [word(5), word(6), word(7)],
            shared_bytes: word(8),
        })
    }

    /// Whether a grid can have this shape.
    fn is_possible(&self) -> bool {
        let fits = |value: &[u32; 3], limit: &[u32; 3]| {
            value.iter().zip(limit).all(|(value, limit)| (1..=*limit).contains(value))
        };
        fits(&self.grid, &spec::MAX_GRID_DIM)
            && fits(&self.block, &spec::MAX_BLOCK_DIM)
            && self.block.iter().product::<u32>() <= spec::MAX_THREADS_PER_BLOCK
            && self.shared_bytes <= spec::SHARED_PER_BLOCK_OPTIN
    }
}

/// `void *cudaGetParameterBufferV2(void *kernel, dim3 grid, dim3 block, unsigned shared)`; NULL
/// where the launch cannot be, and then cudaGetLastError says why.
pub(super) fn get_parameter_buffer(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let buffer = match header(call, lane, 0, 1) {
            Ok(header) => new_buffer(call, lane, &header)?,
            Err(error) => Err(error),
        };
        if let Err(error) = buffer {
            call.set_error(lane, error);
        }
        call.set_result(lane, buffer.unwrap_or(0).to_le_bytes());
    }
    Ok(())
}

/// `void *cudaGetParameterBuffer(size_t alignment, size_t size)`.
pub(super) fn get_plain_buffer(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let at = call.services().malloc(HEADER_BYTES.saturating_add(call.u64(lane, 1)));
        let buffer = if at == 0 { 0 } else { at + HEADER_BYTES };
        call.set_result(lane, buffer.to_le_bytes());
    }
    Ok(())
}

/// The place in its program of the kernel that a function pointer names.
pub(super) fn kernel_at(program: &Program, function: u64) -> Option<usize> {
    program.kernels.iter().position(|kernel| function_address(kernel.function) == function)
}

/// The launch that a call describes: its arguments `function`, and three from `shape` on.
fn header(call: &Call<'_>, lane: usize, function: usize, shape: usize) -> Result<Header, u32> {
    let program = &call.grid().spec.program;
    let kernel = kernel_at(program, call.u64(lane, function)).ok_or(INVALID_DEVICE_FUNCTION)?;
    let header = Header {
        kernel: kernel as u32,
        grid: dims(call.argument(lane, shape)),
        block: dims(call.argument(lane, shape + 1)),
        shared_bytes: call.u32(lane, shape + 2),
    };
    if header.is_possible() { Ok(header) } else { Err(INVALID_CONFIGURATION) }
}

/// A parameter buffer behind its header; a cudaError_t where the device heap is exhausted.
fn new_buffer(call: &mut Call<'_>, lane: usize, header: &Header) -> Result<Result<u64, u32>, Flow> {
    let kernel = &call.grid().spec.program.kernels[header.kernel as usize];
    let at = call.services().malloc(HEADER_BYTES + u64::from(kernel.param_bytes));
    if at == 0 {
        return Ok(Err(MEMORY_ALLOCATION));
    }
    call.write(lane, at, &header.encode())?;
    Ok(Ok(at + HEADER_BYTES))
}

/// `cudaError_t cudaLaunchDeviceV2(void *buffer, cudaStream_t stream)`.
pub(super) fn launch_device(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (buffer, stream) = (call.u64(lane, 0), call.u64(lane, 1));
        let status = if buffer < HEADER_BYTES {
            INVALID_CONFIGURATION
        } else {
            match Header::decode(&call.read(lane, buffer - HEADER_BYTES)?) {
                Some(header) if header.is_possible() => {
                    launch(call, lane, &header, buffer, stream)?
                }
                _ => INVALID_VALUE,
            }
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// `cudaError_t cudaLaunchDevice(void *kernel, void *buffer, dim3, dim3, unsigned, cudaStream_t)`.
pub(super) fn launch_plain(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (buffer, stream) = (call.u64(lane, 1), call.u64(lane, 5));
        let status = match header(call, lane, 0, 2) {
            Ok(header) => launch(call, lane, &header, buffer, stream)?,
            Err(error) => error,
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// Launches with the parameters at `buffer`, and frees it.
fn launch(
    call: &mut Call<'_>,
    lane: usize,
    header: &Header,
    buffer: u64,
    stream: u64,
) -> Result<u32, Flow> {
    let program = Arc::clone(&call.grid().spec.program);
    let Some(kernel) = program.kernels.get(header.kernel as usize) else {
        return Ok(INVALID_VALUE);
    };
    let mut params = Vec::with_capacity(kernel.param_bytes as usize);
    for at in (0..u64::from(kernel.param_bytes)).step_by(8) {
        let word: [u8; 8] = match kernel.param_bytes as u64 - at {
            8.. => call.read(lane, buffer + at)?,
            4..8 => widen(call.read::<4>(lane, buffer + at)?),
            _ => widen(call.read::<1>(lane, buffer + at)?),
        };
        params.extend(word);
    }
    params.truncate(kernel.param_bytes as usize);
    call.services().free(buffer.saturating_sub(HEADER_BYTES));
    let grid = DeviceGrid {
        kernel: header.kernel,
        grid: header.grid,
        block: header.block,
        shared_bytes: header.shared_bytes,
        params,
        program,
    };
    Ok(submit(call, stream, DeviceTask::Grid(grid)))
}

/// Hands a task of the calling block on; a cudaError_t.
pub(super) fn submit(call: &Call<'_>, stream: u64, task: DeviceTask) -> u32 {
    let work = DeviceWork { task, stream, launcher: call.block_number() };
    call.services().submit(work).map_or_else(|error| error, |()| SUCCESS)
}

fn widen<const N: usize>(bytes: [u8; N]) -> [u8; 8] {
    let mut out = [0; 8];
    out[..N].copy_from_slice(&bytes);
    out
}

fn dims(bytes: [u8; 12]) -> [u32; 3] {
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    [word(0), word(4), word(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_are_checked() {
        let header = Header { kernel: 3, grid: [1, 2, 3], block: [32, 4, 1], shared_bytes: 64 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        assert_eq!(Header::decode(&[0; HEADER_BYTES as usize]), None);
        assert!(header.is_possible());
        assert!(!Header { block: [1024, 2, 1], ..header }.is_possible());
        assert!(!Header { grid: [0, 1, 1], ..header }.is_possible());
        assert!(!Header { shared_bytes: 1 << 20, ..header }.is_possible());
    }
}
