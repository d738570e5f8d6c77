//! The cache at work, without the mount: files, tiers, and what is known of all of them.

use crate::admission::{Limits, Waiting};
use crate::backing::{self, BackingFolder};
use crate::control::Stuck;
use crate::copies::Copies;
use crate::extents::{Flight, Freed, TierIndex};
use crate::faults::{Faults, Point};
use crate::file::{CachedFile, Key, State};
use crate::journal::{Held, Identity, Places, Record};
use crate::lease::Leases;
use crate::order::{Millis, Order, Pace};
use crate::partner::Link;
use crate::pool::Pool;
use crate::ranges::RangeMap;
use crate::shadow::{Shadow, part_of};
use crate::spec::Spec;
use crate::tier::{Tier, lock};
use crate::write::Waiter;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::time::Instant;

/// Length of a journal, in bytes, from which on it is rewritten.
const REWRITE_THRESHOLD: u64 = 8 << 20;

/// The files that are open or not all below.
#[derive(Debug, Default)]
pub(crate) struct Files {
    pub(crate) by_key: HashMap<Key, Arc<CachedFile>>,
    pub(crate) by_number: HashMap<u64, Arc<CachedFile>>,
}

/// What admits writes and sends drains.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) limits: Limits,
    pub(crate) waiting: Waiting<Waiter>,
    pub(crate) order: Order,
    pub(crate) stopped: bool,
}

/// What a journal has and cannot be written below, and why.
#[derive(Debug, Clone)]
pub(crate) struct Unclaimed {
    pub(crate) held: Held,
    pub(crate) lost: Lost,
}

impl Unclaimed {
    /// Returns whether a tier has bytes of it; if not, there is only word of lost ones.
    pub(crate) fn holds_bytes(&self) -> bool {
        !self.held.parts.is_empty()
    }
}

/// Why a file cannot be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) why: &'static str,
    /// Whether it is sure that the file is not below any more: what may be there tomorrow is kept.
    pub(crate) gone: bool,
}

/// Files of which a device has lost bytes.
#[derive(Debug, Default)]
pub(crate) struct Broken {
    /// The first of them.
    pub(crate) named: Vec<Stuck>,
    pub(crate) files: u64,
}

/// Counters, since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) absorbed: AtomicU64,
    /// Of these, what programs wrote by themselves.
    pub(crate) leased: AtomicU64,
    pub(crate) through: AtomicU64,
    pub(crate) drained: AtomicU64,
    pub(crate) drains: AtomicU64,
    pub(crate) waited: AtomicU64,
    pub(crate) moved: AtomicU64,
    pub(crate) back: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }
}

/// The cache at work.
///
/// Locks are taken in this order: `world`, a file's state, `files`, `scheduler`, the space below,
/// `leases`.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) spec: Spec,
    pub(crate) below: BackingFolder,
    pub(crate) tiers: Vec<Tier>,
    /// Held for writing while journals are written anew.
    pub(crate) world: RwLock<()>,
    pub(crate) files: Mutex<Files>,
    scheduler: Mutex<Scheduler>,
    pub(crate) work: Condvar,
    /// What was found, and whose file was not.
    pub(crate) unclaimed: Vec<Unclaimed>,
    /// What a device has lost, since the daemon started.
    pub(crate) broken: Mutex<Broken>,
    /// Whoever gives a device's memory back has this.
    pub(crate) giving: Mutex<()>,
    pub(crate) counters: Counters,
    pub(crate) faults: Faults,
    /// Whether the daemon was asked to stop.
    pub(crate) stopping: AtomicBool,
    /// Whether it ends, and takes nothing more into tiers.
    pub(crate) closing: AtomicBool,
    /// What may take long, beside the threads that answer the kernel.
    pub(crate) pool: Arc<Pool>,
    pub(crate) copies: Arc<Copies>,
    /// What programs write by themselves.
    pub(crate) leases: Mutex<Leases>,
    /// The way to another node that has what an fsync acknowledges.
    pub(crate) partner: Option<Link>,
    records: AtomicU64,
    numbers: AtomicU64,
    started: Instant,
    long_journal: AtomicU64,
}

