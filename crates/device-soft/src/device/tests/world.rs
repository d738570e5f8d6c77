//! One of everything that a client can have, for the tests of snapshots.

use super::fixture::{A, CTX, FREE, Fixture, client, copy, mapped};
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Backend, Code, Restore, Snapshot};
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, Dim3, EventId, KernelRef, Launch, MemHandleId, ModuleId, Place,
    StreamId, StreamOp, Texture, TextureSource,
};
use kedge_wire::{Bytes, List};
use std::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;
pub(super) const BASE: u64 = arena::device_base(0);
/// Memory that the client has mapped, all of it written but for the last half.
const PLAIN: u64 = BASE;
const PLAIN_BYTES: u64 = 8 * MIB;
/// Allocated in stream order; kernels' results go here.
pub(super) const RESULT: u64 = BASE + 16 * MIB;
/// Where a device malloc's address is kept.
const MALLOC: u64 = RESULT + 256;
/// Where handles are mapped.
const VIRTUAL: u64 = BASE + (1 << 30);
const ELSEWHERE: u64 = VIRTUAL + 64 * MIB;

const MAPPED: MemHandleId = MemHandleId(1);
const UNMAPPED: MemHandleId = MemHandleId(2);
const EMPTY: MemHandleId = MemHandleId(3);

const ARRAY: ArrayId = ArrayId(1);
const LEVELS: [ArrayId; 2] = [ArrayId(2), ArrayId(3)];
const ENDED_ARRAY: ArrayId = ArrayId(4);
const TEXELS: ArrayDesc =
    ArrayDesc { device: 0, width: 16, height: 0, depth: 0, format: 3, channels: 1, flags: 0 };
const MIPMAP: ArrayDesc =
    ArrayDesc { device: 0, width: 2, height: 2, depth: 0, format: 3, channels: 1, flags: 0 };

/// Gone before the snapshot; where it lay, lies `LATER` at last, before the older `EARLIER`.
const ENDED: ModuleId = ModuleId(7);
pub(super) const EARLIER: ModuleId = ModuleId(8);
pub(super) const LATER: ModuleId = ModuleId(9);

pub(super) const FIRST: EventId = EventId(1);
pub(super) const SECOND: EventId = EventId(2);
pub(super) const NEVER: EventId = EventId(3);

/// A context that has faulted, and its streams.
pub(super) const BROKEN: CtxId = CtxId(2);
const BROKEN_LEGACY: StreamId = StreamId(20);
pub(super) const BROKEN_STREAM: StreamId = StreamId(21);

/// Adds `factor` to `counter` and tells what it was; mallocs and frees; reads a texture; writes a
/// word a thread.
pub(super) const MODULE: &str = ".version 8.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter = 40;
.visible .global .align 8 .u64 place = counter;
.visible .const .align 4 .u32 factor = 3;
.extern .func (.param .b64 r) malloc(.param .b64 bytes);
.extern .func free(.param .b64 at);
.visible .entry count(.param .u64 out)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.const.u32 %r1, [factor];
    ld.global.u64 %rd2, [place];
    atom.global.add.u32 %r2, [%rd2], %r1;
    st.global.u32 [%rd1], %r2;
    ret;
}
.visible .entry grab(.param .u64 out)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    {
    .param .b64 bytes;
    .param .b64 r;
    st.param.b64 [bytes], 48;
    call.uni (r), malloc, (bytes);
    ld.param.b64 %rd2, [r];
    }
    st.global.u64 [%rd1], %rd2;
    st.u64 [%rd2], 0x1122334455667788;
    ret;
}
.visible .entry release(.param .u64 out)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.global.u64 %rd2, [%rd1];
    {
    .param .b64 at;
    st.param.b64 [at], %rd2;
    call.uni free, (at);
    }
    ret;
}
.visible .entry show(.param .u64 out, .param .u64 texture)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [texture];
    mov.u32 %r1, 5;
    tex.1d.v4.u32.s32 {%r2, %r3, %r4, %r5}, [%rd2, {%r1}];
    st.global.u32 [%rd1], %r2;
    ret;
}
.visible .entry paint(.param .u64 out, .param .u64 value)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [value];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
";
const KERNELS: [&str; 5] = ["count", "grab", "release", "show", "paint"];

