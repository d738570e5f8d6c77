//! Reading a `.kimg` file back.

use crate::bytes::{Bytes, ReadFrom};
use crate::codec::{self, Codec};
use crate::elsewhere::ReadAt;
use crate::error::ImageError;
use crate::folder::{Folder, check_regular, open_regular};
use crate::layout::{self, Extent, FOOTER, Footer, HEADER, Kind, RECORD, VERSION};
use crate::manifest::FileEntry;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// An open file whose table has been checked. Payloads are checked as they are read.
#[derive(Debug)]
pub struct ImageFile {
    pub(crate) path: PathBuf,
    pub(crate) file: Bytes,
    extents: Vec<Extent>,
}

impl ImageFile {
    /// Opens `path`, which must be the file that `entry` describes.
    pub fn open(path: &Path, entry: Option<&FileEntry>) -> Result<ImageFile, ImageError> {
        ImageFile::new(Bytes::cached(open_regular(path)?), path, entry)
    }

    /// Opens the file of the image in `folder` that `entry` describes.
    pub fn of(folder: &Folder, entry: &FileEntry) -> Result<ImageFile, ImageError> {
        let path = folder.path().join(&entry.name);
        ImageFile::new(Bytes::cached(folder.file(&entry.name)?), &path, Some(entry))
    }

    /// Opens the file as [`ImageFile::of`] does; all of it is read from the device.
    pub(crate) fn on_device(folder: &Folder, entry: &FileEntry) -> Result<ImageFile, ImageError> {
        let path = folder.path().join(&entry.name);
        let file = Bytes::on_device(folder.file(&entry.name)?).map_err(ImageError::io(&path))?;
        ImageFile::new(file, &path, Some(entry))
    }

    /// Reads the open `file`, which must be the one that `entry` describes. Nothing is opened:
    /// `name` is what errors call it.
    ///
    /// # Errors
    /// It is no regular file, cannot be read, is damaged or is another file.
    pub fn of_descriptor(
        file: File,
        name: &Path,
        entry: Option<&FileEntry>,
    ) -> Result<ImageFile, ImageError> {
        check_regular(&file, name)?;
        ImageFile::new(Bytes::cached(file), name, entry)
    }

    /// Opens a file that lies elsewhere, which must be the one that `entry` describes.
    ///
    /// # Errors
    /// It cannot be read, is damaged or is another file.
    pub fn elsewhere(file: Box<dyn ReadAt>, entry: &FileEntry) -> Result<ImageFile, ImageError> {
        ImageFile::new(Bytes::Elsewhere(file), Path::new(&entry.name), Some(entry))
    }

    fn new(file: Bytes, path: &Path, entry: Option<&FileEntry>) -> Result<ImageFile, ImageError> {
        let damaged = |offset, what| ImageError::Damaged { path: path.to_owned(), offset, what };
        let length = file.length().map_err(ImageError::io(path))?;
        if length < HEADER + FOOTER {
            return Err(damaged(length, "the file was cut short"));
        }
        if entry.is_some_and(|entry| entry.bytes != length) {
            return Err(damaged(length, "the file is not as long as the manifest says"));
        }
        let mut header = [0; HEADER as usize];
        file.read_exact_at(&mut header, 0).map_err(ImageError::io(path))?;
        match layout::header_version(&header) {
            None => return Err(damaged(0, "the header is none of kedge's")),
            Some(VERSION) => {}
            Some(found) => {
                return Err(ImageError::Newer { path: path.to_owned(), found, known: VERSION });
            }
        }
        let mut bytes = [0; FOOTER as usize];
        let at = length - FOOTER;
        file.read_exact_at(&mut bytes, at).map_err(ImageError::io(path))?;
        if entry.is_some_and(|entry| entry.checksum != crate::checksum(&bytes)) {
            return Err(damaged(at, "the footer is not the one that the manifest names"));
        }
        let footer = Footer::decode(&bytes, length).map_err(|what| damaged(at, what))?;
        let extents = read_table(&file, path, &footer)?;
        Ok(ImageFile { path: path.to_owned(), file, extents })
    }

    /// Returns its descriptor, where it is a file of this machine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }

