//! `kedge bench`: its arguments, its table and its list. `kedge-bench` measures.

use crate::Failure;
use crate::child::{self, Place};
use crate::gpu;
use crate::output::{self, DIM, FAIR, GOOD, PLAIN, Table};
use crate::progress::Progress;
use clap::Args;
use kedge_bench::{Asked, Figure, Part, What};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_probe::Series;
use std::path::PathBuf;
use std::time::Duration;

const AFTER_HELP: &str = "\
With --json, one list of objects:
  name, unit
  value       the median
  min, max
  better      \"lower\" or \"higher\"
  target      what kedge means to reach, or null
  reference   native, or the best peer: {value, what, source}, or null

Run it on a machine that does nothing else: kedge's two processes want a core each.";

/// How long may pass between two results.
const RESULT_TIMEOUT: Duration = Duration::from_secs(120);

/// Measure what kedge costs and how fast its devices are
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    what: What,
    /// The device: local for this machine's GPUs, or soft [default: as for `kedge run`; soft for
    /// `bench soft`]
    #[arg(long, value_name = "SPEC", conflicts_with = "native")]
    gpu: Option<GpuSpec>,
    /// Measure this machine's own driver and GPU instead, without kedge
    #[arg(long)]
    native: bool,
    /// codecs: bytes of memory in each data set [default: 256M]; process: of the job that is
    /// checkpointed
    /// [default: 1G and 4G, or less where memory or disk is short]; checkpoint: on the device
    /// [default: 4G, and 256M on soft]; migrate: on the device [default: 1G]; managed: of
    /// managed memory [default: 4G]; several: 4G,16G; cluster: one for all, or three, of the ranks'
    /// memory in all, of the job that moves and of the file [default: 1G,4G,1G]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    size: Vec<Size>,
    /// checkpoint: do not have the driver checkpoint a program of that size too, which takes it
    /// long
    #[arg(long)]
    no_driver: bool,
    /// codecs, process, checkpoint, cache, managed: a folder on the disk to write to [default:
    /// where images go]; cluster: one that all hosts share
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// far, migrate: the server whose devices are measured [default: one that is started for it,
    /// over loopback]
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "native")]
    to: Option<GpuSpec>,
    /// process, far, migrate, cluster: these of its parts alone
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    parts: Vec<Part>,
    /// cluster: the hosts, of which the first is this one: names or addresses that all reach
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    host: Vec<String>,
    /// cluster: hosts on which its jobs are restarted
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    spare: Vec<String>,
    /// cluster: rounds of each figure [default: 20 pairs of mpi, 9 of scp, 50
    /// barriers, 5 of the others]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let progress = Progress::new("measuring…");
    let mut series = Vec::new();
    let result = measure(args, &mut |one| {
        progress.show(&format!("measuring… {}: {}", series.len() + 1, one.name));
        series.push(one);
    });
    progress.clear();
    let figures: Vec<Figure> = series.into_iter().filter_map(Figure::of).collect();
    // What was measured before a failure is still worth reading, but not as the whole list.
    if args.json && result.is_ok() {
        output::json(&figures)?;
    } else if !args.json && !figures.is_empty() {
        output::print(&render(&figures))?;
    }
    result.map_err(|said| Failure::new(format!("bench {}: {said}", args.what.name())))
}

/// Hands over each series as it comes.
fn measure(args: &BenchArgs, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    let soft_only = (args.what == What::Soft).then_some("bench soft");
    let gpu = || gpu::resolve(args.gpu.as_ref(), soft_only).map(|gpu| gpu.spec);
    let probe = |name: &str, line: &mut dyn FnMut(&str)| {
        let place = if args.native { Place::Native } else { Place::job(gpu()?) };
        child::probe(place, &[name.into()], RESULT_TIMEOUT, line)
    };
    let asked = Asked {
        what: args.what,
        gpu: &gpu,
        probe: &probe,
        native: args.native,
        sizes: args.size.iter().map(|size| size.0).collect(),
        driver: !args.no_driver,
        dir: args.dir.as_deref(),
        to: args.to.as_ref(),
        parts: &args.parts,
        hosts: &args.host,
        spares: &args.spare,
        rounds: args.rounds,
    };
    kedge_bench::measure(asked, sink)
}

fn render(figures: &[Figure]) -> String {
    let headings = ["WHAT", "MEDIAN", "MIN", "MAX", "TARGET", "UNIT", "REFERENCE"];
    let mut table = Table::new(&headings, &[1, 2, 3, 4]);
    for figure in figures {
        let style = match figure.target {
            None => PLAIN,
            Some(target) if figure.better.reaches(figure.value, target) => GOOD,
            Some(_) => FAIR,
        };
        let target =
            figure.target.map(|target| format!("{} {}", figure.better.sign(), short(target)));
        let reference = figure.reference.as_ref().map(|r| format!("{} {}", short(r.value), r.what));
        table.row([
            (PLAIN, figure.name.clone()),
            (style, short(figure.value)),
            (PLAIN, short(figure.min)),
            (PLAIN, short(figure.max)),
            (PLAIN, target.unwrap_or_default()),
            (PLAIN, figure.unit.clone()),
            (DIM, reference.unwrap_or_default()),
        ]);
    }
    table.render()
}

/// Three digits that count.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::short;
    use clap::Parser;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [(0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123")] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn it_asks_for_what_kedge_knows() {
        let words = [&["kedge"], &kedge_bench::KEEP_READY[..], &["soft"]].concat();
        crate::Cli::try_parse_from(words).unwrap();
    }
}
