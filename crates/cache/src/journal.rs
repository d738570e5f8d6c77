//! A tier's journal: what of which file the tier holds, so that a new daemon finds it.
//!
//! Records are appended, each with a number that counts over all tiers and with a checksum. A
//! record that is damaged or was cut short is passed over: what it would have said was not
//! acknowledged. A name cannot pass for a record, as each has a zero in its head. Numbers are
//! little-endian.

use crate::extents::TierIndex;
use crate::ranges::RangeMap;
use kedge_holder::PART;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes before a record's body: checksum, length, kind, nothing.
const HEAD: usize = 8;
/// Longest body of a record, in bytes: a path and some numbers.
const MAX_BODY_LEN: usize = 8192;
/// Bytes of a number.
const WORD: usize = 8;
/// Numbers before a file's path.
const NUMBERS: usize = 6;

/// The file below whose bytes a tier holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Device of the file system below.
    pub device: u64,
    /// The file's number there.
    pub inode: u64,
    /// Its owner.
    pub user: u32,
    /// When it was made, in nanoseconds since 1970: another file may get its number. 0 where the
    /// file system does not say.
    pub birth: u64,
    /// Its name, from the folder that is cached.
    pub path: Vec<u8>,
}

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The file is this one; it may have another name than before.
    File(u64, Identity),
    /// The tier has the file's bytes from the offset on, so many.
    Write(u64, u64, u64),
    /// The file below, or another tier, has newer or the same ones.
    Clean(u64, u64, u64),
    /// The file ends there.
    Cut(u64, u64),
    /// Nothing of the file is needed any more.
    Drop(u64),
    /// The same, but only as long as the node runs: after a power cut, what was removed below may
    /// be there again.
    Gone(u64),
    /// The file's writes up to the record of that number are on the tier's disk.
    Commit(u64, u64),
    /// A place of a device, the last number, has the file's bytes from the offset on, so many.
    /// They lie there as in their part of the file: one of [`PART`] bytes, at a multiple of that.
    Place(u64, u64, u64, u32),
    /// A program writes the file's bytes from the offset on, so many at most, into the tier by
    /// itself: how many it has is in the slot of that number, as long as that has this record's.
    Lease(u64, u64, u64, u32),
    /// A device has lost the file's bytes from the offset on, so many.
    Lost(u64, u64, u64),
    /// The same bytes were written again, or a program was told of the loss.
    Told(u64, u64, u64),
}

/// The journal has a kind of record that is not known here: another version of kedge wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unknown;

impl Record {
    fn kind(&self) -> u8 {
        match self {
            Record::Write(..) => 2,
            Record::Clean(..) => 3,
            Record::Cut(..) => 4,
            Record::Drop(..) => 5,
            Record::File(..) => 7,
            Record::Commit(..) => 8,
            Record::Gone(..) => 9,
            Record::Place(..) => 10,
            Record::Lease(..) => 11,
            Record::Lost(..) => 12,
            Record::Told(..) => 13,
        }
    }

    /// Returns whether the record says that less is held: without it, old bytes are drained again.
    pub fn frees(&self) -> bool {
        matches!(
            self,
            Record::Clean(..)
                | Record::Cut(..)
                | Record::Drop(..)
                | Record::Gone(..)
                | Record::Told(..)
        )
    }

