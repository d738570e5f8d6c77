//! Temporary files that nobody holds open: compilers and their like write them, hand their names
//! on, and remove them when they have been read. A program that goes on from before that moment
//! needs them again.
//!
//! Which of those that there are belong to the job is not known while it stands still: only that
//! they may ([`Passing::look`]). Those whose names its processes have in memory do, and are added
//! to the image ([`Passing::save`]).

use super::places::{Places, born, changed, entries, is_settled, paths};
use super::{Inode, SMALL, identity, moment};
use crate::plugins::Plugin;
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::path::ResolvedPath;
use crate::plugins::procfs::Stat;
use crate::plugins::saved::{Saved, State};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Most bytes of contents that are kept: they are copied while the job stands still.
const MAX_KEPT_BYTES: u64 = 16 << 20;
/// Most files whose contents are kept.
const MAX_KEPT_FILES: usize = 256;
/// Most files that are looked at because they may be the job's; where there are more, nobody finds
/// out whose the rest is.
const MAX_CANDIDATES: usize = 1024;
/// Folders in a temporary folder that are looked into, one in another.
const DEPTH: usize = 4;

/// A file or folder that may be the job's.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    /// The temporary folder that it lies in, however deep.
    pub(crate) folder: PathBuf,
    pub(crate) stat: Stat,
    born: SystemTime,
    /// When anything about it last changed.
    changed: (i64, i64),
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    Folder,
    Bytes(Vec<u8>),
    /// It is too large, there are too many, or it cannot be read.
    LeftOut,
}

/// All of them, as they were at one moment.
#[derive(Debug, Default)]
pub(crate) struct Passing(pub(crate) Vec<Candidate>);

/// A file as it was read while the job ran.
#[derive(Debug)]
pub(super) struct Early {
    stat: Stat,
    changed: (i64, i64),
    contents: Vec<u8>,
}

impl Places {
    /// Reads what may be the job's by now, so that the job does not stand still for it.
    pub(super) fn read_early(&mut self) {
        let begin = SystemTime::now();
        let mut found = Passing::find(self);
        found.read(self);
        for Candidate { path, stat, changed, kept, .. } in found.0 {
            if let Kept::Bytes(contents) = kept {
                let early = Early { stat, changed, contents };
                self.early.extend(is_settled(changed, begin).then_some((path, early)));
            }
        }
    }
}

impl Passing {
    /// Finds what may be the job's, and copies it; the job of `pids` stands still. What `saved` has
    /// is not looked at.
    pub(crate) fn look(places: &mut Places, pids: &[i32], saved: &Saved) -> Passing {
        places.know(pids);
        let mut passing = Passing::find(places);
        if !passing.0.is_empty() {
            let saved = identities(saved);
            passing.0.retain(|candidate| !saved.contains(&identity(&candidate.stat)));
            passing.read(places);
        }
        passing
    }

    /// All that there are, without their contents.
    fn find(places: &Places) -> Passing {
        let mut passing = Passing::default();
        for (index, folder) in places.folders.iter().enumerate() {
            passing.add(places, folder, places.in_folder(index, folder), DEPTH);
        }
        passing
    }

    fn add(&mut self, places: &Places, folder: &Path, paths: Vec<PathBuf>, depth: usize) {
        for path in paths {
            if self.0.len() >= MAX_CANDIDATES {
                return;
            }
            let Ok(metadata) = path.symlink_metadata() else { continue };
            let of_kind = metadata.is_file() || metadata.is_dir();
            let excepted = places.except.iter().any(|except| except.starts_with(&path));
            if !of_kind || excepted || !places.may_be(&path, &metadata) {
                continue;
            }
            let kept = if metadata.is_dir() { Kept::Folder } else { Kept::LeftOut };
            if metadata.is_dir() && depth > 1 {
                self.add(
                    places,
                    folder,
                    self::paths(entries(&path).take(MAX_CANDIDATES)),
                    depth - 1,
                );
            }
            let stat = Stat::of(&metadata);
            let (born, folder) = (born(&metadata), folder.to_owned());
            let changed = changed(&metadata);
            self.0.push(Candidate { path, folder, stat, born, changed, kept });
        }
    }

