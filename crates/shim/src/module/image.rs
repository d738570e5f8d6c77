//! What a module is made of: images in the program's memory, recognised and measured.
//!
//! CUDA passes an image as a bare pointer. Its length is found in its own headers, or, for PTX
//! text, at its NUL.

use super::sources::Sourced;
use super::{peek, sources};
use crate::entry;
use kedge_cuda_types::CuError;
use kedge_protocol::ModuleImage;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// `__fatBinC_Wrapper_t`.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const CONTAINER_MAGIC: u32 = 0xBA55_ED50;
const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");
/// Images of LTO-IR and of NVVM's bitcode.
const LTO_MAGIC: u32 = u32::from_le_bytes([0x43, 0x56, 0x4e, 0x7f]);
const BITCODE_MAGIC: u32 = u32::from_le_bytes(*b"BC\xc0\xde");
/// What cuLinkComplete made: the images that were linked, to be linked again by the proxy.
const LINKED_MAGIC: u32 = u32::from_le_bytes(*b"kLNK");
/// The same, and behind it what the compiler has linked of them already.
const TWO_LISTS_MAGIC: u32 = u32::from_le_bytes(*b"kLN2");

/// No image is longer; a header that says so is corrupt.
const MAX_IMAGE: u64 = 4 << 30;
/// Images that one module may be linked from.
pub(super) const MAX_IMAGES: usize = 4096;

/// One image: where it lies, or a copy of it.
#[derive(Debug, Clone)]
enum Bytes {
    /// The program keeps it in place.
    Borrowed {
        addr: u64,
        len: u64,
    },
    Owned(Box<[u8]>),
}

impl Bytes {
    fn place(&self) -> ModuleImage {
        match self {
            Bytes::Borrowed { addr, len } => ModuleImage { addr: *addr, len: *len },
            Bytes::Owned(bytes) => {
                ModuleImage { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 }
            }
        }
    }
}

/// All images of one module.
#[derive(Debug, Clone, Default)]
pub(crate) struct Images {
    images: Vec<Bytes>,
    /// They must be linked, even a single one.
    link: bool,
    /// What the compiler has made of them already, for the devices that it was told of.
    linked: Option<Vec<Bytes>>,
    /// One is a cubin whose PTX is not known.
    unknown_cubin: bool,
    /// The registers that a cubin's functions were compiled for, for devices that compile its PTX.
    registers: Arc<HashMap<String, u32>>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Wrapper {
    magic: u32,
    version: u32,
    data: u64,
    /// Version 2: a NULL-terminated array of prelinked fatbins.
    prelinked: u64,
}

impl Images {
    /// Recognises what `image` points to.
    ///
    /// # Safety
    /// `image` points to an image of a kind that cuModuleLoadData takes, or is NULL.
    pub(crate) unsafe fn recognise(image: *const c_void) -> Result<Self, CuError> {
        let addr = image as u64;
        // SAFETY: an image begins at `addr`, by this function's contract, so its magic can be read.
        match unsafe { magic(addr)? } {
            // SAFETY: the magic says that it is a wrapper.
            WRAPPER_MAGIC => unsafe { from_wrapper(peek::value(addr)?) },
            // SAFETY: the magic says that cuLinkComplete made it.
            magic @ (LINKED_MAGIC | TWO_LISTS_MAGIC) => unsafe {
                from_linked(addr, magic == TWO_LISTS_MAGIC)
            },
            magic => {
                // SAFETY: a whole image begins at `addr`, by this function's contract.
                let image = unsafe { measure(addr)? };
                if magic == ELF_MAGIC {
                    // SAFETY: `measure` found all of it.
                    let (sourced, registers) = unsafe { with_source(&image)? };
                    let registers = Arc::new(registers);
                    return Ok(Self { registers, ..Self::of_cubin(image, sourced) });
                }
                Ok(Self::one(image))
            }
        }
    }

    fn one(image: Bytes) -> Self {
        Self { images: vec![image], ..Self::default() }
    }

