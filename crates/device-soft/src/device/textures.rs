//! Texture and surface objects by handle.

use super::arrays::Array;
use super::tasks::lock;
use crate::exec::texture::{ArrayView, TextureView};
use crate::memory::Spans;
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayId, CtxId, Texture, TextureSource};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What kernels look handles up in. A handle means the same on all devices of a client.
#[derive(Default)]
pub(super) struct TextureTable {
    views: Mutex<HashMap<u64, (CtxId, Arc<TextureView>)>>,
    /// The latest handle.
    last: AtomicU64,
}

impl TextureTable {
    pub(super) fn find(&self, handle: u64) -> Option<Arc<TextureView>> {
        lock(&self.views).get(&handle).map(|(_, view)| Arc::clone(view))
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
        let levels = match &texture.source {
            TextureSource::Array { array: id } => vec![array(*id)?.view()?],
            TextureSource::Mipmap { levels } => {
                levels.iter().map(|id| array(*id)?.view()).collect::<Result<_, CuError>>()?
            }
            &TextureSource::Linear { addr, format, channels, bytes } => {
                check(spans, addr, Some(bytes))?;
                vec![ArrayView::linear(addr, format, channels, bytes)?]
            }
            &TextureSource::Pitch2d { addr, format, channels, width, height, pitch } => {
                let view = ArrayView::pitched(addr, format, channels, width, height, pitch)?;
                // The last row may end where its elements do.
                let row = width.checked_mul(u64::from(view.format.bytes()));
                let rows = pitch.checked_mul(height.max(1) - 1);
                check(spans, addr, row.zip(rows).and_then(|(row, rows)| rows.checked_add(row)))?;
                vec![view]
            }
        };
        let view = TextureView::new(texture, levels)?;
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.views).insert(handle, (ctx, Arc::new(view)));
        Ok(handle)
    }

    pub(super) fn destroy(&self, ctx: CtxId, handle: u64) -> Result<(), CuError> {
        let mut views = lock(&self.views);
        match views.get(&handle) {
            Some((owner, _)) if *owner == ctx => {
                views.remove(&handle);
                Ok(())
            }
            _ => Err(CuError::INVALID_HANDLE),
        }
    }
}

/// # Errors
/// INVALID_VALUE where a byte of the range is not valid, or its length overflowed.
fn check(spans: &Spans, addr: u64, size: Option<u64>) -> Result<(), CuError> {
    match size {
        Some(size) if spans.covers(addr, size) => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}
