//! Texture and surface objects by handle.

use super::arena::Memory;
use super::arrays::Array;
use super::tasks::lock;
use crate::exec::texture::{ArrayView, TextureView};
use crate::memory::Spans;
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayId, CtxId, Texture, TextureSource};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// `None`: what it showed had ended before it when a checkpoint was taken. Its handle stays valid,
/// and a kernel that uses it faults.
type Shown = Option<Arc<TextureView>>;

/// What kernels look handles up in. A handle means the same on all devices of a client.
#[derive(Default)]
pub(super) struct TextureTable {
    views: Mutex<HashMap<u64, Entry>>,
    /// The latest handle.
    last: AtomicU64,
    /// How many objects were made.
    made: AtomicU64,
}

struct Entry {
    ctx: CtxId,
    shown: Shown,
    /// Its place in the order in which all were made, which another kind of device's handles do not
    /// tell.
    number: u64,
}

impl TextureTable {
    pub(super) fn find(&self, handle: u64) -> Option<Arc<TextureView>> {
        lock(&self.views).get(&handle).and_then(|entry| entry.shown.clone())
    }

    /// The new object's handle, which is never 0 and never used again.
    ///
    /// # Errors
    /// INVALID_HANDLE for an unknown array, INVALID_VALUE for memory that is not valid or a format
    /// that cannot be read.
    pub(super) fn create(
        &self,
        ctx: CtxId,
        texture: &Texture,
        spans: &Spans,
        array: impl Fn(ArrayId) -> Result<Arc<Array>, CuError>,
    ) -> Result<u64, CuError> {
        let view = view(texture, |addr, size| spans.covers(addr, size), array)?;
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.add(handle, ctx, Some(Arc::new(view)));
        Ok(handle)
    }

    fn add(&self, handle: u64, ctx: CtxId, shown: Shown) {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        lock(&self.views).insert(handle, Entry { ctx, shown, number });
    }

    /// Makes an object again that had this handle. What it shows may have ended before it: memory
    /// then shows what lies there, as long as it is a device's.
    pub(super) fn restore(
        &self,
        (ctx, handle): (CtxId, u64),
        texture: &Texture,
        memory: &Memory,
        array: impl Fn(ArrayId) -> Result<Arc<Array>, CuError>,
    ) {
        let mapped = |addr, size| memory.in_arenas(addr, size) || memory.spans.covers(addr, size);
        let view = view(texture, mapped, array).ok();
        self.add(handle, ctx, view.map(Arc::new));
    }

    /// The number of the latest handle, and all objects in the order in which they were made.
    pub(super) fn handles(&self) -> (u64, Vec<(CtxId, u64)>) {
        let views = lock(&self.views);
        let mut all: Vec<_> = views.iter().collect();
        all.sort_unstable_by_key(|(_, entry)| entry.number);
        let handles = all.into_iter().map(|(handle, entry)| (entry.ctx, *handle)).collect();
        (self.last.load(Ordering::Relaxed), handles)
    }

    /// Numbers the next object from `last` on.
    pub(super) fn number_from(&self, last: u64) {
        self.last.store(last, Ordering::Relaxed);
    }

    pub(super) fn destroy(&self, ctx: CtxId, handle: u64) -> Result<(), CuError> {
        let mut views = lock(&self.views);
        match views.get(&handle) {
            Some(entry) if entry.ctx == ctx => {
                views.remove(&handle);
                Ok(())
            }
            _ => Err(CuError::INVALID_HANDLE),
        }
    }
}

/// What a texture shows; `valid` tells of memory, by address and size.
fn view(
    texture: &Texture,
    valid: impl Fn(u64, u64) -> bool,
    array: impl Fn(ArrayId) -> Result<Arc<Array>, CuError>,
) -> Result<TextureView, CuError> {
    let check = |addr, size: Option<u64>| match size {
        Some(size) if valid(addr, size) => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    };
    let levels = match &texture.source {
        TextureSource::Array { array: id } => vec![array(*id)?.view()?],
        TextureSource::Mipmap { levels } => {
            levels.iter().map(|id| array(*id)?.view()).collect::<Result<_, CuError>>()?
        }
        &TextureSource::Linear { addr, format, channels, bytes } => {
            check(addr, Some(bytes))?;
            vec![ArrayView::linear(addr, format, channels, bytes)?]
        }
        &TextureSource::Pitch2d { addr, format, channels, width, height, pitch } => {
            let view = ArrayView::pitched(addr, format, channels, width, height, pitch)?;
            // The last row may end where its elements do.
            let row = width.checked_mul(u64::from(view.format.bytes()));
            let rows = pitch.checked_mul(height.max(1) - 1);
            check(addr, row.zip(rows).and_then(|(row, rows)| rows.checked_add(row)))?;
            vec![view]
        }
    };
    TextureView::new(texture, levels)
}
