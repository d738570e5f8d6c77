//! From host memory to a device behind it, and back.
//!
//! No lock is held while bytes cross the bus. What was put counts only if the part was not written
//! meanwhile, nor drained; what is in a place never changes as long as somebody refers to it.

use crate::control::{NAMED, Stuck};
use crate::device::{Device, Place};
use crate::engine::{Counters, Engine};
use crate::extents::{BLOCK, Flight, TierIndex};
use crate::faults::Point;
use crate::file::{CachedFile, State};
use crate::journal::Record;
use crate::ranges::RangeMap;
use crate::shadow::{Shadow, part_of};
use crate::spec::Medium;
use crate::tier::lock;
use kedge_holder::{PART, SLOTS};
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Threads that move, at least: one reads host memory while the other one's part is on the bus.
const MOVERS: usize = 2;
/// Nothing moves while host memory has less than one part in so many.
const SPARSE: u64 = 4;
/// The part that a file was written in last stays for so long, as more may come.
const COLD: Duration = Duration::from_secs(1);
/// So many files are looked at for a part that may move.
const LOOKED_AT: usize = 256;
/// How long a mover rests that has found nothing.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// How long one rests whose device has no memory.
const FULL: Duration = Duration::from_secs(1);

/// What is said of bytes that a device has lost.
pub(crate) const LOST: &str = "lost: the process that held them in a device's memory has ended";

/// Returns how many threads move. A core copies some 4 GB/s out of host memory and the bus carries
/// 50: half of the cores copy, and the others are the programs'. Half of the slots stay for reads
/// and drains.
pub(crate) fn movers() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(MOVERS, SLOTS as usize / 2)
}

/// What the last look at the device has found.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// Bytes that had moved there.
    moved: u64,
    /// Whether others need its memory, and drains hurry for them.
    hurries: bool,
}

/// What became of a try to move a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moved {
    /// It is where it was to be.
    Part,
    /// There was none, or it stays where it is.
    Nothing,
    /// There is no room for it.
    Full,
}

impl Engine {
    /// Returns the tier of a device's memory, and the device.
    pub(crate) fn device(&self) -> Option<(TierIndex, &Arc<Device>)> {
        let mut tiers = self.tiers.iter().enumerate();
        tiers.find_map(|(index, tier)| Some((index, tier.device.as_ref()?)))
    }

    /// Returns the tier in host memory that a device lies behind.
    pub(crate) fn memory(&self) -> Option<TierIndex> {
        self.tiers.iter().position(|tier| tier.medium == Medium::Ram)
    }

    /// Moves parts on as long as the engine runs: the work of a mover.
    pub(crate) fn move_forever(self: &Arc<Engine>) {
        let mut buffer = vec![0; PART as usize];
        while !self.scheduler().stopped {
            if self.device().is_some_and(|(_, device)| device.lack() > 0) {
                // Several would read the same part, and give back more than is needed.
                let given = self.giving.try_lock().map(|_turn| self.give_way());
                match given {
                    Ok(Ok(Moved::Part)) => {}
                    // What is drained meanwhile makes room in host memory.
                    Ok(Ok(_)) | Err(_) => thread::sleep(RETRY_INTERVAL),
                    Ok(Err(_)) => thread::sleep(FULL),
                }
                continue;
            }
            match self.move_one(&mut buffer) {
                Ok(Moved::Part) => self.serve_waiting(),
                Ok(Moved::Nothing) => thread::sleep(RETRY_INTERVAL),
                // What the holder failed with may be over then; that it is gone is seen elsewhere.
                Ok(Moved::Full) | Err(_) => thread::sleep(FULL),
            }
        }
    }

