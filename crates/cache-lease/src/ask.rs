//! The ioctl by which a program asks for a lease. Numbers are little-endian.

use std::ffi::CStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Bytes of the question and of the answer, in one buffer.
pub const BYTES: usize = 4096;
/// `_IOWR('k', 0xC1, char[BYTES])`, linux/ioctl.h.
pub const REQUEST: u32 = (3 << 30) | ((BYTES as u32) << 16) | (0x6b << 8) | 0xc1;
/// The longest range of a lease, in bytes.
pub const LENGTH: u64 = 16 << 20;
/// A lease begins at a multiple of that, a page of memory: the kernel may have what is before. A
/// program writes as far as there through the mount.
pub const GRAIN: u64 = 4096;

/// Says what a buffer is, and of which version.
const ASKED: u64 = u64::from_le_bytes(*b"kdgask01");
const LEASED: u64 = u64::from_le_bytes(*b"kdglea01");
const WORD: usize = 8;
/// Digits of a shadow's name.
pub(crate) const DIGITS: usize = 16;
/// Where the answer's folder begins.
const FOLDER: usize = 7 * WORD;

/// What a program asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Where it writes next, in bytes from the file's beginning, at a multiple of [`GRAIN`].
    pub start: u64,
    /// How many bytes, at least.
    pub length: u64,
}

/// What a program may write by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The first byte, from the file's beginning.
    pub start: u64,
    /// How many bytes, no more than [`LENGTH`].
    pub length: u64,
    /// The folder that has the shadow and the page.
    pub folder: PathBuf,
    /// The number of the shadow, whose name it is, as 16 digits to the base of 16.
    pub shadow: u64,
    /// The slot of the page that says how much was written.
    pub slot: u32,
    /// Which lease of that slot this is.
    pub epoch: u32,
}

/// Returns how the shadow of that number is called in its tier's folder.
pub fn shadow_name(shadow: u64) -> String {
    format!("{shadow:0DIGITS$x}")
}

impl Lease {
    /// Returns where the shadow is.
    pub fn shadow_path(&self) -> PathBuf {
        self.folder.join(shadow_name(self.shadow))
    }

    /// Returns the answer's bytes; `None` if the folder's name is too long for them.
    pub fn encode(&self) -> Option<[u8; BYTES]> {
        let folder = self.folder.as_os_str().as_bytes();
        let numbers = [
            LEASED,
            self.start,
            self.length,
            self.shadow,
            self.slot.into(),
            self.epoch.into(),
            folder.len() as u64,
        ];
        let mut bytes = with_words(&numbers);
        bytes[FOLDER..].get_mut(..folder.len())?.copy_from_slice(folder);
        Some(bytes)
    }
}

/// The same, of an answer's own bytes: nothing is allocated for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseRef<'a> {
    /// The first byte, from the file's beginning.
    pub start: u64,
    /// How many bytes, no more than [`LENGTH`].
    pub length: u64,
    /// The name of the folder that has the shadow and the page.
    pub folder: &'a [u8],
    /// The number of the shadow.
    pub shadow: u64,
    /// The slot of the page that says how much was written.
    pub slot: u32,
    /// Which lease of that slot this is.
    pub epoch: u32,
}

impl<'a> LeaseRef<'a> {
    /// Reads an answer. `None` if it is none, or not one that can be used.
    pub fn decode(bytes: &'a [u8]) -> Option<LeaseRef<'a>> {
        let (start, length) = (word(bytes, 1)?, word(bytes, 2)?);
        let folder = usize::try_from(word(bytes, 6)?).ok()?;
        let folder = bytes.get(FOLDER..)?.get(..folder)?;
        let within =
            (1..=LENGTH).contains(&length) && i64::try_from(start.checked_add(length)?).is_ok();
        let slot = u32::try_from(word(bytes, 4)?).ok()?;
        let sound = word(bytes, 0)? == LEASED && within && (slot as usize) < crate::SLOTS;
        sound.then_some(LeaseRef {
            start,
            length,
            folder,
            shadow: word(bytes, 3)?,
            slot,
            epoch: u32::try_from(word(bytes, 5)?).ok()?,
        })
    }

    /// Writes where a file of the folder is, as C has it. `None` if that is too long for `path`, or
    /// no path.
    pub fn path_of<'b>(&self, name: Name, path: &'b mut [u8]) -> Option<&'b CStr> {
        let mut digits = [0; DIGITS];
        let name = match name {
            Name::Page => crate::PAGE.as_bytes(),
            Name::Shadow => {
                for (place, digit) in digits.iter_mut().rev().enumerate() {
                    let value = (self.shadow >> (4 * place)) as u8 & 0xf;
                    *digit = if value < 10 { b'0' + value } else { b'a' + value - 10 };
                }
                &digits
            }
        };
        let mut left = path.iter_mut();
        let parts = [self.folder, b"/", name, b"\0"];
        for byte in parts.iter().copied().flatten() {
            *left.next()? = *byte;
        }
        CStr::from_bytes_with_nul(path.get(..parts.iter().map(|part| part.len()).sum())?).ok()
    }
}

