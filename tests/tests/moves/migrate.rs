//! A running job's devices move to other proxies, and nobody notices: also where one of those that
//! take part ends in any phase.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, children, family, is_alive, send};
use kedge_tests::world::{failure, jobs_in, stderr, wait_for};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::Duration;

/// More steps than any test reads.
const MANY_STEPS: &str = "100000";
/// Phases of a move before the new proxy has the client, in their order; and those after.
const BEFORE: [&str; 5] = ["started", "shown", "round", "paused", "crossed"];
const AFTER: [&str; 2] = ["owned", "departed"];

const MOVE: [&str; 4] = ["migrate", "j", "--to", "soft"];

/// A job of many steps, whose moves stop at `phase` until [`Held::go`].
fn held_at(place: &GpuSteps, phase: &str, options: &[&str]) -> (Job, Held) {
    let file = place.world.home().join(format!("held-{phase}"));
    let mut command = steps(place, options);
    command.env("KEDGE_HOLD_MOVE", format!("{phase}:{}", file.display()));
    (Job::start_recovering(command), Held { file })
}

fn steps(place: &GpuSteps, options: &[&str]) -> Command {
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "j"];
    place.kedge(&[&run[..], options, &["--", &program, MANY_STEPS, "5"]].concat())
}

struct Held {
    file: PathBuf,
}

impl Held {
    fn wait(&self) {
        wait_for(&format!("{} does not come", self.file.display()), || self.file.exists());
    }

    fn go(&self) {
        fs::remove_file(&self.file).expect("held");
    }
}

/// The command, while it waits.
fn begin(place: &GpuSteps) -> Child {
    place.kedge(&MOVE).spawn().expect("kedge")
}

fn result(child: Child) -> Output {
    child.wait_with_output().expect("kedge")
}

/// Moves it: the one proxy that it has then is another.
fn moved(place: &GpuSteps, job: &Job) -> Vec<Value> {
    let before = job.proxies();
    let output = place.output(&[&MOVE[..], &["--json"]].concat());
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    // The old one's memory is free within a second.
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    assert_ne!(job.proxies(), before);
    events(&output)
}

