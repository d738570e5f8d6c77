//! A program that is checkpointed at a random moment, runs on, is killed, and restarted from its
//! image: what it printed before that moment and after the restart must be what it prints
//! undisturbed, and it ends with the number that it drew when it began.

use crate::job::family;
use crate::random::fraction;
use crate::run::{Said, judge, run, run_command, run_heard};
use crate::{Outcome, Program, Target, kedge};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;
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
/// A program runs on for up to so long, in seconds, between its image and its end.
const RUNS_ON: f64 = 0.02;
/// How long the processes of a job that was killed may take to go.
const GONE_TIMEOUT: Duration = Duration::from_secs(5);

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
        let name = format!("i{}-{:x}", std::process::id(), (fraction() * 1e15) as u64);
        if let Some(outcome) = case.interrupt(&name, &whole, moment, patience, before) {
            return with_log(outcome, &name);
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
        self.heard(options, before, &Said::default())
    }

    fn heard(&self, options: &[&str], before: &[&str], said: &Said) -> Outcome {
        let mut command = Command::new(kedge());
        let gpu = self.target.gpu(self.program);
        command.args(["run", "--gpu", &gpu]).args(options).arg("--").args(before).arg(self.binary);
        command.args(&self.program.args);
        // As for programs that nobody interrupts.
        command.env("XDG_CACHE_HOME", "/dev/null").env("KEDGE_TELL_NONCE", "1");
        run_heard(command, self.limit, said)
    }

    /// `None` where the program was not met in time.
    fn interrupt(
        &self,
        name: &str,
        whole: &Outcome,
        moment: Duration,
        patience: Duration,
        before: &[&str],
    ) -> Option<Outcome> {
        let images = Folder::new(name);
        let said = Said::default();
        let first = std::thread::scope(|scope| {
            let first = scope.spawn(|| self.heard(&["--job", name], before, &said));
            std::thread::sleep(moment);
            let over = || first.is_finished();
            let has_begun = has_begun(&said);
            let taken = checkpoint(name, &images.0, patience, over);
            let killed = taken.is_ok().then(|| kill(name));
            first.join().ok().map(|first| (first, has_begun, taken, killed))
        });
        let (first, has_begun, taken, killed) = first?;
        let image = match taken {
            Ok(image) => image,
            // It has ended by itself, or else the checkpoint has ended it.
            Err(why) if no_job(&why) => {
                return self
                    .disturbed(whole, &first)
                    .map(|how| failed(first, format!("{how}: {why}")));
            }
            Err(why) => {
                let far = self.program.far_checkpoint_refused.as_ref();
                let far = far.filter(|_| matches!(self.target, Target::Far(_)));
                let mut expected = self.program.refused.iter().chain(far);
                let expected = expected.any(|text| why.contains(text));
                return Some(match expected {
                    // It goes on as if nobody had asked.
                    true => {
                        let failure = self.disturbed(whole, &first);
                        Outcome { failure, refused: Some(why), ..first }
                    }
                    false => failed(first, format!("no checkpoint: {why}")),
                });
            }
        };
        let went_on = match killed? {
            Ok(true) => prefix(&whole.stdout, &first.stdout),
            // It was over by then: what it did after the image must have been right.
            Ok(false) => self.disturbed(whole, &first),
            Err(why) => Some(why),
        };
        if let Some(how) = went_on {
            return Some(failed(first, format!("after its checkpoint: {how}")));
        }
        let mut second = self.restart(&image, whole, &first, has_begun);
        if let Some(failure) = &mut second.failure {
            let moment = moment.as_secs_f64() * 1e3;
            failure.push_str(&format!(" (interrupted after {moment:.0} ms)"));
        }
        Some(second)
    }

    /// Returns what is not as in an undisturbed run.
    pub(crate) fn disturbed(&self, whole: &Outcome, outcome: &Outcome) -> Option<String> {
        let failure = outcome.failure.clone();
        failure
            .or_else(|| judge(self.program, outcome))
            .or_else(|| differs(&whole.stdout, &outcome.stdout))
    }

    /// Restarts `image` of a program that was killed when it had printed what `first` tells.
    fn restart(&self, image: &Path, whole: &Outcome, first: &Outcome, has_begun: bool) -> Outcome {
        let mut restart = Command::new(kedge());
        restart.arg("restart").arg(image);
        let mut second = run_command(restart, self.limit);
        let began_anew = began_anew(whole, first, &second, has_begun);
        // What it printed between its image and its end it prints once more.
        let before = whole.stdout.len().saturating_sub(second.stdout.len()).min(first.stdout.len());
        second.stdout.insert_str(0, first.stdout.get(..before).unwrap_or(&first.stdout));
        second.stderr.insert_str(0, &first.stderr);
        second.failure = self.disturbed(whole, &second).or(began_anew);
        if let Some(failure) = &mut second.failure {
            failure.insert_str(0, "restarted: ");
        }
        second
    }
}

