//! An engine without a mount: its folder below and its tiers are folders of a test's own.

use super::*;
use crate::adopt;
use crate::caller::Caller;
use crate::file::Handle;
use crate::spec::{Fsync, Medium, TierSpec};
use crate::write::Write;
use rustix::fs::OFlags;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

/// A folder that is gone at the end.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("kedge-cache-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder");
        fs::create_dir(path.join("below")).expect("a folder");
        Scratch(path)
    }

    fn tier(&self, name: &str, medium: Medium) -> TierSpec {
        let folder = self.0.join(name);
        fs::create_dir_all(&folder).expect("a folder");
        TierSpec { medium, folder, bytes: 64 << 20 }
    }

    /// Opens an engine over what the one before has left.
    pub(crate) fn engine(&self, tiers: &[(&str, Medium)], fsync: Fsync) -> Arc<Engine> {
        Arc::new(adopt::open(self.spec(tiers, fsync)).expect("tiers"))
    }

    pub(crate) fn spec(&self, tiers: &[(&str, Medium)], fsync: Fsync) -> Spec {
        let tiers = tiers.iter().map(|(name, medium)| self.tier(name, *medium)).collect();
        Spec {
            under: self.0.join("below"),
            tiers,
            fsync,
            close_drains: false,
            drain_threads: 1,
            per_user: None,
            host_free: 0,
            kernel_gathers: false,
            device: None,
            partner: None,
        }
    }

    pub(crate) fn below(&self, name: &str) -> PathBuf {
        self.0.join("below").join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Opens a file, which is made if it is not there.
pub(crate) fn open(engine: &Engine, path: &Path) -> Arc<Handle> {
    let flags = OFlags::RDWR | OFlags::CREATE;
    let file = rustix::fs::open(path, flags, 0o644.into()).expect("a file");
    let node = rustix::fs::open(path, OFlags::PATH, 0.into()).expect("a file");
    let known = engine.file(&Arc::new(node)).expect("a file");
    Arc::new(Handle::new(known, file.into(), 0, true))
}

pub(crate) fn write(engine: &Arc<Engine>, handle: &Arc<Handle>, offset: u64, data: &[u8]) {
    let (sender, result) = mpsc::channel();
    let (handle, length) = (handle.clone(), data.len() as u64);
    let write = Write { handle, offset, length, append: false, user: 0, writer: 1 };
    engine.write(write, data, Box::new(move |written| sender.send(written).expect("a test")));
    let written = result.recv().expect("an answer").expect("a write");
    assert_eq!(written as usize, data.len());
}

/// The tiers that hold something of a file.
fn holders(handle: &Handle) -> Vec<TierIndex> {
    handle.file.lock().extents.dirty().map(|(_, tier)| tier).collect()
}

const RAM: (&str, Medium) = ("ram", Medium::Ram);
const DISK: (&str, Medium) = ("disk", Medium::Nvme);

/// Has the node look as after a power cut: what was in memory is gone.
fn cut_power(scratch: &Scratch) {
    let _ = fs::remove_dir_all(scratch.0.join(RAM.0));
    let under = scratch.0.join("below");
    let home = crate::spec::home_in(&scratch.0.join(DISK.0), &under);
    fs::write(home.join("tier/boot"), "another").expect("a tier");
}

#[test]
fn a_record_cut_short_hides_none_that_follows() {
    let scratch = Scratch::new("torn");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    write(&engine, &a, 0, b"before");
    engine.tiers[0].tear();
    write(&engine, &b, 0, b"after");
    drop((a, b, engine));
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    assert!(adopt::drain(&engine).stuck.is_empty());
    assert_eq!(fs::read(scratch.below("a")).expect("a"), b"before");
    assert_eq!(fs::read(scratch.below("b")).expect("b"), b"after");
}

#[test]
fn a_drain_changes_no_time() {
    let scratch = Scratch::new("times");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let root = rustix::fs::open(scratch.0.join("below"), OFlags::PATH, 0.into()).expect("a folder");
    let nodes = crate::nodes::Nodes::new(root).expect("nodes");
    for round in 0..200 {
        let path = scratch.below(&format!("file-{round}"));
        let file = open(&engine, &path);
        write(&engine, &file, 0, &[1; 1 << 16]);
        let fd = rustix::fs::open(&path, OFlags::PATH, 0.into()).expect("a file");
        let name = path.file_name().expect("a name");
        let (node, _) = nodes.enter(fd, 1, name).expect("a node");
        let time = || engine.attributes_of(&node).expect("attributes").mtime;
        let written = time();
        std::thread::scope(|scope| {
            let drain = scope.spawn(|| engine.drain_file(&file.file).expect("drained"));
            while !drain.is_finished() {
                assert_eq!(time(), written);
            }
        });
        assert_eq!(time(), written);
    }
}

#[test]
fn a_journal_written_anew_keeps_the_newer_of_two_tiers() {
    let scratch = Scratch::new("anew");
    let tiers = [("first", Medium::Ram), ("second", Medium::Ram)];
    let engine = scratch.engine(&tiers, Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    engine.scheduler().limits.set_limit(0, 0);
    write(&engine, &file, 0, &[1; 8192]);
    // It is on its way below while newer bytes come.
    file.file.lock().extents.take(0, 1 << 20, 1 << 20).expect("dirty");
    engine.scheduler().limits.set_limit(0, 64 << 20);
    write(&engine, &file, 0, &[2; 4096]);
    assert_eq!(holders(&file), [0]);
    engine.rewrite_journals().expect("journals");
    drop((file, engine));
    let engine = scratch.engine(&tiers, Fsync::Memory);
    assert!(adopt::drain(&engine).stuck.is_empty());
    let expected = [[2; 4096], [1; 4096]].concat();
    assert!(fs::read(scratch.below("a")).expect("a") == expected, "old bytes won");
}

#[test]
fn what_a_disk_promised_outlives_newer_bytes_that_were_not_promised() {
    let scratch = Scratch::new("promise");
    let tiers = [RAM, DISK];
    let engine = scratch.engine(&tiers, Fsync::Nvme);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    engine.fsync(&file).expect("on the disk");
    assert_eq!(holders(&file), [1]);
    write(&engine, &file, 0, &[2; 4096]);
    assert_eq!(holders(&file), [1], "the newer bytes are in memory alone");
    drop((file, engine));
    cut_power(&scratch);
    let engine = scratch.engine(&tiers, Fsync::Nvme);
    assert!(adopt::drain(&engine).stuck.is_empty());
    let found = fs::read(scratch.below("a")).expect("a");
    assert!(found.len() == 8192 && found[4096..] == [1; 4096], "{} bytes", found.len());
    assert!(found[..4096].iter().all(|byte| [1, 2].contains(byte)), "zeros");
}

#[test]
fn a_disk_knows_what_is_below_before_it_makes_holes() {
    let scratch = Scratch::new("holes");
    let engine = scratch.engine(&[DISK], Fsync::Nvme);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    engine.fsync(&file).expect("on the disk");
    engine.drain_file(&file.file).expect("drained");
    assert!(!engine.tiers[0].has_unsynced_cleans(), "after a power cut, zeros would be drained");
    write(&engine, &file, 0, &[2; 8192]);
    engine.fsync(&file).expect("on the disk");
    let caller = Caller { user: 0, group: 0, process: 0 };
    engine.truncate(&file.file, caller, &file.below, 100).expect("shorter");
    assert!(!engine.tiers[0].has_unsynced_cleans(), "truncated bytes would come back as zeros");
}

#[test]
fn all_who_have_a_file_open_are_told_what_was_lost_below() {
    let scratch = Scratch::new("lost");
    let mut engine = scratch.engine(&[RAM], Fsync::Drain);
    let flag = scratch.0.join("lost");
    let faults = Faults::parse(&format!("lost={}", flag.display()));
    Arc::get_mut(&mut engine).expect("no one else has it").faults = faults;
    let (one, two) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("a")));
    write(&engine, &one, 0, b"bytes");
    fs::write(&flag, "").expect("a file");
    assert!(engine.fsync(&one).is_err());
    assert!(engine.fsync(&two).is_err(), "the kernel below tells it once");
    assert!(engine.fsync(&one).is_ok() && engine.fsync(&two).is_ok(), "each was told");
}

