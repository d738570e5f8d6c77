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
}

const RELATIONS: [Relation; 6] =
    [Relation::Eq, Relation::Ne, Relation::Lt, Relation::Le, Relation::Gt, Relation::Ge];
const OPERATIONS: [Operation; 6] = [
    Operation::Add,
    Operation::Sub,
    Operation::AbsDiff,
    Operation::Min,
    Operation::Max,
    Operation::Average,
];
const COMBINES: [Combine; 4] = [Combine::None, Combine::Add, Combine::Min, Combine::Max];

impl Video {
    pub(crate) fn encode(&self) -> u32 {
        let operation = match self.operation {
            Operation::Set(relation) => 8 + relation as u32,
            other => OPERATIONS.iter().position(|o| *o == other).unwrap_or(0) as u32,
        };
        operation
            | self.elements << 4
            | u32::from(self.signed_a) << 8
            | u32::from(self.signed_b) << 9
            | u32::from(self.signed_d) << 10
            | u32::from(self.saturate) << 11
            | (self.combine as u32) << 12
    }

    pub(crate) fn decode(bits: u32) -> Self {
        let operation = (bits & 15) as usize;
        Self {
            operation: match operation {
                8.. => Operation::Set(RELATIONS[(operation - 8) % 6]),
                _ => OPERATIONS[operation % 6],
            },
            elements: (bits >> 4 & 7).clamp(1, 4),
            signed_a: bits >> 8 & 1 != 0,
            signed_b: bits >> 9 & 1 != 0,
            signed_d: bits >> 10 & 1 != 0,
            saturate: bits >> 11 & 1 != 0,
            combine: COMBINES[(bits >> 12 & 3) as usize],
        }
    }

    pub(crate) fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        let width = 32 / self.elements;
        let mut packed = 0;
        let mut sum = 0i64;
        for index in 0..self.elements {
            let element = |word: u32, signed: bool| {
                let top = u64::from(word >> (index * width)) << (64 - width);
                if signed { top as i64 >> (64 - width) } else { (top >> (64 - width)) as i64 }
            };
            let result = self.element(element(a, self.signed_a), element(b, self.signed_b));
            let result = if self.saturate { self.clamp(result, width) } else { result };
            sum += result;
            let mask = u32::MAX >> (32 - width);
            packed |= (result as u32 & mask) << (index * width);
        }
        match self.combine {
            Combine::None => packed,
            Combine::Add => c.wrapping_add(sum as u32),
            Combine::Min if self.signed_d => (packed as i32).min(c as i32) as u32,
            Combine::Min => packed.min(c),
            Combine::Max if self.signed_d => (packed as i32).max(c as i32) as u32,
            Combine::Max => packed.max(c),
        }
    }

    fn element(&self, a: i64, b: i64) -> i64 {
        match self.operation {
            Operation::Add => a + b,
            Operation::Sub => a - b,
            Operation::AbsDiff => (a - b).abs(),
            Operation::Min => a.min(b),
            Operation::Max => a.max(b),
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
        for video in [plain, sum, add, average, set] {
            assert_eq!(Video::decode(video.encode()), video);
        }
    }
}
