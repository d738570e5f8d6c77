//! What `kedge inspect` shows of devices.

use crate::output::{self, PLAIN, Table};
use kedge_control::size::Size;
use kedge_gpu_image::{MemoryContents, contents};
use kedge_image::ImageFile;
use serde::Serialize;
use std::collections::BTreeMap;

/// Of a process.
#[derive(Debug, Serialize)]
pub(super) struct Devices {
    pid: u32,
    program: String,
    gpu: String,
    devices: Vec<String>,
    memory: Vec<Memory>,
    made: BTreeMap<&'static str, usize>,
}

/// All objects of a kind.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Memory {
    kind: &'static str,
    count: usize,
    bytes: u64,
    zero: u64,
    raw: u64,
    packed: u64,
    parent: u64,
}

impl Devices {
    /// What the file of its devices tells; or what is wrong with it.
    pub(super) fn of(file: &ImageFile) -> Result<Devices, String> {
        let found = contents(file)?;
        Ok(Devices {
            pid: found.pid,
            program: found.program,
            gpu: found.gpu,
            devices: found.devices,
            memory: found.memory.into_iter().map(Memory::of).collect(),
            made: found.made.into_iter().collect(),
        })
    }

    /// Returns whether both are of one process.
    pub(super) fn is_of(&self, other: &Devices) -> bool {
        self.pid == other.pid
    }

    /// Adds what one of its places has, whose devices are among its own.
    pub(super) fn add_place(&mut self, place: &Devices) {
        place.add_to(&mut self.memory);
        for (what, count) in &place.made {
            *self.made.entry(what).or_default() += count;
        }
    }

    /// Adds its memory to that of others.
    pub(super) fn add_to(&self, sums: &mut Vec<Memory>) {
        for memory in &self.memory {
            match sums.iter_mut().find(|sum| sum.kind == memory.kind) {
                Some(sum) => sum.add(memory),
                None => sums.push(memory.clone()),
            }
        }
    }

    pub(super) fn render(&self) -> String {
        let (program, gpu) = (output::harmless(&self.program), output::harmless(&self.gpu));
        let devices = output::harmless(&self.devices.join(", "));
        let made: Vec<String> =
            self.made.iter().map(|(what, count)| format!("{count} {what}")).collect();
        format!(
            "\nprocess {}, {program}: --gpu {gpu} ({devices})\n{}made anew: {}\n",
            self.pid,
            Memory::table(&self.memory),
            made.join(", ")
        )
    }
}

impl Memory {
    fn of(found: MemoryContents) -> Memory {
        Memory {
            kind: found.kind,
            count: found.count,
            bytes: found.bytes,
            zero: found.zero,
            raw: found.raw,
            packed: found.packed,
            parent: found.parent,
        }
    }

    fn add(&mut self, other: &Memory) {
        self.count = self.count.saturating_add(other.count);
        let sizes = [
            (&mut self.bytes, other.bytes),
            (&mut self.zero, other.zero),
            (&mut self.raw, other.raw),
            (&mut self.packed, other.packed),
            (&mut self.parent, other.parent),
        ];
        for (sum, size) in sizes {
            *sum = sum.saturating_add(size);
        }
    }

    pub(super) fn table(kinds: &[Memory]) -> String {
        let headings = ["ON DEVICES", "OBJECTS", "SIZE", "ZERO", "PARENT", "RAW", "PACKED"];
        let mut table = Table::new(&headings, &[1, 2, 3, 4, 5, 6]);
        for memory in kinds {
            let sizes = [memory.bytes, memory.zero, memory.parent, memory.raw, memory.packed];
            let sizes = sizes.into_iter().map(|bytes| Size(bytes).to_string());
            let first = [memory.kind.to_owned(), memory.count.to_string()];
            table.row(first.into_iter().chain(sizes).map(|cell| (PLAIN, cell)));
        }
        table.render()
    }
}
