use super::*;
use crate::engine::tests::{Scratch, open as open_file, write};
use crate::journal::Identity;
use crate::ranges::RangeMap;
use crate::spec::{Fsync, Medium};
use std::fs;
use std::os::unix::fs::MetadataExt;

const RAM: [(&str, Medium); 1] = [("ram", Medium::Ram)];

fn key_of(path: &std::path::Path) -> crate::file::Key {
    let meta = fs::metadata(path).expect("a file");
    (meta.dev(), meta.ino())
}

/// What a journal says of a file that is there.
fn held(scratch: &Scratch, below: &BackingFolder, name: &str) -> Held {
    let meta = fs::metadata(scratch.below(name)).expect("a file");
    let birth = backing::birth(&below.find(name.as_bytes()).expect("a file"));
    let (device, inode, user) = (meta.dev(), meta.ino(), meta.uid());
    let identity = Identity { device, inode, user, birth, path: name.into() };
    Held {
        file: 1,
        identity,
        parts: RangeMap::default(),
        others: Vec::new(),
        places: Default::default(),
        lost: RangeMap::default(),
    }
}

#[test]
fn a_file_that_got_the_number_of_a_lost_one_is_left_alone() {
    let scratch = Scratch::new("number");
    fs::write(scratch.below("a"), "").expect("a file");
    let below = BackingFolder::open(&scratch.0.join("below")).expect("a folder");
    let known = held(&scratch, &below, "a");
    assert!(find(&below, &known, true).is_ok());
    let mut other = known.clone();
    other.identity.user += 1;
    assert!(find(&below, &other, true).is_err(), "it is another user's");
    if known.identity.birth != 0 {
        let mut older = known.clone();
        older.identity.birth -= 1;
        assert!(find(&below, &older, true).is_err(), "it was made later");
    }
    // Where the file system does not tell that, a number that was looked for is not enough.
    let mut unknown = known;
    unknown.identity.birth = 0;
    assert!(find(&below, &unknown, true).is_ok() && find(&below, &unknown, false).is_err());
}

#[test]
fn what_is_no_file_is_not_opened() {
    let scratch = Scratch::new("fifo");
    let mode = rustix::fs::Mode::RWXU;
    let fifo = rustix::fs::FileType::Fifo;
    let path = scratch.below("a");
    rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).expect("a queue");
    let below = BackingFolder::open(&scratch.0.join("below")).expect("a folder");
    let held = held(&scratch, &below, "a");
    assert!(find(&below, &held, true).is_err(), "to open it would wait for ever");
}

#[test]
fn a_renamed_file_is_found_and_a_replaced_one_is_kept() {
    let scratch = Scratch::new("moved");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    for name in ["a", "b"] {
        write(&engine, &open_file(&engine, &scratch.below(name)), 0, name.as_bytes());
    }
    drop(engine);
    fs::rename(scratch.below("a"), scratch.below("moved")).expect("renamed");
    fs::remove_file(scratch.below("b")).expect("removed");
    fs::write(scratch.below("b"), "another").expect("a file");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let recovered = drain(&engine);
    assert_eq!((recovered.files, recovered.stuck.len()), (1, 1), "{recovered:?}");
    assert_eq!(fs::read(scratch.below("moved")).expect("there"), b"a");
    assert_eq!(fs::read(scratch.below("b")).expect("there"), b"another");
    let shadow = recovered.stuck[0].why.rsplit(' ').next().expect("a path");
    assert_eq!(fs::read(shadow).expect("it is kept"), b"b");
}

#[test]
fn a_file_that_is_first_written_after_its_last_name_is_gone_leaves_nothing() {
    let scratch = Scratch::new("unnamed");
    let disk = ("disk", Medium::Nvme);
    for (tier, name, fsync) in [(RAM[0], "a", Fsync::Memory), (disk, "b", Fsync::Nvme)] {
        let engine = scratch.engine(&[tier], fsync);
        let handle = open_file(&engine, &scratch.below(name));
        fs::remove_file(scratch.below(name)).expect("removed");
        let folder = Arc::new(engine.below.root.try_clone().expect("open"));
        engine.name_is_gone(handle.file.key, &folder);
        write(&engine, &handle, 0, b"a file for a while");
        engine.fsync(&handle).expect("as the policy says");
        write(&engine, &handle, 8192, b"as long as it is open");
        // As a daemon that is killed leaves it.
        drop((handle, engine));
        let engine = scratch.engine(&[tier], fsync);
        assert_eq!(lock(&engine.files).by_number.len() + engine.unclaimed.len(), 0);
        assert!(drain(&engine).stuck.is_empty(), "each recovery would fail");
    }
}

#[test]
fn a_shadow_that_lacks_bytes_is_told_and_not_drained() {
    let scratch = Scratch::new("lacks");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    write(&engine, &open_file(&engine, &scratch.below("a")), 0, &[1; 8192]);
    let number = engine.known(key_of(&scratch.below("a"))).expect("known").number;
    let shadow = engine.tiers[0].shadow(number).expect("a shadow");
    drop(engine);
    shadow.file().expect("a file").set_len(4096).expect("a shadow");
    let recovered = drain(&scratch.engine(&RAM, Fsync::Memory));
    assert!(recovered.stuck[0].why.contains("lacks bytes"), "{recovered:?}");
    assert_eq!(fs::metadata(scratch.below("a")).expect("there").len(), 0);
}

/// Whether data of a file may be given up.
fn is_lost(below: &BackingFolder, held: &Held) -> bool {
    find(below, held, false).expect_err("no such file").gone
}

