//! Loads from one base register, which are joined where the host is wide, give what single loads
//! give.

use super::{Bench, Shape};
use crate::exec::Level;
use crate::fault::FaultKind;

/// A kernel that loads around `[base]`, reuses its registers, stores in between, and keeps a sum of
/// all.
fn kernel(space: &str, base: &str, lanes: u32) -> String {
    let at = if space == "shared" { "%r5" } else { "%rd5" };
    let address = match space {
        "shared" => "mov.u32 %r4, tile; add.u32 %r5, %r4, %r3;",
        _ => "cvt.u64.u32 %rd4, %r3; add.u64 %rd5, %rd1, %rd4;",
    };
    format!(
        ".visible .entry k(.param .u64 p)
        {{
            .shared .align 16 .b8 tile[4096];
            .reg .pred %p<4>;
            .reg .b32 %r<40>;
            .reg .b64 %rd<12>;
            ld.param.u64 %rd1, [p];
            mov.u32 %r1, %tid.x;
            mad.wide.u32 %rd2, %r1, 32, %rd1;
            mad.lo.u32 %r2, %r1, 32, 0;
            mov.u32 %r4, tile;
            add.u32 %r6, %r4, %r2;
            ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd2];
            ld.global.v4.u32 {{%r14, %r15, %r16, %r17}}, [%rd2+16];
            st.shared.v4.u32 [%r6], {{%r10, %r11, %r12, %r13}};
            st.shared.v4.u32 [%r6+16], {{%r14, %r15, %r16, %r17}};
            bar.sync 0;
            {base}
            {address}
            mov.u32 %r30, 0;
            setp.lt.u32 %p1, %r1, {lanes};
            @!%p1 bra END;
            mov.u32 %r31, 0;
        LOOP:
            ld.{space}.u32 %r20, [{at}];
            mad.lo.u32 %r30, %r20, 3, %r30;
            ld.{space}.u32 %r21, [{at}+64];
            mad.lo.u32 %r30, %r21, 5, %r30;
            ld.{space}.u32 %r20, [{at}+128];
            ld.{space}.v4.u32 {{%r22, %r23, %r24, %r25}}, [{at}+256];
            mad.lo.u32 %r30, %r20, 7, %r30;
            mad.lo.u32 %r30, %r22, %r23, %r30;
            ld.{space}.v2.u32 {{%r26, %r27}}, [{at}+8];
            mad.lo.u32 %r30, %r24, %r25, %r30;
            ld.{space}.u64 %rd8, [{at}+24];
            ld.{space}.u64 %rd9, [{at}+32];
            xor.b64 %rd8, %rd8, %rd9;
            cvt.u32.u64 %r28, %rd8;
            st.shared.u32 [%r6], %r30;
            ld.{space}.u32 %r29, [{at}+4];
            mad.lo.u32 %r30, %r29, 11, %r30;
            add.u32 %r30, %r30, %r28;
            xor.b32 %r30, %r30, %r26;
            add.u32 %r30, %r30, %r27;
            add.u32 %r31, %r31, 1;
            setp.lt.u32 %p2, %r31, 3;
            @%p2 bra LOOP;
        END:
            bar.sync 0;
            st.global.u32 [%rd2], %r30;
            ret;
        }}"
    )
}

#[test]
fn joined_loads_give_what_single_ones_give() {
    let bench = Bench::new();
    let words: Vec<u32> = (0..512u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ 0x5A5A).collect();
    // Own words side by side, structures, one place for all, rows of 16 and of a half each,
    // anywhere.
    let bases = [
        "mad.lo.u32 %r3, %r1, 16, 0;",
        "mov.u32 %r3, 32;",
        "and.b32 %r3, %r1, 15; shl.b32 %r3, %r3, 4;",
        "shr.u32 %r3, %r1, 4; shl.b32 %r3, %r3, 6;",
        "mul.lo.u32 %r3, %r1, 7; and.b32 %r3, %r3, 63; shl.b32 %r3, %r3, 4;",
    ];
    for base in bases {
        for lanes in [64, 50] {
            // In global memory the lanes read what others write at the end: a block of one warp
            // alone.
            for (space, threads) in [("shared", 32), ("global", 32)] {
                let shape = Shape::new(1, threads);
                let text = kernel(space, base, lanes.min(threads - u32::from(lanes == 50) * 12));
                let text = match space {
                    // No lane's own store may be another one's load.
                    "shared" => text.replace("st.shared.u32 [%r6], %r30;", "membar.cta;"),
                    _ => text,
                };
                bench.transform(&text, &shape, &words);
            }
        }
    }
}

#[test]
fn a_load_among_joined_ones_faults_as_it_would_alone() {
    for (offset, kind) in [(4096, FaultKind::IllegalAddress), (6, FaultKind::Misaligned)] {
        let body = format!(
            ".visible .entry k(.param .u64 p)
            {{
                .shared .align 16 .b8 tile[4096];
                .reg .b32 %r<8>;
                .reg .b64 %rd<4>;
                ld.param.u64 %rd1, [p];
                mov.u32 %r1, %tid.x;
                mov.u32 %r2, tile;
                mad.lo.u32 %r3, %r1, 4, %r2;
                ld.shared.u32 %r4, [%r3];
                ld.shared.u32 %r5, [%r3+64];
                ld.shared.u32 %r6, [%r3+{offset}];
                add.u32 %r4, %r4, %r5;
                add.u32 %r4, %r4, %r6;
                st.global.u32 [%rd1], %r4;
                ret;
            }}"
        );
        for level in [Level::Portable, Level::detect()] {
            let bench = Bench::new();
            let mut data = vec![0u32; 32];
            let addr = bench.map(&mut data);
            let program = bench.program(&body, level);
            let fault = bench.run(&program, &Shape::new(1, 32), &[addr]).unwrap_err();
            assert_eq!(fault.kind, kind, "{offset} {level:?}");
        }
    }
}
