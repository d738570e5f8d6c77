//! Comparison and selection: `setp`, `set`, `selp`, `slct`, `testp`.

use super::lanewise::{Parts, Typed, by_bits, lane_fns};
use super::{Arg, Flow, Handlers, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::float::flush;
use crate::math::narrow::{Brain, Half, Narrow};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};
use std::marker::PhantomData;

/// A comparison operator.
pub(crate) trait Relation: 'static {
    fn holds<K: PartialOrd>(a: &K, b: &K) -> bool;
}

macro_rules! relations {
    ($($name:ident |$a:ident, $b:ident| $holds:expr;)*) => {$(
        pub(crate) struct $name;
        impl Relation for $name {
            #[allow(
                clippy::double_comparisons,
                clippy::eq_op,
                clippy::neg_cmp_op_on_partial_ord,
                clippy::nonminimal_bool,
                reason = "NaN: x == x fails, and a relation's denial is not its opposite"
            )]
            #[inline(always)]
            fn holds<K: PartialOrd>($a: &K, $b: &K) -> bool {
                $holds
            }
        }
    )*};
}

// The unordered ones hold when an operand is NaN: they deny the opposite relation.
relations! {
    Eq |a, b| a == b;
    Ne |a, b| a == a && b == b && a != b;
    Lt |a, b| a < b;
    Le |a, b| a <= b;
    Gt |a, b| a > b;
    Ge |a, b| a >= b;
    Equ |a, b| !(a < b || a > b);
    Neu |a, b| !(a == b);
    Ltu |a, b| !(a >= b);
    Leu |a, b| !(a > b);
    Gtu |a, b| !(a <= b);
    Geu |a, b| !(a < b);
    Num |a, b| a == a && b == b;
    Nan |a, b| a != a || b != b;
}

/// What is compared: a lane's type, and its value for comparison.
pub(crate) trait Comparand: 'static {
    type Lane: Typed;
    type Key: PartialOrd;
    /// Whether comparisons are common enough for an AVX-512 form.
    const COMMON: bool;
    fn key(lane: Self::Lane) -> Self::Key;

    fn selected<R: Relation>(args: Vec<Arg>) -> Selected
    where
        Self: Sized,
    {
        let handlers = const {
            if Self::COMMON {
                Handlers::of::<Compare<Self, R>>()
            } else {
                Handlers::avx2::<Compare<Self, R>>()
            }
        };
        Selected { handlers, args, imm: 0, aux: 0 }
    }
}

macro_rules! comparands {
    ($($name:ident $lane:ident -> $key:ident, $common:literal, $of:expr;)*) => {$(
        pub(crate) struct $name;
        impl Comparand for $name {
            type Lane = $lane;
            type Key = $key;
            const COMMON: bool = $common;
            #[inline(always)]
            fn key(lane: $lane) -> $key {
                let of: fn($lane) -> $key = $of;
                of(lane)
            }
        }
    )*};
}

comparands! {
    U16 u16 -> u16, false, |a| a;
    S16 i16 -> i16, false, |a| a;
    U32 u32 -> u32, true, |a| a;
    S32 i32 -> i32, true, |a| a;
    U64 u64 -> u64, true, |a| a;
    S64 i64 -> i64, true, |a| a;
    F32 f32 -> f32, true, |a| a;
    F32Ftz f32 -> f32, false, flush;
    F64 f64 -> f64, true, |a| a;
    F16 u16 -> f32, false, Half::widen;
    Bf16 u16 -> f32, false, Brain::widen;
}

