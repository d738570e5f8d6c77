//! Drains: copies dirty bytes from the tiers to the file system below.

use crate::backing;
use crate::caller::Caller;
use crate::engine::{Counters, Engine};
use crate::extents::{Flight, TierIndex};
use crate::faults::Point;
use crate::file::{CachedFile, Handle, Keeping, State, Trouble};
use crate::journal::Record;
use crate::moves::LOST;
use crate::shadow::Shadow;
use crate::spec::{Fsync, Medium};
use crate::tier::lock;
use rustix::fs::{Timespec, Timestamps};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of one part, and of one write.
const PART: u64 = 4 << 20;
/// Parts end at a multiple of this many bytes.
const ALIGN: u64 = 1 << 20;
/// Bytes of one part where the file below is synced after each: with a disk as a tier, and on some
/// network file systems.
const SYNCED_PART: u64 = 32 << 20;
/// Milliseconds until a file that could not be drained is tried again.
const RETRY_MS: u64 = 2000;
/// How long a drain thread sleeps unless it is woken.
const IDLE_WAIT: Duration = Duration::from_millis(50);

/// Maps the result of a sync below to what the caller is told: the kernel reports an error once,
/// but every open descriptor must learn of it.
type Report<'a> = dyn Fn(io::Result<()>) -> io::Result<()> + 'a;

impl Engine {
    /// Runs a drain thread: drains until the engine stops.
    pub(crate) fn drain_forever(self: &Arc<Engine>) {
        let mut buffer = Vec::new();
        // Files that cannot be drained just now are passed over, so that others do not wait.
        let mut busy = HashSet::new();
        loop {
            let grew = self.leases_grew();
            let mut scheduler = self.scheduler();
            if scheduler.stopped {
                return;
            }
            if grew {
                scheduler.order.is_written(self.now());
            }
            let next = scheduler
                .order
                .next(self.now(), scheduler.limits.percent(), |file| busy.contains(&file));
            let Some(number) = next else {
                // Passed-over files are tried again soon.
                let wait = if busy.is_empty() { IDLE_WAIT } else { IDLE_WAIT / 10 };
                busy.clear();
                drop(
                    self.work.wait_timeout(scheduler, wait).unwrap_or_else(PoisonError::into_inner),
                );
                continue;
            };
            drop(scheduler);
            let file = lock(&self.files).by_number.get(&number).cloned();
            let free = file.filter(|file| {
                let mut state = file.lock();
                if state.barriers > 0 {
                    state.drains_first();
                }
                let blocked = state.barriers > 0;
                drop(state);
                !blocked && self.is_next_of_folder(file)
            });
            let drained = free.map(|file| self.drain_part(&file, 0, &mut buffer));
            if !matches!(drained, Some(Ok(Some(_)))) {
                // Nothing of it is left to drain, or a drain failed, or a barrier blocks it.
                busy.insert(number);
            }
        }
    }

    /// Returns whether the file may be drained now: no other of its folder must be below first.
    fn is_next_of_folder(self: &Arc<Engine>, file: &CachedFile) -> bool {
        let Some(before) = self.pending_before(file) else { return true };
        if before.troubled.load(Ordering::Relaxed) {
            // That one cannot be drained, so nobody should wait for the room that this one takes:
            // it is tried again at the same time.
            self.scheduler().order.failed(file.number, self.now() + RETRY_MS);
            self.serve_waiting();
        }
        false
    }

