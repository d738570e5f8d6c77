//! The partner: keeps what the caches of other nodes send, for `kedge cache recover` there.
//!
//! Each cache has a home of the form of a local disk's tier, in a folder of its key and node:
//! `DIR/KEY/NODE`. A home is one session's at a time.

use super::home::{self as place, CONTACT, TOKEN};
use super::wire::{END, Hello, Said, VERSION};
use crate::CacheError;
use crate::extents::{Freed, blocks_of};
use crate::home;
use crate::journal::{Found, Record, apply};
use crate::ranges::RangeMap;
use crate::spec::{TierSpec, home_in};
use crate::tier::{Tier, lock, make_home, private_folder, punch, sync_folder};
use kedge_keys::{Connection, Fingerprint, Keys, Name, Whose};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Connections at a time.
const MOST: usize = 256;
/// How long a connection may take to say whose it is.
const OPENING: Duration = Duration::from_secs(10);
/// A cache says that it is there each second; after so long it is not.
const SILENCE: Duration = Duration::from_secs(30);
/// How often a key is looked at again.
const RECHECK: Duration = Duration::from_secs(1);
/// How long a home's session before may take to end.
const CHANGE: Duration = Duration::from_secs(5);
/// How long to wait where descriptors are used up.
const NAP: Duration = Duration::from_millis(500);
/// Files of one cache.
const FILES: usize = 1 << 20;
/// Parts of all files of one cache.
pub(super) const PARTS: usize = 1 << 20;
/// Ranges that wait to be given back.
const FREED: usize = 1 << 16;
/// Caches of one key at a time.
const SESSIONS: usize = 64;
/// A journal is written anew when it is that long.
const LONG_JOURNAL: u64 = 8 << 20;
/// The folder of caches on this machine, which show no key. No key has such a name.
const HERE: &str = "_here";

/// What a partner is asked to be.
#[derive(Debug)]
pub struct PartnerSpec {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where it keeps what it is sent.
    pub folder: PathBuf,
    /// Bytes that it keeps for each key.
    pub quota: Option<u64>,
    /// Who may connect; needed unless it listens on this machine alone.
    pub keys: Option<Keys>,
}

/// The sessions of one key.
#[derive(Debug, Default)]
struct Account {
    sessions: usize,
    used: u64,
}

/// A partner that listens.
#[derive(Debug)]
pub struct Partner {
    spec: PartnerSpec,
    listener: TcpListener,
    open: AtomicUsize,
    accounts: Mutex<HashMap<String, Account>>,
    /// The session of each home: whose cache it is, and its connection.
    homes: Mutex<HashMap<PathBuf, (String, TcpStream)>>,
}

