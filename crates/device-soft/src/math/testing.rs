//! Inputs for tests: repeatable random numbers that favour the edges of each format.

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.bits() % end
    }
}

/// Any bits, or a value near one, or a special value.
pub(crate) fn interesting_f64(random: &mut Random) -> f64 {
    let special = [0.0, -0.0, 1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MAX];
    match random.below(8) {
        0 => special[random.below(special.len() as u64) as usize],
        1 => f64::from_bits(random.bits() & 0x800F_FFFF_FFFF_FFFF),
        2 => f64::from_bits(random.bits()),
        3 => random.below(1000) as f64 - 500.0,
        _ => (random.bits() as i64 as f64) * 2f64.powi(random.below(90) as i32 - 108),
    }
}

/// Any bits, or a value near one, or a special value.
pub(crate) fn interesting_f32(random: &mut Random) -> f32 {
    let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];
    match random.below(8) {
        0 => special[random.below(special.len() as u64) as usize],
        1 => f32::from_bits(random.bits() as u32 & 0x807F_FFFF),
        2 => f32::from_bits(random.bits() as u32),
        3 => random.below(1000) as f32 - 500.0,
        _ => (random.bits() as i32 as f32) * 2f32.powi(random.below(60) as i32 - 60),
    }
}
