//! Tells a service manager that a daemon is ready, or ends (sd_notify(3)): one datagram to the
//! socket that it has named.

use crate::output;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::Command;

/// The socket's path; behind `@`, its abstract name.
const SOCKET: &str = "NOTIFY_SOCKET";

/// The daemon does what it is for. `status` is for people.
pub(crate) fn ready(status: &str) {
    tell(&format!("READY=1\nSTATUS={}\n", output::harmless(status)));
}

/// What a command starts is no service of whoever started this process.
pub(crate) fn is_no_service(command: &mut Command) {
    command.env_remove(SOCKET);
}

/// It has been told to end, and may take a while.
pub(crate) fn stopping() {
    tell("STOPPING=1\n");
}

/// Nothing is lost where nobody listens: whoever started it sees that it runs.
fn tell(what: &str) {
    if let Some(socket) = std::env::var_os(SOCKET) {
        let _ = send(&socket, what);
    }
}

fn send(socket: &OsStr, what: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    // A manager that does not read holds no daemon up.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(what.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn managers_listen_at_paths_and_at_abstract_names() {
        let name = format!("kedge-ready-{}", std::process::id());
        let path: PathBuf = std::env::temp_dir().join(&name);
        let at_path = UnixDatagram::bind(&path).expect("a socket");
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let at_name = UnixDatagram::bind_addr(&address).expect("a socket");
        for (listener, socket) in
            [(at_path, path.clone().into_os_string()), (at_name, format!("@{name}").into())]
        {
            send(&socket, "READY=1\n").expect("sent");
            let mut read = [0; 64];
            let length = listener.recv(&mut read).expect("a datagram");
            assert_eq!(&read[..length], b"READY=1\n");
        }
        std::fs::remove_file(path).expect("the socket");
        assert!(send(OsStr::new("/nowhere"), "READY=1\n").is_err());
    }
}
