//! Writes and reads of cached files.

use crate::admission::Limits;
use crate::backing;
use crate::caller::Caller;
use crate::copies::Copied;
use crate::engine::{Counters, Engine, Scheduler};
use crate::extents::{BLOCK, TierIndex, blocks_of};
use crate::file::{CachedFile, Handle, Keeping, State};
use crate::journal::Record;
use crate::shadow::{Shadow, part_of};
use crate::spec::{Fsync, Medium};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

/// Every file system has files as large.
const ANY_LARGE: u64 = (2 << 30) - 1;

/// What is done with a write's result.
pub(crate) type Done = Box<dyn FnOnce(io::Result<u32>) + Send>;

/// Reads from the file below, if that can be done; returns how much there was.
type ReadBelow<'a> = dyn FnMut(&mut [u8], u64) -> io::Result<Option<usize>> + 'a;

/// A write of a program.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub(crate) handle: Arc<Handle>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Whether it begins where the file ends.
    pub(crate) append: bool,
    /// The user and the process whose turn it takes.
    pub(crate) user: u32,
    pub(crate) writer: u64,
}

/// A write that waits for room.
pub(crate) struct Waiter {
    write: Write,
    data: Copied,
    done: Done,
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.write.fmt(f)
    }
}

/// Where a write goes.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Into a tier, of which so many bytes were taken.
    Tier(TierIndex, u64),
    /// To the file below, at once.
    Below,
    /// The same, after all that space below was promised to: there is no more.
    BelowLast,
}

impl Write {
    /// Returns the most that the write takes of a tier.
    fn bound(&self) -> u64 {
        let blocks = blocks_of(&(self.offset..self.offset + self.length));
        // Where an appended write begins is known only when it is its turn.
        blocks.end - blocks.start + if self.append { BLOCK } else { 0 }
    }
}

impl Engine {
    /// Writes, and calls `done` with the result: at once, or when there is room, or when the file
    /// system below has it. Does not wait itself.
    pub(crate) fn write(self: &Arc<Engine>, write: Write, data: &[u8], done: Done) {
        let mut scheduler = self.scheduler();
        // Those who wait already have their turn first.
        let first = scheduler.waiting.is_empty();
        let mut place = if first { self.place(&mut scheduler, &write) } else { None };
        drop(scheduler);
        if first && place.is_none() && self.end_leases(Duration::ZERO) {
            // What programs may write by themselves is room as well.
            place = self.place(&mut self.scheduler(), &write);
        }
        if let Some(Place::Tier(tier, taken)) = place
            && let Some(result) = self.absorb_into(&write, data, tier, taken)
        {
            return done(result);
        }
        let Some(data) = self.copies.copy(write.user, data) else {
            return done(Err(Errno::NOBUFS.into()));
        };
        let waiter = Waiter { write, data, done };
        match place {
            Some(place) => self.write_aside(place, waiter),
            None => {
                Counters::add(&self.counters.waited, 1);
                let (user, writer) = (waiter.write.user, waiter.write.writer);
                self.scheduler().waiting.push(user, writer, waiter);
                self.work.notify_all();
                self.serve_waiting();
            }
        }
    }

    /// Lets those write who waited and whose turn has come.
    pub(crate) fn serve_waiting(self: &Arc<Engine>) {
        loop {
            let mut scheduler = self.scheduler();
            let mut waiting = std::mem::take(&mut scheduler.waiting);
            let next = waiting.next(|waiter| self.place(&mut scheduler, &waiter.write));
            scheduler.waiting = waiting;
            drop(scheduler);
            let Some((waiter, place)) = next else { return };
            if let Place::Tier(tier, taken) = place
                && let Some(result) =
                    self.absorb_into(&waiter.write, &waiter.data.data, tier, taken)
            {
                (waiter.done)(result);
                continue;
            }
            self.write_aside(place, waiter);
        }
    }

    /// Has a write go to the file below, which may take long.
    fn write_aside(self: &Arc<Engine>, place: Place, Waiter { write, data, done }: Waiter) {
        let engine = self.clone();
        self.pool.run(write.user, move || {
            if matches!(place, Place::BelowLast) {
                // What cannot be drained has its own trouble, which its own writers are told.
                let _ = engine.drain_all();
            }
            done(engine.write_through(&write, &data.data));
        });
    }

