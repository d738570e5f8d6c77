//! Resume or start: a batch system starts a job by one line, however often it takes the machine
//! away.
//!
//! A job's images say where to go on, unless the program has ended well since: then a file beside
//! them, [`mark`], is newer, and the next run is a new one.

use crate::job::jobs::JobName;
use crate::job::missed::Missed;
use crate::job::outcome::Outcome;
use crate::job::policy::Policy;
use crate::restart::candidates::Candidates;
use kedge_control::joblog::JobLog;
use kedge_control::{note, warn};
use kedge_image::{ImageError, Manifest, Part};
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The file whose time says when a job's program has ended well. No image has such a name.
fn mark(dir: &Path, job: &JobName) -> PathBuf {
    dir.join(format!(".{job}.done"))
}

/// Returns the images in `dir` that a job can go on from, the newest first: its own, of this user,
/// made since it last ended well.
///
/// # Errors
/// The folder cannot be read.
pub fn images(dir: &Path, job: &JobName) -> Result<Candidates, ImageError> {
    let user = rustix::process::geteuid().as_raw();
    // An image is a program: another user's is not this one's to run.
    let is_own = |folder: &Path| folder.symlink_metadata().is_ok_and(|it| it.uid() == user);
    let mut images = kedge_image::list(dir)?;
    let name = job.to_string();
    images.retain(|(folder, manifest)| {
        let done = || done_at(dir, job).max(parts_done_at(dir, manifest));
        let since = || done().is_none_or(|done| manifest.captured > done);
        manifest.job == name && since() && is_own(folder)
    });
    Ok(images)
}

/// Since when the programs of all of an image's parts have ended well, if it has parts. The marks
/// of an earlier run stay: those of the image's run are newer than it, or it is not done.
fn parts_done_at(dir: &Path, image: &Manifest) -> Option<u64> {
    let done = |part: &Part| {
        let (name, _) = part.name.rsplit_once('-')?;
        done_at(dir, &name.parse().ok()?)
    };
    let all = image.parts.iter().map(done).collect::<Option<Vec<u64>>>()?;
    all.into_iter().min()
}

