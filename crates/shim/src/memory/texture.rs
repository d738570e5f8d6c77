//! Texture and surface objects. A handle, as kernels receive it, is the device's choice: it means
//! something in its own context only.

use super::array::{self, Array};
use super::link::{ask, current, post, quiesce};
use super::place::{Shape, left_at, locate_on_device};
use super::{give, read};
use crate::entry;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUmipmappedArray};
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, CtxId, Place, Post, Texture, TextureSource};
use kedge_wire::List;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a program made, for queries.
#[derive(Debug, Clone, Copy)]
struct Object {
    resource: CUDA_RESOURCE_DESC,
    /// Absent for a surface object.
    texture: Option<CUDA_TEXTURE_DESC>,
    view: Option<CUDA_RESOURCE_VIEW_DESC>,
}

/// By context and handle.
type Objects = BTreeMap<(CtxId, u64), Object>;

fn objects() -> MutexGuard<'static, Objects> {
    static OBJECTS: Mutex<Objects> = Mutex::new(BTreeMap::new());
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of an element of linear memory.
fn element(format: u32, channels: u32) -> Result<u64, CuError> {
    let channel = channel_bytes(format).ok_or(CuError::INVALID_VALUE)?;
    match channels {
        1 | 2 | 4 => Ok(channel * u64::from(channels)),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// A device address of `shape`, in allocated memory; a registered host address becomes the
/// device's.
fn address(addr: u64, pitch: u64, shape: Shape) -> Result<u64, CuError> {
    match locate_on_device(addr, pitch, 0, shape)?.place {
        Place::Mapped { addr, .. } => Ok(addr),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Linear memory of `bytes`, or as much of it as there is: programs say more than they have, and
/// drivers take it. No element lies beyond. INVALID_VALUE where there are not even `least` bytes.
fn line(addr: u64, bytes: u64, least: u64) -> Result<(u64, u64), CuError> {
    address(addr, 0, Shape::line(bytes)).map(|addr| (addr, bytes)).or_else(|error| {
        let left = left_at(addr).filter(|left| (least..bytes).contains(left)).ok_or(error)?;
        Ok((address(addr, 0, Shape::line(left))?, left))
    })
}

/// What a resource description names.
fn source(
    resource: &CUDA_RESOURCE_DESC,
    view: Option<&CUDA_RESOURCE_VIEW_DESC>,
) -> Result<TextureSource, CuError> {
    let [first, _, second, third, fourth, ..] = resource.res;
    let (format, channels) = (resource.format(), resource.channels());
    match resource.resType {
        CU_RESOURCE_TYPE_ARRAY => {
            Ok(TextureSource::Array { array: array::by_handle(CUarray(first as usize))?.id })
        }
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            let all = array::mipmapped_by_handle(CUmipmappedArray(first as usize))?;
            let last = all.levels.len().saturating_sub(1);
            let (from, to) = match view {
                Some(v) if v.lastMipmapLevel > 0 => {
                    (v.firstMipmapLevel as usize, (v.lastMipmapLevel as usize).min(last))
                }
                _ => (0, last),
            };
            let levels = all.levels.get(from..=to).ok_or(CuError::INVALID_VALUE)?;
            let levels = levels.iter().map(|&(_, id)| id).collect();
            let levels = List::new(levels).map_err(|_| CuError::INVALID_VALUE)?;
            Ok(TextureSource::Mipmap { levels })
        }
        CU_RESOURCE_TYPE_LINEAR => {
            let least = element(format, channels)?;
            if second < least {
                return Err(CuError::INVALID_VALUE);
            }
            let (addr, bytes) = line(first, second, least)?;
            Ok(TextureSource::Linear { addr, format, channels, bytes })
        }
        CU_RESOURCE_TYPE_PITCH2D => {
            let (width, height, pitch) = (second, third, fourth);
            let row = element(format, channels)?.checked_mul(width);
            let row = row.filter(|&row| row > 0 && row <= pitch && height > 0);
            let shape = Shape { width: row.ok_or(CuError::INVALID_VALUE)?, height, depth: 1 };
            let addr = address(first, pitch, shape)?;
            Ok(TextureSource::Pitch2d { addr, format, channels, width, height, pitch })
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// What the reference demands of a texture description.
fn check(
    resource: &CUDA_RESOURCE_DESC,
    texture: &CUDA_TEXTURE_DESC,
    view: Option<&CUDA_RESOURCE_VIEW_DESC>,
) -> Result<(), CuError> {
    let modes = texture.addressMode.iter().all(|&mode| mode <= 3);
    let filters = texture.filterMode <= 1 && texture.mipmapFilterMode <= 1;
    let on_array = resource.resType <= CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    if !modes || !filters || (view.is_some() && !on_array) || resource.flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    match view {
        Some(view) if view.firstLayer != 0 => {
            Err(entry::not_supported("a resource view that does not begin at layer 0"))
        }
        _ => Ok(()),
    }
}

pub(crate) unsafe fn cuTexObjectCreate(
    handle: *mut u64,
    resource: *const CUDA_RESOURCE_DESC,
    texture: *const CUDA_TEXTURE_DESC,
    view: *const CUDA_RESOURCE_VIEW_DESC,
) -> Result<(), CuError> {
    let current = current()?;
    // SAFETY: each descriptor is NULL or valid for a read: the API asks that of the program. Only
    // the view may be absent.
    let (resource, texture, view) = unsafe {
        let view = if view.is_null() { None } else { Some(read(view)?) };
        (read(resource)?, read(texture)?, view)
    };
    check(&resource, &texture, view.as_ref())?;
    let made = Texture {
        surface: false,
        source: source(&resource, view.as_ref())?,
        address: texture.addressMode,
        filter: texture.filterMode,
        flags: texture.flags,
        border: texture.borderColor,
        mipmap_filter: texture.mipmapFilterMode,
        mipmap_bias: texture.mipmapLevelBias,
        mipmap_clamp: [texture.minMipmapLevelClamp, texture.maxMipmapLevelClamp],
        view_format: view.map_or(0, |view| view.format),
    };
    let object = Object { resource, texture: Some(texture), view };
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { publish(handle, current.ctx, made, object) }
}

pub(crate) unsafe fn cuSurfObjectCreate(
    handle: *mut u64,
    resource: *const CUDA_RESOURCE_DESC,
) -> Result<(), CuError> {
    let current = current()?;
    // SAFETY: `resource` is NULL or valid for a read: the API asks that of the program.
    let resource = unsafe { read(resource)? };
    if resource.resType != CU_RESOURCE_TYPE_ARRAY {
        return Err(CuError::INVALID_VALUE);
    }
    if !surface_able(&*array::by_handle(CUarray(resource.res[0] as usize))?) {
        return Err(CuError::INVALID_VALUE);
    }
    let made = Texture {
        surface: true,
        source: source(&resource, None)?,
        address: [0; 3],
        filter: 0,
        flags: 0,
        border: [0.0; 4],
        mipmap_filter: 0,
        mipmap_bias: 0.0,
        mipmap_clamp: [0.0; 2],
        view_format: 0,
    };
    let object = Object { resource, texture: None, view: None };
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { publish(handle, current.ctx, made, object) }
}

/// Surfaces need an array that was made for them.
fn surface_able(array: &Array) -> bool {
    array.shape.Flags & CUDA_ARRAY3D_SURFACE_LDST != 0
}

/// Makes a new object on the device, and tells the program its handle.
///
/// # Safety
/// `handle` is NULL or valid for a write.
unsafe fn publish(
    handle: *mut u64,
    ctx: CtxId,
    texture: Texture,
    object: Object,
) -> Result<(), CuError> {
    if handle.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let made = ask::<Result<u64, u32>>(&Call::TextureCreate { ctx, texture: Box::new(texture) })?;
    let id = made.map_err(CuError)?;
    objects().insert((ctx, id), object);
    // SAFETY: `handle` is NULL or valid for a write, by this function's contract.
    unsafe { give(handle, id) }
}

fn destroy(handle: u64, surface: bool) -> Result<(), CuError> {
    let ctx = current()?.ctx;
    find(ctx, handle, surface)?;
    // Kernels that were launched with the handle may still run.
    quiesce()?;
    objects().remove(&(ctx, handle)).ok_or(CuError::INVALID_VALUE)?;
    post(&Post::TextureDestroy { ctx, handle })
}

/// The current context's object of that handle.
fn here(handle: u64, surface: bool) -> Result<Object, CuError> {
    find(current()?.ctx, handle, surface)
}

fn find(ctx: CtxId, handle: u64, surface: bool) -> Result<Object, CuError> {
    let found = objects().get(&(ctx, handle)).copied();
    found.filter(|object| object.texture.is_none() == surface).ok_or(CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuTexObjectDestroy(handle: u64) -> Result<(), CuError> {
    destroy(handle, false)
}

pub(crate) unsafe fn cuSurfObjectDestroy(handle: u64) -> Result<(), CuError> {
    destroy(handle, true)
}

pub(crate) unsafe fn cuTexObjectGetResourceDesc(
    desc: *mut CUDA_RESOURCE_DESC,
    handle: u64,
) -> Result<(), CuError> {
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, here(handle, false)?.resource) }
}

pub(crate) unsafe fn cuSurfObjectGetResourceDesc(
    desc: *mut CUDA_RESOURCE_DESC,
    handle: u64,
) -> Result<(), CuError> {
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, here(handle, true)?.resource) }
}

pub(crate) unsafe fn cuTexObjectGetTextureDesc(
    desc: *mut CUDA_TEXTURE_DESC,
    handle: u64,
) -> Result<(), CuError> {
    let texture = here(handle, false)?.texture.ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, texture) }
}

pub(crate) unsafe fn cuTexObjectGetResourceViewDesc(
    desc: *mut CUDA_RESOURCE_VIEW_DESC,
    handle: u64,
) -> Result<(), CuError> {
    let view = here(handle, false)?.view.ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `desc` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(desc, view) }
}

/// Forgets the objects of a context that is gone, and the device's views of them.
pub(super) fn forget_context(ctx: CtxId) {
    let mut objects = objects();
    let dead: Vec<_> = objects.range((ctx, 0)..=(ctx, u64::MAX)).map(|(&key, _)| key).collect();
    for key in dead {
        objects.remove(&key);
        // Fails only where the proxy is gone.
        let _ = post(&Post::TextureDestroy { ctx, handle: key.1 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base};

    const ADDR: u64 = device_base(4) + DEVICE_CLIENT_LEN;

    fn resource(kind: u32, words: [u64; 5]) -> CUDA_RESOURCE_DESC {
        let mut res = [0; 16];
        res[..5].copy_from_slice(&words);
        CUDA_RESOURCE_DESC { resType: kind, res, flags: 0 }
    }

    const FLOAT1: u64 = CU_AD_FORMAT_FLOAT as u64 | 1 << 32;

    #[test]
    fn descriptions_become_sources() {
        let linear = resource(CU_RESOURCE_TYPE_LINEAR, [ADDR, FLOAT1, 400, 0, 0]);
        let format = CU_AD_FORMAT_FLOAT;
        let expected = TextureSource::Linear { addr: ADDR, format, channels: 1, bytes: 400 };
        assert_eq!(source(&linear, None), Ok(expected));
        let pitched = resource(CU_RESOURCE_TYPE_PITCH2D, [ADDR, FLOAT1, 10, 3, 64]);
        let (width, height, pitch) = (10, 3, 64);
        let expected =
            TextureSource::Pitch2d { addr: ADDR, format, channels: 1, width, height, pitch };
        assert_eq!(source(&pitched, None), Ok(expected));
    }

    #[test]
    fn nonsense_is_refused() {
        let three = CU_AD_FORMAT_FLOAT as u64 | 3 << 32;
        for (bad, error) in [
            (resource(CU_RESOURCE_TYPE_LINEAR, [0x1000, FLOAT1, 400, 0, 0]), 1),
            (resource(CU_RESOURCE_TYPE_LINEAR, [ADDR, three, 400, 0, 0]), 1),
            (resource(CU_RESOURCE_TYPE_LINEAR, [ADDR, FLOAT1, 0, 0, 0]), 1),
            (resource(CU_RESOURCE_TYPE_PITCH2D, [ADDR, FLOAT1, 10, 3, 39]), 1),
            (resource(CU_RESOURCE_TYPE_PITCH2D, [ADDR, FLOAT1, u64::MAX, 3, 39]), 1),
            (resource(CU_RESOURCE_TYPE_ARRAY, [5, 0, 0, 0, 0]), 400),
            (resource(9, [0; 5]), 1),
        ] {
            assert_eq!(source(&bad, None), Err(CuError(error)), "{bad:?}");
        }
        let texture = CUDA_TEXTURE_DESC { filterMode: 2, ..Default::default() };
        let linear = resource(CU_RESOURCE_TYPE_LINEAR, [ADDR, FLOAT1, 400, 0, 0]);
        assert_eq!(check(&linear, &texture, None), Err(CuError::INVALID_VALUE));
        assert_eq!(find(CtxId(1), u64::MAX, false).err(), Some(CuError::INVALID_VALUE));
    }

    #[test]
    fn a_handle_means_something_in_its_own_context_only() {
        let resource = resource(CU_RESOURCE_TYPE_LINEAR, [ADDR, FLOAT1, 400, 0, 0]);
        let object = Object { resource, texture: None, view: None };
        let (ctx, other) = (CtxId(u32::MAX), CtxId(u32::MAX - 1));
        objects().insert((ctx, 1), object);
        assert!(find(ctx, 1, true).is_ok());
        assert_eq!(find(ctx, 1, false).err(), Some(CuError::INVALID_VALUE));
        assert_eq!(find(other, 1, true).err(), Some(CuError::INVALID_VALUE));
        forget_context(other);
        assert!(find(ctx, 1, true).is_ok());
        forget_context(ctx);
        assert!(find(ctx, 1, true).is_err());
    }
}
