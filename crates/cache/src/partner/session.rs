//! A session of a cache with its partner, at the partner: the home that it keeps.

use super::account::{Kept, RECORD, Seat};
use super::home::{self as place, CONTACT, TOKEN};
use super::host::{Listed, Partner, SILENCE, SessionOwner, other};
use super::wire::{END, Hello, Said, VERSION};
use crate::CacheError;
use crate::extents::{Freed, blocks_of};
use crate::home;
use crate::journal::{Found, Record, apply};
use crate::ranges::RangeMap;
use crate::spec::{TierSpec, home_in};
use crate::tier::{Tier, make_home, private_folder, punch, sync_folder};
use kedge_keys::{Connection, Name};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// The longest name of a file, from the cached folder, bytes.
const NAME: usize = 4096;
/// Ranges that wait to be given back.
const FREED: usize = 1 << 16;
/// Files that have something that could not be kept, at once.
const FAILED: usize = 1 << 16;
/// Length of a journal, in bytes, from which on it is rewritten, if that is twice what it is to
/// say; where a key has little room, earlier.
const MAX_REWRITE_THRESHOLD: u64 = 8 << 20;
/// The same for a key with the least room, in bytes.
const MIN_REWRITE_THRESHOLD: u64 = 64 << 10;

/// A home at work.
#[derive(Debug)]
pub(super) struct Session {
    partner: Arc<Partner>,
    seat: Seat,
    home: PathBuf,
    tier: Tier,
    contact: File,
    /// When the last answer was given, as long as it may not have been heard.
    answered: Option<SystemTime>,
    files: HashMap<u64, Found>,
    /// Blocks that are taken, by file.
    held: HashMap<u64, RangeMap<()>>,
    /// What is given up, and whose blocks are not given back yet.
    freed: Vec<(u64, Range<u64>)>,
    /// What could not be kept, by file, known or not, until its sync is asked for: what is kept of
    /// it later is not all.
    failed: HashMap<u64, String>,
    last: u64,
    _listed: Listed,
}

/// Checks what a cache says of itself: it becomes names of folders.
fn check(hello: &Hello) -> io::Result<()> {
    if hello.version != VERSION {
        return Err(other("the partner is of another version of kedge"));
    }
    let name: Result<Name, _> = hello.node.parse();
    let under = hello.under.as_os_str();
    let text = (1..=64).contains(&hello.token.len())
        && hello.token.chars().all(|it| it.is_ascii_hexdigit());
    if name.is_err() || !hello.under.is_absolute() || under.len() > 4096 || !text {
        return Err(other("the cache's name, folder or token is none"));
    }
    Ok(())
}

impl Session {
    pub(super) fn open(
        partner: &Arc<Partner>,
        key: &str,
        hello: &Hello,
        stream: &TcpStream,
    ) -> io::Result<Session> {
        check(hello)?;
        let of_key = partner.spec.folder.join(key);
        let folder = of_key.join(&hello.node);
        let wrong = |error: CacheError| other(error.to_string());
        let home = home_in(&folder, &hello.under);
        if !home.exists() && place::homes_of(&of_key) >= partner.limits.homes {
            return Err(other("this key has too many folders of caches here: recover some"));
        }
        private_folder(&of_key).and_then(|()| private_folder(&folder)).map_err(wrong)?;
        make_home(&home).map_err(wrong)?;
        let listed = partner.take_seat(&home, hello, stream)?;
        // Before anything of it is read.
        let mut seat = Seat::take(partner, key)?;
        let (tier, replay) = Tier::open(&TierSpec::nvme(folder, 0), &hello.under).map_err(wrong)?;
        seat.found_journal(tier.journal_length());
        let token = home.join(TOKEN);
        let before = fs::read_to_string(&token).unwrap_or_default();
        if before != hello.token && !replay.files.is_empty() {
            return Err(other(format!(
                "it has what an earlier cache of {:?} held: `kedge cache recover --partner {} \
                 --under {:?}` there first",
                hello.under,
                home.parent().and_then(Path::parent).unwrap_or(&home).display(),
                hello.under
            )));
        }
        fs::write(&token, &hello.token)?;
        // What was recovered in part before counts as the cache's again.
        let _ = fs::remove_file(home.join(place::BEGUN));
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let contact = options.open(home.join(CONTACT))?;
        sync_folder(&home)?;
        let mut session = Session {
            partner: partner.clone(),
            seat,
            home,
            tier,
            contact,
            answered: None,
            last: replay.last,
            files: replay.files,
            held: HashMap::new(),
            freed: Vec::new(),
            failed: HashMap::new(),
            _listed: listed,
        };
        session.begin()?;
        Ok(session)
    }

