//! Memory, copies, and what happens where there is none.

use super::fixture::{A, B, CTX, Fixture, client, copy, mapped, word};
use kedge_cuda_types::{CuError, arena};
use kedge_device::Backend;
use kedge_protocol::{ArrayDesc, ArrayId, Place, StreamOp};

#[test]
fn quota_is_what_the_device_has() {
    let f = Fixture::new();
    let backend = &f.backend;
    assert_eq!(backend.free_memory(0), Ok(64 << 20));
    assert_eq!(backend.grant(0, 1), Ok(2 << 20));
    assert_eq!(backend.grant(0, 63 << 20), Err(CuError::OUT_OF_MEMORY));
    assert_eq!(backend.grant(0, 61 << 20), Ok(62 << 20));
    assert_eq!(backend.free_memory(0), Ok(0));
    assert_eq!(backend.give_back(0, 64 << 20), Ok(()));
    assert_eq!(backend.give_back(0, 1), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.grant(1, 1), Err(CuError::INVALID_DEVICE));
}

#[test]
fn pitched_boxes_round_trip() {
    let f = Fixture::new();
    let dev = f.alloc(0, 1 << 20);
    // 3 planes of 5 rows of 7 bytes, out of rows of 16 in planes of 8 rows.
    let source: Vec<u8> = (0..3 * 8 * 16).map(|i| (i * 7) as u8).collect();
    let back = vec![0u8; 3 * 5 * 7];
    let extent = [7, 5, 3];
    f.submit(A, copy(client(&source, 16, 128), mapped(dev, 32, 256), extent));
    f.submit(A, copy(mapped(dev, 32, 256), mapped(dev + 4096, 7, 35), extent));
    f.submit(A, copy(mapped(dev + 4096, 7, 35), client(&back, 7, 35), extent));
    f.sync(A).unwrap();
    for (z, y, x) in (0..3).flat_map(|z| (0..5).flat_map(move |y| (0..7).map(move |x| (z, y, x)))) {
        assert_eq!(back[z * 35 + y * 7 + x], source[z * 128 + y * 16 + x], "{z} {y} {x}");
    }
}

#[test]
fn a_large_copy_arrives_whole() {
    let f = Fixture::new();
    let len = 8 << 20;
    let dev = f.alloc(0, len);
    let source: Vec<u8> = (0..len).map(|i| (i ^ (i >> 11)) as u8).collect();
    let back = vec![0u8; len as usize];
    f.submit(A, copy(client(&source, 0, 0), mapped(dev, 0, 0), [len, 1, 1]));
    f.submit(A, copy(mapped(dev, 0, 0), client(&back, 0, 0), [len, 1, 1]));
    f.sync(A).unwrap();
    assert!(source == back);
}

#[test]
fn fills_write_their_pattern_and_no_more() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    let fill = |dst, pitch, value, element, width, height| {
        f.submit(A, StreamOp::Memset { dst, pitch, value, element, width, height });
    };
    fill(dev, 0, 0, 1, 4096, 1);
    fill(dev + 2, 0, 0x1234_abcd, 2, 3, 1);
    fill(dev + 64, 32, 0x0102_0304, 4, 2, 2);
    fill(dev + 129, 0, 0x1ff, 1, 1, 1);
    f.sync(A).unwrap();
    assert_eq!([word(dev), word(dev + 4), word(dev + 8)], [0xabcd_0000, 0xabcd_abcd, 0]);
    let rows: Vec<u32> = (0..12).map(|i| word(dev + 64 + 4 * i)).collect();
    let (p, o) = (0x0102_0304, 0);
    assert_eq!(rows, [p, p, o, o, o, o, o, o, p, p, o, o]);
    assert_eq!(word(dev + 128), 0xff00);
}

#[test]
fn arrays_keep_boxes_and_refuse_what_leaves_them() {
    let f = Fixture::new();
    let id = ArrayId(1);
    let desc =
        ArrayDesc { device: 0, width: 4, height: 3, depth: 0, format: 0x20, channels: 2, flags: 0 };
    f.backend.create_array(CTX, id, &desc).unwrap();
    let free = f.backend.free_memory(0).unwrap();
    let source: Vec<u8> = (0..96).collect();
    let back = vec![0u8; 16];
    let at = |x_bytes, y| Place::Array { array: id, x_bytes, y, z: 0 };
    f.submit(A, copy(client(&source, 32, 0), at(0, 0), [32, 3, 1]));
    f.submit(A, copy(at(8, 1), client(&back, 8, 0), [8, 2, 1]));
    f.sync(A).unwrap();
    assert_eq!(back, [40, 41, 42, 43, 44, 45, 46, 47, 72, 73, 74, 75, 76, 77, 78, 79]);
    f.backend.destroy_array(id).unwrap();
    assert!(f.backend.free_memory(0).unwrap() > free);
    f.backend.create_array(CTX, id, &desc).unwrap();
    let leaves = f.backend.submit(A, copy(at(8, 1), client(&back, 8, 0), [8, 3, 1]));
    assert_eq!(leaves, Err(CuError::INVALID_VALUE));
}

#[test]
fn an_invalid_range_faults_the_context_and_drops_its_work() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    f.submit(A, copy(mapped(dev, 0, 0), mapped(dev + 4000, 0, 0), [100, 1, 1]));
    f.set(B, dev);
    assert_eq!(f.sync(B), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(f.backend.query_stream(A), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(word(dev), 0, "later work does not run");
    assert_eq!(*f.host.faults.lock().unwrap(), [(CTX, CuError::ILLEGAL_ADDRESS)]);
    assert!(f.host.log.lock().unwrap()[0].contains("copy of 100 bytes"));
    assert!(f.backend.is_idle());
}

#[test]
fn what_the_client_does_not_have_is_a_fault() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    let nowhere = Place::Client { addr: 16, pitch: 0, slice: 0 };
    f.submit(A, copy(nowhere, mapped(dev, 0, 0), [8, 1, 1]));
    assert_eq!(f.sync(A), Err(CuError::INVALID_VALUE));
}

#[test]
fn freed_memory_is_no_longer_valid() {
    let f = Fixture::new();
    let dev = f.alloc(0, 8192);
    f.backend.unmap(dev, 4096).unwrap();
    f.submit(A, StreamOp::MemFree { addr: dev + 4096, size: 4096 });
    f.submit(A, StreamOp::MemAlloc { addr: dev, size: 256 });
    f.set(A, dev + 252);
    assert_eq!(f.sync(A), Ok(()));
    f.set(A, dev + 256);
    assert_eq!(f.sync(A), Err(CuError::ILLEGAL_ADDRESS));
    assert_eq!(f.backend.map(CTX, 0x1000, 4096), Err(CuError::INVALID_VALUE));
    assert_eq!(f.backend.unmap(arena::SHARED_BASE, 4096), Err(CuError::INVALID_VALUE));
}

#[test]
fn a_context_takes_everything_with_it() {
    let f = Fixture::new();
    let dev = f.alloc(0, 4096);
    f.backend.destroy_context(CTX).unwrap();
    assert_eq!(f.backend.submit(A, StreamOp::Empty {}), Err(CuError::INVALID_HANDLE));
    f.backend.create_context(CTX, 0, A).unwrap();
    f.set(A, dev);
    assert_eq!(f.sync(A), Err(CuError::ILLEGAL_ADDRESS));
}
