//! Snapshots, and new backends made of them.

use super::fixture::{A, CTX, FREE, Fixture, copy, map_shared, mapped, word};
use super::world::{
    self, BASE, BROKEN, BROKEN_STREAM, EARLIER, FIRST, LATER, NEVER, RESULT, SECOND,
};
use crate::device::make_notes;
use kedge_cuda_types::{CuError, arena};
use kedge_device::portable::{PlacedVariable, Portable};
use kedge_device::{
    Backend, Code, Interprocess, Object, Piece, Restore, Snapshot, SnapshotError, Snapshots, Swap,
};
use kedge_protocol::{ArrayDesc, ArrayId, CtxId, MemHandleId, ModuleId, StreamId, StreamOp};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const HOUR: u64 = 3_600_000_000_000;
const MIB: u64 = 1 << 20;
const NOTHING: [&str; 0] = [];

#[test]
fn everything_comes_back_where_it_was() {
    let f = Fixture::empty();
    f.backend.runtime.clock.set(HOUR);
    let textures = world::build(&f);
    world::fill(&f, 1);
    world::break_context(&f);
    let seen = world::see(&f);
    let snapshot = f.snapshot();
    world::fill(&f, 100);
    assert_eq!(
        world::see(&f).differences(&seen),
        [
            "plain memory",
            "memory in stream order",
            "arrays",
            "handles",
            "variables",
            "time between events"
        ]
    );
    let f = f.succeed();
    let notes = snapshot.notes();
    f.backend.restore_begin(&notes).unwrap();
    assert_eq!(world::rebuild(&f), textures);
    f.backend.restore_notes(&notes).unwrap();
    world::put_back(&f, &*snapshot);
    f.backend.restore_end().unwrap();
    assert_eq!(world::see(&f).differences(&seen), NOTHING);
    goes_on(&f, &textures);
    // The snapshot was not changed by all that.
    let f = f.succeed();
    f.backend.restore_begin(&notes).unwrap();
    world::rebuild(&f);
    f.backend.restore_notes(&notes).unwrap();
    world::put_back(&f, &*snapshot);
    f.backend.restore_end().unwrap();
    assert_eq!(world::see(&f).differences(&seen), NOTHING);
}

