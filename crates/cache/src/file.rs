//! One file of the cache. It is known while a program has it open, or while it has dirty bytes.

use crate::backing;
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

/// How long a drain that found barriers goes before new ones; a drain that waits renews it in time.
const WAY: Duration = Duration::from_millis(100);

/// A file below: its device and inode number.
pub(crate) type Key = (u64, u64);

/// Why a file could not be drained.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trouble {
    pub(crate) errno: i32,
    /// The number of the failure among the file's, so that each descriptor is told once.
    pub(crate) count: u64,
}

/// How carefully a file is drained, as a program has asked: kedge does, for its images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Drained bytes need not be on a disk below.
    #[default]
    Plain,
    /// Each part is synced below before it counts as drained.
    Synced,
    /// As `Synced`, and after all other files of its folder, which it describes.
    Last,
}

/// The partner's copy of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Whether the copy is as new as the part here.
    pub(crate) newest: bool,
    /// The number under which it was sent.
    pub(crate) sent: u64,
}

/// A lease: a range of the file that a program writes directly into a tier.
pub(crate) trait Lease: std::fmt::Debug + Send {
    /// Ends the lease, and notes what was written. The file's state must be locked.
    fn end(self: Box<Self>, file: &CachedFile, state: &mut State);
}

/// The state of a file, behind its lock.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) extents: Extents,
    /// The lease, if there is one. Locking the state ends it first, so that all else here counts
    /// what was written under it.
    pub(crate) lease: Option<Box<dyn Lease>>,
    pub(crate) shadows: [Option<Shadow>; TIERS],
    /// The file below that drains write to, opened with the rights of the first writer.
    pub(crate) below: Option<Arc<File>>,
    /// When it was last written, unless the file below has that time already.
    pub(crate) written: Option<SystemTime>,
    /// Why it could not be drained, the last time.
    pub(crate) trouble: Option<Trouble>,
    /// The number of failures so far.
    pub(crate) troubles: u64,
    /// The number of barriers: while there is one, no drain of a part begins.
    pub(crate) barriers: u32,
    /// Whether one thread changes the file below, and no other may write it, here or below.
    pub(crate) alone: bool,
    /// Until when no further barrier is set up, as a drain waits for those that are there.
    drains_first: Option<Instant>,
    /// Bytes of space below that are promised to it.
    pub(crate) promised: u64,
    /// Its number of parts, as counted against its user's limit.
    pub(crate) parts: usize,
    /// Its path, as the journals have it.
    pub(crate) path: Vec<u8>,
    /// Its owner, as the journals have it.
    pub(crate) owner: u32,
    /// When it was created, as the journals have it.
    pub(crate) birth: u64,
    /// The number of handles that may write.
    pub(crate) writers: u32,
    /// The number of these that append through the kernel's page cache, at the end of the file that
    /// the kernel was last told of.
    pub(crate) appenders: u32,
    /// Whether it has been unlinked.
    pub(crate) orphan: bool,
    /// The folder below that it was unlinked from, until that is synced: a local disk keeps the
    /// file's bytes until then.
    pub(crate) gone_from: Option<Arc<OwnedFd>>,
    /// How carefully it is drained.
    pub(crate) keeping: Keeping,
    /// Ranges that a truncation has cut off and local disks still have, as the new end could not be
    /// synced below.
    pub(crate) uncut: RangeMap<TierIndex>,
    /// The last failed sync below: bytes may be lost that the file system below had accepted.
    pub(crate) lost: Option<Trouble>,
    /// The parts that are being moved to a device, by their offset, and whether each was written
    /// meanwhile: the move is void then. No part is moved twice at a time.
    pub(crate) moving: Vec<(u64, bool)>,
    /// The offset of the part that was written last, and when.
    pub(crate) hot: Option<(u64, Instant)>,
    /// Whether none of it may be on a device alone until all is below: an fsync, of this daemon or
    /// perhaps an earlier one, has acknowledged it in memory.
    pub(crate) stays: bool,
    /// Ranges that were lost with a device, until an fsync has reported it or they are written
    /// again.
    pub(crate) broken: RangeMap<()>,
    /// The partner's copies. An older copy stays there until newer bytes are there or below.
    pub(crate) copied: RangeMap<Copied>,
    /// The number of parts that were sent to the partner.
    pub(crate) sends: u64,
    /// The parts that are being drained, each with `sends` at its begin: what was sent to the
    /// partner later is not below when the drain ends.
    pub(crate) departed: RangeMap<u64>,
    /// Whether the partner knows of it, or may have some of it from before this daemon knew it.
    pub(crate) at_partner: bool,
    /// How often this daemon has lost track of what the partner has.
    pub(crate) lapses: u64,
}

impl State {
    /// Lets a drain that found barriers go before new ones, for a while.
    ///
    /// Otherwise a program that always has two or more writes on their way below would keep the
    /// file's other bytes from being drained.
    pub(crate) fn drains_first(&mut self) {
        self.drains_first = Some(Instant::now() + WAY);
    }

    /// Returns the end of the file as far as the cache has it, lost bytes included.
    pub(crate) fn end(&self) -> u64 {
        self.extents.end().max(self.broken.end().unwrap_or(0))
    }

    /// Checks that no bytes of `range` were lost with a device. Each read is told, as the kernel
    /// drops the error of a read-ahead.
    ///
    /// # Errors
    /// EIO if some were lost, and no fsync has reported it.
    pub(crate) fn tell_broken(&self, range: Range<u64>) -> io::Result<()> {
        match self.broken.within(range).next() {
            Some(_) => Err(rustix::io::Errno::IO.into()),
            None => Ok(()),
        }
    }

