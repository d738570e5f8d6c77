//! What is known of each descriptor, and the way of a write.

use crate::ask::{self, Buffers, Pages, Refused, Shadow};
use crate::claim::Claim;
use crate::held::{Held, Stored};
use crate::mapped::Mapped;
use crate::mounts::{self, Mounts};
use crate::parts::Parts;
use crate::pause::Pause;
use crate::shadows::Shadows;
use crate::sys;
use crate::try_lock::TryLock;
use kedge_cache_lease::GRAIN;
use libc::c_int;
use rustix::fs::OFlags;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

/// Descriptors that may have a lease: those whose numbers are below this.
const MAX_DESCRIPTORS: usize = 1024;
/// Shortest first write of a descriptor, in bytes, for which a lease is asked: a file of one small
/// write is written sooner without.
const LEASE_THRESHOLD: usize = 64 << 10;

/// Nothing is known.
const UNKNOWN: u8 = 0;
/// It never gets a lease.
const NEVER: u8 = 1;
/// It is a cache's, and may.
const CACHED: u8 = 2;

/// What is known of a descriptor.
#[derive(Debug)]
struct Entry {
    kind: AtomicU8,
    state: TryLock<State>,
}

/// What is known of one that is a cache's.
#[derive(Debug)]
struct State {
    lease: Option<Held>,
    shadow: Option<Shadow>,
    pause: Pause,
}

/// What a descriptor is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Leased,
    Appends,
    NotNow,
    Never,
}

/// All descriptors of a process.
#[derive(Debug)]
pub struct Files {
    entries: [Entry; MAX_DESCRIPTORS],
    mounts: Mounts,
    pages: Pages,
    buffers: TryLock<Buffers>,
    shadows: Shadows,
    mapped: Mapped,
    /// The process that this is for; 0 before it is known.
    process: AtomicI32,
}

/// The descriptors of this process.
pub static FILES: Files = Files::new();

/// Begins, once this is loaded: until then, all calls are the kernel's.
pub fn start() {
    if FILES.process.swap(own_id(), Ordering::AcqRel) == 0 {
        // SAFETY: the handler calls nothing that a child of a process with threads may not.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    }
}

extern "C" fn forked() {
    FILES.forked();
}

fn own_id() -> c_int {
    rustix::process::getpid().as_raw_nonzero().get()
}

impl Entry {
    const fn new() -> Entry {
        Entry { kind: AtomicU8::new(UNKNOWN), state: TryLock::new(State::new()) }
    }
}

impl State {
    const fn new() -> State {
        State { lease: None, shadow: None, pause: Pause::new() }
    }

    /// Gives up the lease; the daemon ends it by itself.
    fn drop_lease(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.pause.ended(lease.used.into(), lease.length.into(), sys::now());
        }
    }

    fn clear(&mut self, shadows: &Shadows) {
        if let Some(shadow) = self.shadow.take() {
            shadow.close(shadows);
        }
        *self = State::new();
    }
}

impl Default for Files {
    fn default() -> Files {
        Files::new()
    }
}

impl Files {
    const fn new() -> Files {
        Files {
            entries: [const { Entry::new() }; MAX_DESCRIPTORS],
            mounts: Mounts::new(),
            pages: Pages::new(),
            buffers: TryLock::new(Buffers::new()),
            shadows: Shadows::new(),
            mapped: Mapped::new(),
            process: AtomicI32::new(0),
        }
    }

    fn entry(&self, fd: RawFd) -> Option<&Entry> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// Does what `pwrite` does at `offset`, or else what `write` does. `None` if the caller is to
    /// make that call: nothing is done then.
    ///
    /// # Errors
    /// As those calls.
    #[inline]
    pub fn write(
        &self,
        fd: RawFd,
        parts: &[libc::iovec],
        offset: Option<i64>,
    ) -> Option<Result<usize, c_int>> {
        let entry = self.entry(fd)?;
        let is_on = self.process.load(Ordering::Relaxed) != 0;
        if !is_on || entry.kind.load(Ordering::Relaxed) == NEVER {
            return None;
        }
        self.write_cached(fd, entry, &Parts::new(parts)?, offset)
    }

