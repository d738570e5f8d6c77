//! Connections between parts of a job on several hosts: held and saved at a checkpoint, and made
//! anew at a restart on other hosts with other addresses. Nothing that was sent is lost, or comes
//! twice.
use kedge_tests::cluster::Cluster;
use kedge_tests::job::{User, allow, build, children, family, send, steps_in, wait_for_steps};
use kedge_tests::world::stderr;
use serde_json::Value;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Thousands of numbers that each end sends: 16 MB, more than a connection holds.
const COUNT: u64 = 2000;
/// What the program ends with when all was right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(40);

/// What the client and the server are to do.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Where the server listens, and where the client finds it.
    at: [&'static str; 2],
    /// On which hosts they are.
    hosts: [usize; 2],
    /// Thousands of numbers that they may read before the checkpoint.
    first: u64,
    /// The lines that they have written by then.
    lines: [usize; 2],
    count: u64,
}

impl Kind {
    const fn new(name: &'static str, at: [&'static str; 2], count: u64) -> Kind {
        Kind { name, at, hosts: [0, 1], first: 10, lines: [5, 5], count }
    }
}

const STREAM: Kind = Kind::new("stream", ["0.0.0.0", "10.79.1.1"], COUNT);
/// A job with a server on one host and a client on another.
struct Pair {
    cluster: Cluster,
    parts: Vec<Child>,
}

impl Pair {
    /// `None` where there can be no such hosts.
    fn start(name: &str, user: User, kind: Kind) -> Option<Pair> {
        let cluster = Cluster::new(name, user, 2)?;
        Some(Pair::on(cluster, user, kind))
    }

    fn on(cluster: Cluster, user: User, kind: Kind) -> Pair {
        build(&cluster.world, "wired", &[]);
        if user == User::Nobody {
            cluster.world.give_home_away();
        }
        let mut pair = Pair { cluster, parts: Vec::new() };
        pair.allow(kind.first);
        for (part, role) in ["server", "client"].into_iter().enumerate() {
            let (name, at, count) = (kind.name, kind.at[part], kind.count);
            let line = format!("exec ./wired {name} {role} {at} 7000 {count} > out.{part}");
            let (at, images) = (pair.cluster.at(1), pair.cluster.images());
            let run =
                ["run", "--gpu", "none", "--join", "pair", "--at", &at, "--ckpt-dir", &images];
            let mut command = pair
                .cluster
                .kedge(kind.hosts[part], &[&run[..], &["--", "sh", "-c", &line]].concat());
            command.stdout(Stdio::null()).stderr(Stdio::null());
            pair.parts.push(command.spawn().expect("nsenter"));
            let begin = Instant::now();
            // The coordinator's part comes first.
            while part == 0 && !pair.cluster.world.home().join("out.0").exists() {
                assert!(begin.elapsed() < TIMEOUT);
                thread::sleep(Duration::from_millis(5));
            }
        }
        (0..2).for_each(|part| pair.wait_for(part, kind.lines[part]));
        pair
    }

    fn allow(&self, count: u64) {
        allow(&self.cluster.world.home(), count);
    }

    fn wait_for(&self, part: usize, lines: usize) {
        wait_for_steps(&self.cluster.world.home(), part, lines);
    }

    fn said(&self, part: usize) -> Vec<String> {
        steps_in(&self.cluster.world.home(), part)
    }

    fn try_checkpoint(&self, more: &[&str]) -> Output {
        self.cluster.output(0, &[&["checkpoint", "pair", "--json"][..], more].concat())
    }

    fn checkpoint(&self, more: &[&str]) -> String {
        image_of(&self.try_checkpoint(more))
    }

    /// Waits for the parts that were started first: they end as they are to.
    fn ends_with(&mut self, code: i32) {
        for (part, child) in self.parts.iter_mut().enumerate() {
            let status = child.wait().expect("ended");
            let said = steps_in(&self.cluster.world.home(), part);
            assert_eq!(status.code(), Some(code), "part {part}: {:?}", said.last());
        }
    }

    fn kill(&mut self) {
        for part in &mut self.parts {
            send("KILL", &family(part.id()));
            let _ = part.wait();
        }
    }

    /// Restarts both parts, each on its host: what they say.
    fn restart(&self, image: &str, hosts: [usize; 2]) -> Vec<Output> {
        let running = self.begin(image, hosts).into_iter();
        running.map(|child| child.wait_with_output().expect("ended")).collect()
    }

