//! What earlier builds wrote of a client's devices is read: of this version and of the one before.
//!
//! `golden/vN.kimg` is the sample below, written by the last build whose version was N: by this
//! test with KEDGE_BLESS=1, which writes the file of the version that it is built with. Whoever
//! raises the version leaves the file of the version before as it is.
#![forbid(unsafe_code)]

use kedge_control::sharing::{Bond, What};
use kedge_gpu_image::{SECTION, SavedObject, SavedProxy, SavedSharing, SavedStep, VERSION, read};
use kedge_image::{Choice, ImageFile, ImageWriter, encode};
use kedge_protocol::*;
use kedge_wire::{Bytes, List, Text};
use std::fs;
use std::path::PathBuf;

/// The bytes of the sample's memory.
const CONTENT: [u8; 4096] = [7; 4096];
const OBJECT: u64 = 1;

fn golden(version: u32) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("v{version}.kimg"))
}

fn text<const MAX: usize>(text: &str) -> Text<MAX> {
    Text::new(text.into()).unwrap()
}

fn list<T, const MAX: usize>(values: Vec<T>) -> List<T, MAX> {
    List::new(values).unwrap()
}

fn device(index: u8, exact: bool) -> DeviceInfo {
    DeviceInfo {
        name: text("a device"),
        uuid: [index; 16],
        pci: [0, i32::from(index), 0],
        total_memory: 1 << 30,
        exact,
        apart: false,
        attributes: list(vec![(1, 1024), (2, -1)]),
    }
}

fn steps() -> Vec<SavedStep> {
    let (ctx, module, legacy) = (CtxId(1), ModuleId(5), StreamId(1));
    let create = Call::CtxCreate { ctx, device: 0, legacy };
    let stream = Post::StreamCreate { stream: StreamId(2), ctx, blocking: true, priority: -1 };
    vec![
        SavedStep::Message { message: Message::Call { call: create }, result: 0 },
        SavedStep::Message { message: Message::Post { post: stream }, result: 3 },
        SavedStep::Module { ctx, module, image: 2 },
        SavedStep::Linked { ctx, module: ModuleId(6), images: list(vec![2, 2]) },
    ]
}

/// Something of every kind that there is in the format.
fn sample() -> SavedProxy {
    let choice = DeviceChoice { visible: Some(text("0,1")), pci_order: true };
    let hello = Hello {
        version: 8,
        pid: 77,
        probe_addr: 4096,
        probe_value: 5,
        program: text("a program"),
        choice,
    };
    let parts = vec![(OutputTarget::Stderr {}, Bytes::new(b"printed".to_vec()).unwrap())];
    let name = PeerName { proxy: [3; 16], key: [4; 16] };
    let objects = vec![
        (OBJECT, SavedObject::Memory { start: 1 << 46, bytes: 4096 }),
        (2, SavedObject::Image { bytes: 100 }),
        (3, SavedObject::Variable { module: ModuleId(5), name: text("x"), start: 8, bytes: 4 }),
        (4, SavedObject::Array { array: ArrayId(9), start: 0, bytes: 64 }),
        (5, SavedObject::Handle { handle: MemHandleId(2), start: 0, bytes: 4096 }),
        (6, SavedObject::Arena { start: 4096, bytes: 8192 }),
    ];
    SavedProxy {
        version: VERSION,
        gpu: text("soft:2"),
        hello,
        driver_version: 13_000,
        client_memory: true,
        devices: list(vec![device(1, true), device(2, false)]),
        position: 12_345,
        faults: list(vec![(CtxId(1), 700)]),
        output: list(vec![Output { parts: list(parts), more: false }]),
        objects: list(objects),
        steps: list(steps()),
        notes: Bytes::new(vec![1, 2, 3]).unwrap(),
        sharing: SavedSharing {
            proxy: Some([3; 16]),
            lends: list(vec![(What::Slab { addr: 1 << 46 }, [4; 16])]),
            borrows: list(vec![Bond { what: What::Event { event: EventId(3) }, name }]),
        },
    }
}

fn section(saved: &SavedProxy) -> Vec<u8> {
    let mut bytes = Vec::new();
    kedge_wire::encode(saved, &mut bytes);
    bytes
}

fn write(version: u32) {
    let path = golden(version);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // A writer makes new files alone.
    let _ = fs::remove_file(&path);
    let writer = ImageWriter::create(&path).unwrap();
    writer.section(SECTION, &section(&sample())).unwrap();
    writer.memory(OBJECT, 0, 4096, &encode(&CONTENT, Choice::Lz4)).unwrap();
    writer.finish().unwrap();
}

fn is_the_sample(version: u32) {
    let file = ImageFile::open(&golden(version), None).unwrap();
    assert_eq!(
        u32::from_le_bytes(file.section(SECTION).unwrap()[..4].try_into().unwrap()),
        version
    );
    assert_eq!(read(&file).unwrap(), sample(), "version {version}");
    let mut content = [0; 4096];
    file.read(&file.memory_of(OBJECT)[0], &mut Vec::new(), &mut content).unwrap();
    assert_eq!(content, CONTENT);
}

#[test]
fn this_version_is_written_as_ever() {
    if std::env::var_os("KEDGE_BLESS").is_some() {
        write(VERSION);
    }
    is_the_sample(VERSION);
    let kept = ImageFile::open(&golden(VERSION), None).unwrap().section(SECTION).unwrap();
    assert_eq!(kept, section(&sample()), "the format changed: raise VERSION, then KEDGE_BLESS=1");
}

#[test]
fn the_version_before_is_read() {
    is_the_sample(VERSION - 1);
}

#[test]
fn others_are_refused_by_number() {
    for version in [VERSION - 2, VERSION + 1] {
        let path =
            std::env::temp_dir().join(format!("kedge-golden-{version}-{}", std::process::id()));
        let writer = ImageWriter::create(&path).unwrap();
        writer.section(SECTION, &section(&SavedProxy { version, ..sample() })).unwrap();
        writer.finish().unwrap();
        let said = read(&ImageFile::open(&path, None).unwrap()).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert!(said.contains(&format!("of version {version};")), "{said}");
    }
}