/// Bit `lane` is `holds(lane)`.
#[inline(always)]
pub(crate) fn lane_mask(holds: impl Fn(usize) -> bool) -> u32 {
    let mut bytes = [0u8; WARP];
    for lane in 0..WARP {
        bytes[lane] = if holds(lane) { 0xFF } else { 0 };
    }
    movemask(&bytes)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn movemask(bytes: &[u8; WARP]) -> u32 {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_movemask_epi8};
    // SAFETY: SSE2 is part of x86-64; both loads stay inside the 32 bytes.
    let half = |at: usize| unsafe {
        _mm_movemask_epi8(_mm_loadu_si128(bytes.as_ptr().add(at).cast())) as u32
    };
    half(0) | half(16) << 16
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn movemask(bytes: &[u8; WARP]) -> u32 {
    bytes.iter().rev().fold(0, |mask, byte| mask << 1 | u32::from(byte >> 7))
}

/// `aux` of `setp` and `set`: how the result combines with a predicate operand.
const COMBINE: u32 = 3;
/// `aux` of `setp`: there is a second destination.
const DUAL: u32 = 4;
/// `aux` of `set`: the destination is a register.
const TO_REGISTER: u32 = 16;

/// (result, its complement combined the same way).
#[inline(always)]
unsafe fn combined(warp: &Warp, aux: u32, slot: i32, holds: u32) -> (u32, u32) {
    if aux & COMBINE == 0 {
        return (holds, !holds);
    }
    // SAFETY: with a combination, the selector gave a predicate operand at `slot`.
    let other = unsafe { warp.pred(slot) };
    match aux & COMBINE {
        1 => (holds & other, !holds & other),
        2 => (holds | other, !holds | other),
        _ => (holds ^ other, !holds ^ other),
    }
}

/// The lanes where R holds between the operands at `slots`.
#[inline(always)]
unsafe fn compare<C: Comparand, R: Relation>(warp: &Warp, a: i32, b: i32) -> u32 {
    // SAFETY: both are operands in C's bank (the caller's contract).
    let (a, b) = unsafe { (C::Lane::read(warp, a), C::Lane::read(warp, b)) };
    lane_mask(|lane| R::holds(&C::key(a[lane]), &C::key(b[lane])))
}

/// `setp p{|q}, a, b{, c}`, and `set.dtype d, a, b{, c}`: `imm` where it holds, else 0.
struct Compare<C, R>(PhantomData<(C, R)>);

impl<C: Comparand, R: Relation> Op for Compare<C, R> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let dual = inst.aux & DUAL != 0;
        let first = if dual { 2 } else { 1 };
        // SAFETY: op = [p, a, b, c], [p, q, a, b, c] or [d, a, b, c] (the selector).
        unsafe {
            let holds = compare::<C, R>(warp, inst.op[first], inst.op[first + 1]);
            let (p, q) = combined(warp, inst.aux, inst.op[first + 2], holds);
            if inst.aux & TO_REGISTER != 0 {
                set_register(warp, inst, mask, p);
                return Flow::Next;
            }
            warp.set_pred(inst.op[0], p, mask);
            if dual {
                warp.set_pred(inst.op[1], q, mask);
            }
        }
        Flow::Next
    }
}

/// `set`'s result. Every destination is in the 32-bit bank.
///
/// # Safety
/// op[0] is a destination there.
#[inline(never)]
unsafe fn set_register(warp: &mut Warp, inst: &Inst, mask: u32, holds: u32) {
    let out: [u32; WARP] =
        std::array::from_fn(|lane| 0u32.wrapping_sub(holds >> lane & 1) & inst.imm as u32);
    // SAFETY: the caller's contract.
    unsafe { u32::write(warp, inst.op[0], &out, mask) };
}

/// Two halves a lane: `setp.f16x2 p|q` (one predicate for each half), `set.f16x2.f16x2` (`imm`: the
/// pattern of a half where it holds; `aux` bit 4 tells it from `setp`).
struct Halves<N, R>(PhantomData<(N, R)>);

impl<N: Narrow, R: Relation> Op for Halves<N, R> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let register = inst.aux & TO_REGISTER != 0;
        let first = if register { 1 } else { 2 };
        // SAFETY: op = [d, a, b, c] or [p, q, a, b, c] (the selector), a and b 32-bit.
        unsafe {
            let a = u32::read(warp, inst.op[first]);
            let b = u32::read(warp, inst.op[first + 1]);
            let half = |shift: u32| {
                lane_mask(|lane| {
                    let key = |row: &[u32; WARP]| N::widen((row[lane] >> shift) as u16);
                    R::holds(&key(&a), &key(&b))
                })
            };
            let (low, _) = combined(warp, inst.aux, inst.op[first + 2], half(0));
            let (high, _) = combined(warp, inst.aux, inst.op[first + 2], half(16));
            if register {
                let mut out = [0u32; WARP];
                for lane in 0..WARP {
                    let pick = |bits: u32| 0u32.wrapping_sub(bits >> lane & 1) & inst.imm as u32;
                    out[lane] = pick(low) | pick(high) << 16;
                }
                u32::write(warp, inst.op[0], &out, mask);
            } else {
                warp.set_pred(inst.op[0], low, mask);
                warp.set_pred(inst.op[1], high, mask);
            }
        }
        Flow::Next
    }
}

/// Something that is made for each relation.
trait Visitor {
    fn visit<R: Relation>(self) -> Selected;
}

/// Calls `visitor` with the relation named `name`; `lo`, `ls`, `hi`, `hs` are for integers.
fn with_relation(name: &str, float: bool, visitor: impl Visitor) -> Option<Selected> {
    Some(match name {
        "eq" => visitor.visit::<Eq>(),
        "ne" => visitor.visit::<Ne>(),
        "lt" => visitor.visit::<Lt>(),
        "le" => visitor.visit::<Le>(),
        "gt" => visitor.visit::<Gt>(),
        "ge" => visitor.visit::<Ge>(),
        "lo" if !float => visitor.visit::<Lt>(),
        "ls" if !float => visitor.visit::<Le>(),
        "hi" if !float => visitor.visit::<Gt>(),
        "hs" if !float => visitor.visit::<Ge>(),
        _ => return None,
    })
}

