//! Digests of the devices' memory, computed by the devices, and copies of the blocks that have
//! changed: kernels of our own in one of the client's contexts, with memory of our own. The program
//! knows nothing of them.

use crate::Shared;
use crate::context::Context;
use crate::devices::Devices;
use crate::driver::{Driver, check};
use crate::pinned::Pinned;
use crate::sources::{From, Run};
use crate::spare::Region;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdevice, CUfunction, CUmodule, CUstream};
use kedge_device::digest::{BLOCK, Digest, Keys, kernel};
use kedge_device::{Digests, Known, Piece};
use kedge_protocol::CtxId;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs that are shorter are copied whatever they hold.
const SHORT: u64 = 4096;
/// Of a span: its address and its bytes.
const SPAN: u64 = 16;
const DIGEST: u64 = size_of::<Digest>() as u64;
/// Of a move: from, to, bytes.
const MOVE: u64 = 24;
/// Threads that make pinned pages.
const THREADS: usize = 4;
/// Most blocks of a device: those of 1 TiB.
const MAX_BLOCKS: usize = 4 << 20;
/// CU_FUNC_ATTRIBUTE_NUM_REGS.
const NUM_REGS: std::ffi::c_uint = 4;

/// Bytes of the lists of so many blocks.
const fn bytes_for(blocks: usize) -> u64 {
    blocks as u64 * (SPAN + DIGEST + MOVE) + DIGEST * kernel::THREADS as u64
}

/// The digests of what a snapshot would take, by piece.
#[derive(Default)]
pub(crate) struct Found(HashMap<Piece, Digests>);

impl Found {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn of(&self, piece: &Piece) -> Option<Digests> {
        self.0.get(piece).map(Arc::clone)
    }

    /// What of the runs is not known: whole runs, and parts of runs.
    pub(crate) fn changed(&self, runs: Vec<Run>, known: &Known) -> Vec<Run> {
        let mut all = Vec::new();
        for run in runs {
            let From::Linear(addr) = run.from else {
                all.push(run);
                continue;
            };
            for (at, piece) in &run.pieces {
                let now = self.0.get(piece);
                let parts = known.compare(piece, now.map_or(&[], |digests| digests));
                for (from, to, _) in parts.into_iter().filter(|part| !part.2) {
                    let object = piece.object.clone();
                    let bytes = to - from;
                    let part = Piece { object, start: piece.start + from, bytes };
                    let from = From::Linear(addr + at + from);
                    let (device, ctx) = (run.device, Arc::clone(&run.ctx));
                    all.push(Run { device, ctx, from, bytes, pieces: vec![(0, part)] });
                }
            }
        }
        all
    }
}

/// What computes digests, in each context.
#[derive(Default)]
pub(crate) struct Digester {
    kernels: Mutex<HashMap<CtxId, Kernels>>,
}

/// A piece whose blocks have digests: the first so many of them.
struct Stretch<'a> {
    piece: &'a Piece,
    addr: u64,
    blocks: usize,
}

impl<'a> Stretch<'a> {
    fn new(piece: &'a Piece, addr: u64) -> Stretch<'a> {
        let rest = piece.bytes % BLOCK;
        // What does not end with a word has none.
        let last = rest > 0 && rest.is_multiple_of(16);
        let whole = (piece.bytes / BLOCK) as usize;
        let blocks = if addr.is_multiple_of(16) { whole + usize::from(last) } else { 0 };
        Stretch { piece, addr, blocks }
    }

    /// Address and bytes of each.
    fn spans(&self) -> impl Iterator<Item = u64> {
        let (addr, bytes) = (self.addr, self.piece.bytes);
        let starts = (0..self.blocks as u64).map(|block| block * BLOCK);
        starts.flat_map(move |at| [addr + at, BLOCK.min(bytes - at)])
    }
}

impl Digester {
    fn lock(&self) -> MutexGuard<'_, HashMap<CtxId, Kernels>> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context was made, and is current: loads the kernels, unless that is done, before anything
    /// that the program loads. In every context: where the driver places what comes later depends
    /// on it, and must be the same in a restarted job.
    pub(crate) fn made(
        &self,
        driver: &Arc<Driver>,
        context: &Arc<Context>,
        raw: CUdevice,
    ) -> Result<(), CuError> {
        if !self.gathers(context.id) {
            let _held = context.hold()?;
            let kernels = Kernels::make(driver, raw)?;
            self.adopt(context.id, kernels);
        }
        Ok(())
    }

