//! The conformance runner: compiles every program of `tests/programs` and runs it on the software
//! device, or natively on a real GPU, and says which passed.
#![forbid(unsafe_code)]

use clap::Parser;
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::{
    Journey, Outcome, Program, Target, Toolchain, root, run, run_interrupted, run_moved,
};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compile the conformance programs with nvcc and run them.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Only programs whose name contains one of these
    filter: Vec<String>,
    /// Run on this machine's own driver and GPU, without kedge
    #[arg(long, conflicts_with = "gpu")]
    native: bool,
    /// The device to give to `kedge run`
    #[arg(long, default_value = "soft")]
    gpu: String,
    /// Serve software devices on this machine, and run on those, as if they were on another
    #[arg(long, conflicts_with_all = ["native", "gpu"])]
    far: bool,
    /// Cut each connection to them after so many bytes, on average
    #[arg(long, requires = "far", value_name = "BYTES")]
    cut: Option<u64>,
    /// Checkpoint each at a random moment, have it run on, kill it, restart it, and compare what it
    /// prints, and the number that it drew when it began
    #[arg(long, conflicts_with = "native")]
    interrupt: bool,
    /// Move the devices of each while it runs, from a random moment on, three times in a row, and
    /// compare what it prints; with --far there and back, from either
    #[arg(long = "move", conflicts_with_all = ["native", "interrupt"])]
    moved: bool,
    /// Move them to this device and back, and tell of each that may not go there why
    #[arg(long, requires = "moved", conflicts_with = "far", value_name = "GPU")]
    to: Option<String>,
    /// Run each under `kedge check --races --init`, which is to find nothing but what a program
    /// says that it finds
    #[arg(long, conflicts_with_all = ["native", "gpu", "far", "interrupt", "moved"])]
    check: bool,
    /// The folder of programs
    #[arg(long, default_value_os_t = root().join("tests/programs"))]
    programs: PathBuf,
    /// Where binaries go, and are found again
    #[arg(long, default_value_os_t = root().join("target/programs"))]
    out: PathBuf,
    /// Compile, run nothing
    #[arg(long)]
    build_only: bool,
    /// Programs at a time
    #[arg(long, short, default_value_t = 2)]
    jobs: usize,
    /// Write results as a JSON list of objects to this file: name, passed, failure, output (of one
    /// that failed, its last 4 KiB), stdout (whole, 64 KiB at most), seconds
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print what every program printed
    #[arg(long, short)]
    verbose: bool,
}

/// Of what a failed program has printed, the bytes that are kept.
const MAX_OUTPUT: usize = 4 << 10;
/// Of what any program has printed, for runs to be compared.
const MAX_STDOUT: usize = 64 << 10;

fn main() -> ExitCode {
    match conformance(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("conformance: {error}");
            ExitCode::from(2)
        }
    }
}

fn conformance(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let toolchain = Toolchain::find(&args.out)?;
    let mut programs = Program::all(&args.programs)?;
    if !args.filter.is_empty() {
        programs.retain(|p| args.filter.iter().any(|f| p.name.contains(f.as_str())));
    }
    if programs.is_empty() {
        return Err("no program matches".into());
    }
    let most = programs.iter().map(|program| program.devices).max().unwrap_or(1);
    let server = args.far.then(|| Served::start(&["--gpu", &format!("soft:{most}")]));
    let cut = server.as_ref().zip(args.cut);
    let relay = cut.map(|(server, bytes)| Relay::start(&server.address, bytes));
    let target = match &server {
        Some(server) => match &relay {
            Some(relay) => Target::Far(relay.address.clone()),
            None => Target::Far(server.address.clone()),
        },
        None if args.native => Target::Native,
        None if args.check => Target::Checked,
        None => Target::Kedge(args.gpu.clone()),
    };
    let (alone, beside): (Vec<_>, Vec<_>) = programs.into_iter().partition(|p| p.alone);
    let each = |program: &Program| {
        let outcome = one(&toolchain, program, &target, args);
        report(program, &outcome, args.verbose);
        outcome
    };
    let mut results = run_all(&beside, args.jobs, each);
    results.extend(run_all(&alone, 1, each));
    results.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(path) = &args.json {
        std::fs::write(path, json(&results))?;
    }
    let failed: Vec<_> = results.iter().filter(|(_, o)| o.failure.is_some()).collect();
    for (name, outcome) in &failed {
        println!("FAILED {name}: {}", outcome.failure.as_deref().unwrap_or(""));
    }
    if let Some(relay) = &relay {
        println!("the line was cut {} times", relay.cuts());
    }
    let refused = results.iter().filter(|(_, o)| o.failure.is_none() && o.refused.is_some());
    if let count @ 1.. = refused.count() {
        println!("{count} of those that passed were refused by name and went on");
    }
    println!("{} passed, {} failed", results.len() - failed.len(), failed.len());
    Ok(failed.is_empty())
}

