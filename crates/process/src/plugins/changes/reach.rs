//! Where a path leads, without following a link that somebody else may have put there.
//!
//! Saved paths were resolved by the kernel: there was no link in them. One that is there now has
//! come since, or is part of a path that the user has given (`--path-map`).

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, Stat, fstat, open, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// As many links as the kernel follows.
const MAX_LINKS: u32 = 40;
/// What a user is shown as who has no number in a namespace (user_namespaces(7)).
const NOBODY_KNOWN: u32 = 65534;
/// Most paths that are looked at for links: those of an image, and the folders on the way there.
const MAX_PATHS: usize = 1 << 16;

/// Links that are root's or this user's, by device and inode: see [`know`].
static KNOWN: OnceLock<BTreeSet<(u64, u64)>> = OnceLock::new();

/// Opens what is at `path`, of whatever kind, for its place alone (O_PATH). If `follow`, what a
/// link there leads to.
pub(crate) fn find(path: &Path, follow: bool) -> io::Result<OwnedFd> {
    let here = OFlags::PATH | OFlags::CLOEXEC;
    let root = || open("/", here | OFlags::DIRECTORY, Mode::empty());
    let mut at = match path.is_absolute() {
        true => root()?,
        false => open(".", here | OFlags::DIRECTORY, Mode::empty())?,
    };
    let mut left = names(path);
    left.reverse();
    let (mut links, mut foreign) = (0, false);
    while let Some(name) = left.pop() {
        // A folder first: an automounter mounts what is opened as one.
        let opened = openat(&at, &name, here | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
        match opened {
            Ok(folder) => {
                foreign |= is_anybodys(&at)? && fstat(&folder)?.st_uid != geteuid().as_raw();
                at = folder;
                continue;
            }
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            Err(e) => return Err(e.into()),
        }
        let found = openat(&at, &name, here | OFlags::NOFOLLOW, Mode::empty())?;
        let stat = fstat(&found)?;
        let is_link = stat.st_mode & libc::S_IFMT == libc::S_IFLNK;
        if left.is_empty() && !(is_link && follow) {
            return Ok(found);
        }
        if !is_link {
            return Err(Errno::NOTDIR.into());
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        foreign |= is_anybodys(&at)?;
        if !may_be_followed(&stat, foreign) {
            return Err(planted(path, &name, &stat));
        }
        let target = readlinkat(&found, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            (at, foreign) = (root()?, false);
        }
        left.extend(names(&target).into_iter().rev());
    }
    Ok(at)
}

/// Opens what is at `path` with these flags.
pub(crate) fn open_at(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let found = find(path, !flags.contains(OFlags::NOFOLLOW))?;
    if flags.contains(OFlags::PATH) {
        return Ok(found);
    }
    again(&found, flags)
}

/// Opens what `found` stands for with these flags.
pub(crate) fn again(found: impl AsFd, flags: OFlags) -> io::Result<OwnedFd> {
    let through = through(&found);
    // What that leads to is a link that must be followed, to what was found and nothing else.
    let flags = (flags - OFlags::NOFOLLOW) | OFlags::CLOEXEC;
    Ok(openat(CWD, through, flags, Mode::empty())?)
}

/// The path of what a descriptor of this process stands for.
pub(crate) fn through(found: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", found.as_fd().as_raw_fd()))
}

fn names(path: &Path) -> Vec<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        _ => None,
    };
    path.components().filter_map(name).collect()
}

/// Whether everybody may put something into the folder.
fn is_anybodys(folder: impl AsFd) -> io::Result<bool> {
    Ok(fstat(folder)?.st_mode & libc::S_IWOTH != 0)
}

