//! What the processes inherit from their init: the files that they map, and their working folders.

use super::Plan;
use crate::EngineError;
use crate::huge;
use crate::plugins::{RecreateOptions, Recreated, reach};
use crate::state::{Backing, MappedFile, ProcessState, RemovedFolder, SharedObject};
use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What memory was to have huge pages that there are none for, as it is told; each once.
type Lacking = Mutex<BTreeSet<String>>;

/// Descriptors under which they lie; the processes close them when they have used them.
#[derive(Debug)]
pub(super) struct Inherited {
    files: BTreeMap<(PathBuf, bool), File>,
    folders: BTreeMap<PathBuf, File>,
    objects: BTreeMap<u64, OwnedFd>,
    /// Descriptions that are mapped, opened once more, so that they allow what the mapping needs.
    mapped: BTreeMap<u32, File>,
    lacking: Lacking,
    pub(super) descriptors: Recreated,
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> EngineError {
    move |source| EngineError::File { path: path.to_owned(), what, source }
}

impl Inherited {
    pub(super) fn open(plan: &Plan) -> Result<Inherited, EngineError> {
        raise_limit();
        let descriptors = recreate(plan)?;
        let (mut files, mut folders) = (BTreeMap::new(), BTreeMap::new());
        let written = written(plan);
        for process in &plan.processes {
            for file in process.files.iter().chain(&process.exe) {
                let key = (file.path.clone(), file.writable);
                if let Entry::Vacant(place) = files.entry(key) {
                    let path = plan.paths.apply(&file.path);
                    let opened = match descriptors.home(&path) {
                        // What is there now is not what the job had.
                        Some(home) => open_home(home, file, &path)?,
                        None => open(file, written.contains(file.path.as_path()), &path)?,
                    };
                    place.insert(opened);
                }
            }
            if let Entry::Vacant(place) = folders.entry(process.cwd.clone()) {
                let path = plan.paths.apply(&process.cwd);
                place.insert(match process.cwd_removed {
                    Some(removed) => removed_folder(&path, removed, &descriptors)?,
                    None => open_folder(&path)?,
                });
            }
        }
        let (mut objects, lacking) = (BTreeMap::new(), Mutex::default());
        for object in &plan.job.objects {
            objects.insert(object.number, memory_file(object, &lacking)?);
        }
        let mapped = open_mapped(plan, &descriptors)?;
        Ok(Inherited { files, folders, objects, mapped, lacking, descriptors })
    }

    /// Nothing: of processes that have only memory without files so far.
    pub(super) fn nothing() -> Inherited {
        raise_limit();
        Inherited {
            files: BTreeMap::new(),
            folders: BTreeMap::new(),
            objects: BTreeMap::new(),
            mapped: BTreeMap::new(),
            lacking: Mutex::default(),
            descriptors: Recreated::nothing(),
        }
    }

    pub(super) fn file(&self, file: &MappedFile) -> Result<RawFd, EngineError> {
        let found = self.files.get(&(file.path.clone(), file.writable));
        found.map(AsRawFd::as_raw_fd).ok_or(EngineError::Nonsense("a file that is not there"))
    }

    pub(super) fn folder(&self, path: &Path) -> Result<RawFd, EngineError> {
        let found = self.folders.get(path);
        found.map(AsRawFd::as_raw_fd).ok_or(EngineError::Nonsense("a folder that is not there"))
    }

    pub(super) fn description(&self, index: u32) -> Result<RawFd, EngineError> {
        let found = self.mapped.get(&index);
        found.map(AsRawFd::as_raw_fd).ok_or(EngineError::Nonsense("a mapping of no description"))
    }

    /// Notes that memory of a process has no huge pages of `bytes`, for `why`.
    pub(super) fn lacks(&self, bytes: u64, why: &io::Error) {
        lacks(&self.lacking, "memory of the job", bytes, why);
    }

