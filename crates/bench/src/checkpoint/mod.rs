//! `kedge bench checkpoint`: what a checkpoint of a job that uses a device costs the program, by
//! its own clock: the pause, the drain behind it, a second one that holds what has changed, the
//! restart; what another program on the same device notices; and the driver's own checkpoint of the
//! same program.

mod image;

use super::process::job::{Job, Taken, Warm};
use crate::figures::{GIB, at};
use image::{durable, empty, room, settle, stored};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_probe::{DriverTimes, Held, Reference, Series};
use kedge_supervisor::kedge_again;
use std::path::Path;
use std::time::SystemTime;

/// Jobs of each size, of large ones, and checkpoints that hold changes of each.
const ROUNDS: usize = 3;
const LARGE: u64 = 8 << 30;
const CHANGES: usize = 3;
/// Has the program measure a rate for one second.
const SECONDS: &str = "rate 1";
/// Most rates that are measured during one drain: then the program rests, and the drain goes on
/// much faster.
const MAX_RATES: usize = 60;
/// Of the blocks.
const CHANGE: &str = "change 5";
/// What the program holds on the host where that is measured, and beside it on the device.
const RESIDENT: u64 = 1 << 30;
/// Most device memory, in bytes, of which the driver's own checkpoint is measured: it puts the
/// bytes into host memory, and no more was tried.
const MAX_DRIVER_SIZE: u64 = 48 << 30;

/// What the bus carries to the host from pinned memory, GiB/s, on an H200.
const BUS: f64 = 51.5;
/// Milliseconds that a program may stand still, and seconds until it has come back, by its bytes.
const PAUSES: [(u64, f64); 3] = [(4 * GIB, 20.0), (16 * GIB, 28.0), (40 * GIB, 45.0)];
const RESTARTS: [(u64, f64); 3] = [(4 * GIB, 0.35), (16 * GIB, 0.6), (40 * GIB, 1.1)];
/// The same of so much that little is left for a snapshot, however it is stored.
const CROWDED_PAUSE: (u64, f64) = (100 * GIB, 1700.0);

/// Seconds of the driver's own checkpoint and restore, by the program's bytes.
const DRIVER_CHECKPOINTS: [(u64, f64); 3] = [(4 * GIB, 2.33), (16 * GIB, 8.30), (40 * GIB, 22.28)];
const DRIVER_RESTORES: [(u64, f64); 3] = [(4 * GIB, 0.85), (16 * GIB, 2.85), (40 * GIB, 6.75)];

/// Returns a figure of the driver's own checkpoint.
const fn by_the_driver(value: f64, what: &'static str) -> Reference {
    let source =
        "cuCheckpointProcess*, one H200, driver 580.159.04, measured 2026-11-20, not paired";
    Reference::new(value, what, source)
}

type Sink<'a> = dyn FnMut(Series) + 'a;

/// Where it is measured.
pub(super) struct Bench<'a> {
    pub(super) gpu: &'a GpuSpec,
    /// For images.
    pub(super) dir: &'a Path,
    /// Whether the driver is to checkpoint a program too.
    pub(super) driver: bool,
}

/// What a job of one size holds and how it is stored: as noise, or so that the disk has room for
/// it.
struct Load {
    held: Held,
    codec: &'static str,
}

