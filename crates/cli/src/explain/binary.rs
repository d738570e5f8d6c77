//! Files that can hold device code, read in pieces: libraries of CUDA are some gigabytes long.

use super::code::Module;
use super::cubin::Cubin;
use kedge_ptx::fatbin::{self, FatbinError, Kind};
use object::read::elf::{FileHeader, SectionHeader, SectionTable};
use object::read::{ReadCache, ReadRef};
use object::{Endianness, elf};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use thiserror::Error;

/// The section of the containers that a program hands to the driver.
const FATBINS: &[u8] = b".nv_fatbin";
/// The section of those that nvcc linked for the program (`-rdc=true`), and that it hands over
/// beside the result.
const PARTS: &[u8] = b"__nv_relfatbin";
const CONTAINER_HEADER: u64 = 16;
/// The longest container that is looked at. Those of the largest libraries have some megabytes.
const MAX_CONTAINER: u64 = 1 << 30;

/// Most zeros between two containers: compilers align them.
const MAX_GAP: u64 = 64 << 10;

#[derive(Debug, Error)]
pub(super) enum BinaryError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("not an ELF file that can be understood: {0}")]
    Elf(#[from] object::read::Error),
    #[error(transparent)]
    Code(#[from] FatbinError),
    #[error("its device code ends at byte {0}, within a container")]
    Cut(u64),
}

/// What `kedge explain` wants to know of a file.
#[derive(Debug, Default)]
pub(super) struct Binary {
    pub(super) modules: Vec<Module>,
    /// The names of the libraries that the loader brings with it.
    pub(super) needed: Vec<String>,
    /// Where the file says that they are, `$ORIGIN` not yet replaced.
    pub(super) folders: Vec<PathBuf>,
}

/// Reads a file; None where it is nothing that could hold device code. With `kernels` the modules
/// tell theirs, and all code is decompressed.
///
/// # Errors
/// [`BinaryError`] where the file cannot be read, or is damaged.
pub(super) fn read(file: &File, kernels: bool) -> Result<Option<Binary>, BinaryError> {
    let mut start = [0; 4096];
    let known = read_some(file, &mut start)?;
    match fatbin::classify(&start[..known]) {
        Kind::Elf if is_cubin(&start[..known]) => {
            let whole = Range { start: 0, end: file.metadata()?.len() };
            let image = whole.read(file, whole.start, whole.end)?;
            Ok(Some(Binary::of(Module::of_cubin(&Cubin::parse(&image)?, kernels))))
        }
        Kind::Elf => host_file(file, kernels).map(Some),
        Kind::Fatbin => {
            let modules = Range { start: 0, end: file.metadata()?.len() }.modules(file, kernels)?;
            Ok(Some(Binary { modules, ..Binary::default() }))
        }
        Kind::Ptx => {
            let whole = Range { start: 0, end: file.metadata()?.len() };
            let text = whole.read(file, whole.start, whole.end)?;
            // A comment may be longer than what was looked at, and lead to another language.
            let is_ptx = fatbin::classify(&text) == Kind::Ptx;
            let module = || Module::of_ptx(&String::from_utf8_lossy(&text), kernels);
            Ok(is_ptx.then(|| Binary::of(module())))
        }
        Kind::NvvmOrLto | Kind::Unknown => Ok(None),
    }
}

impl Binary {
    fn of(module: Module) -> Binary {
        Binary { modules: vec![module], ..Binary::default() }
    }
}

fn read_some(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut known = 0;
    while known < buffer.len() {
        match file.read_at(&mut buffer[known..], known as u64)? {
            0 => break,
            more => known += more,
        }
    }
    Ok(known)
}

/// Whether an ELF file is for NVIDIA's devices.
fn is_cubin(start: &[u8]) -> bool {
    let machine = start.get(18..20).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    machine == Some(elf::EM_CUDA.0)
}

type Header = elf::FileHeader64<Endianness>;

/// A program or a library.
fn host_file(file: &File, kernels: bool) -> Result<Binary, BinaryError> {
    let cache = ReadCache::new(file);
    let header = Header::parse(&cache)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, &cache)?;
    let mut binary = Binary::default();
    let mut parts = Vec::new();
    let mut left = file.metadata()?.len();
    for section in sections.iter() {
        let into = match sections.section_name(endian, section) {
            Ok(FATBINS) => &mut binary.modules,
            Ok(PARTS) => &mut parts,
            _ => continue,
        };
        let Some((start, size)) = section.file_range(endian) else { continue };
        let range = Range { start, end: start.saturating_add(size) };
        // Sections that overlap are no compiler's.
        left = left.checked_sub(size).ok_or(BinaryError::Cut(range.end))?;
        into.extend(range.modules(file, kernels)?);
    }
    binary.link(parts);
    read_dynamic(&sections, endian, &cache, &mut binary)?;
    Ok(binary)
}

impl Binary {
    /// Puts what nvcc linked, and its `parts`, in one: a device links the parts anew.
    fn link(&mut self, parts: Vec<Module>) {
        let Some(linked) = parts.into_iter().reduce(Module::linked_with) else { return };
        let (results, others) = std::mem::take(&mut self.modules)
            .into_iter()
            .partition::<Vec<_>, _>(Module::is_machine_code_only);
        self.modules = others;
        self.modules.push(results.into_iter().fold(linked, Module::linked_with));
    }
}

fn read_dynamic<'data, R: ReadRef<'data>>(
    sections: &SectionTable<'data, Header, R>,
    endian: Endianness,
    data: R,
    binary: &mut Binary,
) -> Result<(), BinaryError> {
    let table = sections.dynamic_table(endian, data)?;
    for entry in table.iter() {
        let text = || table.string(entry).map(|text| String::from_utf8_lossy(text).into_owned());
        match entry.tag {
            elf::DT_NEEDED => binary.needed.push(text()?),
            elf::DT_RPATH | elf::DT_RUNPATH => {
                binary.folders.extend(text()?.split(':').map(PathBuf::from));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Bytes of a file.
#[derive(Debug, Clone, Copy)]
struct Range {
    start: u64,
    end: u64,
}

impl Range {
    /// The bytes from `at` to `end`.
    fn read(self, file: &File, at: u64, end: u64) -> Result<Vec<u8>, BinaryError> {
        let fits = at.checked_add(MAX_CONTAINER).is_some_and(|most| end <= most);
        if !fits {
            return Err(FatbinError::TooLarge(end - at).into());
        }
        if end > self.end.min(file.metadata()?.len()) {
            return Err(BinaryError::Cut(self.end));
        }
        let mut bytes = vec![0; (end - at) as usize];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    /// The containers that stand there, one after the other, with zeros between them.
    fn modules(self, file: &File, kernels: bool) -> Result<Vec<Module>, BinaryError> {
        let mut modules = Vec::new();
        let (mut at, mut gap) = (self.start, 0);
        while at.saturating_add(CONTAINER_HEADER) <= self.end {
            let header = self.read(file, at, at + CONTAINER_HEADER)?;
            if header[..8] == [0; 8] {
                at += 8;
                gap += 8;
                if gap > MAX_GAP {
                    return Err(FatbinError::NotAContainer.into());
                }
                continue;
            }
            gap = 0;
            let length = fatbin::container_len(&header)?;
            let container = self.read(file, at, at.saturating_add(length))?;
            modules.extend(Module::of_fatbin(&container, kernels)?);
            at += length;
        }
        Ok(modules)
    }
}
