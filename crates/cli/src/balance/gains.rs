//! What jobs would take at other places, by `kedge model`.

use super::places::is_near;
use crate::Failure;
use crate::model::{self, Model};
use kedge_control::gpu::GpuSpec;
use kedge_control::stats::JobStats;
use std::path::PathBuf;

/// Models of lines, and what programs asked of their devices when they ran before.
#[derive(Debug, Default)]
pub(super) struct Gains {
    lines: Vec<Line>,
    programs: Vec<JobStats>,
}

/// A model, and the devices that it is of.
#[derive(Debug)]
struct Line {
    here: GpuSpec,
    there: GpuSpec,
    model: Model,
}

/// What a program is expected to take.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Expected {
    /// Seconds at each place.
    pub(super) seconds: Vec<Option<f64>>,
    /// Seconds of a move.
    pub(super) move_seconds: f64,
}

impl Gains {
    /// Reads the files.
    ///
    /// # Errors
    /// They cannot be read, or are not what `kedge model fit` and `kedge run --stats=FILE` write.
    pub(super) fn read(models: &[PathBuf], stats: &[PathBuf]) -> Result<Gains, Failure> {
        let line = |path: &PathBuf| {
            let model = model::load(path)?;
            let spec = |text: &str| {
                let bad = |error| Failure::new(format!("{}: {error}", path.display()));
                text.parse::<GpuSpec>().map_err(bad)
            };
            let (here, there) = (spec(&model.here)?, spec(&model.there)?);
            Ok(Line { here, there, model })
        };
        let lines = models.iter().map(line).collect::<Result<_, Failure>>()?;
        let programs = stats.iter().map(|path| model::counted(path)).collect::<Result<_, _>>()?;
        Ok(Gains { lines, programs })
    }

    /// Returns what the program of that command is expected to take, where it ran before on devices
    /// that a model begins with.
    pub(super) fn of<'a>(
        &self,
        command: &[String],
        places: impl Iterator<Item = &'a GpuSpec>,
    ) -> Expected {
        // The one that is named last is the newest.
        let Some(ran) = self.programs.iter().rfind(|ran| ran.command == command) else {
            return Expected::default();
        };
        let Ok(on) = ran.gpu.parse::<GpuSpec>() else { return Expected::default() };
        let lines: Vec<&Line> = self.lines.iter().filter(|line| alike(&line.here, &on)).collect();
        let predict = |line: &&Line| line.model.predict(&ran.stats, ran.seconds);
        let seconds = |place: &GpuSpec| {
            if is_near(place) {
                let known = lines.iter().any(|line| alike(&line.here, place));
                return known.then_some(ran.seconds);
            }
            let line = lines.iter().find(|line| alike(&line.there, place))?;
            let told = predict(line);
            // A program that runs has paid for its sessions.
            Some(told.there_seconds - told.session)
        };
        let moves = lines.iter().filter_map(|line| predict(line).move_seconds);
        let move_seconds = moves.fold(0.0, f64::max);
        Expected { seconds: places.map(seconds).collect(), move_seconds }
    }
}

/// Whether what was measured on the one holds for the other: devices of one kind on one machine.
fn alike(a: &GpuSpec, b: &GpuSpec) -> bool {
    match (a, b) {
        (GpuSpec::Soft { .. }, GpuSpec::Soft { .. })
        | (GpuSpec::Local { .. }, GpuSpec::Local { .. }) => true,
        (GpuSpec::Remote { server: a, .. }, GpuSpec::Remote { server: b, .. }) => a == b,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A line on which each call takes `call` seconds longer than on `here`.
    fn line(here: &str, there: &str, call: f64) -> Line {
        let costs = |call: f64, session: f64| {
            json!({
                "session": session, "call": call, "post": 0.0, "write": 0.0, "write_byte": 0.0,
                "read": 0.0, "read_byte": 0.0, "shared_write_byte": 0.0, "shared_read_byte": 0.0,
            })
        };
        let moving = json!({"fixed": 0.5, "record": 0.0, "region": 0.0, "byte": 0.0});
        let model = json!({
            "format": 1, "here": here, "there": there, "near": costs(0.0, 0.0),
            "far": costs(call, 9.0), "record": 0.0, "moving": moving,
        });
        let model: Model = serde_json::from_value(model).expect("a model");
        let spec = |text: &str| text.parse().expect("devices");
        Line { here: spec(here), there: spec(there), model }
    }

    fn ran(command: &str, gpu: &str, seconds: f64) -> JobStats {
        let stats = json!({"clients": 1, "calls": 1000});
        let told = json!({
            "format": 1, "job": "j", "gpu": gpu, "command": [command], "seconds": seconds,
            "stats": stats,
        });
        serde_json::from_value(told).expect("figures")
    }

    fn expected(gains: &Gains, command: &str) -> Expected {
        let places = ["local:0", "soft", "a/0", "b/1"].map(|text| text.parse().expect("devices"));
        gains.of(&[command.to_owned()], places.iter())
    }

    #[test]
    fn programs_that_ran_before_are_expected_to_take_as_long() {
        let lines = vec![line("local", "a", 1e-3), line("local:1", "b", 2e-3)];
        let programs = vec![ran("x", "local:0", 9.0), ran("x", "local:0", 3.0)];
        let gains = Gains { lines, programs };
        let told = expected(&gains, "x");
        assert_eq!(told.seconds, [Some(3.0), None, Some(4.0), Some(5.0)], "the newest, no session");
        assert_eq!(told.move_seconds, 0.5);
        assert_eq!(expected(&gains, "y"), Expected::default(), "another program");
    }

    #[test]
    fn what_ran_elsewhere_tells_nothing() {
        let lines = || vec![line("soft", "a", 1e-3)];
        for gpu in ["local:0", "a/0", "none", "a/0,b/0"] {
            let gains = Gains { lines: lines(), programs: vec![ran("x", gpu, 3.0)] };
            let known = expected(&gains, "x").seconds.into_iter().flatten().count();
            assert_eq!(known, 0, "{gpu}");
        }
        let gains = Gains { lines: lines(), programs: vec![ran("x", "soft:2", 3.0)] };
        assert_eq!(expected(&gains, "x").seconds, [None, Some(3.0), Some(4.0), None]);
    }
}
