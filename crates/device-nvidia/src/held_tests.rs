//! Snapshots whose process is gone, on the fake driver.

use crate::NvidiaBackend;
use crate::fake::Turn;
use crate::snapshot_tests::*;
use crate::spare::CacheLimits;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_base;
use kedge_device::{
    Backend, Done, Held, HeldPart, HeldPlace, Host, Object, Piece, Restore, Snapshots, Swap,
};
use kedge_protocol::{ArrayDesc, ArrayId, CtxId, MemHandleId, OutputTarget};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What was held of a process that is gone: its memory, the bytes of all pieces, and the notes.
struct Gone {
    held: Held,
    saved: Vec<(Piece, Vec<u8>)>,
    notes: Vec<u8>,
}

fn lose(turn: &Turn, limits: CacheLimits, at: u64) -> Gone {
    let first = backend(&Arc::new(crate::fake::driver()), limits);
    make_objects(&first, 3);
    poke(device_base(0), &pattern(1, 2 * SLAB));
    poke(at + 16, &pattern(2, 100));
    rest(&first);
    let snapshot = first.snapshot(None).unwrap();
    let held = snapshot.export().unwrap();
    poke(device_base(0), &pattern(9, 2 * SLAB));
    let gone = Gone { held, saved: read_all(&*snapshot), notes: snapshot.notes() };
    drop(snapshot);
    drop(first);
    turn.new_process();
    gone
}

fn begin_again(gone: &Gone, limits: CacheLimits) -> Arc<NvidiaBackend> {
    let second = backend(&Arc::new(crate::fake::driver()), limits);
    second.restore_begin(&gone.notes).unwrap();
    make_objects(&second, 3);
    second.restore_notes(&gone.notes).unwrap();
    second
}

fn comes_back(limits: CacheLimits, on_device: impl Fn(usize, usize) -> bool) {
    let (turn, _) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let gone = lose(&turn, limits, at);
    let second = begin_again(&gone, limits);
    let Gone { held: Held { parts, places }, saved, .. } = gone;
    let placed = places.iter().flatten().count();
    assert!(on_device(placed, saved.len()), "{placed} of {}", saved.len());
    second.restore_from(parts).unwrap();
    for ((piece, bytes), place) in saved.iter().zip(places) {
        match place {
            Some(place) => second.restore_held(piece, place).unwrap(),
            None => second.restore(&piece.object, piece.start, bytes).unwrap(),
        }
    }
    second.restore_end().unwrap();
    assert!(peek(device_base(0), 2 * SLAB) == pattern(1, 2 * SLAB));
    assert_eq!(peek(at + 16, 100), pattern(2, 100));
    rest(&second);
    let used = turn.used();
    let again = second.snapshot(None).unwrap();
    assert!(read_all(&*again) == saved, "arrays and handles as well");
    drop(again);
    assert_eq!(turn.used(), used, "what was held is nobody's here any longer");
}

#[test]
fn what_is_held_on_the_device_comes_back() {
    comes_back(NO_LIMITS, |placed, all| placed == all);
}

#[test]
fn what_is_held_in_part_on_the_device_comes_back() {
    comes_back(CacheLimits { gpu: 14 * MIB, ..NO_LIMITS }, |placed, all| {
        placed > 0 && placed < all
    });
}

#[test]
fn nothing_is_held_on_the_device_where_no_snapshot_lies_there() {
    comes_back(CacheLimits { gpu: 0, ..NO_LIMITS }, |placed, _| placed == 0);
}

#[test]
fn places_beyond_what_is_held_are_refused() {
    let (turn, _) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let gone = lose(&turn, NO_LIMITS, at);
    let second = begin_again(&gone, NO_LIMITS);
    let total: u64 = gone.held.parts.iter().map(|part| part.bytes).sum();
    let none = HeldPart {
        device: 3,
        bytes: 1 << 21,
        fd: std::fs::File::open("/dev/null").unwrap().into(),
    };
    assert!(second.restore_from(vec![none]).is_err(), "there is no such device");
    second.restore_from(gone.held.parts).unwrap();
    let piece = |bytes| Piece { object: Object::Memory, start: device_base(0), bytes };
    let beyond = [(0, total, 1), (0, total - 1, 2), (0, u64::MAX, 2), (1, 0, 1)];
    // More than the client has there.
    let target = [(0, 0, 2 * SLAB + 1)];
    for (device, offset, bytes) in beyond.into_iter().chain(target) {
        let refused = second.restore_held(&piece(bytes), HeldPlace { device, offset });
        assert!(refused.is_err(), "{bytes} bytes at {offset} of device {device}");
    }
}

#[test]
fn variables_that_moved_are_not_brought_back_unseen() {
    let (turn, _) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let gone = lose(&turn, NO_LIMITS, at);
    variables(&turn, room());
    let second = begin_again(&gone, NO_LIMITS);
    let place = gone.held.places[0].unwrap();
    second.restore_from(gone.held.parts).unwrap();
    let refused = second.restore_held(&gone.saved[0].0, place).unwrap_err();
    assert!(refused.message.contains("variable"), "{refused}");
}

/// One that has something to give back, once.
struct Holder(AtomicU32);

