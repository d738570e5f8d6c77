//! One copy, from wherever to wherever: what travels, and who waits.
//!
//! As the reference's "API synchronization behavior" says, from the program's point of view:
//! a source in private memory has been read when the call returns; a destination in private memory
//! has been written; between host memory and a device the synchronous functions wait for what the
//! stream was given before; between devices nobody waits; between host memories everybody does.
//!
//! The reference leaves open whether a synchronous copy's bytes have reached the device when it
//! returns. Here they have: streams that do not order with this one may use them at once, as
//! programs expect.

use super::link::{call, client, post};
use super::place::{Home, Shape, Side};
use super::{MEMORY, bounce, host};
use crate::{capture, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::{Call, Copy3d, MAX_INLINE_COPY, Place, Post, StreamOp};
use kedge_wire::Bytes;
use std::ptr;

/// Whether the program expects the copy to be over when the call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    /// `cuMemcpy…`.
    Sync,
    /// `cuMemcpy…Async`.
    Async,
}

impl Finish {
    /// Waits for the copy if the program expects that.
    fn wait(self, stream: CUstream) -> Result<(), CuError> {
        if self == Finish::Sync { stream::wait(stream) } else { Ok(()) }
    }
}

/// Above this many bytes, a copy that has nothing to wait for is read in place rather than sent
/// with its message.
const SMALL: u64 = 8 << 10;

/// A buffer of the shared arena through which private memory travels where the proxy cannot reach
/// it, in bytes.
const STAGE: u64 = 4 << 20;

/// Copies `shape` from `src` to `dst` in `stream`'s order.
///
/// # Safety
/// Both places are valid for the shape, as the program promised: private memory is dereferenced.
pub(super) unsafe fn run(
    dst: Side,
    src: Side,
    shape: Shape,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    if shape.is_empty() {
        return Ok(());
    }
    let bytes = shape.bytes().ok_or(CuError::INVALID_VALUE)?;
    // A pointer that was never set: the driver refuses it, and does not crash.
    if [dst, src].iter().any(|side| side.home == Home::Private && side.place.row(0, 0) == Some(0)) {
        return Err(CuError::INVALID_VALUE);
    }
    if finish == Finish::Sync {
        capture::check_unsafe()?;
    }
    if stream::is_capturing(stream)? {
        return enqueue(dst.place, src.place, shape, stream);
    }
    let inline = bytes <= MAX_INLINE_COPY as u64 && (bytes <= SMALL || !client()?.is_idle());
    let private = src.home == Home::Private || dst.home == Home::Private;
    match (src.home, dst.home) {
        (Home::Private | Home::Pinned, Home::Private | Home::Pinned) => {
            stream::wait(stream)?;
            // SAFETY: both ends are valid for the shape, by this function's contract; the arena's
            // pages are mapped in this process.
            unsafe { copy_here(dst.place, src.place, shape) };
            return Ok(());
        }
        (Home::Private, Home::Device | Home::Managed) if inline && dst.place.is_packed(shape) => {
            // SAFETY: both ends are valid for the shape, by this function's contract, and the
            // source is this process's own memory.
            unsafe { copy_inline(dst.place, src.place, shape, stream)? };
            return finish.wait(stream);
        }
        (Home::Private, _) | (_, Home::Private) if !session::get()?.client_memory => {
            // SAFETY: both ends are valid for the shape, by this function's contract.
            return unsafe { staged(dst, src, shape, stream) };
        }
        // SAFETY: both ends are valid for the shape, by this function's contract; one is private.
        _ if private
            && bounce::takes(bytes)
            && unsafe { bounce::run(dst, src, shape, stream)? } =>
        {
            // What came from a device has been waited for.
            return if src.home == Home::Private { finish.wait(stream) } else { Ok(()) };
        }
        _ => enqueue(dst.place, src.place, shape, stream)?,
    }
    let between_devices = src.home == Home::Device && dst.home == Home::Device;
    if private || (finish == Finish::Sync && !between_devices) {
        stream::wait(stream)?;
    }
    Ok(())
}

pub(super) fn enqueue(
    dst: Place,
    src: Place,
    shape: Shape,
    stream: CUstream,
) -> Result<(), CuError> {
    stream::enqueue(stream, StreamOp::Copy { copy: Copy3d::new(src, dst, shape) })
}

