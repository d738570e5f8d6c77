//! The caches on this machine that a user may ask: the own ones, and for root everybody's.

use crate::CacheError;
use crate::control::{Answer, Ask, SOCKET, ask, ask_at};
use crate::home;
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A cache that can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Whose daemon it is.
    pub user: u32,
    /// The folder that is cached, or for another user's the home in which its socket is.
    pub at: PathBuf,
}

impl Place {
    /// Asks the daemon.
    ///
    /// # Errors
    /// If no daemon runs there, another user answers, or it could not do what it was asked.
    pub fn ask(&self, what: Ask) -> Result<Answer, CacheError> {
        if self.user == rustix::process::geteuid().as_raw() {
            return ask(&self.at, what);
        }
        let failed = |error| CacheError::io("cannot ask the cache at", &self.at, error);
        let stream = connect(&self.at, self.user).map_err(failed)?;
        ask_at(stream, &self.at, what)
    }
}

/// Connects the daemon of `user`. The name of its socket may be a link to anybody's: root's words
/// are for that user's processes alone.
fn connect(home: &Path, user: u32) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(home.join(SOCKET))?;
    if socket_peercred(&stream)?.uid.as_raw() != user {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user answers there"));
    }
    Ok(stream)
}

/// Returns the caches of this user, of daemons that run or were killed, and for root those of
/// other users after them.
pub fn places() -> Vec<Place> {
    let own = rustix::process::geteuid();
    let mut all: Vec<Place> =
        home::folders().into_iter().map(|at| Place { user: own.as_raw(), at }).collect();
    if own.is_root() {
        all.extend(home::of_others().into_iter().map(|(user, at)| Place { user, at }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::Scratch;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_of_somebody_else_is_told_nothing() {
        let scratch = Scratch::new("places");
        let own = rustix::process::geteuid().as_raw();
        let _listens = UnixListener::bind(scratch.0.join(SOCKET)).expect("a socket");
        connect(&scratch.0, own).expect("it is ours");
        let refused = connect(&scratch.0, own + 1).expect_err("it is no one else's");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }
}
