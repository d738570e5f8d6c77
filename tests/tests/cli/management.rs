//! NVIDIA's management library as jobs have it: answered from outside of the job, over checkpoints
//! and restarts.
use kedge_tests::host;
use kedge_tests::job::{User, kedge_as};
use kedge_tests::place::Place;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const STEPS: u64 = 120;

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Checkpointed twice, the second time at once after a restart, when nothing may have been asked
/// anew.
#[test]
fn what_is_told_is_the_same_after_restarts() {
    for (name, user, more) in [
        ("nvml", User::Same, &[][..]),
        ("nvmlc", User::Same, &["cuda"]),
        ("nvmlu", User::Nobody, &["cuda"]),
    ] {
        let Some(place) = Place::new(name, user) else { continue };
        let steps = STEPS.to_string();
        let arguments = [&[&*steps, "5"], more].concat();
        let mut job = place.with_device("gpu_management", &[], &arguments);
        let nonce = job.nonce.clone();
        for until in [STEPS / 4, STEPS / 2] {
            job.read_to(until);
            let image = place.checkpoint(&[]);
            job.kill();
            job = place.restart(&image, &nonce);
        }
        assert_eq!(job.finish(STEPS).code(), Some(7));
        assert!(!place.log().contains("NVML"), "{}", place.log());
    }
}

/// The name of a job's folder is another after such a restart.
#[test]
fn a_restarted_job_under_another_name_is_answered() {
    let place = Place::mine("nvmlname");
    let mut job = place.with_device("gpu_management", &[], &[&STEPS.to_string(), "5"]);
    let nonce = job.nonce.clone();
    job.read_to(STEPS / 4);
    let image = place.checkpoint(&["--stop"]);
    drop(job);
    let job = place.restart_with(&image, &["--job", "other"], &nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn all_devices_of_the_job_are_told_of() {
    let place = Place::mine("nvmlfacts");
    let built = host("gpu_management.cu", "gpu_management", &["-O1", "-arch=sm_80"]);
    let said =
        place.output(&["run", "--gpu", "soft:2", "--", &built.display().to_string(), "facts"]);
    let said = stdout(&said);
    let count = |text: &str| said.lines().filter(|line| line.contains(text)).count();
    assert_eq!(count("kedge software device"), 2, "{said}");
    assert_eq!(count(": found by its UUID"), 2, "{said}");
    assert_eq!(count(": found by its bus"), 2, "{said}");
    // The third is none.
    assert!(said.contains("\n2: 2\n"), "{said}");
}

/// Through kedge, a library that stands for NVIDIA's gives what it gives natively: each kind of
/// parameter.
#[test]
fn real_devices_are_told_of_as_natively() {
    let place = Place::mine("nvmlreal");
    let library = host("management.c", "libnvidia-ml.so.1", &["-shared", "-fPIC"]);
    let program = host("gpu_management.cu", "gpu_management", &["-O1", "-arch=sm_80"]);
    // Errors' words are kedge's own.
    let facts = |output: &Output| {
        assert!(output.status.success(), "{output:?}");
        stdout(output).lines().skip(32).map(str::to_owned).collect::<Vec<_>>()
    };
    let natively = Command::new(&program)
        .arg("facts")
        .env("LD_LIBRARY_PATH", library.parent().unwrap())
        .output()
        .unwrap();
    let run = ["run", "--gpu", "local", "--", &program.display().to_string(), "facts"];
    let mut kedge = kedge_as(&place.world, place.user, &run);
    // There is a driver, as far as anybody looks: the program does not.
    kedge.env("KEDGE_NVML", &library).env("KEDGE_DRIVER", &library);
    let under = facts(&kedge.output().unwrap());
    assert_eq!(under, facts(&natively));
    assert!(under.contains(&"0: 7 3: 0 1000 2000".to_owned()), "{under:?}");
}

/// NVIDIA's tool needs more of NVIDIA's library than NVML is: it finds that one, with its arguments
/// and its status.
#[test]
fn the_drivers_own_tool_has_the_drivers_own_library() {
    let place = Place::mine("nvmltool");
    let library = host("management.c", "libnvidia-ml.so.1", &["-shared", "-fPIC"]);
    let tool = host("library_of.c", "nvidia-smi", &["-ldl"]);
    let other = host("library_of.c", "other", &["-ldl"]);
    for (program, whose) in [(&tool, "another's"), (&other, "kedge's")] {
        let run = ["run", "--gpu", "soft", "--", &program.display().to_string(), "a b", ""];
        let mut kedge = kedge_as(&place.world, place.user, &run);
        kedge.env("LD_LIBRARY_PATH", library.parent().unwrap());
        let ended = kedge.output().unwrap();
        assert_eq!(stdout(&ended), format!("{whose} [a b] []\n"), "{ended:?}");
        assert_eq!(ended.status.code(), Some(5));
    }
}

/// Killed, it is gone: programs are told so, at once, and the job goes on and ends as it would.
#[test]
fn programs_are_told_when_nobody_answers() {
    let place = Place::mine("nvmlgone");
    let script = "import ctypes, os, time
nvml = ctypes.CDLL('libnvidia-ml.so.1')
count = ctypes.c_uint()
print(nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value, flush=True)
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: words = open(f'/proc/{pid}/cmdline').read().split('\\0')
    except OSError: continue
    if '--management' in words and os.environ['KEDGE_SOCKET'].rsplit('/', 1)[0] + '/log' in words: os.kill(int(pid), 9)
time.sleep(0.2)
print(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), nvml.nvmlShutdown(), nvml.nvmlInit_v2())
";
    let begin = Instant::now();
    let ended = place.output(&["run", "--gpu", "soft", "--", "python3", "-c", script]);
    assert_eq!(stdout(&ended), "0 0 1\n9 0 9\n", "{ended:?}");
    assert!(ended.status.success() && begin.elapsed() < Duration::from_secs(20));
}
