//! The running kernel: what it is, and what it lacks of what kedge uses (docs/kernels.md).
//!
//! Distributions bring newer features to older versions, so a kernel is asked for what it has.

use crate::pagemap::{Run, Scanner, Wanted};
use crate::{EngineError, filters};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// What cannot be done without a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stops {
    Jobs,
    Checkpoints,
    Restarts,
    /// It is had another way, or something is left out by name.
    Nothing,
}

/// Something that kedge uses and that not every kernel has.
#[derive(Debug, Clone, Copy)]
pub struct Feature {
    pub name: &'static str,
    /// The version of Linux that brought it, or the option that a kernel is built with.
    pub since: &'static str,
    /// What kedge does where it is missing.
    pub without: &'static str,
    pub stops: Stops,
    there: fn() -> bool,
}

/// All of them, the oldest first.
pub const FEATURES: &[Feature] = &[
    Feature {
        name: "kcmp",
        since: "CONFIG_KCMP or CONFIG_CHECKPOINT_RESTORE",
        without: "no job can be checkpointed",
        stops: Stops::Checkpoints,
        there: compares,
    },
    Feature {
        name: "/proc/PID/task/TID/children",
        since: "CONFIG_PROC_CHILDREN",
        without: "no job can be checkpointed",
        stops: Stops::Checkpoints,
        there: lists_children,
    },
    Feature {
        name: "pidfd_open",
        since: "5.3",
        without: "no job runs",
        stops: Stops::Jobs,
        there: opens_processes,
    },
    Feature {
        name: "clone3 with set_tid",
        since: "5.5",
        without: "no image can be restarted",
        stops: Stops::Restarts,
        there: sets_ids,
    },
    Feature {
        name: "pidfd_getfd",
        since: "5.6",
        without: "no job can be checkpointed",
        stops: Stops::Checkpoints,
        there: takes_descriptors,
    },
    Feature {
        name: "time namespaces",
        since: "5.6, CONFIG_TIME_NS",
        without: "clocks that count from the machine's start jump forward at a restart; a restart after a reboot, \
                  under which they would go back, is refused",
        stops: Stops::Nothing,
        there: || fs::exists("/proc/self/ns/time").unwrap_or(false),
    },
    Feature {
        name: "close_range",
        since: "5.9",
        without: "no job runs",
        stops: Stops::Jobs,
        there: closes_ranges,
    },
    Feature {
        name: "PTRACE_GET_RSEQ_CONFIGURATION",
        since: "5.13",
        without: "threads find their areas for restartable sequences (rseq) themselves; a program with one at an odd \
                  place is not checkpointed, by name",
        stops: Stops::Nothing,
        there: || release() >= (5, 13),
    },
    Feature {
        name: "IP_LOCAL_PORT_RANGE",
        since: "6.3",
        without: "a connection inside of a job whose client's port others use as well comes back from another port",
        stops: Stops::Nothing,
        there: chooses_ports,
    },
    Feature {
        name: "PAGEMAP_SCAN",
        since: "6.7",
        without: "images are full ones: none is incremental, no memory is written ahead of the pause, guards \
                  (MADV_GUARD_INSTALL) are not known",
        stops: Stops::Nothing,
        there: scans,
    },
    Feature {
        name: "PIDFD_THREAD",
        since: "6.9",
        without: "a process whose first thread has ended is not checkpointed, by name",
        stops: Stops::Nothing,
        there: || pidfd(libc::O_EXCL).is_ok(),
    },
];

/// Refuses what the running kernel cannot do.
///
/// # Errors
///
/// [`EngineError::Kernel`], which names the first feature that it lacks.
pub fn require(what: Stops) -> Result<(), EngineError> {
    let mut features = FEATURES.iter().filter(|feature| feature.stops == what);
    let lacking = features.find(|feature| !(feature.there)());
    lacking.map_or(Ok(()), |feature| Err(EngineError::Kernel(*feature)))
}

impl std::fmt::Display for Feature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let linux = if self.since.starts_with("CONFIG") { "" } else { "Linux " };
        write!(f, "no {} ({linux}{}): {}", self.name, self.since, self.without)
    }
}

/// Returns what helps where a feature is missing.
#[must_use]
pub fn remedy() -> &'static str {
    match filters::are_inherited() {
        true => "this container's filter of system calls may hide it: docs/containers.md",
        false => "use a newer one (`kedge doctor` tells what it lacks): docs/kernels.md",
    }
}

/// Returns what the running kernel lacks.
pub fn lacks() -> Vec<Feature> {
    FEATURES.iter().copied().filter(|feature| !(feature.there)()).collect()
}

