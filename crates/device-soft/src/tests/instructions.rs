//! Computing instructions against Rust's arithmetic: names, operand order, modifiers, every level.

use super::{Bench, Shape};
use crate::math::testing::{Random, interesting_f32, interesting_f64};

/// Four operands of a lane, as 64-bit words. An instruction under test sees operand `i` as `%r<i>`
/// (low 32 bits), `%rd<i>`, `%h<i>` (low 16), `%f<i>`, `%d<i>` and as predicate `%p<i>` (odd).
type Operands = [u64; 4];

/// Runs `text` for every lane's operands and gives what it leaves in `%rd9`, or in `%r9`, `%h9`,
/// `%f9`, `%d9`, `%p9` where it names one of these.
fn evaluate(bench: &Bench, text: &str, operands: &[Operands]) -> Vec<u64> {
    let named = |register: &str| text.contains(register);
    let result = match () {
        () if named("%r9") => "cvt.u64.u32 %rd9, %r9;",
        () if named("%h9") => "cvt.u64.u16 %rd9, %h9;",
        () if named("%f9") => "mov.b32 %r9, %f9; cvt.u64.u32 %rd9, %r9;",
        () if named("%d9") => "mov.b64 %rd9, %d9;",
        () if named("%p9") => "selp.b64 %rd9, 1, 0, %p9;",
        () => "",
    };
    let mut load = String::new();
    for i in 0..4 {
        load += &format!(
            "ld.global.b64 %rd{i}, [%rd11+{}]; cvt.u32.u64 %r{i}, %rd{i}; cvt.u16.u64 %h{i}, %rd{i};
            mov.b32 %f{i}, %r{i}; mov.b64 %d{i}, %rd{i}; and.b32 %r12, %r{i}, 1;
            setp.ne.u32 %p{i}, %r12, 0;\n",
            8 * i
        );
    }
    let body = format!(
        ".visible .entry k(.param .u64 data) {{
        .reg .b16 %h<16>; .reg .b32 %r<16>; .reg .b64 %rd<16>; .reg .f32 %f<16>; .reg .f64 %d<16>;
        .reg .pred %p<16>;
        ld.param.u64 %rd10, [data];
        mov.u32 %r11, %tid.x;
        mad.wide.u32 %rd11, %r11, 40, %rd10;
        {load}
        {text}
        {result}
        st.global.b64 [%rd11+32], %rd9;
        ret; }}"
    );
    let data: Vec<[u64; 5]> = operands.iter().map(|&[a, b, c, d]| [a, b, c, d, 0xDEAD]).collect();
    let shape = Shape::new(1, data.len() as u32);
    bench.transform(&body, &shape, &data).iter().map(|row| row[4]).collect()
}

/// Compares `text` with `expected` on operands from `draw`.
fn check(
    bench: &Bench,
    text: &str,
    mut draw: impl FnMut(&mut Random) -> u64,
    expected: impl Fn(Operands) -> u64,
) {
    let mut random = Random::new(text.len() as u64);
    let operands: Vec<Operands> = (0..256).map(|_| [(); 4].map(|()| draw(&mut random))).collect();
    for (operands, got) in operands.iter().zip(evaluate(bench, text, &operands)) {
        let expected = expected(*operands);
        assert_eq!(got, expected, "{text} of {operands:x?}: {got:#x} is not {expected:#x}");
    }
}

fn any(random: &mut Random) -> u64 {
    let bits = random.bits();
    match random.below(4) {
        0 => bits & 0x3F,
        1 => (bits as i64 >> 60) as u64,
        _ => bits,
    }
}

fn single(random: &mut Random) -> u64 {
    interesting_f32(random).to_bits().into()
}

fn double(random: &mut Random) -> u64 {
    interesting_f64(random).to_bits()
}

/// A f32 result with the hardware's NaN.
fn f32_bits(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF_FFFF } else { x.to_bits().into() }
}

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

