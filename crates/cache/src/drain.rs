//! From the tiers to the file system below.

use crate::below;
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

/// What a drain from memory writes at once, and to what it aligns.
const PART: u64 = 4 << 20;
const ALIGN: u64 = 1 << 20;
/// The same where the file below is synced after each: from a disk, or to some network file
/// systems.
const DISK_PART: u64 = 32 << 20;
/// A file that could not be drained is tried again after so many milliseconds.
const RETRY: u64 = 2000;
/// How long a drain thread sleeps where nothing tells it.
const NAP: Duration = Duration::from_millis(50);

/// Says what becomes of the word of a sync below: one is told once, and to many.
type Told<'a> = dyn Fn(io::Result<()>) -> io::Result<()> + 'a;

impl Engine {
    /// Drains as long as the engine runs: the work of a drain thread.
    pub(crate) fn drain_forever(self: &Arc<Engine>) {
        let mut buffer = Vec::new();
        // Files that cannot be drained just now: others are not to wait for them.
        let mut busy = HashSet::new();
        loop {
            let desk = self.desk();
            if desk.stopped {
                return;
            }
            let next =
                desk.order.next(self.now(), desk.limits.percent(), |file| busy.contains(&file));
            let Some(number) = next else {
                // What was busy is looked at again soon.
                let nap = if busy.is_empty() { NAP } else { NAP / 10 };
                busy.clear();
                drop(self.work.wait_timeout(desk, nap).unwrap_or_else(PoisonError::into_inner));
                continue;
            };
            drop(desk);
            let file = lock(&self.files).by_number.get(&number).cloned();
            let free = file.filter(|file| {
                let mut state = file.lock();
                if state.barriers > 0 {
                    state.drains_first();
                }
                let rests = state.barriers > 0;
                drop(state);
                !rests && self.is_next_of_folder(file)
            });
            let drained = free.map(|file| self.drain_part(&file, 0, &mut buffer));
            if !matches!(drained, Some(Ok(Some(_)))) {
                // All of it is on its way, or failed, or somebody waits for that.
                busy.insert(number);
            }
        }
    }

    /// Returns whether no other file of its folder is to be below before this one.
    fn is_next_of_folder(self: &Arc<Engine>, file: &CachedFile) -> bool {
        let Some(before) = self.goes_before(file) else { return true };
        if before.troubled.load(Ordering::Relaxed) {
            // Nobody is to wait for room that this one may give: it is tried again with that one.
            self.desk().order.failed(file.number, self.now() + RETRY);
            self.serve_waiting();
        }
        false
    }

    /// Drains the first part of a file at or after `from`, and returns where it ends.
    ///
    /// `None` if nothing there is dirty.
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
        let part = if disks || synced { DISK_PART } else { PART };
        state.departs();
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

    /// Copies a part from its tier to the file below.
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
        let owner = below::stat(&file.node)?;
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

    /// Returns whether a disk below must have what `tier` has of a file before it counts as
    /// drained: what survived a reboot in the tier, other nodes must see, or a program has asked to
    /// be kept.
    fn must_sync(&self, state: &State, tier: TierIndex) -> bool {
        self.tiers[tier].is_durable()
            || self.partner.is_some()
            || self.below.keeps_writes
            || state.keeping != Keeping::Plain
    }

