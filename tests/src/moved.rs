//! A program whose devices move while it runs, again and again: it prints what it prints
//! undisturbed.

use crate::interrupted::{Case, TRIES, failed, no_job, with_log};
use crate::job::{family, send, state};
use crate::random::fraction;
use crate::run::{judge, run_command};
use crate::{Outcome, Program, Target, kedge};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Moves in a row, where the program runs for so long.
const MOVES: usize = 3;
/// A program that runs slowly runs for so long, and then stands still for so long: most would be
/// over before another proxy has started.
const RUNS: Duration = Duration::from_micros(500);
const STANDS: Duration = Duration::from_millis(8);
/// How much longer it stands still each time that a program was over before it had moved: a busy
/// machine takes longer for a move, not for a program that waits.
const STANDS_STEP: Duration = Duration::from_millis(16);
/// Of the tries, so many at a random moment; in the others as soon as the program is there: one
/// that sleeps is over while a moment lasts that was chosen for one that works.
const RANDOM: u32 = 10;
/// Between two looks at whether it is over.
const LOOK: Duration = Duration::from_millis(5);
/// What a program is started by that stands still until it is to run, and comes last then: on a
/// loaded machine a short one would be over before it is met.
const WAITS: [&str; 4] = ["bash", "-c", "kill -STOP $$; exec nice -n 19 \"$@\"", "bash"];

/// Where a program's devices go.
#[derive(Debug, Clone)]
pub enum Journey {
    /// From one to the other and back, or the reverse; both may be the same.
    Between([Target; 2]),
    /// From the first to the second and back. Any refusal is a result: which programs can go.
    Try([Target; 2]),
}

/// Runs `binary` undisturbed, then once more, slowly, with moves in between.
pub fn run_moved(binary: &Path, program: &Program, journey: &Journey) -> Outcome {
    let (Journey::Between(places) | Journey::Try(places)) = journey;
    let mut places = places.each_ref();
    let tried = matches!(journey, Journey::Try(_));
    if !tried && (program.far_refused.is_some() || fraction() < 0.5) {
        places.reverse();
    }
    let target = places[0];
    let to = places.map(|place| place.gpu(program));
    let case = Case { binary, program, target, limit: Duration::from_secs(program.seconds) };
    let mut whole = case.run(&[], &[]);
    if whole.failure.is_none() {
        whole.failure = judge(program, &whole);
    }
    if whole.failure.is_some() {
        return whole;
    }
    for attempt in 0..TRIES {
        let part = match attempt {
            0..RANDOM => fraction() * 0.6 / (1.0 + 0.5 * f64::from(attempt)),
            _ => 0.0,
        };
        let moment = Duration::from_secs_f64(whole.seconds * part);
        let stands = STANDS + STANDS_STEP * attempt;
        let name = format!("m{}-{:x}", std::process::id(), (fraction() * 1e15) as u64);
        if let Some(outcome) = moved(&case, &name, &whole, (moment, stands), &to, tried) {
            return with_log(outcome, &name);
        }
    }
    whole.failure = Some(format!("never met while it ran, in {TRIES} tries"));
    whole
}

/// `None` where the program was not met in time: after it has run for so long, standing still for
/// so long each half millisecond.
fn moved(
    case: &Case<'_>,
    name: &str,
    whole: &Outcome,
    (moment, stands): (Duration, Duration),
    to: &[String; 2],
    tried: bool,
) -> Option<Outcome> {
    let moved = AtomicBool::new(false);
    let (mut outcome, moves) = std::thread::scope(|scope| {
        let runs = scope.spawn(|| case.run(&["--job", name], &WAITS));
        let over = || runs.is_finished();
        let moves = match process(name, over) {
            None => Ok(0),
            Some(pid) => {
                let done = &moved;
                scope.spawn(move || slowly(pid, stands, done));
                // As far as it comes in that time.
                wait(moment * ((stands + RUNS).div_duration_f32(RUNS) as u32), over);
                move_on(name, to, over)
            }
        };
        moved.store(true, Ordering::SeqCst);
        runs.join().ok().map(|outcome| (outcome, moves))
    })?;
    let refused = |why: &str| {
        case.program.move_refused.as_ref().is_some_and(|text| why.contains(text.as_str()))
    };
    match moves {
        // It was over too soon, but ended as it should.
        Ok(0) => return case.disturbed(whole, &outcome).map(|why| failed(outcome, why)),
        Ok(_) => {}
        // It goes on as if nobody had asked.
        Err(why) if tried || refused(&why) => outcome.refused = Some(why),
        Err(why) => return Some(failed(outcome, format!("not moved: {why}"))),
    }
    outcome.failure = case.disturbed(whole, &outcome);
    Some(outcome)
}

/// Waits for so long, or until a program is over.
fn wait(time: Duration, over: impl Fn() -> bool) {
    let end = Instant::now() + time;
    while !over() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// The job's first process, once it stands still.
fn process(job: &str, over: impl Fn() -> bool) -> Option<u32> {
    while !over() {
        let listed = order(&["ps", "--json"]).stdout;
        let rows: serde_json::Value = serde_json::from_str(&listed).unwrap_or_default();
        let mut rows = rows.as_array().into_iter().flatten();
        let row = rows.find(|row| row["name"] == job && row["state"] == "running");
        let pid = row.and_then(|row| row["pid"].as_u64()).and_then(|pid| u32::try_from(pid).ok());
        if let Some(pid) = pid.filter(|pid| state(*pid) == Some('T')) {
            return Some(pid);
        }
    }
    None
}

/// Has a program run and stand still in turn, until `done`.
fn slowly(pid: u32, stands: Duration, done: &AtomicBool) {
    let mut first = true;
    while !done.load(Ordering::SeqCst) {
        let all = family(pid);
        if !first {
            send("STOP", &all);
            std::thread::sleep(stands);
        }
        first = false;
        send("CONT", &all);
        std::thread::sleep(RUNS);
    }
}

fn order(arguments: &[&str]) -> Outcome {
    let mut command = Command::new(kedge());
    command.args(arguments);
    run_command(command, Duration::from_secs(60))
}

/// Moves a job, which is on the first of two places, to the other and back until it has ended: how
/// often.
fn move_on(job: &str, to: &[String; 2], over: impl Fn() -> bool) -> Result<usize, String> {
    let mut moves = 0;
    while moves < MOVES && !over() {
        let moved = order(&["migrate", job, "--to", &to[(moves + 1) % 2]]);
        match moved.failure {
            None => moves += 1,
            // Before it has begun, or after it has ended.
            Some(_) if no_job(&moved.stderr) || moved.stderr.contains("nothing to move") => {}
            Some(_) => return Err(moved.stderr),
        }
    }
    Ok(moves)
}