    /// Appends the record, with its number, to `out`.
    pub fn encode(&self, number: u64, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEAD]);
        let mut put = |value: u64| out.extend(value.to_le_bytes());
        put(number);
        match self {
            Record::File(file, identity) => {
                let Identity { device, inode, user, birth, .. } = identity;
                [*file, *device, *inode, (*user).into(), *birth].into_iter().for_each(&mut put);
                out.extend(&identity.path);
            }
            Record::Write(file, offset, length)
            | Record::Clean(file, offset, length)
            | Record::Lost(file, offset, length)
            | Record::Told(file, offset, length) => {
                [*file, *offset, *length].into_iter().for_each(&mut put);
            }
            Record::Cut(file, number) | Record::Commit(file, number) => {
                [*file, *number].into_iter().for_each(&mut put);
            }
            Record::Drop(file) | Record::Gone(file) => put(*file),
            Record::Place(file, offset, length, place)
            | Record::Lease(file, offset, length, place) => {
                [*file, *offset, *length, (*place).into()].into_iter().for_each(&mut put);
            }
        }
        let length = (out.len() - start - HEAD) as u16;
        out[start + 4..start + 6].copy_from_slice(&length.to_le_bytes());
        out[start + 6] = self.kind();
        let sum = xxh3_64(&out[start + 4..]) as u32;
        out[start..start + 4].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads the record at the front: its number, itself, and its length.
    ///
    /// `None` where no record begins, or one that was cut short or damaged.
    pub fn decode(bytes: &[u8]) -> Option<(u64, Record, usize)> {
        let (kind, body) = framed(bytes, |kind, length| match kind {
            2 | 3 | 12 | 13 => length == 4 * WORD,
            4 | 8 => length == 3 * WORD,
            5 | 9 => length == 2 * WORD,
            10 | 11 => length == 5 * WORD,
            7 => length >= NUMBERS * WORD,
            _ => false,
        })?;
        let word = |index: usize| {
            let bytes = body.get(index * WORD..(index + 1) * WORD)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let file = word(1)?;
        let record = match kind {
            2 => Record::Write(file, word(2)?, word(3)?),
            3 => Record::Clean(file, word(2)?, word(3)?),
            12 => Record::Lost(file, word(2)?, word(3)?),
            13 => Record::Told(file, word(2)?, word(3)?),
            4 => Record::Cut(file, word(2)?),
            5 => Record::Drop(file),
            9 => Record::Gone(file),
            10 => {
                let (offset, length) = (word(2)?, word(3)?);
                let place = u32::try_from(word(4)?).ok()?;
                // A place has a part of a file, and nothing of the next one.
                let within = length > 0 && (offset % PART).checked_add(length)? <= PART;
                within.then_some(Record::Place(file, offset, length, place))?
            }
            11 => Record::Lease(file, word(2)?, word(3)?, u32::try_from(word(4)?).ok()?),
            7 => {
                let user = u32::try_from(word(4)?).ok()?;
                let (device, inode, birth) = (word(2)?, word(3)?, word(5)?);
                let path = body.get(NUMBERS * WORD..)?.to_vec();
                Record::File(file, Identity { device, inode, user, birth, path })
            }
            _ => Record::Commit(file, word(2)?),
        };
        Some((word(0)?, record, HEAD + body.len()))
    }
}

/// Reads a record's kind and body, if `fits` allows for both and the checksum is right.
fn framed(bytes: &[u8], fits: impl Fn(u8, usize) -> bool) -> Option<(u8, &[u8])> {
    let head = bytes.get(..HEAD)?;
    let sum = u32::from_le_bytes(head[..4].try_into().ok()?);
    let length = usize::from(u16::from_le_bytes(head[4..6].try_into().ok()?));
    // Before the checksum, which takes long at each byte of a damaged journal.
    if head[7] != 0 || length > MAX_BODY_LEN || !fits(head[6], length) {
        return None;
    }
    let body = bytes.get(HEAD..HEAD + length)?;
    (xxh3_64(&bytes[4..HEAD + length]) as u32 == sum).then_some((head[6], body))
}

/// The places that parts of a file are in, by where each part begins.
pub type Places = BTreeMap<u64, u32>;

/// What a journal says of one file.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// The file below; a journal without it was damaged there.
    pub identity: Option<Identity>,
    /// What the tier holds, each part with its write's number.
    pub parts: RangeMap<u64>,
    /// Where on a device that is.
    pub places: Places,
    /// What a device has lost, each part with its record's number.
    pub lost: RangeMap<u64>,
}

/// What a tier's journal says.
#[derive(Debug, Clone, Default)]
pub struct Replay {
    /// The files that the tier holds something of, or that have lost something.
    pub files: HashMap<u64, Found>,
    /// The last record's number.
    pub last: u64,
}

