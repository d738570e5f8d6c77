//! Programs are captured at some moment and killed, and brought back from the image. Each draws a
//! nonce at its start, so that one which merely began anew is found out.

mod support;

use kedge_image::Manifest;
use kedge_process::{Options, Rebuilt, RestartOptions, Roots, checkpoint, restart};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::{Folder, Running, alone, bring_back, build, reap, step};

/// `before` was said before the capture, `after` after the restart; together they must be what an
/// undisturbed run of `steps` steps says.
fn continues(before: &[String], after: &[String], steps: usize) {
    let nonce = before[0].split(' ').next().unwrap();
    let other = after.iter().position(|line| !line.starts_with(nonce));
    let shown = other.map(|at| &after[at.saturating_sub(1)..(at + 2).min(after.len())]);
    assert!(other.is_none(), "another program than {nonce}, line {other:?}: {shown:?}");
    assert!(step(&after[0]) > before.len(), "it went back to {}", after[0]);
    let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
    let expected: Vec<usize> = (numbers[0]..=steps).collect();
    assert_eq!(numbers, expected);
    // Every value follows from the nonce and the steps.
    let start = u64::from_str_radix(nonce, 16).unwrap();
    let (mut value, mut sum) = (start, 0.0);
    for number in 1..=steps {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        sum += 1.0 / number as f64;
        if let Some(line) = after.iter().find(|line| step(line) == number) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words[2].parse::<f64>().unwrap(), sum, "{line}");
            assert_eq!(words[3], format!("{value:016x}"));
        }
    }
}

fn steps_survive(name: &str, source: &str, flags: &[&str]) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, flags);
    command_survives(&folder, &[program.to_str().unwrap()]);
}

/// The same for a program that may not be installed.
fn script_survives(name: &str, command: &[&str]) {
    let _alone = alone();
    if installed(command[0]) {
        command_survives(&Folder::new(name), command);
    }
}

fn installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).output().unwrap();
    if !found.status.success() {
        eprintln!("{program} is not installed: not tested");
    }
    found.status.success()
}

