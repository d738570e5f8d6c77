//! Managed memory on software devices that see none of the host's pages.
use kedge_tests::gpu_steps::{BETWEEN, GpuSteps, STEPS};
use kedge_tests::job::{Job, User};
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::{stderr, wait_for};
use kedge_tests::{Program, Target, Toolchain, root, run, run_interrupted};
use std::fs;
use std::path::Path;

const PROGRAMS: [&str; 8] = [
    "managed",
    "managed_attach",
    "managed_pages",
    "managed_pools",
    "managed_small",
    "managed_views",
    "zero_copy",
    "graph_nodes",
];

/// Has no managed memory there, and is over before a checkpoint can meet it.
const SHORT: &str = "managed_pools";

fn each(names: &[&str], run: impl Fn(&Path, &Program) -> kedge_tests::Outcome) {
    let toolchain = Toolchain::find(&root().join("target/programs")).expect("nvcc");
    for name in names {
        let source = root().join(format!("tests/programs/{name}.cu"));
        let program = Program::load(&source).expect("a program of the conformance tests");
        let binary = toolchain.compile(&program).expect("it compiles");
        let outcome = run(&binary, &program);
        assert_eq!(outcome.failure, None, "{name}: {}{}", outcome.stdout, outcome.stderr);
    }
}

#[test]
fn programs_find_one_memory_where_there_are_two() {
    let target = Target::Kedge("soft:apart".to_owned());
    each(&PROGRAMS, |binary, program| run(binary, program, &target));
}

/// More than a process can have mappings.
#[test]
fn programs_have_many_small_allocations() {
    let target = Target::Kedge("soft:apart".to_owned());
    each(&["managed_small"], |binary, program| {
        let (args, seconds) = (vec!["100000".to_owned()], 300);
        run(binary, &Program { args, seconds, ..program.clone() }, &target)
    });
}

#[test]
fn so_they_do_when_they_are_checkpointed_and_restarted() {
    let target = Target::Kedge("soft:apart".to_owned());
    let names: Vec<&str> = PROGRAMS.into_iter().filter(|name| *name != SHORT).collect();
    each(&names, |binary, program| run_interrupted(binary, program, &target));
}

/// Devices of another machine see none of the host's pages, whatever they are.
#[test]
fn so_they_do_on_a_server_over_a_line_that_is_cut() {
    let server = Served::start(&["--gpu", "soft:2"]);
    let relay = Relay::start(&server.address, 200_000);
    let target = Target::Far(relay.address.clone());
    each(&PROGRAMS, |binary, program| run(binary, program, &target));
    assert!(relay.cuts() > 0);
}

#[test]
fn so_they_do_when_they_are_checkpointed_and_restarted_on_a_server() {
    let server = Served::start(&["--gpu", "soft:2"]);
    let target = Target::Far(server.address.clone());
    let names: Vec<&str> = PROGRAMS.into_iter().filter(|name| *name != SHORT).collect();
    each(&names, |binary, program| run_interrupted(binary, program, &target));
}

/// A job whose memory is the host's and the devices' in turn.
fn place(name: &str, user: User) -> Option<GpuSteps> {
    GpuSteps::of("gpu_managed", name, user)
}

fn start(place: &GpuSteps, options: &[&str]) -> Job {
    let (program, steps) = (place.program.display().to_string(), STEPS.to_string());
    let run = ["run", "--gpu", "soft:apart", "--soft-memory", "128M", "--job", "j"];
    let job = ["--", &program, &steps, BETWEEN];
    Job::start_recovering(place.kedge(&[&run[..], options, &job].concat()))
}

/// Killed and brought back some times, each from the image of the time before.
fn goes_on(place: &GpuSteps, options: &[&str], restart: &[&str]) {
    let rounds = (0..4).map(|round| [20 + round, 5]);
    place.comes_back_each_time(start(place, options), rounds, restart, STEPS);
}

