//! A kernel's parameters, from the program's pointers to one buffer.

use crate::function::Function;
use kedge_cuda_types::CuError;
use kedge_protocol::MAX_PARAM_BYTES;
use kedge_wire::Bytes;
use std::ffi::c_void;

/// CU_LAUNCH_PARAM_*: the tags of `extra`.
const END: usize = 0;
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;
/// Pairs of tag and value that `extra` may hold before its end.
const MAX_TAGS: usize = 8;

/// `kernelParams` and `extra` of a launch: at most one of them is not NULL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    pub(crate) kernel_params: *mut *mut c_void,
    pub(crate) extra: *mut *mut c_void,
}

impl Params {
    /// The parameter buffer as the kernel expects it.
    ///
    /// # Safety
    /// `kernel_params` is NULL or has a pointer to each parameter; `extra` is NULL or as CUDA says.
    pub(crate) unsafe fn pack(
        self,
        function: &Function,
    ) -> Result<Bytes<MAX_PARAM_BYTES>, CuError> {
        let len = function.param_bytes() as usize;
        let bytes = if !self.extra.is_null() {
            if !self.kernel_params.is_null() {
                return Err(CuError::INVALID_VALUE);
            }
            // SAFETY: `extra` is a list as `from_extra` reads it, by this function's contract.
            unsafe { from_extra(self.extra, len)? }
        } else {
            // SAFETY: `kernel_params` has a pointer to each of the function's parameters, by this
            // function's contract.
            unsafe { from_pointers(self.kernel_params, function, len)? }
        };
        Bytes::new(bytes).map_err(|_| CuError::INVALID_VALUE)
    }
}

/// # Safety
/// `params` is NULL or has a pointer to each of the function's parameters.
unsafe fn from_pointers(
    params: *mut *mut c_void,
    function: &Function,
    len: usize,
) -> Result<Vec<u8>, CuError> {
    if len == 0 {
        return Ok(Vec::new());
    }
    if params.is_null() || len > MAX_PARAM_BYTES {
        return Err(CuError::INVALID_VALUE);
    }
    let mut bytes = vec![0; len];
    for (i, param) in function.info().params.iter().enumerate() {
        // SAFETY: there is a pointer for each parameter.
        let from = unsafe { params.add(i).read_unaligned() };
        if from.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let to = &mut bytes[param.offset as usize..][..param.size as usize];
        // SAFETY: the pointer is valid for the parameter's size; the buffer is our own.
        unsafe { std::ptr::copy_nonoverlapping(from.cast(), to.as_mut_ptr(), to.len()) };
    }
    Ok(bytes)
}

/// # Safety
/// `extra` is a list of tags and values that ends with END, and its buffer valid for its size.
unsafe fn from_extra(extra: *mut *mut c_void, len: usize) -> Result<Vec<u8>, CuError> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0usize);
    for i in 0..MAX_TAGS {
        // SAFETY: END has not come yet, so a tag and its value follow.
        let tag = unsafe { extra.add(2 * i).read_unaligned() } as usize;
        if tag == END {
            break;
        }
        // SAFETY: a value follows each tag but END, by this function's contract.
        let value = unsafe { extra.add(2 * i + 1).read_unaligned() };
        match tag {
            BUFFER_POINTER => buffer = value.cast(),
            BUFFER_SIZE if !value.is_null() => {
                // SAFETY: the value of this tag points to a size.
                size = unsafe { value.cast::<usize>().read_unaligned() };
            }
            _ => return Err(CuError::INVALID_VALUE),
        }
    }
    if len == 0 {
        return Ok(Vec::new());
    }
    if buffer.is_null() || size.max(len) > MAX_PARAM_BYTES {
        return Err(CuError::INVALID_VALUE);
    }
    let mut bytes = vec![0; len];
    let given = size.min(len);
    // SAFETY: the buffer is valid for its size, of which `given` is a part; the other is our own.
    // As on a real driver it may be shorter than the parameters: NCCL passes as much of a 4 KiB
    // structure as it uses.
    unsafe { std::ptr::copy_nonoverlapping(buffer, bytes.as_mut_ptr(), given) };
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// # Safety
    /// As [`from_extra`].
    unsafe fn extra(list: &mut [usize], len: usize) -> Result<Vec<u8>, CuError> {
        // SAFETY: the lists below end with END.
        unsafe { from_extra(list.as_mut_ptr().cast(), len) }
    }

    #[test]
    fn takes_a_packed_buffer() {
        let buffer = [1u8, 2, 3, 4];
        let mut size = buffer.len();
        let at = &raw mut size as usize;
        let mut list = [BUFFER_POINTER, buffer.as_ptr() as usize, BUFFER_SIZE, at, END];
        // SAFETY: a live list, buffer and size.
        unsafe {
            assert_eq!(extra(&mut list, 3).unwrap(), [1, 2, 3]);
            assert_eq!(extra(&mut list, 6).unwrap(), [1, 2, 3, 4, 0, 0], "the rest is zero");
            assert_eq!(extra(&mut [END], 0).unwrap(), []);
            assert_eq!(extra(&mut [END], 1), Err(CuError::INVALID_VALUE));
            assert_eq!(extra(&mut [77, 0, END], 1), Err(CuError::INVALID_VALUE));
        }
    }
}
