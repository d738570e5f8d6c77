//! Jobs whose clients were told of their devices what they are told of GPUs (KEDGE_SOFT_LIKE_GPU):
//! no allocation is told of, and variables lie outside of the arenas. A software device goes on
//! with such a client for good, as it does with one that was captured on a GPU.
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User};
use kedge_tests::world::stderr;

const LIKE_GPU: &str = "KEDGE_SOFT_LIKE_GPU";

/// The job as it begins on devices that are like GPUs.
fn start(place: &GpuSteps, options: &[&str]) -> Job {
    let mut command = place.to_run(options);
    command.env(LIKE_GPU, "1");
    Job::start_recovering(command)
}

/// Killed and brought back on ordinary software devices, twice: the second time from what those
/// have saved.
fn goes_on_elsewhere(place: &GpuSteps, options: &[&str]) {
    place.comes_back_each_time(start(place, options), [[20, 5]; 2], &[], STEPS);
}

#[test]
fn programs_go_on_with_what_they_know() {
    for program in ["gpu_steps", "gpu_shapes", "gpu_pair"] {
        let name = format!("po{}", &program[4..]);
        let place = GpuSteps::of(program, &name, User::Same).expect("the test's own user");
        goes_on_elsewhere(&place, &[]);
    }
}

#[test]
fn so_do_those_of_an_ordinary_user_by_what_has_changed() {
    let Some(place) = GpuSteps::of("gpu_blocks", "pouser", User::Nobody) else { return };
    goes_on_elsewhere(&place, &["--incremental"]);
}

#[test]
fn they_go_back_and_are_swapped_out() {
    let place = GpuSteps::of("gpu_shapes", "poback", User::Same).expect("the test's own user");
    let mut job = start(&place, &["--recover=5", "--hold"]);
    job.read_to(20);
    place.checkpoint(&[]);
    for _ in 0..2 {
        place.goes_back(&mut job, Job::kill_the_proxy);
        let output = place.output(&["swap", "out", "j"]);
        assert!(output.status.success(), "{}", stderr(&output));
        job.read_to(job.step + 5);
    }
    assert_eq!(place.count("by what was held in memory"), 2, "{}", place.log());
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
}
