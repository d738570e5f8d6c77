//! Stand-ins for descriptors of device memory that lies on another machine.
//!
//! A stand-in is a sealed file in memory that holds the name by which proxies there find the memory
//! (`kedge_control::peer`). A program passes it on as it would pass the memory's own descriptor.

use kedge_protocol::PeerName;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Begins a stand-in.
const MAGIC: [u8; 8] = *b"kedgefd1";
/// Bytes of a stand-in.
const LEN: usize = 40;

fn all_seals() -> SealFlags {
    SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE
}

/// Makes a stand-in for the memory that has this name.
pub(super) fn make(name: &PeerName) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("kedge-far", flags)?);
    file.write_all(&[&MAGIC[..], &name.proxy, &name.key].concat())?;
    fcntl_add_seals(&file, all_seals())?;
    Ok(file.into())
}

/// Returns the name in a stand-in; `None` for any other descriptor.
pub(super) fn read(fd: OwnedFd) -> Option<PeerName> {
    // Files in memory alone have seals. To read one takes no longer than to copy its bytes.
    if fcntl_get_seals(&fd).ok()? != all_seals() {
        return None;
    }
    let file = File::from(fd);
    let mut bytes = [0; LEN];
    if file.metadata().ok()?.len() != LEN as u64 || file.read_exact_at(&mut bytes, 0).is_err() {
        return None;
    }
    let (magic, names) = bytes.split_at(MAGIC.len());
    let (proxy, key) = names.split_at(16);
    let name = PeerName { proxy: proxy.try_into().ok()?, key: key.try_into().ok()? };
    (magic == MAGIC).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsealed(bytes: &[u8]) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("test", flags).unwrap());
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_stand_in_says_what_it_was_made_of() {
        let name = PeerName { proxy: [3; 16], key: [4; 16] };
        assert_eq!(read(make(&name).unwrap()), Some(name));
    }

    #[test]
    fn other_descriptors_are_none() {
        assert_eq!(read(io::pipe().unwrap().0.into()), None, "a pipe, which nobody writes");
        let good = [&MAGIC[..], &[7; 32]].concat();
        assert_eq!(read(unsealed(&good).into()), None, "its bytes may change");
        for bytes in [&good[..39], &[&good[..], &[0]].concat(), &[0; 40]] {
            let file = unsealed(bytes);
            fcntl_add_seals(&file, all_seals()).unwrap();
            assert_eq!(read(file.into()), None, "{bytes:?}");
        }
    }
}
