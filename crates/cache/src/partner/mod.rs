//! Another node has what an fsync acknowledges: the cache's end of it.
//!
//! What is not below is sent at an fsync, and counts once the partner's disk has it. What is below
//! since is given up there. Without a connection, fsync drains.

mod account;
pub(crate) mod home;
pub(crate) mod host;
mod link;
mod session;
#[cfg(test)]
mod tests;
mod turns;
pub(crate) mod wire;

pub use host::{Partner, PartnerSpec, say};
pub(crate) use link::Link;
pub use wire::check_bytes;

use crate::CacheError;
use crate::adopt;
use crate::backing;
use crate::control::Stuck;
use crate::engine::Engine;
use crate::file::{CachedFile, Copied, State};
use crate::journal::Record;
use crate::ranges::RangeMap;
use crate::spec::Spec;
use crate::tier::lock;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use wire::{PART, Said};

/// How often the partner is told that the cache is there, and a lost one is tried again.
const BEAT: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_secs(2);
/// How long after its last word a partner's copies are surely seen to be older than a change below:
/// what a recovery there allows for, and by how much clocks may differ.
const UNTOLD: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 16 });

/// How a partner stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartnerStatus {
    /// Where it listens.
    pub address: String,
    /// Whether it is connected: fsync drains otherwise.
    pub connected: bool,
    /// Bytes that are not below and that it has.
    pub holds: u64,
    /// Bytes that were sent, since the daemon started.
    pub sent: u64,
    /// Fsyncs that drained because it could not have the data.
    pub drained: u64,
    /// Why it is not connected, or what failed last.
    pub why: Option<String>,
}

/// Has the partner of a cache that was recovered here give up what it keeps.
///
/// # Errors
/// What it may keep, and why.
pub(crate) fn forget(spec: &Spec) -> Result<(), String> {
    let Some(address) = &spec.partner else { return Ok(()) };
    Link::new(spec, address).map_err(|error| error.to_string())?.end()
}

impl Engine {
    /// Connects the partner, which may be told of files that are known by now.
    ///
    /// # Errors
    /// It cannot be reached, or refuses.
    pub(crate) fn begin_partner(self: &Arc<Engine>) -> Result<(), CacheError> {
        let Some(link) = &self.partner else { return Ok(()) };
        let failed =
            |error| CacheError::Tier(format!("the partner {}: {error}", link.address.socket()));
        // What an earlier daemon held may be newer than what the partner has, in parts that this
        // one cannot tell: with all of it below, nothing there is needed. Until then the partner
        // is to hear nothing, or a recovery there would take what it has for the newest.
        let mut stuck = adopt::drain(self).stuck;
        // What is not below at all, a recovery at the partner does not find there either.
        let gone = |one: &Stuck| {
            let gone = self.unclaimed.iter().filter(|lost| lost.lost.gone);
            gone.map(|lost| self.unclaimed_file(lost)).any(|lost| lost == *one)
        };
        stuck.retain(|one| !gone(one));
        if let Some(Stuck { path, why, .. }) = stuck.first() {
            return Err(CacheError::Tier(format!(
                "what an earlier daemon held is to be below before a partner is used, and cannot \
                 be written there: {path}: {why}; see to that, or give it up by `kedge cache \
                 recover --discard=all`"
            )));
        }
        self.connect_partner(link).map_err(failed)
    }

