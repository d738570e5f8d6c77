//! What a killed daemon, or one before a reboot, has left: found in the tiers' journals.

use crate::CacheError;
use crate::backing::{self, BackingFolder};
use crate::control::Stuck;
use crate::device::Device;
use crate::engine::{Engine, Lost, Unclaimed};
use crate::extents::{TIERS, TierIndex};
use crate::file::{CachedFile, Keeping, State};
use crate::journal::{self, Held, Replay};
use crate::partner::home::Contact;
use crate::ranges::RangeMap;
use crate::shadow::{Shadow, part_of};
use crate::spec::{Medium, Spec};
use crate::tier::{Tier, lock};
use kedge_holder::PART;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use serde::Serialize;
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// By how many seconds the clocks of a partner and of the file system below may differ, with the
/// second between two words of the cache.
const SKEW: u64 = if cfg!(test) { 1 } else { 10 };

/// Why a partner's bytes stay where they are.
const NEWER: &str = "it was changed below after its partner was told of it last, or clocks differ";

/// What was recovered.
#[derive(Debug, Default, Serialize)]
pub struct Recovered {
    /// Files whose data is below now.
    pub files: u64,
    /// That data.
    pub bytes: u64,
    /// Files whose data stays where it is, and why.
    pub stuck: Vec<Stuck>,
    /// Files whose data was given up.
    pub discarded: Vec<Stuck>,
    /// Files of which a device has lost data.
    pub lost: Vec<Stuck>,
    /// Why a partner may keep what is below now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_partner: Option<String>,
}

/// Opens the tiers and takes over what they hold.
pub(crate) fn open(spec: Spec) -> Result<Engine, CacheError> {
    let mut device = None;
    open_with(spec, &mut device).inspect_err(|_| {
        // A holder that was started for nothing would stay.
        if let Some(device) = device.filter(|device| device.is_new()) {
            device.end();
        }
    })
}

/// The same; `new` is the device that was opened.
fn open_with(spec: Spec, new: &mut Option<Arc<Device>>) -> Result<Engine, CacheError> {
    let under = spec.under.clone();
    let below = BackingFolder::open(&under)
        .map_err(|error| CacheError::io("cannot open", &under, error))?;
    let (mut tiers, mut replays, mut lost) = (Vec::new(), Vec::new(), None);
    for tier in &spec.tiers {
        let bytes = tier.bytes;
        let (mut tier, mut replay) = Tier::open(tier, &under)?;
        if tier.is_behind() {
            let gone = tier.open_device(spec.device.as_ref(), bytes, &mut replay)?;
            new.clone_from(&tier.device);
            lost = Some((tiers.len(), gone));
        }
        tiers.push(tier);
        replays.push(replay);
    }
    let last = replays.iter().map(|replay| replay.last).max().unwrap_or(0);
    // Later than the numbers of a daemon before that had a tier which is not named this time: where
    // both are recovered at once, the later one's bytes are newer.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let last = last.max(u64::try_from(now).unwrap_or(0));
    let lost = lost.map_or(Vec::new(), |(tier, gone)| lost_with(tier, gone, &replays, &tiers));
    let held = journal::merge(replays);
    for held in &held {
        join_shadows(&tiers, held)?;
    }
    // Not from a first one on: the journal of a disk that is not named this time has numbers, too,
    // and may be merged with this one's later. There is room above for as many files as are ever
    // opened.
    let number = RandomState::new().build_hasher().finish() >> 2;
    let mut engine = Engine::new(spec, below, tiers, last, number);
    let failed = |error| CacheError::io("cannot take over", &under, error);
    let mut unclaimed = adopt_all(&engine, held, true).map_err(failed)?;
    if !unclaimed.is_empty() {
        let mut held: Vec<Held> = unclaimed.into_iter().map(|lost| lost.held).collect();
        let seen_all = rename_moved(&engine.below, &mut held);
        unclaimed = adopt_all(&engine, held, false).map_err(failed)?;
        for Unclaimed { lost, .. } in &mut unclaimed {
            if lost.gone && !seen_all {
                *lost = kept("it is not where it was, and some folder below cannot be read");
            }
        }
    }
    for Unclaimed { held, .. } in unclaimed.iter().filter(|lost| !lost.held.lost.is_empty()) {
        engine.note_broken(&held.identity.path, held.lost.total());
    }
    // Where the file may be had again, a later daemon tells whoever uses it.
    unclaimed.retain(|one| one.holds_bytes() || !one.lost.gone && !one.held.lost.is_empty());
    engine.unclaimed = unclaimed;
    keep_places(&engine);
    for (held, parts) in lost {
        tell_lost(&engine, &held, parts);
    }
    let failed = |error| CacheError::io("cannot write the journals of", &under, error);
    engine.rewrite_journals().map_err(failed)?;
    for tier in &engine.tiers {
        tier.free_slots();
        tier.mark_boot().map_err(failed)?;
        tier.mark_holder().map_err(failed)?;
        let files = lock(&engine.files);
        let keeps = |file: u64| {
            files.by_number.contains_key(&file)
                || engine.unclaimed.iter().any(|lost| lost.held.file == file)
        };
        tier.remove_others(keeps).map_err(failed)?;
    }
    Ok(engine)
}

