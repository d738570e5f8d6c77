//! Files that the kernel knows by number, each with a path descriptor of the file below.

use crate::backing;
use crate::file::Key;
use crate::tier::lock;
use rustix::fs::Stat;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// The kernel's number of the folder itself.
const ROOT: u64 = 1;
/// Numbers from there on are for files of other devices, whose own could be anybody's.
const FOREIGN: u64 = 1 << 62;

/// Entries of files that are known no more may stay, until they are more than the others and so
/// many.
const SOME: usize = 1024;

/// A file that the kernel knows.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) fd: Arc<OwnedFd>,
    /// By what name the kernel asked for it, and where.
    name: (u64, OsString),
    /// Time of modification and size when it was opened last: the kernel's pages are of then.
    pub(crate) opened: Mutex<Option<(i64, u64, u64)>>,
}

#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    key: Key,
    lookups: u64,
}

#[derive(Debug, Default)]
struct Tables {
    by_id: HashMap<u64, Known>,
    by_key: HashMap<Key, u64>,
    /// From the one that is known for the longest; some are known no more.
    oldest: VecDeque<u64>,
    foreign: u64,
}

/// All files that the kernel knows.
#[derive(Debug)]
pub(crate) struct Nodes {
    root: Key,
    tables: Mutex<Tables>,
}

impl Nodes {
    pub(crate) fn new(root: OwnedFd) -> io::Result<Nodes> {
        let stat = backing::stat(&root)?;
        let key = (stat.st_dev, stat.st_ino);
        let (name, opened) = ((ROOT, OsString::new()), Mutex::default());
        let node = Node { id: ROOT, fd: Arc::new(root), name, opened };
        let mut tables = Tables::default();
        // The kernel never forgets it.
        tables.by_id.insert(ROOT, Known { node: Arc::new(node), key, lookups: u64::MAX / 2 });
        tables.by_key.insert(key, ROOT);
        Ok(Nodes { root: key, tables: Mutex::new(tables) })
    }

    pub(crate) fn get(&self, id: u64) -> io::Result<Arc<Node>> {
        let tables = lock(&self.tables);
        let known = tables.by_id.get(&id);
        known.map(|known| known.node.clone()).ok_or(rustix::io::Errno::STALE.into())
    }

    /// Returns how many files the kernel knows.
    pub(crate) fn len(&self) -> usize {
        lock(&self.tables).by_id.len()
    }

    /// Returns the names of files that the kernel should forget for there to be `most`: those that
    /// it has known for the longest. It keeps those that are in use.
    pub(crate) fn to_forget(&self, most: usize) -> Vec<(u64, OsString)> {
        let mut tables = lock(&self.tables);
        let mut names = Vec::new();
        for _ in most..tables.by_id.len() {
            let Some(id) = tables.oldest.pop_front() else { break };
            if let Some(known) = tables.by_id.get(&id) {
                names.push(known.node.name.clone());
                tables.oldest.push_back(id);
            }
        }
        names
    }

    /// Notes that the kernel is told of a file, by its name in a parent, and returns its node.
    pub(crate) fn enter(
        &self,
        fd: OwnedFd,
        parent: u64,
        name: &OsStr,
    ) -> io::Result<(Arc<Node>, Stat)> {
        let stat = backing::stat(&fd)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut tables = lock(&self.tables);
        if let Some(id) = tables.by_key.get(&key).copied()
            && let Some(known) = tables.by_id.get_mut(&id)
        {
            known.lookups += 1;
            return Ok((known.node.clone(), stat));
        }
        // The open descriptor keeps the file's number from being given to another one.
        let id = if key.0 == self.root.0 && (ROOT + 1..FOREIGN).contains(&key.1) {
            key.1
        } else {
            tables.foreign += 1;
            FOREIGN + tables.foreign
        };
        let name = (parent, name.to_owned());
        let node = Arc::new(Node { id, fd: Arc::new(fd), name, opened: Mutex::default() });
        tables.by_id.insert(id, Known { node: node.clone(), key, lookups: 1 });
        tables.by_key.insert(key, id);
        tables.oldest.push_back(id);
        if tables.oldest.len() > 2 * tables.by_id.len() + SOME {
            let Tables { by_id, oldest, .. } = &mut *tables;
            let mut seen = HashSet::new();
            oldest.retain(|id| by_id.contains_key(id) && seen.insert(*id));
        }
        Ok((node, stat))
    }

    /// Notes that the kernel has forgotten a file so many times.
    pub(crate) fn forget(&self, id: u64, times: u64) {
        let mut tables = lock(&self.tables);
        let Some(known) = tables.by_id.get_mut(&id) else { return };
        known.lookups = known.lookups.saturating_sub(times);
        if known.lookups == 0 && id != ROOT {
            let key = known.key;
            tables.by_id.remove(&id);
            tables.by_key.remove(&key);
        }
    }
}
