//! Whose a connection of this machine is: TCP does not tell, the kernel's table does.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};

/// Whose the other end of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// This user's, or root's.
    Own,
    /// Of another user.
    Another,
    /// It is closed already.
    Nobodys,
}

/// Returns whose the other end of a connection is.
///
/// # Errors
/// The kernel does not tell.
pub fn whose(stream: &TcpStream) -> io::Result<Whose> {
    // Where both kinds are listened for, one end of an IPv4 connection has addresses of IPv6.
    let (theirs, ours) = (plain(stream.peer_addr()?), plain(stream.local_addr()?));
    let table = if theirs.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
    let own = rustix::process::getuid().as_raw();
    let owner = owner(&std::fs::read_to_string(table)?, theirs, ours);
    Ok(match owner {
        Some(uid) if uid == own || uid == 0 => Whose::Own,
        Some(_) => Whose::Another,
        None => Whose::Nobodys,
    })
}

/// A connection's state that is open on both sides, as the table has it.
const ESTABLISHED: &str = "01";

/// Returns an address of IPv4 as one of IPv4.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Returns the user of the socket at `theirs` that is connected to `ours`, in the kernel's table.
fn owner(table: &str, theirs: SocketAddr, ours: SocketAddr) -> Option<u32> {
    let (theirs, ours) = (written(theirs), written(ours));
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let found = fields.nth(1)? == theirs && fields.next()? == ours;
        // A socket that its process has closed is nobody's, and the table says 0 of it, as of root.
        let open = fields.next()? == ESTABLISHED;
        let uid = fields.nth(3)?.parse().ok();
        let inode = fields.nth(1)?;
        (found && open && inode != "0").then_some(uid)?
    })
}

/// Returns an address as the table has it: words of the machine's byte order, in hexadecimal.
fn written(address: SocketAddr) -> String {
    let word = |bytes: &[u8; 4]| format!("{:08X}", u32::from_ne_bytes(*bytes));
    let ip = match address.ip() {
        IpAddr::V4(ip) => word(&ip.octets()),
        IpAddr::V6(ip) => ip.octets().as_chunks::<4>().0.iter().map(word).collect(),
    };
    format!("{ip}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn ones_own_connection_is_ones_own() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                assert!(address.starts_with('['), "no loopback");
                continue;
            };
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            assert_eq!(whose(&stream).unwrap(), Whose::Own, "{address}");
        }
    }

    #[test]
    fn a_connection_to_a_socket_of_both_kinds_is_ones_own() {
        let Ok(listener) = TcpListener::bind("[::]:0") else { return };
        let port = listener.local_addr().unwrap().port();
        let _client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert_eq!(whose(&stream).unwrap(), Whose::Own);
    }

    #[test]
    fn the_table_names_users() {
        let row = |local: &str, remote: &str, state: &str, uid: u32| {
            let queues = "00000000:00000000 00:00000000 00000000";
            format!("   0: {local} {remote} {state} {queues}  {uid}        0 2 1\n")
        };
        let listens = row("0100007F:1D6B", "00000000:0000", "0A", 0);
        let client = row("0100007F:C350", "0100007F:1D6B", "01", 1001);
        let table = format!("  sl  local_address rem_address   st …\n{listens}{client}");
        let ours: SocketAddr = "127.0.0.1:7531".parse().unwrap();
        let at = |port: u16| owner(&table, SocketAddr::new(ours.ip(), port), ours);
        assert_eq!((at(50000), at(50001)), (Some(1001), None));
        // Closed by its process: no user's, though the table says 0.
        let gone = row("0100007F:C350", "0100007F:1D6B", "05", 0);
        assert_eq!(owner(&gone, SocketAddr::new(ours.ip(), 50000), ours), None);
        let orphan = client.replace("        0 2 1", "        0 0 1").replace("1001", "0");
        assert_eq!(owner(&orphan, SocketAddr::new(ours.ip(), 50000), ours), None);
    }
}