impl Bench<'_> {
    /// Measures with `size` bytes on the device and hands over the series.
    pub(super) fn run(&self, size: u64, sink: &mut Sink<'_>) -> Result<(), String> {
        let noise = room(self.dir) > size + size / 4 + RESIDENT;
        let codec = if noise { "raw" } else { "auto" };
        let load = Load { held: held(size, 0, noise)?, codec };
        let mut all = All::default();
        for _ in 0..if size > LARGE { 1 } else { ROUNDS } {
            self.round(&load, &mut all)?;
            empty(self.dir)?;
            // Where the disk is not what it waits for, or it does not take long.
            if size <= LARGE || !noise {
                self.beside(&load, &mut all)?;
                empty(self.dir)?;
            }
            if noise {
                self.resident(&load, &mut all)?;
                empty(self.dir)?;
            }
            self.sunk(size, &mut all)?;
        }
        // There may be no driver that can.
        if self.driver && size <= MAX_DRIVER_SIZE && !matches!(self.gpu, GpuSpec::Soft { .. }) {
            let times = by_driver(&load.held)?;
            all.driver_takes.push(times.lock + times.checkpoint);
            all.driver_brings.push(times.restore + times.unlock);
        }
        all.tell(size, noise, sink);
        Ok(())
    }

    /// One that is to be checkpointed. What a GPU has no room for may take the host's, and not half
    /// of it only.
    fn job(&self, held: &Held, options: &[&str]) -> Result<Job, String> {
        let most = held.device.to_string();
        let options = [options, &["--cache-host", &most]].concat();
        Job::beating(self.gpu, held, self.dir, "a", &options)
    }

    /// One job, from its start to its restart.
    fn round(&self, load: &Load, all: &mut All) -> Result<(), String> {
        let mut job = self.job(&load.held, &["--incremental"])?;
        let before = job.ask(SECONDS)?;
        let (full, meanwhile) = self.first(&mut job, load, all)?;
        let after = job.ask(SECONDS)?;
        all.after.push(after / before);
        // Beats alone differ by some per cent from one time to the next.
        all.drains.push(2.0 * meanwhile / (before + after));
        for _ in 0..CHANGES {
            job.ask(CHANGE)?;
            job.ask("reset")?;
            let taken = job.checkpoint_by(load.codec, &[])?;
            all.changed_pauses.push(job.ask("gap")? * 1e3);
            all.changed_bytes.push(stored(&taken.image)? as f64 / load.held.device as f64);
        }
        all.rests.extend(job.rests()?);
        job.end();
        let (restarted, seconds) = Job::restart(&full.image, &[])?;
        all.restarts.push(seconds);
        restarted.end();
        let _warm = Warm::start(self.gpu)?;
        let (restarted, seconds) = Job::restart(&full.image, &[])?;
        all.warm_restarts.push(seconds);
        restarted.end();
        Ok(())
    }

    /// The first checkpoint of a job, which holds everything, while it beats; and how many a second
    /// while it is drained.
    fn first(&self, job: &mut Job, load: &Load, all: &mut All) -> Result<(Taken, f64), String> {
        job.ask("reset")?;
        let begin = SystemTime::now();
        let taken = job.checkpoint_by(load.codec, &["--wait", "captured"])?;
        // A drain that is over sooner is measured with what comes behind it.
        let mut rates = vec![job.ask(SECONDS)?];
        while rates.len() < MAX_RATES && !durable(&taken.image) {
            rates.push(job.ask(SECONDS)?);
        }
        all.pauses.push(job.ask("gap")? * 1e3);
        job.ask("rest")?;
        all.beaten.push(rates.len() as f64);
        all.durable.push(settle(&taken.image, begin)?);
        Ok((taken, rates.iter().sum::<f64>() / rates.len() as f64))
    }

    /// What another program keeps of its speed while a job on the same device is checkpointed, and
    /// how long it stands still; and how fast the bytes of a program that waits become an image.
    fn beside(&self, load: &Load, all: &mut All) -> Result<(), String> {
        let small = held(1 << 20, 0, true)?;
        let mut job = self.job(&load.held, &[])?;
        let mut other = Job::beating(self.gpu, &small, self.dir, "b", &[])?;
        job.ask("rest")?;
        let alone = other.ask(SECONDS)?;
        other.ask("reset")?;
        other.tell(SECONDS)?;
        let begin = SystemTime::now();
        let taken = job.checkpoint_by(load.codec, &["--wait", "captured"])?;
        all.others.push(other.answer()? / alone);
        all.other_pauses.push(other.ask("gap")? * 1e3);
        other.end();
        let gib = load.held.device as f64 / f64::from(1 << 30);
        all.idle_drains.push(gib / settle(&taken.image, begin)?);
        job.end();
        Ok(())
    }

    /// How fast noise leaves the device, with all that is done to it, where no disk is what it
    /// waits for.
    fn sunk(&self, size: u64, all: &mut All) -> Result<(), String> {
        let held = held(size, 0, true)?;
        let most = size.to_string();
        let options = ["--cache-host", &*most];
        let mut job = Job::beating(self.gpu, &held, self.dir, "c", &options)?;
        job.ask("rest")?;
        let gib = size as f64 / f64::from(1 << 30);
        all.sunk.push(gib / job.measure("raw")?);
        all.left.extend(job.drains()?);
        job.end();
        Ok(())
    }

    /// The pause of a program that holds memory on the host as well.
    fn resident(&self, load: &Load, all: &mut All) -> Result<(), String> {
        let host = RESIDENT.min(load.held.device as u64) as usize;
        let more = Held { host, ..load.held };
        let mut job = self.job(&more, &["--incremental"])?;
        job.ask(SECONDS)?;
        job.ask("reset")?;
        // As users have it: who waits for the capture alone has its memory cloned, not written
        // ahead.
        all.resident_pauses.push(job.gap_beside(load.codec)? * 1e3);
        job.end();
        Ok(())
    }
}

