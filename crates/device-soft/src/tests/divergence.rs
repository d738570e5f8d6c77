//! Branches, loops, calls, spin locks, warp-level synchronisation.

use super::{Bench, Shape};

/// A kernel over `p[thread]` with `body` between the load of %r1 and the store of %r2.
fn on_each(body: &str) -> String {
    format!(
        ".visible .entry k(.param .u64 p)
        {{
            .reg .pred %p<8>;
            .reg .b32 %r<32>;
            .reg .b64 %rd<16>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r30, %tid.x;
            mov.u32 %r29, %ctaid.x;
            mov.u32 %r28, %ntid.x;
            mad.lo.u32 %r31, %r29, %r28, %r30;
            mul.wide.u32 %rd2, %r31, 4;
            add.u64 %rd1, %rd1, %rd2;
            ld.global.u32 %r1, [%rd1];
            {body}
            st.global.u32 [%rd1], %r2;
            ret;
        }}"
    )
}

#[test]
fn lanes_leave_a_loop_one_by_one() {
    let body = on_each(
        "mov.u32 %r2, 0;
        LOOP:
            setp.le.u32 %p1, %r1, 1;
            @%p1 bra OUT;
            and.b32 %r3, %r1, 1;
            setp.eq.u32 %p2, %r3, 0;
            @%p2 bra EVEN;
            mad.lo.u32 %r1, %r1, 3, 1;
            bra NEXT;
        EVEN:
            shr.u32 %r1, %r1, 1;
        NEXT:
            add.u32 %r2, %r2, 1;
            bra LOOP;
        OUT:",
    );
    let collatz = |mut n: u32| {
        let mut steps = 0;
        while n > 1 {
            n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    };
    let data: Vec<u32> = (1..=256).collect();
    let want: Vec<u32> = data.iter().map(|&n| collatz(n)).collect();
    assert_eq!(Bench::new().transform(&body, &Shape::new(2, 128), &data), want);
}

#[test]
fn a_lock_between_lanes_of_a_warp_is_fair() {
    let body = "
    .visible .global .align 4 .u32 lock;
    .visible .global .align 4 .u32 total;
    .visible .entry k(.param .u64 p)
    {
        .reg .pred %p<4>;
        .reg .b32 %r<8>;
        .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [p];
    SPIN:
        atom.global.cas.b32 %r1, [lock], 0, 1;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra SPIN;
        ld.volatile.global.u32 %r2, [%rd1];
        add.u32 %r2, %r2, 1;
        st.volatile.global.u32 [%rd1], %r2;
        membar.gl;
        atom.global.exch.b32 %r3, [lock], 0;
        ret;
    }";
    assert_eq!(Bench::new().transform(body, &Shape::new(2, 64), &[0u32]), [128]);
}

#[test]
fn a_shuffle_waits_for_diverged_lanes() {
    let body = on_each(
        "setp.lt.u32 %p1, %r1, 16;
        @%p1 bra LOW;
        add.u32 %r4, %r1, 100;
        bra JOIN;
        LOW:
        add.u32 %r4, %r1, 200;
        JOIN:
        shfl.sync.bfly.b32 %r5|%p2, %r4, 16, 31, -1;
        vote.sync.ballot.b32 %r6, %p1, -1;
        popc.b32 %r7, %r6;
        add.u32 %r2, %r5, %r7;",
    );
    let data: Vec<u32> = (0..32).collect();
    let out = Bench::new().transform(&body, &Shape::new(1, 32), &data);
    for (lane, &value) in out.iter().enumerate() {
        let other = (lane ^ 16) as u32;
        assert_eq!(value, other + if other < 16 { 200 } else { 100 } + 16);
    }
}

#[test]
fn tiles_with_their_own_masks_do_not_wait_for_each_other() {
    let body = on_each(
        "and.b32 %r3, %r1, 28;
        mov.u32 %r4, 15;
        shl.b32 %r4, %r4, %r3;
        setp.lt.u32 %p1, %r1, 8;
        mov.u32 %r2, 0;
        @%p1 bra SKIP;
        shfl.sync.idx.b32 %r2, %r1, 0, 0x1c1f, %r4;
        SKIP:",
    );
    let data: Vec<u32> = (0..32).collect();
    let out = Bench::new().transform(&body, &Shape::new(1, 32), &data);
    let want: Vec<u32> = (0..32).map(|i| if i < 8 { 0 } else { i & 28 }).collect();
    assert_eq!(out, want);
}

#[test]
fn functions_recurse_on_their_own_lanes() {
    let body = "
    .func (.param .b32 r) fib(.param .b32 n)
    {
        .reg .pred %p<2>;
        .reg .b32 %r<8>;
        ld.param.u32 %r1, [n];
        setp.lt.u32 %p1, %r1, 2;
        @%p1 bra BASE;
        add.u32 %r2, %r1, -1;
        { .param .b32 a; .param .b32 b;
          st.param.b32 [a], %r2;
          call.uni (b), fib, (a);
          ld.param.b32 %r3, [b]; }
        add.u32 %r4, %r1, -2;
        { .param .b32 a; .param .b32 b;
          st.param.b32 [a], %r4;
          call.uni (b), fib, (a);
          ld.param.b32 %r5, [b]; }
        add.u32 %r6, %r3, %r5;
        st.param.b32 [r], %r6;
        ret;
    BASE:
        st.param.b32 [r], %r1;
        ret;
    }
    "
    .to_string()
        + &on_each(
            "{ .param .b32 a; .param .b32 b;
              st.param.b32 [a], %r1;
              call.uni (b), fib, (a);
              ld.param.b32 %r2, [b]; }",
        );
    let data: Vec<u32> = (0..32).map(|i| i % 11).collect();
    let fibs = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55];
    let want: Vec<u32> = data.iter().map(|&n| fibs[n as usize]).collect();
    assert_eq!(Bench::new().transform(&body, &Shape::new(1, 32), &data), want);
}

