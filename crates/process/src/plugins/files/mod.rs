//! Files and directories: offset, flags and path; contents where they would be lost or changed.

mod lacking;
mod mapped;
pub(super) mod open;
mod passing;
mod places;
mod restore;

use crate::huge;
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::ResolvedPath;
use crate::plugins::procfs::Stat;
use crate::plugins::survey::FileContents;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin};
pub(crate) use lacking::look;
pub(crate) use passing::Passing;
pub(crate) use places::Places;
use rustix::fs::{SeekFrom, fstatfs, seek};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where files lie that are not meant to stay, and up to which size one of those goes with the
/// image although it is only read: copied while the job stands still, at a millisecond for each MiB
/// at most.
const TEMPORARY: [&str; 2] = ["/tmp", "/var/tmp"];
const SMALL: u64 = 4 << 20;

/// Where the files of an image are that a restart has brought back: the job's, though they may be
/// older than its processes are now.
#[derive(Debug, Clone, Default)]
pub struct RestoredFiles(Arc<BTreeSet<PathBuf>>);

impl RestoredFiles {
    pub(crate) fn new(paths: BTreeSet<PathBuf>) -> RestoredFiles {
        RestoredFiles(Arc::new(paths))
    }

    fn contains(&self, path: &Path) -> bool {
        self.0.contains(path)
    }
}

#[derive(Debug)]
pub(crate) struct Files;

/// A file, a directory, or what an `O_PATH` descriptor stands for.
#[derive(Debug, Serialize, Deserialize)]
struct Inode {
    /// `S_IFMT` and permissions.
    mode: u32,
    size: u64,
    /// Nanoseconds since 1970: seconds and the rest.
    modified: (i64, u32),
    /// It has no name: it was removed, or never had one.
    unlinked: bool,
    /// The name of the file in the image that has its contents.
    contents: Option<String>,
    /// The contents are for the case alone that there is no file under the name any more.
    #[serde(default)]
    if_gone: bool,
    /// User and group; images of kedge 0.1 have those alone of files that nobody holds open.
    #[serde(default)]
    owner: Option<(u32, u32)>,
    /// Journals and the like that lay beside it ([`restore::COMPANIONS`]).
    companions: Vec<String>,
    /// The name that it is restored under.
    path: ResolvedPath,
    /// Device and inode, by which the file itself is known, as it went on after the checkpoint.
    identity: (u64, u64),
    /// None of one that is only mapped.
    opened: Vec<Opened>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Opened {
    description: u32,
    path: ResolvedPath,
    offset: u64,
}

impl Plugin for Files {
    fn name(&self) -> &'static str {
        "files"
    }

    fn version(&self) -> u32 {
        2
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        let mine = matches!(file.stat.kind(), libc::S_IFREG | libc::S_IFDIR);
        let nameless = !file.link.as_bytes().starts_with(b"/");
        if nameless || !(mine || file.is_path_only()) || is_memory(file) {
            return Claim::No;
        }
        if unlinked(file) && file.is_path_only() && file.stat.kind() != libc::S_IFREG {
            return Claim::Refused("it has no name any more".to_owned());
        }
        let huge = if has_contents(file, job) { is_huge(file, job) } else { Ok(false) };
        match huge {
            Ok(false) => {}
            Ok(true) => {
                let what = "it lies in a hugetlbfs, whose files kedge cannot save yet: memfd and \
                            MAP_HUGETLB it can";
                return Claim::Refused(what.to_owned());
            }
            Err(e) => return Claim::Refused(format!("its file system cannot be looked at: {e}")),
        }
        if has_contents(file, job) && file.stat.allocated > job.limit {
            let (size, limit) = (file.stat.allocated, job.limit);
            return Claim::Refused(format!(
                "its contents take {size} bytes, and {limit} is the limit: raise it, or keep files where they are"
            ));
        }
        Claim::Yes
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let inodes = capture.by_inode(mine);
        let opened: Vec<_> = inodes.iter().map(|opened| save(capture, opened)).collect();
        let mapped = mapped::save(capture);
        state(opened.into_iter().chain(mapped))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let inodes: Vec<Inode> = world.parse(state)?;
        // All contents first: a file may be open under another name, too.
        let names = restore::names(&inodes, world);
        restore::make_folders(&inodes, world);
        let mut homes = Vec::new();
        for inode in &inodes {
            homes.push(restore::restore(inode, &names, world)?);
        }
        restore::dress_folders(&inodes, world);
        for (inode, home) in inodes.iter().zip(&homes) {
            inode
                .opened
                .iter()
                .try_for_each(|opened| reopen(inode, opened, home.as_ref(), world))?;
        }
        world.restored.extend(names);
        Ok(())
    }
}

