//! Snapshots and restores, whole, on the fake driver.

use crate::arena::Arena;
use crate::devices::Devices;
use crate::fake::Turn;
use crate::output::Capture;
use crate::pace::{DrainRate, DrainWays};
use crate::pinned::Slots;
use crate::ready::Spare;
use crate::spare::CacheLimits;
use crate::symbols::relocated;
use crate::{Gpus, NvidiaBackend};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_base;
use kedge_device::portable::Portable;
use kedge_device::{Backend, Code, Done, Host, Object, Piece, Restore, Snapshot, Snapshots};
use kedge_protocol::*;
use kedge_wire::{List, Text};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const CTX: CtxId = CtxId(1);
pub(crate) const LEGACY: StreamId = StreamId(1);
pub(crate) const SLAB: u64 = 24 * MIB;

pub(crate) struct Quiet;

impl Host for Quiet {
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
}

pub(crate) fn backend(
    driver: &Arc<crate::driver::Driver>,
    limits: CacheLimits,
) -> Arc<NvidiaBackend> {
    hosted(driver, limits, Arc::new(Quiet))
}

/// The fake one.
pub(crate) fn gpus(driver: &Arc<crate::driver::Driver>) -> Gpus {
    let info = DeviceInfo {
        name: Text::truncated("fake".into()),
        uuid: [0; 16],
        pci: [0; 3],
        total_memory: 0,
        exact: false,
        apart: false,
        attributes: List::default(),
    };
    let driver = Arc::clone(driver);
    let (devices, infos, quota) = (vec![0], vec![info], u64::MAX);
    Gpus { driver, devices, infos, version: 0, reserved: 0, quota, windows: None }
}

/// Without a context.
pub(crate) fn bare(
    driver: &Arc<crate::driver::Driver>,
    limits: CacheLimits,
    host: Arc<dyn Host>,
) -> Arc<NvidiaBackend> {
    let arena = Arena::reserve(driver, &Devices::new(vec![0], None), 0).unwrap();
    let spare = Spare { unnamed: None, slots: Slots::new(driver) };
    NvidiaBackend::assemble(gpus(driver), arena, Capture::nothing(), spare, (host, limits))
}

pub(crate) fn hosted(
    driver: &Arc<crate::driver::Driver>,
    limits: CacheLimits,
    host: Arc<dyn Host>,
) -> Arc<NvidiaBackend> {
    let backend = bare(driver, limits, host);
    backend.create_context(CTX, 0, LEGACY).unwrap();
    backend
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let word = |n: u64| (n + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..bytes.div_ceil(8)).flat_map(word).take(bytes as usize).collect()
}

pub(crate) fn poke(addr: u64, bytes: &[u8]) {
    // SAFETY: memory that the fake driver has mapped there.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
}

pub(crate) fn peek(addr: u64, bytes: u64) -> Vec<u8> {
    // SAFETY: memory that the fake driver has mapped there, of so many bytes.
    unsafe { std::slice::from_raw_parts(addr as *const u8, bytes as usize) }.to_vec()
}

fn image() -> Vec<u8> {
    b".version 8.0\n.target sm_90\n.global .u32 counter; .const .u8 table[100]; .global .u32 lost;"
        .to_vec()
}

pub(crate) const MODULE: ModuleId = ModuleId(5);

/// What the client would have made, in its order. `taken`: a texture that is there no longer.
pub(crate) fn make_objects(backend: &NvidiaBackend, textures: usize) -> Vec<u64> {
    backend.grant(0, device_base(0), SLAB).unwrap();
    backend.grant(0, device_base(0) + SLAB, SLAB).unwrap();
    backend.create_handle(MemHandleId(3), 0, 4 * MIB, false).unwrap();
    let (width, height, depth) = (33, 7, 5);
    let desc = ArrayDesc { device: 0, width, height, depth, format: 0x20, channels: 2, flags: 0 };
    backend.create_array(CTX, ArrayId(8), &desc).unwrap();
    backend.load_module(CTX, MODULE, Code::Whole(image())).unwrap();
    backend.kernel(MODULE, 0, "bump").unwrap();
    backend.create_event(EventId(1), CTX, true, false).unwrap();
    backend.create_event(EventId(2), CTX, true, false).unwrap();
    (0..textures).map(|_| backend.create_texture(CTX, &texture()).unwrap()).collect()
}

