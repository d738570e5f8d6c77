//! The JIT's options: where the program wants to read what went wrong.

use crate::ffi;
use kedge_cuda_types::CuError;
use std::ffi::c_void;

/// CUjit_option.
const INFO_LOG_BUFFER: u32 = 3;
const INFO_LOG_BUFFER_SIZE: u32 = 4;
const ERROR_LOG_BUFFER: u32 = 5;
const ERROR_LOG_BUFFER_SIZE: u32 = 6;

/// A buffer that the program gave, and where its size option is written back.
#[derive(Debug, Clone, Copy, Default)]
struct Buffer {
    text: usize,
    size: usize,
    written: usize,
}

/// The options that kedge heeds. The others tune a compiler that it does not have.
#[derive(Debug, Default)]
pub(super) struct Options {
    error: Buffer,
    info: Buffer,
}

impl Options {
    /// # Safety
    /// Both arrays are valid for `count` reads, or NULL with a count of 0; `values` for writes too.
    pub(super) unsafe fn read(
        count: u32,
        options: *const u32,
        values: *mut *mut c_void,
    ) -> Result<Self, CuError> {
        let mut read = Self::default();
        // SAFETY: `options` and `values` are NULL or have `count` values, by this function's
        // contract.
        let (names, words) = unsafe {
            let count = count as usize;
            (ffi::read_array(options, count)?, ffi::read_array(values.cast::<usize>(), count)?)
        };
        for (i, (&name, &word)) in names.iter().zip(&words).enumerate() {
            let at = values as usize + i * size_of::<*mut c_void>();
            match name {
                ERROR_LOG_BUFFER => read.error.text = word,
                INFO_LOG_BUFFER => read.info.text = word,
                // The size is an unsigned int in a pointer's place.
                ERROR_LOG_BUFFER_SIZE => {
                    (read.error.size, read.error.written) = (word as u32 as usize, at)
                }
                INFO_LOG_BUFFER_SIZE => {
                    (read.info.size, read.info.written) = (word as u32 as usize, at)
                }
                _ => {}
            }
        }
        Ok(read)
    }

    /// Writes the error log, and an empty info log.
    ///
    /// # Safety
    /// The buffers that the options named are still valid.
    pub(super) unsafe fn report(&self, error: &str) {
        // SAFETY: the buffers were named by the program, with their sizes, and are valid for
        // writes, by this function's contract.
        unsafe {
            fill(self.error, error);
            fill(self.info, "");
        }
    }
}

/// # Safety
/// The buffer is valid for its size, and its size's place for a write.
unsafe fn fill(buffer: Buffer, text: &str) {
    let Buffer { text: to, size, written } = buffer;
    if to == 0 || size == 0 {
        return;
    }
    let len = text.len().min(size - 1);
    let to = to as *mut u8;
    // SAFETY: `len` + 1 bytes lie within the buffer; the size's place is an option value.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to, len);
        to.add(len).write(0);
        ffi::write_optional(written as *mut usize, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_the_error_where_the_program_wants_it() {
        let mut text = [1u8; 6];
        let names = [ERROR_LOG_BUFFER, 99, ERROR_LOG_BUFFER_SIZE];
        let mut values = [text.as_mut_ptr() as usize, 0, 6];
        // SAFETY: live arrays of three, and a live buffer of six bytes.
        unsafe {
            let options = Options::read(3, names.as_ptr(), values.as_mut_ptr().cast()).unwrap();
            options.report("line 12: no");
        }
        assert_eq!(&text, b"line \0");
        assert_eq!(values[2], 5);
    }
}
