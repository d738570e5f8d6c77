//! A running job's devices move to those of a server, as on another machine, between servers and
//! back, and nobody notices: also where a proxy of the server's ends in any phase, or the line is
//! cut.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, children, send};
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::{failure, stderr, wait_for};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// More steps than any test reads.
const MANY_STEPS: &str = "100000";

fn steps(place: &GpuSteps, gpu: &str, options: &[&str]) -> Command {
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", gpu, "--job", "j"];
    place.kedge(&[&run[..], options, &["--", &program, MANY_STEPS, "5"]].concat())
}

/// Moves it, and has it go on.
fn moved(place: &GpuSteps, job: &mut Job, to: &str) {
    let output = place.output(&["migrate", "j", "--to", to]);
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    job.read_to(job.step + 20);
}

/// Where `kedge ps` says that it is.
fn is_on(place: &GpuSteps) -> String {
    let rows = place.output(&["ps", "--json"]).stdout;
    let rows: serde_json::Value = serde_json::from_slice(&rows).expect("rows");
    rows[0]["gpu"].as_str().expect("devices").to_owned()
}

/// A server's sessions are `count` within a second: what was left is free.
fn sessions(server: &Served, count: usize) {
    wait_for("a session is still there", || children(server.pid()).len() == count);
}

fn tour(name: &str, program: &str) {
    let (first, second) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft"]));
    let place = GpuSteps::of(program, name, User::Same).expect("a program");
    let mut job = Job::start_recovering(steps(&place, "soft", &[]));
    job.read_to(10);
    for (to, on) in [(&first.address[..], [1, 0]), (&second.address, [0, 1]), ("soft", [0, 0])] {
        for _ in 0..2 {
            moved(&place, &mut job, to);
            assert_eq!(is_on(&place), to);
            sessions(&first, on[0]);
            sessions(&second, on[1]);
        }
    }
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_program_goes_there_elsewhere_and_back() {
    tour("fmtour", "gpu_steps");
}

/// Memory that the host and the devices both see is the same at both ends.
#[test]
fn what_both_see_goes_along() {
    tour("fmboth", "gpu_pinned");
}

#[test]
fn a_job_that_has_moved_comes_back_where_it_was() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fmback");
    let mut job = place.start(&[]);
    job.read_to(10);
    moved(&place, &mut job, &server.address);
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    assert!(place.output(&["kill", "j", "--grace", "0"]).status.success());
    job.drain();
    sessions(&server, 0);
    let mut again = Job::spawn_recovering(place.to_restart(&image, &[]), &nonce);
    again.read_to(again.step + 20);
    sessions(&server, 1);
    moved(&place, &mut again, "soft");
    again.read_to(STEPS);
    assert_eq!(again.end().code(), Some(7), "{}", place.log());
    sessions(&server, 0);
    place.nothing_runs();
}

/// A job that was restarted on devices of the user's choice, and has moved since, is where it has
/// moved.
#[test]
fn a_job_goes_back_to_where_it_has_moved() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fmgoes");
    let mut job = Job::start_recovering(steps(&place, "soft", &["--recover"]));
    job.read_to(10);
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let mut again = Job::spawn_recovering(place.to_restart(&image, &["--gpu", "soft"]), &nonce);
    again.read_to(again.step + 20);
    moved(&place, &mut again, &server.address);
    place.checkpoint(&[]);
    again.read_to(again.step + 5);
    let times = again.back.len();
    send("KILL", &children(server.pid()));
    while again.back.len() == times {
        again.read_to(again.step + 1);
    }
    again.read_to(again.step + 5);
    assert_eq!(is_on(&place), server.address);
    sessions(&server, 1);
    again.kill();
    place.nothing_runs();
}

/// An image from before a move names devices that the job has left, and that may be gone.
#[test]
fn a_job_goes_back_where_it_is_with_an_image_from_before() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fmbefore");
    let mut job = Job::start_recovering(steps(&place, &server.address, &["--recover"]));
    job.read_to(10);
    place.checkpoint(&[]);
    job.read_to(job.step + 5);
    moved(&place, &mut job, "soft");
    drop(server);
    send("KILL", &job.proxies());
    while job.back.is_empty() {
        job.read_to(job.step + 1);
    }
    job.read_to(job.step + 20);
    assert_eq!((is_on(&place), job.back.len()), ("soft".to_owned(), 1));
    job.kill();
    place.nothing_runs();
}

/// A job whose moves stop at `phase`, until its file is gone.
fn held_at(place: &GpuSteps, gpu: &str, phase: &str, options: &[&str]) -> (Job, PathBuf) {
    let file = place.world.home().join(format!("held-{phase}"));
    let mut command = steps(place, gpu, options);
    command.env("KEDGE_HOLD_MOVE", format!("{phase}:{}", file.display()));
    (Job::start_recovering(command), file)
}

fn begin(place: &GpuSteps, to: &str, file: &Path) -> Child {
    let child = place.kedge(&["migrate", "j", "--to", to]).spawn().expect("kedge");
    wait_for("the phase does not come", || file.exists());
    child
}