/// Once, or as often as KEDGE_ROUNDS says: `make soak`.
fn rounds() -> usize {
    std::env::var("KEDGE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

fn random() -> usize {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    usize::from_le_bytes(bytes)
}

fn command_survives(folder: &Folder, command: &[&str]) {
    let steps = 300;
    for round in 0..rounds() {
        let moment = 1 + random() % 100;
        let arguments = &command[1..];
        let mut running =
            Running::start(Command::new(command[0]).args(arguments).arg(steps.to_string()));
        let before = running.lines(moment);
        let image = folder.path(&format!("image-{round}"));
        running.capture_and_kill(&image);
        let (after, status) = bring_back(&image);
        continues(&before, &after, steps);
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
    }
}

#[test]
fn a_static_program_goes_on() {
    steps_survive("static", "step.c", &["-static"]);
}

#[test]
fn a_dynamic_program_goes_on() {
    steps_survive("dynamic", "step.c", &[]);
}

#[test]
fn sixty_four_threads_go_on() {
    steps_survive("threads", "threads.c", &["-pthread"]);
}

#[test]
fn a_tree_of_processes_goes_on() {
    steps_survive("tree", "tree.c", &["-pthread"]);
}

#[test]
fn openmp_goes_on() {
    steps_survive("openmp", "openmp.c", &["-fopenmp"]);
}

#[test]
fn exceptions_are_still_caught() {
    steps_survive("exceptions", "exceptions.cc", &["-pthread"]);
}

/// Its calls begin anew, and nothing that it waits for is lost.
#[test]
fn a_program_that_takes_eintr_for_the_end_goes_on() {
    steps_survive("interrupted", "interrupted.c", &["-pthread"]);
}

#[test]
fn a_restartable_sequence_begins_anew() {
    let _alone = alone();
    let folder = Folder::new("rseq");
    let program = build(&folder, "rseq.c", &[]);
    let tunables = "GLIBC_TUNABLES=glibc.pthread.rseq=0";
    command_survives(&folder, &["/usr/bin/env", tunables, program.to_str().unwrap()]);
}

#[test]
fn mappings_of_all_kinds_come_back() {
    steps_survive("mappings", "mappings.c", &[]);
}

#[test]
fn python_goes_on() {
    script_survives("python", &["/usr/bin/python3", "-c", include_str!("steps.py")]);
}

#[test]
fn a_redis_server_goes_on_with_its_client() {
    let programs = ["redis-server", "/usr/bin/python3"];
    if programs.iter().all(|program| installed(program)) {
        let script = include_str!("steps_redis.py");
        script_survives("redis", &["/usr/bin/python3", "-c", script]);
    }
}

#[test]
fn perl_goes_on() {
    script_survives("perl", &["/usr/bin/perl", "-e", include_str!("steps.pl")]);
}

#[test]
fn go_goes_on() {
    let _alone = alone();
    if !installed("go") {
        return;
    }
    command_survives(&Folder::new("go"), &[build_go().to_str().unwrap()]);
}

/// Once for all: its library takes half a minute.
fn build_go() -> PathBuf {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (program, source) = (kept.join("steps-go"), kept.join("steps.go"));
    if std::fs::read(&source).is_ok_and(|text| text == include_bytes!("steps.go")) {
        return program;
    }
    let written = kept.join("steps-new.go");
    std::fs::write(&written, include_str!("steps.go")).unwrap();
    let mut compiler = Command::new("go");
    compiler.arg("build").arg("-o").arg(&program).arg(&written);
    compiler.env("GOCACHE", kept.join("go-cache")).current_dir(kept);
    assert!(compiler.status().unwrap().success());
    std::fs::rename(written, source).unwrap();
    program
}

#[test]
fn java_goes_on() {
    let _alone = alone();
    if !installed("javac") {
        return;
    }
    let folder = Folder::new("java");
    let source = folder.path("Steps.java");
    std::fs::write(&source, include_str!("Steps.java")).unwrap();
    let compiled = Command::new("javac").arg("-d").arg(folder.path("")).arg(&source).status();
    assert!(compiled.unwrap().success());
    let classes = folder.path("");
    let options = ["java", "-Xmx64m", "-cp", classes.to_str().unwrap(), "Steps"];
    command_survives(&folder, &options);
}

#[test]
fn node_goes_on() {
    script_survives("node", &["/usr/bin/node", "-e", include_str!("steps.js")]);
}

#[test]
fn a_shell_and_its_children_go_on() {
    script_survives("bash", &["/bin/bash", "-c", include_str!("steps.bash"), "bash"]);
}

/// Its clock goes on where it was, however long it lay in its image.
#[test]
fn time_stands_still_in_an_image() {
    let _alone = alone();
    let folder = Folder::new("time");
    let program = build(&folder, "clock.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    let before = running.lines(20);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    std::thread::sleep(Duration::from_secs(6));
    let (after, status) = bring_back(&image);
    continues(&before, &after, 300);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

/// A job that was restarted is captured again, by its init, and restarted once more.
#[test]
fn a_restarted_job_can_be_captured_again() {
    let _alone = alone();
    let folder = Folder::new("again");
    let program = build(&folder, "threads.c", &["-pthread"]);
    let steps = 400;
    let mut running = Running::start(Command::new(&program).arg(steps.to_string()));
    let before = running.lines(10);
    let images = [folder.path("image-0"), folder.path("image-1"), folder.path("image-2")];
    running.capture_and_kill(&images[0]);
    for pair in images.windows(2) {
        let (output, theirs) = std::io::pipe().unwrap();
        let streams = [None, Some(OwnedFd::from(theirs)), None];
        let options = RestartOptions { streams, ..RestartOptions::new(pair[0].clone()) };
        std::fs::create_dir(&pair[1]).unwrap();
        let capture = || {
            std::thread::sleep(Duration::from_millis(60));
            let roots = Roots::ChildrenOf { parent: 1, except: Vec::new() };
            let captured = checkpoint(&roots, Options::new(pair[1].clone()))?;
            captured.finish(Manifest::new("test".into(), vec![], 1))
        };
        // The job is killed when this returns.
        let serve = |_: &mut Rebuilt| {
            if let Err(error) = capture() {
                let _ = std::fs::write(pair[1].join("error"), error.to_string());
            }
        };
        let restarted = restart(&options, serve).unwrap();
        drop(options);
        let lines: Vec<String> = BufReader::new(output).lines().map(Result::unwrap).collect();
        drop(restarted);
        reap();
        let error = std::fs::read_to_string(pair[1].join("error"));
        assert!(error.is_err(), "{error:?}");
        assert!(lines.iter().all(|line| line[..16] == before[0][..16]), "{}", lines[0]);
    }
    let (after, status) = bring_back(&images[2]);
    continues(&before, &after, steps);
    assert!(step(&after[0]) > 20, "{}", after[0]);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

/// What works for root works for an ordinary user: the same tests again, in processes of one.
#[test]
fn an_ordinary_user_can_do_the_same() {
    // SAFETY: a plain call.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let _alone = alone();
    if installed("go") {
        build_go();
    }
    let mut tests = Command::new("setpriv");
    tests.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
    tests.arg(std::env::current_exe().unwrap()).env("TMPDIR", "/tmp");
    let output = tests.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}
