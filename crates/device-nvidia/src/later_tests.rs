//! Rounds of a move, on the fake driver: one process after the other, which a move does not need.

use crate::NvidiaBackend;
use crate::fake::Turn;
use crate::snapshot_tests::*;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_base;
use kedge_device::digest::{BLOCK, Keys};
use kedge_device::{Backend, HeldPart, HeldPlace, Known, Object, Piece, Restore, Snapshots};
use kedge_protocol::*;
use std::sync::Arc;

/// What a round brings.
struct Round {
    saved: Vec<(Piece, Vec<u8>)>,
    notes: Vec<u8>,
}

impl Round {
    fn take(backend: &NvidiaBackend) -> Round {
        rest(backend);
        let snapshot = backend.snapshot(None).unwrap();
        Round { saved: read_all(&*snapshot), notes: snapshot.notes() }
    }

    fn pieces(&self) -> Vec<Piece> {
        self.saved.iter().map(|(piece, _)| piece.clone()).collect()
    }

    /// Puts those bytes that are not what they were `before`.
    fn put(&self, backend: &NvidiaBackend, before: Option<&Round>) -> u64 {
        const BLOCK: usize = 64 << 10;
        let mut sum = 0;
        for (piece, bytes) in &self.saved {
            let was = before.and_then(|before| before.saved.iter().find(|one| one.0 == *piece));
            for (at, block) in (0..).step_by(BLOCK).zip(bytes.chunks(BLOCK)) {
                if was.is_none_or(|was| was.1[at..at + block.len()] != *block) {
                    backend.restore(&piece.object, piece.start + at as u64, block).unwrap();
                    sum += block.len() as u64;
                }
            }
        }
        sum
    }
}

/// A new process's devices, which take the first round.
fn arrives(turn: &Turn, driver: &Arc<crate::driver::Driver>, round: &Round) -> Arc<NvidiaBackend> {
    turn.new_process();
    let here = backend(driver, NO_LIMITS);
    here.restore_begin(&round.notes).unwrap();
    make_objects(&here, 3);
    here.restore_notes(&round.notes).unwrap();
    round.put(&here, None);
    here
}

fn record(backend: &NvidiaBackend, event: u32) {
    backend.submit(LEGACY, StreamOp::EventRecord { event: EventId(event) }).unwrap();
}

fn array(backend: &NvidiaBackend, id: u32) {
    let (width, height, depth) = (16, 4, 0);
    let desc = ArrayDesc { device: 0, width, height, depth, format: 0x20, channels: 1, flags: 0 };
    backend.create_array(CTX, ArrayId(id), &desc).unwrap();
}

#[test]
fn what_has_changed_between_two_rounds_arrives() {
    let (turn, driver) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    turn.set(|fake| fake.clock = 1000.0);
    let there = backend(&driver, NO_LIMITS);
    let made = make_objects(&there, 3);
    poke(device_base(0), &pattern(1, 2 * SLAB));
    poke(at, &7u32.to_le_bytes());
    record(&there, 1);
    let first = Round::take(&there);
    // Less than all of it changes, on the devices and of what there is.
    let changes = |backend: &NvidiaBackend| {
        backend.destroy_texture(CTX, made[1]).unwrap();
        backend.destroy_array(ArrayId(8)).unwrap();
        array(backend, 9);
        let textures = [(); 2].map(|()| backend.create_texture(CTX, &texture()).unwrap());
        backend.create_event(EventId(7), CTX, true, false).unwrap();
        textures
    };
    // The driver numbers what it makes here otherwise than there.
    let spare = there.create_texture(CTX, &texture()).unwrap();
    let textures = changes(&there);
    there.destroy_texture(CTX, spare).unwrap();
    poke(device_base(0) + SLAB + 77, b"changed");
    poke(at + 16, &pattern(2, 100));
    turn.set(|fake| fake.clock = 1500.0);
    record(&there, 1);
    turn.set(|fake| fake.clock = 1502.5);
    record(&there, 7);
    turn.set(|fake| fake.clock = 1600.0);
    let second = Round::take(&there);
    drop(there);

    let here = arrives(&turn, &driver, &first);
    here.restore_more(&second.notes).unwrap();
    assert_eq!(changes(&here), textures, "handles are what they were there");
    assert!(here.restore_later(&second.notes, &second.pieces()).unwrap());
    let put = second.put(&here, Some(&first));
    assert!(put < 200 << 10, "{put}");
    here.restore_end().unwrap();
    let mut now = pattern(1, 2 * SLAB);
    now[SLAB as usize + 77..][..7].copy_from_slice(b"changed");
    assert!(peek(device_base(0), 2 * SLAB) == now);
    assert_eq!((peek(at, 4), peek(at + 16, 100)), (vec![7, 0, 0, 0], pattern(2, 100)));
    assert_eq!(here.elapsed_ms(EventId(1), EventId(7)), Ok(2.5));
    assert!(Round::take(&here).saved == second.saved, "arrays and handles as well");
}

