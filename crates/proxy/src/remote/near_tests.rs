//! A near end whose far end breaks the rules.

use super::*;
use crate::client_memory::{ClientMemory, arena_of_tests};
use kedge_control::joblog::JobLog;
use kedge_protocol::{Copy3d, CtxId, Message, Place, Post, Shape, StreamId, StreamOp};

use kedge_wire::Text;
use std::sync::mpsc::channel;
use std::time::Duration;

/// The client is this process.
fn near() -> (Arc<Near>, mpsc::Receiver<Answer>, mpsc::Sender<Answer>) {
    let (_client, server) = kedge_transport::pair().unwrap();
    let memory = ClientMemory::new(std::process::id());
    let log = Arc::new(JobLog::none());
    let links = Links::start().unwrap();
    let mirror = Mirror::new(arena_of_tests().try_clone().unwrap());
    let near = Near {
        server: "there".into(),
        host: Arc::new(ProxyHost::new(server.outbox().clone(), memory, log, None)),
        links: links.clone(),
        aside: Mutex::new(Sending::new(Sender::new(links, Which::Aside))),
        mirror: Mutex::new(Mirrored { mirror, told: 0 }),
        shared: AtomicBool::new(false),
        ticker: Arc::default(),
        sent: AtomicU64::new(10),
        completed: AtomicU64::new(0),
        works: AtomicU64::new(0),
        writes: AtomicU64::new(0),
        asked: [const { AtomicBool::new(false) }; SLOTS],
        exports: [const { AtomicBool::new(false) }; SLOTS],
        socket: server.socket().try_clone_to_owned().unwrap(),
        ordered: AtomicU32::new(0),
        named: Mutex::default(),
        lent: Lent::default(),
        broken: AtomicU32::new(0),
        lanes: NearLanes::default(),
    };
    let (answer, answers) = channel();
    (Arc::new(near), answers, answer)
}

fn enqueue(near: &Near, seq: u64, op: StreamOp) {
    let message = Message::Post { post: Post::Enqueue { stream: StreamId(1), op } };
    locked(&near.named).add(seq, &message);
}

/// A copy of private memory to a device, or the other way.
fn copy(own: u64, len: usize, to_device: bool) -> StreamOp {
    let own = Place::Client { addr: own, pitch: 0, slice: 0 };
    let device = Place::Mapped { addr: 0x4000_0000_0000, pitch: 0, slice: 0 };
    let (src, dst) = if to_device { (own, device) } else { (device, own) };
    StreamOp::Copy { copy: Copy3d::new(src, dst, Shape::line(len as u64)) }
}

#[test]
fn a_far_end_reads_and_writes_what_messages_name() {
    let (near, _answers, answer) = near();
    let (given, secret, mut result) = ([1u8; 64], [2u8; 64], [0u8; 64]);
    let (at, of) = (|bytes: &[u8; 64]| bytes.as_ptr() as u64, |seq| ToNear::Completed { seq });
    enqueue(&near, 1, copy(at(&given), 64, true));
    let into = result.as_mut_ptr() as u64;
    enqueue(&near, 2, copy(into, 64, false));
    let read = |addr, len| near.heard(ToNear::Read { number: 1, addr, len }, &answer);
    let write = |addr, len: usize| {
        let bytes = Bytes::new(vec![7; len]).unwrap();
        near.heard(ToNear::Write { addr, bytes }, &answer)
    };
    read(at(&given), 64).unwrap();
    write(into, 64).unwrap();
    // SAFETY: the array is this test's; it is written behind the compiler's back.
    assert_eq!(unsafe { std::ptr::read_volatile(&raw const result) }, [7; 64]);
    assert!(read(at(&secret), 1).unwrap_err().contains("no message names"));
    assert!(read(at(&given), 65).is_err());
    assert!(write(at(&secret), 1).unwrap_err().contains("no message names"));
    assert!(write(at(&given), 1).is_err(), "it is read alone");
    near.heard(of(1), &answer).unwrap();
    assert!(read(at(&given), 1).is_err(), "its message is complete");
    write(into, 1).unwrap();
    assert!(near.heard(of(11), &answer).is_err(), "it was not sent");
    assert_eq!(secret, [2; 64]);
}

#[test]
fn a_far_end_calls_host_functions_that_messages_name() {
    let (near, _answers, answer) = near();
    enqueue(&near, 1, StreamOp::HostFn { token: 5 });
    let call = |token| near.heard(ToNear::HostFn { token }, &answer);
    call(5).unwrap();
    assert!(call(5).unwrap_err().contains("no message names"));
    assert!(call(6).is_err());
}

#[test]
fn a_far_end_cannot_fill_this_end_s_memory() {
    let (near, answers, answer) = near();
    let told = || near.heard(ToNear::Answer { answer: Answer::Yes {} }, &answer);
    assert!(told().is_err());
    near.ordered.store(1, Ordering::SeqCst);
    told().unwrap();
    assert!(told().is_err());
    assert_eq!(answers.try_iter().count(), 1);
    let broken = |ctx| near.heard(ToNear::Sticky { ctx: CtxId(ctx), error: 700 }, &answer);
    assert!((0..=MAX_BROKEN).any(|ctx| broken(ctx).is_err()));
    let why = Text::truncated("gone".into());
    assert_eq!(near.heard(ToNear::Closed { why }, &answer), Err("gone".into()));
}

/// Whoever asks again and again and takes no answer waits.
#[test]
fn answers_that_are_not_taken_are_bounded() {
    let (near, _answers, answer) = near();
    let given = vec![1u8; CHUNK];
    enqueue(&near, 1, copy(given.as_ptr() as u64, CHUNK, true));
    let (asks, addr) = (near.clone(), given.as_ptr() as u64);
    let (count, asked) = mpsc::channel();
    let hears = std::thread::spawn(move || {
        let read = |number| ToNear::Read { number, addr, len: CHUNK as u32 };
        (0..1000).all(|number| asks.heard(read(number), &answer).is_ok() && count.send(()).is_ok())
    });
    // The link keeps 32 MiB and what made them more.
    let so_many = asked.iter().take(32).count();
    assert_eq!(so_many, 32);
    assert!(asked.recv_timeout(Duration::from_millis(300)).is_err(), "it waits");
    near.links.end();
    assert!(!hears.join().unwrap());
}