pub(crate) fn texture() -> Texture {
    Texture {
        surface: false,
        source: TextureSource::Linear {
            addr: device_base(0),
            format: 0x20,
            channels: 1,
            bytes: 64,
        },
        address: [0; 3],
        filter: 0,
        flags: 0,
        border: [0.0; 4],
        mipmap_filter: 0,
        mipmap_bias: 0.0,
        mipmap_clamp: [0.0; 2],
        view_format: 0,
    }
}

pub(crate) fn rest(backend: &NvidiaBackend) {
    let end = Instant::now() + Duration::from_secs(20);
    while !backend.at_rest() {
        assert!(Instant::now() < end, "the backend does not come to rest");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn read_all(snapshot: &dyn Snapshot) -> Vec<(Piece, Vec<u8>)> {
    let read = |piece: &Piece| {
        let mut bytes = vec![0; piece.bytes as usize];
        snapshot.read(piece, piece.start, &mut bytes).unwrap();
        (piece.clone(), bytes)
    };
    snapshot.pieces().iter().map(read).collect()
}

/// By several threads, in chunks that are not those of the pieces.
fn put_back(backend: &NvidiaBackend, saved: &[(Piece, Vec<u8>)]) {
    const CHUNK: usize = 5 << 20;
    std::thread::scope(|scope| {
        for (piece, bytes) in saved {
            scope.spawn(move || {
                for (chunk, at) in bytes.chunks(CHUNK).zip((piece.start..).step_by(CHUNK)) {
                    backend.restore(&piece.object, at, chunk).unwrap();
                }
            });
        }
    });
    backend.restore_end().unwrap();
}

/// Memory of this test that plays the variables.
pub(crate) fn variables(turn: &Turn, at: u64) -> u64 {
    turn.set(|fake| fake.variables = vec![("counter", at, 4), ("table", at + 16, 100)]);
    at
}

pub(crate) fn room() -> u64 {
    Box::leak(Box::new([0_u8; 256])).as_mut_ptr().expose_provenance() as u64
}

fn round_trip(limits: CacheLimits, memory: u64) {
    let (turn, driver) = Turn::begin(memory);
    let at = variables(&turn, room());
    let first = backend(&driver, limits);
    make_objects(&first, 3);
    poke(device_base(0), &pattern(1, 2 * SLAB));
    poke(at, &7u32.to_le_bytes());
    poke(at + 16, &pattern(2, 100));
    rest(&first);
    let before = turn.used();
    first.prepare_snapshot(None).unwrap();
    let snapshot = first.snapshot(None).unwrap();
    let bytes: u64 = snapshot.pieces().iter().map(|piece| piece.bytes).sum();
    assert_eq!(bytes, 2 * SLAB + 4 * MIB + 33 * 8 * 7 * 5 + 4 + 100);
    // The program goes on.
    poke(device_base(0), &pattern(9, 2 * SLAB));
    poke(at, &[1; 200]);
    let saved = read_all(&*snapshot);
    // What was put into host memory in the pause leaves no device any more.
    let (drained, most) = (snapshot.drained().bytes, limits.gpu.min(bytes));
    assert!(drained <= most && (drained > 0) == (most > 0), "{drained} of {most}");
    assert!(most < bytes || drained == bytes, "{drained} of {bytes}");
    let notes = snapshot.notes();
    drop(snapshot);
    assert_eq!(turn.used(), before, "device memory is the program's again");
    drop(first);
    turn.new_process();
    let second = backend(&driver, limits);
    second.restore_begin(&notes).unwrap();
    make_objects(&second, 3);
    second.restore_notes(&notes).unwrap();
    put_back(&second, &saved);
    assert!(peek(device_base(0), 2 * SLAB) == pattern(1, 2 * SLAB));
    assert_eq!((peek(at, 4), peek(at + 16, 100)), (vec![7, 0, 0, 0], pattern(2, 100)));
    rest(&second);
    assert!(read_all(&*second.snapshot(None).unwrap()) == saved, "arrays and handles as well");
}

pub(crate) const fn limits(gpu: u64, host: u64) -> CacheLimits {
    let (drain, ways) = (DrainRate::Limit(u64::MAX), DrainWays::USUAL);
    CacheLimits { gpu, host, drain, ways }
}

pub(crate) const NO_LIMITS: CacheLimits = limits(u64::MAX, u64::MAX);

#[test]
fn all_memory_comes_back_from_spare_device_memory() {
    round_trip(NO_LIMITS, 4 << 30);
}

#[test]
fn all_memory_comes_back_from_host_memory() {
    round_trip(CacheLimits { gpu: 0, ..NO_LIMITS }, 4 << 30);
}

#[test]
fn all_memory_comes_back_from_both() {
    // Room for a part of the first slab.
    round_trip(CacheLimits { gpu: 14 * MIB, ..NO_LIMITS }, 4 << 30);
}

#[test]
fn without_room_the_remedy_is_named() {
    let (_turn, driver) = Turn::begin(4 << 30);
    let limits = limits(4 * MIB, 8 * MIB);
    let backend = backend(&driver, limits);
    backend.grant(0, device_base(0), SLAB).unwrap();
    let refused = backend.snapshot(None).err().unwrap();
    assert_eq!(refused.code, CuError::OUT_OF_MEMORY);
    assert!(refused.message.contains("12 MiB more"), "{refused}");
    assert!(refused.message.contains("--cache-gpu"), "{refused}");
    // What was lent for it is there again.
    backend.give_back(0, device_base(0), SLAB).unwrap();
    backend.grant(0, device_base(0), 10 * MIB).unwrap();
    backend.snapshot(None).unwrap();
}

#[test]
fn a_program_that_grows_gets_what_was_kept_ready() {
    let (_turn, driver) = Turn::begin(600 * MIB);
    let backend = backend(&driver, NO_LIMITS);
    backend.grant(0, device_base(0), 150 * MIB).unwrap();
    backend.prepare_snapshot(None).unwrap();
    backend.grant(0, device_base(0) + 150 * MIB, 440 * MIB).unwrap();
}

#[test]
fn a_moved_variable_is_refused_where_somebody_may_point_to_it() {
    let (turn, driver) = Turn::begin(4 << 30);
    let at = variables(&turn, room());
    let first = backend(&driver, NO_LIMITS);
    make_objects(&first, 0);
    poke(device_base(0) + 8, &(at + 20).to_le_bytes());
    rest(&first);
    let unasked = first.snapshot(None).unwrap().notes();
    first.global(MODULE, "table").unwrap();
    let asked = first.snapshot(None).unwrap();
    let saved = read_all(&*asked);
    let asked = asked.notes();
    drop(first);
    turn.new_process();
    variables(&turn, room());
    let second = backend(&driver, NO_LIMITS);
    make_objects(&second, 0);
    rest(&second);
    let refused = second.restore_notes(&asked).unwrap_err();
    assert!(refused.message.contains("table") && refused.message.contains("knows"), "{refused}");
    second.restore_notes(&unasked).unwrap();
    let memory = saved.iter().find(|(piece, _)| piece.object == Object::Memory).unwrap();
    let refused = second.restore(&Object::Memory, memory.0.start, &memory.1).unwrap_err();
    assert!(refused.message.contains("table") && refused.message.contains("points"), "{refused}");
    second.restore(&Object::Memory, device_base(0) + 16, &[0; 64]).unwrap();
}

#[test]
fn textures_get_their_handles_again() {
    let (turn, driver) = Turn::begin(4 << 30);
    variables(&turn, room());
    let first = backend(&driver, NO_LIMITS);
    let made = make_objects(&first, 9);
    for gone in [0, 3, 7] {
        first.destroy_texture(CTX, made[gone]).unwrap();
    }
    assert_eq!(first.create_texture(CTX, &texture()).unwrap(), made[0], "the newest is the first");
    rest(&first);
    let notes = first.snapshot(None).unwrap().notes();
    drop(first);
    turn.new_process();
    let second = backend(&driver, NO_LIMITS);
    second.restore_begin(&notes).unwrap();
    let handles = make_objects(&second, 7);
    assert_eq!(handles, [1, 2, 4, 5, 6, 8, 0].map(|index: usize| made[index]));
    rest(&second);
    second.restore_notes(&notes).unwrap();
    for handle in &handles {
        second.destroy_texture(CTX, *handle).unwrap();
    }
    // What was made in vain is gone.
    assert_eq!(second.create_texture(CTX, &texture()).unwrap(), made[0]);
    assert_eq!(second.destroy_texture(CTX, made[3]), Err(CuError::INVALID_HANDLE));
}

/// Those that software devices made have other numbers than the driver's next ones.
#[test]
fn textures_of_software_devices_get_numbers_that_the_driver_gives_or_are_refused() {
    let (turn, driver) = Turn::begin(4 << 30);
    let notes = |handles: &[u64]| {
        let textures = handles.iter().map(|handle| (CTX, *handle)).collect();
        crate::make_notes(&Portable { textures, ..Portable::default() }).unwrap()
    };
    let given = backend(&driver, NO_LIMITS);
    given.restore_begin(&notes(&[3, 1])).unwrap();
    assert_eq!(make_objects(&given, 2), [3, 1]);
    rest(&given);
    given.restore_notes(&notes(&[3, 1])).unwrap();
    drop(given);
    turn.new_process();
    let refused = backend(&driver, NO_LIMITS);
    refused.restore_begin(&notes(&[1 << 40])).unwrap();
    make_objects(&refused, 0);
    assert_eq!(refused.create_texture(CTX, &texture()), Err(CuError::INVALID_HANDLE));
}

#[test]
fn times_of_events_go_on() {
    let (turn, driver) = Turn::begin(4 << 30);
    variables(&turn, room());
    let first = backend(&driver, NO_LIMITS);
    make_objects(&first, 0);
    let record = |backend: &NvidiaBackend, event| {
        backend.submit(LEGACY, StreamOp::EventRecord { event }).unwrap();
    };
    turn.set(|fake| fake.clock = 1000.0);
    record(&first, EventId(1));
    turn.set(|fake| fake.clock = 1002.5);
    record(&first, EventId(2));
    turn.set(|fake| fake.clock = 5000.0);
    rest(&first);
    let notes = first.snapshot(None).unwrap().notes();
    drop(first);
    turn.new_process();
    turn.set(|fake| fake.clock = 20.0);
    let second = backend(&driver, NO_LIMITS);
    make_objects(&second, 0);
    rest(&second);
    second.restore_notes(&notes).unwrap();
    second.restore_end().unwrap();
    assert_eq!(second.elapsed_ms(EventId(1), EventId(2)), Ok(2.5));
    turn.set(|fake| fake.clock = 24.0);
    record(&second, EventId(2));
    // Four seconds before the checkpoint, and four milliseconds after it.
    assert_eq!(second.elapsed_ms(EventId(1), EventId(2)), Ok(4004.0));
    // And once more.
    turn.set(|fake| fake.clock = 30.0);
    rest(&second);
    let notes = second.snapshot(None).unwrap().notes();
    drop(second);
    turn.new_process();
    let third = backend(&driver, NO_LIMITS);
    make_objects(&third, 0);
    rest(&third);
    third.restore_notes(&notes).unwrap();
    third.restore_end().unwrap();
    assert_eq!(third.elapsed_ms(EventId(1), EventId(2)), Ok(4004.0));
}

#[test]
fn a_device_with_work_is_not_at_rest() {
    let (turn, driver) = Turn::begin(4 << 30);
    let backend = backend(&driver, NO_LIMITS);
    backend.grant(0, device_base(0), SLAB).unwrap();
    let (dst, width) = (device_base(0), 64);
    let fill = StreamOp::Memset { dst, pitch: 0, value: 1, element: 1, width, height: 1 };
    turn.set(|fake| fake.pending = true);
    backend.submit(LEGACY, fill).unwrap();
    assert!(!backend.at_rest());
    // Nobody waits for it: the driver is asked.
    turn.set(|fake| fake.pending = false);
    rest(&backend);
    assert!(backend.is_idle());
}

#[test]
fn kernels_that_allocate_are_refused_by_name_unless_nothing_of_it_is_left() {
    let (turn, driver) = Turn::begin(4 << 30);
    let backend = backend(&driver, NO_LIMITS);
    let text =
        b".version 8.0\n.target sm_90\n.extern .func (.param .b64 r) malloc (.param .b64 n);";
    backend.load_module(CTX, MODULE, Code::Whole(text.to_vec())).unwrap();
    rest(&backend);
    backend.snapshot(None).unwrap();
    backend.kernel(MODULE, 0, "grow").unwrap();
    let refused = backend.snapshot(None).err().unwrap();
    assert!(refused.message.contains("kernel grow"), "{refused}");
    assert!(refused.message.contains("cannot be told"), "{refused}");
    // Of a fresh heap what it gives once it is made counts.
    let (before, fresh, other, late) = ([1, 1, 0], [7, 3, 0], [7, 2, 0], [7, 3, 1]);
    turn.set(|fake| fake.heaps = [before, fresh].into());
    backend.prepare_snapshot(None).unwrap();
    for (given, taken) in [(fresh, true), (other, false), (late, false), (fresh, true)] {
        turn.set(|fake| fake.heaps = [given].into());
        let snapshot = backend.snapshot(None);
        assert_eq!(snapshot.is_ok(), taken, "{given:?}");
        let said = snapshot.err().map(|refused| refused.message).unwrap_or_default();
        assert!(taken || said.contains("kernel grow") && said.contains("not free"), "{said}");
    }
}

#[test]
fn a_single_relocatable_image_goes_to_the_linker() {
    let (_turn, driver) = Turn::begin(4 << 30);
    let backend = backend(&driver, NO_LIMITS);
    // This driver loads whatever it is given, and has no linker.
    backend.load_module(CTX, ModuleId(6), Code::Whole(image())).unwrap();
    backend.load_module(CTX, MODULE, Code::Parts(vec![image()])).unwrap_err();
}

#[test]
fn bytes_of_no_object_are_refused() {
    let (turn, driver) = Turn::begin(4 << 30);
    variables(&turn, room());
    let backend = backend(&driver, NO_LIMITS);
    make_objects(&backend, 0);
    let (array, handle) = (Object::Array(ArrayId(8)), Object::Handle(MemHandleId(3)));
    let variable = Object::Variable { module: MODULE, name: "table".into() };
    for (object, start, bytes) in [
        (Object::Memory, device_base(0) + 2 * SLAB - 8, 16),
        (Object::Memory, 0x1000, 16),
        (Object::Memory, u64::MAX - 4, 16),
        (array, 33 * 8 * 7 * 5 - 8, 16),
        (handle, 4 * MIB, 1),
        (variable, 90, 11),
        (Object::Array(ArrayId(99)), 0, 1),
        (Object::Handle(MemHandleId(99)), 0, 1),
        (Object::Variable { module: MODULE, name: "none".into() }, 0, 1),
    ] {
        assert!(backend.restore(&object, start, &vec![0; bytes]).is_err(), "{object:?} {start:#x}");
    }
    rest(&backend);
    let snapshot = backend.snapshot(None).unwrap();
    let memory = snapshot.pieces().iter().find(|piece| piece.object == Object::Memory).unwrap();
    let mut out = [0; 16];
    assert!(snapshot.read(memory, device_base(0) + SLAB - 8, &mut out).is_err(), "two pieces");
    assert!(snapshot.read(memory, 0, &mut out).is_err());
    assert!(backend.restore_notes(&[1, 2, 3]).is_err());
}

/// A module with a table of two functions, of which the driver says that they are here.
pub(crate) fn make_table(turn: &Turn, backend: &NvidiaBackend, at: u64, functions: [u64; 2]) {
    turn.set(|fake| fake.variables = vec![("table", at, 24)]);
    let symbols = [("one", 2, 0, 1, 0, 8), ("two", 2, 0, 1, 8, 8), ("table", 1, 0, 1, 0, 24)];
    let image = relocated(&symbols, &[], &[(0, 2, 0), (16, 2, 1)]);
    backend.grant(0, device_base(0), SLAB).unwrap();
    backend.load_module(CTX, MODULE, Code::Whole(image)).unwrap();
    backend.kernel(MODULE, 0, "bump").unwrap();
    poke(at, &functions[0].to_le_bytes());
    poke(at + 16, &functions[1].to_le_bytes());
    rest(backend);
}

#[test]
fn words_that_point_to_functions_follow_the_code() {
    let (turn, driver) = Turn::begin(4 << 30);
    let first = backend(&driver, NO_LIMITS);
    let at = room();
    make_table(&turn, &first, at, [0x7e03_0100, 0x7e03_0180]);
    poke(at + 8, &5u64.to_le_bytes());
    let snapshot = first.snapshot(None).unwrap();
    let (saved, notes) = (read_all(&*snapshot), snapshot.notes());
    assert!(!crate::read_notes(&notes).unwrap().bound.is_empty(), "software devices are refused");
    drop((snapshot, first));
    turn.new_process();
    let second = backend(&driver, NO_LIMITS);
    let at = room();
    // The second is where the first was.
    make_table(&turn, &second, at, [0x7e90_0100, 0x7e03_0100]);
    second.restore_begin(&notes).unwrap();
    second.restore_notes(&notes).unwrap();
    put_back(&second, &saved);
    let words: Vec<u8> =
        [0x7e90_0100u64, 5, 0x7e03_0100].iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(peek(at, 24), words);
    second.restore_notes(&notes).unwrap();
    let pointer = 0x7e03_0180u64.to_le_bytes();
    let refused = second.restore(&Object::Memory, device_base(0), &pointer).unwrap_err();
    assert!(refused.message.contains("function of module 5"), "{refused}");
    second.restore(&Object::Memory, device_base(0), &0x7e03_0190u64.to_le_bytes()).unwrap();
}
