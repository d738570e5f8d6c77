//! A tier's folder: shadows of files, and the journal.

use crate::CacheError;
use crate::device::{self, Device};
use crate::extents::Freed;
use crate::home;
use crate::journal::{self, Record, Replay};
use crate::partner::home::{self as partner, Contact};
use crate::shadow::Shadow;
use crate::spec::{self, DeviceSpec, Medium, TierSpec};
use kedge_cache_lease::{Page, Slot};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const JOURNAL: &str = "journal";
const BOOT: &str = "boot";
/// Whose places a device's journal tells of.
const HOLDER: &str = "holder-number";

/// Locks, also after a panic of another thread: the kernel's callers must be answered.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Space that a journal keeps to itself for records that free: a full file system must not keep
/// the cache from giving back what it has drained.
const RESERVE: u64 = 64 << 10;
/// Space is taken for so much at once.
const STEP: u64 = 256 << 10;

/// The journal's file.
#[derive(Debug)]
struct Journal {
    file: File,
    length: u64,
    /// Up to where the file system has space for it.
    reserved: u64,
    /// Whether a part of a record may lie behind the last one.
    torn: bool,
    /// Whether it says of something that another place has it, and the disk may not know.
    unsynced: bool,
}

impl Journal {
    fn new(file: File, length: u64) -> Journal {
        Journal { file, length, reserved: 0, torn: false, unsynced: false }
    }

    fn append(&mut self, bytes: &[u8], frees: bool) -> io::Result<()> {
        if self.torn {
            self.cut()?;
        }
        if !frees {
            self.reserve(bytes.len() as u64)?;
        }
        if let Err(error) = self.file.write_all(bytes) {
            self.torn = true;
            let _ = self.cut();
            return Err(error);
        }
        self.length += bytes.len() as u64;
        self.unsynced |= frees;
        Ok(())
    }

    /// Removes what a failed write has left.
    fn cut(&mut self) -> io::Result<()> {
        self.file.set_len(self.length)?;
        // The space behind is gone as well.
        (self.torn, self.reserved) = (false, 0);
        Ok(())
    }

    fn reserve(&mut self, more: u64) -> io::Result<()> {
        if self.length + more + RESERVE <= self.reserved {
            return Ok(());
        }
        let space = more + RESERVE + STEP;
        match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.length, space) {
            Ok(()) => self.reserved = self.length + space,
            // That file system gives no such word.
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// A tier at work.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) medium: Medium,
    pub(crate) folder: PathBuf,
    journal: Mutex<Journal>,
    /// The device that has what the tier holds; that of one that is left may have gone.
    pub(crate) device: Option<Arc<Device>>,
    /// When a partner was told of last what it holds; `None` of a tier of this node's own.
    pub(crate) contact: Option<Contact>,
    /// What programs have written into it by themselves; `None` where they do not.
    pub(crate) page: Option<Page>,
}

/// Makes a private folder, or finds it; it must be this user's.
pub(crate) fn private_folder(path: &Path) -> Result<(), CacheError> {
    let failed = |source| CacheError::io("cannot make", path, source);
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let meta = fs::symlink_metadata(path).map_err(failed)?;
    let own = meta.uid() == rustix::process::geteuid().as_raw();
    if !meta.is_dir() || !own || meta.mode() & 0o077 != 0 {
        return Err(CacheError::Tier(format!(
            "{} is not a private folder of this user: remove it",
            path.display()
        )));
    }
    Ok(())
}

/// Makes the folder of a cache, and the one around it.
pub(crate) fn make_home(home: &Path) -> Result<(), CacheError> {
    if let Some(around) = home.parent() {
        if let Some(folder) = around.parent() {
            check_folder(folder)?;
        }
        private_folder(around)?;
    }
    private_folder(home)
}

/// Checks that nobody else can put another folder in the place of a private one.
pub(crate) fn check_folder(folder: &Path) -> Result<(), CacheError> {
    let meta = fs::metadata(folder)
        .map_err(|error| CacheError::io("cannot use the tier's folder", folder, error))?;
    let user = rustix::process::geteuid().as_raw();
    let sticky = meta.mode() & 0o1000 != 0;
    if (meta.uid() != user && meta.uid() != 0) || (meta.mode() & 0o022 != 0 && !sticky) {
        return Err(CacheError::Tier(format!(
            "other users can replace what is in {}: have its owner be root or this user, and others \
             not write there, or make it sticky",
            folder.display()
        )));
    }
    Ok(())
}

/// Has the disk know the names in a folder.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

impl Tier {
    /// Opens the tier of a cache of `under`, and reads what its journal says.
    pub(crate) fn open(spec: &TierSpec, under: &Path) -> Result<(Tier, Replay), CacheError> {
        let at = spec::home_in(&spec.folder, under);
        make_home(&at)?;
        let folder = at.join(match spec.medium {
            Medium::Gpu => home::DEVICE,
            Medium::Ram | Medium::Nvme => home::TIER,
        });
        private_folder(&folder)?;
        let path = folder.join(JOURNAL);
        let failed = |source| CacheError::io("cannot use", &path, source);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(failed)?;
        let before = fs::read_to_string(folder.join(BOOT)).ok();
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            other => other.map_err(failed)?,
        };
        let durable = spec.medium == Medium::Nvme;
        let rebooted = before.map_or(durable, |before| before != boot);
        let page = (spec.medium == Medium::Ram).then(|| Page::make(&folder));
        let page = page.transpose().map_err(failed)?;
        // A program that writes still, and has seen its daemon end, ends here.
        let leased = page.as_ref().map(written_by_programs).unwrap_or_default();
        let replay = journal::replay(&bytes, rebooted, &leased).map_err(|journal::Unknown| {
            CacheError::Tier(format!(
                "{} is of another version of kedge: recover what it holds with that one",
                path.display()
            ))
        })?;
        let file = append_to(&path).map_err(failed)?;
        let journal = Mutex::new(Journal::new(file, bytes.len() as u64));
        let contact = partner::contact(&at).map_err(failed)?;
        let medium = spec.medium;
        let tier = Tier { medium, folder, journal, device: None, contact, page };
        if durable {
            // The names above it, which nobody else syncs.
            for above in tier.folder.ancestors().skip(1).take(3) {
                sync_folder(above).map_err(failed)?;
            }
        }
        Ok((tier, replay))
    }

