//! Jobs are checkpointed, killed and restarted through the `kedge` command. Each draws a nonce at
//! its start, so that one which merely began anew is found out; what it prints after the restart
//! must go on where the image was taken.
use kedge_left_out::left_out;
use kedge_tests::job::{AHEAD, Job, User, family, kedge_as};
use kedge_tests::place::Place;
use kedge_tests::world::jobs_in;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// More than are done before a test reads on.
const STEPS: u64 = AHEAD + 100;

fn survive_steps(name: &str, user: User, threads: u64) {
    if let Some(place) = Place::new(name, user) {
        place.survives(place.steps([STEPS, 3, threads, 8]), STEPS);
    }
}

#[test]
fn a_program_goes_on() {
    survive_steps("ck1", User::Same, 0);
}

#[test]
fn a_program_of_64_threads_goes_on() {
    survive_steps("ck64", User::Same, 64);
}

#[test]
fn an_ordinary_user_s_program_goes_on() {
    survive_steps("ckuser", User::Nobody, 8);
}

const PIPELINE: &str = r#"
nonce=$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')
echo "nonce $nonce"
(
    for ((step = 1; step <= 500; step++)); do
        echo "$nonce $step"
        sleep 0.001
    done
    echo "$nonce well"
) | while read -r line; do echo "$line"; done | cat
exit 7
"#;

