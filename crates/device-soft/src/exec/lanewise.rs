//! Handlers that apply one pure function to every lane, and what their selectors share.
//!
//! A lane function is a type that implements [`LaneFn`]; [`lane_fns!`] declares them in bulk and
//! [`lanes`] turns one into a [`Selected`], with the operand types read off its signature.

use super::{Arg, Flow, Handlers, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::soft::Rounding;
use crate::spec::WARP;
use kedge_ptx::ast::Type;
use std::marker::PhantomData;

/// A lane type and the PTX type whose register bank it lives in.
pub(crate) trait Typed: Lane + 'static {
    const TYPE: Type;
}

macro_rules! typed {
    ($($lane:ident $ty:ident;)*) => {
        $(impl Typed for $lane {
            const TYPE: Type = Type::$ty;
        })*
    };
}

typed! {
    u8 U8; i8 S8; u16 U16; i16 S16; u32 U32; i32 S32; f32 F32; u64 U64; i64 S64; f64 F64;
}

/// The operands of a lane function: a tuple of lanes.
pub(crate) trait Inputs: Sized {
    type Rows;
    const TYPES: &'static [Type];
    /// # Safety
    /// `slots` are operands of the frame, in the banks of the tuple's types, at least as many.
    unsafe fn read(warp: &Warp, slots: &[i32]) -> Self::Rows;
    fn lane(rows: &Self::Rows, lane: usize) -> Self;
}

macro_rules! inputs {
    ($($ty:ident $index:tt),*) => {
        impl<$($ty: Typed),*> Inputs for ($($ty,)*) {
            type Rows = ($([$ty; WARP],)*);
            const TYPES: &'static [Type] = &[$($ty::TYPE),*];
            #[inline(always)]
            unsafe fn read(warp: &Warp, slots: &[i32]) -> Self::Rows {
                // SAFETY: the caller vouches for the slots.
                unsafe { ($($ty::read(warp, slots[$index]),)*) }
            }
            #[inline(always)]
            fn lane(rows: &Self::Rows, lane: usize) -> Self {
                ($(rows.$index[lane],)*)
            }
        }
    };
}

inputs!(A 0);
inputs!(A 0, B 1);
inputs!(A 0, B 1, C 2);
inputs!(A 0, B 1, C 2, D 3);

/// A pure function of one lane's operands.
pub(crate) trait LaneFn: 'static {
    type In: Inputs;
    type Out: Typed;
    fn apply(input: Self::In) -> Self::Out;
}

/// Declares lane functions: `Name(a: T, b: U) -> V { … }`, each perhaps after `<T: Bound>`.
macro_rules! lane_fns {
    ($($(#[$meta:meta])* $(<$($g:ident: $bound:path),+>)? $name:ident
        ($($arg:ident: $ty:ty),+) -> $out:ty $body:block)*) => {$(
        $(#[$meta])*
        pub(crate) struct $name$(<$($g),+>(std::marker::PhantomData<($($g,)+)>))?;

        impl$(<$($g: $bound + $crate::exec::lanewise::Typed),+>)?
            $crate::exec::lanewise::LaneFn for $name$(<$($g),+>)?
        {
            type In = ($($ty,)+);
            type Out = $out;
            #[inline(always)]
            fn apply(($($arg,)+): Self::In) -> $out $body
        }
    )*};
}
pub(crate) use lane_fns;

/// The handler of a lane function.
pub(crate) struct Map<F>(PhantomData<F>);

impl<F: LaneFn> Op for Map<F> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the operands were lowered by the types that `lanes` gives.
        unsafe {
            let rows = F::In::read(warp, &inst.op[1..]);
            let mut out = [F::Out::default(); WARP];
            for lane in 0..WARP {
                out[lane] = F::apply(F::In::lane(&rows, lane));
            }
            F::Out::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// The `count` operands of an instruction.
///
/// # Safety
/// `inst` was lowered with that many operands.
#[inline(always)]
pub(crate) unsafe fn slots<'a>(warp: &Warp, inst: &'a Inst, count: usize) -> &'a [i32] {
    if count <= inst.op.len() {
        return &inst.op[..count];
    }
    // SAFETY: more operands than fit the instruction were lowered as a list.
    unsafe { warp.operands(inst) }
}

fn args<F: LaneFn>() -> Vec<Arg> {
    let sources = F::In::TYPES.iter().map(|ty| Arg::Src(*ty));
    std::iter::once(Arg::Dst(F::Out::TYPE)).chain(sources).collect()
}

/// A lane function's handler, vectorised for every level.
pub(crate) fn lanes<F: LaneFn>() -> Selected {
    Selected::new::<Map<F>>(args::<F>())
}

/// A rare lane function's handler, compiled once.
pub(crate) fn lanes_scalar<F: LaneFn>() -> Selected {
    Selected::scalar::<Map<F>>(args::<F>())
}

/// A wrapper of single-precision lane functions: flushes subnormal operands and results.
pub(crate) struct Ftz<F>(PhantomData<F>);
/// A wrapper of single-precision lane functions: clamps the result to [0, 1].
pub(crate) struct Sat<F>(PhantomData<F>);

/// Tuples of f32.
pub(crate) trait Flush: Inputs {
    fn flush(self) -> Self;
}

impl Flush for (f32,) {
    #[inline(always)]
    fn flush(self) -> Self {
        (crate::math::float::flush(self.0),)
    }
}
impl Flush for (f32, f32) {
    #[inline(always)]
    fn flush(self) -> Self {
        (crate::math::float::flush(self.0), crate::math::float::flush(self.1))
    }
}
impl Flush for (f32, f32, f32) {
    #[inline(always)]
    fn flush(self) -> Self {
        let flush = crate::math::float::flush;
        (flush(self.0), flush(self.1), flush(self.2))
    }
}

impl<F: LaneFn<Out = f32>> LaneFn for Ftz<F>
where
    F::In: Flush,
{
    type In = F::In;
    type Out = f32;
    #[inline(always)]
    fn apply(input: Self::In) -> f32 {
        crate::math::float::flush(F::apply(input.flush()))
    }
}

impl<F: LaneFn<Out = f32>> LaneFn for Sat<F> {
    type In = F::In;
    type Out = f32;
    #[inline(always)]
    fn apply(input: Self::In) -> f32 {
        crate::math::float::saturate(F::apply(input))
    }
}

/// A lane function's handler without an AVX-512 form of its own.
pub(crate) fn lanes_avx2<F: LaneFn>() -> Selected {
    Selected { handlers: Handlers::avx2::<Map<F>>(), args: args::<F>(), imm: 0, aux: 0 }
}

/// A single-precision lane function, perhaps with `.ftz`.
pub(crate) fn lanes_ftz<F: LaneFn<Out = f32>>(ftz: bool) -> Selected
where
    F::In: Flush,
{
    if ftz { lanes::<Ftz<F>>() } else { lanes::<F>() }
}

/// A rare single-precision lane function, perhaps with `.ftz`.
pub(crate) fn lanes_ftz_avx2<F: LaneFn<Out = f32>>(ftz: bool) -> Selected
where
    F::In: Flush,
{
    if ftz { lanes_avx2::<Ftz<F>>() } else { lanes_avx2::<F>() }
}

/// A single-precision lane function with its `.ftz` and `.sat`.
pub(crate) fn lanes_sat<F: LaneFn<Out = f32>>(ftz: bool, sat: bool) -> Selected
where
    F::In: Flush,
{
    match (ftz, sat) {
        (_, false) => lanes_ftz::<F>(ftz),
        (false, true) => lanes::<Sat<F>>(),
        (true, true) => lanes::<Sat<Ftz<F>>>(),
    }
}

/// The parts of an instruction's name after its opcode, taken away one by one as a selector
/// understands them. What is left over makes the instruction unsupported.
pub(crate) struct Parts<'a>(Vec<&'a str>);