    /// Moves one part from host memory to the device, if one may move. `buffer` has room for it.
    pub(crate) fn move_one(&self, buffer: &mut [u8]) -> io::Result<Moved> {
        let Some((behind, device)) = self.device().filter(|(_, device)| !device.is_gone()) else {
            return Ok(Moved::Nothing);
        };
        let Some(memory) = self.memory() else { return Ok(Moved::Nothing) };
        let scheduler = self.scheduler();
        let room = scheduler.limits.rooms()[memory];
        if room.used < PART || room.used < room.limit / SPARSE {
            return Ok(Moved::Nothing);
        }
        let oldest = scheduler.order.oldest(LOOKED_AT, PART);
        drop(scheduler);
        for number in oldest {
            let file = lock(&self.files).by_number.get(&number).cloned();
            let Some(file) = file else { continue };
            let Some((start, shadow)) = begin(&file, memory) else { continue };
            let put = match device.take() {
                Some(place) => self.put(&shadow, start, place, buffer),
                None => Ok(None),
            };
            self.faults.hold(Point::Put);
            match self.moved(&file, start, put, memory, behind)? {
                Moved::Nothing => {}
                done => return Ok(done),
            }
        }
        Ok(Moved::Nothing)
    }

    /// Puts a part into a place. `None` if the device has no memory for it.
    fn put(
        &self,
        shadow: &Shadow,
        start: u64,
        place: Arc<Place>,
        buffer: &mut [u8],
    ) -> io::Result<Option<Arc<Place>>> {
        shadow.read_exact_at(buffer, start)?;
        Ok(place.put(buffer)?.then_some(place))
    }

    /// Has a part be where it was put, if it is still what it was.
    fn moved(
        &self,
        file: &CachedFile,
        start: u64,
        put: io::Result<Option<Arc<Place>>>,
        memory: TierIndex,
        behind: TierIndex,
    ) -> io::Result<Moved> {
        let part = part_of(start);
        let _world = self.world.read();
        let mut state = file.lock();
        let noted = state.moving.iter().position(|(moving, _)| *moving == start);
        let changed = noted.is_none_or(|at| state.moving.swap_remove(at).1);
        let unchanged = !changed
            && !state.stays
            && !state.orphan
            && state.extents.is_dirty_in(&part, memory)
            && !state.extents.is_in_flight(part.clone());
        let Some(place) = put? else { return Ok(Moved::Full) };
        if !unchanged {
            return Ok(Moved::Nothing);
        }
        let shadow = self.shadow(file, &mut state, behind)?;
        self.note(behind, &Record::Place(file.number, start, PART, place.number))?;
        shadow.place(start, place);
        self.faults.hold(Point::Placed);
        let written = state.extents.write(part, behind);
        self.scheduler().limits.hold(behind, file.user, written.taken);
        self.release(file, &state, &written.superseded, &written.freed);
        Counters::add(&self.counters.moved, PART);
        Ok(Moved::Part)
    }

    /// Has nothing of a file be on a device alone until all of it is below: what is dirty now is
    /// about to be acknowledged in memory.
    ///
    /// # Errors
    /// If the device does not give it back, or host memory has no room and it cannot be drained.
    pub(crate) fn stay_in_memory(self: &Arc<Engine>, file: &Arc<CachedFile>) -> io::Result<()> {
        let (Some((behind, _)), Some(memory)) = (self.device(), self.memory()) else {
            return Ok(());
        };
        let mut state = file.lock();
        state.stays = !state.extents.is_clean();
        drop(state);
        loop {
            if !self.bring_back(file, memory)? {
                return self.drain_file(file);
            }
            let mut state = file.lock();
            // What cannot get below is on the device again.
            while state.extents.is_in_flight_from(behind) {
                state = file.wait(state);
            }
            if !state.extents.dirty().any(|(_, tier)| tier == behind) {
                return Ok(());
            }
        }
    }

    /// Gives the device memory back that other programs need: what nothing is in, and else a part
    /// of the file that is dirty for the longest, which moves back to host memory.
    ///
    /// # Errors
    /// If the device does not give it back.
    pub(crate) fn give_way(&self) -> io::Result<Moved> {
        let (Some((behind, device)), Some(memory)) = (self.device(), self.memory()) else {
            return Ok(Moved::Nothing);
        };
        device.give_back_free();
        if device.lack() == 0
            || device.is_gone()
            || self.scheduler().limits.rooms()[behind].used == 0
        {
            return Ok(Moved::Nothing);
        }
        let files = self.scheduler().order.files();
        for number in files {
            let file = lock(&self.files).by_number.get(&number).cloned();
            let Some(file) = file else { continue };
            match self.bring_part_back(&file, memory)? {
                Moved::Nothing => {}
                done => {
                    device.give_back_free();
                    return Ok(done);
                }
            }
        }
        Ok(Moved::Nothing)
    }

