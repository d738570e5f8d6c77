//! What can go wrong.

use crate::kernel::Feature;
use crate::plugins::PluginError;
use kedge_image::ImageError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum EngineError {
    #[error("process {pid}: cannot {what}: {source}")]
    System { pid: i32, what: &'static str, source: io::Error },
    #[error(
        "process or thread {id} of the job cannot have its old id, which {holder} has: try again"
    )]
    IdTaken { id: i32, holder: String },
    #[error("process {pid}: cannot map its memory, {mapping}: {source}")]
    Mapping { pid: i32, mapping: String, source: io::Error },
    #[error("process {pid} ended meanwhile")]
    Ended { pid: i32 },
    #[error(
        "process {pid} has no system call instruction in its vDSO: such a process cannot be entered"
    )]
    NoEntry { pid: i32 },
    #[error("process {pid} is traced by process {tracer}: end the debugger, then try again")]
    Traced { pid: i32, tracer: i32 },
    /// The kernel names no tracer that is outside of the job's own namespace of process ids.
    #[error(
        "process {pid}: cannot trace it: {source}; if a debugger has it, end that, then try again"
    )]
    Untraceable { pid: i32, source: io::Error },
    #[error(
        "thread {tid} of process {pid} did not stop in time (it is in state {state}): try again later"
    )]
    WouldNotStop { pid: i32, tid: i32, state: char },
    /// The clone that held its memory for an image is gone.
    #[error(
        "process {pid}: the copy of its memory was killed before it was written, most likely because memory ran out; \
         the job goes on: leave room for what the program changes meanwhile, at most {most} MiB, as much as it has"
    )]
    CopyKilled { pid: i32, most: u64 },
    #[error("the job is not made before its last image is here: {0}")]
    NoStandby(&'static str),
    #[error("no process of the job is left")]
    NoProcess,
    /// What the engine cannot save or bring back yet, by name.
    #[error("process {pid}: {what}")]
    Unsupported { pid: i32, what: String },
    #[error("process {pid}: its {file} in /proc is not as this kedge knows it: {what}")]
    Proc { pid: i32, file: &'static str, what: &'static str },
    #[error("{path}: cannot {what}: {source}")]
    File { path: PathBuf, what: &'static str, source: io::Error },
    #[error(
        "{path}: it is not the file that the program had mapped (its {what} differs): put the old one back"
    )]
    FileChanged { path: PathBuf, what: &'static str },
    #[error("this kernel has {0}; {remedy}", remedy = crate::kernel::remedy())]
    Kernel(Feature),
    #[error("this machine differs from the one that the image is from: {0}")]
    Machine(String),
    #[error(
        "the image is user {owner}'s, but says that its process {pid} had {what}, which this user has not: root does not restart it; its owner can"
    )]
    Claims { pid: i32, owner: u32, what: String },
    #[error("the image asks for what no program has: {0}")]
    Nonsense(&'static str),
    #[error(transparent)]
    Descriptors(#[from] PluginError),
    #[error(transparent)]
    Image(#[from] ImageError),
    /// What another part of the job says.
    #[error("{0}")]
    Together(String),
    #[error("the restart was given up")]
    GivenUp,
    /// What the restarted job's init says.
    #[error("{0}")]
    Init(String),
}

impl EngineError {
    pub(crate) fn last(pid: i32, what: &'static str) -> EngineError {
        EngineError::System { pid, what, source: io::Error::last_os_error() }
    }

    pub(crate) fn unsupported(pid: i32, what: impl Into<String>) -> EngineError {
        EngineError::Unsupported { pid, what: what.into() }
    }
}
