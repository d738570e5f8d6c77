//! The folders in which a cache keeps its things: their locks, and what they say of it.

use crate::CacheError;
use crate::spec::{Spec, TierSpec, home_in, memory_home};
use crate::tier::{make_home, sync_folder};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const SPEC: &str = "cache.json";
/// The folder of a tier in a home.
pub(crate) const TIER: &str = "tier";
/// That of a device's tier, in the home in memory.
pub(crate) const DEVICE: &str = "device";
/// So many homes of another user are looked at.
const OF_ONE: usize = 64;
/// How often a lock is tried that was removed meanwhile by the daemon before.
const TRIES: u32 = 100;

fn failed(path: &Path, error: impl Into<io::Error>) -> CacheError {
    CacheError::io("cannot use", path, error)
}

/// Takes a home for this process: its lock is free when the process ends, however it does.
///
/// # Errors
/// If another daemon has it.
pub(crate) fn take(home: &Path, under: &Path) -> Result<File, CacheError> {
    let path = home.join(LOCK);
    let mut missed = CacheError::Busy(under.to_owned());
    for _ in 0..TRIES {
        // The daemon before removes its home at its end.
        match make_home(home) {
            Err(CacheError::Io { what, path, source })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                missed = CacheError::Io { what, path, source };
                continue;
            }
            made => made?,
        }
        let mut options = File::options();
        let file = match options.write(true).create(true).truncate(false).mode(0o600).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file.map_err(|error| failed(&path, error))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CacheError::Busy(under.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(&path, error)),
        }
        let same = |meta: fs::Metadata| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
        };
        if fs::metadata(&path).is_ok_and(same) {
            return Ok(file);
        }
    }
    Err(missed)
}

/// Returns whether a daemon was killed, and has left what it held in memory.
pub(crate) fn is_killed(under: &Path) -> bool {
    let home = memory_home(under);
    (home.join(SPEC).exists() || holds(&home))
        && File::open(home.join(LOCK)).is_ok_and(|file| file.try_lock().is_ok())
}

/// Returns the folders that this user caches on this machine, by daemons that run or were killed,
/// in their order. What another user has put in the place of ours counts for nothing.
pub(crate) fn folders() -> Vec<PathBuf> {
    let Some(around) = memory_home(Path::new("/any")).parent().map(Path::to_owned) else {
        return Vec::new();
    };
    let user = rustix::process::geteuid().as_raw();
    let ours = fs::symlink_metadata(&around)
        .is_ok_and(|meta| meta.is_dir() && meta.uid() == user && meta.mode() & 0o077 == 0);
    let homes = if ours { fs::read_dir(&around).ok() } else { None };
    let under = |home: fs::DirEntry| {
        let text = fs::read(home.path().join(SPEC)).ok()?;
        serde_json::from_slice::<Spec>(&text).ok().map(|spec| spec.under)
    };
    let mut folders: Vec<_> = homes.into_iter().flatten().flatten().filter_map(under).collect();
    folders.sort();
    folders
}

/// Returns the homes in memory of other users' caches, and whose they are: in folders that are
/// theirs by name and by owner, and that nobody else can change.
pub(crate) fn of_others() -> Vec<(u32, PathBuf)> {
    let own = rustix::process::geteuid().as_raw();
    let around = memory_home(Path::new("/any"));
    let Some(memory) = around.parent().and_then(Path::parent) else { return Vec::new() };
    let mut homes = Vec::new();
    for folder in fs::read_dir(memory).into_iter().flatten().flatten() {
        let name = folder.file_name();
        let user = name.to_str().and_then(|name| name.strip_prefix("kedge-cache-")?.parse().ok());
        let Some(user) = user.filter(|user| *user != own) else { continue };
        let theirs = fs::symlink_metadata(folder.path())
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == user && meta.mode() & 0o077 == 0);
        let inner = if theirs { fs::read_dir(folder.path()).ok() } else { None };
        let inner = inner.into_iter().flatten().flatten().take(OF_ONE);
        homes.extend(inner.map(|home| (user, home.path())));
    }
    homes.sort();
    homes
}

/// Returns whether a tier was in a home.
pub(crate) fn holds(home: &Path) -> bool {
    home.join(TIER).exists() || home.join(DEVICE).exists()
}

