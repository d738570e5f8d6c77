//! Tensor copies between global and shared memory.

use super::super::async_copy::Targets;
use super::super::atomic::{Operation, Reducer, reducer};
use super::super::lanewise::slots;
use super::super::mbarrier;
use super::super::{Flow, Isa, Op, Warp};
use super::Form;
use super::rows::{self, rows};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::math::{convert::f32_to_tf32, float};
use crate::memory::{SHARED_STRIDE, Space};
use crate::spec::WARP;
use kedge_cuda_types::tensor_map::{
    Format, Interleave, MAX_RANK, Mode, Swizzle, TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, TensorMap,
};
use kedge_ptx::ast::Type;

/// What a tile in shared memory is a multiple of, and the line that a swizzle stays inside of.
const LINE: u64 = 128;
/// What a swizzle moves.
const CHUNK: usize = 16;

/// One lane's copy.
struct Copy {
    map: TensorMap,
    at: [i32; MAX_RANK],
    /// Bytes of a row, and of the tile, in shared memory.
    row: usize,
    bytes: u64,
}

/// Reads the map and the coordinates of `lane` from `slots`, the map's first.
///
/// # Safety
/// `slots` are the map's address in the 64-bit bank and `form.rank` coordinates in the 32-bit one.
unsafe fn prepare(
    warp: &mut Warp,
    inst: &Inst,
    lane: usize,
    form: Form,
    slots: &[i32],
) -> Result<Copy, Flow> {
    // SAFETY: the caller's contract.
    let (addr, at) = unsafe {
        let mut at = [0; MAX_RANK];
        for (to, slot) in at.iter_mut().zip(&slots[1..=form.rank]) {
            *to = warp.row32(*slot)[lane] as i32;
        }
        (warp.row64(slots[0])[lane], at)
    };
    let map = read_map(warp, inst, lane, addr)?;
    let fits = usize::from(map.rank) == form.rank
        && matches!(map.mode, Mode::Im2col { .. }) == form.im2col;
    let kind = FaultKind::IllegalInstruction;
    if !fits {
        let what = format!("the tensor map is another kind's: {} dimensions", map.rank);
        return Err(warp.fault(inst, lane, kind, Some(addr), what));
    }
    if map.interleave != Interleave::None {
        let what = "interleaved tensor maps are not supported";
        return Err(warp.fault(inst, lane, FaultKind::NotSupported, Some(addr), what));
    }
    let row = (map.row_elements() * map.format.size()) as usize;
    Ok(Copy { map, at, row, bytes: rows::count(&map).saturating_mul(row as u64) })
}

/// The tensor map at a generic address.
pub(super) fn read_map(
    warp: &mut Warp,
    inst: &Inst,
    lane: usize,
    addr: u64,
) -> Result<TensorMap, Flow> {
    let size = TENSOR_MAP_BYTES as u64;
    let memory = warp
        .resolve(inst, lane, Space::Generic, addr, size, TENSOR_MAP_ALIGN)
        .ok_or(Flow::Fault)?;
    // SAFETY: `resolve` checked that many bytes.
    let bytes = unsafe { memory.cast::<[u8; TENSOR_MAP_BYTES]>().read() };
    TensorMap::decode(&bytes).ok_or_else(|| {
        let what = "no tensor map, or one with invalid parameters";
        warp.fault(inst, lane, FaultKind::IllegalInstruction, Some(addr), what)
    })
}

/// A tile's place in shared memory.
struct Tile {
    memory: *mut u8,
    /// Its address in the block's shared memory, which is what swizzles look at.
    offset: u64,
    swizzle: Swizzle,
}

impl Tile {
    fn at(warp: &mut Warp, inst: &Inst, lane: usize, copy: &Copy, addr: u64) -> Result<Tile, Flow> {
        let swizzle = copy.map.swizzle;
        // A swizzle spreads what it has over whole lines.
        let bytes = match swizzle {
            Swizzle::None => copy.bytes,
            _ => copy.bytes.next_multiple_of(LINE),
        };
        let memory =
            warp.resolve(inst, lane, Space::Generic, addr, bytes, LINE).ok_or(Flow::Fault)?;
        Ok(Tile { memory, offset: addr % SHARED_STRIDE, swizzle })
    }

    /// Where chunk `index` is kept.
    fn chunk(&self, index: usize) -> *mut [u8; CHUNK] {
        let addr = self.offset + (index * CHUNK) as u64;
        let moved = self.swizzle.place(addr) - self.offset;
        self.memory.wrapping_add(moved as usize).cast()
    }

