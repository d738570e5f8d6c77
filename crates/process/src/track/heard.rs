//! What programs do to mappings of shared memory, as the kernel says it at once: they map it a
//! second time or elsewhere (mremap), and take pages out of it (MADV_REMOVE) or out of their
//! mapping of it (MADV_DONTNEED). Page tables do not tell it: a second mapping may be gone again
//! when they are looked at, and a page that was taken out comes back at the next look at it, as
//! unchanged.
//!
//! The program waits until it was heard. So this has a thread of its own, which does nothing else.

use super::Run;
use libc::pid_t;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, read};
use std::collections::BTreeMap;
use std::io;
use std::mem::take;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// struct uffd_msg, in bytes and in words.
const MESSAGE: usize = 32;
/// Its first byte.
const REMAP: u8 = 0x14;
const REMOVE: u8 = 0x15;
/// Most removals of one process that are remembered one by one.
const MAX_REMOVALS: usize = 64 << 10;

/// What a process has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    /// Shared memory is, or was, mapped where it was not, or it is not known what was done.
    pub(crate) remapped: bool,
    /// Pages were taken out of these addresses.
    pub(crate) removed: Vec<Run>,
}

impl Heard {
    fn add(&mut self, message: &[u8; MESSAGE]) {
        let word = |at: usize| {
            message[at..].first_chunk().map_or(0, |bytes: &[u8; 8]| u64::from_le_bytes(*bytes))
        };
        match message[0] {
            REMOVE if self.removed.len() < MAX_REMOVALS => self.removed.push((word(8), word(16))),
            REMOVE | REMAP => self.give_up(),
            // Nothing else was asked for.
            _ => {}
        }
    }

    fn give_up(&mut self) {
        *self = Heard { remapped: true, removed: Vec::new() };
    }
}

/// Hears the processes of a job, for as long as it lives.
#[derive(Debug)]
pub(super) struct Listener {
    room: Arc<Room>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Room {
    state: Mutex<State>,
    /// Readable when there is somebody new to listen to, or it is over.
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    /// By number. Nobody else keeps them open: what nobody reads must not keep a program waiting.
    sources: BTreeMap<u64, (pid_t, Arc<OwnedFd>)>,
    last: u64,
    heard: BTreeMap<pid_t, Heard>,
    over: bool,
}

/// A userfaultfd that is listened to, until this is dropped.
#[derive(Debug)]
pub(super) struct Source {
    number: u64,
    fd: Weak<OwnedFd>,
    room: Arc<Room>,
}

impl Listener {
    /// # Errors
    /// There are no descriptors or threads left.
    pub(super) fn new() -> io::Result<Listener> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let room = Arc::new(Room { state: Mutex::default(), bell });
        let own = Arc::clone(&room);
        let thread =
            std::thread::Builder::new().name("kedge-heard".into()).spawn(move || own.listen())?;
        Ok(Listener { room, thread: Some(thread) })
    }

    /// Listens to `fd`, which does not block and tells what `pid` does.
    pub(super) fn add(&self, pid: pid_t, fd: OwnedFd) -> Source {
        let fd = Arc::new(fd);
        let open = Arc::downgrade(&fd);
        let mut state = self.room.state();
        state.last += 1;
        let number = state.last;
        state.sources.insert(number, (pid, fd));
        drop(state);
        self.room.ring();
        Source { number, fd: open, room: Arc::clone(&self.room) }
    }

    /// What the stopped processes have done since this was asked last. Whatever they did is heard:
    /// they could not have stopped before.
    pub(super) fn take(&self) -> BTreeMap<pid_t, Heard> {
        take(&mut self.room.state().heard)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.room.state().over = true;
        self.room.ring();
        self.thread.take().map(JoinHandle::join);
    }
}

impl Source {
    /// The descriptor, unless it cannot be read any more.
    pub(super) fn fd(&self) -> Option<Arc<OwnedFd>> {
        self.fd.upgrade()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.room.state().sources.remove(&self.number);
        self.room.ring();
    }
}

impl Room {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // A bell that rings already is full.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn listen(&self) {
        while let Some(sources) = self.sources() {
            let ready = wait(&self.bell, &sources);
            drop(sources);
            self.read(&ready);
        }
    }

    fn sources(&self) -> Option<Vec<(u64, Arc<OwnedFd>)>> {
        let state = self.state();
        let copy = |(number, (_, fd)): (&u64, &(_, _))| (*number, Arc::clone(fd));
        let sources = || state.sources.iter().map(copy).collect();
        (!state.over).then(sources)
    }

    /// Reads what there is; who did it goes on with that, and may have stopped when this gives the
    /// state free.
    fn read(&self, ready: &[u64]) {
        let State { sources, heard, .. } = &mut *self.state();
        let _ = read(&self.bell, &mut [0u8; 8]);
        for number in ready {
            let Some((pid, source)) = sources.get(number).cloned() else { continue };
            let heard = heard.entry(pid).or_default();
            let mut message = [0; MESSAGE];
            loop {
                match read(&source, &mut message) {
                    Ok(MESSAGE) => heard.add(&message),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    _ => {
                        heard.give_up();
                        sources.remove(number);
                        break;
                    }
                }
            }
        }
    }
}

