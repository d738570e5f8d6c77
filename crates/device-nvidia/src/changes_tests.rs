//! Snapshots of what has changed, on the fake driver.

use crate::fake::Turn;
use crate::snapshot_tests::{MIB, SLAB, backend, limits, pattern, poke, rest};
use kedge_cuda_types::arena::device_base;
use kedge_device::digest::{BLOCK, Keys};
use kedge_device::{Backend, Known, Object, Piece, Snapshot, Snapshots};
use kedge_protocol::MemHandleId;

/// Takes over what a snapshot has, as one that is stored.
fn store(known: &mut Known, snapshot: &dyn Snapshot) {
    for piece in snapshot.pieces() {
        known.pieces.insert(piece.clone(), snapshot.digests(piece).unwrap());
    }
}

fn changed(known: &Known, snapshot: &dyn Snapshot) -> Vec<(Piece, u64, u64)> {
    let runs = |piece: &Piece| {
        let runs = known.compare(piece, &snapshot.digests(piece).unwrap()).into_iter();
        let changed = runs.filter(|run| !run.2);
        changed.map(|(from, to, _)| (piece.clone(), from, to)).collect::<Vec<_>>()
    };
    snapshot.pieces().iter().flat_map(runs).collect()
}

#[test]
fn only_what_has_changed_is_copied() {
    let (turn, driver) = Turn::begin(4 << 30);
    let backend = backend(&driver, limits(u64::MAX, 0));
    let mut known = Known::nothing(Keys::draw().unwrap());
    turn.set(|fake| fake.keys = Some(known.keys.clone()));
    let base = device_base(0);
    backend.grant(0, base, SLAB).unwrap();
    backend.grant(0, base + SLAB, SLAB).unwrap();
    backend.create_handle(MemHandleId(3), 0, 4 * MIB, false).unwrap();
    poke(base, &pattern(1, 2 * SLAB));
    rest(&backend);
    backend.prepare_snapshot(Some(&known)).unwrap();
    let full = backend.snapshot(Some(&known)).unwrap();
    let sum = changed(&known, &*full).iter().map(|(_, from, to)| to - from).sum::<u64>();
    assert_eq!(sum, 2 * SLAB + 4 * MIB);
    store(&mut known, &*full);
    drop(full);
    poke(base + 3 * BLOCK + 77, b"x");
    poke(base + SLAB - 1, b"y");
    poke(base + SLAB, b"z");
    backend.prepare_snapshot(Some(&known)).unwrap();
    let some = backend.snapshot(Some(&known)).unwrap();
    // What the program does from now on does not show.
    poke(base + 3 * BLOCK, &pattern(9, BLOCK));
    let runs = changed(&known, &*some);
    let spans: Vec<_> =
        runs.iter().map(|(piece, from, to)| (piece.start + from, to - from)).collect();
    let expected = [(base + 3 * BLOCK, BLOCK), (base + SLAB - BLOCK, BLOCK), (base + SLAB, BLOCK)];
    assert_eq!(spans, expected);
    assert!(turn.set(|fake| fake.gathered) > 2);
    let mut now = pattern(1, 2 * SLAB);
    now[3 * BLOCK as usize + 77] = b'x';
    now[SLAB as usize - 1] = b'y';
    now[SLAB as usize] = b'z';
    for (piece, from, to) in &runs {
        let mut bytes = vec![0; (to - from) as usize];
        some.read(piece, piece.start + from, &mut bytes).unwrap();
        let at = (piece.start + from - base) as usize;
        assert!(bytes == now[at..at + bytes.len()], "{piece:?} {from}");
    }
    // There is no copy of the rest.
    let memory = some.pieces().iter().find(|piece| piece.object == Object::Memory).unwrap();
    assert!(some.read(memory, base + BLOCK, &mut [0; 16]).is_err());
    assert!(some.read(memory, base + 4 * BLOCK - 8, &mut [0; 16]).is_err());
}

#[test]
fn where_digests_cannot_be_computed_all_is_copied() {
    let (_turn, driver) = Turn::begin(4 << 30);
    let backend = backend(&driver, limits(u64::MAX, 0));
    let known = Known::nothing(Keys::draw().unwrap());
    backend.grant(0, device_base(0), SLAB).unwrap();
    backend.create_handle(MemHandleId(3), 0, 4 * MIB, false).unwrap();
    poke(device_base(0), &pattern(5, SLAB));
    rest(&backend);
    backend.prepare_snapshot(Some(&known)).unwrap();
    let snapshot = backend.snapshot(Some(&known)).unwrap();
    let piece = snapshot.pieces().iter().find(|piece| piece.object == Object::Memory).unwrap();
    assert!(snapshot.digests(piece).is_none());
    let mut bytes = vec![0; SLAB as usize];
    snapshot.read(piece, piece.start, &mut bytes).unwrap();
    assert!(bytes == pattern(5, SLAB));
}

#[test]
fn parts_in_host_memory_are_read_as_one() {
    let (turn, driver) = Turn::begin(4 << 30);
    // Room for a part on the device.
    let backend = backend(&driver, limits(8 * MIB, u64::MAX));
    let mut known = Known::nothing(Keys::draw().unwrap());
    turn.set(|fake| fake.keys = Some(known.keys.clone()));
    backend.grant(0, device_base(0), SLAB).unwrap();
    poke(device_base(0), &pattern(5, SLAB));
    rest(&backend);
    backend.prepare_snapshot(Some(&known)).unwrap();
    let snapshot = backend.snapshot(Some(&known)).unwrap();
    let piece = snapshot.pieces()[0].clone();
    assert_eq!(piece.bytes, SLAB);
    let mut bytes = vec![0; SLAB as usize];
    snapshot.read(&piece, piece.start, &mut bytes).unwrap();
    assert!(bytes == pattern(5, SLAB));
    store(&mut known, &*snapshot);
    drop(snapshot);
    let nothing = backend.snapshot(Some(&known)).unwrap();
    assert_eq!(changed(&known, &*nothing), []);
}
