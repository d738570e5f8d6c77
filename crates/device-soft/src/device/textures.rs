//! Texture and surface objects by handle.

use super::arrays::Array;
use super::tasks::lock;
use crate::exec::texture::TextureView;
use crate::memory::Spans;
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayId, Texture, TextureSource};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// What kernels look handles up in. A handle means the same on all devices of a client.
#[derive(Default)]
pub(super) struct TextureTable {
    entries: Mutex<HashMap<u64, Entry>>,
}

struct Entry {
    view: Arc<TextureView>,
    /// What the view's addresses point into.
    _arrays: Vec<Arc<Array>>,
}

impl TextureTable {
    pub(super) fn find(&self, handle: u64) -> Option<Arc<TextureView>> {
        lock(&self.entries).get(&handle).map(|entry| Arc::clone(&entry.view))
    }

    /// # Errors
    /// INVALID_HANDLE for an unknown array, INVALID_VALUE for a source that cannot be read.
    pub(super) fn create(
        &self,
        texture: &Texture,
        _spans: &Spans,
        array: impl Fn(ArrayId) -> Result<Arc<Array>, CuError>,
    ) -> Result<(), CuError> {
        let arrays: Vec<Arc<Array>> = match &texture.source {
            TextureSource::Array { array: id } => vec![array(*id)?],
            TextureSource::Mipmap { levels } => {
                levels.iter().map(|id| array(*id)).collect::<Result<_, _>>()?
            }
            TextureSource::Linear { .. } | TextureSource::Pitch2d { .. } => Vec::new(),
        };
        let view = Arc::new(TextureView {});
        lock(&self.entries).insert(texture.handle, Entry { view, _arrays: arrays });
        Ok(())
    }

    pub(super) fn destroy(&self, handle: u64) -> Result<(), CuError> {
        match lock(&self.entries).remove(&handle) {
            Some(_) => Ok(()),
            None => Err(CuError::INVALID_HANDLE),
        }
    }
}