    /// What was made otherwise than it was, for the job's log.
    pub(super) fn take_notes(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.lacking.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn object(&self, number: u64) -> Result<RawFd, EngineError> {
        let found = self.objects.get(&number);
        found.map(AsRawFd::as_raw_fd).ok_or(EngineError::Nonsense("a mapping of no object"))
    }
}

/// What of the files that the job has is not here, or is another, a sentence each. Changes nothing.
pub(super) fn lacking(plan: &Plan) -> Result<BTreeSet<String>, EngineError> {
    let looked = crate::plugins::look_at_files(&plan.descriptors, &plan.paths)?;
    let mut lacking = looked.lacking;
    let written = written(plan);
    for process in &plan.processes {
        for file in process.files.iter().chain(&process.exe) {
            let path = plan.paths.apply(&file.path);
            if looked.coming.contains(&path) {
                continue;
            }
            let opened = open(file, written.contains(file.path.as_path()), &path);
            lacking.extend(opened.err().map(|error| error.to_string()));
        }
        if process.cwd_removed.is_none() {
            let opened = open_folder(&plan.paths.apply(&process.cwd));
            lacking.extend(opened.err().map(|error| error.to_string()));
        }
    }
    Ok(lacking)
}

/// The paths that the job's files are looked for under, and where a restart keeps what it needs.
pub(super) fn paths(plan: &Plan) -> impl Iterator<Item = PathBuf> {
    let of_process = |process: &ProcessState| {
        let files = process.files.iter().chain(&process.exe).map(|file| file.path.clone());
        files.chain([process.cwd.clone()]).collect::<Vec<_>>()
    };
    let theirs = plan.processes.iter().flat_map(of_process);
    let opened = plan.descriptors.paths().into_iter().map(Path::to_owned);
    let theirs = theirs.chain(opened).map(|path| plan.paths.apply(&path));
    // Few, and first: the others are bounded.
    [plan.journal.clone(), std::env::temp_dir()].into_iter().chain(theirs)
}

/// Every open file description of the job, made anew.
fn recreate(plan: &Plan) -> Result<Recreated, EngineError> {
    // SAFETY: the standard streams are never closed. One that is not open is no stream.
    let stream =
        |fd| unsafe { (libc::fcntl(fd, libc::F_GETFD) >= 0).then(|| BorrowedFd::borrow_raw(fd)) };
    let options = RecreateOptions {
        more: plan.plugins.clone(),
        folder: plan.folder.clone(),
        opened: plan.chain.first().map(|(folder, _)| folder.clone()),
        paths: plan.paths.clone(),
        streams: [stream(0), stream(1), stream(2)],
        processes: plan.job.processes.clone(),
        tell: Some(plan.tell),
        journal: Some(plan.journal.clone()),
        mapped: mapped(plan),
        at: plan.at,
        others: plan.others.clone(),
    };
    Ok(plan.descriptors.recreate(&options)?)
}

fn open_mapped(plan: &Plan, descriptors: &Recreated) -> Result<BTreeMap<u32, File>, EngineError> {
    let mut mapped = BTreeMap::new();
    for saved in plan.processes.iter().flat_map(|process| &process.mappings) {
        let Backing::Description(index) = saved.backing else { continue };
        if mapped.contains_key(&index) {
            continue;
        }
        let made = descriptors.descriptors.get(index as usize);
        let made = made.ok_or(EngineError::Nonsense("a mapping of no description"))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", made.as_raw_fd()));
        let what = "open it, which the program had mapped";
        let mut file = if allows_all(made) {
            // Nobody could run a file that is open for writing once more.
            File::from(made.try_clone().map_err(failed(&path, what))?)
        } else {
            let writable = OpenOptions::new().read(true).write(true).open(&path);
            writable.or_else(|_| File::open(&path)).map_err(failed(&path, what))?
        };
        if file.metadata().is_ok_and(|found| found.file_type().is_char_device()) {
            // What a driver showed there (NVIDIA's shows its management library a page of readings)
            // it shows to nobody who has not asked this open file for it: zeros tell that there is
            // nothing.
            let zero = Path::new("/dev/zero");
            let opened = OpenOptions::new().read(true).write(true).open(zero);
            file = opened.map_err(failed(zero, "open it in place of a device"))?;
        }
        mapped.insert(index, file);
    }
    Ok(mapped)
}

/// Whether it was opened for reading and writing.
fn allows_all(made: &OwnedFd) -> bool {
    let allowed = OFlags::RDWR | OFlags::PATH;
    rustix::fs::fcntl_getfl(made)
        .is_ok_and(|flags| flags & (OFlags::ACCMODE | OFlags::PATH) == allowed - OFlags::PATH)
}

/// As many descriptors as may be: each mapped file needs one for a moment.
fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is stored and read; if it cannot be raised, opening tells.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// The files that somebody of the job writes through a mapping.
fn written(plan: &Plan) -> BTreeSet<&Path> {
    let files = plan.processes.iter().flat_map(|process| &process.files);
    files.filter(|file| file.writable).map(|file| file.path.as_path()).collect()
}

/// Opens a file and compares it with what it was, unless the job itself writes it.
fn open(file: &MappedFile, written: bool, path: &Path) -> Result<File, EngineError> {
    let opened = reach::open_at(path, flags(file)).map_err(failed(path, OPEN_MAPPED))?;
    let opened = File::from(opened);
    let found = opened.metadata().map_err(failed(path, "look at it"))?;
    let changed = |what| Err(EngineError::FileChanged { path: path.to_owned(), what });
    match file.written {
        None if found.is_file() => changed("kind"),
        // Its contents come with the image, or are kept as they are found.
        Some(_) if written => Ok(opened),
        Some(_) if found.len() != file.bytes => changed("size"),
        Some(written) if written != (found.mtime(), found.mtime_nsec()) => {
            changed("time of change")
        }
        _ => Ok(opened),
    }
}

const OPEN_MAPPED: &str =
    "open it, which the program had mapped (--path-map names where it lies now)";

/// A FIFO that has taken the name must not block this.
fn flags(file: &MappedFile) -> OFlags {
    let access = if file.writable { OFlags::RDWR } else { OFlags::RDONLY };
    access | OFlags::NONBLOCK | OFlags::NOCTTY
}

/// Opens what will be at `path`.
fn open_home(home: &File, file: &MappedFile, path: &Path) -> Result<File, EngineError> {
    reach::again(home, flags(file)).map(File::from).map_err(failed(path, OPEN_MAPPED))
}

/// The files that somebody of the job maps, by the paths that they have now.
fn mapped(plan: &Plan) -> BTreeSet<PathBuf> {
    let files = plan.processes.iter().flat_map(|process| &process.files);
    files.map(|file| plan.paths.apply(&file.path)).collect()
}

fn open_folder(path: &Path) -> Result<File, EngineError> {
    let what = "open it, the program's working folder (--path-map names where it lies now)";
    let opened = reach::find(path, true).map_err(failed(path, what))?;
    let opened = File::from(opened);
    match opened.metadata().map_err(failed(path, what))?.is_dir() {
        true => Ok(opened),
        false => Err(failed(path, what)(io::ErrorKind::NotADirectory.into())),
    }
}

/// A folder that was removed while somebody worked in it: the one that comes back with a
/// descriptor, or a new one, best under the name that it had.
fn removed_folder(
    path: &Path,
    removed: RemovedFolder,
    descriptors: &Recreated,
) -> Result<File, EngineError> {
    if let Some(index) = removed.description {
        let made = descriptors.descriptors.get(index as usize);
        let made = made.ok_or(EngineError::Nonsense("a folder of no description"))?;
        let made =
            made.try_clone().map_err(failed(path, "open it, the program's working folder"))?;
        return Ok(made.into());
    }
    let bytes = path.as_os_str().as_bytes();
    let name = Path::new(OsStr::from_bytes(bytes.strip_suffix(b" (deleted)").unwrap_or(bytes)));
    let own = format!(".kedge-{}", std::process::id());
    let elsewhere = [name.with_file_name(&own), std::env::temp_dir().join(&own)];
    let places = std::iter::once(name.to_owned()).chain(elsewhere);
    let made = places.map(|place| passing_folder(&place, removed.mode)).find(Result::is_ok);
    let made = made.unwrap_or(Err(io::ErrorKind::PermissionDenied.into()));
    made.map_err(failed(path, "make a folder without a name in its place"))
}

/// Makes a folder, opens it, and removes it.
fn passing_folder(place: &Path, mode: u32) -> io::Result<File> {
    let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let parent = reach::find(parent, true)?;
    mkdirat(&parent, name, Mode::from_raw_mode(mode & 0o777))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(&parent, name, flags, Mode::empty());
    unlinkat(&parent, name, AtFlags::REMOVEDIR)?;
    Ok(opened?.into())
}

fn lacks(lacking: &Lacking, what: &str, bytes: u64, why: &io::Error) {
    let mut lacking = lacking.lock().unwrap_or_else(PoisonError::into_inner);
    lacking.insert(huge::lacking(what, bytes, why));
}

/// A memory file of zeros, of huge pages where the object had some and there are enough.
fn memory_file(object: &SharedObject, lacking: &Lacking) -> Result<OwnedFd, EngineError> {
    let SharedObject { name, bytes, huge, .. } = object;
    if *huge != 0 {
        if !huge::is_possible(*huge, 0, *bytes) {
            return Err(EngineError::Nonsense("huge pages of an impossible size"));
        }
        let made = huge::file("kedge", *huge, 0).and_then(|file| {
            file.set_len(*bytes)?;
            // They are its own from here on.
            huge::Window::of(&file)?;
            Ok(file)
        });
        match made {
            Ok(file) => return Ok(file.into()),
            Err(error) => lacks(lacking, "shared memory of the job", *huge, &error),
        }
    }
    ordinary_file(name, *bytes)
}

/// A memory file of `bytes` zeros.
fn ordinary_file(name: &str, bytes: u64) -> Result<OwnedFd, EngineError> {
    let short: String = name.chars().filter(|c| *c != '\0').take(50).collect();
    let name = std::ffi::CString::new(short.trim_start_matches("/memfd:")).unwrap_or_default();
    // SAFETY: the name is a string; what the call returns is a new descriptor.
    let fd = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(EngineError::last(0, "make shared memory"));
        }
        OwnedFd::from_raw_fd(fd)
    };
    let file = File::from(fd);
    file.set_len(bytes).map_err(|source| EngineError::System {
        pid: 0,
        what: "size shared memory",
        source,
    })?;
    Ok(file.into())
}
