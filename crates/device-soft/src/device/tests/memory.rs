//! Memory, copies, and what happens where there is none.

use super::fixture::{A, B, CTX, Fixture, client, copy, mapped, word};
use kedge_cuda_types::{CuError, arena};
use kedge_device::Backend;
use kedge_protocol::{
    ArrayDesc, ArrayId, CtxId, MemHandleId, Place, StreamOp, Texture, TextureSource,
};

const MIB2: u64 = 2 << 20;

#[test]
fn slabs_are_what_the_device_has() {
    let f = Fixture::bare();
    let (backend, base) = (&f.backend, arena::device_base(0));
    assert_eq!(backend.free_memory(0), Ok(64 << 20));
    assert_eq!(backend.grant(0, base, MIB2), Ok(()));
    assert_eq!(backend.grant(0, base + MIB2, 63 << 20), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.grant(0, base + MIB2, 64 << 20), Err(CuError::OUT_OF_MEMORY));
    assert_eq!(backend.grant(0, base + 4 * MIB2, 62 << 20), Ok(()));
    assert_eq!(backend.free_memory(0), Ok(0));
    assert_eq!((backend.used_memory(0), backend.used_memory(9)), (Some(64 << 20), None));
    assert_eq!(backend.give_back(0, base + 4 * MIB2, MIB2), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.give_back(0, base + 4 * MIB2, 62 << 20), Ok(()));
    assert_eq!(backend.give_back(0, base + 4 * MIB2, 62 << 20), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.free_memory(0), Ok(62 << 20));
}

#[test]
fn slabs_that_cannot_be_are_refused() {
    let f = Fixture::bare();
    let (backend, base) = (&f.backend, arena::device_base(0));
    backend.grant(0, base + 4 * MIB2, 2 * MIB2).unwrap();
    for (addr, bytes) in [
        (base, 0),
        (base, 4096),
        (base + 4096, MIB2),
        (base + 3 * MIB2, 2 * MIB2),
        (base + 4 * MIB2, 2 * MIB2),
        (base + 5 * MIB2, 2 * MIB2),
        (base + arena::DEVICE_CLIENT_LEN, MIB2),
        (base + arena::DEVICE_CLIENT_LEN - MIB2, 2 * MIB2),
        (arena::device_base(1), MIB2),
        (base, u64::MAX - MIB2 + 1),
        (0, MIB2),
    ] {
        let refused = backend.grant(0, addr, bytes);
        assert_eq!(refused, Err(CuError::INVALID_VALUE), "{addr:#x} {bytes:#x}");
    }
    assert_eq!(backend.grant(1, arena::device_base(1), MIB2), Err(CuError::INVALID_DEVICE));
    assert_eq!(backend.free_memory(0), Ok(60 << 20));
}

#[test]
fn allocations_lie_in_slabs_and_go_with_them() {
    let f = Fixture::bare();
    let slab = arena::device_base(0);
    assert_eq!(f.backend.map(CTX, slab, 4096), Err(CuError::INVALID_VALUE));
    f.backend.grant(0, slab, MIB2).unwrap();
    assert_eq!(f.backend.map(CTX, slab + MIB2 - 4096, 8192), Err(CuError::INVALID_VALUE));
    f.backend.map(CTX, slab, 4096).unwrap();
    f.set(A, slab);
    f.sync(A).unwrap();
    f.backend.give_back(0, slab, MIB2).unwrap();
    assert_eq!(word(slab), 0, "the next owner of the memory does not see it");
    f.set(A, slab);
    assert_eq!(f.sync(A), Err(CuError::ILLEGAL_ADDRESS));
}

