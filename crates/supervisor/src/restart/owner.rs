//! Root restarts the image of another user as that user: kedge is started anew with that user's
//! rights alone, before anything but the image has been looked at.

use crate::job::spec::RunError;
use crate::restart::candidates::candidates;
use kedge_image::Folder;
use kedge_process::{Identity, Owner};
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What of root's environment the user may know: it is readable in /proc from then on.
const KEPT: [&str; 7] = ["PATH", "TERM", "COLORTERM", "NO_COLOR", "LANG", "TZ", "XDG_DATA_DIRS"];
const KEPT_PREFIXES: [&str; 2] = ["LC_", "KEDGE_"];
const RUNTIME: &str = "XDG_RUNTIME_DIR";

/// The image or the folder of images `named`, which was found at `path`, and whose it is: where it
/// is in truth and, if this process is root and the image (the newest one) is another user's, that
/// user.
///
/// # Errors
///
/// Where the image cannot be believed, or claims more than its owner has.
pub fn other_owner(named: &Path, path: PathBuf) -> Result<(PathBuf, Option<Owner>), RunError> {
    if !rustix::process::geteuid().is_root() {
        return Ok((path, None));
    }
    // With the links on the way, as it was named; from here on, the one that was looked at.
    let path = Folder::open(named)?.real()?;
    let images = candidates(&path)?;
    let Some((folder, _)) = images.first() else { return Ok((path, None)) };
    match Identity::of_image(folder)? {
        Identity::Caller => Ok((path, None)),
        Identity::User(owner) => Ok((path, Some(owner))),
    }
}

/// Replaces this process by kedge with those arguments, as `owner` and with no right that this user
/// has not. Returns why it could not.
pub fn start_as(owner: &Owner, arguments: &[OsString]) -> RunError {
    let own = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let mut command = Command::new(own);
    command.arg0("kedge").args(arguments).env_clear();
    command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_kept)));
    let runtime = format!("/run/user/{}", owner.uid);
    if std::fs::symlink_metadata(&runtime).is_ok_and(|m| m.is_dir() && m.uid() == owner.uid) {
        command.env(RUNTIME, runtime);
    }
    let become_it = owner.clone();
    // SAFETY: the closure makes system calls and allocates nothing.
    unsafe { command.pre_exec(move || become_owner(&become_it)) };
    let source = command.exec();
    RunError::System { what: "start kedge as the image's owner", source }
}

fn is_kept(name: &str) -> bool {
    // Root's secret: whoever has the key can take part in every job that has it. And a file of
    // root's.
    if name == crate::job::joint::KEY || name == crate::base::again::CONFIG {
        return false;
    }
    KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Header of capset(2) for its third version, and of this process.
const CAPABILITY_HEADER: [u32; 2] = [0x2008_0522, 0];
/// `KEYCTL_JOIN_SESSION_KEYRING` of keyctl(2).
const JOIN_SESSION_KEYRING: libc::c_long = 1;
/// Inheritable, permitted and effective, in two halves.
const NO_CAPABILITIES: [u32; 6] = [0; 6];

fn become_owner(owner: &Owner) -> io::Result<()> {
    let done = |result: libc::c_long| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let Owner { uid, gid, groups } = owner;
    // SAFETY: each takes numbers, or arrays that live through the call and are as long as it is
    // told.
    unsafe {
        done(libc::setgroups(groups.len(), groups.as_ptr()).into())?;
        done(libc::setresgid(*gid, *gid, *gid).into())?;
        done(libc::setresuid(*uid, *uid, *uid).into())?;
        // Whoever has a session's keyring has its keys, whosever they are. A kernel or container
        // without keyrings has none to give away.
        let none = std::ptr::null::<libc::c_char>();
        let joined = libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, none);
        let absent = [Some(libc::ENOSYS), Some(libc::EPERM)];
        if joined < 0 && !absent.contains(&io::Error::last_os_error().raw_os_error()) {
            return Err(io::Error::last_os_error());
        }
        // They are gone already, unless the process's securebits say otherwise.
        let (header, none) = (CAPABILITY_HEADER.as_ptr(), NO_CAPABILITIES.as_ptr());
        done(libc::syscall(libc::SYS_capset, header, none))?;
        let (first, flags) = (3, libc::CLOSE_RANGE_CLOEXEC);
        done(libc::syscall(libc::SYS_close_range, first, u32::MAX, flags))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_the_environment_stay() {
        for name in ["PATH", "LC_ALL", "KEDGE_LIB_DIR", "LANG"] {
            assert!(is_kept(name), "{name}");
        }
        let secrets = ["AWS_SECRET_ACCESS_KEY", "KEDGE_JOIN_KEY", "HOME", "XDG_RUNTIME_DIR"];
        for name in secrets.into_iter().chain(["LD_PRELOAD", "PATHS"]) {
            assert!(!is_kept(name), "{name}");
        }
    }
}
