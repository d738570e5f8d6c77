//! Managed variables of modules on a device that places them itself, in the proxy: this process
//! keeps a shadow of each at the same address.
//!
//! Before work is enqueued, what the program has changed in a shadow goes to the device; after a
//! wait, what the device has changed comes back. `seen` is what both sides had last, so neither
//! side's changes are lost while the other's are pending. So the plain uses work: host and device
//! in turn, with a synchronisation between them (CRUM, section III, does it by pages).

use super::link::{ask, post};
use crate::{log, session, stream};
use kedge_cuda_types::CuError;
use kedge_protocol::{
    Call, Copy3d, CtxId, GlobalInfo, MAX_INLINE_COPY, Place, Post, Shape, Status, StreamId,
    StreamOp,
};
use kedge_wire::Bytes;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Largest variable: it is compared at every launch.
const MAX_BYTES: u64 = 256 << 20;
const PAGE: u64 = 4096;
/// Bytes that are compared, and sent if they differ, as one.
const LINE: usize = 256;

struct Shadow {
    ctx: CtxId,
    addr: u64,
    seen: Vec<u8>,
}

#[derive(Default)]
struct Shadows {
    all: Vec<Shadow>,
    /// How many variables lie on each page that is mapped.
    pages: BTreeMap<u64, u32>,
    /// Of each context, a stream that waits for no other.
    streams: BTreeMap<CtxId, StreamId>,
}

static SHADOWS: Mutex<Option<Shadows>> = Mutex::new(None);
/// Whether there are any: looked at before every operation.
static ANY: AtomicBool = AtomicBool::new(false);
/// Whether work has been enqueued since the device's values were fetched.
static STALE: AtomicBool = AtomicBool::new(false);

fn shadows() -> MutexGuard<'static, Option<Shadows>> {
    SHADOWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a managed variable its shadow.
///
/// # Errors
/// NOT_SUPPORTED, and a line in the log, where that cannot be.
pub(super) fn create(ctx: CtxId, variable: &GlobalInfo) -> Result<(), CuError> {
    let refuse = |why: &str| {
        log::refused(&format!("managed variable {} is not supported: {why}", &*variable.name));
        Err(CuError::NOT_SUPPORTED)
    };
    if variable.size > MAX_BYTES {
        return refuse("it is larger than 256 MiB: allocate it with cudaMallocManaged");
    }
    if !session::get()?.client_memory {
        return refuse("the proxy cannot reach this process's memory here");
    }
    let mut guard = shadows();
    let shadows = guard.get_or_insert_default();
    if !shadows.map(variable.addr, variable.size) {
        return refuse("its address is taken in this process: run the program again");
    }
    let seen = vec![0; variable.size as usize];
    let mut shadow = Shadow { ctx, addr: variable.addr, seen };
    let fetched = shadows.stream(ctx).and_then(|stream| shadow.fetch(stream));
    fetched.inspect_err(|_| shadows.unmap(variable.addr, variable.size))?;
    shadows.all.push(shadow);
    ANY.store(true, Ordering::Release);
    Ok(())
}

/// The module of this variable is gone.
pub(super) fn remove(variable: &GlobalInfo) {
    if let Some(shadows) = shadows().as_mut() {
        let before = shadows.all.len();
        shadows.all.retain(|shadow| shadow.addr != variable.addr);
        if shadows.all.len() < before {
            shadows.unmap(variable.addr, variable.size);
        }
    }
}

pub(super) fn context_destroyed(ctx: CtxId) {
    if let Some(shadows) = shadows().as_mut() {
        shadows.streams.remove(&ctx);
    }
}

/// Sends what the program has changed, ahead of an operation in `stream`.
#[inline]
pub(crate) fn push(ctx: CtxId, stream: StreamId) -> Result<(), CuError> {
    if ANY.load(Ordering::Acquire) { send_changes(ctx, stream) } else { Ok(()) }
}

#[cold]
fn send_changes(ctx: CtxId, stream: StreamId) -> Result<(), CuError> {
    STALE.store(true, Ordering::Relaxed);
    let mut guard = shadows();
    let mut own = guard.iter_mut().flat_map(|s| &mut s.all).filter(|shadow| shadow.ctx == ctx);
    own.try_for_each(|shadow| shadow.send(stream))
}

/// Fetches what the device has changed. Called after every wait.
#[inline]
pub(crate) fn pull() {
    if ANY.load(Ordering::Acquire) && STALE.swap(false, Ordering::Relaxed) {
        fetch_changes();
    }
}

#[cold]
fn fetch_changes() {
    let mut guard = shadows();
    let Some(shadows) = guard.as_mut() else { return };
    let mut all = std::mem::take(&mut shadows.all);
    for shadow in &mut all {
        // A broken context has told the program already, and is no reason to leave out another's.
        let _ = shadows.stream(shadow.ctx).and_then(|stream| shadow.fetch(stream));
    }
    shadows.all = all;
}

impl Shadow {
    /// Posts the lines that differ from what the device has, neighbours together.
    fn send(&mut self, stream: StreamId) -> Result<(), CuError> {
        let Shadow { addr, seen, .. } = self;
        // SAFETY: `create` mapped these pages for this variable, and `remove` unmaps them after the
        // shadow. The program may change them meanwhile, as it may change any memory that a copy
        // reads.
        let now = unsafe { std::slice::from_raw_parts(*addr as usize as *const u8, seen.len()) };
        let runs: Vec<_> = changed_runs(now, seen).collect();
        for run in runs {
            let part = now[run.clone()].to_vec();
            seen[run.clone()].copy_from_slice(&part);
            let bytes = Bytes::new(part).map_err(|_| CuError::INVALID_VALUE)?;
            let op = StreamOp::CopyInline { dst: *addr + run.start as u64, bytes };
            post(&Post::Enqueue { stream, op })?;
        }
        Ok(())
    }