    /// Copies the contents of as many as the bounds allow: the youngest, of which there is most
    /// use.
    fn read(&mut self, places: &mut Places) {
        self.0.sort_by_key(|candidate| std::cmp::Reverse(candidate.born));
        let (mut bytes, mut files) = (0, 0);
        for candidate in self.0.iter_mut().filter(|candidate| !candidate.is_folder()) {
            let size = candidate.stat.size;
            if size > SMALL || bytes + size > MAX_KEPT_BYTES || files == MAX_KEPT_FILES {
                continue;
            }
            let early = places.early.remove(&candidate.path);
            let same =
                |early: &Early| (early.stat, early.changed) == (candidate.stat, candidate.changed);
            let early = early.filter(same).map(|early| early.contents);
            // Somebody else may have removed it meanwhile.
            if let Some(contents) = early.or_else(|| read(candidate, places)) {
                (bytes, files) = (bytes + contents.len() as u64, files + 1);
                candidate.kept = Kept::Bytes(contents);
            }
        }
    }

    /// Adds those of which `is_the_job_s` to what is saved, with their contents as files of
    /// `image`. What the user should know.
    pub(crate) fn save(
        &self,
        is_the_job_s: impl Fn(usize) -> bool,
        image: &Path,
        saved: &mut Saved,
    ) -> Result<Option<String>, PluginError> {
        let (mut inodes, mut left) = (Vec::new(), Vec::new());
        for (_, candidate) in self.0.iter().enumerate().filter(|(index, _)| is_the_job_s(*index)) {
            match &candidate.kept {
                Kept::Folder => inodes.push(candidate.inode(None)),
                Kept::Bytes(bytes) => {
                    let name = saved.new_file();
                    let mut file = contents::create(image, &name)?;
                    file.write_all(bytes).to(|| format!("write {name}"))?;
                    inodes.push(candidate.inode(Some((name, bytes.len() as u64))));
                }
                Kept::LeftOut => left.push(candidate.path.display()),
            }
        }
        append(saved, &inodes)?;
        let (each, most) = (SMALL >> 20, MAX_KEPT_BYTES >> 20);
        Ok(left.first().map(|first| {
            let others = left.len() - 1;
            format!(
                "not in the image: {first} and {others} other temporary files that are the job's: up to {each} MiB each, \
                 {most} MiB and {MAX_KEPT_FILES} files together are saved"
            )
        }))
    }
}

impl Candidate {
    pub(crate) fn is_folder(&self) -> bool {
        matches!(self.kept, Kept::Folder)
    }

    /// Whether nobody but its owner has business in there, as mkdtemp(3) makes folders.
    pub(crate) fn is_private_folder(&self) -> bool {
        self.is_folder() && self.stat.mode & 0o077 == 0
    }

    fn inode(&self, contents: Option<(String, u64)>) -> Inode {
        let (contents, size) = contents.unzip();
        Inode {
            mode: self.stat.mode,
            size: size.unwrap_or(self.stat.size),
            modified: moment(self.stat.modified),
            unlinked: false,
            contents,
            if_gone: true,
            owner: Some(self.stat.owner),
            companions: Vec::new(),
            path: ResolvedPath(self.path.clone()),
            identity: identity(&self.stat),
            opened: Vec::new(),
        }
    }
}

/// The contents of the file, if it is still the same one.
fn read(candidate: &mut Candidate, places: &Places) -> Option<Vec<u8>> {
    // Whoever may write in the folder may have put anything in its place.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = File::options().read(true).custom_flags(flags).open(&candidate.path).ok()?;
    let metadata = file.metadata().ok()?;
    let stat = Stat::of(&metadata);
    if !metadata.is_file() || !stat.is(&candidate.stat) || !places.users.contains(&metadata.uid()) {
        return None;
    }
    let mut bytes = Vec::with_capacity(stat.size.min(SMALL) as usize + 1);
    file.take(SMALL + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= SMALL).then(|| {
        (candidate.stat, candidate.changed) = (stat, changed(&metadata));
        bytes
    })
}

fn name() -> &'static str {
    super::Files.name()
}

/// The files whose contents are saved already.
fn identities(saved: &Saved) -> BTreeSet<(u64, u64)> {
    let states = saved.states.iter().filter(|state| state.plugin == name());
    // What was just made can be read.
    let inodes = states.filter_map(|state| Vec::<Inode>::deserialize(&state.state).ok()).flatten();
    inodes.filter(|inode| inode.contents.is_some()).map(|inode| inode.identity).collect()
}

