//! Checkpoint images: listed here; inspected, verified and removed in the modules below.

mod contents;
mod devices;
pub(crate) mod inspect;
pub(crate) mod prune;
pub(crate) mod rm;
pub(crate) mod verify;

use crate::Failure;
use crate::output::{self, BAD, DIM, FAIR, GOOD, PLAIN, Table};
use anstyle::Style;
use clap::Args;
use kedge_control::joblog;
use kedge_control::size::Size;
use kedge_image::{Found, ImageError, Manifest, State, catalogue};
use kedge_supervisor::jobs::{self, JobName, Jobs};
use kedge_supervisor::policy;
use serde::Serialize;
use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

const AFTER_HELP: &str = "\
STATE is one of
  finished    it counts; `kedge verify` reads all of it
  held        likewise, and what it has of the devices is in memory too: its job goes back sooner
  cached      likewise, but not all of it is on a disk below the write-back cache that it is on: it
              may be lost with this node (`kedge cache drain` waits for that)
  partner     likewise, but another node has what is not there: it survives the loss of this one
              (`kedge cache recover --partner` on the other one)
  damaged     its manifest is no good
  writing     a checkpoint that has not ended
  unfinished  what a checkpoint left that did not come to its end; `kedge rm` removes it

Examples:
  kedge images                     those in the folder where images go by default
  kedge images /scratch/images     those in another";

/// List checkpoint images, the newest first
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ImagesArgs {
    /// The folder that holds the images
    /// [default: $XDG_STATE_HOME/kedge/images, else ~/.local/state/kedge/images]
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print a JSON list of objects: image (its path), state, job, command, captured (seconds since
    /// 1970), processes (how many), bytes, parent (the image that it builds on), error, held (until
    /// when it is in memory too, seconds since 1970), undrained (bytes that a write-back cache
    /// has and no disk below), alone (those of them that no partner has either)
    #[arg(long)]
    json: bool,
    /// List nothing, but have a running job let go of what it holds in memory
    #[arg(long, value_name = "JOB", conflicts_with = "json")]
    release: Option<JobName>,
}

/// An image, flat, as scripts like it.
#[derive(Debug, Default, Serialize)]
struct Row {
    image: PathBuf,
    state: &'static str,
    job: Option<String>,
    command: Vec<String>,
    captured: Option<u64>,
    processes: Option<usize>,
    bytes: Option<u64>,
    parent: Option<String>,
    error: Option<String>,
    held: Option<u64>,
    undrained: Option<u64>,
    alone: Option<u64>,
}

/// Has a job let go of what it holds.
fn release(job: &JobName) -> Result<(), Failure> {
    let jobs = Jobs::open()?;
    if jobs.held(job).is_none() {
        return Err(Failure::new(format!("the job {job} holds nothing: `kedge ps --json` tells")));
    }
    let (on_devices, in_memory) =
        kedge_supervisor::release(&jobs, job).map_err(|error| Failure::new(error.to_string()))?;
    let (devices, memory) = (Size(on_devices), Size(in_memory));
    Ok(output::print(&format!("{devices} on devices and {memory} in host memory\n"))?)
}

/// The images of running jobs that are held in memory, and until when.
fn held() -> HashMap<PathBuf, u64> {
    let jobs = Jobs::open().ok();
    let metas = jobs.iter().flat_map(|jobs| jobs.list().unwrap_or_default());
    let running = metas.filter(|meta| meta.state == jobs::State::Running);
    let held = running.filter_map(|meta| jobs.as_ref()?.held(&meta.name.parse().ok()?));
    held.map(|held| (held.image, held.until)).collect()
}

pub(crate) fn run(args: &ImagesArgs) -> Result<(), Failure> {
    if let Some(job) = &args.release {
        return release(job);
    }
    let found = match &args.dir {
        Some(dir) => catalogue(&real(dir)?)?,
        // Nobody has made an image yet, so there need not be such a folder.
        None => match policy::default_dir()? {
            dir if dir.exists() => catalogue(&dir)?,
            _ => Vec::new(),
        },
    };
    let held = held();
    let rows: Vec<Row> = found.into_iter().map(|found| held_as(row(found), &held)).collect();
    if args.json {
        return Ok(output::json(&rows)?);
    }
    let headings = ["IMAGE", "STATE", "CAPTURED", "PROCESSES", "SIZE", "COMMAND"];
    let mut table = Table::new(&headings, &[3, 4]);
    for row in rows {
        let words = output::harmless(&row.command.join(" "));
        table.row([
            (PLAIN, output::harmless(&name(&row.image))),
            (style(row.state), row.state.to_owned()),
            (PLAIN, row.captured.map(date).unwrap_or_default()),
            (PLAIN, row.processes.map(|count| count.to_string()).unwrap_or_default()),
            (PLAIN, row.bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default()),
            (PLAIN, row.error.map(|error| output::harmless(&error)).unwrap_or(words)),
        ]);
    }
    Ok(output::print(&table.render())?)
}

fn row(found: Found) -> Row {
    // First: what is drained meanwhile is no more on this node alone.
    let alone = kedge_image::alone(&found.folder);
    let undrained = Some(kedge_image::undrained(&found.folder)).filter(|bytes| *bytes > 0);
    let alone = undrained.map(|_| alone);
    let empty = Row { image: found.folder, ..Row::default() };
    match found.state {
        State::Finished(manifest) => Row {
            state: match alone {
                None => "finished",
                Some(0) => "partner",
                Some(_) => "cached",
            },
            undrained,
            alone,
            bytes: Some(manifest.bytes()),
            processes: Some(manifest.process_count()),
            job: Some(manifest.job),
            command: manifest.command,
            captured: Some(manifest.captured),
            parent: manifest.parent.map(|parent| parent.name),
            ..empty
        },
        State::Damaged(error) => Row { state: "damaged", error: Some(error.to_string()), ..empty },
        State::Writing => Row { state: "writing", ..empty },
        State::Unfinished => Row { state: "unfinished", ..empty },
    }
}

/// That image where these are held. One that may be lost with this node is told as that first.
fn held_as(row: Row, held: &HashMap<PathBuf, u64>) -> Row {
    let until = held.get(&row.image).copied();
    match row.state {
        "finished" if until.is_some() => Row { state: "held", held: until, ..row },
        "cached" | "partner" => Row { held: until, ..row },
        _ => row,
    }
}

fn style(state: &str) -> Style {
    match state {
        "finished" | "held" | "partner" => GOOD,
        "damaged" => BAD,
        "writing" | "cached" => FAIR,
        _ => DIM,
    }
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Seconds since 1970, as a date and time in UTC.
pub(crate) fn date(seconds: u64) -> String {
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH);
    let text = joblog::timestamp(at);
    format!("{}Z", text.split('.').next().unwrap_or_default())
}

/// `path` without links and dots; an image that is not there by that name may lie in the folder
/// where images go by default.
pub(crate) fn real(path: &Path) -> Result<PathBuf, Failure> {
    let bad = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(format!(
            "{}: there is no such image or folder: `kedge images` lists the images that there are",
            path.display()
        )),
        _ => Failure::new(format!("{}: {error}", path.display())),
    };
    match path.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bare(path).and_then(by_default).ok_or_else(|| bad(error))
        }
        other => other.map_err(bad),
    }
}

