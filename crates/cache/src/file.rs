//! One file of the cache, while somebody has it open or not all of it is below.

use crate::below;
use crate::extents::{Extents, TIERS, TierIndex};
use crate::ranges::RangeMap;
use crate::shadow::Shadow;
use crate::tier::lock;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

/// So long a drain that found barriers goes before further ones; it says so again before that.
const WAY: Duration = Duration::from_millis(100);

/// A file below: its device and number.
pub(crate) type Key = (u64, u64);

/// Why a file could not be drained.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trouble {
    pub(crate) errno: i32,
    /// Counts the file's troubles, so that each descriptor is told once.
    pub(crate) count: u64,
}

/// What a program has asked for of a file whose bytes must not be lost: an image of kedge's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Nothing: what is drained is where the file system below has it.
    #[default]
    Plain,
    /// A disk below has each part before that counts as drained.
    Synced,
    /// The same, and after all others in its folder: it says what they are.
    Last,
}

/// What the partner has of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Whether it is what is here.
    pub(crate) newest: bool,
    /// The number under which it was sent.
    pub(crate) sent: u64,
}

/// What changes of a file.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) extents: Extents,
    pub(crate) shadows: [Option<Shadow>; TIERS],
    /// What drains write to: opened with the rights of the first who wrote.
    pub(crate) below: Option<Arc<File>>,
    /// When it was written last, as long as that is not what the file below says.
    pub(crate) written: Option<SystemTime>,
    pub(crate) trouble: Option<Trouble>,
    pub(crate) troubles: u64,
    /// How many wait for all flights to land; none departs meanwhile.
    pub(crate) barriers: u32,
    /// Whether somebody changes the file below, and nobody else may write it here or there.
    pub(crate) alone: bool,
    /// Until then no further barrier is set up: a drain waits for those that are there.
    drains_first: Option<Instant>,
    /// Space that is promised to it below.
    pub(crate) promised: u64,
    /// Of how many parts it is, as its user's limit knows.
    pub(crate) parts: usize,
    /// Its name in the journals.
    pub(crate) path: Vec<u8>,
    /// Its owner in the journals, and when it was made.
    pub(crate) owner: u32,
    pub(crate) birth: u64,
    pub(crate) writers: u32,
    /// Whether no name leads to it any more.
    pub(crate) orphan: bool,
    /// The folder below that had the last one, and whose disk may not know: until it does, a local
    /// disk keeps what it has.
    pub(crate) gone_from: Option<Arc<OwnedFd>>,
    /// Whether a disk below is to have each part before that counts as drained, and how.
    pub(crate) keeping: Keeping,
    /// What is no part of the file any more and local disks have all the same: the disk below could
    /// not be told where the file ends.
    pub(crate) uncut: RangeMap<TierIndex>,
    /// What the file system below has lost after it had taken it, as a sync there told once.
    pub(crate) lost: Option<Trouble>,
    /// The parts that are being put on a device, by where they begin, and whether one was written
    /// meanwhile: what was put does not count then, and no other mover begins with it before.
    pub(crate) moving: Vec<(u64, bool)>,
    /// The part that was written last, by where it begins, and when.
    pub(crate) hot: Option<(u64, Instant)>,
    /// Whether nothing of it is to be on a device alone, until all is below: an fsync has
    /// acknowledged it in memory, or an earlier daemon's may have.
    pub(crate) stays: bool,
    /// What a device has lost of it, as long as no fsync was told and nobody has written it anew.
    pub(crate) broken: RangeMap<()>,
    /// What of it the partner has, and whether that is what is here: older bytes stay there until
    /// newer ones are there or below.
    pub(crate) copied: RangeMap<Copied>,
    /// How many parts were sent to the partner, and of those that are on their way below how many
    /// by then: what was sent later is not below when they land.
    pub(crate) sends: u64,
    pub(crate) departed: RangeMap<u64>,
    /// Whether the partner was told of it, or may have something of it from before it was known.
    pub(crate) at_partner: bool,
    /// How often it was not known any more what the partner has.
    pub(crate) lapses: u64,
}

impl State {
    /// Has a drain that found barriers go before further ones, for a while.
    ///
    /// Otherwise somebody with two writes or more on their way below at all times would keep the
    /// file's other bytes from being drained.
    pub(crate) fn drains_first(&mut self) {
        self.drains_first = Some(Instant::now() + WAY);
    }

    /// Returns where what the cache knows of the file ends. What is lost and not told is no end.
    pub(crate) fn end(&self) -> u64 {
        self.extents.end().max(self.broken.end().unwrap_or(0))
    }

    /// Tells that a device has lost bytes of `range`: to each read, as the kernel reads ahead and
    /// tells nobody of that.
    ///
    /// # Errors
    /// If it has, and no fsync was told.
    pub(crate) fn tell_broken(&self, range: Range<u64>) -> io::Result<()> {
        match self.broken.within(range).next() {
            Some(_) => Err(rustix::io::Errno::IO.into()),
            None => Ok(()),
        }
    }

    /// Tells once that a device has lost bytes of the file.
    ///
    /// # Errors
    /// If it has, and no fsync was told.
    pub(crate) fn tell_broken_once(&mut self) -> io::Result<()> {
        self.tell_broken(0..u64::MAX).inspect_err(|_| self.broken = RangeMap::default())
    }