/// The handles of the textures that last: of an array, of memory, of an array that has gone.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Textures {
    pub(super) array: u64,
    pub(super) linear: u64,
    pub(super) dangling: u64,
}

/// All bytes and all else that can be seen.
pub(super) struct Seen {
    plain: Vec<u8>,
    ordered: Vec<u8>,
    arrays: Vec<Vec<u8>>,
    handles: Vec<Vec<u8>>,
    counters: Vec<u64>,
    malloc: Vec<u8>,
    free: u64,
    between: u32,
}

impl Seen {
    /// What is not the same.
    pub(super) fn differences(&self, other: &Seen) -> Vec<&'static str> {
        let same = [
            ("plain memory", self.plain == other.plain),
            ("memory in stream order", self.ordered == other.ordered),
            ("arrays", self.arrays == other.arrays),
            ("handles", self.handles == other.handles),
            ("variables", self.counters == other.counters),
            ("device mallocs", self.malloc == other.malloc),
            ("free memory", self.free == other.free),
            ("time between events", self.between == other.between),
        ];
        same.iter().filter(|(_, same)| !same).map(|(name, _)| *name).collect()
    }
}

fn texture(source: TextureSource) -> Texture {
    Texture {
        surface: false,
        source,
        address: [0; 3],
        filter: 0,
        // Read as integers.
        flags: 1,
        border: [0.0; 4],
        mipmap_filter: 0,
        mipmap_bias: 0.0,
        mipmap_clamp: [0.0; 2],
        view_format: 0,
    }
}

pub(super) fn array_texture(array: ArrayId) -> Texture {
    texture(TextureSource::Array { array })
}

fn linear_texture() -> Texture {
    texture(TextureSource::Linear { addr: PLAIN, format: 3, channels: 1, bytes: 4096 })
}

/// Loads `MODULE`, and numbers its kernels.
pub(super) fn load(f: &Fixture, ctx: CtxId, module: ModuleId) {
    let image = [MODULE, "\0"].concat().into_bytes();
    f.backend
        .load_module(ctx, module, Code::Whole(image))
        .unwrap_or_else(|e| panic!("{}", &*e.message));
    for (index, name) in (0..).zip(KERNELS) {
        f.backend.kernel(module, index, name).unwrap();
    }
}

/// Launches one thread of a kernel of `EARLIER`.
pub(super) fn run(f: &Fixture, kernel: &str, params: &[u64]) {
    run_blocks(f, A, kernel, [1, 1], params);
}

/// Launches so many blocks of so many threads.
pub(super) fn run_blocks(
    f: &Fixture,
    stream: StreamId,
    kernel: &str,
    [grid, block]: [u32; 2],
    params: &[u64],
) {
    let index = KERNELS.iter().position(|name| *name == kernel).unwrap() as u32;
    let line = |x| Dim3 { x, y: 1, z: 1 };
    let params = params.iter().flat_map(|value| value.to_le_bytes()).collect();
    let launch = Launch {
        kernel: KernelRef { module: EARLIER, index },
        grid: line(grid),
        block: line(block),
        cluster: Dim3::default(),
        shared_bytes: 0,
        cooperative: false,
        params: Bytes::new(params).unwrap(),
        hints: List::default(),
    };
    f.submit(stream, StreamOp::Launch { launch });
}