    /// Connects, while nothing is connected.
    fn connect_partner(&self, link: &Link) -> io::Result<()> {
        // Without the lock: nothing is sent meanwhile, and an fsync does not wait for it.
        let _connecting = lock(&link.connecting);
        let ends = || io::Error::other("the cache ends");
        if self.scheduler().stopped {
            return Err(ends());
        }
        let (open, mut held) = link.begin(self.faults.partner)?;
        let line = open.connection.stream().try_clone()?;
        let mut wire = link.wire.wait();
        if self.scheduler().stopped {
            return Err(ends());
        }
        link.keep_line(line);
        *lock(&link.heard) = open.heard;
        *wire = Some(open);
        {
            let mut notes = lock(&link.notes);
            notes.waiting.clear();
            notes.told = notes.noted;
            // Nobody takes it for told in between.
            notes.noted += 1;
        }
        // From now on, what is drained is noted.
        link.connected.store(true, Ordering::SeqCst);
        let known: Vec<Arc<CachedFile>> = lock(&self.files).by_number.values().cloned().collect();
        for file in known {
            let mut state = file.lock();
            let there = held.remove(&file.number).unwrap_or_default();
            // It may be of one that was forgotten, and that the partner is to forget.
            state.at_partner |= !there.is_empty();
            state.lapses += 1;
            if state.orphan {
                // No name leads to it: nothing of it can be recovered.
                self.partner_forgets(&file, &mut state);
                continue;
            }
            if !there.is_empty() {
                // Its name or owner may have changed meanwhile.
                link.note(Record::File(file.number, crate::engine::identity(&file, &state)));
            }
            let known = std::mem::take(&mut state.copied);
            for (range, ()) in there.iter() {
                let mut below = RangeMap::default();
                below.insert(range.clone(), ());
                for part in state.extents.unwritten_within(range) {
                    // What it had and newer bytes have taken the place of below is no use.
                    for (part, copied) in known.within(part) {
                        below.remove(part.clone());
                        // It may be older than what is here.
                        let sent = copied.sent;
                        state.copied.insert(part, Copied { newest: false, sent });
                    }
                }
                for (Range { start, end }, ()) in below.iter() {
                    link.note(Record::Clean(file.number, start, end - start));
                }
            }
        }
        // Those of which this cache knows nothing are below, unless nobody has found them yet.
        let unclaimed = |file: &u64| self.unclaimed.iter().any(|lost| lost.held.file == *file);
        for file in held.into_keys().filter(|file| !unclaimed(file)) {
            // It may have been opened, and be known, since.
            if !lock(&self.files).by_number.contains_key(&file) {
                link.note(Record::Drop(file));
            }
        }
        *lock(&link.why) = None;
        Ok(())
    }

    /// Keeps the partner told as long as the engine runs, and connects it anew where it is lost.
    pub(crate) fn tell_partner_forever(&self) {
        let Some(link) = &self.partner else { return };
        let mut again = Instant::now();
        let mut beat = Instant::now();
        while !self.scheduler().stopped {
            thread::sleep(Duration::from_millis(50));
            if beat.elapsed() < BEAT {
                continue;
            }
            beat = Instant::now();
            let mut wire = link.wire.wait();
            if self.scheduler().stopped {
                return;
            }
            if link.is_connected() && wire.is_some() {
                let until = Instant::now() + link.answer;
                let _ = link.with(&mut wire, until, |wire| wire.ask(&Said::Beat));
            } else if Instant::now() >= again {
                *wire = None;
                drop(wire);
                if let Err(error) = self.connect_partner(link) {
                    link.lose(&mut link.wire.wait(), &error);
                } else {
                    let at = link.address.socket();
                    let _ = writeln!(io::stderr(), "kedge: the partner {at} is there again");
                }
                again = Instant::now() + AGAIN;
            }
        }
    }

    /// Has the partner have all of a file that is not below. `false` if it cannot.
    pub(crate) fn copy_to_partner(
        &self,
        file: &CachedFile,
        opened: &Arc<File>,
        told: &dyn Fn(io::Result<()>) -> io::Result<()>,
    ) -> io::Result<bool> {
        let Some(link) = &self.partner else { return Ok(false) };
        if !self.send_all(link, file)? {
            link.drained.fetch_add(1, Ordering::Relaxed);
            return Ok(false);
        }
        // What has landed since, or went below at once, is on no disk until that is synced.
        let opened = file.lock().below.clone().unwrap_or_else(|| opened.clone());
        self.finish_cut(file, &opened)?;
        for tier in &self.tiers {
            tier.sync_cleans()?;
        }
        // When it was changed is what a recovery there goes by, as long as it may know less.
        let sync = || if link.is_behind() { opened.sync_all() } else { opened.sync_data() };
        told(self.sync_below(file, sync))?;
        Ok(true)
    }

