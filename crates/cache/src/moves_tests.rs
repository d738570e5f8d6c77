//! A device's tier over a holder of a test's own, whose places are in this process.

#[path = "moves_holder.rs"]
mod holder;

use super::*;
use crate::caller::Caller;
use crate::engine::tests::{Scratch, open, write};
use crate::file::Handle;
use crate::names::Rename;
use crate::nodes::Nodes;
use crate::spec::Fsync;
use crate::{adopt, daemon};
use fuser::RenameFlags;
use holder::{Holder, PLACES};
use kedge_holder::{SLOTS, UNSHARED};
use std::fs;
use std::sync::atomic::Ordering;

const MIB: usize = 1 << 20;
const TIERS: [(&str, Medium); 2] = [("ram", Medium::Ram), ("ram", Medium::Gpu)];
const MEMORY: TierIndex = 0;
const BEHIND: TierIndex = 1;

fn engine(scratch: &Scratch) -> Arc<Engine> {
    let engine = scratch.engine(&TIERS, Fsync::Memory);
    assert_eq!(engine.scheduler().limits.rooms()[BEHIND].limit, u64::from(PLACES) * PART);
    // Host memory is full enough with one part.
    engine.scheduler().limits.set_limit(MEMORY, 4 * PART);
    engine
}

/// Moves all that may move, and returns how many parts that was.
fn move_all(engine: &Engine) -> usize {
    let mut buffer = vec![0; PART as usize];
    let moved = || engine.move_one(&mut buffer).expect("a holder");
    std::iter::repeat_with(moved).take_while(|moved| *moved == Moved::Part).count()
}

fn bytes(first: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 % 251) as u8 ^ first).collect()
}

fn reads(engine: &Engine, handle: &Handle) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 32 * MIB];
    let read = engine.read(handle, 0, &mut buffer)?;
    buffer.truncate(read);
    Ok(buffer)
}

/// What of a file each tier has dirty, in bytes.
fn held(handle: &Handle) -> [u64; 2] {
    let state = handle.file.lock();
    let of = |tier| {
        let parts = state.extents.dirty().filter(|(_, other)| *other == tier);
        parts.map(|(range, _)| range.end - range.start).sum()
    };
    [of(MEMORY), of(BEHIND)]
}

fn free(engine: &Engine) -> usize {
    engine.device().expect("a device").1.free_places()
}

#[test]
fn whole_parts_move_and_are_read_written_and_drained() {
    let scratch = Scratch::new("moves");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let mut expected = bytes(1, 13 * MIB);
    // It begins within a part, and ends within another one, which is written just now.
    write(&engine, &handle, 0, &expected);
    assert_eq!(move_all(&engine), 3);
    assert_eq!((held(&handle), holder.used()), ([MIB as u64, 12 * MIB as u64], 3));
    assert_eq!(
        engine.scheduler().limits.rooms().iter().map(|room| room.used).sum::<u64>(),
        13 << 20
    );
    assert!(reads(&engine, &handle).expect("read") == expected);
    let mut some = [0; 10];
    let now = engine.read_now(&handle, 5, &mut some).expect("asked");
    assert_eq!(now, None, "it waits for the bus where the kernel is answered");
    // Part of a place is written anew, and all of another one.
    for (at, new) in [(5 * MIB + 17, bytes(7, 100_000)), (8 * MIB, bytes(9, 4 * MIB))] {
        write(&engine, &handle, at as u64, &new);
        expected[at..at + new.len()].copy_from_slice(&new);
    }
    assert_eq!(free(&engine), PLACES as usize - 2, "nothing needs that place");
    assert!(reads(&engine, &handle).expect("read") == expected);
    engine.drain_file(&handle.file).expect("drained");
    assert!(fs::read(scratch.below("a")).expect("there") == expected);
    assert_eq!((held(&handle), free(&engine)), ([0, 0], PLACES as usize));
    assert!(engine.scheduler().limits.rooms().iter().all(|room| room.used == 0));
    let (_, device) = engine.device().expect("a device");
    wait(|| {
        device.give_back_idle();
        holder.used() == 0
    });
}