    /// Finds a place for a write; `None` if there will be room in a tier later.
    fn place(&self, scheduler: &mut Scheduler, write: &Write) -> Option<Place> {
        let bound = write.bound();
        let before = self.spec.tiers.iter().filter(|tier| tier.medium != Medium::Gpu);
        let largest = before.map(|tier| tier.bytes).max().unwrap_or(0);
        let most = self.spec.per_user.map_or(largest, |user| user.min(largest));
        let user = write.handle.file.user;
        // A file that cannot be drained would fill the tiers, for everybody.
        let troubled = write.handle.file.troubled.load(Ordering::Relaxed);
        if bound > most || scheduler.stopped || troubled || scheduler.limits.is_in_pieces(user) {
            return Some(Place::Below);
        }
        match scheduler.limits.take(user, bound) {
            Some(tier) if self.below.promise(write.length) => Some(Place::Tier(tier, bound)),
            Some(tier) => {
                scheduler.limits.give_back(tier, user, bound);
                Some(Place::BelowLast)
            }
            None if scheduler.order.has_drainable(self.now()) || self.in_flight() => None,
            None if self.has_leases() => None,
            None => Some(Place::Below),
        }
    }

    /// Returns whether something is being absorbed or drained, so that room may come.
    fn in_flight(&self) -> bool {
        self.counters.drains.load(Ordering::Relaxed) > 0
    }

    /// Writes into a tier, of which `taken` bytes were taken. `None` if the file below must have
    /// it.
    fn absorb_into(
        &self,
        write: &Write,
        data: &[u8],
        tier: TierIndex,
        taken: u64,
    ) -> Option<io::Result<u32>> {
        match self.absorb(write, data, tier, taken) {
            Ok(true) => Some(Ok(data.len() as u32)),
            // The tier could not take it (a full or broken disk), or the file below is changed now.
            Ok(false) => None,
            Err(error) => {
                self.scheduler().limits.give_back(tier, write.handle.file.user, taken);
                self.below.settle(write.length);
                Some(Err(error))
            }
        }
    }

    /// Writes into a tier. `false` if the tier could not take it; what was taken is given back.
    ///
    /// # Errors
    /// What a drain of the file failed with, if this descriptor was not told; nothing is given
    /// back.
    fn absorb(&self, write: &Write, data: &[u8], tier: TierIndex, taken: u64) -> io::Result<bool> {
        let file = &write.handle.file;
        let _world = self.world.read();
        let mut state = file.lock();
        if let Some(error) = write.handle.untold(&state) {
            return Err(error);
        }
        if state.alone || self.closing.load(Ordering::Relaxed) {
            self.scheduler().limits.give_back(tier, file.user, taken);
            self.below.settle(write.length);
            return Ok(false);
        }
        let start = start_of(write, file, &state)?;
        let range = start..end_of(write, &state, start)?;
        let durable = self.durable_tier(file, &state, &range, tier, taken);
        let tier = durable.unwrap_or(tier);
        if durable.is_none() || self.keep(file, &mut state, &range, data, tier).is_err() {
            drop(state);
            self.scheduler().limits.give_back(tier, file.user, taken);
            self.below.settle(write.length);
            return Ok(false);
        }
        if state.below.is_none() && write.handle.writes {
            state.below = Some(write.handle.below.clone());
        }
        self.written(file, &mut state, range, tier, taken);
        Ok(true)
    }

    /// Notes that a tier has the newest bytes of `range`; `taken` bytes of it were taken for them.
    pub(crate) fn written(
        &self,
        file: &CachedFile,
        state: &mut State,
        range: Range<u64>,
        tier: TierIndex,
        taken: u64,
    ) {
        let length = range.end - range.start;
        state.hot = Some((part_of(range.end.saturating_sub(1)).start, Instant::now()));
        self.copies_are_older(state, &range);
        let written = state.extents.write(range, tier);
        self.release(file, state, &written.superseded, &written.freed);
        state.written = Some(SystemTime::now());
        state.promised += length;
        self.scheduler().limits.give_back(tier, file.user, taken - written.taken);
        self.touched(file, state);
        Counters::add(&self.counters.absorbed, length);
    }