    /// One image of a known length.
    pub(crate) fn of_bytes(bytes: Vec<u8>) -> Self {
        let is_cubin = bytes.starts_with(&ELF_MAGIC.to_le_bytes());
        let sourced = is_cubin.then(|| sources::with_source(&bytes)).flatten();
        let image = Bytes::Owned(bytes.into());
        if is_cubin { Self::of_cubin(image, sourced) } else { Self::one(image) }
    }

    /// A cubin, with the PTX that is known of it: as nvcc makes a program, where it was linked.
    fn of_cubin(cubin: Bytes, sourced: Option<Sourced>) -> Self {
        match sourced {
            None => Self { unknown_cubin: true, ..Self::one(cubin) },
            Some(Sourced::Fatbin(fatbin)) => Self::one(Bytes::Owned(fatbin.into())),
            Some(Sourced::Parts(parts)) => {
                let images = parts.into_iter().map(|part| Bytes::Owned(part.into())).collect();
                Self { images, link: true, linked: Some(vec![cubin]), ..Self::default() }
            }
        }
    }

    /// All images of `parts`, to be linked into one module.
    pub(super) fn linked(parts: impl IntoIterator<Item = Images>) -> Self {
        let mut all = Self { link: true, ..Self::default() };
        for part in parts {
            if let Some(made) = part.linked {
                all.linked.get_or_insert_with(|| all.images.clone()).extend(made);
            } else if let Some(made) = &mut all.linked {
                made.extend(part.images.iter().cloned());
            }
            all.images.extend(part.images);
            all.unknown_cubin |= part.unknown_cubin;
        }
        all
    }

    /// Whether one is a cubin whose PTX is not known.
    pub(super) fn have_unknown_cubin(&self) -> bool {
        self.unknown_cubin
    }

    /// The registers of a thread, by function, where a compiler has told.
    pub(super) fn registers(&self) -> Arc<HashMap<String, u32>> {
        self.registers.clone()
    }

    /// Copies what still lies in the program's memory.
    ///
    /// # Safety
    /// The images are where they were recognised.
    pub(crate) unsafe fn keep(&mut self) -> Result<(), CuError> {
        for image in self.images.iter_mut().chain(self.linked.iter_mut().flatten()) {
            if let Bytes::Borrowed { addr, len } = *image {
                let mut bytes = vec![0; len as usize];
                // SAFETY: the image's bytes are readable at `addr`, by this function's contract.
                unsafe { peek::bytes(addr, &mut bytes)? };
                *image = Bytes::Owned(bytes.into());
            }
        }
        Ok(())
    }

    /// Where the images lie, for the proxy to read while this process waits.
    pub(super) fn places(&self) -> Vec<ModuleImage> {
        self.images.iter().map(Bytes::place).collect()
    }

    /// Where that lies which the compiler has linked, and which may be all.
    pub(super) fn linked_places(&self) -> Option<Vec<ModuleImage>> {
        self.linked.as_ref().map(|images| images.iter().map(Bytes::place).collect())
    }

    pub(super) fn needs_linking(&self) -> bool {
        self.link || self.images.len() > 1
    }

    /// One block of memory that [`Self::recognise`] takes for these images.
    pub(super) fn pack(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let made = self.linked_places().filter(|made| !made.is_empty());
        let magic = if made.is_some() { TWO_LISTS_MAGIC } else { LINKED_MAGIC };
        out.extend(magic.to_le_bytes());
        for places in [Some(self.places()), made].into_iter().flatten() {
            out.extend((places.len() as u32).to_le_bytes());
            for place in places {
                out.extend(place.len.to_le_bytes());
                let at = place.addr as *const u8;
                // SAFETY: places are of live memory of that length.
                out.extend(unsafe { std::slice::from_raw_parts(at, place.len as usize) });
            }
        }
        out
    }
}

/// # Safety
/// As [`Images::recognise`].
unsafe fn magic(addr: u64) -> Result<u32, CuError> {
    if addr == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: every image is longer than its magic word.
    unsafe { peek::value(addr) }
}

fn is_text(word: u32) -> bool {
    word.to_le_bytes().iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace())
}

