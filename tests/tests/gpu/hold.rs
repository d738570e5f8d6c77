//! What a job's newest image has of its devices is held in memory: the job goes back from there
//! when client and proxy are gone, and from the image's files when that is gone too.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, family, send};
use kedge_tests::random;
use kedge_tests::world::{stderr, wait_for};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FROM_MEMORY: &str = "by what was held in memory";
const FROM_FILES: &str = "by its image";

fn kill_all(place: &GpuSteps, job: &Job) {
    place.kill_proxies_and_clients(job, &BTreeSet::new());
}

/// Makes the files useless in which the image has what devices held.
fn spoil(image: &Path) {
    for entry in fs::read_dir(image).expect("the image").flatten() {
        if entry.file_name().to_string_lossy().starts_with("gpu-") {
            fs::write(entry.path(), "nothing").expect("written");
        }
    }
}

/// The state that `kedge images` shows.
fn state(place: &GpuSteps, image: &Path) -> String {
    let output = place.output(&["images"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let row = text.lines().find(|line| line.starts_with(&name)).unwrap_or_default();
    row.split_whitespace().nth(1).unwrap_or_default().to_owned()
}

/// Who has a descriptor of anything that is held, and which.
fn holders(pids: &[u32]) -> Vec<(u32, PathBuf)> {
    let open = |pid: &u32| {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let held = entries.map(|entry| entry.path()).filter(|path| {
            fs::read_link(path).is_ok_and(|link| link.starts_with("/memfd:kedge-held (deleted)"))
        });
        held.map(|path| (*pid, path)).collect::<Vec<_>>()
    };
    pids.iter().flat_map(open).collect()
}

fn only_the_supervisor_holds(place: &GpuSteps, job: &Job) -> Vec<(u32, PathBuf)> {
    let supervisor = job.supervisor();
    let found = holders(&family(supervisor));
    assert!(!found.is_empty(), "{}", place.log());
    assert!(found.iter().all(|(pid, _)| *pid == supervisor), "{found:?}, not {supervisor}");
    found
}

fn come_back_from_memory(place: &GpuSteps) {
    let mut job = place.start(&["--recover=5", "--hold"]);
    job.read_to(20);
    let image = place.checkpoint(&[]);
    assert_eq!(state(place, &image), "held", "{}", place.log());
    // No file of the devices is read.
    spoil(&image);
    place.goes_back(&mut job, |job| kill_all(place, job));
    assert_eq!(place.count(FROM_MEMORY), 1, "{}", place.log());
    assert!(job.back[0] > 20, "{:?}", job.back);
    only_the_supervisor_holds(place, &job);
    assert_eq!(state(place, &image), "held");
    // Once more from there, in the job that has gone back; the proxy alone this time.
    place.goes_back(&mut job, Job::kill_the_proxy);
    assert_eq!(place.count(FROM_MEMORY), 2, "{}", place.log());
    assert_eq!(job.back[0], job.back[1]);
    // And what that one saves is held in its turn.
    job.read_to(job.step + 20);
    let newer = place.checkpoint(&[]);
    assert_eq!((&*state(place, &newer), &*state(place, &image)), ("held", "finished"));
    spoil(&newer);
    place.goes_back(&mut job, |job| kill_all(place, job));
    assert_eq!(place.count(FROM_MEMORY), 3, "{}", place.log());
    assert!(job.back[2] > job.back[1]);
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    assert_eq!(place.count(FROM_FILES), 0);
    place.nothing_runs();
}

#[test]
fn a_job_comes_back_from_memory_when_client_and_proxy_are_killed() {
    for (name, user) in [("hdback", User::Same), ("hdbacku", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        come_back_from_memory(&place);
    }
}

#[test]
fn when_its_time_is_over_the_files_are_what_it_comes_back_from() {
    let place = GpuSteps::mine("hdttl");
    let mut job = place.start(&["--recover", "--hold=1s"]);
    job.read_to(20);
    let image = place.checkpoint(&[]);
    wait_for("it is held for ever", || place.log().contains("its time is over"));
    assert_eq!(state(&place, &image), "finished");
    assert_eq!(holders(&family(job.supervisor())), []);
    place.goes_back(&mut job, |job| kill_all(&place, job));
    assert_eq!((place.count(FROM_MEMORY), place.count(FROM_FILES)), (0, 1), "{}", place.log());
}

#[test]
fn what_is_held_is_let_go_of_when_asked_or_when_an_image_is_not_held() {
    let place = GpuSteps::mine("hdask");
    let mut job = place.start(&["--recover"]);
    job.read_to(10);
    let checkpoint = |more: &[&str]| {
        let output = place.output(&[&["checkpoint", "j"], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
    };
    for how in ["asked", "newer"] {
        let image = checkpoint(&["--hold=5m"]);
        assert_eq!(state(&place, &image), "held", "{}", place.log());
        let rows = String::from_utf8_lossy(&place.output(&["ps", "--json"]).stdout).into_owned();
        assert!(rows.contains("\"on_devices\""), "{rows}");
        if how == "asked" {
            let asked = place.output(&["images", "--release", "j"]);
            assert!(String::from_utf8_lossy(&asked.stdout).contains("on devices"), "{asked:?}");
        } else {
            checkpoint(&[]);
        }
        assert_eq!(state(&place, &image), "finished");
        assert_eq!(holders(&family(job.supervisor())), []);
    }
    let nothing = place.output(&["images", "--release", "j"]);
    assert!(stderr(&nothing).contains("holds nothing"), "{nothing:?}");
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7));
}

#[test]
fn what_may_not_be_held_is_left_out_and_named() {
    let place = GpuSteps::mine("hdfull");
    let mut job = place.start(&["--recover", "--hold", "--cache-host", "4K", "--cache-gpu", "4K"]);
    job.read_to(20);
    let image = place.checkpoint(&[]);
    assert!(place.log().contains("raise --cache-host"), "{}", place.log());
    assert_eq!(state(&place, &image), "finished");
    place.goes_back(&mut job, |job| kill_all(&place, job));
    assert_eq!((place.count(FROM_MEMORY), place.count(FROM_FILES)), (0, 1), "{}", place.log());
}

#[test]
fn damaged_memory_is_found_out_and_the_files_are_used() {
    let place = GpuSteps::mine("hdbad");
    let mut job = place.start(&["--recover", "--hold"]);
    job.read_to(20);
    place.checkpoint(&[]);
    for (_, path) in only_the_supervisor_holds(&place, &job) {
        let file = File::options().read(true).write(true).open(path).expect("it is ours");
        let end = file.metadata().expect("it").len();
        file.write_all_at(&[0x5a; 16], end - 16).expect("written");
    }
    place.goes_back(&mut job, |job| kill_all(&place, job));
    assert!(place.log().contains("does not come back from memory"), "{}", place.log());
    assert_eq!((place.count(FROM_MEMORY), place.count(FROM_FILES)), (0, 1), "{}", place.log());
    assert_eq!(holders(&family(job.supervisor())), []);
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7));
}

#[test]
fn a_killed_supervisor_holds_nothing() {
    let place = GpuSteps::mine("hdsup");
    let mut job = place.start(&["--recover", "--hold"]);
    job.read_to(20);
    let image = place.checkpoint(&[]);
    only_the_supervisor_holds(&place, &job);
    let supervisor = job.supervisor();
    let all = family(supervisor);
    send("KILL", &[supervisor]);
    wait_for("it lives", || holders(&[supervisor]).is_empty());
    assert_eq!(holders(&all), [], "nobody else has it");
    assert_eq!(state(&place, &image), "finished");
    send("KILL", &all);
    job.drain();
    place.nothing_runs();
}

/// What is captured but not durable yet is nobody's: the job goes back to the image before, from
/// memory, or to this one if it has become durable first.
#[test]
fn an_image_that_is_not_durable_yet_does_not_count() {
    let place = GpuSteps::mine("hdearly");
    let mut job = place.start(&["--recover=20", "--hold"]);
    job.read_to(20);
    let first = place.checkpoint(&[]);
    for time in 1..=4 {
        job.read_to(job.step + 10);
        let output = place.output(&["checkpoint", "j", "--wait", "captured"]);
        assert!(output.status.success(), "{}", stderr(&output));
        kill_all(&place, &job);
        // An image that has become durable all the same may be of the last step of all.
        while place.count(FROM_MEMORY) < time {
            job.read_to(job.step + 1);
            assert!(job.step < STEPS - 50, "it does not go back; {}", place.log());
        }
        job.read_to(job.step + 20);
        assert!(job.back.len() <= time && job.back.iter().all(|back| *back > 20), "{:?}", job.back);
        only_the_supervisor_holds(&place, &job);
        place.is_good(&first);
    }
    place.ends_well(job);
}

/// A software device's snapshot has all, also where the image's file has only what has changed:
/// none of the files is read.
#[test]
fn an_image_that_builds_on_another_comes_back_from_memory() {
    let place = GpuSteps::of("gpu_blocks", "hdchain", User::Same).expect("the test's own user");
    let mut job = place.start(&["--recover=5", "--hold", "--incremental"]);
    job.read_to(10);
    for time in 1..=3 {
        let before = place.checkpoint(&[]);
        job.read_to(job.step + 5);
        let image = place.checkpoint(&[]);
        assert_eq!((&*state(&place, &image), &*state(&place, &before)), ("held", "finished"));
        let shown = place.output(&["inspect", &image.display().to_string()]);
        let name = before.file_name().unwrap_or_default().to_string_lossy();
        assert!(String::from_utf8_lossy(&shown.stdout).contains(&*name), "{shown:?}");
        [&before, &image].into_iter().for_each(|image| spoil(image));
        place.goes_back(&mut job, |job| kill_all(&place, job));
        assert_eq!(place.count(FROM_MEMORY), time, "{}", place.log());
    }
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    assert_eq!(place.count(FROM_FILES), 0);
}

/// With arrays, textures, a variable, managed and physical memory.
#[test]
fn all_kinds_of_memory_come_back_from_memory() {
    let place = GpuSteps::of("gpu_shapes", "hdshape", User::Same).expect("the test's own user");
    let mut job = place.start(&["--recover=5", "--hold"]);
    job.read_to(20);
    spoil(&place.checkpoint(&[]));
    for time in 1..=2 {
        place.goes_back(&mut job, |job| kill_all(&place, job));
        assert_eq!(place.count(FROM_MEMORY), time, "{}", place.log());
    }
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
}

#[test]
fn a_proxy_killed_while_it_hands_over_leaves_what_was_held_or_its_files() {
    let place = GpuSteps::mine("hdphase");
    let mut job = place.start(&["--recover=20", "--hold"]);
    job.read_to(5);
    place.checkpoint(&[]);
    for _ in 0..6 {
        let mut asked = place.kedge(&["checkpoint", "j"]).spawn().expect("kedge");
        std::thread::sleep(Duration::from_millis(u64::from(random::number(90))));
        place.goes_back_from_here(&mut job, Job::kill_the_proxy);
        asked.wait().expect("kedge checkpoint ends");
        only_the_supervisor_holds(&place, &job);
    }
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    assert!(place.count(FROM_MEMORY) >= 6, "{}", place.log());
    place.nothing_runs();
}
