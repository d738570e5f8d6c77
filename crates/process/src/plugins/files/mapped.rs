//! Files that the job writes through shared mappings and holds open no more: what it keeps there
//! (POSIX shared memory and semaphores, the backing files of MPI) is as much its memory as any
//! other.

use super::{Inode, has_contents, identity, moment, restore};
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::Capture;
use crate::plugins::path::ResolvedPath;
use crate::plugins::procfs::Stat;
use crate::plugins::reach;
use crate::plugins::survey::FileContents;
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The contents of all of them.
pub(super) fn save(capture: &mut Capture) -> Vec<Result<Inode, PluginError>> {
    if capture.job.contents == FileContents::Keep {
        return Vec::new();
    }
    let paths = paths(capture);
    paths.iter().filter_map(|path| save_one(capture, path).transpose()).collect()
}

/// One path each of the files that are mapped shared and writable, and whose contents are not saved
/// for a descriptor.
fn paths(capture: &Capture) -> BTreeSet<PathBuf> {
    let job = capture.job;
    let saved = job.files.iter().filter(|file| has_contents(file, job));
    let saved: BTreeSet<u64> = saved.map(|file| file.stat.inode).collect();
    let mut found: BTreeMap<(&str, u64), PathBuf> = BTreeMap::new();
    for mapping in capture.mappings.iter().flatten() {
        let written = mapping.shared && mapping.protection & libc::PROT_WRITE != 0;
        if let (true, Some(path)) = (written && !saved.contains(&mapping.inode), mapping.path()) {
            found.entry((&mapping.device, mapping.inode)).or_insert(PathBuf::from(path));
        }
    }
    found.into_values().collect()
}

/// `None` for what is no file: a device has no contents, and one that has gone is found again by
/// its mappings.
fn save_one(capture: &mut Capture, path: &Path) -> Result<Option<Inode>, PluginError> {
    let read = || format!("read {}, which the job maps", path.display());
    // Its path had no link in it: one that is there now leads to something else.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let found = match reach::find(path, false) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.to(read)?,
    };
    let metadata = File::from(found.try_clone().to(read)?).metadata().to(read)?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let (stat, limit) = (Stat::of(&metadata), capture.job.limit);
    if stat.allocated > limit {
        return Err(PluginError::Refused(format!(
            "{}, which the job maps, takes {} bytes, and {limit} is the limit: raise it, or keep files where they are",
            path.display(),
            stat.allocated
        )));
    }
    let from = File::from(reach::again(&found, flags).to(read)?);
    let name = capture.new_file();
    let to = contents::create(capture.folder, &name)?;
    contents::copy(&from, &to).to(|| format!("copy {} into the image", path.display()))?;
    let size = to.metadata().to(|| format!("look at {name}"))?.len();
    Ok(Some(Inode {
        mode: stat.mode,
        size,
        modified: moment(stat.modified),
        unlinked: false,
        contents: Some(name),
        if_gone: false,
        owner: Some(stat.owner),
        companions: restore::companions(path),
        path: ResolvedPath(path.to_owned()),
        identity: identity(&stat),
        opened: Vec::new(),
    }))
}
