//! Launches by kernels: what nvcc's device runtime library, libcudadevrt, does on a real device.
//!
//! `kernel<<<grid, block, shared, stream>>>(…)` in device code becomes `cudaGetParameterBufferV2`,
//! stores of the parameters, and `cudaLaunchDeviceV2`. For compute capability 9.0 and later, and
//! since CUDA 12 for all, the names carry the prefix `__cudaCDP2`.

use super::Call;
use crate::code::Program;
use crate::exec::Flow;
use crate::exec::control::function_address;
use crate::spec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    Copy { to: u64, from: u64, bytes: u64 },
    Fill { to: u64, byte: u8, bytes: u64 },
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

/// Streams from here on were created by a kernel; below, a handle is special: 3 launches when the
/// grid is over, 4 at once, any other is the block's NULL stream.
pub(crate) const FIRST_NAMED_STREAM: u64 = 16;

/// cudaError_t values (CUDA Runtime API reference).
const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const MEMORY_ALLOCATION: u32 = 2;
const INVALID_CONFIGURATION: u32 = 9;

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

/// `void *cudaGetParameterBufferV2(void *kernel, dim3 grid, dim3 block, unsigned shared)`; NULL where
/// the launch cannot be.
pub(super) fn get_parameter_buffer(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let buffer = parameter_buffer(call, lane)?.unwrap_or(0);
        call.set_result(lane, buffer.to_le_bytes());
    }
    Ok(())
}

fn parameter_buffer(call: &mut Call<'_>, lane: usize) -> Result<Option<u64>, Flow> {
    let function = call.u64(lane, 0);
    let program = Arc::clone(&call.grid().spec.program);
    let mut kernels = program.kernels.iter();
    let kernel = kernels.position(|kernel| function_address(kernel.function) == function);
    let Some(kernel) = kernel else { return Ok(None) };
    let header = Header {
        kernel: kernel as u32,
        grid: dims(call.argument(lane, 1)),
        block: dims(call.argument(lane, 2)),
        shared_bytes: call.u32(lane, 3),
    };
    if !header.is_possible() {
        return Ok(None);
    }
    let bytes = HEADER_BYTES + u64::from(program.kernels[kernel].param_bytes);
    let at = call.services().malloc(bytes);
    if at == 0 {
        return Ok(None);
    }
    call.write(lane, at, &header.encode())?;
    Ok(Some(at + HEADER_BYTES))
}

/// `cudaError_t cudaLaunchDeviceV2(void *buffer, cudaStream_t stream)`.
pub(super) fn launch_device(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let status = launch(call, lane)?;
        call.set_result(lane, status.to_le_bytes());
    }
    Ok(())
}

fn launch(call: &mut Call<'_>, lane: usize) -> Result<u32, Flow> {
    let (buffer, stream) = (call.u64(lane, 0), call.u64(lane, 1));
    if buffer < HEADER_BYTES {
        return Ok(INVALID_CONFIGURATION);
    }
    let header = Header::decode(&call.read(lane, buffer - HEADER_BYTES)?);
    let program = Arc::clone(&call.grid().spec.program);
    let found = header.filter(Header::is_possible);
    let found =
        found.and_then(|header| Some((header, program.kernels.get(header.kernel as usize)?)));
    let Some((header, kernel)) = found else { return Ok(INVALID_VALUE) };
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
    call.services().free(buffer - HEADER_BYTES);
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
fn submit(call: &Call<'_>, stream: u64, task: DeviceTask) -> u32 {
    let (block, [x, y, _]) = (call.block().map(u64::from), call.grid().spec.grid.map(u64::from));
    let launcher = block[0] + x * (block[1] + y * block[2]);
    let work = DeviceWork { task, stream, launcher };
    call.services().submit(work).map_or_else(|error| error, |()| SUCCESS)
}

/// `cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t)`.
pub(super) fn memcpy(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let [to, from, bytes] = [0, 1, 2].map(|index| call.u64(lane, index));
        let status = submit(call, call.u64(lane, 4), DeviceTask::Copy { to, from, bytes });
        call.set_result(lane, status.to_le_bytes());
    }
    Ok(())
}

/// `cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t)`.
pub(super) fn memset(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (to, byte, bytes) = (call.u64(lane, 0), call.u32(lane, 1) as u8, call.u64(lane, 2));
        let status = submit(call, call.u64(lane, 3), DeviceTask::Fill { to, byte, bytes });
        call.set_result(lane, status.to_le_bytes());
    }
    Ok(())
}

/// `const char *cudaGetErrorString(cudaError_t)`: a text in the device heap, or NULL where that is
/// full. It is never freed: programs ask once, before they give up.
pub(super) fn error_string(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let text = match call.u32(lane, 0) {
            SUCCESS => "no error\0".to_owned(),
            error => format!("CUDA error {error}\0"),
        };
        let at = call.services().malloc(text.len() as u64);
        if at != 0 {
            call.write(lane, at, text.as_bytes())?;
        }
        call.set_result(lane, at.to_le_bytes());
    }
    Ok(())
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

/// `cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)`.
pub(super) fn stream_create(call: &mut Call<'_>) -> Result<(), Flow> {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST_NAMED_STREAM);
    for lane in call.lanes() {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        call.write(lane, call.u64(lane, 0), &handle.to_le_bytes())?;
        call.set_result(lane, SUCCESS.to_le_bytes());
    }
    Ok(())
}

/// `cudaError_t cudaMalloc(void **at, size_t bytes)`.
pub(super) fn malloc(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.services().malloc(call.u64(lane, 1));
        call.write(lane, call.u64(lane, 0), &addr.to_le_bytes())?;
        let status = if addr == 0 { MEMORY_ALLOCATION } else { SUCCESS };
        call.set_result(lane, status.to_le_bytes());
    }
    Ok(())
}

/// `cudaError_t cudaFree(void *at)`.
pub(super) fn free(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.u64(lane, 0);
        let freed = addr == 0 || call.services().free(addr);
        let status = if freed { SUCCESS } else { INVALID_VALUE };
        call.set_result(lane, status.to_le_bytes());
    }
    Ok(())
}

/// Functions that have nothing to do here and succeed: a stream's end, which its launches outlive,
/// and the last error, which each launch has returned already.
pub(super) fn succeed(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        call.set_result(lane, SUCCESS.to_le_bytes());
    }
    Ok(())
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
