//! The OpenACC and OpenMP programs of `tests/offload`, whose loops gcc compiles for GPUs. As CUDA
//! programs do, each checks its own result and prints a line that starts with `ok` last.

use crate::{Outcome, Program, root};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

const COMPILER: &str = "gcc";
/// What the compiler needs beside it for NVIDIA's GPUs.
const PART: &str = "accel/nvptx-none/mkoffload";

/// Runs each program of the folder by `run`, which is given its binary: whether any ran. Says that
/// they are left out where gcc has no compiler for GPUs.
///
/// # Panics
/// A program does not compile, or fails.
pub fn each(run: impl Fn(&Path, &Program) -> Outcome) -> bool {
    if let Err(why) = find_compiler() {
        kedge_left_out::left_out("OpenACC and OpenMP programs", &why);
        return false;
    }
    let folder = root().join("tests/offload");
    let files = fs::read_dir(&folder).expect("a folder of this repository").flatten();
    let mut sources: Vec<PathBuf> = files.map(|file| file.path()).collect();
    sources.retain(|path| path.extension().is_some_and(|end| end == "c" || end == "cpp"));
    sources.sort();
    assert!(!sources.is_empty(), "{} is empty", folder.display());
    for source in sources {
        let program = Program::load(&source).expect("a program of this repository");
        let outcome = run(&compile(&program), &program);
        let name = &program.name;
        assert_eq!(outcome.failure, None, "{name}: {}{}", outcome.stdout, outcome.stderr);
    }
    true
}

/// An error says what is missing.
fn find_compiler() -> Result<(), String> {
    let asked = Command::new(COMPILER).arg(format!("-print-file-name={PART}")).output();
    let asked = asked.map_err(|error| format!("{COMPILER}: {error}: scripts/setup --tests"))?;
    // It prints the name alone where it has no such file.
    match Path::new(String::from_utf8_lossy(&asked.stdout).trim()).is_absolute() {
        true => Ok(()),
        false => Err(format!("{COMPILER} has no {PART}: scripts/setup --tests")),
    }
}

/// The compiled program: once for each state of its sources.
fn compile(program: &Program) -> PathBuf {
    let cpp = program.source.extension().is_some_and(|end| end == "cpp");
    let (compiler, standard) = if cpp { ("g++", "-std=gnu++17") } else { (COMPILER, "-std=gnu17") };
    let header = program.source.with_file_name("check.h");
    let texts = [&program.source, &header].map(|path| fs::read(path).expect("a source"));
    let mut state = DefaultHasher::new();
    (compiler, standard, &program.build, texts).hash(&mut state);
    let out = root().join("target/offload").join(format!("{:016x}", state.finish()));
    let binary = out.join(&program.name);
    if binary.exists() {
        return binary;
    }
    fs::create_dir_all(&out).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
    // Compiled beside and linked: tests that run at once may build the same program.
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let fresh = out.join(format!("{}.{process}.{thread:?}", program.name));
    let result = Command::new(compiler)
        .args([standard, "-O2", "-foffload=nvptx-none", "-o"])
        .arg(&fresh)
        .args(&program.build)
        .arg(&program.source)
        .arg("-lm")
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}: scripts/setup --tests"));
    let said = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{}: {said}", program.name);
    match fs::hard_link(&fresh, &binary) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            panic!("{}: {error}", binary.display())
        }
        _ => fs::remove_file(&fresh).unwrap_or_else(|error| panic!("{error}")),
    }
    binary
}
