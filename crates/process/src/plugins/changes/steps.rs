//! What is left for the moment when all else of the job is there.

use super::journal::Record;
use super::{New, OLD, Stamp, aside_of, random_name, reach, remove, rename};
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::path::SavedPath;
use rustix::fs::{Mode, OFlags, Timespec, Timestamps, fchmod, futimens};
use rustix::process::geteuid;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

/// A change of what there is.
#[derive(Debug)]
pub(crate) enum Later {
    /// A file that was made takes its path.
    Place { new: New, path: PathBuf, old: Old },
    /// A file gets the contents that it had, and stays the same file.
    InPlace(InPlace),
    /// What is there, if anything, is moved aside.
    Aside { path: PathBuf },
    /// A folder that was made gets its owner, mode and time.
    Folder { path: PathBuf, dress: Dress },
}

/// What becomes of that which has the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Old {
    Aside,
    /// Nobody needs it.
    Useless,
    /// It stays, and the new one is not needed.
    Stays,
}

#[derive(Debug)]
pub(crate) struct InPlace {
    pub(crate) path: PathBuf,
    /// Open for writing.
    pub(crate) file: File,
    pub(crate) before: Stamp,
    /// What it holds, and where that goes: a path like this.
    pub(crate) kept: PathBuf,
    pub(crate) aside: PathBuf,
    /// What it is to hold, and where that lies.
    pub(crate) saved: (File, PathBuf),
    pub(crate) dress: Dress,
}

/// Owner, mode, and time of the last change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dress {
    pub(crate) owner: Option<(u32, u32)>,
    /// Permissions.
    pub(crate) mode: u32,
    /// Seconds and nanoseconds since 1970.
    pub(crate) modified: (i64, u32),
}

impl Dress {
    /// Gives the file its mode and time and, if `give`, first its owner.
    ///
    /// Set-user-ID and set-group-ID bits lend the rights of the owner: they are set only on a file
    /// that has the owner that it had, and after it got that owner, because a change of owner
    /// clears them.
    pub(crate) fn put_on(&self, file: &File, give: bool) -> Result<(), PluginError> {
        let owned = self.owner.is_some_and(|(user, group)| {
            if give {
                // An ordinary user may not give files away, and has no need to: its files are its
                // own.
                let _ = fchown(file, Some(user), Some(group));
            }
            let now = file.metadata().map(|now| (now.uid(), now.gid()));
            now.is_ok_and(|now| now == (user, group))
        });
        let kept = if owned { 0o7777 } else { 0o1777 };
        fchmod(file, Mode::from_raw_mode(self.mode & kept)).to(|| "set a file's mode")?;
        let (seconds, nanoseconds) = self.modified;
        if nanoseconds >= 1_000_000_000 {
            return Err(damaged("a file's time"));
        }
        set_time(file, (seconds, i64::from(nanoseconds))).to(|| "set a file's time")
    }
}

/// Sets the time of the last change; that of the last access is the same.
pub(super) fn set_time(file: &File, (tv_sec, tv_nsec): (i64, i64)) -> std::io::Result<()> {
    let time = Timespec { tv_sec, tv_nsec };
    Ok(futimens(file, &Timestamps { last_access: time, last_modification: time })?)
}

/// One change, checked.
#[derive(Debug)]
pub(super) enum Step {
    Rename { from: PathBuf, to: PathBuf, what: Stamp },
    Change { change: Box<InPlace>, after: Stamp },
    Dress { path: PathBuf, dress: Dress },
    Remove { path: PathBuf },
}

impl Later {
    /// Checks once more that all is as it was found, and adds what there is to do.
    pub(super) fn plan(
        self,
        steps: &mut Vec<Step>,
        notes: &mut Vec<String>,
    ) -> Result<(), PluginError> {
        match self {
            Later::Place { new, path, old } => place(&new, path, old, steps, notes)?,
            Later::InPlace(change) => change.plan(steps, notes)?,
            Later::Aside { path } => aside(&path, steps, notes)?,
            Later::Folder { path, dress } => steps.push(Step::Dress { path, dress }),
        }
        Ok(())
    }
}

