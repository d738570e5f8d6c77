//! The names of Unix sockets: paths, absolute or not, and abstract ones.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::path::SavedPath;
use crate::plugins::reach;
use crate::plugins::sys::{There, there};
use crate::plugins::world::World;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    socket_with,
};
use rustix::process::{getegid, geteuid};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Name {
    Path(SavedPath),
    Abstract(Vec<u8>),
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Name::Path(path) => write!(f, "{}", path.0.display()),
            Name::Abstract(name) => write!(f, "@{}", String::from_utf8_lossy(name)),
        }
    }
}

impl Name {
    /// `None`: it has no name.
    pub(super) fn of(address: SocketAddrAny) -> Option<Name> {
        let address = SocketAddrUnix::try_from(address).ok()?;
        if let Some(name) = address.abstract_name() {
            return (!name.is_empty()).then(|| Name::Abstract(name.to_vec()));
        }
        let path = PathBuf::from(OsStr::from_bytes(address.path_bytes()?));
        Some(Name::Path(SavedPath(path)))
    }

    /// The file that it made, given where names without a slash in front are from.
    pub(super) fn file(&self, folder: &Path) -> Option<PathBuf> {
        match self {
            Name::Path(path) => Some(folder.join(&path.0)),
            Name::Abstract(_) => None,
        }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Name::Path(path) => Some(&path.0),
            Name::Abstract(_) => None,
        }
    }

    /// As it was.
    pub(super) fn raw(&self) -> io::Result<SocketAddrUnix> {
        Ok(match self {
            Name::Path(path) => SocketAddrUnix::new(&path.0)?,
            Name::Abstract(name) => SocketAddrUnix::new_abstract_name(name)?,
        })
    }

    /// As it is to be used now, and the directory to use it in.
    fn here(&self, folder: &Path, world: &World) -> io::Result<(SocketAddrUnix, Option<PathBuf>)> {
        Ok(match self {
            Name::Abstract(name) => (SocketAddrUnix::new_abstract_name(name)?, None),
            Name::Path(path) if path.0.is_absolute() => {
                (SocketAddrUnix::new(world.path(&path.0))?, None)
            }
            Name::Path(path) => (SocketAddrUnix::new(&path.0)?, Some(world.path(folder))),
        })
    }

    /// Does `what` where this name means what it meant.
    pub(super) fn address(
        &self,
        folder: &Path,
        world: &World,
        what: impl FnOnce(&SocketAddrUnix) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        self.address_as(None, folder, world, what)
    }

    fn address_as(
        &self,
        owner: Option<(u32, u32)>,
        folder: &Path,
        world: &World,
        what: impl FnOnce(&SocketAddrUnix) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        let (address, directory) = self.here(folder, world)?;
        if owner.is_none() && directory.is_none() {
            return what(&address);
        }
        there(There { root: None, folder: directory.as_deref(), owner }, || what(&address))
    }

    /// Connects, without waiting.
    pub(super) fn connect(
        &self,
        fd: impl AsFd + Sync,
        folder: &Path,
        world: &World,
    ) -> io::Result<()> {
        self.address(folder, world, |address| Ok(connect(&fd, address)?))
    }

    /// Gives `fd` this name, and the file that it makes these permissions and this owner, by whose
    /// own rights it is made. A file that was left by a socket which is gone gives way.
    pub(super) fn bind(
        &self,
        fd: &OwnedFd,
        permissions: u32,
        owner: Option<(u32, u32)>,
        folder: &Path,
        world: &mut World,
    ) -> Result<(), PluginError> {
        let file = self.file(&world.path(folder)).map(|file| world.path(&file));
        if let Some(file) = &file {
            world.make_folders(file)?;
            let folder_of = file.parent().unwrap_or(Path::new("/"));
            reach::find(folder_of, true).to(|| format!("give a socket the name {self}"))?;
            self.give_way(file, folder, world)?;
            world.changes.binds(file)?;
        }
        let what = || format!("give a socket the name {self}");
        // The file gets the mode that the socket itself has.
        let mode = fchmod(fd, Mode::from_raw_mode(permissions & 0o777));
        mode.to(what)?;
        let owner = owner.or_else(|| Some((geteuid().as_raw(), getegid().as_raw())));
        self.address_as(owner, folder, world, |address| Ok(bind(fd, address)?)).to(what)?;
        if let Some(file) = file {
            world.changes.bound(&file)?;
        }
        Ok(())
    }

    fn give_way(&self, file: &Path, folder: &Path, world: &mut World) -> Result<(), PluginError> {
        let Ok(metadata) = fs::symlink_metadata(file) else { return Ok(()) };
        let refused = |what: &str| {
            Err(PluginError::Refused(format!("{}: {what}; move it away", file.display())))
        };
        if !metadata.file_type().is_socket() {
            return refused("there is a file where the job had a socket");
        }
        for kind in [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET] {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let probe =
                socket_with(AddressFamily::UNIX, kind, flags, None).to(|| "make a socket")?;
            match self.connect(&probe, folder, world) {
                Err(e) if e.raw_os_error() == Some(Errno::PROTOTYPE.raw_os_error()) => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    return world.changes.put_away(file);
                }
                _ => return refused("somebody listens there"),
            }
        }
        refused("somebody has a socket there")
    }
}
