//! The kernels that are timed, as PTX text, and how many instructions their loops execute.

use std::fmt::Write as _;

const HEADER: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";

pub(crate) const NULL: &str = ".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry null()\n{\n    ret;\n}\n";

/// PTX with one kernel.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) ptx: String,
    /// Instructions that a thread executes in one turn of the kernel's loop.
    pub(crate) per_turn: u64,
}

/// Instructions in PTX text: one a line that ends in a semicolon and declares nothing.
fn instructions(text: &str) -> u64 {
    let is_one = |line: &&str| line.ends_with(';') && !line.starts_with('.');
    text.lines().map(str::trim).filter(is_one).count() as u64
}

/// A kernel `name(out, turns)` whose threads do `body` for `turns` turns and store `result`.
fn loop_kernel(name: &'static str, prologue: &str, body: &str, result: &str) -> Source {
    let turn = format!(
        "{body}    add.u32 %r1, %r1, 1;\n    setp.lt.u32 %p1, %r1, %r2;\n    @%p1 bra LOOP;\n"
    );
    let ptx = format!(
        "{HEADER}.visible .entry {name}(.param .u64 out, .param .u32 turns)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<16>;
    .reg .f32 %f<16>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r2, [turns];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r3, %r3, %r4, %r5;
    mul.wide.u32 %rd2, %r3, 4;
    add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r1, 0;
{prologue}LOOP:
{turn}    st.global.b32 [%rd1], {result};
    ret;
}}
"
    );
    Source { name, per_turn: instructions(&turn), ptx }
}

/// Four chains of fused multiply-adds, unrolled. Every chain converges to 1.
pub(crate) fn float_alu() -> Source {
    let mut prologue = String::from("    mov.f32 %f8, 0f3F000000;\n");
    let mut body = String::new();
    for chain in 0..4 {
        let _ = writeln!(prologue, "    cvt.rn.f32.u32 %f{chain}, %r5;");
    }
    for step in 0..64 {
        let _ = writeln!(body, "    fma.rn.f32 %f{0}, %f{0}, %f8, %f8;", step % 4);
    }
    loop_kernel("float_alu", &prologue, &body, "%f0")
}

/// What an integer hash does: multiply, add, shift, exclusive or.
pub(crate) fn integer_alu() -> Source {
    let prologue = "    mov.u32 %r6, %r3;\n";
    let mut body = String::new();
    for _ in 0..16 {
        body.push_str(
            "    mad.lo.u32 %r6, %r6, 1664525, 1013904223;\n    shr.u32 %r7, %r6, 13;\n    \
             xor.b32 %r6, %r6, %r7;\n    add.u32 %r6, %r6, %r1;\n",
        );
    }
    loop_kernel("integer_alu", prologue, &body, "%r6")
}

/// What `integer_alu` leaves for the thread `index` after `turns`.
pub(crate) fn integer_alu_result(index: u32, turns: u32) -> u32 {
    let mut x = index;
    for turn in 0..turns {
        for _ in 0..16 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            x ^= x >> 13;
            x = x.wrapping_add(turn);
        }
    }
    x
}

/// Side of a tile and of a block of threads.
pub(crate) const TILE: u32 = 16;

/// c = a × b for square matrices of `n` floats a side, by tiles in shared memory. One turn a tile.
pub(crate) fn tiled_matmul() -> Source {
    let mut turn = String::from(
        "    ld.global.f32 %f2, [%rd4];
    st.shared.f32 [%r14], %f2;
    ld.global.f32 %f3, [%rd5];
    st.shared.f32 [%r17], %f3;
    bar.sync 0;
",
    );
    for k in 0..TILE {
        let (a, b) = (4 * k, 4 * TILE * k);
        let _ = write!(
            turn,
            "    ld.shared.f32 %f4, [%r12+{a}];
    ld.shared.f32 %f5, [%r15+{b}];
    fma.rn.f32 %f1, %f4, %f5, %f1;
"
        );
    }
    turn.push_str(
        "    bar.sync 0;
    add.s64 %rd4, %rd4, 64;
    add.s64 %rd5, %rd5, %rd6;
    add.u32 %r18, %r18, 16;
    setp.lt.u32 %p1, %r18, %r5;
    @%p1 bra LOOP;
",
    );
    let ptx = format!(
        "{HEADER}.visible .entry tiled_matmul(
    .param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<20>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<10>;
    .shared .align 4 .b8 tile_a[1024];
    .shared .align 4 .b8 tile_b[1024];
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [c];
    ld.param.u32 %r5, [n];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %tid.y;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ctaid.y;
    shl.b32 %r6, %r4, 4;
    add.u32 %r6, %r6, %r2;
    shl.b32 %r7, %r3, 4;
    add.u32 %r7, %r7, %r1;
    mad.lo.u32 %r8, %r6, %r5, %r1;
    mul.wide.u32 %rd4, %r8, 4;
    add.u64 %rd4, %rd1, %rd4;
    mad.lo.u32 %r9, %r2, %r5, %r7;
    mul.wide.u32 %rd5, %r9, 4;
    add.u64 %rd5, %rd2, %rd5;
    mul.wide.u32 %rd6, %r5, 64;
    mov.u32 %r10, tile_a;
    mov.u32 %r11, tile_b;
    shl.b32 %r16, %r2, 6;
    shl.b32 %r13, %r1, 2;
    add.u32 %r12, %r10, %r16;
    add.u32 %r14, %r12, %r13;
    add.u32 %r15, %r11, %r13;
    add.u32 %r17, %r15, %r16;
    mov.f32 %f1, 0f00000000;
    mov.u32 %r18, 0;
LOOP:
{turn}    mad.lo.u32 %r19, %r6, %r5, %r7;
    mul.wide.u32 %rd7, %r19, 4;
    add.u64 %rd7, %rd3, %rd7;
    st.global.f32 [%rd7], %f1;
    ret;
}}
"
    );
    Source { name: "tiled_matmul", per_turn: instructions(&turn), ptx }
}

/// to[i] = from[i] for `n` words, in steps of the grid. One turn a word.
pub(crate) fn copy_words() -> Source {
    let turn = "    ld.global.b32 %r6, [%rd3];
    st.global.b32 [%rd4], %r6;
    add.u64 %rd3, %rd3, %rd5;
    add.u64 %rd4, %rd4, %rd5;
    add.u32 %r3, %r3, %r7;
    setp.lt.u32 %p1, %r3, %r2;
    @%p1 bra LOOP;
";
    let ptx = format!(
        "{HEADER}.visible .entry copy_words(.param .u64 from, .param .u64 to, .param .u32 n)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.u32 %r2, [n];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r3, %r3, %r4, %r5;
    mov.u32 %r8, %nctaid.x;
    mul.lo.u32 %r7, %r8, %r4;
    mul.wide.u32 %rd5, %r7, 4;
    mul.wide.u32 %rd6, %r3, 4;
    add.u64 %rd3, %rd1, %rd6;
    add.u64 %rd4, %rd2, %rd6;
LOOP:
{turn}    ret;
}}
"
    );
    Source { name: "copy_words", per_turn: instructions(turn), ptx }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_counted() {
        assert_eq!(float_alu().per_turn, 64 + 3);
        assert_eq!(integer_alu().per_turn, 4 * 16 + 3);
        assert_eq!(tiled_matmul().per_turn, 5 + 3 * 16 + 6);
        assert_eq!(copy_words().per_turn, 7);
    }
}
