//! Leases: a program writes at the end of a file directly into the memory tier, past the mount.
//!
//! A file has one lease at most, of a range beyond its end where no data is. Locking the file's
//! state ends the lease ([`CachedFile::lock`]), so the rest of the engine only sees files without
//! leases. The bytes that the program has written by then are the file's.

use crate::backing;
use crate::engine::{Counters, Engine};
use crate::extents::{TierIndex, blocks_of};
use crate::file::{self, CachedFile, Handle, State};
use crate::journal::Record;
use crate::mount::Mount;
use crate::tier::lock;
use crate::write::may_end_at;
use fuser::INodeNo;
use kedge_cache_lease::{Ask, BYTES, Begun, LENGTH, Lease, SLOTS, Slot};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a lease lasts at most, so that what was written is drained.
pub(crate) const LASTS: Duration = Duration::from_secs(1);
/// A lease takes a quarter of its tier's free bytes at most, as others write too.
const PART_OF_FREE: u64 = 4;
/// Bytes of the shortest lease that is worth a request.
const MIN_LENGTH: u64 = 256 << 10;
/// A range ends at a multiple of this many bytes if it can, as drains are aligned.
const ALIGN: u64 = 1 << 20;
/// The set-user-id and set-group-id bits, which a write must clear.
const SET_IDS: u32 = 0o6000;

/// The leases of the memory tier.
#[derive(Debug)]
pub(crate) struct Leases {
    /// Slots that are free.
    free: Vec<u32>,
    /// The leases by their slots.
    granted: HashMap<u32, Watched>,
}

/// A lease as the watching thread sees it.
#[derive(Debug)]
struct Watched {
    file: Weak<CachedFile>,
    since: Instant,
    tier: TierIndex,
    /// Bytes that had been written at the last look.
    seen: u64,
}

impl Default for Leases {
    fn default() -> Leases {
        Leases { free: (0..SLOTS as u32).rev().collect(), granted: HashMap::new() }
    }
}

/// A lease that has not ended.
#[derive(Debug)]
struct Granted {
    engine: Arc<Engine>,
    tier: TierIndex,
    slot: u32,
    range: Range<u64>,
    /// Bytes of the tier that are reserved for it.
    taken: u64,
}

impl Granted {
    fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn slot(&self) -> Option<&Slot> {
        self.engine.slot(self.tier, self.slot)
    }
}

impl file::Lease for Granted {
    fn end(self: Box<Self>, file: &CachedFile, state: &mut State) {
        let Granted { engine, tier, .. } = &*self;
        let length = self.slot().map_or(0, |slot| slot.end(self.length()));
        let range = self.range.start..self.range.start + length;
        let record = Record::Write(file.number, range.start, length);
        // If the journal cannot be written, the slot stays taken and tells a later daemon.
        let noted = length == 0
            || engine.tiers[*tier].append_promised(engine.next_record(), &record).is_ok();
        engine.below.settle(self.length() - length);
        if length == 0 {
            engine.scheduler().limits.give_back(*tier, file.user, self.taken);
        } else {
            state.written_anew(&range);
            engine.is_mended(file, state, &range);
            engine.written(file, state, range, *tier, self.taken);
            Counters::add(&engine.counters.leased, length);
        }
        let mut leases = lock(&engine.leases);
        leases.granted.remove(&self.slot);
        if noted {
            self.slot().iter().for_each(|slot| slot.free());
            leases.free.push(self.slot);
        }
    }
}

impl Mount {
    /// Grants a program a lease, and returns the answer's bytes.
    ///
    /// # Errors
    /// `OPNOTSUPP` if this user or this file never gets one; `AGAIN` if there is none just now.
    pub(crate) fn lease(
        &self,
        user: u32,
        ino: INodeNo,
        handle: &Arc<Handle>,
        ask: &Ask,
    ) -> io::Result<[u8; BYTES]> {
        let kernel = self.kernel.get().ok_or(Errno::AGAIN)?;
        let lease = self.engine.lease(user, handle, ask)?;
        // The kernel does not see what the program writes, so it must ask for the file's size from
        // now on. Answering ends the lease.
        kernel.inval_inode(ino, -1, 0)?;
        // A name too long for the answer is too long for all answers.
        lease.encode().ok_or(Errno::OPNOTSUPP.into())
    }
}

impl Engine {
    /// Grants a program a lease of at least what it asks for.
    ///
    /// # Errors
    /// As [`Mount::lease`].
    pub(crate) fn lease(
        self: &Arc<Engine>,
        user: u32,
        handle: &Arc<Handle>,
        ask: &Ask,
    ) -> io::Result<Lease> {
        let file = &handle.file;
        // The program opens the tier's files itself, so it must be the daemon's user. With
        // `--gather`, the kernel alone knows the file's length.
        let own = user == rustix::process::geteuid().as_raw();
        let set_ids = backing::stat(&file.node)?.st_mode & SET_IDS != 0;
        if !handle.writes || !own || set_ids || self.spec.kernel_gathers {
            return Err(Errno::OPNOTSUPP.into());
        }
        let tier = self.tiers.iter().position(|tier| tier.page.is_some());
        let tier = tier.ok_or(Errno::OPNOTSUPP)?;
        let (range, taken) = self.take_for_lease(file, tier, ask).ok_or(Errno::AGAIN)?;
        let begun = self.begin_lease(handle, tier, range.clone(), taken);
        if begun.is_err() {
            self.scheduler().limits.give_back(tier, file.user, taken);
            self.below.settle(range.end - range.start);
        }
        let (slot, Begun { epoch }) = begun?;
        let folder = self.tiers[tier].folder.clone();
        let (start, length) = (range.start, range.end - range.start);
        Ok(Lease { start, length, folder, shadow: file.number, slot, epoch })
    }

