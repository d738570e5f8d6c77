//! Tasks of the repository: `cargo xtask help`.

mod circles;
mod codegen;
mod columns;
mod features;
mod implement;
mod layering;
mod links;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask codegen [--check]
    Writes what is generated from api/: the shim's exports and cuGetProcAddress table,
    docs/support.md and api/conformance.txt. --check fails where a file is stale instead.
cargo xtask implement CLASS GATE SYMBOL...
    Sets the class (local, post, call, custom, unsupported) and gate (none, init, healthy) of
    symbols in api/functions.txt, then generates.
cargo xtask layering
    Checks the crates' dependencies against the layers of ARCHITECTURE.md, and that no modules of
    a crate need each other but those that circles.txt allows.
cargo xtask features
    Checks that tests have each crate with the features that programs have it with.
cargo xtask columns
    Checks that comments and Markdown wrap at 100 columns.
cargo xtask links
    Checks that links between the repository's pages lead to a file, and to a heading of it.
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args.as_slice() {
        ["codegen"] => codegen::write(&root()),
        ["codegen", "--check"] => codegen::check(&root()),
        ["implement", class, gate, symbols @ ..] if !symbols.is_empty() => {
            implement::run(&root(), class, gate, symbols).and_then(|()| codegen::write(&root()))
        }
        ["layering"] => layering::check(&root()).map_err(Into::into),
        ["features"] => features::check(&root()).map_err(Into::into),
        ["columns"] => columns::check(&root()).map_err(Into::into),
        ["links"] => links::check(&root()).map_err(Into::into),
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root: this package lies directly in it.
fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_owned()
}