fn events(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

fn goes_on(job: &mut Job) {
    job.read_to(job.step + 20);
}

#[test]
fn a_program_moves_three_times_in_a_row_and_ends_well() {
    for (name, user) in [("mv3", User::Same), ("mv3u", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let mut job = place.start(&[]);
        job.read_to(10);
        for _ in 0..3 {
            let events = moved(&place, &job);
            let named = |name: &str| events.iter().filter(|event| event["event"] == name).count();
            assert!(named("round") > 0, "{events:?}");
            assert_eq!((named("pause"), named("done")), (1, 1), "{events:?}");
            goes_on(&mut job);
        }
        job.read_to(STEPS);
        assert_eq!(job.back, [] as [u64; 0]);
        assert_eq!(job.end().code(), Some(7), "{}", place.log());
        place.nothing_runs();
    }
}

/// An array that is filled once stays filled, whatever is made, changed and ended between two
/// rounds.
#[test]
fn what_changes_between_rounds_leaves_the_rest_as_it_is() {
    let place = GpuSteps::of("gpu_arrays", "mvarr", User::Same).expect("a program");
    let mut job = Job::start_recovering(steps(&place, &[]));
    job.read_to(10);
    for _ in 0..8 {
        moved(&place, &job);
        goes_on(&mut job);
    }
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

/// The one event of this name.
fn event<'a>(events: &'a [Value], name: &str) -> &'a Value {
    let named: Vec<&Value> = events.iter().filter(|event| event["event"] == name).collect();
    let [event] = named[..] else { panic!("{name}: {events:?}") };
    event
}

/// Modules that come and go between all rounds: all is made anew in the pause, after some tries.
#[test]
fn what_cannot_be_followed_moves_within_the_pause() {
    let place = GpuSteps::of("gpu_arrays", "mvanew", User::Same).expect("a program");
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "j", "--"];
    let mut job = Job::start_recovering(
        place.kedge(&[&run[..], &[&program, MANY_STEPS, "5", "modules"]].concat()),
    );
    job.read_to(10);
    let before = job.proxies();
    let output = place.output(&[&MOVE[..], &["--rounds", "100", "--json"]].concat());
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    // Where the program gets no further between two rounds, there is nothing that could not be
    // followed.
    let why = event(&events(&output), "pause")["why"].clone();
    assert!(why == "anew" || why == "fits", "{why}");
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    assert_ne!(job.proxies(), before);
    goes_on(&mut job);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

/// A program that changes its memory faster than that crosses, at this rate.
#[test]
fn a_pause_that_is_too_long_is_for_who_asks_for_it() {
    let place = GpuSteps::mine("mvlong");
    let mut job = Job::start_recovering(steps(&place, &[]));
    job.read_to(10);
    let before = job.proxies();
    let slowly =
        [&MOVE[..], &["--rate", "1M", "--rounds", "3", "--max-pause", "20ms", "--json"]].concat();
    let output = place.output(&slowly);
    let said = failure(&output);
    assert!(said.contains("stays where it is") && said.contains("--stop-and-copy"), "{said}");
    let told = events(&output);
    let stays = event(&told, "stays");
    assert!(stays["seconds"].as_f64().expect("seconds") > 0.02, "{stays}");
    wait_for("the new proxy is still there", || job.proxies() == before);
    goes_on(&mut job);
    let output = place.output(&[&slowly[..], &["--stop-and-copy"]].concat());
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    assert_ne!(event(&events(&output), "pause")["why"], "fits");
    goes_on(&mut job);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

/// One that answers nobody, where the new one has its client.
#[test]
fn a_source_that_hangs_after_the_client_has_moved_is_ended() {
    let place = GpuSteps::mine("mvhang");
    let (mut job, held) = held_at(&place, "owned", &[]);
    job.read_to(10);
    let source = job.proxies();
    let moving = begin(&place);
    held.wait();
    send("STOP", &source);
    held.go();
    let output = result(moving);
    assert!(output.status.success(), "{}", stderr(&output));
    // It may still be to be collected.
    let over = || job.proxies().iter().all(|pid| !source.contains(pid));
    wait_for("the old proxy is still there", over);
    goes_on(&mut job);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

/// Clients that come and go all the time: a move of the job comes to its end.
#[test]
fn processes_that_start_meanwhile_hold_up_no_move() {
    let place = GpuSteps::mine("mvmore");
    let program = place.program.display().to_string();
    let script =
        format!("while :; do {program} 3 1 >/dev/null; done & exec {program} {MANY_STEPS} 5");
    let run = ["run", "--gpu", "soft", "--soft-memory", "64M", "--job", "j", "--"];
    let mut job = Job::start_recovering(place.kedge(&[&run[..], &["sh", "-c", &script]].concat()));
    job.read_to(10);
    for _ in 0..3 {
        let output = place.output(&[&MOVE[..], &["--json"]].concat());
        assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
        let told = events(&output);
        let pauses = told.iter().filter(|event| event["event"] == "pause").count() as u64;
        assert_eq!(event(&told, "done")["processes"], pauses, "{told:?}");
        assert!((1..20).contains(&pauses), "{told:?}");
        goes_on(&mut job);
    }
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

#[test]
fn many_moves_leave_nothing_behind() {
    let place = GpuSteps::mine("mvmany");
    let mut job = Job::start_recovering(steps(&place, &[]));
    job.read_to(10);
    let supervisor = job.supervisor();
    let open = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count();
    let resident = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("KiB")
    };
    let state = |job: &Job| {
        let [proxy] = job.proxies()[..] else { panic!("{:?}", job.proxies()) };
        ((open(supervisor), open(proxy)), (resident(supervisor), resident(proxy)))
    };
    for _ in 0..3 {
        moved(&place, &job);
        goes_on(&mut job);
    }
    // A move that is over may have a descriptor open for a moment more.
    let settled = |job: &Job| loop {
        let before = state(job);
        std::thread::sleep(Duration::from_millis(100));
        let now = state(job);
        if now.0 == before.0 {
            break now;
        }
    };
    let (descriptors, memory) = settled(&job);
    for _ in 0..50 {
        moved(&place, &job);
        job.read_to(job.step + 1);
    }
    goes_on(&mut job);
    let (later, grown) = settled(&job);
    assert_eq!(later, descriptors);
    assert!(
        grown.0 < memory.0 + (8 << 10) && grown.1 < memory.1 + (8 << 10),
        "{memory:?} {grown:?}"
    );
    let folder = jobs_in(&place.world.home()).join("j");
    let left = fs::read_dir(&folder).expect("its folder").count();
    moved(&place, &job);
    assert_eq!(fs::read_dir(&folder).expect("its folder").count(), left);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_target_that_is_killed_before_it_has_the_client_changes_nothing() {
    for phase in BEFORE {
        let place = GpuSteps::mine("mvtgt");
        let (mut job, held) = held_at(&place, phase, &[]);
        job.read_to(10);
        let source = job.proxies();
        let moving = begin(&place);
        held.wait();
        let target: Vec<u32> =
            job.proxies().into_iter().filter(|pid| !source.contains(pid)).collect();
        assert_eq!(target.len(), 1, "{phase}");
        send("KILL", &target);
        held.go();
        let output = result(moving);
        assert!(failure(&output).contains("stays where it is"), "{phase}: {}", stderr(&output));
        wait_for("the new proxy is still there", || job.proxies() == source);
        goes_on(&mut job);
        assert_eq!(job.back, [] as [u64; 0]);
        job.kill();
        place.nothing_runs();
    }
}

#[test]
fn a_source_that_is_killed_after_the_client_has_moved_changes_nothing() {
    for phase in AFTER {
        let place = GpuSteps::mine("mvsrc");
        let (mut job, held) = held_at(&place, phase, &[]);
        job.read_to(10);
        let source = job.proxies();
        let moving = begin(&place);
        held.wait();
        send("KILL", &source);
        held.go();
        let output = result(moving);
        assert!(output.status.success(), "{phase}: {}", stderr(&output));
        goes_on(&mut job);
        assert_eq!(job.back, [] as [u64; 0]);
        job.kill();
        place.nothing_runs();
    }
}

#[test]
fn a_job_that_loses_either_proxy_while_it_moves_goes_back_to_its_image() {
    for (phase, of_source) in [("round", true), ("paused", true), ("owned", false)] {
        let place = GpuSteps::mine("mvback");
        let (mut job, held) = held_at(&place, phase, &["--recover"]);
        job.read_to(10);
        place.checkpoint(&[]);
        job.read_to(job.step + 5);
        let source = job.proxies();
        let moving = begin(&place);
        held.wait();
        let lost = |pid: &u32| source.contains(pid) == of_source;
        send("KILL", &job.proxies().into_iter().filter(lost).collect::<Vec<_>>());
        held.go();
        let _ = result(moving);
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
fn a_supervisor_that_is_killed_leaves_the_client_on_exactly_one() {
    for phase in ["shown", "round", "paused", "crossed", "owned", "departed"] {
        let place = GpuSteps::mine("mvsup");
        let (mut job, held) = held_at(&place, phase, &[]);
        job.read_to(10);
        let source = job.proxies();
        let mut moving = begin(&place);
        held.wait();
        send("KILL", &[job.supervisor()]);
        let _ = moving.wait();
        wait_for("one proxy", || place.proxies().len() == 1);
        let stays = place.proxies() == source;
        assert_eq!(stays, BEFORE.contains(&phase), "{phase}");
        let step = job.step;
        job.read_to(step + 40);
        assert_eq!(job.back, [] as [u64; 0], "{phase}");
        send("KILL", &place.running());
    }
}

#[test]
fn a_client_that_dies_in_any_phase_leaves_nothing() {
    for phase in BEFORE.into_iter().chain(AFTER) {
        let place = GpuSteps::mine("mvcli");
        let (mut job, held) = held_at(&place, phase, &[]);
        job.read_to(10);
        let proxies = job.proxies();
        let client: Vec<u32> = children(job.supervisor())
            .into_iter()
            .filter(|pid| !proxies.contains(pid) && place.clients(&job).contains(pid))
            .collect();
        let moving = begin(&place);
        held.wait();
        send("KILL", &client);
        // At some of these the supervisor collects nobody before the move is over.
        wait_for("it does not end", || !client.iter().any(|pid| is_alive(*pid)));
        held.go();
        let _ = result(moving);
        job.drain();
        place.nothing_runs();
        // Who ends has lost no devices.
        assert!(!place.log().contains("was lost"), "{phase}: {}", place.log());
    }
}

#[test]
fn a_checkpoint_meanwhile_is_refused_by_name_and_later_ones_are_whole() {
    let place = GpuSteps::mine("mvckpt");
    let (mut job, held) = held_at(&place, "round", &[]);
    job.read_to(10);
    let moving = begin(&place);
    held.wait();
    let said = failure(&place.output(&["checkpoint", "j"]));
    assert!(said.contains("a move of this job is under way"), "{said}");
    let said = failure(&place.output(&MOVE));
    assert!(said.contains("a move of this job is under way"), "{said}");
    held.go();
    assert!(result(moving).status.success());
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let mut again = Job::spawn_recovering(place.to_restart(&image, &[]), &nonce);
    again.read_to(20);
    // A restarted job moves as well.
    let output = place.output(&MOVE);
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    let step = again.step;
    again.read_to(step + 20);
    send("KILL", &family(again.supervisor()));
    again.drain();
    place.nothing_runs();
}

/// What follows writes for a move takes nothing away from the images that build on each other.
#[test]
fn an_image_after_a_move_that_failed_holds_all_that_has_changed() {
    let place = GpuSteps::of("gpu_blocks", "mvinc", User::Same).expect("a program");
    let held = Held { file: place.world.home().join("held-round") };
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", "soft", "--soft-memory", "128M", "--incremental", "--job", "j"];
    let mut command =
        place.kedge(&[&run[..], &["--", &program, MANY_STEPS, "20", "32", "1"]].concat());
    command.env("KEDGE_HOLD_MOVE", format!("round:{}", held.file.display()));
    let mut job = Job::start_recovering(command);
    job.read_to(5);
    place.checkpoint(&[]);
    job.read_to(job.step + 3);
    let source = job.proxies();
    let moving = begin(&place);
    held.wait();
    job.read_to(job.step + 3);
    let target = job.proxies().into_iter().filter(|pid| !source.contains(pid));
    send("KILL", &target.collect::<Vec<_>>());
    held.go();
    assert!(failure(&result(moving)).contains("stays where it is"));
    job.read_to(job.step + 3);
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let mut again = Job::spawn_recovering(place.to_restart(&image, &[]), &nonce);
    again.read_to(1);
    goes_on(&mut again);
    send("KILL", &family(again.supervisor()));
    again.drain();
    place.nothing_runs();
}

#[test]
fn a_check_moves_nothing() {
    let place = GpuSteps::mine("mvcheck");
    let mut job = Job::start_recovering(steps(&place, &[]));
    job.read_to(10);
    let proxies = job.proxies();
    let output = place.output(&[&MOVE[..], &["--check"]].concat());
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.ends_with("1 processes can move to soft\n"), "{said}");
    wait_for("a new proxy is still there", || job.proxies() == proxies);
    let said = failure(&place.output(&["migrate", "j", "--to", "127.0.0.1:1", "--check"]));
    assert!(said.contains("127.0.0.1:1"), "{said}");
    goes_on(&mut job);
    moved(&place, &job);
    goes_on(&mut job);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let place = GpuSteps::mine("mvno");
    let mut job = Job::start_recovering(steps(&place, &[]));
    job.read_to(10);
    for (to, why) in [("local:63", "no device"), ("soft:3", "as yet"), ("soft:x", "--to soft:x")] {
        let said = failure(&place.output(&["migrate", "j", "--to", to]));
        assert!(said.contains(why), "{to}: {said}");
    }
    goes_on(&mut job);
    job.kill();
    let said = failure(&place.output(&MOVE));
    assert!(said.contains("no job") || said.contains("has ended"), "{said}");
}
