//! A session's slot in its tenant's account ([`kedge_control::account`]), mapped: what this proxy
//! has of the devices, and how much its tenant may have.

use kedge_control::account::{
    self, BYTES, HELD, MEMORY, PACED, PAID, PAUSED, RECEIVED, SENT, SLOTS, WORDS, WORK, Work, now,
};
use kedge_protocol::DeviceInfo;
use kedge_remote::{Meter, Terms};
use rustix::fs::{FlockOperation, flock};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// How long a session's turn is waited for; it takes a few instructions.
const TURN_TIMEOUT: Duration = Duration::from_millis(100);

/// The account, and this session's slot of it.
#[derive(Debug)]
pub(crate) struct Account {
    words: NonNull<[AtomicU64; BYTES / 8]>,
    slot: usize,
    /// What is locked while this session's memory is compared with the limit: of this proxy's own
    /// opening.
    file: OwnedFd,
    /// Bytes of device memory that all sessions of the tenant may have.
    limit: Option<u64>,
    /// Bytes a second that they may receive and send.
    bandwidth: Option<u64>,
    /// Whether a refusal has been said: programs try again and again.
    said: AtomicBool,
}

// SAFETY: the mapping is this value's own until it is dropped, and only atomics are in it.
unsafe impl Send for Account {}
// SAFETY: as above.
unsafe impl Sync for Account {}

impl Drop for Account {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody else has a reference into it.
        let _ = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), BYTES) };
    }
}

impl Account {
    /// Maps what the server has sent.
    ///
    /// # Errors
    /// It is no account, or there is no such slot.
    pub(crate) fn map(file: &OwnedFd, terms: &Terms) -> io::Result<Account> {
        account::check(file.as_fd())?;
        if terms.slot >= SLOTS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no such slot of an account"));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, of a file whose length is
        // sealed.
        let words = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, file, 0)?
        };
        let words = NonNull::new(words.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Account {
            words,
            slot: terms.slot as usize,
            file: file.try_clone()?,
            limit: terms.memory,
            bandwidth: terms.bandwidth,
            said: AtomicBool::new(false),
        })
    }

    fn words(&self) -> &[AtomicU64; BYTES / 8] {
        // SAFETY: mapped until this is dropped, aligned to a page, and as long as the seals say;
        // whatever bits are there make integers.
        unsafe { self.words.as_ref() }
    }

    fn own(&self, word: usize) -> &AtomicU64 {
        &self.words()[self.slot * WORDS + word]
    }

    /// What all sessions of the tenant have.
    fn all(&self) -> u64 {
        let slots = self.words().chunks_exact(WORDS).take(SLOTS as usize);
        let had = slots.map(|slot| slot[MEMORY].load(Ordering::SeqCst));
        had.fold(0, u64::saturating_add)
    }

    /// Returns devices as the client is told of them: none has more than its tenant may have.
    pub(crate) fn devices(&self, mut devices: Vec<DeviceInfo>) -> Vec<DeviceInfo> {
        if let Some(limit) = self.limit {
            devices.iter_mut().for_each(|it| it.total_memory = it.total_memory.min(limit));
        }
        devices
    }

    /// Bytes that the tenant may have more.
    pub(crate) fn left(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.all()))
    }

    /// Counts device memory that is about to be taken, unless that is more than the tenant may
    /// have.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let Some(limit) = self.limit else { return true };
        let _turn = Turn::take(&self.file);
        let had = self.own(MEMORY).load(Ordering::SeqCst);
        // What is refused is never there for others to see.
        let Some(would) = had.checked_add(bytes) else { return false };
        if self.all().saturating_add(bytes) > limit {
            return false;
        }
        self.own(MEMORY).store(would, Ordering::SeqCst);
        // Where it was not this session's turn, another may have done the same meanwhile: both may
        // be refused then, and never one too few.
        if self.all() <= limit {
            return true;
        }
        self.own(MEMORY).store(had, Ordering::SeqCst);
        false
    }

    /// Returns words for the first refusal.
    pub(crate) fn refusal(&self, bytes: u64) -> Option<String> {
        let limit = self.limit.filter(|_| !self.said.swap(true, Ordering::Relaxed))?;
        let left = self.left().unwrap_or(0);
        Some(format!(
            "out of memory: {} MiB of device memory are wanted, and the server lets your key have \
             {} MiB in all its sessions, of which {} MiB are left",
            bytes.div_ceil(MIB),
            limit / MIB,
            left / MIB
        ))
    }

    /// Says what this session has; whether all of the tenant's have no more than they may.
    pub(crate) fn has(&self, bytes: u64) -> bool {
        self.own(MEMORY).store(bytes, Ordering::SeqCst);
        self.limit.is_none_or(|limit| self.all() <= limit)
    }
}

/// A session's turn to compare what its tenant has with the limit. It ends with the value, and with
/// the process.
struct Turn<'a>(Option<&'a OwnedFd>);

