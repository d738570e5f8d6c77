//! The same digests on a GPU, and the copies that follow from them: PTX, which the driver compiles.
//!
//! One block of memory a block of threads, one column a thread. What a group of rows holds is
//! loaded at once, so that enough is under way to keep the memory busy; keys are parameters, which
//! cost no registers.

use super::{COLUMNS, DEGREE, GROUP, Keys, LANES, P, ROW, ROWS, WORDS};
use std::fmt::Write;

/// Threads of a block, of both kernels.
pub const THREADS: u32 = COLUMNS as u32;
/// `(spans, digests, powers, keys)`: of each span, an address and a number of bytes (multiples of
/// 16, one [`super::BLOCK`] at most) of 64 bits each, the digest. As many blocks as spans.
pub const DIGEST: &str = "kedge_digest";
/// `(moves)`: copies; each from, to and bytes, as above. As many blocks as moves.
pub const GATHER: &str = "kedge_gather";
/// Words of 16 bytes that a thread of the gathering kernel has under way.
const AHEAD: usize = 8;

impl Keys {
    /// Returns the words that the kernel's third parameter points to.
    pub fn powers(&self) -> impl Iterator<Item = u64> + '_ {
        self.powers.iter().flatten().copied()
    }

    /// Returns the kernel's fourth parameter.
    pub fn parameter(&self) -> Vec<u64> {
        let words = self.words.chunks(2).map(|pair| {
            let high = pair.get(1).copied().unwrap_or(0);
            u64::from(pair[0]) | u64::from(high) << 32
        });
        self.points.iter().copied().chain(words).collect()
    }
}

/// Returns both kernels.
pub fn text() -> String {
    let mut text = String::from(".version 7.0\n.target sm_70\n.address_size 64\n");
    text.push_str(&digest());
    text.push_str(&gather());
    text
}

/// A kernel under construction.
struct Body(String);

impl Body {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // A String takes everything.
        let _ = self.0.write_fmt(line);
        self.0.push_str(";\n");
    }
}

macro_rules! put {
    ($body:expr, $($line:tt)*) => { $body.line(format_args!($($line)*)) };
}

fn digest() -> String {
    let bytes = WORDS.div_ceil(2) * 8 + LANES * 8;
    let mut body = Body(format!(
        ".visible .entry {DIGEST}(.param .u64 spans, .param .u64 digests, .param .u64 powers,\n\
         .param .align 8 .b8 keys[{bytes}])\n.maxntid {THREADS}, 1, 1\n{{\n\
         .shared .align 8 .b64 sums[{}];\n\
         .reg .pred %p, %q;\n.reg .b32 %thread, %block, %words, %at, %i, %a, %b, %lo, %hi, %group, %lane, %warp;\n\
         .reg .b32 %m<{}>, %key<{WORDS}>;\n\
         .reg .b64 %addr, %bytes, %where, %low, %high, %t, %u;\n\
         .reg .b64 %sum<{LANES}>, %value<{LANES}>, %point<{LANES}>;\n",
        COLUMNS / 32 * LANES,
        GROUP * 4,
    ));
    begin(&mut body);
    put!(body, "mov.u32 %group, 0");
    body.0.push_str("GROUP:\n");
    load_group(&mut body);
    sum_group(&mut body);
    for lane in 0..LANES {
        for half in ["shr.u64 %u, %sum, 32", "and.b64 %u, %sum, 0xffffffff"] {
            multiply(&mut body, lane, &format!("%point{lane}"));
            put!(body, "{}", half.replace("%sum", &format!("%sum{lane}")));
            put!(body, "add.u64 %value{lane}, %value{lane}, %u");
        }
    }
    put!(body, "add.u32 %group, %group, 1");
    put!(body, "add.u32 %at, %at, {}", GROUP * COLUMNS);
    put!(body, "setp.lt.u32 %p, %group, {}", ROWS / GROUP);
    put!(body, "@%p bra GROUP");
    total(&mut body);
    body.0.push_str("ret;\n}\n");
    body.0
}

