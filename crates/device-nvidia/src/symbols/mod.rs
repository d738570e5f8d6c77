//! The names of a module's variables, which the driver finds by name but does not list, which of
//! its kernels allocate memory on the device, and whether any may print. Read from the images that
//! the module was made of.

mod elf;
mod text;

#[cfg(test)]
pub(crate) use elf::tests::relocated;

use kedge_ptx::fatbin::{self, Image, ImageKind, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// Variables that one module may have.
const MAX_VARIABLES: usize = 1 << 18;

/// Which kernels call the device's malloc.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Allocators {
    #[default]
    None,
    These(BTreeSet<String>),
    /// It cannot be told apart.
    Any,
}

impl Allocators {
    fn add(&mut self, other: Allocators) {
        *self = match (std::mem::take(self), other) {
            (Allocators::Any, _) | (_, Allocators::Any) => Allocators::Any,
            (Allocators::None, one) | (one, Allocators::None) => one,
            (Allocators::These(mut all), Allocators::These(more)) => {
                all.extend(more);
                Allocators::These(all)
            }
        };
    }

    pub(crate) fn has(&self, kernel: &str) -> bool {
        match self {
            Allocators::None => false,
            Allocators::These(names) => names.contains(kernel),
            Allocators::Any => true,
        }
    }
}

/// By variable: where in it the address of a function is from the beginning.
pub(crate) type CodeWords = BTreeMap<String, BTreeSet<u64>>;

/// What an image tells of its module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Symbols {
    /// In a fixed order. Some may not be in the module: of several images the driver takes one.
    pub(crate) variables: BTreeSet<String>,
    pub(crate) allocators: Allocators,
    /// Whether any of its functions may print: by printf, or by a failed assertion.
    pub(crate) prints: bool,
    /// Of machine code; text does not tell.
    pub(crate) code_words: CodeWords,
}

/// What functions call to print.
const PRINTERS: [&str; 2] = ["vprintf", "__assertfail"];

impl Symbols {
    fn add(&mut self, other: Symbols) {
        self.prints |= other.prints;
        self.variables.extend(other.variables);
        self.allocators.add(other.allocators);
        for (variable, words) in other.code_words {
            self.code_words.entry(variable).or_default().extend(words);
        }
    }
}

/// What the images of one module hold that a GPU of compute capability `sm` (90 for 9.0) would run.
///
/// # Errors
/// In words, why the names cannot be known.
pub(crate) fn of_images(images: &[Vec<u8>], sm: u32) -> Result<Symbols, String> {
    let mut all = Symbols::default();
    for image in images {
        all.add(of_image(image, sm)?);
        if all.variables.len() > MAX_VARIABLES {
            return Err(format!("it has more than {MAX_VARIABLES} variables"));
        }
    }
    Ok(all)
}

fn of_image(image: &[u8], sm: u32) -> Result<Symbols, String> {
    match fatbin::classify(image) {
        Kind::Elf => elf::symbols(image),
        Kind::Ptx => Ok(text::symbols(&String::from_utf8_lossy(image))),
        Kind::Fatbin => of_fatbin(image, sm),
        Kind::NvvmOrLto => Err("it is intermediate code of NVVM, which names nothing".into()),
        Kind::Unknown => Err("its image is of an unknown kind".into()),
    }
}

fn of_fatbin(container: &[u8], sm: u32) -> Result<Symbols, String> {
    // The driver's own parser reads up to the container's end.
    let length = fatbin::container_len(container).map_err(|error| error.to_string())?;
    let length = usize::try_from(length).unwrap_or(usize::MAX).min(container.len());
    let images = fatbin::images(&container[..length]).map_err(|error| error.to_string())?;
    let mut all = Symbols::default();
    for image in choose(&images, sm) {
        let found = match image.kind {
            ImageKind::Ptx => text::symbols(&image.text().map_err(|error| error.to_string())?),
            _ => elf::symbols(&image.data().map_err(|error| error.to_string())?)?,
        };
        all.add(found);
    }
    Ok(all)
}

/// The entries of which the driver takes one (several modules may be joined in a container):
/// machine code of the nearest architecture, else text.
fn choose<'a, 'b>(images: &'a [Image<'b>], sm: u32) -> Vec<&'a Image<'b>> {
    let nearest = |fits: &dyn Fn(&Image<'_>) -> bool| {
        let found: Vec<_> = images.iter().filter(|image| fits(image)).collect();
        let best = found.iter().map(|image| image.sm).max();
        found.into_iter().filter(|image| Some(image.sm) == best).collect::<Vec<_>>()
    };
    let code = nearest(&|image| {
        image.kind == ImageKind::Elf && image.sm / 10 == sm / 10 && image.sm <= sm
    });
    match code.is_empty() {
        true => nearest(&|image| image.kind == ImageKind::Ptx && image.sm <= sm),
        false => code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn these(names: &[&str]) -> Allocators {
        Allocators::These(names.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn text_images_are_recognised() {
        let ptx = b".version 8.0\n.target sm_90\n.global .u32 a;\n\0".to_vec();
        let found = of_images(&[ptx.clone(), ptx], 90).unwrap();
        assert_eq!(found.variables.into_iter().collect::<Vec<_>>(), ["a"]);
        assert!(of_images(&[b"what is this".to_vec()], 90).is_err());
    }

    #[test]
    fn allocators_add_up() {
        let mut all = these(&["a"]);
        all.add(Allocators::None);
        all.add(these(&["b"]));
        assert_eq!(all, these(&["a", "b"]));
        assert!(all.has("b") && !all.has("c"));
        all.add(Allocators::Any);
        assert!(all.has("c"));
    }
}
