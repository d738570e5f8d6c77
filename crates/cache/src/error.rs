//! The cache's errors, worded for people.

use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why the cache did not do what it was asked for.
#[derive(Debug, Error)]
pub enum CacheError {
    /// A system call failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried, such as "cannot open".
        what: &'static str,
        /// The path on which it was tried.
        path: PathBuf,
        /// The system call's error.
        source: io::Error,
    },
    /// Another daemon has the folder.
    #[error("{} is cached already; `kedge cache stop --under {}` ends that", .0.display(), .0.display())]
    Busy(PathBuf),
    /// No daemon has the folder.
    #[error("no cache runs under {}; `kedge cache start --under {}` starts one", .0.display(), .0.display())]
    NotRunning(PathBuf),
    /// A daemon was killed, and what it held is still there.
    #[error(
        "the cache of {} was killed and holds data; `kedge cache recover --under {}` writes it \
         below, `kedge cache start` goes on with it", .0.display(), .0.display()
    )]
    Killed(PathBuf),
    /// The file that describes the cache is damaged.
    #[error(
        "{}, which says what the cache was, is damaged ({why}); nothing was touched: `kedge cache \
         start` with the tiers that it had goes on with what they hold", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A tier's description is wrong, or the tier does not fit.
    #[error("{0}")]
    Tier(String),
    /// Data is left in the tiers.
    #[error("{0}")]
    Left(String),
    /// The daemon failed, or gave no proper answer.
    #[error("the cache's daemon under {}: {why}", under.display())]
    Daemon {
        /// The folder that is cached.
        under: PathBuf,
        /// Its own words, or what is wrong with its answer.
        why: String,
    },
}

impl CacheError {
    /// Creates the error of a failed system call.
    pub fn io(what: &'static str, path: &Path, source: impl Into<io::Error>) -> CacheError {
        CacheError::Io { what, path: path.to_owned(), source: source.into() }
    }
}
