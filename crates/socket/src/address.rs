//! Sockets at paths of any length: an address takes 107 bytes, and a longer one is reached by way
//! of its folder's descriptor.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Longest path in an address, in bytes, without its last zero (unix(7)).
const MAX_PATH_LEN: usize = 107;
/// Where this process's descriptors have names.
const DESCRIPTORS: &str = "/proc/self/fd";

/// Connects to the socket at `path`.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    by_short_path(path, |path| UnixStream::connect(path))
}

/// Makes a socket at `path` and listens there.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    by_short_path(path, |path| UnixListener::bind(path))
}

/// Whether `address`, as a socket tells it, is that of the socket at `path`. Of one that was
/// reached by its folder's descriptor only its name is known.
pub fn is_of(address: &Path, path: &Path) -> bool {
    let short = || address.starts_with(DESCRIPTORS) && address.file_name() == path.file_name();
    address == path || is_long(path) && short()
}

fn is_long(path: &Path) -> bool {
    path.as_os_str().len() > MAX_PATH_LEN
}

fn by_short_path<T>(path: &Path, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    if !is_long(path) {
        return act(path);
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let (folder, name) = path.parent().zip(path.file_name()).ok_or_else(invalid)?;
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let folder = OpenOptions::new().read(true).custom_flags(flags).open(folder)?;
    act(&Path::new(DESCRIPTORS).join(folder.as_raw_fd().to_string()).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Write};

    #[test]
    fn sockets_are_reached_at_paths_of_any_length() {
        for bytes in [10, 120, 240] {
            let root = std::env::temp_dir().join(format!("kaddress-{}", std::process::id()));
            let folder = root.join("x".repeat(bytes));
            fs::create_dir_all(&folder).unwrap();
            let path = folder.join("socket");
            let listener = listen(&path).unwrap();
            let mut near = connect(&path).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            near.write_all(b"x").unwrap();
            far.read_exact(&mut [0]).unwrap();
            let address = near.peer_addr().unwrap();
            assert!(is_of(address.as_pathname().unwrap(), &path));
            assert!(!is_of(address.as_pathname().unwrap(), &folder.join("control")));
            fs::remove_dir_all(&root).unwrap();
        }
        assert!(connect(Path::new("/nonexistent/socket")).is_err());
    }
}
