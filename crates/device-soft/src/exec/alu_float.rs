//! Floating-point arithmetic on f32 and f64.

use super::lanewise::{
    Flush, Ftz, LaneFn, Parts, Sat, lane_fns, lanes, lanes_ftz, lanes_ftz_avx2, lanes_sat,
    lanes_scalar,
};
use super::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::float::{self, canonical};
use crate::math::soft::Rounding;
use crate::math::{approx, directed};
use crate::spec::WARP;
use kedge_ptx::ast::Type;

lane_fns! {
    AddF32(a: f32, b: f32) -> f32 { canonical(a + b) }
    SubF32(a: f32, b: f32) -> f32 { canonical(a - b) }
    MulF32(a: f32, b: f32) -> f32 { canonical(a * b) }
    FmaF32(a: f32, b: f32, c: f32) -> f32 { canonical(a.mul_add(b, c)) }
    DivF32(a: f32, b: f32) -> f32 { canonical(a / b) }
    RcpF32(a: f32) -> f32 { canonical(1.0 / a) }
    SqrtF32(a: f32) -> f32 { canonical(a.sqrt()) }
    RsqrtF32(a: f32) -> f32 { canonical(approx::rsqrt(a)) }
    Ex2F32(a: f32) -> f32 { canonical(approx::ex2(a)) }
    Lg2F32(a: f32) -> f32 { canonical(approx::lg2(a)) }
    TanhF32(a: f32) -> f32 { canonical(approx::tanh(a)) }
    AbsF32(a: f32) -> f32 { a.abs() }
    NegF32(a: f32) -> f32 { -a }
    MinF32(a: f32, b: f32) -> f32 { float::min(a, b) }
    MaxF32(a: f32, b: f32) -> f32 { float::max(a, b) }
    MinNanF32(a: f32, b: f32) -> f32 { float::min_nan(a, b) }
    MaxNanF32(a: f32, b: f32) -> f32 { float::max_nan(a, b) }
    MinXorF32(a: f32, b: f32) -> f32 { float::xorsign_abs(a, b, float::min) }
    MaxXorF32(a: f32, b: f32) -> f32 { float::xorsign_abs(a, b, float::max) }
    MinNanXorF32(a: f32, b: f32) -> f32 { float::xorsign_abs(a, b, float::min_nan) }
    MaxNanXorF32(a: f32, b: f32) -> f32 { float::xorsign_abs(a, b, float::max_nan) }
    Min3F32(a: f32, b: f32, c: f32) -> f32 { float::min(float::min(a, b), c) }
    Max3F32(a: f32, b: f32, c: f32) -> f32 { float::max(float::max(a, b), c) }
    Min3NanF32(a: f32, b: f32, c: f32) -> f32 { float::min_nan(float::min_nan(a, b), c) }
    Max3NanF32(a: f32, b: f32, c: f32) -> f32 { float::max_nan(float::max_nan(a, b), c) }
    /// The sign of `a` on the magnitude of `b`.
    CopysignF32(a: f32, b: f32) -> f32 { b.copysign(a) }

    AddF64(a: f64, b: f64) -> f64 { a + b }
    SubF64(a: f64, b: f64) -> f64 { a - b }
    MulF64(a: f64, b: f64) -> f64 { a * b }
    FmaF64(a: f64, b: f64, c: f64) -> f64 { a.mul_add(b, c) }
    DivF64(a: f64, b: f64) -> f64 { a / b }
    RcpF64(a: f64) -> f64 { 1.0 / a }
    SqrtF64(a: f64) -> f64 { a.sqrt() }
    RsqrtF64(a: f64) -> f64 { 1.0 / a.sqrt() }
    AbsF64(a: f64) -> f64 { a.abs() }
    NegF64(a: f64) -> f64 { -a }
    MinF64(a: f64, b: f64) -> f64 { float::min(a, b) }
    MaxF64(a: f64, b: f64) -> f64 { float::max(a, b) }
    CopysignF64(a: f64, b: f64) -> f64 { b.copysign(a) }
}

