//! What is generated from the table.

mod exports;
mod procs;
mod support;

use crate::table::{self, Types};
use std::error::Error;
use std::fs;
use std::path::Path;

const MARK: &str = "Generated from api/functions.txt by `cargo xtask codegen`; do not edit.";

type File = (&'static str, String);

fn generate(root: &Path) -> Result<Vec<File>, Box<dyn Error>> {
    let functions = table::load(root)?;
    let types = Types::load(root)?;
    Ok(vec![
        ("crates/shim/src/generated/exports.rs", exports::generate(&functions, &types)?),
        ("crates/shim/src/generated/procs.rs", procs::generate(&functions)),
        ("docs/support.md", support::page(&functions)),
        ("api/conformance.txt", support::conformance(&functions)),
    ])
}

pub(crate) fn write(root: &Path) -> Result<(), Box<dyn Error>> {
    for (path, content) in generate(root)? {
        let path = root.join(path);
        // An unchanged file keeps its time, so that nothing is rebuilt for it.
        if fs::read_to_string(&path).ok().as_ref() != Some(&content) {
            fs::write(path, content)?;
        }
    }
    Ok(())
}

pub(crate) fn check(root: &Path) -> Result<(), Box<dyn Error>> {
    let mut stale = Vec::new();
    for (path, content) in generate(root)? {
        if fs::read_to_string(root.join(path)).ok() != Some(content) {
            stale.push(path);
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    Err(format!("stale: {}; run `cargo xtask codegen` and commit", stale.join(", ")).into())
}
