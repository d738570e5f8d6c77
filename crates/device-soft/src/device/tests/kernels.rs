//! Modules and launches, end to end inside of the crate.

use super::fixture::{A, B, CTX, Fixture, client, copy, mapped, wait, word};
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Backend, Code};
use kedge_protocol::{Dim3, KernelInfo, KernelRef, Launch, ModuleId, StreamOp};
use kedge_wire::{Bytes, List};
use std::sync::mpsc;

const MODULE: ModuleId = ModuleId(1);

pub(super) const HEADER: &str = ".version 8.0\n.target sm_70\n.address_size 64\n";

/// c[i] = a[i] + b[i]; i < n.
const ADD: &str = "
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [c];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra DONE;
    mul.wide.u32 %rd4, %r5, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.s64 %rd6, %rd2, %rd4;
    add.s64 %rd7, %rd3, %rd4;
    ld.global.f32 %f1, [%rd5];
    ld.global.f32 %f2, [%rd6];
    add.f32 %f3, %f1, %f2;
    st.global.f32 [%rd7], %f3;
DONE:
    ret;
}
";

/// Adds its parameter to the module's counter, and gives the counter's address a value of its own.
const COUNT: &str = "
.visible .global .align 4 .u32 counter = 40;
.visible .global .align 8 .u64 place = counter;
.visible .entry count(.param .u32 n)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [n];
    mov.u64 %rd1, counter;
    atom.global.add.u32 %r2, [%rd1], %r1;
    ret;
}
";

/// Loads a module and numbers its kernels in their order.
pub(super) fn load(f: &Fixture, texts: &[&str]) -> Vec<KernelInfo> {
    let images = texts.iter().map(|text| [HEADER, text, "\0"].concat().into_bytes()).collect();
    f.backend
        .load_module(CTX, MODULE, Code::Parts(images))
        .unwrap_or_else(|e| panic!("{}", &*e.message));
    let names = f.backend.kernel_names(MODULE).unwrap();
    (0..).zip(&names).map(|(i, name)| f.backend.kernel(MODULE, i, name).unwrap()).collect()
}

pub(super) fn launch(
    kernels: &[KernelInfo],
    name: &str,
    grid: u32,
    block: u32,
    params: Vec<u8>,
) -> StreamOp {
    let index = kernels.iter().position(|kernel| &*kernel.name == name).unwrap() as u32;
    let line = |x| Dim3 { x, y: 1, z: 1 };
    let launch = Launch {
        kernel: KernelRef { module: MODULE, index },
        grid: line(grid),
        block: line(block),
        cluster: Dim3::default(),
        shared_bytes: 0,
        cooperative: false,
        params: Bytes::new(params).unwrap(),
        hints: List::default(),
    };
    StreamOp::Launch { launch }
}

fn add_params(a: u64, b: u64, c: u64, n: u32) -> Vec<u8> {
    let mut params: Vec<u8> = [a, b, c].iter().flat_map(|addr| addr.to_le_bytes()).collect();
    params.extend(n.to_le_bytes());
    params
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn vectors_are_added() {
    let f = Fixture::new();
    let n = 1000;
    let dev = f.alloc(0, 3 * 4096);
    let a = bytes_of(&(0..n).map(|i| i as f32).collect::<Vec<_>>());
    let b = bytes_of(&(0..n).map(|i| 0.5 * i as f32).collect::<Vec<_>>());
    let c = vec![0u8; a.len()];
    let len = a.len() as u64;
    let info = load(&f, &[ADD]);
    assert_eq!(info[0].params.len(), 4);
    assert_eq!((info[0].params[3].offset, info[0].params[3].size), (24, 4));
    f.submit(A, copy(client(&a, 0, 0), mapped(dev, 0, 0), [len, 1, 1]));
    f.submit(A, copy(client(&b, 0, 0), mapped(dev + 4096, 0, 0), [len, 1, 1]));
    f.submit(A, launch(&info, "add", 4, 256, add_params(dev, dev + 4096, dev + 8192, n)));
    f.submit(A, copy(mapped(dev + 8192, 0, 0), client(&c, 0, 0), [len, 1, 1]));
    assert_eq!(f.sync(A), Ok(()));
    assert_eq!(c, bytes_of(&(0..n).map(|i| 1.5 * i as f32).collect::<Vec<_>>()));
}

#[test]
fn launches_of_one_stream_keep_their_order() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    let ones = bytes_of(&[1.0; 32]);
    let info = load(&f, &[ADD]);
    f.submit(
        A,
        StreamOp::Memset { dst: dev, pitch: 0, value: 0, element: 1, width: 4096, height: 1 },
    );
    f.submit(A, copy(client(&ones, 0, 0), mapped(dev + 256, 0, 0), [128, 1, 1]));
    for _ in 0..500 {
        f.submit(A, launch(&info, "add", 1, 32, add_params(dev, dev + 256, dev, 32)));
    }
    assert_eq!(f.sync(A), Ok(()));
    assert_eq!(f32::from_bits(word(dev + 124)), 500.0);
}

