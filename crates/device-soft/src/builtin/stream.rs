//! Streams, events, copies and fills of the device runtime.

use super::Call;
use super::launch::{DeviceTask, Planes, submit};
use super::runtime_error::{INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::exec::Flow;
use kedge_protocol::{Copy3d, Place};
use std::sync::atomic::{AtomicU64, Ordering};

/// Streams and events from here on were created by a kernel; below, a stream is special: 3 launches
/// when the grid is over, 4 at once, any other is the block's NULL stream.
pub(crate) const FIRST_NAMED: u64 = 16;

/// `cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)`, and likewise
/// cudaEventCreateWithFlags.
pub(super) fn create(call: &mut Call<'_>) -> Result<(), Flow> {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST_NAMED);
    for lane in call.lanes() {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        call.write(lane, call.u64(lane, 0), &handle.to_le_bytes())?;
        call.set_status(lane, SUCCESS);
    }
    Ok(())
}

/// The end of a stream or an event, which the work behind it outlives.
pub(super) fn destroy(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        call.set_status(lane, SUCCESS);
    }
    Ok(())
}

/// `cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)`.
pub(super) fn record(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (event, stream) = (call.u64(lane, 0), call.u64(lane, 1));
        let status = match call.services().record(event) {
            Some(record) => submit(call, stream, DeviceTask::Record(record)),
            None => NOT_SUPPORTED,
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// `cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)`.
pub(super) fn wait(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (stream, event) = (call.u64(lane, 0), call.u64(lane, 1));
        // An event that was not recorded is waited for by nobody.
        let status = match call.services().recorded(event) {
            Some(record) => submit(call, stream, DeviceTask::Wait(record)),
            None => SUCCESS,
        };
        call.set_status(lane, status);
    }
    Ok(())
}

fn mapped(addr: u64, pitch: u64, rows: u64) -> Place {
    Place::Mapped { addr, pitch, slice: pitch.saturating_mul(rows) }
}

/// `cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
/// cudaStream_t)`.
pub(super) fn memcpy(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let [to, from, bytes] = [0, 1, 2].map(|index| call.u64(lane, index));
        let (src, dst) = (mapped(from, bytes, 1), mapped(to, bytes, 1));
        let copy = Copy3d { src, dst, width: bytes, height: 1, depth: 1 };
        let status = submit(call, call.u64(lane, 4), DeviceTask::Copy(copy));
        call.set_status(lane, status);
    }
    Ok(())
}

/// `cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t pitch, size_t
/// width, size_t height, cudaMemcpyKind, cudaStream_t)`.
pub(super) fn memcpy_2d(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let [to, to_pitch, from, from_pitch, width, height] =
            [0, 1, 2, 3, 4, 5].map(|index| call.u64(lane, index));
        let (src, dst) = (mapped(from, from_pitch, height), mapped(to, to_pitch, height));
        let status = if width > to_pitch || width > from_pitch {
            INVALID_VALUE
        } else {
            let copy = Copy3d { src, dst, width, height, depth: 1 };
            submit(call, call.u64(lane, 7), DeviceTask::Copy(copy))
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// Words of cudaMemcpy3DParms: array, position (3), pointer, pitch, row and column count of either
/// side, extent (3), kind.
const PARMS_WORDS: usize = 20;

/// `cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms *, cudaStream_t)`, of linear memory.
pub(super) fn memcpy_3d(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let at = call.u64(lane, 0);
        let mut parms = [0; PARMS_WORDS];
        for (index, word) in parms.iter_mut().enumerate() {
            *word = u64::from_le_bytes(call.read(lane, at.wrapping_add(8 * index as u64))?);
        }
        let status = match copy_of(&parms) {
            Ok(copy) => submit(call, call.u64(lane, 1), DeviceTask::Copy(copy)),
            Err(error) => error,
        };
        call.set_status(lane, status);
    }
    Ok(())
}

/// # Errors
/// NOT_SUPPORTED for arrays, INVALID_VALUE where the rows overlap or the address wraps around.
fn copy_of(parms: &[u64; PARMS_WORDS]) -> Result<Copy3d, u32> {
    let side = |side: &[u64]| match *side {
        [0, x, y, z, addr, pitch, _, rows] => {
            let slice = pitch.checked_mul(rows)?;
            let offset = z.checked_mul(slice)?.checked_add(y.checked_mul(pitch)?)?;
            let addr = addr.checked_add(offset)?.checked_add(x)?;
            Some((Place::Mapped { addr, pitch, slice }, pitch))
        }
        _ => None,
    };
    if parms[0] != 0 || parms[8] != 0 {
        return Err(NOT_SUPPORTED);
    }
    let (src, from_pitch) = side(&parms[0..8]).ok_or(INVALID_VALUE)?;
    let (dst, to_pitch) = side(&parms[8..16]).ok_or(INVALID_VALUE)?;
    let [width, height, depth] = [parms[16], parms[17], parms[18]];
    if width > from_pitch || width > to_pitch {
        return Err(INVALID_VALUE);
    }
    Ok(Copy3d { src, dst, width, height, depth })
}

/// `cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t)`.
pub(super) fn memset(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (to, width) = (call.u64(lane, 0), call.u64(lane, 2));
        let byte = call.u32(lane, 1) as u8;
        let planes = Planes { to, byte, pitch: width, slice: width, width, height: 1, depth: 1 };
        fill(call, lane, call.u64(lane, 3), planes);
    }
    Ok(())
}