/// Adds to what the plugin has saved.
fn append(saved: &mut Saved, inodes: &[Inode]) -> Result<(), PluginError> {
    if inodes.is_empty() {
        return Ok(());
    }
    let made = serde_json::to_value(inodes).to(|| "write a plugin's state")?;
    let state = saved.states.iter_mut().find(|state| state.plugin == name());
    match (state.map(|state| &mut state.state), made) {
        (Some(serde_json::Value::Array(there)), serde_json::Value::Array(made)) => {
            there.extend(made)
        }
        (_, state) => {
            let (plugin, version) = (name().to_owned(), super::Files.version());
            saved.states.push(State { plugin, version, state });
        }
    }
    Ok(())
}

#[cfg(test)]
impl Passing {
    /// Files of those names in `folder`, which there are not.
    pub(crate) fn of(folder: &Path, names: &[&str]) -> Passing {
        let metadata = std::fs::metadata("/").unwrap();
        let candidate = |name: &&str| Candidate {
            path: folder.join(name),
            folder: folder.to_owned(),
            stat: Stat::of(&metadata),
            born: SystemTime::UNIX_EPOCH,
            changed: (0, 0),
            kept: Kept::LeftOut,
        };
        Passing(names.iter().map(candidate).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::RestoredFiles;
    use super::super::places::TICK;
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::time::Duration;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("kpassing-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Scratch(path)
        }

        fn places(&self, since: SystemTime) -> Places {
            let own = fs::metadata(&self.0).unwrap().uid();
            let (folders, users) = (vec![self.0.clone()], BTreeSet::from([own]));
            let except = vec![self.0.join("images/one")];
            Places { folders, users, since: Some(since), except, ..Places::default() }
        }

        fn found(&self, mut places: Places) -> Passing {
            let mut passing = Passing::find(&places);
            passing.read(&mut places);
            passing
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn names(passing: &Passing, is: impl Fn(&Candidate) -> bool) -> Vec<String> {
        let some = passing.0.iter().filter(|candidate| is(candidate));
        let mut names: Vec<String> =
            some.map(|one| one.path.file_name().unwrap().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn young_files_and_folders_of_the_job_s_user_may_be_the_job_s() {
        let scratch = Scratch::new("young");
        let path = |name: &str| scratch.0.join(name);
        fs::write(path("file"), "contents").unwrap();
        fs::create_dir_all(path("a/b/c/d/e")).unwrap();
        fs::write(path("a/b/in"), "inside").unwrap();
        fs::create_dir_all(path("images/one")).unwrap();
        fs::write(path("images/other"), "").unwrap();
        symlink("file", path("link")).unwrap();
        let before = SystemTime::now() - Duration::from_secs(60);
        let found = scratch.found(scratch.places(before));
        assert_eq!(names(&found, Candidate::is_folder), ["a", "b", "c", "d"]);
        let kept = |candidate: &Candidate| matches!(candidate.kept, Kept::Bytes(_));
        assert_eq!(names(&found, kept), ["file", "in"]);
        assert!(found.0.iter().all(|candidate| candidate.folder == scratch.0));
        let later = SystemTime::now() + Duration::from_secs(60);
        assert!(scratch.found(scratch.places(later)).0.is_empty());
        // But for what a restart has brought back.
        let restored = RestoredFiles::new(BTreeSet::from([path("file")]));
        let found = scratch.found(Places { restored, ..scratch.places(later) });
        assert_eq!(names(&found, kept), ["file"]);
        let others = Places { users: BTreeSet::from([12345]), ..scratch.places(before) };
        assert!(scratch.found(others).0.is_empty());
    }

    #[test]
    fn contents_are_bounded() {
        let scratch = Scratch::new("bounds");
        fs::write(scratch.0.join("large"), vec![1; SMALL as usize + 1]).unwrap();
        for number in 0..=MAX_KEPT_BYTES / SMALL {
            fs::write(scratch.0.join(number.to_string()), vec![1; SMALL as usize]).unwrap();
        }
        let found = scratch.found(scratch.places(SystemTime::UNIX_EPOCH));
        let left = names(&found, |one| matches!(one.kept, Kept::LeftOut));
        assert_eq!((left.len(), &*left[1]), (2, "large"), "{left:?}");
    }

    #[test]
    fn what_comes_after_the_first_look_is_found() {
        let scratch = Scratch::new("looked");
        for (name, pause) in [("first", 4 * TICK), ("second", Duration::ZERO)] {
            std::thread::sleep(pause);
            let mut places = scratch.places(SystemTime::UNIX_EPOCH);
            let looked = places.look_into(&scratch.0, MAX_CANDIDATES).unwrap();
            assert_eq!(looked.changed.is_some(), !pause.is_zero(), "it has just changed");
            places.looked.push(looked);
            let before = scratch.found(places).0.len();
            let mut places = scratch.places(SystemTime::UNIX_EPOCH);
            places.looked.push(places.look_into(&scratch.0, MAX_CANDIDATES).unwrap());
            fs::write(scratch.0.join(name), "").unwrap();
            assert_eq!(scratch.found(places).0.len(), before + 1);
        }
        // What was another's stays that.
        let mut places = scratch.places(SystemTime::now() + Duration::from_secs(60));
        places.looked.push(places.look_into(&scratch.0, MAX_CANDIDATES).unwrap());
        assert_eq!(places.looked[0].others.len(), 2);
        assert!(places.look_into(&scratch.0, 1).is_none(), "too much to be listed in a pause");
        places.since = Some(SystemTime::UNIX_EPOCH);
        assert!(scratch.found(places).0.is_empty());
    }

    #[test]
    fn what_changes_after_it_was_read_is_read_again() {
        let scratch = Scratch::new("early");
        for name in ["same", "other"] {
            fs::write(scratch.0.join(name), "before").unwrap();
        }
        std::thread::sleep(4 * TICK);
        fs::write(scratch.0.join("young"), "before").unwrap();
        let mut places = scratch.places(SystemTime::UNIX_EPOCH);
        places.read_early();
        assert_eq!(places.early.len(), 2, "one had just changed");
        // Who takes what was read before takes this.
        places.early.get_mut(&scratch.0.join("same")).unwrap().contents = b"early".to_vec();
        fs::write(scratch.0.join("other"), "after!").unwrap();
        let found = scratch.found(places);
        for (name, expected) in [("same", "early"), ("other", "after!"), ("young", "before")] {
            let one = found.0.iter().find(|one| one.path.ends_with(name)).unwrap();
            assert!(matches!(&one.kept, Kept::Bytes(bytes) if bytes == expected.as_bytes()));
        }
    }

    #[test]
    fn the_job_s_are_saved_and_what_is_left_out_of_them_is_told() {
        let scratch = Scratch::new("saved");
        let path = |name: &str| scratch.0.join(name);
        fs::create_dir(path("image")).unwrap();
        fs::write(path("mine"), "contents").unwrap();
        fs::write(path("another's"), "contents").unwrap();
        fs::write(path("large"), vec![1; SMALL as usize + 1]).unwrap();
        let found = scratch.found(scratch.places(SystemTime::UNIX_EPOCH));
        let empty =
            r#"{"version":1,"slots":[],"descriptions":[],"states":[],"files":[],"warnings":[]}"#;
        let save = |names: &[&str]| {
            let mut saved = Saved::from_bytes(empty.as_bytes()).unwrap();
            let ours = |index: usize| names.iter().any(|name| found.0[index].path.ends_with(name));
            let warning = found.save(ours, &path("image"), &mut saved).unwrap();
            (saved, warning)
        };
        let (saved, warning) = save(&["mine"]);
        assert_eq!((warning, saved.files().count()), (None, 2));
        let contents = fs::read(path("image").join(saved.files().last().unwrap())).unwrap();
        assert_eq!(contents, b"contents");
        let identity = identity(&Stat::of(&fs::metadata(path("mine")).unwrap()));
        assert_eq!(identities(&saved), BTreeSet::from([identity]));
        let (saved, warning) = save(&["large"]);
        assert!(warning.is_some_and(|said| said.contains("/large and 0 other")));
        assert_eq!((saved.files().count(), saved.states.len()), (1, 0));
    }

    #[test]
    fn only_a_folder_for_its_owner_alone_is_private() {
        let scratch = Scratch::new("private");
        for (name, mode) in [("open", 0o755), ("own", 0o700)] {
            fs::create_dir(scratch.0.join(name)).unwrap();
            fs::set_permissions(scratch.0.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let found = scratch.found(scratch.places(SystemTime::UNIX_EPOCH));
        assert_eq!(names(&found, Candidate::is_private_folder), ["own"]);
    }
}
