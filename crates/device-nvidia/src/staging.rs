//! Copies from and to the client's private memory: through pinned buffers, by several threads, so
//! that reading the client, the bus and writing the client overlap.
//!
//! The client waits for such a copy, so its order with what other threads submit meanwhile is open
//! (ARCHITECTURE.md, invariant 6); its pieces may go to the stream one by one.

use crate::copies::Arrays;
use crate::driver::{Driver, check};
use crate::seams::{self, Seams};
use crate::stream::Stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUevent};
use kedge_device::Host;
use kedge_protocol::{ArrayId, Copy3d, Place};
use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a pinned buffer, and of the largest piece.
pub(crate) const PIECE: u64 = 2 << 20;
/// Most pinned buffers that are kept for later: pinning takes longer than copying.
const MAX_FREE_BUFFERS: usize = 32;
/// Threads that one copy is spread over, where it has as many pieces.
const LANES: u64 = 8;
/// CU_MEMHOSTALLOC_PORTABLE.
const PORTABLE: u32 = 1;
/// CU_EVENT_DISABLE_TIMING. Waits spin: a piece takes some microseconds.
const EVENT_FLAGS: u32 = 2;

/// A copy whose one side is private memory, with everything that it names found.
pub(crate) struct PrivateCopy {
    pub(crate) copy: Copy3d,
    pub(crate) arrays: HashMap<ArrayId, CUarray>,
    /// Of its other side.
    pub(crate) seams: Seams,
    pub(crate) stream: Arc<Stream>,
}

impl Arrays for HashMap<ArrayId, CUarray> {
    fn array(&self, id: ArrayId) -> Result<CUarray, CuError> {
        self.get(&id).copied().ok_or(CuError::INVALID_HANDLE)
    }
}

/// Pinned buffers that are not in use.
pub(crate) struct Buffers {
    driver: Arc<Driver>,
    free: Mutex<Vec<Buffer>>,
}

/// A pinned buffer of [`PIECE`] bytes.
pub(crate) struct Buffer(*mut u8);

// SAFETY: plain memory that one owner at a time uses.
unsafe impl Send for Buffer {}

impl Buffers {
    pub(crate) fn new(driver: &Arc<Driver>) -> Buffers {
        Buffers { driver: Arc::clone(driver), free: Mutex::default() }
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(crate) fn take(&self) -> Result<Buffer, CuError> {
        let kept = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(buffer) = kept {
            return Ok(buffer);
        }
        let mut at = ptr::null_mut();
        // SAFETY: a live out pointer.
        check(unsafe { (self.driver.cuMemHostAlloc)(&mut at, PIECE as usize, PORTABLE) })?;
        Ok(Buffer(at.cast()))
    }

    pub(crate) fn put(&self, buffer: Buffer) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MAX_FREE_BUFFERS {
            return free.push(buffer);
        }
        drop(free);
        // SAFETY: ours, and nobody uses it: the device has been waited for.
        unsafe { (self.driver.cuMemFreeHost)(buffer.0.cast()) };
    }
}

impl Buffer {
    /// The first `len` bytes.
    pub(crate) fn bytes(&mut self, len: u64) -> &mut [u8] {
        debug_assert!(len <= PIECE);
        // SAFETY: a buffer has PIECE bytes, which nobody else uses while it is borrowed: the device
        // has been waited for.
        unsafe { std::slice::from_raw_parts_mut(self.0, len.min(PIECE) as usize) }
    }

    pub(crate) fn address(&self) -> u64 {
        self.0 as u64
    }

    /// The buffer as one side of a piece's copy, without gaps.
    fn place(&self, piece: &Copy3d) -> Place {
        piece.shape().packed_at(self.address())
    }
}

/// Runs a copy; returns when it is over. Not on the dispatcher's thread.
pub(crate) fn run(
    copy: &PrivateCopy,
    reached: CUevent,
    buffers: &Buffers,
    host: &dyn Host,
) -> Result<(), CuError> {
    let driver = &*buffers.driver;
    copy.stream.ctx.enter()?;
    // Nobody's buffer may wait for a stream that waits for somebody else's copy.
    // SAFETY: an event that was recorded in the stream.
    check(unsafe { (driver.cuEventSynchronize)(reached) })?;
    let pieces = copy.copy.pieces(PIECE);
    let lanes = LANES.min(pieces.count());
    let next = AtomicU64::new(0);
    let failed = AtomicU64::new(0);
    let lane = || {
        let outcome = Lane::open(copy, buffers).and_then(|mut lane| {
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                if failed.load(Ordering::Relaxed) != 0 {
                    break;
                }
                lane.piece(&piece, host)?;
            }
            lane.finish()
        });
        if let Err(error) = outcome {
            failed.store(error.0.into(), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..lanes {
            scope.spawn(lane);
        }
        lane();
    });
    match failed.into_inner() {
        0 => Ok(()),
        code => Err(CuError(code as u32)),
    }
}