    /// # Safety
    /// The tile was resolved for a copy of `linear`'s length.
    unsafe fn write(&self, linear: &[u8]) {
        for (index, chunk) in linear.as_chunks::<CHUNK>().0.iter().enumerate() {
            // SAFETY: a chunk of the tile stays inside of its lines, which were resolved.
            unsafe { self.chunk(index).write(*chunk) };
        }
    }

    /// # Safety
    /// As [`Self::write`]'s.
    unsafe fn read(&self, bytes: u64) -> Vec<u8> {
        let mut linear = vec![0; bytes as usize];
        for (index, chunk) in linear.as_chunks_mut::<CHUNK>().0.iter_mut().enumerate() {
            // SAFETY: a chunk of the tile stays inside of its lines, which were resolved.
            *chunk = unsafe { self.chunk(index).read() };
        }
        linear
    }
}

impl Copy {
    /// The bytes of the tile, in order.
    fn gather(
        &self,
        warp: &mut Warp,
        inst: &Inst,
        lane: usize,
        offsets: [u16; 3],
    ) -> Result<Vec<u8>, Flow> {
        let size = self.map.format.size() as usize;
        let mut linear = vec![0; self.bytes as usize];
        if self.map.nan_fill {
            fill_nan(self.map.format, &mut linear);
        }
        let lines = linear.chunks_exact_mut(self.row);
        for (row, line) in rows(&self.map, self.at, offsets).zip(lines) {
            let bytes = row.count as usize * size;
            if bytes == 0 {
                continue;
            }
            let from = warp
                .resolve(inst, lane, Space::Global, row.address, bytes as u64, 1)
                .ok_or(Flow::Fault)?;
            let to = &mut line[row.skip as usize * size..][..bytes];
            // SAFETY: `resolve` checked that many bytes.
            unsafe { std::ptr::copy(from, to.as_mut_ptr(), bytes) };
            convert(self.map.format, to);
        }
        Ok(linear)
    }

    /// Calls `put` with the global memory of each row and its bytes of `linear`.
    fn scatter(
        &self,
        warp: &mut Warp,
        inst: &Inst,
        lane: usize,
        linear: &[u8],
        put: impl Fn(*mut u8, &[u8]),
    ) -> Result<(), Flow> {
        let size = self.map.format.size() as usize;
        let lines = linear.chunks_exact(self.row);
        for (row, line) in rows(&self.map, self.at, [0; 3]).zip(lines) {
            let bytes = row.count as usize * size;
            if bytes > 0 {
                let to = warp
                    .resolve(inst, lane, Space::Global, row.address, bytes as u64, size as u64)
                    .ok_or(Flow::Fault)?;
                put(to, &line[row.skip as usize * size..][..bytes]);
            }
        }
        Ok(())
    }
}

/// What an out-of-bounds element is on request.
fn fill_nan(format: Format, bytes: &mut [u8]) {
    let pattern: &[u8] = match format {
        Format::F16 => &[0xFF, 0x7F],
        Format::Bf16 => &[0xFF, 0x7F],
        Format::F64 => &[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F],
        _ => &[0xFF, 0xFF, 0xFF, 0x7F],
    };
    for element in bytes.chunks_exact_mut(pattern.len()) {
        element.copy_from_slice(pattern);
    }
}

/// What a load makes of the elements: subnormals flushed, and rounded to `tf32`.
fn convert(format: Format, bytes: &mut [u8]) {
    let flushes = matches!(format, Format::F32Ftz | Format::Tf32Ftz);
    let rounds = matches!(format, Format::Tf32 | Format::Tf32Ftz);
    if !flushes && !rounds {
        return;
    }
    for element in bytes.as_chunks_mut::<4>().0 {
        let mut value = f32::from_le_bytes(*element);
        if flushes {
            value = float::flush(value);
        }
        if rounds {
            value = f32::from_bits(f32_to_tf32::<true>(value));
        }
        *element = value.to_le_bytes();
    }
}

/// A load: op = [tile, map, coordinates…, mbarrier, offsets…, [blocks]].
pub(super) struct Load;

impl Op for Load {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let form = Form::decode(inst.aux);
        let count = 3 + form.rank + form.offsets + usize::from(form.multicast);
        // SAFETY: the selector gave the operands in this order.
        let slots = unsafe { slots(warp, inst, count) };
        for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
            // SAFETY: the selector gave the operands in this order.
            if let Err(flow) = unsafe { load(warp, inst, lane, form, slots) } {
                return flow;
            }
        }
        Flow::Next
    }
}

