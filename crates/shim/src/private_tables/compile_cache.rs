//! The cache that NVIDIA's run-time compilers (NVRTC, nvJitLink) ask the driver for (table
//! da9151d3), and what it is good for here.
//!
//! A compiler opens an entry for its input (NVVM bitcode, or PTX), looks it up, and stores what it
//! made of it: PTX of bitcode, machine code of either. Nothing is ever found, so every program is
//! compiled as it would be without a driver. But a device that runs PTX and not machine code can so
//! be given the PTX that a cubin was made from: [`with_source`].

use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A digest of what was compiled or made.
type Digest = u128;

/// PTX that is remembered, in bytes and in number; the oldest is forgotten first.
const MAX_BYTES: usize = 128 << 20;
const MAX_SOURCES: usize = 16384;
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

/// A cubin and the PTX that it was made from.
#[derive(Debug)]
struct Source {
    cubin: Digest,
    ptx: Arc<[u8]>,
}

#[derive(Debug, Default)]
struct Cache {
    last: usize,
    open: HashMap<usize, Input>,
    /// PTX by the bitcode that it was made from.
    ptx: VecDeque<(Digest, Arc<[u8]>)>,
    sources: VecDeque<Source>,
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
        let input = Input { digest: digest(&bytes), ptx: is_ptx(&bytes).then(|| bytes.into()) };
        self.last += 1;
        self.open.insert(self.last, input);
        Some(self.last)
    }

    fn store(&mut self, handle: usize, made: &[u8]) -> Result<(), CuError> {
        let input = self.open.get(&handle).ok_or(CuError::INVALID_HANDLE)?.clone();
        if is_ptx(made) {
            self.ptx.push_back((input.digest, made.into()));
            self.bytes += made.len();
        } else if made.starts_with(ELF) {
            let known = self.ptx.iter().rfind(|(from, _)| *from == input.digest);
            if let Some(ptx) = input.ptx.or_else(|| known.map(|(_, ptx)| ptx.clone())) {
                self.bytes += ptx.len();
                self.sources.push_back(Source { cubin: digest(made), ptx });
            }
        }
        self.forget();
        Ok(())
    }

    /// Keeps to the limits.
    fn forget(&mut self) {
        while self.bytes > MAX_BYTES || self.ptx.len() + self.sources.len() > MAX_SOURCES {
            let old = match self.ptx.len() > self.sources.len() {
                true => self.ptx.pop_front().map(|(_, ptx)| ptx),
                false => self.sources.pop_front().map(|source| source.ptx),
            };
            let Some(old) = old else { return };
            self.bytes -= old.len();
        }
    }

    /// The PTX that a cubin was made from. A cubin that was linked of another is known by its
    /// kernels, if they are those of one PTX only.
    fn source(&self, cubin: &[u8]) -> Option<Arc<[u8]>> {
        let wanted = digest(cubin);
        if let Some(source) = self.sources.iter().rfind(|source| source.cubin == wanted) {
            return Some(source.ptx.clone());
        }
        let kernels = kernels_of(cubin)?;
        let mut found: Option<&Arc<[u8]>> = None;
        for source in self.sources.iter().filter(|source| defines_all(&source.ptx, &kernels)) {
            if found.is_some_and(|other| *other != source.ptx) {
                return None;
            }
            found = Some(&source.ptx);
        }
        found.cloned()
    }
}

const ELF: &[u8] = b"\x7fELF";

fn is_ptx(bytes: &[u8]) -> bool {
    bytes.starts_with(b"//") || bytes.starts_with(b".version")
}

fn digest(bytes: &[u8]) -> Digest {
    // Two of std's keyed hashes: this recognises, it does not defend.
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, bytes).hash(&mut hasher);
        hasher.finish()
    };
    u128::from(half(0)) << 64 | u128::from(half(1))
}

/// The names of a cubin's kernels and functions: its sections `.text.NAME`.
fn kernels_of(cubin: &[u8]) -> Option<Vec<&str>> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = cubin.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte)))
    };
    let (table, size) = (number(0x28, 8)?, number(0x3A, 2)?);
    let (count, names) = (number(0x3C, 2)?, number(0x3E, 2)?);
    let header = |index: usize| table.checked_add(index.checked_mul(size)?);
    let names = number(header(names)?.checked_add(0x18)?, 8)?;
    let mut kernels = Vec::new();
    for index in 0..count {
        let at = names.checked_add(number(header(index)?, 4)?)?;
        let rest = cubin.get(at..)?;
        let name = rest.split(|byte| *byte == 0).next()?;
        if let Some(kernel) = name.strip_prefix(b".text.") {
            kernels.push(std::str::from_utf8(kernel).ok()?);
        }
    }
    (!kernels.is_empty()).then_some(kernels)
}

