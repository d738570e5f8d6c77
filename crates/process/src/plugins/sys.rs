//! The few system calls that rustix does not have.

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::cmp::Ordering;
use std::io;

const KCMP_FILE: i32 = 0;
const KCMP_VM: i32 = 1;
const KCMP_FILES: i32 = 2;

fn kcmp(a: i32, b: i32, kind: i32, x: u64, y: u64) -> io::Result<Ordering> {
    // SAFETY: these kinds of kcmp take numbers, or the address of a structure that the kernel
    // reads.
    match unsafe { libc::syscall(libc::SYS_kcmp, a, b, kind, x, y) } {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        -1 => Err(io::Error::last_os_error()),
        _ => Err(io::Error::other("kcmp cannot order them")),
    }
}

/// Orders open file descriptions: equal if both descriptors are of the same one. The order means
/// nothing, but is total while nothing is closed.
pub(crate) fn compare_files(a: (i32, i32), b: (i32, i32)) -> io::Result<Ordering> {
    kcmp(a.0, b.0, KCMP_FILE, a.1 as u64, b.1 as u64)
}

/// Orders tables of descriptors: equal if both processes share one.
pub(crate) fn compare_tables(a: i32, b: i32) -> io::Result<Ordering> {
    kcmp(a, b, KCMP_FILES, 0, 0)
}

/// Orders memories: equal if both processes have the same.
pub(crate) fn compare_memory(a: i32, b: i32) -> io::Result<Ordering> {
    kcmp(a, b, KCMP_VM, 0, 0)
}

/// Whom O_ASYNC signals go to: `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`, and the id.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub kind: i32,
    pub id: i32,
}

pub(crate) const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
pub(crate) const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;

/// Whether nobody has the file, which is open here for reading, open for writing: only then is
/// there a lease on it (fcntl(2)), for its owner. False where that cannot be told.
pub(crate) fn nobody_writes(file: impl AsFd) -> bool {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: plain calls; the lease is given back at once.
    unsafe {
        let leased = libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) == 0;
        leased && libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) == 0
    }
}

pub(crate) fn owner(fd: impl AsFd) -> io::Result<Owner> {
    let mut owner = Owner::default();
    // SAFETY: the kernel stores one structure of two ints.
    match unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GETOWN_EX, &raw mut owner) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(owner),
    }
}

/// The signal that O_ASYNC sends; 0 is SIGIO without details.
pub(crate) fn owner_signal(fd: impl AsFd) -> io::Result<i32> {
    // SAFETY: a plain call.
    match unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GETSIG) } {
        -1 => Err(io::Error::last_os_error()),
        signal => Ok(signal),
    }
}

fn done(result: i32) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// How often a timerfd has expired since it was read (`TFD_IOC_SET_TICKS`).
pub(crate) fn set_ticks(fd: impl AsFd, ticks: u64) -> io::Result<()> {
    // SAFETY: the kernel reads 8 bytes.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), 0x4008_5400, &raw const ticks) })
}

/// The number of the next watch (`INOTIFY_IOC_SETNEXTWD`).
pub(crate) fn set_next_watch(fd: impl AsFd, watch: i32) -> io::Result<()> {
    // SAFETY: the argument is the number itself.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), 0x4004_4900, watch) })
}

/// Takes a descriptor that a system call has just returned.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: the kernel has made it for this call, so that nobody else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor from which the signals of `mask` are read.
pub(crate) fn signalfd(mask: u64) -> io::Result<OwnedFd> {
    let mask = std::ptr::from_ref(&mask);
    // SAFETY: the kernel reads 8 bytes, as the third argument says.
    owned(unsafe { libc::syscall(libc::SYS_signalfd4, -1, mask, 8, libc::SFD_CLOEXEC) })
}

/// Several pidfds of one process that has ended.
pub(crate) fn ended_process(count: usize) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: the child does nothing but end.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; no destructor runs.
        unsafe { libc::_exit(0) };
    }
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain calls with this process's own child, which nobody else waits for.
    unsafe {
        let open = |_| owned(libc::syscall(libc::SYS_pidfd_open, child, 0));
        let pidfds: io::Result<Vec<OwnedFd>> = (0..count).map(open).collect();
        while libc::waitpid(child, std::ptr::null_mut(), 0) == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        pidfds
    }
}

/// A member of an epoll, as `kcmp` names it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    /// The epoll's descriptor.
    pub epoll: u32,
    /// The number under which it was added.
    pub number: u32,
    /// Which one of several that were added under this number.
    pub which: u32,
}

/// Whether descriptor `fd` is what the epoll of the same process has as `member`.
pub(crate) fn is_member(pid: i32, fd: i32, epoll_pid: i32, member: &Member) -> io::Result<bool> {
    const KCMP_EPOLL_TFD: i32 = 7;
    let member = std::ptr::from_ref(member).addr() as u64;
    Ok(kcmp(pid, epoll_pid, KCMP_EPOLL_TFD, fd as u64, member)? == Ordering::Equal)
}

/// The epoll event as the kernel has it on x86-64: packed.
pub(crate) fn epoll_event(events: u32, data: u64) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&events.to_ne_bytes());
    bytes[4..].copy_from_slice(&data.to_ne_bytes());
    bytes
}

