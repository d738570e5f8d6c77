//! `kedge bench checkpoint`: what a checkpoint of a job that uses a device costs the program, by its own clock:
//! the pause, the drain behind it, a second one that holds what has changed, the restart; and what another
//! program on the same device notices.

pub(super) mod known;

use super::codecs::Scratch;
use super::process::job::{Job, Taken, Warm};
use crate::size::Size;
use kedge_image::{Codec, ImageFile, Manifest};
use kedge_probe::Series;
use kedge_proxy::backend::GpuSpec;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Jobs of each size, and checkpoints that hold changes of each.
const ROUNDS: usize = 3;
/// Seconds that a rate is measured for.
const SECONDS: &str = "rate 1";
/// Of the blocks.
const CHANGE: &str = "change 5";
/// An image is durable within this.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) const PAUSE: &str = "the program's longest pause";
pub(super) const REST: &str = "time to come to rest, before it";
pub(super) const CHANGED_PAUSE: &str = "5 % changed: the program's longest pause";
pub(super) const CHANGED_BYTES: &str = "5 % changed: drained, of the device's memory";
pub(super) const DRAIN: &str = "beats while it is drained";
pub(super) const AFTER: &str = "beats after checkpoints";
pub(super) const OTHER: &str = "beats of another program on the device meanwhile";
pub(super) const RESTART: &str = "restart until the program answers";
pub(super) const RESTART_WARM: &str = "restart in a warm proxy until the program answers";
pub(super) const DURABLE: &str = "durable";

type Sink<'a> = dyn FnMut(Series) + 'a;

/// Measures with `size` bytes on the device and hands over each series as it is done.
pub(super) fn run(
    gpu: &GpuSpec,
    size: u64,
    dir: Option<&Path>,
    sink: &mut Sink<'_>,
) -> Result<(), String> {
    let folder = Scratch::new(dir)?;
    let mut all = All::default();
    for _ in 0..ROUNDS {
        all.round(gpu, size, &folder.0)?;
        empty(&folder.0)?;
    }
    all.others.push(beside(gpu, size, &folder.0)?);
    let series = [
        (PAUSE, "ms", all.pauses),
        (REST, "ms", all.rests),
        (DURABLE, "s", all.durable),
        (CHANGED_PAUSE, "ms", all.changed_pauses),
        (CHANGED_BYTES, "of 1", all.changed_bytes),
        (RESTART, "s", all.restarts),
        (RESTART_WARM, "s", all.warm_restarts),
        (DRAIN, "× alone", all.drains),
        (AFTER, "× before", all.after),
        (OTHER, "× alone", all.others),
    ];
    for (name, unit, samples) in series {
        let name = format!("{name}, {}", Size(size));
        sink(Series { name, unit: unit.into(), samples });
    }
    Ok(())
}

#[derive(Default)]
struct All {
    pauses: Vec<f64>,
    rests: Vec<f64>,
    durable: Vec<f64>,
    changed_pauses: Vec<f64>,
    changed_bytes: Vec<f64>,
    restarts: Vec<f64>,
    warm_restarts: Vec<f64>,
    drains: Vec<f64>,
    after: Vec<f64>,
    others: Vec<f64>,
}

impl All {
    /// One job, from its start to its restart.
    fn round(&mut self, gpu: &GpuSpec, size: u64, dir: &Path) -> Result<(), String> {
        let mut job = Job::beating(gpu, size, dir, "a", &["--incremental"])?;
        let before = job.ask(SECONDS)?;
        let first = self.first(&mut job)?;
        settle(&first)?;
        self.after.push(job.ask(SECONDS)? / before);
        for _ in 0..ROUNDS {
            job.ask(CHANGE)?;
            job.ask("reset")?;
            let taken = job.checkpoint(&[])?;
            self.changed_pauses.push(job.ask("gap")? * 1e3);
            self.changed_bytes.push(stored(&taken.image)? as f64 / size as f64);
        }
        let alone = job.ask(SECONDS)?;
        // A drain that is over sooner is measured with what comes behind it.
        let draining = job.checkpoint(&["--full", "--wait", "captured"])?;
        self.drains.push(job.ask(SECONDS)? / alone);
        settle(&draining)?;
        self.rests.extend(job.rests()?);
        job.end();
        let (restarted, seconds) = Job::restart(&draining.image, &[])?;
        self.restarts.push(seconds);
        restarted.end();
        let _warm = Warm::start(gpu)?;
        let (restarted, seconds) = Job::restart(&draining.image, &[])?;
        self.warm_restarts.push(seconds);
        restarted.end();
        Ok(())
    }

    /// The first checkpoint of a job, while it beats.
    fn first(&mut self, job: &mut Job) -> Result<Taken, String> {
        job.ask("reset")?;
        let taken = job.checkpoint(&[])?;
        self.pauses.push(job.ask("gap")? * 1e3);
        self.durable.push(taken.seconds.ok_or("the image did not become durable")?);
        Ok(taken)
    }
}

/// The part of its speed that another program keeps while a job on the same device is checkpointed.
fn beside(gpu: &GpuSpec, size: u64, dir: &Path) -> Result<f64, String> {
    let job = Job::beating(gpu, size, dir, "a", &[])?;
    let mut other = Job::beating(gpu, 1 << 20, dir, "b", &[])?;
    let alone = other.ask(SECONDS)?;
    other.tell(SECONDS)?;
    let taken = job.checkpoint(&["--wait", "captured"])?;
    let with = other.answer()?;
    settle(&taken)?;
    other.end();
    job.end();
    Ok(with / alone)
}

/// Returns when the image is one.
fn settle(taken: &Taken) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    while Manifest::read(&taken.image).is_err() {
        if Instant::now() > end {
            return Err(format!("{} does not become durable", taken.image.display()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Bytes of the devices' memory that the image holds itself.
fn stored(image: &Path) -> Result<u64, String> {
    let manifest = Manifest::read(image).map_err(|error| error.to_string())?;
    let files = manifest.files.iter().filter(|file| file.name.starts_with("gpu-"));
    let mut bytes = 0;
    for entry in files {
        let file = ImageFile::open(&image.join(&entry.name), Some(entry));
        let file = file.map_err(|error| error.to_string())?;
        let own = file.memory().filter(|extent| extent.codec != Codec::Parent);
        bytes += own.map(|extent| extent.decoded).sum::<u64>();
    }
    Ok(bytes)
}

/// Removes the images of a round.
fn empty(dir: &Path) -> Result<(), String> {
    let entries = fs::read_dir(dir).map_err(|error| error.to_string())?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.try_for_each(fs::remove_dir_all).map_err(|error| error.to_string())
}
