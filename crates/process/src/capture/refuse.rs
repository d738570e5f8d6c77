//! What kedge cannot bring back yet, by name.

use super::lookup::Lookup;
use super::{guards, mapped};
use crate::maps::{self, Mapping};
use crate::plugins::{procfs, sys};
use crate::proc::{self, Status};
use crate::stop::{self, Roots};
use crate::vdso::NAME as VDSO;
use crate::{EngineError, huge, rseq, several};
use libc::pid_t;
use rustix::process::geteuid;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

const NAMESPACES: [&str; 7] =
    ["ns/mnt", "ns/user", "ns/pid", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup"];

const LOGIN: &str = "loginuid";

/// Where this process is, with which the job's processes are compared.
#[derive(Debug)]
pub(super) struct Here {
    namespaces: [PathBuf; NAMESPACES.len()],
    groups: String,
    /// Empty on a kernel that has none.
    login: String,
}

impl Here {
    pub(super) fn now() -> Result<Here, EngineError> {
        let own = std::process::id() as pid_t;
        let mut namespaces = NAMESPACES.map(|_| PathBuf::new());
        for (link, name) in namespaces.iter_mut().zip(NAMESPACES) {
            *link = proc::link(own, name)?;
        }
        let login = proc::text(own, LOGIN).unwrap_or_default();
        Ok(Here { namespaces, groups: proc::text(own, "cgroup")?, login })
    }
}

/// Looks at all processes of `roots` before one of them is stopped.
pub(super) fn ahead(roots: &Roots) -> Result<(), EngineError> {
    let here = Here::now()?;
    for pid in stop::alive(roots) {
        match one(pid, &here) {
            // What has ended meanwhile is in nobody's way.
            Err(EngineError::Ended { .. }) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Looks at what all processes of `roots` map, before one of them is stopped. `is_held` tells
/// whether the job has a file of this device and inode open.
pub(super) fn mapped_ahead(
    roots: &Roots,
    is_held: impl Fn(u64, u64) -> bool + Sync,
) -> Result<(), EngineError> {
    let (pids, lookup) = (stop::alive(roots), Lookup::default());
    let looked = several::each(&pids, |pid| mapped(*pid, &lookup, &is_held));
    let mut looked = pids.into_iter().zip(looked);
    looked.try_for_each(|(pid, looked)| match looked {
        Err(error) if passes(&error) => mapped_again(pid, &is_held),
        other => other,
    })
}

/// How often what may be otherwise in a moment is looked at, and what passes between two looks.
pub(super) const LOOKS: usize = 5;
pub(super) const PAUSE: Duration = Duration::from_millis(3);

/// Whether what a running process is refused for may be otherwise in a moment.
pub(super) fn passes(error: &EngineError) -> bool {
    matches!(error, EngineError::Unsupported { .. } | EngineError::NoEntry { .. })
}

/// Looks at one process again, and at no other: it may have removed the name of a file that it has
/// just mapped, have opened what it maps since `is_held` was known, or be becoming another program.
/// Names are looked up anew, too.
fn mapped_again(pid: pid_t, is_held: impl Fn(u64, u64) -> bool) -> Result<(), EngineError> {
    let mut looks = 2;
    loop {
        thread::sleep(PAUSE);
        let opened = opened(proc::reach(pid));
        let is_held = |device, inode| opened.contains(&(device, inode)) || is_held(device, inode);
        match mapped(pid, &Lookup::default(), is_held) {
            Err(error) if passes(&error) && looks < LOOKS => looks += 1,
            other => return other,
        }
    }
}

/// Device and inode of each file that `pid` has open, for more than its path.
fn opened(pid: pid_t) -> BTreeSet<(u64, u64)> {
    // What is closed meanwhile is not open.
    let numbers = procfs::descriptors(pid).unwrap_or_default();
    let seen = numbers.into_iter().filter_map(|fd| procfs::descriptor(pid, fd).ok()?);
    let open = seen.filter(|seen| !seen.info.is_path_only());
    open.map(|seen| (seen.stat.device, seen.stat.inode)).collect()
}

fn mapped(
    pid: pid_t,
    lookup: &Lookup,
    is_held: impl Fn(u64, u64) -> bool,
) -> Result<(), EngineError> {
    match look_at_mapped(pid, lookup, is_held) {
        Err(EngineError::Ended { .. }) => Ok(()),
        // What is ending loses its memory before it has ended: that is told as it may.
        Err(_) if !proc::goes_on(proc::reach(pid)) => Ok(()),
        other => other,
    }
}

fn look_at_mapped(
    pid: pid_t,
    lookup: &Lookup,
    is_held: impl Fn(u64, u64) -> bool,
) -> Result<(), EngineError> {
    let at = proc::reach(pid);
    let mappings = maps::named(at)?;
    huge_pages(at, &mappings)?;
    let nameless = mapped::look(at, &mappings, lookup, is_held)?;
    guards::refuse_in(at, &nameless)?;
    // One that is ending maps nothing any more.
    let has_code = mappings.is_empty() || mappings.iter().any(|mapping| mapping.name == VDSO);
    if has_code { Ok(()) } else { Err(EngineError::NoEntry { pid }) }
}

/// Refuses stopped processes that have one memory (CLONE_VM without CLONE_THREAD): each would come
/// back with a memory of its own. While they run, it may be a child of vfork(), which soon has
/// another.
pub(super) fn one_memory(pids: impl Iterator<Item = pid_t>) -> Result<(), EngineError> {
    // In kcmp's order. Those that cannot be compared have ended.
    let mut ordered: Vec<pid_t> = Vec::new();
    for pid in pids {
        let compare = |other: &pid_t| sys::compare_memory(*other, pid).unwrap_or(Ordering::Less);
        match ordered.binary_search_by(compare) {
            Err(at) => ordered.insert(at, pid),
            Ok(at) => {
                let other = ordered[at];
                let why = "which kedge cannot save yet";
                let what = format!("it has one memory with process {other} (CLONE_VM), {why}");
                return Err(EngineError::unsupported(pid, what));
            }
        }
    }
    Ok(())
}

fn one(pid: pid_t, here: &Here) -> Result<(), EngineError> {
    let at = proc::reach(pid);
    let tracer = Status::of(at)?.decimal("TracerPid") as pid_t;
    if tracer != 0 {
        return Err(EngineError::Traced { pid, tracer });
    }
    process(pid, at, here)?;
    let user = (!geteuid().is_root()).then(|| geteuid().as_raw());
    if let Some(login) = user.and_then(|user| lost_login(at, user, &here.login)) {
        let what = "which a restart can give back to root's jobs alone";
        let what = format!("it has set its login's user to {login} (loginuid), {what}");
        return Err(EngineError::unsupported(pid, what));
    }
    rseq::refuse_untold(pid)
}

/// The login's user of the process `pid`, if it is neither the one that `user` started kedge with
/// nor `user`. In the namespace that an ordinary user's restart makes, nobody else has an id.
fn lost_login(pid: pid_t, user: u32, own: &str) -> Option<String> {
    // Some kernels have none.
    let login = proc::text(pid, LOGIN).ok()?;
    let login = login.trim();
    (login != own.trim() && login != user.to_string()).then(|| login.to_owned())
}

/// Refuses the process `pid` for where it is: by its thread `at`, or its clone, which is there.
pub(super) fn process(pid: pid_t, at: pid_t, here: &Here) -> Result<(), EngineError> {
    let unsupported = |what: &str| {
        Err(EngineError::unsupported(pid, format!("{what}, which kedge cannot save yet")))
    };
    for (name, own) in NAMESPACES.into_iter().zip(&here.namespaces) {
        // As bytes: a comparison of paths would take them apart.
        if proc::link(at, name)?.as_os_str() != own.as_os_str() {
            return unsupported("it has namespaces of its own");
        }
    }
    if proc::link(at, "root")? != Path::new("/") {
        return unsupported("it has changed its root folder");
    }
    if let Some(group) = other_group(&proc::text(at, "cgroup")?, &here.groups) {
        return unsupported(&format!("it has moved into the control group {group}"));
    }
    Ok(())
}

/// Refuses huge pages that are not understood: taken for ordinary ones, they could end the program.
pub(super) fn huge_pages(pid: pid_t, mappings: &[Mapping]) -> Result<(), EngineError> {
    let Some(Mapping { name, .. }) = huge::unknown(pid, mappings)? else { return Ok(()) };
    let what =
        match ["/anon_hugepage", "/memfd:", "/SYSV"].iter().any(|kind| name.starts_with(kind)) {
            true => "huge pages whose size the kernel does not tell now: try again",
            false => "a file in a hugetlbfs, which kedge cannot save yet",
        };
    Err(EngineError::unsupported(pid, format!("it maps {name}, {what}")))
}

/// A line of `its` that is not in `own` and names a group. The root of a hierarchy is none: it has
/// no limits that a restart could lose, and a machine's service may move whomever it no longer
/// watches there at any moment.
fn other_group<'a>(its: &'a str, own: &str) -> Option<&'a str> {
    let same = |line: &str| own.lines().any(|own| own == line);
    its.lines().find(|line| !line.ends_with(":/") && !same(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{self, AtomicUsize};

    /// A child that maps what this process maps, and lives no longer than this.
    struct Forked(pid_t);

    impl Forked {
        fn new() -> Forked {
            // SAFETY: the child makes system calls alone, whatever other threads hold.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                loop {
                    // SAFETY: the call takes no arguments, and returns where a handler has run.
                    unsafe { libc::pause() };
                }
            }
            assert!(pid > 0);
            Forked(pid)
        }
    }

    impl Drop for Forked {
        fn drop(&mut self) {
            // SAFETY: it is this test's child and not collected; the kernel stores no status.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }

    /// Of one whose name goes just when it is looked at, and of nobody else.
    #[test]
    fn a_process_that_removes_what_it_maps_is_looked_at_again_by_itself() {
        let name = format!("kedge-mapped-{}", std::process::id());
        let [path, other] =
            ["one", "other"].map(|of| std::env::temp_dir().join(format!("{name}-{of}")));
        let map = |path: &Path| {
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.set_len(kedge_image::PAGE).unwrap();
            let (length, access) = (kedge_image::PAGE as usize, libc::PROT_READ);
            let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
            // SAFETY: a new mapping, wherever the kernel puts it, that nobody looks into.
            let at = unsafe { libc::mmap(null, length, access, libc::MAP_SHARED, fd, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            (file.metadata().unwrap().ino(), at, length)
        };
        // What a child maps, and nobody else.
        let held_by_child = |path: &Path| {
            let (inode, at, length) = map(path);
            let child = Forked::new();
            // SAFETY: it was mapped above, and nobody else knows of it.
            unsafe { libc::munmap(at, length) };
            (inode, child)
        };
        let ((elsewhere, another), (inode, one)) = (held_by_child(&other), held_by_child(&path));
        let (seen, seen_elsewhere) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let is_held = |_, of: u64| {
            if of == inode && seen.fetch_add(1, atomic::Ordering::SeqCst) == 0 {
                fs::remove_file(&path).unwrap();
            }
            seen_elsewhere.fetch_add(usize::from(of == elsewhere), atomic::Ordering::SeqCst);
            false
        };
        let looked = mapped_ahead(&Roots::These(vec![another.0, one.0]), is_held);
        fs::remove_file(&other).unwrap();
        looked.unwrap();
        assert_eq!((seen.into_inner(), seen_elsewhere.into_inner()), (2, 1));
    }

    #[test]
    fn the_root_of_a_hierarchy_is_no_group() {
        let own = "4:memory:/watched/7\n3:cpu:/\n0::/\n";
        assert_eq!(other_group(own, own), None);
        assert_eq!(other_group("4:memory:/\n3:cpu:/\n0::/\n", own), None);
        let moved = "4:memory:/watched/7\n3:cpu:/mine\n0::/\n";
        assert_eq!(other_group(moved, own), Some("3:cpu:/mine"));
    }
}
