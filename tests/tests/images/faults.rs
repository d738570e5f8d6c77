//! What happens when a part dies or lies: the client gets an error, soon, and lives on.
use kedge_tests::job::{children, is_proxy};
use kedge_tests::{Program, Toolchain, host, kedge, root, run_command};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args(["-s", name, &pid.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "kill -s {name} {pid}");
}

/// A job whose program has printed its first line.
struct Job {
    supervisor: Child,
    output: BufReader<std::process::ChildStdout>,
    proxy: u32,
    program: u32,
}

impl Job {
    fn start(how: &str) -> Self {
        let program = host("until_error.cu", "until_error", &[]);
        let mut supervisor = Command::new(kedge())
            .args(["run", "--gpu", "soft", "--"])
            .arg(program)
            .arg(how)
            .stdout(Stdio::piped())
            .spawn()
            .expect("kedge: build it first (cargo build --release)");
        let mut output = BufReader::new(supervisor.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("the program's first line");
        let program = line.trim().strip_prefix("ready ").and_then(|pid| pid.parse().ok());
        let proxies = children(supervisor.id()).into_iter().filter(|pid| is_proxy(*pid));
        let proxies: Vec<u32> = proxies.collect();
        assert_eq!(proxies.len(), 1, "one proxy for one client");
        Self { supervisor, output, proxy: proxies[0], program: program.expect("a pid") }
    }

    /// What the program printed since, and how long it ran on.
    fn end(mut self) -> (String, bool, Duration) {
        let start = Instant::now();
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("the program's output");
        let status = self.supervisor.wait().expect("the supervisor's status");
        (rest, status.success(), start.elapsed())
    }
}

#[test]
fn a_killed_proxy_is_an_error_within_a_second() {
    for how in ["sync", "post", "idle"] {
        let job = Job::start(how);
        std::thread::sleep(Duration::from_millis(200));
        signal(job.proxy, "KILL");
        let (output, passed, took) = job.end();
        assert!(passed && output.contains("alive"), "{how}: {output}");
        let failing: f64 = output
            .split("after ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next())
            .and_then(|word| word.parse().ok())
            .expect("a time");
        assert!(failing < 1.0, "{how}: the failing call took {failing} s");
        assert!(took < Duration::from_secs(5), "{how}: {took:?}");
    }
}

#[test]
fn a_killed_client_takes_its_proxy_along() {
    let job = Job::start("sync");
    signal(job.program, "KILL");
    let gone = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    };
    let start = Instant::now();
    while !gone(job.proxy) {
        assert!(start.elapsed() < Duration::from_secs(2), "the proxy outlived its client");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (_, passed, _) = job.end();
    assert!(!passed, "kedge run ends as its program did");
}

#[test]
fn a_fault_of_one_client_leaves_another_alone() {
    let mut job = Job::start("sync");
    let toolchain = Toolchain::find(&root().join("target/programs")).expect("nvcc");
    let program = Program::load(&root().join("tests/programs/error_trap.cu")).expect("error_trap");
    let mut command = Command::new(kedge());
    let trap = toolchain.compile(&program).expect("it compiles");
    command.args(["run", "--gpu", "soft", "--"]).arg(trap);
    let trapped = run_command(command, Duration::from_secs(30));
    std::thread::sleep(Duration::from_millis(200));
    let ended = job.supervisor.try_wait().expect("the supervisor's status");
    signal(job.proxy, "KILL");
    let (output, passed, _) = job.end();
    assert_eq!(trapped.failure, None, "{}", trapped.stdout);
    assert_eq!(ended, None, "the other's fault ended it: {output}");
    assert!(passed && output.contains("ok alive"), "{output}");
}

#[test]
fn memory_is_scrubbed_before_another_client_gets_it() {
    let program = host("leftovers.cu", "leftovers", &[]);
    let run = |what: &str| {
        let mut command = Command::new(kedge());
        command.args(["run", "--gpu", "soft", "--"]).arg(&program).args([what, "64"]);
        run_command(command, Duration::from_secs(60))
    };
    for (what, said) in [("fill", "filled 16777216 words"), ("look", "found 0 words")] {
        let outcome = run(what);
        assert_eq!(outcome.failure, None, "{what}: {}", outcome.stdout);
        assert!(outcome.stdout.contains(said), "{what}: {}", outcome.stdout);
    }
}

/// The byte range of an ELF file's section.
fn section(elf: &[u8], name: &str) -> std::ops::Range<usize> {
    let u64_at =
        |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().expect("8 bytes")) as usize;
    let u32_at =
        |at: usize| u32::from_le_bytes(elf[at..at + 4].try_into().expect("4 bytes")) as usize;
    let u16_at = |at: usize| usize::from(elf[at]) | usize::from(elf[at + 1]) << 8;
    let (table, size, count, names) = (u64_at(0x28), u16_at(0x3a), u16_at(0x3c), u16_at(0x3e));
    let strings = u64_at(table + names * size + 24);
    for index in 0..count {
        let header = table + index * size;
        let text = &elf[strings + u32_at(header)..];
        if text.starts_with(name.as_bytes()) && text[name.len()] == 0 {
            let offset = u64_at(header + 24);
            return offset..offset + u64_at(header + 32);
        }
    }
    panic!("no section {name}");
}

fn vector_add() -> PathBuf {
    let toolchain = Toolchain::find(&root().join("target/programs")).expect("nvcc");
    let program = Program::load(&root().join("tests/programs/vector_add.cu")).expect("vector_add");
    toolchain.compile(&program).expect("it compiles")
}

#[test]
fn a_corrupted_fatbin_is_an_error_of_the_program() {
    let original = std::fs::read(vector_add()).expect("the binary");
    let range = section(&original, ".nv_fatbin");
    let broken = root().join("target/hosts/broken_fatbin");
    std::fs::create_dir_all(root().join("target/hosts")).expect("a folder");
    // A fixed sequence: the same corruptions in every run.
    let mut state = 0x1234_5678_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut refused = 0;
    for round in 0..60 {
        let mut bytes = original.clone();
        for _ in 0..=random(20) {
            // Headers first, then anywhere.
            let reach = if round % 2 == 0 { range.len().min(200) } else { range.len() };
            bytes[range.start + random(reach)] = random(256) as u8;
        }
        write_program(&broken, &bytes);
        let mut command = Command::new(kedge());
        command.args(["run", "--gpu", "soft", "--"]).arg(&broken);
        let outcome = run_command(command, Duration::from_secs(60));
        match &outcome.failure {
            // The corruption hit what is not used (another architecture's code, padding).
            None => assert!(outcome.stdout.contains("ok "), "round {round}: {}", outcome.stdout),
            Some(failure) => {
                refused += 1;
                assert!(
                    failure.contains("exit status: 1"),
                    "round {round}: {failure}: {outcome:?}"
                );
            }
        }
    }
    assert!(refused > 10, "only {refused} of 60 corruptions were noticed");
}

fn write_program(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::PermissionsExt;
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).expect("a copy of the program");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}
