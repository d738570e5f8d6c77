//! The bytes of a `.kimg` file. All numbers are little-endian.
//!
//! ```text
//! header, 16 bytes      "KEDGEIMG", version u32, zero u32
//! payloads              each where its extent says; raw ones begin on a page
//! table                 count × 48 bytes, sorted by kind and address
//! footer, 48 bytes      "KEDGEEND", version u32, zero u32, table offset u64, count u64,
//!                       checksum of the table u64, checksum of the 40 bytes before this u64
//! ```
//!
//! An extent in the table:
//!
//! ```text
//!  0  kind u8            0 memory, 1 section
//!  1  codec u8           0 zero, 1 raw, 2 LZ4 (block), 3 Zstd, 4 gzip; 5: as in the image that this one
//!                       builds on (what that leaves out is left out here too); 6: as the file of
//!                       another process of the same image stores it
//!  2  zero u16
//!  4  stored u32         bytes in the file
//!  8  decoded u64        bytes in memory
//! 16  address u64        in memory; of a section: its number
//! 24  offset u64         in the file
//! 32  checksum u64       of the stored bytes; of codec 6: the number of the process
//! 40  object u64         0: the process's own memory; else the number of a shared object
//! ```

use crate::codec::Codec;

pub const PAGE: u64 = 4096;
/// Most bytes of memory in one extent.
pub const MAX_EXTENT: u64 = 4 << 20;
/// Most bytes in a section.
pub const MAX_SECTION: u64 = 256 << 20;
/// Most extents in a file: enough for 64 TiB of full ones.
pub const MAX_EXTENTS: u64 = 16 << 20;

pub(crate) const VERSION: u32 = 1;
pub(crate) const HEADER: u64 = 16;
pub(crate) const FOOTER: u64 = 48;
pub(crate) const RECORD: usize = 48;
const MAGIC: &[u8; 8] = b"KEDGEIMG";
const END: &[u8; 8] = b"KEDGEEND";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Memory,
    /// Named state, by number; what it means is its writer's affair.
    Section,
}

/// A run of bytes that is stored together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub kind: Kind,
    pub codec: Codec,
    /// Bytes in the file.
    pub stored: u32,
    /// Bytes in memory.
    pub decoded: u64,
    pub address: u64,
    pub offset: u64,
    pub checksum: u64,
    pub object: u64,
}

/// Numbers out of a slice whose length the caller has checked.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Extent {
    /// Returns the address behind it.
    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.decoded)
    }

    pub(crate) fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[0] = match self.kind {
            Kind::Memory => 0,
            Kind::Section => 1,
        };
        bytes[1] = self.codec.number();
        bytes[4..8].copy_from_slice(&self.stored.to_le_bytes());
        let words = [self.decoded, self.address, self.offset, self.checksum, self.object];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the extent in `record`, whose payload must lie between the header and `limit`.
    pub(crate) fn decode(record: &[u8; RECORD], limit: u64) -> Result<Extent, &'static str> {
        let kind = match record[0] {
            0 => Kind::Memory,
            1 => Kind::Section,
            _ => return Err("an extent of no known kind"),
        };
        let codec = Codec::from_number(record[1]).ok_or("an extent of no known codec")?;
        let extent = Extent {
            kind,
            codec,
            stored: u32_at(record, 4),
            decoded: u64_at(record, 8),
            address: u64_at(record, 16),
            offset: u64_at(record, 24),
            checksum: u64_at(record, 32),
            object: u64_at(record, 40),
        };
        extent.check(limit)?;
        Ok(extent)
    }

    pub(crate) fn check(&self, limit: u64) -> Result<(), &'static str> {
        let stored = u64::from(self.stored);
        if self.offset.checked_add(stored).is_none_or(|end| end > limit) {
            return Err("an extent reaches past its file");
        }
        if self.stored > 0 && self.offset < HEADER {
            return Err("an extent lies in the header");
        }
        let fits = match self.codec {
            Codec::Zero => stored == 0,
            Codec::Parent => stored == 0 && self.kind == Kind::Memory,
            Codec::Process => stored == 0 && self.is_of_process(),
            Codec::Raw => stored == self.decoded,
            Codec::Lz4 | Codec::Zstd | Codec::Gzip => stored > 0,
        };
        if !fits {
            return Err("an extent's lengths disagree");
        }
        match self.kind {
            Kind::Section if self.decoded > MAX_SECTION => Err("a section is too long"),
            Kind::Section => Ok(()),
            Kind::Memory => self.check_memory(),
        }
    }

    /// Returns whether it can be a process's memory that another process has as well.
    fn is_of_process(&self) -> bool {
        let number = i32::try_from(self.checksum).is_ok_and(|number| number > 0);
        self.kind == Kind::Memory && self.object == 0 && number
    }

    /// Returns the number of the process whose file stores the bytes, if another's does.
    pub fn process(&self) -> Option<i32> {
        let number = i32::try_from(self.checksum).ok();
        number.filter(|_| self.codec == Codec::Process)
    }

    fn check_memory(&self) -> Result<(), &'static str> {
        if self.decoded == 0
            || !self.decoded.is_multiple_of(PAGE)
            || !self.address.is_multiple_of(PAGE)
        {
            return Err("an extent of memory is not made of pages");
        }
        // A run that is not stored costs nothing, so it may be long.
        if self.decoded > MAX_EXTENT && !self.codec.is_empty() {
            return Err("an extent of memory is too long");
        }
        if self.address.checked_add(self.decoded).is_none_or(|end| end > 1 << 47) {
            return Err("an extent lies outside of the address space");
        }
        Ok(())
    }
}

pub(crate) fn header() -> [u8; HEADER as usize] {
    let mut bytes = [0; HEADER as usize];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Returns the version in a header; `None` if it is none.
pub(crate) fn header_version(bytes: &[u8; HEADER as usize]) -> Option<u32> {
    (bytes[..8] == *MAGIC && u32_at(bytes, 12) == 0).then(|| u32_at(bytes, 8))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) table: u64,
    pub(crate) count: u64,
    pub(crate) checksum: u64,
}

impl Footer {
    pub(crate) fn encode(&self) -> [u8; FOOTER as usize] {
        let mut bytes = [0; FOOTER as usize];
        bytes[..8].copy_from_slice(END);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let words = [self.table, self.count, self.checksum];
        for (place, word) in bytes[16..40].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let own = crate::checksum(&bytes[..40]);
        bytes[40..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// Decodes the footer of a file of `length` bytes.
    pub(crate) fn decode(
        bytes: &[u8; FOOTER as usize],
        length: u64,
    ) -> Result<Footer, &'static str> {
        if bytes[..8] != *END || u64_at(bytes, 40) != crate::checksum(&bytes[..40]) {
            return Err("no footer: the file was cut short or changed");
        }
        let footer = Footer {
            table: u64_at(bytes, 16),
            count: u64_at(bytes, 24),
            checksum: u64_at(bytes, 32),
        };
        if footer.count > MAX_EXTENTS {
            return Err("more extents than any image has");
        }
        let end = footer.table.checked_add(footer.count * RECORD as u64 + FOOTER);
        if footer.table < HEADER || end != Some(length) {
            return Err("the table is not where the footer says");
        }
        Ok(footer)
    }
}