/// The directed forms of one operation: a lane function for each rounding.
macro_rules! directed {
    ($($ty:ident $add:ident $sub:ident $mul:ident $fma:ident $div:ident $rcp:ident $sqrt:ident:
        $rounding:ident, $addf:ident $mulf:ident $fmaf:ident $divf:ident $sqrtf:ident;)*) => {
        lane_fns! {$(
            $add(a: $ty, b: $ty) -> $ty { directed::$addf(a, b, Rounding::$rounding) }
            $sub(a: $ty, b: $ty) -> $ty { directed::$addf(a, -b, Rounding::$rounding) }
            $mul(a: $ty, b: $ty) -> $ty { directed::$mulf(a, b, Rounding::$rounding) }
            $fma(a: $ty, b: $ty, c: $ty) -> $ty { directed::$fmaf(a, b, c, Rounding::$rounding) }
            $div(a: $ty, b: $ty) -> $ty { directed::$divf(a, b, Rounding::$rounding) }
            $rcp(a: $ty) -> $ty { directed::$divf(1.0, a, Rounding::$rounding) }
            $sqrt(a: $ty) -> $ty { directed::$sqrtf(a, Rounding::$rounding) }
        )*}
    };
}

directed! {
    f32 AddF32Z SubF32Z MulF32Z FmaF32Z DivF32Z RcpF32Z SqrtF32Z:
        Zero, add_f32 mul_f32 fma_f32 div_f32 sqrt_f32;
    f32 AddF32D SubF32D MulF32D FmaF32D DivF32D RcpF32D SqrtF32D:
        Down, add_f32 mul_f32 fma_f32 div_f32 sqrt_f32;
    f32 AddF32U SubF32U MulF32U FmaF32U DivF32U RcpF32U SqrtF32U:
        Up, add_f32 mul_f32 fma_f32 div_f32 sqrt_f32;
    f64 AddF64Z SubF64Z MulF64Z FmaF64Z DivF64Z RcpF64Z SqrtF64Z:
        Zero, add_f64 mul_f64 fma_f64 div_f64 sqrt_f64;
    f64 AddF64D SubF64D MulF64D FmaF64D DivF64D RcpF64D SqrtF64D:
        Down, add_f64 mul_f64 fma_f64 div_f64 sqrt_f64;
    f64 AddF64U SubF64U MulF64U FmaF64U DivF64U RcpF64U SqrtF64U:
        Up, add_f64 mul_f64 fma_f64 div_f64 sqrt_f64;
}

/// `sin.approx` and, with `COS`, `cos.approx`; `aux` 1: `.ftz`. Lanes with large arguments are done
/// again.
struct Wave<const COS: bool>;

impl<const COS: bool> Op for Wave<COS> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a], 32-bit slots (the selector).
        unsafe {
            let mut a = f32::read(warp, inst.op[1]);
            if inst.aux != 0 {
                a = a.map(float::flush);
            }
            let mut out = [0f32; WARP];
            let mut far = false;
            for lane in 0..WARP {
                out[lane] =
                    canonical(if COS { approx::cos(a[lane]) } else { approx::sin(a[lane]) });
                far |= approx::is_far(a[lane]);
            }
            if far {
                for (out, a) in out.iter_mut().zip(a).filter(|(_, a)| approx::is_far(*a)) {
                    *out = canonical(if COS { approx::far_cos(a) } else { approx::far_sin(a) });
                }
            }
            if inst.aux != 0 {
                out = out.map(float::flush);
            }
            f32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let opcode = query.part(0);
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    match ty {
        Type::F32 => select_f32(opcode, &mut parts, query),
        Type::F64 => select_f64(opcode, &mut parts),
        _ => None,
    }
}

