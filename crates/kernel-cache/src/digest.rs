//! What names an entry.

use sha2::{Digest as _, Sha256};
use std::fmt;

/// The SHA-256 of a cubin, or of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub(crate) [u8; 32]);

impl Digest {
    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// Returns the digest of bytes that come in parts.
    ///
    /// # Errors
    /// A part's.
    pub fn of_parts<E>(parts: impl Iterator<Item = Result<Vec<u8>, E>>) -> Result<Digest, E> {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update(part?);
        }
        Ok(Digest(digest.finalize().into()))
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Returns the digest that a file of the cache is named by.
    pub(crate) fn parse(name: &str) -> Option<Digest> {
        let mut digest = [0; 32];
        if name.len() != 2 * digest.len() {
            return None;
        }
        for (byte, pair) in digest.iter_mut().zip(name.as_bytes().chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Some(Digest(digest))
    }
}

impl From<[u8; 32]> for Digest {
    fn from(bytes: [u8; 32]) -> Digest {
        Digest(bytes)
    }
}

/// Lower case alone, so that a digest has one name.
fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_one_name() {
        let digest = Digest::of(b"abc");
        let name = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.to_string(), name);
        assert_eq!(Digest::parse(name), Some(digest));
        for bad in ["", "ba78", &name.to_uppercase(), &name.replace('b', "g"), "lock"] {
            assert_eq!(Digest::parse(bad), None, "{bad}");
        }
    }
}
