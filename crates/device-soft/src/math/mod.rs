//! What one lane computes: PTX arithmetic as pure functions of bits.
//!
//! Nothing here knows warps, registers or memory. Functions that the instruction families call from
//! 32-lane loops are `#[inline(always)]` and free of branches where that lets LLVM vectorise them;
//! the rest is exact first ([`soft`]) and fast second. The reference for every rule is NVIDIA's
//! "PTX ISA" (section names are given where a rule is surprising).

pub(crate) mod approx;
pub(crate) mod bits;
pub(crate) mod convert;
pub(crate) mod directed;
pub(crate) mod float;
pub(crate) mod fragment;
pub(crate) mod int;
pub(crate) mod narrow;
pub(crate) mod sampling;
pub(crate) mod soft;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod texel;
pub(crate) mod video;
