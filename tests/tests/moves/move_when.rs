//! When a job's devices move: at a time, when the job is idle, when others are free, and from its
//! start on.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, send};
use kedge_tests::server::Served;
use kedge_tests::world::{failure, jobs_in, stderr, wait_for};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

/// More steps than any test reads.
const MANY_STEPS: &str = "100000";
/// Nobody listens there.
const NOWHERE: &str = "127.0.0.1:1";

fn steps(place: &GpuSteps, options: &[&str]) -> Command {
    let program = place.program.display().to_string();
    let run = ["run", "--job", "j"];
    place.kedge(&[&run[..], options, &["--", &program, MANY_STEPS, "5"]].concat())
}

fn is_on(place: &GpuSteps) -> String {
    let rows = place.output(&["ps", "--json"]).stdout;
    let rows: Value = serde_json::from_slice(&rows).expect("rows");
    // What looks whether devices are free is a job, too.
    let mut rows = rows.as_array().into_iter().flatten();
    let row = rows.find(|row| row["name"] == "j");
    row.and_then(|row| row["gpu"].as_str()).unwrap_or_default().to_owned()
}

/// A move that waits, and its events as they come.
struct Waits {
    child: Child,
    events: Lines<BufReader<ChildStdout>>,
}

impl Waits {
    fn start(place: &GpuSteps, options: &[&str]) -> Waits {
        let migrate = [&["migrate", "j", "--json"], options].concat();
        let mut child = place.kedge(&migrate).spawn().expect("kedge");
        let events = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Waits { child, events }
    }