#[test]
fn a_journal_keeps_space_for_records_that_free() {
    let scratch = Scratch::new("reserve");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, b"bytes");
    let home = crate::spec::home_in(&scratch.0.join(RAM.0), &scratch.0.join("below"));
    let meta = fs::metadata(home.join("tier/journal")).expect("a journal");
    let space = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
    assert!(space >= meta.len() + (64 << 10), "{space} bytes of {}", meta.len());
}

#[test]
fn a_write_that_no_file_below_can_hold_is_refused_at_once() {
    let scratch = Scratch::new("huge");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    let (sender, result) = mpsc::channel();
    let (handle, offset) = (file.clone(), i64::MAX as u64 - 4096);
    let write = Write { handle, offset, length: 4, append: false, user: 0, writer: 1 };
    engine.write(write, b"huge", Box::new(move |written| sender.send(written).expect("a test")));
    let error = result.recv().expect("an answer").expect_err("the drain would fail for ever");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::FBIG.raw_os_error()));
    engine.drain_all().expect("nothing is stuck");
    assert_eq!(engine.scheduler().limits.used() + engine.below.promised(), 0);
}

#[test]
fn a_file_that_somebody_changes_below_holds_up_no_other_question() {
    let scratch = Scratch::new("alone");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, b"before");
    // As long as a slow truncate does.
    let alone = file.file.alone(0..u64::MAX);
    let (sender, result) = mpsc::channel();
    let (handle, length) = (file.clone(), 5);
    let late = Write { handle, offset: 0, length, append: false, user: 1, writer: 1 };
    engine.write(late, b"after", Box::new(move |written| sender.send(written).expect("a test")));
    let mut buffer = [0; 6];
    assert_eq!(engine.read(&file, 0, &mut buffer).expect("readable"), 6);
    assert_eq!(&buffer, b"before");
    assert_eq!(engine.status().files, 1);
    open(&engine, &scratch.below("a"));
    assert!(result.try_recv().is_err(), "it writes meanwhile");
    drop(alone);
    assert_eq!(result.recv().expect("an answer").expect("a write"), 5);
    engine.read(&file, 0, &mut buffer).expect("readable");
    assert_eq!(&buffer, b"aftere");
}

