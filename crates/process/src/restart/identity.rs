//! With whose rights a job is restarted.
//!
//! What an image says is done as the image's owner could do it himself. So root, who could do
//! anything, restarts his own images only; for another user's he first becomes that user, as a
//! whole and for good.

use super::{open, processes};
use crate::EngineError;
use crate::capture::JOB_FILE;
use crate::state::{self, Credentials, JobState};
use kedge_image::{Folder, Manifest};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::path::Path;

/// The rights that a user has to files: what to be for as long as a file is opened or made for him.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
    /// Without `gid`.
    pub groups: Vec<u32>,
}

/// With whose rights an image is restarted.
///
/// Whatever is done inside of a restart, up to and in the job's init, is done as the *caller*:
/// [`restart`] refuses every image for which [`Identity::of`] says [`Identity::User`]. So there is
/// nothing to be dropped for such an image while files are put back: whoever restarts it is its
/// owner by then and has no other rights.
///
/// What remains is root's own image of a job whose processes had dropped theirs: there
/// `Owner::from` the [`Credentials`] of the processes that hold a file tells with whose rights it
/// is to be opened.
///
/// [`restart`]: super::restart
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The caller's own: he is no root, or the image is root's.
    Caller,
    /// The caller is root and the image is this user's, who has had all of its processes: he must
    /// become that user before he restarts it.
    User(Owner),
}

impl From<&Credentials> for Owner {
    /// Those that a process had to files: as which file system user and groups it was known.
    fn from(credentials: &Credentials) -> Owner {
        let (uid, gid) = (credentials.uids[3], credentials.gids[3]);
        let groups = credentials.groups.iter().copied().filter(|group| *group != gid).collect();
        Owner { uid, gid, groups }
    }
}

impl Identity {
    /// Of the image in `path`, or of the first part of a job of several.
    ///
    /// # Errors
    ///
    /// [`EngineError::Claims`] where the caller is root and the image says of a process what its
    /// owner could not have had.
    pub fn of_image(path: &Path) -> Result<Identity, EngineError> {
        let folder = Folder::open(path)?;
        if folder.is_believed().is_ok() {
            return Ok(Identity::Caller);
        }
        let manifest = Manifest::of(&folder)?;
        if manifest.parts.is_empty() {
            return Identity::of(&folder, &manifest);
        }
        let mut first = None;
        for part in &manifest.parts {
            let part = part.open(&folder)?;
            let identity = Identity::of(&part, &Manifest::of(&part)?)?;
            first.get_or_insert(identity);
        }
        Ok(first.unwrap_or(Identity::Caller))
    }

    /// Of the image in `folder`, which is no job of several.
    pub(super) fn of(folder: &Folder, manifest: &Manifest) -> Result<Identity, EngineError> {
        if folder.is_believed().is_ok() {
            return Ok(Identity::Caller);
        }
        let file = open(folder, manifest, JOB_FILE)?;
        let job: JobState = state::parse(&file.section(state::JOB_SECTION)?)?;
        let processes = processes(folder, manifest, &job)?;
        let uid = folder.owner();
        let user = User::of(uid);
        for process in &processes {
            let claims = |what| EngineError::Claims { pid: process.ids.pid, owner: uid, what };
            user.could_have(&process.credentials).map_err(claims)?;
        }
        let first = processes.first().ok_or(EngineError::Nonsense("no process"))?;
        let gid = first.credentials.gids[0];
        let groups = user.groups.into_iter().filter(|group| *group != gid).collect();
        Ok(Identity::User(Owner { uid, gid, groups }))
    }
}

/// A user, as this system's database has him.
struct User {
    uid: u32,
    /// All that he is in.
    groups: BTreeSet<u32>,
}

impl User {
    /// One whom the database does not know has the group of his own number, if it does not know
    /// that either.
    fn of(uid: u32) -> User {
        let groups = match entry(uid) {
            Some((name, gid)) => groups_of(&name, gid),
            None if !is_group(uid) => vec![uid],
            None => Vec::new(),
        };
        User { uid, groups: groups.into_iter().collect() }
    }

