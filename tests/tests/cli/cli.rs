//! The `kedge` command from outside, with its real driver and proxy: what it prints, how it ends,
//! what it leaves, and what it bears.
use kedge_left_out::{left_out, needs_root};
use kedge_tests::world::{World, failure, has_fields, is_root, jobs_in, stderr};
use kedge_tests::{host, kedge};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const COMMANDS: [&str; 21] = [
    "run",
    "balance",
    "check",
    "devices",
    "ps",
    "logs",
    "checkpoint",
    "restart",
    "images",
    "inspect",
    "verify",
    "rm",
    "kernel-cache",
    "keys",
    "doctor",
    "explain",
    "metrics",
    "config",
    "bench",
    "completions",
    "man",
];

/// The kernel that needs no compiler, run and checked.
fn probe() -> [String; 3] {
    [kedge().display().to_string(), "probe".into(), "kernel".into()]
}

#[test]
fn help_completions_and_manual_cover_every_command() {
    let world = World::new("help");
    let help = world.text(&["--help"]);
    let bash = world.text(&["completions", "bash"]);
    let manual = world.text(&["man"]);
    for word in ["125", "126", "127", "XDG_RUNTIME_DIR", "Examples"] {
        assert!(help.contains(word), "{word} is not in the help");
    }
    for command in COMMANDS {
        assert!(help.contains(command) && bash.contains(command), "{command}");
        // A manual page has its hyphens escaped.
        assert!(manual.contains(&command.replace('-', r"\-")), "{command}");
        assert!(world.text(&[command, "--help"]).contains("Usage: kedge"), "{command}");
        assert!(world.text(&["man", command]).starts_with(".ie"), "{command}: no page");
    }
    for text in [&help, &bash, &manual] {
        assert!(!text.contains("probe"), "what is hidden shows");
    }
    for shell in ["zsh", "fish"] {
        assert!(world.text(&["completions", shell]).contains("doctor"), "{shell}");
    }
    assert!(!help.contains('\x1b'), "colours in a pipe");
    assert_eq!(world.output(&["nonsense"]).status.code(), Some(2));
}

#[test]
fn devices_are_told_to_people_and_scripts() {
    let world = World::new("devices");
    let devices = world.json(&["devices", "--gpu", "soft:2", "--soft-memory", "512M", "--json"]);
    assert_eq!(devices.len(), 2);
    has_fields(
        &devices,
        &["index", "name", "uuid", "pci_bus_id", "compute_capability", "driver_version"],
    );
    assert_eq!(devices[1]["name"], "kedge software device");
    assert_eq!(devices[1]["total_memory"], 512 << 20);
    assert_eq!(devices[1]["attributes"]["WARP_SIZE"], 32);
    assert_eq!(world.text(&["devices", "--gpu", "soft"]).lines().count(), 2);
    assert!(world.text(&["devices"]).contains(" is the default here: "));
    assert_eq!(world.output(&["devices", "--gpu", "soft:99"]).status.code(), Some(2));
}

#[test]
fn a_missing_device_is_told_with_its_remedy() {
    let world = World::new("none");
    let no_driver = |arguments: &[&str]| {
        let mut command = world.kedge(arguments);
        let output = command.env("KEDGE_DRIVER", "/no/such/libcuda.so.1").output().expect("kedge");
        failure(&output)
    };
    for what in [&["devices", "--gpu", "local"][..], &["bench", "calls", "--gpu", "local"]] {
        let said = no_driver(what);
        assert!(
            said.contains("CUDA_ERROR_NO_DEVICE") && said.contains("no NVIDIA driver"),
            "{said}"
        );
        assert!(said.contains("--gpu soft") && said.lines().count() == 1, "{said}");
    }
    let hidden = |list: &str| {
        let mut command = world.kedge(&["devices", "--gpu", "soft:2"]);
        failure(&command.env("CUDA_VISIBLE_DEVICES", list).output().expect("kedge"))
    };
    assert!(hidden("2").contains("`2` is none of the job's devices"), "{}", hidden("2"));
    assert!(hidden("1,1").contains("CUDA_ERROR_INVALID_DEVICE"), "{}", hidden("1,1"));
}