    /// Returns where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all extents, by kind, object and address; memory extents do not overlap.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    pub fn memory(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter().filter(|extent| extent.kind == Kind::Memory)
    }

    /// Returns the memory of one object, in order.
    pub fn memory_of(&self, object: u64) -> &[Extent] {
        // The table is in order of kinds, objects and addresses.
        let from = self.extents.partition_point(|e| (e.kind, e.object) < (Kind::Memory, object));
        let rest = &self.extents[from..];
        let count = rest.partition_point(|e| (e.kind, e.object) == (Kind::Memory, object));
        &rest[..count]
    }

    /// Returns whether there is a section `number`.
    pub fn has_section(&self, number: u64) -> bool {
        self.extents.iter().any(|e| e.kind == Kind::Section && e.address == number)
    }

    /// Reads the section `number`.
    pub fn section(&self, number: u64) -> Result<Vec<u8>, ImageError> {
        let found = self.extents.iter().find(|e| e.kind == Kind::Section && e.address == number);
        let extent = found.ok_or_else(|| self.damaged(0, "a section is missing"))?;
        // Bounded by MAX_SECTION, which the table was checked against.
        let mut bytes = vec![0; extent.decoded as usize];
        self.read(extent, &mut Vec::new(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the bytes of `extent` into `decoded`, which is as long as they are. `scratch` holds
    /// what is stored, and is kept by the caller so that it is not allocated anew each time.
    pub fn read(
        &self,
        extent: &Extent,
        scratch: &mut Vec<u8>,
        decoded: &mut [u8],
    ) -> Result<(), ImageError> {
        if extent.codec == Codec::Raw && extent.decoded == decoded.len() as u64 {
            self.file.read_exact_at(decoded, extent.offset).map_err(ImageError::io(&self.path))?;
            return self.check(extent, decoded);
        }
        scratch.resize(extent.stored as usize, 0);
        self.file.read_exact_at(scratch, extent.offset).map_err(ImageError::io(&self.path))?;
        self.check_stored(extent, scratch, decoded)
    }

    /// Checks the stored bytes of `extent`, and decodes them into `decoded`, which is as long as
    /// what they are of.
    pub(crate) fn check_stored(
        &self,
        extent: &Extent,
        stored: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), ImageError> {
        self.check(extent, stored)?;
        codec::decode(extent.codec, stored, decoded)
            .map_err(|what| self.damaged(extent.offset, what))
    }

    /// Reads the file's own bytes, whatever they stand for, from `offset` on.
    ///
    /// # Errors
    /// There are not so many, or they cannot be read.
    pub fn read_raw(&self, into: &mut [u8], offset: u64) -> Result<(), ImageError> {
        self.file.read_exact_at(into, offset).map_err(ImageError::io(&self.path))
    }

    /// Returns what a manifest says of it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn entry(&self) -> Result<FileEntry, ImageError> {
        let bytes = self.file.length().map_err(ImageError::io(&self.path))?;
        let mut footer = [0; FOOTER as usize];
        self.read_raw(&mut footer, bytes.saturating_sub(FOOTER))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(FileEntry { name, bytes, checksum: crate::checksum(&footer) })
    }

    /// Returns where its bytes come from.
    pub(crate) fn read_from(&self) -> ReadFrom {
        self.file.read_from()
    }

    /// Has the kernel read the file ahead of several threads that want all of it: their own order
    /// looks random to its readahead, which halves what the disk gives.
    pub fn read_ahead(&self) {
        self.file.read_ahead();
    }

    /// Reads every payload and compares its checksum; the bytes read.
    pub fn verify(&self) -> Result<u64, ImageError> {
        self.read_ahead();
        let mut total = 0;
        let (mut scratch, mut decoded) = (Vec::new(), Vec::new());
        for extent in self.extents.iter().filter(|extent| !extent.codec.is_empty()) {
            decoded.resize(extent.decoded as usize, 0);
            self.read(extent, &mut scratch, &mut decoded)?;
            total += u64::from(extent.stored);
        }
        Ok(total)
    }

    fn check(&self, extent: &Extent, stored: &[u8]) -> Result<(), ImageError> {
        if crate::checksum(stored) == extent.checksum {
            return Ok(());
        }
        Err(self.damaged(extent.offset, "the checksum of an extent is wrong"))
    }

    pub(crate) fn damaged(&self, offset: u64, what: &'static str) -> ImageError {
        ImageError::Damaged { path: self.path.clone(), offset, what }
    }
}

fn read_table(file: &Bytes, path: &Path, footer: &Footer) -> Result<Vec<Extent>, ImageError> {
    let damaged = |offset, what| ImageError::Damaged { path: path.to_owned(), offset, what };
    // Bounded by the file's own length.
    let mut table = vec![0; footer.count as usize * RECORD];
    file.read_exact_at(&mut table, footer.table).map_err(ImageError::io(path))?;
    if crate::checksum(&table) != footer.checksum {
        return Err(damaged(footer.table, "the checksum of the table is wrong"));
    }
    let mut extents = Vec::<Extent>::with_capacity(footer.count as usize);
    for (index, record) in table.as_chunks::<RECORD>().0.iter().enumerate() {
        let at = footer.table + (index * RECORD) as u64;
        let extent = Extent::decode(record, footer.table).map_err(|what| damaged(at, what))?;
        if let Some(before) = extents.last()
            && !in_order(before, &extent)
        {
            return Err(damaged(at, "the table's extents overlap or are out of order"));
        }
        extents.push(extent);
    }
    Ok(extents)
}

pub(crate) fn in_order(before: &Extent, after: &Extent) -> bool {
    let key = |extent: &Extent| (extent.kind, extent.object, extent.address);
    if key(before) >= key(after) {
        return false;
    }
    before.kind != Kind::Memory
        || after.kind != Kind::Memory
        || before.object != after.object
        || before.address + before.decoded <= after.address
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::ImageWriter;
    use crate::{Choice, encode};
    use proptest::prelude::*;

    struct Scratch(PathBuf);
    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("kimg-{name}-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            Scratch(path)
        }
    }
    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn pages(seed: u8) -> Vec<u8> {
        let mut state = u32::from(seed) + 1;
        let noise = std::iter::repeat_with(move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        noise.take(8192).collect()
    }

    fn write(path: &Path) -> FileEntry {
        let writer = ImageWriter::create(path).unwrap();
        writer.section(7, b"state").unwrap();
        for (address, bytes) in
            [(0x10_000, pages(1)), (0x20_000, vec![0; 8192]), (0x8_000, vec![9; 8192])]
        {
            writer.memory(0, address, 8192, &encode(&bytes, Choice::Auto)).unwrap();
        }
        writer.finish().unwrap()
    }

    #[test]
    fn what_was_written_is_read_back() {
        let scratch = Scratch::new("back");
        let entry = write(&scratch.0);
        let file = ImageFile::open(&scratch.0, Some(&entry)).unwrap();
        assert_eq!(file.section(7).unwrap(), b"state");
        assert!(matches!(file.section(8), Err(ImageError::Damaged { .. })));
        let addresses: Vec<u64> = file.memory().map(|e| e.address).collect();
        assert_eq!(addresses, [0x8_000, 0x10_000, 0x20_000]);
        let mut bytes = vec![1; 8192];
        for (extent, expected) in file.memory().zip([vec![9; 8192], pages(1), vec![0; 8192]]) {
            file.read(extent, &mut Vec::new(), &mut bytes).unwrap();
            assert_eq!(bytes, expected);
        }
        file.verify().unwrap();
    }

    /// Whatever opens and verifies equals what was written.
    fn intact(path: &Path, entry: &FileEntry) -> bool {
        ImageFile::open(path, Some(entry)).is_ok_and(|file| file.verify().is_ok())
    }

    #[test]
    fn a_flipped_byte_is_found_wherever_it_matters() {
        let scratch = Scratch::new("flip");
        let entry = write(&scratch.0);
        let good = std::fs::read(&scratch.0).unwrap();
        let file = ImageFile::open(&scratch.0, Some(&entry)).unwrap();
        let payload = |at: u64| {
            let mut extents = file.extents().iter();
            extents.any(|e| (e.offset..e.offset + u64::from(e.stored)).contains(&at))
        };
        let table = good.len() as u64 - FOOTER - file.extents().len() as u64 * RECORD as u64;
        for at in 0..good.len() {
            // Between payloads lies padding that nobody reads.
            let matters = (at as u64) < HEADER || at as u64 >= table || payload(at as u64);
            if matters && (at % 7 == 0 || at < 64 || good.len() - at < 300) {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                std::fs::write(&scratch.0, &bad).unwrap();
                assert!(!intact(&scratch.0, &entry), "offset {at}");
            }
        }
    }

    #[test]
    fn a_file_cut_short_is_refused() {
        let scratch = Scratch::new("cut");
        let entry = write(&scratch.0);
        let good = std::fs::read(&scratch.0).unwrap();
        for length in (0..good.len()).step_by(97) {
            std::fs::write(&scratch.0, &good[..length]).unwrap();
            assert!(ImageFile::open(&scratch.0, None).is_err(), "length {length}");
        }
        std::fs::write(&scratch.0, &good).unwrap();
        assert!(intact(&scratch.0, &entry));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_record_passes_that_reaches_past_its_file(
            record in prop::array::uniform32(any::<u8>()), rest in prop::array::uniform16(any::<u8>()),
            kind in 0u8..3, codec in 0u8..8, limit in any::<u64>(),
        ) {
            let mut bytes = [0; RECORD];
            bytes[..32].copy_from_slice(&record);
            bytes[32..].copy_from_slice(&rest);
            (bytes[0], bytes[1]) = (kind, codec);
            if let Ok(extent) = Extent::decode(&bytes, limit) {
                prop_assert!(extent.offset + u64::from(extent.stored) <= limit);
                prop_assert_eq!(&extent.encode()[4..], &bytes[4..]);
            }
        }

        #[test]
        fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let scratch = Scratch::new("any");
            let mut whole = layout::header().to_vec();
            whole.extend(&bytes);
            std::fs::write(&scratch.0, &whole).unwrap();
            prop_assert!(ImageFile::open(&scratch.0, None).is_err());
        }

        #[test]
        fn every_codec_gives_back_what_it_got(
            bytes in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 1..9000),
        ) {
            for choice in [Choice::Auto, Choice::Raw, Choice::Lz4, Choice::Zstd, Choice::Gzip] {
                let encoded = encode(&bytes, choice);
                let mut back = vec![1; bytes.len()];
                codec::decode(encoded.codec, &encoded.bytes, &mut back).unwrap();
                prop_assert_eq!(&back, &bytes);
            }
        }

        #[test]
        fn hostile_payloads_fail_and_no_more(
            stored in prop::collection::vec(any::<u8>(), 0..300), length in 0usize..9000,
        ) {
            let mut decoded = vec![0; length];
            for codec in [Codec::Lz4, Codec::Zstd, Codec::Gzip, Codec::Raw] {
                let _ = codec::decode(codec, &stored, &mut decoded);
            }
        }
    }
}
