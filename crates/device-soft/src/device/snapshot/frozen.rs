//! A copy of this process's private memory as it is at one moment: a child process that never runs.
//!
//! The kernel shares its pages with this process until one of the two writes, so the copy takes the
//! time of copying page tables. Memory that is mapped shared is not part of it.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

static PROBE: u64 = 0;

/// The copy. It ends when this is dropped, or with this process.
pub(super) struct Frozen {
    pid: libc::pid_t,
    /// Dropped to end `holder`.
    hold: Option<Sender<()>>,
    /// The child's parent: the kernel ends the child with the thread that made it.
    holder: Option<JoinHandle<()>>,
}

impl Frozen {
    /// # Errors
    /// What the system says where it makes no child, or does not let its memory be read.
    pub(super) fn new() -> io::Result<Self> {
        let (tell, told) = mpsc::channel();
        let (hold, held) = mpsc::channel();
        let holder = thread::Builder::new()
            .name("snapshot".to_owned())
            .spawn(move || hold_child(&tell, &held))?;
        let pid = told.recv().map_err(io::Error::other)?;
        let mut frozen = Self { pid: 0, hold: Some(hold), holder: Some(holder) };
        frozen.pid = pid?;
        // Whether reading is allowed at all is better known now than when the program runs on.
        frozen.read((&raw const PROBE) as u64, &mut [0; 8])?;
        Ok(frozen)
    }

    /// Copies the bytes at `addr` as they were.
    pub(super) fn read(&self, addr: u64, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let rest = &mut out[done..];
            let to = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            let from = (addr + done as u64) as usize as *mut libc::c_void;
            let from = libc::iovec { iov_base: from, iov_len: rest.len() };
            // SAFETY: writes no more than `rest`, which it describes; what it reads is the child's.
            let got = unsafe { libc::process_vm_readv(self.pid, &to, 1, &from, 1, 0) };
            match usize::try_from(got) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => done += got,
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.hold.take());
        if let Some(holder) = self.holder.take() {
            // It does nothing that can panic.
            let _ = holder.join();
        }
    }
}

/// Makes the child, tells its id, and ends it when it is no longer held.
fn hold_child(tell: &Sender<io::Result<libc::pid_t>>, held: &Receiver<()>) {
    block_signals();
    let made = make_child();
    let pid = *made.as_ref().unwrap_or(&0);
    // Where memory runs out it goes before this process, whose devices nobody else has: the most
    // that proc_pid_oom_score_adj(5) knows.
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), "1000");
    if tell.send(made).is_err() || pid == 0 {
        return;
    }
    // Nothing is ever sent: this waits for the other end to be dropped.
    let _ = held.recv();
    let mut status = 0;
    // SAFETY: the child is this thread's own and was not waited for before. `waitpid` only stores
    // the status; __WALL, because the child ends without a signal.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        while libc::waitpid(pid, &mut status, libc::__WALL) < 0
            && *libc::__errno_location() == libc::EINTR
        {}
    }
}

/// For this thread, and so for the child.
fn block_signals() {
    // SAFETY: fills and uses a set of this frame's own.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}

/// fork() without what the C library does at a fork: other threads may hold its locks, and nothing
/// of it will run in the child. No signal tells of the child's end, so that no wait for any child
/// finds it.
fn make_child() -> io::Result<libc::pid_t> {
    // SAFETY: getpid cannot fail. clone without CLONE_VM gives the child a copy of this memory,
    // stack included, and the child goes nowhere but into `stand_still`.
    let (parent, pid) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0)) };
    match pid {
        // SAFETY: this is the child, which has this one thread.
        0 => unsafe { stand_still(parent) },
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid as libc::pid_t),
    }
}

/// What the child does: it lets go of the descriptors, whose other ends wait for them to be closed,
/// and waits for its end. Its memory stays as it was but for this frame.
///
/// # Safety
/// Only in a process that has no other thread and that needs nothing any more.
unsafe fn stand_still(parent: libc::pid_t) -> ! {
    // SAFETY: system calls alone, which take no lock and touch no memory but the name's.
    unsafe {
        let prctl =
            |option: i32, value: u64| libc::syscall(libc::SYS_prctl, option, value, 0, 0, 0);
        prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64);
        prctl(libc::PR_SET_NAME, c"kedge-snapshot".as_ptr() as u64);
        // The parent may have ended before it was asked about.
        if libc::syscall(libc::SYS_getppid) == i64::from(parent) {
            libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
            loop {
                libc::syscall(libc::SYS_pause);
            }
        }
        loop {
            libc::syscall(libc::SYS_exit_group, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    fn proc_of(frozen: &Frozen, what: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{what}", frozen.pid))
    }

    #[test]
    fn memory_reads_as_it_was() {
        let mut bytes: Vec<u8> = (0..1 << 20).map(|i| (i * 7) as u8).collect();
        let was = bytes.clone();
        let frozen = Frozen::new().unwrap();
        bytes.fill(0xee);
        let mut found = vec![0; bytes.len()];
        frozen.read(bytes.as_ptr() as u64, &mut found).unwrap();
        assert!(found == was);
        assert!(frozen.read(0x1000, &mut found).is_err(), "nothing is mapped there");
    }

    #[test]
    fn the_child_holds_no_descriptor_and_goes_with_its_owner() {
        let frozen = Frozen::new().unwrap();
        // It may not have come so far yet.
        let count = |frozen: &Frozen| std::fs::read_dir(proc_of(frozen, "fd")).unwrap().count();
        let mut left = 2000;
        while count(&frozen) > 0 && left > 0 {
            left -= 1;
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(count(&frozen), 0);
        let status = std::fs::read_to_string(proc_of(&frozen, "status")).unwrap();
        assert!(
            status.starts_with("Name:\tkedge-snapshot\n") && status.contains("\nThreads:\t1\n")
        );
        assert!(status.contains("\nSigBlk:\tfffffffe7ffbfeff\n"), "{status}");
        let gone = proc_of(&frozen, "status");
        drop(frozen);
        assert!(!gone.exists());
    }

    #[test]
    fn no_ordinary_wait_finds_it() {
        let frozen = Frozen::new().unwrap();
        let mut status = 0;
        // SAFETY: waitpid stores the status.
        let found = unsafe { libc::waitpid(frozen.pid, &mut status, libc::WNOHANG) };
        let error = io::Error::last_os_error().raw_os_error();
        assert_eq!((found, error), (-1, Some(libc::ECHILD)), "0 would be: a child, still running");
    }

    /// Set in the process that the test kills.
    const VICTIM: &str = "KEDGE_TEST_FROZEN_VICTIM";

    #[test]
    fn it_goes_with_a_killed_process() {
        if std::env::var_os(VICTIM).is_some() {
            let frozen = Frozen::new().unwrap();
            println!("\nfrozen {}", frozen.pid);
            thread::sleep(Duration::from_secs(60));
            return;
        }
        let name = "device::snapshot::frozen::tests::it_goes_with_a_killed_process";
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(VICTIM, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.find(|line| line.starts_with("frozen ")).unwrap();
        let status = PathBuf::from(format!("/proc/{}/status", &line["frozen ".len()..]));
        assert!(status.exists());
        victim.kill().unwrap();
        victim.wait().unwrap();
        // Whoever adopts it may leave it uncollected.
        let runs = || {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            status.contains("Name:\tkedge-snapshot\n") && !status.contains("State:\tZ")
        };
        let over = (0..2000).any(|_| {
            thread::sleep(Duration::from_millis(1));
            !runs()
        });
        assert!(over, "it runs on");
    }
}