/// What is not bytes has come back too: the program runs on.
fn goes_on(f: &Fixture, textures: &world::Textures) {
    let b = &f.backend;
    assert_eq!(*f.host.faults.lock().unwrap(), [(BROKEN, CuError::ILLEGAL_ADDRESS)]);
    f.submit(BROKEN_STREAM, StreamOp::Empty {});
    assert_eq!(f.sync(BROKEN_STREAM), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(b.query_event(FIRST), Ok(()));
    assert_eq!(b.elapsed_ms(FIRST, NEVER), Err(CuError::INVALID_HANDLE));
    f.submit(A, StreamOp::EventRecord { event: NEVER });
    f.sync(A).unwrap();
    let since = b.elapsed_ms(SECOND, NEVER).unwrap();
    assert!((0.0..60_000.0).contains(&since), "time goes on: {since} ms");
    world::run(f, "count", &[RESULT]);
    f.sync(A).unwrap();
    assert_eq!(word(RESULT), 43, "the second count of this counter");
    for (texture, name) in [(textures.array, "array"), (textures.linear, "linear")] {
        world::run(f, "show", &[RESULT, texture]);
        f.sync(A).unwrap();
        let shown = word(RESULT);
        assert_ne!(shown, 43, "{name}");
        // Texel 5 of what `fill` wrote there.
        let seed = if name == "array" { 3 } else { 1 };
        let byte = |i: u64| u32::from((i * 31 + seed * 17) as u8);
        assert_eq!(shown & 0xff, byte(20), "{name}");
        assert_eq!(shown >> 24, byte(23), "{name}");
    }
    let next = b.create_texture(CTX, &world::array_texture(ArrayId(1))).unwrap();
    assert!(next > textures.dangling.max(textures.array), "numbers are not used again");
    // The device heap knows what was allocated, once.
    world::run(f, "release", &[RESULT + 256]);
    assert_eq!(f.sync(A), Ok(()));
    world::run(f, "show", &[RESULT, textures.dangling]);
    assert!(f.sync(A).is_err(), "its array had gone");
    assert_eq!(b.destroy_texture(CTX, textures.dangling), Ok(()));
}

#[test]
fn a_second_free_of_a_restored_malloc_faults() {
    let f = Fixture::empty();
    world::build(&f);
    world::fill(&f, 1);
    let f = restart(f);
    world::run(&f, "release", &[RESULT + 256]);
    assert_eq!(f.sync(A), Ok(()));
    world::run(&f, "release", &[RESULT + 256]);
    assert!(f.sync(A).is_err());
}

/// The backend that comes of a snapshot of this one.
fn restart(f: Fixture) -> Fixture {
    let snapshot = f.snapshot();
    let f = f.succeed();
    f.backend.restore_begin(&snapshot.notes()).unwrap();
    world::rebuild(&f);
    f.backend.restore_notes(&snapshot.notes()).unwrap();
    world::put_back(&f, &*snapshot);
    f.backend.restore_end().unwrap();
    f
}

#[test]
fn restarts_of_restarts_lose_nothing() {
    let f = Fixture::empty();
    let textures = world::build(&f);
    world::fill(&f, 7);
    let seen = world::see(&f);
    let f = restart(restart(f));
    assert_eq!(world::see(&f).differences(&seen), NOTHING);
    world::fill(&f, 1);
    let f = restart(f);
    world::run(&f, "show", &[RESULT, textures.linear]);
    assert_eq!(f.sync(A), Ok(()));
}

#[test]
fn a_snapshot_stays_as_it_was_while_kernels_run() {
    let f = Fixture::new();
    let len = 8 << 20;
    let dev = f.alloc(0, len);
    world::load(&f, CTX, EARLIER);
    let fill = |value| StreamOp::Memset {
        dst: dev,
        pitch: 0,
        value,
        element: 4,
        width: len / 4,
        height: 1,
    };
    f.submit(A, fill(0x5a5a_5a5a));
    f.sync(A).unwrap();
    let snapshot = f.snapshot();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (f, over) = (&f, &over);
        scope.spawn(move || {
            let mut value = 0;
            while !over.load(Ordering::Relaxed) {
                value += 1;
                f.submit(A, fill(value));
                world::run_blocks(f, A, "paint", [len as u32 / 4 / 256, 256], &[dev, value.into()]);
                f.sync(A).unwrap();
            }
        });
        let readers = [0, 1].map(|_| scope.spawn(|| (0..4).all(|_| reads(&*snapshot, 0x5a))));
        let same = readers.map(|reader| reader.join().unwrap());
        over.store(true, Ordering::Relaxed);
        assert_eq!(same, [true, true]);
    });
    assert_ne!(word(dev), 0x5a5a_5a5a);
}

/// Whether every byte of the snapshot is `byte`.
fn reads(snapshot: &dyn Snapshot, byte: u8) -> bool {
    let large = |piece: &&Piece| piece.start < BASE + arena::DEVICE_CLIENT_LEN;
    let same = |piece: &Piece| {
        let mut bytes = vec![0; piece.bytes as usize];
        snapshot.read(piece, piece.start, &mut bytes).unwrap();
        bytes.iter().all(|found| *found == byte)
    };
    let pieces = || snapshot.pieces().iter().filter(large);
    assert_eq!(pieces().map(|piece| piece.bytes).sum::<u64>(), 8 << 20);
    pieces().all(same)
}

#[test]
fn an_exported_slab_is_kept_as_it_was() {
    let f = Fixture::new();
    let dev = f.alloc(4096, 8192);
    f.set(A, dev + 4096);
    f.sync(A).unwrap();
    let (fd, base, size) = f.backend.export_slab(dev).unwrap();
    assert_eq!((base, size), (BASE, 32 << 20));
    let snapshot = f.snapshot();
    f.submit(A, StreamOp::WriteValue { addr: dev + 4096, value: 2, wide: false });
    f.sync(A).unwrap();
    let mut bytes = vec![0; 8192];
    let [piece] = snapshot.pieces() else { panic!("{:?}", snapshot.pieces()) };
    snapshot.read(piece, dev, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[4096]), (0, 1));
    drop(fd);
    let f = f.succeed();
    f.backend.restore_begin(&snapshot.notes()).unwrap();
    f.make_streams();
    f.backend.grant(0, base, size).unwrap();
    f.backend.restore_notes(&snapshot.notes()).unwrap();
    world::put_back(&f, &*snapshot);
    f.backend.restore_end().unwrap();
    assert_eq!(word(dev + 4096), 1);
}