impl Engine {
    /// Begins with nothing held; `last` record and `number` of a file were used before.
    pub(crate) fn new(
        spec: Spec,
        below: BackingFolder,
        tiers: Vec<Tier>,
        last: u64,
        number: u64,
    ) -> Engine {
        let sizes: Vec<u64> = spec.tiers.iter().map(|tier| tier.bytes).collect();
        let mut limits = Limits::new(&sizes, spec.per_user);
        for (index, tier) in tiers.iter().enumerate().filter(|(_, tier)| tier.is_behind()) {
            limits.put_behind(index);
            limits.set_limit(index, tier.device.as_ref().map_or(0, |device| device.bytes()));
        }
        let scheduler = Scheduler {
            limits,
            waiting: Waiting::default(),
            order: Order::new(Pace::default()),
            stopped: false,
        };
        Engine {
            spec,
            below,
            tiers,
            world: RwLock::new(()),
            files: Mutex::default(),
            scheduler: Mutex::new(scheduler),
            work: Condvar::new(),
            unclaimed: Vec::new(),
            broken: Mutex::default(),
            giving: Mutex::default(),
            counters: Counters::default(),
            faults: Faults::of_environment(),
            stopping: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            pool: Arc::default(),
            copies: Arc::new(Copies::new()),
            leases: Mutex::default(),
            partner: None,
            records: AtomicU64::new(last),
            numbers: AtomicU64::new(number),
            started: Instant::now(),
            long_journal: AtomicU64::new(REWRITE_THRESHOLD),
        }
    }

