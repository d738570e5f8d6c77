//! A job that leaves for another host as a whole: its last image is taken while it stands still,
//! and it stands until whoever asked says whether that has arrived there. One durable write, of
//! [`Moved`] in the job's folder, decides that it goes; only then its processes here are killed,
//! and only when none of them is left is it said that it may run there.

use crate::checkpoint::{CheckpointError, Checkpointer};
use crate::phases;
use kedge_control::job::{Moved, Order, Reply, Verdict, receive, send};
use kedge_process::{Roots, running};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use thiserror::Error;

/// In the job's folder: where it has moved.
const MOVED: &str = "moved.json";
/// How long it stands still for its last image to arrive, at most.
const DECIDING: Duration = Duration::from_secs(300);
/// Between two looks whether its processes have ended.
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Error)]
pub(crate) enum DepartError {
    #[error("jobs of several parts do not move to another host as a whole yet")]
    Parts,
    #[error("the move was given up: the job goes on here")]
    Stays,
    #[error("whoever moves the job is gone ({0}): the job goes on here")]
    Alone(io::Error),
    #[error("{path}: {source}: the job goes on here")]
    Undecided { path: PathBuf, source: io::Error },
}

/// Whom a job that stands still for its last image waits for.
pub(crate) trait Leaves: Sync {
    /// Returns once the job is to go, which is durable then.
    ///
    /// # Errors
    /// It goes on here.
    fn decide(&self, image: &Path) -> Result<(), CheckpointError>;

    /// Is told that nothing of the job runs here any more.
    fn gone(&self);
}

/// Who asked on the control socket.
struct Asker<'a> {
    stream: &'a UnixStream,
    /// Where it is written that the job goes.
    moved: PathBuf,
}

impl Leaves for Asker<'_> {
    fn decide(&self, image: &Path) -> Result<(), CheckpointError> {
        let told = send(self.stream, &Reply::Standing { image: image.to_owned() });
        let heard = told
            .and_then(|()| self.stream.set_read_timeout(Some(DECIDING)))
            .and_then(|()| receive::<Verdict>(self.stream));
        match heard.map_err(DepartError::Alone)? {
            Verdict::Stay => Err(DepartError::Stays.into()),
            Verdict::Leave(moved) => {
                let undecided =
                    |source| DepartError::Undecided { path: self.moved.clone(), source };
                write(&self.moved, &moved).map_err(undecided)?;
                phases::moved("decided");
                Ok(())
            }
        }
    }

    fn gone(&self) {
        // Whoever hears of it has the job run there at once; without him, who has its streams does.
        let _ = send(self.stream, &Reply::Departed);
    }
}

impl Checkpointer {
    /// Takes the last image of the job here, and ends it if it has arrived elsewhere.
    ///
    /// # Errors
    /// The job goes on here.
    pub(crate) fn depart(&self, order: &Order, stream: &UnixStream) -> Result<(), CheckpointError> {
        if self.joint.get().is_some() {
            return Err(DepartError::Parts.into());
        }
        let order = Order { stop: true, hold_ms: None, ..order.clone() };
        let asker = Asker { stream, moved: self.last.with_file_name(MOVED) };
        self.checkpoint_one(&order, (None, Some(&asker)), |progress| {
            // Whether anybody listens shows when it is to be decided.
            let _ = send(stream, &Reply::Progress(progress));
        })
    }

    /// Returns when none of those processes is left: the decision is made, and until then nobody
    /// may have the job run elsewhere.
    pub(crate) fn see_it_end(&self, roots: &Roots) {
        while !running(roots).is_empty() {
            thread::sleep(LOOK);
        }
    }
}

/// Returns where the job whose folder this is has moved, if it has.
pub(crate) fn moved_from(folder: &Path) -> Option<Moved> {
    serde_json::from_slice(&fs::read(folder.join(MOVED)).ok()?).ok()
}

/// Forgets what an earlier job of that name has left.
pub(crate) fn clear(folder: &Path) {
    let _ = fs::remove_file(folder.join(MOVED));
}

/// Is on the disk when this returns.
fn write(path: &Path, moved: &Moved) -> io::Result<()> {
    let new = path.with_extension("json.new");
    let _ = fs::remove_file(&new);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(moved)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    // What is not known to be durable does not count.
    synced.inspect_err(|_| drop(fs::remove_file(path)))
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
        write(&folder.join(MOVED), &moved).unwrap();
        let mode = fs::metadata(folder.join(MOVED)).unwrap().permissions().mode();
        assert_eq!((moved_from(&folder), mode & 0o777), (Some(moved.clone()), 0o600));
        assert!(!format!("{moved:?}").contains("2, 2"));
        clear(&folder);
        assert_eq!(moved_from(&folder), None);
        fs::write(folder.join(MOVED), "{}").unwrap();
        assert_eq!(moved_from(&folder), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