fn wait(done: impl Fn() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("it did not come");
}

#[test]
fn a_later_daemon_finds_what_lies_on_the_device() {
    let scratch = Scratch::new("finds");
    let holder = Holder::start(&scratch);
    let mut expected = bytes(3, 12 * MIB);
    {
        let engine = engine(&scratch);
        let handle = open(&engine, &scratch.below("a"));
        write(&engine, &handle, 0, &expected);
        engine.let_go(&handle.file);
        handle.file.lock().writers = 0;
        move_all(&engine);
        // Newer bytes, in host memory; the end of one place is cut away.
        write(&engine, &handle, 100, b"newer");
        expected[100..105].copy_from_slice(b"newer");
        let (caller, size) = (Caller { user: 0, group: 0, process: 0 }, 11 * MIB);
        engine.truncate(&handle.file, caller, &handle.below, size as u64).expect("cut");
        expected.truncate(size);
    }
    for round in 0..2 {
        // The second time, from a journal that was written anew.
        let engine = engine(&scratch);
        assert_eq!(free(&engine), PLACES as usize - 3, "round {round}");
        assert_eq!(move_all(&engine), 0, "an earlier daemon may have acknowledged it in memory");
        let handle = open(&engine, &scratch.below("a"));
        assert!(reads(&engine, &handle).expect("read") == expected, "round {round}");
    }
    let engine = engine(&scratch);
    assert!(adopt::drain(&engine).stuck.is_empty());
    assert!(fs::read(scratch.below("a")).expect("there") == expected);
    assert_eq!((free(&engine), lock(&engine.broken).files), (PLACES as usize, 0));
    drop(holder);
}

#[test]
fn a_part_that_is_written_while_it_moves_stays() {
    let scratch = Scratch::new("stays");
    let _holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, &bytes(1, 5 * MIB));
    let mut buffer = vec![0; PART as usize];
    let mut begun = || {
        let (start, shadow) = begin(&handle.file, MEMORY).expect("a part");
        assert!(begin(&handle.file, MEMORY).is_none(), "it moves already");
        let place = engine.device().expect("a device").1.take().expect("free");
        (start, engine.put(&shadow, start, place, &mut buffer))
    };
    let end = |(start, put)| engine.moved(&handle.file, start, put, MEMORY, BEHIND).expect("moved");
    let put = begun();
    write(&engine, &handle, 4096, b"newer");
    assert_eq!(end(put), Moved::Nothing);
    write(&engine, &handle, 4 * MIB as u64, b"another part is written");
    let put = begun();
    handle.file.lock().extents.take(0, PART, PART).expect("dirty");
    assert_eq!(end(put), Moved::Nothing, "it is on its way below");
    assert_eq!(free(&engine), PLACES as usize);
    assert_eq!(held(&handle)[BEHIND], 0);
}

#[test]
fn a_part_that_is_written_while_it_moves_is_not_begun_twice() {
    let scratch = Scratch::new("twice");
    let _holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let mut expected = bytes(1, 5 * MIB);
    write(&engine, &handle, 0, &expected);
    let begun = || {
        handle.file.lock().hot = None;
        let (start, shadow) = begin(&handle.file, MEMORY)?;
        let place = engine.device().expect("a device").1.take().expect("free");
        let put = engine.put(&shadow, start, place, &mut vec![0; PART as usize]);
        Some((start, put))
    };
    let end = |(start, put)| engine.moved(&handle.file, start, put, MEMORY, BEHIND).expect("moved");
    let first = begun().expect("a part");
    write(&engine, &handle, 4096, b"newer");
    expected[4096..4101].copy_from_slice(b"newer");
    let second = begun();
    assert_eq!(end(first), Moved::Nothing, "what it has put is older");
    assert!(reads(&engine, &handle).expect("read") == expected);
    assert!(second.is_none(), "the first mover was not back");
    assert_eq!(end(begun().expect("it may move again")), Moved::Part);
    assert!(reads(&engine, &handle).expect("read") == expected);
}

