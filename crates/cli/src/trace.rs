//! `kedge trace`.

use crate::output::{self, HEADING, PLAIN, Table, harmless, styled};
use crate::{Failure, gpu, mistyped, run};
use clap::Args;
use kedge_control::size::Size;
use kedge_control::trace::{Kind, Merged, Row, Wanted};
use kedge_image::DeviceLimits;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::policy::{JobGpu, Policy};
use kedge_supervisor::{End, Ended, JobSpec};
use rustix::fs::OFlags;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The trace's name where nobody gives one.
const FILE: &str = "trace.json";
/// Rows of a table that are told; of more, their number.
const TOLD: usize = 100;

const AFTER_HELP: &str = "\
The trace is a JSON file that https://ui.perfetto.dev and chrome://tracing show: the driver
functions that each thread calls, and in each stream of software devices kernels, copies, graphs
(each as one) and host functions; and when all stood still for a checkpoint. Of GPUs, and of devices
on other machines, it has the calls alone.

Examples:
  kedge trace -- ./program                     writes trace.json
  kedge trace -o t.json --stats -- ./program   and tells the times
  kedge trace --stats -- ./program             tells them, and writes no file";

/// Run a program and write down what it and its devices do, and when
///
/// Exits as the program does. What a program that is killed has done until then is in the trace.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TraceArgs {
    /// The file that gets the trace [default: trace.json; with --stats alone, none]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Tell on standard error, when the program has ended, how often each kernel, copy and driver
    /// function was there and how long it took
    #[arg(long)]
    stats: bool,
    /// How much is kept of each process at most: what comes later is counted. A call or kernel
    /// takes some 100 bytes
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    limit: Size,
    /// Devices that the program sees, as for `kedge run`
    #[arg(long, value_name = "SPEC")]
    gpu: Option<JobGpu>,
    /// Memory of each software device, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// The job's name, for `kedge ps`, `kedge logs` and `kedge checkpoint` [default: made from the
    /// program's]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// The program and its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

/// Runs the program. Does not return where a signal ended it: that ends this process too.
pub(crate) fn run(args: TraceArgs) -> Result<ExitCode, Failure> {
    mistyped::refuse::<TraceArgs>("trace", &args.command)?;
    let file = match (&args.output, args.stats) {
        (Some(file), _) => Some(std::path::absolute(file)?),
        (None, true) => None,
        (None, false) => Some(std::path::absolute(FILE)?),
    };
    let soft_only = args.soft_memory.map(|_| "--soft-memory");
    let (gpu, gpu_default) = gpu::of_job(args.gpu.as_ref(), soft_only)?;
    if gpu == JobGpu::None {
        let what = "without devices there is nothing to trace: leave --gpu none out";
        return Err(Failure::of_usage(what));
    }
    // Who cannot have it hears of that before the program has run for hours.
    let made = file.as_deref().map(Made::at).transpose()?;
    let mut words = args.command.into_iter();
    let soft_memory = args.soft_memory.map(|size| size.0);
    let spec = JobSpec {
        gpu,
        gpu_default,
        limits: DeviceLimits { soft_memory, ..DeviceLimits::default() },
        name: args.job,
        join: None,
        far: None,
        program: words.next().unwrap_or_default(),
        arguments: words.collect(),
        shells: false,
        policy: Policy { dir: kedge_supervisor::policy::default_dir().ok(), ..Policy::default() },
        stats: false,
        check: None,
        trace: Some(Wanted { file: file.clone(), limit: args.limit.0 }),
        move_to: None,
        preload: None,
        quiet: false,
    };
    let end = kedge_supervisor::run(&spec);
    drop(made);
    match &end {
        Ok(End::Ended(Ended { traced: Some(Ok(merged)), .. })) => {
            lines(merged, file.as_deref()).iter().for_each(|line| output::complain(line));
            if args.stats {
                anstream::eprint!("{}", tables(merged));
            }
        }
        Ok(End::Ended(Ended { traced: Some(Err(error)), .. })) => output::complain(error),
        _ => {}
    }
    run::Manner::default().conclude(end)
}

/// A file that a trace is to get: what it holds stays until there is one.
struct Made<'a> {
    file: &'a Path,
    /// Whether it is new: it goes if nothing has come into it.
    is_new: bool,
}

impl Made<'_> {
    fn at(file: &Path) -> Result<Made<'_>, Failure> {
        let is_new = match OpenOptions::new().write(true).create_new(true).open(file) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                // A FIFO that nobody reads is an error, and not waited for.
                let at_once = OFlags::NONBLOCK.bits() as i32;
                let opened = OpenOptions::new().write(true).custom_flags(at_once).open(file);
                opened.map_err(|error| named(file, error))?;
                false
            }
            Err(error) => return Err(named(file, error)),
        };
        Ok(Made { file, is_new })
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        if self.is_new && fs::metadata(self.file).is_ok_and(|found| found.len() == 0) {
            let _ = fs::remove_file(self.file);
        }
    }
}

fn named(file: &Path, error: io::Error) -> Failure {
    Failure::new(format!("{}: {error}", file.display()))
}

