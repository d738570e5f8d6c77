//! `kedge run --incremental` from outside: images that build on each other, as people and scripts
//! see them.
use kedge_tests::job::{AHEAD, Job, User, build, kedge_as};
use kedge_tests::world::{World, is_root, stderr};
use kedge_tests::{copy_program, host};
use serde_json::Value;
use std::path::PathBuf;

/// More than are done before a test reads on, twice.
const STEPS: u64 = 2 * AHEAD + 100;

struct Place {
    world: World,
    user: User,
}

impl Place {
    fn json(&self, arguments: &[&str]) -> Value {
        let output = kedge_as(&self.world, self.user, arguments).output().expect("kedge");
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn run(&self, options: &[&str]) -> Job {
        let program = build(&self.world, "steps", &[]).display().to_string();
        let run = [&["run", "--gpu", "none", "--job", "j"], options, &["--", &program]].concat();
        let steps = STEPS.to_string();
        Job::start(kedge_as(&self.world, self.user, &[&run[..], &[&steps, "2", "2", "8"]].concat()))
    }

    /// Checkpoints the job: the image, its name and that of the one that it builds on.
    fn checkpoint(&self, options: &[&str]) -> (PathBuf, String, Option<String>) {
        let report = self.json(&[&["checkpoint", "j", "--json"], options].concat());
        let image = PathBuf::from(report["image"].as_str().expect("a path"));
        let shown = self.json(&["inspect", "--json", image.to_str().expect("UTF-8")]);
        let name = image.file_name().expect("a name").to_string_lossy().into_owned();
        (image, name, shown["parent"].as_str().map(str::to_owned))
    }

    fn names(&self) -> Vec<String> {
        let rows = self.json(&["images", "--json"]);
        let path = |row: &Value| PathBuf::from(row["image"].as_str().expect("a path"));
        let name = |row: &Value| path(row).file_name().map(|name| name.to_string_lossy().into());
        let mut names: Vec<String> =
            rows.as_array().expect("a list").iter().filter_map(name).collect();
        names.sort();
        names
    }
}

fn chains(place: &Place) {
    let mut job = place.run(&["--incremental", "--full-every", "3", "--keep", "2"]);
    let mut parents = Vec::new();
    let mut last = PathBuf::new();
    for _ in 0..5 {
        job.read_to(job.step + 4);
        let (image, name, parent) = place.checkpoint(&[]);
        (parents, last) = ([parents, vec![(name, parent)]].concat(), image);
    }
    let builds = |name: &str, parent: Option<&str>| (name.to_owned(), parent.map(str::to_owned));
    let expected = [
        builds("j-0001", None),
        builds("j-0002", Some("j-0001")),
        builds("j-0003", Some("j-0002")),
        builds("j-0004", None),
        builds("j-0005", Some("j-0004")),
    ];
    assert_eq!(parents, expected);
    assert_eq!(place.names(), ["j-0004", "j-0005"], "those that nobody builds on go");
    let shown = place.json(&["inspect", "--json", last.to_str().expect("UTF-8")]);
    let files = shown["files"].as_array().expect("a list");
    assert!(files.iter().any(|file| file["parent"].as_u64() > Some(8 << 20)), "{shown}");
    assert!(shown["bytes"].as_u64() < Some(4 << 20), "{shown}");
    let removed = kedge_as(&place.world, place.user, &["rm", "j-0004"]).output().expect("kedge");
    assert!(!removed.status.success() && stderr(&removed).contains("j-0005"), "{removed:?}");
    // One that builds on none, in between.
    assert_eq!(place.checkpoint(&["--full"]).2, None);
    let (image, name, parent) = place.checkpoint(&[]);
    assert_eq!((name.as_str(), parent.as_deref()), ("j-0007", Some("j-0006")));
    job.read_to(job.step + 3);
    let nonce = job.nonce.clone();
    job.kill();
    let before = job.step;
    drop(job);

    let image = image.display().to_string();
    let mut job = Job::restart(kedge_as(&place.world, place.user, &["restart", &image]), &nonce);
    assert!(job.step <= before + 1, "{} after {before}", job.step);
    job.read_to(before + 10);
    // What the first start was told holds for the restarted job too.
    assert_eq!(place.checkpoint(&[]).2, None);
    assert_eq!(place.checkpoint(&[]).2.as_deref(), Some("j-0008"));
    assert_eq!(place.names(), ["j-0008", "j-0009"]);
    assert_eq!(job.finish(STEPS).code(), Some(7));
    let verified = kedge_as(&place.world, place.user, &["verify", "j-0009"]).output();
    assert!(verified.expect("kedge").status.success());
}

#[test]
fn images_build_on_each_other_and_a_restart_reads_them_all() {
    chains(&Place { world: World::new("incr"), user: User::Same });
}

#[test]
fn those_of_an_ordinary_user_do_too() {
    if is_root() {
        let place = Place { world: World::new("incru"), user: User::Nobody };
        place.world.give_home_away();
        chains(&place);
    }
}

#[test]
fn a_job_that_was_started_without_can_be_asked_for_it() {
    let place = Place { world: World::new("incrask"), user: User::Same };
    let mut job = place.run(&[]);
    assert_eq!(place.checkpoint(&["--incremental"]).2, None, "there is none to build on");
    job.read_to(job.step + 2);
    assert_eq!(place.checkpoint(&[]).2, None);
    assert_eq!(place.checkpoint(&["--incremental"]).2.as_deref(), Some("j-0001"));
    job.kill();
}

/// Its memory is written while process and devices run; what it changed meanwhile is in the image
/// all the same.
#[test]
fn a_job_with_devices_is_written_while_it_runs() {
    let place = Place { world: World::new("incrgpu"), user: User::Same };
    let built = host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"]);
    let program = place.world.home().join("gpu_steps");
    copy_program(&built, &program);
    let program = program.display().to_string();
    let run = ["run", "--gpu", "soft", "--job", "j", "--", &program, "500", "2", "160"];
    let mut job = Job::start(kedge_as(&place.world, place.user, &run));
    let nonce = job.nonce.clone();
    job.read_to(3);
    let (image, ..) = place.checkpoint(&["--codec", "raw"]);
    let files = std::fs::read_dir(&image).expect("the image").flatten();
    let names: Vec<String> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
    assert!(names.iter().any(|name| name.ends_with("-ahead.kimg")), "{names:?}");
    assert!(names.iter().any(|name| name.starts_with("gpu-")), "{names:?}");
    job.read_to(job.step + 2);
    job.kill();
    let image = image.display().to_string();
    let job = Job::restart(kedge_as(&place.world, place.user, &["restart", &image]), &nonce);
    assert_eq!(job.finish(500).code(), Some(7));
}