/// Copies between memories of this process.
///
/// # Safety
/// Neither place is an array; both are valid for the shape.
pub(super) unsafe fn copy_here(dst: Place, src: Place, shape: Shape) {
    let all = dst.is_packed(shape) && src.is_packed(shape);
    let Shape { width, height, depth } = match all {
        true => Shape::line(shape.width * shape.height * shape.depth),
        false => shape,
    };
    for (z, y) in (0..depth).flat_map(|z| (0..height).map(move |y| (z, y))) {
        let (Some(to), Some(from)) = (dst.row(y, z), src.row(y, z)) else { return };
        // SAFETY: both rows lie inside the places, which are valid for the shape, by this
        // function's contract; they may overlap.
        unsafe { ptr::copy(from as usize as *const u8, to as usize as *mut u8, width as usize) };
    }
}

/// Sends a small copy's bytes with the operation.
///
/// # Safety
/// `src` is valid for the shape, which has at most `MAX_INLINE_COPY` bytes; `dst` is contiguous.
unsafe fn copy_inline(
    dst: Place,
    src: Place,
    shape: Shape,
    stream: CUstream,
) -> Result<(), CuError> {
    let len = (shape.width * shape.height * shape.depth) as usize;
    let mut bytes = Vec::<u8>::with_capacity(len);
    // SAFETY: the buffer has room for the shape's bytes, row after row, and all are written.
    unsafe {
        copy_here(shape.packed_at(bytes.as_mut_ptr() as u64), src, shape);
        bytes.set_len(len);
    }
    let bytes = Bytes::new(bytes).map_err(|_| CuError::INVALID_VALUE)?;
    let dst = dst.row(0, 0).ok_or(CuError::INVALID_VALUE)?;
    stream::enqueue(stream, StreamOp::CopyInline { dst, bytes })
}

/// Copies from or to private memory that the proxy cannot reach: piece by piece through a buffer in
/// the shared arena. It is over when this returns.
///
/// # Safety
/// One side is private, and both are valid for the shape.
unsafe fn staged(dst: Side, src: Side, shape: Shape, stream: CUstream) -> Result<(), CuError> {
    let buffer = Stage::new()?;
    for piece in Copy3d::new(src.place, dst.place, shape).pieces(STAGE).iter() {
        let (to, from, part) = (piece.dst, piece.src, piece.shape());
        let stage = part.packed_at(buffer.addr);
        if src.home == Home::Private {
            // SAFETY: a piece of the source; the buffer holds any piece.
            unsafe { copy_here(stage, from, part) };
            enqueue(to, stage, part, stream)?;
            stream::wait(stream)?;
        } else {
            enqueue(stage, from, part, stream)?;
            stream::wait(stream)?;
            // SAFETY: a piece of the destination; the buffer holds any piece.
            unsafe { copy_here(to, stage, part) };
        }
    }
    Ok(())
}

/// A buffer in the shared arena that devices can access while this lives.
struct Stage {
    addr: u64,
    taken: u64,
}

impl Stage {
    fn new() -> Result<Self, CuError> {
        let (addr, taken) = MEMORY.shared.take(STAGE)?;
        if let Err(error) = call(&Call::Share { addr, size: STAGE }) {
            MEMORY.shared.put(addr, taken);
            return Err(error);
        }
        Ok(Self { addr, taken })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Every piece has been waited for. Errors mean that the proxy is gone.
        let _ = post(&Post::Unshare { addr: self.addr, size: STAGE });
        let _ = host::drop_pages(self.addr, self.taken);
        MEMORY.shared.put(self.addr, self.taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(bytes: &[u8], pitch: u64, slice: u64) -> Place {
        Place::Client { addr: bytes.as_ptr() as u64, pitch, slice }
    }

    #[test]
    fn copies_rows_with_their_pitches() {
        let src: Vec<u8> = (0..100).collect();
        let mut dst = vec![0u8; 100];
        let shape = Shape { width: 3, height: 2, depth: 2 };
        let to = Place::Client { addr: dst.as_mut_ptr() as u64, pitch: 5, slice: 20 };
        // SAFETY: both buffers hold the shape at these pitches.
        unsafe { copy_here(to, client(&src, 10, 50), shape) };
        assert_eq!(&dst[..10], [0, 1, 2, 0, 0, 10, 11, 12, 0, 0]);
        assert_eq!(&dst[20..30], [50, 51, 52, 0, 0, 60, 61, 62, 0, 0]);
    }
}