fn select_f32(opcode: &str, parts: &mut Parts<'_>, query: &Query<'_>) -> Option<Selected> {
    let ftz = parts.take("ftz");
    let sat = parts.take("sat");
    if matches!(opcode, "min" | "max") && !sat {
        let three = query.instruction.operands.len() == 4;
        return extreme_f32(opcode == "min", parts, ftz, three);
    }
    let rounding = parts.rounding();
    let approximate = parts.take("approx") || parts.take("full");
    if !parts.done() {
        return None;
    }
    use Rounding::{Down, Nearest, Up, Zero};
    let nearest = rounding.is_none() || rounding == Some(Nearest);
    if nearest {
        match opcode {
            "add" => return Some(lanes_sat::<AddF32>(ftz, sat)),
            "sub" => return Some(lanes_sat::<SubF32>(ftz, sat)),
            "mul" => return Some(lanes_sat::<MulF32>(ftz, sat)),
            // `mad` has been a fused operation since sm_20.
            "fma" | "mad" => return Some(lanes_sat::<FmaF32>(ftz, sat)),
            _ if sat => return None,
            "div" => return Some(lanes_ftz::<DivF32>(ftz)),
            "rcp" => return Some(lanes_ftz::<RcpF32>(ftz)),
            "sqrt" => return Some(lanes_ftz::<SqrtF32>(ftz)),
            _ => {}
        }
    }
    let Some(rounding) = rounding else { return unary_f32(opcode, ftz, sat, approximate) };
    Some(match (opcode, rounding) {
        ("add", Zero) => directed_f32::<AddF32Z>(ftz, sat),
        ("add", Down) => directed_f32::<AddF32D>(ftz, sat),
        ("add", Up) => directed_f32::<AddF32U>(ftz, sat),
        ("sub", Zero) => directed_f32::<SubF32Z>(ftz, sat),
        ("sub", Down) => directed_f32::<SubF32D>(ftz, sat),
        ("sub", Up) => directed_f32::<SubF32U>(ftz, sat),
        ("mul", Zero) => directed_f32::<MulF32Z>(ftz, sat),
        ("mul", Down) => directed_f32::<MulF32D>(ftz, sat),
        ("mul", Up) => directed_f32::<MulF32U>(ftz, sat),
        ("fma" | "mad", Zero) => directed_fma::<FmaF32Z>(ftz, sat),
        ("fma" | "mad", Down) => directed_fma::<FmaF32D>(ftz, sat),
        ("fma" | "mad", Up) => directed_fma::<FmaF32U>(ftz, sat),
        _ if sat => return None,
        ("div", Zero) => rare_f32::<DivF32Z>(ftz),
        ("div", Down) => rare_f32::<DivF32D>(ftz),
        ("div", Up) => rare_f32::<DivF32U>(ftz),
        ("rcp", Zero) => rare_f32::<RcpF32Z>(ftz),
        ("rcp", Down) => rare_f32::<RcpF32D>(ftz),
        ("rcp", Up) => rare_f32::<RcpF32U>(ftz),
        ("sqrt", Zero) => rare_f32::<SqrtF32Z>(ftz),
        ("sqrt", Down) => rare_f32::<SqrtF32D>(ftz),
        ("sqrt", Up) => rare_f32::<SqrtF32U>(ftz),
        _ => return None,
    })
}

/// A directed form that works through double precision.
fn directed_f32<F: LaneFn<Out = f32>>(ftz: bool, sat: bool) -> Selected
where
    F::In: Flush,
{
    match (ftz, sat) {
        (_, false) => lanes_ftz_avx2::<F>(ftz),
        (false, true) => lanes_scalar::<Sat<F>>(),
        (true, true) => lanes_scalar::<Sat<Ftz<F>>>(),
    }
}

/// [`directed_f32`] for `fma`, which `expf` uses.
fn directed_fma<F: LaneFn<Out = f32>>(ftz: bool, sat: bool) -> Selected
where
    F::In: Flush,
{
    if sat { directed_f32::<F>(ftz, sat) } else { lanes_ftz::<F>(ftz) }
}

/// A directed form that works in integers, lane by lane.
fn rare_f32<F: LaneFn<Out = f32>>(ftz: bool) -> Selected
where
    F::In: Flush,
{
    if ftz { lanes_scalar::<Ftz<F>>() } else { lanes_scalar::<F>() }
}

/// Functions of one operand, and `copysign`.
fn unary_f32(opcode: &str, ftz: bool, sat: bool, approximate: bool) -> Option<Selected> {
    let unary = [Arg::Dst(Type::F32), Arg::Src(Type::F32)];
    Some(match (opcode, approximate) {
        _ if sat => return None,
        ("rsqrt", true) => lanes_ftz::<RsqrtF32>(ftz),
        ("sin", true) => Selected::new::<Wave<false>>(unary).aux(ftz.into()),
        ("cos", true) => Selected::new::<Wave<true>>(unary).aux(ftz.into()),
        ("ex2", true) => lanes_ftz::<Ex2F32>(ftz),
        ("lg2", true) => lanes_ftz::<Lg2F32>(ftz),
        ("tanh", true) => lanes_ftz_avx2::<TanhF32>(ftz),
        ("abs", false) => lanes_ftz::<AbsF32>(ftz),
        ("neg", false) => lanes_ftz::<NegF32>(ftz),
        ("copysign", false) if !ftz => lanes::<CopysignF32>(),
        _ => return None,
    })
}

