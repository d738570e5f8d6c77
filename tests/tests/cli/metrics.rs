//! `kedge metrics` tells how jobs and their checkpoints fare: printed, in a file, over HTTP.
use kedge_tests::job::{Job, User, kedge_as, send};
use kedge_tests::place::Place;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// More steps than the test has time for.
const STEPS: u64 = 100_000;

/// A place whose job `j` is checkpointed once, and once in vain.
fn place(name: &str) -> (Place, Job) {
    let place = Place::mine(name);
    let mut job = place.steps([STEPS, 3, 2, 1]);
    job.read_to(5);
    place.checkpoint(&[]);
    let file = place.world.0.join("no folder");
    fs::write(&file, "").expect("a file");
    place.failure(&["checkpoint", "j", "--dir", &file.display().to_string()]);
    (place, job)
}

fn text(place: &Place, arguments: &[&str]) -> String {
    let output = place.output(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Figure with labels → value, as Prometheus reads them; each figure has its kind told before.
fn read(text: &str) -> BTreeMap<String, f64> {
    let mut kinds = Vec::new();
    let mut values = BTreeMap::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            kinds.extend(comment.strip_prefix("TYPE ").and_then(|rest| rest.split(' ').next()));
            continue;
        }
        let (figure, value) = line.rsplit_once(' ').expect("a figure and a value");
        let name = figure.split('{').next().expect("a name");
        assert_eq!(kinds.last(), Some(&name), "{figure} stands apart from its kind");
        let value = value.parse().expect("a number");
        assert_eq!(values.insert(figure.to_owned(), value), None, "{figure} is there twice");
    }
    values
}

#[test]
fn jobs_and_their_checkpoints_are_counted() {
    let (place, mut job) = place("mejobs");
    let values = read(&text(&place, &["metrics"]));
    assert_eq!(values["kedge_jobs{state=\"running\"}"], 1.0);
    let counted =
        |result| values[&format!("kedge_job_checkpoints_total{{job=\"j\",result=\"{result}\"}}")];
    assert_eq!((counted("durable"), counted("failed")), (1.0, 1.0));
    assert!(values["kedge_job_image_bytes{job=\"j\"}"] > 1e6);
    assert!(values["kedge_job_image_stall_seconds{job=\"j\"}"] > 0.0);
    assert!(values["kedge_job_processes{job=\"j\",part=\"program\"}"] >= 1.0);
    // The program holds a megabyte of its own.
    assert!(values["kedge_job_resident_bytes{job=\"j\",part=\"program\"}"] > 1e6);
    let row = place.json(&["ps", "--json"]);
    assert_eq!(row[0]["checkpoints"]["durable"], 1);
    assert!(row[0]["checkpoints"]["last_failure"]["why"].as_str().is_some(), "{row}");
    let table = text(&place, &["ps"]);
    assert!(table.contains("j-0001") && table.contains("AGE"), "{table}");
    job.kill();
    let values = read(&text(&place, &["metrics"]));
    assert_eq!(values["kedge_jobs{state=\"running\"}"], 0.0);
    assert!(!values.keys().any(|figure| figure.contains("job=")), "{values:?}");
}

#[test]
fn a_file_is_replaced_as_a_whole() {
    let place = Place::mine("mefile");
    let file = place.world.0.join("kedge.prom");
    let path = file.display().to_string();
    fs::write(&file, "before").expect("a file");
    text(&place, &["metrics", "--textfile", &path]);
    assert!(
        read(&fs::read_to_string(&file).expect("the file"))
            .contains_key("kedge_jobs{state=\"killed\"}")
    );
    let others = fs::read_dir(&place.world.0).expect("the folder").flatten();
    let others = others.filter(|entry| entry.file_name().to_string_lossy().starts_with("kedge."));
    assert_eq!(others.count(), 1, "what it was written to is gone");
    let said = place.failure(&["metrics", "--textfile", "/nowhere/kedge.prom"]);
    assert!(said.contains("/nowhere/kedge.prom"), "{said}");
    let refused = place.output(&["metrics", "--textfile", &path, "--every", "10ms"]);
    assert_eq!(refused.status.code(), Some(2));
}

/// `kedge metrics --listen` at a port that the kernel picks.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(place: &Place) -> Server {
        let mut command =
            kedge_as(&place.world, User::Same, &["metrics", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("kedge");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("http://").and_then(|rest| rest.split('/').next());
        Server { address: address.expect("its address").to_owned(), child }
    }

    fn ask(&self, question: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.write_all(question.as_bytes()).expect("sent");
        let mut answer = String::new();
        // A question that is too long is cut off.
        let _ = stream.read_to_string(&mut answer);
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // What the limit's process is asked, it passes on.
        send("TERM", &[self.child.id()]);
        let _ = self.child.wait();
    }
}

#[test]
fn collectors_ask_over_http() {
    let place = Place::mine("mehttp");
    let server = Server::start(&place);
    let answer = server.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    assert!(read(body).contains_key("kedge_jobs{state=\"running\"}"));
    assert!(server.ask("GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(server.ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert_eq!(server.ask(&"x".repeat(100_000)), "");
    assert_eq!(server.ask("\r\n\r\n").split(' ').nth(1), Some("405"));
    let said = place.failure(&["metrics", "--listen", &server.address]);
    assert!(said.contains("cannot listen"), "{said}");
}

#[test]
fn who_says_nothing_holds_others_up_for_seconds_at_most() {
    let place = Place::mine("mesilent");
    let server = Server::start(&place);
    let _silent = TcpStream::connect(&server.address).expect("a connection");
    let begin = Instant::now();
    assert!(server.ask("GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    // A few of them keep nobody out.
    let begin = Instant::now();
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(&server.address)).collect();
    assert!(server.ask("GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    assert!(
        begin.elapsed() < Duration::from_secs(2),
        "{:?} with {}",
        begin.elapsed(),
        silent.len()
    );
}
