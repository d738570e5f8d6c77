//! Loads, stores, launches, faults.

use super::{Bench, Shape};
use crate::FaultKind;
use crate::exec::Level;

const VECTOR_ADD: &str = "
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [c];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd4, %rd1;
    mul.wide.s32 %rd5, %r5, 4;
    add.s64 %rd6, %rd4, %rd5;
    add.s64 %rd7, %rd2, %rd5;
    add.s64 %rd8, %rd3, %rd5;
    ld.global.f32 %f1, [%rd6];
    ld.global.f32 %f2, [%rd7];
    add.f32 %f3, %f1, %f2;
    st.global.f32 [%rd8], %f3;
DONE:
    ret;
}";

#[test]
fn vectors_add() {
    let bench = Bench::new();
    let n = 1000usize;
    let mut a: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let mut b: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
    let mut c = vec![0f32; n];
    let params = [bench.map(&mut a), bench.map(&mut b), bench.map(&mut c), n as u64];
    let program = bench.program(VECTOR_ADD, Level::detect());
    bench.run(&program, &Shape::new(4, 256), &params).unwrap();
    assert!(c.iter().enumerate().all(|(i, &x)| x == 1.5 * i as f32));
    assert_eq!(program.kernels[0].params, [(0, 8), (8, 8), (16, 8), (24, 8)]);
}

#[test]
fn an_overrun_is_a_fault_that_names_the_thread() {
    let bench = Bench::new();
    let (mut a, mut b, mut c) = (vec![0f32; 64], vec![0f32; 50], vec![0f32; 64]);
    let params = [bench.map(&mut a), bench.map(&mut b), bench.map(&mut c), 64];
    let program = bench.program(VECTOR_ADD, Level::detect());
    let fault = bench.run(&program, &Shape::new(2, 32), &params).unwrap_err();
    assert_eq!(fault.kind, FaultKind::IllegalAddress);
    assert_eq!((fault.block, fault.thread), ([1, 0, 0], [18, 0, 0]));
    assert_eq!(fault.address, Some(params[1] + 200));
    let fault = bench.run(&program, &Shape::new(2, 32), &[params[0] + 2, 0, 0, 4]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Misaligned);
}

#[test]
fn an_unknown_instruction_is_named() {
    let bench = Bench::new();
    let body = ".visible .entry k() { .reg .b32 %r<2>; frobnicate.b32 %r1, %r1; ret; }";
    let program = bench.program(body, Level::detect());
    let why = program.kernels[0].unsupported.clone().unwrap();
    assert!(why.contains("frobnicate.b32") && why.contains("line 4"), "{why}");
    let fault = bench.run(&program, &Shape::new(1, 1), &[]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotSupported);
}

#[test]
fn shared_memory_and_barriers_reverse_a_block() {
    let body = "
    .visible .entry reverse(.param .u64 data)
    {
        .shared .align 4 .b8 tile[1024];
        .reg .b32 %r<10>;
        .reg .b64 %rd<10>;
        ld.param.u64 %rd1, [data];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ntid.x;
        mov.u32 %r3, %ctaid.x;
        mad.lo.u32 %r4, %r2, %r3, %r1;
        mul.wide.u32 %rd2, %r4, 4;
        add.u64 %rd3, %rd1, %rd2;
        ld.global.u32 %r5, [%rd3];
        mov.u32 %r6, tile;
        shl.b32 %r7, %r1, 2;
        add.u32 %r8, %r6, %r7;
        st.shared.u32 [%r8], %r5;
        bar.sync 0;
        sub.u32 %r9, %r6, %r7;
        ld.shared.u32 %r5, [%r9+1020];
        st.global.u32 [%rd3], %r5;
        ret;
    }";
    let bench = Bench::new();
    let data: Vec<u32> = (0..512).collect();
    let out = bench.transform(body, &Shape::new(2, 256), &data);
    assert!(out.iter().enumerate().all(|(i, &v)| v as usize == i / 256 * 256 + 255 - i % 256));
}

/// As on hardware, and as compilers take for granted that read four words where three are meant.
#[test]
fn shared_memory_comes_in_whole_units() {
    let text = |at: u32| {
        format!(
            ".extern .shared .align 16 .b8 sm[];
            .visible .entry k(.param .u64 p) {{
                .reg .b32 %r<7>; .reg .b64 %rd<2>;
                ld.param.u64 %rd1, [p];
                mov.u32 %r1, 5;
                st.shared.u32 [sm+24], %r1;
                .pragma \"used_bytes_mask 4095\";
                ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [sm+{at}];
                mov.u32 %r6, %total_smem_size;
                st.global.v2.u32 [%rd1], {{%r4, %r6}};
                ret;
            }}"
        )
    };
    for level in [Level::Portable, Level::detect()] {
        let bench = Bench::new();
        let mut out = [0u64];
        let addr = bench.map(&mut out);
        let shape = Shape { shared: 28, ..Shape::new(1, 1) };
        bench.run(&bench.program(&text(16), level), &shape, &[addr]).unwrap();
        assert_eq!(out, [128 << 32 | 5], "{level:?}");
        let beyond = bench.run(&bench.program(&text(128), level), &shape, &[addr]);
        assert_eq!(beyond.unwrap_err().kind, FaultKind::IllegalAddress);
    }
}

#[test]
fn globals_have_values_and_addresses() {
    let body = "
    .visible .global .align 4 .u32 seven = 7;
    .visible .const .align 8 .u64 table[2] = {generic(seven), 9};
    .visible .entry k(.param .u64 out)
    {
        .reg .b32 %r<4>;
        .reg .b64 %rd<6>;
        ld.param.u64 %rd1, [out];
        ld.const.u64 %rd2, [table];
        ld.u32 %r1, [%rd2];
        ld.const.u32 %r2, [table+8];
        mul.lo.u32 %r3, %r1, %r2;
        st.global.u32 [%rd1], %r3;
        ret;
    }";
    let bench = Bench::new();
    assert_eq!(bench.transform(body, &Shape::new(1, 1), &[0u32]), [63]);
}

