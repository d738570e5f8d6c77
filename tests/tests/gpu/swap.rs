//! A job's device memory goes off the devices and comes back: asked for, or because the job goes
//! on.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, children, send};
use kedge_tests::world::{failure, stderr};
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

/// Where the first device's memory lies in its proxy (`cuda-types::arena`).
const DEVICE_BASE: u64 = 0x3000_0000_0000;

/// The program's memory on the device, in KiB.
const USED_KIB: u64 = 256;
/// What may be left of it there, in KiB: pages that it has in part.
const LEFT_KIB: u64 = 64;

/// How much of the first device's memory is in the proxy's, KiB.
fn resident(job: &Job) -> u64 {
    let proxies = job.proxies();
    let [proxy] = proxies[..] else { panic!("{proxies:?}") };
    let text = fs::read_to_string(format!("/proc/{proxy}/smaps")).expect("a proxy");
    let begin = format!("{:x}-", DEVICE_BASE);
    let from = text.find(&begin).expect("the device's memory");
    let rss = text[from..].lines().find_map(|line| line.strip_prefix("Rss:")).expect("a number");
    rss.trim().trim_end_matches(" kB").parse().expect("KiB")
}

fn swap(place: &GpuSteps, way: &str) -> String {
    let output = place.output(&["swap", way, "j"]);
    assert!(output.status.success(), "{}; {}", stderr(&output), place.log());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The program's process.
fn program(job: &Job) -> Vec<u32> {
    let proxies = job.proxies();
    children(job.supervisor()).into_iter().filter(|pid| !proxies.contains(pid)).collect()
}

/// The program stands still, so that nothing asks for the memory.
fn idle(job: &Job) {
    send("STOP", &program(job));
    std::thread::sleep(Duration::from_millis(50));
}

fn out_and_in(place: &GpuSteps) {
    let mut job = place.start(&[]);
    job.read_to(10);
    idle(&job);
    let before = resident(&job);
    assert!(before >= USED_KIB, "{before} KiB");
    for _ in 0..3 {
        let said = swap(place, "out");
        assert!(said.contains("off the devices"), "{said}");
        assert!(resident(&job) <= LEFT_KIB, "{} KiB", resident(&job));
        swap(place, "in");
        assert!(resident(&job) >= USED_KIB);
    }
    let file = place.world.home().join("swapped").display().to_string();
    let said = place.output(&["swap", "out", "j", "--json", "--events", &file]);
    let report: Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert!(report["bytes"].as_u64() >= Some(USED_KIB << 10) && report["way"] == "out", "{report}");
    let event = fs::read_to_string(&file).expect("events");
    let event: Value = serde_json::from_str(&event).expect("one event");
    assert_eq!((&event["event"], &event["bytes"]), (&"swapped".into(), &report["bytes"]));
    let said = place.output(&["swap", "in", "j", "--json"]);
    let report: Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert_eq!((&report["bytes"], &report["way"]), (&Value::Null, &"in".into()));
    swap(place, "out");
    swap(place, "out");
    assert!(resident(&job) <= LEFT_KIB, "{} KiB", resident(&job));
    // It goes on by itself: each step depends on all memory, and the host checks it.
    send("CONT", &program(&job));
    job.read_to(job.step + 20);
    assert!(resident(&job) >= USED_KIB);
    assert!(place.log().contains("on the devices again"), "{}", place.log());
    // At work, it comes back as often as it is taken.
    for _ in 0..5 {
        swap(place, "out");
        job.read_to(job.step + 2);
    }
    job.read_to(STEPS);
    assert_eq!(job.back, [] as [u64; 0]);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
}

#[test]
fn memory_goes_off_the_devices_and_comes_back() {
    for (name, user) in [("swout", User::Same), ("swoutu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        out_and_in(&place);
    }
}

#[test]
fn a_job_whose_memory_is_away_can_be_checkpointed_and_killed() {
    let place = GpuSteps::mine("swckpt");
    let mut job = place.start(&["--recover", "--hold"]);
    job.read_to(10);
    idle(&job);
    swap(&place, "out");
    // Not stopped in the image: it would stay so.
    send("CONT", &program(&job));
    let image = place.checkpoint(&[]);
    job.read_to(job.step + 5);
    idle(&job);
    swap(&place, "out");
    job.kill_the_proxy();
    send("CONT", &program(&job));
    while job.back.is_empty() {
        job.read_to(job.step + 1);
    }
    let begin = Instant::now();
    swap(&place, "out");
    let nonce = job.nonce.clone();
    job.kill();
    assert!(begin.elapsed() < Duration::from_secs(20));
    place.nothing_runs();
    place.goes_on(&image, &nonce);
}

#[test]
fn what_cannot_be_swapped_out_is_named_and_goes_on() {
    let place = GpuSteps::mine("swfull");
    let mut job = place.start(&["--cache-host", "4K"]);
    job.read_to(10);
    let said = failure(&place.output(&["swap", "out", "j"]));
    assert!(said.contains("--cache-host"), "{said}");
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    let said = failure(&place.output(&["swap", "in", "j"]));
    assert!(said.contains("has ended"), "{said}");
}

/// Arrays and variables stay where they are; slabs and physical memory go, with the same addresses
/// in the program's pointers, textures and surfaces; and an image that is taken in between has all
/// of it.
#[test]
fn what_a_job_has_beside_its_memory_is_whole_after_it() {
    let place = GpuSteps::of("gpu_shapes", "swshape", User::Same).expect("the test's own user");
    let mut job = place.start(&["--recover=5", "--hold"]);
    job.read_to(10);
    for _ in 0..3 {
        idle(&job);
        swap(&place, "out");
        send("CONT", &program(&job));
        job.read_to(job.step + 5);
    }
    idle(&job);
    swap(&place, "out");
    send("CONT", &program(&job));
    let image = place.checkpoint(&[]);
    job.read_to(job.step + 5);
    place.goes_back(&mut job, Job::kill_the_proxy);
    swap(&place, "out");
    job.read_to(STEPS);
    let nonce = job.nonce.clone();
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
    place.goes_on(&image, &nonce);
}

/// Pages of files in memory that the proxy has mapped, KiB: those of `cuMemCreate` among them.
fn mapped(job: &Job) -> u64 {
    let proxies = job.proxies();
    let [proxy] = proxies[..] else { panic!("{proxies:?}") };
    let text = fs::read_to_string(format!("/proc/{proxy}/status")).expect("a proxy");
    let rss = text.lines().find_map(|line| line.strip_prefix("RssShmem:")).expect("a number");
    rss.trim().trim_end_matches(" kB").parse().expect("KiB")
}

/// What the program has made by cuMemCreate, which it has mapped at two addresses.
#[test]
fn physical_memory_of_the_program_s_own_goes_too() {
    const KIB: u64 = 8 << 10;
    let place = GpuSteps::of("gpu_mapped", "swmap", User::Same).expect("the test's own user");
    let mut job = place.start(&[]);
    job.read_to(10);
    idle(&job);
    for _ in 0..2 {
        assert!(mapped(&job) >= KIB, "{} KiB", mapped(&job));
        swap(&place, "out");
        assert!(mapped(&job) < KIB, "{} KiB", mapped(&job));
        send("CONT", &program(&job));
        job.read_to(job.step + 5);
        idle(&job);
    }
    send("CONT", &program(&job));
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
}
