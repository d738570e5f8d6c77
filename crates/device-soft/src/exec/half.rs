//! Arithmetic on f16 and bf16, one in a register or two.

use super::lanewise::Parts;
use super::{Arg, Flow, Handlers, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::narrow::{Brain, Half, NAN, Narrow};
use crate::math::{approx, float};
use crate::spec::WARP;
use kedge_ptx::ast::Type;
use std::marker::PhantomData;

/// A function of up to three halves; a shorter one ignores the rest.
trait HalfFn: 'static {
    const ARITY: usize;
    fn apply<N: Narrow>(a: u16, b: u16, c: u16) -> u16;
}

macro_rules! half_fns {
    ($($name:ident $arity:literal <$n:ident>($a:ident, $b:ident, $c:ident) $body:expr;)*) => {$(
        struct $name;
        impl HalfFn for $name {
            const ARITY: usize = $arity;
            #[inline(always)]
            fn apply<$n: Narrow>($a: u16, $b: u16, $c: u16) -> u16 {
                $body
            }
        }
    )*};
}

half_fns! {
    Add 2 <N>(a, b, _c) N::add(a, b);
    Sub 2 <N>(a, b, _c) N::sub(a, b);
    Mul 2 <N>(a, b, _c) N::mul(a, b);
    Fma 3 <N>(a, b, c) N::fma(a, b, c);
    Neg 1 <N>(a, _b, _c) a ^ 0x8000;
    Abs 1 <N>(a, _b, _c) a & 0x7FFF;
    Min 2 <N>(a, b, _c) extreme::<N>(a, b, float::min);
    Max 2 <N>(a, b, _c) extreme::<N>(a, b, float::max);
    MinNan 2 <N>(a, b, _c) extreme::<N>(a, b, float::min_nan);
    MaxNan 2 <N>(a, b, _c) extreme::<N>(a, b, float::max_nan);
    MinXor 2 <N>(a, b, _c) extreme::<N>(a, b, |a, b| float::xorsign_abs(a, b, float::min));
    MaxXor 2 <N>(a, b, _c) extreme::<N>(a, b, |a, b| float::xorsign_abs(a, b, float::max));
    MinNanXor 2 <N>(a, b, _c) extreme::<N>(a, b, |a, b| float::xorsign_abs(a, b, float::min_nan));
    MaxNanXor 2 <N>(a, b, _c) extreme::<N>(a, b, |a, b| float::xorsign_abs(a, b, float::max_nan));
    Ex2 1 <N>(a, _b, _c) N::narrow(approx::ex2(N::widen(a)));
    Tanh 1 <N>(a, _b, _c) N::narrow(approx::tanh(N::widen(a)));
}

#[inline(always)]
fn extreme<N: Narrow>(a: u16, b: u16, f: impl Fn(f32, f32) -> f32) -> u16 {
    N::narrow(f(N::widen(a), N::widen(b)))
}

/// Modifiers, as bits of `MODS`.
const FTZ: u8 = 1;
const SAT: u8 = 2;
const RELU: u8 = 4;

/// F on each half of a register (`X2`), or on its low half.
struct HalfMap<N, F, const X2: bool, const MODS: u8>(PhantomData<(N, F)>);

impl<N: Narrow, F: HalfFn, const X2: bool, const MODS: u8> HalfMap<N, F, X2, MODS> {
    #[inline(always)]
    fn one(a: u16, b: u16, c: u16) -> u16 {
        let mut y = if MODS & FTZ != 0 {
            flush::<N>(F::apply::<N>(flush::<N>(a), flush::<N>(b), flush::<N>(c)))
        } else {
            F::apply::<N>(a, b, c)
        };
        if MODS & SAT != 0 {
            y = N::narrow(float::saturate(N::widen(y)));
        }
        // NaN passes `.relu`, as the canonical one.
        if MODS & RELU != 0 && y & 0x8000 != 0 {
            y = if N::widen(y).is_nan() { NAN } else { 0 };
        }
        y
    }
}

/// Subnormals become zeros of their sign.
#[inline(always)]
fn flush<N: Narrow>(x: u16) -> u16 {
    let least_normal = N::narrow(if N::FORMAT == crate::math::soft::F16 {
        6.103_515_6e-5
    } else {
        f32::MIN_POSITIVE
    });
    if x & 0x7FFF < least_normal { x & 0x8000 } else { x }
}