/// Makes the objects that last, in the order of [`live`]; what else there ever was is `between`'s.
fn make(f: &Fixture, between: impl Fn(u32) -> Option<u64>) -> Textures {
    let b = &f.backend;
    f.make_streams();
    b.create_context(BROKEN, 0, BROKEN_LEGACY).unwrap();
    b.create_stream(BROKEN_STREAM, BROKEN, true, 0).unwrap();
    b.set_limit(CTX, 2, 4 * MIB).unwrap();
    b.grant(0, BASE, 32 * MIB).unwrap();
    between(0);
    for handle in [UNMAPPED, MAPPED, EMPTY] {
        b.create_handle(handle, 0, 4 * MIB, handle == MAPPED).unwrap();
    }
    b.map_handle(MAPPED, VIRTUAL, 4 * MIB, 0).unwrap();
    b.set_access(VIRTUAL, 4 * MIB, 0, 3).unwrap();
    b.create_array(CTX, ARRAY, &TEXELS).unwrap();
    b.create_mipmap(CTX, &LEVELS, &MIPMAP).unwrap();
    load(f, CTX, EARLIER);
    between(1);
    load(f, CTX, LATER);
    let array = b.create_texture(CTX, &array_texture(ARRAY)).unwrap();
    let linear = b.create_texture(CTX, &linear_texture()).unwrap();
    let dangling =
        between(2).unwrap_or_else(|| b.create_texture(CTX, &array_texture(ENDED_ARRAY)).unwrap());
    for event in [FIRST, SECOND, NEVER] {
        b.create_event(event, CTX, true, event == NEVER).unwrap();
    }
    Textures { array, linear, dangling }
}

/// Makes everything for the first time, objects that end again included.
pub(super) fn build(f: &Fixture) -> Textures {
    let b = &f.backend;
    let textures = make(f, |when| {
        match when {
            0 => {
                b.map(CTX, PLAIN, PLAIN_BYTES).unwrap();
                load(f, CTX, ENDED);
            }
            1 => {
                b.unload_module(ENDED).unwrap();
                let ended = b.create_texture(CTX, &linear_texture()).unwrap();
                b.destroy_texture(CTX, ended).unwrap();
            }
            _ => {
                b.create_array(CTX, ENDED_ARRAY, &TEXELS).unwrap();
                let dangling = b.create_texture(CTX, &array_texture(ENDED_ARRAY)).unwrap();
                b.destroy_array(ENDED_ARRAY).unwrap();
                // Until the texture goes, it keeps the array's memory; later it is as if it had
                // gone.
                f.backend.runtime.memory.refund(0, 64).unwrap();
                return Some(dangling);
            }
        }
        None
    });
    f.submit(A, StreamOp::MemAlloc { addr: RESULT, size: 4096 });
    textures
}

/// Makes again what lasts, as a proxy does from what it has kept.
pub(super) fn rebuild(f: &Fixture) -> Textures {
    make(f, |_| None)
}

/// `len` bytes that depend on all of `seed`.
fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + seed * 17) ^ (i >> 9)) as u8).collect()
}

fn write(f: &Fixture, bytes: &[u8], to: Place, rows: u64) {
    let width = bytes.len() as u64 / rows;
    f.submit(A, copy(client(bytes, width, 0), to, [width, rows, 1]));
    f.sync(A).unwrap();
}

fn read(f: &Fixture, from: Place, width: u64, rows: u64) -> Vec<u8> {
    let bytes = vec![0; (width * rows) as usize];
    f.submit(FREE, copy(from, client(&bytes, width, 0), [width, rows, 1]));
    f.sync(FREE).unwrap();
    bytes
}

fn texels(array: ArrayId) -> Place {
    Place::Array { array, x_bytes: 0, y: 0, z: 0 }
}

