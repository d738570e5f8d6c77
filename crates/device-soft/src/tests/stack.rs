//! Memory on the thread's stack whose size is known late.

use super::{Bench, Shape};
use crate::FaultKind;
use crate::exec::Level;

/// Each lane takes 16 (t mod 3 + 1) bytes twice, in a loop that gives back the first or keeps it,
/// writes both, calls a function that has a frame of its own, and sums what it finds.
fn kernel(save: &str, restore: &str, turns: u32) -> String {
    format!(
        ".func (.param .u32 out) other(.param .u32 in)
        {{
            .local .align 8 .b8 own[64];
            .reg .b32 %r<8>;
            .reg .b64 %rd<6>;
            ld.param.u32 %r1, [in];
            mov.u64 %rd1, own;
            st.local.u32 [%rd1], %r1;
            st.local.u32 [%rd1+60], %r1;
            mov.u64 %rd2, 16;
            alloca.u64 %rd3, %rd2, 8;
            st.local.u32 [%rd3], 99;
            ld.local.u32 %r2, [%rd1+60];
            add.u32 %r3, %r2, 1;
            st.param.u32 [out], %r3;
            ret;
        }}
        .visible .entry k(.param .u64 p)
        {{
            .reg .pred %p<4>;
            .reg .b32 %r<20>;
            .reg .b64 %rd<20>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r1, %tid.x;
            mad.wide.u32 %rd2, %r1, 4, %rd1;
            rem.u32 %r2, %r1, 3;
            add.u32 %r2, %r2, 1;
            shl.b32 %r2, %r2, 4;
            cvt.u64.u32 %rd3, %r2;
            mov.u32 %r3, 0;
            mov.u32 %r4, 0;
        LOOP:
            {save}
            alloca.u64 %rd5, %rd3, 16;
            alloca.u64 %rd6, %rd3;
            add.u64 %rd7, %rd6, %rd3;
            st.local.u32 [%rd5], %r1;
            st.local.u32 [%rd7+-4], %r3;
            cvta.local.u64 %rd8, %rd5;
            setp.eq.u32 %p1, %r2, 32;
            @%p1 bra SKIP;
            {{
                .param .u32 in;
                .param .u32 out;
                st.param.u32 [in], %r1;
                call.uni (out), other, (in);
                ld.param.u32 %r5, [out];
            }}
            add.u32 %r4, %r4, %r5;
        SKIP:
            ld.u32 %r6, [%rd8];
            ld.local.u32 %r7, [%rd7+-4];
            mad.lo.u32 %r4, %r4, 7, %r6;
            mad.lo.u32 %r4, %r4, 5, %r7;
            {restore}
            add.u32 %r3, %r3, 1;
            setp.lt.u32 %p2, %r3, {turns};
            @%p2 bra LOOP;
            st.global.u32 [%rd2], %r4;
            ret;
        }}"
    )
}

fn expected(thread: u32, turns: u32) -> u32 {
    (0..turns).fold(0u32, |sum, turn| {
        let sum = if thread % 3 == 1 { sum } else { sum.wrapping_add(thread + 1) };
        let sum = sum.wrapping_mul(7).wrapping_add(thread);
        sum.wrapping_mul(5).wrapping_add(turn)
    })
}

#[test]
fn what_is_taken_lies_apart_from_frames() {
    let bench = Bench::new();
    for (save, restore, turns) in
        [("", "", 4), ("stacksave.u64 %rd4;", "stackrestore.u64 %rd4;", 1000)]
    {
        let out = bench.transform(&kernel(save, restore, turns), &Shape::new(1, 50), &[0u32; 50]);
        let want: Vec<u32> = (0..50).map(|thread| expected(thread, turns)).collect();
        assert_eq!(out, want, "{turns} turns");
    }
}

#[test]
fn too_much_is_a_stack_overflow() {
    let bench = Bench::new();
    let mut data = [0u32; 32];
    let addr = bench.map(&mut data);
    let program = bench.program(&kernel("", "", 1000), Level::detect());
    let fault = bench.run(&program, &Shape::new(1, 32), &[addr]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::StackOverflow);
    let text = kernel("", "", 1).replace("cvt.u64.u32 %rd3, %r2;", "mov.u64 %rd3, -16;");
    let program = bench.program(&text, Level::detect());
    let fault = bench.run(&program, &Shape::new(1, 32), &[addr]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::StackOverflow);
}
