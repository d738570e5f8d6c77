//! A folder that counts as the root, where sockets get names whose files are gone, or are others'
//! by now.

use super::name::Name;
use crate::plugins::sys::{There, there};
use rustix::fd::OwnedFd;
use rustix::net::{SocketAddrUnix, bind, connect};
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, PathBuf};

/// Removed with all that is in it.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> io::Result<Scratch> {
        let name = format!("kedge-{:016x}", RandomState::new().build_hasher().finish());
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Scratch(path))
    }

    fn within<T: Send>(&self, what: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        there(There { root: Some(&self.0), ..There::default() }, what)
    }

    /// Gives `fd` this name.
    pub(super) fn bind(&self, fd: &OwnedFd, name: &Name) -> io::Result<()> {
        let Some(path) = name.path() else { return name.raw().and_then(|at| Ok(bind(fd, &at)?)) };
        let plain = path.components().filter(|part| matches!(part, Component::Normal(_)));
        let plain: PathBuf = plain.collect();
        if let Some(folder) = plain.parent() {
            fs::create_dir_all(self.0.join(folder))?;
        }
        let address = SocketAddrUnix::new(path)?;
        self.within(|| Ok(bind(fd, &address)?))
    }

    /// Connects to who has this name here, without waiting.
    pub(super) fn connect(&self, fd: &OwnedFd, name: &Name) -> io::Result<()> {
        self.address(name, |address| Ok(connect(fd, address)?))
    }

    /// Does `what` where this name is that of who has it here.
    pub(super) fn address(
        &self,
        name: &Name,
        what: impl FnOnce(&SocketAddrUnix) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        let address = name.raw()?;
        self.within(|| what(&address))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is an empty socket in a folder of temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::path::SavedPath;
    use rustix::net::{AddressFamily, SocketType, getsockname, socket};

    #[test]
    fn a_name_that_a_file_has_is_had_beside_it() {
        let scratch = Scratch::new().unwrap();
        let taken = scratch.0.join("taken");
        fs::write(&taken, "x").unwrap();
        let name = Name::Path(SavedPath(taken.clone()));
        let new = || socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
        let (bound, sender) = (new(), new());
        match scratch.bind(&bound, &name) {
            // An ordinary user is root nowhere but in a namespace of his own.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
            Ok(()) => {
                scratch.connect(&sender, &name).unwrap();
                assert_eq!(Name::of(getsockname(&bound).unwrap()), Some(name));
                rustix::io::write(&sender, b"text").unwrap();
                let mut text = [0; 8];
                assert_eq!(rustix::io::read(&bound, &mut text).unwrap(), 4);
            }
        }
        assert_eq!(fs::read(&taken).unwrap(), b"x");
        drop(scratch);
        assert!(!taken.exists());
    }
}