/// # Safety
/// `slots` are a [`Load`]'s operands.
unsafe fn load(
    warp: &mut Warp,
    inst: &Inst,
    lane: usize,
    form: Form,
    slots: &[i32],
) -> Result<(), Flow> {
    // SAFETY: the caller's contract: addresses in the 64-bit bank, the rest in the 32-bit one.
    let (copy, to, barrier, offsets, blocks) = unsafe {
        let copy = prepare(warp, inst, lane, form, &slots[1..])?;
        let after = &slots[2 + form.rank..];
        let mut offsets = [0; 3];
        for (to, slot) in offsets.iter_mut().zip(&after[1..=form.offsets]) {
            *to = warp.row32(*slot)[lane] as u16;
        }
        let blocks = form.multicast.then(|| warp.row32(after[1 + form.offsets])[lane]);
        (copy, warp.row64(slots[0])[lane], warp.row64(after[0])[lane], offsets, blocks)
    };
    // The tile's memory first: it bounds what is gathered.
    for (to, _) in Targets::of(to, barrier, blocks) {
        Tile::at(warp, inst, lane, &copy, to)?;
    }
    let linear = copy.gather(warp, inst, lane, offsets)?;
    for (to, barrier) in Targets::of(to, barrier, blocks) {
        let tile = Tile::at(warp, inst, lane, &copy, to)?;
        // SAFETY: the tile is this copy's.
        unsafe { tile.write(&linear) };
        mbarrier::complete(warp, inst, lane, barrier, copy.bytes)?;
    }
    Ok(())
}

/// A store or reduction's lanes: op = [map, coordinates…, tile].
///
/// # Safety
/// `inst` was lowered with these operands.
unsafe fn stores(warp: &mut Warp, inst: &Inst, mask: u32, put: impl Fn(&TensorMap) -> Put) -> Flow {
    let form = Form::decode(inst.aux);
    // SAFETY: the caller's contract.
    let slots = unsafe { slots(warp, inst, 2 + form.rank) };
    for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
        // SAFETY: the caller's contract.
        if let Err(flow) = unsafe { store(warp, inst, lane, form, slots, &put) } {
            return flow;
        }
    }
    Flow::Next
}

/// What becomes of the elements in global memory.
enum Put {
    Copy,
    Reduce(Reducer),
    /// There is no such operation on these elements.
    Never,
}

/// # Safety
/// `slots` are those of [`stores`].
unsafe fn store(
    warp: &mut Warp,
    inst: &Inst,
    lane: usize,
    form: Form,
    slots: &[i32],
    put: impl Fn(&TensorMap) -> Put,
) -> Result<(), Flow> {
    // SAFETY: the caller's contract.
    let (copy, from) = unsafe {
        let copy = prepare(warp, inst, lane, form, slots)?;
        (copy, warp.row64(slots[1 + form.rank])[lane])
    };
    let tile = Tile::at(warp, inst, lane, &copy, from)?;
    // SAFETY: the tile is this copy's.
    let linear = unsafe { tile.read(copy.bytes) };
    match put(&copy.map) {
        // SAFETY: `scatter` gives the memory of as many bytes.
        Put::Copy => copy.scatter(warp, inst, lane, &linear, |to, bytes| unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }),
        Put::Reduce(reducer) => {
            let size = copy.map.format.size() as usize;
            copy.scatter(warp, inst, lane, &linear, |to, bytes| {
                for (index, element) in bytes.chunks_exact(size).enumerate() {
                    // SAFETY: `scatter` gives the memory of as many bytes, aligned for an element.
                    unsafe { reducer(to.add(index * size), element.as_ptr()) };
                }
            })
        }
        Put::Never => {
            let what = format!("no such reduction of {:?}", copy.map.format);
            Err(warp.fault(inst, lane, FaultKind::IllegalInstruction, None, what))
        }
    }
}

/// A store: op = [map, coordinates…, tile].
pub(super) struct Store;

impl Op for Store {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe { stores(warp, inst, mask, |_| Put::Copy) }
    }
}

/// A reduction: op = [map, coordinates…, tile]; `imm` is the [`Operation`].
pub(super) struct Reduce;

impl Op for Reduce {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let operation = Operation::from_index(inst.imm);
        let put = |map: &TensorMap| match operation.reduction(element(map.format)) {
            Some(number) => Put::Reduce(reducer(number)),
            None => Put::Never,
        };
        // SAFETY: the selector gave the operands in this order.
        unsafe { stores(warp, inst, mask, put) }
    }
}

/// The type that an element is reduced as.
fn element(format: Format) -> Type {
    match format {
        Format::U8 => Type::U8,
        Format::U16 => Type::U16,
        Format::U32 => Type::U32,
        Format::S32 => Type::S32,
        Format::U64 => Type::U64,
        Format::S64 => Type::S64,
        Format::F16 => Type::F16,
        Format::Bf16 => Type::Bf16,
        Format::F64 => Type::F64,
        Format::F32 | Format::F32Ftz | Format::Tf32 | Format::Tf32Ftz => Type::F32,
    }
}
