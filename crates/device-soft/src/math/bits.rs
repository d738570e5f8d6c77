//! Bit fields, permutations and three-input logic.

/// `bfe.u32`
#[inline(always)]
pub(crate) fn bfe_u32(a: u32, position: u32, length: u32) -> u32 {
    bfe_u64(a.into(), position, length) as u32
}

/// `bfe.s32`
#[inline(always)]
pub(crate) fn bfe_s32(a: u32, position: u32, length: u32) -> u32 {
    // Bits past the top are copies of the sign, which is what `bfe_s64` takes them to be.
    bfe_s64(i64::from(a as i32) as u64, position, length) as u32
}

/// `bfe.u64`
#[inline(always)]
pub(crate) fn bfe_u64(a: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xFF, length & 0xFF);
    let shifted = if position > 63 { 0 } else { a >> (position & 63) };
    if length > 63 { shifted } else { shifted & !(u64::MAX << (length & 63)) }
}

/// `bfe.s64`
#[inline(always)]
pub(crate) fn bfe_s64(a: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xFF, length & 0xFF);
    let shifted = (a as i64) >> position.min(63);
    if length == 0 {
        return 0;
    }
    let unused = 64 - length.min(64);
    (shifted << unused >> unused) as u64
}

/// `bfi.b32`: `insert`'s low `length` bits at `position` of `base`.
#[inline(always)]
pub(crate) fn bfi_b32(insert: u32, base: u32, position: u32, length: u32) -> u32 {
    bfi_b64(insert.into(), base.into(), position, length) as u32
}

/// `bfi.b64`
#[inline(always)]
pub(crate) fn bfi_b64(insert: u64, base: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xFF, length & 0xFF);
    let field = if length > 63 { u64::MAX } else { !(u64::MAX << (length & 63)) };
    let moved = |bits: u64| if position > 63 { 0 } else { bits << (position & 63) };
    let mask = moved(field);
    base & !mask | moved(insert) & mask
}

/// `bfind`: the highest set bit, all ones if there is none; `a` is complemented beforehand if it is
/// a negative signed number.
#[inline(always)]
pub(crate) fn bfind_u32(a: u32) -> u32 {
    31u32.wrapping_sub(a.leading_zeros())
}

/// `bfind` of 64 bits.
#[inline(always)]
pub(crate) fn bfind_u64(a: u64) -> u32 {
    63u32.wrapping_sub(a.leading_zeros())
}

/// `bmsk`: `width` ones from bit `position` up.
#[inline(always)]
pub(crate) fn bmsk(position: u32, width: u32, clamp: bool) -> u32 {
    let (from, count) =
        if clamp { (position.min(32), width.min(32)) } else { (position & 31, width & 31) };
    let ones = (1u64 << count) - 1;
    (ones << from) as u32
}

/// `szext`: the low `bits` bits of `a`, sign- or zero-extended.
#[inline(always)]
pub(crate) fn szext(a: u32, bits: u32, clamp: bool, signed: bool) -> u32 {
    let bits = if clamp { bits.min(32) } else { bits & 31 };
    let unused = 32 - bits;
    let top = u64::from(a) << unused;
    // In 64 bits, so that a shift by 32 is one: no bits give zero, all of them give `a`.
    if signed {
        (i64::from(top as u32 as i32) >> unused) as u32
    } else {
        (u64::from(top as u32) >> unused) as u32
    }
}

/// `fns`: the position of the `offset`-th set bit of `mask` from `base` up (or down if negative),
/// counted from 1; all ones if there is none. Offset 0 asks for `base` itself.
#[inline(always)]
pub(crate) fn fns(mask: u32, base: u32, offset: i32) -> u32 {
    if base > 31 {
        return u32::MAX;
    }
    if offset == 0 {
        return if mask >> base & 1 == 1 { base } else { u32::MAX };
    }
    let mut left =
        if offset > 0 { mask >> base << base } else { mask << (31 - base) >> (31 - base) };
    for _ in 1..offset.unsigned_abs().min(33) {
        let lowest = left & left.wrapping_neg();
        let highest = 0x8000_0000u32.checked_shr(left.leading_zeros()).unwrap_or(0);
        left &= !if offset > 0 { lowest } else { highest };
    }
    match left {
        0 => u32::MAX,
        _ if offset > 0 => left.trailing_zeros(),
        _ => 31 - left.leading_zeros(),
    }
}

/// `shf.l`: the upper word of `high:low << by`. `by` is at most 32.
#[inline(always)]
pub(crate) fn funnel_left(low: u32, high: u32, by: u32) -> u32 {
    (((u64::from(high) << 32 | u64::from(low)) << by) >> 32) as u32
}

/// `shf.r`: the lower word of `high:low >> by`. `by` is at most 32.
#[inline(always)]
pub(crate) fn funnel_right(low: u32, high: u32, by: u32) -> u32 {
    ((u64::from(high) << 32 | u64::from(low)) >> by) as u32
}

/// `prmt`, default mode: four nibbles of `selector` each pick a byte of `b:a`, or its sign if bit 3
/// is set.
#[inline(always)]
pub(crate) fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let mut result = 0;
    for i in 0..4 {
        let pick = selector >> (4 * i);
        let word = if pick & 4 == 0 { a } else { b };
        let byte = word >> ((pick & 3) * 8);
        let sign = ((byte << 24) as i32 >> 31) as u32;
        let byte = if pick & 8 != 0 { sign } else { byte };
        result |= (byte & 0xFF) << (8 * i);
    }
    result
}

