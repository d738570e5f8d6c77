//! What a key may have of a server, and that others do not notice who is refused. It takes root,
//! for a network.
use kedge_tests::host;
use kedge_tests::job::send;
use kedge_tests::network::{ADDRESS, Network, until};
use kedge_tests::server::Served;
use kedge_tests::world::stderr;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// A lender, whom alice and bob know.
fn network(name: &str) -> Option<Network> {
    let network = Network::acquainted(name)?;
    network.text("bob", &["keys", "new"]);
    network.pin("lender", "bob", "bob");
    network.pin("bob", ADDRESS, "lender");
    Some(network)
}

fn serve(network: &Network) -> Served {
    let listen = format!("{ADDRESS}:0");
    let options = ["serve", "--gpu", "soft:3", "--soft-memory", "256M", "--listen", &listen];
    Served::started(network.kedge("lender", &options))
}

/// A job that takes all device memory that it gets, in pieces of so many MiB, and holds it.
struct Holds {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Holds {
    fn start(network: &Network, user: &str, gpu: &str, job: &str, piece: &str) -> Holds {
        let program = host("gpu_quota.cu", "gpu_quota", &["-O1", "-arch=sm_80"]);
        let program = program.display().to_string();
        let run = ["run", "--gpu", gpu, "--job", job, "--", &program, piece];
        let mut command = network.kedge(user, &run);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("kedge");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Holds { child, lines }
    }

