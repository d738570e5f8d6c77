//! Proxies that are ready before they are needed: jobs get their devices from them and come back in
//! them; what keeps them may end at any moment; and where none fits, all is as without.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, children, family, send};
use kedge_tests::random;
use kedge_tests::world::{failure, stderr, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

const CONNECTED: &str = "has connected to a warm proxy";
const BACK: &str = "in a warm proxy";

/// What is kept, as `kedge warm status` tells; `None` where nobody keeps any.
fn status(place: &GpuSteps, more: &[&str]) -> Option<Value> {
    let output = place.output(&[&["warm", "status", "--json"], more].concat());
    let pools: Vec<Value> = serde_json::from_slice(&output.stdout).ok()?;
    pools.into_iter().next()
}

/// Process ids of those that are ready.
fn ready(place: &GpuSteps, more: &[&str]) -> BTreeSet<u32> {
    let pool = status(place, more).unwrap_or_default();
    let list = pool["ready"].as_array().cloned().unwrap_or_default();
    list.iter().filter_map(Value::as_u64).map(|pid| pid as u32).collect()
}

fn until_ready(place: &GpuSteps, more: &[&str], count: usize) -> BTreeSet<u32> {
    wait_for("none becomes ready", || ready(place, more).len() == count);
    ready(place, more)
}

/// What keeps proxies for all jobs of a place; killed at the end.
struct Node(Child);

impl Node {
    fn start(place: &GpuSteps, options: &[&str]) -> Node {
        let start = [&["warm", "start", "--gpu", "soft", "--soft-memory", "128M"], options];
        let mut command = place.kedge(&start.concat());
        Node(command.stderr(Stdio::null()).spawn().expect("kedge"))
    }

    fn kill(&mut self) {
        send("KILL", &children(self.0.id()));
        self.0.wait().expect("it ends");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.kill();
        }
    }
}

/// Nothing of this place runs, by its executables.
fn nothing_is_left(place: &GpuSteps) {
    wait_for("something is left behind", || place.running().is_empty());
}

fn kill_all(place: &GpuSteps, job: &Job) {
    place.kill_proxies_and_clients(job, &ready(place, &["--job", "j"]));
}

fn goes_back(place: &GpuSteps, job: &mut Job) {
    place.goes_back(job, |job| kill_all(place, job));
}

fn come_back(place: &GpuSteps, more: &[&str]) {
    let mut job = place.start(&[&["--recover=5", "--warm"], more].concat());
    job.read_to(20);
    assert_eq!(place.count(CONNECTED), 1, "{}", place.log());
    let image = place.checkpoint(&[]);
    for time in 1..=2 {
        until_ready(place, &["--job", "j"], 1);
        goes_back(place, &mut job);
        assert_eq!(place.count(BACK), time, "{}", place.log());
    }
    assert!(job.back.iter().all(|step| *step > 20), "{:?}", job.back);
    // A checkpoint of a job whose proxy is no child of its init.
    let newer = place.checkpoint(&[]);
    assert_ne!(image, newer);
    until_ready(place, &["--job", "j"], 1);
    goes_back(place, &mut job);
    job.read_to(STEPS);
    let nonce = job.nonce.clone();
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    nothing_is_left(place);
    place.is_good(&newer);
    // What the image says of warm proxies counts for its restart too.
    place.goes_on(&newer, &nonce);
    assert_eq!(place.count(BACK), 1, "{}", place.log());
    nothing_is_left(place);
}