/// What `path` says where it is one word, and no way through folders.
fn bare(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    let word = path.components().count() == 1 && !name.contains('/');
    (word && name != "." && name != "..").then_some(name)
}

/// The image of that name in the folder where images go by default.
fn by_default(name: &str) -> Option<PathBuf> {
    policy::default_dir().ok()?.join(name).canonicalize().ok()
}

/// What is to be restarted, without links and dots: an image or a folder of images; for one word
/// also an image in the folder where images go by default, or the newest image of the job of that
/// name.
pub(crate) fn to_restart(given: &Path) -> Result<PathBuf, Failure> {
    let Some(name) = bare(given) else { return real(given) };
    // A program or a folder of sources often has the job's name. What is an image, or holds one, is
    // meant, also where it cannot be used: another would be somebody else's program.
    if given.is_dir() && !matches!(kedge_image::newest(given), Err(ImageError::NoImage { .. })) {
        return real(given);
    }
    let of_job = || name.parse().ok().and_then(|job| newest_of(&job));
    if let Some(found) = by_default(name).or_else(of_job) {
        return Ok(found);
    }
    if given.exists() {
        return real(given);
    }
    let known = name.parse().ok().and_then(|job| Jobs::open().ok()?.find(&job));
    Err(Failure::new(match known {
        Some(_) => format!(
            "the job {name} has no image: `kedge checkpoint {name}` makes one while it runs, and \
             `kedge restart DIR` takes images from another folder"
        ),
        None => format!(
            "there is no image and no job `{name}`: `kedge images` lists images, and `kedge ps --all` jobs"
        ),
    }))
}

/// The newest image of a job, in the folder where the job's images go. It belongs to this user:
/// others may write to that folder, and put an image of the same job's name there.
fn newest_of(job: &JobName) -> Option<PathBuf> {
    let known = Jobs::open().ok().and_then(|jobs| jobs.find(job));
    let dir = known.and_then(|meta| meta.policy?.dir).or_else(|| policy::default_dir().ok())?;
    let images = kedge_image::list(&dir).ok()?;
    let user = rustix::process::geteuid().as_raw();
    let is_own = |folder: &Path| folder.symlink_metadata().is_ok_and(|it| it.uid() == user);
    let is_of_job = |(folder, manifest): &(PathBuf, Manifest)| {
        manifest.job == job.to_string() && is_own(folder)
    };
    images.into_iter().find(is_of_job)?.0.canonicalize().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_told_of_images_of_any_disk() {
        let held = HashMap::from([(PathBuf::from("a"), 7)]);
        let told = |image: &str, state| {
            let row = held_as(Row { image: image.into(), state, ..Row::default() }, &held);
            (row.state, row.held)
        };
        assert_eq!(told("a", "finished"), ("held", Some(7)));
        assert_eq!(told("a", "cached"), ("cached", Some(7)));
        assert_eq!(told("a", "partner"), ("partner", Some(7)));
        assert_eq!(told("a", "damaged"), ("damaged", None));
        assert_eq!(told("b", "finished"), ("finished", None));
        assert_eq!(told("b", "cached"), ("cached", None));
    }
}
