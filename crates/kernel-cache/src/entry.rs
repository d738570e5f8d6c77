//! The file of an entry: a header, and the PTX.
//!
//! The header has the magic, the cubin's digest, the PTX's digest and the PTX's length, a u64 in
//! little-endian order. A file that another program has written, a torn one, or one that was moved
//! to another name fails one of these.

use crate::Digest;

const MAGIC: &[u8; 16] = b"kedge PTX 1\0\0\0\0\0";
pub(crate) const HEADER: usize = MAGIC.len() + 32 + 32 + 8;

/// Returns how long the file of an entry may be.
pub(crate) fn max_file(most: u64) -> u64 {
    HEADER as u64 + most
}

/// Returns the bytes of the file.
pub(crate) fn encode(cubin: &Digest, ptx: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER + ptx.len());
    file.extend(MAGIC);
    file.extend(cubin.0);
    file.extend(Digest::of(ptx).0);
    file.extend((ptx.len() as u64).to_le_bytes());
    file.extend_from_slice(ptx);
    file
}

/// Returns the PTX of a file's bytes; `None` where they are not whole, or another cubin's.
pub(crate) fn decode(cubin: &Digest, mut file: Vec<u8>) -> Option<Vec<u8>> {
    let rest = file.strip_prefix(MAGIC)?.strip_prefix(&cubin.0)?;
    let (digest, rest) = rest.split_first_chunk::<32>()?;
    let (length, ptx) = rest.split_first_chunk::<8>()?;
    let whole = u64::from_le_bytes(*length) == ptx.len() as u64 && Digest::of(ptx).0 == *digest;
    if !whole {
        return None;
    }
    file.drain(..HEADER);
    Some(file)
}

/// Returns the names of the kernels that PTX defines, `most` at most.
pub(crate) fn kernels(ptx: &[u8], most: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(ptx);
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_$".contains(c);
    let name = |rest: &str| rest.trim_start().split(|c| !is_name(c)).next().map(str::to_owned);
    let named = text.split(".entry").skip(1).filter_map(name);
    named.filter(|name| !name.is_empty()).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &[u8] =
        b".version 8.0\n.visible .entry a(.param .u64 p) { ret; }\n.entry b$_2 () {}";

    #[test]
    fn a_file_is_whole_or_none() {
        let cubin = Digest::of(b"cubin");
        let file = encode(&cubin, PTX);
        assert_eq!(decode(&cubin, file.clone()).as_deref(), Some(PTX));
        assert_eq!(decode(&Digest::of(b"another"), file.clone()), None);
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert_eq!(decode(&cubin, damaged), None, "byte {at}");
            assert_eq!(decode(&cubin, file[..at].to_vec()), None, "{at} bytes");
        }
        let longer = [&file[..], b"x"].concat();
        assert_eq!(decode(&cubin, longer), None);
    }

    #[test]
    fn kernels_are_named() {
        assert_eq!(kernels(PTX, 9), ["a", "b$_2"]);
        assert_eq!(kernels(PTX, 1), ["a"]);
        assert_eq!(kernels(b".entry", 9), [""; 0]);
    }
}
