//! What an image is and how long it is: programs pass images to the driver as bare pointers.

use super::{CONTAINER_HEADER, FatbinError, MAGIC, u16_at, u32_at, u64_at};

/// Longest image that is passed as a bare pointer.
const MAX_LENGTH: u64 = 4 << 30;
/// Read at once in search of a text's NUL.
const CHUNK: usize = 4096;
/// ELF64: its header, a program header, a section header.
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const SECTION_HEADER: usize = 64;
const SHT_NOBITS: u32 = 8;

/// What a raw buffer is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Fatbin,
    Elf,
    Ptx,
    NvvmOrLto,
    Unknown,
}

/// What `bytes` begins with. A few hundred bytes suffice.
pub fn classify(bytes: &[u8]) -> Kind {
    match bytes {
        [0x50, 0xed, 0x55, 0xba, ..] => Kind::Fatbin,
        [0x7f, b'E', b'L', b'F', ..] => Kind::Elf,
        // LLVM bitcode, its wrapper, and NVIDIA's containers of it.
        [b'B', b'C', 0xc0, 0xde, ..]
        | [0xde, 0xc0, 0x17, 0x0b, ..]
        | [0xed, 0x43, 0x4e, 0x7f, ..]
        | [0x43, 0x56, 0x4e, 0x7f, ..] => Kind::NvvmOrLto,
        _ if begins_ptx(bytes) => Kind::Ptx,
        _ => Kind::Unknown,
    }
}

/// Whether blanks and comments lead to `.version`, or to the end of what is known.
fn begins_ptx(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let mut comment = false;
    loop {
        rest = rest.trim_ascii_start();
        let skipped = match rest {
            [b'/', b'/', ..] => rest.iter().position(|byte| *byte == b'\n'),
            [b'/', b'*', ..] => rest.windows(2).position(|pair| pair == b"*/").map(|at| at + 1),
            [] => return comment,
            _ => return rest.starts_with(b".version"),
        };
        comment = true;
        match skipped {
            Some(end) => rest = &rest[end + 1..],
            None => return !rest.contains(&0),
        }
    }
}

/// The whole length of the container whose first 16 bytes are `header`.
///
/// # Errors
/// [`FatbinError::NotAContainer`], an unknown version, or a size beyond the bound.
pub fn container_len(header: &[u8]) -> Result<u64, FatbinError> {
    if u32_at(header, 0) != Some(MAGIC) {
        return Err(FatbinError::NotAContainer);
    }
    let cut = FatbinError::Damaged { at: 0, what: "a container's header is cut off" };
    let (Some(version), Some(header_size), Some(size)) =
        (u16_at(header, 4), u16_at(header, 6), u64_at(header, 8))
    else {
        return Err(cut);
    };
    if version != 1 {
        return Err(FatbinError::Version(version));
    }
    if usize::from(header_size) < CONTAINER_HEADER {
        return Err(FatbinError::Damaged { at: 6, what: "a container's header is too small" });
    }
    let length = size.saturating_add(u64::from(header_size));
    if length > MAX_LENGTH { Err(FatbinError::TooLarge(length)) } else { Ok(length) }
}

/// Kind and length in bytes of the image at offset 0 of `read`, which fills a buffer from an offset
/// and says how many bytes it could read. A text's length includes its NUL.
///
/// # Errors
/// [`FatbinError`] where the image is of no known kind, cannot be read, or does not end within
/// 4 GiB.
pub fn image_len(
    read: &mut dyn FnMut(u64, &mut [u8]) -> usize,
) -> Result<(Kind, u64), FatbinError> {
    let mut start = [0; CHUNK];
    let known = read(0, &mut start).min(CHUNK);
    let start = &start[..known];
    let kind = classify(start);
    let length = match kind {
        Kind::Fatbin => container_len(start)?,
        Kind::Elf => elf_len(read)?,
        Kind::Ptx => text_len(read)?,
        Kind::NvvmOrLto | Kind::Unknown => return Err(FatbinError::UnknownKind),
    };
    if length > MAX_LENGTH { Err(FatbinError::TooLarge(length)) } else { Ok((kind, length)) }
}

