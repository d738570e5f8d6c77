//! The launcher of a parallel program (mpirun and its like) that has started kedge: it is outside
//! of the job, and a program that is connected to it cannot go on without it. Such a connection is
//! refused before anything is stopped.

use kedge_process::plugins::{Claim, Found, Job, Plugin};
use rustix::net::getpeername;
use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;

/// PMIx (Open MPI, Slurm): `NAMESPACE.RANK;tcp4://ADDRESS:PORT`, one variable for each version of
/// its protocol.
const PMIX: &str = "PMIX_SERVER_URI";
/// PMI (MPICH, Intel MPI, Slurm): the number of a descriptor that is connected to the launcher.
const PMI: &str = "PMI_FD";

/// How a launcher is reached.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reached {
    addresses: Vec<SocketAddr>,
    /// Device and inode of an inherited socket.
    socket: Option<(u64, u64)>,
}

impl Reached {
    /// As these variables tell.
    fn of(variables: impl Iterator<Item = (OsString, OsString)>) -> Reached {
        let mut reached = Reached::default();
        for (name, value) in variables {
            let (Some(name), Some(value)) = (name.to_str(), value.to_str()) else { continue };
            if name.starts_with(PMIX) {
                reached.addresses.extend(address(value));
            } else if name == PMI {
                reached.socket = inherited(value);
            }
        }
        reached
    }

    fn is_by(&self, file: &Found, job: &Job) -> bool {
        let Some(kind) = file.socket else { return false };
        if self.socket == Some((file.stat.device, file.stat.inode)) {
            return true;
        }
        let inet = matches!(kind.domain, libc::AF_INET | libc::AF_INET6);
        if !inet || kind.kind != libc::SOCK_STREAM || self.addresses.is_empty() {
            return false;
        }
        let peer = job.duplicate(file).ok().and_then(|own| getpeername(own).ok().flatten());
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        peer.is_some_and(|peer| self.addresses.contains(&peer))
    }
}

/// Of PMIx's server.
fn address(value: &str) -> Option<SocketAddr> {
    let (_, uri) = value.split_once(';')?;
    let (_, address) = uri.split_once("://")?;
    address.parse().ok()
}

/// The socket that this process has inherited under that number.
fn inherited(number: &str) -> Option<(u64, u64)> {
    let number: u32 = number.parse().ok()?;
    let file = fs::metadata(format!("/proc/self/fd/{number}")).ok()?;
    Some((file.dev(), file.ino()))
}

/// Refuses connections to the launcher, and takes nothing.
#[derive(Debug)]
pub(crate) struct Launcher(Reached);

impl Launcher {
    /// Returns the one that this process's environment tells of.
    pub(crate) fn here() -> Launcher {
        Launcher(Reached::of(std::env::vars_os()))
    }
}

impl Plugin for Launcher {
    fn name(&self) -> &'static str {
        "launcher"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        if !self.0.is_by(file, job) {
            return Claim::No;
        }
        Claim::Refused(
            "it leads to the launcher that has started kedge (mpirun or its like), outside of the job, without which a \
             restarted program ends: let kedge start the launcher (`kedge run -- mpirun …`)"
                .to_owned(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn launchers_are_found_by_what_they_tell() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let number = socket.as_raw_fd().to_string();
        let told = [
            ("PMIX_SERVER_URI2", "17.0;tcp4://127.0.0.1:4711"),
            ("PMIX_SERVER_URI41", "17.0;tcp6://[::1]:4712"),
            ("PMIX_SERVER_URI3", "17.0;usock:/tmp/x"),
            ("PMIX_RANK", "3"),
            ("PMI_FD", &number),
        ];
        let variables = told.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        let reached = Reached::of(variables);
        let addresses = ["127.0.0.1:4711", "[::1]:4712"].map(|text| text.parse().unwrap());
        assert_eq!(reached.addresses, addresses);
        let own = fs::metadata(format!("/proc/self/fd/{number}")).unwrap();
        assert_eq!(reached.socket, Some((own.dev(), own.ino())));
        let none = [("PMI_FD", "-1"), ("PMIX_SERVER_URI2", "tcp4://"), ("PATH", "/bin")];
        let variables = none.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        assert_eq!(Reached::of(variables), Reached::default());
    }
}
