use super::*;

const CTX: CtxId = CtxId(1);
const A: u32 = 1;
const B: u32 = 2;
const MAIN: Thread = 7;
const OTHER: Thread = 8;

fn member(stream: u32) -> Member {
    Member { stream: StreamId(stream), ctx: CTX, blocking: true }
}

fn begin(captures: &mut Captures, stream: u32, mode: Mode) {
    let begin = Begin { mode, thread: MAIN, graph: CUgraph(90), borrowed: false, tips: Vec::new() };
    captures.begin(member(stream), begin).unwrap();
}

/// Appends node `n` to `stream` as a launch would.
fn work(captures: &mut Captures, stream: u32, n: usize) -> Result<Vec<usize>, CuError> {
    let before = captures.tips(StreamId(stream))?.1.iter().map(|e| e.node.0).collect();
    captures.set_tips(StreamId(stream), vec![CUgraphNode(n).into()])?;
    Ok(before)
}

fn end(captures: &mut Captures, stream: u32, joined: &[usize]) -> Result<(), CuError> {
    let joined = joined.iter().map(|&n| CUgraphNode(n)).collect();
    captures.end(StreamId(stream), MAIN, |_, _| joined)?.outcome
}

#[test]
fn nodes_of_one_stream_follow_each_other() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    assert_eq!(work(&mut captures, A, 1), Ok(vec![]));
    assert_eq!(work(&mut captures, A, 2), Ok(vec![1]));
    assert_eq!(end(&mut captures, A, &[]), Ok(()));
    assert!(!captures.is_capturing(StreamId(A)) && captures.len() == 0);
}

#[test]
fn a_stream_joins_by_waiting_for_a_captured_event_and_must_be_joined_back() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    work(&mut captures, A, 1).unwrap();
    let fork = captures.mark(StreamId(A)).unwrap();
    assert_eq!(captures.wait(member(B), Some(&fork)), Ok(true));
    assert_eq!(work(&mut captures, B, 2), Ok(vec![1]));
    work(&mut captures, A, 3).unwrap();
    let join = captures.mark(StreamId(B)).unwrap();
    assert_eq!(captures.wait(member(A), Some(&join)), Ok(true));
    assert_eq!(work(&mut captures, A, 4), Ok(vec![3, 2]));
    assert_eq!(end(&mut captures, A, &[1, 2, 3, 4]), Ok(()));
    assert!(!captures.is_capturing(StreamId(B)));
}

#[test]
fn an_unjoined_branch_fails_the_end_and_ends_the_capture() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    let fork = captures.mark(StreamId(A)).unwrap();
    captures.wait(member(B), Some(&fork)).unwrap();
    work(&mut captures, B, 2).unwrap();
    assert_eq!(end(&mut captures, A, &[]), Err(CuError::STREAM_CAPTURE_UNJOINED));
    assert!(!captures.is_capturing(StreamId(A)) && !captures.is_capturing(StreamId(B)));
}

#[test]
fn two_captures_do_not_merge() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    begin(&mut captures, B, Mode::Global);
    let mark = captures.mark(StreamId(A)).unwrap();
    assert_eq!(captures.wait(member(B), Some(&mark)), Err(CuError::STREAM_CAPTURE_MERGE));
    for stream in [A, B] {
        let end = end(&mut captures, stream, &[]);
        assert_eq!(end, Err(CuError::STREAM_CAPTURE_INVALIDATED));
    }
}

#[test]
fn an_event_from_outside_does_not_enter() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Relaxed);
    assert_eq!(captures.wait(member(A), None), Err(CuError::STREAM_CAPTURE_ISOLATION));
    assert_eq!(work(&mut captures, A, 1), Err(CuError::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(captures.wait(member(B), None), Ok(false), "no capture: an ordinary wait");
}

#[test]
fn an_event_of_an_ended_capture_is_of_no_use() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    let mark = captures.mark(StreamId(A)).unwrap();
    end(&mut captures, A, &[]).unwrap();
    assert_eq!(captures.wait(member(B), Some(&mark)), Err(CuError::CAPTURED_EVENT));
}