    pub(crate) fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        lock(&self.scheduler)
    }

    pub(crate) fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    /// Appends a record to a tier's journal.
    pub(crate) fn note(&self, tier: TierIndex, record: &Record) -> io::Result<()> {
        self.tiers[tier].append(self.next_record(), record)
    }

    /// Appends a record that only frees: without it, the same bytes are drained again.
    pub(crate) fn note_freed(&self, tier: TierIndex, record: &Record) -> bool {
        self.note(tier, record).is_ok()
    }

    /// Returns the file that `node` stands for, and makes it known if it is not.
    pub(crate) fn file(&self, node: &Arc<OwnedFd>) -> io::Result<Arc<CachedFile>> {
        let stat = backing::stat(node)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut files = lock(&self.files);
        let file = match files.by_key.get(&key) {
            Some(file) => file.clone(),
            None => {
                let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
                let file = CachedFile::new(number, key, node.clone(), stat.st_uid);
                // It may have been known, and drained, a moment ago.
                file.lock().at_partner = self.partner.as_ref().is_some_and(Link::is_behind);
                let file = Arc::new(file);
                files.by_key.insert(key, file.clone());
                files.by_number.insert(number, file.clone());
                file
            }
        };
        // Under the lock, or it could be forgotten meanwhile; its own may be held for a while.
        file.opens.fetch_add(1, Ordering::SeqCst);
        Ok(file)
    }

    /// Returns a file that is known.
    pub(crate) fn known(&self, key: Key) -> Option<Arc<CachedFile>> {
        lock(&self.files).by_key.get(&key).cloned()
    }

    /// Makes a file known that was found in the journals.
    pub(crate) fn adopt(&self, file: CachedFile) -> Arc<CachedFile> {
        let file = Arc::new(file);
        let mut files = lock(&self.files);
        files.by_key.insert(file.key, file.clone());
        files.by_number.insert(file.number, file.clone());
        file
    }

    /// Forgets a file that nobody has open and that is all below.
    pub(crate) fn forget_if_done(&self, file: &CachedFile) {
        let _world = self.world.read();
        // Its state is not waited for under the lock of all files.
        let mut state = file.lock();
        if file.is_open() || !state.extents.is_clean() || !state.broken.is_empty() {
            return;
        }
        let mut files = lock(&self.files);
        if file.is_open() {
            return;
        }
        // Somebody else may have forgotten it before, and another be known for the same file below.
        if files.by_number.remove(&file.number).is_none() {
            return;
        }
        files.by_key.remove(&file.key);
        // Before it can be known anew, which asks whether all was told.
        self.partner_forgets(file, &mut state);
        drop(files);
        for (index, tier) in self.tiers.iter().enumerate() {
            if let Some(shadow) = state.shadows[index].take() {
                if !self.note_freed(index, &Record::Drop(file.number)) {
                    shadow.keep_places();
                }
                // What the journal still promises must be there until the disk knows better.
                if state.uncut.is_empty() || tier.sync().is_ok() {
                    tier.remove_shadow(file.number);
                }
            }
        }
    }

    /// Returns the file's shadow in a tier; a new one is told of in the journal.
    pub(crate) fn shadow(
        &self,
        file: &CachedFile,
        state: &mut State,
        tier: TierIndex,
    ) -> io::Result<Shadow> {
        if let Some(shadow) = &state.shadows[tier] {
            return Ok(shadow.clone());
        }
        if state.path.is_empty() {
            if !self.below.contains(&file.node) {
                return Err(rustix::io::Errno::XDEV.into());
            }
            state.path = self.below.name_of(&file.node)?;
            state.owner = backing::stat(&file.node)?.st_uid;
            state.birth = backing::birth(&file.node);
        }
        let shadow = self.tiers[tier].shadow(file.number)?;
        self.note(tier, &Record::File(file.number, identity(file, state)))?;
        // A daemon that is killed leaves nothing of a file that no name leads to.
        if let Some(end) = self.end_of_name(file, state, tier) {
            self.note(tier, &end)?;
        }
        state.shadows[tier] = Some(shadow.clone());
        Ok(shadow)
    }

    /// Returns what a tier's journal is to say of a file that no name leads to; `None` where one
    /// does.
    fn end_of_name(&self, file: &CachedFile, state: &State, tier: TierIndex) -> Option<Record> {
        // After a power cut, the name may be there again, and a local disk has promised its bytes.
        let may_return = self.tiers[tier].is_durable() && state.gone_from.is_some();
        state.orphan.then_some(match may_return {
            true => Record::Gone(file.number),
            false => Record::Drop(file.number),
        })
    }

    /// Returns the number of the last record of all journals.
    pub(crate) fn last_record(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Notes that other places have what tiers held, and gives its blocks back.
    pub(crate) fn release(
        &self,
        file: &CachedFile,
        state: &State,
        parts: &[Flight],
        freed: &[Freed],
    ) {
        let mut noted = true;
        for Flight { range, tier } in parts {
            let record = Record::Clean(file.number, range.start, range.end - range.start);
            noted &= self.note_freed(*tier, &record);
        }
        // A disk that knows of the holes, and not of the record, would have holes drained.
        for (index, tier) in self.tiers.iter().enumerate().filter(|(_, tier)| tier.is_durable()) {
            let concerned = parts.iter().any(|part| part.tier == index)
                || freed.iter().any(|blocks| blocks.tier == index);
            noted &= !concerned || tier.sync().is_ok();
        }
        let mut scheduler = self.scheduler();
        for blocks in freed {
            let length = blocks.range.end - blocks.range.start;
            scheduler.limits.give_back(blocks.tier, file.user, length);
        }
        drop(scheduler);
        if !parts.is_empty() {
            self.faults.hold(Point::Noted);
        }
        for blocks in freed {
            // Where the journal still says that they are held, they must be what they were.
            if let Some(shadow) = state.shadows[blocks.tier].as_ref().filter(|_| noted) {
                shadow.give_back(blocks, |part| state.extents.holds(blocks.tier, part));
            }
        }
    }

    /// Brings the promise of space below, and the order of drains, to what the file has now.
    pub(crate) fn settle(&self, file: &CachedFile, state: &mut State) {
        let unwritten = state.extents.unwritten();
        if unwritten < state.promised {
            self.below.settle(state.promised - unwritten);
        } else if unwritten > state.promised {
            self.below.promise_held(unwritten - state.promised);
        }
        state.promised = unwritten;
        if state.extents.is_clean() {
            state.trouble = None;
            state.stays = false;
            file.troubled.store(false, Ordering::Relaxed);
        }
        let dirty = if state.extents.is_dirty() { unwritten } else { 0 };
        let mut scheduler = self.scheduler();
        scheduler.order.left(file.number, dirty);
        scheduler.limits.note_parts(file.user, state.parts, state.extents.parts());
        state.parts = state.extents.parts();
    }

    pub(crate) fn next_record(&self) -> u64 {
        self.records.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn write_records(
        &self,
        records: &mut Vec<(u64, Record)>,
        file: u64,
        identity: &Identity,
        parts: Vec<Range<u64>>,
        places: Option<&Places>,
    ) {
        records.push((self.next_record(), Record::File(file, identity.clone())));
        for part in parts {
            match places {
                None => {
                    let record = Record::Write(file, part.start, part.end - part.start);
                    records.push((self.next_record(), record));
                }
                Some(places) => self.place_records(records, file, part, places),
            }
        }
        // The tier's file system is synced before such a journal takes the old one's place.
        records.push((self.next_record(), Record::Commit(file, self.last_record())));
    }

    /// Says what a device has lost of a file.
    fn loss_records(&self, records: &mut Vec<(u64, Record)>, file: u64, lost: &RangeMap<()>) {
        for (Range { start, end }, ()) in lost.iter() {
            records.push((self.next_record(), Record::Lost(file, start, end - start)));
        }
    }

    /// The same of what lies in places.
    fn place_records(
        &self,
        records: &mut Vec<(u64, Record)>,
        file: u64,
        range: Range<u64>,
        places: &Places,
    ) {
        let mut from = range.start;
        while from < range.end {
            let part = part_of(from);
            let end = part.end.min(range.end);
            // What no place has was refused when it was found.
            if let Some(place) = places.get(&part.start) {
                let record = Record::Place(file, from, end - from, *place);
                records.push((self.next_record(), record));
            }
            from = end;
        }
    }

    /// Writes journals anew that have become long.
    pub(crate) fn shorten_journals(&self) {
        let long = self.long_journal.load(Ordering::Relaxed);
        if self.tiers.iter().all(|tier| tier.journal_length() < long) {
            return;
        }
        let _world = self.world.write();
        // The old journals stay valid if it fails.
        if self.rewrite_journals().is_ok() {
            let length = self.tiers.iter().map(Tier::journal_length).max().unwrap_or(0);
            self.long_journal.store(REWRITE_THRESHOLD.max(2 * length), Ordering::Relaxed);
        } else {
            self.long_journal.store(2 * long, Ordering::Relaxed);
        }
    }

    /// Returns what a tier's journal is to say of what is no part of files any more: until the disk
    /// below knows where these end, what was promised must not be lost.
    fn uncut(&self, files: &[Arc<CachedFile>], tier: TierIndex) -> Vec<(u64, Record)> {
        let mut records = Vec::new();
        for file in files {
            for (part, _) in file.lock().uncut.iter().filter(|(_, other)| *other == tier) {
                let record = Record::Write(file.number, part.start, part.end - part.start);
                records.push((self.next_record(), record));
            }
        }
        records
    }

    /// Writes all journals anew, from what is held. Nothing may change meanwhile.
    pub(crate) fn rewrite_journals(&self) -> io::Result<()> {
        let files: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        // Numbers before those of what is newer, in whichever tier.
        let uncut: Vec<_> = (0..self.tiers.len()).map(|tier| self.uncut(&files, tier)).collect();
        for (index, (tier, mut records)) in self.tiers.iter().zip(uncut).enumerate() {
            for Unclaimed { held, .. } in &self.unclaimed {
                let parts = held.parts.iter().filter(|(_, tier)| *tier == index);
                let parts = parts.map(|(range, _)| range).collect();
                let places = tier.is_behind().then_some(&held.places);
                self.write_records(&mut records, held.file, &held.identity, parts, places);
                if self.memory() == Some(index) {
                    self.loss_records(&mut records, held.file, &held.lost);
                }
            }
            for file in &files {
                let state = file.lock();
                let Some(shadow) = &state.shadows[index] else { continue };
                let end = self.end_of_name(file, &state, index);
                if !matches!(end, Some(Record::Drop(_))) {
                    let parts = state.extents.needed_of(index);
                    let places = tier.is_behind().then(|| shadow.places());
                    let identity = identity(file, &state);
                    let places = places.as_ref();
                    self.write_records(&mut records, file.number, &identity, parts, places);
                    if self.memory() == Some(index) {
                        self.loss_records(&mut records, file.number, &state.broken);
                    }
                }
                records.extend(end.map(|end| (self.next_record(), end)));
            }
            tier.rewrite(&records)?;
        }
        Ok(())
    }
}

/// Returns what the journals say of a file.
pub(crate) fn identity(file: &CachedFile, state: &State) -> Identity {
    let (device, inode) = file.key;
    let (user, birth) = (state.owner, state.birth);
    Identity { device, inode, user, birth, path: state.path.clone() }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
pub(crate) mod tests;
