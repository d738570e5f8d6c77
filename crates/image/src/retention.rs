//! Which images a folder has, and which of them may go.

use crate::cached;
use crate::error::ImageError;
use crate::folder::Folder;
use crate::manifest::{self, Manifest, NAME, NEW};
use crate::write;
use rustix::fs::{AtFlags, unlinkat};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// What a writer may need between making its folder and locking it, by far.
const UNCLAIMED: Duration = Duration::from_secs(60);
/// How often who waits for another's image looks for it.
const LOOK: Duration = Duration::from_millis(5);

/// A new folder for an image, which counts as being written for as long as this lives: by a lock,
/// so that a writer that died, however it died, leaves a folder that is known to be nobody's.
#[derive(Debug)]
pub struct Claim {
    folder: PathBuf,
    /// Locked, but where the file system has no such locks: there a folder is never taken for
    /// nobody's.
    dir: File,
}

impl Claim {
    /// Claims the folder for the next image of `job` in `parent`.
    pub fn new(parent: &Path, job: &str) -> Result<Claim, ImageError> {
        let folder = manifest::next_folder(parent, job)?;
        let dir = File::open(&folder).map_err(ImageError::io(&folder))?;
        let _ = dir.try_lock();
        Ok(Claim { folder, dir })
    }

    /// Makes the file `name` in the folder, whatever has the folder's name by now. Only its owner
    /// can read it.
    ///
    /// # Errors
    /// It exists, it cannot be made, or `name` is none of a file in the folder.
    pub fn create(&self, name: &str) -> Result<File, ImageError> {
        write::create_in(self.dir.as_fd(), name, &self.folder)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Removes what there is of an image that came to nothing.
    pub fn abandon(self) -> Result<(), ImageError> {
        erase(&self.folder)
    }
}

/// Keeps an image that another is being written for: for as long as this lives, kedge does not
/// remove it.
#[derive(Debug)]
pub struct Pin(#[allow(dead_code, reason = "its lock is what counts")] File);

impl Pin {
    pub fn new(folder: &Path) -> Result<Pin, ImageError> {
        let file = File::open(folder).map_err(ImageError::io(folder))?;
        // Where there are no such locks, whoever removes it in this moment makes the new one
        // worthless.
        let _ = file.try_lock_shared();
        Ok(Pin(file))
    }
}

/// What a folder is.
#[derive(Debug)]
pub enum State {
    Finished(Box<Manifest>),
    /// It has a manifest that is no good.
    Damaged(ImageError),
    Writing,
    /// What a checkpoint left that did not come to its end.
    Unfinished,
}

#[derive(Debug)]
pub struct Found {
    pub folder: PathBuf,
    pub state: State,
}

/// Lists every image in `parent`, the newest first, then those that are none yet or no more.
pub fn catalogue(parent: &Path) -> Result<Vec<Found>, ImageError> {
    let mut all: Vec<Found> = manifest::folders(parent)?
        .into_iter()
        .filter_map(|folder| state(&folder).map(|state| Found { folder, state }))
        .collect();
    all.sort_by_cached_key(|found| match &found.state {
        State::Finished(manifest) => (0, Some(Reverse(manifest::age(&found.folder, manifest)))),
        _ => (1, Some(Reverse((0, None, found.folder.clone())))),
    });
    Ok(all)
}

fn state(folder: &Path) -> Option<State> {
    if !folder.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
        return None;
    }
    match Manifest::read(folder) {
        Ok(manifest) => Some(State::Finished(Box::new(manifest))),
        Err(ImageError::NoImage { .. }) if !is_left_over(folder) => None,
        Err(ImageError::NoImage { .. }) if is_locked(folder) => Some(State::Writing),
        Err(ImageError::NoImage { .. }) => Some(State::Unfinished),
        Err(error) => Some(State::Damaged(error)),
    }
}

/// What has become of an image whose writer may have been lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is one, for good.
    Counts,
    /// Nobody is left who could make it one.
    Void,
    /// Its writer is still at it, or cannot be told from one that is.
    Open,
}

