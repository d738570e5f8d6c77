//! Fatbin containers: what nvcc embeds in a program and hands to the driver.

use std::borrow::Cow;

/// What an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// PTX text.
    Ptx,
    /// A cubin: machine code in an ELF file.
    Elf,
    /// Link-time-optimisation IR.
    Lto,
    /// Any other kind number.
    Other(u16),
}

/// How an entry's payload is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Zstd,
    /// A raw LZ4 block.
    Lz4,
}

/// One entry of a container.
#[derive(Debug, Clone)]
pub struct Image<'a> {
    pub kind: ImageKind,
    /// Compute capability it was made for: 90 for `sm_90` or `compute_90`.
    pub sm: u32,
    /// `a` (architecture-specific) or `f` (family-specific) targets.
    pub sm_suffix: Option<char>,
    pub flags: u64,
    /// The source's name, often empty.
    pub name: String,
    /// PTX ISA version (major, minor) of a PTX entry.
    pub version: (u16, u16),
    pub compression: Compression,
    /// Bytes after decompression.
    pub size: u64,
    /// As stored, without padding.
    pub payload: &'a [u8],
}

impl<'a> Image<'a> {
    /// The payload, decompressed.
    ///
    /// # Errors
    /// [`FatbinError`] where the stream is damaged or not of the declared size.
    pub fn data(&self) -> Result<Cow<'a, [u8]>, FatbinError> {
        Err(FatbinError::NotAContainer)
    }

    /// The payload as PTX text, without its trailing NULs.
    ///
    /// # Errors
    /// As [`Image::data`], and where the text is not UTF-8.
    pub fn text(&self) -> Result<String, FatbinError> {
        Err(FatbinError::NotAContainer)
    }
}

/// What a raw buffer is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Fatbin,
    Elf,
    Ptx,
    NvvmOrLto,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FatbinError {
    #[error("not a fatbin container: no magic 0xba55ed50")]
    NotAContainer,
}

/// Every entry of a container, or of several that stand one after the other.
///
/// # Errors
/// [`FatbinError`] where a header does not fit the bytes.
pub fn images(bytes: &[u8]) -> Result<Vec<Image<'_>>, FatbinError> {
    let _ = bytes;
    Err(FatbinError::NotAContainer)
}

/// What `bytes` begins with.
pub fn classify(bytes: &[u8]) -> Kind {
    let _ = bytes;
    Kind::Unknown
}

/// The PTX entry to run on a device of compute capability `max_sm`: the newest that it can run.
pub fn select_ptx<'i, 'a>(images: &'i [Image<'a>], max_sm: u32) -> Option<&'i Image<'a>> {
    let _ = (images, max_sm);
    None
}

/// The whole length of the container whose first 16 bytes are `header`.
///
/// # Errors
/// [`FatbinError::NotAContainer`], or a size beyond the bound.
pub fn container_len(header: &[u8]) -> Result<u64, FatbinError> {
    let _ = header;
    Err(FatbinError::NotAContainer)
}

/// The length of the image that starts at offset 0 of `read`, which fills a buffer from an offset
/// and says whether it could.
///
/// # Errors
/// [`FatbinError`] where the image is of no known kind or does not end within the bound.
pub fn image_len(read: &mut dyn FnMut(u64, &mut [u8]) -> bool) -> Result<(Kind, u64), FatbinError> {
    let _ = read;
    Err(FatbinError::NotAContainer)
}
