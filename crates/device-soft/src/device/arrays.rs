//! CUDA arrays: opaque images that textures and surfaces read, and that only copies reach.

use super::arena::Memory;
use kedge_cuda_types::CuError;
use kedge_protocol::ArrayDesc;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// `CUarray_format` values (CUDA Driver API reference).
pub(super) mod format {
    pub(crate) const U8: u32 = 0x01;
    pub(crate) const U16: u32 = 0x02;
    pub(crate) const U32: u32 = 0x03;
    pub(crate) const S8: u32 = 0x08;
    pub(crate) const S16: u32 = 0x09;
    pub(crate) const S32: u32 = 0x0a;
    pub(crate) const F16: u32 = 0x10;
    pub(crate) const F32: u32 = 0x20;
}

/// CUDA_ARRAY3D_* flags.
const LAYERED: u32 = 1;
const CUBEMAP: u32 = 4;

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
    /// Taken of the device's memory, given back when the array is dropped.
    granted: u64,
    memory: Arc<Memory>,
}

// SAFETY: the storage is plain bytes that tasks reach through raw pointers, as device memory; their
// order, or the lack of it, is the program's own.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

/// Bytes of one channel.
///
/// # Errors
/// NOT_SUPPORTED for formats that this device does not read (planar video, block compression).
pub(super) fn channel_bytes(format: u32) -> Result<u64, CuError> {
    match format {
        format::U8 | format::S8 => Ok(1),
        format::U16 | format::S16 | format::F16 => Ok(2),
        format::U32 | format::S32 | format::F32 => Ok(4),
        _ => Err(CuError::NOT_SUPPORTED),
    }
}

impl Array {
    pub(super) fn new(memory: &Arc<Memory>, desc: &ArrayDesc) -> Result<Self, CuError> {
        if desc.width == 0 || !matches!(desc.channels, 1 | 2 | 4) {
            return Err(CuError::INVALID_VALUE);
        }
        let element = channel_bytes(desc.format)? * u64::from(desc.channels);
        let pitch = desc.width.checked_mul(element).ok_or(CuError::INVALID_VALUE)?;
        let (rows, planes) = (desc.height.max(1), desc.depth.max(1));
        let bytes = pitch.checked_mul(rows).and_then(|plane| plane.checked_mul(planes));
        let bytes = bytes.ok_or(CuError::INVALID_VALUE)?;
        let layout =
            usize::try_from(bytes).ok().and_then(|size| Layout::from_size_align(size, 512).ok());
        let layout = layout.ok_or(CuError::OUT_OF_MEMORY)?;
        let granted = memory.grant(desc.device, bytes)?;
        // SAFETY: the size is not zero: width, rows and planes are at least 1.
        let Some(storage) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            memory.give_back(desc.device, granted)?;
            return Err(CuError::OUT_OF_MEMORY);
        };
        let memory = Arc::clone(memory);
        Ok(Self { desc: *desc, pitch, rows, planes, storage, layout, granted, memory })
    }

    pub(super) fn address(&self) -> u64 {
        self.storage.as_ptr() as u64
    }

    pub(super) fn plane_bytes(&self) -> u64 {
        self.pitch * self.rows
    }

    pub(super) fn is_layered(&self) -> bool {
        self.desc.flags & LAYERED != 0
    }

    pub(super) fn is_cubemap(&self) -> bool {
        self.desc.flags & CUBEMAP != 0
    }

    /// The address of byte `x` of row `y` of plane `z`, from where `width` bytes of `height` rows of
    /// `depth` planes lie in the array.
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
        // SAFETY: allocated in `new` with this layout; tasks and textures that reach the storage hold
        // this object.
        unsafe { dealloc(self.storage.as_ptr(), self.layout) };
        // The device and the size are those that `grant` accepted.
        let _ = self.memory.give_back(self.desc.device, self.granted);
    }
}