#[test]
fn a_restart_brings_back_which_copy_is_current() {
    let place = place("maagain", User::Same).expect("the test's own user");
    goes_on(&place, &[], &[]);
}

#[test]
fn so_does_one_by_what_has_changed_of_an_ordinary_user() {
    let Some(place) = place("mauser", User::Nobody) else { return };
    goes_on(&place, &["--incremental"], &[]);
}

#[test]
fn devices_that_see_the_host_s_pages_take_it_over() {
    let place = place("masoft", User::Same).expect("the test's own user");
    goes_on(&place, &[], &["--gpu", "soft"]);
}

/// From devices of this machine that are apart to those of servers, which all are, and back.
#[test]
fn so_do_servers_and_they_give_it_back() {
    let (first, second) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft"]));
    let place = place("mafar", User::Same).expect("the test's own user");
    let mut job = start(&place, &[]);
    let nonce = job.nonce.clone();
    for gpu in [&first.address, &second.address, "soft", &second.address, "soft"] {
        job.read_to(job.step + 10);
        let image = place.checkpoint(&[]);
        job.read_to(job.step + 5);
        job.kill();
        job = Job::spawn_recovering(place.to_restart(&image, &["--gpu", gpu]), &nonce);
        job.read_to(1);
    }
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
}

#[test]
fn a_server_s_devices_have_it_in_their_memory() {
    for (asked, pages) in [(None, unprivileged_faults() || may_trace()), (Some("shared"), false)] {
        let server = Served::start(&["--gpu", "soft"]);
        let place = place("mathere", User::Same).expect("the test's own user");
        let program = place.program.display().to_string();
        let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "20", BETWEEN];
        let mut command = place.kedge(&run);
        command.envs(asked.map(|how| ("KEDGE_MANAGED", how)));
        let mut job = Job::start_recovering(command);
        job.read_to(2);
        assert_eq!(by_pages(&place, &job), pages, "{asked:?}");
        job.read_to(20);
        assert_eq!(job.end().code(), Some(7), "{}", place.log());
    }
}

/// A thread that waits for a page inside a system call stops for nobody before it has it, and
/// devices that rest bring none.
#[test]
fn checkpoints_let_on_who_waits_for_a_page_in_a_system_call() {
    if !unprivileged_faults() && !may_trace() {
        return kedge_left_out::left_out("faults in system calls", "nobody may serve them here");
    }
    // Processes are stopped once more where what they change is to be known.
    for options in [&[][..], &["--incremental"]] {
        let place = GpuSteps::of("gpu_calls", "macalls", User::Same).expect("the test's own user");
        let program = place.program.display().to_string();
        let run = ["run", "--gpu", "soft:apart", "--soft-memory", "128M", "--job", "j"];
        let job = ["--", &program, "1000000", "0"];
        let mut job = Job::start_recovering(place.kedge(&[&run[..], options, &job].concat()));
        let nonce = job.nonce.clone();
        let mut image = None;
        for _ in 0..8 {
            job.read_to(job.step + 3);
            image = Some(place.checkpoint(&[]));
        }
        job.kill();
        let mut job = Job::spawn_recovering(place.to_restart(&image.expect("eight"), &[]), &nonce);
        job.read_to(1);
        job.read_to(job.step + 20);
        job.kill();
    }
}

#[test]
fn jobs_go_back_to_what_is_held() {
    let place = place("mahold", User::Same).expect("the test's own user");
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

/// Has clients be told of software devices what they are told of GPUs, which leave it to them how
/// managed memory is kept.
const LIKE_GPU: &str = "KEDGE_SOFT_LIKE_GPU";

/// Whether a job keeps managed memory by pages.
fn by_pages(place: &GpuSteps, job: &Job) -> bool {
    let pages = |pid: &u32| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a job's process");
        maps.contains("kedge-managed")
    };
    place.clients(job).iter().any(pages)
}

