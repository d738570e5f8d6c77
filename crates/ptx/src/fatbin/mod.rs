//! Fatbin containers: what nvcc embeds in a program and hands to the driver.
//!
//! A container is a 16-byte header (magic 0xba55ed50, version 1, header size, size of what follows)
//! and entries, each a header of at least 64 bytes and a payload. Offsets in an entry's header:
//! 0 u16 kind, 4 u32 header size, 8 u64 payload size, 16 u32 compressed size (without padding),
//! 20 u32 options, 24 u16 minor and 26 u16 major version, 28 u32 compute capability, 32/36 u32
//! name's offset and length, 40 u64 flags, 56 u64 size after decompression. `fatbinary -concat`
//! joins several entries in one compressed payload; see `bundle`.
//!
//! The wrapper that a program passes (magic 0x466243b1) holds pointers, so the shim resolves it.

mod bundle;
mod decompress;
mod length;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ops::Range;

pub use length::{Kind, classify, container_len, image_len};

/// Largest payload after decompression.
pub const MAX_IMAGE: u64 = 512 << 20;

const MAGIC: u32 = 0xba55_ed50;
const CONTAINER_HEADER: usize = 16;
const ENTRY_HEADER: usize = 64;
const KIND_BUNDLE: u16 = 0x100;

const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
/// `sm_90a`: runs on that architecture alone.
const FLAG_ARCHITECTURE: u64 = 0x10_0000;
/// `sm_100f`: runs on that family.
const FLAG_FAMILY: u64 = 0x20_0000;

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
    /// The source's name; empty without `-G` or `-lineinfo`.
    pub name: String,
    /// PTX ISA version (major, minor) of a PTX entry.
    pub version: (u16, u16),
    pub compression: Compression,
    /// Bytes of `payload` after decompression.
    pub size: u64,
    /// As stored, without padding.
    pub payload: &'a [u8],
    /// Where the image lies in the decompressed payload, if that holds several.
    pub part: Option<Range<u64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FatbinError {
    #[error("not a fatbin container: no magic 0xba55ed50")]
    NotAContainer,
    #[error("fatbin container of unknown version {0}")]
    Version(u16),
    #[error("fatbin is damaged at byte {at}: {what}")]
    Damaged { at: u64, what: &'static str },
    #[error("image of {0} bytes is above the limit of {MAX_IMAGE}")]
    TooLarge(u64),
    #[error("{compression:?} payload of a fatbin entry does not decompress: {why}")]
    Decompress { compression: Compression, why: String },
    #[error("fatbin entry is not text: byte {0} is no UTF-8")]
    NotText(usize),
    #[error("image of an unknown kind: neither fatbin, ELF nor PTX")]
    UnknownKind,
    #[error("image cannot be read beyond byte {0}")]
    Unreadable(u64),
}

impl<'a> Image<'a> {
    /// The image, decompressed.
    ///
    /// # Errors
    /// [`FatbinError`] where the stream is damaged or not of the declared size.
    pub fn data(&self) -> Result<Cow<'a, [u8]>, FatbinError> {
        let whole = decompress::decompress(self.payload, self.compression, self.size)?;
        let Some(part) = &self.part else { return Ok(whole) };
        let damaged =
            FatbinError::Damaged { at: part.start, what: "an image beyond its bundle's end" };
        let (Ok(start), Ok(end)) = (usize::try_from(part.start), usize::try_from(part.end)) else {
            return Err(damaged);
        };
        match &whole {
            Cow::Borrowed(bytes) => bytes.get(start..end).map(Cow::Borrowed),
            Cow::Owned(bytes) => bytes.get(start..end).map(|part| Cow::Owned(part.to_vec())),
        }
        .ok_or(damaged)
    }

    /// The image as PTX text, without its trailing NULs.
    ///
    /// # Errors
    /// As [`Image::data`], and where the text is not UTF-8.
    pub fn text(&self) -> Result<String, FatbinError> {
        let data = self.data()?;
        let length = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
        let text = str::from_utf8(&data[..length]);
        text.map(str::to_owned).map_err(|error| FatbinError::NotText(error.valid_up_to()))
    }
}

/// Every entry of a container, or of several that stand one after the other. Bundles are listed as
/// the entries in them. Nothing is decompressed yet.
///
/// # Errors
/// [`FatbinError`] where a header does not fit the bytes.
pub fn images(bytes: &[u8]) -> Result<Vec<Image<'_>>, FatbinError> {
    let mut all = Vec::new();
    let mut at = 0;
    loop {
        let rest = &bytes[at..];
        let length = container_len(rest)?;
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
        let Some(length) = length else {
            let what = "a container longer than the bytes given";
            return Err(FatbinError::Damaged { at: at as u64, what });
        };
        let entries_at = usize::from(u16_at(rest, 6).unwrap_or(0));
        entries(&rest[..length], entries_at, &mut all)
            .map_err(|error| shifted(error, at as u64))?;
        at += length;
        // Containers are padded to 8 bytes where several follow each other.
        while at < bytes.len() && bytes[at] == 0 {
            at += 1;
        }
        if at == bytes.len() || length == 0 {
            return Ok(all);
        }
    }
}

