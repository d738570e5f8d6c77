//! Short copies between private memory and a GPU: through pinned buffers that are kept, so that the
//! program's own thread copies the bytes and nobody else is woken.

use super::MEMORY;
use super::link::{any_exact, call, client};
use super::place::{Home, Shape, Side};
use super::transfer::{copy_here, enqueue};
use crate::stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::Call;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a buffer. Longer copies are faster in pieces, by several threads of the proxy.
const BUFFER_LEN: u64 = 1 << 20;
/// Most buffers that are kept.
const MAX_BUFFERS: usize = 8;

/// A buffer in the shared arena that devices can access, for good.
#[derive(Debug)]
struct Buffer {
    addr: u64,
    /// The newest message that may use it.
    until: u64,
}

/// Those that nobody copies to or from at the moment, and how many there are in all.
#[derive(Debug)]
struct Buffers {
    idle: Vec<Buffer>,
    made: usize,
}

static BUFFERS: Mutex<Buffers> = Mutex::new(Buffers { idle: Vec::new(), made: 0 });

fn buffers() -> MutexGuard<'static, Buffers> {
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Buffers {
    /// One that no message after `completed` uses.
    fn take(&mut self, completed: u64) -> Option<Buffer> {
        let free = self.idle.iter().position(|buffer| buffer.until <= completed)?;
        Some(self.idle.swap_remove(free))
    }
}

/// Whether a copy of so many bytes goes this way. Software devices copy private memory themselves.
pub(super) fn takes(bytes: u64) -> bool {
    bytes <= BUFFER_LEN && !any_exact()
}

/// Copies `shape`, of at most [`BUFFER_LEN`] bytes; false if there is no buffer for it. A private
/// source has been read when this returns, a private destination written.
///
/// # Safety
/// One side is private, and both are valid for the shape.
pub(super) unsafe fn run(
    dst: Side,
    src: Side,
    shape: Shape,
    stream: CUstream,
) -> Result<bool, CuError> {
    let Some(mut buffer) = buffer(stream)? else { return Ok(false) };
    let stage = shape.packed_at(buffer.addr);
    let outcome = if src.home == Home::Private {
        // SAFETY: the source is valid for the shape, by this function's contract, and the buffer
        // holds it.
        unsafe { copy_here(stage, src.place, shape) };
        enqueue(dst.place, stage, shape, stream)
    } else {
        let written = enqueue(stage, src.place, shape, stream).and_then(|()| stream::wait(stream));
        if written.is_ok() {
            // SAFETY: the destination is valid for the shape, by this function's contract, and the
            // buffer holds it.
            unsafe { copy_here(dst.place, stage, shape) };
        }
        written
    };
    buffer.until = client()?.posted();
    buffers().idle.push(buffer);
    outcome.map(|()| true)
}

/// A buffer that nothing uses: kept, or new, or one that `stream` has used.
fn buffer(stream: CUstream) -> Result<Option<Buffer>, CuError> {
    let client = client()?;
    let mut known = buffers();
    if let Some(buffer) = known.take(client.completed()) {
        return Ok(Some(buffer));
    }
    if known.made < MAX_BUFFERS {
        known.made += 1;
        drop(known);
        return make().inspect_err(|_| buffers().made -= 1).map(Some);
    }
    drop(known);
    stream::wait(stream)?;
    Ok(buffers().take(client.completed()))
}

fn make() -> Result<Buffer, CuError> {
    let (addr, taken) = MEMORY.shared.take(BUFFER_LEN)?;
    call(&Call::Share { addr, size: BUFFER_LEN })
        .inspect_err(|_| MEMORY.shared.put(addr, taken))?;
    Ok(Buffer { addr, until: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_taken_when_its_last_copy_is_over() {
        let idle = vec![Buffer { addr: 1, until: 9 }, Buffer { addr: 2, until: 5 }];
        let mut buffers = Buffers { idle, made: 2 };
        assert!(buffers.take(4).is_none());
        assert_eq!(buffers.take(8).map(|buffer| buffer.addr), Some(2));
        assert!(buffers.take(8).is_none());
        assert_eq!(buffers.take(9).map(|buffer| buffer.addr), Some(1));
    }
}
