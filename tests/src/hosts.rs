//! Builds the helper programs of `tests/hosts` for the system tests.

use crate::{kedge, root};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles `tests/hosts/NAME` with nvcc or cc and `arguments`, and links what calls the driver
/// itself with the shim, which has the driver's name; panics with the compiler's output, as a test
/// would. Once for each state of its sources: most tests run the same few programs.
pub fn host(source: &str, output: &str, arguments: &[&str]) -> PathBuf {
    let source_path = root().join("tests/hosts").join(source);
    let compiler = if source.ends_with(".c") {
        PathBuf::from("cc")
    } else {
        root().join(".tools/cu13/bin/nvcc")
    };
    let text = fs::read_to_string(&source_path).unwrap_or_default();
    let driver = text.contains("#include <cuda.h>");
    let driver = driver.then(|| kedge().with_file_name("libkedge_cuda.so"));
    let mut state = DefaultHasher::new();
    (&compiler, &driver, arguments, &text, headers()).hash(&mut state);
    let out = root().join("target/hosts").join(format!("{:016x}", state.finish()));
    let binary = out.join(output);
    if binary.exists() {
        return binary;
    }
    fs::create_dir_all(&out).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
    // Compiled beside and linked: tests that run at once may build the same program.
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let fresh = out.join(format!("{output}.{process}.{thread:?}"));
    let result = Command::new(&compiler)
        .arg("-o")
        .arg(&fresh)
        .arg(&source_path)
        .args(driver)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}: run `make setup`", compiler.display()));
    assert!(result.status.success(), "{source}: {}", String::from_utf8_lossy(&result.stderr));
    // Whoever comes later leaves what there is: a job that runs it is restarted with this very file
    // alone.
    match fs::hard_link(&fresh, &binary) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{output}: {error}"),
        _ => fs::remove_file(&fresh).unwrap_or_else(|error| panic!("{output}: {error}")),
    }
    binary
}

/// Copies a program, by a process of its own: what a thread of ours has open for writing, children
/// that other threads fork meanwhile have too until they execute, and it cannot be run so long.
pub fn copy_program(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("--").args([from, to]).status().expect("cp");
    assert!(done.success(), "{} is no copy of {}", to.display(), from.display());
}

/// The contents of all headers that a helper program may include.
fn headers() -> Vec<Vec<u8>> {
    let folders = ["tests/hosts", "tests/programs"].map(|folder| root().join(folder));
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
    let mut paths: Vec<PathBuf> = files.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "h"));
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap_or_default()).collect()
}
