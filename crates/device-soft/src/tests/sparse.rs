//! Sparse matrix products, and the small ones of two quads, against products computed here.

use super::{Bench, Shape};
use crate::math::narrow::f32_to_f16;

fn number(index: usize) -> i32 {
    (index * 7 % 13) as i32 - 6
}

/// Runs a kernel of one warp; a lane finds `row` words at `%rd2`, the first 14 of them in `%r0` to
/// `%r13`, and gives back those from `%r10` on.
fn run(words: &[[u32; 16]], text: &str) -> Vec<[u32; 16]> {
    let loads: String =
        (0..14).map(|i| format!("ld.global.b32 %r{i}, [%rd2+{}];\n", 4 * i)).collect();
    let stores: String =
        (6..14).map(|i| format!("st.global.b32 [%rd2+{}], %r{i};\n", 4 * i)).collect();
    let body = format!(
        ".visible .entry k(.param .u64 data) {{
        .reg .b32 %r<32>; .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [data];
        mov.u32 %r31, %tid.x;
        mad.wide.u32 %rd2, %r31, 64, %rd1;
        {loads} {text} {stores} ret; }}"
    );
    Bench::new().transform(&body, &Shape::new(1, 32), words)
}

fn half(x: i32) -> u32 {
    f32_to_f16(x as f32).into()
}

fn halves(low: i32, high: i32) -> u32 {
    half(low) | half(high) << 16
}

/// Which two of a chunk of four are kept: all six choices occur.
fn kept(row: usize, chunk: usize) -> [usize; 2] {
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]][(row * 5 + chunk) % 6]
}

/// A's element, of those that are kept.
fn left(row: usize, column: usize) -> i32 {
    if kept(row, column / 4).contains(&(column % 4)) { number(row * 64 + column) } else { 0 }
}

fn right(row: usize, column: usize) -> i32 {
    number(row * 8 + column + 3)
}

/// Metadata of four bits a chunk, from `chunk` on.
fn metadata(row: usize, chunk: usize, count: usize) -> u32 {
    let bits = (0..count).map(|i| {
        let [first, second] = kept(row, chunk + i);
        ((first | second << 2) << (4 * i)) as u32
    });
    bits.fold(0, |all, bits| all | bits)
}

/// The element of A that is stored at `column`.
fn stored(row: usize, column: usize) -> i32 {
    let chunk = column / 2;
    left(row, 4 * chunk + kept(row, chunk)[column % 2])
}

fn product(row: usize, column: usize, k: usize) -> i32 {
    (0..k).map(|at| left(row, at) * right(at, column)).sum()
}

/// A's four registers of halves, B's four, accumulators of one, metadata in `%r9`.
fn of_halves(selector: usize) -> Vec<[u32; 16]> {
    let mut words = vec![[0u32; 16]; 32];
    for (lane, words) in words.iter_mut().enumerate() {
        let (group, thread) = (lane / 4, lane % 4);
        for (register, (r, c)) in [(0, 0), (8, 0), (0, 8), (8, 8)].into_iter().enumerate() {
            let (r, c) = (group + r, 2 * thread + c);
            words[register] = halves(stored(r, c), stored(r, c + 1));
        }
        for register in 0..4 {
            let r = 2 * thread + 8 * register;
            words[4 + register] = halves(right(r, group), right(r + 1, group));
        }
        // Threads that the selector does not name hold rubbish.
        words[9] = 0xFFFF_FFFF;
        if thread / 2 == selector {
            let chunk = 4 * (thread % 2);
            words[9] = metadata(group, chunk, 4) | metadata(group + 8, chunk, 4) << 16;
        }
        words[10..14].fill(1f32.to_bits());
    }
    words
}

#[test]
fn sparse_halves() {
    for (selector, form) in [(0, "sp"), (1, "sp"), (1, "sp::ordered_metadata")] {
        let text = format!(
            "mma.{form}.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {{%r10, %r11, %r12, %r13}},
            {{%r0, %r1, %r2, %r3}}, {{%r4, %r5, %r6, %r7}}, {{%r10, %r11, %r12, %r13}}, %r9, {selector};"
        );
        let out = run(&of_halves(selector), &text);
        for (lane, words) in out.iter().enumerate() {
            for index in 0..4 {
                let (row, column) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
                let got = f32::from_bits(words[10 + index]);
                let wanted = (product(row, column, 32) + 1) as f32;
                assert_eq!(got, wanted, "row {row}, column {column}");
            }
        }
    }
}