#[test]
fn a_place_that_an_order_may_still_come_to_is_not_used_again() {
    let scratch = Scratch::new("silent");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let expected = bytes(1, 13 * MIB);
    write(&engine, &handle, 0, &expected);
    holder.silent.store(true, Ordering::SeqCst);
    engine.move_one(&mut vec![0; PART as usize]).expect_err("no answer");
    assert_eq!(free(&engine), PLACES as usize - 1);
    assert_eq!(move_all(&engine), 3, "its other places are used");
    assert!(reads(&engine, &handle).expect("read") == expected);
    engine.drain_file(&handle.file).expect("drained");
    assert_eq!(free(&engine), PLACES as usize - 1);
    holder.silent.store(true, Ordering::SeqCst);
    let (_, device) = engine.device().expect("a device");
    wait(|| {
        device.give_back_idle();
        holder.used() <= 1
    });
    assert!(!holder.silent.load(Ordering::SeqCst), "it was asked");
    assert_eq!(free(&engine), PLACES as usize - 2);
}

#[test]
fn a_device_is_used_again_once_late_orders_are_over() {
    let scratch = Scratch::new("late");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let expected = bytes(1, 13 * MIB);
    write(&engine, &handle, 0, &expected);
    assert_eq!(move_all(&engine), 3);
    let (_, device) = engine.device().expect("a device");
    let place = handle.file.lock().shadows[BEHIND].as_ref().and_then(|shadow| shadow.place_of(0));
    let place = place.expect("it lies there");
    let read_place = || place.read(&mut [0; 10], 0);
    holder.stuck.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        for number in 0..SLOTS {
            let read_place = &read_place;
            scope.spawn(move || {
                // Two of them would change a place.
                let result = match number {
                    0 | 1 => device.take().expect("free").put(&vec![7; PART as usize]).map(drop),
                    _ => read_place(),
                };
                result.expect_err("no answer");
            });
        }
    });
    let late = read_place().expect_err("all are late");
    assert!(late.to_string().contains("does not answer"), "{late}");
    assert!(!device.is_gone());
    assert_eq!(free(&engine), PLACES as usize - 5, "the holder may still put something there");
    device.take_late();
    assert_eq!(free(&engine), PLACES as usize - 5);
    // What it is not asked for does not cost the place.
    device.take().expect("free").put(&vec![7; PART as usize]).expect_err("all are late");
    device.give_back_free();
    assert_eq!(free(&engine), PLACES as usize - 5);
    holder.stuck.store(false, Ordering::SeqCst);
    wait(|| {
        device.take_late();
        free(&engine) == PLACES as usize - 3
    });
    assert!(reads(&engine, &handle).expect("read") == expected);
    drop(place);
    engine.drain_file(&handle.file).expect("drained");
    assert!(fs::read(scratch.below("a")).expect("there") == expected);
    assert_eq!(free(&engine), PLACES as usize);
}

#[test]
fn a_device_is_used_again_once_its_holder_takes_connections() {
    let scratch = Scratch::new("deaf");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let expected = bytes(1, 9 * MIB);
    write(&engine, &handle, 0, &expected);
    assert_eq!(move_all(&engine), 2);
    let (_, device) = engine.device().expect("a device");
    holder.deaf.store(true, Ordering::SeqCst);
    holder.hang_up();
    for _ in 0..SLOTS {
        device.look();
        assert!(!device.is_gone(), "somebody listens");
    }
    assert_eq!(device.status().late, u64::from(SLOTS));
    device.take_late();
    reads(&engine, &handle).expect_err("nobody answers");
    holder.deaf.store(false, Ordering::SeqCst);
    device.take_late();
    assert_eq!(device.status().late, 0);
    assert!(reads(&engine, &handle).expect("read") == expected);
    // The last that is heard of it may be the end of a greeting.
    holder.deaf.store(true, Ordering::SeqCst);
    holder.hang_up();
    (0..SLOTS).for_each(|_| device.look());
    holder.kill();
    assert!(!device.is_gone());
    device.take_late();
    assert!(device.is_gone());
}