    /// Whether a process of his could have these: what it could not, in words.
    fn could_have(&self, credentials: &Credentials) -> Result<(), String> {
        if let Some(uid) = credentials.uids.iter().find(|uid| **uid != self.uid) {
            return Err(format!("user {uid}"));
        }
        let groups = credentials.gids.iter().chain(&credentials.groups);
        if let Some(group) = groups.into_iter().find(|group| !self.groups.contains(group)) {
            return Err(format!("group {group}"));
        }
        // The bounding set gives nothing: it takes away.
        let [inheritable, permitted, effective, _, ambient] = credentials.capabilities;
        match inheritable | permitted | effective | ambient {
            0 => Ok(()),
            some => Err(format!("capabilities {some:#x}")),
        }
    }
}

/// Longest entry of a database that is read, in bytes.
const MAX_ENTRY_LEN: usize = 1 << 20;
/// Most groups of one user, as in the kernel (NGROUPS_MAX).
const MAX_GROUPS: libc::c_int = 65536;

/// The name and the group of the user `uid`.
fn entry(uid: u32) -> Option<(CString, u32)> {
    let mut buffer = vec![0; MAX_ENTRY_LEN];
    let mut found = std::ptr::null_mut();
    // SAFETY: all zeros is a passwd: pointers, which may be null, and numbers.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer has the length that is given, and lives as long as what points into it is
    // used.
    unsafe {
        let (at, length) = (buffer.as_mut_ptr(), buffer.len());
        let error = libc::getpwuid_r(uid, &raw mut entry, at, length, &raw mut found);
        (error == 0 && !found.is_null())
            .then(|| (CStr::from_ptr(entry.pw_name).to_owned(), entry.pw_gid))
    }
}

fn is_group(gid: u32) -> bool {
    let mut buffer = vec![0; MAX_ENTRY_LEN];
    let mut found = std::ptr::null_mut();
    // SAFETY: all zeros is a group: pointers, which may be null, and a number.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer has the length that is given; nothing of the entry is used.
    let error = unsafe {
        let (at, length) = (buffer.as_mut_ptr(), buffer.len());
        libc::getgrgid_r(gid, &raw mut entry, at, length, &raw mut found)
    };
    // Where the database cannot be asked, the group may be one.
    error != 0 || !found.is_null()
}

/// The groups of the user `name`, whose first is `gid`.
fn groups_of(name: &CStr, gid: u32) -> Vec<u32> {
    let mut count = 64;
    loop {
        let mut groups = vec![0; count as usize];
        // SAFETY: the list has room for as many as `count` says, which the call sets to how many
        // there are.
        let found =
            unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
        if found >= 0 {
            groups.truncate(found as usize);
            return groups;
        }
        if groups.len() >= MAX_GROUPS as usize {
            return vec![gid];
        }
        count = count.max(groups.len() as libc::c_int * 2).min(MAX_GROUPS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(uid: u32) -> Credentials {
        let (uids, gids) = ([uid; 4], [uid; 4]);
        Credentials {
            uids,
            gids,
            groups: vec![uid],
            capabilities: [0, 0, 0, u64::MAX, 0],
            securebits: 0,
        }
    }

    #[test]
    fn a_user_has_what_the_database_says_and_no_more() {
        let user = User { uid: 7, groups: [7, 20].into() };
        let good = credentials(7);
        user.could_have(&good).unwrap();
        user.could_have(&Credentials { gids: [7, 20, 7, 7], groups: vec![20], ..good.clone() })
            .unwrap();
        for place in 0..4 {
            let (mut uids, mut gids) = (good.clone(), good.clone());
            uids.uids[place] = 0;
            gids.gids[place] = 42;
            assert_eq!(user.could_have(&uids).unwrap_err(), "user 0");
            assert_eq!(user.could_have(&gids).unwrap_err(), "group 42");
        }
        let groups = Credentials { groups: vec![20, 42], ..good.clone() };
        assert_eq!(user.could_have(&groups).unwrap_err(), "group 42");
        for set in [0, 1, 2, 4] {
            let mut some = good.clone();
            some.capabilities[set] = 2;
            assert_eq!(user.could_have(&some).unwrap_err(), "capabilities 0x2");
        }
    }

    #[test]
    fn the_database_is_asked() {
        let root = entry(0).expect("root is in it");
        assert_eq!((root.0.as_c_str(), root.1), (c"root", 0));
        assert!(groups_of(&root.0, root.1).contains(&0));
        let unknown = (3_000_000_000..).find(|uid| entry(*uid).is_none() && !is_group(*uid));
        let unknown = unknown.expect("one that nobody has");
        assert_eq!(User::of(unknown).groups, [unknown].into());
    }
}
