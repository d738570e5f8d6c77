//! `mma.sync`, with the fragment layouts of the reference.

use super::{Params, slots, tile};
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Op, Query, Selected, Warp};
use crate::math::fragment::{Element, Layout, Shape};
use kedge_ptx::ast::Type;
use std::marker::PhantomData;
use tile::{Number, stored_k};

/// `mma.sync` computed in T, in tiles of at most N elements. The operand list is d, a, b, c.
struct Mma<T, const N: usize>(PhantomData<T>);

/// Registers of each operand: d, a, b, c.
fn registers(params: &Params) -> [usize; 4] {
    let Shape { m, n, .. } = params.shape;
    let k = stored_k(params);
    let of = |elements: usize, element: Element| elements / 32 / element.per_register();
    [of(m * n, params.d), of(m * k, params.a), of(k * n, params.b), of(m * n, params.c)]
}

impl<T: Number, const N: usize> Op for Mma<T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let params = Params::decode(inst.imm);
        let Shape { m, n, .. } = params.shape;
        let k = stored_k(&params);
        let [d_len, a_len, b_len, c_len] = registers(&params);
        // SAFETY: the operands are d, a, b, c, of the lengths above, each in the bank of its
        // element (the selector).
        unsafe {
            let slots = slots(warp, inst, d_len + a_len + b_len + c_len);
            let (d, slots) = slots.split_at(d_len);
            let (a, slots) = slots.split_at(a_len);
            let (b, c) = slots.split_at(b_len);
            let layout = Layout::mma_a(m, k, params.a.per_register());
            let a = tile::gather::<T, N>(warp, a, params.a, &layout);
            let layout = Layout::mma_b(n, params.b.per_register());
            let b = tile::gather::<T, N>(warp, b, params.b, &layout);
            let layout = Layout::accumulators(n, params.c.per_register());
            let mut c = tile::gather::<T, N>(warp, c, params.c, &layout);
            T::multiply(&params, &a[..m * k], &b[..k * n], &mut c[..m * n]);
            let layout = Layout::accumulators(n, params.d.per_register());
            tile::scatter::<T, N>(warp, d, params.d, &layout, &c, mask);
        }
        Flow::Next
    }
}

/// The operand type of a register of `element`.
pub(super) fn register_type(element: Element) -> Type {
    match element {
        Element::F64 => Type::F64,
        Element::F32 => Type::F32,
        _ => Type::B32,
    }
}

/// Whether the hardware has this shape and these types.
fn exists(params: &Params) -> bool {
    use Element::{B1, Bf16, E4m3, E5m2, F16, F32, F64, S4, S8, S32, Tf32, U4, U8};
    let Shape { m, n, k } = params.shape;
    let wide = (m, n) == (16, 8);
    let square = (m, n) == (8, 8);
    let accumulator =
        |allowed: &[Element]| allowed.contains(&params.c) && allowed.contains(&params.d);
    match (params.a, params.b) {
        (F16, F16) => wide && matches!(k, 8 | 16) && accumulator(&[F16, F32]),
        (Bf16, Bf16) => wide && matches!(k, 8 | 16) && accumulator(&[F32]),
        (Tf32, Tf32) => wide && matches!(k, 4 | 8) && accumulator(&[F32]),
        (F64, F64) => (square && k == 4 || wide && matches!(k, 4 | 8 | 16)) && accumulator(&[F64]),
        (S8 | U8, S8 | U8) => {
            (square && k == 16 || wide && matches!(k, 16 | 32)) && accumulator(&[S32])
        }
        (S4 | U4, S4 | U4) => {
            (square && k == 32 || wide && matches!(k, 32 | 64)) && accumulator(&[S32])
        }
        (B1, B1) => (square && k == 128 || wide && matches!(k, 128 | 256)) && accumulator(&[S32]),
        (E4m3 | E5m2, E4m3 | E5m2) => wide && matches!(k, 16 | 32) && accumulator(&[F16, F32]),
        _ => false,
    }
}

