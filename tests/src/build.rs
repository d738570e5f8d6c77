//! Compiling a program with stock nvcc, once for each state of its sources.

use crate::{Program, kedge, root};
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
        std::fs::create_dir_all(out)
            .map_err(|source| BuildError::Io { what: out.display().to_string(), source })?;
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
        let stamp = self.out.join(format!("{}.stamp", program.name));
        let state = format!("{:x}", self.state(program)?);
        if binary.exists() && std::fs::read_to_string(&stamp).is_ok_and(|old| old == state) {
            return Ok(binary);
        }
        let flags = std::env::var("NVCC_FLAGS").unwrap_or_default();
        let output = Command::new(&self.nvcc)
            .args(["-std=c++17", "-O2", "-o"])
            .arg(&binary)
            .args(flags.split_whitespace())
            .arg(&program.source)
            .args(self.arguments(program))
            .output()
            .map_err(|source| BuildError::Io { what: self.nvcc.display().to_string(), source })?;
        if !output.status.success() {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            return Err(BuildError::Compiler { name: program.name.clone(), output: text });
        }
        std::fs::write(&stamp, state)
            .map_err(|source| BuildError::Io { what: stamp.display().to_string(), source })?;
        Ok(binary)
    }

    /// A hash of everything that the binary depends on: the folder's headers and helper files too.
    fn state(&self, program: &Program) -> Result<u64, BuildError> {
        let mut hasher = DefaultHasher::new();
        (&program.build, std::env::var("NVCC_FLAGS").ok(), &self.nvcc).hash(&mut hasher);
        let folder = program.source.parent().unwrap_or(Path::new("."));
        let io = |path: &Path| {
            let what = path.display().to_string();
            move |source| BuildError::Io { what, source }
        };
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

/// How to link the driver library: as `CUDA_LIBS` says, else kedge's, by the name that ld looks
/// for.
fn driver_library(out: &Path) -> Result<Vec<String>, BuildError> {
    if let Ok(libs) = std::env::var("CUDA_LIBS") {
        return Ok(libs.split_whitespace().map(str::to_owned).collect());
    }
    let folder = out.join("lib");
    let link = folder.join("libcuda.so");
    let io = |source| BuildError::Io { what: link.display().to_string(), source };
    std::fs::create_dir_all(&folder).map_err(io)?;
    if let Err(error) = std::fs::remove_file(&link)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(io(error));
    }
    let library = kedge().with_file_name("libkedge_cuda.so");
    std::os::unix::fs::symlink(library, &link).map_err(io)?;
    Ok(vec!["-lcuda".to_owned(), format!("-L{}", folder.display())])
}
