//! The fuzz target's property on the committed corpus and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_control::sharing::{Identity, Share, What};
use kedge_control::usage::{DeviceUse, Usage};
use kedge_control::{check_bytes, job, keeper, machine, peer, proxy, warm};
use kedge_protocol::{MemHandleId, PeerName};
use kedge_test_corpus::Corpus;
use kedge_wire::{Bytes, List, Text, Wire, encode};

fn corpus() -> Corpus {
    Corpus::of("control", check_bytes)
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
    corpus().has(samples());
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    corpus().each_bit(usize::MAX);
    corpus().mutated(2000);
}