/// As [`with_relation`], with the relations that tell NaN.
fn with_float_relation(name: &str, visitor: impl Visitor) -> Option<Selected> {
    Some(match name {
        "equ" => visitor.visit::<Equ>(),
        "neu" => visitor.visit::<Neu>(),
        "ltu" => visitor.visit::<Ltu>(),
        "leu" => visitor.visit::<Leu>(),
        "gtu" => visitor.visit::<Gtu>(),
        "geu" => visitor.visit::<Geu>(),
        "num" => visitor.visit::<Num>(),
        "nan" => visitor.visit::<Nan>(),
        _ => return with_relation(name, true, visitor),
    })
}

/// Makes the handler of one comparison, once its operand type is known.
struct Build<C> {
    /// `set`'s destination; None: `setp`.
    dst: Option<Type>,
    /// 0 none, 1 and, 2 or, 3 xor.
    combine: u32,
    dual: bool,
    of: PhantomData<C>,
}

impl<C> Build<C> {
    /// The operand list after the destinations.
    fn args(&self, source: Type, dst: &[Arg]) -> Vec<Arg> {
        let mut args = dst.to_vec();
        args.extend([Arg::Src(source), Arg::Src(source)]);
        if self.combine != 0 {
            args.push(Arg::Src(Type::Pred));
        }
        args
    }

    fn pred_dst(&self) -> &'static [Arg] {
        const PRED: Arg = Arg::Dst(Type::Pred);
        if self.dual { &[PRED, PRED] } else { &[PRED] }
    }
}

impl<C: Comparand> Visitor for Build<C> {
    fn visit<R: Relation>(self) -> Selected {
        let source = <C::Lane as Typed>::TYPE;
        let Some(dst) = self.dst else {
            let args = self.args(source, self.pred_dst());
            let dual = if self.dual { DUAL } else { 0 };
            return C::selected::<R>(args).aux(self.combine | dual);
        };
        let args = self.args(source, &[Arg::Dst(dst)]);
        let yes = match dst {
            Type::F32 => u64::from(1f32.to_bits()),
            Type::F16 => 0x3C00,
            Type::Bf16 => 0x3F80,
            Type::U16 | Type::S16 => 0xFFFF,
            _ => 0xFFFF_FFFF,
        };
        C::selected::<R>(args).imm(yes).aux(self.combine | TO_REGISTER)
    }
}

/// [`Build`] for two halves.
struct BuildHalves<N>(Build<N>);

impl<N: Narrow> Visitor for BuildHalves<N> {
    fn visit<R: Relation>(self) -> Selected {
        let build = self.0;
        match build.dst {
            None => {
                let args = build.args(Type::B32, build.pred_dst());
                Selected::scalar::<Halves<N, R>>(args).aux(build.combine)
            }
            Some(dst) => {
                let args = build.args(Type::B32, &[Arg::Dst(Type::B32)]);
                let yes = match dst {
                    Type::F16x2 => 0x3C00,
                    Type::Bf16x2 => 0x3F80,
                    _ => 0xFFFF,
                };
                let selected = Selected::scalar::<Halves<N, R>>(args);
                selected.imm(yes).aux(build.combine | TO_REGISTER)
            }
        }
    }
}

/// `setp.CmpOp{.BoolOp}{.ftz}.type`, `set.CmpOp{.BoolOp}{.ftz}.dtype.type`. gcc writes `dtype`
/// first, which ptxas takes.
fn comparison(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    let set = query.part(0) == "set";
    let dst = if set { Some(parts.take_type().or_else(|| parts.take_first_type())?) } else { None };
    let relation = parts.take_first()?;
    let combine = parts
        .take_map(|part| ["and", "or", "xor"].iter().position(|p| *p == part))
        .map_or(0, |index| index as u32 + 1);
    let ftz = parts.take("ftz");
    if !parts.done() {
        return None;
    }
    let dual = matches!(query.operand(0)?, Operand::Pair(..));
    macro_rules! build {
        ($c:ident) => {
            Build::<$c> { dst, combine, dual, of: PhantomData }
        };
    }
    match ty {
        Type::B16 | Type::U16 => with_relation(relation, false, build!(U16)),
        Type::S16 => with_relation(relation, false, build!(S16)),
        Type::B32 | Type::U32 => with_relation(relation, false, build!(U32)),
        Type::S32 => with_relation(relation, false, build!(S32)),
        Type::B64 | Type::U64 => with_relation(relation, false, build!(U64)),
        Type::S64 => with_relation(relation, false, build!(S64)),
        Type::F32 if ftz => with_float_relation(relation, build!(F32Ftz)),
        Type::F32 => with_float_relation(relation, build!(F32)),
        Type::F64 => with_float_relation(relation, build!(F64)),
        Type::F16 => with_float_relation(relation, build!(F16)),
        Type::Bf16 => with_float_relation(relation, build!(Bf16)),
        Type::F16x2 => with_float_relation(relation, BuildHalves(build!(Half))),
        Type::Bf16x2 => with_float_relation(relation, BuildHalves(build!(Brain))),
        _ => None,
    }
}

