//! Loads and stores of every width, strength and place give the same values.

use super::{Bench, Shape};

const LANES: u64 = 64;

#[derive(Debug, Clone, Copy)]
struct Case {
    space: &'static str,
    strength: &'static str,
    ty: &'static str,
    /// Into a 64-bit register.
    wide: bool,
    /// Each lane reads another one's element, elements lie 8 bytes apart, and odd lanes read
    /// nothing.
    scattered: bool,
}

impl Case {
    fn size(&self) -> u64 {
        self.ty[1..].parse::<u64>().unwrap() / 8
    }

    /// Copies the words to shared memory, loads one element a lane, and stores it in the lane's
    /// word.
    fn kernel(&self) -> String {
        let Case { space, strength, ty, wide, scattered } = *self;
        let (stride, other) = if scattered { (8, 5) } else { (self.size(), 0) };
        let address = if space == "shared" { "%r6" } else { "%rd6" };
        let to = if wide { "%rd7" } else { "%r7" };
        let guard = if scattered { "@!%p1" } else { "" };
        let widen = if wide { "" } else { "cvt.u64.u32 %rd7, %r7;" };
        format!(
            ".visible .entry k(.param .u64 p)
            {{
                .shared .align 8 .b8 tile[512];
                .reg .pred %p<2>;
                .reg .b32 %r<9>;
                .reg .b64 %rd<8>;
                ld.param.u64 %rd1, [p];
                mov.u32 %r1, %tid.x;
                and.b32 %r8, %r1, 1;
                setp.ne.u32 %p1, %r8, 0;
                mad.wide.u32 %rd3, %r1, 8, %rd1;
                ld{strength}.global.u64 %rd4, [%rd3];
                mov.u32 %r2, tile;
                mad.lo.u32 %r4, %r1, 8, %r2;
                st{strength}.shared.u64 [%r4], %rd4;
                bar.sync 0;
                xor.b32 %r5, %r1, {other};
                mad.lo.u32 %r6, %r5, {stride}, %r2;
                mad.wide.u32 %rd6, %r5, {stride}, %rd1;
                mov.u32 %r7, 0;
                mov.u64 %rd7, 0;
                {guard} ld{strength}.{space}.{ty} {to}, [{address}];
                {widen}
                bar.sync 0;
                st{strength}.global.u64 [%rd3], %rd7;
                ret;
            }}"
        )
    }

    fn expected(&self, words: &[u64]) -> Vec<u64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (stride, other) = if self.scattered { (8, 5) } else { (self.size(), 0) };
        let element = |lane: u64| {
            if self.scattered && lane & 1 != 0 {
                return 0;
            }
            let at = ((lane ^ other) * stride) as usize;
            let mut word = [0; 8];
            word[..self.size() as usize].copy_from_slice(&bytes[at..][..self.size() as usize]);
            let unused = 64 - 8 * self.size();
            let value = u64::from_le_bytes(word) << unused;
            let value = if self.ty.starts_with('s') {
                (value as i64 >> unused) as u64
            } else {
                value >> unused
            };
            if self.wide { value } else { value & u64::from(u32::MAX) }
        };
        (0..LANES).map(element).collect()
    }
}

#[test]
fn loads_of_every_kind_agree() {
    let bench = Bench::new();
    let words: Vec<u64> = (1..=LANES)
        .map(|lane| lane.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x80FF_8000_FF00_7F80)
        .collect();
    for space in ["global", "shared"] {
        for strength in ["", ".volatile", ".relaxed.gpu"] {
            for ty in ["u8", "s8", "u16", "s16", "u32", "s32", "u64"] {
                for (wide, scattered) in
                    [(true, false), (true, true), (false, false), (false, true)]
                {
                    let case = Case { space, strength, ty, wide: wide || ty == "u64", scattered };
                    let shape = Shape::new(1, LANES as u32);
                    let out = bench.transform(&case.kernel(), &shape, &words);
                    assert_eq!(out, case.expected(&words), "{case:?}");
                }
            }
        }
    }
}
