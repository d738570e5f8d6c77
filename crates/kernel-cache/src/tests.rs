use super::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90\n.visible .entry k() { ret; }\n";

/// A cache in a folder of its own, gone at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let folder = format!("kedge-kernels-{name}-{}", std::process::id());
        let dir = std::env::temp_dir().join(folder);
        let _ = fs::remove_dir_all(&dir);
        Scratch(dir)
    }

    fn cache(&self, limits: Limits) -> KernelCache {
        KernelCache::at(self.0.join("kedge/kernels"), limits)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn what_is_kept_is_found_by_another_process() {
    let scratch = Scratch::new("kept");
    let cubin = Digest::of(b"\x7fELF one");
    let cache = scratch.cache(LIMITS);
    assert_eq!(cache.find(&cubin).unwrap(), None);
    assert_eq!((cache.list().unwrap(), cache.clear().unwrap()), (vec![], Cleared::default()));
    cache.keep(&cubin, PTX).unwrap();
    let other = scratch.cache(LIMITS);
    assert_eq!(other.find(&cubin).unwrap().as_deref(), Some(PTX));
    assert_eq!(other.find(&Digest::of(b"\x7fELF two")).unwrap(), None);
    let listed = other.list().unwrap();
    assert_eq!((listed[0].cubin, &listed[0].kernels[..]), (cubin, &["k".to_owned()][..]));
    assert_eq!((listed.len(), listed[0].bytes), (1, PTX.len() as u64));
    assert_eq!(other.clear().unwrap().entries, 1);
    assert_eq!(cache.find(&cubin).unwrap(), None);
}

#[test]
fn others_see_nothing() {
    let scratch = Scratch::new("private");
    let cache = scratch.cache(LIMITS);
    let cubin = Digest::of(b"cubin");
    cache.keep(&cubin, PTX).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(cache.path()), mode(&cache.file(&cubin))), (0o700, 0o600));
    assert_eq!((mode(&scratch.0), mode(&cache.path().join(LOCK))), (0o700, 0o600));
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o750)).unwrap();
    assert!(matches!(cache.find(&cubin), Err(CacheError::NotOwn { .. })));
    assert!(matches!(cache.keep(&cubin, PTX), Err(CacheError::NotOwn { .. })));
}

#[test]
fn a_damaged_entry_is_removed_and_made_anew() {
    let scratch = Scratch::new("damaged");
    let cache = scratch.cache(LIMITS);
    let cubin = Digest::of(b"cubin");
    for damage in [&b""[..], b"kedge PTX 1", &[0; 4096]] {
        cache.keep(&cubin, PTX).unwrap();
        fs::write(cache.file(&cubin), damage).unwrap();
        assert_eq!(cache.list().unwrap(), []);
        assert_eq!(cache.find(&cubin).unwrap(), None);
        assert!(!cache.file(&cubin).exists());
    }
    // Another cubin's entry, under this one's name.
    let other = Digest::of(b"other");
    cache.keep(&other, PTX).unwrap();
    fs::rename(cache.file(&other), cache.file(&cubin)).unwrap();
    assert_eq!(cache.find(&cubin).unwrap(), None);
}