/// Runs programs, so many at a time.
fn run_all(
    programs: &[Program],
    jobs: usize,
    each: impl Fn(&Program) -> Outcome + Sync,
) -> Vec<(String, Outcome)> {
    let results = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = each(program);
                    if let Ok(mut results) = results.lock() {
                        results.push((program.name.clone(), outcome));
                    }
                }
            });
        }
    });
    results.into_inner().unwrap_or_default()
}

fn one(toolchain: &Toolchain, program: &Program, target: &Target, args: &Args) -> Outcome {
    let outcome = |failure| Outcome {
        failure,
        refused: None,
        status: None,
        stdout: String::new(),
        stderr: String::new(),
        seconds: 0.0,
    };
    match toolchain.compile(program) {
        Err(error) => outcome(Some(error.to_string())),
        Ok(_) if args.build_only => outcome(None),
        Ok(binary) if args.interrupt => run_interrupted(&binary, program, target),
        Ok(binary) if args.moved => run_moved(&binary, program, &journey(target, args)),
        Ok(binary) => run(&binary, program, target),
    }
}

/// From where to where the devices of a program that runs on `target` move.
fn journey(target: &Target, args: &Args) -> Journey {
    let near = Target::Kedge(args.gpu.clone());
    match (&args.to, target) {
        (Some(to), _) => Journey::Try([near, Target::Kedge(to.clone())]),
        (None, Target::Far(_)) => Journey::Between([target.clone(), near]),
        (None, _) => Journey::Between([target.clone(), target.clone()]),
    }
}

fn report(program: &Program, outcome: &Outcome, verbose: bool) {
    let word = match outcome {
        Outcome { failure: Some(_), .. } => "FAIL",
        Outcome { refused: Some(_), .. } => "stay",
        _ => "pass",
    };
    let mut text = format!("{word} {:32} {:7.2} s\n", program.name, outcome.seconds);
    if verbose || outcome.failure.is_some() {
        for line in outcome.stdout.lines().chain(outcome.stderr.lines()) {
            text.push_str("     | ");
            text.push_str(line);
            text.push('\n');
        }
    }
    for why in outcome.failure.iter().chain(&outcome.refused) {
        text.push_str(&format!("     {}\n", why.trim_end()));
    }
    print!("{text}");
}

fn json(results: &[(String, Outcome)]) -> String {
    let list: Vec<_> = results
        .iter()
        .map(|(name, outcome)| {
            serde_json::json!({
                "name": name,
                "passed": outcome.failure.is_none(),
                "failure": outcome.failure,
                "refused": outcome.refused,
                "output": outcome.failure.as_ref().map(|_| outcome.said(MAX_OUTPUT)),
                "stdout": outcome.stdout.get(..MAX_STDOUT).unwrap_or(&outcome.stdout),
                "seconds": outcome.seconds,
            })
        })
        .collect();
    serde_json::Value::from(list).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_output_of_what_failed_and_of_nothing_else() {
        let outcome = |failure: Option<&str>| Outcome {
            failure: failure.map(str::to_owned),
            refused: None,
            status: None,
            stdout: "é".repeat(MAX_OUTPUT),
            stderr: "the cause\n".to_owned(),
            seconds: 0.5,
        };
        let results = [("bad", Some("exit status: 1")), ("good", None)];
        let results = results.map(|(name, failure)| (name.to_owned(), outcome(failure)));
        let list: serde_json::Value = serde_json::from_str(&json(&results)).unwrap();
        assert_eq!((&list[1]["passed"], &list[1]["output"]), (&true.into(), &().into()));
        let output = list[0]["output"].as_str().unwrap();
        assert!(output.len() <= MAX_OUTPUT && output.len() > MAX_OUTPUT - 4, "{}", output.len());
        assert!(output.ends_with("éthe cause\n"), "{output}");
    }
}
