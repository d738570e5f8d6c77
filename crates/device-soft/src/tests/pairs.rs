//! Two steps of arithmetic done as one, and what loops give to a kernel's front, give what they
//! would give one by one.

use super::{Bench, Shape};
use crate::exec::Level;

/// A kernel of one block: data[t] = `steps`' %r9, from its own element in %r1, and its number in
/// %r2.
fn kernel(steps: &str) -> String {
    format!(
        ".visible .entry k(.param .u64 p)
        {{
            .reg .b32 %r<12>;
            .reg .b64 %rd<8>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r2, %tid.x;
            mad.wide.u32 %rd2, %r2, 4, %rd1;
            ld.global.u32 %r1, [%rd2];
            {steps}
            st.global.u32 [%rd2], %r9;
            ret;
        }}"
    )
}

/// What a lane's element and number become.
type Expected = fn(u32, u32) -> u32;

/// Steps, what they give, and how many instructions are less where they are paired.
const PAIRS: &[(&str, Expected, usize)] = &[
    ("add.s32 %r3, %r1, %r2; add.s32 %r9, %r3, 7;", |a, b| a.wrapping_add(b).wrapping_add(7), 1),
    ("add.s32 %r3, %r1, %r2; add.s32 %r9, 7, %r3;", |a, b| a.wrapping_add(b).wrapping_add(7), 1),
    ("add.u32 %r3, %r1, 5; and.b32 %r9, %r3, %r2;", |a, b| a.wrapping_add(5) & b, 1),
    ("add.u32 %r3, %r1, 5; shl.b32 %r9, %r3, %r2;", |a, b| shl(a.wrapping_add(5), b), 1),
    ("and.b32 %r3, %r1, 255; shl.b32 %r9, %r3, %r2;", |a, b| shl(a & 255, b), 1),
    ("shl.b32 %r3, %r1, %r2; add.s32 %r9, %r2, %r3;", |a, b| shl(a, b).wrapping_add(b), 1),
    ("shl.b32 %r3, %r1, %r2; and.b32 %r9, %r3, -256;", |a, b| shl(a, b) & !255, 1),
    // How far a shift goes is not what is shifted.
    ("add.u32 %r3, %r1, 5; shl.b32 %r9, %r2, %r3;", |a, b| shl(b, a.wrapping_add(5)), 0),
    // Read twice.
    ("add.u32 %r3, %r1, 5; add.u32 %r9, %r3, %r3;", |a, _| a.wrapping_add(5).wrapping_mul(2), 0),
    // What the first step reads has changed before the second.
    (
        "add.u32 %r3, %r1, 5; xor.b32 %r1, %r1, 9; add.u32 %r4, %r3, %r2; xor.b32 %r9, %r4, %r1;",
        |a, b| a.wrapping_add(5).wrapping_add(b) ^ a ^ 9,
        0,
    ),
    // Of three in a row, two.
    (
        "add.u32 %r3, %r1, 5; add.u32 %r4, %r3, %r2; add.u32 %r9, %r4, %r1;",
        |a, b| a.wrapping_add(5).wrapping_add(b).wrapping_add(a),
        1,
    ),
    (
        "mul.wide.s32 %rd3, %r1, -3; add.s64 %rd4, %rd3, %rd1; sub.s64 %rd5, %rd4, %rd1;
         shr.u64 %rd6, %rd5, 9; cvt.u32.u64 %r9, %rd6;",
        |a, _| ((i64::from(a as i32) * -3) as u64 >> 9) as u32,
        1,
    ),
    (
        "mul.wide.u32 %rd3, %r1, 77; add.s64 %rd4, %rd1, %rd3; sub.s64 %rd5, %rd4, %rd1;
         shr.u64 %rd6, %rd5, 9; cvt.u32.u64 %r9, %rd6;",
        |a, _| ((u64::from(a) * 77) >> 9) as u32,
        1,
    ),
];

fn shl(value: u32, by: u32) -> u32 {
    value.checked_shl(by).unwrap_or(0)
}

#[test]
fn pairs_give_what_single_steps_give() {
    let bench = Bench::new();
    let data: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ i).collect();
    for &(steps, expected, fewer) in PAIRS {
        let text = kernel(steps);
        let wanted: Vec<u32> = (0..64).map(|i| expected(data[i as usize], i)).collect();
        assert_eq!(bench.transform(&text, &Shape::new(1, 64), &data), wanted, "{steps}");
        let len = |level| bench.program(&text, level).code.len();
        if Level::detect() >= Level::Avx2 {
            assert_eq!(len(Level::Portable) - len(Level::Avx2), fewer, "{steps}");
        }
    }
}

/// Each thread goes round as often as its element says, and in each round adds what is the same
/// every time (from its number and a parameter), and what is not (from its block's number).
const LOOP: &str = "
    .visible .entry k(.param .u64 p)
    {
        .reg .pred %p<4>;
        .reg .b32 %r<16>;
        .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %tid.x;
        mad.lo.u32 %r3, %r1, 64, %r2;
        mad.wide.u32 %rd2, %r3, 4, %rd1;
        ld.global.u32 %r4, [%rd2];
        mov.u32 %r5, 0;
        setp.eq.u32 %p1, %r4, 0;
        @%p1 bra END;
        mov.u32 %r6, %tid.x;
    AGAIN:
        shl.b32 %r7, %r6, 3;
        xor.b32 %r8, %r7, 21;
        add.u32 %r5, %r5, %r8;
        add.u32 %r9, %r1, 100;
        add.u32 %r5, %r5, %r9;
        setp.gt.u32 %p2, %r2, 40;
        @%p2 add.u32 %r5, %r5, 1;
        mov.u32 %r10, 3;
        @%p2 mov.u32 %r10, 4;
        add.u32 %r5, %r5, %r10;
        add.u32 %r4, %r4, -1;
        setp.ne.u32 %p3, %r4, 0;
        @%p3 bra AGAIN;
    END:
        st.global.u32 [%rd2], %r5;
        ret;
    }";

#[test]
fn what_is_the_same_in_every_round_of_a_loop_is_computed_once() {
    let bench = Bench::new();
    let data: Vec<u32> = (0..64 * 9).map(|i| i * 7 % 11).collect();
    let expected: Vec<u32> = (0..64 * 9u32)
        .map(|i| {
            let (block, thread) = (i / 64, i % 64);
            let step = ((thread * 8) ^ 21) + block + 100 + if thread > 40 { 5 } else { 3 };
            data[i as usize] * step
        })
        .collect();
    assert_eq!(bench.transform(LOOP, &Shape::new(9, 64), &data), expected);
    let program = bench.program(LOOP, Level::Portable);
    // Of the first stretch the parameter and the thread's number; of the loop and for it, the
    // number again, the shift, its sum and the comparison.
    assert_eq!(program.functions[0].prologue, 2 + 4);
}