/// Waits until the bell rings or some of `sources` can be read, and returns these: all of them
/// after a moment, if that cannot be told.
fn wait(bell: &OwnedFd, sources: &[(u64, Arc<OwnedFd>)]) -> Vec<u64> {
    const MOMENT: Duration = Duration::from_millis(1);
    let fds = std::iter::once(bell).chain(sources.iter().map(|(_, fd)| &**fd));
    let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let told = poll(&mut fds, None).is_ok();
    if !told {
        std::thread::sleep(MOMENT);
    }
    let ready = sources.iter().zip(&fds[1..]);
    let ready = ready.filter(|(_, fd)| !told || !fd.revents().is_empty());
    ready.map(|((number, _), _)| *number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::tests::scans;
    use std::os::fd::{AsRawFd, FromRawFd, RawFd};
    use std::ptr::null_mut;

    const PAGE: usize = 4096;
    const PAGES: usize = 16;

    /// Shared memory of this process, and what tells of it.
    fn memory() -> (*mut libc::c_void, OwnedFd) {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever the kernel puts it; the calls read and write three and
        // four words, and make a descriptor that is nobody else's.
        unsafe {
            let at = libc::mmap(null_mut(), PAGES * PAGE, access, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>().write_bytes(1, PAGES * PAGE);
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1);
            let fd = OwnedFd::from_raw_fd(fd as RawFd);
            let mut api = [0xaa_u64, 1 << 2 | 1 << 3 | 1 << 13 | 1 << 15, 0];
            let mut register = [at as u64, (PAGES * PAGE) as u64, 2, 0];
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc020_aa00, register.as_mut_ptr()), 0);
            (at, fd)
        }
    }

    #[test]
    fn what_page_tables_do_not_tell_is_heard() {
        if !scans() {
            return;
        }
        let listener = Listener::new().unwrap();
        let (at, fd) = memory();
        let source = listener.add(7, fd);
        assert_eq!(listener.take(), BTreeMap::new());
        // SAFETY: advice about a part of that memory, which nobody uses, as below.
        let advise = |page: usize, advice| unsafe {
            assert_eq!(libc::madvise(at.byte_add(page * PAGE), 2 * PAGE, advice), 0);
        };
        advise(3, libc::MADV_REMOVE);
        advise(8, libc::MADV_DONTNEED);
        let run = |page: usize| {
            (at as u64 + (page * PAGE) as u64, at as u64 + ((page + 2) * PAGE) as u64)
        };
        let removed = vec![run(3), run(8)];
        assert_eq!(listener.take(), [(7, Heard { remapped: false, removed })].into());
        assert_eq!(listener.take(), BTreeMap::new());
        advise(3, libc::MADV_REMOVE);
        // SAFETY: a second mapping of it, wherever the kernel puts it, and both are taken away at
        // the end.
        unsafe {
            let again = libc::mremap(at, 0, PAGES * PAGE, libc::MREMAP_MAYMOVE);
            assert_ne!(again, libc::MAP_FAILED);
            assert_eq!(libc::munmap(again, PAGES * PAGE), 0);
        }
        let heard = Heard { remapped: true, removed: Vec::new() };
        assert_eq!(listener.take(), [(7, heard)].into());
        // Nobody waits for who listens no more.
        drop(source);
        advise(3, libc::MADV_REMOVE);
        assert_eq!(listener.take(), BTreeMap::new());
        drop(listener);
        advise(3, libc::MADV_REMOVE);
        // SAFETY: the mapping is the test's own, and nothing uses it after this.
        unsafe { assert_eq!(libc::munmap(at, PAGES * PAGE), 0) };
    }

    #[test]
    fn so_much_that_it_is_not_remembered_counts_as_anything() {
        let message = |event: u8, n: u8| {
            let mut message = [0; MESSAGE];
            (message[0], message[8], message[16]) = (event, n, n + 1);
            message
        };
        let mut heard = Heard::default();
        heard.add(&message(REMOVE, 7));
        // What was not asked for, or will be some day.
        heard.add(&message(0x12, 9));
        assert_eq!(heard, Heard { remapped: false, removed: vec![(7, 8)] });
        (1..MAX_REMOVALS).for_each(|_| heard.add(&message(REMOVE, 7)));
        assert_eq!(heard.removed.len(), MAX_REMOVALS);
        heard.add(&message(REMOVE, 7));
        assert_eq!(heard, Heard { remapped: true, removed: Vec::new() });
    }
}
