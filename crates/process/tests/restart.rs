//! Programs are captured at some moment and killed, and brought back from the image. Each draws a
//! nonce at its start, so that one which merely began anew is found out.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::alone::Alone;
use support::kernel::reaches_threads;
use support::survive::{
    as_an_ordinary_user, captured_again, command_survives, continues, installed, script_survives,
    steps_survive,
};
use support::{Folder, Running, alone, bring_back, build, step};

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

/// They get their memory side by side.
#[test]
fn forty_children_go_on_with_memory_of_their_own() {
    steps_survive("many", "many.c", &[]);
}

/// Which has ended by itself before the others: nothing can be asked of it.
#[test]
fn a_program_without_its_first_thread_goes_on() {
    if !reaches_threads() {
        return;
    }
    steps_survive("firstless", "firstless.c", &["-pthread"]);
}

/// By one that was let go already, while they are still traced: their parent must hear of it.
#[test]
fn processes_that_are_killed_as_they_come_back_are_collected() {
    steps_survive("killer", "killer.c", &["-pthread"]);
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
fn guards_come_back_from_a_clone() {
    let _alone = alone();
    let folder = Folder::new("guards");
    let program = build(&folder, "guards.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("450"));
    let before = running.lines(15);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let (after, status) = bring_back(&image);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
    assert!(step(&after[0]) > before.len() && after[0][..16] == before[0][..16], "{}", after[0]);
}

#[test]
fn mappings_of_all_kinds_come_back() {
    steps_survive("mappings", "mappings.c", &[]);
}

#[test]
fn memory_that_is_forbidden_for_a_moment_is_one_mapping_afterwards() {
    let _alone = alone();
    let folder = Folder::new("forbidden");
    let program = build(&folder, "forbidden.c", &[]);
    let mut running = Running::start(&mut std::process::Command::new(&program));
    assert_eq!(running.lines(1), ["forbidden errno 0"]);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let (said, status) = bring_back(&image);
    assert_eq!((said, libc::WEXITSTATUS(status)), (vec!["moved errno 0".to_owned()], 7));
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

/// Its heap is made of more runs of pages than the kernel tells at a time.
#[test]
fn ruby_goes_on() {
    script_survives("ruby", &["/usr/bin/ruby", "-e", include_str!("steps.rb")]);
}

#[test]
fn go_goes_on() {
    let alone = alone();
    if !installed("go") {
        return;
    }
    command_survives(&Folder::new("go"), &[build_go(&alone).to_str().unwrap()]);
}

/// Once for all: its library takes half a minute. Beside another test the compiler would be one of
/// that one's job.
fn build_go(_alone: &Alone) -> PathBuf {
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
    std::thread::sleep(Duration::from_secs(9));
    let (after, status) = bring_back(&image);
    continues(&before, &after, 300);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

/// A job that was restarted is captured again, by its init, and restarted once more.
#[test]
fn a_restarted_job_can_be_captured_again() {
    captured_again("again", "threads.c");
}

#[test]
fn a_restarted_program_without_its_first_thread_can_be_captured_again() {
    if !reaches_threads() {
        return;
    }
    captured_again("firstless-again", "firstless.c");
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    if installed("go") {
        build_go(&alone());
    }
    as_an_ordinary_user();
}
