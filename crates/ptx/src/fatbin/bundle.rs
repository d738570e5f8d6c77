//! Entries that `nvcc --concat` joined in one payload (kind 0x100), so that they compress better.
//!
//! The entry's options (at the offset in its header) are u32 count, u32 bytes of the records, and a
//! record for each image. A record has the form of an entry's header with the image's offset in the
//! decompressed payload in place of the header's size. Its length follows from its last string:
//! each ends with a NUL and is padded to 8 bytes (seen with nvcc 13.5).

use super::{ENTRY_HEADER, Header, Image, u16_at, u32_at, u64_at};

/// More images than any real bundle.
const MAX_IMAGES: u32 = 4096;

/// Lists the images of a bundle, whose entry's header is `header`.
pub(super) fn expand<'a>(
    bundle: &Image<'a>,
    header: &[u8],
    all: &mut Vec<Image<'a>>,
) -> Result<(), &'static str> {
    let cut = "a bundle's records are cut off";
    let options = u32_at(header, 20).ok_or(cut)? as usize;
    let records = header.get(options..).filter(|_| options >= ENTRY_HEADER).ok_or(cut)?;
    let count = u32_at(records, 0).ok_or(cut)?;
    if count > MAX_IMAGES {
        return Err("a bundle of too many images");
    }
    let mut rest = &records[8.min(records.len())..];
    for _ in 0..count {
        let length = record_length(rest).filter(|length| *length <= rest.len()).ok_or(cut)?;
        let (record, next) = rest.split_at(length);
        all.push(image(bundle, record).ok_or(cut)??);
        rest = next;
    }
    Ok(())
}

/// The image of one record; None where the record is cut off.
fn image<'a>(bundle: &Image<'a>, record: &[u8]) -> Option<Result<Image<'a>, &'static str>> {
    let offset = u64::from(u32_at(record, 4)?);
    let size = u64_at(record, 8)?;
    let header = Header { kind: u16_at(record, 0)?, size: record.len(), payload: 0 };
    let end = offset.checked_add(size).filter(|end| *end <= bundle.size);
    let Some(end) = end else { return Some(Err("an image beyond its bundle's end")) };
    Some(header.image(record, &[]).map(|described| Image {
        compression: bundle.compression,
        size: bundle.size,
        payload: bundle.payload,
        part: Some(offset..end),
        ..described
    }))
}

fn record_length(record: &[u8]) -> Option<usize> {
    let padded = |offset: u32, length: u32| {
        let end = (offset as usize).checked_add(length as usize)?.checked_add(1)?;
        Some(end.next_multiple_of(8))
    };
    let (options, name) = (u32_at(record, 20)?, u32_at(record, 32)?);
    let length = if options != 0 {
        let at = options as usize;
        padded(u32_at(record, at)?, u32_at(record, at.checked_add(4)?)?)?
    } else if name != 0 {
        padded(name, u32_at(record, 36)?)?
    } else {
        ENTRY_HEADER
    };
    (length >= ENTRY_HEADER).then_some(length)
}
