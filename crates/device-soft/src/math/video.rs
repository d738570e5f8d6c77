//! Video instructions: arithmetic on a register, its two halves or its four bytes.

/// What a video instruction computes of two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Add,
    Sub,
    AbsDiff,
    Min,
    Max,
    /// Rounded away from zero.
    Average,
    /// A comparison: 1 or 0.
    Set(Relation),
    ShiftLeft(Wide),
    ShiftRight(Wide),
}

/// What a shift by 32 or more is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wide {
    /// By the low five bits.
    Wrap,
    /// By 32.
    Clamp,
}

impl Wide {
    fn amount(self, b: i64) -> u32 {
        match self {
            Wide::Wrap => b as u32 & 31,
            Wide::Clamp => (b as u32).min(32),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Relation {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// How elements' results are combined with the third operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Combine {
    /// The elements are the result.
    None,
    /// Their sum is added to it.
    Add,
    Min,
    Max,
}

/// Bits of a register: `width` of them, from `shift` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) shift: u32,
    pub(crate) width: u32,
}

impl Part {
    pub(crate) const WHOLE: Part = Part { shift: 0, width: 32 };

    /// Of a scalar operand: `b0` to `b3`, `h0`, `h1`.
    pub(crate) fn named(name: &str) -> Option<Part> {
        let (width, index) = match name.split_at_checked(1)? {
            ("b", index @ ("0" | "1" | "2" | "3")) => (8, index),
            ("h", index @ ("0" | "1")) => (16, index),
            _ => return None,
        };
        Some(Part { shift: width * index.parse::<u32>().ok()?, width })
    }

    fn number(self) -> u64 {
        u64::from(if self.width == 32 { 0 } else { self.shift / 8 + 4 * (self.width / 8) })
    }

    fn numbered(number: u64) -> Part {
        let number = number as u32 & 15;
        match number / 4 {
            0 => Part::WHOLE,
            narrow => Part { shift: number % 4 * 8, width: if narrow == 1 { 8 } else { 16 } },
        }
    }

    fn of(self, word: u32, signed: bool) -> i64 {
        let top = u64::from(word >> self.shift) << (64 - self.width);
        if signed { top as i64 >> (64 - self.width) } else { (top >> (64 - self.width)) as i64 }
    }

    /// `word` with these bits replaced.
    fn into(self, word: u32, value: u32) -> u32 {
        let mask = u32::MAX >> (32 - self.width);
        word & !(mask << self.shift) | (value & mask) << self.shift
    }
}

/// A video instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Video {
    pub(crate) operation: Operation,
    /// Elements of a register: 1, 2 or 4.
    pub(crate) elements: u32,
    pub(crate) signed_a: bool,
    pub(crate) signed_b: bool,
    pub(crate) signed_d: bool,
    pub(crate) saturate: bool,
    pub(crate) combine: Combine,
    /// Of a scalar's operands, and of what it replaces in the third operand.
    pub(crate) part_a: Part,
    pub(crate) part_b: Part,
    pub(crate) part_d: Part,
}

const RELATIONS: [Relation; 6] =
    [Relation::Eq, Relation::Ne, Relation::Lt, Relation::Le, Relation::Gt, Relation::Ge];
const OPERATIONS: [Operation; 10] = [
    Operation::Add,
    Operation::Sub,
    Operation::AbsDiff,
    Operation::Min,
    Operation::Max,
    Operation::Average,
    Operation::ShiftLeft(Wide::Wrap),
    Operation::ShiftLeft(Wide::Clamp),
    Operation::ShiftRight(Wide::Wrap),
    Operation::ShiftRight(Wide::Clamp),
];
const COMBINES: [Combine; 4] = [Combine::None, Combine::Add, Combine::Min, Combine::Max];

impl Video {
    pub(crate) fn encode(&self) -> u64 {
        let operation = match self.operation {
            Operation::Set(relation) => 16 + relation as u64,
            other => OPERATIONS.iter().position(|o| *o == other).unwrap_or(0) as u64,
        };
        operation
            | u64::from(self.elements) << 5
            | u64::from(self.signed_a) << 8
            | u64::from(self.signed_b) << 9
            | u64::from(self.signed_d) << 10
            | u64::from(self.saturate) << 11
            | (self.combine as u64) << 12
            | self.part_a.number() << 16
            | self.part_b.number() << 20
            | self.part_d.number() << 24
    }

    pub(crate) fn decode(bits: u64) -> Self {
        let operation = (bits & 31) as usize;
        Self {
            operation: match operation {
                16.. => Operation::Set(RELATIONS[(operation - 16) % 6]),
                _ => OPERATIONS[operation % 10],
            },
            elements: (bits >> 5 & 7).clamp(1, 4) as u32,
            signed_a: bits >> 8 & 1 != 0,
            signed_b: bits >> 9 & 1 != 0,
            signed_d: bits >> 10 & 1 != 0,
            saturate: bits >> 11 & 1 != 0,
            combine: COMBINES[(bits >> 12 & 3) as usize],
            part_a: Part::numbered(bits >> 16),
            part_b: Part::numbered(bits >> 20),
            part_d: Part::numbered(bits >> 24),
        }
    }

    pub(crate) fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        if self.elements == 1 { self.scalar(a, b, c) } else { self.packed(a, b, c) }
    }

