//! Matrix instructions against products computed here.

use super::{Bench, Shape};
use crate::math::narrow::f32_to_f16;

/// Small whole numbers, different everywhere: their products and sums are exact in every type.
fn number(index: usize) -> i32 {
    (index * 7 % 13) as i32 - 6
}

/// Runs a kernel of one warp over `words`; `%rd2` is the address of lane i's row of `row` words.
fn run(row: usize, words: &[u32], text: &str) -> Vec<u32> {
    let body = format!(
        ".visible .entry k(.param .u64 data) {{
        .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f64 %d<16>; .reg .pred %p<4>;
        .shared .align 16 .b8 buffer[2048];
        ld.param.u64 %rd1, [data];
        mov.u32 %r31, %tid.x;
        mad.wide.u32 %rd2, %r31, {}, %rd1;
        {text}
        ret; }}",
        4 * row
    );
    Bench::new().transform(&body, &Shape::new(1, 32), words)
}

fn pair(low: i32, high: i32) -> u32 {
    let half = |x: i32| u32::from(f32_to_f16(x as f32));
    half(low) | half(high) << 16
}

#[test]
fn mma_of_halves() {
    let a = |row: usize, column: usize| number(row * 16 + column);
    let b = |row: usize, column: usize| number(row * 8 + column + 3);
    let mut words = vec![0u32; 32 * 10];
    for lane in 0..32 {
        let (group, thread) = (lane / 4, lane % 4);
        // As the reference's figures have it.
        let row = &mut words[lane * 10..][..10];
        for (register, (r, c)) in [(0, 0), (8, 0), (0, 8), (8, 8)].into_iter().enumerate() {
            let (r, c) = (group + r, 2 * thread + c);
            row[register] = pair(a(r, c), a(r, c + 1));
        }
        for (register, r) in [0, 8].into_iter().enumerate() {
            let r = 2 * thread + r;
            row[4 + register] = pair(b(r, group), b(r + 1, group));
        }
        row[6..].fill(1f32.to_bits());
    }
    let out = run(
        10,
        &words,
        "ld.global.v2.b32 {%r0, %r1}, [%rd2]; ld.global.v2.b32 {%r2, %r3}, [%rd2+8];
        ld.global.v2.b32 {%r4, %r5}, [%rd2+16]; ld.global.v2.b32 {%r6, %r7}, [%rd2+24];
        ld.global.v2.b32 {%r8, %r9}, [%rd2+32];
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r6, %r7, %r8, %r9},
            {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9};
        st.global.v2.b32 [%rd2+24], {%r6, %r7}; st.global.v2.b32 [%rd2+32], {%r8, %r9};",
    );
    for lane in 0..32 {
        for index in 0..4 {
            let (row, column) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
            let sum: i32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            let got = f32::from_bits(out[lane * 10 + 6 + index]);
            assert_eq!(got, (sum + 1) as f32, "row {row}, column {column}");
        }
    }
}

#[test]
fn mma_of_doubles_has_six_operands() {
    let mut words = vec![0u32; 32 * 8];
    let store = |row: &mut [u32], at: usize, x: i32| {
        let bits = f64::from(x).to_bits();
        row[2 * at] = bits as u32;
        row[2 * at + 1] = (bits >> 32) as u32;
    };
    for lane in 0..32 {
        let row = &mut words[lane * 8..][..8];
        store(row, 0, number(lane));
        store(row, 1, number(lane + 5));
    }
    let out = run(
        8,
        &words,
        "ld.global.f64 %d0, [%rd2]; ld.global.f64 %d1, [%rd2+8]; ld.global.f64 %d2, [%rd2+16];
        ld.global.f64 %d3, [%rd2+24];
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d2, %d3}, {%d0}, {%d1}, {%d2, %d3};
        st.global.f64 [%rd2+16], %d2; st.global.f64 [%rd2+24], %d3;",
    );
    for lane in 0..32 {
        for index in 0..2 {
            let (row, column) = (lane / 4, lane % 4 * 2 + index);
            // A's lane is row·4 + k, B's is column·4 + k.
            let sum: i32 = (0..4).map(|k| number(row * 4 + k) * number(column * 4 + k + 5)).sum();
            let at = lane * 8 + 4 + 2 * index;
            let got = f64::from_bits(u64::from(out[at]) | u64::from(out[at + 1]) << 32);
            assert_eq!(got, f64::from(sum), "row {row}, column {column}");
        }
    }
}

