//! f32 and f64: modifiers, minimum and maximum, classification.

/// The NaN that single-precision instructions generate.
pub(crate) const NAN_F32: u32 = 0x7FFF_FFFF;

/// `.ftz`: subnormals become zeros of their sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7F80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// Any NaN as the hardware's.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    // In integers: LLVM may replace one NaN by another where it sees floats.
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { NAN_F32 } else { bits })
}

/// `.sat`: into [0, 1]; NaN and −0 become +0.
#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    let x = if x > 0.0 { x } else { 0.0 };
    if x < 1.0 { x } else { 1.0 }
}

/// A floating type with what generic lane functions need.
pub(crate) trait Float: Copy + PartialOrd + 'static {
    fn number(self) -> bool;
    fn negative(self) -> bool;
    fn nan() -> Self;
    fn magnitude(self) -> Self;
    fn with_sign(self, negative: bool) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn number(self) -> bool {
        !self.is_nan()
    }
    #[inline(always)]
    fn negative(self) -> bool {
        self.is_sign_negative()
    }
    #[inline(always)]
    fn nan() -> Self {
        f32::from_bits(NAN_F32)
    }
    #[inline(always)]
    fn magnitude(self) -> Self {
        self.abs()
    }
    #[inline(always)]
    fn with_sign(self, negative: bool) -> Self {
        f32::from_bits(self.to_bits() & 0x7FFF_FFFF | u32::from(negative) << 31)
    }
}

impl Float for f64 {
    #[inline(always)]
    fn number(self) -> bool {
        !self.is_nan()
    }
    #[inline(always)]
    fn negative(self) -> bool {
        self.is_sign_negative()
    }
    #[inline(always)]
    fn nan() -> Self {
        f64::from_bits(0x7FF8_0000_0000_0000)
    }
    #[inline(always)]
    fn magnitude(self) -> Self {
        self.abs()
    }
    #[inline(always)]
    fn with_sign(self, negative: bool) -> Self {
        f64::from_bits(self.to_bits() & !(1 << 63) | u64::from(negative) << 63)
    }
}

/// `min`: a number beats NaN, −0 is below +0.
#[inline(always)]
pub(crate) fn min<F: Float>(a: F, b: F) -> F {
    let smaller = if a < b || (a == b && a.negative()) { a } else { b };
    pick_number(a, b, smaller)
}

/// `max`: a number beats NaN, +0 is above −0.
#[inline(always)]
pub(crate) fn max<F: Float>(a: F, b: F) -> F {
    let larger = if a > b || (a == b && !a.negative()) { a } else { b };
    pick_number(a, b, larger)
}

#[inline(always)]
fn pick_number<F: Float>(a: F, b: F, ordered: F) -> F {
    let other = if a.number() { a } else { b };
    let either = if a.number() && b.number() { ordered } else { other };
    if either.number() { either } else { F::nan() }
}

/// `min.NaN`
#[inline(always)]
pub(crate) fn min_nan<F: Float>(a: F, b: F) -> F {
    if a.number() && b.number() { min(a, b) } else { F::nan() }
}

/// `max.NaN`
#[inline(always)]
pub(crate) fn max_nan<F: Float>(a: F, b: F) -> F {
    if a.number() && b.number() { max(a, b) } else { F::nan() }
}

/// `.xorsign.abs`: `op` of the magnitudes, with the product's sign.
#[inline(always)]
pub(crate) fn xorsign_abs<F: Float>(a: F, b: F, op: impl Fn(F, F) -> F) -> F {
    let result = op(a.magnitude(), b.magnitude());
    if result.number() { result.with_sign(a.negative() != b.negative()) } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimum_and_maximum() {
        assert!(min(0.0f32, -0.0).is_sign_negative());
        assert!(min(-0.0f64, 0.0).is_sign_negative());
        assert!(max(-0.0f32, 0.0).is_sign_positive());
        assert!(max(0.0f32, -0.0).is_sign_positive());
        assert_eq!(min(f32::NAN, 3.0), 3.0);
        assert_eq!(max(3.0, f64::NAN), 3.0);
        assert_eq!(min(-f32::NAN, f32::NAN).to_bits(), NAN_F32);
        assert_eq!(max_nan(1.0f32, f32::NAN).to_bits(), NAN_F32);
        assert_eq!(xorsign_abs(-3.0f32, 2.0, min), -2.0);
        assert_eq!(xorsign_abs(-3.0f32, -2.0, max), 3.0);
    }

    #[test]
    fn modifiers() {
        assert_eq!(flush(-1e-40).to_bits(), 0x8000_0000);
        assert_eq!(flush(f32::MIN_POSITIVE), f32::MIN_POSITIVE);
        assert_eq!(saturate(f32::NAN).to_bits(), 0);
        assert_eq!((saturate(-0.0).to_bits(), saturate(7.0), saturate(0.25)), (0, 1.0, 0.25));
    }
}