/// The same for a recovery: nobody may come after it, and so no tier gives up what a disk below
/// does not have.
pub(crate) fn open_to_recover(spec: Spec) -> Result<Engine, CacheError> {
    let mut engine = open(spec)?;
    engine.below.keeps_writes = true;
    Ok(engine)
}

/// Has a file's shadow in each tier have the file's number.
fn join_shadows(tiers: &[Tier], held: &Held) -> Result<(), CacheError> {
    for (tier, number) in &held.others {
        let tier = &tiers[*tier];
        tier.join(*number, held.file)
            .map_err(|error| CacheError::io("cannot take over what is in", &tier.folder, error))?;
    }
    Ok(())
}

/// Returns what was lost with a holder that is gone, whose journal said `gone`: of each file what
/// nothing else has, in bytes. What host memory has is as new: the record that frees it there comes
/// after the one that moved it.
fn lost_with(
    tier: TierIndex,
    gone: Replay,
    left: &[Replay],
    tiers: &[Tier],
) -> Vec<(Held, RangeMap<()>)> {
    if gone.files.is_empty() {
        return Vec::new();
    }
    let mut all = left.to_vec();
    all[tier] = gone;
    let left = journal::merge(left.to_vec());
    let lost = journal::merge(all).into_iter().filter_map(|held| {
        let mut parts = RangeMap::default();
        for (range, _) in held.parts.iter().filter(|(_, other)| *other == tier) {
            parts.insert(range, ());
        }
        for other in left.iter().filter(|other| other.file == held.file) {
            let memory = |tier: &TierIndex| tiers[*tier].medium == Medium::Ram;
            for (range, _) in other.parts.iter().filter(|(_, tier)| memory(tier)) {
                parts.remove(range);
            }
        }
        // A daemon that was killed before the holder's part was given up has left word of it.
        held.lost.iter().for_each(|(range, ())| drop(parts.remove(range)));
        (!parts.is_empty()).then_some((held, parts))
    });
    lost.collect()
}

/// Names a file of which a device has lost bytes; whoever uses it next is told.
fn tell_lost(engine: &Engine, held: &Held, parts: RangeMap<()>) {
    engine.note_broken(&held.identity.path, parts.total());
    let Ok(node) = find(&engine.below, held, true) else { return };
    let Ok(stat) = backing::stat(&node) else { return };
    let key = (stat.st_dev, stat.st_ino);
    let file = engine.known(key).unwrap_or_else(|| {
        engine.adopt(CachedFile::new(held.file, key, Arc::new(node), held.identity.user))
    });
    let mut state = file.lock();
    parts.iter().for_each(|(range, ())| drop(state.broken.insert(range, ())));
    keep_losses(engine, &file, &mut state);
}

/// Has the journal in host memory, which is about to be written anew, tell what is lost of a file.
fn keep_losses(engine: &Engine, file: &CachedFile, state: &mut State) {
    // Where it cannot, this daemon is the last to name it.
    if let Some(memory) = engine.memory().filter(|_| !state.broken.is_empty()) {
        let _ = engine.shadow(file, state, memory);
    }
}

/// Has the places of what is nobody's stay what they are.
fn keep_places(engine: &Engine) {
    let Some((behind, device)) = engine.device() else { return };
    for Unclaimed { held, .. } in &engine.unclaimed {
        let parts = held.parts.iter().filter(|(_, tier)| *tier == behind);
        for start in parts.flat_map(|(range, _)| starts_of(range)) {
            let place = held.places.get(&start).and_then(|number| device.adopt(*number));
            if let Some(place) = place {
                place.keep();
            }
        }
    }
}