    /// Reserves room in the tier and below, and returns the range and the bytes taken of the tier;
    /// `None` if there is too little, or others wait for it.
    fn take_for_lease(
        &self,
        file: &CachedFile,
        tier: TierIndex,
        ask: &Ask,
    ) -> Option<(Range<u64>, u64)> {
        let mut scheduler = self.scheduler();
        let refused = scheduler.stopped
            || !scheduler.waiting.is_empty()
            || file.troubled.load(Ordering::Relaxed)
            || scheduler.limits.is_in_pieces(file.user);
        let room = scheduler.limits.rooms()[tier];
        let free = room.limit.saturating_sub(room.used) / PART_OF_FREE;
        let mut end = ask.start.checked_add(free.min(LENGTH))?;
        if end / ALIGN * ALIGN >= ask.start + MIN_LENGTH.max(ask.length.min(ALIGN)) {
            end = end / ALIGN * ALIGN;
        }
        let range = ask.start..end;
        let length = range.end - range.start;
        if refused || length < MIN_LENGTH.max(ask.length.min(ALIGN)) {
            return None;
        }
        let blocks = blocks_of(&range);
        let taken = blocks.end - blocks.start;
        let got = scheduler.limits.take(file.user, taken)?;
        if got != tier || !self.below.promise(length) {
            scheduler.limits.give_back(got, file.user, taken);
            return None;
        }
        Some((range, taken))
    }

    /// Begins a lease of a range for which room is reserved; the caller gives that back on an
    /// error.
    fn begin_lease(
        self: &Arc<Engine>,
        handle: &Arc<Handle>,
        tier: TierIndex,
        range: Range<u64>,
        taken: u64,
    ) -> io::Result<(u32, Begun)> {
        let file = &handle.file;
        let _world = self.world.read();
        let mut state = file.lock();
        let is_beyond = range.start >= file.size(&state)?;
        // Appends go through the kernel's page cache, at the end of the file that it knows of.
        let busy = state.alone || state.appenders > 0;
        if !is_beyond || busy || self.closing.load(Ordering::Relaxed) {
            return Err(Errno::AGAIN.into());
        }
        if !may_end_at(&handle.below, range.end) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.shadow(file, &mut state, tier)?;
        let number = lock(&self.leases).free.pop().ok_or(Errno::AGAIN)?;
        let length = range.end - range.start;
        let record = self.next_record();
        let noted = Record::Lease(file.number, range.start, length, number);
        let noted = self.tiers[tier].append(record, &noted);
        let slot = self.slot(tier, number).ok_or(Errno::AGAIN);
        let begun = noted.and_then(|()| Ok(slot?.begin(record)));
        let begun = begun.inspect_err(|_| lock(&self.leases).free.push(number))?;
        if state.below.is_none() {
            state.below = Some(handle.below.clone());
        }
        let file = Arc::downgrade(file);
        let watched = Watched { file, since: Instant::now(), tier, seen: 0 };
        lock(&self.leases).granted.insert(number, watched);
        let granted = Granted { engine: self.clone(), tier, slot: number, range, taken };
        state.lease = Some(Box::new(granted));
        Ok((number, begun))
    }

    fn slot(&self, tier: TierIndex, number: u32) -> Option<&Slot> {
        self.tiers[tier].page.as_ref()?.slots().get(number as usize)
    }

    /// Returns whether any lease is granted.
    pub(crate) fn has_leases(&self) -> bool {
        !lock(&self.leases).granted.is_empty()
    }

    /// Returns whether programs have written under leases since the last call.
    pub(crate) fn leases_grew(&self) -> bool {
        let mut grew = false;
        for (number, lease) in &mut lock(&self.leases).granted {
            let written = self.slot(lease.tier, *number).map_or(0, |slot| slot.written(LENGTH));
            grew |= std::mem::replace(&mut lease.seen, written) != written;
        }
        grew
    }

    /// Ends the leases that are at least `age` old, and returns whether there was one.
    pub(crate) fn end_leases(&self, age: Duration) -> bool {
        let leases = lock(&self.leases);
        let old = leases.granted.values().filter(|lease| lease.since.elapsed() >= age);
        let files: Vec<_> = old.filter_map(|lease| lease.file.upgrade()).collect();
        drop(leases);
        // Locking a file ends its lease.
        files.iter().for_each(|file| drop(file.lock()));
        !files.is_empty()
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
