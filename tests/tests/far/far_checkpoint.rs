//! Jobs whose devices are served by another process tree, as on another machine: checkpointed,
//! killed, and restarted there, on this machine's devices and on another server's.
use kedge_tests::gpu_steps::{self, GpuSteps};
use kedge_tests::job::{Job, User, children, send};
use kedge_tests::place::Place;
use kedge_tests::server::Served;
use kedge_tests::world::failure;
use serde_json::Value;
use std::path::Path;

const STEPS: u64 = 300;
const MIB: u64 = 1 << 20;

/// What a program of the tests gets: steps, and milliseconds between two.
fn numbers() -> [String; 2] {
    [STEPS.to_string(), "5".to_owned()]
}

fn start(place: &Place, gpu: &str, program: &str) -> Job {
    let numbers = numbers();
    place.on(gpu, program, &[], &numbers.each_ref().map(String::as_str))
}

/// The job is checkpointed, killed, and goes on where each of `places` says (`None`: where it was);
/// then it comes to its end.
fn moves(place: &Place, mut job: Job, places: &[Option<&str>]) {
    let nonce = job.nonce.clone();
    job.read_to(10);
    for to in places {
        let before = job.step;
        let image = place.checkpoint(&[]);
        job.read_to(job.step + 3);
        job.kill();
        let printed = job.step;
        let options = to.map_or(vec![], |gpu| vec!["--gpu", gpu]);
        job = place.restart_with(&image, &options, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        job.read_to(job.step + 10);
    }
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn a_job_goes_on_there_elsewhere_and_here() {
    let (first, second) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft"]));
    let place = Place::mine("fckmove");
    let job = start(&place, &first.address, "gpu_steps");
    let other = Some(second.address.as_str());
    moves(&place, job, &[None, other, None, Some("soft"), other]);
}

/// Memory that the host and the devices both see is the same at both ends after a restart.
#[test]
fn what_both_see_goes_along() {
    let (first, second) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft"]));
    let place = Place::mine("fckboth");
    let job = start(&place, &first.address, "gpu_pinned");
    let other = Some(second.address.as_str());
    moves(&place, job, &[None, other, Some("soft"), other, None]);
}

/// An ordinary user's job, on a server of that user's.
#[test]
fn an_ordinary_user_has_it_too() {
    let Some(place) = Place::new("fckuser", User::Nobody) else { return };
    let serve = ["serve", "--listen", "127.0.0.1:0", "--gpu", "soft"];
    let command = kedge_tests::job::kedge_as(&place.world, place.user, &serve);
    let server = Served::started(command);
    let job = start(&place, &server.address, "gpu_steps");
    moves(&place, job, &[None]);
}

/// Several processes, each with a session.
#[test]
fn several_processes_go_along() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = Place::mine("fckmany");
    let job = start(&place, &server.address, "gpu_allreduce");
    moves(&place, job, &[None, Some("soft")]);
}

/// Bytes of the devices' file, of their memory, and of what of it the parent has.
fn devices(place: &Place, image: &Path) -> (u64, u64, u64) {
    let shown = place.json(&["inspect", "--json", image.to_str().expect("UTF-8")]);
    let files = shown["files"].as_array().expect("a list");
    let is_gpu = |file: &&Value| file["name"].as_str().is_some_and(|n| n.starts_with("gpu-"));
    let file = files.iter().find(is_gpu).expect("a file of the devices");
    let number = |what: &str| file[what].as_u64().expect("a number");
    (number("bytes"), number("memory"), number("parent"))
}

/// Each image holds what has changed, and any of them brings the job back.
#[test]
fn images_build_on_each_other() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = Place::mine("fckinc");
    let steps = STEPS.to_string();
    let arguments = [&steps, "20", "32", "1"];
    let mut job = place.on(&server.address, "gpu_blocks", &["--incremental"], &arguments);
    let nonce = job.nonce.clone();
    job.read_to(3);
    let first = place.checkpoint(&[]);
    let (bytes, _, parent) = devices(&place, &first);
    assert!(bytes > 32 * MIB && parent == 0, "{bytes} {parent}");
    for _ in 0..3 {
        job.read_to(job.step + 2);
        let (bytes, memory, parent) = devices(&place, &place.checkpoint(&[]));
        assert!(parent > 4 * MIB && bytes < memory - parent + MIB, "{bytes} {memory} {parent}");
    }
    assert_eq!(devices(&place, &place.checkpoint(&["--full"])).2, 0);
    job.read_to(job.step + 1);
    let last = place.checkpoint(&[]);
    let (bytes, _, parent) = devices(&place, &last);
    assert!(bytes < 28 * MIB && parent > 4 * MIB, "{bytes} {parent}");
    job.read_to(job.step + 2);
    job.kill();
    assert_eq!(place.restart(&last, &nonce).finish(STEPS).code(), Some(7));
    let third = first.with_file_name("j-0003");
    assert_eq!(
        place.restart_with(&third, &["--gpu", "soft"], &nonce).finish(STEPS).code(),
        Some(7)
    );
    let other = Served::start(&["--gpu", "soft"]);
    let options = ["--gpu", &other.address];
    assert_eq!(place.restart_with(&third, &options, &nonce).finish(STEPS).code(), Some(7));
}