#[test]
fn what_others_need_of_the_device_comes_back_from_it() {
    let scratch = Scratch::new("way");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    let (of_a, of_b) = (bytes(1, 9 * MIB), bytes(2, 9 * MIB));
    write(&engine, &a, 0, &of_a);
    assert_eq!(move_all(&engine), 2);
    write(&engine, &b, 0, &of_b);
    assert_eq!(move_all(&engine), 2);
    let (_, device) = engine.device().expect("a device");
    let stand = |free, wanted| {
        *lock(&holder.stands) = (free, wanted);
        device.look();
    };
    stand(0, PART);
    assert_eq!(engine.give_way().expect("a holder"), Moved::Nothing, "of places that are free");
    assert_eq!((held(&a)[BEHIND], device.lack()), (2 * PART, 0));
    stand(0, PART);
    assert_eq!(engine.give_way().expect("a holder"), Moved::Part);
    assert_eq!((held(&a)[BEHIND], device.lack(), holder.used()), (PART, 0, 3), "the oldest");
    assert_eq!(engine.give_way().expect("a holder"), Moved::Nothing);
    // Host memory has no room: what is drained makes it.
    stand(0, 3 * PART);
    engine.scheduler().limits.set_limit(MEMORY, 3 * PART);
    let mut moved = Moved::Part;
    while moved == Moved::Part {
        moved = engine.give_way().expect("a holder");
    }
    assert_eq!((moved, device.lack() > 0), (Moved::Full, true));
    let rests = |now| engine.scheduler().order.next(now, 0, |_| false).is_none();
    let now = engine.now();
    write(&engine, &b, 0, &of_b[..4096]);
    assert!(rests(now), "a program writes");
    let mut watched = Watched::default();
    engine.watch_device(&mut watched);
    assert!(!rests(now), "drains do not hurry");
    stand(3 * PART, PART);
    engine.watch_device(&mut watched);
    write(&engine, &b, 0, &of_b[..4096]);
    assert!(rests(now), "nobody waits any more");
    stand(0, 2 * PART);
    engine.drain_file(&a.file).expect("drained");
    engine.scheduler().limits.set_limit(MEMORY, 5 * PART);
    while engine.give_way().expect("a holder") == Moved::Part {}
    assert_eq!((device.lack(), holder.used()), (0, 0));
    assert!(reads(&engine, &a).expect("read") == of_a);
    assert!(reads(&engine, &b).expect("read") == of_b);
    engine.drain_all().expect("drained");
    assert!(fs::read(scratch.below("b")).expect("there") == of_b);
    // A device that nobody else can have lacks nothing.
    stand(UNSHARED, 0);
    assert_eq!(device.lack(), 0);
}

#[test]
fn what_fsync_has_acknowledged_in_memory_is_not_on_a_device_alone() {
    let scratch = Scratch::new("acked");
    let _holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let handle = open(&engine, &scratch.below("a"));
    let expected = bytes(1, 13 * MIB);
    write(&engine, &handle, 0, &expected);
    assert_eq!(move_all(&engine), 3);
    engine.scheduler().limits.set_limit(MEMORY, 64 << 20);
    engine.fsync(&handle).expect("in memory");
    assert_eq!((held(&handle), free(&engine)), ([13 * MIB as u64, 0], PLACES as usize));
    engine.scheduler().limits.set_limit(MEMORY, 4 * PART);
    assert_eq!(move_all(&engine), 0);
    assert!(reads(&engine, &handle).expect("read") == expected);
    engine.drain_file(&handle.file).expect("drained");
    // All of it is below: what comes now was not acknowledged.
    write(&engine, &handle, 0, &expected);
    assert_eq!(move_all(&engine), 3);
    // Where host memory has no room, it goes below.
    engine.scheduler().limits.set_limit(MEMORY, 0);
    engine.fsync(&handle).expect("below");
    assert_eq!(held(&handle)[BEHIND], 0);
    assert!(fs::read(scratch.below("a")).expect("there") == expected);
}