    fn write_cached(
        &self,
        fd: RawFd,
        entry: &Entry,
        parts: &Parts,
        offset: Option<i64>,
    ) -> Option<Result<usize, c_int>> {
        let mut state = entry.state.try_lock()?;
        if !state.lease.as_ref().is_some_and(Held::goes_on)
            && !self.may_ask(fd, entry, &mut state, parts.length())
        {
            return None;
        }
        let claim = Claim::new(fd, parts.length(), offset)?;
        let mut done = 0;
        while done < parts.length() {
            match self.up_to_a_page(&state, &claim, parts, &mut done) {
                Ok(true) => {}
                Ok(false) => break,
                Err(why) => return Some(claim.failed(done, why)),
            }
            let rest = (claim.at(done), parts.length() - done);
            if !self.has_lease(fd, entry, &mut state, rest) {
                break;
            }
            let State { lease: Some(lease), shadow: Some(shadow), .. } = &mut *state else { break };
            let (stored, how) = lease.store(shadow.fd, parts, done);
            done += stored;
            match how {
                Stored::Well => {}
                Stored::Failed(libc::EFBIG) => return Some(claim.failed(done, libc::EFBIG)),
                Stored::Short if claim.at(done) >= sys::file_limit() => {
                    return Some(Ok(claim.short(done)));
                }
                Stored::Ended | Stored::Short | Stored::Failed(_) => {
                    state.drop_lease();
                    break;
                }
            }
        }
        if done == parts.length() { Some(Ok(done)) } else { claim.rest(parts, done) }
    }

    /// Returns whether a write of a descriptor without a lease may ask for one.
    fn may_ask(&self, fd: RawFd, entry: &Entry, state: &mut State, length: usize) -> bool {
        state.drop_lease();
        let now = sys::now();
        let is_new = entry.kind.load(Ordering::Relaxed) == UNKNOWN;
        // A child that shares this memory, or has a copy of it and told nobody, has descriptors of
        // its own.
        if (!is_new && !state.pause.passes(now)) || !self.is_own_process() {
            if !is_new && sys::appends(fd) {
                // Else the kernel has the position behind the write wrong.
                sys::ask_for_length(fd);
            }
            return false;
        }
        match self.kind(fd, now) {
            Kind::Never => entry.kind.store(NEVER, Ordering::Relaxed),
            Kind::NotNow => state.pause.refused(now),
            Kind::Appends => {
                entry.kind.store(CACHED, Ordering::Relaxed);
                state.pause.refused(now);
                sys::ask_for_length(fd);
            }
            Kind::Leased => {
                entry.kind.store(CACHED, Ordering::Relaxed);
                return !is_new || length >= LEASE_THRESHOLD;
            }
        }
        false
    }

    fn is_own_process(&self) -> bool {
        self.process.load(Ordering::Relaxed) == own_id()
    }

    /// Returns what a descriptor is good for. No file system is asked.
    fn kind(&self, fd: RawFd, now: u64) -> Kind {
        let Some(id) = mounts::id_of(fd) else { return Kind::Never };
        match self.mounts.is_cache(id.device, now) {
            Some(true) => {}
            Some(false) => return Kind::Never,
            None => return Kind::NotNow,
        }
        let flags = sys::borrow(fd).and_then(|fd| rustix::fs::fcntl_getfl(fd).ok());
        let Some(flags) = flags else { return Kind::Never };
        let writes =
            flags & OFlags::RWMODE == OFlags::WRONLY || flags & OFlags::RWMODE == OFlags::RDWR;
        let others = OFlags::DSYNC | OFlags::SYNC | OFlags::DIRECT;
        if !writes || flags.contains(OFlags::PATH) {
            Kind::Never
        } else if flags.contains(OFlags::APPEND) {
            Kind::Appends
        } else if flags.intersects(others) || self.mapped.has(id) {
            Kind::NotNow
        } else {
            Kind::Leased
        }
    }

    /// Has the kernel write as far as a lease can begin, if there is none. `false` if that is all,
    /// or there will be none.
    ///
    /// # Errors
    /// As of `pwrite`.
    fn up_to_a_page(
        &self,
        state: &State,
        claim: &Claim,
        parts: &Parts,
        done: &mut usize,
    ) -> Result<bool, c_int> {
        let at = claim.at(*done);
        if let Some(lease) = state.lease.as_ref().filter(|lease| lease.goes_on())
            && at <= lease.next()
        {
            return Ok(true);
        }
        let head = (at.next_multiple_of(GRAIN) - at) as usize;
        if state.pause.is_on() {
            return Ok(false);
        }
        if head == 0 {
            return Ok(true);
        }
        let end = done.saturating_add(head);
        let ends_here = end >= parts.length() || claim.appends();
        Ok(!ends_here && claim.through(parts, done, end)?)
    }