    /// Takes kernels that were loaded into this context before it had its name.
    pub(crate) fn adopt(&self, context: CtxId, kernels: Kernels) {
        self.lock().insert(context, kernels);
    }

    /// A context is about to end.
    pub(crate) fn forget(&self, context: CtxId) {
        self.lock().remove(&context);
    }

    /// Computes the digests of all runs that have them, and waits. Whatever they lie in must stay
    /// mapped.
    pub(crate) fn compute(
        &self,
        shared: &Shared,
        devices: &Devices,
        runs: &[Run],
        keys: &Keys,
    ) -> Result<Found, CuError> {
        let mut found = HashMap::new();
        for (device, raw) in devices.iter() {
            let context = match runs.iter().any(|run| run.device == device) {
                true => shared.live.on(&shared.driver, device, raw)?,
                false => continue,
            };
            if !self.gathers(context.id) {
                continue;
            }
            let mut stretches = Vec::new();
            for run in runs.iter().filter(|run| run.device == device && can_read(&context, run)) {
                let From::Linear(addr) = run.from else { continue };
                let pieces = run.pieces.iter();
                stretches.extend(pieces.map(|(at, piece)| Stretch::new(piece, addr + at)));
            }
            let blocks = stretches.iter().map(|stretch| stretch.blocks).sum();
            if blocks == 0 {
                continue;
            }
            self.with(&context, blocks, |kernels, stream| {
                kernels.digest(&stretches, blocks, keys, stream)?;
                let mut first = 0;
                for Stretch { piece, blocks, .. } in &stretches {
                    let digest =
                        |n: usize| (n < *blocks).then(|| kernels.computed(first + n)).flatten();
                    let all = 0..piece.bytes.div_ceil(BLOCK) as usize;
                    found.insert((*piece).clone(), all.map(digest).collect());
                    first += blocks;
                }
                Ok(())
            })?;
        }
        Ok(Found(found))
    }

    /// Has a device's kernels copy: each from, to and bytes. Starts it; done when the context's own
    /// stream is.
    pub(crate) fn gather(
        &self,
        shared: &Shared,
        (device, raw): (u32, CUdevice),
        moves: &[[u64; 3]],
    ) -> Result<(), CuError> {
        let context = shared.live.on(&shared.driver, device, raw)?;
        self.with(&context, moves.len(), |kernels, stream| kernels.gather(moves, stream))
    }

    /// Whether [`Digester::gather`] can copy in this context.
    pub(crate) fn gathers(&self, context: CtxId) -> bool {
        self.lock().contains_key(&context)
    }

    /// Returns the copying kernel of a context, if it is there: for as long as the context is.
    pub(crate) fn gatherer(&self, context: CtxId) -> Option<CUfunction> {
        self.lock().get(&context).map(|kernels| kernels.module.gather)
    }