#[test]
fn integers() {
    let bench = Bench::new();
    let s = |bits: u64| bits as u32 as i32;
    let u = |bits: u64| bits as u32;
    let r = |text: &str, f: fn(i32, i32, i32) -> i32| {
        check(&bench, text, any, |[a, b, c, _]| f(s(a), s(b), s(c)) as u32 as u64);
    };
    r("add.s32 %r9, %r0, %r1;", |a, b, _| a.wrapping_add(b));
    r("add.sat.s32 %r9, %r0, %r1;", |a, b, _| a.saturating_add(b));
    r("sub.u32 %r9, %r0, %r1;", |a, b, _| a.wrapping_sub(b));
    r("mul.lo.s32 %r9, %r0, %r1;", |a, b, _| a.wrapping_mul(b));
    r("mul.hi.s32 %r9, %r0, %r1;", |a, b, _| ((a as i64 * b as i64) >> 32) as i32);
    r("mad.lo.s32 %r9, %r0, %r1, %r2;", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    r("sad.s32 %r9, %r0, %r1, %r2;", |a, b, c| c.wrapping_add(a.abs_diff(b) as i32));
    r("div.s32 %r9, %r0, %r1;", |a, b, _| if b == 0 { -1 } else { a.wrapping_div(b) });
    r("rem.s32 %r9, %r0, %r1;", |a, b, _| if b == 0 { -1 } else { a.wrapping_rem(b) });
    r("min.s32 %r9, %r0, %r1;", |a, b, _| a.min(b));
    r("max.relu.s32 %r9, %r0, %r1;", |a, b, _| a.max(b).max(0));
    r("abs.s32 %r9, %r0;", |a, _, _| a.wrapping_abs());
    r("neg.s32 %r9, %r0;", |a, _, _| a.wrapping_neg());
    r("dp4a.s32.s32 %r9, %r0, %r1, %r2;", |a, b, c| {
        let products = (0..4).map(|i| (a >> (8 * i)) as i8 as i32 * ((b >> (8 * i)) as i8 as i32));
        products.fold(c, i32::wrapping_add)
    });
    r("max.u16x2 %r9, %r0, %r1;", |a, b, _| {
        let high = (a as u32 >> 16).max(b as u32 >> 16) << 16;
        (high | (a as u32 & 0xFFFF).max(b as u32 & 0xFFFF)) as i32
    });
    r("max.s32.relu %r9, %r0, %r1;", |a, b, _| a.max(b).max(0));
    r("vabsdiff4.u32.u32.u32.add %r9, %r0, %r1, %r2;", |a, b, c| {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        a.iter().zip(b).fold(c, |sum, (a, b)| sum.wrapping_add(a.abs_diff(b).into()))
    });
    check(&bench, "mul.wide.u32 %rd9, %r0, %r1;", any, |[a, b, ..]| u(a) as u64 * u(b) as u64);
    check(&bench, "mad.wide.s32 %rd9, %r0, %r1, %rd2;", any, |[a, b, c, _]| {
        (s(a) as i64 * s(b) as i64).wrapping_add(c as i64) as u64
    });
    check(&bench, "mul.hi.u64 %rd9, %rd0, %rd1;", any, |[a, b, ..]| {
        ((a as u128 * b as u128) >> 64) as u64
    });
    check(&bench, "min.u64 %rd9, %rd0, %rd1;", any, |[a, b, ..]| a.min(b));
    check(&bench, "mul.wide.s16 %r9, %h0, %h1;", any, |[a, b, ..]| {
        (a as i16 as i32 * b as i16 as i32) as u32 as u64
    });
    check(&bench, "div.s16 %h9, %h0, %h1;", any, |[a, b, ..]| {
        let (a, b) = (a as i16, b as i16);
        (if b == 0 { -1 } else { a.wrapping_div(b) }) as u16 as u64
    });
}

#[test]
fn carries() {
    let bench = Bench::new();
    let sum = "add.cc.u32 %r9, %r0, %r1; addc.u32 %r8, %r2, %r3; mov.b64 %rd9, {%r9, %r8};";
    // `%r9` is named, so the low word comes back; the high one is checked through 64-bit forms.
    check(&bench, sum, any, |[a, b, ..]| (a as u32).wrapping_add(b as u32).into());
    let wide = "add.cc.u64 %rd8, %rd0, %rd1; addc.u64 %rd9, %rd2, %rd3;";
    check(&bench, wide, any, |[a, b, c, e]| {
        let carry = a.checked_add(b).is_none();
        c.wrapping_add(e).wrapping_add(carry.into())
    });
    let borrow = "sub.cc.u64 %rd8, %rd0, %rd1; subc.u64 %rd9, %rd2, %rd3;";
    check(&bench, borrow, any, |[a, b, c, e]| c.wrapping_sub(e).wrapping_sub((a < b).into()));
    let product = "mad.lo.cc.u64 %rd8, %rd0, %rd1, %rd2; madc.hi.u64 %rd9, %rd0, %rd1, %rd3;";
    check(&bench, product, any, |[a, b, c, e]| {
        let low = (a as u128 * b as u128) as u64 as u128 + c as u128;
        (((a as u128 * b as u128) >> 64) as u64).wrapping_add(e).wrapping_add((low >> 64) as u64)
    });
}

#[test]
fn bits() {
    let bench = Bench::new();
    let r = |text: &str, f: fn(u32, u32, u32) -> u32| {
        check(&bench, text, any, |[a, b, c, _]| f(a as u32, b as u32, c as u32).into());
    };
    r("and.b32 %r9, %r0, %r1;", |a, b, _| a & b);
    r("not.b32 %r9, %r0;", |a, _, _| !a);
    r("cnot.b32 %r9, %r0;", |a, _, _| (a == 0).into());
    r("shl.b32 %r9, %r0, %r1;", |a, b, _| a.checked_shl(b).unwrap_or(0));
    r("shr.u32 %r9, %r0, %r1;", |a, b, _| a.checked_shr(b).unwrap_or(0));
    r("shr.s32 %r9, %r0, %r1;", |a, b, _| (a as i32 >> b.min(31)) as u32);
    r("lop3.b32 %r9, %r0, %r1, %r2, 0x96;", |a, b, c| a ^ b ^ c);
    r("lop3.b32 %r9, %r0, %r1, %r2, 0xE8;", |a, b, c| a & b | b & c | a & c);
    r("popc.b32 %r9, %r0;", |a, _, _| a.count_ones());
    r("clz.b32 %r9, %r0;", |a, _, _| a.leading_zeros());
    r("brev.b32 %r9, %r0;", |a, _, _| a.reverse_bits());
    r("bfind.u32 %r9, %r0;", |a, _, _| a.checked_ilog2().unwrap_or(u32::MAX));
    r("bfind.shiftamt.u32 %r9, %r0;", |a, _, _| if a == 0 { u32::MAX } else { a.leading_zeros() });
    r("shf.l.wrap.b32 %r9, %r0, %r1, %r2;", |a, b, c| {
        ((u64::from(b) << 32 | u64::from(a)) << (c & 31) >> 32) as u32
    });
    r("prmt.b32 %r9, %r0, %r1, 0x3210;", |a, _, _| a);
    r("prmt.b32 %r9, %r0, %r1, 0x7531;", |a, b, _| {
        let byte = |w: u32, i: u32| w >> (8 * i) & 0xFF;
        byte(a, 1) | byte(a, 3) << 8 | byte(b, 1) << 16 | byte(b, 3) << 24
    });
    r("bfe.u32 %r9, %r0, 4, 8;", |a, _, _| a >> 4 & 0xFF);
    r("bfi.b32 %r9, %r0, %r1, 4, 8;", |a, b, _| b & !0xFF0 | (a & 0xFF) << 4);
    check(&bench, "xor.b64 %rd9, %rd0, %rd1;", any, |[a, b, ..]| a ^ b);
    check(&bench, "shl.b64 %rd9, %rd0, %r1;", any, |[a, b, ..]| {
        a.checked_shl(b as u32).unwrap_or(0)
    });
    check(&bench, "popc.b64 %r9, %rd0;", any, |[a, ..]| a.count_ones().into());
    check(&bench, "xor.pred %p9, %p0, %p1;", any, |[a, b, ..]| (a ^ b) & 1);
    check(&bench, "lop3.or.b32 %r8|%p9, %r0, %r1, %r2, 0x80, %p3;", any, |[a, b, c, e]| {
        u64::from((a & b & c) as u32 != 0 || e & 1 == 1)
    });
}

#[test]
fn single_precision() {
    let bench = Bench::new();
    let r = |text: &str, op: fn(f32, f32, f32) -> f32| {
        check(&bench, text, single, |[a, b, c, _]| f32_bits(op(f(a), f(b), f(c))));
    };
    r("add.f32 %f9, %f0, %f1;", |a, b, _| a + b);
    r("sub.rn.f32 %f9, %f0, %f1;", |a, b, _| a - b);
    r("mul.f32 %f9, %f0, %f1;", |a, b, _| a * b);
    r("fma.rn.f32 %f9, %f0, %f1, %f2;", |a, b, c| a.mul_add(b, c));
    r("div.rn.f32 %f9, %f0, %f1;", |a, b, _| a / b);
    r("sqrt.rn.f32 %f9, %f0;", |a, _, _| a.sqrt());
    r("rcp.rn.f32 %f9, %f0;", |a, _, _| 1.0 / a);
    check(&bench, "abs.f32 %f9, %f0;", single, |[a, ..]| a & 0x7FFF_FFFF);
    r("min.f32 %f9, %f0, %f1;", |a, b, _| {
        if a == b && a == 0.0 { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
    });
    r("max.NaN.f32 %f9, %f0, %f1;", |a, b, _| {
        if a.is_nan() || b.is_nan() {
            f32::NAN
        } else if a == b && a == 0.0 {
            f32::from_bits(a.to_bits() & b.to_bits())
        } else {
            a.max(b)
        }
    });
    let flush = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
    check(&bench, "mul.ftz.f32 %f9, %f0, %f1;", single, |[a, b, ..]| {
        f32_bits(flush(flush(f(a)) * flush(f(b))))
    });
    check(&bench, "add.sat.f32 %f9, %f0, %f1;", single, |[a, b, ..]| {
        let sum = f(a) + f(b);
        f32_bits(if sum > 0.0 { sum.min(1.0) } else { 0.0 })
    });
    check(&bench, "fma.rm.f32 %f9, %f0, %f1, %f2;", single, |operands| {
        use crate::math::soft::{F32, Rounding, fma};
        let [a, b, c, _] = operands;
        fma(a, b, c, F32, Rounding::Down)
    });
}

#[test]
fn double_precision() {
    let bench = Bench::new();
    let r = |text: &str, op: fn(f64, f64, f64) -> f64| {
        // Any NaN will do: the hardware keeps payloads in ways that are not documented.
        let text = format!(
            "{text} setp.nan.f64 %p8, %d9, %d9; selp.f64 %d9, 0d7FF8000000000000, %d9, %p8;"
        );
        check(&bench, &text, double, |[a, b, c, _]| {
            let result = op(d(a), d(b), d(c));
            if result.is_nan() { 0x7FF8_0000_0000_0000 } else { result.to_bits() }
        });
    };
    r("add.f64 %d9, %d0, %d1;", |a, b, _| a + b);
    r("mul.rn.f64 %d9, %d0, %d1;", |a, b, _| a * b);
    r("fma.rn.f64 %d9, %d0, %d1, %d2;", |a, b, c| a.mul_add(b, c));
    r("div.rn.f64 %d9, %d0, %d1;", |a, b, _| a / b);
    r("sqrt.rn.f64 %d9, %d0;", |a, _, _| a.sqrt());
    r("neg.f64 %d9, %d0;", |a, _, _| -a);
    check(&bench, "add.rp.f64 %d9, %d0, %d1;", double, |[a, b, ..]| {
        use crate::math::soft::{F64, Rounding, add};
        add(a, b, F64, Rounding::Up)
    });
}

#[test]
fn comparisons() {
    let bench = Bench::new();
    let p = |text: &str, holds: fn(u64, u64, u64) -> bool, draw: fn(&mut Random) -> u64| {
        check(&bench, text, draw, |[a, b, c, _]| holds(a, b, c).into());
    };
    p("setp.lt.s32 %p9, %r0, %r1;", |a, b, _| (a as i32) < b as i32, any);
    p("setp.hs.u32 %p9, %r0, %r1;", |a, b, _| a as u32 >= b as u32, any);
    p("setp.ne.and.b32 %p9, %r0, %r1, %p2;", |a, b, c| a as u32 != b as u32 && c & 1 == 1, any);
    p(
        "setp.gt.xor.s64 %p8|%p9, %rd0, %rd1, !%p2;",
        |a, b, c| (a as i64 <= b as i64) != (c & 1 == 0),
        any,
    );
    p(
        "setp.ltu.f32 %p9, %f0, %f1;",
        |a, b, _| f(a).partial_cmp(&f(b)).is_none_or(|o| o.is_lt()),
        single,
    );
    p("setp.ne.f32 %p9, %f0, %f1;", |a, b, _| f(a) < f(b) || f(a) > f(b), single);
    p("setp.nan.f64 %p9, %d0, %d1;", |a, b, _| d(a).is_nan() || d(b).is_nan(), double);
    p("testp.subnormal.f32 %p9, %f0;", |a, _, _| f(a).is_subnormal(), single);
    check(&bench, "set.gt.f32.s32 %f9, %r0, %r1;", any, |[a, b, ..]| {
        if a as i32 > b as i32 { 0x3F80_0000 } else { 0 }
    });
    check(&bench, "set.u32.ge.s32 %r9, %r0, %r1;", any, |[a, b, ..]| {
        u64::from(0u32.wrapping_sub(u32::from(a as i32 >= b as i32)))
    });
    check(&bench, "set.le.u32.f64 %r9, %d0, %d1;", double, |[a, b, ..]| {
        if d(a) <= d(b) { 0xFFFF_FFFF } else { 0 }
    });
    check(
        &bench,
        "selp.b64 %rd9, %rd0, %rd1, %p2;",
        any,
        |[a, b, c, _]| {
            if c & 1 == 1 { a } else { b }
        },
    );
    check(
        &bench,
        "slct.u32.f32 %r9, %r0, %r1, %f2;",
        single,
        |[a, b, c, _]| {
            if f(c) >= 0.0 { a } else { b }
        },
    );
}

#[test]
fn conversions() {
    let bench = Bench::new();
    let r = |text: &str, draw: fn(&mut Random) -> u64, to: fn(u64) -> u64| {
        check(&bench, text, draw, |[a, ..]| to(a));
    };
    r("cvt.s64.s32 %rd9, %r0;", any, |a| a as i32 as i64 as u64);
    r("cvt.u32.s8 %r9, %r0;", any, |a| a as i8 as u32 as u64);
    r("cvt.s64.s8 %rd9, %r0;", any, |a| a as i8 as i64 as u64);
    r("cvt.sat.u8.s32 %r9, %r0;", any, |a| (a as i32).clamp(0, 255) as u64);
    r("cvt.rn.f32.s32 %f9, %r0;", any, |a| f32_bits(a as i32 as f32));
    r("cvt.rn.f64.u64 %d9, %rd0;", any, |a| (a as f64).to_bits());
    r("cvt.rz.f32.u32 %f9, %r0;", any, |a| {
        let mut x = a as u32 as f32;
        if x as u64 > u64::from(a as u32) {
            x = x.next_down();
        }
        f32_bits(x)
    });
    r("cvt.rzi.s32.f32 %r9, %f0;", single, |a| f(a) as i32 as u32 as u64);
    r("cvt.rni.ftz.u32.f32 %r9, %f0;", single, |a| f(a).round_ties_even() as u32 as u64);
    r("cvt.rzi.ftz.s32.f32 %r9, %f0;", single, |a| f(a) as i32 as u32 as u64);
    r("cvt.rmi.ftz.s32.f32 %r9, %f0;", single, |a| {
        if f(a).is_subnormal() { 0 } else { f(a).floor() as i32 as u32 as u64 }
    });
    r("cvt.rzi.s16.f64 %r9, %d0;", double, |a| {
        (if d(a).is_nan() { i16::MIN } else { d(a) as i16 }) as u32 as u64
    });
    r("cvt.rna.tf32.f32 %r9, %f0;", single, |a| {
        let tie = (a as u32).wrapping_add(0x1000) & 0xFFFF_E000;
        (if f(a).is_nan() { 0x7FFF_E000 } else { tie }).into()
    });
    r("cvt.rmi.s64.f64 %rd9, %d0;", double, |a| {
        if d(a).is_nan() { 1 << 63 } else { d(a).floor() as i64 as u64 }
    });
    r("cvt.rzi.u8.f32 %r9, %f0;", single, |a| f(a) as u8 as u64);
    r("cvt.rn.f32.f64 %f9, %d0;", double, |a| f32_bits(d(a) as f32));
    r("cvt.rpi.f32.f32 %f9, %f0;", single, |a| f32_bits(f(a).ceil()));
    r("cvt.sat.f32.f32 %f9, %f0;", single, |a| {
        f32_bits(if f(a) > 0.0 { f(a).min(1.0) } else { 0.0 })
    });
    r("cvt.rn.f16.f32 %h8, %f0; cvt.f32.f16 %f9, %h8;", single, |a| {
        use crate::math::narrow::{f16_to_f32, f32_to_f16};
        f32_bits(f16_to_f32(f32_to_f16(f(a))))
    });
    check(&bench, "cvt.rn.bf16x2.f32 %r9, %f0, %f1;", single, |[a, b, ..]| {
        use crate::math::narrow::f32_to_bf16;
        u64::from(f32_to_bf16(f(a))) << 16 | u64::from(f32_to_bf16(f(b)))
    });
    check(&bench, "cvt.pack.sat.u8.s32.b32 %r9, %r0, %r1, %r2;", any, |[a, b, c, _]| {
        let byte = |x: u64| (x as i32).clamp(0, 255) as u64;
        (c << 16 | byte(a) << 8 | byte(b)) & 0xFFFF_FFFF
    });
}

#[test]
fn moves() {
    let bench = Bench::new();
    check(&bench, "mov.b64 %rd9, {%r0, %r1};", any, |[a, b, ..]| u64::from(a as u32) | b << 32);
    check(&bench, "mov.b64 {%r8, %r9}, %rd0;", any, |[a, ..]| a >> 32);
    check(&bench, "mov.b64 {_, %r9}, %rd0;", any, |[a, ..]| a >> 32);
    // Vectors, as gcc has them: all elements are read before one is written.
    let swapped = ".reg .v2 .u32 v; mov.b64 v, %rd0; mov.v2.u32 v, {v.y, v.x}; mov.b64 %rd9, v;";
    check(&bench, swapped, any, |[a, ..]| a.rotate_left(32));
    let chosen = ".reg .v2 .u64 v; mov.v2.u64 v, {%rd0, %rd1}; @%p2 mov.v2.u64 v, {7, v.x};
                  mov.u64 v.x, 3; xor.b64 %rd9, v.x, v.y;";
    check(&bench, chosen, any, |[a, b, c, _]| 3 ^ if c & 1 != 0 { a } else { b });
    let turned = "mov.v4.f32 {%f3, %f2, %f1, %f0}, {%f0, %f1, %f2, 0f3F800000}; mov.f32 %f9, %f1;";
    check(&bench, turned, any, |[_, _, c, _]| c & 0xFFFF_FFFF);
    check(&bench, "mov.b32 {%h8, %h9}, %r0;", any, |[a, ..]| a >> 16 & 0xFFFF);
    check(&bench, "mov.b64 %rd9, {%h0, %h1, %h2, %h3};", any, |operands| {
        operands.iter().rev().fold(0, |all, half| all << 16 | half & 0xFFFF)
    });
    check(&bench, "mov.f32 %f9, 0f40490FDB;", any, |_| 0x4049_0FDB);
    check(&bench, "mov.f64 %d9, 0d400921FB54442D18;", any, |_| 0x4009_21FB_5444_2D18);
    check(&bench, "mov.pred %p9, %p0;", any, |[a, ..]| a & 1);
    check(&bench, "mov.u64 %rd9, -5;", any, |_| -5i64 as u64);
}

#[test]
fn halves() {
    use crate::math::soft::{BF16, F16, Format, Rounding, add, fma};
    let bench = Bench::new();
    let nearest = Rounding::Nearest;
    let pair = |format: Format, op: fn(u64, u64, u64, Format) -> u64, x: Operands| {
        let half = |shift: u32| {
            let [a, b, c, _] = x.map(|word| word >> shift & 0xFFFF);
            op(a, b, c, format)
        };
        half(0) | half(16) << 16
    };
    check(&bench, "add.f16 %h9, %h0, %h1;", any, |[a, b, ..]| {
        add(a & 0xFFFF, b & 0xFFFF, F16, nearest)
    });
    check(&bench, "fma.rn.f16x2 %r9, %r0, %r1, %r2;", any, |x| {
        pair(F16, |a, b, c, format| fma(a, b, c, format, Rounding::Nearest), x)
    });
    check(&bench, "fma.rn.bf16x2 %r9, %r0, %r1, %r2;", any, |x| {
        pair(BF16, |a, b, c, format| fma(a, b, c, format, Rounding::Nearest), x)
    });
    check(&bench, "fma.rn.relu.f16 %h9, %h0, %h1, %h2;", any, |[a, b, c, _]| {
        let value = fma(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF, F16, nearest);
        if value & 0x8000 != 0 { 0 } else { value }
    });
    check(&bench, "neg.bf16x2 %r9, %r0;", any, |[a, ..]| (a ^ 0x8000_8000) & 0xFFFF_FFFF);
    let numbers = |random: &mut Random| random.bits() & 0x7BFF_FBFF;
    check(&bench, "setp.gt.f16x2 %p8|%p9, %r0, %r1;", numbers, |[a, b, ..]| {
        // Of the upper halves, which are positive and finite: their bits order them.
        (a >> 16 & 0xFFFF > b >> 16 & 0xFFFF).into()
    });
}

#[test]
fn registers_of_sixteen_bytes_are_packed_and_unpacked() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .reg .b64 %rd<8>;
        .reg .b128 %q<4>;
        ld.param.u64 %rd1, [p];
        ld.global.u64 %rd2, [%rd1];
        ld.global.u64 %rd3, [%rd1+8];
        mov.b128 %q1, {%rd2, %rd3};
        atom.global.exch.b128 %q2, [%rd1+16], %q1;
        mov.b128 %q3, %q2;
        mov.b128 {%rd4, %rd5}, %q3;
        st.global.u64 [%rd1], %rd5;
        st.global.u64 [%rd1+8], %rd4;
        ret;
    }";
    let out = Bench::new().transform(body, &Shape::new(1, 1), &[1u64, 2, 3, 4]);
    assert_eq!(out, [4, 3, 1, 2]);
}