/// Tells what becomes of the image that another writes at `folder`, as soon as that is certain;
/// after `patience` it is open.
pub fn fate(folder: &Path, patience: Duration) -> Fate {
    let begin = Instant::now();
    loop {
        // In this order: who has let go of it has finished it before, if it did.
        let written = folder.is_dir() && is_locked(folder);
        match Manifest::read(folder) {
            Ok(_) => return Fate::Counts,
            Err(ImageError::NoImage { .. }) if !written => return Fate::Void,
            Err(_) if !written || begin.elapsed() >= patience => return Fate::Open,
            Err(_) => thread::sleep(LOOK),
        }
    }
}

/// Returns whether `folder` is named as images are and holds nothing but what they are made of.
fn is_left_over(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    let job = name.and_then(|name| name.rsplit_once('-')).filter(|(_, number)| {
        number.len() >= 4 && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let Some((job, _)) = job else { return false };
    let file = |name: &str| {
        name == NAME || name == NEW || [".kimg", ".data"].iter().any(|end| name.ends_with(end))
    };
    // A part has the job's name and a number of its own.
    let is_part = |path: &Path, name: &str| {
        let rest = name.strip_prefix(job).and_then(|rest| rest.strip_prefix('.'));
        let found = rest.and_then(|_| state(path));
        matches!(found, Some(State::Finished(_) | State::Writing | State::Unfinished))
    };
    let all_ours = || -> io::Result<bool> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (kind, name) = (entry.file_type()?, entry.file_name());
            let name = name.to_str().unwrap_or_default();
            let ours =
                kind.is_file() && file(name) || kind.is_dir() && is_part(&entry.path(), name);
            if !ours {
                return Ok(false);
            }
        }
        Ok(true)
    };
    all_ours().unwrap_or(false)
}

/// Returns whether a writer lives; also where that cannot be known.
fn is_locked(folder: &Path) -> bool {
    let Ok(file) = File::open(folder) else { return true };
    match file.try_lock() {
        Ok(()) => false,
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => true,
    }
}

/// Returns whether another image is being written that builds on it. Where that cannot be known it
/// is not taken for so: it could never be removed.
fn is_pinned(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Removes all but the newest `keep` images of `job` in `parent`, and what its dead writers left;
/// what was removed. An image on which a kept one builds is kept; so is one that is damaged, which
/// is for its owner to judge. Another user's images neither count nor go: where several write to
/// one folder, root could remove them all.
///
/// # Errors
///
/// [`ImageError::NotOwn`] where none of the job's images is the caller's, who has just made one:
/// the file system takes root for another user.
pub fn retain(parent: &Path, job: &str, keep: usize) -> Result<Vec<PathBuf>, ImageError> {
    let all = catalogue(parent)?;
    let mine = |folder: &Path, manifest: &Manifest| manifest.job == job && is_own(folder);
    let images: Vec<(&Path, &Manifest)> = all
        .iter()
        .filter_map(|found| match &found.state {
            State::Finished(manifest) => Some((found.folder.as_path(), &**manifest)),
            _ => None,
        })
        .collect();
    let of_job = images.iter().find(|(_, manifest)| manifest.job == job);
    if let Some((newest, _)) = of_job.filter(|_| !images.iter().any(|(path, m)| mine(path, m))) {
        return Err(ImageError::NotOwn { path: newest.to_path_buf() });
    }
    // What a write-back cache alone has may be lost with the node: it counts for none.
    let mut durable = 0;
    let kept = images.iter().filter(|(path, m)| mine(path, m)).take_while(|(path, _)| {
        let wanted = durable < keep.max(1);
        durable += usize::from(wanted && cached::undrained(path) == 0);
        wanted
    });
    let others = images.iter().filter(|(path, m)| !mine(path, m));
    let needed = with_parents(&images, kept.chain(others).map(|(path, _)| *path));
    let old = images
        .iter()
        .filter(|(path, m)| mine(path, m) && !needed.contains(path) && !is_pinned(path));
    let left = all.iter().filter(|found| {
        let of_job = manifest::number(&found.folder, job).is_some() && is_own(&found.folder);
        of_job && matches!(found.state, State::Unfinished) && is_settled(&found.folder)
    });
    // The newest first: what is left over by a crash has its parents still.
    let go: Vec<&Path> =
        old.map(|(path, _)| *path).chain(left.map(|found| found.folder.as_path())).collect();
    for folder in &go {
        erase(folder)?;
    }
    Ok(go.into_iter().map(Path::to_owned).collect())
}

/// Returns whether `folder` is the caller's.
fn is_own(folder: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    folder.symlink_metadata().is_ok_and(|metadata| metadata.uid() == own)
}

/// Returns `kept` and all that they build on.
fn with_parents<'a>(
    images: &[(&'a Path, &'a Manifest)],
    kept: impl Iterator<Item = &'a Path>,
) -> HashSet<&'a Path> {
    let mut needed = HashSet::new();
    for mut path in kept {
        // A folder seen before has had its parents followed, which also ends circles.
        while needed.insert(path) {
            let own = images.iter().find(|(other, _)| *other == path);
            let parent = own.and_then(|(_, manifest)| manifest.parent.as_ref());
            let above = parent.and_then(|parent| {
                images.iter().find(|(other, _)| other.file_name() == Some(parent.name.as_ref()))
            });
            match above {
                Some((above, _)) => path = above,
                None => break,
            }
        }
    }
    needed
}

