//! `kedge bench managed`: what managed memory costs a program, by turns with the same program
//! without, and with copies of the same bytes.

use super::process::job::Job;
use super::scratch::Scratch;
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_probe::{Reference, Series};
use std::path::Path;

/// Bytes of managed memory, unless told otherwise.
pub(super) const SIZE: u64 = 4 << 30;
/// Rounds of each figure.
const ROUNDS: usize = 9;
/// Rounds of figures that take longer.
const SLOW_ROUNDS: usize = 5;
/// Launches whose cost is each one's; first touches of which the median is taken.
const POSTS: usize = 64;
const TOUCHES: usize = 200;
/// Bytes of a walk, and of a copy that it is compared with.
const WALK: u64 = 64 << 20;
/// Bytes that a device has beside those.
const BESIDE: u64 = 128 << 20;
/// The device of the vectors has this part of the size.
const LESS: u64 = 16;
/// Least memory of the device of the vectors, in bytes.
const MIN_QUOTA: u64 = 64 << 20;
const PAGE: f64 = 4096.0;

const POST: &str = "post a launch with nothing touched, beyond a plain one";
const ONE_PERCENT: &str = "launch with 1 % touched, beyond its bytes over the bus";
const ONE_READ: &str = "first touch of a page by the host, read";
const ONE_WRITE: &str = "first touch of a page by the host, write";
const DOT: &str = "dot product of twice the quota";
const PAUSE: &str = "pause of a checkpoint with twice the quota in use";

/// A checkpoint of a dot product of 32 GB on a GPU.
const CRUM: Reference =
    Reference::new(4.1, "CRUM, forked", "CRUM, table II, of a dot product of 32 GB on a GPU");
/// Microseconds of a first touch, by a handler that sleeps, as kedge's does.
const TOUCH: f64 = 45.0;

type Sink<'a> = &'a mut dyn FnMut(Series);

/// Where it is measured: devices, or this machine's own driver.
pub(super) struct Bench<'a> {
    pub(super) gpu: Option<&'a GpuSpec>,
    pub(super) size: u64,
    /// For images.
    pub(super) dir: Option<&'a Path>,
}

impl Bench<'_> {
    pub(super) fn run(&self, sink: Sink<'_>) -> Result<(), String> {
        let mut turns = Turns {
            plain: self.job("plain", self.size + BESIDE, &[])?,
            managed: self.job("managed", self.size + BESIDE, &[])?,
            size: Size(self.size),
        };
        turns.allocations(sink)?;
        turns.launches(sink)?;
        turns.touched(sink)?;
        turns.touches(sink)?;
        turns.walks(sink)?;
        turns.end();
        self.vectors(sink)
    }

    /// The program that obeys, which may have so much memory of this machine's devices.
    fn job(&self, tag: &str, memory: u64, options: &[&str]) -> Result<Job, String> {
        const PROBE: &str = "managed";
        let memory = memory.to_string();
        match self.gpu {
            None => Job::obeying_natively(PROBE),
            Some(gpu @ (GpuSpec::Soft { .. } | GpuSpec::Local { .. })) => {
                let soft = matches!(gpu, GpuSpec::Soft { .. });
                let quota = if soft { "--soft-memory" } else { "--gpu-memory" };
                let options = [options, &[quota, &memory]].concat();
                Job::obeying(gpu, PROBE, tag, &options)
            }
            Some(gpu) => Job::obeying(gpu, PROBE, tag, options),
        }
    }

    /// Twice as much as the device has.
    fn vectors(&self, sink: Sink<'_>) -> Result<(), String> {
        if !matches!(self.gpu, Some(GpuSpec::Soft { .. } | GpuSpec::Local { .. })) {
            eprintln!("left out: {DOT}: the device's memory is not limited here");
            return Ok(());
        }
        let quota = (self.size / LESS).max(MIN_QUOTA);
        let folder = Scratch::new(self.dir)?;
        let dir = folder.0.display().to_string();
        let mut job = self.job("vectors", quota, &["--ckpt-dir", &dir])?;
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        let (fits, over, copy) = (quota / 2, 2 * quota, quota / 4);
        job.ask(&format!("vectors {fits}"))?;
        let near = times(SLOW_ROUNDS, || job.ask("dot"))?;
        let near: Vec<f64> = near.into_iter().map(|seconds| gigabytes(fits) / seconds).collect();
        job.ask(&format!("vectors {over}"))?;
        let [mut firsts, mut rates, mut of_bus, mut pauses] = <[Vec<f64>; 4]>::default();
        for _ in 0..SLOW_ROUNDS {
            let bus = gigabytes(copy) / job.ask(&format!("bus {copy}"))?;
            // The memory of these copies took the place of some of the vectors, which come back.
            firsts.push(gigabytes(over) / job.ask("dot")?);
            let rate = gigabytes(over) / job.ask("dot")?;
            rates.push(rate);
            of_bus.push(rate / bus);
            let taken = job.checkpoint(&[])?;
            pauses.push(taken.stall_seconds);
            std::fs::remove_dir_all(taken.image).map_err(|error| error.to_string())?;
        }
        job.ask("dot")?;
        job.end();
        let named = |name: &str| format!("{name}, {} on the device", Size(quota));
        sink(Series::higher(named("dot product of what the device has room for"), "GB/s", near));
        sink(Series::higher(named(&format!("{DOT}, after other memory")), "GB/s", firsts));
        sink(Series::higher(named(DOT), "GB/s", rates));
        let beside = named(&format!("{DOT}, beside copies"));
        sink(Series::higher(beside, "of the bus", of_bus).target(0.85));
        sink(Series::lower(named(PAUSE), "s", pauses).target(0.1).reference(CRUM));
        Ok(())
    }
}

