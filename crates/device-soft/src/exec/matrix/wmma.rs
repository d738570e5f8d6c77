//! `wmma.load`, `wmma.mma`, `wmma.store`.
//!
//! Where a fragment keeps an element is for the implementation to say. Accumulators of 16 × 16 lie
//! as two of `mma`'s side by side; all else is in order, and repeated where a fragment has room to
//! spare.

mod operands;

use super::mma::register_type;
use super::{Params, slots, space, space_of, tile};
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::math::fragment::{Element, Layout, Shape};
use crate::spec::WARP;
use kedge_ptx::ast::Type;
use std::marker::PhantomData;
use tile::{Number, stored_k};

/// Most elements of a tile: 32 × 16.
const TILE: usize = 512;

/// Which operand a fragment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    A,
    B,
    /// C or D.
    Accumulator,
}

/// Rows and columns of a role's tile, as stored (bits 32 to a word along k).
fn extent(params: &Params, role: Role) -> (usize, usize) {
    let Shape { m, n, .. } = params.shape;
    let k = stored_k(params);
    match role {
        Role::A => (m, k),
        Role::B => (k, n),
        Role::Accumulator => (m, n),
    }
}

/// How a fragment keeps its tile, with `per` elements in a register.
#[inline(always)]
fn layout((rows, columns): (usize, usize), role: Role, per: usize) -> Layout {
    if role == Role::Accumulator && (rows, columns) == (16, 16) {
        Layout::accumulators(16, per)
    } else {
        Layout::linear(rows * columns, per)
    }
}

/// `wmma.mma` computed in T, in tiles of at most N elements. The operand list is d, a, b, c.
struct Mma<T, const N: usize>(PhantomData<T>);

impl<T: Number, const N: usize> Op for Mma<T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let params = Params::decode(inst.imm);
        let [d_len, a_len, b_len, c_len] =
            [0, 8, 16, 24].map(|at| (inst.aux >> at & 0xFF) as usize);
        // SAFETY: the operands are d, a, b, c of the lengths in `aux`, each in the bank of its
        // element (the selector).
        unsafe {
            let slots = slots(warp, inst, d_len + a_len + b_len + c_len);
            let (d, slots) = slots.split_at(d_len);
            let (a, slots) = slots.split_at(a_len);
            let (b, c) = slots.split_at(b_len);
            let a = gather::<T, N>(warp, a, &params, params.a, Role::A);
            let b = gather::<T, N>(warp, b, &params, params.b, Role::B);
            let mut c = gather::<T, N>(warp, c, &params, params.c, Role::Accumulator);
            let Shape { m, n, .. } = params.shape;
            let k = stored_k(&params);
            T::multiply(&params, &a[..m * k], &b[..k * n], &mut c[..m * n]);
            let layout = layout((m, n), Role::Accumulator, params.d.per_register());
            tile::scatter::<T, N>(warp, d, params.d, &layout, &c, mask);
        }
        Flow::Next
    }
}

/// An operand's tile. Inlined, so that it is compiled for the handler's level.
///
/// # Safety
/// As [`tile::gather`].
#[inline(always)]
unsafe fn gather<T: Number, const N: usize>(
    warp: &Warp,
    slots: &[i32],
    params: &Params,
    element: Element,
    role: Role,
) -> [T; N] {
    let layout = layout(extent(params, role), role, element.per_register());
    // SAFETY: the caller's contract.
    unsafe { tile::gather::<T, N>(warp, slots, element, &layout) }
}

/// A `wmma.load` or `wmma.store`, from `imm` and `aux`.
struct Transfer {
    extent: (usize, usize),
    role: Role,
    element: Element,
    registers: usize,
    /// Consecutive elements are of one column.
    column_major: bool,
    /// There is a stride operand.
    stride: bool,
}

/// `aux` of a transfer, above [`space`]'s bits.
const ROLE: u32 = 2;
const COLUMN_MAJOR: u32 = 1 << 4;
const STRIDE: u32 = 1 << 5;
const REGISTERS: u32 = 8;

