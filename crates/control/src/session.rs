//! Which session with a server of devices a proxy has: it says so in the job's folder, for whoever
//! has the session ended if the proxy cannot.

use kedge_cuda_types::arena::MAX_DEVICES;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Bytes of such a file.
const MAX: u64 = 4 << 10;

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarSession {
    /// As the user named it.
    pub server: String,
    /// What names it to the server.
    pub key: [u8; 16],
}

/// What each file's name begins with.
const PREFIX: &str = "session-";

/// Removes what proxies have said that are no more.
pub fn clear(folder: &Path) {
    for path in noted(folder) {
        let _ = fs::remove_file(path);
    }
}

/// Returns the files by which proxies say which sessions they have.
fn noted(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let noted = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    noted.map(|entry| entry.path())
}

/// Returns where the proxy with that process id says which session it has, with its number among
/// those that it has.
fn path(folder: &Path, proxy: u32, number: u32) -> PathBuf {
    match number {
        0 => folder.join(format!("{PREFIX}{proxy}")),
        _ => folder.join(format!("{PREFIX}{proxy}-{number}")),
    }
}

impl FarSession {
    /// Says that the proxy has it, as its session of that number, the first of which is 0.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn note(&self, folder: &Path, proxy: u32, number: u32) -> io::Result<()> {
        if number == 0 {
            // Of a process of the same id before.
            Self::take(folder, proxy);
        }
        let path = path(folder, proxy, number);
        // Of a process of the same id before.
        let _ = fs::remove_file(&path);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(&serde_json::to_vec(self)?)
    }

    /// Returns the sessions that the proxy had, once.
    pub fn take(folder: &Path, proxy: u32) -> Vec<FarSession> {
        let files = (0..MAX_DEVICES).map(|number| path(folder, proxy, number));
        files.map_while(|path| Self::take_one(&path)).flatten().collect()
    }

    /// Returns the sessions that all proxies of a job had, once.
    pub fn take_all(folder: &Path) -> Vec<FarSession> {
        noted(folder).filter_map(|path| Self::take_one(&path).flatten()).collect()
    }

    /// Takes the session of one file; `None` where there is no such file.
    fn take_one(path: &Path) -> Option<Option<FarSession>> {
        let mut text = Vec::new();
        let read = File::open(path).ok()?.take(MAX).read_to_end(&mut text);
        let _ = fs::remove_file(path);
        Some(read.ok().and_then(|_| serde_json::from_slice(&text).ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_told_once() {
        let folder = std::env::temp_dir().join(format!("kedge-session-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let session = FarSession { server: "there:8".into(), key: [7; 16] };
        let second = FarSession { server: "elsewhere:9".into(), key: [8; 16] };
        assert_eq!(FarSession::take(&folder, 5), []);
        fs::write(path(&folder, 5, 0), "of another").unwrap();
        fs::write(path(&folder, 5, 1), "of another").unwrap();
        session.note(&folder, 5, 0).unwrap();
        assert_eq!(FarSession::take(&folder, 6), []);
        assert_eq!(FarSession::take(&folder, 5), std::slice::from_ref(&session));
        session.note(&folder, 5, 0).unwrap();
        second.note(&folder, 5, 1).unwrap();
        assert_eq!(FarSession::take(&folder, 5), [session, second]);
        assert_eq!(FarSession::take(&folder, 5), []);
        FarSession { server: String::new(), key: [0; 16] }.note(&folder, 6, 0).unwrap();
        clear(&folder);
        fs::remove_dir(&folder).unwrap();
    }
}