/// How a job on such a device keeps its managed memory: by pages or not, and what its log says.
fn kept(name: &str, user: User, asked: Option<&str>) -> Option<(bool, usize)> {
    let place = GpuSteps::of("gpu_managed", name, user)?;
    let program = place.program.display().to_string();
    let run = ["run", "--gpu", "soft:apart", "--job", "j", "--", &program, "20", BETWEEN];
    let mut command = place.kedge(&run);
    command.env(LIKE_GPU, "1");
    command.envs(asked.map(|how| ("KEDGE_MANAGED", how)));
    let mut job = Job::start_recovering(command);
    job.read_to(2);
    let pages = by_pages(&place, &job);
    job.read_to(20);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    Some((pages, place.count("managed memory is the host's")))
}

#[test]
fn rights_decide_how_gpus_keep_it_and_so_does_who_asks() {
    let privileged = unprivileged_faults() || may_trace();
    let mine = |asked| kept("mamine", User::Same, asked).expect("the test's own user");
    assert_eq!(mine(None), (privileged, usize::from(!privileged)));
    assert_eq!(mine(Some("shared")), (false, 0));
    let all = unprivileged_faults();
    let Some(others) = kept("maother", User::Nobody, None) else { return };
    assert_eq!(others, (all, usize::from(!all)));
    assert_eq!(kept("maasks", User::Nobody, Some("pages")), Some((true, 0)));
}

/// Whether any user may be told of the kernel's own faults.
fn unprivileged_faults() -> bool {
    let told = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    told.is_ok_and(|told| told.trim() == "1")
}

/// Whether this process has CAP_SYS_PTRACE.
fn may_trace() -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let status = fs::read_to_string("/proc/self/status").expect("this process's own");
    let held = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("its rights");
    u64::from_str_radix(held.trim(), 16).expect("a number") & 1 << CAP_SYS_PTRACE != 0
}

#[test]
fn a_program_and_its_kernel_that_wait_for_each_other_are_told_of() {
    let place = GpuSteps::of("gpu_waits", "mawaits", User::Same).expect("the test's own user");
    let program = place.program.display().to_string();
    let run = |gpu| ["run", "--gpu", gpu, "--job", "j", "--", &program, "1"];
    // Both use it at once.
    let mut job = Job::start_recovering(place.kedge(&run("soft")));
    job.read_to(1);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    let mut job = Job::start_recovering(place.kedge(&run("soft:apart")));
    wait_for("a word of it in the log", || place.count("KEDGE_MANAGED=shared") == 1);
    job.kill();
}

/// Bytes of the image's files whose names begin so.
fn bytes_of(image: &Path, start: &str) -> u64 {
    let files = fs::read_dir(image).expect("an image").flatten();
    let mine = files.filter(|it| it.file_name().to_string_lossy().starts_with(start));
    mine.map(|it| it.metadata().map_or(0, |found| found.len())).sum()
}

/// What the device has comes out with its memory; of the host's pages, what it alone has.
#[test]
fn pages_are_saved_where_they_are() {
    let place = place("maonce", User::Same).expect("the test's own user");
    let mut job = start(&place, &[]);
    let mut found = Vec::new();
    // All of the file is saved in the few microseconds in which the program decides what to move.
    while found.len() < 4 {
        job.read_to(job.step + 10);
        let image = place.checkpoint(&[]);
        // 32 MiB of noise, of which the host has rewritten a few pages since the last launch.
        assert!(bytes_of(&image, "gpu-") > 30 << 20);
        let bytes = bytes_of(&image, "descriptors.data");
        if (4096..4 << 20).contains(&bytes) {
            return;
        }
        found.push(bytes);
    }
    panic!("of the host's pages, so many bytes were saved: {found:?}");
}

#[test]
fn a_quota_is_of_this_machine_s_gpus() {
    let place = place("maquota", User::Same).expect("the test's own user");
    let output = place.output(&["run", "--gpu", "soft", "--gpu-memory", "1G", "--", "/bin/true"]);
    assert!(!output.status.success() && stderr(&output).contains("--soft-memory"), "{output:?}");
}
