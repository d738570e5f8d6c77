//! An image's folder, opened once: what is read of the image is read through its descriptor, and
//! only out of regular files whose owner is known.

use crate::error::ImageError;
use crate::manifest::Parent;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Most symbolic links on the way to a folder that are followed, as in the kernel.
const MAX_LINKS: usize = 40;
/// Bits of a mode by which others than the owner can write.
const OTHERS_WRITE: u32 = 0o022;

/// The folder of an image.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
    fd: Arc<OwnedFd>,
    owner: u32,
}

impl Folder {
    /// Opens the folder `path`. Root follows no link of another user than the folder's owner: such
    /// a link leads him to an image that he was not shown.
    pub fn open(path: &Path) -> Result<Folder, ImageError> {
        Folder::open_at(rustix::fs::CWD, path, path.to_owned())
    }

    /// Returns the folder of the image that this one builds on.
    pub(crate) fn parent(&self, parent: &Parent) -> Result<Folder, ImageError> {
        // From the folder of its whole, a part is one further down.
        let up = if parent.whole.is_some() { "../.." } else { ".." };
        let place = parent.place();
        let above = self.path.ancestors().nth(Path::new(up).components().count());
        let path = match above {
            Some(above) if !above.as_os_str().is_empty() => above.join(&place),
            Some(_) => Path::new(".").join(&place),
            None => self.path.join(up).join(&place),
        };
        Folder::open_at(self.fd.as_fd(), &Path::new(up).join(&place), path)
    }

    /// Returns the folder `name` in this one: an image that is a part of it.
    pub(crate) fn inside(&self, name: &str) -> Result<Folder, ImageError> {
        Folder::open_at(self.fd.as_fd(), Path::new(name), self.path.join(name))
    }

    fn open_at(from: BorrowedFd<'_>, name: &Path, path: PathBuf) -> Result<Folder, ImageError> {
        let opened = || -> io::Result<(OwnedFd, Vec<u32>, Stat)> {
            let (fd, links) =
                if is_root() { walk(from, name)? } else { (dir(from, name)?, vec![]) };
            let found = fstat(&fd)?;
            Ok((fd, links, found))
        };
        let (fd, links, found) = opened().map_err(ImageError::io(&path))?;
        if let Some(other) = links.iter().find(|link| ![0, found.st_uid].contains(link)) {
            let why =
                format!("user {other} has made a link on the way: name the folder without it");
            return Err(ImageError::Untrusted { path, why });
        }
        Ok(Folder { path, fd: Arc::new(fd), owner: found.st_uid })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns where it lies now, without links.
    pub fn real(&self) -> Result<PathBuf, ImageError> {
        let link = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        std::fs::read_link(link).map_err(ImageError::io(&self.path))
    }

    /// Returns the user whose folder it is.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Checks that the caller may do with his own rights what is in it: anybody may, but root only
    /// where it is his.
    pub fn is_believed(&self) -> Result<(), ImageError> {
        if !is_root() || self.owner == 0 {
            return Ok(());
        }
        let why =
            format!("it is user {}'s: what it says would be done with root's rights", self.owner);
        Err(ImageError::Untrusted { path: self.path.clone(), why })
    }

    /// Checks that it is the user's who has `whole`; asked by root only, who is to believe what is
    /// in both.
    pub(crate) fn is_of(&self, whole: &Folder) -> Result<(), ImageError> {
        let (own, other) = (self.now()?.st_uid, whole.now()?.st_uid);
        if !is_root() || own == other {
            return Ok(());
        }
        let why = format!("it is user {own}'s, and belongs to an image of user {other}'s");
        Err(ImageError::Untrusted { path: self.path.clone(), why })
    }

    /// Returns whose it is now, as this process sees it: user namespaces have numbers of their own.
    fn now(&self) -> Result<Stat, ImageError> {
        fstat(&self.fd).map_err(|error| ImageError::io(&self.path)(error.into()))
    }

    /// Opens the file `name`: a regular one, of the folder's owner where root asks.
    ///
    /// # Errors
    ///
    /// [`ImageError::Untrusted`] where others can write to the folder or the file, or where the
    /// file is another user's than the folder; an ordinary user is asked for the first of these of
    /// others' images only.
    pub fn file(&self, name: &str) -> Result<File, ImageError> {
        let path = self.path.join(name);
        let (file, found) = regular(self.fd.as_fd(), Path::new(name), &path)?;
        let untrusted =
            |path: &Path, why: String| Err(ImageError::Untrusted { path: path.to_owned(), why });
        let (root, folder) = (is_root(), self.now()?);
        if root && found.st_uid != folder.st_uid {
            let (user, owner) = (found.st_uid, folder.st_uid);
            return untrusted(&path, format!("it is user {user}'s in a folder of user {owner}'s"));
        }
        let own = rustix::process::geteuid().as_raw();
        for (path, found) in [(self.path(), &folder), (&path, &found)] {
            if found.st_mode & OTHERS_WRITE != 0 && (root || found.st_uid != own) {
                let why = "others than its owner can write to it: once nobody has, `chmod go-w` it";
                return untrusted(path, why.to_owned());
            }
        }
        Ok(file)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens the regular file at `path`, which may be anybody's.
pub(crate) fn open_regular(path: &Path) -> Result<File, ImageError> {
    Ok(regular(rustix::fs::CWD, path, path)?.0)
}

/// Opens a regular file. Nothing else is waited for, or does anything because it is opened.
fn regular(from: BorrowedFd<'_>, name: &Path, path: &Path) -> Result<(File, Stat), ImageError> {
    let flags =
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let damaged = |what| ImageError::Damaged { path: path.to_owned(), offset: 0, what };
    let opened = match openat(from, name, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NXIO) => return Err(damaged(NOT_REGULAR)),
        other => other.map_err(|error| ImageError::io(path)(error.into()))?,
    };
    let opened = File::from(opened);
    let found = check_regular(&opened, path)?;
    Ok((opened, found))
}

/// Fails unless `file` is a regular one; errors call it `path`.
pub(crate) fn check_regular(file: &File, path: &Path) -> Result<Stat, ImageError> {
    let found = fstat(file).map_err(|error| ImageError::io(path)(error.into()))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(found),
        _ => {
            let (path, what) = (path.to_owned(), NOT_REGULAR);
            Err(ImageError::Damaged { path, offset: 0, what })
        }
    }
}

pub(crate) const NOT_REGULAR: &str = "it is no regular file";

/// Returns whether this process is root, and not an ordinary user who sees himself as root in a
/// user namespace.
fn is_root() -> bool {
    let denied =
        || std::fs::read("/proc/self/setgroups").is_ok_and(|text| text.starts_with(b"deny"));
    rustix::process::geteuid().is_root() && !denied()
}

fn dir(from: BorrowedFd<'_>, name: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(from, name, flags, Mode::empty())?)
}

/// Opens the folder `path` step by step; with it the owners of the links that were followed.
fn walk(from: BorrowedFd<'_>, path: &Path) -> io::Result<(OwnedFd, Vec<u32>)> {
    let mut at = dir(from, Path::new("."))?;
    let mut links = Vec::new();
    let mut steps = steps(path);
    while let Some(step) = steps.pop_front() {
        if step.as_bytes() == b"/" {
            at = dir(from, Path::new("/"))?;
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = openat(&at, &*step, flags, Mode::empty())?;
        let found = fstat(&next)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => at = next,
            FileType::Symlink if links.len() < MAX_LINKS => {
                links.push(found.st_uid);
                let target = readlinkat(&next, c"", Vec::new())?;
                let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
                let mut all = self::steps(&target);
                all.append(&mut steps);
                steps = all;
            }
            FileType::Symlink => return Err(Errno::LOOP.into()),
            _ => return Err(Errno::NOTDIR.into()),
        }
    }
    Ok((at, links))
}

fn steps(path: &Path) -> VecDeque<OsString> {
    let text = |component: Component<'_>| component.as_os_str().to_owned();
    path.components().filter(|c| *c != Component::CurDir).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileEntry, ImageFile, ImageWriter, Manifest, chain};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::process::Command;
    use std::time::{Duration, Instant};