    /// Finds the device of its tier, or has it held. What the journal says of the places of another
    /// holder is lost: `replay` keeps what counts, and what does not is returned.
    pub(crate) fn open_device(
        &mut self,
        spec: Option<&DeviceSpec>,
        bytes: u64,
        replay: &mut Replay,
    ) -> Result<Replay, CacheError> {
        let known = self
            .known_holder()
            .map_err(|error| CacheError::io("cannot read", &self.folder.join(HOLDER), error))?;
        let device = Device::open(spec, &self.folder.join(device::SOCKET), bytes)?;
        let is_known = |device: &Device| known == device.number().to_string();
        let lost = match device.as_ref().is_some_and(is_known) {
            true => Replay::default(),
            false => Replay { files: std::mem::take(&mut replay.files), last: replay.last },
        };
        self.device = device.map(Arc::new);
        Ok(lost)
    }

    /// Returns of which holder the journal is; nothing if it is of none.
    fn known_holder(&self) -> io::Result<String> {
        match fs::read_to_string(self.folder.join(HOLDER)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            other => other,
        }
    }

    /// Says of which holder the journal is, once it was written anew.
    ///
    /// A daemon that is killed meanwhile, or has no space for it, leaves what was said before.
    pub(crate) fn mark_holder(&self) -> io::Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let number = device.number().to_string();
        if self.known_holder()? == number {
            return Ok(());
        }
        let new = self.folder.join("holder-number.new");
        fs::write(&new, number)?;
        fs::rename(new, self.folder.join(HOLDER))
    }

    /// Says that the journal is of this boot, once it was written anew.
    pub(crate) fn mark_boot(&self) -> io::Result<()> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let mut file = File::create(self.folder.join(BOOT))?;
        file.write_all(boot.as_bytes())?;
        if self.is_durable() { file.sync_all() } else { Ok(()) }
    }

    /// Returns whether the tier lies behind another one, in a device's memory.
    pub(crate) fn is_behind(&self) -> bool {
        self.medium == Medium::Gpu
    }

    /// Returns whether what the tier holds survives a reboot.
    pub(crate) fn is_durable(&self) -> bool {
        self.medium == Medium::Nvme
    }

    fn shadow_path(&self, file: u64) -> PathBuf {
        self.folder.join(kedge_cache_lease::shadow_name(file))
    }

    /// Opens the shadow of a file.
    pub(crate) fn shadow(&self, file: u64) -> io::Result<Shadow> {
        if self.medium == Medium::Gpu {
            return Ok(Shadow::device());
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let opened = rustix::fs::open(self.shadow_path(file), flags, mode)?;
        Ok(Shadow::File(Arc::new(File::from(opened))))
    }

    /// Gives the shadow of a file the number `to` as well; the first one stays until the journal
    /// says so. One that is not there is missed when its bytes are.
    pub(crate) fn join(&self, from: u64, to: u64) -> io::Result<()> {
        if self.medium == Medium::Gpu {
            // The journal alone knows whose a place is.
            return Ok(());
        }
        let (from, to) = (self.shadow_path(from), self.shadow_path(to));
        let mut linked = fs::hard_link(&from, &to);
        if linked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            // A daemon that was killed before its journal said so may have left it.
            fs::remove_file(&to)?;
            linked = fs::hard_link(&from, &to);
        }
        match linked {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the shadow of a file.
    pub(crate) fn remove_shadow(&self, file: u64) {
        // A shadow that stays is removed when the next daemon starts.
        let _ = fs::remove_file(self.shadow_path(file));
    }

    /// Removes all shadows but those of `keep`.
    pub(crate) fn remove_others(&self, keep: impl Fn(u64) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let name = entry.file_name();
            let number = name.to_str().filter(|name| name.len() == 16);
            if let Some(Ok(file)) = number.map(|name| u64::from_str_radix(name, 16))
                && !keep(file)
            {
                self.remove_shadow(file);
            }
        }
        Ok(())
    }

    /// Appends a record.
    ///
    /// # Errors
    /// If there is no space for it; the journal is what it was then.
    pub(crate) fn append(&self, number: u64, record: &Record) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(64);
        record.encode(number, &mut bytes);
        lock(&self.journal).append(&bytes, record.frees())
    }

    /// The same of a record that must not be missed for want of space: an earlier one took it.
    pub(crate) fn append_promised(&self, number: u64, record: &Record) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(64);
        record.encode(number, &mut bytes);
        lock(&self.journal).append(&bytes, true)
    }

    /// Forgets the leases of a daemon before, once the journal was written anew.
    pub(crate) fn free_slots(&self) {
        let slots = self.page.iter().flat_map(|page| page.slots());
        slots.for_each(Slot::free);
    }

    /// Has the disk know all that the journal says.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let file = {
            let mut journal = lock(&self.journal);
            journal.unsynced = false;
            journal.file.try_clone()?
        };
        file.sync_data().inspect_err(|_| lock(&self.journal).unsynced = true)
    }

    /// Has the disk know what other places have, if it does not.
    ///
    /// Otherwise what is newer below would be overwritten from here after a power cut.
    pub(crate) fn sync_cleans(&self) -> io::Result<()> {
        let unsynced = lock(&self.journal).unsynced;
        if self.is_durable() && unsynced { self.sync() } else { Ok(()) }
    }

    /// Returns whether a power cut may take records that free.
    #[cfg(test)]
    pub(crate) fn has_unsynced_cleans(&self) -> bool {
        lock(&self.journal).unsynced
    }

    /// Leaves a part of a record at the journal's end, as a full file system does.
    #[cfg(test)]
    pub(crate) fn tear(&self) {
        let mut journal = lock(&self.journal);
        let mut bytes = Vec::new();
        Record::Write(1, 0, 1 << 40).encode(1, &mut bytes);
        journal.file.write_all(&bytes[..20]).expect("a journal");
        journal.torn = true;
    }

    /// Has the disk know the names of new shadows.
    pub(crate) fn sync_names(&self) -> io::Result<()> {
        sync_folder(&self.folder)
    }

    /// Returns how long the journal is.
    pub(crate) fn journal_length(&self) -> u64 {
        lock(&self.journal).length
    }

    /// Replaces the journal by these records. Nobody may append meanwhile.
    pub(crate) fn rewrite(&self, records: &[(u64, Record)]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (number, record) in records {
            record.encode(*number, &mut bytes);
        }
        if self.is_durable() {
            rustix::fs::syncfs(File::open(&self.folder)?)?;
        }
        let (path, new) = (self.folder.join(JOURNAL), self.folder.join("journal.new"));
        let _ = fs::remove_file(&new);
        let mut file = append_to(&new)?;
        file.write_all(&bytes)?;
        if self.is_durable() {
            file.sync_all()?;
        }
        fs::rename(&new, &path)?;
        // From now on it is the one that is read, whether or not the disk knows its name.
        *lock(&self.journal) = Journal::new(file, bytes.len() as u64);
        if self.is_durable() { self.sync_names() } else { Ok(()) }
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Ends what programs write by themselves, and returns how much that was, by the number of the
/// record that tells of it.
fn written_by_programs(page: &Page) -> HashMap<u64, u64> {
    let slots = page.slots().iter();
    slots.filter_map(|slot| Some((slot.record()?, slot.end(kedge_cache_lease::LENGTH)))).collect()
}

/// Gives blocks of a shadow back to the system.
pub(crate) fn punch(shadow: &File, freed: &Freed) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let length = freed.range.end - freed.range.start;
    // A tier's file system that cannot punch holes gives all back when the file is clean.
    let _ = rustix::fs::fallocate(shadow, flags, freed.range.start, length);
}