    fn event(&mut self) -> Value {
        let line = self.events.next().expect("an event").expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Reads to the end, which is a good one.
    fn ends_well(mut self) {
        let left: Vec<String> = self.events.map_while(Result::ok).collect();
        assert!(left.last().is_some_and(|line| line.contains("\"done\"")), "{left:?}");
        assert!(self.child.wait().expect("kedge").success());
    }
}

#[test]
fn a_move_waits_for_its_time() {
    let place = GpuSteps::mine("mwtime");
    let mut job = Job::start_recovering(steps(&place, &["--gpu", "soft"]));
    job.read_to(10);
    let (before, begin) = (job.proxies(), Instant::now());
    let mut waits = Waits::start(&place, &["--to", "soft", "--when", "+1500ms"]);
    let first = waits.event();
    assert_eq!((&first["event"], &first["for"]), (&"waits".into(), &"time".into()), "{first}");
    // On a machine that is busy the time may have come by now.
    let proxies = job.proxies();
    assert!(proxies == before || begin.elapsed() >= Duration::from_millis(1500));
    assert_eq!(waits.event()["event"], "round");
    assert!(begin.elapsed() >= Duration::from_millis(1500));
    waits.ends_well();
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    assert_ne!(job.proxies(), before);
    job.read_to(job.step + 20);
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_job_moves_once_it_asks_nothing_of_its_devices() {
    let place = GpuSteps::mine("mwidle");
    let mut job = Job::start_recovering(steps(&place, &["--gpu", "soft"]));
    job.read_to(10);
    let before = job.proxies();
    let mut waits = Waits::start(&place, &["--to", "soft", "--when", "idle"]);
    assert_eq!(waits.event()["for"], "idle");
    let (end, mut longest) = (Instant::now() + Duration::from_secs(3), Duration::ZERO);
    while Instant::now() < end {
        let begin = Instant::now();
        job.read_to(job.step + 1);
        longest = longest.max(begin.elapsed());
    }
    // Where it was held up for as long, it was idle.
    assert!(job.proxies() == before || longest >= Duration::from_millis(500), "{longest:?}");
    let program = place.clients(&job);
    send("STOP", &program);
    assert_eq!(waits.event()["event"], "round");
    waits.ends_well();
    send("CONT", &program);
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    assert_ne!(job.proxies(), before);
    job.read_to(job.step + 20);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

/// What a user of mrCUDA does: the job begins far away, and comes home when a device there is free.
#[test]
fn a_job_begins_elsewhere_and_moves_when_devices_are_free() {
    let server = Served::start(&["--gpu", "soft"]);
    for (name, from, to) in
        [("mwhome", &server.address[..], "soft"), ("mwaway", "soft", &server.address)]
    {
        let place = GpuSteps::mine(name);
        let mut job =
            Job::start_recovering(steps(&place, &["--gpu", from, "--move-to", to, "--when-free"]));
        let begin = Instant::now();
        while is_on(&place) != to {
            assert!(begin.elapsed() < Duration::from_secs(90), "{name}: {}", place.log());
            job.read_to(job.step + 1);
        }
        job.read_to(job.step + 20);
        assert_eq!(job.back, [] as [u64; 0]);
        job.kill();
        place.nothing_runs();
    }
    let place = GpuSteps::mine("mwcpu");
    let said = failure(&place.output(&["run", "--gpu", "none", "--move-to", "soft", "--", "true"]));
    assert!(said.contains("--move-to"), "{said}");
}

/// What is to move a job leaves alone who gets its name later.
#[test]
fn a_later_job_of_the_same_name_stays_where_it_is() {
    let place = GpuSteps::mine("mwother");
    let run = ["run", "--gpu", "soft", "--job", "j"];
    let typo = ["--move-to", "soft", "--", "/nowhere/at/all"];
    assert!(!place.output(&[&run[..], &typo].concat()).status.success());
    let mut first = Job::start_recovering(steps(&place, &["--gpu", "soft"]));
    first.read_to(10);
    let trying = place.kedge(&["migrate", "j", "--to", NOWHERE, "--keep-trying"]).spawn();
    let mut trying = trying.expect("kedge");
    let mut said = BufReader::new(trying.stderr.take().expect("a pipe")).lines();
    let line = said.next().expect("a line").expect("text");
    assert!(line.contains("tried again in 5 s"), "{line}");
    assert!(!place.log().contains("has moved"), "for one that has not begun: {}", place.log());
    first.kill();
    let mut second = Job::start_recovering(steps(&place, &["--gpu", "soft"]));
    second.read_to(10);
    let line = said.next().expect("a line").expect("text");
    assert!(line.contains("has ended"), "{line}");
    assert!(!trying.wait().expect("kedge").success());
    second.read_to(second.step + 20);
    second.kill();
    place.nothing_runs();
}

/// Nothing of the job is touched meanwhile, and who waits ends with the job.
#[test]
fn devices_that_are_not_there_are_waited_for() {
    let place = GpuSteps::mine("mwfree");
    let beside = ["--gpu", "soft", "--move-to", NOWHERE, "--when-free"];
    let mut job = Job::start_recovering(steps(&place, &beside));
    job.read_to(10);
    let before = job.proxies();
    wait_for("the log has no reason", || {
        place.log().lines().any(|line| line.contains("migrate[") && line.contains(NOWHERE))
    });
    let never = place.output(&["migrate", "j", "--to", "soft:3", "--keep-trying"]);
    assert!(failure(&never).contains("cannot move to soft:3"), "{}", stderr(&never));
    let mut waits = Waits::start(&place, &["--to", NOWHERE, "--when", "free"]);
    let first = waits.event();
    assert_eq!((&first["event"], &first["for"]), (&"waits".into(), &"free".into()), "{first}");
    assert!(first["why"].as_str().is_some_and(|why| why.contains(NOWHERE)), "{first}");
    let trying = place.kedge(&["migrate", "j", "--to", NOWHERE, "--keep-trying"]).spawn();
    let mut trying = trying.expect("kedge");
    let mut said = BufReader::new(trying.stderr.take().expect("a pipe")).lines();
    let first = said.next().expect("a line").expect("text");
    assert!(first.contains(NOWHERE) && first.contains("tried again in 5 s"), "{first}");
    job.read_to(job.step + 20);
    assert_eq!((is_on(&place), job.proxies()), ("soft".to_owned(), before));
    let second = said.next().expect("a line").expect("text");
    assert!(second.contains("tried again in 10 s"), "{second}");
    let begin = Instant::now();
    job.kill();
    let last = said.map_while(Result::ok).last().unwrap_or_default();
    assert!(last.contains("has ended"), "{last}");
    assert!(begin.elapsed() < Duration::from_secs(8), "it has slept on: {:?}", begin.elapsed());
    let output = waits.child.wait_with_output().expect("kedge");
    assert!(failure(&output).contains("has ended"), "{}", stderr(&output));
    assert!(!trying.wait().expect("kedge").success());
    wait_for("who waits is still there", || place.running().is_empty());
    place.nothing_runs();
}

/// As one is for a while that goes back to an image.
#[test]
fn a_job_that_does_not_answer_is_asked_again() {
    let place = GpuSteps::mine("mwsilent");
    let mut job = Job::start_recovering(steps(&place, &["--gpu", "soft"]));
    job.read_to(10);
    let before = job.proxies();
    let control = jobs_in(&place.world.home()).join("j/control");
    let away = control.with_extension("away");
    fs::rename(&control, &away).expect("its socket");
    let once = place.output(&["migrate", "j", "--to", "soft"]);
    assert!(failure(&once).contains("does not answer"), "{}", stderr(&once));
    let trying = place.kedge(&["migrate", "j", "--to", "soft", "--keep-trying"]).spawn();
    let mut trying = trying.expect("kedge");
    let mut said = BufReader::new(trying.stderr.take().expect("a pipe")).lines();
    let line = said.next().expect("a line").expect("text");
    assert!(line.contains("does not answer") && line.contains("tried again in 5 s"), "{line}");
    fs::rename(&away, &control).expect("its socket");
    let rest: Vec<String> = said.map_while(Result::ok).collect();
    assert!(trying.wait().expect("kedge").success(), "{rest:?}");
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    assert_ne!(job.proxies(), before);
    job.read_to(job.step + 20);
    job.kill();
    place.nothing_runs();
}
