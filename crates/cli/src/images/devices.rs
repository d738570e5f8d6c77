//! What `kedge inspect` shows of devices.

use crate::output::{self, PLAIN, Table};
use crate::size::Size;
use kedge_image::ImageFile;
use kedge_proxy::contents::contents;
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

#[derive(Debug, Serialize)]
struct Memory {
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
        let memory = found.memory.into_iter().map(|m| Memory {
            kind: m.kind,
            count: m.count,
            bytes: m.bytes,
            zero: m.zero,
            raw: m.raw,
            packed: m.packed,
            parent: m.parent,
        });
        Ok(Devices {
            pid: found.pid,
            program: found.program,
            gpu: found.gpu,
            devices: found.devices,
            memory: memory.collect(),
            made: found.made.into_iter().collect(),
        })
    }

    pub(super) fn render(&self) -> String {
        let (program, gpu) = (output::harmless(&self.program), output::harmless(&self.gpu));
        let devices = output::harmless(&self.devices.join(", "));
        let made: Vec<String> =
            self.made.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let headings = ["ON DEVICES", "OBJECTS", "SIZE", "ZERO", "PARENT", "RAW", "PACKED"];
        let mut table = Table::new(&headings, &[1, 2, 3, 4, 5, 6]);
        for memory in &self.memory {
            let sizes = [memory.bytes, memory.zero, memory.parent, memory.raw, memory.packed];
            let sizes = sizes.into_iter().map(|bytes| Size(bytes).to_string());
            let first = [memory.kind.to_owned(), memory.count.to_string()];
            table.row(first.into_iter().chain(sizes).map(|cell| (PLAIN, cell)));
        }
        format!(
            "\nprocess {}, {program}: --gpu {gpu} ({devices})\n{}made anew: {}\n",
            self.pid,
            table.render(),
            made.join(", ")
        )
    }
}