/// Software devices leave out what was freed since.
#[test]
fn what_is_in_no_piece_any_more_reads_as_zero() {
    let (turn, driver) = Turn::begin(4 << 30);
    variables(&turn, room());
    let there = backend(&driver, NO_LIMITS);
    make_objects(&there, 3);
    poke(device_base(0), &pattern(1, 2 * SLAB));
    let round = Round::take(&there);
    drop(there);
    let here = arrives(&turn, &driver, &round);
    let base = device_base(0);
    let of = |start, bytes| Piece { object: Object::Memory, start, bytes };
    let left = [of(base, 4096), of(base + 12288, MIB), of(base + SLAB, SLAB)];
    assert!(here.restore_later(&round.notes, &left).unwrap());
    here.restore_end().unwrap();
    let was = pattern(1, 2 * SLAB);
    for (from, to, kept) in [
        (0, 4096, true),
        (4096, 12288, false),
        (12288, 12288 + MIB, true),
        (12288 + MIB, SLAB, false),
        (SLAB, 2 * SLAB, true),
    ] {
        let here = peek(base + from, to - from);
        let was = &was[from as usize..to as usize];
        assert!(if kept { here == was } else { here.iter().all(|byte| *byte == 0) }, "{from}");
    }
}

#[test]
fn what_cannot_become_what_is_there_is_no_good() {
    let (turn, driver) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let there = backend(&driver, NO_LIMITS);
    make_objects(&there, 3);
    let first = Round::take(&there);
    there.create_texture(CTX, &texture()).unwrap();
    let more = Round::take(&there);
    there.global(MODULE, "table").unwrap();
    let asked = Round::take(&there);
    drop(there);

    // One of its textures was not made.
    let here = arrives(&turn, &driver, &first);
    here.restore_more(&more.notes).unwrap();
    assert!(!here.restore_later(&more.notes, &more.pieces()).unwrap());
    // Another was.
    here.create_texture(CTX, &texture()).unwrap();
    here.create_texture(CTX, &texture()).unwrap();
    assert!(!here.restore_later(&more.notes, &more.pieces()).unwrap());
    drop(here);

    // The program has asked for the address of a variable, which lies elsewhere here.
    variables(&turn, room());
    let here = arrives(&turn, &driver, &first);
    here.restore_more(&asked.notes).unwrap();
    here.create_texture(CTX, &texture()).unwrap();
    assert!(!here.restore_later(&asked.notes, &asked.pieces()).unwrap());
    drop(here);
    variables(&turn, at);
    let here = arrives(&turn, &driver, &first);
    here.restore_more(&asked.notes).unwrap();
    here.create_texture(CTX, &texture()).unwrap();
    assert!(here.restore_later(&asked.notes, &asked.pieces()).unwrap());

    let endless = [Piece { object: Object::Memory, start: u64::MAX, bytes: 2 }];
    let refused = here.restore_later(&asked.notes, &endless).unwrap_err();
    assert_eq!(refused.code, CuError::INVALID_VALUE);
    assert!(here.restore_later(&[1, 2], &[]).is_err());
    assert!(here.restore_more(&[1, 2]).is_err());
}

#[test]
fn words_that_point_to_functions_are_those_of_the_first_round() {
    let (turn, driver) = Turn::begin(4 << 30);
    let at = room();
    let there = backend(&driver, NO_LIMITS);
    make_table(&turn, &there, at, [0x7e03_0100, 0x7e03_0180]);
    let first = Round::take(&there);
    poke(at + 16, &0x7e03_0100u64.to_le_bytes());
    let second = Round::take(&there);
    drop(there);
    turn.new_process();
    let at = room();
    let here = backend(&driver, NO_LIMITS);
    make_table(&turn, &here, at, [0x7e90_0100, 0x7e90_0180]);
    here.restore_begin(&first.notes).unwrap();
    here.restore_notes(&first.notes).unwrap();
    first.put(&here, None);
    assert!(here.restore_later(&first.notes, &first.pieces()).unwrap());
    first.put(&here, None);
    assert_eq!(peek(at, 8), 0x7e90_0100u64.to_le_bytes());
    assert_eq!(peek(at + 16, 8), 0x7e90_0180u64.to_le_bytes());
    // What has become of them cannot be told once there are bytes of the program's.
    assert!(!here.restore_later(&second.notes, &second.pieces()).unwrap());
}

/// A round whose bytes lie on the device, but for some.
struct Lent {
    parts: Vec<HeldPart>,
    there: Vec<(Piece, HeldPlace)>,
    round: Round,
    all: Vec<Piece>,
}

