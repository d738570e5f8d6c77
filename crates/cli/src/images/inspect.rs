//! `kedge inspect`.

use super::contents::{Contents, Inside, Total};
use super::devices::Devices;
use super::{date, name, real};
use crate::Failure;
use crate::output::{self, PLAIN, Table};
use clap::Args;
use kedge_control::size::Size;
use kedge_image::{Manifest, newest};
use serde::Serialize;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
MEMORY is what its processes had; ZERO, the part of it that is all zeros and not stored; PARENT, \
the part that is as in the image that this one builds on; FORKED, the part that the file of \
another process stores, with which it is shared since a fork. The other columns are bytes in the \
file, by how they are stored; PLAIN, the contents of open files and pipes. Below, for each \
process that had devices: what it had on them, and what a restart makes anew there. Of a job of \
several parts, all of that for each part, and the sums.

Tables are read and checked, contents are not: that is what `kedge verify` does.";

/// Show what is in a checkpoint image
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct InspectArgs {
    /// An image, or a folder of images for the newest of them: a path, or a name in the folder
    /// where images go by default
    #[arg(value_name = "IMAGE|DIR")]
    image: PathBuf,
    /// Print a JSON object: image, version, job, command, captured (seconds since 1970), processes
    /// (their ids), parent, bytes, files (objects: name, bytes, memory, zero, sections, raw, lz4,
    /// zstd, gzip, parent, plain), devices (of a process: pid, program, gpu, devices, memory: kind,
    /// count, bytes, zero, raw, packed, parent; made: names and numbers), total (files and devices,
    /// added up), parts (of a job of several, which are images: image, processes, parent, bytes,
    /// files, devices)
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
    total: Total,
    parts: Vec<PartReport>,
}

/// A part of a job of several: an image.
#[derive(Debug, Serialize)]
struct PartReport {
    image: PathBuf,
    processes: usize,
    parent: Option<String>,
    bytes: u64,
    files: Vec<Contents>,
    devices: Vec<Devices>,
}

/// An image, as it is found.
struct Found {
    image: PathBuf,
    manifest: Manifest,
    inside: Inside,
}

impl Found {
    fn of(image: PathBuf, manifest: Manifest) -> Result<Found, Failure> {
        let inside = Inside::of(&image, &manifest)?;
        Ok(Found { image, manifest, inside })
    }

    fn parent(&self) -> Option<String> {
        self.manifest.parent.as_ref().map(|parent| parent.place().display().to_string())
    }

    fn part(self) -> PartReport {
        PartReport {
            processes: self.manifest.process_count(),
            parent: self.parent(),
            bytes: self.manifest.bytes(),
            files: self.inside.files,
            devices: self.inside.devices,
            image: self.image,
        }
    }
}

pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let (image, manifest) = newest(&real(&args.image)?)?;
    let mut parts = Vec::new();
    for part in &manifest.parts {
        let folder = part.check(&image)?;
        let manifest = Manifest::read(&folder)?;
        parts.push(Found::of(folder, manifest)?);
    }
    let whole = Found::of(image, manifest)?;
    match args.json {
        true => Ok(output::json(&report(whole, parts))?),
        false => Ok(output::print(&render(&whole, &parts))?),
    }
}

fn total(whole: &Found, parts: &[Found]) -> Total {
    Total::of([whole].into_iter().chain(parts).map(|found| &found.inside))
}

fn report(whole: Found, parts: Vec<Found>) -> Report {
    let (total, parent) = (total(&whole, &parts), whole.parent());
    let Found { image, manifest, inside } = whole;
    Report {
        image,
        bytes: manifest.bytes(),
        version: manifest.version,
        job: manifest.job,
        command: manifest.command,
        captured: manifest.captured,
        processes: manifest.processes,
        parent,
        files: inside.files,
        devices: inside.devices,
        total,
        parts: parts.into_iter().map(Found::part).collect(),
    }
}

fn render(whole: &Found, parts: &[Found]) -> String {
    let mut text = facts(whole);
    text.push('\n');
    if parts.is_empty() {
        return text + &whole.inside.render();
    }
    text.push_str(&overview(parts));
    for part in parts {
        text.push_str(&format!("\npart {}\n", output::harmless(&name(&part.image))));
        text.push_str(&part.inside.render());
    }
    text + "\nall parts\n" + &total(whole, parts).render()
}

fn facts(found: &Found) -> String {
    let manifest = &found.manifest;
    let processes: Vec<String> = manifest.processes.iter().map(i32::to_string).collect();
    let processes = match manifest.parts.is_empty() {
        true => processes.join(" "),
        false => format!("{} in all", manifest.process_count()),
    };
    let facts = [
        ("image", found.image.display().to_string()),
        ("job", manifest.job.clone()),
        ("command", manifest.command.join(" ")),
        ("captured", date(manifest.captured)),
        ("processes", processes),
        ("builds on", found.parent().unwrap_or_else(|| "nothing".into())),
        ("size", Size(manifest.bytes()).to_string()),
    ];
    let line = |(what, value): (&str, String)| format!("{what:<10} {}\n", output::harmless(&value));
    facts.map(line).concat()
}

fn overview(parts: &[Found]) -> String {
    let mut table = Table::new(&["PART", "PROCESSES", "SIZE", "BUILDS ON"], &[1, 2]);
    for part in parts {
        let cells = [
            output::harmless(&name(&part.image)),
            part.manifest.process_count().to_string(),
            Size(part.manifest.bytes()).to_string(),
            output::harmless(&part.parent().unwrap_or_else(|| "nothing".into())),
        ];
        table.row(cells.map(|text| (PLAIN, text)));
    }
    table.render()
}