#[test]
fn clusters_are_told_from_single_blocks() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .reg .pred %p<2>;
        .reg .b32 %r<2>;
        .reg .b64 %rd<2>;
        ld.param.u64 %rd1, [p];
        mov.pred %p1, %is_explicit_cluster;
        selp.u32 %r1, 1, 0, %p1;
        st.global.u32 [%rd1], %r1;
        ret;
    }";
    for (blocks, expected) in [(1, 0), (2, 1)] {
        let shape = Shape { cluster: [blocks, 1, 1], ..Shape::new(2, 32) };
        assert_eq!(Bench::new().transform(body, &shape, &[7u32]), [expected]);
    }
}

#[test]
fn parts_of_registers() {
    let bench = Bench::new();
    let r = |text: &str, f: fn(u32, u32, u32) -> u32| {
        check(&bench, text, any, |[a, b, c, _]| f(a as u32, b as u32, c as u32).into());
    };
    r("vadd.s32.u32.s32 %r9, %r0.b1, %r1.h1;", |a, b, _| {
        (a >> 8 & 0xFF).wrapping_add(((b as i32) >> 16) as u32)
    });
    r("vabsdiff.u32.u32.u32.add %r9, %r0.b3, %r1.b0, %r2;", |a, b, c| {
        c.wrapping_add((a >> 24).abs_diff(b & 0xFF))
    });
    r("vsub.s32.s32.s32.sat %r9.b2, %r0.h0, %r1.h0, %r2;", |a, b, c| {
        let difference = i32::from(a as i16) - i32::from(b as i16);
        c & 0xFF00_FFFF | (difference.clamp(-128, 127) as u32 & 0xFF) << 16
    });
    r("vshl.u32.u32.u32.clamp %r9, %r0, %r1.b0;", |a, b, _| a.checked_shl(b & 0xFF).unwrap_or(0));
    r("vshr.s32.s32.u32.wrap.max %r9, %r0, %r1, %r2;", |a, b, c| {
        ((a as i32) >> (b & 31)).max(c as i32) as u32
    });
    r("cvt.pack.sat.s4.s32.b32 %r9, %r0, %r1, %r2;", |a, b, c| {
        let nibble = |x: u32| (x as i32).clamp(-8, 7) as u32 & 15;
        c << 8 | nibble(a) << 4 | nibble(b)
    });
    r("vset.u32.s32.lt.add %r9, %r0.b0, %r1.b3, %r2;", |a, b, c| {
        c.wrapping_add(u32::from((a as i64 & 0xFF) < i64::from(b as i32 >> 24)))
    });
}