impl Lent {
    /// Of what has changed since what is known, which then knows of it.
    fn take(backend: &NvidiaBackend, known: &mut Known) -> Lent {
        const CHUNK: u64 = 4 << 20;
        rest(backend);
        backend.prepare_snapshot(Some(known)).unwrap();
        let snapshot = backend.snapshot(Some(known)).unwrap();
        let (mut there, mut saved) = (Vec::new(), Vec::new());
        for piece in snapshot.pieces() {
            let digests = snapshot.digests(piece).unwrap_or_default();
            let runs = known.compare(piece, &digests).into_iter().filter(|run| !run.2);
            for (from, to) in runs.flat_map(|(from, to, _)| {
                (from..to).step_by(CHUNK as usize).map(move |at| (at, to.min(at + CHUNK)))
            }) {
                let (object, start) = (piece.object.clone(), piece.start + from);
                let part = Piece { object, start, bytes: to - from };
                match snapshot.lent(piece, start, to - from) {
                    Some(place) => there.push((part, place)),
                    None => {
                        let mut bytes = vec![0; (to - from) as usize];
                        snapshot.read(piece, start, &mut bytes).unwrap();
                        saved.push((part, bytes));
                    }
                }
            }
            known.pieces.insert(piece.clone(), digests);
        }
        known.leave = false;
        let (parts, all) = (snapshot.lend().unwrap(), snapshot.pieces().to_vec());
        Lent { parts, there, round: Round { saved, notes: snapshot.notes() }, all }
    }

    fn put(self, backend: &NvidiaBackend) {
        backend.restore_from(self.parts).unwrap();
        for (piece, place) in &self.there {
            backend.restore_held(piece, *place).unwrap();
        }
        self.round.put(backend, None);
        backend.restore_rest().unwrap();
    }

    fn bytes_there(&self) -> u64 {
        self.there.iter().map(|(piece, _)| piece.bytes).sum()
    }
}

/// `gpu`: memory that snapshots may take on the device.
fn moves_on_the_device(gpu: u64) -> (u64, u64) {
    let (turn, driver) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let there = backend(&driver, limits(gpu, u64::MAX));
    make_objects(&there, 3);
    let mut known = Known { leave: true, ..Known::nothing(Keys::draw().unwrap()) };
    turn.set(|fake| fake.keys = Some(known.keys.clone()));
    poke(device_base(0), &pattern(1, 2 * SLAB));
    let first = Lent::take(&there, &mut known);
    poke(device_base(0) + 3 * BLOCK, &pattern(5, 2 * BLOCK));
    poke(at, &9u32.to_le_bytes());
    // What the program does after a round does not show in it.
    let second = Lent::take(&there, &mut known);
    poke(device_base(0), &pattern(3, 2 * SLAB));
    drop(there);
    turn.new_process();
    let here = backend(&driver, NO_LIMITS);
    here.restore_begin(&first.round.notes).unwrap();
    make_objects(&here, 3);
    here.restore_notes(&first.round.notes).unwrap();
    assert!(here.takes_held(), "nothing has moved");
    let bytes = (first.bytes_there(), second.bytes_there());
    let before = turn.used();
    first.put(&here);
    here.restore_more(&second.round.notes).unwrap();
    assert!(here.restore_later(&second.round.notes, &second.all).unwrap());
    second.put(&here);
    let staged = turn.used() - before;
    assert!(staged < 3 * MIB, "{staged}: but for the array's bytes, all is given back");
    here.restore_end().unwrap();
    let mut now = pattern(1, 2 * SLAB);
    now[3 * BLOCK as usize..5 * BLOCK as usize].copy_from_slice(&pattern(5, 2 * BLOCK));
    assert!(peek(device_base(0), 2 * SLAB) == now);
    assert_eq!(peek(at, 4), [9, 0, 0, 0]);
    bytes
}

#[test]
fn rounds_on_one_device_leave_bytes_where_they_lie() {
    let (first, second) = moves_on_the_device(u64::MAX);
    assert!(first > 2 * SLAB + 4 * MIB, "{first}");
    assert!((2 * BLOCK..3 * BLOCK).contains(&second), "{second}");
}

#[test]
fn what_had_no_room_on_the_device_comes_by_itself() {
    let (first, second) = moves_on_the_device(14 * MIB);
    assert!(first > 0 && first < SLAB, "{first}");
    assert!((2 * BLOCK..3 * BLOCK).contains(&second), "{second}");
}

#[test]
fn room_is_left_for_as_much_again() {
    let (turn, driver) = Turn::begin(4 * SLAB + 532 * MIB);
    let backend = backend(&driver, NO_LIMITS);
    backend.grant(0, device_base(0), SLAB).unwrap();
    backend.grant(0, device_base(0) + SLAB, SLAB).unwrap();
    let known = Known { leave: true, ..Known::nothing(Keys::draw().unwrap()) };
    rest(&backend);
    let before = turn.used();
    backend.prepare_snapshot(Some(&known)).unwrap();
    assert!(turn.used() - before < 44 * MIB, "{}", turn.used() - before);
    backend.prepare_snapshot(None).unwrap();
    assert!(turn.used() - before >= 48 * MIB, "{}", turn.used() - before);
}