    /// What it says: devices, and MiB in all, free at first, taken and left.
    fn got(&mut self) -> [u64; 5] {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        let numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
        let numbers: Vec<u64> = numbers.collect();
        numbers.try_into().unwrap_or_else(|_| panic!("it said: {line}"))
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("a child").success());
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// How many of alice's sessions have begun, or ended.
fn sessions(server: &Served, what: &str) -> usize {
    let said = server.said();
    let hers = said.lines().filter(|line| line.contains("session of alice"));
    hers.filter(|line| line.contains(&format!(" {what}"))).count()
}

/// A short program of a user's on `gpu`, and what the job's log says.
fn tries(network: &Network, user: &str, gpu: &str, job: &str) -> (Output, String) {
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", gpu, "--job", job, "--", &program, "0", "1", "1"];
    let output = network.kedge(user, &run).stdin(Stdio::null()).output().expect("kedge");
    (output, network.text(user, &["logs", job]))
}

#[test]
fn sessions_and_jobs_are_limited_and_others_go_on() {
    let Some(network) = network("lmsessions") else { return };
    let server = serve(&network);
    let gpu = &*server.address;
    let said = network.text("lender", &["keys", "limit", "alice", "--sessions", "1"]);
    assert_eq!(said, "alice may have sessions 1\n");
    let mut first = Holds::start(&network, "alice", gpu, "first", "32");
    first.got();
    let (output, log) = tries(&network, "alice", gpu, "second");
    assert!(!output.status.success(), "{output:?}");
    let words = "your key may have 1 sessions (processes with devices) at a time, and has them";
    assert!(log.contains(words), "{log}");
    assert!(stderr(&output).contains(words), "{output:?}");
    assert!(server.said().contains(words), "{}", server.said());
    let (output, log) = tries(&network, "bob", gpu, "bobs");
    assert!(output.status.success(), "{output:?} {log}");
    first.end();
    until("its end", || sessions(&server, "ends") == 1);
    let (output, log) = tries(&network, "alice", gpu, "third");
    assert!(output.status.success(), "{output:?} {log}");

    // A job with two processes is one.
    network.text("lender", &["keys", "limit", "alice", "--none", "--jobs", "1"]);
    let program = host("gpu_quota.cu", "gpu_quota", &["-O1", "-arch=sm_80"]).display().to_string();
    let two = format!("exec 3<&0; {program} 100 <&3 & {program} 100; wait");
    let run = ["run", "--gpu", gpu, "--job", "two", "--", "bash", "-c", &two];
    let mut command = network.kedge("alice", &run);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kedge");
    // Beside the first one's and the third's.
    until("two sessions of one job", || sessions(&server, "begins") == 4);
    let (output, log) = tries(&network, "alice", gpu, "other");
    assert!(!output.status.success(), "{output:?}");
    assert!(log.contains("your key may have 1 jobs at a time, and has them"), "{log}");
    assert!(child.wait_with_output().is_ok());
}

#[test]
fn device_memory_is_a_key_s_in_all_its_sessions() {
    let Some(network) = network("lmmemory") else { return };
    let server = serve(&network);
    let gpu = format!("{}/0", server.address);
    network.text("lender", &["keys", "limit", "alice", "--memory", "100M"]);
    let mut first = Holds::start(&network, "alice", &gpu, "first", "24");
    let [devices, total, free, taken, left] = first.got();
    assert_eq!((devices, total), (1, 100), "a device of so much memory");
    assert!(free <= 100 && (48..=96).contains(&taken) && left < 28, "{free} {taken} {left}");
    // Another session has what the first has left, and no more.
    let mut second = Holds::start(&network, "alice", &gpu, "second", "2");
    let [_, total, free, more, _] = second.got();
    assert!(total == 100 && free <= 100 - taken, "{free} {taken}");
    assert!(taken + more <= 100, "{taken} {more}");
    // Who has no limit notices nothing of it.
    let mut bobs = Holds::start(&network, "bob", &gpu, "bobs", "24");
    let [_, total, _, others, _] = bobs.got();
    assert!(total > 200 && others > 150, "{total} {others}");
    second.end();
    // What a killed job had is free again.
    network.text("alice", &["kill", "first"]);
    drop(first);
    until("both ends", || sessions(&server, "ends") == 2);
    let mut third = Holds::start(&network, "alice", &gpu, "third", "24");
    assert_eq!(third.got()[3], taken);
    third.end();
    let log = network.text("alice", &["logs", "third"]);
    assert!(log.contains("the server lets your key have 100 MiB in all its sessions"), "{log}");
}

/// Milliseconds in which a user's job has copied so many MiB there and back.
fn crosses(network: &Network, user: &str, gpu: &str, job: &str, mib: &str) -> u64 {
    let program = host("gpu_crosses.cu", "gpu_crosses", &["-O1", "-arch=sm_80"]);
    let program = program.display().to_string();
    let run = ["run", "--gpu", gpu, "--job", job, "--", &program, mib];
    let output = network.kedge(user, &run).stdin(Stdio::null()).output().expect("kedge");
    let said = String::from_utf8_lossy(&output.stdout);
    said.trim()
        .parse()
        .unwrap_or_else(|_| panic!("{output:?} {}", network.text(user, &["logs", job])))
}

#[test]
fn bandwidth_is_a_key_s_in_all_its_sessions() {
    let Some(network) = network("lmbytes") else { return };
    let server = serve(&network);
    let gpu = &*server.address;
    let output = network.kedge("lender", &["keys", "limit", "alice", "--bandwidth", "1000"]);
    let output = { output }.output().expect("kedge");
    assert!(stderr(&output).contains("--bandwidth: 64 KiB a second at least"), "{output:?}");
    network.text("lender", &["keys", "limit", "alice", "--bandwidth", "4M"]);
    assert!(network.text("lender", &["keys", "list"]).contains("bandwidth 4 MiB/s"));
    let [first, second, bobs] = std::thread::scope(|scope| {
        let network = &network;
        let alice = |job| scope.spawn(move || crosses(network, "alice", gpu, job, "8"));
        let alices = [alice("first"), alice("second")];
        let bobs = crosses(network, "bob", gpu, "bobs", "8");
        let [first, second] = alices.map(|job| job.join().expect("a time"));
        [first, second, bobs]
    });
    // 8 MiB to the device, of which 1 at most makes up for time before.
    assert!(first >= 1700 && second >= 1700, "{first} {second}");
    assert!(bobs < first.max(second), "{bobs} {first} {second}");
}

#[test]
fn devices_are_limited_by_number_and_by_count() {
    let Some(network) = network("lmdevices") else { return };
    let server = serve(&network);
    let gpu = &*server.address;
    let count = |user: &str, gpu: &str, job: &str| {
        let mut holds = Holds::start(&network, user, gpu, job, "200");
        let [devices, ..] = holds.got();
        holds.end();
        devices
    };
    network.text("lender", &["keys", "limit", "alice", "--gpus", "2", "--devices", "0,2"]);
    assert_eq!(count("alice", gpu, "all"), 2);
    assert_eq!(count("alice", &format!("{gpu}/2"), "one"), 1);
    assert_eq!(count("bob", gpu, "bobs"), 3);
    let (output, log) = tries(&network, "alice", &format!("{gpu}/0,1"), "notmine");
    assert!(
        !output.status.success() && log.contains("may not use its device 1, but 0, 2"),
        "{log}"
    );
    network.text("lender", &["keys", "limit", "alice", "--gpus", "1"]);
    let mut holds = Holds::start(&network, "alice", &format!("{gpu}/2"), "holds", "200");
    holds.got();
    // On the device that it has already.
    assert_eq!(count("alice", gpu, "beside"), 1);
    let (output, log) = tries(&network, "alice", &format!("{gpu}/0"), "another");
    assert!(!output.status.success(), "{output:?}");
    assert!(
        log.contains("may use 1 of its devices at a time, and with these it would use 2"),
        "{log}"
    );
    let listed = network.text("lender", &["keys", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let limits = |name: &str| {
        let keys = listed.as_array().expect("a list").iter();
        keys.filter(|key| key["name"] == name).map(|key| key["limits"].clone()).next()
    };
    assert_eq!(limits("alice"), Some("gpus 1, devices 0,2".into()));
    assert_eq!(limits("bob"), Some(serde_json::Value::Null));
}

/// Limits that cannot be read are none that are not there: their key gets nothing.
#[test]
fn damaged_limits_let_their_key_have_nothing() {
    let Some(network) = network("lmdamaged") else { return };
    let server = serve(&network);
    network.text("lender", &["keys", "limit", "alice", "--gpus", "1"]);
    let file = network.config("lender").join("kedge/keys/alice.limits");
    std::fs::write(&file, "gpus all\n").expect("a file");
    let (output, log) = tries(&network, "alice", &server.address, "j");
    assert!(!output.status.success(), "{output:?}");
    assert!(log.contains("what your key may have cannot be read there"), "{log}");
    assert!(!log.contains(&file.display().to_string()), "{log}");
    assert!(server.said().contains("alice.limits is damaged: line 1"), "{}", server.said());
    let (output, log) = tries(&network, "bob", &server.address, "bobs");
    assert!(output.status.success(), "{output:?} {log}");
    let said = network.kedge("lender", &["keys", "limit", "alice"]).output().expect("kedge");
    assert!(stderr(&said).contains("is damaged"), "{said:?}");
    network.text("lender", &["keys", "limit", "alice", "--none"]);
    let (output, log) = tries(&network, "alice", &server.address, "again");
    assert!(output.status.success(), "{output:?} {log}");
}

/// A job of a user's that launches kernels without end, and how often some have been over.
struct Turns {
    child: Child,
    count: Arc<AtomicUsize>,
}

impl Turns {
    fn start(network: &Network, user: &str, gpu: &str, job: &str, numbers: [&str; 2]) -> Turns {
        let program = host("gpu_turns.cu", "gpu_turns", &["-O1", "-arch=sm_80"]);
        let program = program.display().to_string();
        let [rounds, ahead] = numbers;
        let run = ["run", "--gpu", gpu, "--job", job, "--", &program, rounds, ahead, "100000000"];
        let mut child = network.kedge(user, &run).stdout(Stdio::piped()).spawn().expect("kedge");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let count = Arc::<AtomicUsize>::default();
        let own = count.clone();
        thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|_| _ = own.fetch_add(1, Ordering::SeqCst));
        });
        Turns { child, count }
    }

