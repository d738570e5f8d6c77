//! CUDA arrays: their storage is the device's, their shape is kept here.

use super::alloc::call_for_memory;
use super::link::{current, post, quiesce};
use super::place::{Home, Shape, Side};
use super::{give, read};
use crate::handle::{Kind, Table};
use crate::{capture, entry};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUmipmappedArray};
use kedge_cuda_types::memory::*;
use kedge_protocol::{ArrayDesc, ArrayId, Call, CtxId, Place, Post};
use kedge_wire::List;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// An array, or one level of a mipmapped array.
#[derive(Debug)]
pub(super) struct Array {
    pub(super) id: ArrayId,
    ctx: CtxId,
    pub(super) shape: CUDA_ARRAY3D_DESCRIPTOR,
    /// Its mipmapped array destroys it.
    is_level: bool,
}

/// A mipmapped array; its levels from finest to coarsest.
#[derive(Debug)]
pub(super) struct Mipmapped {
    ctx: CtxId,
    pub(super) levels: Vec<(CUarray, ArrayId)>,
}

static ARRAYS: Table<Array> = Table::new(Kind::Array);
static MIPMAPPED: Table<Mipmapped> = Table::new(Kind::MipmappedArray);

const LAYERED: u32 = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP;
/// A bound that no device exceeds, so that sizes can be multiplied without overflow.
const MAX_EXTENT: usize = 1 << 20;

/// The array that a handle names.
pub(super) fn by_handle(handle: CUarray) -> Result<Arc<Array>, CuError> {
    ARRAYS.get(handle.0).ok_or(CuError::INVALID_HANDLE)
}

/// The handle of an array that an operation names; NULL once it is destroyed.
pub(crate) fn array_handle(id: ArrayId) -> CUarray {
    CUarray(ARRAYS.handle_where(|array| array.id == id).unwrap_or(0))
}

/// The mipmapped array that a handle names.
pub(super) fn mipmapped_by_handle(handle: CUmipmappedArray) -> Result<Arc<Mipmapped>, CuError> {
    MIPMAPPED.get(handle.0).ok_or(CuError::INVALID_HANDLE)
}

impl Array {
    /// Bytes of an element.
    pub(super) fn element(&self) -> u64 {
        channel_bytes(self.shape.Format).unwrap_or(1) * u64::from(self.shape.NumChannels)
    }

    /// Bytes of a row, rows of a plane, planes or layers.
    fn extent(&self) -> [u64; 3] {
        let row = self.shape.Width as u64 * self.element();
        [row, self.shape.Height.max(1) as u64, self.shape.Depth.max(1) as u64]
    }
}

/// The side of a copy at (bytes, row, plane) of an array.
pub(super) fn place(handle: CUarray, at: [u64; 3], shape: Shape) -> Result<Side, CuError> {
    let array = by_handle(handle)?;
    let sizes = [shape.width, shape.height, shape.depth];
    let mut axes = at.iter().zip(sizes).zip(array.extent());
    let inside =
        axes.all(|((&at, size), extent)| at.checked_add(size).is_some_and(|end| end <= extent));
    let element = array.element();
    if !inside || !at[0].is_multiple_of(element) || !shape.width.is_multiple_of(element) {
        return Err(CuError::INVALID_VALUE);
    }
    let [x_bytes, y, z] = at;
    Ok(Side { place: Place::Array { array: array.id, x_bytes, y, z }, home: Home::Device })
}

/// `count` bytes from `offset` of an array, whose rows follow each other: part of one row, or whole
/// rows.
pub(super) fn run_of(handle: CUarray, offset: u64, count: u64) -> Result<(Side, Shape), CuError> {
    let [row, rows, _] = by_handle(handle)?.extent();
    let (x, y) = (offset % row, offset / row);
    let whole = x == 0 && count.is_multiple_of(row);
    let shape = match whole {
        true => Shape { width: row, height: count / row, depth: 1 },
        false => Shape::line(count),
    };
    Ok((place(handle, [x, y % rows, y / rows], shape)?, shape))
}