    /// Moves what the device has of a file to another tier. `false` if that has no room.
    ///
    /// # Errors
    /// If the device does not give it back.
    pub(crate) fn bring_back(&self, file: &CachedFile, to: TierIndex) -> io::Result<bool> {
        loop {
            match self.bring_part_back(file, to)? {
                Moved::Part => {}
                Moved::Nothing => return Ok(true),
                Moved::Full => return Ok(false),
            }
        }
    }

    /// The same of the first part of the file that the device has.
    fn bring_part_back(&self, file: &CachedFile, to: TierIndex) -> io::Result<Moved> {
        let Some((behind, _)) = self.device() else { return Ok(Moved::Nothing) };
        let mut buffer = Vec::new();
        loop {
            let state = file.lock();
            let Some((part, shadow)) = first_behind(&state.extents, &state.shadows, behind) else {
                return Ok(Moved::Nothing);
            };
            drop(state);
            let has_room = |length: u64| {
                let room = self.scheduler().limits.rooms()[to];
                room.used + length + 2 * BLOCK <= room.limit
            };
            if !has_room(part.end - part.start) {
                return Ok(Moved::Full);
            }
            buffer.resize((part.end - part.start) as usize, 0);
            shadow.read_exact_at(&mut buffer, part.start)?;
            self.faults.hold(Point::Back);
            let _world = self.world.read();
            let mut state = file.lock();
            let same = |now: &Shadow| {
                let start = part_of(part.start).start;
                let places = (now.place_of(start), shadow.place_of(start));
                matches!(places, (Some(now), Some(read)) if Arc::ptr_eq(&now, &read))
            };
            if !state.shadows[behind].as_ref().is_some_and(same)
                || !state.extents.is_dirty_in(&part, behind)
            {
                // It was written, drained or forgotten meanwhile.
                continue;
            }
            // Others may have taken it meanwhile.
            if !has_room(buffer.len() as u64)
                || self.keep(file, &mut state, &part, &buffer, to).is_err()
            {
                return Ok(Moved::Full);
            }
            let written = state.extents.write(part, to);
            self.scheduler().limits.hold(to, file.user, written.taken);
            self.release(file, &state, &written.superseded, &written.freed);
            Counters::add(&self.counters.back, buffer.len() as u64);
            return Ok(Moved::Part);
        }
    }

    /// Looks after the device: gives memory back that nothing is in, and sees whether its holder is
    /// there.
    pub(crate) fn watch_device(self: &Arc<Engine>, before: &mut Watched) {
        let Some((behind, device)) = self.device() else { return };
        device.take_late();
        let moved = self.counters.moved.load(std::sync::atomic::Ordering::Relaxed);
        self.scheduler().limits.note_moves(moved != std::mem::replace(&mut before.moved, moved));
        if device.is_gone() {
            self.lose_device(behind);
        } else {
            device.give_back_idle();
            device.look();
            let mut scheduler = self.scheduler();
            let used = scheduler.limits.rooms()[behind].used;
            scheduler.limits.set_limit(behind, device.most_bytes(used));
        }
        // What is below needs no room in host memory.
        let hurries = device.lack() > 0 && !device.is_gone();
        if hurries != std::mem::replace(&mut before.hurries, hurries) {
            self.scheduler().order.set_urgent(hurries);
        }
    }

    /// Names what a device had whose holder is gone, and goes on without it.
    pub(crate) fn lose_device(self: &Arc<Engine>, behind: TierIndex) {
        self.scheduler().limits.set_limit(behind, 0);
        let files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        for file in files {
            let _world = self.world.read();
            let mut state = file.lock();
            let (parts, freed) = state.extents.forget_tier(behind);
            if parts.is_empty() {
                continue;
            }
            let mut broken = RangeMap::default();
            for Flight { range, .. } in &parts {
                broken.insert(range.clone(), ());
                state.broken.insert(range.clone(), ());
            }
            // Before the records that free: a later daemon finds one or the other.
            let noted = self.note_lost(&file, &mut state).is_ok();
            self.release(&file, &state, if noted { &parts } else { &[] }, &freed);
            self.settle(&file, &mut state);
            tell(&self.note_broken(&state.path, broken.total()));
            drop(state);
            file.notify();
        }
        self.serve_waiting();
    }

