//! Compiling a program with stock nvcc, once for each state of its sources.

use crate::{Program, kedge, root};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum BuildError {
    #[error("no nvcc at {0}: run `make setup`, or set NVCC")]
    NoCompiler(PathBuf),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("nvcc failed on {name}:\n{output}")]
    Compiler { name: String, output: String },
}

/// An nvcc and a folder for what it makes.
#[derive(Debug, Clone)]
pub struct Toolchain {
    nvcc: PathBuf,
    out: PathBuf,
    /// Arguments that `{cuda}` stands for.
    cuda: Vec<String>,
}

impl Toolchain {
    /// The compiler that `NVCC` names, or the private one of `make setup`.
    pub fn find(out: &Path) -> Result<Self, BuildError> {
        let nvcc = std::env::var_os("NVCC")
            .map_or_else(|| root().join(".tools/cu13/bin/nvcc"), PathBuf::from);
        // A bare name is looked up in PATH when it runs.
        if nvcc.components().count() > 1 && !nvcc.exists() {
            return Err(BuildError::NoCompiler(nvcc));
        }
        std::fs::create_dir_all(out).map_err(io(out))?;
        let cuda = driver_library(out)?;
        Ok(Self { nvcc, out: out.to_owned(), cuda })
    }

    /// nvcc's further arguments, with what stands for the toolkit and the driver filled in.
    fn arguments(&self, program: &Program) -> Vec<String> {
        let toolkit =
            self.nvcc.parent().and_then(Path::parent).unwrap_or(Path::new("/usr/local/cuda"));
        let mut arguments = Vec::new();
        for word in &program.build {
            if word == "{cuda}" {
                arguments.extend(self.cuda.iter().cloned());
            } else {
                arguments.push(word.replace("{toolkit}", &toolkit.to_string_lossy()));
            }
        }
        arguments
    }

    /// The compiled program; a second call with unchanged sources compiles nothing.
    pub fn compile(&self, program: &Program) -> Result<PathBuf, BuildError> {
        let binary = self.out.join(&program.name);
        let [stamp, lock, fresh] =
            ["stamp", "lock", "new"].map(|end| self.out.join(format!("{}.{end}", program.name)));
        // Tests that run at once build the same program once: a job is restarted with the very file
        // that it ran.
        let lock_file = File::create(&lock).map_err(io(&lock))?;
        lock_file.lock().map_err(io(&lock))?;
        let state = format!("{:x}", self.state(program)?);
        if binary.exists() && std::fs::read_to_string(&stamp).is_ok_and(|old| old == state) {
            return Ok(binary);
        }
        let flags = std::env::var("NVCC_FLAGS").unwrap_or_default();
        let output = Command::new(&self.nvcc)
            .args(["-std=c++17", "-O2", "-o"])
            .arg(&fresh)
            .args(flags.split_whitespace())
            .arg(&program.source)
            .args(self.arguments(program))
            .output()
            .map_err(io(&self.nvcc))?;
        if !output.status.success() {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            return Err(BuildError::Compiler { name: program.name.clone(), output: text });
        }
        std::fs::rename(&fresh, &binary).map_err(io(&binary))?;
        std::fs::write(&stamp, state).map_err(io(&stamp))?;
        Ok(binary)
    }

    /// A hash of everything that the binary depends on: the folder's headers and helper files too.
    fn state(&self, program: &Program) -> Result<u64, BuildError> {
        let mut hasher = DefaultHasher::new();
        (&program.build, std::env::var("NVCC_FLAGS").ok(), &self.nvcc).hash(&mut hasher);
        let folder = program.source.parent().unwrap_or(Path::new("."));
        let mut inputs = vec![program.source.clone()];
        for entry in std::fs::read_dir(folder).map_err(io(folder))? {
            let path = entry.map_err(io(folder))?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
            if name.is_some_and(|n| n.starts_with('_') || n.ends_with(".h")) {
                inputs.push(path);
            }
        }
        inputs.sort();
        for path in inputs {
            std::fs::read(&path).map_err(io(&path))?.hash(&mut hasher);
        }
        Ok(hasher.finish())
    }
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> BuildError {
    let what = path.display().to_string();
    move |source| BuildError::Io { what, source }
}

/// How to link the driver library: as `CUDA_LIBS` says, else kedge's, by the name that ld looks
/// for.
fn driver_library(out: &Path) -> Result<Vec<String>, BuildError> {
    if let Ok(libs) = std::env::var("CUDA_LIBS") {
        return Ok(libs.split_whitespace().map(str::to_owned).collect());
    }
    let folder = out.join("lib");
    let link = folder.join("libcuda.so");
    std::fs::create_dir_all(&folder).map_err(io(&folder))?;
    let library = kedge().with_file_name("libkedge_cuda.so");
    // Renamed over what there is: an nvcc of another test may be looking for it.
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let fresh = folder.join(format!("libcuda.so.{process}.{thread:?}"));
    std::os::unix::fs::symlink(library, &fresh).map_err(io(&fresh))?;
    std::fs::rename(&fresh, &link).map_err(io(&link))?;
    Ok(vec!["-lcuda".to_owned(), format!("-L{}", folder.display())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn tests_that_run_at_once_build_a_program_once() {
        let out = std::env::temp_dir().join(format!("kedge-built-once-{}", std::process::id()));
        let program = Program::load(&root().join("tests/programs/vector_add.cu")).expect("it");
        let built = || {
            let toolchain = Toolchain::find(&out).expect("nvcc");
            let binary = toolchain.compile(&program).expect("it compiles");
            let file = std::fs::metadata(&binary).expect("a file");
            (file.ino(), file.len())
        };
        let all: Vec<(u64, u64)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(built)).collect();
            threads.into_iter().map(|thread| thread.join().expect("built")).collect()
        });
        std::fs::remove_dir_all(&out).expect("ours");
        assert!(all[0].1 > 0 && all.iter().all(|one| *one == all[0]), "{all:?}");
    }
}