/// Returns whether a folder without a lock is older than a writer needs to lock it.
fn is_settled(folder: &Path) -> bool {
    let changed = fs::metadata(folder).and_then(|meta| meta.modified());
    changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNCLAIMED))
}

/// Removes the images in `folders`, all or, where one of them must stay, none. Refuses what is no
/// image, what is being written, and what an image that stays builds on.
pub fn remove(folders: &[PathBuf]) -> Result<(), ImageError> {
    let mut go = Vec::new();
    for folder in folders {
        let own = fs::canonicalize(folder).map_err(ImageError::io(folder))?;
        match state(&own) {
            None => return Err(ImageError::NoImage { path: folder.clone() }),
            Some(State::Finished(_)) if is_pinned(&own) => {
                return Err(ImageError::Busy { path: folder.clone() });
            }
            Some(State::Writing) => return Err(ImageError::Busy { path: folder.clone() }),
            Some(_) => go.push(own),
        }
    }
    for folder in &go {
        check_unneeded(folder, &go)?;
    }
    go.iter().try_for_each(|folder| erase(folder))
}

fn check_unneeded(folder: &Path, go: &[PathBuf]) -> Result<(), ImageError> {
    let Some(beside) = folder.parent() else { return Ok(()) };
    if let Ok(whole) = Manifest::read(beside)
        && whole.parts.iter().any(|part| Some(OsStr::new(&part.name)) == folder.file_name())
        && !go.iter().any(|path| path == beside)
    {
        let by = beside.display().to_string();
        return Err(ImageError::Needed { path: folder.to_owned(), by });
    }
    for (path, manifest) in manifest::list(beside)? {
        let parent = manifest.parent.as_ref().map(|parent| OsStr::new(&parent.name));
        let needs = parent.is_some() && parent == folder.file_name();
        if needs && !go.contains(&path) {
            let by = path.display().to_string();
            return Err(ImageError::Needed { path: folder.to_owned(), by });
        }
    }
    Ok(())
}

