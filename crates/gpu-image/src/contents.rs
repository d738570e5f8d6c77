//! What an image has of a client's devices, for people to look at: nothing is restored, and
//! contents are not read.

use crate::places;
use crate::saved::{self, SavedObject, SavedProxy, SavedStep};
use kedge_image::{Codec, Extent, ImageFile};
use kedge_protocol::Message;
use std::collections::BTreeMap;

/// A client's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceContents {
    pub pid: u32,
    pub program: String,
    /// As `--gpu` gave it, and the devices' names.
    pub gpu: String,
    pub devices: Vec<String>,
    /// Kinds of memory.
    pub memory: Vec<MemoryContents>,
    /// What is made anew at a restart, and how many of each.
    pub made: Vec<(&'static str, usize)>,
}

/// All objects of a kind, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryContents {
    pub kind: &'static str,
    pub count: usize,
    pub bytes: u64,
    /// In this file, by how they are stored.
    pub zero: u64,
    pub raw: u64,
    pub packed: u64,
    /// In the image that this one builds on.
    pub parent: u64,
}

/// What a message of the record makes.
const MAKES: [(&str, &str); 14] = [
    ("CtxCreate", "contexts"),
    ("StreamCreate", "streams"),
    ("EventCreate", "events"),
    ("EventOpen", "events of others"),
    ("Grant", "slabs of memory"),
    ("MemAlloc", "allocations"),
    ("HandleCreate", "handles of memory"),
    ("HandleImport", "handles of others' memory"),
    ("PeerOpen", "memory of others"),
    ("ArrayCreate", "arrays"),
    ("MipmapCreate", "mipmapped arrays"),
    ("TextureCreate", "textures and surfaces"),
    ("Kernel", "kernels"),
    ("GraphExecBegin", "instantiated graphs"),
];
const MODULES: &str = "modules";

/// Returns what the file of a client's devices tells.
///
/// # Errors
/// What is wrong with the file.
pub fn contents(file: &ImageFile) -> Result<DeviceContents, String> {
    let places = places::read_places(file).map_err(|error| error.to_string())?;
    let saved = match places {
        // What its devices hold is told of the files of its places.
        Some(places) => places.client(),
        None => saved::read(file).map_err(|error| error.to_string())?,
    };
    let names = saved.devices.iter().map(|device| device.name.to_string());
    Ok(DeviceContents {
        pid: saved.hello.pid,
        program: saved.hello.program.to_string(),
        gpu: saved.gpu.to_string(),
        devices: names.collect(),
        memory: memory(&saved, file),
        made: made(&saved.steps),
    })
}

fn memory(saved: &SavedProxy, file: &ImageFile) -> Vec<MemoryContents> {
    let mut all: BTreeMap<&'static str, MemoryContents> = BTreeMap::new();
    for (number, object) in saved.objects.iter() {
        let kind = kind(object);
        let none =
            MemoryContents { kind, count: 0, bytes: 0, zero: 0, raw: 0, packed: 0, parent: 0 };
        let found = all.entry(kind).or_insert(none);
        found.count += 1;
        found.bytes = found.bytes.saturating_add(object.bytes());
        file.memory_of(*number).iter().for_each(|extent| found.add(extent));
    }
    all.into_values().collect()
}

impl MemoryContents {
    fn add(&mut self, extent: &Extent) {
        let (place, bytes) = match extent.codec {
            Codec::Zero => (&mut self.zero, extent.decoded),
            Codec::Parent | Codec::Process => (&mut self.parent, extent.decoded),
            Codec::Raw => (&mut self.raw, extent.stored.into()),
            Codec::Lz4 | Codec::Zstd | Codec::Gzip => (&mut self.packed, extent.stored.into()),
        };
        *place = place.saturating_add(bytes);
    }
}

fn kind(object: &SavedObject) -> &'static str {
    match object {
        SavedObject::Memory { .. } => "memory",
        SavedObject::Handle { .. } => "memory of handles",
        SavedObject::Array { .. } => "arrays",
        SavedObject::Variable { .. } => "variables",
        SavedObject::Image { .. } => "modules' images",
        SavedObject::Arena { .. } => "pinned and managed memory",
    }
}

/// Lists what was made, in the table's order.
fn made(steps: &[SavedStep]) -> Vec<(&'static str, usize)> {
    let name = |step: &SavedStep| match step {
        SavedStep::Module { .. } | SavedStep::Linked { .. } => MODULES,
        SavedStep::Message { message: Message::Post { post }, .. } => post.name(),
        SavedStep::Message { message: Message::Call { call }, .. } => call.name(),
    };
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    steps.iter().for_each(|step| *counts.entry(name(step)).or_default() += 1);
    let kinds = MAKES.iter().copied().chain([(MODULES, MODULES)]);
    kinds.filter_map(|(message, what)| Some((what, *counts.get(message)?))).collect()
}
