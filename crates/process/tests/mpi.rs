//! MPI jobs of four ranks on one host: launcher, daemons and ranks are captured at some moment, killed and brought back.

mod support;

use std::path::PathBuf;
use std::process::Command;
use support::survive::{as_an_ordinary_user, command_survives_for, installed};
use support::{Folder, alone};

/// Ranks that wait for each other without sleeping take long where cores are few.
const STEPS: usize = 120;

/// The program, built by that implementation's compiler.
fn build(folder: &Folder, compiler: &str) -> PathBuf {
    let (program, source) =
        (folder.path("mpi"), concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi.c"));
    let mut command = Command::new(compiler);
    let status = command.arg("-O1").arg("-o").arg(&program).arg(source).status();
    assert!(status.unwrap().success());
    program
}

/// `launcher` starts four ranks with that environment.
fn ranks_survive(name: &str, compiler: &str, launcher: &[&str]) {
    let _alone = alone();
    if installed(compiler) {
        let folder = Folder::new(name);
        let program = build(&folder, compiler);
        let home = format!("HOME={}", folder.path("").display());
        let mut command = vec!["/usr/bin/env", &home];
        command.extend(launcher);
        command.push(program.to_str().unwrap());
        command_survives_for(&folder, &command, STEPS);
    }
}

/// It takes two cores for too few, and root for a mistake.
const OPEN_MPI: [&str; 6] = [
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "mpirun.openmpi",
    "--oversubscribe",
    "-np",
    "4",
];

fn open_mpi_survives(name: &str, options: &[&str]) {
    ranks_survive(name, "mpicc.openmpi", &[&OPEN_MPI, options].concat());
}

#[test]
fn open_mpi_goes_on() {
    open_mpi_survives("openmpi", &[]);
}

#[test]
fn open_mpi_goes_on_over_tcp() {
    open_mpi_survives("openmpi-tcp", &["--mca", "btl", "self,tcp"]);
}

#[test]
fn mpich_goes_on() {
    ranks_survive("mpich", "mpicc.mpich", &["mpiexec.mpich", "-np", "4"]);
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