    struct Scratch(PathBuf);
    impl Scratch {
        /// Returns a folder with the image `j-1`.
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("kfolder-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            let scratch = Scratch(path);
            scratch.image("j-1", None);
            scratch
        }

        fn image(&self, name: &str, parent: Option<&str>) -> PathBuf {
            let folder = self.0.join(name);
            fs::create_dir(&folder).unwrap();
            fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
            let mut manifest = Manifest::new("j".into(), vec![], 1);
            let writer = ImageWriter::create(&folder.join("9.kimg")).unwrap();
            writer.section(1, b"state").unwrap();
            manifest.files.push(writer.finish().unwrap());
            fs::write(folder.join("x.data"), b"data").unwrap();
            manifest.files.push(FileEntry::plain(&folder, "x.data").unwrap());
            manifest.parent = parent.map(|name| {
                let above = self.0.join(name);
                Manifest::read(&above).unwrap().as_parent(&above).unwrap()
            });
            manifest.write(&folder).unwrap();
            folder
        }
    }
    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn read(folder: &Path) -> Result<(), ImageError> {
        let chain = chain(folder)?;
        for (folder, manifest) in &chain {
            for entry in &manifest.files {
                match entry.is_plain() {
                    true => entry.verify_plain(folder)?,
                    false => drop(ImageFile::of(folder, entry)?),
                }
            }
        }
        Ok(())
    }

