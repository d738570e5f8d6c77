//! More managed memory than devices have: it goes to the host and comes back, block by block.
use kedge_tests::gpu_steps::{BETWEEN, GpuSteps};
use kedge_tests::job::{Job, User};
use kedge_tests::server::Served;

const STEPS: u64 = 120;
/// Three times what the device has.
const RUN: [&str; 7] = ["run", "--gpu", "soft:apart", "--soft-memory", "64M", "--job", "j"];

fn place(name: &str, user: User) -> Option<GpuSteps> {
    GpuSteps::of("gpu_paging", name, user)
}

fn start(place: &GpuSteps, options: &[&str]) -> Job {
    let (program, steps) = (place.program.display().to_string(), STEPS.to_string());
    let job = ["--", &program, &steps, BETWEEN, "64"];
    Job::start_recovering(place.kedge(&[&RUN[..], options, &job].concat()))
}

/// Killed and brought back some times, each from the image of the time before.
fn goes_on(place: &GpuSteps, options: &[&str], restart: &[&str]) {
    let rounds = (0..3).map(|round| [9 + round, 3]);
    place.comes_back_each_time(start(place, options), rounds, restart, STEPS);
}

#[test]
fn programs_use_more_than_the_device_has() {
    let place = place("paall", User::Same).expect("the test's own user");
    let mut job = start(&place, &[]);
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    assert_eq!(place.count("managed memory"), 0, "{}", place.log());
}

/// What a server's devices have no room for is a mirror of the program's: it is right, and slow.
#[test]
fn so_they_do_on_a_server() {
    let server = Served::start(&["--gpu", "soft", "--soft-memory", "16M"]);
    let place = place("pafar", User::Same).expect("the test's own user");
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "12", "0", "16"];
    let mut job = Job::start_recovering(place.kedge(&run));
    job.read_to(12);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
}

#[test]
fn a_restart_finds_each_block_where_it_was() {
    let place = place("paagain", User::Same).expect("the test's own user");
    goes_on(&place, &[], &[]);
}

#[test]
fn so_does_one_by_what_has_changed_of_an_ordinary_user() {
    let Some(place) = place("pauser", User::Nobody) else { return };
    goes_on(&place, &["--incremental"], &[]);
}

#[test]
fn devices_that_see_the_host_s_pages_take_it_over() {
    let place = place("pasoft", User::Same).expect("the test's own user");
    goes_on(&place, &[], &["--gpu", "soft"]);
}

/// A program that says itself whether all is right, on a device of 64 MiB.
fn checks_itself(name: &str) {
    let place = GpuSteps::of(name, name, User::Same).expect("the test's own user");
    let program = place.program.display().to_string();
    let output = place.output(&[&RUN[..], &["--", &program, "64"]].concat());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.starts_with("ok "), "{output:?} {}", place.log());
}

#[test]
fn what_moves_by_a_context_that_fails_is_not_lost() {
    checks_itself("gpu_failed_context");
}

#[test]
fn other_memory_is_there_beside_threads_that_launch_without_rest() {
    checks_itself("gpu_crowded");
}
