//! What can go wrong with a descriptor.

use kedge_image::ImageError;
use std::fmt;
use std::fs;
use std::io;
use thiserror::Error;

/// A descriptor that cannot be saved, found before anything is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub pid: i32,
    /// `None`: it concerns the process as a whole.
    pub fd: Option<i32>,
    /// What it is, as /proc names it.
    pub what: String,
    /// The plugin that would be needed, or what to do.
    pub remedy: String,
}

impl Refusal {
    /// Returns whether the descriptor is another one by now, or none.
    pub(crate) fn is_past(&self) -> bool {
        let Some(fd) = self.fd else { return false };
        let link = fs::read_link(format!("/proc/{}/fd/{fd}", self.pid));
        !link.is_ok_and(|link| link.to_string_lossy() == self.what)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        if let Some(fd) = self.fd {
            write!(f, ", descriptor {fd}")?;
        }
        write!(f, ": {} cannot be saved: {}", self.what, self.remedy)
    }
}

impl std::error::Error for Refusal {}

#[derive(Debug, Error)]
pub enum PluginError {
    #[error("cannot {what}: {source}")]
    System { what: String, source: io::Error },
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Nonsense in what was read back.
    #[error("the image's descriptors are damaged: {0}")]
    Damaged(String),
    #[error("the image's {plugin} are of version {found}; this kedge knows {known}")]
    Newer { plugin: String, found: u32, known: u32 },
    #[error("the image needs the plugin {0}, which this kedge does not have")]
    NoPlugin(String),
    /// What cannot be saved, or made again here; says what to do.
    #[error("{0}")]
    Refused(String),
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Survey(Vec<Refusal>),
}

/// Says what was tried.
pub(crate) trait Context<T> {
    fn to<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T, PluginError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn to<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T, PluginError> {
        self.map_err(|e| PluginError::System { what: what().into(), source: e.into() })
    }
}

pub(crate) fn damaged(what: impl Into<String>) -> PluginError {
    PluginError::Damaged(what.into())
}