impl Transfer {
    fn of(inst: &Inst) -> Self {
        let params = Params::decode(inst.imm);
        let (role, element) = match inst.aux >> ROLE & 3 {
            0 => (Role::A, params.a),
            1 => (Role::B, params.b),
            _ => (Role::Accumulator, params.c),
        };
        Self {
            extent: extent(&params, role),
            role,
            element,
            registers: (inst.aux >> REGISTERS & 0xFF) as usize,
            column_major: inst.aux & COLUMN_MAJOR != 0,
            stride: inst.aux & STRIDE != 0,
        }
    }

    /// Bits of a stored element: bits go by words.
    fn bits(&self) -> usize {
        if self.element == Element::B1 { 32 } else { self.element.bits() as usize }
    }

    /// Number of memory lines, and elements in each.
    fn lines(&self) -> (usize, usize) {
        let (rows, columns) = self.extent;
        if self.column_major { (columns, rows) } else { (rows, columns) }
    }

    /// The tile's index of element `at` of line `line`.
    fn index(&self, line: usize, at: usize) -> usize {
        let columns = self.extent.1;
        (if self.column_major { at * columns + line } else { line * columns + at }) % TILE
    }

    /// Calls `line` with each memory line's number and its bytes. False: a fault was recorded.
    ///
    /// # Safety
    /// `slots` holds the address and, with [`STRIDE`], the stride.
    #[inline(always)]
    unsafe fn each_line(
        &self,
        warp: &mut Warp,
        inst: &Inst,
        mask: u32,
        slots: &[i32],
        mut line: impl FnMut(usize, &mut [u8]),
    ) -> bool {
        let lane = mask.trailing_zeros() as usize % WARP;
        let (count, len) = self.lines();
        // SAFETY: the caller's contract.
        let (base, stride) = unsafe {
            let stride =
                if self.stride { u32::read(warp, slots[1])[lane].into() } else { len as u64 };
            (u64::read(warp, slots[0])[lane], stride)
        };
        // The stride counts elements; of bits it counts single ones.
        let stride_bits = match self.element {
            Element::B1 if self.stride => stride,
            _ => stride.wrapping_mul(self.bits() as u64),
        };
        let bytes = (len * self.bits()).div_ceil(8);
        let align = (self.bits() as u64 / 8).max(1);
        let offset = |number: usize| (number as u64).wrapping_mul(stride_bits) / 8;
        let space = space_of(inst.aux);
        // All lines lie in one piece of memory, or else each is found by itself.
        let all = offset(count.saturating_sub(1)).saturating_add(bytes as u64);
        let whole = if base.is_multiple_of(align) {
            warp.find(inst, lane, space.into(), base, all)
        } else {
            None
        };
        for number in 0..count {
            let memory = match whole {
                Some(first) => first.wrapping_add(offset(number) as usize),
                None => {
                    let addr = base.wrapping_add(offset(number));
                    match warp.resolve(inst, lane, space, addr, bytes as u64, align) {
                        Some(memory) => memory,
                        None => return false,
                    }
                }
            };
            // SAFETY: `find` or `resolve` found `bytes` bytes there. Other blocks that write them
            // meanwhile race with a weak access, whose result is then unspecified, as on the
            // device.
            line(number, unsafe { std::slice::from_raw_parts_mut(memory, bytes) });
        }
        true
    }

    /// Element `at` of a line's bytes, of fewer than eight bits each.
    fn get(&self, bytes: &[u8], at: usize) -> u64 {
        let width = self.bits();
        u64::from(bytes[at * width / 8] >> (at * width % 8)) & ((1 << width) - 1)
    }

    fn set(&self, bytes: &mut [u8], at: usize, value: u64) {
        let width = self.bits();
        if width < 8 {
            let shift = at * width % 8;
            let field = ((1u8 << width) - 1) << shift;
            let byte = &mut bytes[at * width / 8];
            *byte = *byte & !field | (value as u8) << shift & field;
            return;
        }
        let size = width / 8;
        bytes[at * size..][..size].copy_from_slice(&value.to_le_bytes()[..size]);
    }
}

/// `wmma.load.{a,b,c}`: op = registers, address, stride.
struct Load;

