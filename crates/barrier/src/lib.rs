//! A barrier in memory that processes of one node share: whoever comes last lets all others go by
//! one call.
//!
//! It is a page of a memory file that cannot be resized, with one word in use:
//!
//! | bits | |
//! |---|---|
//! | 63 | nobody meets here any more |
//! | 32–62 | the last step that all have passed |
//! | 0–31 | how many have come to the one after it |
//!
//! Members sleep on the upper half. Whoever has the page can write what it likes there: others then
//! pass too early or too late, but nobody waits for longer than it was told to, and nothing is read
//! as an address or a length.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BYTES: usize = 4096;
const LEFT: u64 = 1 << 63;
const HERE: u64 = 0xffff_ffff;
/// The last step that fits.
pub const LAST: u32 = (1 << 31) - 1;
/// Between two looks at whether there is still a coordinator.
const LOOK: Duration = Duration::from_millis(500);

/// What became of waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    Through,
    Late,
    /// Nobody meets here any more: the coordinator knows why.
    Left,
    /// Not even the step before this one has been passed.
    Early,
}

/// The page, mapped.
#[derive(Debug)]
pub struct Page {
    word: NonNull<AtomicU64>,
    file: OwnedFd,
}

// SAFETY: the mapping is this value's own until it is dropped, and only atomics are in it.
unsafe impl Send for Page {}
// SAFETY: only atomics of the mapping are reached through a shared reference.
unsafe impl Sync for Page {}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

fn passed(word: u64) -> u32 {
    ((word & !LEFT) >> 32) as u32
}

fn at(step: u32) -> u64 {
    u64::from(step) << 32
}