#[test]
fn another_process_s_memory_is_left_out_until_it_is_adopted() {
    let f = Fixture::new();
    let ([own, other], size) = ([MemHandleId(1), MemHandleId(2)], 2 << 20);
    f.backend.create_handle(own, 0, size, true).unwrap();
    f.backend.import_handle(other, f.backend.export_handle(own).unwrap()).unwrap();
    f.backend.vmm.write(own, 0, &[7]).unwrap();
    let of = |snapshot: &dyn Snapshot| -> Vec<Object> {
        snapshot.pieces().iter().map(|piece| piece.object.clone()).collect()
    };
    assert_eq!(of(&*f.snapshot()), [Object::Handle(own)]);
    let free = f.backend.free_memory(0).unwrap();
    f.backend.destroy_handle(own).unwrap();
    assert_eq!(f.backend.adopt_handle(own, 0, size), Err(CuError::INVALID_HANDLE));
    assert_eq!(f.backend.adopt_handle(other, 0, 2 * size), Err(CuError::INVALID_VALUE));
    f.backend.adopt_handle(other, 0, size).unwrap();
    assert_eq!(f.backend.adopt_handle(other, 0, size), Err(CuError::INVALID_VALUE));
    assert_eq!(of(&*f.snapshot()), [Object::Handle(other)]);
    assert_eq!(f.backend.free_memory(0).unwrap(), free);
    f.backend.destroy_handle(other).unwrap();
    assert_eq!(f.backend.free_memory(0).unwrap(), free + size);
}

#[test]
fn memory_of_handles_goes_away_and_comes_back() {
    let f = Fixture::new();
    let (id, at) = (MemHandleId(1), BASE + (1 << 30));
    f.backend.create_handle(id, 0, 4 << 20, false).unwrap();
    f.backend.map_handle(id, at, 2 << 20, 2 << 20).unwrap();
    f.backend.set_access(at, 2 << 20, 0, 3).unwrap();
    f.set(A, at + 8);
    f.sync(A).unwrap();
    let snapshot = f.snapshot();
    assert!(f.backend.vacate().unwrap() >= 4 << 20);
    assert_eq!(word(at + 8), 0);
    f.backend.occupy().unwrap();
    let pieces = snapshot.pieces().iter().filter(|piece| piece.object == Object::Handle(id));
    for piece in pieces {
        let mut bytes = vec![0; piece.bytes as usize];
        snapshot.read(piece, piece.start, &mut bytes).unwrap();
        f.backend.refill(&piece.object, piece.start, &bytes).unwrap();
    }
    f.backend.refilled().unwrap();
    assert_eq!(word(at + 8), 1);
    assert!(f.backend.refill(&Object::Handle(id), 4 << 20, &[1]).is_err());
    f.backend.unmap_handle(at, 2 << 20).unwrap();
    f.backend.destroy_handle(id).unwrap();
}

#[test]
fn memory_that_was_never_touched_is_not_kept() {
    let f = Fixture::new();
    let dev = f.alloc(0, 32 << 20);
    f.set(A, dev + (20 << 20));
    f.sync(A).unwrap();
    let snapshot = f.snapshot();
    let kept: u64 = snapshot.pieces().iter().map(|piece| piece.bytes).sum();
    // A large page at most.
    assert!((1..=2 << 20).contains(&kept), "{kept}");
    let [piece] = snapshot.pieces() else { panic!("{:?}", snapshot.pieces()) };
    let mut byte = [0];
    snapshot.read(piece, dev + (20 << 20), &mut byte).unwrap();
    assert_eq!(byte, [1]);
    let beyond = piece.start + piece.bytes;
    for (start, len) in [(beyond, 1), (beyond - 1, 2), (piece.start - 1, 1), (u64::MAX, 2)] {
        assert_eq!(snapshot.read(piece, start, &mut vec![0; len]), Err(CuError::INVALID_VALUE));
    }
    let other = Piece { object: Object::Array(ArrayId(1)), ..piece.clone() };
    assert_eq!(snapshot.read(&other, piece.start, &mut byte), Err(CuError::INVALID_VALUE));
}

