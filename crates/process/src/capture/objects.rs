//! Memory that several mappings share: copied once, while all is stopped.

use crate::EngineError;
use crate::capture::memory;
use crate::maps::Mapping;
use crate::plugins::Ipc;
use crate::state::{Hex, SharedObject};
use kedge_image::{Choice, ImageWriter, Packer, PageBuffer};
use libc::pid_t;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Objects {
    pub(super) ipc: Ipc,
    /// By device and inode.
    found: BTreeMap<(String, u64), Object>,
    /// Code of vDSOs, by its checksum.
    vdsos: BTreeMap<u64, Vec<u8>>,
}

#[derive(Debug)]
struct Object {
    number: u64,
    name: String,
    bytes: u64,
    /// Who maps which part of it: process, its mapping.
    views: Vec<(pid_t, Mapping)>,
}

impl Objects {
    pub(super) fn new(ipc: Ipc) -> Objects {
        Objects { ipc, found: BTreeMap::new(), vdsos: BTreeMap::new() }
    }

    /// The id of the System V segment that is mapped, if it is one.
    pub(super) fn segment(&self, mapping: &Mapping) -> Option<i32> {
        let id = i32::try_from(mapping.inode).ok()?;
        let named = mapping.shared && mapping.name.starts_with("/SYSV");
        (named && self.ipc.segments.contains(&id)).then_some(id)
    }

    /// Notes the code of a vDSO: its checksum.
    pub(super) fn note_vdso(&mut self, code: Vec<u8>) -> u64 {
        let checksum = kedge_image::checksum(&code);
        self.vdsos.insert(checksum, code);
        checksum
    }

    pub(super) fn vdsos(&self) -> Vec<Hex> {
        self.vdsos.values().cloned().map(Hex).collect()
    }

    /// Notes a mapping of shared memory of `pid`; the number of its object.
    pub(super) fn note(&mut self, pid: pid_t, mapping: &Mapping) -> u64 {
        let number = self.found.len() as u64 + 1;
        let key = (mapping.device.clone(), mapping.inode);
        let name = mapping.name.trim_end_matches(" (deleted)").to_owned();
        let object = self.found.entry(key).or_insert_with(|| Object {
            number,
            name,
            bytes: 0,
            views: Vec::new(),
        });
        object.bytes = object.bytes.max(mapping.offset.saturating_add(mapping.len()));
        object.views.push((pid, mapping.clone()));
        object.number
    }

    /// Stores the bytes of all of them. Their processes must be stopped: a clone shares them.
    pub(super) fn copy(&self, writer: &ImageWriter, codec: Choice) -> Result<(), EngineError> {
        let (mut buffer, mut packer) = (PageBuffer::default(), Packer::new(writer));
        for object in self.found.values() {
            let mut views = object.views.clone();
            views.sort_by_key(|(_, mapping)| mapping.offset);
            // What lies below this offset is stored already.
            let mut done = 0;
            for (pid, mapping) in &views {
                let end = mapping.offset + mapping.len();
                let from = done.max(mapping.offset);
                if from >= end {
                    continue;
                }
                let start = mapping.start + (from - mapping.offset);
                let reader = memory::Reader::of(*pid)?;
                let mut chunks = Vec::new();
                memory::split(mapping, &[(start, mapping.end)], &mut chunks);
                for chunk in &chunks {
                    let place = chunk.address() - mapping.start + mapping.offset;
                    let number = object.number;
                    memory::store(&reader, number, chunk, place, &mut packer, codec, &mut buffer)?;
                }
                done = end;
            }
        }
        Ok(packer.flush()?)
    }

    pub(super) fn described(&self) -> Vec<SharedObject> {
        let describe = |object: &Object| SharedObject {
            number: object.number,
            name: object.name.clone(),
            bytes: object.bytes,
        };
        self.found.values().map(describe).collect()
    }
}