/// `selp d, a, b, p`.
struct Selp<T>(PhantomData<T>);

impl<T: Typed> Op for Selp<T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, b, p] (the selector).
        unsafe {
            let (a, b) = (T::read(warp, inst.op[1]), T::read(warp, inst.op[2]));
            let pick = warp.pred(inst.op[3]);
            let mut out = [T::default(); WARP];
            for lane in 0..WARP {
                out[lane] = if pick >> lane & 1 != 0 { a[lane] } else { b[lane] };
            }
            T::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

fn selp(parts: &mut Parts<'_>) -> Option<Selected> {
    let ty = parts.take_type()?;
    let args = |ty| [Arg::Dst(ty), Arg::Src(ty), Arg::Src(ty), Arg::Src(Type::Pred)];
    if !parts.done() {
        return None;
    }
    Some(match (ty, ty.size()) {
        (Type::Pred | Type::B8 | Type::U8 | Type::S8, _) => return None,
        (_, 2) => Selected::new::<Selp<u16>>(args(ty)),
        (_, 4) => Selected::new::<Selp<u32>>(args(ty)),
        (_, 8) => Selected::new::<Selp<u64>>(args(ty)),
        _ => return None,
    })
}

lane_fns! {
    <T: Copy> SlctS32(a: T, b: T, c: i32) -> T { if c >= 0 { a } else { b } }
    <T: Copy> SlctF32(a: T, b: T, c: f32) -> T { if c >= 0.0 { a } else { b } }
    <T: Copy> SlctFtz(a: T, b: T, c: f32) -> T { if flush(c) >= 0.0 { a } else { b } }
}

fn slct(parts: &mut Parts<'_>) -> Option<Selected> {
    let by = parts.take_type()?;
    let ty = parts.take_type()?;
    let ftz = parts.take("ftz");
    if !parts.done() {
        return None;
    }
    let ty = match ty.size() {
        2 => Type::B16,
        4 => Type::B32,
        8 => Type::B64,
        _ => return None,
    };
    match by {
        Type::S32 => by_bits!(ty, SlctS32),
        Type::F32 if ftz => by_bits!(ty, SlctFtz),
        Type::F32 => by_bits!(ty, SlctF32),
        _ => None,
    }
}

/// `testp.op p, a`: `aux` is the position in [`TESTS`].
struct Testp<T>(PhantomData<T>);

const TESTS: [&str; 6] = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"];

impl<T: Typed + Into<f64>> Op for Testp<T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let single = T::TYPE == Type::F32;
        // SAFETY: op = [p, a] (the selector).
        unsafe {
            let a = T::read(warp, inst.op[1]);
            let holds = lane_mask(|lane| {
                let value: f64 = a[lane].into();
                let least = if single { f64::from(f32::MIN_POSITIVE) } else { f64::MIN_POSITIVE };
                let tiny = value.abs() < least;
                match inst.aux {
                    0 => value.is_finite(),
                    1 => value.is_infinite(),
                    2 => !value.is_nan(),
                    3 => value.is_nan(),
                    // Zero counts as normal.
                    4 => value.is_finite() && (value == 0.0 || !tiny),
                    _ => value != 0.0 && tiny,
                }
            });
            warp.set_pred(inst.op[0], holds, mask);
        }
        Flow::Next
    }
}

fn testp(parts: &mut Parts<'_>) -> Option<Selected> {
    let ty = parts.take_type()?;
    let test = parts.take_map(|part| TESTS.iter().position(|test| *test == part))?;
    let args = [Arg::Dst(Type::Pred), Arg::Src(ty)];
    let selected = match ty {
        Type::F32 => Selected::scalar::<Testp<f32>>(args),
        Type::F64 => Selected::scalar::<Testp<f64>>(args),
        _ => return None,
    };
    parts.done().then(|| selected.aux(test as u32))
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(0) {
        "setp" | "set" => comparison(query),
        "selp" => selp(&mut Parts::of(query)),
        "slct" => slct(&mut Parts::of(query)),
        "testp" => testp(&mut Parts::of(query)),
        _ => None,
    }
}