#[test]
fn a_file_that_is_forgotten_twice_is_known_once() {
    let scratch = Scratch::new("twice");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let first = open(&engine, &scratch.below("a"));
    engine.let_go(&first.file);
    let second = open(&engine, &scratch.below("a"));
    // As the last close and the end of a drain may do together.
    engine.forget_if_done(&first.file);
    let third = open(&engine, &scratch.below("a"));
    assert!(Arc::ptr_eq(&second.file, &third.file), "each has bytes that the other lacks");
}

/// Has an engine fail at something; nobody else has it as yet.
fn fail_at(engine: &mut Arc<Engine>, faults: &str) {
    Arc::get_mut(engine).expect("no one else has it").faults = Faults::parse(faults);
}

/// Begins to drain a file, and holds that before it has landed.
fn depart(engine: &Arc<Engine>, handle: &Handle) -> std::thread::JoinHandle<()> {
    let (engine, file) = (engine.clone(), handle.file.clone());
    let own = file.clone();
    let drain = std::thread::spawn(move || {
        let _ = engine.drain_part(&own, 0, &mut Vec::new());
    });
    while !file.lock().extents.is_in_flight(0..u64::MAX) {
        std::thread::yield_now();
    }
    drain
}

/// Removes a file a moment later, while something waits for that.
fn remove_soon(path: PathBuf) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        fs::remove_file(path).expect("a file");
    })
}

#[test]
fn what_was_written_anew_while_it_flew_is_drained_too() {
    let scratch = Scratch::new("flew");
    let mut engine = scratch.engine(&[RAM], Fsync::Drain);
    let held = scratch.0.join("held");
    fs::write(&held, "").expect("a file");
    fail_at(&mut engine, &format!("carried={}", held.display()));
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    let drain = depart(&engine, &file);
    while fs::metadata(scratch.below("a")).expect("there").len() < 8192 {
        std::thread::yield_now();
    }
    write(&engine, &file, 0, &[2; 8192]);
    let removal = remove_soon(held);
    engine.fsync(&file).expect("drained");
    assert!(fs::read(scratch.below("a")).expect("a") == [2; 8192], "old bytes are below");
    assert_eq!(engine.dirty_files(), 0);
    (drain.join(), removal.join()).0.expect("a drain");
}

#[test]
fn a_sync_to_a_local_disk_takes_what_could_not_land_meanwhile() {
    let scratch = Scratch::new("fell");
    let mut engine = scratch.engine(&[RAM, DISK], Fsync::Nvme);
    let (held, eio) = (scratch.0.join("held"), scratch.0.join("eio"));
    fs::write(&held, "").expect("a file");
    fs::write(&eio, "").expect("a file");
    fail_at(&mut engine, &format!("carried={},eio={}", held.display(), eio.display()));
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    let drain = depart(&engine, &file);
    std::thread::sleep(std::time::Duration::from_millis(50));
    let removal = remove_soon(held);
    let synced = engine.fsync(&file);
    assert!(synced.is_err() || holders(&file) == [1], "it is in memory alone");
    (drain.join(), removal.join()).0.expect("a drain");
}

