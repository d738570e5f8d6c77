//! `kedge verify`.

use super::real;
use crate::Failure;
use crate::events::{Event, Events, EventsArgs};
use crate::output::{self, BAD, GOOD, styled};
use crate::progress::{Progress, Speed};
use clap::Args;
use kedge_control::size::Size;
use kedge_gpu_image::check_places;
use kedge_image::{ImageError, Manifest, State, Verified, catalogue};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

const AFTER_HELP: &str = "\
Every byte is read, on all cores: of the image and of those that it builds on. Exits with 1 if \
any is damaged; a line for each place that is names the file and the offset.

Examples:
  kedge verify nightly-0003
  kedge verify /scratch/images      every finished image there";

/// Read checkpoint images and compare every checksum
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct VerifyArgs {
    /// An image, or a folder of images: a path, or a name in the folder where images go by default
    #[arg(value_name = "IMAGE|DIR")]
    path: PathBuf,
    /// Print a JSON list of objects: image, good, images (itself and those that it builds on),
    /// files, bytes (that were read), seconds, errors (objects: path, offset, what)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    events: EventsArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    image: PathBuf,
    good: bool,
    images: usize,
    files: usize,
    bytes: u64,
    seconds: f64,
    errors: Vec<Damage>,
}

#[derive(Debug, Serialize)]
struct Damage {
    path: Option<PathBuf>,
    offset: Option<u64>,
    what: String,
}

pub(crate) fn run(args: &VerifyArgs) -> Result<ExitCode, Failure> {
    let mut good = true;
    let mut reports = Vec::new();
    let (shown, events) = (Progress::new(""), args.events.open()?);
    for folder in folders(&real(&args.path)?)? {
        let report = verify(folder, &shown, &events);
        shown.clear();
        good &= report.good;
        match args.json {
            true => reports.push(report),
            // As they come: a large image takes a while.
            false => output::print(&render(&report))?,
        }
    }
    if args.json {
        output::json(&reports)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// `path` if it is an image, else those in it that count or should.
fn folders(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let Err(error @ ImageError::NoImage { .. }) = Manifest::read(path) else {
        return Ok(vec![path.to_owned()]);
    };
    let counts = |state: &State| matches!(state, State::Finished(_) | State::Damaged(_));
    let all = catalogue(path)?.into_iter().filter(|found| counts(&found.state));
    let all: Vec<PathBuf> = all.map(|found| found.folder).collect();
    if all.is_empty() { Err(error.into()) } else { Ok(all) }
}

fn verify(image: PathBuf, shown: &Progress, events: &Events) -> Report {
    let begin = Instant::now();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    let (name, speed) = (output::harmless(&name), Speed::new());
    let mut tell = |done, all| {
        events.tell(&Event::Verifying { image: &image, done, bytes: all });
        shown.show(&format!("reading {name}: {}…", speed.of(done, Some(all))));
    };
    let verified = kedge_image::verify_telling(&image, threads, &mut tell);
    let verified = verified.and_then(|good| check_places(&image).map(|()| good));
    let (verified, errors) = match verified {
        Ok(verified) => (verified, Vec::new()),
        Err(errors) => (Verified::default(), errors.iter().map(damage).collect()),
    };
    let Verified { images, files, bytes, .. } = verified;
    let (seconds, good) = (begin.elapsed().as_secs_f64(), errors.is_empty());
    events.tell(&Event::Verified { image: &image, good, bytes, seconds });
    Report { image, good, images, files, bytes, seconds, errors }
}

fn damage(error: &ImageError) -> Damage {
    let what = error.to_string();
    match error {
        ImageError::Damaged { path, offset, .. } => {
            Damage { path: Some(path.clone()), offset: Some(*offset), what }
        }
        ImageError::Io { path, .. } => Damage { path: Some(path.clone()), offset: None, what },
        _ => Damage { path: None, offset: None, what },
    }
}

fn render(report: &Report) -> String {
    let image = output::harmless(&report.image.display().to_string());
    if report.good {
        let (files, bytes) = (report.files, Size(report.bytes));
        let (good, seconds) = (styled(GOOD, "good"), report.seconds);
        return format!("{good}  {image}: {files} files, {bytes}, read in {seconds:.1} s\n");
    }
    let mut text = format!("{}  {image}\n", styled(BAD, "damaged"));
    for error in &report.errors {
        text.push_str(&format!("  {}\n", output::harmless(&error.what)));
    }
    text
}