#[test]
fn indirect_calls_go_where_each_lane_says() {
    let body = "
    .func (.param .b32 r) twice(.param .b32 n)
    { .reg .b32 %r<4>; ld.param.u32 %r1, [n]; shl.b32 %r2, %r1, 1; st.param.b32 [r], %r2; ret; }
    .func (.param .b32 r) square(.param .b32 n)
    { .reg .b32 %r<4>; ld.param.u32 %r1, [n]; mul.lo.u32 %r2, %r1, %r1; st.param.b32 [r], %r2; ret; }
    .visible .global .align 8 .u64 table[2] = {twice, square};
    "
    .to_string()
        + &on_each(
            "and.b32 %r3, %r1, 1;
            mul.wide.u32 %rd3, %r3, 8;
            mov.u64 %rd4, table;
            add.u64 %rd4, %rd4, %rd3;
            ld.global.u64 %rd5, [%rd4];
            { .param .b32 a; .param .b32 b;
              st.param.b32 [a], %r1;
              prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);
              call (b), %rd5, (a), prototype_0;
              ld.param.b32 %r2, [b]; }",
        );
    let data: Vec<u32> = (0..64).collect();
    let want: Vec<u32> = data.iter().map(|&n| if n % 2 == 0 { 2 * n } else { n * n }).collect();
    assert_eq!(Bench::new().transform(&body, &Shape::new(1, 64), &data), want);
}

#[test]
fn a_table_of_branches() {
    let body = on_each(
        "and.b32 %r3, %r1, 3;
        ts: .branchtargets A, B, C, A;
        brx.idx %r3, ts;
        A: mov.u32 %r2, 10; bra JOIN;
        B: mov.u32 %r2, 20; bra JOIN;
        C: mov.u32 %r2, 30;
        JOIN:",
    );
    let data: Vec<u32> = (0..32).collect();
    let want: Vec<u32> = (0..32).map(|i| [10, 20, 30, 10][i % 4]).collect();
    assert_eq!(Bench::new().transform(&body, &Shape::new(1, 32), &data), want);
}

#[test]
fn a_barrier_that_nobody_completes_is_a_fault() {
    let body = on_each(
        "setp.ne.u32 %p1, %r30, 0;
        mov.u32 %r2, 0;
        @%p1 bar.sync 1, 64;",
    );
    let bench = Bench::new();
    let mut data = vec![0u32; 32];
    let addr = bench.map(&mut data);
    let program = bench.program(&body, crate::exec::Level::detect());
    let fault = bench.run(&program, &Shape::new(1, 32), &[addr]).unwrap_err();
    assert!(fault.detail.contains("deadlock"), "{fault}");
}