#[test]
fn a_sync_to_a_local_disk_syncs_what_is_below_already() {
    let scratch = Scratch::new("landed");
    let mut engine = scratch.engine(&[RAM, DISK], Fsync::Nvme);
    let flag = scratch.0.join("lost");
    fail_at(&mut engine, &format!("lost={}", flag.display()));
    let path = scratch.below("a");
    let file = open(&engine, &path);
    engine.scheduler().limits.set_limit(0, 0);
    engine.scheduler().limits.set_limit(1, 0);
    write(&engine, &file, 0, b"below at once");
    assert!(holders(&file).is_empty());
    let other = open(&engine, &path);
    fs::write(&flag, "").expect("a file");
    assert!(engine.fsync(&file).is_err(), "nothing was synced");
    assert!(engine.fsync(&other).is_err(), "the kernel below tells it once");
    engine.scheduler().limits.set_limit(0, 64 << 20);
    write(&engine, &file, 0, b"in memory");
    engine.drain_file(&file.file).expect("drained");
    for handle in [file, other] {
        engine.let_go(&handle.file);
    }
    let anew = open(&engine, &path);
    fs::write(&flag, "").expect("a file");
    assert!(engine.fsync(&anew).is_err(), "nothing was synced");
}

#[test]
fn a_failed_sync_of_one_write_below_is_told_to_all() {
    let scratch = Scratch::new("through");
    let mut engine = scratch.engine(&[DISK], Fsync::Drain);
    let flag = scratch.0.join("lost");
    fail_at(&mut engine, &format!("lost={}", flag.display()));
    let (one, two) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("a")));
    write(&engine, &one, 0, b"bytes");
    fs::write(&flag, "").expect("a file");
    let (sender, result) = mpsc::channel();
    let late = Write { handle: one, offset: 0, length: 5, append: false, user: 0, writer: 1 };
    engine.closing.store(true, Ordering::SeqCst);
    engine.write(late, b"BYTES", Box::new(move |written| sender.send(written).expect("a test")));
    assert!(result.recv().expect("an answer").is_err());
    assert!(engine.fsync(&two).is_err(), "it may be lost below");
}

/// A mount that is gone at the end.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn what_is_mounted_beneath_is_not_absorbed() {
    if !rustix::process::geteuid().is_root() {
        // Nobody else may mount.
        return;
    }
    let scratch = Scratch::new("beneath");
    let (sub, other) = (scratch.below("sub"), scratch.0.join("other"));
    fs::create_dir(&sub).and_then(|()| fs::create_dir(&other)).expect("folders");
    // Of the same device.
    rustix::mount::mount_bind(&other, &sub).expect("a mount");
    let _mounted = Mounted(sub.clone());
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let (here, there) = (open(&engine, &scratch.below("a")), open(&engine, &sub.join("b")));
    write(&engine, &here, 0, b"here");
    write(&engine, &there, 0, b"there");
    assert_eq!((holders(&here).len(), holders(&there).len()), (1, 0));
    assert_eq!(fs::read(other.join("b")).expect("there"), b"there");
}

#[test]
fn a_file_that_cannot_be_drained_takes_no_more_of_the_tiers() {
    let scratch = Scratch::new("trouble");
    let mut engine = scratch.engine(&[RAM], Fsync::Memory);
    let eio = scratch.0.join("eio");
    fs::write(&eio, "").expect("a file");
    fail_at(&mut engine, &format!("eio={}", eio.display()));
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 4096]);
    assert!(engine.drain_file(&file.file).is_err());
    assert!(file.untold(&file.file.lock()).is_some(), "its writers are told");
    write(&engine, &file, 4096, &[2; 4096]);
    assert_eq!(engine.scheduler().limits.used(), 4096, "one user could fill the tiers");
    // What takes the place of all that could not be drained ends the trouble.
    write(&engine, &file, 0, &[3; 4096]);
    assert!(file.file.lock().trouble.is_none() && engine.drain_file(&file.file).is_ok());
    write(&engine, &file, 0, &[4; 4096]);
    assert_eq!(engine.scheduler().limits.used(), 4096, "it is as others are again");
}

