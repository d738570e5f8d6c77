//! What commands that take long tell people, and what they leave to scripts.
use kedge_tests::job::{self, family, send};
use kedge_tests::world::{World, failure, wait_for};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

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
        // The socket is there before anybody listens, and that before the program is.
        wait_for("the job answers", || UnixStream::connect(world.job("j").join("control")).is_ok());
        let program = || family(child.id()).into_iter().any(|pid| job::name(pid) == "sleep");
        wait_for("the job runs", program);
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

    /// A command about it, with what it says in pipes.
    fn asked(&self, arguments: &[&str]) -> Child {
        let mut command = self.world.kedge(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("kedge")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed may have left it stopped.
        send("CONT", &[self.child.id()]);
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
    let child = job.asked(&["checkpoint", "j"]);
    wait_for("the order is sent", || reads_a_socket(child.id()));
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

#[test]
fn ctrl_c_says_what_was_not_asked_for() {
    let job = Running::new("prearly");
    let supervisor = job.child.id();
    send("STOP", &[supervisor]);
    let control = job.world.job("j").join("control");
    fill(&control);
    for (arguments, what) in [
        (&["checkpoint", "j"][..], "the checkpoint of j"),
        (&["swap", "out", "j"], "the swap of j"),
    ] {
        let child = job.asked(arguments);
        wait_for("interrupts are heeded", || has_thread(child.id(), "interrupt"));
        send("INT", &[child.id()]);
        let output = child.wait_with_output().expect("ended");
        assert_eq!(output.status.signal(), Some(2), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, format!("kedge: {what} was not asked for\n"));
    }
    send("CONT", &[supervisor]);
    // It takes no more than some connections at a time, until those that wait have gone.
    let mut output = job.world.output(&["checkpoint", "j"]);
    wait_for("it answers again", || {
        let taken = output.status.success();
        if !taken {
            output = job.world.output(&["checkpoint", "j"]);
        }
        taken
    });
    // Nobody had asked before.
    let image = job.world.0.join("images/j-0001").display().to_string();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{image}\n"));
}

/// Whether the first thread of a process waits for what a socket brings: recvfrom(2) is call 45 of
/// x86-64, and a job is asked by no other means.
fn reads_a_socket(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|call| call.starts_with("45 "))
}

fn has_thread(pid: u32, name: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = threads.filter_map(|it| fs::read_to_string(it.path().join("comm")).ok());
    names.any(|it| it.trim_end() == name)
}

/// Has as many connections wait at a socket as may: whoever connects next waits to do so.
fn fill(path: &Path) {
    let address = SocketAddrUnix::new(path).expect("a short path");
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        // It keeps its place in the queue when it is closed.
        match connect(socket.expect("a socket"), &address) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return,
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
}
