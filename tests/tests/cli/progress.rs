//! What commands that take long tell people, and what they leave to scripts.
use kedge_tests::back::wait_for;
use kedge_tests::job::send;
use kedge_tests::world::{World, failure};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// A job of no devices that runs.
struct Running {
    world: World,
    child: Child,
}

impl Running {
    fn new(name: &str) -> Running {
        let world = World::new(name);
        let images = world.0.join("images").display().to_string();
        let words = ["run", "--gpu", "none", "--job", "j", "--ckpt-dir", &images, "--", "sleep"];
        let mut command = world.kedge(&[&words[..], &["100"]].concat());
        let null = || (Stdio::null(), Stdio::null());
        let child = command.stdin(null().0).stdout(null().0).stderr(null().1);
        let child = child.spawn().expect("kedge");
        wait_for("the job runs", || world.job("j").join("control").exists());
        Running { world, child }
    }

    /// What a command writes to a terminal.
    fn on_terminal(&self, arguments: &[&str]) -> String {
        let kedge = self.world.kedge(arguments);
        let words = [kedge.get_program()].into_iter().chain(kedge.get_args());
        let words: Vec<String> = words.map(|word| format!("'{}'", word.display())).collect();
        let mut terminal = Command::new("script");
        terminal.args(["--quiet", "--return", "--command", &words.join(" "), "/dev/null"]);
        terminal.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = terminal.stdin(Stdio::null()).output().expect("script, from bsdutils");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.world.output(&["kill", "j"]);
        let _ = self.child.wait();
    }
}

#[test]
fn checkpoints_close_with_a_line_for_people() {
    let job = Running::new("prclose");
    let said = job.on_terminal(&["checkpoint", "j", "--verify"]);
    let last = said.lines().last().unwrap_or_default();
    for part in ["j-0001  ", "iB, stood still ", " ms, durable in ", " s, read back"] {
        assert!(last.contains(part), "{said:?}");
    }
    assert!(said.contains("bringing the job to rest…"), "{said:?}");
    let image = job.world.0.join("images/j-0002").display().to_string();
    let output = job.world.output(&["checkpoint", "j"]);
    // Warnings may come, but no line that is for people.
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{image}\n"));
    assert!(warnings.lines().all(|line| line.starts_with("kedge: warning: ")), "{warnings}");
    let said = job.on_terminal(&["verify", &image]);
    assert!(said.contains("good") && said.contains(", read in "), "{said:?}");
}

/// The events of a file, each with its time.
fn events(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("events");
    let event = |line: &str| serde_json::from_str::<Value>(line).expect("an event a line");
    let events: Vec<Value> = text.lines().map(event).collect();
    assert!(events.iter().all(|event| event["time"].is_string()), "{text}");
    events
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().filter_map(|event| event["event"].as_str()).collect()
}

#[test]
fn events_tell_programs_what_happens() {
    let mut job = Running::new("prevents");
    let path = |name: &str| job.world.0.join(name).display().to_string();
    let (saved, read, back) = (path("saved"), path("read"), path("back"));
    let image = path("images/j-0001");
    let said = job.world.text(&["checkpoint", "j", "--verify", "--events", &saved]);
    assert_eq!(said, format!("{image}\n"), "events are not in the output");
    let told = events(Path::new(&saved));
    let ends = ["captured", "durable"].map(|name| names(&told).iter().position(|it| *it == name));
    assert!(ends[0].is_some() && ends[1] == Some(told.len() - 1) && ends[0] < ends[1], "{told:?}");
    assert_eq!(told[told.len() - 1]["image"].as_str(), Some(&image[..]), "{told:?}");
    assert!(told[told.len() - 1]["bytes"].as_u64() > Some(0), "{told:?}");
    job.world.text(&["verify", &image, "--events", &read]);
    assert_eq!(names(&events(Path::new(&read))).last(), Some(&"verified"));
    // A command that fails says so there as well, and appends.
    assert!(!job.world.output(&["checkpoint", "none", "--events", &read]).status.success());
    assert_eq!(names(&events(Path::new(&read))).last(), Some(&"failed"));
    let _ = job.world.output(&["kill", "j"]);
    let _ = job.child.wait();
    let mut restart = job.world.kedge(&["restart", &image, "--quiet", "--events", &back]);
    restart.args(["--job", "again"]);
    job.child = restart.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("kedge");
    let runs = || names(&events(Path::new(&back))).contains(&"restarted");
    wait_for("the job is back", || Path::new(&back).exists() && runs());
    let killed: Value =
        serde_json::from_str(&job.world.text(&["kill", "again", "--json"])).expect("JSON");
    assert_eq!((&killed["job"], &killed["signal"]), (&"again".into(), &Value::Null), "{killed}");
    let _ = job.child.wait();
    let told = events(Path::new(&back));
    assert_eq!(names(&told), ["restarting", "restarted", "ended"]);
    assert!(told[..2].iter().all(|event| event["job"] == "again"), "{told:?}");
    assert_eq!(told[2]["signal"].as_i64(), Some(15), "{told:?}");
}

#[test]
fn events_never_wait_for_a_reader() {
    let world = World::new("prpipe");
    let pipe = world.0.join("pipe").display().to_string();
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let output = world.output(&["run", "--gpu", "none", "--events", &pipe, "--", "true"]);
    assert_eq!(failure(&output), format!("kedge: --events {pipe}: nobody reads that pipe\n"));
}

#[test]
fn ctrl_c_says_what_goes_on() {
    let job = Running::new("prctrlc");
    let supervisor = job.child.id();
    // Stopped, it takes its time.
    send("STOP", &[supervisor]);
    let mut command = job.world.kedge(&["checkpoint", "j"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("kedge");
    thread::sleep(Duration::from_millis(500));
    send("INT", &[child.id()]);
    let output = child.wait_with_output().expect("ended");
    send("CONT", &[supervisor]);
    assert_eq!(output.status.signal(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "kedge: the checkpoint of j goes on: see `kedge images`\n");
    let image = job.world.0.join("images/j-0001").display().to_string();
    let is_good = || job.world.output(&["verify", &image]).status.success();
    wait_for("the checkpoint goes on", is_good);
}