    /// Has the journal in host memory say what a device has lost of a file, for a later daemon.
    ///
    /// # Errors
    /// If the journal cannot be written.
    fn note_lost(&self, file: &CachedFile, state: &mut State) -> io::Result<()> {
        let Some(memory) = self.memory().filter(|_| !state.orphan) else { return Ok(()) };
        self.shadow(file, state, memory)?;
        for (Range { start, end }, ()) in state.broken.iter() {
            self.note(memory, &Record::Lost(file.number, start, end - start))?;
        }
        Ok(())
    }

    /// Notes that what was lost of `range` was written again, is no part of the file any more, or
    /// was told.
    pub(crate) fn is_mended(&self, file: &CachedFile, state: &mut State, range: &Range<u64>) {
        if state.broken.is_empty() {
            return;
        }
        let mended = state.broken.remove(range.clone());
        let Some(memory) = self.memory().filter(|memory| state.shadows[*memory].is_some()) else {
            return;
        };
        for (Range { start, end }, ()) in mended {
            self.note_freed(memory, &Record::Told(file.number, start, end - start));
        }
    }

    /// Checks that no bytes of a file were lost with a device, and reports a loss once.
    ///
    /// # Errors
    /// EIO if some were lost, and no fsync has reported it.
    pub(crate) fn tell_broken_once(&self, file: &CachedFile) -> io::Result<()> {
        let _world = self.world.read();
        let mut state = file.lock();
        state
            .tell_broken(0..u64::MAX)
            .inspect_err(|_| self.is_mended(file, &mut state, &(0..u64::MAX)))
    }

    /// Notes that a device has lost bytes of a file.
    pub(crate) fn note_broken(&self, path: &[u8], bytes: u64) -> Stuck {
        let path = String::from_utf8_lossy(path).into_owned();
        let stuck = Stuck { path, bytes, why: LOST.to_owned() };
        let mut broken = lock(&self.broken);
        broken.files += 1;
        if broken.named.len() < NAMED {
            broken.named.push(stuck.clone());
        }
        stuck
    }

    /// Ends the holder of the device's memory, which has nothing that is needed.
    pub(crate) fn end_holder(&self) {
        if let Some((_, device)) = self.device() {
            device.end();
        }
    }
}

/// Says in the daemon's log what is lost.
pub(crate) fn tell(Stuck { path, bytes, why }: &Stuck) {
    let _ = writeln!(io::stderr(), "kedge: {bytes} bytes of {path:?} are {why}");
}

/// Picks a part of a file that may move, and notes that it does: of those that nobody writes just
/// now, the last, as drains begin at the first.
fn begin(file: &CachedFile, memory: TierIndex) -> Option<(u64, Shadow)> {
    let mut state = file.lock();
    if state.stays || state.orphan || state.alone || state.trouble.is_some() {
        return None;
    }
    let hot = state.hot.filter(|(_, since)| state.writers > 0 && since.elapsed() < COLD);
    let hot = hot.map(|(start, _)| start);
    let moves = |start: u64| state.moving.iter().any(|(moving, _)| *moving == start);
    let cold = |start: u64| !moves(start) && Some(start) != hot;
    let start = state.extents.last_whole_part(memory, PART, cold)?;
    let shadow = state.shadows[memory].clone()?;
    state.moving.push((start, false));
    Some((start, shadow))
}

/// Returns the first part of a file that is dirty on a device, and what it is read from.
fn first_behind(
    extents: &crate::extents::Extents,
    shadows: &[Option<Shadow>],
    behind: TierIndex,
) -> Option<(Range<u64>, Shadow)> {
    let (range, _) = extents.dirty().find(|(_, tier)| *tier == behind)?;
    let part = range.start..range.end.min(part_of(range.start).end);
    let shadow = shadows[behind].as_ref()?.pin(&part);
    Some((part, shadow))
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
