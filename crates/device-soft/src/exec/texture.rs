//! Textures and surfaces: what a handle names.

mod fetch;
mod lookup;
mod plane;
mod query;
mod sample;
mod surface;

use super::{Query, Selected};
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayDesc, Texture};
use std::any::Any;
use std::sync::Arc;

pub use crate::math::sampling::AddressMode;
pub use crate::math::texel::Format;

/// `CUDA_ARRAY3D_LAYERED`, `CUDA_ARRAY3D_CUBEMAP`.
const LAYERED: u32 = 1;
const CUBEMAP: u32 = 4;

/// Elements in memory: an array, or linear memory seen as one.
#[derive(Clone)]
pub struct ArrayView {
    /// Address in this process of element (0, 0, 0).
    pub base: u64,
    /// Elements. 1 in dimensions that the array lacks. Layers and cube faces count in `depth`.
    pub size: [u32; 3],
    /// Bytes from a row to the next, and from a slice or layer to the next.
    pub row_pitch: u64,
    pub slice_pitch: u64,
    pub format: Format,
    pub layered: bool,
    pub cubemap: bool,
    /// Keeps the memory at `base` alive; None for device memory, whose arena stays mapped.
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl ArrayView {
    /// A CUDA array whose storage at `base` has these pitches, in bytes.
    ///
    /// # Errors
    /// INVALID_VALUE for a format or extent that no array has.
    pub fn array(
        base: u64,
        desc: &ArrayDesc,
        row_pitch: u64,
        slice_pitch: u64,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, CuError> {
        let format = Format::new(desc.format, desc.channels).ok_or(CuError::INVALID_VALUE)?;
        let extent =
            |elements: u64| u32::try_from(elements.max(1)).map_err(|_| CuError::INVALID_VALUE);
        Ok(Self {
            base,
            size: [extent(desc.width)?, extent(desc.height)?, extent(desc.depth)?],
            row_pitch,
            slice_pitch,
            format,
            layered: desc.flags & LAYERED != 0,
            cubemap: desc.flags & CUBEMAP != 0,
            owner,
        })
    }

    /// Linear device memory, one row. The caller has checked that it is valid.
    ///
    /// # Errors
    /// INVALID_VALUE for an unknown format.
    pub fn linear(addr: u64, format: u32, channels: u32, bytes: u64) -> Result<Self, CuError> {
        let element = Format::new(format, channels).ok_or(CuError::INVALID_VALUE)?.bytes();
        Self::pitched(addr, format, channels, bytes / u64::from(element), 1, bytes)
    }

    /// Pitched device memory. The caller has checked that it is valid.
    ///
    /// # Errors
    /// INVALID_VALUE for an unknown format or an extent beyond 2^32.
    pub fn pitched(
        addr: u64,
        format: u32,
        channels: u32,
        width: u64,
        height: u64,
        pitch: u64,
    ) -> Result<Self, CuError> {
        let desc = ArrayDesc { device: 0, width, height, depth: 0, format, channels, flags: 0 };
        Self::array(addr, &desc, pitch, 0, None)
    }
}

/// How a texture object is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    pub address: [AddressMode; 3],
    /// Linear filtering; else the nearest element.
    pub linear: bool,
    /// Integer elements are returned as they are; else as numbers in [0, 1] or [-1, 1].
    pub read_as_integer: bool,
    /// Coordinates run from 0 to 1.
    pub normalised: bool,
    /// 8-bit colours are sRGB: read as linear light.
    pub srgb: bool,
    pub border: [f32; 4],
    /// Blends two mipmap levels; else the nearer one.
    pub mipmap_linear: bool,
    pub mipmap_bias: f32,
    pub mipmap_clamp: [f32; 2],
}

/// What a texture or surface object reads and, for surfaces, writes.
#[derive(Clone)]
pub struct TextureView {
    /// Finest first; one unless it is a mipmap.
    pub levels: Vec<ArrayView>,
    pub sampler: Sampler,
}

impl TextureView {
    /// `texture`'s sampler over `levels`.
    ///
    /// # Errors
    /// INVALID_VALUE where there are no levels.
    pub fn new(texture: &Texture, levels: Vec<ArrayView>) -> Result<Self, CuError> {
        const READ_AS_INTEGER: u32 = 1;
        const NORMALIZED_COORDINATES: u32 = 2;
        const SRGB: u32 = 16;
        if levels.is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        let normalised = texture.flags & NORMALIZED_COORDINATES != 0;
        let address = texture.address.map(|mode| match mode {
            // Wrapping and mirroring need normalised coordinates; without, they clamp.
            0 if normalised => AddressMode::Wrap,
            2 if normalised => AddressMode::Mirror,
            3 => AddressMode::Border,
            _ => AddressMode::Clamp,
        });
        let sampler = Sampler {
            address,
            linear: texture.filter == 1,
            read_as_integer: texture.flags & READ_AS_INTEGER != 0,
            normalised,
            srgb: texture.flags & SRGB != 0,
            border: texture.border,
            mipmap_linear: texture.mipmap_filter == 1,
            mipmap_bias: texture.mipmap_bias,
            mipmap_clamp: texture.mipmap_clamp,
        };
        Ok(Self { levels, sampler })
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(0) {
        "tex" | "tld4" => fetch::select(query),
        "txq" | "suq" => query::select(query),
        "suld" | "sust" => surface::select(query),
        _ => None,
    }
}
