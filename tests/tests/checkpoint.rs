//! Jobs are checkpointed, killed and restarted through the `kedge` command. Each draws a nonce at its
//! start, so that one which merely began anew is found out; what it prints after the restart must go
//! on where the image was taken.
#![forbid(unsafe_code)]

use kedge_tests::job::{Job, User, build, family, kedge_as, send};
use kedge_tests::world::{World, is_root, stderr};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

const STEPS: u64 = 150;

/// A folder for one test, and who runs kedge in it.
struct Place {
    world: World,
    user: User,
}

impl Place {
    fn new(name: &str, user: User) -> Option<Place> {
        let world = World::new(name);
        if user == User::Nobody {
            if !is_root() {
                println!("skipped: not root, so every other test is this one");
                return None;
            }
            world.give_home_away();
        }
        Some(Place { world, user })
    }

    fn mine(name: &str) -> Place {
        Place::new(name, User::Same).expect("the test's own user")
    }

    fn output(&self, arguments: &[&str]) -> Output {
        kedge_as(&self.world, self.user, arguments).output().expect("kedge")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// kedge's failure in one line.
    fn failure(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {output:?}");
        stderr(&output)
    }

    /// Runs `program` as the job `j`.
    fn run(&self, options: &[&str], program: &[&str]) -> Job {
        let run = [&["run", "--gpu", "none", "--job", "j"], options, &["--"], program].concat();
        Job::start(kedge_as(&self.world, self.user, &run))
    }

    /// The program of the tests: steps, milliseconds between two, threads, megabytes.
    fn steps(&self, numbers: [u64; 4]) -> Job {
        self.steps_with(&[], numbers)
    }

    fn steps_with(&self, options: &[&str], numbers: [u64; 4]) -> Job {
        let program = build(&self.world, "steps", &[]).display().to_string();
        let numbers = numbers.map(|number| number.to_string());
        let words: Vec<&str> = numbers.iter().map(String::as_str).collect();
        self.run(options, &[&[program.as_str()], &words[..]].concat())
    }

    fn restart(&self, image: &Path, nonce: &str) -> Job {
        let image = image.display().to_string();
        Job::restart(kedge_as(&self.world, self.user, &["restart", &image]), nonce)
    }

    fn images(&self) -> PathBuf {
        self.world.home().join("kedge/images")
    }

    /// Names and states, sorted.
    fn states(&self) -> Vec<(String, String)> {
        let rows = self.json(&["images", "--json"]);
        let text = |row: &Value, field: &str| row[field].as_str().expect("text").to_owned();
        let all = rows.as_array().expect("a list").iter();
        let name = |row| text(row, "image").rsplit('/').next().expect("a name").to_owned();
        let mut all: Vec<_> = all.map(|row| (name(row), text(row, "state"))).collect();
        all.sort();
        all
    }

    fn names(&self) -> Vec<String> {
        self.states().into_iter().map(|(name, _)| name).collect()
    }

    /// Waits until no image is being written.
    fn settle(&self) {
        let begin = Instant::now();
        while self.states().iter().any(|(_, state)| state == "writing") {
            assert!(begin.elapsed() < Duration::from_secs(20), "{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&self.output(&["logs", "j"]).stdout).into_owned()
    }

    /// Checkpoints the job `j`: the image.
    fn checkpoint(&self, options: &[&str]) -> PathBuf {
        let report = self.json(&[&["checkpoint", "j", "--json"], options].concat());
        PathBuf::from(report["image"].as_str().expect("a path"))
    }

    /// `job` is captured while it runs, killed, and goes on from the image to its end.
    fn survives(&self, mut job: Job, steps: u64) {
        job.read_to(steps / 5);
        let before = job.step;
        let image = self.checkpoint(&[]);
        job.read_to(job.step + 5);
        let nonce = job.nonce.clone();
        job.kill();
        let printed = job.step;
        drop(job);

        let job = self.restart(&image, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        let status = job.finish(steps);
        assert_eq!(status.code(), Some(7), "it exits as the program does");
        assert!(self.json(&["ps", "--json"]).as_array().is_some_and(Vec::is_empty));
        assert!(self.output(&["verify", &image.display().to_string()]).status.success());
    }
}

fn survive_steps(name: &str, user: User, threads: u64) {
    if let Some(place) = Place::new(name, user) {
        place.survives(place.steps([STEPS, 10, threads, 8]), STEPS);
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
    for ((step = 1; step <= 150; step++)); do
        echo "$nonce $step"
        sleep 0.01
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
print("nonce", nonce, flush=True)
seen, turn = [], threading.Condition()
def work():
    while True:
        with turn:
            turn.wait()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for step in range(1, 151):
    seen.append(step)
    with turn:
        turn.notify_all()
    print(nonce, step, flush=True)
    time.sleep(0.01)
assert sum(seen) == 150 * 151 // 2
print(nonce, "well", flush=True)
os._exit(7)
"#;

#[test]
fn a_python_program_goes_on() {
    if !Path::new("/usr/bin/python3").exists() {
        return println!("skipped: no /usr/bin/python3");
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
    let mut job = place.steps([STEPS, 10, 2, 1]);
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
    assert!(family(job.kedge()).contains(&pid), "{pid} is no process of the job");
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
    let names = fs::read_dir(place.world.home().join("kedge/jobs/j")).expect("the job's folder");
    let mut left: Vec<_> = names.map(|name| name.expect("a name").file_name()).collect();
    left.sort();
    assert_eq!(left, ["lock", "log", "meta.json"]);
}

#[test]
fn a_stopped_job_does_nothing_twice() {
    let place = Place::mine("ckstop");
    let mut job = place.steps([STEPS, 10, 4, 16]);
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
    let job = place.steps_with(&["--keep", "2"], [STEPS, 10, 0, 1]);
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

#[test]
fn sigterm_is_passed_on_after_the_last_image() {
    let place = Place::mine("ckterm");
    let mut job = place.steps_with(&["--on-term", "checkpoint,20s"], [STEPS, 10, 2, 32]);
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
fn any_damage_is_named_and_an_older_image_is_still_good() {
    let place = Place::mine("ckbad");
    let mut job = place.steps([STEPS, 10, 2, 4]);
    job.read_to(10);
    place.checkpoint(&[]);
    job.read_to(30);
    let newest = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let files: Vec<PathBuf> = fs::read_dir(&newest)
        .expect("the image")
        .map(|entry| entry.expect("a file").path())
        .collect();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let good = fs::read(&file).expect("the file");
        if good.is_empty() {
            continue;
        }
        let mut bad = good.clone();
        bad[good.len() / 3] ^= 1;
        for bytes in [bad, good[..good.len() - 1].to_vec()] {
            fs::write(&file, bytes).expect("written");
            let said = place.failure(&["restart", &newest.display().to_string()]);
            assert!(said.contains(&file.display().to_string()), "{said}");
            let output = place.output(&["verify", &newest.display().to_string()]);
            assert_eq!(output.status.code(), Some(1), "{}", file.display());
            assert!(place.json(&["ps", "--json"]).as_array().is_some_and(Vec::is_empty));
        }
        if file.extension().is_some_and(|kind| kind == "kimg") {
            // Passed over for the older one, which the log tells.
            let mut job = place.restart(&place.images(), &nonce);
            assert!(job.step < 30, "restarted from the damaged image");
            assert!(place.log().contains(&file.display().to_string()), "{}", place.log());
            job.kill();
        }
        fs::write(&file, good).expect("written");
    }
    let mut job = place.restart(&newest, &nonce);
    assert!(job.step > 30);
    job.kill();
}

/// The processes that hold memory for the image being written: stopped children of kedge.
fn clones(kedge: u32) -> Vec<u32> {
    let traced = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
    };
    family(kedge).into_iter().filter(traced).collect()
}

#[test]
fn a_checkpoint_that_fails_harms_nobody() {
    let place = Place::mine("ckfail");
    let mut job = place.steps([400, 10, 2, 300]);
    job.read_to(5);
    place.checkpoint(&["--codec", "raw"]);
    for _ in 0..3 {
        // Whoever asked is killed: the image comes all the same.
        place.checkpoint(&["--wait", "captured", "--codec", "zstd"]);
        // The clone that holds the memory is killed: the image is none.
        let begin = Instant::now();
        let held = loop {
            match clones(job.kedge()) {
                held if !held.is_empty() => break held,
                _ if begin.elapsed() > Duration::from_secs(5) => break Vec::new(),
                _ => {}
            }
        };
        send("KILL", &held);
        job.read_to(job.step + 5);
        place.settle();
    }
    job.read_to(job.step + 5);
    let states = place.states();
    assert!(states.contains(&("j-0001".into(), "finished".into())), "{states:?}");
    assert!(states.iter().all(|(_, state)| state != "damaged"), "{states:?}");
    assert!(place.log().contains("checkpoint failed"), "{}", place.log());
    assert!(place.output(&["verify", &place.images().display().to_string()]).status.success());
    assert_eq!(job.finish(400).code(), Some(7));
}

#[test]
fn a_killed_supervisor_leaves_the_program_and_the_last_good_image() {
    let place = Place::mine("cksup");
    let mut job = place.steps([300, 10, 2, 300]);
    job.read_to(5);
    place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    let program: Vec<u32> = family(job.kedge()).into_iter().filter(|p| *p != job.kedge()).collect();
    place.checkpoint(&["--wait", "captured", "--codec", "zstd"]);
    job.signal("KILL");
    // Nobody holds it up.
    job.read_to(job.step + 50);
    let first = ("j-0001".to_owned(), "finished".to_owned());
    let states = place.states();
    assert!(
        states.contains(&first) && states.iter().all(|(_, state)| state != "damaged"),
        "{states:?}"
    );
    send("KILL", &program);
    job.drain();
    // Half an image, if there is one, is in nobody's way.
    let mut job = place.restart(&place.images(), &nonce);
    job.read_to(60);
    place.checkpoint(&[]);
    job.kill();
}

/// Kills processes that take too long, so that whoever reads their output goes on.
fn bounded(pids: Vec<u32>) -> mpsc::Sender<()> {
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(20)) == Err(mpsc::RecvTimeoutError::Timeout) {
            send("KILL", &pids);
        }
    });
    ended
}

/// Waits until a thread of `pid` is traced. False: the checkpoint that was `asked` for or the program is over, and
/// the pause went by unseen, as on a loaded machine it may.
fn sees_the_pause(pid: u32, asked: &mut Child) -> bool {
    let traced = |status: String| !status.contains("TracerPid:\t0\n");
    while asked.try_wait().expect("a child").is_none() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
        let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).ok();
        if tasks.flatten().any(|task| status(task).is_some_and(traced)) {
            return true;
        }
    }
    false
}

/// The supervisor is killed at a moment within 5 ms of the pause's begin; each of the program's threads
/// still does its part of every step. Whether the pause was seen.
fn kill_amid_a_checkpoint(place: &Place) -> bool {
    let mut job = place.steps([200, 5, 16, 8]);
    let kedge = job.kedge();
    let program: Vec<u32> = family(kedge).into_iter().filter(|pid| *pid != kedge).collect();
    let first = *program.first().expect("the program");
    let _ended = bounded(program);
    let script = format!("read -r; kill -KILL {kedge}");
    let mut killer = Command::new("bash");
    let mut killer = killer.args(["-c", &script]).stdin(Stdio::piped()).spawn().expect("bash");
    job.read_to(5);
    let mut asked =
        kedge_as(&place.world, place.user, &["checkpoint", "j"]).spawn().expect("kedge");
    let seen = sees_the_pause(first, &mut asked);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let moment = Duration::from_micros(u64::from(now.subsec_nanos()) / 1000 % 5000);
    println!("killed {moment:?} after the pause's begin");
    std::thread::sleep(moment);
    killer.stdin.take().expect("a pipe").write_all(b"\n").expect("bash reads");
    assert!(killer.wait().expect("bash").success());
    job.finish(200);
    let _ = asked.wait();
    seen
}

#[test]
fn a_supervisor_killed_amid_a_checkpoint_harms_no_thread() {
    for (name, user) in [("ckamid", User::Same), ("ckamidu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let times = (0..30).filter(|_| kill_amid_a_checkpoint(&place)).take(6).count();
        assert_eq!(times, 6, "a pause is rarely seen");
    }
}

#[test]
fn a_full_disk_ends_a_checkpoint_and_no_more() {
    let place = Place::mine("ckfull");
    // A limit on the size of files stands for the disk: it needs no rights.
    let program = build(&place.world, "steps", &[]).display().to_string();
    let mut command = kedge_as(
        &place.world,
        place.user,
        &["run", "--gpu", "none", "--job", "j", "--", &program, "150", "10", "2", "64"],
    );
    // `timeout` and all below it.
    let limited = {
        let mut prlimit = std::process::Command::new("prlimit");
        prlimit.arg("--fsize=1000000").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            prlimit.env(name, value.unwrap_or_default());
        }
        prlimit.current_dir(place.world.home()).stdin(std::process::Stdio::null());
        prlimit.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command = prlimit;
        command
    };
    let mut job = Job::start(limited);
    job.read_to(10);
    let said = place.failure(&["checkpoint", "j"]);
    assert!(said.contains("too large") && said.contains(".kimg"), "{said}");
    assert_eq!(place.names(), [] as [String; 0], "what there was of it is gone");
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn children_that_come_and_go_meanwhile_are_collected() {
    let place = Place::mine("ckreap");
    let script =
        "echo nonce x; for ((step = 1; step <= 300; step++)); do (exit 3); [ $? = 3 ] || exit 1
        (sleep 0.05 &) ; sleep 0.01; echo \"x $step\"; done; echo 'x well'; exit 7";
    let mut job = place.run(&[], &["bash", "-c", script]);
    for _ in 0..10 {
        // One that ends just when it is to be stopped is no failure.
        place.checkpoint(&[]);
    }
    job.read_to(200);
    assert_eq!(job.finish(300).code(), Some(7));
}

#[test]
fn nonsense_on_the_control_socket_harms_nobody() {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    let place = Place::mine("ckctl");
    let mut job = place.steps([STEPS, 10, 0, 1]);
    let socket = place.world.home().join("kedge/jobs/j/control");
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
