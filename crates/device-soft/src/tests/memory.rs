//! Atomics, local memory, dynamic shared memory, generic addresses.

use super::{Bench, Shape};

/// A kernel of one warp whose lanes do `op` on `[%rd1]` with the lane number in %r1 and %f1.
fn atomic(instruction: &str) -> String {
    format!(
        ".visible .entry k(.param .u64 p)
        {{
            .reg .b32 %r<8>;
            .reg .f32 %f<4>;
            .reg .b64 %rd<8>;
            .reg .f64 %fd<4>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r1, %tid.x;
            cvt.rn.f32.u32 %f1, %r1;
            cvt.rn.f64.u32 %fd1, %r1;
            cvt.u64.u32 %rd2, %r1;
            {instruction};
            ret;
        }}"
    )
}

#[test]
fn every_atomic_adds_up() {
    let bench = Bench::new();
    let shape = Shape::new(4, 32);
    let words: &[(&str, u32, u32)] = &[
        ("red.global.add.u32 [%rd1], %r1", 5, 5 + 4 * 496),
        ("atom.global.min.u32 %r2, [%rd1], %r1", 7, 0),
        ("atom.global.max.s32 %r2, [%rd1], %r1", -5i32 as u32, 31),
        ("atom.global.min.s32 %r2, [%rd1], %r1", -5i32 as u32, -5i32 as u32),
        ("red.global.or.b32 [%rd1], %r1", 64, 95),
        ("red.global.and.b32 [%rd1], %r1", 255, 0),
        ("red.global.xor.b32 [%rd1], %r1", 3, 3),
        ("atom.global.inc.u32 %r2, [%rd1], 9", 0, 128 % 10),
        ("atom.global.dec.u32 %r2, [%rd1], 9", 0, 2),
        ("atom.global.add.f32 %f2, [%rd1], %f1", 0, (4.0f32 * 496.0).to_bits()),
        ("atom.global.exch.b32 %r2, [%rd1], 77", 0, 77),
        ("atom.add.u32 %r2, [%rd1], 1", 0, 128),
        ("red.relaxed.gpu.global.add.noftz.f16x2 [%rd1], 0x3c003c00", 0, 0x5800_5800),
    ];
    for &(instruction, before, after) in words {
        let out = bench.transform(&atomic(instruction), &shape, &[before, before]);
        assert_eq!(out, [after, before], "{instruction}");
    }
    let wide: &[(&str, u64, u64)] = &[
        ("atom.global.add.u64 %rd3, [%rd1], %rd2", 1 << 40, (1 << 40) + 4 * 496),
        ("atom.global.max.u64 %rd3, [%rd1], %rd2", 3, 31),
        ("red.global.add.f64 [%rd1], %fd1", 0, (4.0f64 * 496.0).to_bits()),
        ("atom.global.cas.b64 %rd3, [%rd1], 5, 6", 5, 6),
        ("atom.global.exch.b64 %rd3, [%rd1], 1", 0, 1),
    ];
    for &(instruction, before, after) in wide {
        let out = bench.transform(&atomic(instruction), &shape, &[before, before]);
        assert_eq!(out, [after, before], "{instruction}");
    }
}

