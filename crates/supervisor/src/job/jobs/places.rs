//! Where jobs are kept: in the user's state folder, which stays when he logs out, apart for each
//! host, because several may share his home (docs/design/0019-where-jobs-live.md).

use super::dir::only_root_changes;
use crate::job::files::{HOSTS, JOBS, io_error, private_dir, variable};
use crate::job::name::JobError;
use kedge_process::plugins::home_of;
use std::ffi::CString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What the environment says of folders.
#[derive(Debug, Clone, Default)]
pub(super) struct Surroundings {
    pub(super) uid: u32,
    pub(super) host: String,
    /// XDG_STATE_HOME.
    pub(super) state: Option<PathBuf>,
    /// HOME.
    pub(super) home: Option<PathBuf>,
    /// XDG_RUNTIME_DIR.
    pub(super) runtime: Option<PathBuf>,
    /// Where there are folders of everybody.
    pub(super) temporary: PathBuf,
}

impl Surroundings {
    pub(super) fn here() -> Surroundings {
        let uid = rustix::process::geteuid().as_raw();
        // `sudo` may leave root the variables of the user who calls it.
        let own = |folder: &PathBuf| {
            fs::metadata(folder).is_ok_and(|found| found.is_dir() && found.uid() == uid)
        };
        Surroundings {
            uid,
            host: host(),
            state: variable("XDG_STATE_HOME"),
            home: variable("HOME").filter(own).or_else(|| home_of(uid)),
            runtime: variable("XDG_RUNTIME_DIR").filter(own),
            temporary: "/tmp".into(),
        }
    }

    /// Returns the folder of new jobs, made if need be.
    ///
    /// # Errors
    ///
    /// Where XDG_STATE_HOME names a folder that cannot be used, or to root one that others can
    /// change; or nothing else can be used.
    pub(super) fn jobs(&self) -> Result<PathBuf, JobError> {
        if let Some(state) = &self.state {
            // Root keeps nothing where others can put another folder into its place.
            let safe = |path: &Path| path.is_file() || only_root_changes(path);
            if self.uid == 0 && !state.ancestors().all(safe) {
                return Err(JobError::NotRoots { path: state.clone() });
            }
            return self.in_state(state);
        }
        // A home that is not there, is not to be written to, or is another user's, has no state.
        let own = self.home.iter().filter(|home| self.owns(home));
        let in_home =
            own.map(|home| self.in_state(&home.join(".local/state"))).find_map(Result::ok);
        if let Some(jobs) = in_home {
            return Ok(jobs);
        }
        let base = match &self.runtime {
            Some(runtime) => runtime.join("kedge"),
            None => self.temporary()?,
        };
        private_dir(&base, self.uid)?;
        self.private(&base.join(JOBS))
    }

    /// Returns other folders in which there are jobs of this user: those that a kedge with another
    /// environment made, or an older one.
    pub(super) fn others(&self, jobs: &Path) -> Vec<PathBuf> {
        let runtime = match &self.runtime {
            Some(runtime) => vec![runtime.join("kedge")],
            None => {
                let mut all = self.temporaries();
                all.push(format!("/run/user/{}/kedge", self.uid).into());
                all
            }
        };
        let folders = runtime.into_iter().map(|base| base.join(JOBS));
        folders.filter(|folder| folder != jobs && self.is_private(folder)).collect()
    }

    fn in_state(&self, state: &Path) -> Result<PathBuf, JobError> {
        let base = state.join("kedge");
        // Private when they are made; what is there already is the user's to arrange.
        DirBuilder::new().recursive(true).mode(0o700).create(&base).map_err(io_error(&base))?;
        let hosts = self.private(&base.join(HOSTS))?;
        let host = self.private(&hosts.join(&self.host))?;
        self.private(&host.join(JOBS))
    }

    fn private(&self, folder: &Path) -> Result<PathBuf, JobError> {
        private_dir(folder, self.uid).map(|()| folder.to_owned())
    }

    fn owns(&self, folder: &Path) -> bool {
        fs::metadata(folder).is_ok_and(|found| found.is_dir() && found.uid() == self.uid)
    }

    fn is_private(&self, folder: &Path) -> bool {
        fs::symlink_metadata(folder).is_ok_and(|found| {
            found.is_dir() && found.uid() == self.uid && found.permissions().mode() & 0o077 == 0
        })
    }

    /// The user's folder among those of everybody: one that he has, else a new one with a name that
    /// nobody could take before.
    fn temporary(&self) -> Result<PathBuf, JobError> {
        match self.temporaries().into_iter().next() {
            Some(folder) => Ok(folder),
            None => new_folder(&self.temporary.join(format!("kedge-{}-XXXXXX", self.uid))),
        }
    }

    fn temporaries(&self) -> Vec<PathBuf> {
        let begin = format!("kedge-{}", self.uid);
        let is_his = |name: &str| name == begin || name.starts_with(&format!("{begin}-"));
        let names = fs::read_dir(&self.temporary).into_iter().flatten().flatten();
        let named = names.filter(|entry| entry.file_name().to_str().is_some_and(is_his));
        let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
        found.retain(|folder| self.is_private(folder));
        found.sort_unstable();
        found
    }
}

/// Makes a private folder; the last characters of `pattern` are replaced.
fn new_folder(pattern: &Path) -> Result<PathBuf, JobError> {
    let text = CString::new(pattern.as_os_str().as_bytes());
    let mut text = text.map_err(|error| io_error(pattern)(error.into()))?.into_bytes_with_nul();
    // SAFETY: the string ends with NUL, and mkdtemp changes characters in place.
    let made = unsafe { libc::mkdtemp(text.as_mut_ptr().cast()) };
    if made.is_null() {
        return Err(io_error(pattern)(io::Error::last_os_error()));
    }
    text.pop();
    Ok(PathBuf::from(std::ffi::OsString::from_vec(text)))
}

/// The host's name, as a folder's.
fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let name: String = name.chars().map(|c| if safe(c) { c } else { '_' }).take(64).collect();
    if name.starts_with(|c: char| c.is_ascii_alphanumeric()) { name } else { format!("host{name}") }
}