#[test]
fn what_a_holder_takes_with_it_is_named_and_told_once() {
    let scratch = Scratch::new("gone");
    let holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    write(&engine, &a, 0, &bytes(1, 9 * MIB));
    assert_eq!(move_all(&engine), 2);
    write(&engine, &b, 0, &bytes(2, MIB));
    holder.kill();
    let (_, device) = engine.device().expect("a device");
    device.look();
    assert!(device.is_gone());
    engine.lose_device(BEHIND);
    let status = engine.status();
    assert_eq!((status.stuck_files, &*status.stuck[0].path), (1, "a"));
    assert_eq!((status.stuck[0].bytes, status.tiers[BEHIND].limit), (8 << 20, 0));
    // Even where nothing else of the file is left, it ends where it did.
    let size = || a.file.size(&a.file.lock()).expect("a size");
    let failed = engine.drain_all().expect_err("bytes are lost");
    assert_eq!((failed.len(), &*failed[0].0, size()), (1, "a", 9 << 20));
    assert!(failed[0].1.to_string().starts_with("8388608 bytes are lost"), "{failed:?}");
    let error = reads(&engine, &a).expect_err("bytes are lost");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    reads(&engine, &a).expect_err("the kernel may have read ahead");
    engine.fsync(&a).expect_err("bytes are lost");
    let rest = reads(&engine, &a).expect("fsync has told it");
    assert!(rest[8 * MIB..] == bytes(1, 9 * MIB)[8 * MIB..] && rest[..8 * MIB] == vec![0; 8 * MIB]);
    assert!(reads(&engine, &b).expect("all of it is there") == bytes(2, MIB));
    engine.drain_all().expect("the rest is drained");
    assert_eq!(engine.dirty_files(), 0);
    // What no fsync was told of stays to be told.
    a.file.lock().broken.insert(0..100, ());
    engine.let_go(&a.file);
    let known = engine.known(a.file.key).expect("it is known");
    assert!(known.lock().tell_trouble().is_err() && known.lock().tell_trouble().is_err());
    known.lock().tell_broken(100..200).expect("other bytes");
    write(&engine, &a, 0, &[1; 50]);
    known.lock().tell_broken(0..50).expect("they were written anew");
    known.lock().tell_broken(0..51).expect_err("bytes are lost");
    engine.tell_broken_once(&known).expect_err("bytes are lost");
    known.lock().tell_trouble().expect("it was told");
}

#[test]
fn a_daemon_that_is_killed_leaves_word_of_what_a_holder_took() {
    let scratch = Scratch::new("word");
    let holder = Holder::start(&scratch);
    {
        let engine = engine(&scratch);
        let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
        write(&engine, &a, 0, &bytes(1, 9 * MIB));
        assert_eq!(move_all(&engine), 2);
        // Of b, host memory alone has something.
        write(&engine, &b, 0, &bytes(2, MIB));
        holder.kill();
        engine.device().expect("a device").1.look();
        engine.lose_device(BEHIND);
        // What is written again is lost no more, also once it is below.
        write(&engine, &a, 0, &bytes(3, 2 * MIB));
        engine.drain_all().expect_err("bytes are lost");
    }
    let named = |engine: &Arc<Engine>| {
        let lost = lock(&engine.broken).named.clone();
        lost.iter().map(|lost| (lost.path.clone(), lost.bytes)).collect::<Vec<_>>()
    };
    let expected = [("a".to_owned(), 6 << 20)];
    // Two daemons are killed before any program asks; the second one has written its journals anew.
    for _ in 0..2 {
        let _other = Holder::start(&scratch);
        let engine = engine(&scratch);
        assert_eq!(named(&engine), expected);
        engine.rewrite_journals().expect("journals");
        let a = open(&engine, &scratch.below("a"));
        engine.read_now(&a, 0, &mut [0; 10]).expect("they were written again");
        engine.read_now(&a, 2 * MIB as u64, &mut [0; 10]).expect_err("they are lost");
        assert_eq!(a.file.size(&a.file.lock()).expect("a size"), 9 << 20);
        engine.drain_all().expect_err("bytes are lost");
    }
    {
        let engine = engine(&scratch);
        let a = open(&engine, &scratch.below("a"));
        engine.fsync(&a).expect_err("bytes are lost");
        engine.fsync(&a).expect("it was told");
    }
    assert!(named(&engine(&scratch)).is_empty(), "it was told");
}

