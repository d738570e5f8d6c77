//! Events that several processes record and wait for: counters in memory that all of them map.
//!
//! A process that ends leaves records that are never reached. Who waits for one of them learns of
//! it by a lock of the file, which each process takes before its first record and the kernel gives
//! back for it.

use super::runtime::Runtime;
use super::shareable::{sealed, sealed_size};
use kedge_cuda_types::CuError;
use kedge_device::{Done, Query};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const BYTES: usize = 4096;

/// Records of all processes, as they are submitted and as they are reached.
#[repr(C)]
struct Counters {
    /// The latest `Record`.
    submitted: AtomicU64,
    /// The `Record` of the highest number.
    reached: AtomicU64,
    /// Processes that have recorded.
    recorders: AtomicU64,
}

/// Its number, and in the low bits whose it is (`Recorder::slot`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record(u64);

const SLOT_BITS: u32 = 16;

impl Record {
    fn number(self) -> u64 {
        self.0 >> SLOT_BITS
    }

    fn slot(self) -> u64 {
        self.0 & ((1 << SLOT_BITS) - 1)
    }

    fn next(self, slot: u64) -> Record {
        Record(self.number().wrapping_add(1) << SLOT_BITS | slot)
    }
}

/// What tells others that this process, which records, lives.
struct Recorder {
    /// The byte of the file that it has locked; 0 where it could not, and nobody learns of its end.
    slot: u64,
    /// A description of the file that no other process has.
    _locked: Option<File>,
}

pub(super) struct SharedEvent {
    counters: NonNull<Counters>,
    file: File,
    recorder: OnceLock<Recorder>,
}

// SAFETY: the mapping lives as long as the value, is tied to no thread, and holds atomics alone.
unsafe impl Send for SharedEvent {}
// SAFETY: only atomics of the mapping are reached through a shared reference.
unsafe impl Sync for SharedEvent {}

impl SharedEvent {
    pub(super) fn create() -> Result<Arc<Self>, CuError> {
        let file = sealed("kedge-event\0", BYTES as u64).map_err(|_| CuError::OUT_OF_MEMORY)?;
        Self::map(file)
    }

    /// The event of another process; INVALID_VALUE where the descriptor is no event's.
    pub(super) fn open(fd: OwnedFd) -> Result<Arc<Self>, CuError> {
        match sealed_size(fd.as_fd())? {
            size if size == BYTES as u64 => Self::map(fd.into()),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn map(file: File) -> Result<Arc<Self>, CuError> {
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, shared, file.as_raw_fd(), 0) };
        match NonNull::new(at.cast::<Counters>()) {
            Some(counters) if at != libc::MAP_FAILED => {
                Ok(Arc::new(Self { counters, file, recorder: OnceLock::new() }))
            }
            _ => Err(CuError::OUT_OF_MEMORY),
        }
    }

    pub(super) fn export(&self) -> Result<OwnedFd, CuError> {
        Ok(self.file.try_clone().map_err(|_| CuError::OPERATING_SYSTEM)?.into())
    }

    fn counters(&self) -> &Counters {
        // SAFETY: page-aligned, BYTES are mapped while `self` lives and the file cannot shrink; any
        // content, changing at any time, is valid for atomics.
        unsafe { self.counters.as_ref() }
    }