/// memfd and shared memory without a name.
pub(crate) fn is_memory(file: &Found) -> bool {
    file.link.as_bytes().starts_with(b"/memfd:")
}

/// Whether it is a file in a hugetlbfs, which nothing but a mapping writes.
fn is_huge(file: &Found, job: &Job) -> io::Result<bool> {
    let (pid, fd) = job.place(file);
    match huge::pages_of_file(Path::new(&format!("/proc/{pid}/fd/{fd}"))) {
        // A file system that does not tell is none.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(false),
        pages => Ok(pages?.is_some()),
    }
}

/// The path that it was opened under.
fn path(file: &Found) -> PathBuf {
    let bytes = file.link.as_bytes();
    let named = match unlinked(file) {
        true => bytes.strip_suffix(b" (deleted)").unwrap_or(bytes),
        false => bytes,
    };
    PathBuf::from(OsStr::from_bytes(named))
}

/// Whether its path does not lead to it any more: removed, replaced, or out of sight from here.
fn unlinked(file: &Found) -> bool {
    let found = fs::symlink_metadata(&file.link).map(|metadata| {
        use std::os::unix::fs::MetadataExt;
        (metadata.dev(), metadata.ino())
    });
    file.stat.links == 0 || found.ok() != Some((file.stat.device, file.stat.inode))
}

/// Another name of a file whose own was removed, in the same folder: of temporary files that were
/// given their names by links.
fn other_name(file: &Found) -> Option<PathBuf> {
    const MAX_ENTRIES: usize = 10_000;
    if file.stat.links == 0 || file.stat.kind() != libc::S_IFREG {
        return None;
    }
    let path = path(file);
    let names = fs::read_dir(path.parent()?).ok()?.flatten().take(MAX_ENTRIES);
    let same = |name: &fs::DirEntry| {
        let found = || Some(Stat::of(&fs::symlink_metadata(name.path()).ok()?));
        name.ino() == file.stat.inode && found().is_some_and(|found| found.is(&file.stat))
    };
    names.into_iter().find(same).map(|name| name.path())
}

/// Whether its contents go with the image.
fn has_contents(file: &Found, job: &Job) -> bool {
    if file.stat.kind() != libc::S_IFREG {
        return false;
    }
    let written = || job.same(file).any(|other| other.writes() && !other.is_path_only());
    unlinked(file) || job.contents == FileContents::Save && written()
}

/// Whether it is only read, but may be gone by a restart: what compilers and their like hand on by
/// temporary files, they remove again.
fn is_passing(file: &Found, job: &Job) -> bool {
    let temporary =
        || TEMPORARY.iter().any(|folder| path(file).parent() == Some(Path::new(folder)));
    file.stat.kind() == libc::S_IFREG
        && job.contents == FileContents::Save
        && file.stat.size <= SMALL
        && temporary()
        && readable(job, file).is_ok_and(|(_, offset)| offset.is_none())
}