    fn begin(&self, image: &str, hosts: [usize; 2]) -> Vec<Child> {
        let at = self.cluster.at(hosts[0] / 2 + 1);
        let start = |host: usize, parts: &str| {
            let restart = ["restart", image, "--at", &at, "--parts", parts];
            self.cluster.kedge(host, &restart).spawn().expect("nsenter")
        };
        match hosts[0] == hosts[1] {
            true => vec![start(hosts[0], "0,1")],
            false => vec![start(hosts[0], "0"), start(hosts[1], "1")],
        }
    }
}

fn image_of(saved: &Output) -> String {
    assert!(saved.status.success(), "{}", stderr(saved));
    let report: Value = serde_json::from_slice(&saved.stdout).expect("JSON");
    report["image"].as_str().expect("a path").to_owned()
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Stopped while both ends hold what nobody has read, and brought back on those hosts: what each
/// part says.
fn comes_back(name: &str, user: User, kind: Kind, hosts: [usize; 2]) -> Option<[Vec<String>; 2]> {
    let mut pair = Pair::start(name, user, kind)?;
    let image = pair.checkpoint(&["--stop"]);
    pair.parts.iter_mut().for_each(|part| drop(part.wait()));
    pair.allow(kind.count);
    let ended = pair.restart(&image, hosts);
    let said = [0, 1].map(|part| pair.said(part));
    for ended in ended {
        assert_eq!(ended.status.code(), Some(WELL), "{} {said:?}", stderr(&ended));
    }
    Some(said)
}

fn comes_back_elsewhere(name: &str, user: User, kind: Kind) -> Option<[Vec<String>; 2]> {
    comes_back(name, user, kind, [2, 3])
}

fn word<'a>(said: &'a [String], first: &str) -> Vec<&'a str> {
    let line = said.iter().find(|line| line.split(' ').next() == Some(first));
    line.unwrap_or_else(|| panic!("no {first} in {said:?}")).split(' ').collect()
}

#[test]
fn a_stream_between_two_hosts_comes_back_on_two_others() {
    let Some(said) = comes_back_elsewhere("wires", User::Same, STREAM) else { return };
    // To the programs the hosts are what they were.
    assert_eq!(word(&said[0], "own"), ["own", "10.79.1.1", "7000"]);
    assert_eq!(word(&said[0], "peer")[1], "10.79.1.2");
    assert_eq!(word(&said[1], "peer"), ["peer", "10.79.1.1", "7000"]);
    assert_eq!(word(&said[0], "peer")[2], word(&said[1], "own")[2]);
}

#[test]
fn so_it_does_for_an_ordinary_user() {
    comes_back_elsewhere("wiresn", User::Nobody, STREAM);
}

#[test]
fn on_the_same_hosts_it_has_its_addresses() {
    let Some(said) = comes_back("wiress", User::Same, STREAM, [0, 1]) else { return };
    assert_eq!(word(&said[1], "peer"), ["peer", "10.79.1.1", "7000"]);
    assert_eq!(word(&said[1], "own")[1], "10.79.1.2");
    assert_eq!(word(&said[0], "peer")[1..], word(&said[1], "own")[1..]);
}

#[test]
fn parts_of_two_hosts_come_back_on_one() {
    comes_back("wireso", User::Same, STREAM, [2, 2]);
}

#[test]
fn parts_of_one_host_that_use_its_loopback_come_back_on_two() {
    let kind = Kind { hosts: [0, 0], at: ["127.0.0.1", "127.0.0.1"], ..STREAM };
    let Some(said) = comes_back_elsewhere("wiresl", User::Same, kind) else { return };
    // Loopback's address would be nobody's: it is called by another one that its host had.
    assert_eq!(word(&said[1], "peer"), ["peer", "10.79.1.1", "7000"]);
}

#[test]
fn a_stream_of_ipv6_comes_back_elsewhere() {
    let kind = Kind { at: ["::", "fd79:1::1"], ..STREAM };
    let Some(said) = comes_back_elsewhere("wires6", User::Same, kind) else { return };
    assert_eq!(word(&said[1], "peer"), ["peer", "fd79:1::1", "7000"]);
    // The server's socket is one of IPv6, and its client one of IPv4.
    let kind = Kind { at: ["::", "10.79.1.1"], ..STREAM };
    comes_back_elsewhere("wires64", User::Same, kind);
}

#[test]
fn an_end_that_sends_no_more_comes_back_as_such() {
    // All of it waits at the server, and so does the end.
    let kind = Kind { name: "half", first: 0, lines: [1, 2], count: 100, ..STREAM };
    comes_back_elsewhere("wiresh", User::Same, kind);
}

#[test]
fn what_a_process_has_sent_before_it_closed_its_end_comes_all_the_same() {
    let kind = Kind { name: "close", first: 0, lines: [1, 2], count: 100, ..STREAM };
    comes_back_elsewhere("wiresq", User::Same, kind);
}

