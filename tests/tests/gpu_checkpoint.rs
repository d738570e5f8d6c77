//! Jobs that use devices are checkpointed, killed and restarted. The programs draw a nonce at their start and
//! compare every step with what the host computes.
#![forbid(unsafe_code)]

use kedge_tests::host;
use kedge_tests::job::{Job, User, kedge_as};
use kedge_tests::world::{World, is_root, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const STEPS: u64 = 150;

struct Place {
    world: World,
    user: User,
}

impl Place {
    fn new(name: &str, user: User) -> Option<Place> {
        let world = World::new(name);
        if user == User::Nobody {
            if !is_root() {
                println!("skipped: not root, so every other test is this one");
                return None;
            }
            world.give_home_away();
        }
        Some(Place { world, user })
    }

    /// Runs a program of `tests/hosts` as the job `j`.
    fn run(&self, program: &str, options: &[&str], milliseconds: u64) -> Job {
        let built = host(&format!("{program}.cu"), program, &["-O1", "-arch=sm_80"]);
        // Where every user may read it.
        let copy = self.world.home().join(program);
        std::fs::copy(&built, &copy).expect("a copy of the program");
        let copy = copy.display().to_string();
        let (steps, between) = (STEPS.to_string(), milliseconds.to_string());
        let run = [&["run", "--gpu", "soft", "--job", "j"], options, &["--", &copy]].concat();
        Job::start(kedge_as(&self.world, self.user, &[&run[..], &[&steps, &between]].concat()))
    }

    fn checkpoint(&self, options: &[&str]) -> PathBuf {
        let arguments = [&["checkpoint", "j", "--json"], options].concat();
        let output = kedge_as(&self.world, self.user, &arguments).output().expect("kedge");
        assert!(output.status.success(), "{}", stderr(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        PathBuf::from(report["image"].as_str().expect("a path"))
    }

    fn restart(&self, image: &Path, options: &[&str], nonce: &str) -> Job {
        let image = image.display().to_string();
        let arguments = [&["restart", &image], options].concat();
        Job::restart(kedge_as(&self.world, self.user, &arguments), nonce)
    }
}

/// Captured while it runs, killed, and goes on from the image to its end; twice.
fn survives(place: &Place, mut job: Job, options: &[&str]) {
    let nonce = job.nonce.clone();
    job.read_to(STEPS / 5);
    for until in [STEPS / 2, STEPS] {
        let before = job.step;
        let image = place.checkpoint(&[]);
        job.read_to(job.step + 5);
        job.kill();
        let printed = job.step;
        job = place.restart(&image, options, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        if until < STEPS {
            job.read_to(until);
        }
    }
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn a_program_goes_on_with_its_device() {
    for (name, user) in [("gck", User::Same), ("gcku", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let job = place.run("gpu_steps", &[], 10);
        survives(&place, job, &[]);
    }
}

#[test]
fn a_restarted_job_may_have_another_name() {
    let place = Place::new("gckname", User::Same).expect("the test's own user");
    let job = place.run("gpu_steps", &[], 10);
    let nonce = job.nonce.clone();
    let image = place.checkpoint(&["--stop"]);
    drop(job);
    let job = place.restart(&image, &["--job", "other"], &nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

/// One is inside of a sum that the other has not reached yet, nearly always.
#[test]
fn two_processes_inside_of_a_sum_come_to_rest() {
    let place = Place::new("gcksum", User::Same).expect("the test's own user");
    let job = place.run("gpu_allreduce", &[], 3);
    survives(&place, job, &[]);
}

/// What the program has been told of its devices stays true, or it is refused.
#[test]
fn other_devices_are_refused_by_name() {
    let place = Place::new("gckother", User::Same).expect("the test's own user");
    let job = place.run("gpu_steps", &[], 10);
    let image = place.checkpoint(&["--stop"]).display().to_string();
    drop(job);
    let arguments = ["restart", &image, "--gpu", "soft:2"];
    let output = kedge_as(&place.world, place.user, &arguments).output().expect("kedge");
    assert_eq!(output.status.code(), Some(125));
    let said = stderr(&output);
    assert!(said.contains("it has seen 1, here are 2") && said.contains("--gpu"), "{said}");
}

/// A software device runs on however many cores are there.
#[test]
fn a_machine_with_fewer_cores_will_do() {
    let place = Place::new("gckcores", User::Same).expect("the test's own user");
    let job = place.run("gpu_steps", &[], 10);
    let nonce = job.nonce.clone();
    let image = place.checkpoint(&["--stop"]).display().to_string();
    drop(job);
    let kedge = kedge_as(&place.world, place.user, &["restart", &image]);
    let mut narrow = Command::new("taskset");
    narrow.args(["--cpu-list", "0"]).arg(kedge.get_program()).args(kedge.get_args());
    narrow.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
    narrow.current_dir(place.world.home()).stdin(Stdio::null()).stdout(Stdio::piped());
    narrow.stderr(Stdio::piped());
    assert_eq!(Job::restart(narrow, &nonce).finish(STEPS).code(), Some(7));
}