#[test]
fn a_kernel_runs_and_statuses_pass_through() {
    let world = World::new("run");
    let [kedge, probe, kernel] = probe();
    let output = world.output(&["run", "--", &kedge, &probe, &kernel]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!((output.stdout.len(), stderr(&output)), (0, String::new()));
    let sh = |script: &str| world.output(&["run", "--job", "j", "--", "sh", "-c", script]).status;
    assert_eq!(sh("exit 7").code(), Some(7));
    assert_eq!(sh("kill -TERM $$").signal(), Some(15));
    assert_eq!(world.output(&["run", "/no/such/program"]).status.code(), Some(127));
    assert_eq!(world.output(&["run", "/etc/passwd"]).status.code(), Some(126));
    assert_eq!(world.processes(), [] as [String; 0]);
}

/// Without being told so, PyTorch's stores use io_uring, which no checkpoint keeps.
#[test]
fn programs_are_told_to_do_without_io_uring_unless_somebody_has_told_them() {
    let world = World::new("uring");
    let script = "echo $UV_USE_IO_URING $USE_LIBUV";
    let told = |set: &[(&str, &str)]| {
        let mut command = world.kedge(&["run", "--gpu", "none", "--", "sh", "-c", script]);
        command.env_remove("UV_USE_IO_URING").env_remove("USE_LIBUV");
        let output = command.envs(set.iter().copied()).output().expect("kedge");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert_eq!(told(&[]), "0 0");
    assert_eq!(told(&[("USE_LIBUV", "1")]), "0 1");
}

#[test]
fn a_mistyped_option_is_no_program() {
    let world = World::new("mistyped");
    for (arguments, meant) in [
        (&["run", "--gup", "soft", "--", "/bin/true"][..], "did you mean --gpu?"),
        (&["run", "--gpu", "none", "--intervall=5m", "/bin/true"], "did you mean --interval?"),
        (&["run", "--gpu", "none", "-x", "/bin/true"], "kedge run --help"),
        (&["check", "--racs", "/bin/true"], "did you mean --races?"),
        (&["check", "-x", "/bin/true"], "kedge check --help"),
    ] {
        let output = world.output(arguments);
        let said = stderr(&output);
        assert!(said.contains(meant) && said.lines().count() == 1, "{said}");
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
    let after = world.output(&["run", "--gpu", "none", "sh", "-c", "exit 3"]);
    assert_eq!(after.status.code(), Some(3), "a program's options are its own");
}

#[test]
fn a_missing_image_or_job_is_told_with_its_remedy() {
    let world = World::new("missing");
    for arguments in [
        &["restart", "nobody"][..],
        &["restart", "/no/such/image"],
        &["inspect", "nobody-0001"],
        &["verify", "/no/such/image"],
        &["rm", "nobody-0001"],
    ] {
        let said = failure(&world.output(arguments));
        assert!(said.contains("`kedge images`") && !said.contains("os error"), "{said}");
    }
    world.text(&["run", "--gpu", "none", "--job", "brief", "--", "true"]);
    let said = failure(&world.output(&["restart", "brief"]));
    assert!(said.contains("the job brief has no image: `kedge checkpoint brief`"), "{said}");
}

#[test]
fn a_job_s_name_restarts_its_newest_image() {
    let world = World::new("by-name");
    let go = world.0.join("go");
    let step = world.0.join("step");
    // After each step it ends with another code.
    let wait = |code: u32| {
        format!(
            "n={code}; until [ -e {go} ]; do [ -e {step} ] && n=$((n+10)) && rm {step}; sleep 0.02; \
             done; exit $n",
            go = go.display(),
            step = step.display()
        )
    };
    // Two jobs, and the other one's image is the newest of all; a file here has the first one's
    // name.
    for (job, code, images) in [("first", 41, 2), ("second", 42, 1)] {
        let script = wait(code);
        let mut running =
            world.kedge(&["run", "--gpu", "none", "--job", job, "--", "sh", "-c", &script]);
        let mut running = running.stdin(Stdio::null()).spawn().expect("kedge");
        let deadline = Instant::now() + Duration::from_secs(20);
        for image in 0..images {
            if image > 0 {
                std::fs::write(&step, "").expect("a file");
                while step.exists() {
                    assert!(Instant::now() < deadline, "{job} takes no step");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            while !world.output(&["checkpoint", job]).status.success() {
                assert!(Instant::now() < deadline, "{job} cannot be checkpointed");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        world.text(&["kill", job]);
        running.wait().expect("its end");
    }
    std::fs::write(&go, "").expect("a file");
    std::fs::write(world.0.join("first"), "no image").expect("a file");
    // A restart that fails takes the job's name from nobody.
    let images = world.text(&["images", "--json"]);
    let images: Value = serde_json::from_str(&images).expect("JSON");
    let folders: Vec<PathBuf> = images
        .as_array()
        .expect("images")
        .iter()
        .filter(|image| image["job"] == "first")
        .map(|image| image["image"].as_str().expect("a path").into())
        .collect();
    let job = |folder: &Path, end: &str| folder.join(format!("job.kimg{end}"));
    folders.iter().for_each(|at| std::fs::rename(job(at, ""), job(at, ".away")).expect("moved"));
    for _ in 0..2 {
        let said = failure(&world.output(&["restart", "first"]));
        assert!(said.contains("job.kimg"), "{said}");
    }
    folders.iter().for_each(|at| std::fs::rename(job(at, ".away"), job(at, "")).expect("moved"));
    for (job, code) in [("first", 51), ("second", 42), ("first-0001", 41), ("second-0001", 42)] {
        let mut kedge = world.kedge(&["restart", job]);
        let output = kedge.current_dir(&world.0).stdin(Stdio::null()).output().expect("kedge");
        assert_eq!(output.status.code(), Some(code), "{job}: {}", stderr(&output));
    }
    // What another user has put there is not this one's job.
    if !is_root() {
        return needs_root("images of another user", "only root can give some away");
    }
    let images = world.text(&["images", "--json"]);
    let images: Value = serde_json::from_str(&images).expect("JSON");
    let of_second = |image: &&Value| image["job"] == "second";
    for image in images.as_array().expect("images").iter().filter(of_second) {
        let folder = image["image"].as_str().expect("a path");
        std::os::unix::fs::chown(folder, Some(65534), None).expect("given away");
    }
    let output = world.output(&["restart", "second"]);
    assert!(failure(&output).contains("the job second has no image"), "{}", stderr(&output));
}

#[test]
fn stdin_and_stdout_are_the_program_s() {
    let world = World::new("stdio");
    let mut child = world
        .kedge(&["run", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("kedge");
    child.stdin.take().expect("a pipe").write_all(b"through\0and through").expect("written");
    assert_eq!(child.wait_with_output().expect("ended").stdout, b"through\0and through");
}

#[test]
fn jobs_are_listed_while_they_run_and_after() {
    let world = World::new("ps");
    let mut running = world
        .kedge(&["run", "--job", "runs", "--", "sh", "-c", "echo ready; cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("kedge");
    let mut line = String::new();
    BufReader::new(running.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    world.output(&["run", "--job", "ends", "--", "sh", "-c", "exit 3"]);
    world.output(&["run", "--job", "dies", "--", "sh", "-c", "kill -KILL $$"]);

    let now = world.json(&["ps", "--json"]);
    has_fields(&now, &["name", "state", "status", "signal", "pid", "gpu", "command", "log"]);
    assert_eq!(now.len(), 1);
    assert_eq!((&now[0]["name"], &now[0]["state"]), (&"runs".into(), &"running".into()));
    assert!(world.text(&["ps"]).contains("runs"));

    let all = world.json(&["ps", "--all", "--json"]);
    let find = |name| all.iter().find(|job| job["name"] == name).expect("a job");
    assert_eq!((&find("ends")["state"], &find("ends")["status"]), (&"exited".into(), &3.into()));
    assert_eq!((&find("dies")["state"], &find("dies")["signal"]), (&"killed".into(), &9.into()));

    // A name in use is refused, with what to do.
    let said = failure(&world.output(&["run", "--job", "runs", "true"]));
    assert!(said.contains("runs") && said.contains("another name"), "{said}");

    // A supervisor that is killed leaves a job that is known to be dead once its program has ended,
    // which reads to the end of its input.
    running.kill().expect("killed");
    running.wait().expect("reaped");
    let state = || {
        let all = world.json(&["ps", "--all", "--json"]);
        all.iter().find(|job| job["name"] == "runs").expect("the job")["state"].clone()
    };
    let begin = Instant::now();
    while state() == "unsupervised" && begin.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(state(), "killed");
}

#[test]
fn logs_are_the_job_s_and_the_latest_by_default() {
    let world = World::new("logs");
    let said = failure(&world.output(&["logs"]));
    assert!(said.contains("kedge run"), "{said}");
    let write = |job: &str, text: &str| {
        let script = format!("printf '{text}' >> $KEDGE_LOG");
        assert!(world.output(&["run", "--job", job, "--", "sh", "-c", &script]).status.success());
    };
    write("first", "one\\ntwo\\n\\033[31mthree\\n");
    assert_eq!(world.text(&["logs"]), "one\ntwo\n [31mthree\n");
    assert_eq!(world.text(&["logs", "first", "-n", "1"]), " [31mthree\n");
    assert_eq!(world.text(&["logs", "--follow", "first"]).lines().count(), 3);
    let lines = world.json(&["logs", "--json"]);
    has_fields(&lines, &["time", "level", "target", "job", "host", "process", "text"]);
    let said = failure(&world.output(&["logs", "nobody"]));
    assert!(said.contains("nobody") && said.contains("kedge ps --all"), "{said}");
}

#[test]
fn doctor_starts_a_kernel_and_every_runtime() {
    let world = World::new("doctor");
    let output = world.output(&["doctor", "--gpu", "soft", "--json"]);
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a JSON list");
    has_fields(&checks, &["group", "name", "status", "value", "mend"]);
    for check in &checks {
        assert_ne!(check["status"], "missing", "{check}");
    }
    assert!(output.status.success());
    for name in ["kernel on soft", "a process", "on soft"] {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}");
    }
    // Its own jobs are not the user's.
    assert_eq!(world.text(&["ps", "--all", "--json"]), "[]\n");

    // Without its parts, doctor still looks at the rest, and says how to mend it.
    let mut broken = world.kedge(&["doctor", "--json"]);
    let output = broken.env("KEDGE_LIB_DIR", "/nonexistent").output().expect("kedge");
    assert_eq!(output.status.code(), Some(1));
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a JSON list");
    let parts = checks.iter().find(|check| check["name"] == "parts").expect("the parts");
    assert!(parts["mend"].as_str().is_some_and(|mend| mend.contains("make build")));
}

/// What doctor says of checkpoints in a container whose filter of system calls treats unknown ones
/// so.
fn doctor_contained(denied: &str) -> Vec<(String, String)> {
    let world = World::new("contained");
    let container = host("../../crates/process/tests/contained.c", "contained", &[]);
    let doctor = world.kedge(&["doctor", "--gpu", "soft", "--json"]);
    let mut command = Command::new(container);
    command.arg(denied).arg(doctor.get_program()).args(doctor.get_args());
    for (name, value) in doctor.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().expect("kedge in a container");
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a JSON list");
    let tried = |check: &&Value| check["name"] == "a process" || check["name"] == "on soft";
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let told = |check: &Value| (text(check, "status"), text(check, "mend"));
    checks.iter().filter(tried).map(told).collect()
}

#[test]
fn jobs_come_back_in_a_container() {
    let told = doctor_contained("errors");
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|(status, _)| status == "ok"), "{told:?}");
    // One that would end the program is told before anything is tried in it.
    let told = doctor_contained("ends");
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|(status, mend)| status == "missing" && mend.contains("seccomp")));
}

fn are_figures(figures: &[Value]) {
    let fields = ["name", "unit", "value", "min", "max", "better", "target", "reference"];
    has_fields(figures, &fields);
    for figure in figures {
        let number = |field: &str| figure[field].as_f64().expect("a number");
        assert!(number("min") <= number("value") && number("value") <= number("max"));
        assert!(["lower", "higher"].contains(&figure["better"].as_str().expect("a word")));
    }
}

#[test]
fn benches_print_what_they_promise() {
    let world = World::new("bench");
    for what in ["calls", "soft"] {
        let figures = world.json(&["bench", what, "--json"]);
        are_figures(&figures);
        assert!(figures.iter().any(|figure| figure["target"].is_number()), "{what}");
    }
}

/// It ends with an error where the host or the device finds what the other has not written.
#[test]
fn a_bench_of_managed_memory_checks_what_it_computes() {
    let world = World::new("benchmanaged");
    for gpu in ["soft:apart", "soft"] {
        let bench = ["bench", "managed", "--size", "64M", "--gpu", gpu, "--json"];
        let figures = world.json(&bench);
        are_figures(&figures);
        for (name, unit) in [
            ("allocate managed memory, 64 MiB", "ms"),
            ("post a launch with nothing touched, beyond a plain one, 64 MiB", "µs"),
            ("launch with 1 % touched, beyond its bytes over the bus, 64 MiB", "ms"),
            ("first touch of a page by the host, write", "µs"),
            ("64 MiB in a row by the host, read", "of memcpy"),
            ("dot product of twice the quota, 64 MiB on the device", "GB/s"),
            ("pause of a checkpoint with twice the quota in use, 64 MiB on the device", "s"),
        ] {
            let is = |figure: &Value| figure["name"] == name && figure["unit"] == unit;
            let found = figures.iter().filter(|figure| is(figure)).count();
            assert_eq!(found, 1, "{name}: {figures:?}");
        }
    }
}

#[test]
fn an_ordinary_user_needs_no_more() {
    if !is_root() {
        return println!("not root: every other test is this one");
    }
    let world = World::new("user");
    let kedge = world.parts();
    let home = world.0.join("home");
    let nobody = ["-d", "-o", "65534", "-g", "65534", "-m", "700"];
    let made = Command::new("install").args(nobody).arg(&home).status();
    assert!(made.is_ok_and(|status| status.success()));
    let as_user = |arguments: &[&str]| {
        let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let mut command = Command::new("setpriv");
        command.args(user).arg(&kedge).args(arguments).current_dir("/");
        command.env("HOME", &home).env("XDG_STATE_HOME", &home).output().expect("setpriv")
    };
    let kernel = [&kedge.display().to_string(), "probe", "kernel"];
    let output = as_user(&[&["run", "--job", "mine", "--"], &kernel[..]].concat());
    assert!(output.status.success(), "{output:?}");
    assert!(jobs_in(&home).join("mine/log").exists());

    // A folder that it cannot write to is named, with the remedy.
    let status = Command::new("chmod").arg("555").arg(&home).status().expect("chmod");
    assert!(status.success() && std::fs::remove_dir_all(home.join("kedge")).is_ok());
    let said = failure(&as_user(&["run", "true"]));
    assert!(said.contains("XDG_STATE_HOME") && said.contains("home/kedge"), "{said}");
}

/// Runs `script` in a mount namespace of its own where the runtime folder is a disk of 256 KiB;
/// `$K` is kedge, `$D` the folder.
fn on_a_small_disk(world: &World, script: &str) -> Output {
    let script = format!("mount -t tmpfs -o size=256k none $D || exit 77\n{script}");
    Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .env("K", kedge())
        .env("D", world.runtime())
        .env("XDG_RUNTIME_DIR", world.runtime())
        .env("XDG_STATE_HOME", world.runtime())
        .output()
        .expect("unshare")
}

#[test]
fn a_full_disk_is_named_or_borne() {
    let world = World::new("full");
    if !is_root() || on_a_small_disk(&world, "exit 0").status.code() != Some(0) {
        return left_out("a full disk", "only root can mount a small one");
    }
    let fill = "dd if=/dev/zero of=$D/fill bs=1k 2>/dev/null";
    // Full before: kedge says so.
    let said = failure(&on_a_small_disk(&world, &format!("{fill}; exec $K run -- true")));
    assert!(said.contains("No space left"), "{said}");
    // Full while it runs: the program does not notice.
    let program = format!("{fill}; echo lost >> $KEDGE_LOG; $K probe kernel && exit 5");
    let output = on_a_small_disk(&world, &format!("exec $K run -- sh -c '{program}'"));
    assert_eq!(output.status.code(), Some(5), "{output:?}");
}

#[test]
fn random_bytes_on_the_job_s_socket_harm_nobody() {
    let world = World::new("bytes");
    let mut child = world
        .kedge(&["run", "--job", "b", "--"])
        .arg(kedge())
        .args(["probe", "calls"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("kedge");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut lines = String::new();
    output.read_line(&mut lines).expect("the first figure");
    // A fixed sequence: the same bytes in every run.
    let mut state = 0x5eed_u64;
    for length in (0..24).map(|round| 1_usize << (round % 17)) {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let bytes: Vec<u8> = (0..length).map(|_| next()).collect();
        let mut stream = UnixStream::connect(world.job("b").join("socket")).expect("connected");
        // The proxy may hang up before it has read all of it.
        let _ = stream.write_all(&bytes);
    }
    output.read_to_string(&mut lines).expect("the other figures");
    assert!(child.wait().expect("ended").success());
    assert!(lines.lines().count() >= 7, "{lines}");
    nobody_is_left(&world);
}

#[test]
fn ctrl_c_leaves_no_process_and_no_socket() {
    let world = World::new("ctrlc");
    let mut child = world
        .kedge(&["run", "--job", "c", "--"])
        .arg(kedge())
        .args(["probe", "calls"])
        .stdout(Stdio::piped())
        // A group of its own, as a shell gives to what it starts.
        .process_group(0)
        .spawn()
        .expect("kedge");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a figure");
    let group = format!("-{}", child.id());
    let status = Command::new("kill").args(["-s", "INT", "--", &group]).status();
    assert!(status.is_ok_and(|status| status.success()));
    assert_eq!(child.wait().expect("ended").signal(), Some(2), "kedge ends as its program did");
    nobody_is_left(&world);
    let mut left = names(&world.job("c"));
    left.sort();
    assert_eq!(left, ["lock", "log", "meta.json"]);
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("a folder").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A proxy has a second to notice that its client is gone.
fn nobody_is_left(world: &World) {
    let start = Instant::now();
    while !world.processes().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(1), "left: {:?}", world.processes());
        std::thread::sleep(Duration::from_millis(20));
    }
}
