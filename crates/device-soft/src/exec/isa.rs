//! One handler body, compiled for each instruction-set level of the host.

use super::{Flow, Warp};
use crate::code::{Handler, Inst};
use std::sync::OnceLock;

/// A level of the host's instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Portable,
    /// AVX2, FMA, F16C, BMI1/2.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, CD on top.
    Avx512,
}

impl Level {
    /// The best level of this machine; `KEDGE_SOFT_ISA=portable|avx2|avx512` lowers it.
    pub fn detect() -> Level {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            let best = Self::best();
            let wish = match std::env::var("KEDGE_SOFT_ISA").as_deref() {
                Ok("portable") => Level::Portable,
                Ok("avx2") => Level::Avx2,
                _ => best,
            };
            wish.min(best)
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn best() -> Level {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("lzcnt");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512cd");
        match (avx2, avx512) {
            (_, true) => Level::Avx512,
            (true, _) => Level::Avx2,
            _ => Level::Portable,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Level {
        Level::Portable
    }
}

/// The level that a body is compiled for, where it wants to know.
pub trait Isa {
    const LEVEL: Level;
}

/// Marker types of the levels.
pub struct Portable;
pub struct Avx2;
pub struct Avx512;

impl Isa for Portable {
    const LEVEL: Level = Level::Portable;
}
impl Isa for Avx2 {
    const LEVEL: Level = Level::Avx2;
}
impl Isa for Avx512 {
    const LEVEL: Level = Level::Avx512;
}

/// An instruction's body. Implementations mark `run` `#[inline(always)]`, and so everything that it
/// calls on the fast path, so that it takes on the caller's target features.
pub trait Op {
    /// # Safety
    /// As [`Handler`]'s.
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow;
}

/// A body's compiled forms.
#[derive(Clone, Copy)]
pub struct Handlers {
    portable: Handler,
    avx2: Handler,
    avx512: Handler,
}

impl Handlers {
    /// For bodies that gain from wide lanes.
    pub const fn of<O: Op>() -> Handlers {
        Handlers { portable: portable::<O>, avx2: avx2::<O>, avx512: avx512::<O> }
    }

    /// For bodies with a form of their own for AVX-512.
    pub const fn with_wide<O: Op, W: Op>() -> Handlers {
        Handlers { portable: portable::<O>, avx2: avx2::<O>, avx512: avx512::<W> }
    }

    /// For rare or scalar bodies: compiled once.
    pub const fn scalar<O: Op>() -> Handlers {
        Handlers { portable: portable::<O>, avx2: portable::<O>, avx512: portable::<O> }
    }

    /// For bodies that want FMA and AVX2 but gain nothing from AVX-512 (long scalar loops).
    pub const fn avx2<O: Op>() -> Handlers {
        Handlers { portable: portable::<O>, avx2: avx2::<O>, avx512: avx2::<O> }
    }

    pub fn at(&self, level: Level) -> Handler {
        match level {
            Level::Portable => self.portable,
            Level::Avx2 => self.avx2,
            Level::Avx512 => self.avx512,
        }
    }
}

unsafe fn portable<O: Op>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller keeps `Handler`'s contract.
    unsafe { O::run::<Portable>(warp, inst, mask) }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt"))]
unsafe fn avx2<O: Op>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller keeps `Handler`'s contract.
    unsafe { O::run::<Avx2>(warp, inst, mask) }
}

#[cfg_attr(
    target_arch = "x86_64",
    target_feature(
        enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512cd,avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt"
    )
)]
unsafe fn avx512<O: Op>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller keeps `Handler`'s contract.
    unsafe { O::run::<Avx512>(warp, inst, mask) }
}
