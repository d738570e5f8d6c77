//! The namespaces of a restarted job: process ids of its own, so that they can be the old ones;
//! mounts, for a /proc that shows them; IPC, likewise for ids; time, for clocks that go on; for an
//! ordinary user, users, which allow the rest.

use super::Plan;
use super::files;
use super::init::{self, Rebuilt};
use crate::EngineError;
use crate::follow::Parent;
use crate::plugins::reach;
use crate::state::{Credentials, ProcessState};
use libc::pid_t;
use rustix::thread::CapabilitySet;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The user and the group that a job's processes have, as they see it. To root they are what they
/// were. An ordinary user makes them all its own, in a user namespace which shows its ids as those
/// that they had.
pub(super) fn ids_of(processes: &[ProcessState]) -> Result<(u32, u32), EngineError> {
    // SAFETY: the calls take nothing and cannot fail.
    let own = unsafe { (libc::geteuid(), libc::getegid()) };
    match takes_user_namespace() {
        true => shown(own, processes.iter().map(|process| (process.ids.pid, &process.credentials))),
        false => Ok(own),
    }
}

/// The user and the group as whom a user namespace shows `own`: processes must have had one user
/// and one group. Nobody but root becomes root by that.
fn shown<'a>(
    own: (u32, u32),
    mut processes: impl Iterator<Item = (pid_t, &'a Credentials)> + Clone,
) -> Result<(u32, u32), EngineError> {
    let Some((first, credentials)) = processes.clone().next() else { return Ok(own) };
    let (uid, gid) = (credentials.uids[0], credentials.gids[0]);
    let other = |(_, its): &(pid_t, &Credentials)| its.uids != [uid; 4] || its.gids != [gid; 4];
    if let Some((pid, _)) = processes.find(other) {
        let why = "its processes ran as several users or groups: restart it as root";
        return Err(EngineError::unsupported(pid, why));
    }
    if own.0 == 0 && uid != 0 {
        let why = format!(
            "it ran as user {uid}, and would be root without CAP_SYS_ADMIN: restart it as that user"
        );
        return Err(EngineError::unsupported(first, why));
    }
    Ok((uid, gid))
}

/// Whether the job gets a user namespace: whoever may not make the others without one has it. That
/// is an ordinary user, and root in a container that leaves it no CAP_SYS_ADMIN.
fn takes_user_namespace() -> bool {
    let sets = rustix::thread::capabilities(None);
    let may = sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    !(rustix::process::geteuid().is_root() && may)
}

/// Whether this process, the init, may give others any ids: root may, outside of the namespace of
/// an ordinary user, who may be root in there.
pub(super) fn may_set_ids() -> bool {
    // SAFETY: a plain call.
    let root = unsafe { libc::geteuid() } == 0;
    root && !reach::in_user_namespace()
}

fn failed(what: &'static str) -> EngineError {
    EngineError::last(0, what)
}

fn follows(source: io::Error) -> EngineError {
    EngineError::System { pid: 0, what: "follow its keeper", source }
}

fn check(result: i32, what: &'static str) -> Result<(), EngineError> {
    if result < 0 { Err(failed(what)) } else { Ok(()) }
}

/// Forks the process that enters the namespaces and waits there for the init that it forks: its id.
pub(super) fn enter(
    plan: &Plan,
    streams: &[Option<OwnedFd>; 3],
    mut report: UnixStream,
    serve: impl FnOnce(&mut Rebuilt),
) -> Result<pid_t, EngineError> {
    // SAFETY: the C library's fork makes its own locks usable in the child, which uses nothing of
    // this program's that another thread might hold.
    match unsafe { libc::fork() } {
        -1 => Err(failed("fork")),
        0 => {
            let ended = bind(streams).and_then(|()| keep(plan, &mut report, serve));
            if let Err(error) = &ended {
                init::report_failure(&mut report, error);
            }
            exit(i32::from(ended.is_err()))
        }
        keeper => Ok(keeper),
    }
}

/// Makes `streams` the standard ones.
fn bind(streams: &[Option<OwnedFd>; 3]) -> Result<(), EngineError> {
    for (number, stream) in (0..).zip(streams) {
        if let Some(stream) = stream {
            // SAFETY: a plain call.
            check(unsafe { libc::dup2(stream.as_raw_fd(), number) }, "bind its standard streams")?;
        }
    }
    Ok(())
}

/// Ends this process at once: what its parent has registered for its end is the parent's.
fn exit(status: i32) -> ! {
    // SAFETY: a plain call, which does not return.
    unsafe { libc::_exit(status) }
}

