//! Integer arithmetic.

/// An integer type of PTX, with what Rust's operators do not give directly.
pub(crate) trait Int: Copy + Ord + Default + 'static {
    /// Twice as wide, for products.
    type Wide: Copy + 'static;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul_lo(self, other: Self) -> Self;
    fn mul_wide(self, other: Self) -> Self::Wide;
    /// The upper half of the product.
    fn mul_hi(self, other: Self) -> Self;
    /// Towards zero. By zero: all ones, as the hardware gives. The least by −1 wraps.
    fn div(self, other: Self) -> Self;
    /// With the dividend's sign. By zero: all ones.
    fn rem(self, other: Self) -> Self;
    /// Wraps at the least value.
    fn abs(self) -> Self;
    fn neg(self) -> Self;
    /// `|self - other|`, without overflow where the type can hold it.
    fn distance(self, other: Self) -> Self;
    /// Left shift; by the width or more gives 0.
    fn shl(self, by: u32) -> Self;
    /// Right shift, arithmetic if signed; amounts are clamped to the width.
    fn shr(self, by: u32) -> Self;
}

macro_rules! int {
    ($($ty:ident $wide:ident $signed:literal $abs:expr;)*) => {$(
        impl Int for $ty {
            type Wide = $wide;

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul_lo(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn mul_wide(self, other: Self) -> $wide {
                // Two factors of half the width cannot overflow.
                $wide::from(self).wrapping_mul($wide::from(other))
            }
            #[inline(always)]
            fn mul_hi(self, other: Self) -> Self {
                (self.mul_wide(other) >> $ty::BITS) as $ty
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_rem(other) }
            }
            #[inline(always)]
            fn abs(self) -> Self {
                let abs: fn($ty) -> $ty = $abs;
                abs(self)
            }
            #[inline(always)]
            fn neg(self) -> Self {
                self.wrapping_neg()
            }
            #[inline(always)]
            fn distance(self, other: Self) -> Self {
                if self > other { self.wrapping_sub(other) } else { other.wrapping_sub(self) }
            }
            #[inline(always)]
            fn shl(self, by: u32) -> Self {
                let shifted = self.wrapping_shl(by);
                if by >= $ty::BITS { 0 } else { shifted }
            }
            #[inline(always)]
            fn shr(self, by: u32) -> Self {
                if $signed {
                    self.wrapping_shr(if by >= $ty::BITS { $ty::BITS - 1 } else { by })
                } else {
                    let shifted = self.wrapping_shr(by);
                    if by >= $ty::BITS { 0 } else { shifted }
                }
            }
        }
    )*};
}

int! {
    u16 u32 false |x| x;
    u32 u64 false |x| x;
    u64 u128 false |x| x;
    i16 i32 true i16::wrapping_abs;
    i32 i64 true i32::wrapping_abs;
    i64 i128 true i64::wrapping_abs;
}

/// `div.u32` without a division instruction for each lane: the quotient of two 32-bit numbers in
/// double precision, cut to an integer, is exact.
#[inline(always)]
pub(crate) fn div_u32(a: u32, b: u32) -> u32 {
    let quotient = f64::from(a) / f64::from(if b == 0 { 1 } else { b });
    // SAFETY: the quotient is at most `a`, and not NaN.
    let quotient = unsafe { quotient.to_int_unchecked::<u32>() };
    if b == 0 { u32::MAX } else { quotient }
}

/// `rem.u32`, likewise.
#[inline(always)]
pub(crate) fn rem_u32(a: u32, b: u32) -> u32 {
    let rest = a.wrapping_sub(div_u32(a, b).wrapping_mul(b));
    if b == 0 { u32::MAX } else { rest }
}

/// `div.s32`, likewise.
#[inline(always)]
pub(crate) fn div_s32(a: i32, b: i32) -> i32 {
    let quotient = div_u32(a.unsigned_abs(), b.unsigned_abs()) as i32;
    let signed = if (a ^ b) < 0 { quotient.wrapping_neg() } else { quotient };
    if b == 0 { -1 } else { signed }
}

/// `rem.s32`, likewise.
#[inline(always)]
pub(crate) fn rem_s32(a: i32, b: i32) -> i32 {
    let rest = rem_u32(a.unsigned_abs(), b.unsigned_abs()) as i32;
    let signed = if a < 0 { rest.wrapping_neg() } else { rest };
    if b == 0 { -1 } else { signed }
}

/// `mul24.lo`: the low 32 bits of the product of two 24-bit numbers.
#[inline(always)]
pub(crate) fn mul24_lo_u32(a: u32, b: u32) -> u32 {
    (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF)
}

/// `mul24.hi`: bits 47..16 of the product.
#[inline(always)]
pub(crate) fn mul24_hi_u32(a: u32, b: u32) -> u32 {
    ((u64::from(a & 0xFF_FFFF) * u64::from(b & 0xFF_FFFF)) >> 16) as u32
}

