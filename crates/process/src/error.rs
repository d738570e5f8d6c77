//! What can go wrong.

use std::io;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum EngineError {
    #[error("process {pid}: cannot {what}: {source}")]
    System { pid: i32, what: &'static str, source: io::Error },
    #[error("process {pid} ended meanwhile")]
    Ended { pid: i32 },
    #[error(
        "process {pid} has no system call instruction in its vDSO: such a process cannot be entered"
    )]
    NoEntry { pid: i32 },
}
