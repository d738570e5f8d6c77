//! From C's parameters to a question, and from its answer to what they point to.

use crate::state;
use crate::status::Status;
use kedge_protocol::management::{
    Argument, Function, HANDLE, Kind, MAX_BYTES, MAX_PARAMETERS, Question, most, versioned_size,
};
use kedge_wire::{Bytes, List, Text};
use std::ffi::{CStr, c_char, c_uint};

/// Parameters as they come in registers; what a function has not got is 0.
pub(crate) type Parameters = [usize; MAX_PARAMETERS];

/// Calls `function`: nvmlReturn_t.
///
/// # Safety
/// The parameters are what nvml.h says of the function: each pointer is NULL or valid for what is
/// read and written there.
pub(crate) unsafe fn call(function: &Function, parameters: &Parameters) -> Result<(), Status> {
    // Said before anything of the arguments.
    state::check_started()?;
    let mut arguments = Vec::new();
    for (kind, at) in placed(function) {
        // SAFETY: the parameters are what the C function of this kind takes, by this function's
        // contract.
        arguments.push(unsafe { argument(kind, &parameters[at..])? });
    }
    let question = Question {
        function: Text::truncated(function.name.to_owned()),
        arguments: List::new(arguments).map_err(|_| Status::UNKNOWN)?,
    };
    let answer = state::ask(&question)?;
    let status = Status(answer.status);
    if status.0 == 0 || status == Status::INSUFFICIENT_SIZE {
        let written = placed(function).filter(|(kind, _)| kind.has_result());
        for ((kind, at), result) in written.zip(answer.results.iter()) {
            // SAFETY: the parameters are what the C function of this kind takes, by this function's
            // contract; `argument` has refused those that are NULL and must not be.
            unsafe { write(kind, &parameters[at..], result) };
        }
    }
    if status.0 == 0 { Ok(()) } else { Err(status) }
}

/// The kinds of a function's parameters, and the number of the first that each stands for.
fn placed(function: &Function) -> impl Iterator<Item = (Kind, usize)> {
    function.kinds.iter().scan(0, |next, kind| {
        let at = *next;
        *next += kind.parameters();
        Some((*kind, at))
    })
}

/// What travels for the first of `parameters`, or the first two.
///
/// # Safety
/// As for `call`.
unsafe fn argument(kind: Kind, parameters: &[usize]) -> Result<Argument, Status> {
    let first = parameters[0];
    let second = || parameters[1];
    let given = |pointer: usize| if pointer == 0 { Err(Status::INVALID_ARGUMENT) } else { Ok(()) };
    let number = |value: usize| Ok(Argument::Number { value: value as u64 });
    match kind {
        // Handles begin with 1: NULL is none.
        Kind::Device => number(first.checked_sub(1).ok_or(Status::INVALID_ARGUMENT)?),
        Kind::Number => number(first),
        Kind::Name => {
            given(first)?;
            // SAFETY: not NULL, so it ends with NUL.
            let text = unsafe { CStr::from_ptr(first as *const c_char) };
            bytes(text.to_bytes().to_vec())
        }
        Kind::Room => {
            given(first)?;
            number((second() as c_uint as usize).min(MAX_BYTES))
        }
        Kind::Out(_) | Kind::Handle => {
            given(first)?;
            number(0)
        }
        Kind::Versioned => {
            given(first)?;
            // SAFETY: not NULL, so a structure that begins with its version.
            let word = unsafe { (first as *const u32).read_unaligned() };
            let size = versioned_size(word).ok_or(Status::VERSION_MISMATCH)?;
            // SAFETY: the structure is as large as it says of itself.
            bytes(unsafe { std::slice::from_raw_parts(first as *const u8, size) }.to_vec())
        }
        Kind::List(_) | Kind::Devices => {
            given(first)?;
            // SAFETY: not NULL, so a count.
            let count = unsafe { (first as *const c_uint).read_unaligned() } as usize;
            let size = if let Kind::List(size) = kind { size } else { HANDLE };
            number(if second() == 0 { 0 } else { count.min(most(size)) })
        }
        // More than any device has, or less than nothing.
        Kind::Array(size) | Kind::Fields(size) if first as c_uint as usize > most(size) => {
            Err(Status::INVALID_ARGUMENT)
        }
        Kind::Array(_) => {
            given(second())?;
            number(first as c_uint as usize)
        }
        Kind::Fields(size) => {
            given(second())?;
            let length = first as c_uint as usize * size as usize;
            // SAFETY: not NULL, so at least so many elements.
            bytes(unsafe { std::slice::from_raw_parts(second() as *const u8, length) }.to_vec())
        }
    }
}