    /// Tells what is wrong with the file's bytes, if anything is: to a close as well, which may be
    /// one that nobody looks at, as of a descriptor that a new program does not get.
    ///
    /// # Errors
    /// Why it could not be drained, or that a device has lost bytes of it.
    pub(crate) fn tell_trouble(&self) -> io::Result<()> {
        if !self.broken.is_empty() {
            return Err(rustix::io::Errno::IO.into());
        }
        match self.trouble {
            Some(trouble) => Err(io::Error::from_raw_os_error(trouble.errno)),
            None => Ok(()),
        }
    }

    /// Notes that a part departs.
    pub(crate) fn departs(&mut self) {
        self.drains_first = None;
    }
}

/// One file of the cache.
#[derive(Debug)]
pub(crate) struct CachedFile {
    /// Its number in the journals.
    pub(crate) number: u64,
    pub(crate) key: Key,
    /// The file below, as a path.
    pub(crate) node: Arc<OwnedFd>,
    /// Whose limit it counts for: its owner.
    pub(crate) user: u32,
    /// How many have it open. It grows only while the table of files is locked, which forgets it.
    pub(crate) opens: AtomicU32,
    /// Whether it could not be drained: nothing more of it goes into tiers then.
    pub(crate) troubled: AtomicBool,
    state: Mutex<State>,
    landed: Condvar,
}

impl CachedFile {
    pub(crate) fn new(number: u64, key: Key, node: Arc<OwnedFd>, user: u32) -> CachedFile {
        let (state, landed) = (Mutex::default(), Condvar::new());
        let (opens, troubled) = (AtomicU32::new(0), AtomicBool::new(false));
        CachedFile { number, key, node, user, opens, troubled, state, landed }
    }

    /// Returns whether somebody has it open.
    pub(crate) fn is_open(&self) -> bool {
        self.opens.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until a flight has landed or a barrier is gone.
    pub(crate) fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.landed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no barrier is there, and no further one goes before the caller.
    pub(crate) fn wait_for_barriers<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        while state.barriers > 0 {
            state.drains_first();
            let woken = self.landed.wait_timeout(state, WAY / 2);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Sets up a barrier: nothing departs until it is gone. A drain that waits goes before.
    fn set_barrier(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while let Some(until) = state.drains_first {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.drains_first = None;
                break;
            }
            let woken = self.landed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.barriers += 1;
        state
    }

    /// Tells those who wait.
    pub(crate) fn notify(&self) {
        self.landed.notify_all();
    }

    /// Waits until nothing of `range` is on its way, and runs `work` before anything else departs.
    ///
    /// `world` is held for `work` alone: what flies needs it to land.
    pub(crate) fn at_rest<R>(
        &self,
        world: &RwLock<()>,
        range: Range<u64>,
        work: impl FnOnce(&mut State) -> R,
    ) -> R {
        let mut state = self.set_barrier();
        while state.alone || state.extents.flies(range.clone()) {
            state = self.wait(state);
        }
        drop(state);
        let _world = world.read();
        let mut state = self.lock();
        let result = work(&mut state);
        state.barriers -= 1;
        drop(state);
        self.notify();
        result
    }

    /// Waits until nothing of `range` is on its way, and has the file below for the caller alone
    /// until the end of what it returns. That may take as long as the file system below does: the
    /// state is not locked, so that others can ask for it.
    pub(crate) fn alone(self: &Arc<CachedFile>, range: Range<u64>) -> Alone {
        let mut state = self.set_barrier();
        while state.alone || state.extents.flies(range.clone()) {
            state = self.wait(state);
        }
        state.alone = true;
        Alone { file: self.clone() }
    }

    /// Returns the file's size, for those who read it here.
    pub(crate) fn size(&self, state: &State) -> io::Result<u64> {
        let below = below::stat(&self.node)?.st_size as u64;
        Ok(below.max(state.end()))
    }
}

/// Somebody has the file below alone, as long as this is there.
#[derive(Debug)]
pub(crate) struct Alone {
    file: Arc<CachedFile>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        let mut state = self.file.lock();
        state.alone = false;
        state.barriers -= 1;
        drop(state);
        self.file.notify();
    }
}

/// An open file of a program.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) file: Arc<CachedFile>,
    /// The file below, opened as the program asked and with its rights.
    pub(crate) below: Arc<File>,
    pub(crate) writes: bool,
    /// Who opened it.
    pub(crate) user: u32,
    /// The last trouble that a write was told of.
    told: AtomicU64,
    /// The last loss that an fsync was told of.
    told_lost: AtomicU64,
}

impl Handle {
    pub(crate) fn new(file: Arc<CachedFile>, below: File, user: u32, writes: bool) -> Handle {
        let troubles = file.lock().troubles;
        let (told, told_lost) = (AtomicU64::new(troubles), AtomicU64::new(troubles));
        Handle { file, below: Arc::new(below), writes, user, told, told_lost }
    }

    /// Returns what was lost below, if this descriptor's fsync was not told.
    pub(crate) fn untold_loss(&self, state: &State) -> Option<io::Error> {
        let lost = state.lost?;
        let told = self.told_lost.fetch_max(lost.count, Ordering::Relaxed);
        (told < lost.count).then(|| io::Error::from_raw_os_error(lost.errno))
    }

    /// Returns the file's trouble, if this descriptor's writes were not told.
    pub(crate) fn untold(&self, state: &State) -> Option<io::Error> {
        let trouble = state.trouble?;
        let told = self.told.fetch_max(trouble.count, Ordering::Relaxed);
        (told < trouble.count).then(|| io::Error::from_raw_os_error(trouble.errno))
    }
}
