//! `kedge run` from outside: status, signals, descriptors, the job's folder. No device is used, so
//! the shim and the proxy are empty files.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A private world: runtime folder and parts, removed at the end.
struct World(PathBuf);

impl World {
    fn new(name: &str) -> World {
        // Short, because socket paths are.
        let dir = PathBuf::from(format!("/tmp/kedge-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("parts")).unwrap();
        std::fs::create_dir_all(dir.join("run")).unwrap();
        for part in ["libkedge_cuda.so", "kedge-proxy"] {
            std::fs::write(dir.join("parts").join(part), "").unwrap();
        }
        World(dir)
    }

    fn kedge(&self, args: &[&str]) -> Command {
        // A runner in the background or under nohup ignores signals, and children inherit that.
        let mut command = Command::new("env");
        command
            .args(["--default-signal=HUP,INT,QUIT", env!("CARGO_BIN_EXE_kedge")])
            .args(args)
            .env("KEDGE_LIB_DIR", self.0.join("parts"))
            .env("XDG_RUNTIME_DIR", self.0.join("run"))
            .env("XDG_STATE_HOME", self.0.join("run"))
            .env_remove("LD_LIBRARY_PATH");
        command
    }

    /// Runs a shell script as the job `name`.
    fn sh(&self, name: &str, script: &str) -> Output {
        self.kedge(&["run", "--gpu", "soft", "--job", name, "--", "sh", "-c", script])
            .output()
            .unwrap()
    }

    fn jobs(&self) -> PathBuf {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        self.0.join("run/kedge/hosts").join(host.trim()).join("jobs")
    }

    fn job(&self, name: &str) -> PathBuf {
        self.jobs().join(name)
    }

    fn meta(&self, name: &str) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.job(name).join("meta.json")).unwrap()).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_exits_as_the_program_does() {
    let world = World::new("exit");
    for code in [0, 1, 7, 125, 255] {
        let output = world.sh("j", &format!("exit {code}"));
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(text(&output.stderr), "", "kedge has nothing to say");
        assert_eq!(world.meta("j")["state"]["exited"], code);
    }
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGINT] {
        let output = world.sh("j", &format!("kill -{signal} $$"));
        assert_eq!(output.status.signal(), Some(signal));
        assert_eq!(world.meta("j")["state"]["killed"], signal);
    }
}

#[test]
fn a_program_that_does_not_start_is_told_as_shells_do() {
    let world = World::new("start");
    let run = |program: &str| {
        world.kedge(&["run", "--gpu", "soft", "--job", "j", program]).output().unwrap()
    };
    let missing = run("/no/such/program");
    assert_eq!(missing.status.code(), Some(127));
    assert_eq!(text(&missing.stderr), "kedge: /no/such/program: no such program\n");
    let not_executable = run("/etc/passwd");
    assert_eq!(not_executable.status.code(), Some(126));
    assert!(text(&not_executable.stderr).contains("/etc/passwd"));
    assert!(!world.job("j").join("socket").exists());
}

#[test]
fn stdio_and_arguments_are_the_program_s() {
    let world = World::new("stdio");
    let mut child = world
        .kedge(&["run", "--gpu", "soft", "cat", "-", "--"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"through").unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap().stdout), "through");
    let output = world
        .kedge(&["run", "--gpu", "soft", "--", "echo", "--gpu", "--job", "x"])
        .output()
        .unwrap();
    assert_eq!(text(&output.stdout), "--gpu --job x\n");
}

#[test]
fn the_program_finds_the_driver_and_the_job() {
    let world = World::new("env");
    let script = "echo $KEDGE_JOB; echo $KEDGE_SOCKET; echo $LD_LIBRARY_PATH; \
                  readlink ${LD_LIBRARY_PATH%%:*}/libcuda.so.1; stat -c %a $KEDGE_SOCKET";
    let mut command =
        world.kedge(&["run", "--gpu", "soft", "--job", "env", "--", "sh", "-c", script]);
    let output = text(&command.env("LD_LIBRARY_PATH", "/x").output().unwrap().stdout);
    let lines: Vec<&str> = output.lines().collect();
    let job = world.job("env");
    assert_eq!(lines[0], "env");
    assert_eq!(Path::new(lines[1]), job.join("socket"));
    assert_eq!(lines[2], format!("{}:/x", job.join("lib").display()));
    assert_eq!(Path::new(lines[3]), world.0.join("parts/libkedge_cuda.so").canonicalize().unwrap());
    assert_eq!(lines[4], "600");
    // Nothing of it is left but what one may want to read.
    assert!(!job.join("socket").exists() && !job.join("lib").exists());
    assert!(job.join("log").exists() && job.join("meta.json").exists());
}