/// Removes an image: first what makes it count, so that half of one is never taken for one.
fn erase(folder: &Path) -> Result<(), ImageError> {
    let forgive = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(ImageError::io(folder)),
    };
    match Folder::open(folder) {
        Err(error) if error.is_missing() => return Ok(()),
        // Below what was looked at: a link in its place, whoever made it, leads nowhere.
        opened => forgive(unlinkat(opened?, NAME, AtFlags::empty()).map_err(io::Error::from))?,
    }
    forgive(File::open(folder).and_then(|file| file.sync_all()))?;
    forgive(fs::remove_dir_all(folder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Parent;

    struct Folder(PathBuf);
    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kret-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Folder(path)
        }

        /// Returns the image `number` of `job`, captured at that second.
        fn image(&self, job: &str, number: u64, parent: Option<&str>) -> PathBuf {
            let folder = self.0.join(format!("{job}-{number:04}"));
            fs::create_dir(&folder).unwrap();
            let mut manifest = Manifest::new(job.into(), vec![], number);
            manifest.parent =
                parent.map(|name| Parent { name: name.into(), whole: None, checksum: 0 });
            manifest.write(&folder).unwrap();
            folder
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap().flatten();
            let mut names: Vec<String> =
                entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }
    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// As if nobody had touched it for two minutes.
    fn age(folder: &Path) {
        let then = std::time::SystemTime::now() - 2 * UNCLAIMED;
        File::open(folder).unwrap().set_modified(then).unwrap();
    }

    /// As NFS does it, where root's files are nobody's. Root alone can make such ones.
    #[test]
    fn images_that_the_file_system_gives_to_another_are_named() {
        let folder = Folder::new("squashed");
        let images: Vec<PathBuf> = (1..=3).map(|number| folder.image("a", number, None)).collect();
        if rustix::process::geteuid().is_root() {
            for image in &images {
                for path in [image.join(NAME), image.clone()] {
                    std::os::unix::fs::chown(path, Some(65534), None).unwrap();
                }
            }
            let error = retain(&folder.0, "a", 1).unwrap_err();
            assert!(matches!(&error, ImageError::NotOwn { path } if *path == images[2]), "{error}");
            assert_eq!(folder.names().len(), 3);
        }
        assert!(retain(&folder.0, "b", 1).unwrap().is_empty());
    }

    #[test]
    fn the_newest_of_the_job_stay() {
        let folder = Folder::new("newest");
        for number in 1..=4 {
            folder.image("a", number, None);
            folder.image("a-b", number, None);
        }
        let removed = retain(&folder.0, "a", 2).unwrap();
        assert_eq!(removed, [folder.0.join("a-0002"), folder.0.join("a-0001")]);
        let left = ["a-0003", "a-0004", "a-b-0001", "a-b-0002", "a-b-0003", "a-b-0004"];
        assert_eq!(folder.names(), left);
        // Never the last one.
        retain(&folder.0, "a", 0).unwrap();
        assert_eq!(folder.names()[0], "a-0004");
    }

    #[test]
    fn another_users_images_neither_count_nor_go() {
        assert!(rustix::process::geteuid().is_root(), "only root can make another user's images");
        let folder = Folder::new("owners");
        for number in 1..=6 {
            let image = folder.image("a", number, None);
            let owner = if number % 2 == 0 { 65534 } else { 0 };
            std::os::unix::fs::chown(&image, Some(owner), None).unwrap();
        }
        let dead = Claim::new(&folder.0, "a").unwrap();
        std::os::unix::fs::chown(dead.folder(), Some(65534), None).unwrap();
        age(dead.folder());
        drop(dead);
        assert_eq!(retain(&folder.0, "a", 2).unwrap(), [folder.0.join("a-0001")]);
        let left = ["a-0002", "a-0003", "a-0004", "a-0005", "a-0006", "a-0007"];
        assert_eq!(folder.names(), left);
    }

    #[test]
    fn what_another_builds_on_stays() {
        let folder = Folder::new("chain");
        folder.image("a", 1, None);
        folder.image("a", 2, Some("a-0001"));
        folder.image("a", 3, None);
        folder.image("a", 4, Some("a-0002"));
        retain(&folder.0, "a", 1).unwrap();
        assert_eq!(folder.names(), ["a-0001", "a-0002", "a-0004"]);
        // A circle, which only damage makes, ends nothing but itself.
        folder.image("a", 5, Some("a-0006"));
        folder.image("a", 6, Some("a-0005"));
        retain(&folder.0, "a", 1).unwrap();
        assert_eq!(folder.names(), ["a-0005", "a-0006"]);
    }

    #[test]
    fn only_what_dead_writers_left_goes() {
        let folder = Folder::new("dead");
        folder.image("a", 1, None);
        let live = Claim::new(&folder.0, "a").unwrap();
        let dead = Claim::new(&folder.0, "a").unwrap();
        let young = Claim::new(&folder.0, "a").unwrap();
        fs::write(dead.folder().join("7.kimg"), b"half").unwrap();
        age(live.folder());
        age(dead.folder());
        drop((dead, young));
        let other = folder.0.join("a-2024");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("thesis.tex"), b"not ours").unwrap();
        age(&other);
        let states = catalogue(&folder.0).unwrap();
        let of = |name: &str| states.iter().find(|found| found.folder.ends_with(name));
        assert!(matches!(of("a-0002").unwrap().state, State::Writing));
        assert!(matches!(of("a-0003").unwrap().state, State::Unfinished));
        assert!(of("a-2024").is_none());
        assert_eq!(retain(&folder.0, "a", 1).unwrap(), [folder.0.join("a-0003")]);
        assert_eq!(folder.names(), ["a-0001", "a-0002", "a-0004", "a-2024"]);
        live.abandon().unwrap();
        assert!(!folder.names().contains(&"a-0002".to_owned()));
    }

    #[test]
    fn what_a_checkpoint_of_several_parts_has_left_is_known_for_that() {
        let folder = Folder::new("parts");
        let whole = folder.0.join("j-0001");
        fs::create_dir_all(whole.join("j.0-0001")).unwrap();
        fs::write(whole.join("j.0-0001/job.kimg"), b"").unwrap();
        fs::create_dir(whole.join("j.1-0001")).unwrap();
        Manifest::new("j.1".into(), vec![], 5).write(&whole.join("j.1-0001")).unwrap();
        assert!(matches!(catalogue(&folder.0).unwrap()[0].state, State::Unfinished));
        fs::create_dir(whole.join("mine")).unwrap();
        fs::write(whole.join("mine/letters"), b"dear").unwrap();
        assert!(catalogue(&folder.0).unwrap().is_empty());
    }

    #[test]
    fn what_becomes_of_another_s_image_is_told_when_it_is_certain() {
        let folder = Folder::new("fate");
        let (whole, given_up) =
            (Claim::new(&folder.0, "j").unwrap(), Claim::new(&folder.0, "j").unwrap());
        let (at, gone) = (whole.folder().to_owned(), given_up.folder().to_owned());
        assert_eq!(fate(&at, Duration::ZERO), Fate::Open);
        let waiting = at.clone();
        let waiting = thread::spawn(move || fate(&waiting, Duration::from_secs(60)));
        Manifest::new("j".into(), vec![], 5).write(&at).unwrap();
        assert_eq!(waiting.join().unwrap(), Fate::Counts);
        drop(whole);
        assert_eq!(fate(&at, Duration::ZERO), Fate::Counts);
        drop(given_up);
        assert_eq!(fate(&gone, Duration::ZERO), Fate::Void);
        fs::remove_dir(&gone).unwrap();
        assert_eq!(fate(&gone, Duration::ZERO), Fate::Void);
    }

    #[test]
    fn removing_is_refused_where_it_would_harm() {
        let folder = Folder::new("remove");
        let first = folder.image("a", 1, None);
        let second = folder.image("a", 2, Some("a-0001"));
        let error = remove(std::slice::from_ref(&first)).unwrap_err();
        assert!(matches!(&error, ImageError::Needed { by, .. } if by.ends_with("a-0002")));
        let pin = Pin::new(&second).unwrap();
        let pinned = remove(std::slice::from_ref(&second));
        assert!(matches!(pinned, Err(ImageError::Busy { .. })));
        drop(pin);
        let live = Claim::new(&folder.0, "a").unwrap();
        let busy = remove(&[second.clone(), live.folder().to_owned()]);
        assert!(matches!(busy, Err(ImageError::Busy { .. })));
        assert!(matches!(remove(std::slice::from_ref(&folder.0)), Err(ImageError::NoImage { .. })));
        assert_eq!(folder.names(), ["a-0001", "a-0002", "a-0003"]);
        remove(&[first, second]).unwrap();
        assert_eq!(folder.names(), ["a-0003"]);
    }

    #[test]
    fn a_damaged_image_is_shown_and_never_counted() {
        let folder = Folder::new("damaged");
        folder.image("a", 1, None);
        let bad = folder.image("a", 2, None);
        fs::write(bad.join(NAME), b"nonsense that is long enough to be one").unwrap();
        let states = catalogue(&folder.0).unwrap();
        assert!(matches!(states[0].state, State::Finished(_)));
        assert!(matches!(states[1].state, State::Damaged(_)));
        retain(&folder.0, "a", 1).unwrap();
        assert_eq!(folder.names(), ["a-0001", "a-0002"]);
        remove(&[bad]).unwrap();
        assert_eq!(folder.names(), ["a-0001"]);
    }
}
