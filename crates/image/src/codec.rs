//! How the bytes of an extent are stored.

use crate::layout::MAX_SECTION;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Codec {
    /// Zeros, which are not stored.
    Zero,
    Raw,
    /// One LZ4 block.
    Lz4,
    /// One Zstd frame.
    Zstd,
    /// One gzip member.
    Gzip,
    /// As in the image that this one builds on, which is not stored again.
    Parent,
    /// As the file of another process of the same image stores it, at the same address.
    Process,
}

/// By number.
const CODECS: [Codec; 7] =
    [Codec::Zero, Codec::Raw, Codec::Lz4, Codec::Zstd, Codec::Gzip, Codec::Parent, Codec::Process];

impl Codec {
    pub(crate) fn number(self) -> u8 {
        CODECS.iter().position(|codec| *codec == self).unwrap_or(0) as u8
    }

    /// Returns whether nothing is stored of such an extent.
    pub fn is_empty(self) -> bool {
        matches!(self, Codec::Zero | Codec::Parent | Codec::Process)
    }

    pub(crate) fn from_number(number: u8) -> Option<Codec> {
        CODECS.get(usize::from(number)).copied()
    }
}

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// LZ4 where a sample of the extent shrinks by an eighth, raw elsewhere.
    #[default]
    Auto,
    Raw,
    Lz4,
    Zstd,
    Gzip,
}

impl FromStr for Choice {
    type Err = String;
    fn from_str(text: &str) -> Result<Choice, String> {
        match text {
            "auto" => Ok(Choice::Auto),
            "raw" => Ok(Choice::Raw),
            "lz4" => Ok(Choice::Lz4),
            "zstd" => Ok(Choice::Zstd),
            "gzip" => Ok(Choice::Gzip),
            _ => Err(format!("`{text}` is no codec: auto, raw, lz4, zstd or gzip")),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Choice::Auto => "auto",
            Choice::Raw => "raw",
            Choice::Lz4 => "lz4",
            Choice::Zstd => "zstd",
            Choice::Gzip => "gzip",
        })
    }
}

/// Zstd's fastest ordinary level: a checkpoint should keep up with its disk.
const ZSTD_LEVEL: i32 = 1;
/// The fastest that makes Huffman codes of its own: level 1 here cannot shrink floats.
const GZIP_LEVEL: u32 = 2;
/// Bytes that stand for the whole when the codec is chosen.
const SAMPLE: usize = 16 << 10;

#[derive(Debug)]
pub struct Encoded<'a> {
    pub codec: Codec,
    pub bytes: std::borrow::Cow<'a, [u8]>,
}

impl Encoded<'_> {
    /// Returns what is as in the image that is built on.
    pub fn parent() -> Encoded<'static> {
        Encoded { codec: Codec::Parent, bytes: (&[][..]).into() }
    }
}

/// Encodes `bytes`; raw where the chosen codec would not make them smaller.
pub fn encode(bytes: &[u8], choice: Choice) -> Encoded<'_> {
    if is_zero(bytes) {
        return Encoded { codec: Codec::Zero, bytes: (&[][..]).into() };
    }
    let packed = match choice {
        Choice::Raw => None,
        Choice::Auto => shrinks(bytes).then(|| (Codec::Lz4, lz4_flex::block::compress(bytes))),
        Choice::Lz4 => Some((Codec::Lz4, lz4_flex::block::compress(bytes))),
        Choice::Zstd => {
            zstd::bulk::compress(bytes, ZSTD_LEVEL).ok().map(|packed| (Codec::Zstd, packed))
        }
        Choice::Gzip => gzip(bytes).ok().map(|packed| (Codec::Gzip, packed)),
    };
    match packed {
        Some((codec, packed)) if packed.len() < bytes.len() => {
            Encoded { codec, bytes: packed.into() }
        }
        _ => Encoded { codec: Codec::Raw, bytes: bytes.into() },
    }
}

fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let packed = Vec::with_capacity(bytes.len() / 2);
    let mut encoder = GzEncoder::new(packed, Compression::new(GZIP_LEVEL));
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Returns how many bytes there were.
fn gunzip(stored: &[u8], decoded: &mut [u8]) -> io::Result<usize> {
    let mut decoder = GzDecoder::new(stored);
    decoder.read_exact(decoded)?;
    // Its end carries the member's own checksum, and must be where it is expected.
    let more = decoder.read(&mut [0])?;
    Ok(decoded.len() + more)
}

fn is_zero(bytes: &[u8]) -> bool {
    // A fold over 64 bytes becomes vector code.
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| word.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

fn shrinks(bytes: &[u8]) -> bool {
    // From the middle: beginnings are often headers.
    let start = bytes.len().saturating_sub(SAMPLE) / 2;
    let sample = &bytes[start..bytes.len().min(start + SAMPLE)];
    lz4_flex::block::compress(sample).len() < sample.len() - sample.len() / 8
}

/// Decodes `stored` into `decoded`, which it must fill exactly.
pub(crate) fn decode(codec: Codec, stored: &[u8], decoded: &mut [u8]) -> Result<(), &'static str> {
    debug_assert!(decoded.len() as u64 <= MAX_SECTION);
    let length = match codec {
        Codec::Zero => {
            decoded.fill(0);
            decoded.len()
        }
        Codec::Raw if stored.len() == decoded.len() => {
            decoded.copy_from_slice(stored);
            decoded.len()
        }
        Codec::Raw => 0,
        Codec::Parent | Codec::Process => return Err("an extent's bytes are in another file"),
        Codec::Lz4 => lz4_flex::block::decompress_into(stored, decoded)
            .map_err(|_| "an extent's LZ4 block is invalid")?,
        Codec::Zstd => zstd::bulk::decompress_to_buffer(stored, decoded)
            .map_err(|_| "an extent's Zstd frame is invalid")?,
        Codec::Gzip => gunzip(stored, decoded).map_err(|_| "an extent's gzip member is invalid")?,
    };
    if length == decoded.len() { Ok(()) } else { Err("an extent decodes to another length") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_not_stored() {
        assert_eq!(encode(&[0; 8192], Choice::Raw).codec, Codec::Zero);
        let mut bytes = [0; 8192];
        bytes[8191] = 1;
        assert_ne!(encode(&bytes, Choice::Auto).codec, Codec::Zero);
    }

    /// What would become far more than was declared is given up at once.
    #[test]
    fn bombs_do_not_go_off() {
        let much = vec![0; 64 << 20];
        let bombs = [
            (Codec::Zstd, zstd::bulk::compress(&much, ZSTD_LEVEL).unwrap()),
            (Codec::Gzip, gzip(&much).unwrap()),
            (Codec::Lz4, lz4_flex::block::compress(&much)),
        ];
        for (codec, bomb) in &bombs {
            let mut small = [7; 4096];
            assert!(decode(*codec, bomb, &mut small).is_err(), "{codec:?}");
        }
    }

    #[test]
    fn what_does_not_shrink_stays_raw() {
        let noise: Vec<u8> =
            (0..8192u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for choice in [Choice::Auto, Choice::Raw, Choice::Lz4, Choice::Zstd, Choice::Gzip] {
            let encoded = encode(&noise, choice);
            assert!(encoded.bytes.len() <= noise.len());
            let mut back = vec![0; noise.len()];
            decode(encoded.codec, &encoded.bytes, &mut back).unwrap();
            assert_eq!(back, noise);
        }
    }
}
