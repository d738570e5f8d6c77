//! Cubins: machine code for NVIDIA's devices, in ELF files.

use object::read::elf::{FileHeader, SectionHeader};
use object::{Endianness, elf};

/// What `kedge explain` wants to know of a cubin.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cubin {
    /// Compute capability × 10. That it is for one architecture alone (`sm_90a`) the file does not
    /// say.
    pub(super) sm: u32,
    pub(super) kernels: Vec<String>,
    /// It has neither code nor variables.
    pub(super) is_empty: bool,
}

/// The kernel's parameters lie in a section of this name and the kernel's.
const PARAMETERS: &[u8] = b".nv.constant0.";
/// Beginnings of the names of what has code or variables.
const CONTENT: [&[u8]; 3] = [b".text.", b".nv.global", b".nv.constant"];
/// The ABI since CUDA 13, which keeps the compute capability in bits 8 to 15 of the flags; before,
/// bits 0 to 7.
const NEW_ABI: u8 = 8;

impl Cubin {
    /// # Errors
    /// Where it is no ELF file, or one that is damaged.
    pub(super) fn parse(image: &[u8]) -> Result<Cubin, object::read::Error> {
        let header = elf::FileHeader64::<Endianness>::parse(image)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, image)?;
        let mut cubin = Cubin { sm: 0, kernels: Vec::new(), is_empty: true };
        for section in sections.iter() {
            let name = sections.section_name(endian, section)?;
            let has_content = CONTENT.iter().any(|start| name.starts_with(start));
            cubin.is_empty &= !has_content || section.sh_size(endian) == 0;
            if let Some(kernel) = name.strip_prefix(PARAMETERS) {
                cubin.kernels.push(String::from_utf8_lossy(kernel).into_owned());
            }
        }
        let shift = if header.e_ident().abi_version >= NEW_ABI { 8 } else { 0 };
        cubin.sm = header.e_flags(endian).0 >> shift & 0xff;
        Ok(cubin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_cubins_are_refused() {
        for image in [&[][..], b"\x7fELF", &[0x7f; 4096]] {
            assert!(Cubin::parse(image).is_err());
        }
    }
}