#[test]
fn mma_of_bytes() {
    let a = |row: usize, column: usize| number(row * 32 + column);
    let b = |row: usize, column: usize| number(row * 8 + column + 1);
    let four = |f: &dyn Fn(usize) -> i32| u32::from_le_bytes([0, 1, 2, 3].map(|i| f(i) as u8));
    let mut words = vec![0u32; 32 * 10];
    for lane in 0..32 {
        let (group, thread) = (lane / 4, lane % 4);
        let row = &mut words[lane * 10..][..10];
        for (register, (r, c)) in [(0, 0), (8, 0), (0, 16), (8, 16)].into_iter().enumerate() {
            row[register] = four(&|i| a(group + r, 4 * thread + c + i));
        }
        for (register, r) in [0, 16].into_iter().enumerate() {
            row[4 + register] = four(&|i| b(4 * thread + r + i, group));
        }
    }
    let out = run(
        10,
        &words,
        "ld.global.v2.b32 {%r0, %r1}, [%rd2]; ld.global.v2.b32 {%r2, %r3}, [%rd2+8];
        ld.global.v2.b32 {%r4, %r5}, [%rd2+16]; mov.b32 %r6, 0;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r6, %r7, %r8, %r9},
            {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r6, %r6, %r6};
        st.global.v2.b32 [%rd2+24], {%r6, %r7}; st.global.v2.b32 [%rd2+32], {%r8, %r9};",
    );
    for lane in 0..32 {
        for index in 0..4 {
            let (row, column) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
            let sum: i32 = (0..32).map(|k| a(row, k) * b(k, column)).sum();
            assert_eq!(out[lane * 10 + 6 + index] as i32, sum, "row {row}, column {column}");
        }
    }
}

/// D = A × B + C with wmma: A by rows, B by columns with a stride of 24, D by columns.
#[test]
fn wmma_loads_and_stores_with_strides() {
    let a = |row: usize, column: usize| number(row * 16 + column);
    let b = |row: usize, column: usize| number(row + 24 * column);
    // Halves: A at 0, B at 256 (16 columns, 24 apart). Words: C at 640, D at 896.
    let mut words = vec![0u32; 1152];
    for (index, word) in words.iter_mut().enumerate().take(128) {
        *word = pair(a(index / 8, index % 8 * 2), a(index / 8, index % 8 * 2 + 1));
    }
    for (index, word) in words[128..320].iter_mut().enumerate() {
        *word = pair(number(2 * index), number(2 * index + 1));
    }
    for (index, word) in words[640..896].iter_mut().enumerate() {
        *word = (index as f32).to_bits();
    }
    let registers = |first: u32| {
        let names: Vec<String> = (first..first + 8).map(|i| format!("%r{i}")).collect();
        format!("{{{}}}", names.join(", "))
    };
    let (fa, fb, fc) = (registers(0), registers(8), registers(16));
    let text = format!(
        "mov.b32 %r30, 24; add.u64 %rd3, %rd1, 1024; add.u64 %rd5, %rd1, 4096;
        wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {fa}, [%rd1];
        wmma.load.b.sync.aligned.col.m16n16k16.f16 {fb}, [%rd1+512], %r30;
        wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {fc}, [%rd3+1536], 16;
        wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {fc}, {fa}, {fb}, {fc};
        wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [%rd5-512], {fc}, 16;"
    );
    let out = run(0, &words, &text);
    for row in 0..16 {
        for column in 0..16 {
            let sum: i32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            let expected = (sum + (row * 16 + column) as i32) as f32;
            let got = f32::from_bits(out[896 + column * 16 + row]);
            assert_eq!(got, expected, "row {row}, column {column}");
        }
    }
}

#[test]
fn ldmatrix_and_its_transposes() {
    // Lane i's 16 bytes are row i % 8 of matrix i / 8; element (m, r, c) is m·64 + r·8 + c.
    let words: Vec<u32> =
        (0..128).map(|index| (2 * index) | (2 * index + 1) << 16).chain([0; 128]).collect();
    let text = "shl.b32 %r10, %r31, 4; mov.u32 %r11, buffer; add.u32 %r12, %r11, %r10;
        mad.wide.u32 %rd3, %r31, 16, %rd1;
        ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd3];
        st.shared.v4.b32 [%r12], {%r0, %r1, %r2, %r3};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r12];
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r8, %r9}, [%r12+256];
        movmatrix.sync.aligned.m8n8.trans.b16 %r13, %r8;
        st.global.v4.b32 [%rd3+512], {%r7, %r8, %r9, %r13};";
    let out = run(0, &words, text);
    for lane in 0..32u32 {
        let (group, thread) = (lane / 4, lane % 4);
        let element = |matrix: u32, row: u32, column: u32| matrix * 64 + row * 8 + column;
        let by_row = |matrix| {
            element(matrix, group, 2 * thread) | element(matrix, group, 2 * thread + 1) << 16
        };
        let by_column = |matrix| {
            element(matrix, 2 * thread, group) | element(matrix, 2 * thread + 1, group) << 16
        };
        let got = &out[128 + lane as usize * 4..][..4];
        assert_eq!(got, [by_row(3), by_column(2), by_column(3), by_row(2)], "lane {lane}");
    }
}

