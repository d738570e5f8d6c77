//! Notes of a snapshot that somebody has damaged or made up: refused or taken, and never a panic.

use super::fixture::{CTX, Fixture, map_shared};
use super::world::{self, BASE, EARLIER, LATER};
use crate::device::snapshot::notes::{Allocation, HeapNote, ModuleNote, Notes, Variable, list};
use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, DEVICE_STRIDE, SHARED_BASE, SHARED_CLIENT_LEN};
use kedge_device::{Backend, Code, Restore};
use kedge_protocol::{CtxId, EventId, ModuleId};
use kedge_wire::Text;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

fn runner(cases: u32) -> TestRunner {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) };
    TestRunner::new(config)
}

/// Restarts from `notes` as far as they let it, then uses the device.
fn restart(notes: &[u8]) -> Result<(), TestCaseError> {
    map_shared();
    let f = Fixture::empty();
    if f.backend.restore_begin(notes).is_err() {
        return Ok(());
    }
    f.make_streams();
    f.backend.grant(0, BASE, 16 << 20).unwrap();
    for module in [EARLIER, LATER] {
        let _ = f.backend.load_module(CTX, module, Code::Whole(world::MODULE.into()));
    }
    if f.backend.restore_notes(notes).is_ok() {
        f.backend.restore_end().unwrap();
        f.set(super::fixture::A, BASE);
        let _ = f.sync(super::fixture::A);
    }
    Ok(())
}

#[test]
fn damaged_notes_do_no_harm() {
    let f = Fixture::empty();
    world::build(&f);
    world::fill(&f, 1);
    let notes = f.snapshot().notes();
    drop(f);
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let strategy = (damage, any::<prop::sample::Index>(), prop::bool::weighted(0.1));
    let run = |(damage, end, cut): (Vec<(prop::sample::Index, u8)>, prop::sample::Index, bool)| {
        let mut bytes = notes.clone();
        for (at, value) in damage {
            bytes[at.index(notes.len())] = value;
        }
        bytes.truncate(if cut { end.index(notes.len()) } else { notes.len() });
        restart(&bytes)
    };
    runner(100).run(&strategy, run).unwrap();
}

/// Addresses near every border.
fn address() -> impl Strategy<Value = u64> {
    let own = BASE + DEVICE_CLIENT_LEN;
    let bases = [0, BASE, own, BASE + DEVICE_STRIDE, SHARED_BASE, SHARED_BASE + SHARED_CLIENT_LEN];
    let near = prop::sample::select(bases.to_vec());
    let near = (near, 0..64u64).prop_map(|(base, step)| base.wrapping_add(step * 256));
    prop_oneof![8 => near, 1 => any::<u64>(), 1 => (0..512u64).prop_map(|below| u64::MAX - below)]
}

fn size() -> impl Strategy<Value = u64> {
    let units = (0..64u64).prop_map(|units| units * 16);
    prop_oneof![4 => units, 4 => 4..=8u64, 1 => any::<u64>(), 1 => Just(1 << 25)]
}

fn context() -> impl Strategy<Value = CtxId> {
    (0..4u32).prop_map(CtxId)
}

fn heap() -> impl Strategy<Value = HeapNote> {
    let used = prop::collection::vec((address(), size()), 0..3);
    (context(), address(), size(), used).prop_map(|(ctx, addr, size, used)| {
        let used = list(used, "").unwrap();
        HeapNote { ctx, addr, size, used }
    })
}

fn module() -> impl Strategy<Value = ModuleNote> {
    let name = prop::sample::select(vec!["counter", "place", "factor"]);
    let variable =
        (name, address(), size(), any::<bool>()).prop_map(|(name, addr, size, managed)| Variable {
            name: Text::new(name.to_owned()).unwrap(),
            addr,
            size,
            managed,
            asked: !managed,
        });
    (7..10u32, prop::collection::vec(variable, 0..4)).prop_map(|(module, variables)| ModuleNote {
        module: ModuleId(module),
        variables: list(variables, "").unwrap(),
        bound: Text::default(),
    })
}

fn notes() -> impl Strategy<Value = Notes> {
    let allocation = (context(), address(), size());
    let allocation = allocation.prop_map(|(ctx, addr, size)| Allocation { ctx, addr, size });
    let event = ((0..4u32).prop_map(EventId), any::<u64>());
    let lists = (
        prop::collection::vec(allocation, 0..4),
        prop::collection::vec(module(), 0..3),
        prop::collection::vec(heap(), 0..2),
        prop::collection::vec(event, 0..2),
        prop::collection::vec((context(), any::<u32>()), 0..2),
        prop::collection::vec((context(), 0..8u64), 0..2),
    );
    let numbers = (any::<u64>(), prop_oneof![0..9u64, any::<u64>()], any::<[bool; 3]>());
    (numbers, lists).prop_map(|((clock, last_texture, [exact, foreign, tensor_maps]), lists)| {
        Notes {
            clock,
            allocations: list(lists.0, "").unwrap(),
            modules: list(lists.1, "").unwrap(),
            heaps: list(lists.2, "").unwrap(),
            events: list(lists.3, "").unwrap(),
            faults: list(lists.4, "").unwrap(),
            textures: list(lists.5, "").unwrap(),
            last_texture,
            exact,
            foreign,
            tensor_maps,
        }
    })
}

#[test]
fn made_up_notes_do_no_harm() {
    runner(200).run(&notes(), |notes| restart(&notes.encode().unwrap())).unwrap();
}

#[test]
fn any_bytes_decode_or_not() {
    let strategy = prop::collection::vec(any::<u8>(), 0..300);
    let run = |mut bytes: Vec<u8>| {
        let _ = Notes::decode(&bytes);
        bytes.splice(0..0, 1u32.to_le_bytes());
        let _ = Notes::decode(&bytes);
        Ok(())
    };
    runner(2000).run(&strategy, run).unwrap();
}