    /// Lends a context's kernels, with room for so many blocks.
    fn with<T>(
        &self,
        context: &Context,
        blocks: usize,
        act: impl FnOnce(&mut Kernels, CUstream) -> Result<T, CuError>,
    ) -> Result<T, CuError> {
        let held = context.hold()?;
        let mut all = self.lock();
        let kernels = all.get_mut(&context.id).ok_or(CuError::NOT_SUPPORTED)?;
        kernels.make_room(blocks)?;
        act(kernels, held.streams().inside)
    }
}

/// Whether kernels in `context` can read a run: not what another context's module has.
fn can_read(context: &Arc<Context>, run: &Run) -> bool {
    let From::Linear(addr) = run.from else { return false };
    Arc::ptr_eq(context, &run.ctx) && run.bytes >= SHORT && addr.is_multiple_of(16)
}

/// The kernels in one context, and the memory that they are told by.
pub(crate) struct Kernels {
    driver: Arc<Driver>,
    module: Loaded,
    /// Blocks that there is room for.
    blocks: usize,
    /// Spans, digests, moves and powers, one behind the other. All its addresses are reserved from
    /// the beginning.
    lists: Region,
    /// The same in host memory.
    staging: Option<Pinned>,
}

#[derive(Clone, Copy)]
struct Loaded {
    digest: CUfunction,
    gather: CUfunction,
}

impl Loaded {
    /// Loads both kernels into the current context, where they stay.
    fn load(driver: &Driver) -> Result<Loaded, CuError> {
        let text = CString::new(kernel::text()).map_err(|_| CuError::INVALID_VALUE)?;
        let mut module = CUmodule::NULL;
        // SAFETY: text that ends in a NUL, and no options.
        check(unsafe {
            let (none, values) = (ptr::null_mut(), ptr::null_mut());
            (driver.cuModuleLoadDataEx)(&mut module, text.as_ptr().cast(), 0, none, values)
        })?;
        let function = |name: &str| {
            let name = CString::new(name).map_err(|_| CuError::INVALID_VALUE)?;
            let mut function = CUfunction::NULL;
            // SAFETY: live pointers, and a module that was just loaded.
            check(unsafe { (driver.cuModuleGetFunction)(&mut function, module, name.as_ptr()) })?;
            let mut registers = 0;
            // SAFETY: `registers` is live, and the function is of a module that stays loaded. A
            // driver that loads kernels when they are first used does so for this.
            check(unsafe { (driver.cuFuncGetAttribute)(&mut registers, NUM_REGS, function) })?;
            Ok(function)
        };
        Ok(Loaded { digest: function(kernel::DIGEST)?, gather: function(kernel::GATHER)? })
    }
}

impl Kernels {
    /// Loads them into the current context.
    pub(crate) fn make(driver: &Arc<Driver>, raw: CUdevice) -> Result<Kernels, CuError> {
        let module = Loaded::load(driver)?;
        let lists = Region::reserve(driver, raw, bytes_for(MAX_BLOCKS))?;
        Ok(Kernels { driver: Arc::clone(driver), module, blocks: 0, lists, staging: None })
    }