/// Returns where the parts begin that `range` touches.
fn starts_of(range: Range<u64>) -> impl Iterator<Item = u64> {
    (part_of(range.start).start..range.end).step_by(PART as usize)
}

/// Returns whether a tier has the bytes of `range`; places of a device are taken.
fn has_bytes(tier: &Tier, shadow: &Shadow, held: &Held, range: Range<u64>) -> io::Result<bool> {
    if let Some(file) = shadow.file() {
        return Ok(file.metadata()?.len() >= range.end);
    }
    for start in starts_of(range) {
        if shadow.place_of(start).is_some() {
            continue;
        }
        let number = held.places.get(&start).zip(tier.device.as_ref());
        let Some(place) = number.and_then(|(number, device)| device.adopt(*number)) else {
            return Ok(false);
        };
        shadow.place(start, place);
    }
    Ok(true)
}

/// Takes files over, and returns those that cannot be.
///
/// `named` says that the names are those of the journals.
fn adopt_all(engine: &Engine, all: Vec<Held>, named: bool) -> io::Result<Vec<Unclaimed>> {
    let mut left = Vec::new();
    for held in all {
        if let Err(lost) = adopt(engine, &held, named)? {
            left.push(Unclaimed { held, lost });
        }
    }
    Ok(left)
}