/// What is told of a trace.
fn lines(merged: &Merged, file: Option<&Path>) -> Vec<String> {
    let (spans, processes) = (merged.spans, merged.processes);
    let of = if processes == 1 { "1 process" } else { &format!("{processes} processes") };
    let place = file.map(|file| format!(": {}", file.display())).unwrap_or_default();
    let mut lines = vec![format!("trace: {spans} events of {of}{place}")];
    if merged.left > 0 {
        let remedy = "raise --limit, or make room on the disk";
        lines.push(format!("trace: {} events were left out: {remedy}", merged.left));
    }
    if merged.lost > 0 {
        lines.push(format!("trace: {} calls came too fast to be kept", merged.lost));
    }
    if !merged.unread.is_empty() {
        let count = merged.unread.len();
        lines.push(format!("trace: {count} files of it cannot be read: kedge logs"));
    }
    lines
}

/// One table for each kind of event that there is.
fn tables(merged: &Merged) -> String {
    let mut text = String::new();
    for kind in Kind::ALL {
        let rows = merged.table.of(kind);
        if !rows.is_empty() {
            text.push_str(&format!("\n{}\n{}", styled(HEADING, title(kind)), table(kind, &rows)));
        }
    }
    text
}

fn title(kind: Kind) -> &'static str {
    match kind {
        Kind::Call => "Driver functions",
        Kind::Kernel => "Kernels",
        Kind::Copy => "Copies and fills",
        Kind::Graph => "Graphs",
        Kind::Host => "Host functions",
        Kind::Pause => "Pauses",
    }
}

fn table(kind: Kind, rows: &[(&str, Row)]) -> String {
    let copies = kind == Kind::Copy;
    let mut headings = vec!["SHARE", "TOTAL", "COUNT", "MEAN", "MIN", "MAX"];
    headings.extend(copies.then_some("BYTES"));
    headings.push("NAME");
    let right: Vec<usize> = (0..headings.len() - 1).collect();
    let mut table = Table::new(&headings, &right);
    let all = rows.iter().fold(0u64, |all, (_, row)| all.saturating_add(row.total));
    for (name, row) in rows.iter().take(TOLD) {
        let share = row.total as f64 * 100.0 / all.max(1) as f64;
        let times = [row.mean(), row.min, row.max].map(time);
        let mut cells = vec![format!("{share:.1}%"), time(row.total), row.count.to_string()];
        cells.extend(times);
        cells.extend(copies.then(|| row.bytes.to_string()));
        cells.push(harmless(name));
        table.row(cells.into_iter().map(|cell| (PLAIN, cell)));
    }
    let mut text = table.render();
    if rows.len() > TOLD {
        text.push_str(&format!("and {} more\n", rows.len() - TOLD));
    }
    text
}

/// Nanoseconds for people: three digits that count.
fn time(nanos: u64) -> String {
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs")];
    let Some((unit, word)) = units.into_iter().find(|(unit, _)| nanos >= *unit) else {
        return format!("{nanos} ns");
    };
    let value = nanos as f64 / unit as f64;
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {word}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::trace::Span;

    fn merged() -> Merged {
        let mut merged = Merged { spans: 4, processes: 1, ..Merged::default() };
        for (kind, name, took) in [
            (Kind::Kernel, "sums\x1b(int*)", 3_000),
            (Kind::Kernel, "sums\x1b(int*)", 1_000),
            (Kind::Kernel, "other", 12_000),
            (Kind::Copy, "memset", 7),
        ] {
            let name = name.to_owned();
            let (device, bytes) = (Some(0), 5);
            let span =
                Span { kind, name, begin: 10, end: 10 + took, lane: 1, device, bytes, outcome: 0 };
            merged.table.add(&span);
        }
        merged
    }

    #[test]
    fn times_are_told_by_name_with_their_share() {
        let text = anstream::adapter::strip_str(&tables(&merged())).to_string();
        let words: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["Kernels"]);
        let row = "75.0% 12.0 µs 1 12.0 µs 12.0 µs 12.0 µs other";
        assert_eq!(words[3].join(" "), row);
        let row = "25.0% 4.00 µs 2 2.00 µs 1.00 µs 3.00 µs sums (int*)";
        assert_eq!(words[4].join(" "), row);
        assert_eq!(words[6], ["Copies", "and", "fills"]);
        assert_eq!(words[8].join(" "), "100.0% 7 ns 1 7 ns 7 ns 7 ns 5 memset");
    }

    #[test]
    fn what_was_left_out_is_told() {
        let whole = merged();
        let told = lines(&whole, Some(Path::new("/t.json")));
        assert_eq!(told, ["trace: 4 events of 1 process: /t.json"]);
        let part = Merged { left: 9, lost: 8, unread: vec!["x".into()], ..whole };
        let told = lines(&part, None);
        assert_eq!(
            told[1..],
            [
                "trace: 9 events were left out: raise --limit, or make room on the disk",
                "trace: 8 calls came too fast to be kept",
                "trace: 1 files of it cannot be read: kedge logs"
            ]
        );
    }
}