    fn make_room(&mut self, blocks: usize) -> Result<(), CuError> {
        if blocks <= self.blocks {
            return Ok(());
        }
        // A few more may come before the pause.
        let blocks = (blocks + blocks / 8 + 64).min(MAX_BLOCKS.max(blocks));
        if blocks > MAX_BLOCKS {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let bytes = bytes_for(blocks);
        let more = bytes.saturating_sub(self.lists.filled());
        if self.lists.grow(more) < more {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.lists.open()?;
        let bytes = bytes.next_multiple_of(4096) as usize;
        self.staging = Some(Pinned::new(&self.driver, bytes, THREADS)?);
        self.blocks = blocks;
        Ok(())
    }

    /// The lists in host memory.
    fn staging(&self) -> (*mut u8, u64) {
        self.staging.as_ref().map_or((ptr::null_mut(), 0), |pinned| (pinned.addr(), pinned.bytes()))
    }

    /// Where the spans, the digests, the moves and the powers lie.
    fn offsets(&self) -> [u64; 4] {
        let spans = self.blocks as u64 * SPAN;
        let digests = self.blocks as u64 * DIGEST;
        [0, spans, spans + digests, spans + digests + self.blocks as u64 * MOVE]
    }

    /// Writes words to the lists, from `offset` on.
    fn send(
        &mut self,
        offset: u64,
        words: impl Iterator<Item = u64>,
        stream: CUstream,
    ) -> Result<(), CuError> {
        let (staging, bytes) = self.staging();
        let room = bytes.saturating_sub(offset) / 8;
        let from = staging.wrapping_add(offset as usize);
        let mut count = 0;
        for word in words.take(room as usize) {
            // SAFETY: `room` words of our own pinned memory lie there, and no copy uses them: the
            // last has been waited for.
            unsafe { from.cast::<u64>().add(count).write_unaligned(word) };
            count += 1;
        }
        let to = self.lists.base() + offset;
        // SAFETY: the lists have as many bytes as the pinned memory has.
        check(unsafe { (self.driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), count * 8, stream) })
    }

    /// Computes the digests of so many blocks, and waits.
    fn digest(
        &mut self,
        stretches: &[Stretch<'_>],
        blocks: usize,
        keys: &Keys,
        stream: CUstream,
    ) -> Result<(), CuError> {
        let [spans, digests, _, powers] = self.offsets();
        self.send(spans, stretches.iter().flat_map(Stretch::spans), stream)?;
        self.send(powers, keys.powers(), stream)?;
        let base = self.lists.base();
        let mut lists = [base + spans, base + digests, base + powers];
        let mut own = keys.parameter();
        let [first, second, third] = &mut lists;
        let mut parameters: [*mut c_void; 4] = [
            ptr::from_mut(first).cast(),
            ptr::from_mut(second).cast(),
            ptr::from_mut(third).cast(),
            own.as_mut_ptr().cast(),
        ];
        let launched = self.launch(self.module.digest, blocks, &mut parameters, stream);
        let to = self.staging().0.wrapping_add(digests as usize);
        let bytes = blocks * DIGEST as usize;
        let copied = launched.and_then(|()| {
            // SAFETY: `make_room` has made pinned memory and lists of at least that length.
            check(unsafe {
                (self.driver.cuMemcpyDtoHAsync_v2)(to.cast(), base + digests, bytes, stream)
            })
        });
        // SAFETY: our own stream, in a context that is held.
        let over = check(unsafe { (self.driver.cuStreamSynchronize)(stream) });
        copied.and(over)
    }

    /// A digest of those that were computed last.
    fn computed(&self, index: usize) -> Option<Digest> {
        let at = self.offsets()[1] + index as u64 * DIGEST;
        let (staging, bytes) = self.staging();
        let from = staging.wrapping_add(at as usize).cast::<Digest>();
        // SAFETY: it lies in our own pinned memory, to which nothing is copied any more; any bits
        // are numbers.
        (at + DIGEST <= bytes).then(|| unsafe { from.read_unaligned() })
    }

    fn gather(&mut self, moves: &[[u64; 3]], stream: CUstream) -> Result<(), CuError> {
        let [_, _, offset, _] = self.offsets();
        self.send(offset, moves.iter().flatten().copied(), stream)?;
        let mut list = self.lists.base() + offset;
        let mut parameters: [*mut c_void; 1] = [ptr::from_mut(&mut list).cast()];
        self.launch(self.module.gather, moves.len(), &mut parameters, stream)
    }

    fn launch(
        &self,
        function: CUfunction,
        blocks: usize,
        parameters: &mut [*mut c_void],
        stream: CUstream,
    ) -> Result<(), CuError> {
        let grid = u32::try_from(blocks).map_err(|_| CuError::INVALID_VALUE)?;
        let extra = ptr::null_mut();
        // SAFETY: a kernel of ours with as many parameters as it has, each live and of its size. It
        // reads and writes what the caller has shown to be mapped.
        check(unsafe {
            (self.driver.cuLaunchKernel)(
                function,
                grid,
                1,
                1,
                kernel::THREADS,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                extra,
            )
        })
    }
}
