//! `kedge bench migrate`: what a move of its devices costs a program, by the program's own clock.

mod iterations;
mod record;

use super::far::{Server, line_to, serve};
use super::parts::{Part, wanted};
use super::process::job::Job;
use crate::figures::{GIB, at};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_probe::{Held, Series};
use kedge_remote::{MeasureError, Measuring};
use std::path::Path;
use std::time::Duration;

/// Bytes on the device, unless told otherwise.
pub(super) const SIZE: u64 = 1 << 30;
/// Moves of each kind.
const ROUNDS: usize = 5;
/// Of the memory, per cent that change a second.
const CHANGING: &str = "changing 1";
/// Regions, and the bytes of each.
const REGIONS: usize = 10_000;
const REGION: usize = 4 << 10;
/// For a program to run before it is moved.
const SETTLES: Duration = Duration::from_millis(500);

const REGIONS_FIGURE: &str = "move of 10,000 regions of 4 KiB beside one of as many bytes";
const BESIDE: &str = "beats while it moves, 1 Gbit/s at most";
/// That rate, and moves at it.
const RATE: [&str; 2] = ["--rate", "119M"];
const SLOWLY: usize = 2;

/// A program that is moved.
pub(super) struct Bench<'a> {
    near: &'a GpuSpec,
    far: GpuSpec,
    dir: &'a Path,
    size: u64,
    /// Of the server.
    _server: Option<Server>,
}

type Sink<'a> = &'a mut dyn FnMut(Series);

impl<'a> Bench<'a> {
    /// Moves to the devices of a server, too, or of one that is started here for it.
    pub(super) fn new(
        near: &'a GpuSpec,
        to: Option<&GpuSpec>,
        dir: &'a Path,
        size: u64,
    ) -> Result<Bench<'a>, String> {
        let (far, _server) = match to {
            Some(far @ GpuSpec::Remote { .. }) => (far.clone(), None),
            Some(other) => return Err(format!("--to {other}: give HOST[:PORT] of a server")),
            None => serve(near).map(|(far, server)| (far, Some(server)))?,
        };
        Ok(Bench { near, far, dir, size, _server })
    }

    pub(super) fn run(&self, parts: &[Part], sink: Sink<'_>) -> Result<(), String> {
        for (part, measure) in [
            (Part::Pauses, Bench::pauses as fn(&Bench<'a>, Sink<'_>) -> Result<(), String>),
            (Part::Whole, Bench::whole),
            (Part::Regions, Bench::regions),
            (Part::Record, |bench, sink| record::run(bench.near, bench.dir, sink)),
            (Part::Iterations, |bench, sink| {
                iterations::run(bench.near, &bench.far, bench.dir, sink)
            }),
        ] {
            if wanted(parts, part) {
                measure(self, sink)?;
            }
        }
        Ok(())
    }

    fn job(&self, held: &Held) -> Result<Job, String> {
        Job::beating(self.near, held, self.dir, "m", &[])
    }

    /// How long a program that changes its memory stands still, and how it beats while it moves.
    fn pauses(&self, sink: Sink<'_>) -> Result<(), String> {
        let mut job = self.job(&Held::noise(self.size as usize))?;
        let (near, far) = (self.near.to_string(), self.far.to_string());
        let size = Size(self.size);
        let ways = [("here to here", vec![&near]), ("there and back", vec![&far, &near])];
        for (way, places) in ways {
            let (mut pauses, mut rates) = (Vec::new(), Vec::new());
            for to in places.iter().cycle().take(2 * ROUNDS) {
                job.ask(CHANGING)?;
                std::thread::sleep(SETTLES);
                job.ask("reset")?;
                job.migrate(to)?;
                pauses.push(job.ask("gap")? * 1e3);
                job.ask("changing 0")?;
            }
            for to in places.iter().cycle().take(SLOWLY) {
                let before = job.ask("rate 2")?;
                rates.push(self.beats_while(&mut job, to)? / before);
            }
            let name = format!("pause of a move, {size}, 1 % changing a second, {way}");
            sink(Series::lower(name, "ms", pauses).target(at(self.size, &[(GIB, 50.0)])));
            sink(Series::higher(format!("{BESIDE}, {way}"), "of before", rates).target(0.9));
        }
        job.end();
        Ok(())
    }

    /// Beats a second while it moves, slowly.
    fn beats_while(&self, job: &mut Job, to: &str) -> Result<f64, String> {
        let name = job.name().to_owned();
        std::thread::scope(|scope| {
            let moves = scope.spawn(|| Job::migrate_named(&name, to, &RATE));
            let rate = job.ask(&format!("rate {:.1}", (self.size >> 20) as f64 / 119.0));
            moves.join().map_err(|_| "a panic")??;
            rate
        })
    }

    /// How fast all of a program's memory moves that does not change, and beside the line by
    /// itself, one stream of TCP to the same server.
    fn whole(&self, sink: Sink<'_>) -> Result<(), String> {
        let mut job = self.job(&Held::noise(self.size as usize))?;
        let (near, far) = (self.near.to_string(), self.far.to_string());
        let gib = |seconds: f64| self.size as f64 / seconds / f64::from(1 << 30);
        job.ask("rest")?;
        let name = |way: &str| format!("whole move of {}, {way}", Size(self.size));
        let here: Result<Vec<f64>, String> =
            (0..2 * ROUNDS).map(|_| job.migrate(&near).map(gib)).collect();
        sink(Series::higher(name("here to here"), "GiB/s", here?));
        let mut line = line_to(&self.far)?;
        let (mut rates, mut ratios) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (to, carry) in [
                (&far, Measuring::send as fn(&mut Measuring, u64) -> Result<f64, MeasureError>),
                (&near, Measuring::receive),
            ] {
                let by_itself = carry(&mut line, self.size).map_err(|error| error.to_string())?;
                let seconds = job.migrate(to)?;
                rates.push(gib(seconds));
                ratios.push(by_itself / seconds);
            }
        }
        let name = name("there and back");
        sink(Series::higher(name.clone(), "GiB/s", rates));
        sink(Series::higher(name, "of the line", ratios).target(0.9));
        job.end();
        Ok(())
    }

    /// Many small regions beside one.
    fn regions(&self, sink: Sink<'_>) -> Result<(), String> {
        let one = Held::noise(REGIONS * REGION);
        let many = Held { part: REGION, ..one };
        let mut times = Vec::new();
        for held in [one, many] {
            let mut job = self.job(&held)?;
            job.ask("rest")?;
            let to = self.near.to_string();
            let moves = (0..ROUNDS).map(|_| job.migrate(&to)).collect::<Result<Vec<_>, _>>()?;
            times.push(moves);
            job.end();
        }
        let ratios = times[1].iter().zip(&times[0]).map(|(many, one)| many / one).collect();
        sink(Series::lower(REGIONS_FIGURE, "× one", ratios).target(1.2));
        Ok(())
    }
}