#[test]
fn variables_lie_in_the_device_s_own_part_and_go_with_their_module() {
    let f = Fixture::new();
    let before = f.backend.free_memory(0).unwrap();
    let info = load(&f, &[COUNT]);
    let find = |name: &str| f.backend.global(MODULE, name).unwrap();
    let counter = find("counter").addr;
    assert!(counter >= arena::device_base(0) + arena::DEVICE_CLIENT_LEN);
    assert_eq!(u64::from(word(find("place").addr)), counter & 0xffff_ffff);
    f.submit(A, launch(&info, "count", 2, 1, 1u32.to_le_bytes().to_vec()));
    f.sync(A).unwrap();
    assert_eq!(word(counter), 42);
    assert!(f.backend.free_memory(0).unwrap() < before);
    assert_eq!(f.backend.global(MODULE, "missing"), Err(CuError::NOT_FOUND));
    f.backend.unload_module(MODULE).unwrap();
    assert_eq!(f.backend.free_memory(0).unwrap(), before);
    assert_eq!(f.backend.unload_module(MODULE), Err(CuError::INVALID_HANDLE));
}

#[test]
fn the_client_numbers_kernels_one_after_the_other() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    let image = [HEADER, ADD, COUNT, "\0"].concat().into_bytes();
    f.backend.load_module(CTX, MODULE, Code::Whole(image)).unwrap();
    let kernel = |index, name| f.backend.kernel(MODULE, index, name).map(|info| info.params.len());
    assert_eq!(kernel(1, "add"), Err(CuError::INVALID_VALUE));
    assert_eq!(kernel(0, "missing"), Err(CuError::NOT_FOUND));
    assert_eq!(kernel(0, "count"), Ok(1));
    assert_eq!(kernel(0, "count"), Ok(1), "its own number again");
    assert_eq!(kernel(0, "add"), Err(CuError::INVALID_VALUE));
    assert_eq!(kernel(u32::MAX, "add"), Err(CuError::INVALID_VALUE));
    assert_eq!(kernel(1, "add"), Ok(4));
    assert_eq!(f.backend.kernel(ModuleId(9), 0, "add"), Err(CuError::INVALID_HANDLE));
    let one = Dim3 { x: 1, y: 1, z: 1 };
    let launch = |index| Launch {
        kernel: KernelRef { module: MODULE, index },
        grid: one,
        block: one,
        cluster: Dim3::default(),
        shared_bytes: 0,
        cooperative: false,
        params: Bytes::new(add_params(dev, dev, dev, 1)).unwrap(),
        hints: List::default(),
    };
    f.submit(A, StreamOp::Launch { launch: launch(1) });
    assert_eq!(f.sync(A), Ok(()));
    let unknown = f.backend.submit(A, StreamOp::Launch { launch: launch(2) });
    assert_eq!(unknown, Err(CuError::INVALID_HANDLE));
}

/// Reads the 8 bytes at 16 of a variable of 18, as libraries do that read strings by words, and
/// then those `far` further.
const STRING: &str = "
.visible .global .align 8 .u8 text[18] = {1};
.visible .entry words(.param .u64 far)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [far];
    mov.u64 %rd2, text;
    ld.global.u64 %rd3, [%rd2+16];
    add.u64 %rd2, %rd2, %rd1;
    ld.global.u64 %rd3, [%rd2+16];
    ret;
}
";

#[test]
fn variables_are_read_in_whole_units() {
    for (far, expected) in [(8u64, Ok(())), (16, Err(CuError::ILLEGAL_ADDRESS))] {
        let f = Fixture::new();
        let info = load(&f, &[STRING]);
        f.submit(A, launch(&info, "words", 1, 1, far.to_le_bytes().to_vec()));
        assert_eq!(f.sync(A), expected, "{far}");
        f.backend.unload_module(MODULE).unwrap();
    }
}

#[test]
fn a_kernel_s_fault_names_the_place_and_sticks() {
    let f = Fixture::new();
    let dev = f.alloc(0, 64);
    let info = load(&f, &[ADD]);
    f.submit(A, launch(&info, "add", 1, 32, add_params(dev, dev, dev, 32)));
    assert_eq!(f.sync(A), Err(CuError::ILLEGAL_ADDRESS));
    f.set(B, dev);
    assert_eq!(f.sync(B), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(*f.host.faults.lock().unwrap(), [(CTX, CuError::ILLEGAL_ADDRESS)]);
    let log = f.host.log.lock().unwrap().join("\n");
    let address = format!("{:#x}", dev + 64);
    assert!(log.contains("kernel add") && log.contains("thread (16,0,0)"), "{log}");
    assert!(log.contains(&address), "{log}");
    let near = format!("read of 4 bytes at {address}, 0 bytes past the end of the 64 bytes");
    assert!(log.contains(&near), "{log}");
}

#[test]
fn a_spinning_kernel_does_not_stop_copies() {
    const SPIN: &str = "
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p;
    .reg .b32 %r;
    .reg .b64 %rd;
    ld.param.u64 %rd, [flag];
AGAIN:
    ld.volatile.global.u32 %r, [%rd];
    setp.eq.u32 %p, %r, 0;
    @%p bra AGAIN;
    ret;
}
";
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    let info = load(&f, &[SPIN]);
    for stream in [A, B] {
        f.submit(stream, launch(&info, "spin", 8, 64, dev.to_le_bytes().to_vec()));
    }
    let (sender, receiver) = mpsc::channel();
    f.backend.when_context_idle(CTX, Box::new(move |result| sender.send(result).unwrap()));
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(receiver.try_recv().is_err());
    f.set(super::fixture::FREE, dev);
    assert_eq!(wait(&receiver), Ok(()));
}