/// Has a file below be one that cannot be taken over, or makes it what it was: root gives it to
/// another user, who may not write to it.
fn withhold(path: &std::path::Path, withheld: bool) {
    let (user, mode) =
        if withheld { (65534, 0o444) } else { (rustix::process::geteuid().as_raw(), 0o600) };
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(path, Some(user), None).expect("root gives files away");
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(path, mode).expect("the file's owner sets its mode");
}

#[test]
fn word_of_lost_bytes_outlives_a_daemon_that_cannot_have_their_file() {
    let scratch = Scratch::new("later");
    let path = scratch.below("a");
    let holder = Holder::start(&scratch);
    {
        let engine = engine(&scratch);
        let a = open(&engine, &path);
        write(&engine, &a, 0, &bytes(1, 4 * MIB));
        assert_eq!(move_all(&engine), 1);
        holder.kill();
        engine.device().expect("a device").1.look();
        engine.lose_device(BEHIND);
    }
    withhold(&path, true);
    let _other = Holder::start(&scratch);
    {
        let engine = engine(&scratch);
        assert_eq!(lock(&engine.broken).files, 1);
        // It is told of once, and nothing is left to be written.
        assert_eq!(engine.status().stuck_files, 1);
        assert!(adopt::drain(&engine).stuck.is_empty());
        let left = daemon::check_unclaimed(&engine).expect_err("the word is").to_string();
        assert!(left.contains("`kedge cache recover` names them"), "{left}");
    }
    withhold(&path, false);
    let engine = engine(&scratch);
    let a = open(&engine, &path);
    engine.read_now(&a, 0, &mut [0; 10]).expect_err("they are lost");
}

#[test]
fn a_lost_tail_is_no_end_of_its_file_and_replaces_no_other_one() {
    for fsync in [Fsync::Memory, Fsync::Drain] {
        let scratch = Scratch::new(&format!("tail{fsync:?}"));
        let holder = Holder::start(&scratch);
        let engine = scratch.engine(&TIERS, fsync);
        engine.scheduler().limits.set_limit(MEMORY, 4 * PART);
        fs::write(scratch.below("a"), "older").expect("a file");
        let a = open(&engine, &scratch.below("a"));
        write(&engine, &a, 0, &bytes(1, 8 * MIB));
        assert_eq!(move_all(&engine), 2);
        fs::write(scratch.below("b"), "good").expect("a file");
        let nodes = Nodes::new(engine.below.root.try_clone().expect("a folder")).expect("a folder");
        let names = [(1, "a".as_ref()), (1, "b".as_ref())];
        let rename = Rename::new(&nodes, names[0], names[1], RenameFlags::empty()).expect("names");
        holder.kill();
        engine.device().expect("a device").1.look();
        engine.lose_device(BEHIND);
        assert_eq!(a.file.size(&a.file.lock()).expect("a size"), 8 << 20);
        reads(&engine, &a).expect_err("bytes are lost");
        assert!(!engine.is_settled(&a.file.node, Duration::ZERO));
        let node = rename.replacement(&engine).expect("it is looked at");
        for _ in 0..2 {
            engine.persist_replacement(&node).expect_err("bytes are lost");
        }
        engine.drain_all().expect_err("bytes are lost");
        engine.fsync(&a).expect_err("bytes are lost");
        engine.persist_replacement(&node).expect("fsync has told it");
        engine.drain_all().expect("fsync has told it");
    }
}

