//! Textures and surfaces: what a handle names, and sampling.

/// What a texture or surface object reads. (Filled in by the texture family's developer.)
#[derive(Debug, Clone)]
pub struct TextureView {}