#[test]
fn newer_bytes_join_a_local_disk_only_where_it_has_room() {
    let scratch = Scratch::new("over");
    let engine = scratch.engine(&[RAM, DISK], Fsync::Nvme);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    engine.fsync(&file).expect("on the disk");
    engine.scheduler().limits.set_limit(1, 8192);
    write(&engine, &file, 4096, &[2; 1 << 20]);
    let room = engine.scheduler().limits.rooms()[1];
    assert!(room.used <= room.limit, "{room:?}");
    let mut read = vec![0; 4096 + (1 << 20)];
    engine.read(&file, 0, &mut read).expect("readable");
    assert!(read[..4096] == [1; 4096] && read[4096..].iter().all(|byte| *byte == 2));
}

#[test]
fn a_hole_is_where_neither_the_tiers_nor_the_file_below_have_data() {
    let scratch = Scratch::new("parts");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    let (block, blocks) = (4096, 64);
    // Below and here by turns, then a hole, and the rest of a longer part.
    for at in (0..blocks).step_by(2) {
        std::os::unix::fs::FileExt::write_all_at(&*file.below, &[1; 4096], at * block)
            .expect("data");
    }
    file.below.set_len((blocks + 8) * block).expect("a long file");
    {
        let mut state = file.file.lock();
        for at in (1..blocks).step_by(2) {
            state.extents.write(at * block..(at + 1) * block, 0);
        }
        state.extents.write((blocks + 2) * block..(blocks + 3) * block, 0);
    }
    let seek = |at, data| engine.seek(&file.file, &file.below, at * block, data).expect("found");
    assert_eq!(seek(0, false), blocks * block);
    assert_eq!(seek(blocks, false), blocks * block);
    assert_eq!(seek(blocks, true), (blocks + 2) * block);
    assert_eq!(seek(blocks + 2, false), (blocks + 3) * block);
    assert_eq!(seek(5, true), 5 * block);
    assert!(engine.seek(&file.file, &file.below, (blocks + 4) * block, true).is_err(), "no data");
    assert!(engine.seek(&file.file, &file.below, 1 << 40, false).is_err(), "it ends before");
}

#[test]
fn somebody_who_changes_the_file_below_at_all_times_keeps_no_drain_from_it() {
    let scratch = Scratch::new("always");
    let engine = scratch.engine(&[RAM], Fsync::Memory);
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, b"bytes");
    let (ended, (sender, drained)) = (Arc::new(AtomicBool::new(false)), mpsc::channel());
    // One waits for the other: there is a barrier at each moment.
    let change = || {
        let (file, ended) = (file.file.clone(), ended.clone());
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let _alone = file.alone(8192..12288);
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        })
    };
    let changing = [change(), change(), change()];
    while file.file.lock().barriers == 0 {
        std::thread::yield_now();
    }
    let own = engine.clone();
    let drain = std::thread::spawn(move || sender.send(own.drain_all().is_ok()).expect("a test"));
    let result = drained.recv_timeout(std::time::Duration::from_secs(30));
    ended.store(true, Ordering::Relaxed);
    for thread in changing.into_iter().chain([drain]) {
        thread.join().expect("it ends");
    }
    assert_eq!(result, Ok(true), "the others always go first");
    assert_eq!(fs::read(scratch.below("a")).expect("a"), b"bytes");
}

#[test]
fn a_local_disk_keeps_a_removed_file_until_the_disk_below_knows() {
    let scratch = Scratch::new("removed");
    let engine = scratch.engine(&[DISK], Fsync::Nvme);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"bytes");
    engine.fsync(&handle).expect("on the disk");
    let home = crate::spec::home_in(&scratch.0.join(DISK.0), &scratch.0.join("below"));
    let held = |rebooted| {
        let journal = fs::read(home.join("tier/journal")).expect("a journal");
        crate::journal::replay(&journal, rebooted, &HashMap::new())
            .expect("of this version")
            .files
            .len()
    };
    fs::remove_file(scratch.below("a")).expect("removed");
    engine.name_is_gone(handle.file.key, &Arc::new(engine.below.root.try_clone().expect("open")));
    assert_eq!(held(true), 1, "after a power cut the name may be there again");
    assert_eq!(held(false), 0, "a daemon that is killed would leave it for good");
    write(&engine, &handle, 8192, b"as long as it is open");
    assert_eq!(held(false), 0, "a daemon that is killed would leave it for good");
    engine.rewrite_journals().expect("journals");
    assert_eq!(held(true), 1, "after a power cut the name may be there again");
    assert_eq!(held(false), 0, "a daemon that is killed would leave it for good");
    engine.let_go(&handle.file);
    while engine.pool.len() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(held(true), 0, "it takes the disk's room");
}

