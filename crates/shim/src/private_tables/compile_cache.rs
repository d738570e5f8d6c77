//! The cache that NVIDIA's run-time compilers (NVRTC, nvJitLink) ask the driver for (table
//! da9151d3), and what it is good for here.
//!
//! A compiler opens an entry for its input (NVVM bitcode, or PTX), looks it up, and stores what it
//! made of it: PTX of bitcode, machine code of either. Nothing is ever found, so every program is
//! compiled as it would be without a driver. But so it is known which PTX a cubin was made from:
//! [`sources`] keeps that.

use crate::ffi;
use crate::module::sources;
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};
use kedge_kernel_cache::Digest;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// PTX whose machine code may come yet, in bytes and in number; the oldest is forgotten first.
const MAX_BYTES: usize = 128 << 20;
const MAX_PTX: usize = 16384;
/// Inputs and results beyond this are not looked at.
const MAX_ITEM: usize = 64 << 20;
/// Entries that compilers may have open at once.
const MAX_OPEN: usize = 1024;

/// What an entry was opened for.
#[derive(Debug, Clone)]
struct Input {
    digest: Digest,
    /// The input itself, if it is PTX.
    ptx: Option<Arc<[u8]>>,
}

#[derive(Debug, Default)]
struct Cache {
    last: usize,
    open: HashMap<usize, Input>,
    /// PTX by the bitcode that it was made from.
    ptx: VecDeque<(Digest, Arc<[u8]>)>,
    bytes: usize,
}

fn cache() -> MutexGuard<'static, Cache> {
    static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    fn open(&mut self, bytes: Vec<u8>) -> Option<usize> {
        if self.open.len() >= MAX_OPEN {
            return None;
        }
        let ptx = is_ptx(&bytes).then(|| bytes.as_slice().into());
        let input = Input { digest: Digest::of(&bytes), ptx };
        self.last += 1;
        self.open.insert(self.last, input);
        Some(self.last)
    }

    /// Takes what was made of an entry's input. Returns the PTX of what is machine code, if it is
    /// known.
    fn store(&mut self, handle: usize, made: &[u8]) -> Result<Option<Arc<[u8]>>, CuError> {
        let input = self.open.get(&handle).ok_or(CuError::INVALID_HANDLE)?.clone();
        if is_ptx(made) {
            self.bytes += made.len();
            self.ptx.push_back((input.digest, made.into()));
            self.forget();
        } else if made.starts_with(ELF) {
            let known = self.ptx.iter().rfind(|(from, _)| *from == input.digest);
            return Ok(input.ptx.or_else(|| known.map(|(_, ptx)| ptx.clone())));
        }
        Ok(None)
    }

    /// Keeps to the limits.
    fn forget(&mut self) {
        while self.bytes > MAX_BYTES || self.ptx.len() > MAX_PTX {
            let Some((_, old)) = self.ptx.pop_front() else { return };
            self.bytes -= old.len();
        }
    }
}

const ELF: &[u8] = b"\x7fELF";

fn is_ptx(bytes: &[u8]) -> bool {
    bytes.starts_with(b"//") || bytes.starts_with(b".version")
}

/// Slot 1: opens an entry for `len` bytes of input. `kind` is what shall be made: 1 machine code, 2
/// PTX; options follow.
///
/// # Safety
/// `handle` is valid for a write, `input` for `len` bytes.
pub(super) unsafe extern "C" fn open(
    handle: *mut usize,
    _kind: u32,
    input: *const u8,
    len: usize,
) -> CUresult {
    if len > MAX_ITEM {
        return CuError::NOT_FOUND.0;
    }
    // SAFETY: `input` is readable for `len` bytes: the runtime, which calls this slot, passes its
    // own buffer.
    let opened = unsafe { ffi::read_array(input, len) }
        .and_then(|bytes| cache().open(bytes).ok_or(CuError::NOT_FOUND));
    // SAFETY: `handle` is NULL or valid for a write: the runtime passes a variable of its own.
    status(opened.and_then(|opened| unsafe { ffi::write(handle, opened) }))
}

/// Slot 2: closes an entry.
pub(super) unsafe extern "C" fn close(handle: usize) -> CUresult {
    cache().open.remove(&handle);
    0
}

/// Slot 3: nothing is ever found.
pub(super) unsafe extern "C" fn look_up(_handle: usize) -> CUresult {
    CuError::NOT_FOUND.0
}

/// Slot 4: what was made of an entry's input.
///
/// # Safety
/// `made` is valid for `len` bytes.
pub(super) unsafe extern "C" fn store(
    handle: usize,
    _unknown: usize,
    made: *const u8,
    len: usize,
) -> CUresult {
    if len > MAX_ITEM {
        return 0;
    }
    // SAFETY: `made` is readable for `len` bytes: the runtime, which calls this slot, passes its
    // own buffer.
    let made = unsafe { ffi::read_array(made, len) };
    status(made.and_then(|made| {
        // Unlocked again before anything is written.
        let ptx = cache().store(handle, &made)?;
        ptx.into_iter().for_each(|ptx| sources::remember(&made, ptx));
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90a\n.visible .entry k() { ret; }\n";

    fn made(cache: &mut Cache, input: &[u8], result: &[u8]) -> Option<Arc<[u8]>> {
        let handle = cache.open(input.to_vec()).unwrap();
        let ptx = cache.store(handle, result).unwrap();
        cache.open.remove(&handle);
        ptx
    }

    #[test]
    fn a_cubin_is_traced_to_its_ptx() {
        let mut cache = Cache::default();
        assert_eq!(made(&mut cache, b"BC one", PTX), None);
        assert_eq!(made(&mut cache, b"BC one", b"\x7fELF one").as_deref(), Some(PTX));
        assert_eq!(made(&mut cache, b"BC two", b"\x7fELF two"), None);
        assert_eq!(made(&mut cache, PTX, b"\x7fELF three").as_deref(), Some(PTX));
        assert_eq!(cache.store(999, PTX), Err(CuError::INVALID_HANDLE));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut cache = Cache::default();
        for number in 0..=MAX_PTX {
            made(&mut cache, format!("BC {number}").as_bytes(), PTX);
        }
        assert_eq!((cache.ptx.len(), cache.bytes), (MAX_PTX, MAX_PTX * PTX.len()));
        assert_eq!(made(&mut cache, b"BC 0", b"\x7fELF"), None);
        assert_eq!(made(&mut cache, b"BC 1", b"\x7fELF").as_deref(), Some(PTX));
    }
}