    /// Returns whether there is a lease for the bytes from `at` on, and asks for one if not.
    fn has_lease(
        &self,
        fd: RawFd,
        entry: &Entry,
        state: &mut State,
        (at, length): (u64, usize),
    ) -> bool {
        if let Some(lease) = state.lease.as_ref().filter(|lease| lease.goes_on()) {
            // It is at the file's end. What is before gets no lease, and what is behind another.
            if at <= lease.next() {
                return at == lease.next();
            }
        }
        state.drop_lease();
        let now = sys::now();
        if state.pause.is_on() || self.kind(fd, now) != Kind::Leased {
            return false;
        }
        let Some(mut buffers) = self.buffers.try_lock() else { return false };
        let asked = ask::ask(fd, (at, length), &mut buffers.answer).and_then(|()| {
            let shadow = &mut state.shadow;
            let taken = ask::take(&mut buffers, at, shadow, &self.pages, &self.shadows);
            taken.ok_or(Refused::ForGood)
        });
        drop(buffers);
        match asked {
            // Another thread has mapped it meanwhile, say.
            Ok(_) if self.kind(fd, now) != Kind::Leased => {
                sys::ask_for_length(fd);
                state.pause.refused(now);
            }
            Ok(lease) => {
                state.pause.granted();
                state.lease = Some(lease);
                return true;
            }
            Err(Refused::Now) => state.pause.refused(now),
            Err(Refused::ForGood) => {
                state.clear(&self.shadows);
                entry.kind.store(NEVER, Ordering::Relaxed);
            }
        }
        false
    }

    /// Forgets what is known of a descriptor, which is to be closed or replaced.
    pub fn forget(&self, fd: RawFd) {
        let Some(entry) = self.entry(fd) else { return };
        match entry.kind.load(Ordering::Relaxed) {
            UNKNOWN => {}
            NEVER => entry.kind.store(UNKNOWN, Ordering::Relaxed),
            // The daemon ends the lease when the descriptor is closed, whether this is told or not.
            _ if !self.is_own_process() => {}
            _ => {
                if let Some(mut state) = entry.state.try_lock() {
                    state.clear(&self.shadows);
                    entry.kind.store(UNKNOWN, Ordering::Relaxed);
                }
            }
        }
    }

    /// Returns whether a descriptor is this library's own: to the program, it is not open.
    pub fn is_own(&self, fd: RawFd) -> bool {
        self.shadows.has(fd) && self.is_own_process()
    }

    /// Gives up a descriptor of this library's own, whose number the program wants. `false` if it
    /// is in use just now.
    pub fn give_way(&self, fd: RawFd) -> bool {
        if !self.is_own(fd) {
            return true;
        }
        for entry in &self.entries {
            if entry.kind.load(Ordering::Relaxed) != CACHED {
                continue;
            }
            let Some(mut state) = entry.state.try_often() else { continue };
            if state.shadow.is_some_and(|shadow| shadow.fd == fd) {
                state.clear(&self.shadows);
            }
        }
        !self.is_own(fd)
    }

    /// Forgets all descriptors from `first` to `last`, and gives up this library's own.
    pub fn forget_range(&self, first: u32, last: u32) {
        let in_range = |fd: usize| u32::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd));
        if !self.is_own_process() {
            return;
        }
        for (fd, entry) in self.entries.iter().enumerate() {
            if entry.kind.load(Ordering::Relaxed) == UNKNOWN {
                continue;
            }
            let Some(mut state) = entry.state.try_often() else { continue };
            let shadow = state.shadow.and_then(|shadow| usize::try_from(shadow.fd).ok());
            let named = in_range(fd);
            if named || shadow.is_some_and(in_range) {
                state.clear(&self.shadows);
            }
            if named {
                entry.kind.store(UNKNOWN, Ordering::Relaxed);
            }
        }
    }

    /// Has the kernel know how long a file of a cache is, which it does not ask itself where it
    /// maps a file or copies out of it.
    pub fn refresh(&self, fd: RawFd) {
        if self.cached(fd).is_some() {
            sys::ask_for_length(fd);
        }
    }

    /// The same, and the file gets no lease from now on: parts of it are mapped.
    pub fn maps(&self, fd: RawFd) {
        if let Some(id) = self.cached(fd) {
            self.mapped.add(id);
            sys::ask_for_length(fd);
        }
    }

    /// Returns which file of a cache a descriptor is of, or may be of.
    fn cached(&self, fd: RawFd) -> Option<mounts::Id> {
        if self.process.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let id = mounts::id_of(fd)?;
        self.mounts.is_cache(id.device, sys::now()).unwrap_or(true).then_some(id)
    }

    /// Begins anew in a child, whose leases are its parent's.
    fn forked(&self) {
        self.process.store(own_id(), Ordering::Release);
        for entry in &self.entries {
            if entry.kind.load(Ordering::Relaxed) != CACHED {
                continue;
            }
            // One that is taken stays so: a thread that has it is not here, or it is this one,
            // which forked in a signal handler.
            if let Some(mut state) = entry.state.try_lock() {
                state.clear(&self.shadows);
                entry.kind.store(UNKNOWN, Ordering::Relaxed);
            }
        }
    }
}
