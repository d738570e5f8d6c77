//! What the fuzz target and its test hold readers to: no bytes bring them to anything but an error.

use crate::layout::{self, FOOTER, Footer, HEADER, Kind, RECORD};
use crate::{FileEntry, ImageError, ImageFile, Manifest, ReadAt};
use std::io;
use std::path::Path;

/// Most bytes of an extent that are decoded.
const MAX_DECODED: u64 = 1 << 20;

/// Reads `bytes` as a file of an image, and as a manifest. Checksums find damage, and keep nobody
/// out: so the bytes are also read with all sums as they should be.
pub fn check_bytes(bytes: &[u8]) {
    let _ = read(bytes.to_vec());
    if let Some(mended) = mended(bytes) {
        let _ = read(mended);
    }
    let _ = Manifest::parse(bytes, Path::new(crate::MANIFEST));
    let sum = format!("xxh3 {:016x}\n", crate::checksum(bytes));
    let _ = Manifest::parse(&[bytes, sum.as_bytes()].concat(), Path::new(crate::MANIFEST));
}

/// A file in memory.
#[derive(Debug)]
struct Memory(Vec<u8>);

impl ReadAt for Memory {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let found = from.checked_add(into.len()).and_then(|end| self.0.get(from..end));
        into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Reads all that a file has, but for what is long.
fn read(bytes: Vec<u8>) -> Result<(), ImageError> {
    let footer = bytes.len().saturating_sub(FOOTER as usize);
    let (name, checksum) = ("1.kimg".to_owned(), crate::checksum(&bytes[footer..]));
    let entry = FileEntry { name, bytes: bytes.len() as u64, checksum };
    let file = ImageFile::elsewhere(Box::new(Memory(bytes)), &entry)?;
    let (mut scratch, mut decoded) = (Vec::new(), Vec::new());
    for extent in file.extents().iter().filter(|extent| extent.decoded <= MAX_DECODED) {
        if extent.kind == Kind::Section {
            let _ = file.section(extent.address);
        } else if !extent.codec.is_empty() {
            decoded.resize(extent.decoded as usize, 0);
            let _ = file.read(extent, &mut scratch, &mut decoded);
        }
    }
    Ok(())
}

/// Returns the same with a header, sums that are right, and a table that ends at the footer; `None`
/// of what is too short for that.
fn mended(bytes: &[u8]) -> Option<Vec<u8>> {
    let room = bytes.len().checked_sub((HEADER + FOOTER) as usize)?;
    let end = bytes.len() - FOOTER as usize;
    let said = bytes[end + 24..end + 32].first_chunk().map(|word| u64::from_le_bytes(*word))?;
    let count = (said % (room / RECORD + 1) as u64) as usize;
    let (mut all, table) = (bytes.to_vec(), end - count * RECORD);
    all[..HEADER as usize].copy_from_slice(&layout::header());
    let (payloads, rest) = all.split_at_mut(table);
    for record in rest.chunks_exact_mut(RECORD).take(count) {
        let word = |at: usize| record[at..at + 8].first_chunk().map(|it| u64::from_le_bytes(*it));
        let from = usize::try_from(word(24)?).unwrap_or(usize::MAX);
        let stored = word(0)?.wrapping_shr(32) as usize;
        if let Some(stored) = from.checked_add(stored).and_then(|end| payloads.get(from..end)) {
            record[32..40].copy_from_slice(&crate::checksum(stored).to_le_bytes());
        }
    }
    let checksum = crate::checksum(&all[table..end]);
    let footer = Footer { table: table as u64, count: count as u64, checksum };
    all[end..].copy_from_slice(&footer.encode());
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, ImageWriter, PAGE, encode};

    #[test]
    fn what_is_mended_is_read_to_its_payloads() {
        let name = format!("kedge-mended-{}.kimg", std::process::id());
        let path = std::env::temp_dir().join(name);
        let writer = ImageWriter::create(&path).unwrap();
        let page: Vec<u8> = (0..PAGE).map(|at| (at >> 6) as u8).collect();
        writer.memory(0, PAGE, PAGE, &encode(&page, Choice::Raw)).unwrap();
        writer.finish().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let whole = |bytes: &[u8]| {
            let (name, checksum) =
                ("1.kimg".to_owned(), crate::checksum(&bytes[bytes.len() - 48..]));
            let entry = FileEntry { name, bytes: bytes.len() as u64, checksum };
            let file = ImageFile::elsewhere(Box::new(Memory(bytes.to_vec())), &entry);
            file.is_ok_and(|file| file.verify().is_ok())
        };
        assert!(whole(&bytes));
        // In the page, in the table and in the footer.
        let length = bytes.len();
        for at in [PAGE as usize + 8, length - 48 - 13, length - 5] {
            bytes[at] ^= 1;
            assert!(!whole(&bytes), "{at}");
            assert!(mended(&bytes).is_some_and(|mended| whole(&mended)), "{at}");
        }
    }
}
