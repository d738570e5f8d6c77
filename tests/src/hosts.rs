//! Builds the helper programs of `tests/hosts` for the system tests.

use crate::{kedge, root};
use std::path::PathBuf;
use std::process::Command;

/// Compiles `tests/hosts/NAME` with nvcc or cc and `arguments`, and links what calls the driver itself with the
/// shim, which has the driver's name; panics with the compiler's output, as a test would.
pub fn host(source: &str, output: &str, arguments: &[&str]) -> PathBuf {
    let out = root().join("target/hosts");
    std::fs::create_dir_all(&out).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
    let binary = out.join(output);
    // Compiled beside and renamed: tests that run at once may build the same program.
    let fresh = out.join(format!("{output}.{:?}", std::thread::current().id()));
    let compiler = if source.ends_with(".c") {
        PathBuf::from("cc")
    } else {
        root().join(".tools/cu13/bin/nvcc")
    };
    let source_path = root().join("tests/hosts").join(source);
    let text = std::fs::read_to_string(&source_path).unwrap_or_default();
    let driver = text.contains("#include <cuda.h>");
    let driver = driver.then(|| kedge().with_file_name("libkedge_cuda.so"));
    let result = Command::new(&compiler)
        .arg("-o")
        .arg(&fresh)
        .arg(&source_path)
        .args(driver)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}: run `make setup`", compiler.display()));
    assert!(result.status.success(), "{source}: {}", String::from_utf8_lossy(&result.stderr));
    std::fs::rename(&fresh, &binary).unwrap_or_else(|error| panic!("{output}: {error}"));
    binary
}
