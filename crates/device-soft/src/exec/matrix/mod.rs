//! Matrix instructions: `mma`, `wmma`, `wgmma`, `ldmatrix`, `stmatrix`, `movmatrix`.
//!
//! A matrix instruction gathers its operands from the warp's registers into tiles, multiplies, and
//! scatters the result. Its parameters are packed in `Inst::imm` ([`Params`]).

mod mma;
mod quad;
mod sparse;
mod tile;
mod transfer;
mod wgmma;
#[cfg(target_arch = "x86_64")]
mod wide;
mod wmma;

use super::lanewise::slots;
use super::{Query, Selected};
use crate::math::fragment::{Element, Shape};
use crate::memory::Space;

/// A matrix instruction's shape and element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Params {
    shape: Shape,
    a: Element,
    b: Element,
    c: Element,
    d: Element,
    /// Clamp integers, instead of wrapping.
    satfinite: bool,
    /// Bits: xor, instead of and.
    xor: bool,
}

impl Params {
    fn encode(&self) -> u64 {
        let dimension = |x: usize| (x - 1) as u64;
        dimension(self.shape.m)
            | dimension(self.shape.n) << 8
            | dimension(self.shape.k) << 16
            | (self.a as u64) << 24
            | (self.b as u64) << 32
            | (self.c as u64) << 40
            | (self.d as u64) << 48
            | u64::from(self.satfinite) << 56
            | u64::from(self.xor) << 57
    }

    fn decode(imm: u64) -> Self {
        let byte = |at: u32| (imm >> at) as u8;
        let dimension = |at: u32| usize::from(byte(at)) + 1;
        Self {
            shape: Shape { m: dimension(0), n: dimension(8), k: dimension(16) },
            a: Element::from_index(byte(24)),
            b: Element::from_index(byte(32)),
            c: Element::from_index(byte(40)),
            d: Element::from_index(byte(48)),
            satfinite: imm >> 56 & 1 != 0,
            xor: imm >> 57 & 1 != 0,
        }
    }
}

/// The state space that an instruction names, encoded for `Inst::aux`.
fn space(parts: &mut super::lanewise::Parts<'_>) -> u32 {
    let shared = parts.take("shared") || parts.take("shared::cta");
    if shared {
        1
    } else if parts.take("global") {
        2
    } else {
        0
    }
}

/// The inverse of [`space`].
fn space_of(aux: u32) -> Space {
    match aux & 3 {
        1 => Space::Shared,
        2 => Space::Global,
        _ => Space::Generic,
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(0) {
        "mma" => {
            mma::select(query).or_else(|| quad::select(query)).or_else(|| sparse::select(query))
        }
        "wmma" => wmma::select(query),
        "wgmma" => wgmma::select(query),
        "ldmatrix" | "stmatrix" | "movmatrix" => transfer::select(query),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_survive_encoding() {
        let params = Params {
            shape: Shape { m: 16, n: 8, k: 256 },
            a: Element::B1,
            b: Element::E5m2,
            c: Element::S32,
            d: Element::F64,
            satfinite: true,
            xor: true,
        };
        assert_eq!(Params::decode(params.encode()), params);
    }
}