fn shifted(error: FatbinError, by: u64) -> FatbinError {
    match error {
        FatbinError::Damaged { at, what } => FatbinError::Damaged { at: at + by, what },
        other => other,
    }
}

/// The entries of one container, the first at `at`.
fn entries<'a>(
    container: &'a [u8],
    mut at: usize,
    all: &mut Vec<Image<'a>>,
) -> Result<(), FatbinError> {
    while at < container.len() {
        let damaged = |what| FatbinError::Damaged { at: at as u64, what };
        let entry = &container[at..];
        let header = Header::read(entry).ok_or_else(|| damaged("an entry's header is cut off"))?;
        let total = header.size.checked_add(header.payload).filter(|all| *all <= entry.len());
        let total = total.ok_or_else(|| damaged("an entry is longer than its container"))?;
        let payload = &entry[header.size..total];
        let image = header.image(&entry[..header.size], payload).map_err(damaged)?;
        if header.kind == KIND_BUNDLE {
            bundle::expand(&image, &entry[..header.size], all).map_err(damaged)?;
        } else {
            all.push(image);
        }
        at += total;
    }
    Ok(())
}

/// An entry's header, or a record of a bundle, which has the same form.
#[derive(Debug, Clone, Copy)]
struct Header {
    kind: u16,
    /// Of the header itself; in a bundle's record, the image's offset.
    size: usize,
    /// Of the payload, padding included.
    payload: usize,
}

impl Header {
    /// None where it does not fit the bytes.
    fn read(bytes: &[u8]) -> Option<Self> {
        let header = Self {
            kind: u16_at(bytes, 0)?,
            size: u32_at(bytes, 4)? as usize,
            payload: usize::try_from(u64_at(bytes, 8)?).ok()?,
        };
        let fits = (ENTRY_HEADER..=bytes.len()).contains(&header.size);
        fits.then_some(header)
    }

    /// The image that a header of `fields` describes.
    fn image<'a>(self, fields: &[u8], payload: &'a [u8]) -> Result<Image<'a>, &'static str> {
        let cut = "an entry's header is cut off";
        let flags = u64_at(fields, 40).ok_or(cut)?;
        let compression = match flags & (FLAG_LZ4 | FLAG_ZSTD) {
            0 => Compression::None,
            FLAG_LZ4 => Compression::Lz4,
            FLAG_ZSTD => Compression::Zstd,
            _ => return Err("an entry that is compressed in two ways"),
        };
        let stored = match compression {
            Compression::None => payload,
            _ => payload
                .get(..u32_at(fields, 16).ok_or(cut)? as usize)
                .ok_or("an entry's compressed size is larger than its payload")?,
        };
        let size = match compression {
            Compression::None => payload.len() as u64,
            _ => u64_at(fields, 56).ok_or(cut)?,
        };
        Ok(Image {
            kind: match self.kind {
                1 => ImageKind::Ptx,
                2 => ImageKind::Elf,
                8 => ImageKind::Lto,
                other => ImageKind::Other(other),
            },
            sm: u32_at(fields, 28).ok_or(cut)?,
            sm_suffix: match flags & (FLAG_ARCHITECTURE | FLAG_FAMILY) {
                0 => None,
                FLAG_FAMILY => Some('f'),
                _ => Some('a'),
            },
            flags,
            name: name(fields).ok_or("an entry's name lies outside its header")?,
            version: (u16_at(fields, 26).ok_or(cut)?, u16_at(fields, 24).ok_or(cut)?),
            compression,
            size,
            payload: stored,
            part: None,
        })
    }
}

fn name(header: &[u8]) -> Option<String> {
    let (offset, length) = (u32_at(header, 32)? as usize, u32_at(header, 36)? as usize);
    if offset == 0 || length == 0 {
        return Some(String::new());
    }
    let bytes = header.get(offset..)?.get(..length)?;
    Some(String::from_utf8_lossy(bytes).trim_end_matches([' ', '\0']).to_owned())
}

/// The PTX entry to run on a device of compute capability `max_sm`: the newest that it can run. One
/// for a specific architecture or family is taken only where there is no other.
pub fn select_ptx<'i, 'a>(images: &'i [Image<'a>], max_sm: u32) -> Option<&'i Image<'a>> {
    let runs = |image: &&Image<'_>| image.kind == ImageKind::Ptx && image.sm <= max_sm;
    let rank = |image: &&Image<'_>| {
        let generality = match image.sm_suffix {
            None => 2,
            Some('f') => 1,
            Some(_) => 0,
        };
        (generality, image.sm)
    };
    images.iter().filter(runs).max_by_key(rank)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}