/// Returns the version of the running kernel, as far as it counts: 5 and 10 of 5.10.0-46-amd64. (0,
/// 0) if it is not told in that form.
pub(crate) fn release() -> (u32, u32) {
    static RELEASE: OnceLock<(u32, u32)> = OnceLock::new();
    *RELEASE.get_or_init(|| {
        let mut name = std::mem::MaybeUninit::<libc::utsname>::zeroed();
        // SAFETY: uname fills the structure, whose texts end with zeros; zeros are texts, too.
        let name = unsafe {
            libc::uname(name.as_mut_ptr());
            name.assume_init()
        };
        // SAFETY: uname's texts end with zeros, and zeros are a text.
        let release = unsafe { CStr::from_ptr(name.release.as_ptr()) };
        parse(&release.to_string_lossy()).unwrap_or((0, 0))
    })
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The error of the last call, unless `result` says that there was none.
fn error_of(result: libc::c_long) -> Option<i32> {
    if result < 0 { io::Error::last_os_error().raw_os_error() } else { None }
}

/// A descriptor for this process.
fn pidfd(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers; what it returns is a new descriptor, which is nobody else's.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, libc::getpid(), flags);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Whether a call that makes a descriptor is there, of the error with which it failed: one that
/// finds no room for a descriptor is.
fn found_no_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

fn opens_processes() -> bool {
    pidfd(0).map_or_else(|error| found_no_room(&error), |_| true)
}

fn takes_descriptors() -> bool {
    let own = match pidfd(0) {
        Ok(own) => own,
        // It cannot be asked: who needs it is told what is in the way.
        Err(error) => return found_no_room(&error),
    };
    // SAFETY: the call takes numbers. No descriptor has that number.
    let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, own.as_raw_fd(), i32::MAX, 0) };
    error_of(taken) != Some(libc::ENOSYS)
}

fn compares() -> bool {
    /// Whether two processes have the same memory.
    const KCMP_VM: i32 = 1;
    // SAFETY: the call takes numbers.
    unsafe {
        let own = libc::getpid();
        libc::syscall(libc::SYS_kcmp, own, own, KCMP_VM, 0, 0) == 0
    }
}

fn lists_children() -> bool {
    let own = std::process::id();
    fs::exists(format!("/proc/self/task/{own}/children")).unwrap_or(false)
}

fn sets_ids() -> bool {
    // More ids than there are namespaces: refused as such (EINVAL), or as more than the kernel
    // knows (E2BIG, ENOSYS).
    let mut arguments = [0u64; 11];
    arguments[9] = 1 << 20;
    // SAFETY: the kernel reads the structure, and makes nobody of it.
    let made = unsafe { libc::syscall(libc::SYS_clone3, arguments.as_ptr(), 88usize) };
    error_of(made) == Some(libc::EINVAL)
}

fn closes_ranges() -> bool {
    // SAFETY: no descriptor has that number.
    unsafe { libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, 0) == 0 }
}

fn chooses_ports() -> bool {
    const IP_LOCAL_PORT_RANGE: i32 = 51;
    let none = 0u32;
    // SAFETY: socket returns a new descriptor, which is nobody else's; setsockopt reads four bytes.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            // Without IPv4 nobody has such a port.
            return true;
        }
        let socket = OwnedFd::from_raw_fd(fd);
        let (level, value) = (libc::IPPROTO_IP, (&raw const none).cast());
        libc::setsockopt(socket.as_raw_fd(), level, IP_LOCAL_PORT_RANGE, value, 4) == 0
    }
}

fn scans() -> bool {
    const ANY: Run = (0, 4096);
    let own = std::process::id() as libc::pid_t;
    Scanner::of(own).and_then(|mut pages| pages.runs(ANY, &Wanted::OWN)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(parse("5.10.0-46-amd64"), Some((5, 10)));
        assert_eq!(parse("4.18.0-553.el8_10.x86_64"), Some((4, 18)));
        assert_eq!(parse("6.18"), Some((6, 18)));
        assert_eq!(parse("7"), None);
        assert!(release() > (3, 0));
    }

    /// The kernel's own version, where it is no older than what brought a feature, has it; the
    /// other way round it may.
    #[test]
    fn what_a_version_brought_is_there_from_then_on() {
        for feature in lacks() {
            let brought = parse(feature.since.split(',').next().unwrap_or(""));
            let newer = brought.is_some_and(|brought| release() >= brought);
            // Namespaces can be left out of a kernel.
            assert!(!newer || feature.since.contains("CONFIG"), "{feature:?} at {:?}", release());
            assert!(!feature.without.is_empty());
        }
    }

    /// In a process of its own: descriptors are everybody's.
    #[test]
    fn a_process_without_room_for_descriptors_has_them_too() {
        // SAFETY: the child makes calls and allocates, which glibc allows after fork, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the kernel reads the structure.
            let limited = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) } == 0;
            let lacks = require(Stops::Jobs).is_err() || !takes_descriptors();
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!limited || lacks)) };
        }
        let mut status = 0;
        // SAFETY: the process is this one's own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_feature_is_named_with_what_brought_it() {
        let told = FEATURES.iter().map(|feature| EngineError::Kernel(*feature).to_string());
        let told: Vec<String> = told.collect();
        assert!(told.iter().any(|said| said.contains("no pidfd_open (Linux 5.3): no job runs")));
        assert!(told.iter().any(|said| said.contains("(CONFIG_PROC_CHILDREN)")));
        // This one runs the tests of all three.
        for what in [Stops::Jobs, Stops::Checkpoints, Stops::Restarts] {
            require(what).unwrap();
        }
    }
}
