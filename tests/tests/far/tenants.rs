//! Who has what of `kedge serve`: its figures, and whoever asks for them.
use kedge_tests::host;
use kedge_tests::job::send;
use kedge_tests::server::Served;
use kedge_tests::world::World;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

/// Figures of this machine's own sessions.
const HERE: &str = "{key=\"(this machine)\"}";

/// A job on a server's devices that makes many steps, one each 20 ms.
struct Steps {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Steps {
    fn start(world: &World, gpu: &str, name: &str) -> Steps {
        let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
        Steps::of(world, gpu, name, &[&program, "0", "1000000", "20"])
    }

    /// Another program that prints a line each step.
    fn of(world: &World, gpu: &str, name: &str, program: &[&str]) -> Steps {
        let run = [&["run", "--gpu", gpu, "--job", name, "--"], program].concat();
        let mut child = world.kedge(&run).stdout(Stdio::piped()).spawn().expect("kedge");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut steps = Steps { child, lines };
        steps.next();
        steps
    }

    /// Waits for the next step.
    fn next(&mut self) {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        assert!(!line.is_empty(), "the job has ended");
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        send("TERM", &[self.child.id()]);
        let _ = self.child.wait();
    }
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn served(options: &[&str]) -> Served {
    Served::start(&[&["--metrics", "127.0.0.1:0"], options].concat())
}

fn head(server: &Served, question: &str) -> String {
    let answer = server.ask(&format!("{question} HTTP/1.1\r\nHost: x\r\n\r\n"));
    answer.lines().next().unwrap_or_default().to_owned()
}

/// Long kernels without end, of which many are posted ahead, do not keep another client's short
/// ones from theirs; nor do those stop the long ones.
#[test]
fn sessions_on_one_device_take_turns() {
    let world = World::new("turns");
    let server = Served::start(&["--gpu", "soft"]);
    let program = host("gpu_turns.cu", "gpu_turns", &["-O1", "-arch=sm_80"]).display().to_string();
    let start = |name, numbers: [&str; 3]| {
        let [rounds, ahead, times] = numbers;
        Steps::of(&world, &server.address, name, &[&program, rounds, ahead, times])
    };
    let ahead = start("ahead", ["20000", "50", "1000000"]);
    let mut long = start("long", ["100000", "2", "1000000"]);
    let mut short = start("short", ["2000", "1", "300"]);
    (1..300).for_each(|_| short.next());
    assert!(short.child.wait().expect("kedge").success());
    long.next();
    drop(ahead);
}

#[test]
fn sessions_memory_and_bytes_are_told() {
    let world = World::new("tntold");
    let server = served(&["--gpu", "soft:3", "--soft-memory", "256M", "--grace", "1h"]);
    let before = server.figures();
    assert_eq!((before["kedge_server_devices{}"], before["kedge_server_ending{}"]), (3.0, 0.0));
    assert!(!before.contains_key(&format!("kedge_server_sessions{HERE}")), "{before:?}");
    let mut job = Steps::start(&world, &format!("{}/2,0", server.address), "j");
    job.next();
    let during = server.figures();
    let value = |figures: &std::collections::BTreeMap<String, f64>, name: &str| {
        figures.get(&format!("kedge_server_{name}{HERE}")).copied().unwrap_or(-1.0)
    };
    assert_eq!(value(&during, "sessions"), 1.0);
    assert_eq!(value(&during, "key_devices"), 2.0);
    assert!(value(&during, "device_memory_bytes") >= 2048.0 * 1024.0, "{during:?}");
    for name in ["received_bytes_total", "sent_bytes_total"] {
        assert!(value(&during, name) > 100.0, "{name}: {during:?}");
    }
    assert!(during["kedge_server_uptime_seconds{}"] > before["kedge_server_uptime_seconds{}"]);
    let mut later = during.clone();
    until("the next step's bytes", || {
        later = server.figures();
        value(&later, "received_bytes_total") > value(&during, "received_bytes_total")
    });
    assert_eq!(head(&server, "GET /healthz"), "HTTP/1.1 200 OK");
    drop(job);
    until("the session's end", || value(&server.figures(), "sessions") == 0.0);
    let after = server.figures();
    assert_eq!(value(&after, "device_memory_bytes"), 0.0);
    assert_eq!((value(&after, "sessions_total"), value(&after, "key_devices")), (1.0, 0.0));
    assert!(value(&after, "received_bytes_total") >= value(&later, "received_bytes_total"));
}

#[test]
fn what_is_refused_is_counted_and_an_end_is_told() {
    let world = World::new("tnrefused");
    let server = served(&["--gpu", "soft", "--grace", "1h"]);
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let beyond = format!("{}/7", server.address);
    let output = world.output(&["run", "--gpu", &beyond, "--job", "j", "--", &program]);
    assert!(!output.status.success(), "{output:?}");
    assert!(world.text(&["logs", "j"]).contains("there is no device 7: it has 0 to 0"));
    assert_eq!(server.figures()[&format!("kedge_server_refusals_total{HERE}")], 1.0);
    // Whoever does not speak as kedge does, from this machine, is this user all the same.
    let mut stranger = TcpStream::connect(&server.address).expect("a connection");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
    let _job = Steps::start(&world, &server.address, "runs");
    send("TERM", &[server.pid()]);
    until("its end is told", || head(&server, "GET /healthz").contains("503"));
    assert_eq!(server.figures()["kedge_server_ending{}"], 1.0);
}

/// Whoever asks for figures, or does worse, holds no session up, and no one else who asks for long.
#[test]
fn hostile_questions_harm_nobody() {
    let world = World::new("tnhostile");
    let server = served(&["--gpu", "soft"]);
    let mut job = Steps::start(&world, &server.address, "j");
    assert!(head(&server, "GET /other").starts_with("HTTP/1.1 404"));
    assert!(head(&server, "POST /metrics").starts_with("HTTP/1.1 405"));
    assert!(head(&server, "GET /metrics/../healthz").starts_with("HTTP/1.1 404"));
    assert_eq!(server.ask(&"x".repeat(100_000)), "");
    assert!(server.ask("\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(server.ask("\0\u{fffd}\r\n\r\n").starts_with("HTTP/1.1 405"));
    let said = server.said();
    let (_, address) = said.split_once("its figures are at http://").expect("an address");
    let address = address.split('/').next().expect("an address");
    let silent: Vec<_> = (0..64).map(|_| TcpStream::connect(address)).collect();
    let begin = Instant::now();
    for _ in 0..5 {
        job.next();
    }
    let steps = begin.elapsed();
    assert!(steps < Duration::from_secs(20), "{steps:?} for five steps of 20 ms");
    let second = Steps::start(&world, &server.address, "second");
    assert!(server.figures()[&format!("kedge_server_sessions{HERE}")] == 2.0);
    // Four rounds of sixteen that are waited for.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?} {}", begin.elapsed(), silent.len());
    drop(second);
}

#[test]
fn an_address_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let world = World::new("tntaken");
    let serve = ["serve", "--gpu", "soft", "--listen", "127.0.0.1:0", "--metrics", &address];
    let output = world.output(&serve);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(kedge_tests::world::stderr(&output).contains("cannot listen on"), "{output:?}");
}
