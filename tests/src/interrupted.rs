//! A program that is checkpointed at a random moment, killed, and restarted from its image: what it
//! printed before and after must be what it prints undisturbed.

use crate::random::fraction;
use crate::run::{judge, run, run_command};
use crate::{Outcome, Program, Target, kedge};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How often another moment is tried when the program had ended by then, or not begun.
pub(crate) const TRIES: u32 = 20;
/// Of these, so many at a random moment. In the others the program comes last on a loaded machine,
/// and whoever is to meet it does not.
const RANDOM: u32 = 10;
/// What a program is started by that comes last.
const NICE: [&str; 3] = ["nice", "-n", "19"];
/// How long a job may need until it can be asked, from a moment at which it should be there.
const START_TIMEOUT: Duration = Duration::from_millis(20);

/// Runs `binary` undisturbed, then once more with a checkpoint in between.
pub fn run_interrupted(binary: &Path, program: &Program, target: &Target) -> Outcome {
    if matches!(target, Target::Far(_)) && program.far_refused.is_some() {
        return run(binary, program, target);
    }
    let case = Case { binary, program, target, limit: Duration::from_secs(program.seconds) };
    let mut whole = case.run(&[], &[]);
    if whole.failure.is_none() {
        whole.failure = judge(program, &whole);
    }
    if whole.failure.is_some() {
        return whole;
    }
    for attempt in 0..TRIES {
        // Earlier with each attempt: the first run may have been the slower one. At last as soon as
        // it is there: on a loaded machine asking takes longer than a short program.
        let (part, patience, before) = match attempt {
            0..RANDOM => {
                (fraction() * 0.9 / (1.0 + 0.2 * f64::from(attempt)), START_TIMEOUT, &[][..])
            }
            _ => (0.0, case.limit, &NICE[..]),
        };
        let moment = Duration::from_secs_f64(whole.seconds * part);
        if let Some(outcome) = case.interrupt(&whole, moment, patience, before) {
            return outcome;
        }
    }
    whole.failure = Some(format!("never met while it ran, in {TRIES} tries"));
    whole
}

/// A program, and where it runs for how long at most.
pub(crate) struct Case<'a> {
    pub(crate) binary: &'a Path,
    pub(crate) program: &'a Program,
    pub(crate) target: &'a Target,
    pub(crate) limit: Duration,
}

impl Case<'_> {
    /// Has `kedge run` with `options` start it, by the command `before` it.
    pub(crate) fn run(&self, options: &[&str], before: &[&str]) -> Outcome {
        let mut command = Command::new(kedge());
        let gpu = self.target.gpu(self.program);
        command.args(["run", "--gpu", &gpu]).args(options).arg("--").args(before).arg(self.binary);
        command.args(&self.program.args);
        // As for programs that nobody interrupts.
        command.env("XDG_CACHE_HOME", "/dev/null");
        run_command(command, self.limit)
    }

    /// `None` where the program was not met in time.
    fn interrupt(
        &self,
        whole: &Outcome,
        moment: Duration,
        patience: Duration,
        before: &[&str],
    ) -> Option<Outcome> {
        let name = format!("i{}-{:x}", std::process::id(), (fraction() * 1e15) as u64);
        let images = Folder::new(&name);
        let first = std::thread::scope(|scope| {
            let first = scope.spawn(|| self.run(&["--job", &name], before));
            std::thread::sleep(moment);
            let over = || first.is_finished();
            let taken = checkpoint(&name, &images.0, patience, over);
            first.join().ok().map(|first| (first, taken))
        });
        let (first, taken) = first?;
        let image = match taken {
            Ok(image) => image,
            Err(why) if no_job(&why) => return None,
            Err(why) => {
                let far = self.program.far_checkpoint_refused.as_ref();
                let far = far.filter(|_| matches!(self.target, Target::Far(_)));
                let mut expected = self.program.refused.iter().chain(far);
                let expected = expected.any(|text| why.contains(text));
                return Some(match expected {
                    // It goes on as if nobody had asked.
                    true => Outcome { failure: judge(self.program, &first), ..first },
                    false => failed(first, format!("no checkpoint: {why}")),
                });
            }
        };
        let mut restart = Command::new(kedge());
        restart.arg("restart").arg(&image);
        let mut second = run_command(restart, self.limit);
        second.stdout.insert_str(0, &first.stdout);
        second.stderr.insert_str(0, &first.stderr);
        let ended = second.failure.take();
        second.failure = ended
            .map(|why| format!("restarted: {why}"))
            .or_else(|| judge(self.program, &second))
            .or_else(|| differs(&whole.stdout, &second.stdout));
        let after = first.stdout.len() as f64 / whole.stdout.len().max(1) as f64;
        if let Some(failure) = &mut second.failure {
            failure.push_str(&format!(
                " (interrupted after {:.0} ms, {:.0} % of its output)",
                moment.as_secs_f64() * 1e3,
                after * 100.0
            ));
        }
        Some(second)
    }
}

/// Saves and ends the job: its image. Asks again for `patience`, unless it is over.
fn checkpoint(
    job: &str,
    dir: &Path,
    patience: Duration,
    over: impl Fn() -> bool,
) -> Result<PathBuf, String> {
    let begin = Instant::now();
    loop {
        let mut command = Command::new(kedge());
        command.args(["checkpoint", job, "--stop", "--json", "--dir"]).arg(dir);
        let outcome = run_command(command, Duration::from_secs(60));
        if outcome.failure.is_none() {
            let report: serde_json::Value =
                serde_json::from_str(&outcome.stdout).map_err(|e| e.to_string())?;
            return report["image"].as_str().map(PathBuf::from).ok_or_else(|| "no image".into());
        }
        if !no_job(&outcome.stderr) || over() || begin.elapsed() > patience {
            return Err(match outcome.failure {
                // It says why itself, but for one that was ended here.
                Some(failure) if outcome.stderr.is_empty() => failure,
                _ => outcome.stderr,
            });
        }
    }
}

pub(crate) fn no_job(said: &str) -> bool {
    ["no job", "is not running", "has ended", "no process", "does not answer"]
        .iter()
        .any(|text| said.contains(text))
}

pub(crate) fn failed(outcome: Outcome, why: String) -> Outcome {
    Outcome { failure: Some(why), ..outcome }
}

/// What is not as in an undisturbed run.
pub(crate) fn differs(whole: &str, both: &str) -> Option<String> {
    if whole == both {
        return None;
    }
    let mut lines = whole.lines().zip(both.lines());
    let first = lines.find(|(expected, got)| expected != got);
    Some(match first {
        Some((expected, got)) => format!("undisturbed it prints {expected:?}, restarted {got:?}"),
        None => format!("{} bytes of output, not {}", both.len(), whole.len()),
    })
}

/// For the images of one run.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("kedge-{name}")))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
