//! Programs that people run: databases, servers, editors, and languages with their ways to share
//! work.

mod support;

use kedge_left_out::left_out;
use std::fs;
use std::process::Command;
use support::survive::{as_an_ordinary_user, command_survives_for, installed};
use support::{Folder, alone};

const STEPS: usize = 150;
const PYTHON: &str = "/usr/bin/python3";
/// What the Python programs begin with.
const HEAD: &str = include_str!("programs/steps.py");

/// A Python program that gets a folder of its own, if all of `needs` are installed.
fn python_survives(name: &str, script: &str, needs: &[&str]) {
    let _alone = alone();
    if ![PYTHON].iter().chain(needs).all(|program| installed(program)) {
        return;
    }
    let folder = Folder::new(name);
    let (program, work) = (folder.path("program.py"), folder.path("work"));
    fs::write(&program, format!("{HEAD}\n{script}")).unwrap();
    fs::create_dir(&work).unwrap();
    let command = [PYTHON, program.to_str().unwrap(), work.to_str().unwrap()];
    command_survives_for(&folder, &command, STEPS);
}

#[test]
fn sqlite_goes_on_in_the_middle_of_a_transaction() {
    python_survives("sqlite", include_str!("programs/sqlite.py"), &[]);
}

/// With its own defaults: over io_uring, where the kernel lets it.
#[test]
fn mariadb_goes_on_in_the_middle_of_a_transaction() {
    let script = concat!(include_str!("programs/asked.py"), include_str!("programs/mariadb.py"));
    python_survives("mariadb", script, &["mariadbd", "mariadb-install-db", "mariadb"]);
}

/// Run by root, it drops root's rights: PostgreSQL refuses them.
#[test]
fn postgresql_goes_on_in_the_middle_of_a_transaction() {
    let folders = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    if !folders.map(|folder| folder.path().join("bin/postgres")).any(|program| program.exists()) {
        return left_out("PostgreSQL", "it is not installed: scripts/setup --tests");
    }
    let script = concat!(include_str!("programs/asked.py"), include_str!("programs/postgres.py"));
    python_survives("postgres", script, &[]);
}

#[test]
fn nginx_goes_on_with_its_clients() {
    python_survives("nginx", include_str!("programs/nginx.py"), &["nginx"]);
}

#[test]
fn tmux_and_vim_go_on_on_their_terminals() {
    python_survives("terminal", include_str!("programs/terminal.py"), &["tmux", "vim"]);
}

#[test]
fn python_processes_go_on() {
    python_survives("processes", include_str!("programs/processes.py"), &[]);
}

#[test]
fn numpy_goes_on() {
    let there = || {
        // Not beside another test, whose job it would seem to be of.
        let _alone = alone();
        let numpy = Command::new(PYTHON).args(["-c", "import numpy"]).output();
        numpy.is_ok_and(|output| output.status.success())
    };
    if there() {
        python_survives("numpy", include_str!("programs/numbers.py"), &[]);
    } else {
        left_out("NumPy", "it is not installed: scripts/setup --tests");
    }
}

/// A script of another language, under its interpreter.
fn script_survives(name: &str, script: &str, interpreter: &[&str]) {
    let _alone = alone();
    if installed(interpreter[0]) {
        let folder = Folder::new(name);
        let program = folder.path(name);
        fs::write(&program, script).unwrap();
        let command = [interpreter, &[program.to_str().unwrap()]].concat();
        command_survives_for(&folder, &command, STEPS);
    }
}

#[test]
fn r_goes_on() {
    script_survives("steps.R", include_str!("programs/steps.R"), &["Rscript", "--vanilla"]);
}

#[test]
fn octave_goes_on() {
    let octave = ["octave-cli", "--no-gui", "--norc", "--quiet"];
    script_survives("steps.m", include_str!("programs/steps.m"), &octave);
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