/// A file of a lease's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// The page of slots.
    Page,
    /// The file that the bytes go to.
    Shadow,
}

fn with_words(words: &[u64]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(WORD).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let word = bytes.get(index * WORD..(index + 1) * WORD)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Returns the question's bytes.
pub fn encode_ask(ask: &Ask) -> [u8; BYTES] {
    with_words(&[ASKED, ask.start, ask.length])
}

/// Reads a question. `None` if it is none, or of bytes that no file has.
pub fn decode_ask(bytes: &[u8]) -> Option<Ask> {
    let (start, length) = (word(bytes, 1)?, word(bytes, 2)?);
    let end = start.checked_add(length.max(LENGTH))?;
    let within = length > 0 && start.is_multiple_of(GRAIN) && i64::try_from(end).is_ok();
    let sound = word(bytes, 0)? == ASKED && within;
    sound.then_some(Ask { start, length })
}

/// Reads `bytes` as each of what programs and a cache say about leases: what the fuzz target and
/// its test hold these to. No bytes bring a reader to anything but `None`.
pub fn check_bytes(bytes: &[u8]) {
    if let Some(ask) = decode_ask(bytes) {
        let again = decode_ask(&encode_ask(&ask)).map(|ask| (ask.start, ask.length));
        assert_eq!(again, Some((ask.start, ask.length)), "a question is written as another");
    }
    if let Some(lease) = LeaseRef::decode(bytes) {
        let mut path = [0; 4096];
        let _ = lease.path_of(Name::Shadow, &mut path).map(|path| path.to_bytes().len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lease(folder: &str) -> Lease {
        let folder = folder.into();
        Lease { start: 5, length: 7, folder, shadow: 0xab, slot: 3, epoch: u32::MAX }
    }

    #[test]
    fn questions_and_answers_come_back_as_they_were() {
        let ask = Ask { start: 1 << 40, length: 1 };
        assert_eq!(decode_ask(&encode_ask(&ask)), Some(ask));
        let lease = lease("/dev/shm/kedge-0/a tier");
        let bytes = lease.encode().expect("it fits");
        let Lease { start, length, folder, shadow, slot, epoch } = &lease;
        let folder = folder.as_os_str().as_bytes();
        let (start, length, shadow, slot, epoch) = (*start, *length, *shadow, *slot, *epoch);
        let same = LeaseRef { start, length, folder, shadow, slot, epoch };
        assert_eq!(LeaseRef::decode(&bytes), Some(same));
        assert_eq!(lease.shadow_path().as_os_str(), "/dev/shm/kedge-0/a tier/00000000000000ab");
    }

    #[test]
    fn places_are_told_without_a_heap() {
        let lease = lease("/a tier");
        let bytes = lease.encode().expect("it fits");
        let borrowed = LeaseRef::decode(&bytes).expect("an answer");
        let mut path = [0xff; 25];
        let shadow = borrowed.path_of(Name::Shadow, &mut path).expect("it fits");
        assert_eq!(shadow.to_bytes(), lease.shadow_path().as_os_str().as_bytes());
        let page = borrowed.path_of(Name::Page, &mut path).expect("it fits");
        assert_eq!(page.to_bytes(), b"/a tier/leases");
        assert_eq!(borrowed.path_of(Name::Shadow, &mut path[..24]), None);
        let cut = LeaseRef { folder: b"/a\0b", ..borrowed };
        assert_eq!(cut.path_of(Name::Page, &mut path), None);
    }

    #[test]
    fn what_is_no_question_is_refused() {
        let past = [i64::MAX as u64, u64::MAX];
        for (start, length) in
            [(0, 0), (1, 1), (past[0] & !4095, 1), (past[1], 1), (0, past[0] + 1)]
        {
            assert_eq!(decode_ask(&encode_ask(&Ask { start, length })), None, "{start} {length}");
        }
        assert_eq!(decode_ask(&[0; BYTES]), None);
        assert_eq!(lease(&"x".repeat(BYTES)).encode(), None);
    }

    /// What the fuzz target begins with.
    #[test]
    fn the_corpus_is_what_is_said() {
        let leased = lease("/dev/shm/cache-7").encode().unwrap().to_vec();
        let asked = encode_ask(&Ask { start: 0, length: 9 }).to_vec();
        kedge_test_corpus::Corpus::of("lease", check_bytes)
            .has([("ask", asked), ("lease", leased)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut leased = bytes.clone();
            leased.splice(..leased.len().min(WORD), LEASED.to_le_bytes());
            let _ = (decode_ask(&bytes), LeaseRef::decode(&bytes), LeaseRef::decode(&leased));
        }
    }
}
