//! Programs whose vDSO is another kernel's, and kernels that let nobody move theirs.

mod support;

use kedge_left_out::left_out;
use kedge_process::{RestartOptions, restart};
use std::process::Command;
use support::survive::{as_an_ordinary_user, command_survives, continues, rounds, steps_survive};
use support::{Folder, Running, alone, bring_back, build, reap};

/// Set for a process of this program that has sealed its own vDSO, and that of all that it forks.
const SEALED: &str = "KEDGE_TEST_SEALED";

#[test]
fn another_kernels_vdso_leads_to_this_ones() {
    seal();
    steps_survive("vdso", "vdso.c", &["-pthread"]);
}

/// What has come back has one vDSO beside another: that is captured and brought back like any.
#[test]
fn it_does_so_again_and_again() {
    seal();
    let _alone = alone();
    let folder = Folder::new("vdsos");
    let program = build(&folder, "vdso.c", &["-pthread"]);
    let mut running = Running::start(Command::new(program).arg("300"));
    let before = running.lines(10);
    let mut image = folder.path("image-0");
    running.capture_and_kill(&image);
    for round in 1..3 {
        let next = folder.path(&format!("image-{round}"));
        support::capture_again(&image, &next);
        image = next;
    }
    let (after, status) = bring_back(&image);
    continues(&before, &after, 300);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

/// The program's own vDSO is the same; it cannot be where it was.
#[test]
fn a_sealed_vdso_stays_where_it_is() {
    if !seal() {
        return sealed("");
    }
    let _alone = alone();
    let folder = Folder::new("sealed");
    let program = build(&folder, "step.c", &[]);
    command_survives(&folder, &[program.to_str().unwrap()]);
}

/// Seals this process's, which nothing undoes, if this is a process that was started for that.
fn seal() -> bool {
    if std::env::var_os(SEALED).is_none() {
        return false;
    }
    const MSEAL: libc::c_long = 462;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.ends_with("[vdso]") || line.contains("[vvar")) {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        // SAFETY: sealing changes nothing but what can be done with the mappings later.
        assert_eq!(unsafe { libc::syscall(MSEAL, start, end - start, 0) }, 0, "{line}");
    }
    true
}

/// Runs this program's other tests in a process that has sealed its vDSO.
fn sealed(only: &str) {
    // SAFETY: mseal of no bytes touches no memory; it fails where there is no such call, and with
    // other flags than 0.
    let error = unsafe { libc::syscall(462, 0, 0, 1) };
    if error == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        return left_out("mseal", "this kernel has none (Linux 6.10)");
    }
    let _alone = alone();
    let mut tests = Command::new(std::env::current_exe().unwrap());
    let output = tests.arg(only).env(SEALED, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}

/// One that is no code of functions is refused, and nothing is left.
#[test]
fn a_vdso_without_functions_is_refused() {
    let _alone = alone();
    let folder = Folder::new("functions");
    let program = build(&folder, "vdso.c", &["-pthread", "-DWITHOUT_FUNCTIONS"]);
    let mut running = Running::start(Command::new(program).arg("100"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    for _ in 0..rounds() {
        let error = restart(&RestartOptions::new(image.clone()), |_| {}).unwrap_err().to_string();
        assert!(error.contains("table of functions") && error.contains("same kernel"), "{error}");
    }
    reap();
}

#[test]
fn ordinary_users_can_do_all_that() {
    if std::env::var_os(SEALED).is_none() {
        as_an_ordinary_user();
    }
}