fn text_len(read: &mut dyn FnMut(u64, &mut [u8]) -> usize) -> Result<u64, FatbinError> {
    let mut chunk = [0; CHUNK];
    let mut at = 0;
    while at < MAX_LENGTH {
        let known = read(at, &mut chunk).min(CHUNK);
        if let Some(end) = chunk[..known].iter().position(|byte| *byte == 0) {
            return Ok(at + end as u64 + 1);
        }
        if known == 0 {
            return Err(FatbinError::Unreadable(at));
        }
        at += known as u64;
    }
    Err(FatbinError::TooLarge(at))
}

/// Where the last of an ELF file's tables, segments and sections ends.
fn elf_len(read: &mut dyn FnMut(u64, &mut [u8]) -> usize) -> Result<u64, FatbinError> {
    let mut header = [0; ELF_HEADER];
    exactly(read, 0, &mut header)?;
    let damaged = |what| FatbinError::Damaged { at: 0, what };
    if header[4] != 2 || header[5] != 1 {
        return Err(damaged("an ELF file that is not 64-bit little-endian"));
    }
    let field = |at| u64::from(u16_at(&header, at).unwrap_or(0));
    let programs =
        Table { at: u64_at(&header, 32).unwrap_or(0), entry: field(54), count: field(56) };
    let mut sections =
        Table { at: u64_at(&header, 40).unwrap_or(0), entry: field(58), count: field(60) };
    let mut end = ELF_HEADER as u64;
    let mut first = [0; SECTION_HEADER];
    if sections.count == 0 && sections.at != 0 {
        // More sections than the header can count: the first one's size counts them.
        exactly(read, sections.at, &mut first)?;
        sections.count = u64_at(&first, 32).unwrap_or(0);
    }
    programs.each::<PROGRAM_HEADER>(read, |program| {
        end = end.max(sum(u64_at(program, 8), u64_at(program, 32)));
    })?;
    sections.each::<SECTION_HEADER>(read, |section| {
        if u32_at(section, 4) != Some(SHT_NOBITS) {
            end = end.max(sum(u64_at(section, 24), u64_at(section, 32)));
        }
    })?;
    Ok(end.max(programs.end()).max(sections.end()))
}

fn sum(offset: Option<u64>, size: Option<u64>) -> u64 {
    offset.unwrap_or(0).saturating_add(size.unwrap_or(0))
}

/// A table of an ELF file.
struct Table {
    at: u64,
    entry: u64,
    count: u64,
}

impl Table {
    fn end(&self) -> u64 {
        self.at.saturating_add(self.entry.saturating_mul(self.count))
    }

    fn each<const N: usize>(
        &self,
        read: &mut dyn FnMut(u64, &mut [u8]) -> usize,
        mut visit: impl FnMut(&[u8; N]),
    ) -> Result<(), FatbinError> {
        if self.count > 0 && self.entry < N as u64 {
            return Err(FatbinError::Damaged { at: self.at, what: "an ELF table's entry size" });
        }
        // The bound on the file bounds the loop.
        if self.end() > MAX_LENGTH {
            return Err(FatbinError::TooLarge(self.end()));
        }
        let mut entry = [0; N];
        for index in 0..self.count {
            exactly(read, self.at + index * self.entry, &mut entry)?;
            visit(&entry);
        }
        Ok(())
    }
}

fn exactly(
    read: &mut dyn FnMut(u64, &mut [u8]) -> usize,
    at: u64,
    buffer: &mut [u8],
) -> Result<(), FatbinError> {
    let known = read(at, buffer);
    if known < buffer.len() { Err(FatbinError::Unreadable(at + known as u64)) } else { Ok(()) }
}