/// Whether each of `names` is a word of the text.
fn defines_all(ptx: &[u8], names: &[&str]) -> bool {
    let Ok(text) = std::str::from_utf8(ptx) else { return false };
    let words: HashSet<&str> =
        text.split(|c: char| !(c.is_alphanumeric() || "_$".contains(c))).collect();
    names.iter().all(|name| words.contains(name))
}

/// Whether anything was compiled in this process.
pub(crate) fn knows_sources() -> bool {
    !cache().sources.is_empty()
}

/// A fatbin of a cubin and the PTX that it was made from, of which a device takes what it can run.
/// None for a cubin that no compiler has made here.
pub(crate) fn with_source(cubin: &[u8]) -> Option<Vec<u8>> {
    let ptx = cache().source(cubin)?;
    crate::entry::log_once("run from source", || {
        "a cubin that was compiled at run time is passed on with the PTX that it was made from"
            .to_owned()
    });
    let mut entries = Vec::new();
    entry(&mut entries, KIND_ELF, cubin, after(&ptx, ".target sm_"), 0);
    entry(&mut entries, KIND_PTX, &ptx, after(&ptx, ".target sm_"), after(&ptx, ".version "));
    let mut fatbin = Vec::with_capacity(entries.len() + 16);
    fatbin.extend(0xBA55_ED50_u32.to_le_bytes());
    fatbin.extend([1, 0, 16, 0]);
    fatbin.extend((entries.len() as u64).to_le_bytes());
    fatbin.extend(entries);
    Some(fatbin)
}

const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
/// Bytes of an entry's header.
const ENTRY: u32 = 64;
/// 64-bit, Linux.
const FLAGS: u64 = 0x11;

/// Appends one entry of a fatbin. `version` is the major one.
fn entry(out: &mut Vec<u8>, kind: u16, payload: &[u8], sm: u32, version: u32) {
    let padded = payload.len().next_multiple_of(8);
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend(0x101_u16.to_le_bytes());
    out.extend(ENTRY.to_le_bytes());
    out.extend((padded as u64).to_le_bytes());
    out.extend([0; 10]); // compressed size, options, minor version
    out.extend((version as u16).to_le_bytes());
    out.extend(sm.to_le_bytes());
    out.extend([0; 8]); // name
    out.extend(FLAGS.to_le_bytes());
    out.resize(start + ENTRY as usize, 0);
    out.extend_from_slice(payload);
    out.resize(start + ENTRY as usize + padded, 0);
}

/// The number behind `key`; 0 without one.
fn after(ptx: &[u8], key: &str) -> u32 {
    let text = String::from_utf8_lossy(ptx);
    let Some((_, rest)) = text.split_once(key) else { return 0 };
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().unwrap_or(0)
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
    // SAFETY: as the caller promises.
    let opened = unsafe { ffi::read_array(input, len) }
        .and_then(|bytes| cache().open(bytes).ok_or(CuError::NOT_FOUND));
    // SAFETY: as the caller promises.
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
    // SAFETY: as the caller promises.
    let made = unsafe { ffi::read_array(made, len) };
    status(made.and_then(|made| cache().store(handle, &made)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90a\n.visible .entry k() { ret; }\n";

    fn made(cache: &mut Cache, input: &[u8], result: &[u8]) {
        let handle = cache.open(input.to_vec()).unwrap();
        cache.store(handle, result).unwrap();
        cache.open.remove(&handle);
    }

    #[test]
    fn a_cubin_is_traced_to_its_ptx() {
        let mut cache = Cache::default();
        made(&mut cache, b"BC one", PTX);
        made(&mut cache, b"BC one", b"\x7fELF one");
        made(&mut cache, b"BC two", b"\x7fELF two");
        made(&mut cache, PTX, b"\x7fELF three");
        assert_eq!(cache.source(b"\x7fELF one").as_deref(), Some(PTX));
        assert_eq!(cache.source(b"\x7fELF three").as_deref(), Some(PTX));
        assert!(cache.source(b"\x7fELF two").is_none());
        assert_eq!(cache.store(999, PTX), Err(CuError::INVALID_HANDLE));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut cache = Cache::default();
        for i in 0..=MAX_SOURCES {
            made(&mut cache, PTX, format!("\x7fELF {i}").as_bytes());
        }
        assert_eq!(cache.sources.len(), MAX_SOURCES);
        assert!(cache.source(b"\x7fELF 0").is_none() && cache.source(b"\x7fELF 1").is_some());
        assert_eq!(cache.bytes, MAX_SOURCES * PTX.len());
    }

    #[test]
    fn reads_numbers_and_words() {
        assert_eq!((after(PTX, ".target sm_"), after(PTX, ".version ")), (90, 8));
        assert!(defines_all(PTX, &["k"]) && !defines_all(PTX, &["kk"]));
        assert_eq!(kernels_of(b"\x7fELF"), None);
    }
}
