//! Compiles the CUDA programs of `tests/programs` with stock nvcc and runs them: natively on a real
//! GPU, or under `kedge run`. Every program checks its own result, prints a line that starts with
//! `ok` last and exits with 0.
#![forbid(unsafe_code)]

mod build;
pub mod cached;
pub mod cluster;
mod directives;
pub mod disk;
pub mod gpu_steps;
mod hosts;
mod interrupted;
pub mod job;
mod moved;
pub mod mpi;
pub mod network;
pub mod offload;
pub mod place;
pub mod random;
pub mod relay;
pub mod remote;
mod run;
pub mod server;
pub mod slurm;
pub mod world;

pub use build::{BuildError, Toolchain};
pub use directives::{DirectiveError, Program};
pub use hosts::{copy_program, host};
pub use interrupted::run_interrupted;
pub use moved::{Journey, run_moved};
pub use run::{Outcome, Target, run, run_command};

use std::path::{Path, PathBuf};

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The `kedge` command of the optimised build, or the one that `KEDGE` names.
pub fn kedge() -> PathBuf {
    std::env::var_os("KEDGE").map_or_else(|| root().join("target/release/kedge"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_readme_shows_a_test_that_runs() {
        let shown = include_str!("../README.md");
        let runs = include_str!("../tests/gpu/readme.rs");
        assert!(shown.contains(runs), "tests/README.md and tests/tests/gpu/readme.rs differ");
    }
}