/// `mma.sync.aligned.shape.row.col{.rnd}{.satfinite}.dtype.atype.btype.ctype{.op.popc}`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if !parts.take("sync") || !parts.take("aligned") || !parts.take("row") || !parts.take("col") {
        return None;
    }
    let shape = parts.take_map(Shape::named)?;
    let satfinite = parts.take("satfinite");
    let _nearest = parts.take("rn");
    let xor = parts.take("xor");
    let and = parts.take("and");
    if (xor || and) != parts.take("popc") {
        return None;
    }
    let mut element = || parts.take_map(Element::named);
    let (d, a, b, c) = (element()?, element()?, element()?, element()?);
    let params = Params { shape, a, b, c, d, satfinite, xor };
    if !parts.done() || !exists(&params) || (a == Element::B1) != (xor || and) {
        return None;
    }
    let [d_len, a_len, b_len, c_len] = registers(&params);
    let lengths = [0, 1, 2, 3].map(|index| query.lanes(index));
    if lengths != [d_len, a_len, b_len, c_len] {
        return None;
    }
    let mut args = vec![Arg::Dst(register_type(d)); d_len];
    args.extend(vec![Arg::Src(register_type(a)); a_len]);
    args.extend(vec![Arg::Src(register_type(b)); b_len]);
    args.extend(vec![Arg::Src(register_type(c)); c_len]);
    let largest = shape.m * stored_k(&params);
    #[cfg(target_arch = "x86_64")]
    if let Some(select) = wide(&params) {
        return Some(select(args).imm(params.encode()));
    }
    let selected = match (d, largest) {
        (Element::F64, ..=64) => Selected::new::<Mma<f64, 64>>(args),
        (Element::F64, _) => Selected::new::<Mma<f64, 256>>(args),
        (Element::S32, ..=512) => Selected::new::<Mma<i32, 512>>(args),
        (Element::S32, _) => Selected::new::<Mma<i32, 1024>>(args),
        (_, ..=256) => Selected::new::<Mma<f32, 256>>(args),
        _ => Selected::new::<Mma<f32, 512>>(args),
    };
    Some(selected.imm(params.encode()))
}

/// The selector of a product's form for vectors of 512 bits, where it has one.
#[cfg(target_arch = "x86_64")]
fn wide(params: &Params) -> Option<fn(Vec<Arg>) -> Selected> {
    use super::wide::{self, Accumulator, Operand};
    use super::wide::{Bf16, F16, InF16, InF32, InS32, S8, Tf32, U8};
    fn of<G: Op, O: Operand, C: Accumulator, const K: usize>(args: Vec<Arg>) -> Selected {
        Selected::with_wide::<G, wide::Mma<G, O, C, K>>(args)
    }
    let Shape { m, n, k } = params.shape;
    if (m, n) != (16, 8) || params.a != params.b || params.c != params.d {
        return None;
    }
    Some(match (params.a, params.c, k) {
        (Element::F16, Element::F32, 16) => of::<Mma<f32, 256>, F16, InF32, 16>,
        (Element::F16, Element::F16, 16) => of::<Mma<f32, 256>, F16, InF16, 16>,
        (Element::F16, Element::F32, 8) => of::<Mma<f32, 256>, F16, InF32, 8>,
        (Element::Bf16, Element::F32, 16) => of::<Mma<f32, 256>, Bf16, InF32, 16>,
        (Element::Tf32, Element::F32, 8) => of::<Mma<f32, 256>, Tf32, InF32, 8>,
        (Element::S8, Element::S32, 16) => of::<Mma<i32, 512>, S8, InS32, 16>,
        (Element::S8, Element::S32, 32) => of::<Mma<i32, 512>, S8, InS32, 32>,
        (Element::U8, Element::S32, 32) => of::<Mma<i32, 512>, U8, InS32, 32>,
        _ => return None,
    })
}