fn held(device: u64, host: usize, noise: bool) -> Result<Held, String> {
    let device = usize::try_from(device).map_err(|_| "--size is more than memory has")?;
    Ok(Held { host, noise, ..Held::noise(device) })
}

/// The driver's own checkpoint of the same program, which beats natively.
fn by_driver(held: &Held) -> Result<DriverTimes, String> {
    let mut program = Job::native(held)?;
    program.ask(SECONDS)?;
    let mut command = kedge_again();
    let output = command.args(["probe", "driver", &program.pid().to_string()]).output();
    let output = output.map_err(|error| format!("cannot start kedge: {error}"))?;
    let said = |_| format!("the driver's own: {}", String::from_utf8_lossy(&output.stderr).trim());
    let times = serde_json::from_slice(&output.stdout).map_err(said)?;
    program.ask("ping")?;
    program.end();
    Ok(times)
}

#[derive(Default)]
struct All {
    pauses: Vec<f64>,
    resident_pauses: Vec<f64>,
    rests: Vec<f64>,
    durable: Vec<f64>,
    idle_drains: Vec<f64>,
    sunk: Vec<f64>,
    left: Vec<f64>,
    beaten: Vec<f64>,
    changed_pauses: Vec<f64>,
    changed_bytes: Vec<f64>,
    restarts: Vec<f64>,
    warm_restarts: Vec<f64>,
    drains: Vec<f64>,
    after: Vec<f64>,
    others: Vec<f64>,
    other_pauses: Vec<f64>,
    driver_takes: Vec<f64>,
    driver_brings: Vec<f64>,
}

impl All {
    /// Tells of jobs of `size` bytes, of noise or else of what the disk has room for.
    fn tell(self, size: u64, noise: bool, sink: &mut Sink<'_>) {
        let stored = if noise { "" } else { " (not noise: the disk has no room)" };
        let named = |what: &str| format!("{what}, {}{stored}", Size(size));
        let lower = |what: &str, unit, samples| Series::lower(named(what), unit, samples);
        let higher = |what: &str, unit, samples| Series::higher(named(what), unit, samples);
        // What is stored with less work is held to no target by size.
        let known = |known: &[(u64, f64)]| at(size, known).filter(|_| noise);
        let takes = known(&DRIVER_CHECKPOINTS)
            .map(|seconds| by_the_driver(seconds * 1e3, "the driver's checkpoint"));
        let brings = || known(&DRIVER_RESTORES).map(|s| by_the_driver(s, "the driver's restore"));
        let pause = known(&PAUSES).or(at(size, &[CROWDED_PAUSE]));
        sink(
            lower("the program's longest pause", "ms", self.pauses).target(pause).reference(takes),
        );
        let resident = "as much on the host, 1 GiB at most: the program's longest pause";
        sink(lower(resident, "ms", self.resident_pauses).target(known(&PAUSES)));
        sink(lower("time to come to rest, before it", "ms", self.rests));
        sink(lower("durable", "s", self.durable));
        let idle = "drain of a program that waits, with all else until it is durable";
        sink(higher(idle, "GiB/s", self.idle_drains));
        let changed = lower("5 % changed: the program's longest pause", "ms", self.changed_pauses);
        sink(changed.target(known(&PAUSES[2..])));
        let drained = "5 % changed: drained, of the device's memory";
        sink(lower(drained, "of 1", self.changed_bytes).target(0.07));
        for (what, samples) in [
            ("restart until the program answers", self.restarts),
            ("restart in a warm proxy until the program answers", self.warm_restarts),
        ] {
            sink(lower(what, "s", samples).target(known(&RESTARTS)).reference(brings()));
        }
        let drain = higher("beats while it is drained", "× before and after", self.drains);
        sink(drain.target(0.97));
        sink(lower("seconds of the drain beside which it beats", "s", self.beaten));
        sink(higher("beats after checkpoints", "× before", self.after).target(0.99));
        let other = "beats of another program on the device meanwhile";
        sink(higher(other, "× alone", self.others));
        sink(lower("another program's longest pause meanwhile", "ms", self.other_pauses));
        sink(lower("the driver's own: checkpoint", "s", self.driver_takes));
        sink(lower("the driver's own: restore", "s", self.driver_brings));
        for (what, samples) in [
            ("drain of a program that waits into a sink that only sums", self.sunk),
            (
                "the same, of what was in device memory at the pause's end, over the time that it \
                 took",
                self.left,
            ),
        ] {
            // Noise, whatever the disk has room for.
            let row = Series::higher(format!("{what}, {}", Size(size)), "GiB/s", samples);
            let sizes = [16, 40, 100].map(|gib| (gib * GIB, 0.9 * BUS));
            sink(row.target(at(size, &sizes)));
        }
    }
}
