//! Debugging by gdb, as docs/debugging.md says: a program that runs, and one that was brought back.
use kedge_left_out::left_out;
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, User};
use kedge_tests::world::{failure, stderr, wait_for};
use std::fs;
use std::process::{Command, Output, Stdio};

fn has_gdb() -> bool {
    let found = Command::new("gdb").arg("--version").output().is_ok();
    if !found {
        left_out("gdb", "it is not installed (apt install gdb)");
    }
    found
}

/// gdb, by the one whose job it is.
fn gdb(user: User, arguments: &[&str]) -> Command {
    let id = user.id().to_string();
    let become_user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"];
    let words: &[&str] = if user == User::Same { &["env"] } else { &become_user };
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(["gdb", "--quiet", "-nx"]).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn a_program_runs_under_gdb_with_its_devices() {
    if !has_gdb() {
        return;
    }
    let place = GpuSteps::mine("gdbrun");
    let program = place.program.display().to_string();
    let gdb = ["gdb", "--batch", "--quiet", "-nx", "-ex", "set breakpoint pending on"];
    let orders = ["-ex", "break cuLaunchKernel", "-ex", "run", "-ex", "bt", "-ex", "kill"];
    let run = [&["run", "--gpu", "soft", "--quiet", "--"][..], &gdb, &orders];
    let mut command = place.kedge(&[&run.concat()[..], &["--args", &program, "5", "1"]].concat());
    let output = command.stdin(Stdio::null()).output().expect("kedge");
    let said = said(&output);
    // With line tables gdb tells the source in the place of an address.
    let stops = |line: &str| line.starts_with("#0 ") && line.contains("cuLaunchKernel ()");
    assert!(said.lines().any(stops), "{said}");
    assert!(said.contains(" in main ("), "{said}");
}

#[test]
fn a_program_under_gdb_is_not_saved() {
    if !has_gdb() {
        return;
    }
    let place = GpuSteps::mine("gdbsave");
    let mut job = place.start(&[]);
    job.read_to(10);
    let pid = place.clients(&job)[0].to_string();
    let mut open = gdb(User::Same, &["-p", &pid]).stdin(Stdio::piped()).spawn().expect("gdb");
    let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    wait_for("gdb is there", || !status().contains("TracerPid:\t0\n"));
    let refused = failure(&place.output(&["checkpoint", "j"]));
    assert!(refused.contains("end the debugger, then try again"), "{refused}");
    drop(open.stdin.take());
    let _ = open.wait_with_output();
    // It went on meanwhile, and is saved afterwards.
    job.read_to(job.step + 3);
    place.checkpoint(&[]);
    assert!(place.output(&["kill", "j"]).status.success());
    let _ = job.drain();
}

#[test]
fn gdb_attaches_to_a_job_that_was_brought_back() {
    if !has_gdb() {
        return;
    }
    // An ordinary user's job is in a user namespace of its own.
    for (name, user) in [("gdbback", User::Same), ("gdbbacku", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let mut job = place.start(&[]);
        job.read_to(10);
        let output = place.output(&["checkpoint", "j", "--stop"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let image = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let nonce = job.nonce.clone();
        let _ = job.drain();
        let mut job = Job::spawn_recovering(place.to_restart(image.as_ref(), &[]), &nonce);
        job.read_to(20);
        let pid = place.clients(&job)[0].to_string();
        let program = place.program.display().to_string();
        let orders = ["--batch", "-iex", "set sysroot /", &program, &pid, "-ex", "bt"];
        let output = gdb(user, &orders).stdin(Stdio::null()).output().expect("gdb");
        assert!(said(&output).contains(" in main ("), "{}", said(&output));
        job.read_to(job.step + 3);
        // Traced, it cannot be saved, and says why. gdb ends with its input.
        let mut open = gdb(user, &["-p", &pid]).stdin(Stdio::piped()).spawn().expect("gdb");
        let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        wait_for("gdb is there", || !status().contains("TracerPid:\t0\n"));
        let refused = failure(&place.output(&["checkpoint", "j"]));
        assert!(refused.contains("if a debugger has it, end that"), "{refused}");
        drop(open.stdin.take());
        let _ = open.wait_with_output();
        job.read_to(job.step + 3);
        assert!(place.output(&["kill", "j"]).status.success());
        let _ = job.drain();
    }
}