    fn so_far(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        send("TERM", &[self.child.id()]);
        let _ = self.child.wait();
    }
}

/// Three sessions of one key and one of another's, all with kernels without end: both keys get as
/// much done in the same time.
#[test]
fn a_key_with_more_sessions_has_no_more_of_a_device() {
    let Some(network) = network("lmturns") else { return };
    let server = serve(&network);
    let gpu = format!("{}/0", server.address);
    let start = |user, job| Turns::start(&network, user, &gpu, job, ["20000", "4"]);
    let alices = ["one", "two", "three"].map(|job| start("alice", job));
    let bobs = start("bob", "bobs");
    until("work of all", || alices.iter().chain([&bobs]).all(|it| it.so_far() > 0));
    let all = || (alices.iter().map(Turns::so_far).sum::<usize>(), bobs.so_far());
    let before = all();
    thread::sleep(Duration::from_secs(6));
    let after = all();
    let (hers, his) = (after.0 - before.0, after.1 - before.1);
    let share = his as f64 / (hers + his) as f64;
    println!("one of two keys has {share:.2} of what is done");
    assert!((0.38..0.62).contains(&share), "{share:.2} of it all: {his} beside {hers}");
    // None of hers is left out; and once nobody else is there, each is as free as before.
    let moves = |it: &Turns| {
        let before = it.so_far();
        until("another's work", || it.so_far() > before);
    };
    alices.iter().for_each(moves);
    drop(bobs);
    alices.iter().for_each(moves);
}
