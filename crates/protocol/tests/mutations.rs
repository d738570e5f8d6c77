//! The fuzz target's property on the committed corpus and on mutations of it, the same each time.

use kedge_protocol::check::check_bytes;
use kedge_protocol::management::{Answer, Argument, Question};
use kedge_protocol::*;
use kedge_test_corpus::Corpus;
use kedge_wire::{Bytes, List, Text, Wire, encode};

fn corpus() -> Corpus {
    Corpus::of("wire", check_bytes)
}

fn encoded<T: Wire>(value: &T) -> Vec<u8> {
    let mut out = Vec::new();
    encode(value, &mut out);
    out
}

fn post(post: Post) -> Vec<u8> {
    encoded(&Message::Post { post })
}

fn call(call: Call) -> Vec<u8> {
    encoded(&Message::Call { call })
}

fn enqueue(op: StreamOp) -> Vec<u8> {
    post(Post::Enqueue { stream: StreamId(3), op })
}

/// Small messages of every shape: nested enums, lists, text, floats, options.
fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let one = Dim3 { x: 1, y: 2, z: 3 };
    let launch = Launch {
        kernel: KernelRef { module: ModuleId(1), index: 2 },
        grid: one,
        block: one,
        cluster: one,
        shared_bytes: 48,
        cooperative: true,
        params: Bytes::new(vec![9; 20]).unwrap(),
        hints: List::new(vec![LaunchHint { id: 8, value: [5; 64] }]).unwrap(),
    };
    let copy = Copy3d {
        src: Place::Mapped { addr: 1 << 45, pitch: 512, slice: 0 },
        dst: Place::Array { array: ArrayId(4), x_bytes: 4, y: 5, z: 6 },
        width: 7,
        height: 8,
        depth: 9,
    };
    let texture = Texture {
        surface: false,
        source: TextureSource::Mipmap { levels: List::new(vec![ArrayId(1), ArrayId(2)]).unwrap() },
        address: [0, 1, 2],
        filter: 1,
        flags: 2,
        border: [0.5, f32::NAN, -0.0, 1.0],
        mipmap_filter: 1,
        mipmap_bias: 0.25,
        mipmap_clamp: [0.0, 4.0],
        view_format: 0,
    };
    let image = ModuleImage { addr: 4096, len: 100 };
    let kernel = KernelInfo {
        name: Text::new("_Z3addPf".into()).unwrap(),
        params: List::new(vec![ParamInfo { offset: 0, size: 8 }]).unwrap(),
        registers: 16,
        shared_bytes: 0,
        local_bytes: 0,
        const_bytes: 0,
        max_threads_per_block: 1024,
        required_cluster: [0; 3],
        cluster_must_be_set: true,
        ptx_version: 75,
        binary_version: 75,
        unsupported: Text::default(),
    };
    let global = GlobalInfo {
        name: Text::new("table".into()).unwrap(),
        addr: 1 << 46,
        size: 64,
        constant: true,
        managed: false,
    };
    let names = vec![Text::new("first".into()).unwrap(), Text::new("second".into()).unwrap()];
    let names = KernelNames { names: List::new(names).unwrap(), more: true };
    let load_error = LoadError { code: 218, message: Text::new("line 3".into()).unwrap() };
    let device = DeviceInfo {
        name: Text::new("kedge software device".into()).unwrap(),
        uuid: [7; 16],
        pci: [0, 1, 0],
        total_memory: 1 << 30,
        exact: true,
        apart: false,
        attributes: List::new(vec![(1, 1024), (2, -1)]).unwrap(),
    };
    let parts = vec![(OutputTarget::Stderr {}, Bytes::new(b"assert".to_vec()).unwrap())];
    let hello = Hello {
        version: PROTOCOL_VERSION,
        pid: 12,
        probe_addr: 1,
        probe_value: 2,
        program: Text::new("a.out".into()).unwrap(),
        choice: DeviceChoice {
            visible: Some(Text::new("1,GPU-07".into()).unwrap()),
            pci_order: true,
        },
    };
    let versioned = [40 | 2 << 24, 0, 0, 0, 0, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat();
    let arguments = vec![
        Argument::Number { value: 1 },
        Argument::Bytes { bytes: Bytes::new(versioned).unwrap() },
    ];
    let question = Question {
        function: Text::new("nvmlDeviceGetMemoryInfo_v2".into()).unwrap(),
        arguments: List::new(arguments).unwrap(),
    };
    let results = vec![Bytes::new(vec![1, 0, 0, 0]).unwrap(), Bytes::default()];
    let answer = Answer { status: 7, results: List::new(results).unwrap() };
    let refusal = Refusal { code: 100, reason: Text::new("no device".into()).unwrap() };
    vec![
        ("question", encoded(&question)),
        ("answer", encoded(&answer)),
        ("launch", enqueue(StreamOp::Launch { launch })),
        ("copy", enqueue(StreamOp::Copy { copy })),
        (
            "copy-inline",
            enqueue(StreamOp::CopyInline { dst: 8, bytes: Bytes::new(vec![1, 2, 3]).unwrap() }),
        ),
        ("texture", call(Call::TextureCreate { ctx: CtxId(1), texture: Box::new(texture) })),
        (
            "kernel",
            call(Call::Kernel {
                module: ModuleId(2),
                index: 3,
                name: Text::new("k".into()).unwrap(),
            }),
        ),
        (
            "occupancy",
            call(Call::Occupancy {
                kernel: KernelRef { module: ModuleId(2), index: 3 },
                query: Occupancy::ActiveBlocks { threads: 256, shared: 1 << 15 },
            }),
        ),
        ("tensor-map", call(Call::TensorMapMove { map: Box::new([9; 128]), address: 1 << 46 })),
        (
            "mipmap",
            call(Call::MipmapCreate {
                ctx: CtxId(1),
                levels: List::new(vec![ArrayId(8), ArrayId(9)]).unwrap(),
                desc: ArrayDesc {
                    device: 0,
                    width: 2,
                    height: 2,
                    depth: 0,
                    format: 0x20,
                    channels: 1,
                    flags: 0,
                },
            }),
        ),
        (
            "graph-edges",
            post(Post::GraphExecEdges {
                exec: GraphExecId(1),
                edges: List::new(vec![(0, 1), (1, 2)]).unwrap(),
            }),
        ),
        (
            "module-link",
            call(Call::ModuleLink {
                ctx: CtxId(1),
                module: ModuleId(2),
                images: List::new(vec![image.clone(), image]).unwrap(),
            }),
        ),
        (
            "peer-open",
            call(Call::PeerOpen {
                handle: MemHandleId(4),
                name: PeerName { proxy: [5; 16], key: [6; 16] },
            }),
        ),
        ("imported", encoded(&Ok::<_, u32>(Imported { device: Some(1), size: Some(1 << 21) }))),
        ("stream-sync", call(Call::StreamSync { stream: StreamId(1) })),
        ("kernel-info", encoded(&Ok::<_, u32>(kernel))),
        ("kernel-names", encoded(&Ok::<_, u32>(names))),
        ("global-info", encoded(&Ok::<_, u32>(global))),
        ("load-error", encoded(&Err::<(), _>(load_error))),
        (
            "welcome",
            encoded(&Ok::<_, Refusal>(Welcome {
                driver_version: 13000,
                client_memory: true,
                devices: List::new(vec![device]).unwrap(),
            })),
        ),
        ("refusal", encoded(&Err::<Welcome, _>(refusal))),
        ("hello", encoded(&hello)),
        ("output", encoded(&Output { parts: List::new(parts).unwrap(), more: true })),
    ]
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    corpus().has(samples());
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    corpus().mutated(4000);
}
