//! CUDA arrays: opaque images that textures and surfaces read, and that only copies reach.

use super::arena::{Memory, discard};
use crate::exec::texture::{ArrayView, Format};
use kedge_cuda_types::CuError;
use kedge_protocol::ArrayDesc;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// An array's storage: rows without gaps, planes (or layers) of rows.
pub(super) struct Array {
    pub(super) desc: ArrayDesc,
    /// Bytes of a row.
    pub(super) pitch: u64,
    /// Rows of a plane; at least 1.
    pub(super) rows: u64,
    /// Planes; at least 1.
    pub(super) planes: u64,
    storage: NonNull<u8>,
    layout: Layout,
    memory: Arc<Memory>,
}

// SAFETY: the storage is plain bytes that tasks reach through raw pointers, as device memory; their
// order, or the lack of it, is the program's own.
unsafe impl Send for Array {}
// SAFETY: a shared reference leads to the same raw pointers, which tasks use as the program says.
unsafe impl Sync for Array {}

impl Array {
    pub(super) fn new(memory: &Arc<Memory>, desc: &ArrayDesc) -> Result<Self, CuError> {
        if desc.width == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // Planar video and block compression are not read by this device.
        let format = Format::new(desc.format, desc.channels).ok_or(CuError::NOT_SUPPORTED)?;
        let element = u64::from(format.bytes());
        let pitch = desc.width.checked_mul(element).ok_or(CuError::INVALID_VALUE)?;
        let (rows, planes) = (desc.height.max(1), desc.depth.max(1));
        let bytes = pitch.checked_mul(rows).and_then(|plane| plane.checked_mul(planes));
        let bytes = bytes.ok_or(CuError::INVALID_VALUE)?;
        let layout =
            usize::try_from(bytes).ok().and_then(|size| Layout::from_size_align(size, 512).ok());
        let layout = layout.ok_or(CuError::OUT_OF_MEMORY)?;
        memory.charge(desc.device, bytes)?;
        // SAFETY: the size is not zero: width, rows and planes are at least 1.
        let Some(storage) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            memory.refund(desc.device, bytes)?;
            return Err(CuError::OUT_OF_MEMORY);
        };
        let memory = Arc::clone(memory);
        Ok(Self { desc: *desc, pitch, rows, planes, storage, layout, memory })
    }

    pub(super) fn address(&self) -> u64 {
        self.storage.as_ptr() as u64
    }

    /// Bytes of all texels.
    pub(super) fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// Writes texels that a checkpoint has kept.
    pub(super) fn restore(&self, start: u64, bytes: &[u8]) -> Result<(), CuError> {
        let end = start.checked_add(bytes.len() as u64).ok_or(CuError::INVALID_VALUE)?;
        if end > self.bytes() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the range lies in the storage, which no Rust reference names; no task runs.
        unsafe {
            let to = self.storage.as_ptr().add(start as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    /// Has [start, end) of its bytes, as far as it has them, read as zero. No task runs.
    pub(super) fn clear(&self, start: u64, end: u64) {
        let end = end.min(self.bytes());
        if start < end {
            discard(self.address() + start, end - start);
        }
    }

    pub(super) fn plane_bytes(&self) -> u64 {
        self.pitch * self.rows
    }

    /// The array as textures and surfaces see it, which keeps it alive.
    pub(super) fn view(self: &Arc<Self>) -> Result<ArrayView, CuError> {
        let owner = Arc::clone(self) as _;
        ArrayView::array(self.address(), &self.desc, self.pitch, self.plane_bytes(), Some(owner))
    }

    /// The address of byte `x` of row `y` of plane `z`, from where `width` bytes of `height` rows
    /// of `depth` planes lie in the array.
    pub(super) fn locate(&self, at: [u64; 3], extent: [u64; 3]) -> Result<u64, CuError> {
        let sizes = [self.pitch, self.rows, self.planes];
        for dimension in 0..3 {
            let end = at[dimension].checked_add(extent[dimension]);
            if end.is_none_or(|end| end > sizes[dimension]) {
                return Err(CuError::INVALID_VALUE);
            }
        }
        Ok(self.address() + at[2] * self.plane_bytes() + at[1] * self.pitch + at[0])
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; tasks and textures that reach the storage
        // hold this object.
        unsafe { dealloc(self.storage.as_ptr(), self.layout) };
        // The device and the size are those that `charge` accepted.
        let _ = self.memory.refund(self.desc.device, self.layout.size() as u64);
    }
}