#[test]
fn sparse_bytes() {
    let four = |f: &dyn Fn(usize) -> i32| u32::from_le_bytes([0, 1, 2, 3].map(|i| f(i) as u8));
    let mut words = vec![[0u32; 16]; 32];
    for (lane, words) in words.iter_mut().enumerate() {
        let (group, thread) = (lane / 4, lane % 4);
        for (register, (r, c)) in [(0, 0), (8, 0), (0, 16), (8, 16)].into_iter().enumerate() {
            words[register] = four(&|i| stored(group + r, 4 * thread + c + i));
        }
        for register in 0..4 {
            words[4 + register] = four(&|i| right(4 * thread + 16 * register + i, group));
        }
        words[9] = metadata(group + 8 * (thread % 2), 8 * (thread / 2), 8);
        words[10..14].fill(5);
    }
    let out = run(
        &words,
        "mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%r10, %r11, %r12, %r13},
        {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r10, %r11, %r12, %r13}, %r9, 0;",
    );
    for (lane, words) in out.iter().enumerate() {
        for index in 0..4 {
            let (row, column) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
            assert_eq!(words[10 + index] as i32, product(row, column, 64) + 5, "{row}, {column}");
        }
    }
}

#[test]
fn sparse_singles_keep_one_of_two() {
    // Column 2·chunk + 1 where the row and the chunk are both odd or both even.
    let kept = |row: usize, chunk: usize| 1 - (row + chunk) % 2;
    let element = |row: usize, chunk: usize| number(row * 4 + chunk);
    let mut words = vec![[0u32; 16]; 32];
    let single = |x: i32| (x as f32).to_bits();
    for (lane, words) in words.iter_mut().enumerate() {
        let (group, thread) = (lane / 4, lane % 4);
        (words[0], words[1]) = (single(element(group, thread)), single(element(group + 8, thread)));
        for register in 0..2 {
            words[4 + register] = single(right(thread + 4 * register, group));
        }
        if thread == 2 {
            let row = |row: usize| {
                (0..4).fold(0, |bits, chunk| bits | [4u32, 14][kept(row, chunk)] << (4 * chunk))
            };
            words[9] = row(group) | row(group + 8) << 16;
        }
    }
    let out = run(
        &words,
        "mma.sp.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r10, %r11, %r12, %r13},
        {%r0, %r1}, {%r4, %r5}, {%r10, %r11, %r12, %r13}, %r9, 2;",
    );
    for (lane, words) in out.iter().enumerate() {
        for index in 0..4 {
            let (row, column) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
            let terms = (0..4).map(|at| element(row, at) * right(2 * at + kept(row, at), column));
            assert_eq!(f32::from_bits(words[10 + index]), terms.sum::<i32>() as f32);
        }
    }
}

/// The four products of `m8n8k4`: product, row and column tell their elements apart.
#[test]
fn products_of_two_quads() {
    let a = |product: usize, row: usize, k: usize| number(product * 32 + row * 4 + k);
    let b = |product: usize, k: usize, column: usize| number(product * 32 + k * 8 + column + 5);
    for (a_layout, b_layout) in [("row", "col"), ("col", "row")] {
        let mut words = vec![[0u32; 16]; 32];
        for (lane, words) in words.iter_mut().enumerate() {
            let (which, half, place) = (lane % 16 / 4, lane / 16 * 4, lane % 4);
            let left = |i: usize| match a_layout {
                "row" => a(which, half + place, i),
                _ => a(which, half + i, place),
            };
            let right = |i: usize| match b_layout {
                "col" => b(which, i, half + place),
                _ => b(which, place, half + i),
            };
            (words[0], words[1]) = (halves(left(0), left(1)), halves(left(2), left(3)));
            (words[4], words[5]) = (halves(right(0), right(1)), halves(right(2), right(3)));
            words[6..10].fill(halves(1, 1));
            // Single accumulators follow in the second product.
        }
        let singles = "{%r6, %r7, %r8, %r9, %r10, %r11, %r12, %r13}";
        let out = run(
            &words,
            &format!(
                "mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.f32.f16.f16.f16 {singles}, {{%r0, %r1}},
                {{%r4, %r5}}, {{%r6, %r7, %r8, %r9}};
                mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.f32.f16.f16.f32 {singles}, {{%r0, %r1}},
                {{%r4, %r5}}, {singles};"
            ),
        );
        for (lane, words) in out.iter().enumerate() {
            for i in 0..8 {
                let row = lane / 16 * 4 + (lane & 1) + (i & 2);
                let column = (i & 4) + (lane & 2) + (i & 1);
                let which = lane % 16 / 4;
                let sum: i32 = (0..4).map(|k| a(which, row, k) * b(which, k, column)).sum();
                assert_eq!(f32::from_bits(words[6 + i]), (1 + 2 * sum) as f32, "{row}, {column}");
            }
        }
    }
}
