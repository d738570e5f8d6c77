//! A client of a GPU, as its proxy would have saved it, on a software device.

use crate::client_memory::ClientMemory;
use crate::crossing::Crossing;
use crate::host::ProxyHost;
use kedge_control::joblog::JobLog;
use kedge_cuda_types::arena::device_base;
use kedge_device::portable::{PlacedVariable, Portable};
use kedge_device::{
    Backend, Code, Filling, Maker, NewBackend, Object, Restoring, SnapshotError, snapshots,
};
use kedge_device_soft::device::{SoftBackend, SoftConfig};
use kedge_protocol::{CtxId, Dim3, EventId, KernelRef, Launch, ModuleId, StreamId, StreamOp};
use kedge_wire::{Bytes, List};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const CTX: CtxId = CtxId(1);
const STREAM: StreamId = StreamId(2);
const MODULE: ModuleId = ModuleId(5);
/// Where a driver places variables; free in this process.
const PLACED: u64 = 0x5d00_0000_0200;
/// A counter that the image has, a number that is as the module has it, and a pointer to the first.
const TEXT: &str = ".version 8.0\n.target sm_70\n.address_size 64\n\
    .visible .global .align 4 .u32 counter = 1;\n\
    .visible .const .align 4 .u32 number = 30;\n\
    .visible .global .align 8 .u64 where = generic(counter);\n\
    .visible .entry k(.param .u64 out) { .reg .b64 %a, %p; .reg .b32 %x, %y;\n\
    ld.param.u64 %a, [out]; ld.global.u64 %p, [where]; ld.u32 %x, [%p]; ld.const.u32 %y, [number];\n\
    add.u32 %x, %x, %y; ld.global.u32 %y, [%a]; add.u32 %x, %x, %y; st.global.u32 [%a], %x;\n\
    st.global.u32 [counter], %x; ret; }\n\0";
const POINTERS: &str = ".version 8.0\n.target sm_70\n.address_size 64\n\
    .visible .entry k(.param .u64 f) { .reg .b64 %f; ld.param.u64 %f, [f];\n\
    p: .callprototype ()_ (); call %f, (), p; ret; }\n\0";

/// What a GPU's proxy notes.
fn notes() -> Vec<u8> {
    let variable = |name: &str, at, bytes, asked| PlacedVariable {
        module: MODULE,
        name: name.to_owned(),
        addr: PLACED + at,
        bytes,
        asked,
        shared: false,
    };
    let variables = vec![variable("counter", 0, 4, true), variable("where", 256, 8, false)];
    let events = vec![(EventId(1), -3.0), (EventId(2), -1.0)];
    kedge_device_nvidia::make_notes(&Portable { variables, events, ..Portable::default() }).unwrap()
}

fn device() -> NewBackend {
    let (_client, server) = kedge_transport::pair().unwrap();
    let memory = ClientMemory::new(std::process::id());
    let log = Arc::new(JobLog::none());
    let host = Arc::new(ProxyHost::new(server.outbox().clone(), memory, log, None));
    let config = SoftConfig {
        devices: 1,
        memory_per_device: 64 << 20,
        workers: 1,
        exact: true,
        apart: false,
        check: None,
    };
    let backend: Arc<dyn Backend> =
        SoftBackend::new(config, config.describe(), host.clone()).unwrap();
    host.set_backend(&backend);
    NewBackend::new(backend)
}

/// What uses a backend, and makes on it what it is told.
struct Client(Arc<dyn Backend>);

type Making<'a> = Restoring<'a, Client>;

impl Maker for Client {
    type Step = Box<dyn FnOnce(&dyn Backend)>;
    type Error = SnapshotError;

    fn make(&mut self, step: Self::Step) -> Result<(), SnapshotError> {
        step(&*self.0);
        Ok(())
    }
}

fn make(restoring: &mut Making<'_>, step: impl FnOnce(&dyn Backend) + 'static) {
    restoring.make(Box::new(step)).unwrap();
}

/// Begins a restart: a context, its streams and events, a slab.
fn begin(notes: &[u8]) -> Making<'_> {
    let client = |backend| Ok::<_, SnapshotError>(Client(backend));
    let mut restoring = device().begin_restore(notes, client).unwrap();
    make(&mut restoring, |backend| {
        backend.create_context(CTX, 0, StreamId(1)).unwrap();
        backend.create_stream(STREAM, CTX, true, 0).unwrap();
        for event in [EventId(1), EventId(2)] {
            backend.create_event(event, CTX, true, false).unwrap();
        }
        backend.grant(0, device_base(0), 2 << 20).unwrap();
    });
    restoring
}

