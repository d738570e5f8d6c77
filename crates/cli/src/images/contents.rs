//! What the files of an image hold, in bytes: of one image, and of all parts of a job together.

use super::devices::{Devices, Memory};
use super::name;
use crate::Failure;
use crate::output::{self, PLAIN, Table};
use kedge_control::size::Size;
use kedge_gpu_image::is_of_place;
use kedge_image::layout::Kind;
use kedge_image::{Codec, ImageFile, Manifest};
use serde::Serialize;
use std::path::Path;

/// Of an image of one supervisor.
#[derive(Debug, Default)]
pub(super) struct Inside {
    pub(super) files: Vec<Contents>,
    pub(super) devices: Vec<Devices>,
}

/// Of one file, or of many.
#[derive(Debug, Default, Serialize)]
pub(super) struct Contents {
    name: String,
    bytes: u64,
    memory: u64,
    zero: u64,
    sections: u64,
    raw: u64,
    lz4: u64,
    zstd: u64,
    gzip: u64,
    /// Bytes of memory that are in the image that this one builds on.
    parent: u64,
    /// Bytes of memory that the files of other processes of this image store.
    forked: u64,
    /// Contents of files and pipes, kept as they are.
    plain: u64,
}

/// All files of an image, and what they have of devices.
#[derive(Debug, Serialize)]
pub(super) struct Total {
    files: Contents,
    /// By kinds.
    devices: Vec<Memory>,
}

/// What the row of all files is called.
const ALL: &str = "in all";

impl Inside {
    pub(super) fn of(image: &Path, manifest: &Manifest) -> Result<Inside, Failure> {
        let (mut inside, mut places) = (Inside::default(), Vec::new());
        for entry in &manifest.files {
            let empty =
                Contents { name: entry.name.clone(), bytes: entry.bytes, ..Contents::default() };
            if entry.is_plain() {
                inside.files.push(Contents { plain: entry.bytes, ..empty });
                continue;
            }
            let path = image.join(&entry.name);
            let file = ImageFile::open(&path, Some(entry))?;
            inside.files.push(empty.with(&file));
            if kedge_supervisor::is_of_devices(&entry.name) {
                let bad = |why| Failure::new(format!("{}: {why}", path.display()));
                let devices = Devices::of(&file).map_err(bad)?;
                match is_of_place(&entry.name) {
                    true => places.push(devices),
                    false => inside.devices.push(devices),
                }
            }
        }
        for place in places {
            match inside.devices.iter_mut().find(|client| client.is_of(&place)) {
                Some(client) => client.add_place(&place),
                // Whoever looks at a damaged image sees what there is.
                None => inside.devices.push(place),
            }
        }
        Ok(inside)
    }

    pub(super) fn render(&self) -> String {
        let total = Total::of([self]);
        let sum = (self.files.len() > 1).then_some(&total.files);
        let devices: String = self.devices.iter().map(Devices::render).collect();
        let all = if self.devices.len() > 1 { total.render_devices() } else { String::new() };
        table(self.files.iter().chain(sum)) + &devices + &all
    }
}

impl Total {
    pub(super) fn of<'a>(images: impl IntoIterator<Item = &'a Inside>) -> Total {
        let mut files = Contents { name: ALL.to_owned(), ..Contents::default() };
        let mut devices = Vec::new();
        for image in images {
            image.files.iter().for_each(|file| files.add(file));
            image.devices.iter().for_each(|of| of.add_to(&mut devices));
        }
        Total { files, devices }
    }

    pub(super) fn render(&self) -> String {
        table([&self.files]) + &self.render_devices()
    }

    fn render_devices(&self) -> String {
        match self.devices.is_empty() {
            true => String::new(),
            false => format!("\nall devices\n{}", Memory::table(&self.devices)),
        }
    }
}

impl Contents {
    /// With the extents of `file`.
    fn with(mut self, file: &ImageFile) -> Contents {
        for extent in file.extents() {
            let stored = u64::from(extent.stored);
            let (kind, kind_bytes) = match extent.kind {
                Kind::Memory => (&mut self.memory, extent.decoded),
                Kind::Section => (&mut self.sections, stored),
            };
            *kind = kind.saturating_add(kind_bytes);
            let (place, bytes) = match extent.codec {
                Codec::Zero => (&mut self.zero, extent.decoded),
                Codec::Raw => (&mut self.raw, stored),
                Codec::Lz4 => (&mut self.lz4, stored),
                Codec::Zstd => (&mut self.zstd, stored),
                Codec::Gzip => (&mut self.gzip, stored),
                Codec::Parent => (&mut self.parent, extent.decoded),
                Codec::Process => (&mut self.forked, extent.decoded),
            };
            *place = place.saturating_add(bytes);
        }
        self
    }

    fn add(&mut self, other: &Contents) {
        let numbers = [
            (&mut self.bytes, other.bytes),
            (&mut self.memory, other.memory),
            (&mut self.zero, other.zero),
            (&mut self.sections, other.sections),
            (&mut self.raw, other.raw),
            (&mut self.lz4, other.lz4),
            (&mut self.zstd, other.zstd),
            (&mut self.gzip, other.gzip),
            (&mut self.parent, other.parent),
            (&mut self.forked, other.forked),
            (&mut self.plain, other.plain),
        ];
        for (sum, number) in numbers {
            *sum = sum.saturating_add(number);
        }
    }
}

fn table<'a>(files: impl IntoIterator<Item = &'a Contents>) -> String {
    let headings = [
        "FILE", "SIZE", "MEMORY", "ZERO", "PARENT", "FORKED", "STATE", "RAW", "LZ4", "ZSTD",
        "GZIP", "PLAIN",
    ];
    let mut table = Table::new(&headings, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    for file in files {
        let memory = [file.bytes, file.memory, file.zero, file.parent, file.forked, file.sections];
        let stored = [file.raw, file.lz4, file.zstd, file.gzip, file.plain];
        let numbers = memory.into_iter().chain(stored);
        let name = (PLAIN, output::harmless(&name(file.name.as_ref())));
        let sizes = numbers.map(|bytes| (PLAIN, Size(bytes).to_string()));
        table.row(std::iter::once(name).chain(sizes));
    }
    table.render()
}