#[test]
fn who_waits_to_be_accepted_connects_again() {
    let kind = Kind { name: "backlog", first: 0, lines: [1, 1], ..STREAM };
    comes_back_elsewhere("wiresb", User::Same, kind);
}

#[test]
fn an_address_that_a_program_remembers_is_found_wherever_its_host_is() {
    let kind = Kind { name: "again", ..STREAM };
    let Some(said) = comes_back_elsewhere("wiresa", User::Same, kind) else { return };
    // It calls itself as it was called.
    assert_eq!(word(&said[0], "own"), ["own", "10.79.1.1", "7000"]);
    comes_back_elsewhere("wiresan", User::Nobody, kind);
    let Some(mut pair) = Pair::start("wiresaa", User::Same, kind) else { return };
    let first = pair.checkpoint(&["--stop"]);
    pair.parts.iter_mut().for_each(|part| drop(part.wait()));
    pair.allow(300);
    pair.parts = pair.begin(&first, [2, 3]);
    (0..2).for_each(|part| pair.wait_for(part, 200));
    let saved = pair.cluster.output(2, &["checkpoint", "pair", "--json", "--stop"]);
    let second = image_of(&saved);
    pair.parts.iter_mut().for_each(|part| drop(part.wait()));
    pair.allow(COUNT);
    // The server is where the client was, and the client where the server was.
    for ended in pair.restart(&second, [1, 0]) {
        let said = [0, 1].map(|part| pair.said(part));
        assert_eq!(ended.status.code(), Some(WELL), "{} {said:?}", stderr(&ended));
    }
}

#[test]
fn datagrams_find_the_other_host() {
    let kind = Kind { name: "datagram", lines: [1, 10], count: 60, ..STREAM };
    comes_back_elsewhere("wiresd", User::Same, kind);
    comes_back_elsewhere("wiresdn", User::Nobody, kind);
}

#[test]
fn checkpoints_of_a_stream_that_goes_on_lose_nothing() {
    let Some(mut pair) = Pair::start("wiresg", User::Same, STREAM) else { return };
    for count in [20, 400, COUNT] {
        pair.checkpoint(&[]);
        pair.allow(count);
        if count < COUNT {
            (0..2).for_each(|part| pair.wait_for(part, count as usize / 2));
        }
    }
    pair.ends_with(WELL);
}

#[test]
fn where_the_network_is_cut_the_checkpoint_fails_and_nothing_is_lost() {
    let name = "wiresc";
    let Some(cluster) = Cluster::new(name, User::Same, 2) else { return };
    let wire = format!("ip link add kc type veth peer name kd netns {}", cluster.hosts[1].id());
    assert!(cluster.hosts[0].does(&wire));
    for (host, device) in cluster.hosts.iter().zip(["kc", "kd"]) {
        let number = if device == "kc" { 1 } else { 2 };
        assert!(host.does(&format!("ip addr add 10.80.1.{number}/24 dev {device}")));
        assert!(host.does(&format!("ip link set {device} up")));
    }
    let kind = Kind { at: ["0.0.0.0", "10.80.1.1"], ..STREAM };
    let mut pair = Pair::on(cluster, User::Same, kind);
    assert!(pair.cluster.hosts[0].does("ip link set kc down"));
    let begin = Instant::now();
    let failed = pair.try_checkpoint(&[]);
    assert!(!failed.status.success() && begin.elapsed() < TIMEOUT);
    assert!(stderr(&failed).contains("10.80.1."), "{}", stderr(&failed));
    assert!(pair.cluster.hosts[0].does("ip link set kc up"));
    pair.checkpoint(&[]);
    pair.allow(COUNT);
    pair.ends_with(WELL);
}

#[test]
fn a_supervisor_that_is_killed_meanwhile_takes_no_byte_with_it() {
    for delay in [5, 15, 30, 50, 80] {
        let Some(pair) = Pair::start("wiresk", User::Same, STREAM) else { return };
        let mut asked = pair.cluster.kedge(0, &["checkpoint", "pair"]);
        asked.stdout(Stdio::null()).stderr(Stdio::null());
        let mut asked = asked.spawn().expect("nsenter");
        thread::sleep(Duration::from_millis(delay));
        // timeout's only child.
        send("KILL", &children(pair.parts[1].id()));
        let _ = asked.wait();
        pair.allow(COUNT);
        let begin = Instant::now();
        let well = |part| pair.said(part).iter().any(|line| line.starts_with("well"));
        while !(0..2).all(well) {
            let last = [0, 1].map(|part| pair.said(part).last().cloned());
            assert!(begin.elapsed() < TIMEOUT, "after {delay} ms: {last:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