/// The selectors of `prmt`'s named modes, by the low two bits of `c`. None: no such mode.
pub(crate) const fn prmt_mode(name: &[u8]) -> Option<[u16; 4]> {
    Some(match name {
        b"f4e" => [0x3210, 0x4321, 0x5432, 0x6543],
        b"b4e" => [0x5670, 0x6701, 0x7012, 0x0123],
        b"rc8" => [0x0000, 0x1111, 0x2222, 0x3333],
        b"ecl" => [0x3210, 0x3211, 0x3222, 0x3333],
        b"ecr" => [0x0000, 0x1110, 0x2210, 0x3210],
        b"rc16" => [0x1010, 0x3232, 0x1010, 0x3232],
        _ => return None,
    })
}

/// `lop3`: bit `a·4 + b·2 + c` of `table` for every bit position. With a constant table this is
/// some 17 vector operations; the table's bits become masks first.
#[inline(always)]
pub(crate) fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    let bit = |index: u32| 0u32.wrapping_sub(u32::from(table) >> index & 1);
    let choose = |zero: u32, one: u32, by: u32| (zero ^ one) & by ^ zero;
    let of_b = |from: u32| {
        choose(choose(bit(from), bit(from + 1), c), choose(bit(from + 2), bit(from + 3), c), b)
    };
    choose(of_b(0), of_b(4), a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::testing::Random;

    /// The ISA reference's bit-by-bit definition.
    fn bfe_reference(a: u64, position: u32, length: u32, msb: u32, signed: bool) -> u64 {
        let bit = |i: u32| a >> i & 1;
        let sign = if !signed || length == 0 { 0 } else { bit((position + length - 1).min(msb)) };
        (0..=msb).fold(0, |d, i| {
            let inside = i < length && position + i <= msb;
            d | (if inside { bit(position + i) } else { sign }) << i
        })
    }

    #[test]
    fn bit_fields_follow_the_reference() {
        let mut random = Random::new(7);
        for _ in 0..100_000 {
            let (a, b) = (random.bits(), random.bits());
            let (position, length) = (random.below(80) as u32, random.below(80) as u32);
            let at = |msb, signed| bfe_reference(a, position, length, msb, signed);
            let low = a as u32;
            assert_eq!(u64::from(bfe_u32(low, position, length)), at(31, false));
            assert_eq!(
                u64::from(bfe_s32(low, position, length)),
                at(31, true),
                "{position} {length}"
            );
            assert_eq!(bfe_u64(a, position, length), at(63, false));
            assert_eq!(bfe_s64(a, position, length), at(63, true), "{position} {length}");
            let inserted = (0..length)
                .take_while(|i| position + i < 64)
                .fold(b, |f, i| f & !(1 << (position + i)) | (a >> i & 1) << (position + i));
            let inserted = if length > 64 { bfi_b64(a, b, position, length) } else { inserted };
            assert_eq!(bfi_b64(a, b, position, length), inserted);
        }
        assert_eq!(bfi_b32(0xFF, 0x1234_5678, 28, 8), 0xF234_5678);
        assert_eq!((bfind_u32(0), bfind_u32(1), bfind_u64(1 << 40)), (u32::MAX, 0, 40));
    }

    #[test]
    fn masks() {
        assert_eq!(bmsk(4, 8, true), 0xFF0);
        assert_eq!((bmsk(28, 8, true), bmsk(32, 4, true), bmsk(3, 0, true)), (0xF000_0000, 0, 0));
        assert_eq!((bmsk(36, 8, false), bmsk(0, 32, false)), (0xFF0, 0));
        assert_eq!(bmsk(0, 40, true), u32::MAX);
        assert_eq!(szext(0x1F0, 8, true, true), 0xFFFF_FFF0);
        assert_eq!(szext(0x1F0, 8, true, false), 0xF0);
        assert_eq!(szext(0x8000_0001, 99, true, true), 0x8000_0001);
        assert_eq!(szext(0xFFFF_FFFF, 32, false, true), 0);
        assert_eq!(fns(0b1011_0100, 0, 3), 5);
        assert_eq!(fns(0b1011_0100, 7, -2), 5);
        assert_eq!((fns(0b100, 2, 0), fns(0b100, 1, 0), fns(1, 0, 2)), (2, u32::MAX, u32::MAX));
    }

    #[test]
    fn permutations() {
        assert_eq!(prmt(0x3322_1100, 0x7766_5544, 0x7520), 0x7755_2200);
        assert_eq!(prmt(0x80, 0, 0x8888), 0xFFFF_FFFF);
        assert_eq!(prmt(0x0180_0000, 0, 0xBA98), 0x00FF_0000);
        assert_eq!((funnel_left(0x8000_0000, 1, 1), funnel_left(5, 1, 32)), (3, 5));
        assert_eq!((funnel_right(2, 1, 1), funnel_right(5, 7, 32)), (0x8000_0001, 7));
    }

    #[test]
    fn every_table_of_three_inputs() {
        for table in 0..=u8::MAX {
            assert_eq!(lop3(0xF0, 0xCC, 0xAA, table) & 0xFF, u32::from(table));
        }
    }
}
