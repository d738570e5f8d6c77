//! The one durable write of a move: which proxy has a client. Both proxies read it where this
//! process is gone before it has told them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The file in the job's folder.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) file: PathBuf,
    /// What no other move writes there.
    pub(super) token: String,
}

impl Owner {
    /// Of a move that begins now, the only one of the job.
    pub(super) fn new(folder: &Path) -> Owner {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let token = format!("{:x}-{:x}", std::process::id(), now.as_nanos());
        Owner { file: folder.join("owner"), token }
    }

    /// The client has moved: from here on nobody takes that back.
    pub(super) fn write(&self) -> io::Result<()> {
        let new = self.file.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(self.token.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_move_has_another_token() {
        let folder = std::env::temp_dir().join(format!("kedge-owners-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let said = |owner: &Owner| fs::read_to_string(&owner.file).unwrap();
        let first = Owner::new(&folder);
        first.write().unwrap();
        assert_eq!(said(&first), first.token);
        let second = Owner::new(&folder);
        assert_ne!(second.token, first.token);
        second.write().unwrap();
        assert_eq!(said(&first), second.token);
        fs::remove_dir_all(folder).unwrap();
    }
}