#[test]
fn a_local_disk_cuts_a_file_once_the_disk_below_has() {
    let scratch = Scratch::new("cut");
    let mut engine = scratch.engine(&[DISK], Fsync::Nvme);
    let flag = scratch.0.join("lost");
    fail_at(&mut engine, &format!("lost={}", flag.display()));
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 8192]);
    engine.fsync(&file).expect("on the disk");
    let caller = Caller { user: 0, group: 0, process: 0 };
    fs::write(&flag, "").expect("a file");
    let held = |rebooted| {
        let home = crate::spec::home_in(&scratch.0.join(DISK.0), &scratch.0.join("below"));
        let journal = fs::read(home.join("tier/journal")).expect("a journal");
        let replay =
            crate::journal::replay(&journal, rebooted, &HashMap::new()).expect("of this version");
        replay.files.values().map(|found| found.parts.total()).sum::<u64>()
    };
    let size = || file.file.size(&file.file.lock()).expect("a size");
    let cut = engine.truncate(&file.file, caller, &file.below, 100);
    assert!(cut.is_err(), "after a power cut, the file would have none of both lengths");
    assert_eq!(held(true), 8192, "after a power cut, the file below may be empty");
    assert_eq!((holders(&file), size()), (vec![0], 100), "zeros would follow");
    write(&engine, &file, 5000, &[2; 100]);
    assert!(engine.fsync(&file).is_err(), "a sync below failed");
    engine.fsync(&file).expect("on the disk");
    assert_eq!((held(true), size()), (200, 5100), "older bytes would follow");
    engine.truncate(&file.file, caller, &file.below, 100).expect("shorter");
    assert_eq!((held(true), size()), (100, 100));
    assert_eq!(fs::metadata(scratch.below("a")).expect("a").len(), 100);
}

#[test]
fn a_file_below_that_has_newer_bytes_in_a_tier_is_not_settled() {
    let scratch = Scratch::new("settled");
    let engine = scratch.engine(&[RAM], Fsync::Drain);
    let path = scratch.below("a.tmp");
    fs::write(&path, "older").expect("a file");
    let node = rustix::fs::open(&path, OFlags::PATH, 0.into()).expect("a file");
    let a_while = std::time::Duration::from_millis(200);
    std::thread::sleep(2 * a_while);
    assert!(engine.is_settled(&node, a_while), "a disk has had it for a while");
    let handle = open(&engine, &path);
    write(&engine, &handle, 0, b"newer");
    assert_eq!(fs::read(&path).expect("a file"), b"older", "it is in the tier alone");
    assert!(!engine.is_settled(&node, a_while), "after a power cut, it would have older bytes");
    engine.persist_replacement(&node).expect("drained");
    assert_eq!(fs::read(&path).expect("a file"), b"newer");
    assert!(!engine.is_settled(&node, a_while), "it was written a moment ago");
}

#[test]
fn what_its_owner_cannot_read_is_renamed_and_removed_all_the_same() {
    let scratch = Scratch::new("modes");
    let engine = scratch.engine(&[RAM], Fsync::Drain);
    let (user, group) = match rustix::process::geteuid().is_root() {
        true => (1000, 1000),
        false => (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
    };
    let someone = Caller { user, group, process: 0 };
    for mode in [0o200, 0o000, 0o300] {
        let path = scratch.below(&format!("{mode:o}"));
        match mode {
            0o300 => fs::create_dir(&path).expect("a folder"),
            _ => fs::write(&path, "bytes").expect("a file"),
        }
        std::os::unix::fs::chown(&path, Some(user), Some(group)).expect("an owner");
        rustix::fs::chmod(&path, mode.into()).expect("a mode");
        let node = rustix::fs::open(&path, OFlags::PATH, 0.into()).expect("it is there");
        // As a daemon that is not root's.
        let opened = someone.run(|| crate::backing::reopen(&node, OFlags::RDONLY));
        assert!(opened.is_err(), "{mode:o} can be read");
        someone.run(|| engine.persist_replacement(&node)).expect("synced");
        someone.run(|| engine.below.sync(&node)).expect("synced");
    }
}