/// Writes the kernel's beginning: the block's span, the keys, and nothing in the sums.
fn begin(body: &mut Body) {
    put!(body, "mov.u32 %thread, %tid.x");
    put!(body, "mov.u32 %block, %ctaid.x");
    put!(body, "ld.param.u64 %where, [spans]");
    put!(body, "mul.wide.u32 %t, %block, 16");
    put!(body, "add.u64 %where, %where, %t");
    put!(body, "ld.global.v2.u64 {{%addr, %bytes}}, [%where]");
    put!(body, "shr.u64 %bytes, %bytes, 4");
    put!(body, "cvt.u32.u64 %words, %bytes");
    put!(body, "mul.wide.u32 %t, %thread, 16");
    put!(body, "add.u64 %addr, %addr, %t");
    put!(body, "mov.u32 %at, %thread");
    for lane in 0..LANES {
        put!(body, "ld.param.u64 %point{lane}, [keys+{}]", lane * 8);
        put!(body, "mov.u64 %value{lane}, 0");
    }
    for word in 0..WORDS {
        put!(body, "ld.param.u32 %key{word}, [keys+{}]", LANES * 8 + word * 4);
    }
}

/// Loads a column's words of a group of rows; zeros behind the end.
fn load_group(body: &mut Body) {
    for row in 0..GROUP {
        let m = row * 4;
        for word in m..m + 4 {
            put!(body, "mov.u32 %m{word}, 0");
        }
        put!(body, "add.u32 %i, %at, {}", row * COLUMNS);
        put!(body, "setp.lt.u32 %p, %i, %words");
        put!(
            body,
            "@%p ld.global.v4.u32 {{%m{m}, %m{}, %m{}, %m{}}}, [%addr+{}]",
            m + 1,
            m + 2,
            m + 3,
            row * ROW
        );
    }
    put!(body, "add.u64 %addr, %addr, {}", GROUP * ROW);
}

fn sum_group(body: &mut Body) {
    for lane in 0..LANES {
        put!(body, "mov.u64 %sum{lane}, 0");
    }
    for word in (0..GROUP * 4).step_by(2) {
        for lane in 0..LANES {
            let key = word + lane * 2;
            put!(body, "add.u32 %a, %m{word}, %key{key}");
            put!(body, "add.u32 %b, %m{}, %key{}", word + 1, key + 1);
            put!(body, "mad.wide.u32 %sum{lane}, %a, %b, %sum{lane}");
        }
    }
}

/// Multiplies a lane's value, modulo P.
fn multiply(body: &mut Body, lane: usize, by: &str) {
    put!(body, "mul.lo.u64 %low, %value{lane}, {by}");
    put!(body, "mul.hi.u64 %high, %value{lane}, {by}");
    put!(body, "and.b64 %t, %low, {P}");
    put!(body, "shr.u64 %low, %low, 61");
    put!(body, "shl.b64 %high, %high, 3");
    put!(body, "or.b64 %high, %high, %low");
    put!(body, "add.u64 %value{lane}, %t, %high");
    fold(body, &format!("%value{lane}"));
}

fn fold(body: &mut Body, value: &str) {
    put!(body, "and.b64 %t, {value}, {P}");
    put!(body, "shr.u64 %u, {value}, 61");
    put!(body, "add.u64 {value}, %t, %u");
}