    fn begin(&mut self) -> io::Result<()> {
        self.rewrite()?;
        self.tier.mark_boot()?;
        let files = &self.files;
        self.tier.remove_others(|file| files.contains_key(&file))?;
        for (file, found) in &self.files {
            let held = self.held.entry(*file).or_default();
            for (range, _) in found.parts.iter() {
                held.insert(blocks_of(&range), ());
            }
        }
        let mut kept = Kept::default();
        self.files.values().for_each(|found| kept.add(Kept::of(found)));
        self.seat.begin(kept)
    }

    pub(super) fn serve(
        &mut self,
        connection: Connection,
        mut vouched: SessionOwner,
    ) -> io::Result<()> {
        let mut connection = BufReader::new(connection);
        // A cache that takes it slowly has given it up by then.
        connection.get_mut().write_until(Instant::now() + SILENCE);
        for (file, found) in &self.files {
            for (range, _) in found.parts.iter() {
                let record = Record::Write(*file, range.start, range.end - range.start);
                Said::Note(record).write(connection.get_mut())?;
            }
        }
        // This is no word of what was heard: the cache has told nothing as yet.
        Said::Done.write(connection.get_mut())?;
        loop {
            connection.get_mut().read_until(Instant::now() + SILENCE);
            let said = Said::read(&mut connection)?;
            vouched.check(self.partner.spec.keys.as_ref())?;
            // It has heard the answer before, or would not go on.
            if let Some(answered) = self.answered.take() {
                self.contact.set_modified(answered)?;
            }
            let answer = match said {
                Said::Note(record @ (Record::File(..) | Record::Clean(..) | Record::Drop(_))) => {
                    self.note(record)?;
                    continue;
                }
                Said::Data(file, offset, data) => {
                    if let Err(error) = self.keep(file, offset, &data) {
                        self.fail(file, &error)?;
                    }
                    self.compact()?;
                    continue;
                }
                Said::Sync(file) => match self.sync(file) {
                    Ok(()) => Said::Done,
                    Err(error) => Said::Failed(error.to_string()),
                },
                Said::Beat => {
                    self.give_back()?;
                    Said::Done
                }
                Said::End => {
                    self.end();
                    connection.get_mut().write_until(Instant::now() + SILENCE);
                    Said::Done.write(connection.get_mut())?;
                    return Ok(());
                }
                Said::Heard => continue,
                _ => return Err(other("it says what a cache does not")),
            };
            // Before the cache can know it: what it does below later is later than that.
            self.answered = Some(SystemTime::now());
            connection.get_mut().write_until(Instant::now() + SILENCE);
            answer.write(connection.get_mut())?;
        }
    }

    fn append(&mut self, record: &Record) -> io::Result<u64> {
        let number = self.last + 1;
        self.tier.append(number, record)?;
        self.last = number;
        self.seat.count_journal(self.tier.journal_length());
        Ok(number)
    }