fn check(shape: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<(), CuError> {
    let known = LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_TEXTURE_GATHER;
    let deferred = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
    if shape.Flags & deferred != 0 {
        return Err(entry::not_supported("a sparse or deferred CUDA array"));
    }
    if shape.Flags & !(known | CUDA_ARRAY3D_COLOR_ATTACHMENT | CUDA_ARRAY3D_DEPTH_TEXTURE) != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if channel_bytes(shape.Format).is_none() {
        let block = (CU_AD_FORMAT_UNORM_INT8X1..=CU_AD_FORMAT_SNORM_INT16X4)
            .contains(&shape.Format)
            || shape.Format > CU_AD_FORMAT_FLOAT;
        return Err(match block {
            true => entry::not_supported("a CUDA array of packed, block or planar format"),
            false => CuError::INVALID_VALUE,
        });
    }
    let (width, height, depth) = (shape.Width, shape.Height, shape.Depth);
    let layered = shape.Flags & LAYERED != 0;
    let cubemap = shape.Flags & CUDA_ARRAY3D_CUBEMAP != 0;
    let bad = !matches!(shape.NumChannels, 1 | 2 | 4)
        || width == 0
        || width.max(height).max(depth) > MAX_EXTENT
        || (layered && depth == 0)
        || (!layered && depth > 0 && height == 0)
        || (cubemap && (width != height || !depth.is_multiple_of(6)));
    if bad { Err(CuError::INVALID_VALUE) } else { Ok(()) }
}

fn new_id() -> ArrayId {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    ArrayId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// What the device is told of an array.
fn describe(device: u32, shape: &CUDA_ARRAY3D_DESCRIPTOR) -> ArrayDesc {
    ArrayDesc {
        device,
        width: shape.Width as u64,
        height: shape.Height as u64,
        depth: shape.Depth as u64,
        format: shape.Format,
        channels: shape.NumChannels,
        flags: shape.Flags,
    }
}

/// An array's shape as the program sees it.
fn shape_of(desc: &ArrayDesc) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: desc.width as usize,
        Height: desc.height as usize,
        Depth: desc.depth as usize,
        Format: desc.format,
        NumChannels: desc.channels,
        Flags: desc.flags,
    }
}

/// The handle of an array that the device has made; NULL where there are no more handles.
fn publish(ctx: CtxId, id: ArrayId, shape: CUDA_ARRAY3D_DESCRIPTOR, is_level: bool) -> CUarray {
    CUarray(ARRAYS.insert(Array { id, ctx, shape, is_level }).unwrap_or(0))
}

pub(crate) unsafe fn cuArray3DCreate_v2(
    handle: *mut CUarray,
    desc: *const CUDA_ARRAY3D_DESCRIPTOR,
) -> Result<(), CuError> {
    let current = current()?;
    // SAFETY: `desc` is NULL or valid for a read: the API asks that of the program.
    let shape = unsafe { read(desc)? };
    check(&shape)?;
    if handle.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let (ctx, id, desc) = (current.ctx, new_id(), describe(current.device, &shape));
    call_for_memory(current.device, &Call::ArrayCreate { ctx, array: id, desc })?;
    let array = publish(ctx, id, shape, false);
    if array.is_null() {
        post(&Post::ArrayDestroy { array: id })?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, array) }
}

pub(crate) unsafe fn cuArrayCreate_v2(
    handle: *mut CUarray,
    desc: *const CUDA_ARRAY_DESCRIPTOR,
) -> Result<(), CuError> {
    // SAFETY: `desc` is NULL or valid for a read: the API asks that of the program.
    let flat = unsafe { read(desc)? };
    let shape = CUDA_ARRAY3D_DESCRIPTOR {
        Width: flat.Width,
        Height: flat.Height,
        Depth: 0,
        Format: flat.Format,
        NumChannels: flat.NumChannels,
        Flags: 0,
    };
    // SAFETY: `shape` is a local; `handle` is NULL or valid for a write: the API asks that of the
    // program.
    unsafe { cuArray3DCreate_v2(handle, &shape) }
}

pub(crate) unsafe fn cuArray3DGetDescriptor_v2(
    desc: *mut CUDA_ARRAY3D_DESCRIPTOR,
    array: CUarray,
) -> Result<(), CuError> {
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, by_handle(array)?.shape) }
}

pub(crate) unsafe fn cuArrayGetDescriptor_v2(
    desc: *mut CUDA_ARRAY_DESCRIPTOR,
    array: CUarray,
) -> Result<(), CuError> {
    let shape = by_handle(array)?.shape;
    let flat = CUDA_ARRAY_DESCRIPTOR {
        Width: shape.Width,
        Height: shape.Height,
        Format: shape.Format,
        NumChannels: shape.NumChannels,
    };
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, flat) }
}

pub(crate) unsafe fn cuArrayDestroy(array: CUarray) -> Result<(), CuError> {
    if by_handle(array)?.is_level {
        return Err(CuError::INVALID_HANDLE);
    }
    capture::check_unsafe()?;
    let found = ARRAYS.remove(array.0).ok_or(CuError::INVALID_HANDLE)?;
    quiesce()?;
    post(&Post::ArrayDestroy { array: found.id })
}

pub(crate) unsafe fn cuMipmappedArrayCreate(
    handle: *mut CUmipmappedArray,
    desc: *const CUDA_ARRAY3D_DESCRIPTOR,
    levels: u32,
) -> Result<(), CuError> {
    let current = current()?;
    // SAFETY: `desc` is NULL or valid for a read: the API asks that of the program.
    let shape = unsafe { read(desc)? };
    check(&shape)?;
    if handle.is_null() || levels == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let (ctx, desc) = (current.ctx, describe(current.device, &shape));
    let ids: Vec<_> = (0..levels.min(desc.max_levels())).map(|_| new_id()).collect();
    let levels = List::new(ids.clone()).map_err(|_| CuError::INVALID_VALUE)?;
    call_for_memory(current.device, &Call::MipmapCreate { ctx, levels, desc })?;
    let publish = |(level, id)| (publish(ctx, id, shape_of(&desc.level(level)), true), id);
    let made = Mipmapped { ctx, levels: (0..).zip(ids).map(publish).collect() };
    if made.levels.iter().any(|(array, _)| array.is_null()) {
        destroy_levels(&made)?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    let made = MIPMAPPED.insert(made).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, CUmipmappedArray(made)) }
}

