//! Many pieces of the client's private memory that go to device memory: read by one call into a
//! pinned buffer, from which a kernel of ours fetches them. A copy of the driver's for each would
//! cost some microseconds a piece.

use crate::driver::{Driver, check};
use crate::seams::{self, Seams};
use crate::staging::{Buffer, Buffers, PIECE};
use crate::stream::Stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::handle::{CUarray, CUevent, CUfunction};
use kedge_device::Host;
use kedge_device::digest::kernel;
use kedge_protocol::{
    ArrayId, Copy3d, MAX_PIECES, MAX_SCATTERED, Place, Scattered, Shape, scatters,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// Bytes of what the kernel reads by one instruction.
const WORD: u64 = 16;
/// From, to and bytes of each piece: the kernel's list, at a buffer's end.
const MOVE: usize = 24;
const _: () = assert!(MAX_SCATTERED + (MAX_PIECES * MOVE) as u64 <= PIECE);

/// A scattered copy, with everything found that it needs.
pub(crate) struct Scatter {
    pieces: Vec<Scattered>,
    seams: Seams,
    stream: Arc<Stream>,
    /// [`kernel::GATHER`] in the stream's context, if it is there.
    gather: Option<CUfunction>,
}

impl Scatter {
    /// # Errors
    /// INVALID_VALUE where the pieces are not apart, or too much.
    pub(crate) fn new(
        pieces: Vec<Scattered>,
        seams: impl FnOnce(&Copy3d) -> Seams,
        stream: &Arc<Stream>,
        gather: Option<CUfunction>,
    ) -> Result<Scatter, CuError> {
        if !scatters(&pieces) {
            return Err(CuError::INVALID_VALUE);
        }
        let all = pieces.first().zip(pieces.last()).map(|(first, last)| {
            let place = mapped(first.dst);
            Copy3d::new(place, place, Shape::line(last.dst + last.bytes - first.dst))
        });
        let seams = all.map_or_else(Seams::default, |all| seams(&all));
        Ok(Scatter { pieces, seams, stream: Arc::clone(stream), gather })
    }

    /// Whether the kernel can copy a piece: it has its own device's memory, by whole words.
    fn is_kernels(&self, piece: &Scattered) -> bool {
        let own = device_of(piece.dst) == Some(self.stream.ctx.device);
        self.gather.is_some() && own && (piece.dst | piece.bytes).is_multiple_of(WORD)
    }
}

/// Runs a scattered copy; returns when it is over. Not on the dispatcher's thread. `reached` was
/// recorded in its stream.
pub(crate) fn run(
    scatter: &Scatter,
    reached: CUevent,
    buffers: &Buffers,
    host: &dyn Host,
) -> Result<(), CuError> {
    let driver = buffers.driver();
    scatter.stream.ctx.enter()?;
    // As other copies of private memory do.
    // SAFETY: an event that was recorded in the stream.
    check(unsafe { (driver.cuEventSynchronize)(reached) })?;
    let mut buffer = buffers.take()?;
    let read = read(scatter, &mut buffer, host);
    let sent = read.and_then(|moves| send(scatter, driver, &mut buffer, &moves));
    // SAFETY: our own event, and the client's stream.
    let over = check(unsafe { (driver.cuEventRecord)(reached, scatter.stream.raw) })
        // SAFETY: our own event, which was just recorded.
        .and_then(|()| check(unsafe { (driver.cuEventSynchronize)(reached) }));
    // A buffer that the device may still use is not given to anybody.
    if over.is_ok() {
        buffers.put(buffer);
    }
    sent.and(over)
}

/// Reads all pieces into the buffer. Returns for each where it is there, where it goes, and its
/// bytes.
fn read(scatter: &Scatter, buffer: &mut Buffer, host: &dyn Host) -> Result<Vec<[u64; 3]>, CuError> {
    let base = buffer.address();
    let (mut rest, mut at) = (buffer.bytes(MAX_SCATTERED), base);
    let mut moves = Vec::with_capacity(scatter.pieces.len());
    let mut parts = Vec::with_capacity(scatter.pieces.len());
    for piece in &scatter.pieces {
        let taken = piece.bytes.next_multiple_of(WORD);
        let (here, behind) =
            rest.split_at_mut_checked(taken as usize).ok_or(CuError::INVALID_VALUE)?;
        let (part, _) = here.split_at_mut(piece.bytes as usize);
        parts.push((piece.src, part));
        moves.push([at, piece.dst, piece.bytes]);
        (rest, at) = (behind, at + taken);
    }
    host.read_client_parts(&mut parts)?;
    Ok(moves)
}

/// Submits what brings the pieces from the buffer to where they go.
fn send(
    scatter: &Scatter,
    driver: &Driver,
    buffer: &mut Buffer,
    moves: &[[u64; 3]],
) -> Result<(), CuError> {
    let raw = scatter.stream.raw;
    let (mut listed, mut others) = (Vec::new(), Vec::new());
    for (piece, step) in scatter.pieces.iter().zip(moves) {
        if scatter.is_kernels(piece) { &mut listed } else { &mut others }.push(*step);
    }
    if let Some(gather) = scatter.gather.filter(|_| !listed.is_empty()) {
        let list: Vec<u8> = listed.iter().flatten().flat_map(|word| word.to_ne_bytes()).collect();
        let room = &mut buffer.bytes(PIECE)[MAX_SCATTERED as usize..];
        room.get_mut(..list.len()).ok_or(CuError::INVALID_VALUE)?.copy_from_slice(&list);
        let mut list = buffer.address() + MAX_SCATTERED;
        let mut parameters: [*mut c_void; 1] = [ptr::from_mut(&mut list).cast()];
        let (blocks, threads, extra) = (listed.len() as u32, kernel::THREADS, ptr::null_mut());
        let parameters = parameters.as_mut_ptr();
        // SAFETY: our own kernel, with its one parameter: the list, which it reads as it reads the
        // pieces, in pinned memory that stays until the event behind it is reached. It writes where
        // the client has said, as a kernel of the client's could.
        check(unsafe {
            (driver.cuLaunchKernel)(gather, blocks, 1, 1, threads, 1, 1, 0, raw, parameters, extra)
        })?;
    }
    let no_arrays: HashMap<ArrayId, CUarray> = HashMap::new();
    others.iter().try_for_each(|[from, to, bytes]| {
        let copy = Copy3d::new(mapped(*from), mapped(*to), Shape::line(*bytes));
        seams::copy(driver, &copy, &no_arrays, |_| scatter.seams.clone(), raw)
    })
}

fn mapped(addr: u64) -> Place {
    Place::Mapped { addr, pitch: 0, slice: 0 }
}

#[cfg(test)]
mod tests {
    use crate::fake::Turn;
    use crate::snapshot_tests::{CTX, LEGACY, NO_LIMITS, SLAB, hosted, pattern, peek, poke, rest};
    use kedge_cuda_types::CuError;
    use kedge_cuda_types::arena::device_base;
    use kedge_device::digest::Keys;
    use kedge_device::{Backend, Done, Host};
    use kedge_protocol::{CtxId, OutputTarget, Scattered, StreamOp};
    use kedge_wire::List;
    use std::sync::{Arc, Mutex};

    /// A client whose private memory is some bytes from 0 on, and the errors that it is told.
    struct Client(Vec<u8>, Mutex<Vec<(CtxId, CuError)>>);

    impl Host for Client {
        fn read_client(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
            let there = self.0.get(addr as usize..addr as usize + out.len());
            out.copy_from_slice(there.ok_or(CuError::INVALID_VALUE)?);
            Ok(())
        }
        fn write_client(&self, _: u64, _: &[u8]) -> Result<(), CuError> {
            Err(CuError::INVALID_VALUE)
        }
        fn host_function(&self, _: u64, done: Done) {
            done(Ok(()));
        }
        fn output(&self, _: OutputTarget, _: &[u8]) {}
        fn fault(&self, ctx: CtxId, error: CuError) {
            self.1.lock().unwrap().push((ctx, error));
        }
        fn idle(&self) {}
        fn log(&self, _: &str) {}
    }

    fn scatter(pieces: &[[u64; 3]]) -> StreamOp {
        let piece = |&[src, dst, bytes]: &[u64; 3]| Scattered { src, dst, bytes };
        let pieces = List::new(pieces.iter().map(piece).collect()).unwrap();
        StreamOp::Scatter { pieces }
    }

    #[test]
    fn pieces_go_where_they_belong_and_nothing_else_changes() {
        let (turn, driver) = Turn::begin(1 << 30);
        turn.set(|fake| fake.keys = Some(Keys::draw().unwrap()));
        let (memory, base) = (pattern(3, 64 << 10), device_base(0));
        let client = Arc::new(Client(memory.clone(), Mutex::default()));
        let backend = hosted(&driver, NO_LIMITS, client.clone());
        backend.grant(0, base, SLAB).unwrap();
        let mut expected = pattern(9, 1 << 20);
        poke(base, &expected);
        // Whole words, which the kernel copies, and others.
        let pieces = [
            [4096, 0, 4096],
            [100, 8192, 4096],
            [9000, 20001, 5],
            [0, 40960, 4090],
            [7, 65536, 48],
        ];
        for [src, at, bytes] in pieces {
            let from = &memory[src as usize..(src + bytes) as usize];
            expected[at as usize..(at + bytes) as usize].copy_from_slice(from);
        }
        let there = pieces.map(|[src, at, bytes]| [src, base + at, bytes]);
        backend.submit(LEGACY, scatter(&there)).unwrap();
        rest(&backend);
        assert!(peek(base, 1 << 20) == expected);
        assert_eq!(turn.set(|fake| fake.gathered), 3);
        assert!(client.1.lock().unwrap().is_empty());
    }

    #[test]
    fn what_the_client_has_not_got_is_an_error_of_the_context() {
        let (_turn, driver) = Turn::begin(1 << 30);
        let base = device_base(0);
        let client = Arc::new(Client(vec![0; 4096], Mutex::default()));
        let backend = hosted(&driver, NO_LIMITS, client.clone());
        backend.grant(0, base, SLAB).unwrap();
        let overlap = scatter(&[[0, base, 4096], [0, base + 4095, 1]]);
        assert_eq!(backend.submit(LEGACY, overlap), Err(CuError::INVALID_VALUE));
        backend.submit(LEGACY, scatter(&[[1, base, 4096]])).unwrap();
        rest(&backend);
        let told = client.1.lock().unwrap().clone();
        assert!(told.contains(&(CTX, CuError::INVALID_VALUE)), "{told:?}");
    }
}