    /// Notes what a cache says of a file: its name, or what of it is below.
    fn note(&mut self, record: Record) -> io::Result<()> {
        let (file, dropped) = match &record {
            Record::File(file, _) | Record::Clean(file, ..) => (*file, false),
            Record::Drop(file) => (*file, true),
            _ => return Ok(()),
        };
        let before = self.kept_of(file);
        match &record {
            Record::File(_, identity) => {
                if let Err(error) = self.check_name(before, &identity.path) {
                    return self.fail(file, &error);
                }
            }
            _ if before.files == 0 => {
                if dropped {
                    self.failed.remove(&file);
                }
                return Ok(());
            }
            // What is cut out of a part makes two of it, and must not be kept.
            Record::Clean(_, offset, length)
                if self.seat.parts() >= self.partner.limits.most_parts()
                    && self.is_within_part(file, *offset, *length) =>
            {
                return Err(other("it has the partner keep too many parts of files"));
            }
            Record::Clean(_, offset, length) => {
                self.freed.push((file, *offset..offset.saturating_add(*length)));
            }
            _ => self.freed.push((file, 0..u64::MAX)),
        }
        let number = self.append(&record)?;
        apply(&mut self.files, number, record);
        self.seat.replace(before, self.kept_of(file));
        if dropped {
            self.failed.remove(&file);
        }
        if self.freed.len() >= FREED {
            self.give_back()?;
        }
        self.compact()
    }

    /// Has the next sync of a file fail, also if there is room for the rest of it by then.
    ///
    /// # Errors
    /// There are too many such files.
    fn fail(&mut self, file: u64, error: &io::Error) -> io::Result<()> {
        if self.failed.len() >= FAILED && !self.failed.contains_key(&file) {
            return Err(other("it goes on with too many files that could not be kept"));
        }
        // What came first is why.
        self.failed.entry(file).or_insert_with(|| error.to_string());
        Ok(())
    }

    fn kept_of(&self, file: u64) -> Kept {
        self.files.get(&file).map_or(Kept::default(), Kept::of)
    }

    /// Returns whether one part reaches beyond both ends of a range.
    fn is_within_part(&self, file: u64, offset: u64, length: u64) -> bool {
        let around = offset.saturating_sub(1)..offset.saturating_add(length).saturating_add(1);
        let found = self.files.get(&file);
        let part = found.and_then(|found| found.parts.within(around.clone()).next());
        offset > 0 && part.is_some_and(|(part, _)| part == around)
    }

    /// Checks that a name can be kept for a file that has `before`.
    fn check_name(&self, before: Kept, path: &[u8]) -> io::Result<()> {
        if path.is_empty() || path.len() > NAME {
            return Err(other("the file's name is none, or too long for the partner"));
        }
        let after = Kept { files: 1, names: path.len(), ..before };
        self.seat.fits(before, after, RECORD + path.len() as u64)
    }

    /// Keeps bytes of a file that was named before.
    fn keep(&mut self, file: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.files.get(&file).is_none_or(|found| found.identity.is_none()) {
            return Err(other("the partner does not know the file"));
        }
        let before = self.kept_of(file);
        let more = Kept { parts: before.parts + 1, ..before };
        self.seat.fits(before, more, RECORD)?;
        let range = offset..offset + data.len() as u64;
        debug_assert!(range.end <= END);
        let blocks = blocks_of(&range);
        let gaps = match self.held.get(&file) {
            Some(held) => held.gaps(blocks.clone()),
            None => vec![blocks.clone()],
        };
        let more: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        self.seat.take_bytes(more)?;
        if let Err(error) = self.write(file, offset, data) {
            self.undo(file, &gaps);
            self.seat.give_bytes(more);
            return Err(error);
        }
        self.held.entry(file).or_default().insert(blocks, ());
        let record = Record::Write(file, offset, data.len() as u64);
        let number = self.append(&record)?;
        apply(&mut self.files, number, record);
        self.seat.replace(before, self.kept_of(file));
        Ok(())
    }

    fn write(&self, file: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        let shadow = self.tier.shadow(file)?;
        shadow.file().ok_or(io::ErrorKind::Unsupported)?.write_all_at(data, offset)
    }