fn destroy_levels(mipmapped: &Mipmapped) -> Result<(), CuError> {
    for &(handle, array) in &mipmapped.levels {
        ARRAYS.remove(handle.0);
        post(&Post::ArrayDestroy { array })?;
    }
    Ok(())
}

pub(crate) unsafe fn cuMipmappedArrayGetLevel(
    level_array: *mut CUarray,
    mipmapped: CUmipmappedArray,
    level: u32,
) -> Result<(), CuError> {
    let found = mipmapped_by_handle(mipmapped)?;
    let (handle, _) = found.levels.get(level as usize).ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `level_array` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(level_array, *handle) }
}

pub(crate) unsafe fn cuMipmappedArrayDestroy(mipmapped: CUmipmappedArray) -> Result<(), CuError> {
    mipmapped_by_handle(mipmapped)?;
    capture::check_unsafe()?;
    let found = MIPMAPPED.remove(mipmapped.0).ok_or(CuError::INVALID_HANDLE)?;
    quiesce()?;
    destroy_levels(&found)
}

/// Destroys the arrays of a context that goes; its work is over.
pub(super) fn forget_context(ctx: CtxId) {
    MIPMAPPED.remove_where(|mipmapped| mipmapped.ctx == ctx);
    for array in ARRAYS.remove_where(|array| array.ctx == ctx) {
        // Fails only where the proxy is gone.
        let _ = post(&Post::ArrayDestroy { array: array.id });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: usize, height: usize, depth: usize, flags: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
        CUDA_ARRAY3D_DESCRIPTOR {
            Width: width,
            Height: height,
            Depth: depth,
            Format: CU_AD_FORMAT_FLOAT,
            NumChannels: 1,
            Flags: flags,
        }
    }

    #[test]
    fn shapes_are_checked() {
        assert_eq!(check(&shape(8, 0, 0, 0)), Ok(()));
        assert_eq!(check(&shape(8, 8, 3, CUDA_ARRAY3D_LAYERED)), Ok(()));
        assert_eq!(check(&shape(8, 8, 6, CUDA_ARRAY3D_CUBEMAP)), Ok(()));
        for bad in [
            shape(0, 8, 0, 0),
            shape(8, 0, 8, 0),
            shape(8, 8, 0, CUDA_ARRAY3D_LAYERED),
            shape(8, 4, 6, CUDA_ARRAY3D_CUBEMAP),
            shape(usize::MAX, 1, 1, 0),
            shape(8, 8, 0, 1 << 31),
            CUDA_ARRAY3D_DESCRIPTOR { NumChannels: 3, ..shape(8, 8, 0, 0) },
            CUDA_ARRAY3D_DESCRIPTOR { Format: 7, ..shape(8, 8, 0, 0) },
        ] {
            assert_eq!(check(&bad), Err(CuError::INVALID_VALUE), "{bad:?}");
        }
        assert_eq!(check(&shape(8, 8, 0, CUDA_ARRAY3D_SPARSE)), Err(CuError::NOT_SUPPORTED));
    }

    #[test]
    fn a_description_gives_the_shape_back() {
        let cube = shape(8, 4, 2, CUDA_ARRAY3D_SURFACE_LDST);
        assert_eq!(shape_of(&describe(1, &cube)), cube);
        assert_eq!(shape_of(&describe(1, &cube).level(2)), shape(2, 1, 1, cube.Flags));
    }

    #[test]
    fn copies_stay_inside() {
        let array =
            Array { id: ArrayId(7), ctx: CtxId(0), shape: shape(8, 4, 0, 0), is_level: false };
        let handle = CUarray(ARRAYS.insert(array).unwrap());
        let rows = |height| Shape { width: 32, height, depth: 1 };
        let at = |x_bytes, y| Place::Array { array: ArrayId(7), x_bytes, y, z: 0 };
        assert_eq!(place(handle, [0, 1, 0], rows(3)).unwrap().place, at(0, 1));
        assert_eq!(place(handle, [0, 2, 0], rows(3)), Err(CuError::INVALID_VALUE));
        assert_eq!(place(handle, [2, 0, 0], Shape::line(4)), Err(CuError::INVALID_VALUE));
        assert_eq!(
            place(handle, [u64::MAX - 3, 0, 0], Shape::line(4)),
            Err(CuError::INVALID_VALUE)
        );
        let (side, shape) = run_of(handle, 32, 96).unwrap();
        assert_eq!((side.place, shape), (at(0, 1), rows(3)));
        assert_eq!(run_of(handle, 36, 8).unwrap().0.place, at(4, 1));
        assert!(run_of(handle, 36, 32).is_err(), "neither one row nor whole rows");
        assert_eq!(by_handle(CUarray(12345)).unwrap_err(), CuError::INVALID_HANDLE);
    }
}
