//! Names of pinned certificates.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Bytes of the longest name: with a fingerprint and a suffix it must still be a file name.
const MAX_LENGTH: usize = 128;

/// The name under which a certificate is pinned: a person's, or a server's as given to `--gpu`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// The text that was no [`Name`], cut to the longest one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no name for a key: write letters, digits, and . _ - : @ behind the first, \
     {MAX_LENGTH} at most"
)]
pub struct BadName(String);

impl FromStr for Name {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Name, BadName> {
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        let is_meant = |c: char| c.is_ascii_alphanumeric() || "._-:@".contains(c);
        if begins && text.len() <= MAX_LENGTH && text.chars().all(is_meant) {
            return Ok(Name(text.to_owned()));
        }
        Err(BadName(text.chars().take(MAX_LENGTH).collect()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_lead_out_of_their_folder() {
        let longest = "n".repeat(MAX_LENGTH);
        for good in ["alice", "gpu-1.example.org", "10.0.0.1:7531", "fe80::1", "a@b", &longest] {
            assert_eq!(good.parse::<Name>().unwrap().to_string(), good);
        }
        let long = "n".repeat(MAX_LENGTH + 1);
        for bad in ["", ".", "..", "../x", "a/b", "-x", ".x", "a b", "a\n", "ä", "a\0", &long] {
            assert_eq!(bad.parse::<Name>(), Err(BadName(bad.chars().take(MAX_LENGTH).collect())));
        }
    }
}