fn place(
    new: &New,
    path: PathBuf,
    old: Old,
    steps: &mut Vec<Step>,
    notes: &mut Vec<String>,
) -> Result<(), PluginError> {
    let now = Stamp::at(&path).ok();
    match (now, old) {
        (Some(_), Old::Stays) => {
            steps.push(Step::Remove { path: new.path.clone() });
            return Ok(());
        }
        (Some(_), Old::Aside) => aside(&path, steps, notes)?,
        (Some(what), Old::Useless) => {
            let to = random_name(&path, OLD).to(|| format!("move {} away", path.display()))?;
            steps.push(Step::Rename { from: path.clone(), to, what });
        }
        (None, _) => {}
    }
    let what = new.file.metadata().to(|| format!("look at {}", new.path.display()))?;
    steps.push(Step::Rename { from: new.path.clone(), to: path, what: Stamp::of(&what) });
    Ok(())
}

fn aside(path: &Path, steps: &mut Vec<Step>, notes: &mut Vec<String>) -> Result<(), PluginError> {
    let Ok(what) = Stamp::at(path) else { return Ok(()) };
    let to = aside_of(path)?;
    let said =
        format!("{} had changed since the checkpoint: it is {} now", path.display(), to.display());
    notes.push(said);
    steps.push(Step::Rename { from: path.to_owned(), to, what });
    Ok(())
}

impl InPlace {
    fn plan(self, steps: &mut Vec<Step>, notes: &mut Vec<String>) -> Result<(), PluginError> {
        let look = || format!("look at {}", self.path.display());
        let now = Stamp::of(&self.file.metadata().to(look)?);
        let there = Stamp::at(&self.path).to(look)?;
        if now != self.before || there != self.before {
            let path = self.path.display();
            let what = format!("{path} was changed while the job was being restarted: try again");
            return Err(PluginError::Refused(what));
        }
        let size = self.saved.0.metadata().to(look)?.len();
        let (seconds, nanoseconds) = self.dress.modified;
        let after = Stamp { size, modified: (seconds, i64::from(nanoseconds)), ..self.before };
        let (from, to) = (self.kept.clone(), aside_of(&self.aside)?);
        let what = Stamp::at(&from).to(look)?;
        let (path, kept) = (self.path.display(), to.display());
        notes.push(format!(
            "{path} had changed since the checkpoint: what it held is in {kept} now"
        ));
        steps.push(Step::Change { change: Box::new(self), after });
        steps.push(Step::Rename { from, to, what });
        Ok(())
    }
}

impl Step {
    pub(super) fn record(&self) -> Option<Record> {
        let saved = |path: &PathBuf| SavedPath(path.clone());
        match self {
            Step::Rename { from, to, what } => {
                Some(Record::Rename { from: saved(from), to: saved(to), what: *what })
            }
            Step::Change { change, after } => Some(Record::Change {
                path: saved(&change.path),
                before: change.before,
                after: *after,
                kept: saved(&change.kept),
                saved: saved(&change.saved.1),
            }),
            Step::Dress { .. } | Step::Remove { .. } => None,
        }
    }

    pub(super) fn take(self, notes: &mut Vec<String>) -> Result<(), PluginError> {
        match self {
            Step::Rename { from, to, .. } => rename(&from, &to),
            Step::Change { change, .. } => {
                let written = contents::overwrite(&change.saved.0, &change.file);
                written.to(|| format!("restore {}", change.path.display()))?;
                change.dress.put_on(&change.file, false)
            }
            Step::Dress { path, dress } => {
                // The one that this restart has made, which is still its own.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
                let opened = reach::open_at(&path, flags).map(File::from).and_then(|folder| {
                    let own = folder.metadata()?.uid() == geteuid().as_raw();
                    own.then_some(folder).ok_or(io::ErrorKind::PermissionDenied.into())
                });
                let opened = opened.to(|| "open it");
                if let Err(why) = opened.and_then(|folder| dress.put_on(&folder, true)) {
                    let path = path.display();
                    notes.push(format!("{path}, a temporary folder, is not as it was: {why}"));
                }
                Ok(())
            }
            Step::Remove { path } => remove(&path).to(|| format!("remove {}", path.display())),
        }
    }
}
