//! Arrays, mipmapped arrays, texture and surface objects.

use crate::context::Context;
use crate::copies::Arrays;
use crate::driver::{Driver, check};
use crate::texture_handles::Expected;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUmipmappedArray};
use kedge_cuda_types::memory::*;
use kedge_protocol::{ArrayDesc, ArrayId, CtxId, Texture, TextureSource};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct Textures {
    arrays: HashMap<ArrayId, Array>,
    objects: HashMap<(CtxId, u64), Object>,
    made: u64,
    pub(crate) expected: Expected,
}

/// A texture or surface object.
struct Object {
    surface: bool,
    /// How many were made before it.
    number: u64,
}

struct Array {
    ctx: Arc<Context>,
    raw: CUarray,
    desc: ArrayDesc,
    /// The mipmapped array that it is a level of, and which.
    level: Option<(Arc<Mipmap>, u32)>,
}

/// A mipmapped array, destroyed with the last of its levels.
struct Mipmap {
    ctx: Arc<Context>,
    driver: Arc<Driver>,
    raw: CUmipmappedArray,
}

impl Drop for Mipmap {
    fn drop(&mut self) {
        if self.ctx.enter().is_ok() {
            // SAFETY: made by `create_mipmap`, destroyed once.
            unsafe { (self.driver.cuMipmappedArrayDestroy)(self.raw) };
        }
    }
}

impl Arrays for Textures {
    fn array(&self, id: ArrayId) -> Result<CUarray, CuError> {
        Ok(self.find(id)?.raw)
    }
}

fn shape(desc: &ArrayDesc) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: desc.width as usize,
        Height: desc.height as usize,
        Depth: desc.depth as usize,
        Format: desc.format,
        NumChannels: desc.channels,
        Flags: desc.flags,
    }
}

impl Textures {
    /// All arrays, the levels of mipmapped ones as well.
    pub(crate) fn arrays(
        &self,
    ) -> impl Iterator<Item = (ArrayId, &Arc<Context>, CUarray, &ArrayDesc)> {
        self.arrays.iter().map(|(id, array)| (*id, &array.ctx, array.raw, &array.desc))
    }

    /// The contexts and handles of all texture and surface objects, in the order in which they were
    /// made.
    pub(crate) fn objects(&self) -> Vec<(CtxId, u64)> {
        let mut all: Vec<_> = self.objects.iter().collect();
        all.sort_by_key(|(_, object)| object.number);
        all.into_iter().map(|(key, _)| *key).collect()
    }

    fn find(&self, id: ArrayId) -> Result<&Array, CuError> {
        self.arrays.get(&id).ok_or(CuError::INVALID_HANDLE)
    }

    pub(crate) fn create_array(
        &mut self,
        driver: &Driver,
        ctx: &Arc<Context>,
        id: ArrayId,
        desc: &ArrayDesc,
    ) -> Result<(), CuError> {
        if self.arrays.contains_key(&id) {
            return Err(CuError::INVALID_VALUE);
        }
        ctx.enter()?;
        let mut raw = CUarray::NULL;
        // SAFETY: live pointers.
        check(unsafe { (driver.cuArray3DCreate_v2)(&mut raw, &shape(desc)) })?;
        self.arrays.insert(id, Array { ctx: Arc::clone(ctx), raw, desc: *desc, level: None });
        Ok(())
    }

    pub(crate) fn create_mipmap(
        &mut self,
        driver: &Arc<Driver>,
        ctx: &Arc<Context>,
        levels: &[ArrayId],
        desc: &ArrayDesc,
    ) -> Result<(), CuError> {
        let mut names = HashSet::new();
        let taken = |id: &ArrayId| !names.insert(*id) || self.arrays.contains_key(id);
        if levels.is_empty() || levels.iter().any(taken) {
            return Err(CuError::INVALID_VALUE);
        }
        ctx.enter()?;
        let mut raw = CUmipmappedArray::NULL;
        let count = levels.len() as u32;
        // SAFETY: live pointers.
        check(unsafe { (driver.cuMipmappedArrayCreate)(&mut raw, &shape(desc), count) })?;
        let mipmap = Arc::new(Mipmap { ctx: Arc::clone(ctx), driver: Arc::clone(driver), raw });
        let mut made = Vec::with_capacity(levels.len());
        for (level, &id) in (0..).zip(levels) {
            let mut array = CUarray::NULL;
            // SAFETY: a live out pointer; the mipmapped array lives.
            check(unsafe { (driver.cuMipmappedArrayGetLevel)(&mut array, raw, level) })?;
            let (ctx, desc) = (Arc::clone(ctx), desc.level(level));
            let level = Some((Arc::clone(&mipmap), level));
            made.push((id, Array { ctx, raw: array, desc, level }));
        }
        self.arrays.extend(made);
        Ok(())
    }

