//! `kedge model`: what running far, and moving, costs a program, before it is tried.
//!
//! The model is mrCUDA's (Markthub, Nomura, Matsuoka): [`costs`] has its equations, [`fit`]
//! measures their coefficients. docs/design/0035-cost-model.md says what differs here.

mod costs;
mod fit;
mod line;

use crate::Failure;
use crate::gpu;
use crate::output::{self, PLAIN, Table};
use clap::{Args, Subcommand};
pub(crate) use costs::Model;
use costs::Prediction;
use kedge_control::gpu::GpuSpec;
use kedge_control::stats::{FORMAT, JobStats};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest file that is read, in bytes.
const MAX_FILE_LEN: u64 = 16 << 20;

const AFTER_HELP: &str = "\
Examples:
  kedge model fit --to gpu-server -o line.json     measure this line, this machine and that one
  kedge run --stats=sim.json -- ./sim              count what a program asks of its devices
  kedge model predict --model line.json sim.json   what it would take with devices there";

/// Predict what a program takes with devices of another machine, and what it takes to move it
///
/// `kedge run --stats=FILE` counts what a program asks of its devices here; `kedge model fit`
/// measures what that costs here and there.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ModelArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Fit(FitArgs),
    Predict(PredictArgs),
}

/// Measure what using devices costs, here and over a line
#[derive(Debug, Args)]
struct FitArgs {
    /// The machine that runs `kedge serve`, as `kedge run --gpu` takes it: HOST[:PORT][/I]
    #[arg(long, value_name = "HOST")]
    to: GpuSpec,
    /// The devices here [default: as for `kedge run`]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
    /// Do not measure what it takes to move a job, which writes images
    #[arg(long)]
    no_move: bool,
    /// A folder for the images [default: where images go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Write the coefficients to this file [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Tell what a program would take with devices there, from what it took and asked for here
#[derive(Debug, Args)]
struct PredictArgs {
    /// What `kedge model fit` has written
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// What `kedge run --stats=FILE` has written
    #[arg(value_name = "STATS", required = true)]
    stats: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ModelArgs) -> Result<(), Failure> {
    match &args.what {
        What::Fit(args) => fit(args),
        What::Predict(args) => predict(args),
    }
}

fn fit(args: &FitArgs) -> Result<(), Failure> {
    if !matches!(args.to, GpuSpec::Remote { .. }) {
        return Err(Failure::new(format!(
            "--to {} is no other machine: give HOST[:PORT]",
            args.to
        )));
    }
    let near = gpu::resolve(args.gpu.as_ref(), None)?.spec;
    let moves = (!args.no_move).then_some(args.dir.as_deref());
    let model = fit::fit(&near, &args.to, moves)?;
    let Some(path) = &args.output else { return Ok(output::json(&model)?) };
    let text = serde_json::to_vec_pretty(&model)?;
    std::fs::write(path, text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))
}

/// A file of figures.
fn read<T: DeserializeOwned>(path: &Path, made_by: &str) -> Result<T, Failure> {
    let said = |why: String| Failure::new(format!("{}: {why}", path.display()));
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| said(error.to_string()))?;
    file.take(MAX_FILE_LEN).read_to_end(&mut text).map_err(|error| said(error.to_string()))?;
    serde_json::from_slice(&text)
        .map_err(|error| said(format!("not what `{made_by}` writes: {error}")))
}

/// Reads what `kedge model fit` has written.
///
/// # Errors
/// It cannot be read, or is no model.
pub(crate) fn load(path: &Path) -> Result<Model, Failure> {
    let model: Model = read(path, "kedge model fit")?;
    model.check().map_err(|why| Failure::new(format!("{}: {why}", path.display())))?;
    Ok(model)
}

/// Reads what `kedge run --stats=FILE` has written.
///
/// # Errors
/// It cannot be read, or holds no figures of a job.
pub(crate) fn counted(path: &Path) -> Result<JobStats, Failure> {
    let stats: JobStats = read(path, "kedge run --stats=FILE")?;
    if stats.format != FORMAT || !stats.seconds.is_finite() {
        let format = stats.format;
        let why = format!("{}: of format {format}, not {FORMAT}", path.display());
        return Err(Failure::new(why));
    }
    Ok(stats)
}

#[derive(Debug, Serialize)]
struct Told<'a> {
    job: &'a str,
    command: &'a [String],
    #[serde(flatten)]
    prediction: Prediction,
}

fn predict(args: &PredictArgs) -> Result<(), Failure> {
    let model = load(&args.model)?;
    let all: Vec<JobStats> =
        args.stats.iter().map(|path| counted(path)).collect::<Result<_, Failure>>()?;
    let told: Vec<Told<'_>> = all
        .iter()
        .map(|job| Told {
            job: &job.job,
            command: &job.command,
            prediction: model.predict(&job.stats, job.seconds),
        })
        .collect();
    if args.json {
        return Ok(output::json(&told)?);
    }
    Ok(output::print(&table(&told))?)
}

fn table(told: &[Told<'_>]) -> String {
    let headings = ["JOB", "HERE", "THERE", "SESSION", "CALLS", "POSTS", "BYTES", "MOVE"];
    let mut table = Table::new(&headings, &[1, 2, 3, 4, 5, 6, 7]);
    for Told { job, prediction: p, .. } in told {
        let moving = p.move_seconds.map_or_else(|| "–".to_owned(), seconds);
        let numbers = [p.here_seconds, p.there_seconds, p.session, p.calls, p.posts, p.bytes];
        let cells = [output::harmless(job)].into_iter();
        let cells = cells.chain(numbers.into_iter().map(seconds)).chain([moving]);
        table.row(cells.map(|text| (PLAIN, text)));
    }
    table.render()
}

/// Seconds for people.
fn seconds(value: f64) -> String {
    match value.abs() {
        x if x >= 100.0 => format!("{value:.0} s"),
        x if x >= 1.0 => format!("{value:.2} s"),
        _ => format!("{:.1} ms", value * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_short() {
        let told = [0.000_12, 0.5, 1.234, 250.4].map(seconds);
        assert_eq!(told, ["0.1 ms", "500.0 ms", "1.23 s", "250 s"]);
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let path = std::env::temp_dir().join(format!("kedge-model-{}", std::process::id()));
        std::fs::write(&path, "{}").unwrap();
        let refused =
            read::<Model>(&path, "kedge model fit").err().map(|failure| format!("{failure:?}"));
        std::fs::remove_file(&path).unwrap();
        let refused = refused.unwrap_or_default();
        assert!(refused.contains("not what `kedge model fit` writes"), "{refused}");
    }
}
