//! Runs operations below with the credentials of the process that asked for them.

use rustix::fs::{Mode, Stat};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::io;

/// The process that asked, by its ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) process: u32,
}

impl Caller {
    /// Runs `work` with the caller's rights, if the daemon is root's.
    ///
    /// Only the effective ids of this thread change. Its real user stays root, so that the caller
    /// cannot send signals to the daemon.
    ///
    /// # Errors
    /// What `work` fails with, or the change of ids.
    pub(crate) fn run<R>(self, mut work: impl FnMut() -> io::Result<R>) -> io::Result<R> {
        let root = rustix::process::geteuid().is_root();
        if !root || (self.user == 0 && self.group == 0) {
            return work();
        }
        // Most operations need the first group alone, and reading the others takes long.
        match self.with(&[], &mut work) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.with(&self.groups(), &mut work)
            }
            other => other,
        }
    }

    /// Runs `work` as [`Caller::run`] does, with all the caller's groups from the start: for
    /// operations that succeed without a group, but differently, such as chmod, which drops the
    /// set-group-id bit for those who are not members.
    ///
    /// # Errors
    /// As [`Caller::run`].
    pub(crate) fn run_with_groups<R>(
        self,
        mut work: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        match rustix::process::geteuid().is_root() && self.user != 0 {
            true => self.with(&self.groups(), &mut work),
            false => work(),
        }
    }

    /// Runs `work`, which makes something with `mode`, with the caller's rights.
    ///
    /// # Errors
    /// As [`Caller::run`].
    pub(crate) fn make<R>(self, mode: Mode, work: impl FnMut() -> io::Result<R>) -> io::Result<R> {
        match mode.contains(Mode::SGID) {
            true => self.run_with_groups(work),
            false => self.run(work),
        }
    }

    /// Runs `work` with the caller's ids and `groups`; `Restored` gives the daemon's back.
    fn with<R>(self, groups: &[Gid], work: &mut impl FnMut() -> io::Result<R>) -> io::Result<R> {
        let _restored = Restored;
        set_thread_groups(groups)?;
        set_thread_res_gid(None, Gid::from_raw(self.group), None)?;
        set_thread_res_uid(None, Uid::from_raw(self.user), None)?;
        work()
    }

    /// Runs `work` as a file's owner, so that the owner's quota applies and root's reserve does
    /// not.
    ///
    /// `work` runs once more with the daemon's rights if the owner is refused: the file was opened
    /// with the right to do it.
    ///
    /// # Errors
    /// What `work` fails with, or the change of ids.
    pub(crate) fn run_as_owner<R>(
        stat: &Stat,
        mut work: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        if !rustix::process::geteuid().is_root() || stat.st_uid == 0 {
            return work();
        }
        let owner = Caller { user: stat.st_uid, group: stat.st_gid, process: 0 };
        match owner.with(&[], &mut work) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => work(),
            other => other,
        }
    }

    /// Returns the caller's supplementary groups, which cannot change while it waits for an answer.
    fn groups(self) -> Vec<Gid> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        let numbers = line.unwrap_or_default().split_whitespace();
        numbers.filter_map(|word| word.parse().ok()).map(Gid::from_raw).collect()
    }
}

/// Gives the thread the daemon's rights back when it is dropped.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        let back = set_thread_res_uid(None, Uid::ROOT, None)
            .and_then(|()| set_thread_res_gid(None, Gid::ROOT, None))
            .and_then(|()| set_thread_groups(&[]));
        if back.is_err() {
            // A thread with the wrong rights must not answer anybody else.
            std::process::abort();
        }
    }
}
