//! Two jobs on one machine's devices: one is checkpointed, killed and restarted, and the other goes
//! on.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, User, family, send};
use kedge_tests::world::wait_for;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

/// More steps than it is left time for.
const FOR_EVER: &str = "1000000";

/// A job beside the one that is tested. Its program compares every step with what the host
/// computes.
struct Neighbour {
    child: Child,
    /// Its last step.
    step: Arc<AtomicU64>,
    /// The first line that is not the next step; none if its output ends first.
    reader: Option<JoinHandle<Option<String>>>,
    family: Vec<u32>,
}

impl Neighbour {
    fn start(place: &GpuSteps) -> Neighbour {
        let program = place.program.display().to_string();
        let run = ["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "other", "--"];
        let mut command = place.kedge(&[&run[..], &[&program, FOR_EVER, "10"]].concat());
        let mut child = command.spawn().expect("timeout, from coreutils");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let step = Arc::new(AtomicU64::new(0));
        let reader = Some(thread::spawn({
            let step = step.clone();
            move || first_wrong(lines, &step)
        }));
        let mut neighbour = Neighbour { child, step, reader, family: Vec::new() };
        neighbour.goes_on();
        neighbour.family = family(neighbour.child.id());
        neighbour
    }

    /// From now on.
    fn goes_on(&self) {
        let now = self.step.load(Ordering::SeqCst);
        let on = || self.step.load(Ordering::SeqCst) > now + 2;
        wait_for("the other job does not go on", on);
    }

    /// Ends it: it is as it was at its start.
    fn ends_undisturbed(mut self) {
        self.goes_on();
        assert_eq!(family(self.child.id()), self.family, "its processes are others");
        send("KILL", &self.family);
        let wrong = self.reader.take().expect("one").join().expect("the reader");
        assert_eq!(wrong, None, "after step {:?}", self.step);
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        send("KILL", &family(self.child.id()));
        let _ = self.child.wait();
    }
}

fn first_wrong(mut lines: BufReader<ChildStdout>, last: &AtomicU64) -> Option<String> {
    let mut line = String::new();
    lines.read_line(&mut line).ok()?;
    let nonce = line.trim_end().strip_prefix("nonce ")?.to_owned();
    for step in 1.. {
        line.clear();
        // A line that was cut by its end is no step of it.
        if lines.read_line(&mut line).ok()? == 0 || !line.ends_with('\n') {
            return None;
        }
        if line.trim_end() != format!("{nonce} {step}") {
            return Some(line);
        }
        last.store(step, Ordering::SeqCst);
    }
    None
}

#[test]
fn one_is_checkpointed_killed_and_restarted_while_another_goes_on() {
    let place = GpuSteps::new("nbru", User::Nobody);
    let place = place.unwrap_or_else(|| GpuSteps::mine("nbr"));
    let other = Neighbour::start(&place);
    let mut job = place.start(&["--incremental"]);
    let nonce = job.nonce.clone();
    let mut image = place.checkpoint(&[]);
    for _ in 0..2 {
        job.read_to(job.step + 20);
        image = place.checkpoint(&[]);
        other.goes_on();
    }
    job.kill();
    let printed = job.step;
    other.goes_on();
    let mut job = Job::spawn_recovering(place.to_restart(&image, &[]), &nonce);
    job.read_to(printed + 5);
    other.goes_on();
    assert!((41..=printed + 1).contains(&job.back[0]), "{:?}, {printed} printed", job.back);
    let rows = String::from_utf8_lossy(&place.output(&["ps"]).stdout).into_owned();
    assert!(rows.contains("other") && rows.lines().count() == 3, "{rows}");
    // To the end it goes in other tests.
    job.kill();
    other.ends_undisturbed();
    place.nothing_runs();
}
