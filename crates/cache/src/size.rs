//! A file's size and holes: truncate, fallocate, and lseek to data and holes.

use crate::backing;
use crate::caller::Caller;
use crate::engine::Engine;
use crate::extents::{Flight, Freed};
use crate::file::{CachedFile, Handle};
use crate::journal::Record;
use crate::nodes::Node;
use crate::ranges::RangeMap;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

impl Engine {
    /// Ends what a node stands for at `size`; `handle` has it open, if that is known.
    pub(crate) fn resize(
        self: &Arc<Engine>,
        caller: Caller,
        node: &Node,
        size: u64,
        handle: Option<Arc<Handle>>,
    ) -> io::Result<()> {
        let file = self.file(&node.fd)?;
        let result = match handle {
            Some(handle) => self.truncate(&file, caller, &handle.below, size),
            None => caller
                .run(|| backing::reopen(&node.fd, OFlags::WRONLY))
                .and_then(|below| self.truncate(&file, caller, &below, size)),
        };
        self.let_go(&file);
        self.serve_waiting();
        result
    }

    /// Ends a file at `size`, here and, with the caller's rights, below.
    pub(crate) fn truncate(
        &self,
        file: &Arc<CachedFile>,
        caller: Caller,
        below: &File,
        size: u64,
    ) -> io::Result<()> {
        // A part on its way below would make the file longer again.
        let alone = file.alone(0..u64::MAX);
        caller.run(|| Ok(rustix::fs::ftruncate(below, size)?))?;
        let durable = |tier: usize| self.tiers[tier].is_durable();
        let mut cut = self.finish_cut(file, below);
        if file.lock().extents.holder(&(size..u64::MAX), durable).is_some() {
            // The file may only be as long as it was because of what a local disk has, and forgets.
            cut = cut.and_then(|()| self.sync_below(file, || below.sync_data()));
        }
        self.forget_rest(file, size, cut.is_ok())?;
        drop(alone);
        cut
    }

    /// Forgets what is held of a file from `size` on. Local disks forget it, too, if the one below
    /// knows that it is `cut`.
    fn forget_rest(&self, file: &CachedFile, size: u64, cut: bool) -> io::Result<()> {
        let stays = |tier: usize| !cut && self.tiers[tier].is_durable();
        let _world = self.world.read();
        let mut state = file.lock();
        let (parts, freed) = state.extents.forget(size..u64::MAX);
        self.is_mended(file, &mut state, &(size..u64::MAX));
        let (lasting, parts): (Vec<Flight>, Vec<Flight>) =
            parts.into_iter().partition(|part| stays(part.tier));
        let record = Record::Cut(file.number, size);
        for tier in (0..self.tiers.len()).filter(|tier| !self.tiers[*tier].is_behind()) {
            if parts.iter().any(|part| part.tier == tier) {
                self.note_freed(tier, &record);
            }
        }
        // After a power cut, the file below may be as long as it was: a disk still has the rest.
        for part in lasting {
            state.uncut.insert(part.range, part.tier);
        }
        // A place may be another file's once the journal says that this one has nothing there.
        let behind = |part: &Flight| self.tiers[part.tier].is_behind();
        let parts: Vec<Flight> = parts.into_iter().filter(behind).collect();
        let (lasting, freed): (Vec<Freed>, Vec<Freed>) =
            freed.into_iter().partition(|blocks| stays(blocks.tier));
        for blocks in lasting {
            let length = blocks.range.end - blocks.range.start;
            self.scheduler().limits.give_back(blocks.tier, file.user, length);
        }
        // A disk must know where the file ends before the rest is holes.
        self.release(file, &state, &parts, &freed);
        self.partner_gives_up(file, &mut state, size..u64::MAX, u64::MAX);
        for tier in self.tiers.iter().filter(|tier| tier.is_durable()) {
            tier.sync_cleans()?;
        }
        state.written = state.written.filter(|_| !state.extents.is_clean());
        self.settle(file, &mut state);
        Ok(())
    }