impl<N: Narrow, F: HalfFn, const X2: bool, const MODS: u8> Op for HalfMap<N, F, X2, MODS> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, …], as many 32-bit slots as F has arguments (the selector).
        unsafe {
            // A function of fewer reads one of its operands again, in vain.
            let a = u32::read(warp, inst.op[1]);
            let b = u32::read(warp, inst.op[F::ARITY.min(2)]);
            let c = u32::read(warp, inst.op[F::ARITY]);
            let mut out = [0u32; WARP];
            for lane in 0..WARP {
                out[lane] = Self::one(a[lane] as u16, b[lane] as u16, c[lane] as u16).into();
            }
            if X2 {
                for lane in 0..WARP {
                    let upper = |row: &[u32; WARP]| (row[lane] >> 16) as u16;
                    let high = Self::one(upper(&a), upper(&b), upper(&c));
                    out[lane] |= u32::from(high) << 16;
                }
            }
            u32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// The operand list of F.
fn args<F: HalfFn>(ty: Type) -> Vec<Arg> {
    let mut args = vec![Arg::Dst(ty)];
    args.extend((0..F::ARITY).map(|_| Arg::Src(ty)));
    args
}

/// [`HalfMap`] for an operand type and constant modifiers, made by one of `Selected`'s functions.
macro_rules! by_format {
    ($make:ident, $f:ty, $mods:literal, $ty:expr) => {
        match $ty {
            Type::F16 => Some($make::<HalfMap<Half, $f, false, $mods>>(args::<$f>($ty))),
            Type::F16x2 => Some($make::<HalfMap<Half, $f, true, $mods>>(args::<$f>($ty))),
            Type::Bf16 => Some($make::<HalfMap<Brain, $f, false, $mods>>(args::<$f>($ty))),
            Type::Bf16x2 => Some($make::<HalfMap<Brain, $f, true, $mods>>(args::<$f>($ty))),
            _ => None,
        }
    };
}

fn fast<O: Op>(args: Vec<Arg>) -> Selected {
    Selected::new::<O>(args)
}

fn avx2<O: Op>(args: Vec<Arg>) -> Selected {
    Selected { handlers: Handlers::avx2::<O>(), args, imm: 0, aux: 0 }
}

fn scalar<O: Op>(args: Vec<Arg>) -> Selected {
    Selected::scalar::<O>(args)
}

/// Arithmetic, with any modifiers.
fn arithmetic<F: HalfFn>(ty: Type, mods: u8) -> Option<Selected> {
    match mods {
        0 => by_format!(fast, F, 0, ty),
        FTZ => by_format!(scalar, F, 1, ty),
        SAT => by_format!(scalar, F, 2, ty),
        3 => by_format!(scalar, F, 3, ty),
        RELU => by_format!(scalar, F, 4, ty),
        5 => by_format!(scalar, F, 5, ty),
        _ => None,
    }
}

/// Without modifiers other than `.ftz`.
fn plain<F: HalfFn>(ty: Type, mods: u8) -> Option<Selected> {
    match mods {
        0 => by_format!(avx2, F, 0, ty),
        FTZ => by_format!(scalar, F, 1, ty),
        _ => None,
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    if !matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2) {
        return None;
    }
    let mut mods = 0;
    for (name, bit) in [("ftz", FTZ), ("sat", SAT), ("relu", RELU)] {
        mods |= if parts.take(name) { bit } else { 0 };
    }
    let _nearest = parts.take("rn");
    let approximate = parts.take("approx");
    let nan = parts.take("NaN");
    let xorsign = parts.take("xorsign");
    if xorsign != parts.take("abs") || !parts.done() {
        return None;
    }
    match (query.part(0), nan, xorsign) {
        ("add", false, false) => arithmetic::<Add>(ty, mods),
        ("sub", false, false) => arithmetic::<Sub>(ty, mods),
        ("mul", false, false) => arithmetic::<Mul>(ty, mods),
        ("fma", false, false) => arithmetic::<Fma>(ty, mods),
        ("neg", false, false) => plain::<Neg>(ty, mods),
        ("abs", false, false) => plain::<Abs>(ty, mods),
        ("min", false, false) => plain::<Min>(ty, mods),
        ("max", false, false) => plain::<Max>(ty, mods),
        ("min", true, false) => plain::<MinNan>(ty, mods),
        ("max", true, false) => plain::<MaxNan>(ty, mods),
        ("min", false, true) => plain::<MinXor>(ty, mods),
        ("max", false, true) => plain::<MaxXor>(ty, mods),
        ("min", true, true) => plain::<MinNanXor>(ty, mods),
        ("max", true, true) => plain::<MaxNanXor>(ty, mods),
        ("ex2", false, false) if approximate => plain::<Ex2>(ty, mods),
        ("tanh", false, false) if approximate => plain::<Tanh>(ty, mods),
        _ => None,
    }
}