    /// Returns the tier for a write that was given `taken` bytes of `tier`.
    ///
    /// What a local disk has may have been promised to survive a reboot. Newer bytes join it there:
    /// elsewhere, they would take its place and be lost. `None` if that disk has no room.
    fn durable_tier(
        &self,
        file: &CachedFile,
        state: &State,
        range: &Range<u64>,
        tier: TierIndex,
        taken: u64,
    ) -> Option<TierIndex> {
        if self.tiers[tier].is_durable() || self.spec.fsync != Fsync::Nvme {
            return Some(tier);
        }
        let Some(disk) = state.extents.holder(range, |tier| self.tiers[tier].is_durable()) else {
            return Some(tier);
        };
        let mut scheduler = self.scheduler();
        let room = scheduler.limits.rooms()[disk];
        if room.used + taken > room.limit {
            return None;
        }
        scheduler.limits.give_back(tier, file.user, taken);
        scheduler.limits.hold(disk, file.user, taken);
        Some(disk)
    }

    /// Puts bytes into a tier's shadow, and then into its journal.
    pub(crate) fn keep(
        &self,
        file: &CachedFile,
        state: &mut State,
        range: &Range<u64>,
        data: &[u8],
        tier: TierIndex,
    ) -> io::Result<()> {
        let shadow = self.shadow(file, state, tier)?;
        let shadow = shadow.file().ok_or(io::ErrorKind::Unsupported)?;
        state.written_anew(range);
        shadow.write_all_at(data, range.start)?;
        self.note(tier, &Record::Write(file.number, range.start, range.end - range.start))?;
        self.is_mended(file, state, range);
        Ok(())
    }

    /// Tells the order of drains that a file was written.
    fn touched(&self, file: &CachedFile, state: &mut State) {
        let unwritten = state.extents.unwritten();
        if unwritten < state.promised {
            self.below.settle(state.promised - unwritten);
        }
        state.promised = unwritten;
        let mut scheduler = self.scheduler();
        scheduler.order.written(file.number, unwritten, self.now());
        scheduler.limits.note_parts(file.user, state.parts, state.extents.parts());
        state.parts = state.extents.parts();
        if state.writers == 0 {
            scheduler.order.closed(file.number);
        }
        let full = scheduler.limits.percent() >= 50;
        drop(scheduler);
        if full {
            self.work.notify_one();
        }
    }

    /// Writes to the file below, and forgets what tiers have of the same bytes.
    fn write_through(&self, write: &Write, data: &[u8]) -> io::Result<u32> {
        let file = &write.handle.file;
        // An appended write begins wherever the file ends by then.
        let range =
            if write.append { 0..u64::MAX } else { write.offset..write.offset + write.length };
        let alone = file.alone(range);
        let state = file.lock();
        if let Some(error) = write.handle.untold(&state) {
            return Err(error);
        }
        let start = start_of(write, file, &state)?;
        let below = match write.handle.writes {
            true => write.handle.below.clone(),
            false => state.below.clone().ok_or(io::ErrorKind::PermissionDenied)?,
        };
        let range = start..start.saturating_add(write.length);
        let durable = state.keeping != Keeping::Plain
            || self.partner.is_some()
            || state.extents.holder(&range, |tier| self.tiers[tier].is_durable()).is_some();
        drop(state);
        self.finish_cut(file, &below)?;
        let owner = backing::stat(&file.node)?;
        let written = Caller::run_as_owner(&owner, || write_some(&below, data, start))?;
        if durable {
            // What the tier has survives a reboot, or is to; so must what takes its place.
            self.sync_below(file, || below.sync_data())?;
        }
        let _world = self.world.read();
        let mut state = file.lock();
        let (parts, freed) = state.extents.forget(start..start + written as u64);
        self.is_mended(file, &mut state, &(start..start + written as u64));
        self.release(file, &state, &parts, &freed);
        self.partner_gives_up(file, &mut state, start..start + written as u64, u64::MAX);
        self.settle(file, &mut state);
        drop(state);
        drop(alone);
        Counters::add(&self.counters.through, written as u64);
        Ok(written as u32)
    }