fn load(restoring: &mut Making<'_>) {
    make(restoring, |backend| {
        backend.load_module(CTX, MODULE, Code::Whole(TEXT.into())).unwrap();
        backend.kernel(MODULE, 0, "k").unwrap();
    });
}

fn restore(filling: &Filling, crossing: &Crossing, object: &Object, start: u64, bytes: &[u8]) {
    for part in crossing.places(object, start, bytes.len()).unwrap() {
        filling.put(&part.object, part.start, &bytes[part.bytes]).unwrap();
    }
}

fn run(backend: &dyn Backend, out: u64) {
    let one = Dim3 { x: 1, y: 1, z: 1 };
    let launch = Launch {
        kernel: KernelRef { module: MODULE, index: 0 },
        grid: one,
        block: one,
        cluster: Dim3::default(),
        shared_bytes: 0,
        cooperative: false,
        params: Bytes::new(out.to_le_bytes().to_vec()).unwrap(),
        hints: List::default(),
    };
    backend.submit(STREAM, StreamOp::Launch { launch }).unwrap();
    let (tell, told) = mpsc::channel();
    backend.when_stream_idle(STREAM, Box::new(move |result| tell.send(result).unwrap()));
    told.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
}

/// The words that a snapshot has.
fn saved(backend: &dyn Backend, at: u64) -> u32 {
    let limit = std::time::Instant::now() + Duration::from_secs(20);
    while !backend.at_rest() && std::time::Instant::now() < limit {
        std::thread::yield_now();
    }
    let snapshot = snapshots(backend).unwrap().snapshot(None).unwrap();
    let holds = |piece: &&kedge_device::Piece| {
        piece.object == Object::Memory && (piece.start..piece.start + piece.bytes).contains(&at)
    };
    let piece = snapshot.pieces().iter().find(holds).unwrap();
    let mut word = [0; 4];
    snapshot.read(piece, at, &mut word).unwrap();
    u32::from_le_bytes(word)
}

#[test]
fn a_client_of_a_gpu_goes_on_on_a_software_device() {
    let crossing = Crossing::new(&notes(), true).unwrap();
    let out = device_base(0) + 4096;
    let mut restoring = begin(&crossing.notes);
    make(&mut restoring, |backend| {
        assert!(backend.devices().iter().all(|device| !device.exact), "as the client was told");
    });
    load(&mut restoring);
    let restored = restoring.made().unwrap();
    let counter = Object::Variable { module: MODULE, name: "counter".to_owned() };
    restore(restored.filling(), &crossing, &counter, 0, &5_u32.to_le_bytes());
    // Nobody has told of this allocation: slabs are valid as a whole.
    restore(restored.filling(), &crossing, &Object::Memory, out, &7_u32.to_le_bytes());
    let Client(backend) = restored.finish().unwrap();
    assert_eq!(backend.global(MODULE, "counter").unwrap().addr, PLACED);
    let placing = backend.placing().unwrap();
    assert_eq!(placing.check_placed(CTX, PLACED, 4), Ok(()));
    assert!(placing.check_placed(CTX, PLACED + (1 << 30), 4).is_err());
    assert!((backend.elapsed_ms(EventId(1), EventId(2)).unwrap() - 2.0).abs() < 1e-3);
    run(&*backend, out);
    assert_eq!((saved(&*backend, out), saved(&*backend, PLACED)), (42, 42));
    // From here on it is a software device's: another one takes over.
    let notes = snapshots(&*backend).unwrap().snapshot(None).unwrap().notes();
    drop(backend);
    let mut restoring = begin(&notes);
    load(&mut restoring);
    let (tell, told) = mpsc::channel();
    make(&mut restoring, move |backend| {
        tell.send(backend.global(MODULE, "number").unwrap().addr).unwrap();
    });
    let restored = restoring.made().unwrap();
    let put = |at, bytes: &[u8]| restored.filling().put(&Object::Memory, at, bytes).unwrap();
    put(PLACED, &8_u32.to_le_bytes());
    put(PLACED + 256, &PLACED.to_le_bytes());
    put(told.recv().unwrap(), &30_u32.to_le_bytes());
    let Client(backend) = restored.finish().unwrap();
    run(&*backend, out);
    assert_eq!(saved(&*backend, out), 38);
    drop(backend);
    what_only_a_gpu_reads_is_refused(&crossing);
}

/// In the same test: the address ranges are one backend's at a time.
fn what_only_a_gpu_reads_is_refused(crossing: &Crossing) {
    make(&mut begin(&crossing.notes), |backend| {
        let refused = backend.load_module(CTX, MODULE, Code::Whole(POINTERS.into())).unwrap_err();
        assert!(refused.message.contains("calls functions by pointers"), "{}", &*refused.message);
    });
}