#[test]
fn handles_are_charged_to_their_device() {
    let f = Fixture::bare();
    let (backend, id) = (&f.backend, MemHandleId(1));
    assert_eq!(backend.create_handle(id, 0, 66 << 20, false), Err(CuError::OUT_OF_MEMORY));
    assert_eq!(backend.create_handle(id, 0, 4096, false), Err(CuError::INVALID_VALUE));
    assert_eq!(backend.create_handle(id, 1, MIB2, false), Err(CuError::INVALID_DEVICE));
    assert_eq!(backend.free_memory(0), Ok(64 << 20));
    backend.create_handle(id, 0, 2 * MIB2, false).unwrap();
    assert_eq!(backend.free_memory(0), Ok(60 << 20));
    backend.destroy_handle(id).unwrap();
    assert_eq!(backend.destroy_handle(id), Err(CuError::INVALID_HANDLE));
    assert_eq!(backend.free_memory(0), Ok(64 << 20));
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

/// A mipmapped array of 4 × 4 floats.
const MIPMAP: ArrayDesc =
    ArrayDesc { device: 0, width: 4, height: 4, depth: 0, format: 0x20, channels: 1, flags: 0 };

#[test]
fn a_mipmap_is_made_whole_or_not_at_all() {
    let f = Fixture::bare();
    let ids = |ids: &[u32]| ids.iter().map(|&id| ArrayId(id)).collect::<Vec<_>>();
    let make = |levels: &[u32]| f.backend.create_mipmap(CTX, &ids(levels), &MIPMAP);
    make(&[1, 2, 3]).unwrap();
    assert_eq!(f.backend.free_memory(0), Ok((64 << 20) - (64 + 16 + 4)));
    assert_eq!(make(&[4, 5, 2]), Err(CuError::INVALID_HANDLE));
    assert_eq!(make(&[4, 4]), Err(CuError::INVALID_HANDLE));
    assert_eq!(make(&[]), Err(CuError::INVALID_VALUE));
    // The finest level fits, the second does not.
    let large = ArrayDesc { width: 4096, height: 3800, ..MIPMAP };
    let refused = f.backend.create_mipmap(CTX, &ids(&[6, 7]), &large);
    assert_eq!(refused, Err(CuError::OUT_OF_MEMORY));
    assert_eq!(f.backend.free_memory(0), Ok((64 << 20) - (64 + 16 + 4)));
    for id in ids(&[1, 2, 3]) {
        f.backend.destroy_array(id).unwrap();
    }
    assert_eq!(f.backend.destroy_array(ArrayId(4)), Err(CuError::INVALID_HANDLE));
    assert_eq!(f.backend.free_memory(0), Ok(64 << 20));
}

#[test]
fn texture_handles_are_the_device_s_and_belong_to_a_context() {
    let f = Fixture::bare();
    f.backend.create_array(CTX, ArrayId(1), &MIPMAP).unwrap();
    let texture = Texture {
        surface: false,
        source: TextureSource::Array { array: ArrayId(1) },
        address: [0; 3],
        filter: 0,
        flags: 0,
        border: [0.0; 4],
        mipmap_filter: 0,
        mipmap_bias: 0.0,
        mipmap_clamp: [0.0; 2],
        view_format: 0,
    };
    let first = f.backend.create_texture(CTX, &texture).unwrap();
    let second = f.backend.create_texture(CTX, &texture).unwrap();
    assert!(first != 0 && second != 0 && first != second);
    let other = CtxId(77);
    assert_eq!(f.backend.create_texture(other, &texture), Err(CuError::INVALID_CONTEXT));
    assert_eq!(f.backend.destroy_texture(other, first), Err(CuError::INVALID_HANDLE));
    assert_eq!(f.backend.destroy_texture(CTX, first), Ok(()));
    assert_eq!(f.backend.destroy_texture(CTX, first), Err(CuError::INVALID_HANDLE));
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

#[test]
fn addresses_without_memory_are_lent() {
    let f = Fixture::bare();
    let (backend, base) = (&f.backend, arena::device_base(0));
    let bad = Err(CuError::INVALID_VALUE);
    backend.grant(0, base, MIB2).unwrap();
    for (addr, bytes) in
        [(base, 4096), (base + MIB2, 0), (base + MIB2, 100), (0, 4096), (base + MIB2, u64::MAX)]
    {
        assert_eq!(backend.lend_addresses(addr, bytes), bad, "{addr:#x} {bytes:#x}");
    }
    backend.lend_addresses(base + MIB2, 3 * 4096).unwrap();
    assert_eq!(backend.lend_addresses(base + MIB2 + 4096, 4096), bad);
    assert_eq!(backend.grant(0, base + MIB2, MIB2), bad);
    assert_eq!(backend.take_addresses(base + MIB2, 4 * 4096), bad);
    // As the host would show something there.
    // SAFETY: mapped memory of the device's, which nothing else uses.
    unsafe { ((base + MIB2) as *mut u32).write(7) };
    backend.take_addresses(base + MIB2 + 4096, 2 * 4096).unwrap();
    assert_eq!(backend.grant(0, base + MIB2, MIB2), bad);
    backend.take_addresses(base + MIB2, 4096).unwrap();
    assert_eq!(backend.take_addresses(base + MIB2, 4096), bad);
    backend.grant(0, base + MIB2, MIB2).unwrap();
    assert_eq!(word(base + MIB2), 0, "nothing of what was shown is left");
}