    /// Checks that the file can be drained and has lost nothing. It reports a failure again and
    /// again, as the program may not look at a close, such as that of a close-on-exec descriptor.
    ///
    /// # Errors
    /// Why it could not be drained, or EIO if bytes were lost with a device.
    pub(crate) fn tell_trouble(&self) -> io::Result<()> {
        if !self.broken.is_empty() {
            return Err(rustix::io::Errno::IO.into());
        }
        match self.trouble {
            Some(trouble) => Err(io::Error::from_raw_os_error(trouble.errno)),
            None => Ok(()),
        }
    }

    /// Notes that the drain of a part begins.
    pub(crate) fn drain_begins(&mut self) {
        self.drains_first = None;
    }
}

/// One file of the cache.
#[derive(Debug)]
pub(crate) struct CachedFile {
    /// Its number in the journals.
    pub(crate) number: u64,
    pub(crate) key: Key,
    /// The file below, opened with O_PATH.
    pub(crate) node: Arc<OwnedFd>,
    /// The user against whose limit it counts: its owner.
    pub(crate) user: u32,
    /// The number of open handles. It grows only while the table of files is locked, as the table
    /// forgets files with none.
    pub(crate) opens: AtomicU32,
    /// Whether it could not be drained; its writes then bypass the tiers.
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

    /// Returns whether a program has it open.
    pub(crate) fn is_open(&self) -> bool {
        self.opens.load(Ordering::SeqCst) > 0
    }

    /// Locks the state, and ends the lease.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.without_lease(lock(&self.state))
    }

    /// Ends the lease, if there is one.
    fn without_lease<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if let Some(lease) = state.lease.take() {
            lease.end(self, &mut state);
        }
        state
    }

    /// Waits until a drain of a part has ended or a barrier is gone.
    pub(crate) fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.without_lease(self.landed.wait(state).unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits as [`CachedFile::wait`] does, for `time` at most.
    fn wait_for<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        time: Duration,
    ) -> MutexGuard<'a, State> {
        let woken = self.landed.wait_timeout(state, time);
        self.without_lease(woken.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Waits until there is no barrier; new ones do not go before the caller.
    pub(crate) fn wait_for_barriers<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        while state.barriers > 0 {
            state.drains_first();
            state = self.wait_for(state, WAY / 2);
        }
        state
    }

    /// Sets up a barrier: no drain of a part begins until it is gone. A drain that waits goes
    /// first.
    fn set_barrier(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while let Some(until) = state.drains_first {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.drains_first = None;
                break;
            }
            state = self.wait_for(state, left);
        }
        state.barriers += 1;
        state
    }

    /// Wakes all threads that wait for this file.
    pub(crate) fn notify(&self) {
        self.landed.notify_all();
    }

    /// Waits until no part of `range` is being drained, and runs `work` before another drain
    /// begins.
    ///
    /// `world` is locked for `work` alone, as a drain needs it to end.
    pub(crate) fn at_rest<R>(
        &self,
        world: &RwLock<()>,
        range: Range<u64>,
        work: impl FnOnce(&mut State) -> R,
    ) -> R {
        let mut state = self.set_barrier();
        while state.alone || state.extents.is_in_flight(range.clone()) {
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

    /// Waits until no part of `range` is being drained, and gives the caller the file below alone
    /// until the result is dropped. The state is not locked meanwhile, as the file system below may
    /// take long and others must be able to read it.
    pub(crate) fn alone(self: &Arc<CachedFile>, range: Range<u64>) -> Alone {
        let mut state = self.set_barrier();
        while state.alone || state.extents.is_in_flight(range.clone()) {
            state = self.wait(state);
        }
        state.alone = true;
        Alone { file: self.clone() }
    }

    /// Returns the file's size in bytes, as programs of this node see it.
    ///
    /// # Errors
    /// That of a stat below.
    pub(crate) fn size(&self, state: &State) -> io::Result<u64> {
        let below = backing::stat(&self.node)?.st_size as u64;
        Ok(below.max(state.end()))
    }
}

/// The right to change the file below alone; dropping it gives it back.
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
    /// Whether it is among the file's appenders.
    pub(crate) appends: bool,
    /// The user who opened it.
    pub(crate) user: u32,
    /// The number of the last failed drain that a write was told of.
    told: AtomicU64,
    /// The number of the last loss that an fsync was told of.
    told_lost: AtomicU64,
}

impl Handle {
    /// Creates a handle, which is told of failures from now on.
    pub(crate) fn new(file: Arc<CachedFile>, below: File, user: u32, writes: bool) -> Handle {
        let troubles = file.lock().troubles;
        let (told, told_lost) = (AtomicU64::new(troubles), AtomicU64::new(troubles));
        let below = Arc::new(below);
        Handle { file, below, writes, appends: false, user, told, told_lost }
    }

    /// Returns the last loss below, once for this handle.
    pub(crate) fn untold_loss(&self, state: &State) -> Option<io::Error> {
        let lost = state.lost?;
        let told = self.told_lost.fetch_max(lost.count, Ordering::Relaxed);
        (told < lost.count).then(|| io::Error::from_raw_os_error(lost.errno))
    }

    /// Returns why the file could not be drained, once for this handle.
    pub(crate) fn untold(&self, state: &State) -> Option<io::Error> {
        let trouble = state.trouble?;
        let told = self.told.fetch_max(trouble.count, Ordering::Relaxed);
        (told < trouble.count).then(|| io::Error::from_raw_os_error(trouble.errno))
    }
}
