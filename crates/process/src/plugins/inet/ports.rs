//! The ports of a job that ends.

use super::is_one;
use crate::plugins::sockets::Kind;
use crate::plugins::survey;
use rustix::fd::OwnedFd;
use rustix::net::sockopt;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::fs;

/// Has the TCP sockets of the process `pid`, which stands still and is about to be killed, leave
/// their ports to a restart: what is left of old connections in TIME-WAIT lets it have them at once
/// if, and only if, they had `SO_REUSEADDR`.
///
/// What cannot be reached is passed over: a restart then waits for TIME-WAIT's end, a minute at
/// most.
pub fn release_ports(pid: i32) {
    let Ok(process) = survey::process(pid) else { return };
    let Ok(entries) = fs::read_dir(format!("/proc/{}/fd", process.at)) else { return };
    for entry in entries.flatten() {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let (true, Some(number)) = (link.to_string_lossy().starts_with("socket:"), number) else {
            continue;
        };
        let fd = pidfd_getfd(&process.pidfd, number, PidfdGetfdFlags::empty());
        if let Some(fd) = fd.ok().filter(is_tcp) {
            let _ = sockopt::set_socket_reuseaddr(&fd, true);
        }
    }
}

fn is_tcp(fd: &OwnedFd) -> bool {
    Kind::of(fd).is_ok_and(|kind| is_one(kind) && kind.kind == libc::SOCK_STREAM)
}
