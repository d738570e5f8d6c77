//! Which of two proxies has a client, as the supervisor has written it down. It is read where the
//! supervisor is gone before it has told both.

use std::path::PathBuf;

/// The supervisor's file, and what it says once the new proxy has the client.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    file: PathBuf,
    token: String,
}

impl Owner {
    pub(crate) fn new(file: String, token: String) -> Owner {
        Owner { file: file.into(), token }
    }

    /// Returns whether the client has moved. The file is replaced as a whole: it says one or the
    /// other.
    pub(crate) fn has_moved(&self) -> bool {
        std::fs::read_to_string(&self.file).is_ok_and(|said| said == self.token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_of_this_move_counts() {
        let file = std::env::temp_dir().join(format!("kedge-owner-{}", std::process::id()));
        let owner = Owner::new(file.display().to_string(), "b".into());
        assert!(!owner.has_moved(), "there is no file");
        std::fs::write(&file, "a").unwrap();
        assert!(!owner.has_moved(), "an earlier move");
        std::fs::write(&file, "b").unwrap();
        assert!(owner.has_moved());
        std::fs::remove_file(file).unwrap();
    }
}
