//! Tests have crates with the features that programs have them with. With others `cargo test`
//! builds these crates, and all that uses them, once more.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Fails with the crates that have other features where tests are built.
///
/// # Errors
/// Names each; or what `cargo tree` says that is wrong.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let (programs, tests) = (tree(root, "normal,build")?, tree(root, "normal,build,dev")?);
    match others(&programs, &tests).as_slice() {
        [] => Ok(()),
        others => Err(format!("with other features where tests are built:\n{}", others.join("\n"))),
    }
}

/// Returns what `cargo tree` prints with these edges.
fn tree(root: &Path, edges: &str) -> Result<String, String> {
    let format = ["--prefix", "none", "--format", "{p} [{f}]"];
    let mut tree = Command::new("cargo");
    tree.current_dir(root).args(["tree", "--workspace", "--locked", "--edges", edges]);
    let printed = tree.args(format).output().map_err(|error| format!("cargo tree: {error}"))?;
    match printed.status.success() {
        true => Ok(String::from_utf8_lossy(&printed.stdout).into_owned()),
        false => Err(format!("cargo tree: {}", String::from_utf8_lossy(&printed.stderr))),
    }
}

/// Returns the crates of the one tree that the other has not with the same features.
fn others<'a>(programs: &'a str, tests: &'a str) -> Vec<&'a str> {
    let crates = |tree: &'a str| -> BTreeSet<&'a str> {
        let lines = tree.lines().filter(|line| !line.is_empty());
        lines.map(|line| line.trim_end_matches(" (*)")).collect()
    };
    crates(programs).difference(&crates(tests)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_with_other_features_is_told() {
        let programs = "a v1.0 [x]\nb v1.0 []\n\na v1.0 [x] (*)\n";
        let tests = "a v1.0 [x]\nb v1.0 [y] (*)\nc v2.0 []\n";
        assert_eq!(others(programs, tests), ["b v1.0 []"]);
        assert!(others(programs, programs).is_empty());
    }
}