impl<'a> Parts<'a> {
    pub(crate) fn of(query: &Query<'a>) -> Self {
        Self(query.name.iter().skip(1).map(String::as_str).collect())
    }

    /// Removes the first `part`; says whether there was one.
    pub(crate) fn take(&mut self, part: &str) -> bool {
        match self.0.iter().position(|p| *p == part) {
            Some(index) => {
                self.0.remove(index);
                true
            }
            None => false,
        }
    }

    /// Removes the last part, if it is a type.
    pub(crate) fn take_type(&mut self) -> Option<Type> {
        let ty = super::select::type_named(self.0.last()?)?;
        self.0.pop();
        Some(ty)
    }

    /// Removes the first part, if it is a type.
    pub(crate) fn take_first_type(&mut self) -> Option<Type> {
        let ty = super::select::type_named(self.0.first()?)?;
        self.0.remove(0);
        Some(ty)
    }

    /// Removes the first part.
    pub(crate) fn take_first(&mut self) -> Option<&'a str> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    /// Removes the first part that `known` maps.
    pub(crate) fn take_map<T>(&mut self, known: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (index, value) =
            self.0.iter().enumerate().find_map(|(i, part)| Some((i, known(part)?)))?;
        self.0.remove(index);
        Some(value)
    }

    /// Removes a floating-point rounding modifier.
    pub(crate) fn rounding(&mut self) -> Option<Rounding> {
        self.take_map(|part| {
            Some(match part {
                "rn" => Rounding::Nearest,
                "rna" => Rounding::Away,
                "rz" => Rounding::Zero,
                "rm" => Rounding::Down,
                "rp" => Rounding::Up,
                _ => return None,
            })
        })
    }

    /// Whether everything was understood.
    pub(crate) fn done(&self) -> bool {
        self.0.is_empty()
    }
}

/// `Some(lanes::<F<T>>())` with T by PTX type; returns None from the selector for other types.
macro_rules! by_type {
    ($ty:expr, $f:ident: $($variant:ident $(| $more:ident)* => $lane:ident),+) => {
        match $ty {
            $(Type::$variant $(| Type::$more)* => Some($crate::exec::lanewise::lanes::<$f<$lane>>()),)+
            _ => None,
        }
    };
}
pub(crate) use by_type;

/// [`by_type!`] for every integer type of registers.
macro_rules! by_int {
    ($ty:expr, $f:ident) => {
        $crate::exec::lanewise::by_int!($ty, $f, lanes)
    };
    ($ty:expr, $f:ident, $make:ident) => {
        match $ty {
            Type::U16 => Some($make::<$f<u16>>()),
            Type::S16 => Some($make::<$f<i16>>()),
            Type::U32 => Some($make::<$f<u32>>()),
            Type::S32 => Some($make::<$f<i32>>()),
            Type::U64 => Some($make::<$f<u64>>()),
            Type::S64 => Some($make::<$f<i64>>()),
            _ => None,
        }
    };
}
pub(crate) use by_int;

/// [`by_type!`] for the untyped sizes.
macro_rules! by_bits {
    ($ty:expr, $f:ident) => {
        $crate::exec::lanewise::by_type!($ty, $f: B16 | U16 | S16 => u16, B32 | U32 | S32 => u32,
            B64 | U64 | S64 => u64)
    };
}
pub(crate) use by_bits;