#[test]
fn only_what_is_surely_gone_is_given_up() {
    let scratch = Scratch::new("surely");
    fs::write(scratch.below("a"), "").expect("a file");
    let below = BackingFolder::open(&scratch.0.join("below")).expect("a folder");
    let known = held(&scratch, &below, "a");
    let named = |path: &[u8]| Held {
        identity: Identity { path: path.to_vec(), ..known.identity.clone() },
        ..known.clone()
    };
    assert!(is_lost(&below, &named(b"b")) && is_lost(&below, &named(b"a/b")));
    std::os::unix::fs::symlink("a", scratch.below("link")).expect("a link");
    let long = [b'x'; 300];
    for unsure in [&b"link/a"[..], &long, b""] {
        assert!(!is_lost(&below, &named(unsure)), "{}", String::from_utf8_lossy(unsure));
    }
    let mut elsewhere = named(b"b");
    elsewhere.identity.device += 1;
    assert!(!is_lost(&below, &elsewhere), "its file system may not be mounted");
}

#[test]
fn a_file_that_is_busy_is_not_given_up() {
    let scratch = Scratch::new("busy");
    fs::copy("/bin/sleep", scratch.below("a")).expect("a program");
    let mut runs = std::process::Command::new(scratch.below("a")).arg("60").spawn().expect("runs");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let held = held(&scratch, &engine.below, "a");
    let adopted = adopt(&engine, &held, true).expect("a tier");
    runs.kill().and_then(|()| runs.wait()).expect("it ends");
    assert!(adopted.is_err_and(|lost| !lost.gone), "a running program cannot be written");
}

#[test]
fn daemons_that_do_not_know_of_each_other_use_other_numbers() {
    let scratch = Scratch::new("numbers");
    let (disk, ram) = (("disk", Medium::Nvme), RAM[0]);
    for (tier, name) in [(disk, "a"), (ram, "b")] {
        let engine = scratch.engine(&[tier], Fsync::Memory);
        write(&engine, &open_file(&engine, &scratch.below(name)), 0, name.as_bytes());
    }
    let recovered = drain(&scratch.engine(&[ram, disk], Fsync::Memory));
    assert_eq!((recovered.files, recovered.stuck.len()), (2, 0), "{recovered:?}");
    for name in ["a", "b"] {
        assert_eq!(fs::read(scratch.below(name)).expect("there"), name.as_bytes());
    }
}

#[test]
fn what_a_later_daemon_without_the_disk_wrote_is_newer() {
    for round in 0..8 {
        let scratch = Scratch::new(&format!("newer{round}"));
        let (disk, ram) = (("disk", Medium::Nvme), RAM[0]);
        for (tier, text) in [(disk, "older"), (ram, "new")] {
            let engine = scratch.engine(&[tier], Fsync::Memory);
            write(&engine, &open_file(&engine, &scratch.below("a")), 0, text.as_bytes());
        }
        // Which number they have is chance; the second daemon has one file, and ends there.
        let engine = scratch.engine(&[ram, disk], Fsync::Memory);
        assert_eq!(lock(&engine.files).by_number.len(), 1, "one file");
        drop(engine);
        let recovered = drain(&scratch.engine(&[ram, disk], Fsync::Memory));
        assert_eq!((recovered.files, recovered.stuck.len()), (1, 0), "{recovered:?}");
        assert_eq!(fs::read(scratch.below("a")).expect("there"), b"newer");
    }
}

#[test]
fn a_recovery_whose_sync_fails_gives_nothing_up() {
    let scratch = Scratch::new("unsynced");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    write(&engine, &open_file(&engine, &scratch.below("a")), 0, b"bytes");
    drop(engine);
    let mut engine = open_to_recover(scratch.spec(&RAM, Fsync::Memory)).expect("tiers");
    let flag = scratch.0.join("lost");
    fs::write(&flag, "").expect("a file");
    engine.faults = crate::faults::Faults::parse(&format!("lost={}", flag.display()));
    let recovered = drain(&Arc::new(engine));
    assert_eq!((recovered.files, recovered.stuck.len()), (0, 1), "{recovered:?}");
    // The disk has nothing of it.
    fs::write(scratch.below("a"), "").expect("there");
    let engine = open_to_recover(scratch.spec(&RAM, Fsync::Memory)).expect("tiers");
    assert_eq!(drain(&Arc::new(engine)).files, 1);
    assert_eq!(fs::read(scratch.below("a")).expect("there"), b"bytes");
}

#[test]
fn an_older_daemons_shadow_that_is_not_there_is_missed_for_its_file_alone() {
    let scratch = Scratch::new("missed");
    let (disk, ram) = (("disk", Medium::Nvme), RAM[0]);
    let mut shadow = None;
    for (tier, text) in [(disk, "older"), (ram, "new")] {
        let engine = scratch.engine(&[tier], Fsync::Memory);
        write(&engine, &open_file(&engine, &scratch.below("a")), 0, text.as_bytes());
        write(&engine, &open_file(&engine, &scratch.below(text)), 0, text.as_bytes());
        let number = engine.known(key_of(&scratch.below("a"))).expect("known").number;
        shadow.get_or_insert(engine.tiers[0].folder.join(format!("{number:016x}")));
    }
    fs::remove_file(shadow.expect("a shadow")).expect("a shadow");
    // The second one has one number for both.
    for _ in 0..2 {
        let recovered = drain(&scratch.engine(&[ram, disk], Fsync::Memory));
        assert_eq!(recovered.stuck.len(), 1, "{recovered:?}");
        assert!(recovered.stuck[0].why.contains("lacks bytes"), "{recovered:?}");
    }
    for text in ["older", "new"] {
        assert_eq!(fs::read(scratch.below(text)).expect("there"), text.as_bytes());
    }
}