#[test]
fn a_far_target_that_is_lost_changes_nothing() {
    // Before `shown` there is no session.
    for phase in ["round", "paused", "crossed"] {
        let server = Served::start(&["--gpu", "soft"]);
        let place = GpuSteps::mine("fmtgt");
        let (mut job, file) = held_at(&place, "soft", phase, &[]);
        job.read_to(10);
        let proxies = job.proxies();
        let moving = begin(&place, &server.address, &file);
        send("KILL", &children(server.pid()));
        if phase == "crossed" {
            // What it has cannot be told from what it had: its near end says so before it is asked.
            wait_for("the near end is still there", || job.proxies() == proxies);
        }
        fs::remove_file(&file).expect("held");
        let output = moving.wait_with_output().expect("kedge");
        assert!(failure(&output).contains("stays where it is"), "{phase}: {}", stderr(&output));
        wait_for("the new proxy is still there", || job.proxies() == proxies);
        job.read_to(job.step + 20);
        assert_eq!((is_on(&place), job.back.len()), ("soft".to_owned(), 0), "{phase}");
        job.kill();
        place.nothing_runs();
    }
}

#[test]
fn a_far_source_that_is_lost_brings_the_job_back_to_its_image() {
    for phase in ["round", "paused"] {
        let server = Served::start(&["--gpu", "soft"]);
        let place = GpuSteps::mine("fmsrc");
        let (mut job, file) = held_at(&place, &server.address, phase, &["--recover"]);
        job.read_to(10);
        place.checkpoint(&[]);
        job.read_to(job.step + 5);
        let moving = begin(&place, "soft", &file);
        send("KILL", &children(server.pid()));
        fs::remove_file(&file).expect("held");
        let output = moving.wait_with_output().expect("kedge");
        assert!(!output.status.success(), "{phase}: nothing has moved");
        while job.back.is_empty() {
            job.read_to(job.step + 1);
        }
        job.read_to(job.step + 20);
        assert_eq!(job.back.len(), 1, "{phase}");
        job.kill();
        place.nothing_runs();
    }
}

#[test]
fn a_far_source_that_is_lost_once_all_has_crossed_changes_nothing() {
    for phase in ["crossed", "owned", "departed"] {
        let server = Served::start(&["--gpu", "soft"]);
        let place = GpuSteps::mine("fmsrc2");
        let (mut job, file) = held_at(&place, &server.address, phase, &[]);
        job.read_to(10);
        let moving = begin(&place, "soft", &file);
        send("KILL", &children(server.pid()));
        if phase != "departed" {
            wait_for("the near end hears of it", || place.log().contains("are gone"));
        }
        fs::remove_file(&file).expect("held");
        let output = moving.wait_with_output().expect("kedge");
        assert!(output.status.success(), "{phase}: {}", stderr(&output));
        job.read_to(job.step + 20);
        assert_eq!((is_on(&place), job.back.len()), ("soft".to_owned(), 0), "{phase}");
        job.kill();
        place.nothing_runs();
    }
}

/// Two processes, which share memory as soon as one of them has moved: the other has, too. What
/// each has on its devices crosses slowly.
#[test]
fn processes_that_share_memory_move_in_one_step() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::of("gpu_exchange", "fmshare", User::Same).expect("a program");
    let exchange = place.world.home().join("exchange");
    let (program, file) = (place.program.display().to_string(), exchange.display().to_string());
    let run = ["run", "--gpu", "soft", "--soft-memory", "64M", "--job", "j", "--"];
    let mut job = Job::start_recovering(
        place.kedge(&[&run[..], &[&program, MANY_STEPS, "5", &file]].concat()),
    );
    job.read_to(10);
    for to in [&server.address[..], "soft"] {
        let slowly = ["migrate", "j", "--to", to, "--rate", "1M", "--json"];
        let mut moving = place.kedge(&slowly).spawn().expect("kedge");
        let mut events = BufReader::new(moving.stdout.take().expect("a pipe")).lines();
        let moved = events.find(|line| line.as_ref().is_ok_and(|line| line.contains("\"pause\"")));
        assert!(moved.is_some(), "{to}: {}", stderr(&moving.wait_with_output().expect("kedge")));
        fs::write(&exchange, "").expect("a file");
        let end = job.step + 1000;
        while exchange.exists() {
            assert!(job.step < end, "{to}: they do not share; {}", place.log());
            job.read_to(job.step + 1);
        }
        let left: Vec<String> = events.map_while(Result::ok).collect();
        assert!(left.iter().any(|line| line.contains("\"done\"")), "{to}: {left:?}");
        assert!(moving.wait().expect("kedge").success(), "{to}");
        assert_eq!(is_on(&place), to);
        job.read_to(job.step + 20);
    }
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_line_that_is_cut_again_and_again_holds_up_no_move() {
    let server = Served::start(&["--gpu", "soft"]);
    let relay = Relay::start(&server.address, 20_000);
    let place = GpuSteps::mine("fmcut");
    let mut job = Job::start_recovering(steps(&place, "soft", &[]));
    job.read_to(10);
    for _ in 0..3 {
        for to in [&relay.address[..], "soft"] {
            moved(&place, &mut job, to);
        }
    }
    assert!(relay.cuts() > 0);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    sessions(&server, 0);
    place.nothing_runs();
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let place = GpuSteps::mine("fmno");
    let mut job = Job::start_recovering(steps(&place, "soft", &[]));
    job.read_to(10);
    let said = failure(&place.output(&["migrate", "j", "--to", "127.0.0.1:1"]));
    assert!(said.contains("127.0.0.1:1") && said.contains("stays where it is"), "{said}");
    let server = Served::start(&["--gpu", "soft:2"]);
    let said = failure(&place.output(&["migrate", "j", "--to", &server.address]));
    assert!(said.contains("it has seen 1, here are 2"), "{said}");
    job.read_to(job.step + 20);
    job.kill();
    place.nothing_runs();
}