/// Returns all homes of a cache, that in memory first.
pub(crate) fn homes(spec: &Spec) -> Vec<PathBuf> {
    let mut homes = vec![memory_home(&spec.under)];
    for tier in &spec.tiers {
        let home = home_in(&tier.folder, &spec.under);
        if !homes.contains(&home) {
            homes.push(home);
        }
    }
    homes
}

/// Takes the homes of all tiers; that in memory is taken already.
pub(crate) fn take_others(spec: &Spec) -> Result<Vec<File>, CacheError> {
    homes(spec).iter().skip(1).map(|home| take(home, &spec.under)).collect()
}

/// Writes down what the cache is, for whoever finds it: all of it, or what was there before.
pub(crate) fn save(spec: &Spec) -> Result<(), CacheError> {
    let text = serde_json::to_vec_pretty(spec).map_err(io::Error::from);
    let text = text.map_err(|error| failed(&spec.under, error))?;
    for home in homes(spec) {
        make_home(&home)?;
        let (path, new) = (home.join(SPEC), home.join("cache.json.new"));
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            sync_folder(&home)
        };
        write().map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// Reads what a cache was, from its memory or from a folder of a local disk.
///
/// # Errors
/// If that is damaged wherever it is.
pub(crate) fn saved(under: &Path, disks: &[PathBuf]) -> Result<Option<Spec>, CacheError> {
    let disks = disks.iter().map(|folder| home_in(folder, under));
    let mut damaged = None;
    for home in std::iter::once(memory_home(under)).chain(disks) {
        let path = home.join(SPEC);
        match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(spec) => return Ok(Some(spec)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !holds(&home) => {}
            Err(error) => damaged = Some(CacheError::Damaged { path, why: error.to_string() }),
        }
    }
    damaged.map_or(Ok(None), Err)
}

/// Adds tiers on disks that are named and that the last daemon did not have: one before a reboot
/// may have left something there.
///
/// # Errors
/// If there are more than a cache may have.
pub(crate) fn with_disks(mut spec: Spec, disks: &[PathBuf]) -> Result<Spec, CacheError> {
    for folder in disks.iter().filter(|folder| holds(&home_in(folder, &spec.under))) {
        let disk = TierSpec::nvme(folder.clone(), 0);
        if !spec.tiers.iter().any(|tier| tier.is_same(&disk)) {
            spec.tiers.push(disk);
        }
    }
    spec.check_count()?;
    Ok(spec)
}

/// Adds the tiers of a killed daemon that are not asked for this time: they may hold data.
///
/// # Errors
/// If there are more than a cache may have.
pub(crate) fn with_left_tiers(mut spec: Spec) -> Result<Spec, CacheError> {
    let disks: Vec<PathBuf> = spec.tiers.iter().map(|tier| tier.folder.clone()).collect();
    let before = match saved(&spec.under, &disks) {
        Ok(before) => before.map_or(Vec::new(), |saved| saved.tiers),
        // Tiers that are named are taken over whatever that file said; so is the one in memory.
        Err(CacheError::Damaged { .. }) => {
            let home = memory_home(&spec.under);
            let found = [(TIER, TierSpec::ram(0)), (DEVICE, TierSpec::gpu(0))].into_iter();
            found.filter(|(name, _)| home.join(name).exists()).map(|(_, tier)| tier).collect()
        }
        Err(error) => return Err(error),
    };
    for tier in before {
        if !spec.tiers.iter().any(|other| other.is_same(&tier)) {
            spec.tiers.push(TierSpec { bytes: 0, ..tier });
        }
    }
    spec.check_count()?;
    Ok(spec)
}

/// Removes all homes but their locks, and then those, so that nobody takes what is being removed.
pub(crate) fn remove(spec: &Spec) {
    for home in homes(spec) {
        remove_one(&home);
    }
}

/// The same of one home. Nothing in it is needed; what stays is empty.
pub(crate) fn remove_one(home: &Path) {
    let Ok(entries) = fs::read_dir(home) else { return };
    // What says what it is goes after what it is.
    for tier in [TIER, DEVICE] {
        let _ = fs::remove_dir_all(home.join(tier));
    }
    for entry in entries.flatten().filter(|entry| entry.file_name() != LOCK) {
        let path = entry.path();
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
    let _ = fs::remove_file(home.join(LOCK));
    let _ = fs::remove_dir(home);
}

#[cfg(test)]
#[path = "home_tests.rs"]
mod tests;