    pub(crate) fn destroy_array(&mut self, driver: &Driver, id: ArrayId) -> Result<(), CuError> {
        let array = self.arrays.remove(&id).ok_or(CuError::INVALID_HANDLE)?;
        if array.level.is_some() {
            return Ok(());
        }
        array.ctx.enter()?;
        // SAFETY: an array of the driver's, destroyed once; the client has waited for its work.
        check(unsafe { (driver.cuArrayDestroy)(array.raw) })
    }

    /// The handle that kernels receive.
    pub(crate) fn create_object(
        &mut self,
        driver: &Driver,
        ctx: &Arc<Context>,
        texture: &Texture,
    ) -> Result<u64, CuError> {
        let (resource, view) = self.resource(texture)?;
        ctx.enter()?;
        let mut handle = 0;
        if texture.surface {
            // SAFETY: live pointers.
            check(unsafe { (driver.cuSurfObjectCreate)(&mut handle, &resource) })?;
        } else {
            let desc = description(texture);
            let view = view.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: live pointers, of which the view may be absent.
            check(unsafe { (driver.cuTexObjectCreate)(&mut handle, &resource, &desc, view) })?;
        }
        let object = Object { surface: texture.surface, number: self.made };
        self.made += 1;
        self.objects.insert((ctx.id, handle), object);
        Ok(handle)
    }

    pub(crate) fn destroy_object(
        &mut self,
        driver: &Driver,
        ctx: &Context,
        handle: u64,
    ) -> Result<(), CuError> {
        let object = self.objects.remove(&(ctx.id, handle)).ok_or(CuError::INVALID_HANDLE)?;
        ctx.enter()?;
        // SAFETY: an object of the current context, destroyed once.
        check(unsafe {
            match object.surface {
                true => (driver.cuSurfObjectDestroy)(handle),
                false => (driver.cuTexObjectDestroy)(handle),
            }
        })
    }

    /// What a texture reads, and how it is viewed where that differs from what it is.
    fn resource(
        &self,
        texture: &Texture,
    ) -> Result<(CUDA_RESOURCE_DESC, Option<CUDA_RESOURCE_VIEW_DESC>), CuError> {
        let mut resource = CUDA_RESOURCE_DESC::default();
        let mut set = |kind, words: &[u64]| {
            resource.resType = kind;
            resource.res[..words.len()].copy_from_slice(words);
        };
        let packed = |format: u32, channels: u32| u64::from(format) | u64::from(channels) << 32;
        let mut levels = None;
        match &texture.source {
            TextureSource::Array { array } => {
                set(CU_RESOURCE_TYPE_ARRAY, &[self.array(*array)?.0 as u64]);
            }
            TextureSource::Linear { addr, format, channels, bytes } => {
                set(CU_RESOURCE_TYPE_LINEAR, &[*addr, packed(*format, *channels), *bytes]);
            }
            TextureSource::Pitch2d { addr, format, channels, width, height, pitch } => set(
                CU_RESOURCE_TYPE_PITCH2D,
                &[*addr, packed(*format, *channels), *width, *height, *pitch],
            ),
            TextureSource::Mipmap { levels: all } => {
                let (mipmap, first, last) = self.mipmap(all)?;
                set(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, &[mipmap.raw.0 as u64]);
                levels = Some((first, last));
            }
        }
        let view = (texture.view_format != 0).then(|| CUDA_RESOURCE_VIEW_DESC {
            format: texture.view_format,
            firstMipmapLevel: levels.map_or(0, |(first, _)| first),
            lastMipmapLevel: levels.map_or(0, |(_, last)| last),
            ..Default::default()
        });
        Ok((resource, view))
    }

    /// The mipmapped array whose levels these are, the first and the last.
    fn mipmap(&self, levels: &[ArrayId]) -> Result<(&Mipmap, u32, u32), CuError> {
        let level = |id: Option<&ArrayId>| {
            let found = self.find(*id.ok_or(CuError::INVALID_VALUE)?)?;
            found.level.as_ref().ok_or(CuError::INVALID_VALUE)
        };
        let ((mipmap, first), (_, last)) = (level(levels.first())?, level(levels.last())?);
        Ok((mipmap, *first, *last))
    }

    /// Forgets what went with a context.
    pub(crate) fn forget_context(&mut self, ctx: CtxId) {
        self.arrays.retain(|_, array| array.ctx.id != ctx);
        self.objects.retain(|(owner, _), _| *owner != ctx);
    }
}

fn description(texture: &Texture) -> CUDA_TEXTURE_DESC {
    CUDA_TEXTURE_DESC {
        addressMode: texture.address,
        filterMode: texture.filter,
        flags: texture.flags,
        mipmapFilterMode: texture.mipmap_filter,
        mipmapLevelBias: texture.mipmap_bias,
        minMipmapLevelClamp: texture.mipmap_clamp[0],
        maxMipmapLevelClamp: texture.mipmap_clamp[1],
        borderColor: texture.border,
        ..Default::default()
    }
}