impl Op for Load {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let transfer = Transfer::of(inst);
        // SAFETY: the operands are as the selector listed them.
        let read = unsafe {
            match transfer.bits() {
                8 => transfer.load::<u8, TILE>(warp, inst, mask),
                16 => transfer.load::<u16, TILE>(warp, inst, mask),
                32 => transfer.load::<u32, TILE>(warp, inst, mask),
                64 => transfer.load::<u64, 64>(warp, inst, mask),
                _ => transfer.load::<Narrow, TILE>(warp, inst, mask),
            }
        };
        if read { Flow::Next } else { Flow::Fault }
    }
}

/// How a tile's elements are kept between memory and registers: in a word that has room for them.
trait Kept: Copy + Default {
    /// Puts a line's elements at every `step`th place of `tile`.
    fn take(transfer: &Transfer, bytes: &[u8], tile: &mut [Self], step: usize);
    fn word(self) -> u64;
}

macro_rules! kept {
    ($($ty:ty)*) => {
        $(impl Kept for $ty {
            #[inline(always)]
            fn take(_: &Transfer, bytes: &[u8], tile: &mut [Self], step: usize) {
                let elements = bytes.as_chunks::<{ size_of::<$ty>() }>().0;
                for (place, element) in tile.iter_mut().step_by(step).zip(elements) {
                    *place = <$ty>::from_le_bytes(*element);
                }
            }
            #[inline(always)]
            fn word(self) -> u64 {
                self.into()
            }
        })*
    };
}

kept! { u8 u16 u32 u64 }

/// An element that is less than a byte.
#[derive(Clone, Copy, Default)]
struct Narrow(u8);

impl Kept for Narrow {
    #[inline(always)]
    fn take(transfer: &Transfer, bytes: &[u8], tile: &mut [Narrow], step: usize) {
        let elements = (0..transfer.lines().1).map(|at| Narrow(transfer.get(bytes, at) as u8));
        tile.iter_mut().step_by(step).zip(elements).for_each(|(place, element)| *place = element);
    }
    #[inline(always)]
    fn word(self) -> u64 {
        self.0.into()
    }
}

impl Transfer {
    /// `wmma.load`, of tiles of at most N elements. False: a fault was recorded.
    ///
    /// # Safety
    /// The operands of `inst` are those of a load.
    #[inline(always)]
    unsafe fn load<T: Kept, const N: usize>(
        &self,
        warp: &mut Warp,
        inst: &Inst,
        mask: u32,
    ) -> bool {
        let mut tile = [T::default(); N];
        let columns = self.extent.1;
        let (line_step, step) = if self.column_major { (1, columns) } else { (columns, 1) };
        // SAFETY: the caller's contract.
        unsafe {
            let slots = slots(warp, inst, self.registers + 1 + usize::from(self.stride));
            let (registers, source) = slots.split_at(self.registers);
            let read = self.each_line(warp, inst, mask, source, |line, bytes| {
                let first = (line * line_step).min(N);
                T::take(self, bytes, &mut tile[first..], step);
            });
            if !read {
                return false;
            }
            let per = self.element.per_register();
            let layout = layout(self.extent, self.role, per);
            for (register, slot) in registers.iter().enumerate() {
                let mut words = [0u64; WARP];
                for element in 0..per {
                    let values = layout.load(&tile, layout.offset(register, element));
                    for lane in 0..WARP {
                        words[lane] |= values[lane].word() << (element * self.bits());
                    }
                }
                if self.element == Element::F64 {
                    u64::write(warp, *slot, &words, mask);
                } else {
                    u32::write(warp, *slot, &words.map(|word| word as u32), mask);
                }
            }
        }
        true
    }
}

/// `wmma.store.d`: op = address, registers, stride.
struct Store;