#[test]
fn vectors_and_narrow_types_load_and_store() {
    let body = "
    .visible .entry k(.param .u64 p)
    {
        .reg .b16 %h<4>;
        .reg .b32 %r<10>;
        .reg .b64 %rd<6>;
        ld.param.u64 %rd1, [p];
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %rd2, %r1, 16;
        add.u64 %rd1, %rd1, %rd2;
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1];
        st.global.v2.u32 [%rd1], {%r5, %r4};
        ld.global.s8 %h1, [%rd1+12];
        cvt.s32.s16 %r6, %h1;
        st.global.u32 [%rd1+8], %r6;
        ld.global.u16 %h2, [%rd1+14];
        st.global.u8 [%rd1+13], %h2;
        ld.global.s8 %rd3, [%rd1+12];
        st.global.u16 [%rd1+14], %rd3;
        ret;
    }";
    let bench = Bench::new();
    let data: Vec<u32> = (0..40).flat_map(|i| [i, i + 1, i + 2, 0x0102_0380 + i]).collect();
    let out = bench.transform(body, &Shape::new(1, 40), &data);
    for i in 0..40u32 {
        let low = (0x80 + i) as u8 as i8;
        let last = u32::from(low as u8) | 0x02 << 8 | u32::from(i16::from(low) as u16) << 16;
        let want = [0x0102_0380 + i, i + 2, i32::from(low) as u32, last];
        assert_eq!(out[i as usize * 4..][..4], want, "thread {i}");
    }
}

/// A block of as many threads as the device allows runs, whatever the kernel keeps in registers.
#[test]
fn registers_never_forbid_a_whole_block() {
    let sums: String =
        (0..200).map(|i| format!("cvt.rn.f32.u32 %f{i}, %r1; add.u32 %r1, %r1, 1;")).collect();
    let uses: String = (1..200).map(|i| format!("add.f32 %f0, %f0, %f{i};")).collect();
    let kernel = |name: &str, limits: &str| {
        format!(
            ".visible .entry {name}(.param .u64 p) {limits} {{ .reg .f32 %f<200>; .reg .b32 %r<2>;
            .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; {sums} {uses}
            st.global.f32 [%rd1], %f0; ret; }}"
        )
    };
    let text = kernel("free", "")
        + &kernel("small", ".maxntid 128")
        + &kernel("two", ".maxntid 256 .minnctapersm 2")
        + &kernel("capped", ".maxnreg 40");
    let program = Bench::new().program(&text, Level::detect());
    let registers: Vec<u32> = program.kernels.iter().map(|kernel| kernel.registers).collect();
    assert_eq!(registers[0], 64);
    assert!(registers[1] > 200, "{registers:?}");
    assert_eq!(registers[2..], [128, 40]);
}

/// The block's warps all start from the value that was there before any of them stored.
#[test]
fn warps_that_share_a_sum_load_it_together() {
    let text = ".visible .entry k(.param .u64 data) {
        .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p<2>;
        ld.param.u64 %rd1, [data];
        mov.u32 %r1, %laneid; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
        ld.global.u32 %r2, [%rd3]; mov.u32 %r3, 0;
        LOOP: add.u32 %r2, %r2, %r3; st.global.u32 [%rd3], %r2; add.u32 %r3, %r3, 1;
        setp.lt.u32 %p1, %r3, 5; @%p1 bra LOOP; ret; }";
    let words: Vec<u32> = (0..32).map(|i| 100 * i).collect();
    let out = Bench::new().transform(text, &Shape::new(1, 256), &words);
    assert!(out.iter().zip(&words).all(|(out, word)| *out == word + 10), "{out:?}");
}

/// What does not change from block to block is computed once a warp, what does every time; a result
/// of a call is not taken for a parameter.
#[test]
fn blocks_share_what_a_warp_has_computed() {
    let text = ".func (.param .b32 out) next(.param .b32 x) { .reg .b32 %r<3>;
        ld.param.u32 %r1, [x]; add.u32 %r2, %r1, 1; st.param.b32 [out], %r2; ret; }
    .visible .entry k(.param .u64 data) {
        .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %p<2>;
        mov.u32 %r1, %ctaid.x;
        { .param .b32 arg; .param .b32 back; st.param.b32 [arg], %r1;
        call (back), next, (arg); ld.param.b32 %r8, [back]; }
        ld.param.u64 %rd1, [data];
        mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
        mad.lo.u32 %r4, %r1, %r2, %r3;
        shl.b32 %r5, %r3, 4;
        setp.eq.u32 %p1, %r3, 7;
        mul.wide.u32 %rd2, %r4, 4; add.u64 %rd3, %rd1, %rd2;
        add.u32 %r6, %r5, %r8;
        @%p1 add.u32 %r6, %r6, 1000;
        mov.u32 %r7, %r5; add.u32 %r7, %r7, %r6;
        st.global.u32 [%rd3], %r7; ret; }";
    // The last warp of a block is not full.
    let (blocks, threads) = (50u32, 40u32);
    let out = Bench::new().transform(text, &Shape::new(blocks, threads), &vec![0u32; 2000]);
    for (index, word) in out.iter().enumerate() {
        let (block, thread) = (index as u32 / threads, index as u32 % threads);
        let extra = if thread == 7 { 1000 } else { 0 };
        assert_eq!(*word, 32 * thread + block + 1 + extra, "block {block}, thread {thread}");
    }
}
