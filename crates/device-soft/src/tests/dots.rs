//! Sums of products of two strips, which are done at once where the host is wide, give what single
//! instructions give.

use super::{Bench, Shape};
use crate::FaultKind;
use crate::exec::Level;

/// How a lane's place in the tile is computed, in elements from its start: 16 wide warps' rows, one
/// place for all, the same for half a warp, rows of half a warp, anywhere.
const PLACES: [&str; 5] = [
    "mov.u32 %r4, %r1;",
    "mov.u32 %r4, 3;",
    "shr.u32 %r4, %r1, 4; shl.b32 %r4, %r4, 4;",
    "and.b32 %r4, %r1, 15;",
    "mul.lo.u32 %r4, %r1, 7; and.b32 %r4, %r4, 63;",
];

/// A kernel of a block of 64: tile[t] = own element; sums eight products of the places `a` and `b`;
/// lanes below `lanes` write.
fn kernel(ty: &str, a: &str, b: &str, lanes: u32) -> String {
    let bytes = if ty == "f64" { 8 } else { 4 };
    let products: String = (0..8)
        .map(|i| {
            format!(
                "ld.shared.{ty} %a{i}, [%r5+{}]; ld.shared.{ty} %b{i}, [%r6+{}];
                 fma.rn.{ty} %s{}, %{}, %{}, %s{i};",
                i * bytes,
                (7 - i) * 16 * bytes,
                i + 1,
                if i % 2 == 0 { format!("a{i}") } else { format!("b{i}") },
                if i % 2 == 0 { format!("b{i}") } else { format!("a{i}") },
            )
        })
        .collect();
    format!(
        ".visible .entry k(.param .u64 p)
        {{
            .shared .align 16 .b8 tile[4096];
            .reg .pred %p<2>;
            .reg .b32 %r<12>;
            .reg .b64 %rd<4>;
            .reg .{ty} %a<9>, %b<9>, %s<10>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r1, %tid.x;
            mad.wide.u32 %rd2, %r1, {bytes}, %rd1;
            ld.global.{ty} %s0, [%rd2];
            mov.u32 %r2, tile;
            mad.lo.u32 %r3, %r1, {bytes}, %r2;
            st.shared.{ty} [%r3], %s0;
            st.shared.{ty} [%r3+{}], %s0;
            st.shared.{ty} [%r3+{}], %s0;
            st.shared.{ty} [%r3+{}], %s0;
            bar.sync 0;
            {a}
            mad.lo.u32 %r5, %r4, {bytes}, %r2;
            {b}
            mad.lo.u32 %r6, %r4, {bytes}, %r2;
            setp.ge.u32 %p1, %r1, {lanes};
            @%p1 bra END;
            {products}
            st.global.{ty} [%rd2], %s8;
        END:
            ret;
        }}",
        64 * bytes,
        128 * bytes,
        192 * bytes,
    )
}

#[test]
fn sums_of_products_are_what_single_ones_are() {
    let bench = Bench::new();
    let single: Vec<f32> = (0..64).map(|i| 0.37 * i as f32 - 9.25).collect();
    let double: Vec<f64> = (0..64).map(|i| 1.0 / (f64::from(i) + 0.3)).collect();
    for a in PLACES {
        for b in PLACES {
            for lanes in [64, 41] {
                bench.transform(&kernel("f32", a, b, lanes), &Shape::new(1, 64), &single);
                bench.transform(&kernel("f64", a, b, lanes), &Shape::new(1, 64), &double);
            }
        }
    }
}

#[test]
fn not_a_number_is_the_same_after_any_number_of_products() {
    let bench = Bench::new();
    for place in [5, 50] {
        let mut words: Vec<u32> = (0..64).map(|i| (i as f32).to_bits()).collect();
        words[place] = 0x7FA1_2345;
        words[9] = f32::INFINITY.to_bits();
        let out =
            bench.transform(&kernel("f32", PLACES[1], PLACES[0], 64), &Shape::new(1, 64), &words);
        assert!(out.contains(&0x7FFF_FFFF));
    }
}

#[test]
fn a_sum_that_something_else_reads_stays_in_its_register() {
    let bench = Bench::new();
    let data: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let text = kernel("f32", PLACES[0], PLACES[1], 64);
    for also in ["%s3", "%a2", "%b7"] {
        let text = text.replace(
            "st.global.f32 [%rd2], %s8;",
            &format!("add.f32 %s9, %s8, {also}; st.global.f32 [%rd2], %s9;"),
        );
        bench.transform(&text, &Shape::new(1, 64), &data);
    }
}

#[test]
fn one_instruction_stands_for_the_loop() {
    if Level::detect() < Level::Avx512 {
        return;
    }
    let bench = Bench::new();
    let text = kernel("f32", PLACES[0], PLACES[1], 64);
    let len = |level| bench.program(&text, level).code.len();
    assert_eq!(len(Level::Avx2) - len(Level::Avx512), 8 * 3 - 1);
}

#[test]
fn an_address_may_be_computed_between_the_strips() {
    let bench = Bench::new();
    let data: Vec<f32> = (0..64).map(|i| 2.5 * i as f32 - 7.0).collect();
    let (a, b) = (PLACES[2], PLACES[0]);
    let text = kernel("f32", a, b, 64);
    // The second base, after the first strip's first load; with a change of the first one's base,
    // too.
    let late = "mad.lo.u32 %r6, %r4, 4, %r2;";
    let first = "ld.shared.f32 %a0, [%r5+0];";
    let later = text.replace(late, "").replace(first, &format!("{first} {late}"));
    assert_ne!(text, later);
    bench.transform(&later, &Shape::new(1, 64), &data);
    let moved = later.replace(late, &format!("{late} add.u32 %r5, %r5, 4;"));
    bench.transform(&moved, &Shape::new(1, 64), &data);
    if Level::detect() == Level::Avx512 {
        let len = |text: &str| bench.program(text, Level::Avx512).code.len();
        assert_eq!(len(&later), len(&text), "both are one instruction");
        assert!(len(&moved) > len(&text) + 8, "the sum stays apart where a base changes");
    }
}

#[test]
fn a_product_beyond_shared_memory_faults() {
    for (offset, kind) in [("+8192", FaultKind::IllegalAddress), ("+30", FaultKind::Misaligned)] {
        let text = kernel("f32", PLACES[0], PLACES[1], 64)
            .replace("%a5, [%r5+20]", &format!("%a5, [%r5{offset}]"));
        for level in [Level::Portable, Level::detect()] {
            let bench = Bench::new();
            let mut data = vec![0f32; 64];
            let addr = bench.map(&mut data);
            let program = bench.program(&text, level);
            let fault = bench.run(&program, &Shape::new(1, 64), &[addr]).unwrap_err();
            assert_eq!(fault.kind, kind, "{offset} {level:?}");
        }
    }
}