#[inline(always)]
fn low24(a: i32) -> i32 {
    a << 8 >> 8
}

#[inline(always)]
pub(crate) fn mul24_lo_s32(a: i32, b: i32) -> i32 {
    low24(a).wrapping_mul(low24(b))
}

#[inline(always)]
pub(crate) fn mul24_hi_s32(a: i32, b: i32) -> i32 {
    ((i64::from(low24(a)) * i64::from(low24(b))) >> 16) as i32
}

/// Adds the products of the four bytes of `a` and `b` to `c`; `A` and `B` say whether each is
/// signed.
#[inline(always)]
pub(crate) fn dp4a<const A: bool, const B: bool>(a: u32, b: u32, c: u32) -> u32 {
    let mut sum = c;
    for i in 0..4 {
        let product = byte::<A>(a, i).wrapping_mul(byte::<B>(b, i));
        sum = sum.wrapping_add(product as u32);
    }
    sum
}

/// Adds the products of `a`'s two halves and two bytes of `b` (its upper two if `HI`) to `c`.
#[inline(always)]
pub(crate) fn dp2a<const A: bool, const B: bool, const HI: bool>(a: u32, b: u32, c: u32) -> u32 {
    let half = |i: u32| {
        let half = (a >> (16 * i)) as u16;
        if A { i32::from(half as i16) } else { i32::from(half) }
    };
    let from = if HI { 2 } else { 0 };
    let low = half(0).wrapping_mul(byte::<B>(b, from));
    let high = half(1).wrapping_mul(byte::<B>(b, from + 1));
    c.wrapping_add(low as u32).wrapping_add(high as u32)
}

#[inline(always)]
fn byte<const SIGNED: bool>(word: u32, index: u32) -> i32 {
    let byte = (word >> (8 * index)) as u8;
    if SIGNED { i32::from(byte as i8) } else { i32::from(byte) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_never_traps() {
        assert_eq!(7i32.div(0), -1);
        assert_eq!(7u32.div(0), u32::MAX);
        assert_eq!(7u64.rem(0), u64::MAX);
        assert_eq!(Int::div(i32::MIN, -1), i32::MIN);
        assert_eq!(Int::rem(i64::MIN, -1), 0);
        assert_eq!((-7i32).rem(3), -1);
    }

    #[test]
    fn division_through_floats_is_exact() {
        let edges = [0, 1, 2, 3, 7, 0x7FFF_FFFF, 0x8000_0000, 0x8000_0001, u32::MAX - 1, u32::MAX];
        let mut random = crate::math::testing::Random::new(10);
        let mut pairs: Vec<(u32, u32)> =
            edges.iter().flat_map(|a| edges.iter().map(move |b| (*a, *b))).collect();
        pairs.extend((0..200_000).map(|_| {
            let (a, b) = (random.bits() as u32, random.bits() as u32 >> random.below(32));
            (a, b)
        }));
        for (a, b) in pairs {
            assert_eq!((div_u32(a, b), rem_u32(a, b)), (a.div(b), a.rem(b)), "{a} {b}");
            let (a, b) = (a as i32, b as i32);
            assert_eq!((div_s32(a, b), rem_s32(a, b)), (Int::div(a, b), Int::rem(a, b)), "{a} {b}");
        }
    }

    #[test]
    fn products() {
        assert_eq!((-1i32).mul_hi(1), -1);
        assert_eq!(u32::MAX.mul_hi(u32::MAX), u32::MAX - 1);
        assert_eq!(u64::MAX.mul_hi(2), 1);
        assert_eq!((-3i16).mul_wide(5), -15);
        assert_eq!(mul24_lo_s32(0x00FF_FFFF, 5), -5);
        assert_eq!(mul24_hi_u32(0xFF_FFFF, 0xFF_FFFF), 0xFFFF_FE00);
        assert_eq!(dp4a::<true, true>(0xFF01_0203, 0x0101_0101, 10), 15);
        assert_eq!(dp4a::<false, false>(0xFF01_0203, 0x0101_0101, 10), 271);
        assert_eq!(dp2a::<true, true, false>(0xFFFF_0002, 0x0403_0201, 0), 0);
        assert_eq!(dp2a::<true, true, true>(0xFFFF_0002, 0x0403_0201, 0), 2);
    }

    #[test]
    fn shifts_clamp() {
        assert_eq!(1u32.shl(32), 0);
        assert_eq!(1u64.shl(63), 1 << 63);
        assert_eq!((-8i32).shr(100), -1);
        assert_eq!(0x8000u16.shr(16), 0);
        assert_eq!(i32::MIN.distance(i32::MAX), -1);
    }
}