    /// One more record is submitted.
    pub(super) fn submit(&self) -> Record {
        let slot = self.recorder.get_or_init(|| self.recorder()).slot;
        let next = |latest| Some(Record(latest).next(slot).0);
        let submitted = &self.counters().submitted;
        match submitted.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
            Ok(latest) | Err(latest) => Record(latest).next(slot),
        }
    }

    /// Before the first record of this process.
    fn recorder(&self) -> Recorder {
        let count = self.counters().recorders.fetch_add(1, Ordering::AcqRel);
        let slot = 1 + count % ((1 << SLOT_BITS) - 1);
        // Locks are a description's, which all have of whom they have the descriptor.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let own = File::options().read(true).write(true).open(path).ok();
        match own.filter(|own| lock(own, libc::F_OFD_SETLK, slot).is_some()) {
            Some(own) => Recorder { slot, _locked: Some(own) },
            None => Recorder { slot: 0, _locked: None },
        }
    }

    pub(super) fn reach(&self, record: Record) {
        self.counters().reached.fetch_max(record.0, Ordering::AcqRel);
    }

    /// The latest record, if it is not reached.
    pub(super) fn pending(&self) -> Option<Record> {
        let record = Record(self.counters().submitted.load(Ordering::Acquire));
        (!self.is_reached(record)).then_some(record)
    }

    fn is_reached(&self, record: Record) -> bool {
        Record(self.counters().reached.load(Ordering::Acquire)).number() >= record.number()
    }

    /// Whether a record is reached.
    ///
    /// # Errors
    /// NOT_READY while it is not; EXTERNAL_DEVICE when it never will be, for its process has ended.
    pub(super) fn query(&self, record: Record) -> Query {
        if self.is_reached(record) {
            return Ok(());
        }
        let lives = record.slot() == 0
            || lock(&self.file, libc::F_OFD_GETLK, record.slot()) != Some(libc::F_UNLCK);
        match lives {
            true => Err(CuError::NOT_READY),
            // Reached as the last thing that its process did?
            false if self.is_reached(record) => Ok(()),
            false => Err(CuError::EXTERNAL_DEVICE),
        }
    }

    /// Calls `done` once `record` is reached, or never will be.
    pub(super) fn when_reached(self: Arc<Self>, runtime: &Runtime, record: Record, done: Done) {
        let mut done = Some(done);
        runtime.engines.poll(move || {
            let reached = self.query(record);
            let over = reached != Err(CuError::NOT_READY);
            if over && let Some(done) = done.take() {
                done(reached);
            }
            over
        });
    }
}

/// Takes the lock of a byte of `file`, or looks for one (F_OFD_SETLK, F_OFD_GETLK; fcntl(2)): the
/// type of lock that there is then, and `None` on failure.
fn lock(file: &File, how: libc::c_int, byte: u64) -> Option<libc::c_int> {
    // SAFETY: plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte as libc::off_t;
    lock.l_len = 1;
    // SAFETY: both commands take this structure, and fill it at most.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), how, &raw mut lock) };
    (rc == 0).then_some(lock.l_type.into())
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.counters.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_see_one_event() {
        let here = SharedEvent::create().unwrap();
        let there = SharedEvent::open(here.export().unwrap()).unwrap();
        assert_eq!(there.pending(), None);
        let record = here.submit();
        assert_eq!(there.pending(), Some(record));
        assert_eq!(there.query(record), Err(CuError::NOT_READY));
        here.reach(record);
        assert_eq!(there.pending(), None);
        let next = there.submit();
        assert_eq!(next.number(), record.number() + 1);
        for side in [&here, &there] {
            assert_eq!((side.query(record), side.query(next)), (Ok(()), Err(CuError::NOT_READY)));
        }
    }

    #[test]
    fn what_a_process_leaves_pending_is_told() {
        let keeper = SharedEvent::create().unwrap();
        let mut sides = Vec::new();
        for _ in 0..3 {
            sides.push(SharedEvent::open(keeper.export().unwrap()).unwrap());
        }
        let [first, second, other] = <[_; 3]>::try_from(sides).ok().unwrap();
        let (reached, lost, lives) = (first.submit(), first.submit(), second.submit());
        first.reach(reached);
        assert_eq!(other.query(lost), Err(CuError::NOT_READY));
        drop(first);
        let now = |record| other.query(record);
        assert_eq!(now(reached), Ok(()));
        assert_eq!(now(lost), Err(CuError::EXTERNAL_DEVICE));
        assert_eq!(now(lives), Err(CuError::NOT_READY));
        // What comes after it is reached: it is nothing to wait for.
        second.reach(lives);
        assert_eq!(now(lost), Ok(()));
    }

    #[test]
    fn what_is_no_event_is_refused() {
        let memory = super::super::shareable::create(0, 2 << 20).unwrap();
        assert_eq!(SharedEvent::open(memory.into()).err(), Some(CuError::INVALID_VALUE));
        let (pipe, _) = std::io::pipe().unwrap();
        assert_eq!(SharedEvent::open(pipe.into()).err(), Some(CuError::INVALID_VALUE));
    }
}