fn bytes(bytes: Vec<u8>) -> Result<Argument, Status> {
    let bytes = Bytes::new(bytes).map_err(|_| Status::INVALID_ARGUMENT)?;
    Ok(Argument::Bytes { bytes })
}

/// Writes what was told where the program asked for it; what is not of the size that is wanted is
/// left.
///
/// # Safety
/// As for `call`, for parameters that `argument` has taken.
unsafe fn write(kind: Kind, parameters: &[usize], result: &Bytes<MAX_BYTES>) {
    let (first, second) = (parameters[0], *parameters.get(1).unwrap_or(&0));
    let number = |bytes: &[u8]| bytes.first_chunk().map(|word| u32::from_le_bytes(*word));
    // SAFETY: each place is given, and the size is what the program has given it or what nvml.h
    // says of it.
    unsafe {
        let put = |to: usize, bytes: &[u8]| {
            (to as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        };
        match kind {
            Kind::Device | Kind::Number | Kind::Name => {}
            Kind::Room if result.len() <= second as c_uint as usize => put(first, result),
            Kind::Out(size) if result.len() == size as usize => put(first, result),
            Kind::Handle => {
                if let Some(device) = number(result) {
                    (first as *mut usize).write_unaligned(device as usize + 1);
                }
            }
            Kind::Versioned => {
                let word = (first as *const u32).read_unaligned();
                if versioned_size(word) == Some(result.len()) {
                    put(first, result);
                }
            }
            Kind::List(_) | Kind::Devices => {
                let Some(count) = number(result) else { return };
                let room = (first as *const c_uint).read_unaligned() as usize;
                (first as *mut c_uint).write_unaligned(count);
                let elements = &result[4..];
                match kind {
                    _ if second == 0 => {}
                    Kind::List(size) if elements.len() <= room.saturating_mul(size as usize) => {
                        put(second, elements);
                    }
                    Kind::Devices => {
                        let devices = elements.chunks_exact(4).filter_map(number).take(room);
                        for (at, device) in devices.enumerate() {
                            (second as *mut usize).add(at).write_unaligned(device as usize + 1);
                        }
                    }
                    _ => {}
                }
            }
            Kind::Array(size) | Kind::Fields(size) => {
                if result.len() <= (first as c_uint as usize).saturating_mul(size as usize) {
                    put(second, result);
                }
            }
            Kind::Room | Kind::Out(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is read where a count is more than can be, or nothing is given.
    #[test]
    fn counts_beyond_all_devices_and_null_are_refused() {
        let minus_one = u32::MAX as usize;
        let cases = [
            (Kind::Fields(40), [minus_one, 8]),
            (Kind::Array(8), [minus_one, 8]),
            (Kind::Fields(40), [1, 0]),
            (Kind::Versioned, [0, 0]),
            (Kind::List(24), [0, 8]),
            (Kind::Device, [0, 0]),
        ];
        for (kind, parameters) in cases {
            // SAFETY: what is not NULL here is not looked at, since the count is refused before.
            let refused = unsafe { argument(kind, &parameters) };
            assert_eq!(refused, Err(Status::INVALID_ARGUMENT), "{kind:?}");
        }
    }
}