/// A `wmma` of small whole numbers: its shape and types, and how an element of each is written.
struct Case {
    shape: (usize, usize, usize),
    operand: &'static str,
    sum: &'static str,
    /// Registers of A, B, and of the accumulators.
    registers: [usize; 3],
    rounding: &'static str,
}

/// The bytes of a number as an element.
fn element(name: &str, value: i32) -> Vec<u8> {
    let float = value as f32;
    match name {
        "f16" => f32_to_f16(float).to_le_bytes().to_vec(),
        "bf16" => float.to_bits().to_le_bytes()[2..].to_vec(),
        "tf32" | "f32" => float.to_bits().to_le_bytes().to_vec(),
        "f64" => f64::from(value).to_bits().to_le_bytes().to_vec(),
        "s8" | "u8" => vec![value as u8],
        _ => value.to_le_bytes().to_vec(),
    }
}

fn unsigned(name: &str, value: i32) -> i32 {
    if name == "u8" { value.abs() } else { value }
}

impl Case {
    /// D = A × B + C, A and B by rows or by columns with strides that are not the tile's own.
    fn check(&self, a_column: bool, b_column: bool) {
        let (m, n, k) = self.shape;
        let Case { operand, sum, registers: [a_len, b_len, c_len], rounding, .. } = *self;
        let a = |row: usize, column: usize| unsigned(operand, number(row * k + column));
        let b = |row: usize, column: usize| unsigned(operand, number(row * n + column + 5));
        let stride = 48;
        let mut bytes = vec![0u8; 3 * 8192];
        let mut put = |at: usize, name: &str, index: usize, value: i32| {
            let element = element(name, value);
            bytes[at + index * element.len()..][..element.len()].copy_from_slice(&element);
        };
        for (row, column) in (0..m).flat_map(|row| (0..k).map(move |column| (row, column))) {
            let index = if a_column { column * stride + row } else { row * stride + column };
            put(0, operand, index, a(row, column));
        }
        for (row, column) in (0..k).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let index = if b_column { column * stride + row } else { row * stride + column };
            put(8192, operand, index, b(row, column));
        }
        (0..m * n).for_each(|index| put(16384, sum, index, index as i32 % 100));
        let bank = |name: &str| if name == "f64" { "%d" } else { "%r" };
        let list = |name: &str, first: usize, len: usize| {
            let names: Vec<_> =
                (first..first + len).map(|i| format!("{}{i}", bank(name))).collect();
            format!("{{{}}}", names.join(", "))
        };
        let (fa, fb) = (list(operand, 0, a_len), list(operand, a_len, b_len));
        let fc = list(sum, a_len + b_len, c_len);
        let layout = |column: bool| if column { "col" } else { "row" };
        let (la, lb) = (layout(a_column), layout(b_column));
        let shape = format!("m{m}n{n}k{k}");
        let types = match operand {
            "f16" => format!("{sum}.{sum}"),
            _ => format!("{sum}.{operand}.{operand}.{sum}"),
        };
        let text = format!(
            "wmma.load.a.sync.aligned.{la}.{shape}.global.{operand} {fa}, [%rd1], {stride};
            wmma.load.b.sync.aligned.{lb}.{shape}.global.{operand} {fb}, [%rd1+8192], {stride};
            wmma.load.c.sync.aligned.row.{shape}.global.{sum} {fc}, [%rd1+16384], {n};
            wmma.mma.sync.aligned.{la}.{lb}.{shape}.{types}{rounding} {fc}, {fa}, {fb}, {fc};
            wmma.store.d.sync.aligned.row.{shape}.global.{sum} [%rd1+16384], {fc}, {n};"
        );
        let words: Vec<u32> =
            bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let out: Vec<u8> = run(0, &words, &text).iter().flat_map(|w| w.to_le_bytes()).collect();
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let index = row * n + column;
            let product: i32 = (0..k).map(|i| a(row, i) * b(i, column)).sum();
            let expected = element(sum, product + index as i32 % 100);
            let got = &out[16384 + index * expected.len()..][..expected.len()];
            assert_eq!(got, expected, "{shape} {types} {la} {lb}, row {row}, column {column}");
        }
    }
}