    /// Takes over the bytes that the device has changed.
    fn fetch(&mut self, stream: StreamId) -> Result<(), CuError> {
        let mut fresh = vec![0u8; self.seen.len()];
        let shape = Shape::line(fresh.len() as u64);
        let src = Place::Mapped { addr: self.addr, pitch: 0, slice: 0 };
        let dst = Place::Client { addr: fresh.as_mut_ptr() as u64, pitch: 0, slice: 0 };
        let op = StreamOp::Copy { copy: Copy3d::new(src, dst, shape) };
        post(&Post::Enqueue { stream, op })?;
        ask::<Status>(&Call::StreamSync { stream })?.map_err(CuError)?;
        for ((old, new), at) in self.seen.iter_mut().zip(&fresh).zip(0..) {
            if old != new {
                *old = *new;
                // SAFETY: a byte of the variable, as in `send`.
                unsafe { (self.addr as usize as *mut u8).add(at).write(*new) };
            }
        }
        Ok(())
    }
}

/// The ranges of `now` that differ from `seen`, in whole lines and at most a message long.
fn changed_runs<'a>(
    now: &'a [u8],
    seen: &'a [u8],
) -> impl Iterator<Item = std::ops::Range<usize>> + 'a {
    let mut line = 0;
    std::iter::from_fn(move || {
        let differs = |line: usize| {
            let range = line * LINE..now.len().min((line + 1) * LINE);
            !range.is_empty() && now[range.clone()] != seen[range]
        };
        let lines = now.len().div_ceil(LINE);
        while line < lines && !differs(line) {
            line += 1;
        }
        if line >= lines {
            return None;
        }
        let first = line;
        while line < lines && line - first < MAX_INLINE_COPY / LINE && differs(line) {
            line += 1;
        }
        Some(first * LINE..now.len().min(line * LINE))
    })
}

impl Shadows {
    fn stream(&mut self, ctx: CtxId) -> Result<StreamId, CuError> {
        if let Some(stream) = self.streams.get(&ctx) {
            return Ok(*stream);
        }
        let stream = stream::new_stream_id();
        post(&Post::StreamCreate { stream, ctx, blocking: false, priority: 0 })?;
        self.streams.insert(ctx, stream);
        Ok(stream)
    }

    /// Maps the pages of a range that are not mapped for a neighbour yet; `false`, and nothing
    /// mapped, where something else is there.
    fn map(&mut self, addr: u64, size: u64) -> bool {
        for page in pages(addr, size) {
            if !self.pages.contains_key(&page) && !map_page(page) {
                self.unmap(addr, page.saturating_sub(addr));
                return false;
            }
            *self.pages.entry(page).or_insert(0) += 1;
        }
        true
    }

    fn unmap(&mut self, addr: u64, size: u64) {
        for page in pages(addr, size) {
            let Some(count) = self.pages.get_mut(&page) else { continue };
            *count -= 1;
            if *count == 0 {
                self.pages.remove(&page);
                // SAFETY: `map_page` mapped this page, and no shadow is left on it.
                unsafe { libc::munmap(page as usize as *mut _, PAGE as usize) };
            }
        }
    }
}

/// The pages that a range touches.
fn pages(addr: u64, size: u64) -> impl Iterator<Item = u64> {
    let end = if size == 0 { addr } else { addr.saturating_add(size) };
    (addr / PAGE..end.div_ceil(PAGE)).map(|page| page * PAGE).filter(move |_| size > 0)
}

fn map_page(page: u64) -> bool {
    let (at, protection) = (page as usize as *mut _, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping that replaces none.
    let mapped = unsafe { libc::mmap(at, PAGE as usize, protection, flags, -1, 0) };
    if mapped != libc::MAP_FAILED && mapped != at {
        // A kernel that does not know the flag.
        // SAFETY: the mapping that was just made.
        unsafe { libc::munmap(mapped, PAGE as usize) };
    }
    mapped == at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_found_by_lines_and_go_together() {
        let seen = vec![0u8; 10 * LINE + 5];
        let mut now = seen.clone();
        assert_eq!(changed_runs(&now, &seen).count(), 0);
        now[3 * LINE] = 1;
        now[4 * LINE + 9] = 1;
        now[10 * LINE + 4] = 1;
        let runs: Vec<_> = changed_runs(&now, &seen).collect();
        assert_eq!(runs, [3 * LINE..5 * LINE, 10 * LINE..10 * LINE + 5]);
        let (long, zero) = (vec![1u8; 3 * MAX_INLINE_COPY], vec![0u8; 3 * MAX_INLINE_COPY]);
        assert_eq!(changed_runs(&long, &zero).map(|run| run.len()).max(), Some(MAX_INLINE_COPY));
    }

    #[test]
    fn variables_share_pages() {
        let mut shadows = Shadows::default();
        let base = 0x5eed_0000_0000;
        assert!(shadows.map(base + 8, 8) && shadows.map(base + PAGE - 4, 8));
        assert_eq!(shadows.pages.len(), 2);
        shadows.unmap(base + 8, 8);
        assert_eq!(shadows.pages.len(), 2);
        shadows.unmap(base + PAGE - 4, 8);
        assert!(shadows.pages.is_empty());
        let taken = &raw const shadows as u64;
        assert!(!Shadows::default().map(taken, 1), "this very stack");
    }
}