impl Turn<'_> {
    /// Waits for the turn, for a moment: another's proxy may stand still while it has it.
    fn take(file: &OwnedFd) -> Turn<'_> {
        let begin = Instant::now();
        while flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begin.elapsed() > TURN_TIMEOUT {
                return Turn(None);
            }
            thread::yield_now();
        }
        Turn(Some(file))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.0 {
            // Nothing can be done about an error, and there is none for a lock that is held.
            let _ = flock(file, FlockOperation::Unlock);
        }
    }
}

/// Time of a second that nothing has crossed in and that may be made up for.
const BURST: u64 = 250_000_000;
/// Longest time at once, in nanoseconds, for which nothing is read: a newer connection waits for
/// it.
const MAX_PAUSE: u64 = 1_000_000_000;

/// Longest time, in nanoseconds, for which a word of the account holds a session up.
const MAX_HOLD: u64 = 1_000_000_000;

impl Account {
    /// Says what work this session's devices have.
    pub(crate) fn set_work(&self, work: Work) {
        self.own(WORK).store(work.bits(), Ordering::Relaxed);
    }

    fn is_before(&self, word: usize) -> bool {
        let left = self.own(word).load(Ordering::Relaxed).saturating_sub(now());
        0 < left && left < MAX_HOLD
    }

    /// Returns whether another session of the tenant has its turn.
    pub(crate) fn is_held(&self) -> bool {
        self.is_before(HELD)
    }

    /// Returns whether others are to have theirs soon.
    pub(crate) fn is_paced(&self) -> bool {
        self.is_before(PACED)
    }
}

impl Account {
    /// Books the time that bytes take at the tenant's rate, behind all that has crossed before, and
    /// returns how many nanoseconds lie before its end; 0 without a limit.
    fn book(&self, bytes: usize, now: u64) -> u64 {
        let Some(rate) = self.bandwidth.filter(|rate| *rate > 0) else { return 0 };
        let takes = bytes as u128 * 1_000_000_000 / u128::from(rate);
        let takes = u64::try_from(takes).unwrap_or(u64::MAX);
        let behind = |paid: u64| paid.max(now.saturating_sub(BURST)).saturating_add(takes);
        let paid = &self.words()[PAID];
        let before = paid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| Some(behind(it)));
        behind(before.unwrap_or(0)).saturating_sub(now)
    }
}

impl Meter for Account {
    /// Returns when the tenant may read on. What is sent is booked, too: it is paid for by not
    /// reading, and a link that is not read has no more to send once it keeps as much as it may.
    fn received(&self, bytes: usize) {
        self.own(RECEIVED).fetch_add(bytes as u64, Ordering::Relaxed);
        let pause = self.book(bytes, now()).min(MAX_PAUSE);
        if pause > 0 {
            thread::sleep(Duration::from_nanos(pause));
            self.own(PAUSED).fetch_add(pause, Ordering::Relaxed);
        }
    }