/// Kills all of a job's processes, a moment after its checkpoint. `false` if it had ended by then.
///
/// # Errors
///
/// Why it could not be killed, or which process was left.
fn kill(job: &str) -> Result<bool, String> {
    std::thread::sleep(Duration::from_secs_f64(fraction() * RUNS_ON));
    let order = |arguments: &[&str]| {
        let mut command = Command::new(kedge());
        command.args(arguments);
        run_command(command, Duration::from_secs(60))
    };
    let rows: serde_json::Value =
        serde_json::from_str(&order(&["ps", "--json"]).stdout).unwrap_or_default();
    let row = rows.as_array().into_iter().flatten().find(|row| row["name"] == job);
    let supervisor = row.and_then(|row| u32::try_from(row["supervisor"].as_u64()?).ok());
    let Some(supervisor) = supervisor else { return Ok(false) };
    let begun: Vec<(u32, String)> =
        family(supervisor).into_iter().filter_map(|pid| Some((pid, begin_of(pid)?))).collect();
    let killed = order(&["kill", job, "--signal", "KILL"]);
    if killed.failure.is_some() {
        return if no_job(&killed.stderr) { Ok(false) } else { Err(killed.stderr) };
    }
    let asked = Instant::now();
    loop {
        let left = begun.iter().find(|(pid, begin)| begin_of(*pid).as_ref() == Some(begin));
        match left {
            None => return Ok(true),
            Some((pid, _)) if asked.elapsed() > GONE_TIMEOUT => {
                return Err(format!("killed, its process {pid} is still there"));
            }
            Some(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Returns when a process began, in ticks since the machine started: another of its id began at
/// another time. `None` if it has ended.
fn begin_of(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    (!matches!(*fields.first()?, "Z" | "X")).then(|| fields.get(19).map(ToString::to_string))?
}

/// Returns why what was `printed` until a kill is no beginning of an undisturbed run's `whole`.
fn prefix(whole: &str, printed: &str) -> Option<String> {
    let part = whole.get(..printed.len()).unwrap_or(whole);
    differs(part, printed)
}

/// Whether a program has drawn its number (tests/programs/nonce.h).
fn has_begun(said: &Said) -> bool {
    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
    !nonces(&String::from_utf8_lossy(&said), " begins").is_empty()
}

/// The numbers that a program and others of its job have drawn, which a line tells with `what`
/// behind them.
fn nonces<'a>(said: &'a str, what: &str) -> BTreeSet<&'a str> {
    let number = |line: &'a str| line.strip_prefix("nonce ")?.strip_suffix(what);
    said.lines().filter_map(number).collect()
}

/// Returns why the numbers do not show that what the `second` run ends with is what the `first` had
/// begun: a program that begins anew draws another number. `has_begun`: it had drawn it before its
/// image was asked for.
fn began_anew(
    whole: &Outcome,
    first: &Outcome,
    second: &Outcome,
    has_begun: bool,
) -> Option<String> {
    let [begins, ends] = [" begins", " ends"].map(|what| nonces(&whole.stderr, what).len());
    let before = nonces(&first.stderr, " begins");
    let [anew, ended] = [" begins", " ends"].map(|what| nonces(&second.stderr, what));
    let all = if has_begun && begins == 1 { before } else { &before | &anew };
    // It may have told its end before the image; of several processes some may have ended.
    let told = if ended.is_empty() { nonces(&first.stderr, " ends").len() } else { ended.len() };
    let enough = if begins == 1 { told == ends } else { told <= ends };
    let same = enough && ended.is_subset(&all);
    (!same).then(|| format!("it ends with the numbers {ended:?}, and had begun with {all:?}"))
}

/// Saves the job, which runs on: its image. Asks again for `patience`, unless it is over.
fn checkpoint(
    job: &str,
    dir: &Path,
    patience: Duration,
    over: impl Fn() -> bool,
) -> Result<PathBuf, String> {
    let begin = Instant::now();
    loop {
        let mut command = Command::new(kedge());
        command.args(["checkpoint", job, "--json", "--dir"]).arg(dir);
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

/// Adds what kedge had to say about the job, if it failed.
pub(crate) fn with_log(mut outcome: Outcome, job: &str) -> Outcome {
    if outcome.failure.is_some() {
        let mut command = Command::new(kedge());
        command.args(["logs", job]);
        outcome.stderr.push_str(&run_command(command, Duration::from_secs(60)).stdout);
    }
    outcome
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

#[cfg(test)]
mod tests {
    use super::*;

    fn said(stderr: &str) -> Outcome {
        let (failure, refused, status, stdout) = (None, None, Some(0), String::new());
        Outcome { failure, refused, status, stdout, stderr: stderr.into(), seconds: 0.0 }
    }

    #[test]
    fn a_program_that_begins_anew_is_seen_by_its_number() {
        let whole = said("nonce a begins\nnonce a ends\n");
        let first = said("nonce b begins\n");
        let back = said("nonce b ends\n");
        let anew = said("nonce c begins\nnonce c ends\n");
        assert_eq!(began_anew(&whole, &first, &back, true), None);
        assert!(began_anew(&whole, &first, &anew, true).is_some());
        // Its image may be older than its number, and the first have ended meanwhile.
        assert_eq!(began_anew(&whole, &first, &anew, false), None);
        let over = said("nonce b begins\nnonce b ends\n");
        assert_eq!(began_anew(&whole, &over, &anew, false), None);
        // Its image may be newer than the last that it says.
        assert_eq!(began_anew(&whole, &over, &said(""), true), None);
        // It has lost its end, or has somebody else's.
        assert!(began_anew(&whole, &first, &said(""), true).is_some());
        assert!(began_anew(&whole, &first, &said("nonce d ends\n"), false).is_some());
    }

    #[test]
    fn what_is_printed_before_a_kill_is_a_beginning() {
        assert_eq!(prefix("one\ntwo\n", "one\nt"), None);
        assert!(prefix("one\ntwo\n", "one\ntwi").is_some());
        assert!(prefix("one\n", "one\ntwo\n").is_some());
    }
}