    /// Drains the file's first dirty part at or after offset `from`, and returns the part's end;
    /// `None` if nothing there is dirty.
    ///
    /// # Errors
    /// What the tier or the file system below failed with; the bytes stay dirty.
    pub(crate) fn drain_part(
        self: &Arc<Engine>,
        file: &Arc<CachedFile>,
        from: u64,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Option<u64>> {
        let mut state = file.wait_for_barriers(file.lock());
        let disks = self.spec.tiers.iter().any(|tier| tier.medium == Medium::Nvme);
        let synced =
            self.partner.is_some() || self.below.keeps_writes || state.keeping != Keeping::Plain;
        let part = if disks || synced { SYNCED_PART } else { PART };
        state.drain_begins();
        file.notify();
        let Some(flight) = state.extents.take(from, part, ALIGN) else { return Ok(None) };
        let sends = state.sends;
        state.departed.insert(flight.range.clone(), sends);
        let shadow = state.shadows[flight.tier].as_ref().map(|shadow| shadow.pin(&flight.range));
        let below = state.below.clone();
        let sync = self.must_sync(&state, flight.tier);
        self.counters.drains.fetch_add(1, Ordering::Relaxed);
        drop(state);
        let result = match (shadow, below) {
            (Some(shadow), Some(below)) => {
                let carried = self.carry(file, &flight, &shadow, &below, buffer);
                match sync {
                    true => carried.and_then(|()| self.sync_below(file, || below.sync_data())),
                    false => carried,
                }
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        self.faults.hold(Point::Carried);
        self.arrived(file, &flight, &result);
        self.serve_waiting();
        result.map(|()| Some(flight.range.end))
    }

    /// Copies a part from its tier's shadow file to the file below.
    fn carry(
        &self,
        file: &CachedFile,
        flight: &Flight,
        shadow: &Shadow,
        below: &File,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        self.finish_cut(file, below)?;
        for tier in &self.tiers {
            tier.sync_cleans()?;
        }
        let owner = backing::stat(&file.node)?;
        let mut at = flight.range.start;
        while at < flight.range.end {
            let length = (flight.range.end - at).min(PART) as usize;
            buffer.resize(length.max(buffer.len()), 0);
            let part = &mut buffer[..length];
            shadow.read_exact_at(part, at)?;
            self.faults.before_write(length)?;
            Caller::run_as_owner(&owner, || below.write_all_at(part, at))?;
            at += length as u64;
        }
        Ok(())
    }

    /// Returns whether bytes of `tier` must be synced below before they count as drained: the tier
    /// would keep them over a reboot, a partner or other nodes rely on them, or a program has asked
    /// for it.
    fn must_sync(&self, state: &State, tier: TierIndex) -> bool {
        self.tiers[tier].is_durable()
            || self.partner.is_some()
            || self.below.keeps_writes
            || state.keeping != Keeping::Plain
    }

    /// Notes the end of a part's drain, done or failed.
    fn arrived(&self, file: &CachedFile, flight: &Flight, result: &io::Result<()>) {
        let world = self.world.read();
        let mut state = file.lock();
        let departed = state.departed.remove(flight.range.clone());
        match result {
            Ok(()) => {
                let freed = state.extents.landed(flight);
                // Clean is what was not written again meanwhile: the same bytes are never in flight
                // twice.
                let mut clean = crate::ranges::RangeMap::default();
                clean.insert(flight.range.clone(), ());
                for (dirty, _) in state.extents.dirty_within(flight) {
                    clean.remove(dirty);
                }
                let parts = clean.iter().map(|(range, ())| Flight { range, tier: flight.tier });
                self.release(file, &state, &parts.collect::<Vec<_>>(), &freed);
                Counters::add(&self.counters.drained, flight.range.end - flight.range.start);
                let sent = departed.first().map_or(0, |(_, sends)| *sends);
                self.partner_gives_up(file, &mut state, flight.range.clone(), sent);
                if state.extents.is_clean() {
                    keep_time(&mut state);
                }
                self.settle(file, &mut state);
            }
            Err(error) => {
                let (superseded, freed) = state.extents.failed(flight);
                self.release(file, &state, &superseded, &freed);
                self.settle(file, &mut state);
                self.failed(file, &mut state, error);
            }
        }
        let done = state.extents.is_clean() && !file.is_open();
        drop(state);
        self.counters.drains.fetch_sub(1, Ordering::Relaxed);
        file.notify();
        drop(world);
        if done {
            self.forget_if_done(file);
        }
    }

    /// Notes why a file could not be drained, and when to try again.
    fn failed(&self, file: &CachedFile, state: &mut State, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
        if state.trouble.is_none_or(|trouble| trouble.errno != errno) {
            state.troubles += 1;
            state.trouble = Some(Trouble { errno, count: state.troubles });
        }
        file.troubled.store(true, Ordering::Relaxed);
        let now = self.now();
        let mut scheduler = self.scheduler();
        scheduler.order.found(file.number, state.extents.unwritten(), now);
        scheduler.order.failed(file.number, now + RETRY_MS);
    }

    /// Drains what is dirty of a file now, and waits until that is below.
    ///
    /// # Errors
    /// What the file system below failed with; the data stays in its tier.
    pub(crate) fn drain_file(self: &Arc<Engine>, file: &Arc<CachedFile>) -> io::Result<()> {
        let mut buffer = Vec::new();
        let (mut from, last) = (0, file.lock().extents.end());
        // Bytes in flight may be older than dirty ones of the same range, which must wait for them.
        file.at_rest(&self.world, 0..last, |_| ());
        // Bytes that are appended meanwhile are left to the next drain.
        while from < last
            && let Some(end) = self.drain_part(file, from, &mut buffer)?
        {
            from = end;
        }
        // Other threads may still be draining parts that were dirty when this began.
        let trouble = file.at_rest(&self.world, 0..u64::MAX, |state| state.trouble);
        match trouble {
            Some(trouble) => Err(io::Error::from_raw_os_error(trouble.errno)),
            None => Ok(()),
        }
    }

    /// Drains everything that is dirty now.
    ///
    /// # Errors
    /// The names of the files that could not be drained, and why; also of those that have lost
    /// bytes with a device, until an fsync has reported that.
    pub(crate) fn drain_all(self: &Arc<Engine>) -> Result<(), Vec<(String, io::Error)>> {
        let mut files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        // The key is read once a file, as a program may change it meanwhile.
        files.sort_by_cached_key(|file| file.lock().keeping == Keeping::Last);
        let mut failed = Vec::new();
        for file in files {
            let clean = file.lock().extents.is_clean();
            let before = if clean { None } else { self.pending_before(&file) };
            let drained = match before {
                _ if clean => Ok(()),
                Some(_) => {
                    Err(io::Error::other("others of its folder go first, and are not below"))
                }
                None => self.drain_file(&file),
            };
            let state = file.lock();
            let lost = if state.orphan { 0 } else { state.broken.total() };
            let drained = match lost {
                0 => drained,
                lost => Err(io::Error::other(format!("{lost} bytes are {LOST}"))),
            };
            if let Err(error) = drained {
                failed.push((String::from_utf8_lossy(&state.path).into_owned(), error));
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Returns how many files have dirty bytes.
    pub(crate) fn dirty_files(&self) -> usize {
        let files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        files.iter().filter(|file| !file.lock().extents.is_clean()).count()
    }

    /// Makes a file as durable as `--fsync` says.
    ///
    /// # Errors
    /// The file cannot be made durable, or bytes of it were lost that no fsync has reported.
    pub(crate) fn fsync(self: &Arc<Engine>, handle: &Handle) -> io::Result<()> {
        let file = &handle.file;
        self.tell_broken_once(file)?;
        match self.spec.fsync {
            Fsync::Memory => {
                self.stay_in_memory(file)?;
                file.lock().tell_trouble()
            }
            // A failed sync counts among the losses, which each descriptor is told once.
            Fsync::Nvme | Fsync::Partner | Fsync::Drain => {
                self.persist(file, &handle.below, &|_| {
                    handle.untold_loss(&file.lock()).map_or(Ok(()), Err)
                })
            }
        }
    }

    /// Makes a file that is about to replace another as durable as fsync would, so that a power cut
    /// leaves one of the two whole.
    ///
    /// # Errors
    /// The file cannot be made durable, or has lost bytes with a device and no fsync has reported
    /// that. The other file should keep its name then.
    pub(crate) fn persist_replacement(self: &Arc<Engine>, node: &OwnedFd) -> io::Result<()> {
        let stat = backing::stat(node)?;
        if let Some(file) = self.known((stat.st_dev, stat.st_ino)) {
            let state = file.lock();
            state.tell_broken(0..u64::MAX)?;
            let (below, clean) = (state.below.clone(), state.extents.is_clean());
            drop(state);
            match below {
                Some(below) if clean => {
                    self.settle_partner(&file)?;
                    return self.sync_below(&file, || below.sync_all());
                }
                Some(below) => return self.persist(&file, &below, &|synced| synced),
                None => {}
            }
        }
        // The cache has forgotten it: it was drained, or written below at once.
        self.settle_unknown(node)?;
        self.faults.sync(|| self.below.sync(node))
    }

    /// Makes a file durable where the policy says: on a local disk, at the partner or below.
    /// `report` maps the result of a sync below.
    fn persist(
        self: &Arc<Engine>,
        file: &Arc<CachedFile>,
        opened: &Arc<File>,
        report: &Report<'_>,
    ) -> io::Result<()> {
        if self.spec.fsync == Fsync::Nvme && self.secure(file, opened, report)? {
            return Ok(());
        }
        if self.spec.fsync == Fsync::Partner && self.copy_to_partner(file, opened, report)? {
            return Ok(());
        }
        self.drain_file(file)?;
        self.finish_cut(file, opened)?;
        // Older bytes on a local disk must not come back over these after a power cut.
        for tier in &self.tiers {
            tier.sync_cleans()?;
        }
        self.settle_partner(file)?;
        let below = file.lock().below.clone().unwrap_or_else(|| opened.clone());
        report(self.sync_below(file, || below.sync_all()))
    }

    /// Syncs a file below, and keeps an error for every open descriptor: the kernel reports it
    /// once.
    ///
    /// # Errors
    /// What `sync` fails with.
    pub(crate) fn sync_below(
        &self,
        file: &CachedFile,
        sync: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.faults.sync(sync).inspect_err(|error| {
            let mut state = file.lock();
            state.troubles += 1;
            let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
            state.lost = Some(Trouble { errno, count: state.troubles });
        })
    }

    /// Makes a file durable with its dirty bytes on a local disk and the others below. Returns
    /// false if the local disk has no room, or a drain that was in flight has failed.
    fn secure(
        &self,
        file: &CachedFile,
        opened: &Arc<File>,
        report: &Report<'_>,
    ) -> io::Result<bool> {
        let Some(disk) = self.tiers.iter().position(|tier| tier.is_durable()) else {
            return Ok(false);
        };
        // From now on none of its bytes move to a device.
        file.lock().stays = true;
        if !self.bring_back(file, disk)? || !self.move_all(file, disk)? {
            return Ok(false);
        }
        let (failed, below, shadow, last) = file.at_rest(&self.world, 0..u64::MAX, |state| {
            // A part that was in flight while the others were moved may have failed, and so still
            // be in another tier.
            let elsewhere = state.extents.dirty().any(|(_, tier)| tier != disk);
            let below = state.below.clone().unwrap_or_else(|| opened.clone());
            // This sync covers what is written until now.
            let shadow = state.shadows[disk].clone();
            let shadow = shadow.and_then(|shadow| shadow.file().cloned());
            (elsewhere && state.trouble.is_some(), below, shadow, self.last_record())
        });
        if failed {
            return Ok(false);
        }
        // Drained bytes are on no disk until the file below is synced.
        report(self.sync_below(file, || below.sync_data()))?;
        self.finish_cut(file, &below)?;
        if let Some(shadow) = shadow {
            shadow.sync_data()?;
            let _world = self.world.read();
            self.note(disk, &Record::Commit(file.number, last))?;
            self.tiers[disk].sync_names()?;
        }
        self.tiers[disk].sync()?;
        Ok(true)
    }

    /// Moves a file's dirty bytes from other tiers to the one on a local disk; returns false if
    /// that has no room. The file is locked for one part at a time.
    fn move_all(&self, file: &CachedFile, disk: TierIndex) -> io::Result<bool> {
        let (mut from, last) = (0, file.lock().extents.end());
        let mut buffer = Vec::new();
        while from < last {
            let _world = self.world.read();
            let mut state = file.lock();
            let elsewhere =
                |(range, tier): &(Range<u64>, TierIndex)| range.end > from && *tier != disk;
            let Some((range, tier)) = state.extents.dirty().find(elsewhere) else { break };
            let start = range.start.max(from);
            let part = start..range.end.min(start + PART);
            from = part.end;
            buffer.resize((part.end - part.start) as usize, 0);
            let Some(shadow) = state.shadows[tier].clone() else { return Ok(false) };
            shadow.read_exact_at(&mut buffer, part.start)?;
            let room = self.scheduler().limits.rooms()[disk];
            if room.used + buffer.len() as u64 + 2 * crate::extents::BLOCK > room.limit
                || self.keep(file, &mut state, &part, &buffer, disk).is_err()
            {
                return Ok(false);
            }
            let written = state.extents.write(part, disk);
            self.scheduler().limits.hold(disk, file.user, written.taken);
            self.release(file, &state, &written.superseded, &written.freed);
        }
        Ok(true)
    }
}

/// Sets the modification time of the file below to when the program wrote it.
fn keep_time(state: &mut State) {
    let (Some(written), Some(below)) = (state.written.take(), &state.below) else { return };
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let times = Timestamps { last_access: omit, last_modification: timespec(written) };
    // Only the owner may set it; otherwise it stays the time of the drain.
    let _ = rustix::fs::futimens(below, &times);
}

/// Converts a time to a timespec; its nanoseconds are not negative, before 1970 as well.
pub(crate) fn timespec(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => {
            Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() }
        }
        Err(before) => {
            let before = before.duration();
            let (seconds, nanos) = (before.as_secs() as i64, i64::from(before.subsec_nanos()));
            match nanos {
                0 => Timespec { tv_sec: -seconds, tv_nsec: 0 },
                _ => Timespec { tv_sec: -seconds - 1, tv_nsec: 1_000_000_000 - nanos },
            }
        }
    }
}