    fn send_all(&self, link: &Link, file: &CachedFile) -> io::Result<bool> {
        let mut missing = RangeMap::default();
        let lapses = {
            let state = file.lock();
            if state.extents.is_clean() {
                drop(state);
                self.settle_partner(file)?;
                return Ok(true);
            }
            for range in state.extents.unwritten_within(0..u64::MAX) {
                missing.insert(range, ());
            }
            for (range, _) in state.copied.iter().filter(|(_, copied)| copied.newest) {
                missing.remove(range);
            }
            state.lapses
        };
        let mut buffer = Vec::new();
        let until = link.patience(missing.total());
        for (range, ()) in missing.iter() {
            let mut from = range.start;
            while from < range.end {
                let part = from..range.end.min(from + PART);
                from = part.end;
                if !self.send(link, file, part, &mut buffer, until)? {
                    return Ok(false);
                }
            }
        }
        let mut wire = link.turn(until);
        let synced = wire.as_mut().and_then(|wire| {
            link.with(wire, until, |wire| {
                let done = wire.ask(&Said::Sync(file.number))?;
                wire.say(&Said::Heard).map(|()| done)
            })
        });
        // Others who wait for the same bytes find it before they ask.
        let mut state = file.lock();
        if let Some(Ok(())) = synced {
            // In between, some of it may have been lost on its way.
            return Ok(state.lapses == lapses);
        }
        if let Some(Err(why)) = synced {
            *lock(&link.why) = Some(why);
        }
        // Nobody knows how much of it has got there.
        state.lapses += 1;
        self.copies_are_older(&mut state, &(0..u64::MAX));
        Ok(false)
    }