/// Whether a link is one that nobody has planted: the user's own, or root's in a place where only
/// its administrator could put it. `foreign`: it lies in a folder where everybody may put things,
/// or below what another has put there.
fn may_be_followed(link: &Stat, foreign: bool) -> bool {
    let known = || KNOWN.get().is_some_and(|known| known.contains(&(link.st_dev, link.st_ino)));
    match in_user_namespace() {
        // Everybody else looks like root there, and like this user, if nobody is this user.
        true => {
            let own = link.st_uid == geteuid().as_raw() && link.st_uid != NOBODY_KNOWN;
            own || !foreign && known()
        }
        false => link.st_uid == geteuid().as_raw() || !foreign && link.st_uid == 0,
    }
}

/// Notes which links on `paths`, and on the way that these lead, are root's and this user's: to be
/// called before a user namespace is entered, in which other users have no numbers. Follows none of
/// them for anything else.
pub(crate) fn know(paths: impl IntoIterator<Item = PathBuf>) {
    let (mut known, mut looked) = (BTreeSet::new(), BTreeSet::new());
    for path in paths {
        look_at(&path, MAX_LINKS, &mut known, &mut looked);
    }
    let _ = KNOWN.set(known);
}

fn look_at(
    path: &Path,
    left: u32,
    known: &mut BTreeSet<(u64, u64)>,
    looked: &mut BTreeSet<PathBuf>,
) {
    // From the top down: below what is not there is nothing.
    let mut above = PathBuf::new();
    for part in path.components() {
        above.push(part);
        if looked.len() >= MAX_PATHS {
            return;
        }
        if !looked.insert(above.clone()) {
            continue;
        }
        let Ok(found) = above.symlink_metadata() else { return };
        if !found.is_symlink() {
            continue;
        }
        if [0, geteuid().as_raw()].contains(&found.uid()) {
            known.insert((found.dev(), found.ino()));
        }
        if let (Some(left), Ok(target)) = (left.checked_sub(1), fs::read_link(&above)) {
            let target = above.parent().unwrap_or(&above).join(target);
            look_at(&target, left, known, looked);
        }
    }
}

/// Whether other users than this one have no numbers here.
pub(crate) fn in_user_namespace() -> bool {
    fs::read_to_string("/proc/self/setgroups").is_ok_and(|text| text.trim() == "deny")
}

fn planted(path: &Path, name: &OsStr, link: &Stat) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "`{}` in {} is a symbolic link of user {}'s, which is not followed: remove it, or name \
             the place that it leads to with --path-map",
            String::from_utf8_lossy(name.as_bytes()),
            path.display(),
            link.st_uid
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};

    #[test]
    fn links_of_one_s_own_are_followed_and_planted_ones_are_not() {
        let folder = std::env::temp_dir().join(format!("kreach-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), "contents").unwrap();
        symlink("file", folder.join("link")).unwrap();
        symlink("loop", folder.join("loop")).unwrap();
        fs::create_dir(folder.join("below")).unwrap();
        symlink("../below/../link", folder.join("below/again")).unwrap();
        let inode = |name: &str, follow| {
            let found = find(&folder.join(name), follow)?;
            Ok::<_, io::Error>(fstat(found)?.st_ino)
        };
        let file = fs::metadata(folder.join("file")).unwrap().ino();
        for name in ["file", "link", "below/again", "below/../file"] {
            assert_eq!(inode(name, true).unwrap(), file, "{name}");
        }
        assert_ne!(inode("link", false).unwrap(), file);
        assert_eq!(inode("loop", true).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(inode("file/below", true).unwrap_err().raw_os_error(), Some(libc::ENOTDIR));
        assert_eq!(inode("none", true).unwrap_err().kind(), io::ErrorKind::NotFound);
        // Only root can make another user's.
        if geteuid().is_root() {
            lchown(folder.join("link"), Some(1234), Some(1234)).unwrap();
            for mode in [0o755, 0o1777] {
                fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
                let error = inode("link", true).unwrap_err().to_string();
                assert!(error.contains("user 1234"), "{error}");
                inode("below/again", true).unwrap_err();
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