impl Op for Store {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let transfer = Transfer::of(inst);
        let count = transfer.registers;
        let mut elements = [0u64; TILE];
        // SAFETY: the operands are as the selector listed them.
        unsafe {
            let slots = slots(warp, inst, count + 1 + usize::from(transfer.stride));
            let per = transfer.element.per_register();
            let layout = layout(transfer.extent, transfer.role, per);
            let part = u64::MAX >> (64 - transfer.bits());
            for (register, slot) in slots[1..=count].iter().enumerate() {
                let words = if transfer.element == Element::F64 {
                    u64::read(warp, *slot)
                } else {
                    u32::read(warp, *slot).map(u64::from)
                };
                for element in 0..per {
                    let (offset, shift) =
                        (layout.offset(register, element), element * transfer.bits());
                    let values = words.map(|word| word >> shift & part);
                    layout.store(&mut elements, offset, &values);
                }
            }
            let stride = if transfer.stride { slots[count + 1] } else { 0 };
            let len = transfer.lines().1;
            let target = [slots[0], stride];
            let written = transfer.each_line(warp, inst, mask, &target, |line, bytes| {
                for at in 0..len {
                    transfer.set(bytes, at, elements[transfer.index(line, at)]);
                }
            });
            if written { Flow::Next } else { Flow::Fault }
        }
    }
}

/// Whether the hardware multiplies this shape of these elements.
fn exists(shape: Shape, element: Element) -> bool {
    let shape = (shape.m, shape.n, shape.k);
    match element {
        Element::F16 | Element::Bf16 | Element::S8 | Element::U8 => {
            matches!(shape, (16, 16, 16) | (32, 8, 16) | (8, 32, 16))
        }
        Element::Tf32 => shape == (16, 16, 8),
        Element::F64 => shape == (8, 8, 4),
        Element::S4 | Element::U4 => shape == (8, 8, 32),
        Element::B1 => shape == (8, 8, 128),
        // Accumulators: any of the above.
        _ => matches!(
            shape,
            (16, 16, 16) | (32, 8, 16) | (8, 32, 16) | (16, 16, 8) | (8, 8, 4 | 32 | 128)
        ),
    }
}

/// This part's selector.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let what = parts.take_first()?;
    if !parts.take("sync") || !parts.take("aligned") {
        return None;
    }
    match what {
        "mma" => multiply(query, parts),
        "load" | "store" => transfer(query, parts, what == "load"),
        _ => None,
    }
}

/// `wmma.load.{a,b,c}.sync.aligned.layout.shape{.ss}.type`, `wmma.store.d.…`.
fn transfer(query: &Query<'_>, mut parts: Parts<'_>, load: bool) -> Option<Selected> {
    let role = match parts.take_first()? {
        "a" if load => 0,
        "b" if load => 1,
        "c" if load => 2,
        "d" if !load => 2,
        _ => return None,
    };
    let column_major = parts.take("col");
    if !column_major && !parts.take("row") {
        return None;
    }
    let shape = parts.take_map(Shape::named)?;
    let space = space(&mut parts);
    let element = parts.take_map(Element::named)?;
    if !parts.done() || !(exists(shape, element) || role == 2 && exists(shape, Element::F32)) {
        return None;
    }
    let params = Params {
        shape,
        a: element,
        b: element,
        c: element,
        d: element,
        satfinite: false,
        xor: false,
    };
    let (vector, operands) = if load { (0, 2) } else { (1, 2) };
    let registers = query.lanes(vector);
    let stride = query.operand(operands).is_some();
    let register = register_type(element);
    let mut args = Vec::new();
    if load {
        args.extend(vec![Arg::Dst(register); registers]);
        args.push(Arg::Address);
    } else {
        args.push(Arg::Address);
        args.extend(vec![Arg::Src(register); registers]);
    }
    let mut aux = space | role << ROLE | (registers as u32) << REGISTERS;
    if stride {
        args.push(Arg::Src(Type::U32));
        aux |= STRIDE;
    }
    if column_major {
        aux |= COLUMN_MAJOR;
    }
    let selected = if load {
        operands::load_of(&params, role, column_major, args)
    } else {
        Selected::new::<Store>(args)
    };
    (1..=8).contains(&registers).then(|| selected.imm(params.encode()).aux(aux))
}

