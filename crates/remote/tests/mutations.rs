//! The fuzz target's property on the committed corpus and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_protocol::{Call, DeviceChoice, Message, PROTOCOL_VERSION, Post, StreamId};
use kedge_remote::{
    Accepted, Answer, Aside, Ask, Drained, FileBytes, HandedOver, Handover, ImageAsk, MAGIC, Offer,
    Opening, Purpose, ReadFile, Refused, Start, StoredFile, Terms, ToFar, ToNear, ToTaker, VERSION,
    check_bytes,
};
use kedge_test_corpus::Corpus;
use kedge_wire::{Bytes, List, Text, Wire, encode};

/// Bytes of a message of which each bit is changed.
const MAX_BYTES: usize = 200;

fn corpus() -> Corpus {
    Corpus::of("remote", check_bytes)
}

fn encoded<T: Wire>(value: &T) -> Vec<u8> {
    let mut out = Vec::new();
    encode(value, &mut out);
    out
}

/// As it goes on a line: its length first.
fn framed<T: Wire>(value: &T) -> Vec<u8> {
    let message = encoded(value);
    [&(message.len() as u32).to_le_bytes()[..], &message].concat()
}

fn text<const MAX: usize>(text: &str) -> Text<MAX> {
    Text::new(text.into()).unwrap()
}

fn bytes<const MAX: usize>(bytes: &[u8]) -> Bytes<MAX> {
    Bytes::new(bytes.to_vec()).unwrap()
}

/// Messages of every shape, and frames in a row.
fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let hand = Handover { link: 1, generation: 2, arrived: 3 };
    let devices = List::new(vec![0, 1]).unwrap();
    let opening = |purpose| {
        encoded(&Opening { magic: MAGIC, version: VERSION, protocol: PROTOCOL_VERSION, purpose })
    };
    let start = Start {
        program: text("a.out"),
        choice: DeviceChoice { visible: Some(text("0")), pci_order: true },
        windows: List::new(vec![1]).unwrap(),
        reconnect_ms: 5000,
        restore: false,
    };
    let sync = Message::Call { call: Call::StreamSync { stream: StreamId(1) } };
    let end = Message::Post { post: Post::StreamDestroy { stream: StreamId(1) } };
    let call = ToFar::Message { seq: 7, to: Some(1), message: sync };
    let post = ToFar::Message { seq: 8, to: None, message: end };
    let stored = StoredFile { name: text("gpu-7.kimg"), bytes: 1 << 20, checksum: 9 };
    let paths = List::new(vec![text("/a=/b")]).unwrap();
    let hello = ToTaker::Hello { job: text("sim"), build: text("0.1.0"), paths, secret: [3; 32] };
    let (session, job) = ([1; 16], [2; 16]);
    vec![
        ("session", opening(Purpose::Session { session, attempt: 1, job, devices })),
        ("join", opening(Purpose::Join { session, hand })),
        ("take-job", opening(Purpose::TakeJob { token: session })),
        ("accepted", encoded(&Ok::<_, Refused>(Accepted { arrived: 4 }))),
        ("offer", encoded(&Ok::<_, Refused>(Offer {}))),
        ("refused", encoded(&Err::<Offer, _>(Refused { why: text("full") }))),
        ("link", encoded(&HandedOver::Link { hand })),
        ("terms", encoded(&Terms { slot: 1, memory: Some(1 << 30), bandwidth: None })),
        ("start", encoded(&start)),
        ("call", encoded(&call)),
        ("to-far", [framed(&post), framed(&ToFar::Patched { count: 3 }), framed(&call)].concat()),
        ("staged", encoded(&ToFar::Staged { addr: 4096, bytes: bytes(b"code") })),
        ("rest", encoded(&ToFar::Ask { ask: Ask::Rest { within_ms: 50 } })),
        ("aside", encoded(&Aside::Bytes { number: 1, bytes: Ok(bytes(b"abc")) })),
        ("restore", encoded(&ImageAsk::Restore { files: List::new(vec![stored]).unwrap() })),
        ("piece", framed(&Drained::Piece { offset: 4096, bytes: bytes(b"page") })),
        ("read-file", encoded(&ReadFile { file: 1, offset: 2, len: 3 })),
        ("file-bytes", encoded::<FileBytes>(&Ok(bytes(b"abc")))),
        ("reply", encoded(&ToNear::Reply { to: 1, bytes: bytes(b"reply") })),
        (
            "to-near",
            [
                framed(&ToNear::Completed { seq: 7 }),
                framed(&ToNear::Answer { answer: Answer::Failed { why: text("no room") } }),
                framed(&ToNear::Line { text: text("hello") }),
            ]
            .concat(),
        ),
        ("hello", encoded(&hello)),
        ("file", encoded(&ToTaker::File { name: text("7.kimg"), bytes: 1 << 20 })),
    ]
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    corpus().has(samples());
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    corpus().each_bit(MAX_BYTES);
    corpus().mutated(1000);
}