    /// Sends what of a part is not below. `false` if it cannot be, until a moment.
    fn send(
        &self,
        link: &Link,
        file: &CachedFile,
        part: Range<u64>,
        buffer: &mut Vec<u8>,
        until: Instant,
    ) -> io::Result<bool> {
        if !link.is_connected() {
            return Ok(false);
        }
        let Some(mut wire) = link.turn(until) else { return Ok(false) };
        let mut state = file.lock();
        // Of a file that no name leads to, nothing can be recovered.
        if state.orphan || state.path.is_empty() {
            return Ok(false);
        }
        buffer.resize((part.end - part.start) as usize, 0);
        let (mut pieces, mut behind) = (Vec::new(), Vec::new());
        for piece in state.extents.pieces(part.clone()) {
            let Some(shadow) = piece.tier.and_then(|tier| state.shadows[tier].clone()) else {
                continue;
            };
            let place =
                (piece.range.start - part.start) as usize..(piece.range.end - part.start) as usize;
            match shadow.file() {
                // Under the lock, or it could be drained and be a hole.
                Some(_) => shadow.read_exact_at(&mut buffer[place], piece.range.start)?,
                None => behind.push((shadow.pin(&piece.range), piece.range.start, place)),
            }
            pieces.push(piece.range);
        }
        link.note(Record::File(file.number, crate::engine::identity(file, &state)));
        state.at_partner = true;
        state.sends += 1;
        let copied = Copied { newest: true, sent: state.sends };
        for range in &pieces {
            state.copied.insert(range.clone(), copied);
        }
        // What is noted from now on comes after this part.
        let notes = link.take_notes();
        drop(state);
        for (shadow, at, place) in behind {
            // What was noted cannot be told any more, and counts as sent.
            let read = shadow.read_exact_at(&mut buffer[place], at);
            read.inspect_err(|error| link.lose(&mut wire, error))?;
        }
        let sent = link.with_notes(&mut wire, until, notes, |wire| {
            for range in &pieces {
                let place = (range.start - part.start) as usize..(range.end - part.start) as usize;
                wire.count()?;
                let data = &buffer[place];
                wire::write_data(&mut wire.connection, file.number, range.start, data)?;
                link.sent.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(sent.is_some())
    }

    /// Has a recovery at the partner know that what it has of a file, which is all below, is older:
    /// by telling the partner, or where that is not there, by when the file was changed below.
    pub(crate) fn settle_partner(&self, file: &CachedFile) -> io::Result<()> {
        // Not locked meanwhile: the wire comes before files.
        let at_partner = file.lock().at_partner;
        if at_partner { self.settle_node(&file.node) } else { Ok(()) }
    }

    /// The same for a file that nobody may know, if the partner may not have been told of it.
    pub(crate) fn settle_unknown(&self, node: &OwnedFd) -> io::Result<()> {
        match self.partner.as_ref().is_some_and(Link::is_behind) {
            true => self.settle_node(node),
            false => Ok(()),
        }
    }

    fn settle_node(&self, node: &OwnedFd) -> io::Result<()> {
        let Some(link) = &self.partner else { return Ok(()) };
        loop {
            let untold = || lock(&link.heard).is_none_or(|heard| heard.elapsed() > UNTOLD);
            if !link.is_connected() && untold() {
                // A later session tells all that was noted before it counts.
                return backing::touch(node);
            }
            if let Some(Ok(())) = link.tell_noted() {
                return Ok(());
            }
            if untold() {
                return backing::touch(node);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Notes that bytes of a file were written anew here.
    pub(crate) fn copies_are_older(&self, state: &mut State, range: &Range<u64>) {
        let older: Vec<_> = state.copied.within(range.clone()).collect();
        for (range, copied) in older {
            state.copied.insert(range, Copied { newest: false, ..copied });
        }
    }

    /// Has the partner give up what is below now of `range`, or is no part of the file any more.
    /// What was sent after the first `sent` parts stays where something of it is not below.
    pub(crate) fn partner_gives_up(
        &self,
        file: &CachedFile,
        state: &mut State,
        range: Range<u64>,
        sent: u64,
    ) {
        let Some(link) = self.partner.as_ref().filter(|_| state.at_partner) else { return };
        let mut gone = RangeMap::default();
        gone.insert(range.clone(), ());
        for part in state.extents.unwritten_within(range) {
            for (later, _) in state.copied.within(part).filter(|(_, copied)| copied.sent > sent) {
                gone.remove(later);
            }
        }
        for (Range { start, end }, ()) in gone.iter() {
            if !state.copied.remove(start..end).is_empty() {
                link.note(Record::Clean(file.number, start, end - start));
            }
        }
    }

    /// Has the partner forget a file.
    pub(crate) fn partner_forgets(&self, file: &CachedFile, state: &mut State) {
        let Some(link) = self.partner.as_ref().filter(|_| state.at_partner) else { return };
        state.at_partner = false;
        state.copied = RangeMap::default();
        link.note(Record::Drop(file.number));
    }

    /// Tells the partner the name that a file has now.
    pub(crate) fn tell_partner_identity(&self, file: &CachedFile, state: &State) {
        if let Some(link) = self.partner.as_ref().filter(|_| state.at_partner) {
            link.note(Record::File(file.number, crate::engine::identity(file, state)));
        }
    }

    /// Has the partner know by now what it is to be told, if it is there.
    pub(crate) fn tell_partner(&self) {
        let Some(link) = self.partner.as_ref().filter(|link| link.is_connected()) else { return };
        if link.is_behind() {
            let _ = link.beat();
        }
    }

    /// Returns how the partner stands.
    pub(crate) fn partner_status(&self) -> Option<PartnerStatus> {
        let link = self.partner.as_ref()?;
        let files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        Some(PartnerStatus {
            address: link.address.socket(),
            connected: link.is_connected(),
            holds: files.iter().map(|file| file.lock().copied.total()).sum(),
            sent: link.sent.load(Ordering::Relaxed),
            drained: link.drained.load(Ordering::Relaxed),
            why: lock(&link.why).clone(),
        })
    }

    /// Ends with the partner: all is below.
    ///
    /// # Errors
    /// What it may keep, and why.
    pub(crate) fn end_partner(&self) -> Result<(), String> {
        self.partner.as_ref().map_or(Ok(()), Link::end)
    }
}

/// Returns whether `folder` of a partner has what a cache of `under` held.
pub(crate) fn has_home(folder: &Path, under: &Path) -> bool {
    home::holds(folder, under)
}
