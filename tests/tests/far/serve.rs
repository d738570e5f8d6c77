//! How `kedge serve` ends: it tells its sessions, and waits for them as long as it was asked to.
use kedge_tests::host;
use kedge_tests::job::{children, is_alive, send};
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A job on the server's device: so many steps, one each 20 ms. It has made the first.
fn job(world: &World, server: &Served, steps: &str, name: &str) -> Job {
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", name, "--", &program, "0", steps, "20"];
    let mut command = world.kedge(&run);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("kedge");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut first = String::new();
    lines.read_line(&mut first).expect("a line");
    let rest = thread::spawn(move || lines.lines().map_while(Result::ok).collect());
    Job { child, rest }
}

struct Job {
    child: Child,
    rest: thread::JoinHandle<Vec<String>>,
}

impl Job {
    /// What it printed, but for its first step, and how it ended.
    fn ended(self) -> (Vec<String>, Output) {
        let output = self.child.wait_with_output().expect("kedge");
        (self.rest.join().expect("its output"), output)
    }
}

/// Whether the server has ended within so long.
fn ends_within(server: &Served, limit: Duration) -> bool {
    let begin = Instant::now();
    while is_alive(server.pid()) {
        if begin.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// As systemd does of a unit of `Type=notify`.
#[test]
fn a_service_manager_is_told_that_it_is_ready_and_that_it_ends() {
    let world = World::new("svready");
    let socket = world.0.join("notify");
    let listener = UnixDatagram::bind(&socket).expect("a socket");
    listener.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let told = || {
        let mut read = [0; 4096];
        let length = listener.recv(&mut read).expect("a datagram");
        String::from_utf8_lossy(&read[..length]).into_owned()
    };
    let serve = ["serve", "--gpu", "soft", "--listen", "127.0.0.1:0"];
    let metrics = ["metrics", "--listen", "127.0.0.1:0"];
    for (words, status) in
        [(&serve[..], "STATUS=soft is lent at 127.0.0.1:"), (&metrics, "STATUS=")]
    {
        let mut command = world.kedge(words);
        command.env("NOTIFY_SOCKET", &socket).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("kedge");
        let ready = told();
        assert!(ready.starts_with("READY=1\n") && ready.contains(status), "{ready}");
        send("TERM", &[child.id()]);
        if words[0] == "serve" {
            assert_eq!(told(), "STOPPING=1\n");
        }
        child.wait().expect("ended");
    }
}

/// Sends the server a signal, and waits until it has said so.
fn tell(server: &Served, signal: &str) {
    send(signal, &[server.pid()]);
    let begin = Instant::now();
    while !server.said().contains("told to end") {
        assert!(begin.elapsed() < Duration::from_secs(20), "it said: {}", server.said());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn sessions_go_on_to_their_end_and_no_new_one_begins() {
    let world = World::new("serveend");
    let mut server = Served::start(&["--gpu", "soft", "--grace", "60s"]);
    let runs = job(&world, &server, "100", "runs");
    tell(&server, "TERM");
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let late = world.output(&["run", "--gpu", &server.address, "--job", "late", "--", &program]);
    assert!(!late.status.success(), "{late:?}");
    let log = world.text(&["logs", "late"]);
    assert!(log.contains("it is about to end, and begins no more sessions"), "{log}");
    let (lines, output) = runs.ended();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines.last().map(String::as_str), Some("well"));
    let log = world.text(&["logs", "runs"]);
    assert!(log.contains("was told to end: it ends these devices in 60s"), "{log}");
    assert!(ends_within(&server, Duration::from_secs(10)), "{}", server.said());
    assert!(server.said().contains("all sessions have ended"), "{}", server.said());
    assert_eq!(server.status().code(), Some(0));
}

#[test]
fn what_is_left_after_the_grace_is_ended_and_told_why() {
    let world = World::new("servegrace");
    let mut server = Served::start(&["--gpu", "soft", "--grace", "300ms"]);
    let runs = job(&world, &server, "1000000", "runs");
    let proxies = children(server.pid());
    assert_eq!(proxies.len(), 1);
    tell(&server, "INT");
    let begin = Instant::now();
    let (_, output) = runs.ended();
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(!output.status.success(), "{output:?}");
    assert!(stderr(&output).contains("kedge: runs: "), "{output:?}");
    let log = world.text(&["logs", "runs"]);
    assert!(log.contains("are gone: `kedge serve` there was told to end"), "{log}");
    assert!(ends_within(&server, Duration::from_secs(10)), "{}", server.said());
    assert_eq!(server.status().code(), Some(0));
    assert!(!is_alive(proxies[0]), "{}", server.said());
}

#[test]
fn told_again_it_ends_at_once() {
    let world = World::new("serveagain");
    let mut server = Served::start(&["--gpu", "soft", "--grace", "1h"]);
    let runs = job(&world, &server, "1000000", "runs");
    tell(&server, "TERM");
    thread::sleep(Duration::from_millis(100));
    assert!(is_alive(server.pid()));
    send("TERM", &[server.pid()]);
    assert!(ends_within(&server, Duration::from_secs(15)), "{}", server.said());
    assert_eq!(server.status().code(), Some(0));
    assert!(!runs.ended().1.status.success());
}

#[test]
fn without_sessions_it_ends_at_once() {
    let mut server = Served::start(&["--gpu", "soft", "--grace", "1h"]);
    tell(&server, "HUP");
    assert!(ends_within(&server, Duration::from_secs(10)), "{}", server.said());
    assert_eq!(server.status().code(), Some(0));
}

/// What answers a job's questions to NVML is no session: nobody waits for it, or is told of it.
#[test]
fn what_answers_nvml_is_not_waited_for() {
    let world = World::new("servenvml");
    let mut server = Served::start(&["--gpu", "soft", "--grace", "1h"]);
    let program = host("gpu_management.cu", "gpu_management", &["-O1", "-arch=sm_80"]);
    let program = program.display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "asks", "--", &program, "1000000", "20"];
    let mut command = world.kedge(&run);
    let mut asks = command.stdout(Stdio::piped()).spawn().expect("kedge");
    let mut first = String::new();
    let mut lines = BufReader::new(asks.stdout.take().expect("a pipe"));
    lines.read_line(&mut first).expect("a line");
    let begin = Instant::now();
    while !server.said().contains("NVML of 127.0.0.1") {
        assert!(begin.elapsed() < Duration::from_secs(20), "it said: {}", server.said());
        thread::sleep(Duration::from_millis(5));
    }
    let proxies = children(server.pid());
    assert_eq!(proxies.len(), 1, "{}", server.said());
    let begin = Instant::now();
    tell(&server, "TERM");
    assert!(ends_within(&server, Duration::from_secs(10)), "{}", server.said());
    assert!(server.said().contains("told to end: no session is open"), "{}", server.said());
    assert_eq!(server.status().code(), Some(0));
    assert!(begin.elapsed() < Duration::from_millis(1500), "{:?}", begin.elapsed());
    assert!(!is_alive(proxies[0]), "{}", server.said());
    let _ = asks.kill();
    let _ = asks.wait();
}