impl Page {
    /// A new one, at which nobody has been.
    pub fn new() -> io::Result<Page> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("kedge-barrier", flags)?;
        rustix::fs::ftruncate(&file, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, seals())?;
        Page::open(file)
    }

    /// What another process has made: refused where it could be made shorter.
    pub fn open(file: OwnedFd) -> io::Result<Page> {
        let sealed = rustix::fs::fcntl_get_seals(&file)?.contains(seals());
        let bytes = rustix::fs::fstat(&file)?.st_size;
        if !sealed || bytes != BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no page for a barrier"));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let page = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, &file, 0)?
        };
        let word = NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Page { word, file })
    }

    /// To be handed to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped until this is dropped, aligned to a page, and as long as the seals say;
        // whatever bits are there make an integer.
        unsafe { self.word.as_ref() }
    }

    /// The half of the word that is slept on. Only the kernel reads through it.
    fn bell(&self) -> &AtomicU32 {
        // SAFETY: the upper half of a word that lies as `word` says; x86-64 keeps it second.
        unsafe { self.word.cast::<AtomicU32>().add(1).as_ref() }
    }

    fn ring(&self) {
        // Nobody may sleep there, which is no failure.
        let _ = futex::wake(self.bell(), futex::Flags::empty(), i32::MAX as u32);
    }

    /// Waits at `step` for `members` to come, until that moment. `stay` is asked now and then; if
    /// it says no, all who meet here leave.
    pub fn arrive(
        &self,
        step: u32,
        members: u32,
        until: Instant,
        mut stay: impl FnMut() -> bool,
    ) -> Arrival {
        let mut now = self.word().load(Ordering::Acquire);
        loop {
            if passed(now) >= step {
                return Arrival::Through;
            }
            if now & LEFT != 0 {
                return Arrival::Left;
            }
            if passed(now) + 1 != step {
                return Arrival::Early;
            }
            // As many as there can be, whatever somebody has written there.
            let last = (now & HERE) + 1 >= u64::from(members);
            let next = if last { at(step) } else { now + 1 };
            match self.word().compare_exchange(now, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if last => {
                    self.ring();
                    return Arrival::Through;
                }
                Ok(_) => return self.wait(step, until, &mut stay),
                Err(other) => now = other,
            }
        }
    }

    fn wait(&self, step: u32, until: Instant, stay: &mut impl FnMut() -> bool) -> Arrival {
        loop {
            let now = self.word().load(Ordering::Acquire);
            if passed(now) >= step {
                return Arrival::Through;
            }
            if now & LEFT != 0 {
                return Arrival::Left;
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return self.give_up(step);
            }
            let pause = rest.min(LOOK).try_into().ok();
            let half = (now >> 32) as u32;
            let slept = futex::wait(self.bell(), futex::Flags::empty(), half, pause.as_ref());
            if slept == Err(rustix::io::Errno::TIMEDOUT) && !stay() {
                self.leave();
            }
        }
    }

    /// Takes one arrival back, unless the step has been passed meanwhile.
    fn give_up(&self, step: u32) -> Arrival {
        let take_back = |now| {
            let waits = now & LEFT == 0 && passed(now) < step && now & HERE > 0;
            waits.then(|| now - 1)
        };
        match self.word().fetch_update(Ordering::AcqRel, Ordering::Acquire, take_back) {
            Err(now) if passed(now) >= step => Arrival::Through,
            Err(now) if now & LEFT != 0 => Arrival::Left,
            _ => Arrival::Late,
        }
    }

    /// All have passed `step`, as one of them knows.
    pub fn raise(&self, step: u32) {
        let raise = |now| (passed(now) < step).then(|| (now & LEFT) | at(step.min(LAST)));
        if self.word().fetch_update(Ordering::AcqRel, Ordering::Acquire, raise).is_ok() {
            self.ring();
        }
    }

    /// Nobody meets here from now on.
    pub fn leave(&self) {
        self.word().fetch_or(LEFT, Ordering::AcqRel);
        self.ring();
    }

    /// Whether [`Page::leave`] was said.
    pub fn has_been_left(&self) -> bool {
        self.word().load(Ordering::Acquire) & LEFT != 0
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping; no reference to it outlives this value.
        let _ = unsafe { rustix::mm::munmap(self.word.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32 as Counter;
    use std::thread;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn soon(wait: Duration) -> Instant {
        Instant::now() + wait
    }

    /// Another process's view of it.
    fn again(page: &Page) -> Page {
        Page::open(page.file().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn nobody_is_through_before_all_have_come() {
        const MEMBERS: u32 = 6;
        const STEPS: u32 = 3000;
        let page = Page::new().unwrap();
        let come = Counter::new(0);
        thread::scope(|scope| {
            for _ in 0..MEMBERS {
                let (page, come) = (again(&page), &come);
                scope.spawn(move || {
                    for step in 1..=STEPS {
                        come.fetch_add(1, Ordering::SeqCst);
                        let arrival = page.arrive(step, MEMBERS, soon(TIMEOUT), || true);
                        assert_eq!(arrival, Arrival::Through);
                        assert!(come.load(Ordering::SeqCst) >= step * MEMBERS);
                    }
                });
            }
        });
        assert_eq!(page.arrive(STEPS, MEMBERS, soon(TIMEOUT), || true), Arrival::Through);
    }

    #[test]
    fn who_comes_too_late_takes_its_arrival_back() {
        let page = Page::new().unwrap();
        let short = Duration::from_millis(5);
        assert_eq!(page.arrive(1, 2, soon(short), || true), Arrival::Late);
        assert_eq!(page.arrive(1, 2, soon(short), || true), Arrival::Late);
        assert_eq!(page.arrive(2, 2, soon(TIMEOUT), || true), Arrival::Early);
        assert_eq!(page.arrive(1, 1, soon(TIMEOUT), || true), Arrival::Through);
        page.raise(7);
        assert_eq!(page.arrive(7, 2, soon(TIMEOUT), || true), Arrival::Through);
        assert_eq!(page.arrive(8, 2, soon(short), || true), Arrival::Late);
    }

    #[test]
    fn all_leave_when_one_finds_a_reason() {
        let page = Page::new().unwrap();
        thread::scope(|scope| {
            let waits: Vec<_> = [true, true, false]
                .map(|stay| {
                    let page = again(&page);
                    scope.spawn(move || page.arrive(1, 9, soon(TIMEOUT), || stay))
                })
                .into_iter()
                .collect();
            assert!(waits.into_iter().all(|wait| wait.join().unwrap() == Arrival::Left));
        });
        assert_eq!(page.arrive(1, 9, soon(TIMEOUT), || true), Arrival::Left);
    }

    #[test]
    fn whatever_somebody_writes_there_nobody_waits_for_ever() {
        let page = Page::new().unwrap();
        for word in [0, HERE, at(LAST), at(LAST) | HERE, LEFT, u64::MAX, at(1) | HERE, 1, at(1)] {
            for step in [1, 2, LAST] {
                page.word().store(word, Ordering::SeqCst);
                let begin = Instant::now();
                page.arrive(step, 3, soon(Duration::from_millis(2)), || true);
                assert!(begin.elapsed() < TIMEOUT, "{word:x}");
            }
        }
    }

    #[test]
    fn a_file_that_could_be_cut_short_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("unsealed", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES as u64).unwrap();
        assert!(Page::open(file).is_err());
        let file = rustix::fs::memfd_create("short", flags).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals()).unwrap();
        assert!(Page::open(file).is_err());
    }
}
