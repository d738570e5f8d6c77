//! The exported functions, named as in nvml.h, whose reference is their contract.

#![allow(non_snake_case, reason = "the exported names are NVML's")]

use crate::call::{Parameters, call};
use crate::state;
use crate::status::{Status, WORDS};
use kedge_protocol::management::{Function, function};
use std::ffi::{c_char, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// What a function returns. A panic must not reach the program.
fn status(run: impl FnOnce() -> Result<(), Status>) -> c_uint {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status.0,
        Err(_) => Status::UNKNOWN.0,
    }
}

/// Exports each row of the table with as many parameters as its kinds stand for.
macro_rules! exports {
    ($($name:ident($($kind:ident $(($size:literal))?),*);)*) => {
        $(export!($name [] [a b c d e f] $($kind)*);)*
    };
}

macro_rules! export {
    // Two parameters.
    ($name:ident [$($taken:ident)*] [$x:ident $y:ident $($left:ident)*] Room $($kind:ident)*) => {
        export!($name [$($taken)* $x $y] [$($left)*] $($kind)*);
    };
    ($name:ident [$($taken:ident)*] [$x:ident $y:ident $($left:ident)*] List $($kind:ident)*) => {
        export!($name [$($taken)* $x $y] [$($left)*] $($kind)*);
    };
    ($name:ident [$($taken:ident)*] [$x:ident $y:ident $($left:ident)*] Devices $($kind:ident)*) => {
        export!($name [$($taken)* $x $y] [$($left)*] $($kind)*);
    };
    ($name:ident [$($taken:ident)*] [$x:ident $y:ident $($left:ident)*] Array $($kind:ident)*) => {
        export!($name [$($taken)* $x $y] [$($left)*] $($kind)*);
    };
    ($name:ident [$($taken:ident)*] [$x:ident $y:ident $($left:ident)*] Fields $($kind:ident)*) => {
        export!($name [$($taken)* $x $y] [$($left)*] $($kind)*);
    };
    // One.
    ($name:ident [$($taken:ident)*] [$x:ident $($left:ident)*] $first:ident $($kind:ident)*) => {
        export!($name [$($taken)* $x] [$($left)*] $($kind)*);
    };
    ($name:ident [$($taken:ident)*] [$($left:ident)*]) => {
        /// See NVML's reference.
        ///
        /// # Safety
        /// As the reference says of the arguments.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($taken: usize),*) -> c_uint {
            static ROW: OnceLock<Option<&Function>> = OnceLock::new();
            let given = [$($taken),*];
            status(|| {
                let row = *ROW.get_or_init(|| function(stringify!($name)));
                let mut parameters = Parameters::default();
                parameters[..given.len()].copy_from_slice(&given);
                // SAFETY: the caller keeps the C API's contract.
                unsafe { call(row.ok_or(Status::UNKNOWN)?, &parameters) }
            })
        }
    };
}

kedge_protocol::nvml_functions!(exports);

/// See NVML's reference.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit() -> c_uint {
    status(state::init)
}

/// See NVML's reference.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit_v2() -> c_uint {
    status(state::init)
}

/// See NVML's reference. The flags allow that there is no GPU, or that it is not woken.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    status(state::init)
}

/// See NVML's reference.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlShutdown() -> c_uint {
    status(state::shut_down)
}

/// The words for a return value; they live for ever.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let found = WORDS.iter().find(|(known, _)| *known == code);
    found.map_or(c"Unknown Error", |(_, words)| words).as_ptr()
}

/// Says to whoever looks for NVIDIA's library that this is not it.
#[unsafe(no_mangle)]
pub(crate) static kedge_nvml: u8 = 1;
