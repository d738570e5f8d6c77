//! The way without the kernel's help, against what the programs say themselves, and against what
//! the kernel tells where it does.

use super::*;
use crate::thread::Interrupted;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Program {
    child: Child,
    binary: PathBuf,
    /// Threads and the addresses of their areas, 0 for none.
    said: Vec<(pid_t, u64)>,
}

impl Program {
    /// Builds and starts `source`, and waits for so many lines of a thread and an address.
    fn start(source: &str, argument: &str, lines: usize) -> Program {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("kedge-rseq-{number}-{}", std::process::id());
        let binary = std::env::temp_dir().join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-pthread", "-D_GNU_SOURCE", "-o"]).arg(&binary).arg(source);
        assert!(compiler.status().expect("cc").success());
        let mut command = Command::new(&binary);
        if argument != "library" {
            command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        }
        let output = if lines == 0 { Stdio::null() } else { Stdio::piped() };
        let mut child = command.arg(argument).stdout(output).spawn().unwrap();
        let output = child.stdout.take().map(BufReader::new);
        let said = output.into_iter().flat_map(BufRead::lines).take(lines).map(|line| {
            let line = line.unwrap();
            let (tid, address) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            (tid.parse().unwrap(), u64::from_str_radix(address, 16).unwrap())
        });
        let said: Vec<_> = said.collect();
        assert_eq!(said.len(), lines, "{argument}");
        Program { child, binary, said }
    }

    fn pid(&self) -> pid_t {
        self.child.id() as pid_t
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let _ = std::fs::remove_file(&self.binary);
    }
}

/// What the threads of the program answer, by calls in a row or each with a stop of its own.
fn ask(program: &Program, in_rows: bool) -> Vec<Result<Registration, String>> {
    let pid = program.pid();
    let quiet = if in_rows { Some(libc::SIGURG) } else { None };
    let ways = Ways::of(pid).unwrap().with_quiet(quiet);
    let mut places = Places::among(pid, &maps::of(pid).unwrap());
    let mut answers = Vec::new();
    for (tid, _) in &program.said {
        let mut thread = Thread::stop(*tid).unwrap();
        let (home, mask) = (thread.home(), thread.mask());
        let answer = places.ask(&mut thread, &ways);
        assert_eq!(sys::words(&sys::registers(*tid).unwrap()), sys::words(&home));
        assert_eq!(sys::signal_mask(*tid).unwrap(), mask);
        if let (Some(told), Ok(answer)) = (told(*tid).unwrap(), &answer) {
            assert_eq!(*answer, told);
        }
        answers.push(answer.map_err(|error| error.to_string()));
        ways.close(std::iter::once(&mut thread)).unwrap();
    }
    answers
}

fn found(place: &str, in_rows: bool) {
    let program = Program::start("registrations.c", place, 2);
    let answers = ask(&program, in_rows);
    for ((tid, address), answer) in program.said.iter().zip(answers) {
        let answer = answer.unwrap_or_else(|error| panic!("{place}: {error}"));
        assert_eq!(answer.address, *address, "{place}, thread {tid}");
        if *address != 0 {
            assert_eq!((answer.length, answer.signature), (AREA as u32, SIGNATURE));
        }
    }
    // What was left in the vDSO would be taken for another kernel's.
    assert!(Ways::of(program.pid()).is_ok());
}

#[test]
fn a_thread_without_an_area_has_none() {
    found("none", true);
    found("none", false);
}

#[test]
fn the_c_librarys_area_is_found() {
    found("library", true);
    found("library", false);
}

#[test]
fn an_area_among_thread_local_variables_is_found() {
    found("local", true);
    found("local", false);
}

/// On the heap by calls in a row only: with two stops an address it would take too long.
#[test]
fn areas_at_odd_places_are_found() {
    found("static", true);
    found("static", false);
    found("heap", true);
}

#[test]
fn an_area_that_is_not_found_is_refused_by_name() {
    let far = Program::start("registrations.c", "far", 2);
    let signature = Program::start("registrations.c", "signature", 2);
    for (program, why) in [(&far, "at a place"), (&signature, "another signature")] {
        for answer in ask(program, true) {
            let error = answer.unwrap_err();
            assert!(error.contains(&program.pid().to_string()) && error.contains(why), "{error}");
        }
    }
    // Too many addresses for one by one.
    let odd = Program::start("registrations.c", "heap", 2);
    assert!(ask(&odd, false).into_iter().all(|answer| answer.unwrap_err().contains("at a place")));
}

/// What `refuse_untold` does before a job is stopped, which leaves all threads as they are.
#[test]
fn a_running_program_is_looked_at() {
    for (place, good) in [("library", true), ("static", true), ("far", false)] {
        let program = Program::start("registrations.c", place, 2);
        let looked = have_sought(program.pid());
        assert_eq!(looked.is_ok(), good, "{place}: {looked:?}");
        for (tid, _) in &program.said {
            let status = Status::of(*tid).unwrap();
            assert_eq!(status.decimal("TracerPid"), 0);
            assert_eq!(status.hex("SigBlk"), 0);
        }
    }
}

/// One that is nearly always inside of a sequence, with its area among its variables.
#[test]
fn the_sequence_of_an_untold_area_is_found() {
    let mut program = Program::start("rseq.c", "100000", 0);
    std::thread::sleep(Duration::from_millis(300));
    let (pid, mut inside, mut told_too) = (program.pid(), 0, 0);
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(3));
        // Not by Thread::stop: that has it go on by its abort handler already.
        drop(Interrupted::ask(pid).map(std::mem::forget));
        sys::wait(pid).unwrap();
        let registers = sys::registers(pid).unwrap();
        let abort = sequence::untold(pid, &registers);
        if told(pid).unwrap().is_some() {
            assert_eq!(abort, sequence::look(pid, &registers).1);
            told_too += 1;
        }
        inside += usize::from(abort.is_some());
        sys::request(libc::PTRACE_DETACH, pid, 0, "let it go").unwrap();
    }
    assert!(inside > 10, "{inside} of 50 stops were inside of a sequence");
    assert!(told_too == 50 || crate::kernel::release() < (5, 13), "{told_too}");
    assert!(program.child.try_wait().unwrap().is_none(), "it has ended");
}
