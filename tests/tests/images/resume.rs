//! `kedge run --resume`: one line that starts a job, or goes on with it, as batch systems have it.
use kedge_tests::job::{Job, kedge_as, send};
use kedge_tests::place::Place;
use kedge_tests::world::stderr;
use std::process::Stdio;

/// Steps that take long enough to be interrupted, and then end well.
const SCRIPT: &str = "nonce=$(printf '%040d' $$); echo nonce $nonce
    for ((step = 1; step <= 300; step++)); do read -t 0.01 <> <(:); echo \"$nonce $step\"; done
    echo \"$nonce well\"; exit 0";
const STEPS: u64 = 300;

const BATCH: [&str; 11] = [
    "run",
    "--gpu",
    "none",
    "--job",
    "j",
    "--resume",
    "--on-term",
    "checkpoint,30s",
    "--requeue-exit",
    "85",
    "--",
];

/// The same line each time.
fn line(place: &Place) -> std::process::Command {
    kedge_as(&place.world, place.user, &[&BATCH[..], &["bash", "-c", SCRIPT]].concat())
}

#[test]
fn a_job_is_started_requeued_resumed_and_started_anew() {
    let place = Place::mine("resume");
    let mut job = Job::start(line(&place));
    for status in [85, 85] {
        let before = job.step;
        job.read_to(before + 20);
        let nonce = job.nonce.clone();
        job.signal("TERM");
        job.drain();
        assert_eq!(job.wait().code(), Some(status), "{}", place.log());
        assert!(place.log().contains("kedge ends with 85"), "{}", place.log());
        job = Job::restart(line(&place), &nonce);
        assert!(job.step > before, "{} after {before}", job.step);
    }
    assert_eq!(job.finish(STEPS).code(), Some(0));
    assert_eq!(place.names().len(), 2);
    // It is done: its images are of no more use to this line.
    let mut job = Job::start(line(&place));
    job.kill();
    // One that did not end well goes on from its own images alone, and has none.
    let mut job = Job::start(line(&place));
    job.kill();
}

/// The program is told before kedge is, as by a batch system that knows a job by its processes.
#[test]
fn a_job_whose_processes_are_all_told_is_saved() {
    let place = Place::mine("resumeall");
    // bash takes signals again that are blocked where it substitutes processes.
    let script = SCRIPT.replace("read -t 0.01 <> <(:)", "sleep 0.01");
    let withheld = || {
        let line = [&BATCH[..10], &["--withhold-term", "--", "bash", "-c", &script]].concat();
        kedge_as(&place.world, place.user, &line)
    };
    let mut job = Job::start(withheld());
    for told in 1..=2 {
        let before = job.step;
        job.read_to(before + 20);
        let nonce = job.nonce.clone();
        let jobs = place.output(&["ps", "--json"]).stdout;
        let jobs: Vec<serde_json::Value> = serde_json::from_slice(&jobs).expect("a list");
        let number = |name: &str| jobs[0][name].as_u64().expect("a process") as u32;
        send("TERM", &[number("pid"), number("supervisor"), number("supervisor")]);
        job.drain();
        assert_eq!(job.wait().code(), Some(85), "{}", place.log());
        assert_eq!(place.names().len(), told, "{}", place.log());
        job = Job::restart(withheld(), &nonce);
        assert!(job.step > before, "{} after {before}", job.step);
    }
    assert_eq!(job.finish(STEPS).code(), Some(0));
}

/// What the devices hold is written by a process that would end with its program.
#[test]
fn a_job_with_a_device_is_saved_before_it_ends() {
    let place = Place::mine("resumegpu");
    let options = ["--resume", "--on-term", "checkpoint,30s", "--requeue-exit", "85"];
    let mut job = place.with_device("gpu_steps", &options, &["100000", "5"]);
    job.read_to(20);
    let nonce = job.nonce.clone();
    job.signal("TERM");
    job.drain();
    assert_eq!(job.wait().code(), Some(85), "{}", place.log());
    assert_eq!(place.states(), [("j-0001".to_owned(), "finished".to_owned())]);
    let mut job = place.restart(&place.images(), &nonce);
    assert!(job.step > 20);
    job.kill();
}