#[test]
fn blocks_that_wait_for_each_other_all_run() {
    // More blocks than workers, each waiting for all to arrive.
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .reg .pred %p<4>;
        .reg .b32 %r<8>;
        .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %nctaid.x;
        atom.global.add.u32 %r2, [%rd1], 1;
    WAIT:
        ld.acquire.gpu.global.u32 %r3, [%rd1];
        setp.lt.u32 %p1, %r3, %r1;
        @%p1 bra WAIT;
        red.global.add.u32 [%rd1+4], 1;
        ret;
    }";
    let shape = Shape { cooperative: true, ..Shape::new(20, 1) };
    assert_eq!(Bench::new().transform(body, &shape, &[0u32, 0]), [20, 20]);
}

/// Warps that wait for time to pass wait together: all have begun before the first one ends.
#[test]
fn warps_watch_the_clock_together() {
    let text = ".visible .entry k(.param .u64 data) {
        .reg .b32 %r<4>; .reg .b64 %rd<8>; .reg .pred %p<2>;
        ld.param.u64 %rd1, [data];
        mov.u64 %rd2, %clock64;
        LOOP: mov.u64 %rd3, %clock64;
        sub.s64 %rd4, %rd3, %rd2; setp.lt.s64 %p1, %rd4, 50000000; @%p1 bra LOOP;
        mov.u32 %r1, %tid.x; mul.wide.u32 %rd5, %r1, 16; add.u64 %rd6, %rd1, %rd5;
        st.global.v2.u64 [%rd6], {%rd2, %rd3}; ret; }";
    let bench = Bench::new();
    let mut times = vec![0u64; 512];
    let addr = bench.map(&mut times);
    let program = bench.program(text, crate::exec::Level::detect());
    bench.run(&program, &Shape::new(1, 256), &[addr]).unwrap();
    let last_start = times.iter().step_by(2).max();
    let first_end = times.iter().skip(1).step_by(2).min();
    assert!(last_start < first_end, "{last_start:?} {first_end:?}");
}

/// Thread 0 hands a number to its block, and the next one without a barrier before it: hardware's
/// warps, which leave the first barrier together, have all read the first number by then.
#[test]
fn what_a_block_has_been_handed_is_read_before_the_next_is_stored() {
    let kernel = "
        .visible .entry k(.param .u64 p)
        {
            .shared .align 4 .b8 sum[4];
            .reg .pred %p<2>;
            .reg .b32 %r<8>;
            .reg .b64 %rd<4>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r1, %tid.x;
            mad.wide.u32 %rd2, %r1, 4, %rd1;
            setp.ne.s32 %p1, %r1, 0;
            @%p1 bra FIRST;
            st.shared.u32 [sum], 5;
        FIRST:
            bar.sync 0;
            ld.shared.u32 %r3, [sum];
            @%p1 bra SECOND;
            st.shared.u32 [sum], 9;
        SECOND:
            bar.sync 0;
            ld.shared.u32 %r4, [sum];
            mad.lo.u32 %r5, %r3, 100, %r4;
            st.global.u32 [%rd2], %r5;
            ret;
        }";
    let out = Bench::new().transform(kernel, &Shape::new(1, 256), &[0u32; 256]);
    assert_eq!(out, [509; 256]);
}

#[test]
fn sleepers_sleep_and_the_others_go_on() {
    // Each lane sleeps twice for a time of its own, the first not at all, and then all for the
    // longest.
    let body = on_each(
        "mov.u64 %rd3, %globaltimer;
            setp.eq.u32 %p1, %r1, 0;
            mul.lo.u32 %r4, %r1, 100000;
            @!%p1 nanosleep.u32 %r4;
            @!%p1 nanosleep.u32 %r4;
            nanosleep.u32 4000000000;
            mov.u64 %rd4, %globaltimer;
            sub.u64 %rd4, %rd4, %rd3;
            mad.lo.u32 %r5, %r4, 2, 1000000;
            cvt.u64.u32 %rd5, %r5;
            setp.ge.u64 %p2, %rd4, %rd5;
            selp.u32 %r2, 1, 0, %p2;",
    );
    let data: Vec<u32> = (0..96).map(|lane| lane % 3).collect();
    assert_eq!(Bench::new().transform(&body, &Shape::new(1, 96), &data), vec![1; 96]);
}
