//! Writing a `.kimg` file.

use crate::codec::{Codec, Encoded};
use crate::direct::Direct;
use crate::error::ImageError;
use crate::layout::{self, Extent, Footer, HEADER, Kind, PAGE};
use crate::manifest::FileEntry;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Writes one file, from any number of threads at once.
#[derive(Debug)]
pub struct ImageWriter {
    path: PathBuf,
    file: File,
    direct: Direct,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Where the next payload goes.
    next: u64,
    extents: Vec<Extent>,
}

impl ImageWriter {
    /// Makes the file `path`, which must not exist; only its owner can read it, because it holds
    /// everything that the program had in memory.
    pub fn create(path: &Path) -> Result<ImageWriter, ImageError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path).map_err(ImageError::io(path))?;
        file.write_all_at(&layout::header(), 0).map_err(ImageError::io(path))?;
        let state = Mutex::new(State { next: HEADER, extents: Vec::new() });
        Ok(ImageWriter { path: path.to_owned(), file, direct: Direct::open(path), state })
    }

    /// Stores `decoded` bytes of memory at `address` of `object`, as `encoded`.
    pub fn memory(
        &self,
        object: u64,
        address: u64,
        decoded: u64,
        encoded: &Encoded<'_>,
    ) -> Result<(), ImageError> {
        self.store(Kind::Memory, object, address, decoded, encoded)
    }

    /// Stores the section `number`.
    pub fn section(&self, number: u64, bytes: &[u8]) -> Result<(), ImageError> {
        let encoded = crate::codec::encode(bytes, crate::codec::Choice::Lz4);
        self.store(Kind::Section, 0, number, bytes.len() as u64, &encoded)
    }

    fn store(
        &self,
        kind: Kind,
        object: u64,
        address: u64,
        decoded: u64,
        encoded: &Encoded<'_>,
    ) -> Result<(), ImageError> {
        let bytes = &encoded.bytes;
        let mut extent = Extent {
            kind,
            codec: encoded.codec,
            stored: bytes.len() as u32,
            decoded,
            address,
            offset: 0,
            checksum: crate::checksum(bytes),
            object,
        };
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            // Raw pages lie on pages, so that they can be mapped.
            let aligned = encoded.codec == Codec::Raw && kind == Kind::Memory;
            extent.offset = if aligned { state.next.next_multiple_of(PAGE) } else { state.next };
            state.next = extent.offset + bytes.len() as u64;
            state.extents.push(extent);
        }
        let written = match self.direct.write(bytes, extent.offset) {
            Ok(false) => self.file.write_all_at(bytes, extent.offset),
            other => other.map(drop),
        };
        written.map_err(ImageError::io(&self.path))
    }

    /// Writes the table and the footer, and waits until all of it is on the disk.
    pub fn finish(self) -> Result<FileEntry, ImageError> {
        let State { next, mut extents } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        extents.sort_by_key(|extent| (extent.kind, extent.object, extent.address));
        let table: Vec<u8> = extents.iter().flat_map(Extent::encode).collect();
        let footer =
            Footer { table: next, count: extents.len() as u64, checksum: crate::checksum(&table) };
        let footer = footer.encode();
        let end = next + table.len() as u64;
        let written = self
            .file
            .write_all_at(&table, next)
            .and_then(|()| self.file.write_all_at(&footer, end))
            .and_then(|()| self.file.sync_all());
        written.map_err(ImageError::io(&self.path))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(FileEntry { name, bytes: end + footer.len() as u64, checksum: crate::checksum(&footer) })
    }
}
