//! What cubins were made from: the PTX of those that were compiled in this process, of those in the
//! user's kernel cache, which other processes have compiled, and of those beside which it stands.
//!
//! A device that runs PTX and not machine code is so given the PTX with the cubin: [`with_source`].

use super::beside;
use crate::entry::log_once;
use crate::session;
use kedge_kernel_cache::{CacheError, Digest, KernelCache};
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// PTX that is remembered, in bytes and in number; the oldest is forgotten first.
const MAX_BYTES: usize = 128 << 20;
const MAX_SOURCES: usize = 16384;
/// Cubins beyond this are not looked at.
pub(super) const MAX_CUBIN: u64 = 64 << 20;

/// A cubin and the PTX that it was made from.
#[derive(Debug)]
struct Source {
    cubin: Digest,
    ptx: Arc<[u8]>,
}

/// What was compiled in this process.
#[derive(Debug, Default)]
struct Sources {
    known: VecDeque<Source>,
    bytes: usize,
}

impl Sources {
    fn add(&mut self, cubin: Digest, ptx: Arc<[u8]>) {
        self.bytes += ptx.len();
        self.known.push_back(Source { cubin, ptx });
        while self.bytes > MAX_BYTES || self.known.len() > MAX_SOURCES {
            let Some(old) = self.known.pop_front() else { return };
            self.bytes -= old.ptx.len();
        }
    }

    fn exactly(&self, cubin: &Digest) -> Option<Arc<[u8]>> {
        self.known.iter().rfind(|source| source.cubin == *cubin).map(|source| source.ptx.clone())
    }

    /// Returns the PTX that defines all of a cubin's kernels, if one does only: a cubin that was
    /// linked of another is known by them.
    fn by_kernels(&self, kernels: &[&str]) -> Option<Arc<[u8]>> {
        let mut found: Option<&Arc<[u8]>> = None;
        for source in self.known.iter().filter(|source| defines_all(&source.ptx, kernels)) {
            if found.is_some_and(|other| *other != source.ptx) {
                return None;
            }
            found = Some(&source.ptx);
        }
        found.cloned()
    }
}

fn sources() -> MutexGuard<'static, Sources> {
    static SOURCES: LazyLock<Mutex<Sources>> = LazyLock::new(Mutex::default);
    SOURCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The user's cache. What is wrong with it is logged once, and it is done without.
fn kept() -> Option<&'static KernelCache> {
    static CACHE: OnceLock<Option<KernelCache>> = OnceLock::new();
    CACHE.get_or_init(|| KernelCache::of_user().map_err(|error| grumble(&error)).ok()).as_ref()
}

fn grumble(error: &CacheError) {
    log_once("kernel cache", || format!("kernel cache: {error}"));
}

fn keep(cubin: &Digest, ptx: &[u8]) {
    if let Some(Err(error)) = kept().map(|cache| cache.keep(cubin, ptx)) {
        grumble(&error);
    }
}

/// Remembers what a compiler has made, here and for other processes.
#[cfg(feature = "private-tables")]
pub(crate) fn remember(cubin: &[u8], ptx: Arc<[u8]>) {
    let digest = Digest::of(cubin);
    keep(&digest, &ptx);
    sources().add(digest, ptx);
}

fn find_kept(cubin: &Digest) -> Option<Vec<u8>> {
    kept()?.find(cubin).unwrap_or_else(|error| {
        grumble(&error);
        None
    })
}

fn has_software() -> bool {
    session::get().is_ok_and(|session| session.devices.iter().any(|device| device.exact))
}

/// The PTX that a cubin was made from.
fn find(cubin: &[u8]) -> Option<Arc<[u8]>> {
    let digest = Digest::of(cubin);
    if let Some(ptx) = sources().exactly(&digest) {
        return Some(ptx);
    }
    // Not remembered here: it would make others ambiguous that are known by their kernels.
    if let Some(ptx) = find_kept(&digest) {
        return Some(ptx.into());
    }
    let kernels = kernels_of(cubin)?;
    let ptx = sources().by_kernels(&kernels);
    let beside = || beside::find(cubin, &kernels).map(Into::into);
    // Only a software device needs it so much that folders are searched for it.
    let ptx = ptx.or_else(|| has_software().then(beside).flatten())?;
    keep(&digest, &ptx);
    sources().add(digest, ptx.clone());
    Some(ptx)
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

/// Returns a fatbin of a cubin and the PTX that it was made from, of which a device takes what it
/// can run. `None` for a cubin whose PTX is not known.
pub(super) fn with_source(cubin: &[u8]) -> Option<Vec<u8>> {
    let ptx = (cubin.len() as u64 <= MAX_CUBIN).then(|| find(cubin)).flatten()?;
    log_once("run from source", || {
        "note: a cubin that was compiled at run time is passed on with the PTX that it was made \
         from"
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

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90a\n.visible .entry k() { ret; }\n";

    #[test]
    fn the_oldest_are_forgotten() {
        let mut sources = Sources::default();
        let digest = |number: usize| Digest::of(&number.to_le_bytes());
        for number in 0..=MAX_SOURCES {
            sources.add(digest(number), PTX.into());
        }
        assert_eq!(sources.known.len(), MAX_SOURCES);
        assert_eq!(sources.exactly(&digest(0)), None);
        assert_eq!(sources.exactly(&digest(1)).as_deref(), Some(PTX));
        assert_eq!(sources.bytes, MAX_SOURCES * PTX.len());
    }

    #[test]
    fn reads_numbers_and_words() {
        assert_eq!((after(PTX, ".target sm_"), after(PTX, ".version ")), (90, 8));
        assert!(defines_all(PTX, &["k"]) && !defines_all(PTX, &["kk"]));
        assert_eq!(kernels_of(b"\x7fELF"), None);
    }
}
