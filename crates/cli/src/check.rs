//! `kedge check`.

use crate::Failure;
use crate::mistyped;
use crate::output::{self, harmless};
use clap::Args;
use kedge_control::check::{Check, Finding, Report};
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_image::DeviceLimits;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::policy::{JobGpu, Policy};
use kedge_supervisor::{End, Ended, JobSpec, Outcome, die_of};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What the command ends with where it has found something.
const EXIT_FOUND: u8 = 86;
/// What is said where nothing was found, and something may have been.
const INCOMPLETE: &str = "check: nothing was found, but not everything was looked at: kedge logs";
/// Findings that are told; of more, their number.
const TOLD: usize = 100;

const AFTER_HELP: &str = "\
The program runs on software devices, as under `kedge run --gpu soft`, and needs neither a GPU nor
other compilation. With `nvcc -lineinfo` findings have lines of its source, else lines of PTX.

Always found: accesses of kernels to global, shared, local and constant memory that are out of
bounds, misaligned, or to memory that was freed; barriers that cannot complete; failed asserts and
traps. Such an error ends the kernel, and breaks the context, as on a device. What else is found
ends nothing.

Exit status:
  86   something was found
       nothing was: the program's own
  125  nothing was, but devices were lost or refused something, or not all that was found can be
       read

Examples:
  kedge check -- ./program
  kedge check --races --init --json=found.json -- ./program --its-own --arguments";

/// Run a program on software devices that find what its kernels do wrong with memory
///
/// What is found is told on standard error when the program has ended, each place once, and kept in
/// the job's log.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CheckArgs {
    /// Also find accesses of two threads of a block to the same shared memory, one of them a write,
    /// that no barrier and nothing else orders
    #[arg(long)]
    races: bool,
    /// Also find reads of device memory and shared memory that nobody has written
    #[arg(long)]
    init: bool,
    /// Also find device memory that was allocated and never used
    #[arg(long)]
    unused: bool,
    /// The software devices that the program sees: soft, or soft:N for N of them
    #[arg(long, value_name = "SPEC", default_value = "soft")]
    gpu: GpuSpec,
    /// Memory of each of them, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// The job's name, for `kedge ps` and `kedge logs` [default: made from the program's]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// Print a JSON object, behind what the program prints, or write it to FILE: format (1),
    /// findings (a list of objects: kind, one of memory, race, uninitialised, unused, barrier,
    /// fault; message; kernel; block; action, file, line, inlined_at (file and line, of what was
    /// inlined), ptx_line, thread; other, for races and barriers, an object with the same six;
    /// address, of shared memory the offset; count, how often; proxy), more (how many are not
    /// listed). What is not known is absent
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    json: Option<Option<PathBuf>>,
    /// The program and its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

impl CheckArgs {
    fn spec(&self) -> Result<JobSpec, Failure> {
        if !matches!(self.gpu, GpuSpec::Soft { .. }) {
            let what =
                "only software devices check programs: give --gpu soft or soft:N, or nothing";
            return Err(Failure::of_usage(what));
        }
        let soft_memory = self.soft_memory.map(|size| size.0);
        let mut words = self.command.iter().cloned();
        Ok(JobSpec {
            gpu: JobGpu::Devices(self.gpu.clone()),
            gpu_default: None,
            limits: DeviceLimits { soft_memory, ..DeviceLimits::default() },
            name: self.job.clone(),
            join: None,
            far: None,
            program: words.next().unwrap_or_default(),
            arguments: words.collect(),
            shells: false,
            policy: Policy::default(),
            stats: false,
            check: Some(Check { races: self.races, init: self.init, unused: self.unused }),
            trace: None,
            move_to: None,
            preload: None,
            quiet: false,
        })
    }
}

/// Runs the program. Does not return where a signal ended it and nothing was found: that ends this
/// process too.
pub(crate) fn run(args: CheckArgs) -> Result<ExitCode, Failure> {
    mistyped::refuse::<CheckArgs>("check", &args.command)?;
    let spec = args.spec()?;
    let end = kedge_supervisor::run(&spec).map_err(|error| Failure::of_run(&error))?;
    let End::Ended(Ended { outcome, postscript, found, .. }) = end else {
        return Err(Failure::new("a checked job has no image to go back to"));
    };
    let readable = found.as_ref().is_some_and(|found| found.unread.is_empty());
    let whole = readable && postscript.is_empty();
    let report = found.unwrap_or_default().report;
    let told = lines(&report, whole);
    told.iter().for_each(|line| output::complain(line));
    match &args.json {
        Some(None) => output::json(&report)?,
        Some(Some(file)) => write(&report, file)?,
        None => {}
    }
    if !report.is_empty() {
        return Ok(ExitCode::from(EXIT_FOUND));
    }
    postscript.iter().for_each(|line| output::complain(line));
    match outcome {
        // A lost proxy has not told what it had found.
        _ if !whole => Err(Failure::new(INCOMPLETE)),
        Outcome::Exited(code) => Ok(ExitCode::from(code)),
        Outcome::Killed(signal) => die_of(signal),
    }
}

fn write(report: &Report, file: &Path) -> Result<(), Failure> {
    let text = serde_json::to_vec_pretty(report)?;
    std::fs::write(file, text).map_err(|error| Failure::new(format!("{}: {error}", file.display())))
}

/// What is told of the findings; `whole`: of all there are.
fn lines(report: &Report, whole: bool) -> Vec<String> {
    let one = |found: &Finding| {
        let times = match found.count {
            0 | 1 => String::new(),
            count => format!(" ({count} times)"),
        };
        harmless(&format!("{}{times}", found.message))
    };
    let mut lines: Vec<String> = report.findings.iter().take(TOLD).map(one).collect();
    let all = report.more.saturating_add(report.findings.len() as u64);
    let more = all - lines.len() as u64;
    if more > 0 {
        lines.push(format!("and {more} more findings"));
    }
    lines.push(match all {
        0 if !whole => return lines,
        0 => "check: nothing was found".to_owned(),
        1 => "check: 1 finding".to_owned(),
        _ => format!("check: {all} findings"),
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(findings: usize, more: u64) -> Report {
        let finding = Finding { message: "a\x1bb".into(), count: 2, ..Finding::default() };
        Report { format: 1, findings: vec![finding; findings], more }
    }

    #[test]
    fn findings_are_told_up_to_a_number() {
        assert_eq!(lines(&report(0, 0), true), ["check: nothing was found"]);
        assert!(lines(&report(0, 0), false).is_empty());
        assert_eq!(lines(&report(1, 0), false), ["a b (2 times)", "check: 1 finding"]);
        let many = lines(&report(TOLD + 2, 3), true);
        assert_eq!(many.len(), TOLD + 2);
        assert_eq!(many[TOLD..], ["and 5 more findings", "check: 105 findings"]);
    }
}
