//! Jobs that use devices are checkpointed, killed and restarted. The programs draw a nonce at their
//! start and compare every step with what the host computes.
use kedge_tests::job::{Job, User, kedge_as};
use kedge_tests::place::Place;
use kedge_tests::world::failure;
use std::process::{Command, Stdio};

const STEPS: u64 = 150;

fn run(place: &Place, program: &str, milliseconds: u64) -> Job {
    let (steps, between) = (STEPS.to_string(), milliseconds.to_string());
    place.with_device(program, &[], &[&steps, &between])
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
        job = place.restart_with(&image, options, &nonce);
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
        let job = run(&place, "gpu_steps", 10);
        survives(&place, job, &[]);
    }
}

#[test]
fn a_restarted_job_may_have_another_name() {
    let place = Place::mine("gckname");
    let job = run(&place, "gpu_steps", 10);
    let nonce = job.nonce.clone();
    let image = place.checkpoint(&["--stop"]);
    drop(job);
    let job = place.restart_with(&image, &["--job", "other"], &nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

/// One is inside of a sum that the other has not reached yet, nearly always.
#[test]
fn two_processes_inside_of_a_sum_come_to_rest() {
    let place = Place::mine("gcksum");
    let job = run(&place, "gpu_allreduce", 3);
    survives(&place, job, &[]);
}

/// What the program has been told of its devices stays true, or it is refused.
#[test]
fn other_devices_are_refused_by_name() {
    let place = Place::mine("gckother");
    let job = run(&place, "gpu_steps", 10);
    let image = place.checkpoint(&["--stop"]).display().to_string();
    drop(job);
    let said = failure(&place.output(&["restart", &image, "--gpu", "soft:2"]));
    assert!(said.contains("it has seen 1, here are 2") && said.contains("--gpu"), "{said}");
}

/// A software device runs on however many cores are there.
#[test]
fn a_machine_with_fewer_cores_will_do() {
    let place = Place::mine("gckcores");
    let job = run(&place, "gpu_steps", 10);
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