    /// Gives back what a write that failed has taken of the disk, where nothing was before.
    fn undo(&self, file: u64, gaps: &[Range<u64>]) {
        let shadow = self.tier.shadow(file).ok();
        let Some(shadow) = shadow.as_ref().and_then(|shadow| shadow.file()) else { return };
        for range in gaps {
            punch(shadow, &Freed { tier: 0, range: range.clone() });
        }
    }

    /// Has the disk have all that was said of a file.
    fn sync(&mut self, file: u64) -> io::Result<()> {
        let failed = self.failed.remove(&file);
        if !self.files.contains_key(&file) {
            return Err(other("the partner does not know the file, or keeps no more of them"));
        }
        if let Some(why) = failed {
            self.tier.sync()?;
            return Err(other(why));
        }
        if self.kept_of(file).parts > 0 {
            let shadow = self.tier.shadow(file)?;
            shadow.file().ok_or(io::ErrorKind::Unsupported)?.sync_data()?;
            let last = self.last;
            self.append(&Record::Commit(file, last))?;
            self.tier.sync_names()?;
        }
        self.tier.sync()?;
        self.compact()
    }

    /// Writes a journal anew that has grown long.
    fn compact(&mut self) -> io::Result<()> {
        let room = self.partner.spec.quota.unwrap_or(u64::MAX) / 16;
        let long = room
            .clamp(MIN_REWRITE_THRESHOLD, MAX_REWRITE_THRESHOLD)
            .max(2 * self.seat.journal_of_kept());
        if self.tier.journal_length() > long { self.rewrite() } else { Ok(()) }
    }

    /// Gives blocks back that nothing needs, once the disk knows of that.
    fn give_back(&mut self) -> io::Result<()> {
        if self.freed.is_empty() {
            return Ok(());
        }
        self.tier.sync()?;
        for (file, range) in std::mem::take(&mut self.freed) {
            let mut needed = RangeMap::default();
            let range = blocks_of(&(range.start..range.end.min(END)));
            if let Some(found) = self.files.get(&file) {
                for (part, _) in found.parts.within(range.clone()) {
                    needed.insert(blocks_of(&part), ());
                }
            }
            let Some(held) = self.held.get_mut(&file) else { continue };
            let gaps = needed.gaps(range).into_iter();
            let gone: Vec<Range<u64>> =
                gaps.flat_map(|gap| held.remove(gap)).map(|(range, ())| range).collect();
            if held.is_empty() {
                self.held.remove(&file);
                self.tier.remove_shadow(file);
            } else if let Some(shadow) = self.tier.shadow(file)?.file() {
                gone.iter().for_each(|range| {
                    punch(shadow, &Freed { tier: 0, range: range.clone() });
                });
            }
            let bytes: u64 = gone.iter().map(|range| range.end - range.start).sum();
            self.seat.give_bytes(bytes);
        }
        Ok(())
    }

    /// Writes the journal anew, from what is kept.
    fn rewrite(&mut self) -> io::Result<()> {
        let mut records = Vec::new();
        let mut last = self.last;
        let mut next = || {
            last += 1;
            last
        };
        for (file, found) in &self.files {
            let Some(identity) = &found.identity else { continue };
            records.push((next(), Record::File(*file, identity.clone())));
            for (range, _) in found.parts.iter() {
                let write = Record::Write(*file, range.start, range.end - range.start);
                records.push((next(), write));
            }
            let number = next();
            records.push((number, Record::Commit(*file, number)));
        }
        self.last = last;
        self.tier.rewrite(&records)?;
        self.seat.count_journal(self.tier.journal_length());
        Ok(())
    }

    /// Removes all that was kept: it is below.
    fn end(&mut self) {
        self.files.clear();
        self.freed.clear();
        let held: u64 = self.held.drain().map(|(_, held)| held.total()).sum();
        self.seat.give_bytes(held);
        self.seat.count_journal(0);
        home::remove_one(&self.home);
        place::remove_empty(&self.home, &self.partner.spec.folder);
    }
}