/// `cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int byte, size_t width, size_t height,
/// cudaStream_t)`.
pub(super) fn memset_2d(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let [to, pitch, width, height] = [0, 1, 3, 4].map(|index| call.u64(lane, index));
        let byte = call.u32(lane, 2) as u8;
        let slice = pitch.saturating_mul(height);
        let planes = Planes { to, byte, pitch, slice, width, height, depth: 1 };
        fill(call, lane, call.u64(lane, 5), planes);
    }
    Ok(())
}

/// `cudaError_t cudaMemset3DAsync(cudaPitchedPtr to, int byte, cudaExtent extent, cudaStream_t)`.
pub(super) fn memset_3d(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let [to, pitch, _, rows] = words::<32, 4>(call.argument(lane, 0));
        let [width, height, depth] = words::<24, 3>(call.argument(lane, 2));
        let byte = call.u32(lane, 1) as u8;
        let slice = pitch.saturating_mul(rows);
        let planes = Planes { to, byte, pitch, slice, width, height, depth };
        fill(call, lane, call.u64(lane, 3), planes);
    }
    Ok(())
}

fn fill(call: &mut Call<'_>, lane: usize, stream: u64, planes: Planes) {
    let status = match planes.width > planes.pitch {
        true => INVALID_VALUE,
        false => submit(call, stream, DeviceTask::Fill(planes)),
    };
    call.set_status(lane, status);
}

/// The 64-bit words of a structure that is passed by value.
fn words<const BYTES: usize, const WORDS: usize>(bytes: [u8; BYTES]) -> [u64; WORDS] {
    let mut out = [0; WORDS];
    for (word, bytes) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_of_memory_are_located_and_checked() {
        let mut parms = [0; PARMS_WORDS];
        parms[1..8].copy_from_slice(&[3, 2, 1, 0x1000, 16, 16, 4]);
        parms[8..16].copy_from_slice(&[0, 0, 0, 0, 0x9000, 32, 32, 8]);
        parms[16..19].copy_from_slice(&[8, 2, 2]);
        let copy = copy_of(&parms).unwrap();
        assert_eq!(copy.src, Place::Mapped { addr: 0x1000 + 64 + 32 + 3, pitch: 16, slice: 64 });
        assert_eq!(copy.dst, Place::Mapped { addr: 0x9000, pitch: 32, slice: 256 });
        assert_eq!((copy.width, copy.height, copy.depth), (8, 2, 2));
        parms[16] = 17;
        assert_eq!(copy_of(&parms), Err(INVALID_VALUE));
        parms[16] = 8;
        parms[3] = u64::MAX;
        assert_eq!(copy_of(&parms), Err(INVALID_VALUE));
        parms[0] = 1;
        assert_eq!(copy_of(&parms), Err(NOT_SUPPORTED));
    }
}