/// When a job's program last ended well, in seconds since 1970.
fn done_at(dir: &Path, job: &JobName) -> Option<u64> {
    let modified = fs::metadata(mark(dir, job)).and_then(|mark| mark.modified()).ok()?;
    Some(modified.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// Returns what kedge ends with, where the program ended with `outcome`: what `--requeue-exit` says
/// if the job was saved before it was asked to end. A program that ended well is done.
pub(crate) fn concluded(
    job: &JobName,
    policy: &Policy,
    outcome: Outcome,
    missed: &Missed,
    log: &JobLog,
) -> Outcome {
    let requeue = policy.on_term.and_then(|on_term| on_term.requeue_exit);
    if missed.is_saved() {
        // As one that was asked to end.
        return requeue.map_or(Outcome::Killed(libc::SIGTERM), Outcome::Exited);
    }
    if let (Some(status), Some(since)) = (requeue, missed.captured_since()) {
        let dir = policy.dir.as_deref();
        let images = dir.map_or_else(|| Ok(Vec::new()), |dir| images(dir, job));
        if images.unwrap_or_default().iter().any(|(_, manifest)| manifest.captured >= since) {
            note!(log, "saved before it ended with {outcome}: kedge ends with {status}");
            return Outcome::Exited(status);
        }
        // The job would begin anew, and again.
        let why = "checkpoint on SIGTERM: its image is not whole: the job is not to be requeued";
        warn!(log, "{why}");
        missed.last(why.to_owned());
    }
    if let (true, Outcome::Exited(0), Some(dir)) = (policy.resume, outcome, &policy.dir)
        && let Err(error) = note_done(dir, job)
    {
        let path = mark(dir, job);
        warn!(log, "{}: {error}: a next --resume goes on from an image", path.display());
    }
    outcome
}

/// Has images of a job not count that were made up to `time`: they are those of another job that
/// had its name. What is noted already to a later time stays.
///
/// # Errors
/// The folder cannot be read or written.
pub fn forget_before(dir: &Path, job: &JobName, time: SystemTime) -> io::Result<()> {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let is_noted = done_at(dir, job).is_some_and(|done| done >= seconds);
    // A folder that cannot be read is told of where it is read for its images.
    if is_noted || images(dir, job).unwrap_or_default().is_empty() {
        return Ok(());
    }
    make_mark(dir, job)?.set_modified(time)
}

/// Notes that a job's program has ended well; without images there is nothing to note.
pub(crate) fn note_done(dir: &Path, job: &JobName) -> io::Result<()> {
    match make_mark(dir, job) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        made => made?.set_modified(SystemTime::now()),
    }
}

/// Opens a job's mark, for whose time alone it is there. Somebody else who may write to the folder
/// may have put a link into its place, to a file of this user's, or a FIFO.
fn make_mark(dir: &Path, job: &JobName) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(flags.bits() as i32);
    options.open(mark(dir, job))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::Manifest;
    use std::num::NonZeroU32;
    use std::time::Duration;

    fn log() -> JobLog {
        JobLog::none()
    }

    fn policy(dir: &Path, status: Option<u8>) -> Policy {
        let on_term =
            crate::job::policy::OnTerm { deadline: None, requeue_exit: status, withheld: false };
        let keep = NonZeroU32::new(2);
        let dir = Some(dir.to_owned());
        Policy { dir, keep, on_term: Some(on_term), resume: true, ..Policy::default() }
    }

    #[test]
    fn a_job_of_parts_is_done_when_all_of_them_are() {
        let dir = std::env::temp_dir().join(format!("kedge-resume-parts-{}", std::process::id()));
        let folder = dir.join("j-0001");
        fs::create_dir_all(&folder).unwrap();
        let part = |name: &str| Manifest::new(name.into(), vec![], 1);
        let mut whole = Manifest::new("j".into(), vec![], crate::job::jobs::now() - 10);
        whole.parts = ["j.0", "j.2"].map(|of| Part::of(&format!("{of}-0001"), &part(of))).into();
        whole.write(&folder).unwrap();
        let found = || images(&dir, &"j".parse().unwrap()).unwrap().len();
        let mut all = vec![found()];
        for done in ["j.0", "j.1", "j.2"] {
            note_done(&dir, &done.parse().unwrap()).unwrap();
            all.push(found());
        }
        // One of them is of an earlier run: its program has not ended in this one.
        let earlier = SystemTime::now() - Duration::from_secs(20);
        let old = File::open(mark(&dir, &"j.0".parse().unwrap())).unwrap();
        old.set_modified(earlier).unwrap();
        all.push(found());
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(all, [1, 1, 1, 0, 1]);
    }

    #[test]
    fn images_of_another_time_do_not_count() {
        let dir = std::env::temp_dir().join(format!("kedge-forget-{}", std::process::id()));
        let job: JobName = "j".parse().unwrap();
        let now = crate::job::jobs::now();
        let at = |seconds: u64| UNIX_EPOCH + Duration::from_secs(seconds);
        forget_before(&dir, &job, at(now)).unwrap();
        assert!(!dir.exists(), "there is nothing to forget");
        for (name, captured) in [("j-0001", now - 50), ("j-0002", now - 10)] {
            fs::create_dir_all(dir.join(name)).unwrap();
            Manifest::new("j".into(), vec![], captured).write(&dir.join(name)).unwrap();
        }
        let mut left = Vec::new();
        for since in [now - 60, now - 20, now - 40, now - 10] {
            forget_before(&dir, &job, at(since)).unwrap();
            left.push(images(&dir, &job).unwrap().len());
        }
        fs::remove_dir_all(&dir).unwrap();
        // What was noted to a later time stays.
        assert_eq!(left, [2, 1, 1, 0]);
    }

    #[test]
    fn a_mark_is_not_made_through_a_link() {
        let dir = std::env::temp_dir().join(format!("kedge-mark-{}", std::process::id()));
        let job: JobName = "j".parse().unwrap();
        fs::create_dir_all(dir.join("j-0001")).unwrap();
        Manifest::new("j".into(), vec![], 1).write(&dir.join("j-0001")).unwrap();
        let other = dir.join("other");
        fs::write(&other, "text").unwrap();
        std::os::unix::fs::symlink(&other, mark(&dir, &job)).unwrap();
        let before = fs::metadata(&other).unwrap().modified().unwrap();
        let done = note_done(&dir, &job).is_err();
        // One that leads nowhere has none made there.
        fs::remove_file(mark(&dir, &job)).unwrap();
        std::os::unix::fs::symlink(dir.join("new"), mark(&dir, &job)).unwrap();
        let forgotten = forget_before(&dir, &job, SystemTime::now()).is_err();
        let left = (fs::read_to_string(&other).unwrap(), dir.join("new").exists());
        let after = fs::metadata(&other).unwrap().modified().unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!((left, done, forgotten), (("text".to_owned(), false), true, true));
        assert_eq!(before, after);
    }

    #[test]
    fn images_of_a_program_that_is_done_are_passed_over() {
        let dir = std::env::temp_dir().join(format!("kedge-resume-{}", std::process::id()));
        let job: JobName = "j".parse().unwrap();
        let now = crate::job::jobs::now();
        for (name, of, captured) in
            [("j-0001", "j", now - 100), ("k-0001", "k", now), ("j-0002", "j", now - 50)]
        {
            let folder = dir.join(name);
            fs::create_dir_all(&folder).unwrap();
            Manifest::new(of.into(), vec![], captured).write(&folder).unwrap();
        }
        let names = || {
            let name = |(path, _): (PathBuf, Manifest)| path.file_name().unwrap().to_owned();
            images(&dir, &job).unwrap().into_iter().map(name).collect::<Vec<_>>()
        };
        let all = names();
        let ended = |outcome| concluded(&job, &policy(&dir, None), outcome, &Missed::new(), &log());
        ended(Outcome::Exited(1));
        ended(Outcome::Killed(libc::SIGTERM));
        let failed = names();
        // Requeued is who has an image of the last moment.
        let requeued = |since: Option<u64>, status| {
            let missed = Missed::new();
            since.into_iter().for_each(|since| missed.captured_last(since));
            let outcome = Outcome::Killed(libc::SIGTERM);
            let end = concluded(&job, &policy(&dir, status), outcome, &missed, &log());
            (end == Outcome::Exited(85), missed.told().len())
        };
        let saved = requeued(Some(now - 60), Some(85));
        let not_whole = requeued(Some(now - 40), Some(85));
        let others = [requeued(None, Some(85)), requeued(Some(now - 60), None)];
        ended(Outcome::Exited(0));
        let done = names();
        let earlier = SystemTime::now() - Duration::from_secs(70);
        File::open(mark(&dir, &job)).unwrap().set_modified(earlier).unwrap();
        let since = names();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!((all, failed.len()), (vec!["j-0002".into(), "j-0001".into()], 2));
        assert_eq!((saved, not_whole), ((true, 0), (false, 1)));
        assert_eq!(others, [(false, 0), (false, 0)]);
        assert_eq!((done.len(), since), (0, vec!["j-0002".into()]));
    }
}