fn keep(
    plan: &Plan,
    report: &mut UnixStream,
    serve: impl FnOnce(&mut Rebuilt),
) -> Result<(), EngineError> {
    unshare(plan)?;
    plan.job.clocks.set_for_children()?;
    let keeper = Parent::this().map_err(follows)?;
    // SAFETY: this process has one thread.
    match unsafe { libc::fork() } {
        -1 => Err(failed("fork")),
        0 => {
            let rebuilt = begin(keeper).and_then(|()| init::run(plan, report, serve));
            if let Err(error) = &rebuilt {
                init::report_failure(report, error);
            }
            exit(i32::from(rebuilt.is_err()))
        }
        init => {
            // What the init holds is not held here as well.
            init::close_all_but(&[])?;
            let mut status = 0;
            // SAFETY: waitpid stores the status.
            while unsafe { libc::waitpid(init, &mut status, 0) } < 0 {
                if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                    break;
                }
            }
            exit(libc::WEXITSTATUS(status))
        }
    }
}

fn unshare(plan: &Plan) -> Result<(), EngineError> {
    // SAFETY: plain calls.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if takes_user_namespace() {
        reach::know(files::paths(plan));
        // SAFETY: a plain call, in a process of one thread.
        let result = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
        check(
            result,
            "make a user namespace, without which an ordinary user, and root without \
             CAP_SYS_ADMIN, cannot restart a job (an administrator allows it by \
             user.max_user_namespaces, kernel.unprivileged_userns_clone or \
             kernel.apparmor_restrict_unprivileged_userns; a container is started with \
             CAP_SYS_ADMIN and without filters of system calls: docs/containers.md)",
        )?;
        let map =
            |file: &str, text: String| {
                let what = "map its user into the user namespace";
                fs::write(format!("/proc/self/{file}"), text)
                    .map_err(|source| EngineError::System { pid: 0, what, source })
            };
        let (their_uid, their_gid) = ids_of(&plan.processes)?;
        map("setgroups", "deny".into())?;
        map("uid_map", format!("{their_uid} {uid} 1"))?;
        map("gid_map", format!("{their_gid} {gid} 1"))?;
    }
    let namespaces = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC;
    // SAFETY: as above.
    let result = unsafe { libc::unshare(namespaces) };
    check(result, "make namespaces for process ids, mounts and IPC")
}

/// The first steps of the init: it ends with its keeper, and /proc shows its own namespace.
fn begin(keeper: Parent) -> Result<(), EngineError> {
    keeper.follow().map_err(follows)?;
    let private = libc::MS_REC | libc::MS_PRIVATE;
    mount(c"none", c"/", None, private, "keep its mounts to itself")?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let proc = "mount /proc (a container in which parts of it are covered takes CAP_SYS_ADMIN, or \
                --security-opt unmask=ALL (Podman), systempaths=unconfined (Docker): \
                docs/containers.md)";
    mount(c"proc", c"/proc", Some(c"proc"), flags, proc)?;
    match rustix::fs::statfs(c"/dev/mqueue") {
        // Where message queues have files, those are the job's own.
        Ok(found) if found.f_type as u64 == crate::plugins::mqueue::MAGIC => {
            mount(c"mqueue", c"/dev/mqueue", Some(c"mqueue"), flags, "mount /dev/mqueue")
        }
        _ => Ok(()),
    }
}

fn mount(
    source: &CStr,
    target: &CStr,
    kind: Option<&CStr>,
    flags: u64,
    what: &'static str,
) -> Result<(), EngineError> {
    let kind = kind.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: the strings live through the call; no data is given.
    let result =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind, flags, std::ptr::null()) };
    check(result, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_but_root_becomes_root() {
        let of = |uid: u32, gid: u32| Credentials {
            uids: [uid; 4],
            gids: [gid; 4],
            groups: Vec::new(),
            capabilities: [0; 5],
            securebits: 0,
        };
        let (root, user, other) = (of(0, 0), of(1000, 100), of(1001, 100));
        let shown = |own, all: &[&Credentials]| {
            shown((own, own), (1..).zip(all.iter().copied())).map_err(|error| error.to_string())
        };
        assert_eq!(shown(7, &[&user, &user]), Ok((1000, 100)));
        assert_eq!(shown(7, &[&root]), Ok((0, 0)));
        assert_eq!(shown(0, &[&root, &root]), Ok((0, 0)));
        assert_eq!(shown(7, &[]), Ok((7, 7)));
        assert!(shown(7, &[&user, &other]).unwrap_err().contains("several users"));
        assert!(shown(0, &[&user]).unwrap_err().contains("restart it as that user"));
    }
}