/// Memory, a handle and an array of the same names, made anew and partly written before the second
/// snapshot.
#[test]
fn what_a_later_snapshot_does_not_hold_reads_as_zero() {
    const ARRAY: ArrayId = ArrayId(1);
    const HANDLE: MemHandleId = MemHandleId(1);
    let texels = ArrayDesc {
        device: 0,
        width: 4 << 20,
        height: 0,
        depth: 0,
        format: 1,
        channels: 1,
        flags: 0,
    };
    let make = |f: &Fixture| {
        f.backend.grant(0, BASE, 32 << 20).unwrap();
        f.backend.create_array(CTX, ARRAY, &texels).unwrap();
        f.backend.create_handle(HANDLE, 0, 4 << 20, false).unwrap();
    };
    let write = |f: &Fixture, at: u64| {
        f.submit(A, StreamOp::WriteValue { addr: BASE + at, value: 7, wide: false });
        f.sync(A).unwrap();
        f.backend.vmm.write(HANDLE, at, &[7]).unwrap();
        f.backend.tables().array(ARRAY).unwrap().restore(at, &[7]).unwrap();
    };
    let read = |f: &Fixture, at: u64| {
        let mut byte = [0];
        f.backend.vmm.read(HANDLE, at, &mut byte).unwrap();
        let texel = f.backend.tables().array(ARRAY).unwrap().address() + at;
        [word(BASE + at) as u8, byte[0], word(texel) as u8]
    };
    let f = Fixture::bare();
    make(&f);
    f.alloc(0, 4 << 20);
    let far = 4 * MIB - 4;
    [0, MIB, far].into_iter().for_each(|at| write(&f, at));
    let first = f.snapshot();
    f.backend.unmap(BASE, 4 << 20).unwrap();
    f.backend.give_back(0, BASE, 32 << 20).unwrap();
    f.backend.destroy_array(ARRAY).unwrap();
    f.backend.destroy_handle(HANDLE).unwrap();
    make(&f);
    f.alloc(0, 4 << 20);
    write(&f, MIB + 4096);
    let second = f.snapshot();
    let places = [0, MIB, MIB + 4096, far];
    let seen = places.map(|at| read(&f, at));
    assert_eq!(seen, [[0; 3], [0; 3], [7; 3], [0; 3]]);

    let f = f.succeed();
    f.backend.restore_begin(&first.notes()).unwrap();
    f.make_streams();
    make(&f);
    f.backend.restore_notes(&first.notes()).unwrap();
    world::put_back(&f, &*first);
    assert_eq!(read(&f, far), [7; 3]);
    assert!(f.backend.restore_later(&second.notes(), second.pieces()).unwrap());
    world::put_back(&f, &*second);
    f.backend.restore_end().unwrap();
    assert_eq!(places.map(|at| read(&f, at)), seen);
}

/// Another kind of device lists what may have changed there, and tells nothing of constants. The
/// client may have begun on either kind.
#[test]
fn variables_that_another_kind_of_device_does_not_list_keep_what_their_image_says() {
    // Behind what this process places outside of the arenas.
    const AT: u64 = 0x2D11_0000_0000;
    let mut f = Fixture::empty();
    for exact in [false, true] {
        let counter = PlacedVariable {
            module: EARLIER,
            name: "counter".to_owned(),
            addr: AT,
            bytes: 4,
            asked: false,
            shared: false,
        };
        let notes = Portable { exact, variables: vec![counter], ..Portable::default() };
        let notes = make_notes(&notes).unwrap();
        f = f.succeed();
        f.backend.restore_begin(&notes).unwrap();
        f.make_streams();
        f.backend.load_module(CTX, EARLIER, Code::Whole(world::MODULE.into())).unwrap();
        f.backend.restore_notes(&notes).unwrap();
        f.backend.restore(&Object::Memory, AT, &7u32.to_le_bytes()).unwrap();
        let pieces = [Piece { object: Object::Memory, start: AT, bytes: 4 }];
        assert!(f.backend.restore_later(&notes, &pieces).unwrap());
        f.backend.restore_end().unwrap();
        let at = |name| f.backend.global(EARLIER, name).unwrap().addr;
        assert_eq!([word(at("counter")), word(at("factor"))], [7, 3], "{exact}");
        assert_eq!(at("counter"), AT);
    }
}