/// Of what a killed process has open, the kernel closes the last first: the end that was accepted,
/// which stays in TIME-WAIT at the port where the job listens.
const LISTENS: &str = r#"
import os, socket, time
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
client = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
nonce = "%040d" % os.getpid()
print("nonce", nonce, flush=True)
for step in range(1, 301):
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    print(nonce, step, flush=True)
    time.sleep(0.01)
"#;

#[test]
fn a_job_that_kedge_ends_leaves_its_ports_to_a_restart() {
    let place = Place::mine("resumeports");
    let run = ["run", "--gpu", "none", "--job", "j", "--", "/usr/bin/python3", "-c", LISTENS];
    let mut job = Job::start(kedge_as(&place.world, place.user, &run));
    job.read_to(10);
    let saved = place.output(&["checkpoint", "j"]);
    assert!(saved.status.success(), "{saved:?}");
    let ended = place.output(&["kill", "j"]);
    assert!(ended.status.success(), "{ended:?}");
    job.drain();
    job.wait();
    let restarted = place.output(&["restart", "j-0001"]);
    assert!(restarted.status.success(), "{restarted:?}");
    assert!(!stderr(&restarted).contains("TIME-WAIT"), "{restarted:?}");
}

#[test]
fn a_program_that_ends_before_it_is_captured_is_not_requeued() {
    let place = Place::mine("resumeends");
    let run = [&BATCH[..], &["sh", "-c", "exit 3"]].concat();
    let output = place.output(&run);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

/// Enough memory for a restart that takes a while.
const LARGE: &str = r#"
import os, time
held = os.urandom(256 << 20)
print("nonce", "%040d" % os.getpid(), flush=True)
for step in range(1, 100001):
    print("%040d" % os.getpid(), step, flush=True)
    time.sleep(0.01)
"#;

/// Starts a program to which SIGTERM has been sent while it was blocked.
const TOLD: &str = "
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
";

/// Its image is whole: Slurm did not requeue it.
#[test]
fn a_job_that_is_told_to_end_while_it_restarts_is_requeued() {
    let place = Place::mine("resumetold");
    let run = [&BATCH[..], &["/usr/bin/python3", "-c", LARGE]].concat();
    let mut job = Job::start(kedge_as(&place.world, place.user, &run));
    job.read_to(3);
    job.signal("TERM");
    job.drain();
    assert_eq!(job.wait().code(), Some(85), "{}", place.log());
    let usual = kedge_as(&place.world, place.user, &run);
    // What is pending is handed on by exec alone.
    let mut told = std::process::Command::new("timeout");
    told.args(["60", "/usr/bin/python3", "-c", TOLD]).arg(place.world.parts());
    told.args(&run).stdin(Stdio::null());
    usual.get_envs().for_each(|(name, value)| match value {
        Some(value) => drop(told.env(name, value)),
        None => drop(told.env_remove(name)),
    });
    usual.get_current_dir().map(|dir| told.current_dir(dir));
    let ended = told.output().expect("timeout");
    assert_eq!(ended.status.code(), Some(85), "{ended:?} {}", place.log());
    assert_eq!(place.names().len(), 1, "it was saved once more: {}", place.log());
}

#[test]
fn what_belongs_together_is_asked_for() {
    let place = Place::mine("resumeuse");
    for (words, named) in [
        (&["run", "--resume", "--", "true"][..], "--job"),
        (&["run", "--requeue-exit", "85", "--", "true"], "--on-term"),
        (&["run", "--on-term", "checkpoint", "--requeue-exit", "300", "--", "true"], "300"),
    ] {
        let output = place.output(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        assert!(stderr(&output).contains(named), "{words:?}: {output:?}");
    }
}