/// # Safety
/// The wrapper's pointers are what its magic promises.
unsafe fn from_wrapper(wrapper: Wrapper) -> Result<Images, CuError> {
    let mut images = Vec::new();
    if wrapper.version >= 2 && wrapper.prelinked != 0 {
        for i in 0..MAX_IMAGES as u64 {
            // SAFETY: the array ends with NULL, and no NULL came before.
            let part: u64 = unsafe { peek::value(wrapper.prelinked.wrapping_add(8 * i))? };
            if part == 0 {
                break;
            }
            // SAFETY: an element of the array is a fatbin.
            images.push(unsafe { measure(part)? });
        }
    }
    if !images.is_empty() {
        // SAFETY: the wrapper's data is a fatbin, or NULL where there is none.
        let linked = unsafe { measure(wrapper.data) }.ok().map(|image| vec![image]);
        return Ok(Images { images, link: true, linked, ..Images::default() });
    }
    // SAFETY: the wrapper's data is a fatbin.
    Ok(Images::one(unsafe { measure(wrapper.data)? }))
}

/// # Safety
/// `image` is what [`Images::pack`] made, of two lists where `two_lists`.
unsafe fn from_linked(image: u64, two_lists: bool) -> Result<Images, CuError> {
    let mut at = image + 4;
    let mut list = || {
        // SAFETY: `pack` wrote these lists behind the magic, each behind its count.
        let count: u32 = unsafe { peek::value(at)? };
        at += 4;
        if count as usize > MAX_IMAGES {
            return Err(CuError::INVALID_IMAGE);
        }
        let mut images = Vec::with_capacity(count as usize);
        for _ in 0..count {
            // SAFETY: `pack` wrote each image's length before its bytes.
            let len: u64 = unsafe { peek::value(at)? };
            if len > MAX_IMAGE {
                return Err(CuError::INVALID_IMAGE);
            }
            images.push(Bytes::Borrowed { addr: at + 8, len });
            at += 8 + len;
        }
        Ok(images)
    };
    let images = list()?;
    let linked = two_lists.then(list).transpose()?.filter(|made| !made.is_empty());
    Ok(Images { images, link: true, linked, ..Images::default() })
}

type OfCubin = (Option<Sourced>, HashMap<String, u32>);

/// Returns the PTX that a cubin was made from, if that is known, and its functions' registers.
///
/// # Safety
/// The image is where it was measured.
unsafe fn with_source(image: &Bytes) -> Result<OfCubin, CuError> {
    let Bytes::Borrowed { addr, len } = *image else { return Ok(Default::default()) };
    if len > sources::MAX_CUBIN {
        return Ok(Default::default());
    }
    let mut cubin = vec![0; len as usize];
    // SAFETY: the image's bytes are readable at `addr`, by this function's contract.
    unsafe { peek::bytes(addr, &mut cubin)? };
    let registers = sources::has_software().then(|| sources::registers(&cubin));
    Ok((sources::with_source(&cubin), registers.unwrap_or_default()))
}