/// The same program with and without managed memory.
struct Turns {
    plain: Job,
    managed: Job,
    size: Size,
}

impl Turns {
    fn named(&self, name: &str) -> String {
        format!("{name}, {}", self.size)
    }

    /// Leaves the memory there.
    fn allocations(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let [mut makes, mut frees] = <[Vec<f64>; 2]>::default();
        let hold = format!("hold {}", self.size.0);
        for _ in 0..SLOW_ROUNDS {
            makes.push(self.managed.ask(&hold)? * 1e3);
            // Used once, as memory is.
            self.managed.ask("launch")?;
            frees.push(self.managed.ask("free")? * 1e3);
        }
        self.managed.ask(&hold)?;
        sink(Series::lower(self.named("allocate managed memory"), "ms", makes));
        sink(Series::lower(self.named("free managed memory"), "ms", frees));
        Ok(())
    }

    /// Has both do the same, in another order every other round: seconds without and with.
    fn both(&mut self, order: &str, round: usize) -> Result<[f64; 2], String> {
        let mut seconds = [0.0; 2];
        for which in [round % 2, 1 - round % 2] {
            let job = if which == 0 { &mut self.plain } else { &mut self.managed };
            seconds[which] = job.ask(order)?;
        }
        Ok(seconds)
    }

    fn launches(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let [mut plain, mut managed, mut beyond] = <[Vec<f64>; 3]>::default();
        self.both("launch", 0)?;
        for round in 0..ROUNDS {
            let [without, with] = self.both(&format!("post {POSTS}"), round)?;
            plain.push(without * 1e6);
            managed.push(with * 1e6);
            beyond.push((with - without) * 1e6);
        }
        sink(Series::lower("post a launch without managed memory", "µs", plain));
        sink(Series::lower(self.named("post a launch with nothing touched"), "µs", managed));
        sink(Series::lower(self.named(POST), "µs", beyond).target(1.0));
        Ok(())
    }

    fn touched(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let pages = self.managed.ask("pages 1")?;
        let bytes = (pages * PAGE) as u64;
        let [mut launches, mut beyond] = <[Vec<f64>; 2]>::default();
        for _ in 0..SLOW_ROUNDS {
            let bus = self.managed.ask(&format!("bus {bytes}"))?;
            let idle = self.managed.ask("launch")?;
            let seconds = self.managed.ask("touched 1")?;
            launches.push(seconds * 1e3);
            beyond.push((seconds - idle - bus) * 1e3);
        }
        sink(Series::lower(self.named("launch with 1 % touched, and its end"), "ms", launches));
        sink(Series::lower(self.named(ONE_PERCENT), "ms", beyond).target(1.0));
        Ok(())
    }

    fn touches(&mut self, sink: Sink<'_>) -> Result<(), String> {
        for (name, order) in [(ONE_READ, "touch-read"), (ONE_WRITE, "touch-write")] {
            let order = format!("{order} {TOUCHES}");
            let seconds = times(ROUNDS, || self.managed.ask(&order))?;
            let micros = seconds.into_iter().map(|s| s * 1e6).collect();
            sink(Series::lower(name, "µs", micros).target(TOUCH));
        }
        Ok(())
    }

    fn walks(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let bytes = WALK.min(self.size.0);
        for (way, order) in [("read", "walk-read"), ("written", "walk-write")] {
            let [mut rates, mut ratios] = <[Vec<f64>; 2]>::default();
            for _ in 0..SLOW_ROUNDS {
                let memcpy = self.managed.ask(&format!("memcpy {bytes}"))?;
                let walk = self.managed.ask(&format!("{order} {bytes}"))?;
                rates.push(bytes as f64 / 1e9 / walk);
                ratios.push(memcpy / walk);
            }
            let name = format!("{} in a row by the host, {way}", Size(bytes));
            sink(Series::higher(name.clone(), "GB/s", rates));
            sink(Series::higher(name, "of memcpy", ratios).target(0.8));
        }
        Ok(())
    }

    fn end(self) {
        self.plain.end();
        self.managed.end();
    }
}

/// The answers of so many rounds.
fn times(rounds: usize, mut ask: impl FnMut() -> Result<f64, String>) -> Result<Vec<f64>, String> {
    (0..rounds).map(|_| ask()).collect()
}