    /// Has the disk below know where a file ends that was cut when it could not be told, and then
    /// what local disks have of the rest: newer bytes there must not be followed by those.
    ///
    /// # Errors
    /// If the disk below cannot be told; local disks keep the rest then, as long as the file is
    /// open or not all below.
    pub(crate) fn finish_cut(&self, file: &CachedFile, below: &File) -> io::Result<()> {
        if file.lock().uncut.is_empty() {
            return Ok(());
        }
        self.sync_below(file, || below.sync_data())?;
        let _world = self.world.read();
        let mut state = file.lock();
        let uncut = std::mem::take(&mut state.uncut);
        for (range, tier) in uncut.iter() {
            // What was written since stays.
            let mut rest = RangeMap::default();
            rest.insert(range, ());
            for newer in state.extents.needed_of(tier) {
                rest.remove(newer);
            }
            for (Range { start, end }, ()) in rest.iter() {
                self.note_freed(tier, &Record::Clean(file.number, start, end - start));
            }
        }
        Ok(())
    }

    /// Forgets a file that no name leads to and nobody has open.
    pub(crate) fn discard(self: &Arc<Engine>, file: &CachedFile) {
        if self.forget_name(file).is_err() {
            // It is drained then, and is what it was if its name comes back.
            return;
        }
        file.at_rest(&self.world, 0..u64::MAX, |state| {
            // It may have been opened anew by way of /proc; its last close comes here again.
            if file.is_open() {
                return;
            }
            let (parts, freed): (Vec<Flight>, Vec<Freed>) = state.extents.forget(0..u64::MAX);
            self.is_mended(file, state, &(0..u64::MAX));
            self.release(file, state, &parts, &freed);
            self.settle(file, state);
        });
        self.forget_if_done(file);
        self.serve_waiting();
    }

    /// Has the disk below know that a file's last name is gone, and then what a local disk has.
    fn forget_name(&self, file: &CachedFile) -> io::Result<()> {
        let Some(folder) = file.lock().gone_from.clone() else { return Ok(()) };
        self.below.sync(&folder)?;
        let _world = self.world.read();
        let mut state = file.lock();
        state.gone_from = None;
        for tier in (0..self.tiers.len()).filter(|tier| state.shadows[*tier].is_some()) {
            self.note_freed(tier, &Record::Drop(file.number));
        }
        Ok(())
    }

    /// Reserves space, or makes holes, with the caller's rights.
    pub(crate) fn allocate(
        self: &Arc<Engine>,
        file: &Arc<CachedFile>,
        caller: Caller,
        below: &File,
        mode: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let work = || Ok(rustix::fs::fallocate(below, mode, offset, length)?);
        if (mode - FallocateFlags::KEEP_SIZE).is_empty() {
            return caller.run(work);
        }
        // Whatever else it does to the bytes, it does it to those below.
        loop {
            self.drain_file(file)?;
            let alone = file.alone(0..u64::MAX);
            if file.lock().extents.is_clean() {
                return caller.run(work);
            }
            drop(alone);
        }
    }

    /// Finds the next data, or hole, at or after `offset`.
    pub(crate) fn seek(
        &self,
        file: &CachedFile,
        below: &File,
        offset: u64,
        data: bool,
    ) -> io::Result<u64> {
        let (size, dirty) = {
            let state = file.lock();
            let size = file.size(&state)?;
            if offset >= size {
                return Err(rustix::io::Errno::NXIO.into());
            }
            (size, state.extents.unwritten_within(offset..size))
        };
        // The file system below may take long.
        if data {
            let first = dirty.first().map(|range| range.start);
            let there = match rustix::fs::seek(below, SeekFrom::Data(offset)) {
                Ok(at) => Some(at),
                Err(rustix::io::Errno::NXIO) => None,
                Err(error) => return Err(error.into()),
            };
            return there.into_iter().chain(first).min().ok_or(rustix::io::Errno::NXIO.into());
        }
        let mut dirty = dirty.into_iter().peekable();
        let mut at = offset;
        loop {
            // In order, and none is looked at twice.
            while let Some(range) = dirty.next_if(|range| range.start <= at) {
                at = at.max(range.end);
            }
            let hole = match rustix::fs::seek(below, SeekFrom::Hole(at)) {
                Ok(hole) => hole,
                // The file below ends before.
                Err(rustix::io::Errno::NXIO) => at,
                Err(error) => return Err(error.into()),
            };
            if hole == at || hole >= size {
                return Ok(at.max(hole).min(size));
            }
            // What is held may begin before that hole and reach over it.
            while let Some(range) = dirty.next_if(|range| range.start <= hole) {
                at = at.max(range.end);
            }
            at = at.max(hole);
        }
    }
}

#[cfg(test)]
#[path = "size_tests.rs"]
mod tests;