/// Gives everything a content that depends on `seed`, and runs kernels.
pub(super) fn fill(f: &Fixture, seed: u64) {
    let b = &f.backend;
    write(f, &pattern(seed, PLAIN_BYTES / 2), mapped(PLAIN, 0, 0), 1);
    write(f, &pattern(seed + 1, 1024), mapped(RESULT + 1024, 0, 0), 1);
    write(f, &pattern(seed + 2, 64), texels(ARRAY), 1);
    write(f, &pattern(seed + 3, 16), texels(LEVELS[0]), 2);
    write(f, &pattern(seed + 4, 4), texels(LEVELS[1]), 1);
    write(f, &pattern(seed + 5, 3 * MIB), mapped(VIRTUAL + 4096, 0, 0), 1);
    b.map_handle(UNMAPPED, ELSEWHERE, 4 * MIB, 0).unwrap();
    b.set_access(ELSEWHERE, 4 * MIB, 0, 3).unwrap();
    write(f, &pattern(seed + 6, 2 * MIB), mapped(ELSEWHERE + 3 * MIB / 2, 0, 0), 1);
    b.unmap_handle(ELSEWHERE, 4 * MIB).unwrap();
    f.submit(A, StreamOp::EventRecord { event: FIRST });
    run(f, "count", &[RESULT]);
    run(f, "grab", &[MALLOC]);
    f.sync(A).unwrap();
    thread::sleep(Duration::from_millis(2));
    f.submit(A, StreamOp::EventRecord { event: SECOND });
    f.sync(A).unwrap();
}

/// Makes the second context fault.
pub(super) fn break_context(f: &Fixture) {
    f.set(BROKEN_STREAM, VIRTUAL + (1 << 30));
    assert_eq!(f.sync(BROKEN_STREAM), Err(CuError::ILLEGAL_ADDRESS));
}

/// Looks at everything, and changes nothing.
pub(super) fn see(f: &Fixture) -> Seen {
    let b = &f.backend;
    let at = |addr| mapped(addr, 0, 0);
    let mut handles = vec![read(f, at(VIRTUAL), 4 * MIB, 1)];
    for handle in [UNMAPPED, EMPTY] {
        b.map_handle(handle, ELSEWHERE, 4 * MIB, 0).unwrap();
        b.set_access(ELSEWHERE, 4 * MIB, 0, 3).unwrap();
        handles.push(read(f, at(ELSEWHERE), 4 * MIB, 1));
        b.unmap_handle(ELSEWHERE, 4 * MIB).unwrap();
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
    let mut counters = Vec::new();
    for module in [EARLIER, LATER] {
        for name in ["counter", "place", "factor"] {
            let variable = b.global(module, name).unwrap();
            counters.push(variable.addr);
            counters.push(number(&read(f, at(variable.addr), variable.size, 1)));
        }
    }
    let malloc = number(&read(f, at(MALLOC), 8, 1));
    Seen {
        plain: read(f, at(PLAIN), PLAIN_BYTES, 1),
        ordered: read(f, at(RESULT), 4096, 1),
        arrays: vec![
            read(f, texels(ARRAY), 64, 1),
            read(f, texels(LEVELS[0]), 8, 2),
            read(f, texels(LEVELS[1]), 4, 1),
        ],
        handles,
        counters,
        malloc: read(f, at(malloc), 48, 1),
        free: b.free_memory(0).unwrap(),
        between: b.elapsed_ms(FIRST, SECOND).unwrap().to_bits(),
    }
}

/// Puts all bytes of a snapshot into a backend, from several threads.
pub(super) fn put_back(f: &Fixture, snapshot: &dyn Snapshot) {
    const THREADS: usize = 3;
    const STEP: u64 = 300_001;
    thread::scope(|scope| {
        for worker in 0..THREADS {
            scope.spawn(move || {
                for piece in snapshot.pieces().iter().skip(worker).step_by(THREADS) {
                    for skip in (0..piece.bytes).step_by(STEP as usize) {
                        let mut bytes = vec![0; (piece.bytes - skip).min(STEP) as usize];
                        snapshot.read(piece, piece.start + skip, &mut bytes).unwrap();
                        f.backend.restore(&piece.object, piece.start + skip, &bytes).unwrap();
                    }
                }
            });
        }
    });
}