#[test]
fn a_bash_pipeline_goes_on() {
    for (name, user) in [("ckbash", User::Same), ("ckbashu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        place.survives(place.run(&[], &["bash", "-c", PIPELINE]), STEPS);
    }
}

const PYTHON: &str = r#"
import os, threading, time
nonce = os.urandom(4).hex()
def say(*words):  # in one write: with PYTHONUNBUFFERED, print() makes one of each word
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
say("nonce", nonce)
seen, turn = [], threading.Condition()
def work():
    while True:
        with turn:
            turn.wait()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for step in range(1, 501):
    seen.append(step)
    with turn:
        turn.notify_all()
    say(nonce, step)
    time.sleep(0.003)
assert sum(seen) == 500 * 501 // 2
say(nonce, "well")
os._exit(7)
"#;

#[test]
fn a_python_program_goes_on() {
    if !Path::new("/usr/bin/python3").exists() {
        return left_out("/usr/bin/python3", "it is not installed: scripts/setup --tests");
    }
    for (name, user) in [("ckpy", User::Same), ("ckpyu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        place.survives(place.run(&[], &["/usr/bin/python3", "-c", PYTHON]), STEPS);
    }
}

#[test]
fn a_restarted_job_is_a_job_as_any_other() {
    for (name, user) in [("ckagain", User::Same), ("ckagainu", User::Nobody)] {
        if let Some(place) = Place::new(name, user) {
            restart_twice(&place);
        }
    }
}

fn restart_twice(place: &Place) {
    let mut job = place.steps([STEPS, 3, 2, 1]);
    job.read_to(10);
    let first = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    // Its name is taken.
    let said = place.failure(&["restart", &first.display().to_string()]);
    assert!(said.contains("a job named j is running"), "{said}");
    job.kill();

    let mut job = place.restart(&first, &nonce);
    let rows = place.json(&["ps", "--json"]);
    assert_eq!((&rows[0]["name"], &rows[0]["state"]), (&"j".into(), &"running".into()));
    let pid = rows[0]["pid"].as_u64().expect("a process id") as u32;
    assert!(family(job.supervisor()).contains(&pid), "{pid} is no process of the job");
    job.read_to(40);
    let second = place.checkpoint(&[]);
    assert_eq!(second.parent(), first.parent());
    job.read_to(50);
    job.kill();

    // A folder means its newest image.
    let mut job = place.restart(&place.images(), &nonce);
    assert!(job.step > 40, "went on at step {}", job.step);
    job.read_to(60);
    let rows = place.json(&["ps", "--json"]);
    assert_eq!(rows[0]["image"], Value::Null, "none of this run's own yet");
    assert_eq!(job.finish(STEPS).code(), Some(7));
    assert!(place.log().contains("restarted from"));
}

#[test]
fn signals_reach_a_restarted_program_and_its_end_is_kedge_s() {
    let place = Place::mine("cksig");
    let trapping = "trap 'echo \"$nonce 1000\"; exit 9' USR1; nonce=$$; echo \"nonce $nonce\"
        for ((step = 1; step <= 100000; step++)); do echo \"$nonce $step\"; sleep 0.01; done";
    let mut job = place.run(&[], &["bash", "-c", trapping]);
    job.read_to(5);
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();

    let mut job = place.restart(&image, &nonce);
    job.signal("USR1");
    job.drain();
    assert_eq!(job.step, 1000);
    assert_eq!(job.wait().code(), Some(9));

    // What ends the program by a signal ends kedge so, and `timeout` too.
    let mut job = place.restart(&image, &nonce);
    job.signal("TERM");
    job.drain();
    assert_eq!(job.wait().signal(), Some(15));
    assert!(place.json(&["ps", "--json"]).as_array().is_some_and(Vec::is_empty));
}

#[test]
fn ctrl_c_reaches_a_restarted_program_and_loses_nothing() {
    let place = Place::mine("ckctrlc");
    let trapping = "trap 'echo \"$nonce 1000\"; exit 9' INT; nonce=$$; echo \"nonce $nonce\"
        for ((step = 1; step <= 100000; step++)); do echo \"$nonce $step\"; sleep 0.01; done";
    let mut job = place.run(&[], &["bash", "-c", trapping]);
    job.read_to(5);
    let image = place.checkpoint(&[]).display().to_string();
    let nonce = job.nonce.clone();
    job.kill();
    let mut command = kedge_as(&place.world, place.user, &["restart", &image]);
    // A group of its own, as a shell gives to what it starts.
    command.process_group(0);
    let mut job = Job::restart(command, &nonce);
    job.signal_group("INT");
    job.drain();
    assert_eq!(job.step, 1000);
    job.wait();
    let rows = place.json(&["ps", "--all", "--json"]);
    assert_eq!((&rows[0]["state"], &rows[0]["status"]), (&"exited".into(), &9.into()));
    let names = fs::read_dir(jobs_in(&place.world.home()).join("j")).expect("the job's folder");
    let mut left: Vec<_> = names.map(|name| name.expect("a name").file_name()).collect();
    left.sort();
    assert_eq!(left, ["lock", "log", "meta.json"]);
}

#[test]
fn a_stopped_job_does_nothing_twice() {
    let place = Place::mine("ckstop");
    let mut job = place.steps([STEPS, 3, 4, 16]);
    job.read_to(20);
    let image = place.checkpoint(&["--stop"]);
    job.drain();
    assert_eq!(job.wait().signal(), Some(9));
    let nonce = job.nonce.clone();
    let printed = job.step;
    let job = place.restart(&image, &nonce);
    assert_eq!(job.step, printed + 1, "it does not run between its capture and its end");
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn the_newest_images_are_kept_and_others_go() {
    let place = Place::mine("ckkeep");
    let elsewhere = place.world.home().join("elsewhere").display().to_string();
    let job = place.steps_with(&["--keep", "2"], [STEPS, 3, 0, 1]);
    for _ in 0..4 {
        place.checkpoint(&["--codec", "zstd"]);
    }
    place.checkpoint(&["--dir", &elsewhere, "--wait", "captured"]);
    assert_eq!(place.names(), ["j-0003", "j-0004"]);
    job.finish(STEPS);
    // An image that was under way when the program ended is an image.
    assert!(place.output(&["verify", &elsewhere]).status.success());
}

#[test]
fn images_come_at_intervals() {
    let place = Place::mine("ckint");
    let mut job = place.steps_with(&["--interval", "1s"], [1000, 10, 0, 1]);
    let begin = Instant::now();
    while place.names().len() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(10), "{}", place.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    let rows = place.json(&["ps", "--json"]);
    assert!(rows[0]["image"]["image"].as_str().is_some_and(|image| image.contains("/j-000")));
    job.kill();
}

/// By what the checkpoints before cost; and the job that comes back from an image goes on so.
#[test]
fn automatic_intervals_follow_the_cost() {
    let place = Place::mine("ckauto");
    let mut job = place.steps_with(&["--interval", "auto,2s"], [1000, 10, 0, 1]);
    let come = |more: usize| {
        let (begin, before) = (Instant::now(), place.names().len());
        while place.names().len() < before + more {
            assert!(begin.elapsed() < Duration::from_secs(20), "{}", place.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    come(2);
    let told = |log: &str| log.contains("a checkpoint every") && log.contains("auto,TIME");
    assert!(told(&place.log()), "{}", place.log());
    let jobs = place.json(&["top", "--json"]);
    assert!(jobs[0]["interval_seconds"].as_f64().is_some_and(|seconds| seconds >= 1.0), "{jobs}");
    job.kill();
    let mut again = place.restart(&place.images(), &job.nonce);
    come(1);
    again.kill();
}

#[test]
fn sigterm_is_passed_on_after_the_last_image() {
    let place = Place::mine("ckterm");
    let mut job = place.steps_with(&["--on-term", "checkpoint,20s"], [STEPS, 3, 2, 32]);
    job.read_to(20);
    let nonce = job.nonce.clone();
    job.signal("TERM");
    job.drain();
    assert_eq!(job.wait().signal(), Some(15));
    assert_eq!(place.states(), [("j-0001".to_owned(), "finished".to_owned())]);
    let job = place.restart(&place.images(), &nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn what_cannot_be_done_is_named() {
    let place = Place::mine("ckno");
    let said = place.failure(&["checkpoint", "nobody"]);
    assert!(said.contains("no job named nobody") && said.contains("kedge ps"), "{said}");
    let mut job = Job::start(kedge_as(
        &place.world,
        place.user,
        &["run", "--job", "j", "--", "sh", "-c", "echo nonce x; sleep 5"],
    ));
    job.kill();
    let said = place.failure(&["checkpoint", "j"]);
    assert!(said.contains("has ended"), "{said}");
    let said = place.failure(&["restart", &place.world.home().display().to_string()]);
    assert!(said.contains("no image here"), "{said}");
}

#[test]
fn children_that_come_and_go_meanwhile_are_collected() {
    let place = Place::mine("ckreap");
    let script =
        "nonce=$(printf '%040d' $$); echo nonce $nonce; for ((step = 1; step <= 300; step++)); do
        (exit 3); [ $? = 3 ] || exit 1; (sleep 0.05 &) ; sleep 0.01; echo \"$nonce $step\"; done
        echo \"$nonce well\"; exit 7";
    let mut job = place.run(&[], &["bash", "-c", script]);
    for round in 1..=10 {
        // One that ends just when it is to be stopped is no failure.
        place.checkpoint(&[]);
        // Its lines are long: it does not get a hundred steps further.
        job.read_to(15 * round);
    }
    assert_eq!(job.finish(300).code(), Some(7));
}

#[test]
fn nonsense_on_the_control_socket_harms_nobody() {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    let place = Place::mine("ckctl");
    let mut job = place.steps([STEPS, 3, 0, 1]);
    let socket = jobs_in(&place.world.home()).join("j/control");
    let mut silent = Vec::new();
    for bytes in [&b""[..], b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = UnixStream::connect(&socket).expect("connected");
        stream.write_all(bytes).expect("written");
        silent.push(stream);
    }
    let newer = br#"{"version":99,"ask":"settle"}"#;
    let mut stream = UnixStream::connect(&socket).expect("connected");
    stream.write_all(&[&(newer.len() as u32).to_le_bytes()[..], newer].concat()).expect("written");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    assert!(String::from_utf8_lossy(&answer).contains("another version"));
    place.checkpoint(&[]);
    job.read_to(20);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}