/// Adds descriptors to an epoll under numbers that are theirs in another process: (descriptor,
/// number, events, data). Neither the epoll nor one of them has a number that is also a member's.
pub(crate) fn add_members(epoll: i32, members: &[(i32, i32, u32, u64)]) -> io::Result<()> {
    let add = || {
        // SAFETY: a plain call. From here on this thread, which ends soon, has a table of its own:
        // nothing that it does to numbers is seen by owners elsewhere.
        if unsafe { libc::unshare(libc::CLONE_FILES) } == -1 {
            return Err(io::Error::last_os_error());
        }
        members.iter().try_for_each(|&(fd, number, events, data)| {
            let event = epoll_event(events, data);
            let add = libc::EPOLL_CTL_ADD;
            // SAFETY: plain calls on the thread's own table; the kernel reads the event's 12 bytes.
            let result = unsafe {
                match libc::dup2(fd, number) {
                    -1 => -1,
                    _ => libc::syscall(libc::SYS_epoll_ctl, epoll, add, number, event.as_ptr()),
                }
            };
            if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
        })
    };
    std::thread::scope(|scope| match scope.spawn(add).join() {
        Ok(added) => added,
        Err(_) => Err(io::Error::other("the thread that adds members has failed")),
    })
}

/// Reads a socket option; how many bytes it has.
pub(crate) fn socket_option(
    fd: impl AsFd,
    level: i32,
    name: i32,
    value: &mut [u8],
) -> io::Result<usize> {
    let mut length = value.len() as libc::socklen_t;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel stores as many bytes as `length` says at most, which is the buffer's.
    let result =
        unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &mut length) };
    done(result).map(|()| (length as usize).min(value.len()))
}

/// Reads an option that is an int.
pub(crate) fn socket_number(fd: impl AsFd, level: i32, name: i32) -> io::Result<i32> {
    let mut value = [0; 4];
    match socket_option(fd, level, name, &mut value)? {
        4 => Ok(i32::from_ne_bytes(value)),
        _ => Err(io::Error::other("an option of another length")),
    }
}

pub(crate) fn set_socket_option(
    fd: impl AsFd,
    level: i32,
    name: i32,
    value: &[u8],
) -> io::Result<()> {
    let (fd, length) = (fd.as_fd().as_raw_fd(), value.len() as libc::socklen_t);
    // SAFETY: the kernel reads `length` bytes at most.
    done(unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), length) })
}

/// Where and as whom something is done to the file system.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct There<'a> {
    /// What counts as the root.
    pub root: Option<&'a std::path::Path>,
    /// Where paths without a slash in front are from.
    pub folder: Option<&'a std::path::Path>,
    /// The user and group whose rights hold, and who own what is made: as far as this process may
    /// be them.
    pub owner: Option<(u32, u32)>,
}

/// Does `what`, which makes system calls, in another place, without moving anybody else there. What
/// it makes gets the whole mode that it asks for.
pub(crate) fn there<T: Send>(
    place: There,
    what: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let go = || {
        // SAFETY: the calls take numbers and a path that lives on; from the first one on this
        // thread, which ends soon, has a root, a directory, a file mask and a user for files of its
        // own.
        unsafe {
            done(libc::unshare(libc::CLONE_FS))?;
            libc::umask(0);
            if let Some(root) = place.root {
                let root = std::ffi::CString::new(root.as_os_str().as_encoded_bytes())?;
                done(libc::chroot(root.as_ptr()))?;
                std::env::set_current_dir("/")?;
            }
            if let Some(folder) = place.folder {
                std::env::set_current_dir(folder)?;
            }
            if let Some((user, group)) = place.owner {
                libc::syscall(libc::SYS_setfsgid, group);
                libc::syscall(libc::SYS_setfsuid, user);
            }
        }
        what()
    };
    std::thread::scope(|scope| match scope.spawn(go).join() {
        Ok(result) => result,
        Err(_) => Err(io::Error::other("the thread in another place has failed")),
    })
}

/// Bytes that a socket has sent and nobody has received (`SIOCOUTQ`).
pub(crate) fn unsent(fd: impl AsFd) -> io::Result<usize> {
    let mut count = 0i32;
    // SAFETY: the kernel stores one int.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut count) })?;
    Ok(count.max(0) as usize)
}

/// Bytes of struct flock on x86-64.
pub(crate) const FLOCK: usize = size_of::<libc::flock>();

/// Takes an open file description lock, without waiting (`F_OFD_SETLK`).
pub(crate) fn lock_description(fd: impl AsFd, lock: &[u8; FLOCK]) -> io::Result<()> {
    // SAFETY: the kernel reads one struct flock.
    done(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_SETLK, lock.as_ptr()) })
}

/// Bytes of struct termios2.
pub(crate) const TERMINAL: usize = 44;

/// A terminal's settings (`TCGETS2`); asked at a pty's master, its slave's.
pub(crate) fn terminal(fd: impl AsFd) -> io::Result<[u8; TERMINAL]> {
    let mut bytes = [0; TERMINAL];
    // SAFETY: the kernel stores one struct termios2.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TCGETS2, bytes.as_mut_ptr()) })?;
    Ok(bytes)
}

pub(crate) fn set_terminal(fd: impl AsFd, settings: &[u8; TERMINAL]) -> io::Result<()> {
    // SAFETY: the kernel reads one struct termios2.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TCSETS2, settings.as_ptr()) })
}

/// What a request of ioctl that stores one int has stored.
pub(crate) fn number(fd: impl AsFd, request: u64) -> io::Result<i32> {
    let mut number = 0i32;
    // SAFETY: callers pass requests that store one int.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, &raw mut number) })?;
    Ok(number)
}

/// A request of ioctl that reads one int.
pub(crate) fn set_number(fd: impl AsFd, request: u64, number: i32) -> io::Result<()> {
    // SAFETY: callers pass requests that read one int.
    done(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, &raw const number) })
}
