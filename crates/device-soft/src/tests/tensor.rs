//! Tensor copies, asynchronous stores and reductions, and atomics on halves.

use super::{Bench, Shape};
use crate::math::narrow::f32_to_f16;
use kedge_cuda_types::tensor_map::{Format, Interleave, Mode, Swizzle, TensorMap};

/// Words of the kernels' data: a map in the first 32, a plane of 16 × 8 words behind them.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(align(128))]
struct Line([u32; 32]);

/// A map of the plane, which begins one line after `addr`. Its address is set on the device.
fn plane(swizzle: Swizzle, nan_fill: bool) -> [u8; 128] {
    TensorMap {
        format: Format::F32,
        rank: 2,
        address: 0,
        dims: [16, 8, 1, 1, 1],
        strides: [64, 0, 0, 0],
        steps: [1; 5],
        mode: Mode::Tiled { extent: [8, 4, 1, 1, 1] },
        interleave: Interleave::None,
        swizzle,
        promotion: 0,
        nan_fill,
    }
    .encode()
}

fn data(map: [u8; 128]) -> Vec<Line> {
    let mut lines = vec![Line([0; 32]); 6];
    for (word, bytes) in lines[0].0.iter_mut().zip(map.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    for index in 0..128 {
        lines[1 + index / 32].0[index % 32] = (index as f32).to_bits();
    }
    lines
}

const HEAD: &str = ".visible .entry k(.param .u64 p) {
    .shared .align 1024 .b8 tile[1024];
    .shared .align 8 .b8 bar[8];
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f32 %f<4>;
    ld.param.u64 %rd1, [p];
    add.u64 %rd2, %rd1, 128;
    add.u64 %rd3, %rd1, 640;
    tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;
    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
    mov.u32 %r1, tile; mov.u32 %r2, bar;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;";

/// Loads the tile at (`x`, `y`) and copies its 128 bytes, as they lie, to the last line.
fn loaded(map: [u8; 128], x: i32, y: i32) -> Vec<u32> {
    let body = format!(
        "{HEAD}
    mov.b32 %r3, {x}; mov.b32 %r4, {y};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd1, {{%r3, %r4}}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r1], 128;
    ret; }}"
    );
    // The address in the map differs from run to run, so the levels are not compared by
    // `transform`.
    let bench = Bench::new();
    let program = bench.program(&body, crate::exec::Level::detect());
    assert_eq!(program.kernels[0].unsupported, None);
    let mut lines = data(map);
    let addr = bench.map(&mut lines);
    bench.run(&program, &Shape::new(1, 1), &[addr]).unwrap();
    lines[5].0.to_vec()
}

#[test]
fn a_tile_is_loaded_and_filled() {
    let out = loaded(plane(Swizzle::None, false), 12, -1);
    let nan = loaded(plane(Swizzle::None, true), 12, -1);
    for (index, (zero, nan)) in out.iter().zip(nan).enumerate() {
        let (row, column) = (index as i32 / 8 - 1, index as i32 % 8 + 12);
        let inside = row >= 0 && column < 16;
        let value = if inside { (row * 16 + column) as f32 } else { 0.0 };
        assert_eq!(f32::from_bits(*zero), value, "row {row}, column {column}");
        assert!(inside || f32::from_bits(nan).is_nan());
    }
}

#[test]
fn the_first_line_of_a_swizzle_is_as_it_was() {
    // 128 bytes are one line: line 0 of a pattern is as it was.
    let plain = loaded(plane(Swizzle::None, false), 4, 2);
    assert_eq!(loaded(plane(Swizzle::B32, false), 4, 2), plain);
    assert_eq!(f32::from_bits(plain[9]), (3 * 16 + 5) as f32);
}

#[test]
fn a_tile_is_reduced_and_stored() {
    let body = format!(
        "{HEAD}
    mov.b32 %r3, 12; mov.b32 %r4, 6;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd1, {{%r3, %r4}}], [%r2];
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group
        [%rd1, {{%r3, %r4}}], [%r1];
    mov.b32 %r4, -2;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {{%r3, %r4}}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    ret; }}"
    );
    let bench = Bench::new();
    let program = bench.program(&body, crate::exec::Level::detect());
    assert_eq!(program.kernels[0].unsupported, None);
    let mut lines = data(plane(Swizzle::B32, false));
    let addr = bench.map(&mut lines);
    bench.run(&program, &Shape::new(1, 1), &[addr]).unwrap();
    for index in 0..128 {
        let (row, column) = (index / 16, index % 16);
        let value = match (row, column >= 12) {
            (6.., true) => 2 * index,
            // The lower half of the tile was outside when it was loaded: zeros.
            (..2, true) => 0,
            _ => index,
        };
        assert_eq!(f32::from_bits(lines[1 + index / 32].0[index % 32]), value as f32, "{index}");
    }
}

#[test]
fn a_map_that_is_none_is_named() {
    let body = format!(
        "{}
    mov.b32 %r3, 0;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd1, {{%r3}}], [%r2];
    ret; }}",
        HEAD.replace("tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;", "")
    );
    let bench = Bench::new();
    let program = bench.program(&body, crate::exec::Level::detect());
    let mut lines = data([0; 128]);
    let addr = bench.map(&mut lines);
    let fault = bench.run(&program, &Shape::new(1, 1), &[addr]).unwrap_err();
    assert!(fault.detail.contains("no tensor map"), "{fault}");
}

#[test]
fn stores_and_reductions_tell_their_mbarrier() {
    let body = ".visible .entry k(.param .u64 p) {
    .shared .align 16 .b8 tile[32];
    .shared .align 8 .b8 bar[8];
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, tile; mov.u32 %r2, bar; mov.b32 %r3, 7; mov.b32 %r4, 9;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 28;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r1], {%r3, %r4}, [%r2];
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r1+8], {%r4, %r4}, [%r2];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
        [%r1], %r4, [%r2];
    mov.u64 %rd2, 40;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64
        [%r1+8], %rd2, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u32 [%rd1], [%r1], 16;
    ret; }";
    let start = 3u128 | 90 << 32 | 100 << 64 | 1 << 96;
    let out = Bench::new().transform(body, &Shape::new(1, 1), &[start]);
    assert_eq!(out, [16 | 90 << 32 | 100 << 64 | 9 << 96]);
}

#[test]
fn atomics_on_vectors_of_halves() {
    let half = |low: f32, high: f32| u32::from(f32_to_f16(low)) | u32::from(f32_to_f16(high)) << 16;
    let body = ".visible .entry k(.param .u64 p) {
    .reg .b32 %r<16>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p];
    mov.b32 %r1, 0x3C00C000; mov.b32 %r2, 0x40004000;
    atom.global.v2.f16x2.min.noftz {%r3, %r4}, [%rd1], {%r1, %r2};
    red.global.v2.f16x2.max.noftz [%rd1+8], {%r1, %r2};
    st.global.v2.b32 [%rd1+16], {%r3, %r4};
    ret; }";
    let (a, b) = (half(1.0, -3.0), half(5.0, f32::NAN));
    let mut start = [0; 8];
    start[..4].copy_from_slice(&[a, b, a, b]);
    // 16-byte units: vectors of words may not be aligned to the access.
    let lines = [Line(std::array::from_fn(|i| start.get(i).copied().unwrap_or(0)))];
    let out = Bench::new().transform(body, &Shape::new(1, 1), &lines);
    let low = [half(-2.0, -3.0), half(2.0, 2.0), half(1.0, 1.0), half(5.0, 2.0), a, b];
    assert_eq!(out[0].0[..6], low);
}
