//! Where temporary files lie, and which of them may be the job's: by their owner and their age.

use super::passing::Early;
use super::{RestoredFiles, TEMPORARY};
use crate::proc::{self, Field, Status};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry, File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// File systems tell times by a clock that is that much behind at most, and /proc by ticks of the
/// same length.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// A folder in which more lies is not looked into: it is listed while the job stands still, unless
/// nothing has changed in it.
const CROWDED: usize = 1 << 14;
/// Longest environment that is read.
const MAX_ENVIRONMENT: u64 = 1 << 20;

/// Where to look for them, and what is known of there.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(super) folders: Vec<PathBuf>,
    /// The job's processes.
    pub(super) pids: Vec<i32>,
    /// Who owns what is the job's, and since when there is any.
    pub(super) users: BTreeSet<u32>,
    pub(super) since: Option<SystemTime>,
    /// What is the job's, however old: a restart has brought it back.
    pub(super) restored: RestoredFiles,
    /// Folders that are somebody else's, with all that they lie in: the image's.
    pub(super) except: Vec<PathBuf>,
    /// What was found in each of `folders` before the job stood still.
    pub(super) looked: Vec<Looked>,
    /// What was there before the job stood still, with its contents.
    pub(super) early: HashMap<PathBuf, Early>,
}

/// What there was in a folder while the job ran: where thousands of files lie, the job does not
/// stand still for them.
#[derive(Debug)]
pub(super) struct Looked {
    /// When the folder itself last changed, if whatever changes it afterwards shows in that.
    pub(super) changed: Option<(i64, i64)>,
    /// What may be the job's.
    young: Vec<PathBuf>,
    /// What is older than the job or another user's: name and inode.
    pub(super) others: HashSet<(OsString, u64)>,
}

/// Whether what last changed then was looked at so much later that whatever changes it afterwards
/// shows in its times.
pub(super) fn is_settled(changed: (i64, i64), looked: SystemTime) -> bool {
    time(changed).checked_add(2 * TICK).is_some_and(|settled| settled < looked)
}

impl Places {
    /// Of the job of `pids`, the oldest first. May take long, and is to be made before the job
    /// stands still.
    pub(crate) fn of(pids: &[i32], except: Vec<PathBuf>, restored: RestoredFiles) -> Places {
        let mut places = Places { except, restored, ..Places::default() };
        places.know(pids);
        for folder in folders(pids.first().copied()) {
            if let Some(looked) = places.look_into(&folder, CROWDED) {
                places.folders.push(folder);
                places.looked.push(looked);
            }
        }
        places.read_early();
        places
    }

    /// Nothing, if more than `most` lies there.
    pub(super) fn look_into(&self, folder: &Path, most: usize) -> Option<Looked> {
        let begin = SystemTime::now();
        let changed = last_changed(folder).filter(|changed| is_settled(*changed, begin));
        let mut looked = Looked { changed, young: Vec::new(), others: HashSet::new() };
        for (number, entry) in entries(folder).enumerate() {
            if number == most {
                return None;
            }
            let Ok(metadata) = entry.metadata() else { continue };
            if self.may_be(&entry.path(), &metadata) {
                looked.young.push(entry.path());
            } else {
                looked.others.insert((entry.file_name(), entry.ino()));
            }
        }
        Some(looked)
    }

    /// What there is now in the folder of that index, but for what was others' before.
    pub(super) fn in_folder(&self, index: usize, folder: &Path) -> Vec<PathBuf> {
        let Some(looked) = self.looked.get(index) else { return paths(entries(folder)) };
        if looked.changed.is_some() && looked.changed == last_changed(folder) {
            return looked.young.clone();
        }
        let is_new = |entry: &DirEntry| !looked.others.contains(&(entry.file_name(), entry.ino()));
        paths(entries(folder).filter(is_new))
    }

    /// Whose the job is now.
    pub(super) fn know(&mut self, pids: &[i32]) {
        if self.pids == pids {
            return;
        }
        self.pids = pids.to_vec();
        let ids = |pid: &i32| Status::of(proc::reach(*pid)).map(|status| status.numbers("Uid"));
        self.users = pids.iter().filter_map(|pid| ids(pid).ok()).flatten().collect();
        self.since = pids.iter().filter_map(|pid| started(*pid)).min();
    }

    /// Whether the file or folder may be the job's, by its owner and its age.
    pub(super) fn may_be(&self, path: &Path, metadata: &Metadata) -> bool {
        let young = self.since.is_some_and(|since| born(metadata) >= since);
        self.users.contains(&metadata.uid()) && (young || self.restored.contains(path))
    }
}

/// When the process began.
fn started(pid: i32) -> Option<SystemTime> {
    // SAFETY: a plain call.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    let start = proc::Stat::of(pid).ok()?.get(Field::StartTime).max(0) as u64;
    let start = Duration::from_millis(start.saturating_mul(1000) / ticks);
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32);
    SystemTime::now().checked_sub(now.saturating_sub(start))?.checked_sub(TICK)
}

/// When it was made; where the file system does not tell, when it last changed.
pub(super) fn born(metadata: &Metadata) -> SystemTime {
    metadata.created().unwrap_or_else(|_| time(changed(metadata)))
}

/// When anything about it last changed: seconds and nanoseconds.
pub(super) fn changed(metadata: &Metadata) -> (i64, i64) {
    (metadata.ctime(), metadata.ctime_nsec())
}

fn time((seconds, nanoseconds): (i64, i64)) -> SystemTime {
    let since = Duration::new(seconds.max(0) as u64, nanoseconds.clamp(0, 999_999_999) as u32);
    SystemTime::UNIX_EPOCH + since
}

/// The usual ones, and the one that the job was told, each once.
fn folders(first: Option<i32>) -> Vec<PathBuf> {
    let told = first.and_then(told_folder).filter(|folder| folder.is_absolute());
    let mut known = HashSet::new();
    let mut folders: Vec<PathBuf> = TEMPORARY.iter().map(PathBuf::from).chain(told).collect();
    folders.retain(|folder| {
        let is = |metadata: Metadata| known.insert((metadata.dev(), metadata.ino()));
        folder.file_name().is_some() && fs::metadata(folder).is_ok_and(is)
    });
    folders
}

/// TMPDIR of the process's environment, as it was started with.
fn told_folder(pid: i32) -> Option<PathBuf> {
    let mut environment = Vec::new();
    let file = File::open(format!("/proc/{pid}/environ")).ok()?;
    file.take(MAX_ENVIRONMENT).read_to_end(&mut environment).ok()?;
    let told = environment.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(b"TMPDIR="))?;
    // Without a slash at its end.
    Some(PathBuf::from(OsStr::from_bytes(told)).components().collect())
}

/// The files and folders in there.
pub(super) fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    let of_kind =
        |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file() || kind.is_dir());
    fs::read_dir(folder).into_iter().flatten().flatten().filter(of_kind)
}

pub(super) fn paths(entries: impl Iterator<Item = DirEntry>) -> Vec<PathBuf> {
    entries.map(|entry| entry.path()).collect()
}

fn last_changed(path: &Path) -> Option<(i64, i64)> {
    fs::metadata(path).ok().map(|metadata| changed(&metadata))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_began_before_its_files() {
        let began = started(std::process::id() as i32).unwrap();
        let path = std::env::temp_dir().join(format!("kbegan-{}", std::process::id()));
        fs::write(&path, "").unwrap();
        let file = fs::metadata(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(born(&file) >= began);
        assert!(SystemTime::now().duration_since(began).unwrap() < Duration::from_secs(3600));
    }
}
