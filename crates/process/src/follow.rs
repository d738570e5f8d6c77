//! A forked process that ends with whoever forked it, also where that has ended already.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;

/// The process that is about to fork. Its number would not do: in a PID namespace of its own the
/// child is not told it.
pub(crate) struct Parent(OwnedFd);

impl Parent {
    /// This process.
    pub(crate) fn this() -> io::Result<Parent> {
        Ok(Parent(pidfd_open(getpid(), PidfdFlags::empty())?))
    }

    /// In the child: has the kernel kill it at its parent's end, or at the end of the thread that
    /// forked.
    ///
    /// # Errors
    /// The parent has ended (ESRCH): there is no signal for that any more.
    pub(crate) fn follow(self) -> io::Result<()> {
        // SAFETY: PR_SET_PDEATHSIG takes a number, and has an effect only when the parent dies.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now))? {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};
    use std::os::fd::AsRawFd;
    use std::ptr::null_mut;

    /// Forks a process that forks one that follows it: once it has ended, with `late`, or before.
    fn forked(late: bool) {
        let (mut ended, held) = pipe().unwrap();
        // SAFETY: the children make system calls alone, whatever other threads hold.
        let maker = unsafe { libc::fork() };
        if maker == 0 {
            let parent = Parent::this();
            // SAFETY: the child makes system calls alone, on descriptors that it inherits and on
            // live arrays, and ends by _exit, so that no destructor runs.
            unsafe {
                if libc::fork() == 0 {
                    // The maker's descriptors are closed some time before it has ended.
                    if late && let Ok(parent) = &parent {
                        let _ = poll(&mut [PollFd::new(&parent.0, PollFlags::IN)], None);
                    }
                    if parent.is_ok_and(|parent| parent.follow().is_ok()) {
                        libc::write(held.as_raw_fd(), [1u8].as_ptr().cast(), 1);
                        loop {
                            libc::pause();
                        }
                    }
                    libc::_exit(0)
                }
                match late {
                    true => libc::_exit(0),
                    false => loop {
                        libc::pause();
                    },
                }
            }
        }
        drop(held);
        let mut said = Vec::new();
        if !late {
            let mut byte = [0];
            assert_eq!(ended.read(&mut byte).unwrap(), 1);
            // SAFETY: it is this process's child, and not collected.
            unsafe { libc::kill(maker, libc::SIGKILL) };
        }
        // SAFETY: it is this process's child, and not collected; a null pointer asks for no status.
        assert_eq!(unsafe { libc::waitpid(maker, null_mut(), 0) }, maker);
        // Whoever lived on would hold the pipe.
        ended.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"");
    }

    #[test]
    fn a_child_ends_with_its_parent() {
        forked(false);
    }

    #[test]
    fn a_child_of_one_that_has_ended_does_not_begin() {
        forked(true);
    }
}