/// `min` and `max` with `.NaN`, `.xorsign.abs` or a third operand.
fn extreme_f32(min: bool, parts: &mut Parts<'_>, ftz: bool, three: bool) -> Option<Selected> {
    let nan = parts.take("NaN");
    let xorsign = parts.take("xorsign");
    if xorsign != parts.take("abs") || !parts.done() {
        return None;
    }
    Some(match (min, nan, xorsign, three) {
        (true, false, false, false) => lanes_ftz::<MinF32>(ftz),
        (false, false, false, false) => lanes_ftz::<MaxF32>(ftz),
        (true, true, false, false) => lanes_ftz_avx2::<MinNanF32>(ftz),
        (false, true, false, false) => lanes_ftz_avx2::<MaxNanF32>(ftz),
        (true, false, true, false) => lanes_ftz_avx2::<MinXorF32>(ftz),
        (false, false, true, false) => lanes_ftz_avx2::<MaxXorF32>(ftz),
        (true, true, true, false) => lanes_ftz_avx2::<MinNanXorF32>(ftz),
        (false, true, true, false) => lanes_ftz_avx2::<MaxNanXorF32>(ftz),
        (true, false, false, true) => lanes_ftz_avx2::<Min3F32>(ftz),
        (false, false, false, true) => lanes_ftz_avx2::<Max3F32>(ftz),
        (true, true, false, true) => lanes_ftz_avx2::<Min3NanF32>(ftz),
        (false, true, false, true) => lanes_ftz_avx2::<Max3NanF32>(ftz),
        _ => return None,
    })
}

fn select_f64(opcode: &str, parts: &mut Parts<'_>) -> Option<Selected> {
    let rounding = parts.rounding();
    // The approximate forms exist only with `.ftz`, whose flushing to 20 bits ours outdo.
    let approximate = parts.take("approx") && (parts.take("ftz") || opcode == "rsqrt");
    if !parts.done() {
        return None;
    }
    use Rounding::{Down, Nearest, Up, Zero};
    let nearest = rounding.is_none() || rounding == Some(Nearest);
    let selected = match opcode {
        "add" if nearest => lanes::<AddF64>(),
        "sub" if nearest => lanes::<SubF64>(),
        "mul" if nearest => lanes::<MulF64>(),
        "fma" | "mad" if nearest => lanes::<FmaF64>(),
        "div" if nearest => lanes::<DivF64>(),
        "rcp" if nearest => lanes::<RcpF64>(),
        "sqrt" if nearest => lanes::<SqrtF64>(),
        "rsqrt" if approximate => lanes::<RsqrtF64>(),
        "abs" if rounding.is_none() => lanes::<AbsF64>(),
        "neg" if rounding.is_none() => lanes::<NegF64>(),
        "min" if rounding.is_none() => lanes::<MinF64>(),
        "max" if rounding.is_none() => lanes::<MaxF64>(),
        "copysign" if rounding.is_none() => lanes::<CopysignF64>(),
        _ => match (opcode, rounding?) {
            ("add", Zero) => lanes_scalar::<AddF64Z>(),
            ("add", Down) => lanes_scalar::<AddF64D>(),
            ("add", Up) => lanes_scalar::<AddF64U>(),
            ("sub", Zero) => lanes_scalar::<SubF64Z>(),
            ("sub", Down) => lanes_scalar::<SubF64D>(),
            ("sub", Up) => lanes_scalar::<SubF64U>(),
            ("mul", Zero) => lanes_scalar::<MulF64Z>(),
            ("mul", Down) => lanes_scalar::<MulF64D>(),
            ("mul", Up) => lanes_scalar::<MulF64U>(),
            ("fma" | "mad", Zero) => lanes_scalar::<FmaF64Z>(),
            ("fma" | "mad", Down) => lanes_scalar::<FmaF64D>(),
            ("fma" | "mad", Up) => lanes_scalar::<FmaF64U>(),
            ("div", Zero) => lanes_scalar::<DivF64Z>(),
            ("div", Down) => lanes_scalar::<DivF64D>(),
            ("div", Up) => lanes_scalar::<DivF64U>(),
            ("rcp", Zero) => lanes_scalar::<RcpF64Z>(),
            ("rcp", Down) => lanes_scalar::<RcpF64D>(),
            ("rcp", Up) => lanes_scalar::<RcpF64U>(),
            ("sqrt", Zero) => lanes_scalar::<SqrtF64Z>(),
            ("sqrt", Down) => lanes_scalar::<SqrtF64D>(),
            ("sqrt", Up) => lanes_scalar::<SqrtF64U>(),
            _ => return None,
        },
    };
    Some(selected)
}
