//! Decompression that is bounded by what the header declares and by [`MAX_IMAGE`].

use std::borrow::Cow;
use std::io::Read;

use ruzstd::decoding::StreamingDecoder;

use super::{Compression, FatbinError, MAX_IMAGE};

/// An LZ4 block shrinks its content at most this much, so a larger claim is false.
const LZ4_BEST_RATIO: u64 = 255;
/// What is reserved before a ZSTD stream shows that there is more.
const FIRST_RESERVE: u64 = 1 << 20;

pub(super) fn decompress(
    payload: &[u8],
    compression: Compression,
    size: u64,
) -> Result<Cow<'_, [u8]>, FatbinError> {
    if size > MAX_IMAGE {
        return Err(FatbinError::TooLarge(size));
    }
    let failed = |why: String| FatbinError::Decompress { compression, why };
    let data = match compression {
        Compression::None => return Ok(Cow::Borrowed(payload)),
        Compression::Lz4 => {
            if size / LZ4_BEST_RATIO > payload.len() as u64 {
                return Err(failed(format!("{size} bytes cannot be in {}", payload.len())));
            }
            let data = lz4_flex::block::decompress(payload, size as usize);
            data.map_err(|error| failed(error.to_string()))?
        }
        Compression::Zstd => zstd(payload, size).map_err(failed)?,
    };
    if data.len() as u64 != size {
        return Err(failed(format!("{} bytes came out, {size} are declared", data.len())));
    }
    Ok(Cow::Owned(data))
}

fn zstd(payload: &[u8], size: u64) -> Result<Vec<u8>, String> {
    let decoder = StreamingDecoder::new(payload).map_err(|error| error.to_string())?;
    let mut data = Vec::with_capacity(size.min(FIRST_RESERVE) as usize);
    // One byte beyond the declared size shows that there is too much.
    decoder.take(size + 1).read_to_end(&mut data).map_err(|error| error.to_string())?;
    Ok(data)
}