/// Reads a journal. After a power cut (`rebooted`), writes that were not committed do not count,
/// and files that were gone may be there. `leased` are the bytes that were written of each lease,
/// by the number of its record.
///
/// # Errors
/// If a record is sound, and of a kind that is not known.
pub fn replay(bytes: &[u8], rebooted: bool, leased: &HashMap<u64, u64>) -> Result<Replay, Unknown> {
    let mut records = Vec::new();
    let (mut at, mut sound) = (0, true);
    while at < bytes.len() {
        match Record::decode(&bytes[at..]) {
            Some((number, record, length)) => {
                records.push((number, record));
                (at, sound) = (at + length, true);
            }
            None if sound && framed(&bytes[at..], |_, _| true).is_some() => return Err(Unknown),
            None => (at, sound) = (at + 1, false),
        }
    }
    let mut commits: HashMap<u64, u64> = HashMap::new();
    for (_, record) in &records {
        if let Record::Commit(file, number) = record {
            let last = commits.entry(*file).or_default();
            *last = (*last).max(*number);
        }
    }
    let (mut replay, mut dropped) = (Replay::default(), HashSet::new());
    // Which file's part is in a place, of the last that says so: the record that freed the place
    // from the one before may have been damaged.
    let mut owners: HashMap<u32, (u64, u64)> = HashMap::new();
    for (number, record) in records {
        replay.last = replay.last.max(number);
        let counts = match &record {
            Record::Write(file, ..) if rebooted => {
                commits.get(file).is_some_and(|last| number <= *last)
            }
            Record::Gone(_) | Record::Lease(..) if rebooted => false,
            Record::Drop(file) | Record::Gone(file) => dropped.insert(*file),
            _ => true,
        };
        if counts
            && let Record::Place(file, offset, _, place) = record
            && let part = offset / PART * PART
            && let Some((other, old)) = owners.insert(place, (file, part))
            && (other, old) != (file, part)
            && let Some(found) = replay.files.get_mut(&other)
            && found.places.get(&old) == Some(&place)
        {
            found.places.remove(&old);
            found.parts.remove(old..old.saturating_add(PART));
        }
        let record = match record {
            Record::Lease(file, offset, length, _) => {
                let written = leased.get(&number).map_or(0, |written| length.min(*written));
                Record::Write(file, offset, written)
            }
            other => other,
        };
        if counts {
            apply(&mut replay.files, number, record);
        }
    }
    // A file that lost its last name may be written as long as it is open.
    let is_empty = |found: &Found| found.parts.is_empty() && found.lost.is_empty();
    replay.files.retain(|file, found| !is_empty(found) && !dropped.contains(file));
    Ok(replay)
}

/// Brings what is known of files to what one more record says.
pub(crate) fn apply(files: &mut HashMap<u64, Found>, number: u64, record: Record) {
    let part = |offset: u64, length: u64| -> Range<u64> { offset..offset.saturating_add(length) };
    match record {
        Record::File(file, identity) => files.entry(file).or_default().identity = Some(identity),
        Record::Write(file, offset, length) => {
            let found = files.entry(file).or_default();
            found.parts.insert(part(offset, length), number);
            found.lost.remove(part(offset, length));
        }
        Record::Lost(file, offset, length) => {
            files.entry(file).or_default().lost.insert(part(offset, length), number);
        }
        Record::Told(file, offset, length) => {
            files.entry(file).or_default().lost.remove(part(offset, length));
        }
        Record::Place(file, offset, length, place) => {
            let found = files.entry(file).or_default();
            let start = offset / PART * PART;
            if found.places.insert(start, place).is_some_and(|before| before != place) {
                found.parts.remove(part(start, PART));
            }
            found.parts.insert(part(offset, length), number);
            found.lost.remove(part(offset, length));
        }
        Record::Commit(..) | Record::Lease(..) => {}
        Record::Clean(file, offset, length) => {
            files.entry(file).or_default().parts.remove(part(offset, length));
        }
        Record::Cut(file, size) => {
            let found = files.entry(file).or_default();
            found.parts.remove(size..u64::MAX);
            found.lost.remove(size..u64::MAX);
        }
        Record::Drop(file) | Record::Gone(file) => {
            files.remove(&file);
        }
    }
}

/// A file of which something is held: the newest of all tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The file's number in the journals.
    pub file: u64,
    /// The file below; of no name if the journal's word on it was damaged.
    pub identity: Identity,
    /// The parts, and the tier that has each.
    pub parts: RangeMap<TierIndex>,
    /// Tiers where it has another number, of a daemon that did not know of the one above.
    pub others: Vec<(TierIndex, u64)>,
    /// The places of what the tier of a device has. A cache has one of these at most.
    pub places: Places,
    /// What a device has lost, was not written again, and no program was told of.
    pub lost: RangeMap<()>,
}

/// Writes of one file: each one's number, its tier, and what it wrote.
type Writes = Vec<(u64, TierIndex, Range<u64>)>;
/// Losses of one file: the number of each one's record, and what was lost.
type Losses = Vec<(u64, Range<u64>)>;

/// What the journals say of one number.
#[derive(Debug)]
struct Numbered {
    file: u64,
    identity: Identity,
    writes: Writes,
    others: Vec<(TierIndex, u64)>,
    places: Places,
    lost: Losses,
}