    fn scalar(&self, a: u32, b: u32, c: u32) -> u32 {
        let (a, b) = (self.part_a.of(a, self.signed_a), self.part_b.of(b, self.signed_b));
        let result = self.element(a, b);
        let width = self.part_d.width;
        let result = if self.saturate { self.clamp(result, width) } else { result } as u32;
        self.part_d.into(c, self.combined(result, c))
    }

    fn packed(&self, a: u32, b: u32, c: u32) -> u32 {
        let width = 32 / self.elements;
        let (mut packed, mut sum) = (0, 0i64);
        for index in 0..self.elements {
            let part = Part { shift: index * width, width };
            let result = self.element(part.of(a, self.signed_a), part.of(b, self.signed_b));
            let result = if self.saturate { self.clamp(result, width) } else { result };
            sum += result;
            packed = part.into(packed, result as u32);
        }
        match self.combine {
            Combine::Add => c.wrapping_add(sum as u32),
            _ => packed,
        }
    }

    fn combined(&self, result: u32, c: u32) -> u32 {
        match self.combine {
            // Without it, c is only what a part of is replaced.
            Combine::None => result,
            Combine::Add => c.wrapping_add(result),
            Combine::Min if self.signed_d => (result as i32).min(c as i32) as u32,
            Combine::Min => result.min(c),
            Combine::Max if self.signed_d => (result as i32).max(c as i32) as u32,
            Combine::Max => result.max(c),
        }
    }

    fn element(&self, a: i64, b: i64) -> i64 {
        match self.operation {
            Operation::Add => a + b,
            Operation::Sub => a - b,
            Operation::AbsDiff => (a - b).abs(),
            Operation::Min => a.min(b),
            Operation::Max => a.max(b),
            Operation::ShiftLeft(wide) => a << wide.amount(b),
            Operation::ShiftRight(wide) => a >> wide.amount(b),
            Operation::Average => (a + b + i64::from(a + b >= 0)) >> 1,
            Operation::Set(relation) => i64::from(match relation {
                Relation::Eq => a == b,
                Relation::Ne => a != b,
                Relation::Lt => a < b,
                Relation::Le => a <= b,
                Relation::Gt => a > b,
                Relation::Ge => a >= b,
            }),
        }
    }

    fn clamp(&self, value: i64, width: u32) -> i64 {
        let (low, high) = if self.signed_d {
            (-(1i64 << (width - 1)), (1i64 << (width - 1)) - 1)
        } else {
            (0, (1i64 << width) - 1)
        };
        value.clamp(low, high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_halves() {
        let plain = Video {
            operation: Operation::AbsDiff,
            elements: 4,
            signed_a: false,
            signed_b: false,
            signed_d: false,
            saturate: false,
            combine: Combine::None,
            part_a: Part::WHOLE,
            part_b: Part::WHOLE,
            part_d: Part::WHOLE,
        };
        assert_eq!(plain.apply(0x01FF_0510, 0x02FE_0510, 0), 0x0101_0000);
        let sum = Video { combine: Combine::Add, ..plain };
        assert_eq!(sum.apply(0x01FF_0510, 0x02FE_0510, 40), 42);
        let signed = Video { signed_a: true, signed_b: true, signed_d: true, ..plain };
        let add = Video { operation: Operation::Add, elements: 2, saturate: true, ..signed };
        assert_eq!(add.apply(0x7FFF_8000, 0x0001_FFFF, 0), 0x7FFF_8000);
        let average = Video { operation: Operation::Average, elements: 4, ..signed };
        assert_eq!(average.apply(0x0301_FFFF, 0x0402_FEFF, 0), 0x0402_FEFF);
        let set = Video { operation: Operation::Set(Relation::Ge), elements: 2, ..plain };
        assert_eq!(set.apply(0x0001_0003, 0x0002_0003, 0), 1);
        let part = |name| Part::named(name).unwrap();
        let parts = Video { part_a: part("b2"), part_b: part("h1"), part_d: part("b3"), ..add };
        let parts = Video { elements: 1, ..parts };
        assert_eq!(parts.apply(0x0012_0000, 0xFFFF_0000, 0x0033_4455), 0x1133_4455);
        // Clamped to the part's type.
        assert_eq!(parts.apply(0x007F_0000, 0x7FFF_0000, 0), 0x7F00_0000);
        let less = Video { combine: Combine::Min, part_d: Part::WHOLE, ..parts };
        assert_eq!(less.apply(0x0012_0000, 0xFFFF_0000, u32::MAX), u32::MAX);
        let shift = |operation| Video { operation, elements: 1, ..plain };
        let left = shift(Operation::ShiftLeft(Wide::Clamp));
        assert_eq!((left.apply(3, 31, 0), left.apply(3, 32, 0)), (0x8000_0000, 0));
        let right = shift(Operation::ShiftRight(Wide::Wrap));
        assert_eq!(right.apply(0x8000_0000, 33, 0), 0x4000_0000);
        assert_eq!([Part::named("b4"), Part::named("h2"), Part::named("x")], [None; 3]);
        for video in [plain, sum, add, average, set, parts, less, left, right] {
            assert_eq!(Video::decode(video.encode()), video);
        }
    }
}