impl Host for Holder {
    fn read_client(&self, _: u64, _: &mut [u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn write_client(&self, _: u64, _: &[u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn host_function(&self, _: u64, done: Done) {
        done(Ok(()));
    }
    fn output(&self, _: OutputTarget, _: &[u8]) {}
    fn fault(&self, _: CtxId, _: CuError) {}
    fn idle(&self) {}
    fn log(&self, _: &str) {}
    fn release_held(&self) -> bool {
        let first = self.0.fetch_add(1, Ordering::SeqCst) == 0;
        if first {
            crate::fake::give(64 * MIB);
        }
        first
    }
}

#[test]
fn an_allocation_that_would_fail_gets_what_is_held() {
    let (_turn, driver) = Turn::begin(64 * MIB);
    let holder = Arc::new(Holder(AtomicU32::new(0)));
    let backend = hosted(&driver, NO_LIMITS, holder.clone());
    backend.grant(0, device_base(0), 40 * MIB).unwrap();
    assert_eq!(holder.0.load(Ordering::SeqCst), 0, "there was memory");
    backend.grant(0, device_base(0) + 40 * MIB, 40 * MIB).unwrap();
    assert_eq!(holder.0.load(Ordering::SeqCst), 1);
    let refused = backend.grant(0, device_base(0) + 80 * MIB, 80 * MIB);
    assert_eq!(refused, Err(CuError::OUT_OF_MEMORY));
}

#[test]
fn slabs_go_off_the_device_and_come_back() {
    let (turn, driver) = Turn::begin(200 * MIB);
    let backend = backend(&driver, NO_LIMITS);
    backend.grant(0, device_base(0), SLAB).unwrap();
    backend.grant(0, device_base(0) + SLAB, SLAB).unwrap();
    poke(device_base(0), &pattern(3, 2 * SLAB));
    rest(&backend);
    let snapshot = backend.snapshot(None).unwrap();
    let saved = read_all(&*snapshot);
    drop(snapshot);
    let before = turn.used();
    let told = [backend.used_memory(0), backend.used_memory(1)];
    assert_eq!(told, [Some(2 * SLAB), Some(0)]);
    assert_eq!(backend.vacate().unwrap(), 2 * SLAB);
    assert_eq!(turn.used(), before - 2 * SLAB);
    assert_eq!(backend.used_memory(0), Some(0));
    assert_eq!(backend.vacate().unwrap(), 0, "there is no more of it");
    // Somebody else takes what is free, all but one slab's.
    let left = turn.used() + SLAB + MIB;
    let memory = turn.set(|fake| std::mem::replace(&mut fake.memory, left));
    assert_eq!(backend.occupy().unwrap_err().code, CuError::OUT_OF_MEMORY);
    assert_eq!(turn.used(), before - 2 * SLAB, "nothing is taken where not all can be");
    turn.set(|fake| fake.memory = memory);
    backend.occupy().unwrap();
    assert_eq!(turn.used(), before);
    assert_eq!(backend.used_memory(0), Some(2 * SLAB));
    let held = backend.tables();
    assert_eq!(backend.used_memory(0), None, "who looks does not wait for the driver");
    drop(held);
    for (piece, bytes) in &saved {
        for (chunk, at) in bytes.chunks(5 << 20).zip((piece.start..).step_by(5 << 20)) {
            backend.refill(&piece.object, at, chunk).unwrap();
        }
    }
    backend.refilled().unwrap();
    assert!(peek(device_base(0), 2 * SLAB) == pattern(3, 2 * SLAB));
    let beyond = device_base(0) + 2 * SLAB;
    assert!(backend.refill(&Object::Memory, beyond, &[1]).is_err(), "no slab");
    backend.give_back(0, device_base(0), SLAB).unwrap();
}

#[test]
fn handles_go_off_the_device_and_come_back_where_they_were_mapped() {
    let (turn, driver) = Turn::begin(200 * MIB);
    let backend = backend(&driver, NO_LIMITS);
    let (id, size, first) = (MemHandleId(7), 2 * SLAB, device_base(0));
    let second = first + 8 * SLAB;
    backend.create_handle(id, 0, size, false).unwrap();
    backend.map_handle(id, first, size, 0).unwrap();
    backend.map_handle(id, second, SLAB, SLAB).unwrap();
    backend.set_access(first, size, 0, 3).unwrap();
    poke(first, &pattern(5, size));
    rest(&backend);
    let snapshot = backend.snapshot(None).unwrap();
    let saved = read_all(&*snapshot);
    drop(snapshot);
    let before = turn.used();
    assert_eq!(backend.used_memory(0), Some(size));
    assert_eq!(backend.vacate().unwrap(), size);
    assert_eq!((turn.used(), backend.vacate().unwrap()), (before - size, 0));
    let memory = turn.set(|fake| std::mem::replace(&mut fake.memory, before - size + MIB));
    assert_eq!(backend.occupy().unwrap_err().code, CuError::OUT_OF_MEMORY);
    turn.set(|fake| fake.memory = memory);
    backend.occupy().unwrap();
    for (piece, bytes) in &saved {
        backend.refill(&piece.object, piece.start, bytes).unwrap();
    }
    backend.refilled().unwrap();
    assert_eq!(turn.used(), before);
    assert!(peek(first, size) == pattern(5, size));
    assert!(peek(second, SLAB) == pattern(5, size)[SLAB as usize..]);
    backend.unmap_handle(second, SLAB).unwrap();
    // The driver would keep the memory for the other mapping, and nobody would count it.
    assert_eq!(backend.destroy_handle(id), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.used_memory(0), Some(size));
    backend.unmap_handle(first, size).unwrap();
    backend.destroy_handle(id).unwrap();
    assert_eq!(turn.used(), before - size);
}

#[test]
fn levels_of_a_mipmap_are_different_arrays() {
    let (_turn, driver) = Turn::begin(200 * MIB);
    let backend = backend(&driver, NO_LIMITS);
    let (width, height, depth) = (8, 8, 0);
    let desc = ArrayDesc { device: 0, width, height, depth, format: 1, channels: 1, flags: 0 };
    let levels = [ArrayId(1), ArrayId(2), ArrayId(1)];
    assert_eq!(backend.create_mipmap(CTX, &levels, &desc), Err(CuError::INVALID_VALUE));
}
