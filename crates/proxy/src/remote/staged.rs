//! The private memory of a client on another machine, as its devices' proxy reads it: what came
//! with the message, what was kept of another time, or else what the near end is asked for.

use super::outlet::{self, Line};
use crate::outlet::PrivateMemory;
use kedge_cuda_types::CuError;
use kedge_kernel_cache::{CacheError, Digest, KernelCache};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of modules that may wait for their message, and images that are named for it.
const MAX_STAGED: usize = 2 << 30;
const MAX_NAMED: usize = 4096;

/// What the near end has sent ahead of a message that reads it.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// Runs of bytes, by address.
    pieces: Vec<(u64, Vec<u8>)>,
    /// Images of modules, of which only the digest was sent.
    named: Vec<Named>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Named {
    addr: u64,
    len: u64,
    digest: Digest,
}

impl Staged {
    /// Takes bytes; `false` where there are more than any message needs.
    pub(super) fn add(&mut self, addr: u64, bytes: Vec<u8>) -> bool {
        let total: usize = self.pieces.iter().map(|(_, bytes)| bytes.len()).sum();
        let fits = total + bytes.len() <= MAX_STAGED;
        if fits {
            self.pieces.push((addr, bytes));
        }
        fits
    }

    /// Takes what an image is called; `false` where there are more than any message needs.
    pub(super) fn name(&mut self, addr: u64, len: u64, digest: [u8; 32]) -> bool {
        let fits = self.named.len() < MAX_NAMED;
        if fits {
            self.named.push(Named { addr, len, digest: digest.into() });
        }
        fits
    }

    /// The message has been carried out.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        self.named.clear();
    }

    /// Copies from runs of bytes that follow each other, if they have all.
    fn take(&self, addr: u64, out: &mut [u8]) -> bool {
        let mut done = 0;
        for (start, bytes) in &self.pieces {
            let wanted = addr + done as u64;
            let Some(from) = wanted.checked_sub(*start).map(|from| from as usize) else { continue };
            let Some(rest) = bytes.get(from..).filter(|rest| !rest.is_empty()) else { continue };
            let count = rest.len().min(out.len() - done);
            out[done..done + count].copy_from_slice(&rest[..count]);
            done += count;
            if done == out.len() {
                return true;
            }
        }
        out.is_empty()
    }

    fn digest(&self, addr: u64, len: usize) -> Option<Digest> {
        let found = self.named.iter().find(|it| (it.addr, it.len) == (addr, len as u64));
        found.map(|it| it.digest)
    }
}

pub(super) struct FarMemory {
    line: Arc<Line>,
    staged: Arc<Mutex<Staged>>,
    /// What was sent before; `None` where the user has no folder for it.
    cache: Option<KernelCache>,
    /// Whether the log has been told that it cannot be used.
    told: AtomicBool,
}

impl FarMemory {
    pub(super) fn new(line: Arc<Line>, staged: Arc<Mutex<Staged>>) -> FarMemory {
        let (cache, told) = (KernelCache::of_modules().ok(), AtomicBool::new(false));
        FarMemory { line, staged, cache, told }
    }

    fn staged(&self) -> MutexGuard<'_, Staged> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the image of that digest, if it was kept and is whole.
    fn kept(&self, digest: &Digest, len: usize) -> Option<Vec<u8>> {
        let found = self.cache.as_ref()?.find(digest);
        let found = found.map_err(|error| self.cannot(&error)).ok()??;
        // The file's own check is of what it says that it holds.
        (found.len() == len && Digest::of(&found) == *digest).then_some(found)
    }

    /// Keeps an image, if it is what the near end has called it.
    fn keep(&self, digest: &Digest, image: &[u8]) {
        if let Some(cache) = &self.cache
            && Digest::of(image) == *digest
            && let Err(error) = cache.keep(digest, image)
        {
            self.cannot(&error);
        }
    }

    /// A cache that cannot be used costs time, and nothing else: it is told once.
    fn cannot(&self, error: &CacheError) {
        if !self.told.swap(true, Ordering::Relaxed) {
            outlet::log(&self.line, format!("the server keeps no modules: {error}"));
        }
    }
}

impl PrivateMemory for FarMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        let staged = self.staged();
        if staged.take(addr, out) {
            return Ok(());
        }
        let named = staged.digest(addr, out.len());
        drop(staged);
        if let Some(kept) = named.and_then(|digest| self.kept(&digest, out.len())) {
            out.copy_from_slice(&kept);
            return Ok(());
        }
        self.line.read(addr, out)?;
        if let Some(digest) = named {
            self.keep(&digest, out);
        }
        Ok(())
    }

    fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        self.line.read_parts(parts)
    }

    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        self.line.write(addr, bytes)
    }

    fn belongs_to(&self, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staged_bytes_are_found_across_their_pieces() {
        let mut staged = Staged::default();
        assert!(staged.add(100, vec![1, 2, 3]) && staged.add(103, vec![4, 5]));
        let read = |addr, len| {
            let mut out = vec![0; len];
            staged.take(addr, &mut out).then_some(out)
        };
        assert_eq!(read(101, 4), Some(vec![2, 3, 4, 5]));
        assert_eq!(read(100, 1), Some(vec![1]));
        assert_eq!((read(101, 5), read(99, 1), read(105, 1)), (None, None, None));
    }

    #[test]
    fn an_image_is_known_by_its_place_and_length() {
        let mut staged = Staged::default();
        let digest = Digest::of(b"image");
        assert!(staged.name(4096, 5, digest.bytes()));
        assert_eq!(staged.digest(4096, 5), Some(digest));
        assert_eq!((staged.digest(4096, 4), staged.digest(4095, 5)), (None, None));
        staged.clear();
        assert_eq!(staged.digest(4096, 5), None);
    }
}
