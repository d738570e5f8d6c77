//! What runs after what.

use super::fixture::{A, B, CTX, FREE, Fixture, LEGACY, wait, word};
use kedge_cuda_types::CuError;
use kedge_device::Backend;
use kedge_protocol::{EventId, GraphExecId, StreamId, StreamOp};
use std::sync::mpsc;

const EVENT: EventId = EventId(1);
const OTHER: EventId = EventId(2);

#[test]
fn a_stream_keeps_its_order_and_others_go_on() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.hold(A, words);
    f.set(A, words + 4);
    f.set(B, words + 8);
    assert_eq!((word(words + 4), word(words + 8)), (0, 1));
    assert_eq!(f.backend.query_stream(A), Err(CuError::NOT_READY));
    assert_eq!(f.backend.query_stream(B), Ok(()));
    assert!(!f.backend.is_idle());
    f.set(B, words);
    assert_eq!(f.sync(A), Ok(()));
    assert_eq!(word(words + 4), 1);
    assert!(f.backend.is_idle());
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_only() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.hold(A, words);
    f.set(LEGACY, words + 4);
    f.set(B, words + 8);
    f.set(FREE, words + 12);
    assert_eq!([word(words + 4), word(words + 8), word(words + 12)], [0, 0, 1]);
    assert_eq!(f.backend.query_stream(B), Err(CuError::NOT_READY));
    f.set(FREE, words);
    assert_eq!(f.sync_context(), Ok(()));
    assert_eq!([word(words + 4), word(words + 8)], [1, 1]);
}

#[test]
fn a_destroyed_stream_s_work_goes_on_and_the_legacy_stream_waits_for_it() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.hold(A, words);
    f.set(A, words + 4);
    f.backend.destroy_stream(A).unwrap();
    assert_eq!(f.backend.destroy_stream(A), Err(CuError::INVALID_HANDLE));
    f.set(LEGACY, words + 8);
    assert_eq!(word(words + 8), 0);
    f.set(FREE, words);
    assert_eq!(f.sync(LEGACY), Ok(()));
    assert_eq!([word(words + 4), word(words + 8)], [1, 1]);
}

#[test]
fn an_event_stands_for_its_latest_record() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.backend.create_event(EVENT, CTX, true, false).unwrap();
    assert_eq!(f.backend.query_event(EVENT), Ok(()), "never recorded: done");
    f.submit(FREE, StreamOp::EventWait { event: EVENT });
    f.hold(A, words);
    f.submit(A, StreamOp::EventRecord { event: EVENT });
    f.submit(FREE, StreamOp::EventWait { event: EVENT });
    f.set(FREE, words + 4);
    assert_eq!(f.backend.query_event(EVENT), Err(CuError::NOT_READY));
    assert_eq!(word(words + 4), 0);
    let (sender, receiver) = mpsc::channel();
    f.backend.when_event_done(EVENT, Box::new(move |result| sender.send(result).unwrap()));
    f.set(StreamId(LEGACY.0 + 2), words);
    assert_eq!(wait(&receiver), Ok(()));
    assert_eq!(f.sync(FREE), Ok(()));
    assert_eq!(word(words + 4), 1);
    assert_eq!(f.backend.query_event(EVENT), Ok(()));
}

#[test]
fn elapsed_time_needs_two_reached_records() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.backend.create_event(EVENT, CTX, true, false).unwrap();
    f.backend.create_event(OTHER, CTX, true, false).unwrap();
    assert_eq!(f.backend.elapsed_ms(EVENT, OTHER), Err(CuError::INVALID_HANDLE));
    f.submit(A, StreamOp::EventRecord { event: EVENT });
    f.hold(A, words);
    f.submit(A, StreamOp::EventRecord { event: OTHER });
    assert_eq!(f.backend.elapsed_ms(EVENT, OTHER), Err(CuError::NOT_READY));
    std::thread::sleep(std::time::Duration::from_millis(5));
    f.set(FREE, words);
    f.sync(A).unwrap();
    let elapsed = f.backend.elapsed_ms(EVENT, OTHER).unwrap();
    assert!((5.0..5000.0).contains(&elapsed), "{elapsed}");
}

#[test]
fn a_host_function_holds_its_stream() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.submit(A, StreamOp::HostFn { token: 7 });
    f.set(A, words);
    let (token, done) = f.host.functions.lock().unwrap().pop().unwrap();
    assert_eq!((token, word(words)), (7, 0));
    done(Ok(()));
    assert_eq!(word(words), 1);
}

#[test]
fn a_chain_of_a_million_operations_needs_no_stack() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    f.hold(A, words);
    for _ in 0..1_000_000 {
        f.submit(A, StreamOp::Empty {});
    }
    f.set(FREE, words);
    assert_eq!(f.sync(A), Ok(()));
}

#[test]
fn a_graph_that_is_not_ready_is_not_launched() {
    let f = Fixture::new();
    let exec = GraphExecId(1);
    f.backend.graph_begin(exec, CTX).unwrap();
    let launched = f.backend.submit(B, StreamOp::GraphLaunch { exec });
    assert_eq!(launched, Err(CuError::ILLEGAL_STATE));
    assert_eq!(*f.host.faults.lock().unwrap(), [(CTX, CuError::ILLEGAL_STATE)]);
}

#[test]
fn a_graph_runs_by_its_edges_and_never_twice_at_once() {
    let f = Fixture::new();
    let words = f.alloc(0, 4096);
    let exec = GraphExecId(1);
    let write = |addr| StreamOp::WriteValue { addr, value: 1, wide: false };
    let hold = StreamOp::WaitValue { addr: words, value: 1, wide: false, mode: 1 };
    f.backend.graph_begin(exec, CTX).unwrap();
    for op in [write(words + 4), hold, write(words + 8)] {
        f.backend.graph_node(exec, op).unwrap();
    }
    f.backend.graph_edges(exec, &[(1, 0)]).unwrap();
    f.backend.graph_ready(exec, false).unwrap();
    f.submit(A, StreamOp::GraphLaunch { exec });
    assert_eq!([word(words + 4), word(words + 8)], [0, 1], "a root runs, a successor waits");
    f.backend.graph_update(exec, 2, write(words + 12)).unwrap();
    f.submit(FREE, StreamOp::GraphLaunch { exec });
    f.set(FREE, words + 16);
    assert_eq!([word(words + 12), word(words + 16)], [0, 0], "the second launch waits");
    f.set(B, words);
    assert_eq!(f.sync_context(), Ok(()));
    let after: Vec<u32> = (1..=4).map(|index| word(words + 4 * index)).collect();
    assert_eq!(after, [1, 1, 1, 1]);
}
