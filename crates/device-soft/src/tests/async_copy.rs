//! cp.async, bulk copies and mbarriers.

use super::{Bench, Shape};

#[test]
fn copies_and_an_mbarrier_move_a_tile() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .shared .align 16 .b8 tile[1024];
        .shared .align 8 .b8 bar[8];
        .reg .pred %p<4>;
        .reg .b32 %r<12>;
        .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, bar;
        mov.u32 %r9, %ntid.x;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r2], %r9;
    READY:
        bar.sync 0;
        shl.b32 %r3, %r1, 2;
        mov.u32 %r4, tile;
        add.u32 %r5, %r4, %r3;
        cvt.u64.u32 %rd2, %r3;
        add.u64 %rd3, %rd1, %rd2;
        cp.async.ca.shared.global [%r5], [%rd3], 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        mbarrier.arrive.shared.b64 %rd4, [%r2];
    WAIT:
        mbarrier.test_wait.shared.b64 %p2, [%r2], %rd4;
        @!%p2 bra WAIT;
        sub.u32 %r6, %r4, %r3;
        ld.shared.u32 %r7, [%r6+252];
        st.global.u32 [%rd3], %r7;
        ret;
    }";
    let data: Vec<u32> = (0..64).collect();
    let out = Bench::new().transform(body, &Shape::new(1, 64), &data);
    assert_eq!(out, (0..64).rev().collect::<Vec<u32>>());
}

/// Even lanes copy `bytes` bytes each, of which `taken` come from the source, the rest being zero.
fn copied(bytes: u64, source: &str, taken: u64) {
    let body = format!(
        "
    .visible .entry k(.param .u64 p)
    {{
        .shared .align 16 .b8 tile[1024];
        .reg .pred %p<4>;
        .reg .b32 %r<12>;
        .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, tile;
        mad.wide.u32 %rd3, %r1, {bytes}, %rd1;
        mad.lo.u32 %r3, %r1, {bytes}, %r2;
        and.b32 %r4, %r1, 1;
        setp.eq.u32 %p1, %r4, 0;
        mov.u32 %r5, -1;
        st.shared.u32 [%r3], %r5;
        mov.u32 %r6, {taken};
        @%p1 cp.async.ca.shared.global [%r3], [%rd3], {bytes}{source};
        cp.async.wait_all;
        ld.shared.u32 %r7, [%r3];
        st.global.u32 [%rd3], %r7;
        ld.shared.u32 %r8, [%r3+{last}];
        @%p1 st.global.u32 [%rd3+{last}], %r8;
        ret;
    }}",
        last = bytes - 4
    );
    let words = bytes as usize / 4;
    let data: Vec<u32> = (1..=32 * words as u32).collect();
    let out = Bench::new().transform(&body, &Shape::new(1, 32), &data);
    let mut want = data.clone();
    for lane in 0..32 {
        let own = &mut want[lane * words..][..words];
        if lane % 2 != 0 {
            own[0] = u32::MAX;
        } else {
            let here = |at: usize, value: u32| if (at as u64) < taken / 4 { value } else { 0 };
            own[0] = here(0, own[0]);
            own[words - 1] = here(words - 1, own[words - 1]);
        }
    }
    assert_eq!(out, want, "{bytes} bytes, {taken} taken");
}

#[test]
fn copies_of_every_size_and_of_less_than_that() {
    for bytes in [4, 8, 16] {
        copied(bytes, "", bytes);
        copied(bytes, ", %r6", bytes);
        copied(bytes, ", %r6", bytes - 4);
        copied(bytes, ", %r6", 0);
    }
}

#[test]
fn a_bulk_copy_tells_its_mbarrier() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .shared .align 16 .b8 tile[256];
        .shared .align 8 .b8 bar[8];
        .reg .pred %p<4>;
        .reg .b32 %r<12>;
        .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, bar;
        mov.u32 %r3, tile;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r2], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 256, [%r2];
    READY:
        bar.sync 0;
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
        @!%p2 bra WAIT;
        shl.b32 %r4, %r1, 2;
        add.u32 %r5, %r3, %r4;
        ld.shared.u32 %r6, [%r5];
        add.u32 %r6, %r6, 1;
        st.shared.u32 [%r5], %r6;
        bar.sync 0;
        @%p1 ret;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 256;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        ret;
    }";
    let data: Vec<u32> = (0..64).collect();
    // Global addresses of bulk copies are multiples of 16: a vector's start may not be.
    let aligned: Vec<u128> =
        data.chunks(4).map(|c| c.iter().rev().fold(0, |v, &x| v << 32 | u128::from(x))).collect();
    let out = Bench::new().transform(body, &Shape::new(1, 64), &aligned);
    for (index, word) in out.iter().enumerate() {
        for part in 0..4 {
            assert_eq!((word >> (32 * part)) as u32, 4 * index as u32 + part + 1);
        }
    }
}

#[test]
fn blocks_of_a_cluster_read_each_others_shared_memory() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .shared .align 4 .u32 mine;
        .reg .b32 %r<12>;
        .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %ctaid.x;
        st.shared.u32 [mine], %r1;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mov.u32 %r2, %cluster_ctarank;
        xor.b32 %r3, %r2, 1;
        mov.u32 %r4, mine;
        mapa.shared::cluster.u32 %r5, %r4, %r3;
        ld.shared::cluster.u32 %r6, [%r5];
        getctarank.shared::cluster.u32 %r7, %r5;
        mad.lo.u32 %r6, %r7, 100, %r6;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mul.wide.u32 %rd2, %r1, 4;
        add.u64 %rd3, %rd1, %rd2;
        st.global.u32 [%rd3], %r6;
        ret;
    }";
    let shape = Shape { cluster: [2, 1, 1], ..Shape::new(6, 1) };
    let out = Bench::new().transform(body, &shape, &[0u32; 6]);
    assert_eq!(out, [101, 0, 103, 2, 105, 4]);
}