    /// A FIFO would be waited for, /dev/zero read for ever, a device might do something.
    #[test]
    fn only_regular_files_are_opened() {
        let scratch = Scratch::new("special");
        let folder = scratch.0.join("j-1");
        read(&folder).unwrap();
        let fifo = |path: &Path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        };
        let socket = |path: &Path| drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        let zero = |path: &Path| symlink("/dev/zero", path).unwrap();
        let copy = |path: &Path| symlink(path.with_extension("kept"), path).unwrap();
        type Make<'a> = &'a dyn Fn(&Path);
        let kinds: [(&str, Make<'_>); 5] = [
            ("a FIFO", &fifo),
            ("a socket", &socket),
            ("a link to a device", &zero),
            ("a link to the file itself", &copy),
            ("a folder", &|path| fs::create_dir(path).unwrap()),
        ];
        for name in ["9.kimg", "x.data", "manifest.json"] {
            let path = folder.join(name);
            for (kind, make) in &kinds {
                fs::rename(&path, path.with_extension("kept")).unwrap();
                make(&path);
                let begin = Instant::now();
                let error = read(&folder).expect_err(kind);
                assert!(begin.elapsed() < Duration::from_secs(20), "{name}: {kind} was waited for");
                let damaged = matches!(&error, ImageError::Damaged { path: at, .. } if *at == path);
                assert!(damaged, "{name} as {kind}: {error}");
                let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
                fs::rename(path.with_extension("kept"), &path).unwrap();
            }
        }
        read(&folder).unwrap();
    }

    /// However long a file claims to be, no more is read than the manifest says.
    #[test]
    fn files_of_holes_cost_nothing() {
        let scratch = Scratch::new("holes");
        let folder = scratch.0.join("j-1");
        let begin = Instant::now();
        for name in ["x.data", "9.kimg", "manifest.json"] {
            fs::File::options()
                .write(true)
                .open(folder.join(name))
                .unwrap()
                .set_len(8 << 40)
                .unwrap();
            assert!(matches!(read(&folder), Err(ImageError::Damaged { .. })), "{name}");
        }
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn root_believes_one_owner_and_nobody_else() {
        assert!(is_root(), "run this test as root: it makes files of two users");
        let scratch = Scratch::new("owners");
        let (first, second) = (scratch.0.join("j-1"), scratch.image("j-2", Some("j-1")));
        let untrusted = |what: &str, at: &Path| match read(&second) {
            Err(ImageError::Untrusted { path, .. }) => assert_eq!(path, at, "{what}"),
            other => panic!("{what}: {other:?}"),
        };
        for folder in [&first, &second] {
            for name in ["9.kimg", "x.data", "manifest.json"] {
                let path = folder.join(name);
                chown(&path, Some(1234), None).unwrap();
                untrusted("another's file", &path);
                chown(&path, Some(0), None).unwrap();
                for mode in [0o620, 0o602] {
                    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
                    untrusted("a file that others write", &path);
                }
                fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            }
            for mode in [0o770, 0o702, 0o1777] {
                fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
                untrusted("a folder that others write", folder);
            }
            fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        }
        read(&second).unwrap();
        let give = |folder: &Path, user| {
            for entry in fs::read_dir(folder).unwrap() {
                chown(entry.unwrap().path(), Some(user), None).unwrap();
            }
            chown(folder, Some(user), None).unwrap();
        };
        give(&first, 1234);
        untrusted("a parent of another's", &first);
        give(&second, 1234);
        read(&second).unwrap();
        let folder = Folder::open(&second).unwrap();
        assert_eq!(folder.owner(), 1234);
        assert!(matches!(folder.is_believed(), Err(ImageError::Untrusted { .. })));
        give(&first, 0);
        // Or a user would be given what is in root's.
        untrusted("root's image below a user's", &first);
    }

    #[test]
    fn root_follows_no_link_of_a_third_user() {
        assert!(is_root(), "run this test as root: it makes links of two users");
        let scratch = Scratch::new("links");
        let own = |path: &Path, user| {
            std::os::unix::fs::lchown(path, Some(user), None).unwrap();
        };
        let (link, above) = (scratch.0.join("latest"), scratch.0.join("above"));
        symlink("j-1", &link).unwrap();
        symlink(&scratch.0, &above).unwrap();
        for path in [link.clone(), above.join("j-1"), above.join("latest"), above.join("./j-1/.")] {
            assert_eq!(Manifest::read(&path).unwrap().job, "j", "{path:?}");
        }
        own(&above, 1234);
        for path in [above.join("j-1"), above.join("latest")] {
            let found = Manifest::read(&path);
            assert!(matches!(found, Err(ImageError::Untrusted { .. })), "{path:?}: {found:?}");
        }
        Manifest::read(&link).unwrap();
        own(&link, 1234);
        assert!(matches!(Manifest::read(&link), Err(ImageError::Untrusted { .. })));
        let round = scratch.0.join("round");
        symlink("round", &round).unwrap();
        assert!(matches!(Manifest::read(&round), Err(ImageError::Io { .. })));
    }

    /// What was opened stays, whatever has its name.
    #[test]
    fn an_open_folder_cannot_be_exchanged() {
        let scratch = Scratch::new("raced");
        let (at, away) = (scratch.0.join("j-1"), scratch.0.join("away"));
        let folder = Folder::open(&at).unwrap();
        let manifest = Manifest::of(&folder).unwrap();
        fs::rename(&at, &away).unwrap();
        scratch.image("j-1", None);
        fs::remove_file(at.join("9.kimg")).unwrap();
        fs::remove_file(at.join("x.data")).unwrap();
        drop(ImageFile::of(&folder, manifest.file("9.kimg").unwrap()).unwrap());
        manifest.file("x.data").unwrap().verify_plain(&folder).unwrap();
    }
}