#[test]
fn a_job_of_the_cpu_alone_finds_no_driver() {
    let world = World::new("none");
    let script = "echo ${LD_LIBRARY_PATH-unset} ${KEDGE_SOCKET-unset} $KEDGE_JOB";
    let run = ["run", "--gpu", "none", "--job", "n", "--keep", "2"];
    let mut command =
        world.kedge(&[&run[..], &["--ckpt-dir", "sub", "--", "sh", "-c", script]].concat());
    // Neither is needed.
    let output = command.env("KEDGE_LIB_DIR", "/nonexistent").current_dir("/tmp").output().unwrap();
    assert_eq!(text(&output.stdout), "unset unset n\n", "{output:?}");
    let meta = world.meta("n");
    assert_eq!(meta["gpu"], "none");
    let policy = &meta["policy"];
    assert_eq!((&policy["dir"], &policy["keep"]), (&"/tmp/sub".into(), &2.into()));
    for bad in [["--keep", "0"], ["--interval", "soon"], ["--gpu", "no thing"]] {
        let output = world.kedge(&[&["run"], &bad[..], &["true"]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
    // It could be a host.
    let output = world.kedge(&["run", "--gpu", "nothing.invalid", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(text(&output.stderr).contains("no such host"), "{output:?}");
}

#[test]
fn no_descriptor_of_kedge_reaches_the_program() {
    let world = World::new("fds");
    let script = "ls /proc/self/fd | wc -l";
    let bare = Command::new("sh").args(["-c", script]).output().unwrap();
    assert_eq!(text(&world.sh("fds", script).stdout), text(&bare.stdout));
}

#[test]
fn signals_are_passed_on() {
    let world = World::new("signals");
    for (name, signal) in [("TERM", libc::SIGTERM), ("USR1", libc::SIGUSR1), ("HUP", libc::SIGHUP)]
    {
        let script =
            format!("trap 'echo got; exit 9' {name}; echo ready; while :; do sleep 0.02; done");
        let mut child = world
            .kedge(&["run", "--gpu", "soft", "--job", "s", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        // SAFETY: the child has not been reaped.
        unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        assert_eq!(lines.next().unwrap().unwrap(), "got", "{name}");
        assert_eq!(child.wait().unwrap().code(), Some(9), "{name}");
    }
}

#[test]
fn a_running_job_s_name_is_taken_and_an_ended_one_s_is_free() {
    let world = World::new("names");
    let kedge = env!("CARGO_BIN_EXE_kedge");
    let output = world.sh("same", &format!("{kedge} run --gpu soft --job same true; echo $?"));
    assert_eq!(text(&output.stdout).trim(), "125");
    assert_eq!(
        text(&output.stderr),
        "kedge: a job named same is running: choose another name, or end it first\n"
    );
    assert!(world.sh("same", "true").status.success());
    let bad = world.kedge(&["run", "--gpu", "soft", "--job", "../x", "true"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(2));
}

#[test]
fn a_killed_supervisor_blocks_nothing() {
    let world = World::new("killed");
    let mut child = world
        .kedge(&["run", "--gpu", "soft", "--job", "k", "--", "sh", "-c", "echo ready; sleep 0.3"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(world.sh("k", "true").status.success());
}

#[test]
fn only_the_latest_ended_jobs_are_kept() {
    let world = World::new("prune");
    let jobs = || std::fs::read_dir(world.jobs()).unwrap().count();
    for n in 0..67 {
        assert!(world.sh(&format!("j{n}"), "true").status.success());
        assert_eq!(jobs(), if n < 66 { n + 1 } else { 50 });
    }
}

#[test]
fn kedge_s_own_failures_say_what_to_do() {
    let world = World::new("failures");
    let fail = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        let said = text(&output.stderr);
        assert!(said.starts_with("kedge: ") && said.lines().count() == 1, "{said}");
        said
    };
    let said = fail(world.kedge(&["run", "true"]).env("KEDGE_LIB_DIR", "/nonexistent"));
    assert!(said.contains("libkedge_cuda.so") && said.contains("KEDGE_LIB_DIR"), "{said}");

    // A proxy that does not tell what devices there are.
    let said = fail(&mut world.kedge(&["run", "true"]));
    assert!(said.contains("parts/kedge-proxy"), "{said}");

    let base = world.0.join("run/kedge/hosts");
    std::fs::create_dir_all(&base).unwrap();
    std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
    let said = fail(&mut world.kedge(&["run", "--gpu", "soft", "true"]));
    assert!(said.contains("others cannot enter"), "{said}");
}

/// The user's session ends, and what it had in its runtime folder goes.
#[test]
fn a_job_outlives_the_runtime_folder() {
    let world = World::new("logout");
    let (runtime, state) = (world.0.join("session"), world.0.join("state"));
    let kedge = |args: &[&str]| {
        let mut command = world.kedge(args);
        command.env("XDG_RUNTIME_DIR", &runtime).env("XDG_STATE_HOME", &state);
        command
    };
    let said = |args: &[&str]| {
        let output = kedge(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        text(&output.stdout)
    };
    std::fs::create_dir(&runtime).unwrap();
    let script = "while :; do echo on; sleep 0.05; done";
    let run = ["run", "--gpu", "none", "--job", "j", "--interval", "1s", "--keep", "2", "--"];
    let mut child =
        kedge(&[&run[..], &["sh", "-c", script]].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    for round in 1..3 {
        std::fs::remove_dir_all(&runtime).unwrap();
        assert!(said(&["ps"]).contains("running"), "round {round}");
        said(&["logs", "j"]);
        said(&["checkpoint", "j"]);
        // One that nobody asked for.
        let log = || said(&["logs", "j"]).lines().filter(|line| line.contains("durable")).count();
        let (before, begin) = (log(), std::time::Instant::now());
        while log() == before {
            assert!(begin.elapsed().as_secs() < 60, "no checkpoint by itself: round {round}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        // The next session.
        std::fs::create_dir(&runtime).unwrap();
    }
    said(&["kill", "j", "--grace", "0"]);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    drop(lines);
    let mut back = kedge(&["restart", state.join("kedge/images").to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(back.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    std::fs::remove_dir_all(&runtime).unwrap();
    said(&["checkpoint", "j"]);
    said(&["kill", "j", "--grace", "0s"]);
    back.wait().unwrap();
}

#[test]
fn a_job_may_lie_in_a_folder_with_a_long_path() {
    let world = World::new("long");
    let state = world.0.join("x".repeat(100)).join("y".repeat(100));
    let kedge = |args: &[&str]| {
        let mut command = world.kedge(args);
        command.env("XDG_STATE_HOME", &state);
        command
    };
    let mut child = kedge(&[
        "run",
        "--gpu",
        "soft",
        "--job",
        "j",
        "--",
        "sh",
        "-c",
        "echo on; exec sleep 1000",
    ])
    .stdout(Stdio::piped())
    .spawn()
    .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    let output = kedge(&["checkpoint", "j"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let output = kedge(&["kill", "j"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
}

/// The processes with this in their environment, but for those that ask.
fn processes_with(variable: &str) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let environments = entries.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    environments.filter(|all| text(all).split('\0').any(|entry| entry == variable)).count()
}

#[test]
fn what_a_killed_supervisor_leaves_is_told_and_can_be_ended() {
    let world = World::new("left");
    let mark = format!("KEDGE_TEST_LEFT={}", world.0.display());
    let (key, value) = mark.split_once('=').unwrap();
    // Children with another environment, and one that ignores SIGTERM.
    let script =
        "env -i sleep 1000 & sh -c 'trap \"\" TERM; echo on; while :; do sleep 0.05; done' & wait";
    let mut child = world
        .kedge(&["run", "--gpu", "none", "--job", "j", "--", "sh", "-c", script])
        .env(key, value)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(processes_with(&mark) >= 2);
    let said = |args: &[&str]| text(&world.kedge(args).output().unwrap().stdout);
    assert!(said(&["ps"]).contains("unsupervised"), "{}", said(&["ps", "-a"]));
    assert!(said(&["ps", "--json"]).contains("\"unsupervised\""));
    let output = world.kedge(&["checkpoint", "j"]).output().unwrap();
    assert!(text(&output.stderr).contains("kedge kill j"), "{output:?}");
    // Nobody takes its name, and starts it a second time.
    let again = ["run", "--gpu", "none", "--job", "j", "--", "true"];
    let output = world.kedge(&again).output().unwrap();
    assert!(text(&output.stderr).contains("kedge kill j"), "{output:?}");
    assert_eq!(output.status.code(), Some(125));
    assert!(processes_with(&mark) >= 2);
    let output = world.kedge(&["kill", "j", "--grace", "200ms"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(processes_with(&mark), 0);
    // Nothing holds the pipe any more: also not what had another environment.
    assert!(lines.all(|line| line.unwrap() == "on"));
    assert!(said(&["ps", "-a"]).contains("killed 9"));
}

/// A process that has been given a job's first process id is no process of the job.
#[test]
fn a_used_up_id_is_nobody_of_the_job() {
    let world = World::new("reused");
    let mut child = world
        .kedge(&[
            "run",
            "--gpu",
            "none",
            "--job",
            "j",
            "--",
            "sh",
            "-c",
            "echo on; exec sleep 1000",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    let program = soon("the program is noted", || world.meta("j")["pid"].as_i64());
    child.kill().unwrap();
    child.wait().unwrap();
    // The kernel tells starts in hundredths of a second; an id is not used up that soon.
    std::thread::sleep(std::time::Duration::from_millis(30));
    let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut meta = world.meta("j");
    meta["pid"] = other.id().into();
    std::fs::write(world.job("j").join("meta.json"), meta.to_string()).unwrap();
    let output = world.kedge(&["kill", "j", "--grace", "0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(other.try_wait().unwrap().is_none(), "another's process was killed");
    // Whoever has inherited it may not have collected it yet.
    let stat = std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "by its environment it is the job's: {stat}");
    other.kill().unwrap();
    other.wait().unwrap();
}

fn children(pid: u32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children"));
    let lists: Vec<String> = threads.filter_map(|thread| of(thread).ok()).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).map(|id| id.parse().unwrap()).collect()
}

/// Asks until there is an answer.
fn soon<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begin = std::time::Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begin.elapsed().as_secs() < 60, "{what}: not within a minute");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// A restart by which a job goes back is killed, and so is a job that has come back, its init
/// included.
#[test]
fn a_try_that_was_killed_counts_and_the_job_goes_on() {
    let world = World::new("again");
    let script = "while :; do sleep 0.02; done";
    let run = ["run", "--gpu", "none", "--job", "j", "--recover=99", "--", "sh", "-c", script];
    let mut child = world.kedge(&run).stdout(Stdio::null()).spawn().unwrap();
    let supervisor = child.id();
    let checkpoint = || world.kedge(&["checkpoint", "j"]).output().unwrap().status.success();
    soon("a first image", || checkpoint().then_some(()));
    let kill_all = || {
        let mut found = children(supervisor);
        while let Some(pid) = found.pop() {
            found.extend(children(pid as u32));
            // SAFETY: kill takes no pointers; the process is of this test's own job.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    };
    let log = || std::fs::read_to_string(world.job("j").join("log")).unwrap();
    let times = || log().matches("the job goes back to").count();
    for _ in 0..3 {
        // Wherever they are on their way back.
        let before = times();
        soon("it goes back three times", || {
            kill_all();
            (times() >= before + 3).then_some(())
        });
        soon("it is back", || checkpoint().then_some(()));
    }
    assert!(world.kedge(&["kill", "j", "--grace", "0"]).output().unwrap().status.success());
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL), "{}", log());
}

/// What kedge writes for the job is too long for its limit: the checkpoint fails, by the limit's
/// name.
#[test]
fn a_limit_on_files_ends_a_checkpoint_and_no_job() {
    let world = World::new("limit");
    let script =
        "a=$(head -c 3000000 /dev/urandom | base64); echo on; while :; do sleep 0.02; done";
    let kedge = world.kedge(&["run", "--gpu", "none", "--job", "j", "--", "sh", "-c", script]);
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -f 1000; exec \"$@\"", "bash"]);
    command.arg(kedge.get_program()).args(kedge.get_args());
    kedge.get_envs().for_each(|(name, value)| {
        value.map(|value| command.env(name, value));
    });
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    let output = world.kedge(&["checkpoint", "j"]).output().unwrap();
    assert!(text(&output.stderr).contains("ulimit -f"), "{output:?}");
    assert!(world.kedge(&["kill", "j"]).output().unwrap().status.success(), "it runs on");
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
    // Also the job's own files.
    let output = Command::new("bash")
        .args([
            "-c",
            "ulimit -f 0; exec \"$@\" true",
            "bash",
            env!("CARGO_BIN_EXE_kedge"),
            "run",
            "--gpu",
            "soft",
        ])
        .envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(text(&output.stderr).contains("ulimit -f"), "{output:?}");
}

/// `kedge` with these words under a limit of bash's `ulimit`; status, and what it said.
fn under(world: &World, limit: &str, words: &[&str]) -> (Option<i32>, String) {
    let kedge = world.kedge(words);
    let script = format!("ulimit {limit}; exec timeout -k 1 20 \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &script, "bash"]).arg(kedge.get_program()).args(kedge.get_args());
    let values = kedge.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let output = command.envs(values).output().unwrap();
    (output.status.code(), text(&output.stderr))
}

/// The job runs, or what is in the way is named; nobody waits for ever.
#[test]
fn few_descriptors_are_enough_or_named() {
    let world = World::new("few");
    let mut ran = 0;
    for gpu in ["none", "soft"] {
        for most in (4..=24).chain([32, 48]) {
            let name = format!("{gpu}{most}");
            let words = ["run", "--gpu", gpu, "--job", &name, "--", "true"];
            let (code, said) = under(&world, &format!("-n {most}"), &words);
            let named = matches!(code, Some(125 | 126)) && said.contains("`ulimit -n`");
            assert!(code == Some(0) || named, "{gpu} with {most}: {code:?} {said}");
            assert!(!said.contains("Linux 5.3"), "{said}");
            ran += usize::from(code == Some(0));
        }
    }
    assert!(ran > 10, "only {ran} ran");
}

/// Whoever asks the job for something takes a descriptor of its supervisor's.
#[test]
fn a_job_whose_descriptors_are_used_up_ends_with_its_program() {
    const MOST: &str = "24";
    let world = World::new("used");
    let go = world.0.join("go");
    let script = format!("echo on; while [ ! -e {} ]; do sleep 0.02; done; exit 7", go.display());
    let kedge = world.kedge(&["run", "--gpu", "none", "--job", "j", "--", "sh", "-c", &script]);
    let limited = format!("ulimit -n {MOST}; exec \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &limited, "bash"]).arg(kedge.get_program()).args(kedge.get_args());
    command.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "on");
    let socket = world.job("j").join("control");
    let asking: Vec<UnixStream> =
        (0..40).map_while(|_| UnixStream::connect(&socket).ok()).collect();
    assert!(asking.len() > 24, "only {} came so far", asking.len());
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it runs on");
    std::fs::write(&go, "").unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("it does not end with its program");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(status.code(), Some(7));
    drop(asking);
}

/// The same of a limit on addresses. Under the smallest, the loader itself is not loaded.
#[test]
fn few_addresses_are_enough_or_named() {
    let world = World::new("space");
    for gpu in ["none", "soft"] {
        for most in ["-v 4000000", "-v 1000000", "-v 400000", "-v 200000"] {
            let words = ["run", "--gpu", gpu, "--job", "j", "--", "true"];
            let (code, said) = under(&world, most, &words);
            let named = code == Some(125) && said.contains("`ulimit -v`");
            assert!(code == Some(0) || named, "{gpu}, {most}: {code:?} {said}");
        }
    }
}