impl Numbered {
    fn last(&self) -> u64 {
        let writes = self.writes.iter().map(|(number, ..)| *number);
        writes.chain(self.lost.iter().map(|(number, _)| *number)).max().unwrap_or(0)
    }

    /// Returns what is lost, as it was not written later in any tier.
    fn still_lost(&self) -> RangeMap<()> {
        let mut still = RangeMap::default();
        for (number, range) in &self.lost {
            let mut part = RangeMap::default();
            part.insert(range.clone(), ());
            for (_, _, newer) in self.writes.iter().filter(|(write, ..)| write > number) {
                part.remove(newer.clone());
            }
            for (range, ()) in part.iter() {
                still.insert(range, ());
            }
        }
        still
    }

    /// Returns whether another number, of another daemon, is for the same file below.
    fn is_same(&self, other: &Numbered) -> bool {
        let (one, two) = (&self.identity, &other.identity);
        // Where it is not known when it was made, another file may have got its place.
        let same = one.birth != 0
            && (one.device, one.inode, one.birth) == (two.device, two.inode, two.birth);
        let here: HashSet<_> = self.writes.iter().map(|(_, tier, _)| *tier).collect();
        // One tier has one number for it, and one shadow.
        same && !other.writes.iter().any(|(_, tier, _)| here.contains(tier))
    }

    /// Takes over what an older number has.
    fn join(&mut self, older: Numbered) {
        let tiers: HashSet<_> = older.writes.iter().map(|(_, tier, _)| *tier).collect();
        let known: HashSet<_> = older.others.iter().map(|(tier, _)| *tier).collect();
        self.others.extend(tiers.difference(&known).map(|tier| (*tier, older.file)));
        self.others.extend(older.others);
        self.writes.extend(older.writes);
        self.lost.extend(older.lost);
        // Of both, one alone has some.
        self.places.extend(older.places);
    }
}

/// Joins the numbers that daemons which did not know of each other's tiers gave to one file.
fn join(mut all: Vec<Numbered>) -> Vec<Numbered> {
    all.sort_by_key(|file| std::cmp::Reverse(file.last()));
    let mut joined: Vec<Numbered> = Vec::new();
    let mut places: HashMap<(u64, u64, u64), usize> = HashMap::new();
    for file in all {
        let key = (file.identity.device, file.identity.inode, file.identity.birth);
        match places.get(&key).and_then(|place| joined.get_mut(*place)) {
            Some(newer) if newer.is_same(&file) => newer.join(file),
            _ => {
                places.insert(key, joined.len());
                joined.push(file);
            }
        }
    }
    joined
}

/// Merges what the tiers' journals say: where two tiers hold a part, the later write counts.
///
/// A file whose number is another's in another journal has no name then: which one's bytes are
/// whose is for a person to see. Several numbers of one file become that of its last write.
pub fn merge(replays: Vec<Replay>) -> Vec<Held> {
    let mut files: HashMap<u64, (Option<Identity>, Writes, Places, Losses)> = HashMap::new();
    let mut mixed = HashSet::new();
    for (tier, replay) in replays.into_iter().enumerate() {
        for (file, found) in replay.files {
            let (identity, parts, places, lost) = files.entry(file).or_default();
            places.extend(found.places);
            lost.extend(found.lost.iter().map(|(range, number)| (number, range)));
            let same = |one: &Identity, other: &Identity| {
                (one.device, one.inode, one.birth) == (other.device, other.inode, other.birth)
            };
            if let (Some(one), Some(other)) = (&*identity, &found.identity)
                && !same(one, other)
            {
                mixed.insert(file);
            }
            *identity = found.identity.or(identity.take());
            parts.extend(found.parts.iter().map(|(range, number)| (number, tier, range)));
        }
    }
    let all = files.into_iter().map(|(file, (identity, writes, places, lost))| {
        let identity = identity.filter(|_| !mixed.contains(&file)).unwrap_or_default();
        Numbered { file, identity, writes, others: Vec::new(), places, lost }
    });
    let all = join(all.collect()).into_iter();
    let mut held: Vec<Held> = all
        .map(|numbered| {
            let lost = numbered.still_lost();
            let Numbered { file, identity, mut writes, others, places, .. } = numbered;
            writes.sort_by_key(|(number, ..)| *number);
            let mut parts = RangeMap::default();
            for (_, tier, range) in writes {
                parts.insert(range, tier);
            }
            Held { file, identity, parts, others, places, lost }
        })
        .collect();
    held.sort_by_key(|held| held.file);
    held
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
