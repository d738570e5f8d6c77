//! The note in a job's folder that it has moved to another host: it is what decides that it has.

use crate::base::signals::Signals;
use kedge_control::job::Moved;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

/// In the job's folder: where it has moved.
pub(crate) const MOVED: &str = "moved.json";

/// Returns where the job whose folder this is has moved, if it has.
pub(crate) fn moved_from(folder: &Path) -> Option<Moved> {
    read(folder).ok().flatten()
}

/// What is written where a job has moved.
#[derive(Serialize, Deserialize)]
struct Note {
    #[serde(flatten)]
    moved: Moved,
    /// What was sent to the job since then is in none of its images.
    #[serde(default)]
    since: Option<SystemTime>,
}

/// Has signals that came to the job when it was on its way, and that are lost with its processes
/// here, come to this process again, for what takes its place.
pub(crate) fn keep_signals(folder: &Path, signals: &Signals) {
    let since = read_note(folder).ok().flatten().and_then(|note| note.since);
    since.into_iter().for_each(|since| signals.send_again(since));
}

/// The same, and tells where that cannot be read.
pub(crate) fn read(folder: &Path) -> io::Result<Option<Moved>> {
    Ok(read_note(folder)?.map(|note| note.moved))
}

fn read_note(folder: &Path) -> io::Result<Option<Note>> {
    match fs::read(folder.join(MOVED)) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes back, durably, that the job leaves: whoever calls this has the lock of its folder.
///
/// # Errors
/// It may still be written there.
pub(crate) fn revoke(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join(MOVED)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::open(folder)?.sync_all()
}

/// Forgets what an earlier job of that name has left.
pub(crate) fn clear(folder: &Path) {
    let _ = fs::remove_file(folder.join(MOVED));
}

/// Is on the disk when this returns.
pub(crate) fn write(path: &Path, moved: Moved, since: SystemTime) -> io::Result<()> {
    let note = Note { moved, since: Some(since) };
    let new = path.with_extension("json.new");
    let _ = fs::remove_file(&new);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(&note)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    match synced {
        // What is not known to be durable does not count.
        Err(error) if withdraw(path, &file).is_ok() => Err(error),
        // What cannot be taken back counts: everybody who looks finds it.
        _ => Ok(()),
    }
}

/// Has nobody find there what `file` holds.
fn withdraw(path: &Path, file: &File) -> io::Result<()> {
    fs::remove_file(path).or_else(|_| file.set_len(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn where_a_job_has_moved_is_private_and_forgotten_by_the_next() {
        let folder = std::env::temp_dir().join(format!("kedge-moved-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let moved = Moved { server: "b:7531".into(), token: [1; 16], secret: [2; 32] };
        assert_eq!(moved_from(&folder), None);
        write(&folder.join(MOVED), moved.clone(), SystemTime::now()).unwrap();
        let mode = fs::metadata(folder.join(MOVED)).unwrap().permissions().mode();
        assert_eq!((moved_from(&folder), mode & 0o777), (Some(moved.clone()), 0o600));
        assert!(!format!("{moved:?}").contains("2, 2"));
        clear(&folder);
        assert_eq!(moved_from(&folder), None);
        fs::write(folder.join(MOVED), "{}").unwrap();
        assert_eq!(moved_from(&folder), None);
        write(&folder.join(MOVED), moved.clone(), SystemTime::now()).unwrap();
        revoke(&folder).unwrap();
        revoke(&folder).unwrap();
        assert_eq!(read(&folder).unwrap(), None);
        // Where it cannot be removed it is emptied.
        write(&folder.join(MOVED), moved.clone(), SystemTime::now()).unwrap();
        let file = File::options().write(true).open(folder.join(MOVED)).unwrap();
        withdraw(&folder.join("nowhere/moved.json"), &file).unwrap();
        assert_eq!(read(&folder).unwrap(), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