    fn sent(&self, bytes: usize) {
        self.own(SENT).fetch_add(bytes as u64, Ordering::Relaxed);
        self.book(bytes, now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::account::Turn as Told;

    fn mapped(server: &account::Account, slot: u32, memory: Option<u64>) -> Account {
        Account::map(&server.open().unwrap(), &Terms { slot, memory, bandwidth: None }).unwrap()
    }

    #[test]
    fn a_turn_ends_without_another_word() {
        let server = account::Account::new().unwrap();
        let own = mapped(&server, 3, None);
        assert!(!own.is_held() && !own.is_paced());
        server.set_turn(3, Told::Held, now() + 50_000_000);
        assert!(own.is_held() && own.is_paced() && !mapped(&server, 2, None).is_held());
        while own.is_held() {
            thread::yield_now();
        }
        server.set_turn(3, Told::Paced, now() + MAX_HOLD / 2);
        assert!(!own.is_held() && own.is_paced());
        // Nobody is held for long by what another process has written there.
        server.set_turn(3, Told::Held, u64::MAX);
        assert!(!own.is_held() && !own.is_paced());
        own.set_work(Work { wants: true, runs: true });
        assert_eq!(server.work(3), Work { wants: true, runs: true });
        assert_eq!(server.work(2), Work::default());
    }

    #[test]
    fn a_tenant_s_sessions_share_its_limit() {
        let server = account::Account::new().unwrap();
        let [first, second] = [0, 255].map(|slot| mapped(&server, slot, Some(100)));
        assert!(first.reserve(60) && !second.reserve(41) && second.reserve(40));
        assert!(!first.reserve(1) && !first.reserve(u64::MAX));
        assert_eq!((server.counts(0).memory, server.counts(255).memory), (60, 40));
        assert_eq!(first.left(), Some(0));
        assert!(first.has(10) && second.left() == Some(50) && second.reserve(50));
        // Its proxy has ended.
        server.clear(255);
        assert!(first.reserve(90) && !first.has(101));
        let free = mapped(&server, 1, None);
        assert!(free.reserve(u64::MAX) && free.left().is_none());
        let file = server.open().unwrap();
        assert!(
            Account::map(&file, &Terms { slot: SLOTS, memory: None, bandwidth: None }).is_err()
        );
    }

    #[test]
    fn sessions_that_ask_at_once_never_have_too_much() {
        let server = account::Account::new().unwrap();
        let have = AtomicU64::new(0);
        let asks = |slot| {
            let (account, have) = (mapped(&server, slot, Some(10)), &have);
            move || {
                let mut got = 0;
                while got < 2000 {
                    if account.reserve(6) {
                        got += 1;
                        assert_eq!(have.fetch_add(1, Ordering::SeqCst), 0, "two have 6 of 10");
                        have.fetch_sub(1, Ordering::SeqCst);
                        account.has(0);
                        thread::yield_now();
                    }
                }
            }
        };
        thread::scope(|scope| {
            for slot in [0, 1] {
                scope.spawn(asks(slot));
            }
        });
        assert_eq!([0, 1].map(|slot| server.counts(slot).memory), [0, 0]);
    }

    /// One asks for far too much, again and again, and another for what there is.
    #[test]
    fn what_is_refused_takes_nothing_from_another() {
        let server = account::Account::new().unwrap();
        let over = AtomicBool::new(false);
        let [greedy, modest] = [0, 1].map(|slot| mapped(&server, slot, Some(10)));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    assert!(!greedy.reserve(11));
                }
            });
            let refused = (0..5000).filter(|_| {
                let refused = !modest.reserve(10);
                modest.has(0);
                refused
            });
            let refused = refused.count();
            over.store(true, Ordering::Relaxed);
            assert_eq!(refused, 0);
        });
    }

    /// Of two that want what one alone can have, one gets it.
    #[test]
    fn one_of_two_gets_it() {
        let server = account::Account::new().unwrap();
        let both = [0, 1].map(|slot| mapped(&server, slot, Some(10)));
        for _ in 0..2000 {
            let got = AtomicU64::new(0);
            thread::scope(|scope| {
                for account in &both {
                    scope.spawn(|| got.fetch_add(account.reserve(6).into(), Ordering::SeqCst));
                }
            });
            assert_eq!(got.into_inner(), 1);
            both.iter().for_each(|account| assert!(account.has(0)));
        }
    }

    /// A proxy that is stopped in its turn holds no other up for long.
    #[test]
    fn whoever_stands_still_holds_nobody_up() {
        let server = account::Account::new().unwrap();
        let [still, goes_on] = [0, 1].map(|slot| mapped(&server, slot, Some(10)));
        let _turn = Turn::take(&still.file);
        let begin = Instant::now();
        assert!(goes_on.reserve(5) && !goes_on.reserve(6));
        assert!(begin.elapsed() < 100 * TURN_TIMEOUT, "{:?}", begin.elapsed());
    }

    #[test]
    fn what_crosses_is_counted() {
        let server = account::Account::new().unwrap();
        let account = mapped(&server, 3, None);
        account.received(5);
        account.received(6);
        account.sent(7);
        let counts = server.counts(3);
        assert_eq!((counts.received, counts.sent), (11, 7));
    }

    #[test]
    fn all_of_a_tenant_s_bytes_take_their_time() {
        let server = account::Account::new().unwrap();
        let [first, second] = [0, 1].map(|slot| {
            let terms = Terms { slot, memory: None, bandwidth: Some(1_000_000) };
            Account::map(&server.open().unwrap(), &terms).unwrap()
        });
        let begin = 5_000_000_000;
        // A quarter of a second may be made up for.
        assert_eq!((first.book(200_000, begin), second.book(50_000, begin)), (0, 0));
        assert_eq!(second.book(1000, begin), 1_000_000);
        assert_eq!(first.book(100_000, begin), 101_000_000, "behind what the other has had");
        assert_eq!(first.book(0, begin + 101_000_000), 0);
        assert_eq!(first.book(usize::MAX, begin), u64::MAX - begin, "and no more than that");
        // No limit.
        assert_eq!(mapped(&server, 2, None).book(usize::MAX, begin), 0);
    }

    #[test]
    fn who_is_beyond_the_rate_reads_later() {
        let server = account::Account::new().unwrap();
        let terms = Terms { slot: 0, memory: None, bandwidth: Some(10_000_000) };
        let account = Account::map(&server.open().unwrap(), &terms).unwrap();
        let begin = Instant::now();
        // Half a second, of which a quarter is made up for.
        account.received(5_000_000);
        assert!(begin.elapsed() >= Duration::from_millis(249), "{:?}", begin.elapsed());
        assert_eq!(server.counts(0).paused / 1_000_000, 250);
        // Who sends does not wait, and who reads then does: no more than a second at once.
        account.sent(1_000_000_000);
        assert!(account.book(0, now()) > 10_000_000_000);
        account.received(1);
        assert_eq!(server.counts(0).paused / 1_000_000, 1250);
    }
}