fn save(capture: &mut Capture, opened: &[usize]) -> Result<Inode, PluginError> {
    let job = capture.job;
    // One that can be read, if there is one.
    let best = opened.iter().find(|index| !job.files[**index].is_path_only());
    let file = &job.files[*best.unwrap_or(&opened[0])];
    let unlinked = unlinked(file);
    let elsewhere = unlinked.then(|| other_name(file)).flatten();
    let unlinked = unlinked && elsewhere.is_none();
    let (mut contents, mut size, mut companions) = (None, file.stat.size, Vec::new());
    let wanted = opened.iter().any(|index| has_contents(&job.files[*index], job));
    let path = elsewhere.clone().unwrap_or_else(|| path(file));
    let if_gone = !wanted && is_passing(file, job);
    if (wanted || if_gone) && !is_made_by_kernel(capture, *best.unwrap_or(&opened[0]))? {
        // Somebody outside of the job may be writing, too: its size is that of the copy.
        let (name, length) = save_contents(capture, file)?;
        (contents, size) = (Some(name), length);
        let alone = unlinked || if_gone;
        companions = if alone { Vec::new() } else { restore::companions(&path) };
    }
    if unlinked && file.stat.links > 0 {
        let what = job.describe(file);
        capture
            .warnings
            .push(format!("{what} cannot be reached by its name: a restart makes a copy"));
    }
    let opened = opened.iter().map(|index| {
        let file = &job.files[*index];
        let path = ResolvedPath(elsewhere.clone().unwrap_or_else(|| self::path(file)));
        Opened { description: *index as u32, path, offset: file.info.position }
    });
    let (mode, modified, identity) =
        (file.stat.mode, moment(file.stat.modified), identity(&file.stat));
    let (path, opened, owner) = (ResolvedPath(path), opened.collect(), file.stat.owner);
    Ok(Inode {
        mode,
        size,
        modified,
        unlinked,
        contents,
        if_gone,
        owner: Some(owner),
        companions,
        path,
        identity,
        opened,
    })
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.device, stat.inode)
}

/// Nanoseconds as seconds and the rest.
fn moment(nanoseconds: i128) -> (i64, u32) {
    let second = 1_000_000_000;
    (nanoseconds.div_euclid(second) as i64, nanoseconds.rem_euclid(second) as u32)
}

/// Files of /proc and the like have no contents to keep.
fn is_made_by_kernel(capture: &Capture, index: usize) -> Result<bool, PluginError> {
    /// proc, sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs (linux/magic.h).
    const MAGIC: [u32; 7] =
        [0x9fa0, 0x6265_6572, 0x0027_e0eb, 0x6367_7270, 0x6462_6720, 0x7472_6163, 0x7363_6673];
    let fd = capture.duplicate(index)?;
    let kind = fstatfs(&fd).to(|| format!("look at {}", capture.file(index).what()))?.f_type;
    Ok(MAGIC.contains(&(kind as u32)))
}

pub(super) fn save_contents(
    capture: &mut Capture,
    file: &Found,
) -> Result<(String, u64), PluginError> {
    let what = || format!("read {}", file.what());
    let (from, offset) = readable(capture.job, file).to(what)?;
    let name = capture.new_file();
    let to = contents::create(capture.folder, &name)?;
    let copied = contents::copy(&from, &to).to(|| format!("copy {} into the image", file.what()));
    if let Some(offset) = offset {
        seek(&from, SeekFrom::Start(offset)).to(what)?;
    }
    copied?;
    Ok((name, to.metadata().to(what)?.len()))
}

/// The file, opened anew so that the program's offset stays; or, if its permissions have been
/// taken away since, the program's own description, and its offset.
fn readable(job: &Job, file: &Found) -> std::io::Result<(File, Option<u64>)> {
    let (pid, fd) = job.place(file);
    match File::open(format!("/proc/{pid}/fd/{fd}")) {
        Ok(file) => Ok((file, None)),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            let reader = job.same(file).find(|other| other.reads() && !other.is_path_only());
            let Some(reader) = reader else { return Err(e) };
            let own = job.duplicate(reader).map_err(|_| e)?;
            Ok((File::from(own), Some(reader.info.position)))
        }
        Err(e) => Err(e),
    }
}

fn reopen(
    inode: &Inode,
    opened: &Opened,
    home: Option<&File>,
    world: &mut World,
) -> Result<(), PluginError> {
    let flags = world.flags(opened.description)?;
    let path = world.path(&opened.path.0);
    let home = match home {
        Some(home) => Some(home.try_clone().to(|| "duplicate a descriptor")?),
        None => world.changes.home(&path).map(File::try_clone).transpose().to(|| "duplicate it")?,
    };
    let changes = &mut world.changes;
    let lends = |stamp| changes.lends(&path, stamp);
    let fd = match &home {
        Some(home) => open::through_lent(home, flags, lends)?,
        None => open::by_path(&path, flags, inode.mode, lends)?,
    };
    if flags & libc::O_PATH as u32 == 0 && opened.offset != 0 {
        seek(&fd, SeekFrom::Start(opened.offset))
            .map_err(|e| damaged(format!("offset {} of {}: {e}", opened.offset, path.display())))?;
    }
    world.made(opened.description, fd)
}