fn other(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

impl Partner {
    /// Begins to listen.
    ///
    /// # Errors
    /// If that address or the folder cannot be had, or others can connect and there are no keys.
    pub fn bind(spec: PartnerSpec) -> Result<Arc<Partner>, CacheError> {
        if !spec.listen.ip().is_loopback() {
            let no_keys = |error: kedge_keys::KeyError| {
                CacheError::Tier(format!(
                    "{} is reached from other machines, so connections need keys: {error}",
                    spec.listen
                ))
            };
            let keys = spec.keys.as_ref().ok_or(kedge_keys::KeyError::NoIdentity);
            keys.and_then(Keys::identity).map_err(no_keys)?;
        }
        place::check(&spec.folder)?;
        let at = spec.listen.to_string();
        let listener = TcpListener::bind(spec.listen)
            .map_err(|error| CacheError::io("cannot listen at", Path::new(&at), error))?;
        let (open, accounts, homes) = Default::default();
        Ok(Arc::new(Partner { spec, listener, open, accounts, homes }))
    }

    /// Returns where it listens.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Keeps what it is sent, until the process ends; `say` is told what happens.
    pub fn serve(self: &Arc<Partner>, say: fn(&str)) {
        for stream in self.listener.incoming() {
            // Where descriptors are used up, some come back.
            let Ok(stream) = stream else {
                thread::sleep(NAP);
                continue;
            };
            if self.open.fetch_add(1, Ordering::SeqCst) >= MOST {
                self.open.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let own = self.clone();
            let serve = move || {
                let from = stream.peer_addr().map_or_else(|_| "?".into(), |from| from.to_string());
                let ended = own.session(stream, say);
                own.open.fetch_sub(1, Ordering::SeqCst);
                if let Err(error) = ended {
                    let why: String =
                        error.to_string().chars().filter(|it| !it.is_control()).collect();
                    say(&format!("{from}: {why}"));
                }
            };
            if thread::Builder::new().name("session".into()).spawn(serve).is_err() {
                self.open.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Finds out whose a connection is: a pinned key's, or this user's own from this machine.
    fn identify(&self, mut stream: TcpStream) -> io::Result<(Vouched, Connection)> {
        stream.set_nodelay(true)?;
        if stream.peer_addr()?.ip().to_canonical().is_loopback() {
            return match kedge_keys::whose(&stream)? {
                Whose::Own => Ok((Vouched::here(), stream.into())),
                _ => Err(other("a connection of another user: refused")),
            };
        }
        let keys = self.spec.keys.as_ref().ok_or_else(|| other("there are no keys"))?;
        // Read for each connection: what is revoked meanwhile counts.
        let (own, pins) = (keys.identity().map_err(io::Error::other)?, keys.pins());
        let pins = Arc::new(pins.map_err(io::Error::other)?);
        let (name, secrets) =
            kedge_keys::accept(&mut stream, &own, &pins, OPENING).map_err(io::Error::other)?;
        let certificate = pins.fingerprint(&name).ok_or_else(|| other("its key is revoked"))?;
        let shown = Some((name.clone(), certificate));
        let vouched = Vouched { key: name.to_string(), shown, checked: Instant::now() };
        Ok((vouched, Connection::new(stream, Some(secrets))?))
    }

    fn session(self: &Arc<Partner>, stream: TcpStream, say: fn(&str)) -> io::Result<()> {
        stream.set_read_timeout(Some(OPENING))?;
        stream.set_write_timeout(Some(OPENING))?;
        let (vouched, mut connection) = self.identify(stream)?;
        let key = vouched.key.clone();
        connection.read_until(Instant::now() + OPENING);
        let Said::Hello(hello) = Said::read(&mut connection)? else {
            return Err(other("it does not say whose cache it is"));
        };
        match Session::open(self, &key, &hello, connection.stream()) {
            Ok(mut session) => {
                say(&format!("{key}: the cache of {:?} of {}", hello.under, hello.node));
                session.serve(connection, vouched)
            }
            Err(error) => {
                Said::Failed(error.to_string()).write(&mut connection)?;
                Err(error)
            }
        }
    }
}

/// Whose a session is.
#[derive(Debug)]
struct Vouched {
    key: String,
    /// What was shown for it, unless the session is of this machine.
    shown: Option<(Name, Fingerprint)>,
    checked: Instant,
}

impl Vouched {
    fn here() -> Vouched {
        Vouched { key: HERE.into(), shown: None, checked: Instant::now() }
    }

    /// Checks once a second that what was shown is still pinned, and not revoked.
    fn check(&mut self, keys: Option<&Keys>) -> io::Result<()> {
        let Some((name, certificate)) = &self.shown else { return Ok(()) };
        let since = self.checked.elapsed();
        if since < RECHECK {
            return Ok(());
        }
        match keys.map(Keys::pins) {
            Some(Ok(pins)) if pins.counts(name, *certificate) => self.checked = Instant::now(),
            // For a moment they may not be readable.
            Some(Err(_)) if since < SILENCE => {}
            _ => return Err(other("its key is pinned no more: refused")),
        }
        Ok(())
    }
}

/// A home at work.
#[derive(Debug)]
struct Session {
    partner: Arc<Partner>,
    key: String,
    token: String,
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
    /// What could not be kept, by file, until its sync is asked for.
    failed: HashMap<u64, String>,
    parts: usize,
    last: u64,
    long_journal: u64,
    counted: bool,
    _lock: Option<File>,
}

/// Checks what a cache says of itself: it becomes names of folders.
fn check(hello: &Hello) -> io::Result<()> {
    if hello.version != VERSION {
        return Err(other("the partner is of another version of kedge"));
    }
    let name: Result<Name, _> = hello.node.parse();
    let under = hello.under.as_os_str();
    let text = hello.token.len() <= 64 && hello.token.chars().all(|it| it.is_ascii_hexdigit());
    if name.is_err() || !hello.under.is_absolute() || under.len() > 4096 || !text {
        return Err(other("the cache's name, folder or token is none"));
    }
    Ok(())
}

impl Session {
    fn open(
        partner: &Arc<Partner>,
        key: &str,
        hello: &Hello,
        stream: &TcpStream,
    ) -> io::Result<Session> {
        check(hello)?;
        let of_key = partner.spec.folder.join(key);
        let folder = of_key.join(&hello.node);
        let wrong = |error: CacheError| other(error.to_string());
        private_folder(&of_key).and_then(|()| private_folder(&folder)).map_err(wrong)?;
        let home = home_in(&folder, &hello.under);
        make_home(&home).map_err(wrong)?;
        let lock = partner.take(&home, hello)?;
        let (tier, replay) = Tier::open(&TierSpec::nvme(folder, 0), &hello.under).map_err(wrong)?;
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
        let stream = stream.try_clone()?;
        lock_homes(partner).insert(home.clone(), (hello.token.clone(), stream));
        let mut session = Session {
            partner: partner.clone(),
            key: key.to_owned(),
            token: hello.token.clone(),
            home,
            tier,
            contact,
            answered: None,
            last: replay.last,
            files: replay.files,
            held: HashMap::new(),
            freed: Vec::new(),
            failed: HashMap::new(),
            parts: 0,
            long_journal: LONG_JOURNAL,
            counted: false,
            _lock: Some(lock),
        };
        session.begin(&of_key)?;
        Ok(session)
    }

    fn begin(&mut self, of_key: &Path) -> io::Result<()> {
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
        self.parts = self.files.values().map(|found| found.parts.len()).sum();
        let mut accounts = lock(&self.partner.accounts);
        let account = accounts.entry(self.key.clone()).or_default();
        if account.sessions == 0 {
            // Others may have recovered some of it since.
            account.used = place::size_of(of_key);
        }
        if account.sessions >= SESSIONS {
            return Err(other("this key has too many caches here"));
        }
        account.sessions += 1;
        self.counted = true;
        Ok(())
    }

    fn serve(&mut self, connection: Connection, mut vouched: Vouched) -> io::Result<()> {
        let mut connection = BufReader::new(connection);
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
                    let kept = self.keep(file, offset, &data);
                    // A sync of a file that is not known fails anyway.
                    if let Err(error) = kept
                        && self.files.contains_key(&file)
                    {
                        self.failed.insert(file, error.to_string());
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
                    Said::Done.write(connection.get_mut())?;
                    return Ok(());
                }
                Said::Heard => continue,
                _ => return Err(other("it says what a cache does not")),
            };
            // Before the cache can know it: what it does below later is later than that.
            self.answered = Some(SystemTime::now());
            answer.write(connection.get_mut())?;
        }
    }

    fn append(&mut self, record: &Record) -> io::Result<u64> {
        let number = self.last + 1;
        self.tier.append(number, record)?;
        self.last = number;
        Ok(number)
    }

    /// Notes what a cache says of a file: its name, or what of it is below.
    fn note(&mut self, record: Record) -> io::Result<()> {
        match &record {
            Record::File(file, _) => {
                let known = self.files.contains_key(file);
                if !known && self.files.len() >= FILES {
                    return Ok(());
                }
            }
            Record::Clean(file, ..) | Record::Drop(file) if !self.files.contains_key(file) => {
                return Ok(());
            }
            Record::Clean(file, offset, length) => {
                self.freed.push((*file, *offset..offset.saturating_add(*length)));
            }
            Record::Drop(file) => self.freed.push((*file, 0..u64::MAX)),
            _ => {}
        }
        let number = self.append(&record)?;
        let (file, dropped) = match &record {
            Record::File(file, _) | Record::Clean(file, ..) => (*file, false),
            Record::Drop(file) => (*file, true),
            _ => return Ok(()),
        };
        let before = self.parts_of(file);
        apply(&mut self.files, number, record);
        self.parts = self.parts - before + self.parts_of(file);
        if dropped {
            self.failed.remove(&file);
        }
        if self.freed.len() >= FREED {
            self.give_back()?;
        }
        self.compact()
    }

    fn parts_of(&self, file: u64) -> usize {
        self.files.get(&file).map_or(0, |found| found.parts.len())
    }

    /// Keeps bytes of a file that was named before.
    fn keep(&mut self, file: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        let named = self.files.get(&file).is_some_and(|found| found.identity.is_some());
        if !named || self.parts >= PARTS {
            return Err(other("the partner keeps no more parts, or does not know the file"));
        }
        let range = offset..offset + data.len() as u64;
        debug_assert!(range.end <= END);
        let blocks = blocks_of(&range);
        let held = self.held.entry(file).or_default();
        let gaps = held.gaps(blocks.clone());
        let more: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        {
            let mut accounts = lock(&self.partner.accounts);
            let account = accounts.entry(self.key.clone()).or_default();
            if self.partner.spec.quota.is_some_and(|most| account.used + more > most) {
                return Err(other("the partner has no more room for this key"));
            }
            account.used += more;
        }
        held.insert(blocks, ());
        let shadow = self.tier.shadow(file)?;
        let shadow = shadow.file().ok_or(io::ErrorKind::Unsupported)?;
        shadow.write_all_at(data, offset)?;
        let record = Record::Write(file, offset, data.len() as u64);
        let number = self.append(&record)?;
        let before = self.parts_of(file);
        apply(&mut self.files, number, record);
        self.parts = self.parts - before + self.parts_of(file);
        Ok(())
    }

    /// Has the disk have all that was said of a file.
    fn sync(&mut self, file: u64) -> io::Result<()> {
        if !self.files.contains_key(&file) {
            return Err(other("the partner does not know the file, or keeps no more of them"));
        }
        if let Some(why) = self.failed.remove(&file) {
            self.tier.sync()?;
            return Err(other(why));
        }
        if self.parts_of(file) > 0 {
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
        if self.tier.journal_length() > self.long_journal {
            self.rewrite()?;
            self.long_journal = LONG_JOURNAL.max(2 * self.tier.journal_length());
        }
        Ok(())
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
            if let Some(account) = lock(&self.partner.accounts).get_mut(&self.key) {
                account.used = account.used.saturating_sub(bytes);
            }
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
        self.tier.rewrite(&records)
    }

    /// Removes all that was kept: it is below.
    fn end(&mut self) {
        self.files.clear();
        self.freed.clear();
        let held: u64 = self.held.drain().map(|(_, held)| held.total()).sum();
        if let Some(account) = lock(&self.partner.accounts).get_mut(&self.key) {
            account.used = account.used.saturating_sub(held);
        }
        home::remove_one(&self.home);
        place::remove_empty(&self.home, &self.partner.spec.folder);
    }
}

fn lock_homes(
    partner: &Partner,
) -> std::sync::MutexGuard<'_, HashMap<PathBuf, (String, TcpStream)>> {
    lock(&partner.homes)
}

impl Partner {
    /// Takes a home for a session. That of the same cache before, whose connection may hang, ends.
    fn take(&self, home: &Path, hello: &Hello) -> io::Result<File> {
        let begin = Instant::now();
        loop {
            match home::take(home, &hello.under) {
                Ok(lock) => return Ok(lock),
                Err(CacheError::Busy(_)) if begin.elapsed() < CHANGE => {}
                Err(CacheError::Busy(_)) => {
                    return Err(other("another cache, or a recovery, has its folder there"));
                }
                Err(error) => return Err(other(error.to_string())),
            }
            if let Some((token, stream)) = lock_homes(self).get(home)
                && *token == hello.token
            {
                // It may have ended.
                let _ = stream.shutdown(Shutdown::Both);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.counted
            && let Some(account) = lock(&self.partner.accounts).get_mut(&self.key)
        {
            account.sessions -= 1;
        }
        let mut homes = lock_homes(&self.partner);
        if homes.get(&self.home).is_some_and(|(token, _)| *token == self.token) {
            homes.remove(&self.home);
        }
    }
}

/// Says that something happened, on standard error.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "kedge: {text}");
}

/// Returns the bytes of a file's blocks.
pub(super) fn blocks(meta: &fs::Metadata) -> u64 {
    meta.blocks().saturating_mul(512)
}