/// `wmma.mma.sync.aligned.layout.layout.shape.types{.satfinite}`.
fn multiply(query: &Query<'_>, mut parts: Parts<'_>) -> Option<Selected> {
    // Fragments are kept by row and column, so the layouts have been dealt with by the loads.
    for _ in 0..2 {
        if !parts.take("row") && !parts.take("col") {
            return None;
        }
    }
    let shape = parts.take_map(Shape::named)?;
    let satfinite = parts.take("satfinite");
    let _nearest = parts.take("rn");
    let xor = parts.take("xor");
    let and = parts.take("and");
    if (xor || and) != parts.take("popc") {
        return None;
    }
    let mut types = Vec::new();
    while let Some(element) = parts.take_map(Element::named) {
        types.push(element);
    }
    let (d, a, b, c) = match types[..] {
        [d, c] => (d, Element::F16, Element::F16, c),
        [d, a, b, c] => (d, a, b, c),
        _ => return None,
    };
    if !parts.done() || !exists(shape, a) || (a == Element::B1) != (xor || and) {
        return None;
    }
    let params = Params { shape, a, b, c, d, satfinite, xor };
    let lengths = [0, 1, 2, 3].map(|index| query.lanes(index));
    let mut args = vec![Arg::Dst(register_type(d)); lengths[0]];
    for (element, len) in [(a, lengths[1]), (b, lengths[2]), (c, lengths[3])] {
        args.extend(vec![Arg::Src(register_type(element)); len]);
    }
    let fits = lengths.iter().all(|len| (1..=8).contains(len));
    let aux = lengths.iter().rev().fold(0, |aux, len| aux << 8 | *len as u32);
    #[cfg(target_arch = "x86_64")]
    if fits && let Some(select) = wide(&params, lengths) {
        return Some(select(args).imm(params.encode()).aux(aux));
    }
    let selected = match (d, c) {
        (Element::F64, Element::F64) => Selected::new::<Mma<f64, 64>>(args),
        (Element::S32, Element::S32) => Selected::new::<Mma<i32, TILE>>(args),
        (Element::F16 | Element::F32, Element::F16 | Element::F32)
            if (shape.m, shape.n) == (16, 16) =>
        {
            Selected::new::<Mma<f32, 256>>(args)
        }
        (Element::F16 | Element::F32, Element::F16 | Element::F32) => {
            Selected::new::<Mma<f32, TILE>>(args)
        }
        _ => return None,
    };
    fits.then(|| selected.imm(params.encode()).aux(aux))
}

/// The selector of a product's form for vectors of 512 bits, where it has one: operands of one
/// type, and accumulators of one.
#[cfg(target_arch = "x86_64")]
fn wide(params: &Params, lengths: [usize; 4]) -> Option<fn(Vec<Arg>) -> Selected> {
    use super::wide::{Accumulator, Operand, Wmma, WmmaF64};
    use super::wide::{Bf16, F16, InF16, InF32, InS32, S8, Tf32, U8};
    fn of<G: Op, O: Operand, C: Accumulator, const K: usize>(args: Vec<Arg>) -> Selected {
        Selected::with_wide::<G, Wmma<G, O, C, K>>(args)
    }
    let Shape { m, n, k } = params.shape;
    let [d, a, b, c] = lengths;
    if (params.a, params.c, c) != (params.b, params.d, d) {
        return None;
    }
    let fits = |operand: usize, accumulators: usize| {
        (m, n) == (16, 16) && a >= operand && b >= operand && c == accumulators
    };
    Some(match (params.a, params.c, k) {
        (Element::F16, Element::F32, 16) if fits(4, 8) => of::<Mma<f32, 256>, F16, InF32, 16>,
        (Element::F16, Element::F16, 16) if fits(4, 4) => of::<Mma<f32, 256>, F16, InF16, 16>,
        (Element::Bf16, Element::F32, 16) if fits(4, 8) => of::<Mma<f32, 256>, Bf16, InF32, 16>,
        (Element::Tf32, Element::F32, 8) if fits(4, 8) => of::<Mma<f32, 256>, Tf32, InF32, 8>,
        (Element::S8, Element::S32, 16) if fits(2, 8) => of::<Mma<i32, TILE>, S8, InS32, 16>,
        (Element::U8, Element::S32, 16) if fits(2, 8) => of::<Mma<i32, TILE>, U8, InS32, 16>,
        (Element::F64, Element::F64, 4) if (a, b, c) == (1, 1, 2) => {
            |args| Selected::with_wide::<Mma<f64, 64>, WmmaF64<Mma<f64, 64>>>(args)
        }
        _ => return None,
    })
}