    /// Reads what is there without waiting for the file system below. `None` if that must be asked.
    pub(crate) fn read_now(
        &self,
        handle: &Handle,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<Option<usize>> {
        let end = offset.saturating_add(buffer.len() as u64);
        let state = handle.file.lock();
        state.tell_broken(offset..end)?;
        let clean = state.extents.is_clean();
        let behind = |tier: TierIndex| self.tiers[tier].is_behind();
        if state.extents.holder(&(offset..end), behind).is_some() {
            // Its bus and its holder are not waited for here.
            return Ok(None);
        }
        drop(state);
        if !clean {
            let mut now = |part: &mut [u8], offset| read_cached(&handle.below, part, offset);
            return self.read_pieces(handle, offset, buffer, &mut now);
        }
        read_cached(&handle.below, buffer, offset)
    }

    /// Reads into `buffer`, and returns how much there was.
    pub(crate) fn read(
        &self,
        handle: &Handle,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        let mut below = |part: &mut [u8], offset| read_some(&handle.below, part, offset).map(Some);
        let read = self.read_pieces(handle, offset, buffer, &mut below)?;
        Ok(read.unwrap_or(0))
    }

    /// Reads what tiers have, and with `below` the rest. `None` if `below` has none.
    fn read_pieces(
        &self,
        handle: &Handle,
        offset: u64,
        buffer: &mut [u8],
        below: &mut ReadBelow<'_>,
    ) -> io::Result<Option<usize>> {
        let file = &handle.file;
        let (mut rest, mut behind) = (Vec::new(), Vec::new());
        let state = file.lock();
        let end = offset.saturating_add(buffer.len() as u64);
        state.tell_broken(offset..end)?;
        let end = file.size(&state)?.min(end);
        for piece in state.extents.pieces(offset..end.max(offset)) {
            let part = (piece.range.start - offset) as usize..(piece.range.end - offset) as usize;
            match piece.tier.and_then(|tier| state.shadows[tier].as_ref()) {
                Some(shadow @ Shadow::Device(_)) => {
                    behind.push((shadow.pin(&piece.range), piece.range.start, part));
                }
                // Under the lock, or it could be drained and be a hole.
                Some(Shadow::File(shadow)) => {
                    let got = read_some(shadow, &mut buffer[part.clone()], piece.range.start)?;
                    buffer[part][got..].fill(0);
                }
                None => rest.push(part),
            }
        }
        drop(state);
        for (shadow, at, part) in behind {
            shadow.read_exact_at(&mut buffer[part], at)?;
        }
        for range in rest {
            let at = offset + range.start as u64;
            let part = &mut buffer[range];
            let Some(got) = below(part, at)? else { return Ok(None) };
            // The file below may end before what the cache has.
            part[got..].fill(0);
        }
        Ok(Some(end.saturating_sub(offset) as usize))
    }
}

impl State {
    /// Notes that newer bytes of `range` come into a tier: what is put on a device just now may be
    /// older.
    pub(crate) fn written_anew(&mut self, range: &Range<u64>) {
        for (start, changed) in &mut self.moving {
            let part = part_of(*start);
            *changed |= range.start < part.end && part.start < range.end;
        }
    }
}

/// Returns where a write begins.
fn start_of(write: &Write, file: &CachedFile, state: &State) -> io::Result<u64> {
    if write.append { file.size(state) } else { Ok(write.offset) }
}

/// Returns where a write ends.
///
/// # Errors
/// If the file below cannot be as large: a drain would fail for ever.
fn end_of(write: &Write, state: &State, start: u64) -> io::Result<u64> {
    let end = start.checked_add(write.length).ok_or(Errno::FBIG)?;
    let below = if write.handle.writes { Some(&write.handle.below) } else { state.below.as_ref() };
    match below {
        Some(below) if !may_end_at(below, end) => Err(Errno::FBIG.into()),
        _ => Ok(end),
    }
}

/// Returns whether a file may be as long.
pub(crate) fn may_end_at(below: &File, end: u64) -> bool {
    // Nobody uses its position.
    end <= ANY_LARGE || rustix::fs::seek(below, SeekFrom::Start(end)) != Err(Errno::INVAL)
}

/// Reads what the kernel has in memory. `None` if it has not all that there is.
fn read_cached(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<Option<usize>> {
    let length = buffer.len();
    let mut slices = [io::IoSliceMut::new(buffer)];
    match rustix::io::preadv2(file, &mut slices, offset, ReadWriteFlags::NOWAIT) {
        Ok(read) if read == length => Ok(Some(read)),
        Ok(read) => {
            let ends = offset.saturating_add(read as u64) >= file.metadata()?.len();
            Ok(ends.then_some(read))
        }
        Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read_some(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes as much as goes; fails only if nothing went.
fn write_some(file: &File, data: &[u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < data.len() {
        match file.write_at(&data[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

impl Limits {
    /// Returns the bytes that all tiers hold.
    pub fn used(&self) -> u64 {
        self.rooms().iter().map(|room| room.used).sum()
    }
}
