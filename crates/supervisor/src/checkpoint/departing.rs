//! A job that leaves for another host as a whole: its last image is taken while it stands still,
//! and it stands until whoever asked says whether that has arrived there. One durable write, of
//! [`Moved`] in the job's folder, decides that it goes; only then its processes here are killed,
//! and only when none of them is left is it said that it may run there.

use crate::base::phases;
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::{CheckpointError, DepartError};
use crate::checkpoint::standing::{Leaves, Rest};
use crate::job::leaving::{MOVED, moved_from, write};
use kedge_control::job::{Moved, Order, Reply, Verdict, receive, send};
use kedge_process::{Roots, running};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

/// How long it stands still for its last image to arrive, at most.
const DECIDING: Duration = Duration::from_secs(300);
/// Between two looks whether its processes have ended.
const LOOK: Duration = Duration::from_millis(1);

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
