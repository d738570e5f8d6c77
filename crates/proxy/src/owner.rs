//! Which of two proxies has a client, as the supervisor has written it down. It is read where the
//! supervisor is gone before it has told both.

use kedge_control::proxy::MOVED;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The supervisor's file, which both proxies of one move have: it is in memory and has no name.
#[derive(Debug, Clone)]
pub(crate) struct Owner(Arc<File>);

impl Owner {
    /// Returns `None` of what is no regular file: to read it might wait.
    pub(crate) fn new(file: OwnedFd) -> Option<Owner> {
        let file = File::from(file);
        file.metadata().is_ok_and(|found| found.is_file()).then(|| Owner(Arc::new(file)))
    }

    /// Returns whether the client has moved. One byte is there or not: both proxies read the same.
    pub(crate) fn has_moved(&self) -> bool {
        let mut said = [0];
        self.0.read_exact_at(&mut said, 0).is_ok() && said == [MOVED]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_moved_once_that_is_written() {
        let file =
            File::from(rustix::fs::memfd_create("owner", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let owner = Owner::new(file.try_clone().unwrap().into()).unwrap();
        assert!(!owner.has_moved(), "nothing is written");
        file.write_all_at(b"x", 0).unwrap();
        assert!(!owner.has_moved(), "something else is");
        file.write_all_at(&[MOVED], 0).unwrap();
        assert!(owner.has_moved() && owner.clone().has_moved());
    }

    #[test]
    fn what_is_no_regular_file_decides_nothing() {
        let (reading, _writing) = std::io::pipe().unwrap();
        assert!(Owner::new(reading.into()).is_none());
        assert!(Owner::new(File::open("/").unwrap().into()).is_none());
    }
}