#[test]
fn a_later_daemon_names_what_went_with_a_holder() {
    let scratch = Scratch::new("later");
    let holder = Holder::start(&scratch);
    {
        let engine = engine(&scratch);
        let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
        write(&engine, &a, 0, &bytes(1, 9 * MIB));
        assert_eq!(move_all(&engine), 2);
        write(&engine, &b, 0, &bytes(2, 5 * MIB));
        // The daemon is killed as soon as the journal has the place.
        engine
            .note(
                BEHIND,
                &Record::File(b.file.number, crate::engine::identity(&b.file, &b.file.lock())),
            )
            .expect("a journal");
        engine.note(BEHIND, &Record::Place(b.file.number, 0, PART, 0)).expect("a journal");
    }
    holder.kill();
    let _other = Holder::start(&scratch);
    let engine = engine(&scratch);
    let lost = lock(&engine.broken).named.clone();
    let lost: Vec<_> = lost.iter().map(|lost| (&*lost.path, lost.bytes)).collect();
    assert_eq!(lost, [("a", 8 << 20)], "host memory has all of b");
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    assert!(engine.read_now(&a, 0, &mut [0; 10]).is_err(), "it is told");
    assert!(reads(&engine, &b).expect("all of it is there") == bytes(2, 5 * MIB));
    let recovered = adopt::drain(&engine);
    assert!(recovered.stuck.is_empty() && recovered.lost.len() == 1, "{recovered:?}");
    assert!(
        fs::read(scratch.below("a")).expect("there")[8 * MIB..] == bytes(1, 9 * MIB)[8 * MIB..]
    );
    drop((a, b, engine));
    let engine = scratch.engine(&TIERS, Fsync::Memory);
    assert_eq!(lock(&engine.broken).files, 0, "it is told once");
}

#[test]
fn places_of_a_file_that_is_not_found_are_not_used_again() {
    let scratch = Scratch::new("nobodys");
    let holder = Holder::start(&scratch);
    {
        let engine = engine(&scratch);
        let handle = open(&engine, &scratch.below("a"));
        write(&engine, &handle, 0, &bytes(1, 9 * MIB));
        assert_eq!(move_all(&engine), 2);
    }
    fs::rename(scratch.below("a"), scratch.0.join("elsewhere")).expect("renamed");
    for _ in 0..2 {
        let engine = engine(&scratch);
        let stuck = engine.status().stuck;
        assert!(stuck.len() == 1 && stuck[0].why.contains("a device's memory"), "{stuck:?}");
        assert_eq!(free(&engine), PLACES as usize - 2);
    }
    fs::rename(scratch.0.join("elsewhere"), scratch.below("a")).expect("renamed");
    let engine = engine(&scratch);
    assert!(adopt::drain(&engine).stuck.is_empty());
    assert!(fs::read(scratch.below("a")).expect("there") == bytes(1, 9 * MIB));
    drop(holder);
}

#[test]
fn a_full_device_has_the_rest_stay() {
    let scratch = Scratch::new("full");
    let _holder = Holder::start(&scratch);
    let engine = engine(&scratch);
    engine.scheduler().limits.set_limit(MEMORY, 64 << 20);
    let handle = open(&engine, &scratch.below("a"));
    let expected = bytes(1, 30 * MIB);
    write(&engine, &handle, 0, &expected);
    let mut buffer = vec![0; PART as usize];
    engine.scheduler().limits.set_limit(MEMORY, 4 * PART);
    for _ in 0..PLACES {
        assert_eq!(engine.move_one(&mut buffer).expect("moved"), Moved::Part);
    }
    let limit = 4;
    engine.scheduler().limits.set_limit(MEMORY, limit);
    assert_eq!(move_all(&engine), 0);
    assert!(reads(&engine, &handle).expect("read") == expected);
    engine.drain_file(&handle.file).expect("drained");
    assert!(fs::read(scratch.below("a")).expect("there") == expected);
}