#[test]
fn only_the_origin_ends_and_only_its_thread_unless_relaxed() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::ThreadLocal);
    let wrong = captures.end(StreamId(A), OTHER, |_, _| HashSet::new()).unwrap();
    assert_eq!(wrong.outcome, Err(CuError::STREAM_CAPTURE_WRONG_THREAD));
    assert_eq!(end(&mut captures, A, &[]), Err(CuError::ILLEGAL_STATE), "it is over");
    begin(&mut captures, A, Mode::Relaxed);
    assert!(captures.end(StreamId(A), OTHER, |_, _| HashSet::new()).unwrap().outcome.is_ok());

    begin(&mut captures, A, Mode::Global);
    let fork = captures.mark(StreamId(A)).unwrap();
    captures.wait(member(B), Some(&fork)).unwrap();
    assert_eq!(end(&mut captures, B, &[]), Err(CuError::STREAM_CAPTURE_UNMATCHED));
    assert_eq!(end(&mut captures, A, &[]), Err(CuError::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(end(&mut captures, A, &[]), Err(CuError::ILLEGAL_STATE));
}

#[test]
fn unsafe_calls_are_refused_by_mode_and_thread() {
    let refused = |capture: Mode, thread: Thread, own: Mode| {
        let mut captures = Captures::default();
        begin(&mut captures, A, capture);
        let refused = captures.check_unsafe(thread, own).is_err();
        assert_eq!(
            work(&mut captures, A, 1).is_err(),
            refused,
            "a refused call spoils the capture"
        );
        refused
    };
    use Mode::{Global, Relaxed, ThreadLocal};
    assert!(refused(Global, MAIN, Global) && refused(Global, OTHER, Global));
    assert!(refused(ThreadLocal, MAIN, Global) && !refused(ThreadLocal, OTHER, Global));
    assert!(!refused(Relaxed, MAIN, Global) && !refused(Relaxed, OTHER, Global));
    assert!(refused(Global, MAIN, ThreadLocal) && !refused(Global, OTHER, ThreadLocal));
    assert!(!refused(Global, MAIN, Relaxed));
}

#[test]
fn the_legacy_stream_is_closed_while_a_blocking_stream_captures() {
    let mut captures = Captures::default();
    let begin = Begin {
        mode: Mode::Relaxed,
        thread: MAIN,
        graph: CUgraph(90),
        borrowed: false,
        tips: Vec::new(),
    };
    captures.begin(Member { blocking: false, ..member(A) }, begin).unwrap();
    assert_eq!(captures.check_legacy(CTX), Ok(()), "a non-blocking stream is not in the way");
    assert_eq!(captures.check_legacy(CtxId(2)), Ok(()));
    let fork = captures.mark(StreamId(A)).unwrap();
    captures.wait(member(B), Some(&fork)).unwrap();
    assert!(captures.legacy_is_closed(CTX) && captures.tips(StreamId(A)).is_ok());
    assert_eq!(captures.check_legacy(CTX), Err(CuError::STREAM_CAPTURE_IMPLICIT));
    assert_eq!(work(&mut captures, A, 1), Err(CuError::STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn waiting_for_a_capturing_stream_spoils_its_capture() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Relaxed);
    assert_eq!(captures.check_stream(StreamId(B)), Ok(()));
    assert_eq!(captures.check_stream(StreamId(A)), Err(CuError::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(end(&mut captures, A, &[]), Err(CuError::STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn destroying_the_origin_gives_the_graph_back() {
    let mut captures = Captures::default();
    begin(&mut captures, A, Mode::Global);
    let fork = captures.mark(StreamId(A)).unwrap();
    captures.wait(member(B), Some(&fork)).unwrap();
    assert_eq!(captures.stream_destroyed(StreamId(A)), Some(CUgraph(90)));
    assert!(captures.len() == 0 && !captures.is_capturing(StreamId(B)));
    assert_eq!(captures.stream_destroyed(StreamId(A)), None);
}

#[test]
fn a_branch_may_go_once_it_is_joined() {
    for joined in [true, false] {
        let mut captures = Captures::default();
        begin(&mut captures, A, Mode::Global);
        let fork = captures.mark(StreamId(A)).unwrap();
        captures.wait(member(B), Some(&fork)).unwrap();
        work(&mut captures, B, 2).unwrap();
        if joined {
            let join = captures.mark(StreamId(B)).unwrap();
            captures.wait(member(A), Some(&join)).unwrap();
        }
        assert_eq!(captures.stream_destroyed(StreamId(B)), None);
        let expected = if joined { Ok(()) } else { Err(CuError::STREAM_CAPTURE_UNJOINED) };
        assert_eq!(end(&mut captures, A, if joined { &[2] } else { &[] }), expected);
    }
}