/// One thread's share of a copy: two buffers, used in turn.
struct Lane<'a> {
    copy: &'a PrivateCopy,
    buffers: &'a Buffers,
    slots: Vec<Slot>,
    turn: usize,
}

struct Slot {
    buffer: Option<Buffer>,
    /// Recorded behind the last transfer from or to the buffer.
    event: CUevent,
}

impl<'a> Lane<'a> {
    fn open(copy: &'a PrivateCopy, buffers: &'a Buffers) -> Result<Lane<'a>, CuError> {
        copy.stream.ctx.enter()?;
        let mut lane = Lane { copy, buffers, slots: Vec::new(), turn: 0 };
        for _ in 0..2 {
            let mut event = CUevent::NULL;
            // SAFETY: a live out pointer.
            check(unsafe { (buffers.driver.cuEventCreate)(&mut event, EVENT_FLAGS) })?;
            lane.slots.push(Slot { buffer: None, event });
        }
        for slot in &mut lane.slots {
            slot.buffer = Some(buffers.take()?);
        }
        Ok(lane)
    }

    fn piece(&mut self, piece: &Copy3d, host: &dyn Host) -> Result<(), CuError> {
        let driver = &*self.buffers.driver;
        let turn = self.turn;
        self.turn = (turn + 1) % self.slots.len();
        let slot = &mut self.slots[turn];
        let Some(buffer) = slot.buffer.as_mut() else { return Err(CuError::OUT_OF_MEMORY) };
        let raw = self.copy.stream.raw;
        let stage = buffer.place(piece);
        let len = piece.width * piece.height * piece.depth;
        // SAFETY: an event of this lane, recorded or never recorded.
        check(unsafe { (driver.cuEventSynchronize)(slot.event) })?;
        let (from_client, form) = match piece.src {
            Place::Client { .. } => (true, Copy3d { src: stage, ..*piece }),
            _ => (false, Copy3d { dst: stage, ..*piece }),
        };
        if from_client {
            rows(piece.src, piece, buffer.bytes(len), |at, row| host.read_client(at, row))?;
        }
        seams::copy(driver, &form, &self.copy.arrays, |_| self.copy.seams.clone(), raw)?;
        // SAFETY: this lane's event, the client's stream.
        check(unsafe { (driver.cuEventRecord)(slot.event, raw) })?;
        if !from_client {
            // SAFETY: this lane's event, which was just recorded.
            check(unsafe { (driver.cuEventSynchronize)(slot.event) })?;
            rows(piece.dst, piece, buffer.bytes(len), |at, row| host.write_client(at, row))?;
        }
        Ok(())
    }

    /// Waits until the buffers are free again.
    fn finish(&mut self) -> Result<(), CuError> {
        let driver = &*self.buffers.driver;
        self.slots.iter().try_for_each(|slot| {
            // SAFETY: an event of this lane, recorded or never recorded.
            check(unsafe { (driver.cuEventSynchronize)(slot.event) })
        })
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        // A buffer that the device may still use is not given to anybody.
        let over = self.finish().is_ok();
        for slot in &mut self.slots {
            // SAFETY: this lane's event; destroying it does not disturb what it was recorded in.
            unsafe { (self.buffers.driver.cuEventDestroy_v2)(slot.event) };
            if let (true, Some(buffer)) = (over, slot.buffer.take()) {
                self.buffers.put(buffer);
            }
        }
    }
}

/// Calls `each` with the client's address and the packed bytes of every run of rows.
fn rows(
    place: Place,
    piece: &Copy3d,
    packed: &mut [u8],
    mut each: impl FnMut(u64, &mut [u8]) -> Result<(), CuError>,
) -> Result<(), CuError> {
    let row = |y, z| place.row(y, z).ok_or(CuError::INVALID_VALUE);
    if place.is_packed(piece.shape()) {
        return each(row(0, 0)?, packed);
    }
    for (index, bytes) in (0..).zip(packed.chunks_mut(piece.width as usize)) {
        each(row(index % piece.height, index / piece.height)?, bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_at_their_pitch() {
        let place = Place::Client { addr: 100, pitch: 10, slice: 50 };
        let piece = Copy3d { src: place, dst: place, width: 4, height: 2, depth: 1 };
        let mut seen = Vec::new();
        let mut packed = [0; 8];
        rows(place, &piece, &mut packed, |at, row| {
            seen.push((at, row.len()));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(100, 4), (110, 4)]);
    }
}
