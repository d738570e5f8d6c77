//! A job that leaves for another host as a whole: its last image is taken while it stands still,
//! and it stands until whoever asked says whether that has arrived there. One durable write, of
//! [`Moved`] in the job's folder, decides that it goes; only then its processes here are killed,
//! and only when none of them is left is it said that it may run there.

use crate::base::phases;
use crate::base::signals::Signals;
use crate::checkpoint::checkpointer::{CheckpointError, Checkpointer};
use kedge_control::job::{Moved, Order, Reply, Verdict, receive, send};
use kedge_process::{Roots, running, waiting};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};
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
    #[error("the job is being ended here, or goes back to an image: it does not move")]
    Ends,
    #[error("the program's first process has ended: what it has left behind does not move")]
    Over,
    #[error("process {0} of the job has ended while it stood still: it does not move")]
    Dead(i32),
    #[error("the job was sent signal {0} while it stood still: it goes on here, try again")]
    Signalled(u32),
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
    fn decide(&self, image: &Path, rest: &Rest<'_>) -> Result<(), CheckpointError>;

    /// Is told that nothing of the job runs here any more.
    fn gone(&self);
}

/// Who asked on the control socket.
struct Asker<'a> {
    stream: &'a UnixStream,
    job: &'a Checkpointer,
    /// Where it is written that the job goes.
    moved: PathBuf,
}

impl Leaves for Asker<'_> {
    fn decide(&self, image: &Path, rest: &Rest<'_>) -> Result<(), CheckpointError> {
        // What is sent to the job before this shows where it stands still.
        let since = SystemTime::now();
        let told = send(self.stream, &Reply::Standing { image: image.to_owned() });
        let heard = told
            .and_then(|()| self.stream.set_read_timeout(Some(DECIDING)))
            .and_then(|()| receive::<Verdict>(self.stream));
        match heard.map_err(DepartError::Alone)? {
            Verdict::Stay => Err(DepartError::Stays.into()),
            Verdict::Leave(moved) => {
                let undecided =
                    |source| DepartError::Undecided { path: self.moved.clone(), source };
                self.job.recovery.leave(|| {
                    rest.is_undisturbed()?;
                    write(&self.moved, moved, since).map_err(undecided)
                })?;
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
        let asker = Asker { stream, job: self, moved: self.last.with_file_name(MOVED) };
        self.checkpoint_one(&order, (None, Some(&asker)), |progress| {
            // Whether anybody listens shows when it is to be decided.
            let _ = send(stream, &Reply::Progress(progress));
        })
    }

    /// Returns where the job goes, once it is decided that it does.
    pub(crate) fn moved(&self) -> Option<Moved> {
        moved_from(self.last.parent()?)
    }

    /// Returns when none of those processes is left: the decision is made, and until then nobody
    /// may have the job run elsewhere. Proxies are not waited for: one whose server cannot be
    /// reached tries that for minutes.
    pub(crate) fn see_it_end(&self, roots: &Roots) {
        while !running(roots).is_empty() {
            thread::sleep(LOOK);
        }
    }
}

/// What must stay as it is while a job stands still: what happens to it meanwhile is in no image.
pub(crate) struct Rest<'a> {
    roots: &'a Roots,
    /// The program's first process.
    first: Option<i32>,
    /// Signals that waited in its processes before they stood still.
    before: BTreeMap<i32, u64>,
    /// Its processes since.
    processes: Vec<i32>,
}

impl<'a> Rest<'a> {
    /// Signals that wait in a job that runs.
    pub(crate) fn before(roots: &Roots) -> BTreeMap<i32, u64> {
        waiting(roots)
    }

    /// Begins with the program's `first` process, and the signals that waited `before` it stood
    /// still.
    pub(crate) fn begin(
        roots: &'a Roots,
        first: Option<i32>,
        before: BTreeMap<i32, u64>,
    ) -> Rest<'a> {
        Rest { roots, first, before, processes: Vec::new() }
    }

    /// Is told that it stands still.
    pub(crate) fn stands(&mut self) {
        self.processes = running(self.roots);
    }

    /// Looks whether what stands still is what was captured.
    ///
    /// # Errors
    /// A process was ended, or sent a signal that it would not see elsewhere; or the program's
    /// first one had ended before, so that its end is told here and another would be taken for it
    /// there.
    fn is_undisturbed(&self) -> Result<(), DepartError> {
        /// Those that people and batch systems send: timers, which go on, send others.
        const SENT: [i32; 7] = [
            libc::SIGHUP,
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGKILL,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGTERM,
        ];
        let sent = SENT.iter().fold(0, |all, signal| all | 1u64 << (signal - 1));
        if self.first.is_some_and(|first| !self.processes.contains(&first)) {
            return Err(DepartError::Over);
        }
        let now = waiting(self.roots);
        if let Some(dead) = self.processes.iter().find(|pid| !now.contains_key(pid)) {
            return Err(DepartError::Dead(*dead));
        }
        let new = now.iter().map(|(pid, now)| now & !self.before.get(pid).unwrap_or(&0) & sent);
        match new.fold(0, |all, new| all | new) {
            0 => Ok(()),
            new => Err(DepartError::Signalled(new.trailing_zeros() + 1)),
        }
    }
}

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
fn write(path: &Path, moved: Moved, since: SystemTime) -> io::Result<()> {
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
