//! Disks that lose what was not synced when their power is cut: image files for loop devices, in a
//! file system that this process serves.

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyWrite, Request, Session, WriteFlags,
};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// What a disk writes whole.
const SECTOR: usize = 512;
const TTL: Duration = Duration::from_secs(3600);
const ROOT: u64 = 1;

/// A disk: what it has, and what of that a power cut may take.
#[derive(Debug)]
struct Disk {
    name: &'static str,
    now: Vec<u8>,
    /// As of the last sync.
    safe: Vec<u8>,
    /// What was written since: where, and what.
    unsynced: Vec<(usize, Vec<u8>)>,
}

impl Disk {
    fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let Some(place) = self.now.get_mut(offset..offset + data.len()) else { return false };
        place.copy_from_slice(data);
        self.unsynced.push((offset, data.to_vec()));
        true
    }

    fn sync(&mut self) {
        for (offset, data) in self.unsynced.drain(..) {
            self.safe[offset..offset + data.len()].copy_from_slice(&data);
        }
    }

    /// What it has after a power cut: of each write since the last sync all, nothing, or so many
    /// sectors.
    fn cut(&self, dice: &mut impl FnMut(u64) -> u64) -> Vec<u8> {
        let mut left = self.safe.clone();
        for (offset, data) in &self.unsynced {
            let kept = match dice(3) {
                0 => 0,
                1 => data.len(),
                _ => dice((data.len() / SECTOR) as u64 + 1) as usize * SECTOR,
            };
            left[*offset..offset + kept].copy_from_slice(&data[..kept]);
        }
        left
    }
}

/// The disks, as files of a folder, until the end.
#[derive(Debug)]
pub struct Disks {
    folder: PathBuf,
    disks: Arc<Mutex<Vec<Disk>>>,
    session: Option<BackgroundSession>,
}

impl Disks {
    /// Serves disks of these names with these images in `folder`.
    pub fn new(folder: &Path, images: &[(&'static str, &[u8])]) -> Disks {
        let disk = |(name, image): &(&'static str, &[u8])| Disk {
            name,
            now: image.to_vec(),
            safe: image.to_vec(),
            unsynced: Vec::new(),
        };
        let disks = Arc::new(Mutex::new(images.iter().map(disk).collect()));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("kedge-disks".into())];
        let session = Session::new(Served(disks.clone()), folder, &config).expect("/dev/fuse");
        let session = Some(session.spawn().expect("a thread"));
        Disks { folder: folder.to_owned(), disks, session }
    }

    /// Returns what all disks have if their power is cut at this moment.
    pub fn cut(&self, mut dice: impl FnMut(u64) -> u64) -> Vec<Vec<u8>> {
        lock(&self.disks).iter().map(|disk| disk.cut(&mut dice)).collect()
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        // Whoever still has a disk open finds an error.
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.folder).status();
        drop(self.session.take());
    }
}

fn lock(disks: &Mutex<Vec<Disk>>) -> MutexGuard<'_, Vec<Disk>> {
    disks.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Served(Arc<Mutex<Vec<Disk>>>);

impl Served {
    fn attributes(&self, id: u64) -> Option<FileAttr> {
        let size = match id {
            ROOT => 0,
            _ => lock(&self.0).get(id.checked_sub(ROOT + 1)? as usize)?.now.len() as u64,
        };
        let (kind, perm) =
            if id == ROOT { (FileType::Directory, 0o700) } else { (FileType::RegularFile, 0o600) };
        Some(FileAttr {
            ino: INodeNo(id),
            size,
            blocks: size / SECTOR as u64,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        })
    }
}

/// The place of a file's disk in the list.
fn index(ino: INodeNo) -> usize {
    (ino.0 - ROOT - 1) as usize
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let place = lock(&self.0).iter().position(|disk| OsStr::new(disk.name) == name);
        let found = place.and_then(|place| self.attributes(ROOT + 1 + place as u64));
        match found {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino.0) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let disks = lock(&self.0);
        let all = &disks[index(ino)].now;
        let start = (offset as usize).min(all.len());
        reply.data(&all[start..(start + size as usize).min(all.len())]);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match lock(&self.0)[index(ino)].write(offset as usize, data) {
            true => reply.written(data.len() as u32),
            false => reply.error(Errno::ENOSPC),
        }
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        lock(&self.0)[index(ino)].sync();
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_takes_only_what_was_not_synced() {
        let (now, safe) = (vec![0; 2048], vec![0; 2048]);
        let mut disk = Disk { name: "a", now, safe, unsynced: Vec::new() };
        assert!(disk.write(0, &[1; 1024]));
        disk.sync();
        assert!(disk.write(0, &[2; 1024]) && !disk.write(1536, &[2; 1024]));
        assert!(disk.cut(&mut |_| 0) == [vec![1; 1024], vec![0; 1024]].concat(), "none of it");
        assert!(disk.cut(&mut |_| 1) == [vec![2; 1024], vec![0; 1024]].concat(), "all of it");
        let mut torn = [2, 1].into_iter();
        let left = disk.cut(&mut |_| torn.next().expect("two"));
        assert!(left == [vec![2; 512], vec![1; 512], vec![0; 1024]].concat(), "a part of it");
        assert!(disk.now == [vec![2; 1024], vec![0; 1024]].concat());
    }
}
