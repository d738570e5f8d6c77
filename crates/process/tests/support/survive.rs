//! Programs that count steps: captured at a random moment, killed, brought back, and their output
//! compared.
#![allow(unreachable_pub, dead_code, reason = "each test program uses its part of it")]

use crate::support::{Folder, Running, alone, alone_for, bring_back, build, capture_again, step};
use kedge_left_out::left_out;
use std::io::Read;
use std::process::Command;
use std::time::Duration;

/// `before` was said before the capture, `after` after the restart; together they must be what an
/// undisturbed run of `steps` steps says.
pub fn continues(before: &[String], after: &[String], steps: usize) {
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

/// The program of `before` did each of its steps once, to the last, after those it was seen at.
pub fn counts_on(before: &[String], after: &[String], steps: usize) {
    let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
    assert_eq!(numbers, (numbers[0]..=steps).collect::<Vec<_>>());
    assert!(numbers[0] > before.len() && after[0][..16] == before[0][..16], "{}", after[0]);
}

pub fn steps_survive(name: &str, source: &str, flags: &[&str]) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, flags);
    command_survives(&folder, &[program.to_str().unwrap()]);
}

/// The same for a program that may not be installed.
pub fn script_survives(name: &str, command: &[&str]) {
    let _alone = alone();
    if installed(command[0]) {
        command_survives(&Folder::new(name), command);
    }
}

/// Looked for by hand: a child of this process might be taken for one of another test's job.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !found {
        left_out(program, "it is not installed: scripts/setup --tests");
    }
    found
}

/// Once, or as often as KEDGE_ROUNDS says: `make soak`.
pub fn rounds() -> usize {
    std::env::var("KEDGE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

pub fn random() -> usize {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    usize::from_le_bytes(bytes)
}

pub fn command_survives(folder: &Folder, command: &[&str]) {
    command_survives_for(folder, command, 300);
}

/// The same for so many steps: the moment lies in their first third.
pub fn command_survives_for(folder: &Folder, command: &[&str], steps: usize) {
    for round in 0..rounds() {
        let moment = 1 + random() % (steps / 3);
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

/// A program that was restarted is captured again, by its init, and restarted once more; twice.
pub fn captured_again(name: &str, source: &str) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, &["-pthread"]);
    let steps = 400;
    let mut running = Running::start(Command::new(&program).arg(steps.to_string()));
    let before = running.lines(10);
    let images = [folder.path("image-0"), folder.path("image-1"), folder.path("image-2")];
    running.capture_and_kill(&images[0]);
    let mut said = before.clone();
    for pair in images.windows(2) {
        said.extend(capture_again(&pair[0], &pair[1]));
        assert!(said.iter().all(|line| line[..16] == before[0][..16]), "{said:?}");
    }
    let (after, status) = bring_back(&images[2]);
    assert!(!after.is_empty(), "status {status:#x} after {:?}", said.last());
    continues(&before, &after, steps);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

/// What works for root works for an ordinary user: runs this program's other tests again in
/// processes of one.
pub fn as_an_ordinary_user() {
    // SAFETY: geteuid takes no arguments and only returns a number.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let _alone = alone_for(Duration::from_secs(900));
    let mut tests = Command::new("setpriv");
    tests.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
    let state = Folder::new("state");
    std::fs::set_permissions(state.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    tests.arg(std::env::current_exe().unwrap()).env("TMPDIR", "/tmp");
    tests.env("XDG_STATE_HOME", state.path("own")).env(kedge_left_out::BY_ROOT_TOO, "1");
    let output = tests.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{wrong}");
}

/// Removes what a killed job has left of System V IPC, by the keys that all tests use: nobody else
/// does, and nothing of it may be needed.
pub fn remove_left_behind() {
    for (table, option) in [("shm", "-m"), ("sem", "-s"), ("msg", "-q")] {
        let rows = std::fs::read_to_string(format!("/proc/sysvipc/{table}")).unwrap();
        for row in rows.lines().skip(1) {
            let words: Vec<&str> = row.split_whitespace().collect();
            let key: i32 = words[0].parse().unwrap();
            if key & !0xff == 0x6b65_6400 {
                assert!(Command::new("ipcrm").args([option, words[1]]).status().unwrap().success());
            }
        }
    }
}