#[test]
fn pieces_without_an_end_are_refused() {
    let f = Fixture::new();
    f.alloc(0, 4096);
    let snapshot = f.snapshot();
    let f = f.succeed();
    f.backend.restore_begin(&snapshot.notes()).unwrap();
    f.make_streams();
    f.backend.grant(0, BASE, 32 << 20).unwrap();
    f.backend.restore_notes(&snapshot.notes()).unwrap();
    for object in [Object::Memory, Object::Array(ArrayId(9)), Object::Handle(MemHandleId(9))] {
        let endless = Piece { object, start: 4096, bytes: u64::MAX };
        let refused = f.backend.restore_later(&snapshot.notes(), &[endless]).unwrap_err();
        assert!(refused.message.contains("has no end"), "{refused}");
    }
}

#[test]
fn a_device_at_work_is_not_at_rest() {
    let f = Fixture::new();
    let word_at = f.alloc(0, 4096);
    f.hold(A, word_at);
    assert!(!f.backend.at_rest());
    let refused = f.backend.snapshot(None).err().unwrap();
    assert_eq!(refused.code, CuError::NOT_READY);
    f.set(FREE, word_at);
    f.sync(A).unwrap();
    f.snapshot();
}

/// Restarts with what `change` makes of the making; gives what refuses it.
fn refusal(change: impl Fn(&Fixture, &[u8]) -> Result<(), SnapshotError>) -> SnapshotError {
    let f = Fixture::empty();
    world::build(&f);
    world::fill(&f, 1);
    let notes = f.snapshot().notes();
    let f = f.succeed();
    change(&f, &notes).unwrap_err()
}

#[test]
fn what_was_not_made_again_is_refused_by_name() {
    let missing = refusal(|f, notes| {
        f.backend.restore_begin(notes)?;
        f.make_streams();
        f.backend.restore_notes(notes)
    });
    let name = format!("module {}", EARLIER.0);
    assert!(missing.message.starts_with(&name), "{missing}");
    let missing = refusal(|f, notes| {
        f.backend.restore_begin(notes)?;
        f.make_streams();
        f.backend.grant(0, BASE, 32 << 20)?;
        for module in [EARLIER, LATER] {
            let image = Code::Whole(world::MODULE.into());
            f.backend.load_module(CTX, module, image).map_err(|e| CuError(e.code))?;
        }
        f.backend.restore_notes(notes)
    });
    assert!(missing.message.contains("texture"), "{missing}");
}

#[test]
fn another_module_of_the_same_id_is_refused_by_its_variable() {
    let f = Fixture::empty();
    world::build(&f);
    world::fill(&f, 1);
    let notes = f.snapshot().notes();
    let renamed = world::MODULE.replace("factor", "number");
    let longer = world::MODULE.replace(".u32 factor = 3", ".u32 factor[2] = {3, 4}");
    let fewer = world::MODULE.replace("ld.const.u32 %r1, [factor]", "mov.u32 %r1, 3");
    let fewer = fewer.replace(".visible .const .align 4 .u32 factor = 3;", "");
    let mut f = f;
    for (text, named) in [(renamed, "number"), (longer, "factor"), (fewer, "factor")] {
        f = f.succeed();
        f.backend.restore_begin(&notes).unwrap();
        f.make_streams();
        let refused = f.backend.load_module(CTX, EARLIER, Code::Whole(text.into())).unwrap_err();
        assert_eq!(refused.code, CuError::INVALID_IMAGE.0, "{}", &*refused.message);
        assert!(refused.message.contains(named), "{}", &*refused.message);
    }
    let refused =
        f.backend.load_module(CTX, ModuleId(77), Code::Whole(world::MODULE.into())).unwrap_err();
    assert!(refused.message.contains("module 77"), "{}", &*refused.message);
}

