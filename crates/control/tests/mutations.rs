//! The fuzz target's property on the committed corpus and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_control::sharing::{Identity, Share, What};
use kedge_control::usage::{DeviceUse, Usage};
use kedge_control::{check_bytes, job, keeper, machine, peer, proxy, warm};
use kedge_protocol::{MemHandleId, PeerName};
use kedge_wire::{Bytes, List, Text, Wire, encode};
use std::path::PathBuf;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/control")
}

fn encoded<T: Wire>(value: &T) -> Vec<u8> {
    let mut out = Vec::new();
    encode(value, &mut out);
    out
}

fn text<const MAX: usize>(text: &str) -> Text<MAX> {
    Text::new(text.into()).unwrap()
}

fn said(request: &str) -> Vec<u8> {
    let request = format!(r#"{{"version":{},"ask":{request}}}"#, job::VERSION);
    [&(request.len() as u32).to_le_bytes()[..], request.as_bytes()].concat()
}

/// Messages of every shape: nested enums, lists, text, options, JSON.
fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let name = PeerName { proxy: [5; 16], key: [6; 16] };
    let handle = What::Handle { handle: MemHandleId(4) };
    let known = vec![Identity::Name { name }, Identity::File { device: 1, inode: 2 }];
    let share = Share { what: handle, name: Some(name), known: List::new(known).unwrap() };
    let shares = List::new(vec![share.clone()]).unwrap();
    let released = List::new(vec![(1, 2)]).unwrap();
    let file = proxy::StoredFile {
        of: 1,
        image: text("sim-0001"),
        name: text("gpu-7.kimg"),
        bytes: 1 << 20,
        checksum: 9,
    };
    let written = proxy::WrittenFile { name: text("gpu-7.kimg"), bytes: 1 << 20, checksum: 9 };
    let device = DeviceUse { name: text("soft"), uuid: [7; 16], size: 1 << 30, used: Some(4096) };
    let usage = Usage {
        version: kedge_control::usage::VERSION,
        launches: 3,
        copies: 4,
        swapped_out: false,
        devices: List::new(vec![device]).unwrap(),
    };
    let files = List::new(vec![file]).unwrap();
    let arguments = List::new(vec![text("--fd"), text("3")]).unwrap();
    let all = proxy::Answer::WrittenAll { files: List::new(vec![written]).unwrap(), builds: true };
    vec![
        ("capture", encoded(&proxy::Order::Capture { track: true, parent: Some(8) })),
        ("files", encoded(&(3_u64, proxy::Order::Files { files }))),
        ("serve", encoded(&proxy::Order::Serve { arguments })),
        ("written", encoded(&all)),
        ("shares", encoded(&(4_u64, proxy::Answer::Shares { pid: 7, shares, released }))),
        ("share", encoded(&share)),
        ("hold", encoded(&keeper::Ask::Hold { bytes: 1, checksum: 2, on_devices: 3, parts: 4 })),
        ("for", encoded(&keeper::Ask::For { image: text("sim-0001"), file: text("gpu-7.kimg") })),
        ("no", encoded(&keeper::Reply::No { why: text("no room") })),
        ("take", encoded(&warm::Ask::Take { kind: text("{}"), wait_ms: 5 })),
        ("pools", encoded(&warm::Reply::Status { pools: text("[]") })),
        ("question", encoded(&peer::Question { version: 1, key: [3; 16] })),
        ("answer", encoded(&Ok::<_, ()>(peer::Answer { note: Bytes::new(vec![1, 2]).unwrap() }))),
        (
            "machine",
            encoded(&machine::Description {
                version: 1,
                driver: Some(Bytes::new(b"/lib/libcuda.so.1".to_vec()).unwrap()),
                gpus: 2,
                obstacle: Some(text("no driver")),
            }),
        ),
        ("usage", encoded(&usage)),
        ("checkpoint", said(r#"{"checkpoint":{"dir":"/images","codec":"raw","ahead":true}}"#)),
        ("kill", said(r#"{"swap":{"out":true}}"#)),
        ("life", said(r#""life""#)),
        (
            "session",
            br#"{"server":"gpu-server","key":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}"#.to_vec(),
        ),
    ]
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    let bless = std::env::var_os("KEDGE_BLESS").is_some();
    for (name, bytes) in samples() {
        check_bytes(&bytes);
        let path = corpus().join(name);
        if bless {
            std::fs::create_dir_all(corpus()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let kept = std::fs::read(&path).unwrap_or_default();
        assert_eq!(kept, bytes, "{name}: the encoding changed; KEDGE_BLESS=1 accepts it");
    }
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) as usize % below.max(1)
    };
    for file in std::fs::read_dir(corpus()).unwrap() {
        let seed = std::fs::read(file.unwrap().path()).unwrap();
        for at in 0..seed.len() * 8 {
            let mut bytes = seed.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            check_bytes(&bytes);
            check_bytes(&seed[..at / 8]);
        }
        for _ in 0..2000 {
            let mut bytes = seed.clone();
            for _ in 0..=random(4) {
                let at = random(bytes.len());
                let end = (at + 4).min(bytes.len());
                match random(4) {
                    0 => bytes[at..end].fill(0xff),
                    1 => bytes.insert(at, random(256) as u8),
                    2 => bytes.extend_from_within(at..end),
                    _ => bytes[at..end].fill(random(256) as u8),
                }
            }
            check_bytes(&bytes);
        }
    }
}
