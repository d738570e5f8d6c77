//! `kedge inspect`.

use super::devices::Devices;
use super::{date, name, real};
use crate::Failure;
use crate::output::{self, PLAIN, Table};
use crate::size::Size;
use clap::Args;
use kedge_image::layout::Kind;
use kedge_image::{Codec, ImageFile, newest};
use serde::Serialize;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
MEMORY is what its processes had; ZERO, the part of it that is all zeros and not stored; PARENT, the
part that is as in the image that this one builds on. The other columns are bytes in the file, by
how they are stored; PLAIN, the contents of open files and pipes. Below, for each process that had
devices: what it had on them, and what a restart makes anew there.

Tables are read and checked, contents are not: that is what `kedge verify` does.";

/// Show what is in a checkpoint image
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct InspectArgs {
    /// An image, or a folder of images for the newest of them: a path, or a name in the folder where
    /// images go by default
    #[arg(value_name = "IMAGE|DIR")]
    image: PathBuf,
    /// Print a JSON object: image, version, job, command, captured (seconds since 1970), processes
    /// (their ids), parent, bytes, files (objects: name, bytes, memory, zero, sections, raw, lz4, zstd,
    /// gzip, parent, plain), devices (of a process: pid, program, gpu, devices, memory: kind, count, bytes,
    /// zero, raw, packed, parent; made: names and numbers), parts (of a job of several, which are images: image,
    /// processes, bytes)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    image: PathBuf,
    version: u32,
    job: String,
    command: Vec<String>,
    captured: u64,
    processes: Vec<i32>,
    parent: Option<String>,
    bytes: u64,
    files: Vec<Contents>,
    devices: Vec<Devices>,
    parts: Vec<PartReport>,
}

/// A part of a job of several: an image, to be inspected for itself.
#[derive(Debug, Serialize)]
struct PartReport {
    image: PathBuf,
    processes: usize,
    bytes: u64,
}

/// What a file holds, in bytes.
#[derive(Debug, Default, Serialize)]
struct Contents {
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
    /// Contents of files and pipes, kept as they are.
    plain: u64,
}

pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let (image, manifest) = newest(&real(&args.image)?)?;
    let (mut files, mut devices) = (Vec::new(), Vec::new());
    for entry in &manifest.files {
        let empty =
            Contents { name: entry.name.clone(), bytes: entry.bytes, ..Contents::default() };
        if entry.is_plain() {
            files.push(Contents { plain: entry.bytes, ..empty });
            continue;
        }
        let file = ImageFile::open(&image.join(&entry.name), Some(entry))?;
        files.push(contents(empty, &file));
        if kedge_supervisor::is_of_devices(&entry.name) {
            devices.push(Devices::of(&file).map_err(|why| {
                Failure::new(format!("{}: {why}", image.join(&entry.name).display()))
            })?);
        }
    }
    let mut parts = Vec::new();
    for part in &manifest.parts {
        let (image, processes, bytes) = (part.check(&image)?, part.processes, part.bytes);
        parts.push(PartReport { image, processes, bytes });
    }
    let report = Report {
        parts,
        image,
        bytes: manifest.bytes(),
        version: manifest.version,
        job: manifest.job,
        command: manifest.command,
        captured: manifest.captured,
        processes: manifest.processes,
        parent: manifest.parent.map(|parent| parent.name),
        files,
        devices,
    };
    if args.json {
        return Ok(output::json(&report)?);
    }
    Ok(output::print(&render(&report))?)
}

fn contents(mut contents: Contents, file: &ImageFile) -> Contents {
    for extent in file.extents() {
        match extent.kind {
            Kind::Memory => contents.memory += extent.decoded,
            Kind::Section => contents.sections += u64::from(extent.stored),
        }
        match extent.codec {
            Codec::Zero => contents.zero += extent.decoded,
            Codec::Raw => contents.raw += u64::from(extent.stored),
            Codec::Lz4 => contents.lz4 += u64::from(extent.stored),
            Codec::Zstd => contents.zstd += u64::from(extent.stored),
            Codec::Gzip => contents.gzip += u64::from(extent.stored),
            Codec::Parent => contents.parent += extent.decoded,
        }
    }
    contents
}

fn render(report: &Report) -> String {
    let processes: Vec<String> = report.processes.iter().map(i32::to_string).collect();
    let of_parts: usize = report.parts.iter().map(|part| part.processes).sum();
    let processes =
        if report.parts.is_empty() { processes.join(" ") } else { format!("{of_parts} in all") };
    let facts = [
        ("image", report.image.display().to_string()),
        ("job", report.job.clone()),
        ("command", report.command.join(" ")),
        ("captured", date(report.captured)),
        ("processes", processes),
        ("builds on", report.parent.clone().unwrap_or_else(|| "nothing".into())),
        ("size", Size(report.bytes).to_string()),
    ];
    let mut text = String::new();
    for (what, value) in facts {
        text.push_str(&format!("{what:<10} {}\n", output::harmless(&value)));
    }
    text.push('\n');
    let devices: String = report.devices.iter().map(Devices::render).collect();
    text + &if report.parts.is_empty() { files(report) } else { parts(report) } + &devices
}

fn parts(report: &Report) -> String {
    let mut table = Table::new(&["PART", "PROCESSES", "SIZE"], &[1, 2]);
    for part in &report.parts {
        let cells = [
            output::harmless(&name(&part.image)),
            part.processes.to_string(),
            Size(part.bytes).to_string(),
        ];
        table.row(cells.map(|text| (PLAIN, text)));
    }
    table.render()
}

fn files(report: &Report) -> String {
    let headings = [
        "FILE", "SIZE", "MEMORY", "ZERO", "PARENT", "STATE", "RAW", "LZ4", "ZSTD", "GZIP", "PLAIN",
    ];
    let mut table = Table::new(&headings, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    for file in &report.files {
        let memory = [file.bytes, file.memory, file.zero, file.parent, file.sections];
        let stored = [file.raw, file.lz4, file.zstd, file.gzip, file.plain];
        let numbers = memory.into_iter().chain(stored);
        let name = (PLAIN, output::harmless(&name(file.name.as_ref())));
        let sizes = numbers.map(|bytes| (PLAIN, Size(bytes).to_string()));
        table.row(std::iter::once(name).chain(sizes));
    }
    table.render()
}