#[test]
fn shared_counters_and_generic_addresses() {
    let body = "
    .extern .shared .align 4 .b8 dynamic[];
    .visible .entry k(.param .u64 p)
    {
        .shared .align 4 .u32 pad;
        .local .align 4 .b8 depot[64];
        .reg .pred %p<4>;
        .reg .b32 %r<16>;
        .reg .b64 %rd<16>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 15;
        shl.b32 %r3, %r2, 2;
        mov.u32 %r4, dynamic;
        add.u32 %r5, %r4, %r3;
        setp.gt.u32 %p1, %r1, 15;
        @%p1 bra COUNT;
        st.shared.u32 [%r5], 0;
    COUNT:
        bar.sync 0;
        atom.shared.add.u32 %r6, [%r5], 1;
        bar.sync 0;
        mov.u64 %rd2, depot;
        cvta.local.u64 %rd3, %rd2;
        cvt.u64.u32 %rd4, %r3;
        add.u64 %rd5, %rd3, %rd4;
        st.u32 [%rd5], %r1;
        add.u64 %rd6, %rd2, %rd4;
        ld.local.u32 %r7, [%rd6];
        cvt.u64.u32 %rd7, %r5;
        cvta.shared.u64 %rd8, %rd7;
        isspacep.shared %p2, %rd8;
        isspacep.local %p3, %rd8;
        ld.u32 %r8, [%rd8];
        mad.lo.u32 %r9, %r7, 1000, %r8;
        selp.u32 %r10, 100, 0, %p2;
        add.u32 %r9, %r9, %r10;
        selp.u32 %r10, 500, 0, %p3;
        add.u32 %r9, %r9, %r10;
        mul.wide.u32 %rd9, %r1, 4;
        add.u64 %rd10, %rd1, %rd9;
        st.global.u32 [%rd10], %r9;
        ret;
    }";
    let shape = Shape { shared: 64, ..Shape::new(1, 96) };
    let out = Bench::new().transform(body, &shape, &[0u32; 96]);
    assert!(out.iter().enumerate().all(|(i, &v)| v as usize == i * 1000 + 106), "{out:?}");
}

#[test]
fn warps_vote_match_and_reduce() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .reg .pred %p<8>;
        .reg .b32 %r<16>;
        .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %rd2, %r1, 16;
        add.u64 %rd1, %rd1, %rd2;
        and.b32 %r2, %r1, 3;
        match.any.sync.b32 %r3, %r2, -1;
        match.all.sync.b32 %r4|%p1, %r2, -1;
        redux.sync.add.s32 %r5, %r1, -1;
        redux.sync.max.u32 %r6, %r1, -1;
        setp.gt.u32 %p2, %r1, 3;
        vote.sync.any.pred %p3, %p2, -1;
        vote.sync.all.pred %p4, %p2, -1;
        selp.u32 %r7, 1, 0, %p1;
        selp.u32 %r8, 2, 0, %p3;
        selp.u32 %r9, 4, 0, %p4;
        or.b32 %r7, %r7, %r8;
        or.b32 %r7, %r7, %r9;
        activemask.b32 %r10;
        add.u32 %r10, %r10, %r4;
        shfl.sync.up.b32 %r11|%p5, %r1, 2, 0, -1;
        add.u32 %r6, %r6, %r11;
        st.global.v4.u32 [%rd1], {%r3, %r5, %r7, %r6};
        ret;
    }";
    let out = Bench::new().transform(body, &Shape::new(1, 32), &[0u32; 128]);
    for lane in 0..32u32 {
        let up = if lane < 2 { lane } else { lane - 2 };
        let want = [0x1111_1111 << (lane & 3), 496, 2, 31 + up];
        assert_eq!(out[lane as usize * 4..][..4], want, "lane {lane}");
    }
}

#[test]
fn a_stack_overflow_is_a_fault() {
    let body = "
    .func deep(.param .b32 n)
    {
        .local .align 4 .b8 depot[256];
        .reg .b32 %r<4>;
        ld.param.u32 %r1, [n];
        add.u32 %r2, %r1, 1;
        { .param .b32 a; st.param.b32 [a], %r2; call.uni deep, (a); }
        ret;
    }
    .visible .entry k() { { .param .b32 a; st.param.b32 [a], 0; call.uni deep, (a); } ret; }";
    let bench = Bench::new();
    let program = bench.program(body, crate::exec::Level::detect());
    let fault = bench.run(&program, &Shape::new(1, 32), &[]).unwrap_err();
    assert_eq!(fault.kind, crate::FaultKind::StackOverflow);
}
