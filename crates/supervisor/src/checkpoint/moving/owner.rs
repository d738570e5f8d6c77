//! The one write that decides a move: which proxy has a client. Both proxies read it where this
//! process is gone before it has told them.

use kedge_control::proxy::MOVED;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

/// A file in memory, which lasts as long as this process or one of the proxies does: it decides
/// nothing that outlives them.
#[derive(Debug)]
pub(super) struct Owner(File);

impl Owner {
    /// Of a move that begins now: no other one has this file.
    pub(super) fn new() -> io::Result<Owner> {
        Ok(Owner(memfd_create("kedge-owner", MemfdFlags::CLOEXEC)?.into()))
    }

    /// The client has moved: from here on nobody takes that back. A single byte is written as a
    /// whole or not at all.
    pub(super) fn write(&self) -> io::Result<()> {
        self.0.write_all_at(&[MOVED], 0)
    }
}

impl AsFd for Owner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_decides_for_itself_alone() {
        let (first, second) = (Owner::new().unwrap(), Owner::new().unwrap());
        let said = |owner: &Owner| {
            let mut said = [0; 2];
            let count = owner.0.read_at(&mut said, 0).unwrap();
            said[..count].to_vec()
        };
        assert!(said(&first).is_empty());
        first.write().unwrap();
        assert_eq!(said(&first), [MOVED]);
        assert!(said(&second).is_empty());
    }
}