    fn arrived(&self, file: &CachedFile, flight: &Flight, result: &io::Result<()>) {
        let world = self.world.read();
        let mut state = file.lock();
        let departed = state.departed.remove(flight.range.clone());
        match result {
            Ok(()) => {
                let freed = state.extents.landed(flight);
                // Another flight of the same bytes does not depart before this one has landed.
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

    fn failed(&self, file: &CachedFile, state: &mut State, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
        if state.trouble.is_none_or(|trouble| trouble.errno != errno) {
            state.troubles += 1;
            state.trouble = Some(Trouble { errno, count: state.troubles });
        }
        file.troubled.store(true, Ordering::Relaxed);
        let now = self.now();
        let mut desk = self.desk();
        desk.order.found(file.number, state.extents.unwritten(), now);
        desk.order.failed(file.number, now + RETRY);
    }

    /// Drains all of a file that is dirty now, and waits until it is below.
    ///
    /// # Errors
    /// What the file system below failed with; the data stays in its tier.
    pub(crate) fn drain_file(self: &Arc<Engine>, file: &Arc<CachedFile>) -> io::Result<()> {
        let mut buffer = Vec::new();
        let (mut from, last) = (0, file.lock().extents.end());
        // What flies may be older than what is dirty there now, which departs once it has landed.
        file.at_rest(&self.world, 0..last, |_| ());
        // What is appended meanwhile is the next one's to drain.
        while from < last
            && let Some(end) = self.drain_part(file, from, &mut buffer)?
        {
            from = end;
        }
        // Others may have parts on their way that were dirty when this began.
        let trouble = file.at_rest(&self.world, 0..u64::MAX, |state| state.trouble);
        match trouble {
            Some(trouble) => Err(io::Error::from_raw_os_error(trouble.errno)),
            None => Ok(()),
        }
    }

    /// Drains everything that is dirty now.
    ///
    /// # Errors
    /// The names of files that could not be drained, and why; also those of which a device has lost
    /// bytes, as long as no fsync was told.
    pub(crate) fn drain_all(self: &Arc<Engine>) -> Result<(), Vec<(String, io::Error)>> {
        let mut files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        // Once for each: a program may ask for another order meanwhile.
        files.sort_by_cached_key(|file| file.lock().keeping == Keeping::Last);
        let mut failed = Vec::new();
        for file in files {
            let clean = file.lock().extents.is_clean();
            let before = if clean { None } else { self.goes_before(&file) };
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

    /// Returns how many files are not all below.
    pub(crate) fn dirty_files(&self) -> usize {
        let files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        files.iter().filter(|file| !file.lock().extents.is_clean()).count()
    }

    /// Makes a file as durable as the policy says.
    pub(crate) fn fsync(self: &Arc<Engine>, handle: &Handle) -> io::Result<()> {
        let file = &handle.file;
        file.lock().tell_broken_once()?;
        match self.spec.fsync {
            Fsync::Memory => {
                self.stay_in_memory(file)?;
                file.lock().tell_trouble()
            }
            // The error of a sync is among what was lost, which each descriptor is told.
            Fsync::Nvme | Fsync::Partner | Fsync::Drain => {
                self.persist(file, &handle.below, &|_| {
                    handle.untold_loss(&file.lock()).map_or(Ok(()), Err)
                })
            }
        }
    }

    /// Has a file that takes another one's name be as durable as fsync would have it: after a power
    /// cut, one of both is there.
    ///
    /// # Errors
    /// If that cannot be, or a device has lost bytes of it and no fsync was told: the other file
    /// should keep its name then.
    pub(crate) fn persist_replacement(self: &Arc<Engine>, node: &OwnedFd) -> io::Result<()> {
        let stat = below::stat(node)?;
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
        // It was drained, or written below at once, a moment ago.
        self.settle_unknown(node)?;
        self.faults.sync(|| self.below.sync(node))
    }

    /// Has the policy's disk have a file. `told` says what becomes of the word of a sync below.
    fn persist(
        self: &Arc<Engine>,
        file: &Arc<CachedFile>,
        opened: &Arc<File>,
        told: &Told<'_>,
    ) -> io::Result<()> {
        if self.spec.fsync == Fsync::Nvme && self.secure(file, opened, told)? {
            return Ok(());
        }
        if self.spec.fsync == Fsync::Partner && self.copy_to_partner(file, opened, told)? {
            return Ok(());
        }
        self.drain_file(file)?;
        self.finish_cut(file, opened)?;
        // What a local disk had and is older now must not come back over it.
        for tier in &self.tiers {
            tier.sync_cleans()?;
        }
        self.settle_partner(file)?;
        let below = file.lock().below.clone().unwrap_or_else(|| opened.clone());
        told(self.sync_below(file, || below.sync_all()))
    }

    /// Syncs a file below. The kernel tells an error once, but all who have the file open must
    /// know.
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

    /// Has a local disk, and that of the file system below, have all of a file. `false` if the
    /// local one has no room, or what was on its way below could not get there.
    fn secure(&self, file: &CachedFile, opened: &Arc<File>, told: &Told<'_>) -> io::Result<bool> {
        let Some(disk) = self.tiers.iter().position(|tier| tier.is_durable()) else {
            return Ok(false);
        };
        // Nothing moves on to a device meanwhile.
        file.lock().stays = true;
        if !self.bring_back(file, disk)? || !self.move_all(file, disk)? {
            return Ok(false);
        }
        let (failed, below, shadow, last) = file.at_rest(&self.world, 0..u64::MAX, |state| {
            // It flew while the rest was moved, and is where it was.
            let elsewhere = state.extents.dirty().any(|(_, tier)| tier != disk);
            let below = state.below.clone().unwrap_or_else(|| opened.clone());
            // What is written from now on is not of this sync.
            let shadow = state.shadows[disk].clone();
            let shadow = shadow.and_then(|shadow| shadow.file().cloned());
            (elsewhere && state.trouble.is_some(), below, shadow, self.last_record())
        });
        if failed {
            return Ok(false);
        }
        // What has landed, now or before the file was opened, is on no disk until that is synced.
        told(self.sync_below(file, || below.sync_data()))?;
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

    /// Moves what other tiers have of a file to the one on a disk. `false` if it has no room.
    ///
    /// The file is locked for one part at a time.
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
            let room = self.desk().limits.rooms()[disk];
            if room.used + buffer.len() as u64 + 2 * crate::extents::BLOCK > room.limit
                || self.keep(file, &mut state, &part, &buffer, disk).is_err()
            {
                return Ok(false);
            }
            let written = state.extents.write(part, disk);
            self.desk().limits.hold(disk, file.user, written.taken);
            self.release(file, &state, &written.superseded, &written.freed);
        }
        Ok(true)
    }
}

/// Gives the file below the time at which the program wrote it.
fn keep_time(state: &mut State) {
    let (Some(written), Some(below)) = (state.written.take(), &state.below) else { return };
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let times = Timestamps { last_access: omit, last_modification: timespec(written) };
    // Only the owner may; the time of the drain is the next best.
    let _ = rustix::fs::futimens(below, &times);
}

/// Returns a time as system calls have it.
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