#[test]
fn the_stages_of_a_restart_come_in_their_order() {
    let f = Fixture::empty();
    world::build(&f);
    let notes = f.snapshot().notes();
    let wrong = |result: Result<(), SnapshotError>| {
        assert_eq!(result.unwrap_err().code, CuError::ILLEGAL_STATE);
    };
    wrong(f.backend.restore_begin(&notes));
    let f = f.succeed();
    wrong(f.backend.restore_notes(&notes));
    wrong(f.backend.restore(&Object::Memory, BASE, &[1]));
    wrong(f.backend.restore_end());
    f.backend.restore_begin(&notes).unwrap();
    wrong(f.backend.restore_begin(&notes));
    wrong(f.backend.restore_end());
    world::rebuild(&f);
    f.backend.restore_notes(&notes).unwrap();
    f.backend.restore(&Object::Memory, BASE, &[1]).unwrap();
    let array = Object::Array(ArrayId(1));
    for (object, start) in [
        (Object::Memory, BASE + (8 << 20)),
        (Object::Memory, 0x1000),
        (Object::Memory, u64::MAX),
        (Object::Memory, arena::SHARED_BASE),
        (Object::Array(ArrayId(99)), 0),
        (array.clone(), 64),
        (array, u64::MAX),
        (Object::Variable { module: EARLIER, name: "counter".to_owned() }, 0),
    ] {
        let refused = f.backend.restore(&object, start, &[1]).unwrap_err();
        assert!(refused.message.contains("no place"), "{refused}");
    }
    f.backend.restore_end().unwrap();
    wrong(f.backend.restore_end());
}

#[test]
fn every_device_has_its_own_and_none_may_be_missing() {
    let (second, stream) = (CtxId(9), StreamId(90));
    let base = arena::device_base(1);
    let make = |f: &Fixture| {
        f.make_streams();
        f.backend.create_context(second, 1, stream).unwrap();
        f.backend.grant(1, base, 4 << 20).unwrap();
        world::load(f, second, EARLIER);
    };
    let f = Fixture::with_devices(2);
    make(&f);
    f.backend.map(second, base, 4096).unwrap();
    world::run_blocks(&f, stream, "grab", [1, 1], &[base]);
    world::run_blocks(&f, stream, "paint", [1, 32], &[base + 256, 77]);
    f.sync(stream).unwrap();
    let (snapshot, malloc) = (f.snapshot(), word(base));
    let f = f.succeed_with(1);
    let refused = f.backend.restore_begin(&snapshot.notes()).unwrap_err();
    assert!(refused.message.contains(&format!("{base:#x} is no device's")), "{refused}");
    let f = f.succeed_with(2);
    f.backend.restore_begin(&snapshot.notes()).unwrap();
    make(&f);
    f.backend.restore_notes(&snapshot.notes()).unwrap();
    world::put_back(&f, &*snapshot);
    f.backend.restore_end().unwrap();
    assert_eq!((word(base), word(base + 256 + 124)), (malloc, 77));
    world::run_blocks(&f, stream, "release", [1, 1], &[base]);
    assert_eq!(f.sync(stream), Ok(()));
}

#[test]
fn a_managed_variable_keeps_what_the_host_has_put_back() {
    const TEXT: &str = ".version 8.0\n.target sm_70\n.address_size 64\n\
        .visible .global .attribute(.managed) .align 4 .u32 both = 5;\n\0";
    let f = Fixture::bare();
    map_shared();
    f.backend
        .load_module(CTX, EARLIER, Code::Whole(TEXT.into()))
        .unwrap_or_else(|e| panic!("{}", &*e.message));
    let both = f.backend.global(EARLIER, "both").unwrap();
    assert!(both.managed && word(both.addr) == 5);
    let snapshot = f.snapshot();
    assert_eq!(snapshot.pieces(), [], "the shared arena is the host's to save");
    let f = f.succeed();
    // SAFETY: in what `map_shared` has mapped.
    unsafe { (both.addr as *mut u32).write_volatile(77) };
    f.backend.restore_begin(&snapshot.notes()).unwrap();
    f.make_streams();
    f.backend.load_module(CTX, EARLIER, Code::Whole(TEXT.into())).unwrap();
    f.backend.restore_notes(&snapshot.notes()).unwrap();
    f.backend.restore_end().unwrap();
    assert_eq!(f.backend.global(EARLIER, "both").unwrap().addr, both.addr);
    assert_eq!(word(both.addr), 77);
    let dev = f.alloc_in_new_slab();
    f.submit(A, copy(mapped(both.addr, 0, 0), mapped(dev, 0, 0), [4, 1, 1]));
    assert_eq!(f.sync(A), Ok(()), "kernels may use it");
}