/// What cannot be is refused by name, and the image can still be restarted.
#[test]
fn a_restart_that_cannot_be_says_why() {
    let server = Served::start(&["--gpu", "soft"]);
    let pair = Served::start(&["--gpu", "soft:2"]);
    let small = Served::start(&["--gpu", "soft", "--soft-memory", "1M"]);
    let place = Place::mine("fckwhy");
    let mut job = start(&place, &server.address, "gpu_steps");
    // It has all its memory by then.
    job.read_to(20);
    let nonce = job.nonce.clone();
    let image = place.checkpoint(&["--stop"]);
    drop(job);
    let path = image.display().to_string();
    for (gpu, expected) in [
        (pair.address.as_str(), "it has seen 1, here are 2"),
        ("127.0.0.1:1", "is `kedge serve` running there?"),
        (&small.address, "on another machine"),
    ] {
        let said = failure(&place.output(&["restart", &path, "--gpu", gpu]));
        assert!(said.contains(expected), "{gpu}: {said}");
    }
    // One of the two will do.
    let one = format!("{}/1", pair.address);
    let job = place.restart_with(&image, &["--gpu", &one], &nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

fn started(place: &GpuSteps, gpu: &str, options: &[&str]) -> Job {
    let (program, steps) = (place.program.display().to_string(), gpu_steps::STEPS.to_string());
    let run = [&["run", "--gpu", gpu, "--job", "j"], options, &["--", &program, &steps, "10"]];
    Job::start_recovering(place.kedge(&run.concat()))
}

/// The far end is killed: the job goes back to its image, by a new session.
#[test]
fn a_job_goes_back_when_its_far_end_dies() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fckback");
    let mut job = started(&place, &server.address, &["--recover"]);
    job.read_to(10);
    place.checkpoint(&[]);
    for _ in 0..2 {
        place.goes_back(&mut job, |_| send("KILL", &children(server.pid())));
    }
    place.ends_well(job);
}

/// Its far end does not know that, and would keep the devices for as long as a line may be cut:
/// they are free before the job goes back.
#[test]
fn a_job_goes_back_when_its_near_end_dies() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fcknear");
    let mut job = started(&place, &server.address, &["--recover"]);
    job.read_to(10);
    place.checkpoint(&[]);
    for _ in 0..2 {
        place.goes_back(&mut job, Job::kill_the_proxy);
        assert_eq!(children(server.pid()).len(), 1, "{}", server.said());
    }
    assert_eq!(server.said().matches("its near end is gone").count(), 2, "{}", server.said());
    place.ends_well(job);
}

/// Where its device's memory is while the program stands still, KiB.
fn resident(server: &Served) -> u64 {
    let proxies = children(server.pid());
    let [proxy] = proxies[..] else { panic!("{proxies:?}") };
    let text = std::fs::read_to_string(format!("/proc/{proxy}/smaps")).expect("a proxy");
    let from = text.find("300000000000-").expect("the device's memory");
    let rss = text[from..].lines().find_map(|line| line.strip_prefix("Rss:")).expect("a number");
    rss.trim().trim_end_matches(" kB").parse().expect("KiB")
}

#[test]
fn memory_leaves_the_far_device_and_comes_back() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("fckswap");
    let mut job = started(&place, &server.address, &[]);
    job.read_to(10);
    send("STOP", &place.clients(&job));
    let swap = |way: &str| {
        let output = place.output(&["swap", way, "j"]);
        assert!(output.status.success(), "{output:?}; {}", place.log());
    };
    let before = resident(&server);
    swap("out");
    assert!(resident(&server) < before / 2, "{before} KiB, {} KiB", resident(&server));
    swap("in");
    assert_eq!(resident(&server), before);
    swap("out");
    send("CONT", &place.clients(&job));
    job.read_to(job.step + 3);
    // So does a checkpoint bring it back.
    swap("out");
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.read_to(gpu_steps::STEPS);
    assert_eq!(job.end().code(), Some(7));
    place.goes_on(&image, &nonce);
}

/// The names by which a server's proxies find each other's memory are in no image as yet.
#[test]
fn a_job_that_shares_memory_is_refused_and_goes_on() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = Place::mine("fckshare");
    let [steps, pause] = numbers();
    let mut job = place.on(&server.address, "gpu_pair", &[], &[&steps, &pause, "handles"]);
    job.read_to(10);
    let said = place.failure(&["checkpoint", "j"]);
    assert!(said.contains("keeps as yet: take one before it shares them"), "{said}");
    assert_eq!(job.finish(STEPS).code(), Some(7));
}