#[test]
fn links_pipes_folders_and_giants_are_no_entries() {
    let scratch = Scratch::new("hostile");
    let cache = scratch.cache(LIMITS);
    let [linked, piped, folder, giant] = [b"1", b"2", b"3", b"4"].map(|name| Digest::of(name));
    cache.keep(&linked, PTX).unwrap();
    let elsewhere = scratch.0.join("elsewhere");
    fs::rename(cache.file(&linked), &elsewhere).unwrap();
    symlink(&elsewhere, cache.file(&linked)).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, cache.file(&piped), rustix::fs::FileType::Fifo, mode, 0)
        .unwrap();
    fs::create_dir(cache.file(&folder)).unwrap();
    File::create(cache.file(&giant)).unwrap().set_len(entry::max_file(MAX_PTX) + 1).unwrap();
    assert!(matches!(cache.find(&linked), Err(CacheError::Io { .. })));
    for cubin in [piped, folder, giant] {
        assert_eq!(cache.find(&cubin).unwrap(), None);
    }
    assert_eq!(cache.list().unwrap(), []);
    assert!(elsewhere.exists());
    cache.keep(&giant, PTX).unwrap();
    assert_eq!(cache.find(&giant).unwrap().as_deref(), Some(PTX));
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    let scratch = Scratch::new("bounded");
    let cache = scratch.cache(Limits {
        bytes: 1 << 20,
        entries: 16,
        entry: MAX_PTX,
        between: (1 << 30, 1),
    });
    let digest = |number: usize| Digest::of(&number.to_le_bytes());
    let age = |number: usize, seconds| {
        let file = File::options().write(true).open(cache.file(&digest(number))).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    };
    for number in 0..16 {
        cache.keep(&digest(number), PTX).unwrap();
        age(number, 1000 - number as u64);
    }
    // Found, and so the youngest.
    assert!(cache.find(&digest(0)).unwrap().is_some());
    cache.keep(&digest(16), PTX).unwrap();
    cache.keep(&digest(17), PTX).unwrap();
    let known: Vec<usize> =
        (0..18).filter(|number| cache.find(&digest(*number)).unwrap().is_some()).collect();
    assert_eq!(known, [0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]);
    let small =
        scratch.cache(Limits { bytes: 1000, entries: 16, entry: MAX_PTX, between: (1 << 30, 1) });
    small.keep(&digest(18), PTX).unwrap();
    let bytes: u64 = small.files().unwrap().iter().map(|file| file.bytes).sum();
    assert!(bytes <= 1000 + small.files().unwrap()[0].bytes, "{bytes}");
}

#[test]
fn what_a_killed_process_has_left_goes_when_it_is_old() {
    let scratch = Scratch::new("left");
    let cache = scratch.cache(Limits { between: (1 << 30, 1), ..LIMITS });
    cache.keep(&Digest::of(b"1"), PTX).unwrap();
    let cubin = Digest::of(b"2");
    let [old, new] = [1, 2].map(|pid| cache.path().join(format!(".{cubin}.{pid}.0")));
    let foreign = cache.path().join(".not-kedge's");
    for path in [&old, &new, &foreign] {
        fs::write(path, "half").unwrap();
    }
    let day = Duration::from_secs(86_400);
    for path in [&old, &foreign] {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - day).unwrap();
    }
    cache.keep(&cubin, PTX).unwrap();
    assert!(!old.exists() && new.exists() && foreign.exists());
    assert_eq!(cache.clear().unwrap().entries, 2);
    assert!(!new.exists() && foreign.exists());
}

#[test]
fn a_failed_write_leaves_nothing_half_written() {
    let scratch = Scratch::new("failed");
    let cache = scratch.cache(LIMITS);
    let cubin = Digest::of(b"cubin");
    // No file of that name can be made: the entry's own is a folder that is not empty.
    place::make(cache.path()).unwrap();
    fs::create_dir_all(cache.file(&cubin).join("x")).unwrap();
    assert!(matches!(cache.keep(&cubin, PTX), Err(CacheError::Io { .. })));
    assert_eq!(cache.files().unwrap().len(), 1);
}

#[test]
fn a_lock_that_is_held_stops_no_writer() {
    let scratch = Scratch::new("locked");
    let cache = scratch.cache(Limits { between: (1 << 30, 1), ..LIMITS });
    cache.keep(&Digest::of(b"1"), PTX).unwrap();
    let held = cache.open_lock().unwrap();
    held.lock().unwrap();
    cache.keep(&Digest::of(b"2"), PTX).unwrap();
    assert_eq!(cache.list().unwrap().len(), 2);
}

#[test]
fn many_writers_agree() {
    let scratch = Scratch::new("many");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let cache = scratch.cache(Limits { between: (1 << 30, 1), ..LIMITS });
                for number in 0..20u8 {
                    cache.keep(&Digest::of(&[number]), PTX).unwrap();
                    let found = cache.find(&Digest::of(&[number])).unwrap();
                    assert_eq!(found.as_deref(), Some(PTX));
                }
            });
        }
    });
    let cache = scratch.cache(LIMITS);
    assert_eq!(cache.files().unwrap().len(), 20);
    assert_eq!(fs::metadata(cache.path()).unwrap().uid(), rustix::process::geteuid().as_raw());
}