#[test]
fn a_job_comes_back_in_warm_proxies_of_its_own() {
    for (name, user) in [("wmback", User::Same), ("wmbacku", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        come_back(&place, &["--hold"]);
    }
}

#[test]
fn it_comes_back_from_files_as_well_and_with_changes() {
    come_back(&GpuSteps::mine("wmfiles"), &["--incremental"]);
}

#[test]
fn the_log_tells_of_a_ready_proxy_that_was_killed() {
    let place = GpuSteps::mine("wmtold");
    let mut job = place.start(&["--warm"]);
    let ready: Vec<u32> = until_ready(&place, &["--job", "j"], 1).into_iter().collect();
    send("KILL", &ready);
    wait_for("the log does not tell", || {
        let said = place.output(&["logs", "j", "--target", "kedge::warm", "--json"]);
        let said = String::from_utf8_lossy(&said.stdout);
        said.contains("\"job\": \"j\"") && said.contains("ended")
    });
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    nothing_is_left(&place);
}

/// Their descriptors cannot be told apart from outside of their namespace.
#[test]
fn processes_whose_device_memory_travelled_come_back_in_new_proxies_and_the_log_says_why() {
    let place = GpuSteps::of("gpu_pair", "wmshare", User::Same).expect("the test's own user");
    let mut job = place.start(&["--recover", "--warm=2"]);
    job.read_to(20);
    place.checkpoint(&[]);
    until_ready(&place, &["--job", "j"], 2);
    goes_back(&place, &mut job);
    assert_eq!(place.count(BACK), 0, "{}", place.log());
    assert_eq!(place.count("travelled as descriptors"), 1, "{}", place.log());
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    nothing_is_left(&place);
}

/// Handles lead to a proxy by its name: nothing of them needs to be compared.
#[test]
fn processes_that_share_by_handles_alone_come_back_in_warm_proxies() {
    let place = GpuSteps::of("gpu_pair", "wmhandle", User::Same).expect("the test's own user");
    let mut command = place.to_run(&["--recover", "--warm=2"]);
    command.arg("handles");
    let mut job = Job::start_recovering(command);
    job.read_to(20);
    place.checkpoint(&[]);
    until_ready(&place, &["--job", "j"], 2);
    goes_back(&place, &mut job);
    assert_eq!(place.count(BACK), 2, "{}", place.log());
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    nothing_is_left(&place);
}

/// The program's last step copies all device memory into memory of its own, which its proxy must
/// reach from outside of its namespaces.
#[test]
fn a_proxy_from_outside_reaches_its_client_s_memory() {
    for (name, user) in [("wmcopy", User::Same), ("wmcopyu", User::Nobody)] {
        let Some(place) = GpuSteps::of("gpu_blocks", name, user) else { continue };
        let mut job = place.start(&["--recover", "--warm"]);
        job.read_to(20);
        place.checkpoint(&[]);
        until_ready(&place, &["--job", "j"], 1);
        goes_back(&place, &mut job);
        assert_eq!(place.count(BACK), 1, "{}", place.log());
        job.read_to(STEPS);
        assert_eq!(job.end().code(), Some(7), "{}", place.log());
        assert!(!place.log().contains("cannot be read"), "{}", place.log());
        nothing_is_left(&place);
    }
}

#[test]
fn a_job_that_is_killed_leaves_nothing_ready() {
    let place = GpuSteps::mine("wmkill");
    let mut job = place.start(&["--warm=2"]);
    job.read_to(5);
    until_ready(&place, &["--job", "j"], 2);
    send("KILL", &family(job.supervisor()));
    job.drain();
    nothing_is_left(&place);
}

#[test]
fn jobs_take_what_the_node_keeps_each_its_own() {
    for (name, user) in [("wmnode", User::Same), ("wmnodeu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let node = Node::start(&place, &[]);
        let first = until_ready(&place, &[], 1);
        let second = place.output(&["warm", "start", "--gpu", "soft"]);
        assert!(failure(&second).contains("already"), "{second:?}");
        let mut job = place.start(&[]);
        job.read_to(5);
        assert_eq!(place.count(CONNECTED), 1, "{}", place.log());
        let image = place.checkpoint(&[]);
        let next = until_ready(&place, &[], 1);
        assert!(first.is_disjoint(&next), "{first:?} {next:?}");
        job.kill();
        let nonce = job.nonce.clone();
        place.goes_on(&image, &nonce);
        assert_eq!(place.count(BACK), 1, "{}", place.log());
        let last = until_ready(&place, &[], 1);
        assert!(last.is_disjoint(&next), "{last:?} {next:?}");
        assert_eq!(status(&place, &[]).expect("it is kept")["given"], 2);
        assert!(place.output(&["warm", "stop"]).status.success());
        drop(node);
        nothing_is_left(&place);
        assert!(failure(&place.output(&["warm", "stop"])).contains("kedge warm start"));
    }
}

#[test]
fn of_two_jobs_that_want_one_proxy_one_gets_it() {
    let place = GpuSteps::mine("wmtwo");
    let _node = Node::start(&place, &[]);
    for _ in 0..3 {
        until_ready(&place, &[], 1);
        let run = |name| {
            let mut command = place.kedge(&["run", "--gpu", "soft", "--soft-memory", "128M"]);
            command.args(["--job", name, "--"]).arg(&place.program).args(["20", "1"]);
            command.spawn().expect("kedge")
        };
        let jobs = ["a", "b"].map(run).map(|job| job.wait_with_output().expect("it ends"));
        assert!(jobs.iter().all(|job| job.status.code() == Some(7)), "{jobs:?}");
        let logs = ["a", "b"].map(|name| {
            let output = place.output(&["logs", name]);
            String::from_utf8_lossy(&output.stdout).into_owned()
        });
        let warm = logs.iter().filter(|log| log.contains(CONNECTED)).count();
        assert_eq!(warm, 1, "{logs:?}");
    }
}

#[test]
fn a_proxy_that_is_killed_before_its_job_comes_is_replaced() {
    let place = GpuSteps::mine("wmdies");
    let _node = Node::start(&place, &[]);
    let first = until_ready(&place, &[], 1);
    send("KILL", &first.iter().copied().collect::<Vec<_>>());
    wait_for("it is not replaced", || {
        let now = ready(&place, &[]);
        now.len() == 1 && now.is_disjoint(&first)
    });
    let failure = status(&place, &[]).expect("it is kept")["failure"].to_string();
    assert!(failure.contains("ended"), "{failure}");
    // One that is stopped does not answer: the job starts another, and this one never finds the
    // client.
    let stopped: Vec<u32> = ready(&place, &[]).into_iter().collect();
    send("STOP", &stopped);
    let mut job = place.start(&[]);
    job.read_to(5);
    assert_eq!(place.count(CONNECTED), 0, "{}", place.log());
    wait_for("it lives", || !PathBuf::from(format!("/proc/{}/fd/0", stopped[0])).exists());
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
}

#[test]
fn jobs_go_on_when_what_keeps_proxies_is_killed() {
    let place = GpuSteps::mine("wmnone");
    let mut node = Node::start(&place, &[]);
    until_ready(&place, &[], 1);
    let mut job = place.start(&["--recover"]);
    job.read_to(20);
    assert_eq!(place.count(CONNECTED), 1);
    node.kill();
    assert!(failure(&place.output(&["warm", "status"])).contains("kept ready"));
    place.checkpoint(&[]);
    goes_back(&place, &mut job);
    assert_eq!(place.count(BACK), 0, "{}", place.log());
    assert!(place.count("it has ended") > 0, "{}", place.log());
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    nothing_is_left(&place);
    // What is left of it is in nobody's way.
    let _node = Node::start(&place, &[]);
    until_ready(&place, &[], 1);
}

#[test]
fn whenever_what_keeps_proxies_is_killed_jobs_are_whole() {
    let place = GpuSteps::mine("wmphase");
    for _ in 0..6 {
        let mut node = Node::start(&place, &[]);
        std::thread::sleep(Duration::from_millis(u64::from(random::number(120))));
        let mut run =
            place.kedge(&["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "j", "--"]);
        let job = run.arg(&place.program).args(["60", "5"]).spawn().expect("kedge");
        std::thread::sleep(Duration::from_millis(u64::from(random::number(60))));
        node.kill();
        let output = job.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(7), "{output:?} {}", place.log());
        nothing_is_left(&place);
    }
}

#[test]
fn a_proxy_that_does_not_fit_is_left_alone_and_the_log_says_why() {
    let place = GpuSteps::mine("wmother");
    let _node = Node::start(&place, &[]);
    let kept = until_ready(&place, &[], 1);
    let run = |options: &[&str], variable: Option<(&str, &str)>| {
        let mut command = place.kedge(&[&["run", "--job", "j"], options].concat());
        command.arg("--").arg(&place.program).args(["5", "1"]).envs(variable);
        let output = command.output().expect("kedge");
        assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
        place.log()
    };
    let usual = ["--gpu", "soft", "--soft-memory", "128M"];
    let other_gpu = ["--gpu", "soft:2", "--soft-memory", "128M"];
    let other_memory = ["--gpu", "soft", "--soft-memory", "129M"];
    let cases = [
        (&other_gpu[..], None, "--gpu soft"),
        (&other_memory[..], None, "--soft-memory 134217728"),
        (&usual[..], Some(("CUDA_VISIBLE_DEVICES", "0")), "CUDA_VISIBLE_DEVICES not set"),
        (&usual[..], Some(("CUDA_MPS_PIPE_DIRECTORY", "/x")), "CUDA_MPS_PIPE_DIRECTORY"),
    ];
    for (options, variable, word) in cases {
        let log = run(options, variable);
        assert!(log.contains("no warm proxy") && log.contains(word), "{word}: {log}");
        assert!(!log.contains(CONNECTED), "{log}");
    }
    assert_eq!(ready(&place, &[]), kept, "it was touched");
    assert!(run(&usual, None).contains(CONNECTED));
}

#[test]
fn why_none_becomes_ready_is_told() {
    let place = GpuSteps::mine("wmfails");
    let mut command = place.kedge(&["warm", "start", "--gpu", "local"]);
    command.env("KEDGE_DRIVER", "/no/such/libcuda.so.1").stderr(Stdio::null());
    let _node = Node(command.spawn().expect("kedge"));
    let failure = || status(&place, &[]).unwrap_or_default()["failure"].to_string();
    wait_for("nothing is told", || failure().contains("no NVIDIA driver"));
    assert!(ready(&place, &[]).is_empty());
}

#[test]
fn a_client_that_sees_other_devices_than_were_made_ready_gets_those() {
    let place = GpuSteps::mine("wmsees");
    let own = place.program.display();
    let script = format!("CUDA_VISIBLE_DEVICES=1 {own} 5 1 && exit; [ $? = 7 ] && exec {own} 5 1");
    let mut command =
        place.kedge(&["run", "--gpu", "soft:2", "--soft-memory", "128M", "--job", "j"]);
    let output = command.args(["--warm", "--", "bash", "-c", &script]).output().expect("kedge");
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    assert!(place.log().contains("was ready for other devices"), "{}", place.log());
    nothing_is_left(&place);
}
