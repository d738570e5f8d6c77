//! The instruction families that compute: what lowering asks for a handler.

use super::select::{Query, Selected, Selector};
use super::{alu_float, alu_int, bitwise, carry, compare, cvt, half, matrix, mov, texture, video};

/// Every computing family's selector.
const FAMILIES: &[Selector] = &[
    alu_float::select,
    alu_int::select,
    bitwise::select,
    compare::select,
    mov::select,
    cvt::select,
    half::select,
    carry::select,
    matrix::select,
    texture::select,
    video::select,
];

/// The handler of a computing instruction; None where this device lacks it.
pub fn select(query: &Query<'_>) -> Option<Selected> {
    FAMILIES.iter().find_map(|family| family(query))
}