/// Looks for files by their numbers in the whole folder: another node may have renamed them, or
/// the name that was known may have been one of several. Returns whether it could look everywhere.
fn rename_moved(below: &BackingFolder, held: &mut [Held]) -> bool {
    let mut folders = vec![Vec::new()];
    let mut seen_all = true;
    while let Some(folder) = folders.pop() {
        let entries = below.list(&folder).unwrap_or_else(|error| {
            // What is removed meanwhile, or mounted there, has none of the cache's files.
            seen_all &= is_gone(&error) || error.kind() == io::ErrorKind::CrossesDevices;
            Vec::new()
        });
        for (inode, is_folder, name) in entries {
            let mut path = folder.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(name);
            for held in held.iter_mut().filter(|held| held.identity.inode == inode) {
                held.identity.path.clone_from(&path);
            }
            if is_folder {
                folders.push(path);
            }
        }
    }
    seen_all
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn kept(why: &'static str) -> Lost {
    Lost { why, gone: false }
}

/// Finds the file below that `held` is of.
///
/// A number alone says little: it is given to another file, maybe another user's, when the first
/// one is gone. When the file was made says more; where that is not known, its name must be the one
/// that was known, too.
fn find(below: &BackingFolder, held: &Held, named: bool) -> Result<OwnedFd, Lost> {
    let identity = &held.identity;
    if identity.path.is_empty() {
        return Err(kept("the journals' records of its name are damaged, or differ"));
    }
    // Of a folder whose file system is not mounted just now, nothing is known.
    let mounted = backing::stat(&below.root).is_ok_and(|root| root.st_dev == identity.device);
    let lost = |why| match mounted {
        true => Lost { why, gone: true },
        false => kept("the folder is on another device than it was, and has no such file"),
    };
    let gone = lost("no file of this name and number is below");
    let unknown = kept("the file below cannot be looked for");
    let missed = |error: io::Error| if is_gone(&error) { gone } else { unknown };
    let node = below.find(&identity.path).map_err(missed)?;
    let stat = backing::stat(&node).map_err(missed)?;
    if stat.st_ino != identity.inode
        || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
    {
        return Err(gone);
    }
    let birth = backing::birth(&node);
    let is_known = birth != 0 && identity.birth != 0;
    if is_known && birth != identity.birth {
        return Err(lost("another file has got its number below"));
    }
    if !is_known && !named {
        return Err(kept("a file of its number has another name below, and may be another one"));
    }
    if stat.st_uid != identity.user {
        return Err(match is_known {
            true => kept("it has another owner below"),
            false => lost("another file has got its number below, or another owner"),
        });
    }
    Ok(node)
}

/// Takes a file over, or says why it cannot be.
fn adopt(engine: &Engine, held: &Held, named: bool) -> io::Result<Result<(), Lost>> {
    let node = match find(&engine.below, held, named) {
        Ok(node) => node,
        Err(lost) => return Ok(Err(lost)),
    };
    let mut shadows: [Option<Shadow>; TIERS] = Default::default();
    for (range, tier) in held.parts.iter() {
        let shadow = match &mut shadows[tier] {
            Some(shadow) => shadow,
            none => none.insert(engine.tiers[tier].shadow(held.file)?),
        };
        if !has_bytes(&engine.tiers[tier], shadow, held, range)? {
            return Ok(Err(kept("its tier lacks bytes that the journal promises")));
        }
    }
    let Ok(writable) = backing::reopen(&node, OFlags::WRONLY) else {
        return Ok(Err(kept("the file below cannot be opened for writing")));
    };
    if is_newer_below(engine, held.file, &writable)? {
        return Ok(Err(kept(NEWER)));
    }
    let stat = backing::stat(&node)?;
    let key = (stat.st_dev, stat.st_ino);
    let file = CachedFile::new(held.file, key, Arc::new(node), held.identity.user);
    let mut state = file.lock();
    state.path = held.identity.path.clone();
    (state.owner, state.birth) = (held.identity.user, held.identity.birth);
    state.below = Some(Arc::new(writable));
    state.shadows = shadows;
    // The journals do not say what the last daemon was asked for.
    state.keeping = Keeping::Synced;
    state.stays = true;
    for (range, tier) in held.parts.iter() {
        let taken = state.extents.write(range, tier).taken;
        engine.scheduler().limits.hold(tier, file.user, taken);
    }
    state.promised = state.extents.unwritten();
    engine.below.promise_held(state.promised);
    state.parts = state.extents.parts();
    engine.scheduler().limits.note_parts(file.user, 0, state.parts);
    if state.promised > 0 {
        engine.scheduler().order.found(held.file, state.promised, engine.now());
    }
    if !held.lost.is_empty() {
        state.broken = held.lost.clone();
        keep_losses(engine, &file, &mut state);
        engine.note_broken(&state.path, held.lost.total());
    }
    drop(state);
    engine.adopt(file);
    Ok(Ok(()))
}

/// Returns whether a file was changed below after a partner was told of it last, which may lack
/// later bytes then. What is asked is the file system, not what this node remembers of it.
fn is_newer_below(engine: &Engine, file: u64, opened: &File) -> io::Result<bool> {
    let Some(contact) = contact_of(engine) else { return Ok(false) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let stat = rustix::fs::statx(opened, "", flags, StatxFlags::CTIME)?;
    let changed = u64::try_from(stat.stx_ctime.tv_sec).unwrap_or(0);
    Ok(changed > contact.last(file).saturating_add(SKEW))
}

/// Returns what is known of the partner whose home is recovered, if one is.
fn contact_of(engine: &Engine) -> Option<&Contact> {
    engine.tiers.iter().find_map(|tier| tier.contact.as_ref())
}

/// Drains all that was taken over, and has the disk below have it.
pub(crate) fn drain(engine: &Arc<Engine>) -> Recovered {
    let mut recovered = Recovered::default();
    let files: Vec<_> = lock(&engine.files).by_number.values().cloned().collect();
    for file in files {
        let (bytes, path, below) = {
            let state = file.lock();
            (state.extents.unwritten(), state.path.clone(), state.below.clone())
        };
        if bytes == 0 {
            // Of such a one, all that was held is lost.
            continue;
        }
        // Others may have written it since it was taken over.
        let unchanged = |opened: &File| match is_newer_below(engine, file.number, opened)? {
            true => Err(io::Error::other(NEWER)),
            false => Ok(()),
        };
        let opened = below.ok_or(io::Error::from(io::ErrorKind::NotFound));
        let result = opened.and_then(|opened| {
            unchanged(&opened)?;
            let write = || {
                engine.drain_file(&file)?;
                opened.sync_all()
            };
            match contact_of(engine) {
                Some(contact) => contact.while_writing(file.number, write),
                None => write(),
            }
        });
        match result {
            Ok(()) => {
                recovered.files += 1;
                recovered.bytes += bytes;
            }
            Err(error) => {
                let path = String::from_utf8_lossy(&path).into_owned();
                recovered.stuck.push(Stuck { path, bytes, why: error.to_string() });
            }
        }
    }
    recovered.lost.clone_from(&lock(&engine.broken).named);
    // Nobody but whoever recovers can be told.
    let files: Vec<_> = lock(&engine.files).by_number.values().cloned().collect();
    for file in files {
        let _ = engine.tell_broken_once(&file);
    }
    let unclaimed = engine.unclaimed.iter().filter(|one| one.holds_bytes());
    recovered.stuck.extend(unclaimed.map(|lost| engine.unclaimed_file(lost)));
    recovered
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