/// Finds the length of a fatbin container, an ELF file or PTX text.
///
/// # Safety
/// `addr` is that of one of them.
unsafe fn measure(addr: u64) -> Result<Bytes, CuError> {
    // SAFETY: an image begins at `addr`, by this function's contract, so its magic can be read.
    let len = match unsafe { magic(addr)? } {
        // SAFETY: the magic says that a container's header follows.
        CONTAINER_MAGIC => unsafe { container_len(addr)? },
        // SAFETY: the magic says that an ELF header follows.
        ELF_MAGIC => unsafe { elf_len(addr)? },
        // SAFETY: text ends with a NUL.
        word if is_text(word) => unsafe { peek::text_len(addr, MAX_IMAGE)? },
        LTO_MAGIC | BITCODE_MAGIC => {
            return Err(entry::not_supported(
                "an image of LTO-IR or NVVM bitcode (nvJitLink makes a cubin or PTX of it, -lto)",
            ));
        }
        _ => return Err(CuError::INVALID_IMAGE),
    };
    if len > MAX_IMAGE {
        return Err(CuError::INVALID_IMAGE);
    }
    Ok(Bytes::Borrowed { addr, len })
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ContainerHeader {
    magic: u32,
    version: u16,
    /// Bytes of this header.
    header: u16,
    /// Bytes that follow it.
    size: u64,
}

/// # Safety
/// A container's header lies at `addr`.
unsafe fn container_len(addr: u64) -> Result<u64, CuError> {
    // SAFETY: a container's header is at `addr`, by this function's contract.
    let ContainerHeader { header, size, .. } = unsafe { peek::value(addr)? };
    if usize::from(header) < size_of::<ContainerHeader>() {
        return Err(CuError::INVALID_IMAGE);
    }
    u64::from(header).checked_add(size).ok_or(CuError::INVALID_IMAGE)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ElfHeader {
    ident: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    program_headers: u64,
    section_headers: u64,
    flags: u32,
    header_size: u16,
    program_header_size: u16,
    program_header_count: u16,
    section_header_size: u16,
    section_header_count: u16,
    names: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SectionHeader {
    name: u32,
    kind: u32,
    flags: u64,
    addr: u64,
    offset: u64,
    size: u64,
    link: u32,
    info: u32,
    align: u64,
    entry_size: u64,
}

/// The end of whatever lies last: a header table or a section.
///
/// # Safety
/// An ELF file lies at `image`.
unsafe fn elf_len(image: u64) -> Result<u64, CuError> {
    const CLASS_64: u8 = 2;
    const EM_CUDA: u16 = 190;
    const NO_BITS: u32 = 8;
    // SAFETY: the file begins with its header.
    let header: ElfHeader = unsafe { peek::value(image)? };
    if header.ident[4] != CLASS_64 || header.machine != EM_CUDA {
        return Err(CuError::INVALID_IMAGE);
    }
    let table = |at: u64, size: u16, count: u16| {
        at.checked_add(u64::from(size) * u64::from(count)).filter(|end| *end <= MAX_IMAGE)
    };
    let invalid = CuError::INVALID_IMAGE;
    let programs =
        table(header.program_headers, header.program_header_size, header.program_header_count)
            .ok_or(invalid)?;
    let sections =
        table(header.section_headers, header.section_header_size, header.section_header_count)
            .ok_or(invalid)?;
    let mut len = programs.max(sections).max(size_of::<ElfHeader>() as u64);
    if usize::from(header.section_header_size) < size_of::<SectionHeader>() {
        return Ok(len);
    }
    for i in 0..u64::from(header.section_header_count) {
        let at = header.section_headers + i * u64::from(header.section_header_size);
        // SAFETY: the header says that its section headers lie there.
        let section: SectionHeader = unsafe { peek::value(image + at)? };
        if section.kind != NO_BITS {
            len = len.max(section.offset.checked_add(section.size).ok_or(invalid)?);
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(image: &[u8]) -> Result<Vec<ModuleImage>, CuError> {
        // SAFETY: the tests below pass images.
        Ok(unsafe { Images::recognise(image.as_ptr().cast())? }.places())
    }

    fn container(payload: usize) -> Vec<u8> {
        let mut bytes = CONTAINER_MAGIC.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((payload as u64).to_le_bytes());
        bytes.resize(16 + payload, 7);
        bytes
    }

    #[test]
    fn measures_text_and_containers() {
        let text = b".version 8.0\n\0";
        assert_eq!(places(text).unwrap()[0].len, 13);
        assert_eq!(places(&container(40)).unwrap()[0].len, 56);
    }

    #[test]
    fn follows_a_wrapper() {
        let (a, b) = (container(8), container(24));
        let wrapper =
            Wrapper { magic: WRAPPER_MAGIC, version: 1, data: a.as_ptr() as u64, prelinked: 0 };
        // SAFETY: a live wrapper around live containers.
        let images = unsafe { Images::recognise((&raw const wrapper).cast()).unwrap() };
        assert!(!images.needs_linking());
        assert_eq!(images.places()[0].len, 24);
        let array = [a.as_ptr() as u64, b.as_ptr() as u64, 0];
        let wrapper = Wrapper { version: 2, prelinked: array.as_ptr() as u64, ..wrapper };
        // SAFETY: a live wrapper around live containers, and a live list that ends with 0.
        let images = unsafe { Images::recognise((&raw const wrapper).cast()).unwrap() };
        assert!(images.needs_linking());
        assert_eq!(images.linked_places().map(|places| places[0].len), Some(24));
        assert_eq!(images.places().iter().map(|p| p.len).collect::<Vec<_>>(), [24, 40]);
    }

    #[test]
    fn reads_what_it_packed() {
        let images = Images::linked([
            Images::of_bytes(b".version 8.0\0".to_vec()),
            Images::of_bytes(container(9)),
        ]);
        let packed = images.pack();
        let places = places(&packed).unwrap();
        assert_eq!(places.iter().map(|p| p.len).collect::<Vec<_>>(), [13, 25]);
        assert_eq!(places[1].addr, packed.as_ptr() as u64 + 8 + 8 + 13 + 8);
    }

    /// Programs may keep what cuLinkComplete made; kedge once wrote one list only.
    #[test]
    fn reads_one_list_and_no_further() {
        let mut packed = b"kLNK\x01\0\0\0\x03\0\0\0\0\0\0\0//a".to_vec();
        // What lies behind it is another's.
        packed.extend([0xff; 16]);
        // SAFETY: live bytes of the form that `pack` writes.
        let images = unsafe { Images::recognise(packed.as_ptr().cast()).unwrap() };
        assert_eq!(images.places().iter().map(|p| p.len).collect::<Vec<_>>(), [3]);
        assert!(images.needs_linking() && images.linked_places().is_none());
    }

    /// A device that runs machine code links the cubin, another one the texts.
    #[test]
    fn a_linked_cubin_is_kept_beside_its_texts() {
        let texts = Sourced::Parts(vec![b"//a\0".to_vec(), b"//bb\0".to_vec()]);
        let cubin = Images::of_cubin(Bytes::Owned(vec![7; 64].into()), Some(texts));
        let text = || Images::of_bytes(b".version 8.0\0".to_vec());
        let packed = Images::linked([text(), cubin, text()]).pack();
        // SAFETY: `pack` made it.
        let images = unsafe { Images::recognise(packed.as_ptr().cast()).unwrap() };
        let lengths = |places: Vec<ModuleImage>| places.iter().map(|p| p.len).collect::<Vec<_>>();
        assert_eq!(lengths(images.places()), [13, 4, 5, 13]);
        assert_eq!(lengths(images.linked_places().unwrap()), [13, 64, 13]);
    }

    #[test]
    fn refuses_nonsense() {
        let mut short = container(8);
        short[6] = 3;
        let mut long = container(8);
        long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        let garbage = [0xff, 0xfe, 0xfd, 0xfc, 0];
        for image in [&b"\0\0\0\0"[..], b"ab\0\0", &garbage, &short, &long] {
            assert_eq!(places(image).unwrap_err(), CuError::INVALID_IMAGE);
        }
        for image in [[0x43, 0x56, 0x4e, 0x7f], *b"BC\xc0\xde"] {
            assert_eq!(places(&image).unwrap_err(), CuError::NOT_SUPPORTED);
        }
        // SAFETY: NULL is allowed.
        let null = unsafe { Images::recognise(std::ptr::null()) };
        assert_eq!(null.unwrap_err(), CuError::INVALID_VALUE);
    }
}