#[test]
fn wmma_of_every_type_and_layout() {
    let square = |operand, sum, registers| Case {
        shape: (16, 16, 16),
        operand,
        sum,
        registers,
        rounding: "",
    };
    let cases = [
        square("f16", "f32", [8, 8, 8]),
        square("f16", "f16", [8, 8, 4]),
        square("bf16", "f32", [4, 4, 8]),
        square("s8", "s32", [2, 2, 8]),
        square("u8", "s32", [2, 2, 8]),
        Case { shape: (16, 16, 8), ..square("tf32", "f32", [4, 4, 8]) },
        Case { shape: (32, 8, 16), ..square("bf16", "f32", [8, 2, 8]) },
        Case { shape: (8, 32, 16), ..square("s8", "s32", [1, 4, 8]) },
        Case { shape: (8, 8, 4), rounding: ".rn", ..square("f64", "f64", [1, 1, 2]) },
    ];
    for case in cases {
        for (a_column, b_column) in [(false, false), (false, true), (true, false), (true, true)] {
            case.check(a_column, b_column);
        }
    }
}

/// `mma` in the fragments of the reference's figures: lane 4·group + thread.
#[test]
fn mma_of_every_wide_type() {
    // Operand, accumulators, k, elements of a register.
    let cases = [
        ("f16", "f32", 16, 2),
        ("f16", "f16", 16, 2),
        ("f16", "f32", 8, 2),
        ("bf16", "f32", 16, 2),
        ("tf32", "f32", 8, 1),
        ("s8", "s32", 16, 4),
        ("s8", "s32", 32, 4),
        ("u8", "s32", 32, 4),
    ];
    for (operand, sum, k, per) in cases {
        let a = |row: usize, column: usize| unsigned(operand, number(row * k + column));
        let b = |row: usize, column: usize| unsigned(operand, number(row * 8 + column + 3));
        let word = |of: &dyn Fn(usize) -> i32| {
            let bytes: Vec<u8> = (0..per).flat_map(|i| element(operand, of(i))).collect();
            u32::from_le_bytes(bytes.try_into().unwrap())
        };
        let (a_len, b_len) = (k / (2 * per), k / (4 * per));
        let c_len = if sum == "f16" { 2 } else { 4 };
        let row = a_len + b_len + c_len;
        let mut words = vec![0u32; 32 * row];
        for lane in 0..32 {
            let (group, thread) = (lane / 4, lane % 4);
            let words = &mut words[lane * row..][..row];
            for register in 0..a_len {
                let (r, c) = (group + register % 2 * 8, register / 2 * 4 * per + thread * per);
                words[register] = word(&|i| a(r, c + i));
            }
            for register in 0..b_len {
                let r = register * 4 * per + thread * per;
                words[a_len + register] = word(&|i| b(r + i, group));
            }
        }
        let list = |first: usize, len: usize| {
            let names: Vec<_> = (first..first + len).map(|i| format!("%r{i}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let (fa, fb, fc) = (list(0, a_len), list(a_len, b_len), list(a_len + b_len, c_len));
        let move_all = |what: &str| -> String {
            (0..row)
                .map(|i| match what {
                    "ld" => format!("ld.global.b32 %r{i}, [%rd2+{}];\n", 4 * i),
                    _ => format!("st.global.b32 [%rd2+{}], %r{i};\n", 4 * i),
                })
                .collect()
        };
        let text = format!(
            "{} mma.sync.aligned.m16n8k{k}.row.col.{sum}.{operand}.{operand}.{sum}
                {fc}, {fa}, {fb}, {fc}; {}",
            move_all("ld"),
            move_all("st")
        );
        let out = run(row, &words, &text);
        for (lane, index) in (0..32).flat_map(|lane| (0..4).map(move |index| (lane, index))) {
            let (r, c) = (lane / 4 + 8 * (index / 2), lane % 4 * 2 + index % 2);
            let product: i32 = (0..k).map(|i| a(r, i) * b(i, c)).sum();
            let per = if sum == "f16" { 2 } else { 1 };
            let word = out[lane * row + a_len + b_len + index / per];
            let expected = element(sum, product);
            let got = &word.to_le_bytes()[index % per * expected.len()..][..expected.len()];
            assert_eq!(got, expected, "{operand} {sum} k {k}, row {r}, column {c}");
        }
    }
}