/// Adds up all columns: by warps, then by lanes.
fn total(body: &mut Body) {
    put!(body, "ld.param.u64 %where, [powers]");
    put!(body, "mul.wide.u32 %t, %thread, {}", LANES * 8);
    put!(body, "add.u64 %where, %where, %t");
    for lane in 0..LANES {
        put!(body, "ld.global.u64 %point{lane}, [%where+{}]", lane * 8);
        multiply(body, lane, &format!("%point{lane}"));
        for distance in [16, 8, 4, 2, 1] {
            put!(body, "mov.b64 {{%lo, %hi}}, %value{lane}");
            put!(body, "shfl.sync.bfly.b32 %lo, %lo, {distance}, 31, 0xffffffff");
            put!(body, "shfl.sync.bfly.b32 %hi, %hi, {distance}, 31, 0xffffffff");
            put!(body, "mov.b64 %low, {{%lo, %hi}}");
            put!(body, "add.u64 %value{lane}, %value{lane}, %low");
            fold(body, &format!("%value{lane}"));
        }
    }
    put!(body, "and.b32 %lane, %thread, 31");
    put!(body, "shr.u32 %warp, %thread, 5");
    put!(body, "mov.u64 %where, sums");
    put!(body, "mul.wide.u32 %t, %warp, {}", LANES * 8);
    put!(body, "add.u64 %t, %where, %t");
    put!(body, "setp.eq.u32 %p, %lane, 0");
    for lane in 0..LANES {
        put!(body, "@%p st.shared.u64 [%t+{}], %value{lane}", lane * 8);
    }
    put!(body, "bar.sync 0");
    put!(body, "setp.ge.u32 %p, %thread, {LANES}");
    put!(body, "@%p ret");
    put!(body, "mul.wide.u32 %t, %thread, 8");
    put!(body, "add.u64 %where, %where, %t");
    put!(body, "mov.u64 %value0, 0");
    for warp in 0..COLUMNS / 32 {
        put!(body, "ld.shared.u64 %low, [%where+{}]", warp * LANES * 8);
        put!(body, "add.u64 %value0, %value0, %low");
        fold(body, "%value0");
    }
    fold(body, "%value0");
    put!(body, "setp.ge.u64 %q, %value0, {P}");
    put!(body, "@%q sub.u64 %value0, %value0, {P}");
    put!(body, "ld.param.u64 %where, [digests]");
    put!(body, "mul.wide.u32 %t, %block, {}", LANES * 8);
    put!(body, "add.u64 %where, %where, %t");
    put!(body, "mul.wide.u32 %t, %thread, 8");
    put!(body, "add.u64 %where, %where, %t");
    put!(body, "st.global.u64 [%where], %value0");
    const { assert!(DEGREE == 8, "as Keys::of has it") };
}

fn gather() -> String {
    let mut body = Body(format!(
        ".visible .entry {GATHER}(.param .u64 moves)\n.maxntid {THREADS}, 1, 1\n{{\n\
         .reg .pred %p<{AHEAD}>, %more;\n.reg .b32 %thread, %block, %words, %i, %m<{}>;\n\
         .reg .b64 %from, %to, %bytes, %where, %t;\n",
        AHEAD * 4
    ));
    put!(body, "mov.u32 %thread, %tid.x");
    put!(body, "mov.u32 %block, %ctaid.x");
    put!(body, "ld.param.u64 %where, [moves]");
    put!(body, "mul.wide.u32 %t, %block, 24");
    put!(body, "add.u64 %where, %where, %t");
    put!(body, "ld.global.u64 %from, [%where]");
    put!(body, "ld.global.u64 %to, [%where+8]");
    put!(body, "ld.global.u64 %bytes, [%where+16]");
    put!(body, "shr.u64 %bytes, %bytes, 4");
    put!(body, "cvt.u32.u64 %words, %bytes");
    put!(body, "mul.wide.u32 %t, %thread, 16");
    put!(body, "add.u64 %from, %from, %t");
    put!(body, "add.u64 %to, %to, %t");
    body.0.push_str("AGAIN:\n");
    for n in 0..AHEAD {
        let m = n * 4;
        put!(body, "add.u32 %i, %thread, {}", n * COLUMNS);
        put!(body, "setp.lt.u32 %p{n}, %i, %words");
        put!(
            body,
            "@%p{n} ld.global.v4.u32 {{%m{m}, %m{}, %m{}, %m{}}}, [%from+{}]",
            m + 1,
            m + 2,
            m + 3,
            n * ROW
        );
    }
    for n in 0..AHEAD {
        let m = n * 4;
        put!(
            body,
            "@%p{n} st.global.v4.u32 [%to+{}], {{%m{m}, %m{}, %m{}, %m{}}}",
            n * ROW,
            m + 1,
            m + 2,
            m + 3
        );
    }
    put!(body, "add.u32 %thread, %thread, {}", AHEAD * COLUMNS);
    put!(body, "add.u64 %from, %from, {}", AHEAD * ROW);
    put!(body, "add.u64 %to, %to, {}", AHEAD * ROW);
    put!(body, "setp.lt.u32 %more, %thread, %words");
    put!(body, "@%more bra AGAIN");
    body.0.push_str("ret;\n}\n");
    body.0
}
